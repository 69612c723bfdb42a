//! One of the two file systems: carries operations out and returns each result as text.
use super::{Dice, tree};
use rustix::fs::{
    self, AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom, StatxFlags, Timespec,
    Timestamps, XattrFlags,
};
use rustix::io::Errno;
use rustix::thread::{self, Gid, Uid};
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

const SLOTS: u64 = 5;
const DIRECTORIES: u64 = 3;
const NAMES: u64 = 5;
/// The acting users: the superuser, and two users; the second is of the first one's group, too.
const USERS: [(u32, u32, &[u32]); 3] = [(0, 0, &[]), (1001, 2001, &[]), (1002, 2002, &[2001])];
const ATTRIBUTES: [&str; 5] = ["user.a", "user.b", "trusted.t", "security.s", "user.with.a.long.name"];

/// Access control lists: (tag, permissions, id) as in the attribute. Owner 1, named user 2, group 4, named
/// group 8, mask 16, others 32.
type List = &'static [(u16, u16, u32)];
const LISTS: [List; 6] = [
    &[(1, 6, !0), (4, 4, !0), (32, 4, !0)],
    &[(1, 7, !0), (2, 7, 1002), (4, 5, !0), (16, 7, !0), (32, 0, !0)],
    &[(1, 6, !0), (4, 0, !0), (8, 6, 2001), (16, 6, !0), (32, 0, !0)],
    &[(1, 7, !0), (2, 5, 1001), (2, 0, 1002), (4, 5, !0), (8, 7, 2002), (16, 5, !0), (32, 5, !0)],
    &[(1, 7, !0), (2, 7, 1001), (4, 7, !0), (16, 0, !0), (32, 7, !0)],
    // Out of order: refused.
    &[(4, 7, !0), (1, 7, !0), (32, 7, !0)],
];

const LOCKS: [FlockOperation; 3] = [
    FlockOperation::NonBlockingLockShared,
    FlockOperation::NonBlockingLockExclusive,
    FlockOperation::NonBlockingUnlock,
];

/// A path below the root: sometimes in a directory, sometimes a directory itself.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Top(u64),
    In(u64, u64),
    Directory(u64),
    /// A directory in a directory.
    Deep(u64, u64),
}

