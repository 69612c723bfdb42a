//! The guarantees of the service to several clients, with lost replies, silent clients and restarts.
#[path = "service/access.rs"]
mod access;
mod common;
#[path = "service/early.rs"]
mod early;
#[path = "service/full_disk.rs"]
mod full_disk;
#[path = "service/grace.rs"]
mod grace;
#[path = "service/local_creates.rs"]
mod local_creates;
#[path = "service/overload.rs"]
mod overload;
#[path = "service/recall.rs"]
mod recall;
#[path = "service/relation_ends.rs"]
mod relation_ends;
#[path = "service/relations.rs"]
mod relations;
#[path = "service/retention.rs"]
mod retention;
#[path = "service/shown.rs"]
mod shown;

use common::*;
use std::time::Duration;
use weir_proto::meta::*;
use weir_proto::{ErrorKind, NameRule, Request};

#[test]
fn a_change_is_seen_at_once_and_other_caches_are_revoked() {
    simulate(1, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let absent = b.lookup(ROOT, "f").await.unwrap();
        assert_eq!((absent.entry, absent.parent_lease.kind), (None, LeaseKind::Read));
        let made = a.create(ROOT, "f").await.unwrap();
        assert_eq!(b.revoked(), [(ROOT, LeaseKind::None)]);
        assert_eq!(
            (made.created, made.entry.lease.kind, made.entry.lease.token_epoch),
            (true, LeaseKind::Write, 1)
        );
        let ino = made.entry.attr.ino;
        // The writer's attributes are the writer's: it is lowered to Read before another client gets them.
        let seen = b.lookup(ROOT, "f").await.unwrap().entry.unwrap();
        assert_eq!((seen.attr.ino, seen.lease.kind), (ino, LeaseKind::Read));
        assert_eq!(a.revoked(), [(ino, LeaseKind::Read)]);
        // An own change keeps the own lease.
        a.create(ROOT, "g").await.unwrap();
        assert_eq!(a.revoked().len(), 1);
        // A listing does not wait for writers; it leaves their attributes out.
        let list =
            ReadDir { session: b.session, cred: root(), dir: ROOT, after: 0, limit: 100, with_attrs: true };
        let listing = b.call(&list).await.unwrap();
        assert_eq!(names(&listing), ["f".to_owned(), "g".to_owned()].into());
        assert!(listing.entries[0].entry.is_some() && listing.entries[1].entry.is_none());
    });
}

/// A number that no map has would block all reads.
#[test]
fn readers_need_no_cluster_map_that_the_leader_lacks() {
    simulate(3, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        for (map_version, is_fine) in [(MAP_VERSION - 1, true), (MAP_VERSION, true), (u64::MAX, false)] {
            let noted = a.call(&NoteMap { session: a.session, map_version }).await;
            assert_eq!(noted.map_err(|e| e.kind), if is_fine { Ok(()) } else { Err(ErrorKind::Unavailable) });
            let lease = a.open(ino, true, false).await.unwrap().entry.lease;
            assert_eq!(
                lease.map_version, MAP_VERSION,
                "the leader's version at its start, or one that was noted since"
            );
        }
    });
}

#[test]
fn a_shared_file_has_no_leases_until_one_is_left() {
    simulate(2, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        let opened = b.open(ino, true, true).await.unwrap().entry.lease;
        assert_eq!((opened.kind, opened.token_epoch), (LeaseKind::None, 2));
        assert_eq!(a.revoked(), [(ino, LeaseKind::None)]);
        assert_eq!(a.acquire(ino, LeaseKind::Write).await.unwrap().lease.kind, LeaseKind::None);
        // Both write directly and commit, with any epoch that they had last.
        a.commit(ino, 1, 10, false).await.unwrap();
        assert_eq!(b.commit(ino, 2, 5, false).await.unwrap().attr.size, 10, "a commit makes nothing shorter");
        // But not over a truncation: bytes behind the former size do not count.
        let renew = AcquireLease { session: b.session, ino, kind: LeaseKind::Write, renew: true };
        let renewed = b.call(&renew).await.unwrap();
        assert_eq!((renewed.attr.size, renewed.lease.kind), (10, LeaseKind::None));
        assert_eq!(a.commit(ino, 3, 11, false).await.unwrap_err().kind, ErrorKind::Stale);
        a.commit(ino, 3, 10, false).await.unwrap();
        a.commit(ino, renewed.lease.token_epoch, 11, false).await.unwrap();
        b.close(ino, false).await.unwrap();
        b.close(ino, true).await.unwrap();
        let alone = a.acquire(ino, LeaseKind::Write).await.unwrap().lease;
        assert_eq!(alone.kind, LeaseKind::Write);
        assert!(alone.token_epoch > 2 && !alone.recover);
    });
}

