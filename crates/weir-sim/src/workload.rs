//! What applications do in the simulation, and the check of every answer.
//!
//! Two kinds of files. *Turn* files are used by every client, one operation at a time (an application-level lock), so
//! the model is exact: whatever a client is told must be what the last operation of any client left. *Shared* files are
//! written by all clients at the same moment, each in its own records.
//! A failed operation makes its file uncertain: it is given up, and counted.

use crate::model::{FileModel, bytes_of};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use weir_client::{Allocate, Client, Handle, OpenMode, SetAttrs};
use weir_env::{Rng, sim::World};
use weir_proto::meta::{Cred, RenameMode};
use weir_proto::{Error, InodeId};

/// Largest turn file, in bytes: several stripes of 4 × 64 KiB.
const FILE_BYTES_MAX: u64 = 1_200_000;
const DIRS: usize = 3;
const RECORDS: u64 = 12;

pub fn root_cred() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![] }
}

/// Everything that the clients share, and what they found.
pub struct Workload {
    world: World,
    dirs: Vec<InodeId>,
    slots: Vec<tokio::sync::Mutex<Slot>>,
    shared: Vec<SharedFile>,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    operations: u64,
    errors: Vec<String>,
    /// Names whose files were given up: they may exist or not.
    uncertain: BTreeSet<(usize, String)>,
}

/// A place for one turn file.
#[derive(Default)]
struct Slot {
    file: Option<TurnFile>,
}

struct TurnFile {
    dir: usize,
    name: String,
    ino: InodeId,
    model: FileModel,
    /// Per client.
    handles: BTreeMap<usize, Handle>,
}

/// Records of a size of its own; record `r` belongs to client `r % clients`.
struct SharedFile {
    name: String,
    ino: InodeId,
    record_bytes: usize,
    models: Vec<Mutex<FileModel>>,
}

impl Workload {
    /// Makes directories and shared files.
    pub async fn prepare(
        world: &World,
        client: &Client,
        clients: usize,
        slots: usize,
    ) -> Result<Workload, Error> {
        let cred = root_cred();
        let mut dirs = vec![InodeId::ROOT];
        for n in 1..DIRS {
            dirs.push(client.mkdir(&cred, InodeId::ROOT, format!("d{n}").as_bytes(), 0o755).await?.attr.ino);
        }
        let rng = world.rng("shared files");
        let mut shared = Vec::new();
        for n in 0..2 {
            let name = format!("shared{n}");
            let opened =
                client.create(&cred, InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::WRITE).await?;
            client.flush(opened.handle).await?;
            client.release(opened.handle).await?;
            let record_bytes = 1 + rng.below(60_000) as usize;
            let models = (0..clients).map(|_| Mutex::default()).collect();
            shared.push(SharedFile { name, ino: opened.stat.attr.ino, record_bytes, models });
        }
        let slots = (0..slots).map(|_| Default::default()).collect();
        Ok(Workload { world: world.clone(), dirs, slots, shared, found: Mutex::default() })
    }

    pub fn operations(&self) -> u64 {
        self.found().operations
    }
    pub fn errors(&self) -> Vec<String> {
        self.found().errors.clone()
    }

    fn found(&self) -> std::sync::MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_op(&self) -> u64 {
        let mut found = self.found();
        found.operations += 1;
        found.operations
    }

    fn complain(&self, what: impl Display, e: &Error) {
        self.found().errors.push(format!("{:?} {what}: {e:?}", self.world.now()));
    }

    fn log(&self, op: u64, what: impl Display) {
        self.world.trace(&format!("operation {op}: {what}"));
    }

    /// One application of client `me` on turn files.
    pub async fn use_turn_files(self: Arc<Self>, client: Client, me: usize, rng: Rng, operations: u64) {
        for _ in 0..operations {
            self.world.sleep(Duration::from_micros(rng.below(rng.below(200_000) + 1))).await;
            let mut slot = self.slots[rng.below(self.slots.len() as u64) as usize].lock().await;
            let op = self.next_op();
            let turn = Turn { work: &self, client: &client, me, rng: &rng, op };
            if let Err((what, e)) = turn.take(&mut slot).await {
                self.complain(format!("operation {op}, c{me}: {what}"), &e);
                turn.give_up(&mut slot).await;
            }
        }
    }

