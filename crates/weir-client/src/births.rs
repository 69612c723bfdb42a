//! Files that this client creates locally, under an exclusive lease on their directory, and the reports of
//! them to the leader. Removals are in [`crate::removals`].
//!
//! Invariants: no request to the leader overtakes earlier reports; nothing goes to targets for a file that
//! the leader does not know of; a lost file is an error of its handles. A lease on a directory is returned
//! after all of its files are reported.
use crate::api::{NewMode, OpenMode, Opened, SetAttrs, Stat};
use crate::flush::inline_content;
use crate::inner::Inner;
use crate::inode::{Birth, Inline, Inode, Limits, MODE_BITS, NO_LIMIT, SET_GID, State};
use crate::leader::Change;
use crate::table::births::{Granted, Unreported, What};
use crate::wall_time;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{BoxFuture, Instant};
use weir_proto::births::{
    BIRTH_BYTES_MAX, Birth as Message, CreateMany, CreatedMany, LeaseNames, NamesLeased,
};
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Cred, Entry, FileKind, Lease, LeaseKind, NAME_MAX, Time};
use weir_proto::{Error, ErrorKind, InodeId, Result, VolumeId};

/// The delay of a report: a program that writes small files has closed them by then.
const DELAY: Duration = Duration::from_millis(2);
/// Unreported changes of a directory: beyond that, each is a message.
pub const UNSENT_MAX: usize = 4096;
/// Bytes of a birth without its name and content.
const BIRTH_BYTES: usize = 96;

/// Creates.
impl Inner {
    /// Creates a file locally; `None`: ask the leader.
    pub fn try_birth(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: NewMode,
        open: OpenMode,
    ) -> Option<Opened> {
        let may = self.config.local_creates_after.is_some() && open.write && self.leader.leases_hold();
        if !may || name.len() > NAME_MAX || !self.may_open_unasked(cred.uid) {
            return None;
        }
        let dir = self.inodes.known(parent)?;
        let (attr, limits) = {
            let st = dir.lock();
            let attr = self.may_bear(&st, cred, name)?;
            let mut log = self.tables.births.lock();
            if log.unsent(parent) >= UNSENT_MAX {
                return None;
            }
            let owner = owner_of_new(cred, &attr);
            let (ino, layout, limits) = log.take_number(parent, owner)?;
            let bits = mode.bits & !mode.umask & MODE_BITS;
            (newborn(ino, bits, owner, layout, wall_time(&self.env)), limits)
        };
        let inode = self.inodes.get(attr.ino);
        self.become_newborn(&inode, &attr, limits, open);
        let name = Bytes::copy_from_slice(name);
        let begins = {
            let mut st = dir.lock();
            if self.may_bear(&st, cred, &name).is_none() || !self.tables.births.lock().is_open(parent) {
                drop(st);
                inode.lock().lower_lease(LeaseKind::None);
                self.inodes.remove_unused(&inode);
                return None;
            }
            st.names.born(&name, attr.ino);
            if let Some(dir_attr) = &mut st.attr {
                dir_attr.size += 1;
                let latest = |t: Time| Time { nanos: t.nanos.max(attr.btime.nanos) };
                (dir_attr.mtime, dir_attr.ctime) = (attr.btime, latest(dir_attr.ctime));
            }
            st.pages.note_not_lent();
            self.tables.births.lock().push(parent, What::Created, inode.clone(), name, cred)
        };
        self.report_names_soon(parent, begins);
        Some(self.handles.begin(inode, open, Stat { attr, leased: true }))
    }

    /// The directory's attributes, if a file of this name may be created there locally.
    fn may_bear(&self, st: &State, cred: &Cred, name: &[u8]) -> Option<Attr> {
        let is_ours = st.lease.is_write() && !st.attr_old;
        let attr = st.attr.as_ref().filter(|attr| is_ours && !attr.acl)?;
        (st.name(name) == Some(None) && permits(cred, attr)).then(|| attr.clone())
    }

    /// Changes attributes of a file that the leader does not know of yet; `None`: ask the leader.
    pub fn try_set_unborn(&self, cred: &Cred, inode: &Inode, set: &SetAttrs) -> Option<Stat> {
        let mut st = inode.lock();
        let is_set = self.leader.leases_hold() && st.set_unborn(cred, set, wall_time(&self.env));
        is_set.then(|| st.lend_stat()).flatten()
    }

