//! One process that plays with small files: each step is a request to its client, checked against what the
//! file may contain.
use super::{APPEND, CREATE, PLACES, Place, READ, SIZE, SYNC, Shape, SmallFile, SmallFiles, WRITE, ZERO};
use crate::calls::{close, read_all, root_cred};
use crate::concurrent_file::{Changes, Did, HEADER_BYTES, ReadSpan, Writer, record};
use crate::context::{Context, DIRS};
use crate::home::may_not_yet;
use crate::model::bytes_of;
use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_client::{Allocate, Client, Handle, OpenMode, SetAttrs};
use weir_env::Rng;
use weir_proto::meta::RenameMode;
use weir_proto::{Error, ErrorKind};

const STEPS_MAX: u64 = 8;
/// Longest pause of a process between two steps: some round trips.
const STEP_PAUSE: Duration = Duration::from_millis(4);
/// Sizes that files reach by writes in separate ranges.
const SPANS: [u64; 5] = [40, 400, 4_000, 4_200, 10_000];
/// Limit on appended bytes; after that the file is only read.
const APPENDED_BYTES_MAX: u64 = 40_000;

type Answer<T> = Result<T, (&'static str, Error)>;

trait Doing<T> {
    fn doing(self, what: &'static str) -> Answer<T>;
}
impl<T> Doing<T> for Result<T, Error> {
    fn doing(self, what: &'static str) -> Answer<T> {
        self.map_err(|e| (what, e))
    }
}

/// A process that uses small files.
pub(super) struct Player<'w> {
    pub(super) small_files: &'w SmallFiles,
    pub(super) context: &'w Context,
    pub(super) client: &'w Client,
    pub(super) me: usize,
    pub(super) process: usize,
    pub(super) rng: &'w Rng,
}

/// A process's handle on an open file.
#[derive(Clone, Copy)]
pub(super) struct Opened {
    handle: Handle,
    mode: OpenMode,
}

const APPENDS: OpenMode = OpenMode { append: true, ..OpenMode::BOTH };

impl Player<'_> {
    fn below(&self, n: u64) -> u64 {
        self.rng.below(n)
    }
    fn one_in(&self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub(super) fn writer(&self) -> Writer {
        let sure = !self.small_files.client_states.is_cut(self.me);
        let who = self.small_files.client_states.who(self.me);
        Writer { who, process: self.process, sure, at: self.small_files.world.now() }
    }
    fn log(&self, op: u64, what: impl Display) {
        self.context.log(op, format_args!("c{} {what}", self.me));
    }

    /// Makes a change that is in the model from before it begins until it is done.
    async fn change<T>(
        &self,
        file: &SmallFile,
        op: u64,
        did: Did,
        doing: impl Future<Output = Result<T, Error>>,
    ) -> Answer<T> {
        let begun = self.small_files.moment();
        file.changes().begin(op, self.writer(), did, begun);
        self.log(op, format_args!("{} {did:?}", file.title));
        let done = doing.await.doing("a change")?;
        file.changes().done(op, self.small_files.moment());
        Ok(done)
    }

    /// Creates another file in a place, or takes the present one; calls all processes.
    pub(super) async fn begin_bout(&self) -> Option<(Arc<SmallFile>, Option<Opened>)> {
        let number = self.below(PLACES as u64) as usize;
        let mut place = self.small_files.places[number].lock().await;
        let (excused, who) = (
            self.small_files.client_states.excuses_all(self.me),
            self.small_files.client_states.who(self.me),
        );
        place.give_up();
        let begun = match place.file.clone() {
            Some(file) if self.one_in(3) => Ok((file, None)),
            _ => self.replace(&mut place).await,
        };
        match begun {
            Ok((file, opened)) => {
                let mut last = self.small_files.last();
                *last = (last.0 + 1, Some(file.clone()));
                self.small_files.joined[self.process].store(last.0, Relaxed);
                self.small_files.bout_begins.notify_waiters();
                Some((file, opened))
            }
            Err((what, e)) => {
                let is_cut = who != self.small_files.client_states.who(self.me);
                let what = format!("c{}, place {number}: {what}", self.me);
                self.context.complain(self.me, excused || is_cut, what, &e);
                if let Some(file) = &place.file {
                    file.changes().doubt(self.me);
                }
                None
            }
        }
    }

    /// Makes a file; the previous one is read once more and removed.
    async fn replace(&self, place: &mut Place) -> Answer<(Arc<SmallFile>, Option<Opened>)> {
        let under_way = self.context.begin(self.me, CREATE);
        let name = (self.below(DIRS as u64) as usize, format!("t{}", under_way.op));
        let (file, opened) = self.create(under_way.op, &name).await?;
        let name = match place.file.clone() {
            Some(old) => {
                self.read_apart(&old).await?;
                old.leaves();
                self.context.found().uncertain.insert(place.name.clone());
                self.replace_old(&place.name, name).await?
            }
            None => name,
        };
        self.context.found().uncertain.retain(|known| *known != name);
        under_way.check_time(CREATE);
        *place = Place { file: Some(file.clone()), name };
        Ok((file, opened))
    }

    /// Replaces an old file: under the new name, or under that of the old one.
    async fn replace_old(&self, old: &(usize, String), name: (usize, String)) -> Answer<(usize, String)> {
        let (cred, parent) = (root_cred(), self.context.dirs[old.0]);
        let is_removal = self.one_in(2);
        if is_removal {
            self.client.unlink(&cred, parent, old.1.as_bytes()).await.doing("unlink")?;
            self.client.sync_names(parent).await.doing("sync a directory")?;
        } else {
            let from = self.context.dirs[name.0];
            let (moved, over) = (name.1.as_bytes(), old.1.as_bytes());
            let done = self.client.rename(&cred, from, moved, parent, over, RenameMode::Replace).await;
            done.doing("rename over")?;
            for dir in [from, parent] {
                self.client.sync_names(dir).await.doing("sync a directory")?;
            }
        }
        let (stays, goes) = if is_removal { (name, old.clone()) } else { (old.clone(), name) };
        self.context.found().uncertain.retain(|known| *known != goes);
        Ok(stays)
    }

    fn some_shape(&self) -> (Shape, u64) {
        let span = SPANS[self.below(SPANS.len() as u64) as usize];
        let block = (span / (2 + self.below(24))).max(1);
        let len = self.below(self.below(span) + 1);
        let log_from = self.one_in(2).then_some(if self.one_in(3) { 0 } else { len });
        (Shape { log_from, span, block }, log_from.unwrap_or(len))
    }

    /// Creates the file with its first bytes; a process that appends must find them, so they are made
    /// durable.
    async fn create(&self, op: u64, name: &(usize, String)) -> Answer<(Arc<SmallFile>, Option<Opened>)> {
        let (shape, len) = self.some_shape();
        self.log(op, format_args!("create {} in d{}, {shape:?}, {len} bytes", name.1, name.0));
        self.context.found().uncertain.insert(name.clone());
        let parent = self.context.dirs[name.0];
        let made =
            self.client.create(&root_cred(), parent, name.1.as_bytes(), 0o644, true, OpenMode::BOTH).await;
        let made = made.doing("create")?;
        let file = SmallFile {
            ino: made.stat.attr.ino,
            title: name.1.clone(),
            shape,
            changes: Mutex::new(Changes::new(shape.log_from)),
            is_leaving: Mutex::default(),
            appended: AtomicU64::new(0),
            settled: Mutex::default(),
        };
        let opened = Opened { handle: made.handle, mode: OpenMode::BOTH };
        if len > 0 {
            self.write(&file, opened.handle, op, 0, len).await?;
        }
        if shape.log_from.is_some() || self.one_in(2) {
            self.sync(&file, opened).await?;
        }
        let closes = self.one_in(2);
        if closes {
            self.close(&file, opened).await?;
        }
        // The leader may learn of the file only now, with its bytes.
        self.client.sync_names(parent).await.doing("sync the directory")?;
        Ok((Arc::new(file), (!closes).then_some(opened)))
    }

    /// A few steps.
    pub(super) async fn play(&self, file: &SmallFile, opened: Option<Opened>) -> Answer<()> {
        let opened = match opened {
            Some(opened) => opened,
            None => {
                self.pause().await;
                match self.open(file).await {
                    // It was removed before this process opened it.
                    Err(_) if file.is_leaving() => return Ok(()),
                    opened => opened?,
                }
            }
        };
        let done = self.steps(file, opened).await;
        if let Err(e) = done {
            let _ = self.client.release(opened.handle).await; // its errors are those of the step
            return Err(e);
        }
        self.close(file, opened).await
    }

    async fn pause(&self) {
        let most = self.below(STEP_PAUSE.as_nanos() as u64) + 1;
        self.small_files.world.sleep(Duration::from_nanos(self.below(most))).await;
    }

    async fn open(&self, file: &SmallFile) -> Answer<Opened> {
        let is_log = file.shape.log_from.is_some();
        let mode = match self.below(20) {
            0..6 => OpenMode::READ,
            6..17 if is_log => APPENDS,
            _ => OpenMode::BOTH,
        };
        let handle = self.client.open(&root_cred(), file.ino, mode).await.doing("open")?.handle;
        Ok(Opened { handle, mode })
    }

    async fn steps(&self, file: &SmallFile, opened: Opened) -> Answer<()> {
        for _ in 0..1 + self.below(STEPS_MAX) {
            self.pause().await;
            let operation = self.choose(file, opened.mode);
            let under_way = self.context.begin(self.me, operation);
            let (op, handle) = (under_way.op, opened.handle);
            match operation {
                WRITE => {
                    let (offset, len) = self.some_range(file);
                    self.write(file, handle, op, offset, len).await?;
                }
                APPEND => self.append(file, handle, op).await?,
                SIZE => self.set_size(file, handle, op).await?,
                ZERO => self.zero(file, handle, op).await?,
                SYNC => self.sync(file, opened).await?,
                _ => self.read(file, handle, op).await?,
            }
            under_way.check_time(operation);
        }
        Ok(())
    }

    fn choose(&self, file: &SmallFile, mode: OpenMode) -> &'static str {
        if !mode.write || self.one_in(4) {
            return READ;
        }
        if self.one_in(16) {
            return SYNC;
        }
        match file.shape.log_from {
            Some(_) if mode.append => {
                let is_full = file.appended.load(Relaxed) > APPENDED_BYTES_MAX;
                if is_full { READ } else { APPEND }
            }
            Some(0) => READ,
            Some(_) => match self.below(12) {
                0..8 => WRITE,
                8..11 => ZERO,
                _ => SIZE,
            },
            None => match self.below(16) {
                0..10 => WRITE,
                10..13 => SIZE,
                _ => ZERO,
            },
        }
    }

    /// The range that all may write; in files with appends only below their records.
    pub(super) fn span(&self, file: &SmallFile) -> u64 {
        file.shape.log_from.unwrap_or(file.shape.span)
    }

    /// A range, mostly in its own blocks.
    fn some_range(&self, file: &SmallFile) -> (u64, u64) {
        let (span, block) = (self.span(file), file.shape.block);
        let processes = self.small_files.joined.len() as u64;
        let own = (self.below(span.div_ceil(block * processes)) * processes + self.process as u64) * block;
        if self.one_in(8) || own >= span {
            let offset = self.below(span);
            return (offset, 1 + self.below(span - offset));
        }
        let start = own + self.below(block.min(span - own));
        (start, 1 + self.below((own + block).min(span) - start))
    }

    async fn write(&self, file: &SmallFile, handle: Handle, op: u64, offset: u64, len: u64) -> Answer<()> {
        let data = bytes_of(op, offset, len as usize);
        let write = async {
            match self.client.try_write(handle, offset, &data) {
                Some(done) => done,
                None => self.client.write(handle, offset, data.clone().into()).await,
            }
        };
        let done = self.change(file, op, Did::Write { offset, len }, write).await?;
        assert_eq!(done as u64, len, "operation {op}: a short write");
        Ok(())
    }

    async fn append(&self, file: &SmallFile, handle: Handle, op: u64) -> Answer<()> {
        let len = HEADER_BYTES as u64 + self.below(self.below(file.shape.span.min(3000)) + 1);
        file.appended.fetch_add(len, Relaxed);
        let data = record(op, len as usize);
        let append = async {
            match self.client.try_append(handle, &data) {
                Some(done) => done,
                None => self.client.append(handle, data.clone().into()).await,
            }
        };
        let done = self.change(file, op, Did::Append { len }, append).await?;
        assert_eq!(done as u64, len, "operation {op}: a short append");
        Ok(())
    }

    async fn set_size(&self, file: &SmallFile, handle: Handle, op: u64) -> Answer<()> {
        if file.shape.log_from.is_none() && self.one_in(2) {
            let len = 1 + self.below(file.shape.span);
            return self.change(file, op, Did::Grow { len }, self.extend(handle, len)).await;
        }
        let len = match file.shape.log_from {
            Some(from) => from,
            None if self.one_in(4) => 0,
            None => self.below(file.shape.span + 1),
        };
        let set = SetAttrs { size: Some(len), ..SetAttrs::default() };
        let cred = root_cred();
        let set = self.client.setattr(&cred, file.ino, Some(handle), set);
        self.change(file, op, Did::Size { len }, set).await.map(drop)
    }

    pub(super) async fn extend(&self, handle: Handle, len: u64) -> Result<(), Error> {
        match self.client.fallocate(handle, Allocate::Extend, 0, len).await {
            // It has holes and is longer than that: the call needs to change nothing.
            Err(e) if e.kind == ErrorKind::Unsupported => Ok(()),
            done => done,
        }
    }

    async fn zero(&self, file: &SmallFile, handle: Handle, op: u64) -> Answer<()> {
        let (offset, len) = self.some_range(file);
        let grows = self.one_in(2);
        let zero = async {
            if grows {
                self.extend(handle, offset + len).await?;
            }
            let what = if grows { Allocate::ZeroRange } else { Allocate::PunchHole };
            self.client.fallocate(handle, what, offset, len).await
        };
        self.change(file, op, Did::Zero { offset, len, grows }, zero).await
    }

    async fn sync(&self, file: &SmallFile, opened: Opened) -> Answer<()> {
        let began = self.small_files.moment();
        self.client.fsync(opened.handle).await.doing("fsync")?;
        if opened.mode.write {
            file.changes().synced(self.small_files.client_states.who(self.me), began);
        }
        Ok(())
    }

    async fn close(&self, file: &SmallFile, opened: Opened) -> Answer<()> {
        let began = self.small_files.moment();
        close(self.client, opened.handle).await.doing("close")?;
        if opened.mode.write {
            file.changes().synced(self.small_files.client_states.who(self.me), began);
        }
        Ok(())
    }

    /// Reads all of it; at times only its size, or evicts it.
    async fn read(&self, file: &SmallFile, handle: Handle, op: u64) -> Answer<()> {
        match self.below(12) {
            0 => return self.stat(file, op).await,
            1 => return self.evict(file, op).await,
            _ => {}
        }
        let (who, from) = (self.writer(), self.small_files.moment());
        let got = read_all(self.client, handle, 0, usize::MAX).await.doing("read")?;
        self.log(op, format_args!("{} read {} bytes", file.title, got.len()));
        let to = self.small_files.moment();
        if self.is_sure_still(&who) {
            self.small_files.check(file, from, to, &got).unwrap_or_else(|e| {
                panic!("operation {op}: c{} {} ({:?}): {e}", self.me, file.title, file.ino)
            });
        }
        Ok(())
    }

    /// Its lease from before it was cut off may be revoked during the operation.
    fn is_sure_still(&self, who: &Writer) -> bool {
        who.sure && self.small_files.client_states.who(self.me) == who.who
    }

    pub(super) async fn stat(&self, file: &SmallFile, op: u64) -> Answer<()> {
        let (who, from) = (self.writer(), self.small_files.moment());
        let size = self.client.getattr(file.ino).await.doing("getattr")?.attr.size;
        self.log(op, format_args!("{} has a size of {size}", file.title));
        if self.is_sure_still(&who) {
            let may_have_lost = |writer: &Writer| self.small_files.may_have_lost(writer);
            let span = ReadSpan { from, to: self.small_files.moment(), may_have_lost: &may_have_lost };
            file.changes().check_size(&span, size).unwrap_or_else(|e| {
                panic!("operation {op}: c{} {} ({:?}): {e}", self.me, file.title, file.ino)
            });
        }
        Ok(())
    }

    async fn evict(&self, file: &SmallFile, op: u64) -> Answer<()> {
        let Some(home) = &self.context.home else { return Ok(()) };
        self.log(op, format_args!("{} evict", file.title));
        match self.client.evict(&root_cred(), file.ino, 0, u64::MAX).await {
            Ok(evicted) if !evicted.ranges.is_empty() => home.evicted(),
            Ok(_) => {}
            Err(e) if may_not_yet(&e) || file.is_leaving() => {}
            Err(e) => return Err(("evict", e)),
        }
        Ok(())
    }

    /// Reads it through a separate handle, after its bout may have ended.
    async fn read_apart(&self, file: &SmallFile) -> Answer<()> {
        let under_way = self.context.begin(self.me, READ);
        let handle =
            self.client.open(&root_cred(), file.ino, OpenMode::READ).await.doing("open to read")?.handle;
        let done = self.read(file, handle, under_way.op).await;
        let closed = close(self.client, handle).await.doing("close after a read");
        done.and(closed)
    }
}
