//! The namespace compared with a simple model: the same answers, the same tree, exact usage and link counts.
use super::remove::release_orphan;
use super::*;
use crate::lease::LeaseTable;
use crate::obstacle::{Halt, Obstacles, discarding};
use crate::quotas::Quotas;
use crate::record::Garbage;
use bytes::Bytes;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weir_kv::{Kv, MemoryKv, Scan};
use weir_proto::ErrorKind;
use weir_proto::PgId;
use weir_proto::map::Scheme;
use weir_proto::meta::{self, *};

mod clones;
mod evicted;
mod gates;
mod owners;
mod snapshots;
mod trash;
mod volumes;

const ME: SessionId = SessionId(1);
/// Another session.
const OTHER: SessionId = SessionId(2);

pub struct World {
    kv: Arc<dyn Kv>,
    leases: LeaseTable,
    quotas: Quotas,
    now: i64,
    at_home: Arc<AtHomeNow>,
    snapshots: Snapshots,
}

/// Files that home has completely.
#[derive(Default)]
struct AtHomeNow(std::sync::Mutex<BTreeSet<InodeId>>);
impl AtHomeNow {
    fn says(&self, ino: InodeId) -> Result<()> {
        match self.0.lock().unwrap().contains(&ino) {
            true => Ok(()),
            false => Err(Error::denied("home does not have it")),
        }
    }
}

impl World {
    pub fn new() -> World {
        let kv: Arc<dyn Kv> = Arc::new(MemoryKv::default());
        kv.transact(&mut |txn| {
            create::make_root(txn, Time { nanos: 1 });
            Ok(())
        })
        .unwrap();
        World {
            kv,
            leases: LeaseTable::default(),
            quotas: Quotas::default(),
            now: 1000,
            at_home: Arc::default(),
            snapshots: Snapshots::new(),
        }
    }
    pub fn change<T, E: Into<Halt>>(
        &mut self,
        body: impl Fn(&mut Cx<'_>) -> std::result::Result<T, E>,
    ) -> Result<T> {
        self.now += 1;
        let layout = |policy: &Policy| {
            let scheme = policy.scheme.unwrap_or(Scheme { data: 4, parity: 2 });
            Some(LayoutPolicy { scheme, cell_shift: 20, first_pg: PgId(0), pg_count: 24 })
        };
        let known = self.at_home.clone();
        let at_home = move |_: &dyn Read, ino, _: &Inode, _, _| known.says(ino);
        let rules = Rules {
            session: ME,
            client: "test",
            mount: None,
            now: Time { nanos: self.now },
            again: false,
            leases: &self.leases,
            quotas: &self.quotas,
            live: &|_| true,
            deaths: 0,
            logged: &BTreeSet::new(),
            mirrored: &BTreeSet::new(),
            snapshots: &self.snapshots,
            snapshotting: None,
            at_home: &at_home,
            layout: &layout,
        };
        let (mut out, mut conflicts, mut events) = (None, Obstacles::default(), Events::default());
        self.kv.transact(&mut |txn| {
            let ran = run(txn, &rules, &mut conflicts, &mut events, None, |cx| body(cx).map_err(Into::into));
            out = Some(discarding(ran, &mut None)?);
            Ok(())
        })?;
        events.orphaned.iter().for_each(|ino| self.leases.mark_orphan(*ino));
        events.imported.iter().for_each(|ino| self.leases.unmark_orphan(*ino));
        if events.snapshots {
            let mut all = Snapshots::new();
            self.kv
                .read(&mut |read| {
                    all = snapshot::load_all(read)?;
                    Ok(())
                })
                .unwrap();
            self.snapshots = all;
        }
        events.volumes.iter().for_each(|(id, record)| self.quotas.note(*id, record.as_ref()));
        events.limits.iter().for_each(|(holder, record)| self.quotas.owners.note(*holder, *record));
        self.check_owners();
        Ok(out.unwrap())
    }
    /// After each change of any test: the counters of users and groups are those of a full count, and those
    /// of a volume together are the volume's usage.
    fn check_owners(&self) {
        let check = |read: &dyn Read| {
            let counts = crate::owners::counted(read)?;
            assert_eq!(counts, crate::owners::recount(read)?);
            assert_eq!(crate::owners::difference(read, &counts, volume_usage)?, None);
            Ok(())
        };
        self.kv.read(&mut |read| check(read)).unwrap();
    }
    pub fn view<T, E: Into<Halt>>(
        &self,
        body: impl Fn(&mut View<'_>) -> std::result::Result<T, E>,
    ) -> Result<T> {
        let known = self.at_home.clone();
        let at_home = move |_: &dyn Read, ino, _: &Inode, _, _| known.says(ino);
        let rules = Rules {
            session: ME,
            client: "test",
            mount: None,
            now: Time { nanos: self.now },
            again: false,
            leases: &self.leases,
            quotas: &self.quotas,
            live: &|_| true,
            deaths: 0,
            logged: &BTreeSet::new(),
            mirrored: &BTreeSet::new(),
            snapshots: &self.snapshots,
            snapshotting: None,
            at_home: &at_home,
            layout: &|_| None,
        };
        let (mut out, mut conflicts) = (None, Obstacles::default());
        self.kv.read(&mut |read| {
            let ran = body(&mut View { read, rules: &rules, obstacles: &mut conflicts });
            out = Some(discarding(ran.map_err(Into::into), &mut None)?);
            Ok(())
        })?;
        Ok(out.unwrap())
    }
    fn create(&mut self, cred: &Cred, parent: InodeId, name: &str, mode: u32) -> Result<Created> {
        let r = Create {
            op: op(),
            cred: cred.clone(),
            parent,
            name: b(name),
            mode,
            umask: 0,
            exclusive: true,
            open: 2,
        };
        self.change(|cx| create::create(cx, &r))
    }
    fn mkdir(&mut self, cred: &Cred, parent: InodeId, name: &str, mode: u32) -> Result<Made> {
        let r = Mkdir { op: op(), cred: cred.clone(), parent, name: b(name), mode, umask: 0 };
        self.change(|cx| create::mkdir(cx, &r))
    }
    fn unlink(&mut self, cred: &Cred, parent: InodeId, name: &str) -> Result<Removed> {
        let r = Unlink { op: op(), cred: cred.clone(), parent, name: b(name) };
        self.change(|cx| remove::unlink(cx, &r))
    }
    fn rmdir(&mut self, cred: &Cred, parent: InodeId, name: &str) -> Result<Removed> {
        let r = Rmdir { op: op(), cred: cred.clone(), parent, name: b(name) };
        self.change(|cx| remove::rmdir(cx, &r))
    }
    fn rename(
        &mut self,
        cred: &Cred,
        from: (InodeId, &str),
        to: (InodeId, &str),
        mode: RenameMode,
    ) -> Result<Renamed> {
        let (name, new_name) = (b(from.1), b(to.1));
        let r =
            Rename { op: op(), cred: cred.clone(), parent: from.0, name, new_parent: to.0, new_name, mode };
        self.change(|cx| rename::rename(cx, &r))
    }
    fn link(&mut self, cred: &Cred, ino: InodeId, parent: InodeId, name: &str) -> Result<Made> {
        let r = meta::Link { op: op(), cred: cred.clone(), ino, parent, name: b(name) };
        self.change(|cx| create::link(cx, &r))
    }
    fn token_epoch(&self, ino: InodeId) -> u32 {
        self.view(|v| open::read_inline(v, ino)).map_or(1, |shown| shown.entry.lease.token_epoch)
    }
    fn commit(&mut self, ino: InodeId, size: u64, clean: bool) -> Result<Entry> {
        self.commit_under(self.token_epoch(ino), ino, size, clean)
    }
    fn commit_under(&mut self, token_epoch: u32, ino: InodeId, size: u64, clean: bool) -> Result<Entry> {
        let r = Commit {
            op: op(),
            ino,
            token_epoch,
            size,
            mtime: Time { nanos: 5 },
            allocated: size,
            inline: None,
            drop_inline: false,
            clean,
            close_writes: 0,
            data_end: size,
            append_token: false,
            changed: Vec::new(),
        };
        self.change(|cx| data::commit(cx, &r))
    }
    fn set(&mut self, cred: &Cred, ino: InodeId, edit: impl FnOnce(&mut SetAttr)) -> Result<Entry> {
        let (mode, uid, gid, size, atime, mtime) = (None, None, None, None, None, None);
        let mut r = SetAttr { op: op(), cred: cred.clone(), ino, mode, uid, gid, size, atime, mtime };
        edit(&mut r);
        self.change(|cx| attr::setattr(cx, &r))
    }
    fn list(&self, dir: InodeId, after: u64, limit: u32) -> Listing {
        let r = ReadDir { session: ME, cred: root(), dir, after, limit, with_attrs: true };
        self.view(|view| list::readdir(view, &r)).unwrap()
    }
    fn all(&self, dir: InodeId) -> Vec<ListEntry> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let part = self.list(dir, after, 3);
            after = part.entries.last().map_or(after, |e| e.cookie);
            all.extend(part.entries);
            if part.end {
                return all;
            }
        }
    }
    fn attr(&self, ino: InodeId) -> Result<Attr> {
        self.view(|view| attr::getattr(view, ino)).map(|e| e.attr)
    }
    fn keys(&self, letter: u8) -> Vec<Vec<u8>> {
        let (mut found, (start, end)) = (Vec::new(), ([letter], [letter + 1]));
        self.kv
            .read(&mut |read| {
                read.scan(&start, &end, &mut |key, _| {
                    found.push(key.to_vec());
                    Scan::More
                })
            })
            .unwrap();
        found
    }
}

