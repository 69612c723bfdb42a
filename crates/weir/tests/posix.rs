//! Claim: on a mount every case of pjdfstest passes, and fsx finds nothing (`make setup` installs both); and
//! POSIX's rules for one machine hold between two mounts.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, text, tool};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// Of fsx, over all its runs.
const FSX_OPERATIONS: u64 = 100_000;

/// Two users that every Debian has, with their groups.
const PJDFSTEST: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.01
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// Cases that cannot apply, with the reason that `docs/semantics.md` gives.
const LEFT_OUT: [&str; 1] = ["link::link_count_max"];
/// Cases that mount the file system read-only and back. They run by themselves: an earlier case keeps a file
/// open to the end of its process, and then no file system can be made read-only.
const REMOUNTING: &str = "::erofs_";

#[test]
fn pjdfstest_passes() {
    if !can_mount() {
        return;
    }
    let Some(pjdfstest) = tool("pjdfstest") else { return };
    let cluster = Cluster::start(1);
    let outside = tempfile::tempdir().unwrap();
    // mount(8) looks for `weir` where the system's programs are.
    let run = |config: &str, only: &str| {
        let path = outside.path().join("pjdfstest.toml");
        fs::write(&path, config).unwrap();
        let other = outside.path().join("other");
        fs::create_dir_all(&other).unwrap();
        let script = format!(
            "mount --make-rprivate / && mount -t tmpfs none {other} && mount -t tmpfs none /usr/local/sbin &&
             ln -s {weir} /usr/local/sbin/weir && exec {pjdfstest} -c {path} -p {mount} -s {other} {only}",
            weir = env!("CARGO_BIN_EXE_weir"),
            pjdfstest = pjdfstest.display(),
            path = path.display(),
            mount = cluster.mount().display(),
            other = other.display(),
        );
        let mut command = Command::new("unshare");
        let output = command.env("RUST_BACKTRACE", "0").args(["-m", "sh", "-c", &script]).output().unwrap();
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{printed}\n{}", text(&output.stderr));
        printed
    };
    let output = run(PJDFSTEST, "");
    let skipped: Vec<&str> = output
        .lines()
        .filter(|line| line.contains(" skipped") && !line.contains("Summary"))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|case| !case.contains(REMOUNTING))
        .collect();
    assert_eq!(skipped, LEFT_OUT, "{output}");
    assert!(output.contains(" 0 failed") && output.contains(" 384 passed"), "{output}");
    let output = run(&PJDFSTEST.replace("[settings]", "[settings]\nallow_remount = true"), REMOUNTING);
    assert!(output.contains(" 0 failed, 0 skipped, 13 passed"), "{output}");
}

/// Runs of fsx at once, each on a file of its own, and how the operations are weighed. The first has
/// everything; the others, which go to the kernel's pages more and to the metadata less, most of the
/// operations.
const FSX: [(u64, &str); 3] = [
    (
        6_000,
        "truncate = 1\nfsync = 1\nfdatasync = 1\nposix_fallocate = 1\npunch_hole = 1\nsendfile = 1\ncopy_file_range = 1\nclose_open = 1",
    ),
    (
        47_000,
        "truncate = 0.1\nfsync = 0.05\nposix_fallocate = 0.05\npunch_hole = 0.05\nsendfile = 1\nclose_open = 0.1",
    ),
    (47_000, "truncate = 0.1\nfdatasync = 0.05\ncopy_file_range = 0.1\nsendfile = 1\nclose_open = 0.1"),
];

/// Its options for a file that two mounts have in turn: an open goes to another one of them each time.
const FSX_IN_TURN: &str = "truncate = 1\nfsync = 1\npunch_hole = 1\nsendfile = 1\nclose_open = 10";
const FSX_IN_TURN_OPERATIONS: u64 = 10_000;

/// A running fsx on one file.
struct Fsx {
    child: Child,
    outside: TempDir,
}

