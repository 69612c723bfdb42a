//! The work of movers: it is assigned, and its results are reported.
use super::base::Base;
use super::missing_names::MissingNames;
use super::recall::RecallCalls;
use crate::record::ChangeRecord;
use crate::relation::queues::{Relations, ShipQueues};
use crate::relation::record::RemoteEntry;
use crate::relation::results::{self, Recorded};
use crate::relation::ship_queue::{Batch, ShipQueue, WorkRequest};
use crate::relation::{apply, listing, steps, store, tree};
use crate::table::Present;
use crate::tables;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weir_kv::CommitSeq;
use weir_proto::relation::*;
use weir_proto::{Error, InodeId, Result, SessionId};

/// Longest wait of a mover.
const WAIT_MAX: Duration = Duration::from_secs(20);

/// Assigns work to movers, and takes its results.
pub struct MoverCalls {
    base: Arc<Base>,
    relations: Arc<Relations>,
    names: Arc<MissingNames>,
    recalls: Arc<RecallCalls>,
}

impl MoverCalls {
    pub fn new(
        base: &Arc<Base>,
        relations: &Arc<Relations>,
        names: &Arc<MissingNames>,
        recalls: &Arc<RecallCalls>,
    ) -> Arc<MoverCalls> {
        Arc::new(MoverCalls {
            base: base.clone(),
            relations: relations.clone(),
            names: names.clone(),
            recalls: recalls.clone(),
        })
    }

    /// Work for a mover; waits for some.
    pub async fn lease_work(self: Arc<Self>, r: LeaseWork) -> Result<WorkLeased> {
        let deadline = self.base.now() + Duration::from_millis(r.wait_ms.into()).min(WAIT_MAX);
        loop {
            let waiting = self.relations.work.notified();
            let (leased, noted, wanted) = self.batch_work(&r)?;
            for ino in wanted {
                self.recalls.want_back(ino)?;
            }
            if !leased.relations.is_empty() {
                // The possible effects of a mover's work must be known after a crash of this leader.
                self.base.commits.durable(noted).await?;
                return Ok(leased);
            }
            let now = self.base.now();
            let wake = self.relations.lock().next_try(now).map_or(deadline, |at| at.min(deadline));
            let scans = self.relations.lock().queues.values().any(|queue| queue.mirrors);
            let wake = if scans { wake.min(now + listing::BETWEEN_SCANS) } else { wake };
            let over = self.base.env.clock.timeout(wake.since(now), waiting).await.is_err();
            if over && self.base.now() >= deadline {
                return Ok(leased);
            }
        }
    }

    /// Work, if it may be assigned, and files to recall completely.
    fn batch_work(&self, r: &LeaseWork) -> Result<(WorkLeased, CommitSeq, BTreeSet<InodeId>)> {
        let now = self.base.now();
        let map_version = {
            let mut state = self.base.lock();
            state.session(r.session)?.last_contact = now;
            state.leases.written_under
        };
        let mut queues = self.relations.lock();
        queues.movers.insert(r.session, (now, r.limited_by.clone()));
        let leader = queues.leader;
        match r.leader {
            0 => drop(queues.former.remove(&r.session)),
            known if known == leader => {}
            _ => {
                return Err(Error::stale(
                    "work of a former metadata leader is with this mover: it must give it up, and open a new session",
                ));
            }
        }
        let mut leased = WorkLeased { leader, relations: Vec::new(), map_version };
        if !queues.former.is_empty() {
            return Ok((leased, CommitSeq(0), BTreeSet::new()));
        }
        let mut ids: Vec<RelationId> = queues.queues.keys().copied().collect();
        let first = ids.iter().position(|id| *id > queues.last).unwrap_or(0);
        ids.rotate_left(first);
        let (mut noted, mut wanted) = (CommitSeq(0), BTreeSet::new());
        let mut away = Vec::new();
        for id in ids {
            let Some(queue) = queues.queues.get_mut(&id) else { continue };
            if queue.back_off.as_ref().is_some_and(|b| now < b.until) {
                continue;
            }
            // After an outage home gets one request.
            let items = if queue.back_off.is_some() { 1 } else { r.items as usize };
            let batch = self.batch_of(id, queue, r, items, &mut away)?;
            wanted.append(&mut queue.wanted);
            if let Some((work, seq)) = batch {
                leased.relations.push(work);
                noted = seq;
                queues.last = id;
                break;
            }
        }
        drop(queues);
        if let Err(e) = self.recalls.recall_own(&away) {
            tracing::debug!("recall bytes to be shipped: {e}"); // they are requested again
        }
        Ok((leased, noted, wanted))
    }

