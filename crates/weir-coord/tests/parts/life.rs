//! Claims about signs of life: what keeps a target in its groups, and what takes it out.
use super::*;
use weir_env::Pressure;
use weir_env::sim::DiskFaults;
use weir_proto::access::AuditRule;
use weir_proto::coord::Heartbeat;
use weir_proto::map::Group;
use weir_proto::{Epoch, PgId};

const T5: TargetId = TargetId(5);

fn group_of_six(map: &ClusterMap) -> Group {
    let first = map.groups_of("hdd", "ec:4+2".parse().unwrap()).unwrap().0;
    map.group(first).unwrap().clone()
}

async fn suspects(client: &Cluster, suspicion: Suspicion) -> MemberState {
    let Group { id, epoch, .. } = group_of_six(&client.map());
    let map = client.suspect_target(T5, id, epoch, suspicion, "late").await.unwrap();
    group_of_six(&map).members.iter().find(|m| m.target == T5).unwrap().state
}

#[test]
fn a_live_process_stays_however_late_its_targets_answer() {
    let lab = Lab::new(5);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let nodes = lab.six().await;
        let before = client.wait_for(PATIENCE, all_current).await.unwrap();
        nodes[4].service.hangs.store(true, Ordering::Relaxed);
        *nodes[4].service.life.lock().unwrap() = TargetLife { oldest_ms: 60_000, ..TargetLife::default() };
        for _ in 0..20 {
            assert_eq!(suspects(&client, Suspicion::Unreachable).await, MemberState::Current);
            assert_eq!(suspects(&client, Suspicion::Failed).await, MemberState::Current);
            lab.world.sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(client.map().version, before.version, "no epoch was raised");
        let shown = client.lives().await.unwrap().nodes;
        let of_five = shown.iter().find(|n| n.life.targets.iter().any(|t| t.target == T5)).unwrap();
        let oldest_ms = of_five.life.targets[0].oldest_ms;
        assert!((20_000..21_000).contains(&oldest_ms), "as long as its process runs: {oldest_ms}");
        let wrong = client.report_target(TargetId(77), PgId(0), Epoch(1), "?").await.unwrap_err();
        assert_eq!(wrong.kind, ErrorKind::Invalid);
    });
}

/// As by SIGSTOP: nothing of the process runs, and all of its connections stay.
#[test]
fn a_process_stopped_for_two_seconds_stays_for_longer_leaves() {
    let lab = Lab::new(31);
    lab.world.run(async {
        let mut config = CoordConfig::new("ec:4+2".parse().unwrap(), 6);
        config.settings.target_silence_ms = 3_000;
        let _c = lab.coordinator_with(config).await;
        let client = lab.client("m1").await;
        let _nodes = lab.six().await;
        let before = client.wait_for(PATIENCE, all_current).await.unwrap();
        for _ in 0..4 {
            lab.world.pause("s5");
            assert_eq!(suspects(&client, Suspicion::Unreachable).await, MemberState::Current);
            assert_eq!(suspects(&client, Suspicion::Slow).await, MemberState::Current);
            lab.world.sleep(Duration::from_millis(400)).await;
            lab.world.resume("s5");
            lab.world.sleep(Duration::from_secs(2)).await;
        }
        lab.world.pause("s5");
        lab.world.sleep(Duration::from_secs(2)).await;
        lab.world.resume("s5");
        lab.world.sleep(Duration::from_secs(1)).await;
        assert_eq!(client.map().version, before.version, "no epoch was raised");
        lab.world.pause("s5");
        client.wait_for(Duration::from_millis(3_500), target_is(5, TargetState::Down)).await.unwrap();
        lab.world.sleep(Duration::from_secs(3)).await;
        lab.world.resume("s5");
        client.wait_for(Duration::from_secs(3), target_is(5, TargetState::Up)).await.unwrap();
    });
}

/// A member of a release that gives no signs of life but heartbeats.
async fn older_release(lab: &Lab, n: u8) -> (Arc<Storage>, Server) {
    let env = lab.world.node(&format!("s{n}"));
    let who = Identity::new(&env, format!("s{n}").as_str(), Role::Storage, None);
    let service = Arc::new(Storage::default());
    let server = serve(&env, &[addr(n)], who.clone(), service.clone()).await.unwrap();
    let callbacks = Arc::new(weir_rpc::NoService);
    let connection = weir_rpc::connect(&env, &addr(100), &who, callbacks).await.unwrap();
    let join = Join {
        cluster: None,
        name: format!("s{n}"),
        instance: who.instance,
        role: Role::Storage,
        host: format!("host-s{n}"),
        addrs: vec![addr(n).to_string()],
        targets: vec![AnnouncedTarget {
            uuid: DiskUuid([n; 16]),
            pool: "hdd".into(),
            capacity: 100,
            history: TargetHistory::default(),
        }],
        program: Program::this(),
    };
    let (joined, _) = connection.call(&join, vec![], PATIENCE).await.unwrap();
    let clock = env.clock.clone();
    env.tasks.spawn("heartbeats", async move {
        loop {
            let beat = Heartbeat { node: joined.node, targets: vec![report(TargetId(u32::from(n)))] };
            let _ = connection.call(&beat, vec![], PATIENCE).await;
            clock.sleep(Duration::from_millis(500)).await;
        }
    });
    (service, server)
}

