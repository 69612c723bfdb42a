//! Where a file ends: appends of several clients, cuts and growth beside writes.
use super::*;
use bytes::Bytes;
use std::time::Duration;
use weir_client::{OpenMode, SetAttrs};
use weir_proto::ErrorKind;

/// Appends numbered records; each is one write.
async fn append_records(lab: Lab, name: &'static str, seed: u64, count: usize) {
    let c = lab.client(name).await;
    let h = open(&c, "log", OpenMode::BOTH).await;
    for n in 0..count {
        let record = record(seed, n);
        match c.try_append(h, &record) {
            Some(done) => assert_eq!(done.unwrap(), record.len()),
            None => assert_eq!(c.append(h, Bytes::from(record.clone())).await.unwrap(), record.len()),
        }
        if n % 7 == 3 {
            // An appended record is complete, for its own client.
            let size =
                c.getattr(c.lookup(&root(), ROOT, b"log").await.unwrap().unwrap().attr.ino).await.unwrap();
            assert!(size.attr.size >= record.len() as u64);
        }
        lab.env(name).clock.sleep(Duration::from_micros(lab.world().rng(name).below(900))).await;
    }
    close(&c, h).await;
}

/// Length first, then bytes that identify the client.
fn record(seed: u64, n: usize) -> Vec<u8> {
    let len = 10 + (seed as usize * 131 + n * 977) % [40, 3000, 90_000][n % 3];
    let mut bytes = (len as u32).to_le_bytes().to_vec();
    bytes.push(seed as u8);
    bytes.extend((n as u32).to_le_bytes());
    bytes.extend(pattern(seed * 1000 + n as u64, 0, len));
    bytes
}

/// Reads records back: every one whole, in the order in which each client appended them.
fn check_records(bytes: &[u8], counts: &[usize]) {
    let (mut next, mut at) = (vec![0; counts.len()], 0);
    while at < bytes.len() {
        let len = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let seed = bytes[at + 4] as usize;
        let n = u32::from_le_bytes(bytes[at + 5..at + 9].try_into().unwrap()) as usize;
        assert!(seed < counts.len() && n == next[seed], "at {at}: record {n} of {seed}, expected {next:?}");
        same(&bytes[at..at + 9 + len], &record(seed as u64, n));
        next[seed] += 1;
        at += 9 + len;
    }
    assert_eq!(next, counts);
}

#[test]
fn appends_of_several_clients_never_meet() {
    Lab::new(41).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "log").await;
        close(&a, h).await;
        let counts = [40, 55, 25];
        let mut tasks = Vec::new();
        for (seed, name) in ["p", "q", "r"].into_iter().enumerate() {
            let (tx, rx) = tokio::sync::oneshot::channel();
            let work = append_records(lab.clone(), name, seed as u64, counts[seed]);
            lab.env(name).tasks.spawn("append", async move {
                work.await;
                tx.send(()).unwrap();
            });
            tasks.push(rx);
        }
        for task in tasks {
            task.await.unwrap();
        }
        check_records(&content(&a, "log").await, &counts);
    });
}

#[test]
fn a_restart_of_the_leader_takes_no_append_away() {
    Lab::new(42).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "log").await;
        close(&a, h).await;
        let counts = [30, 30];
        let mut tasks = Vec::new();
        for (seed, name) in ["p", "q"].into_iter().enumerate() {
            let (tx, rx) = tokio::sync::oneshot::channel();
            let work = append_records(lab.clone(), name, seed as u64, counts[seed]);
            lab.env(name).tasks.spawn("append", async move {
                work.await;
                tx.send(()).unwrap();
            });
            tasks.push(rx);
        }
        for _ in 0..3 {
            lab.env("a").clock.sleep(Duration::from_millis(25)).await;
            lab.world().kill("meta");
            lab.meta().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        check_records(&content(&a, "log").await, &counts);
    });
}