    fn become_newborn(&self, inode: &Arc<Inode>, attr: &Attr, limits: Limits, open: OpenMode) {
        let lease = Lease { kind: LeaseKind::Write, token_epoch: 1, ..no_lease() };
        let mut st = inode.lock();
        st.apply(&Entry { attr: attr.clone(), lease }, self.inodes.revoke_clock());
        st.inline = Inline::No;
        st.quota.note_birth(limits);
        st.opens.begin(open.read, open.write);
        st.pages.note_lent();
        st.birth = Birth::Unsent;
    }

    /// After a create by a message: asks for the lease on the names when it is worth it.
    pub fn note_create(&self, parent: InodeId, cred: &Cred) {
        let Some(after) = self.config.local_creates_after else { return };
        let Some(dir) = self.inodes.known(parent) else { return };
        let owner = {
            let st = dir.lock();
            let Some(attr) = &st.attr else { return };
            if !st.lease.is_held() || !st.names.are_complete() {
                return;
            }
            owner_of_new(cred, attr)
        };
        let wanted = self.tables.births.lock().note_create(parent, after, self.env.clock.now());
        let Some(numbers) = wanted else { return };
        let me = self.arc();
        self.env.tasks.spawn("lease names", async move { me.lease_names(&dir, numbers, owner).await });
    }

    async fn lease_names(&self, dir: &Arc<Inode>, numbers: u32, (uid, gid): (u32, u32)) {
        let (revoke_clock, now) = (self.inodes.revoke_clock(), wall_time(&self.env));
        let ask = |session| LeaseNames { session, dir: dir.ino, numbers, now, uid, gid };
        let leased = self.leader.ask(ask).await;
        if let Ok(leased) = &leased {
            self.inodes.apply(&leased.entry, revoke_clock);
        }
        self.take_names(dir, leased.as_ref().ok(), revoke_clock);
        if let Err(e) = leased {
            tracing::debug!("names of directory {}: {e}", dir.ino);
        }
    }

    /// Files may be created in the directory locally, if the leader gave numbers and the lease is still held.
    pub fn take_names(&self, dir: &Inode, leased: Option<&NamesLeased>, revoke_clock: u64) {
        let given = leased.filter(|leased| leased.numbers > 0).and_then(|leased| {
            let limits = Limits { account: leased.account, of_bytes: leased.limits_bytes };
            let NamesLeased { first, numbers, layout, .. } = *leased;
            Some(Granted { first, numbers, layout: layout?, limits })
        });
        let st = dir.lock();
        let holds = st.lease.is_write() && !st.lease.is_revoked_since(revoke_clock);
        self.tables.births.lock().asked(dir.ino, given.filter(|_| holds), self.env.clock.now());
    }
}

/// Reports.
impl Inner {
    /// A file was created or removed in the directory; `begins`: no task reports these.
    pub fn report_names_soon(&self, dir: InodeId, begins: bool) {
        if begins {
            let me = self.arc();
            self.env.tasks.spawn("report names", async move { me.report_names(dir).await });
        } else if self.tables.births.lock().is_urgent(dir) {
            self.tables.births.hurry.notify_waiters();
        }
    }

    async fn report_names(&self, dir: InodeId) {
        let births = &self.tables.births;
        loop {
            let hurried = births.hurry.notified();
            if !births.lock().is_urgent(dir) {
                let _ = self.env.clock.timeout(DELAY, hurried).await; // continues either way
            }
            let batch = births.lock().next_batch(dir);
            let Some(first) = batch.first() else { return };
            let cred = first.cred.clone();
            let reported = match first.what {
                What::Created => {
                    let (batch, messages) = self.make_messages(dir, batch);
                    self.report_batch(dir, &cred, &batch, messages).await;
                    batch
                }
                What::Removed(_) => {
                    self.report_removals(dir, &cred, &batch).await;
                    batch
                }
            };
            births.lock().end_batch(dir);
            for unreported in &reported {
                unreported.inode.changed.notify_waiters();
            }
            births.settled.notify_waiters();
        }
    }

