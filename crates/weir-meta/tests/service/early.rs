//! Answers that leave before their change is durable, and changes that are made again after a crash.
use crate::common::*;
use crate::grace::make_volume;
use std::time::Duration;
use weir_env::sim::{DiskFaults, World};
use weir_proto::early::*;
use weir_proto::meta::*;
use weir_proto::{Error, ErrorKind, InodeId, Request, Result, Wire};

/// Longer than any answer takes that waits for no disk.
const LONG: Duration = Duration::from_secs(1);

/// The disk takes nothing more.
fn set_silent(world: &World, hangs: bool) {
    world.set_disk_faults("meta", DiskFaults { hangs, ..DiskFaults::default() });
}

/// A directory that its client changes. The first early answer in a volume waits until that is recorded.
async fn used_directory(client: &Client) -> InodeId {
    let dir = client.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
    early(client, &set_mode(client, dir, 0o755)).await.unwrap();
    dir
}

/// An early answer, and what its client keeps.
struct Early<T> {
    reply: T,
    told: ChangedEarly,
    kept: KeptChange,
}

impl<T> Early<T> {
    fn is_durable(&self) -> bool {
        self.told.durable >= self.told.seq
    }
}

async fn early<R: Request>(client: &Client, request: &R) -> Result<Early<R::Reply>> {
    let body: bytes::Bytes = request.to_bytes().into();
    let told = client.call(&ChangeEarly { method: R::METHOD, body: body.clone() }).await?;
    let (given, reply) = (told.given.clone(), told.reply.clone());
    let kept = KeptChange { method: R::METHOD, body, given, reply };
    Ok(Early { reply: R::Reply::from_bytes(&told.reply)?, told, kept })
}

fn mkdir(client: &Client, parent: InodeId, name: &str) -> Mkdir {
    Mkdir { op: client.op(), cred: root(), parent, name: b(name), mode: 0o755, umask: 0 }
}
fn unlink(client: &Client, parent: InodeId, name: &str) -> Unlink {
    Unlink { op: client.op(), cred: root(), parent, name: b(name) }
}
fn rename(client: &Client, parent: InodeId, name: &str, new_name: &str) -> Rename {
    let (op, cred, mode) = (client.op(), root(), RenameMode::Replace);
    Rename { op, cred, parent, name: b(name), new_parent: parent, new_name: b(new_name), mode }
}
fn set_mode(client: &Client, ino: InodeId, mode: u32) -> SetAttr {
    let (op, cred) = (client.op(), root());
    SetAttr { op, cred, ino, mode: Some(mode), uid: None, gid: None, size: None, atime: None, mtime: None }
}

/// The machine of the leader fails, and loses what its disk had not taken.
async fn crash(world: &World, node: Node) -> Node {
    world.kill("meta");
    drop(node);
    set_silent(world, false);
    start(world).await
}

async fn again(client: &Client, changes: Vec<KeptChange>) -> Result<MadeAgain> {
    client.call(&MakeAgain { session: client.session, changes }).await
}

async fn attr_of(client: &Client, dir: InodeId, name: &str) -> Option<Attr> {
    client.lookup(dir, name).await.unwrap().entry.map(|entry| entry.attr)
}

#[test]
fn only_others_wait_until_a_change_is_durable() {
    simulate(21, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = used_directory(&a).await;
        set_silent(&world, true);
        let clock = &a.env.clock;
        let own = async {
            let begun = clock.now();
            let made = early(&a, &mkdir(&a, dir, "x")).await.unwrap();
            assert!(!made.is_durable());
            let x = made.reply.entry.attr.ino;
            early(&a, &mkdir(&a, x, "below")).await.unwrap();
            early(&a, &rename(&a, dir, "x", "y")).await.unwrap();
            let changed = early(&a, &set_mode(&a, x, 0o700)).await.unwrap();
            assert_eq!(changed.reply.attr.mode & 0o777, 0o700);
            assert_eq!(attr_of(&a, dir, "y").await.unwrap().ino, x, "it sees them, too");
            assert!(clock.now().since(begun) < LONG, "it waited for the disk");
            let durable = a.call(&AwaitDurable { session: a.session, seq: changed.told.seq }).await.unwrap();
            assert!(durable.term == changed.told.term && durable.durable >= changed.told.seq);
            clock.now()
        };
        let other = async {
            world.sleep(LONG).await;
            // The name that it would show is not durable, and neither is the directory that it changes.
            let request = mkdir(&b, dir, "z");
            let (seen, made) = tokio::join!(attr_of(&b, dir, "y"), early(&b, &request));
            assert!(seen.is_some());
            made.unwrap();
            clock.now()
        };
        let disk = async {
            world.sleep(3 * LONG).await;
            set_silent(&world, false);
            clock.now()
        };
        let (durable, shown, answers) = tokio::join!(own, other, disk);
        assert!(durable >= answers, "a commit was reported that a crash takes back");
        assert!(shown >= answers, "another session saw what a crash takes back");
    });
}

