//! The store on a disk: transactions in memory, a journal that makes them durable, and a tree they are folded into.
//!
//! Invariants: a transaction is visible at once and durable when the journal says so. The journal holds everything
//! that the tree does not; a segment's file is given up only after the fold that contains it is durable. One sealed
//! delta is exactly one segment. Locks are taken in this order: writer, tree, pen, state.
//!
//! On a full disk transactions are refused and reads go on. After a failed sync everything is refused.

use crate::base::{Folded, Tree};
use crate::change::Delta;
use crate::crash_points;
use crate::format::{SEGMENT_HEADER_BYTES, encode_record, record_len};
use crate::journal::{Journal, Segment, Shelf, Tail, lock, record_len_max};
use crate::recover::recover;
use crate::state::{Body, State};
use crate::{CommitSeq, Kv, Read, Txn};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::{BoxFuture, Disk, Env, File, OpenMode};
use weir_proto::{Error, ErrorKind, Result};

/// The journal is this many segments at most: one being written, its prepared successor, two being folded.
const SEGMENTS_MAX: u64 = 4;
const JOURNAL_BYTES_MIN: u64 = 1 << 20;
const JOURNAL_BYTES_MAX: u64 = 4 << 30;
/// Room that a fold leaves on the file system.
const FOLD_SPARE_BYTES: u64 = 1 << 20;
/// How long an open waits for the process before to let go of the directory.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(10);
/// A tree that cannot be read is opened again for so long; then the store fails.
const MEND_PATIENCE: Duration = Duration::from_secs(30);
const MEND_PAUSE: Duration = Duration::from_millis(100);

/// What one process may choose about its store.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Memory for pages of the tree.
    pub cache_bytes: usize,
    /// Disk space of the journal. The changes it holds are in memory too, at two to three times their size.
    pub journal_bytes_max: u64,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig { cache_bytes: 64 << 20, journal_bytes_max: 128 << 20 }
    }
}

/// A store in a directory. Dropping it is like a kill: call [`Kv::checkpoint`] first to open fast next time.
pub struct Engine {
    core: Arc<Core>,
}

struct Core {
    env: Env,
    shelf: Shelf,
    cache_bytes: usize,
    journal: Arc<Journal>,
    /// Held by the one transaction that runs.
    writer: Mutex<Tail>,
    state: RwLock<State>,
    /// Segments of `state.sealed`, in the same order; changed together with it.
    sealed: Mutex<VecDeque<Sealed>>,
    tree: Mutex<Option<Tree>>,
    tree_file: Arc<dyn File>,
    reserve: Mutex<Reserve>,
    wake_folder: Notify,
    closed: AtomicBool,
    _lock: Arc<dyn File>,
}

#[derive(Clone)]
struct Sealed {
    segment: Arc<Segment>,
    last: CommitSeq,
}

/// Segments made before they are needed.
struct Reserve {
    next: Option<Arc<Segment>>,
    /// Number of the segment to be made when `next` is gone.
    next_number: u64,
    spare: Option<PathBuf>,
}

impl Engine {
    /// Opens or makes the store in `dir`, and brings back every durable transaction.
    pub async fn open(env: &Env, dir: &Path, config: EngineConfig) -> Result<Arc<Engine>> {
        let journal_bytes = config.journal_bytes_max;
        if !(JOURNAL_BYTES_MIN..=JOURNAL_BYTES_MAX).contains(&journal_bytes) {
            return Err(Error::invalid(format!(
                "a journal of {journal_bytes} bytes was asked for; {JOURNAL_BYTES_MIN} to {JOURNAL_BYTES_MAX} are possible"
            )));
        }
        let lock = lock_directory(env, dir).await?;
        let (env_, dir) = (env.clone(), dir.to_path_buf());
        let core = env.tasks.blocking(move || Core::load(env_, dir, config, lock)).await?;
        let core = Arc::new(core);
        env.tasks.spawn("kv-journal", flush_always(core.clone()));
        env.tasks.spawn("kv-fold", fold_always(core.clone()));
        core.wake_folder.notify_one();
        Ok(Arc::new(Engine { core }))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.core.closed.store(true, Ordering::Release);
        self.core.journal.wake.notify_one();
        self.core.wake_folder.notify_one();
    }
}

impl Kv for Engine {
    fn transact(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        let seq = self.core.transact(body)?;
        self.core.journal.flush_soon();
        Ok(seq)
    }

    fn transact_more(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        self.core.transact(body)
    }

    fn flush_soon(&self) {
        self.core.journal.flush_soon();
    }