#[derive(Clone, Debug)]
pub enum Action {
    Open { slot: u64, at: Place, flags: u32, mode: u32 },
    Nameless { slot: u64, at: Place, flags: u32, mode: u32 },
    Close { slot: u64 },
    Write { slot: u64, offset: u64, len: u64 },
    Append { slot: u64, len: u64 },
    Read { slot: u64, offset: u64, len: u64 },
    SetLen { slot: u64, len: u64 },
    Truncate { at: Place, len: u64 },
    Allocate { slot: u64, mode: u32, offset: u64, len: u64 },
    Copy { from: u64, to: u64, from_at: u64, to_at: u64, len: u64 },
    Holes { slot: u64 },
    Sync { slot: u64 },
    StatSlot { slot: u64 },
    Stat { at: Place },
    List { at: Place },
    MakeDir { at: Place, mode: u32 },
    MakeNode { at: Place, kind: u32, mode: u32 },
    Remove { at: Place, directory: bool },
    Rename { from: Place, to: Place, flags: u32 },
    Link { from: Place, to: Place },
    LinkSlot { slot: u64, to: Place },
    Lock { slot: u64, how: usize },
    Access { at: Place, leave: bool },
    Birth { at: Place },
    Symlink { at: Place, target: &'static str },
    ReadLink { at: Place },
    Mode { at: Place, mode: u32 },
    Owner { at: Place, uid: Option<u32>, gid: Option<u32>, follow: bool },
    Times { at: Place, seconds: i64 },
    SetAttribute { at: Place, name: usize, len: usize, flags: u32 },
    GetAttribute { at: Place, name: usize },
    RemoveAttribute { at: Place, name: usize },
    SetList { at: Place, default: bool, list: usize },
    RemoveList { at: Place, default: bool },
    May { at: Place, what: u32 },
}

#[derive(Clone, Debug)]
pub struct Operation {
    user: usize,
    seed: u64,
    action: Action,
}

fn place(dice: &mut Dice) -> Place {
    let (d, n) = (dice.below(DIRECTORIES), dice.below(NAMES));
    match dice.below(10) {
        0..=2 => Place::Top(n),
        3..=7 => Place::In(d, n),
        8 => Place::Directory(d),
        _ => Place::Deep(d, dice.below(2)),
    }
}

fn mode(dice: &mut Dice) -> u32 {
    dice.pick(&[0o644, 0o600, 0o666, 0o755, 0o777, 0o1777, 0o2775, 0o4755, 0o6755, 0o000, 0o464, 0o2644])
}

impl Operation {
    pub fn random(dice: &mut Dice, seed: u64) -> Operation {
        let user = dice.pick(&[0, 0, 0, 1, 1, 2]);
        Operation { user, seed, action: action(dice) }
    }
}

fn action(dice: &mut Dice) -> Action {
    let slot = dice.below(SLOTS);
    let offset = match dice.below(4) {
        0 => 0,
        1 => dice.below(5000),
        2 => dice.below(100_000),
        _ => dice.below(3_000_000),
    };
    let len = dice.pick(&[0, 1, 17, 4096, 4097, 30_000, 65_536, 200_000]);
    match dice.below(72) {
        0..=9 => {
            let access = dice.pick(&[OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR, OFlags::RDWR]);
            let more = dice.pick(&[
                OFlags::empty(),
                OFlags::CREATE,
                OFlags::CREATE,
                OFlags::CREATE | OFlags::EXCL,
                OFlags::CREATE | OFlags::TRUNC,
                OFlags::APPEND | OFlags::CREATE,
                OFlags::TRUNC,
                OFlags::NOFOLLOW,
                OFlags::DIRECTORY,
            ]);
            Action::Open { slot, at: place(dice), flags: (access | more).bits(), mode: mode(dice) }
        }
        10 => Action::Close { slot },
        11..=15 => Action::Write { slot, offset, len },
        16..=17 => Action::Append { slot, len },
        18..=21 => Action::Read { slot, offset, len },
        22 => Action::SetLen { slot, len: offset },
        23 => Action::Truncate { at: place(dice), len: offset },
        24..=26 => {
            let mode = dice.pick(&[
                FallocateFlags::empty(),
                FallocateFlags::KEEP_SIZE,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                FallocateFlags::ZERO_RANGE,
                FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                FallocateFlags::PUNCH_HOLE,
            ]);
            Action::Allocate { slot, mode: mode.bits(), offset, len }
        }
        27 => Action::Copy {
            from: slot,
            to: dice.below(SLOTS),
            from_at: offset,
            to_at: dice.below(50_000),
            len,
        },
        28 => Action::Holes { slot },
        29 => Action::Sync { slot },
        30 => Action::StatSlot { slot },
        31..=33 => Action::Stat { at: place(dice) },
        34 => Action::List { at: place(dice) },
        35..=37 => Action::MakeDir { at: place(dice), mode: mode(dice) },
        38 => Action::MakeNode {
            at: place(dice),
            kind: dice.pick(&[libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFREG]),
            mode: mode(dice),
        },
        39..=42 => Action::Remove { at: place(dice), directory: dice.below(3) == 0 },
        43..=46 => {
            let flags = dice.pick(&[0, 0, 0, 1, 2]); // replace, keep, exchange
            Action::Rename { from: place(dice), to: place(dice), flags }
        }
        47..=48 => Action::Link { from: place(dice), to: place(dice) },
        49 => Action::Symlink {
            at: place(dice),
            target: dice.pick(&["n0", "d0/n1", "../n2", "d1", "nowhere", "n3/x"]),
        },
        50 => Action::ReadLink { at: place(dice) },
        51..=52 => Action::Mode { at: place(dice), mode: mode(dice) },
        53 => Action::Owner {
            at: place(dice),
            uid: dice.pick(&[None, Some(0), Some(1001), Some(1002)]),
            gid: dice.pick(&[None, Some(0), Some(2001), Some(2002)]),
            follow: dice.below(2) == 0,
        },
        54 => Action::Times { at: place(dice), seconds: dice.below(2_000_000_000) as i64 - 5_000_000 },
        55..=56 => Action::SetAttribute {
            at: place(dice),
            name: dice.below(ATTRIBUTES.len() as u64) as usize,
            len: dice.pick(&[0, 1, 30, 2000]),
            flags: dice.pick(&[0, 0, 1, 2]),
        },
        57 => Action::GetAttribute { at: place(dice), name: dice.below(ATTRIBUTES.len() as u64) as usize },
        58 => Action::RemoveAttribute { at: place(dice), name: dice.below(ATTRIBUTES.len() as u64) as usize },
        59..=61 => Action::SetList {
            at: place(dice),
            default: dice.below(2) == 0,
            list: dice.below(LISTS.len() as u64) as usize,
        },
        62 => Action::RemoveList { at: place(dice), default: dice.below(2) == 0 },
        64..=65 => {
            let flags = dice.pick(&[
                OFlags::RDWR,
                OFlags::RDWR,
                OFlags::WRONLY,
                OFlags::RDWR | OFlags::EXCL,
                OFlags::RDONLY,
            ]);
            Action::Nameless {
                slot,
                at: place(dice),
                flags: (flags | OFlags::TMPFILE).bits(),
                mode: mode(dice),
            }
        }
        66..=67 => Action::LinkSlot { slot, to: place(dice) },
        68..=69 => Action::Lock { slot, how: dice.below(LOCKS.len() as u64) as usize },
        70 => Action::Access { at: place(dice), leave: dice.below(3) == 0 },
        71 => Action::Birth { at: place(dice) },
        _ => Action::May { at: place(dice), what: dice.below(8) as u32 },
    }
}

pub struct Side {
    root: PathBuf,
    slots: Vec<Option<OwnedFd>>,
}

impl Side {
    pub fn new(root: &Path) -> Side {
        std::fs::create_dir(root).unwrap();
        fs::chmod(root, Mode::from_raw_mode(0o777)).unwrap();
        Side { root: root.to_path_buf(), slots: (0..SLOTS).map(|_| None).collect() }
    }

