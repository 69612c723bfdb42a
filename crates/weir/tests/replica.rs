//! Claim: a volume that mirrors a home shows the present state of the home, cannot be changed, and changes
//! nothing at home.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::{Bench, PATIENCE};
use common::s3::S3;
use common::{can_mount, errno, pattern, text, wait_until};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

fn fill(bench: &Bench) {
    bench.fill_home();
    fs::write(bench.home.join("a/b/c/deep"), b"deep").unwrap();
    fs::write(bench.home.join("gone"), b"gone soon").unwrap();
}

/// Everything at home with all attributes that a write would change, and that a read does not.
fn inodes(root: &Path) -> BTreeMap<PathBuf, (u64, u64, i64, i64)> {
    let (mut all, mut queue) = (BTreeMap::new(), vec![root.to_path_buf()]);
    while let Some(path) = queue.pop() {
        let m = fs::symlink_metadata(&path).unwrap();
        if m.is_dir() {
            queue.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        all.insert(path, (m.ino(), m.size(), m.ctime(), m.ctime_nsec()));
    }
    all
}

fn follow(bench: &Bench, url: &str) {
    bench.run_weir(&["volume", "create", "data"]);
    let output = bench.run_weir(&["relation", "add", "data", url, "--direction", "mirror"]);
    assert!(output.contains("data mirrors "), "{output}");
}

#[test]
fn a_mirror_of_a_directory_shows_changes_and_changes_nothing() {
    if !can_mount() {
        return;
    }
    let bench = Bench::without_volume();
    fill(&bench);
    let before = inodes(&bench.home);
    follow(&bench, &bench.url());
    let data = &bench.data;
    assert_eq!(fs::metadata(data.join("a/frames")).unwrap().len(), 9 << 20);
    // A second name of a file counts when its directory was read.
    wait_until("the volume to be as home is", PATIENCE, || Bench::tree(data) == Bench::tree(&bench.home));
    bench.wait_state("mirroring");

    // Changes here are refused.
    assert_eq!(errno(fs::write(data.join("new"), b"x")), libc::EROFS);
    assert_eq!(errno(fs::write(data.join("gone"), b"x")), libc::EROFS);
    assert_eq!(errno(fs::remove_file(data.join("gone"))), libc::EROFS);
    assert_eq!(errno(fs::create_dir(data.join("new"))), libc::EROFS);
    assert_eq!(errno(fs::remove_dir(data.join("a/b/c"))), libc::EROFS);
    assert_eq!(errno(fs::rename(data.join("gone"), data.join("a/gone"))), libc::EROFS);
    assert_eq!(errno(fs::rename(data.join("gone"), data.parent().unwrap().join("out"))), libc::EROFS);
    assert_eq!(errno(fs::hard_link(data.join("gone"), data.join("again"))), libc::EROFS);
    assert_eq!(errno(symlink("x", data.join("new"))), libc::EROFS);
    assert_eq!(errno(fs::set_permissions(data.join("gone"), fs::Permissions::from_mode(0o600))), libc::EROFS);
    assert_eq!(errno(fs::set_permissions(data.join("a"), fs::Permissions::from_mode(0o700))), libc::EROFS);
    assert_eq!(errno(File::options().write(true).open(data.join("a/frames"))), libc::EROFS);
    let refused = bench.try_run_weir(&["volume", "snapshot", "data", "s"]);
    assert!(text(&refused.stderr).contains("mirrors a home"), "{}", text(&refused.stderr));

    // Data that was read may be evicted, and recalled; and home was not touched by any of this.
    bench.evict(&data.join("a/frames"));
    assert!(fs::read(data.join("a/frames")).unwrap() == pattern(1, 9 << 20));
    assert_eq!(inodes(&bench.home), before, "home was changed");

    // What changes there is shown here: new, written over in place, cut, moved, removed, of another kind,
    // other attributes.
    let home = &bench.home;
    fs::create_dir_all(home.join("new/deep")).unwrap();
    fs::write(home.join("new/deep/file"), pattern(2, 100_000)).unwrap();
    let frames = File::options().write(true).open(home.join("a/frames")).unwrap();
    frames.write_all_at(b"by another program", 5 << 20).unwrap();
    fs::write(home.join("a/b/small"), b"longer than before").unwrap();
    fs::rename(home.join("a/b/c"), home.join("moved")).unwrap();
    fs::remove_file(home.join("gone")).unwrap();
    fs::create_dir(home.join("gone")).unwrap();
    fs::remove_file(home.join("a/link")).unwrap();
    symlink("frames", home.join("a/link")).unwrap();
    fs::set_permissions(home.join("a/b"), fs::Permissions::from_mode(0o750)).unwrap();
    let changed = inodes(home);
    wait_until("the volume to be as home is", PATIENCE, || {
        // While home changes a read may fail with that reason.
        Bench::try_tree(data).is_ok_and(|tree| tree == Bench::tree(home))
    });
    assert_eq!(fs::metadata(data.join("a/b/small")).unwrap().nlink(), 2);
    // A whole tree goes.
    fs::remove_dir_all(home.join("a")).unwrap();
    wait_until("a tree to be gone", PATIENCE, || !data.join("a").exists());
    assert_eq!(fs::read(data.join("second name")).unwrap(), b"longer than before");
    let left: BTreeMap<_, _> =
        changed.into_iter().filter(|(path, _)| path.starts_with(home.join("new"))).collect();
    assert_eq!(inodes(&home.join("new")), left, "home was changed");
    let relation = bench.relation();
    assert_eq!(relation["shipped_bytes"], 0);
    assert_eq!(relation["shipped_names"], 0);
}

#[test]
fn an_open_file_that_changes_at_home_reads_old_bytes_or_fails() {
    if !can_mount() {
        return;
    }
    let bench = Bench::without_volume();
    // Larger than one recall.
    let (old, new) = (pattern(1, 72 << 20), pattern(2, 72 << 20));
    fs::write(bench.home.join("f"), &old).unwrap();
    follow(&bench, &bench.url());
    let f = bench.data.join("f");
    let opened = File::open(&f).unwrap();
    let mut bytes = vec![0; 4096];
    opened.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, old[..4096]);
    fs::write(bench.home.join("f"), &new).unwrap();
    let far = 70 << 20;
    for _ in 0..2 {
        match opened.read_exact_at(&mut bytes, far) {
            Ok(()) => assert_eq!(bytes, old[far as usize..far as usize + 4096], "old and new together"),
            Err(e) => assert!(matches!(e.raw_os_error(), Some(libc::EIO | libc::ESTALE)), "{e}"),
        }
        wait_until("the new file to be here", PATIENCE, || fs::read(&f).is_ok_and(|bytes| bytes == new));
    }
    opened.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, old[..4096], "what it had is still the old file's");
}

