//! Inode numbers that are granted to a client that has a directory to itself, and the batches of files that
//! it reports.
use crate::common::*;
use bytes::Bytes;
use std::time::Duration;
use weir_proto::local_creates::*;
use weir_proto::meta::*;
use weir_proto::quota::Account;
use weir_proto::volume::{Quota, VolumeChange};
use weir_proto::{ErrorKind, InodeId, NameRule, Result, VolumeId};

fn now(client: &Client) -> Time {
    Time { nanos: client.env.clock.wall().0 }
}
async fn lease_names(client: &Client, dir: InodeId, numbers: u32) -> NamesLeased {
    let (session, now) = (client.session, now(client));
    client.call(&LeaseNames { session, dir, numbers, now, uid: 0, gid: 0 }).await.unwrap()
}
fn local_create(client: &Client, ino: InodeId, name: &str) -> LocalCreate {
    let (at, written) = (now(client), now(client));
    LocalCreate {
        ino,
        name: b(name),
        mode: 0o640,
        at,
        open_read: 0,
        open_write: 1,
        content: None,
        mtime: written,
        clean: false,
        uid: 0,
        gid: 0,
        atime: at,
        ctime: written,
    }
}
async fn create_many(client: &Client, dir: InodeId, creates: Vec<LocalCreate>) -> Result<CreatedMany> {
    client.call(&CreateMany { op: client.op(), cred: root(), dir, creates }).await
}
async fn listed(client: &Client, dir: InodeId) -> Vec<String> {
    let list =
        ReadDir { session: client.session, cred: root(), dir, after: 0, limit: 100, with_attrs: false };
    names(&client.call(&list).await.unwrap()).into_iter().collect()
}
fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}

#[test]
fn a_batch_makes_files_as_creates_do() {
    simulate(1, async |world| {
        let _meta = start(&world).await;
        let (a, other) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let leased = lease_names(&a, dir, 10).await;
        assert_eq!((leased.entry.lease.kind, leased.numbers), (LeaseKind::Write, 10));
        let at = |n: u64| InodeId(leased.first.0 + n);
        let content = Some(Bytes::from_static(b"hello"));
        let small = LocalCreate { content, clean: true, open_write: 0, ..local_create(&a, at(2), "small") };
        let made = create_many(&a, dir, vec![local_create(&a, at(0), "open"), small]).await.unwrap();
        assert!(made.parent_attr.mtime.nanos >= leased.entry.attr.mtime.nanos);
        // Lookups of others come after the client's outstanding reports: it keeps Read.
        let seen = other.lookup(dir, "small").await.unwrap().entry.unwrap();
        assert_eq!(a.revoked()[0], (dir, LeaseKind::Read));
        assert_eq!((seen.attr.ino, seen.attr.size, seen.attr.mode), (at(2), 5, 0o640));
        assert_eq!(seen.attr.layout.map(|l| l.seed), Some(weir_proto::map::Layout::seed_of(at(2))));
        let whole = other.call(&ReadInline { session: other.session, ino: at(2) }).await.unwrap();
        assert_eq!(whole.data.as_deref(), Some(&b"hello"[..]));
        assert_eq!(listed(&other, dir).await, ["open", "small"]);
        // The opener has the file to itself, and what it sends is under the epoch of a first writer.
        a.commit(at(0), 1, 3, false).await.unwrap();
        let usage = other.call(&GetUsage { session: other.session, dir }).await.unwrap();
        assert_eq!((usage.files, usage.bytes), (2, 8));
    });
}

/// The names of the files that are lent for removal.
async fn lease_files(client: &Client, dir: InodeId, from: &str, count: u32) -> Result<Vec<String>> {
    let leased = client.call(&LeaseFiles { session: client.session, dir, from: b(from), count }).await?.files;
    assert!(leased.iter().all(|file| file.entry.lease.kind >= LeaseKind::Read));
    Ok(leased.iter().map(|file| String::from_utf8_lossy(&file.name).into_owned()).collect())
}

