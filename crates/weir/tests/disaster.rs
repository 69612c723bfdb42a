//! Claim: after the loss of the metadata directory, a namespace is restored from its export: its files byte
//! for byte, its volumes, quotas and snapshots. Later files have lost their names; data that targets do not
//! hold any more is an error, never zeros or other bytes; and new files never show old bytes.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, copy, errno, pattern, text, volume, wait_until, weir};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

const EIO: i32 = 5;
const PATIENCE: Duration = Duration::from_secs(60);
/// Of a stripe with 4+2.
const STRIPE: usize = 2 << 20;
const FILES: u64 = 6;

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}
/// Of the file of this number: some are in their inode, some take several stripes.
fn content(n: u64) -> Vec<u8> {
    pattern(n, [700, 60_000, 3_000_000, STRIPE * 3][n as usize % 4])
}
fn refused(args: &[&str]) -> String {
    let output = weir(args);
    assert!(!output.status.success(), "{args:?} was not refused");
    text(&output.stderr)
}
fn says(printed: &str, all: &[&str]) {
    assert!(all.iter().all(|part| printed.contains(part)), "expected {all:?}: {printed}");
}
fn json(cluster: &Cluster, args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&cluster.run_weir(&[args, &["--json"]].concat())).unwrap()
}
/// Reads all that can be read at an offset.
fn read_at(path: &Path, at: usize, length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![7; length];
    File::open(path)?.read_exact_at(&mut bytes, at as u64).map(|()| bytes)
}

/// The files that exist when the export is made.
fn before(cluster: &Cluster) {
    let top = cluster.mount();
    volume(cluster, &["create", "data", "--bytes", "1GB", "--inodes", "5000"]);
    for dir in ["docs", "data/runs"] {
        fs::create_dir(top.join(dir)).unwrap();
        (0..FILES).for_each(|n| write(&top.join(dir).join(format!("f{n}")), &content(n)));
    }
    fs::hard_link(top.join("docs/f2"), top.join("docs/same")).unwrap();
    std::os::unix::fs::symlink("f2", top.join("docs/link")).unwrap();
    for name in ["gone", "emptied", "cut", "grown", "changed"] {
        write(&top.join("docs").join(name), &pattern(90, 3 * STRIPE));
    }
    let sparse = File::create(top.join("docs/sparse")).unwrap();
    sparse.set_len(8 * STRIPE as u64).unwrap();
    sparse.write_all_at(&pattern(91, STRIPE), 4 * STRIPE as u64).unwrap();
    sparse.sync_all().unwrap();
    volume(cluster, &["snapshot", "data", "first"]);
    write(&top.join("data/runs/f3"), &pattern(77, 100_000));
}

/// What happens to it later, up to the disaster.
fn after(cluster: &Cluster) {
    let top = cluster.mount();
    fs::remove_file(top.join("docs/gone")).unwrap();
    // Targets drop what was truncated when the file grows again.
    let emptied = File::create(top.join("docs/emptied")).unwrap();
    emptied.write_all_at(b"new", 2 * STRIPE as u64).unwrap();
    emptied.sync_all().unwrap();
    for n in 0..4 {
        write(&top.join(format!("docs/late{n}")), &pattern(300 + n, 3_000_000));
        fs::create_dir(top.join(format!("late{n}"))).unwrap();
        write(&top.join(format!("late{n}/file")), &pattern(400 + n, 3_000_000));
    }
    let truncated = OpenOptions::new().write(true).open(top.join("docs/cut")).unwrap();
    truncated.set_len(STRIPE as u64).unwrap();
    truncated.set_len(3 * STRIPE as u64).unwrap();
    truncated.sync_all().unwrap();
    let grown = OpenOptions::new().write(true).open(top.join("docs/grown")).unwrap();
    grown.write_all_at(&pattern(92, 3 * STRIPE), 3 * STRIPE as u64).unwrap();
    grown.sync_all().unwrap();
    let changed = OpenOptions::new().write(true).open(top.join("docs/changed")).unwrap();
    changed.write_all_at(&pattern(93, STRIPE), 0).unwrap();
    changed.sync_all().unwrap();
}

