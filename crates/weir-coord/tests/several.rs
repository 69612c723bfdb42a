//! Three coordinators share an etcd, in a simulated world in which coordinators die, stall and are cut off,
//! and answers of etcd are lost or late. Claims: an acknowledged change stays; a status from any coordinator
//! shows every change that was acknowledged before the request; after all faults have ended, one coordinator
//! leads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_coord::etcd::sim::{SimEtcd, Way, Weather};
use weir_coord::etcd::{Etcd, EtcdConfig};
use weir_coord::standbys::{Standbys, attend};
use weir_coord::store::Store;
use weir_coord::{Cluster, CoordConfig, Coordinator, Observer, lead};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, Env, Rng};
use weir_proto::home_rule::{HOME_RULES_MAX, HomeRule};
use weir_proto::map::{ClusterMap, Role};
use weir_proto::{ClusterId, Error, Result};
use weir_rpc::{Identity, serve};

const CLUSTER: ClusterId = ClusterId([7; 16]);
const COORDINATORS: [&str; 3] = ["c0", "c1", "c2"];
const SEEDS: u64 = 40;
const FAULTS: u64 = 10;

#[derive(Clone)]
struct Lab {
    world: World,
    etcd: SimEtcd,
    weather: Arc<BTreeMap<&'static str, Arc<Mutex<Weather>>>>,
    /// Changes that were acknowledged.
    acknowledged: Arc<Mutex<BTreeSet<String>>>,
    statuses: Arc<Mutex<u64>>,
}

fn addr(name: &str) -> Addr {
    format!("tcp:10.0.0.{}:7000", &name[1..]).parse().unwrap()
}

fn places(map: &ClusterMap) -> BTreeSet<String> {
    map.homes.iter().map(|rule| rule.place.clone()).collect()
}

/// As the program runs it: to the end of its lead, which is an error.
async fn coordinator(env: Env, lab: Lab, name: &'static str) -> Result<()> {
    let config = EtcdConfig {
        endpoints: vec!["http://sim:1".into(), "http://sim:2".into()],
        prefix: "/w/".into(),
        ..EtcdConfig::default()
    };
    let way = Way {
        env: env.clone(),
        etcd_env: lab.world.node("etcd"),
        etcd: lab.etcd.clone(),
        weather: lab.weather[name].clone(),
    };
    let store = Etcd::through(&env, &config, Arc::new(way));
    let lead = lead(&env, store.clone(), name, |_| ()).await?;
    let config = CoordConfig {
        cluster: Some(CLUSTER),
        new: true,
        name: name.to_owned(),
        term: Some(lead.term()),
        ..CoordConfig::new("single".parse().unwrap(), 1)
    };
    let coordinator = Coordinator::open_store(env.clone(), store, config).await?;
    let identity = Identity::new(&env, name, Role::Coordinator, Some(CLUSTER));
    let _server = serve(&env, &[addr(name)], identity, coordinator.clone()).await?;
    Err(coordinator.lost().await)
}

impl Lab {
    fn new(seed: u64) -> Lab {
        Lab {
            world: World::new(seed, SimConfig::default()),
            etcd: SimEtcd::default(),
            weather: Arc::new(COORDINATORS.map(|name| (name, Arc::default())).into()),
            acknowledged: Arc::default(),
            statuses: Arc::default(),
        }
    }

    /// As a unit of systemd does: a process that has ended is started again.
    fn start_missing(&self) {
        for name in COORDINATORS {
            if self.world.is_up(name) {
                continue;
            }
            let (env, lab) = (self.world.node(name), self.clone());
            env.clone().tasks.spawn("coordinator of a test", async move {
                let world = lab.world.clone();
                if let Err(e) = coordinator(env, lab, name).await {
                    world.trace(&format!("{name} ends: {e}"));
                }
                world.kill(name);
            });
        }
    }

    async fn observes(&self, name: &str) -> Cluster {
        let who = Observer {
            coordinators: COORDINATORS.map(addr).to_vec(),
            cluster: None,
            name: name.into(),
            role: Role::Console,
            host: name.into(),
            trust: None,
        };
        Cluster::observe(&self.world.node(name), who, Duration::from_secs(60)).await.unwrap()
    }

    fn everywhere(&self, change: impl Fn(&mut Weather)) {
        self.weather.values().for_each(|weather| change(&mut weather.lock().unwrap()));
    }

    /// Changes the map one after the other, and notes what was acknowledged.
    async fn write(self, cluster: Cluster) {
        for n in 0..HOME_RULES_MAX - 1 {
            let place = format!("file:///{n}");
            if cluster.allow_home(HomeRule::plain(&place)).await.is_ok() {
                self.acknowledged.lock().unwrap().insert(place);
            }
            self.world.sleep(Duration::from_millis(600)).await;
        }
    }

    async fn read(self, cluster: Cluster, seed: u64) {
        loop {
            let acknowledged = self.acknowledged.lock().unwrap().clone();
            if let Ok(status) = cluster.status().await {
                let shown = places(&status.map);
                assert!(
                    acknowledged.is_subset(&shown),
                    "seed {seed}: the status is old: {acknowledged:?} in {shown:?}"
                );
                *self.statuses.lock().unwrap() += 1;
            }
            self.world.sleep(Duration::from_millis(50)).await;
        }
    }

