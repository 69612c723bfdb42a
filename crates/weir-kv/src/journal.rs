//! The journal: records of transactions in preallocated segment files, made durable in groups.
//!
//! Writers queue records; one flush at a time writes all queued ones with one call and syncs once. A segment
//! is written and synced before its successor's first record, so only the newest may have a torn end. A
//! failed write or sync fails the journal for ever: the state of the disk is unknown then.
//!
//! Knows nothing of the records' content.

use crate::CommitSeq;
use crate::copies::Copies;
use crate::crash_points;
use crate::format::{SEGMENT_HEADER_BYTES, SegmentHeader, encode_segment_header, record_header_bytes};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Duration;
use tokio::sync::oneshot;
use weir_env::{BoxFuture, BufferPool, Clock, Disk, Env, File, IO_ALIGN, OpenMode, Pace, Tasks};
use weir_proto::{Error, Result};
use weir_watch::{Histogram, Object, Reason, WaitRecord, Watch};

/// Above this the committing thread flushes in place: memory stays bounded even if no caller waits for
/// durability.
const QUEUED_BYTES_MAX: usize = 8 << 20;
/// One write: enough for a disk's full speed, and buffers are reused.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// Longest flush in place on a thread that has other work: ten times the sync of an NVMe disk.
const FLUSH_HERE_MAX: Duration = Duration::from_micros(500);
/// Zeros are written in parts of this size.
const ZEROS_BYTES: usize = 1 << 20;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its data consistent at each point where it could panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Segment {
    pub(crate) number: u64,
    /// Format version of its records.
    pub(crate) version: u32,
    /// Size of its file. It differs from that of new ones if the store was opened with another size.
    pub(crate) bytes: u64,
    pub(crate) path: PathBuf,
    /// For creating and reading it.
    pub(crate) file: Arc<dyn File>,
    /// For appending, bypassing the page cache: measured 42 µs for write and sync against 60, without
    /// outliers.
    appender: Arc<dyn File>,
}

impl Segment {
    pub(crate) fn open(disk: &dyn Disk, header: SegmentHeader, path: PathBuf) -> std::io::Result<Segment> {
        let SegmentHeader { version, number, bytes } = header;
        let mode = OpenMode { create: false, ..OpenMode::WRITE };
        let (file, appender) = (disk.open(&path, mode)?, disk.open(&path, mode.direct())?);
        Ok(Segment { number, version, bytes, path, file, appender })
    }
}

/// The directory of segments, and their size.
#[derive(Clone)]
pub(crate) struct Shelf {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) dir: PathBuf,
    pub(crate) segment_bytes: u64,
    pub(crate) tasks: Tasks,
}

impl Shelf {
    pub(crate) fn path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("journal-{number:016x}"))
    }

    /// A new, empty, durable segment: `spare` under a new number, or a file of zeros. Written zeros, not
    /// reserved space: the first write into reserved space makes each sync also wait for the file system's
    /// own journal.
    pub(crate) fn make(&self, number: u64, version: u32, spare: Option<&Path>) -> Result<Segment> {
        let path = self.path(number);
        let doing = format!("prepare the journal segment {}", path.display());
        let made = || {
            let header = SegmentHeader { version, number, bytes: self.segment_bytes };
            let from = match spare {
                Some(spare) => spare.to_path_buf(),
                None => path.with_extension("tmp"),
            };
            let file = self.disk.open(&from, OpenMode::WRITE)?;
            if spare.is_none()
                && let Err(e) = write_zeros(&*file, 0, self.segment_bytes)
            {
                drop(file);
                let _ = self.disk.remove_file(&from); // a full disk gets back the part that was written
                return Err(e);
            }
            file.write_all_at(&encode_segment_header(header), 0)?;
            file.sync_data()?;
            self.disk.rename(&from, &path)?;
            self.disk.sync_dir(&self.dir)?;
            Segment::open(&*self.disk, header, path.clone())
        };
        made().map_err(|e| Error::from_io(doing, &e))
    }
}

