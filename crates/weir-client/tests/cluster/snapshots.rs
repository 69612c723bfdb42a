//! Claims: the file data in a snapshot never changes, with any later writes by any client; the files
//! themselves read as without a snapshot.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Allocate, Client, Handle, OpenMode, SetAttrs};
use weir_lab::files::{create, differs, read, write};
use weir_lab::{CELL, Lab, STRIPE, pattern, root};
use weir_proto::{InodeId, VolumeId};

const V: VolumeId = VolumeId::ROOT;
/// Files that a client has open in addition to the one that is checked.
const OTHER_OPEN_FILES: usize = 20;

async fn open(c: &Client, ino: InodeId) -> Handle {
    c.open(&root(), ino, OpenMode::BOTH).await.unwrap().handle
}
async fn then(c: &Client, snapshot: u32, name: &str) -> Vec<u8> {
    let attr = c.snapshot_lookup(&root(), snapshot, InodeId::ROOT, name.as_bytes()).await.unwrap().unwrap();
    let file = c.snapshot_open(&root(), snapshot, attr.ino).await.unwrap();
    c.snapshot_read(&file, 0, attr.size as usize + 1000).await.unwrap().concat()
}
async fn snap(c: &Client, name: &str) -> u32 {
    c.take_snapshot(&root(), V, name).await.unwrap().number
}

#[test]
fn later_writes_do_not_change_a_file_in_a_snapshot() {
    let lab = Lab::new(71);
    lab.run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (ino, h) = create(&a, "f").await;
        let old = pattern(1, 0, 3 * STRIPE + 5000);
        write(&a, h, 0, &old).await;
        a.fsync(h).await.unwrap();
        let s = snap(&b, "s").await;
        let mut now = old.clone();
        for (n, (at, len)) in
            [(10, 100), (STRIPE + CELL / 2, 2 * CELL), (STRIPE * 2, STRIPE), (3 * STRIPE + 4000, 9000)]
                .into_iter()
                .enumerate()
        {
            let data = pattern(10 + n as u64, at, len);
            write(&a, h, at, &data).await;
            now.resize(now.len().max(at + len), 0);
            now[at..at + len].copy_from_slice(&data);
            assert_eq!(differs(&read(&a, h, now.len() + 1).await, &now), None, "write {n}");
            assert_eq!(differs(&then(&b, s, "f").await, &old), None, "write {n}");
        }
        a.fsync(h).await.unwrap();
        a.release(h).await.unwrap();
        let other = open(&b, ino).await;
        assert_eq!(differs(&read(&b, other, now.len() + 1).await, &now), None, "elsewhere");
        // A hole, a cut, and growth over what was cut.
        b.fallocate(other, Allocate::PunchHole, STRIPE as u64, CELL as u64).await.unwrap();
        now[STRIPE..STRIPE + CELL].fill(0);
        assert_eq!(differs(&read(&b, other, now.len()).await, &now), None, "a hole");
        for size in [2 * STRIPE + 777, 100, 0, STRIPE] {
            let set = SetAttrs { size: Some(size as u64), ..SetAttrs::default() };
            b.setattr(&root(), ino, Some(other), set).await.unwrap();
            now.resize(size, 0);
            assert_eq!(differs(&read(&b, other, size + 1).await, &now), None, "cut to {size}");
            assert_eq!(differs(&then(&a, s, "f").await, &old), None, "cut to {size}");
        }
        b.release(other).await.unwrap();
        b.unlink(&root(), InodeId::ROOT, b"f").await.unwrap();
        lab.env("a").clock.sleep(Duration::from_secs(5)).await; // of the world: the sweeper has its time
        assert_eq!(differs(&then(&a, s, "f").await, &old), None, "removed");
    });
}

#[test]
fn each_of_several_snapshots_shows_its_own_time_and_goes_alone() {
    let lab = Lab::new(72);
    lab.run(6, |lab| async move {
        let a = lab.client("a").await;
        let (_, h) = create(&a, "f").await;
        let mut now = pattern(1, 0, 4 * STRIPE);
        write(&a, h, 0, &now).await;
        let mut taken = Vec::new();
        for n in 0..5u64 {
            let name = format!("s{n}");
            taken.push((snap(&a, &name).await, name, now.clone()));
            let at = (n as usize * 3 * CELL + 1234) % (3 * STRIPE);
            let data = pattern(100 + n, at, CELL + 999);
            write(&a, h, at, &data).await;
            now[at..at + data.len()].copy_from_slice(&data);
        }
        for gone in [2, 0, 1, 1, 0] {
            for (number, name, old) in &taken {
                assert_eq!(differs(&then(&a, *number, "f").await, old), None, "{name}");
            }
            assert_eq!(differs(&read(&a, h, now.len() + 1).await, &now), None);
            let (number, name, _) = taken.remove(gone);
            a.delete_snapshot(&root(), V, &name).await.unwrap();
            lab.env("a").clock.sleep(Duration::from_secs(3)).await; // of the world: it is removed and swept
            assert!(a.snapshot_attr(number, InodeId::ROOT).await.is_err());
        }
        assert_eq!(differs(&read(&a, h, now.len() + 1).await, &now), None);
    });
}

