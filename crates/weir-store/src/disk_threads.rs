//! Work that waits for a target's disk, on threads where blocking is allowed.
//!
//! Invariant: work whose caller no longer waits when a thread is free is not begun; work that was begun runs
//! to its end. The target reports its disk if work there hangs.
use crate::store::Store;
use std::sync::Arc;
use weir_env::Env;
use weir_proto::Result;
use weir_rpc::Demand;

pub(crate) struct DiskThreads {
    env: Env,
    store: Arc<Store>,
}

impl DiskThreads {
    pub fn new(env: &Env, store: &Arc<Store>) -> Arc<DiskThreads> {
        Arc::new(DiskThreads { env: env.clone(), store: store.clone() })
    }
    /// At most one part of a stripe, nothing that takes long by itself.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let under_way = self.store.begin_disk();
        let to_its_end = move || {
            let done = work();
            under_way.end();
            done
        };
        self.env.tasks.blocking(to_its_end).await
    }
    /// Not if its caller has given up before a thread is free.
    pub async fn run_for<T: Send + 'static>(
        &self,
        demand: Demand,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let clock = self.env.clock.clone();
        self.run(move || demand.check(clock.now()).and_then(|()| work())).await
    }
    /// Work of well under a millisecond: on this thread if it may block.
    pub async fn run_short_for<T: Send + 'static>(
        &self,
        demand: Demand,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if let Some(_here) = self.env.tasks.block_here() {
            demand.check(self.env.clock.now())?;
            let under_way = self.store.begin_disk();
            let done = work();
            under_way.end();
            return done;
        }
        self.run_for(demand, work).await
    }
}
