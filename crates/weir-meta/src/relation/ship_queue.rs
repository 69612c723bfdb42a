//! Work for movers: changes of names in an order that keeps home right, and ranges of files.
//!
//! Names: a change may go to a mover when no earlier one in the queue touches the same inode or entry; one
//! that moves a directory waits for all before it, and nothing overtakes it. Ranges: those of one file go to
//! one mover, in order, so that home always shows a prefix. Assigned work is known in memory only: after a
//! restart all of it is assigned again.
//!
//! Pure except for reads of the store: `queues` holds the lock, `leader::movers` has the messages.
use super::order::{Before, WINDOW, is_barrier, touches};
use super::record::{RelationRecord, RelocationRecord};
use super::steps::{self, Step, held_by, moves_a_directory};
use super::{store, tree};
use crate::namespace::find_inode;
use crate::tables;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::meta::FileKind;
use weir_proto::relation::{ExtentWork, ListWork, NameWork, RelationId, What};
use weir_proto::{Error, InodeId, Result, SessionId};
use weir_relation::files::Files;
use weir_relation::listings::Listings;
use weir_relation::orphans::Orphans;
use weir_watch::Lines;

/// Files that are checked for the next work, each time a mover asks.
pub(super) const FILES_SCANNED: usize = 512;
/// Directories whose times are corrected in one batch.
const DIRECTORIES_AT_ONCE: usize = 64;
/// Work without a change: numbered by a directory's inode.
const DIRECTORY_WORK: u64 = 1 << 63;

/// A change of names that a mover has.
#[derive(Clone, Debug)]
pub struct NameOut {
    pub session: SessionId,
    pub step: Step,
}

/// The work in progress for one relation.
#[derive(Default, Debug)]
pub struct ShipQueue {
    pub names_out: BTreeMap<u64, NameOut>,
    /// The state of each file that movers have work on.
    pub(super) files: Files,
    /// A change of paths waits for all assigned work, or is assigned itself.
    pub(super) paths_change: bool,
    /// Files that home has parts of, and that a change of names waits for: the parts there are finished as a
    /// file, complete or not.
    pub(super) ends_early: BTreeSet<InodeId>,
    /// Removed files of which home has parts that a change of names waits for: these are removed there at
    /// once.
    pub(super) abandoned: BTreeSet<InodeId>,
    /// Numbers of changes of size that home has not applied, by inode.
    pub truncations: BTreeMap<InodeId, BTreeSet<u64>>,
    /// This time the sweep comes before the individually remembered files.
    pub(super) sweeps_first: bool,
    pub orphans: Orphans,
    pub listings: Listings,
    /// Its home is only read.
    pub mirrors: bool,
    /// Bytes are recalled from another home, and shipped then.
    pub brings_back: bool,
    /// Files whose bytes home would lose, and that a client still reads: to be recalled first.
    pub wanted: BTreeSet<InodeId>,
    /// Home did not answer, or refused: it gets no work for a while.
    pub back_off: Option<BackOff>,
    pub lines: Lines,
}

/// Why a home gets no work, and until when.
#[derive(Clone, Debug)]
pub struct BackOff {
    pub until: Instant,
    pub tries: u32,
    pub why: String,
    /// The mover may not use this home: waiting does not help, an administrator has to act.
    pub denied: bool,
}

/// Work for a mover, and changes that turned out to need none.
#[derive(Default, Debug)]
pub struct Batch {
    pub names: Vec<NameWork>,
    pub extents: Vec<ExtentWork>,
    /// Changes that need no work at home.
    pub void_names: Vec<u64>,
    /// The changes of size among them.
    pub void_truncations: Vec<(InodeId, u64)>,
    pub void_directories: Vec<InodeId>,
    pub void_relocations: Vec<InodeId>,
    /// Files that are relocated from now on.
    pub relocations: Vec<(InodeId, RelocationRecord)>,
    /// To be checked once more: another step comes first.
    pub again: bool,
    /// Removed files: their dirty ranges are dropped, and the conflict of one that home never had.
    pub gone: Vec<InodeId>,
    /// Files that a mover begins to write: their remote entries are to record it.
    pub begun: Vec<InodeId>,
    pub listings: Vec<ListWork>,
    /// Bytes that have to be recalled from another home first.
    pub away: Vec<(InodeId, u64, u64)>,
}
impl Batch {
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.extents.is_empty() && self.listings.is_empty()
    }
    pub fn has_void(&self) -> bool {
        let nothing = self.void_names.is_empty() && self.void_directories.is_empty();
        self.again || !(nothing && self.void_relocations.is_empty() && self.gone.is_empty())
    }
}