/// The leader has the append, its answer is lost, and after the loss of the session no client can ask for it
/// again.
#[test]
fn an_append_whose_answer_is_lost_is_not_done_twice() {
    Lab::new(48).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (mut round, mut unknown) = (50, 0);
        while unknown < 3 {
            round += 1;
            assert!(round < 200, "{unknown} answers were lost");
            let name = format!("f{round}");
            let others = create(&b, &name).await;
            let append = OpenMode { append: true, ..OpenMode::BOTH };
            let h = open(&a, &name, append).await;
            let appends = a.append(h, vec![b'a'; 900].into());
            let (appended, ()) = tokio::join!(appends, lose_session(&lab, round * 16));
            let len = content(&b, &name).await.len();
            match appended {
                Ok(_) => assert_eq!(len, 900, "round {round}"),
                Err(e) => {
                    assert_eq!(e.kind, ErrorKind::Io, "round {round}: {e}");
                    assert!([0, 900].contains(&len), "round {round}: {len}");
                    unknown += u32::from(len == 900);
                }
            }
            drop(a.release(h).await);
            close(&b, others).await;
        }
    });
}

#[test]
fn a_set_size_holds_during_a_write_of_the_same_client() {
    for seed in 60..72 {
        Lab::new(seed).run(6, |lab| async move {
            let a = lab.client("a").await;
            let h = create(&a, "f").await;
            let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let clock = lab.world().clock();
            for round in 1..20 {
                let size = round * 1000;
                let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
                let longer = async { a.setattr(&root(), ino, Some(h), set).await.map(drop) };
                let writes = async {
                    for _ in 0..4 {
                        clock.sleep(Duration::from_micros(seed * 13 + round * 7)).await;
                        write(&a, h, 0, b"0123456789").await;
                    }
                };
                tokio::join!(longer, writes).0.unwrap();
                let stat = a.getattr(ino).await.unwrap();
                assert_eq!(stat.attr.size, size, "seed {seed}, round {round}");
            }
        });
    }
}

#[test]
fn cleaning_after_a_truncation_leaves_what_others_append() {
    for seed in 120..132 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let clock = lab.world().clock();
            for round in 0..40 {
                let name = format!("f{round}");
                let h = create(&a, &name).await;
                write(&a, h, 0, &[7; 5000]).await;
                a.fsync(h).await.unwrap();
                let ino = a.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap().attr.ino;
                let truncate = SetAttrs { size: Some(100), ..SetAttrs::default() };
                a.setattr(&root(), ino, Some(h), truncate).await.unwrap();
                let grows = async {
                    clock.sleep(Duration::from_micros(round * 40)).await;
                    write(&a, h, 3000, b"grown").await;
                };
                let appends = async {
                    let append = OpenMode { append: true, ..OpenMode::BOTH };
                    let hb = open(&b, &name, append).await;
                    clock.sleep(Duration::from_micros((seed - 120) * 9)).await;
                    b.append(hb, vec![b'b'; 900].into()).await.unwrap();
                    close(&b, hb).await;
                };
                tokio::join!(grows, appends);
                let found = read(&a, h, 0, 5000).await;
                let appended = found.iter().filter(|byte| **byte == b'b').count();
                assert_eq!(appended, 900, "seed {seed}, round {round}");
                assert_eq!(
                    found.iter().filter(|byte| **byte == 7).count(),
                    100,
                    "seed {seed}, round {round}"
                );
            }
        });
    }
}

#[test]
fn direct_writes_set_the_length_though_a_write_lease_came_since() {
    for seed in 80..92 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&a, "f").await;
            write(&a, h, 0, &[7; 100]).await;
            let clock = lab.world().clock();
            for round in 1..20 {
                let hb = open(&b, "f", OpenMode::BOTH).await;
                write(&b, hb, 50, b"b").await;
                let size = 1 + round as usize * 5000;
                let grows = write(&a, h, size - 1, b"x");
                let others_end = async {
                    clock.sleep(Duration::from_micros(round * 50)).await;
                    close(&b, hb).await;
                };
                let writes = async {
                    for _ in 0..6 {
                        clock.sleep(Duration::from_micros(seed * 3 + round * 7)).await;
                        write(&a, h, 0, b"0123456789").await;
                    }
                };
                tokio::join!(grows, others_end, writes);
                let found = read(&a, h, 0, 200_000).await;
                assert_eq!(found.len(), size, "seed {seed}, round {round}");
                assert_eq!(found[size - 1], b'x', "seed {seed}, round {round}");
            }
        });
    }
}