    /// The reports of these files; those that do not fit into one message wait.
    fn make_messages(&self, dir: InodeId, mut batch: Vec<Unreported>) -> (Vec<Unreported>, Vec<Message>) {
        let (mut messages, mut bytes) = (Vec::with_capacity(batch.len()), 0);
        for unborn in &batch {
            let mut st = unborn.inode.lock();
            let content = st.write.local().map_or(0, |local| local.size as usize);
            let content = if st.goes_with_birth() { content } else { 0 };
            bytes += unborn.name.len() + content + BIRTH_BYTES;
            if bytes > BIRTH_BYTES_MAX && !messages.is_empty() {
                break;
            }
            let report = st.begin_report(|st, size| inline_content(st, &Bytes::new(), size));
            messages.push(st.birth_message(unborn.inode.ino, &unborn.name, report));
        }
        let rest = batch.split_off(messages.len());
        self.tables.births.lock().put_back(dir, rest);
        (batch, messages)
    }

    async fn report_batch(&self, dir: InodeId, cred: &Cred, batch: &[Unreported], births: Vec<Message>) {
        let revoke_clock = self.inodes.revoke_clock();
        let make = |op| {
            let mut births = births.clone();
            for (unborn, message) in batch.iter().zip(&mut births) {
                unborn.inode.lock().report_again(Some(message));
            }
            CreateMany { op, cred: cred.clone(), dir, births }
        };
        // All of a batch count under the same limits.
        let limited = batch.iter().map(|unborn| unborn.inode.lock().quota.limited());
        let limited = limited.max().unwrap_or(NO_LIMIT);
        let _committing = self.quota.committing(limited).await;
        match self.leader.change(Change::once(), make).await {
            Ok(created) => self.born(batch, &created, revoke_clock),
            Err(e) => {
                if let Some(more) = self.env.watch.line("files could not be created") {
                    tracing::error!(
                        "{} files of directory {dir} could not be created: {e}{more}",
                        batch.len()
                    );
                }
                self.doubt_all_names(dir);
                batch.iter().for_each(|unborn| self.lose_birth(dir, unborn, &e));
            }
        }
    }

    /// A report failed: what this client believes of the directory may be wrong.
    pub fn doubt_all_names(&self, dir: InodeId) {
        if let Some(inode) = self.inodes.known(dir) {
            self.tables.births.lock().close(dir);
            inode.lock().names.forget_all();
        }
    }

    fn born(&self, batch: &[Unreported], created: &CreatedMany, revoke_clock: u64) {
        self.closes.note_several(|closes| {
            for unborn in batch {
                let mut st = unborn.inode.lock();
                let Some((report, attr)) = st.end_birth(self.inodes.tick_revoke_clock()) else { continue };
                let content = report.content.as_ref().map(|(content, _)| content.len() as u64);
                let added = content.map_or(0, |content| st.quota.note_charged(content));
                self.inodes.apply_to(&mut st, &Entry { attr, lease: no_lease() }, revoke_clock);
                let reads = report.open_read.saturating_sub(st.opens.for_reading());
                let writes = report.open_write.saturating_sub(st.opens.for_writing());
                if reads + writes > 0 {
                    closes.add(unborn.inode.ino, reads, writes);
                }
                self.quota.end_commit(&mut st, None, added); // that of the batch ends after its last file
                self.inodes.forget_if_saved(unborn.inode.ino, &st);
            }
        });
        self.inodes.apply_attr(&created.parent_attr, revoke_clock);
    }

    fn lose_birth(&self, dir: InodeId, unborn: &Unreported, why: &Error) {
        let ino = unborn.inode.ino;
        let name = String::from_utf8_lossy(&unborn.name).into_owned();
        let what = format!("file {ino} ({name:?}) was not made durable");
        let e = why.clone().of_kind(ErrorKind::Io).doing(what);
        self.losses.note(ino, &e);
        self.tables.births.lock().note_lost(dir, e.clone());
        let mut st = unborn.inode.lock();
        st.birth = Birth::Lost(e.clone());
        st.write.lose();
        st.fail(e);
        st.lower_lease(LeaseKind::None);
        self.quota.settle(&mut st);
        self.inodes.forget_dirty(ino);
        drop(st);
        unborn.inode.changed.notify_waiters();
    }