#[test]
fn a_home_that_is_suddenly_empty_is_not_mirrored() {
    if !can_mount() {
        return;
    }
    let bench = Bench::without_volume();
    fill(&bench);
    follow(&bench, &bench.url());
    bench.wait_state("mirroring");
    let known = Bench::tree(&bench.data);
    let away = bench.home.with_file_name("away");
    fs::create_dir(&away).unwrap();
    for entry in fs::read_dir(&bench.home).unwrap() {
        let entry = entry.unwrap();
        fs::rename(entry.path(), away.join(entry.file_name())).unwrap();
    }
    wait_until("the relation to say it", PATIENCE, || {
        let _ = fs::read_dir(&bench.data).unwrap().count();
        bench.relation()["limited_by"].as_str().unwrap().contains("home")
    });
    assert_eq!(Bench::tree(&bench.data), known);
    let wrong =
        bench.try_run_weir(&["relation", "add", "data", "file:///x", "--direction", "mirror", "--evict"]);
    assert!(text(&wrong.stderr).contains("--evict has no effect"), "{}", text(&wrong.stderr));
}

#[test]
fn a_mirror_of_a_bucket_shows_what_is_put_there() {
    if !can_mount() {
        return;
    }
    let Some(s3) = S3::start() else { return };
    fs::create_dir_all(s3.path("raw/run 1")).unwrap();
    fs::write(s3.path("raw/run 1/frames"), pattern(3, 9 << 20)).unwrap();
    let bench = Bench::without_volume();
    follow(&bench, &s3.url);
    let frames = bench.data.join("raw/run 1/frames");
    assert!(fs::read(&frames).unwrap() == pattern(3, 9 << 20));
    bench.wait_state("mirroring");
    assert!(s3.object(".weir-home").is_none(), "home was marked");
    assert_eq!(errno(fs::write(bench.data.join("raw/x"), b"x")), libc::EROFS);
    fs::write(s3.path("raw/run 1/frames"), pattern(4, 1 << 20)).unwrap();
    fs::write(s3.path("raw/run 1/more"), b"more").unwrap();
    wait_until("the new objects to be here", PATIENCE, || {
        let _ = fs::read_dir(bench.data.join("raw/run 1")).unwrap().count();
        fs::read(bench.data.join("raw/run 1/more")).is_ok_and(|bytes| bytes == b"more")
            && fs::read(&frames).is_ok_and(|bytes| bytes == pattern(4, 1 << 20))
    });
}
