//! Claims about a coordinator, its members and its observers, in a simulated world.
#[path = "parts/clocks.rs"]
mod clocks;
#[path = "parts/collecting.rs"]
mod collecting;
#[path = "parts/life.rs"]
mod life;
#[path = "parts/overload.rs"]
mod overload;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_coord::identity::{COORDINATOR_FILE, NamespaceIdentity};
use weir_coord::{Cluster, CoordConfig, Coordinator, Membership, Observer, no_reports};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, Env};
use weir_proto::coord::{
    AnnouncedTarget, FinishUpgrade, GetMap, Join, Joined, Suspicion, TargetHistory, TargetReport,
};
use weir_proto::data::{StatTarget, TargetStat};
use weir_proto::life::TargetLife;
use weir_proto::map::{ClusterMap, MemberState, Role, TargetState};
use weir_proto::news::MapNews;
use weir_proto::version::{LEVEL_MAX, Program};
use weir_proto::{ClusterId, DiskUuid, ErrorKind, NamespaceUuid, Request, Result, TargetId, Wire};
use weir_rpc::{Call, Connection, Handled, Identity, Reply, Server, Service, serve};

const PATIENCE: Duration = Duration::from_secs(20);

fn addr(host: u8) -> Addr {
    format!("tcp:10.0.0.{host}:7000").parse().unwrap()
}

/// Answers `StatTarget`, unless it hangs.
#[derive(Default)]
struct Storage {
    hangs: AtomicBool,
    /// Its answers, and the contents of its heartbeats.
    position: AtomicU64,
    position_in_heartbeats: AtomicU64,
    /// Its process's report of its life.
    life: Mutex<TargetLife>,
}
impl Service for Storage {
    fn handle(&self, call: Call) -> Handled {
        if call.method != StatTarget::METHOD {
            return Handled::Now(Err(call.unknown()));
        }
        if self.hangs.load(Ordering::Relaxed) {
            return Handled::Later(Box::pin(std::future::pending()));
        }
        Handled::Now(call.decode::<StatTarget>().map(|asked| {
            Reply::new(&TargetStat {
                report: TargetReport {
                    position: self.position.load(Ordering::Relaxed),
                    ..report(asked.target)
                },
                cells: 0,
                overlay_extents: 0,
                overlay_bytes: 0,
                fragment_bytes_written: 0,
                overlay_bytes_written: 0,
            })
        }))
    }
}
fn report(target: TargetId) -> TargetReport {
    TargetReport {
        target,
        failed: false,
        capacity: 100,
        used: 7,
        under_replicated_cells: 0,
        damaged_blocks: 0,
        repaired_blocks: 0,
        stalled_ms: 0,
        position: 0,
    }
}

struct Node {
    cluster: Cluster,
    service: Arc<Storage>,
    joined: Joined,
    _server: Server,
}

struct Lab {
    world: World,
    doors: Mutex<BTreeMap<String, Server>>,
}