/// Seed 486017: a tree is removed in which a client has files open, small ones and some with bytes in two
/// objects.
#[test]
fn closing_removed_files_changes_nothing_in_a_snapshot() {
    let lab = Lab::new(79);
    lab.run(6, |lab| async move {
        let a = lab.client("a").await;
        let dir = a.mkdir(&root(), InodeId::ROOT, b"d", 0o755).await.unwrap().attr.ino;
        let mut files = Vec::new();
        for (name, mut bytes) in [("small", b"before".to_vec()), ("large", pattern(1, 0, 3 * STRIPE))] {
            let made = a.create(&root(), dir, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
            write(&a, made.handle, 0, &bytes).await;
            a.fsync(made.handle).await.unwrap();
            a.set_xattr(&root(), made.stat.attr.ino, b"user.mark", b"kept", true, false).await.unwrap();
            bytes[..2].copy_from_slice(b"it");
            files.push((made, bytes));
        }
        snap(&a, "earlier").await;
        for (made, bytes) in &files {
            write(&a, made.handle, 0, &bytes[..2]).await;
            a.fsync(made.handle).await.unwrap();
        }
        let s = snap(&a, "s").await;
        a.unlink(&root(), dir, b"small").await.unwrap();
        a.unlink(&root(), dir, b"large").await.unwrap();
        a.rmdir(&root(), InodeId::ROOT, b"d").await.unwrap();
        for (made, bytes) in files {
            write(&a, made.handle, 1, b"later").await;
            a.release(made.handle).await.unwrap();
            lab.env("a").clock.sleep(Duration::from_secs(5)).await; // of the world: the sweeper has its time
            let ino = made.stat.attr.ino;
            let file = a.snapshot_open(&root(), s, ino).await.unwrap();
            let got = a.snapshot_read(&file, 0, bytes.len() + 1).await.unwrap().concat();
            assert_eq!(differs(&got, &bytes), None, "inode {ino}");
            assert_eq!(&a.snapshot_get_xattr(s, ino, b"user.mark").await.unwrap()[..], b"kept");
        }
    });
}

/// A reader of the file in the snapshot has fenced its object, which stays the file's.
#[test]
fn a_file_is_written_after_its_snapshot_was_removed() {
    for shared in [false, true] {
        let lab = Lab::new(78);
        lab.run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let (ino, h) = create(&a, "f").await;
            let _other = if shared { Some(open(&b, ino).await) } else { None };
            let mut now = pattern(1, 0, 2 * STRIPE);
            write(&a, h, 0, &now).await;
            let number = snap(&a, "s").await;
            assert_eq!(differs(&then(&b, number, "f").await, &now), None);
            a.delete_snapshot(&root(), V, "s").await.unwrap();
            lab.env("a").clock.sleep(Duration::from_secs(3)).await; // of the world: it is removed and swept
            let data = pattern(2, 1234, STRIPE);
            write(&a, h, 1234, &data).await;
            now[1234..1234 + data.len()].copy_from_slice(&data);
            a.fsync(h).await.unwrap();
            assert_eq!(differs(&read(&a, h, now.len() + 1).await, &now), None);
        });
    }
}