    /// The tree as it is left.
    pub fn finish(mut self) -> Vec<String> {
        self.slots.clear();
        tree::describe(&self.root)
    }

    fn path(&self, at: Place) -> PathBuf {
        match at {
            Place::Top(n) => self.root.join(format!("n{n}")),
            Place::In(d, n) => self.root.join(format!("d{d}/n{n}")),
            Place::Directory(d) => self.root.join(format!("d{d}")),
            Place::Deep(d, e) => self.root.join(format!("d{d}/d{e}")),
        }
    }

    pub fn apply(&mut self, operation: &Operation) -> String {
        let (uid, gid, groups) = USERS[operation.user];
        become_user(uid, gid, groups);
        let done = self.act(operation);
        become_user(0, 0, &[]);
        done.unwrap_or_else(|e| format!("{e:?}"))
    }

    fn act(&mut self, operation: &Operation) -> Result<String, Errno> {
        let done = |()| "done".to_string();
        let seed = operation.seed;
        match operation.action.clone() {
            Action::Open { slot, at, flags, mode } => {
                self.close(slot);
                // A pipe would wait for its other end.
                let flags = OFlags::from_bits_retain(flags) | OFlags::NONBLOCK;
                let fd = fs::open(self.path(at), flags, Mode::from_raw_mode(mode))?;
                self.slots[slot as usize] = Some(fd);
                Ok("open".into())
            }
            Action::Nameless { slot, at, flags, mode } => {
                self.close(slot);
                let flags = OFlags::from_bits_retain(flags);
                let fd = fs::open(self.path(at), flags, Mode::from_raw_mode(mode))?;
                self.slots[slot as usize] = Some(fd);
                Ok("open".into())
            }
            Action::Close { slot } => Ok(format!("{}", self.close(slot))),
            Action::Write { slot, offset, len } => {
                rustix::io::pwrite(self.slot(slot)?, &super::common::pattern(seed, len as usize), offset)
                    .map(bytes_shown)
            }
            Action::Append { slot, len } => {
                let fd = self.slot(slot)?;
                fs::seek(fd, SeekFrom::End(0))?;
                rustix::io::write(fd, &super::common::pattern(seed, len as usize)).map(bytes_shown)
            }
            Action::Read { slot, offset, len } => {
                let mut bytes = vec![0; len as usize];
                let n = rustix::io::pread(self.slot(slot)?, &mut bytes[..], offset)?;
                Ok(format!("{n} bytes {:x}", tree::fnv(&bytes[..n])))
            }
            Action::SetLen { slot, len } => fs::ftruncate(self.slot(slot)?, len).map(done),
            Action::Truncate { at, len } => {
                // By path, as truncate(2) does.
                let path = self.path(at);
                let fd = fs::open(&path, OFlags::PATH, Mode::empty())?;
                match fs::FileType::from_raw_mode(fs::fstat(&fd)?.st_mode) {
                    fs::FileType::RegularFile | fs::FileType::Directory => truncate(&path, len).map(done),
                    _ => Ok("left out".into()),
                }
            }
            Action::Allocate { slot, mode, offset, len } => {
                allocate(self.slot(slot)?, FallocateFlags::from_bits_retain(mode), offset, len).map(done)
            }
            Action::Copy { from, to, mut from_at, mut to_at, len } => {
                let (from, to) = (self.slot(from)?, self.slot(to)?);
                fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), len as usize)
                    .map(bytes_shown)
            }
            Action::Holes { slot } => holes(self.slot(slot)?),
            Action::Sync { slot } => fs::fsync(self.slot(slot)?).map(done),
            Action::StatSlot { slot } => fs::fstat(self.slot(slot)?).map(|s| show(&s)),
            Action::Stat { at } => fs::lstat(self.path(at)).map(|s| show(&s)),
            Action::List { at } => {
                let fd = fs::open(self.path(at), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
                let mut names = Vec::new();
                for entry in fs::Dir::new(fd)? {
                    let entry = entry?;
                    names.push(format!("{:?} {:?}", entry.file_name(), entry.file_type()));
                }
                names.sort();
                Ok(names.join(", "))
            }
            Action::MakeDir { at, mode } => fs::mkdir(self.path(at), Mode::from_raw_mode(mode)).map(done),
            Action::MakeNode { at, kind, mode } => {
                let kind = fs::FileType::from_raw_mode(kind);
                fs::mknodat(fs::CWD, self.path(at), kind, Mode::from_raw_mode(mode), 0).map(done)
            }
            Action::Remove { at, directory: false } => fs::unlink(self.path(at)).map(done),
            Action::Remove { at, directory: true } => fs::rmdir(self.path(at)).map(done),
            Action::Rename { from, to, flags } => {
                let flags = RenameFlags::from_bits_retain(flags);
                fs::renameat_with(fs::CWD, self.path(from), fs::CWD, self.path(to), flags).map(done)
            }
            Action::Link { from, to } => fs::link(self.path(from), self.path(to)).map(done),
            Action::LinkSlot { slot, to } => {
                let of_process = format!("/proc/self/fd/{}", self.slot(slot)?.as_raw_fd());
                fs::linkat(fs::CWD, of_process, fs::CWD, self.path(to), AtFlags::SYMLINK_FOLLOW).map(done)
            }
            Action::Lock { slot, how } => fs::flock(self.slot(slot)?, LOCKS[how]).map(done),
            Action::Access { at, leave } => {
                let old = Timespec { tv_sec: 1_000_000_000, tv_nsec: 7 };
                let times = Timestamps { last_access: old, last_modification: old };
                let noatime = if leave { OFlags::NOATIME } else { OFlags::empty() };
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | noatime;
                if fs::FileType::from_raw_mode(fs::lstat(self.path(at))?.st_mode) != fs::FileType::RegularFile
                {
                    return Ok("left out".into());
                }
                fs::utimensat(fs::CWD, self.path(at), &times, AtFlags::SYMLINK_NOFOLLOW)?;
                let fd = fs::open(self.path(at), flags, Mode::empty())?;
                let n = rustix::io::pread(&fd, &mut [0; 10], 0)?;
                if n == 0 {
                    return Ok("empty".into());
                }
                Ok(format!("{n} bytes, {}", fs::fstat(&fd)?.st_atime == old.tv_sec))
            }
            Action::Birth { at } => {
                let status = fs::statx(fs::CWD, self.path(at), AtFlags::SYMLINK_NOFOLLOW, StatxFlags::ALL)?;
                let asked = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
                let shown_mask = StatxFlags::from_bits_retain(status.stx_mask) & asked;
                Ok(format!("{shown_mask:?} {}", status.stx_btime.tv_sec > 1_000_000_000))
            }
            Action::Symlink { at, target } => fs::symlink(target, self.path(at)).map(done),
            Action::ReadLink { at } => {
                fs::readlink(self.path(at), Vec::new()).map(|t: CString| format!("{t:?}"))
            }
            Action::Mode { at, mode } => fs::chmod(self.path(at), Mode::from_raw_mode(mode)).map(done),
            // A user's change to what it is reaches a mount as the loss of set-uid at a write does.
            Action::Owner { uid: None, gid: None, .. } if operation.user != 0 => Ok("left out".into()),
            Action::Owner { at, uid, gid, follow } => {
                let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
                fs::chownat(fs::CWD, self.path(at), uid.map(Uid::from_raw), gid.map(Gid::from_raw), flags)
                    .map(done)
            }
            Action::Times { at, seconds } => {
                let time =
                    Timespec { tv_sec: seconds, tv_nsec: (seconds.unsigned_abs() % 1_000_000_000) as _ };
                let times = Timestamps { last_access: time, last_modification: time };
                fs::utimensat(fs::CWD, self.path(at), &times, AtFlags::SYMLINK_NOFOLLOW)?;
                let stat = fs::lstat(self.path(at))?;
                Ok(format!(
                    "{} {} {} {}",
                    stat.st_atime, stat.st_atime_nsec, stat.st_mtime, stat.st_mtime_nsec
                ))
            }
            Action::SetAttribute { at, name, len, flags } => {
                let value = super::common::pattern(seed, len);
                fs::lsetxattr(self.path(at), ATTRIBUTES[name], &value, XattrFlags::from_bits_retain(flags))
                    .map(done)
            }
            Action::GetAttribute { at, name } => {
                let mut value = vec![0; 65536];
                let n = fs::lgetxattr(self.path(at), ATTRIBUTES[name], &mut value[..])?;
                Ok(format!("{n} bytes {:x}", tree::fnv(&value[..n])))
            }
            Action::RemoveAttribute { at, name } => {
                fs::lremovexattr(self.path(at), ATTRIBUTES[name]).map(done)
            }
            Action::SetList { at, default, list } => {
                let mut value = 2u32.to_le_bytes().to_vec();
                for (tag, perm, id) in LISTS[list] {
                    value.extend(tag.to_le_bytes());
                    value.extend(perm.to_le_bytes());
                    value.extend(id.to_le_bytes());
                }
                fs::setxattr(self.path(at), list_name(default), &value, XattrFlags::empty()).map(done)
            }
            Action::RemoveList { at, default } => {
                fs::removexattr(self.path(at), list_name(default)).map(done)
            }
            Action::May { at, what } => {
                let what = fs::Access::from_bits_retain(what);
                fs::accessat(fs::CWD, self.path(at), what, AtFlags::EACCESS).map(done)
            }
        }
    }

