//! Claim: a program that waits for a recall can be killed; pinned files stay; only a file's owner may pin
//! it.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::{Bench, PATIENCE};
use common::{Cluster, can_mount, ends, pattern, text, wait_until, weir};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Far below what a recall may take.
const AT_ONCE: Duration = Duration::from_secs(20);

fn file(verb: &str, path: &Path) -> std::process::Output {
    weir(&["file", verb, path.to_str().unwrap()])
}
fn done(verb: &str, path: &Path) {
    let output = file(verb, path);
    assert!(output.status.success(), "{verb}: {}", text(&output.stderr));
}
fn refused(verb: &str, path: &Path) -> String {
    let output = file(verb, path);
    assert!(!output.status.success(), "{verb} of {} went well", path.display());
    text(&output.stderr)
}
fn state(path: &Path) -> Value {
    let shown = weir(&["file", "state", path.to_str().unwrap(), "--json"]);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    serde_json::from_slice::<Value>(&shown.stdout).unwrap()[0].clone()
}

#[test]
fn a_program_waiting_for_a_recall_dies_and_pinned_files_stay() {
    if !can_mount() {
        return;
    }
    let bench = Bench::without_volume();
    let cluster = &bench.cluster;
    let loose = cluster.mount().join("loose");
    fs::write(&loose, pattern(1, 6 << 20)).unwrap();
    let why = refused("evict", &loose);
    assert!(why.contains("relation") && why.contains("hint:"), "{why}");
    bench.run_weir(&["volume", "create", "data"]);
    bench.relate();
    let path = bench.data.join("frames");
    let bytes = pattern(2, 12 << 20);
    fs::write(&path, &bytes).unwrap();
    wait_until("the file to be at home", PATIENCE, || state(&path)["evictable"] == true);

    done("pin", &path);
    assert_eq!(state(&path)["pinned"], true);
    assert!(refused("evict", &path).contains("pinned"));
    done("unpin", &path);
    let verbs = ["evict", "pin", "recall"].map(|verb| {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args([env!("CARGO_BIN_EXE_weir"), "file", verb, path.to_str().unwrap()])
            .output()
    });
    for output in verbs.into_iter().flatten() {
        assert!(!output.status.success(), "a stranger may do it");
    }
    assert_eq!((&state(&path)["offline"], &state(&path)["pinned"]), (&0.into(), &false.into()));

    done("evict", &path);
    let away = state(&path);
    assert_eq!((&away["offline"], &away["online"]), (&(12 << 20).into(), &0.into()), "{away:#}");
    // No mover recalls it: a waiting program ends when it is killed, reading through pages, directly, or
    // writing.
    cluster.kill("mover-1");
    let file = path.display();
    let waiting = [
        format!("exec cat '{file}'"),
        format!("exec dd if='{file}' iflag=direct bs=1M count=1 status=none"),
        format!("exec dd if=/dev/zero of='{file}' bs=4k count=1 seek=9 conv=notrunc status=none"),
        format!("exec '{}' file recall '{file}'", env!("CARGO_BIN_EXE_weir")),
    ];
    for script in &waiting {
        let run = |script: &str| {
            Command::new("bash")
                .args(["-c", script])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        };
        let mut child = run(script);
        wait_until("a recall is wanted", AT_ONCE, || {
            state(&path)["recalls"].as_array().is_some_and(|r| !r.is_empty())
        });
        assert!(child.try_wait().unwrap().is_none(), "{script} does not wait");
        child.kill().unwrap();
        ends(script, &mut child, AT_ONCE);
    }
    assert_eq!(state(&path)["offline"], 12 << 20, "nothing of it was changed");
    cluster.up();
    done("recall", &path);
    assert_eq!(state(&path)["offline"], 0);
    assert!(fs::read(&path).unwrap() == bytes);
}

/// The front of the file is evicted while it is written; its writer does not notice, and no byte is lost.
#[test]
fn a_file_larger_than_its_volume_fits() {
    if !can_mount() {
        return;
    }
    const LIMIT: u64 = 96 << 20;
    const SIZE: usize = 3 * LIMIT as usize;
    const PART: usize = 1 << 20;
    let cluster = Cluster::with(1, &[]);
    let at = tempfile::tempdir().unwrap();
    let home = at.path().join("home");
    fs::create_dir(&home).unwrap();
    cluster.run_weir(&["volume", "create", "small", "--bytes", &LIMIT.to_string()]);
    cluster.run_weir(&["relation", "add", "small", &format!("file://{}", home.display()), "--evict"]);
    let path = cluster.mount().join("small/large");
    let mut file = fs::File::create(&path).unwrap();
    for n in 0..SIZE / PART {
        file.write_all(&pattern(n as u64, PART)).unwrap();
    }
    file.sync_all().unwrap();
    let now = state(&path);
    assert!(now["offline"].as_u64().unwrap() >= SIZE as u64 - LIMIT, "{now:#}");
    // Evicted bytes are changed while the file is open.
    file.write_all_at(b"changed", 12_345).unwrap();
    drop(file);
    let expected = |n: usize| {
        let mut part = pattern(n as u64, PART);
        if n == 0 {
            part[12_345..12_352].copy_from_slice(b"changed");
        }
        part
    };
    let same = |path: &Path| {
        let mut file = fs::File::open(path).unwrap();
        let mut part = vec![0; PART];
        (0..SIZE / PART).all(|n| file.read_exact(&mut part).is_ok() && part == expected(n))
    };
    assert!(same(&path), "what is read differs from what was written");
    wait_until("home to have it", PATIENCE, || home.join("large").exists() && same(&home.join("large")));
}
