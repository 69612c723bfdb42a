//! Volumes: who may do what, what stays inside, and that usage is each volume's own.
use super::*;
use weir_proto::volume::{Policy, Quota, Volume, VolumeChange, VolumeCreate, VolumeDelete, VolumeList};

const EBUSY: i32 = 16;
const EXDEV: i32 = 18;

impl World {
    pub fn volume(&mut self, cred: &Cred, parent: InodeId, name: &str) -> Result<Volume> {
        let r = VolumeCreate {
            op: op(),
            cred: cred.clone(),
            name: name.to_owned(),
            parent,
            entry: b(name),
            path: b(&format!("/{name}")),
            owner: 7,
            group: 7,
            mode: 0o755,
            admins: vec![8],
            quota: Quota::NONE,
            policy: Policy { scheme: None, pool: None },
        };
        self.change(|cx| volume::change::create(cx, &r))
    }
    pub fn change_volume(
        &mut self,
        cred: &Cred,
        id: VolumeId,
        edit: impl FnOnce(&mut VolumeChange),
    ) -> Result<Volume> {
        let (name, owner, admins, quota, policy, retention) = (None, None, None, None, None, None);
        let mut r = VolumeChange {
            op: op(),
            cred: cred.clone(),
            volume: id,
            name,
            owner,
            admins,
            quota,
            policy,
            retention,
        };
        edit(&mut r);
        self.change(|cx| volume::change::change(cx, &r))
    }
    pub fn delete_volume(&mut self, cred: &Cred, id: VolumeId, force: bool) -> Result<Volume> {
        let r = VolumeDelete { op: op(), cred: cred.clone(), volume: id, force };
        self.change(|cx| volume::change::delete(cx, &r))
    }
    fn named(&self, name: &str) -> Result<Volume> {
        self.view(|view| volume::show::get(view, name))
    }
    fn at(&self, ino: InodeId) -> Volume {
        self.view(|view| volume::show::at(view, ino)).unwrap()
    }
    fn own(&self, name: &str) -> (u64, u64, u64) {
        let usage = self.named(name).unwrap().usage;
        (usage.bytes, usage.files, usage.directories)
    }
}

#[test]
fn nothing_moves_from_one_volume_into_another() {
    let mut w = World::new();
    let r = InodeId::ROOT;
    let a = w.volume(&root(), r, "a").unwrap();
    let b = w.volume(&root(), r, "b").unwrap();
    assert_eq!((a.id, b.id), (VolumeId(2), VolumeId(3)));
    let d = w.mkdir(&root(), a.root, "d", 0o755).unwrap().entry.attr.ino;
    let f = w.create(&root(), d, "f", 0o644).unwrap().entry.attr.ino;
    w.create(&root(), b.root, "g", 0o644).unwrap();
    assert_eq!((w.at(f).id, w.at(d).id, w.at(a.root).id, w.at(r).id), (a.id, a.id, a.id, VolumeId::ROOT));
    for mode in [RenameMode::Replace, RenameMode::NoReplace] {
        assert_eq!(errno(w.rename(&root(), (d, "f"), (b.root, "f"), mode)), EXDEV);
        assert_eq!(errno(w.rename(&root(), (a.root, "d"), (r, "d"), mode)), EXDEV);
    }
    assert_eq!(errno(w.rename(&root(), (d, "f"), (b.root, "g"), RenameMode::Exchange)), EXDEV);
    assert_eq!(errno(w.link(&root(), f, b.root, "f")), EXDEV);
    // Within a volume, at any depth.
    w.rename(&root(), (d, "f"), (a.root, "f"), RenameMode::Replace).unwrap();
    w.link(&root(), f, d, "again").unwrap();
    assert_eq!(w.own("a"), (0, 1, 1));
}

