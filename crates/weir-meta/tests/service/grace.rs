//! Requests after a restart, while some sessions have not returned: those wait that may conflict.
use crate::common::*;
use std::time::Duration;
use weir_env::sim::World;
use weir_proto::lock::*;
use weir_proto::meta::*;
use weir_proto::volume::{Policy, Quota, ReserveQuota, VolumeCreate};
use weir_proto::{InodeId, VolumeId};

/// Longer than any request that does not wait, and shorter than the grace period.
const AT_ONCE: Duration = Duration::from_millis(200);

pub struct Place {
    volume: VolumeId,
    pub root: InodeId,
}

pub async fn make_volume(by: &Client, name: &str) -> Place {
    let new = VolumeCreate {
        op: by.op(),
        cred: root(),
        name: name.into(),
        parent: ROOT,
        entry: b(name),
        path: b(&format!("/{name}")),
        owner: 0,
        group: 0,
        mode: 0o755,
        admins: vec![],
        quota: Quota::NONE,
        policy: Policy { scheme: None, pool: None },
    };
    let made = by.call(&new).await.unwrap();
    Place { volume: made.id, root: made.root }
}

/// Two volumes, made by a client that has left again.
async fn make_volumes(world: &World) -> (Place, Place) {
    let maker = Client::start(world, "maker").await;
    let places = (make_volume(&maker, "one").await, make_volume(&maker, "other").await);
    maker.call(&SessionClose { session: maker.session }).await.unwrap();
    places
}

async fn restart(world: &World, node: Node) -> Node {
    world.kill("meta");
    drop(node);
    start(world).await
}

/// Whether a request is answered before sessions that are away must be given up.
async fn is_at_once<T>(world: &World, request: impl Future<Output = T>) -> bool {
    world.clock().timeout(AT_ONCE, request).await.is_ok()
}

#[test]
fn only_volumes_of_absent_sessions_wait_after_a_restart() {
    simulate(41, async |world| {
        let node = start(&world).await;
        let (one, other) = make_volumes(&world).await;
        let (dead, mut a) = (Client::start(&world, "dead").await, Client::start(&world, "a").await);
        let made = dead.create(one.root, "f").await.unwrap().entry;
        dead.getattr(other.root).await.unwrap();
        let mine = a.create(other.root, "g").await.unwrap().entry;
        a.close(mine.attr.ino, true).await.unwrap();
        world.kill("dead");
        let _node = restart(&world, node).await;
        let begun = world.now();
        a.reconnect("a").await;
        a.resume(vec![held(&mine, LeaseKind::Write, 0, 0)]).await.unwrap();
        // The dead client had only read in that volume: reads continue, and changes of its own file.
        assert!(is_at_once(&world, a.lookup(other.root, "g")).await);
        assert!(is_at_once(&world, a.open(mine.attr.ino, true, false)).await);
        assert!(is_at_once(&world, a.commit(mine.attr.ino, 1, 5, true)).await);
        assert!(!is_at_once(&world, a.create(other.root, "h")).await, "it may cache what is there");
        // It may have unreported bytes in the volume.
        assert!(!is_at_once(&world, a.getattr(made.attr.ino)).await);
        assert!(!is_at_once(&world, a.lookup(ROOT, "one")).await, "the name leads there");
        let list =
            ReadDir { session: a.session, cred: root(), dir: ROOT, after: 0, limit: 9, with_attrs: true };
        assert!(!is_at_once(&world, a.call(&list)).await, "its topmost directory is listed");
        assert!(is_at_once(&world, a.lookup(ROOT, "other")).await);
        let held_there = SetLock {
            session: a.session,
            ino: made.attr.ino,
            owner: LockOwner { space: LockSpace::Flock, id: 1 },
            range: LockRange::WHOLE,
            kind: Some(LockKind::Shared),
            pid: 1,
            ticket: 0,
            closing: false,
        };
        let none = ReclaimLocks { session: a.session, held: vec![], more: false };
        a.call(&none).await.unwrap();
        assert_eq!(a.call(&held_there).await.unwrap().outcome, LockOutcome::Grace);
        assert!(a.getattr(made.attr.ino).await.unwrap().lease.recover);
        let waited = world.now().since(begun);
        assert!(waited >= Duration::from_millis(u64::from(LEASE_MS)), "{waited:?}");
    });
}

