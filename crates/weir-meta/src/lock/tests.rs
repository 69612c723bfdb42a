use super::*;
use proptest::prelude::*;
use weir_proto::lock::LOCK_END;

const F: InodeId = InodeId(7);
const G: InodeId = InodeId(8);
const NOW: Instant = Instant(1);
use LockKind::{Exclusive, Shared};

fn r(start: u64, end: u64) -> LockRange {
    LockRange::new(start, end).unwrap()
}
fn holder(session: u64, id: u64) -> Holder {
    Holder { session: SessionId(session), owner: LockOwner { space: LockSpace::Fcntl, id } }
}
fn wish(ino: InodeId, holder: Holder, start: u64, end: u64, kind: LockKind) -> Wish {
    Wish { ino, holder, range: r(start, end), kind, pid: 1 }
}
fn outcome(table: &mut LockTable, wish: Wish, ticket: u64) -> LockOutcome {
    table.lock(wish, ticket, NOW).0
}
fn woken(session: u64, ticket: u64) -> Woken {
    Woken { session: SessionId(session), ticket }
}

#[test]
fn shared_locks_go_together_and_exclusive_ones_alone() {
    let mut t = LockTable::default();
    // (holder, start, end, kind, outcome), one after the other.
    let cases = [
        (1, 0, 9, Shared, LockOutcome::Granted),
        (2, 5, 14, Shared, LockOutcome::Granted),
        (2, 0, 9, Exclusive, LockOutcome::Held),
        (2, 10, 14, Exclusive, LockOutcome::Granted),
        (1, 14, 20, Shared, LockOutcome::Held),
        (1, 15, LOCK_END, Exclusive, LockOutcome::Granted),
        (1, 0, 4, Exclusive, LockOutcome::Granted),
        (1, 0, 5, Exclusive, LockOutcome::Held),
    ];
    for (n, (who, start, end, kind, expected)) in cases.into_iter().enumerate() {
        assert_eq!(outcome(&mut t, wish(F, holder(who, 1), start, end, kind), 0), expected, "case {n}");
    }
    let way = t.conflict(&wish(F, holder(3, 1), 12, 30, Shared)).unwrap();
    assert_eq!((way.wish.holder, way.wish.range, way.wish.kind), (holder(2, 1), r(10, 14), Exclusive));
    assert!(t.conflict(&wish(F, holder(3, 1), 6, 9, Shared)).is_none());
    // Another space, another file: no conflict.
    let flock = Holder { session: SessionId(3), owner: LockOwner { space: LockSpace::Flock, id: 1 } };
    assert_eq!(outcome(&mut t, wish(F, flock, 0, LOCK_END, Exclusive), 0), LockOutcome::Granted);
    assert_eq!(outcome(&mut t, wish(G, holder(3, 1), 0, 9, Exclusive), 0), LockOutcome::Granted);
    // An owner's number counts within its session: in another one it is another owner.
    assert_eq!(outcome(&mut t, wish(G, holder(4, 1), 0, 9, Exclusive), 0), LockOutcome::Held);
}

