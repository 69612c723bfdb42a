//! Agreement: all keepers of a cell's log hold the same log.
//!
//! An overlay is acknowledged when every live keeper has it. One that only some have was never acknowledged:
//! a target was full, or the sequencer died before all had it. Left like that, a read would depend on the
//! keeper that serves it, so the overlay must be at all keepers or at none. The sequencer decides: overlays
//! that it has go to all, and a number that only other keepers have becomes void everywhere
//! ([`OverlayKind::Void`]; such numbers are not assigned again), unless the sequencer has just started: its
//! log may have lost its end, and it adopts the overlay (`tail.rs`). It checks cells written earlier when the
//! group's epoch has changed, and single cells whose write failed.
//!
//! [`compare`] is the pure part: the difference between two logs.
use super::overlays::{is_live, log_keepers, sequencer};
use super::tail::adoptable;
use super::*;
use crate::cells;
use crate::format::Overlay;
use crate::lookup;
use weir_proto::map::MemberState::Current;

/// Cells whose logs are known to differ; beyond that their whole group is checked again.
const DIFFERING_MAX: usize = 4096;
/// Cells in one listing.
const LIST_LIMIT: u32 = 2048;

/// Groups and cells whose logs may differ between keepers.
#[derive(Default)]
pub(crate) struct Agreement {
    /// The epoch of each group up to which logs are the same, except those in `differing`.
    agreed: BTreeMap<PgId, Epoch>,
    differing: BTreeMap<CellId, PgId>,
}
impl Agreement {
    pub fn differs(&mut self, cell: CellId, group: PgId) {
        if self.differing.len() >= DIFFERING_MAX {
            self.agreed.remove(&group);
        } else {
            self.differing.insert(cell, group);
        }
    }
}

/// A log without its data.
pub(crate) type Log = BTreeMap<Seq, Overlay>;

/// Changes that make `theirs` equal to the sequencer's `own` log.
#[derive(Default, PartialEq, Eq, Debug)]
struct Difference {
    /// Numbers that become void here.
    void: BTreeSet<Seq>,
    /// They have numbers above this one that were never assigned here.
    beyond: Option<Seq>,
    /// Numbers that they lack or hold with other data.
    send: BTreeSet<Seq>,
}

/// Only numbers above both folded sequences count: the rest is in a base.
fn compare(
    (own, own_last, own_folded): &(Log, Seq, Seq),
    (theirs, _, folded_seq): &(Log, Seq, Seq),
) -> Difference {
    let same =
        |a: &Overlay, b: &Overlay| (a.offset, a.len, a.kind, a.crc) == (b.offset, b.len, b.kind, b.crc);
    let mut found = Difference::default();
    let folded_seq = (*own_folded).max(*folded_seq);
    for (seq, t) in theirs.iter().filter(|(seq, _)| **seq > folded_seq) {
        match own.get(seq) {
            None if *seq > *own_last => found.beyond = Some(*seq),
            Some(o) if !same(o, t) && t.kind == OverlayKind::Void => drop(found.void.insert(*seq)),
            _ => {}
        }
    }
    let lacks = |(seq, o): &(&Seq, &Overlay)| !theirs.get(seq).is_some_and(|t| same(o, t));
    let above = own.iter().filter(|(seq, _)| **seq > folded_seq);
    found.send = above.filter(lacks).map(|(seq, _)| *seq).collect();
    found
}

impl StorageNode {
    /// Makes the logs that this target numbers the same at all keepers, after a new epoch or a failed write.
    pub(crate) async fn agree_round(&self, target: &Arc<Target>) -> Result<()> {
        let map = self.peers.map();
        for group in &map.groups {
            let me = |m: &weir_proto::map::Member| m.target == target.store.target;
            let Some(position) = group.members.iter().position(me) else { continue };
            let agreed = target.agreement().agreed.get(&group.id).copied();
            if group.members[position].state != Current || agreed == Some(group.epoch) {
                continue;
            }
            let acting =
                Acting { target: target.clone(), scope: Scope::of(group), map: map.clone(), position };
            match self.find_differing(&acting, agreed.unwrap_or_default()).await {
                Err(e) => tracing::debug!(group = %group.id, "compare overlay logs: {e}"),
                Ok(found) => {
                    let mut agreement = target.agreement();
                    agreement.agreed.insert(group.id, group.epoch);
                    found.into_iter().for_each(|cell| agreement.differs(cell, group.id));
                }
            }
        }
        let differing: Vec<(CellId, PgId)> =
            target.agreement().differing.iter().map(|(cell, group)| (*cell, *group)).collect();
        for (cell, group) in differing {
            match self.agree_on(target, cell, group).await {
                Ok(()) => drop(target.agreement().differing.remove(&cell)),
                Err(e) => tracing::debug!(%cell, "bring overlay logs into line: {e}"),
            }
        }
        let agreement = target.agreement();
        for group in
            agreement.agreed.keys().filter(|group| !agreement.differing.values().any(|g| g == *group))
        {
            target.tails.note_group(*group);
        }
        Ok(())
    }

