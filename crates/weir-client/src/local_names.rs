//! Names that this client changes by itself, under an exclusive lease on their directory: local creates,
//! removals and renames. The leader knows of them a moment later.
//!
//! Invariants: no request that is about files or directories overtakes the reports of earlier changes;
//! nothing goes to targets for a file that the leader does not know of; a lost create is an error of the
//! file's handles, and of the next sync of its directory. A lease on a directory is returned after all of
//! its changes are reported, and one on a removed file after its removal is: so another client that asks
//! for it, by name or by number, is answered after that.
//!
//! Lock order: a directory's state, the state of a file in it, the queue.
mod create;
mod queue;
mod remove;
mod report;

use crate::base::Base;
use crate::closes::Closes;
use crate::data::Data;
use crate::handles::Handles;
use crate::inode::{Inode, LocalState, State};
use crate::inodes::Inodes;
use crate::leader::Leader;
use crate::losses::Losses;
use crate::memory::Memory;
use crate::quota::Quota;
use queue::{Change, Queue, Unreported};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::meta::{Attr, Cred, LeaseKind, Time};
use weir_proto::posix::{Owned, SEARCH, WRITE};
use weir_proto::{Error, ErrorKind, InodeId, Result};

/// Unreported changes of a directory: beyond that, each is a message.
const UNSENT_MAX: usize = 4096;

pub struct LocalNames {
    env: Env,
    /// Creates in a directory within a second, after which more are local; `None`: never.
    after: Option<u32>,
    leader: Arc<Leader>,
    data: Arc<Data>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    handles: Arc<Handles>,
    losses: Arc<Losses>,
    closes: Arc<Closes>,
    quota: Arc<Quota>,
    queue: Mutex<Queue>,
    /// A batch ended.
    settled: Notify,
    /// A caller waits for one, or one is full.
    hurry: Notify,
}

impl LocalNames {
    pub fn new(base: &Base, closes: Arc<Closes>, quota: Arc<Quota>) -> LocalNames {
        let Base { env, config, leader, data, memory, inodes, handles, losses, .. } = base.clone();
        LocalNames {
            env,
            after: config.local_creates_after,
            leader,
            data,
            memory,
            inodes,
            handles,
            losses,
            closes,
            quota,
            queue: Mutex::default(),
            settled: Notify::new(),
            hurry: Notify::new(),
        }
    }
    /// Locked after an inode's state.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no holder panics")
    }
    /// Panics where an invariant of the queue does not hold.
    pub fn check(&self) {
        self.queue().check();
    }

    /// Whether this client may decide for a user: not if the rules for mounts may refuse it, or record it.
    pub fn may_decide_for(&self, uid: u32) -> bool {
        let map = self.data.cluster.map();
        (uid != 0 || !self.leader.opens_asked()) && map.access.is_empty() && map.audits.is_empty()
    }
    /// Whether this client changes names by itself for a user at all.
    fn is_on(&self, cred: &Cred) -> bool {
        self.after.is_some() && self.leader.leases_hold() && self.may_decide_for(cred.uid)
    }
}

/// The directory's attributes, if a user may change names there without the leader.
fn may_change<'a>(dir: &'a State, cred: &Cred) -> Option<&'a Attr> {
    let is_ours = dir.lease.is_write() && !dir.attr_old;
    let may = |attr: &Attr| !attr.acl && Owned::of(attr).permits(cred, None, WRITE | SEARCH);
    dir.attr.as_ref().filter(|attr| is_ours && may(attr))
}

/// A name in the directory has changed: its size by `more` entries, and its times.
fn note_changed(dir: &mut State, more: i64, now: Time) {
    if let Some(attr) = &mut dir.attr {
        attr.size = attr.size.saturating_add_signed(more);
        (attr.mtime, attr.ctime) = (now, Time { nanos: now.nanos.max(attr.ctime.nanos) });
    }
    dir.pages.note_not_lent();
}

