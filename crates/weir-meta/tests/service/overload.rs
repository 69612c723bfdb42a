//! A hundred times the usual requests, from 64 mounts: nothing fails, work and memory keep their bounds, and
//! nothing is left over.
use crate::common::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_env::sim::World;
use weir_proto::lock::*;
use weir_proto::meta::*;
use weir_proto::{ErrorKind, Request, Result};

const MOUNTS: usize = 64;

/// Requests of many clients at once, and their results.
#[derive(Clone, Default)]
struct Crowd(Arc<Mutex<Sent>>);

#[derive(Default)]
struct Sent {
    count: usize,
    results: Vec<Result<()>>,
}

impl Crowd {
    fn send<R: Request + Send + Sync + 'static>(&self, by: &Client, request: R) {
        self.0.lock().unwrap().count += 1;
        let (connection, me) = (by.connection.clone(), self.clone());
        by.env.tasks.spawn("request", async move {
            let done = connection.call(&request, vec![], PATIENCE).await;
            me.0.lock().unwrap().results.push(done.map(drop));
        });
    }
    fn answered(&self) -> usize {
        self.0.lock().unwrap().results.len()
    }
    /// All results until now, once there are as many.
    async fn wait_for(&self, world: &World, count: usize) -> Vec<Result<()>> {
        while self.answered() < count {
            world.sleep(Duration::from_millis(10)).await;
        }
        self.0.lock().unwrap().results.clone()
    }
    async fn all(&self, world: &World) -> Vec<Result<()>> {
        let count = self.0.lock().unwrap().count;
        self.wait_for(world, count).await
    }
}

async fn mounts(world: &World, count: usize) -> Vec<Client> {
    let mut all = Vec::new();
    for n in 0..count {
        all.push(Client::start(world, &format!("m{n}")).await);
    }
    all
}

/// How often operations were tried after their first try.
fn retries(world: &World) -> usize {
    world.node("meta").watch.meters.total("weir_meta_retries_total").map_or(0, |(_, count)| count as usize)
}

fn named(by: &Client, slot: u32, name: String) -> Create {
    let op = Op { session: by.session, slot, seq: 1 };
    let (cred, name) = (root(), name.into());
    Create { op, cred, parent: ROOT, name, mode: 0o644, umask: 0, exclusive: true, open: 0 }
}

#[test]
fn requests_of_64_mounts_in_one_directory_are_tried_few_times() {
    simulate(80, async |world| {
        let node = start(&world).await;
        let mounts = mounts(&world, MOUNTS).await;
        for (n, mount) in mounts.iter().enumerate() {
            mount.lookup(ROOT, "nothing").await.unwrap(); // it caches the directory
            mount.set_slow(Duration::from_millis(5 * n as u64));
        }
        let (crowd, before) = (Crowd::default(), retries(&world));
        for (n, mount) in mounts.iter().enumerate() {
            for k in 0..60 {
                crowd.send(mount, named(mount, k, format!("{n}-{k}")));
            }
            for k in 0..20 {
                let session = mount.session;
                crowd.send(mount, GetAttr { session, ino: ROOT });
                crowd.send(
                    mount,
                    Lookup { session, cred: root(), parent: ROOT, name: b(&format!("{n}-{k}")) },
                );
            }
        }
        let results = crowd.all(&world).await;
        assert_eq!(results.len(), MOUNTS * 100);
        assert_eq!(results.into_iter().find_map(Result::err), None, "no request fails");
        let tries = retries(&world) - before;
        assert!(tries <= 2 * MOUNTS * 100, "{tries} retries of {} requests", MOUNTS * 100);
        assert_eq!(node.meta.waiting(), (0, 0));
        assert_eq!(node.meta.counts().0, MOUNTS, "no session has ended");
    });
}

#[test]
fn requests_that_wait_for_a_restart_are_tried_few_times() {
    simulate(81, async |world| {
        let node = start(&world).await;
        let mut mounts = mounts(&world, MOUNTS).await;
        let mut files = Vec::new();
        for (n, mount) in mounts.iter().enumerate() {
            files.push(mount.create(ROOT, &format!("f{n}")).await.unwrap().entry);
        }
        world.kill("meta");
        drop(node);
        let node = start(&world).await;
        let (crowd, before) = (Crowd::default(), retries(&world));
        for (n, mount) in mounts.iter_mut().enumerate() {
            mount.reconnect(&format!("m{n}")).await;
            mount.resume(vec![held(&files[n], LeaseKind::Write, 0, 1)]).await.unwrap();
            if n == 0 {
                for _ in 0..500 {
                    crowd.send(mount, GetAttr { session: mount.session, ino: files[n + 1].attr.ino });
                }
            }
            world.sleep(Duration::from_millis(10)).await;
        }
        let results = crowd.all(&world).await;
        assert_eq!(results.into_iter().find_map(Result::err), None);
        let tries = retries(&world) - before;
        assert!(tries <= 3 * 500, "{tries} retries of 500 requests, while 63 sessions returned");
        assert_eq!(node.meta.waiting(), (0, 0));
    });
}

