//! Overlays that a read applies to a base.
use crate::data::CellRange;
use crate::data::{Data, GroupView, StripeRef};
use crate::targets::Pacing;
use std::sync::atomic::Ordering::Relaxed;
use weir_proto::data::{OverlayExtent, OverlayKind, OverlaysRead, ReadOverlays};
use weir_proto::{Error, Result, Seq, checksum};

fn short_overlay(s: &StripeRef, extent: &OverlayExtent) -> Error {
    Error::invalid(format!("malformed message: overlay {} of {s} is cut short", extent.seq))
}

/// Copies one overlay's part of `start..start + out.len()` into `out`.
fn apply(extent: &OverlayExtent, bytes: &[u8], start: u32, out: &mut [u8]) {
    let (a, b) = (u64::from(extent.offset), u64::from(extent.offset) + u64::from(extent.len));
    let (from, to) = (u64::from(start).max(a), (u64::from(start) + out.len() as u64).min(b));
    if from >= to {
        return;
    }
    let place = &mut out[(from - u64::from(start)) as usize..(to - u64::from(start)) as usize];
    match extent.kind {
        OverlayKind::Data => place.copy_from_slice(&bytes[(from - a) as usize..(to - a) as usize]),
        OverlayKind::Zero => place.fill(0),
        OverlayKind::Void => {}
    }
}

impl Data {
    /// Applies the overlays of the cell above `folded_seq`, as mirrored by a parity target.
    pub async fn apply_overlays(
        &self,
        s: &StripeRef,
        view: &GroupView,
        at: usize,
        range: CellRange,
        folded_seq: Seq,
        out: &mut [u8],
    ) -> Result<()> {
        let place = view.place(at);
        let mut after = folded_seq;
        loop {
            let request = ReadOverlays { place, cell: s.cell(range.index), after };
            let answered =
                self.targets.call_member(view, at, &request, vec![], Pacing::Read, s.deadline).await?;
            let (OverlaysRead { extents, more }, payload) = answered.into_parts();
            let mut from = 0;
            for extent in &extents {
                let len = if extent.kind == OverlayKind::Data { extent.len as usize } else { 0 };
                let bytes = payload.get(from..from + len).ok_or_else(|| short_overlay(s, extent))?;
                from += len;
                if extent.kind == OverlayKind::Data && checksum::crc32c(bytes) != extent.crc {
                    self.counters.crc_failures.fetch_add(1, Relaxed);
                    return Err(Error::damaged(format!(
                        "overlay {} of cell {} at {} fails its checksum",
                        extent.seq,
                        s.cell(range.index),
                        place.target
                    )));
                }
                apply(extent, bytes, range.start, out);
                after = extent.seq;
            }
            if !more || extents.is_empty() {
                return Ok(());
            }
        }
    }
}