/// Rewrites the file's content from `from` to `end`, and syncs it.
pub(crate) fn rewrite(file: &dyn File, from: u64, end: u64) -> std::io::Result<()> {
    let mut buffer = vec![0; ZEROS_BYTES.min((end - from) as usize)];
    let mut at = from;
    while at < end {
        let n = buffer.len().min((end - at) as usize);
        file.read_exact_at(&mut buffer[..n], at)?;
        file.write_all_at(&buffer[..n], at)?;
        at += n as u64;
    }
    file.sync_data()
}

pub(crate) fn write_zeros(file: &dyn File, mut from: u64, end: u64) -> std::io::Result<()> {
    let zeros = vec![0; ZEROS_BYTES.min((end - from) as usize)];
    while from < end {
        let n = zeros.len().min((end - from) as usize);
        file.write_all_at(&zeros[..n], from)?;
        from += n as u64;
    }
    Ok(())
}

enum Item {
    Record {
        seq: CommitSeq,
        bytes: Vec<u8>,
    },
    /// The previous record ended its segment; the next ones belong to this one.
    Next(Arc<Segment>),
}

impl Item {
    fn seq(&self) -> Option<CommitSeq> {
        match self {
            Item::Record { seq, .. } => Some(*seq),
            Item::Next(_) => None,
        }
    }
}

#[derive(Default)]
struct Queue {
    items: Vec<Item>,
    bytes: usize,
    /// A flush is running or about to run: it will include the records that are queued now.
    flushing: bool,
}

/// The position of the next flush.
struct Pen {
    segment: Arc<Segment>,
    /// Offset of the first block that is not full.
    block_offset: u64,
    /// The content of that block: it is rewritten with the following records.
    block: Vec<u8>,
    buffers: BufferPool,
    tasks: Tasks,
}

impl Pen {
    fn at(tail: &Tail, tasks: Tasks) -> std::io::Result<Pen> {
        let in_block = tail.used % IO_ALIGN as u64;
        let block_offset = tail.used - in_block;
        let mut block = vec![0; in_block as usize];
        tail.segment.file.read_exact_at(&mut block, block_offset)?;
        let buffers = BufferPool::new(2 * WRITE_BYTES_MAX);
        Ok(Pen { segment: tail.segment.clone(), block_offset, block, buffers, tasks })
    }

    fn turn_to(&mut self, segment: &Arc<Segment>) {
        self.segment = segment.clone();
        self.block_offset = SEGMENT_HEADER_BYTES as u64;
        self.block.clear();
    }