    fn flush_here(&self) -> bool {
        self.core.flush_here()
    }

    fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<CommitSeq> {
        self.core.journal.check()?;
        let state = self.core.state();
        let done = body(&*state);
        self.core.mend_if_lost(&state);
        done.map(|()| state.seq)
    }

    fn durable(&self) -> CommitSeq {
        self.core.journal.durable()
    }

    fn wait_durable(&self, seq: CommitSeq) -> BoxFuture<'static, Result<()>> {
        if seq > self.core.journal.durable() && seq > self.core.state().seq {
            return Box::pin(async move {
                Err(Error::invalid(format!(
                    "somebody waits for the transaction {}, which was never made",
                    seq.0
                )))
            });
        }
        self.core.journal.wait(seq)
    }

    fn checkpoint(&self) -> BoxFuture<'static, Result<()>> {
        let core = self.core.clone();
        Box::pin(async move {
            let tasks = core.env.tasks.clone();
            tasks.blocking(move || core.checkpoint()).await
        })
    }
}

async fn lock_directory(env: &Env, dir: &Path) -> Result<Arc<dyn File>> {
    let doing = format!("lock the state directory {}", dir.display());
    let io = |e: std::io::Error| Error::from_io(&doing, &e);
    make_directory(&*env.disk, dir).map_err(io)?;
    let file = env.disk.open(&dir.join("lock"), OpenMode::WRITE).map_err(io)?;
    let until = env.clock.now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => return Err(io(e)),
            Err(_) if env.clock.now() >= until => {
                return Err(Error::unavailable(format!("{doing}: another process has it open")));
            }
            Err(_) => env.clock.sleep(LOCK_RETRY).await,
        }
    }
}

/// Durably, with its parents: a name is durable when its directory is synced.
fn make_directory(disk: &dyn Disk, dir: &Path) -> std::io::Result<()> {
    let named = dir.ancestors().skip(1).map(|d| if d.as_os_str().is_empty() { Path::new(".") } else { d });
    let mut parents = Vec::new();
    for parent in named {
        parents.push(parent);
        if disk.exists(parent) {
            break; // whoever made it has seen to it
        }
    }
    disk.create_dir_all(dir)?;
    parents.into_iter().try_for_each(|parent| disk.sync_dir(parent))
}

/// Flushes whenever something is queued.
async fn flush_always(core: Arc<Core>) {
    loop {
        core.journal.wake.notified().await;
        let journal = core.journal.clone();
        core.env.tasks.blocking(move || journal.drain()).await;
        if core.closed.load(Ordering::Acquire) {
            return;
        }
    }
}

/// Folds whenever something is sealed, keeps a segment ready, and opens the tree again when a read has failed.
async fn fold_always(core: Arc<Core>) {
    let mut lost_since = None;
    loop {
        core.wake_folder.notified().await;
        if core.closed.load(Ordering::Acquire) {
            return;
        }
        let worker = core.clone();
        if let Err(error) = core.env.tasks.blocking(move || worker.mend()).await {
            let now = core.env.clock.now();
            if error.kind == ErrorKind::Damaged || now.since(*lost_since.get_or_insert(now)) >= MEND_PATIENCE
            {
                core.journal.fail(error);
                return;
            }
            tracing::warn!(%error, "the state tree cannot be read now");
            core.env.clock.sleep(MEND_PAUSE).await;
            core.wake_folder.notify_one();
            continue;
        }
        lost_since = None;
        let worker = core.clone();
        let done = core.env.tasks.blocking(move || worker.prepare_next().and_then(|()| worker.fold()));
        if let Err(error) = done.await {
            // Tried again when the next segment is full; until then nothing is lost or refused.
            tracing::warn!(%error, "the journal cannot be folded now");
            if core.state().is_lost() {
                core.env.clock.sleep(MEND_PAUSE).await;
                core.wake_folder.notify_one();
            }
        }
    }
}

