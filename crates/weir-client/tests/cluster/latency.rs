//! Claim: a member that is silent or slow delays no other member's calls, on a whole simulated cluster.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode};
use weir_env::Instant;
use weir_env::sim::DiskFaults;
use weir_lab::*;
use weir_proto::InodeId;
use weir_store::crash_points;

const ROOT: InodeId = InodeId::ROOT;
/// The delay that a member which has fallen silent may add to a read,
const STALL_MAX: Duration = Duration::from_millis(1000);
/// and to a write: its silence, and the time until that is noticed.
const WRITE_STALL_MAX: Duration = Duration::from_millis(SILENCE_MS as u64 + 500);

async fn create(c: &Client, name: &str) -> Handle {
    c.create(&root(), ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap().handle
}

/// The longest of several operations.
struct Longest(Duration);
impl Longest {
    async fn of<T>(&mut self, lab: &Lab, work: impl Future<Output = T>) -> T {
        let clock = lab.env("clock").clock;
        let begun: Instant = clock.now();
        let done = work.await;
        self.0 = self.0.max(clock.now().since(begun));
        done
    }
}

/// As a stopped process is seen: connections stay open and nothing comes.
fn stop(lab: &Lab, n: u8) {
    all_others(n).iter().for_each(|other| lab.world().partition(&format!("s{n}"), other));
}
fn go_on(lab: &Lab, n: u8) {
    all_others(n).iter().for_each(|other| lab.world().heal(&format!("s{n}"), other));
}
fn all_others(n: u8) -> Vec<String> {
    let storage = (0..6).filter(|other| *other != n).map(|other| format!("s{other}"));
    ["coord", "meta", "a", "b"].into_iter().map(String::from).chain(storage).collect()
}

#[test]
fn a_stopped_target_delays_reads_by_a_second_writes_by_silence() {
    for victim in 0..6 {
        Lab::new(40 + u64::from(victim)).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let data = pattern(1, 0, 3 * STRIPE);
            let before = create(&a, "before").await;
            a.write(before, 0, Bytes::from(data.clone())).await.unwrap();
            a.fsync(before).await.unwrap();
            let small = create(&a, "small").await;
            a.write(small, 0, Bytes::from(data[..9000].to_vec())).await.unwrap();
            a.fsync(small).await.unwrap();
            a.release(before).await.unwrap();

            stop(&lab, victim);
            let mut longest = Longest(Duration::ZERO);
            let found = b.lookup(&root(), ROOT, b"before").await.unwrap().unwrap();
            let h = b.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
            for at in (0..data.len()).step_by(CELL) {
                let got = longest.of(&lab, b.read(h, at as u64, CELL)).await.unwrap().concat();
                assert!(got == data[at..at + CELL], "bytes from {at}");
            }
            assert!(longest.0 < STALL_MAX, "a read took {:?}", longest.0);
            for n in 0..4 {
                let f = create(&a, &format!("during-{n}")).await;
                longest.of(&lab, a.write(f, 0, Bytes::from(data.clone()))).await.unwrap();
                longest.of(&lab, a.fsync(f)).await.unwrap();
                a.release(f).await.unwrap();
                longest.of(&lab, a.write(small, 100 * n, Bytes::from_static(b"changed"))).await.unwrap();
                longest.of(&lab, a.fsync(small)).await.unwrap();
            }
            assert!(longest.0 < WRITE_STALL_MAX, "an operation took {:?}", longest.0);
            assert!(a.status().degraded_writes > 0, "acknowledged with what is there: {:?}", a.status());

            // It resumes: its missed writes are repaired, and everything is read from any remaining members.
            go_on(&lab, victim);
            lab.env("clock").clock.sleep(Duration::from_secs(4)).await;
            lab.all_current().await.unwrap();
            let (first, second) = ((victim + 1) % 6, (victim + 2) % 6);
            lab.kill_storage(first);
            lab.kill_storage(second);
            let c = lab.client("c").await;
            for n in 0..4 {
                let found = c.lookup(&root(), ROOT, format!("during-{n}").as_bytes()).await.unwrap().unwrap();
                let h = c.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
                assert!(c.read(h, 0, data.len()).await.unwrap().concat() == data, "file {n}");
            }
        });
    }
}

