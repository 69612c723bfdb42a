//! Usage of each user and of each group: in each volume, and in all volumes together; exact with each
//! commit.
//!
//! Invariant: an inode with a name counts for the user and the group in its record, in the volume of the
//! directory it is charged to. So the users of a volume together have the volume's usage, and so have its
//! groups. The root directory is not counted.
//!
//! The counters follow the records of inodes beneath all operations (`namespace::keeper`): none can forget
//! them. Knows nothing of limits.
use crate::keys::{self, Counter, Letter};
use crate::record::{Access, Inode, NEVER_NAMED, Record};
use crate::tables;
use std::collections::BTreeMap;
use weir_kv::{CommitSeq, Read, Scan, SharedKv, Txn};
use weir_proto::meta::Usage;
use weir_proto::quota::{ALL_VOLUMES, Account, Holder, OwnerKind};
use weir_proto::{Error, InodeId, Result, VolumeId};

/// Counters in one transaction of a recount: a record of the journal stays below a few MiB.
const WRITTEN_AT_ONCE: usize = 16 * 1024;

/// Bytes on targets, and inodes: files and directories.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Used {
    pub bytes: i64,
    pub inodes: i64,
}

impl Used {
    fn add(&mut self, other: Used) {
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.inodes = self.inodes.wrapping_add(other.inodes);
    }
    fn negative(self) -> Used {
        Used { bytes: self.bytes.wrapping_neg(), inodes: self.inodes.wrapping_neg() }
    }
}

/// The usage of one inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Share {
    parent: InodeId,
    uid: u32,
    gid: u32,
    bytes: i64,
}

impl Share {
    /// It is of the same user and group, in the same directory.
    fn is_of_owner(&self, other: &Share) -> bool {
        (self.parent, self.uid, self.gid) == (other.parent, other.uid, other.gid)
    }
}

/// A change of an account's usage.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Charged {
    pub used: Used,
    /// The bytes that files have got which were the account's before, as by a writer that reserved them.
    pub grown: u64,
}

/// The changes of one transaction.
#[derive(Default, Debug)]
pub struct Changes {
    accounts: BTreeMap<Account, Charged>,
    /// The last directory looked up: a batch of files is in one.
    looked_up: Option<(InodeId, VolumeId)>,
}

impl Changes {
    /// A key is about to get another value.
    pub fn note(&mut self, read: &dyn Read, key: &[u8], new: Option<&[u8]>) -> Result<()> {
        if !is_inode(key) {
            return Ok(());
        }
        let after = new.map_or(Ok(None), |new| share(key, new))?;
        let before = read.get(key)?.map_or(Ok(None), |old| share(key, &old))?;
        if before == after {
            return Ok(());
        }
        let grown = match (before, after) {
            (Some(before), Some(after)) if before.is_of_owner(&after) => after.bytes - before.bytes,
            _ => 0,
        };
        if let Some(share) = before {
            self.count(read, share, |used| used.negative())?;
        }
        let Some(share) = after else { return Ok(()) };
        self.count(read, share, |used| used)?;
        let account = self.account(read, share)?;
        self.accounts.entry(account).or_default().grown += u64::try_from(grown).unwrap_or(0);
        Ok(())
    }

    fn count(&mut self, read: &dyn Read, share: Share, sign: fn(Used) -> Used) -> Result<()> {
        let account = self.account(read, share)?;
        self.accounts.entry(account).or_default().used.add(sign(Used { bytes: share.bytes, inodes: 1 }));
        Ok(())
    }
    fn account(&mut self, read: &dyn Read, share: Share) -> Result<Account> {
        let volume = match self.looked_up {
            Some((dir, volume)) if dir == share.parent => volume,
            _ => volume_of(read, share.parent)?,
        };
        // A directory gets its volume when it is made: only one that is looked up again later keeps it.
        self.looked_up = Some((share.parent, volume));
        Ok(Account { volume, uid: share.uid, gid: share.gid })
    }

    /// Changes the counters. Returns the accounts that changed, and by how much.
    pub fn store(self, txn: &mut dyn Txn) -> Vec<(Account, Charged)> {
        let changed = |(_, charged): &(Account, Charged)| charged.used != Used::default();
        let changed: Vec<_> = self.accounts.into_iter().filter(changed).collect();
        for (account, Charged { used, .. }) in &changed {
            for holder in account.holders() {
                for (counter, delta) in [(Counter::Bytes, used.bytes), (Counter::Inodes, used.inodes)] {
                    if delta != 0 {
                        txn.add(&keys::owner_usage(holder, counter), delta);
                    }
                }
            }
        }
        changed
    }
}

