//! The overlays of a message: its extents, their numbers, and their parts of the payload.
//!
//! Plain functions.
use crate::alloc::Extent;
use crate::format::Overlay;
use crate::store::{INLINE_BYTES_MAX, OverlayWrite};
use bytes::Bytes;
use weir_proto::checksum::crc32c;
use weir_proto::data::*;
use weir_proto::{CellId, Error, Result, Seq, TargetId};

/// Extents that are logged in place, on the thread that took the request.
const IN_PLACE_PARTS_MAX: usize = 16;

/// The overlays of a write, in their logged form, with their numbers.
pub fn numbered(r: &WriteOverlays, first: Seq) -> impl Iterator<Item = (Seq, Overlay)> {
    let token_epoch = r.token_epoch;
    r.parts.iter().zip(first.0..).map(move |(part, seq)| {
        let OverlayPart { offset, len, kind, crc } = *part;
        (Seq(seq), Overlay { offset, len, kind, crc, token_epoch, extent: Extent::default() })
    })
}

/// A write of one extent as one of several.
pub fn as_parts(r: WriteOverlay) -> WriteOverlays {
    let WriteOverlay { place, cell, token_epoch, offset, len, kind, crc, layout_scheme, write, attempt } = r;
    let parts = vec![OverlayPart { offset, len, kind, crc }];
    WriteOverlays { place, cell, token_epoch, parts, layout_scheme, write, attempt }
}

/// One extent of several, under its number.
pub fn single(of: &MirrorOverlays, seq: Seq, part: OverlayPart) -> MirrorOverlay {
    let MirrorOverlays { place, cell, token_epoch, missing, layout_scheme, .. } = *of;
    let OverlayPart { offset, len, kind, crc } = part;
    MirrorOverlay {
        place,
        cell,
        token_epoch,
        seq,
        offset,
        len,
        kind,
        missing,
        crc,
        layout_scheme,
        again: false,
    }
}

/// Whether logging these takes so little time that no thread for blocking work is needed.
pub fn is_quick(parts: &[OverlayPart], payload: &Bytes) -> bool {
    payload.len() <= INLINE_BYTES_MAX as usize && parts.len() <= IN_PLACE_PARTS_MAX
}

/// The extents of a message, each with its part of the payload.
pub fn writes_of<'a>(
    cell: CellId,
    token_epoch: u32,
    missing: u64,
    parts: &[OverlayPart],
    payload: &'a [u8],
) -> Result<Vec<OverlayWrite<'a>>> {
    if parts.is_empty() || parts.len() > OVERLAY_PARTS_MAX {
        return Err(Error::invalid(format!(
            "overlays of cell {cell}: {} in one message, 1 to {OVERLAY_PARTS_MAX} are possible",
            parts.len()
        )));
    }
    let (mut writes, mut rest) = (Vec::with_capacity(parts.len()), payload);
    for OverlayPart { offset, len, kind, crc } in parts.iter().copied() {
        let wanted = if kind == OverlayKind::Data { len as usize } else { 0 };
        // A part that is cut short is refused with the other checks of an overlay.
        let (data, after) = rest.split_at(wanted.min(rest.len()));
        rest = after;
        writes.push(OverlayWrite { cell, token_epoch, offset, len, kind, crc, missing, data });
    }
    match rest.len() {
        0 => Ok(writes),
        more => Err(Error::invalid(format!("overlays of cell {cell}: {more} bytes belong to none of them"))),
    }
}

/// The data of an overlay, verified and removed from the head of a payload.
pub fn take_data(cell: CellId, o: &OverlayExtent, from: TargetId, payload: &mut Bytes) -> Result<Bytes> {
    let len = if o.kind == OverlayKind::Data { o.len as usize } else { 0 };
    if payload.len() < len {
        return Err(Error::damaged(format!("overlays of cell {cell}: cut short")));
    }
    let data = payload.split_to(len);
    if o.kind == OverlayKind::Data && crc32c(&data) != o.crc {
        let seq = o.seq;
        return Err(Error::damaged(format!("overlay {seq} of cell {cell} from {from} fails its checksum")));
    }
    Ok(data)
}
