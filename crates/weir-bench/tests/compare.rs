//! Claim: `weir-bench compare` measures the same rows on every directory, reports rows that it cannot
//! measure, and leaves nothing behind.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
const SMALL: [&str; 8] = ["--size", "3MiB", "--files", "12", "--ops", "9", "--rounds", "2"];

fn two() -> (TempDir, PathBuf, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let dirs = ["one", "two"].map(|name| root.path().join(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let [one, two] = dirs;
    (root, one, two)
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn compare(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir-bench")).arg("compare").args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits for a condition of the world outside.
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The end of a comparison that was started by a test.
fn end(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until("the end of the comparison", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

fn assert_empty(dir: &Path) {
    let left: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{} has {left:?}", dir.display());
}

/// All rows, each with figures of both directories that are rates.
fn assert_figures(json: &serde_json::Value, base: usize) {
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 18);
    for row in rows {
        let figures = row["figures"].as_array().unwrap();
        assert_eq!(figures.len(), 2, "{row:#}");
        for (at, figure) in figures.iter().enumerate() {
            assert!(figure["value"]["median"].as_f64().unwrap() > 0.0, "{row:#}");
            assert_eq!(figure["rounds"].as_array().unwrap().len(), 2);
            assert_eq!(figure["ratio"].is_null(), at == base, "{row:#}");
        }
    }
    assert_eq!(json["bad"], 0, "{json:#}");
}

#[test]
fn a_table_has_all_rows_and_all_directories() {
    let (_root, one, two) = two();
    let output = compare(&[&[path(&one), path(&two)], &SMALL[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for word in ["stream-write", "MiB/s", "shared-write", "random-rdwr", "ls-again", "remove", "B/A", "Linux"]
    {
        assert!(table.contains(word), "no {word} in\n{table}");
    }
    assert!(table.contains(&format!("B: {}", two.display())), "{table}");
    assert!(table.contains("everything read back was right"), "{table}");
    assert_empty(&one);
    assert_empty(&two);
}

#[test]
fn json_has_each_round_and_ratios_to_the_base() {
    let (_root, one, two) = two();
    let words = ["--json", "--base", path(&two), path(&one), path(&two)];
    let output = compare(&[&words, &SMALL[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_figures(&json, 1);
    assert!(json["machine"]["kernel"].as_str().unwrap().contains('.'));
    // Some rows only, in their own order.
    let words = ["--json", "--rows", "find,cold-read", path(&one)];
    let output = compare(&[&words, &SMALL[..]].concat());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = json["rows"].as_array().unwrap().iter().map(|r| r["name"].clone()).collect();
    assert_eq!(names, ["cold-read", "find"]);
    assert_empty(&one);
}

#[test]
fn pages_that_cannot_be_dropped_are_reported() {
    let shm = Path::new("/dev/shm");
    let Ok(dir) = tempfile::tempdir_in(shm) else { return };
    let output = compare(&[&["--rows", "cold-read", path(dir.path())], &SMALL[..]].concat());
    let table = text(&output.stdout);
    // Memory is where the files of a tmpfs are.
    assert!(table.contains("(tmpfs) kept up to 100 % of the pages"), "{table}");
}

#[test]
fn rows_that_cannot_be_compared_are_refused_by_name() {
    let (_root, one, two) = two();
    let file = one.join("file");
    fs::write(&file, "x").unwrap();
    let missing = two.join("missing");
    for (words, code, message) in [
        (vec![path(&one), path(&missing)], 3, format!("stat {}", missing.display())),
        (vec![path(&file)], 2, format!("{} is not a directory", file.display())),
        (vec![path(&one), "--base", path(&two)], 2, format!("--base {} is none", two.display())),
        (vec![path(&one), "--size", "1000TB"], 6, "choose a smaller --size".into()),
        (vec![path(&one), "--rows", "nonsense"], 2, "invalid value 'nonsense'".into()),
        (vec![], 2, "<DIR>...".into()),
    ] {
        let output = compare(&words);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {stderr}");
        assert!(stderr.contains(&message), "{words:?}: {stderr}");
    }
    // No user can make a directory there, not even the superuser. Directories made elsewhere are removed.
    let output = compare(&[path(&two), "/proc"]);
    let stderr = text(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("cannot be compared: make a directory in /proc"), "{stderr}");
    assert_empty(&two);
}

/// A comparison that runs until it is ended, and has begun to measure.
fn endless(dirs: &[&Path]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir-bench"));
    command.args(["compare", "--rows", "sync-write", "--rounds", "1000", "--ops", "100"]);
    let child = command.args(dirs).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the first file", || dirs.iter().all(|dir| own(dir).is_some()));
    child
}

/// The files of a comparison in a directory.
fn own(dir: &Path) -> Option<PathBuf> {
    fs::read_dir(dir).unwrap().next().map(|entry| entry.unwrap().path())
}

#[test]
fn a_signal_ends_it_and_nothing_is_left() {
    for signal in [Signal::INT, Signal::TERM] {
        let (_root, one, two) = two();
        let mut child = endless(&[&one, &two]);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = end(&mut child);
        assert_eq!(status.code(), Some(130));
        assert_empty(&one);
        assert_empty(&two);
    }
}

#[test]
fn an_error_ends_it_and_nothing_is_left() {
    let (_root, one, two) = two();
    let mut child = endless(&[&one, &two]);
    // Another process removes the directory while it is used.
    let taken = own(&two).unwrap();
    wait_until("the directory is gone", || {
        let _ = fs::remove_dir_all(&taken); // files are made in it meanwhile
        !taken.exists()
    });
    let status = end(&mut child);
    assert_eq!(status.code(), Some(3));
    let output = child.wait_with_output().unwrap();
    assert!(text(&output.stderr).contains(path(&taken)), "{}", text(&output.stderr));
    assert_empty(&one);
    assert_empty(&two);
}
