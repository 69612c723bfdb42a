//! Clients that die, fall silent or leave, and leaders that restart: written bytes stay, and clients keep
//! their open files.
use super::*;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_client::{Allocate, ClientConfig, NoKernel, OpenMode};
use weir_env::sim::DiskFaults;
use weir_proto::ErrorKind;
use weir_proto::meta::RenameMode;

#[test]
fn a_dead_writers_file_open_twice_is_recovered_by_one() {
    Lab::new(31).run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        let data = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data[..STRIPE]).await;
        a.fsync(h).await.unwrap();
        write(&a, h, STRIPE, &data[STRIPE..]).await;
        lab.world().kill("a");
        let (hb, hc) = (open(&b, "f", OpenMode::BOTH).await, open(&c, "f", OpenMode::BOTH).await);
        let at = |n: usize| &data[n..n + 1000];
        tokio::join!(write(&b, hb, 0, at(7)), write(&c, hc, STRIPE / 2, at(77)));
        for (client, h) in [(&b, hb), (&c, hc)] {
            let got = client.read(h, 0, STRIPE).await.unwrap().concat();
            same(&got[..1000], at(7));
            same(&got[STRIPE / 2..STRIPE / 2 + 1000], at(77));
            same(&got[1000..2000], &data[1000..2000]);
        }
        close(&b, hb).await;
        close(&c, hc).await;
    });
}

/// Others that had the file open when it was recovered die, too, after it was closed to them.
#[test]
fn a_sole_writers_bytes_stay_when_earlier_openers_die() {
    Lab::new(33).run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        let data = pattern(1, 0, 8 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data[..1000]).await;
        let _open = open(&b, "f", OpenMode::BOTH).await;
        write(&a, h, 0, &data[..1000]).await;
        lab.world().kill("a");
        lab.env("c").clock.sleep(Duration::from_secs(5)).await; // of the world: the session of a ends
        let hc = open(&c, "f", OpenMode::BOTH).await; // recovered, and written by its new writer
        write(&c, hc, 0, &data[..4 * STRIPE]).await;
        lab.world().kill("b");
        lab.env("c").clock.sleep(Duration::from_secs(5)).await; // of the world: the session of b ends
        write(&c, hc, 4 * STRIPE, &data[4 * STRIPE..6 * STRIPE]).await;
        let in_between = c.fsync(hc);
        let more = write(&c, hc, 6 * STRIPE, &data[6 * STRIPE..7 * STRIPE]);
        tokio::join!(async { in_between.await.unwrap() }, more);
        write(&c, hc, 7 * STRIPE, &data[7 * STRIPE..]).await;
        c.fsync(hc).await.unwrap();
        close(&c, hc).await;
        same(&content(&lab.client("d").await, "f").await, &data);
    });
}

#[test]
fn a_session_that_many_find_gone_is_replaced_once() {
    for seed in 40..52 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let names = ["f0", "f1", "f2", "f3", "f4", "f5"];
            let mut handles = Vec::new();
            for name in names {
                let h = create(&a, name).await;
                write(&a, h, 0, b"before").await;
                a.fsync(h).await.unwrap();
                handles.push(h);
            }
            lab.world().pause("a");
            lab.world().clock().sleep(Duration::from_secs(6)).await;
            lab.world().resume("a");
            // All of them find the session gone, at slightly different times, and take what they need under
            // the next.
            let change = async |n: u64| {
                lab.world().clock().sleep(Duration::from_micros((seed - 40) * 30 * n)).await;
                let h = handles[n as usize];
                same(&a.read(h, 0, 100).await.unwrap().concat(), b"before");
                write(&a, h, 6, b", after").await;
            };
            tokio::join!(change(0), change(1), change(2), change(3), change(4), change(5));
            for name in names {
                same(&content(&b, name).await, b"before, after");
            }
        });
    }
}

#[test]
fn a_removed_file_outlives_other_openers_in_a_new_session() {
    Lab::new(53).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let bytes = pattern(6, 0, STRIPE + 77);
        let of_a = create(&a, "f").await;
        write(&a, of_a, 0, &bytes).await;
        a.fsync(of_a).await.unwrap();
        lab.cut_off("a");
        lab.world().sleep(Duration::from_secs(6)).await; // more than a lease term
        let of_b = open(&b, "f", OpenMode::READ).await;
        b.unlink(&root(), ROOT, b"f").await.unwrap();
        lab.let_back("a");
        lab.world().sleep(Duration::from_secs(2)).await;
        close(&b, of_b).await;
        lab.world().sleep(Duration::from_secs(4)).await; // it would be swept
        same(&read(&a, of_a, 0, bytes.len()).await, &bytes);
    });
}

