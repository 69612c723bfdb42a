//! Claims about news: changes lead to exactly the new map, and are small.
use super::*;
use crate::map::{NamespaceCopy, Role, RunSeen, TargetState};
use crate::version::Program;
use crate::{DiskUuid, NamespaceUuid, NodeId};
use proptest::prelude::*;

fn target(n: u32) -> Target {
    Target {
        id: TargetId(n),
        uuid: DiskUuid([n as u8; 16]),
        node: NodeId(1 + n % 3),
        pool: "hdd".into(),
        state: TargetState::Up,
        capacity: 1 << 40,
        last: RunSeen::default(),
        whole: RunSeen::default(),
    }
}

fn node(n: u32) -> Node {
    let (name, host) = (format!("s{n}"), format!("h{n}"));
    let addrs = vec!["tcp:10.0.0.1:7000".into()];
    Node { id: NodeId(n), name, role: Role::Storage, host, addrs, up: true, program: Program::this() }
}

fn namespace(n: u32) -> NamespaceEntry {
    NamespaceEntry {
        id: NamespaceId(n),
        name: format!("n{n}"),
        uuid: NamespaceUuid([n as u8; 16]),
        leader: None,
        leader_epoch: Epoch(1),
    }
}

fn group(n: u32, targets: &[u32]) -> Group {
    let (epoch, lost_at) = (Epoch(1), Epoch(0));
    let member =
        |t: &u32| Member { target: TargetId(*t), state: MemberState::Current, since: epoch, lost_at };
    let scheme = Scheme { data: targets.len() as u8 - 1, parity: 1 };
    Group { id: PgId(n), pool: "hdd".into(), scheme, epoch, members: targets.iter().map(member).collect() }
}

fn small_map() -> ClusterMap {
    ClusterMap {
        cluster: ClusterId([7; 16]),
        version: 5,
        nodes: (1..=3).map(node).collect(),
        targets: (1..=6).map(target).collect(),
        groups: (0..4).map(|n| group(n, &[1 + n % 3, 4, 5, 6])).collect(),
        namespaces: (1..=3).map(namespace).collect(),
        ..ClusterMap::absent()
    }
}

/// A random change of a map; the coordinator's changes are combinations of these.
fn disturb(map: &mut ClusterMap, (what, which, value): (u8, usize, u64)) {
    let at = |len: usize| which % len.max(1);
    let (groups, nodes, targets) = (map.groups.len(), map.nodes.len(), map.targets.len());
    match what {
        0 => map.level = value as u16,
        1 => map.settings.lease_ms = value as u32,
        2 => map.nodes[at(nodes)].up = value % 2 == 0,
        3 => map.nodes.push(node(100 + nodes as u32)),
        4 => map.targets[at(targets)].state = TargetState::ALL[value as usize % 3],
        5 => map.targets.push(target(100 + targets as u32)),
        6 => map.targets[at(targets)].last.position = value,
        7 => map.groups.push(group(groups as u32, &[1, 2, 3])),
        8 => {
            // Like the coordinator's transitions: current members follow the epoch.
            let group = &mut map.groups[at(groups)];
            group.epoch = Epoch(group.epoch.0 + 1);
            let place = value as usize % group.members.len();
            group.members[place].state = MemberState::ALL[value as usize / 7 % 3];
            for member in group.members.iter_mut().filter(|m| m.state == MemberState::Current) {
                (member.since, member.lost_at) = (group.epoch, Epoch(0));
            }
        }
        9 => map.groups[at(groups)].members[0].lost_at = Epoch(value),
        10 => map.groups[at(groups)].members[1].target = TargetId(value as u32),
        11 => map.groups[at(groups)].members[1].since = Epoch(value),
        12 => map.namespaces.push(namespace(100 + value as u32 % 1000 * 1000 + which as u32 % 1000)),
        13 if !map.namespaces.is_empty() => {
            map.namespaces.remove(which % map.namespaces.len());
        }
        14 => map.last_namespace = NamespaceId(value as u32),
        15 => map.removed.push(RemovedNode { name: format!("r{value}"), serial: value, until: 1 }),
        16 => map.authorities.push([value as u8; 16]),
        17 => {
            map.audits.push(AuditRule { volumes: format!("v{value}"), opens: true, changes: value % 2 == 0 })
        }
        18 => {
            let copy = NamespaceCopy { node: NodeId(3), state: MemberState::Behind, since: Epoch(value) };
            let namespace = NamespaceId(value as u32);
            map.copies.push(NamespaceCopies { namespace, wanted: 3, members: vec![copy] })
        }
        19 => {
            let (group, to) = (PgId(value as u32), TargetId(which as u32));
            map.moves.push(Move { group, place: 1, to, closed_in: Epoch(value) });
            map.generations.push(group);
            map.last_target = to;
            map.full.push(to);
        }
        _ => map.namespaces.iter_mut().for_each(|entry| entry.leader = Some(NodeId(value as u32))),
    }
}