fn is_inode(key: &[u8]) -> bool {
    key.len() == 9 && (key[0] == b'I' || key[0] == b'A') && keys::numbered(key) != InodeId::ROOT
}

fn share(key: &[u8], value: &[u8]) -> Result<Option<Share>> {
    let ino = keys::numbered(key);
    if key[0] == b'A' {
        let dir = Access::from_value(value, || format!("directory {ino}"))?;
        return Ok(Some(Share { parent: dir.parent, uid: dir.uid, gid: dir.gid, bytes: 0 }));
    }
    let inode = Inode::from_value(value, || format!("inode {ino}"))?;
    let is_named = inode.nlink > 0 && inode.parent != NEVER_NAMED;
    let (uid, gid, bytes) = (inode.uid, inode.gid, inode.online() as i64);
    Ok(is_named.then_some(Share { parent: inode.parent, uid, gid, bytes }))
}

fn volume_of(read: &dyn Read, dir: InodeId) -> Result<VolumeId> {
    if dir == InodeId::ROOT {
        return Ok(VolumeId::ROOT);
    }
    let access = tables::ACCESS.get(read, dir)?;
    let missing = || Error::damaged(format!("directory {dir} is charged and does not exist"));
    access.map(|access| access.volume).ok_or_else(missing)
}

/// The usage of a user or a group.
pub fn used(read: &dyn Read, holder: Holder) -> Result<Used> {
    let count = |counter| {
        let value = read.get(&keys::owner_usage(holder, counter))?;
        Ok(number(value.as_deref().unwrap_or_default()))
    };
    Ok(Used { bytes: count(Counter::Bytes)?, inodes: count(Counter::Inodes)? })
}

/// Users and groups with a counter in a volume, from one on.
pub fn holders_from(read: &dyn Read, from: Holder, max: usize) -> Result<Vec<Holder>> {
    let mut found: Vec<Holder> = Vec::new();
    let end = keys::after(&keys::owners_of(from.volume, from.kind));
    read.scan(&keys::owner_usage(from, Counter::Bytes), &end, &mut |key, _| {
        if let Some((holder, _)) = keys::holder_of(key)
            && found.last() != Some(&holder)
        {
            found.push(holder);
        }
        if found.len() < max { Scan::More } else { Scan::Stop }
    })?;
    Ok(found)
}

fn number(value: &[u8]) -> i64 {
    <[u8; 8]>::try_from(value).map_or(0, i64::from_le_bytes)
}

/// All counters, by holder.
pub type Counts = BTreeMap<Holder, Used>;

/// All counters that are not zero.
pub fn counted(read: &dyn Read) -> Result<Counts> {
    let mut counts = Counts::new();
    let (start, end) = keys::range_of_letter(Letter::VolumeUsage);
    read.scan(&start, &end, &mut |key, value| {
        if let Some((holder, counter)) = keys::holder_of(key) {
            let used = counts.entry(holder).or_default();
            match counter {
                Counter::Bytes => used.bytes = number(value),
                _ => used.inodes = number(value),
            }
        }
        Scan::More
    })?;
    counts.retain(|_, used| *used != Used::default());
    Ok(counts)
}

/// Counts from the records of all inodes.
pub fn recount(read: &dyn Read) -> Result<Counts> {
    let volumes = volumes_of_directories(read)?;
    let (mut counts, mut bad) = (Counts::new(), None);
    for letter in [Letter::Access, Letter::Inode] {
        let (start, end) = keys::range_of_letter(letter);
        read.scan(&start, &end, &mut |key, value| {
            match share(key, value) {
                Ok(Some(share)) if is_inode(key) => {
                    let volume = volumes.get(&share.parent).copied().unwrap_or(VolumeId::ROOT);
                    let account = Account { volume, uid: share.uid, gid: share.gid };
                    for holder in account.holders() {
                        counts.entry(holder).or_default().add(Used { bytes: share.bytes, inodes: 1 });
                    }
                }
                Ok(_) => {}
                Err(e) => bad = Some(e),
            }
            if bad.is_none() { Scan::More } else { Scan::Stop }
        })?;
    }
    counts.retain(|_, used| *used != Used::default());
    bad.map_or(Ok(counts), Err)
}