#[test]
fn a_dead_writers_bytes_past_a_shared_end_never_show() {
    Lab::new(34).run(6, |lab| async move {
        let (b, far) = (lab.client("b").await, 300_000);
        let mut cut_off_in_time = 0;
        for (n, microseconds) in (100..2500).step_by(100).enumerate() {
            let (file, dies) = (format!("f{n}"), format!("a{n}"));
            let hb = create(&b, &file).await;
            write(&b, hb, 0, b"first").await;
            let a = lab.client(&dies).await;
            let ha = open(&a, &file, OpenMode::BOTH).await;
            let writer = a.clone();
            let left = async move { writer.write(ha, 100_000, Bytes::from_static(b"left behind")).await };
            lab.env(&dies).tasks.spawn("a write that never ends", async move { drop(left.await) });
            lab.world().clock().sleep(Duration::from_micros(microseconds)).await;
            // Its bytes may get to the targets, but the leader gets no report; and it is not the last writer.
            lab.cut_off(&dies);
            write(&b, hb, 0, b"FIRST").await;
            lab.world().kill(&dies);
            lab.world().clock().sleep(Duration::from_secs(5)).await;
            let before = b.read(hb, 0, far).await.unwrap().concat();
            cut_off_in_time += usize::from(before.len() == 5);
            write(&b, hb, far, b"far").await;
            let mut expected = before;
            expected.resize(far, 0);
            same(&b.read(hb, 0, far).await.unwrap().concat(), &expected);
            close(&b, hb).await;
        }
        assert!(cut_off_in_time > 5, "{cut_off_in_time}");
    });
}

/// The leader learned from a close that nothing is in flight, and gets no report when more is sent, of
/// several stripes at once; or after a sync that had nothing to send.
#[test]
fn bytes_sent_after_a_close_are_recovered_from_a_dead_writer() {
    Lab::new(37).run(6, |lab| async move {
        let (b, far) = (lab.client("b").await, 4 * STRIPE);
        for (n, grows) in [false, true].into_iter().enumerate() {
            let (file, dies) = (format!("f{n}"), format!("a{n}"));
            let a = lab.client(&dies).await;
            let h = create(&a, &file).await;
            let mut expected = pattern(1, 0, STRIPE - 5000);
            write(&a, h, 0, &expected).await;
            a.flush(h).await.unwrap(); // of a copy of the descriptor: it is open still
            if grows {
                a.fallocate(h, Allocate::Extend, 0, expected.len() as u64 + 100).await.unwrap();
                a.fsync(h).await.unwrap();
                expected.resize(expected.len() + 100, 0);
            }
            lab.cut_off(&dies);
            write(&a, h, expected.len(), &pattern(2, 0, STRIPE)).await;
            lab.env(&dies).tasks.spawn("a sync that never ends", async move { drop(a.fsync(h).await) });
            lab.world().sleep(Duration::from_millis(500)).await;
            lab.world().kill(&dies);
            lab.world().sleep(Duration::from_secs(5)).await;
            same(&content(&b, &file).await, &expected);
            let h = open(&b, &file, OpenMode::BOTH).await;
            write(&b, h, far, b"far").await;
            close(&b, h).await;
            expected.resize(far, 0);
            expected.extend(b"far");
            same(&content(&lab.client(&format!("c{n}")).await, &file).await, &expected);
        }
    });
}

/// A restarted leader answers when all former clients have returned; a client without a request returns by
/// itself.
#[test]
fn an_idle_client_reconnects_soon_after_the_leader_restarts() {
    for down_ms in [500, 2000, 3500, 5000, 6500] {
        Lab::with(38, "ec:4+2", 9000).run(6, |lab| async move {
            let (_idle, b) = (lab.client("a").await, lab.client("b").await);
            create(&b, "f").await;
            lab.kill_meta();
            lab.world().sleep(Duration::from_millis(down_ms)).await;
            lab.meta().await;
            let begun = lab.world().now();
            create(&b, "g").await;
            let took = lab.world().now().since(begun);
            assert!(took < Duration::from_millis(1200), "{took:?} after {down_ms} ms without a leader");
        });
    }
}

#[test]
fn an_idle_far_client_returns_in_time_for_its_unwritten_bytes() {
    for way_ms in [100, 300, 500, 650, 800] {
        Lab::with(43, "ec:4+2", 5000).run(6, |lab| async move {
            let (idle, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&idle, "f").await;
            idle.fsync(h).await.unwrap();
            let way = Duration::from_millis(way_ms);
            lab.world().slow_link("a", "meta", way);
            lab.world().slow_link("meta", "a", way);
            write(&idle, h, 0, b"not written yet").await;
            lab.kill_meta();
            lab.world().sleep(Duration::from_millis(500)).await;
            lab.meta().await;
            same(&content(&b, "f").await, b"not written yet");
            assert_eq!(idle.losses(), (0, vec![]));
        });
    }
}

