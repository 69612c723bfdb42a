//! Claim: through a mount, files behave as in POSIX, and two mounts see each other's changes at once.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, pattern, shell, wait_until, weir};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

#[test]
fn a_mount_is_a_file_system() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let root = cluster.mount();

    // Names.
    fs::create_dir(root.join("d")).unwrap();
    fs::write(root.join("d/a"), b"hello").unwrap();
    assert_eq!(fs::read(root.join("d/a")).unwrap(), b"hello");
    assert_eq!(fs::remove_dir(root.join("d")).unwrap_err().raw_os_error(), Some(39));
    fs::rename(root.join("d/a"), root.join("b")).unwrap();
    assert_eq!(fs::metadata(root.join("d/a")).unwrap_err().kind(), ErrorKind::NotFound);
    fs::hard_link(root.join("b"), root.join("d/c")).unwrap();
    assert_eq!(fs::metadata(root.join("b")).unwrap().nlink(), 2);
    assert_eq!(fs::metadata(root.join("b")).unwrap().ino(), fs::metadata(root.join("d/c")).unwrap().ino());
    symlink("d/c", root.join("s")).unwrap();
    assert_eq!(fs::read_link(root.join("s")).unwrap().to_str(), Some("d/c"));
    assert_eq!(fs::read(root.join("s")).unwrap(), b"hello");
    assert_eq!(
        OpenOptions::new().write(true).create_new(true).open(root.join("b")).unwrap_err().kind(),
        ErrorKind::AlreadyExists
    );
    assert_eq!(fs::write(root.join("x".repeat(256)), b"").unwrap_err().raw_os_error(), Some(36));

    // An open file outlives its name.
    let mut open = OpenOptions::new().read(true).write(true).open(root.join("b")).unwrap();
    fs::remove_file(root.join("b")).unwrap();
    fs::remove_file(root.join("d/c")).unwrap();
    let mut still = String::new();
    open.read_to_string(&mut still).unwrap();
    assert_eq!(still, "hello");
    open.write_all(b" world").unwrap();
    assert_eq!(open.metadata().unwrap().len(), 11);
    drop(open);

    // Attributes.
    let f = root.join("f");
    fs::write(&f, b"0123456789").unwrap();
    fs::set_permissions(&f, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(&f).unwrap().mode() & 0o7777, 0o640);
    shell(&format!("touch -d @1000000000 {0} && [ $(stat -c %Y {0}) = 1000000000 ]", f.display()));
    let set =
        format!("setfattr -n user.kind -v dark {0} && getfattr --only-values -n user.kind {0}", f.display());
    if common::has("setfattr") {
        assert_eq!(shell(&set), "dark");
    }

    // Sizes.
    let file = OpenOptions::new().write(true).read(true).open(&f).unwrap();
    file.set_len(4).unwrap();
    assert_eq!(fs::read(&f).unwrap(), b"0123");
    file.set_len(8).unwrap();
    assert_eq!(fs::read(&f).unwrap(), b"0123\0\0\0\0");
    file.write_all_at(b"end", 3_000_000).unwrap();
    drop(file);
    let bytes = fs::read(&f).unwrap();
    assert_eq!((bytes.len(), &bytes[..4], &bytes[3_000_000..]), (3_000_003, &b"0123"[..], &b"end"[..]));
    assert!(bytes[4..3_000_000].iter().all(|b| *b == 0));
    let mut append = OpenOptions::new().append(true).open(&f).unwrap();
    append.write_all(b"!").unwrap();
    drop(append);
    assert_eq!(fs::metadata(&f).unwrap().len(), 3_000_004);

    // Many entries, each exactly once.
    fs::create_dir(root.join("many")).unwrap();
    for n in 0..1500 {
        File::create(root.join(format!("many/{n:04}"))).unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(root.join("many"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, (0..1500).map(|n| format!("{n:04}")).collect::<Vec<_>>());
    shell(&format!("[ $(ls -l {} | wc -l) = 1501 ] && rm -r {0}", root.join("many").display()));

    assert!(
        shell(&format!("df --output=size {} | tail -1", root.display())).trim().parse::<u64>().unwrap() > 0
    );
}

#[test]
fn large_files_come_back_byte_for_byte_also_after_a_restart() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let path = cluster.mount().join("large");
    let bytes = pattern(1, 40_000_003);
    let mut file = File::create(&path).unwrap();
    let mut rest = &bytes[..];
    // Pieces of every kind of size.
    for len in [1, 4095, 4096, 65_537, 1 << 20, 3_000_001].into_iter().cycle() {
        let (part, tail) = rest.split_at(len.min(rest.len()));
        file.write_all(part).unwrap();
        rest = tail;
        if rest.is_empty() {
            break;
        }
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(fs::read(&path).unwrap() == bytes, "read back through the writer's mount");

    // Overwrites within.
    let mut expected = bytes.clone();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    for (n, (offset, len)) in
        [(5, 10), (1_000_000, 200_000), (8_388_600, 100), (20_000_000, 5_000_000)].into_iter().enumerate()
    {
        let part = pattern(100 + n as u64, len);
        file.write_all_at(&part, offset).unwrap();
        expected[offset as usize..offset as usize + len].copy_from_slice(&part);
    }
    drop(file);
    assert!(fs::read(&path).unwrap() == expected, "read back after overwrites");

    let layout = weir(&["file", "layout", "--json", path.to_str().unwrap()]);
    let layout: serde_json::Value = serde_json::from_slice(&layout.stdout).unwrap();
    assert_eq!(layout["scheme"], "ec:4+2");
    assert_eq!(layout["stripes"][0]["data"].as_array().unwrap().len(), 4);

    let dir = cluster.dir();
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    for target in 1..=6 {
        let target = dir.join(format!("t{target}"));
        let check = weir(&["inspect", "--check", target.to_str().unwrap()]);
        assert!(check.status.success(), "{}{}", common::text(&check.stdout), common::text(&check.stderr));
    }
    cluster.up();
    assert!(fs::read(&path).unwrap() == expected, "read back after a restart");
    let mut tail = Vec::new();
    let mut file = File::open(&path).unwrap();
    file.seek(SeekFrom::End(-100)).unwrap();
    file.read_to_end(&mut tail).unwrap();
    assert_eq!(tail, expected[expected.len() - 100..]);
}

#[test]
fn two_mounts_see_each_others_changes_at_once() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let (a, b) = (&cluster.mounts[0], &cluster.mounts[1]);
    for round in 0..20 {
        let name = format!("f{round}");
        let (fa, fb) = (a.join(&name), b.join(&name));
        // Absent, then there: a cached absence must go.
        assert!(!fb.exists());
        fs::write(&fa, format!("one {round}")).unwrap();
        assert_eq!(fs::read_to_string(&fb).unwrap(), format!("one {round}"));
        // Append on the other side, read here.
        OpenOptions::new().append(true).open(&fb).unwrap().write_all(b" two").unwrap();
        assert_eq!(fs::read_to_string(&fa).unwrap(), format!("one {round} two"));
        assert_eq!(fs::metadata(&fa).unwrap().len(), fs::metadata(&fb).unwrap().len());
        // Overwrite what the other has in its page cache.
        OpenOptions::new().write(true).open(&fa).unwrap().write_all_at(b"ONE", 0).unwrap();
        assert_eq!(fs::read_to_string(&fb).unwrap(), format!("ONE {round} two"));
        // Truncate, rename, delete.
        OpenOptions::new().write(true).open(&fb).unwrap().set_len(3).unwrap();
        assert_eq!(fs::read_to_string(&fa).unwrap(), "ONE");
        fs::rename(&fa, a.join("renamed")).unwrap();
        assert!(!fb.exists());
        assert_eq!(fs::read_to_string(b.join("renamed")).unwrap(), "ONE");
        fs::remove_file(b.join("renamed")).unwrap();
        assert!(!a.join("renamed").exists());
        assert_eq!(fs::read_dir(a).unwrap().count(), 0);
    }
}