    /// One application of client `me` that writes its records of the shared files, all clients at once.
    pub async fn use_shared_files(
        self: Arc<Self>,
        client: Client,
        me: usize,
        clients: usize,
        rng: Rng,
        operations: u64,
    ) {
        for round in 0..=operations / 10 {
            for file in &self.shared {
                if let Err(e) = self.share(&client, file, me, clients, &rng).await {
                    self.complain(format!("c{me}, {}, round {round}", file.name), &e);
                    return;
                }
            }
        }
    }

    async fn share(
        &self,
        client: &Client,
        file: &SharedFile,
        me: usize,
        clients: usize,
        rng: &Rng,
    ) -> Result<(), Error> {
        let handle = client.open(&root_cred(), file.ino, OpenMode::BOTH).await?.handle;
        for _ in 0..5 {
            self.world.sleep(Duration::from_micros(rng.below(100_000))).await;
            let record = rng.below(RECORDS / clients as u64) * clients as u64 + me as u64;
            let offset = record * file.record_bytes as u64;
            let op = self.next_op();
            if rng.below(3) > 0 {
                let part = 1 + rng.below(file.record_bytes as u64) as usize;
                let at = offset + rng.below((file.record_bytes - part + 1) as u64);
                self.log(op, format_args!("c{me} {} write {part} at {at}", file.name));
                client.write(handle, at, bytes_of(op, at, part).into()).await?;
                let mut model = file.models[me].lock().unwrap_or_else(PoisonError::into_inner);
                model.write(op, &format!("c{me}"), at, part);
            } else {
                let got = read_all(client, handle, offset, file.record_bytes).await?;
                let model = file.models[me].lock().unwrap_or_else(PoisonError::into_inner);
                self.log(op, format_args!("c{me} {} read {} at {offset}", file.name, got.len()));
                check_own_record(&model, offset, file.record_bytes, &got)
                    .unwrap_or_else(|e| panic!("operation {op}: c{me} {}: {e}", file.name));
            }
        }
        if rng.below(2) == 0 {
            client.fsync(handle).await?;
        }
        client.flush(handle).await?;
        client.release(handle).await
    }

    /// Closes every file; an error here is one that `close` reported.
    pub async fn close_all(&self, clients: &[Client]) {
        for slot in &self.slots {
            let mut slot = slot.lock().await;
            let Some(file) = &mut slot.file else { continue };
            for (me, handle) in std::mem::take(&mut file.handles) {
                let closed = close(&clients[me], handle).await;
                if let Err(e) = closed {
                    self.complain(format!("close {} at the end", file.name), &e);
                    self.found().uncertain.insert((file.dir, file.name.clone()));
                }
            }
        }
    }

    /// Every name and every byte, as `client` (which has nothing cached) sees them.
    pub async fn verify(&self, client: &Client, when: &str) -> Result<(), Error> {
        let cred = root_cred();
        let uncertain = self.found().uncertain.clone();
        for slot in &self.slots {
            let slot = slot.lock().await;
            let Some(file) = &slot.file else { continue };
            if uncertain.contains(&(file.dir, file.name.clone())) {
                continue;
            }
            let what = format!("{when}: {} ({:?})", file.name, file.ino);
            let found = client.lookup(&cred, self.dirs[file.dir], file.name.as_bytes()).await?;
            let Some(stat) = found else { panic!("{what}: the name is gone") };
            assert_eq!(stat.attr.ino, file.ino, "{what}: another file");
            assert_eq!(stat.attr.size, file.model.len(), "{what}: size");
            self.verify_file(client, file.ino, &file.model, &what).await?;
        }
        for file in &self.shared {
            let mut whole = FileModel::default();
            let clients = file.models.len() as u64;
            for record in 0..RECORDS {
                let model =
                    file.models[(record % clients) as usize].lock().unwrap_or_else(PoisonError::into_inner);
                whole.take(&model, record * file.record_bytes as u64, file.record_bytes);
            }
            self.verify_file(client, file.ino, &whole, &format!("{when}: {} ({:?})", file.name, file.ino))
                .await?;
        }
        self.verify_names(client, when, &uncertain).await
    }