fn b(name: &str) -> Bytes {
    Bytes::copy_from_slice(name.as_bytes())
}
fn op() -> Op {
    Op { session: ME, slot: 0, seq: 1 }
}
fn root() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![] }
}
fn user(uid: u32) -> Cred {
    Cred { uid, gid: uid, groups: vec![uid] }
}
fn errno<T: std::fmt::Debug>(result: Result<T>) -> i32 {
    result.unwrap_err().kind.errno()
}
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const EEXIST: i32 = 17;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const ENAMETOOLONG: i32 = 36;
const ENOTEMPTY: i32 = 39;
const ESTALE: i32 = 116;

#[test]
fn a_new_file_gets_a_number_of_its_directorys_range() {
    let mut w = World::new();
    let dir = w.mkdir(&root(), InodeId::ROOT, "d", 0o755).unwrap().entry.attr;
    let file = w.create(&root(), dir.ino, "f", 0o644).unwrap();
    assert_eq!(dir.ino.0 >> 24, InodeId::ROOT.0 >> 24);
    assert_ne!(file.entry.attr.ino.0 >> 24, dir.ino.0 >> 24);
    assert_eq!(file.parent_attr.size, 1);
    let layout = file.entry.attr.layout.unwrap();
    assert_eq!((layout.pg_count, layout.cell_shift), (24, 20));
    assert_eq!(file.entry.lease.token_epoch, 1);
    // Numbers and cookies are never used twice.
    w.unlink(&root(), dir.ino, "f").unwrap();
    let again = w.create(&root(), dir.ino, "f", 0o644).unwrap().entry.attr.ino;
    assert_ne!(again, file.entry.attr.ino);
    assert_eq!(w.attr(file.entry.attr.ino).map(|_| ()).unwrap_err().kind, ErrorKind::Stale);
}

#[test]
fn a_full_range_of_numbers_is_followed_by_another() {
    let mut w = World::new();
    w.change(|cx| {
        let mut tally = load_tally(cx.read(), InodeId::ROOT)?;
        tally.next_n = (1 << 24) - 1;
        cx.put_tally(InodeId::ROOT, &tally);
        Ok::<_, Halt>(())
    })
    .unwrap();
    let last = w.create(&root(), InodeId::ROOT, "a", 0o644).unwrap().entry.attr.ino;
    let first = w.create(&root(), InodeId::ROOT, "b", 0o644).unwrap().entry.attr.ino;
    assert_eq!(last.0, (1 << 24) | 0xff_ffff);
    assert_eq!(first.0, 2 << 24);
}

