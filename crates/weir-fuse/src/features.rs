//! The agreement with the kernel at the start of a mount: features, and the sizes and number of requests.
use crate::request_bytes::request_bytes;
use fuser::{InitFlags, KernelConfig};
use std::io::{ErrorKind, Result};

/// Requests that the kernel may have in flight in the background (read-ahead, direct I/O parts).
const BACKGROUND_MAX: u16 = 128;

/// Features that are requested if the kernel offers them.
const WANTED: [InitFlags; 15] = [
    InitFlags::FUSE_ASYNC_READ,
    InitFlags::FUSE_ATOMIC_O_TRUNC,
    InitFlags::FUSE_BIG_WRITES,
    InitFlags::FUSE_MAX_PAGES,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_CACHE_SYMLINKS,
    // Locks are cluster-wide.
    InitFlags::FUSE_POSIX_LOCKS,
    InitFlags::FUSE_FLOCK_LOCKS,
    // Pages are dropped when a lease is revoked, not when a size or time changes.
    InitFlags::FUSE_EXPLICIT_INVAL_DATA,
    // Without it the kernel asks for the attribute `security.capability` before every write.
    InitFlags::FUSE_HANDLE_KILLPRIV_V2,
    InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    // The kernel checks access control lists with the permissions; they are inherited here.
    InitFlags::FUSE_POSIX_ACL,
    InitFlags::FUSE_DONT_MASK,
];

/// The features that change how requests are answered.
pub struct Features {
    /// The kernel can map files that are read directly.
    pub maps_direct: bool,
}

/// `by_ring`: requests are to come by rings; an error if this kernel offers none.
pub fn agree(config: &mut KernelConfig, by_ring: bool) -> Result<Features> {
    if by_ring && config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_err() {
        return Err(ErrorKind::Unsupported.into());
    }
    // A kernel that lacks one of them is used without it.
    for wanted in WANTED {
        let _ = config.add_capabilities(wanted);
    }
    let maps_direct = config.capabilities().contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
    let _ = config.set_max_write(request_bytes());
    let _ = config.set_max_background(BACKGROUND_MAX);
    if let Err(most) = config.set_max_readahead(request_bytes()) {
        let _ = config.set_max_readahead(most);
    }
    Ok(Features { maps_direct })
}