    /// Appends the parts in whole blocks, and syncs once.
    fn write(&mut self, parts: &mut Vec<&[u8]>) -> std::io::Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let mut rest = &parts[..];
        while !rest.is_empty() {
            let (count, len) = fitting(rest, self.block.len());
            self.write_some(&rest[..count], len)?;
            rest = &rest[count..];
        }
        parts.clear();
        self.tasks.crash_point(crash_points::WRITTEN);
        self.segment.appender.sync_data()?;
        self.tasks.crash_point(crash_points::SYNCED);
        Ok(())
    }

    fn write_some(&mut self, parts: &[&[u8]], len: usize) -> std::io::Result<()> {
        let mut buf = self.buffers.get(len.next_multiple_of(IO_ALIGN));
        let mut at = 0;
        for part in std::iter::once(&&self.block[..]).chain(parts) {
            buf[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        buf[len..].fill(0);
        self.segment.appender.write_all_at(&buf, self.block_offset)?;
        let full = len - len % IO_ALIGN;
        self.block_offset += full as u64;
        self.block.clear();
        self.block.extend_from_slice(&buf[full..len]);
        self.check();
        Ok(())
    }

    /// Panics if the next write would not begin with the partly filled block.
    fn check(&self) {
        assert!(self.block_offset.is_multiple_of(IO_ALIGN as u64), "a write begins with a block");
        assert!(self.block_offset >= SEGMENT_HEADER_BYTES as u64, "a segment's header stays");
        assert!(self.block.len() < IO_ALIGN, "a full block is not written again");
    }
}

/// The number of parts for one write, at least one, and their length with the block before them.
fn fitting(parts: &[&[u8]], before: usize) -> (usize, usize) {
    let (mut count, mut len) = (0, before);
    for part in parts {
        if count > 0 && len + part.len() > WRITE_BYTES_MAX {
            break;
        }
        count += 1;
        len += part.len();
    }
    (count, len)
}

/// The committer's state of the newest segment: queued records count as used space.
pub(crate) struct Tail {
    pub(crate) segment: Arc<Segment>,
    pub(crate) used: u64,
}

impl Tail {
    /// Whether a record of this length, and the end record after it, fit.
    pub(crate) fn fits(&self, len: usize) -> bool {
        self.used + (len + record_header_bytes(self.segment.version)) as u64 <= self.segment.bytes
    }
}

/// Longest record that fits into an empty segment.
pub(crate) fn record_len_max(version: u32, segment_bytes: u64) -> u64 {
    segment_bytes - (SEGMENT_HEADER_BYTES + record_header_bytes(version)) as u64
}

pub(crate) struct Journal {
    queue: Mutex<Queue>,
    pen: Mutex<Pen>,
    /// The newest record synced on this disk.
    synced: AtomicU64,
    /// The newest record in every required copy; never above `synced`.
    durable: AtomicU64,
    copies: Mutex<Arc<dyn Copies>>,
    failed: OnceLock<Error>,
    waiters: Mutex<Waiters>,
    clock: Clock,
    tasks: Tasks,
    pace: Pace,
    watch: Watch,
    /// Duration of a write with its sync.
    seconds: Histogram,
    /// Kept until a flush that runs has ended, even after the store was dropped.
    _lock: Arc<dyn File>,
}

/// The event that a caller waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Until {
    Synced,
    Durable,
}

#[derive(Default)]
struct Waiters {
    next_id: u64,
    by_seq: BTreeMap<(Until, CommitSeq, u64), oneshot::Sender<()>>,
}

impl Waiters {
    /// Takes out the callers that waited for this.
    fn take(&mut self, until: Until, last: CommitSeq) -> Vec<oneshot::Sender<()>> {
        let range = (until, CommitSeq(0), 0)..=(until, last, u64::MAX);
        let keys: Vec<_> = self.by_seq.range(range).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| self.by_seq.remove(&key)).collect()
    }
}

impl Journal {
    /// Continues at `tail`, up to which all is synced. The records durable in every copy may end earlier.
    pub(crate) fn new(
        tail: &Tail,
        synced: CommitSeq,
        durable: CommitSeq,
        copies: Arc<dyn Copies>,
        env: &Env,
        lock: Arc<dyn File>,
    ) -> Result<Journal> {
        let pen = Pen::at(tail, env.tasks.clone()).map_err(|e| unread_end(tail, &e))?;
        Ok(Journal {
            queue: Mutex::default(),
            pen: Mutex::new(pen),
            synced: AtomicU64::new(synced.0),
            durable: AtomicU64::new(durable.0.min(synced.0)),
            copies: Mutex::new(copies),
            failed: OnceLock::new(),
            waiters: Mutex::default(),
            clock: env.clock.clone(),
            tasks: env.tasks.clone(),
            pace: Pace::new(FLUSH_HERE_MAX),
            watch: env.watch.clone(),
            seconds: env.watch.histogram("weir_journal_sync_seconds", ("", "")),
            _lock: lock,
        })
    }

    pub(crate) fn durable(&self) -> CommitSeq {
        CommitSeq(self.durable.load(Ordering::Acquire))
    }

    pub(crate) fn synced(&self) -> CommitSeq {
        CommitSeq(self.synced.load(Ordering::Acquire))
    }

    /// Uses other copies from now on.
    pub(crate) fn change_copies(&self, copies: Arc<dyn Copies>) {
        *lock(&self.copies) = copies;
        self.settle();
    }

