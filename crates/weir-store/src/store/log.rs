//! Overlays of a target: appends to the log of a cell, and reads of the log for mirrors and repair.
use super::Store;
use crate::alloc::Extent;
use crate::cells::{self, Appended, NewOverlay, Numbering, Scope};
use crate::format::*;
use crate::read::{CELL_BYTES_MAX, inline_data};
use bytes::Bytes;
use std::sync::atomic::Ordering::Relaxed;
use weir_env::Instant;
use weir_kv::CommitSeq;
use weir_proto::checksum::crc32c;
use weir_proto::data::*;
use weir_proto::{CellId, Error, Result, Seq};

/// Overlay data up to this size is part of the journal record of its commit: one sync instead of two. Larger
/// data goes to slabs at once: with 8 writers 47 KB each reached 86 MiB/s through the journal and its folds,
/// 70 KB each 475 past them.
pub const INLINE_BYTES_MAX: u32 = 16 << 10;
/// As long as no other change waits for the disk, and slabs have space for it, up to this size: then the
/// second sync costs more than the second write, which follows later. 47 KB took 0.37 ms instead of 0.8.
const INLINE_AT_REST_BYTES_MAX: u32 = 64 << 10;
/// Data of one record of the journal: the overlays of a message that exceed it go to slabs, too.
const RECORD_BYTES_MAX: usize = 512 << 10;
/// Data of one `ReadOverlays` reply.
const OVERLAYS_REPLY_BYTES: u64 = 4 << 20;
const OVERLAYS_REPLY_COUNT: usize = 8192;

/// An overlay to log.
pub struct OverlayWrite<'a> {
    pub cell: CellId,
    pub token_epoch: u32,
    pub offset: u32,
    pub len: u32,
    pub kind: OverlayKind,
    pub crc: u32,
    pub missing: u64,
    pub data: &'a [u8],
}

impl<'a> OverlayWrite<'a> {
    fn logged(&self, extent: Extent) -> Overlay {
        let OverlayWrite { offset, len, kind, crc, token_epoch, .. } = *self;
        Overlay { offset, len, kind, crc, token_epoch, extent }
    }
    /// Its data, unless it is in a slab.
    fn inline(&self, extent: Extent) -> &'a [u8] {
        if extent.len > 0 { &[] } else { self.data }
    }
}

