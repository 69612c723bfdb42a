//! Gates: each refuses the changes that it is for.
use super::super::gate::revoke_both;
use super::*;
use crate::record::Writing;

const EROFS: i32 = 30;

/// The end of a gate: its error, unless it is blocked, and its obstacles.
type Met = (Option<ErrorKind>, Vec<Obstacle>);

/// The rules that differ from a test's usual ones.
#[derive(Default)]
struct Under {
    mirrored: BTreeSet<VolumeId>,
    snapshotting: Option<(VolumeId, InodeId)>,
}

/// Runs a gate under these rules; nothing is changed.
fn met<T>(w: &mut World, under: &Under, gate: impl Fn(&mut Cx<'_>) -> Attempt<T>) -> Met {
    w.change(|cx| {
        let (mirrored, snapshotting) = (&under.mirrored, under.snapshotting);
        let rules = Rules { mirrored, snapshotting, ..*cx.rules };
        let mut obstacles = Obstacles::default();
        let mut cx =
            Cx { txn: &mut *cx.txn, rules: &rules, obstacles: &mut obstacles, events: cx.events, uid: None };
        let kind = match gate(&mut cx) {
            Err(Halt::Failed(e)) => Some(e.kind),
            Ok(_) | Err(Halt::Blocked) => None,
        };
        Ok::<_, Halt>((kind, obstacles.iter().copied().collect()))
    })
    .unwrap()
}

#[test]
fn a_directory_is_searched_and_changed_only_with_permission() {
    let mut w = World::new();
    let dir =
        |w: &mut World, name, mode| w.mkdir(&user(7), InodeId::ROOT, name, mode).unwrap().entry.attr.ino;
    w.set(&root(), InodeId::ROOT, |r| r.mode = Some(0o777)).unwrap();
    let (closed, shown, open) =
        (dir(&mut w, "closed", 0o700), dir(&mut w, "shown", 0o755), dir(&mut w, "open", 0o777));
    let search = |ino| move |cx: &mut Cx<'_>| cx.dir_to_search(&user(9), ino).map(drop);
    let change = |ino| move |cx: &mut Cx<'_>| cx.dir_to_search(&user(9), ino)?.for_change(cx).map(drop);
    let write = |ino| move |cx: &mut Cx<'_>| cx.dir_to_write(&user(9), ino).map(drop);
    assert_eq!(errno(w.change(search(closed))), EACCES);
    assert!(w.change(search(shown)).is_ok());
    for refused in [closed, shown] {
        assert_eq!((errno(w.change(change(refused))), errno(w.change(write(refused)))), (EACCES, EACCES));
    }
    assert!(w.change(change(open)).is_ok() && w.change(write(open)).is_ok());
}

#[test]
fn a_directory_of_a_mirror_is_not_changed() {
    let mut w = World::new();
    let mirror = Under { mirrored: BTreeSet::from([VolumeId::ROOT]), ..Under::default() };
    let gates: [fn(&mut Cx<'_>) -> Attempt<()>; 2] = [
        |cx| Ok(cx.dir_to_write(&root(), InodeId::ROOT).map(|_| ())?),
        |cx| cx.dir_to_search(&root(), InodeId::ROOT)?.for_change(cx).map(drop),
    ];
    for gate in gates {
        let (kind, obstacles) = met(&mut w, &mirror, gate);
        assert_eq!((kind.map(|kind| kind.errno()), obstacles), (Some(EROFS), vec![]));
    }
    assert_eq!(
        met(&mut w, &mirror, |cx| Ok(cx.dir_to_search(&root(), InodeId::ROOT).map(drop)?)),
        (None, vec![])
    );
}

#[test]
fn a_directory_whose_names_are_not_known_is_not_changed() {
    let mut w = World::new();
    let dir = w.mkdir(&root(), InodeId::ROOT, "d", 0o755).unwrap().entry.attr.ino;
    w.change(|cx| {
        let access = load_access(cx.read(), dir)?;
        cx.put_access(dir, &Access { mode: access.mode | NOT_ENUMERATED, ..access });
        Ok::<_, Halt>(())
    })
    .unwrap();
    let unknown = (None, vec![Obstacle::NotEnumerated { dir }]);
    assert_eq!(
        met(&mut w, &Under::default(), |cx| cx.dir_to_search(&root(), dir)?.for_change(cx).map(drop)),
        unknown
    );
    assert_eq!(
        met(&mut w, &Under::default(), |cx| cx.dir_to_search(&root(), dir)?.require_listed(cx)),
        unknown
    );
    assert_eq!(
        met(&mut w, &Under::default(), |cx| Ok(cx.dir_to_write(&root(), dir).map(drop)?)),
        (None, vec![])
    );
}

#[test]
fn a_directory_is_changed_without_leases_of_others() {
    let mut w = World::new();
    let dir = w.mkdir(&root(), InodeId::ROOT, "d", 0o755).unwrap().entry.attr.ino;
    let file = w.create(&root(), dir, "f", 0o644).unwrap().entry.attr.ino;
    for ino in [InodeId::ROOT, dir, file] {
        w.leases.grant_read(OTHER, ino);
    }
    let lease = |ino| Obstacle::Lease(Conflict { ino, session: OTHER, keep: LeaseKind::None, ask: true });
    let change = |cx: &mut Cx<'_>, ino| cx.dir_to_search(&root(), ino)?.for_change(cx);
    let one = met(&mut w, &Under::default(), |cx| change(cx, dir)?.revoke(cx, &[file]).map(drop));
    assert_eq!(one, (None, vec![lease(dir), lease(file)]));
    let both = met(&mut w, &Under::default(), |cx| {
        let dirs = (change(cx, InodeId::ROOT)?, change(cx, dir)?);
        revoke_both(cx, dirs, &[file]).map(drop)
    });
    assert_eq!(both, (None, vec![lease(InodeId::ROOT), lease(dir), lease(file)]), "all at once");
    for ino in [InodeId::ROOT, dir, file] {
        w.leases.lower(OTHER, ino, LeaseKind::None);
    }
    let free = met(&mut w, &Under::default(), |cx| change(cx, dir)?.revoke(cx, &[file]).map(drop));
    assert_eq!(free, (None, vec![]));
}

#[test]
fn a_file_is_written_by_its_recorded_writer_after_a_snapshot() {
    let mut w = World::new();
    let file = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    w.change(|cx| {
        let inode = load_file(cx.read(), file)?;
        cx.put_inode(
            file,
            &Inode { writing: Writing { writer: OTHER, dirty: false, ..inode.writing }, ..inode },
        );
        Ok::<_, Halt>(())
    })
    .unwrap();
    let write = |cx: &mut Cx<'_>| {
        let inode = load_file(cx.read(), file)?;
        cx.file_to_write(file, inode)
    };
    let snapshotting = Under { snapshotting: Some((VolumeId::ROOT, InodeId::ROOT)), ..Under::default() };
    let waits = met(&mut w, &snapshotting, |cx| write(cx).map(drop));
    assert_eq!(waits, (None, vec![Obstacle::Snapshot { root: InodeId::ROOT }]));
    let (inode, changed) = w.change(|cx| write(cx).map(|file| file.into_inode())).unwrap();
    assert!(changed && inode.writing.dirty);
    assert_eq!(inode.writing.writer, ME);
}