#[test]
fn a_reopened_shared_file_has_no_earlier_lease() {
    simulate(20, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        // A lookup is under a lease; a file that is opened after it must not be read through pages.
        assert_eq!(b.lookup(ROOT, "f").await.unwrap().entry.unwrap().lease.kind, LeaseKind::Read);
        assert_eq!(b.open(ino, true, false).await.unwrap().entry.lease.kind, LeaseKind::None);
        assert_eq!(b.revoked(), [(ino, LeaseKind::None)]);
        assert_eq!(b.lookup(ROOT, "f").await.unwrap().entry.unwrap().lease.kind, LeaseKind::None);
        // A reader through pages asks for a lease all the same, and has it until a client writes.
        assert_eq!(b.acquire(ino, LeaseKind::Read).await.unwrap().lease.kind, LeaseKind::Read);
        assert_eq!(a.acquire(ino, LeaseKind::Write).await.unwrap().lease.kind, LeaseKind::None);
        assert_eq!(b.revoked(), [(ino, LeaseKind::None); 2]);
        b.close(ino, false).await.unwrap();
        a.close(ino, true).await.unwrap();
        // No other client has it open, or only for reading: it stays.
        assert_eq!(b.lookup(ROOT, "f").await.unwrap().entry.unwrap().lease.kind, LeaseKind::Read);
        a.open(ino, true, false).await.unwrap();
        assert_eq!(b.open(ino, true, false).await.unwrap().entry.lease.kind, LeaseKind::Read);
        // Two readers, and one of them begins to write.
        assert_eq!(a.open(ino, false, true).await.unwrap().entry.lease.kind, LeaseKind::None);
        assert_eq!(b.revoked().len(), 3);
        assert_eq!(a.revoked().last(), Some(&(ino, LeaseKind::None)));
    });
}

#[test]
fn no_other_operation_waits_behind_a_parked_one() {
    simulate(3, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let own = b.mkdir(ROOT, "own").await.unwrap().entry.attr.ino;
        a.lookup(dir, "x").await.unwrap();
        a.set_deaf(true);
        let begun = world.now();
        let parked = b.create(dir, "x");
        let others = async {
            b.create(own, "y").await.unwrap();
            // The holder under revoke continues, and gets no lease on the inode that is waited for.
            let z = a.create(dir, "z").await.unwrap();
            assert_eq!(z.parent_lease.kind, LeaseKind::None);
            world.now().since(begun)
        };
        let (parked, others_took) = tokio::join!(parked, others);
        assert!(others_took < Duration::from_millis(100), "{others_took:?}");
        parked.unwrap();
        // It was deaf: in the end its session was ended, although it sent keep-alives.
        assert!(world.now().since(begun) >= Duration::from_millis(LEASE_MS.into()));
        assert_eq!(a.getattr(dir).await.unwrap_err().kind, ErrorKind::Stale);
    });
}

#[test]
fn a_parked_operation_ends_by_its_deadline_and_changes_nothing() {
    simulate(4, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        a.lookup(ROOT, "x").await.unwrap();
        a.set_deaf(true);
        let request =
            Mkdir { op: b.op(), cred: root(), parent: ROOT, name: common::b("x"), mode: 0o755, umask: 0 };
        let e = b.connection.call(&request, vec![], Duration::from_millis(500)).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Deadline);
        assert!(a.lookup(ROOT, "x").await.unwrap().entry.is_none());
    });
}

#[test]
fn a_dead_writers_file_is_recovered_by_the_next_one() {
    simulate(5, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let file = a.create(ROOT, "f").await.unwrap().entry;
        let ino = file.attr.ino;
        let clean = a.create(ROOT, "clean").await.unwrap().entry.attr.ino;
        a.commit(clean, 1, 100, true).await.unwrap();
        world.kill("a");
        let seen = b.getattr(ino).await.unwrap().lease;
        assert_eq!((seen.kind, seen.recover), (LeaseKind::None, true));
        assert!(!b.getattr(clean).await.unwrap().lease.recover);
        let opened = b.open(ino, true, false).await.unwrap().entry.lease;
        assert_eq!(
            (opened.kind, opened.recover),
            (LeaseKind::None, true),
            "no client reads before the recovery"
        );
        let taken = b.acquire(ino, LeaseKind::Write).await.unwrap().lease;
        assert_eq!((taken.kind, taken.recover, taken.token_epoch), (LeaseKind::Write, true, 256));
        let wrong = Recovered { op: b.op(), ino, token_epoch: 1 };
        assert_eq!(b.call(&wrong).await.unwrap_err().kind, ErrorKind::Stale);
        let recovered = b.call(&Recovered { op: b.op(), ino, token_epoch: 256 }).await.unwrap();
        assert!(!recovered.lease.recover);
        assert!(!b.getattr(ino).await.unwrap().lease.recover);
    });
}

