//! Claims about membership, by table.
use super::*;
use std::sync::Arc;
use std::time::Duration;
use weir_proto::Wire;
use weir_proto::coord::{ClusterStatus, Heartbeat, TargetHistory};
use weir_proto::frame::BODY_MAX;
use weir_proto::map::{MemberState, Run, RunSeen, Settings};
use weir_proto::version::{LEVEL_MAX, Program};
use weir_proto::{ClusterId, DiskUuid, ErrorKind, RunId};

const LIMITS: HealthLimits = HealthLimits { silence_max: Duration::from_secs(1) };

fn empty_map() -> ClusterMap {
    let settings = Settings {
        scheme: "ec:4+2".parse().unwrap(),
        cell_shift: 20,
        lease_ms: 10_000,
        target_silence_ms: 1000,
    };
    ClusterMap { cluster: ClusterId([1; 16]), version: 1, level: LEVEL_MAX, settings, ..ClusterMap::absent() }
}
fn join(name: &str, instance: u64, disks: &[u8]) -> Join {
    Join {
        program: Program::this(),
        cluster: Some(ClusterId([1; 16])),
        name: name.into(),
        instance,
        role: Role::Storage,
        host: "h1".into(),
        addrs: vec!["tcp:127.0.0.1:7000".into()],
        targets: disks
            .iter()
            .map(|d| AnnouncedTarget {
                uuid: DiskUuid([*d; 16]),
                pool: "hdd".into(),
                capacity: 100,
                history: TargetHistory { run: RunId(instance), ..TargetHistory::default() },
            })
            .collect(),
    }
}
fn report(n: u32) -> TargetReport {
    TargetReport {
        target: TargetId(n),
        failed: false,
        capacity: 1,
        used: 0,
        under_replicated_cells: 0,
        damaged_blocks: 0,
        repaired_blocks: 0,
        stalled_ms: 0,
        position: 0,
    }
}
/// A machine's name has up to 64 bytes, and its id 32 more.
#[test]
fn machines_with_the_longest_names_join() {
    let (name, id) = ("h".repeat(64), "0123456789abcdef".repeat(2));
    let mut world = World { map: empty_map(), members: Members::default() };
    let mut long = join(&format!("storage-{name}"), 7, &[7]);
    long.host = format!("{}/{name}-{id}", "r".repeat(64));
    assert!(world.join(&long, 7, at(0)).is_ok());
    long.name = "n".repeat(NAME_MAX + 1);
    assert!(world.join(&long, 7, at(0)).is_err());
}

fn at(ms: u64) -> Instant {
    Instant(ms * 1_000_000)
}

struct World {
    map: ClusterMap,
    members: Members,
}
impl World {
    fn with_six() -> World {
        let mut world = World { map: empty_map(), members: Members::default() };
        for n in 1..=6u8 {
            world.join(&join(&format!("s{n}"), u64::from(n), &[n]), u64::from(n), at(0)).unwrap();
        }
        assert_eq!(world.map.groups[0].current_count(), 6);
        world
    }
    /// Joins with targets that still have their data.
    fn join(&mut self, join: &Join, connection: u64, now: Instant) -> Result<Admitted> {
        let mut join = join.clone();
        for announced in &mut join.targets {
            if let Some(known) = self.map.targets.iter().find(|t| t.uuid == announced.uuid) {
                announced.history.confirmed = known.last.run;
                announced.history.position = u64::MAX;
            }
        }
        self.join_with(&join, connection, now)
    }
    fn join_with(&mut self, join: &Join, connection: u64, now: Instant) -> Result<Admitted> {
        let admitted = self.members.admit(&mut self.map, join, connection, now)?;
        self.reconcile(now);
        Ok(admitted)
    }
    fn reconcile(&mut self, now: Instant) {
        self.members.reconcile(&mut self.map, now, &LIMITS);
        crate::decide::group_tests::create_groups(&mut self.map, 6);
    }
    /// Heartbeats of these nodes, each with the stall of its target's disk in milliseconds. All others live,
    /// too.
    fn beat(&mut self, now: u64, stalls: &[(u32, u32)]) {
        for n in 1..=6 {
            self.members.heartbeat(&mut self.map, NodeId(n), n.into(), vec![], at(now)).unwrap();
        }
        for (n, stalled_ms) in stalls {
            let reports = vec![TargetReport { stalled_ms: *stalled_ms, ..report(*n) }];
            self.members.heartbeat(&mut self.map, NodeId(*n), (*n).into(), reports, at(now)).unwrap();
            self.reconcile(at(now));
        }
    }
    fn target(&self, n: u32) -> TargetState {
        self.map.target(TargetId(n)).unwrap().state
    }
    fn member(&self, n: u32) -> MemberState {
        self.map.groups[0].members.iter().find(|m| m.target == TargetId(n)).unwrap().state
    }
}