impl Lab {
    fn new(seed: u64) -> Lab {
        Lab { world: World::new(seed, SimConfig::default()), doors: Mutex::default() }
    }
    async fn coordinator(&self) -> Arc<Coordinator> {
        self.coordinator_of(Program::this()).await
    }
    /// With a program of its own.
    async fn coordinator_of(&self, program: Program) -> Arc<Coordinator> {
        let config = CoordConfig::new("ec:4+2".parse().unwrap(), 6);
        self.coordinator_with(CoordConfig { program, ..config }).await
    }
    async fn coordinator_with(&self, mut config: CoordConfig) -> Arc<Coordinator> {
        let env = self.world.node("c");
        config.new = !env.disk.exists(&Path::new("/coord").join(COORDINATOR_FILE));
        let coordinator = Coordinator::open(env.clone(), Path::new("/coord"), config).await.unwrap();
        let identity = Identity::new(&env, "c", Role::Coordinator, Some(coordinator.cluster()));
        let server = serve(&env, &[addr(100)], identity, coordinator.clone()).await.unwrap();
        self.doors.lock().unwrap().insert("c".into(), server);
        coordinator
    }
    fn observer(&self, name: &str, role: Role) -> (Env, Observer) {
        let who = Observer {
            coordinators: vec![addr(100)],
            cluster: None,
            name: name.into(),
            role,
            host: format!("host-{name}"),
            trust: None,
        };
        (self.world.node(name), who)
    }
    async fn client(&self, name: &str) -> Cluster {
        let (env, who) = self.observer(name, Role::Console);
        Cluster::observe(&env, who, PATIENCE).await.unwrap()
    }
    async fn storage(&self, n: u8) -> Result<Node> {
        let (env, who) = self.observer(&format!("s{n}"), Role::Storage);
        let cluster = Cluster::observe(&env, who, PATIENCE).await?;
        let service = Arc::new(Storage::default());
        let server = serve(&env, &[addr(n)], cluster.identity(), service.clone()).await?;
        let announced = AnnouncedTarget {
            uuid: DiskUuid([n; 16]),
            pool: "hdd".into(),
            capacity: 100,
            history: TargetHistory::default(),
        };
        let membership = Membership { addrs: server.addrs().to_vec(), targets: vec![announced] };
        let target = service.clone();
        let reports = Arc::new(move || {
            let position = target.position_in_heartbeats.load(Ordering::Relaxed);
            vec![TargetReport { position, ..report(TargetId(u32::from(n))) }]
        });
        let target = service.clone();
        let lives = Arc::new(move || {
            vec![TargetLife { target: TargetId(u32::from(n)), ..*target.life.lock().unwrap() }]
        });
        let joined = cluster.join_with(membership, reports, lives).await?;
        Ok(Node { cluster, service, joined, _server: server })
    }
    async fn six(&self) -> Vec<Node> {
        let mut nodes = Vec::new();
        for n in 1..=6 {
            let node = self.storage(n).await.unwrap();
            assert_eq!(node.joined.targets, [TargetId(u32::from(n))]);
            nodes.push(node);
        }
        nodes
    }
}

fn target_is(target: u32, state: TargetState) -> impl Fn(&ClusterMap) -> bool {
    move |map| map.target(TargetId(target)).is_some_and(|t| t.state == state)
}
/// How a target stands in all groups, if it stands alike in all of them.
fn member_state(map: &ClusterMap, target: u32) -> Option<MemberState> {
    let members = map.groups.iter().flat_map(|g| &g.members);
    let mut states = members.filter(|m| m.target == TargetId(target)).map(|m| m.state);
    let first = states.next()?;
    states.all(|s| s == first).then_some(first)
}
fn all_current(map: &ClusterMap) -> bool {
    !map.groups.is_empty() && map.groups.iter().all(|g| g.current_count() == g.members.len())
}

#[test]
fn members_join_and_all_observers_see_one_map() {
    let lab = Lab::new(1);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let (one, two) = (lab.client("m1").await, lab.client("m2").await);
        let nodes = lab.six().await;
        let first = one.wait_for(PATIENCE, all_current).await.unwrap();
        let second = two.wait_for(PATIENCE, |m| m.version >= first.version).await.unwrap();
        assert_eq!(first, second);
        assert_eq!(first.groups_of("hdd", "ec:4+2".parse().unwrap()).unwrap().1, 24);
        assert_eq!(nodes[4].cluster.target_of(DiskUuid([5; 16])), Some(TargetId(5)));
        lab.world.sleep(Duration::from_secs(2)).await; // every node has sent a heartbeat
        let status = one.status().await.unwrap();
        assert_eq!(status.targets.iter().map(|t| t.used).sum::<u64>(), 6 * 7);
    });
}

#[test]
fn a_killed_node_is_down_in_100_ms_and_behind_on_return() {
    let lab = Lab::new(2);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let mut nodes = lab.six().await;
        client.wait_for(PATIENCE, all_current).await.unwrap();
        lab.world.kill("s3");
        let map = client.wait_for(Duration::from_millis(100), target_is(3, TargetState::Down)).await.unwrap();
        assert_eq!(member_state(&map, 3), Some(MemberState::Down));
        assert_eq!(member_state(&map, 2), Some(MemberState::Current));

        nodes[2] = lab.storage(3).await.unwrap();
        let map = client.wait_for(PATIENCE, target_is(3, TargetState::Up)).await.unwrap();
        // Nothing can have been written to a group of which it is the only member.
        let states = |map: &ClusterMap, width: usize| {
            let groups = map.groups.iter().filter(|g| g.members.len() >= width);
            groups
                .flat_map(|g| g.members.clone())
                .filter(|m| m.target == TargetId(3))
                .map(|m| m.state)
                .collect::<Vec<_>>()
        };
        assert!(states(&map, 2).iter().all(|s| *s == MemberState::Behind));
        for group in map.groups.iter().filter(|g| g.members.iter().any(|m| m.state == MemberState::Behind)) {
            nodes[2].cluster.caught_up(TargetId(3), group.id, group.epoch).await.unwrap();
        }
        client.wait_for(PATIENCE, all_current).await.unwrap();
    });
}