#[test]
fn a_retried_change_happens_once_also_across_a_restart() {
    simulate(6, async |world| {
        let node = start(&world).await;
        let mut a = Client::start(&world, "a").await;
        let mkdir = Mkdir { op: a.op(), cred: root(), parent: ROOT, name: b("d"), mode: 0o755, umask: 0 };
        let first = a.call(&mkdir).await.unwrap();
        let again = a.call(&mkdir).await.unwrap();
        assert_eq!(first.entry.attr, again.entry.attr);
        let create = Create {
            op: a.op(),
            cred: root(),
            parent: first.entry.attr.ino,
            name: b("f"),
            mode: 0o600,
            umask: 0,
            exclusive: true,
            open: 2,
        };
        let made = a.call(&create).await.unwrap();
        world.kill("meta");
        drop(node);
        let _meta = start(&world).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        let retried = a.call(&create).await.unwrap();
        assert_eq!(retried.entry.attr, made.entry.attr);
        assert_eq!((retried.created, retried.entry.lease.kind), (true, LeaseKind::Write));
        // The open of the retried reply counts, once.
        a.unlink(first.entry.attr.ino, "f").await.unwrap();
        assert_eq!(a.getattr(made.entry.attr.ino).await.unwrap().attr.nlink, 0);
        assert_eq!(a.call(&create).await.unwrap().entry.attr.ino, made.entry.attr.ino);
        a.close(made.entry.attr.ino, true).await.unwrap();
        assert_eq!(a.getattr(made.entry.attr.ino).await.unwrap_err().kind, ErrorKind::Stale);
        // A later request in the slot makes it late.
        let op = Op { seq: create.op.seq + 8, ..create.op.clone() };
        a.call(&Mkdir { op, name: b("e"), ..mkdir.clone() }).await.unwrap();
        assert_eq!(a.call(&create).await.unwrap_err().kind, ErrorKind::Stale);
        let usage = a.call(&GetUsage { session: a.session, dir: ROOT }).await.unwrap();
        assert_eq!((usage.files, usage.directories), (0, 2));
    });
}

#[test]
fn a_power_cut_loses_nothing_that_was_answered() {
    for seed in 100..110 {
        simulate(seed, async |world| {
            let node = start(&world).await;
            let a = Client::start(&world, "a").await;
            let mut answered = Vec::new();
            for i in 0..50 {
                let name = format!("f{i}");
                if i % 3 == 0 {
                    a.mkdir(ROOT, &name).await.unwrap();
                } else {
                    a.create(ROOT, &name).await.unwrap();
                }
                answered.push(name);
            }
            world.power_cut("meta");
            drop(node);
            let _meta = start(&world).await;
            let c = Client::start(&world, "c").await;
            let list = ReadDir {
                session: c.session,
                cred: root(),
                dir: ROOT,
                after: 0,
                limit: 100,
                with_attrs: false,
            };
            assert_eq!(names(&c.call(&list).await.unwrap()), answered.into_iter().collect());
            let stat = c.call(&StatFs { session: c.session }).await.unwrap();
            assert_eq!((stat.files, stat.directories), (33, 18));
        });
    }
}

#[test]
fn after_a_restart_leases_are_taken_up_and_others_wait() {
    simulate(7, async |world| {
        let node = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let file = a.create(ROOT, "f").await.unwrap().entry;
        let dead = b.create(ROOT, "g").await.unwrap().entry;
        world.kill("meta");
        drop(node);
        let _meta = start(&world).await;
        let begun = world.now();
        a.reconnect("a").await;
        let mut stolen = held(&dead, LeaseKind::Write, 0, 0);
        stolen.token_epoch = 1;
        let resumed = a.resume(vec![held(&file, LeaseKind::Write, 0, 1), stolen]).await.unwrap();
        assert_eq!(resumed.lost, [dead.attr.ino], "it never had that lease");
        // b has not reported yet what it holds: no client gets anything.
        let (made, _) = tokio::join!(a.mkdir(ROOT, "d"), async {
            world.sleep(Duration::from_millis(1000)).await;
            b.reconnect("b").await;
            b.resume(vec![held(&dead, LeaseKind::Write, 0, 1)]).await.unwrap();
        });
        made.unwrap();
        let waited = world.now().since(begun);
        assert!(waited >= Duration::from_millis(1000) && waited < Duration::from_millis(1100), "{waited:?}");
        // Both still hold what they held: a getattr revokes.
        assert_eq!(b.getattr(file.attr.ino).await.unwrap().lease.kind, LeaseKind::Read);
        assert_eq!(a.revoked().last(), Some(&(file.attr.ino, LeaseKind::Read)));
        a.commit(file.attr.ino, 1, 5, true).await.unwrap();
    });
}

