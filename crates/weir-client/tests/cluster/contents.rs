//! Claim: every client reads the bytes that were written, with any targets lost that the scheme allows.
use super::*;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use weir_client::{Allocate, ClientConfig, NoKernel, OpenMode, SetAttrs, SetTime};
use weir_proto::ErrorKind;
use weir_proto::meta::Time;

#[test]
fn files_of_all_sizes_are_read_back_by_another_client() {
    Lab::new(1).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        for (i, size) in
            [0, 1, 4096, 4097, 50_000, CELL, CELL + 1, STRIPE - 1, STRIPE, STRIPE + 1, 3 * STRIPE + 77_777]
                .into_iter()
                .enumerate()
        {
            let name = format!("f{size}");
            let data = pattern(i as u64, 0, size);
            let h = create(&a, &name).await;
            for (n, chunk) in data.chunks(100_000).enumerate() {
                write(&a, h, n * 100_000, chunk).await;
            }
            same(&read(&a, h, 0, size + 10).await, &data);
            close(&a, h).await;
            same(&content(&b, &name).await, &data);
            let stat = b.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap();
            assert_eq!(stat.attr.size, size as u64);
        }
        assert_eq!(a.status().degraded_writes + b.status().degraded_reads, 0);
    });
}

#[test]
fn whole_stripes_cost_exactly_their_redundancy_on_the_wire() {
    Lab::new(2).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "f").await;
        let data = pattern(0, 0, 8 * STRIPE);
        for (n, chunk) in data.chunks(CELL).enumerate() {
            write(&a, h, n * CELL, chunk).await;
        }
        close(&a, h).await;
        let status = a.status();
        assert_eq!(status.written_bytes, 8 * STRIPE as u64);
        assert_eq!(status.wire_sent_bytes * 2, status.written_bytes * 3, "4+2: 1.5 wire bytes per byte");
    });
}

/// A search passes a hole of any size in one step, also where targets are down and where a small file was
/// never on any.
#[test]
fn data_is_found_behind_a_hole_of_terabytes() {
    Lab::new(4).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (there, len, size) = (3usize << 40, 100_000, 5u64 << 40);
        let h = create(&a, "f").await;
        write(&a, h, there, &pattern(1, 0, len)).await;
        let truncate = SetAttrs { size: Some(size), ..SetAttrs::default() };
        let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        a.setattr(&root(), ino, Some(h), truncate).await.unwrap();
        close(&a, h).await;
        let h = open(&b, "f", OpenMode::READ).await;
        let end = (there + len).next_multiple_of(CELL) as u64;
        for down in [None, Some(2)] {
            if let Some(node) = down {
                lab.kill_storage(node);
            }
            let begins = b.seek_data(h, 0).await.unwrap().expect("there is data");
            assert!(begins <= there as u64 && begins + STRIPE as u64 > there as u64, "data at {begins}");
            assert_eq!(b.seek_data(h, there as u64 + 5).await.unwrap(), Some(there as u64 + 5));
            assert_eq!(b.seek_hole(h, 0).await.unwrap(), Some(0));
            let hole = b.seek_hole(h, there as u64).await.unwrap().expect("there is a hole");
            assert!(hole >= end && hole <= end + STRIPE as u64, "a hole at {hole}");
            assert_eq!(b.seek_data(h, hole).await.unwrap(), None, "nothing but a hole to the end");
            assert_eq!(b.seek_hole(h, size - 1).await.unwrap(), Some(size - 1));
        }
    });
}

#[test]
fn overwrites_and_holes_read_as_an_array_would() {
    Lab::new(3).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let rng = lab.world().rng("test");
        let mut model = Vec::new();
        for round in 0..6 {
            let h = if round == 0 { create(&a, "f").await } else { open(&a, "f", OpenMode::BOTH).await };
            for step in 0..12 {
                let at = rng.below(4 * STRIPE as u64) as usize;
                let len = 1 + rng.below([100, 50_000, 400_000][rng.below(3) as usize]) as usize;
                let data = pattern(round * 100 + step, at, len);
                write(&a, h, at, &data).await;
                if model.len() < at + len {
                    model.resize(at + len, 0);
                }
                model[at..at + len].copy_from_slice(&data);
                match rng.below(6) {
                    0 => a.fsync(h).await.unwrap(),
                    1 => {
                        let (at, len) = (rng.below(model.len() as u64) as usize, 200_000);
                        same(&read(&a, h, at, len).await, &model[at..model.len().min(at + len)]);
                    }
                    2 => {
                        let size = rng.below(model.len() as u64 + 100_000) as usize;
                        let file = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
                        let set = SetAttrs { size: Some(size as u64), ..Default::default() };
                        let stat = a.setattr(&root(), file, Some(h), set).await.unwrap();
                        assert_eq!(stat.attr.size, size as u64);
                        model.resize(size, 0);
                    }
                    3 => {
                        let at = rng.below(model.len() as u64) as usize;
                        let end = model.len().min(at + 150_000);
                        a.fallocate(h, Allocate::PunchHole, at as u64, (end - at).max(1) as u64)
                            .await
                            .unwrap();
                        model[at..end].fill(0);
                    }
                    _ => {}
                }
            }
            same(&read(&a, h, 0, model.len() + 1).await, &model);
            close(&a, h).await;
            same(&content(&b, "f").await, &model);
        }
    });
}

