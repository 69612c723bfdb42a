//! Writes overlays: extents for data cells, each through its cell's sequencer, many of one cell in a message.
use super::{Data, GroupView, MAP_PATIENCE, Overlay, StripeRef, is_unreachable, too_few};
use crate::join::join_all;
use crate::targets::Pacing;
use bytes::{Bytes, BytesMut};
use weir_env::{BoxFuture, Instant};
use weir_proto::data::{
    OVERLAY_PARTS_MAX, OverlayKind, OverlayPart, OverlayWritten, WriteOverlay, WriteOverlays,
};
use weir_proto::version::LEVEL_OF_OVERLAY_PARTS;
use weir_proto::{ErrorKind, Result, checksum};
use weir_rpc::{Answered, Payload};

/// An overlay is written again this often if the member that was full has space when it is asked.
const SPACES_MAX: u32 = 5;
/// Data of several extents in one message: a record of the journal at each keeper.
const BATCH_BYTES_MAX: usize = 256 << 10;

/// Extents of one data cell that one message carries.
struct Batch {
    index: u8,
    parts: Vec<OverlayPart>,
    payload: Payload,
}

impl Batch {
    fn of(overlays: &[&Overlay]) -> Batch {
        let part = |o: &&Overlay| {
            let (kind, crc) = match &o.payload {
                Some(bytes) => (OverlayKind::Data, checksum::crc32c(bytes)),
                None => (OverlayKind::Zero, 0),
            };
            OverlayPart { offset: o.offset, len: o.len, kind, crc }
        };
        let parts: Vec<OverlayPart> = overlays.iter().map(part).collect();
        let payload = match overlays {
            [one] => Payload { parts: one.payload.iter().cloned().collect(), crc: Some(parts[0].crc) },
            several => joined(several),
        };
        Batch { index: overlays[0].index, parts, payload }
    }
    fn bytes(&self) -> u32 {
        self.parts.iter().map(|part| part.len).sum()
    }
}

/// The data of several extents in one piece: as parts each would be copied, too.
fn joined(overlays: &[&Overlay]) -> Payload {
    let data = || overlays.iter().filter_map(|o| o.payload.as_ref());
    let mut bytes = BytesMut::with_capacity(data().map(Bytes::len).sum());
    data().for_each(|part| bytes.extend_from_slice(part));
    Payload::from(bytes.freeze())
}

/// The messages that carry the extents: one for each with `parts_max` 1.
fn batches(overlays: &[Overlay], parts_max: usize) -> Vec<Batch> {
    let mut of_cells: Vec<Vec<&Overlay>> = Vec::new();
    let mut bytes = 0;
    for overlay in overlays {
        let len = overlay.payload.as_ref().map_or(0, Bytes::len);
        match of_cells.last_mut() {
            Some(batch)
                if batch[0].index == overlay.index
                    && batch.len() < parts_max
                    && bytes + len <= BATCH_BYTES_MAX =>
            {
                batch.push(overlay);
                bytes += len;
            }
            _ => {
                of_cells.push(vec![overlay]);
                bytes = len;
            }
        }
    }
    of_cells.iter().map(|batch| Batch::of(batch)).collect()
}