/// Waits.
impl LocalNames {
    /// Reports all changes; `None`: the leader knows of all.
    pub fn report_all(self: &Arc<Self>, deadline: Instant) -> Option<BoxFuture<'static, Result<()>>> {
        self.queue().oldest(None)?;
        let me = self.clone();
        Some(Box::pin(async move { me.settle(None, deadline).await }))
    }

    /// Returns when the leader knows of all changes that were made before, in one directory or in all.
    pub async fn settle(&self, of: Option<InodeId>, deadline: Instant) -> Result<()> {
        let Some(newest) = self.queue().newest(of) else { return Ok(()) };
        loop {
            let settled = self.settled.notified();
            self.hurry.notify_waiters();
            if self.queue().oldest(of).is_none_or(|oldest| oldest > newest) {
                return Ok(());
            }
            if self.env.clock.timeout(self.leader.left(deadline), settled).await.is_err() {
                return Err(Error::deadline("the metadata leader did not take new files in time"));
            }
        }
    }

    /// Returns when the leader knows of the file.
    pub async fn await_known(&self, inode: &Inode) -> Result<()> {
        let deadline = self.leader.deadline();
        loop {
            let changed = inode.changed.notified();
            {
                let st = inode.lock();
                if let Some(e) = st.local.lost() {
                    return Err(e.clone());
                }
                if st.local.state() == LocalState::Known {
                    return Ok(());
                }
            }
            self.queue().newest(None);
            self.hurry.notify_waiters();
            if self.env.clock.timeout(self.leader.left(deadline), changed).await.is_err() {
                let what = format!("file {}: the leader does not know of it yet", inode.ino);
                return Err(Error::deadline(what));
            }
        }
    }

    /// The next sync of the directory fails: a change in it was lost.
    pub fn note_lost(&self, dir: InodeId, e: &Error) {
        self.queue().note_lost(dir, e.clone());
    }

    /// Makes all changes that were made in the directory before durable.
    pub async fn sync(&self, dir: InodeId) -> Result<()> {
        let deadline = self.leader.deadline();
        self.settle(Some(dir), deadline).await?;
        self.leader.all_durable(deadline).await?;
        self.queue().take_lost(dir).map_or(Ok(()), Err)
    }

    /// The lease on a directory's names is about to be returned.
    pub async fn give_back(&self, dir: InodeId) {
        let pending = self.queue().close(dir);
        while pending && self.settle(Some(dir), self.leader.deadline()).await.is_err() {}
    }
    /// The directory is gone.
    pub fn close(&self, dir: InodeId) {
        self.queue().close(dir);
    }
}

/// Losses.
impl LocalNames {
    /// The lease on the directory was lost, or the session: unsent reports never will be sent.
    pub fn lose(&self, dir: InodeId, why: &str) {
        self.check();
        let lost = self.queue().drop_unsent(dir);
        let e = Error::io(why);
        lost.iter().for_each(|unreported| self.lose_one(dir, unreported, &e));
        self.settled.notify_waiters();
    }
    pub fn lose_all(&self, why: &str) {
        let dirs = self.queue().all_dirs();
        dirs.into_iter().for_each(|dir| self.lose(dir, why));
    }

    fn lose_one(&self, dir: InodeId, unreported: &Unreported, why: &Error) {
        let ino = unreported.inode.ino;
        let name = String::from_utf8_lossy(&unreported.name).into_owned();
        let what = match unreported.change {
            Change::Created => format!("file {ino} ({name:?}) was not made durable"),
            Change::Removed(_) => format!("the removal of file {ino} ({name:?}) was not made durable"),
        };
        let e = why.clone().of_kind(ErrorKind::Io).doing(what);
        self.losses.note(ino, &e);
        self.queue().note_lost(dir, e.clone());
        {
            let mut st = unreported.inode.lock();
            match unreported.change {
                Change::Created => {
                    st.local.lose(e.clone());
                    st.write.lose();
                    st.fail(e);
                    st.lower_lease(LeaseKind::None);
                    self.quota.settle(&mut st);
                    self.inodes.forget_dirty(ino);
                }
                // The file may still exist.
                Change::Removed(_) => st.end_removal(),
            }
        }
        unreported.inode.changed.notify_waiters();
    }

    /// A report failed: what this client believes of the directory may be wrong.
    fn doubt(&self, dir: InodeId) {
        if let Some(inode) = self.inodes.known(dir) {
            self.queue().close(dir);
            inode.lock().names.forget_all();
        }
    }
}
