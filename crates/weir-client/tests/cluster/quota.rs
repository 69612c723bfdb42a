//! Claims about limits of volumes: they hold at the write, to the byte, for any writer; deleting frees space.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Allocate, Client, Handle, OpenMode, SetAttrs, VolumeEdit};
use weir_lab::*;
use weir_proto::meta::Cred;
use weir_proto::quota::{ALL_VOLUMES, DEFAULT_ID, Holder, ListOf, OwnerKind, ReclaimSpace, ReserveSpace};
use weir_proto::volume::{Quota, Volume};
use weir_proto::{ErrorKind, InodeId, MIB, Request, Result};

const LIMIT: u64 = 10 * MIB;
const STEP: usize = 300_000;

async fn volume(c: &Client, name: &str, quota: Quota) -> Volume {
    c.create_volume(&root(), &new_volume(name, quota)).await.unwrap()
}
async fn create(c: &Client, dir: InodeId, name: &str) -> Handle {
    c.create(&root(), dir, name.as_bytes(), 0o644, false, OpenMode::BOTH).await.unwrap().handle
}
async fn write(c: &Client, h: Handle, offset: u64, data: &[u8]) -> Result<usize> {
    match c.try_write(h, offset, data) {
        Some(done) => done,
        None => c.write(h, offset, Bytes::copy_from_slice(data)).await,
    }
}
/// Writes from `offset` on until it is refused; how far it came.
async fn fill(c: &Client, h: Handle, mut offset: u64) -> u64 {
    loop {
        match write(c, h, offset, &pattern(offset, 0, STEP)).await {
            Ok(n) => offset += n as u64,
            Err(e) => {
                assert_eq!(e.kind, ErrorKind::OverQuota, "{e}");
                return offset;
            }
        }
    }
}
async fn used(c: &Client, name: &str) -> u64 {
    c.volume(name).await.unwrap().usage.bytes
}

#[test]
fn a_limit_holds_to_the_byte_and_deleting_helps() {
    Lab::new(81).run(6, |lab| async move {
        let a = lab.client("a").await;
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let h = create(&a, v.root, "f").await;
        assert_eq!(fill(&a, h, 0).await, LIMIT);
        // Existing bytes may be written over.
        assert_eq!(write(&a, h, 5, &[7; STEP]).await.unwrap(), STEP);
        a.fsync(h).await.unwrap();
        assert_eq!(used(&a, "v").await, LIMIT);
        assert_eq!(a.append(h, Bytes::from_static(b"x")).await.unwrap_err().kind, ErrorKind::OverQuota);
        // Holes are free, and what is written into them is not.
        let size = |size| SetAttrs { size: Some(size), ..SetAttrs::default() };
        let ino = a.lookup(&root(), v.root, b"f").await.unwrap().unwrap().attr.ino;
        a.setattr(&root(), ino, Some(h), size(100 * LIMIT)).await.unwrap();
        assert_eq!(write(&a, h, 2 * LIMIT, &[1; 10]).await.unwrap_err().kind, ErrorKind::OverQuota);
        a.setattr(&root(), ino, Some(h), size(4 * MIB)).await.unwrap();
        assert_eq!(used(&a, "v").await, 4 * MIB);
        assert_eq!(fill(&a, h, 4 * MIB).await, LIMIT);
        a.release(h).await.unwrap();
        a.unlink(&root(), v.root, b"f").await.unwrap();
        let h = create(&a, v.root, "g").await;
        assert_eq!(fill(&a, h, 0).await, LIMIT);
        a.release(h).await.unwrap();
        assert_eq!(used(&a, "v").await, LIMIT);
        // Outside nothing is limited.
        let h = create(&a, InodeId::ROOT, "out").await;
        assert_eq!(write(&a, h, 0, &vec![1; 12 << 20]).await.unwrap(), 12 << 20);
    });
}

