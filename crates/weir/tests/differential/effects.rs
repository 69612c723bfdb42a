//! Claim: attributes that change beside what was asked for (set-user-ID goes with a write, a mode follows an
//! access control list, a directory's times follow its names …) show at once, on the mount that made the
//! change, also while the file is open there, and on another mount.
//!
//! A kernel keeps each attribute by itself, so each is asked for alone: then an old one is seen.
use super::common::{Cluster, can_mount};
use super::side::become_user;
use rustix::fs::{
    self, AtFlags, CWD, FallocateFlags as Space, Mode, OFlags, RenameFlags, StatxFlags, Timespec, Timestamps,
    XattrFlags,
};
use rustix::io::Errno;
use rustix::thread::{Gid, Uid};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// The superuser, the file's owner, a member of its group, and a user who has nothing to do with it.
const ROOT: User = (0, 0, &[]);
const OWNER: User = (1001, 2001, &[]);
const MEMBER: User = (1002, 2002, &[2001]);
const STRANGER: User = (1003, 2003, &[]);
type User = (u32, u32, &'static [u32]);

/// The inodes of a scene whose attributes are compared.
const NAMES: [&str; 7] = [".", "f", "g", "alias", "d", "d/inner", "e"];

/// Files that a change left open, to be asked as well.
type Open = Result<Vec<OwnedFd>, Errno>;

struct Change {
    what: &'static str,
    user: User,
    /// The mode of file `f`, and its group.
    mode: u32,
    gid: u32,
    make: fn(&Path) -> Open,
}

const fn change(what: &'static str, user: User, mode: u32, make: fn(&Path) -> Open) -> Change {
    Change { what, user, mode, gid: 2001, make }
}

fn open(dir: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    fs::open(dir.join("f"), flags, Mode::empty())
}
fn allocate(dir: &Path, how: Space, offset: u64, len: u64) -> Open {
    let file = open(dir, OFlags::WRONLY)?;
    fs::fallocate(&file, how, offset, len)?;
    Ok(vec![file])
}
fn mode(dir: &Path, name: &str, mode: u32) -> Open {
    fs::chmod(dir.join(name), Mode::from_raw_mode(mode)).map(|()| Vec::new())
}
fn owner(dir: &Path, name: &str, uid: Option<u32>, gid: Option<u32>) -> Open {
    let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
    fs::chownat(CWD, dir.join(name), uid, gid, AtFlags::empty()).map(|()| Vec::new())
}
fn times(dir: &Path, seconds: i64, nanos: i64) -> Open {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos as _ };
    let times = Timestamps { last_access: time, last_modification: time };
    fs::utimensat(CWD, dir.join("f"), &times, AtFlags::empty()).map(|()| Vec::new())
}
fn rename(dir: &Path, from: &str, to: &str, flags: RenameFlags) -> Open {
    fs::renameat_with(CWD, dir.join(from), CWD, dir.join(to), flags).map(|()| Vec::new())
}
/// A list with these permissions of owner, group, mask and others, and of user 1003.
fn list(dir: &Path, name: &str, kind: &str, permissions: [u16; 4]) -> Open {
    let [owner, group, mask, others] = permissions;
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in
        [(1u16, owner, !0u32), (2, 7, 1003), (4, group, !0), (16, mask, !0), (32, others, !0)]
    {
        value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    fs::setxattr(dir.join(name), kind, &value, XattrFlags::empty()).map(|()| Vec::new())
}
const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

fn write(dir: &Path) -> Open {
    let file = open(dir, OFlags::WRONLY)?;
    rustix::io::pwrite(&file, b"changed", 100)?;
    Ok(vec![file])
}
fn write_to_the_end(dir: &Path) -> Open {
    let file = open(dir, OFlags::WRONLY | OFlags::APPEND)?;
    rustix::io::write(&file, &[7; 9000])?;
    Ok(vec![file])
}
fn truncating(dir: &Path) -> Open {
    Ok(vec![open(dir, OFlags::WRONLY | OFlags::TRUNC)?])
}
fn truncate(dir: &Path) -> Open {
    let file = open(dir, OFlags::WRONLY)?;
    fs::ftruncate(&file, 5)?;
    Ok(vec![file])
}
fn copy(dir: &Path) -> Open {
    let (from, to) = (fs::open(dir.join("g"), OFlags::RDONLY, Mode::empty())?, open(dir, OFlags::WRONLY)?);
    fs::copy_file_range(&from, Some(&mut 0), &to, Some(&mut 5), 3)?;
    Ok(vec![to])
}
fn write_and_close(dir: &Path) -> Open {
    write(dir).map(|_| Vec::new())
}

const CHANGES: &[Change] = &[
    // ---- data
    change("the owner writes", OWNER, 0o6777, write),
    change("the owner writes, no group execution", OWNER, 0o6767, write),
    change("a stranger writes", STRANGER, 0o6777, write),
    change("a stranger writes, no group execution", STRANGER, 0o6767, write),
    change("a member writes, no group execution", MEMBER, 0o6767, write),
    change("a stranger writes and closes", STRANGER, 0o6777, write_and_close),
    change("a stranger writes, nothing to clear", STRANGER, 0o1666, write),
    change("the superuser writes", ROOT, 0o6777, write),
    change("a stranger appends", STRANGER, 0o6777, write_to_the_end),
    change("a stranger opens with O_TRUNC", STRANGER, 0o6777, truncating),
    change("the superuser opens with O_TRUNC", ROOT, 0o6777, truncating),
    change("a stranger opens with O_TRUNC twice", STRANGER, 0o6777, |dir| {
        truncating(dir)?;
        truncating(dir)
    }),
    change("a stranger truncates an open file", STRANGER, 0o6777, truncate),
    change("a member truncates, no group execution", MEMBER, 0o6767, truncate),
    change("a stranger extends by truncate", STRANGER, 0o6777, |dir| {
        let file = open(dir, OFlags::RDWR)?;
        fs::ftruncate(&file, 50_000)?;
        Ok(vec![file])
    }),
    change("a stranger allocates", STRANGER, 0o6777, |dir| allocate(dir, Space::empty(), 0, 50_000)),
    change("a stranger allocates what is there", STRANGER, 0o6777, |dir| {
        allocate(dir, Space::empty(), 0, 50)
    }),
    change("a stranger allocates past the end", STRANGER, 0o6777, |dir| {
        allocate(dir, Space::KEEP_SIZE, 0, 50_000)
    }),
    change("a stranger punches", STRANGER, 0o6777, |dir| {
        allocate(dir, Space::PUNCH_HOLE | Space::KEEP_SIZE, 0, 5000)
    }),
    change("a stranger zeroes", STRANGER, 0o6777, |dir| allocate(dir, Space::ZERO_RANGE, 5000, 50_000)),
    change("a stranger copies into it", STRANGER, 0o6777, copy),
    // ---- modes and owners
    change("the owner sets a mode", OWNER, 0o644, |dir| mode(dir, "f", 0o6755)),
    Change {
        gid: 2002,
        ..change("an owner outside of the group sets a mode", OWNER, 0o644, |dir| mode(dir, "f", 0o6755))
    },
    change("the superuser sets a mode", ROOT, 0o644, |dir| mode(dir, "f", 0o6755)),
    change("the owner sets a directory's mode", OWNER, 0o644, |dir| mode(dir, "d", 0o2770)),
    change("the superuser gives it away", ROOT, 0o6777, |dir| owner(dir, "f", Some(1002), None)),
    change("the superuser gives it to another group", ROOT, 0o6767, |dir| owner(dir, "f", None, Some(7))),
    change("the superuser gives it to its owner", ROOT, 0o6777, |dir| {
        owner(dir, "f", Some(1001), Some(2001))
    }),
    change("the owner gives it to its group", OWNER, 0o6777, |dir| owner(dir, "f", None, Some(2001))),
    change("the superuser gives a directory away", ROOT, 0o644, |dir| owner(dir, "d", Some(7), Some(7))),
    change("the owner sets times", OWNER, 0o6777, |dir| times(dir, 1_000_000_000, 5)),
    change("the owner sets the present time", OWNER, 0o6777, |dir| times(dir, 0, libc::UTIME_NOW)),
    // ---- lists and attributes
    change("a list", OWNER, 0o640, |dir| list(dir, "f", ACCESS, [7, 4, 6, 1])),
    Change {
        gid: 2002,
        ..change("a list by an owner outside of the group", OWNER, 0o2640, |dir| {
            list(dir, "f", ACCESS, [7, 4, 6, 1])
        })
    },
    change("a mode after a list", OWNER, 0o640, |dir| {
        list(dir, "f", ACCESS, [7, 4, 6, 1])?;
        mode(dir, "f", 0o604)
    }),
    change("a list that goes", OWNER, 0o640, |dir| {
        list(dir, "f", ACCESS, [7, 4, 6, 1])?;
        fs::removexattr(dir.join("f"), ACCESS).map(|()| Vec::new())
    }),
    change("a default list", OWNER, 0o640, |dir| list(dir, "d", DEFAULT, [7, 5, 5, 0])),
    change("a file under a default list", OWNER, 0o640, |dir| {
        list(dir, "d", DEFAULT, [7, 5, 6, 0])?;
        let flags = OFlags::WRONLY | OFlags::CREATE;
        fs::open(dir.join("d/inner2"), flags, Mode::from_raw_mode(0o666)).map(|file| vec![file])
    }),
    change("an attribute", OWNER, 0o6777, |dir| {
        fs::setxattr(dir.join("f"), "user.a", b"value", XattrFlags::empty()).map(|()| Vec::new())
    }),
    change("an attribute that goes", OWNER, 0o6777, |dir| {
        fs::setxattr(dir.join("d"), "user.a", b"value", XattrFlags::empty())?;
        fs::removexattr(dir.join("d"), "user.a").map(|()| Vec::new())
    }),
    // ---- names
    change("a link", OWNER, 0o6777, |dir| fs::link(dir.join("f"), dir.join("d/link")).map(|()| Vec::new())),
    change("a link and its removal", OWNER, 0o6777, |dir| {
        fs::link(dir.join("f"), dir.join("d/link"))?;
        fs::unlink(dir.join("d/link")).map(|()| Vec::new())
    }),
    change("one of two names goes", OWNER, 0o6777, |dir| fs::unlink(dir.join("alias")).map(|()| Vec::new())),
    change("an open file's name goes", OWNER, 0o6777, |dir| {
        let file = open(dir, OFlags::RDONLY)?;
        fs::unlink(dir.join("f"))?;
        Ok(vec![file])
    }),
    change("another name", OWNER, 0o6777, |dir| {
        let file = open(dir, OFlags::RDONLY)?;
        rename(dir, "f", "d/moved", RenameFlags::empty())?;
        Ok(vec![file])
    }),
    change("a name over one of two", OWNER, 0o6777, |dir| rename(dir, "f", "alias", RenameFlags::empty())),
    change("a name over an open file", OWNER, 0o6777, |dir| {
        let file = open(dir, OFlags::RDONLY)?;
        rename(dir, "d/inner", "f", RenameFlags::empty())?;
        Ok(vec![file])
    }),
    change("two names exchanged", OWNER, 0o6777, |dir| rename(dir, "f", "d/inner", RenameFlags::EXCHANGE)),
    change("a directory moves", OWNER, 0o6777, |dir| rename(dir, "d", "e/d", RenameFlags::empty())),
    change("a directory is made", OWNER, 0o6777, |dir| {
        fs::mkdir(dir.join("d/new"), Mode::from_raw_mode(0o755)).map(|()| Vec::new())
    }),
    change("a directory goes", OWNER, 0o6777, |dir| fs::rmdir(dir.join("e")).map(|()| Vec::new())),
    change("a file is made", OWNER, 0o6777, |dir| {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        fs::open(dir.join("d/new"), flags, Mode::from_raw_mode(0o6755)).map(|file| vec![file])
    }),
    change("a symbolic link is made", OWNER, 0o6777, |dir| {
        fs::symlink("f", dir.join("d/new")).map(|()| Vec::new())
    }),
    change("a file without a name gets one", OWNER, 0o6777, |dir| {
        let file = fs::open(dir.join("d"), OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o600))?;
        let of_process = format!("/proc/self/fd/{}", file.as_raw_fd());
        fs::linkat(CWD, of_process, CWD, dir.join("d/named"), AtFlags::SYMLINK_FOLLOW)?;
        Ok(vec![file])
    }),
];