/// It writes into its buffers, although others have the file open: they ask before they write past it.
#[test]
fn a_recovered_file_that_others_have_open_survives_a_restart() {
    simulate(9, async |world| {
        let node = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dead = Client::start(&world, "dead").await;
        let ino = dead.create(ROOT, "f").await.unwrap().entry.attr.ino;
        world.kill("dead");
        a.open(ino, true, true).await.unwrap();
        b.open(ino, true, true).await.unwrap();
        let taken = a.acquire(ino, LeaseKind::Write).await.unwrap();
        assert_eq!((taken.lease.kind, taken.lease.recover), (LeaseKind::Write, true));
        let token_epoch = taken.lease.token_epoch;
        let recovered = a.call(&Recovered { op: a.op(), ino, token_epoch }).await.unwrap();
        world.kill("meta");
        drop(node);
        let _meta = start(&world).await;
        b.reconnect("b").await;
        assert_eq!(b.resume(vec![held(&recovered, LeaseKind::None, 1, 1)]).await.unwrap().lost, []);
        a.reconnect("a").await;
        assert_eq!(a.resume(vec![held(&recovered, LeaseKind::Write, 1, 1)]).await.unwrap().lost, []);
        assert_eq!(b.acquire(ino, LeaseKind::Write).await.unwrap().lease.kind, LeaseKind::None);
        assert_eq!(a.revoked().last(), Some(&(ino, LeaseKind::None)), "b asks before it writes past it");
    });
}

