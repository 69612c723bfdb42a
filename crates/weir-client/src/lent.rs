//! Names lent to the kernel above: which it may keep, and when it must ask for all of them again.
//!
//! Invariants: a name is lent only while its directory's lease lets this client itself answer it from memory; and a directory's lease
//! ends here, under the lock of its state, only after the kernel was told since the last name of it was lent. The kernel is told of
//! all names at once ([`KernelCache::forget_names`]), so one telling serves every lease that ends meanwhile; a directory that
//! others change again and again lends none for a while, or each of their changes would make all other names be asked for again.
use crate::api::KernelCache;
use crate::inner::Inner;
use crate::node::State;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Weak};
use std::time::Duration;
use weir_proto::meta::LeaseKind;
use weir_proto::{InodeId, Result};

/// A directory whose lent names were taken back for others lends none for this long. Long beside what it costs to ask for the
/// names in use again (some 20 µs each, from memory), short beside the time for which people watch two programs meet in a directory.
const REST: Duration = Duration::from_secs(5);
/// Between looks whether the leader is heard again.
const LOOK: Duration = Duration::from_millis(200);

/// When the kernel was told.
#[derive(Default)]
pub struct Lent {
    /// Tellings that were begun.
    begun: AtomicU64,
    /// The last that has ended. Locked while the kernel is told: who comes meanwhile may be served by the next one.
    told: Mutex<u64>,
}

/// When a name was lent: after so many tellings had begun.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LentAt(u64);

impl Lent {
    fn now(&self) -> LentAt {
        LentAt(self.begun.load(Ordering::SeqCst))
    }
    /// Returns when the kernel was told since `at`. It takes no lock of a directory, so this is done with an inode's state locked.
    fn take_back(&self, at: LentAt, kernel: &dyn KernelCache) {
        let mut told = self.told.lock().expect("no holder panics");
        if *told > at.0 {
            return;
        }
        let this = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        kernel.forget_names();
        *told = this;
    }
}

impl Inner {
    /// Whether the kernel may keep that `name` leads there, or nowhere, until it is told otherwise.
    pub fn lend_name(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> bool {
        if let Some(node) = leads_to.and_then(|ino| self.known_node(ino)) {
            node.lock().forgotten = false;
        }
        if !self.kernel.takes_names() || !self.leases_hold() {
            return false;
        }
        let Some(node) = self.known_node(dir) else { return false };
        let mut st = node.lock();
        if st.name(name) != Some(leads_to) || st.lends_from.is_some_and(|at| self.env.clock.now() < at) {
            return false;
        }
        st.lent_at = Some(self.lent.now());
        true
    }

    /// Whether names of this directory were lent since the kernel was last told.
    pub fn lends_now(&self, dir: InodeId) -> bool {
        self.known_node(dir).is_some_and(|node| node.lock().lent_at == Some(self.lent.now()))
    }

    /// The kernel moves a name that it keeps to this directory, whatever is said of it: it must know the directory's lease, or nothing.
    pub fn lend_moved(&self, dir: InodeId) {
        if !self.kernel.keeps_names() {
            return;
        }
        let node = self.node(dir);
        let mut st = node.lock();
        if st.lease == LeaseKind::None || !self.leases_hold() {
            drop(st);
            return self.take_all_back();
        }
        st.lent_at = Some(self.lent.now());
    }

    /// Gives a lease up, down to `keep`; if nothing is left, its names are asked for again first.
    pub fn lower_lease(&self, st: &mut State, keep: LeaseKind) {
        st.lower_lease(keep);
        if st.lease == LeaseKind::None
            && let Some(at) = st.lent_at.take()
        {
            self.lent.take_back(at, &*self.kernel);
            st.lends_from = Some(self.env.clock.now() + REST);
        }
    }

    /// After [`Inner::lower_lease`], before anybody else may change names there: a listing that the kernel was sent is forgotten, too.
    pub async fn take_listing_back(&self, dir: InodeId) {
        if self.kernel.is_listing(dir) {
            let kernel = self.kernel.clone();
            self.env.tasks.blocking(move || kernel.forget_listing(dir)).await;
        }
    }

    /// The kernel asks for every name again: it may believe something that this client does not.
    pub fn take_all_back(&self) {
        if self.kernel.keeps_names() {
            self.lent.take_back(self.lent.now(), &*self.kernel);
        }
    }

    /// What an own change came to is not known, and the kernel may have kept what was before it.
    pub fn doubt_names<T>(&self, done: Result<T>) -> Result<T> {
        use weir_proto::ErrorKind::{Damaged, Deadline, Io, Stale, Unavailable};
        if done.as_ref().is_err_and(|e| matches!(e.kind, Damaged | Deadline | Io | Stale | Unavailable)) {
            self.take_all_back();
        }
        done
    }
}

/// Names count while the leader is heard: after that the kernel asks, and waits for the answer.
pub async fn end_with_the_term(inner: Weak<Inner>) {
    while let Some((clock, until)) =
        inner.upgrade().map(|i| (i.env.clock.clone(), i.session.leases_hold_until()))
    {
        if clock.now() < until {
            clock.sleep(until.since(clock.now())).await;
            continue;
        }
        match inner.upgrade() {
            Some(inner) => inner.take_all_back(),
            None => return,
        }
        while inner.upgrade().is_some_and(|i| !i.leases_hold()) {
            clock.sleep(LOOK).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Forget;

    #[derive(Default)]
    struct Kernel(AtomicU64);
    impl KernelCache for Kernel {
        fn invalidate_inode(&self, _: InodeId, _: Forget) {}
        fn keeps_names(&self) -> bool {
            true
        }
        fn forget_names(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn one_telling_serves_all_that_was_lent_before_it_began_and_nothing_later() {
        let (lent, kernel) = (Lent::default(), Kernel::default());
        let told = || kernel.0.load(Ordering::SeqCst);
        let (a, b) = (lent.now(), lent.now());
        lent.take_back(a, &kernel);
        lent.take_back(b, &kernel);
        assert_eq!(told(), 1);
        let c = lent.now();
        lent.take_back(c, &kernel);
        assert_eq!(told(), 2, "lent after the first telling");
        lent.take_back(b, &kernel);
        assert_eq!(told(), 2);
    }
}
