//! A call of a program: its caller, its reply, and how it is answered: at once, or by a task.
//!
//! Invariants: a call is answered once. One that waits is listed while it waits, and its time is accounted
//! for. Its work is in one place: in its first poll, parked here, or in its task. Knows nothing of what calls
//! ask for.
use crate::callers::{Callers, Fails};
use crate::credentials;
use crate::interrupts::{Interruptible, Interrupts};
use crate::work::{Reader, Work};
use fuser::{Errno, Request};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use tokio::runtime::{EnterGuard, Handle as Runtime};
use weir_client::Client;
use weir_proto::meta::Cred;

/// The calls of programs at one mount.
pub struct Calls {
    runtime: Runtime,
    /// Those that wait for servers.
    callers: Arc<Callers>,
    /// Those that wait for locks and recalls.
    interrupts: Arc<Interrupts>,
    work: Arc<Work>,
}

impl Calls {
    /// To be called in the runtime in which calls wait.
    pub fn new(client: &Client) -> Arc<Calls> {
        let runtime = Runtime::current();
        let work = Work::new(client, runtime.clone());
        Arc::new(Calls { runtime, callers: Arc::default(), interrupts: Arc::default(), work })
    }

    /// A request came.
    pub fn begun(&self, request: &Request) {
        self.work.begun(request);
    }

    pub fn call<'a, R>(self: &'a Arc<Self>, request: &'a Request, reply: R) -> Call<'a, R> {
        Call { calls: self, request, reply }
    }

    /// A signal arrived for the program of this request.
    pub fn interrupt(&self, unique: u64) {
        self.interrupts.interrupt(unique);
        self.callers.interrupt(unique);
    }

    /// Ends all waiting calls with an error now, and all that would wait later. Returns their number.
    pub fn end_all(&self) -> usize {
        self.callers.end_all() + self.interrupts.end_all()
    }
}

/// One call, on the thread that took its request from the kernel.
pub struct Call<'a, R> {
    calls: &'a Arc<Calls>,
    request: &'a Request,
    reply: R,
}

impl<'a, R> Call<'a, R> {
    /// The calling thread; 0 for one that cannot be seen from here.
    pub fn thread(&self) -> u32 {
        self.request.pid()
    }
    pub fn uid(&self) -> u32 {
        self.request.uid()
    }
    pub fn cred(&self) -> Cred {
        let (uid, gid) = (self.request.uid(), self.request.gid());
        // The superuser's groups are never asked for.
        let groups = if uid == 0 { vec![gid] } else { credentials::groups(self.thread(), gid) };
        Cred { uid, gid, groups }
    }

    /// Tasks that begin while the guard lives belong to the runtime of the mount.
    pub fn enter(&self) -> EnterGuard<'a> {
        self.calls.runtime.enter()
    }
    /// For waits that a signal ends.
    pub fn interruptible(&self) -> Interruptible {
        Interruptible::new(self.calls.interrupts.clone(), self.request.unique().0)
    }
    /// Accounts for bytes that were read, where the answer is given later.
    pub fn reader(&self) -> Reader {
        self.calls.work.reader(self.request)
    }
    /// Accounts for bytes that were read.
    pub fn note_read(&self, bytes: usize) {
        self.calls.work.read(self.request, bytes);
    }

    /// For a listing, which takes entries before it is sent.
    pub fn reply_mut(&mut self) -> &mut R {
        &mut self.reply
    }
    /// The reply, for an answer at once.
    pub fn reply(self) -> R {
        self.reply
    }

    /// Answers by a task whose wait neither a kill nor the end of the mount ends.
    pub fn answer<F: Future<Output = ()> + Send + 'static>(self, answer: impl FnOnce(R) -> F) {
        PendingRequest::begin(&self.calls.runtime, answer(self.reply));
    }
}

impl<R: Fails> Call<'_, R> {
    pub fn fail(self, errno: Errno) {
        self.reply.fail(errno);
    }

    /// Answers with the result of the work. The wait ends early if the program is being ended; the work
    /// continues.
    pub fn wait<T: Send + 'static>(
        self,
        work: impl Future<Output = T> + Send + 'static,
        then: impl FnOnce(R, T) + Send + 'static,
    ) {
        self.wait_or_undo(work, then, |_| std::future::ready(()));
    }

    /// Answers like [`Call::wait`]; `undo` releases the result if the program is gone.
    ///
    /// The work is polled here, then continues as a task when it is woken: one for each waiting request.
    pub fn wait_or_undo<T: Send + 'static, U: Future<Output = ()> + Send + 'static>(
        self,
        work: impl Future<Output = T> + Send + 'static,
        then: impl FnOnce(R, T) + Send + 'static,
        undo: impl FnOnce(T) -> U + Send + 'static,
    ) {
        let Call { calls, request, reply } = self;
        let (unique, pid, running) = (request.unique().0, request.pid(), calls.work.waits(request));
        let of = calls.clone();
        PendingRequest::begin(&calls.runtime, async move {
            let mut work = Box::pin(work);
            if let Poll::Ready(brought) = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await
            {
                return then(reply, brought);
            }
            let _running = running;
            let waiting = of.callers.begin(&of.runtime, unique, pid);
            tokio::select! {
                biased;
                brought = &mut work => then(reply, brought),
                errno = waiting.ended() => {
                    reply.fail(errno);
                    of.runtime.spawn(async move { undo(work.await).await });
                }
            }
        });
    }
}

/// Work that ends with an answer.
type Answer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A request that waits. A task that is spawned at once would be woken twice: at its start, only to wait,
/// and by the answer. Here the work becomes a task with the answer, on the very worker that received it: a
/// request costs one thread switch less.
struct PendingRequest {
    runtime: Runtime,
    state: Mutex<State>,
}

enum State {
    /// Being polled for the first time.
    Begun,
    /// Woken within its first poll.
    Woken,
    Waits(Answer),
    /// Ended, or a task that has its own waker.
    Gone,
}

impl PendingRequest {
    /// Polls `work` here; if it has to wait it continues in `runtime` once it is woken.
    fn begin(runtime: &Runtime, work: impl Future<Output = ()> + Send + 'static) {
        let _inside = runtime.enter();
        let mut work: Answer = Box::pin(work);
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
