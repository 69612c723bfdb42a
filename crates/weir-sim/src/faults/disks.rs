//! Faults of disks: errors, delays, lost and returned disks, changed bits.
use super::{DISK_BYTES, Faults};
use crate::cluster::TARGET_DIR;
use crate::kinds::FaultKind;
use crate::kinds::FaultKind::*;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_coord::identity::IDENTITY_FILE;
use weir_env::Disk;
use weir_env::sim::DiskFaults;

/// After a failed write or sync, its target must be marked as failed by then.
const VERDICT_PATIENCE: Duration = Duration::from_secs(20);

impl Faults {
    /// A disk that is slow or returns errors. `often`: errors per million.
    pub(super) fn spoil_disk(&self, kind: FaultKind, victim: &str, often: u32) {
        let plain = DiskFaults::default();
        let faults = match kind {
            SlowDisk => DiskFaults { delay: Duration::from_millis(1 + self.rng.below(500)), ..plain },
            StallDisk => DiskFaults { hangs: true, ..plain },
            ReadErrors => DiskFaults { read_errors_per_million: 8 * often, ..plain },
            WriteErrors => DiskFaults { write_errors_per_million: often, ..plain },
            SyncErrors | SyncErrorsMeta => {
                self.cluster.may_end(victim);
                DiskFaults { sync_errors_per_million: often, ..plain }
            }
            LostWrites => DiskFaults { lost_writes_per_million: often, silent_in: "slab", ..plain },
            MisdirectedWrites => {
                DiskFaults { misdirected_writes_per_million: often, silent_in: "slab", ..plain }
            }
            other => unreachable!("{other:?} leaves the answers of disks as they are"),
        };
        self.world.set_disk_faults(victim, faults);
    }

    /// A disk that has little space left, or none.
    pub(super) fn fill_disk(&self, kind: FaultKind, victim: &str) {
        self.work.context.client_states.no_space();
        if kind == MetaDiskFull {
            self.cluster.may_end(victim);
        }
        let disk = self.world.disk(victim);
        let space = disk.space(Path::new("/")).expect("a simulated disk has a root");
        self.world.set_disk_capacity(victim, space.total - space.free + self.rng.below(1 << 20));
    }

    pub(super) fn enlarge_disk(&self, kind: FaultKind, victim: &str) {
        self.work.context.client_states.no_space();
        self.world.set_disk_capacity(victim, DISK_BYTES);
        if kind == MetaDiskFull {
            self.start(victim); // it may have ended
        }
    }

    /// A disk that is lost, or returns in an older state.
    pub(super) fn take_disk(&self, kind: FaultKind, victim: &str) {
        let world = &self.world;
        match kind {
            ReplaceDisk => drop(self.cluster.excuse(victim)),
            LoseTargetForGood => {
                let lost = self.cluster.excuse(victim);
                self.state().gone.extend(lost);
            }
            _ => {}
        }
        world.power_cut(victim);
        match kind {
            ReplaceDisk | LoseMetaDisk | LoseTargetForGood => world.replace_disk(victim),
            OldCopyReturns => {
                let copy = world.copy_disk(victim);
                self.state().copies.insert(victim.to_owned(), copy);
                self.start(victim);
            }
            _ => {}
        }
    }

    /// A disk that failed a write or a sync is never trusted again.
    pub(super) async fn check_disk(&self, victim: &str) {
        let failed = self.world.disk_errors(victim) > 0;
        if failed {
            self.cluster.excuse(victim);
            let reported = self.cluster.wait_failed(victim, VERDICT_PATIENCE).await;
            reported.unwrap_or_else(|e| panic!("the disk of {victim} failed, and is still used: {e}"));
        } else {
            self.state().spent.remove(victim);
        }
        self.world.set_disk_faults(victim, DiskFaults::default());
        self.cluster.start(victim);
    }

    /// Changes bits in the bulk bytes of a storage node.
    pub(super) fn flip_bits(&self, victim: &str) {
        let disk = self.world.disk(victim);
        let mut slabs = Vec::new();
        find_slabs(&*disk, Path::new("/"), &mut slabs);
        for _ in 0..1 + self.rng.below(20) {
            let Some((path, len)) = slabs.get(self.rng.below(slabs.len().max(1) as u64) as usize) else {
                return;
            };
            // Most of a preallocated slab is empty: aim at its used beginning.
            let offset = self.rng.below((*len).clamp(1, 4 << 20));
            let _ = self.world.flip_bit(victim, path, offset, self.rng.below(8) as u8); // beyond the end: no flip
        }
    }
}

/// Deletes everything except the target's identity.
pub(super) fn empty_target(disk: &dyn Disk) -> std::io::Result<()> {
    let dir = Path::new(TARGET_DIR);
    for entry in disk.read_dir(dir)?.iter().filter(|e| e.name != IDENTITY_FILE) {
        match entry.is_dir {
            true => disk.remove_dir_all(&dir.join(&entry.name))?,
            false => disk.remove_file(&dir.join(&entry.name))?,
        }
    }
    disk.sync_dir(dir)
}

fn find_slabs(disk: &dyn Disk, dir: &Path, found: &mut Vec<(PathBuf, u64)>) {
    for entry in disk.read_dir(dir).unwrap_or_default() {
        let path = dir.join(&entry.name);
        if entry.is_dir {
            find_slabs(disk, &path, found);
        } else if entry.name.starts_with("slab") {
            let len = disk.open(&path, weir_env::OpenMode::READ).and_then(|f| f.len()).unwrap_or(0);
            found.push((path, len));
        }
    }
}
