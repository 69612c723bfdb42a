//! Claim: more work than a target can do makes its callers wait; no target leaves its groups for it, and no
//! written byte is dropped.
use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use weir_client::{ClientConfig, NoKernel};
use weir_coord::Cluster;
use weir_env::sim::DiskFaults;
use weir_proto::data::{Place, ReadOverlays, StatTarget, WriteFragment, WriteOverlay, WriteOverlays};
use weir_proto::map::{ClusterMap, MemberState};
use weir_proto::{CellId, Error, ErrorKind, FileId, Request, Seq};
use weir_rpc::{Call, Handled};

/// Far shorter than the overload of the tests.
const SHORT: Duration = Duration::from_secs(3);

async fn impatient_client(lab: &Lab, name: &str) -> Client {
    let config = ClientConfig { patience: SHORT, ..lab.config(name) };
    Client::connect(lab.env(name), config, Arc::new(NoKernel)).await.unwrap()
}
fn is_write(call: &Call) -> bool {
    [WriteFragment::METHOD, WriteOverlay::METHOD, WriteOverlays::METHOD].contains(&call.method)
}
/// The number of calls that the refusal has answered.
fn refusing(
    lab: &Lab,
    n: u8,
    error: impl Fn(&Call, usize) -> Option<Error> + Send + Sync + 'static,
) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let refusal: Answer = Arc::new(move |call: &Call| {
        let refused = error(call, counted.load(SeqCst))?;
        counted.fetch_add(1, SeqCst);
        Some(Handled::Now(Err(refused)))
    });
    lab.answer(n, Some(refusal));
    count
}
/// No target was taken out of a group.
async fn all_are_members(lab: &Lab, before: &ClusterMap) -> Cluster {
    let cluster = lab.observe().await;
    let now = cluster.map();
    for (before, now) in before.groups.iter().zip(&now.groups) {
        assert_eq!(now.epoch, before.epoch, "{}", now.id);
        assert!(now.members.iter().all(|m| m.state == MemberState::Current));
    }
    cluster
}

/// Small pieces that do not meet, over committed data: each is a message.
async fn scatter(a: &Client, h: Handle, expected: &mut [u8], pieces: usize) {
    for n in 0..pieces {
        let at = (n * 1024) % expected.len();
        let new = pattern(n as u64, at, 100);
        expected[at..at + 100].copy_from_slice(&new);
        write(a, h, at, &new).await;
    }
}

/// Longer than the whole patience of the mount: it lives.
#[test]
fn a_busy_target_is_waited_for_and_not_suspected() {
    Lab::new(970).run(6, |lab| async move {
        let a = impatient_client(&lab, "a").await;
        let mut expected = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &expected).await;
        a.fsync(h).await.unwrap();
        let before = lab.observe().await.map().clone();
        let busy =
            |call: &Call, _| is_write(call).then(|| Error::busy(Duration::from_millis(50), "too much to do"));
        let refused = refusing(&lab, 0, busy);
        scatter(&a, h, &mut expected, 400).await;
        let begun = lab.world().now();
        let free = async {
            lab.world().sleep(Duration::from_secs(20)).await;
            lab.answer(0, None);
        };
        let (synced, ()) = tokio::join!(a.fsync(h), free);
        synced.unwrap();
        assert!(lab.world().now().since(begun) < Duration::from_secs(24), "soon after it has time");
        assert_eq!(a.losses().0, 0);
        // After pauses that grow, until it answers something else: a few in a second.
        let refused = refused.load(SeqCst);
        assert!((5..200).contains(&refused), "{refused} calls were refused in 20 s");
        assert_eq!(scattered::calls(&lab, "a").get("ReportTarget"), None, "the coordinator was asked");
        all_are_members(&lab, &before).await;
        same(&content(&lab.client("b").await, "f").await, &expected);
    });
}

/// `Exists`: the number of an overlay is void at a keeper, so it gets another one.
#[test]
fn a_refused_number_loses_nothing() {
    Lab::new(971).run(6, |lab| async move {
        let a = lab.client("a").await;
        let mut expected = pattern(1, 0, STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &expected).await;
        a.fsync(h).await.unwrap();
        let void = |call: &Call, n| {
            (call.method == WriteOverlays::METHOD && n < 7).then(|| Error::exists("the number is void"))
        };
        let refusals: Vec<_> = (0..6).map(|n| refusing(&lab, n, void)).collect();
        scatter(&a, h, &mut expected, 20).await;
        a.fsync(h).await.unwrap();
        assert!(refusals.iter().any(|n| n.load(SeqCst) == 7), "{refusals:?}");
        assert_eq!(a.losses().0, 0);
        same(&content(&lab.client("b").await, "f").await, &expected);
    });
}

/// Writes take longer than the patience of the mount, and no answer to one arrives. Their targets answer when they
/// are asked whether they live.
#[test]
fn data_waits_for_targets_that_are_slow_but_alive() {
    Lab::new(972).run(6, |lab| async move {
        let a = impatient_client(&lab, "a").await;
        let expected = pattern(1, 0, 3 * STRIPE + 100);
        let h = create(&a, "f").await;
        for n in 0..6 {
            let clock = lab.env("clock").clock;
            let slow: Answer = Arc::new(move |call: &Call| {
                let clock = clock.clone();
                let late = async move {
                    clock.sleep(2 * SHORT).await;
                    Err(Error::unavailable("too late"))
                };
                is_write(call).then(|| Handled::Later(Box::pin(late)))
            });
            lab.answer(n, Some(slow));
        }
        write(&a, h, 0, &expected).await;
        let begun = lab.world().now();
        let quick = async {
            lab.world().sleep(10 * SHORT).await;
            (0..6).for_each(|n| lab.answer(n, None));
        };
        let (synced, ()) = tokio::join!(a.fsync(h), quick);
        synced.unwrap();
        assert!(lab.world().now().since(begun) < 14 * SHORT, "soon after they are quick again");
        assert_eq!(a.losses().0, 0);
        same(&content(&lab.client("b").await, "f").await, &expected);
    });
}

