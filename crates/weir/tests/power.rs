//! Claim: data that `fsync` acknowledged survives a power cut of the machine, with the targets on ext4 and on
//! xfs. The file system under the cluster is shut down in the midst of writes, as a power cut leaves it: data
//! without a sync is gone. Runs in which no sync reaches it must lose data, or these tests could not see a
//! loss.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, OnPanic, can_mount, has, pattern, shell, text, wait_until, weir};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

const FILE_BYTES: usize = 2_100_001;
/// The largest number of files; then the oldest is written again.
const FILES: u64 = 40;
const SLOT_BYTES: usize = 3_000;
const SLOTS: u64 = 300;
const PATIENCE: Duration = Duration::from_secs(120);

/// Power cuts of each file system: few every day, more with `WEIR_POWER_CUTS` in the test's environment.
fn cuts() -> u64 {
    std::env::var("WEIR_POWER_CUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(2)
}

/// The ioctl with which ext4 and xfs stop at once, without writing what they have in memory.
const SHUT_DOWN: &str = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack('I', 2))";

/// Starts a program whose `fsync` and `fdatasync`, and those of all that it starts, do nothing and succeed: a
/// filter of system calls answers them.
const WITHOUT_SYNC: &str = "import ctypes, os, platform, struct, sys
first, second = {'x86_64': (74, 75), 'aarch64': (82, 83)}[platform.machine()]
load, equal, answer = 0x20, 0x15, 0x06
code = [(load, 0, 0, 0), (equal, 2, 0, first), (equal, 1, 0, second), (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000)]
filters = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *c) for c in code))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(code), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])";

/// A disk of its own for a cluster: a file system in a file.
struct Disk {
    root: TempDir,
}

impl Disk {
    fn new(kind: &str) -> Disk {
        let disk = Disk { root: tempfile::Builder::new().prefix("weir-test-disk-").tempdir().unwrap() };
        let image = disk.image();
        File::create(&image).unwrap().set_len(4 << 30).unwrap();
        shell(&format!("mkfs.{kind} -q {}", image.display()));
        fs::create_dir(disk.path()).unwrap();
        disk.mount();
        disk
    }
    fn image(&self) -> PathBuf {
        self.root.path().join("image")
    }
    fn path(&self) -> PathBuf {
        self.root.path().join("disk")
    }
    fn mount(&self) {
        shell(&format!("mount -o loop {} {}", self.image().display(), self.path().display()));
    }
    /// The power is cut and restored.
    fn cut_power(&self, cluster: &Cluster) {
        let pids = cluster.pids();
        let shut = Command::new("python3").args(["-c", SHUT_DOWN]).arg(self.path()).output().unwrap();
        assert!(shut.status.success(), "{}", text(&shut.stderr));
        // Not with kill(1): a child of this process would close its copies of the writers' files first, and
        // wait for it.
        for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().unwrap())) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL); // or it ended by itself
        }
        for mount in &cluster.mounts {
            shell(&format!("umount -l {}", mount.display()));
        }
        wait_until("no process uses the disk", PATIENCE, || {
            Command::new("umount").arg(self.path()).output().unwrap().status.success()
        });
        self.mount();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).output();
    }
}

/// The acknowledged files of each writer.
#[derive(Default)]
struct Acknowledged {
    /// Whole files.
    files: AtomicU64,
    /// Versions of one file that is replaced by a rename.
    replaced: AtomicU64,
    /// Overwrites in place; the n-th is of slot n modulo [`SLOTS`].
    overwritten: AtomicU64,
    /// Lines of a log.
    lines: AtomicU64,
}

impl Acknowledged {
    /// Writes until the first error.
    fn write(&self, dir: &Path) {
        let until_error = |count: &AtomicU64, step: &dyn Fn(u64) -> std::io::Result<()>| {
            while step(count.load(Ordering::Acquire)).is_ok() {
                count.fetch_add(1, Ordering::AcqRel);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| until_error(&self.files, &|n| synced(&dir.join(format!("f{}", n % FILES)), n)));
            scope.spawn(|| {
                until_error(&self.replaced, &|n| {
                    let new = dir.join("new");
                    synced(&new, n)?;
                    fs::rename(&new, dir.join("current"))?;
                    File::open(dir)?.sync_all()
                });
            });
            scope.spawn(|| {
                until_error(&self.overwritten, &|n| {
                    let file = OpenOptions::new().write(true).open(dir.join("slots"))?;
                    file.write_all_at(&slot(n), n % SLOTS * SLOT_BYTES as u64)?;
                    file.sync_data()
                });
            });
            scope.spawn(|| {
                until_error(&self.lines, &|n| {
                    let mut file = OpenOptions::new().append(true).open(dir.join("log"))?;
                    file.write_all(line(n).as_bytes())?;
                    file.sync_data()
                });
            });
        });
    }

    /// The missing part of it; `Err` names the first.
    fn verify(&self, dir: &Path) -> Result<(), String> {
        let read = |name: String| fs::read(dir.join(&name)).map_err(|e| format!("{name}: {e}"));
        let files = self.files.load(Ordering::Acquire);
        // The oldest was being written again.
        for n in (files + 1).saturating_sub(FILES)..files {
            if read(format!("f{}", n % FILES))? != pattern(n, FILE_BYTES) {
                return Err(format!("f{} does not hold write {n} of {files}", n % FILES));
            }
        }
        let replaced = self.replaced.load(Ordering::Acquire);
        if replaced > 0 {
            let current = read("current".into())?;
            // The one after the last may have been in flight.
            if current != pattern(replaced - 1, FILE_BYTES) && current != pattern(replaced, FILE_BYTES) {
                return Err(format!("current is not version {} or the next", replaced - 1));
            }
        }
        let (slots, overwritten) = (read("slots".into())?, self.overwritten.load(Ordering::Acquire));
        for n in overwritten.saturating_sub(SLOTS)..overwritten {
            let at = (n % SLOTS) as usize * SLOT_BYTES;
            let found = slots.get(at..at + SLOT_BYTES).ok_or("slots is too short")?;
            if found != slot(n) && (n + SLOTS != overwritten || found != slot(overwritten)) {
                return Err(format!("slot {} does not hold write {n} of {overwritten}", n % SLOTS));
            }
        }
        let log = text(&read("log".into())?);
        let mut found: Vec<&str> = log.split_inclusive('\n').collect();
        found.dedup(); // one that was written, but not acknowledged before a cut, was written again after it
        match (0..self.lines.load(Ordering::Acquire)).find(|n| found.get(*n as usize) != Some(&&*line(*n))) {
            Some(n) => Err(format!("line {n} of the log is not there: {} bytes", log.len())),
            None => Ok(()),
        }
    }
}