fn all_is_right(cluster: &Cluster) {
    let top = cluster.mount();
    for n in 0..FILES {
        assert!(fs::read(top.join(format!("docs/f{n}"))).unwrap() == content(n), "docs/f{n}");
        let kept = top.join(format!("data/.snapshots/first/runs/f{n}"));
        assert!(fs::read(kept).unwrap() == content(n), "f{n} in the snapshot");
        let expected = if n == 3 { pattern(77, 100_000) } else { content(n) };
        assert!(fs::read(top.join(format!("data/runs/f{n}"))).unwrap() == expected, "data/runs/f{n}");
    }
    assert_eq!(fs::metadata(top.join("docs/same")).unwrap().nlink(), 2);
    assert!(fs::read(top.join("docs/link")).unwrap() == content(2));
    let sparse = fs::read(top.join("docs/sparse")).unwrap();
    assert!(sparse.len() == 8 * STRIPE && sparse[4 * STRIPE..5 * STRIPE] == pattern(91, STRIPE));
    assert!(sparse[..4 * STRIPE].iter().chain(&sparse[5 * STRIPE..]).all(|byte| *byte == 0), "holes stay");
    let data = volume(cluster, &["show", "data"]);
    assert_eq!(data["bytes_hard"], 1_000_000_000, "{data}");
}

fn lost_data_is_an_error(top: &Path) {
    assert!(!top.join("docs/late0").exists() && !top.join("late0").exists());
    // Deleted, or truncated, after the export.
    let docs = top.join("docs");
    assert_eq!(fs::metadata(docs.join("gone")).unwrap().len(), 3 * STRIPE as u64);
    assert_eq!(errno(read_at(&docs.join("emptied"), 0, 4096)), EIO);
    assert_eq!(errno(read_at(&docs.join("emptied"), STRIPE, 4096)), EIO);
    // Its space is freed a moment after its name: targets may have all of it still.
    match read_at(&docs.join("gone"), 0, 3 * STRIPE) {
        Ok(bytes) => assert!(bytes == pattern(90, 3 * STRIPE), "a deleted file came back with other bytes"),
        Err(e) => assert_eq!(e.raw_os_error(), Some(EIO)),
    }
    assert!(read_at(&docs.join("cut"), 0, STRIPE).unwrap() == pattern(90, STRIPE));
    assert_eq!(errno(read_at(&docs.join("cut"), STRIPE + 5, 4096)), EIO);
    // Overwritten bytes have their last state; appended ones are missing, also when the file grows.
    let changed = fs::read(docs.join("changed")).unwrap();
    assert!(
        changed[..STRIPE] == pattern(93, STRIPE) && changed[STRIPE..] == pattern(90, 3 * STRIPE)[STRIPE..]
    );
    assert!(fs::read(docs.join("grown")).unwrap() == pattern(90, 3 * STRIPE));
    let grown = OpenOptions::new().write(true).open(docs.join("grown")).unwrap();
    grown.set_len(6 * STRIPE as u64).unwrap();
    grown.sync_all().unwrap();
    let bytes = fs::read(docs.join("grown")).unwrap();
    assert!(bytes[3 * STRIPE..].iter().all(|byte| *byte == 0), "what was appended later shows again");
    fs::remove_file(docs.join("gone")).unwrap();
}

/// Files under numbers that were never given before.
fn new_files_are_new(top: &Path) {
    for n in 0..8 {
        for path in [top.join(format!("docs/late{n}")), top.join(format!("data/runs/new{n}"))] {
            let file = File::create_new(&path).unwrap();
            file.set_len(3_000_000).unwrap();
            assert!(
                fs::read(&path).unwrap().iter().all(|byte| *byte == 0),
                "{} shows bytes of another",
                path.display()
            );
            file.write_all_at(b"N", 5000).unwrap();
            file.sync_all().unwrap();
            let bytes = fs::read(&path).unwrap();
            assert!(bytes[5000] == b'N' && bytes.iter().filter(|byte| **byte != 0).count() == 1);
            write(&path, &pattern(600 + n, 500_000));
        }
    }
    for n in 0..8 {
        assert!(fs::read(top.join(format!("docs/late{n}"))).unwrap() == pattern(600 + n, 500_000));
    }
}

