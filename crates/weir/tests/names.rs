//! Claim: a mount asks next to nothing twice, and shows nothing that is not so any more. Attributes stay in
//! the kernel while this mount holds a lease, names for a moment; what another mount changes is seen at once
//! all the same.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, shell, text, wait_until, weir};
use rustix::fs::{CWD, RenameFlags};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
type Counts = BTreeMap<String, u64>;

/// The mount's own counters, with one request (GETXATTR).
fn client(mount: &Path) -> Value {
    let mut buffer = vec![0; 64 << 10];
    let len = rustix::fs::getxattr(mount, "weir.client", &mut buffer).unwrap();
    serde_json::from_slice(&buffer[..len]).unwrap()
}
fn counts(mount: &Path) -> Counts {
    serde_json::from_value(client(mount)["requests"].clone()).unwrap()
}

/// Requests that `work` makes the kernel send, and messages to the metadata leader. Ends of files are sent
/// behind the program's back: they are waited for until no more come.
fn requests(mount: &Path, work: impl FnOnce()) -> (Counts, u64) {
    let settled = || {
        let mut last = counts(mount);
        wait_until("requests end", PATIENCE, || {
            let now = counts(mount);
            let same = now.iter().all(|(kind, n)| kind == "GETXATTR" || last.get(kind) == Some(n));
            last = now;
            same
        });
        last
    };
    let (before, asked) = (settled(), client(mount)["asked"].as_u64().unwrap());
    let reads = || counts(mount)["GETXATTR"];
    let own_before = reads();
    work();
    let own = reads() - own_before - 1;
    let after = settled();
    let asked = client(mount)["asked"].as_u64().unwrap() - asked;
    let grown = |(kind, n): (String, u64)| {
        let by = n - before.get(&kind).copied().unwrap_or(0);
        (kind != "GETXATTR" && by > 0).then_some((kind, by))
    };
    let mut made: Counts = after.into_iter().filter_map(grown).collect();
    if own > 0 {
        made.insert("GETXATTR".into(), own);
    }
    (made, asked)
}
fn sum(counts: &Counts) -> u64 {
    counts.values().sum()
}

/// Returns when the kernel keeps the names of this path: their directories' leases have been held for a
/// moment.
fn names_are_kept(mount: &Path, path: &Path) {
    let looked_up = || counts(mount)["LOOKUP"];
    wait_until("the kernel keeps names", PATIENCE, || {
        fs::metadata(path).unwrap();
        let before = looked_up();
        fs::metadata(path).unwrap();
        looked_up() == before
    });
}

/// A directory that many others are above.
fn deep(mount: &Path, name: &str) -> PathBuf {
    let dir = mount.join(name).join("a/b/c/d");
    fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn a_path_in_use_costs_almost_no_requests() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let mount = cluster.mount().to_owned();
    let dir = deep(&mount, "deep");
    const N: u64 = 100;
    let file = |n: u64| dir.join(format!("f{n}"));
    File::create(file(N)).unwrap();
    names_are_kept(&mount, &file(N));

    let began = Instant::now();
    let (made, asked) = requests(&mount, || (0..N).for_each(|n| drop(File::create(file(n)).unwrap())));
    // Names count for a moment, which may end in the first second, too; a busy machine takes longer. Then each
    // directory above is looked up again.
    let again = 6 * (1 + began.elapsed().as_secs());
    eprintln!("create + close: {made:?}, {asked} messages");
    // LOOKUP, CREATE, FLUSH and RELEASE; the kernel asks for the directory's attributes after each change of
    // it.
    for kind in ["LOOKUP", "CREATE", "FLUSH", "RELEASE", "GETATTR"] {
        assert!(made[kind] <= N + 5 + again, "{kind}: {made:?}");
    }
    assert!(sum(&made) <= 5 * N + 10 + again, "{made:?}");
    // The ends of files are reported in batches, but not later than after 20 ms.
    assert!(asked <= 2 * N + 5, "{asked}");

    // Names count for a moment: each name in use, and each directory above, is looked up once in that time,
    // for any number of uses.
    const ROUNDS: u64 = 50;
    let in_use = |what: &str, one: &dyn Fn(u64)| {
        let begun = Instant::now();
        let (made, asked) = requests(&mount, || (0..ROUNDS).for_each(|_| (0..N).for_each(one)));
        let loans = begun.elapsed().as_millis() as u64 / 200 + 2;
        eprintln!("{what}, {ROUNDS} times: {made:?}, {asked} messages, {loans} loans");
        assert!(sum(&made) <= loans.min(ROUNDS) * (N + 5) && asked <= 10, "{what}: {made:?}, {asked}");
    };
    in_use("stat five deep", &|n| assert!(fs::metadata(file(n)).unwrap().is_file()));
    in_use("stat of absent names", &|n| assert!(!dir.join(format!("no{n}")).exists()));

    // Look-ups are of names that were not used for a moment.
    let looked_up = |made: &mut Counts| made.remove("LOOKUP").unwrap_or(0) <= N + 5;
    let open = || (0..N).for_each(|n| drop(File::open(file(n)).unwrap()));
    open();
    let (mut made, asked) = requests(&mount, open);
    eprintln!("open + close, known: {made:?}, {asked} messages");
    assert!(looked_up(&mut made) && sum(&made) <= 2 * N && asked <= 5, "{made:?}, {asked}");

    let small = vec![7; 3901];
    (0..N).for_each(|n| fs::write(file(n), &small).unwrap());
    let read = || (0..N).for_each(|n| assert_eq!(fs::read(file(n)).unwrap(), small));
    read();
    let (mut made, asked) = requests(&mount, read);
    eprintln!("open + read + close, known: {made:?}, {asked} messages");
    assert!(looked_up(&mut made) && sum(&made) <= 4 * N && asked <= 5, "{made:?}, {asked}");

    let (mut made, asked) = requests(&mount, || (0..N).for_each(|n| fs::remove_file(file(n)).unwrap()));
    eprintln!("unlink, known: {made:?}, {asked} messages");
    assert!(looked_up(&mut made) && made["UNLINK"] == N, "{made:?}");
    assert!(sum(&made) <= 2 * N + 5 && asked <= 2 * N + 10, "{made:?}, {asked}");
}