impl Core {
    fn load(env: Env, dir: PathBuf, config: EngineConfig, lock: Arc<dyn File>) -> Result<Core> {
        let segment_bytes = config.journal_bytes_max / SEGMENTS_MAX / 4096 * 4096;
        let tree_path = dir.join("state.redb");
        let doing = format!("open the state tree {}", tree_path.display());
        let tree_file = env.disk.open(&tree_path, OpenMode::WRITE).map_err(|e| Error::from_io(doing, &e))?;
        let shelf = Shelf { disk: env.disk.clone(), dir, segment_bytes };
        let tree = Tree::open(tree_file.clone(), config.cache_bytes)
            .map_err(|e| e.doing(format!("in {}", tree_path.display())))?;
        shelf.disk.sync_dir(&shelf.dir).map_err(|e| Error::from_io("sync the state directory", &e))?;
        let found = recover(&shelf, tree.folded()?)?;
        let base = tree.snapshot()?;
        let newest = found.next.as_ref().map_or(found.tail.segment.number, |next| next.number);
        let sealed =
            found.ended.iter().map(|e| Sealed { segment: e.segment.clone(), last: e.last }).collect();
        let deltas = found.ended.into_iter().map(|e| Arc::new(e.delta)).collect();
        Ok(Core {
            env: env.clone(),
            journal: Arc::new(Journal::new(&found.tail, found.last, &env)?),
            shelf,
            cache_bytes: config.cache_bytes,
            writer: Mutex::new(found.tail),
            state: RwLock::new(State {
                seq: found.last,
                active: found.active,
                sealed: deltas,
                base: Ok(base),
            }),
            sealed: Mutex::new(sealed),
            tree: Mutex::new(Some(tree)),
            tree_file,
            reserve: Mutex::new(Reserve { next: found.next, next_number: newest + 1, spare: found.spare }),
            wake_folder: Notify::new(),
            closed: AtomicBool::new(false),
            _lock: lock,
        })
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        // Whole after a panic in a body: it is changed only by `apply` and in `seal` and `fold`.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn transact(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        let mut tail = lock(&self.writer);
        self.journal.check()?;
        let (changes, before) = {
            let state = self.state();
            let mut txn = Body::new(&state);
            let done = body(&mut txn);
            let done = done.and_then(|()| txn.finish());
            self.mend_if_lost(&state);
            (done?, state.seq)
        };
        if changes.is_empty() {
            return Ok(before);
        }
        let len = self.reserve(&mut tail, &changes)?;
        let seq = CommitSeq(before.0 + 1);
        let record = encode_record(tail.segment.number, seq, self.journal.durable(), &changes);
        assert!(record.len() == len, "a record is as long as its reservation");
        tail.used += len as u64;
        self.state_mut().apply(seq, changes);
        self.env.tasks.crash_point(crash_points::COMMITTED);
        self.journal.push(seq, record);
        Ok(seq)
    }

    /// Makes sure that the record of these changes has its place. Its length.
    fn reserve(&self, tail: &mut Tail, changes: &Delta) -> Result<usize> {
        let len = record_len(changes);
        let max = record_len_max(self.shelf.segment_bytes);
        if len as u64 > max {
            return Err(Error::invalid(format!("a transaction of {len} bytes; at most {max} are possible")));
        }
        if !tail.fits(len, self.shelf.segment_bytes) {
            self.seal(tail)?;
        }
        Ok(len)
    }

    /// Ends the segment and goes on in the next one; what it says waits for its fold.
    fn seal(&self, tail: &mut Tail) -> Result<()> {
        while lock(&self.sealed).len() as u64 + 2 >= SEGMENTS_MAX {
            self.fold()?; // the folder is behind: the writer helps, or waits for it
        }
        let next = self.take_next()?;
        let last = self.state().seq;
        let end = encode_record(tail.segment.number, last, self.journal.durable(), &Delta::default());
        self.journal.push_next(end, last, next.clone());
        let ended = std::mem::replace(tail, Tail { segment: next, used: SEGMENT_HEADER_BYTES as u64 });
        {
            let mut state = self.state_mut();
            let delta = std::mem::take(&mut state.active);
            state.sealed.push(Arc::new(delta));
            lock(&self.sealed).push_back(Sealed { segment: ended.segment, last });
        }
        self.env.tasks.crash_point(crash_points::SEGMENT_ENDED);
        self.wake_folder.notify_one();
        Ok(())
    }

    fn take_next(&self) -> Result<Arc<Segment>> {
        loop {
            if let Some(next) = lock(&self.reserve).next.take() {
                return Ok(next);
            }
            self.prepare_next()?;
        }
    }

    fn prepare_next(&self) -> Result<()> {
        let mut reserve = lock(&self.reserve);
        if reserve.next.is_some() {
            return Ok(());
        }
        let spare = reserve.spare.take();
        let made = self.shelf.make(reserve.next_number, spare.as_deref())?;
        reserve.next_number += 1;
        reserve.next = Some(Arc::new(made));
        Ok(())
    }