#[test]
fn files_of_a_session_lost_in_a_restart_are_recovered() {
    simulate(8, async |world| {
        let node = start(&world).await;
        let (mut a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dead = b.create(ROOT, "g").await.unwrap().entry.attr.ino;
        world.kill("meta");
        world.kill("b");
        drop(node);
        let node = start(&world).await;
        let begun = world.now();
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        assert!(a.getattr(dead).await.unwrap().lease.recover);
        let waited = world.now().since(begun);
        assert!(waited < Duration::from_millis(u64::from(LEASE_MS) * 3 / 2), "{waited:?}");
        assert_eq!(node.meta.counts().0, 1);
    });
}

#[test]
fn a_second_writers_bytes_are_recovered_after_its_death() {
    for (seed, restarts) in [(23, false), (24, true)] {
        simulate(seed, async |world| {
            let mut node = start(&world).await;
            let (a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
            let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
            let own = b.create(ROOT, "own").await.unwrap().entry.attr.ino;
            b.open(ino, true, true).await.unwrap();
            b.acquire(ino, LeaseKind::Write).await.unwrap();
            world.kill("a");
            if restarts {
                world.kill("meta");
                drop(node);
                node = start(&world).await;
                b.reconnect("b").await;
                let held = |ino| HeldLease {
                    ino,
                    kind: LeaseKind::None,
                    token_epoch: 2,
                    open_read: 1,
                    open_write: 1,
                    append_token: false,
                };
                b.resume(vec![held(ino), held(own)]).await.unwrap();
            } else {
                world.clock().sleep(Duration::from_millis(u64::from(LEASE_MS) * 2)).await;
            }
            assert!(b.getattr(ino).await.unwrap().lease.recover, "a may have left something");
            assert!(!b.getattr(own).await.unwrap().lease.recover, "a has never written this");
            let clean = b.commit(ino, 2, 5, true).await.unwrap().lease;
            assert!(clean.recover, "b has reported all of its own changes, and not those of a");
            let taken = b.acquire(ino, LeaseKind::Write).await.unwrap().lease;
            assert_eq!((taken.kind, taken.recover), (LeaseKind::Write, true));
            b.call(&Recovered { op: b.op(), ino, token_epoch: taken.token_epoch }).await.unwrap();
            // Later deaths have nothing to do with it.
            let c = Client::start(&world, "c").await;
            c.create(ROOT, "another").await.unwrap();
            world.kill("c");
            world.clock().sleep(Duration::from_millis(u64::from(LEASE_MS) * 2)).await;
            assert!(!b.getattr(ino).await.unwrap().lease.recover);
            drop(node);
        });
    }
}

/// It has unreported bytes past the size: to recover them would be to truncate them.
#[test]
fn a_sole_writer_recovers_nothing_when_earlier_writers_die() {
    simulate(25, async |world| {
        let _node = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dead = Client::start(&world, "dead").await;
        let ino = dead.create(ROOT, "f").await.unwrap().entry.attr.ino;
        world.kill("dead");
        a.open(ino, true, true).await.unwrap();
        b.open(ino, true, true).await.unwrap();
        let taken = a.acquire(ino, LeaseKind::Write).await.unwrap().lease;
        assert_eq!((taken.kind, taken.recover), (LeaseKind::Write, true));
        a.call(&Recovered { op: a.op(), ino, token_epoch: taken.token_epoch }).await.unwrap();
        world.kill("b");
        world.clock().sleep(Duration::from_millis(u64::from(LEASE_MS) * 2)).await;
        let lease = a.commit(ino, taken.token_epoch, 5, false).await.unwrap().lease;
        assert_eq!((lease.kind, lease.recover), (LeaseKind::Write, false));
    });
}

#[test]
fn the_session_of_a_dead_local_process_ends_at_once() {
    simulate(18, async |world| {
        let node = start(&world).await;
        let (mut a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let (dead, other) = (b.create(ROOT, "f").await.unwrap(), b.create(ROOT, "g").await.unwrap());
        // With the leader.
        world.kill("meta");
        world.kill("b");
        GONE.with_borrow_mut(|gone| gone.push(process_of("b")));
        drop(node);
        let node = start(&world).await;
        let begun = world.now();
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        assert!(a.getattr(dead.entry.attr.ino).await.unwrap().lease.recover);
        assert_eq!(node.meta.counts().0, 1);
        // While the leader runs.
        let c = Client::start(&world, "c").await;
        c.open(other.entry.attr.ino, false, true).await.unwrap();
        GONE.with_borrow_mut(|gone| gone.push(process_of("c")));
        c.getattr(other.entry.attr.ino).await.unwrap();
        world.kill("c");
        a.open(other.entry.attr.ino, true, false).await.unwrap();
        let waited = world.now().since(begun);
        assert!(waited < Duration::from_millis(500), "{waited:?}");
    });
}

#[test]
fn an_expired_session_closes_nameless_files_targets_are_swept() {
    simulate(9, async |world| {
        let node = start(&world).await;
        *node.targets.away.lock().unwrap() = true;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        a.commit(ino, 1, 1 << 20, false).await.unwrap();
        b.unlink(ROOT, "f").await.unwrap();
        assert_eq!(b.getattr(ino).await.unwrap().attr.nlink, 0);
        world.kill("a");
        let until = world.now().0 + 4 * u64::from(LEASE_MS) * 1_000_000;
        while b.getattr(ino).await.is_ok() {
            assert!(world.now().0 < until, "the file is still there");
            world.sleep(Duration::from_millis(100)).await;
        }
        world.sleep(Duration::from_secs(5)).await;
        assert!(node.targets.dropped.lock().unwrap().is_empty(), "the targets are away");
        *node.targets.away.lock().unwrap() = false;
        world.sleep(Duration::from_secs(5)).await;
        let dropped: Vec<_> = node.targets.dropped.lock().unwrap().iter().map(|f| f.inode).collect();
        assert_eq!(dropped, [ino], "a request until it is answered, and no other one");
    });
}

#[test]
fn a_file_without_a_name_goes_with_its_session() {
    simulate(19, async |world| {
        let mut node = start(&world).await;
        let mut a = Client::start(&world, "a").await;
        let b = Client::start(&world, "b").await;
        let nameless = async |client: &Client| {
            let (op, cred) = (client.op(), root());
            let make = CreateNameless { op, cred, parent: ROOT, mode: 0o600, umask: 0, open: 3 };
            let made = client.call(&make).await.unwrap();
            // Once more: the answer was lost.
            assert_eq!(client.call(&make).await.unwrap().attr, made.attr);
            client.commit(made.attr.ino, 1, 1 << 20, false).await.unwrap();
            made
        };
        let (kept, left) = (nameless(&a).await, nameless(&a).await);
        assert_eq!((kept.lease.kind, kept.attr.nlink), (LeaseKind::Write, 0));
        // Over a restart it is kept by the client that names it.
        world.kill("meta");
        drop(node);
        node = start(&world).await;
        a.reconnect("a").await;
        let mut b = b;
        b.reconnect("b").await;
        a.resume(vec![held(&kept, LeaseKind::Write, 1, 1)]).await.unwrap();
        b.resume(vec![]).await.unwrap();
        assert_eq!(a.getattr(kept.attr.ino).await.unwrap().attr.size, 1 << 20);
        assert_eq!(a.getattr(left.attr.ino).await.unwrap_err().kind, ErrorKind::Stale);
        world.kill("a");
        let until = world.now().0 + 4 * u64::from(LEASE_MS) * 1_000_000;
        while b.getattr(kept.attr.ino).await.is_ok() {
            assert!(world.now().0 < until, "the file is still there");
            world.sleep(Duration::from_millis(100)).await;
        }
        world.sleep(Duration::from_secs(5)).await;
        let mut dropped: Vec<_> = node.targets.dropped.lock().unwrap().iter().map(|f| f.inode).collect();
        dropped.sort();
        assert_eq!(dropped, [kept.attr.ino, left.attr.ino]);
    });
}

#[test]
fn a_broken_connection_keeps_the_session_for_a_revoke() {
    simulate(10, async |world| {
        let _meta = start(&world).await;
        let (mut a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let file = a.create(ROOT, "f").await.unwrap().entry;
        world.reset_connections("a", "meta");
        let getattr = b.getattr(file.attr.ino);
        let back = async {
            world.sleep(Duration::from_millis(300)).await;
            a.reconnect("a").await;
            let resumed = a.resume(vec![held(&file, LeaseKind::Write, 0, 1)]).await.unwrap();
            assert!(resumed.lost.is_empty());
        };
        let (getattr, ()) = tokio::join!(getattr, back);
        assert_eq!(getattr.unwrap().lease.kind, LeaseKind::Read);
        assert_eq!(a.revoked(), [(file.attr.ino, LeaseKind::Read)]);
        a.commit(file.attr.ino, 1, 5, true).await.unwrap();
    });
}

#[test]
fn alternating_clients_of_a_directory_are_not_revoked_each_time() {
    simulate(13, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        for i in 0..20 {
            a.create(ROOT, &format!("a{i}")).await.unwrap();
            b.create(ROOT, &format!("b{i}")).await.unwrap();
        }
        assert!(a.revoked().len() + b.revoked().len() <= 4, "{:?} {:?}", a.revoked(), b.revoked());
        // Alone again, the directory is leased again.
        world.sleep(Duration::from_millis(100)).await;
        assert_eq!(a.lookup(ROOT, "a0").await.unwrap().parent_lease.kind, LeaseKind::Read);
    });
}

#[test]
fn closing_a_session_returns_everything() {
    simulate(11, async |world| {
        let node = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        a.commit(ino, 1, 3, true).await.unwrap();
        a.call(&SessionClose { session: a.session }).await.unwrap();
        assert_eq!(a.getattr(ino).await.unwrap_err().kind, ErrorKind::Stale);
        let entry = b.open(ino, false, true).await.unwrap().entry;
        assert_eq!((entry.lease.kind, entry.lease.recover), (LeaseKind::Write, false));
        assert!(a.revoked().is_empty());
        assert_eq!(node.meta.counts().0, 1);
    });
}

#[test]
fn hostile_requests_are_refused() {
    simulate(12, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let op = |slot, seq| Op { session: a.session, slot, seq };
        let mkdir = |op, name: &str| Mkdir {
            op,
            cred: root(),
            parent: ROOT,
            name: b(name),
            mode: u32::MAX,
            umask: 0,
        };
        for op in [op(SLOTS, 1), op(u32::MAX, 1), op(0, 0)] {
            assert_eq!(a.call(&mkdir(op, "x")).await.unwrap_err().kind, ErrorKind::Invalid);
        }
        let e = a.call(&mkdir(op(0, u64::MAX), &"x".repeat(10_000))).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Name(NameRule::TooLong));
        let stranger = Op { session: weir_proto::SessionId(999), slot: 0, seq: 1 };
        assert_eq!(a.call(&mkdir(stranger, "x")).await.unwrap_err().kind, ErrorKind::Stale);
        let open =
            SessionOpen { namespace: weir_proto::NamespaceId(9), client: "x".into(), process: String::new() };
        assert_eq!(a.call(&open).await.unwrap_err().kind, ErrorKind::NotFound);
        let e = a.open(ROOT, true, false).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Name(NameRule::IsDirectory));
        assert_eq!(a.call(&weir_proto::coord::GetStatus {}).await.unwrap_err().kind, ErrorKind::Unsupported);
        // A slot that holds another kind of change.
        a.call(&mkdir(op(1, 5), "d")).await.unwrap();
        let unlink = Unlink { op: op(1, 5), cred: root(), parent: ROOT, name: b("d") };
        assert_eq!(a.call(&unlink).await.unwrap_err().kind, ErrorKind::Stale);
        assert_ne!(Unlink::METHOD, Mkdir::METHOD);
    });
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        simulate(seed, async |world| {
            let node = start(&world).await;
            let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
            for i in 0..30 {
                let (x, y) = (format!("a{i}"), format!("b{i}"));
                let (x, y) = tokio::join!(a.create(ROOT, &x), b.create(ROOT, &y));
                let (x, y) = (x.unwrap().entry.attr.ino, y.unwrap().entry.attr.ino);
                let (p, q) = tokio::join!(a.getattr(y), b.getattr(x));
                assert!(p.is_ok() && q.is_ok());
            }
            world.kill("a");
            world.sleep(Duration::from_secs(10)).await;
            (node.meta.counts(), world.trace_hash())
        })
    };
    assert_eq!(run(42), run(42));
    assert_ne!(run(42).1, run(43).1);
}

