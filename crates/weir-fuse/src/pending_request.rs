//! A request that waits: begun on the kernel's thread, ended by the thread that wakes it.
//!
//! A task that is spawned at once would be woken twice: at its start, only to wait, and by the answer. This
//! one becomes a task with the answer, on the very worker that received it, so a request costs one thread
//! switch less.
//!
//! Invariant: the work is in one place: in its first poll, parked here, or in its task. Knows nothing of
//! FUSE.
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};
use tokio::runtime::Handle as Runtime;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

pub struct PendingRequest {
    runtime: Runtime,
    state: Mutex<State>,
}

enum State {
    /// Being polled for the first time.
    Begun,
    /// Woken within its first poll.
    Woken,
    Waits(Work),
    /// Ended, or a task that has its own waker.
    Gone,
}

impl PendingRequest {
    /// Polls `work` here; if it has to wait it continues in `runtime` once it is woken.
    pub fn begin(runtime: &Runtime, work: impl Future<Output = ()> + Send + 'static) {
        let _inside = runtime.enter();
        let mut work: Work = Box::pin(work);
        let pending_request =
            Arc::new(PendingRequest { runtime: runtime.clone(), state: Mutex::new(State::Begun) });
        let waker = Waker::from(pending_request.clone());
        if work.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            *pending_request.lock() = State::Gone;
            return;
        }
        let mut state = pending_request.lock();
        match *state {
            State::Begun => *state = State::Waits(work),
            _ => {
                *state = State::Gone;
                drop(state);
                runtime.spawn(work);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for PendingRequest {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Begun | State::Woken => *state = State::Woken,
            State::Waits(work) => {
                drop(state);
                // Polled again there, it registers that task's waker instead of this one.
                self.runtime.spawn(work);
            }
            State::Gone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    }

    #[test]
    fn work_without_a_wait_ends_on_its_own_thread() {
        let runtime = runtime();
        let (tx, rx) = std::sync::mpsc::channel();
        PendingRequest::begin(runtime.handle(), async move { tx.send(std::thread::current().id()).unwrap() });
        assert_eq!(rx.try_recv(), Ok(std::thread::current().id()));
    }

    #[test]
    fn work_continues_after_any_number_of_wakes() {
        let runtime = runtime();
        for n in 0..200_u64 {
            let (first, waits) = oneshot::channel();
            let (second, waits_again) = oneshot::channel();
            let (tx, rx) = std::sync::mpsc::channel();
            // In some rounds the wake comes from another thread during the first poll.
            let waker = std::thread::spawn(move || {
                if n % 2 == 0 {
                    std::thread::yield_now();
                }
                first.send(n).unwrap();
                second.send(1).unwrap();
            });
            PendingRequest::begin(runtime.handle(), async move {
                let sum = waits.await.unwrap() + waits_again.await.unwrap();
                tokio::time::sleep(Duration::from_micros(n % 3)).await;
                tx.send(sum).unwrap();
            });
            assert_eq!(rx.recv_timeout(Duration::from_secs(30)), Ok(n + 1));
            waker.join().unwrap();
        }
    }
}
