//! Claim: a backup is the volume as it was, in a directory named by its date that is readable without Weir;
//! unchanged files are stored once; an interrupted backup harms no other one; missing files are reported;
//! users restore files from a day by themselves, with their own rights.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::relation::{Bench, PATIENCE};
use common::{can_mount, pattern, text, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const MIB: usize = 1 << 20;

/// A volume `data`, and a directory for its backups.
struct Desk {
    bench: Bench,
    place: PathBuf,
}

impl Desk {
    fn open() -> Desk {
        let bench = Bench::start();
        let place = bench.home.parent().unwrap().join("backups");
        fs::create_dir(&place).unwrap();
        Desk { bench, place }
    }
    fn data(&self, path: &str) -> PathBuf {
        self.bench.data.join(path)
    }
    fn url(&self) -> String {
        format!("file://{}", self.place.display())
    }
    fn try_backup(&self, more: &[&str]) -> Output {
        let url = self.url();
        self.bench.try_run_weir(&[&["volume", "backup", "data", "--to", &url, "--json"], more].concat())
    }
    /// Makes one; returns its output.
    fn backup(&self) -> Value {
        let output = self.try_backup(&[]);
        assert!(output.status.success(), "{}{}", text(&output.stderr), self.bench.cluster.logs());
        serde_json::from_slice(&output.stdout).unwrap()
    }
    fn tree(&self, made: &Value) -> PathBuf {
        self.place.join(made["backup"].as_str().unwrap())
    }
    /// Everything in the place, by name.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.place).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names.retain(|name| name != ".weir-home");
        names
    }
    fn shown(&self) -> Value {
        serde_json::from_str(&self.bench.run_weir(&["volume", "show", "data", "--json"])).unwrap()
    }
    fn snapshots(&self) -> usize {
        let shown = self.bench.run_weir(&["volume", "snapshots", "data", "--json"]);
        serde_json::from_str::<Value>(&shown).unwrap().as_array().unwrap().len()
    }
}

/// Everything below a directory but the number of names of a file: backups share files.
fn tree(top: &Path) -> BTreeMap<PathBuf, String> {
    let mut tree = Bench::tree(top);
    for shown in tree.values_mut() {
        if let Some((facts, links)) = shown.rsplit_once(", ")
            && links.ends_with(" links")
        {
            *shown = facts.to_owned();
        }
    }
    tree
}
fn ino(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}
fn xattr(path: &Path, name: &str) -> Vec<u8> {
    let mut value = [0; 64];
    let n = rustix::fs::getxattr(path, name, &mut value).unwrap();
    value[..n].to_vec()
}

