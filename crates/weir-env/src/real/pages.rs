//! The pages of a file in the kernel's page cache.
use std::os::fd::{AsRawFd, BorrowedFd};

/// `cachestat(2)`, since Linux 6.5; one number on all architectures, and not in every libc crate.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct Range {
    offset: u64,
    /// 0: to the end.
    len: u64,
}

/// `struct cachestat`: numbers of pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of the file in the page cache; `None` if the kernel does not report it.
pub fn cached_bytes(file: BorrowedFd<'_>) -> Option<u64> {
    let (range, mut counts) = (Range { offset: 0, len: 0 }, Counts::default());
    // SAFETY: the descriptor is open while it is borrowed; both structures have the kernel's layout and live
    // until the call returns; the kernel reads the first and writes the second, and keeps neither.
    let done = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0 as libc::c_uint)
    };
    // SAFETY: asks for a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    (done == 0).then(|| counts.cached * page_bytes.max(0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn pages_just_written_are_cached() {
        let mut file = tempfile::tempfile().unwrap();
        let Some(before) = cached_bytes(file.as_fd()) else { return }; // an old kernel
        assert_eq!(before, 0);
        file.write_all(&[1; 100_000]).unwrap();
        assert!(cached_bytes(file.as_fd()).unwrap() >= 100_000);
    }
}
