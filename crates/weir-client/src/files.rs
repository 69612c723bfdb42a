//! Open files: create, open, sync, close.
//!
//! Invariants: a handle reports every write error of its lifetime exactly once; a close commits; the leader's
//! count of opens matches the open files of this client.
use crate::accesses::Accesses;
use crate::base::Base;
use crate::closes::Closes;
use crate::commit::Commits;
use crate::handles::{Handles, OpenFile};
use crate::inode::{Inline, Inode};
use crate::inodes::Inodes;
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use crate::local_names::LocalNames;
use crate::locks::Locks;
use crate::memory::Memory;
use crate::names::{Named, Names};
use crate::plan::Occasion;
use crate::reports::Reports;
use crate::resize::Resize;
use crate::rights::Rights;
use crate::types::{ClientConfig, Handle, NewMode, OpenMode, Opened, Stat};
use crate::write_back::WriteBack;
use crate::writing::Writing;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use weir_env::Env;
use weir_proto::meta::{Create, CreateNameless, Cred, Entry, Open};
use weir_proto::{Error, ErrorKind, InodeId, Result};

const OPEN_READ: u8 = 1;
const OPEN_WRITE: u8 = 2;

/// How long a shutdown waits for the reports of all closes to the leader.
const CLOSES_PATIENCE: Duration = Duration::from_secs(5);
/// Its total wait for servers: an administrator who stops a client does not wait as long as a program does.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(60);

pub struct Files {
    env: Env,
    config: Arc<ClientConfig>,
    leader: Arc<Leader>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    accesses: Arc<Accesses>,
    handles: Arc<Handles>,
    closes: Arc<Closes>,
    local_names: Arc<LocalNames>,
    leases: Arc<Leases>,
    locks: Arc<Locks>,
    commits: Arc<Commits>,
    write_back: Arc<WriteBack>,
    resize: Arc<Resize>,
    names: Arc<Names>,
}

impl Files {
    pub fn new(
        base: &Base,
        reports: &Reports,
        rights: &Rights,
        writing: &Writing,
        locks: Arc<Locks>,
        names: Arc<Names>,
    ) -> Files {
        let Writing { commits, write_back, resize, .. } = writing.clone();
        let Base { env, config, leader, memory, inodes, accesses, handles, .. } = base.clone();
        let Reports { closes, local_names, .. } = reports.clone();
        let Rights { leases, .. } = rights.clone();
        Files {
            env,
            config,
            leader,
            memory,
            inodes,
            accesses,
            handles,
            closes,
            local_names,
            leases,
            locks,
            commits,
            write_back,
            resize,
            names,
        }
    }

    pub async fn create(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: NewMode,
        exclusive: bool,
        open: OpenMode,
    ) -> Result<Opened> {
        if let Some(opened) = self.local_names.try_create(cred, parent, name, mode, open) {
            return Ok(opened);
        }
        let n = Bytes::copy_from_slice(name);
        let bits = if open.read { OPEN_READ } else { 0 } | if open.write { OPEN_WRITE } else { 0 };
        let make = |op| Create {
            op,
            cred: cred.clone(),
            parent,
            name: n.clone(),
            mode: mode.bits,
            umask: mode.umask,
            exclusive,
            open: bits,
        };
        let created = self.names.change_name(parent, name, Change::once(), make).await?;
        let Named { change, reply: created, revoke_clock } = created;
        let stat = self.inodes.apply(&created.entry, revoke_clock);
        let ino = stat.attr.ino;
        let dir = Entry { attr: created.parent_attr, lease: created.parent_lease };
        self.names.end_change(change, Some(ino), &dir, revoke_clock);
        let inode = self.inodes.get(ino);
        if open.write {
            inode.lock().quota.note_lease(&created.entry);
        }
        if created.created {
            // An inode number has no attributes of an earlier file: numbers are never reused.
            let mut st = inode.lock();
            if st.inline == Inline::Unknown {
                st.inline = Inline::No;
            }
            drop(st);
            self.local_names.note_create(parent, cred);
        } else {
            self.learn_inline(&inode, &created.entry, created.inline);
        }
        let opened = self.opened(inode, open, stat);
        if !created.created && open.truncate {
            let opened = opened?;
            self.truncate_opened(cred, &opened).await?;
            return Ok(opened);
        }
        opened
    }