#[test]
fn a_listing_with_attributes_asks_for_each_entry_once() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    const N: u64 = 2000;
    // By a mount that has ended, so that no client holds leases on them.
    let maker = Mount::new(&cluster, cluster.dir().join("maker"), &[]);
    let many = maker.1.join("top/many");
    fs::create_dir_all(&many).unwrap();
    (0..N).for_each(|n| drop(File::create(many.join(format!("f{n}"))).unwrap()));
    drop(maker);
    let (mount, dir) = (cluster.mount(), cluster.mount().join("top/many"));
    names_are_kept(mount, &dir.join("f0"));
    let list = || {
        let listed = shell(&format!("ls -l {} | wc -l", dir.display()));
        assert_eq!(listed.trim(), (N + 1).to_string());
    };
    // Listed names count for a moment; on a slow machine each is looked up once more in each further moment.
    let looked_up = |since: Instant| since.elapsed().as_millis() as u64 / 200 * N;
    let begun = Instant::now();
    let (made, asked) = requests(mount, list);
    eprintln!("ls -l of {N}, cold: {made:?}, {asked} messages");
    // The kernel asks for each access control list once, and remembers that there is none.
    assert!(sum(&made) <= N + N / 100 + 10 + looked_up(begun), "{made:?}");
    assert!(asked <= N / 50, "{asked}");
    // Later, too: a listing that brings names again makes the kernel forget that there are no lists.
    let begun = Instant::now();
    let (made, asked) = requests(mount, list);
    eprintln!("ls -l of {N}, again: {made:?}, {asked} messages");
    assert!(sum(&made) <= N + N / 50 + 10 + looked_up(begun), "{made:?}");
    assert!(asked <= N / 50, "{asked}");
    let (made, asked) = requests(mount, || drop(shell(&format!("find {} -size +1M", dir.display()))));
    eprintln!("find of {N}, known: {made:?}, {asked} messages");
    assert!(sum(&made) <= N / 10 + 10 + looked_up(begun), "{made:?}");
    assert!(asked <= N / 50, "{asked}");
}

/// A file system on a directory inside of a mount, unmounted with this value.
struct MountedInside(PathBuf);
impl Drop for MountedInside {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status(); // it may be off already
    }
}

/// The kernel unmounts from a directory whose name it drops.
#[test]
fn inner_mounts_stay_when_directories_above_change_elsewhere() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let [here, there] = [0, 1].map(|n| cluster.mounts[n].clone());
    let inside = here.join("above/inside");
    fs::create_dir_all(&inside).unwrap();
    shell(&format!("mount -t tmpfs inside {}", inside.display()));
    let _off = MountedInside(inside.clone());
    fs::write(inside.join("f"), b"in the other file system").unwrap();
    let is_there = || {
        fs::metadata(&inside).unwrap();
        assert_eq!(fs::read(inside.join("f")).unwrap(), b"in the other file system");
    };
    for round in 0..30 {
        is_there();
        fs::write(there.join(format!("above/{round}")), b"").unwrap();
        is_there();
        fs::write(there.join(format!("{round}")), b"").unwrap();
        assert!(here.join(format!("above/{round}")).exists() && here.join(format!("{round}")).exists());
        fs::rename(there.join(format!("{round}")), there.join(format!("above/moved{round}"))).unwrap();
        is_there();
    }
}

