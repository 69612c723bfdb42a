//! Home as movers have left it: remote entries, their names, their paths; and inodes as home shall show them.
//!
//! Invariant: remote entries describe home after the last change that was applied there, so a path built from
//! them is right for the next one. Reads records only: `steps` decides, `apply` changes them.
use super::record::{RemoteEntry, RemotePlace};
use crate::namespace::{find_inode, volume};
use crate::tables;
use bytes::Bytes;
use std::collections::BTreeSet;
use weir_kv::Read;
use weir_proto::meta::FileKind;
use weir_proto::posix::MODE_BITS;
use weir_proto::relation::{Expected, HomeAttrs, RelationId};
use weir_proto::{Error, InodeId, Result, VolumeId};

/// Names of a path at home at most: remote entries in a circle are damage.
const DEPTH_MAX: usize = 1 << 16;

pub fn find_remote(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<Option<RemoteEntry>> {
    tables::REMOTE.get(read, (relation, ino))
}

/// The state that a mover must find.
pub fn expected(remote: &RemoteEntry) -> Expected {
    Expected { fingerprint: remote.fingerprint.clone(), writing: remote.writing }
}

/// The inode that has a name at home.
pub fn occupant(read: &dyn Read, relation: RelationId, place: &RemotePlace) -> Result<Option<InodeId>> {
    tables::REMOTE_NAMES.get(read, (relation, place.dir, &place.name))
}

/// The path of an inode at home, relative to home's root; `None`: it does not exist there.
pub fn path(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<Option<Vec<u8>>> {
    let Some(remote) = find_remote(read, relation, ino)? else { return Ok(None) };
    match remote.places.first() {
        Some(place) => path_of(read, relation, place),
        None => Ok(Some(Vec::new())),
    }
}
/// The path of a place.
pub fn path_of(read: &dyn Read, relation: RelationId, place: &RemotePlace) -> Result<Option<Vec<u8>>> {
    let mut names = vec![place.name.clone()];
    let mut dir = place.dir;
    for _ in 0..DEPTH_MAX {
        let Some(remote) = find_remote(read, relation, dir)? else { return Ok(None) };
        let Some(above) = remote.places.first() else {
            names.reverse();
            return Ok(Some(names.join(&b'/')));
        };
        names.push(above.name.clone());
        dir = above.dir;
    }
    Err(Error::damaged(format!(
        "the way from directory {} to home's root has more than {DEPTH_MAX} steps",
        place.dir
    )))
}

/// An inode and its parent directories at home.
pub fn way(
    read: &dyn Read,
    relation: RelationId,
    ino: InodeId,
    remote: &RemoteEntry,
) -> Result<BTreeSet<InodeId>> {
    let mut way = BTreeSet::from([ino]);
    let mut above = remote.places.first().map(|place| place.dir);
    while let Some(dir) = above.filter(|dir| way.insert(*dir)) {
        above = find_remote(read, relation, dir)?.and_then(|remote| Some(remote.places.first()?.dir));
    }
    Ok(way)
}

/// An inode as home shall show it.
pub struct Present {
    pub kind: FileKind,
    pub size: u64,
    pub rdev: u32,
    pub attrs: HomeAttrs,
    pub volume: VolumeId,
}

pub fn present(read: &dyn Read, ino: InodeId) -> Result<Option<Present>> {
    let xattrs = || {
        let named = |(_, name): (InodeId, &[u8]), value| (Bytes::copy_from_slice(name), Bytes::from(value));
        tables::XATTRS.under(ino).collect(read, usize::MAX, named)
    };
    if let Some(inode) = find_inode(read, ino)? {
        if inode.nlink == 0 {
            return Ok(None);
        }
        let attrs = HomeAttrs {
            mode: inode.mode & MODE_BITS,
            uid: inode.uid,
            gid: inode.gid,
            atime: inode.atime,
            mtime: inode.mtime,
            xattrs: xattrs()?,
        };
        let volume = volume::volume_of(read, inode.parent)?;
        return Ok(Some(Present { kind: inode.kind, size: inode.size, rdev: inode.rdev, attrs, volume }));
    }
    let Some(access) = tables::ACCESS.get(read, ino)? else { return Ok(None) };
    let Some(tally) = tables::TALLIES.get(read, ino)? else { return Ok(None) };
    let attrs = HomeAttrs {
        mode: access.mode & MODE_BITS,
        uid: access.uid,
        gid: access.gid,
        atime: access.atime,
        mtime: tally.mtime,
        xattrs: xattrs()?,
    };
    Ok(Some(Present { kind: FileKind::Directory, size: 0, rdev: 0, attrs, volume: access.volume }))
}