    /// Ends waits for records that may never become durable, with an error.
    pub(crate) fn end_waits(&self) {
        lock(&self.waiters).by_seq.retain(|(until, ..), _| *until == Until::Synced);
    }

    /// Continues at another position, after records that are in no other copy were truncated. Nothing is
    /// queued.
    pub(crate) fn restart(&self, tail: &Tail, last: CommitSeq) -> Result<()> {
        let mut pen = lock(&self.pen);
        let tasks = pen.tasks.clone();
        *pen = Pen::at(tail, tasks).map_err(|e| unread_end(tail, &e))?;
        assert!(lock(&self.queue).items.is_empty(), "all records were flushed before the truncation");
        assert!(self.durable() <= last, "durable records are never truncated");
        self.synced.store(last.0, Ordering::Release);
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Fails the journal: all waiting and later calls get this error.
    pub(crate) fn fail(&self, error: Error) {
        if self.failed.set(error.clone()).is_ok() {
            tracing::error!(%error, "the store stops");
        }
        lock(&self.waiters).by_seq.clear();
    }

    /// Queues records in the order of their numbers: the caller is the only committer.
    pub(crate) fn push(&self, seq: CommitSeq, bytes: Vec<u8>) {
        let mut queue = lock(&self.queue);
        let before = queue.items.iter().rev().find_map(Item::seq);
        assert!(before.is_none_or(|before| before <= seq), "{seq:?} is queued after {before:?}");
        queue.bytes += bytes.len();
        queue.items.push(Item::Record { seq, bytes });
        let full = queue.bytes > QUEUED_BYTES_MAX;
        drop(queue);
        if full {
            let _ = self.flush(); // a failure is kept, and waiting callers get it
        }
    }

    pub(crate) fn push_next(&self, end_record: Vec<u8>, last: CommitSeq, next: Arc<Segment>) {
        let mut queue = lock(&self.queue);
        queue.bytes += end_record.len();
        queue.items.push(Item::Record { seq: last, bytes: end_record });
        queue.items.push(Item::Next(next));
    }

    /// Has a thread that may block flush what is queued, unless one is about to.
    pub(crate) fn flush_soon(self: &Arc<Self>) {
        lock(&self.copies).flush();
        if self.begin_flushing() {
            let journal = self.clone();
            self.tasks.start_blocking(move || journal.lead());
        }
    }

    /// True: the caller must flush.
    fn begin_flushing(&self) -> bool {
        let mut queue = lock(&self.queue);
        !queue.items.is_empty() && !std::mem::replace(&mut queue.flushing, true)
    }

    /// False: more was queued meanwhile, and the caller must flush again.
    fn end_flushing(&self) -> bool {
        let mut queue = lock(&self.queue);
        queue.flushing = !queue.items.is_empty();
        !queue.flushing
    }

    /// On a thread that may block: it flushes after what it does now, and so what others on this thread, or
    /// elsewhere, queue until then; unless another thread is about to.
    pub(crate) fn flush_next(self: &Arc<Self>) {
        if self.begin_flushing() {
            let journal = self.clone();
            self.tasks.after(move || journal.lead());
        }
    }

    /// Flushes. Records queued meanwhile follow, after the work on this thread that waited for this flush.
    fn lead(self: &Arc<Self>) {
        // After a failure `flushing` stays set: no flush is needed any more.
        if self.flush().is_ok() && !self.end_flushing() {
            let journal = self.clone();
            self.tasks.after(move || journal.lead());
        }
    }

    /// Whether a thread with other work may flush.
    pub(crate) fn is_quick(&self) -> bool {
        self.pace.is_quick()
    }

    /// Makes all queued records durable, unless another thread is writing: then one that may block does. A
    /// failure is kept, and waiting callers get it.
    pub(crate) fn flush_unless_busy(self: &Arc<Self>) -> bool {
        let pen = match self.pen.try_lock() {
            Ok(pen) => pen,
            Err(TryLockError::Poisoned(pen)) => pen.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.flush_soon();
                return false;
            }
        };
        self.flush_with(pen).is_ok()
    }

