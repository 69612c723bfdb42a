//! The cache above this client, which is valid only under its leases: requests to drop parts of it, at once
//! or soon.
//!
//! Invariant: it is called only on threads that may block, and never with an inode's state locked: it may
//! itself wait for a read or write here.
use crate::drops::Drops;
use crate::inode::{Inode, State};
use crate::types::{Forget, KernelCache};
use std::sync::Arc;
use weir_env::Env;
use weir_proto::InodeId;

pub struct Kernel {
    env: Env,
    cache: Arc<dyn KernelCache>,
    attributes: Drops<()>,
    /// Each with a value whose life ends when the pages are dropped.
    pages: Drops<UnprotectedPages>,
}

/// Pages in the kernel that no lease protects, of a read or write in flight or just answered.
pub struct UnprotectedPages(Arc<Inode>);

impl UnprotectedPages {
    /// `st`: of that inode; not to be locked where this is dropped.
    pub fn of(inode: &Arc<Inode>, st: &mut State) -> UnprotectedPages {
        st.pages.begin_unprotected();
        UnprotectedPages(inode.clone())
    }
}
impl Drop for UnprotectedPages {
    fn drop(&mut self) {
        self.0.lock().pages.end_unprotected();
        self.0.changed.notify_waiters();
    }
}

impl Kernel {
    pub fn new(env: Env, cache: Arc<dyn KernelCache>) -> Kernel {
        Kernel { env, cache, attributes: Drops::default(), pages: Drops::default() }
    }

    /// Whether names may be lent to it.
    pub fn keeps_names(&self) -> bool {
        self.cache.keeps_names()
    }

    /// Returns when it has dropped that.
    pub async fn invalidate(&self, ino: InodeId, what: Forget) {
        let cache = self.cache.clone();
        self.env.tasks.blocking(move || cache.invalidate_inode(ino, what)).await;
    }

    /// It drops the attributes that it has, soon.
    pub fn drop_attributes(self: &Arc<Self>, ino: InodeId) {
        let (Some(()), _) = self.attributes.add(ino, ()) else { return };
        let me = self.clone();
        self.env.tasks.spawn("attributes are others now", async move {
            let mut next = Some(());
            while next.is_some() {
                me.invalidate(ino, Forget::Attributes).await;
                next = me.attributes.next(ino);
            }
        });
    }

    /// It drops the file's pages, soon: a thread that waits for a read or write has some of them locked.
    pub fn drop_pages(self: &Arc<Self>, unprotected: UnprotectedPages) {
        let ino = unprotected.0.ino;
        let (begins, surplus) = self.pages.add(ino, unprotected);
        drop(surplus); // another one waits for the same drop
        let Some(mut unprotected) = begins else { return };
        let me = self.clone();
        self.env.tasks.spawn("drop unprotected pages", async move {
            loop {
                me.invalidate(ino, Forget::All).await;
                drop(unprotected);
                let Some(next) = me.pages.next(ino) else { return };
                unprotected = next;
            }
        });
    }

    /// All leases are gone.
    pub fn drop_all(self: &Arc<Self>, inodes: Vec<Arc<Inode>>) {
        let me = self.clone();
        self.env.tasks.spawn("invalidate kernel caches", async move {
            let cache = me.cache.clone();
            let work = move || inodes.iter().for_each(|n| cache.invalidate_inode(n.ino, Forget::All));
            me.env.tasks.blocking(work).await;
        });
    }
}
