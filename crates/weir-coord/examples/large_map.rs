//! What a large cluster map costs: its placement, its size, and how soon all observers know of a change.
//!
//! `cargo run --release -p weir-coord --example large_map -- [SERVERS [DISKS [OBSERVERS]]]`; 50, 96 and 2,000
//! by default. Coordinator, storage nodes without disks, and observers are tasks of one process, connected by
//! TCP over loopback. An observer asks for news as a client does and decodes them; it does not hold a map,
//! for 2,000 of them would not fit into memory.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use weir_coord::decide::{Candidate, group_count, place};
use weir_coord::{Cluster, CoordConfig, Coordinator, Membership, Observer};
use weir_env::{Addr, Env, Instant, TaskHandle};
use weir_proto::coord::{AnnouncedTarget, GetMap, TargetHistory, TargetReport};
use weir_proto::map::{Role, Scheme, TargetState};
use weir_proto::news::MapNews;
use weir_proto::{DiskUuid, NodeId, TargetId, Wire};
use weir_rpc::{Connection, Identity, NoService, connect, serve};

const PATIENCE: Duration = Duration::from_secs(60);
/// Each target that flaps is one measurement.
const TIMES: u32 = 3;

fn seconds(env: &Env, from: Instant) -> f64 {
    env.clock.now().since(from).as_secs_f64()
}

fn time_placement(env: &Env, scheme: Scheme, servers: u32, disks: u32) {
    let candidate = |n: u32| Candidate {
        target: TargetId(n + 1),
        node: NodeId(n / disks),
        host: format!("h{}", n / disks),
        capacity: 12 << 40,
    };
    let candidates: Vec<Candidate> = (0..servers * disks).map(candidate).collect();
    for _ in 0..TIMES {
        let from = env.clock.now();
        let groups = place(scheme, &candidates, group_count(scheme, candidates.len()));
        let took = seconds(env, from);
        println!("{servers} x {disks} disks, {scheme}: {} groups placed in {took:.3} s", groups.len());
    }
}

/// The storage node of one server; one of its targets fails on request.
async fn server(env: &Env, at: &Addr, n: u32, disks: u32, fails: Arc<[AtomicBool]>) -> Cluster {
    let who = observer(format!("s{n}"), Role::Storage, at);
    let cluster = Cluster::observe(env, who, PATIENCE).await.expect("observe");
    let announced = |disk: u32| AnnouncedTarget {
        uuid: DiskUuid((u128::from(n) << 32 | u128::from(disk)).to_le_bytes()),
        pool: "hdd".into(),
        capacity: 1 << 44,
        history: TargetHistory::default(),
    };
    let addrs = vec![format!("tcp:127.0.0.1:{}", 20_000 + n).parse().expect("an address")];
    let membership = Membership { addrs, targets: (0..disks).map(announced).collect() };
    let report = move |disk: u32| TargetReport {
        target: TargetId(n * disks + disk + 1),
        failed: fails.get((n * disks + disk) as usize).is_some_and(|f| f.load(Ordering::Relaxed)),
        capacity: 1 << 44,
        used: 0,
        under_replicated_cells: 0,
        damaged_blocks: 0,
        repaired_blocks: 0,
        stalled_ms: 0,
        position: 0,
    };
    let reports = Arc::new(move || (0..disks).map(&report).collect());
    cluster.join(membership, reports).await.expect("join");
    cluster
}

fn observer(name: String, role: Role, at: &Addr) -> Observer {
    let host = name.clone();
    Observer { coordinators: vec![at.clone()], cluster: None, name, role, host, trust: None }
}

/// Follows the map from `known` on without an end; reports when it got each version, and in how many bytes.
async fn follow(
    env: Env,
    connection: Connection,
    mut known: u64,
    reported: mpsc::Sender<(u64, Instant, usize)>,
) {
    loop {
        let ask = GetMap { newer_than: known, wait_ms: 50_000 };
        let (_, payload) = connection.call(&ask, Vec::new(), PATIENCE).await.expect("news");
        known = match MapNews::from_bytes(&payload) {
            Ok(MapNews::Steps { from, steps, .. }) => from + steps.len() as u64,
            Ok(MapNews::Whole { map }) => map.version,
            Err(_) => continue, // nothing newer
        };
        if reported.send((known, env.clock.now(), payload.len())).await.is_err() {
            return;
        }
    }
}

