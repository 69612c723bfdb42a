//! Volumes: named subtrees with an owner, limits and a policy.
//!
//! Invariants: every directory's record names its volume, given at its creation, and no name leads from one
//! volume into another except that of a volume's topmost directory. That directory is deleted only with its
//! volume. The volume of a file is that of the directory it is charged to.
//!
//! Here are the look-ups, and the changes of a volume's record that follow from other operations. `change`
//! creates and deletes volumes, `remove` removes their content, `show` shows them, `limits` has their limits.
pub mod change;
pub mod limits;
pub mod remove;
pub mod show;

use super::*;
use crate::keys::Sequence;
use crate::limits::Over;
use crate::quotas::Quotas;
use crate::record::VolumeRecord;
use bytes::Bytes;
use weir_kv::Scan;
use weir_proto::quota::ALL_VOLUMES;
use weir_proto::volume::{Quota, Retention, VOLUME_PATH_MAX, check_volume_name};

/// The name of the volume that contains everything outside of other volumes.
const ROOT_NAME: &str = "root";

/// The volume that contains everything at first.
pub fn make_root(txn: &mut dyn Txn, now: Time) {
    let record = VolumeRecord {
        name: ROOT_NAME.to_owned(),
        root: InodeId::ROOT,
        entry: Bytes::new(),
        path: Bytes::from_static(b"/"),
        owner: 0,
        admins: Vec::new(),
        quota: Quota::NONE,
        bytes_over_since: None,
        inodes_over_since: None,
        policy: Policy { scheme: None, pool: None },
        created: now,
        deleting: false,
        retention: Retention::NOTHING,
        write_floor: 0,
    };
    tables::VOLUMES.put(txn, VolumeId::ROOT, &record);
    tables::VOLUME_NAMES.put(txn, ROOT_NAME.as_bytes(), &VolumeId::ROOT);
    txn.max(&keys::sequence(Sequence::Volume), u64::from(VolumeId::ROOT.0) + 1);
}

// ---- what other operations ask

impl Cx<'_> {
    /// The volume of a directory.
    pub fn volume_of(&self, dir: InodeId) -> Result<VolumeId> {
        volume_of(self.read(), dir)
    }

    /// A directory got another name, or another parent: if it is a volume's topmost one, the volume's record
    /// follows.
    pub(super) fn note_root_moved(&mut self, dir: InodeId, to: (InodeId, &[u8]), same: bool) -> Result<()> {
        let volume = self.volume_of(dir)?;
        if volume == self.volume_of(to.0)? {
            return Ok(());
        }
        let mut record = load(self.read(), volume)?;
        record.entry = Bytes::copy_from_slice(to.1);
        record.path = moved_path(&record.path, to.1, same);
        self.put_volume(volume, &record);
        Ok(())
    }

    /// Clients that create files there locally report them, and ask for each one from now on. Volume 0: all.
    pub(super) fn revoke_names(&mut self, volume: VolumeId) -> Result<()> {
        for (session, dir) in self.rules.leases.held_names() {
            if volume == ALL_VOLUMES || load_access(self.read(), dir)?.volume == volume {
                self.obstacles.note(Conflict { ino: dir, session, keep: LeaseKind::Read, ask: true });
            }
        }
        Ok(())
    }
    /// A client that writes a file of the volume learns of the new limit with the next lease.
    pub(super) fn revoke_writers(&mut self, volume: VolumeId) -> Attempt<()> {
        for (session, ino) in self.rules.leases.writers() {
            let inode = find_inode(self.read(), ino)?;
            if let Some(inode) = inode.filter(|inode| inode.nlink > 0)
                && (volume == ALL_VOLUMES || self.volume_of(inode.parent)? == volume)
            {
                self.obstacles.note(Conflict { ino, session, keep: LeaseKind::Read, ask: true });
            }
        }
        self.clear()
    }

    fn put_volume(&mut self, id: VolumeId, record: &VolumeRecord) {
        tables::VOLUMES.put(self.txn, id, record);
        self.events.volumes.push((id, Some(record.clone())));
    }
}

/// Records since when a volume is over its soft limits.
pub fn note_over(cx: &mut Cx<'_>, id: VolumeId, over: Over) -> Result<()> {
    let mut record = load(cx.read(), id)?;
    (record.bytes_over_since, record.inodes_over_since) = (over.bytes_since, over.inodes_since);
    cx.put_volume(id, &record);
    Ok(())
}