#[test]
fn two_of_six_targets_may_be_gone_a_third_names_the_stripe() {
    for (first, second) in [(0, 1), (2, 5), (4, 3)] {
        Lab::new(4 + u64::from(first)).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let data = pattern(1, 0, 5 * STRIPE + 70_000);
            let h = create(&a, "before").await;
            write(&a, h, 0, &data).await;
            close(&a, h).await;
            let h = create(&a, "small").await;
            write(&a, h, 0, &data[..20_000]).await;
            close(&a, h).await;
            let during = create(&a, "during").await;
            write(&a, during, 0, &data[..2 * STRIPE]).await;
            lab.kill_storage(first);
            write(&a, during, 2 * STRIPE, &data[2 * STRIPE..3 * STRIPE + 100]).await;
            same(&content(&b, "before").await, &data);
            lab.kill_storage(second);
            write(&a, during, 3 * STRIPE + 100, &data[3 * STRIPE + 100..]).await;
            close(&a, during).await;
            let c = lab.client("c").await;
            for (name, expected) in [("before", &data[..]), ("small", &data[..20_000]), ("during", &data[..])]
            {
                same(&content(&c, name).await, expected);
            }
            assert!(c.status().degraded_reads > 0 && a.status().degraded_writes > 0);

            let third = (0..6).find(|n| *n != first && *n != second).unwrap();
            lab.kill_storage(third);
            let config = ClientConfig { patience: Duration::from_secs(12), ..lab.config("d") };
            let d = Client::connect(lab.env("d"), config, Arc::new(NoKernel)).await.unwrap();
            let clock = lab.env("d").clock;
            let begun = clock.now();
            let h = open(&d, "before", OpenMode::READ).await;
            let error = d.read(h, 0, data.len()).await.unwrap_err();
            assert!(error.context.contains("stripe"), "{error:?}");
            assert_eq!(
                error.kind,
                ErrorKind::Deadline,
                "who is down may come back with what it has: {error}"
            );
            assert_eq!(error.kind.errno(), 110);
            assert!(clock.now().since(begun) < Duration::from_secs(15), "{:?}", clock.now().since(begun));
            let h = create(&d, "refused").await;
            let data = data.clone();
            let wrote = d.write(h, 0, Bytes::from(data)).await;
            let flushed = d.flush(h).await;
            let error = wrote.map(|_| ()).and(flushed).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unavailable, "{error:?}");
            assert!(error.context.contains("stripe"), "{error:?}");
        });
    }
}

#[test]
fn a_returned_target_is_used_again() {
    Lab::new(11).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 3 * STRIPE);
        lab.kill_storage(2);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data).await;
        close(&a, h).await;
        lab.storage(2).await;
        let h = create(&a, "g").await;
        write(&a, h, 0, &data).await;
        close(&a, h).await;
        let b = lab.client("b").await;
        same(&content(&b, "f").await, &data);
        same(&content(&b, "g").await, &data);
    });
}

#[test]
fn a_file_without_a_name_is_linked_or_gone() {
    Lab::new(34).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let bytes = pattern(5, 0, 300_000);
        let opened = a.create_nameless(&root(), ROOT, 0o640, OpenMode::BOTH).await.unwrap();
        let (h, ino) = (opened.handle, opened.stat.attr.ino);
        write(&a, h, 0, &bytes).await;
        same(&read(&a, h, 0, 300_000).await, &bytes);
        assert!(b.readdir(&root(), ROOT, 0, 10, false).await.unwrap().entries.is_empty());
        assert_eq!(a.link(&root(), ino, ROOT, b"named").await.unwrap().attr.nlink, 1);
        same(&content(&b, "named").await, &bytes);
        write(&a, h, 0, b"later").await;
        close(&a, h).await;
        same(&content(&b, "named").await[..5], b"later");
        // While the leader restarts: made once, or once more.
        let (begun, made) = (lab.env("a").clock.now(), async {
            for _ in 0..20 {
                let opened = a.create_nameless(&root(), ROOT, 0o640, OpenMode::BOTH).await.unwrap();
                write(&a, opened.handle, 0, b"x").await;
                same(&read(&a, opened.handle, 0, 9).await, b"x");
                close(&a, opened.handle).await;
            }
        });
        let restarts = async {
            for _ in 0..3 {
                lab.env("b").clock.sleep(Duration::from_millis(20)).await;
                lab.kill_meta();
                lab.meta().await;
            }
        };
        tokio::join!(made, restarts);
        assert!(lab.env("a").clock.now().since(begun) < Duration::from_secs(60));
        assert_eq!(b.readdir(&root(), ROOT, 0, 10, false).await.unwrap().entries.len(), 1);
    });
}

