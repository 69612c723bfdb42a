//! Claim: data of a volume with a home is shipped while it is written, exactly; the death of a mover loses
//! nothing; changes of others at home are never overwritten silently; data that is at home may be evicted,
//! and is recalled or named.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::{Bench, PATIENCE};
use common::{can_mount, pattern, text, wait_until, weir};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, symlink};

#[test]
fn a_growing_file_is_at_home_as_a_prefix_and_names_follow() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    // Some of it existed before the relation.
    fs::create_dir(bench.data.join("before")).unwrap();
    fs::write(bench.data.join("before/old"), pattern(1, 300_000)).unwrap();
    bench.relate();
    let (bytes, mut written) = (pattern(2, 24 << 20), 0);
    let mut file = File::create(bench.data.join("growing")).unwrap();
    while written < bytes.len() {
        file.write_all(&bytes[written..written + (6 << 20)]).unwrap();
        written += 6 << 20;
        // Without a sync or a close: it comes by itself.
        wait_until("written bytes are at home", PATIENCE, || {
            fs::metadata(bench.home.join("growing")).is_ok_and(|m| m.len() + (6 << 20) > written as u64)
        });
        let there = fs::read(bench.home.join("growing")).unwrap();
        assert!(there == bytes[..there.len()], "home shows something else than a prefix");
    }
    drop(file);
    let data = &bench.data;
    fs::create_dir_all(data.join("a/b")).unwrap();
    fs::write(data.join("a/b/small"), b"small").unwrap();
    fs::hard_link(data.join("a/b/small"), data.join("a/other name")).unwrap();
    symlink("b/small", data.join("a/link")).unwrap();
    fs::write(data.join("a/replaced"), b"first").unwrap();
    fs::write(data.join("a/new"), pattern(3, 5 << 20)).unwrap();
    fs::rename(data.join("a/new"), data.join("a/replaced")).unwrap();
    fs::rename(data.join("a/b"), data.join("before/b")).unwrap();
    let sparse = File::create(data.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 9_000_000).unwrap();
    drop(sparse);
    let truncated = File::options().write(true).open(data.join("before/old")).unwrap();
    truncated.set_len(1000).unwrap();
    truncated.write_all_at(b"after the cut", 2000).unwrap();
    drop(truncated);
    fs::write(data.join("gone"), b"gone").unwrap();
    fs::remove_file(data.join("gone")).unwrap();
    fs::set_permissions(data.join("growing"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    bench.wait_state("synced");
    bench.assert_same();
    let relation = bench.relation();
    assert_eq!((&relation["lag_ms"], &relation["backlog_bytes"]), (&0.into(), &0.into()));
}

#[test]
fn a_mover_killed_in_the_middle_of_a_file_loses_nothing() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    let bytes = pattern(4, 48 << 20);
    let mut file = File::create(bench.data.join("big")).unwrap();
    for (i, part) in bytes.chunks(4 << 20).enumerate() {
        file.write_all(part).unwrap();
        if i % 4 == 3 {
            wait_until("some of it to be at home", PATIENCE, || {
                fs::metadata(bench.home.join("big")).is_ok_and(|m| m.len() > (i as u64) << 20)
            });
            bench.cluster.kill("mover-1");
            fs::rename(bench.data.join("big"), bench.data.join("x")).unwrap();
            fs::rename(bench.data.join("x"), bench.data.join("big")).unwrap();
            bench.cluster.up();
        }
    }
    drop(file);
    bench.wait_state("synced");
    bench.assert_same();
    assert!(fs::read(bench.home.join("big")).unwrap() == bytes);
}

