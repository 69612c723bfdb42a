//! A pool of threads for work that blocks.
//!
//! Not the runtime's pool, because a durable 4 KiB write waits for both thread switches: a handover through
//! one lock and one condition variable is faster. Work runs to its end; its panic ends neither thread nor
//! pool.

use super::processors::stay_nowhere;
use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that stop after their current work when the pool is dropped and nothing is queued.
pub(super) struct ThreadPool(Arc<Shared>);

struct Shared {
    threads_max: usize,
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
    pub(super) fn new(threads_max: usize) -> ThreadPool {
        let threads_max = threads_max.max(1);
        ThreadPool(Arc::new(Shared { threads_max, state: Mutex::default(), work: Condvar::new() }))
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