#[test]
fn a_client_that_cannot_ask_for_the_map_waits_for_it() {
    Lab::new(35).run(6, |lab| async move {
        let a = lab.client("a").await;
        let mut data = pattern(1, 0, 3 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data).await;
        a.fsync(h).await.unwrap();
        let (reader, hr) = (lab.client("r").await, open(&a, "f", OpenMode::READ).await);
        let hr2 = open(&reader, "f", OpenMode::READ).await;
        a.release(hr).await.unwrap();
        for name in ["a", "r"] {
            lab.world().partition(name, "coord");
        }
        lab.kill_storage(2);
        lab.world().clock().sleep(Duration::from_secs(2)).await; // the others know, and go by a new epoch
        let healing = lab.clone();
        lab.env("observer").tasks.spawn("heal", async move {
            healing.world().clock().sleep(Duration::from_secs(6)).await;
            ["a", "r"].iter().for_each(|name| healing.world().heal(name, "coord"));
        });
        same(&reader.read(hr2, 0, 3 * STRIPE).await.unwrap().concat(), &data);
        reader.release(hr2).await.unwrap();
        lab.world().partition("a", "coord");
        lab.kill_storage(4);
        lab.world().clock().sleep(Duration::from_secs(2)).await;
        let healing = lab.clone();
        lab.env("observer").tasks.spawn("heal", async move {
            healing.world().clock().sleep(Duration::from_secs(6)).await;
            healing.world().heal("a", "coord");
        });
        for (at, len) in [(1000, 3 * CELL), (STRIPE, STRIPE), (2 * STRIPE + 5, 17)] {
            let patch = pattern(9, at, len);
            write(&a, h, at, &patch).await;
            data[at..at + len].copy_from_slice(&patch);
        }
        a.fsync(h).await.unwrap();
        same(&content(&reader, "f").await, &data);
    });
}

#[test]
fn a_session_lives_on_while_the_leader_waits_for_a_map() {
    Lab::new(36).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "f").await;
        lab.world().partition("meta", "coord");
        lab.kill_storage(2);
        lab.world().sleep(Duration::from_secs(2)).await; // the client has the next map, the leader has not
        write(&a, h, 0, b"under the new map").await;
        let healing = lab.clone();
        lab.env("observer").tasks.spawn("heal", async move {
            healing.world().sleep(Duration::from_secs(15)).await; // longer than a lease
            healing.world().heal("meta", "coord");
        });
        a.fsync(h).await.unwrap();
        assert_eq!(a.losses(), (0, vec![]));
        same(&content(&lab.client("b").await, "f").await, b"under the new map");
    });
}

#[test]
fn a_client_that_shuts_down_leaves_nothing_to_recover() {
    Lab::new(32).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "f").await;
        write(&a, h, 0, b"all there").await;
        close(&a, h).await;
        a.shutdown().await.unwrap();
        let ino = b.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        let opened = b.open(&root(), ino, OpenMode::READ).await.unwrap();
        assert!(opened.kernel_cache, "no client caches a file that is to be recovered");
    });
}

#[test]
fn a_dead_writers_file_is_recovered_by_the_next_reader() {
    Lab::new(15).run(6, |lab| async move {
        let b = lab.client("b").await;
        let data = pattern(1, 0, 3 * STRIPE);
        {
            let a = lab.client("a").await;
            let h = create(&a, "f").await;
            write(&a, h, 0, &data[..STRIPE + 1000]).await;
            a.fsync(h).await.unwrap();
            write(&a, h, STRIPE + 1000, &data[STRIPE + 1000..]).await;
            lab.env("a").clock.sleep(Duration::from_millis(500)).await;
            lab.world().kill("a");
        }
        let got = content(&b, "f").await;
        same(&got, &data[..STRIPE + 1000]);
        let h = open(&b, "f", OpenMode::BOTH).await;
        write(&b, h, 2 * STRIPE, b"x").await;
        close(&b, h).await;
        let mut expected = data[..STRIPE + 1000].to_vec();
        expected.resize(2 * STRIPE, 0);
        expected.push(b'x');
        same(&content(&b, "f").await, &expected);
    });
}

