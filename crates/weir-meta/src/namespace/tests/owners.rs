//! Usage of users and groups: each operation charges the right one. That the counters are those of a full
//! count, and those of a volume together its usage, is checked after each change of every test here.
use super::*;
use crate::near_limits::near;
use crate::owners::{self, Used};
use weir_proto::quota::{
    ALL_VOLUMES, Account, DEFAULT_ID, Holder, ListOf, OwnerKind, OwnerLimit, OwnerUsage, OwnerUsageList,
    OwnerUsagePage, ReserveSpace, ReservedSpace,
};
use weir_proto::volume::{Quota, Volume};

impl World {
    /// Bytes and inodes of a user, or of a group.
    pub fn has(&self, volume: VolumeId, kind: OwnerKind, id: u32) -> (i64, i64) {
        let used = self.view(|view| owners::used(view.read, Holder { volume, kind, id })).unwrap();
        (used.bytes, used.inodes)
    }
}

const EDQUOT: i32 = 122;
const USER: OwnerKind = OwnerKind::User;
const GROUP: OwnerKind = OwnerKind::Group;

#[test]
fn each_operation_charges_the_owner() {
    let mut w = World::new();
    let outer = w.volume(&root(), InodeId::ROOT, "outer").unwrap();
    w.set(&root(), outer.root, |r| r.mode = Some(0o777)).unwrap();
    let of = |w: &World, id| (w.has(outer.id, USER, id), w.has(outer.id, GROUP, id));
    // The topmost directory belongs to the volume around.
    assert_eq!(w.has(VolumeId::ROOT, USER, 7), (0, 1));
    let file = w.create(&user(5), outer.root, "f", 0o644).unwrap().entry.attr.ino;
    w.mkdir(&user(5), outer.root, "d", 0o755).unwrap();
    assert_eq!(of(&w, 5), ((0, 2), (0, 2)));
    w.commit(file, 1000, true).unwrap();
    assert_eq!(of(&w, 5), ((1000, 2), (1000, 2)));
    w.set(&user(5), file, |r| r.size = Some(400)).unwrap();
    assert_eq!(of(&w, 5), ((400, 2), (400, 2)));
    w.set(&root(), file, |r| r.uid = Some(6)).unwrap();
    assert_eq!((of(&w, 5), of(&w, 6)), (((0, 1), (400, 2)), ((400, 1), (0, 0))));
    let in_both = Cred { uid: 6, gid: 6, groups: vec![6, 9] };
    w.set(&in_both, file, |r| r.gid = Some(9)).unwrap();
    assert_eq!((of(&w, 5), of(&w, 9)), (((0, 1), (0, 1)), ((0, 0), (400, 1))));
    assert_eq!((w.has(ALL_VOLUMES, USER, 6), w.has(ALL_VOLUMES, GROUP, 9)), ((400, 1), (400, 1)));
    // A second name is not charged, and the last one returns the charge.
    w.link(&user(6), file, outer.root, "g").unwrap();
    w.unlink(&user(6), outer.root, "f").unwrap();
    assert_eq!(of(&w, 6), ((400, 1), (0, 0)));
    w.unlink(&user(6), outer.root, "g").unwrap();
    w.rmdir(&user(5), outer.root, "d").unwrap();
    assert_eq!((of(&w, 5), of(&w, 6), of(&w, 9)), Default::default());
    assert_eq!(w.has(ALL_VOLUMES, USER, 6), (0, 0));
}

#[test]
fn a_topmost_directory_counts_in_the_volume_around() {
    let mut w = World::new();
    let outer = w.volume(&root(), InodeId::ROOT, "outer").unwrap();
    let inner = w.volume(&root(), outer.root, "inner").unwrap();
    assert_eq!((w.has(VolumeId::ROOT, USER, 7), w.has(outer.id, USER, 7)), ((0, 1), (0, 1)));
    w.create(&user(7), inner.root, "f", 0o644).unwrap();
    w.delete_volume(&root(), inner.id, true).unwrap();
    assert_eq!(w.has(outer.id, USER, 7), (0, 0), "what is being removed counts in the root volume");
    while !w.change(|cx| volume::remove::remove_some(cx, inner.id)).unwrap() {}
    assert_eq!(w.has(ALL_VOLUMES, USER, 7), (0, 1));
    assert!(!w.keys(b'Q').iter().any(|key| key[1..5] == inner.id.0.to_be_bytes()));
}

