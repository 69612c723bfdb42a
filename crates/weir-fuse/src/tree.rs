//! Numbers of the kernel: which tree an inode or an open file belongs to, the live one or one of snapshots.
//!
//! Invariant: numbers in snapshots have the upper bit, which no inode and no handle of ours has. Pure.
use crate::translate::from_kernel_ino;
use fuser::{FileHandle, INodeNo};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use weir_client::Handle;
use weir_proto::InodeId;

/// Set in the numbers of inodes and open files of snapshots.
pub const SNAPSHOT_BIT: u64 = 1 << 63;

pub enum Inode {
    Live(InodeId),
    InSnapshot(INodeNo),
}

pub enum OpenFile {
    Live(Handle),
    InSnapshot(FileHandle),
}

/// A name in a directory of the live tree.
#[derive(Clone)]
pub struct Name {
    pub dir: InodeId,
    pub name: Vec<u8>,
}

impl Inode {
    pub fn of(ino: INodeNo) -> Inode {
        match ino.0 & SNAPSHOT_BIT {
            0 => Inode::Live(from_kernel_ino(ino)),
            _ => Inode::InSnapshot(ino),
        }
    }
    /// `None`: in a snapshot, where nothing changes.
    pub fn live(ino: INodeNo) -> Option<InodeId> {
        match Inode::of(ino) {
            Inode::Live(ino) => Some(ino),
            Inode::InSnapshot(_) => None,
        }
    }
}

impl OpenFile {
    pub fn of(fh: FileHandle) -> OpenFile {
        match fh.0 & SNAPSHOT_BIT {
            0 => OpenFile::Live(Handle(fh.0)),
            _ => OpenFile::InSnapshot(fh),
        }
    }
}

impl Name {
    /// `None`: in a snapshot, where nothing changes.
    pub fn live(parent: INodeNo, name: &OsStr) -> Option<Name> {
        Inode::live(parent).map(|dir| Name { dir, name: name.as_bytes().to_vec() })
    }
}
