//! Open files: open, create, flush, sync, release; and which of them the kernel may keep pages of.
//!
//! Invariant: a file that was opened for a program that is gone is closed again.
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
use super::privileges::drop_privileges;
use crate::call::Call;
use crate::callers::is_child_of;
use crate::entries::{Entries, GENERATION, NAME_TTL, Named};
use crate::replies::*;
use crate::tree::Name;
use crate::{log, translate as tr};
use fuser::{FileHandle, FopenFlags, ReplyCreate, ReplyEmpty, ReplyOpen};
use std::pin::Pin;
use std::sync::Arc;
use weir_client::{Client, Handle, NewMode, OpenMode, Opened};
use weir_proto::lock::LockOwner;
use weir_proto::posix::has_privileges;
use weir_proto::{InodeId, Result};

pub struct Opens {
    client: Client,
    entries: Arc<Entries>,
    /// The kernel can map files that are read directly.
    maps_direct: bool,
}

/// How a file is opened, and whether this kernel can map files that are read directly.
#[derive(Clone, Copy)]
struct How {
    mode: OpenMode,
    /// The thread that opens.
    thread: u32,
    appends: bool,
    maps_direct: bool,
}

impl Opens {
    pub fn new(client: Client, entries: Arc<Entries>) -> Opens {
        // The kernel reports its features in its first request.
        Opens { client, entries, maps_direct: false }
    }
    pub fn set_maps_direct(&mut self, maps_direct: bool) {
        self.maps_direct = maps_direct;
    }

    fn how(&self, thread: u32, flags: i32) -> How {
        let (mode, appends) = tr::open_mode(flags);
        How { mode, thread, appends, maps_direct: self.maps_direct }
    }

    pub fn open(&self, call: Call<'_, ReplyOpen>, ino: InodeId, flags: i32) {
        let how = self.how(call.thread(), flags);
        let mode = how.mode;
        let leaves_access_time = flags & libc::O_NOATIME != 0;
        // The kernel has checked the permissions, under the lease that allows an answer here.
        if self.client.may_open_unasked(call.uid())
            && let Some(opened) = self.client.try_open(ino, mode)
        {
            if leaves_access_time {
                self.client.leaves_access_time(opened.handle);
            }
            let flags = open_flags(&self.client, &opened, how);
            return call.reply().opened(FileHandle(opened.handle.0), flags);
        }
        let (client, cred) = (self.client.clone(), call.cred());
        let (of, undo) = (client.clone(), closer(&client));
        let work = async move {
            let opened = client.open(&cred, ino, mode).await?;
            let strip = mode.truncate && cred.uid != 0 && has_privileges(opened.stat.attr.mode);
            if strip && let Err(e) = drop_privileges(&client, &cred, ino).await {
                let _ = client.release(opened.handle).await; // the first error is the one that is reported
                return Err(e);
            }
            if leaves_access_time {
                client.leaves_access_time(opened.handle);
            }
            Ok(opened)
        };
        let then = move |reply: ReplyOpen, opened: Result<Opened>| match opened {
            Ok(opened) => reply.opened(FileHandle(opened.handle.0), open_flags(&of, &opened, how)),
            Err(e) => reply.error(refused(&e)),
        };
        call.wait_or_undo(work, then, undo);
    }

    pub fn create(&self, call: Call<'_, ReplyCreate>, at: Name, mode: NewMode, flags: i32) {
        let (client, cred) = (self.client.clone(), call.cred());
        let (how, exclusive) = (self.how(call.thread(), flags), flags & libc::O_EXCL != 0);
        let undo = closer(&client);
        let then = self.answer_created(Some(self.entries.named(at.clone())), how);
        let work = async move { client.create(&cred, at.dir, &at.name, mode, exclusive, how.mode).await };
        call.wait_or_undo(work, then, undo);
    }

    pub fn create_nameless(&self, call: Call<'_, ReplyCreate>, dir: InodeId, mode: NewMode, flags: i32) {
        let (client, cred, how) = (self.client.clone(), call.cred(), self.how(call.thread(), flags));
        let undo = closer(&client);
        let then = self.answer_created(None, how);
        let work = async move { client.create_nameless(&cred, dir, mode, how.mode).await };
        call.wait_or_undo(work, then, undo);
    }

    /// `named`: absent for a file without a name.
    fn answer_created(
        &self,
        named: Option<Named>,
        how: How,
    ) -> impl FnOnce(ReplyCreate, Result<Opened>) + Send + 'static {
        let (client, entries) = (self.client.clone(), self.entries.clone());
        move |reply, created| match created {
            Ok(opened) => {
                let stat = entries.reported(opened.stat.clone());
                reply.created_with_ttls(
                    &tr::attr_ttl(&stat),
                    &named.map_or(NAME_TTL, |named| named.ttl(Some(stat.attr.ino))),
                    &tr::attr(&stat.attr),
                    GENERATION,
                    FileHandle(opened.handle.0),
                    open_flags(&client, &opened, how),
                )
            }
            Err(e) => reply.error(refused(&e)),
        }
    }

    /// `owner`: of the process's locks, which end with each close.
    pub fn flush(&self, call: Call<'_, ReplyEmpty>, file: Handle, owner: LockOwner) {
        let client = self.client.clone();
        // A child that is about to execute another program closes its copies of the parent's descriptors (and
        // its exec waits for that): nothing was written through these, so there is nothing to wait for, nor
        // an error to report. The parent's own close does both.
        let is_inherited = client.opener(file).is_some_and(|opener| is_child_of(call.thread(), opener));
        let work = async move {
            let saved = if is_inherited { Ok(()) } else { client.flush(file).await };
            // After the bytes: the next holder of the lock sees them.
            if let Err(e) = client.unlock_owner(file, owner).await {
                log::warn("unlock at close", format_args!("unlock at close: {e}"));
            }
            saved
        };
        call.wait(work, reply_empty);
    }

    pub fn sync(&self, call: Call<'_, ReplyEmpty>, file: Handle, data_only: bool) {
        let client = self.client.clone();
        let work = async move {
            match data_only {
                true => client.fdatasync(file).await,
                false => client.fsync(file).await,
            }
        };
        call.wait(work, reply_empty);
    }

    pub fn release(&self, call: Call<'_, ReplyEmpty>, file: Handle) {
        let client = self.client.clone();
        call.answer(|reply| async move { reply_empty(reply, client.release(file).await) });
    }
}

/// Closes a file that was opened for a program that is gone.
fn closer(
    client: &Client,
) -> impl FnOnce(Result<Opened>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + 'static {
    let client = client.clone();
    move |opened| {
        Box::pin(async move {
            if let Ok(opened) = opened
                && let Err(e) = client.release(opened.handle).await
            {
                log::warn(
                    "a file was not closed",
                    format_args!("close the file of a program that is gone: {e}"),
                );
            }
        })
    }
}

/// The flags of an open file for the kernel; the client learns what the kernel keeps.
fn open_flags(client: &Client, opened: &Opened, how: How) -> FopenFlags {
    client.set_opener(opened.handle, how.thread);
    let flags = kept_pages(opened, how);
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

const DIRECT: FopenFlags = FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

fn kept_pages(opened: &Opened, how: How) -> FopenFlags {
    let How { mode, appends, maps_direct, .. } = how;
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