#[test]
fn a_restarted_coordinator_keeps_map_and_current_members() {
    let lab = Lab::new(3);
    lab.world.run(async {
        let c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let _nodes = lab.six().await;
        let before = client.wait_for(PATIENCE, all_current).await.unwrap();
        drop(c);
        lab.world.power_cut("c");
        lab.doors.lock().unwrap().clear();
        lab.world.sleep(Duration::from_secs(2)).await;
        let c = lab.coordinator().await;
        assert_eq!(*c.map(), *before, "the map that the nodes have seen is kept");
        lab.world.sleep(Duration::from_secs(10)).await;
        let after = client.map();
        assert!(after.version >= before.version && all_current(&after), "{after:?}");
        // And the cluster lives on.
        lab.world.kill("s1");
        client.wait_for(Duration::from_millis(100), target_is(1, TargetState::Down)).await.unwrap();
    });
}

#[test]
fn a_silent_node_is_down_in_time_and_returns_by_itself() {
    let lab = Lab::new(4);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let _nodes = lab.six().await;
        client.wait_for(PATIENCE, all_current).await.unwrap();
        lab.world.partition("s4", "c");
        lab.world.sleep(Duration::from_secs(2)).await;
        assert!(target_is(4, TargetState::Up)(&client.map()), "a short silence is forgiven");
        client.wait_for(Duration::from_secs(8), target_is(4, TargetState::Down)).await.unwrap();
        lab.world.heal("s4", "c");
        client.wait_for(Duration::from_secs(40), target_is(4, TargetState::Up)).await.unwrap();
    });
}

#[test]
fn a_namespace_has_one_leader_and_each_lead_a_higher_epoch() {
    let lab = Lab::new(6);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let meta = async |name: &str| {
            let (env, who) = lab.observer(name, Role::Meta);
            let cluster = Cluster::observe(&env, who, PATIENCE).await.unwrap();
            cluster.join(Membership { addrs: vec![addr(50)], targets: vec![] }, no_reports()).await.unwrap();
            cluster
        };
        let (one, two) = (meta("meta1").await, meta("meta2").await);
        let root = NamespaceIdentity {
            cluster: one.id(),
            name: "root".into(),
            uuid: NamespaceUuid([1; 16]),
            instead_of: None,
        };
        let led = one.lead_namespace(&root, 0).await.unwrap();
        one.record_progress(led.namespace, 7).await.unwrap();
        let refused = two.lead_namespace(&root, 7).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Exists, "{refused:?}");
        lab.world.kill("meta1");
        two.wait_for(PATIENCE, |m| m.nodes.iter().any(|n| n.name == "meta1" && !n.up)).await.unwrap();
        let old = two.lead_namespace(&root, 6).await.unwrap_err();
        assert!(old.kind == ErrorKind::Denied && old.context.contains("an old copy"), "{old:?}");
        let taken = two.lead_namespace(&root, 7).await.unwrap();
        assert_eq!(taken.namespace, led.namespace);
        assert!(taken.leader_epoch > led.leader_epoch);
        let client = lab.client("m1").await;
        assert!(client.meta_leader("root", Arc::new(weir_rpc::NoService)).is_ok());
        assert!(client.meta_leader("other", Arc::new(weir_rpc::NoService)).is_err());
        assert_eq!(
            client.lead_namespace(&root, 7).await.unwrap_err().kind,
            ErrorKind::Stale,
            "it has not joined"
        );
    });
}