    /// The kernel reports a last close after `close` has returned: a lock ends before.
    fn close(&mut self, slot: u64) -> bool {
        let Some(fd) = self.slots[slot as usize].take() else { return false };
        fs::flock(&fd, FlockOperation::Unlock).unwrap();
        true
    }

    fn slot(&self, slot: u64) -> Result<&OwnedFd, Errno> {
        self.slots[slot as usize].as_ref().ok_or(Errno::BADF)
    }
}

fn list_name(default: bool) -> &'static str {
    if default { "system.posix_acl_default" } else { "system.posix_acl_access" }
}

fn bytes_shown(n: usize) -> String {
    format!("{n} bytes")
}

fn truncate(path: &Path, len: u64) -> Result<(), Errno> {
    let fd = fs::open(path, OFlags::WRONLY, Mode::empty())?;
    fs::ftruncate(fd, len)
}

fn show(stat: &fs::Stat) -> String {
    let is_dir = fs::FileType::from_raw_mode(stat.st_mode) == fs::FileType::Directory;
    let size = if is_dir { 0 } else { stat.st_size };
    format!(
        "mode {:o} links {} owner {}:{} size {size}",
        stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid
    )
}

/// Holes and data may lie elsewhere; but data ends with the file, and what is called a hole is zeros.
fn holes(fd: &OwnedFd) -> Result<String, Errno> {
    let stat = fs::fstat(fd)?;
    if fs::FileType::from_raw_mode(stat.st_mode) != fs::FileType::RegularFile {
        return Ok("left out".into());
    }
    let size = stat.st_size as u64;
    let mut at = 0;
    while at < size {
        let data = match fs::seek(fd, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => size,
            Err(e) => return Err(e),
        };
        let mut bytes = vec![0; (data - at) as usize];
        match rustix::io::pread(fd, &mut bytes[..], at) {
            Ok(n) if bytes[..n].iter().any(|b| *b != 0) => {
                return Ok(format!("bytes in the hole {at}..{data}"));
            }
            Ok(_) | Err(Errno::BADF) => {}
            Err(e) => return Err(e),
        }
        if data >= size {
            break;
        }
        at = fs::seek(fd, SeekFrom::Hole(data))?;
        if at <= data || at > size {
            return Ok(format!("data {data}..{at} of {size} bytes"));
        }
    }
    Ok(format!("{size} bytes"))
}

