//! Three simulated nodes with real leaders and followers over a simulated network: failover, the right to
//! answer, and the transfer of the whole state. The test is the coordinator.
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_coord::decide::JournalGroup;
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, Env};
use weir_kv::{CommitSeq, Engine, EngineConfig, Kv, Read, Scan, SharedKv};
use weir_meta::copies::{Copier, Follower, Group, News, Right};
use weir_proto::map::{MemberState, Role};
use weir_proto::{ClusterId, Epoch, ErrorKind, NamespaceId, NodeId, Result};
use weir_rpc::{Call, Channel, Handled, Identity, Server, Service};

const CONFIG: EngineConfig =
    EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 1 << 20, journal_keep_bytes: 0 };
const NAMESPACE: NamespaceId = NamespaceId(1);
const IDS: [u32; 3] = [1, 2, 3];

#[derive(Clone)]
struct Copy {
    follower: Follower,
    led: Arc<Mutex<Option<Led>>>,
}

/// A lead as the metadata service uses it.
#[derive(Clone)]
struct Led {
    env: Env,
    leader: Arc<Copier>,
    kv: SharedKv,
    right: Arc<Right>,
}

impl Led {
    /// Returns when the record may be acknowledged.
    async fn acknowledged(&self, seq: CommitSeq) -> Result<()> {
        self.kv.wait_durable(seq).await?;
        self.right.wait(&self.env).await
    }
    fn may_answer(&self) -> bool {
        self.right.answers()
    }
}

impl Service for Copy {
    fn handle(&self, call: Call) -> Handled {
        let unknown = call.unknown();
        let leader = self.led.lock().unwrap().as_ref().map(|led| led.leader.clone());
        let is_fetch = call.method == <weir_proto::copies::StateFetch as weir_proto::Request>::METHOD;
        let handled = match leader.filter(|_| is_fetch) {
            Some(leader) => leader.handle(call),
            None => self.follower.handle(call),
        };
        handled.unwrap_or(Handled::Now(Err(unknown)))
    }
}

struct Node {
    env: Env,
    copy: Copy,
    links: BTreeMap<NodeId, Channel>,
    _server: Server,
}

fn addr(id: u32) -> Addr {
    format!("tcp:10.0.0.{id}:7000").parse().unwrap()
}

fn name(id: u32) -> String {
    format!("m{id}")
}

impl Node {
    async fn start(w: &World, id: u32) -> Node {
        let env = w.node(&name(id));
        let follower = Follower::open(&env, Path::new("/state"), CONFIG, NAMESPACE).await.unwrap();
        let copy = Copy { follower, led: Arc::default() };
        let me = Identity::new(&env, name(id), Role::Meta, Some(ClusterId([7; 16])));
        let _server = weir_rpc::serve(&env, &[addr(id)], me.clone(), Arc::new(copy.clone())).await.unwrap();
        let others = IDS.iter().filter(|other| **other != id);
        let link = |other: &u32| {
            let channel = Channel::new(&env, vec![addr(*other)], me.clone(), Arc::new(copy.clone()));
            (NodeId(*other), channel)
        };
        let links = others.map(link).collect();
        Node { env, copy, links, _server }
    }

    fn engine(&self) -> Arc<Engine> {
        self.copy.follower.engine().expect("the state is whole")
    }

    fn leader(&self) -> Led {
        self.copy.led.lock().unwrap().clone().expect("it leads")
    }
}

struct Cluster {
    w: World,
    nodes: BTreeMap<u32, Node>,
    group: JournalGroup<NodeId>,
    /// Reports of leaders to the coordinator.
    caught_up: Arc<Mutex<Vec<(NodeId, Epoch)>>>,
}

impl Cluster {
    async fn start(w: &World) -> Cluster {
        let mut nodes = BTreeMap::new();
        for id in IDS {
            nodes.insert(id, Node::start(w, id).await);
        }
        let group = JournalGroup::found(&IDS.map(NodeId), NodeId(1));
        let mut cluster = Cluster { w: w.clone(), nodes, group, caught_up: Arc::default() };
        cluster.lead(1).await.unwrap();
        cluster
    }

