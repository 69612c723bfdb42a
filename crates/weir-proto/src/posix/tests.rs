//! One table for each rule; facts on the left, the decision of Linux on the right.
use super::*;

fn user(uid: u32, gid: u32, groups: &[u32]) -> Cred {
    Cred { uid, gid, groups: groups.to_vec() }
}
fn root() -> Cred {
    user(0, 0, &[])
}
fn owned(mode: u32) -> Owned {
    Owned { mode, uid: 1, gid: 10 }
}
/// Owner 7, user 5 has 6, group 4, mask 6, others 0.
fn list() -> Acl {
    let none = u32::MAX;
    let items = [(1u16, 7u16, none), (2, 6, 5), (4, 4, none), (16, 6, none), (32, 0, none)];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in items {
        value.extend([&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    Acl::parse(&value).unwrap().unwrap()
}

#[test]
fn the_class_of_a_user_decides_alone() {
    let (owner, member, also, other) =
        (user(1, 9, &[]), user(2, 10, &[]), user(2, 9, &[3, 10]), user(3, 9, &[]));
    for (mode, want, owner_may, member_may, other_may) in [
        (0o750, READ | SEARCH, true, true, false),
        (0o750, WRITE, true, false, false),
        (0o077, READ, false, true, true),
        (0o707, EXECUTE, true, false, true),
        (0o000, 0, true, true, true),
    ] {
        let may = |cred| owned(mode).permits(cred, None, want);
        assert_eq!(may(&owner), owner_may, "owner, {mode:o}, {want}");
        assert_eq!((may(&member), may(&also)), (member_may, member_may), "group, {mode:o}, {want}");
        assert_eq!(may(&other), other_may, "others, {mode:o}, {want}");
        assert!(may(&root()));
    }
}

#[test]
fn a_list_decides_unless_its_mask_permits_nothing() {
    let named = user(5, 9, &[]);
    for (mode, cred, want, may) in [
        (0o760, &named, WRITE, true),
        (0o760, &named, EXECUTE, false),
        (0o706, &named, WRITE, true), // the mode of others, without the list
        (0o700, &named, WRITE, false),
        (0o760, &user(6, 9, &[]), READ, false),
        (0o760, &root(), EXECUTE, true),
    ] {
        assert_eq!(owned(mode).permits(cred, Some(&list()), want), may, "{mode:o}, {cred:?}, {want}");
    }
}

#[test]
fn a_sticky_directory_keeps_the_entries_of_others() {
    for (mode, cred, entry_uid, may) in [
        (0o0777, user(2, 9, &[]), 3, true),
        (0o1777, user(2, 9, &[]), 3, false),
        (0o1777, user(2, 9, &[]), 2, true), // the entry is the user's
        (0o1777, user(1, 9, &[]), 3, true), // the directory is
        (0o1777, root(), 3, true),
    ] {
        assert_eq!(owned(mode).lets_remove(&cred, entry_uid), may, "{mode:o}, {cred:?}");
    }
}

#[test]
fn a_new_inode_inherits_group_and_set_gid() {
    let cred = user(2, 9, &[]);
    for (dir, is_directory, mode, gid) in [
        (0o0777, false, 0o644, 9),
        (0o0777, true, 0o644, 9),
        (0o2777, false, 0o644, 10),
        (0o2777, true, 0o2644, 10),
    ] {
        let new = owned(dir).new_inode(&cred, 0o644, is_directory);
        assert_eq!(new, Owned { mode, uid: 2, gid }, "{dir:o}, {is_directory}");
    }
}

#[test]
fn a_default_list_comes_before_the_umask() {
    assert_eq!(Inherited::new(None, 0o106666, 0o022, false), Inherited::of_mode(0o6644));
    let file = Inherited::new(Some(list()), 0o4666, 0o022, false);
    assert_eq!((file.mode, file.default), (0o4660, None));
    assert_eq!(file.access.unwrap().mode(), 0o660);
    let dir = Inherited::new(Some(list()), 0o777, 0o022, true);
    assert_eq!((dir.mode, dir.default), (0o760, Some(list())));
}

#[test]
fn owners_change_modes_and_writers_change_times() {
    use MayWrite::*;
    let (owner, other) = (user(1, 9, &[11]), user(2, 10, &[]));
    let nothing = Change::default();
    let mode = Change { mode: Some(0o755), ..nothing };
    let (times, size) = (Change { times: true, ..nothing }, Change { size: true, ..nothing });
    let (uid, gid) = (|uid| Change { uid: Some(uid), ..nothing }, |gid| Change { gid: Some(gid), ..nothing });
    let all = Change { mode: Some(0), uid: Some(9), gid: Some(9), times: true, size: true };
    for (cred, change, may_write, of, expected) in [
        (&owner, mode, No, 0o700, Ok(())),
        (&other, mode, ByPermission, 0o700, Err(Refused::Mode)),
        (&other, mode, ByOpen, 0o6755, Ok(())),
        (&other, Change { times: true, ..mode }, ByOpen, 0o6755, Err(Refused::Mode)),
        (&owner, uid(1), No, 0o700, Ok(())),
        (&owner, uid(2), No, 0o700, Err(Refused::Owner)),
        (&other, uid(1), No, 0o700, Err(Refused::Owner)),
        (&owner, gid(11), No, 0o700, Ok(())),
        (&owner, gid(12), No, 0o700, Err(Refused::Group)),
        (&other, gid(10), No, 0o700, Err(Refused::Group)),
        (&owner, times, No, 0o400, Ok(())),
        (&other, times, ByPermission, 0o706, Ok(())),
        (&other, times, ByOpen, 0o700, Err(Refused::Times)),
        (&other, Change { size: true, ..times }, ByOpen, 0o700, Ok(())),
        (&owner, size, No, 0o400, Err(Refused::Size)),
        (&owner, size, ByOpen, 0o400, Ok(())),
        (&root(), all, No, 0, Ok(())),
    ] {
        let checked = owned(of).check(cred, &change, may_write);
        assert_eq!(checked, expected, "{cred:?}, {change:?}, {may_write:?}, {of:o}");
    }
}

#[test]
fn privileges_end_when_data_or_owner_change() {
    let (member, other) = (user(2, 10, &[]), user(3, 9, &[]));
    for (mode, of_member, of_other) in [
        (0o4755, 0o755, 0o755),
        (0o6775, 0o775, 0o775),
        (0o6644, 0o2644, 0o644), // no privilege of a member without the group's execution
        (0o1755, 0o1755, 0o1755),
    ] {
        assert_eq!(owned(mode).without_privileges(&member), of_member, "{mode:o}");
        assert_eq!(owned(mode).without_privileges(&root()), of_member, "{mode:o}");
        assert_eq!(owned(mode).without_privileges(&other), of_other, "{mode:o}");
    }
    assert!(has_privileges(0o4755) && has_privileges(0o2644) && !has_privileges(0o1755));
}

#[test]
fn a_change_keeps_the_callers_bits_and_ends_privileges() {
    let own_bit = 1 << 31;
    let (member, other) = (user(1, 10, &[11]), user(1, 9, &[]));
    let mode = |mode| Change { mode: Some(mode), ..Change::default() };
    let owner = Change { uid: Some(1), gid: Some(11), ..Change::default() };
    let both = Change { mode: Some(0o6755), ..owner };
    for (cred, change, is_directory, before, after) in [
        (&member, mode(0o2750), false, 0o644, Owned { mode: 0o2750, uid: 1, gid: 10 }),
        (&other, mode(0o2750), false, 0o644, Owned { mode: 0o750, uid: 1, gid: 10 }),
        (&member, owner, false, 0o6755, Owned { mode: 0o755, uid: 1, gid: 11 }),
        (&member, owner, true, 0o6755, Owned { mode: 0o6755, uid: 1, gid: 11 }),
        (&root(), both, false, 0o644, Owned { mode: 0o6755, uid: 1, gid: 11 }),
    ] {
        let changed = owned(before | own_bit).changed(cred, &change, is_directory);
        assert_eq!(changed, Owned { mode: after.mode | own_bit, ..after }, "{cred:?}, {change:?}");
    }
    assert_eq!(owned(0o2777 | own_bit).mode_with_list(&member, &list()), 0o2760);
    assert_eq!(owned(0o2777 | own_bit).mode_with_list(&other, &list()), 0o760);
}