impl Fsx {
    fn start(file: &Path, seed: u64, operations: u64, weights: &str) -> Fsx {
        let outside = tempfile::tempdir().unwrap();
        let config = outside.path().join("fsx.toml");
        let usual = "read = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\ninvalidate = 0.5";
        let weights = format!("flen = 1048576\n[opsize]\nmax = 131072\n[weights]\n{usual}\n{weights}\n");
        fs::write(&config, weights).unwrap();
        let log = fs::File::create(outside.path().join("log")).unwrap();
        let mut command = Command::new(tool("fsx").expect("fsx is installed"));
        command.arg("-f").arg(&config).arg("-P").arg(outside.path()).arg(file);
        command.args(["-S", &seed.to_string(), "-N", &operations.to_string()]);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        Fsx { child: command.spawn().unwrap(), outside }
    }

    /// Ends when fsx has ended, and fails if it found something.
    fn check(&mut self, seed: u64) {
        let status = self.child.wait().unwrap();
        let output = text(&fs::read(self.outside.path().join("log")).unwrap());
        let lines: Vec<&str> = output.lines().collect();
        let last = &lines[lines.len().saturating_sub(60)..];
        assert!(status.success(), "seed {seed}:\n{}", last.join("\n"));
    }
}

impl Drop for Fsx {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended, unless another one failed
        let _ = self.child.wait();
    }
}

/// One run of fsx per entry of [`FSX`], with a `part`-th of its operations.
fn run_fsx(mount: &Path, seed: u64, part: u64) {
    let start = |(n, (operations, weights)): (u64, &(u64, &str))| {
        let file = mount.join(format!("fsx-{seed}-{n}"));
        Fsx::start(&file, seed * 100 + n, operations / part, weights)
    };
    let mut runs: Vec<Fsx> = (0..).zip(&FSX).map(start).collect();
    runs.iter_mut().for_each(|run| run.check(seed));
}

/// fsx on a file whose path leads to one mount and to the other by turns.
fn run_fsx_in_turn(cluster: &Cluster, seed: u64, operations: u64) {
    let outside = tempfile::tempdir().unwrap();
    let (path, next) = (outside.path().join("file"), outside.path().join("next"));
    let lead_to = |mount: &Path| {
        std::os::unix::fs::symlink(mount.join(format!("turn-{seed}")), &next).unwrap();
        fs::rename(&next, &path).unwrap();
    };
    lead_to(cluster.mount());
    let mut fsx = Fsx::start(&path, seed, operations, FSX_IN_TURN);
    let mut turns = 0;
    for mount in cluster.mounts.iter().cycle() {
        if fsx.child.try_wait().unwrap().is_some() {
            break;
        }
        lead_to(mount);
        turns += 1;
        std::thread::sleep(Duration::from_millis(3)); // a few operations of fsx
    }
    fsx.check(seed);
    assert!(turns > 100, "{turns} turns only");
}

#[test]
fn fsx_finds_nothing() {
    if !can_mount() || tool("fsx").is_none() {
        return;
    }
    assert_eq!(FSX.iter().map(|(n, _)| n).sum::<u64>(), FSX_OPERATIONS);
    run_fsx(Cluster::start(1).mount(), 1, 1);
}

#[test]
fn fsx_finds_nothing_in_a_file_that_two_mounts_have_in_turn() {
    if can_mount() && tool("fsx").is_some() {
        run_fsx_in_turn(&Cluster::start(2), 1, FSX_IN_TURN_OPERATIONS);
    }
}

/// Of the long runs; `WEIR_FSX_SEEDS=first..end` at run time chooses others.
const FSX_SEEDS: std::ops::Range<u64> = 100..120;

/// `make test-long`: a million operations of each seed, 20,000 at a time: fsx never unmaps what it read by
/// `mmap`, so each of its operations takes longer than the one before, and a process may have 65,530
/// mappings.
#[test]
#[ignore = "takes hours"]
fn fsx_finds_nothing_in_a_million_operations() {
    let cluster = Cluster::start(1);
    for seed in common::part("WEIR_FSX_SEEDS", FSX_SEEDS) {
        (0..50).for_each(|n| run_fsx(cluster.mount(), seed * 50 + n, FSX_OPERATIONS / 20_000));
        println!("seed {seed}: nothing found");
    }
}