fn synced(path: &Path, n: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&pattern(n, FILE_BYTES))?;
    file.sync_all()
}

fn slot(n: u64) -> Vec<u8> {
    pattern(n + 1_000_000, SLOT_BYTES)
}

fn line(n: u64) -> String {
    format!("{n:011}\n")
}

/// A cluster on a disk of its own, with the files that the writers expect, saved.
fn begin(disk: &Disk, options: &[&str]) -> Cluster {
    let cluster = Cluster::at(Some(disk.path().join("cluster")), 1, options);
    let saved = |name: &str, bytes: &[u8]| {
        let mut file = File::create(cluster.mount().join(name)).unwrap();
        file.write_all(bytes).and_then(|()| file.sync_all()).unwrap();
    };
    saved("log", b"");
    saved("slots", &vec![0; SLOT_BYTES * SLOTS as usize]);
    cluster
}

/// Writes, and takes the power away when each writer has got further.
fn write_and_cut(disk: &Disk, cluster: &Cluster, acknowledged: &Acknowledged) {
    let counts = [
        (&acknowledged.files, 4),
        (&acknowledged.replaced, 3),
        (&acknowledged.overwritten, 100),
        (&acknowledged.lines, 100),
    ];
    let goals = counts.map(|(count, more)| (count, count.load(Ordering::Acquire) + more));
    std::thread::scope(|scope| {
        let _end = OnPanic(|| cluster.kill_all());
        let writing = scope.spawn(|| acknowledged.write(cluster.mount()));
        wait_until("all writers get on", PATIENCE, || {
            writing.is_finished() || goals.iter().all(|(count, goal)| count.load(Ordering::Acquire) >= *goal)
        });
        assert!(!writing.is_finished(), "a writer met an error before the power was cut{}", cluster.logs());
        disk.cut_power(cluster);
    });
}

fn power_cuts(kind: &str) {
    if !can_mount() || !has(&format!("mkfs.{kind}")) || !has("python3") {
        return;
    }
    let disk = Disk::new(kind);
    let cluster = begin(&disk, &[]);
    let acknowledged = Acknowledged::default();
    for cut in 0..cuts() {
        write_and_cut(&disk, &cluster, &acknowledged);
        cluster.up();
        let lost = acknowledged.verify(cluster.mount());
        assert_eq!(lost, Ok(()), "after cut {cut} on {kind}{}", cluster.logs());
        wait_until("everything is redundant again", PATIENCE, || cluster.status()["redundant"] == true);
    }
    let dir = cluster.dir();
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    for target in 1..=6 {
        let check = weir(&["inspect", "--check", dir.join(format!("t{target}")).to_str().unwrap()]);
        assert!(check.status.success(), "{}{}", text(&check.stdout), text(&check.stderr));
    }
}

#[test]
fn a_power_cut_of_an_ext4_disk_loses_nothing_that_was_fsynced() {
    power_cuts("ext4");
}

#[test]
fn a_power_cut_of_an_xfs_disk_loses_nothing_that_was_fsynced() {
    power_cuts("xfs");
}

/// Whether acknowledged data is gone after a power cut, where no sync reaches the disk.
fn loses_without_syncs(kind: &str) -> bool {
    let disk = Disk::new(kind);
    // Lost data is waited for like data of a target that is down: not for ten minutes here.
    let mut cluster = begin(&disk, &["--patience", "30s"]);
    assert!(weir(&["down", "--dir", cluster.dir().to_str().unwrap()]).status.success());
    shell(&format!("sync -f {}", disk.path().display()));
    cluster.launcher = ["python3", "-c", WITHOUT_SYNC].map(str::to_string).to_vec();
    cluster.up();
    let acknowledged = Acknowledged::default();
    write_and_cut(&disk, &cluster, &acknowledged);
    cluster.launcher.clear();
    !cluster.try_up().status.success() || acknowledged.verify(cluster.mount()).is_err()
}

#[test]
fn without_syncs_a_power_cut_loses_data() {
    for kind in ["ext4", "xfs"] {
        if !can_mount() || !has(&format!("mkfs.{kind}")) || !has("python3") {
            return;
        }
        // Not each time: on a busy machine the kernel may have written everything by itself.
        let lost = (0..6).any(|_| loses_without_syncs(kind));
        assert!(lost, "nothing is missing after power cuts on {kind}, though nothing was synced");
    }
}