#[test]
fn a_snapshot_has_all_earlier_writes_and_no_later_one() {
    let lab = Lab::new(73);
    lab.run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        // Not synced, not closed, small and large.
        let (_, small) = create(&a, "small").await;
        write(&a, small, 0, b"before").await;
        let (_, large) = create(&a, "large").await;
        let old = pattern(3, 0, STRIPE + 77);
        write(&a, large, 0, &old).await;
        // Written by two at once, straight through.
        let (shared, by_a) = create(&a, "shared").await;
        let by_b = open(&b, shared).await;
        write(&a, by_a, 0, &old[..2 * CELL]).await;
        write(&b, by_b, 2 * CELL, &old[2 * CELL..]).await;
        let s = snap(&c, "s").await;
        write(&a, small, 0, b"after!").await;
        write(&a, large, 0, &pattern(4, 0, 100)).await;
        write(&a, by_a, 5, b"AAAA").await;
        write(&b, by_b, CELL, b"BBBB").await;
        assert_eq!(then(&c, s, "small").await, b"before");
        assert_eq!(differs(&then(&c, s, "large").await, &old), None);
        assert_eq!(differs(&then(&c, s, "shared").await, &old), None);
        let mut now = old.clone();
        now[5..9].copy_from_slice(b"AAAA");
        now[CELL..CELL + 4].copy_from_slice(b"BBBB");
        for (client, h) in [(&a, by_a), (&b, by_b)] {
            assert_eq!(differs(&read(client, h, now.len() + 1).await, &now), None);
        }
        let end = b.append(by_b, Bytes::from_static(b"more")).await.unwrap();
        assert_eq!(end, 4);
        now.extend_from_slice(b"more");
        assert_eq!(differs(&read(&a, by_a, now.len() + 1).await, &now), None);
        assert_eq!(differs(&then(&c, s, "shared").await, &old), None);
    });
}

#[test]
fn a_writer_that_dies_while_it_copies_leaves_both_as_they_were() {
    for kill_after_ms in [1, 2, 3, 5, 8, 13, 21] {
        let lab = Lab::with(74 + kill_after_ms, "ec:4+2", 1000);
        lab.run(6, |lab| async move {
            let b = lab.client("b").await;
            let (ino, h) = create(&b, "f").await;
            let old = pattern(5, 0, 3 * STRIPE);
            write(&b, h, 0, &old).await;
            b.release(h).await.unwrap();
            let s = snap(&b, "s").await;
            let a = lab.client("a").await;
            let h = open(&a, ino).await;
            let work = async {
                for stripe in 0..3 {
                    write(&a, h, stripe * STRIPE + 50, b"new").await;
                    drop(a.fsync(h).await);
                }
            };
            let _ = lab.env("b").clock.timeout(Duration::from_millis(kill_after_ms), work).await; // it dies in the middle
            lab.world().kill("a");
            let h = open(&b, ino).await;
            let now = read(&b, h, old.len() + 1).await;
            for stripe in 0..3 {
                let (from, to) = (stripe * STRIPE, (stripe + 1) * STRIPE);
                let mut new = old[from..to].to_vec();
                new[50..53].copy_from_slice(b"new");
                let is = &now[from..to];
                assert!(
                    differs(is, &old[from..to]).is_none() || differs(is, &new).is_none(),
                    "stripe {stripe}"
                );
            }
            assert_eq!(differs(&then(&b, s, "f").await, &old), None);
            write(&b, h, STRIPE, b"again").await;
            assert_eq!(&read(&b, h, STRIPE + 5).await[STRIPE..], b"again");
            assert_eq!(differs(&then(&b, s, "f").await, &old), None);
        });
    }
}

/// The copy has all of the file of before the cut, and does not count any more.
#[test]
fn a_truncation_during_a_layer_copy_leaves_nothing_past_the_end() {
    let lab = Lab::new(73);
    lab.run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let clock = lab.world().clock();
        for round in 0..60 {
            let (ino, by_a) = create(&a, &format!("f{round}")).await;
            write(&a, by_a, 0, &pattern(7, 0, 9000)).await;
            a.fsync(by_a).await.unwrap();
            snap(&b, &format!("s{round}")).await;
            let by_b = open(&b, ino).await;
            let size = |size| SetAttrs { size: Some(size), ..SetAttrs::default() };
            let truncate_and_grow = async {
                clock.sleep(Duration::from_micros(round * 50)).await;
                b.setattr(&root(), ino, Some(by_b), size(5000)).await.unwrap();
                b.setattr(&root(), ino, Some(by_b), size(6000)).await.unwrap();
                read(&b, by_b, 6000).await.split_off(5000)
            };
            let (grown, ()) = tokio::join!(truncate_and_grow, write(&a, by_a, 100, b"new"));
            assert_eq!(differs(&grown, &[0; 1000]), None, "round {round}");
            a.release(by_a).await.unwrap();
            b.release(by_b).await.unwrap();
        }
    });
}