#[test]
fn changes_of_others_at_home_are_not_overwritten() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    fs::write(bench.data.join("f"), b"from the volume").unwrap();
    fs::write(bench.data.join("g"), b"undisturbed").unwrap();
    bench.wait_state("synced");
    fs::write(bench.home.join("f"), b"by a stranger at home").unwrap();
    fs::write(bench.data.join("f"), b"from the volume again").unwrap();
    bench.wait_state("diverged");
    assert_eq!(fs::read(bench.home.join("f")).unwrap(), b"by a stranger at home");
    let relation = bench.relation();
    let item = &relation["conflicts"][0];
    assert_eq!((&item["path"], &item["diverged"]), (&"f".into(), &true.into()), "{relation:#}");
    // The others are not held up.
    fs::write(bench.data.join("g"), b"goes on").unwrap();
    wait_until("another file to be shipped", PATIENCE, || {
        fs::read(bench.home.join("g")).is_ok_and(|bytes| bytes == b"goes on")
    });
    bench.run_weir(&["relation", "resolve", "r1", item["inode"].as_str().unwrap(), "--keep", "volume"]);
    bench.wait_state("synced");
    assert_eq!(fs::read(bench.home.join("f")).unwrap(), b"from the volume again");
    bench.assert_same();
    let refused = bench.try_run_weir(&["relation", "add", "data", "ftp://x"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}

#[test]
fn evicted_files_are_recalled_or_named() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    let bytes = pattern(5, 20 << 20);
    let path = bench.data.join("frames");
    fs::write(&path, &bytes).unwrap();
    bench.wait_state("synced");
    let state = || -> Value {
        let shown = weir(&["file", "state", path.to_str().unwrap(), "--json"]);
        assert!(shown.status.success(), "{}", text(&shown.stderr));
        let value: Value = serde_json::from_slice(&shown.stdout).unwrap();
        value[0].clone()
    };
    let evict = || {
        wait_until("home to have proved all of it", PATIENCE, || {
            weir(&["file", "evict", path.to_str().unwrap()]).status.success()
        });
        assert_eq!(state()["offline"], 20 << 20);
    };
    evict();
    let kept = bench.try_run_weir(&["relation", "remove", "r1"]);
    assert!(text(&kept.stderr).contains("recall them first"), "{}", text(&kept.stderr));
    let before = fs::metadata(&path).unwrap();
    assert_eq!(before.len(), 20 << 20, "the name and its attributes stay");
    assert!(fs::read(&path).unwrap() == bytes);
    assert_eq!(state()["offline"], 0);

    // A write to an evicted file recalls it first.
    evict();
    File::options().write(true).open(&path).unwrap().write_all_at(b"new", 7_000_000).unwrap();
    let mut expected = bytes;
    expected[7_000_000..7_000_003].copy_from_slice(b"new");
    assert!(fs::read(&path).unwrap() == expected);
    bench.wait_state("synced");
    bench.assert_same();

    // Damage at home that size and time do not show: the checksum does.
    evict();
    let home = bench.home.join("frames");
    let (accessed, modified) = {
        let m = fs::metadata(&home).unwrap();
        (m.accessed().unwrap(), m.modified().unwrap())
    };
    let damaged = File::options().write(true).open(&home).unwrap();
    damaged.write_all_at(b"rotten", 15_000_000).unwrap();
    damaged.set_times(fs::FileTimes::new().set_accessed(accessed).set_modified(modified)).unwrap();
    drop(damaged);
    let mut file = File::open(&path).unwrap();
    let mut read = Vec::new();
    let error = file.read_to_end(&mut read).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert!(read == expected[..read.len()], "what was read is right");
    assert!(bench.cluster.logs().contains("are not what was shipped"));
}

#[test]
fn a_file_whose_writer_was_killed_is_complete_at_home_by_itself() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    let bytes = pattern(6, 6 << 20);
    let path = bench.data.join("frames");
    let mut file = File::create(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    wait_until("what was synced to be at home", PATIENCE, || {
        fs::metadata(bench.home.join("frames")).is_ok_and(|m| m.len() == bytes.len() as u64)
    });
    bench.run_weir(&["volume", "changes", "data", "--cursor", "test"]);
    bench.cluster.kill("mount-1");
    drop(file); // the mount has ended: this reaches no process
    // No client reads the file: its changes are in the changelog.
    wait_until("the file to be complete", PATIENCE, || {
        bench.run_weir(&["volume", "changes", "data", "--cursor", "test"]).contains("\"what\":\"complete\"")
    });
    bench.wait_state("synced");
    assert!(fs::read(bench.home.join("frames")).unwrap() == bytes);
    bench.cluster.up();
    bench.assert_same();
}

/// A file that a snapshot holds has its bytes in more than one object; home gets the file's, and recalled
/// bytes are the file's.
#[test]
fn changes_after_a_snapshot_are_shipped_as_they_are() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    let (path, mib) = (bench.data.join("file"), 1 << 20);
    fs::write(&path, pattern(1, 9 * mib + 5)).unwrap();
    bench.wait_state("synced");
    for snapshot in 0..2 {
        bench.run_weir(&["volume", "snapshot", "data", &format!("s{snapshot}")]);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&pattern(2 + snapshot, mib), (1 + 4 * snapshot) * mib as u64 + 777).unwrap();
        drop(file);
        bench.wait_state("synced");
        bench.assert_same();
    }
}