    pub async fn create_nameless(
        &self,
        cred: &Cred,
        parent: InodeId,
        mode: NewMode,
        open: OpenMode,
    ) -> Result<Opened> {
        let bits = if open.read { OPEN_READ } else { 0 } | if open.write { OPEN_WRITE } else { 0 };
        let make = |op| CreateNameless {
            op,
            cred: cred.clone(),
            parent,
            mode: mode.bits,
            umask: mode.umask,
            open: bits,
        };
        loop {
            let revoke_clock = self.inodes.revoke_clock();
            let tries = AtomicU32::new(0);
            let entry = self.leader.change(Change::once().counting(&tries), make).await?;
            let stat = self.inodes.apply(&entry, revoke_clock);
            let inode = self.inodes.get(stat.attr.ino);
            inode.lock().inline = Inline::No;
            let opened = self.opened(inode, open, stat)?;
            // A resume on a new connection did not name the file and thereby closed it before this answer was
            // received.
            if tries.into_inner() > 1
                && let Err(e) = self.leases.refresh(&self.handles.get(opened.handle)?.inode).await
            {
                let _ = self.release(opened.handle).await; // nothing to save
                if e.kind == ErrorKind::Stale {
                    continue;
                }
                return Err(e);
            }
            return Ok(opened);
        }
    }

    async fn truncate_opened(&self, cred: &Cred, opened: &Opened) -> Result<()> {
        let set = crate::types::SetAttrs { size: Some(0), ..Default::default() };
        let file = self.handles.get(opened.handle)?;
        self.resize.set_size(cred, &file.inode, Some(&file), &set, 0).await.map(|_| ())
    }

    pub async fn open(&self, cred: &Cred, ino: InodeId, open: OpenMode) -> Result<Opened> {
        let inode = self.inodes.get(ino);
        let revoke_clock = self.inodes.revoke_clock();
        let _grows = if open.truncate { Some(inode.growing.lock().await) } else { None };
        let _one = match open.truncate {
            true => {
                // Bytes written before the truncation are dropped, but sends in flight must end first, and
                // nothing more is reported until it is done.
                let one = inode.flushing.lock().await;
                self.write_back.flush_locked(&inode, Occasion::Growing, false).await?;
                Some(one)
            }
            false => None,
        };
        let sent_end = inode.lock().write.sent_end();
        let ask = |session| Open {
            session,
            cred: cred.clone(),
            ino,
            read: open.read,
            write: open.write,
            truncate: open.truncate,
            execute: open.execute,
        };
        let answer = self.leader.ask(ask).await?;
        if open.truncate {
            self.resize.truncate_local(&inode, 0, sent_end, true);
        }
        let stat = self.inodes.apply(&answer.entry, revoke_clock);
        if open.write {
            inode.lock().quota.note_lease(&answer.entry);
        }
        self.learn_inline(&inode, &answer.entry, answer.inline);
        self.opened(inode.clone(), open, stat)
    }

    /// Opens a file for reading without a message, under its lease, if the leader still counts it as open.
    /// The caller has checked that it may be read.
    pub fn try_reopen(&self, ino: InodeId, open: OpenMode) -> Option<Opened> {
        let inode = self.inodes.known(ino).filter(|_| open == OpenMode::READ)?;
        let stat = self.closes.reopen(&inode)?;
        Some(self.handles.begin(inode, open, stat))
    }

    /// Inline bytes from a reply, unless newer ones are known.
    fn learn_inline(&self, inode: &Inode, entry: &Entry, inline: Option<Bytes>) {
        let mut st = inode.lock();
        let is_asked = st.lease.is_held() && !st.is_dirty() && st.inline == Inline::Unknown;
        if is_asked && st.is_of_version(entry) {
            st.inline = inline.map_or(Inline::No, Inline::Yes);
        }
    }

    fn opened(&self, inode: Arc<Inode>, open: OpenMode, stat: Stat) -> Result<Opened> {
        {
            let mut st = inode.lock();
            st.opens.begin(open.read, open.write);
        }
        Ok(self.handles.begin(inode, open, stat))
    }

