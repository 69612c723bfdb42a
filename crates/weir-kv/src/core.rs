//! The store's state behind its lock, and how a transaction is applied to it.
//!
//! Invariants: a transaction is visible at once and durable when the journal reports it. The journal holds
//! everything that is not in the tree. One sealed delta is exactly one segment. Locks are taken in this
//! order: writer, tree, pen, state.

use crate::base::{Base, Folded, Tree};
use crate::change::Delta;
use crate::copies::{Alone, ReportedDurable, Role};
use crate::crash_points;
use crate::epochs::Epochs;
use crate::format::{
    COPIED_BYTES_MAX, Head, PLAIN, SEGMENT_HEADER_BYTES, WITH_EPOCHS, body_len, body_of, encode_copied,
    encode_record, record_len,
};
use crate::journal::{Journal, Segment, Shelf, Tail, lock, record_len_max};
use crate::mark::{self, Begun, Mark};
use crate::means::{Means, SEGMENTS_MAX, Sizes};
use crate::recover::{Kept, Recovered, Wanted, recover};
use crate::state::{Body, State};
use crate::{CommitSeq, Txn};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::Notify;
use weir_env::{Env, File, OpenMode};
use weir_proto::{Epoch, Error, ErrorKind, Result};

pub(crate) struct Core {
    pub(crate) env: Env,
    pub(crate) shelf: Shelf,
    pub(crate) cache_bytes: usize,
    /// Sizes by the disk, and what is left on it.
    pub(crate) means: Mutex<Means>,
    pub(crate) journal: Arc<Journal>,
    /// Held by the one transaction that runs.
    pub(crate) writer: Mutex<Writer>,
    pub(crate) state: RwLock<State>,
    /// Segments of `state.sealed`, in the same order; changed together with it.
    pub(crate) sealed: Mutex<VecDeque<Sealed>>,
    pub(crate) tree: Mutex<Option<Tree>>,
    pub(crate) tree_file: Arc<dyn File>,
    pub(crate) reserve: Mutex<Reserve>,
    /// Format version of a new segment's records.
    pub(crate) version: AtomicU32,
    /// Incremented when the store begins to lead (even) or to follow (odd).
    pub(crate) term: AtomicU64,
    pub(crate) wake_folder: Notify,
    pub(crate) closed: AtomicBool,
    _lock: Arc<dyn File>,
}

/// State that the thread that makes or takes records changes.
pub(crate) struct Writer {
    pub(crate) tail: Tail,
    pub(crate) role: Role,
    pub(crate) epochs: Epochs,
}

#[derive(Clone)]
pub(crate) struct Sealed {
    pub(crate) segment: Arc<Segment>,
    pub(crate) last: CommitSeq,
    pub(crate) epoch: Epoch,
}

/// Segments made in advance, and folded ones that are kept.
pub(crate) struct Reserve {
    pub(crate) next: Option<Arc<Segment>>,
    /// Number of the segment to make when `next` is used.
    pub(crate) next_number: u64,
    pub(crate) spare: Option<PathBuf>,
    /// Folded segments, oldest first.
    pub(crate) kept: VecDeque<Kept>,
}