/// `make test-long`: 50,000 operations of each seed.
#[test]
#[ignore = "takes hours"]
fn fsx_finds_nothing_on_two_alternating_mounts_for_long() {
    let cluster = Cluster::start(2);
    let seeds = common::part("WEIR_FSX_SEEDS", FSX_SEEDS);
    seeds.for_each(|seed| run_fsx_in_turn(&cluster, seed, 5 * FSX_IN_TURN_OPERATIONS));
}

#[test]
fn appends_on_two_mounts_never_meet() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let log = cluster.mount().join("log");
    fs::write(&log, "").unwrap();
    const RECORDS: usize = 300;
    // Two programs on each mount; a record is one write.
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let path = cluster.mounts[writer % 2].join("log");
            std::thread::spawn(move || {
                let mut file = OpenOptions::new().append(true).open(path).unwrap();
                for n in 0..RECORDS {
                    let record = format!("{writer} {n} {}\n", "x".repeat((writer * 31 + n * 7) % 200));
                    assert_eq!(file.write(record.as_bytes()).unwrap(), record.len());
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|w| w.join().unwrap());
    for mount in &cluster.mounts {
        let text = fs::read_to_string(mount.join("log")).unwrap();
        let mut next = [0; 4];
        for line in text.lines() {
            let mut words = line.split(' ');
            let mut number = || words.next().unwrap().parse::<usize>().unwrap();
            let (writer, n) = (number(), number());
            assert_eq!(n, next[writer], "{line}");
            assert_eq!(words.next().unwrap().len(), (writer * 31 + n * 7) % 200, "{line}");
            next[writer] += 1;
        }
        assert_eq!(next, [RECORDS; 4]);
    }
}

/// Holes are reported where nothing was written, and a copy of a file has the same bytes.
#[test]
fn holes_are_reported_and_copies_are_whole() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let path = cluster.mount().join("sparse");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    let bytes = common::pattern(5, 100_000);
    let at = 300 << 20;
    file.write_all_at(&bytes, at).unwrap();
    let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap();
    assert!(data > at - (64 << 20) && data <= at, "SEEK_DATA found data at {data}, not near {at}");
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap(), 0);
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(at + 1)).unwrap(), at + 100_000);
    let error = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at + 100_000)).unwrap_err();
    assert_eq!(error, rustix::io::Errno::NXIO);

    let whole = common::pattern(6, 9_000_001);
    fs::write(cluster.mount().join("whole"), &whole).unwrap();
    let from = fs::File::open(cluster.mount().join("whole")).unwrap();
    let (mut from_at, mut to_at) = (0, 17);
    while rustix::fs::copy_file_range(&from, Some(&mut from_at), &file, Some(&mut to_at), 1 << 30).unwrap()
        > 0
    {}
    assert_eq!((from_at, to_at), (9_000_001, 9_000_018));
    let mut copied = vec![0; whole.len()];
    file.read_exact_at(&mut copied, 17).unwrap();
    assert!(copied == whole);
}