impl Store {
    /// Logs an overlay; the caller waits until it is durable. Blocks only if its data is above
    /// [`INLINE_BYTES_MAX`].
    pub fn append(
        &self,
        scope: &Scope,
        numbering: Numbering,
        write: &OverlayWrite<'_>,
    ) -> Result<(CommitSeq, Appended)> {
        self.append_all(scope, numbering, std::slice::from_ref(write), Instant(u64::MAX))
    }
    /// Logs several overlays of one cell in one record, with consecutive numbers, or nothing once the
    /// deadline has passed. See [`Appended::of_all`].
    pub fn append_all(
        &self,
        scope: &Scope,
        numbering: Numbering,
        writes: &[OverlayWrite<'_>],
        deadline: Instant,
    ) -> Result<(CommitSeq, Appended)> {
        self.usable()?;
        let Some(first) = writes.first() else {
            return Err(Error::invalid("a write of overlays has at least one"));
        };
        assert!(writes.iter().all(|write| write.cell == first.cell), "one record holds overlays of one cell");
        writes.iter().try_for_each(|write| check_overlay(scope, write))?;
        self.forget_lost(scope, first.cell)?;
        let extents = self.store_large(writes)?;
        let mut outcomes: Vec<Appended> = Vec::with_capacity(writes.len());
        let committed = self.change_more(&mut |txn, delta| {
            if self.env.clock.now() >= deadline {
                return Err(Error::deadline(format!(
                    "cell {}: its disk took the bytes too late",
                    first.cell
                )));
            }
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            outcomes.clear();
            for (n, (write, extent)) in writes.iter().zip(&extents).enumerate() {
                let outcome = match outcomes.last() {
                    // The numbers follow each other: this one meets the same.
                    Some(stopped @ (Appended::Gap { .. } | Appended::Void(_))) => *stopped,
                    _ => {
                        let (overlay, inline) = (write.logged(*extent), write.inline(*extent));
                        let new = NewOverlay { overlay: &overlay, inline, missing: write.missing };
                        cells::append(txn, scope, write.cell, numbering.after(n), new, delta)?
                    }
                };
                if !matches!(outcome, Appended::At(_)) {
                    delta.dropped.push(*extent);
                }
                outcomes.push(outcome);
            }
            Ok(())
        });
        let committed = committed.inspect_err(|_| extents.iter().for_each(|e| self.slabs.forget(*e)))?;
        assert_eq!(outcomes.len(), writes.len(), "an overlay was committed without an outcome");
        for ((write, extent), outcome) in writes.iter().zip(&extents).zip(&outcomes) {
            self.note_appended(scope, numbering, write, *extent, *outcome);
        }
        Ok((committed, Appended::of_all(&outcomes)))
    }
    /// The largest of these overlays whose data goes to the journal now. May ask the disk for its free space,
    /// but not for small ones: their callers must not block.
    fn inline_max(&self, writes: &[OverlayWrite<'_>]) -> u32 {
        let is_large = writes.iter().any(|write| write.data.len() > INLINE_BYTES_MAX as usize);
        let has_space = || self.slabs.check_space(INLINE_AT_REST_BYTES_MAX, self.kv.durable()).is_ok();
        match is_large && self.is_at_rest() && has_space() {
            true => INLINE_AT_REST_BYTES_MAX,
            false => INLINE_BYTES_MAX,
        }
    }
    /// Space in slabs for the data that is too large for the journal, by overlay.
    fn store_large(&self, writes: &[OverlayWrite<'_>]) -> Result<Vec<Extent>> {
        let inline_max = self.inline_max(writes);
        let (mut extents, mut inline_bytes) = (Vec::with_capacity(writes.len()), 0);
        for write in writes {
            let len = write.data.len();
            if len <= inline_max as usize && inline_bytes + len <= RECORD_BYTES_MAX {
                inline_bytes += len;
                extents.push(Extent::default());
                continue;
            }
            match self.store_new(write.data) {
                Ok(extent) => extents.push(extent),
                Err(e) => {
                    extents.into_iter().for_each(|extent| self.slabs.forget(extent));
                    return Err(e);
                }
            }
        }
        assert_eq!(extents.len(), writes.len(), "each overlay has its place, in a slab or in the journal");
        Ok(extents)
    }
    fn note_appended(
        &self,
        scope: &Scope,
        numbering: Numbering,
        write: &OverlayWrite<'_>,
        extent: Extent,
        outcome: Appended,
    ) {
        let OverlayWrite { cell, offset, len, kind, token_epoch, .. } = *write;
        tracing::trace!(on = %self.target, %cell, ?numbering, ?outcome, offset, len, ?kind, token_epoch, epoch = %scope.epoch, "overlay");
        if let Appended::At(seq) = outcome {
            if !write.inline(extent).is_empty() {
                self.spill.note(cell, seq, len);
            }
            self.counters.overlay_bytes_written.fetch_add(write.data.len() as u64, Relaxed);
        }
    }
    /// Overlays above `after` with their data, as many as fit into one reply.
    pub fn read_overlays(&self, cell: CellId, after: Seq) -> Result<(OverlaysRead, Vec<Bytes>)> {
        self.usable()?;
        let _guard = self.slabs.begin_read();
        let mut taken: Vec<(Seq, Overlay, Vec<u8>)> = Vec::new();
        let mut more = false;
        self.kv.read(&mut |r| {
            let mut bytes = 0;
            for (seq, overlay) in cells::overlays(r, cell, Seq(after.0.saturating_add(1)), Seq(u64::MAX))? {
                if taken.len() == OVERLAYS_REPLY_COUNT
                    || (bytes > 0 && bytes + u64::from(overlay.len) > OVERLAYS_REPLY_BYTES)
                {
                    more = true;
                    break;
                }
                if overlay.kind == OverlayKind::Data {
                    bytes += u64::from(overlay.len);
                }
                let inline = overlay.kind == OverlayKind::Data && overlay.extent.len == 0;
                let data = if inline { inline_data(r, cell, seq, &overlay)? } else { Vec::new() };
                taken.push((seq, overlay, data));
            }
            Ok(())
        })?;
        let mut reply = OverlaysRead { extents: Vec::new(), more };
        let mut payload = Vec::new();
        for (seq, o, inline) in taken {
            if o.extent.len > 0 {
                payload.push(self.slabs.read(o.extent, 0, o.len)?.freeze());
            } else if !inline.is_empty() {
                payload.push(Bytes::from(inline));
            }
            reply.extents.push(OverlayExtent {
                seq,
                offset: o.offset,
                len: o.len,
                kind: o.kind,
                crc: o.crc,
                token_epoch: o.token_epoch,
            });
        }
        Ok((reply, payload))
    }
}

fn check_overlay(scope: &Scope, write: &OverlayWrite<'_>) -> Result<()> {
    let bad = |why: &str| Err(Error::invalid(format!("overlay of cell {}: {why}", write.cell)));
    let expected = if write.kind == OverlayKind::Data { write.len as usize } else { 0 };
    if !scope.is_data(write.cell) {
        return bad("the index must be that of a data cell");
    }
    if write.kind == OverlayKind::Void {
        let empty = (write.offset, write.len, write.crc) == (0, 0, 0) && write.data.is_empty();
        return if empty { Ok(()) } else { bad("a void overlay is empty") };
    }
    if write.len == 0 || write.offset.checked_add(write.len).is_none_or(|end| end > CELL_BYTES_MAX) {
        return bad(&format!("{} bytes at {} do not fit into a cell", write.len, write.offset));
    }
    if write.data.len() != expected {
        return bad(&format!("{} bytes came, {expected} announced", write.data.len()));
    }
    if write.kind == OverlayKind::Data && crc32c(write.data) != write.crc {
        return bad("the bytes do not match their checksum");
    }
    Ok(())
}
