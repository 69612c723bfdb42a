//! Tasks of one node. Killing the node's scope ends every task that was started in it.
use crate::{BoxFuture, Clock, Env};
use std::sync::Arc;

/// Starts a node's work; implemented by the machine and by the simulator.
pub trait TaskRunner: Send + Sync + 'static {
    fn spawn(&self, name: &'static str, work: BoxFuture<'static, ()>) -> TaskHandle;
    /// See [`Tasks::begin`].
    fn begin(&self, name: &'static str, work: BoxFuture<'static, ()>) {
        self.spawn(name, work);
    }
    /// See [`Tasks::spawn_for_disk`].
    fn spawn_for_disk(&self, name: &'static str, work: BoxFuture<'static, ()>) {
        self.spawn(name, work);
    }
    /// Runs `work` where it may block: on a thread pool, or in place in the simulator (after simulated disk
    /// time).
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()>;
    /// Separate threads for blocking work: see [`Tasks::lane`].
    fn lane(&self, threads_max: usize) -> Lane;
    /// See [`Env::alone`]; `of`: the environment that it is made of.
    fn alone(&self, name: &'static str, of: &Env) -> Alone;
    /// See [`Tasks::may_block`].
    fn may_block(&self) -> bool {
        false
    }
    /// See [`Tasks::after`].
    fn after(&self, work: Box<dyn FnOnce() + Send>) {
        drop(self.blocking(work)); // it has begun
    }
    /// Whether a task may block for a moment now: another thread then runs the other tasks meanwhile. If so,
    /// `end_block` follows.
    fn begin_block(&self) -> bool;
    fn end_block(&self);
    /// Ends the node here if a test requested it: see [`Tasks::crash_point`].
    fn crash_point(&self, point: &'static str);
}

/// Starts blocking work on the threads of one lane; implemented by the machine and by the simulator.
pub trait LaneRunner: Send + Sync + 'static {
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'static, ()>;
}

/// A bounded number of threads for one resource that may hang (a foreign file system): when all of them hang,
/// only this lane's work waits. Cheap to clone; idle threads end with the last clone, one that hangs ends
/// when it continues.
#[derive(Clone)]
pub struct Lane(pub Arc<dyn LaneRunner>);

impl Lane {
    /// Starts `work`; the future resolves when it has ended, or merely when it was handed over: `work` itself
    /// must report its result. It starts as soon as a thread is free, in order, with or without a waiting
    /// caller.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) -> BoxFuture<'static, ()> {
        self.0.blocking(Box::new(work))
    }
}

/// Tasks and timers on one thread of their own.
pub struct Alone {
    pub clock: Clock,
    pub tasks: Tasks,
}

/// Aborts its task on [`TaskHandle::abort`], not on drop.
pub struct TaskHandle(pub tokio::task::AbortHandle);

impl TaskHandle {
    pub fn abort(&self) {
        self.0.abort();
    }
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

/// Permission to block in place, while it exists.
pub struct BlocksHere(Tasks);

impl Drop for BlocksHere {
    fn drop(&mut self) {
        self.0.0.end_block();
    }
}

#[derive(Clone)]
pub struct Tasks(pub Arc<dyn TaskRunner>);

impl Tasks {
    /// Starts a task without a waiting caller. `name` appears in traces.
    pub fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) -> TaskHandle {
        self.0.spawn(name, Box::pin(work))
    }
    /// Like `spawn`, for work that waits for disks: it continues on the disk's thread that wakes it, where it
    /// may block. A machine wakes two threads less for each such wait.
    pub fn spawn_for_disk(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn_for_disk(name, Box::pin(work));
    }
    /// Like `spawn_for_disk`, but a machine begins the work on this thread, before the call returns: the
    /// caller holds no lock that it may want.
    pub fn begin(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.0.begin(name, Box::pin(work));
    }
    /// Whether this thread has nothing else to do than wait for disks.
    pub fn may_block(&self) -> bool {
        self.0.may_block()
    }
    /// Runs `work` where blocking is allowed, without a caller that waits for it.
    pub fn start_blocking(&self, work: impl FnOnce() + Send + 'static) {
        drop(self.0.blocking(Box::new(work))); // it has begun
    }
    /// Runs `work` where blocking is allowed: on this thread, after what it does now, if it may block.
    pub fn after(&self, work: impl FnOnce() + Send + 'static) {
        self.0.after(Box::new(work));
    }
    /// Whether work that blocks for well under a millisecond may run in place, which is faster than a switch
    /// to another thread and back. At least one thread never does, so a disk that hangs does not stop the
    /// process.
    pub fn block_here(&self) -> Option<BlocksHere> {
        self.0.begin_block().then(|| BlocksHere(self.clone()))
    }
    /// A named point of the code: everything before it has been done, nothing after it. A test can make the
    /// process (or the simulated node) die here, to show that it survives that. Otherwise it has no effect.
    pub fn crash_point(&self, point: &'static str) {
        self.0.crash_point(point);
    }
    /// A lane of at most `threads_max` threads, started when needed.
    pub fn lane(&self, threads_max: usize) -> Lane {
        self.0.lane(threads_max)
    }
    /// Runs `work` where blocking is allowed and waits for its result. Not cancelled when the wait is
    /// dropped.
    pub async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (tx, rx) = tokio::sync::oneshot::channel();
        let run = self.0.blocking(Box::new(move || {
            let _ = tx.send(work()); // the caller may have given up: the work has run to its end
        }));
        run.await;
        rx.await.expect("blocking work ran to its end")
    }
}
