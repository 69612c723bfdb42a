//! Calls to the other keepers of a log: overlays are mirrored to them, sent again, and fetched from them.
//!
//! Invariant: an overlay counts as mirrored only under a map whose live keepers all have it. Knows nothing of
//! which overlays are valid.
use super::parts::{numbered, single, take_data};
use super::tail::{Log, LogState};
use crate::calls::Calls;
use crate::format::Overlay;
use crate::group::{down_mask, is_live, log_keepers, sequencer};
use crate::membership::{Acting, Membership};
use crate::peers::join_all;
use crate::store::Store;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Backoff, BoxFuture, Env, Instant, Retry};
use weir_proto::data::*;
use weir_proto::{CellId, Error, ErrorKind, Result, Seq, TargetId, Version};

/// Pauses between attempts to mirror to a peer that is up in the map: it may be a loaded one.
const MIRROR_RETRY: Backoff = Backoff { first: Duration::from_millis(20), max: Duration::from_secs(1) };

pub(crate) struct Mirrors {
    env: Env,
    members: Arc<Membership>,
    calls: Arc<Calls>,
}

impl Mirrors {
    pub fn new(env: &Env, members: &Arc<Membership>, calls: &Arc<Calls>) -> Arc<Mirrors> {
        Arc::new(Mirrors { env: env.clone(), members: members.clone(), calls: calls.clone() })
    }

    /// Returns the map version under which all live keepers of the log have the overlay and k or more are
    /// current. Members down since the numbering are reported to them under that epoch: a returning member
    /// lists cells written since it was current, perhaps in an epoch after the one of this overlay.
    pub async fn mirror_to_keepers(
        &self,
        mut acting: Acting,
        r: &WriteOverlays,
        first: Seq,
        payload: Bytes,
        deadline: Instant,
    ) -> Result<u64> {
        let mut reported = down_mask(acting.group());
        // By target: a place may move to another one meanwhile.
        let mut held: BTreeSet<TargetId> = BTreeSet::from([acting.target()]);
        let mut retry = Retry::jittered(&self.env, MIRROR_RETRY, deadline);
        loop {
            let group = acting.group();
            let wanting: Vec<usize> = log_keepers(group, r.cell)
                .into_iter()
                .filter(|p| is_live(group, *p) && !held.contains(&group.members[*p].target))
                .collect();
            let problem = if wanting.is_empty() && !group.is_writable() {
                // A member that returns to such a group counts as current again, since nothing can have been
                // written meanwhile.
                let few = format!("fewer than {} members are current", group.scheme.data);
                Some((acting.position, Error::stale(few)))
            } else if wanting.is_empty() {
                let mask = down_mask(group);
                if mask & !reported == 0 {
                    return Ok(acting.map.version);
                }
                let problem = self.report_missing(&acting, r.cell, mask).await;
                reported |= if problem.is_none() { mask } else { 0 };
                problem
            } else {
                let calls = wanting
                    .iter()
                    .map(|p| {
                        let sent = self.mirror_to(&acting, *p, r, first, payload.clone());
                        Box::pin(self.members.while_live(&acting, *p, sent)) as BoxFuture<'_, Result<()>>
                    })
                    .collect();
                let mut problem = None;
                for (position, outcome) in wanting.iter().zip(join_all(calls).await) {
                    match outcome {
                        Ok(()) => drop(held.insert(group.members[*position].target)),
                        Err(e) => problem = Some((*position, e)),
                    }
                }
                problem
            };
            let Some((position, e)) = problem else { continue };
            if e.kind == ErrorKind::Stale {
                // A fence may be here by now, too: a peer that refused the overlay for it will never accept
                // it.
                acting.store.index().check_fence(r.cell.file, r.token_epoch)?;
            }
            if self.env.clock.now() >= deadline {
                return Err(e.doing(format_args!("mirror an overlay of cell {}", r.cell)));
            }
            acting = self.after_failure(acting, (position, &e), r.cell, retry.next_pause()).await?;
            check_still_held(&acting, r, first)?;
        }
    }