/// Every request of their disks takes longer than a call may at first, and they complete one at a time.
#[test]
fn data_arrives_at_disks_that_need_longer_than_a_call() {
    Lab::new(975).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "f").await;
        let before = lab.observe().await.map().clone();
        let delayed = |delay| {
            let faults = DiskFaults { delay, ..DiskFaults::default() };
            (0..6).for_each(|n| lab.world().set_disk_faults(&format!("s{n}"), faults));
        };
        delayed(Duration::from_secs(7));
        let expected = pattern(1, 0, 2 * STRIPE + 100);
        write(&a, h, 0, &expected).await;
        let begun = lab.world().now();
        a.fsync(h).await.unwrap();
        let took = lab.world().now().since(begun);
        assert!((14..180).contains(&took.as_secs()), "{took:?}");
        assert_eq!(a.losses().0, 0);
        delayed(Duration::ZERO);
        all_are_members(&lab, &before).await;
        same(&content(&lab.client("b").await, "f").await, &expected);
    });
}

/// Only a server that is silent for the whole patience ends the wait; the error names file, bytes and cause.
#[test]
fn lost_data_is_named() {
    Lab::new(973).run(6, |lab| async move {
        let a = impatient_client(&lab, "a").await;
        let h = create(&a, "f").await;
        (0..3).for_each(|n| lab.kill_storage(n));
        lab.world().sleep(Duration::from_secs(2)).await;
        write(&a, h, 0, &pattern(1, 0, STRIPE)).await;
        let begun = lab.world().now();
        let e = a.fsync(h).await.unwrap_err();
        assert!(lab.world().now().since(begun) < 3 * SHORT, "it ends");
        for part in ["file ", &format!("bytes 0 to {STRIPE}"), "t1 (s0), t2 (s1), t3 (s2)"] {
            assert!(e.context.contains(part), "{part:?}: {e}");
        }
    });
}

/// Calls that wait for their turn do not make their target suspect.
#[test]
fn many_calls_to_a_slow_target_cost_no_redundancy() {
    Lab::new(974).run(6, |lab| async move {
        let a = lab.client("a").await;
        let mut expected = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &expected).await;
        a.fsync(h).await.unwrap();
        let before = lab.observe().await.map().clone();
        for n in 0..6 {
            lab.world().slow_link(&format!("s{n}"), "a", Duration::from_millis(150));
        }
        scatter(&a, h, &mut expected, 500).await;
        a.fsync(h).await.unwrap();
        assert_eq!(a.losses().0, 0);
        for n in 0..6 {
            lab.world().slow_link(&format!("s{n}"), "a", Duration::ZERO);
        }
        all_are_members(&lab, &before).await;
        same(&content(&lab.client("b").await, "f").await, &expected);
    });
}

/// Calls past the client's own bound, to a target whose disk takes a second for each.
#[test]
fn a_target_does_not_begin_what_is_late_or_unwanted() {
    Lab::new(975).run(6, |lab| async move {
        let cluster = lab.observe().await;
        let map = cluster.map();
        let group = map.groups[0].clone();
        let place = Place { target: group.members[0].target, group: group.id, epoch: group.epoch };
        let node = map.target_node(place.target).unwrap().name.clone();
        let faults = weir_env::sim::DiskFaults { delay: Duration::from_secs(1), ..Default::default() };
        lab.world().set_disk_faults(&node, faults);
        let cell = CellId { file: FileId::default(), stripe: 0, index: 0 };
        let ask = |patience: Duration| {
            let (cluster, env) = (cluster.clone(), lab.env("observer"));
            let (done, answer) = tokio::sync::oneshot::channel();
            env.tasks.spawn("caller", async move {
                let request = ReadOverlays { place, cell, after: Seq::default() };
                let _ = done
                    .send(cluster.call_target(place.target, &request, Default::default(), patience).await);
            });
            answer
        };
        let calls: Vec<_> = (0..700).map(|_| ask(Duration::from_secs(5))).collect();
        let mut busy = 0;
        for call in calls {
            match call.await.unwrap() {
                Err(e) if matches!(e.kind, ErrorKind::Busy { .. }) => busy += 1,
                answered => drop(answered.unwrap()),
            }
        }
        assert_eq!(busy, 700 - 512, "more than one connection may have");
        // It is asked while it answers others in a second: these are dropped, and no disk reads for them.
        let dropped = || lab.env(&node).watch.counter("weir_rpc_dropped_total", ("", "")).get();
        assert_eq!(dropped(), 0);
        let calls: Vec<_> = (0..30).map(|_| ask(Duration::from_millis(300))).collect();
        for call in calls {
            assert_eq!(call.await.unwrap().unwrap_err().kind, ErrorKind::Deadline);
        }
        lab.world().sleep(Duration::from_secs(2)).await;
        assert_eq!(dropped(), 30);
        let stat = StatTarget { target: place.target };
        cluster.call_target(place.target, &stat, Default::default(), SHORT).await.unwrap();
    });
}
