//! Volumes as an administrator sees them: each call asks the leader; nothing is cached.
use super::Client;
use crate::base::Base;
use crate::leader::Change;
use crate::parts::Parts;
use bytes::Bytes;
use weir_env::BoxFuture;
use weir_proto::coord::{AuditState, GetAudit};
use weir_proto::meta::{Cred, Op};
use weir_proto::quota::{
    Holder, ListOf, OWNER_ROWS_MAX, OwnerLimit, OwnerUsage, OwnerUsageList, OwnerUsagePage,
};
use weir_proto::version::LEVEL_OF_FLOORS;
use weir_proto::volume::{
    GetWriteFloors, Policy, Quota, Retention, ScanInodes, Scanned, SetWriteFloor, VOLUMES_MAX, Volume,
    VolumeAt, VolumeChange, VolumeClone, VolumeCreate, VolumeDelete, VolumeGet, VolumeList, WriteFloor,
    check_volume_name,
};
use weir_proto::{Error, ErrorKind, InodeId, Result, VolumeId};

/// The pause between requests to a coordinator that does not answer.
const COORDINATOR_PAUSE: std::time::Duration = std::time::Duration::from_millis(200);

/// A volume to create.
#[derive(Clone, Debug)]
pub struct NewVolume {
    pub name: String,
    /// The path of its topmost directory, from the root of the namespace.
    pub path: Bytes,
    pub owner: u32,
    pub group: u32,
    pub mode: u32,
    pub admins: Vec<u32>,
    pub quota: Quota,
    pub policy: Policy,
}

/// Changes to a volume; absent fields keep their value.
#[derive(Clone, Debug, Default)]
pub struct VolumeEdit {
    pub name: Option<String>,
    pub owner: Option<u32>,
    pub admins: Option<Vec<u32>>,
    pub quota: Option<Quota>,
    pub policy: Option<Policy>,
    pub retention: Option<Retention>,
}

impl Client {
    /// Whether the leader's audit log is written.
    pub fn audit(&self) -> BoxFuture<'_, Result<AuditState>> {
        Box::pin(async move { self.parts.base.leader.ask(|_| GetAudit {}).await })
    }
    pub fn create_volume<'a>(&'a self, cred: &'a Cred, new: &'a NewVolume) -> BoxFuture<'a, Result<Volume>> {
        Box::pin(async move {
            let make = new_volume(&self.parts, cred, new).await?;
            self.parts.base.leader.change(Change::once(), make).await
        })
    }
    /// A volume whose names and data are those of a snapshot; `own`: the snapshot is deleted when the clone
    /// is complete.
    pub fn clone_volume<'a>(
        &'a self,
        cred: &'a Cred,
        source: VolumeId,
        snapshot: &'a str,
        own: bool,
        new: &'a NewVolume,
    ) -> BoxFuture<'a, Result<Volume>> {
        Box::pin(async move {
            let make = new_volume(&self.parts, cred, new).await?;
            let clone = |op: Op| VolumeClone {
                op: op.clone(),
                source,
                snapshot: snapshot.to_owned(),
                own,
                new: make(op),
            };
            self.parts.base.leader.change(Change::once(), clone).await
        })
    }

    pub fn volume<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Volume>> {
        Box::pin(async move {
            let ask = |session| VolumeGet { session, name: name.to_owned() };
            self.parts.base.leader.ask(ask).await
        })
    }
    /// The volume that contains a file or directory.
    pub fn volume_at(&self, ino: InodeId) -> BoxFuture<'_, Result<Volume>> {
        Box::pin(async move { self.parts.base.leader.ask(|session| VolumeAt { session, ino }).await })
    }
    /// Volumes after `after` (0: from the start) in the order of creation; whether those are all.
    pub fn volumes(&self, after: VolumeId) -> BoxFuture<'_, Result<(Vec<Volume>, bool)>> {
        Box::pin(async move {
            let ask = |session| VolumeList { session, after, limit: VOLUMES_MAX as u32 };
            let page = self.parts.base.leader.ask(ask).await?;
            Ok((page.volumes, page.end))
        })
    }

    pub fn change_volume<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        edit: &'a VolumeEdit,
    ) -> BoxFuture<'a, Result<Volume>> {
        Box::pin(async move {
            if let Some(policy) = &edit.policy {
                check_policy(&self.parts.base, policy).await?;
            }
            let make = |op| VolumeChange {
                op,
                cred: cred.clone(),
                volume,
                name: edit.name.clone(),
                owner: edit.owner,
                admins: edit.admins.clone(),
                quota: edit.quota,
                policy: edit.policy.clone(),
                retention: edit.retention,
            };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }

    /// The write floors of all volumes that have one.
    pub fn write_floors(&self) -> BoxFuture<'_, Result<Vec<WriteFloor>>> {
        Box::pin(async move {
            let ask = |session| GetWriteFloors { session };
            Ok(self.parts.base.leader.ask(ask).await?.floors)
        })
    }
    /// Sets a volume's write floor; 0: as many members as its scheme has data cells.
    pub fn set_write_floor<'a>(
        &'a self,
        cred: &'a Cred,
        volume: &'a Volume,
        members: u8,
    ) -> BoxFuture<'a, Result<Volume>> {
        Box::pin(async move {
            let map = self.parts.base.data.cluster.map();
            if map.level < LEVEL_OF_FLOORS && members > 0 {
                return Err(Error::unsupported(format!(
                    "the cluster is at level {}, volumes have write floors from level {LEVEL_OF_FLOORS} on",
                    map.level
                ))
                .hint("`weir upgrade finish`"));
            }
            let scheme = volume.policy.scheme.unwrap_or(map.settings.scheme);
            let (least, most) = (usize::from(scheme.data), scheme.width());
            if members > 0 && !(least..=most).contains(&usize::from(members)) {
                return Err(Error::invalid(format!(
                    "a write floor of {members}: with {scheme} it is {least} to {most}, or none"
                )));
            }
            let volume = volume.id;
            let make = |op| SetWriteFloor { op, cred: cred.clone(), volume, members };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }

    /// `force`: even if it is not empty. Its contents are removed in the background.
    pub fn delete_volume<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        force: bool,
    ) -> BoxFuture<'a, Result<Volume>> {
        Box::pin(async move {
            let make = |op| VolumeDelete { op, cred: cred.clone(), volume, force };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }

    /// Sets the limits of a user or a group; `None`: it has none of its own any more.
    pub fn set_owner_limit<'a>(
        &'a self,
        cred: &'a Cred,
        holder: Holder,
        quota: Option<Quota>,
    ) -> BoxFuture<'a, Result<OwnerUsage>> {
        Box::pin(async move {
            let make = |op| OwnerLimit { op, cred: cred.clone(), holder, quota };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }
    /// Usage and limits of users and groups, after one of them.
    pub fn owner_usage<'a>(
        &'a self,
        cred: &'a Cred,
        list: ListOf,
        after: Option<Holder>,
    ) -> BoxFuture<'a, Result<OwnerUsagePage>> {
        Box::pin(async move {
            let limit = OWNER_ROWS_MAX;
            let ask =
                |session| OwnerUsageList { session, cred: cred.clone(), list: list.clone(), after, limit };
            self.parts.base.leader.ask(ask).await
        })
    }

    /// The data for a usage report of inodes after `after`; `volume` 0: of all volumes.
    pub fn scan_inodes<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        directories: bool,
        after: InodeId,
    ) -> BoxFuture<'a, Result<Scanned>> {
        Box::pin(async move {
            let ask = |session| ScanInodes { session, cred: cred.clone(), volume, directories, after };
            self.parts.base.leader.ask(ask).await
        })
    }
}