#[test]
fn permissions_are_those_of_posix() {
    let mut w = World::new();
    let r = InodeId::ROOT;
    assert_eq!(errno(w.create(&user(7), r, "x", 0o644)), EACCES);
    w.set(&root(), r, |s| s.mode = Some(0o1777)).unwrap();
    let mine = w.create(&user(7), r, "mine", 0o600).unwrap().entry.attr;
    assert_eq!((mine.uid, mine.gid, mine.mode), (7, 7, 0o600));
    assert_eq!(errno(w.unlink(&user(8), r, "mine")), EPERM, "sticky");
    assert_eq!(errno(w.rename(&user(8), (r, "mine"), (r, "yours"), RenameMode::Replace)), EPERM);
    assert_eq!(errno(w.set(&user(8), mine.ino, |s| s.mode = Some(0o777))), EPERM);
    assert_eq!(errno(w.set(&user(7), mine.ino, |s| s.uid = Some(8))), EPERM);
    assert_eq!(errno(w.set(&user(7), mine.ino, |s| s.gid = Some(8))), EPERM);
    let open = |cred: &Cred, read, write| Open {
        session: ME,
        cred: cred.clone(),
        ino: mine.ino,
        read,
        write,
        truncate: false,
        execute: false,
    };
    let request = open(&user(8), true, false);
    assert_eq!(errno(w.change(|cx| open::open(cx, &request))), EACCES);
    // A program that others may execute and not read.
    let run = Open { execute: true, ..request.clone() };
    assert_eq!(errno(w.change(|cx| open::open(cx, &run))), EACCES);
    w.set(&user(7), mine.ino, |s| s.mode = Some(0o611)).unwrap();
    assert_eq!(errno(w.change(|cx| open::open(cx, &request))), EACCES);
    w.change(|cx| open::open(cx, &run)).unwrap();
    let both = Open { write: true, ..run };
    assert_eq!(errno(w.change(|cx| open::open(cx, &both))), EACCES);
    w.set(&user(7), mine.ino, |s| s.mode = Some(0o600)).unwrap();
    let request = open(&root(), true, true);
    w.change(|cx| open::open(cx, &request)).unwrap();
    // A directory with setgid, which other users may not search.
    let group = w.mkdir(&user(7), r, "group", 0o2770).unwrap().entry.attr;
    w.set(&root(), group.ino, |s| s.gid = Some(99)).unwrap();
    w.set(&root(), group.ino, |s| s.mode = Some(0o2770)).unwrap();
    let member = Cred { uid: 8, gid: 8, groups: vec![8, 99] };
    assert_eq!(w.create(&member, group.ino, "shared", 0o660).unwrap().entry.attr.gid, 99);
    let below = w.mkdir(&member, group.ino, "below", 0o770).unwrap().entry.attr;
    assert_eq!((below.gid, below.mode), (99, 0o2770));
    let lookup = |cred: Cred| Lookup { session: ME, cred, parent: group.ino, name: b("shared") };
    let request = lookup(user(9));
    assert_eq!(errno(w.view(|v| attr::lookup(v, &request))), EACCES);
    let request = lookup(member);
    assert!(w.view(|v| attr::lookup(v, &request)).unwrap().entry.is_some());
}

#[test]
fn a_change_of_owner_takes_set_uid_away() {
    let mut w = World::new();
    w.set(&root(), InodeId::ROOT, |s| s.mode = Some(0o777)).unwrap();
    let f = w.create(&user(7), InodeId::ROOT, "f", 0o6755).unwrap().entry.attr.ino;
    let cred = Cred { uid: 7, gid: 7, groups: vec![7, 9] };
    assert_eq!(w.set(&cred, f, |s| s.gid = Some(9)).unwrap().attr.mode, 0o755);
}

#[test]
fn hostile_names_and_numbers_are_refused() {
    let mut w = World::new();
    let r = InodeId::ROOT;
    for name in ["", ".", "..", "a/b", "a\0b"] {
        assert_eq!(errno(w.create(&root(), r, name, 0o644)), EINVAL, "{name:?}");
    }
    assert_eq!(errno(w.create(&root(), r, &"x".repeat(256), 0o644)), ENAMETOOLONG);
    w.create(&root(), r, &"x".repeat(255), 0o644).unwrap();
    for ino in [0, 2, u64::MAX, 1 << 63] {
        let ino = InodeId(ino);
        assert_eq!(errno(w.attr(ino)), ESTALE);
        assert_eq!(errno(w.create(&root(), ino, "x", 0o644)), ESTALE);
        assert_eq!(errno(w.link(&root(), ino, r, "x")), ESTALE);
        assert_eq!(errno(w.commit(ino, 1, true)), ESTALE);
        assert_eq!(errno(w.set(&root(), ino, |s| s.size = Some(1))), ESTALE);
    }
    let f = w.create(&root(), r, "f", 0o644).unwrap().entry.attr.ino;
    assert_eq!(errno(w.create(&root(), f, "x", 0o644)), ENOTDIR);
    assert_eq!(errno(w.link(&root(), r, r, "x")), EPERM);
    assert_eq!(errno(w.set(&root(), r, |s| s.size = Some(1))), EISDIR);
    assert_eq!(errno(w.set(&root(), f, |s| s.size = Some(u64::MAX))), 27);
    assert_eq!(errno(w.view(|v| attr::readlink(v, f))), EINVAL);
    assert_eq!(errno(w.commit(f, u64::MAX, true)), 27);
}

#[test]
fn a_nameless_file_lives_until_its_last_close() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    w.leases.open(ME, f, false, true);
    w.commit(f, 100, false).unwrap();
    w.unlink(&root(), InodeId::ROOT, "f").unwrap();
    assert_eq!(w.attr(f).unwrap().nlink, 0);
    assert_eq!(w.view(|v| usage_of(v.read, InodeId::ROOT)).unwrap(), Usage::default());
    w.commit(f, 200, false).unwrap();
    assert_eq!(w.keys(b'H').len(), 1);
    assert_eq!(errno(w.link(&root(), f, InodeId::ROOT, "back")), ENOENT);
    let close = Close { session: ME, files: vec![Closed { ino: f, reads: 0, writes: 1 }] };
    w.change(|cx| open::close(cx, &close)).unwrap();
    assert_eq!((w.keys(b'H').len(), w.keys(b'G').len()), (0, 1));
    assert_eq!(errno(w.attr(f)), ESTALE);
    let garbage = w.keys(b'G');
    assert_eq!(tables::GARBAGE.parts(&garbage[0]).unwrap().1, f);
    let value = w.view(|v| v.read.get(&garbage[0])).unwrap().unwrap();
    assert_eq!(Garbage::from_value(&value, String::new).unwrap().pg_count, 24);
}