impl Core {
    pub(crate) fn load(
        env: Env,
        dir: PathBuf,
        config: crate::config::EngineConfig,
        lock: Arc<dyn File>,
    ) -> Result<Core> {
        let sizes = Sizes::of(&config, &*env.disk, &dir);
        let tree_path = dir.join("state.redb");
        let mark = mark::read(&*env.disk, &dir)?;
        if mark.is_some_and(|m| m.begun == Begun::Import) {
            let dir = dir.display();
            return Err(Error::unavailable(format!(
                "{dir}: the transfer of the state has not ended; repeat it"
            )));
        }
        let doing = format!("open the state tree {}", tree_path.display());
        let tree_file = env.disk.open(&tree_path, OpenMode::WRITE).map_err(|e| Error::from_io(doing, &e))?;
        let segment_bytes = sizes.segment_bytes;
        let shelf = Shelf { disk: env.disk.clone(), dir, segment_bytes, tasks: env.tasks.clone() };
        let tree = Tree::open(tree_file.clone(), config.cache_bytes)
            .map_err(|e| e.doing(format!("in {}", tree_path.display())))?;
        shelf.disk.sync_dir(&shelf.dir).map_err(|e| Error::from_io("sync the state directory", &e))?;
        let folded = tree.folded()?;
        let version = if mark.is_some() { WITH_EPOCHS } else { PLAIN };
        let keep_bytes = sizes.keep_bytes;
        let found = find(&shelf, Wanted { folded, truncate_to: None, keep_bytes, version }, mark)?;
        check_mark(mark, found.epochs.last_epoch()).map_err(|e| e.doing(shelf.dir.display().to_string()))?;
        let (base, content_bytes) = (tree.snapshot()?, tree.bytes()?);
        let (role, durable) = match mark {
            None => (Role::Leads(Epoch(0), Arc::new(Alone)), found.last),
            Some(Mark { epoch, .. }) => {
                let reported = Arc::new(ReportedDurable::at(folded.seq));
                (Role::Follows { epoch, reported, joined: false }, folded.seq)
            }
        };
        let found = Found::from(found, base);
        let journal = Journal::new(&found.tail, found.state.seq, durable, role.copies(), &env, lock.clone())?;
        let core = Core {
            env,
            shelf,
            cache_bytes: config.cache_bytes,
            means: Mutex::new(Means::new(sizes)),
            journal: Arc::new(journal),
            writer: Mutex::new(Writer { tail: found.tail, role, epochs: found.epochs }),
            state: RwLock::new(found.state),
            sealed: Mutex::new(found.sealed),
            tree: Mutex::new(Some(tree)),
            tree_file,
            reserve: Mutex::new(found.reserve),
            version: AtomicU32::new(version),
            term: AtomicU64::new(u64::from(mark.is_some())),
            wake_folder: Notify::new(),
            closed: AtomicBool::new(false),
            _lock: lock,
        };
        core.note_tree(content_bytes);
        core.renew_ballast();
        Ok(core)
    }

    pub(crate) fn state(&self) -> RwLockReadGuard<'_, State> {
        // Consistent after a panic in a body: only `apply`, `seal` and `fold` change it.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// `term`: the term of the lead that it belongs to.
    pub(crate) fn transact(
        &self,
        term: Option<u64>,
        body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>,
    ) -> Result<CommitSeq> {
        let mut writer = lock(&self.writer);
        self.journal.check()?;
        term.map_or(Ok(()), |term| self.check_term(term))?;
        let Role::Leads(epoch, copies) = &writer.role else {
            return Err(Error::stale("this copy of the store follows another leader"));
        };
        let (epoch, copies) = (*epoch, copies.clone());
        let (changes, before) = {
            let state = self.state();
            let mut txn = Body::new(&state);
            let done = body(&mut txn);
            let done = done.and_then(|()| txn.finish());
            self.repair_if_lost(&state);
            (done?, state.seq)
        };
        if changes.is_empty() {
            return Ok(before);
        }
        let len = self.reserve(&mut writer, body_len(&changes))?;
        let seq = CommitSeq(before.0 + 1);
        let head = self.head(&writer, seq, epoch);
        let record = encode_record(head, &changes);
        assert!(record.len() == len, "a record is as long as its reservation");
        self.take_in(&mut writer, seq, epoch, changes);
        self.env.tasks.crash_point(crash_points::COMMITTED);
        copies.append(seq, body_of(&record, head.version));
        writer.tail.used += len as u64;
        self.journal.push(seq, record);
        Ok(seq)
    }

    /// The header of a record in the tail.
    pub(crate) fn head(&self, writer: &Writer, seq: CommitSeq, epoch: Epoch) -> Head {
        let Segment { number, version, .. } = *writer.tail.segment;
        Head { version, segment: number, seq, durable: self.journal.synced(), epoch }
    }

    pub(crate) fn take_in(&self, writer: &mut Writer, seq: CommitSeq, epoch: Epoch, changes: Delta) {
        writer.epochs.push(epoch);
        self.state_mut().apply(seq, changes);
    }

    /// Ensures that a record with a body of this length fits. Returns the record's length.
    pub(crate) fn reserve(&self, writer: &mut Writer, body_len: usize) -> Result<usize> {
        let wanted = self.version.load(Ordering::Acquire);
        let len = record_len(wanted, body_len);
        let mut max = record_len_max(wanted, self.shelf.segment_bytes);
        if wanted == WITH_EPOCHS {
            max = max.min(COPIED_BYTES_MAX as u64);
        }
        if len as u64 > max {
            return Err(Error::invalid(format!("a transaction of {len} bytes; at most {max} are possible")));
        }
        let tail = &writer.tail;
        if tail.segment.version != wanted || !tail.fits(len) {
            let sealed = self.seal(writer);
            self.note_refusal(&sealed);
            sealed?;
        }
        Ok(len)
    }

