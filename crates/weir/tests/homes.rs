//! Claim: a volume is shipped to S3 and to another Weir as to a directory, and recalled from there; a file
//! shows in S3 when it is complete, with movers that die and names that change meanwhile.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::{Bench, PATIENCE};
use common::s3::{S3, SECRET};
use common::{Cluster, can_mount, pattern, text, wait_until};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

fn shipped(bench: &Bench) -> u64 {
    bench.relation()["shipped_bytes"].as_u64().unwrap()
}

/// The acts in a volume with any home; returns every file that exists then, with its bytes.
fn use_names(data: &Path) -> Vec<(&'static str, Vec<u8>)> {
    fs::create_dir_all(data.join("a/b")).unwrap();
    fs::write(data.join("a/b/small"), b"small").unwrap();
    fs::write(data.join("a/replaced"), b"first").unwrap();
    fs::write(data.join("a/new"), pattern(3, 5 << 20)).unwrap();
    fs::rename(data.join("a/new"), data.join("a/replaced")).unwrap();
    fs::rename(data.join("a/b"), data.join("moved")).unwrap();
    symlink("moved/small", data.join("link")).unwrap();
    fs::write(data.join("gone"), b"gone").unwrap();
    fs::remove_file(data.join("gone")).unwrap();
    fs::write(data.join("empty"), b"").unwrap();
    let mut changed = pattern(4, 20 << 20);
    fs::write(data.join("changed"), &changed).unwrap();
    let file = File::options().write(true).open(data.join("changed")).unwrap();
    file.write_all_at(b"in the middle", 9 << 20).unwrap();
    changed[9 << 20..(9 << 20) + 13].copy_from_slice(b"in the middle");
    vec![
        ("moved/small", b"small".to_vec()),
        ("a/replaced", pattern(3, 5 << 20)),
        ("empty", Vec::new()),
        ("changed", changed),
    ]
}

#[test]
fn a_bucket_shows_complete_files_and_returns_them() {
    if !can_mount() {
        return;
    }
    let Some(s3) = S3::start() else { return };
    let bench = Bench::start();
    bench.relate_to(&s3.url);
    let files = use_names(&bench.data);
    // A file that grows: its parts are shipped before it is complete.
    let bytes = pattern(2, 30 << 20);
    let mut file = File::create(bench.data.join("growing")).unwrap();
    let before = shipped(&bench);
    for part in bytes[..21 << 20].chunks(3 << 20) {
        file.write_all(part).unwrap();
    }
    wait_until("parts of a file that grows to be sent", PATIENCE, || shipped(&bench) >= before + (16 << 20));
    assert_eq!(s3.object("growing").map(|o| o.len()), Some(0), "not seen before it is complete");
    bench.cluster.kill("mover-1");
    file.write_all(&bytes[21 << 20..25 << 20]).unwrap();
    bench.cluster.up();
    // A new name in the middle: the shipped part shows under the new one.
    fs::rename(bench.data.join("growing"), bench.data.join("grown")).unwrap();
    wait_until("a name to be changed while a file grows", PATIENCE, || {
        s3.object("grown").is_some_and(|o| o.len() >= 16 << 20 && o == bytes[..o.len()])
    });
    file.write_all(&bytes[25 << 20..]).unwrap();
    drop(file);
    bench.wait_state("synced");
    wait_until("the file to be complete", PATIENCE, || s3.object("grown").as_deref() == Some(&bytes[..]));
    assert_eq!(s3.object("growing"), None);
    for (name, bytes) in &files {
        assert!(s3.object(name).as_ref() == Some(bytes), "{name} in the bucket");
    }
    for gone in ["gone", "a/new", "a/b/small"] {
        assert_eq!(s3.object(gone), None, "{gone}");
    }
    assert_eq!(s3.object("link").unwrap(), b"moved/small");

    // Of two names one is at home; when that is removed, the other one.
    fs::hard_link(bench.data.join("moved/small"), bench.data.join("second")).unwrap();
    fs::remove_file(bench.data.join("moved/small")).unwrap();
    wait_until("the other name to be there", PATIENCE, || s3.object("second").as_deref() == Some(b"small"));
    bench.wait_state("synced");
    assert_eq!(s3.object("moved/small"), None);
    let relation = bench.relation();
    assert_eq!(relation["conflicts"].as_array().map(Vec::len), Some(0), "{relation:#}");

    for (name, bytes) in [("grown", &bytes), ("changed", &files[3].1)] {
        let path = bench.data.join(name);
        bench.evict(&path);
        assert!(fs::read(&path).unwrap() == *bytes, "{name} from the bucket");
        assert_eq!(bench.offline(&path), 0);
    }
    // Written while evicted: recalled, changed, and at home again.
    let path = bench.data.join("grown");
    bench.evict(&path);
    File::options().write(true).open(&path).unwrap().write_all_at(b"new", 10 << 20).unwrap();
    let mut expected = bytes;
    expected[10 << 20..(10 << 20) + 3].copy_from_slice(b"new");
    wait_until("the change to be in the bucket", PATIENCE, || s3.object("grown").as_ref() == Some(&expected));
    assert!(fs::read(&path).unwrap() == expected);
    let shown = bench.run_weir(&["relation", "show", "r1"]);
    assert!(!shown.contains(SECRET) && !bench.cluster.logs().contains(SECRET));
}

#[test]
fn another_weir_is_a_home() {
    if !can_mount() {
        return;
    }
    let other = Cluster::with(1, &["--tcp"]);
    let home = other.mount().join("from here");
    fs::create_dir(&home).unwrap();
    let bench = Bench::start();
    bench.relate_to(&format!("weir://127.0.0.1:{}/from%20here", other.port("coord")));
    let mut files = use_names(&bench.data);
    fs::hard_link(bench.data.join("moved/small"), bench.data.join("second")).unwrap();
    let bytes = pattern(7, 20 << 20);
    let mut file = File::create(bench.data.join("growing")).unwrap();
    for (n, part) in bytes.chunks(4 << 20).enumerate() {
        file.write_all(part).unwrap();
        wait_until("written bytes are at home", PATIENCE, || {
            fs::metadata(home.join("growing")).is_ok_and(|m| m.len() >= (n as u64) << 22)
        });
    }
    let there = fs::read(home.join("growing")).unwrap();
    assert!(there == bytes[..there.len()], "home shows something else than a prefix");
    drop(file);
    files.push(("growing", bytes));
    bench.wait_state("synced");
    bench.assert_same_as(&home);
    for (name, bytes) in files.iter().filter(|(_, bytes)| bytes.len() > 4096) {
        let path = bench.data.join(name);
        bench.evict(&path);
        assert!(fs::read(&path).unwrap() == *bytes, "{name} from the other Weir");
    }
    // A missing one is reported as missing.
    let gone = bench.try_run_weir(&["relation", "add", "data", "weir:///nowhere"]);
    assert_eq!(gone.status.code(), Some(2), "{}", text(&gone.stderr));
}
