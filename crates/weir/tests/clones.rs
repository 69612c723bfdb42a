//! Claim: a clone is a volume as a snapshot shows it; it exists at once, and changes of one side do not show
//! on the other; shared data is freed when neither side has it any more.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{
    Cluster, can_mount, copy, find, pattern, refused_volume as refused, same_contents, text, volume,
    wait_until, weir,
};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(90);

fn fill(top: &Path) {
    fs::create_dir_all(top.join("d/e/empty")).unwrap();
    fs::write(top.join("small"), b"small").unwrap();
    fs::write(top.join("d/large"), pattern(1, 13 * MIB + 777)).unwrap();
    fs::write(top.join("d/e/other"), pattern(2, 3 * MIB)).unwrap();
    fs::hard_link(top.join("d/e/other"), top.join("d/linked")).unwrap();
    let sparse = fs::File::create(top.join("d/sparse")).unwrap();
    sparse.write_all_at(&pattern(3, MIB), 20 * MIB as u64).unwrap();
    symlink("d/large", top.join("symbolic")).unwrap();
    rustix::fs::setxattr(top.join("small"), "user.colour", b"red", rustix::fs::XattrFlags::empty()).unwrap();
}
/// Contents, and names with modes, owners, times and links.
fn same(a: &Path, b: &Path) {
    same_contents(a, b);
    let facts = |top| find(top, &["-printf", "%P %m %U %G %T@ %l %n %y\\n"]);
    assert_eq!(facts(a), facts(b));
}
/// Paths and checksums of contents.
fn sums(top: &Path) -> BTreeMap<String, String> {
    let script = "find . -type f -exec md5sum {} +";
    let output = Command::new("sh").current_dir(top).args(["-c", script]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = text(&output.stdout);
    lines
        .lines()
        .map(|l| l.split_once("  ").unwrap())
        .map(|(sum, path)| (path.to_owned(), sum.to_owned()))
        .collect()
}
fn is_whole(cluster: &Cluster, name: &str) -> bool {
    let dir = cluster.dir();
    let args = ["volume", "snapshot", name, "probe", "--dir", dir.to_str().unwrap()];
    let taken = weir(&args).status.success();
    if taken {
        volume(cluster, &["snapshot", name, "probe", "--delete"]);
    }
    taken
}

#[test]
fn a_clone_is_the_volume_then_and_each_side_changes_alone() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    let mount = cluster.mount();
    fill(&top);
    let outside = tempfile::tempdir().unwrap();
    let before = outside.path().join("copy");
    copy(&top, &before);
    volume(&cluster, &["snapshot", "data", "s"]);
    fs::write(top.join("small"), b"changed since").unwrap();
    fs::remove_file(top.join("d/e/other")).unwrap();
    volume(&cluster, &["clone", "data@s", "/clone", "--bytes", "1GB"]);
    let clone = mount.join("clone");
    same(&before, &clone);
    let mut colour = [0; 16];
    let n = rustix::fs::getxattr(clone.join("small"), "user.colour", &mut colour).unwrap();
    assert_eq!(&colour[..n], b"red");
    assert_ne!(
        fs::metadata(clone.join("d/large")).unwrap().ino(),
        fs::metadata(top.join("d/large")).unwrap().ino()
    );
    // Each side alone, in files that both share.
    let (of_top, of_copy) = (sums(&top), sums(&before));
    let large = fs::OpenOptions::new().write(true).open(clone.join("d/large")).unwrap();
    large.write_all_at(b"in the clone", 5 * MIB as u64 + 3).unwrap();
    large.sync_all().unwrap();
    fs::OpenOptions::new().write(true).open(clone.join("d/linked")).unwrap().set_len(1_234_567).unwrap();
    fs::write(clone.join("new"), pattern(9, 2 * MIB)).unwrap();
    fs::remove_file(clone.join("d/sparse")).unwrap();
    assert_eq!(fs::read(clone.join("d/e/other")).unwrap(), pattern(2, 3 * MIB)[..1_234_567]);
    assert_eq!(sums(&top), of_top);
    assert_eq!(sums(&top.join(".snapshots/s")), of_copy);
    let of_clone = sums(&clone);
    let large = fs::OpenOptions::new().write(true).open(top.join("d/large")).unwrap();
    large.write_all_at(&pattern(8, MIB), 3 * MIB as u64).unwrap();
    large.sync_all().unwrap();
    fs::OpenOptions::new().write(true).open(top.join("d/sparse")).unwrap().set_len(100).unwrap();
    assert_eq!(sums(&clone), of_clone);
    cluster.kill_all();
    cluster.up();
    assert_eq!((sums(&clone), sums(&top.join(".snapshots/s"))), (of_clone, of_copy));
    assert!(refused(&cluster, &["clone", "data@never", "/x"]).contains("never"));
    assert!(refused(&cluster, &["clone", "data@s", "/clone"]).contains("clone"));
}