#[test]
fn a_volumes_topmost_directory_moves_in_the_volume_around_it() {
    let mut w = World::new();
    let r = InodeId::ROOT;
    let a = w.volume(&root(), r, "a").unwrap();
    let d = w.mkdir(&root(), r, "d", 0o755).unwrap().entry.attr.ino;
    let inner = w.volume(&root(), d, "inner").unwrap();
    let f = w.create(&root(), inner.root, "f", 0o644).unwrap().entry.attr.ino;
    w.commit(f, 1000, true).unwrap();
    w.rename(&root(), (d, "inner"), (r, "moved"), RenameMode::Replace).unwrap();
    assert_eq!(&w.named("inner").unwrap().path[..], b".../moved");
    w.rename(&root(), (r, "moved"), (r, "again"), RenameMode::Replace).unwrap();
    assert_eq!(&w.named("inner").unwrap().path[..], b".../again");
    assert_eq!(errno(w.rename(&root(), (r, "again"), (a.root, "x"), RenameMode::Replace)), EXDEV);
    // Neither rmdir removes it, nor a rename of another directory over it.
    let refused = w.rmdir(&root(), r, "a").unwrap_err();
    assert_eq!(refused.kind.errno(), EBUSY);
    assert!(refused.context.contains("weir volume delete a"), "{refused}");
    assert_eq!(errno(w.rename(&root(), (r, "d"), (r, "a"), RenameMode::Replace)), EBUSY);
    w.rename(&root(), (r, "d"), (r, "a"), RenameMode::Exchange).unwrap();
    assert_eq!(w.own("inner"), (1000, 1, 0));
    // Its content counts for the directories around it, and not for their volume.
    assert_eq!(w.own("root"), (0, 0, 3));
    assert_eq!(
        w.view(|v| usage_of(v.read, r)).unwrap(),
        Usage { bytes: 1000, files: 1, directories: 3, evicted: 0 }
    );
    // The volume is still found by its directory when it goes.
    w.unlink(&root(), inner.root, "f").unwrap();
    w.delete_volume(&root(), inner.id, false).unwrap();
    assert!(!w.all(r).iter().any(|e| e.name == "again"));
}

#[test]
fn an_empty_volume_leaves_nothing_behind() {
    let mut w = World::new();
    let before = (w.keys(b'A'), w.keys(b'v'), w.keys(b'n'));
    let a = w.volume(&root(), InodeId::ROOT, "a").unwrap();
    let f = w.create(&root(), a.root, "f", 0o644).unwrap().entry.attr.ino;
    w.commit(f, 77, true).unwrap();
    assert_eq!(errno(w.delete_volume(&root(), a.id, false)), ENOTEMPTY);
    w.unlink(&root(), a.root, "f").unwrap();
    w.delete_volume(&root(), a.id, false).unwrap();
    assert_eq!((w.keys(b'A'), w.keys(b'v'), w.keys(b'n')), before);
    let left = w.keys(b'Q').into_iter().filter(|key| key[1..5] == a.id.0.to_be_bytes());
    assert_eq!(left.count(), 0);
    assert_eq!(errno(w.named("a")), ENOENT);
    assert_eq!(w.own("root"), (0, 0, 0));
    // Its number is not used again.
    assert_eq!(w.volume(&root(), InodeId::ROOT, "a").unwrap().id, VolumeId(3));
}

