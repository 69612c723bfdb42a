//! Waits: what this process waits for now, and the longer ones of the last hour.
//!
//! A wait has a slot in a fixed table as long as it lasts. Only its guard and readers of the list use the
//! lock of that slot, so nothing is contended. Invariants: a wait is listed once; one that lasted [`KEPT_NS`]
//! is kept for an hour, with preference for the newest.
use crate::Now;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A wait that lasts longer is listed,
pub const VISIBLE_NS: u64 = 10_000_000;
/// and one that lasted longer is kept.
pub const KEPT_NS: u64 = 100_000_000;
const KEPT_FOR_NS: u64 = 3600 * 1_000_000_000;
/// Concurrent waits: of a mount with a thousand calls in flight. Further ones are counted and not listed.
const PLACES: usize = 2048;
/// Slots that are tried to find a free one.
const TRIES: usize = 16;
/// Kept waits, about 200 bytes each.
const KEPT_MAX: usize = 4096;
/// A name is cut to this length, so that the memory is bounded.
const NAME_BYTES_MAX: usize = 120;

/// The cause of a wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reason {
    /// A program's call at a mount.
    Program,
    /// The answer of another node.
    Answer,
    /// A free slot among the calls of a connection.
    CallSlot,
    /// A client that has to return a lease.
    LeaseRecall,
    /// A file or name that another operation uses.
    Parked,
    /// Space within a quota.
    Quota,
    /// Bytes that are at home only.
    Recall,
    /// A lock that another program holds.
    Lock,
    /// A placement group with too few members.
    Group,
    /// A newer cluster map.
    Map,
    /// Servers, from the view of a client.
    Servers,
    /// A read or a write of a disk.
    Disk,
    /// A sync of a journal or an index.
    Journal,
    /// Memory within a budget.
    Budget,
    /// A home's storage.
    Home,
    /// A place in the queue of a target.
    Queue,
}

impl Reason {
    pub const ALL: [Reason; 16] = [
        Reason::Program,
        Reason::Answer,
        Reason::CallSlot,
        Reason::LeaseRecall,
        Reason::Parked,
        Reason::Quota,
        Reason::Recall,
        Reason::Lock,
        Reason::Group,
        Reason::Map,
        Reason::Servers,
        Reason::Disk,
        Reason::Journal,
        Reason::Budget,
        Reason::Home,
        Reason::Queue,
    ];
    /// One word, for metrics and messages.
    pub fn word(self) -> &'static str {
        match self {
            Reason::Program => "program",
            Reason::Answer => "answer",
            Reason::CallSlot => "call-slot",
            Reason::LeaseRecall => "lease-recall",
            Reason::Parked => "parked",
            Reason::Quota => "quota",
            Reason::Recall => "recall",
            Reason::Lock => "lock",
            Reason::Group => "group",
            Reason::Map => "map",
            Reason::Servers => "servers",
            Reason::Disk => "disk",
            Reason::Journal => "journal",
            Reason::Budget => "budget",
            Reason::Home => "home",
            Reason::Queue => "queue",
        }
    }
}

/// An object by its kind and number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Object {
    /// Empty: none.
    pub kind: &'static str,
    pub id: u64,
}

impl Object {
    pub const NONE: Object = Object { kind: "", id: 0 };
    pub const fn new(kind: &'static str, id: u64) -> Object {
        Object { kind, id }
    }
}

/// A wait in the list.
#[derive(Clone, PartialEq, Debug)]
pub struct WaitRecord {
    pub reason: Reason,
    pub object: Object,
    /// The action in progress.
    pub action: &'static str,
    /// The holder of the awaited resource; empty: not known.
    pub holder: Option<Arc<str>>,
    /// The node that has to answer.
    pub peer: Option<Arc<str>>,
    /// The user and process that it serves; 0: not known.
    pub uid: u32,
    pub pid: u32,
}

impl WaitRecord {
    pub fn new(reason: Reason, object: Object) -> WaitRecord {
        WaitRecord { reason, object, action: "", holder: None, peer: None, uid: 0, pid: 0 }
    }
    pub fn doing(self, action: &'static str) -> WaitRecord {
        WaitRecord { action, ..self }
    }
    pub fn held_by(self, holder: &str) -> WaitRecord {
        WaitRecord { holder: Some(truncated(holder)), ..self }
    }
    pub fn at(self, peer: &Arc<str>) -> WaitRecord {
        WaitRecord { peer: Some(peer.clone()), ..self }
    }
    pub fn of(self, uid: u32, pid: u32) -> WaitRecord {
        WaitRecord { uid, pid, ..self }
    }
}

fn truncated(name: &str) -> Arc<str> {
    let end = (0..=NAME_BYTES_MAX.min(name.len())).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
    name[..end].into()
}

/// A wait that is over.
#[derive(Clone, PartialEq, Debug)]
pub struct EndedWait {
    pub record: WaitRecord,
    pub lasted_ns: u64,
    pub ended_ns: u64,
}