/// This thread acts as another user; the saved user stays the superuser.
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) {
    let root = Uid::from_raw(0);
    thread::set_thread_res_uid(root, root, root).unwrap();
    let groups: Vec<Gid> = groups.iter().map(|g| Gid::from_raw(*g)).collect();
    thread::set_thread_groups(&groups).unwrap();
    let gid = Gid::from_raw(gid);
    thread::set_thread_res_gid(gid, gid, Gid::from_raw(0)).unwrap();
    thread::set_thread_res_uid(Uid::from_raw(uid), Uid::from_raw(uid), root).unwrap();
}

/// As programs do that want the effect: where space cannot be reserved they write zeros, or set the size. A
/// hole that is punched past the end does nothing but take privileges away.
fn allocate(file: &OwnedFd, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Errno> {
    let done = fs::fallocate(file, mode, offset, len);
    if done != Err(Errno::OPNOTSUPP) || mode == FallocateFlags::PUNCH_HOLE {
        return done;
    }
    let size = fs::fstat(file)?.st_size as u64;
    if !mode.contains(FallocateFlags::KEEP_SIZE) && offset + len > size {
        fs::ftruncate(file, offset + len)?;
    }
    let from = if mode.contains(FallocateFlags::ZERO_RANGE) { offset } else { offset.max(size) };
    fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, len)
}