    /// The node gets the newest map, in which it leads.
    async fn lead(&mut self, id: u32) -> Result<()> {
        let node = &self.nodes[&id];
        let engine = node.copy.follower.engine().expect("the state is whole");
        let promise = || node.copy.follower.promise();
        let members = self.group.clone();
        let group = Group { namespace: NAMESPACE, me: NodeId(id), members, links: node.links.clone() };
        let reported = self.caught_up.clone();
        let report = Arc::new(move |id, epoch, news| {
            if news == News::CaughtUp {
                reported.lock().unwrap().push((id, epoch));
            }
        });
        let leader = Arc::new(Copier::begin(&node.env, engine.clone(), group, promise, report).await?);
        let (env, right) = (node.env.clone(), Right::of(leader.clone()));
        *node.copy.led.lock().unwrap() = Some(Led { env, leader, kv: engine.led(), right });
        Ok(())
    }

    fn write(&self, id: u32, key: &[u8], bytes: usize) -> CommitSeq {
        let engine = self.nodes[&id].engine();
        let put = engine.transact(&mut |t| {
            t.put(key, &vec![7; bytes]);
            t.add(b"count", 1);
            Ok(())
        });
        put.unwrap()
    }

    /// A member that was away returns, and becomes current.
    async fn take_back(&mut self, id: u32, leader: u32) {
        assert!(self.group.back(NodeId(id)));
        self.lead(leader).await.unwrap();
        let caught_up =
            self.until(Duration::from_secs(60), |c| c.caught_up.lock().unwrap().last().copied()).await;
        assert_eq!(caught_up, (NodeId(id), self.group.epoch));
        assert_eq!(self.group.caught_up(caught_up.0, caught_up.1), Ok(true));
        self.lead(leader).await.unwrap();
    }

    async fn until<T>(&self, most: Duration, mut found: impl FnMut(&Cluster) -> Option<T>) -> T {
        for _ in 0..most.as_millis() / 5 {
            if let Some(found) = found(self) {
                return found;
            }
            self.w.sleep(Duration::from_millis(5)).await;
        }
        panic!("it did not come in {most:?}");
    }

    fn dump(&self, id: u32) -> (CommitSeq, BTreeMap<Vec<u8>, Vec<u8>>) {
        let mut all = BTreeMap::new();
        let engine = self.nodes[&id].engine();
        let read = engine.read(&mut |r: &dyn Read| {
            r.scan(b"", &[0xff; 64], &mut |k, v| {
                all.insert(k.to_vec(), v.to_vec());
                Scan::More
            })
        });
        (read.unwrap(), all)
    }

    async fn all_are_equal(&self) {
        let equal = |c: &Cluster| {
            let whole = IDS.iter().all(|id| c.nodes[id].copy.follower.engine().is_some());
            (whole && c.dump(1) == c.dump(2) && c.dump(2) == c.dump(3)).then_some(())
        };
        self.until(Duration::from_secs(20), equal).await;
    }
}

fn simulated<F: Future<Output = ()> + 'static>(seed: u64, test: impl FnOnce(World) -> F + 'static) {
    let world = World::new(seed, SimConfig::default());
    let w = world.clone();
    world.run(async move { test(w).await });
}

#[test]
fn acknowledged_records_are_on_every_copy() {
    simulated(1, |w| async move {
        let cluster = Cluster::start(&w).await;
        let leader = cluster.nodes[&1].leader();
        for n in 0..50u8 {
            let seq = cluster.write(1, &[n], 100);
            leader.acknowledged(seq).await.unwrap();
            assert!(IDS.iter().all(|id| cluster.nodes[id].engine().synced() >= seq));
        }
        cluster.until(Duration::from_secs(2), |_| leader.may_answer().then_some(())).await;
        // Without one of the copies nothing more is acknowledged, and soon nothing is answered.
        w.kill("m3");
        let waiting = cluster.write(1, b"waiting", 100);
        let answered = w.node("m1").clock.timeout(Duration::from_secs(3), leader.acknowledged(waiting)).await;
        assert!(answered.is_err(), "a copy lacks it");
        assert!(!leader.may_answer());
    });
}