#[test]
fn a_full_volume_is_deleted_in_steps_and_frees_its_space() {
    let mut w = World::new();
    let r = InodeId::ROOT;
    let outer = w.volume(&root(), r, "outer").unwrap();
    let d = w.mkdir(&root(), outer.root, "d", 0o755).unwrap().entry.attr.ino;
    let before = ["A", "T", "E", "K", "I", "N", "v", "n"].map(|letter| w.keys(letter.as_bytes()[0]));
    let usage =
        |w: &World| w.view(|v| Ok::<_, Halt>((usage_of(v.read, r)?, usage_of(v.read, outer.root)?))).unwrap();
    let used = (usage(&w), w.own("root"), w.own("outer"));
    let a = w.volume(&root(), d, "a").unwrap();
    let mut dirs = vec![a.root];
    for n in 0..40 {
        let at = dirs[n / 2];
        dirs.push(w.mkdir(&root(), at, &format!("d{n}"), 0o755).unwrap().entry.attr.ino);
        for m in 0..20 {
            let f = w.create(&root(), at, &format!("f{n}-{m}"), 0o644).unwrap().entry.attr.ino;
            w.commit(f, 100, true).unwrap();
            w.link(&root(), f, dirs[n / 3], &format!("l{n}-{m}")).unwrap();
        }
    }
    assert_eq!(w.own("a"), (40 * 20 * 100, 40 * 20, 40));
    assert_eq!(errno(w.delete_volume(&root(), a.id, false)), ENOTEMPTY);
    assert!(w.delete_volume(&root(), a.id, true).unwrap().deleting);
    // The name is gone, the parent's volume has no part of it any more, and it cannot be created again
    // inside.
    assert_eq!(errno(w.named("a")), ENOENT);
    assert_eq!((usage(&w).1, w.own("outer")), (used.0.1.clone(), used.2));
    assert_eq!(errno(w.volume(&root(), a.root, "b")), ENOENT);
    assert_eq!(errno(w.delete_volume(&root(), a.id, true)), ENOENT);
    w.rmdir(&root(), outer.root, "d").unwrap();
    w.mkdir(&root(), outer.root, "e", 0o755).unwrap();
    let mut steps = 0;
    while !w.change(|cx| volume::remove::remove_some(cx, a.id)).unwrap() {
        assert_eq!(w.view(|v| volume::remove::next_deleted(v.read)).unwrap(), Some(a.id));
        steps += 1;
        assert!(steps < 1000);
    }
    assert!(steps > 5, "{steps}");
    assert_eq!(w.view(|v| volume::remove::next_deleted(v.read)).unwrap(), None);
    let after = ["A", "T", "E", "K", "I", "N", "v", "n"].map(|letter| w.keys(letter.as_bytes()[0]));
    assert_eq!(after.each_ref().map(Vec::len), before.each_ref().map(Vec::len));
    assert_eq!((usage(&w), w.own("root"), w.own("outer")), used);
    assert_eq!(w.keys(b'G').len(), 800);
}

#[test]
fn a_volume_with_another_inside_stays() {
    let mut w = World::new();
    let a = w.volume(&root(), InodeId::ROOT, "a").unwrap();
    let inner = w.volume(&root(), a.root, "inner").unwrap();
    let refused = w.delete_volume(&root(), a.id, true).unwrap_err();
    assert!(refused.kind.errno() == ENOTEMPTY && refused.context.contains("\"inner\""), "{refused}");
    w.delete_volume(&root(), inner.id, false).unwrap();
    w.delete_volume(&root(), a.id, false).unwrap();
    assert_eq!(errno(w.delete_volume(&root(), VolumeId::ROOT, true)), EINVAL);
}