/// `fallocate` keeps its promise or refuses: no success beyond a limit, and a hole is punched to the end.
#[test]
fn fallocate_does_what_it_reports() {
    if !can_mount() {
        return;
    }
    use rustix::fs::{FallocateFlags as How, fallocate};
    use rustix::io::Errno;
    let cluster = Cluster::start(1);
    common::volume(&cluster, &["create", "data", "--bytes", "40MiB"]);
    let (volume, limit) = (cluster.mount().join("data"), 40 << 20);
    let open = |name: &str| {
        OpenOptions::new().read(true).write(true).create_new(true).open(volume.join(name)).unwrap()
    };
    let file = open("f");
    assert_eq!(fallocate(&file, How::empty(), 0, 2 * limit), Err(Errno::DQUOT));
    assert_eq!(file.metadata().unwrap().len(), 0);
    let outside = File::create(cluster.mount().join("outside")).unwrap();
    assert_eq!(fallocate(&outside, How::empty(), 0, 100 << 40), Err(Errno::NOSPC));
    fallocate(&file, How::empty(), 0, 24 << 20).unwrap();
    assert_eq!((file.metadata().unwrap().len(), file.metadata().unwrap().blocks()), (24 << 20, 24 << 11));
    let other = open("g");
    let mut taken = 0;
    while let Ok(n) = other.write_at(&[1; 1 << 20], taken) {
        taken += n as u64;
    }
    assert!(taken <= limit - (24 << 20), "{taken}");
    file.write_all_at(&vec![7; 24 << 20], 0).unwrap();
    file.sync_all().unwrap();
    // No space is left past the end; and parts are not cut out of files.
    assert_eq!(fallocate(&file, How::KEEP_SIZE, 0, 30 << 20), Err(Errno::DQUOT));
    assert_eq!(fallocate(&file, How::COLLAPSE_RANGE, 0, 4 << 20), Err(Errno::OPNOTSUPP));
    fallocate(&file, How::ZERO_RANGE | How::KEEP_SIZE, 0, 4 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 24 << 11, "zeros that were asked for are kept");
    fallocate(&file, How::PUNCH_HOLE | How::KEEP_SIZE, 4 << 20, 16 << 20).unwrap();
    assert_eq!((file.metadata().unwrap().len(), file.metadata().unwrap().blocks()), (24 << 20, 8 << 11));
    let mut read = vec![1; 24 << 20];
    file.read_exact_at(&mut read, 0).unwrap();
    let (zeros, data) = read.split_at(20 << 20);
    assert!(zeros.iter().all(|b| *b == 0) && data.iter().all(|b| *b == 7));
    other.write_all_at(&vec![2; 16 << 20], taken).unwrap();
}

fn nameless(dir: &Path, more: OFlags) -> File {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | more;
    rustix::fs::open(dir, flags, Mode::from_raw_mode(0o666)).unwrap().into()
}

fn link(file: &File, to: &Path) -> rustix::io::Result<()> {
    let of_process = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, of_process, CWD, to, AtFlags::SYMLINK_FOLLOW)
}

#[test]
fn a_file_without_a_name_is_linked_or_goes() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let (here, there) = (cluster.mounts[0].join("d"), cluster.mounts[1].join("d"));
    fs::create_dir(&here).unwrap();
    fs::set_permissions(&here, fs::Permissions::from_mode(0o2755)).unwrap();
    let before = fs::metadata(&here).unwrap();
    let bytes = common::pattern(3, 3_000_000);
    let file = nameless(&here, OFlags::empty());
    file.write_all_at(&bytes, 0).unwrap();
    let meta = file.metadata().unwrap();
    assert_eq!((meta.nlink(), meta.len(), meta.mode() & 0o7000), (0, 3_000_000, 0));
    assert_eq!(fs::read_dir(&there).unwrap().count(), 0);
    assert_eq!(
        fs::metadata(&here).unwrap().mtime_nsec(),
        before.mtime_nsec(),
        "the directory did not change"
    );
    link(&file, &here.join("named")).unwrap();
    assert!(fs::read(there.join("named")).unwrap() == bytes);
    assert_eq!(fs::metadata(there.join("named")).unwrap().nlink(), 1);
    link(&file, &here.join("again")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 2);
    file.write_all_at(b"after", 0).unwrap();
    drop(file);
    assert_eq!(fs::read(there.join("again")).unwrap()[..5], *b"after");

    // Not those that are not to have one, and those that had.
    let never = nameless(&here, OFlags::EXCL);
    assert_eq!(link(&never, &here.join("never")), Err(rustix::io::Errno::NOENT));
    let had = nameless(&here, OFlags::empty());
    link(&had, &here.join("had")).unwrap();
    fs::remove_file(there.join("had")).unwrap();
    assert_eq!(link(&had, &here.join("back")), Err(rustix::io::Errno::NOENT));
    drop((never, had));

    // Its mount's process dies: nothing of it is left.
    let lost = nameless(&here, OFlags::empty());
    lost.write_all_at(&bytes, 0).unwrap();
    lost.sync_all().unwrap();
    cluster.kill("mount-1");
    drop(lost);
    cluster.up();
    let mut names: Vec<_> =
        fs::read_dir(&here).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["again", "named"]);
}