#[test]
fn a_slow_target_is_done_without_and_repaired_later() {
    Lab::new(60).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 3 * STRIPE);
        // It answers the coordinator quickly, and everything else late.
        let others: Vec<String> = all_others(3).into_iter().filter(|other| other != "coord").collect();
        for other in &others {
            lab.world().slow_link("s3", other, Duration::from_secs(2));
        }
        let mut longest = Longest(Duration::ZERO);
        for n in 0..6 {
            let f = create(&a, &format!("f{n}")).await;
            longest.of(&lab, a.write(f, 0, Bytes::from(data.clone()))).await.unwrap();
            longest.of(&lab, a.fsync(f)).await.unwrap();
            a.release(f).await.unwrap();
        }
        // The client has seen few answers yet, so it is patient.
        assert!(longest.0 < Duration::from_millis(1300), "one of six slow: {:?}", longest.0);
        assert!(a.status().degraded_writes > 0, "{:?}", a.status());
        for other in &others {
            lab.world().slow_link("s3", other, Duration::ZERO);
        }
        lab.env("clock").clock.sleep(Duration::from_secs(10)).await;
        lab.all_current().await.unwrap();
        lab.kill_storage(0);
        lab.kill_storage(5);
        let c = lab.client("c").await;
        for n in 0..6 {
            let found = c.lookup(&root(), ROOT, format!("f{n}").as_bytes()).await.unwrap().unwrap();
            let h = c.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
            assert!(c.read(h, 0, data.len()).await.unwrap().concat() == data, "file {n}");
        }
    });
}

/// Over committed data a stripe is prepared next to the base, after a query: to a member that then falls
/// silent, too.
#[test]
fn a_stripe_is_written_over_while_a_target_falls_silent() {
    for victim in 0..6 {
        Lab::new(80 + u64::from(victim)).run(6, |lab| async move {
            let a = lab.client("a").await;
            let f = create(&a, "f").await;
            a.write(f, 0, Bytes::from(pattern(1, 0, 3 * STRIPE))).await.unwrap();
            a.fsync(f).await.unwrap();
            stop(&lab, victim);
            let data = pattern(2, 0, 3 * STRIPE);
            a.write(f, 0, Bytes::from(data.clone())).await.unwrap();
            a.fsync(f).await.unwrap();
            lab.kill_storage((victim + 1) % 6);
            let b = lab.client("b").await;
            let found = b.lookup(&root(), ROOT, b"f").await.unwrap().unwrap();
            let h = b.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
            assert!(b.read(h, 0, data.len()).await.unwrap().concat() == data, "without {victim}");
        });
    }
}