    fn batch_of(
        &self,
        id: RelationId,
        queue: &mut ShipQueue,
        r: &LeaseWork,
        items: usize,
        away: &mut Vec<(InodeId, u64, u64)>,
    ) -> Result<Option<(RelationWork, CommitSeq)>> {
        loop {
            let (mut batch, mut url, mut is_new) = (Batch::default(), String::new(), false);
            let (mut parts, mut ids, mut by) = (false, None, 0);
            let (now, wall) = (self.base.now(), self.base.wall());
            let mut direction = Direction::Push;
            self.base.read(&mut |read| {
                let Some(record) = store::find_relation(read, id)? else { return Ok(()) };
                if record.paused.is_some() {
                    return Ok(());
                }
                url.clone_from(&record.url);
                parts = record.rules().parts;
                (ids, by) = (Some(record.ids.clone()), record.by);
                is_new = record.shipped_names == 0 && record.shipped_bytes == 0;
                let request = WorkRequest {
                    read,
                    relation: id,
                    record: &record,
                    session: r.session,
                    bytes: r.bytes,
                    items,
                };
                (direction, queue.mirrors) = (record.direction, record.mirrors());
                if record.mirrors() {
                    return queue.lists(&request, now, wall, &mut batch); // nothing is ever changed there
                }
                queue.names(&request, &mut batch)?;
                queue.lists(&request, now, wall, &mut batch)?;
                let request = WorkRequest { items: items.saturating_sub(batch.names.len()), ..request };
                queue.extents(&request, &mut batch)
            })?;
            let void = batch.has_void();
            queue.brings_back = !batch.away.is_empty();
            away.append(&mut batch.away);
            let noted = self.settle_batch(id, queue, &batch, parts, r.session)?;
            let Some(ids) = ids else { return Ok(None) }; // removed, or paused
            let orphans = queue.orphans.assign(r.session);
            if !batch.is_empty() || !orphans.is_empty() {
                let (names, extents, listings) = (batch.names, batch.extents, batch.listings);
                #[rustfmt::skip]
                let work = RelationWork {
                    relation: id, url, direction, ids, by, is_new, names, extents, orphans, listings,
                };
                return Ok(Some((work, noted)));
            }
            if !void {
                return Ok(None);
            }
        }
    }

    /// Changes that need no work at home are done; work that a mover begins is recorded before it starts,
    /// with the fact that a mover has it.
    fn settle_batch(
        &self,
        id: RelationId,
        queue: &mut ShipQueue,
        batch: &Batch,
        parts: bool,
        mover: SessionId,
    ) -> Result<CommitSeq> {
        for name in &batch.names {
            tracing::trace!(relation = %id, number = name.number, action = %steps::describe(&name.action), "given");
        }
        for extent in &batch.extents {
            let ExtentWork { ino, offset, len, .. } = extent;
            tracing::trace!(relation = %id, %ino, offset, len, finish = extent.finish.is_some(), expect = ?extent.expect, "given");
        }
        let noted = self.base.commits.transact_unshown(&mut |txn| {
            if !batch.is_empty() && !tables::MOVERS.has(txn, mover)? {
                tables::MOVERS.put(txn, mover, &Present);
            }
            batch.void_names.iter().for_each(|number| tables::NAME_CHANGES.delete(txn, (id, *number)));
            batch.void_directories.iter().for_each(|dir| tables::OLD_ATTRIBUTES.delete(txn, (id, *dir)));
            for ino in &batch.gone {
                store::drop_dirty(txn, id, *ino)?;
                if tree::find_remote(txn, id, *ino)?.is_none() {
                    tables::CONFLICTS.delete(txn, (id, *ino));
                }
            }
            for (ino, record) in &batch.relocations {
                tables::RELOCATIONS.put(txn, (id, *ino), record);
            }
            batch.void_relocations.iter().for_each(|ino| tables::RELOCATIONS.delete(txn, (id, *ino)));
            for name in &batch.names {
                let at = (id, name.number);
                if let Some(change) = tables::NAME_CHANGES.get(txn, at)?.filter(|change| !change.tried) {
                    tables::NAME_CHANGES.put(txn, at, &ChangeRecord { tried: true, ..change });
                }
            }
            for name in batch.names.iter().filter(|name| apply::changes_fingerprint(&name.action)) {
                apply::note_writing(txn, id, name.ino, true)?;
            }
            for ino in &batch.begun {
                if let Some(remote) = tree::find_remote(txn, id, *ino)? {
                    if parts {
                        tables::UNFINISHED.put(txn, (id, *ino), &Present);
                    }
                    let remote = RemoteEntry { writing: true, complete: None, ..remote };
                    tables::REMOTE.put(txn, (id, *ino), &remote);
                }
            }
            Ok(())
        })?;
        for (ino, number) in &batch.void_truncations {
            queue.forget_truncation(*ino, *number);
        }
        Ok(noted)
    }

    /// The results of work.
    pub fn complete_work(&self, r: &CompleteWork) -> Result<CommitSeq> {
        tracing::trace!(relation = %r.relation, session = %r.session, names = ?r.names, extents = ?r.extents, "told");
        let (now, wall) = (self.base.now(), self.base.wall());
        self.base.lock().session(r.session)?.last_contact = now;
        let mut queues_held = self.relations.lock();
        let ShipQueues { queues, meters, .. } = &mut *queues_held;
        let Some(queue) = queues.get_mut(&r.relation) else { return Ok(CommitSeq(0)) };
        let mut recorded = Recorded::default();
        let committed = self.base.commits.transact_unshown(&mut |txn| {
            recorded = results::record(txn, queue, r, wall)?;
            Ok(())
        })?;
        let mut answered = results::take_back(queue, r, now);
        for done in &r.listings {
            answered |= results::note(queue, now, &done.outcome, || format!("read directory {}", done.dir));
        }
        let mut unreadable = queue.listings.done(r.session, &r.listings, now);
        if queue.denial(now).is_some() {
            unreadable.append(&mut queue.listings.abandon());
        }
        let mirrors = queue.mirrors;
        if answered {
            queue.back_off = None;
        }
        if recorded.whole {
            queue.orphans.rescan();
        }
        if queue.orphans.dealt_with(r.session, &r.orphans) {
            self.relations.changed.notify_one();
        }
        meters.entry(r.relation).or_default().note(now, recorded.shipped);
        self.relations.work.notify_waiters();
        drop(queues_held);
        let mut state = self.base.lock();
        unreadable.iter().for_each(|dir| state.wake(*dir)); // waiting operations get the reason
        drop(state);
        if mirrors {
            // It may be gone: then the parent directory has no such entry any more.
            unreadable.iter().try_for_each(|dir| self.names.relist_above(*dir))?;
        }
        Ok(committed)
    }
}
