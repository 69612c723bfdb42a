//! Types of the kernel ↔ types of the client. Pure.
use crate::tree::to_kernel_ino;
use fuser::{Errno, FileAttr, FileType, RenameFlags, TimeOrNow};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use weir_client::{Allocate, NewMode, OpenMode, SetTime, Stat};
use weir_proto::Error;
use weir_proto::meta::{Attr, FileKind, RenameMode, Time};
use weir_proto::posix::MODE_BITS;

/// How long the kernel keeps attributes that a lease protects, without a notice.
const LEASED_TTL: Duration = Duration::from_secs(3600);
/// Unit of `st_blocks`, in bytes.
const BLOCK_BYTES: u64 = 512;
/// The size that programs should read and write at once (`st_blksize`), in bytes.
const PREFERRED_IO_BYTES: u32 = 1 << 20;

pub fn errno(e: &Error) -> Errno {
    Errno::from_i32(e.kind.errno())
}

pub fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind that `mknod` asks for; `None`: not one of its kinds.
pub fn node_kind(mode: u32) -> Option<FileKind> {
    Some(match mode & libc::S_IFMT {
        0 | libc::S_IFREG => FileKind::Regular,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFCHR => FileKind::CharDevice,
        libc::S_IFBLK => FileKind::BlockDevice,
        _ => return None,
    })
}

pub fn permissions(mode: u32) -> u32 {
    mode & MODE_BITS
}

/// The kernel leaves the umask to us: a directory's default access control list comes before it.
pub fn new_mode(mode: u32, umask: u32) -> NewMode {
    NewMode { bits: permissions(mode), umask: umask & 0o777 }
}

/// The space that is used here. Never 0 if bytes are offline: programs take a file without blocks for one of
/// zeros.
fn blocks(attr: &Attr) -> u64 {
    let online = attr.allocated.saturating_sub(attr.evicted).div_ceil(BLOCK_BYTES);
    online.max(u64::from(attr.evicted > 0))
}

pub fn attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: to_kernel_ino(attr.ino),
        size: attr.size,
        blocks: blocks(attr),
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: system_time(attr.btime),
        kind: file_type(attr.kind),
        perm: permissions(attr.mode) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

pub fn attr_ttl(stat: &Stat) -> Duration {
    if stat.leased { LEASED_TTL } else { Duration::ZERO }
}

fn system_time(t: Time) -> SystemTime {
    let distance = Duration::from_nanos(t.nanos.unsigned_abs());
    if t.nanos >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

pub fn set_time(t: TimeOrNow) -> SetTime {
    match t {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(at) => SetTime::At(Time { nanos: nanos_of_request(at) }),
    }
}

/// A time as the FUSE crate reads it: before 1970 it subtracts the nanoseconds that are to be added to the
/// (negative) seconds.
fn nanos_of_request(t: SystemTime) -> i64 {
    match UNIX_EPOCH.duration_since(t) {
        Ok(before) if before.subsec_nanos() > 0 => {
            nanos(t).saturating_add(2 * i64::from(before.subsec_nanos()))
        }
        _ => nanos(t),
    }
}

/// Saturates far outside of 1677 to 2262.
fn nanos(t: SystemTime) -> i64 {
    match t.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |n| -n),
    }
}

/// `FMODE_EXEC` of the kernel, among the flags of an open to execute the file. No program can set it.
const OPEN_TO_EXECUTE: i32 = 0x20;

/// How a file is opened, and whether its writes go to the end: each write repeats that.
pub fn open_mode(flags: i32) -> (OpenMode, bool) {
    let access = flags & libc::O_ACCMODE;
    let mode = OpenMode {
        read: access != libc::O_WRONLY,
        write: access != libc::O_RDONLY,
        append: false,
        truncate: flags & libc::O_TRUNC != 0,
        execute: flags & OPEN_TO_EXECUTE != 0,
    };
    (mode, flags & libc::O_APPEND != 0)
}

pub fn rename_mode(flags: RenameFlags) -> Option<RenameMode> {
    if flags.is_empty() {
        Some(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Some(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Some(RenameMode::Exchange)
    } else {
        None
    }
}

/// The kind of a `fallocate`. Ranges that are cut out of a file, or pushed into it, are refused.
pub fn allocate(mode: i32) -> Result<Allocate, Errno> {
    let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
    match (mode & !libc::FALLOC_FL_KEEP_SIZE, keep_size) {
        (0, false) => Ok(Allocate::Extend),
        (0, true) => Ok(Allocate::Reserve),
        (libc::FALLOC_FL_PUNCH_HOLE, true) => Ok(Allocate::PunchHole),
        (libc::FALLOC_FL_ZERO_RANGE, false) => Ok(Allocate::ExtendByZeros),
        (libc::FALLOC_FL_ZERO_RANGE, true) => Ok(Allocate::ZeroRange),
        _ => Err(Errno::EOPNOTSUPP),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_survive_on_both_sides_of_1970() {
        for n in [0, 1, -1, 1_700_000_000_123_456_789, -1_500_000_000, i64::MIN, i64::MAX] {
            assert_eq!(nanos(system_time(Time { nanos: n })), n);
        }
    }

    #[test]
    fn a_time_before_1970_is_as_the_kernel_sent_it() {
        // −2 s and 300 ms, as the FUSE crate hands it over.
        let read = UNIX_EPOCH - Duration::new(2, 300_000_000);
        assert_eq!(nanos_of_request(read), -1_700_000_000);
        assert_eq!(nanos_of_request(UNIX_EPOCH - Duration::new(2, 0)), -2_000_000_000);
        assert_eq!(nanos_of_request(UNIX_EPOCH + Duration::new(2, 5)), 2_000_000_005);
    }

    #[test]
    fn open_flags_are_read_as_posix_means_them() {
        assert_eq!(open_mode(libc::O_RDONLY), (OpenMode::READ, false));
        assert_eq!(open_mode(libc::O_WRONLY | libc::O_CLOEXEC), (OpenMode::WRITE, false));
        assert_eq!(
            open_mode(libc::O_RDWR | libc::O_APPEND | libc::O_TRUNC),
            (OpenMode { truncate: true, ..OpenMode::BOTH }, true)
        );
        assert_eq!(open_mode(OPEN_TO_EXECUTE), (OpenMode { execute: true, ..OpenMode::READ }, false));
    }
}
