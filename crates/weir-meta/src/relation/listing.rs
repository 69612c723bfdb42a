//! Directories whose names are at home and not enumerated yet, and directories that are rescanned because
//! their volume mirrors home: which one movers read next, and the operations that wait for one that cannot be
//! read.
//!
//! Directories with waiting operations go first, the others in the background. Kept in memory: the store has
//! the list of directories to read.
use super::record::{MirroredRecord, RelationRecord};
use super::ship_queue::{Batch, ShipQueue, WorkRequest};
use super::{store, tree};
use crate::executor::Leader;
use crate::keys;
use crate::namespace::{find_inode, volume};
use crate::record::Record;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::meta::Time;
use weir_proto::relation::{ListDone, ListWork, Outcome, RelationId};
use weir_proto::{Error, InodeId, Result, SessionId};

/// Directories that are read in parallel.
const AT_ONCE: usize = 16;
/// An operation that needs a directory that could not be read gets the reason for this time; then the read is
/// retried.
const FAILED_FOR: Duration = Duration::from_secs(10);
/// Directories with a remembered failure.
const FAILED_MAX: usize = 1024;
/// Records scanned for the next ones, in the background.
const SCAN_MAX: usize = 32;
/// Directories that are rescanned in parallel while no client looks at them: home has other users.
const AGAIN_AT_ONCE: usize = 2;
/// Records scanned for the next ones: a million of them in some minutes.
const MIRRORED_MAX: usize = 4096;
/// Between two scans for directories that are due.
pub const BETWEEN_SCANS: Duration = Duration::from_secs(1);

#[derive(Default, Debug)]
pub struct Listings {
    wanted: BTreeSet<InodeId>,
    out: BTreeMap<InodeId, SessionId>,
    failed: BTreeMap<InodeId, (Instant, String)>,
    next: InodeId,
    /// The same for rescans.
    next_again: InodeId,
}

impl Listings {
    pub fn is_under_way(&self) -> bool {
        !self.out.is_empty()
    }
    /// An operation waits for a directory; the error is the reason why it cannot be read.
    fn want(&mut self, dir: InodeId, now: Instant) -> Result<()> {
        if let Some((at, why)) = self.failed.get(&dir) {
            if now.since(*at) < FAILED_FOR {
                return Err(Error::io(format!("directory {dir} could not be read at home: {why}")));
            }
            self.failed.remove(&dir);
        }
        if !self.out.contains_key(&dir) {
            self.wanted.insert(dir);
        }
        Ok(())
    }
    pub fn end_session(&mut self, mover: SessionId) {
        self.out.retain(|_, session| *session != mover);
    }
    /// Results of reads; returns the directories that cannot be read for now.
    pub fn done(&mut self, mover: SessionId, all: &[ListDone], now: Instant) -> Vec<InodeId> {
        let mut failed = Vec::new();
        for done in all.iter().filter(|done| self.out.get(&done.dir) == Some(&mover)) {
            match &done.outcome {
                Outcome::Diverged { why } | Outcome::Refused { why } => {
                    failed.push(done.dir);
                    if self.failed.len() < FAILED_MAX {
                        self.failed.insert(done.dir, (now, why.clone()));
                    }
                }
                Outcome::Denied { .. } => failed.push(done.dir), // for all directories: the queue knows
                Outcome::Done { .. } | Outcome::Later { .. } | Outcome::Moved {} => {}
            }
        }
        self.out.retain(|dir, session| *session != mover || !all.iter().any(|done| done.dir == *dir));
        failed
    }
    /// Nothing is read at home for now: returns the directories that operations may wait for.
    pub fn give_up(&mut self) -> Vec<InodeId> {
        std::mem::take(&mut self.wanted).into_iter().collect()
    }
    /// The recent failure to read directories, as text.
    pub fn failure(&self, now: Instant) -> Option<String> {
        let failed = |(dir, (at, why)): (&InodeId, &(Instant, String))| {
            (now.since(*at) < FAILED_FOR).then(|| format!("directory {dir} could not be read at home: {why}"))
        };
        self.failed.iter().find_map(failed)
    }
    fn is_free(&self, dir: InodeId, now: Instant) -> bool {
        let failed = self.failed.get(&dir).is_some_and(|(at, _)| now.since(*at) < FAILED_FOR);
        !failed && !self.out.contains_key(&dir)
    }
}

/// The relation that a directory's names come from.
fn source(read: &dyn Read, dir: InodeId) -> Result<Option<RelationId>> {
    let volume = volume::volume_of(read, dir)?;
    for (id, record) in store::relations(read)?.into_iter().filter(|(_, r)| r.volume == volume) {
        if record.imports && read.get(&keys::not_enumerated(id, dir))?.is_some() {
            return Ok(Some(id));
        }
    }
    Ok(None)
}

