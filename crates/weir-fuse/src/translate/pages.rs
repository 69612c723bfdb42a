//! Which open files the kernel may keep pages of.
//!
//! Pages are kept only under a lease; those of an earlier lease are dropped: no flag at all. A file that is
//! only written gains nothing from pages: its writes arrive here as large as the program made them. An
//! append must not leave pages at the kernel's outdated end of the file.
//!
//! A file that is read and written has pages only where it is mapped. Another node may open it for writing,
//! and then no lease protects them: a read would end at the kernel's outdated end of the file, because the
//! kernel accepts no new size while pages are dropped. Without `maps_direct` it keeps pages all the same.
//!
//! A file with offline bytes has no pages either. Until a page is read it is locked, for as long as a
//! recall takes: and a program that opens, writes or drops that page waits unkillably in the kernel. A
//! direct read can be interrupted.
use fuser::FopenFlags;
use weir_client::{OpenMode, Opened};

/// The flags of an open file for the kernel. `maps_direct`: it can map files that are read directly.
pub fn open_reply(opened: &Opened, mode: OpenMode, appends: bool, maps_direct: bool) -> FopenFlags {
    let away = opened.stat.attr.evicted > 0;
    let shares = mode.write && maps_direct;
    if opened.kernel_cache && mode.read && !appends && !away && !shares {
        if opened.old_pages { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE }
    } else if opened.kernel_cache && (away || mode.read && !appends && !opened.old_pages) {
        DIRECT | FopenFlags::FOPEN_KEEP_CACHE
    } else {
        DIRECT
    }
}
const DIRECT: FopenFlags = FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
