//! Claims about the lease table: by table, and for every history.
use super::*;
use proptest::prelude::*;

const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const C: SessionId = SessionId(3);
const FILE: InodeId = InodeId(77);
const OTHER: InodeId = InodeId(78);

fn conflicts(table: &LeaseTable, session: SessionId, need: Need) -> Vec<Conflict> {
    let mut out = Vec::new();
    table.conflicts(session, FILE, need, &mut out);
    out
}

#[test]
fn readers_share() {
    let mut t = LeaseTable::default();
    assert_eq!(t.grant_read(A, FILE), LeaseKind::Read);
    assert_eq!(t.grant_read(B, FILE), LeaseKind::Read);
    assert_eq!(conflicts(&t, A, Need::GetAttr), []);
    assert_eq!(
        conflicts(&t, A, Need::Change),
        [Conflict { ino: FILE, session: B, keep: LeaseKind::None, ask: true }]
    );
}

#[test]
fn a_session_that_returns_no_lease_gets_only_what_it_recovers() {
    let mut t = LeaseTable::default();
    t.withhold(A, true);
    assert_eq!(t.grant_write(A, FILE), LeaseKind::None);
    assert_eq!((t.grant_read(A, FILE), t.acquire_read(A, FILE)), (LeaseKind::None, LeaseKind::None));
    assert_eq!(conflicts(&t, B, Need::Change), []);
    assert_eq!(t.grant_recovery(A, FILE), LeaseKind::Write);
    t.lower(A, FILE, LeaseKind::None);
    t.withhold(A, false);
    assert_eq!(t.grant_write(A, FILE), LeaseKind::Write);
    t.withhold(A, true);
    t.drop_session(A);
    assert!(t.is_empty());
    assert_eq!(t.grant_write(A, FILE), LeaseKind::Write, "what was withheld went with the session");
}

#[test]
fn a_writer_is_alone_and_lowered_to_read_by_a_getattr() {
    let mut t = LeaseTable::default();
    assert_eq!(t.grant_write(A, FILE), LeaseKind::Write);
    assert_eq!(t.grant_read(B, FILE), LeaseKind::None);
    assert_eq!(
        conflicts(&t, B, Need::GetAttr),
        [Conflict { ino: FILE, session: A, keep: LeaseKind::Read, ask: true }]
    );
    assert!(t.begin_revoke(A, FILE));
    assert!(!t.begin_revoke(A, FILE), "a client is asked once");
    t.park(FILE);
    t.end_revoke(A, FILE, LeaseKind::Read);
    assert_eq!(t.grant_read(B, FILE), LeaseKind::None, "the parked operation comes first");
    t.unpark(FILE);
    assert_eq!(t.grant_read(B, FILE), LeaseKind::Read);
    assert_eq!(t.held(A, FILE), LeaseKind::Read);
}

#[test]
fn an_operation_is_blocked_while_another_session_is_asked() {
    let mut t = LeaseTable::default();
    t.grant_read(A, FILE);
    t.grant_read(B, FILE);
    assert!(!t.is_revoking(A, FILE, LeaseKind::None), "it is not asked yet");
    assert!(t.begin_revoke(B, FILE));
    assert!(t.is_revoking(A, FILE, LeaseKind::None), "its answer ends the wait of A");
    assert!(!t.is_revoking(A, FILE, LeaseKind::Read), "to read, A need not wait");
    assert!(!t.is_revoking(B, FILE, LeaseKind::None), "its own lease");
    t.end_revoke(B, FILE, LeaseKind::None);
    assert!(!t.is_revoking(A, FILE, LeaseKind::None));
    t.grant_write(C, OTHER);
    t.begin_revoke(C, OTHER);
    assert!(t.is_revoking(A, OTHER, LeaseKind::Read));
    t.end_revoke(C, OTHER, LeaseKind::Read);
    // It may keep Read: an operation that changes the file has to ask again.
    assert!(!t.is_revoking(A, OTHER, LeaseKind::None) && t.held(C, OTHER) == LeaseKind::Read);
    t.begin_revoke(C, OTHER);
    t.drop_session(C);
    assert!(!t.is_revoking(A, OTHER, LeaseKind::None));
}

#[test]
fn a_file_that_one_session_has_alone_is_revoked_for_each_other() {
    for need in [Need::GetAttr, Need::Pages, Need::AppendToken, Need::Change] {
        let mut t = LeaseTable::default();
        assert!(t.grant_alone(A, FILE));
        assert_eq!(t.held(A, FILE), LeaseKind::Read);
        assert_eq!((t.grant_read(B, FILE), t.grant_write(B, FILE)), (LeaseKind::None, LeaseKind::None));
        assert!(!t.grant_alone(B, FILE));
        let keep = if need == Need::Change { LeaseKind::None } else { LeaseKind::Read };
        assert_eq!(conflicts(&t, B, need), [Conflict { ino: FILE, session: A, keep, ask: true }]);
        assert_eq!(conflicts(&t, A, need), [], "its own use");
        assert!(t.begin_revoke(A, FILE) && t.is_revoking(B, FILE, keep));
        assert!(!t.grant_alone(A, FILE), "it is being asked for");
        t.end_revoke(A, FILE, keep);
        assert_eq!(conflicts(&t, B, need), []);
        assert_eq!(t.grant_read(B, FILE), LeaseKind::Read);
        assert!(!t.grant_alone(A, FILE), "another one has it");
        t.lower(B, FILE, LeaseKind::None);
        t.open(B, FILE, true, false);
        assert!(!t.grant_alone(A, FILE), "another one has it open");
        t.close(B, FILE, 1, 0);
        assert!(t.grant_alone(A, FILE));
        t.drop_session(A);
        assert!(t.grant_alone(B, FILE), "its holder is gone");
    }
}