    async fn verify_file(
        &self,
        client: &Client,
        ino: InodeId,
        model: &FileModel,
        what: &str,
    ) -> Result<(), Error> {
        let doing = |e: Error| e.doing(what);
        let handle = client.open(&root_cred(), ino, OpenMode::READ).await.map_err(doing)?.handle;
        let len = model.len() as usize + 10_000;
        let got = read_all(client, handle, 0, len).await.map_err(doing)?;
        model.check(0, len, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
        client.release(handle).await.map_err(doing)
    }

    async fn verify_names(
        &self,
        client: &Client,
        when: &str,
        uncertain: &BTreeSet<(usize, String)>,
    ) -> Result<(), Error> {
        let mut expected: BTreeSet<(usize, String)> = (1..DIRS).map(|n| (0, format!("d{n}"))).collect();
        expected.extend(self.shared.iter().map(|f| (0, f.name.clone())));
        for slot in &self.slots {
            if let Some(file) = &slot.lock().await.file {
                expected.insert((file.dir, file.name.clone()));
            }
        }
        let mut found = BTreeSet::new();
        for (n, dir) in self.dirs.iter().enumerate() {
            let mut after = 0;
            loop {
                let listing = client.readdir(*dir, after, 3, false).await?;
                for entry in &listing.entries {
                    after = entry.cookie;
                    let name = String::from_utf8_lossy(&entry.name).into_owned();
                    assert!(found.insert((n, name.clone())), "{when}: {name} is listed twice");
                }
                if listing.end {
                    break;
                }
            }
        }
        found.retain(|name| !uncertain.contains(name));
        expected.retain(|name| !uncertain.contains(name));
        assert_eq!(found, expected, "{when}: names");
        Ok(())
    }
}

/// One operation on one turn file.
struct Turn<'w> {
    work: &'w Workload,
    client: &'w Client,
    me: usize,
    rng: &'w Rng,
    op: u64,
}

