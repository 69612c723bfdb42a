//! A hundred times the usual requests from 64 observers: a coordinator answers them, or refuses what is too
//! much; members stay members.
use super::*;
use weir_coord::Collected;
use weir_env::sim::DiskFaults;
use weir_proto::coord::GetStatus;
use weir_proto::watch::{GetTop, Top};
use weir_rpc::NoService;

/// As many as a connection has in flight.
const CALLS: usize = 1024;

/// Requests of many callers at once, and their results.
#[derive(Clone, Default)]
struct Crowd(Arc<Mutex<(usize, Vec<Result<()>>)>>);

impl Crowd {
    fn send<R: Request + Clone + Send + Sync + 'static>(&self, env: &Env, by: &Connection, request: &R) {
        for _ in 0..CALLS {
            self.0.lock().unwrap().0 += 1;
            let (by, me, request) = (by.clone(), self.clone(), request.clone());
            env.tasks.spawn("request", async move {
                let done = by.call(&request, Vec::new(), 3 * PATIENCE).await;
                me.0.lock().unwrap().1.push(done.map(drop));
            });
        }
    }
    /// The numbers of all, of those that were answered, and of those that were refused until now.
    fn counts(&self) -> (usize, usize, usize) {
        let all = self.0.lock().unwrap();
        let refused = all.1.iter().filter(|done| done.is_err()).count();
        let is_refusal = |e: &weir_proto::Error| {
            matches!(e.kind, ErrorKind::Busy { .. }) && e.context.contains("try again")
        };
        assert!(all.1.iter().filter_map(|done| done.as_ref().err()).all(is_refusal), "{:?}", all.1.last());
        (all.0, all.1.len() - refused, refused)
    }
}

impl Lab {
    async fn connection(&self, name: &str, cluster: ClusterId) -> (Env, Connection) {
        let env = self.world.node(name);
        let me = Identity::new(&env, name, Role::Console, Some(cluster));
        let connection = weir_rpc::connect(&env, &addr(100), &me, Arc::new(NoService)).await.unwrap();
        (env, connection)
    }
}

#[test]
fn a_process_is_asked_once_for_64_consoles() {
    let lab = Lab::new(60);
    lab.world.clone().run(async move {
        let _coordinator = lab.coordinator().await;
        let (mount, who) = lab.observer("mount", Role::Mount);
        let _mount = Cluster::observe(&mount, who, PATIENCE).await.unwrap();
        type Answers = Mutex<Vec<Result<Vec<Collected<Top>>>>>;
        let done: Arc<Answers> = Arc::default();
        let mut consoles = Vec::new();
        for n in 0..64 {
            consoles.push((lab.world.node(&format!("console{n}")), lab.client(&format!("console{n}")).await));
        }
        for (env, console) in consoles {
            let done = done.clone();
            env.tasks.spawn("collect", async move {
                let top = console.collect(&GetTop { seconds: 10 }, Duration::from_secs(1)).await;
                done.lock().unwrap().push(top);
            });
        }
        while done.lock().unwrap().len() < 64 {
            lab.world.sleep(Duration::from_millis(10)).await;
        }
        let has_mount = |top: &Result<Vec<Collected<Top>>>| {
            top.as_ref().is_ok_and(|all| all.iter().any(|one| one.name == "mount" && one.reply.is_ok()))
        };
        assert!(done.lock().unwrap().iter().all(has_mount));
        let read = mount.watch.meters.read();
        let asked = read.iter().find(|m| m.name == "weir_rpc_seconds" && m.label.1 == "GetTop").unwrap();
        // Their requests do not arrive in the same moment.
        assert!(asked.count <= 8, "{} times for 64 consoles", asked.count);
    });
}

#[test]
fn a_crowd_at_a_slow_store_is_refused_and_members_stay() {
    let lab = Lab::new(61);
    lab.world.clone().run(async move {
        let coordinator = lab.coordinator().await;
        let six = lab.six().await;
        let observer = lab.client("observer").await;
        let mut crowd_of = Vec::new();
        for n in 0..12 {
            crowd_of.push(lab.connection(&format!("console{n}"), coordinator.cluster()).await);
        }
        let epochs = |map: &ClusterMap| map.groups.iter().map(|g| g.epoch.0).collect::<Vec<_>>();
        observer.wait_for(PATIENCE, |map| !map.groups.is_empty()).await.unwrap();
        let before = epochs(&observer.map());
        // A write of the store takes long, and the owner of the map waits for it.
        lab.world.set_disk_faults("c", DiskFaults { delay: Duration::from_secs(1), ..DiskFaults::default() });
        let seventh = lab.storage(7);
        let crowd = Crowd::default();
        let asking = async {
            lab.world.sleep(Duration::from_millis(300)).await;
            crowd_of.iter().for_each(|(env, by)| crowd.send(env, by, &GetStatus {}));
        };
        let (joined, ()) = tokio::join!(biased; seventh, asking);
        let _seventh = joined.unwrap();
        while crowd.counts().1 + crowd.counts().2 < crowd.counts().0 {
            lab.world.sleep(Duration::from_millis(50)).await;
        }
        let (all, answered, refused) = crowd.counts();
        assert_eq!((all, answered + refused), (12 * CALLS, 12 * CALLS));
        assert!(answered >= 4096 && refused > 0, "{answered} answered, {refused} refused");
        lab.world.set_disk_faults("c", DiskFaults::default());
        lab.world.sleep(Duration::from_secs(10)).await;
        for node in &six {
            let target = node.joined.targets[0];
            assert!(target_is(target.0, TargetState::Up)(&observer.map()), "{target} is a member");
        }
        // The seventh target brought more groups.
        assert!(epochs(&observer.map()).starts_with(&before), "no group has lost a member");
        let (env, by) = &crowd_of[0];
        let again = Crowd::default();
        again.send(env, by, &GetStatus {});
        lab.world.sleep(Duration::from_secs(10)).await;
        assert_eq!(again.counts(), (CALLS, CALLS, 0), "nothing is refused after the crowd");
    });
}

#[test]
fn requests_for_news_have_a_bound_and_end_with_connections() {
    let lab = Lab::new(62);
    lab.world.clone().run(async move {
        let coordinator = lab.coordinator().await;
        let version = coordinator.map().version;
        let mut all = Vec::new();
        for n in 0..18 {
            all.push(lab.connection(&format!("console{n}"), coordinator.cluster()).await);
        }
        let (crowd, asked) = (Crowd::default(), GetMap { newer_than: version, wait_ms: 30_000 });
        all.iter().for_each(|(env, by)| crowd.send(env, by, &asked));
        lab.world.sleep(Duration::from_secs(2)).await;
        assert_eq!(crowd.counts(), (18 * CALLS, 0, 18 * CALLS - 16_384));
        let more =
            || async { all[0].1.call(&GetMap { wait_ms: 1, ..asked.clone() }, vec![], PATIENCE).await };
        assert!(matches!(more().await.unwrap_err().kind, ErrorKind::Busy { .. }));
        all[1].1.close("enough");
        lab.world.sleep(Duration::from_secs(1)).await;
        more().await.unwrap();
    });
}
