//! The contract of the coordinator's store on the embedded one. (`etcd.rs` has that in etcd.)
mod common;

use common::*;
use std::path::Path;
use std::time::Duration;
use weir_coord::store::{Embedded, Store};
use weir_env::sim::{SimConfig, World};
use weir_proto::ErrorKind;

#[tokio::test]
async fn embedded_keeps_the_contract() {
    let (env, dir) = (weir_env::real::env(), tempfile::tempdir().unwrap());
    let store = Embedded::open(env.clone(), dir.path()).unwrap();
    keys_have_growing_revisions(&*store).await;
    of_two_swaps_one_wins(&*store).await;
    a_watch_sees_a_change(&env, &*store).await;
    of_two_claims_one_wins_and_fences(&*store, &*store).await;
}

/// Simulated time: a lease must not end because the machine is busy.
#[test]
fn embedded_ends_leases_in_time() {
    let world = World::new(3, SimConfig::default());
    world.run(async {
        let env = world.node("coordinator");
        let store = Embedded::open(env.clone(), Path::new("/map")).unwrap();
        a_key_under_a_lease_ends_with_it(&env, &*store, Duration::from_millis(80)).await;
    });
}

#[tokio::test]
async fn embedded_keeps_its_data_and_locks_others_out() {
    let (env, dir) = (weir_env::real::env(), tempfile::tempdir().unwrap());
    let store = Embedded::open(env.clone(), dir.path()).unwrap();
    let revision = store.put("map", b"kept".to_vec(), None).await.unwrap();
    let second = Embedded::open(env.clone(), dir.path()).err().expect("the directory is taken");
    assert_eq!(second.kind, ErrorKind::Exists);
    drop(store);
    let store = Embedded::open(env, dir.path()).unwrap();
    let kept = store.get("map").await.unwrap().unwrap();
    assert_eq!((kept.value.as_slice(), kept.revision), (b"kept".as_slice(), revision));
    assert!(store.put("map", b"more".to_vec(), None).await.unwrap() > revision);
}
