//! Claims about small files, which are inline until several clients have them open: then their bytes go to
//! targets, and neither these nor concurrent writes are lost, with any client that sends them, and also if a
//! lease is revoked in between.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Allocate, Client, Handle, OpenMode, SetAttrs};
use weir_lab::*;
use weir_proto::{Error, ErrorKind, InodeId};

const FILES: usize = 40;
/// Bytes written at a time.
const PART: usize = 7;

async fn create(c: &Client, name: &str, bytes: &[u8]) -> InodeId {
    let made = c.create(&root(), InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
    c.write(made.handle, 0, Bytes::copy_from_slice(bytes)).await.unwrap();
    close(c, made.handle).await;
    made.stat.attr.ino
}
async fn open(c: &Client, ino: InodeId, mode: OpenMode) -> Handle {
    c.open(&root(), ino, mode).await.unwrap().handle
}
async fn close(c: &Client, h: Handle) {
    c.flush(h).await.unwrap();
    c.release(h).await.unwrap();
}
async fn content(c: &Client, ino: InodeId) -> Vec<u8> {
    let h = open(c, ino, OpenMode::READ).await;
    let bytes = c.read(h, 0, 1 << 20).await.unwrap().concat();
    close(c, h).await;
    bytes
}

#[test]
fn concurrent_writes_to_a_small_file_are_all_kept() {
    const WRITERS: usize = 3;
    for seed in 20..32 {
        Lab::new(seed).run(6, |lab| async move {
            let mut clients = Vec::new();
            for n in 0..WRITERS {
                clients.push(lab.client(&format!("c{n}")).await);
            }
            let rng = lab.world().rng("pauses");
            for n in 0..FILES {
                let old = pattern(1, 0, 2 * WRITERS * PART);
                let ino = create(&clients[n % WRITERS], &format!("f{n}"), &old).await;
                let mut expected = old;
                let new = |at: usize| pattern(100 + n as u64, at, PART);
                let write = async |which: usize| {
                    let c = &clients[which];
                    let h = open(c, ino, OpenMode::BOTH).await;
                    for at in [2 * which * PART, 2 * which * PART + PART / 2] {
                        lab.world().clock().sleep(Duration::from_micros(rng.below(1000))).await;
                        // Some of them by way of zeros.
                        if which == 1 {
                            c.fallocate(h, Allocate::PunchHole, at as u64, PART as u64).await.unwrap();
                        }
                        c.write(h, at as u64, new(at).into()).await.unwrap();
                    }
                    close(c, h).await;
                };
                tokio::join!(write(0), write(1), write(2));
                for at in (0..WRITERS).flat_map(|w| [2 * w * PART, 2 * w * PART + PART / 2]) {
                    expected[at..at + PART].copy_from_slice(&new(at));
                }
                assert_eq!(
                    content(&clients[(n + 1) % WRITERS], ino).await,
                    expected,
                    "seed {seed}, file {n}"
                );
            }
        });
    }
}

#[test]
fn a_zeroed_range_of_a_small_file_reads_as_zeros() {
    for seed in 40..52 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b, rng) = (lab.client("a").await, lab.client("b").await, lab.world().rng("pauses"));
            for n in 0..FILES {
                let mut expected = pattern(1, 0, 10 * PART);
                let ino = create(&a, &format!("f{n}"), &expected).await;
                let zero = async {
                    let h = open(&a, ino, OpenMode::BOTH).await;
                    for at in [1, 3, 5] {
                        a.fallocate(h, Allocate::PunchHole, (at * PART) as u64, PART as u64).await.unwrap();
                        lab.world().clock().sleep(Duration::from_micros(rng.below(1000))).await;
                    }
                    close(&a, h).await;
                };
                let read = async {
                    for _ in 0..6 {
                        content(&b, ino).await;
                        lab.world().clock().sleep(Duration::from_micros(rng.below(1000))).await;
                    }
                };
                tokio::join!(zero, read);
                for at in [1, 3, 5] {
                    expected[at * PART..(at + 1) * PART].fill(0);
                }
                assert_eq!(content(&b, ino).await, expected, "seed {seed}, file {n}");
            }
        });
    }
}

