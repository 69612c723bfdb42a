//! Bytes of cells from targets: straight from the data cell's target, or decoded around it.
//!
//! Invariants: every byte returned passed its checksum; decoding uses fragments of one version only; "nothing
//! was written" is believed only if the members that know nothing are more than the number that may have lost
//! their data (`hole.rs`). Knows nothing of file sizes, leases or caches.
use crate::data::{Data, GroupView, StripeRef, is_unreachable, too_few};
use crate::hole::{Answer, Verdict};
use crate::join::{Join, join_all};
use crate::targets::Departure;
use crate::targets::Pacing;
use crate::{hole, latency};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::data::{CHECKSUM_BLOCK, CellRead, MarkMissing, ReadCell, ReadView};
use weir_proto::map::{Group, MemberState};
use weir_proto::{Error, ErrorKind, Result, Seq, TargetId, Version, checksum};
use weir_rpc::Answered;

/// A seal or a commit may replace the version during a read; each try reads the newest. After this number of
/// tries in a row it pauses between them: the refusal may be due to the epoch, with the newer map still
/// missing.
const QUICK_TRIES_MAX: u32 = 8;
const MAP_PATIENCE: Duration = Duration::from_millis(500);
/// A read that needs a member under repair waits this long for it: most groups are repaired in well under a
/// second.
const REPAIR_PATIENCE: Duration = Duration::from_secs(10);
/// The interval at which a read that lacks fragments asks for them again, with or without a new map.
const LOSS_PAUSE: Duration = Duration::from_millis(500);

/// Part of a data cell: `start` is a multiple of CHECKSUM_BLOCK, `len` too or up to the cell's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CellRange {
    pub index: usize,
    pub start: u32,
    pub len: u32,
}

/// Part of a cell.
#[derive(Clone, Debug)]
pub struct Part {
    /// Fewer than requested: the rest is zeros.
    pub bytes: Bytes,
    /// Nothing was ever written to the cell, or it was dropped.
    pub hole: bool,
}

enum Direct {
    Bytes(Part),
    /// Decode around the target.
    Around(Error),
    /// Ask again under the newer map.
    Again(Error),
}

enum Decoded {
    Bytes(Part),
    /// The stripe changed during the read.
    Moved(Error),
}

impl Data {
    /// A part of a data cell in its current version.
    pub async fn read_cell(&self, s: StripeRef, range: CellRange) -> Result<Part> {
        assert!(range.index < s.k() && range.start.is_multiple_of(CHECKSUM_BLOCK), "{s}: {range:?}");
        assert!(range.start + range.len <= s.layout.cell_bytes(), "{s}: {range:?} ends past the cell");
        let repaired_by = self.env.clock.now() + REPAIR_PATIENCE;
        self.needed_map(&s).await?;
        let (mut moves, mut waiting) = (0, None);
        let last = loop {
            let view = self.view(&s)?;
            let (direct, decoded) = self.read_hedged(&s, &view, range).await?;
            let decoded = match (direct, decoded) {
                (Direct::Bytes(bytes), _) => return Ok(bytes),
                (Direct::Again(e), _) => {
                    moves = QUICK_TRIES_MAX;
                    Ok(Decoded::Moved(e))
                }
                (Direct::Around(_), Some(decoded)) => decoded,
                (Direct::Around(why), None) => self.read_around(&s, range, &why).await,
            };
            let e = match decoded {
                Ok(Decoded::Bytes(bytes)) => return Ok(bytes),
                Ok(Decoded::Moved(e)) => {
                    moves += 1;
                    if moves > QUICK_TRIES_MAX && e.kind == ErrorKind::Damaged {
                        return Err(e); // no newer map is expected
                    }
                    if moves > QUICK_TRIES_MAX {
                        self.targets
                            .wait_newer(view.map_version(), MAP_PATIENCE.min(self.targets.left(s.deadline)))
                            .await;
                    }
                    e
                }
                // Too few under the previous map: the group's new epoch may have them.
                Err(e) if self.view(&s)?.group().epoch != view.group().epoch => e,
                // Too few for now: a member that is down may return, one that is behind is being repaired.
                Err(e) => {
                    let now = self.view(&s)?;
                    let lost_until = self.lost_until(&now, s.deadline);
                    let until = if has_behind(&now) { lost_until.max(repaired_by) } else { lost_until };
                    let are_all_current = now.group().current_count() == s.layout.scheme.width();
                    let left = match are_all_current {
                        _ if now.group().is_lost() => Duration::ZERO,
                        // The coordinator decides whether a silent member is down; it may be down itself.
                        true if e.kind == ErrorKind::Unavailable => self.targets.left(s.deadline),
                        true => Duration::ZERO,
                        false => self.targets.left(until).min(self.targets.left(s.deadline)),
                    };
                    if left.is_zero() {
                        return Err(e);
                    }
                    let whom = if are_all_current {
                        format!("targets of {}", now.group().id)
                    } else {
                        now.missing_names()
                    };
                    waiting.replace(self.waits.begin(whom));
                    self.targets.wait_newer(now.map_version(), LOSS_PAUSE.min(left)).await;
                    e
                }
            };
            if self.targets.left(s.deadline).is_zero() {
                break e;
            }
        };
        Err(Error::deadline(format!("read {s}: not done by the deadline: {last}")))
    }

