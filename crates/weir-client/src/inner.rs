//! The rooms of one client.
use crate::accesses::Accesses;
use crate::api::{ClientConfig, ClientStatus};
use crate::base::Base;
use crate::closes::Closes;
use crate::data::Data;
use crate::handles::Handles;
use crate::inode::{Inode, LocalState, State};
use crate::inodes::Inodes;
use crate::kernel::Kernel;
use crate::leader::{Holder, Leader};
use crate::lent_names::LentNames;
use crate::local_names::LocalNames;
use crate::locks::Locks;
use crate::losses::Losses;
use crate::memory::Memory;
use crate::quota::Quota;
use crate::status::Counters;
use crate::table::Tables;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::lock::HeldLock;
use weir_proto::map::Layout;
use weir_proto::meta::{HeldLease, LeaseKind};
use weir_proto::quota::HeldSpace;
use weir_proto::{Error, InodeId, Result};

pub struct Inner {
    pub env: Env,
    pub config: Arc<ClientConfig>,
    pub leader: Arc<Leader>,
    pub data: Arc<Data>,
    pub counters: Arc<Counters>,
    pub kernel: Arc<Kernel>,
    pub memory: Arc<Memory>,
    pub inodes: Arc<Inodes>,
    pub accesses: Arc<Accesses>,
    pub handles: Arc<Handles>,
    pub losses: Arc<Losses>,
    pub closes: Arc<Closes>,
    pub quota: Arc<Quota>,
    pub locks: Arc<Locks>,
    pub local_names: Arc<LocalNames>,
    pub lent_names: Arc<LentNames>,
    pub tables: Tables,
    pub sends: Sends,
    me: Weak<Inner>,
}

#[derive(Default)]
pub struct Sends {
    /// Older objects that no other client writes any more, with the token epoch that fenced them.
    pub fenced: Mutex<BTreeMap<InodeId, u32>>,
    pub relieving: AtomicBool,
}

impl Inner {
    pub fn new(base: Base) -> Arc<Inner> {
        let (closes, quota) = (Arc::new(Closes::new(&base)), Arc::new(Quota::new(&base)));
        let locks = Arc::new(Locks::new(&base));
        let local_names = Arc::new(LocalNames::new(&base, closes.clone(), quota.clone()));
        let lent_names = Arc::new(LentNames::new(&base));
        let Base { env, config, counters, leader, data, kernel, memory, inodes, accesses, handles, losses } =
            base;
        Arc::new_cyclic(|me| Inner {
            env,
            config,
            leader,
            data,
            counters,
            kernel,
            memory,
            inodes,
            accesses,
            handles,
            losses,
            closes,
            quota,
            locks,
            local_names,
            lent_names,
            tables: Tables::default(),
            sends: Sends::default(),
            me: me.clone(),
        })
    }

    pub fn arc(&self) -> Arc<Inner> {
        self.me.upgrade().expect("a method runs on a living client")
    }
    pub fn weak(&self) -> Weak<Inner> {
        self.me.clone()
    }
    /// Panics where an invariant of an inode's state, or of a table, does not hold.
    pub fn check(&self) {
        self.inodes.check();
        self.closes.check();
        self.locks.check();
        self.local_names.check();
    }
    pub fn status(&self) -> ClientStatus {
        self.counters.snapshot(self.memory.budget(), self.inodes.count())
    }
}

/// The layout of a regular file.
pub fn layout_of(st: &State, ino: InodeId) -> Result<Layout> {
    let layout = st.attr.as_ref().and_then(|a| a.layout);
    let layout = layout.ok_or_else(|| {
        Error::unavailable(format!("file {ino} has no layout: the cluster had no placement group for it yet"))
    })?;
    layout.check()?;
    Ok(layout)
}

impl Holder for Inner {
    fn begun(&self, connection: u64) -> Vec<HeldLease> {
        self.closes.count_from(connection)
    }
    fn lost(&self, inodes: Vec<InodeId>) {
        for ino in inodes {
            self.local_names
                .lose(ino, "the lease on its directory was lost in a restart of the metadata leader");
            // A file of a batch without an answer is created when the batch is sent again.
            let is_reported = |inode: &Arc<Inode>| inode.lock().local.state() == LocalState::Reporting;
            if let Some(inode) = self.inodes.known(ino).filter(|inode| !is_reported(inode)) {
                self.lose_lease(&inode, "the lease was lost in a restart of the metadata leader");
            }
        }
        self.kernel.drop_all(self.inodes.all());
    }
    fn held_locks(&self) -> Vec<HeldLock> {
        self.locks.held()
    }
    fn lost_locks(&self, lost: Vec<HeldLock>) {
        self.locks.lose(&lost);
    }
    fn taken_up(&self) {
        self.locks.wake_all();
    }
    fn report_names(&self, deadline: Instant) -> Option<BoxFuture<'static, Result<()>>> {
        self.local_names.report_all(deadline)
    }
    fn held_reservations(&self) -> Vec<HeldSpace> {
        self.quota.held()
    }
    fn expired(&self) {
        self.quota.expired();
        self.local_names.lose_all("the session expired");
        self.locks.lose_all();
        let revoke_clock = self.inodes.mark_named();
        for inode in self.inodes.all() {
            {
                let mut st = inode.lock();
                st.lease.mark_named(revoke_clock);
                st.lease.take_append_token();
            }
            self.lose_lease(&inode, "the session expired");
        }
        self.kernel.drop_all(self.inodes.all());
    }
}

impl Inner {
    /// The lease is gone without a revoke: unsaved changes are lost, and recorded by name.
    fn lose_lease(&self, inode: &Inode, why: &str) {
        let mut st = inode.lock();
        st.mark_revoked(self.inodes.tick_revoke_clock(), LeaseKind::None);
        if st.is_unsaved() {
            let e = Error::io(format!("file {}: {why}; changes that were not saved are lost", inode.ino));
            self.losses.log(&e);
            self.losses.note(inode.ino, &e);
            st.fail(e);
        }
        st.write.lose();
        st.accessed = None;
        st.lower_lease(LeaseKind::None);
        self.quota.settle(&mut st);
        self.memory.cache().remove_inode(inode.ino);
        self.inodes.forget_dirty(inode.ino);
        drop(st);
        inode.changed.notify_waiters();
    }
}
