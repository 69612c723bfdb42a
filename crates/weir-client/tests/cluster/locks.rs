//! Claims about locks, on a whole simulated cluster: a lock has one holder at a time, through any failure of
//! the leader, the network and clients; a client learns of a lost lock before it can do harm.
use bytes::Bytes;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use weir_client::{Client, Handle, LockWish, Locked, OpenMode};
use weir_lab::*;
use weir_proto::lock::{LockKind, LockOwner, LockRange, LockSpace};
use weir_proto::{ErrorKind, InodeId};

const ROOT: InodeId = InodeId::ROOT;
const LEASE: Duration = Duration::from_millis(2000);

fn wish(owner: u64, start: u64, end: u64, kind: Option<LockKind>) -> LockWish {
    let owner = LockOwner { space: LockSpace::Fcntl, id: owner };
    LockWish { owner, range: LockRange::new(start, end).unwrap(), kind, pid: 1 }
}
const EX: Option<LockKind> = Some(LockKind::Exclusive);

async fn make(c: &Client, name: &str) -> Handle {
    c.create(&root(), ROOT, name.as_bytes(), 0o644, false, OpenMode::BOTH).await.unwrap().handle
}
async fn wait(c: &Client, h: Handle, owner: u64) -> weir_proto::Result<Locked> {
    c.wait_lock(h, wish(owner, 0, 0, EX), &Notify::new()).await
}
async fn write(c: &Client, h: Handle, text: &str) -> weir_proto::Result<usize> {
    match c.try_write(h, 0, text.as_bytes()) {
        Some(done) => done,
        None => c.write(h, 0, Bytes::copy_from_slice(text.as_bytes())).await,
    }
}
async fn read(c: &Client, h: Handle) -> weir_proto::Result<String> {
    let parts = c.read(h, 0, 100).await?;
    Ok(String::from_utf8(parts.concat()).unwrap())
}

#[test]
fn a_counter_under_a_lock_counts_every_step() {
    for seed in 0..6 {
        Lab::new(500 + seed).run(6, |lab| async move {
            let counted = Rc::new(Cell::new(0u64));
            let done = Rc::new(Cell::new(0));
            let setup = lab.client("setup").await;
            let h = make(&setup, "f").await;
            write(&setup, h, &format!("{:010}", 0)).await.unwrap();
            setup.fsync(h).await.unwrap();
            let count = |lab: Lab, name: String, counted: Rc<Cell<u64>>, done: Rc<Cell<u32>>| async move {
                let c = lab.client(&name).await;
                let h = make(&c, "f").await;
                for step in 0..12 {
                    assert_eq!(wait(&c, h, step).await.unwrap(), Locked::Granted, "{name}");
                    let n: u64 = read(&c, h).await.unwrap().parse().unwrap();
                    assert_eq!(n, counted.get(), "{name}: somebody else counts at the same time");
                    lab.world().clock().sleep(Duration::from_millis(300)).await;
                    write(&c, h, &format!("{:010}", n + 1)).await.unwrap();
                    counted.set(n + 1);
                    assert_eq!(c.try_lock(h, wish(step, 0, 0, None)).await.unwrap(), Locked::Granted);
                }
                c.flush(h).await.unwrap();
                c.release(h).await.unwrap();
                done.set(done.get() + 1);
            };
            let clients =
                ["a", "b", "c"].map(|name| count(lab.clone(), name.into(), counted.clone(), done.clone()));
            let trouble = async {
                let clock = lab.world().clock();
                let names = ["a", "b", "c"];
                let mut n = seed as usize;
                while done.get() < 3 {
                    clock.sleep(Duration::from_millis(1500 + 130 * seed)).await;
                    n += 1;
                    match n % 4 {
                        0 => {
                            lab.kill_meta();
                            clock.sleep(Duration::from_millis(100)).await;
                            lab.meta().await;
                        }
                        1 => lab.world().reset_connections(names[n % 3], "meta"),
                        2 => {
                            lab.world().pause(names[n % 3]);
                            clock.sleep(LEASE / 2).await;
                            lab.world().resume(names[n % 3]);
                        }
                        _ => {}
                    }
                }
            };
            let [a, b, c] = clients;
            tokio::join!(a, b, c, trouble);
            assert_eq!(read(&setup, h).await.unwrap(), format!("{:010}", 36), "seed {seed}");
            assert_eq!(setup.losses().0, 0);
        });
    }
}