    /// Cells of the group written since an epoch whose log this target numbers, and whose log differs at
    /// another keeper.
    async fn find_differing(&self, acting: &Acting, since: Epoch) -> Result<BTreeSet<CellId>> {
        let group = acting.group();
        let data = usize::from(group.scheme.data);
        let first = CellId { file: FileId::default(), stripe: 0, index: 0 };
        let numbered: BTreeSet<u8> = (0..group.scheme.data)
            .filter(|index| sequencer(group, CellId { index: *index, ..first }) == Some(acting.position))
            .collect();
        let mut found = BTreeSet::new();
        let peers = (data..group.members.len())
            .filter(|p| *p != acting.position && group.members[*p].state == Current && !numbered.is_empty());
        for peer in peers {
            let mut after = None;
            loop {
                let target = group.members[peer].target;
                let request = ListCells {
                    target,
                    group: group.id,
                    after,
                    since,
                    epoch: group.epoch,
                    limit: LIST_LIMIT,
                };
                let (list, _) = self.ask(target, request, Vec::new()).await?;
                let of_ours = |c: &&CellSummary| numbered.contains(&c.cell.index);
                let theirs: BTreeMap<CellId, u64> =
                    list.cells.iter().filter(of_ours).map(|c| (c.cell, c.log_sum)).collect();
                let until = list.cells.last().map(|c| c.cell).filter(|_| list.more);
                let (store, from, id) = (acting.target.store.clone(), after, group.id);
                let own = self.env.tasks.blocking(move || store.log_sums(id, from, until, since)).await?;
                let own = own.into_iter().filter(|(cell, _)| numbered.contains(&cell.index));
                found.extend(own.filter(|(cell, _)| !theirs.contains_key(cell)).map(|(cell, _)| cell));
                for (cell, sum) in theirs {
                    let own = acting.target.store.header(cell)?.map_or(0, |h| h.log_sum);
                    if own != sum {
                        found.insert(cell);
                    }
                }
                after = until;
                if until.is_none() {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Makes all keepers' logs of a cell the same, if this target numbers it.
    pub(crate) async fn agree_on(&self, target: &Arc<Target>, cell: CellId, group: PgId) -> Result<()> {
        let map = self.peers.map();
        let Some(group) = map.group(group) else { return Ok(()) };
        let me = group.members.iter().position(|m| m.target == target.store.target);
        let Some(position) = me.filter(|p| sequencer(group, cell) == Some(*p)) else { return Ok(()) };
        let acting = Acting { target: target.clone(), scope: Scope::of(group), map: map.clone(), position };
        let peers: Vec<usize> =
            log_keepers(group, cell).into_iter().filter(|p| *p != position && is_live(group, *p)).collect();
        let void_below = target.store.void_below(cell)?;
        if void_below == FENCE_GONE {
            return Ok(()); // the file is deleted
        }
        let mut logs = BTreeMap::new();
        for peer in peers.iter().filter(|p| group.members[**p].state == Current) {
            let read = Box::pin(self.log_of(&acting, cell, *peer));
            let mut log = match self.while_live(&acting, *peer, read).await {
                Ok(log) => log,
                Err(e) => {
                    self.report_unreachable(&acting, *peer, &e).await;
                    return Err(e);
                }
            };
            // A truncation here reaches that member, too, as soon as it is sent.
            log.0.retain(|_, o| o.token_epoch >= void_below);
            logs.insert(*peer, log);
        }
        self.take_missed_seal(&acting, cell, &logs).await?;
        let void = self.void_here(&acting, cell, &logs).await?;
        for peer in peers {
            let own = target.store.log(cell)?;
            // A member that is behind copies the log in its present state; later voids are sent to it, too.
            let mut send = void.clone();
            if let Some(theirs) = logs.get(&peer) {
                send.extend(compare(&own, theirs).send);
            }
            self.send_again(&acting, cell, peer, &send).await?;
        }
        Ok(())
    }

    /// Writes wait for the comparison after a start, so the coordinator must learn of a keeper that is gone.
    async fn report_unreachable(&self, acting: &Acting, peer: usize, e: &Error) {
        if let ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Io | ErrorKind::NotFound = e.kind {
            let (target, Scope { group, epoch, .. }) = (acting.group().members[peer].target, acting.scope);
            let why = format!("compare an overlay log: {e}");
            // Its decision arrives in the map; if it does not answer, the comparison is tried again.
            let _ = self.peers.report(target, group, epoch, why).await;
        }
    }

    /// A peer's log above the folded sequence, its last number and that sequence.
    async fn log_of(&self, acting: &Acting, cell: CellId, peer: usize) -> Result<(Log, Seq, Seq)> {
        let group = acting.group();
        let place = Place { target: group.members[peer].target, group: group.id, epoch: group.epoch };
        let (mut log, mut after) = (Log::new(), Seq(0));
        loop {
            let (read, _) = self.ask(place.target, ReadOverlays { place, cell, after }, Vec::new()).await?;
            for o in &read.extents {
                let OverlayExtent { offset, len, kind, crc, token_epoch, seq } = *o;
                log.insert(seq, Overlay { offset, len, kind, crc, token_epoch, extent: Default::default() });
                after = seq;
            }
            if !read.more || read.extents.is_empty() {
                break;
            }
        }
        let (stat, _) = self.ask(place.target, StatCell { place, cell }, Vec::new()).await?;
        let first = |seqs: &[Seq]| seqs.first().copied().unwrap_or_default();
        let folded_seq = first(&stat.folded_seqs);
        // A seal that is committed at one of them only has what the other one still logs.
        log.retain(|seq, _| *seq > folded_seq);
        Ok((log, first(&stat.overlay_seqs), folded_seq))
    }

    /// Rebuilds the own base if a seal folded overlays that are not here: this log lost its end, and a number
    /// that it gave again would count as one that is folded.
    async fn take_missed_seal(
        &self,
        acting: &Acting,
        cell: CellId,
        logs: &BTreeMap<usize, (Log, Seq, Seq)>,
    ) -> Result<()> {
        let own_last = acting.target.store.log(cell)?.1;
        if logs.values().all(|(_, _, folded_seq)| *folded_seq <= own_last) {
            return Ok(());
        }
        let own = CellId { index: acting.position as u8, ..cell };
        tracing::warn!(target_id = %acting.target.store.target, %cell, "a seal is missing here: the base is rebuilt");
        self.rebuild(acting, own, false).await?;
        let (_, last, _) = acting.target.store.log(cell)?;
        match logs.values().all(|(_, _, folded_seq)| *folded_seq <= last) {
            true => Ok(()),
            false => Err(Error::unavailable(format!("cell {cell}: a seal that is missing here is in doubt"))),
        }
    }

    /// Makes void here the numbers that are void at the others, or that only they have. After a start those
    /// are adopted instead. Returns the void numbers.
    async fn void_here(
        &self,
        acting: &Acting,
        cell: CellId,
        logs: &BTreeMap<usize, (Log, Seq, Seq)>,
    ) -> Result<BTreeSet<Seq>> {
        let store = &acting.target.store;
        let own = store.log(cell)?;
        let (mut void, mut beyond) = (BTreeSet::new(), Seq(0));
        for theirs in logs.values() {
            let found = compare(&own, theirs);
            void.extend(found.void);
            beyond = beyond.max(found.beyond.unwrap_or_default());
        }
        let token_epoch = store.newest_token_epoch(cell)?;
        let adopted = match acting.target.tails.is_compared(acting.scope.group, cell) {
            true => BTreeMap::new(),
            false => adoptable(own.1, logs),
        };
        let mut lost = self.fetch_overlays(acting, cell, &adopted).await?;
        let mut committed = CommitSeq(0);
        for seq in &void {
            committed = store.void(&acting.scope, cell, Numbering::Again(*seq), token_epoch)?.0;
        }
        // New writes here replace the others' overlays under the same numbers.
        loop {
            let next = Seq(store.log(cell)?.1.0 + 1);
            if next > beyond {
                break;
            }
            if let Some((overlay, data)) = lost.remove(&next) {
                committed = store.adopt(acting, cell, &overlay, &data)?;
                continue;
            }
            let (last, appended) = store.void(&acting.scope, cell, Numbering::Next, token_epoch)?;
            committed = last;
            if let Appended::At(seq) = appended {
                void.insert(seq);
            }
        }
        if !adopted.is_empty() {
            tracing::warn!(target_id = %store.target, %cell, ?adopted, "overlays that others have were missing here: adopted");
        }
        if !void.is_empty() {
            tracing::debug!(target_id = %store.target, %cell, ?void, "overlays that some member lacks are void now");
        }
        acting.target.progress.notify_waiters();
        store.durable(committed).await?;
        Ok(void)
    }

    /// Sends these numbers of the own log to a peer, in order.
    async fn send_again(
        &self,
        acting: &Acting,
        cell: CellId,
        peer: usize,
        numbers: &BTreeSet<Seq>,
    ) -> Result<()> {
        let group = acting.group();
        let place = Place { target: group.members[peer].target, group: group.id, epoch: group.epoch };
        let Some(first) = numbers.first() else { return Ok(()) };
        tracing::debug!(to = %place.target, %cell, ?numbers, "overlays are sent again");
        let (mut after, store) = (Seq(first.0.saturating_sub(1)), acting.target.store.clone());
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
                self.ask(place.target, request, payload).await?;
            }
            if !log.more || log.extents.is_empty() {
                return Ok(());
            }
        }
    }

    /// A write failed after it was numbered here: its numbers become void, here first, then at all keepers of
    /// the log. Not one that belongs to another write by now: this target was away, and has the log of
    /// the members that continued.
    pub(super) async fn abort(&self, acting: &Acting, r: &WriteOverlays, first: Seq) {
        let (target, group) = (&acting.target, acting.scope.group);
        let (cell, token_epoch) = (r.cell, r.token_epoch);
        let mut held = Vec::new();
        for (seq, overlay) in super::overlays::numbered(r, first) {
            match target.store.holds_overlay(cell, seq, &overlay) {
                Ok(true) => held.push(seq),
                Ok(false) => {}
                Err(e) => return tracing::debug!(%cell, %seq, "find a failed overlay: {e}"),
            }
        }
        if held.is_empty() {
            return;
        }
        // If that fails the bytes stay, and are sent to all keepers that lack them.
        if let Err(e) = self.void_under_newest(acting, cell, &held, token_epoch).await {
            tracing::debug!(%cell, %first, "make a failed overlay void: {e}");
        }
        let agreed = tokio::select! {
            biased;
            agreed = self.agree_on(target, cell, group) => agreed,
            // A keeper that does not answer may have gone down; the writer waits for this.
            () = self.epoch_passes(group) => Err(Error::unavailable("the group has changed")),
        };
        if let Err(e) = agreed {
            tracing::debug!(%cell, %first, "a failed overlay is not void everywhere yet: {e}");
            target.agreement().differs(cell, group);
        }
    }

    async fn void_under_newest(
        &self,
        acting: &Acting,
        cell: CellId,
        numbers: &[Seq],
        token_epoch: u32,
    ) -> Result<()> {
        let map = self.peers.map();
        let group = map.group(acting.scope.group).ok_or_else(|| Error::not_found("the group is gone"))?;
        if sequencer(group, cell) != Some(acting.position) {
            return Ok(()); // the present sequencer decides
        }
        let (store, scope) = (&acting.target.store, Scope::of(group));
        let mut last = None;
        for seq in numbers {
            last = Some(store.void(&scope, cell, Numbering::Again(*seq), token_epoch)?.0);
        }
        acting.target.progress.notify_waiters();
        match last {
            Some(committed) => store.durable(committed).await,
            None => Ok(()),
        }
    }
}

impl Target {
    pub(crate) fn agreement(&self) -> std::sync::MutexGuard<'_, Agreement> {
        self.agreement.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Makes a number of a cell's log void: logged as the next number, or replacing the overlay under it.
    fn void(
        &self,
        scope: &Scope,
        cell: CellId,
        number: Numbering,
        token_epoch: u32,
    ) -> Result<(CommitSeq, Appended)> {
        let write = OverlayWrite {
            cell,
            token_epoch,
            offset: 0,
            len: 0,
            kind: OverlayKind::Void,
            crc: 0,
            missing: 0,
            data: &[],
        };
        self.append(scope, number, &write)
    }

    /// Logs an overlay under the number that it has at the other keepers, which follows the last one here.
    fn adopt(
        &self,
        acting: &Acting,
        cell: CellId,
        overlay: &OverlayExtent,
        data: &[u8],
    ) -> Result<CommitSeq> {
        let OverlayExtent { seq, offset, len, kind, crc, token_epoch } = *overlay;
        let missing = down_mask(acting.group());
        let write = OverlayWrite { cell, token_epoch, offset, len, kind, crc, missing, data };
        match self.append(&acting.scope, Numbering::Again(seq), &write)? {
            (committed, Appended::At(_)) => Ok(committed),
            // Numbered or truncated here meanwhile.
            (_, other) => {
                Err(Error::unavailable(format!("overlay {seq} of cell {cell} is not adopted: {other:?}")))
            }
        }
    }

    fn void_below(&self, cell: CellId) -> Result<u32> {
        let mut below = 0;
        self.kv().read(&mut |r| {
            below = crate::entries::void_below(r, cell)?;
            Ok(())
        })?;
        Ok(below)
    }

    /// The log of a cell above its folded sequence, its last number, and that sequence.
    pub(crate) fn log(&self, cell: CellId) -> Result<(Log, Seq, Seq)> {
        let mut found = (Log::new(), Seq(0), Seq(0));
        self.kv().read(&mut |r| {
            let header = crate::entries::get::<crate::format::Header>(r, &crate::format::header_key(cell))?;
            let (last, folded_seq) = header.map_or((Seq(0), Seq(0)), |h| (h.last_seq, h.folded_seq));
            let log = cells::overlays(r, cell, Seq(0), Seq(u64::MAX))?;
            found = (log.into_iter().collect(), last, folded_seq);
            Ok(())
        })?;
        Ok(found)
    }

    /// The log sums of the group's cells that have a log and were written since an epoch: one part of the
    /// listing.
    fn log_sums(
        &self,
        group: PgId,
        mut after: Option<CellId>,
        until: Option<CellId>,
        since: Epoch,
    ) -> Result<BTreeMap<CellId, u64>> {
        let mut found = BTreeMap::new();
        loop {
            let mut batch = Vec::new();
            self.kv().read(&mut |r| {
                batch.clear();
                for cell in lookup::listed_cells(r, group, after, LIST_LIMIT as usize)? {
                    batch.push((cell, lookup::summary(r, cell)?));
                }
                Ok(())
            })?;
            for (cell, summary) in &batch {
                if until.is_some_and(|u| *cell > u) {
                    return Ok(found);
                }
                if let Some(s) = summary.as_ref().filter(|s| s.epoch >= since && s.log_sum != 0) {
                    found.insert(*cell, s.log_sum);
                }
            }
            match batch.last() {
                Some((cell, _)) if batch.len() == LIST_LIMIT as usize => after = Some(*cell),
                _ => return Ok(found),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequencers_log_is_the_one() {
        let entry = |kind: OverlayKind, crc: u32| Overlay {
            offset: 0,
            len: u32::from(kind != OverlayKind::Void),
            kind,
            crc,
            token_epoch: 1,
            extent: Default::default(),
        };
        let data = |crc| entry(OverlayKind::Data, crc);
        let void = || entry(OverlayKind::Void, 0);
        let log = |entries: &[(u64, Overlay)]| -> Log {
            entries.iter().map(|(s, o)| (Seq(*s), o.clone())).collect()
        };
        let seqs = |seqs: &[u64]| -> BTreeSet<Seq> { seqs.iter().map(|s| Seq(*s)).collect() };
        let own = (log(&[(1, data(1)), (2, data(2)), (3, void())]), Seq(3), Seq(0));
        let found = |theirs: &[(u64, Overlay)]| compare(&own, &(log(theirs), Seq(0), Seq(0)));
        let all_there = [(1, data(1)), (2, data(2)), (3, void())];
        assert_eq!(found(&all_there), Difference::default());
        assert_eq!(found(&[(1, data(1))]), Difference { send: seqs(&[2, 3]), ..Difference::default() });
        let failed_here = [(1, data(1)), (2, data(2)), (3, data(3))];
        assert_eq!(found(&failed_here), Difference { send: seqs(&[3]), ..Difference::default() });
        let void_there = [(1, data(1)), (2, void()), (3, void())];
        let agreed = Difference { void: seqs(&[2]), send: seqs(&[2]), ..Difference::default() };
        assert_eq!(found(&void_there), agreed);
        let more = [(1, data(1)), (2, data(2)), (3, void()), (4, data(4)), (5, data(5))];
        assert_eq!(found(&more), Difference { beyond: Some(Seq(5)), ..Difference::default() });
        // They have committed a seal.
        assert_eq!(compare(&own, &(log(&[(3, void())]), Seq(3), Seq(2))), Difference::default());
    }
}