/// Also a file that the mount does not know to be open, removed by either mount.
#[test]
fn an_open_file_is_inspected_after_its_removal() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    for (round, remover) in cluster.mounts.iter().enumerate() {
        let at = cluster.mounts[0].join(format!("gone{round}"));
        fs::create_dir_all(at.join("d")).unwrap();
        shell(&format!("mkfifo {0}/p && mkdir {0}/e && touch {0}/f", at.display()));
        let open = |name: &str| {
            OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(at.join(name)).unwrap()
        };
        let had = ["d", "p", "e", "f"].map(open);
        let from = remover.join(format!("gone{round}"));
        fs::remove_dir(from.join("d")).unwrap();
        fs::remove_file(from.join("p")).unwrap();
        fs::remove_file(from.join("f")).unwrap();
        fs::create_dir(from.join("new")).unwrap();
        fs::rename(from.join("new"), from.join("e")).unwrap();
        let links = had.map(|file| file.metadata().map(|m| m.nlink()).map_err(|e| e.to_string()));
        assert_eq!(links, [const { Ok(0) }; 4], "round {round}");
        for name in ["d", "p", "f"] {
            assert_eq!(fs::metadata(at.join(name)).unwrap_err().kind(), ErrorKind::NotFound);
        }
        assert_eq!(fs::metadata(at.join("e")).unwrap().nlink(), 2);
    }
}