#[test]
fn a_broken_connection_takes_targets_down_until_a_join() {
    let mut world = World::with_six();
    world.members.disconnected(3);
    world.reconcile(at(1));
    assert_eq!((world.target(3), world.member(3)), (TargetState::Down, MemberState::Down));
    assert!(!world.map.nodes[2].up);
    let again = world.join(&join("s3", 99, &[3]), 33, at(2)).unwrap();
    assert_eq!(again, Admitted { node: NodeId(3), targets: vec![TargetId(3)] });
    assert_eq!((world.target(3), world.member(3)), (TargetState::Up, MemberState::Behind));
    // The old connection's end is reported late: it has no effect.
    world.members.disconnected(3);
    world.reconcile(at(3));
    assert_eq!(world.target(3), TargetState::Up);
}

#[test]
fn a_target_that_returns_with_less_is_behind_until_refilled() {
    let history = |confirmed, position| {
        let mut join = join("s3", 99, &[3]);
        join.targets[0].history = TargetHistory { confirmed, position, run: RunId(99), begun: vec![] };
        join
    };
    for (what, confirmed, position, is_lost) in [
        ("all that it had", Run { number: 1, id: RunId(3) }, 70, false),
        ("an older copy", Run { number: 1, id: RunId(3) }, 69, true),
        ("nothing", Run::default(), 900, true),
    ] {
        let mut world = World::with_six();
        let mut left = report(3);
        left.position = 70;
        world.members.heartbeat(&mut world.map, NodeId(3), 3, vec![left], at(1)).unwrap();
        // All are gone: without the loss, all would be current when they return.
        (1..=6).for_each(|n| world.members.disconnected(n));
        world.reconcile(at(2));
        for n in [1, 2, 4, 5, 6u8] {
            world.join(&join(&format!("s{n}"), 50 + u64::from(n), &[n]), 50 + u64::from(n), at(3)).unwrap();
        }
        world.join_with(&history(confirmed, position), 99, at(3)).unwrap();
        let expected = if is_lost { MemberState::Behind } else { MemberState::Current };
        assert_eq!(world.member(3), expected, "{what}");
        let target = world.map.target(TargetId(3)).unwrap();
        assert_eq!(target.last, RunSeen { run: Run { number: 2, id: RunId(99) }, position }, "{what}");
        // It joins again: nothing more is lost. It dies: still lost.
        let before = world.map.groups.clone();
        world.join_with(&history(confirmed, position), 100, at(4)).unwrap();
        assert_eq!(world.map.groups, before, "{what}");
        world.members.disconnected(100);
        world.reconcile(at(5));
        world.join(&join("s3", 101, &[3]), 101, at(6)).unwrap();
        let member = world.map.groups[0].members.iter().find(|m| m.target == TargetId(3)).unwrap();
        assert_eq!(member.is_lost(), is_lost, "{what}");
    }
}

#[test]
fn silence_takes_a_node_down_and_it_must_join_again() {
    let mut world = World::with_six();
    for n in 1..=5 {
        world.members.heartbeat(&mut world.map, NodeId(n), u64::from(n), vec![], at(900)).unwrap();
    }
    world.reconcile(at(1500));
    assert_eq!(world.target(6), TargetState::Down);
    assert_eq!(world.target(5), TargetState::Up);
    let late = world.members.heartbeat(&mut world.map, NodeId(6), 6, vec![], at(1501)).unwrap_err();
    assert_eq!(late.kind, ErrorKind::Stale);
}

#[test]
fn after_a_restart_members_are_awaited_then_evaluated() {
    let mut world = World::with_six();
    world.members = Members::awaiting(&world.map, &Positions::new(), at(10_000));
    world.reconcile(at(10_500));
    assert_eq!(world.target(1), TargetState::Up);
    for n in 1..=5u8 {
        world.join(&join(&format!("s{n}"), 100 + u64::from(n), &[n]), u64::from(n), at(10_600)).unwrap();
    }
    assert_eq!(world.member(1), MemberState::Current, "nothing was written while no node had a coordinator");
    world.reconcile(at(11_001));
    assert_eq!((world.target(6), world.member(6)), (TargetState::Down, MemberState::Down));
}

