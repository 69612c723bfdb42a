//! Claim: a write that one full target refuses changes nothing, for any reader.
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_client::{Client, Handle, NoKernel, OpenMode, SetAttrs};
use weir_lab::*;
use weir_proto::map::ClusterMap;
use weir_proto::relation::What;
use weir_proto::{ErrorKind, InodeId, TargetId, VolumeId};

/// Enough for the index; the rest is less than a step of a slab.
const FULL_BYTES: u64 = 10 << 20;
const ENOUGH_BYTES: u64 = 1 << 30;

async fn create(c: &Client) -> Handle {
    c.create(&root(), InodeId::ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap().handle
}
async fn write(c: &Client, h: Handle, offset: usize, data: &[u8]) {
    let done = match c.try_write(h, offset as u64, data) {
        Some(done) => done,
        None => c.write(h, offset as u64, Bytes::copy_from_slice(data)).await,
    };
    assert_eq!(done.unwrap(), data.len());
}
/// The whole file as a client that knows nothing of it sees it.
async fn content(lab: &Lab, reader: &str) -> Vec<u8> {
    let c = lab.client(reader).await;
    let found = c.lookup(&root(), InodeId::ROOT, b"f").await.unwrap().expect("the name exists");
    let h = c.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
    let bytes = c.read(h, 0, 1 << 30).await.unwrap().concat();
    c.release(h).await.unwrap();
    c.shutdown().await.unwrap();
    bytes
}
/// A failed write may have made the file longer, by zeros.
fn is_same(got: &[u8], expected: &[u8]) -> bool {
    got.starts_with(expected) && got[expected.len()..].iter().all(|b| *b == 0)
}
/// Also without any one of the targets.
async fn is_everywhere(lab: &Lab, expected: &[u8], when: &str) {
    assert!(is_same(&content(lab, &format!("{when} reader")).await, expected), "{when}");
    for n in 0..6 {
        lab.kill_storage(n);
        let got = content(lab, &format!("{when} reader without {n}")).await;
        assert!(is_same(&got, expected), "{when}, without target {n}");
        lab.storage(n).await;
        lab.all_current().await.unwrap();
    }
}

#[test]
fn a_larger_write_that_fails_leaves_a_small_files_bytes() {
    let lab = Lab::new(71);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a).await;
        let small = pattern(1, 0, 2338);
        write(&a, h, 0, &small).await;
        a.fsync(h).await.unwrap();
        write(&a, h, small.len(), &pattern(2, small.len(), 2 * STRIPE)).await;
        assert_eq!(a.fsync(h).await.unwrap_err().kind, ErrorKind::NoSpace);
        let now = content(&lab, "b").await;
        assert!(now.starts_with(&small), "what was synced is lost");
        lab.world().set_disk_capacity("s1", ENOUGH_BYTES);
        let large = pattern(3, 0, 3 * STRIPE + 99);
        write(&a, h, 0, &large).await;
        a.fsync(h).await.unwrap();
        is_everywhere(&lab, &large, "with space again").await;
    });
}

#[test]
fn a_write_that_a_full_target_refuses_is_nowhere() {
    let lab = Lab::new(72);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a).await;
        // Little by little it goes where the index has room.
        let mut bytes = Vec::new();
        for n in 0..10 {
            let some = pattern(n, bytes.len(), 10_000);
            write(&a, h, bytes.len(), &some).await;
            bytes.extend(some);
            a.fsync(h).await.unwrap();
        }
        is_everywhere(&lab, &bytes, "before").await;
        // Over existing bytes, and a stripe that was empty.
        for offset in [0, STRIPE] {
            let refused = pattern(20, offset, STRIPE);
            write(&a, h, offset, &refused).await;
            assert_eq!(a.fsync(h).await.unwrap_err().kind, ErrorKind::NoSpace);
            is_everywhere(&lab, &bytes, &format!("after a refusal at {offset}")).await;
        }
        let size = (2 * STRIPE) as u64;
        let found = a.lookup(&root(), InodeId::ROOT, b"f").await.unwrap().expect("the name exists");
        let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
        a.setattr(&root(), found.attr.ino, None, set).await.unwrap();
        bytes.resize(size as usize, 0);
        is_everywhere(&lab, &bytes, "extended").await;
    });
}