/// Clients are upgraded first, or last: a leader that knows no limits of owners has those of volumes.
#[test]
fn a_leader_without_limits_of_owners_has_those_of_volumes() {
    Lab::new(85).run(6, |lab| async move {
        lab.leader_knows_not(&[ReserveSpace::METHOD, ReclaimSpace::METHOD]);
        let a = lab.client("a").await;
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let (h, other) = (create(&a, v.root, "f").await, create(&a, v.root, "g").await);
        let ino = a.lookup(&root(), v.root, b"g").await.unwrap().unwrap().attr.ino;
        let given = SetAttrs { uid: Some(7), ..SetAttrs::default() };
        a.setattr(&root(), ino, Some(other), given).await.unwrap();
        // Of two owners, and one limit.
        assert_eq!(write(&a, other, 0, &pattern(0, 0, STEP)).await.unwrap(), STEP);
        assert_eq!(fill(&a, h, 0).await, LIMIT - STEP as u64);
        a.release(h).await.unwrap();
        a.release(other).await.unwrap();
        assert_eq!(used(&a, "v").await, LIMIT);
        // The leader is upgraded: when nothing is reserved any more, the client asks for owners again.
        lab.leader_knows_not(&[]);
        a.unlink(&root(), v.root, b"f").await.unwrap();
        a.unlink(&root(), v.root, b"g").await.unwrap();
        lab.world().node("a").clock.sleep(Duration::from_secs(5)).await;
        let holder = Holder { volume: v.id, kind: OwnerKind::User, id: 7 };
        a.set_owner_limit(&root(), holder, Some(quota(1_000_000, 0))).await.unwrap();
        let h = create(&a, v.root, "h").await;
        let ino = a.lookup(&root(), v.root, b"h").await.unwrap().unwrap().attr.ino;
        let given = SetAttrs { uid: Some(7), ..SetAttrs::default() };
        a.setattr(&root(), ino, Some(h), given).await.unwrap();
        assert_eq!(fill(&a, h, 0).await, 1_000_000);
    });
}

/// Users of one volume share its limit and that of their group, and each has a limit of its own; two clients
/// write for one user.
#[test]
fn limits_of_users_and_groups_hold_to_the_byte() {
    Lab::new(86).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let open_to_all = SetAttrs { mode: Some(0o777), ..SetAttrs::default() };
        a.setattr(&root(), v.root, None, open_to_all).await.unwrap();
        let user = |uid| Cred { uid, gid: 50, groups: vec![50] };
        let holder = |kind, id| Holder { volume: v.id, kind, id };
        let bytes = |n| Some(Quota { bytes_hard: Some(n), ..Quota::NONE });
        for (holder, max) in [
            (holder(OwnerKind::User, DEFAULT_ID), 2 * MIB),
            (holder(OwnerKind::User, 7), 4 * MIB),
            (holder(OwnerKind::Group, 50), 5 * MIB),
        ] {
            a.set_owner_limit(&root(), holder, bytes(max)).await.unwrap();
        }
        let file = |c: Client, uid, name: &'static str| async move {
            c.create(&user(uid), v.root, name.as_bytes(), 0o644, false, OpenMode::BOTH).await.unwrap().handle
        };
        let (h, g) = (file(a.clone(), 7, "a").await, file(b.clone(), 7, "b").await);
        assert_eq!(write(&b, g, 0, &[1; STEP]).await.unwrap(), STEP);
        let refused = async |c: &Client, h, offset| match write(c, h, offset, &[1; 1]).await {
            Err(e) if e.kind == ErrorKind::OverQuota => e.context,
            done => panic!("{done:?}"),
        };
        let end = fill(&a, h, 0).await;
        assert_eq!(end + STEP as u64, 4 * MIB, "both files of user 7");
        let why = refused(&a, h, end).await;
        assert!(why.contains("user 7 in volume \"v\" has") && why.contains("limit, 4194304"), "{why}");
        // The group's limit is the next one for user 8, whose own is that for all.
        let i = file(b.clone(), 8, "c").await;
        assert_eq!(fill(&b, i, 0).await, MIB);
        let why = refused(&b, i, MIB).await;
        assert!(why.contains("group 50 in volume"), "{why}");
        for (c, h) in [(&a, h), (&b, g), (&b, i)] {
            c.fsync(h).await.unwrap();
        }
        let rows = a.owner_usage(&root(), ListOf::Volume { volume: v.id }, None).await.unwrap().rows;
        let has: Vec<_> = rows.iter().filter(|r| r.bytes > 0).map(|r| (r.holder, r.bytes)).collect();
        assert_eq!(
            has,
            [
                (holder(OwnerKind::User, 7), 4 * MIB),
                (holder(OwnerKind::User, 8), MIB),
                (holder(OwnerKind::Group, 50), 5 * MIB),
            ]
        );
        // Uncommitted bytes go along with the file to another user, whose limit they count under.
        a.set_owner_limit(&root(), holder(OwnerKind::Group, 50), None).await.unwrap();
        let ino = b.lookup(&root(), v.root, b"c").await.unwrap().unwrap().attr.ino;
        assert_eq!(write(&b, i, MIB, &[2; STEP]).await.unwrap(), STEP);
        let owner = SetAttrs { uid: Some(9), ..SetAttrs::default() };
        b.setattr(&root(), ino, Some(i), owner).await.unwrap();
        let end = fill(&b, i, MIB + STEP as u64).await;
        assert_eq!(end, 2 * MIB);
        b.fsync(i).await.unwrap();
        let of = |id| ListOf::Owner { kind: OwnerKind::User, id };
        let page = b.owner_usage(&user(9), of(9), None).await.unwrap();
        let seen: Vec<_> = page.rows.iter().map(|r| (r.holder.volume, r.bytes, r.own)).collect();
        assert_eq!(seen, [(ALL_VOLUMES, 2 * MIB, false), (v.id, 2 * MIB, false)]);
        assert_eq!(b.owner_usage(&user(9), of(8), None).await.unwrap_err().kind, ErrorKind::Denied);
        // User 0 is held to no such limit, only to the volume's.
        let free = create(&a, v.root, "root's").await;
        assert_eq!(fill(&a, free, 0).await, LIMIT - 6 * MIB);
    });
}