#[test]
fn a_refusal_waits_for_an_open_file_that_is_being_closed() {
    let mut t = LockTable::default();
    let (ours, theirs) = (wish(F, holder(1, 1), 0, 4, Shared), wish(F, holder(2, 1), 2, 9, Shared));
    let wanted = wish(F, holder(3, 1), 0, 9, Exclusive);
    let asked = |t: &mut LockTable, at: Duration| t.lock(wanted, 0, NOW + at).0;
    assert_eq!(outcome(&mut t, ours, 0), LockOutcome::Granted);
    assert_eq!(outcome(&mut t, theirs, 0), LockOutcome::Granted);
    t.close(F, ours.holder, NOW);
    assert_eq!(asked(&mut t, Duration::ZERO), LockOutcome::Held, "the other one is not being closed");
    t.close(F, theirs.holder, NOW);
    assert_eq!(asked(&mut t, Duration::ZERO), LockOutcome::Closing);
    assert_eq!(t.lock(wanted, 7, NOW).0, LockOutcome::Queued, "who waits anyway waits");
    assert!(t.cancel(F, SessionId(3), 7));
    assert_eq!(asked(&mut t, CLOSING_MAX), LockOutcome::Held, "a copy of the descriptor is open still");
    t.close(F, ours.holder, NOW);
    assert_eq!(outcome(&mut t, ours, 0), LockOutcome::Granted);
    assert_eq!(asked(&mut t, Duration::ZERO), LockOutcome::Held, "it was locked again");
    for gone in [ours, theirs] {
        assert_eq!(t.unlock(F, gone.holder, LockRange::WHOLE, NOW), []);
    }
    t.close(F, ours.holder, NOW);
    assert_eq!(asked(&mut t, Duration::ZERO), LockOutcome::Granted);
}

#[test]
fn a_refusal_waits_for_a_close_that_is_not_announced() {
    let mut t = LockTable::default();
    let (theirs, wanted) = (wish(F, holder(1, 1), 0, 4, Shared), wish(F, holder(3, 1), 0, 9, Exclusive));
    let asked = |t: &mut LockTable, at: Duration| t.lock(wanted, 0, NOW + at).0;
    assert_eq!(outcome(&mut t, theirs, 0), LockOutcome::Granted);
    t.note_quiet(F, theirs.holder, true);
    let again = CLOSING_MAX + EXPECTED_AGAIN;
    for (at, expected) in [
        (Duration::ZERO, LockOutcome::Closing),
        (CLOSING_MAX / 2, LockOutcome::Closing),
        (CLOSING_MAX, LockOutcome::Held),
        (again, LockOutcome::Closing),
        (again + CLOSING_MAX, LockOutcome::Held),
    ] {
        assert_eq!(asked(&mut t, at), expected, "{at:?}");
    }
    assert_eq!(t.unlock(F, theirs.holder, LockRange::WHOLE, NOW), []);
    assert_eq!(asked(&mut t, again * 3), LockOutcome::Granted);
}

#[test]
fn waiting_locks_are_granted_in_order_of_arrival() {
    let mut t = LockTable::default();
    assert_eq!(outcome(&mut t, wish(F, holder(1, 1), 0, 9, Exclusive), 0), LockOutcome::Granted);
    assert_eq!(outcome(&mut t, wish(F, holder(2, 1), 0, 9, Exclusive), 21), LockOutcome::Queued);
    assert_eq!(outcome(&mut t, wish(F, holder(3, 1), 0, 4, Shared), 31), LockOutcome::Queued);
    assert_eq!(outcome(&mut t, wish(F, holder(4, 1), 0, 4, Shared), 41), LockOutcome::Queued);
    // Asked again: the place in the queue stays.
    assert_eq!(outcome(&mut t, wish(F, holder(2, 1), 0, 9, Exclusive), 21), LockOutcome::Queued);
    assert_eq!(t.list(F).iter().filter(|s| s.waits).count(), 3);
    assert_eq!(t.unlock(F, holder(1, 1), LockRange::WHOLE, NOW), [woken(2, 21)]);
    assert_eq!(outcome(&mut t, wish(F, holder(2, 1), 0, 9, Exclusive), 21), LockOutcome::Granted);
    // A conversion to shared lets both readers in.
    let (done, ended) = t.lock(wish(F, holder(2, 1), 0, 9, Shared), 0, NOW);
    assert_eq!((done, ended), (LockOutcome::Granted, vec![woken(3, 31), woken(4, 41)]));
    // A wait that was cancelled gets no lock.
    assert_eq!(outcome(&mut t, wish(F, holder(5, 1), 0, 9, Exclusive), 51), LockOutcome::Queued);
    assert!(t.cancel(F, SessionId(5), 51) && !t.cancel(F, SessionId(5), 51));
    for n in 2..5 {
        assert_eq!(t.unlock(F, holder(n, 1), LockRange::WHOLE, NOW), []);
    }
    assert!(t.is_empty() && t.of_session.is_empty() && t.waiting.is_empty());
}

