//! Claim: any two of six storage processes may die at any time; a third is a clean error; and a death of
//! everything loses nothing that was fsynced.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, OnPanic, can_mount, pattern, text, wait_until, weir};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const FILE_BYTES: usize = 5_300_001;

/// Rounds of "kill everything": a few every day, more with `WEIR_KILL_ROUNDS` in the test's environment.
fn rounds() -> u64 {
    std::env::var("WEIR_KILL_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(4)
}

fn write_file(dir: &Path, n: u64) -> std::io::Result<()> {
    let mut file = File::create(dir.join(format!("f{n}")))?;
    for part in pattern(n, FILE_BYTES).chunks(1 << 20) {
        file.write_all(part)?;
    }
    file.sync_all()
}

fn verify(dir: &Path, n: u64) {
    let found = fs::read(dir.join(format!("f{n}"))).unwrap_or_else(|e| panic!("f{n}: {e}"));
    assert!(found == pattern(n, FILE_BYTES), "f{n} has other bytes");
}

#[test]
fn any_two_of_six_may_die_while_files_are_written_and_read() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let dir = cluster.mount();
    for n in 0..4 {
        write_file(dir, n).unwrap();
    }
    let (done, stop) = (AtomicU64::new(4), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stop = OnPanic(|| stop.store(true, Ordering::Release));
        scope.spawn(|| {
            let _stop = OnPanic(|| stop.store(true, Ordering::Release));
            while !stop.load(Ordering::Acquire) {
                let n = done.load(Ordering::Acquire);
                write_file(dir, n).unwrap_or_else(|e| panic!("write f{n}: {e}"));
                done.store(n + 1, Ordering::Release);
            }
        });
        scope.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Acquire) {
                verify(dir, n % done.load(Ordering::Acquire));
                n += 1;
            }
        });
        for victim in ["storage-2", "storage-5"] {
            let before = done.load(Ordering::Acquire);
            wait_until("files are written", Duration::from_secs(120), || {
                done.load(Ordering::Acquire) >= before + 2
            });
            cluster.kill(victim);
        }
        let before = done.load(Ordering::Acquire);
        wait_until("writing goes on with two gone", Duration::from_secs(120), || {
            done.load(Ordering::Acquire) >= before + 4
        });
        stop.store(true, Ordering::Release);
    });
    for n in 0..done.load(Ordering::Acquire) {
        verify(dir, n);
    }
    assert_eq!(cluster.status()["redundant"], false);

    // A third: writers wait for it, and other calls are still answered.
    cluster.kill("storage-1");
    common::shell("echo 3 > /proc/sys/vm/drop_caches || true");
    std::thread::scope(|scope| {
        let third = scope.spawn(|| write_file(dir, 2000));
        wait_until("the write waits", Duration::from_secs(60), || {
            cluster.status()["troubles"].to_string().contains("for t1 (storage-1)")
        });
        assert!(fs::read_dir(dir).unwrap().count() > 4, "names still answer");
        fs::create_dir(dir.join("still")).unwrap();
        assert!(!third.is_finished());
        // They return: everything is readable and complete again.
        cluster.up();
        third.join().unwrap().unwrap();
    });
    verify(dir, 2000);
    for n in 0..done.load(Ordering::Acquire) {
        verify(dir, n);
    }
    write_file(dir, 1000).unwrap();
    wait_until("everything is redundant again", Duration::from_secs(120), || {
        cluster.status()["redundant"] == true
    });
    // Now two others may go.
    cluster.kill("storage-3");
    cluster.kill("storage-4");
    for n in 0..done.load(Ordering::Acquire) {
        verify(dir, n);
    }
    verify(dir, 1000);
}

#[test]
fn the_death_of_everything_loses_nothing_that_was_fsynced() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let dir = cluster.mount().to_path_buf();
    let next = AtomicU64::new(0);
    for round in 0..rounds() {
        let from = next.load(Ordering::Acquire);
        std::thread::scope(|scope| {
            let _end = OnPanic(|| cluster.kill_all());
            scope.spawn(|| {
                // Ends with the first error: everything is dead then.
                while write_file(&dir, next.load(Ordering::Acquire)).is_ok() {
                    next.fetch_add(1, Ordering::AcqRel);
                }
            });
            // Small synced changes in one growing file at the same time.
            let log = scope.spawn(|| {
                let Ok(file) = OpenOptions::new().create(true).append(true).open(dir.join("log")) else {
                    return 0;
                };
                let mut synced = 0u64;
                for n in 0u64.. {
                    let line = format!("{round:04} {n:010}\n");
                    if (&file).write_all(line.as_bytes()).and_then(|()| file.sync_data()).is_err() {
                        break;
                    }
                    synced = n + 1;
                }
                synced
            });
            wait_until("files are written", Duration::from_secs(120), || {
                next.load(Ordering::Acquire) >= from + 3
            });
            cluster.kill_all();
            let synced = log.join().unwrap();
            cluster.up();
            let lines = fs::read_to_string(dir.join("log")).unwrap();
            let mine: Vec<&str> = lines.lines().filter(|l| l.starts_with(&format!("{round:04} "))).collect();
            assert!(
                mine.len() as u64 >= synced,
                "round {round}: {} of {synced} synced lines are there",
                mine.len()
            );
            for (n, line) in mine.iter().take(synced as usize).enumerate() {
                assert_eq!(*line, format!("{round:04} {n:010}"));
            }
        });
        for n in 0..next.load(Ordering::Acquire) {
            verify(&dir, n);
        }
        let names = fs::read_dir(&dir).unwrap().count() as u64;
        assert!(names > next.load(Ordering::Acquire), "every synced name is there");
    }
    let cluster_dir = cluster.dir();
    assert!(weir(&["down", "--dir", cluster_dir.to_str().unwrap()]).status.success());
    for target in 1..=6 {
        let check = weir(&["inspect", "--check", cluster_dir.join(format!("t{target}")).to_str().unwrap()]);
        assert!(check.status.success(), "{}{}", text(&check.stdout), text(&check.stderr));
    }
}

#[test]
fn flipped_bytes_are_never_returned_and_are_counted() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    for n in 0..3 {
        write_file(cluster.mount(), n).unwrap();
    }
    let dir = cluster.dir();
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    // Every 64 KiB of the slabs of one target: no cell of it survives whole.
    let mut flipped = 0;
    for entry in fs::read_dir(dir.join("t3")).unwrap().flatten() {
        if !entry.file_name().to_string_lossy().starts_with("slab") {
            continue;
        }
        let file = OpenOptions::new().read(true).write(true).open(entry.path()).unwrap();
        let len = file.metadata().unwrap().len().min(64 << 20);
        for offset in (0..len).step_by(64 << 10) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset + 17).unwrap();
            file.write_all_at(&[byte[0] ^ 0x40], offset + 17).unwrap();
            flipped += 1;
        }
    }
    assert!(flipped > 0, "the target has slabs");
    let check = weir(&["inspect", "--check", dir.join("t3").to_str().unwrap()]);
    assert!(!check.status.success(), "the damage is found offline: {}", text(&check.stdout));
    cluster.up();
    for n in 0..3 {
        verify(cluster.mount(), n);
    }
    wait_until("the damage is counted", Duration::from_secs(120), || {
        cluster.status()["health"]["damaged_blocks"].as_u64().is_some_and(|n| n > 0)
    });
}
