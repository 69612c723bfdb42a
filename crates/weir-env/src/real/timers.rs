//! Timers of one runtime, by one sleep of it.
//!
//! The runtime's own timers wake the thread that waits for its sockets whenever an earlier one is set. Almost
//! every call sets some, and drops them when its answer arrives. Here one task sleeps until the earliest
//! timer; if that is dropped the task checks once in vain, at that time, instead of once for each timer.
//!
//! Invariant: `wakes_at` is never later than the earliest timer, except while its task is being woken.
use crate::Instant;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Notify;

/// Later than any timer.
const NEVER: Instant = Instant(u64::MAX);

pub(super) struct Timers {
    now: fn() -> Instant,
    state: Mutex<State>,
    /// An earlier timer than all others was set, or no caller is left that could set one.
    earlier: Arc<Notify>,
}

struct State {
    set: BTreeMap<(Instant, u64), Waker>,
    last_number: u64,
    /// When the task wakes next.
    wakes_at: Instant,
    /// The runtime has ended.
    ended: bool,
}

impl Timers {
    pub(super) fn new(home: &Handle, now: fn() -> Instant) -> Arc<Timers> {
        let state = State { set: BTreeMap::new(), last_number: 0, wakes_at: NEVER, ended: false };
        let timers = Arc::new(Timers { now, state: Mutex::new(state), earlier: Arc::default() });
        home.spawn(run(Task(Arc::downgrade(&timers)), timers.earlier.clone()));
        timers
    }

    pub(super) fn sleep_until(self: &Arc<Self>, at: Instant) -> Sleep {
        Sleep { timers: self.clone(), at, number: None }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The timers that have run out, and how long the task may sleep.
    fn take_due(&self) -> (Vec<Waker>, Option<Duration>) {
        let now = (self.now)();
        let mut state = self.lock();
        let later = state.set.split_off(&(now + Duration::from_nanos(1), 0));
        let due = std::mem::replace(&mut state.set, later);
        let next = state.set.first_key_value().map(|((at, _), _)| *at);
        state.wakes_at = next.unwrap_or(NEVER);
        (due.into_values().collect(), next.map(|next| next.since(now)))
    }
}

impl Drop for Timers {
    fn drop(&mut self) {
        self.earlier.notify_one();
    }
}

/// Held by the task alone: its end is the end of the runtime.
struct Task(Weak<Timers>);

impl Drop for Task {
    fn drop(&mut self) {
        let Some(timers) = self.0.upgrade() else { return };
        let left = {
            let mut state = timers.lock();
            state.ended = true;
            std::mem::take(&mut state.set)
        };
        left.into_values().for_each(Waker::wake); // the tasks that they wake end with the runtime, too
    }
}

async fn run(task: Task, earlier: Arc<Notify>) {
    loop {
        let (due, pause) = match task.0.upgrade() {
            Some(timers) => timers.take_due(),
            None => return,
        };
        due.into_iter().for_each(Waker::wake);
        match pause {
            None => earlier.notified().await,
            Some(pause) => tokio::select! {
                biased;
                () = earlier.notified() => {}
                () = tokio::time::sleep(pause) => {}
            },
        }
    }
}

pub(super) struct Sleep {
    timers: Arc<Timers>,
    at: Instant,
    /// Once it is set.
    number: Option<u64>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if (self.timers.now)() >= self.at {
            return Poll::Ready(());
        }
        let timers = self.timers.clone();
        let mut state = timers.lock();
        if state.ended {
            return Poll::Pending; // its task is dropped with the runtime
        }
        let number = match self.number {
            Some(number) => number,
            None => {
                state.last_number += 1;
                state.last_number
            }
        };
        self.number = Some(number);
        match state.set.get_mut(&(self.at, number)) {
            Some(waker) => waker.clone_from(cx.waker()),
            None => drop(state.set.insert((self.at, number), cx.waker().clone())),
        }
        if self.at < state.wakes_at {
            state.wakes_at = self.at;
            drop(state);
            timers.earlier.notify_one();
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let waker = self.timers.lock().set.remove(&(self.at, number));
        drop(waker); // outside of the lock: it may be the last one of its task
    }
}

#[cfg(test)]
mod tests {
    use crate::real::env;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn timers_end_in_their_order_and_never_early() {
        let clock = env().clock;
        let (begun, order) = (clock.now(), Arc::new(Mutex::new(Vec::new())));
        let each = |ms: u64| {
            let (clock, order) = (clock.clone(), order.clone());
            tokio::spawn(async move {
                let at = begun + Duration::from_millis(ms);
                clock.sleep_until(at).await;
                assert!(clock.now() >= at);
                order.lock().unwrap().push(ms);
            })
        };
        // The later one is set first: the task must wake for the earlier one.
        let tasks: Vec<_> = [400, 200, 1].into_iter().map(each).collect();
        for task in tasks {
            tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [1, 200, 400]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_dropped_timer_wakes_no_task() {
        let clock = env().clock;
        let ended = Arc::new(AtomicUsize::new(0));
        for _ in 0..200 {
            let (clock, ended) = (clock.clone(), ended.clone());
            let waits = async move {
                clock.sleep(Duration::from_millis(50)).await;
                ended.fetch_add(1, SeqCst);
            };
            assert!(tokio::time::timeout(Duration::from_micros(1), waits).await.is_err());
        }
        clock.sleep(Duration::from_millis(120)).await;
        assert_eq!(ended.load(SeqCst), 0);
    }

    #[tokio::test]
    async fn a_timer_set_and_polled_again_ends_once() {
        let clock = env().clock;
        let mut polls = 0;
        let mut sleep = Box::pin(clock.sleep(Duration::from_millis(20)));
        std::future::poll_fn(|cx| {
            polls += 1;
            if polls < 4 {
                cx.waker().wake_by_ref();
            }
            sleep.as_mut().poll(cx)
        })
        .await;
        assert!((4..8).contains(&polls), "{polls}");
    }
}
