//! Numbers of inodes and open files in snapshots.
//!
//! Invariant: a place has the same number for each look-up, as long as the kernel refers to it. Knows nothing
//! of the client.
use crate::tree::SNAPSHOT_BIT;
use fuser::{FileHandle, INodeNo};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_client::SnapshotFile;
use weir_proto::{Error, InodeId, Result, VolumeId};

/// The object of a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// `.snapshots` of a volume.
    List { volume: VolumeId },
    /// An inode in a snapshot.
    Thing { snapshot: u32, ino: InodeId },
}

#[derive(Default)]
pub struct Table {
    /// Places by number, with the count of the kernel's references.
    places: Mutex<HashMap<u64, (Place, u64)>>,
    files: Mutex<HashMap<u64, Arc<SnapshotFile>>>,
    next: AtomicU64,
}

impl Place {
    /// A place has this number in each request. Two places have distinct ones except by chance, which
    /// [`Table::note_answer`] detects.
    pub fn number(self) -> u64 {
        let (a, b) = match self {
            Place::List { volume } => (u64::from(volume.0), u64::MAX),
            Place::Thing { snapshot, ino } => (u64::from(snapshot), ino.0),
        };
        let mixed =
            (b ^ a.rotate_left(40).wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        SNAPSHOT_BIT | (mixed ^ (mixed >> 29))
    }
}

impl Table {
    fn places(&self) -> MutexGuard<'_, HashMap<u64, (Place, u64)>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<SnapshotFile>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn find(&self, ino: INodeNo) -> Result<Place> {
        let place = self.places().get(&ino.0).map(|(place, _)| *place);
        place.ok_or_else(|| Error::stale(format!("inode {} of a snapshot was forgotten", ino.0)))
    }
    /// The kernel gets a reference to a place: it returns it one day.
    pub fn note_answer(&self, place: Place) -> Result<INodeNo> {
        let number = place.number();
        let mut places = self.places();
        let (known, count) = places.entry(number).or_insert((place, 0));
        if *known != place {
            return Err(Error::io("two objects of snapshots have the same number: open one of them later"));
        }
        *count += 1;
        Ok(INodeNo(number))
    }
    pub fn forget(&self, ino: INodeNo, times: u64) {
        let mut places = self.places();
        if let Some((_, count)) = places.get_mut(&ino.0) {
            *count = count.saturating_sub(times);
            if *count == 0 {
                places.remove(&ino.0);
            }
        }
    }

    pub fn open(&self, file: SnapshotFile) -> FileHandle {
        let fh = SNAPSHOT_BIT | self.next.fetch_add(1, Ordering::Relaxed);
        self.files().insert(fh, Arc::new(file));
        FileHandle(fh)
    }
    pub fn file(&self, fh: FileHandle) -> Result<Arc<SnapshotFile>> {
        let file = self.files().get(&fh.0).cloned();
        file.ok_or_else(|| Error::stale(format!("file handle {} is closed", fh.0)))
    }
    pub fn close(&self, fh: FileHandle) {
        self.files().remove(&fh.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Inode;

    #[test]
    fn inodes_answered_to_the_kernel_are_known_until_forgotten() {
        let table = Table::default();
        let place = Place::Thing { snapshot: 1, ino: InodeId(5) };
        let ino = table.note_answer(place).unwrap();
        assert!(Inode::live(ino).is_none());
        assert_eq!(table.note_answer(place).unwrap(), ino);
        table.forget(ino, 1);
        assert_eq!(table.find(ino).unwrap(), place);
        table.forget(ino, 1);
        assert!(table.find(ino).is_err());
    }

    #[test]
    fn things_of_snapshots_have_numbers_of_their_own() {
        let things = (1..50u32).flat_map(|snapshot| (1..200u64).map(move |n| (snapshot, n << 24 | n)));
        let mut numbers: Vec<u64> =
            things.map(|(snapshot, n)| Place::Thing { snapshot, ino: InodeId(n) }.number()).collect();
        numbers.extend((1..50).map(|v| Place::List { volume: VolumeId(v) }.number()));
        let all = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), all);
    }
}