/// Neither has a lease on a directory that both change: only the journal orders their changes.
#[test]
fn a_change_waits_for_changes_of_others_that_it_builds_upon() {
    simulate(27, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let (dir, mine) = (used_directory(&a).await, b.mkdir(ROOT, "mine").await.unwrap().entry.attr.ino);
        early(&b, &set_mode(&b, mine, 0o755)).await.unwrap();
        // The lease of the first is revoked, and for a moment no client gets it.
        early(&b, &mkdir(&b, dir, "first")).await.unwrap();
        set_silent(&world, true);
        let made = early(&a, &mkdir(&a, dir, "x")).await.unwrap();
        assert!(!made.is_durable() && made.reply.parent_lease.kind == LeaseKind::None);
        let other = early(&b, &mkdir(&b, mine, "y")).await.unwrap();
        assert!(!other.is_durable(), "the serial of another directory is no reason to wait");
        let request = mkdir(&b, dir, "y");
        let waited = world.clock().timeout(LONG, early(&b, &request)).await;
        assert!(waited.is_err(), "it has a place after a name that a crash takes back");
        set_silent(&world, false);
    });
}

/// Its record names what it has changed, not only where it has leases.
#[test]
fn others_wait_for_a_client_that_only_changed_names() {
    simulate(28, async |world| {
        let node = start(&world).await;
        let maker = Client::start(&world, "maker").await;
        let (place, other) = (make_volume(&maker, "place").await, make_volume(&maker, "other").await);
        maker.call(&SessionClose { session: maker.session }).await.unwrap();
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = a.mkdir(place.root, "d").await.unwrap().entry.attr.ino;
        early(&a, &set_mode(&a, dir, 0o755)).await.unwrap();
        set_silent(&world, true);
        let kept = early(&a, &rename(&a, place.root, "d", "e")).await.unwrap().kept;
        let mut kept = vec![kept];
        for name in ["one", "two"] {
            kept.push(early(&a, &mkdir(&a, place.root, name)).await.unwrap().kept);
        }
        let _node = crash(&world, node).await;
        b.reconnect("b").await;
        b.resume(vec![]).await.unwrap();
        // A serial that is given meanwhile is none of those that the other client brings.
        let elsewhere = early(&b, &mkdir(&b, other.root, "b")).await.unwrap();
        let given = elsewhere.told.given.serials[0];
        assert!(
            kept.iter().all(|kept| !kept.given.serials.contains(&given)),
            "serial {given} is given twice"
        );
        let seen = attr_of(&b, place.root, "d");
        assert!(world.clock().timeout(LONG, seen).await.is_err(), "it shows a name that was changed");
        a.reconnect("a").await;
        assert_eq!(again(&a, kept).await.unwrap().failed, vec![]);
        a.resume(vec![]).await.unwrap();
        assert!(attr_of(&b, place.root, "d").await.is_none());
    });
}

#[test]
fn a_size_is_answered_when_it_is_durable() {
    simulate(22, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        set_silent(&world, true);
        let cut = SetAttr { mode: None, size: Some(0), ..set_mode(&a, ino, 0) };
        let request = early(&a, &cut);
        assert!(world.clock().timeout(LONG, request).await.is_err(), "bytes are dropped after the answer");
        set_silent(&world, false);
    });
}