#[test]
fn strangers_and_doubles_are_refused_by_name() {
    let lab = Lab::new(7);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let _s1 = lab.storage(1).await.unwrap();
        let (env, mut who) = lab.observer("m9", Role::Mount);
        who.cluster = Some(ClusterId([9; 16]));
        let stranger = Cluster::observe(&env, who, PATIENCE).await.err().unwrap();
        assert_eq!(stranger.kind, ErrorKind::Denied, "{stranger:?}");
        assert!(stranger.context.contains("cluster"), "{stranger:?}");

        let (_, who) = lab.observer("s1", Role::Storage);
        let double = Cluster::observe(&lab.world.node("elsewhere"), who, PATIENCE).await.unwrap();
        let membership = Membership { addrs: vec![addr(50)], targets: vec![] };
        let refused = double.join(membership, no_reports()).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Exists);
        assert!(refused.context.contains("running already"), "{refused:?}");
    });
}

/// A node that joins by hand, with a program of this level that speaks protocol version 1.
async fn joins(lab: &Lab, name: &str, level: u16) -> Result<(Connection, Joined)> {
    let env = lab.world.node(name);
    let program = Program { level, version_max: 1, ..Program::this() };
    let who = Identity::new(&env, name, Role::Meta, None).with(program.clone());
    let connection = weir_rpc::connect(&env, &addr(100), &who, Arc::new(weir_rpc::NoService)).await?;
    let join = Join {
        cluster: None,
        name: name.into(),
        instance: who.instance,
        role: Role::Meta,
        host: name.into(),
        addrs: vec![addr(60).to_string()],
        targets: vec![],
        program,
    };
    let (joined, _) = connection.call(&join, vec![], PATIENCE).await?;
    Ok((connection, joined))
}

#[test]
fn an_upgrade_is_finished_when_all_nodes_know_the_new_level() {
    let lab = Lab::new(21);
    lab.world.run(async {
        drop(lab.coordinator().await);
        lab.doors.lock().unwrap().clear();
        lab.world.power_cut("c");
        let newer = Program { level: LEVEL_MAX + 1, ..Program::this() };
        let mut c = lab.coordinator_of(newer.clone()).await;
        let (_old, _) = joins(&lab, "m1", LEVEL_MAX).await.unwrap();
        let client = lab.client("mount").await;
        let finish = async || {
            let done = client.finish_upgrade().await;
            done.map(|map| map.level).map_err(|e| (e.kind, e.to_string()))
        };
        let (kind, why) = finish().await.unwrap_err();
        assert_eq!(kind, ErrorKind::Unsupported);
        let named = format!("m1 knows level {LEVEL_MAX}, mount knows level {LEVEL_MAX};");
        assert!(why.contains(&named), "{why}");
        let status = client.status().await.unwrap();
        assert_eq!((status.map.level, status.program.level), (LEVEL_MAX, LEVEL_MAX + 1));
        assert_eq!(status.map.nodes[0].program.level, LEVEL_MAX);
        // All are upgraded, and the old client is gone.
        drop(client);
        lab.world.kill("mount");
        lab.world.kill("m1");
        lab.world.sleep(Duration::from_secs(20)).await;
        let (upgraded, joined) = joins(&lab, "m1", LEVEL_MAX + 1).await.unwrap();
        assert_eq!(joined.map.level, LEVEL_MAX, "nothing changes by itself");
        let refused = upgraded.call(&FinishUpgrade {}, vec![], PATIENCE).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Denied, "it is for administrators");
        let newer_of_1 = Program { version_max: 1, ..newer.clone() };
        let who = Identity::new(&lab.world.node("admin"), "admin", Role::Console, None).with(newer_of_1);
        let service = Arc::new(weir_rpc::NoService);
        let admin = weir_rpc::connect(&lab.world.node("admin"), &addr(100), &who, service).await.unwrap();
        let finished = admin.call(&FinishUpgrade {}, vec![], PATIENCE).await.unwrap().0.map.unwrap();
        assert_eq!(finished.level, LEVEL_MAX + 1);
        // From now on older programs are refused by name, and so is an older coordinator.
        let refused = joins(&lab, "m2", LEVEL_MAX).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::Unsupported);
        assert!(refused.context.contains(&format!("\"m2\" knows level {LEVEL_MAX} at most")), "{refused:?}");
        let (env, who) = lab.observer("late", Role::Mount);
        let refused = Cluster::observe(&env, who, PATIENCE).await.err().unwrap();
        assert!(
            refused.context.contains("late at")
                && refused.context.contains(&format!("level {}", LEVEL_MAX + 1)),
            "{refused:?}"
        );
        c.record_positions().await;
        drop((c, upgraded));
        lab.doors.lock().unwrap().clear();
        lab.world.power_cut("c");
        let config = CoordConfig::new("ec:4+2".parse().unwrap(), 6);
        let older = Coordinator::open(lab.world.node("c"), Path::new("/coord"), config).await.err().unwrap();
        assert_eq!(older.kind, ErrorKind::Unsupported);
        c = lab.coordinator_of(newer).await;
        assert_eq!(c.map().level, LEVEL_MAX + 1);
    });
}

