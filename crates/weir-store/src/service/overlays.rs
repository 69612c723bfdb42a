//! Overlays: numbered by one member, mirrored to all that keep the cell's log, acknowledged when they have it
//! durably.
//!
//! The sequencer and the keepers follow from the group's map alone, so all nodes that act under one epoch
//! agree on them.
use super::*;
use crate::alloc::Extent;
use crate::crash_points;
use crate::format::Overlay;
use weir_env::{Backoff, Retry};

/// How long a mirrored overlay waits for the numbers before it.
const GAP_PATIENCE: Duration = Duration::from_secs(1);
/// Pauses between attempts to mirror to a peer that is up in the map: it may be a loaded one.
const MIRROR_RETRY: Backoff = Backoff { first: Duration::from_millis(20), max: Duration::from_secs(1) };

/// Extents that are logged in place, on the thread that took the request.
const IN_PLACE_PARTS_MAX: usize = 16;

impl StorageNode {
    pub(super) fn write_overlay(&self, r: WriteOverlay, payload: Bytes, deadline: Instant) -> Handled {
        self.write_overlays(as_parts(r), payload, deadline)
    }
    pub(super) fn write_overlays(&self, r: WriteOverlays, payload: Bytes, deadline: Instant) -> Handled {
        // Numbered in place if that is fast, so that numbers follow the order of arrival.
        let target = match self.target(r.place.target) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(target) => target,
        };
        // Before it is numbered: an earlier fence refuses it, a later one finds it here.
        let under_way = match target.under_way.begin(&r) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(under_way) => under_way,
        };
        let in_place =
            r.attempt == 0 && is_quick(&r.parts, &payload) && target.tails.is_compared(r.place.group, r.cell);
        let begun = match self.admit(r.place) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) if in_place => {
                match self.number_overlays(&acting, &r, &payload, deadline) {
                    Err(e) => return Handled::Now(Err(e)),
                    Ok(numbered) => Some((acting, numbered)),
                }
            }
            Ok(_) => None,
        };
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            under_way.earlier_ended(&node.env.clock, deadline).await?;
            let mut begun = begun;
            loop {
                let (acting, (seq, committed)) = match begun.take() {
                    Some(begun) => begun,
                    None => node.number_blocking(&r, &payload, deadline).await?,
                };
                let store = acting.target.store.clone();
                // The mirrors first: they write in parallel with this thread.
                let mirrors = node.mirror_to_keepers(acting.clone(), &r, seq, payload.clone(), deadline);
                let (mirrored, local) = tokio::join!(mirrors, store.durable_here(committed));
                store.crash_point(crash_points::OVERLAY_DURABLE);
                let e = match local.and(mirrored) {
                    Ok(map_version) => return Ok(Reply::new(&OverlayWritten { seq, map_version })),
                    Err(e) => e,
                };
                node.abort(&acting, &r, seq).await;
                // `Exists`: the number is void at a keeper. Another number is not.
                if e.kind != ErrorKind::Exists || node.env.clock.now() >= deadline {
                    return Err(e);
                }
            }
        }))
    }

    async fn number_blocking(
        &self,
        r: &WriteOverlays,
        payload: &Bytes,
        deadline: Instant,
    ) -> Result<(Acting, (Seq, CommitSeq))> {
        let acting = self.acting(r.place).await?;
        let acting = self.check_tail(acting, r.cell, deadline).await?;
        let (node, on, request, data) = (self.shared(), acting.clone(), r.clone(), payload.clone());
        let numbered = self
            .on_disk(&acting.target.store, move || node.number_overlays(&on, &request, &data, deadline))
            .await?;
        Ok((acting, numbered))
    }

    /// Returns the first number. Not after the deadline: its writer has reported a failure, and may have
    /// written there since.
    fn number_overlays(
        &self,
        acting: &Acting,
        r: &WriteOverlays,
        data: &Bytes,
        deadline: Instant,
    ) -> Result<(Seq, CommitSeq)> {
        let group = acting.group();
        if r.layout_scheme != group.scheme {
            return Err(Error::invalid(format!(
                "cell {}: {} is {}, not {}",
                r.cell, group.id, group.scheme, r.layout_scheme
            )));
        }
        if r.parts.iter().any(|part| part.kind == OverlayKind::Void) {
            return Err(Error::invalid(format!("overlay of cell {}: it changes nothing", r.cell)));
        }
        let sequencer = sequencer(group, r.cell);
        if sequencer != Some(acting.position) {
            return Err(Error::stale(format!(
                "overlay of cell {}: its sequencer is {}, not {}",
                r.cell,
                sequencer.map_or("nobody".into(), |p| group.members[p].target.to_string()),
                acting.target.store.target
            )));
        }
        let writes = writes_of(r.cell, r.token_epoch, down_mask(group), &r.parts, data)?;
        match acting.target.store.append_all(&acting.scope, Numbering::Next, &writes, deadline)? {
            (committed, Appended::At(first)) => {
                acting.target.store.crash_point(crash_points::NUMBERED);
                acting.logged(r.cell, &r.parts, self.env.clock.now());
                Ok((first, committed))
            }
            (_, other) => Err(Error::io(format!("overlay of cell {}: numbered as {other:?}", r.cell))),
        }
    }

    /// Returns the map version under which all live keepers of the log have the overlay and k or more are
    /// current. Members down since the numbering are reported to them under that epoch: a returning member
    /// lists cells written since it was current, perhaps in an epoch after the one of this overlay.
    async fn mirror_to_keepers(
        &self,
        mut acting: Acting,
        r: &WriteOverlays,
        first: Seq,
        payload: Bytes,
        deadline: Instant,
    ) -> Result<u64> {
        let mut reported = down_mask(acting.group());
        // By target: a place may move to another one meanwhile.
        let mut held: BTreeSet<TargetId> = BTreeSet::from([acting.target.store.target]);
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
                        Box::pin(self.while_live(&acting, *p, sent)) as BoxFuture<'_, Result<()>>
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
                acting.target.store.check_fence(r.cell.file, r.token_epoch)?;
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
            place: Place { target: peer, group: group.id, epoch: group.epoch },
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
                let sent = self.ask(peer, single(&request, first, part), payload);
                Box::pin(async move { sent.await.map(drop) })
            }
            _ => {
                let sent = self.ask(peer, request.clone(), payload);
                Box::pin(async move { sent.await.map(drop) })
            }
        };
        let store = acting.target.store.clone();
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
        let last = Seq(first.0 + lacking.parts.len() as u64 - 1);
        let place = lacking.place;
        let (stat, _) = self.ask(peer, StatCell { place, cell: lacking.cell }, Vec::new()).await?;
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
                self.ask(peer, request, payload).await?;
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
        let member = acting.group().members[position].target;
        match e.kind {
            ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Io | ErrorKind::NotFound => {
                let why = format!("mirror an overlay: {e}");
                // The coordinator's decision arrives in the map; if it does not answer, try again below.
                let _ = self.peers.report(member, acting.scope.group, acting.scope.epoch, why).await;
            }
            ErrorKind::Stale | ErrorKind::Busy { .. } => {}
            _ => return Err(e.clone()),
        }
        let epoch_now = || self.peers.map().group(acting.scope.group).map_or(acting.scope.epoch, |g| g.epoch);
        if epoch_now() == acting.scope.epoch {
            let _ = self.peers.wait_newer(acting.map.version, pause).await; // tries again either way
        }
        let epoch = epoch_now();
        let place = Place { target: acting.target.store.target, group: acting.scope.group, epoch };
        let acting = self.acting(place).await?;
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
                let place = Place { target: group.members[*p].target, group: group.id, epoch: group.epoch };
                let version = weir_proto::Version(0);
                let reported =
                    self.ask(place.target, MarkMissing { place, cell, version, missing: mask }, Vec::new());
                Box::pin(self.while_live(acting, *p, Box::pin(async move { reported.await.map(|_| ()) })))
                    as BoxFuture<'_, Result<()>>
            })
            .collect();
        let answers = join_all(calls).await;
        keepers.into_iter().zip(answers).find_map(|(p, answer)| answer.err().map(|e| (p, e)))
    }

    pub(super) fn mirror_overlay(&self, r: MirrorOverlay, payload: Bytes) -> Handled {
        let MirrorOverlay { place, cell, token_epoch, missing, layout_scheme, again, .. } = r;
        let parts = vec![OverlayPart { offset: r.offset, len: r.len, kind: r.kind, crc: r.crc }];
        let first = r.seq;
        let r = MirrorOverlays { place, cell, token_epoch, first, parts, missing, layout_scheme };
        self.mirror(r, again, payload)
    }
    pub(super) fn mirror_overlays(&self, r: MirrorOverlays, payload: Bytes) -> Handled {
        self.mirror(r, false, payload)
    }
    fn mirror(&self, r: MirrorOverlays, again: bool, payload: Bytes) -> Handled {
        let early = match self.admit(r.place) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) if is_quick(&r.parts, &payload) => {
                match self.log_mirrored(&acting, &r, again, &payload) {
                    Err(e) => return Handled::Now(Err(e)),
                    Ok(logged) => Some((acting, logged)),
                }
            }
            Ok(_) => None,
        };
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let (acting, mut logged) = match early {
                Some(early) => early,
                None => {
                    let acting = node.acting(r.place).await?;
                    let logged = node.log_blocking(&acting, &r, again, &payload).await?;
                    (acting, logged)
                }
            };
            let deadline = node.env.clock.now() + GAP_PATIENCE;
            while let (_, Appended::Gap { have }) = logged {
                let progress = acting.target.progress.notified();
                tokio::pin!(progress);
                progress.as_mut().enable();
                logged = node.log_blocking(&acting, &r, again, &payload).await?;
                if !matches!(logged.1, Appended::Gap { .. }) {
                    break;
                }
                let left = deadline.since(node.env.clock.now());
                if left.is_zero() || node.env.clock.timeout(left, progress).await.is_err() {
                    return Err(Error::stale(format!(
                        "overlay {} of cell {}: the numbers after {have} have not come",
                        r.first, r.cell
                    )));
                }
            }
            acting.target.store.durable_here(logged.0).await?;
            acting.target.store.crash_point(crash_points::MIRRORED);
            Ok(Reply::new(&()))
        }))
    }
    async fn log_blocking(
        &self,
        acting: &Acting,
        r: &MirrorOverlays,
        again: bool,
        data: &Bytes,
    ) -> Result<(CommitSeq, Appended)> {
        if is_quick(&r.parts, data) {
            return self.log_mirrored(acting, r, again, data);
        }
        let store = acting.target.store.clone();
        let (node, acting, r, data) = (self.shared(), acting.clone(), r.clone(), data.clone());
        self.on_disk(&store, move || node.log_mirrored(&acting, &r, again, &data)).await
    }
    fn log_mirrored(
        &self,
        acting: &Acting,
        r: &MirrorOverlays,
        again: bool,
        data: &Bytes,
    ) -> Result<(CommitSeq, Appended)> {
        let group = acting.group();
        if !log_keepers(group, r.cell).contains(&acting.position) {
            return Err(misplaced(r.cell, acting));
        }
        let numbering = match acting.state() {
            MemberState::Current if again => Numbering::Again(r.first),
            MemberState::Current => Numbering::Mirror(r.first),
            MemberState::Behind => Numbering::Behind(r.first),
            MemberState::Down => {
                return Err(Error::stale(format!(
                    "{} is down in {} under {}",
                    r.place.target, group.id, group.epoch
                )));
            }
        };
        let writes = writes_of(r.cell, r.token_epoch, r.missing, &r.parts, data)?;
        let store = &acting.target.store;
        let logged = store.append_all(&acting.scope, numbering, &writes, Instant(u64::MAX))?;
        match logged.1 {
            Appended::At(_) => acting.logged(r.cell, &r.parts, self.env.clock.now()),
            Appended::Void(seq) => {
                return Err(Error::exists(format!("overlay {seq} of cell {}: the number is void", r.cell)));
            }
            Appended::Duplicate(_) | Appended::Gap { .. } => {}
        }
        Ok(logged)
    }
}