/// It is cut off from all nodes with changes in flight; another client takes over and writes at the same
/// place. After its return it may write again, but must not send the lost changes.
#[test]
fn changes_lost_with_a_lease_are_not_sent_under_the_next_one() {
    Lab::new(34).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let old = pattern(1, 0, STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &old).await;
        a.fsync(h).await.unwrap();
        let (lost, kept, last) = (pattern(2, 0, 5000), pattern(3, 0, 5000), pattern(4, 0, 700));
        write(&a, h, 3000, &lost).await;
        for n in 0..6 {
            lab.world().partition("a", &format!("s{n}"));
        }
        let (cut_off, syncing) = (a.clone(), lab.env("a").tasks);
        syncing.spawn("fsync", async move { drop(cut_off.fsync(h).await) });
        lab.world().sleep(Duration::from_millis(100)).await;
        lab.cut_off("a");
        lab.world().sleep(Duration::from_secs(4)).await;
        let of_b = open(&b, "f", OpenMode::BOTH).await;
        write(&b, of_b, 3000, &kept).await;
        close(&b, of_b).await;
        lab.let_back("a");
        while a.losses().0 == 0 {
            lab.world().sleep(Duration::from_millis(10)).await;
        }
        let again = open(&a, "f", OpenMode::BOTH).await;
        write(&a, again, 20_000, &last).await;
        for n in 0..6 {
            lab.world().heal("a", &format!("s{n}"));
        }
        close(&a, again).await;
        lab.world().sleep(Duration::from_secs(10)).await;
        let mut expected = old;
        expected[3000..8000].copy_from_slice(&kept);
        expected[20_000..20_700].copy_from_slice(&last);
        same(&content(&lab.client("c").await, "f").await, &expected);
    });
}

#[test]
fn the_metadata_leader_may_restart_under_open_files() {
    Lab::new(16).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data[..STRIPE]).await;
        lab.world().kill("meta");
        write(&a, h, STRIPE, &data[STRIPE..]).await;
        lab.meta().await;
        close(&a, h).await;
        a.mkdir(&root(), ROOT, b"d", 0o755).await.unwrap();
        same(&content(&lab.client("b").await, "f").await, &data);
    });
}

#[test]
fn a_session_left_at_a_dead_leader_is_closed_at_the_next() {
    Lab::new(17).run(6, |lab| async move {
        let (a, leaves) = (lab.client("a").await, lab.client("leaves").await);
        close(&leaves, create(&leaves, "f").await).await;
        lab.world().kill("meta");
        leaves.shutdown().await.unwrap();
        let left = leaves.session_left().expect("no leader was up to end its session");
        lab.meta().await;
        let next = lab.client("leaves").await;
        let begun = lab.world().now();
        next.close_session(left).await.unwrap();
        a.mkdir(&root(), ROOT, b"d", 0o755).await.unwrap();
        assert!(lab.world().now().since(begun) < Duration::from_millis(500), "nothing is waited for");
        next.shutdown().await.unwrap();
        assert_eq!(next.session_left(), None);
    });
}

/// The leader has changed the names, its answer is lost, and after the loss of the session no client can ask
/// for it again.
#[test]
fn a_rename_whose_answer_is_lost_is_not_done_twice() {
    Lab::new(49).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let mut unknown = [0; 3];
        lab.world().slow_link("meta", "a", Duration::from_millis(3));
        for round in 0..9 {
            let [dir, gone, from, to] = ["dir", "gone", "from", "to"].map(|name| format!("{name}{round}"));
            close(&b, create(&b, &gone).await).await;
            close(&b, create(&b, &from).await).await;
            let changes = async {
                match round % 3 {
                    0 => a.mkdir(&root(), ROOT, dir.as_bytes(), 0o755).await.map(|_| ()),
                    1 => a.unlink(&root(), ROOT, gone.as_bytes()).await,
                    _ => {
                        let (from, to) = (from.as_bytes(), to.as_bytes());
                        a.rename(&root(), ROOT, from, ROOT, to, RenameMode::NoReplace).await
                    }
                }
            };
            let (changed, ()) = tokio::join!(changes, lose_session(&lab, 2_000 + round * 100));
            let there = async |name: &str| b.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().is_some();
            let happened = match round % 3 {
                0 => there(&dir).await,
                1 => !there(&gone).await,
                _ => there(&to).await && !there(&from).await,
            };
            match changed {
                Ok(()) => assert!(happened, "round {round}"),
                Err(e) => {
                    assert_eq!(e.kind, ErrorKind::Io, "round {round}: {e}");
                    unknown[(round % 3) as usize] += u32::from(happened);
                }
            }
        }
        assert!(unknown.iter().all(|n| *n > 0), "no answer was lost of one kind: {unknown:?}");
    });
}