#[test]
fn a_lost_namespace_comes_back_from_its_export() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let (dir, top) = (cluster.dir(), cluster.mount().to_path_buf());
    let outside = tempfile::tempdir().unwrap();
    let export = outside.path().join("all.weir-export").display().to_string();
    let down = || assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    before(&cluster);
    let made = json(&cluster, &["namespace", "export", &export]);
    assert!(made["namespace"] == "root" && made["records"].as_u64() > Some(20), "{made}");
    says(
        &text(&cluster.try_run_weir(&["namespace", "export", &export]).stderr),
        &["exists already", "hint:"],
    );
    let import = ["namespace", "import", &export, "--dir", dir.to_str().unwrap()];
    says(&refused(&import), &["is led by node \"meta\"", "hint: stop it first"]);
    after(&cluster);
    down();

    // The disaster.
    let (meta, kept) = (dir.join("meta"), dir.join("meta-kept"));
    fs::rename(&meta, &kept).unwrap();
    let mut coord = std::process::Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["coord", "--config", dir.join("etc/coord.toml").to_str().unwrap()])
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let imported = weir(&import);
    coord.kill().unwrap();
    coord.wait().unwrap();
    assert!(imported.status.success(), "{}", text(&imported.stderr));
    cluster.up();
    all_is_right(&cluster);
    lost_data_is_an_error(&top);
    new_files_are_new(&top);
    all_is_right(&cluster);

    // A restart compares nothing again, and the former directory is an old copy now.
    down();
    cluster.up();
    all_is_right(&cluster);
    says(&refused(&import), &["is led by node"]);
    down();
    fs::remove_dir_all(&meta).unwrap();
    copy(&kept, &meta);
    let old = cluster.try_up();
    says(&text(&old.stderr), &["an old copy of namespace \"root\""]);
}

#[test]
fn exports_are_made_on_a_schedule_and_old_ones_go() {
    let cluster = Cluster::with(0, &["--targets", "1"]);
    let outside = tempfile::tempdir().unwrap();
    let place = outside.path().display().to_string();
    let exports = || {
        let mut names: Vec<String> = fs::read_dir(outside.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".weir-export"))
            .collect();
        names.sort();
        names
    };
    let relative = cluster.try_run_weir(&["namespace", "export", "here", "--every", "1h"]);
    says(&text(&relative.stderr), &["here is not a directory of the metadata machine", "hint:"]);
    for name in
        ["root-20200101T000000Z.weir-export", "root-20200102T000000Z.weir-export", "other.weir-export"]
    {
        write(&outside.path().join(name), b"old");
    }
    let set = json(&cluster, &["namespace", "export", &place, "--every", "1h", "--keep", "2"]);
    assert!(set["every_s"] == 3600 && set["keep"] == 2, "{set}");
    let state = || json(&cluster, &["namespace", "exports"]);
    wait_until("the first export", PATIENCE, || state()["last"]["file"].is_string());
    // The oldest was removed; a file with another name stays.
    let names = exports();
    assert!(names.len() == 3 && names[0] == "other.weir-export", "{names:?}");
    assert_eq!(names[1], "root-20200102T000000Z.weir-export");
    let newest = outside.path().join(&names[2]);
    assert_eq!(state()["last"]["file"], newest.display().to_string());
    let mut magic = [0; 8];
    File::open(&newest).unwrap().read_exact(&mut magic).unwrap();
    assert_eq!(&magic, b"WEIR-NSX");

    // It survives a restart, and a restart makes no other one.
    cluster.kill("meta");
    cluster.up();
    assert_eq!(state()["every_s"], 3600);
    assert_eq!(exports(), names);
    fs::remove_dir_all(outside.path()).unwrap();
    let again = json(&cluster, &["namespace", "export", "--off"]);
    assert_eq!(again["every_s"], 0);
}

#[test]
fn a_damaged_or_foreign_export_is_refused() {
    let cluster = Cluster::with(0, &["--targets", "1"]);
    let other = Cluster::with(0, &["--targets", "1"]);
    let outside = tempfile::tempdir().unwrap();
    let [own, foreign, truncated] =
        ["own", "foreign", "cut"].map(|name| outside.path().join(name).display().to_string());
    json(&cluster, &["namespace", "export", &own]);
    json(&other, &["namespace", "export", &foreign]);
    let bytes = fs::read(&own).unwrap();
    fs::write(&truncated, &bytes[..bytes.len() - 9]).unwrap();
    let dir = cluster.dir();
    cluster.signal("meta", "TERM");
    wait_until("meta ends", PATIENCE, || cluster.pid("meta").is_none());
    let import = |file: &str| weir(&["namespace", "import", file, "--dir", dir.to_str().unwrap()]);
    let refusal = |file: &str, all: &[&str]| {
        let output = import(file);
        assert!(!output.status.success());
        says(&text(&output.stderr), all);
    };
    refusal(&own, &["is not empty", "hint: name an empty directory"]);
    fs::rename(dir.join("meta"), dir.join("meta-kept")).unwrap();
    refusal(&foreign, &["the export is of cluster"]);
    refusal("/dev/null", &["the export is damaged"]);
    refusal(&truncated, &["it was cut off", "hint: take another export"]);
    // The rest of an interrupted import is not used, and the import runs again.
    let unfinished = cluster.try_up();
    assert!(!unfinished.status.success());
    assert!(import(&own).status.success());
    cluster.up();
}