#[test]
fn an_open_that_truncates_sets_the_times_of_an_empty_file() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    let long_ago = Time { nanos: 5 };
    let before = w.set(&root(), f, |s| s.mtime = Some(long_ago)).unwrap().attr;
    assert_eq!((before.size, before.mtime), (0, long_ago));
    w.now += 1000;
    let truncation =
        Open { session: ME, cred: root(), ino: f, read: false, write: true, truncate: true, execute: false };
    w.change(|cx| open::open(cx, &truncation)).unwrap();
    let after = w.attr(f).unwrap();
    assert_eq!(after.mtime.nanos, w.now);
    assert!(after.ctime.nanos > before.ctime.nanos);
}

#[test]
fn a_reopened_nameless_file_outlives_its_first_opener() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    w.leases.open(OTHER, f, true, false);
    w.unlink(&root(), InodeId::ROOT, "f").unwrap();
    let again =
        Open { session: ME, cred: root(), ino: f, read: true, write: false, truncate: false, execute: false };
    w.change(|cx| open::open(cx, &again)).unwrap();
    w.leases.open(ME, f, true, false);
    w.change(|cx| release_orphan(cx, f, OTHER)).unwrap();
    assert_eq!(w.attr(f).unwrap().nlink, 0);
    let close = Close { session: ME, files: vec![Closed { ino: f, reads: 1, writes: 0 }] };
    w.change(|cx| open::close(cx, &close)).unwrap();
    assert_eq!(errno(w.attr(f)), ESTALE);
    assert_eq!(w.keys(b'H').len(), 0);
}

#[test]
fn a_nameless_file_gets_a_name_or_goes_with_its_last_close() {
    let mut w = World::new();
    let dir = w.mkdir(&root(), InodeId::ROOT, "d", 0o2777).unwrap().entry.attr;
    let before = w.attr(dir.ino).unwrap();
    let make =
        |open| CreateNameless { op: op(), cred: user(7), parent: dir.ino, mode: 0o666, umask: 0o022, open };
    assert_eq!(errno(w.change(|cx| create::create_nameless(cx, &make(1)))), EINVAL);
    let opened = |w: &mut World| {
        let attr = w.change(|cx| create::create_nameless(cx, &make(3))).unwrap().attr;
        w.leases.open(ME, attr.ino, true, true);
        w.leases.mark_orphan(attr.ino);
        attr
    };
    let (f, g) = (opened(&mut w), opened(&mut w));
    assert_eq!((f.nlink, f.mode, f.uid, f.gid), (0, 0o644, 7, dir.gid), "as one that is created with a name");
    assert_ne!(f.ino, g.ino);
    assert_eq!(w.attr(dir.ino).unwrap(), before, "its directory did not change");
    w.commit(f.ino, 100, false).unwrap();
    w.commit(g.ino, 50, false).unwrap();
    let usage = |w: &World| w.view(|v| usage_of(v.read, InodeId::ROOT)).unwrap();
    assert_eq!(usage(&w), Usage { bytes: 0, files: 0, directories: 1, evicted: 0 });
    // Two names, then none: now it has had one, and gets no other.
    assert_eq!(w.link(&user(7), f.ino, dir.ino, "f").unwrap().entry.attr.nlink, 1);
    assert_eq!(usage(&w), Usage { bytes: 100, files: 1, directories: 1, evicted: 0 });
    assert_eq!(w.link(&user(7), f.ino, InodeId::ROOT, "f").unwrap_err().kind.errno(), EACCES);
    assert_eq!(w.link(&user(7), f.ino, dir.ino, "again").unwrap().entry.attr.nlink, 2);
    assert_eq!((w.keys(b'H').len(), w.keys(b'N').len()), (1, 1), "the other one is still held");
    w.unlink(&user(7), dir.ino, "f").unwrap();
    assert_eq!(usage(&w), Usage { bytes: 100, files: 1, directories: 1, evicted: 0 });
    // Closed with a name it stays, and nothing is left to recover.
    let close = |ino| Close { session: ME, files: vec![Closed { ino, reads: 1, writes: 1 }] };
    w.change(|cx| open::close(cx, &close(f.ino))).unwrap();
    w.leases.close(ME, f.ino, 1, 1);
    assert!(!w.view(|v| load_file(v.read, f.ino)).unwrap().writing.dirty);
    assert_eq!(w.attr(f.ino).unwrap().nlink, 1);
    // Closed without one it is deleted.
    w.change(|cx| open::close(cx, &close(g.ino))).unwrap();
    assert_eq!(errno(w.attr(g.ino)), ESTALE);
    assert_eq!((w.keys(b'H').len(), w.keys(b'G').len(), w.keys(b'I').len()), (0, 1, 1));
    w.leases.open(ME, f.ino, true, true);
    w.unlink(&user(7), dir.ino, "again").unwrap();
    assert_eq!(errno(w.link(&user(7), f.ino, dir.ino, "back")), ENOENT);
    // A session cannot name a file that another one has open.
    let h = w.change(|cx| create::create_nameless(cx, &make(3))).unwrap().attr;
    assert_eq!(errno(w.link(&root(), h.ino, dir.ino, "h")), ENOENT);
    let nobody = CreateNameless { parent: InodeId::ROOT, ..make(3) };
    assert_eq!(errno(w.change(|cx| create::create_nameless(cx, &nobody))), EACCES);
}

#[test]
fn an_access_time_follows_only_forward() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr;
    let note = |w: &mut World, ino, nanos| {
        let accesses = vec![AccessTime { ino, at: Time { nanos } }];
        w.change(|cx| attr::note_access(cx, &NoteAccess { session: ME, accesses: accesses.clone() }))
            .unwrap();
        w.attr(ino).unwrap_or_else(|_| f.clone())
    };
    let now = w.now;
    let noted = note(&mut w, f.ino, now);
    assert_eq!((noted.atime.nanos, noted.ctime, noted.mtime), (now, f.ctime, f.mtime));
    assert_eq!(note(&mut w, f.ino, now - 5).atime.nanos, now, "an older word came late");
    let reported = note(&mut w, f.ino, i64::MAX).atime.nanos;
    assert_eq!(reported, w.now, "a clock that is ahead");
    assert_eq!(note(&mut w, InodeId::ROOT, now).atime.nanos, now);
    note(&mut w, InodeId(1 << 40), now); // it is deleted
    w.set(&root(), f.ino, |s| s.atime = Some(Time { nanos: 1 << 60 })).unwrap();
    assert_eq!(note(&mut w, f.ino, now).atime.nanos, now, "a time in the future was set");
}