#[test]
fn root_manages_volumes_owner_and_administrators_the_rest() {
    let mut w = World::new();
    assert_eq!(errno(w.volume(&user(7), InodeId::ROOT, "mine")), EACCES);
    let a = w.volume(&root(), InodeId::ROOT, "a").unwrap();
    let (owner, admin, other) = (user(7), user(8), user(9));
    for who in [&owner, &admin] {
        let soft = Quota { bytes_soft: Some(5), grace_s: 60, ..Quota::NONE };
        w.change_volume(who, a.id, |c| c.quota = Some(soft)).unwrap();
        let hard = Quota { bytes_hard: Some(9), ..soft };
        assert_eq!(errno(w.change_volume(who, a.id, |c| c.quota = Some(hard))), EACCES);
        let hard = Quota { inodes_hard: Some(9), ..soft };
        assert_eq!(errno(w.change_volume(who, a.id, |c| c.quota = Some(hard))), EACCES);
        w.change_volume(who, a.id, |c| c.name = Some(format!("of-{}", who.uid))).unwrap();
        assert_eq!(errno(w.change_volume(who, a.id, |c| c.owner = Some(9))), EACCES);
        w.change_volume(who, a.id, |c| c.owner = Some(7)).unwrap();
        assert_eq!(errno(w.delete_volume(who, a.id, false)), EACCES);
    }
    assert_eq!(errno(w.change_volume(&other, a.id, |c| c.name = Some("x".into()))), EACCES);
    w.change_volume(&owner, a.id, |c| c.admins = Some(vec![9])).unwrap();
    w.change_volume(&other, a.id, |c| c.name = Some("b".into())).unwrap();
    assert_eq!(errno(w.change_volume(&admin, a.id, |c| c.name = Some("x".into()))), EACCES);
    w.change_volume(&root(), a.id, |c| c.owner = Some(9)).unwrap();
    let now = w.named("b").unwrap();
    assert_eq!((now.owner, now.admins, now.quota.bytes_soft), (9, vec![9], Some(5)));
    assert_eq!(errno(w.named("of-8")), ENOENT);
}

#[test]
fn hostile_volumes_are_refused() {
    let mut w = World::new();
    let a = w.volume(&root(), InodeId::ROOT, "a").unwrap();
    for name in ["", ".", "..", "-x", ".x", "a/b", "a b", "a\n", "ä", &"x".repeat(65)] {
        assert_eq!(errno(w.change_volume(&root(), a.id, |c| c.name = Some(name.into()))), EINVAL, "{name:?}");
    }
    assert_eq!(errno(w.volume(&root(), InodeId::ROOT, "a")), EEXIST);
    assert_eq!(errno(w.change_volume(&root(), a.id, |c| c.name = Some("root".into()))), EEXIST);
    w.mkdir(&root(), InodeId::ROOT, "b", 0o755).unwrap();
    assert_eq!(errno(w.volume(&root(), InodeId::ROOT, "b")), EEXIST);
    assert_eq!(errno(w.named("b")), ENOENT, "half of it was made");
    let soft = Quota { bytes_soft: Some(2), bytes_hard: Some(1), ..Quota::NONE };
    assert_eq!(errno(w.change_volume(&root(), a.id, |c| c.quota = Some(soft))), EINVAL);
    let much = Quota { inodes_hard: Some(u64::MAX), ..Quota::NONE };
    assert_eq!(errno(w.change_volume(&root(), a.id, |c| c.quota = Some(much))), EINVAL);
    assert_eq!(errno(w.change_volume(&root(), a.id, |c| c.admins = Some(vec![1; 65]))), EINVAL);
    for id in [VolumeId(0), VolumeId(99), VolumeId(u32::MAX)] {
        assert_eq!(errno(w.change_volume(&root(), id, |_| ())), ENOENT);
        assert_eq!(errno(w.delete_volume(&root(), id, true)), ENOENT);
    }
}

#[test]
fn a_list_goes_on_where_it_ended() {
    let mut w = World::new();
    for n in 0..10 {
        w.volume(&root(), InodeId::ROOT, &format!("v{n}")).unwrap();
    }
    let (mut names, mut after) = (Vec::new(), VolumeId(0));
    loop {
        let r = VolumeList { session: ME, after, limit: 3 };
        let page = w.view(|view| volume::show::list(view, &r)).unwrap();
        assert!(page.volumes.len() <= 3);
        after = page.volumes.last().map_or(after, |v| v.id);
        names.extend(page.volumes.into_iter().map(|v| v.name));
        if page.end {
            break;
        }
    }
    let all = std::iter::once("root".to_owned()).chain((0..10).map(|n| format!("v{n}")));
    assert_eq!(names, all.collect::<Vec<_>>());
    let r = VolumeList { session: ME, after: VolumeId(u32::MAX), limit: 3 };
    assert!(w.view(|view| volume::show::list(view, &r)).unwrap().end);
}