impl Leader {
    /// An operation waits for the names of a directory.
    pub(crate) fn want_names(&self, dir: InodeId) -> Result<()> {
        let (mut from, now) = (None, self.env.clock.now());
        self.kv.read(&mut |read| {
            from = source(read, dir)?;
            Ok(())
        })?;
        let mut queues = self.relations.lock();
        let Some(queue) = from.and_then(|id| queues.queues.get_mut(&id)) else {
            return Err(Error::damaged(format!("where the names of directory {dir} come from is not known")));
        };
        if let Some(denial) = queue.denial(now) {
            return Err(denial.doing(format_args!("read directory {dir} at home")));
        }
        queue.listings.want(dir, now)?;
        self.relations.work.notify_waiters();
        Ok(())
    }

    /// A client looks at a directory, or its entries differ from home: it is rescanned, if that is due. No
    /// operation waits.
    pub(crate) fn rescan(&self, dir: InodeId) -> Result<()> {
        let (mut due, wall) = (None, self.wall());
        self.kv.read(&mut |read| {
            due = None;
            if let Some((id, record)) = mirrors(read, dir)? {
                due = is_due(read, id, dir, wall, record.scans_apart().0)?.then_some(id);
            }
            Ok(())
        })?;
        let mut queues = self.relations.lock();
        let Some(queue) = due.and_then(|id| queues.queues.get_mut(&id)) else { return Ok(()) };
        if queue.listings.is_free(dir, self.env.clock.now()) && queue.listings.wanted.insert(dir) {
            self.relations.work.notify_waiters();
        }
        Ok(())
    }

    /// The same for the parent of an inode.
    pub(crate) fn look_above(&self, ino: InodeId) -> Result<()> {
        let mut above = None;
        self.kv.read(&mut |read| {
            above = match find_inode(read, ino)? {
                Some(inode) if inode.nlink > 0 => Some(inode.parent),
                Some(_) => None,
                None => volume::find_parent(read, ino)?,
            };
            Ok(())
        })?;
        above.map_or(Ok(()), |dir| self.rescan(dir))
    }

    /// Why the names of a directory are missing, if an operation waits for them.
    pub(crate) fn why_not_enumerated(&self, dir: InodeId) -> Option<String> {
        let mut from = None;
        let asked = self.kv.read(&mut |read| {
            from = source(read, dir)?;
            Ok(())
        });
        let id = asked.ok().and(from)?;
        let now = self.env.clock.now();
        let mut queues = self.relations.lock();
        let movers = queues.heard_movers(now);
        let queue = queues.queues.get(&id)?;
        let why = match (&queue.back_off, movers) {
            (Some(b), _) if b.denied => format!("the mover may not use this home ({})", b.why),
            (Some(b), _) => format!("home does not answer ({})", b.why),
            (None, 0) => "no mover is running".to_owned(),
            (None, _) if queue.listings.out.contains_key(&dir) => "a mover reads it at home".to_owned(),
            (None, _) => "movers read other directories first".to_owned(),
        };
        Some(format!("what is in directory {dir} is not known here yet: {why}"))
    }
}

/// The relation that a directory mirrors, if any.
fn mirrors(read: &dyn Read, dir: InodeId) -> Result<Option<(RelationId, RelationRecord)>> {
    let Some(volume) = volume::find_volume_of(read, dir)? else { return Ok(None) };
    Ok(store::relations(read)?.into_iter().find(|(_, r)| r.volume == volume && r.mirrors()))
}

fn is_due(read: &dyn Read, id: RelationId, dir: InodeId, wall: Time, apart: Duration) -> Result<bool> {
    let Some(value) = read.get(&keys::mirrored(id, dir))? else { return Ok(false) };
    let known = MirroredRecord::from_value(&value, || format!("when directory {dir} was read at home"))?;
    // A clock that was ahead does not prevent the rescan.
    Ok(known.at.nanos > wall.nanos || known.at.nanos.saturating_add(apart.as_nanos() as i64) <= wall.nanos)
}

/// The oldest time of a directory's last scan at home.
pub fn oldest_scan(read: &dyn Read, id: RelationId) -> Result<Option<Time>> {
    let (start, end) = keys::range_of_short(b'j', id.0);
    let all = store::collect(read, &start, &end, usize::MAX, |_, value| {
        Ok(MirroredRecord::from_value(value, || "when a directory was read at home".to_owned())?.at)
    })?;
    Ok(all.into_iter().min_by_key(|at| at.nanos))
}