/// A commit that makes a file `size` bytes long, and releases the append token.
fn commit_with_token(client: &Client, ino: weir_proto::InodeId, token_epoch: u32, size: u64) -> Commit {
    Commit {
        op: client.op(),
        ino,
        token_epoch,
        size,
        mtime: Time { nanos: 1 },
        allocated: size,
        inline: None,
        drop_inline: false,
        clean: false,
        close_writes: 0,
        data_end: size,
        append_token: true,
        changed: Vec::new(),
    }
}

#[test]
fn the_append_token_is_one_clients_and_ends_with_it() {
    simulate(31, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        b.open(ino, true, true).await.unwrap();
        let append_token = |c: &Client| TakeAppendToken { session: c.session, ino };
        assert_eq!(a.call(&append_token(&a)).await.unwrap().entry.attr.size, 0);
        assert_eq!(a.call(&append_token(&a)).await.unwrap().entry.attr.size, 0, "a retry gets it again");
        // No other client appends or truncates, and b's wait ends with the commit that releases the token.
        let with_token = |c: &Client, size| commit_with_token(c, ino, 1, size);
        let begun = world.now();
        let ask = append_token(&b);
        let (next, ()) = tokio::join!(b.call(&ask), async {
            world.sleep(Duration::from_millis(300)).await;
            a.call(&with_token(&a, 10)).await.unwrap();
        });
        assert_eq!(next.unwrap().entry.attr.size, 10);
        let waited = world.now().since(begun);
        assert!(waited >= Duration::from_millis(300) && waited < Duration::from_millis(400), "{waited:?}");
        assert_eq!(a.call(&with_token(&a, 20)).await.unwrap_err().kind, ErrorKind::Stale, "a has it no more");
        // b dies with the token.
        world.kill("b");
        let begun = world.now();
        assert_eq!(a.call(&append_token(&a)).await.unwrap().entry.attr.size, 10);
        assert!(world.now().since(begun) <= Duration::from_millis(u64::from(LEASE_MS) * 2));
        a.call(&ReleaseAppendToken { session: a.session, ino }).await.unwrap();
        a.call(&ReleaseAppendToken { session: a.session, ino }).await.unwrap();
    });
}