#[test]
fn a_node_that_leaves_is_down_at_once() {
    let lab = Lab::new(8);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let nodes = lab.six().await;
        client.wait_for(PATIENCE, all_current).await.unwrap();
        nodes[0].cluster.leave().await.unwrap();
        client.wait_for(Duration::from_millis(100), target_is(1, TargetState::Down)).await.unwrap();
        lab.world.sleep(Duration::from_secs(10)).await;
        assert!(target_is(1, TargetState::Down)(&client.map()), "it does not return by itself");
    });
}

/// The knowledge of a coordinator that starts now about six targets.
fn positions_kept(lab: &Lab) -> Vec<u64> {
    let state = lab.world.node("c").disk.read(Path::new("/coord/coordinator.state")).unwrap();
    let keys = weir_coord::store::read_state(&state).unwrap();
    let kept = weir_coord::records::decode_positions(&keys["positions"].value).unwrap();
    (1..=6).map(|n| kept.get(&TargetId(n)).map_or(0, |(_, position)| *position)).collect()
}

#[test]
fn a_coordinator_that_stops_knows_each_targets_position() {
    let lab = Lab::new(16);
    lab.world.run(async {
        let c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let nodes = lab.six().await;
        let before = client.wait_for(PATIENCE, all_current).await.unwrap();
        nodes.iter().for_each(|node| node.service.position.store(500, Ordering::Relaxed));
        nodes[2].service.hangs.store(true, Ordering::Relaxed);
        // Two storage processes end at the same time.
        let leaving = async {
            lab.world.sleep(Duration::from_millis(100)).await;
            nodes[3].cluster.leave().await.unwrap();
            lab.world.kill("s5");
        };
        tokio::join!(c.record_positions(), leaving);
        drop(c);
        lab.world.power_cut("c");
        lab.doors.lock().unwrap().clear();
        assert_eq!(positions_kept(&lab), [500, 500, 0, 500, 500, 500], "one did not answer");
        let after = lab.coordinator().await.map();
        assert_eq!(after.groups, before.groups, "no target was declared down for that");
    });
}

/// Clients that wait for news search for the next coordinator then.
#[test]
fn a_coordinator_that_stops_answers_those_that_wait_for_news() {
    let lab = Lab::new(17);
    lab.world.run(async {
        let c = lab.coordinator().await;
        let env = lab.world.node("m1");
        let who = Identity::new(&env, "m1", Role::Console, None);
        let connection =
            weir_rpc::connect(&env, &addr(100), &who, Arc::new(weir_rpc::NoService)).await.unwrap();
        let poll = GetMap { newer_than: c.map().version, wait_ms: 10_000 };
        let began = env.clock.now();
        let stops = async {
            lab.world.sleep(Duration::from_millis(100)).await;
            c.record_positions().await;
        };
        let (answer, ()) = tokio::join!(connection.call(&poll, vec![], PATIENCE), stops);
        assert_eq!(answer.unwrap_err().kind, ErrorKind::Unavailable);
        assert!(env.clock.now().since(began) < Duration::from_secs(1));
    });
}

