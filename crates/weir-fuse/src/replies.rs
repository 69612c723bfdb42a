//! Results of the client as answers to the kernel. Errors become numbers here, and are logged once.
use crate::kernel::Notices;
use crate::log;
use crate::translate as tr;
use bytes::Bytes;
use fuser::{
    Errno, FileHandle, FopenFlags, Generation, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLock, ReplyStatx, ReplyWrite, ReplyXattr,
};
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;
use weir_client::{Client, InTheWay, NAME_LOAN, OpenMode, Opened, Stat};
use weir_proto::meta::ListEntry;
use weir_proto::{Error, InodeId, Result};

pub const SNAPSHOTS_NAME: &[u8] = b".snapshots";
/// The kernel asks for the name again each time.
pub const NAME_TTL: Duration = Duration::ZERO;
pub const GENERATION: Generation = Generation(0); // inode numbers are never reused

pub fn open_flags(client: &Client, opened: &Opened, how: How) -> FopenFlags {
    client.set_opener(opened.handle, how.thread);
    let flags = tr::open_reply(opened, how.mode, how.appends, how.maps_direct);
    if flags.is_empty() {
        client.drops_pages(opened.handle);
    }
    if flags.contains(FopenFlags::FOPEN_DIRECT_IO) {
        client.keeps_no_pages(opened.handle);
    }
    match client.closes_quietly(opened.handle) {
        true => flags | FopenFlags::FOPEN_NOFLUSH,
        false => flags,
    }
}

/// How a file is opened, and whether this kernel can map files that are read directly.
#[derive(Clone, Copy)]
pub struct How {
    pub mode: OpenMode,
    /// The thread that opens.
    pub thread: u32,
    pub appends: bool,
    pub maps_direct: bool,
}

/// A name in an answer to the kernel.
pub struct Named {
    pub client: Client,
    pub kernel: Arc<Notices>,
    pub dir: InodeId,
    pub name: Vec<u8>,
}

impl Named {
    fn ttl(&self, leads_to: Option<InodeId>) -> Duration {
        // The entry that a volume shows in its topmost directory depends on the volume.
        let lent = self.name != SNAPSHOTS_NAME && self.client.lend_name(self.dir, &self.name, leads_to);
        if lent { NAME_LOAN } else { NAME_TTL }
    }
}

/// The kernel is about to get an inode. Attributes are read again after that is noted: an earlier revoke sent
/// no notice to a kernel that did not know the inode.
fn reported(client: &Client, kernel: &Notices, stat: Stat) -> Stat {
    kernel.note_answer(tr::to_kernel_ino(stat.attr.ino));
    client.try_getattr(stat.attr.ino).unwrap_or(Stat { leased: false, ..stat })
}

/// Adds an entry of a listing with all that the kernel may cache of it. True: it did not fit.
pub fn add_entry(named: &Named, reply: &mut ReplyDirectoryPlus, cookie: u64, entry: &ListEntry) -> bool {
    let (ino, kind) = (tr::to_kernel_ino(entry.ino), tr::file_type(entry.kind));
    let name = std::ffi::OsStr::from_bytes(&entry.name);
    // A repeated answer about a cached inode would make the kernel ask for the access control list again.
    if named.kernel.is_fresh(ino, NAME_LOAN / 2) {
        return reply.add_name(ino, cookie, name, kind);
    }
    named.kernel.note_answer(ino);
    let lent = || {
        let stat = named.client.try_getattr(entry.ino)?;
        (named.ttl(Some(entry.ino)) == NAME_LOAN).then_some(stat)
    };
    let (full, taken) = match lent() {
        Some(stat) => {
            let (attr_ttl, attr) = (tr::attr_ttl(&stat), tr::attr(&stat.attr));
            let full = reply.add_with_ttls(ino, cookie, name, &attr_ttl, &NAME_LOAN, &attr, GENERATION);
            (full, !full)
        }
        None => (reply.add_name(ino, cookie, name, kind), false),
    };
    if !taken {
        named.kernel.forgotten(ino, 1);
    }
    full
}