fn volumes_of_directories(read: &dyn Read) -> Result<BTreeMap<InodeId, VolumeId>> {
    let mut volumes = BTreeMap::new();
    tables::ACCESS.all().scan(read, &mut |dir, access| {
        volumes.insert(dir, access.volume);
        Scan::More
    })?;
    Ok(volumes)
}

/// How a caller knows a volume's own usage.
pub type VolumeUsage = fn(&dyn Read, VolumeId) -> Result<Usage>;

/// At the start of a leader: counts again if the users and groups of a volume do not have its usage, as
/// after changes by an older program, which did not count. Returns the last commit, if it had to.
pub fn repair(kv: &SharedKv, usage: VolumeUsage) -> Result<Option<CommitSeq>> {
    let Some(why) = stored_difference(kv, usage)? else { return Ok(None) };
    tracing::info!("usage of users and groups is counted again: {why}");
    let last = rewrite(kv)?;
    if let Some(why) = stored_difference(kv, usage)? {
        tracing::error!("usage of volumes and of their users still differs after a recount: {why}");
    }
    Ok(Some(last))
}

fn stored_difference(kv: &SharedKv, usage: VolumeUsage) -> Result<Option<String>> {
    let mut found = None;
    kv.read(&mut |read| {
        found = difference(read, &counted(read)?, usage)?;
        Ok(())
    })?;
    Ok(found)
}

/// The first volume whose usage its users or its groups do not have together.
pub fn difference(read: &dyn Read, counts: &Counts, usage: VolumeUsage) -> Result<Option<String>> {
    let mut sums: BTreeMap<(VolumeId, OwnerKind), Used> = BTreeMap::new();
    for volume in tables::VOLUMES.all().keys(read, usize::MAX, |volume| volume)? {
        for kind in [OwnerKind::User, OwnerKind::Group] {
            sums.insert((volume, kind), Used::default());
        }
    }
    let mut all: BTreeMap<OwnerKind, Used> = BTreeMap::new();
    for (holder, used) in counts {
        match holder.volume {
            ALL_VOLUMES => all.entry(holder.kind).or_default().add(*used),
            volume => sums.entry((volume, holder.kind)).or_default().add(*used),
        }
    }
    let mut total: BTreeMap<OwnerKind, Used> = BTreeMap::new();
    for ((volume, kind), sum) in sums {
        total.entry(kind).or_default().add(sum);
        let has = usage(read, volume)?;
        let has = Used { bytes: has.bytes as i64, inodes: (has.files + has.directories) as i64 };
        if has != sum {
            return Ok(Some(format!("volume {volume} has {has:?}, the sum by {kind:?} is {sum:?}")));
        }
    }
    total.retain(|_, used| *used != Used::default());
    all.retain(|_, used| *used != Used::default());
    Ok((total != all).then(|| format!("all volumes have {total:?}, the sums are {all:?}")))
}

/// Nothing else changes the store meanwhile: the leader has not started to serve. After a crash between two
/// transactions the sums differ, and it starts again.
fn rewrite(kv: &SharedKv) -> Result<CommitSeq> {
    let (mut counts, mut old) = (Counts::new(), Vec::new());
    let mut last = kv.read(&mut |read| {
        counts = recount(read)?;
        old.clear();
        let (start, end) = keys::range_of_letter(Letter::VolumeUsage);
        read.scan(&start, &end, &mut |key, _| {
            if keys::holder_of(key).is_some() {
                old.push(key.to_vec());
            }
            Scan::More
        })
    })?;
    for part in old.chunks(WRITTEN_AT_ONCE) {
        last = kv.transact(&mut |txn| {
            part.iter().for_each(|key| txn.delete(key));
            Ok(())
        })?;
    }
    let counts: Vec<_> = counts.into_iter().collect();
    for part in counts.chunks(WRITTEN_AT_ONCE) {
        last = kv.transact(&mut |txn| {
            for (holder, used) in part {
                txn.add(&keys::owner_usage(*holder, Counter::Bytes), used.bytes);
                txn.add(&keys::owner_usage(*holder, Counter::Inodes), used.inodes);
            }
            Ok(())
        })?;
    }
    Ok(last)
}