/// One more than parity tolerates.
async fn three_targets_die(lab: &Lab, after_us: u64) {
    lab.world().sleep(Duration::from_micros(after_us)).await;
    (0..3).for_each(|n| lab.kill_storage(n));
}
async fn three_targets_return(lab: &Lab) {
    for n in 0..3 {
        lab.storage(n).await;
    }
    lab.all_current().await.unwrap();
}

/// Some targets have their fragments of a stripe, and too many others have died: the write fails, and cannot
/// be undone yet.
#[test]
fn a_failed_write_on_some_targets_leaves_no_unreadable_hole() {
    Lab::new(50).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let mut failed = 0;
        for round in 1..15 {
            let name = format!("f{round}");
            let h = create(&a, &name).await;
            let data = pattern(round, 0, 6 * STRIPE);
            let writes = async {
                a.write(h, 0, data.clone().into()).await?;
                a.fsync(h).await
            };
            let (written, ()) = tokio::join!(writes, three_targets_die(&lab, round * 200));
            let again = pattern(round + 100, 0, 5 * STRIPE);
            match round % 3 {
                0 => drop((a.flush(h).await, a.release(h).await)),
                1 => drop(a.write(h, 0, again.clone().into()).await),
                _ => {}
            }
            three_targets_return(&lab).await;
            if round % 2 == 0 {
                lab.world().sleep(Duration::from_secs(2)).await; // it is taken back without a request
            }
            let got = content(&b, &name).await;
            assert!(got.len() <= data.len(), "round {round}");
            match written {
                Ok(()) if round % 3 != 1 => same(&got, &data),
                _ => {
                    let bytes = got.iter().zip(data.iter().zip(again.iter().chain(&data[again.len()..])));
                    let unknown = bytes.enumerate().find(|(_, (got, (a, b)))| ![**a, **b, 0].contains(got));
                    assert_eq!(unknown, None, "round {round}: bytes that no write has");
                }
            }
            failed += u32::from(written.is_err());
            let h = open(&b, &name, OpenMode::BOTH).await;
            write(&b, h, 0, &data).await;
            close(&b, h).await;
            same(&content(&a, &name).await, &data);
        }
        assert!(failed > 3, "{failed} writes failed");
    });
}

/// Targets die during a write over existing bytes: some have the new version as their base, others next to the old one.
/// Its writer keeps the file open, or closes it while too few targets are up to settle it.
#[test]
fn a_failed_overwrite_reads_the_same_from_any_targets() {
    Lab::new(51).run(6, |lab| async move {
        let connect = async |name: &str, patience_s: u64| {
            let config = ClientConfig { patience: Duration::from_secs(patience_s), ..lab.config(name) };
            Client::connect(lab.env(name), config, Arc::new(NoKernel)).await.unwrap()
        };
        let b = connect("b", 20).await;
        let mut failed = [0; 4];
        for round in 1..25 {
            let (name, writer) = (format!("f{round}"), format!("a{round}"));
            let a = connect(&writer, 5).await;
            let h = create(&a, &name).await;
            let old = pattern(round, 0, 4 * STRIPE);
            write(&a, h, 0, &old).await;
            a.fsync(h).await.unwrap();
            let new = pattern(round + 100, 0, 4 * STRIPE);
            let writes = async {
                a.write(h, 0, new.clone().into()).await?;
                a.fsync(h).await
            };
            let (written, ()) = tokio::join!(writes, three_targets_die(&lab, 700 + round / 4 * 140));
            match round % 4 {
                0 => {}
                1 => {
                    let found = b.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap();
                    drop(b.open(&root(), found.attr.ino, OpenMode::READ).await); // takes it from the writer
                }
                way => {
                    drop((a.flush(h).await, a.release(h).await));
                    lab.world().sleep(Duration::from_secs(1)).await; // the leader learns of the close
                    match way {
                        2 => lab.world().kill(&writer),
                        _ => drop(a.shutdown().await),
                    }
                }
            }
            three_targets_return(&lab).await;
            let got = content(&b, &name).await;
            failed[(round % 4) as usize] += u32::from(written.is_err());
            if written.is_ok() {
                same(&got, &new);
            }
            let unknown = got.iter().zip(old.iter().zip(&new)).position(|(got, (a, b))| got != a && got != b);
            assert_eq!((unknown, got.len()), (None, old.len()), "round {round}: bytes that no write has");
            for n in [1, 4] {
                lab.kill_storage(n);
                let other = lab.client(&format!("without {n} in {round}")).await;
                same(&content(&other, &name).await, &got);
                lab.storage(n).await;
                lab.all_current().await.unwrap();
            }
            if round % 4 < 2 {
                drop((a.release(h).await, a.shutdown().await));
            }
        }
        assert!(failed.iter().all(|n| *n > 2), "writes that failed: {failed:?}");
    });
}