pub fn reply_entry(named: &Named, reply: ReplyEntry, result: Result<Stat>) {
    match result {
        Ok(stat) => {
            let stat = reported(&named.client, &named.kernel, stat);
            let ttl = named.ttl(Some(stat.attr.ino));
            reply.entry_with_ttls(&tr::attr_ttl(&stat), &ttl, &tr::attr(&stat.attr), GENERATION)
        }
        Err(e) => reply.error(refused(&e)),
    }
}
pub fn reply_lookup(named: &Named, reply: ReplyEntry, result: Result<Option<Stat>>) {
    match result {
        Ok(Some(stat)) => reply_entry(named, reply, Ok(stat)),
        Ok(None) => match named.ttl(None) {
            Duration::ZERO => reply.error(Errno::ENOENT),
            ttl => reply.absent(&ttl),
        },
        Err(e) => reply.error(refused(&e)),
    }
}
pub fn reply_attr(reply: ReplyAttr, result: Result<Stat>) {
    match result {
        Ok(stat) => reply.attr(&tr::attr_ttl(&stat), &tr::attr(&stat.attr)),
        Err(e) => reply.error(refused(&e)),
    }
}
pub fn reply_statx(reply: ReplyStatx, result: Result<Stat>) {
    match result {
        Ok(stat) => reply.statx(&tr::attr_ttl(&stat), &tr::attr(&stat.attr)),
        Err(e) => reply.error(refused(&e)),
    }
}
pub fn reply_empty(reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(refused(&e)),
    }
}
/// `named`: absent for a file without a name.
pub fn reply_created(
    (client, kernel): (&Client, &Notices),
    named: Option<&Named>,
    reply: ReplyCreate,
    created: Result<Opened>,
    how: How,
) {
    match created {
        Ok(opened) => {
            let stat = reported(client, kernel, opened.stat.clone());
            reply.created_with_ttls(
                &tr::attr_ttl(&stat),
                &named.map_or(NAME_TTL, |named| named.ttl(Some(stat.attr.ino))),
                &tr::attr(&stat.attr),
                GENERATION,
                FileHandle(opened.handle.0),
                open_flags(client, &opened, how),
            )
        }
        Err(e) => reply.error(refused(&e)),
    }
}
pub fn reply_written(reply: ReplyWrite, result: Result<usize>) {
    match result {
        Ok(n) => reply.written(n as u32),
        Err(e) => reply.error(refused(&e)),
    }
}
/// `free`: the range and the process of the request, returned if no lock conflicts.
pub fn reply_lock(reply: ReplyLock, free: (u64, u64, u32), found: Result<Option<InTheWay>>) {
    match found {
        Ok(None) => reply.locked(free.0, free.1, libc::F_UNLCK, free.2),
        // A process of another mount has no number here.
        Ok(Some(way)) => reply.locked(
            way.range.start,
            way.range.end,
            crate::locks::kernel_type(way.kind),
            way.pid.unwrap_or(0),
        ),
        Err(e) => reply.error(refused(&e)),
    }
}
/// More parts are joined: one system call takes 1,024.
const PARTS_MAX: usize = 1000;

pub fn reply_data(reply: ReplyData, result: Result<Vec<Bytes>>) {
    match result {
        Ok(parts) if parts.len() > PARTS_MAX => reply.data(&parts.concat()),
        Ok(parts) => reply.parts(&parts.iter().map(|part| IoSlice::new(part)).collect::<Vec<_>>()),
        Err(e) => reply.error(refused(&e)),
    }
}
pub fn reply_xattr(reply: ReplyXattr, buffer_len: u32, result: Result<Bytes>) {
    match result {
        Ok(value) if buffer_len == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > buffer_len as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(e) => reply.error(refused(&e)),
    }
}

/// The number for an error; errors that the caller did not cause are logged, once, here.
pub fn refused(e: &Error) -> Errno {
    use weir_proto::ErrorKind::{Damaged, Deadline, Io, Unavailable};
    // Named by the kind, so that many of one do not hide another one.
    match e.kind {
        Damaged => log::warn("damaged", e),
        Deadline => log::warn("deadline", e),
        Io => log::warn("i/o error", e),
        Unavailable => log::warn("unavailable", e),
        _ => {}
    }
    tr::errno(e)
}