#[test]
fn extending_a_file_truncates_no_concurrent_write() {
    for (seed, other) in (60..72).flat_map(|seed| [(seed, "a"), (seed, "b")]) {
        Lab::new(seed).run(6, |lab| async move {
            let a = lab.client("a").await;
            let b = if other == "a" { a.clone() } else { lab.client(other).await };
            let rng = lab.world().rng("pauses");
            for n in 0..FILES {
                let ino = create(&a, &format!("f{n}"), &pattern(1, 0, n)).await;
                let extend = async {
                    let h = open(&a, ino, OpenMode::BOTH).await;
                    lab.world().clock().sleep(Duration::from_micros(rng.below(600))).await;
                    let extended = a.fallocate(h, Allocate::Extend, 0, 200).await;
                    // The other write came first: the file is longer, and has a hole.
                    let is_longer = |e: Error| e.kind == ErrorKind::Unsupported;
                    assert!(extended.is_ok() || extended.is_err_and(is_longer));
                    close(&a, h).await;
                };
                let write = async {
                    let h = open(&b, ino, OpenMode::BOTH).await;
                    lab.world().clock().sleep(Duration::from_micros(rng.below(600))).await;
                    let at = 500 * (1 + n % 10);
                    b.write(h, at as u64, pattern(2, at, PART).into()).await.unwrap();
                    close(&b, h).await;
                    at
                };
                let ((), at) = tokio::join!(extend, write);
                let mut expected = pattern(1, 0, n);
                expected.resize(at, 0);
                expected.extend(pattern(2, at, PART));
                assert_eq!(content(&b, ino).await, expected, "seed {seed}, file {n}");
            }
        });
    }
}

#[test]
fn punching_a_small_file_during_a_truncation_grows_nothing() {
    for seed in 80..104 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b, rng) = (lab.client("a").await, lab.client("b").await, lab.world().rng("pauses"));
            for n in 0..FILES {
                let old = pattern(1, 0, 10 * PART);
                let ino = create(&a, &format!("f{n}"), &old).await;
                let (at, length) = (3 * PART, PART + n);
                let zero = async {
                    let h = open(&a, ino, OpenMode::BOTH).await;
                    lab.world().clock().sleep(Duration::from_micros(rng.below(600))).await;
                    a.fallocate(h, Allocate::PunchHole, at as u64, old.len() as u64).await.unwrap();
                    close(&a, h).await;
                };
                let truncate = async {
                    lab.world().clock().sleep(Duration::from_micros(rng.below(1200))).await;
                    let set = SetAttrs { size: Some(length as u64), ..SetAttrs::default() };
                    b.setattr(&root(), ino, None, set).await.unwrap();
                };
                tokio::join!(zero, truncate);
                let mut expected = old;
                expected[at..].fill(0);
                expected.truncate(length);
                assert_eq!(content(&b, ino).await, expected, "seed {seed}, file {n}");
            }
        });
    }
}

#[test]
fn a_small_file_that_is_written_far_past_its_end_shows_that() {
    Lab::new(140).run(6, |lab| async move {
        let a = lab.client("a").await;
        let ino = create(&a, "f", &pattern(1, 0, PART)).await;
        let h = open(&a, ino, OpenMode::BOTH).await;
        // A whole stripe goes to targets at once, while the bytes in the inode stay there for now.
        a.write(h, STRIPE as u64, pattern(2, STRIPE, STRIPE).into()).await.unwrap();
        lab.world().clock().sleep(Duration::from_millis(100)).await;
        let mut expected = pattern(1, 0, PART);
        expected.resize(STRIPE, 0);
        expected.extend(pattern(2, STRIPE, STRIPE));
        assert!(content(&a, ino).await == expected, "other bytes");
        close(&a, h).await;
        assert!(content(&lab.client("b").await, ino).await == expected, "other bytes for another client");
    });
}

#[test]
fn appends_with_and_without_the_token_are_all_there() {
    for seed in 150..162 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b, rng) = (lab.client("a").await, lab.client("b").await, lab.world().rng("pauses"));
            let mode = OpenMode { append: true, ..OpenMode::BOTH };
            for n in 0..FILES {
                let ino = create(&a, &format!("f{n}"), &pattern(1, 0, 5000)).await;
                let (at_a, at_b) = (open(&a, ino, mode).await, open(&b, ino, mode).await);
                let closes = async {
                    lab.world().clock().sleep(Duration::from_micros(rng.below(1000))).await;
                    close(&b, at_b).await;
                };
                let append = async |part: u64| {
                    lab.world().clock().sleep(Duration::from_micros(rng.below(1000))).await;
                    let data = pattern(part, 0, PART);
                    match a.try_append(at_a, &data) {
                        Some(done) => done.unwrap(),
                        None => a.append(at_a, data.into()).await.unwrap(),
                    };
                };
                // Others of this client get the right to write alone while an append waits for its turn.
                let at_w = open(&a, ino, OpenMode::BOTH).await;
                let write = async || {
                    lab.world().clock().sleep(Duration::from_micros(rng.below(1000))).await;
                    a.write(at_w, 100, pattern(1, 100, PART).into()).await.unwrap();
                };
                let writes = async { tokio::join!(write(), write(), write(), write(), write(), write()) };
                tokio::join!(
                    closes,
                    writes,
                    append(2),
                    append(3),
                    append(4),
                    append(5),
                    append(6),
                    append(7)
                );
                close(&a, at_w).await;
                let got = content(&b, ino).await.split_off(5000);
                let count = |seed| got.chunks(PART).filter(|c| **c == pattern(seed, 0, PART)).count();
                assert!((2..8).all(|part| count(part) == 1), "seed {seed}, file {n}: {got:?}");
                close(&a, at_a).await;
            }
        });
    }
}