/// The first client's commit released the token, the second got it, and neither the commit's answer nor the
/// second's commit had arrived when the leader died.
#[test]
fn an_append_token_is_named_by_two_clients_after_a_restart() {
    for (seed, first_resumes_first) in [(36, true), (37, false)] {
        simulate(seed, async |world| {
            let node = start(&world).await;
            let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
            let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
            b.open(ino, true, true).await.unwrap();
            let take = |c: &Client| TakeAppendToken { session: c.session, ino };
            a.call(&take(&a)).await.unwrap();
            let lost = commit_with_token(&a, ino, 1, 10);
            a.call(&lost).await.unwrap();
            let entry = b.call(&take(&b)).await.unwrap().entry;
            world.kill("meta");
            drop(node);
            let _node = start(&world).await;
            let named = HeldLease { append_token: true, ..held(&entry, LeaseKind::None, 1, 1) };
            a.reconnect("a").await;
            b.reconnect("b").await;
            for c in if first_resumes_first { [&a, &b] } else { [&b, &a] } {
                assert_eq!(c.resume(vec![named.clone()]).await.unwrap().lost, []);
            }
            // It is made once, and no other client has the token before both are done.
            let begun = world.now();
            let ask = take(&a);
            let (next, ()) = tokio::join!(a.call(&ask), async {
                assert_eq!(a.call(&lost).await.unwrap().attr.size, 10);
                world.sleep(Duration::from_millis(300)).await;
                b.call(&commit_with_token(&b, ino, 1, 20)).await.unwrap();
            });
            assert_eq!(next.unwrap().entry.attr.size, 20);
            assert!(world.now().since(begun) >= Duration::from_millis(300));
            assert_eq!(a.call(&commit_with_token(&a, ino, 1, 30)).await.unwrap().attr.size, 30);
        });
    }
}

#[test]
fn growth_under_an_append_token_revokes_read_leases() {
    simulate(35, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        b.open(ino, true, true).await.unwrap();
        b.close(ino, true).await.unwrap();
        // Neither has asked to write directly, so the pages of b may be read under a lease.
        assert_eq!(b.acquire(ino, LeaseKind::Read).await.unwrap().lease.kind, LeaseKind::Read);
        let taken = a.call(&TakeAppendToken { session: a.session, ino }).await.unwrap();
        assert_eq!(b.revoked(), [], "the token alone changes nothing");
        let commit = commit_with_token(&a, ino, taken.entry.lease.token_epoch, 10);
        assert_eq!(a.call(&commit).await.unwrap().attr.size, 10);
        assert_eq!(b.revoked(), [(ino, LeaseKind::None)], "b must not show the smaller size");
    });
}

