//! An addition to the usage of a directory, of all above it and of its volume.
use crate::keys::Counter;
use crate::record::Inode;
use weir_proto::meta::Usage;

/// An addition to the usage of a directory and everything above it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Charge {
    pub bytes: i64,
    pub files: i64,
    pub directories: i64,
    /// Bytes that are at home only, not included in `bytes`.
    pub evicted: i64,
}

impl Charge {
    pub fn file(inode: &Inode) -> Charge {
        Charge { files: 1, ..Charge::space(inode) }
    }
    /// The space of a file that is charged already.
    pub fn space(inode: &Inode) -> Charge {
        Charge { bytes: inode.online() as i64, evicted: inode.evicted as i64, ..Charge::default() }
    }
    pub fn directory(inside: &Usage) -> Charge {
        Charge {
            bytes: inside.bytes as i64,
            files: inside.files as i64,
            directories: inside.directories as i64 + 1,
            evicted: inside.evicted as i64,
        }
    }
    /// The counters that change, and by how much.
    pub fn parts(self) -> impl Iterator<Item = (Counter, i64)> {
        let parts = [
            (Counter::Bytes, self.bytes),
            (Counter::Files, self.files),
            (Counter::Directories, self.directories),
            (Counter::Evicted, self.evicted),
        ];
        parts.into_iter().filter(|(_, delta)| *delta != 0)
    }
    pub fn back(self) -> Charge {
        Charge {
            bytes: self.bytes.wrapping_neg(),
            files: self.files.wrapping_neg(),
            directories: self.directories.wrapping_neg(),
            evicted: self.evicted.wrapping_neg(),
        }
    }
    pub fn and(self, other: Charge) -> Charge {
        Charge {
            bytes: self.bytes.wrapping_add(other.bytes),
            files: self.files.wrapping_add(other.files),
            directories: self.directories.wrapping_add(other.directories),
            evicted: self.evicted.wrapping_add(other.evicted),
        }
    }
}