    pub async fn fsync(&self, handle: Handle) -> Result<()> {
        let file = self.handles.get(handle)?;
        self.save(&file, Occasion::Growing).await
    }

    pub async fn fdatasync(&self, handle: Handle) -> Result<()> {
        let file = self.handles.get(handle)?;
        self.save(&file, Occasion::DataOnly).await
    }

    pub async fn flush_handle(&self, handle: Handle) -> Result<()> {
        let file = self.handles.get(handle)?;
        if !file.mode.write {
            return Ok(());
        }
        self.save(&file, Occasion::Closing).await
    }

    /// Saves all changes; every error that the handle has not reported is reported now.
    async fn save(&self, file: &OpenFile, occasion: Occasion) -> Result<()> {
        let flushed = self.write_back.flush(&file.inode, occasion, false).await;
        let settled = self.commits.settle_direct(&file.inode).await;
        let named = match occasion {
            Occasion::Closing => Ok(()),
            _ => self.leader.all_durable(self.leader.deadline()).await,
        };
        // Errors of write-back are recorded and counted by the inode; this one may be among them.
        let news = {
            let st = file.inode.lock();
            if occasion == Occasion::Closing { file.report_closed(&st) } else { file.report_synced(&st) }
        };
        news.and(flushed).and(settled).and(named)
    }

    pub async fn release(&self, handle: Handle) -> Result<()> {
        let file = self.handles.end(handle)?;
        let saved = if file.mode.write { self.save(&file, Occasion::Closing).await } else { Ok(()) };
        // After the bytes: the next holder of the lock sees them.
        if let Err(e) = self.locks.unlock_handle(handle).await
            && let Some(more) = self.env.watch.line("locks of a closed handle")
        {
            tracing::warn!("file {}: locks of a closed handle: {e}{more}", file.inode.ino);
        }
        // No caller waits until the leader has counted the close.
        self.closes.note(&file);
        let ino = file.inode.ino;
        let gone = {
            let st = file.inode.lock();
            st.attr.as_ref().is_some_and(|a| a.nlink == 0) && !st.opens.is_open()
        };
        if gone {
            self.memory.cache().remove_inode(ino);
            self.inodes.forget_dirty(ino);
            self.inodes.remove_unused(&file.inode);
        }
        saved
    }

    /// Flushes every file and closes the session.
    pub async fn shutdown(&self) -> Result<()> {
        if !self.leader.begin_closing() {
            return Ok(());
        }
        let mut first_error = Ok(());
        let deadline = self.env.clock.now() + self.config.patience.min(SHUTDOWN_PATIENCE);
        if let Err(e) = self.local_names.settle(None, deadline).await {
            tracing::error!("shutdown: {e}");
            first_error = Err(e);
        }
        for inode in self.inodes.all() {
            if !inode.lock().is_dirty() {
                continue;
            }
            let saved = self
                .env
                .clock
                .timeout(self.leader.left(deadline), self.write_back.flush(&inode, Occasion::Closing, false));
            let late =
                |_| Err(Error::deadline("its servers do not answer, and this client is shutting down"));
            if let Err(e) = saved.await.unwrap_or_else(late) {
                if let Some(more) = self.env.watch.line("a file was not saved at shutdown") {
                    tracing::error!("shutdown: file {} was not saved: {e}{more}", inode.ino);
                }
                first_error = first_error.and(Err(e));
            }
        }
        // Without this report the file looks like one whose writer died.
        let _ = self.env.clock.timeout(CLOSES_PATIENCE, self.closes.report_all()).await;
        let _ = self.env.clock.timeout(CLOSES_PATIENCE, self.accesses.report()).await; // unreported ones are lost
        if let Err(e) = self.leader.all_durable(self.env.clock.now() + CLOSES_PATIENCE).await {
            tracing::error!("shutdown: {e}");
            first_error = first_error.and(Err(e));
        }
        // Everything is saved, or its error is reported: a session that is not closed expires.
        if let Err(e) = self.leader.close(self.env.clock.now() + CLOSES_PATIENCE).await {
            tracing::info!("the session was not closed: {e}");
        }
        first_error
    }
}
