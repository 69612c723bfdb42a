//! Users and groups of a volume with limits: their own limits, and what they use.
//!
//! Oracles: no user and no group has more bytes than its limit allowed at some time, unless the superuser
//! gave it a file. In the end the usage of each is that of its files, all of a user's limit can be used, and
//! the users of each volume together have the volume's usage, as its groups have.

use crate::calls::{close, names_in, root_cred};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, OpenMode};
use weir_env::{Rng, sim::World};
use weir_proto::meta::Cred;
use weir_proto::quota::{DEFAULT_ID, Holder, ListOf, OwnerKind, OwnerUsage};
use weir_proto::volume::{Quota, Volume};
use weir_proto::{ErrorKind, Result, VolumeId};

/// User 0 has no limits; these have.
const USERS: u32 = 3;
const GROUPS: u32 = 2;
const WRITE_BYTES: usize = 100_000;
const POLL_EVERY: Duration = Duration::from_secs(1);

/// The user of a new file: the superuser or another one.
pub fn some_cred(rng: &Rng) -> Cred {
    let uid = rng.below(u64::from(USERS) + 1) as u32;
    cred_of(uid)
}
fn cred_of(uid: u32) -> Cred {
    let gid = if uid == 0 { 0 } else { 50 + uid % GROUPS };
    Cred { uid, gid, groups: vec![gid] }
}

/// The largest limit that each had; `u64::MAX`: it may have more.
#[derive(Default)]
pub struct Owners {
    most: Mutex<BTreeMap<(OwnerKind, u32), u64>>,
}

impl Owners {
    fn most(&self) -> MutexGuard<'_, BTreeMap<(OwnerKind, u32), u64>> {
        self.most.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn raise(&self, kind: OwnerKind, id: u32, bytes: u64) {
        let mut most = self.most();
        let most = most.entry((kind, id)).or_insert(bytes);
        *most = (*most).max(bytes);
    }

    /// The first limits of a volume to which no client has written.
    pub async fn begin(&self, client: &Client, volume: VolumeId, bytes: u64, rng: &Rng) -> Result<()> {
        let (each, of_group, gid) = (1 + rng.below(bytes), 1 + rng.below(bytes), cred_of(1).gid);
        (1..=USERS).for_each(|uid| self.raise(OwnerKind::User, uid, each));
        self.raise(OwnerKind::Group, gid, of_group);
        let set_both = async {
            set(client, user_of(volume, DEFAULT_ID), Some(each)).await?;
            set(client, Holder { volume, kind: OwnerKind::Group, id: gid }, Some(of_group)).await
        };
        // They may not be set: then nothing is limited.
        set_both.await.inspect_err(|_| self.most().values_mut().for_each(|most| *most = u64::MAX))
    }
    /// Sets or removes the limit of one user.
    pub async fn change(&self, client: &Client, volume: VolumeId, bytes: u64, rng: &Rng) -> Result<()> {
        self.check(client, volume, "meanwhile").await?;
        let uid = 1 + rng.below(USERS.into()) as u32;
        if rng.below(4) == 0 {
            return set(client, user_of(volume, uid), None).await;
        }
        self.raise(OwnerKind::User, uid, bytes);
        set(client, user_of(volume, uid), Some(bytes)).await
    }
    /// The superuser is about to give a file to that user and its group.
    pub fn will_own(&self, cred: &Cred) {
        self.raise(OwnerKind::User, cred.uid, u64::MAX);
        self.raise(OwnerKind::Group, cred.gid, u64::MAX);
    }

    pub async fn check(&self, client: &Client, volume: VolumeId, when: &str) -> Result<()> {
        let rows = rows(client, volume).await?;
        for row in &rows {
            let most = self.most().get(&(row.holder.kind, row.holder.id)).copied().unwrap_or(u64::MAX);
            // Files of user 0 count for a group and are held to no limit.
            let is_checked = row.holder.kind == OwnerKind::User || row.holder.id != 0;
            assert!(!is_checked || row.bytes <= most, "{when}: {row:?} has more than {most} bytes");
        }
        Ok(())
    }