#[test]
fn a_client_cut_off_loses_its_locks_and_learns_it() {
    Lab::new(510).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let ha = make(&a, "f").await;
        let other = make(&a, "g").await;
        write(&a, ha, "saved").await.unwrap();
        a.fsync(ha).await.unwrap();
        assert_eq!(wait(&a, ha, 1).await.unwrap(), Locked::Granted);
        write(&a, ha, "never").await.unwrap();
        write(&a, other, "also lost").await.unwrap();
        lab.world().pause("a");
        // Free when the term is over, not before.
        let begun = lab.world().now();
        let hb = make(&b, "f").await;
        assert_eq!(wait(&b, hb, 1).await.unwrap(), Locked::Granted);
        assert!(lab.world().now().since(begun) >= LEASE / 2);
        write(&b, hb, "newer").await.unwrap();
        b.fsync(hb).await.unwrap();
        lab.world().resume("a");
        // The handle whose lock is gone does nothing any more; the one with lost changes reports them once.
        let e = write(&a, ha, "stale").await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Io);
        assert_eq!(read(&a, ha).await.unwrap_err().kind, ErrorKind::Io);
        assert_eq!(a.try_lock(ha, wish(1, 5, 5, EX)).await.unwrap_err().kind, ErrorKind::Io);
        assert_eq!(a.fsync(other).await.unwrap_err().kind, ErrorKind::Io);
        a.fsync(other).await.unwrap();
        let (count, named) = a.losses();
        assert!(count >= 2 && named.iter().any(|l| l.what.contains("locks")), "{named:?}");
        assert_eq!(b.losses().0, 0);
        // A new open works, and sees what the other wrote.
        let _ = a.release(ha).await; // reported already
        let ha = make(&a, "f").await;
        assert_eq!(read(&a, ha).await.unwrap(), "newer");
        assert_eq!(a.try_lock(ha, wish(1, 0, 0, EX)).await.unwrap(), Locked::Held);
        b.release(hb).await.unwrap();
        assert_eq!(a.try_lock(ha, wish(1, 0, 0, EX)).await.unwrap(), Locked::Granted);
        write(&a, ha, "again").await.unwrap();
        a.fsync(ha).await.unwrap();
    });
}

#[test]
fn writes_waiting_under_a_lost_lock_are_not_written() {
    for delay in 0..24 {
        Lab::new(540).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let (ha, hb) = (make(&a, "f").await, make(&b, "f").await);
            write(&b, hb, "first").await.unwrap();
            b.fsync(hb).await.unwrap();
            assert_eq!(wait(&a, ha, 1).await.unwrap(), Locked::Granted);
            assert_eq!(read(&a, ha).await.unwrap(), "first");
            // It asks the leader, which does not get the request until the lock is another's.
            let waits = write(&a, ha, "stale");
            let others = async {
                lab.world().clock().sleep(Duration::from_micros(delay * 60)).await;
                lab.cut_off("a");
                assert_eq!(wait(&b, hb, 1).await.unwrap(), Locked::Granted);
                write(&b, hb, "newer").await.unwrap();
                b.fsync(hb).await.unwrap();
                lab.let_back("a");
            };
            let (waited, ()) = tokio::join!(waits, others);
            assert!(waited.as_ref().map_or_else(|e| e.kind == ErrorKind::Io, |_| delay > 0), "{waited:?}");
            assert_eq!(read(&b, hb).await.unwrap(), "newer", "cut off after {delay} steps");
        });
    }
}

#[test]
fn a_client_that_is_back_within_half_a_term_loses_nothing() {
    Lab::new(520).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let ha = make(&a, "f").await;
        assert_eq!(wait(&a, ha, 1).await.unwrap(), Locked::Granted);
        let hb = make(&b, "f").await;
        for round in 0..5 {
            write(&a, ha, &format!("round {round}")).await.unwrap();
            lab.world().pause("a");
            lab.world().clock().sleep(LEASE / 2).await;
            lab.world().resume("a");
            a.fsync(ha).await.unwrap();
            assert_eq!(b.try_lock(hb, wish(1, 0, 0, EX)).await.unwrap(), Locked::Held);
            assert_eq!(read(&b, hb).await.unwrap(), format!("round {round}"));
        }
        assert_eq!(a.losses().0, 0);
    });
}