/// The size of a closed file: under its Write lease, which the next leader does not know yet.
#[test]
fn a_commit_under_a_write_lease_is_answered_early() {
    simulate(31, async |world| {
        let node = start(&world).await;
        let (mut a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = used_directory(&a).await;
        let created = a.create(dir, "f").await.unwrap().entry;
        let (ino, token) = (created.attr.ino, created.lease.token_epoch);
        let shared = a.create(dir, "shared").await.unwrap().entry.attr.ino;
        b.open(shared, true, true).await.unwrap();
        let commit = |a: &Client, ino, size| Commit {
            op: a.op(),
            ino,
            token_epoch: token,
            size,
            mtime: Time { nanos: 7 },
            allocated: size,
            inline: None,
            drop_inline: false,
            clean: true,
            close_writes: 0,
            data_end: size,
            append_token: false,
            changed: vec![],
        };
        set_silent(&world, true);
        // Reserved space past the end is counted only if no other client writes the file.
        let longer = Commit { allocated: 9000, ..commit(&a, ino, 5000) };
        let made = [commit(&a, ino, 4000), longer];
        let first = early(&a, &made[0]).await.unwrap();
        let second = early(&a, &made[1]).await.unwrap();
        assert!(!first.is_durable() && !second.is_durable());
        let request = commit(&a, shared, 100);
        let late = early(&a, &request);
        assert!(world.clock().timeout(LONG, late).await.is_err(), "others write it, too");

        let _node = crash(&world, node).await;
        a.reconnect("a").await;
        let told = again(&a, vec![first.kept, second.kept]).await.unwrap();
        assert_eq!(told.failed, []);
        let opened = |ino| HeldLease {
            ino,
            kind: if ino == shared { LeaseKind::None } else { LeaseKind::Write },
            token_epoch: token,
            open_read: 0,
            open_write: 1,
            append_token: false,
        };
        assert_eq!(a.resume(vec![opened(ino), opened(shared)]).await.unwrap().lost, []);
        world.kill("b");
        let attr = a.getattr(ino).await.unwrap().attr;
        assert_eq!((attr.size, attr.allocated, attr.ctime), (5000, 9000, second.reply.attr.ctime));
        assert_eq!(a.getattr(shared).await.unwrap().attr.size, 0, "its client has no answer");
    });
}

#[test]
fn lost_changes_are_made_again_as_they_were() {
    simulate(23, async |world| {
        let node = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = used_directory(&a).await;
        for name in ["f", "g"] {
            let ino = a.create(dir, name).await.unwrap().entry.attr.ino;
            a.close(ino, true).await.unwrap();
        }
        set_silent(&world, true);
        let made = early(&a, &mkdir(&a, dir, "new")).await.unwrap();
        let new = made.reply.entry.attr.ino;
        let below = early(&a, &mkdir(&a, new, "below")).await.unwrap();
        let renamed = early(&a, &rename(&a, dir, "f", "h")).await.unwrap();
        let removed = early(&a, &unlink(&a, dir, "g")).await.unwrap();
        let mode = early(&a, &set_mode(&a, new, 0o711)).await.unwrap();
        let node = crash(&world, node).await;

        // Another client returns first. It waits for what the first one may bring.
        b.reconnect("b").await;
        b.resume(vec![]).await.unwrap();
        let clock = &b.env.clock;
        let other = async {
            assert!(attr_of(&b, dir, "f").await.is_none());
            clock.now()
        };
        let mut serials = Vec::new();
        let own = async {
            a.reconnect("a").await;
            world.sleep(LONG).await;
            let term = again(&a, vec![]).await.unwrap().term;
            assert_ne!(term, made.told.term);
            let all = [&made.kept, &below.kept, &renamed.kept, &removed.kept, &mode.kept].map(Clone::clone);
            serials.extend(all.iter().flat_map(|kept| kept.given.serials.clone()));
            // The answer may get lost, and the whole is sent once more.
            for part in [&all[..2], &all] {
                let told = again(&a, part.to_vec()).await.unwrap();
                assert_eq!((told.term, told.failed), (term, vec![]));
            }
            let returned = clock.now();
            a.resume(vec![]).await.unwrap();
            returned
        };
        let (seen, returned) = tokio::join!(other, own);
        assert!(seen >= returned, "it saw a state that the first one's changes were to follow");
        assert_eq!(serials.len(), 2, "of two directories");
        let found = attr_of(&b, dir, "new").await.unwrap();
        assert_eq!((found.ino, found.mode & 0o777), (new, 0o711));
        assert_eq!((found.btime, found.ctime), (made.reply.entry.attr.btime, mode.reply.attr.ctime));
        assert_eq!(attr_of(&b, new, "below").await.unwrap().ino, below.reply.entry.attr.ino);
        assert!(attr_of(&b, dir, "h").await.is_some() && attr_of(&b, dir, "g").await.is_none());
        // Numbers of files in new directories come from serials: none is given twice.
        let fresh = early(&b, &mkdir(&b, dir, "fresh")).await.unwrap();
        assert!(fresh.told.given.serials[0] > *serials.iter().max().unwrap());

        // All of it is durable now.
        a.call(&AwaitDurable { session: a.session, seq: u64::MAX }).await.unwrap();
        let _node = crash(&world, node).await;
        a.reconnect("a").await;
        a.resume(vec![]).await.unwrap();
        world.kill("b");
        assert_eq!(attr_of(&a, dir, "new").await.unwrap().ino, new);
    });
}

#[test]
fn a_change_that_cannot_be_made_again_is_named() {
    simulate(24, async |world| {
        let node = start(&world).await;
        let mut a = Client::start(&world, "a").await;
        let dir = used_directory(&a).await;
        set_silent(&world, true);
        let first = early(&a, &mkdir(&a, dir, "x")).await.unwrap();
        let second = early(&a, &rename(&a, dir, "x", "y")).await.unwrap();
        let third = early(&a, &mkdir(&a, dir, "z")).await.unwrap();
        let below = early(&a, &mkdir(&a, first.reply.entry.attr.ino, "below")).await.unwrap();
        let _node = crash(&world, node).await;
        a.reconnect("a").await;
        // Without the first one the others differ. A serial of someone else is refused.
        let stolen = KeptChange { given: Given { serials: vec![1], ..first.kept.given }, ..first.kept };
        let told = again(&a, vec![stolen, second.kept, third.kept.clone(), below.kept]).await.unwrap();
        let why: Vec<(u32, &str)> = told.failed.iter().map(|f| (f.place, &f.why[..])).collect();
        assert_eq!(why.len(), 4, "{why:?}");
        assert!(why[0].1.contains("serials [1]") && why[2].1.contains("another result"), "{why:?}");
        // Not after the resume, and not of another session.
        a.resume(vec![]).await.unwrap();
        let late = again(&a, vec![third.kept]).await.unwrap_err();
        assert_eq!(late.kind, ErrorKind::Invalid, "{late}");
        assert!(attr_of(&a, dir, "z").await.is_none());
        let create = ChangeEarly { method: Create::METHOD, body: b("") };
        let refused: Error = a.call(&create).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unsupported);
    });
}