#[test]
fn a_store_without_counters_is_counted_at_start() {
    let mut w = World::new();
    let volume = w.volume(&root(), InodeId::ROOT, "v").unwrap();
    w.set(&root(), volume.root, |r| r.mode = Some(0o777)).unwrap();
    for (n, dir) in [InodeId::ROOT, volume.root].into_iter().enumerate() {
        let file = w.create(&root(), dir, "f", 0o644).unwrap().entry.attr.ino;
        w.commit(file, 100 + n as u64, true).unwrap();
        w.set(&root(), file, |r| (r.uid, r.gid) = (Some(5), Some(6))).unwrap();
    }
    assert_eq!(owners::repair(&w.kv, volume_usage).unwrap(), None, "nothing to do");
    let counters = |w: &World| w.keys(b'Q').into_iter().filter(|key| keys::holder_of(key).is_some());
    let (all, before) = (counters(&w).collect::<Vec<_>>(), w.has(ALL_VOLUMES, USER, 5));
    assert_eq!(before, (201, 2));
    // As before the counters existed; and as after a recount that was interrupted.
    for removed in [all.len(), all.len() / 2] {
        w.kv.transact(&mut |txn| {
            all[..removed].iter().for_each(|key| txn.delete(key));
            Ok(())
        })
        .unwrap();
        assert!(owners::repair(&w.kv, volume_usage).unwrap().is_some());
        w.check_owners();
        assert_eq!((w.has(ALL_VOLUMES, USER, 5), w.has(volume.id, GROUP, 6)), (before, (101, 1)));
    }
    // Counters of a user without a file are removed.
    let nobody = Holder { volume: volume.id, kind: USER, id: 99 };
    w.kv.transact(&mut |txn| {
        txn.add(&keys::owner_usage(nobody, keys::Counter::Bytes), 5);
        Ok(())
    })
    .unwrap();
    assert!(owners::repair(&w.kv, volume_usage).unwrap().is_some());
    assert_eq!(w.view(|view| owners::used(view.read, nobody)).unwrap(), Used::default());
}

const MIB: u64 = 1 << 20;

impl World {
    fn limit(&mut self, cred: &Cred, holder: Holder, quota: Option<Quota>) -> Result<OwnerUsage> {
        let r = OwnerLimit { op: op(), cred: cred.clone(), holder, quota };
        self.change(|cx| volume::limits::set_owner_limit(cx, &r))
    }
    fn reserve(&self, account: Account, must: u64) -> ReservedSpace {
        let r = ReserveSpace { session: ME, account, spent: 0, must, want: must };
        self.view(|view| volume::limits::reserve_space(view, &r)).unwrap()
    }
    fn usage(&self, cred: &Cred, list: ListOf, after: Option<Holder>, limit: u32) -> Result<OwnerUsagePage> {
        let r = OwnerUsageList { session: ME, cred: cred.clone(), list, after, limit };
        self.view(|view| volume::limits::owner_usage(view, &r))
    }
}
fn bytes(hard: u64) -> Option<Quota> {
    Some(Quota { bytes_hard: Some(hard), ..Quota::NONE })
}
fn inodes(hard: u64) -> Option<Quota> {
    Some(Quota { inodes_hard: Some(hard), ..Quota::NONE })
}
/// A volume that all may write to.
fn with_volume() -> (World, Volume) {
    let mut w = World::new();
    let volume = w.volume(&root(), InodeId::ROOT, "work").unwrap();
    w.set(&root(), volume.root, |r| r.mode = Some(0o777)).unwrap();
    (w, volume)
}

#[test]
fn files_are_refused_at_the_limit_of_user_or_group() {
    let (mut w, v) = with_volume();
    let of = |kind, id| Holder { volume: v.id, kind, id };
    w.limit(&root(), of(USER, DEFAULT_ID), inodes(2)).unwrap();
    w.limit(&root(), of(USER, 6), inodes(3)).unwrap();
    for (uid, count) in [(5, 2), (6, 3)] {
        for n in 0..count {
            w.mkdir(&user(uid), v.root, &format!("{uid}-{n}"), 0o755).unwrap();
        }
        let refused = w.create(&user(uid), v.root, "more", 0o644).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::OverQuota);
        let whose = format!("user {uid} in volume \"work\" has {count} files");
        assert!(refused.context.contains(&whose), "{refused}");
    }
    // Not outside of the volume, and not the superuser.
    w.set(&root(), InodeId::ROOT, |r| r.mode = Some(0o777)).unwrap();
    w.create(&user(5), InodeId::ROOT, "outside", 0o644).unwrap();
    for n in 0..5 {
        w.create(&root(), v.root, &format!("root's {n}"), 0o644).unwrap();
    }
    // The limit for all volumes counts both.
    w.limit(&root(), Holder { volume: ALL_VOLUMES, kind: GROUP, id: 5 }, inodes(3)).unwrap();
    let refused = w.create(&user(5), InodeId::ROOT, "another", 0o644).unwrap_err().context;
    assert!(refused.contains("group 5 in all volumes has 3 files"), "{refused}");
    // Without a limit of its own a user has that for all; without that, none.
    w.limit(&root(), of(USER, 6), None).unwrap();
    assert_eq!(errno(w.create(&user(6), v.root, "more", 0o644)), EDQUOT);
    w.limit(&root(), of(USER, 6), Some(Quota::NONE)).unwrap();
    w.create(&user(6), v.root, "more", 0o644).unwrap();
    for id in [DEFAULT_ID, 6] {
        w.limit(&root(), of(USER, id), None).unwrap();
    }
    assert_eq!(w.keys(b'J').len(), 1, "only the group's");
}

