//! The contract of the coordinator's store, for every implementation (now: the embedded one).
use std::path::Path;
use std::time::Duration;
use weir_coord::store::{Embedded, Revision, Store, Swap};
use weir_env::Env;
use weir_env::sim::{SimConfig, World};
use weir_proto::ErrorKind;

const SECOND: Duration = Duration::from_secs(1);

async fn keys_have_growing_revisions(store: &dyn Store) {
    assert_eq!(store.get("a").await.unwrap(), None);
    let r1 = store.put("a", b"1".to_vec(), None).await.unwrap();
    let r2 = store.put("a", b"2".to_vec(), None).await.unwrap();
    assert!(Revision(0) < r1 && r1 < r2);
    let a = store.get("a").await.unwrap().unwrap();
    assert_eq!((a.value.as_slice(), a.revision), (b"2".as_slice(), r2));
}

async fn of_two_swaps_one_wins(store: &dyn Store) {
    let Swap::Done(r1) = store.compare_and_swap("s", Revision(0), b"x".to_vec()).await.unwrap() else {
        panic!("the key was free")
    };
    let (one, two) = tokio::join!(
        store.compare_and_swap("s", r1, b"one".to_vec()),
        store.compare_and_swap("s", r1, b"two".to_vec())
    );
    let outcomes = [one.unwrap(), two.unwrap()];
    let winners = outcomes.iter().filter(|s| matches!(s, Swap::Done(_))).count();
    assert_eq!(winners, 1, "{outcomes:?}");
    let now = store.get("s").await.unwrap();
    assert!(outcomes.contains(&Swap::Conflict(now)), "the loser is told what is there: {outcomes:?}");
}

async fn a_watch_sees_a_change(env: &Env, store: &dyn Store) {
    let known = store.put("w", b"1".to_vec(), None).await.unwrap();
    let (seen, ()) = tokio::join!(env.clock.timeout(5 * SECOND, store.watch("w", known)), async {
        store.put("other", b"0".to_vec(), None).await.unwrap();
        store.put("w", b"2".to_vec(), None).await.unwrap();
    });
    assert_eq!(seen.unwrap().unwrap().unwrap().value, b"2");
    let at_once = store.watch("w", Revision(0)).await.unwrap().unwrap();
    assert_eq!(at_once.value, b"2");
}

async fn a_key_under_a_lease_ends_with_it(env: &Env, store: &dyn Store) {
    let lease = store.grant_lease(Duration::from_millis(80)).await.unwrap();
    let known = store.put("l", b"mine".to_vec(), Some(lease)).await.unwrap();
    store.keep_lease(lease).await.unwrap();
    assert!(store.get("l").await.unwrap().is_some());
    let gone = env.clock.timeout(5 * SECOND, store.watch("l", known)).await.unwrap().unwrap();
    assert_eq!(gone, None);
    for ended in [
        store.keep_lease(lease).await,
        store.put("l", b"again".to_vec(), Some(lease)).await.map(drop),
        store.end_lease(lease).await,
    ] {
        assert_eq!(ended.unwrap_err().kind, ErrorKind::NotFound);
    }
    let lease = store.grant_lease(60 * SECOND).await.unwrap();
    store.put("l", b"mine".to_vec(), Some(lease)).await.unwrap();
    store.end_lease(lease).await.unwrap();
    assert_eq!(store.get("l").await.unwrap(), None);
}

#[tokio::test]
async fn embedded_keeps_the_contract() {
    let (env, dir) = (weir_env::real::env(), tempfile::tempdir().unwrap());
    let store = Embedded::open(env.clone(), dir.path()).unwrap();
    keys_have_growing_revisions(&*store).await;
    of_two_swaps_one_wins(&*store).await;
    a_watch_sees_a_change(&env, &*store).await;
}

/// Where time passes as told: a lease must not end because the machine is busy.
#[test]
fn embedded_ends_leases_in_time() {
    let world = World::new(3, SimConfig::default());
    world.run(async {
        let env = world.node("coordinator");
        let store = Embedded::open(env.clone(), Path::new("/map")).unwrap();
        a_key_under_a_lease_ends_with_it(&env, &*store).await;
    });
}

#[tokio::test]
async fn embedded_keeps_what_was_written_and_lets_nobody_else_in() {
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