/// A client that truncates a file by its name does not have it open; another one that writes it takes the
/// right to write while the token lasts.
#[test]
fn an_append_token_allows_a_commit_under_any_lease() {
    simulate(34, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = b.create(ROOT, "f").await.unwrap().entry.attr.ino;
        let write =
            |c: &Client| AcquireLease { session: c.session, ino, kind: LeaseKind::Write, renew: false };
        let token_epoch = a.call(&write(&a)).await.unwrap().lease.token_epoch;
        a.call(&TakeAppendToken { session: a.session, ino }).await.unwrap();
        let newer = b.call(&write(&b)).await.unwrap().lease.token_epoch;
        assert!(newer > token_epoch, "{newer}");
        let commit = |append_token| Commit {
            op: a.op(),
            ino,
            token_epoch,
            size: 0,
            mtime: Time { nanos: 1 },
            allocated: 0,
            inline: None,
            drop_inline: false,
            clean: false,
            close_writes: 0,
            data_end: 0,
            append_token,
            changed: Vec::new(),
        };
        assert_eq!(a.call(&commit(false)).await.unwrap_err().kind, ErrorKind::Stale);
        a.call(&commit(true)).await.unwrap();
        assert_eq!(a.call(&commit(true)).await.unwrap_err().kind, ErrorKind::Stale, "the token was released");
    });
}

#[test]
fn locks_are_reclaimed_after_a_restart_before_new_ones() {
    use weir_proto::lock::*;
    simulate(30, async |world| {
        let meta = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        let owner = LockOwner { space: LockSpace::Flock, id: 1 };
        let range = LockRange::WHOLE;
        let (ex, un) = (Some(LockKind::Exclusive), None);
        let set = |c: &Client, kind, ticket| SetLock {
            session: c.session,
            ino,
            owner,
            range,
            kind,
            pid: 7,
            ticket,
            closing: false,
        };
        let outcome = async |c: &Client, kind, ticket| c.call(&set(c, kind, ticket)).await.map(|a| a.outcome);
        assert_eq!(outcome(&a, ex, 0).await.unwrap(), LockOutcome::Granted);
        assert_eq!(outcome(&b, ex, 0).await.unwrap(), LockOutcome::Held);
        assert_eq!(outcome(&b, ex, 5).await.unwrap(), LockOutcome::Queued);

        drop(meta);
        world.kill("meta");
        let _meta = start(&world).await;
        a.reconnect("a").await;
        b.reconnect("b").await;
        // Not before the session is taken up on the new connection.
        assert_eq!(outcome(&b, ex, 5).await.unwrap_err().kind, ErrorKind::Unavailable);
        let none = ReclaimLocks { session: b.session, held: vec![], more: false };
        assert_eq!(b.call(&none).await.unwrap().lost, []);
        b.resume(vec![]).await.unwrap();
        // The other may still return.
        assert_eq!(outcome(&b, ex, 5).await.unwrap(), LockOutcome::Grace);
        let kind = LockKind::Exclusive;
        let named = HeldLock { ino, owner, range, kind, pid: 7 };
        let held = ReclaimLocks { session: a.session, held: vec![named], more: false };
        assert_eq!(a.call(&held).await.unwrap().lost, []);
        a.resume(vec![]).await.unwrap();
        assert_eq!(outcome(&b, ex, 5).await.unwrap(), LockOutcome::Queued);
        let list = b.call(&ListLocks { session: b.session, ino }).await.unwrap();
        let shown: Vec<_> = list.entries.iter().map(|e| (e.session, e.pid, e.waits)).collect();
        assert_eq!(shown, [(a.session, 7, false), (b.session, 7, true)]);
        assert_eq!(outcome(&a, un, 0).await.unwrap(), LockOutcome::Granted);
        assert_eq!(outcome(&b, ex, 5).await.unwrap(), LockOutcome::Granted);

        // A silent client's locks go with its session.
        world.kill("b");
        let begun = world.now();
        let owner = LockOwner { space: LockSpace::Flock, id: 2 };
        let again = SetLock { owner, ..set(&a, ex, 9) };
        while a.call(&again).await.unwrap().outcome != LockOutcome::Granted {
            world.clock().sleep(Duration::from_millis(100)).await;
        }
        let took = world.now().since(begun);
        assert!(took >= Duration::from_millis(u64::from(LEASE_MS) / 2), "{took:?}");
        assert!(took <= Duration::from_millis(u64::from(LEASE_MS) * 2), "{took:?}");
    });
}
