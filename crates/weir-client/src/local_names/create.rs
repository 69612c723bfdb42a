//! Local creates: with inode numbers that the leader has lent for their directory.
use super::queue::{Change, NumberLoan, Owner};
use super::{LocalNames, UNSENT_MAX, may_change, note_changed};
use crate::inode::{Inline, Inode, Limits};
use crate::types::{NewMode, OpenMode, Opened, SetAttrs, Stat};
use crate::wall_time;
use bytes::Bytes;
use std::sync::Arc;
use weir_proto::local_creates::{LeaseNames, NamesLeased};
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Cred, Entry, FileKind, Lease, LeaseKind, NAME_MAX, Time};
use weir_proto::posix::Inherited;
use weir_proto::version::LEVEL_OF_NEW_NAMES;
use weir_proto::{InodeId, VolumeId};

impl LocalNames {
    /// Creates a file locally; `None`: ask the leader.
    pub fn try_create(
        self: &Arc<Self>,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: NewMode,
        open: OpenMode,
    ) -> Option<Opened> {
        if !open.write || name.len() > NAME_MAX || !self.is_on(cred) {
            return None;
        }
        let dir = self.inodes.known(parent)?;
        let now = wall_time(&self.env);
        let (attr, limits) = {
            let st = dir.lock();
            let dir_attr = may_change(&st, cred).filter(|_| st.name(name) == Some(None))?;
            let mut queue = self.queue();
            if queue.unsent(parent) >= UNSENT_MAX {
                return None;
            }
            let owner = Owner::of_new(cred, dir_attr);
            let (ino, layout, limits) = queue.take_number(parent, owner)?;
            let mode = Inherited::new(None, mode.bits, mode.umask, false).mode;
            (new_attr(ino, mode, owner, layout, now), limits)
        };
        let inode = self.inodes.get(attr.ino);
        self.begin_file(&inode, &attr, limits, open);
        let name = Bytes::copy_from_slice(name);
        let begins = {
            let mut st = dir.lock();
            let may = may_change(&st, cred).is_some() && st.name(&name) == Some(None);
            if !may || !self.queue().is_open(parent) {
                drop(st);
                self.end_unnamed(&inode);
                return None;
            }
            st.names.note_created(&name, attr.ino);
            note_changed(&mut st, 1, now);
            self.queue().push(parent, Change::Created, inode.clone(), name, cred)
        };
        self.report_soon(parent, begins);
        Some(self.handles.begin(inode, open, Stat { attr, leased: true }))
    }

    fn begin_file(&self, inode: &Arc<Inode>, attr: &Attr, limits: Limits, open: OpenMode) {
        let lease = Lease { kind: LeaseKind::Write, ..no_lease() };
        let mut st = inode.lock();
        st.apply(&Entry { attr: attr.clone(), lease }, self.inodes.revoke_clock());
        st.inline = Inline::No;
        st.quota.note_local_create(limits);
        st.opens.begin(open.read, open.write);
        st.pages.note_lent();
        st.local.create();
    }

    /// The directory changed before the file got its name: the leader never learns of it.
    fn end_unnamed(&self, inode: &Arc<Inode>) {
        {
            let mut st = inode.lock();
            st.local.cancel();
            st.lower_lease(LeaseKind::None);
        }
        self.inodes.remove_unused(inode);
    }

    /// Changes attributes of a file that is not reported yet; `None`: ask the leader.
    pub fn try_set(&self, cred: &Cred, inode: &Inode, set: &SetAttrs) -> Option<Stat> {
        let mut st = inode.lock();
        let is_set = self.leader.leases_hold() && st.set_before_report(cred, set, wall_time(&self.env));
        is_set.then(|| st.lend_stat()).flatten()
    }
}

/// Numbers.
impl LocalNames {
    /// After a create by a message: asks for the lease on the names, and numbers, when it is worth it.
    pub fn note_create(self: &Arc<Self>, parent: InodeId, cred: &Cred) {
        let Some(after) = self.after else { return };
        let Some(dir) = self.inodes.known(parent) else { return };
        let owner = {
            let st = dir.lock();
            let Some(attr) = &st.attr else { return };
            if !st.lease.is_held() || !st.names.are_complete() {
                return;
            }
            Owner::of_new(cred, attr)
        };
        let wanted = self.queue().note_create(parent, after, self.env.clock.now());
        let Some(numbers) = wanted else { return };
        let me = self.clone();
        self.env.tasks.spawn("lease names", async move { me.lease_names(&dir, numbers, owner).await });
    }

    pub(super) async fn lease_names(&self, dir: &Arc<Inode>, numbers: u32, owner: Owner) {
        let (revoke_clock, now) = (self.inodes.revoke_clock(), wall_time(&self.env));
        let Owner { uid, gid } = owner;
        let ask = |session| LeaseNames { session, dir: dir.ino, numbers, now, uid, gid };
        let leased = self.leader.ask(ask).await;
        if let Ok(leased) = &leased {
            self.inodes.apply(&leased.entry, revoke_clock);
        }
        self.take_loan(dir, leased.as_ref().ok(), revoke_clock);
        if let Err(e) = leased {
            tracing::debug!("names of directory {}: {e}", dir.ino);
        }
    }

    /// Files may be created in the directory locally, if the leader lent numbers and the lease is still held.
    pub fn take_loan(&self, dir: &Inode, leased: Option<&NamesLeased>, revoke_clock: u64) {
        let lent = leased.filter(|leased| leased.numbers > 0).and_then(|leased| {
            let limits = Limits { account: leased.account, of_bytes: leased.limits_bytes };
            let NamesLeased { first, numbers, layout, .. } = *leased;
            Some(NumberLoan { first, numbers, layout: layout?, limits })
        });
        let st = dir.lock();
        let holds = st.lease.is_write() && !st.lease.is_revoked_since(revoke_clock);
        self.queue().asked(dir.ino, lent.filter(|_| holds), self.env.clock.now());
    }

    /// Called at each `mkdir`: whether this client makes so much that it soon makes files there, too.
    pub fn builds_a_tree(&self, cred: &Cred) -> bool {
        let Some(after) = self.after else { return false };
        let is_known = self.data.cluster.map().level >= LEVEL_OF_NEW_NAMES;
        is_known && self.is_on(cred) && self.queue().note_mkdir(after, self.env.clock.now())
    }
}

pub(super) fn new_attr(ino: InodeId, mode: u32, owner: Owner, layout: Layout, at: Time) -> Attr {
    Attr {
        ino,
        kind: FileKind::Regular,
        mode,
        uid: owner.uid,
        gid: owner.gid,
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

/// A lease that grants nothing, of a file under its first token epoch.
pub(super) fn no_lease() -> Lease {
    let (kind, limited) = (LeaseKind::None, VolumeId(0));
    Lease { kind, token_epoch: 1, recover: false, data_end: 0, limited, map_version: 0 }
}