/// Writes into space that `fallocate` reserved succeed although others fill the volume meanwhile; a refused
/// reservation takes nothing.
#[test]
fn reserved_bytes_can_be_written_when_the_volume_is_full() {
    Lab::new(80).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let (ha, hb) = (create(&a, v.root, "a").await, create(&b, v.root, "b").await);
        let kind = |done: Result<()>| done.unwrap_err().kind;
        assert_eq!(kind(a.fallocate(ha, Allocate::Extend, 0, 2 * LIMIT).await), ErrorKind::OverQuota);
        assert_eq!(kind(a.fallocate(ha, Allocate::Reserve, 5, 2 * LIMIT).await), ErrorKind::OverQuota);
        assert_eq!(used(&b, "v").await, 0);
        a.fallocate(ha, Allocate::Extend, 0, 4 * MIB).await.unwrap();
        a.fallocate(ha, Allocate::Extend, 4 * MIB, MIB).await.unwrap();
        a.fallocate(ha, Allocate::Reserve, 0, MIB).await.unwrap();
        assert_eq!(used(&b, "v").await, 5 * MIB, "what is reserved counts at once");
        assert_eq!(fill(&b, hb, 0).await, LIMIT - 5 * MIB);
        assert_eq!(fill(&a, ha, 0).await, 5 * MIB);
        a.fsync(ha).await.unwrap();
        b.fsync(hb).await.unwrap();
        assert_eq!(used(&b, "v").await, LIMIT);

        // A file that both write: in a turn, within the same limit.
        b.release(hb).await.unwrap();
        b.unlink(&root(), v.root, b"b").await.unwrap();
        let both = create(&b, v.root, "a").await;
        assert_eq!(kind(a.fallocate(ha, Allocate::Extend, 5 * MIB, LIMIT).await), ErrorKind::OverQuota);
        a.fallocate(ha, Allocate::Extend, 5 * MIB, 4 * MIB).await.unwrap();
        assert_eq!(used(&b, "v").await, 9 * MIB);
        let other = create(&b, v.root, "c").await;
        assert_eq!(fill(&b, other, 0).await, LIMIT - 9 * MIB);
        assert_eq!(write(&b, both, 5 * MIB, &[1; STEP]).await.unwrap(), STEP);
        assert_eq!(write(&a, ha, 9 * MIB - STEP as u64, &[2; STEP]).await.unwrap(), STEP);

        // Without limits nothing is reserved, but missing space is not promised.
        let out = create(&a, InodeId::ROOT, "out").await;
        lab.world().clock().sleep(Duration::from_secs(3)).await; // the targets have reported their usage
        assert_eq!(kind(a.fallocate(out, Allocate::Extend, 0, 1 << 45).await), ErrorKind::NoSpace);
        a.fallocate(out, Allocate::Extend, 0, MIB).await.unwrap();
    });
}