#[test]
fn a_coordinator_without_power_knew_each_targets_position() {
    let lab = Lab::new(17);
    lab.world.run(async {
        let c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let nodes = lab.six().await;
        client.wait_for(PATIENCE, all_current).await.unwrap();
        nodes.iter().for_each(|node| node.service.position_in_heartbeats.store(500, Ordering::Relaxed));
        lab.world.sleep(Duration::from_secs(30)).await; // heartbeats
        drop(c);
        lab.world.power_cut("c");
        nodes.iter().for_each(|node| node.service.position_in_heartbeats.store(0, Ordering::Relaxed)); // old copies
        lab.doors.lock().unwrap().clear();
        let c = lab.coordinator().await;
        c.record_positions().await;
        assert_eq!(positions_kept(&lab), [500; 6]);
    });
}

/// A server with 96 disks.
async fn large_server(lab: &Lab, n: u8) -> Cluster {
    let (env, who) = lab.observer(&format!("s{n}"), Role::Storage);
    let cluster = Cluster::observe(&env, who, PATIENCE).await.unwrap();
    let announced = |disk: u8| AnnouncedTarget {
        uuid: DiskUuid([[n, disk]; 8].concat().try_into().unwrap()),
        pool: "hdd".into(),
        capacity: 100,
        history: TargetHistory::default(),
    };
    let membership = Membership { addrs: vec![addr(n)], targets: (0..96).map(announced).collect() };
    let first = u32::from(n - 1) * 96;
    let reports = Arc::new(move || (first + 1..=first + 96).map(|t| report(TargetId(t))).collect());
    cluster.join(membership, reports).await.unwrap();
    cluster
}

/// The map does not fit into the body of a frame any more.
#[test]
fn ten_servers_of_96_disks_have_one_map() {
    let lab = Lab::new(23);
    lab.world.run(async {
        let _c = lab.coordinator_with(CoordConfig::new("ec:10+2".parse().unwrap(), 960)).await;
        let early = lab.client("early").await;
        let mut servers = Vec::new();
        for n in 1..=10 {
            servers.push(large_server(&lab, n).await);
        }
        let whole = early.wait_for(PATIENCE, all_current).await.unwrap();
        assert!(whole.to_bytes().len() > weir_proto::frame::BODY_MAX as usize);
        let late = lab.client("late").await;
        assert_eq!(late.map(), whole);
        lab.world.kill("s7");
        let flapped = early.wait_for(PATIENCE, target_is(600, TargetState::Down)).await.unwrap();
        for seen in servers.iter().enumerate().filter(|(n, _)| *n != 6).map(|(_, s)| s).chain([&late]) {
            assert_eq!(seen.wait_newer(flapped.version - 1, PATIENCE).await.unwrap(), flapped);
        }
        let status = late.status().await.unwrap();
        assert_eq!((status.targets.len(), &status.map), (960, &flapped));
        lab.world.sleep(Duration::from_secs(10)).await;
        assert_eq!(early.map().nodes.iter().filter(|n| n.up).count(), 9, "their heartbeats arrive");
    });
}

/// A program of protocol version 1 gets the map in the body, as it did before.
#[test]
fn peers_of_both_protocol_versions_have_one_map() {
    let lab = Lab::new(24);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let _nodes = lab.six().await;
        let new = lab.client("new").await;
        let map = new.wait_for(PATIENCE, all_current).await.unwrap();
        let env = lab.world.node("old");
        let mut asked = Vec::new();
        for version_max in [1, 2] {
            let program = Program { version_max, ..Program::this() };
            let who = Identity::new(&env, "old", Role::Console, None).with(program);
            let service = Arc::new(weir_rpc::NoService);
            let connection = weir_rpc::connect(&env, &addr(100), &who, service).await.unwrap();
            asked.push(
                connection.call(&GetMap { newer_than: 0, wait_ms: 0 }, vec![], PATIENCE).await.unwrap(),
            );
        }
        assert_eq!((asked[0].0.map.as_ref(), asked[0].1.len()), (Some(&map), 0));
        let news = MapNews::from_bytes(&asked[1].1).unwrap();
        assert_eq!((&asked[1].0.map, news), (&None, MapNews::Whole { map }));
    });
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let trace = || {
        let lab = Lab::new(42);
        lab.world.run(async {
            let _c = lab.coordinator().await;
            let client = lab.client("m1").await;
            let _nodes = lab.six().await;
            lab.world.kill("s2");
            client.wait_for(PATIENCE, target_is(2, TargetState::Down)).await.unwrap();
        });
        lab.world.trace_hash()
    };
    assert_eq!(trace(), trace());
}

