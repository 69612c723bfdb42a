//! Claim: the coordinator collects what every connected process shows, and a silent one delays that by its
//! deadline only.
use std::path::Path;
use std::time::Duration;
use weir_coord::{Cluster, Collected, CoordConfig, Coordinator, Observer};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, Env};
use weir_proto::map::Role;
use weir_proto::watch::{GetHistory, GetMeters, GetTop, ListWaits, Meters, SeriesRead, Top, WaitsListed};
use weir_rpc::Identity;
use weir_watch::{Object, Reason, WaitRecord, Work};

const PATIENCE: Duration = Duration::from_secs(1);

async fn observe(env: &Env, addr: &Addr, name: &str, role: Role) -> Cluster {
    let who = Observer {
        coordinators: vec![addr.clone()],
        cluster: None,
        name: name.into(),
        role,
        host: name.into(),
        trust: None,
    };
    Cluster::observe(env, who, Duration::from_secs(20)).await.unwrap()
}

fn of<'a, T>(all: &'a [Collected<T>], name: &str) -> &'a T {
    let found = all.iter().find(|g| g.name == name).unwrap_or_else(|| panic!("{name} is missing"));
    found.reply.as_ref().unwrap()
}

#[test]
fn all_processes_are_asked_and_a_silent_one_is_named() {
    let world = World::new(5, SimConfig::default());
    world.run(async {
        let addr: Addr = "tcp:10.0.0.100:7000".parse().unwrap();
        let env = world.node("c");
        let config = CoordConfig { new: true, ..CoordConfig::new("single".parse().unwrap(), 1) };
        let coordinator = Coordinator::open(env.clone(), Path::new("/coord"), config).await.unwrap();
        let identity = Identity::new(&env, "c", Role::Coordinator, Some(coordinator.cluster()));
        let _server =
            weir_rpc::serve(&env, std::slice::from_ref(&addr), identity, coordinator).await.unwrap();
        let (storage, mount) = (world.node("s1"), world.node("m1"));
        let _kept = [
            observe(&storage, &addr, "s1", Role::Storage).await,
            observe(&mount, &addr, "m1", Role::Mount).await,
            // A mount has two connections; it is counted once, by the name that it gave itself.
            observe(&mount, &addr, "m1:/data", Role::Mount).await,
        ];
        mount.watch.name.set("m1:/data".into()).unwrap();
        let console = observe(&world.node("console"), &addr, "console", Role::Console).await;

        storage.watch.counter("weir_example_total", ("target", "t1")).add(7);
        let at = mount.clock.now().0;
        let work = Work { volume: 3, uid: 1000, job: "4711", kind: "WRITE", requests: 1, bytes: 512, ns: 9 };
        mount.watch.account(at, &work);
        let record = WaitRecord::new(Reason::Lock, Object::new("inode", 7)).held_by("m2:/data").of(1000, 42);
        let wait = mount.watch.wait_since(at, record);
        for _ in 0..3 {
            env.clock.sleep(Duration::from_secs(1)).await;
            storage.watch.sample();
        }

        let meters: Vec<Collected<Meters>> = console.collect(&GetMeters {}, PATIENCE).await.unwrap();
        let names: Vec<&str> = meters.iter().map(|g| g.name.as_str()).collect();
        assert_eq!(names, ["coordinator", "s1", "m1:/data"], "each once, and no console");
        let counted = of(&meters, "s1").meters.iter().find(|m| m.name == "weir_example_total").unwrap();
        assert_eq!((counted.label_value.as_str(), counted.value), ("t1", 7));
        assert!(of(&meters, "coordinator").meters.iter().any(|m| m.name == "weir_rpc_seconds"));

        let tops: Vec<Collected<Top>> = console.collect(&GetTop { seconds: 10 }, PATIENCE).await.unwrap();
        let row = &of(&tops, "m1:/data").rows[0];
        assert_eq!((row.volume, row.uid, row.job.as_str(), row.bytes), (3, 1000, "4711", 512));

        let waits: Vec<Collected<WaitsListed>> =
            console.collect(&ListWaits { min_ms: 10, since_s: 0 }, PATIENCE).await.unwrap();
        let seen = of(&waits, "m1:/data").now.iter().find(|w| w.reason == "lock").unwrap();
        assert_eq!((seen.object_id, seen.holder.as_str(), seen.pid), (7, "m2:/data", 42));
        assert!(seen.lasted_us >= 3_000_000, "{seen:?}");
        drop(wait);
        let asked = ListWaits { min_ms: 10, since_s: 60 };
        let waits: Vec<Collected<WaitsListed>> = console.collect(&asked, PATIENCE).await.unwrap();
        assert!(of(&waits, "m1:/data").ended.iter().any(|w| w.reason == "lock" && w.ended_ms > 0));

        let asked = GetHistory { name: "weir_example_total".into(), by_minute: false, points: 2 };
        let series: Vec<Collected<SeriesRead>> = console.collect(&asked, PATIENCE).await.unwrap();
        let points: Vec<f32> = of(&series, "s1").points.iter().map(|bits| f32::from_bits(*bits)).collect();
        assert_eq!(points, [0.0, 0.0], "nothing was counted meanwhile");

        world.pause("s1");
        let begun = env.clock.now();
        let meters: Vec<Collected<Meters>> = console.collect(&GetMeters {}, PATIENCE).await.unwrap();
        let took = env.clock.now().since(begun);
        assert!(took >= PATIENCE && took < PATIENCE * 2, "{took:?}");
        let silent = meters.iter().find(|g| g.name == "s1").unwrap();
        assert!(silent.reply.as_ref().is_err_and(|why| why.contains("no answer")), "{:?}", silent.reply);
        assert_eq!(meters.len(), 3);
    });
}