#[test]
fn a_volume_without_absent_sessions_is_changed_at_once() {
    simulate(42, async |world| {
        let node = start(&world).await;
        let (one, other) = make_volumes(&world).await;
        let (dead, mut a) = (Client::start(&world, "dead").await, Client::start(&world, "a").await);
        dead.create(one.root, "f").await.unwrap();
        dead.lookup(ROOT, "one").await.unwrap();
        a.create(other.root, "g").await.unwrap();
        world.kill("dead");
        let _node = restart(&world, node).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        assert!(is_at_once(&world, a.create(other.root, "h")).await);
        assert!(is_at_once(&world, a.unlink(other.root, "g")).await);
        assert!(is_at_once(&world, a.call(&StatFs { session: a.session })).await);
        assert!(!is_at_once(&world, a.mkdir(ROOT, "d")).await, "the dead client has looked there");
        // A client that comes now is like one that has returned.
        let late = Client::start(&world, "late").await;
        assert!(is_at_once(&world, late.create(other.root, "i")).await);
        assert!(!is_at_once(&world, late.create(one.root, "i")).await);
    });
}

#[test]
fn an_absent_session_that_held_nothing_delays_nothing() {
    simulate(43, async |world| {
        let node = start(&world).await;
        let (mut a, _idle) = (Client::start(&world, "a").await, Client::start(&world, "idle").await);
        // One that has returned everything counts as idle, too, after a while.
        let was_busy = Client::start(&world, "busy").await;
        let ino = was_busy.create(ROOT, "f").await.unwrap().entry.attr.ino;
        was_busy.close(ino, true).await.unwrap();
        for ino in [ino, ROOT] {
            let (session, keep) = (was_busy.session, LeaseKind::None);
            was_busy.call(&ReleaseLease { session, ino, keep }).await.unwrap();
        }
        world.sleep(Duration::from_millis(u64::from(LEASE_MS))).await;
        world.kill("idle");
        world.kill("busy");
        let _node = restart(&world, node).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        assert!(is_at_once(&world, a.create(ROOT, "g")).await);
    });
}

#[test]
fn a_reservation_is_something_that_a_session_holds() {
    simulate(44, async |world| {
        let node = start(&world).await;
        let (one, other) = make_volumes(&world).await;
        let (dead, mut a) = (Client::start(&world, "dead").await, Client::start(&world, "a").await);
        let ask =
            |c: &Client, volume| ReserveQuota { session: c.session, volume, spent: 0, must: 1, want: 1 };
        dead.call(&ask(&dead, one.volume)).await.unwrap();
        world.kill("dead");
        let _node = restart(&world, node).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        assert!(is_at_once(&world, a.call(&ask(&a, other.volume))).await);
        assert!(!is_at_once(&world, a.call(&ask(&a, one.volume))).await);
    });
}

/// The second leader does not know what the dead client holds: it keeps the record of the first one.
#[test]
fn a_second_restart_still_knows_what_absent_sessions_hold() {
    simulate(45, async |world| {
        let node = start(&world).await;
        let (one, other) = make_volumes(&world).await;
        let (dead, mut a) = (Client::start(&world, "dead").await, Client::start(&world, "a").await);
        dead.create(one.root, "f").await.unwrap();
        world.kill("dead");
        let node = restart(&world, node).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        world.sleep(Duration::from_millis(u64::from(LEASE_MS) * 3 / 4)).await;
        let _node = restart(&world, node).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        assert!(!is_at_once(&world, a.lookup(one.root, "f")).await);
        assert!(is_at_once(&world, a.create(other.root, "g")).await);
    });
}

/// Clients cannot reach the leader for six terms after its start; then they come one after the other.
#[test]
fn the_wait_for_clients_begins_with_the_first_that_comes() {
    let term = Duration::from_millis(LEASE_MS.into());
    simulate(47, async |world| {
        let node = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let of_b = b.create(ROOT, "f").await.unwrap().entry;
        let _node = restart(&world, node).await;
        world.sleep(term * 6).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        // It waits for what the other one has.
        assert!(!is_at_once(&world, a.getattr(of_b.attr.ino)).await);
        world.sleep(term / 2).await;
        b.reconnect("b").await;
        assert_eq!(b.resume(vec![held(&of_b, LeaseKind::Write, 0, 1)]).await.unwrap().lost, []);
        assert!(is_at_once(&world, a.lookup(ROOT, "f")).await);
    });
}

/// The leader's machine is cut off from its clients for three terms. The first one that is back wants a file
/// of another.
#[test]
fn clients_that_are_cut_off_together_keep_their_sessions() {
    let term = Duration::from_millis(LEASE_MS.into());
    simulate(48, async |world| {
        let _node = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let of_b = b.create(ROOT, "f").await.unwrap().entry;
        for client in ["a", "b"] {
            world.partition(client, "meta");
        }
        world.sleep(term * 3).await;
        world.heal_all();
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        let (seen, resumed) = tokio::join!(a.getattr(of_b.attr.ino), async {
            world.sleep(term / 2).await;
            b.reconnect("b").await;
            b.resume(vec![held(&of_b, LeaseKind::Write, 0, 1)]).await
        });
        // Its lease may be lowered already: the old connection works again, too.
        assert!(resumed.is_ok(), "{resumed:?}");
        assert!(!seen.unwrap().lease.recover, "its session lives");
    });
}
