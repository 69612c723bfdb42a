//! Spill: overlay data in the journal moves to slabs before the journal is folded into the tree.
//!
//! In the tree each 4 KiB would cost a page that is written, split and later deleted; measured, folds then
//! took most of the disk and a core. Many small overlays share one write and one sync, adjacent, each in an
//! extent of its own. Overlays below [`SPILL_BYTES_MIN`] stay in the index, where they share pages.
use crate::alloc::{Extent, round_up};
use crate::crash_points;
use crate::entries::get;
use crate::format::*;
use crate::read::inline_data;
use crate::store::Store;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use weir_proto::{CellId, Result, Seq};

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
    fn take(&self, at_least: u64) -> Vec<(CellId, Seq)> {
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

impl Store {
    /// Moves a batch if at least `at_least` bytes wait; returns whether they did. Blocks.
    pub fn spill_some(&self, at_least: u64) -> Result<bool> {
        let batch = self.spill.take(at_least);
        if batch.is_empty() {
            return Ok(false);
        }
        let mut found: Vec<(CellId, Seq, Overlay, Vec<u8>)> = Vec::new();
        self.kv().read(&mut |r| {
            for (cell, seq) in &batch {
                match get::<Overlay>(r, &overlay_key(*cell, *seq))? {
                    Some(o) if o.extent.len == 0 && o.kind == weir_proto::data::OverlayKind::Data => {
                        let data = inline_data(r, *cell, *seq, &o)?;
                        found.push((*cell, *seq, o, data));
                    }
                    _ => {} // sealed or dropped meanwhile
                }
            }
            Ok(())
        })?;
        if found.is_empty() {
            return Ok(true);
        }
        let total: u32 = found.iter().map(|(_, _, o, _)| round_up(o.len)).sum();
        let mut side_by_side = self.buffers().zeroed(total as usize);
        let mut at = 0;
        for (_, _, o, data) in &found {
            side_by_side[at..at + data.len()].copy_from_slice(data);
            at += round_up(o.len) as usize;
        }
        let whole = self.store_bytes(&side_by_side)?;
        let mut next = whole.addr;
        let moved: Vec<_> = found
            .into_iter()
            .map(|(cell, seq, o, _)| {
                let extent = Extent { addr: next, len: round_up(o.len) };
                next += u64::from(extent.len);
                (cell, seq, o, extent)
            })
            .collect();
        self.commit_bytes(whole, &mut |txn, delta| {
            for (cell, seq, was, extent) in &moved {
                if get::<Overlay>(txn, &overlay_key(*cell, *seq))?.as_ref() == Some(was) {
                    let now = Overlay { extent: *extent, ..was.clone() };
                    txn.put(&overlay_key(*cell, *seq), &now.to_value());
                    txn.delete(&overlay_data_key(*cell, *seq));
                } else {
                    delta.dropped.push(*extent);
                }
            }
            Ok(())
        })?;
        self.crash_point(crash_points::SPILLED);
        Ok(true)
    }
}