#[test]
fn a_leader_that_is_cut_off_is_followed_by_another() {
    for seed in 0..10 {
        simulated(seed, move |w| async move {
            let mut cluster = Cluster::start(&w).await;
            let old = cluster.nodes[&1].leader();
            let kept = cluster.write(1, b"kept", 100);
            old.acknowledged(kept).await.unwrap();
            cluster.until(Duration::from_secs(2), |_| old.may_answer().then_some(())).await;
            w.partition("m1", "m2");
            w.partition("m1", "m3");
            let lost = cluster.write(1, b"lost", 100);
            assert_eq!(cluster.group.down(NodeId(1), Some(NodeId(2))), Ok(true));
            cluster.lead(2).await.unwrap();
            let new = cluster.nodes[&2].leader();
            let seq = cluster.write(2, b"new", 100);
            new.acknowledged(seq).await.unwrap();
            assert!(!old.may_answer(), "seed {seed}: it would answer without what was acknowledged");
            cluster.until(Duration::from_secs(2), |_| new.may_answer().then_some(())).await;
            w.heal("m1", "m2");
            w.heal("m1", "m3");
            cluster.take_back(1, 2).await;
            let last = cluster.write(2, b"last", 100);
            cluster.nodes[&2].leader().acknowledged(last).await.unwrap();
            cluster.all_are_equal().await;
            let (_, all) = cluster.dump(1);
            assert!(all.contains_key(&b"kept"[..]) && all.contains_key(&b"new"[..]), "seed {seed}");
            assert!(!all.contains_key(&b"lost"[..]), "seed {seed}: no copy but the old leader's had it");
            let late = old.acknowledged(lost).await.unwrap_err();
            assert_eq!(
                late.kind,
                ErrorKind::Unavailable,
                "seed {seed}: that number is another record's by now"
            );
            let refused = cluster.nodes[&1].engine().transact(&mut |t| {
                t.put(b"k", b"v");
                Ok(())
            });
            assert_eq!(refused.unwrap_err().kind, ErrorKind::Stale, "seed {seed}: it follows now");
        });
    }
}

#[test]
fn a_copy_that_was_away_for_long_fetches_the_state() {
    for seed in 0..4 {
        simulated(seed, move |w| async move {
            let mut cluster = Cluster::start(&w).await;
            let early = cluster.write(1, b"early", 100);
            cluster.nodes[&1].leader().acknowledged(early).await.unwrap();
            cluster.nodes.remove(&3);
            w.power_cut("m3");
            assert_eq!(cluster.group.down(NodeId(3), None), Ok(true));
            cluster.lead(1).await.unwrap();
            let leader = cluster.nodes[&1].leader();
            for n in 0..400u32 {
                let seq = cluster.write(1, &n.to_be_bytes(), 3000);
                leader.acknowledged(seq).await.unwrap();
            }
            cluster.nodes[&1].engine().checkpoint().await.unwrap();
            let node = Node::start(&w, 3).await;
            cluster.nodes.insert(3, node);
            cluster.take_back(3, 1).await;
            let is_current = |m: &weir_coord::decide::JournalMember<NodeId>| m.state == MemberState::Current;
            assert!(cluster.group.members.iter().all(is_current));
            let last = cluster.write(1, b"last", 100);
            cluster.nodes[&1].leader().acknowledged(last).await.unwrap();
            cluster.all_are_equal().await;
            assert_eq!(cluster.dump(3).1.len(), 403, "seed {seed}");
        });
    }
}
