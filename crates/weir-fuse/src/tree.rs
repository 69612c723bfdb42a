//! Numbers of the kernel: which inode or open file each one is, and in which tree, the live one or one of
//! snapshots.
//!
//! Invariant: numbers in snapshots have the upper bit, which no inode and no handle of ours has.
use fuser::{FileHandle, INodeNo};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
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

/// The directory that this process's mount shows as its top, if that is not the root of the namespace.
static TOP: OnceLock<InodeId> = OnceLock::new();

/// To be called before the first request of the kernel. A process has one mount.
pub fn show_from(top: InodeId) {
    assert!(*TOP.get_or_init(|| top) == top, "the top of a mount does not change");
}

/// The kernel calls the top of a mount 1; no inode of ours has that number (directory serials start at 1).
pub fn to_kernel_ino(ino: InodeId) -> INodeNo {
    to_kernel(ino, top())
}
pub fn from_kernel_ino(ino: INodeNo) -> InodeId {
    from_kernel(ino, top())
}

pub fn top() -> InodeId {
    TOP.get().copied().unwrap_or(InodeId::ROOT)
}
fn to_kernel(ino: InodeId, top: InodeId) -> INodeNo {
    if ino == top { INodeNo::ROOT } else { INodeNo(ino.0) }
}
fn from_kernel(ino: INodeNo, top: InodeId) -> InodeId {
    if ino == INodeNo::ROOT { top } else { InodeId(ino.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_has_the_kernels_number_and_comes_back() {
        assert_eq!(to_kernel_ino(InodeId::ROOT), INodeNo(1));
        for ino in [InodeId::ROOT, InodeId(InodeId::ROOT.0 + 1), InodeId(77 << 24)] {
            assert_eq!(from_kernel_ino(to_kernel_ino(ino)), ino);
        }
        let top = InodeId(77 << 24);
        assert_eq!((to_kernel(top, top), from_kernel(INodeNo(1), top)), (INodeNo(1), top));
        assert_ne!(to_kernel(InodeId::ROOT, top), INodeNo(1), "the root is another directory there");
    }
}