/// Some cells took their part, one refused. The bytes that the writer fetched around its changes are old, and
/// its written bytes are lost.
#[test]
fn a_writer_reads_what_its_failed_write_left() {
    let lab = Lab::new(73);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        for name in ["f0", "f1", "f2", "f3", "f4", "f5"] {
            let cred = root();
            let made =
                a.create(&cred, InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
            let ino = made.stat.attr.ino;
            for n in 0..3 {
                write(&a, made.handle, n * 10_000, &pattern(1, n * 10_000, 10_000)).await;
                a.fsync(made.handle).await.unwrap();
            }
            a.release(made.handle).await.unwrap();
            let h = b.open(&cred, ino, OpenMode::BOTH).await.unwrap().handle;
            write(&b, h, 15_405, &pattern(2, 15_405, STRIPE - 20_000)).await;
            assert_eq!(b.read(h, 0, 100).await.unwrap().concat(), pattern(1, 0, 100));
            assert_eq!(b.fsync(h).await.unwrap_err().kind, ErrorKind::NoSpace, "{name}");
            let own = b.read(h, 0, 1 << 20).await.unwrap().concat();
            let of_c = c.open(&cred, ino, OpenMode::READ).await.unwrap().handle;
            let others = c.read(of_c, 0, 1 << 20).await.unwrap().concat();
            let (short, long) = if own.len() < others.len() { (&own, &others) } else { (&others, &own) };
            assert!(is_same(long, short), "{name} is another file to who wrote it");
            c.release(of_c).await.unwrap();
            b.release(h).await.unwrap();
        }
    });
}

/// A write returns the error of an earlier one, but that may not reach the program: the kernel sends a long
/// `write(2)` in parts, and if the first ones succeeded it returns how many bytes they took.
#[test]
fn a_write_error_is_also_returned_by_fsync_and_close() {
    let lab = Lab::new(74);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(6, |lab| async move {
        // Little memory, so that the error comes after few bytes.
        let a = lab.client_with("a", 16 << 20, Arc::new(NoKernel)).await;
        let h = create(&a).await;
        let mut at = 0;
        let error = loop {
            let data = pattern(1, at, STRIPE);
            if let Err(e) = a.write(h, at as u64, Bytes::from(data)).await {
                break e;
            }
            at += STRIPE;
        };
        assert_eq!(error.kind, ErrorKind::NoSpace);
        let again = a.write(h, at as u64, Bytes::from_static(b"more")).await;
        assert_eq!(again.unwrap_err().kind, ErrorKind::NoSpace, "until somebody has been told for certain");
        assert_eq!(a.flush(h).await.unwrap_err().kind, ErrorKind::NoSpace, "a close of a copy");
        assert_eq!(a.fsync(h).await.unwrap_err().kind, ErrorKind::NoSpace, "and an fsync behind it");
        lab.world().set_disk_capacity("s1", ENOUGH_BYTES);
        let bytes = pattern(2, 0, at + STRIPE);
        write(&a, h, 0, &bytes).await;
        a.fsync(h).await.unwrap();
        a.flush(h).await.unwrap();
        is_everywhere(&lab, &bytes, "with space again").await;
    });
}

/// Home gets the reported bytes only, and these are recalled after an eviction.
#[test]
fn bytes_left_below_the_size_by_a_failed_write_are_reported() {
    let lab = Lab::new(75);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        a.acknowledge(&root(), VolumeId::ROOT, "test", 0).await.unwrap();
        for (name, is_shared) in [("alone", false), ("shared", true)] {
            let size = if is_shared { 6 * STRIPE } else { 30 * STRIPE };
            let cred = root();
            let made =
                a.create(&cred, InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
            let (ino, h) = (made.stat.attr.ino, made.handle);
            let set = SetAttrs { size: Some(size as u64), ..SetAttrs::default() };
            a.setattr(&cred, ino, None, set).await.unwrap();
            if is_shared {
                b.open(&cred, ino, OpenMode::BOTH).await.unwrap();
            }
            // Little of each stripe if it is alone: whole ones are refused as a whole.
            let step = if is_shared { size } else { 2 * CELL };
            let len = if is_shared { size - 198 } else { 20_000 };
            let mut wrote = Ok(0);
            for at in (99..size).step_by(step) {
                wrote = wrote.and(a.write(h, at as u64, Bytes::from(pattern(1, at, len))).await);
            }
            let synced = a.fsync(h).await;
            assert_eq!(wrote.map(drop).and(synced).unwrap_err().kind, ErrorKind::NoSpace, "{name}");
            a.release(h).await.unwrap();
            let of_c = c.open(&cred, ino, OpenMode::READ).await.unwrap().handle;
            let left = c.read(of_c, 0, size).await.unwrap().concat();
            let changes = c.changes(&cred, VolumeId::ROOT, None, 0, Duration::ZERO).await.unwrap().changes;
            let is_reported = |byte: u64| {
                changes.iter().any(|named| {
                    matches!(named.change.what, What::Data { ino: of, offset, len }
                        if of == ino && (offset..offset + len).contains(&byte))
                })
            };
            let there: Vec<u64> = (0..size as u64).filter(|at| left[*at as usize] != 0).collect();
            assert!(!there.is_empty(), "{name}: nothing was left");
            let unreported = there.into_iter().find(|at| !is_reported(*at));
            assert_eq!(unreported, None, "{name}");
        }
    });
}

