//! The leader's disk is nearly full, then full: names that exist can be used and removed, and data waits.
use crate::common::*;
use bytes::Bytes;
use std::path::Path;
use std::time::Duration;
use weir_env::sim::World;
use weir_proto::local_creates::LeaseNames;
use weir_proto::meta::*;
use weir_proto::{ErrorKind, InodeId, Result};

const DISK_BYTES: u64 = 256 << 20;

/// Leaves this much space on the leader's disk.
async fn leave(world: &World, bytes: u64) {
    let space = world.disk("meta").space(Path::new("/")).unwrap();
    world.set_disk_capacity("meta", space.total - space.free + bytes);
    world.sleep(Duration::from_secs(2)).await; // the leader's knowledge of it is a second old at most
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}

async fn set_xattr(client: &Client, ino: InodeId, bytes: usize) -> Result<Entry> {
    let value = Bytes::from(vec![7; bytes]);
    let (op, cred, name) = (client.op(), root(), b("user.a"));
    client.call(&SetXattr { op, cred, ino, name, value, create: false, replace: false }).await
}

#[test]
fn on_a_nearly_full_disk_names_are_removed_and_none_is_made() {
    simulate(31, async |world| {
        world.set_disk_capacity("meta", DISK_BYTES);
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let file = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        for n in 0..200 {
            a.mkdir(dir, &format!("d{n}")).await.unwrap();
        }
        let create = Create {
            op: a.op(),
            cred: root(),
            parent: ROOT,
            name: b("once"),
            mode: 0o644,
            umask: 0,
            exclusive: true,
            open: 2,
        };
        let created = a.call(&create).await.unwrap().entry.attr.ino;
        leave(&world, 100 << 10).await;
        // A change that was made is answered as before.
        assert_eq!(a.call(&create).await.unwrap().entry.attr.ino, created);
        assert_eq!(kind_of(a.create(ROOT, "g").await), ErrorKind::NoSpace);
        assert_eq!(kind_of(a.mkdir(ROOT, "g").await), ErrorKind::NoSpace);
        assert_eq!(kind_of(set_xattr(&a, file, 100).await), ErrorKind::NoSpace);
        let (session, now) = (a.session, Time { nanos: a.env.clock.wall().0 });
        let lease = LeaseNames { session, dir, numbers: 10, now, uid: 0, gid: 0 };
        assert_eq!(kind_of(a.call(&lease).await), ErrorKind::NoSpace, "no files by the client itself");
        a.commit(file, 1, 5, false).await.unwrap();
        for n in 0..200 {
            let (op, cred, name) = (a.op(), root(), b(&format!("d{n}")));
            a.call(&Rmdir { op, cred, parent: dir, name }).await.unwrap();
        }
        a.unlink(ROOT, "f").await.unwrap();
        world.set_disk_capacity("meta", DISK_BYTES);
        world.sleep(Duration::from_secs(2)).await;
        a.create(ROOT, "g").await.unwrap();
    });
}

/// The whole of a small file.
async fn store(client: &Client, ino: InodeId, byte: u8) -> Result<Entry> {
    let request = Commit {
        op: client.op(),
        ino,
        token_epoch: 1,
        size: 4000,
        mtime: Time { nanos: 1 },
        allocated: 4000,
        inline: Some(Bytes::from(vec![byte; 4000])),
        drop_inline: false,
        clean: true,
        close_writes: 0,
        data_end: 0,
        append_token: false,
        changed: Vec::new(),
    };
    client.call(&request).await
}

/// Bytes of files that exist are refused as by a busy leader, which clients repeat for as long as it lives.
#[test]
fn on_a_full_disk_written_data_waits_and_reads_do_not() {
    simulate(32, async |world| {
        world.set_disk_capacity("meta", DISK_BYTES);
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let mut files = Vec::new();
        for n in 0..3000 {
            files.push(a.create(dir, &format!("f{n}")).await.unwrap().entry.attr.ino);
        }
        leave(&world, 0).await;
        let mut refused = None;
        for ino in &files {
            if let Err(e) = store(&a, *ino, 1).await {
                refused = Some((*ino, e));
                break;
            }
        }
        let (file, e) = refused.expect("12 MB do not fit");
        assert!(matches!(e.kind, ErrorKind::Busy { wait_ms: 1.. }), "{e}");
        assert!(e.context.contains("disk of the namespace's directory is full"), "{e}");
        assert_eq!(a.getattr(file).await.unwrap().attr.size, 0, "it reads");
        assert_eq!(kind_of(a.create(ROOT, "g").await), ErrorKind::NoSpace);
        world.set_disk_capacity("meta", DISK_BYTES);
        world.sleep(Duration::from_secs(2)).await;
        assert_eq!(store(&a, file, 2).await.unwrap().attr.size, 4000, "it was waited for");
    });
}

/// The leader stays, and the end is recorded when there is space: a removed file that the session had open
/// goes then.
#[test]
fn a_session_ends_on_a_full_disk() {
    simulate(33, async |world| {
        world.set_disk_capacity("meta", DISK_BYTES);
        let _meta = start(&world).await;
        let (a, other) = (Client::start(&world, "a").await, Client::start(&world, "other").await);
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let mut files = Vec::new();
        for n in 0..3000 {
            files.push(a.create(dir, &format!("f{n}")).await.unwrap().entry.attr.ino);
        }
        let held = other.create(ROOT, "held").await.unwrap().entry.attr.ino;
        a.unlink(ROOT, "held").await.unwrap();
        assert_eq!(a.getattr(held).await.unwrap().attr.nlink, 0, "it is open");
        leave(&world, 0).await;
        let mut full = false;
        for ino in &files {
            full |= store(&a, *ino, 1).await.is_err();
        }
        assert!(full);
        let closed = other.call(&SessionClose { session: other.session }).await;
        closed.unwrap();
        world.sleep(Duration::from_secs(20)).await;
        assert!(a.getattr(files[0]).await.is_ok(), "the leader serves");
        world.set_disk_capacity("meta", DISK_BYTES);
        world.sleep(Duration::from_secs(20)).await;
        assert_eq!(store(&a, files[0], 2).await.unwrap().attr.size, 4000);
        assert_eq!(kind_of(a.getattr(held).await), ErrorKind::Stale);
    });
}