#[test]
fn files_are_lent_for_removal_where_no_other_client_uses_them() {
    simulate(21, async |world| {
        let _meta = start(&world).await;
        let (a, maker) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = maker.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let mut files = Vec::new();
        for name in ["asked", "held", "idle", "open", "twice"] {
            let ino = maker.create(dir, name).await.unwrap().entry.attr.ino;
            maker.close(ino, true).await.unwrap();
            files.push(ino);
        }
        let [asked, held, idle, open, twice] = files[..] else { unreachable!() };
        let link = Link { op: maker.op(), cred: root(), ino: twice, parent: dir, name: b("link") };
        maker.call(&link).await.unwrap();
        maker.mkdir(dir, "inner").await.unwrap();
        assert_eq!(kind_of(lease_files(&a, dir, "a", 10).await), ErrorKind::Stale, "without the names");
        maker.open(open, true, false).await.unwrap();
        for ino in [dir, asked, idle, open, twice] {
            let release = ReleaseLease { session: maker.session, ino, keep: LeaseKind::None };
            maker.call(&release).await.unwrap();
        }
        assert_eq!(lease_names(&a, dir, 10).await.entry.lease.kind, LeaseKind::Write);
        assert_eq!(lease_files(&a, dir, "b", u32::MAX).await.unwrap(), ["idle"]);
        assert_eq!(lease_files(&a, dir, "a", 1).await.unwrap(), ["asked"]);
        // The one that its maker holds, and does not use, is lent a moment later.
        world.sleep(Duration::from_millis(10)).await;
        assert_eq!(maker.revoked().last(), Some(&(held, LeaseKind::None)));
        assert_eq!(lease_files(&a, dir, "held", 10).await.unwrap(), ["held", "idle"]);
        // By its number another client sees the file only after the right to remove it has ended.
        assert_eq!(a.revoked(), []);
        maker.getattr(asked).await.unwrap();
        assert_eq!(a.revoked(), [(asked, LeaseKind::Read)]);
        let removals = vec![Removal { name: b("idle"), ino: idle, at: now(&a) }];
        a.call(&RemoveMany { op: a.op(), cred: root(), dir, removals }).await.unwrap();
        assert_eq!(kind_of(maker.getattr(idle).await), ErrorKind::Stale, "it is gone");
    });
}

#[test]
fn a_batch_counts_once_and_as_a_whole() {
    simulate(2, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let first = lease_names(&a, dir, 5).await.first.0;
        let two = vec![local_create(&a, InodeId(first), "x"), local_create(&a, InodeId(first + 1), "y")];
        let batch = CreateMany { op: a.op(), cred: root(), dir, creates: two };
        let made = a.call(&batch).await.unwrap();
        assert_eq!(a.call(&batch).await.unwrap(), made, "sent again, it has the same answer");
        let bad = |ino: u64, name: &str| {
            vec![local_create(&a, InodeId(first + 2), "z"), local_create(&a, InodeId(ino), name)]
        };
        for (creates, kind) in [
            (bad(first + 3, "x"), ErrorKind::Exists),
            (bad(first + 5, "behind"), ErrorKind::Invalid),
            (bad(first, "used"), ErrorKind::Invalid),
            (bad(first + 2, "twice"), ErrorKind::Invalid),
            (bad(first + 3, "a/b"), ErrorKind::Invalid),
            (bad(first + 3, &"n".repeat(256)), ErrorKind::Name(NameRule::TooLong)),
            (Vec::new(), ErrorKind::Invalid),
            (vec![local_create(&a, InodeId(first + 2), "m"); BATCH_FILES_MAX + 1], ErrorKind::Invalid),
        ] {
            assert_eq!(kind_of(create_many(&a, dir, creates).await), kind);
        }
        let big = LocalCreate {
            content: Some(vec![0; INLINE_MAX + 1].into()),
            ..local_create(&a, InodeId(first + 2), "big")
        };
        assert_eq!(kind_of(create_many(&a, dir, vec![big]).await), ErrorKind::Invalid);
        assert_eq!(listed(&a, dir).await, ["x", "y"], "nothing is left of what was refused");
        create_many(&a, dir, bad(first + 3, "last")).await.unwrap();
        assert_eq!(listed(&a, dir).await, ["last", "x", "y", "z"]);
        let user = Cred { uid: 7, gid: 7, groups: vec![8] };
        let by_user = |created| CreateMany { op: a.op(), cred: user.clone(), dir, creates: vec![created] };
        let not_mine = by_user(local_create(&a, InodeId(first), "u"));
        assert_eq!(kind_of(a.call(&not_mine).await), ErrorKind::Denied);
        let (uid, gid, size, atime, mtime) = (None, None, None, None, None);
        let (op, cred, mode) = (a.op(), root(), Some(0o777));
        a.call(&SetAttr { op, cred, ino: dir, mode, uid, gid, size, atime, mtime }).await.unwrap();
        for (uid, gid) in [(0, 7), (9, 7), (7, 0), (7, 9)] {
            let of_another = LocalCreate { uid, gid, ..local_create(&a, InodeId(first + 4), "given") };
            let refused = kind_of(a.call(&by_user(of_another)).await);
            assert_eq!(refused, ErrorKind::Name(NameRule::NotOwner), "{uid} {gid}");
        }
        let to_group = LocalCreate { uid: 7, gid: 8, ..local_create(&a, InodeId(first + 4), "shared") };
        a.call(&by_user(to_group)).await.unwrap();
        let attr = a.lookup(dir, "shared").await.unwrap().entry.unwrap().attr;
        assert_eq!((attr.uid, attr.gid), (7, 8));
    });
}