/// The place goes to the seventh target while the write waits.
#[test]
fn a_file_grows_once_a_full_targets_place_has_moved() {
    let lab = Lab::new(77);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(7, |lab| async move {
        let (a, cluster) = (lab.client("a").await, lab.observe().await);
        let h = create(&a).await;
        let data = pattern(1, 0, 9 * STRIPE);
        write(&a, h, 0, &data).await;
        let found = a.lookup(&root(), InodeId::ROOT, b"f").await.unwrap().expect("the name exists");
        let layout = found.attr.layout.expect("it has stripes");
        let on_full = |map: &ClusterMap| {
            let groups = (0..9).map(|stripe| map.group(layout.pg_of_stripe(stripe)).unwrap().clone());
            groups.filter(|g| g.members.iter().any(|m| m.target == TargetId(2))).count()
        };
        assert!(on_full(&cluster.map()) > 0, "the test is of no use without");
        a.fsync(h).await.unwrap();
        assert_eq!(on_full(&cluster.map()), 0);
        assert!(content(&lab, "b").await == data);
    });
}

/// Pieces that are too large for the index, into files that have something already: alone, and beside another
/// writer.
#[test]
fn small_overwrites_wait_for_a_full_targets_place() {
    let lab = Lab::new(79);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(7, |lab| async move {
        let (a, b, cluster) = (lab.client("a").await, lab.client("b").await, lab.observe().await);
        let on_full = |map: &ClusterMap| {
            map.groups.iter().filter(|g| g.members.iter().any(|m| m.target == TargetId(2))).count()
        };
        let before = on_full(&cluster.map());
        for n in 0..8_u64 {
            let name = format!("f{n}");
            let made =
                a.create(&root(), InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
            let (h, ino) = (made.handle, made.stat.attr.ino);
            let mut bytes = pattern(n, 0, 10_000);
            write(&a, h, 0, &bytes).await;
            a.fsync(h).await.unwrap();
            let other = match n % 2 {
                0 => None,
                _ => Some(b.open(&root(), ino, OpenMode::BOTH).await.unwrap().handle),
            };
            let part = pattern(n + 20, 5000, 20_000);
            write(&a, h, 5000, &part).await;
            a.fsync(h).await.unwrap_or_else(|e| panic!("{name}: {e}"));
            bytes.truncate(5000);
            bytes.extend(part);
            if let Some(other) = other {
                let part = pattern(n + 40, 30_000, 20_000);
                write(&b, other, 30_000, &part).await;
                b.fsync(other).await.unwrap_or_else(|e| panic!("{name} beside another writer: {e}"));
                bytes.resize(30_000, 0);
                bytes.extend(part);
            }
            let read = b.open(&root(), ino, OpenMode::READ).await.unwrap().handle;
            assert!(b.read(read, 0, 1 << 20).await.unwrap().concat() == bytes, "{name}");
        }
        let after = on_full(&cluster.map());
        assert!(after < before, "{before} groups had a place on the full target, {after} have one");
    });
}

/// Nothing is outside the group: the error names the target, and why its place stays.
#[test]
fn a_refusal_names_the_full_target() {
    let lab = Lab::new(78);
    lab.world().set_disk_capacity("s1", FULL_BYTES);
    lab.run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a).await;
        write(&a, h, 0, &pattern(1, 0, STRIPE)).await;
        let refused = a.fsync(h).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NoSpace);
        for word in ["t2 (s1) refuses it", "cannot move: there is no target to take its place"] {
            assert!(refused.context.contains(word), "{refused}");
        }
    });
}