/// The bytes of a file that a snapshot holds, or held, are in several objects: home's proof is of the file's,
/// wherever they are.
#[test]
fn data_held_by_a_snapshot_is_evicted_and_reads_as_before() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    let (path, mib) = (bench.data.join("file"), 1 << 20);
    let change = |n: usize| {
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&pattern(2 + n as u64, mib), ((1 + 3 * n) * mib + 777) as u64).unwrap();
        drop(file);
        bench.wait_state("synced");
        fs::read(&path).unwrap()
    };
    fs::write(&path, pattern(1, 13 * mib + 5)).unwrap();
    bench.wait_state("synced");
    let mut then = vec![fs::read(&path).unwrap()];
    bench.run_weir(&["volume", "snapshot", "data", "s0"]);
    then.push(change(0));
    bench.run_weir(&["volume", "snapshot", "data", "s1"]);
    let shown = |n: usize| fs::read(bench.data.join(format!(".snapshots/s{n}/file"))).unwrap();
    bench.evict(&path);
    (0..2).for_each(|n| assert!(shown(n) == then[n], "snapshot s{n} shows something else"));
    assert!(fs::read(&path).unwrap() == then[1], "what came back is not what was written");
    // Written while a new one holds the recalled bytes, evicted when all are gone but one.
    bench.run_weir(&["volume", "snapshot", "data", "s2"]);
    let written = change(2);
    for snapshot in ["s0", "s2"] {
        bench.run_weir(&["volume", "snapshot", "data", snapshot, "--delete"]);
    }
    bench.evict(&path);
    assert!(shown(1) == then[1], "snapshot s1 shows something else");
    assert!(fs::read(&path).unwrap() == written, "what came back is not what was written");
    bench.assert_same();
}

/// Any change by others at home is found, named, blocks the eviction of the file, and is repaired from here.
#[test]
fn a_home_is_verified_and_differences_are_repaired() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.relate();
    fs::create_dir(bench.data.join("d")).unwrap();
    for name in ["d/good", "d/flipped", "d/gone", "d/longer", "evicted"] {
        fs::write(bench.data.join(name), pattern(name.len() as u64, 5 << 20)).unwrap();
    }
    std::os::unix::fs::symlink("good", bench.data.join("d/link")).unwrap();
    bench.wait_state("synced");
    bench.assert_same();
    let verify = |args: &[&str]| {
        let output = bench.try_run_weir(&[&["relation", "verify", "r1", "--json"], args].concat());
        let value: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
        (output.status.code(), value)
    };
    let (code, value) = verify(&[]);
    assert_eq!(
        (code, &value["wrong"], &value["under_way"]),
        (Some(0), &Value::Array(vec![]), &0.into()),
        "{value:#}"
    );
    assert_eq!((&value["files"], &value["directories"], &value["others"]), (&5.into(), &1.into(), &1.into()));
    assert_eq!((&value["bytes"], &value["unproved_bytes"]), (&(25 << 20).into(), &0.into()));

    bench.evict(&bench.data.join("evicted"));
    let flip = |name: &str| {
        // As a disk would: the times stay.
        let path = bench.home.join(name);
        let (file, before) =
            (fs::File::options().write(true).open(&path).unwrap(), fs::metadata(&path).unwrap());
        file.write_all_at(b"!", 4_500_000).unwrap();
        file.set_modified(before.modified().unwrap()).unwrap();
    };
    flip("d/flipped");
    flip("evicted");
    fs::remove_file(bench.home.join("d/gone")).unwrap();
    fs::OpenOptions::new()
        .append(true)
        .open(bench.home.join("d/longer"))
        .unwrap()
        .write_all(b"more")
        .unwrap();
    fs::write(bench.home.join("d/strange"), b"?").unwrap();
    let (code, value) = verify(&["--names-only"]);
    let named = |value: &Value| -> Vec<String> {
        let wrong = value["wrong"].as_array().unwrap().iter();
        let mut paths: Vec<_> = wrong.map(|w| w["path"].as_str().unwrap().to_owned()).collect();
        paths.sort();
        paths
    };
    assert_ne!(code, Some(0));
    assert_eq!(named(&value), ["d/gone", "d/longer", "d/strange"], "{value:#}");
    assert_eq!(value["conflicts"], 2);
    let (_, value) = verify(&[]);
    assert_eq!(named(&value), ["d/flipped", "d/gone", "d/longer", "d/strange", "evicted"], "{value:#}");

    // A file in conflict is not evicted.
    let kept = weir(&["file", "evict", bench.data.join("d/flipped").to_str().unwrap()]);
    assert!(!kept.status.success() && text(&kept.stderr).contains("in conflict"), "{}", text(&kept.stderr));
    let relation = bench.relation();
    let conflicts = relation["conflicts"].as_array().unwrap();
    assert_eq!(conflicts.len(), 4, "{relation:#}");
    for item in conflicts {
        bench.run_weir(&["relation", "resolve", "r1", item["inode"].as_str().unwrap(), "--keep", "volume"]);
    }
    bench.wait_state("synced");
    fs::remove_file(bench.home.join("d/strange")).unwrap();
    // A decision does not repair data that is at home only: it still differs from the shipped data.
    assert!(fs::read(bench.data.join("evicted")).is_err());
    let (_, value) = verify(&["--dry-run"]);
    assert_eq!((named(&value), &value["conflicts"]), (vec!["evicted".to_owned()], &0.into()), "{value:#}");
    fs::remove_file(bench.data.join("evicted")).unwrap();
    fs::remove_file(bench.data.join("d/good")).unwrap(); // and the directory's time is the volume's again
    bench.wait_state("synced");
    bench.assert_same();
    assert_eq!(verify(&[]).0, Some(0));
}