#[test]
fn too_many_that_wait_are_refused_and_come_again() {
    simulate(82, async |world| {
        let node = start(&world).await;
        node.meta.set_waiting_max(100);
        let writer = Client::start(&world, "writer").await;
        let ino = writer.create(ROOT, "f").await.unwrap().entry.attr.ino;
        writer.set_slow(Duration::from_secs(1));
        let (mounts, crowd) = (mounts(&world, 20).await, Crowd::default());
        let ask = |mount: &Client| crowd.send(mount, GetAttr { session: mount.session, ino });
        (0..20).for_each(|_| mounts.iter().for_each(ask));
        let refused = crowd.wait_for(&world, 300).await;
        assert!(refused.iter().all(|r| r.as_ref().is_err_and(|e| matches!(e.kind, ErrorKind::Busy { .. }))));
        assert_eq!(node.meta.waiting().0, 100);
        // One that need not wait is served meanwhile.
        mounts[0].getattr(ROOT).await.unwrap();
        // Those of a connection that ends wait no more: their client asks again on the next one.
        mounts[0].connection.close("cut");
        world.sleep(Duration::from_millis(100)).await;
        assert!(node.meta.waiting().0 < 100, "{:?}", node.meta.waiting());
        world.sleep(Duration::from_secs(2)).await;
        assert_eq!(node.meta.waiting(), (0, 0));
        (0..20).for_each(|_| mounts[1..].iter().for_each(ask));
        assert!(crowd.all(&world).await[400..].iter().all(Result::is_ok), "all are answered");
    });
}

#[test]
fn a_mount_is_not_slow_because_much_is_asked_of_it() {
    simulate(83, async |world| {
        let node = start(&world).await;
        let mounts = mounts(&world, 3).await;
        let mut files = Vec::new();
        for n in 0..2000 {
            files.push(mounts[0].create(ROOT, &format!("f{n}")).await.unwrap().entry.attr.ino);
        }
        // All its answers take twice as long as one revoke may.
        mounts[0].set_slow(Duration::from_millis(16));
        let crowd = Crowd::default();
        for (n, ino) in files.into_iter().enumerate() {
            let mount = &mounts[1 + n % 2];
            crowd.send(mount, GetAttr { session: mount.session, ino });
        }
        let begun = world.now();
        let results = crowd.all(&world).await;
        assert!(world.now().since(begun) > 4 * Duration::from_millis(LEASE_MS.into()));
        assert_eq!(results.into_iter().find_map(Result::err), None);
        assert_eq!(node.meta.counts().0, 3, "no session has ended");
        let most = mounts[0].revokes.open.lock().unwrap().1;
        assert!(most <= 256, "{most} revokes at the same time");
        assert_eq!(node.meta.waiting(), (0, 0));
    });
}

#[test]
fn hints_to_clients_that_do_not_answer_have_a_bound() {
    simulate(84, async |world| {
        let node = start(&world).await;
        let (holder, mounts) = (Client::start(&world, "holder").await, mounts(&world, 6).await);
        let ino = holder.create(ROOT, "f").await.unwrap().entry.attr.ino;
        let owner = |id| LockOwner { space: LockSpace::Flock, id };
        let lock = |by: &Client, kind, ticket| {
            let (session, owner, range) = (by.session, owner(ticket), LockRange::WHOLE);
            SetLock { session, ino, owner, range, kind, pid: 1, ticket, closing: false }
        };
        let held = holder.call(&lock(&holder, Some(LockKind::Exclusive), 0)).await.unwrap();
        assert_eq!(held.outcome, LockOutcome::Granted);
        mounts.iter().for_each(|mount| mount.set_deaf(true));
        let crowd = Crowd::default();
        let wanted = |mount: &Client| {
            (1..=1000).for_each(|ticket| crowd.send(mount, lock(mount, Some(LockKind::Shared), ticket)));
        };
        mounts.iter().for_each(wanted);
        assert!(crowd.all(&world).await.iter().all(Result::is_ok));
        holder.call(&lock(&holder, None, 0)).await.unwrap();
        assert_eq!(node.meta.waiting().1, 4096, "of 6,000 waits that have ended");
        world.sleep(Duration::from_secs(6)).await;
        assert_eq!(node.meta.waiting(), (0, 0));
        for ticket in 1..=1000 {
            let answer = mounts[5].call(&lock(&mounts[5], Some(LockKind::Shared), ticket)).await.unwrap();
            assert_eq!(answer.outcome, LockOutcome::Granted, "a client without a hint asks by itself");
        }
    });
}

#[test]
fn connections_that_end_together_are_searched_together() {
    simulate(85, async |world| {
        let _node = start(&world).await;
        let mounts = mounts(&world, 100).await;
        let before = GONE_ASKED.get();
        mounts.iter().for_each(|mount| mount.connection.close("all at once"));
        world.sleep(Duration::from_secs(5)).await;
        let asked = GONE_ASKED.get() - before;
        assert!((100..=1000).contains(&asked), "{asked} checks of 100 processes");
    });
}