#[test]
fn a_reader_follows_a_writer_on_the_other_mount() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let bytes = pattern(7, 3_000_000);
    let mut writer = File::create(cluster.mounts[0].join("grows")).unwrap();
    let mut reader = File::open(cluster.mounts[1].join("grows")).unwrap();
    let mut seen = Vec::new();
    for part in bytes.chunks(250_001) {
        writer.write_all(part).unwrap();
        reader.read_to_end(&mut seen).unwrap();
        assert_eq!(
            seen.len() as u64,
            writer.stream_position().unwrap(),
            "what write() returned for is seen at once"
        );
    }
    assert!(seen == bytes);
}

#[test]
fn unmount_and_down_leave_nothing() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--memory"]);
    fs::write(cluster.mount().join("f"), pattern(3, 1_000_000)).unwrap();
    // A mount whose process was killed is a mount that errors; unmount cleans it.
    cluster.kill("mount-1");
    assert!(fs::read(cluster.mount().join("f")).is_err());
    let unmount = weir(&["unmount", cluster.mount().to_str().unwrap()]);
    assert!(unmount.status.success(), "{}", common::text(&unmount.stderr));
    cluster.up();
    assert_eq!(fs::read(cluster.mount().join("f")).unwrap(), pattern(3, 1_000_000));
    let names = cluster.names();
    assert_eq!(names.len(), 10, "{names:?}");
    // Busy: a file is open.
    let open = File::open(cluster.mount().join("f")).unwrap();
    let busy = weir(&["unmount", cluster.mount().to_str().unwrap()]);
    assert!(!busy.status.success() && common::text(&busy.stderr).contains("hint: "));
    let pids: Vec<i64> = names.iter().filter_map(|n| cluster.pid(n)).collect();
    assert!(weir(&["down", "--memory", "--dir", cluster.dir().to_str().unwrap()]).status.success());
    drop(open);
    assert!(!cluster.dir().exists(), "no byte is left");
    let gone = |pid: &i64| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z"));
    wait_until("no process is left", Duration::from_secs(60), || !pids.iter().any(gone));
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(cluster.mount().to_str().unwrap()));
}

