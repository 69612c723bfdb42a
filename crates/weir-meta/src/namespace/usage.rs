//! Recursive usage: bytes, files and directories below every directory, exact with each commit.
//!
//! A file is charged to the directory of its first link and to all above. Counters are added to, never read, on the way.
use super::{Cx, load_access};
use crate::keys::{self, Counter};
use weir_kv::Read;
use weir_proto::meta::{FsStat, Usage};
use weir_proto::{Error, InodeId, Result};

/// A walk towards the root that is longer meets a loop: `rename` lets no directory be below itself.
const DEPTH_MAX: usize = 1 << 16;

/// What is added to a directory and everything above it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Charge {
    pub bytes: i64,
    pub files: i64,
    pub directories: i64,
}

impl Charge {
    pub fn file(bytes: u64) -> Charge {
        Charge { bytes: bytes as i64, files: 1, directories: 0 }
    }
    pub fn bytes(from: u64, to: u64) -> Charge {
        Charge { bytes: (to as i64).wrapping_sub(from as i64), ..Charge::default() }
    }
    pub fn directory(inside: &Usage) -> Charge {
        Charge {
            bytes: inside.bytes as i64,
            files: inside.files as i64,
            directories: inside.directories as i64 + 1,
        }
    }
    pub fn back(self) -> Charge {
        Charge {
            bytes: self.bytes.wrapping_neg(),
            files: self.files.wrapping_neg(),
            directories: self.directories.wrapping_neg(),
        }
    }
}

impl Cx<'_> {
    /// Charges a directory and all above it.
    pub(super) fn charge(&mut self, dir: InodeId, charge: Charge) -> Result<()> {
        if charge == Charge::default() {
            return Ok(());
        }
        let mut at = dir;
        for _ in 0..DEPTH_MAX {
            for (counter, delta) in [
                (Counter::Bytes, charge.bytes),
                (Counter::Files, charge.files),
                (Counter::Directories, charge.directories),
            ] {
                if delta != 0 {
                    self.txn.add(&keys::usage(at, counter), delta);
                }
            }
            if at == InodeId::ROOT {
                return Ok(());
            }
            at = load_access(self.read(), at)?.parent;
        }
        Err(looping(dir))
    }
}

/// Whether `dir` is `above` or below it.
pub(super) fn is_within(read: &dyn Read, dir: InodeId, above: InodeId) -> Result<bool> {
    let mut at = dir;
    for _ in 0..DEPTH_MAX {
        if at == above {
            return Ok(true);
        }
        if at == InodeId::ROOT {
            return Ok(false);
        }
        at = load_access(read, at)?.parent;
    }
    Err(looping(dir))
}

fn looping(dir: InodeId) -> Error {
    Error::damaged(format!("the way from directory {dir} to the root has more than {DEPTH_MAX} steps"))
}

/// Usage below a directory, itself not counted.
pub fn usage_of(read: &dyn Read, dir: InodeId) -> Result<Usage> {
    load_access(read, dir)?;
    let count = |counter| -> Result<u64> {
        let value = read.get(&keys::usage(dir, counter))?;
        let bytes = value.and_then(|v| <[u8; 8]>::try_from(v).ok()).unwrap_or_default();
        Ok(i64::from_le_bytes(bytes).max(0) as u64)
    };
    Ok(Usage {
        bytes: count(Counter::Bytes)?,
        files: count(Counter::Files)?,
        directories: count(Counter::Directories)?,
    })
}

/// The namespace's totals; the root counts as a directory.
pub fn totals(read: &dyn Read) -> Result<FsStat> {
    let all = usage_of(read, InodeId::ROOT)?;
    Ok(FsStat { files: all.files, directories: all.directories + 1, bytes: all.bytes })
}