    /// Asks the cell's own target; if its answer is late also decodes from the other members, and takes the
    /// first result. The outcome of decoding is returned if it ended without bytes.
    async fn read_hedged(
        &self,
        s: &StripeRef,
        view: &GroupView,
        range: CellRange,
    ) -> Result<(Direct, Option<Result<Decoded>>)> {
        let direct = self.read_direct(s, view, range);
        tokio::pin!(direct);
        let hedge_after = latency::hedge_after(
            self.targets.usual_max(Pacing::Read),
            self.targets.is_crowded(view.place(range.index).target),
        );
        let alone = s.layout.scheme.parity == 0;
        tokio::select! {
            biased;
            outcome = &mut direct => return Ok((outcome?, None)),
            () = self.env.clock.sleep(hedge_after), if !alone => {}
        }
        let decode = async {
            let _permit = self.hedges.acquire().await.ok();
            self.counters.hedged_reads.fetch_add(1, Relaxed);
            let why = Error::unavailable(format!("{} is late", view.place(range.index).target));
            self.read_around(s, range, &why).await
        };
        tokio::pin!(decode);
        tokio::select! {
            biased;
            outcome = &mut direct => Ok((outcome?, None)),
            decoded = &mut decode => match decoded {
                Ok(Decoded::Bytes(bytes)) => Ok((Direct::Bytes(bytes), None)),
                // The other members cannot help: wait for the late answer.
                decoded => Ok((direct.await?, Some(decoded))),
            },
        }
    }

    async fn read_direct(&self, s: &StripeRef, view: &GroupView, range: CellRange) -> Result<Direct> {
        let state = view.state(range.index);
        let place = view.place(range.index);
        if state != MemberState::Current {
            return Ok(Direct::Around(Error::unavailable(format!("{} is {state:?}", place.target))));
        }
        let alone = s.layout.scheme.parity == 0;
        match self.read_base_or_merged(s, view, range.index, range, ReadView::Merged, Version(0)).await {
            Ok((reply, payload)) if reply.known => Ok(Direct::Bytes(Part { bytes: payload, hole: false })),
            Ok(_) => self.classify_hole(s, view, range).await,
            Err(e) if e.kind == ErrorKind::Stale => Ok(Direct::Again(e)),
            Err(e) if e.kind == ErrorKind::Damaged => {
                self.report_damaged(s, view, range.index).await;
                Ok(Direct::Around(e))
            }
            Err(e) if is_unreachable(&e) => {
                // Slowness alone is not a reason for a report: it would cost the member its place.
                if e.kind != ErrorKind::Deadline || alone {
                    self.targets.report_only(place, &e).await;
                }
                Ok(Direct::Around(e))
            }
            Err(e) => Err(e.doing(format!("read {s}"))),
        }
    }

    /// A data target has no record of its cell: a hole, or it lost its data.
    async fn classify_hole(&self, s: &StripeRef, view: &GroupView, range: CellRange) -> Result<Direct> {
        Ok(match self.ask_of_hole(s, view, range.index, range.index).await {
            // The target itself may not know that it is behind.
            Err(e) => Direct::Again(e),
            Ok(Verdict::Hole) => Direct::Bytes(Part { bytes: Bytes::new(), hole: true }),
            Ok(Verdict::Written) => {
                let what = format!("{} lost cell {}", view.place(range.index).target, s.cell(range.index));
                Direct::Around(Error::damaged(what))
            }
            Ok(Verdict::Undecided(Some(e))) => Direct::Around(e.doing("ask whether a hole is one")),
            Ok(Verdict::Undecided(None)) => Direct::Around(too_few(s, view.group().current_count())),
        })
    }

