//! Decides how to change names, given the state found at home: pure, the same for every home.
//!
//! Each function returns *done* if it recognizes the result of an earlier try, and refuses if home has
//! changed since our last write.
use crate::{Attrs, Expect, Fingerprint, Found, Make};
use weir_proto::meta::FileKind;

/// The action for the state found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// As requested.
    Act,
    /// It is already done.
    Done,
    /// Home has changed since our last write: change nothing.
    Refuse,
}

/// How to make something where `found` is. `Done`: it exists, is ours, and gets its attributes (again).
pub fn make(what: &Make, attrs: &Attrs, found: Option<&Found>, is_empty_dir: bool) -> Step {
    let Some(found) = found else { return Step::Act };
    let ours = match what {
        Make::Directory => {
            let of = &found.attrs;
            let same = (of.mode, of.uid, of.gid) == (attrs.mode, attrs.uid, attrs.gid);
            found.fingerprint.kind == FileKind::Directory && (is_empty_dir || same)
        }
        // The other names of a file with several names may be another user's.
        Make::File => {
            found.fingerprint.kind == FileKind::Regular && found.fingerprint.size == 0 && found.nlink <= 1
        }
        Make::Symlink { target } => found.fingerprint.kind == FileKind::Symlink && found.target == target,
        Make::Special { kind, rdev } => {
            let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
            found.fingerprint.kind == *kind && (!is_device || found.rdev == *rdev)
        }
    };
    if ours { Step::Done } else { Step::Refuse }
}

/// How to give `existing` another name.
pub fn link(existing: Option<&Fingerprint>, expect: &Expect, at_new: Option<&Fingerprint>) -> Step {
    match (existing, at_new) {
        (Some(existing), None) if expect.admits(existing) => Step::Act,
        (Some(existing), Some(new)) if expect.admits(existing) && existing.id == new.id => Step::Done,
        _ => Step::Refuse,
    }
}

pub fn remove(found: Option<&Fingerprint>, expect: &Expect) -> Step {
    match found {
        None => Step::Done,
        Some(found) if expect.admits(found) => Step::Act,
        Some(_) => Step::Refuse,
    }
}

/// How to rename.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameStep {
    /// The new name is free, and must stay free.
    Move,
    /// The entry at the new name is replaced.
    Replace,
    /// Both names lead to the same file (a file with two names, an interrupted rename by copy): the old name
    /// is removed.
    DropOld,
    Done,
    /// The entry at the old name is not ours.
    RefuseFrom,
    /// The entry at the new name is in the way.
    RefuseTo,
}

pub fn rename(
    from: Option<&Fingerprint>,
    expect: &Expect,
    to: Option<&Fingerprint>,
    replaces: Option<&Expect>,
) -> RenameStep {
    let moved = to.is_some_and(|to| Expect::Ours(expect.fingerprint().clone()).admits(to));
    match (from.filter(|from| expect.admits(from)), to) {
        (Some(_), None) => RenameStep::Move,
        (Some(from), Some(to)) if from.id == to.id && from.kind == to.kind => RenameStep::DropOld,
        (Some(_), Some(to)) if replaces.is_some_and(|expect| expect.admits(to)) => RenameStep::Replace,
        (Some(_), Some(_)) => RenameStep::RefuseTo,
        (None, _) if moved => RenameStep::Done,
        (None, _) => RenameStep::RefuseFrom,
    }
}

/// How to exchange two names, at a home that can do so in one step.
pub fn exchange(
    a: Option<&Fingerprint>,
    expect_a: &Expect,
    b: Option<&Fingerprint>,
    expect_b: &Expect,
) -> Step {
    let (Some(a), Some(b)) = (a, b) else { return Step::Refuse };
    let ours =
        |expect: &Expect, found: &Fingerprint| Expect::Ours(expect.fingerprint().clone()).admits(found);
    match () {
        () if expect_a.admits(a) && expect_b.admits(b) => Step::Act,
        () if ours(expect_a, b) && ours(expect_b, a) => Step::Done,
        () => Step::Refuse,
    }
}