    /// Makes all records durable that were queued before this call.
    pub(crate) fn flush(&self) -> Result<()> {
        self.flush_with(lock(&self.pen))
    }

    fn flush_with(&self, mut pen: MutexGuard<'_, Pen>) -> Result<()> {
        self.check()?;
        let items = {
            let mut queue = lock(&self.queue);
            queue.bytes = 0;
            std::mem::take(&mut queue.items)
        };
        lock(&self.copies).flush();
        let begun = self.clock.now();
        let written = match items.is_empty() {
            true => Ok(()),
            false => {
                let wait = WaitRecord::new(Reason::Journal, Object::NONE);
                let _wait = self.watch.wait_since(begun.0, wait);
                write_items(&mut pen, &items)
            }
        };
        if !items.is_empty() {
            let took = self.clock.now().since(begun);
            self.seconds.add(took.as_nanos() as u64);
            self.pace.took(took);
        }
        if let Err(e) = written {
            let path = pen.segment.path.display();
            let failed = Error::io(format!("write the journal {path}: {e}; the node must be restarted"));
            self.fail(failed.clone());
            return Err(failed);
        }
        if let Some(last) = items.iter().rev().find_map(Item::seq) {
            self.became_synced(last);
        }
        Ok(())
    }

    fn became_synced(&self, last: CommitSeq) {
        assert!(self.synced() <= last, "{:?} was synced before {last:?}", self.synced());
        self.synced.store(last.0, Ordering::Release);
        let woken = lock(&self.waiters).take(Until::Synced, last);
        wake(woken);
        self.settle();
    }

    /// Checks again which records all copies keep.
    pub(crate) fn settle(&self) {
        // In this order: a copy that becomes required now has all records that were synced before.
        let synced = self.synced();
        let last = lock(&self.copies).kept().min(synced);
        if self.durable.fetch_max(last.0, Ordering::AcqRel) < last.0 {
            let woken = lock(&self.waiters).take(Until::Durable, last);
            wake(woken);
        }
    }

    fn reached(&self, until: Until, seq: CommitSeq) -> bool {
        let reached = match until {
            Until::Synced => self.synced(),
            Until::Durable => self.durable(),
        };
        reached >= seq
    }

    pub(crate) fn wait(self: &Arc<Self>, until: Until, seq: CommitSeq) -> BoxFuture<'static, Result<()>> {
        if self.reached(until, seq) {
            let answer = self.check();
            return Box::pin(async { answer });
        }
        let (tx, rx) = oneshot::channel();
        {
            let mut waiters = lock(&self.waiters);
            // Checked again under the lock: a flush that ended earlier has woken all waiters that it found.
            if !self.reached(until, seq) && self.failed.get().is_none() {
                let id = waiters.next_id;
                waiters.next_id += 1;
                waiters.by_seq.insert((until, seq, id), tx);
            }
        }
        self.flush_soon();
        let journal = self.clone();
        Box::pin(async move {
            let _ = rx.await; // dropped by a failure or a change of copies, or reached by now
            journal.check()?;
            if !journal.reached(until, seq) {
                return Err(Error::stale(format!("another leader decides about the transaction {}", seq.0)));
            }
            Ok(())
        })
    }
}

fn wake(waiters: Vec<oneshot::Sender<()>>) {
    for waiter in waiters {
        let _ = waiter.send(()); // the waiter may be gone
    }
}

fn unread_end(tail: &Tail, e: &std::io::Error) -> Error {
    Error::from_io(format!("read the end of the journal {}", tail.segment.path.display()), e)
}

/// One call and one sync for each segment.
fn write_items(pen: &mut Pen, items: &[Item]) -> std::io::Result<()> {
    let mut parts: Vec<&[u8]> = Vec::with_capacity(items.len());
    for item in items {
        match item {
            Item::Record { bytes, .. } => parts.push(bytes),
            Item::Next(segment) => {
                pen.write(&mut parts)?;
                pen.turn_to(segment);
            }
        }
    }
    pen.write(&mut parts)
}