/// An overlay numbered under an older map may be gone: this target was declared dead and returned, and repair
/// replaced its log by the others', with other overlays under these numbers, which a mirror would now
/// overwrite. The writer retries and gets another number; it has not lost its lease (that would be `Stale`).
fn check_still_held(acting: &Acting, r: &WriteOverlays, first: Seq) -> Result<()> {
    for (seq, part) in numbered(r, first) {
        if acting.target.store.holds_overlay(r.cell, seq, &part)? {
            continue;
        }
        // Dropped by a truncation that arrived after the number was assigned: the writer gets that error.
        acting.target.store.check_fence(r.cell.file, r.token_epoch)?;
        return Err(Error::unavailable(format!(
            "overlay {seq} of cell {}: its number went to another one while this target was away, write again",
            r.cell
        )));
    }
    Ok(())
}

/// The overlays of a write, in their logged form, with their numbers.
pub(super) fn numbered(r: &WriteOverlays, first: Seq) -> impl Iterator<Item = (Seq, Overlay)> {
    let token_epoch = r.token_epoch;
    r.parts.iter().zip(first.0..).map(move |(part, seq)| {
        let OverlayPart { offset, len, kind, crc } = *part;
        (Seq(seq), Overlay { offset, len, kind, crc, token_epoch, extent: Extent::default() })
    })
}