#[test]
fn a_batch_of_removals_is_carried_out_as_a_whole() {
    simulate(7, async |world| {
        let _meta = start(&world).await;
        let (a, other) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let inner = a.mkdir(dir, "inner").await.unwrap().entry.attr.ino;
        let first = lease_names(&a, dir, 4).await.first.0;
        let at = |n: u64| InodeId(first + n);
        let closed = |name, ino| LocalCreate { open_write: 0, clean: true, ..local_create(&a, ino, name) };
        let files = ["x", "y", "z"].into_iter().zip(0..).map(|(name, n)| closed(name, at(n))).collect();
        create_many(&a, dir, files).await.unwrap();
        let removal = |name: &str, ino| Removal { name: b(name), ino, at: now(&a) };
        let remove = |c: &Client, removals| RemoveMany { op: c.op(), cred: root(), dir, removals };
        for (second, kind) in [
            (removal("none", at(1)), ErrorKind::NotFound),
            (removal("y", at(2)), ErrorKind::Invalid),
            (removal("inner", inner), ErrorKind::Invalid),
            (removal("x", at(0)), ErrorKind::NotFound),
        ] {
            let refused = a.call(&remove(&a, vec![removal("x", at(0)), second])).await;
            assert_eq!(kind_of(refused), kind);
        }
        assert_eq!(kind_of(a.call(&remove(&a, vec![])).await), ErrorKind::Invalid);
        assert_eq!(listed(&a, dir).await, ["inner", "x", "y", "z"], "nothing was removed");
        let batch = remove(&a, vec![removal("x", at(0)), removal("z", at(2))]);
        let removed = a.call(&batch).await.unwrap();
        assert_eq!((removed.parent_attr.size, removed.parent_attr.nlink), (2, 3));
        assert_eq!(a.call(&batch).await.unwrap(), removed, "sent again, it has the same answer");
        assert_eq!(kind_of(other.call(&remove(&other, vec![removal("y", at(1))])).await), ErrorKind::Stale);
        assert_eq!(listed(&other, dir).await, ["inner", "y"]);
        assert_eq!(kind_of(other.getattr(at(0)).await), ErrorKind::Stale);
    });
}

#[test]
fn numbers_are_granted_only_where_no_create_can_be_refused() {
    simulate(3, async |world| {
        let _meta = start(&world).await;
        let (a, other) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let refused = async |why: &str| {
            let leased = lease_names(&a, dir, 4).await;
            assert_eq!((leased.numbers, leased.layout), (0, None), "{why}");
            assert!(leased.entry.lease.kind < LeaseKind::Write, "{why}");
        };
        let none = vec![local_create(&a, InodeId(99), "f")];
        assert_eq!(kind_of(create_many(&a, dir, none).await), ErrorKind::Stale, "it has no names");
        other.lookup(dir, "x").await.unwrap();
        refused("another caches the names").await;
        a.create(dir, "f").await.unwrap();
        refused("clients change it by turns").await;
        world.clock().sleep(std::time::Duration::from_millis(60)).await;
        let far = Time { nanos: now(&a).nanos + 11_000_000_000 };
        let far = LeaseNames { session: a.session, dir, numbers: 4, now: far, uid: 0, gid: 0 };
        assert_eq!(a.call(&far).await.unwrap().numbers, 0, "the clocks are too far apart");
        assert_eq!(lease_names(&a, dir, u32::MAX).await.numbers, NUMBERS_MAX);
        // A limit revokes them, and leaves a part of its allowance.
        limit_root(&other, 100).await;
        assert_eq!(a.revoked().last(), Some(&(dir, LeaseKind::Read)));
        let leased = lease_names(&a, dir, NUMBERS_MAX).await;
        let account = Account { volume: VolumeId::ROOT, uid: 0, gid: 0 };
        assert_eq!((leased.numbers, leased.account, leased.limits_bytes), (98 / 4, account, false));
        limit_root(&other, 17).await;
        refused("too few inodes are left").await;
    });
}

