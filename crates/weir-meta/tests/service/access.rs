//! The rights that the rules for mounts give a mount, for every kind of request.
use crate::common::*;
use weir_env::sim::World;
use weir_proto::access::{AccessRule, Grant, IdsAre, NOBODY, RootIs, VolumeGrant};
use weir_proto::lock::{LockKind, LockOwner, LockRange, LockSpace, SetLock};
use weir_proto::map::Role;
use weir_proto::meta::*;
use weir_proto::volume::{Policy, Quota, ReserveQuota, VolumeCreate, VolumeList};
use weir_proto::{ErrorKind, InodeId, NameRule, Result, VolumeId};

const READ_ONLY: ErrorKind = ErrorKind::Name(NameRule::ReadOnly);
const NOT_OWNER: ErrorKind = ErrorKind::Name(NameRule::NotOwner);

fn kind<T>(answer: Result<T>) -> ErrorKind {
    answer.map(drop).expect_err("it is refused").kind
}

fn user(uid: u32) -> Cred {
    Cred { uid, gid: uid, groups: vec![uid] }
}

fn rule(volumes: &[(&str, Grant)]) -> AccessRule {
    let grant = |(glob, grant): &(&str, Grant)| VolumeGrant { glob: (*glob).into(), grant: *grant };
    AccessRule {
        name: "batch".into(),
        who: "node-?".into(),
        from: vec![],
        volumes: volumes.iter().map(grant).collect(),
        root: RootIs::Squashed,
        ids: IdsAre::Claimed {},
    }
}

/// A volume and a file in it.
struct Place {
    id: VolumeId,
    root: InodeId,
    file: InodeId,
}

impl Client {
    async fn place(&self, name: &str) -> Place {
        let new = VolumeCreate {
            op: self.op(),
            cred: root(),
            name: name.into(),
            parent: ROOT,
            entry: b(name),
            path: b(&format!("/{name}")),
            owner: 0,
            group: 0,
            mode: 0o755,
            admins: Vec::new(),
            quota: Quota::NONE,
            policy: Policy { scheme: None, pool: None },
        };
        let made = self.call(&new).await.unwrap();
        let file = self.create(made.root, "file").await.unwrap().entry.attr.ino;
        self.close(file, true).await.unwrap();
        Place { id: made.id, root: made.root, file }
    }
    async fn read_dir(&self, cred: Cred, dir: InodeId) -> Result<Listing> {
        let (session, after, limit) = (self.session, 0, 100);
        self.call(&ReadDir { session, cred, dir, after, limit, with_attrs: true }).await
    }
    async fn set(&self, cred: Cred, ino: InodeId, mode: Option<u32>, uid: Option<u32>) -> Result<Entry> {
        let (op, gid, size) = (self.op(), None, None);
        self.call(&SetAttr { op, cred, ino, mode, uid, gid, size, atime: None, mtime: None }).await
    }
    async fn make(&self, cred: Cred, parent: InodeId, name: &str) -> Result<Made> {
        self.call(&Mkdir { op: self.op(), cred, parent, name: b(name), mode: 0o755, umask: 0 }).await
    }
    async fn rename(&self, from: InodeId, to: InodeId) -> Result<Renamed> {
        let (op, cred, mode) = (self.op(), root(), RenameMode::Replace);
        let (name, new_name) = (b("file"), b("moved"));
        self.call(&Rename { op, cred, parent: from, name, new_parent: to, new_name, mode }).await
    }
    async fn lock(&self, ino: InodeId) -> Result<weir_proto::lock::LockAnswer> {
        let owner = LockOwner { space: LockSpace::ALL[0], id: 1 };
        let (session, range, kind) = (self.session, LockRange { start: 0, end: 9 }, Some(LockKind::ALL[0]));
        self.call(&SetLock { session, ino, owner, range, kind, pid: 1, ticket: 0, closing: false }).await
    }
}

/// A console and a mount that a rule names.
async fn both(world: &World) -> (Node, Client, Client) {
    set_rules(vec![]);
    REFUSED.with_borrow_mut(Vec::clear);
    let meta = start(world).await;
    let console = Client::start(world, "console").await;
    let mount = Client::with_role(world, "node-1:/mnt/weir", Role::Mount).await;
    (meta, console, mount)
}

