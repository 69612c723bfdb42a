//! The lock table: the holders of ranges of files, the waits, and the waits that are refused as deadlocks.
//!
//! A pure decision: requests come in, the answer and the waits that ended come out.
//!
//! Invariants: two owners never hold conflicting ranges. No owner waits that could have the lock. Waits end
//! in the order in which they came, unless they conflict with each other. Owners of `fcntl` locks never wait
//! in a circle; for `flock` this is not checked, as on a local file system.
//!
//! Knows nothing of names, of the network, or of which session is alive.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::lock::{HeldLock, LockKind, LockOutcome, LockOwner, LockRange, LockSpace, OwnerRanges};
use weir_proto::{InodeId, SessionId};

/// Ranges and waits of one session on all files. A range takes about 100 bytes here.
pub const LOCKS_PER_SESSION_MAX: usize = 1 << 16;
/// A request that does not wait for a lock still waits this long, in all, for an open file that is being
/// closed: its client learns of the end some milliseconds after `close` has returned. If a copy of the
/// descriptor stays open, the lock stays, too.
pub const CLOSING_MAX: Duration = Duration::from_millis(250);
/// Ranges of a file that are compared with each other at most, in tests and simulated runs.
const RANGES_CHECKED_MAX: usize = 64;
/// A close that is not announced is expected when another owner asks for the lock, and again after this time.
const EXPECTED_AGAIN: Duration = Duration::from_secs(1);

/// A holder: an owner's number has a meaning within its session only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Holder {
    pub session: SessionId,
    pub owner: LockOwner,
}

/// A requested lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    pub ino: InodeId,
    pub holder: Holder,
    pub range: LockRange,
    pub kind: LockKind,
    /// The process, for administrators.
    pub pid: u32,
}

/// A wait that ended with the lock granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Woken {
    pub session: SessionId,
    pub ticket: u64,
}

/// A held or awaited range as it is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shown {
    pub wish: Wish,
    pub since: Instant,
    pub waits: bool,
}

#[derive(Debug, Default)]
struct Held {
    ranges: OwnerRanges,
    pid: u32,
    since: Option<Instant>,
    /// A close of the open file began.
    closing: Option<Instant>,
    /// The close of the open file is not announced.
    quiet: bool,
}

impl Held {
    fn is_closing(&self, now: Instant) -> bool {
        self.closing.is_some_and(|begun| now.since(begun) < CLOSING_MAX)
    }
}

#[derive(Debug)]
struct Wait {
    wish: Wish,
    ticket: u64,
    since: Instant,
}

#[derive(Debug, Default)]
struct FileLocks {
    holders: BTreeMap<Holder, Held>,
    /// Waits in the order of arrival.
    waits: Vec<Wait>,
}

/// The files where a session holds or waits for locks, and their number.
#[derive(Debug, Default)]
struct Uses {
    files: BTreeSet<InodeId>,
    count: usize,
}

#[derive(Debug, Default)]
pub struct LockTable {
    files: BTreeMap<InodeId, FileLocks>,
    of_session: BTreeMap<SessionId, Uses>,
    /// The files on which an owner waits, and how often.
    waiting: BTreeMap<Holder, BTreeMap<InodeId, u32>>,
}

impl FileLocks {
    fn in_the_way<'a>(&'a self, wish: &'a Wish) -> impl Iterator<Item = (Holder, &'a Held)> + 'a {
        self.holders.iter().filter_map(|(holder, held)| {
            let other = *holder != wish.holder && holder.owner.space == wish.holder.owner.space;
            (other && held.ranges.conflict(wish.range, wish.kind).is_some()).then_some((*holder, held))
        })
    }

    /// Holders of conflicting locks may have been closed without an announcement.
    fn expect_closes(&mut self, wish: &Wish, now: Instant) {
        let quiet: Vec<Holder> =
            self.in_the_way(wish).filter(|(_, held)| held.quiet).map(|(holder, _)| holder).collect();
        for holder in quiet {
            let Some(held) = self.holders.get_mut(&holder) else { continue };
            if held.closing.is_none_or(|begun| now.since(begun) >= CLOSING_MAX + EXPECTED_AGAIN) {
                held.closing = Some(now);
            }
        }
    }

    fn uses(&self, session: SessionId) -> bool {
        self.holders.keys().any(|h| h.session == session)
            || self.waits.iter().any(|w| w.wish.holder.session == session)
    }
}