    /// Ends the segment and continues in the next one; its changes wait for their fold.
    pub(crate) fn seal(&self, writer: &mut Writer) -> Result<()> {
        while lock(&self.sealed).len() as u64 + 2 >= SEGMENTS_MAX {
            // The folder is behind: the writer folds itself, or waits. If nothing is left to fold, the folder
            // was faster, or the oldest records are not in every copy.
            if self.fold()? == 0 && self.lacks_copies() {
                let max = self.shelf.segment_bytes * SEGMENTS_MAX;
                return Err(Error::unavailable(format!(
                    "the journal is full: {max} bytes wait until every copy of the store has them"
                )));
            }
        }
        let next = self.take_next()?;
        let last = self.state().seq;
        let of_last =
            if writer.tail.segment.version == PLAIN { Epoch(0) } else { writer.epochs.last_epoch() };
        let end = encode_copied(self.head(writer, last, of_last), &[]);
        self.journal.push_next(end, last, next.clone());
        let tail = Tail { segment: next, used: SEGMENT_HEADER_BYTES as u64 };
        let ended = std::mem::replace(&mut writer.tail, tail);
        {
            let mut state = self.state_mut();
            let delta = std::mem::take(&mut state.active);
            state.sealed.push(Arc::new(delta));
            let epoch = writer.epochs.last_epoch();
            lock(&self.sealed).push_back(Sealed { segment: ended.segment, last, epoch });
        }
        self.env.tasks.crash_point(crash_points::SEGMENT_ENDED);
        self.wake_folder.notify_one();
        Ok(())
    }

    /// Whether the oldest segment that waits for its fold is not in every copy of the store yet.
    fn lacks_copies(&self) -> bool {
        lock(&self.sealed).front().is_some_and(|oldest| oldest.last > self.journal.durable())
    }

    fn take_next(&self) -> Result<Arc<Segment>> {
        let mut tried = false;
        loop {
            let next = lock(&self.reserve).next.take();
            if let Some(next) = next {
                let version = self.version.load(Ordering::Acquire);
                if (next.version, next.bytes) == (version, self.shelf.segment_bytes) {
                    return Ok(next);
                }
                // Made before the store had copies, or of another size: made again, under the same number.
                let made = self.shelf.make(next.number, version, None);
                return made.map(Arc::new).inspect_err(|_| lock(&self.reserve).next = Some(next));
            }
            if let Err(e) = self.prepare_next() {
                if e.kind != ErrorKind::NoSpace || std::mem::replace(&mut tried, true) {
                    return Err(e);
                }
                // A fold frees a segment's file. If it lacks space, too, the ballast is gone then.
                if !self.fold().is_ok_and(|folded| folded > 0) {
                    self.drop_ballast();
                }
            }
        }
    }

    pub(crate) fn prepare_next(&self) -> Result<()> {
        let is_new = {
            let reserve = lock(&self.reserve);
            reserve.next.is_none() && reserve.spare.is_none()
        };
        if is_new {
            self.has_free(self.shelf.segment_bytes)?; // kept ones give way; without space it fails below
        }
        let mut reserve = lock(&self.reserve);
        if reserve.next.is_some() {
            return Ok(());
        }
        let spare = reserve.spare.take();
        let version = self.version.load(Ordering::Acquire);
        let made = self.shelf.make(reserve.next_number, version, spare.as_deref())?;
        reserve.next_number += 1;
        reserve.next = Some(Arc::new(made));
        Ok(())
    }

    pub(crate) fn repair_if_lost(&self, state: &State) {
        if state.is_lost() {
            self.wake_folder.notify_one();
        }
    }

    /// Not on a slow disk: the thread has other work.
    pub(crate) fn flush_here(&self) -> bool {
        if self.env.tasks.may_block() {
            self.journal.flush_next();
            return false;
        }
        if self.journal.is_quick()
            && let Some(_here) = self.env.tasks.block_here()
        {
            return self.journal.flush_unless_busy();
        }
        self.journal.flush_soon();
        false
    }

    /// Ends the segment, and makes all records durable here. Returns the newest one.
    pub(crate) fn seal_all(&self) -> Result<CommitSeq> {
        let last = {
            let mut writer = lock(&self.writer);
            self.journal.check()?;
            if !self.state().active.is_empty() {
                self.seal(&mut writer)?;
            }
            self.state().seq
        };
        self.journal.flush()?;
        Ok(last)
    }