#[test]
fn a_clean_empty_file_leaves_no_garbage() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    w.leases.open(ME, f, false, true);
    let close = Close { session: ME, files: vec![Closed { ino: f, reads: 0, writes: 1 }] };
    w.change(|cx| open::close(cx, &close)).unwrap();
    w.leases.close(ME, f, 0, 1);
    w.unlink(&root(), InodeId::ROOT, "f").unwrap();
    assert!(w.keys(b'G').is_empty() && w.keys(b'I').is_empty());
}

/// Writes in flight during a truncation are past a size that is void, even if their writer got the Write
/// lease since.
#[test]
fn a_write_before_a_truncation_does_not_grow_the_file_after_it() {
    for alone in [false, true] {
        let mut w = World::new();
        let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
        w.leases.open(ME, f, false, true);
        let before = w.token_epoch(f);
        w.commit_under(before, f, 968, false).unwrap();
        if alone {
            w.leases.grant_write(ME, f);
        }
        w.set(&root(), f, |s| s.size = Some(0)).unwrap();
        assert_eq!(errno(w.commit_under(before, f, 968, false)), ESTALE);
        assert_eq!(w.attr(f).unwrap().size, 0);
    }
}

/// Seed 93019: its cells stayed when it was removed; and bytes of them would have reappeared when it was
/// truncated and grew again.
#[test]
fn cells_below_an_inline_file_are_not_forgotten() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    w.leases.open(ME, f, false, true);
    w.leases.grant_write(ME, f);
    w.commit(f, 101, false).unwrap();
    let commit = Commit {
        op: op(),
        ino: f,
        token_epoch: w.token_epoch(f),
        size: 519,
        mtime: Time { nanos: 5 },
        allocated: 519,
        inline: Some(Bytes::from(vec![7; 519])),
        drop_inline: false,
        clean: true,
        close_writes: 0,
        data_end: 0,
        append_token: false,
        changed: Vec::new(),
    };
    let entry = w.change(|cx| data::commit(cx, &commit)).unwrap();
    assert_eq!(entry.lease.data_end, 101);
    let entry = w.set(&root(), f, |s| s.size = Some(0)).unwrap();
    assert_eq!(entry.lease.data_end, 101, "who lets it grow cleans first");
    w.leases.close(ME, f, 0, 1);
    w.unlink(&root(), InodeId::ROOT, "f").unwrap();
    assert_eq!(w.keys(b'G').len(), 1);
}

#[test]
fn inline_data_follows_the_size() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    let mut commit = Commit {
        op: op(),
        ino: f,
        token_epoch: 1,
        size: 5,
        mtime: Time { nanos: 5 },
        allocated: 5,
        inline: Some(b("hello")),
        drop_inline: false,
        clean: true,
        close_writes: 0,
        data_end: 0,
        append_token: false,
        changed: Vec::new(),
    };
    w.change(|cx| data::commit(cx, &commit)).unwrap();
    let read = |w: &World| w.view(|v| open::read_inline(v, f)).unwrap();
    assert_eq!(read(&w).data, Some(b("hello")));
    w.set(&root(), f, |s| s.size = Some(2)).unwrap();
    w.set(&root(), f, |s| s.size = Some(9)).unwrap();
    assert_eq!(read(&w).data, Some(b("he")), "the rest is zeros");
    assert_eq!(read(&w).entry.attr.size, 9);
    assert_eq!(read(&w).entry.lease.data_end, 0);
    commit.token_epoch = w.token_epoch(f);
    commit.inline = Some(Bytes::from(vec![0; 4097]));
    commit.size = 4097;
    assert_eq!(errno(w.change(|cx| data::commit(cx, &commit))), EINVAL);
    commit.inline = None;
    commit.drop_inline = true;
    commit.data_end = 1 << 20;
    w.change(|cx| data::commit(cx, &commit)).unwrap();
    assert_eq!(read(&w).data, None);
    assert_eq!(read(&w).entry.lease.data_end, 1 << 20);
    w.set(&root(), f, |s| s.size = Some(0)).unwrap();
    assert_eq!(read(&w).entry.lease.data_end, 1 << 20);
    commit.token_epoch = 2;
    assert_eq!(errno(w.change(|cx| data::commit(cx, &commit))), ESTALE);
}

#[test]
fn extended_attributes_come_and_go() {
    let mut w = World::new();
    let f = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    let set = |name: &str, value: usize, create, replace| SetXattr {
        op: op(),
        cred: root(),
        ino: f,
        name: b(name),
        value: Bytes::from(vec![1; value]),
        create,
        replace,
    };
    let mut put = |r: SetXattr| w.change(|cx| xattr::setxattr(cx, &r)).map_err(|e| e.kind.errno());
    assert_eq!(put(set("user.a", 3, false, true)).unwrap_err(), 61);
    put(set("user.a", 3, true, false)).unwrap();
    assert_eq!(put(set("user.a", 3, true, false)).unwrap_err(), EEXIST);
    assert_eq!(put(set("user.big", 65537, false, false)).unwrap_err(), 34);
    assert_eq!(put(set("system.other", 3, false, false)).unwrap_err(), 95);
    assert_eq!(put(set("user.", 3, false, false)).unwrap_err(), 22, "a name follows the prefix");
    assert_eq!(put(set("system.posix_acl_access", 3, false, false)).unwrap_err(), 22);
    put(set("user.b", 65536, false, false)).unwrap();
    assert_eq!(w.view(|v| xattr::listxattr(v, &root(), f)).unwrap().names, [b("user.a"), b("user.b")]);
    assert_eq!(w.view(|v| xattr::getxattr(v, &root(), f, b"user.a")).unwrap().value.len(), 3);
    let r = RemoveXattr { op: op(), cred: root(), ino: f, name: b("user.a") };
    w.change(|cx| xattr::removexattr(cx, &r)).unwrap();
    assert_eq!(errno(w.change(|cx| xattr::removexattr(cx, &r))), 61);
    w.unlink(&root(), InodeId::ROOT, "f").unwrap();
    assert!(w.keys(b'X').is_empty());
}