/// A seal whose leader dies is in doubt, and until that is settled the leader is not repaired, so nothing
/// else is sealed either.
#[test]
fn a_dead_seal_leader_is_redundant_soon_after_its_return() {
    const SOON: Duration = Duration::from_secs(3);
    for (seed, point) in
        [(50, crash_points::SEAL_FOLDED), (51, crash_points::SEAL_PREPARED), (52, crash_points::SEAL_HALF)]
    {
        Lab::new(seed).run(6, |lab| async move {
            let (a, world) = (lab.client("a").await, lab.world());
            let h = a.create(&root(), InodeId::ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap().handle;
            a.write(h, 0, Bytes::from(pattern(1, 0, STRIPE))).await.unwrap();
            a.fsync(h).await.unwrap();
            let names: Vec<String> = (0..6).map(|n| format!("s{n}")).collect();
            names.iter().for_each(|name| world.kill_at(name, point, 1));
            let mut expected = pattern(1, 0, STRIPE);
            for at in (0..STRIPE).step_by(STRIPE / 64) {
                let new = pattern(2, at, STRIPE / 96);
                expected[at..at + new.len()].copy_from_slice(&new);
                a.write(h, at as u64, Bytes::from(new)).await.unwrap();
                a.fsync(h).await.unwrap();
            }
            let dead = loop {
                world.clock().sleep(Duration::from_millis(100)).await;
                if let Some(n) = names.iter().position(|name| !world.is_up(name)) {
                    break n;
                }
            };
            names.iter().for_each(|name| world.spare(name));
            lab.storage(dead as u8).await;
            let returned = world.now();
            lab.all_current().await.unwrap();
            let took = world.now().since(returned);
            assert!(took < SOON, "{point}: redundant {took:?} after it returned");
            assert_eq!(a.read(h, 0, STRIPE).await.unwrap().concat(), expected);
        });
    }
}

/// Their processes are well, but their disks take what they are given and end nothing of it.
#[test]
fn stalled_disks_fail_no_write_while_enough_others_work() {
    for (scheme, targets, hang) in
        [("ec:4+2", 6, vec![0, 1]), ("ec:4+2", 6, vec![3, 5]), ("replica:2", 3, vec![1])]
    {
        Lab::with(50, scheme, 2000).run(targets, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let mut data = pattern(1, 0, 12 * CELL);
            let h = create(&a, "f").await;
            a.write(h, 0, Bytes::from(data.clone())).await.unwrap();
            a.fsync(h).await.unwrap();
            let set = |hangs: bool| {
                let faults = DiskFaults { hangs, ..DiskFaults::default() };
                hang.iter().for_each(|n| lab.world().set_disk_faults(&format!("s{n}"), faults));
            };
            set(true);
            let whole = pattern(2, 0, 8 * CELL);
            data[..8 * CELL].copy_from_slice(&whole);
            a.write(h, 0, Bytes::from(whole)).await.unwrap();
            a.fsync(h).await.unwrap();
            let part = pattern(3, 0, 20_000);
            for at in (0..12).map(|n| n * CELL + 100) {
                data[at..at + 20_000].copy_from_slice(&part);
                a.write(h, at as u64, Bytes::from(part.clone())).await.unwrap();
            }
            a.fsync(h).await.unwrap();
            let ino = b.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let hb = b.open(&root(), ino, OpenMode::READ).await.unwrap().handle;
            assert!(b.read(hb, 0, data.len()).await.unwrap().concat() == data, "while they hang");
            set(false);
            lab.env("clock").clock.sleep(Duration::from_secs(4)).await;
            lab.all_current().await.unwrap();
            (0..targets).filter(|n| !hang.contains(n)).take(hang.len()).for_each(|n| lab.kill_storage(n));
            let c = lab.client("c").await;
            let hc = c.open(&root(), ino, OpenMode::READ).await.unwrap().handle;
            assert!(
                c.read(hc, 0, data.len()).await.unwrap().concat() == data,
                "from them and the others left"
            );
        });
    }
}

/// Its group keeps serving without it, and seals again, with later writes, under the same version.
#[test]
fn late_seal_participant_rejects_superseded_seal() {
    for victim in 0..2 {
        Lab::with(51, "replica:2", 2000).run(2, |lab| async move {
            let (a, world) = (lab.client("a").await, lab.world());
            world.sleep(Duration::from_secs(10)).await; // what follows a start is done
            let mut data = pattern(1, 0, CELL);
            let h = create(&a, "f").await;
            a.write(h, 0, Bytes::from(data.clone())).await.unwrap();
            a.fsync(h).await.unwrap();
            let mut change = async |seed: u64, at: usize| {
                let part = pattern(seed, 0, 30_000);
                data[at..at + part.len()].copy_from_slice(&part);
                a.write(h, at as u64, Bytes::from(part)).await.unwrap();
                a.fsync(h).await.unwrap();
            };
            for n in 0..12 {
                change(20 + n, 100).await; // so much that it is worth a seal
            }
            let hangs = |hangs| DiskFaults { hangs, ..DiskFaults::default() };
            world.set_disk_faults(&format!("s{victim}"), hangs(true));
            world.sleep(Duration::from_secs(6)).await; // the seal begins
            change(3, 20_000).await;
            world.sleep(Duration::from_secs(20)).await; // and continues without it
            world.set_disk_faults(&format!("s{victim}"), hangs(false));
            world.sleep(Duration::from_secs(10)).await;
            lab.all_current().await.unwrap();
            lab.kill_storage(1 - victim);
            let c = lab.client("c").await;
            let ino = c.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let hc = c.open(&root(), ino, OpenMode::READ).await.unwrap().handle;
            assert!(c.read(hc, 0, data.len()).await.unwrap().concat() == data);
        });
    }
}
