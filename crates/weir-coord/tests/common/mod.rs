//! The contract of the coordinator's store, for every implementation.
use std::time::Duration;
use weir_coord::store::{Revision, Store, Swap};
use weir_env::Env;
use weir_proto::ErrorKind;

pub const SECOND: Duration = Duration::from_secs(1);

pub async fn keys_have_growing_revisions(store: &dyn Store) {
    assert_eq!(store.get("a").await.unwrap(), None);
    let r1 = store.put("a", b"1".to_vec(), None).await.unwrap();
    let r2 = store.put("a", b"2".to_vec(), None).await.unwrap();
    assert!(Revision(0) < r1 && r1 < r2);
    let a = store.get("a").await.unwrap().unwrap();
    assert_eq!((a.value.as_slice(), a.revision), (b"2".as_slice(), r2));
}

pub async fn of_two_swaps_one_wins(store: &dyn Store) {
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
    assert!(outcomes.contains(&Swap::Conflict(now)), "the loser gets the present value: {outcomes:?}");
}

pub async fn a_watch_sees_a_change(env: &Env, store: &dyn Store) {
    let known = store.put("w", b"1".to_vec(), None).await.unwrap();
    let (seen, ()) = tokio::join!(env.clock.timeout(5 * SECOND, store.watch("w", known)), async {
        store.put("other", b"0".to_vec(), None).await.unwrap();
        store.put("w", b"2".to_vec(), None).await.unwrap();
    });
    assert_eq!(seen.unwrap().unwrap().unwrap().value, b"2");
    let at_once = store.watch("w", Revision(0)).await.unwrap().unwrap();
    assert_eq!(at_once.value, b"2");
}

pub async fn a_key_under_a_lease_ends_with_it(env: &Env, store: &dyn Store, ttl: Duration) {
    let lease = store.grant_lease(ttl).await.unwrap();
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

pub async fn of_two_claims_one_wins_and_fences(one: &dyn Store, two: &dyn Store) {
    let lease = one.grant_lease(60 * SECOND).await.unwrap();
    let Swap::Done(_) = one.claim("c", b"one".to_vec(), lease).await.unwrap() else {
        panic!("the key was free")
    };
    let Swap::Done(revision) = one.compare_and_swap("m", Revision(0), b"1".to_vec()).await.unwrap() else {
        panic!("it has the claim")
    };
    let lease_of_two = two.grant_lease(60 * SECOND).await.unwrap();
    let lost = two.claim("c", b"two".to_vec(), lease_of_two).await.unwrap();
    assert!(matches!(lost, Swap::Conflict(Some(there)) if there.value == b"one"));
    one.end_lease(lease).await.unwrap();
    for refused in [
        one.compare_and_swap("m", revision, b"2".to_vec()).await.map(drop),
        one.compare_and_swap("new", Revision(0), b"2".to_vec()).await.map(drop),
        one.put("m", b"2".to_vec(), None).await.map(drop),
    ] {
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Stale);
    }
    assert_eq!(two.get("m").await.unwrap().unwrap().value, b"1", "and changed nothing");
    let taken = two.claim("c", b"two".to_vec(), lease_of_two).await.unwrap();
    assert!(matches!(taken, Swap::Done(_)), "{taken:?}");
    let written = two.compare_and_swap("m", revision, b"2".to_vec()).await.unwrap();
    assert!(matches!(written, Swap::Done(_)), "{written:?}");
}