#[test]
fn a_reservation_is_within_the_tightest_limit() {
    let (mut w, v) = with_volume();
    let account = Account { volume: v.id, uid: 5, gid: 9 };
    assert!(w.reserve(account, MIB).unlimited);
    w.limit(&root(), Holder { volume: ALL_VOLUMES, kind: USER, id: 5 }, bytes(3 * MIB)).unwrap();
    w.limit(&root(), Holder { volume: v.id, kind: GROUP, id: 9 }, bytes(2 * MIB)).unwrap();
    let file = w.create(&user(5), v.root, "f", 0o644).unwrap().entry;
    assert_eq!(file.lease.limited, v.id, "the client has to ask");
    w.commit(file.attr.ino, 1500 * 1024, true).unwrap();
    // It is of group 5: 1.5 MiB are left for the user, 2 MiB for group 9.
    let got = w.reserve(account, 3 * MIB);
    assert_eq!((got.held, got.unlimited), (3 * MIB - 1500 * 1024, false));
    assert!(got.limit.contains("user 5 in all volumes"), "{}", got.limit);
    // Another session holds a part of the group's.
    w.quotas.set(Account { uid: 6, ..account }, OTHER, MIB);
    let got = w.reserve(account, 2 * MIB);
    assert_eq!((got.held, got.others), (MIB, MIB));
    assert!(got.limit.contains("group 9 in volume \"work\""), "{}", got.limit);
    // A client that does not name owners is held to the volume's limit only.
    let r = weir_proto::volume::ReserveQuota { session: ME, volume: v.id, spent: 0, must: 9, want: 9 };
    assert!(w.view(|view| volume::limits::reserve_quota(view, &r)).unwrap().unlimited);
    // Limits are kept over a restart.
    let mut loaded = w.view(|view| volume::load_quotas(view.read)).unwrap();
    loaded.set(Account { uid: 6, ..account }, OTHER, MIB);
    w.quotas = loaded;
    assert_eq!(w.reserve(account, 2 * MIB).held, MIB);
}

#[test]
fn a_change_of_group_is_within_its_limit() {
    let (mut w, v) = with_volume();
    w.limit(&root(), Holder { volume: v.id, kind: GROUP, id: 9 }, bytes(1000)).unwrap();
    let both = Cred { uid: 5, gid: 5, groups: vec![5, 9] };
    let mut files = Vec::new();
    for (name, size) in [("a", 600), ("b", 500)] {
        let file = w.create(&both, v.root, name, 0o644).unwrap().entry.attr.ino;
        w.commit(file, size, true).unwrap();
        files.push(file);
    }
    w.set(&both, files[0], |r| r.gid = Some(9)).unwrap();
    let refused = w.set(&both, files[1], |r| r.gid = Some(9)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::OverQuota);
    assert!(refused.context.contains("group 9 in volume \"work\" has 600 bytes"), "{refused}");
    // The superuser may.
    w.set(&root(), files[1], |r| r.gid = Some(9)).unwrap();
    assert_eq!(w.has(v.id, GROUP, 9), (1100, 2));
}