    /// One thing goes wrong for a while.
    async fn go_wrong(&self, dice: &Rng) {
        let leader = self.etcd.value("/w/key/leader");
        let victim = COORDINATORS.into_iter().find(|name| Some(*name) == leader.as_deref()).unwrap_or("c0");
        let own = &self.weather[victim];
        let a_while = Duration::from_millis(500 + dice.below(6000));
        match dice.below(7) {
            0 => self.world.kill(victim),
            1 => self.world.pause(victim),
            2 => own.lock().unwrap().cut = true,
            3 => self.everywhere(|weather| weather.lost_answers = 40),
            4 => self.everywhere(|weather| weather.delay_ms = 1200),
            5 => self.everywhere(|weather| weather.cut = true),
            _ => self.world.partition(victim, "writer"),
        }
        self.world.sleep(a_while).await;
        self.world.resume(victim);
        self.world.heal(victim, "writer");
        self.everywhere(|weather| *weather = Weather::default());
        self.start_missing();
        self.world.sleep(Duration::from_millis(dice.below(4000))).await;
        self.start_missing();
    }
}

/// How many changes were acknowledged, and how many statuses were compared.
fn run(seed: u64) -> (usize, u64) {
    let lab = Lab::new(seed);
    lab.world.run(async {
        lab.start_missing();
        let (writer, reader) = (lab.observes("writer").await, lab.observes("reader").await);
        let harness = lab.world.node("harness");
        harness.tasks.spawn("writer", lab.clone().write(writer.clone()));
        harness.tasks.spawn("reader", lab.clone().read(reader, seed));
        let dice = lab.world.rng("faults");
        for _ in 0..FAULTS {
            lab.go_wrong(&dice).await;
        }
        let begun = lab.world.now();
        let last = HomeRule::plain("file:///last");
        let mut tried: std::result::Result<_, Error> = writer.allow_home(last.clone()).await;
        while tried.is_err() && lab.world.now().since(begun) < Duration::from_secs(40) {
            lab.start_missing();
            lab.world.sleep(Duration::from_millis(200)).await;
            tried = writer.allow_home(last.clone()).await;
        }
        tried.unwrap_or_else(|e| panic!("seed {seed}: no coordinator takes changes again: {e}"));
        let map = writer.status().await.unwrap().map;
        let acknowledged = lab.acknowledged.lock().unwrap().clone();
        assert!(acknowledged.is_subset(&places(&map)), "seed {seed}: an acknowledged change is gone");
        (acknowledged.len(), *lab.statuses.lock().unwrap())
    })
}

#[test]
fn an_acknowledged_change_survives_any_failure() {
    let (mut changes, mut statuses) = (0, 0);
    for seed in 0..SEEDS {
        let (acknowledged, shown) = run(seed);
        changes += acknowledged;
        statuses += shown;
    }
    println!("{SEEDS} seeds: {changes} changes acknowledged, {statuses} statuses compared");
    assert!(changes > 100 * SEEDS as usize / 10, "hardly any change was made: {changes}");
}

/// c1 waits for a while, dies, returns, and is removed at last; c0 asks.
#[test]
fn standbys_that_are_away_are_known_by_name() {
    let lab = Lab::new(1);
    let world = lab.world.clone();
    let store_of = |name: &'static str| {
        let endpoints = vec!["http://sim:1".into()];
        let config = EtcdConfig { endpoints, prefix: "/w/".into(), ..EtcdConfig::default() };
        let (env, etcd_env) = (world.node(name), world.node("etcd"));
        let way =
            Way { env: env.clone(), etcd_env, etcd: lab.etcd.clone(), weather: lab.weather[name].clone() };
        let store: Arc<dyn Store> = Etcd::through(&env, &config, Arc::new(way));
        (env, store)
    };
    world.run(async {
        let (env, store) = store_of("c0");
        let mut standbys = Standbys::default();
        let missing = async |standbys: &mut Standbys| {
            let found = standbys.missing(&env, &store, "c0").await.unwrap();
            found.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert!(missing(&mut standbys).await.is_empty());
        let (env_1, store_1) = store_of("c1");
        env_1.clone().tasks.spawn("a standby", async move {
            attend(&env_1, &store_1, "c1").await;
        });
        for _ in 0..12 {
            world.sleep(Duration::from_secs(5)).await;
            assert!(missing(&mut standbys).await.is_empty(), "it waits");
        }
        world.kill("c1");
        let mut found = Vec::new();
        for _ in 0..12 {
            world.sleep(Duration::from_secs(5)).await;
            found = missing(&mut standbys).await;
        }
        assert_eq!(found, ["c1"]);
        let (env_1, store_1) = store_of("c1");
        env_1.clone().tasks.spawn("a standby", async move {
            attend(&env_1, &store_1, "c1").await;
        });
        world.sleep(Duration::from_secs(5)).await;
        assert!(missing(&mut standbys).await.is_empty(), "it is back");
        world.kill("c1");
        world.sleep(Duration::from_secs(8 * 86_400)).await;
        missing(&mut standbys).await;
        assert!(missing(&mut standbys).await.is_empty(), "it was removed");
    });
}
