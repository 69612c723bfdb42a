//! One entry within its directory: its kind, its attributes, setting them.
//!
//! Invariant: neither the last name nor a name above it (`root.rs`) is followed if it is a symbolic link.
use crate::{Attrs, Fingerprint, Found, HomePath, Outcome, Xattr, file::fault};
use bytes::Bytes;
use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps, Uid,
        XattrFlags,
    },
    io::Errno,
};
use weir_proto::meta::{FileKind, SYMLINK_MAX, Time, XATTR_VALUE_MAX};

/// Names of all extended attributes of one thing, in bytes (the kernel's XATTR_LIST_MAX).
const XATTR_NAMES_BYTES_MAX: usize = 65536;

/// Attributes that this file system keeps for this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keeps {
    pub(super) owners: bool,
    /// Extended attributes that only the system's administrator sees.
    pub(super) trusted: bool,
    pub(super) xattrs: bool,
    pub(super) acls: bool,
}

impl Keeps {
    /// Whether we may set and remove an extended attribute.
    pub(super) fn xattr(&self, name: &[u8]) -> bool {
        match name {
            b"system.posix_acl_access" | b"system.posix_acl_default" => self.acls,
            b"security.capability" => self.xattrs && self.owners,
            _ => self.xattrs && (name.starts_with(b"user.") || self.trusted && name.starts_with(b"trusted.")),
        }
    }
}

pub(super) struct Place {
    pub(super) dir: OwnedFd,
    /// "." for the root of home.
    pub(super) name: Vec<u8>,
}

impl Place {
    pub(super) fn stat(&self) -> rustix::io::Result<Option<Statx>> {
        match statx(&self.dir, &self.name) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }
    pub(super) fn fingerprint(&self) -> rustix::io::Result<Option<Fingerprint>> {
        Ok(self.stat()?.as_ref().and_then(fingerprint_of))
    }
    pub(super) fn open(&self, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        rustix::fs::openat(&self.dir, &self.name[..], flags, Mode::empty())
    }
    /// All its attributes; absent: there is no entry.
    pub(super) fn stat_entry(&self, keeps: &Keeps) -> rustix::io::Result<Option<Found>> {
        let Some(stat) = self.stat()? else { return Ok(None) };
        let Some(fingerprint) = fingerprint_of(&stat) else { return Ok(None) };
        let target = match fingerprint.kind {
            FileKind::Symlink => {
                rustix::fs::readlinkat(&self.dir, &self.name[..], Vec::with_capacity(SYMLINK_MAX + 1))?
                    .into_bytes()
            }
            _ => Vec::new(),
        };
        let attrs = Attrs {
            mode: u32::from(stat.stx_mode) & 0o7777,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            atime: time_of(&stat.stx_atime),
            mtime: time_of(&stat.stx_mtime),
            xattrs: self.xattrs(keeps)?,
        };
        Ok(Some(Found {
            fingerprint,
            attrs,
            nlink: stat.stx_nlink,
            target: target.into(),
            rdev: join_device(stat.stx_rdev_major, stat.stx_rdev_minor),
            allocated: stat.stx_blocks.saturating_mul(512),
        }))
    }

    /// A path to it through the open directory, without resolving any name above.
    fn by_fd(&self) -> Vec<u8> {
        let mut path = format!("/proc/self/fd/{}/", self.dir.as_raw_fd()).into_bytes();
        path.extend_from_slice(&self.name);
        path
    }

    fn xattrs(&self, keeps: &Keeps) -> rustix::io::Result<Vec<Xattr>> {
        if !keeps.xattrs && !keeps.acls {
            return Ok(Vec::new());
        }
        let path = self.by_fd();
        let mut names = Vec::with_capacity(1024);
        let listed = rustix::fs::llistxattr(&path[..], rustix::buffer::spare_capacity(&mut names)).or_else(
            |e| match e {
                Errno::RANGE => {
                    names = Vec::with_capacity(XATTR_NAMES_BYTES_MAX);
                    rustix::fs::llistxattr(&path[..], rustix::buffer::spare_capacity(&mut names))
                }
                e => Err(e),
            },
        );
        match listed {
            Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Ok(_) => {}
            Err(e) => return Err(e),
        }
        let mut xattrs = Vec::new();
        for name in names.split(|b| *b == 0).filter(|name| keeps.xattr(name)) {
            match xattr(&path, name) {
                Ok(value) => xattrs.push(Xattr { name: Bytes::copy_from_slice(name), value: value.into() }),
                Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                Err(e) => return Err(e),
            }
        }
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(xattrs)
    }