/// In a file with any holes: space that `fallocate` reserved can be written when others have filled the
/// volume, by this client and by another one; the usage is never above the limit.
#[test]
fn reserved_space_can_be_written_for_each_layout() {
    let layouts: [&[(u64, u64)]; 4] = [&[], &[(0, MIB)], &[(MIB, MIB)], &[(0, 100), (2 * MIB, 300_000)]];
    let ranges = [(0, MIB), (MIB / 2, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, MIB)];
    for shared in [false, true] {
        Lab::new(90).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let mut n = 0;
            for (layout, (offset, len)) in layouts.into_iter().flat_map(|l| ranges.map(|r| (l, r))) {
                for how in [Allocate::Extend, Allocate::Reserve] {
                    n += 1;
                    let what = format!("{how:?} of {len} at {offset} of {layout:?}");
                    let name = format!("v{n}");
                    let v = volume(&a, &name, quota(LIMIT, 0)).await;
                    let h = create(&a, v.root, "f").await;
                    let mut size = 0;
                    for (at, len) in layout {
                        assert_eq!(write(&a, h, *at, &vec![5; *len as usize]).await.unwrap(), *len as usize);
                        size = at + len;
                    }
                    let hb = if shared { Some(create(&b, v.root, "f").await) } else { None };
                    a.fallocate(h, how, offset, len).await.unwrap();
                    let other = create(&b, v.root, "fills").await;
                    fill(&b, other, 0).await;
                    b.release(other).await.unwrap();
                    assert_eq!(used(&b, &name).await, LIMIT, "{what}: all of it is used, or reserved");
                    let attr = a.lookup(&root(), v.root, b"f").await.unwrap().unwrap().attr;
                    let grown = if how == Allocate::Extend { size.max(offset + len) } else { size };
                    assert_eq!(attr.size, grown, "{what}");
                    let half = len as usize / 2;
                    assert_eq!(write(&a, h, offset, &vec![6; half]).await.unwrap(), half, "{what}");
                    a.fsync(h).await.unwrap();
                    let (c, hc) = match hb {
                        Some(hb) => (&b, hb),
                        None => {
                            a.release(h).await.unwrap();
                            (&b, b.open(&root(), attr.ino, OpenMode::BOTH).await.unwrap().handle)
                        }
                    };
                    let rest = offset + half as u64;
                    let written = write(c, hc, rest, &vec![7; len as usize - half]).await.unwrap();
                    assert_eq!(written, len as usize - half, "{what}");
                    c.release(hc).await.unwrap();
                    assert_eq!(used(&b, &name).await, LIMIT, "{what}");
                    // A truncation frees what was reserved past the end.
                    let set = SetAttrs { size: Some(1000), ..SetAttrs::default() };
                    b.setattr(&root(), attr.ino, None, set).await.unwrap();
                    let taken = b.lookup(&root(), v.root, b"f").await.unwrap().unwrap().attr.allocated;
                    assert!(taken <= 1000, "{what}: {taken}");
                }
            }
        });
    }
}

/// A hole that is punched counts no more and takes no space at any target, also at one that is away
/// meanwhile; it reads as zeros with any two of the targets gone.
#[test]
fn a_punched_hole_takes_no_space() {
    let (stripe, cell) = (STRIPE as u64, CELL as u64);
    let size = 9 * stripe + 3 * cell + 5000;
    // From the middle of a cell to the middle of another; whole stripes; one cell; up to the end of the file
    // and past it.
    let ranges = [
        (stripe + 100, 4 * stripe + cell + 7, 3 * stripe),
        (2 * stripe, 6 * stripe, 4 * stripe),
        (3 * stripe + cell, 3 * stripe + 2 * cell, cell),
        (7 * stripe, size + stripe, size - 7 * stripe),
    ];
    for down in [None, Some(1), Some(5)] {
        Lab::new(79).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let v = volume(&a, "v", quota(1 << 30, 0)).await;
            let mut files = Vec::new();
            for n in 0..ranges.len() {
                let h = create(&a, v.root, &format!("f{n}")).await;
                let data = pattern(n as u64, 0, size as usize);
                for (n, part) in data.chunks(STRIPE).enumerate() {
                    assert_eq!(write(&a, h, n as u64 * stripe, part).await.unwrap(), part.len());
                }
                a.fsync(h).await.unwrap();
                files.push((h, data));
            }
            let on_targets = async || {
                lab.world().clock().sleep(Duration::from_secs(5)).await; // until they have reported it
                a.statfs().await.unwrap().used_bytes
            };
            let before = on_targets().await;
            let mut counted = ranges.len() as u64 * size;
            assert_eq!(used(&b, "v").await, counted);
            if let Some(n) = down {
                lab.kill_storage(n);
            }
            for ((h, data), (from, to, freed)) in files.iter_mut().zip(ranges) {
                a.fallocate(*h, Allocate::PunchHole, from, to - from).await.unwrap();
                data[from as usize..to.min(size) as usize].fill(0);
                counted -= freed;
                assert_eq!(used(&b, "v").await, counted, "{from} to {to}");
            }
            // In a file with holes only bytes that are surely gone are subtracted.
            for (from, freed) in [(2 * stripe, 0), (7 * stripe, stripe)] {
                a.fallocate(files[1].0, Allocate::PunchHole, from, stripe).await.unwrap();
                counted -= freed;
                assert_eq!(used(&b, "v").await, counted, "from {from} on");
            }
            files[1].1[7 * STRIPE..8 * STRIPE].fill(0);
            for (h, _) in &files {
                a.release(*h).await.unwrap();
            }
            if let Some(n) = down {
                lab.storage(n).await;
                lab.all_current().await.unwrap();
            }
            let left = on_targets().await;
            assert!(left + 9 * stripe < before, "{left} bytes are used of {before}");
            let mut opened = Vec::new();
            for n in 0..ranges.len() {
                let found = b.lookup(&root(), v.root, format!("f{n}").as_bytes()).await.unwrap().unwrap();
                opened.push(b.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle);
            }
            assert_eq!(b.seek_hole(opened[1], stripe).await.unwrap(), Some(2 * stripe));
            assert_eq!(b.seek_data(opened[1], 2 * stripe).await.unwrap(), Some(6 * stripe));
            lab.kill_storage(0);
            lab.kill_storage(4);
            for (n, (h, (_, data))) in opened.into_iter().zip(files).enumerate() {
                let read = b.read(h, 0, size as usize + 1).await.unwrap().concat();
                assert!(read == data, "file {n}, {down:?}: what is read is not what is there");
            }
        });
    }
}

