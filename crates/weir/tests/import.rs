//! Claim: a volume that is imported from a home shows all of its names at once, fetches data when it is read,
//! ships changes, and reports where home has changed.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::{Bench, PATIENCE};
use common::s3::S3;
use common::{can_mount, pattern, text, wait_until, weir};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

/// Many files, and attributes and times that nothing gets by itself.
fn fill(bench: &Bench) {
    bench.fill_home();
    let home = &bench.home;
    fs::write(home.join("a/b/empty"), b"").unwrap();
    let many = home.join("many");
    fs::create_dir(&many).unwrap();
    for n in 0..1500 {
        fs::write(many.join(format!("file {n}")), format!("{n}")).unwrap();
    }
    fs::set_permissions(home.join("a/frames"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(home.join("a/b"), fs::Permissions::from_mode(0o750)).unwrap();
    for path in ["a/frames", "a/b/c", "a/b", "a", "many"] {
        let then = std::time::UNIX_EPOCH + std::time::Duration::new(1_500_000_000, 123_456_789);
        File::open(home.join(path)).unwrap().set_modified(then).unwrap();
    }
}

fn adopt(bench: &Bench) {
    bench.run_weir(&["volume", "create", "data", "--from", &bench.url(), "--evict"]);
}

fn shipped(bench: &Bench) -> u64 {
    bench.relation()["shipped_bytes"].as_u64().unwrap()
}

#[test]
fn a_volume_made_from_a_directory_shows_and_reads_what_is_there() {
    if !can_mount() {
        return;
    }
    let bench = Bench::without_volume();
    fill(&bench);
    let before = Bench::tree(&bench.home);
    adopt(&bench);
    // At once: a directory deep down, before any lookup of those above.
    let frames = fs::metadata(bench.data.join("a/frames")).unwrap();
    assert_eq!((frames.len(), frames.mode() & 0o7777), (9 << 20, 0o640));
    assert!(frames.blocks() <= 1, "its bytes are not here: {} blocks", frames.blocks());
    assert_eq!(fs::read_dir(bench.data.join("many")).unwrap().count(), 1500);
    // Everything, with all attributes and bytes; nothing of it is sent home again.
    assert_eq!(Bench::tree(&bench.data), before);
    bench.wait_state("synced");
    assert_eq!(shipped(&bench), 0);
    assert_eq!(bench.relation()["unseen_directories"], 0);
    // Data that was read has a proof now, and many files are recalled at once: it may be evicted, and
    // recalled again.
    bench.evict(&bench.data.join("a/frames"));
    bench.evict(&bench.data.join("many/file 5"));
    let list = bench.home.with_file_name("list");
    fs::write(&list, format!("{}\n", bench.data.join("many").display())).unwrap();
    let (a, list) = (bench.data.join("a"), list.display().to_string());
    let brought = weir(&["relation", "prefetch", a.to_str().unwrap(), "--list", &list, "--json"]);
    assert!(brought.status.success(), "{}", text(&brought.stderr));
    let brought: serde_json::Value = serde_json::from_slice(&brought.stdout).unwrap();
    assert_eq!((&brought["brought"], &brought["failed"]), (&2.into(), &0.into()), "{brought}");
    assert_eq!(bench.offline(&bench.data.join("a/frames")), 0);
    assert!(fs::read(bench.data.join("a/frames")).unwrap() == pattern(1, 9 << 20));

    // Changes go home.
    let data = &bench.data;
    File::options().write(true).open(data.join("a/frames")).unwrap().write_all_at(b"new", 5 << 20).unwrap();
    fs::write(data.join("a/b/c/made"), pattern(2, 100_000)).unwrap();
    fs::rename(data.join("a/b"), data.join("moved")).unwrap();
    fs::remove_file(data.join("many/file 7")).unwrap();
    fs::write(data.join("many/file 8"), b"another text").unwrap();
    fs::remove_file(data.join("second name")).unwrap();
    bench.wait_state("synced");
    bench.assert_same();
    let relation = bench.relation();
    assert_eq!(relation["conflicts"].as_array().map(Vec::len), Some(0), "{relation:#}");
    let kept =
        bench.try_run_weir(&["volume", "create", "again", "--from", "file:///nowhere/at/all", "--evict"]);
    assert!(kept.status.success(), "movers check the home: {}", text(&kept.stderr));
}

#[test]
fn a_change_at_home_before_the_first_read_is_reported() {
    if !can_mount() {
        return;
    }
    let bench = Bench::without_volume();
    fill(&bench);
    adopt(&bench);
    bench.wait_state("synced");
    let frames = File::options().write(true).open(bench.home.join("a/frames")).unwrap();
    frames.write_all_at(b"by a stranger", 1000).unwrap();
    drop(frames);
    fs::remove_dir(bench.home.join("a/b/c")).unwrap();
    let error = fs::read(bench.data.join("a/frames")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    // Bytes written there are not lost, and do not overwrite the stranger's.
    fs::write(bench.data.join("many/file 3"), b"goes on").unwrap();
    wait_until("another file to go home", PATIENCE, || {
        fs::read(bench.home.join("many/file 3")).is_ok_and(|bytes| bytes == b"goes on")
    });
    assert_eq!(&fs::read(bench.home.join("a/frames")).unwrap()[1000..1013], b"by a stranger");
}

#[test]
fn a_volume_made_from_a_bucket_reads_what_strangers_put_there() {
    if !can_mount() {
        return;
    }
    let Some(s3) = S3::start() else { return };
    // As another program leaves objects: without anything of ours.
    fs::create_dir_all(s3.path("raw/run 1")).unwrap();
    fs::write(s3.path("raw/run 1/frames"), pattern(3, 9 << 20)).unwrap();
    fs::write(s3.path("raw/notes"), b"notes").unwrap();
    let bench = Bench::without_volume();
    bench.run_weir(&["volume", "create", "data", "--from", &s3.url, "--evict"]);
    let frames = bench.data.join("raw/run 1/frames");
    assert_eq!(fs::metadata(&frames).unwrap().len(), 9 << 20);
    assert!(fs::read(&frames).unwrap() == pattern(3, 9 << 20));
    bench.wait_state("synced");
    assert_eq!(shipped(&bench), 0);
    bench.evict(&frames);
    assert!(fs::read(&frames).unwrap() == pattern(3, 9 << 20));
    fs::write(bench.data.join("raw/notes"), b"changed here").unwrap();
    fs::write(bench.data.join("raw/run 1/more"), pattern(4, 100_000)).unwrap();
    fs::rename(bench.data.join("raw/run 1"), bench.data.join("run one")).unwrap();
    wait_until("changes to be in the bucket", PATIENCE, || {
        s3.object("raw/notes").as_deref() == Some(b"changed here")
            && s3.object("run one/more").is_some_and(|bytes| bytes == pattern(4, 100_000))
            && s3.object("run one/frames").is_some_and(|bytes| bytes == pattern(3, 9 << 20))
    });
    bench.wait_state("synced");
    let relation = bench.relation();
    assert_eq!(relation["conflicts"].as_array().map(Vec::len), Some(0), "{relation:#}");
}