    /// Sets the attributes that differ, times last: after everything that changes them.
    pub(super) fn set(&self, found: &Found, wished: &Attrs, keeps: &Keeps) -> rustix::io::Result<()> {
        let (old, kind) = (&found.attrs, found.fingerprint.kind);
        let chowned = keeps.owners && (old.uid, old.gid) != (wished.uid, wished.gid);
        if chowned {
            let (uid, gid) = (owner(wished.uid)?, group(wished.gid)?);
            rustix::fs::chownat(&self.dir, &self.name[..], Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        let xattrs_set = self.set_xattrs(&old.xattrs, &wished.xattrs, keeps)?;
        if kind != FileKind::Symlink && (chowned || xattrs_set || old.mode != wished.mode) {
            // Not fchmodat: it would follow a symbolic link that appeared meanwhile.
            let it = self.open(OFlags::PATH)?;
            rustix::fs::chmod(
                format!("/proc/self/fd/{}", it.as_raw_fd()),
                Mode::from_raw_mode(wished.mode & 0o7777),
            )?;
        }
        let times =
            Timestamps { last_access: timespec(wished.atime), last_modification: timespec(wished.mtime) };
        rustix::fs::utimensat(&self.dir, &self.name[..], &times, AtFlags::SYMLINK_NOFOLLOW)
    }

    fn set_xattrs(&self, old: &[Xattr], wished: &[Xattr], keeps: &Keeps) -> rustix::io::Result<bool> {
        let path = self.by_fd();
        let mut changed = false;
        for gone in old.iter().filter(|x| wished.iter().all(|w| w.name != x.name)) {
            rustix::fs::lremovexattr(&path[..], &gone.name[..])?;
            changed = true;
        }
        for wish in wished.iter().filter(|w| keeps.xattr(&w.name) && !old.contains(w)) {
            rustix::fs::lsetxattr(&path[..], &wish.name[..], &wish.value, XattrFlags::empty())?;
            changed = true;
        }
        Ok(changed)
    }
}

/// Like `set`, for an open regular file under any present name.
pub(super) fn set_open(file: BorrowedFd<'_>, wished: &Attrs, keeps: &Keeps, path: &HomePath) -> Outcome<()> {
    let set = || {
        let stat = statx_fd(file)?;
        let chowned = keeps.owners && (stat.stx_uid, stat.stx_gid) != (wished.uid, wished.gid);
        if chowned {
            rustix::fs::fchown(file, Some(owner(wished.uid)?), Some(group(wished.gid)?))?;
        }
        // Through the link in /proc: so the same functions list and read them.
        let link = format!("/proc/self/fd/{}", file.as_raw_fd()).into_bytes();
        let xattrs_set = set_open_xattrs(file, &link, wished, keeps)?;
        if chowned || xattrs_set || u32::from(stat.stx_mode) & 0o7777 != wished.mode {
            rustix::fs::fchmod(file, Mode::from_raw_mode(wished.mode & 0o7777))?;
        }
        let times =
            Timestamps { last_access: timespec(wished.atime), last_modification: timespec(wished.mtime) };
        rustix::fs::futimens(file, &times)
    };
    set().map_err(|e| fault("set the attributes of", path, e))
}

fn set_open_xattrs(
    file: BorrowedFd<'_>,
    link: &[u8],
    wished: &Attrs,
    keeps: &Keeps,
) -> rustix::io::Result<bool> {
    if !keeps.xattrs && !keeps.acls {
        return Ok(false);
    }
    let mut names = Vec::with_capacity(XATTR_NAMES_BYTES_MAX);
    match rustix::fs::flistxattr(file, rustix::buffer::spare_capacity(&mut names)) {
        Ok(_) | Err(Errno::OPNOTSUPP) => {}
        Err(e) => return Err(e),
    }
    let mut changed = false;
    let old: Vec<&[u8]> = names.split(|b| *b == 0).filter(|name| keeps.xattr(name)).collect();
    for gone in old.iter().filter(|name| wished.xattrs.iter().all(|w| w.name != **name)) {
        rustix::fs::fremovexattr(file, *gone)?;
        changed = true;
    }
    for wish in wished.xattrs.iter().filter(|w| keeps.xattr(&w.name)) {
        let is_there = old.contains(&&wish.name[..]) && xattr_of(link, &wish.name)? == wish.value;
        if !is_there {
            rustix::fs::fsetxattr(file, &wish.name[..], &wish.value, XattrFlags::empty())?;
            changed = true;
        }
    }
    Ok(changed)
}

/// The value of an attribute of the entry itself.
fn xattr(path: &[u8], name: &[u8]) -> rustix::io::Result<Vec<u8>> {
    let mut value = Vec::with_capacity(256);
    match rustix::fs::lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value)) {
        Ok(_) => return Ok(value),
        Err(Errno::RANGE) => {}
        Err(e) => return Err(e),
    }
    let mut value = Vec::with_capacity(XATTR_VALUE_MAX);
    rustix::fs::lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value))?;
    Ok(value)
}

