//! One operation on one turn file: the request to the client, the expected reply, and the effect on the
//! model.

use crate::calls::{close, read_all, root_cred};
use crate::context::DIRS;
use crate::home::may_not_yet;
use crate::model::{What, Who, bytes_of};
use crate::turn_file::{Slot, TurnFile};
use crate::workload::Workload;
use std::collections::BTreeMap;
use std::{fmt::Display, time::Duration};
use weir_client::{Allocate, Client, Handle, OpenMode, Opened, SetAttrs};
use weir_env::Rng;
use weir_proto::meta::RenameMode;
use weir_proto::{Error, InodeId};

mod names;

/// 4 × 64 KiB.
const STRIPE_BYTES: u64 = 262_144;
/// Largest turn file, in bytes: several stripes.
const FILE_BYTES_MAX: u64 = 1_200_000;

pub const SETTLE_POLL: Duration = Duration::from_millis(200);
/// How often, and at which interval, the eviction of a file is retried that home may not have yet.
const HOME_POLLS: u32 = 5;
const HOME_PAUSE: Duration = Duration::from_millis(700);

pub struct Turn<'w> {
    pub work: &'w Workload,
    pub client: &'w Client,
    pub me: Who,
    pub rng: &'w Rng,
    pub op: u64,
}

pub type Answer<T> = Result<T, (&'static str, Error)>;

trait Doing<T> {
    fn doing(self, what: &'static str) -> Answer<T>;
}
impl<T> Doing<T> for Result<T, Error> {
    fn doing(self, what: &'static str) -> Answer<T> {
        self.map_err(|e| (what, e))
    }
}

impl Turn<'_> {
    /// The next operation for the file in this place.
    pub fn choose(slot: &Slot, rng: &Rng, has_home: bool) -> &'static str {
        if slot.file.is_none() {
            return "create";
        }
        if has_home && rng.below(7) == 0 {
            return "evict";
        }
        match rng.below(100) {
            0..35 => "write",
            35..42 => "append",
            42..61 => "read",
            61..64 => "save",
            64..71 => "fsync",
            71..72 => "rename",
            72..78 => "truncate",
            78..82 => "punch",
            82..87 => "close",
            87..89 => "stat",
            89..91 => "seek",
            91..94 => "rename",
            94..97 => "read all",
            _ => "unlink",
        }
    }

    /// `other`: a file that may be replaced by this one, or exchange names with it.
    pub async fn take(
        &self,
        slot: &mut Slot,
        operation: &'static str,
        other: Option<&mut Slot>,
    ) -> Answer<()> {
        self.work.abandon_if_moving(slot);
        let Some(file) = &mut slot.file else {
            slot.file = Some(self.create().await?);
            return Ok(());
        };
        if self.work.context.is_doubtful(&file.model) {
            self.settle(file).await?;
        }
        match operation {
            "write" => self.write(file).await,
            "append" => self.append(file).await,
            "read" => self.read(file).await,
            "fsync" => self.fsync(file).await,
            "truncate" => self.truncate(file).await,
            "punch" => self.punch(file).await,
            "close" => self.close(file).await,
            "stat" => self.stat(file).await,
            "seek" => self.seek(file).await,
            "evict" => self.evict(file).await,
            "rename" => self.rename(file, other).await,
            "save" => self.save(file).await,
            "read all" => self.read_and_check(file, 0, file.model.len() as usize + 5000).await,
            // With any outcome the place is free, unless the file is restored.
            _ => {
                let file = slot.file.take().expect("just seen");
                slot.file = self.unlink(file).await?;
                Ok(())
            }
        }
    }

    /// This client was cut off since it opened the file: errors are excused.
    pub fn is_excused(&self, slot: &Slot) -> bool {
        let handle = slot.file.as_ref().and_then(|file| file.handles.get(&self.me.client));
        self.work.context.client_states.excuses_all(self.me.client)
            || handle.is_some_and(|(_, who)| *who != self.me)
    }

    /// The effect of a failed operation: doubt about the file's bytes, or about its name.
    pub async fn after_error(&self, slot: &mut Slot) {
        let Some(file) = &mut slot.file else { return };
        file.reported(self.me.client);
        if let Some((handle, who)) = file.handles.remove(&self.me.client)
            && self.work.context.client_states.is_alive(who)
        {
            let _ = self.client.release(handle).await; // its errors were counted with the failed operation
        }
        self.work.abandon_if_moving(slot);
    }

    /// Reads a file whose last changes may be lost: the content found stays.
    async fn settle(&self, file: &mut TurnFile) -> Answer<()> {
        let client_states = &self.work.context.client_states;
        while client_states.is_broken() || file.model.is_on_its_way(|who| client_states.is_leaving(who)) {
            self.work.context.world.sleep(SETTLE_POLL).await;
        }
        let handle = self.handle(file).await?;
        let got = read_all(self.client, handle, 0, usize::MAX).await.doing("read what is in doubt")?;
        self.log(file, format_args!("settle {} bytes", got.len()));
        let differs = file.model.check(0, got.len() + 1, &got).err().unwrap_or_default();
        let lost = file.model.settle(self.me, &got, None);
        let lost =
            lost.unwrap_or_else(|e| panic!("operation {}: {} ({:?}): {e}", self.op, file.name, file.ino));
        if !lost.is_empty() {
            self.log(file, format_args!("lost: changes of {lost:?}: {differs}"));
        }
        for who in lost.into_iter().filter(|who| self.work.context.client_states.is_alive(*who)) {
            let has_it_open =
                file.handles.get(&who.client).is_some_and(|(_, opened)| opened.life == who.life);
            if has_it_open {
                let opened = file.handles[&who.client].1;
                file.owed.insert(who.client, opened);
            }
        }
        Ok(())
    }

    fn who(&self) -> String {
        format!("c{}", self.me.client)
    }

    fn log(&self, file: &TurnFile, what: impl Display) {
        self.work.context.log(self.op, format_args!("{} {} {what}", self.who(), file.name));
    }

    fn new_name(&self) -> (usize, String) {
        (self.rng.below(DIRS as u64) as usize, format!("f{}", self.op))
    }

    async fn create(&self) -> Answer<TurnFile> {
        let (dir, name) = self.new_name();
        self.work.context.log(self.op, format_args!("{} create {name} in d{dir}", self.who()));
        let parent = self.work.context.dirs[dir];
        self.work.context.found().uncertain.insert((dir, name.clone()));
        let opened = if self.rng.below(8) == 0 {
            self.create_and_name(parent, &name).await?
        } else {
            let created =
                self.client.create(&root_cred(), parent, name.as_bytes(), 0o644, true, OpenMode::BOTH).await;
            let created = created.doing("create")?;
            self.client.sync_names(parent).await.doing("sync the directory")?;
            created
        };
        self.work.context.found().uncertain.remove(&(dir, name.clone()));
        let handles = BTreeMap::from([(self.me.client, (opened.handle, self.me))]);
        let (ino, model) = (opened.stat.attr.ino, Default::default());
        Ok(TurnFile { dir, name, ino, model, handles, moving: false, written: 0, owed: BTreeMap::new() })
    }

    /// Makes a file that gets its name after it was opened, as programs do to hide incomplete files.
    async fn create_and_name(&self, parent: InodeId, name: &str) -> Answer<Opened> {
        let created = self.client.create_nameless(&root_cred(), parent, 0o644, OpenMode::BOTH).await;
        let opened = created.doing("create without a name")?;
        let linked = self.client.link(&root_cred(), opened.stat.attr.ino, parent, name.as_bytes()).await;
        if linked.is_err() {
            let _ = self.client.release(opened.handle).await; // its errors count with the missing name
        }
        linked.doing("give it a name")?;
        Ok(opened)
    }

    async fn handle(&self, file: &mut TurnFile) -> Answer<Handle> {
        if let Some((handle, who)) = file.handles.get(&self.me.client)
            && self.work.context.client_states.is_alive(*who)
        {
            return Ok(*handle);
        }
        let found = self
            .client
            .lookup(&root_cred(), self.work.context.dirs[file.dir], file.name.as_bytes())
            .await
            .doing("lookup")?;
        let Some(stat) = found else {
            panic!("operation {}: {} finds no {}", self.op, self.who(), file.name)
        };
        assert_eq!(stat.attr.ino, file.ino, "operation {}: {} is another file", self.op, file.name);
        let handle = self.client.open(&root_cred(), file.ino, OpenMode::BOTH).await.doing("open")?.handle;
        file.handles.insert(self.me.client, (handle, self.me));
        Ok(handle)
    }

    /// Like `handle`, for a file whose content is known: others may be cut off while it is opened.
    async fn sure_handle(&self, file: &mut TurnFile) -> Answer<Handle> {
        let handle = self.handle(file).await?;
        if self.work.context.is_doubtful(&file.model) {
            self.settle(file).await?;
        }
        Ok(handle)
    }

    /// Sizes typical of applications: small, odd, whole cells, whole stripes.
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

    /// A range to write: also an overwritten whole stripe, or the last written range.
    fn some_place(&self, file: &TurnFile) -> (u64, usize) {
        match self.rng.below(10) {
            0 => (self.rng.below(file.model.len() + 1) / STRIPE_BYTES * STRIPE_BYTES, STRIPE_BYTES as usize),
            1 => (file.written, 1 + self.rng.below(100) as usize),
            _ => {
                let offset = self.some_offset(file);
                let space = FILE_BYTES_MAX + 70_000 - offset.min(FILE_BYTES_MAX);
                (offset, self.some_len().min(space as usize))
            }
        }
    }

    /// The change of this operation succeeded; earlier changes of other clients have been seen.
    fn done(&self, file: &mut TurnFile) {
        self.saw(file);
        file.model.done(self.op);
    }

    /// This client has seen the others' changes.
    fn saw(&self, file: &mut TurnFile) {
        file.model.seen_by(self.me.client, |client| self.work.context.client_states.cuts(client));
    }

    async fn write(&self, file: &mut TurnFile) -> Answer<()> {
        let handle = self.sure_handle(file).await?;
        let (offset, len) = self.some_place(file);
        file.written = offset;
        self.log(file, format_args!("write {len} at {offset}"));
        let data = bytes_of(self.op, offset, len);
        file.model.begin(self.me, self.op, What::Write { offset, len: len as u64 });
        let done = match self.client.try_write(handle, offset, &data) {
            Some(done) => done.doing("write (at once)")?,
            None => self.client.write(handle, offset, data.into()).await.doing("write")?,
        };
        assert_eq!(done, len, "operation {}: a short write", self.op);
        self.done(file);
        Ok(())
    }

    async fn append(&self, file: &mut TurnFile) -> Answer<()> {
        let len = self.some_len().min(50_000);
        self.log(file, format_args!("append {len} to {}", file.model.len()));
        let mode = OpenMode { append: true, ..OpenMode::WRITE };
        let handle = self.client.open(&root_cred(), file.ino, mode).await.doing("open to append")?.handle;
        if self.work.context.is_doubtful(&file.model)
            && let Err(e) = self.settle(file).await
        {
            let _ = close(self.client, handle).await; // nothing was written
            return Err(e);
        }
        let end = file.model.len();
        file.model.begin(self.me, self.op, What::Write { offset: end, len: len as u64 });
        // The offset given is not used.
        let wrote = self.client.write(handle, 0, bytes_of(self.op, end, len).into()).await;
        let closed = close(self.client, handle).await;
        wrote.doing("append")?;
        closed.doing("close after an append")?;
        self.done(file);
        file.model.synced(self.me.client);
        Ok(())
    }

    async fn read(&self, file: &mut TurnFile) -> Answer<()> {
        let offset = self.rng.below(file.model.len() + 1);
        let len = self.some_len();
        self.read_and_check(file, offset, len).await
    }

    async fn read_and_check(&self, file: &mut TurnFile, offset: u64, len: usize) -> Answer<()> {
        let handle = self.handle(file).await?;
        self.log(file, format_args!("read {len} at {offset}"));
        let got = match self.client.try_read(handle, offset, len) {
            Some(parts) => parts.doing("read (cached)")?.concat(),
            None => read_all(self.client, handle, offset, len).await.doing("read")?,
        };
        let what = |e| panic!("operation {}: {} {} ({:?}): {e}", self.op, self.who(), file.name, file.ino);
        if !self.doubts_self(file) {
            file.model.check(offset, len, &got).unwrap_or_else(what);
            self.saw(file);
        }
        Ok(())
    }

    /// This client's writes from before it was cut off may disappear at any time, until it gets an error.
    fn doubts_self(&self, file: &TurnFile) -> bool {
        self.work.context.is_doubtful(&file.model)
    }

    async fn fsync(&self, file: &mut TurnFile) -> Answer<()> {
        let handle = self.handle(file).await?;
        self.log(file, "fsync");
        file.model.note(self.op, format!("{} fsynced", self.who()), 0, 0);
        self.client.fsync(handle).await.doing("fsync")?;
        file.model.synced(self.me.client);
        Ok(())
    }

    async fn truncate(&self, file: &mut TurnFile) -> Answer<()> {
        let len = match self.rng.below(6) {
            0 => 0,
            1 => (file.model.len() + self.rng.below(200_000)).min(FILE_BYTES_MAX),
            _ => self.rng.below(file.model.len() + 1),
        };
        let handle = if self.rng.below(2) == 0 { Some(self.sure_handle(file).await?) } else { None };
        self.log(file, format_args!("truncate {} to {len}", file.model.len()));
        file.model.begin(self.me, self.op, What::Size { len });
        let set = SetAttrs { size: Some(len), ..SetAttrs::default() };
        let stat = self.client.setattr(&root_cred(), file.ino, handle, set).await.doing("truncate")?;
        assert_eq!(stat.attr.size, len, "operation {}: size after truncate of {}", self.op, file.name);
        self.done(file);
        Ok(())
    }

    async fn punch(&self, file: &mut TurnFile) -> Answer<()> {
        let handle = self.sure_handle(file).await?;
        let offset = self.rng.below(file.model.len() + 1);
        let len = 1 + self.rng.below(100_000);
        let grows = offset + len > file.model.len();
        let how = if grows || self.rng.below(2) == 0 { Allocate::PunchHole } else { Allocate::ZeroRange };
        self.log(file, format_args!("punch {len} at {offset}"));
        file.model.begin(self.me, self.op, What::Zero { offset, len });
        self.client.fallocate(handle, how, offset, len).await.doing("punch")?;
        self.done(file);
        Ok(())
    }

    async fn close(&self, file: &mut TurnFile) -> Answer<()> {
        let Some((handle, who)) = file.handles.remove(&self.me.client) else { return Ok(()) };
        if !self.work.context.client_states.is_alive(who) {
            return Ok(());
        }
        self.log(file, "close");
        file.model.note(self.op, format!("{} closed", self.who()), 0, 0);
        close(self.client, handle).await.doing("close")?;
        file.closed(who);
        Ok(())
    }

    async fn stat(&self, file: &mut TurnFile) -> Answer<()> {
        let stat = self.client.getattr(file.ino).await.doing("getattr")?;
        self.log(file, "stat");
        if self.doubts_self(file) {
            return Ok(());
        }
        let (size, len) = (stat.attr.size, file.model.len());
        assert_eq!(size, len, "operation {}: {} sees a wrong size of {}", self.op, self.who(), file.name);
        self.saw(file);
        Ok(())
    }

    /// A reported hole must read as zeros.
    async fn seek(&self, file: &mut TurnFile) -> Answer<()> {
        let handle = self.sure_handle(file).await?;
        let offset = self.rng.below(file.model.len() + 1);
        self.log(file, format_args!("seek from {offset}"));
        let data = self.client.seek_data(handle, offset).await.doing("seek data")?;
        let hole = self.client.seek_hole(handle, offset).await.doing("seek a hole")?;
        if self.doubts_self(file) {
            return Ok(());
        }
        let len = file.model.len();
        let data = data.unwrap_or(len);
        let is_zero =
            |from: u64, to: u64| file.model.read(from, (to - from) as usize).iter().all(|b| *b == 0);
        let is_right = (offset..=len).contains(&data)
            && is_zero(offset, data)
            && hole.is_none_or(|hole| (offset..=len).contains(&hole) && is_zero(hole, hole + 1))
            && hole.is_none() == (offset == len);
        assert!(
            is_right,
            "operation {}: {} of {len} bytes from {offset}: data at {data}, a hole at {hole:?}",
            self.op, file.name
        );
        self.saw(file);
        Ok(())
    }

    /// Writes the file again under another name, which then replaces the old one, as programs do to hide
    /// incomplete files.
    async fn save(&self, file: &mut TurnFile) -> Answer<()> {
        let mut new = self.create().await?;
        let place = (file.dir, file.name.clone());
        // Uncertain until it has the old one's name.
        self.work.context.found().uncertain.insert((new.dir, new.name.clone()));
        for _ in 0..=self.rng.below(3) {
            self.write(&mut new).await?;
        }
        if self.rng.below(2) == 0 {
            self.fsync(&mut new).await?;
        }
        if self.rng.below(2) == 0 {
            self.close(&mut new).await?;
        }
        file.moving = true; // if this fails, it is unknown which of the two has its name
        self.rename_to(&mut new, place, RenameMode::Replace).await?;
        self.leave_nameless(std::mem::replace(file, new)).await
    }

    /// Evicts a file or a part of it, once home has it.
    async fn evict(&self, file: &mut TurnFile) -> Answer<()> {
        let Some(home) = &self.work.context.home else { return Ok(()) };
        // Or while this client writes it: then it must evict it itself.
        let keeps = self.rng.below(2) == 0;
        let mine = if keeps { file.handles.remove(&self.me.client) } else { None };
        self.work.close_everywhere(file).await;
        let is_open = mine.is_some();
        file.handles.extend(mine.map(|mine| (self.me.client, mine)));
        if is_open {
            self.fsync(file).await?;
        }
        if self.doubts_self(file) {
            return Ok(());
        }
        let from = self.rng.below(4) * STRIPE_BYTES;
        self.log(file, format_args!("evict from {from}"));
        for _ in 0..HOME_POLLS {
            match self.client.evict(&root_cred(), file.ino, from, u64::MAX).await {
                Ok(evicted) if evicted.ranges.is_empty() => return Ok(()),
                Ok(_) => {
                    home.evicted();
                    return Ok(());
                }
                // Home does not have it yet, or a client that is cut off still has it open.
                Err(e) if may_not_yet(&e) => self.work.context.world.sleep(HOME_PAUSE).await,
                Err(e) => return Err(e).doing("evict"),
            }
        }
        Ok(())
    }
}