#[test]
fn two_clients_together_stay_within_a_limit() {
    Lab::new(82).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let (ha, hb) = (create(&a, v.root, "a").await, create(&b, v.root, "b").await);
        let (mut at, mut bt, mut refused) = (0, 0, [false; 2]);
        while refused != [true; 2] {
            for (n, (c, h, at)) in [(&a, ha, &mut at), (&b, hb, &mut bt)].into_iter().enumerate() {
                match write(c, h, *at, &pattern(*at, 0, STEP)).await {
                    Ok(written) => *at += written as u64,
                    Err(e) => {
                        assert_eq!(e.kind, ErrorKind::OverQuota, "{e}");
                        refused[n] = true;
                    }
                }
            }
            assert!(at + bt <= LIMIT);
        }
        // The unused reservation of one client went to the other.
        assert_eq!(at + bt, LIMIT);
        a.fsync(ha).await.unwrap();
        b.fsync(hb).await.unwrap();
        assert_eq!(used(&a, "v").await, LIMIT);
        // One file, both append to it.
        a.unlink(&root(), v.root, b"a").await.unwrap();
        let (sa, sb) = (create(&a, v.root, "shared").await, create(&b, v.root, "shared").await);
        let (mut sum, mut refused) = (0, [false; 2]);
        while refused != [true; 2] {
            for (n, (c, h)) in [(&a, sa), (&b, sb)].into_iter().enumerate() {
                match c.append(h, Bytes::from(pattern(sum, 0, STEP))).await {
                    Ok(written) => sum += written as u64,
                    Err(e) => {
                        assert_eq!(e.kind, ErrorKind::OverQuota, "{e}");
                        refused[n] = true;
                    }
                }
            }
        }
        assert_eq!(sum, LIMIT - bt);
        a.fsync(sa).await.unwrap();
        b.fsync(sb).await.unwrap();
        assert_eq!(used(&a, "v").await, LIMIT);
    });
}

#[test]
fn a_restart_of_the_leader_forgets_no_grant() {
    Lab::new(83).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let (ha, hb) = (create(&a, v.root, "a").await, create(&b, v.root, "b").await);
        // Not committed when the leader dies.
        let mut at = 0;
        while at < 6 * MIB {
            at += write(&a, ha, at, &pattern(at, 0, STEP)).await.unwrap() as u64;
        }
        lab.kill_meta();
        lab.meta().await;
        let bt = fill(&b, hb, 0).await;
        assert!(at + bt <= LIMIT, "{at} + {bt}");
        a.fsync(ha).await.unwrap();
        b.fsync(hb).await.unwrap();
        let at = fill(&a, ha, at).await;
        assert_eq!(at + bt, LIMIT);
        a.fsync(ha).await.unwrap();
        assert_eq!(used(&a, "v").await, LIMIT);
    });
}