/// The value of an attribute of the file behind `link` in /proc.
fn xattr_of(link: &[u8], name: &[u8]) -> rustix::io::Result<Vec<u8>> {
    let mut value = Vec::with_capacity(XATTR_VALUE_MAX);
    rustix::fs::getxattr(link, name, rustix::buffer::spare_capacity(&mut value))?;
    Ok(value)
}

pub(super) fn statx(dir: impl AsFd, name: &[u8]) -> rustix::io::Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    rustix::fs::statx(dir, name, AtFlags::SYMLINK_NOFOLLOW, wanted)
}

pub(super) fn statx_fd(fd: impl AsFd) -> rustix::io::Result<Statx> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

/// None: an unknown kind of entry.
pub(super) fn fingerprint_of(stat: &Statx) -> Option<Fingerprint> {
    let kind = kind_of(FileType::from_raw_mode(u32::from(stat.stx_mode)))?;
    // Not the device's number: it may change with the next mount. The birth time, because inode numbers are
    // reused.
    let mut id = stat.stx_ino.to_le_bytes().to_vec();
    if stat.stx_mask & StatxFlags::BTIME.bits() != 0 {
        id.extend_from_slice(&time_of(&stat.stx_btime).nanos.to_le_bytes());
    }
    let (size, mtime) = match kind {
        FileKind::Regular | FileKind::Symlink => (stat.stx_size, time_of(&stat.stx_mtime)),
        _ => (0, Time { nanos: 0 }),
    };
    Some(Fingerprint { kind, id: id.into(), version: Bytes::new(), size, mtime })
}

fn kind_of(kind: FileType) -> Option<FileKind> {
    match kind {
        FileType::RegularFile => Some(FileKind::Regular),
        FileType::Directory => Some(FileKind::Directory),
        FileType::Symlink => Some(FileKind::Symlink),
        FileType::Fifo => Some(FileKind::Fifo),
        FileType::Socket => Some(FileKind::Socket),
        FileType::CharacterDevice => Some(FileKind::CharDevice),
        FileType::BlockDevice => Some(FileKind::BlockDevice),
        _ => None,
    }
}

fn owner(uid: u32) -> rustix::io::Result<Uid> {
    if uid == u32::MAX { Err(Errno::INVAL) } else { Ok(Uid::from_raw(uid)) }
}
fn group(gid: u32) -> rustix::io::Result<Gid> {
    if gid == u32::MAX { Err(Errno::INVAL) } else { Ok(Gid::from_raw(gid)) }
}

fn time_of(t: &StatxTimestamp) -> Time {
    Time { nanos: t.tv_sec.saturating_mul(1_000_000_000).saturating_add(i64::from(t.tv_nsec)) }
}
fn timespec(t: Time) -> Timespec {
    Timespec { tv_sec: t.nanos.div_euclid(1_000_000_000), tv_nsec: t.nanos.rem_euclid(1_000_000_000) }
}

/// Device numbers in 32 bits, as the kernel reports them in `stat` (`new_encode_dev`).
fn join_device(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
pub(super) fn device_of(rdev: u32) -> rustix::fs::Dev {
    rustix::fs::makedev((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xfff00))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_and_times_convert_both_ways() {
        for (major, minor) in [(0, 0), (1, 3), (8, 17), (259, 0x12345), (0xfff, 0xfffff)] {
            let dev = device_of(join_device(major, minor));
            assert_eq!((rustix::fs::major(dev), rustix::fs::minor(dev)), (major, minor));
        }
        for nanos in [0, 1, -1, 1_700_000_000_123_456_789, i64::MIN, i64::MAX] {
            let spec = timespec(Time { nanos });
            assert!((0..1_000_000_000).contains(&spec.tv_nsec));
            assert_eq!(spec.tv_sec as i128 * 1_000_000_000 + i128::from(spec.tv_nsec), i128::from(nanos));
        }
    }
}