/// When its snapshot is gone, an older object is dropped as soon as all of it is copied, also while a client
/// reads there.
#[test]
fn reads_during_the_copy_of_a_layer_see_the_bytes() {
    let lab = Lab::new(79);
    lab.run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let clock = lab.world().clock();
        for target in 0..6 {
            lab.world().slow_link("a", &format!("s{target}"), Duration::from_millis(5));
            lab.world().slow_link("b", &format!("s{target}"), Duration::from_millis(50));
        }
        for round in 0..20 {
            let (ino, by_a) = create(&a, "f").await;
            let old = pattern(8, 0, 9000);
            write(&a, by_a, 0, &old).await;
            snap(&a, "s").await;
            let by_b = open(&b, ino).await; // it leaves the snapshot's object with that
            a.delete_snapshot(&root(), V, "s").await.unwrap();
            let reads = async {
                clock.sleep(Duration::from_millis(round)).await;
                read(&b, by_b, 9000).await
            };
            let (got, ()) = tokio::join!(reads, write(&a, by_a, 0, b"new"));
            assert_eq!(differs(&got[3..], &old[3..]), None, "round {round}");
            a.release(by_a).await.unwrap();
            b.release(by_b).await.unwrap();
            a.unlink(&root(), InodeId::ROOT, b"f").await.unwrap();
        }
    });
}

#[test]
fn the_leader_may_restart_at_any_time() {
    let lab = Lab::new(75);
    lab.run(6, |lab| async move {
        let a = lab.client("a").await;
        let (_, h) = create(&a, "f").await;
        let old = pattern(6, 0, 2 * STRIPE);
        write(&a, h, 0, &old).await;
        let s = snap(&a, "s").await;
        write(&a, h, 10, b"new").await;
        a.fsync(h).await.unwrap();
        lab.kill_meta();
        lab.meta().await;
        write(&a, h, STRIPE + 10, b"new").await;
        let mut now = old.clone();
        now[10..13].copy_from_slice(b"new");
        now[STRIPE + 10..STRIPE + 13].copy_from_slice(b"new");
        assert_eq!(differs(&read(&a, h, now.len()).await, &now), None);
        assert_eq!(differs(&then(&a, s, "f").await, &old), None);
        a.delete_snapshot(&root(), V, "s").await.unwrap();
        lab.kill_meta();
        lab.meta().await;
        lab.env("a").clock.sleep(Duration::from_secs(5)).await; // of the world
        assert!(a.snapshots(V).await.unwrap().is_empty());
        assert_eq!(differs(&read(&a, h, now.len()).await, &now), None);
    });
}

#[test]
fn a_busy_volume_gets_its_scheduled_snapshots() {
    let lab = Lab::new(76);
    lab.run(6, |lab| async move {
        let mut writers = Vec::new();
        for n in 0..3 {
            let c = lab.client(&format!("w{n}")).await;
            let (tx, rx) = tokio::sync::oneshot::channel();
            lab.env(&format!("w{n}")).tasks.spawn("writer", async move {
                let mut made = Vec::new();
                for i in 0..60 {
                    let name = format!("{n}-{i}");
                    let (_, h) = create(&c, &name).await;
                    write(&c, h, 0, &pattern(i, 0, 9000)).await;
                    c.release(h).await.unwrap();
                    made.push(name);
                }
                drop(tx.send(made));
            });
            writers.push(rx);
        }
        let c = lab.client("c").await;
        let mut taken = Vec::new();
        for n in 0..5 {
            lab.env("c").clock.sleep(Duration::from_millis(10)).await; // of the world
            taken.push(snap(&c, &format!("s{n}")).await);
        }
        for writer in writers {
            assert_eq!(writer.await.unwrap().len(), 60);
        }
        let mut before = 0;
        for snapshot in taken {
            let mut entries = Vec::new();
            loop {
                let after = entries.last().map_or(0, |e: &weir_proto::snapshot::SnapshotEntry| e.cookie);
                let part = c.snapshot_list(&root(), snapshot, InodeId::ROOT, after, 50).await.unwrap();
                entries.extend(part.entries);
                if part.end {
                    break;
                }
            }
            assert!(entries.len() >= before, "names come only");
            before = entries.len();
            for entry in &entries {
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                let i: u64 = name.split_once('-').unwrap().1.parse().unwrap();
                let got = then(&c, snapshot, &name).await;
                // All that was written at once, or nothing yet.
                assert!(got.is_empty() || differs(&got, &pattern(i, 0, 9000)).is_none(), "{name}");
            }
        }
        assert!(before > 0);
    });
}