#[test]
fn limits_are_set_by_those_who_administer_the_volume() {
    let (mut w, v) = with_volume();
    let (here, everywhere) =
        (Holder { volume: v.id, kind: USER, id: 5 }, Holder { volume: ALL_VOLUMES, kind: USER, id: 5 });
    for (uid, may) in [(0, true), (7, true), (8, true), (5, false)] {
        assert_eq!(w.limit(&user(uid), here, bytes(1)).is_ok(), may, "user {uid}");
        let list = ListOf::Volume { volume: v.id };
        assert_eq!(w.usage(&user(uid), list, None, 10).is_ok(), may, "user {uid}");
        assert_eq!(w.limit(&user(uid), everywhere, bytes(1)).is_ok(), uid == 0, "user {uid}");
        let own = ListOf::Owner { kind: USER, id: 5 };
        assert_eq!(w.usage(&user(uid), own, None, 10).is_ok(), [0, 5].contains(&uid), "user {uid}");
    }
    let crossed = Quota { bytes_soft: Some(9), bytes_hard: Some(5), ..Quota::NONE };
    assert_eq!(w.limit(&root(), here, Some(crossed)).unwrap_err().kind, ErrorKind::Invalid);
    let gone = Holder { volume: VolumeId(77), ..here };
    assert_eq!(w.limit(&root(), gone, bytes(1)).unwrap_err().kind, ErrorKind::NotFound);
    // They go with the volume.
    w.delete_volume(&root(), v.id, true).unwrap();
    while w.view(|view| volume::find(view.read, v.id)).unwrap().is_some() {
        w.change(|cx| volume::remove::remove_some(cx, v.id)).unwrap();
    }
    assert_eq!((w.keys(b'J').len(), w.quotas.owners.len()), (1, 1), "that for all volumes stays");
}

#[test]
fn rows_come_page_by_page() {
    let (mut w, v) = with_volume();
    for uid in [5, 6, 7] {
        let file = w.create(&user(uid), v.root, &format!("f{uid}"), 0o644).unwrap().entry.attr.ino;
        w.commit(file, u64::from(uid), true).unwrap();
    }
    for id in [4, 6, DEFAULT_ID] {
        w.limit(&root(), Holder { volume: v.id, kind: USER, id }, bytes(100)).unwrap();
    }
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = w.usage(&root(), ListOf::Volume { volume: v.id }, after, 2).unwrap();
        assert!(page.rows.len() == 2 || page.end);
        after = page.rows.last().map(|row| row.holder);
        seen.extend(
            page.rows.iter().map(|r| (r.holder.kind, r.holder.id, r.bytes, r.own, r.quota.is_some())),
        );
        if page.end {
            break;
        }
    }
    let users = [(4, 0, true), (5, 5, false), (6, 6, true), (7, 7, false), (DEFAULT_ID, 0, true)];
    let groups = [5, 6, 7].map(|id| (GROUP, id, u64::from(id), false, false));
    let users = users.map(|(id, bytes, own)| (USER, id, bytes, own, true));
    assert_eq!(seen, [&users[..], &groups].concat());
    // One user in each volume.
    let own = ListOf::Owner { kind: USER, id: 5 };
    let first = w.usage(&user(5), own.clone(), None, 1).unwrap();
    assert_eq!((first.rows[0].holder.volume, first.rows[0].bytes, first.end), (ALL_VOLUMES, 5, false));
    let second = w.usage(&user(5), own, Some(first.rows[0].holder), 1).unwrap();
    assert_eq!((second.rows[0].volume_name.as_str(), second.end), ("work", true));
}

#[test]
fn users_near_a_limit_are_found_with_the_fullest_first() {
    let (mut w, volume) = with_volume();
    let in_volume = |kind, id| Holder { volume: volume.id, kind, id };
    w.limit(&root(), in_volume(USER, DEFAULT_ID), bytes(100)).unwrap();
    w.limit(&root(), in_volume(USER, 7), bytes(1000)).unwrap();
    for (uid, size) in [(5u32, 94u64), (7, 950), (8, 99), (0, 5000)] {
        let file = w.create(&root(), volume.root, &format!("f{uid}"), 0o644).unwrap().entry.attr.ino;
        w.set(&root(), file, |r| (r.uid, r.gid) = (Some(uid), Some(6 + uid))).unwrap();
        w.commit(file, size, true).unwrap();
    }
    let found = |w: &World| w.view(|view| near(view.read, view.rules.quotas, view.rules.now)).unwrap();
    let report = found(&w);
    let ids: Vec<u32> = report.worst.iter().map(|row| row.holder.id).collect();
    assert_eq!((ids, report.users, report.groups), (vec![8, 7], 2, 0), "user 0 has no limits");
    // More than are named are counted.
    for uid in 100..130u32 {
        let file = w.create(&root(), volume.root, &format!("g{uid}"), 0o644).unwrap().entry.attr.ino;
        w.set(&root(), file, |r| (r.uid, r.gid) = (Some(uid), Some(6))).unwrap();
        w.commit(file, 100, true).unwrap();
    }
    w.limit(&root(), in_volume(GROUP, 6), inodes(3)).unwrap();
    let report = found(&w);
    assert_eq!((report.worst.len(), report.users, report.groups), (20, 32, 1));
    assert_eq!(report.worst[0].holder, in_volume(GROUP, 6), "a limit that was lowered, or passed");
}