#[test]
fn a_listing_is_stable_while_names_come_and_go() {
    let mut w = World::new();
    let r = InodeId::ROOT;
    for i in 0..10 {
        w.create(&root(), r, &format!("f{i}"), 0o644).unwrap();
    }
    let first = w.list(r, 0, 4);
    assert!(!first.end && first.entries.len() == 4);
    for gone in ["f1", "f3", "f5"] {
        w.unlink(&root(), r, gone).unwrap();
    }
    w.create(&root(), r, "new", 0o644).unwrap();
    let rest = w.list(r, first.entries[3].cookie, 100);
    let names: Vec<_> = rest.entries.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()).collect();
    assert_eq!(names, ["f4", "f6", "f7", "f8", "f9", "new"]);
    assert!(rest.end);
    // Entries created since are after the end that a reader saw; an entry that replaced a name is at the old
    // place.
    assert_eq!(rest.entries.last().unwrap().cookie, first.newest + 1);
    w.rename(&root(), (r, "new"), (r, "f7"), RenameMode::Replace).unwrap();
    w.rename(&root(), (r, "f6"), (r, "f8"), RenameMode::Exchange).unwrap();
    w.rename(&root(), (r, "f4"), (r, "f4.x"), RenameMode::Replace).unwrap();
    let rest = w.list(r, first.entries[3].cookie, 100);
    let names: Vec<_> = rest.entries.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()).collect();
    assert_eq!(names, ["f6", "f7", "f8", "f9", "f4.x"]);
    assert_eq!(rest.entries.iter().filter(|e| e.cookie <= first.newest).count(), 4);
    assert!(w.list(r, u64::MAX, 10).entries.is_empty());
}

// ---- any history

#[derive(Clone, Debug)]
enum Act {
    Create(usize, usize),
    Mkdir(usize, usize),
    Symlink(usize, usize),
    Unlink(usize, usize),
    Rmdir(usize, usize),
    Link(usize, usize, usize),
    Rename(usize, usize, usize, usize, u8),
    Grow(usize, u32),
    Truncate(usize, u32),
}

fn act() -> impl Strategy<Value = Act> {
    let (d, n) = (|| 0usize..6, || 0usize..5);
    prop_oneof![
        3 => (d(), n()).prop_map(|(d, n)| Act::Create(d, n)),
        3 => (d(), n()).prop_map(|(d, n)| Act::Mkdir(d, n)),
        1 => (d(), n()).prop_map(|(d, n)| Act::Symlink(d, n)),
        2 => (d(), n()).prop_map(|(d, n)| Act::Unlink(d, n)),
        1 => (d(), n()).prop_map(|(d, n)| Act::Rmdir(d, n)),
        2 => (n(), d(), n()).prop_map(|(f, d, n)| Act::Link(f, d, n)),
        4 => (d(), n(), d(), n(), 0u8..3).prop_map(|(a, b, c, d, m)| Act::Rename(a, b, c, d, m)),
        2 => (n(), any::<u32>()).prop_map(|(f, s)| Act::Grow(f, s)),
        1 => (n(), any::<u32>()).prop_map(|(f, s)| Act::Truncate(f, s)),
    ]
}

#[derive(Clone, Debug)]
enum Node {
    Dir { names: BTreeMap<String, u64>, parent: u64 },
    File { size: u64 },
    Symlink,
}

/// The expected namespace: nodes by inode number.
#[derive(Default)]
struct Model {
    nodes: BTreeMap<u64, Node>,
}

const ROOT: u64 = InodeId::ROOT.0;

impl Model {
    fn names(&self, dir: u64) -> &BTreeMap<String, u64> {
        match &self.nodes[&dir] {
            Node::Dir { names, .. } => names,
            _ => panic!("not a directory"),
        }
    }
    fn names_mut(&mut self, dir: u64) -> &mut BTreeMap<String, u64> {
        match self.nodes.get_mut(&dir) {
            Some(Node::Dir { names, .. }) => names,
            _ => panic!("not a directory"),
        }
    }
    fn get(&self, dir: u64, name: &str) -> Option<u64> {
        self.names(dir).get(name).copied()
    }
    fn is_dir(&self, ino: u64) -> bool {
        matches!(self.nodes[&ino], Node::Dir { .. })
    }
    fn within(&self, mut dir: u64, above: u64) -> bool {
        loop {
            if dir == above {
                return true;
            }
            match &self.nodes[&dir] {
                Node::Dir { parent, .. } if dir != ROOT => dir = *parent,
                _ => return false,
            }
        }
    }
    fn dirs(&self) -> Vec<u64> {
        self.nodes.keys().copied().filter(|i| self.is_dir(*i)).collect()
    }
    fn files(&self) -> Vec<u64> {
        self.nodes.iter().filter(|(_, n)| matches!(n, Node::File { .. })).map(|(i, _)| *i).collect()
    }
    fn drop_name(&mut self, dir: u64, name: &str) -> u64 {
        self.names_mut(dir).remove(name).unwrap()
    }
    /// One link fewer; the first entry of `dirs` is the one that is charged.
    fn drop_link(&mut self, ino: u64, links: u32) {
        if links == 0 {
            self.nodes.remove(&ino);
        }
    }
    fn links(&self, ino: u64) -> u32 {
        let count = |n: &Node| match n {
            Node::Dir { names, .. } => names.values().filter(|i| **i == ino).count() as u32,
            _ => 0,
        };
        self.nodes.values().map(count).sum()
    }
}