#[test]
fn a_member_of_an_older_release_is_asked_at_its_data_port() {
    let lab = Lab::new(32);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let mut nodes = Vec::new();
        for n in [1, 2, 3, 4] {
            nodes.push(lab.storage(n).await.unwrap());
        }
        let (five, _five) = older_release(&lab, 5).await;
        let _six = lab.storage(6).await.unwrap();
        client.wait_for(PATIENCE, all_current).await.unwrap();
        assert_eq!(suspects(&client, Suspicion::Failed).await, MemberState::Current, "it answers");
        five.hangs.store(true, Ordering::Relaxed);
        assert_eq!(suspects(&client, Suspicion::Unreachable).await, MemberState::Down);
        five.hangs.store(false, Ordering::Relaxed);
        client.wait_for(Duration::from_secs(10), target_is(5, TargetState::Up)).await.unwrap();
        drop(nodes);
    });
}

#[test]
fn a_slow_target_leaves_only_while_the_others_are_much_faster() {
    let lab = Lab::new(16);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let nodes = lab.six().await;
        client.wait_for(PATIENCE, all_current).await.unwrap();
        let before = client.map();
        let oldest = |n: usize, oldest_ms| nodes[n - 1].service.life.lock().unwrap().oldest_ms = oldest_ms;
        lab.world.sleep(Duration::from_secs(10)).await;
        // All are slow: none leaves.
        (1..=6).for_each(|n| oldest(n, 4_000));
        assert_eq!(suspects(&client, Suspicion::Slow).await, MemberState::Current);
        // One other is as slow.
        (1..=6).filter(|n| *n != 5 && *n != 2).for_each(|n| oldest(n, 0));
        assert_eq!(suspects(&client, Suspicion::Slow).await, MemberState::Current);
        oldest(2, 0);
        // Another one may be gone.
        lab.world.pause("s2");
        assert_eq!(suspects(&client, Suspicion::Slow).await, MemberState::Current);
        lab.world.resume("s2");
        // Most of the machines are short of processors.
        let pressed = Pressure { cpu: 9500, io: 0, memory: 0 };
        ["s1", "s2", "s3"].iter().for_each(|name| lab.world.set_pressure(name, Some(pressed)));
        assert_eq!(suspects(&client, Suspicion::Slow).await, MemberState::Current);
        assert_eq!(client.map().version, before.version, "no epoch was raised");
        ["s1", "s2", "s3"].iter().for_each(|name| lab.world.set_pressure(name, None));
        assert_eq!(suspects(&client, Suspicion::Slow).await, MemberState::Down, "all others are fast");
    });
}

#[test]
fn a_disk_that_hangs_alone_takes_its_target_out_and_many_do_not() {
    let lab = Lab::new(33);
    lab.world.run(async {
        let _c = lab.coordinator().await;
        let client = lab.client("m1").await;
        let nodes = lab.six().await;
        let before = client.wait_for(PATIENCE, all_current).await.unwrap();
        let stalls = |n: usize, ms| nodes[n - 1].service.life.lock().unwrap().stalled_ms = ms;
        lab.world.sleep(Duration::from_secs(30)).await;
        (1..=6).for_each(|n| stalls(n, 12_000));
        lab.world.sleep(Duration::from_secs(5)).await;
        assert_eq!(client.map().version, before.version, "all hang, or all are slow");
        let pressed = Pressure { cpu: 0, io: 10_000, memory: 3000 };
        lab.world.set_pressure("s5", Some(pressed));
        (1..=6).filter(|n| *n != 5).for_each(|n| stalls(n, 0));
        lab.world.sleep(Duration::from_secs(5)).await;
        assert_eq!(client.map().version, before.version, "its process may be what waits");
        lab.world.set_pressure("s5", Some(Pressure { memory: 0, ..pressed }));
        client.wait_for(Duration::from_secs(5), target_is(5, TargetState::Down)).await.unwrap();
        stalls(5, 0);
        client.wait_for(Duration::from_secs(5), target_is(5, TargetState::Up)).await.unwrap();
    });
}

/// Thousands of requests wait for the owner of the map, which writes its store for each batch of them.
#[test]
fn signs_of_life_do_not_wait_behind_reports_of_others() {
    let lab = Lab::new(35);
    lab.world.run(async {
        let mut config = CoordConfig::new("ec:4+2".parse().unwrap(), 6);
        config.settings.target_silence_ms = 1_000;
        let _c = lab.coordinator_with(config).await;
        let client = lab.client("m1").await;
        let _nodes = lab.six().await;
        client.wait_for(PATIENCE, all_current).await.unwrap();
        // Less than the interval at which the owner counts itself as late.
        let slow = DiskFaults { delay: Duration::from_millis(40), ..DiskFaults::default() };
        lab.world.set_disk_faults("c", slow);
        let mut asked = Vec::new();
        for n in 0..16 {
            asked.push(lab.client(&format!("admin{n}")).await);
        }
        let env = lab.world.node("m1");
        for (n, admin) in asked.iter().enumerate() {
            for of in 0..500 {
                let (admin, opens) = (admin.clone(), of % 2 == 0);
                let rule = AuditRule { volumes: format!("v{n}"), opens, changes: !opens };
                env.tasks.spawn("change", async move { drop(admin.audit_volumes(rule).await) });
            }
        }
        lab.world.sleep(Duration::from_secs(6)).await;
        let map = client.map();
        assert!(map.nodes.iter().all(|n| n.up), "{:?}", map.nodes);
        assert!(all_current(&map));
    });
}
