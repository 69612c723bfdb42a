//! Two coordinators on one store: the one that lost it answers nothing more, and its members find the other
//! one.
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_coord::store::Embedded;
use weir_coord::{Cluster, CoordConfig, Coordinator, Membership, Observer, no_reports};
use weir_env::sim::{SimConfig, World};
use weir_env::{Addr, Env};
use weir_proto::ErrorKind;
use weir_proto::home_rule::HomeRule;
use weir_proto::map::Role;
use weir_rpc::{Identity, Server, serve};

const PATIENCE: Duration = Duration::from_secs(30);

fn addr(n: u8) -> Addr {
    format!("tcp:10.0.0.{n}:1").parse().unwrap()
}

async fn listens(env: &Env, at: u8, coordinator: &Arc<Coordinator>) -> Server {
    let identity = Identity::new(env, "c", Role::Coordinator, Some(coordinator.cluster()));
    serve(env, &[addr(at)], identity, coordinator.clone()).await.unwrap()
}

async fn observes(world: &World, name: &str, role: Role, at: &[u8]) -> Cluster {
    let who = Observer {
        coordinators: at.iter().map(|n| addr(*n)).collect(),
        cluster: None,
        name: name.into(),
        role,
        host: format!("host-{name}"),
        trust: None,
    };
    Cluster::observe(&world.node(name), who, PATIENCE).await.unwrap()
}

fn config(new: bool) -> CoordConfig {
    CoordConfig { new, ..CoordConfig::new("single".parse().unwrap(), 1) }
}

#[test]
fn a_coordinator_that_lost_its_store_answers_nothing() {
    let world = World::new(5, SimConfig::default());
    world.run(async {
        let env = world.node("c");
        let store = Embedded::open(env.clone(), Path::new("/coord")).unwrap();
        let old = Coordinator::open_store(env.clone(), store.clone(), config(true)).await.unwrap();
        let _old = listens(&env, 100, &old).await;
        let stays = observes(&world, "stays", Role::Console, &[100]).await;
        stays.allow_home(HomeRule::plain("file:///before")).await.unwrap();
        let new = Coordinator::open_store(env.clone(), store.clone(), config(false)).await.unwrap();
        let _new = listens(&env, 101, &new).await;
        let moved = observes(&world, "moved", Role::Console, &[101]).await;
        moved.allow_home(HomeRule::plain("file:///of-the-new-one")).await.unwrap();
        // The old one learns of it with its next write, and reports nothing of its former state until then.
        let refused = stays.allow_home(HomeRule::plain("file:///of-the-old-one")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable);
        assert_eq!(old.lost().await.kind, ErrorKind::Stale);
        assert_eq!(stays.status().await.unwrap_err().kind, ErrorKind::Unavailable);
        let homes: Vec<String> = new.map().homes.iter().map(|rule| rule.place.clone()).collect();
        assert_eq!(homes, ["file:///before", "file:///of-the-new-one"]);
    });
}

#[test]
fn members_of_a_silent_coordinator_find_the_next_one() {
    let world = World::new(6, SimConfig::default());
    world.run(async {
        let env = world.node("c");
        let store = Embedded::open(env.clone(), Path::new("/coord")).unwrap();
        let old = Coordinator::open_store(env.clone(), store.clone(), config(true)).await.unwrap();
        let other = world.node("d");
        let _old = listens(&env, 100, &old).await;
        let member = observes(&world, "m", Role::Meta, &[100, 101]).await;
        let membership = Membership { addrs: vec![addr(7)], targets: Vec::new() };
        let joined = member.join(membership, no_reports()).await.unwrap();
        world.partition("c", "m");
        let new = Coordinator::open_store(other.clone(), store, config(false)).await.unwrap();
        let _new = listens(&other, 101, &new).await;
        let begun = other.clock.now();
        let waited = member.status().await;
        assert_eq!(waited.unwrap_err().kind, ErrorKind::Unavailable, "its connection is left");
        member.status().await.unwrap();
        let took = other.clock.now().since(begun);
        assert!(took < Duration::from_secs(4), "long before the connection counts as dead: {took:?}");
        other.clock.sleep(Duration::from_secs(20)).await;
        assert!(new.map().node(joined.node).is_some_and(|node| node.up), "it has joined again in time");
    });
}

#[test]
fn a_member_that_asks_nothing_leaves_a_silent_coordinator() {
    let world = World::new(7, SimConfig::default());
    world.run(async {
        let env = world.node("c");
        let store = Embedded::open(env.clone(), Path::new("/coord")).unwrap();
        let old = Coordinator::open_store(env.clone(), store.clone(), config(true)).await.unwrap();
        let other = world.node("d");
        let _old = listens(&env, 100, &old).await;
        let member = observes(&world, "m", Role::Console, &[100, 101]).await;
        world.partition("c", "m");
        let new = Coordinator::open_store(other.clone(), store, config(false)).await.unwrap();
        let _new = listens(&other, 101, &new).await;
        let administrator = observes(&world, "n", Role::Console, &[101]).await;
        administrator.allow_home(HomeRule::plain("file:///of-the-new-one")).await.unwrap();
        let found = member.wait_for(Duration::from_secs(6), |map| !map.homes.is_empty()).await;
        found.expect("it does not wait until its question for the next map ends");
    });
}
