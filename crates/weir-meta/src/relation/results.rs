//! Results that a mover reports: they become records, and the queue takes the work back.
use super::record::{ConflictRecord, ReceiptRecord, RemoteEntry};
use super::ship_queue::{self, ShipQueue};
use super::steps::{self, Step};
use super::{apply, changelog, ingest, store, tree};
use crate::namespace::find_inode;
use crate::tables;
use weir_env::Instant;
use weir_kv::Txn;
use weir_proto::meta::FileKind::{BlockDevice, CharDevice};
use weir_proto::meta::Time;
use weir_proto::relation::*;
use weir_proto::{InodeId, Result};
use weir_relation::dirty::{self, DirtyRange, FINISH};
use weir_relation::files::ExtentOut;

/// The sum of a report.
#[derive(Default)]
pub struct Recorded {
    /// Bytes that home has now.
    pub shipped: u64,
    /// A file was made whose content is older than the changelog.
    pub whole: bool,
}

/// Records the results of a mover's own work; those of work that it does not have any more are ignored.
pub fn record(txn: &mut dyn Txn, queue: &ShipQueue, r: &CompleteWork, wall: Time) -> Result<Recorded> {
    let mut recorded = Recorded::default();
    let Some(mut record) = store::find_relation(txn, r.relation)? else { return Ok(recorded) };
    for done in &r.names {
        let own = queue.names_out.get(&done.number).filter(|out| out.session == r.session);
        let Some(out) = own else { continue };
        let Outcome::Done { fingerprint } = &done.outcome else {
            record_failed(txn, r.relation, done, &out.step, wall)?;
            continue;
        };
        let (number, step) = (done.number, &out.step);
        recorded.whole |= matches!(&step.effect, steps::Effect::Make { whole: true, .. });
        apply::apply(txn, r.relation, number, wall, &step.effect, fingerprint)?;
        if step.last && ship_queue::directory_of_work(number).is_none() {
            tables::NAME_CHANGES.delete(txn, (r.relation, number));
            record.shipped_names += 1;
        }
    }
    for done in &r.extents {
        let Some(out) = queue.files.range_of(r.session, done.ino, done.offset) else { continue };
        match &done.outcome {
            Outcome::Done { fingerprint } => {
                recorded.shipped += done.len;
                receive(txn, r.relation, queue, wall, done, out, fingerprint)?;
            }
            other => note_conflict(txn, r.relation, done.ino, wall, other),
        }
    }
    for ino in queue.at_rest_after(r) {
        if r.extents.iter().any(|done| done.ino == ino && done.offset == FINISH) {
            store::note_finished(txn, r.relation, ino)?;
        }
        if let Some(remote) = tree::find_remote(txn, r.relation, ino)? {
            tables::REMOTE.put(txn, (r.relation, ino), &RemoteEntry { writing: false, ..remote });
        }
    }
    record.shipped_bytes += recorded.shipped;
    tables::RELATIONS.put(txn, r.relation, &record);
    Ok(recorded)
}

/// A change of names that home does not have.
fn record_failed(
    txn: &mut dyn Txn,
    relation: RelationId,
    done: &NameDone,
    step: &Step,
    wall: Time,
) -> Result<()> {
    match (&done.outcome, &step.action) {
        // A mover that finds an external change makes none: it is to be found again.
        (Outcome::Diverged { .. }, NameAction::Attributes { expect, .. }) => {
            apply::note_writing(txn, relation, step.ino, expect.writing)?;
        }
        (Outcome::Refused { .. }, NameAction::Make { kind: CharDevice | BlockDevice, .. }) => {
            apply::note_not_made(txn, relation, done.number)?;
        }
        _ => {}
    }
    note_conflict(txn, relation, step.ino, wall, &done.outcome);
    Ok(())
}

/// The mover does not have this work any more; returns whether home answered.
pub fn take_back(queue: &mut ShipQueue, r: &CompleteWork, now: Instant) -> bool {
    let mut answered = false;
    for done in &r.names {
        let own = queue.names_out.get(&done.number).is_some_and(|out| out.session == r.session);
        if own && let Some(out) = queue.names_out.remove(&done.number) {
            steps::held_by(&out.step.effect).for_each(|ino| queue.files.return_change(ino));
            queue.touch_named(&out.step.effect);
            answered |= note(queue, now, &done.outcome, || steps::describe(&out.step.action));
            if matches!(done.outcome, Outcome::Done { .. })
                && let steps::Effect::Truncate { ino, .. } = out.step.effect
            {
                queue.forget_truncation(ino, done.number);
            }
        }
    }
    for done in &r.extents {
        if queue.files.return_range(r.session, done.ino, done.offset) {
            answered |= note(queue, now, &done.outcome, || format!("write inode {}", done.ino));
        }
    }
    queue.check_in_tests();
    answered
}