#[test]
fn a_clone_outlives_its_source_and_space_is_freed_at_the_end() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    let mount = cluster.mount();
    for n in 0..4u8 {
        fs::write(top.join(n.to_string()), pattern(n.into(), 8 * MIB)).unwrap();
    }
    // One is being written: its earlier writes are in the clone.
    let mut open = fs::File::create(top.join("open")).unwrap();
    open.write_all(b"before").unwrap();
    volume(&cluster, &["clone", "data", "/clone"]);
    open.write_all(b" and after").unwrap();
    drop(open);
    wait_until("its own snapshot goes", PATIENCE, || {
        volume(&cluster, &["snapshots", "data"]).as_array().unwrap().is_empty()
    });
    let clone = mount.join("clone");
    assert_eq!(fs::read(clone.join("open")).unwrap(), b"before");
    let shared = volume(&cluster, &["show", "clone"]);
    assert_eq!(shared["used_bytes"].as_u64(), Some(32 * MIB as u64 + 6), "usage counts what is shown");
    wait_until("the files are on targets", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used >= 32 * MIB as u64)
    });
    assert!(cluster.used_bytes().unwrap() < 2 * 32 * MIB as u64, "and not twice: {:?}", cluster.used_bytes());
    fs::write(clone.join("0"), b"small now").unwrap();
    volume(&cluster, &["clone", "clone", "/again"]);
    volume(&cluster, &["delete", "data", "--force"]);
    wait_until("what only the source had goes", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used < 3 * 8 * MIB as u64 * 3 / 2 + 2 * MIB as u64)
    });
    for n in 1..4u8 {
        assert_eq!(fs::read(clone.join(n.to_string())).unwrap(), pattern(n.into(), 8 * MIB));
    }
    wait_until("the second one is whole", PATIENCE, || is_whole(&cluster, "again"));
    volume(&cluster, &["delete", "clone", "--force"]);
    let again = mount.join("again");
    for n in 1..4u8 {
        assert_eq!(fs::read(again.join(n.to_string())).unwrap(), pattern(n.into(), 8 * MIB));
    }
    assert_eq!(fs::read(again.join("0")).unwrap(), b"small now");
    volume(&cluster, &["delete", "again", "--force"]);
    wait_until("all space is back", PATIENCE, || {
        cluster.used_bytes().is_some_and(|used| used < 2 * MIB as u64)
    });
}

#[test]
fn a_large_clone_is_there_at_once_and_whole_after_restarts() {
    if !can_mount() {
        return;
    }
    let (cluster, top) = Cluster::with_volume();
    let mount = cluster.mount();
    for d in 0..40 {
        fs::create_dir_all(top.join(format!("{d}/sub"))).unwrap();
        for n in 0..100 {
            fs::write(top.join(format!("{d}/{n}")), format!("{d} {n}")).unwrap();
        }
    }
    volume(&cluster, &["snapshot", "data", "s"]);
    let begun = Instant::now();
    volume(&cluster, &["clone", "data@s", "/clone"]);
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}: it waits for nothing that there are many of");
    // A reader does not wait for the others.
    assert_eq!(fs::read_to_string(mount.join("clone/37/99")).unwrap(), "37 99");
    for _ in 0..3 {
        cluster.kill_all();
        cluster.up();
    }
    fs::write(mount.join("clone/3/5"), b"changed").unwrap();
    wait_until("the clone is whole", PATIENCE, || is_whole(&cluster, "clone"));
    let (mut here, there) = (sums(&mount.join("clone")), sums(&top));
    assert_eq!(here.len(), 4000);
    assert_ne!(here["./3/5"], there["./3/5"]);
    here.insert("./3/5".into(), there["./3/5"].clone());
    assert_eq!(here, there);
    volume(&cluster, &["snapshot", "data", "s", "--delete"]);
    let shown = volume(&cluster, &["show", "clone"]);
    assert_eq!((shown["files"].as_u64(), shown["directories"].as_u64()), (Some(4000), Some(80)), "{shown}");
}
