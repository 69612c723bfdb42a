//! Spill: overlay data in the journal moves to slabs before the journal is folded into the tree.
//!
//! In the tree each 4 KiB would cost a page that is written, split and later deleted; measured, folds then
//! took most of the disk and a core. Many small overlays share one write and one sync, adjacent, each in an
//! extent of its own. Overlays below [`SPILL_BYTES_MIN`] stay in the index, where they share pages.
use crate::alloc::round_up;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_proto::{CellId, Seq};

/// A smaller overlay wastes more of a 4 KiB unit than of a page of the index.
pub const SPILL_BYTES_MIN: u32 = 1024;
/// Enough for one efficient write, little compared with a journal segment of 12 MiB.
pub const SPILL_AT_BYTES: u64 = 1 << 20;
/// One spill's write.
const SPILL_BYTES_MAX: u64 = 2 << 20;
/// Overlays that are remembered; the data of others goes into the tree, which is correct, but slower.
const PENDING_MAX: usize = 65_536;

/// Overlays whose data is in the journal.
#[derive(Default)]
pub struct Spill {
    pending: Mutex<Pending>,
    /// There is enough data for a spill.
    pub ready: Notify,
}
#[derive(Default)]
struct Pending {
    overlays: VecDeque<(CellId, Seq, u32)>,
    bytes: u64,
}

impl Spill {
    pub fn note(&self, cell: CellId, seq: Seq, len: u32) {
        let mut pending = self.lock();
        if len < SPILL_BYTES_MIN || pending.overlays.len() >= PENDING_MAX {
            return;
        }
        pending.overlays.push_back((cell, seq, len));
        pending.bytes += u64::from(len);
        if pending.bytes >= SPILL_AT_BYTES {
            drop(pending);
            self.ready.notify_one();
        }
    }
    /// The overlays of the next spill, if there are enough.
    pub fn take(&self, at_least: u64) -> Vec<(CellId, Seq)> {
        let mut pending = self.lock();
        let (mut taken, mut bytes) = (Vec::new(), 0);
        if pending.bytes < at_least {
            return taken;
        }
        while bytes < SPILL_BYTES_MAX
            && let Some((cell, seq, len)) = pending.overlays.pop_front()
        {
            bytes += u64::from(round_up(len));
            pending.bytes -= u64::from(len);
            taken.push((cell, seq));
        }
        taken
    }
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