    /// Removes the records after `to`, which no leader ever acknowledged. None of them is in the tree.
    pub(crate) fn truncate_to(&self, writer: &mut Writer, to: CommitSeq) -> Result<()> {
        let tree = lock(&self.tree);
        let folded = match tree.as_ref() {
            Some(tree) => tree.folded()?,
            None => return Err(Error::unavailable("the state tree is being opened again: its disk failed")),
        };
        let durable = self.journal.durable().max(folded.seq);
        if to < durable {
            return Err(Error::damaged(format!(
                "the records up to {} were durable in every copy, and are to be truncated to {}",
                durable.0, to.0
            )));
        }
        self.journal.flush()?;
        let mark = Mark { epoch: writer.role.epoch(), begun: Begun::Truncation(to) };
        self.write_mark(mark)?;
        self.env.tasks.crash_point(crash_points::TRUNCATION_NOTED);
        let done = self.reload(writer, folded, mark);
        done.inspect_err(|e| self.journal.fail(e.clone()))
    }

    fn reload(&self, writer: &mut Writer, folded: Folded, mark: Mark) -> Result<()> {
        let mut reserve = lock(&self.reserve); // no other thread makes a segment meanwhile
        let keep_bytes = lock(&self.means).sizes.keep_bytes;
        let wanted = Wanted { folded, truncate_to: None, keep_bytes, version: WITH_EPOCHS };
        let mut found = Found::from(find(&self.shelf, wanted, Some(mark))?, None);
        self.journal.restart(&found.tail, found.state.seq)?;
        let mut state = self.state_mut();
        found.state.base = std::mem::replace(&mut state.base, Ok(None));
        (*state, writer.tail, writer.epochs) = (found.state, found.tail, found.epochs);
        *lock(&self.sealed) = found.sealed;
        *reserve = found.reserve;
        Ok(())
    }

    /// A failure fails the store: the mark on the disk is unknown then.
    pub(crate) fn write_mark(&self, mark: Mark) -> Result<()> {
        let write = || mark::write(&*self.shelf.disk, &self.shelf.dir, mark);
        let mut written = write();
        if written.as_ref().is_err_and(|e| e.kind == ErrorKind::NoSpace) {
            self.drop_ballast();
            written = write();
        }
        match &written {
            // It is as it was. A truncation that might be noted must not be continued by other records.
            Err(e) if e.kind == ErrorKind::NoSpace && mark.begun == Begun::Nothing => {}
            Err(e) => self.journal.fail(e.clone()),
            Ok(()) => {}
        }
        written
    }
}

/// Reads the journal, and completes a truncation that was interrupted.
fn find(shelf: &Shelf, wanted: Wanted, mark: Option<Mark>) -> Result<Recovered> {
    let Some(Mark { epoch, begun: Begun::Truncation(to) }) = mark else { return recover(shelf, wanted) };
    let found = recover(shelf, Wanted { truncate_to: Some(to), ..wanted })?;
    if found.last != to {
        let last = found.last.0;
        return Err(Error::damaged(format!(
            "the journal ends at {last}, and was to be truncated to {}",
            to.0
        )));
    }
    shelf.tasks.crash_point(crash_points::TRUNCATION_DONE);
    mark::write(&*shelf.disk, &shelf.dir, Mark { epoch, begun: Begun::Nothing })?;
    Ok(found)
}

/// The mark is written before any record of its epoch.
fn check_mark(mark: Option<Mark>, newest: Epoch) -> Result<()> {
    match mark {
        None if newest > Epoch(0) => {
            Err(Error::damaged(format!("its records are of {newest}, and the file \"copy\" is missing")))
        }
        Some(Mark { epoch, .. }) if epoch < newest => {
            Err(Error::damaged(format!("its records are of {newest}, and its file \"copy\" is of {epoch}")))
        }
        None | Some(_) => Ok(()),
    }
}

/// The recovered state, in the form that the store keeps.
struct Found {
    tail: Tail,
    epochs: Epochs,
    state: State,
    sealed: VecDeque<Sealed>,
    reserve: Reserve,
}

impl Found {
    fn from(found: Recovered, base: Option<Base>) -> Found {
        let tail = found.tail.expect("recovery ends with a tail");
        let newest = found.next.as_ref().map_or(tail.segment.number, |next| next.number);
        let epoch = |last| found.epochs.of(last).unwrap_or_default();
        let ended = found.ended.iter();
        let sealed = ended
            .map(|e| Sealed { segment: e.segment.clone(), last: e.last, epoch: epoch(e.last) })
            .collect();
        let deltas = found.ended.into_iter().map(|e| Arc::new(e.delta)).collect();
        let state = State { seq: found.last, active: found.active, sealed: deltas, base: Ok(base) };
        let (next, spare, kept) = (found.next, found.spare, found.kept.into());
        let reserve = Reserve { next, next_number: newest + 1, spare, kept };
        Found { tail, epochs: found.epochs, state, sealed, reserve }
    }
}