fn mkdir_with_names(client: &Client, parent: InodeId, name: &str) -> MkdirWithNames {
    let (op, cred, name, now) = (client.op(), root(), b(name), now(client));
    MkdirWithNames { op, cred, parent, name, mode: 0o755, umask: 0o022, numbers: 64, now }
}

#[test]
fn a_new_directory_comes_with_its_names() {
    simulate(8, async |world| {
        let _meta = start(&world).await;
        let (a, other) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let mkdir = mkdir_with_names(&a, ROOT, "d");
        let made = a.call(&mkdir).await.unwrap();
        let dir = made.names.entry.attr.ino;
        assert_eq!((made.names.entry.lease.kind, made.names.numbers), (LeaseKind::Write, 64));
        assert_eq!(made.names.entry.attr.mode, 0o755);
        let at = |n: u64| InodeId(made.names.first.0 + n);
        create_many(&a, dir, vec![local_create(&a, at(0), "x"), local_create(&a, at(63), "y")])
            .await
            .unwrap();
        assert_eq!(
            kind_of(create_many(&a, dir, vec![local_create(&a, at(64), "z")]).await),
            ErrorKind::Invalid
        );
        assert_eq!(listed(&other, dir).await, ["x", "y"]);
        assert_eq!(a.revoked(), [(dir, LeaseKind::Read)], "a look of another client comes after the report");
        // Repeated, it is the same directory; the names may be gone.
        let again = a.call(&mkdir).await.unwrap();
        assert_eq!((again.names.entry.attr.ino, again.names.numbers), (dir, 0));
        assert!(again.names.layout.is_none() && again.names.entry.lease.kind == LeaseKind::Read);
        assert_eq!(kind_of(a.call(&mkdir_with_names(&a, ROOT, "d")).await), ErrorKind::Exists);
        // Near a limit, and where creates may be refused, it is a plain directory.
        limit_root(&other, 34).await;
        let near = a.call(&mkdir_with_names(&a, ROOT, "near")).await.unwrap().names;
        assert_eq!((near.numbers, near.entry.lease.kind), (0, LeaseKind::Read));
        limit_root(&other, 100).await;
        let part = a.call(&mkdir_with_names(&a, ROOT, "part")).await.unwrap().names;
        assert_eq!((part.numbers, part.entry.lease.kind), ((100 - 6) / 4, LeaseKind::Write));
        let far = MkdirWithNames { now: Time { nanos: 0 }, ..mkdir_with_names(&a, ROOT, "far") };
        assert_eq!(a.call(&far).await.unwrap().names.numbers, 0, "the clocks are too far apart");
    });
}

/// Limits the files and directories of the root volume.
async fn limit_root(client: &Client, inodes: u64) {
    let (name, owner, admins, policy, retention) = (None, None, None, None, None);
    let quota = Some(Quota { inodes_hard: Some(inodes), ..Quota::NONE });
    let (op, cred, volume) = (client.op(), root(), VolumeId::ROOT);
    let change = VolumeChange { op, cred, volume, name, owner, admins, quota, policy, retention };
    client.call(&change).await.unwrap();
}

