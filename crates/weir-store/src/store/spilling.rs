//! Spilling: the data of many small overlays goes from the journal to one write of a slab (`spill.rs`).
//!
//! Invariant: an overlay's entry names its extent only after the extent is durable, in the transaction that
//! drops its inline data.
use super::Store;
use crate::alloc::{Extent, round_up};
use crate::crash_points;
use crate::entries::get;
use crate::format::*;
use crate::read::inline_data;
use weir_proto::data::OverlayKind;
use weir_proto::{CellId, Result, Seq};

impl Store {
    /// Moves a batch if at least `at_least` bytes wait; returns whether they did. Blocks.
    pub fn spill_some(&self, at_least: u64) -> Result<bool> {
        let batch = self.spill.take(at_least);
        if batch.is_empty() {
            return Ok(false);
        }
        let mut found: Vec<(CellId, Seq, Overlay, Vec<u8>)> = Vec::new();
        self.kv.read(&mut |r| {
            for (cell, seq) in &batch {
                match get::<Overlay>(r, &overlay_key(*cell, *seq))? {
                    Some(o) if o.extent.len == 0 && o.kind == OverlayKind::Data => {
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
        let mut side_by_side = self.env.buffers.zeroed(total as usize);
        let mut at = 0;
        for (_, _, o, data) in &found {
            side_by_side[at..at + data.len()].copy_from_slice(data);
            at += round_up(o.len) as usize;
        }
        assert_eq!(at, total as usize, "spilled overlays lie one behind the other");
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
        assert_eq!(next, whole.addr + u64::from(whole.len), "extents of spilled overlays fill the whole");
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