impl ShipQueue {
    /// Directories to be read now.
    pub(super) fn lists(
        &mut self,
        request: &WorkRequest<'_>,
        now: Instant,
        wall: Time,
        batch: &mut Batch,
    ) -> Result<()> {
        if !request.record.imports || self.paths_are_changing() {
            return Ok(());
        }
        while let Some(dir) = self.listings.wanted.pop_first() {
            if self.listings.out.len() >= AT_ONCE || batch.listings.len() >= request.items {
                self.listings.wanted.insert(dir);
                return Ok(());
            }
            self.assign_listing(request, now, dir, batch)?;
        }
        let start = keys::not_enumerated(request.relation, self.listings.next);
        let (_, end) = keys::range_of_short(b'l', request.relation.0);
        let found = store::collect(request.read, &start, &end, SCAN_MAX, |key, _| {
            store::number_of(key).map(InodeId)
        })?;
        let last = found.len() < SCAN_MAX;
        for dir in found {
            if self.listings.out.len() >= AT_ONCE || batch.listings.len() >= request.items {
                return Ok(());
            }
            self.listings.next = InodeId(dir.0 + 1);
            self.assign_listing(request, now, dir, batch)?;
        }
        if last {
            self.listings.next = InodeId(0);
        }
        if request.record.mirrors() { self.lists_again(request, now, wall, batch) } else { Ok(()) }
    }

    /// Directories that were not looked at for a while, round by round.
    fn lists_again(
        &mut self,
        request: &WorkRequest<'_>,
        now: Instant,
        wall: Time,
        batch: &mut Batch,
    ) -> Result<()> {
        let start = keys::mirrored(request.relation, self.listings.next_again);
        let (_, end) = keys::range_of_short(b'j', request.relation.0);
        let found = store::collect(request.read, &start, &end, MIRRORED_MAX, |key, _| {
            store::number_of(key).map(InodeId)
        })?;
        let last = found.len() < MIRRORED_MAX;
        for dir in found {
            if self.listings.out.len() >= AGAIN_AT_ONCE || batch.listings.len() >= request.items {
                return Ok(());
            }
            self.listings.next_again = InodeId(dir.0 + 1);
            if is_due(request.read, request.relation, dir, wall, request.record.scans_apart().1)? {
                self.assign_listing(request, now, dir, batch)?;
            }
        }
        if last {
            self.listings.next_again = InodeId(0);
        }
        Ok(())
    }

    fn assign_listing(
        &mut self,
        request: &WorkRequest<'_>,
        now: Instant,
        dir: InodeId,
        batch: &mut Batch,
    ) -> Result<()> {
        let again = request.read.get(&keys::not_enumerated(request.relation, dir))?.is_none();
        let is_known = !again || request.read.get(&keys::mirrored(request.relation, dir))?.is_some();
        if !is_known || !self.listings.is_free(dir, now) {
            return Ok(());
        }
        if let Some(path) = tree::path(request.read, request.relation, dir)?.map(Bytes::from) {
            self.listings.out.insert(dir, request.session);
            batch.listings.push(ListWork { dir, path, again });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_told_for_a_while_and_tried_again() {
        let (mover, dir) = (SessionId(1), InodeId(7));
        let at = |s| Instant(0) + Duration::from_secs(s);
        let mut listings = Listings::default();
        listings.want(dir, at(0)).unwrap();
        listings.wanted.clear();
        listings.out.insert(dir, mover);
        listings.want(dir, at(0)).unwrap();
        assert!(listings.wanted.is_empty(), "a mover has it");
        let done = |why: &str| [ListDone { dir, outcome: Outcome::Refused { why: why.into() } }];
        assert_eq!(listings.done(SessionId(2), &done("not its own"), at(1)), []);
        assert_eq!(listings.done(mover, &done("it is a file"), at(1)), [dir]);
        assert!(listings.want(dir, at(2)).unwrap_err().context.contains("it is a file"));
        assert!(!listings.is_free(dir, at(2)));
        listings.want(dir, at(1) + FAILED_FOR).unwrap();
        assert!(listings.wanted.contains(&dir) && listings.is_free(dir, at(1) + FAILED_FOR));
    }

    #[test]
    fn nobody_waits_for_a_refused_home_before_the_next_try() {
        let at = |ms| Instant(0) + Duration::from_millis(ms);
        let mut queue = ShipQueue::default();
        for dir in [InodeId(7), InodeId(8)] {
            queue.listings.want(dir, at(0)).unwrap();
        }
        queue.hold_off(at(0), "home hangs", false);
        assert!(queue.denial(at(1)).is_none(), "that is waited for");
        queue.hold_off(at(2000), "user 7 may not", true);
        assert_eq!(queue.denial(at(2001)), Some(Error::denied("user 7 may not")));
        assert_eq!(queue.listings.give_up(), [InodeId(7), InodeId(8)]);
        assert!(queue.listings.wanted.is_empty());
        assert!(queue.denial(at(60_000)).is_none(), "it is tried again");
    }
}