    /// The lease on the directory was lost, or the session: unsent reports never will be sent.
    pub fn lose_births(&self, dir: InodeId, why: &str) {
        let lost = self.tables.births.lock().drop_unsent(dir);
        let e = Error::io(why);
        for unreported in &lost {
            match unreported.what {
                What::Created => self.lose_birth(dir, unreported, &e),
                What::Removed(_) => self.lose_removal(dir, unreported, &e),
            }
        }
        self.tables.births.settled.notify_waiters();
    }
    pub fn lose_all_births(&self, why: &str) {
        let dirs = self.tables.births.lock().all_dirs();
        dirs.into_iter().for_each(|dir| self.lose_births(dir, why));
    }
}

/// Waiting.
impl Inner {
    /// Returns when the leader knows of all files that were created before, in one directory or in all.
    pub async fn settle_births(&self, of: Option<InodeId>, deadline: Instant) -> Result<()> {
        let births = &self.tables.births;
        let Some(newest) = births.lock().newest(of) else { return Ok(()) };
        loop {
            let settled = births.settled.notified();
            births.hurry.notify_waiters();
            if births.lock().oldest(of).is_none_or(|oldest| oldest > newest) {
                return Ok(());
            }
            if self.env.clock.timeout(self.data.left(deadline), settled).await.is_err() {
                return Err(Error::deadline("the metadata leader did not take new files in time"));
            }
        }
    }
    /// Reports all; `None`: the leader knows of all.
    pub fn report_names_before(&self, deadline: Instant) -> Option<BoxFuture<'static, Result<()>>> {
        self.tables.births.lock().oldest(None)?;
        let me = self.arc();
        Some(Box::pin(async move { me.settle_births(None, deadline).await }))
    }

    /// Returns when the leader knows of the file.
    pub async fn await_birth(&self, inode: &Inode) -> Result<()> {
        let deadline = self.leader.deadline();
        loop {
            let changed = inode.changed.notified();
            match &inode.lock().birth {
                Birth::Born => return Ok(()),
                Birth::Lost(e) => return Err(e.clone()),
                Birth::Unsent | Birth::Sent(_) | Birth::Removed => {}
            }
            self.tables.births.lock().newest(None);
            self.tables.births.hurry.notify_waiters();
            if self.env.clock.timeout(self.data.left(deadline), changed).await.is_err() {
                return Err(Error::deadline(format!(
                    "file {}: the leader does not know of it yet",
                    inode.ino
                )));
            }
        }
    }

    /// Makes all files that were created in the directory before durable.
    pub async fn sync_names(&self, dir: InodeId) -> Result<()> {
        self.settle_births(Some(dir), self.leader.deadline()).await?;
        self.tables.births.lock().take_lost(dir).map_or(Ok(()), Err)
    }

    /// The lease on a directory's names is about to be returned.
    pub async fn return_names(&self, dir: InodeId) {
        let pending = self.tables.births.lock().close(dir);
        while pending && self.settle_births(Some(dir), self.leader.deadline()).await.is_err() {}
    }
}

/// Owner and group of a new file in a directory.
fn owner_of_new(cred: &Cred, dir: &Attr) -> (u32, u32) {
    (cred.uid, if dir.mode & SET_GID != 0 { dir.gid } else { cred.gid })
}

fn newborn(ino: InodeId, mode: u32, (uid, gid): (u32, u32), layout: Layout, at: Time) -> Attr {
    Attr {
        ino,
        kind: FileKind::Regular,
        mode,
        uid,
        gid,
        nlink: 1,
        rdev: 0,
        size: 0,
        allocated: 0,
        atime: at,
        mtime: at,
        ctime: at,
        btime: at,
        data_version: 0,
        layout: Some(layout),
        acl: false,
        evicted: 0,
        layers: None,
    }
}

fn no_lease() -> Lease {
    let (kind, limited) = (LeaseKind::None, VolumeId(0));
    Lease { kind, token_epoch: 1, recover: false, data_end: 0, limited, map_version: 0 }
}

/// Whether a user may change names in a directory without an access control list.
pub fn permits(cred: &Cred, dir: &Attr) -> bool {
    let class = if cred.uid == dir.uid {
        6
    } else if cred.is_member(dir.gid) {
        3
    } else {
        0
    };
    cred.uid == 0 || (dir.mode >> class) & 0o3 == 0o3
}
