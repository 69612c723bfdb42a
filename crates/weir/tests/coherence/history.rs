//! Histories of concurrent operations on one object, and whether they are linearizable: whether each
//! operation can have happened at one moment between its call and its return, so that all results are those
//! of a sequential object.
//!
//! The search is that of Wing and Gong with Lowe's memory of tried states (G. Lowe, "Testing for
//! linearizability", 2017). Each process calls one operation at a time, so the progress of a search is one
//! number per process and the object's state. Every operation must be known to have returned.
use std::collections::{HashSet, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

/// One operation, with its result, as its caller saw it.
#[derive(Clone, Copy, Debug)]
pub struct Event<Op> {
    /// Nanoseconds of one clock for all processes.
    pub called_ns: u64,
    pub returned_ns: u64,
    pub op: Op,
}

/// The behaviour of a sequential object.
pub trait Object {
    type State: Clone + Eq + Hash + Debug;
    type Op: Copy + Debug;
    fn initial() -> Self::State;
    /// The state after the operation; `None`: it cannot have this result here.
    fn step(state: &Self::State, op: Self::Op) -> Option<Self::State>;
}

/// A point of the search: operations done of each process, in the order they were called, and what they led
/// to.
type Point<S> = (Vec<u32>, S);

/// `Err` has the progress of the best order and the next operations then. One list per process, in the order
/// of its calls.
pub fn linearizable<O: Object>(processes: &[Vec<Event<O::Op>>]) -> Result<(), String> {
    for process in processes {
        assert!(process.iter().all(|e| e.called_ns <= e.returned_ns), "a return before its call");
        assert!(process.windows(2).all(|w| w[0].returned_ns <= w[1].called_ns), "one operation at a time");
    }
    let start = (vec![0; processes.len()], O::initial());
    let mut seen: HashSet<Point<O::State>> = HashSet::from([start.clone()]);
    let mut left = VecDeque::from([start.clone()]);
    let mut best = start;
    let done = |point: &Point<O::State>| point.0.iter().map(|n| u64::from(*n)).sum::<u64>();
    while let Some(point) = left.pop_back() {
        if done(&point) > done(&best) {
            best = point.clone();
        }
        if next(processes, &point.0).is_empty() {
            return Ok(());
        }
        for (process, event) in next(processes, &point.0) {
            let Some(state) = O::step(&point.1, event.op) else { continue };
            let mut counts = point.0.clone();
            counts[process] += 1;
            let point = (counts, state);
            if seen.insert(point.clone()) {
                left.push_back(point);
            }
        }
    }
    Err(format!(
        "no order explains the results: after {} operations that led to {:?}, none of these fits: {:#?}",
        done(&best),
        best.1,
        next(processes, &best.0)
    ))
}

/// The operations that may be the next: called before any that is left has returned.
fn next<Op: Copy>(processes: &[Vec<Event<Op>>], counts: &[u32]) -> Vec<(usize, Event<Op>)> {
    let heads = || {
        let head =
            |(n, process): (usize, &Vec<Event<Op>>)| process.get(counts[n] as usize).map(|event| (n, *event));
        processes.iter().enumerate().filter_map(head)
    };
    let first_return = heads().map(|(_, e)| e.returned_ns).min().unwrap_or(0);
    heads().filter(|(_, e)| e.called_ns <= first_return).collect()
}

/// A place that is written and read.
pub struct Register;

#[derive(Clone, Copy, Debug)]
pub enum RegisterOp {
    Write(u64),
    Read(u64),
}

impl Object for Register {
    type State = u64;
    type Op = RegisterOp;
    fn initial() -> u64 {
        0
    }
    fn step(state: &u64, op: RegisterOp) -> Option<u64> {
        match op {
            RegisterOp::Write(value) => Some(value),
            RegisterOp::Read(value) => (*state == value).then_some(value),
        }
    }
}

/// A list that is appended to and read from start to end.
pub struct Log;

#[derive(Clone, Copy, Debug)]
pub enum LogOp {
    Append(u64),
    /// How many there were, and [`digest`] of them.
    Read(u64, u64),
}

pub fn digest(so_far: u64, record: u64) -> u64 {
    (so_far ^ record).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31)
}

impl Object for Log {
    type State = (u64, u64);
    type Op = LogOp;
    fn initial() -> (u64, u64) {
        (0, 0)
    }
    fn step(state: &(u64, u64), op: LogOp) -> Option<(u64, u64)> {
        match op {
            LogOp::Append(record) => Some((state.0 + 1, digest(state.1, record))),
            LogOp::Read(count, found) => (*state == (count, found)).then_some(*state),
        }
    }
}

/// A name that one of many makes.
pub struct Name;

#[derive(Clone, Copy, Debug)]
pub enum NameOp {
    /// Whether it was made: it did not exist.
    Create(bool),
    /// Whether it was removed: it existed.
    Remove(bool),
    Stat(bool),
}