#[test]
fn a_removal_made_again_leaves_files_that_others_have_open() {
    simulate(25, async |world| {
        let node = start(&world).await;
        let (mut a, mut b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        used_directory(&a).await;
        let made = a.create(ROOT, "f").await.unwrap().entry;
        let ino = made.attr.ino;
        a.close(ino, true).await.unwrap();
        let opened = b.open(ino, true, false).await.unwrap().entry;
        // Without a lease: a removal that waits for one is answered when it is durable.
        b.call(&ReleaseLease { session: b.session, ino, keep: LeaseKind::None }).await.unwrap();
        let closed = a.create(ROOT, "g").await.unwrap().entry.attr.ino;
        a.close(closed, true).await.unwrap();
        set_silent(&world, true);
        let mut kept = Vec::new();
        for name in ["f", "g"] {
            kept.push(early(&a, &unlink(&a, ROOT, name)).await.unwrap().kept);
        }
        let _node = crash(&world, node).await;
        a.reconnect("a").await;
        assert_eq!(again(&a, kept).await.unwrap().failed, vec![]);
        a.resume(vec![]).await.unwrap();
        b.reconnect("b").await;
        let lost = b.resume(vec![held(&opened, LeaseKind::None, 1, 0)]).await.unwrap().lost;
        assert!(lost.is_empty());
        world.sleep(Duration::from_millis(2 * u64::from(LEASE_MS))).await;
        assert_eq!(b.getattr(ino).await.unwrap().attr.nlink, 0, "it has it open");
        assert_eq!(b.getattr(closed).await.unwrap_err().kind, ErrorKind::Stale, "no session has it open");
        b.close(ino, false).await.unwrap();
        assert_eq!(b.getattr(ino).await.unwrap_err().kind, ErrorKind::Stale);
    });
}

#[test]
fn nothing_depends_on_answers_that_may_be_lost() {
    simulate(26, async |world| {
        let _meta = start(&world).await;
        let mut a = Client::start(&world, "a").await;
        let dir = used_directory(&a).await;
        set_silent(&world, true);
        early(&a, &mkdir(&a, dir, "x")).await.unwrap();
        let request = rename(&a, dir, "x", "y");
        // Its answer gets lost with the connection.
        early(&a, &request).await.unwrap();
        a.reconnect("a").await;
        let resumed = async {
            a.resume(vec![]).await.unwrap();
            early(&a, &mkdir(&a, dir, "z")).await.unwrap()
        };
        let disk = async {
            world.sleep(3 * LONG).await;
            set_silent(&world, false);
            world.now()
        };
        let (next, answers) = tokio::join!(async { (resumed.await, world.now()) }, disk);
        assert!(next.1 >= answers, "it depends on an answer that its client may not have");
    });
}