#[test]
fn an_own_change_keeps_the_own_lease() {
    let mut t = LeaseTable::default();
    t.grant_read(A, FILE);
    assert_eq!(conflicts(&t, A, Need::Change), []);
    assert_eq!(t.grant_write(A, FILE), LeaseKind::Write);
}

#[test]
fn a_shared_file_has_no_leases_until_one_is_left() {
    let mut t = LeaseTable::default();
    t.open(A, FILE, false, true);
    assert_eq!(t.grant_write(A, FILE), LeaseKind::Write);
    assert_eq!(t.need_to_open(B, FILE, false), Need::Change, "a reader beside a writer shares");
    t.lower(A, FILE, LeaseKind::None);
    t.open(B, FILE, true, false);
    assert_eq!(t.grant_read(B, FILE), LeaseKind::None);
    assert_eq!(t.grant_write(A, FILE), LeaseKind::None);
    assert_eq!(t.acquire_read(A, FILE), LeaseKind::None);
    assert!(t.close(B, FILE, 1, 0));
    assert_eq!(t.grant_read(A, FILE), LeaseKind::None, "a writer that writes directly must ask");
    assert_eq!(t.grant_write(A, FILE), LeaseKind::Write);
}

#[test]
fn a_reader_does_not_cache_while_another_writes_directly() {
    let mut t = LeaseTable::default();
    t.open(A, FILE, false, true);
    assert_eq!(t.grant_read(B, FILE), LeaseKind::None);
}

#[test]
fn a_page_reader_is_granted_while_writers_are_idle() {
    let mut t = LeaseTable::default();
    t.open(A, FILE, false, true);
    t.open(B, FILE, true, false);
    assert_eq!(t.grant_write(A, FILE), LeaseKind::None);
    t.note_direct(A, FILE);
    let asked = [Conflict { ino: FILE, session: A, keep: LeaseKind::None, ask: true }];
    assert_eq!(conflicts(&t, B, Need::Pages), asked);
    assert_eq!(t.acquire_read(B, FILE), LeaseKind::None, "somebody may be writing");
    assert!(t.begin_revoke(A, FILE));
    t.park(FILE);
    t.end_revoke(A, FILE, LeaseKind::None);
    assert_eq!(conflicts(&t, B, Need::Pages), []);
    assert_eq!(
        t.acquire_read(B, FILE),
        LeaseKind::Read,
        "whoever waits takes it away when its time has come"
    );
    t.unpark(FILE);
    assert_eq!(
        t.grant_read(SessionId(3), FILE),
        LeaseKind::None,
        "without a word for pages the file is shared"
    );
    let taken = [Conflict { ino: FILE, session: B, keep: LeaseKind::None, ask: true }];
    assert_eq!(conflicts(&t, A, Need::Change), taken, "the next write takes the pages away");
}

#[test]
fn a_lease_granted_during_its_revoke_outlasts_it() {
    let mut t = LeaseTable::default();
    t.open(A, FILE, false, true);
    t.note_direct(A, FILE);
    assert!(t.begin_revoke(A, FILE));
    // It asks again, before its next write, and its answer to the revoke is overtaken.
    t.note_direct(A, FILE);
    t.end_revoke(A, FILE, LeaseKind::None);
    assert_eq!(t.acquire_read(B, FILE), LeaseKind::None, "A writes with the second word");
    assert!(t.begin_revoke(A, FILE));
    t.end_revoke(A, FILE, LeaseKind::None);
    assert_eq!(t.acquire_read(B, FILE), LeaseKind::Read);
}

#[test]
fn two_writers_of_a_file_get_no_lease_for_pages() {
    let mut t = LeaseTable::default();
    t.open(A, FILE, false, true);
    t.open(B, FILE, true, true);
    assert_eq!(t.acquire_read(B, FILE), LeaseKind::None);
}

#[test]
fn a_writer_that_comes_back_may_have_writes_on_their_way() {
    let mut t = LeaseTable::default();
    t.set_opens(A, FILE, Opens { read: 0, write: 1 });
    assert_eq!(conflicts(&t, B, Need::Pages).len(), 1);
    assert!(!t.close(A, FILE, 0, 0) && t.close(A, FILE, 0, 1));
    assert_eq!(conflicts(&t, B, Need::Pages), []);
    assert!(t.is_empty(), "nothing is left of it");
}

