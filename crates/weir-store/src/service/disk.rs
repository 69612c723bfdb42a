//! Work that waits for a target's disk, on threads where blocking is allowed.
//!
//! Invariant: work whose caller no longer waits when a thread is free is not begun; work that was begun runs
//! to its end.
use super::*;

impl StorageNode {
    /// A request that blocks: admitted, run where blocking is allowed, answered when its commit is durable.
    pub(crate) fn blocking<T: Wire + Send + 'static>(
        &self,
        place: Place,
        work: impl FnOnce(&Store, &Acting) -> Result<(CommitSeq, T, Vec<Bytes>)> + Send + 'static,
    ) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let acting = node.acting(place).await?;
            let store = acting.target.store.clone();
            let (seq, body, payload) =
                node.on_disk(&store, move || work(&acting.target.store, &acting)).await?;
            store.durable_here(seq).await?; // on the disk's thread, which brought the result
            Ok(Reply::with_payload(&body, payload))
        }))
    }
    /// The same for a request that its caller may have given up before a thread is free for it: it is not
    /// begun then.
    pub(super) fn blocking_for<T: Wire + Send + 'static>(
        &self,
        place: Place,
        demand: Demand,
        work: impl FnOnce(&Store, &Acting) -> Result<(CommitSeq, T, Vec<Bytes>)> + Send + 'static,
    ) -> Handled {
        let clock = self.env.clock.clone();
        self.blocking(place, move |store, acting| {
            demand.check(clock.now())?;
            work(store, acting)
        })
    }
    /// `on_disk` in the same way.
    pub(super) async fn on_disk_for<T: Send + 'static>(
        &self,
        store: &Store,
        demand: Demand,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let clock = self.env.clock.clone();
        self.on_disk(store, move || demand.check(clock.now()).and_then(|()| work())).await
    }
    /// Work that waits for the target's disk; the target reports it if it hangs. At most one part of a
    /// stripe, nothing that takes long by itself.
    pub(super) async fn on_disk<T: Send + 'static>(
        &self,
        store: &Store,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let under_way = store.begin_disk();
        let to_its_end = move || {
            let done = work();
            under_way.end();
            done
        };
        self.env.tasks.blocking(to_its_end).await
    }
}