impl LockTable {
    /// Locks or converts; waits under `ticket` if that is not 0. A repeated request with the same ticket
    /// keeps its place in the queue. A conversion to a weaker lock may end others' waits.
    pub fn lock(&mut self, wish: Wish, ticket: u64, now: Instant) -> (LockOutcome, Vec<Woken>) {
        let file = self.files.entry(wish.ino).or_default();
        let place = file
            .waits
            .iter()
            .position(|w| (w.wish.holder.session, w.ticket) == (wish.holder.session, ticket));
        let free = file.in_the_way(&wish).next().is_none();
        if free {
            if place.is_none() && self.is_full(wish.holder.session) {
                self.tidy(wish.ino, wish.holder.session);
                return (LockOutcome::Full, Vec::new());
            }
            self.take_from_queue(wish.ino, place);
            self.grant(&wish, now);
            return (LockOutcome::Granted, self.settle(wish.ino, now));
        }
        if ticket == 0 {
            file.expect_closes(&wish, now);
        }
        let is_closing = || file.in_the_way(&wish).all(|(_, held)| held.is_closing(now));
        let outcome = match (ticket, place) {
            (0, _) if is_closing() => LockOutcome::Closing,
            (0, _) => LockOutcome::Held,
            (_, Some(_)) => LockOutcome::Queued,
            _ if self.is_full(wish.holder.session) => LockOutcome::Full,
            _ if self.would_wait_for_itself(&wish) => LockOutcome::Deadlock,
            _ => {
                let uses = self.of_session.entry(wish.holder.session).or_default();
                uses.files.insert(wish.ino);
                uses.count += 1;
                *self.waiting.entry(wish.holder).or_default().entry(wish.ino).or_default() += 1;
                self.files.entry(wish.ino).or_default().waits.push(Wait { wish, ticket, since: now });
                LockOutcome::Queued
            }
        };
        (outcome, Vec::new())
    }

    /// Unlocks a range.
    pub fn unlock(&mut self, ino: InodeId, holder: Holder, range: LockRange, now: Instant) -> Vec<Woken> {
        let Some(held) = self.files.get_mut(&ino).and_then(|f| f.holders.get_mut(&holder)) else {
            return Vec::new();
        };
        let before = held.ranges.len();
        held.ranges.set(range, None);
        let after = held.ranges.len();
        self.count(holder.session, before, after);
        self.settle(ino, now)
    }

    /// The open file through which an owner holds a lock is being closed.
    pub fn close(&mut self, ino: InodeId, holder: Holder, now: Instant) {
        if let Some(held) = self.files.get_mut(&ino).and_then(|f| f.holders.get_mut(&holder)) {
            held.closing = Some(now);
        }
    }

    /// Whether the close of the open file through which an owner holds a lock will be announced.
    pub fn note_quiet(&mut self, ino: InodeId, holder: Holder, quiet: bool) {
        if let Some(held) = self.files.get_mut(&ino).and_then(|f| f.holders.get_mut(&holder)) {
            held.quiet = quiet;
        }
    }

    /// Ends a wait; false: there is none.
    pub fn cancel(&mut self, ino: InodeId, session: SessionId, ticket: u64) -> bool {
        let place = self.files.get(&ino).and_then(|file| {
            file.waits.iter().position(|w| (w.wish.holder.session, w.ticket) == (session, ticket))
        });
        self.take_from_queue(ino, place);
        self.tidy(ino, session);
        place.is_some()
    }

    /// The first lock that conflicts with a wish.
    pub fn conflict(&self, wish: &Wish) -> Option<Shown> {
        let file = self.files.get(&wish.ino)?;
        let first = file.in_the_way(wish).filter_map(|(holder, held)| {
            let (range, kind) = held.ranges.conflict(wish.range, wish.kind)?;
            Some(shown(wish.ino, holder, held, range, kind))
        });
        first.min_by_key(|s| s.wish.range.start)
    }