#[test]
fn a_dropped_session_leaves_nothing() {
    let mut t = LeaseTable::default();
    t.open(A, FILE, true, true);
    t.grant_write(A, FILE);
    t.park(FILE);
    assert_eq!(t.drop_session(A), [FILE]);
    t.unpark(FILE);
    assert!(t.is_empty() && t.of_session.is_empty());
}

#[derive(Clone, Debug)]
enum Event {
    Read(u64),
    Pages(u64),
    Write(u64),
    Open(u64, bool),
    Close(u64, bool),
    Lower(u64, bool),
    Revoke(u64),
    Answer(u64),
    Park,
    Unpark,
    Drop(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let s = || 1u64..4;
    prop_oneof![
        s().prop_map(Event::Read),
        s().prop_map(Event::Pages),
        s().prop_map(Event::Write),
        (s(), any::<bool>()).prop_map(|(s, w)| Event::Open(s, w)),
        (s(), any::<bool>()).prop_map(|(s, w)| Event::Close(s, w)),
        (s(), any::<bool>()).prop_map(|(s, k)| Event::Lower(s, k)),
        s().prop_map(Event::Revoke),
        s().prop_map(Event::Answer),
        Just(Event::Park),
        Just(Event::Unpark),
        s().prop_map(Event::Drop),
    ]
}

/// As the service does: an open or a demand for Write proceeds only without a conflict. Returns the session
/// that was permitted to write directly.
fn step(t: &mut LeaseTable, e: &Event) -> Option<u64> {
    let kept = |read: bool| if read { LeaseKind::Read } else { LeaseKind::None };
    match *e {
        Event::Read(s) => drop(t.grant_read(SessionId(s), FILE)),
        Event::Write(s) => {
            if conflicts(t, SessionId(s), Need::Change).is_empty()
                && t.grant_write(SessionId(s), FILE) < LeaseKind::Write
            {
                t.note_direct(SessionId(s), FILE);
                return Some(s);
            }
        }
        Event::Pages(s) => {
            if conflicts(t, SessionId(s), Need::Pages).is_empty() {
                t.acquire_read(SessionId(s), FILE);
            }
        }
        Event::Open(s, write) => {
            if conflicts(t, SessionId(s), t.need_to_open(SessionId(s), FILE, write)).is_empty() {
                t.open(SessionId(s), FILE, !write, write);
            }
        }
        Event::Close(s, write) => drop(t.close(SessionId(s), FILE, u32::from(!write), u32::from(write))),
        Event::Lower(s, read) => drop(t.lower(SessionId(s), FILE, kept(read))),
        Event::Revoke(s) => drop(t.begin_revoke(SessionId(s), FILE)),
        Event::Answer(s) => t.end_revoke(SessionId(s), FILE, LeaseKind::None),
        Event::Park => t.park(FILE),
        Event::Unpark => t.unpark(FILE),
        Event::Drop(s) => drop(t.drop_session(SessionId(s))),
    }
    None
}

proptest! {
    #[test]
    fn never_two_conflicting_leases(events in prop::collection::vec(event(), 1..200)) {
        let mut t = LeaseTable::default();
        let (mut reported, mut revoked) = ([false; 4], [false; 4]);
        for e in &events {
            let before: Vec<LeaseKind> = (1..4).map(|s| t.held(SessionId(s), FILE)).collect();
            let closed = t.states.get(&FILE).is_some_and(State::closed);
            if let Some(s) = step(&mut t, e) {
                reported[s as usize] = true;
            }
            let held: Vec<LeaseKind> = (1..4).map(|s| t.held(SessionId(s), FILE)).collect();
            let writers = held.iter().filter(|k| **k == LeaseKind::Write).count();
            let any = held.iter().filter(|k| **k > LeaseKind::None).count();
            prop_assert!(writers == 0 || any == 1, "{e:?}: {held:?}");
            if closed && !matches!(e, Event::Pages(_)) {
                prop_assert!(held.iter().zip(&before).all(|(now, was)| now <= was), "{e:?} granted while closed");
            }
            for s in 1..4u64 {
                // The permission counts until it has answered a later revoke, has closed the file, or writes
                // alone.
                revoked[s as usize] |= matches!(e, Event::Revoke(who) if *who == s);
                revoked[s as usize] &= !matches!(e, Event::Write(who) if *who == s);
                let answers = matches!(e, Event::Answer(who) if *who == s) && revoked[s as usize];
                let answered = answers || matches!(e, Event::Drop(who) if *who == s);
                let writes = t.opens_of(SessionId(s), FILE).write > 0 && held[s as usize - 1] < LeaseKind::Write;
                reported[s as usize] &= writes && !answered;
                let others = (1..4).filter(|o| *o != s).any(|o| t.held(SessionId(o), FILE) > LeaseKind::None);
                prop_assert!(!(reported[s as usize] && others), "{e:?}: s{s} writes directly beside a cache");
            }
            for s in 1..4 {
                let listed = t.of_session.get(&SessionId(s)).is_some_and(|all| all.contains(&FILE));
                let there = t.states.get(&FILE).is_some_and(|x| x.get(SessionId(s)).is_some());
                prop_assert_eq!(listed, there);
            }
        }
    }
}
