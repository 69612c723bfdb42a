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
use super::mirrors::Mirrors;
use super::parts::numbered;
use super::tail::{LogState, Tails, adoptable};
use crate::calls::Calls;
use crate::cells::{Appended, Numbering, Scope, same_write};
use crate::format::Overlay;
use crate::group::{down_mask, is_live, log_keepers, sequencer};
use crate::membership::{Acting, Membership};
use crate::rebuild::Rebuilder;
use crate::store::{OverlayWrite, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::{Env, Instant};
use weir_kv::CommitSeq;
use weir_proto::data::*;
use weir_proto::map::MemberState::Current;
use weir_proto::{CellId, Epoch, Error, ErrorKind, FileId, PgId, Result, Seq};

/// Cells whose logs are known to differ; beyond that their whole group is checked again.
const DIFFERING_MAX: usize = 4096;
/// Cells in one listing.
const LIST_LIMIT: u32 = 2048;

/// Between attempts to compare a log after a start while a keeper does not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Groups and cells whose logs may differ between keepers.
#[derive(Default)]
struct Differing {
    /// The epoch of each group up to which logs are the same, except those in `cells`.
    agreed: BTreeMap<PgId, Epoch>,
    cells: BTreeMap<CellId, PgId>,
}

impl Differing {
    fn note(&mut self, cell: CellId, group: PgId) {
        if self.cells.len() >= DIFFERING_MAX {
            self.agreed.remove(&group);
        } else {
            self.cells.insert(cell, group);
        }
    }
}

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
fn compare(own: &LogState, theirs: &LogState) -> Difference {
    let mut found = Difference::default();
    let folded_seq = own.folded_seq.max(theirs.folded_seq);
    for (seq, t) in theirs.log.iter().filter(|(seq, _)| **seq > folded_seq) {
        match own.log.get(seq) {
            None if *seq > own.last => found.beyond = Some(*seq),
            Some(o) if !same_write(o, t) && t.kind == OverlayKind::Void => drop(found.void.insert(*seq)),
            _ => {}
        }
    }
    let lacks = |(seq, o): &(&Seq, &Overlay)| !theirs.log.get(seq).is_some_and(|t| same_write(o, t));
    let above = own.log.iter().filter(|(seq, _)| **seq > folded_seq);
    found.send = above.filter(lacks).map(|(seq, _)| *seq).collect();
    found
}

pub(crate) struct Agreement {
    env: Env,
    members: Arc<Membership>,
    calls: Arc<Calls>,
    mirrors: Arc<Mirrors>,
    rebuilder: Arc<Rebuilder>,
    differing: Mutex<Differing>,
    tails: Tails,
    /// An overlay was logged: mirrors that wait for a number check again.
    logged: Notify,
}

impl Agreement {
    pub fn new(
        env: &Env,
        members: &Arc<Membership>,
        calls: &Arc<Calls>,
        mirrors: &Arc<Mirrors>,
        rebuilder: &Arc<Rebuilder>,
    ) -> Arc<Agreement> {
        Arc::new(Agreement {
            env: env.clone(),
            members: members.clone(),
            calls: calls.clone(),
            mirrors: mirrors.clone(),
            rebuilder: rebuilder.clone(),
            differing: Mutex::default(),
            tails: Tails::default(),
            logged: Notify::new(),
        })
    }

    /// Whether the cell's log was compared with the other keepers' since the target started.
    pub fn is_compared(&self, group: PgId, cell: CellId) -> bool {
        self.tails.is_compared(group, cell)
    }
    /// All logs of the group were copied from the other members.
    pub fn note_copied(&self, group: PgId) {
        self.tails.note_group(group);
    }
    /// Notified when an overlay is logged here.
    pub fn logged(&self) -> &Notify {
        &self.logged
    }

    /// Makes the logs that this target numbers the same at all keepers, after a new epoch or a failed write.
    pub async fn agree_round(&self) {
        for acting in self.members.current_places() {
            let group = acting.group();
            let agreed = self.lock().agreed.get(&group.id).copied();
            if agreed == Some(group.epoch) {
                continue;
            }
            match self.find_differing(&acting, agreed.unwrap_or_default()).await {
                Err(e) => tracing::debug!(group = %group.id, "compare overlay logs: {e}"),
                Ok(found) => {
                    let mut differing = self.lock();
                    differing.agreed.insert(group.id, group.epoch);
                    found.into_iter().for_each(|cell| differing.note(cell, group.id));
                }
            }
        }
        let differing: Vec<(CellId, PgId)> =
            self.lock().cells.iter().map(|(cell, group)| (*cell, *group)).collect();
        for (cell, group) in differing {
            match self.agree_on(cell, group).await {
                Ok(()) => drop(self.lock().cells.remove(&cell)),
                Err(e) => tracing::debug!(%cell, "bring overlay logs into line: {e}"),
            }
        }
        let differing = self.lock();
        let is_agreed = |group: &&PgId| !differing.cells.values().any(|of| of == *group);
        differing.agreed.keys().filter(is_agreed).for_each(|group| self.tails.note_group(*group));
    }

    fn lock(&self) -> MutexGuard<'_, Differing> {
        self.differing.lock().unwrap_or_else(PoisonError::into_inner)
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
                let request = acting.ask_cells(peer, after, since, LIST_LIMIT);
                let (list, _) = self.calls.ask(request.target, request, Vec::new()).await?;
                let of_ours = |c: &&CellSummary| numbered.contains(&c.cell.index);
                let theirs: BTreeMap<CellId, u64> =
                    list.cells.iter().filter(of_ours).map(|c| (c.cell, c.log_sum)).collect();
                let until = list.cells.last().map(|c| c.cell).filter(|_| list.more);
                let (store, from, id) = (acting.store.clone(), after, group.id);
                let own =
                    self.env.tasks.blocking(move || store.index().log_sums(id, from, until, since)).await?;
                let own = own.into_iter().filter(|(cell, _)| numbered.contains(&cell.index));
                found.extend(own.filter(|(cell, _)| !theirs.contains_key(cell)).map(|(cell, _)| cell));
                for (cell, sum) in theirs {
                    let own = acting.store.index().header(cell)?.map_or(0, |h| h.log_sum);
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
    async fn agree_on(&self, cell: CellId, group: PgId) -> Result<()> {
        let acting = self.members.current_in(group);
        let numbers = |acting: &Acting| sequencer(acting.group(), cell) == Some(acting.position);
        let Some(acting) = acting.filter(numbers) else { return Ok(()) };
        let (group, index) = (acting.group(), acting.store.index());
        let is_peer = |p: &usize| *p != acting.position && is_live(group, *p);
        let peers: Vec<usize> = log_keepers(group, cell).into_iter().filter(is_peer).collect();
        let void_below = index.void_below(cell)?;
        if void_below == FENCE_GONE {
            return Ok(()); // the file is deleted
        }
        let mut logs = BTreeMap::new();
        for peer in peers.iter().filter(|p| group.members[**p].state == Current) {
            let read = Box::pin(self.mirrors.log_of(&acting, cell, *peer));
            let mut theirs = match self.members.while_live(&acting, *peer, read).await {
                Ok(theirs) => theirs,
                Err(e) => {
                    self.report_unreachable(&acting, *peer, &e).await;
                    return Err(e);
                }
            };
            // A truncation here reaches that member, too, as soon as it is sent.
            theirs.log.retain(|_, o| o.token_epoch >= void_below);
            logs.insert(*peer, theirs);
        }
        self.take_missed_seal(&acting, cell, &logs).await?;
        let void = self.void_here(&acting, cell, &logs).await?;
        for peer in peers {
            let own = log_here(&acting.store, cell)?;
            // A member that is behind copies the log in its present state; later voids are sent to it, too.
            let mut send = void.clone();
            if let Some(theirs) = logs.get(&peer) {
                send.extend(compare(&own, theirs).send);
            }
            self.mirrors.send_again(&acting, cell, peer, &send).await?;
        }
        Ok(())
    }

    /// Writes wait for the comparison after a start, so the coordinator must learn of a keeper that is gone.
    async fn report_unreachable(&self, acting: &Acting, peer: usize, e: &Error) {
        if let ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Io | ErrorKind::NotFound = e.kind {
            self.members.report_failed(acting, peer, format!("compare an overlay log: {e}")).await;
        }
    }

    /// Rebuilds the own base if a seal folded overlays that are not here: this log lost its end, and a number
    /// that it gave again would count as one that is folded.
    async fn take_missed_seal(
        &self,
        acting: &Acting,
        cell: CellId,
        logs: &BTreeMap<usize, LogState>,
    ) -> Result<()> {
        let has_all = |last: Seq| logs.values().all(|theirs| theirs.folded_seq <= last);
        if has_all(log_here(&acting.store, cell)?.last) {
            return Ok(());
        }
        let own = acting.own_cell(cell.file, cell.stripe);
        tracing::warn!(target_id = %acting.target(), %cell, "a seal is missing here: the base is rebuilt");
        self.rebuilder.rebuild(acting, own, false).await?;
        match has_all(log_here(&acting.store, cell)?.last) {
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
        logs: &BTreeMap<usize, LogState>,
    ) -> Result<BTreeSet<Seq>> {
        let store = &acting.store;
        let own = log_here(store, cell)?;
        let (mut void, mut beyond) = (BTreeSet::new(), Seq(0));
        for theirs in logs.values() {
            let found = compare(&own, theirs);
            void.extend(found.void);
            beyond = beyond.max(found.beyond.unwrap_or_default());
        }
        let token_epoch = store.index().newest_token_epoch(cell)?;
        let adopted = match self.tails.is_compared(acting.scope.group, cell) {
            true => BTreeMap::new(),
            false => adoptable(own.last, logs),
        };
        let mut lost = self.mirrors.fetch(acting, cell, &adopted).await?;
        let mut committed = CommitSeq(0);
        for seq in &void {
            committed = append_void(store, &acting.scope, cell, Numbering::Again(*seq), token_epoch)?.0;
        }
        // New writes here replace the others' overlays under the same numbers.
        loop {
            let next = Seq(log_here(store, cell)?.last.0 + 1);
            if next > beyond {
                break;
            }
            if let Some((overlay, data)) = lost.remove(&next) {
                committed = adopt(acting, cell, &overlay, &data)?;
                continue;
            }
            let (last, appended) = append_void(store, &acting.scope, cell, Numbering::Next, token_epoch)?;
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
        self.logged.notify_waiters();
        store.durable(committed).await?;
        Ok(void)
    }

    /// A write failed after it was numbered here: its numbers become void, here first, then at all keepers of
    /// the log. Not one that belongs to another write by now: this target was away, and has the log of
    /// the members that continued.
    pub async fn abort(&self, acting: &Acting, r: &WriteOverlays, first: Seq) {
        let (cell, token_epoch, group) = (r.cell, r.token_epoch, acting.scope.group);
        let mut held = Vec::new();
        for (seq, overlay) in numbered(r, first) {
            match acting.store.index().holds_overlay(cell, seq, &overlay) {
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
        // A keeper that does not answer may have gone down; the writer waits for this.
        if let Err(e) = self.agree_within_epoch(cell, group).await {
            tracing::debug!(%cell, %first, "a failed overlay is not void everywhere yet: {e}");
            self.lock().note(cell, group);
        }
    }

    async fn agree_within_epoch(&self, cell: CellId, group: PgId) -> Result<()> {
        tokio::select! {
            biased;
            agreed = self.agree_on(cell, group) => agreed,
            () = self.members.epoch_passes(group) => Err(Error::unavailable("the group has changed")),
        }
    }

    async fn void_under_newest(
        &self,
        acting: &Acting,
        cell: CellId,
        numbers: &[Seq],
        token_epoch: u32,
    ) -> Result<()> {
        let newest = self.members.current_in(acting.scope.group);
        let Some(newest) = newest.filter(|a| sequencer(a.group(), cell) == Some(a.position)) else {
            return Ok(()); // the present sequencer decides
        };
        let mut committed = CommitSeq(0);
        for seq in numbers {
            let number = Numbering::Again(*seq);
            committed = append_void(&newest.store, &newest.scope, cell, number, token_epoch)?.0;
        }
        self.logged.notify_waiters();
        newest.store.durable(committed).await
    }

    /// Returns when the log of the cell was compared since the target started, with the newest map.
    pub async fn check_tail(&self, mut acting: Acting, cell: CellId, deadline: Instant) -> Result<Acting> {
        let group = acting.scope.group;
        while !self.tails.is_compared(group, cell) {
            match self.agree_within_epoch(cell, group).await {
                Ok(()) => self.tails.note_cell(cell),
                Err(e) if self.env.clock.now() >= deadline => {
                    return Err(e.doing(format_args!("compare the log of cell {cell} after a start")));
                }
                Err(e) => {
                    tracing::debug!(%cell, "compare a log after a start: {e}");
                    self.env.clock.sleep(RETRY_PAUSE).await;
                }
            }
            acting = self.members.renewed(&acting).await?;
        }
        Ok(acting)
    }
}

fn log_here(store: &Store, cell: CellId) -> Result<LogState> {
    let (log, last, folded_seq) = store.index().log(cell)?;
    Ok(LogState { log, last, folded_seq })
}

/// Makes a number of a cell's log void: logged as the next number, or replacing the overlay under it.
fn append_void(
    store: &Store,
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
    store.append(scope, number, &write)
}

/// Logs an overlay under the number that it has at the other keepers, which follows the last one here.
fn adopt(acting: &Acting, cell: CellId, overlay: &OverlayExtent, data: &[u8]) -> Result<CommitSeq> {
    let OverlayExtent { seq, offset, len, kind, crc, token_epoch } = *overlay;
    let missing = down_mask(acting.group());
    let write = OverlayWrite { cell, token_epoch, offset, len, kind, crc, missing, data };
    match acting.store.append(&acting.scope, Numbering::Again(seq), &write)? {
        (committed, Appended::At(at)) => {
            assert_eq!(at, seq, "an adopted overlay has another number than at the other keepers");
            Ok(committed)
        }
        // Numbered or truncated here meanwhile.
        (_, other) => {
            Err(Error::unavailable(format!("overlay {seq} of cell {cell} is not adopted: {other:?}")))
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
        let state = |entries: &[(u64, Overlay)], last, folded_seq| -> LogState {
            let log = entries.iter().map(|(s, o)| (Seq(*s), o.clone())).collect();
            LogState { log, last: Seq(last), folded_seq: Seq(folded_seq) }
        };
        let seqs = |seqs: &[u64]| -> BTreeSet<Seq> { seqs.iter().map(|s| Seq(*s)).collect() };
        let own = state(&[(1, data(1)), (2, data(2)), (3, void())], 3, 0);
        let found = |theirs: &[(u64, Overlay)]| compare(&own, &state(theirs, 0, 0));
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
        assert_eq!(compare(&own, &state(&[(3, void())], 3, 2)), Difference::default());
    }
}