#[test]
fn an_interrupted_wait_leaves_no_lock_behind() {
    Lab::new(530).run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        let (ha, hb, hc) = (make(&a, "f").await, make(&b, "f").await, make(&c, "f").await);
        // The interrupt comes at every moment around the release.
        for microseconds in (0..6000).step_by(150) {
            assert_eq!(a.try_lock(ha, wish(1, 0, 0, EX)).await.unwrap(), Locked::Granted);
            let interrupt = Arc::new(Notify::new());
            let waits = b.wait_lock(hb, wish(1, 0, 0, EX), &interrupt);
            let release = async {
                lab.world().clock().sleep(Duration::from_millis(3)).await;
                a.try_lock(ha, wish(1, 0, 0, None)).await.unwrap();
            };
            let signal = async {
                lab.world().clock().sleep(Duration::from_micros(microseconds)).await;
                interrupt.notify_one();
            };
            let (locked, (), ()) = tokio::join!(waits, release, signal);
            let expected = match locked.unwrap() {
                Locked::Granted => Locked::Held,
                Locked::Interrupted => Locked::Granted,
                other => panic!("{other:?}"),
            };
            assert_eq!(c.try_lock(hc, wish(1, 0, 0, EX)).await.unwrap(), expected, "{microseconds} µs");
            for (client, h) in [(&b, hb), (&c, hc)] {
                client.try_lock(h, wish(1, 0, 0, None)).await.unwrap();
            }
        }
    });
}

/// The kernel reports a close at once, and the end of the open file, with which its lock goes, a moment
/// later.
#[test]
fn a_try_lock_waits_for_the_close_of_the_holder() {
    Lab::new(535).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (ha, hb) = (make(&a, "f").await, make(&b, "f").await);
        let clock = lab.world().clock();
        let held = wish(1, 0, 0, EX);
        let process = wish(7, 0, 0, None).owner;
        assert_eq!(a.try_lock(ha, held).await.unwrap(), Locked::Granted);
        let begun = clock.now();
        assert_eq!(b.try_lock(hb, held).await.unwrap(), Locked::Held);
        assert!(clock.now().since(begun) < Duration::from_millis(20), "nobody closes it");

        // A copy of the descriptor is closed: the lock stays.
        a.unlock_owner(ha, process).await.unwrap();
        assert_eq!(b.try_lock(hb, held).await.unwrap(), Locked::Held);
        assert!(clock.now().since(begun) < Duration::from_millis(500));

        a.unlock_owner(ha, process).await.unwrap();
        let end = async {
            clock.sleep(Duration::from_millis(30)).await;
            a.release(ha).await.unwrap();
        };
        let (locked, ()) = tokio::join!(b.try_lock(hb, held), end);
        assert_eq!(locked.unwrap(), Locked::Granted);
    });
}

#[test]
fn locks_end_with_owners_handles_and_clients() {
    Lab::new(540).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (h1, h2, hb) = (make(&a, "f").await, make(&a, "f").await, make(&b, "f").await);
        let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        for (h, owner) in [(h1, 1), (h2, 1), (h1, 2), (h2, 3)] {
            let at = owner * 100 + 2 * h.0;
            assert_eq!(a.try_lock(h, wish(owner, at, at, EX)).await.unwrap(), Locked::Granted);
        }
        assert_eq!(b.list_locks(ino).await.unwrap().0.len(), 4);
        // An owner's close: all its locks of the file, through any handle.
        a.unlock_owner(h2, wish(1, 0, 0, None).owner).await.unwrap();
        assert_eq!(b.list_locks(ino).await.unwrap().0.len(), 2);
        // A handle's end: all locks through it.
        a.release(h1).await.unwrap();
        let left = b.list_locks(ino).await.unwrap().0;
        assert_eq!((left.len(), left[0].owner.id), (1, 3));
        assert!(left[0].client.contains('a') && !left[0].waits);
        // A lock of an owner through one handle while it closes another stays when that other ends.
        let h1 = make(&a, "f").await;
        assert_eq!(a.try_lock(h1, wish(5, 700, 700, EX)).await.unwrap(), Locked::Granted);
        let closed = a.unlock_owner(h1, wish(5, 0, 0, None).owner);
        let (closed, locked) = tokio::join!(closed, a.try_lock(h2, wish(5, 701, 701, EX)));
        closed.unwrap();
        assert_eq!(locked.unwrap(), Locked::Granted);
        a.release(h1).await.unwrap();
        assert_eq!(b.try_lock(hb, wish(1, 701, 701, EX)).await.unwrap(), Locked::Held);
        // A client's end.
        a.shutdown().await.unwrap();
        assert_eq!(b.try_lock(hb, wish(1, 0, 999, EX)).await.unwrap(), Locked::Granted);
        assert!(b.test_lock(hb, wish(2, 0, 0, EX)).await.unwrap().is_some_and(|w| w.pid == Some(1)));
    });
}