#[test]
fn waiting_in_a_circle_is_refused() {
    let mut t = LockTable::default();
    for (n, ino, start) in [(1, F, 0), (2, F, 1), (3, G, 0)] {
        assert_eq!(
            outcome(&mut t, wish(ino, holder(n, 1), start, start, Exclusive), 0),
            LockOutcome::Granted
        );
    }
    // Over two files and three sessions.
    assert_eq!(outcome(&mut t, wish(F, holder(1, 1), 1, 1, Shared), 10), LockOutcome::Queued);
    assert_eq!(outcome(&mut t, wish(G, holder(2, 1), 0, 0, Shared), 20), LockOutcome::Queued);
    assert_eq!(outcome(&mut t, wish(F, holder(3, 1), 0, 0, Shared), 30), LockOutcome::Deadlock);
    assert_eq!(outcome(&mut t, wish(F, holder(3, 1), 0, 0, Shared), 0), LockOutcome::Held);
    // Without one of the waits it is a line.
    assert!(t.cancel(F, SessionId(1), 10));
    assert_eq!(outcome(&mut t, wish(F, holder(3, 1), 0, 0, Shared), 30), LockOutcome::Queued);
    // Two readers that both want to write.
    let mut t = LockTable::default();
    for n in [1, 2] {
        assert_eq!(outcome(&mut t, wish(F, holder(n, 1), 0, 9, Shared), 0), LockOutcome::Granted);
    }
    assert_eq!(outcome(&mut t, wish(F, holder(1, 1), 0, 9, Exclusive), 1), LockOutcome::Queued);
    assert_eq!(outcome(&mut t, wish(F, holder(2, 1), 0, 9, Exclusive), 2), LockOutcome::Deadlock);
}

#[test]
fn the_end_of_a_session_frees_all_it_had() {
    let mut t = LockTable::default();
    outcome(&mut t, wish(F, holder(1, 1), 0, 9, Exclusive), 0);
    outcome(&mut t, wish(G, holder(1, 2), 0, 9, Exclusive), 0);
    outcome(&mut t, wish(F, holder(2, 1), 0, 9, Exclusive), 21);
    outcome(&mut t, wish(F, holder(1, 3), 0, 9, Exclusive), 13);
    assert_eq!(t.drop_session(SessionId(1), NOW), [woken(2, 21)]);
    assert_eq!(t.list(F).len(), 1);
    assert!(t.list(G).is_empty());
    assert_eq!(t.drop_session(SessionId(2), NOW), []);
    assert!(t.is_empty() && t.of_session.is_empty() && t.waiting.is_empty());
}

#[test]
fn reclaimed_locks_are_held_unless_another_has_them() {
    let mut t = LockTable::default();
    let named = |ino, start, end, kind| {
        let owner = LockOwner { space: LockSpace::Fcntl, id: 1 };
        HeldLock { ino, owner, range: r(start, end), kind, pid: 5 }
    };
    outcome(&mut t, wish(F, holder(1, 1), 0, 99, Exclusive), 0);
    outcome(&mut t, wish(G, holder(2, 1), 0, 9, Exclusive), 0);
    outcome(&mut t, wish(F, holder(2, 1), 50, 60, Shared), 21);
    let (lost, ended) = t.replace(SessionId(1), &[named(F, 0, 9, Exclusive), named(G, 5, 5, Shared)], NOW);
    assert_eq!(lost, [named(G, 5, 5, Shared)]);
    assert_eq!(ended, [woken(2, 21)], "it no longer holds what it did not name");
    let held: Vec<_> = t.list(F).iter().map(|s| (s.wish.holder.session.0, s.wish.range)).collect();
    assert_eq!(held, [(1, r(0, 9)), (2, r(50, 60))]);
}