/// All limits.
pub fn load_quotas(read: &dyn Read) -> Result<Quotas> {
    let mut quotas = Quotas::default();
    tables::VOLUMES.all().scan(read, &mut |id, record| {
        quotas.note(id, Some(&record));
        Scan::More
    })?;
    tables::OWNER_LIMITS.all().scan(read, &mut |holder, record| {
        quotas.owners.note(holder, Some(record));
        Scan::More
    })?;
    Ok(quotas)
}

/// The volume of a directory. The same for an inode that may not be a directory any more.
pub fn find_volume_of(read: &dyn Read, dir: InodeId) -> Result<Option<VolumeId>> {
    Ok(find_access(read, dir)?.map(|access| access.volume))
}
/// The parent of a directory.
pub fn find_parent(read: &dyn Read, dir: InodeId) -> Result<Option<InodeId>> {
    Ok(find_access(read, dir)?.map(|access| access.parent))
}
pub fn volume_of(read: &dyn Read, dir: InodeId) -> Result<VolumeId> {
    if dir == InodeId::ROOT {
        return Ok(VolumeId::ROOT);
    }
    load_access(read, dir).map(|access| access.volume)
}

/// No name leads from one volume into another.
pub(super) fn require_same(from: VolumeId, to: VolumeId) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::name(
        NameRule::CrossVolume,
        format!("from volume {from} into volume {to}: only a copy goes from one volume into another"),
    ))
}

/// A volume's topmost directory is deleted only with its volume.
pub(super) fn require_no_root(read: &dyn Read, around: VolumeId, dir: InodeId) -> Result<()> {
    let volume = volume_of(read, dir)?;
    if volume == around {
        return Ok(());
    }
    let name = load(read, volume)?.name;
    Err(Error::name(
        NameRule::Busy,
        format!("directory {dir} is volume {name:?}: `weir volume delete {name}` removes it"),
    ))
}

/// Its name for administrators; its number if the volume is deleted.
pub fn shown_name(kv: &weir_kv::SharedKv, volume: VolumeId) -> String {
    let mut name = volume.to_string();
    let read = kv.read(&mut |read| {
        name = load(read, volume)?.name;
        Ok(())
    });
    let _: Result<_> = read; // it was deleted meanwhile
    name
}

pub fn find(read: &dyn Read, id: VolumeId) -> Result<Option<VolumeRecord>> {
    tables::VOLUMES.get(read, id)
}
pub fn load(read: &dyn Read, id: VolumeId) -> Result<VolumeRecord> {
    find(read, id)?.ok_or_else(|| Error::not_found(format!("volume {id} does not exist (any more)")))
}
fn find_name(read: &dyn Read, name: &str) -> Result<Option<VolumeId>> {
    tables::VOLUME_NAMES.get(read, name.as_bytes())
}

/// Its last component is now `name`; `same`: in the same directory, whose path is known.
fn moved_path(path: &[u8], name: &[u8], same: bool) -> Bytes {
    let above = path.iter().rposition(|b| *b == b'/').filter(|_| same).map(|at| &path[..at]);
    let path = [above.unwrap_or(b"..."), b"/", name].concat();
    if path.len() > VOLUME_PATH_MAX { Bytes::copy_from_slice(name) } else { Bytes::from(path) }
}

fn require_superuser(cred: &Cred, doing: &str) -> Result<()> {
    if cred.uid == 0 {
        return Ok(());
    }
    Err(Error::denied(format!("user {} may not {doing}: only the superuser may", cred.uid)))
}
/// A volume that `cred` owns or administers.
pub fn load_as_admin(read: &dyn Read, cred: &Cred, id: VolumeId) -> Result<VolumeRecord> {
    let record = load(read, id)?;
    require_admin(cred, &record)?;
    Ok(record)
}
fn require_admin(cred: &Cred, record: &VolumeRecord) -> Result<()> {
    if cred.uid == 0 || cred.uid == record.owner || record.admins.contains(&cred.uid) {
        return Ok(());
    }
    Err(Error::denied(format!(
        "user {} neither owns nor administers volume {:?}: user {} does",
        cred.uid, record.name, record.owner
    )))
}

fn check_free(read: &dyn Read, name: &str) -> Result<()> {
    check_volume_name(name)?;
    match find_name(read, name)? {
        None => Ok(()),
        Some(_) => Err(Error::exists(format!("there is a volume {name:?} already"))),
    }
}

pub(super) fn load_live(read: &dyn Read, id: VolumeId) -> Result<VolumeRecord> {
    let record = load(read, id)?;
    if record.deleting {
        return Err(Error::not_found(format!("volume {:?} is being removed", record.name)));
    }
    Ok(record)
}