impl Data {
    /// Writes extents into data cells, in parallel. They are in the order of their cells.
    pub async fn write_overlays(&self, s: StripeRef, token_epoch: u32, overlays: &[Overlay]) -> Result<()> {
        let fits = |o: &Overlay| usize::from(o.index) < s.k() && o.offset + o.len <= s.layout.cell_bytes();
        assert!(overlays.iter().all(fits), "{s}: an overlay is of one data cell");
        let knows_parts = self.cluster.map().level >= LEVEL_OF_OVERLAY_PARTS;
        let batches = batches(overlays, if knows_parts { OVERLAY_PARTS_MAX } else { 1 });
        let calls: Vec<BoxFuture<'_, Result<()>>> = batches
            .iter()
            .map(|b| Box::pin(self.write_batch(s, token_epoch, b)) as BoxFuture<'_, _>)
            .collect();
        join_all(calls).await.into_iter().collect::<Result<()>>().map_err(|e| e.doing(format!("write {s}")))
    }

    /// Writes extents; while a place that a full target has moves to another one, it waits, up to
    /// `full_until`.
    pub async fn write_overlays_around_full(
        &self,
        s: StripeRef,
        token_epoch: u32,
        overlays: &[Overlay],
        full_until: Instant,
    ) -> Result<()> {
        loop {
            let written = self.write_overlays(s, token_epoch, overlays).await;
            match written {
                Err(e) if e.kind == ErrorKind::NoSpace => {
                    if !self.full.is_moved(&s, full_until).await {
                        return Err(e);
                    }
                }
                written => return written,
            }
        }
    }

    async fn write_batch(&self, s: StripeRef, token_epoch: u32, batch: &Batch) -> Result<()> {
        let (mut retry, mut waiting) = (self.targets.retry(s.deadline), None);
        let (write, mut attempt, mut spaces) = (self.env.rng.next_u64(), 0, 0);
        loop {
            let view = self.writable_view(&s).await?;
            let through = view
                .sequencer(batch.index, s.scheme())
                .ok_or_else(|| too_few(&s, view.group().current_count()))?;
            let place = view.place(through);
            let sent = self.send_batch(&s, &view, through, token_epoch, batch, (write, attempt));
            let e = match sent.await {
                Ok(answered) => {
                    self.maps.note_written(answered.reply.map_version);
                    return Ok(());
                }
                Err(e) => e,
            };
            if is_unreachable(&e) {
                self.targets.report(place, &e).await;
            } else if e.kind == ErrorKind::Exists && retry.has_time() {
                // Its number is void at a keeper: another attempt gets another one.
                retry.pause().await;
                attempt += 1;
                continue;
            } else if e.kind != ErrorKind::Stale {
                match self.full.overlay_refusal(&view, batch.index, batch.bytes(), &e).await {
                    Some(refused) => return Err(refused),
                    None if spaces == SPACES_MAX || !retry.has_time() => return Err(e),
                    None => spaces += 1,
                }
                retry.pause().await;
                attempt += 1;
                continue;
            }
            if self.view(&s)?.group().epoch == view.group().epoch {
                self.targets
                    .wait_newer(view.map_version(), MAP_PATIENCE.min(self.targets.left(s.deadline)))
                    .await;
                let same = self.view(&s)?.group().epoch == view.group().epoch;
                if same && e.kind == ErrorKind::Stale && self.knows_no_newer(&s, &view, through).await {
                    return Err(e);
                }
            }
            if !retry.has_time() {
                return Err(e.of_kind(ErrorKind::Deadline).doing("not done by the deadline"));
            }
            waiting.replace(self.waits.begin(view.name_of(through)));
            retry.pause().await;
            attempt += 1;
        }
    }

    /// One attempt at a batch, by the message that fits.
    async fn send_batch(
        &self,
        s: &StripeRef,
        view: &GroupView,
        through: usize,
        token_epoch: u32,
        batch: &Batch,
        (write, attempt): (u64, u32),
    ) -> Result<Answered<OverlayWritten>> {
        let (place, cell) = (view.place(through), s.cell(usize::from(batch.index)));
        let (layout_scheme, payload) = (s.scheme(), batch.payload.clone());
        if let [OverlayPart { offset, len, kind, crc }] = batch.parts[..] {
            let request = WriteOverlay {
                place,
                cell,
                token_epoch,
                offset,
                len,
                kind,
                crc,
                layout_scheme,
                write,
                attempt,
            };
            return self
                .targets
                .call_member(view, through, &request, payload, Pacing::Write, s.deadline)
                .await;
        }
        let parts = batch.parts.clone();
        let request = WriteOverlays { place, cell, token_epoch, parts, layout_scheme, write, attempt };
        self.targets.call_member(view, through, &request, payload, Pacing::Write, s.deadline).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlay(index: u8, offset: u32, len: u32) -> Overlay {
        Overlay { index, offset, len, payload: Some(Bytes::from(vec![index; len as usize])) }
    }
    fn sizes(overlays: &[Overlay], parts_max: usize) -> Vec<(u8, usize, usize)> {
        let batches = batches(overlays, parts_max);
        batches.iter().map(|b| (b.index, b.parts.len(), b.payload.len())).collect()
    }

    #[test]
    fn extents_of_a_cell_share_messages() {
        let mut extents: Vec<Overlay> = (0..1500).map(|n| overlay(0, n * 600, 100)).collect();
        extents.push(overlay(1, 0, 200 << 10));
        extents.push(overlay(1, 300 << 10, 100 << 10));
        extents.push(Overlay { index: 1, offset: 500 << 10, len: 4096, payload: None });
        extents.push(overlay(3, 0, 512 << 10));
        let expected =
            [(0, 1024, 102_400), (0, 476, 47_600), (1, 1, 200 << 10), (1, 2, 100 << 10), (3, 1, 512 << 10)];
        assert_eq!(sizes(&extents, OVERLAY_PARTS_MAX), expected);
        assert_eq!(sizes(&extents, 1).len(), 1504, "an older cluster gets single ones");
    }

    #[test]
    fn a_message_has_each_extent_with_its_checksum() {
        let zeros = Overlay { index: 2, offset: 90, len: 10, payload: None };
        let extents = [overlay(2, 0, 7), zeros, overlay(2, 100, 5)];
        let [batch] = &batches(&extents, OVERLAY_PARTS_MAX)[..] else { panic!("one message") };
        let crc = |n: usize| checksum::crc32c(&vec![2; n]);
        let part = |offset, len, kind, crc| OverlayPart { offset, len, kind, crc };
        let (data, zero) = (OverlayKind::Data, OverlayKind::Zero);
        let expected = [part(0, 7, data, crc(7)), part(90, 10, zero, 0), part(100, 5, data, crc(5))];
        assert_eq!((&batch.parts[..], batch.payload.len(), batch.bytes()), (&expected[..], 12, 22));
    }
}