/// A target has its fragment of a new stripe before the others have theirs, and restarts: no other member
/// knows the stripe, so it drops it when it is brought up to date.
#[test]
fn fragments_lost_by_a_target_during_a_write_are_resent() {
    Lab::new(52).run(6, |lab| async move {
        let a = lab.client("a").await;
        for first in 0..6 {
            let name = format!("f{first}");
            let h = create(&a, &name).await;
            let data = pattern(first.into(), 0, 6 * STRIPE);
            let others = (0..6).filter(|n| *n != first);
            others.clone().for_each(|n| lab.world().partition("a", &format!("s{n}")));
            let writes = async {
                a.write(h, 0, data.clone().into()).await?;
                a.fsync(h).await
            };
            let returns = async {
                lab.world().sleep(Duration::from_millis(50)).await;
                lab.kill_storage(first);
                lab.storage(first).await;
                lab.all_current().await.unwrap();
                others.clone().for_each(|n| lab.world().heal("a", &format!("s{n}")));
            };
            let (written, ()) = tokio::join!(writes, returns);
            written.unwrap();
            close(&a, h).await;
            // One that answered later than the others may have been demoted.
            lab.wait_whole(&lab.observe().await).await;
            for lost in [1, 3].map(|n| [(first + n) % 6, (first + n + 1) % 6]) {
                lost.iter().for_each(|n| lab.kill_storage(*n));
                same(
                    &content(&lab.client(&format!("without {lost:?} of {first}")).await, &name).await,
                    &data,
                );
                for n in lost {
                    lab.storage(n).await;
                }
                lab.all_current().await.unwrap();
            }
        }
    });
}

/// With its writer a target dies that alone has logged what was written last. Others write the stripe over
/// before it is back.
#[test]
fn a_dead_writers_bytes_do_not_replace_later_ones() {
    const FILES: usize = 24;
    for target in 0..3 {
        Lab::new(55).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let (old, new) = (pattern(1, 0, STRIPE), pattern(2, 0, STRIPE));
            let mut handles = Vec::new();
            for n in 0..FILES {
                let h = create(&a, &format!("f{n}")).await;
                write(&a, h, 0, &old).await;
                a.fsync(h).await.unwrap();
                handles.push(h);
            }
            let pairs: Vec<_> =
                (0..6).flat_map(|n| (0..n).map(move |m| (format!("s{n}"), format!("s{m}")))).collect();
            pairs.iter().for_each(|(n, m)| lab.world().partition(n, m));
            for h in &handles {
                write(&a, *h, 0, b"of the dead").await;
                let (a, h) = (a.clone(), *h);
                lab.env("a").tasks.spawn("save", async move { drop(a.fsync(h).await) });
            }
            lab.world().sleep(Duration::from_millis(50)).await;
            lab.world().kill("a");
            lab.kill_storage(target);
            pairs.iter().for_each(|(n, m)| lab.world().heal(n, m));
            for n in 0..FILES {
                let h = open(&b, &format!("f{n}"), OpenMode::BOTH).await;
                write(&b, h, 0, &new).await;
                close(&b, h).await;
            }
            lab.storage(target).await;
            lab.all_current().await.unwrap();
            lab.world().sleep(Duration::from_secs(3)).await; // logs agree
            let c = lab.client("c").await;
            for n in 0..FILES {
                same(&content(&c, &format!("f{n}")).await, &new);
            }
        });
    }
}

/// A machine that was suspended, or moved: no other node was silent, and they could not answer its requests.
#[test]
fn a_leader_that_was_paused_takes_no_lease_away() {
    for seed in 700..721 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&a, "f").await;
            write(&a, h, 0, b"nobody has it").await;
            let (world, clock) = (lab.world(), lab.world().clock());
            let stall = async |begins_us: u64| {
                clock.sleep(Duration::from_micros(begins_us * (seed - 700))).await;
                world.pause("meta");
                clock.sleep(Duration::from_secs(24)).await;
                world.resume("meta");
            };
            match seed % 3 {
                // With nothing to do.
                0 => stall(170_000).await,
                // While it waits for its former clients, one of which stalls a little longer.
                1 => {
                    world.pause("a");
                    lab.kill_meta();
                    lab.meta().await;
                    stall(50).await;
                    clock.sleep(Duration::from_secs(1)).await; // half a lease
                    world.resume("a");
                }
                // While it waits for an answer to a recall.
                _ => {
                    let found = b.lookup(&root(), ROOT, b"f").await.unwrap().expect("the name exists");
                    let opens =
                        async { while b.open(&root(), found.attr.ino, OpenMode::READ).await.is_err() {} };
                    tokio::join!(opens, stall(50));
                }
            }
            clock.sleep(Duration::from_secs(10)).await;
            a.fsync(h).await.unwrap();
            assert_eq!(a.losses().0, 0, "seed {seed}");
            same(&content(&b, "f").await, b"nobody has it");
        });
    }
}