#[test]
fn a_limit_set_later_holds_for_files_that_are_open() {
    Lab::new(84).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let v = volume(&a, "v", quota(0, 0)).await;
        let h = create(&a, v.root, "f").await;
        let at = write(&a, h, 0, &vec![3; 3 << 20]).await.unwrap() as u64;
        let set = |q| VolumeEdit { quota: Some(q), ..VolumeEdit::default() };
        b.change_volume(&root(), v.id, &set(quota(LIMIT, 0))).await.unwrap();
        assert_eq!(fill(&a, h, at).await, LIMIT);
        // Lowered below the usage: nothing more; raised: again; removed: no limit.
        b.change_volume(&root(), v.id, &set(quota(MIB, 0))).await.unwrap();
        assert_eq!(write(&a, h, LIMIT, b"x").await.unwrap_err().kind, ErrorKind::OverQuota);
        b.change_volume(&root(), v.id, &set(quota(LIMIT + MIB, 0))).await.unwrap();
        assert_eq!(fill(&a, h, LIMIT).await, LIMIT + MIB);
        b.change_volume(&root(), v.id, &set(quota(0, 0))).await.unwrap();
        assert_eq!(write(&a, h, LIMIT + MIB, &vec![3; 3 << 20]).await.unwrap(), 3 << 20);
        a.fsync(h).await.unwrap();
        assert_eq!(used(&b, "v").await, LIMIT + 4 * MIB);
    });
}

#[test]
fn a_limit_of_inodes_and_soft_limits_hold() {
    Lab::new(85).run(6, |lab| async move {
        let a = lab.client("a").await;
        let soft = Quota { bytes_soft: Some(MIB), ..quota(LIMIT, 3) };
        let v = volume(&a, "v", soft).await;
        let h = create(&a, v.root, "f1").await;
        let dir = a.mkdir(&root(), v.root, b"d", 0o755).await.unwrap().attr.ino;
        a.symlink(&root(), dir, b"s", b"to").await.unwrap();
        let over = |e: weir_proto::Error| assert_eq!(e.kind, ErrorKind::OverQuota, "{e}");
        over(a.mkdir(&root(), dir, b"x", 0o755).await.unwrap_err());
        over(a.create(&root(), dir, b"x", 0o644, true, OpenMode::BOTH).await.map(|_| ()).unwrap_err());
        let f1 = a.lookup(&root(), v.root, b"f1").await.unwrap().unwrap().attr.ino;
        a.link(&root(), f1, dir, b"a second name is no second inode").await.unwrap();
        a.unlink(&root(), dir, b"s").await.unwrap();
        create(&a, dir, "x").await;
        // Above the soft limit for as long as the grace lasts.
        assert_eq!(write(&a, h, 0, &vec![1; 2 << 20]).await.unwrap(), 2 << 20);
        a.fsync(h).await.unwrap();
        assert!(a.volume("v").await.unwrap().bytes_over_since.is_some());
        let clock = lab.env("watch").clock;
        clock.sleep(std::time::Duration::from_secs(30)).await;
        assert_eq!(write(&a, h, 2 << 20, &[1; 10]).await.unwrap(), 10);
        a.fsync(h).await.unwrap();
        clock.sleep(std::time::Duration::from_secs(31)).await;
        over(write(&a, h, (2 << 20) + 10, &[1; 10]).await.unwrap_err());
        let truncate = SetAttrs { size: Some(1000), ..SetAttrs::default() };
        a.setattr(&root(), f1, Some(h), truncate).await.unwrap();
        assert!(a.volume("v").await.unwrap().bytes_over_since.is_none());
        assert_eq!(write(&a, h, 1000, &vec![1; 2 << 20]).await.unwrap(), 2 << 20);
    });
}

/// The leader takes longer to grant a reservation than an unused one is kept: a late one is granted all the
/// same.
#[test]
fn late_quota_is_granted() {
    Lab::new(89).run(6, |lab| async move {
        let a = lab.client("a").await;
        let v = volume(&a, "v", quota(LIMIT, 0)).await;
        let h = create(&a, v.root, "f").await;
        lab.world().slow_link("a", "meta", std::time::Duration::from_millis(1_200));
        assert_eq!(write(&a, h, 0, &[7; STEP]).await.unwrap(), STEP);
    });
}