impl Object for Name {
    type State = bool;
    type Op = NameOp;
    fn initial() -> bool {
        false
    }
    fn step(there: &bool, op: NameOp) -> Option<bool> {
        match op {
            NameOp::Create(made) => (made != *there).then_some(true),
            NameOp::Remove(removed) => (removed == *there).then_some(false),
            NameOp::Stat(found) => (found == *there).then_some(*there),
        }
    }
}

/// Two names whose files change places.
pub struct Pair;

#[derive(Clone, Copy, Debug)]
pub enum PairOp {
    Swap,
    /// The first name leads to the second file.
    ReadFirst(bool),
    /// The second name leads to the first file.
    ReadSecond(bool),
}

impl Object for Pair {
    type State = bool;
    type Op = PairOp;
    fn initial() -> bool {
        false
    }
    fn step(swapped: &bool, op: PairOp) -> Option<bool> {
        match op {
            PairOp::Swap => Some(!swapped),
            PairOp::ReadFirst(other) | PairOp::ReadSecond(other) => (other == *swapped).then_some(*swapped),
        }
    }
}

/// A number that is counted up under a lock; an operation returns the former value.
pub struct Counter;

impl Object for Counter {
    type State = u64;
    type Op = u64;
    fn initial() -> u64 {
        0
    }
    fn step(state: &u64, before: u64) -> Option<u64> {
        (*state == before).then_some(state + 1)
    }
}

fn event<Op>(called_ns: u64, returned_ns: u64, op: Op) -> Event<Op> {
    Event { called_ns, returned_ns, op }
}

#[test]
fn possible_histories_are_accepted() {
    use RegisterOp::{Read, Write};
    // A write and two reads overlap: one sees it, one does not yet.
    let processes = [
        vec![event(0, 10, Write(1)), event(11, 12, Read(1))],
        vec![event(1, 2, Read(0)), event(3, 4, Read(1))],
        vec![event(1, 5, Read(0))],
    ];
    assert_eq!(linearizable::<Register>(&processes), Ok(()));
    // The order of two that overlap is found, for either order of their calls.
    let log = [
        vec![event(0, 10, LogOp::Append(7))],
        vec![event(1, 9, LogOp::Append(8)), event(11, 12, LogOp::Read(2, digest(digest(0, 8), 7)))],
    ];
    assert_eq!(linearizable::<Log>(&log), Ok(()));
    let both = [vec![event(0, 9, PairOp::Swap), event(10, 11, PairOp::ReadFirst(true))], vec![]];
    assert_eq!(linearizable::<Pair>(&both), Ok(()));
}

#[test]
fn impossible_histories_are_refused() {
    use RegisterOp::{Read, Write};
    let register = |processes: &[Vec<Event<RegisterOp>>]| linearizable::<Register>(processes);
    // A read after the write has returned that does not see it.
    let stale = register(&[vec![event(0, 10, Write(1))], vec![event(11, 12, Read(0))]]).unwrap_err();
    assert!(stale.contains("Read") && stale.contains("after 1 operations"), "{stale}");
    // Back to the old value after the new one was seen, while the write is in flight.
    let back = [vec![event(0, 100, Write(1))], vec![event(1, 2, Read(1)), event(3, 4, Read(0))]];
    assert!(register(&back).is_err());
    // Two readers that disagree about the order of two writes.
    let order = [
        vec![event(0, 100, Write(1))],
        vec![event(0, 100, Write(2))],
        vec![event(10, 20, Read(1)), event(21, 30, Read(2))],
        vec![event(10, 20, Read(2)), event(21, 30, Read(1))],
    ];
    assert!(register(&order).is_err());
    // A lost append, a name made twice, a swap half seen, a number counted twice.
    let lost = [
        vec![event(0, 1, LogOp::Append(7)), event(2, 3, LogOp::Read(1, digest(0, 8)))],
        vec![event(0, 1, LogOp::Append(8))],
    ];
    assert!(linearizable::<Log>(&lost).is_err());
    let twice = [vec![event(0, 5, NameOp::Create(true))], vec![event(0, 5, NameOp::Create(true))]];
    assert!(linearizable::<Name>(&twice).is_err());
    let gone = [vec![event(0, 1, NameOp::Create(true)), event(2, 3, NameOp::Stat(false))]];
    assert!(linearizable::<Name>(&gone).is_err());
    let half = [
        vec![event(0, 9, PairOp::Swap)],
        vec![event(1, 2, PairOp::ReadFirst(true)), event(3, 4, PairOp::ReadSecond(false))],
    ];
    assert!(linearizable::<Pair>(&half).is_err());
    assert!(linearizable::<Counter>(&[vec![event(0, 5, 0)], vec![event(0, 5, 0)]]).is_err());
}