/// Each attribute, asked for alone. Times are compared with those before the change.
fn attributes(of: &OwnedFd, before: Option<&fs::Statx>) -> String {
    let ask = |mask| fs::statx(of, "", AtFlags::EMPTY_PATH, mask).unwrap();
    let time = |t: fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
    let compared = |t, was: Option<fs::StatxTimestamp>| match was.map(time) {
        _ if time(t) == (1_000_000_000, 5) => "as set",
        Some(was) if was == time(t) => "same",
        Some(was) if was < time(t) => "later",
        Some(_) => "earlier",
        None => "new",
    };
    let mode = ask(StatxFlags::MODE).stx_mode;
    let is_directory = u32::from(mode) & libc::S_IFMT == libc::S_IFDIR;
    let size = if is_directory { 0 } else { ask(StatxFlags::SIZE).stx_size };
    format!(
        "mode {mode:o} links {} owner {}:{} size {size} mtime {} ctime {}",
        ask(StatxFlags::NLINK).stx_nlink,
        ask(StatxFlags::UID).stx_uid,
        ask(StatxFlags::GID).stx_gid,
        compared(ask(StatxFlags::MTIME).stx_mtime, before.map(|b| b.stx_mtime)),
        compared(ask(StatxFlags::CTIME).stx_ctime, before.map(|b| b.stx_ctime)),
    )
}