#[test]
fn root_of_a_mount_is_nobody_where_a_rule_says_so() {
    simulate(31, async |world| {
        let (_meta, console, mount) = both(&world).await;
        let place = console.place("p1").await;
        console.set(root(), place.file, Some(0o4600), None).await.unwrap();
        let shared = console.make(root(), place.root, "shared").await.unwrap().entry.attr.ino;
        console.set(root(), shared, Some(0o777), None).await.unwrap();
        let hidden = console.make(root(), place.root, "hidden").await.unwrap().entry.attr.ino;
        console.set(root(), hidden, Some(0o700), None).await.unwrap();
        let set = |name: &'static str| SetXattr {
            op: console.op(),
            cred: root(),
            ino: place.file,
            name: b(name),
            value: b("v"),
            create: false,
            replace: false,
        };
        console.call(&set("user.a")).await.unwrap();
        console.call(&set("trusted.b")).await.unwrap();
        mount.make(root(), place.root, "before").await.unwrap();

        set_rules(vec![rule(&[("p1", Grant::ReadWrite)])]);
        assert_eq!(kind(mount.make(root(), place.root, "after").await), ErrorKind::Denied);
        assert_eq!(kind(mount.create(place.root, "after").await), ErrorKind::Denied);
        assert_eq!(kind(mount.unlink(place.root, "file").await), ErrorKind::Denied);
        assert_eq!(kind(mount.rename(place.root, shared).await), ErrorKind::Denied);
        assert_eq!(kind(mount.open(place.file, true, false).await), ErrorKind::Denied);
        assert_eq!(kind(mount.set(root(), place.file, Some(0o777), None).await), NOT_OWNER);
        assert_eq!(kind(mount.set(root(), place.file, None, Some(1000)).await), NOT_OWNER);
        assert_eq!(kind(mount.read_dir(root(), hidden).await), ErrorKind::Denied);
        assert_eq!(kind(mount.lookup(hidden, "x").await), ErrorKind::Denied);
        let (session, ino) = (mount.session, place.file);
        let get = |name: &str| GetXattr { session, cred: root(), ino, name: b(name) };
        assert_eq!(kind(mount.call(&get("user.a")).await), ErrorKind::Denied);
        assert_eq!(kind(mount.call(&get("trusted.b")).await), ErrorKind::Name(NameRule::NoAttribute));
        let listed = mount.call(&ListXattr { session, cred: root(), ino }).await.unwrap();
        assert_eq!(listed.names, [b("user.a")]);
        // As user 65534 it has the rights of all users, and others are the users that they claim.
        let by_root = mount.make(root(), shared, "one").await.unwrap().entry.attr;
        let by_user = mount.make(user(1000), shared, "two").await.unwrap().entry.attr;
        assert_eq!((by_root.uid, by_root.gid, by_user.uid), (NOBODY, NOBODY, 1000));
        // The true ids are shown.
        let shown = mount.getattr(place.file).await.unwrap().attr;
        assert_eq!((shown.uid, shown.mode), (0, 0o4600));
        // Others are who they were, and so is this mount without the rule.
        console.create(place.root, "other").await.unwrap();
        set_rules(vec![]);
        mount.create(place.root, "again").await.unwrap();
        assert_eq!(REFUSED.take(), [], "what the modes of files refuse is no refusal of a rule");
    });
}

#[test]
fn a_writer_may_only_drop_set_id_bits() {
    simulate(32, async |world| {
        let (_meta, console, mount) = both(&world).await;
        let place = console.place("p1").await;
        let set = async |mode| console.set(root(), place.file, Some(mode), None).await.unwrap();
        set(0o6777).await;
        assert_eq!(kind(mount.set(user(7), place.file, Some(0o4777 & !0o002), None).await), NOT_OWNER);
        assert_eq!(kind(mount.set(user(7), place.file, Some(0o7777), None).await), NOT_OWNER);
        let dropped = mount.set(user(7), place.file, Some(0o777), None).await.unwrap();
        assert_eq!(dropped.attr.mode, 0o777);
        assert_eq!(kind(mount.set(user(7), place.file, Some(0o4777), None).await), NOT_OWNER);
        set(0o4755).await;
        assert_eq!(kind(mount.set(user(7), place.file, Some(0o755), None).await), NOT_OWNER, "not writable");
    });
}

#[test]
fn a_read_only_volume_refuses_every_change() {
    simulate(33, async |world| {
        let (_meta, console, mount) = both(&world).await;
        let (p1, p2) = (console.place("p1").await, console.place("p2").await);
        let written = mount.open(p2.file, true, true).await.unwrap();
        set_rules(vec![AccessRule {
            root: RootIs::Kept,
            ..rule(&[("p1", Grant::ReadWrite), ("*", Grant::ReadOnly)])
        }]);
        assert_eq!(kind(mount.make(root(), p2.root, "d").await), READ_ONLY);
        assert_eq!(kind(mount.create(p2.root, "f").await), READ_ONLY);
        assert_eq!(kind(mount.unlink(p2.root, "file").await), READ_ONLY);
        assert_eq!(kind(mount.rename(p1.root, p2.root).await), READ_ONLY);
        assert_eq!(kind(mount.rename(p2.root, p1.root).await), READ_ONLY);
        assert_eq!(kind(mount.set(root(), p2.file, Some(0o777), None).await), READ_ONLY);
        assert_eq!(kind(mount.open(p2.file, false, true).await), READ_ONLY);
        assert_eq!(kind(mount.acquire(p2.file, LeaseKind::Write).await), READ_ONLY);
        let epoch = written.entry.lease.token_epoch;
        assert_eq!(kind(mount.commit(p2.file, epoch, 10, true).await), READ_ONLY, "open since before");
        let reserve = ReserveQuota { session: mount.session, volume: p2.id, spent: 0, must: 1, want: 1 };
        assert_eq!(kind(mount.call(&reserve).await), READ_ONLY);
        let link = Link { op: mount.op(), cred: root(), ino: p2.file, parent: p1.root, name: b("l") };
        assert_eq!(kind(mount.call(&link).await), READ_ONLY);
        // Reading is not changing, and closing ends what was begun.
        mount.open(p2.file, true, false).await.unwrap();
        mount.acquire(p2.file, LeaseKind::Read).await.unwrap();
        mount.read_dir(root(), p2.root).await.unwrap();
        mount.close(p2.file, true).await.unwrap();
        let before = mount.getattr(p2.file).await.unwrap().attr.atime;
        let accessed = AccessTime { ino: p2.file, at: Time { nanos: before.nanos + 1 } };
        mount.call(&NoteAccess { session: mount.session, accesses: vec![accessed] }).await.unwrap();
        assert_eq!(mount.getattr(p2.file).await.unwrap().attr.atime, before);
        mount.rename(p1.root, p1.root).await.unwrap();
    });
}

