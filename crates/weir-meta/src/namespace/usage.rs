//! Recursive usage: bytes, files and directories below every directory, and bytes that are at home only,
//! exact with each commit.
//!
//! A file is charged to the directory of its first link and to all above, and to the volume of that
//! directory. Counters on the way are incremented without being read.
use super::charge::Charge;
use super::cx::Cx;
use super::records::load_access;
use crate::keys::{self, Counter};
use crate::record::Inode;
use crate::tables;
use weir_kv::Read;
use weir_proto::meta::{FsStat, Usage};
use weir_proto::{Error, InodeId, Result, VolumeId};

/// A longer walk towards the root has met a loop: `rename` lets no directory be below itself.
const DEPTH_MAX: usize = 1 << 16;

/// Not a volume: the usage of all of them except the root volume, together.
const ALL_BUT_ROOT: VolumeId = VolumeId(0);

impl Cx<'_> {
    /// Charges a directory and all above it.
    pub(super) fn charge(&mut self, dir: InodeId, charge: Charge) -> Result<()> {
        if charge == Charge::default() {
            return Ok(());
        }
        let mut at = dir;
        for _ in 0..DEPTH_MAX {
            for (counter, delta) in charge.parts() {
                tables::USAGE.add(self.txn, (at, counter), delta);
            }
            if at == InodeId::ROOT {
                if at == dir {
                    self.charge_volume(VolumeId::ROOT, charge);
                }
                return Ok(());
            }
            let access = load_access(self.read(), at)?;
            if at == dir {
                self.charge_volume(access.volume, charge);
            }
            at = access.parent;
        }
        Err(looping(dir))
    }

    /// Charges a directory and all above it except the root, and no volume.
    pub(super) fn charge_below_root(&mut self, dir: InodeId, charge: Charge) -> Result<()> {
        let mut at = dir;
        for _ in 0..DEPTH_MAX {
            if at == InodeId::ROOT {
                return Ok(());
            }
            for (counter, delta) in charge.parts() {
                tables::USAGE.add(self.txn, (at, counter), delta);
            }
            at = load_access(self.read(), at)?.parent;
        }
        Err(looping(dir))
    }

    /// The root volume's usage is the rest of the total: most changes cost nothing more.
    pub(super) fn charge_volume(&mut self, volume: VolumeId, charge: Charge) {
        if volume == VolumeId::ROOT {
            return;
        }
        for (counter, delta) in charge.parts() {
            self.txn.add(&keys::volume_usage(volume, counter), delta);
            self.txn.add(&keys::volume_usage(ALL_BUT_ROOT, counter), delta);
        }
    }

    /// Changes the file's charge.
    pub(super) fn set_space(&mut self, inode: &mut Inode, allocated: u64, evicted: u64) -> Result<()> {
        let before = Charge::space(inode);
        (inode.allocated, inode.evicted) = (allocated, evicted);
        if inode.nlink > 0 {
            self.charge(inode.parent, Charge::space(inode).and(before.back()))?;
        }
        Ok(())
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
    counts(|counter| Ok(tables::USAGE.get(read, (dir, counter))?.unwrap_or(0)))
}

/// A volume's own usage; its topmost directory belongs to the volume around it.
pub fn volume_usage(read: &dyn Read, volume: VolumeId) -> Result<Usage> {
    if volume != VolumeId::ROOT {
        return counts(|counter| count(read, &keys::volume_usage(volume, counter)));
    }
    counts(|counter| {
        let others = count(read, &keys::volume_usage(ALL_BUT_ROOT, counter))?;
        let all = tables::USAGE.get(read, (InodeId::ROOT, counter))?.unwrap_or(0);
        Ok(all.wrapping_sub(others))
    })
}

fn count(read: &dyn Read, key: &[u8]) -> Result<i64> {
    let bytes = read.get(key)?.and_then(|v| <[u8; 8]>::try_from(v).ok()).unwrap_or_default();
    Ok(i64::from_le_bytes(bytes))
}
fn counts(count: impl Fn(Counter) -> Result<i64>) -> Result<Usage> {
    let count = |counter| Ok(count(counter)?.max(0) as u64);
    Ok(Usage {
        bytes: count(Counter::Bytes)?,
        files: count(Counter::Files)?,
        directories: count(Counter::Directories)?,
        evicted: count(Counter::Evicted)?,
    })
}

/// The namespace's totals; the root counts as a directory.
pub fn totals(read: &dyn Read) -> Result<FsStat> {
    let all = usage_of(read, InodeId::ROOT)?;
    Ok(FsStat { files: all.files, directories: all.directories + 1, bytes: all.bytes })
}