/// The writer dies with a target that has prepared or just committed its stripe, while another target
/// returns.
#[test]
fn a_dead_writers_bytes_read_the_same_from_any_targets() {
    let (old, new) = (pattern(1, 0, CELL), pattern(2, 0, CELL));
    for n in 0..36u64 {
        let (old, new) = (&old, &new);
        Lab::with(800 + n, "replica:2", 2000).run(2, |lab| async move {
            let (a, b, world) = (lab.client("a").await, lab.client("b").await, lab.world());
            let h = create(&a, "f").await;
            write(&a, h, 0, old).await;
            a.fsync(h).await.unwrap();
            lab.kill_storage(1);
            world.sleep(Duration::from_secs(2)).await;
            world.slow_link("a", "s0", Duration::from_millis(300));
            world.kill_at("s0", [crash_points::FRAGMENT_LOGGED, crash_points::COMMITTED][n as usize % 2], 1);
            write(&a, h, 0, new).await;
            let saves = a.clone();
            lab.env("a").tasks.spawn("save", async move { drop(saves.fsync(h).await) });
            world.sleep(Duration::from_millis(40 * (n / 2))).await;
            lab.storage(1).await;
            while world.is_up("s0") {
                world.sleep(Duration::from_millis(10)).await;
            }
            world.kill("a");
            world.spare("s0");
            // With the second target, or with both where that is not current without the first.
            let alone = try_content(&b, "f").await.ok();
            lab.storage(0).await;
            lab.all_current().await.unwrap();
            let read = content(&b, "f").await;
            assert!(read == *old || read == *new, "of which write is it?");
            assert!(alone.is_none_or(|alone| alone == read), "the stripe changed when a target came back");
            for gone in 0..2 {
                lab.kill_storage(gone);
                same(&content(&lab.client(&format!("c{gone}")).await, "f").await, &read);
                lab.storage(gone).await;
                lab.all_current().await.unwrap();
            }
        });
    }
}

/// It was prepared at one target that went away, so it was dropped; others have written since, one of whom
/// dies.
#[test]
fn an_aborted_write_stays_void_when_a_member_returns() {
    const FILES: usize = 8;
    for away in 0..2 {
        Lab::with(850, "replica:2", 2000).run(2, |lab| async move {
            let (a, b, world) = (lab.client("a").await, lab.client("b").await, lab.world());
            let mut expected = pattern(1, 0, CELL);
            let mut handles = Vec::new();
            for n in 0..FILES {
                let h = create(&a, &format!("f{n}")).await;
                write(&a, h, 0, &expected).await;
                a.fsync(h).await.unwrap();
                handles.push(h);
            }
            world.slow_link("a", &format!("s{}", 1 - away), Duration::from_millis(100));
            for h in handles {
                write(&a, h, 0, &pattern(2, 0, CELL)).await;
                let a = a.clone();
                lab.env("a").tasks.spawn("save", async move { drop(a.fsync(h).await) });
            }
            world.sleep(Duration::from_millis(60)).await;
            world.kill("a");
            lab.kill_storage(away);
            for n in 0..FILES {
                let h = open(&b, &format!("f{n}"), OpenMode::BOTH).await;
                same(&read(&b, h, 0, CELL).await, &expected);
                write(&b, h, 10, b"since").await;
                b.fsync(h).await.unwrap();
            }
            expected[10..15].copy_from_slice(b"since");
            lab.storage(away).await;
            lab.all_current().await.unwrap();
            world.kill("b");
            let c = lab.client("c").await;
            for n in 0..FILES {
                same(&content(&c, &format!("f{n}")).await, &expected);
            }
        });
    }
}