#[test]
fn shared_writers_go_on_when_the_read_snapshot_is_gone() {
    let lab = Lab::new(77);
    lab.run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (ino, by_a) = create(&a, "f").await;
        let by_b = open(&b, ino).await;
        let mut now = pattern(7, 0, STRIPE);
        write(&a, by_a, 0, &now).await;
        let s = snap(&b, "s").await;
        assert_eq!(differs(&then(&b, s, "f").await, &now), None);
        b.delete_snapshot(&root(), V, "s").await.unwrap();
        lab.env("a").clock.sleep(Duration::from_secs(5)).await; // of the world: it is removed
        write(&a, by_a, 5, b"AAAA").await;
        write(&b, by_b, CELL, b"BBBB").await;
        now[5..9].copy_from_slice(b"AAAA");
        now[CELL..CELL + 4].copy_from_slice(b"BBBB");
        assert_eq!(differs(&read(&a, by_a, now.len() + 1).await, &now), None);
    });
}

/// The reader has a lease on the file from before the death, under which it would see nothing of it.
#[test]
fn a_dead_writers_file_is_recovered_for_a_snapshot_reader() {
    for recovers in [false, true] {
        let lab = Lab::with(79, "ec:4+2", 1000);
        lab.run(6, |lab| async move {
            let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
            let (ino, by_a) = create(&a, "f").await;
            let by_b = open(&b, ino).await;
            let now = pattern(8, 0, STRIPE + 100);
            write(&b, by_b, 0, &now).await;
            write(&a, by_a, 0, &now).await;
            let pause = || async { lab.env("c").clock.sleep(Duration::from_secs(3)).await }; // of the world: a session ends
            if recovers {
                lab.world().kill("a");
                pause().await;
            }
            let h = open(&c, ino).await;
            assert_eq!(differs(&read(&c, h, now.len() + 1).await, &now), None);
            c.release(h).await.unwrap();
            let s = snap(&c, "s").await;
            lab.world().kill(if recovers { "b" } else { "a" });
            pause().await;
            assert_eq!(differs(&then(&c, s, "f").await, &now), None);
        });
    }
}

#[test]
fn holes_truncations_and_snapshots_at_the_same_time() {
    for seed in [800, 801] {
        let lab = Lab::new(seed);
        lab.run(6, |lab| async move {
            let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
            let (ino, by_a) = create(&a, "f").await;
            let by_b = open(&b, ino).await;
            let done = std::cell::Cell::new(false);
            let pause = |ms: u64| {
                let (clock, rng) = (lab.world().clock(), lab.world().rng("pauses"));
                async move { clock.sleep(Duration::from_micros(rng.below(ms * 1000))).await }
            };
            let punches = async {
                for n in 0..20 {
                    let data = pattern(n, 0, STRIPE);
                    write(&a, by_a, 0, &data).await;
                    pause(3).await;
                    let punched = a.fallocate(by_a, Allocate::PunchHole, 100, (2 * CELL) as u64).await;
                    punched.unwrap_or_else(|e| panic!("seed {seed}, hole {n}: {e:?}"));
                    let got = read(&a, by_a, STRIPE).await;
                    assert!(got[100..100 + 2 * CELL].iter().all(|byte| *byte == 0), "seed {seed}, hole {n}");
                    assert_eq!(differs(&got[..100], &data[..100]), None, "seed {seed}, hole {n}");
                    pause(3).await;
                }
                done.set(true);
            };
            let truncations = async {
                while !done.get() {
                    for size in [3 * STRIPE + 5, 2 * STRIPE] {
                        let set = SetAttrs { size: Some(size as u64), ..SetAttrs::default() };
                        b.setattr(&root(), ino, Some(by_b), set).await.unwrap();
                        pause(5).await;
                    }
                }
            };
            let snapshots = async {
                while !done.get() {
                    let number = snap(&c, "s").await;
                    pause(5).await;
                    then(&c, number, "f").await;
                    c.delete_snapshot(&root(), V, "s").await.unwrap();
                    pause(5).await;
                }
            };
            tokio::join!(punches, truncations, snapshots);
        });
    }
}