    /// Makes a session's locks exactly `named`, and ends its waits; returns those that others hold already.
    pub fn replace(
        &mut self,
        session: SessionId,
        named: &[HeldLock],
        now: Instant,
    ) -> (Vec<HeldLock>, Vec<Woken>) {
        let mut files = self.of_session.get(&session).map_or_else(BTreeSet::new, |uses| uses.files.clone());
        files.iter().for_each(|ino| self.clear(*ino, session));
        let mut lost = Vec::new();
        for lock in named {
            let holder = Holder { session, owner: lock.owner };
            let wish = Wish { ino: lock.ino, holder, range: lock.range, kind: lock.kind, pid: lock.pid };
            files.insert(lock.ino);
            if self.conflict(&wish).is_some() || self.is_full(session) {
                lost.push(lock.clone());
            } else {
                self.grant(&wish, now);
            }
        }
        let mut woken = Vec::new();
        for ino in files {
            woken.append(&mut self.settle(ino, now));
            self.tidy(ino, session);
        }
        (lost, woken)
    }

    /// The end of a session.
    pub fn drop_session(&mut self, session: SessionId, now: Instant) -> Vec<Woken> {
        self.replace(session, &[], now).1
    }

    /// The held and awaited ranges of a file: by ranges, then by arrival.
    pub fn list(&self, ino: InodeId) -> Vec<Shown> {
        let Some(file) = self.files.get(&ino) else { return Vec::new() };
        let held = file.holders.iter();
        let mut all: Vec<Shown> = held
            .flat_map(|(holder, held)| {
                held.ranges.iter().map(|(range, kind)| shown(ino, *holder, held, range, kind))
            })
            .collect();
        all.sort_by_key(|s| (s.wish.range, s.wish.holder));
        all.extend(file.waits.iter().map(|w| Shown { wish: w.wish, since: w.since, waits: true }));
        all
    }

    /// The numbers of ranges that a session has locked, and that it waits for.
    pub fn counts_of(&self, session: SessionId) -> (u32, u32) {
        let all = self.of_session.get(&session).map_or(0, |uses| uses.count);
        let its = self.waiting.iter().filter(|(holder, _)| holder.session == session);
        let waits: usize = its.flat_map(|(_, on)| on.values()).map(|n| *n as usize).sum();
        (all.saturating_sub(waits) as u32, waits as u32)
    }

    /// Files with locks or waits.
    pub fn len(&self) -> usize {
        self.files.len()
    }
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    fn grant(&mut self, wish: &Wish, now: Instant) {
        let file = self.files.entry(wish.ino).or_default();
        assert!(file.in_the_way(wish).next().is_none(), "file {}: a lock is granted twice", wish.ino);
        let held = file.holders.entry(wish.holder).or_default();
        let before = held.ranges.len();
        held.ranges.set(wish.range, Some(wish.kind));
        held.pid = wish.pid;
        held.closing = None;
        held.since.get_or_insert(now);
        let after = held.ranges.len();
        self.of_session.entry(wish.holder.session).or_default().files.insert(wish.ino);
        self.count(wish.holder.session, before, after);
    }

    fn count(&mut self, session: SessionId, before: usize, after: usize) {
        if let Some(uses) = self.of_session.get_mut(&session) {
            assert!(uses.count + after >= before, "session {session}: fewer locks than it releases");
            uses.count = uses.count + after - before;
        }
    }

    /// Grants freed ranges to waits, then drops empty entries.
    fn settle(&mut self, ino: InodeId, now: Instant) -> Vec<Woken> {
        let (mut woken, mut ended) = (Vec::new(), Vec::new());
        while let Some(file) = self.files.get_mut(&ino) {
            file.holders.retain(|holder, held| {
                let keeps = !held.ranges.is_empty();
                ended.extend((!keeps).then_some(holder.session));
                keeps
            });
            let free = file.waits.iter().position(|w| file.in_the_way(&w.wish).next().is_none());
            let Some(wait) = self.take_from_queue(ino, free) else { break };
            // A conversion may weaken a lock, and so end earlier waits: from the start again.
            self.grant(&wait.wish, now);
            woken.push(Woken { session: wait.wish.holder.session, ticket: wait.ticket });
        }
        ended.into_iter().for_each(|session| self.tidy(ino, session));
        self.forget_if_nothing(ino);
        if cfg!(debug_assertions) {
            self.check(ino);
        }
        woken
    }
    /// Checks all files.
    pub fn check_all(&self) {
        self.files.keys().for_each(|ino| self.check(*ino));
    }