proptest! {
    #[test]
    fn steps_lead_to_the_very_map(
        versions in prop::collection::vec(
            prop::collection::vec((0u8..21, 0usize..1000, 0u64..1 << 40), 0..4), 1..20),
        known in 0usize..20,
    ) {
        let mut map = small_map();
        let (mut all, mut steps) = (vec![Arc::new(map.clone())], Vec::new());
        for events in versions {
            events.into_iter().for_each(|event| disturb(&mut map, event));
            map.version += 1;
            let step = changes(&all[all.len() - 1], &map).expect("these changes can be carried");
            steps.push(step);
            all.push(Arc::new(map.clone()));
        }
        let known = &all[known % all.len()];
        let encoded: Vec<u8> = std::iter::once(MapNews::steps_head(map.cluster, 5, steps.len()))
            .chain(steps.iter().map(Wire::to_bytes)).collect::<Vec<_>>().concat();
        let news = MapNews::Steps { cluster: map.cluster, from: 5, steps };
        prop_assert_eq!(&news.to_bytes(), &encoded, "steps that were encoded one by one");
        let news = MapNews::from_bytes(&encoded).unwrap();
        let after = news.apply(known).unwrap().unwrap_or_else(|| known.clone());
        prop_assert_eq!(&*after, &map);
    }
}

#[test]
fn differences_that_no_change_expresses_need_the_whole_map() {
    let old = small_map();
    let differs = |change: &dyn Fn(&mut ClusterMap)| {
        let mut new = old.clone();
        change(&mut new);
        changes(&old, &new).is_none()
    };
    assert!(differs(&|map| map.cluster = ClusterId([8; 16])));
    assert!(differs(&|map| map.targets.swap(0, 1)));
    assert!(differs(&|map| drop(map.nodes.pop())));
    assert!(differs(&|map| map.namespaces.reverse()));
    assert!(!differs(&|map| drop(map.namespaces.remove(1))));
    assert_eq!(changes(&old, &old), Some(Vec::new()));
}

#[test]
fn news_that_do_not_fit_are_refused() {
    let known = Arc::new(small_map());
    let news = |from, steps| MapNews::Steps { cluster: known.cluster, from, steps };
    assert_eq!(news(6, vec![vec![]]).apply(&known).unwrap_err().kind, crate::ErrorKind::Stale);
    assert_eq!(news(4, vec![vec![]]).apply(&known), Ok(None), "nothing is newer");
    let gap = MapChange::Group { group: group(9, &[1, 2]) };
    let place = MapChange::Members {
        group: PgId(1),
        epoch: Epoch(2),
        away: vec![MemberAway { place: 4, state: MemberState::Down, since: Epoch(1), lost_at: Epoch(0) }],
    };
    for bad in [gap, place] {
        assert_eq!(news(5, vec![vec![bad]]).apply(&known).unwrap_err().kind, crate::ErrorKind::Invalid);
    }
    let other = MapNews::Steps { cluster: ClusterId([1; 16]), from: 5, steps: vec![vec![]] };
    assert_eq!(other.apply(&known).unwrap_err().kind, crate::ErrorKind::Denied);
}

/// Replies to peers of protocol version 1 carry the map in their body.
#[test]
fn an_answer_without_a_map_keeps_the_layout_of_its_body() {
    let mut joined = Joined { node: NodeId(1), targets: vec![], map: Arc::new(small_map()), heartbeat_ms: 9 };
    let map = joined.take_map().unwrap();
    assert_eq!(*map, small_map());
    let mut read = Joined::from_bytes(&joined.to_bytes()).unwrap();
    assert_eq!((read.take_map(), read.heartbeat_ms), (None, 9));
    read.put_map(map.clone());
    assert_eq!(read.map, map);
}

#[test]
fn fields_of_a_level_are_reported_in_clusters_of_that_level() {
    for (level, is_carried, of_copies) in [(1, false, false), (2, true, false), (3, true, true)] {
        let audits = vec![AuditRule { volumes: "v".into(), opens: true, changes: false }];
        let map = ClusterMap { level, authorities: vec![[7; 16]], audits, ..small_map() };
        let carried = ClusterMap::from_bytes(&map.to_bytes()).unwrap();
        assert_eq!(carried == map, is_carried, "level {level}");
        let silent = ClusterMap { authorities: vec![], audits: vec![], ..map };
        assert_eq!(ClusterMap::from_bytes(&silent.to_bytes()), Ok(silent.clone()));
        let copies = vec![NamespaceCopies { namespace: NamespaceId(1), wanted: 2, members: vec![] }];
        let map = ClusterMap { copies, ..silent.clone() };
        let carried = ClusterMap::from_bytes(&map.to_bytes()).unwrap();
        assert_eq!(carried == map, of_copies, "level {level}");
        let moves = vec![Move { group: PgId(0), place: 1, to: TargetId(7), closed_in: Epoch(0) }];
        let (generations, last_target) = (vec![PgId(1)], TargetId(9));
        let map = ClusterMap { moves, generations, last_target, ..silent };
        let carried = ClusterMap::from_bytes(&map.to_bytes()).unwrap();
        assert_eq!(carried == map, of_copies, "level {level}: growth came with the copies");
    }
}