/// `Done` is never returned: setting attributes again costs little.
pub fn set_attrs(found: Option<&Fingerprint>, expect: &Expect, attrs: &Attrs) -> Step {
    match found {
        Some(found) if expect.admits(found) => Step::Act,
        // An earlier try got as far as the times.
        Some(found) if found.mtime == attrs.mtime && found.size == expect.fingerprint().size => {
            if Expect::Ours(expect.fingerprint().clone()).admits(found) {
                Step::Act
            } else {
                Step::Refuse
            }
        }
        _ => Step::Refuse,
    }
}

pub fn resize(found: Option<&Fingerprint>, expect: &Expect, size: u64) -> Step {
    match found {
        Some(found) if expect.admits(found) && found.size == size => Step::Done,
        Some(found) if expect.admits(found) => Step::Act,
        // An earlier try: the file has the requested size, which differs from the expected one.
        Some(found) if found.size == size && size != expect.fingerprint().size => {
            if Expect::Ours(expect.fingerprint().clone()).admits(found) { Step::Done } else { Step::Refuse }
        }
        _ => Step::Refuse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use weir_proto::meta::Time;

    fn fingerprint(id: u8, size: u64, mtime: i64) -> Fingerprint {
        Fingerprint {
            kind: FileKind::Regular,
            id: Bytes::from(vec![id]),
            version: Bytes::new(),
            size,
            mtime: Time { nanos: mtime },
        }
    }
    fn attrs(mode: u32, mtime: i64) -> Attrs {
        let time = Time { nanos: mtime };
        Attrs { mode, uid: 1, gid: 2, atime: time, mtime: time, xattrs: vec![] }
    }
    fn found(kind: FileKind, size: u64) -> Found {
        let fingerprint = Fingerprint { kind, ..fingerprint(1, size, 0) };
        Found {
            fingerprint,
            attrs: attrs(0o750, 0),
            nlink: 1,
            target: Bytes::from_static(b"t"),
            rdev: 9,
            allocated: 0,
        }
    }

    #[test]
    fn make_by_table() {
        use FileKind::*;
        let link = |target: &'static [u8]| Make::Symlink { target: Bytes::from_static(target) };
        let device = |kind, rdev| Make::Special { kind, rdev };
        let many = Found { nlink: 2, ..found(Regular, 0) };
        for (what, mode, there, is_empty, step) in [
            (Make::File, 0, None, false, Step::Act),
            (Make::File, 0, Some(found(Regular, 0)), false, Step::Done),
            (Make::File, 0, Some(found(Regular, 1)), false, Step::Refuse),
            (Make::File, 0, Some(many), false, Step::Refuse),
            (Make::File, 0, Some(found(Directory, 0)), true, Step::Refuse),
            (Make::Directory, 0, Some(found(Directory, 0)), true, Step::Done),
            (Make::Directory, 0, Some(found(Directory, 0)), false, Step::Refuse),
            (Make::Directory, 0o750, Some(found(Directory, 0)), false, Step::Done),
            (Make::Directory, 0o750, Some(found(Regular, 0)), false, Step::Refuse),
            (link(b"t"), 0, Some(found(Symlink, 1)), false, Step::Done),
            (link(b"u"), 0, Some(found(Symlink, 1)), false, Step::Refuse),
            (device(CharDevice, 9), 0, Some(found(CharDevice, 0)), false, Step::Done),
            (device(CharDevice, 8), 0, Some(found(CharDevice, 0)), false, Step::Refuse),
            (device(BlockDevice, 9), 0, Some(found(CharDevice, 0)), false, Step::Refuse),
            (device(Fifo, 0), 0, Some(found(Fifo, 0)), false, Step::Done),
        ] {
            assert_eq!(
                make(&what, &attrs(mode, 0), there.as_ref(), is_empty),
                step,
                "{what:?} over {there:?}"
            );
        }
    }

    #[test]
    fn rename_by_table() {
        let (mine, changed, other) = (fingerprint(1, 5, 5), fingerprint(1, 6, 6), fingerprint(2, 5, 5));
        let (exact, ours) = (Expect::Unchanged(mine.clone()), Expect::Ours(mine.clone()));
        let over = Expect::Unchanged(other.clone());
        for (from, expect, to, replaces, step) in [
            (Some(&mine), &exact, None, None, RenameStep::Move),
            (Some(&changed), &exact, None, None, RenameStep::RefuseFrom),
            (Some(&changed), &ours, None, None, RenameStep::Move),
            (Some(&mine), &exact, Some(&other), None, RenameStep::RefuseTo),
            (Some(&mine), &exact, Some(&other), Some(&over), RenameStep::Replace),
            (Some(&mine), &exact, Some(&fingerprint(2, 6, 5)), Some(&over), RenameStep::RefuseTo),
            (Some(&mine), &exact, Some(&mine), None, RenameStep::DropOld),
            (None, &exact, Some(&mine), None, RenameStep::Done),
            (None, &exact, Some(&changed), None, RenameStep::Done),
            (Some(&other), &exact, Some(&mine), None, RenameStep::Done),
            (None, &exact, Some(&other), Some(&over), RenameStep::RefuseFrom),
            (None, &exact, None, None, RenameStep::RefuseFrom),
        ] {
            assert_eq!(rename(from, expect, to, replaces), step, "{from:?} {expect:?} {to:?} {replaces:?}");
        }
    }

    #[test]
    fn the_others_by_table() {
        let (mine, changed, other) = (fingerprint(1, 5, 5), fingerprint(1, 6, 6), fingerprint(2, 5, 5));
        let (exact, ours) = (Expect::Unchanged(mine.clone()), Expect::Ours(mine.clone()));
        let other_exact = Expect::Unchanged(other.clone());
        assert_eq!(remove(None, &exact), Step::Done);
        assert_eq!(remove(Some(&mine), &exact), Step::Act);
        assert_eq!(remove(Some(&changed), &exact), Step::Refuse);
        assert_eq!(remove(Some(&changed), &ours), Step::Act);

        assert_eq!(link(Some(&mine), &exact, None), Step::Act);
        assert_eq!(link(Some(&mine), &exact, Some(&mine)), Step::Done);
        assert_eq!(link(Some(&mine), &exact, Some(&other)), Step::Refuse);
        assert_eq!(link(Some(&changed), &exact, None), Step::Refuse);
        assert_eq!(link(None, &exact, Some(&mine)), Step::Refuse);

        assert_eq!(exchange(Some(&mine), &exact, Some(&other), &other_exact), Step::Act);
        assert_eq!(exchange(Some(&other), &exact, Some(&changed), &other_exact), Step::Done);
        assert_eq!(exchange(Some(&changed), &exact, Some(&other), &other_exact), Step::Refuse);
        assert_eq!(exchange(None, &exact, Some(&mine), &other_exact), Step::Refuse);

        assert_eq!(set_attrs(Some(&mine), &exact, &attrs(0, 9)), Step::Act);
        assert_eq!(
            set_attrs(Some(&fingerprint(1, 5, 9)), &exact, &attrs(0, 9)),
            Step::Act,
            "the times were set already"
        );
        assert_eq!(set_attrs(Some(&fingerprint(1, 5, 8)), &exact, &attrs(0, 9)), Step::Refuse);
        assert_eq!(set_attrs(Some(&fingerprint(1, 6, 9)), &exact, &attrs(0, 9)), Step::Refuse);
        assert_eq!(set_attrs(None, &ours, &attrs(0, 9)), Step::Refuse);

        assert_eq!(resize(Some(&mine), &exact, 3), Step::Act);
        assert_eq!(resize(Some(&mine), &exact, 5), Step::Done);
        assert_eq!(resize(Some(&fingerprint(1, 3, 7)), &exact, 3), Step::Done, "cut already");
        assert_eq!(
            resize(Some(&fingerprint(1, 5, 7)), &exact, 5),
            Step::Refuse,
            "written by another program"
        );
        assert_eq!(resize(Some(&fingerprint(1, 4, 7)), &exact, 3), Step::Refuse);
        assert_eq!(resize(Some(&fingerprint(2, 3, 7)), &exact, 3), Step::Refuse);
    }
}