fn fill(top: &Path) {
    fs::create_dir_all(top.join("d/e")).unwrap();
    fs::write(top.join("small"), b"small").unwrap();
    fs::write(top.join("empty"), b"").unwrap();
    fs::write(top.join("d/large"), pattern(1, 9 * MIB + 777)).unwrap();
    fs::write(top.join("d/e/other"), pattern(2, 3 * MIB)).unwrap();
    fs::write(top.join("d/e/gone"), pattern(3, 200_000)).unwrap();
    fs::hard_link(top.join("d/e/other"), top.join("d/linked")).unwrap();
    symlink("d/large", top.join("symbolic")).unwrap();
    let sparse = fs::File::create(top.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 64 << 20).unwrap();
    drop(sparse);
    fs::set_permissions(top.join("small"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(top.join("d/e"), fs::Permissions::from_mode(0o750)).unwrap();
    rustix::fs::setxattr(top.join("small"), "user.colour", b"red", rustix::fs::XattrFlags::empty()).unwrap();
    std::os::unix::fs::chown(top.join("d/large"), Some(1000), Some(1001)).unwrap();
}

#[test]
fn a_backup_is_the_volume_then_and_the_next_one_shares_data() {
    if !can_mount() {
        return;
    }
    let desk = Desk::open();
    let top = &desk.bench.data;
    fill(top);
    let made = desk.backup();
    assert_eq!((&made["whole"], &made["linked"]), (&Value::Bool(true), &Value::from(0)));
    let first = desk.tree(&made);
    let then = tree(&first);
    assert_eq!(tree(top), then);
    assert_eq!(xattr(&first.join("small"), "user.colour"), b"red");
    assert!(fs::metadata(first.join("sparse")).unwrap().blocks() * 512 < 8 << 20, "its hole is filled");
    assert_eq!(ino(&first.join("d/e/other")), ino(&first.join("d/linked")));

    fs::write(top.join("small"), b"smaller and larger").unwrap();
    fs::remove_file(top.join("d/e/gone")).unwrap();
    fs::write(top.join("d/new"), b"new").unwrap();
    fs::rename(top.join("d/e"), top.join("moved")).unwrap();
    fs::set_permissions(top.join("empty"), fs::Permissions::from_mode(0o600)).unwrap();
    let made = desk.backup();
    let second = desk.tree(&made);
    assert_eq!(tree(top), tree(&second));
    assert_eq!(tree(&first), then, "an older backup has changed");
    let same = |old: &str, new: &str| ino(&first.join(old)) == ino(&second.join(new));
    assert!(
        same("d/large", "d/large") && same("sparse", "sparse"),
        "a file that has not changed is there twice"
    );
    assert!(same("d/e/other", "moved/other"), "what is in a directory that was moved is there twice");
    assert!(same("d/linked", "d/linked") && !same("small", "small") && !same("empty", "empty"));
    assert_eq!(made["base"], Value::from(first.file_name().unwrap().to_str().unwrap()));
    assert_eq!(desk.names().len(), 2, "{:?}", desk.names());
    assert_eq!(desk.snapshots(), 1, "only the one that the next backup needs");

    let listed = desk.bench.run_weir(&["volume", "backups", "data", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["backups"].as_array().unwrap().len(), 2, "{listed:#}");
    let refused = desk.bench.try_run_weir(&["volume", "backup", "data", "--to", "s3://b/p"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("hard links"));
    desk.bench.run_weir(&["volume", "backup", "data", "--forget"]);
    assert_eq!((desk.snapshots(), desk.names().len()), (0, 2));
}

#[test]
fn a_killed_backup_is_continued_and_harms_no_older_one() {
    if !can_mount() {
        return;
    }
    let desk = Desk::open();
    let top = &desk.bench.data;
    fill(top);
    let first = desk.tree(&desk.backup());
    let then = tree(&first);
    for n in 0..200 {
        fs::write(top.join(format!("new{n}")), pattern(n, 300_000)).unwrap();
    }
    let dir = desk.bench.cluster.dir();
    let mut killed = Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["volume", "backup", "data", "--to", &desk.url(), "--dir"])
        .arg(&dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let partial = || desk.names().into_iter().find(|name| name.starts_with(".partial-"));
    let is_half = || partial().is_some_and(|name| desk.place.join(name).join("new30").exists());
    wait_until("half of a backup", PATIENCE, is_half);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let half = partial().expect("it was killed before its end");
    let mode = fs::metadata(desk.place.join(&half)).unwrap().mode();
    assert_eq!(mode & 0o777, 0o700, "only root may read half a backup");
    assert_eq!(tree(&first), then);
    // Later changes belong to the next one.
    fs::write(top.join("later"), b"later").unwrap();
    let mut made = Value::Null;
    wait_until("the killed one's session to end", PATIENCE, || {
        let output = desk.try_backup(&[]);
        made = serde_json::from_slice(&output.stdout).unwrap_or_default();
        output.status.success()
    });
    assert_eq!((&made["went_on"], &made["whole"]), (&Value::Bool(true), &Value::Bool(true)), "{made:#}");
    let second = desk.tree(&made);
    assert_eq!(half, format!(".partial-{}", made["backup"].as_str().unwrap()));
    fs::remove_file(top.join("later")).unwrap();
    let mtime = fs::metadata(&second).unwrap().modified().unwrap();
    fs::File::open(top).unwrap().set_modified(mtime).unwrap();
    assert_eq!(tree(top), tree(&second));
    assert_eq!(tree(&first), then);
    assert_eq!((desk.names().len(), desk.snapshots()), (2, 1));
}

#[test]
fn a_user_gets_a_day_back_with_his_own_rights_only() {
    if !can_mount() {
        return;
    }
    let desk = Desk::open();
    let top = &desk.bench.data;
    fs::create_dir(top.join("hers")).unwrap();
    fs::write(top.join("hers/thesis"), b"monday").unwrap();
    fs::write(top.join("hers/letter"), b"dear").unwrap();
    fs::write(top.join("secret"), b"secret").unwrap();
    fs::set_permissions(top.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    for path in ["hers", "hers/thesis", "hers/letter"] {
        std::os::unix::fs::chown(top.join(path), Some(1000), Some(1000)).unwrap();
    }
    fs::set_permissions(top, fs::Permissions::from_mode(0o777)).unwrap();
    let monday = desk.backup()["backup"].as_str().unwrap().to_owned();
    fs::write(top.join("hers/thesis"), b"tuesday").unwrap();
    fs::remove_file(top.join("hers/letter")).unwrap();
    let tuesday = desk.backup()["backup"].as_str().unwrap().to_owned();
    fs::write(top.join("hers/thesis"), b"spoilt").unwrap();
    // Users other than root have no way through the directories of a test.
    for above in [desk.place.parent(), desk.bench.cluster.mount().parent()].into_iter().flatten() {
        fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let restore = |path: &str, more: &[&str]| {
        let mut user = Command::new("setpriv");
        user.args(["--reuid", "1000", "--regid", "1000", "--clear-groups", env!("CARGO_BIN_EXE_weir")]);
        user.args(["volume", "restore"]).arg(top.join(path)).args(more).output().unwrap()
    };
    let done = |path: &str, more: &[&str]| {
        let output = restore(path, more);
        assert!(output.status.success(), "{path} {more:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let refused = |path: &str, more: &[&str]| {
        let output = restore(path, more);
        assert!(!output.status.success(), "{path} {more:?}: {}", text(&output.stdout));
        text(&output.stderr)
    };
    // Deleted on Tuesday: it is in Monday's.
    assert!(refused("hers/letter", &["--at", &tuesday]).contains(&monday));
    done("hers/letter", &["--at", &monday]);
    assert_eq!(fs::read(top.join("hers/letter")).unwrap(), b"dear");
    let copy = top.join("hers/thesis.monday");
    done("hers/thesis", &["--at", &monday, "--to", copy.to_str().unwrap()]);
    assert_eq!(fs::read(&copy).unwrap(), b"monday");
    // The newer file is kept next to it.
    let printed = done("hers/thesis", &["--at", &tuesday]);
    assert_eq!(fs::read(top.join("hers/thesis")).unwrap(), b"tuesday");
    let kept = printed.trim_end().rsplit_once("the replaced one is kept as ").unwrap().1.to_owned();
    assert_eq!(fs::read(kept).unwrap(), b"spoilt");
    // What she may not read she does not get, from a snapshot or a backup.
    for date in [&monday, &tuesday] {
        let to = top.join("hers/got");
        let why = refused("secret", &["--at", date, "--to", to.to_str().unwrap()]);
        assert!(why.contains("ermission denied") && !to.exists(), "{why}");
    }
    assert!(refused("hers/thesis", &["--at", "2020-01-01"]).contains("no snapshot or backup"));
    assert!(refused("hers/thesis", &["--at", "lately"]).contains("UTC"));
}

#[test]
fn offline_data_is_in_the_backup_or_is_named() {
    if !can_mount() {
        return;
    }
    let desk = Desk::open();
    let bench = &desk.bench;
    for (n, name) in ["kept", "lost", "here"].into_iter().enumerate() {
        fs::write(bench.data.join(name), pattern(n as u64, 6 * MIB)).unwrap();
    }
    bench.relate();
    bench.wait_state("synced");
    bench.evict(&desk.data("kept"));
    bench.evict(&desk.data("lost"));
    fs::remove_file(bench.home.join("lost")).unwrap();
    let output = desk.try_backup(&[]);
    assert!(!output.status.success());
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&made["missing"], &made["missing_named"][0]["path"]),
        (&Value::from(1), &Value::from("/lost"))
    );
    let errors = text(&output.stderr);
    assert!(errors.contains("incomplete") && errors.contains("/lost"), "{errors}");
    let there = desk.tree(&made);
    let name = there.file_name().unwrap().to_str().unwrap();
    let date = name.strip_suffix(".incomplete").expect("it is called so");
    let list = fs::read_to_string(desk.place.join(format!("{date}.missing"))).unwrap();
    assert!(list.starts_with("/lost: "), "{list}");
    assert_eq!(fs::read(there.join("kept")).unwrap(), pattern(0, 6 * MIB));
    assert_eq!(fs::read(there.join("here")).unwrap(), pattern(2, 6 * MIB));
    assert!(!there.join("lost").exists());
    let report = bench.run_weir(&["report", "data"]);
    assert!(report.contains("INCOMPLETE: 1 missing"), "{report}");
    // It returns: the next one has it, and shares the rest.
    fs::remove_file(desk.data("lost")).unwrap();
    let whole = desk.backup();
    assert_eq!((&whole["whole"], &whole["linked"]), (&Value::Bool(true), &Value::from(2)), "{whole:#}");
}

#[test]
fn movers_make_backups_that_are_due_and_say_when_they_cannot() {
    if !can_mount() {
        return;
    }
    let desk = Desk::open();
    fill(&desk.bench.data);
    let url = desk.url();
    desk.bench.run_weir(&["volume", "backup", "data", "--to", &url, "--every", "1d", "--keep", "3d,2w"]);
    let last = || desk.shown()["backups"][0]["last"].clone();
    wait_until("a backup by itself", PATIENCE, || last()["date"].is_string());
    let made = desk.place.join(last()["date"].as_str().unwrap());
    assert_eq!(tree(&desk.bench.data), tree(&made));
    let shown = desk.bench.run_weir(&["volume", "show", "data"]);
    assert!(shown.contains("every 1d, kept 3d,2w, last 2"), "{shown}");
    assert!(!desk.bench.run_weir(&["report", "data"]).contains("backup of"));
    desk.bench.run_weir(&["volume", "backup", "data", "--off"]);
    assert!(desk.shown()["backups"][0]["due"].is_null());

    let nowhere = format!("{url}/nowhere");
    let set = desk.bench.try_run_weir(&["volume", "backup", "data", "--to", &nowhere, "--every", "1h"]);
    let warned = text(&set.stderr);
    assert!(set.status.success() && warned.contains("cannot be used from here"), "{warned}");
    let failed = || desk.bench.run_weir(&["report", "data"]).contains("FAILED");
    wait_until("the failure is reported", PATIENCE, failed);
}
