//! Claim: a node whose clock is wrong finds out, and the coordinator lists it as long as it is so.
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use weir_coord::{Cluster, CoordConfig, Coordinator, Observer, clocks};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, BoxFuture, Clock, ClockSource, Env, Instant, WallTime};
use weir_proto::map::Role;
use weir_rpc::Identity;

const PATIENCE: Duration = Duration::from_secs(20);

/// A clock whose date is wrong by this number of nanoseconds; it ticks as others do.
struct Wrong(Clock, Arc<AtomicI64>);

impl ClockSource for Wrong {
    fn now(&self) -> Instant {
        self.0.now()
    }
    fn wall(&self) -> WallTime {
        WallTime(self.0.wall().0 + self.1.load(Ordering::Relaxed))
    }
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.0.0.sleep_until(at)
    }
}

#[test]
fn a_wrong_clock_is_found_out_and_listed() {
    let world = World::new(3, SimConfig::default());
    world.run(async {
        let addr: Addr = "tcp:10.0.0.100:7000".parse().unwrap();
        let env = world.node("c");
        let config = CoordConfig { new: true, ..CoordConfig::new("single".parse().unwrap(), 1) };
        let coordinator = Coordinator::open(env.clone(), Path::new("/coord"), config).await.unwrap();
        let identity = Identity::new(&env, "c", Role::Coordinator, Some(coordinator.cluster()));
        let _server =
            weir_rpc::serve(&env, std::slice::from_ref(&addr), identity, coordinator).await.unwrap();
        let observe = async |env: &Env, name: &str, role| {
            let who = Observer {
                coordinators: vec![addr.clone()],
                cluster: None,
                name: name.into(),
                role,
                host: name.into(),
                trust: None,
            };
            Cluster::observe(env, who, PATIENCE).await.unwrap()
        };
        let off = Arc::new(AtomicI64::new(-400_000_000_000));
        let env = world.node("s1");
        let wrong = Clock(Arc::new(Wrong(env.clock.clone(), off.clone())));
        let storage = observe(&Env { clock: wrong, ..env.clone() }, "s1", Role::Storage).await;
        let right = observe(&world.node("s2"), "s2", Role::Storage).await;
        let console = observe(&world.node("console"), "console", Role::Console).await;
        let ahead = storage.clock_ahead_ms().await.unwrap();
        assert!((-400_000..=-399_000).contains(&ahead), "{ahead}");
        assert!(clocks::check("s1", ahead).is_err());
        assert_eq!(right.clock_ahead_ms().await, Some(0));
        let listed = async |count: usize| {
            let until = env.clock.now() + clocks::COMPARE_EVERY * 3;
            loop {
                let found = console.clocks().await.unwrap().off;
                if found.len() == count || env.clock.now() > until {
                    return found;
                }
                env.clock.sleep(Duration::from_secs(1)).await;
            }
        };
        let found = listed(1).await;
        assert!(found.len() == 1 && found[0].node == "s1" && found[0].ahead_ms < -390_000, "{found:?}");
        off.store(0, Ordering::Relaxed);
        assert!(listed(0).await.is_empty(), "its clock was set");
    });
}