type Told<T> = Result<T, (&'static str, Error)>;

trait Doing<T> {
    fn doing(self, what: &'static str) -> Told<T>;
}
impl<T> Doing<T> for Result<T, Error> {
    fn doing(self, what: &'static str) -> Told<T> {
        self.map_err(|e| (what, e))
    }
}

impl Turn<'_> {
    async fn take(&self, slot: &mut Slot) -> Told<()> {
        let Some(file) = &mut slot.file else {
            slot.file = Some(self.create().await?);
            return Ok(());
        };
        match self.rng.below(100) {
            0..35 => self.write(file).await,
            35..42 => self.append(file).await,
            42..65 => self.read(file).await,
            65..72 => self.fsync(file).await,
            72..79 => self.truncate(file).await,
            79..82 => self.punch(file).await,
            82..88 => self.close(file).await,
            88..91 => self.stat(file).await,
            91..95 => self.rename(file).await,
            95..98 => self.read_whole(file).await,
            _ => {
                self.unlink(slot.file.take().expect("just seen")).await // whatever it ends with, the slot is free
            }
        }
    }

    fn who(&self) -> String {
        format!("c{}", self.me)
    }

    fn log(&self, file: &TurnFile, what: impl Display) {
        self.work.log(self.op, format_args!("c{} {} {what}", self.me, file.name));
    }

    fn new_name(&self) -> (usize, String) {
        (self.rng.below(DIRS as u64) as usize, format!("f{}", self.op))
    }

    async fn create(&self) -> Told<TurnFile> {
        let (dir, name) = self.new_name();
        self.work.log(self.op, format_args!("c{} create {name} in d{dir}", self.me));
        let parent = self.work.dirs[dir];
        let created =
            self.client.create(&root_cred(), parent, name.as_bytes(), 0o644, true, OpenMode::BOTH).await;
        if created.is_err() {
            self.work.found().uncertain.insert((dir, name.clone()));
        }
        let opened = created.doing("create")?;
        let handles = BTreeMap::from([(self.me, opened.handle)]);
        Ok(TurnFile { dir, name, ino: opened.stat.attr.ino, model: FileModel::default(), handles })
    }

    async fn handle(&self, file: &mut TurnFile) -> Told<Handle> {
        if let Some(handle) = file.handles.get(&self.me) {
            return Ok(*handle);
        }
        let found = self
            .client
            .lookup(&root_cred(), self.work.dirs[file.dir], file.name.as_bytes())
            .await
            .doing("lookup")?;
        let Some(stat) = found else {
            panic!("operation {}: {} finds no {}", self.op, self.who(), file.name)
        };
        assert_eq!(stat.attr.ino, file.ino, "operation {}: {} is another file", self.op, file.name);
        let handle = self.client.open(&root_cred(), file.ino, OpenMode::BOTH).await.doing("open")?.handle;
        file.handles.insert(self.me, handle);
        Ok(handle)
    }

    /// Sizes as applications have them: small, odd, whole cells, whole stripes.
    fn some_len(&self) -> usize {
        let len = match self.rng.below(10) {
            0..4 => 1 + self.rng.below(5000),
            4..6 => 47_008,
            6..8 => 1 + self.rng.below(150_000),
            8 => 65_536 * (1 + self.rng.below(4)),
            _ => 262_144 + self.rng.below(2) * 100_000,
        };
        len as usize
    }

    fn some_offset(&self, file: &TurnFile) -> u64 {
        let len = file.model.len();
        match self.rng.below(10) {
            0..4 => len,
            4..8 => self.rng.below(len + 1),
            8 => self.rng.below(len + 1) / 65_536 * 65_536,
            _ => (len + self.rng.below(300_000)).min(FILE_BYTES_MAX), // leaves a hole
        }
    }

    async fn write(&self, file: &mut TurnFile) -> Told<()> {
        let handle = self.handle(file).await?;
        let offset = self.some_offset(file);
        let len = self.some_len().min((FILE_BYTES_MAX + 70_000 - offset.min(FILE_BYTES_MAX)) as usize);
        self.log(file, format_args!("write {len} at {offset}"));
        let data = bytes_of(self.op, offset, len);
        let done = match self.client.try_write(handle, offset, &data) {
            Some(done) => done.doing("write (at once)")?,
            None => self.client.write(handle, offset, data.into()).await.doing("write")?,
        };
        assert_eq!(done, len, "operation {}: a short write", self.op);
        file.model.write(self.op, &self.who(), offset, len);
        Ok(())
    }

    async fn append(&self, file: &mut TurnFile) -> Told<()> {
        let len = self.some_len().min(50_000);
        self.log(file, format_args!("append {len} to {}", file.model.len()));
        let mode = OpenMode { append: true, ..OpenMode::WRITE };
        let handle = self.client.open(&root_cred(), file.ino, mode).await.doing("open to append")?.handle;
        let end = file.model.len();
        // The offset given is not where it goes.
        self.client.write(handle, 0, bytes_of(self.op, end, len).into()).await.doing("append")?;
        file.model.write(self.op, &self.who(), end, len);
        close(self.client, handle).await.doing("close after an append")
    }

    async fn read(&self, file: &mut TurnFile) -> Told<()> {
        let offset = self.rng.below(file.model.len() + 1);
        let len = self.some_len();
        self.read_and_check(file, offset, len).await
    }

    async fn read_whole(&self, file: &mut TurnFile) -> Told<()> {
        self.read_and_check(file, 0, file.model.len() as usize + 5000).await
    }

    async fn read_and_check(&self, file: &mut TurnFile, offset: u64, len: usize) -> Told<()> {
        let handle = self.handle(file).await?;
        self.log(file, format_args!("read {len} at {offset}"));
        let got = match self.client.try_read(handle, offset, len) {
            Some(parts) => parts.doing("read (cached)")?.concat(),
            None => read_all(self.client, handle, offset, len).await.doing("read")?,
        };
        let what = |e| panic!("operation {}: {} {} ({:?}): {e}", self.op, self.who(), file.name, file.ino);
        file.model.check(offset, len, &got).unwrap_or_else(what);
        Ok(())
    }

    async fn fsync(&self, file: &mut TurnFile) -> Told<()> {
        let handle = self.handle(file).await?;
        self.log(file, "fsync");
        file.model.note(self.op, format!("{} fsynced", self.who()), 0, 0);
        self.client.fsync(handle).await.doing("fsync")
    }

    async fn truncate(&self, file: &mut TurnFile) -> Told<()> {
        let len = match self.rng.below(6) {
            0 => 0,
            1 => (file.model.len() + self.rng.below(200_000)).min(FILE_BYTES_MAX),
            _ => self.rng.below(file.model.len() + 1),
        };
        let handle = if self.rng.below(2) == 0 { Some(self.handle(file).await?) } else { None };
        self.log(file, format_args!("truncate {} to {len}", file.model.len()));
        let set = SetAttrs { size: Some(len), ..SetAttrs::default() };
        let stat = self.client.setattr(&root_cred(), file.ino, handle, set).await.doing("truncate")?;
        assert_eq!(stat.attr.size, len, "operation {}: size after truncate of {}", self.op, file.name);
        file.model.truncate(self.op, &self.who(), len);
        Ok(())
    }

    async fn punch(&self, file: &mut TurnFile) -> Told<()> {
        let handle = self.handle(file).await?;
        let offset = self.rng.below(file.model.len() + 1);
        let len = 1 + self.rng.below(100_000);
        self.log(file, format_args!("punch {len} at {offset}"));
        self.client.fallocate(handle, Allocate::PunchHole, offset, len).await.doing("punch")?;
        file.model.zero(self.op, &self.who(), offset, len);
        Ok(())
    }

    async fn close(&self, file: &mut TurnFile) -> Told<()> {
        let Some(handle) = file.handles.remove(&self.me) else { return Ok(()) };
        self.log(file, "close");
        file.model.note(self.op, format!("{} closed", self.who()), 0, 0);
        close(self.client, handle).await.doing("close")
    }

    async fn stat(&self, file: &mut TurnFile) -> Told<()> {
        let stat = self.client.getattr(file.ino).await.doing("getattr")?;
        self.log(file, "stat");
        assert_eq!(
            stat.attr.size,
            file.model.len(),
            "operation {}: {} sees a wrong size of {}",
            self.op,
            self.who(),
            file.name
        );
        Ok(())
    }

    async fn rename(&self, file: &mut TurnFile) -> Told<()> {
        let (dir, name) = self.new_name();
        self.log(file, format_args!("rename to {name} in d{dir}"));
        let (from, to) = (self.work.dirs[file.dir], self.work.dirs[dir]);
        let done = self
            .client
            .rename(&root_cred(), from, file.name.as_bytes(), to, name.as_bytes(), RenameMode::Replace)
            .await;
        if done.is_err() {
            self.work.found().uncertain.insert((dir, name.clone()));
        }
        done.doing("rename")?;
        (file.dir, file.name) = (dir, name);
        Ok(())
    }

    /// Removes the name; who has it open still reads it.
    async fn unlink(&self, mut file: TurnFile) -> Told<()> {
        self.log(&file, "unlink");
        self.work.found().uncertain.insert((file.dir, file.name.clone()));
        let parent = self.work.dirs[file.dir];
        self.client.unlink(&root_cred(), parent, file.name.as_bytes()).await.doing("unlink")?;
        self.work.found().uncertain.remove(&(file.dir, file.name.clone()));
        let gone = self
            .client
            .lookup(&root_cred(), parent, file.name.as_bytes())
            .await
            .doing("lookup after unlink")?;
        assert!(gone.is_none(), "operation {}: {} is still there after its unlink", self.op, file.name);
        if let Some(handle) = file.handles.remove(&self.me) {
            let len = file.model.len() as usize + 10;
            let got = read_all(self.client, handle, 0, len).await.doing("read an unlinked file")?;
            file.model
                .check(0, len, &got)
                .unwrap_or_else(|e| panic!("operation {}: unlinked {}: {e}", self.op, file.name));
            close(self.client, handle).await.doing("close an unlinked file")?;
        }
        Ok(())
    }

    async fn give_up(&self, slot: &mut Slot) {
        if let Some(mut file) = slot.file.take() {
            self.work.found().uncertain.insert((file.dir, file.name.clone()));
            if let Some(handle) = file.handles.remove(&self.me) {
                let _ = self.client.release(handle).await; // its errors were counted with the failed operation
            }
        }
    }
}

async fn close(client: &Client, handle: Handle) -> Result<(), Error> {
    let flushed = client.flush(handle).await;
    client.release(handle).await?;
    flushed
}

/// Reads until `len` bytes or the end of the file.
async fn read_all(client: &Client, handle: Handle, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut all: Vec<u8> = Vec::with_capacity(len);
    while all.len() < len {
        let parts: Vec<Bytes> = client.read(handle, offset + all.len() as u64, len - all.len()).await?;
        if parts.iter().all(|p| p.is_empty()) {
            break;
        }
        parts.iter().for_each(|p| all.extend_from_slice(p));
    }
    Ok(all)
}

/// Others write beyond: a record that this client wrote in part may be followed by zeros up to the size they made.
fn check_own_record(model: &FileModel, offset: u64, len: usize, got: &[u8]) -> Result<(), String> {
    let known = model.read(offset, len).len();
    if got.len() >= known && got[known..].iter().all(|b| *b == 0) {
        model.check(offset, len, &got[..known])
    } else {
        model.check(offset, len, got)
    }
}