/// A file that was cut has old bytes past its end. Two clients that let it grow again must not take each
/// other's new bytes for old ones.
#[test]
fn two_clients_grow_a_truncated_file() {
    Lab::new(43).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let ha = create(&a, "f").await;
        let mut model = pattern(1, 0, 5 * STRIPE);
        write(&a, ha, 0, &model).await;
        a.fsync(ha).await.unwrap();
        let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        let truncate = |size: u64| SetAttrs { size: Some(size), ..SetAttrs::default() };
        a.setattr(&root(), ino, Some(ha), truncate(1000)).await.unwrap();
        model.truncate(1000);
        let hb = open(&b, "f", OpenMode::BOTH).await;
        for round in 0..3 {
            for n in 0..12 {
                let (c, h) = if n % 2 == 0 { (&a, ha) } else { (&b, hb) };
                let at = 1500 + n * 70_000;
                let data = pattern(round * 100 + n as u64, at, 50_000);
                write(c, h, at, &data).await;
                if model.len() < at + data.len() {
                    model.resize(at + data.len(), 0);
                }
                model[at..at + data.len()].copy_from_slice(&data);
                same(
                    &read(if n % 2 == 0 { &b } else { &a }, if n % 2 == 0 { hb } else { ha }, 0, 6 * STRIPE)
                        .await,
                    &model,
                );
            }
            // Cut again, now while both have it open.
            let size = 777 + round as usize * 100_000;
            b.setattr(&root(), ino, Some(hb), truncate(size as u64)).await.unwrap();
            model.truncate(size);
            same(&read(&a, ha, 0, 6 * STRIPE).await, &model);
        }
        close(&a, ha).await;
        close(&b, hb).await;
    });
}

/// Numbers of a cell's log begin from the start after a truncation, also at a member that learns of it later:
/// else no member takes its next numbers.
#[test]
fn a_member_that_missed_a_truncation_numbers_like_its_peers() {
    for away in 0..2 {
        Lab::with(45, "replica:2", 2000).run(2, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let (ha, hb) = (create(&a, "f").await, open(&b, "f", OpenMode::BOTH).await);
            let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let truncate = |size: u64| SetAttrs { size: Some(size), ..SetAttrs::default() };
            let stripes = 0..8;
            let write_all = async |round: u64| {
                for n in stripes.clone() {
                    let (c, h) = if n % 2 == 0 { (&a, ha) } else { (&b, hb) };
                    write(c, h, n * CELL + 100, &pattern(round, n, 5000)).await;
                }
            };
            for round in 0..3 {
                write_all(round).await;
            }
            lab.kill_storage(away);
            a.setattr(&root(), ino, Some(ha), truncate(0)).await.unwrap();
            // It is written again before it has asked what was cut.
            lab.world().slow_link(&format!("s{away}"), &format!("s{}", 1 - away), Duration::from_millis(100));
            lab.storage(away).await;
            write_all(3).await;
            lab.all_current().await.unwrap();
            write_all(4).await;
            a.fsync(ha).await.unwrap();
            b.fsync(hb).await.unwrap();
            for gone in 0..2 {
                lab.kill_storage(gone);
                let got = content(&lab.client(&format!("c{gone}")).await, "f").await;
                for n in stripes.clone() {
                    same(&got[n * CELL + 100..n * CELL + 5100], &pattern(4, n, 5000));
                }
                lab.storage(gone).await;
                lab.all_current().await.unwrap();
            }
        });
    }
}