/// A write of one extent as one of several.
fn as_parts(r: WriteOverlay) -> WriteOverlays {
    let WriteOverlay { place, cell, token_epoch, offset, len, kind, crc, layout_scheme, write, attempt } = r;
    let parts = vec![OverlayPart { offset, len, kind, crc }];
    WriteOverlays { place, cell, token_epoch, parts, layout_scheme, write, attempt }
}

/// One extent of several, under its number.
fn single(of: &MirrorOverlays, seq: Seq, part: OverlayPart) -> MirrorOverlay {
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
fn is_quick(parts: &[OverlayPart], payload: &Bytes) -> bool {
    payload.len() <= INLINE_BYTES_MAX as usize && parts.len() <= IN_PLACE_PARTS_MAX
}

/// The extents of a message, each with its part of the payload.
fn writes_of<'a>(
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

// ---- decisions on a group

/// The positions that keep the overlay log of a data cell: its own, and all parity.
pub(super) fn log_keepers(group: &Group, cell: CellId) -> Vec<usize> {
    let data = usize::from(group.scheme.data);
    if usize::from(cell.index) >= data {
        return Vec::new();
    }
    [usize::from(cell.index)].into_iter().chain(data..group.members.len()).collect()
}
/// The sequencer of a data cell's overlays: the first of its log keepers that is current.
pub fn sequencer(group: &Group, cell: CellId) -> Option<usize> {
    log_keepers(group, cell)
        .into_iter()
        .find(|p| group.members.get(*p).is_some_and(|m| m.state == MemberState::Current))
}
pub(super) fn is_live(group: &Group, position: usize) -> bool {
    group.members.get(position).is_some_and(|m| m.state != MemberState::Down)
}
/// The fragments of places that are down.
pub fn down_mask(group: &Group) -> u64 {
    let down = group.members.iter().enumerate().filter(|(_, m)| m.state == MemberState::Down);
    down.fold(0, |mask, (i, _)| mask | (1 << i))
}