    /// Moves every sealed delta into the tree and gives their segments up.
    fn fold(&self) -> Result<()> {
        let mut tree = lock(&self.tree);
        let (deltas, segments) = {
            let state = self.state();
            (state.sealed.clone(), lock(&self.sealed).iter().cloned().collect::<Vec<_>>())
        };
        assert!(deltas.len() == segments.len(), "a sealed delta is a segment");
        let Some(newest) = segments.last() else { return Ok(()) };
        self.journal.check()?;
        self.journal.flush()?;
        self.check_space(segments.len())?;
        let folded = Folded { seq: newest.last, segment: newest.segment.number };
        let base = self.fold_into(&mut tree, &deltas, folded)?;
        let (old_base, old_deltas) = {
            let mut state = self.state_mut();
            let old: Vec<_> = state.sealed.drain(..deltas.len()).collect();
            lock(&self.sealed).drain(..segments.len());
            (std::mem::replace(&mut state.base, Ok(base)), old)
        };
        self.env.tasks.crash_point(crash_points::FOLDED);
        drop((old_base, old_deltas, deltas)); // takes long: readers need not wait for it
        self.give_up(&segments)
    }

    fn fold_into(
        &self,
        tree: &mut Option<Tree>,
        deltas: &[Arc<Delta>],
        folded: Folded,
    ) -> Result<Option<crate::base::Base>> {
        let Some(open) = tree.as_ref() else {
            return Err(Error::unavailable("the state tree is being opened again: its disk failed"));
        };
        let done = open.fold(deltas, folded).and_then(|()| open.snapshot());
        if let Err(e) = &done {
            if e.kind == ErrorKind::NoSpace {
                if let Err(failed) = self.reopen(tree) {
                    self.journal.fail(failed);
                }
            } else if !open.is_lost() {
                self.journal.fail(e.clone());
            }
        }
        done
    }

    /// After a read that failed. What is written meanwhile is in the journal.
    fn mend(&self) -> Result<()> {
        let mut tree = lock(&self.tree);
        match &*tree {
            Some(tree) if !tree.is_lost() => Ok(()),
            _ => self.reopen(&mut tree),
        }
    }

    /// redb refuses every call after an I/O error, reads too: opens it again, at its last commit.
    fn reopen(&self, tree: &mut Option<Tree>) -> Result<()> {
        let mut state = self.state_mut();
        state.base = Err(Error::unavailable("the state tree is being opened again: its disk failed"));
        *tree = None;
        let opened = Tree::open(self.tree_file.clone(), self.cache_bytes)?;
        state.base = Ok(opened.snapshot()?);
        *tree = Some(opened);
        Ok(())
    }

    fn mend_if_lost(&self, state: &State) {
        if state.is_lost() {
            self.wake_folder.notify_one();
        }
    }

    /// A fold writes about what the segments hold, and copies the pages around it.
    fn check_space(&self, segment_count: usize) -> Result<()> {
        let need = 2 * segment_count as u64 * self.shelf.segment_bytes + FOLD_SPARE_BYTES;
        let dir = &self.shelf.dir;
        let space = self.shelf.disk.space(dir);
        let free =
            space.map_err(|e| Error::from_io(format!("ask for the space in {}", dir.display()), &e))?.free;
        if free < need {
            let dir = dir.display();
            return Err(Error::no_space(format!(
                "folding the journal in {dir} needs {need} bytes, {free} are free"
            )));
        }
        Ok(())
    }

    /// Keeps one file for the next segment, removes the others.
    fn give_up(&self, segments: &[Sealed]) -> Result<()> {
        let mut reserve = lock(&self.reserve);
        for Sealed { segment, .. } in segments {
            let path = &segment.path;
            if reserve.spare.is_none() {
                reserve.spare = Some(path.clone());
            } else {
                let removed = self.shelf.disk.remove_file(path);
                removed.map_err(|e| Error::from_io(format!("remove the journal {}", path.display()), &e))?;
            }
        }
        Ok(())
    }

    /// Not on a disk that is slow: the thread has other work.
    fn flush_here(&self) -> bool {
        if self.journal.is_quick()
            && let Some(_here) = self.env.tasks.block_here()
        {
            return self.journal.flush_unless_busy();
        }
        self.journal.flush_soon();
        false
    }

    fn checkpoint(&self) -> Result<()> {
        {
            let mut tail = lock(&self.writer);
            self.journal.check()?;
            if !self.state().active.is_empty() {
                self.seal(&mut tail)?;
            }
        }
        self.journal.flush()?;
        self.fold()
    }
}
