//! A pool of threads for work that blocks.
//!
//! Not the runtime's pool, because a durable 4 KiB write waits for both thread switches: a handover through
//! one lock and one condition variable is faster. Work runs to its end; its panic ends neither thread nor
//! pool.
//!
//! What waits for a job may continue on the thread that did it, right after the job ([`next_here`]): neither
//! of the two threads is woken for that.

use super::processors::stay_nowhere;
use std::{
    cell::RefCell,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

pub(super) type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Work for this thread after its present job. `None`: a thread of others, which must not block.
    static NEXT: RefCell<Option<VecDeque<Job>>> = const { RefCell::new(None) };
}

/// Whether this is a thread for the disks of this node, which may block.
pub(super) fn may_block() -> bool {
    NEXT.with_borrow(Option::is_some)
}

/// Runs `job` on this thread after its present one. On a thread that must not block it is returned.
pub(super) fn next_here(job: Job) -> Option<Job> {
    NEXT.with_borrow_mut(|next| match next {
        Some(next) => {
            next.push_back(job);
            None
        }
        None => Some(job),
    })
}

/// Threads that stop after their current work when the pool is dropped and nothing is queued.
pub(super) struct ThreadPool(Arc<Shared>);

struct Shared {
    threads_max: usize,
    /// What waits for a job continues on its thread.
    continues: bool,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    /// Every job here has a waiter that was admitted elsewhere, which bounds the queue.
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl ThreadPool {
    /// Threads for this node's own disks.
    pub(super) fn for_disks(threads_max: usize) -> ThreadPool {
        ThreadPool::with(threads_max, true)
    }

    /// Threads for something that may hang by itself: nothing else is done on them.
    pub(super) fn new(threads_max: usize) -> ThreadPool {
        ThreadPool::with(threads_max, false)
    }

    fn with(threads_max: usize, continues: bool) -> ThreadPool {
        let threads_max = threads_max.max(1);
        ThreadPool(Arc::new(Shared { threads_max, continues, state: Mutex::default(), work: Condvar::new() }))
    }

    /// Runs `job` on a thread.
    pub(super) fn run(&self, job: Job) {
        let mut state = self.0.lock();
        state.queue.push_back(job);
        if state.idle >= state.queue.len() {
            drop(state);
            self.0.work.notify_one();
        } else if state.threads < self.0.threads_max {
            state.threads += 1;
            drop(state);
            self.start_thread();
        }
    }

    fn start_thread(&self) {
        let shared = self.0.clone();
        let started = std::thread::Builder::new().name("weir-disk".into()).spawn(move || {
            stay_nowhere();
            if shared.continues {
                NEXT.set(Some(VecDeque::new()));
            }
            shared.work_until_closed();
        });
        if started.is_err() {
            // No further thread can be started: the running ones take the queue; if there are none, this
            // thread does.
            let mut state = self.0.lock();
            state.threads -= 1;
            let job = if state.threads == 0 { state.queue.pop_front() } else { None };
            drop(state);
            if let Some(job) = job {
                run_guarded(job);
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.work.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work_until_closed(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                run_guarded(job);
                while let Some(job) = NEXT.with_borrow_mut(|next| next.as_mut()?.pop_front()) {
                    run_guarded(job);
                }
                state = self.lock();
            } else if state.closed {
                state.threads -= 1;
                return;
            } else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

/// The waiter detects a panic by the missing result.
fn run_guarded(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(job));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn runs_everything_with_few_threads_and_survives_a_panic() {
        let pool = ThreadPool::new(2);
        let (tx, rx) = mpsc::channel();
        pool.run(Box::new(|| panic!("expected by the test")));
        for n in 0..100 {
            let tx = tx.clone();
            pool.run(Box::new(move || tx.send(n).unwrap()));
        }
        drop((tx, pool));
        let mut seen: Vec<i32> = rx.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_job_may_continue_on_its_thread() {
        let (tx, rx) = mpsc::channel();
        let report = move |tx: &mpsc::Sender<_>| tx.send((std::thread::current().id(), may_block())).unwrap();
        let (first, second) = (tx.clone(), tx);
        let continuing = move || {
            report(&first);
            let left = next_here(Box::new(move || report(&second)));
            assert!(left.is_none());
        };
        let pool = ThreadPool::for_disks(1);
        pool.run(Box::new(continuing));
        let (job, continued) = (rx.recv().unwrap(), rx.recv().unwrap());
        assert_eq!(job, continued);
        assert!(job.1 && !may_block());
        let (tx, rx) = mpsc::channel();
        ThreadPool::new(1).run(Box::new(move || tx.send(next_here(Box::new(|| ())).is_some()).unwrap()));
        assert_eq!(rx.recv(), Ok(true), "a thread that may hang is for its own work");
        assert!(next_here(Box::new(|| ())).is_some(), "a thread outside of the pools continues nothing");
    }

    #[test]
    fn jobs_run_at_the_same_time() {
        let pool = ThreadPool::new(4);
        let meet = Arc::new(std::sync::Barrier::new(4));
        let (tx, rx) = mpsc::channel();
        for _ in 0..4 {
            let (meet, tx) = (meet.clone(), tx.clone());
            pool.run(Box::new(move || {
                meet.wait();
                tx.send(()).unwrap();
            }));
        }
        drop(tx);
        assert_eq!(rx.iter().count(), 4);
    }
}