/// Reads the names of one directory on a mount again and again, so that its kernel knows them.
fn watch<'a>(
    scope: &'a std::thread::Scope<'a, '_>,
    dirs: impl Fn() -> Vec<PathBuf> + Send + 'a,
    names: u64,
    done: &'a AtomicBool,
) {
    scope.spawn(move || {
        while !done.load(Ordering::Relaxed) {
            for dir in dirs() {
                (0..names).for_each(|n| drop(fs::symlink_metadata(dir.join(format!("n{n}")))));
            }
        }
    });
}

#[test]
fn names_that_one_mount_changes_are_seen_at_once_on_the_other() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    const ROUNDS: u64 = 12;
    const NAMES: u64 = 40;
    let (round, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let dir_of = |mount: usize, round: u64| cluster.mounts[mount].join(format!("round{round}"));
    (0..ROUNDS).for_each(|r| fs::create_dir(dir_of(0, r)).unwrap());
    std::thread::scope(|scope| {
        let _stop = common::OnPanic(|| done.store(true, Ordering::Relaxed));
        for mount in [0, 1] {
            let (dir_of, round) = (&dir_of, &round);
            watch(scope, move || vec![dir_of(mount, round.load(Ordering::Relaxed))], NAMES, &done);
        }
        // A directory of its own for each round: one that was just changed by another mount is asked for each
        // time.
        for r in 0..ROUNDS {
            round.store(r, Ordering::Relaxed);
            let (one, other) = (dir_of(r as usize % 2, r), dir_of(1 - r as usize % 2, r));
            let absent = |n: u64| {
                let why = format!("round {r}, name {n}");
                assert_eq!(
                    fs::symlink_metadata(other.join(format!("n{n}"))).unwrap_err().kind(),
                    std::io::ErrorKind::NotFound,
                    "{why}"
                );
            };
            let ino = |dir: &Path, n: u64| {
                fs::symlink_metadata(dir.join(format!("n{n}")))
                    .unwrap_or_else(|e| panic!("round {r}, name {n}: {e}"))
                    .ino()
            };
            let known = || (0..NAMES).for_each(|n| drop(fs::symlink_metadata(other.join(format!("n{n}")))));
            // The first change finds names in the other's kernel; after it the directory lends none for a
            // while. Until the first of a kind there is no count of it.
            let other_mount = &cluster.mounts[1 - r as usize % 2];
            let looked_up = || counts(other_mount).get("LOOKUP").copied().unwrap_or(0);
            wait_until("the other's kernel keeps names", PATIENCE, || {
                let before = looked_up();
                known();
                looked_up() < before + NAMES / 2
            });
            for n in 0..NAMES {
                absent(n);
                let path = one.join(format!("n{n}"));
                match n % 4 {
                    0 => drop(File::create(&path).unwrap()),
                    1 => fs::create_dir(&path).unwrap(),
                    2 => std::os::unix::fs::symlink("n0", &path).unwrap(),
                    _ => fs::hard_link(one.join(format!("n{}", n - 3)), &path).unwrap(),
                }
                assert_eq!(ino(&other, n), ino(&one, n), "made: round {r}, name {n}");
            }
            known();
            // Replaced, exchanged, moved away and removed.
            for n in (0..NAMES).step_by(4) {
                let fresh = one.join("fresh");
                fs::write(&fresh, b"fresh").unwrap();
                let (name, next) = (one.join(format!("n{n}")), one.join(format!("n{}", n + 2)));
                fs::rename(&fresh, &name).unwrap();
                assert_eq!(
                    fs::read(other.join(format!("n{n}"))).unwrap(),
                    b"fresh",
                    "replaced: round {r}, name {n}"
                );
                rustix::fs::renameat_with(CWD, &name, CWD, &next, RenameFlags::EXCHANGE).unwrap();
                assert_eq!(ino(&other, n + 2), ino(&one, n + 2), "exchanged: round {r}, name {n}");
                assert!(fs::symlink_metadata(other.join(format!("n{n}"))).unwrap().file_type().is_symlink());
                fs::rename(&name, one.join("away")).unwrap();
                absent(n);
                fs::rename(one.join("away"), &name).unwrap();
                fs::remove_dir(one.join(format!("n{}", n + 1))).unwrap();
                absent(n + 1);
                fs::remove_file(&name).unwrap();
                absent(n);
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// The first change of a directory whose names the kernel of the other mount keeps.
#[test]
fn the_first_change_of_cached_names_is_seen_at_once() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    for round in 0..12 {
        let (dir, mounts) = (format!("round{round}"), [round % 2, 1 - round % 2]);
        let [one, other] = mounts.map(|n| cluster.mounts[n].join(&dir));
        fs::create_dir(&one).unwrap();
        fs::write(one.join("old"), b"old").unwrap();
        names_are_kept(&cluster.mounts[mounts[1]], &other.join("old"));
        let is_there = |name: &str| fs::symlink_metadata(other.join(name)).is_ok();
        assert!(is_there("old") && !is_there("new"));
        match round % 6 {
            0 => drop(File::create(one.join("new")).unwrap()),
            1 => fs::create_dir(one.join("new")).unwrap(),
            2 => fs::hard_link(one.join("old"), one.join("new")).unwrap(),
            3 => std::os::unix::fs::symlink("old", one.join("new")).unwrap(),
            4 => fs::rename(one.join("old"), one.join("new")).unwrap(),
            _ => fs::remove_file(one.join("old")).unwrap(),
        }
        let now = (is_there("old"), is_there("new"));
        assert_eq!(now, (round % 6 < 4, round % 6 < 5), "round {round}");
    }
}

/// A name that is moved takes what the kernel knows of it along: to a directory of which nothing is known
/// yet.
#[test]
fn a_name_moved_elsewhere_is_not_cached_without_a_lease() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let [a, b] = [0, 1].map(|n| cluster.mounts[n].clone());
    for round in 0..20 {
        let (from, to) = (format!("from{round}"), format!("to{round}"));
        fs::create_dir(a.join(&from)).unwrap();
        fs::create_dir(a.join(&to)).unwrap();
        fs::write(a.join(&from).join("f"), b"1").unwrap();
        fs::metadata(a.join(&from).join("f")).unwrap();
        // The other mount makes the directory's lease go away, and returns to it after the move.
        fs::write(b.join(&to).join("other"), b"2").unwrap();
        fs::rename(a.join(&from).join("f"), a.join(&to).join("f")).unwrap();
        assert_eq!(fs::metadata(a.join(&to).join("f")).unwrap().len(), 1);
        fs::rename(b.join(&to).join("f"), b.join(&to).join("g")).unwrap();
        assert!(fs::metadata(a.join(&to).join("f")).is_err(), "round {round}");
        assert_eq!(fs::metadata(a.join(&to).join("g")).unwrap().len(), 1);
    }
}

#[test]
fn attribute_changes_of_another_mount_show_under_known_names() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let [a, b] = [0, 1].map(|n| cluster.mounts[n].join("f"));
    fs::write(&a, b"").unwrap();
    for n in 1..=200u64 {
        let mode = if n % 2 == 0 { 0o600 } else { 0o640 };
        let (one, other) = if n % 3 == 0 { (&b, &a) } else { (&a, &b) };
        fs::metadata(other).unwrap();
        fs::set_permissions(one, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        assert_eq!(fs::metadata(other).unwrap().mode() & 0o777, mode, "{n}");
        OpenOptions::new().write(true).open(one).unwrap().set_len(n).unwrap();
        assert_eq!(fs::metadata(other).unwrap().len(), n);
        assert_eq!(fs::metadata(one).unwrap().len(), n);
    }
}

/// A mount of its own, ended with this value.
struct Mount(Child, PathBuf);
impl Mount {
    fn new(cluster: &Cluster, path: PathBuf, words: &[&str]) -> Mount {
        fs::create_dir_all(&path).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.arg("mount").arg(&path).arg("--dir").arg(cluster.dir()).args(words);
        let child = command.spawn().unwrap();
        let mount = Mount(child, path);
        let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap();
        wait_until("it is mounted", PATIENCE, || mounts().contains(mount.1.to_str().unwrap()));
        mount
    }
}
impl Drop for Mount {
    fn drop(&mut self) {
        let off = weir(&["unmount", "--lazy", self.1.to_str().unwrap()]);
        if !off.status.success() {
            eprintln!("{}", text(&off.stderr));
        }
        common::ends("the mount", &mut self.0, PATIENCE);
    }
}

#[test]
fn without_kernel_names_each_lookup_is_asked_every_time() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let plain = Mount::new(&cluster, cluster.dir().join("plain"), &["--no-kernel-names"]);
    let (mount, other) = (&plain.1, cluster.mount());
    let dir = deep(mount, "deep");
    fs::write(dir.join("f"), b"1").unwrap();
    fs::metadata(dir.join("f")).unwrap();
    let (made, _) = requests(mount, || {
        (0..10).for_each(|_| assert!(fs::metadata(dir.join("f")).unwrap().is_file()));
    });
    assert_eq!(made["LOOKUP"], 60, "{made:?}");
    fs::remove_file(other.join("deep/a/b/c/d/f")).unwrap();
    assert!(!dir.join("f").exists());
    File::create(other.join("deep/a/b/c/d/f")).unwrap();
    assert!(dir.join("f").exists());
}
