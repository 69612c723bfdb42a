//! The coordinators of a run: one with a store on its disk, or several that share an etcd.
//!
//! Several run as units of systemd do: a process that ends, because it leads no more, is started again.
use crate::Options;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_coord::CoordConfig;
use weir_coord::etcd::sim::{SimEtcd, Way, Weather};
use weir_coord::etcd::{Etcd, EtcdConfig};
use weir_coord::identity::check_coordinator;
use weir_env::sim::World;
use weir_env::{Addr, Env};
use weir_node::{Site, start_coord, start_shared_coord};
use weir_proto::map::Settings;
use weir_proto::{ClusterId, Result};
use weir_rpc::Trust;

/// The only coordinator, or the first one.
pub const COORDINATOR: &str = "coord";
/// The cluster id in certificates.
pub const CLUSTER: ClusterId = ClusterId([7; 16]);
const ADDRS_OF_ONE: u32 = 2;
const DIR: &str = "/coord";
/// The machine of etcd: it does not fail here.
const ETCD: &str = "etcd";
/// The pause before a process that has ended is started again.
const RESTART: Duration = Duration::from_millis(500);

pub fn coordinator_name(n: usize) -> String {
    if n == 0 { COORDINATOR.to_owned() } else { format!("{COORDINATOR}-{n}") }
}
pub fn is_coordinator(name: &str) -> bool {
    name.starts_with(COORDINATOR)
}

/// Every process gets all.
pub fn addrs(options: &Options) -> Vec<Addr> {
    let addr = |text: String| text.parse().expect("an address");
    match options.servers.coordinators {
        1 => (0..ADDRS_OF_ONE).map(|moves| addr(format!("tcp:10.{moves}.0.1:7000"))).collect(),
        several => (0..several).map(|n| addr(format!("tcp:10.0.2.{n}:7000"))).collect(),
    }
}
/// A single coordinator is at all its addresses until it has moved, then at one of them.
pub fn listens(options: &Options, n: usize, moves: Option<u32>) -> Vec<Addr> {
    let all = addrs(options);
    match (options.servers.coordinators, moves) {
        (1, None) => all,
        (1, Some(moves)) => vec![all[(moves % ADDRS_OF_ONE) as usize].clone()],
        _ => vec![all[n].clone()],
    }
}

pub fn config(options: &Options, env: &Env, n: usize, trust: Option<Arc<Trust>>) -> CoordConfig {
    let settings = Settings {
        scheme: options.scheme,
        cell_shift: options.cell_shift,
        lease_ms: 5_000,
        target_silence_ms: 3_000,
    };
    let is_named = options.servers.coordinators > 1 || options.servers.certificates;
    CoordConfig {
        settings,
        new: !env.disk.exists(Path::new(DIR)),
        name: coordinator_name(n),
        cluster: is_named.then_some(CLUSTER),
        trust,
        ..CoordConfig::new(options.scheme, options.storage_nodes - options.servers.late)
    }
}

/// A coordinator with a store on its disk.
pub async fn run_alone(env: Env, site: Site, config: CoordConfig) -> Result<()> {
    let _serves = start_coord(&env, &site, Path::new(DIR), config).await.map_err(|e| e.error)?;
    std::future::pending().await
}

/// What several coordinators share.
pub struct Shared {
    etcd: SimEtcd,
    weather: BTreeMap<String, Arc<Mutex<Weather>>>,
    /// Those that a fault keeps down.
    held_down: Mutex<BTreeSet<String>>,
}

impl Shared {
    pub fn new(options: &Options) -> Shared {
        let names = (0..options.servers.coordinators).map(coordinator_name);
        let weather = names.map(|name| (name, Arc::default())).collect();
        Shared { etcd: SimEtcd::default(), weather, held_down: Mutex::default() }
    }

    pub fn names(&self) -> Vec<String> {
        self.weather.keys().cloned().collect()
    }
    /// The coordinator that has the lead in etcd; the only or the first one, if none has.
    pub fn leader(&self) -> String {
        self.etcd.value("key/leader").unwrap_or_else(|| COORDINATOR.to_owned())
    }

    fn held_down(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.held_down.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// It is not started until a fault ends.
    pub fn hold_down(&self, name: &str) {
        self.held_down().insert(name.to_owned());
    }
    /// It is started; returns its number.
    pub fn starts(&self, name: &str) -> usize {
        self.held_down().remove(name);
        self.weather.keys().position(|other| other == name).expect("a coordinator")
    }
    /// Those that have ended by themselves.
    pub fn ended(&self, world: &World) -> Vec<String> {
        let held_down = self.held_down();
        let names = self.weather.keys().filter(|name| !world.is_up(name) && !held_down.contains(*name));
        names.cloned().collect()
    }

    /// What happens between a coordinator and etcd.
    pub fn weather(&self, name: &str) -> MutexGuard<'_, Weather> {
        self.weather[name].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A coordinator, to the end of its lead, which is an error.
    pub fn run(
        &self,
        world: &World,
        env: Env,
        site: Site,
        config: CoordConfig,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let name = config.name.clone();
        let way = Way {
            env: env.clone(),
            etcd_env: world.node(ETCD),
            etcd: self.etcd.clone(),
            weather: self.weather[&name].clone(),
        };
        async move {
            let endpoints = vec!["http://sim:1".to_owned(), "http://sim:2".to_owned()];
            let config_of_etcd = EtcdConfig { endpoints, ..EtcdConfig::default() };
            let store = Etcd::through(&env, &config_of_etcd, Arc::new(way));
            let dir = Path::new(DIR);
            let new = check_coordinator(&*env.disk, dir, false).is_err();
            let config = CoordConfig { new, ..config };
            let serves =
                start_shared_coord(&env, &site, dir, store, config, |_| ()).await.map_err(|e| e.error)?;
            Err(serves.lost().await)
        }
    }
}

/// Starts processes that have ended by themselves, for ever.
pub async fn start_ended(world: World, shared: Arc<Shared>, start: impl Fn(&str)) {
    loop {
        world.sleep(RESTART).await;
        shared.ended(&world).iter().for_each(|name| start(name));
    }
}