/// The leader gets the time of such writes a moment later, at the latest with the close.
#[test]
fn a_time_that_is_set_after_a_write_of_a_shared_file_stays() {
    Lab::new(9).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let ha = create(&a, "f").await;
        write(&a, ha, 0, &[1; 50_000]).await;
        let hb = open(&b, "f", OpenMode::BOTH).await;
        let ino = b.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        for n in 0..3 {
            write(&a, ha, n * 100, &[2; 100]).await;
        }
        let long_ago = Time { nanos: 5 };
        let set = SetAttrs { mtime: Some(SetTime::At(long_ago)), ..Default::default() };
        a.setattr(&root(), ino, None, set).await.unwrap();
        assert_eq!(b.getattr(ino).await.unwrap().attr.mtime, long_ago);
        close(&a, ha).await;
        assert_eq!(b.getattr(ino).await.unwrap().attr.mtime, long_ago);
        close(&b, hb).await;
    });
}

#[test]
fn many_writers_of_one_file_lose_nothing() {
    Lab::new(13).run(6, |lab| async move {
        let record = 47_008;
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "shared").await;
        let g = open(&b, "shared", OpenMode::BOTH).await;
        let count = 20;
        for i in 0..count {
            let (client, handle) = if i % 2 == 0 { (&a, h) } else { (&b, g) };
            write(client, handle, i * record, &pattern(7, i * record, record)).await;
        }
        close(&a, h).await;
        close(&b, g).await;
        same(&content(&lab.client("c").await, "shared").await, &pattern(7, 0, count * record));
    });
}

#[test]
fn memory_stays_within_the_budget() {
    Lab::new(14).run(6, |lab| async move {
        let budget = 4 << 20;
        let a = lab.client_with("a", budget, Arc::new(weir_client::NoKernel)).await;
        let h = create(&a, "big").await;
        let total = 40 << 20;
        let chunk = 1 << 20;
        for at in (0..total).step_by(chunk) {
            write(&a, h, at, &pattern(3, at, chunk)).await;
        }
        close(&a, h).await;
        let status = a.status();
        assert!(status.memory_peak_bytes <= budget, "{status:?}");
        let b = lab.client_with("b", budget, Arc::new(weir_client::NoKernel)).await;
        let h = open(&b, "big", OpenMode::READ).await;
        for at in (0..total).step_by(chunk) {
            same(&read(&b, h, at, chunk).await, &pattern(3, at, chunk));
        }
        assert!(b.status().memory_peak_bytes <= budget, "{:?}", b.status());
    });
}

/// The right to write goes to another client at every moment of it.
#[test]
fn a_range_zeroed_while_the_lease_goes_is_zero_and_grows_after() {
    Lab::new(15).run(6, |lab| async move {
        let (a, b, env) = (lab.client("a").await, lab.client("b").await, lab.env("a"));
        for target in 0..6 {
            lab.world().slow_link("a", &format!("s{target}"), Duration::from_millis(20));
        }
        for round in 0..60u32 {
            let name = format!("f{round}");
            let h = create(&a, &name).await;
            write(&a, h, 0, &pattern(1, 0, STRIPE)).await;
            let other = b.clone();
            let (env_b, reads) = (lab.env("b"), name.clone());
            let (tx, rx) = tokio::sync::oneshot::channel();
            lab.env("b").tasks.spawn("other", async move {
                env_b.clock.sleep(Duration::from_millis(2) * round).await;
                let h = open(&other, &reads, OpenMode::BOTH).await;
                // Bytes cached under its lease must not outlive the zeros.
                read(&other, h, CELL, CELL).await;
                let _ = tx.send(h);
            });
            env.clock.sleep(Duration::from_millis(30)).await;
            a.fallocate(h, Allocate::PunchHole, CELL as u64, CELL as u64).await.unwrap();
            let at_b = rx.await.unwrap();
            same(&read(&b, at_b, CELL, CELL).await, &[0; CELL]);
            write(&b, at_b, 0, b"shared").await;
            write(&a, h, STRIPE, b"more").await;
            same(&read(&a, h, STRIPE, 10).await, b"more");
            same(&read(&b, at_b, STRIPE, 10).await, b"more");
        }
    });
}