async fn run(env: Env, servers: u32, disks: u32, observers: usize) {
    let scheme: Scheme = "ec:10+2".parse().expect("a scheme");
    time_placement(&env, scheme, servers, disks);
    let dir = tempfile::tempdir().expect("a directory");
    let config = CoordConfig { new: true, ..CoordConfig::new(scheme, (servers * disks) as usize) };
    let coordinator = Coordinator::open(env.clone(), dir.path(), config).await.expect("a coordinator");
    let identity = Identity::new(&env, "c", Role::Coordinator, Some(coordinator.cluster()));
    let any: [Addr; 1] = ["tcp:127.0.0.1:0".parse().expect("an address")];
    let door = serve(&env, &any, identity, coordinator.clone()).await.expect("serve");
    let at = door.addrs()[0].clone();
    let fails: Arc<[AtomicBool]> = (0..TIMES).map(|_| AtomicBool::new(false)).collect();
    let from = env.clock.now();
    let mut nodes = Vec::new();
    for n in 0..servers {
        nodes.push(server(&env, &at, n, disks, fails.clone()).await);
    }
    let admin = observer("admin".into(), Role::Console, &at);
    let admin = Cluster::observe(&env, admin, PATIENCE).await.expect("observe");
    let map = admin.wait_for(PATIENCE, |map| !map.groups.is_empty()).await.expect("groups");
    let (took, bytes) = (seconds(&env, from), map.to_bytes().len());
    println!(
        "{servers} servers joined and {} groups made in {took:.2} s; map {bytes} bytes",
        map.groups.len()
    );
    time_turns(&env, &admin).await;
    let (report, mut reported) = mpsc::channel(2 * observers);
    let mut followers = Vec::new();
    for n in 0..observers {
        let identity = Identity::new(&env, format!("observer-{n}").as_str(), Role::Mount, None);
        let connection = connect(&env, &at, &identity, Arc::new(NoService)).await.expect("connect");
        let follow = follow(env.clone(), connection, map.version, report.clone());
        followers.push(env.tasks.spawn("observer", follow));
    }
    for (n, fails) in fails.iter().enumerate() {
        let target = TargetId(n as u32 + 1);
        let state = |state| {
            move |map: &weir_proto::map::ClusterMap| map.target(target).is_some_and(|t| t.state == state)
        };
        fails.store(true, Ordering::Relaxed);
        let failed = admin.wait_for(PATIENCE, state(TargetState::Failed)).await.expect("it fails");
        wait_for_all(&mut reported, observers, failed.version).await;
        fails.store(false, Ordering::Relaxed);
        env.clock.sleep(Duration::from_secs(3)).await; // until a heartbeat says so
        let from = env.clock.now();
        let cleared = admin.clear_target(target).await.expect("clear");
        let (last, most) = wait_for_all(&mut reported, observers, cleared.version).await;
        let took = last.since(from).as_secs_f64();
        println!(
            "{target} returned: {observers} observers knew within {took:.3} s, {most} bytes each at most"
        );
    }
    followers.iter().for_each(TaskHandle::abort);
    drop(nodes);
}

/// A question about the map's owner, whom every heartbeat has to pass, too.
async fn time_turns(env: &Env, admin: &Cluster) {
    let mut took = Vec::new();
    for _ in 0..200 {
        let from = env.clock.now();
        admin.status().await.expect("status");
        took.push(seconds(env, from) * 1e3);
    }
    took.sort_by(f64::total_cmp);
    println!("the owner of the map answers within {:.1} ms (p50), {:.1} ms (p99)", took[100], took[198]);
}

/// When the last observer knew of a version, and the most bytes that one got at once.
async fn wait_for_all(
    reported: &mut mpsc::Receiver<(u64, Instant, usize)>,
    observers: usize,
    version: u64,
) -> (Instant, usize) {
    let (mut missing, mut last, mut most) = (observers, Instant::default(), 0);
    while missing > 0 {
        let (known, at, bytes) = reported.recv().await.expect("observers continue");
        if known >= version {
            (missing, last, most) = (missing - 1, last.max(at), most.max(bytes));
        }
    }
    (last, most)
}

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().expect("a number"));
    let mut next = |default: u32| args.next().unwrap_or(default);
    let (servers, disks, observers) = (next(50), next(96), next(2000));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run(weir_env::real::env(), servers, disks, observers as usize));
}