    /// The member at `knows_nothing` has no record of a data cell: asks the others, all parity targets first.
    /// `Stale`: ask again under the newer map.
    async fn ask_of_hole(
        &self,
        s: &StripeRef,
        view: &GroupView,
        index: usize,
        knows_nothing: usize,
    ) -> Result<Verdict> {
        let scheme = s.layout.scheme;
        let (k, needed) = (usize::from(scheme.data), hole::needed(view.group()));
        let can_be_asked = |i: &usize| *i != knows_nothing && view.state(*i) == MemberState::Current;
        let ask = |at: usize| -> BoxFuture<'_, Result<Answer>> {
            Box::pin(async move {
                match self.stat_cell(s, view, at, at).await {
                    Ok(stat) => Ok(hole::reported(&stat, at, index, scheme)),
                    Err(e) if e.kind == ErrorKind::Stale => Err(e),
                    Err(e) => Ok(Answer::Silent(e)),
                }
            })
        };
        let parity = (k..scheme.width()).filter(can_be_asked).map(ask).collect();
        let mut reported = vec![Answer::Nothing];
        for answer in join_all(parity).await {
            reported.push(answer?);
        }
        let mut others = std::iter::once(index).chain((0..k).filter(|i| *i != index)).filter(can_be_asked);
        loop {
            match hole::classify(&reported, needed) {
                Verdict::Undecided(silent) => match others.next() {
                    Some(at) => reported.push(ask(at).await?),
                    None => return Ok(Verdict::Undecided(silent)),
                },
                decided => return Ok(decided),
            }
        }
    }

    /// One ReadCell whose bytes passed their checksums.
    async fn read_base_or_merged(
        &self,
        s: &StripeRef,
        view: &GroupView,
        at: usize,
        range: CellRange,
        how: ReadView,
        version: Version,
    ) -> Result<(CellRead, Bytes)> {
        let place = view.place(at);
        let request =
            ReadCell { place, cell: s.cell(at), view: how, version, offset: range.start, len: range.len };
        let answered = self.targets.call_member(view, at, &request, vec![], Pacing::Read, s.deadline).await?;
        let Answered { reply, payload, payload_crc } = answered;
        // The bytes were checksummed once, on arrival: the checksums of their blocks must combine to that of
        // the whole.
        let of_blocks = checksum::crc_of_blocks(&reply.block_crcs, payload.len() as u64);
        let sums_right = of_blocks == Some(payload_crc);
        if !sums_right || payload.len() > range.len as usize {
            self.counters.crc_failures.fetch_add(1, Relaxed);
            return Err(Error::damaged(format!(
                "cell {} at {}: bytes {} to {} fail their checksum",
                s.cell(at),
                place.target,
                range.start,
                u64::from(range.start) + u64::from(range.len)
            )));
        }
        Ok((reply, payload))
    }

    /// Reports to the holder that its fragment is damaged: it verifies it and rebuilds it.
    async fn report_damaged(&self, s: &StripeRef, view: &GroupView, index: usize) {
        let place = view.place(index);
        let request = MarkMissing { place, cell: s.cell(index), version: Version(0), missing: 1 << index };
        if let Err(e) =
            self.targets.call(place.target, &request, vec![], s.deadline, Departure::unwatched()).await
        {
            tracing::debug!("damage in {1} was not reported to {0}: {e}", place.target, s.cell(index));
        }
    }

    /// Decodes the range from k other fragments of one version, then applies the cell's overlays.
    async fn read_around(&self, s: &StripeRef, range: CellRange, why: &Error) -> Result<Decoded> {
        self.counters.degraded_reads.fetch_add(1, Relaxed);
        let (view, scheme) = (self.view(s)?, s.layout.scheme);
        let k = usize::from(scheme.data);
        let mut bad = Bad { known: BTreeSet::from([range.index]), silent: is_unreachable(why) };
        loop {
            let Some(anchor) = (k..scheme.width()).find(|i| usable(&view, *i, &bad)) else {
                return Err(lost(s, &view, why, &bad));
            };
            let first = self.read_base_or_merged(s, &view, anchor, range, ReadView::Base, Version(0)).await;
            let (head, payload) = match first {
                Ok(read) => read,
                Err(e) if e.kind == ErrorKind::Stale => return self.moved(&view, e).await,
                Err(e) => {
                    self.note_failure(s, &view, anchor, &e).await;
                    bad.insert(anchor, &e);
                    continue;
                }
            };
            if !head.known {
                match self.ask_of_hole(s, &view, range.index, anchor).await {
                    Err(e) => return self.moved(&view, e).await,
                    Ok(Verdict::Hole) => {}
                    // A write in flight may have reached other members first, and reaches this parity target
                    // in a moment.
                    Ok(Verdict::Written)
                        if !(k..scheme.width()).any(|i| i != anchor && usable(&view, i, &bad)) =>
                    {
                        let lost = lost(s, &view, why, &bad);
                        return self.moved(&view, lost).await;
                    }
                    Ok(Verdict::Written) => {
                        bad.known.insert(anchor); // it lost its data, or receives it in a moment
                        continue;
                    }
                    Ok(Verdict::Undecided(silent)) => {
                        bad.silent |= silent.is_some();
                        return Err(lost(s, &view, silent.as_ref().unwrap_or(why), &bad));
                    }
                }
            }
            let mut out = self.env.buffers.zeroed(range.len as usize);
            if head.known && head.version != Version(0) {
                let fragments = self
                    .join_version(s, &view, range, (anchor, payload), head.version, &mut bad, why)
                    .await?;
                let Some(fragments) = fragments else {
                    return self
                        .moved(&view, Error::stale(format!("read {s}: version {} is gone", head.version)))
                        .await;
                };
                let present: Vec<(usize, &[u8])> = fragments.iter().map(|(i, b)| (*i, &b[..])).collect();
                self.coder(scheme)?.reconstruct(&present, &[range.index], &mut [&mut out[..]])?;
            }
            let folded_seq = head.folded_seqs.get(range.index).copied().unwrap_or_default();
            match self.apply_overlays(s, &view, anchor, range, folded_seq, &mut out).await {
                Ok(()) => {}
                Err(e) if e.kind == ErrorKind::Stale => return self.moved(&view, e).await,
                Err(e) => {
                    self.note_failure(s, &view, anchor, &e).await;
                    bad.insert(anchor, &e);
                    continue;
                }
            }
            return Ok(match self.moved_since(s, &view, anchor, head.known.then_some(head.version)).await {
                Some(e) => Decoded::Moved(e),
                None => Decoded::Bytes(Part { bytes: out.freeze(), hole: !head.known }),
            });
        }
    }

    /// A seal that committed meanwhile removed overlays that this base does not have, and a truncation all of
    /// them.
    async fn moved_since(
        &self,
        s: &StripeRef,
        view: &GroupView,
        anchor: usize,
        base: Option<Version>,
    ) -> Option<Error> {
        match self.stat_cell(s, view, anchor, anchor).await {
            Ok(stat) if base.is_none_or(|base| stat.known && stat.base == base) => None,
            Ok(_) => Some(Error::stale(format!("read {s}: sealed or truncated meanwhile"))),
            Err(e) => Some(e),
        }
    }

    async fn moved(&self, view: &GroupView, e: Error) -> Result<Decoded> {
        self.targets.wait_newer(view.map_version(), Duration::from_millis(10)).await;
        Ok(Decoded::Moved(e))
    }

    async fn note_failure(&self, s: &StripeRef, view: &GroupView, at: usize, e: &Error) {
        if e.kind == ErrorKind::Damaged {
            self.report_damaged(s, view, at).await;
        } else if is_unreachable(e) {
            self.targets.report_only(view.place(at), e).await;
        }
    }

    /// Collects k fragments of `version`, including the given one. `None`: some member no longer has the
    /// version.
    async fn join_version(
        &self,
        s: &StripeRef,
        view: &GroupView,
        range: CellRange,
        first: (usize, Bytes),
        version: Version,
        bad: &mut Bad,
        why: &Error,
    ) -> Result<Option<Vec<(usize, Bytes)>>> {
        let scheme = s.layout.scheme;
        let k = usize::from(scheme.data);
        let mut have = vec![first];
        let is_candidate = |i: &usize| usable(view, *i, bad) && *i != have[0].0;
        let mut candidates: Vec<usize> = (0..scheme.width()).filter(is_candidate).collect();
        // Last resort: members that are behind but hold this very version.
        candidates.extend(
            (0..scheme.width()).filter(|i| view.state(*i) == MemberState::Behind && *i != range.index),
        );
        let mut waiting = candidates.into_iter();
        let mut calls = Join::new();
        let mut gone = false;
        loop {
            while have.len() + calls.len() < k {
                let Some(i) = waiting.next() else { break };
                calls.push(i, self.read_base_or_merged(s, view, i, range, ReadView::Base, version));
            }
            match calls.next().await {
                None if have.len() == k => return Ok(Some(have)),
                None if gone => return Ok(None),
                None => return Err(lost(s, view, why, bad)),
                Some((i, Ok((reply, payload)))) if reply.known && reply.version == version => {
                    have.push((i, payload));
                }
                // A member that is behind never had it, or lost it.
                Some((i, answer))
                    if view.state(i) == MemberState::Behind
                        && answer.as_ref().map_or_else(|e| e.kind == ErrorKind::Stale, |_| true) => {}
                Some((_, Ok(_))) => gone = true,
                Some((_, Err(e))) if matches!(e.kind, ErrorKind::Stale | ErrorKind::NotFound) => gone = true,
                Some((i, Err(e))) => {
                    self.note_failure(s, view, i, &e).await;
                    bad.insert(i, &e);
                }
            }
        }
    }

    /// The data cells of a stripe that may have bytes, as a parity target knows them: it has a part of every
    /// base and a copy of every overlay. All, if no parity target answers.
    pub async fn cells_with_data(&self, s: StripeRef) -> Vec<bool> {
        let scheme = s.layout.scheme;
        let all = vec![true; usize::from(scheme.data)];
        if self.needed_map(&s).await.is_err() {
            return all;
        }
        loop {
            let Ok(view) = self.view(&s) else { return all };
            let mut failed = false;
            for at in usize::from(scheme.data)..scheme.width() {
                if view.state(at) != MemberState::Current {
                    continue;
                }
                match self.stat_cell(&s, &view, at, at).await {
                    // If the base is empty at a parity target, it is empty in every cell.
                    Ok(stat) if stat.fragment_bytes > 0 || !stat.prepared.is_empty() => return all,
                    Ok(stat) => {
                        let seq = |seqs: &[Seq], i: usize| seqs.get(i).copied().unwrap_or_default();
                        let is_above = |i| seq(&stat.overlay_seqs, i) > seq(&stat.folded_seqs, i);
                        return (0..all.len()).map(is_above).collect();
                    }
                    Err(_) => failed = true,
                }
            }
            if !failed || !self.is_regrouped(&view, s.deadline).await {
                return all;
            }
        }
    }

    /// Several parts of one stripe in parallel, in the given order.
    pub async fn read_cells(&self, s: StripeRef, ranges: &[CellRange]) -> Result<Vec<Part>> {
        let calls = ranges.iter().map(|r| Box::pin(self.read_cell(s, *r)) as BoxFuture<'_, Result<Part>>);
        join_all(calls.collect()).await.into_iter().collect()
    }
}