/// A fragment that hung in one target's disk arrives after all, long after its writer has reported that it
/// failed, or has continued without that target.
#[test]
fn an_abandoned_write_does_not_return_from_a_stalled_disk() {
    for hangs in 0..2 {
        Lab::with(860, "replica:2", 2000).run(2, |lab| async move {
            let (a, b) = (impatient_client(&lab, "a").await, lab.client("b").await);
            let mut expected = pattern(1, 0, CELL);
            let h = create(&a, "f").await;
            write(&a, h, 0, &expected).await;
            a.fsync(h).await.unwrap();
            // Until further notice: a disk that is only slow is waited for.
            let faults = DiskFaults { hangs: true, ..DiskFaults::default() };
            lab.world().set_disk_faults(&format!("s{hangs}"), faults);
            write(&a, h, 0, &pattern(2, 0, CELL)).await;
            // It fails, or the group has continued without the target.
            if a.fsync(h).await.is_ok() {
                expected = pattern(2, 0, CELL);
            }
            go_on(&lab, hangs..hangs + 1);
            same(&content(&b, "f").await, &expected);
            write(&a, h, 10, b"since").await;
            a.fsync(h).await.unwrap();
            expected[10..15].copy_from_slice(b"since");
            lab.world().sleep(HUNG).await;
            lab.world().kill("a");
            lab.world().sleep(Duration::from_secs(5)).await; // its session ends
            same(&content(&lab.client("c").await, "f").await, &expected);
        });
    }
}

/// A write of a part of a stripe hangs in the disks of its targets and fails; its writer repeats it, and only
/// then the first one arrives.
#[test]
fn a_write_that_hung_until_its_abort_is_not_logged() {
    Lab::with(861, "replica:2", 2000).run(2, |lab| async move {
        let a = impatient_client(&lab, "a").await;
        let mut expected = pattern(1, 0, CELL);
        let h = create(&a, "f").await;
        write(&a, h, 0, &expected).await;
        a.fsync(h).await.unwrap();
        hang(&lab, 0..2);
        write(&a, h, 100, &pattern(2, 0, 20_000)).await;
        assert!(a.fsync(h).await.is_err());
        go_on(&lab, 0..2);
        let newer = pattern(3, 0, 20_000);
        write(&a, h, 100, &newer).await;
        a.fsync(h).await.unwrap();
        expected[100..20_100].copy_from_slice(&newer);
        lab.world().sleep(HUNG).await;
        same(&content(&lab.client("c").await, "f").await, &expected);
    });
}

/// Not so long that the target is taken for one that hangs, but longer than this client tries anything.
const HUNG: Duration = Duration::from_secs(8);
async fn impatient_client(lab: &Lab, name: &str) -> Client {
    let config = ClientConfig { patience: HUNG / 3, ..lab.config(name) };
    Client::connect(lab.env(name), config, Arc::new(NoKernel)).await.unwrap()
}
/// The time that each new disk operation of these storage nodes takes.
fn hang(lab: &Lab, nodes: std::ops::Range<u8>) {
    let faults = DiskFaults { delay: HUNG, ..DiskFaults::default() };
    nodes.for_each(|n| lab.world().set_disk_faults(&format!("s{n}"), faults));
}
fn go_on(lab: &Lab, nodes: std::ops::Range<u8>) {
    nodes.for_each(|n| lab.world().set_disk_faults(&format!("s{n}"), DiskFaults::default()));
}

/// A write to a shared file gets to one stripe and hangs at the next; the leader dies, and does not learn
/// that it failed.
#[test]
fn a_failed_write_past_the_end_never_shows_though_unreported() {
    Lab::new(862).run(6, |lab| async move {
        let (a, b, world) = (impatient_client(&lab, "a").await, lab.client("b").await, lab.world());
        let (ha, hb) = (create(&a, "f").await, open(&b, "f", OpenMode::BOTH).await);
        let mut expected = pattern(1, 0, CELL);
        write(&a, ha, 0, &expected).await;
        write(&b, hb, 0, &expected).await;
        hang(&lab, 0..6);
        let failing = a.write(ha, (STRIPE - 1000) as u64, pattern(2, 0, 21_000).into());
        let leader_dies = async {
            world.sleep(HUNG / 6).await;
            lab.kill_meta();
        };
        assert!(tokio::join!(failing, leader_dies).0.is_err());
        a.release(ha).await.unwrap_err();
        go_on(&lab, 0..6);
        lab.meta().await;
        world.sleep(Duration::from_secs(5)).await;
        write(&b, hb, 2 * STRIPE, b"far").await;
        expected.resize(2 * STRIPE, 0);
        expected.extend_from_slice(b"far");
        same(&read(&b, hb, 0, 3 * STRIPE).await, &expected);
    });
}

/// Its upkeep may still have a request to send.
#[test]
fn a_client_that_has_closed_its_session_asks_no_more() {
    Lab::new(191).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "f").await;
        close(&a, h).await;
        a.shutdown().await.unwrap();
        let cred = root();
        let asked = a.lookup(&cred, ROOT, b"absent");
        let soon = lab.env("a").clock.timeout(Duration::from_secs(1), asked).await;
        assert_eq!(soon.expect("it ends at once").unwrap_err().kind, ErrorKind::Io);
    });
}