#[test]
fn a_clock_that_is_set_back_hides_no_change() {
    Lab::new(33).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "f").await;
        write(&a, h, 0, b"one").await;
        close(&a, h).await;
        same(&content(&b, "f").await, b"one");
        let hour_ns = 3600 * 1_000_000_000;
        lab.world().set_wall_offset("meta", -hour_ns);
        let h = open(&a, "f", OpenMode::WRITE).await;
        write(&a, h, 3, b", two").await;
        close(&a, h).await;
        same(&content(&b, "f").await, b"one, two");
    });
}

#[test]
fn truncation_leaves_nothing_behind() {
    Lab::new(17).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 3 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data).await;
        close(&a, h).await;
        let found = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap();
        let truncating = OpenMode { truncate: true, ..OpenMode::BOTH };
        let h = a.open(&root(), found.attr.ino, truncating).await.unwrap().handle;
        write(&a, h, 100_000, b"end").await;
        close(&a, h).await;
        let mut expected = vec![0; 100_000];
        expected.extend_from_slice(b"end");
        same(&content(&a, "f").await, &expected);
        same(&content(&lab.client("b").await, "f").await, &expected);
        // Grown again over what was cut.
        let h = open(&a, "f", OpenMode::BOTH).await;
        write(&a, h, 2 * STRIPE + 5, b"z").await;
        close(&a, h).await;
        expected.resize(2 * STRIPE + 5, 0);
        expected.push(b'z');
        same(&content(&lab.client("c").await, "f").await, &expected);
    });
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = || {
        let lab = Lab::new(18);
        lab.run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let data = pattern(1, 0, 2 * STRIPE + 1234);
            let h = create(&a, "f").await;
            write(&a, h, 0, &data).await;
            lab.kill_storage(1);
            close(&a, h).await;
            same(&content(&b, "f").await, &data);
        });
        lab.world().trace_hash()
    };
    assert_eq!(run(), run());
}

/// Stripes are sealed when they were not written for a while, and at that moment a client writes them over.
#[test]
fn a_seal_replaces_nothing_that_is_written_over_meanwhile() {
    const FILES: usize = 24;
    for seed in 80..104 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let new = pattern(3, 0, STRIPE);
            let mut handles = Vec::new();
            for n in 0..FILES {
                let h = create(&a, &format!("f{n}")).await;
                write(&a, h, 0, &pattern(1, 0, STRIPE)).await;
                a.fsync(h).await.unwrap();
                write(&a, h, 100, &pattern(2, 0, 150_000)).await;
                a.fsync(h).await.unwrap();
                handles.push(h);
            }
            lab.world().sleep(Duration::from_millis(1_900 + 10 * (seed - 80))).await;
            // So fragments come to some targets long before they come to others, and a seal takes a while.
            let slow = |from: &str, to: u8, ms| {
                lab.world().slow_link(from, &format!("s{to}"), Duration::from_millis(ms))
            };
            (0..4).for_each(|n| slow("a", n, 15));
            (0..36).for_each(|n| slow(&format!("s{}", n / 6), n % 6, 5));
            let saved = Arc::new(AtomicUsize::new(0));
            for h in handles {
                write(&a, h, 0, &new).await;
                let (a, saved) = (a.clone(), saved.clone());
                lab.env("a").tasks.spawn("save", async move {
                    a.fsync(h).await.unwrap();
                    saved.fetch_add(1, Relaxed);
                });
            }
            lab.world().sleep(Duration::from_secs(3)).await;
            assert_eq!(saved.load(Relaxed), FILES, "seed {seed}");
            for n in 0..FILES {
                same(&content(&b, &format!("f{n}")).await, &new);
            }
        });
    }
}

/// A connection breaks, what was sent over it arrives later, and the writer does not wait for that.
#[test]
fn a_late_write_does_not_replace_a_newer_one() {
    for round in 0..60 {
        Lab::new(200).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&a, "f").await;
            write(&a, h, 0, &pattern(1, 0, STRIPE)).await;
            a.fsync(h).await.unwrap();
            let late = async {
                lab.world().sleep(Duration::from_micros(20 * round)).await;
                (0..6).for_each(|n| {
                    lab.world().lose_connections("a", &format!("s{n}"), Duration::from_secs(2))
                });
            };
            let first = async {
                write(&a, h, 1000, b"first").await;
                a.fsync(h).await.unwrap();
            };
            tokio::join!(late, first);
            write(&a, h, 1000, b"2nd..").await;
            a.fsync(h).await.unwrap();
            lab.world().sleep(Duration::from_secs(4)).await;
            same(&content(&b, "f").await[1000..1005], b"2nd..");
        });
    }
}
