//! Work that continues where it is woken: on a thread for disks if that woke it, otherwise as a task.
//!
//! A disk's thread that wakes a task wakes two threads of the runtime: one that runs it, and one that looks
//! for more. But it has nothing else to do itself, and may even block, so it continues the work.
//!
//! Invariants: one thread at a time polls the work; a wake during a poll is followed by another poll; a panic
//! ends the work and nothing else.
use super::threads;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};
use tokio::runtime::Handle;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) struct Roaming {
    home: Handle,
    state: Mutex<State>,
}

enum State {
    Waits(Work),
    /// A thread is about to poll it.
    Due(Work),
    Polled,
    PolledAndWoken,
    Ended,
}

impl Roaming {
    /// Polls `work` on this thread first.
    pub(super) fn begin(home: Handle, work: Work) {
        Roaming::new(home, work).poll();
    }

    /// Polls `work` in the runtime first.
    pub(super) fn spawn(home: Handle, work: Work) {
        Roaming::new(home, work).spawn_poll();
    }

    fn new(home: Handle, work: Work) -> Arc<Roaming> {
        Arc::new(Roaming { home, state: Mutex::new(State::Due(work)) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn_poll(self: Arc<Self>) {
        self.home.clone().spawn(async move { self.poll() });
    }

    fn poll(self: Arc<Self>) {
        let due = std::mem::replace(&mut *self.lock(), State::Polled);
        let State::Due(mut work) = due else { unreachable!("polled once for each time that it is due") };
        let _inside = self.home.enter();
        let waker = Waker::from(self.clone());
        let poll = || work.as_mut().poll(&mut Context::from_waker(&waker));
        // Dropped after the state is known: that may run any code.
        let polled = catch_unwind(AssertUnwindSafe(poll));
        let mut state = self.lock();
        if !matches!(polled, Ok(std::task::Poll::Pending)) {
            *state = State::Ended;
            return drop(state);
        }
        if matches!(*state, State::PolledAndWoken) {
            *state = State::Due(work);
            drop(state);
            return self.continue_here();
        }
        *state = State::Waits(work);
    }

    fn continue_here(self: Arc<Self>) {
        let me = self.clone();
        if threads::next_here(Box::new(move || me.poll())).is_some() {
            self.spawn_poll();
        }
    }
}

impl Wake for Roaming {
    fn wake(self: Arc<Self>) {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Ended) {
            State::Waits(work) => {
                *state = State::Due(work);
                drop(state);
                self.continue_here();
            }
            State::Polled | State::PolledAndWoken => *state = State::PolledAndWoken,
            was @ (State::Due(_) | State::Ended) => *state = was,
        }
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.clone().wake();
    }
}

#[cfg(test)]
mod tests {
    use crate::real::env;
    use std::sync::mpsc;
    use std::thread::ThreadId;
    use std::time::Duration;
    use tokio::sync::oneshot;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn here() -> ThreadId {
        std::thread::current().id()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn work_continues_on_the_thread_of_the_disk() {
        let tasks = env().tasks;
        let (tx, rx) = mpsc::channel();
        let (go, gone) = mpsc::channel();
        let disk = tasks.clone();
        tasks.begin("test", async move {
            tx.send(here()).unwrap();
            let job = move || {
                gone.recv_timeout(PATIENCE).unwrap(); // not before the work waits for it
                here()
            };
            let job = disk.blocking(job).await;
            tx.send(job).unwrap();
            assert!(disk.may_block());
            tx.send(here()).unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(!disk.may_block(), "what is woken elsewhere is a task");
            tx.send(job).unwrap();
        });
        go.send(()).unwrap();
        let seen: Vec<_> = (0..4).map(|_| rx.recv_timeout(PATIENCE).unwrap()).collect();
        assert_eq!(seen[0], here(), "it begins at once");
        assert!(seen[1] == seen[2] && seen[1] != here());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_is_lost_and_none_is_doubled() {
        let tasks = env().tasks;
        for n in 0..500_u64 {
            let (tx, rx) = oneshot::channel();
            let (first, waits) = oneshot::channel();
            let disk = tasks.clone();
            tasks.spawn_for_disk("test", async move {
                let (a, b) = tokio::join!(disk.blocking(move || n), waits);
                tx.send(a + b.unwrap()).unwrap();
            });
            tasks.spawn("waker", async move { first.send(1).unwrap() });
            assert_eq!(tokio::time::timeout(PATIENCE, rx).await, Ok(Ok(n + 1)));
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_panic_ends_the_work_alone() {
        let tasks = env().tasks;
        let (tx, rx) = oneshot::channel::<()>();
        tasks.begin("test", async move {
            let _tx = tx;
            panic!("expected by the test");
        });
        assert!(rx.await.is_err(), "what it held is dropped");
        let (tx, rx) = oneshot::channel::<()>();
        let disk = tasks.clone();
        tasks.begin("test", async move {
            let _tx = tx;
            disk.blocking(|| ()).await;
            panic!("expected by the test");
        });
        assert!(rx.await.is_err());
        assert_eq!(tasks.blocking(|| 7).await, 7);
    }

    #[test]
    fn work_that_waits_ends_with_its_runtime() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let env = runtime.block_on(async { env() });
        let (tx, rx) = mpsc::channel::<()>();
        let clock = env.clock.clone();
        runtime.block_on(async {
            env.tasks.begin("test", async move {
                let _tx = tx;
                clock.sleep(10 * PATIENCE).await;
            });
        });
        drop(runtime);
        assert_eq!(rx.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