    /// Panics where locks of a file conflict, or a wait could end. With many ranges it compares none: that
    /// would take long.
    fn check(&self, ino: InodeId) {
        let Some(file) = self.files.get(&ino) else { return };
        let could_have = |wait: &Wait| file.in_the_way(&wait.wish).next().is_none();
        assert!(!file.waits.iter().any(could_have), "file {ino}: a wait that could end");
        let ranges: usize = file.holders.values().map(|held| held.ranges.len()).sum();
        if ranges > RANGES_CHECKED_MAX {
            return;
        }
        for (holder, held) in &file.holders {
            for (range, kind) in held.ranges.iter() {
                let wish = Wish { ino, holder: *holder, range, kind, pid: held.pid };
                assert!(file.in_the_way(&wish).next().is_none(), "file {ino}: locks conflict: {file:?}");
            }
        }
    }

    /// Removes all locks of a session on a file; no wait is granted yet.
    fn clear(&mut self, ino: InodeId, session: SessionId) {
        while let Some(place) =
            self.files.get(&ino).and_then(|f| f.waits.iter().position(|w| w.wish.holder.session == session))
        {
            self.take_from_queue(ino, Some(place));
        }
        let mut freed = 0;
        if let Some(file) = self.files.get_mut(&ino) {
            file.holders.retain(|holder, held| {
                let theirs = holder.session == session;
                freed += if theirs { held.ranges.len() } else { 0 };
                !theirs
            });
        }
        self.count(session, freed, 0);
    }

    fn take_from_queue(&mut self, ino: InodeId, place: Option<usize>) -> Option<Wait> {
        let wait = self.files.get_mut(&ino)?.waits.remove(place?);
        self.count(wait.wish.holder.session, 1, 0);
        if let Some(on) = self.waiting.get_mut(&wait.wish.holder) {
            let left = on.get_mut(&ino).map_or(0, |n| {
                assert!(*n > 0, "file {ino}: a wait ends that was not counted");
                *n -= 1;
                *n
            });
            if left == 0 {
                on.remove(&ino);
            }
            if on.is_empty() {
                self.waiting.remove(&wait.wish.holder);
            }
        }
        Some(wait)
    }

    /// Whether an owner of a conflicting lock waits, directly or through others, for this one.
    fn would_wait_for_itself(&self, wish: &Wish) -> bool {
        if wish.holder.owner.space != LockSpace::Fcntl {
            return false;
        }
        let (mut seen, mut next) = (BTreeSet::new(), self.holders_in_the_way(wish));
        while let Some(holder) = next.pop() {
            if holder == wish.holder {
                return true;
            }
            if !seen.insert(holder) {
                continue;
            }
            for ino in self.waiting.get(&holder).into_iter().flat_map(BTreeMap::keys) {
                let waits = self.files.get(ino).into_iter().flat_map(|f| &f.waits);
                let theirs = waits.filter(|w| w.wish.holder == holder);
                theirs.for_each(|w| next.append(&mut self.holders_in_the_way(&w.wish)));
            }
        }
        false
    }

    fn holders_in_the_way(&self, wish: &Wish) -> Vec<Holder> {
        self.files.get(&wish.ino).map_or(Vec::new(), |f| f.in_the_way(wish).map(|(h, _)| h).collect())
    }

    fn is_full(&self, session: SessionId) -> bool {
        self.of_session.get(&session).is_some_and(|uses| uses.count >= LOCKS_PER_SESSION_MAX)
    }

    fn tidy(&mut self, ino: InodeId, session: SessionId) {
        if self.files.get(&ino).is_none_or(|f| !f.uses(session))
            && let Some(uses) = self.of_session.get_mut(&session)
        {
            uses.files.remove(&ino);
            if uses.files.is_empty() {
                self.of_session.remove(&session);
            }
        }
        self.forget_if_nothing(ino);
    }
    fn forget_if_nothing(&mut self, ino: InodeId) {
        if self.files.get(&ino).is_some_and(|f| f.holders.is_empty() && f.waits.is_empty()) {
            self.files.remove(&ino);
        }
    }
}

fn shown(ino: InodeId, holder: Holder, held: &Held, range: LockRange, kind: LockKind) -> Shown {
    let wish = Wish { ino, holder, range, kind, pid: held.pid };
    Shown { wish, since: held.since.unwrap_or(Instant(0)), waits: false }
}

#[cfg(test)]
mod tests;