/// Carries one act out in both and compares the verdicts.
fn act_on(w: &mut World, m: &mut Model, act: &Act) -> std::result::Result<(), TestCaseError> {
    let dirs = m.dirs();
    let dir = |i: usize| dirs[i % dirs.len()];
    let name = |i: usize| format!("n{i}");
    let verdict = |r: Result<()>| r.map_err(|e| e.kind.errno());
    match *act {
        Act::Create(d, n) | Act::Mkdir(d, n) | Act::Symlink(d, n) => {
            let (d, n) = (dir(d), name(n));
            let made = match act {
                Act::Create(..) => w.create(&root(), InodeId(d), &n, 0o644).map(|c| (c.entry.attr.ino.0, 0)),
                Act::Mkdir(..) => w.mkdir(&root(), InodeId(d), &n, 0o755).map(|c| (c.entry.attr.ino.0, 1)),
                _ => {
                    let r =
                        Symlink { op: op(), cred: root(), parent: InodeId(d), name: b(&n), target: b("t") };
                    w.change(|cx| create::symlink(cx, &r)).map(|c| (c.entry.attr.ino.0, 2))
                }
            };
            match made {
                Ok((ino, kind)) => {
                    prop_assert!(m.get(d, &n).is_none() && !m.nodes.contains_key(&ino));
                    let node = match kind {
                        0 => Node::File { size: 0 },
                        1 => Node::Dir { names: BTreeMap::new(), parent: d },
                        _ => Node::Symlink,
                    };
                    m.nodes.insert(ino, node);
                    m.names_mut(d).insert(n, ino);
                }
                Err(e) => prop_assert_eq!((e.kind.errno(), m.get(d, &n).is_some()), (EEXIST, true)),
            }
        }
        Act::Unlink(d, n) => {
            let (d, n) = (dir(d), name(n));
            let expected = match m.get(d, &n) {
                None => Err(ENOENT),
                Some(i) if m.is_dir(i) => Err(EISDIR),
                Some(_) => Ok(()),
            };
            prop_assert_eq!(verdict(w.unlink(&root(), InodeId(d), &n).map(drop)), expected);
            if expected.is_ok() {
                let ino = m.drop_name(d, &n);
                m.drop_link(ino, m.links(ino));
            }
        }
        Act::Rmdir(d, n) => {
            let (d, n) = (dir(d), name(n));
            let expected = match m.get(d, &n) {
                None => Err(ENOENT),
                Some(i) if !m.is_dir(i) => Err(ENOTDIR),
                Some(i) if !m.names(i).is_empty() => Err(ENOTEMPTY),
                Some(_) => Ok(()),
            };
            prop_assert_eq!(verdict(w.rmdir(&root(), InodeId(d), &n).map(drop)), expected);
            if expected.is_ok() {
                let ino = m.drop_name(d, &n);
                m.nodes.remove(&ino);
            }
        }
        Act::Link(f, d, n) => {
            let files = m.files();
            if files.is_empty() {
                return Ok(());
            }
            let (f, d, n) = (files[f % files.len()], dir(d), name(n));
            let expected = if m.get(d, &n).is_some() { Err(EEXIST) } else { Ok(()) };
            prop_assert_eq!(verdict(w.link(&root(), InodeId(f), InodeId(d), &n).map(drop)), expected);
            if expected.is_ok() {
                m.names_mut(d).insert(n, f);
            }
        }
        Act::Rename(fd, fname, td, tname, mode) => {
            rename_in_both(w, m, (dir(fd), name(fname)), (dir(td), name(tname)), mode)?
        }
        Act::Grow(f, by) => {
            let files = m.files();
            if let Some(f) = files.get(f % files.len().max(1)).copied() {
                let Some(Node::File { size }) = m.nodes.get_mut(&f) else { unreachable!() };
                *size += u64::from(by);
                w.commit(InodeId(f), *size, true).unwrap();
            }
        }
        Act::Truncate(f, to) => {
            let files = m.files();
            if let Some(f) = files.get(f % files.len().max(1)).copied() {
                let Some(Node::File { size }) = m.nodes.get_mut(&f) else { unreachable!() };
                *size = (*size).min(u64::from(to));
                let size = *size;
                w.set(&root(), InodeId(f), |s| s.size = Some(size)).unwrap();
            }
        }
    }
    Ok(())
}

fn rename_in_both(
    w: &mut World,
    m: &mut Model,
    from: (u64, String),
    to: (u64, String),
    mode: u8,
) -> std::result::Result<(), TestCaseError> {
    let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][usize::from(mode)];
    let (source, target) = (m.get(from.0, &from.1), m.get(to.0, &to.1));
    let replaced = target.filter(|t| Some(*t) != source);
    let expected = match (source, target) {
        (None, _) => Err(ENOENT),
        (Some(_), Some(_)) if mode == RenameMode::NoReplace => Err(EEXIST),
        (Some(_), None) if mode == RenameMode::Exchange => Err(ENOENT),
        (Some(s), _) if replaced.is_none() && target.is_some() => Ok(s),
        (Some(s), _) if m.is_dir(s) && from.0 != to.0 && m.within(to.0, s) => Err(EINVAL),
        (Some(s), Some(t)) if mode == RenameMode::Exchange => {
            if m.is_dir(t) && from.0 != to.0 && m.within(from.0, t) { Err(EINVAL) } else { Ok(s) }
        }
        (Some(s), Some(t)) => match (m.is_dir(s), m.is_dir(t)) {
            (true, false) => Err(ENOTDIR),
            (false, true) => Err(EISDIR),
            (true, true) if !m.names(t).is_empty() => Err(ENOTEMPTY),
            _ => Ok(s),
        },
        (Some(s), None) => Ok(s),
    };
    let got = w.rename(&root(), (InodeId(from.0), &from.1), (InodeId(to.0), &to.1), mode);
    prop_assert_eq!(got.map(|r| r.moved.0).map_err(|e| e.kind.errno()), expected);
    let Ok(moved) = expected else { return Ok(()) };
    if target == Some(moved) {
        return Ok(());
    }
    m.drop_name(from.0, &from.1);
    m.names_mut(to.0).insert(to.1, moved);
    let mut settle = |ino: u64, at: u64| {
        if let Some(Node::Dir { parent, .. }) = m.nodes.get_mut(&ino) {
            *parent = at;
        }
    };
    settle(moved, to.0);
    if let Some(t) = replaced {
        if mode == RenameMode::Exchange {
            settle(t, from.0);
            m.names_mut(from.0).insert(from.1, t);
        } else if m.is_dir(t) {
            m.nodes.remove(&t);
        } else {
            m.drop_link(t, m.links(t));
        }
    }
    Ok(())
}