    fn mirror_to<'a>(
        &'a self,
        acting: &Acting,
        position: usize,
        r: &WriteOverlays,
        first: Seq,
        payload: Bytes,
    ) -> BoxFuture<'a, Result<()>> {
        let group = acting.group();
        let peer = group.members[position].target;
        let request = MirrorOverlays {
            place: acting.place_of(position),
            cell: r.cell,
            token_epoch: r.token_epoch,
            first,
            parts: r.parts.clone(),
            missing: down_mask(group),
            layout_scheme: r.layout_scheme,
        };
        let payload = if payload.is_empty() { Vec::new() } else { vec![payload] };
        let sent: BoxFuture<'a, Result<()>> = match request.parts[..] {
            [part] => {
                let sent = self.calls.ask(peer, single(&request, first, part), payload);
                Box::pin(async move { sent.await.map(drop) })
            }
            _ => {
                let sent = self.calls.ask(peer, request.clone(), payload);
                Box::pin(async move { sent.await.map(drop) })
            }
        };
        let store = acting.store.clone();
        Box::pin(async move {
            match sent.await {
                Err(e) if e.kind == ErrorKind::Stale => self.close_gap(&store, request, e).await,
                outcome => outcome,
            }
        })
    }

    /// A mirror that lacks earlier numbers gets them from our own log, and these. `refused`: its error.
    async fn close_gap(&self, store: &Store, lacking: MirrorOverlays, refused: Error) -> Result<()> {
        let (peer, first) = (lacking.place.target, lacking.first);
        assert!(!lacking.parts.is_empty(), "an overlay was numbered without an extent");
        let last = Seq(first.0 + lacking.parts.len() as u64 - 1);
        let place = lacking.place;
        let (stat, _) = self.calls.ask(peer, StatCell { place, cell: lacking.cell }, Vec::new()).await?;
        let mut have = stat.overlay_seqs.first().copied().unwrap_or_default();
        if have >= last {
            return Err(refused);
        }
        while have < last {
            let (log, parts) = store.read_overlays(lacking.cell, have)?;
            let mut parts = parts.into_iter();
            for o in log.extents.iter().filter(|o| o.seq <= last) {
                let payload: Vec<Bytes> =
                    if o.kind == OverlayKind::Data { parts.next().into_iter().collect() } else { Vec::new() };
                let part = OverlayPart { offset: o.offset, len: o.len, kind: o.kind, crc: o.crc };
                let token_epoch = o.token_epoch;
                let request =
                    MirrorOverlay { token_epoch, again: o.seq < first, ..single(&lacking, o.seq, part) };
                self.calls.ask(peer, request, payload).await?;
                have = o.seq;
            }
            if log.extents.is_empty() {
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Decides after a peer failed: the map to continue under, or the error.
    async fn after_failure(
        &self,
        acting: Acting,
        (position, e): (usize, &Error),
        cell: CellId,
        pause: Duration,
    ) -> Result<Acting> {
        match e.kind {
            ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Io | ErrorKind::NotFound => {
                self.members.report_failed(&acting, position, format!("mirror an overlay: {e}")).await;
            }
            ErrorKind::Stale | ErrorKind::Busy { .. } => {}
            _ => return Err(e.clone()),
        }
        if self.members.newest_epoch(&acting) == acting.scope.epoch {
            let _ = self.members.peers().wait_newer(acting.map.version, pause).await; // tries again either way
        }
        let acting = self.members.renewed(&acting).await?;
        if sequencer(acting.group(), cell) != Some(acting.position) {
            return Err(Error::stale(format!("overlay of cell {cell}: its sequencer is another target now")));
        }
        Ok(acting)
    }

    /// A member went down after the overlay was logged: the others mark its fragment as missing. Returns the
    /// member that failed to, and its error.
    async fn report_missing(&self, acting: &Acting, cell: CellId, mask: u64) -> Option<(usize, Error)> {
        let group = acting.group();
        let keepers: Vec<usize> =
            log_keepers(group, cell).into_iter().filter(|p| is_live(group, *p)).collect();
        let calls = keepers
            .iter()
            .map(|p| {
                let place = acting.place_of(*p);
                let request = MarkMissing { place, cell, version: Version(0), missing: mask };
                let reported = self.calls.ask(place.target, request, Vec::new());
                Box::pin(self.members.while_live(
                    acting,
                    *p,
                    Box::pin(async move { reported.await.map(|_| ()) }),
                )) as BoxFuture<'_, Result<()>>
            })
            .collect();
        let answers = join_all(calls).await;
        keepers.into_iter().zip(answers).find_map(|(p, answer)| answer.err().map(|e| (p, e)))
    }

    /// A peer's log above the folded sequence, its last number and that sequence.
    pub async fn log_of(&self, acting: &Acting, cell: CellId, peer: usize) -> Result<LogState> {
        let place = acting.place_of(peer);
        let (mut log, mut after) = (Log::new(), Seq(0));
        loop {
            let (read, _) =
                self.calls.ask(place.target, ReadOverlays { place, cell, after }, Vec::new()).await?;
            for o in &read.extents {
                let OverlayExtent { offset, len, kind, crc, token_epoch, seq } = *o;
                log.insert(seq, Overlay { offset, len, kind, crc, token_epoch, extent: Default::default() });
                after = seq;
            }
            if !read.more || read.extents.is_empty() {
                break;
            }
        }
        let (stat, _) = self.calls.ask(place.target, StatCell { place, cell }, Vec::new()).await?;
        let first = |seqs: &[Seq]| seqs.first().copied().unwrap_or_default();
        let folded_seq = first(&stat.folded_seqs);
        // A seal that is committed at one of them only has what the other one still logs.
        log.retain(|seq, _| *seq > folded_seq);
        Ok(LogState { log, last: first(&stat.overlay_seqs), folded_seq })
    }

    /// Sends these numbers of the own log to a peer, in order.
    pub async fn send_again(
        &self,
        acting: &Acting,
        cell: CellId,
        peer: usize,
        numbers: &BTreeSet<Seq>,
    ) -> Result<()> {
        let (place, group) = (acting.place_of(peer), acting.group());
        let Some(first) = numbers.first() else { return Ok(()) };
        tracing::debug!(to = %place.target, %cell, ?numbers, "overlays are sent again");
        let (mut after, store) = (Seq(first.0.saturating_sub(1)), acting.store.clone());
        loop {
            let reading = store.clone();
            let (log, parts) = self.env.tasks.blocking(move || reading.read_overlays(cell, after)).await?;
            let mut parts = parts.into_iter();
            for o in &log.extents {
                let payload: Vec<Bytes> =
                    if o.kind == OverlayKind::Data { parts.next().into_iter().collect() } else { Vec::new() };
                after = o.seq;
                if !numbers.contains(&o.seq) {
                    continue;
                }
                let request = MirrorOverlay {
                    place,
                    cell,
                    token_epoch: o.token_epoch,
                    seq: o.seq,
                    offset: o.offset,
                    len: o.len,
                    kind: o.kind,
                    missing: down_mask(group),
                    crc: o.crc,
                    layout_scheme: group.scheme,
                    again: true,
                };
                self.calls.ask(place.target, request, payload).await?;
            }
            if !log.more || log.extents.is_empty() {
                return Ok(());
            }
        }
    }

    /// The overlays of these numbers with their bytes, each from the peer that has it.
    pub async fn fetch(
        &self,
        acting: &Acting,
        cell: CellId,
        numbers: &BTreeMap<Seq, usize>,
    ) -> Result<BTreeMap<Seq, (OverlayExtent, Bytes)>> {
        let mut found = BTreeMap::new();
        for peer in numbers.values().copied().collect::<BTreeSet<usize>>() {
            let wanted = numbers.iter().filter(|(_, p)| **p == peer).map(|(seq, _)| *seq).collect();
            found.extend(self.fetch_from(acting, cell, peer, &wanted).await?);
        }
        Ok(found)
    }

    async fn fetch_from(
        &self,
        acting: &Acting,
        cell: CellId,
        peer: usize,
        numbers: &BTreeSet<Seq>,
    ) -> Result<BTreeMap<Seq, (OverlayExtent, Bytes)>> {
        let place = acting.place_of(peer);
        let mut found = BTreeMap::new();
        let Some(first) = numbers.first() else { return Ok(found) };
        let mut after = Seq(first.0.saturating_sub(1));
        loop {
            let request = ReadOverlays { place, cell, after };
            let (log, mut payload) = self.calls.ask(place.target, request, Vec::new()).await?;
            for o in &log.extents {
                after = o.seq;
                let data = take_data(cell, o, place.target, &mut payload)?;
                if numbers.contains(&o.seq) {
                    found.insert(o.seq, (o.clone(), data));
                }
            }
            if !log.more || log.extents.is_empty() {
                return Ok(found);
            }
        }
    }
}

/// An overlay numbered under an older map may be gone: this target was declared dead and returned, and repair
/// replaced its log by the others', with other overlays under these numbers, which a mirror would now
/// overwrite. The writer retries and gets another number; it has not lost its lease (that would be `Stale`).
fn check_still_held(acting: &Acting, r: &WriteOverlays, first: Seq) -> Result<()> {
    for (seq, part) in numbered(r, first) {
        if acting.store.index().holds_overlay(r.cell, seq, &part)? {
            continue;
        }
        // Dropped by a truncation that arrived after the number was assigned: the writer gets that error.
        acting.store.index().check_fence(r.cell.file, r.token_epoch)?;
        return Err(Error::unavailable(format!(
            "overlay {seq} of cell {}: its number went to another one while this target was away, write again",
            r.cell
        )));
    }
    Ok(())
}