/// In namespaces of its own, with directories of the system for itself: nothing of it stays.
const BY_MOUNT_8: &str = r#"
mount --make-rprivate /
for dir in /run /var/log /usr/local/sbin; do mount -t tmpfs none $dir; done
ln -s "$WEIR" /usr/local/sbin/weir
ended() { for _ in $(seq 600); do [ -d /proc/$1 ] || return 0; sleep 0.1; done; return 1; }
mounted() { pid=$(grep -ho '"pid":[0-9]*' /run/weir/*.pid | cut -d: -f2); pids="$pids $pid"; }
refused() { if "$@" 2> /run/printed; then echo "not refused: $*"; exit 1; fi; }
pids=
trap 'umount -l "$AT" 2> /dev/null || true; [ -z "$pids" ] || kill -9 $pids 2> /dev/null || true' EXIT
echo "$SOURCE $AT fuse.weir _netdev,nofail,x-test,ro,noexec,memory-mib=64 0 0" > /run/fstab
mount -a -T /run/fstab; mounted
mount -a -T /run/fstab
findmnt -n -o FSTYPE,SOURCE "$AT" | tr -s ' '
findmnt -n -o OPTIONS "$AT" | tr , '\n' | grep -x -e ro -e nosuid -e nodev -e noexec | sort | xargs
cat "$AT/f"
refused touch "$AT/f"
refused mount -o remount,strictatime "$AT"
grep -o 'strictatime.*' /run/printed | head -1 | cut -c 1-11
mount -o remount,rw "$AT"
touch "$AT/f"
umount "$AT"; ended $pid
ln -s "$WEIR" /run/mount.fuse.weir
/run/mount.fuse.weir "$SOURCE" "$AT" -n -o noatime; mounted
cat "$AT/f"
umount "$AT"; ended $pid
/run/mount.fuse.weir "$SOURCE" "$AT" -o nodiratime,lazytime,sync,silent,nosymfollow; mounted
findmnt -n -o OPTIONS "$AT" | tr , '\n' | grep -x -e nosuid -e nodev -e nodiratime -e nosymfollow -e sync | sort | xargs
ln -sf f "$AT/link"; refused cat "$AT/link"
umount "$AT"; ended $pid
refused mount -t fuse.weir "$SOURCE" "$AT" -o nonsense
refused mount -t fuse.weir weir:/ "$AT" -o cluster=/run
grep -o 'is not the directory of a cluster' /run/printed
"#;

#[test]
fn mount_8_makes_changes_and_ends_mounts() {
    if !can_mount() || !common::has("mount.fuse") {
        return;
    }
    let cluster = Cluster::start(1);
    fs::write(cluster.mount().join("f"), b"seen\n").unwrap();
    let at = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("unshare");
    command
        .args(["-m", "bash", "-euo", "pipefail", "-c", BY_MOUNT_8])
        .env("WEIR", env!("CARGO_BIN_EXE_weir"));
    let output = command.env("SOURCE", cluster.dir()).env("AT", at.path()).output().unwrap();
    let printed = common::text(&output.stdout);
    assert!(output.status.success(), "{printed}\n{}", common::text(&output.stderr));
    let of_fstab = format!("fuse.weir {}", cluster.dir().display());
    let shown: Vec<_> = printed.lines().collect();
    let expected = [
        of_fstab.as_str(),
        "nodev noexec nosuid ro",
        "seen",
        "strictatime",
        "seen",
        "nodev nodiratime nosuid nosymfollow sync",
        "is not the directory of a cluster",
    ];
    assert_eq!(shown, expected);
}

/// A program that renames or makes entries as it reads them comes to an end, and names that exist all the
/// while are in the listing.
#[test]
fn a_directory_that_changes_as_it_is_read_has_an_end() {
    if !can_mount() {
        return;
    }
    const FILES: usize = 700; // several requests of the kernel, each with several pages of the leader
    let cluster = Cluster::start(1);
    let change: [fn(&Path); 3] = [
        |path| fs::rename(path, path.with_extension(format!("{}x", extension(path)))).unwrap(),
        |path| {
            let moved = path.with_file_name("beside");
            fs::rename(path, &moved).unwrap();
            fs::rename(&moved, path).unwrap();
        },
        |path| drop(fs::File::create(path.with_extension(format!("{}x", extension(path)))).unwrap()),
    ];
    for (n, change) in change.into_iter().enumerate() {
        let dir = cluster.mount().join(format!("d{n}"));
        fs::create_dir(&dir).unwrap();
        (0..FILES).for_each(|i| drop(fs::File::create(dir.join(format!("f{i:04}"))).unwrap()));
        let mut seen = 0;
        for entry in fs::read_dir(&dir).unwrap() {
            change(&entry.unwrap().path());
            seen += 1;
            assert!(seen <= FILES, "change {n}: more entries than there were");
        }
        assert_eq!(seen, FILES, "change {n}");
    }

    // From its start again a directory has what was made meanwhile; what takes a name over does not hide it.
    let dir = cluster.mount().join("d0");
    let mut stream = rustix::fs::Dir::read_from(fs::File::open(&dir).unwrap()).unwrap();
    let first = stream.next().unwrap().unwrap();
    fs::File::create(dir.join("new")).unwrap();
    fs::rename(dir.join("new"), dir.join(format!("f{:04}.x", FILES - 1))).unwrap();
    fs::File::create(dir.join("late")).unwrap();
    let names = |stream: &mut rustix::fs::Dir| -> Vec<String> {
        stream.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
    };
    let rest = names(&mut stream);
    assert!(!rest.contains(&"late".to_string()) && rest.contains(&format!("f{:04}.x", FILES - 1)));
    stream.rewind();
    let again = names(&mut stream);
    assert!(again.contains(&"late".to_string()));
    assert_eq!(again.len(), rest.len() + 2, "{first:?} and what came late");
}

fn extension(path: &Path) -> String {
    path.extension().map_or_else(String::new, |e| e.to_string_lossy().into_owned())
}