async fn new_volume<'a>(
    parts: &Parts,
    cred: &'a Cred,
    new: &'a NewVolume,
) -> Result<impl Fn(Op) -> VolumeCreate + 'a> {
    check_volume_name(&new.name)?;
    check_policy(&parts.base, &new.policy).await?;
    let (above, entry) = split(&new.path)?;
    let parent = parts.names.find_path(cred, above).await?.attr.ino;
    Ok(move |op| VolumeCreate {
        op,
        cred: cred.clone(),
        name: new.name.clone(),
        parent,
        entry: Bytes::copy_from_slice(entry),
        path: new.path.clone(),
        owner: new.owner,
        group: new.group,
        mode: new.mode,
        admins: new.admins.clone(),
        quota: new.quota,
        policy: new.policy.clone(),
    })
}

/// Refuses a policy that the cluster cannot satisfy; otherwise its placement groups exist afterwards.
async fn check_policy(base: &Base, policy: &Policy) -> Result<()> {
    if policy.scheme.is_none() && policy.pool.is_none() {
        return Ok(());
    }
    let cluster = &base.data.cluster;
    let scheme = policy.scheme.unwrap_or(cluster.map().settings.scheme);
    let deadline = base.leader.deadline();
    let is_away = |e: &Error| matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline);
    loop {
        match cluster.make_groups(policy.pool.clone(), scheme).await {
            // The coordinator is away, or was while it answered. Asking twice does no harm.
            Err(e) if is_away(&e) && base.env.clock.now() < deadline => {
                base.env.clock.sleep(COORDINATOR_PAUSE).await;
            }
            made => return made.map(drop),
        }
    }
}

fn show(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// A path's directory and last name.
fn split(path: &[u8]) -> Result<(&[u8], &[u8])> {
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |at| at + 1);
    let start = path[..end].iter().rposition(|b| *b == b'/');
    match (start, &path[..end]) {
        (Some(at), path) if path.starts_with(b"/") && at + 1 < path.len() => {
            Ok((&path[..at], &path[at + 1..]))
        }
        _ => Err(Error::invalid(format!(
            "{:?} is not a path from the root of the file system, like /DIR/NAME",
            show(path)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_directory_and_a_name() {
        assert_eq!(split(b"/a").unwrap(), (&b""[..], &b"a"[..]));
        assert_eq!(split(b"/a/b//").unwrap(), (&b"/a"[..], &b"b"[..]));
        for bad in ["", "/", "//", "a", "a/b"] {
            assert!(split(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