#[test]
fn excluded_files_stay_away_and_the_rate_is_limited() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    let (url, rules) = (bench.url(), ["--exclude", "*.tmp", "--bandwidth", "500KB/s"]);
    bench.run_weir(&[&["relation", "add", "data", &url, "--evict"], &rules[..]].concat());
    let begun = std::time::Instant::now();
    fs::write(bench.data.join("big"), pattern(1, 5 << 20)).unwrap();
    fs::write(bench.data.join("x.tmp"), pattern(2, 1 << 20)).unwrap();
    let mut more = 0;
    wait_until("the limit to be named", PATIENCE, || {
        let relation = bench.relation();
        if relation["backlog_bytes"] == 0 {
            // All was copied before a slow machine could ask.
            more += 1;
            fs::write(bench.data.join(format!("more{more}")), pattern(more, 2 << 20)).unwrap();
        }
        relation["limited_by"].as_str().is_some_and(|by| by == "its bandwidth limit of 0.5 MB/s")
    });
    wait_until("the limited file to be at home", PATIENCE, || {
        fs::read(bench.home.join("big")).is_ok_and(|bytes| bytes == pattern(1, 5 << 20))
    });
    assert!(begun.elapsed().as_secs() > 7, "5 MiB at 0.5 MB/s after {:?}", begun.elapsed());
    bench.run_weir(&["relation", "set", "r1", "--bandwidth", "none"]);
    bench.wait_state("synced");
    assert!(!bench.home.join("x.tmp").exists());
    let state = weir(&["file", "state", bench.data.join("x.tmp").to_str().unwrap()]);
    let state = text(&state.stdout);
    assert!(state.contains("relation r1 does not copy it: its pattern \"*.tmp\" excludes it"), "{state}");
    let verified = bench.run_weir(&["relation", "verify", "r1", "--json"]);
    let verified: Value = serde_json::from_str(&verified).unwrap();
    assert_eq!((&verified["excluded"], &verified["wrong"]), (&1.into(), &Value::Array(vec![])));
    bench.run_weir(&["relation", "set", "r1", "--no-exclude"]);
    wait_until("what was excluded to be at home", PATIENCE, || {
        fs::read(bench.home.join("x.tmp")).is_ok_and(|bytes| bytes == pattern(2, 1 << 20))
    });
    bench.wait_state("synced");
    bench.assert_same();
}

#[test]
fn files_published_by_link_reach_home_by_each_included_name() {
    if !can_mount() {
        return;
    }
    let bench = Bench::start();
    bench.run_weir(&["relation", "add", "data", &bench.url(), "--exclude", "*.tmp"]);
    let (data, home) = (&bench.data, &bench.home);
    fs::write(data.join("a.tmp"), b"published").unwrap();
    fs::hard_link(data.join("a.tmp"), data.join("a.dat")).unwrap();
    fs::remove_file(data.join("a.tmp")).unwrap();
    fs::write(data.join("b.tmp"), b"stays").unwrap();
    for name in ["b.dat", "b.copy"] {
        fs::hard_link(data.join("b.tmp"), data.join(name)).unwrap();
    }
    bench.wait_state("synced");
    assert_eq!(fs::read(home.join("a.dat")).unwrap(), b"published");
    assert_eq!(fs::read(home.join("b.dat")).unwrap(), b"stays");
    assert!(!home.join("b.tmp").exists() && !home.join("a.tmp").exists());
    let wrong = || {
        let verified = text(&bench.try_run_weir(&["relation", "verify", "r1", "--dry-run", "--json"]).stdout);
        let verified: Value = serde_json::from_str(&verified).unwrap();
        let wrong = verified["wrong"].as_array().unwrap().iter();
        wrong.map(|w| w["path"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(wrong(), [""; 0]);
    // One name of a file is lost at home, and the other one is not.
    for name in ["b.copy", "b.dat"] {
        fs::rename(home.join(name), home.join("aside")).unwrap();
        let found = wrong();
        fs::rename(home.join("aside"), home.join(name)).unwrap();
        assert!(found.iter().any(|path| path.contains(name)), "{name} is not among {found:?}");
    }
}