    /// In the end, when nothing is written: each has what its files have.
    pub async fn verify(&self, client: &Client, volume: &Volume, when: &str) -> Result<()> {
        let mut expected: BTreeMap<(OwnerKind, u32), (u64, u64)> = BTreeMap::new();
        for name in names_in(client, volume.root).await? {
            let found = client.lookup(&root_cred(), volume.root, name.as_bytes()).await?;
            let attr = found.unwrap_or_else(|| panic!("{when}: {name} was just listed")).attr;
            for of in [(OwnerKind::User, attr.uid), (OwnerKind::Group, attr.gid)] {
                let (bytes, inodes) = expected.entry(of).or_default();
                (*bytes, *inodes) = (*bytes + attr.allocated, *inodes + 1);
            }
        }
        let rows = rows(client, volume.id).await?;
        let has = rows.iter().map(|r| ((r.holder.kind, r.holder.id), (r.bytes, r.inodes)));
        let has: BTreeMap<_, _> = has.filter(|(_, used)| *used != (0, 0)).collect();
        assert_eq!(has, expected, "{when}: usage of users and groups of {}", volume.name);
        Ok(())
    }

    /// A user can use all of its limit: no reservation is left over. The volume has no limit meanwhile.
    pub async fn fill(
        &self,
        world: &World,
        client: &Client,
        volume: &Volume,
        until: weir_env::Instant,
    ) -> Result<()> {
        let user = cred_of(2);
        let holder = user_of(volume.id, user.uid);
        let used = usage_of(client, holder).await?;
        let limit = used + 150_000;
        set(client, holder, Some(limit)).await?;
        let name = b"fills a user's";
        let made = client.create(&user, volume.root, name, 0o644, true, OpenMode::BOTH).await?;
        let mut at = 0;
        loop {
            match client.write(made.handle, at, Bytes::from(vec![7; WRITE_BYTES])).await {
                Ok(written) => at += written as u64,
                Err(e) if e.kind == ErrorKind::OverQuota => {
                    client.fsync(made.handle).await?;
                    let used = usage_of(client, holder).await?;
                    if used == limit {
                        break;
                    }
                    let what = format!("user {} has {used} bytes of {limit} and may have no more", user.uid);
                    assert!(used < limit && world.now() < until, "{what}: {e}");
                    world.sleep(POLL_EVERY).await;
                }
                Err(e) => return Err(e.doing(format_args!("fill the limit of a user of {}", volume.name))),
            }
        }
        close(client, made.handle).await?;
        client.unlink(&root_cred(), volume.root, name).await.map(drop)
    }
}

fn user_of(volume: VolumeId, uid: u32) -> Holder {
    Holder { volume, kind: OwnerKind::User, id: uid }
}

async fn set(client: &Client, holder: Holder, bytes: Option<u64>) -> Result<()> {
    let quota = bytes.map(|bytes| Quota { bytes_hard: Some(bytes), ..Quota::NONE });
    client.set_owner_limit(&root_cred(), holder, quota).await.map(drop)
}

async fn usage_of(client: &Client, holder: Holder) -> Result<u64> {
    let rows = rows(client, holder.volume).await?;
    let is_of_holder = |row: &&OwnerUsage| (row.holder.kind, row.holder.id) == (holder.kind, holder.id);
    Ok(rows.iter().find(is_of_holder).map_or(0, |row| row.bytes))
}

async fn rows(client: &Client, volume: VolumeId) -> Result<Vec<OwnerUsage>> {
    let (mut rows, mut after) = (Vec::new(), None);
    loop {
        let page = client.owner_usage(&root_cred(), ListOf::Volume { volume }, after).await?;
        after = page.rows.last().map(|row| row.holder);
        rows.extend(page.rows);
        if page.end {
            return Ok(rows);
        }
    }
}

/// The users of each volume together have the volume's usage, as its groups have.
pub async fn check_sums(client: &Client, when: &str) -> Result<()> {
    let (mut volumes, mut after) = (Vec::new(), VolumeId(0));
    loop {
        let (page, end) = client.volumes(after).await?;
        after = page.last().map_or(after, |v| v.id);
        volumes.extend(page);
        if end {
            break;
        }
    }
    for volume in volumes {
        let sums = sums(client, volume.id).await?;
        let now = client.volume(&volume.name).await;
        let Ok(now) = now else { continue };
        // Between the two questions a removal in the background may have continued.
        if now.deleting || now.usage != volume.usage {
            continue;
        }
        let has = (now.usage.bytes, now.usage.files + now.usage.directories);
        for (kind, sum) in &sums {
            assert_eq!(*sum, has, "{when}: {kind:?} of volume {} together", volume.name);
        }
    }
    Ok(())
}

async fn sums(client: &Client, volume: VolumeId) -> Result<BTreeMap<OwnerKind, (u64, u64)>> {
    let mut sums = BTreeMap::from([(OwnerKind::User, (0, 0)), (OwnerKind::Group, (0, 0))]);
    for row in rows(client, volume).await? {
        let sum = sums.entry(row.holder.kind).or_default();
        *sum = (sum.0 + row.bytes, sum.1 + row.inodes);
    }
    Ok(sums)
}