#[test]
fn unused_numbers_count_under_limits_of_inodes() {
    simulate(6, async |world| {
        let node = start(&world).await;
        let (mut a, mut other) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let second = a.mkdir(ROOT, "e").await.unwrap().entry.attr.ino;
        let shared = other.mkdir(ROOT, "f").await.unwrap().entry.attr.ino;
        limit_root(&other, 43).await;
        let leased = lease_names(&a, dir, NUMBERS_MAX).await;
        assert_eq!(leased.numbers, 40 / 4);
        assert_eq!(
            lease_names(&a, dir, NUMBERS_MAX).await.numbers,
            40 / 4,
            "a new block replaces the old one"
        );
        let leased = lease_names(&a, dir, NUMBERS_MAX).await;
        assert_eq!(lease_names(&a, second, NUMBERS_MAX).await.numbers, 0, "30 / 4 are too few");
        let at = |n: u64| InodeId(leased.first.0 + n);
        create_many(&a, dir, vec![local_create(&a, at(0), "x"), local_create(&a, at(3), "y")]).await.unwrap();
        let foreign = LocalCreate { uid: 7, ..local_create(&a, at(4), "z") };
        assert_eq!(kind_of(create_many(&a, dir, vec![foreign]).await), ErrorKind::Invalid, "another account");
        // The leader restarts: the numbers still count.
        world.kill("meta");
        drop(node);
        let node = start(&world).await;
        a.reconnect("a").await;
        other.reconnect("b").await;
        a.resume(vec![held(&leased.entry, LeaseKind::Write, 0, 0)]).await.unwrap();
        other.resume(vec![]).await.unwrap();
        // 38 are left, six of them as numbers: the 33rd create takes these back.
        for n in 0..32 {
            other.create(shared, &format!("f{n}")).await.unwrap();
        }
        let taken = || a.revoked().into_iter().filter(|(ino, _)| *ino == dir).collect::<Vec<_>>();
        assert_eq!(taken(), [], "there is space beside them");
        other.create(shared, "next").await.unwrap();
        assert_eq!(taken(), [(dir, LeaseKind::Read)]);
        assert_eq!(
            kind_of(create_many(&a, dir, vec![local_create(&a, at(4), "late")]).await),
            ErrorKind::Stale
        );
        for n in 0..5 {
            other.create(shared, &format!("last{n}")).await.unwrap();
        }
        assert_eq!(kind_of(other.create(shared, "over").await), ErrorKind::OverQuota);
        drop(node);
    });
}

#[test]
fn a_change_by_another_client_takes_the_names_away() {
    simulate(4, async |world| {
        let _meta = start(&world).await;
        let (a, other) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        for what in ["create", "unlink", "mkdir", "rename"] {
            let dir = a.mkdir(ROOT, what).await.unwrap().entry.attr.ino;
            a.create(dir, "f").await.unwrap();
            assert_eq!(lease_names(&a, dir, 4).await.numbers, 4, "{what}");
            let before = a.revoked().len();
            let rename = Rename {
                op: other.op(),
                cred: root(),
                parent: dir,
                name: b("f"),
                new_parent: ROOT,
                new_name: b("moved"),
                mode: RenameMode::Replace,
            };
            let done: Result<()> = match what {
                "create" => other.create(dir, "g").await.map(drop),
                "unlink" => other.unlink(dir, "f").await.map(drop),
                "mkdir" => other.mkdir(dir, "h").await.map(drop),
                _ => other.call(&rename).await.map(drop),
            };
            assert!(done.is_ok(), "{what}: {done:?}");
            let revoked = a.revoked().split_off(before);
            assert!(revoked.contains(&(dir, LeaseKind::None)), "{what}: {revoked:?}");
            assert_eq!(lease_names(&a, dir, 4).await.numbers, 0, "{what}: it is contended");
        }
    });
}

#[test]
fn names_and_numbers_survive_a_restart_of_the_leader() {
    simulate(5, async |world| {
        let node = start(&world).await;
        let mut a = Client::start(&world, "a").await;
        let dir = a.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        let leased = lease_names(&a, dir, 8).await;
        let ino = |n: u64| InodeId(leased.first.0 + n);
        let batch =
            CreateMany { op: a.op(), cred: root(), dir, creates: vec![local_create(&a, ino(0), "told")] };
        a.call(&batch).await.unwrap();
        world.kill("meta");
        drop(node);
        let node = start(&world).await;
        a.reconnect("a").await;
        // The client has no answer for the batch yet, and names what it holds.
        let held_dir = held(&leased.entry, LeaseKind::Write, 0, 0);
        let of_file = |ino| HeldLease {
            ino,
            kind: LeaseKind::Write,
            token_epoch: 1,
            open_read: 0,
            open_write: 1,
            append_token: false,
        };
        let resumed = a.resume(vec![held_dir, of_file(ino(0)), of_file(ino(1))]).await.unwrap();
        assert_eq!(resumed.lost, [ino(1)], "only the create that was never reported is lost");
        let closed = vec![LocalCreate { open_write: 0, ..batch.creates[0].clone() }];
        a.call(&CreateMany { creates: closed, ..batch }).await.unwrap();
        create_many(&a, dir, vec![local_create(&a, ino(1), "untold")]).await.unwrap();
        a.commit(ino(1), 1, 1, true).await.unwrap();
        // A session that is over has no numbers any more.
        a.call(&SessionClose { session: a.session }).await.unwrap();
        let c = Client::start(&world, "c").await;
        assert_eq!(listed(&c, dir).await, ["told", "untold"]);
        let next = lease_names(&c, dir, 8).await.first;
        assert!(next > ino(7), "numbers that were given are not given again");
        drop(node);
    });
}
