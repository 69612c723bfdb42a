//! A mount with a hundred times the usual requests: none fails, few are in flight, and nothing is left over.
use crate::{ROOT, close, create};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use weir_client::{Client, Handle, LockWish, Locked, OpenMode};
use weir_lab::*;
use weir_proto::Result;
use weir_proto::lock::{LockKind, LockOwner, LockRange, LockSpace};

/// Threads of programs, each in a call.
const THREADS: u64 = 10_000;

/// The results of calls that run at the same time.
type Results<T> = Arc<Mutex<Vec<T>>>;

async fn wait_for<T>(lab: &Lab, results: &Results<T>, count: usize) {
    while results.lock().unwrap().len() < count {
        lab.world().sleep(Duration::from_millis(10)).await;
    }
}

/// Requests that the leader has served, by the name of their method.
fn served(lab: &Lab, method: &str) -> u64 {
    let read = lab.env("meta").watch.meters.read();
    let of_method = read.iter().filter(|m| m.name == "weir_rpc_seconds" && m.label.1 == method);
    of_method.map(|m| m.count).sum()
}

fn in_flight(lab: &Lab, of: &str, name: &str) -> f64 {
    lab.env(of).watch.meters.total(name).map_or(0.0, |(_, value)| value)
}

/// One call of a thread.
async fn call(c: &Client, n: u64) -> Result<()> {
    let (name, other) = (format!("f{}", n / 5).into_bytes(), format!("g{}", n / 5).into_bytes());
    match n % 5 {
        0 => c.mkdir(&root(), ROOT, format!("d{n}").as_bytes(), 0o755).await.map(drop),
        1 => c.lookup(&root(), ROOT, &other).await.map(drop),
        2 => c.getattr(ROOT).await.map(drop),
        3 => {
            let made = c.create(&root(), ROOT, &name, 0o644, true, OpenMode::BOTH).await?;
            c.release(made.handle).await
        }
        _ => c.list_locks(ROOT).await.map(drop),
    }
}

#[test]
fn ten_thousand_calls_of_a_mount_wait_for_a_slow_leader() {
    Lab::new(900).run(6, |lab| async move {
        // Another client in the directory: no file is created locally.
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        b.lookup(&root(), ROOT, b"nothing").await.unwrap();
        lab.world().pause("meta");
        let done: Results<Result<()>> = Arc::default();
        for n in 0..THREADS {
            let (a, done) = (a.clone(), done.clone());
            lab.env("a").tasks.spawn("thread", async move {
                let result = call(&a, n).await;
                done.lock().unwrap().push(result);
            });
        }
        lab.world().sleep(Duration::from_millis(900)).await;
        lab.world().resume("meta");
        let mut most = 0.0_f64;
        while done.lock().unwrap().len() < THREADS as usize {
            lab.world().sleep(Duration::from_millis(1)).await;
            most = most.max(in_flight(&lab, "meta", "weir_rpc_inflight"));
        }
        let failed = done.lock().unwrap().iter().find_map(|r| r.clone().err());
        assert_eq!(failed, None, "no call fails");
        // Two connections with 1,024 calls each; the rest wait at the mount.
        assert!(most <= 2100.0, "{most} calls at the leader");
        a.check();
        lab.world().sleep(Duration::from_secs(3)).await;
        assert!(
            in_flight(&lab, "meta", "weir_rpc_inflight") <= 4.0,
            "nothing is left but what waits for news"
        );
        assert_eq!(in_flight(&lab, "meta", "weir_meta_waiting_requests"), 0.0);
    });
}

#[test]
fn closes_wait_for_a_leader_that_is_away_in_few_tasks() {
    Lab::new(901).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let mut both: Vec<(Handle, Handle)> = Vec::new();
        for n in 0..300 {
            let name = format!("f{n}");
            let h = create(&a, &name).await;
            // Two writers: neither has a lease, so a close is reported at once.
            let found = b.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap();
            both.push((h, b.open(&root(), found.attr.ino, OpenMode::BOTH).await.unwrap().handle));
        }
        let before = served(&lab, "Close");
        lab.world().pause("meta");
        for (h, _) in &both {
            let (a, h) = (a.clone(), *h);
            lab.env("a").tasks.spawn("thread", async move { close(&a, h).await });
        }
        lab.world().sleep(Duration::from_millis(500)).await;
        a.check(); // few tasks report
        lab.world().resume("meta");
        lab.world().sleep(Duration::from_secs(3)).await;
        let messages = served(&lab, "Close") - before;
        assert!(messages <= 20, "{messages} messages for 300 closes");
        // The leader has counted all of them: the other client gets leases again.
        for (_, h) in &both {
            close(&b, *h).await;
        }
        a.check();
    });
}

#[test]
fn waits_for_locks_ask_a_restarted_leader_at_a_growing_pace() {
    Lab::new(902).run(6, |lab| async move {
        let (holder, gone) = (lab.client("holder").await, lab.client("gone").await);
        let wish = |owner, kind| {
            let owner = LockOwner { space: LockSpace::Fcntl, id: owner };
            LockWish { owner, range: LockRange::WHOLE, kind, pid: 1 }
        };
        let h = create(&holder, "f").await;
        let locked = holder.try_lock(h, wish(1, Some(LockKind::Exclusive))).await.unwrap();
        assert_eq!(locked, Locked::Granted);
        gone.lookup(&root(), ROOT, b"f").await.unwrap();
        let done: Results<Result<Locked>> = Arc::default();
        for name in ["a", "b"] {
            let c = lab.client(name).await;
            let ino = c.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let h = c.open(&root(), ino, OpenMode::BOTH).await.unwrap().handle;
            for owner in 0..300 {
                let (c, done) = (c.clone(), done.clone());
                lab.env(name).tasks.spawn("thread", async move {
                    let locked = c.wait_lock(h, wish(owner, Some(LockKind::Shared)), &Notify::new()).await;
                    done.lock().unwrap().push(locked);
                });
            }
        }
        lab.world().sleep(Duration::from_secs(1)).await;
        // A client that does not return: the leader waits for it for a lease term.
        lab.world().kill("gone");
        drop(gone);
        lab.kill_meta();
        lab.meta().await;
        lab.world().sleep(Duration::from_secs(4)).await;
        let asked = served(&lab, "SetLock");
        assert!(asked <= 600 * 12, "{asked} requests of 600 waits in some seconds");
        holder.try_lock(h, wish(1, None)).await.unwrap();
        wait_for(&lab, &done, 600).await;
        let granted = |locked: &Result<Locked>| *locked == Ok(Locked::Granted);
        assert!(done.lock().unwrap().iter().all(granted), "each gets its lock");
    });
}