/// The inodes of a scene as one mount knows them, with their attributes before the change.
struct View(Vec<(String, OwnedFd, fs::Statx)>);

impl View {
    fn of(dir: &Path) -> View {
        let known = NAMES.iter().map(|name| {
            let inode = fs::open(dir.join(name), OFlags::PATH, Mode::empty()).unwrap();
            let before = fs::statx(&inode, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).unwrap();
            (name.to_string(), inode, before)
        });
        View(known.collect())
    }
    fn shown(&self) -> Vec<String> {
        self.0.iter().map(|(name, of, before)| format!("{name}: {}", attributes(of, Some(before)))).collect()
    }
    fn newest(&self) -> (i64, u32) {
        self.0.iter().map(|(_, _, b)| (b.stx_ctime.tv_sec, b.stx_ctime.tv_nsec)).max().unwrap()
    }
}

fn make_scene(dir: &Path, change: &Change) {
    std::fs::create_dir(dir).unwrap();
    for name in ["d", "e"] {
        std::fs::create_dir(dir.join(name)).unwrap();
    }
    for name in ["f", "g", "d/inner"] {
        std::fs::write(dir.join(name), vec![3; 10_000]).unwrap();
    }
    fs::link(dir.join("f"), dir.join("alias")).unwrap();
    for name in NAMES {
        let gid = if name == "f" { change.gid } else { 2001 };
        std::os::unix::fs::chown(dir.join(name), Some(1001), Some(gid)).unwrap();
        let bits = if name == "f" || name == "alias" { change.mode } else { 0o777 };
        fs::chmod(dir.join(name), Mode::from_raw_mode(bits)).unwrap();
    }
    std::os::unix::fs::chown(dir.join("f"), Some(1001), Some(change.gid)).unwrap();
    fs::chmod(dir.join("f"), Mode::from_raw_mode(change.mode)).unwrap();
}