/// The whole tree, its counts and its usage are as in the model; nothing else is in the store.
fn compare(w: &World, m: &Model) -> std::result::Result<(), TestCaseError> {
    let mut charged: BTreeMap<u64, Usage> = BTreeMap::new();
    for dir in m.dirs() {
        let listed: BTreeMap<String, u64> = w
            .all(InodeId(dir))
            .into_iter()
            .map(|e| (String::from_utf8(e.name.to_vec()).unwrap(), e.ino.0))
            .collect();
        prop_assert_eq!(&listed, m.names(dir));
        let subdirectories = m.names(dir).values().filter(|i| m.is_dir(**i)).count() as u32;
        let attr = w.attr(InodeId(dir)).unwrap();
        prop_assert_eq!((attr.nlink, attr.size), (2 + subdirectories, listed.len() as u64));
        for name in m.names(dir).keys() {
            let r = Lookup { session: ME, cred: root(), parent: InodeId(dir), name: b(name) };
            let found = w.view(|v| attr::lookup(v, &r)).unwrap().entry.unwrap().attr;
            prop_assert_eq!(found.ino.0, m.names(dir)[name]);
        }
    }
    for (ino, node) in &m.nodes {
        let (up, cookie) = match node {
            Node::Dir { parent, .. } => {
                (*parent, w.view(|v| load_access(v.read, InodeId(*ino))).unwrap().cookie)
            }
            _ => {
                let inode = w.view(|v| load_file(v.read, InodeId(*ino))).unwrap();
                prop_assert_eq!(inode.nlink, m.links(*ino));
                prop_assert!(
                    m.names(inode.parent.0).values().any(|i| i == ino),
                    "charged to a directory without a link"
                );
                (inode.parent.0, inode.cookie)
            }
        };
        if *ino == ROOT {
            continue;
        }
        // Its path leads to it, and its first name is found without a search.
        let (dir, name) = w.view(|v| path::place_of(v.read, InodeId(*ino))).unwrap().expect("it has a name");
        prop_assert_eq!((dir.0, m.get(dir.0, std::str::from_utf8(&name).unwrap())), (up, Some(*ino)));
        let at_its_place = w.view(|v| path::name_at(v.read, (dir, cookie), InodeId(*ino), 0)).unwrap();
        prop_assert_eq!(at_its_place, Some(name));
        let path = w.view(|v| path::Paths::new(v.read, InodeId::ROOT).of(InodeId(*ino))).unwrap().unwrap();
        let path = std::str::from_utf8(&path).unwrap();
        prop_assert_eq!(path.split('/').try_fold(ROOT, |at, name| m.get(at, name)), Some(*ino));
        let mut at = up;
        loop {
            let usage = charged.entry(at).or_default();
            match node {
                Node::Dir { .. } => usage.directories += 1,
                Node::File { size } => (usage.files, usage.bytes) = (usage.files + 1, usage.bytes + size),
                Node::Symlink => usage.files += 1,
            }
            match &m.nodes[&at] {
                Node::Dir { parent, .. } if at != ROOT => at = *parent,
                _ => break,
            }
        }
    }
    for dir in m.dirs() {
        let expected = charged.get(&dir).cloned().unwrap_or_default();
        prop_assert_eq!(w.view(|v| usage_of(v.read, InodeId(dir))).unwrap(), expected, "usage of {}", dir);
    }
    let inodes: BTreeSet<Vec<u8>> = w.keys(b'I').into_iter().chain(w.keys(b'A')).collect();
    prop_assert_eq!(inodes.len(), m.nodes.len(), "inodes that nobody knows");
    let extra: u32 = m.files().iter().map(|f| m.links(*f) - 1).sum();
    prop_assert_eq!(w.keys(b'N').len(), extra as usize);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn any_history_gives_the_tree_of_the_model(acts in prop::collection::vec(act(), 1..120)) {
        let (mut w, mut m) = (World::new(), Model::default());
        m.nodes.insert(ROOT, Node::Dir { names: BTreeMap::new(), parent: ROOT });
        for act in &acts {
            act_on(&mut w, &mut m, act)?;
        }
        compare(&w, &m)?;
    }
}

/// A list of (tag, permissions, id) as an attribute's value.
fn list(items: &[(u16, u16, u32)]) -> Bytes {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in items {
        value.extend(tag.to_le_bytes());
        value.extend(perm.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value.into()
}

#[test]
fn a_default_list_is_inherited_and_decides() {
    let mut w = World::new();
    let dir = w.mkdir(&root(), InodeId::ROOT, "d", 0o755).unwrap().entry.attr.ino;
    let set = |ino, name: &[u8], value: Bytes| SetXattr {
        op: op(),
        cred: root(),
        ino,
        name: Bytes::copy_from_slice(name),
        value,
        create: false,
        replace: false,
    };
    let named = list(&[(1, 7, !0), (2, 7, 77), (4, 5, !0), (16, 7, !0), (32, 0, !0)]);
    let r = set(dir, acl::DEFAULT, named.clone());
    assert!(w.change(|cx| xattr::setxattr(cx, &r)).unwrap().attr.acl);
    let file = w.create(&root(), dir, "f", 0o666).unwrap().entry.attr;
    assert_eq!((file.mode, file.acl), (0o660, true), "no class gets more than was asked for");
    let kept = w.view(|v| xattr::getxattr(v, &root(), file.ino, acl::ACCESS)).unwrap().value;
    assert_eq!(kept, list(&[(1, 6, !0), (2, 7, 77), (4, 5, !0), (16, 6, !0), (32, 0, !0)]));
    let below = w.mkdir(&root(), dir, "e", 0o777).unwrap().entry.attr;
    assert_eq!(w.view(|v| xattr::getxattr(v, &root(), below.ino, acl::DEFAULT)).unwrap().value, named);
    let cred = |uid| Cred { uid, gid: 500, groups: vec![500] };
    let open = |uid| meta::Open {
        session: ME,
        cred: cred(uid),
        ino: file.ino,
        read: true,
        write: true,
        truncate: false,
        execute: false,
    };
    assert!(w.change(|cx| open::open(cx, &open(77))).is_ok());
    assert_eq!(errno(w.change(|cx| open::open(cx, &open(78)))), 13);
    w.set(&root(), file.ino, |s| s.mode = Some(0o640)).unwrap();
    assert_eq!(errno(w.change(|cx| open::open(cx, &open(77)))), 13, "chmod changed the mask");
    // A list that is equivalent to a mode becomes the mode.
    let r = set(file.ino, acl::ACCESS, list(&[(1, 7, !0), (4, 5, !0), (32, 4, !0)]));
    let attr = w.change(|cx| xattr::setxattr(cx, &r)).unwrap().attr;
    assert_eq!((attr.mode, attr.acl), (0o754, false));
}
