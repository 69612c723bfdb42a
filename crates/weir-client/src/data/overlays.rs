//! Writes overlays: extents for data cells, each through its cell's sequencer.
use super::{Data, MAP_PATIENCE, Overlay, StripeRef, is_unreachable, too_few};
use crate::join::join_all;
use crate::member::Pacing;
use weir_env::{BoxFuture, Instant};
use weir_proto::data::{OverlayKind, WriteOverlay};
use weir_proto::{Error, ErrorKind, Result, checksum};
use weir_rpc::Payload;

/// An overlay is written again this often if the member that was full has space when it is asked.
const SPACES_MAX: u32 = 5;

impl Data {
    /// Writes extents into data cells, in parallel.
    pub async fn write_overlays(&self, s: StripeRef, token_epoch: u32, overlays: &[Overlay]) -> Result<()> {
        let calls: Vec<BoxFuture<'_, Result<()>>> = overlays
            .iter()
            .map(|o| Box::pin(self.write_overlay(s, token_epoch, o)) as BoxFuture<'_, _>)
            .collect();
        join_all(calls).await.into_iter().collect::<Result<()>>().map_err(|e| e.doing(format!("write {s}")))
    }

    /// The same; while a place that a full target has moves to another one, it waits, up to `full_until`.
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
                    if !self.is_moved(&s, full_until).await {
                        return Err(e);
                    }
                }
                written => return written,
            }
        }
    }

    async fn write_overlay(&self, s: StripeRef, token_epoch: u32, o: &Overlay) -> Result<()> {
        let (kind, crc) = match &o.payload {
            Some(bytes) => (OverlayKind::Data, checksum::crc32c(bytes)),
            None => (OverlayKind::Zero, 0),
        };
        let payload = Payload { parts: o.payload.iter().cloned().collect(), crc: Some(crc) };
        let (mut retry, mut waiting) = (self.retry(s.deadline), None);
        let (write, mut attempt, mut spaces) = (self.env.rng.next_u64(), 0, 0);
        loop {
            let view = self.writable_view(&s).await?;
            let through = view
                .sequencer(o.index, s.scheme())
                .ok_or_else(|| too_few(&s, view.group().current_count()))?;
            let place = view.place(through);
            let request = WriteOverlay {
                place,
                cell: s.cell(usize::from(o.index)),
                token_epoch,
                offset: o.offset,
                len: o.len,
                kind,
                crc,
                layout_scheme: s.scheme(),
                write,
                attempt,
            };
            let sent = self.call_member(&view, through, &request, payload.clone(), Pacing::Write, s.deadline);
            let e = match sent.await {
                Ok(answered) => {
                    self.maps.note_written(answered.reply.map_version);
                    return Ok(());
                }
                Err(e) => e,
            };
            if is_unreachable(&e) {
                self.report(place, &e).await;
            } else if e.kind != ErrorKind::Stale {
                match self.overlay_refusal(&view, o.index, o.len, &e).await {
                    Some(refused) => return Err(refused),
                    None if spaces == SPACES_MAX || !retry.has_time() => return Err(e),
                    None => spaces += 1,
                }
                retry.pause().await;
                attempt += 1;
                continue;
            }
            if self.view(&s)?.group().epoch == view.group().epoch {
                self.wait_newer(view.map_version(), MAP_PATIENCE.min(self.left(s.deadline))).await;
                let same = self.view(&s)?.group().epoch == view.group().epoch;
                if same && e.kind == ErrorKind::Stale && self.knows_no_newer(&s, &view, through).await {
                    return Err(e);
                }
            }
            if !retry.has_time() {
                return Err(Error::deadline(format!("not done by the deadline: {e}")));
            }
            waiting.replace(self.waits.begin(view.name_of(through)));
            retry.pause().await;
            attempt += 1;
        }
    }
}