/// The invariant of an observer: the map never goes back, nor does any epoch in it.
fn check_progress(old: &ClusterMap, new: &ClusterMap) {
    assert_eq!(old.cluster, new.cluster);
    assert!(new.version >= old.version, "version {} after {}", new.version, old.version);
    for (before, after) in old.groups.iter().zip(&new.groups) {
        assert!(after.epoch >= before.epoch, "{before:?} became {after:?}");
        let same_members = before.members.iter().map(|m| m.target).eq(after.members.iter().map(|m| m.target));
        assert!(same_members && before.id == after.id, "{before:?} became {after:?}");
        let is_changed = before.members.iter().zip(&after.members).any(|(b, a)| b.state != a.state);
        assert!(
            !is_changed || after.epoch > before.epoch,
            "a change without an epoch: {before:?}, {after:?}"
        );
    }
}

fn live_through_faults(seed: u64) {
    let lab = Lab::new(seed);
    lab.world.run(async {
        let dice = lab.world.rng("faults");
        let mut c = Some(lab.coordinator().await);
        let client = lab.client("m1").await;
        let mut nodes: Vec<Option<Node>> = lab.six().await.into_iter().map(Some).collect();
        let mut seen = client.wait_for(PATIENCE, all_current).await.unwrap();
        for _ in 0..25 {
            let n = dice.below(6) as u8 + 1;
            let (name, slot) = (format!("s{n}"), usize::from(n) - 1);
            match dice.below(6) {
                0 | 1 if nodes[slot].take().is_some() => lab.world.kill(&name),
                2 if nodes[slot].is_none() && c.is_some() => nodes[slot] = lab.storage(n).await.ok(),
                3 => lab.world.partition(&name, "c"),
                4 => lab.world.heal_all(),
                5 if c.take().is_some() => {
                    lab.doors.lock().unwrap().clear();
                    lab.world.power_cut("c");
                }
                _ if c.is_none() => c = Some(lab.coordinator().await),
                _ => {}
            }
            lab.world.sleep(Duration::from_millis(dice.below(3000))).await;
            let now = client.map();
            check_progress(&seen, &now);
            seen = now;
        }
        lab.world.heal_all();
        if c.is_none() {
            c = Some(lab.coordinator().await);
        }
        for n in 1..=6u8 {
            if nodes[usize::from(n) - 1].is_none() {
                nodes[usize::from(n) - 1] = Some(lab.storage(n).await.unwrap());
            }
        }
        let all_up = |m: &ClusterMap| m.targets.iter().all(|t| t.state == TargetState::Up);
        let healed = client.wait_for(Duration::from_secs(60), all_up).await.unwrap();
        check_progress(&seen, &healed);
        assert!(
            healed.groups.iter().all(|g| g.is_writable()),
            "those that were current last hold everything"
        );
        let published = c.unwrap().map();
        assert_eq!((published.cluster, published.version), (healed.cluster, client.map().version));
    });
}

#[test]
fn maps_and_epochs_never_go_back_after_failures() {
    for seed in 0..40 {
        let lived = std::panic::catch_unwind(|| live_through_faults(seed));
        assert!(lived.is_ok(), "seed {seed} failed: see above");
    }
}

/// As on a machine whose processor is taken for ten times the silence that is forgiven.
#[test]
fn a_stalled_coordinator_declares_no_node_dead() {
    let lab = Lab::new(12);
    let world = lab.world.clone();
    lab.world.clone().run(async move {
        let _coordinator = lab.coordinator().await;
        let _nodes = lab.six().await;
        let client = lab.client("o").await;
        let map = client.wait_for(PATIENCE, all_current).await.unwrap();
        for _ in 0..3 {
            world.pause("c");
            world.sleep(Duration::from_secs(10)).await;
            world.resume("c");
            world.sleep(Duration::from_secs(3)).await;
        }
        assert_eq!(client.map().version, map.version, "no target went down meanwhile");
        // A node that is silent while it is checked is down all the same.
        world.pause("s2");
        let down = client.wait_for(PATIENCE, target_is(2, TargetState::Down)).await.unwrap();
        assert!(down.version > map.version);
    });
}