#[test]
fn a_target_that_is_not_announced_again_is_down() {
    let mut world = World { map: empty_map(), members: Members::default() };
    world.join(&join("s1", 1, &[1, 2, 3, 4, 5, 6]), 1, at(0)).unwrap();
    world.members.disconnected(1);
    world.join(&join("s1", 2, &[1, 2, 3, 4, 5]), 2, at(1)).unwrap();
    assert_eq!((world.target(5), world.target(6)), (TargetState::Up, TargetState::Down));
}

#[test]
fn the_size_of_a_target_is_known_when_it_joins() {
    let mut world = World::with_six();
    let reported = |world: &World| {
        let reports = world.members.reports.values();
        reports.map(|r| (r.capacity, r.used)).collect::<Vec<_>>()
    };
    assert_eq!(reported(&world), [(100, 0); 6]);
    let report = TargetReport { used: 7, ..world.members.reports[&TargetId(2)].clone() };
    world.members.heartbeat(&mut world.map, NodeId(2), 2, vec![report], at(1)).unwrap();
    world.members.disconnected(2);
    world.join(&join("s2", 8, &[2]), 8, at(2)).unwrap();
    assert_eq!(reported(&world)[1], (100, 7), "its last report is kept, not the size with which it joins");
}

#[test]
fn a_failed_disk_is_out_for_good() {
    let mut world = World::with_six();
    let report = TargetReport { failed: true, ..report(2) };
    // A node reports only its own targets.
    world.members.heartbeat(&mut world.map, NodeId(1), 1, vec![report.clone()], at(1)).unwrap();
    assert_eq!(world.target(2), TargetState::Up);
    world.members.heartbeat(&mut world.map, NodeId(2), 2, vec![report], at(1)).unwrap();
    world.reconcile(at(1));
    assert_eq!((world.target(2), world.member(2)), (TargetState::Failed, MemberState::Down));
}

#[test]
fn a_failed_target_is_cleared_by_hand_in_a_new_process() {
    let mut world = World::with_six();
    let mut report = TargetReport { failed: true, ..report(2) };
    world.members.heartbeat(&mut world.map, NodeId(2), 2, vec![report.clone()], at(1)).unwrap();
    world.reconcile(at(1));
    let clear = |world: &mut World, n| world.members.clear_target(&mut world.map, TargetId(n));
    assert!(clear(&mut world, 2).unwrap_err().to_string().contains("start the process again"));
    assert!(clear(&mut world, 3).unwrap_err().context.contains("has not failed"));
    report.failed = false;
    world.members.heartbeat(&mut world.map, NodeId(2), 2, vec![report], at(2)).unwrap();
    assert_eq!(world.target(2), TargetState::Failed, "not by itself");
    clear(&mut world, 2).unwrap();
    world.reconcile(at(2));
    assert_eq!((world.target(2), world.member(2)), (TargetState::Up, MemberState::Behind));
}

/// Three hang, and two of them form a group of two copies: one is demoted soon, the others when they count as
/// gone.
#[test]
fn a_target_with_a_stalled_disk_is_left_out_if_not_needed() {
    let mut world = World::with_six();
    crate::decide::group_tests::make_groups(&mut world.map, None, "replica:2".parse().unwrap()).unwrap();
    let mut now = 0;
    let mut after = |world: &mut World, stalled_ms: u32| {
        // Once is not enough: the others may continue a moment later.
        for _ in 0..2 {
            now += 2_000;
            world.beat(now, &[(1, stalled_ms), (2, stalled_ms), (3, stalled_ms), (4, 0), (5, 0), (6, 0)]);
        }
        (1..=3).filter(|n| world.target(*n) == TargetState::Down).count()
    };
    let ms = [7_999, 8_000, 12_999, 13_000];
    assert_eq!(ms.map(|ms| after(&mut world, ms)), [0, 1, 1, 3]);
    let mut hangs = |s: u64| {
        let speed = Speed { stalled: Duration::from_secs(s), ..Speed::default() };
        world.members.note_speed(&world.map, TargetId(1), speed, at(now + 1))
    };
    assert!(
        hangs(20) && !hangs(0) && !hangs(20),
        "it still hangs, it works again, and a new hang is confirmed first"
    );
}