#[derive(Default)]
struct Place {
    /// When the wait began; 0: the slot is free. 1 more than the clock's value, which may be 0.
    since: AtomicU64,
    record: Mutex<Option<WaitRecord>>,
}

pub struct Waits {
    places: Box<[Place]>,
    hint: AtomicUsize,
    /// By reason: the number of waits of more than [`VISIBLE_NS`] that ended, and their time; and all that
    /// found no slot.
    ended: [AtomicU64; Reason::ALL.len()],
    waited_ns: [AtomicU64; Reason::ALL.len()],
    not_listed: AtomicU64,
    kept: Mutex<VecDeque<EndedWait>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waits {
    pub(crate) fn new() -> Waits {
        Waits {
            places: (0..PLACES).map(|_| Place::default()).collect(),
            hint: AtomicUsize::new(0),
            ended: [const { AtomicU64::new(0) }; Reason::ALL.len()],
            waited_ns: [const { AtomicU64::new(0) }; Reason::ALL.len()],
            not_listed: AtomicU64::new(0),
            kept: Mutex::default(),
        }
    }

    fn take(&self, since_ns: u64, record: WaitRecord) -> Option<usize> {
        let first = self.hint.load(Ordering::Relaxed);
        for at in (first..first + TRIES).map(|at| at % PLACES) {
            let place = &self.places[at];
            let free = place.since.compare_exchange(0, since_ns + 1, Ordering::Acquire, Ordering::Relaxed);
            if free.is_ok() {
                self.hint.store(at, Ordering::Relaxed); // soon free again, and then in this core's cache
                *lock(&place.record) = Some(record);
                return Some(at);
            }
        }
        self.hint.store((first + TRIES) % PLACES, Ordering::Relaxed);
        self.not_listed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// The wait in a slot is over. Its record stays until the slot is reused: it is not read, and clearing it
    /// would take the lock once more.
    fn ended(&self, reason: Reason, place: Option<usize>, since_ns: u64, now_ns: u64) {
        let lasted_ns = now_ns.saturating_sub(since_ns);
        if lasted_ns >= VISIBLE_NS {
            self.ended[reason as usize].fetch_add(1, Ordering::Relaxed);
            self.waited_ns[reason as usize].fetch_add(lasted_ns, Ordering::Relaxed);
        }
        let Some(place) = place.map(|at| &self.places[at]) else { return };
        if lasted_ns >= KEPT_NS
            && let Some(record) = lock(&place.record).take()
        {
            self.keep(EndedWait { record, lasted_ns, ended_ns: now_ns });
        }
        place.since.store(0, Ordering::Release);
    }

    fn keep(&self, ended: EndedWait) {
        let mut kept = lock(&self.kept);
        while kept.len() >= KEPT_MAX
            || kept.front().is_some_and(|old| ended.ended_ns.saturating_sub(old.ended_ns) > KEPT_FOR_NS)
        {
            kept.pop_front();
        }
        kept.push_back(ended);
    }

    /// Waits that have lasted for `min_ns`, the longest first, with their age.
    pub fn list(&self, now_ns: u64, min_ns: u64) -> Vec<(WaitRecord, u64)> {
        let mut found = Vec::new();
        for place in &self.places {
            let since = place.since.load(Ordering::Acquire);
            let age = (now_ns + 1).saturating_sub(since);
            if since == 0 || age < min_ns {
                continue;
            }
            // It may have ended meanwhile, and another one may have begun: that is young.
            let record = lock(&place.record).clone();
            if place.since.load(Ordering::Acquire) == since {
                found.extend(record.map(|record| (record, age)));
            }
        }
        found.sort_by_key(|(_, age)| std::cmp::Reverse(*age));
        found
    }

    /// Waits that ended since then and lasted for `min_ns`, the newest first.
    pub fn list_ended(&self, since_ns: u64, min_ns: u64) -> Vec<EndedWait> {
        let kept = lock(&self.kept);
        let newest = kept.iter().rev().take_while(|ended| ended.ended_ns >= since_ns);
        newest.filter(|ended| ended.lasted_ns >= min_ns).cloned().collect()
    }

    /// By reason: the number of waits of more than [`VISIBLE_NS`] that ended, and their time.
    pub fn totals(&self) -> impl Iterator<Item = (Reason, u64, u64)> + '_ {
        Reason::ALL.into_iter().map(|reason| {
            let at = reason as usize;
            (reason, self.ended[at].load(Ordering::Relaxed), self.waited_ns[at].load(Ordering::Relaxed))
        })
    }
    /// Waits that found no slot in the table.
    pub fn not_listed(&self) -> u64 {
        self.not_listed.load(Ordering::Relaxed)
    }
}

/// A wait, as long as this exists.
pub struct WaitGuard {
    waits: Arc<Waits>,
    now: Now,
    since_ns: u64,
    reason: Reason,
    place: Option<usize>,
    is_over: bool,
}

impl WaitGuard {
    pub(crate) fn begin(waits: Arc<Waits>, now: Now, since_ns: u64, record: WaitRecord) -> WaitGuard {
        let reason = record.reason;
        let place = waits.take(since_ns, record);
        WaitGuard { waits, now, since_ns, reason, place, is_over: false }
    }
    /// Ends the wait, for a caller that has just read the clock.
    pub fn end_at(mut self, now_ns: u64) {
        self.end(now_ns);
    }
    fn end(&mut self, now_ns: u64) {
        self.is_over = true;
        self.waits.ended(self.reason, self.place.take(), self.since_ns, now_ns);
    }
    /// The holder of the awaited resource, once it is known.
    pub fn holder(&self, holder: &str) {
        if let Some(place) = self.place
            && let Some(record) = &mut *lock(&self.waits.places[place].record)
        {
            record.holder = Some(truncated(holder));
        }
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        if !self.is_over {
            let now_ns = (self.now)();
            self.end(now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn guard(waits: &Arc<Waits>, clock: &Arc<AtomicU64>, record: WaitRecord) -> WaitGuard {
        let at = clock.clone();
        let now: Now = Arc::new(move || at.load(Ordering::Relaxed));
        WaitGuard::begin(waits.clone(), now.clone(), now(), record)
    }

    #[test]
    fn a_wait_is_listed_while_it_lasts_and_kept_if_it_was_long() {
        let (waits, clock) = (Arc::new(Waits::new()), Arc::new(AtomicU64::new(5)));
        let record = WaitRecord::new(Reason::Lock, Object::new("inode", 7)).doing("fcntl").of(1000, 42);
        let long = guard(&waits, &clock, record.clone());
        long.holder("n1:/data");
        let at = |ms: u64| clock.store(ms * MS, Ordering::Relaxed);
        at(50);
        let short = guard(&waits, &clock, WaitRecord::new(Reason::Disk, Object::new("target", 1)));
        assert_eq!(waits.list(55 * MS, VISIBLE_NS).len(), 1);
        let (seen, age) = waits.list(65 * MS, VISIBLE_NS)[0].clone();
        assert_eq!((seen, age / MS), (record.clone().held_by("n1:/data"), 64));
        at(99);
        drop(short);
        at(200);
        drop(long);
        assert_eq!(waits.list(200 * MS, 0), []);
        let ended = waits.list_ended(0, 0);
        assert_eq!((ended.len(), ended[0].lasted_ns / MS, ended[0].record.pid), (1, 199, 42));
        assert_eq!(waits.list_ended(201 * MS, 0), [], "it ended earlier");
        let totals: Vec<_> = waits.totals().filter(|t| t.1 > 0).map(|(r, n, ns)| (r, n, ns / MS)).collect();
        assert_eq!(totals, [(Reason::Lock, 1, 199), (Reason::Disk, 1, 49)]);
    }

    #[test]
    fn waits_beyond_the_places_are_counted_and_places_come_back() {
        let (waits, clock) = (Arc::new(Waits::new()), Arc::new(AtomicU64::new(0)));
        let begin = || guard(&waits, &clock, WaitRecord::new(Reason::Answer, Object::NONE));
        let all: Vec<WaitGuard> = (0..PLACES + 10).map(|_| begin()).collect();
        assert_eq!((waits.list(1, 0).len(), waits.not_listed()), (PLACES, 10));
        drop(all);
        assert_eq!(waits.list(1, 0).len(), 0);
        let again: Vec<WaitGuard> = (0..PLACES).map(|_| begin()).collect();
        assert_eq!(waits.list(1, 0).len(), PLACES);
        drop(again);
    }

    #[test]
    fn kept_waits_are_forgotten_after_an_hour() {
        let (waits, clock) = (Arc::new(Waits::new()), Arc::new(AtomicU64::new(0)));
        let wait = |from: u64, to: u64| {
            clock.store(from, Ordering::Relaxed);
            let guard = guard(&waits, &clock, WaitRecord::new(Reason::Disk, Object::NONE));
            clock.store(to, Ordering::Relaxed);
            drop(guard);
        };
        (0..KEPT_MAX as u64 + 5).for_each(|n| wait(n * KEPT_NS, (n + 1) * KEPT_NS));
        assert_eq!(waits.list_ended(0, 0).len(), KEPT_MAX);
        let later = 2 * KEPT_FOR_NS;
        wait(later, later + KEPT_NS);
        assert_eq!(waits.list_ended(0, 0).len(), 1);
    }

    #[test]
    fn a_wait_that_ended_at_a_given_time_ends_once() {
        let (waits, clock) = (Arc::new(Waits::new()), Arc::new(AtomicU64::new(0)));
        guard(&waits, &clock, WaitRecord::new(Reason::Answer, Object::NONE)).end_at(KEPT_NS);
        assert_eq!((waits.list_ended(0, 0).len(), waits.list(KEPT_NS, 0).len()), (1, 0));
        assert_eq!(waits.totals().map(|t| t.1).sum::<u64>(), 1);
    }

    #[test]
    fn every_reason_has_a_word_of_its_own() {
        for (at, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, at);
            assert!(Reason::ALL[..at].iter().all(|other| other.word() != reason.word()));
        }
    }
}