#[test]
fn a_session_has_only_so_many_locks() {
    let mut t = LockTable::default();
    // Few ranges per owner: an owner's request costs as much as it has ranges.
    let mine = |n: u64| wish(InodeId(1000 + n / 64), holder(1, n / 64), 2 * (n % 64), 2 * (n % 64), Shared);
    for n in 0..LOCKS_PER_SESSION_MAX as u64 {
        assert_eq!(outcome(&mut t, mine(n), 0), LockOutcome::Granted);
    }
    let one_more = mine(LOCKS_PER_SESSION_MAX as u64);
    assert_eq!(outcome(&mut t, one_more, 0), LockOutcome::Full);
    assert_eq!(outcome(&mut t, wish(F, holder(2, 1), 0, 0, Shared), 0), LockOutcome::Granted);
    t.unlock(InodeId(1000), holder(1, 0), r(0, 0), NOW);
    assert_eq!(outcome(&mut t, one_more, 0), LockOutcome::Granted);
}

/// A lock table with one entry per byte, which retries all waits from the start after every change.
#[derive(Default)]
struct Model {
    bytes: BTreeMap<(InodeId, u64), BTreeMap<Holder, LockKind>>,
    waits: Vec<(Wish, u64)>,
}

impl Model {
    fn blockers(&self, wish: &Wish) -> BTreeSet<Holder> {
        let on = (wish.range.start..=wish.range.end).filter_map(|b| self.bytes.get(&(wish.ino, b)));
        on.flatten()
            .filter(|(h, k)| **h != wish.holder && (**k == Exclusive || wish.kind == Exclusive))
            .filter(|(h, _)| h.owner.space == wish.holder.owner.space)
            .map(|(h, _)| *h)
            .collect()
    }
    fn set(&mut self, ino: InodeId, holder: Holder, range: LockRange, kind: Option<LockKind>) {
        for byte in range.start..=range.end {
            let on = self.bytes.entry((ino, byte)).or_default();
            match kind {
                Some(kind) => on.insert(holder, kind),
                None => on.remove(&holder),
            };
        }
    }
    /// Reaches itself over "waits for", found by repeating until nothing is added.
    fn circle(&self, wish: &Wish) -> bool {
        let mut reached = self.blockers(wish);
        loop {
            let more: BTreeSet<Holder> = self
                .waits
                .iter()
                .filter(|(w, _)| reached.contains(&w.holder))
                .flat_map(|(w, _)| self.blockers(w))
                .filter(|h| !reached.contains(h))
                .collect();
            if more.is_empty() {
                return wish.holder.owner.space == LockSpace::Fcntl && reached.contains(&wish.holder);
            }
            reached.extend(more);
        }
    }
    fn settle(&mut self) -> Vec<Woken> {
        let mut woken = Vec::new();
        while let Some(at) = self.waits.iter().position(|(w, _)| self.blockers(w).is_empty()) {
            let (wish, ticket) = self.waits.remove(at);
            self.set(wish.ino, wish.holder, wish.range, Some(wish.kind));
            woken.push(Woken { session: wish.holder.session, ticket });
        }
        woken
    }
    fn lock(&mut self, wish: Wish, ticket: u64) -> (LockOutcome, Vec<Woken>) {
        if self.blockers(&wish).is_empty() {
            self.set(wish.ino, wish.holder, wish.range, Some(wish.kind));
            return (LockOutcome::Granted, self.settle());
        }
        let outcome = match ticket {
            0 => LockOutcome::Held,
            _ if self.circle(&wish) => LockOutcome::Deadlock,
            _ => {
                self.waits.push((wish, ticket));
                LockOutcome::Queued
            }
        };
        (outcome, Vec::new())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Lock {
        file: u64,
        session: u64,
        owner: u64,
        flock: bool,
        start: u64,
        len: u64,
        exclusive: bool,
        wait: bool,
    },
    Unlock {
        file: u64,
        session: u64,
        owner: u64,
        flock: bool,
        start: u64,
        len: u64,
    },
    Cancel {
        nth: usize,
    },
    End {
        session: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0u64..2, 1u64..4, 0u64..2, any::<bool>(), 0u64..10, 0u64..5);
    prop_oneof![
        8 => (place(), any::<bool>(), any::<bool>()).prop_map(|((file, session, owner, flock, start, len), exclusive, wait)| {
            Step::Lock { file, session, owner, flock, start, len, exclusive, wait }
        }),
        6 => place().prop_map(|(file, session, owner, flock, start, len)| {
            Step::Unlock { file, session, owner, flock, start, len }
        }),
        1 => (0usize..4).prop_map(|nth| Step::Cancel { nth }),
        1 => (1u64..4).prop_map(|session| Step::End { session }),
    ]
}

proptest! {
    #[test]
    fn the_table_does_what_a_simple_model_does(steps in proptest::collection::vec(step(), 1..80)) {
        let (mut table, mut model) = (LockTable::default(), Model::default());
        let who = |session, owner, flock| Holder {
            session: SessionId(session),
            owner: LockOwner { space: if flock { LockSpace::Flock } else { LockSpace::Fcntl }, id: owner },
        };
        let sorted = |mut woken: Vec<Woken>| {
            woken.sort_by_key(|w| w.ticket);
            woken
        };
        for (n, step) in steps.into_iter().enumerate() {
            match step {
                Step::Lock { file, session, owner, flock, start, len, exclusive, wait } => {
                    let kind = if exclusive { Exclusive } else { Shared };
                    let wish = wish(InodeId(file), who(session, owner, flock), start, start + len, kind);
                    let ticket = if wait { n as u64 + 1 } else { 0 };
                    prop_assert_eq!(table.conflict(&wish).is_some(), !model.blockers(&wish).is_empty());
                    prop_assert_eq!(table.lock(wish, ticket, NOW), model.lock(wish, ticket));
                }
                Step::Unlock { file, session, owner, flock, start, len } => {
                    let (ino, holder, range) = (InodeId(file), who(session, owner, flock), r(start, start + len));
                    model.set(ino, holder, range, None);
                    prop_assert_eq!(table.unlock(ino, holder, range, NOW), model.settle());
                }
                Step::Cancel { nth } => {
                    let Some((wish, ticket)) = model.waits.get(nth).copied() else { continue };
                    model.waits.remove(nth);
                    prop_assert!(table.cancel(wish.ino, wish.holder.session, ticket));
                }
                Step::End { session } => {
                    model.bytes.values_mut().for_each(|on| on.retain(|h, _| h.session.0 != session));
                    model.waits.retain(|(w, _)| w.holder.session.0 != session);
                    // File by file here, in the order of arrival there: the same waits end.
                    prop_assert_eq!(
                        sorted(table.drop_session(SessionId(session), NOW)),
                        sorted(model.settle())
                    );
                }
            }
            let mut shown: BTreeMap<(InodeId, u64), BTreeMap<Holder, LockKind>> = BTreeMap::new();
            for file in [InodeId(0), InodeId(1)] {
                for s in table.list(file).iter().filter(|s| !s.waits) {
                    for byte in s.wish.range.start..=s.wish.range.end {
                        shown.entry((file, byte)).or_default().insert(s.wish.holder, s.wish.kind);
                    }
                }
            }
            model.bytes.retain(|_, on| !on.is_empty());
            prop_assert_eq!(&shown, &model.bytes);
            let counted: usize = table.of_session.values().map(|u| u.count).sum();
            let there: usize = [InodeId(0), InodeId(1)].iter().map(|f| table.list(*f).len()).sum();
            prop_assert_eq!(counted, there);
        }
    }
}