#[test]
fn no_target_is_left_out_while_all_disks_complete_nothing() {
    let mut world = World::with_six();
    let all = |ms: u32| (1..=6).map(|n| (n, ms)).collect::<Vec<_>>();
    for (now, ms) in [(2_000, 9_000), (4_000, 20_000), (6_000, 60_000), (8_000, 60_000)] {
        world.beat(now, &all(ms));
        assert!((1..=6).all(|n| world.target(n) == TargetState::Up), "{ms}");
    }
    // All continue, and their reports come one after the other.
    world.beat(9_000, &[(6, 0), (1, 60_000), (2, 60_000)]);
    world.beat(9_700, &[(1, 0), (2, 60_000)]);
    world.beat(9_900, &all(0));
    assert!((1..=6).all(|n| world.target(n) == TargetState::Up));
    // One does not.
    for now in [10_000, 11_000, 12_000] {
        world.beat(now, &[(1, 30_000), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)]);
    }
    assert_eq!((world.target(1), world.target(6)), (TargetState::Down, TargetState::Up));
}

#[test]
fn a_suspect_is_down_until_it_answers() {
    let mut world = World::with_six();
    world.members.suspects.insert(TargetId(4));
    world.reconcile(at(1));
    assert_eq!(world.target(4), TargetState::Down);
    world.members.suspects.remove(&TargetId(4));
    world.reconcile(at(2));
    assert_eq!((world.target(4), world.member(4)), (TargetState::Up, MemberState::Behind));
}

#[test]
fn a_refused_join_gets_the_reason() {
    let mut world = World::with_six();
    let change = |f: &dyn Fn(&mut Join)| {
        let mut j = join("new", 50, &[9]);
        f(&mut j);
        j
    };
    for (join, says) in [
        (join("s1", 77, &[1]), "running already"),
        (join("other", 77, &[1]), "is served by node \"s1\""),
        (join("new", 77, &[9, 9]), "twice"),
        (change(&|j| j.cluster = Some(ClusterId([2; 16]))), "belongs to cluster"),
        (change(&|j| j.name = "s1".into()), "running already"),
        (change(&|j| j.name = String::new()), "node name"),
        (change(&|j| j.name = "a\nb".into()), "node name"),
        (change(&|j| j.addrs = vec!["http://x".into()]), "address"),
        (change(&|j| j.addrs = vec![]), "no address"),
        (change(&|j| j.role = Role::Meta), "is not a storage node"),
        (change(&|j| j.targets[0].pool = "A B".into()), "pool name"),
    ] {
        let before = world.map.clone();
        let error = world.join(&join, 70, at(1)).unwrap_err();
        assert!(error.to_string().contains(says), "{says}: {error:?}");
        assert_eq!(world.map, before, "a refusal changes nothing");
    }
    world.members.disconnected(1);
    let moved = world.join(&join("other", 77, &[1]), 71, at(2)).unwrap();
    assert_eq!(moved.targets, [TargetId(1)], "a disk may move once its node is gone");
    let mut other_role = join("s1", 1, &[]);
    other_role.role = Role::Meta;
    assert!(world.join(&other_role, 72, at(3)).unwrap_err().context.contains("another role"));
    let mut pool = join("s2", 2, &[2]);
    pool.targets[0].pool = "nvme".into();
    assert!(world.join(&pool, 2, at(3)).unwrap_err().to_string().contains("keeps its pool"));
}

/// Statements of nodes and the coordinator about targets are in message bodies; the map is not.
#[test]
fn messages_about_many_targets_fit_into_a_body() {
    let reports = |count: u32| (1..=count).map(report).collect::<Vec<_>>();
    let targets = join("s1", 1, &[7]).targets;
    let history = TargetHistory { begun: vec![RunId(1); 64], ..targets[0].history.clone() };
    let announced = AnnouncedTarget { pool: "p".repeat(64), history, ..targets[0].clone() };
    let targets = vec![announced; TARGETS_MAX];
    let largest = TARGETS_MAX as u32;
    let status = ClusterStatus {
        map: Arc::new(ClusterMap::absent()),
        targets: reports(50 * 96),
        uptime_ms: 1,
        links: vec![],
        program: Program::this(),
    };
    for (what, bytes) in [
        ("join", Join { targets, ..join("s1", 1, &[]) }.to_bytes()),
        ("heartbeat", Heartbeat { node: NodeId(1), targets: reports(largest) }.to_bytes()),
        ("status", status.to_bytes()),
    ] {
        assert!(bytes.len() < BODY_MAX as usize / 2, "{what}: {} bytes", bytes.len());
    }
}