#[test]
fn a_refused_volume_is_not_entered_and_that_is_reported_once() {
    simulate(34, async |world| {
        let (_meta, console, mount) = both(&world).await;
        let (p1, p3) = (console.place("p1").await, console.place("p3").await);
        set_rules(vec![rule(&[("p1", Grant::ReadWrite)])]);
        for _ in 0..3 {
            assert_eq!(kind(mount.lookup(p3.root, "file").await), ErrorKind::Denied);
            assert_eq!(kind(mount.getattr(p3.file).await), ErrorKind::Denied);
            assert_eq!(kind(mount.open(p3.file, true, false).await), ErrorKind::Denied);
            assert_eq!(kind(mount.read_dir(root(), p3.root).await), ErrorKind::Denied);
            assert_eq!(kind(mount.acquire(p3.file, LeaseKind::Read).await), ErrorKind::Denied);
            assert_eq!(kind(mount.lock(p3.file).await), ErrorKind::Denied);
            let inline = ReadInline { session: mount.session, ino: p3.file };
            assert_eq!(kind(mount.call(&inline).await), ErrorKind::Denied);
        }
        // The way to a volume that is not refused is open, and nothing beside it.
        mount.getattr(ROOT).await.unwrap();
        assert_eq!(mount.lookup(ROOT, "p1").await.unwrap().entry.unwrap().attr.ino, p1.root);
        assert_eq!(kind(mount.lookup(ROOT, "p3").await), ErrorKind::Denied);
        assert_eq!(kind(mount.lookup(ROOT, "absent").await), ErrorKind::Denied);
        assert_eq!(kind(mount.read_dir(root(), ROOT).await), ErrorKind::Denied);
        mount.lookup(p1.root, "file").await.unwrap();
        let refused: Vec<(String, &str)> = REFUSED.take().into_iter().map(|r| (r.volume, r.what)).collect();
        assert_eq!(refused, [("p3".to_owned(), "Lookup"), ("root".to_owned(), "Lookup")]);
        // What counts is who sends, not whose session it is.
        let borrowed = GetAttr { session: console.session, ino: p3.file };
        assert_eq!(kind(mount.call(&borrowed).await), ErrorKind::Denied);
        console.getattr(p3.file).await.unwrap();
        mount.call(&VolumeList { session: mount.session, after: VolumeId(0), limit: 10 }).await.unwrap();
        // A mount that no rule names has what it always had, and so has this one under another rule.
        let other = Client::with_role(&world, "desk", Role::Mount).await;
        other.open(p3.file, true, true).await.unwrap();
        set_rules(vec![rule(&[("p*", Grant::ReadOnly)])]);
        mount.lookup(p3.root, "file").await.unwrap();
    });
}

#[test]
fn ids_are_those_of_the_rule() {
    simulate(35, async |world| {
        let (_meta, console, mount) = both(&world).await;
        let place = console.place("p1").await;
        console.set(root(), place.root, None, Some(500)).await.unwrap();
        let ids = IdsAre::All { uid: 500, gid: 600 };
        set_rules(vec![AccessRule { ids, ..rule(&[("/p1", Grant::ReadWrite)]) }]);
        let made = mount.make(user(7), place.root, "d").await.unwrap().entry.attr;
        assert_eq!((made.uid, made.gid), (500, 600));
        let by_root = mount.make(root(), place.root, "e").await.unwrap().entry.attr;
        assert_eq!((by_root.uid, by_root.gid), (500, 600));
        // A file that has no name yet is in no volume: the first rule for the node counts.
        let (op, cred, parent) = (mount.op(), user(7), place.root);
        let nameless = CreateNameless { op, cred, parent, mode: 0o600, umask: 0, open: 3 };
        let nameless = mount.call(&nameless).await.unwrap().attr.ino;
        mount.set(user(7), nameless, Some(0o640), None).await.unwrap();
    });
}