/// Fewer than k fragments can be read: the error that names the stripe. They are lost if no member is
/// down or silent that may return with one: a file reported as damaged stays in conflict.
fn lost(s: &StripeRef, view: &GroupView, why: &Error, bad: &Bad) -> Error {
    let members = view.group().members.iter().enumerate();
    let down: Vec<String> = members
        .filter(|(i, _)| view.state(*i) != MemberState::Current)
        .map(|(_, m)| format!("{} {:?}", m.target, m.state))
        .collect();
    let what = format!(
        "read {s}: fewer than {} of its {} fragments can be had ({why}; not current: {})",
        s.layout.scheme.data,
        s.layout.scheme.width(),
        if down.is_empty() { "none".into() } else { down.join(", ") }
    );
    let is_down = |i| view.state(i) == MemberState::Down;
    let may_return = bad.silent || (0..s.layout.scheme.width()).any(is_down);
    if view.group().is_lost() {
        return Error::damaged(format!("{what}; {}", lost_by(view.group())));
    }
    if may_return { Error::unavailable(what) } else { Error::damaged(what) }
}

/// The members that returned without their data.
fn lost_by(group: &Group) -> String {
    let lost: BTreeSet<TargetId> = group.members.iter().filter(|m| m.is_lost()).map(|m| m.target).collect();
    let lost: Vec<String> = lost.iter().map(TargetId::to_string).collect();
    format!("{} returned without what they had", lost.join(", "))
}

/// Whether a member is being repaired.
fn has_behind(view: &GroupView) -> bool {
    view.group().members.iter().any(|m| m.state == MemberState::Behind)
}

/// Members that have returned no fragment.
struct Bad {
    known: BTreeSet<usize>,
    /// One of them gave no answer, so it may still do so.
    silent: bool,
}

impl Bad {
    fn insert(&mut self, index: usize, e: &Error) {
        self.known.insert(index);
        self.silent |= is_unreachable(e);
    }
}

fn usable(view: &GroupView, index: usize, bad: &Bad) -> bool {
    view.state(index) == MemberState::Current && !bad.known.contains(&index)
}