#[test]
fn birth_times_are_reported() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let path = cluster.mounts[0].join("f");
    let before = SystemTime::now();
    fs::write(&path, "x").unwrap();
    let birth = fs::metadata(&path).unwrap().created().unwrap();
    let slack = Duration::from_millis(100);
    assert!(birth + slack >= before && birth <= SystemTime::now() + slack, "{birth:?} is not {before:?}");
    fs::write(&path, "longer").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&path, cluster.mounts[0].join("g")).unwrap();
    let there = fs::metadata(cluster.mounts[1].join("g")).unwrap();
    assert_eq!(there.created().unwrap(), birth);
    assert!(there.modified().unwrap() > birth);

    // The other fields are the same as by stat(2).
    let device = cluster.mount().join("device");
    common::shell(&format!("mknod {} c 259 70000", device.display()));
    for path in [&device, &cluster.mount().join("g"), &cluster.mount().to_path_buf()] {
        let all = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let statx = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, all).unwrap();
        let stat = rustix::fs::lstat(path).unwrap();
        assert!(StatxFlags::from_bits_retain(statx.stx_mask).contains(all), "{:x}", statx.stx_mask);
        assert_eq!(
            (u32::from(statx.stx_mode), statx.stx_ino, statx.stx_size as i64, u64::from(statx.stx_nlink)),
            (stat.st_mode, stat.st_ino, stat.st_size, stat.st_nlink)
        );
        let rdev = rustix::fs::makedev(statx.stx_rdev_major, statx.stx_rdev_minor);
        assert_eq!(
            (rdev, statx.stx_uid, statx.stx_mtime.tv_nsec as u64),
            (stat.st_rdev, stat.st_uid, stat.st_mtime_nsec)
        );
    }
}

#[test]
fn reading_changes_access_times_as_relatime_has_it() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let path = cluster.mount().join("f");
    fs::write(&path, "bytes").unwrap();
    let atime = |path: &Path| fs::metadata(path).unwrap().accessed().unwrap();
    let read = || assert_eq!(fs::read(&path).unwrap(), b"bytes");
    let began = SystemTime::now();
    let birth = atime(&path);
    fs::File::open(&path).unwrap();
    assert_eq!(atime(&path), birth, "an open is no read");
    // Older than the last change: it follows, and then it does not.
    read();
    let first = atime(&path);
    assert!(first >= began - Duration::from_millis(100) && first > birth, "{first:?} {began:?}");
    read();
    assert_eq!(atime(&path), first);
    fs::write(&path, "bytes").unwrap();
    read();
    let second = atime(&path);
    assert!(second > first);
    // A day old: it follows; not through a handle that is to leave it.
    let day = Duration::from_secs(25 * 3600);
    let set = |at: SystemTime| {
        let times = fs::FileTimes::new().set_accessed(at).set_modified(at - day);
        OpenOptions::new().write(true).open(&path).unwrap().set_times(times).unwrap();
    };
    set(second - day);
    let quiet = OpenOptions::new().read(true).custom_flags(libc::O_NOATIME).open(&path).unwrap();
    let mut byte = [0];
    quiet.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(atime(&path), second - day);
    drop(quiet);
    read();
    let third = atime(&path);
    assert!(third > second);
    // What another mount sees, and what it has read.
    let there = cluster.mounts[1].join("f");
    assert_eq!(atime(&there), third);
    set(second - day);
    assert_eq!(fs::read(&there).unwrap(), b"bytes");
    // A mount that caches the attributes sees it when it asks; after a change of its own it has to.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(atime(&path) > third);

    // Directories and links, too.
    let dir = cluster.mount().join("dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("x"), "").unwrap();
    let before = atime(&dir);
    fs::read_dir(&dir).unwrap().for_each(drop);
    assert!(atime(&dir) > before);

    // A mount that does not want it.
    set(second - day);
    rustix::mount::mount_remount(cluster.mount(), rustix::mount::MountFlags::NOATIME, "").unwrap();
    common::wait_until("the option is noticed", Duration::from_secs(20), || {
        set(second - day);
        read();
        atime(&path) == second - day
    });
}