/// Until times of changes differ from those of the scene: a local file system's clock is coarse.
fn pass_time(dir: &Path, newest: (i64, u32)) {
    let probe = dir.with_extension("probe");
    loop {
        std::fs::write(&probe, "x").unwrap();
        let at = fs::statx(CWD, &probe, AtFlags::empty(), StatxFlags::CTIME).unwrap().stx_ctime;
        if (at.tv_sec, at.tv_nsec) > newest {
            return std::fs::remove_file(probe).unwrap();
        }
    }
}

/// The answer, and the attributes in each of the places where the scene is seen.
fn apply(change: &Change, dirs: &[&Path]) -> (String, Vec<Vec<String>>) {
    make_scene(dirs[0], change);
    let views: Vec<View> = dirs.iter().map(|dir| View::of(dir)).collect();
    pass_time(dirs[0], views[0].newest());
    let (uid, gid, groups) = change.user;
    become_user(uid, gid, groups);
    let made = (change.make)(dirs[0]);
    become_user(0, 0, &[]);
    let mut shown: Vec<Vec<String>> = views.iter().map(View::shown).collect();
    let answer = match &made {
        Ok(open) => {
            let all = open.iter().map(|file| format!("open: {}", attributes(file, None)));
            shown[0].extend(all);
            "done".to_owned()
        }
        Err(e) => format!("{e:?}"),
    };
    (answer, shown)
}

/// A directory that is gone is shown in its last state, without links.
fn differ(shown: &str, expected: &str) -> bool {
    let is_gone = expected.contains("mode 4") && expected.contains("links 0");
    let compared =
        |of: &str| of.rsplit_once(" ctime").filter(|_| is_gone).map_or(of, |(of, _)| of).to_owned();
    compared(shown) != compared(expected)
}

#[test]
fn a_change_shows_at_once_on_both_mounts() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let local = tempfile::tempdir().unwrap();
    fs::chmod(local.path(), Mode::from_raw_mode(0o777)).unwrap();
    let mut differing = Vec::new();
    for (n, change) in CHANGES.iter().enumerate() {
        let name = format!("c{n}");
        let [here, there] = [&cluster.mounts[0], &cluster.mounts[1]].map(|mount| mount.join(&name));
        let (answer, expected) = apply(change, &[&local.path().join(&name)]);
        let (got, shown) = apply(change, &[&here, &there]);
        if got != answer {
            differing.push(format!("{}: {got}, and {answer} on a local file system", change.what));
        }
        for (place, shown) in ["here", "there"].iter().zip(&shown) {
            for (shown, expected) in
                shown.iter().zip(&expected[0]).filter(|(shown, local)| differ(shown, local))
            {
                differing.push(format!("{}, {place}\n  mount {shown}\n  local {expected}", change.what));
            }
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}