/// One search for work.
pub struct WorkRequest<'a> {
    pub read: &'a dyn Read,
    pub relation: RelationId,
    pub record: &'a RelationRecord,
    pub session: SessionId,
    /// The mover's limit.
    pub bytes: u64,
    pub items: usize,
}

impl ShipQueue {
    /// Changes of names that may go now.
    pub fn names(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<()> {
        self.files.end_drains();
        self.ends_early.clear();
        self.paths_change = self.names_out.values().any(|out| moves_a_directory(&out.step));
        let queue = tables::NAME_CHANGES.under(request.relation);
        let queue =
            queue.collect(request.read, WINDOW, |(_, number), change| (number, change.what, change.tried))?;
        let mut before = Before::default();
        before.add_directories(self.names_out.keys().filter_map(|number| directory_of_work(*number)));
        let mut planned = self.relocations(request, batch, &mut before)?;
        self.abandon(request, batch, &mut before, &mut planned)?;
        self.files.keep_plans(&planned);
        let may_be_done = self.may_be_done(&queue);
        let empty = queue.is_empty();
        for (number, what, tried) in queue {
            if batch.names.len() >= request.items {
                return Ok(());
            }
            let (changes, relies) = touches(&what);
            let mut barrier = is_barrier(&what);
            let waits = self.names_out.contains_key(&number)
                || before.is_in_the_way(&changes, &relies)
                || (barrier
                    && (!before.is_empty()
                        || self.paths_in_use()
                        || self.waits_for_parts(request, batch)?))
                || self.waits_for_data(request, batch, number, &what)?;
            if !waits {
                match steps::step(request.read, request.relation, request.record, &what, tried)? {
                    None => {
                        batch.void_names.push(number);
                        match what {
                            What::Resized { ino, .. } => batch.void_truncations.push((ino, number)),
                            What::Removed { ino, last: true, .. } => batch.gone.push(ino),
                            _ => {}
                        }
                        continue;
                    }
                    // An administrator decides, or removes it here.
                    Some(step) if is_in_conflict(request, step.ino)? => {}
                    Some(step) if moves_a_directory(&step) && !barrier => {
                        // One that was created under a temporary name gets its name.
                        barrier = true;
                        if before.is_empty()
                            && !self.paths_in_use()
                            && !self.waits_for_parts(request, batch)?
                        {
                            self.assign_name(request, batch, number, step);
                        }
                    }
                    Some(step) => {
                        let others = may_be_done.iter().filter(|(other, _)| *other != number);
                        let others = others.flat_map(|(_, changes)| changes);
                        self.assign_step(request, batch, number, step, &mut before, others)?;
                    }
                }
            }
            if barrier {
                return Ok(());
            }
            before.add(changes, relies);
        }
        if empty {
            self.directories(request, batch)?;
        }
        Ok(())
    }

    /// Paths that change must not be in use: no mover gets new work on them meanwhile.
    fn paths_in_use(&mut self) -> bool {
        self.paths_change = true;
        self.files.any_ranges() || self.listings.is_under_way()
    }
    pub(super) fn paths_are_changing(&self) -> bool {
        self.paths_change
    }

    pub(super) fn assign_name(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        number: u64,
        step: Step,
    ) {
        batch.names.push(NameWork { number, ino: step.ino, action: step.action.clone() });
        for ino in held_by(&step.effect) {
            self.files.assign_change(ino, request.session);
        }
        self.names_out.insert(number, NameOut { session: request.session, step });
    }

    /// Bytes that home must have first, or that are being written right now.
    fn waits_for_data(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        number: u64,
        what: &What,
    ) -> Result<bool> {
        if let What::Renamed { replaced: Some((other, _)), .. } = what
            && self.files.has_ranges(*other)
        {
            self.files.drain(*other);
            return Ok(true);
        }
        if let What::Removed { ino, last: true, .. } | What::Renamed { replaced: Some((ino, true)), .. } =
            what
            && find_inode(request.read, *ino)?.is_some_and(|inode| inode.nlink == 0 && inode.evicted > 0)
        {
            self.wanted.insert(*ino);
            return Ok(true);
        }
        let file = match what {
            What::Renamed { ino, kind: FileKind::Regular, .. } => {
                // The object exists before it gets the name: files are replaced by rename.
                if is_in_conflict(request, *ino)? {
                    return Ok(true);
                }
                let dirty = store::dirty_of(request.read, request.relation, *ino)?;
                let finish = store::dirty_finish(request.read, request.relation, *ino)?;
                let known = tree::find_remote(request.read, request.relation, *ino)?.is_some();
                // Bytes that wait for a truncation queued after this name, and the end of the file with them,
                // would wait for ever.
                let first_truncation = self.first_truncation(*ino);
                let (go, held): (Vec<_>, Vec<_>) =
                    dirty.iter().map(|(_, p)| p).partition(|p| p.newest <= first_truncation);
                let end = finish.as_ref().filter(|_| held.is_empty());
                if known && go.into_iter().chain(end).any(|p| p.oldest < number) {
                    // If it is shipped in parts, and keeps growing, that would be never.
                    if request.record.rules().parts && !self.files.has_ranges(*ino) {
                        self.ends_early.insert(*ino);
                    }
                    return Ok(true);
                }
                *ino
            }
            What::Attributes { ino } | What::Resized { ino, .. } | What::Removed { ino, .. } => *ino,
            What::Linked { ino, .. } => *ino,
            // One more name of a file that home has already, found by the scan of a whole volume.
            What::Made { ino, .. } if tree::find_remote(request.read, request.relation, *ino)?.is_some() => {
                *ino
            }
            _ => return Ok(false),
        };
        if matches!(what, What::Removed { last: true, .. }) {
            let busy = self.files.has_ranges(file);
            if busy {
                self.files.drain(file);
            }
            let known = tree::find_remote(request.read, request.relation, file)?.is_some();
            return Ok(busy || known && is_in_conflict(request, file)?);
        }
        self.is_being_written(request, batch, file)
    }

    /// Whether a file must not get another name, size or attributes just now. The obstacle ends by itself.
    pub(super) fn is_being_written(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        file: InodeId,
    ) -> Result<bool> {
        if is_in_conflict(request, file)? {
            return Ok(true);
        }
        if self.files.has_ranges(file) {
            self.files.drain(file);
            return Ok(true);
        }
        let is_half_way = store::is_unfinished(request.read, request.relation, file)?;
        if is_half_way {
            self.end_half_way(request, batch, file)?;
        }
        Ok(is_half_way)
    }
    fn end_half_way(&mut self, request: &WorkRequest<'_>, batch: &mut Batch, file: InodeId) -> Result<()> {
        match steps::removal(request.read, request.relation, request.record.volume, file)? {
            Some(_) => batch.again |= self.abandoned.insert(file),
            None => drop(self.ends_early.insert(file)),
        }
        Ok(())
    }

    /// Before paths change, no file may be half shipped at a home that identifies parts of a file by its
    /// path.
    fn waits_for_parts(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<bool> {
        if !request.record.rules().parts {
            return Ok(false);
        }
        let files = store::unfinished(request.read, request.relation, FILES_SCANNED)?;
        for file in &files {
            self.end_half_way(request, batch, *file)?;
        }
        Ok(!files.is_empty())
    }

    /// Whether a mover has a part of `start..end`.
    pub fn is_out(&self, ino: InodeId, start: u64, end: u64) -> bool {
        self.files.overlaps(ino, start, end)
    }
    /// The first change of size that home has not applied.
    pub(super) fn first_truncation(&self, ino: InodeId) -> u64 {
        self.truncations.get(&ino).and_then(|truncations| truncations.first().copied()).unwrap_or(u64::MAX)
    }
    /// Whether home has not applied a change of size between two others.
    pub fn is_truncated_between(&self, ino: InodeId, oldest: u64, newest: u64) -> bool {
        self.truncations
            .get(&ino)
            .is_some_and(|truncations| truncations.range(oldest..newest).next().is_some())
    }

    /// Directories whose entries changed at home, when all changes of names are done there.
    fn directories(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<()> {
        let old = tables::OLD_ATTRIBUTES.under(request.relation);
        let dirs = old.collect(request.read, DIRECTORIES_AT_ONCE, |(_, dir), _| dir)?;
        for dir in dirs {
            let number = DIRECTORY_WORK | dir.0;
            if self.names_out.contains_key(&number) || is_in_conflict(request, dir)? {
                continue;
            }
            match steps::directory_step(request.read, request.relation, request.record.volume, dir)? {
                Some(step) => self.assign_name(request, batch, number, step),
                None => batch.void_directories.push(dir),
            }
        }
        Ok(())
    }

    /// Revokes a mover's work; returns whether it had any.
    pub fn end_session(&mut self, session: SessionId) -> bool {
        let before = self.names_out.len();
        self.names_out.retain(|_, out| out.session != session);
        let had_work = self.files.end_mover(session) | (self.names_out.len() < before);
        self.orphans.end_session(session);
        self.listings.end_session(session);
        if had_work {
            self.touch_all();
        }
        self.check_in_tests();
        had_work
    }

    /// Panics where an invariant of the assigned work does not hold. In any build, a range is also checked
    /// when it is assigned.
    pub fn check(&self) {
        let changes = self.names_out.values();
        let changing = changes.flat_map(|out| held_by(&out.step.effect).map(|ino| (ino, out.session)));
        self.files.check(&changing.collect());
    }
    pub(super) fn check_in_tests(&self) {
        if cfg!(debug_assertions) {
            self.check();
        }
    }

    /// Home did not answer, or the mover may not use it.
    pub fn hold_off(&mut self, now: Instant, why: &str, denied: bool) {
        let tries = self.back_off.as_ref().map_or(0, |b| b.tries);
        let already = self.back_off.as_ref().is_some_and(|b| b.until > now);
        if !already {
            let until = now + back_off(tries);
            self.back_off = Some(BackOff { until, tries: tries + 1, why: why.to_owned(), denied });
        }
    }
    /// The error for programs that would wait for a home that no mover may use.
    pub fn denial(&self, now: Instant) -> Option<Error> {
        let back_off = self.back_off.as_ref().filter(|b| b.denied && b.until > now)?;
        Some(Error::denied(back_off.why.clone()))
    }
}

pub(super) fn is_in_conflict(request: &WorkRequest<'_>, ino: InodeId) -> Result<bool> {
    tables::CONFLICTS.has(request.read, (request.relation, ino))
}

/// The directory whose times a piece of work corrects.
pub fn directory_of_work(number: u64) -> Option<InodeId> {
    (number & DIRECTORY_WORK != 0).then_some(InodeId(number & !DIRECTORY_WORK))
}

impl PartialEq for NameOut {
    fn eq(&self, other: &NameOut) -> bool {
        self.session == other.session && self.step == other.step
    }
}

/// A home that does not answer is retried after this, doubled each time up to the maximum.
const BACK_OFF_MIN: Duration = Duration::from_millis(500);

const BACK_OFF_MAX: Duration = Duration::from_secs(30);

fn back_off(tries: u32) -> Duration {
    BACK_OFF_MIN.saturating_mul(1 << tries.min(10)).min(BACK_OFF_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_change_waits_for_a_refused_home_before_the_next_try() {
        let at = |ms| Instant(0) + Duration::from_millis(ms);
        let mut queue = ShipQueue::default();
        for dir in [InodeId(7), InodeId(8)] {
            queue.listings.want(dir, at(0)).unwrap();
        }
        queue.hold_off(at(0), "home hangs", false);
        assert!(queue.denial(at(1)).is_none(), "that is waited for");
        queue.hold_off(at(2000), "user 7 may not", true);
        assert_eq!(queue.denial(at(2001)), Some(Error::denied("user 7 may not")));
        assert_eq!(queue.listings.abandon(), [InodeId(7), InodeId(8)]);
        assert!(queue.listings.wanted.is_empty());
        assert!(queue.denial(at(60_000)).is_none(), "it is tried again");
    }
}