/// Returns whether home answered.
pub fn note(queue: &mut ShipQueue, now: Instant, outcome: &Outcome, what: impl FnOnce() -> String) -> bool {
    match outcome {
        Outcome::Done { .. } | Outcome::Moved {} => true,
        Outcome::Later { why } => {
            tracing::debug!("home did not {}: {why}", what());
            queue.hold_off(now, why, false);
            false
        }
        Outcome::Denied { why } => {
            if queue.back_off.as_ref().is_some_and(|b| b.denied && b.why == *why) {
                tracing::debug!("still no right to {}: {why}", what());
            } else {
                if let Some(more) = queue.lines.admit("a home is not used", now.0) {
                    tracing::warn!("a home is not used: {why}{more}");
                }
            }
            queue.hold_off(now, why, true);
            false
        }
        Outcome::Diverged { why } | Outcome::Refused { why } => {
            if let Some(more) = queue.lines.admit("in conflict", now.0) {
                tracing::warn!("in conflict: {}: {why}{more}", what());
            }
            true
        }
    }
}

fn note_conflict(txn: &mut dyn Txn, relation: RelationId, ino: InodeId, at: Time, outcome: &Outcome) {
    let (diverged, why) = match outcome {
        Outcome::Diverged { why } => (true, why),
        Outcome::Refused { why } => (false, why),
        Outcome::Done { .. } | Outcome::Later { .. } | Outcome::Denied { .. } | Outcome::Moved {} => return,
    };
    let record = ConflictRecord { diverged, why: why.clone(), at };
    tables::CONFLICTS.put(txn, (relation, ino), &record);
}

/// Home has a range.
fn receive(
    txn: &mut dyn Txn,
    relation: RelationId,
    queue: &ShipQueue,
    now: Time,
    done: &ExtentDone,
    out: ExtentOut,
    fingerprint: &FingerprintBytes,
) -> Result<()> {
    let ExtentOut { mark, finish, .. } = out;
    let Some(mut remote) = tree::find_remote(txn, relation, done.ino)? else { return Ok(()) };
    if !fingerprint.is_empty() {
        remote.fingerprint = fingerprint.clone();
    }
    if done.offset == FINISH {
        let newer = store::dirty_finish(txn, relation, done.ino)?.is_some_and(|p| p.newest > mark);
        // A truncation may have come meanwhile: bytes past it no longer belong to the file.
        let present = find_inode(txn, done.ino)?.map_or(0, |inode| inode.size);
        // Bytes written since are followed by another end, which includes all unverified ranges of this one:
        // before that, they would be shipped again and again next to bytes that wait for a truncation.
        let waiting = store::dirty_of(txn, relation, done.ino)?;
        let is_written_on = waiting.iter().any(|(_, p)| p.newest > mark);
        let unproved = match finish.filter(|_| !newer && !is_written_on) {
            Some(size) => changelog::unproved(txn, relation, done.ino, size.min(present))?,
            None => Vec::new(),
        };
        // A range before the end that home did not accept is shipped once more, and the end after it.
        let lacking = waiting.iter().any(|(_, p)| p.oldest <= mark);
        // Bytes next to ones that changed in flight are not verified: they are shipped once more, and the end
        // after them.
        for (from, to) in &unproved {
            let again = DirtyRange { len: to - from, since: now, oldest: mark, newest: mark };
            ingest::add_dirty(txn, relation, queue, done.ino, *from, again)?;
        }
        if !newer && !lacking && unproved.is_empty() {
            tables::DIRTY.delete(txn, (relation, done.ino, FINISH));
            remote.complete = finish;
        }
    } else {
        let end = done.offset.saturating_add(done.len);
        let before = store::dirty_of(txn, relation, done.ino)?;
        store::change_dirty(txn, relation, done.ino, |ranges| {
            dirty::settle(ranges, done.offset, end, mark);
        })?;
        if !done.sums.is_empty() {
            let receipt = ReceiptRecord { len: done.len, sums: done.sums.clone() };
            store::add_receipt(txn, relation, done.ino, done.offset, receipt)?;
        }
        // Checksums of bytes that have changed since are void.
        for (from, to) in dirty::changed_within(&before, done.offset, end, mark) {
            store::remove_receipts(txn, relation, done.ino, from, to)?;
        }
    }
    tables::REMOTE.put(txn, (relation, done.ino), &remote);
    Ok(())
}

impl ShipQueue {
    /// Files of which no mover has work any more, and whose state at home the last fingerprint shows.
    fn at_rest_after(&self, r: &CompleteWork) -> Vec<InodeId> {
        let is_reported = |ino: InodeId, offset: u64| {
            r.extents
                .iter()
                .any(|d| (d.ino, d.offset) == (ino, offset) && matches!(&d.outcome, Outcome::Done { .. }))
        };
        let mut files: Vec<InodeId> = r.extents.iter().map(|done| done.ino).collect();
        files.dedup();
        files.retain(|ino| {
            let own = |offset| self.files.range_of(r.session, *ino, offset).is_some();
            let mut out = self.files.ranges(*ino);
            self.files.has_ranges(*ino) && out.all(|(offset, _)| own(offset) && is_reported(*ino, offset))
        });
        files
    }
    /// Home has applied a change of size.
    pub fn forget_truncation(&mut self, ino: InodeId, number: u64) {
        if let Some(numbers) = self.truncations.get_mut(&ino) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.truncations.remove(&ino);
            }
        }
    }
}