/// The right to write alone comes while others of this client are in a turn: bytes buffered under it are
/// older than direct writes after that.
#[test]
fn writes_stay_in_order_when_a_write_lease_comes_in_between() {
    for seed in 180..192 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b, rng) = (lab.client("a").await, lab.client("b").await, lab.world().rng("pauses"));
            lab.world().slow_link("a", "meta", Duration::from_millis(1));
            let pause = async |us| lab.world().clock().sleep(Duration::from_micros(rng.below(us))).await;
            for n in 0..FILES {
                let ino = create(&a, &format!("f{n}"), &pattern(1, 0, 5000)).await;
                let truncate = SetAttrs { size: Some(3000), ..SetAttrs::default() };
                a.setattr(&root(), ino, None, truncate).await.unwrap();
                let (by_a, by_b) = (open(&a, ino, OpenMode::BOTH).await, open(&b, ino, OpenMode::BOTH).await);
                let closes = async {
                    pause(20_000).await;
                    close(&b, by_b).await;
                };
                // Old bytes are past the end: that takes a turn.
                let grows = async {
                    pause(20_000).await;
                    a.write(by_a, 4000, pattern(2, 0, PART).into()).await.unwrap();
                };
                let writes = async |at: u64| {
                    for part in 3..20 {
                        pause(2000).await;
                        a.write(by_a, at, pattern(part, 0, PART).into()).await.unwrap();
                        let got = a.read(by_a, at, PART).await.unwrap().concat();
                        assert!(got == pattern(part, 0, PART), "seed {seed}, file {n}, write {part}");
                    }
                };
                tokio::join!(closes, grows, writes(100), writes(200), writes(300));
                close(&a, by_a).await;
            }
        });
    }
}

#[test]
fn writes_sent_while_a_file_is_inlined_are_newer() {
    Lab::new(170).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        lab.world().slow_link("a", "meta", Duration::from_millis(20));
        let made = a.create(&root(), InodeId::ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap();
        a.write(made.handle, 0, pattern(1, 0, 1000).into()).await.unwrap();
        let sends = async {
            lab.world().clock().sleep(Duration::from_millis(5)).await;
            a.write(made.handle, 0, pattern(2, 0, STRIPE).into()).await.unwrap();
        };
        let (synced, ()) = tokio::join!(a.fsync(made.handle), sends);
        synced.unwrap();
        let mut expected = pattern(2, 0, STRIPE);
        let read = a.read(made.handle, 0, 2 * STRIPE).await.unwrap().concat();
        assert!(read == expected, "other bytes before they were all synced");
        a.write(made.handle, STRIPE as u64, pattern(3, 0, PART).into()).await.unwrap();
        expected.extend(pattern(3, 0, PART));
        close(&a, made.handle).await;
        for c in [&a, &b] {
            assert!(content(c, made.stat.attr.ino).await == expected, "other bytes");
        }
    });
}

#[test]
fn a_removed_file_reopened_at_once_shows_others_changes() {
    for seed in 180..192 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b, rng) = (lab.client("a").await, lab.client("b").await, lab.world().rng("pauses"));
            for n in 0..FILES {
                let name = format!("f{n}");
                let ino = create(&a, &name, &pattern(1, 0, PART)).await;
                let (at_a, keeps) =
                    (open(&a, ino, OpenMode::READ).await, open(&b, ino, OpenMode::READ).await);
                a.unlink(&root(), InodeId::ROOT, name.as_bytes()).await.unwrap();
                assert_eq!(a.getattr(ino).await.unwrap().attr.nlink, 0);
                let closes = async {
                    lab.world().clock().sleep(Duration::from_micros(rng.below(300))).await;
                    close(&a, at_a).await;
                };
                let (again, ()) = tokio::join!(open(&a, ino, OpenMode::READ), closes);
                assert_eq!(a.read(again, 0, PART).await.unwrap().concat(), pattern(1, 0, PART));
                let at_b = open(&b, ino, OpenMode::BOTH).await;
                let third = open(&a, ino, OpenMode::READ).await;
                b.write(at_b, 0, pattern(2, 0, PART).into()).await.unwrap();
                for h in [again, third] {
                    let got = a.read(h, 0, PART).await.unwrap().concat();
                    assert_eq!(got, pattern(2, 0, PART), "seed {seed}, file {n}");
                    close(&a, h).await;
                }
                close(&b, at_b).await;
                close(&b, keeps).await;
            }
        });
    }
}
