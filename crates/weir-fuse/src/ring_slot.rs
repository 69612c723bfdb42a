//! One slot of a ring: its request, and the answer, which may come from any thread.
//!
//! Invariant: the payload's memory belongs to the request until the request has been handled, and to the
//! answer from then on; an earlier answer is kept separately. A request is answered once.
use crate::ring_header::{answered, write_answer};
use std::fmt;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::real::{Exchange, RingWaker};

/// Shared by the threads that answer and the ring's thread.
pub struct Answers {
    /// Slots whose answers the kernel has not received yet.
    ready: Mutex<Vec<u32>>,
    /// The ring's thread is about to wait, so it has to be woken.
    sleeps: AtomicBool,
    stopped: AtomicBool,
    waker: RingWaker,
}

impl Answers {
    pub fn new(waker: RingWaker) -> Answers {
        Answers {
            ready: Mutex::default(),
            sleeps: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            waker,
        }
    }

    fn ready(&self) -> MutexGuard<'_, Vec<u32>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, place: u32) {
        self.ready().push(place);
        // Not before: the thread checks the list once more after it has set `sleeps`.
        if self.sleeps.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    /// The ring's thread takes the ready slots, and leaves an empty list with the memory of `taken`.
    pub fn take(&self, taken: &mut Vec<u32>) {
        taken.clear();
        mem::swap(&mut *self.ready(), taken);
    }

    /// Whether the ring's thread may wait: from now on the first answer wakes it.
    pub fn fall_asleep(&self) -> bool {
        self.sleeps.store(true, Ordering::SeqCst);
        let may = self.ready().is_empty() && !self.stopped();
        if !may {
            self.wake_up();
        }
        may
    }

    pub fn wake_up(&self) {
        self.sleeps.store(false, Ordering::SeqCst);
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

enum State {
    /// The kernel has the buffers, or the ring's thread.
    Empty,
    /// The ring's thread handles the request, and its payload is in use.
    Handled(u64),
    /// The answer came meanwhile.
    Kept(Vec<u8>),
    Waits(u64, Exchange),
    Answered(Exchange),
}

pub struct Slot {
    place: u32,
    answers: Arc<Answers>,
    state: Mutex<State>,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "place {}", self.place)
    }
}

impl Slot {
    pub fn new(place: u32, answers: Arc<Answers>) -> Slot {
        Slot { place, answers, state: Mutex::new(State::Empty) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request came whose buffers are not needed for its handling.
    pub fn waits(&self, unique: u64, exchange: Exchange) {
        *self.state() = State::Waits(unique, exchange);
    }

    /// A request came, and is being handled.
    pub fn begin(&self, unique: u64) {
        *self.state() = State::Handled(unique);
    }

    /// It has been handled: the buffers are the answer's. Returned if the answer has come already.
    pub fn end(&self, mut exchange: Exchange) -> Option<Exchange> {
        let mut state = self.state();
        match mem::replace(&mut *state, State::Empty) {
            State::Handled(unique) => {
                *state = State::Waits(unique, exchange);
                None
            }
            State::Kept(answer) => {
                let (header, answer) = answer.split_at(OUT_HEADER_BYTES);
                write(&[header, answer], &mut exchange);
                Some(exchange)
            }
            _ => unreachable!("only the ring's thread ends what it has begun"),
        }
    }

    /// The buffers with the answer in them.
    pub fn take_answered(&self) -> Option<Exchange> {
        let mut state = self.state();
        match mem::replace(&mut *state, State::Empty) {
            State::Answered(exchange) => Some(exchange),
            other => {
                *state = other;
                None
            }
        }
    }
}

const OUT_HEADER_BYTES: usize = 16;

fn write(parts: &[&[u8]], exchange: &mut Exchange) {
    let (header, payload) = exchange.both_mut();
    write_answer(parts, header, payload);
}

impl fuser::Answer for Slot {
    fn send(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        let of = answered(parts)?;
        let mut state = self.state();
        match mem::replace(&mut *state, State::Empty) {
            State::Handled(unique) if unique == of => {
                *state = State::Kept(parts.iter().map(|part| &**part).collect::<Vec<_>>().concat());
                return Ok(());
            }
            State::Waits(unique, mut exchange) if unique == of => {
                let parts: Vec<&[u8]> = parts.iter().map(|part| &**part).collect();
                write(&parts, &mut exchange);
                *state = State::Answered(exchange);
            }
            other => {
                *state = other;
                let what = format!("request {of} was answered before, or never came");
                return Err(Error::new(ErrorKind::InvalidInput, what));
            }
        }
        drop(state);
        self.answers.add(self.place);
        Ok(())
    }
}