/// Writes in flight when the file leaves a snapshot arrive in the old object, behind all bytes that the file
/// has there.
#[test]
fn a_write_that_a_snapshot_overtakes_is_not_lost() {
    let late = Duration::from_millis(300);
    for (seed, old) in [(140, 0), (141, 0), (142, 1000), (143, 1000), (144, STRIPE + 10), (145, STRIPE + 10)]
    {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let (ino, ha) = create(&a, "f").await;
            let hb = open(&b, ino).await;
            let mut expected = pattern(1, 0, old);
            write(&a, ha, 0, &expected).await;
            let (near, far) = (STRIPE + CELL / 2, STRIPE + CELL + 100);
            let (one, other) = (pattern(2, near, 4000), pattern(3, far, 30_000));
            (0..6).for_each(|n| lab.world().slow_link("a", &format!("s{n}"), late));
            let clock = lab.world().clock();
            let overtakes = async {
                clock.sleep(late / 3).await;
                snap(&b, "s").await;
                write(&b, hb, far, &other).await;
                // A getattr returns the object to write to from now on.
                if seed % 2 == 0 {
                    a.getattr(ino).await.unwrap();
                }
            };
            tokio::join!(write(&a, ha, near, &one), overtakes);
            expected.resize(far, 0);
            expected.extend(&other);
            expected[near..near + one.len()].copy_from_slice(&one);
            for (c, h) in [(&a, ha), (&b, hb)] {
                assert_eq!(differs(&read(c, h, expected.len() + 1).await, &expected), None, "seed {seed}");
            }
        });
    }
}

#[test]
fn a_snapshot_loses_no_write_under_way_to_a_nameless_file() {
    for seed in 150..162 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b, rng) = (lab.client("a").await, lab.client("b").await, lab.world().rng("pauses"));
            for n in 0..10 {
                let name = format!("f{n}");
                let (ino, h) = create(&a, &name).await;
                a.unlink(&root(), InodeId::ROOT, name.as_bytes()).await.unwrap();
                let mut expected = Vec::new();
                let clock = lab.world().clock();
                let pause = async || clock.sleep(Duration::from_micros(rng.below(1000))).await;
                let writes = async {
                    for part in 0..6 {
                        let bytes = pattern(part, expected.len(), 5000);
                        write(&a, h, expected.len(), &bytes).await;
                        expected.extend(bytes);
                        pause().await;
                        a.fsync(h).await.unwrap();
                    }
                };
                let snapshot = async {
                    pause().await;
                    snap(&b, &name).await;
                };
                // To open it again is to leave the snapshot.
                let opens = async {
                    for _ in 0..4 {
                        pause().await;
                        a.release(open(&a, ino).await).await.unwrap();
                    }
                };
                tokio::join!(writes, snapshot, opens);
                let at_b = open(&b, ino).await;
                let got = read(&b, at_b, expected.len() + 1).await;
                assert_eq!(
                    differs(&got, &expected),
                    None,
                    "seed {seed}, file {n}: {} of {}, {:?}",
                    got.len(),
                    expected.len(),
                    &got[4990..got.len().min(5010)]
                );
                b.release(at_b).await.unwrap();
                a.release(h).await.unwrap();
            }
        });
    }
}

/// A snapshot asks clients with open files to save their writes. A session that follows an expired one must
/// not write before the leader knows its open files, with many files and on a slow network too.
#[test]
fn writes_under_a_new_session_are_in_the_next_snapshot() {
    for far in [false, true] {
        Lab::new(163).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            for n in 0..OTHER_OPEN_FILES {
                create(&a, &format!("beside{n}")).await;
            }
            let (ino, h) = create(&a, "f").await;
            let mut now = pattern(1, 0, STRIPE + 5000);
            write(&a, h, 0, &now).await;
            a.fsync(h).await.unwrap();
            lab.cut_off("a");
            lab.world().sleep(Duration::from_secs(6)).await; // more than a lease term
            lab.world().slow_link("a", "meta", Duration::from_millis(100));
            lab.let_back("a");
            // Beside what the file had, or in the gap behind its end; in the stripe that holds it.
            let at = if far { now.len() + 20_000 } else { STRIPE + 100 };
            let new = pattern(2, at, 3000);
            write(&a, h, at, &new).await;
            now.resize(now.len().max(at + new.len()), 0);
            now[at..at + new.len()].copy_from_slice(&new);
            let s = snap(&b, "s").await;
            let then_was = now.clone();
            lab.world().sleep(Duration::from_secs(10)).await; // the new session has reported all
            a.fsync(h).await.unwrap();
            // The next writer copies the bytes that are in the snapshot's object.
            let by_b = open(&b, ino).await;
            write(&b, by_b, now.len(), b"more").await;
            now.extend_from_slice(b"more");
            for (client, h) in [(&a, h), (&b, by_b)] {
                assert_eq!(differs(&read(client, h, now.len() + 1).await, &now), None, "far: {far}");
            }
            assert_eq!(differs(&then(&b, s, "f").await, &then_was), None, "far: {far}");
        });
    }
}
