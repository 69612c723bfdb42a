//! Requests about open files: open, create, flush, sync, and file locks.
//!
//! Invariant: a file that was opened for a program that is gone is closed again, and a lock granted to it
//! is released.
use super::data::drop_privileges;
use super::handle;
use crate::mounted::Mounted;
use crate::mounts::keeps_access_times;
use crate::replies::*;
use crate::snapshots::{is_snapshot, is_snapshot_handle};
use crate::{callers, locks, log, translate as tr};
use fuser::{
    Errno, FileHandle, INodeNo, LockOwner, OpenFlags, ReplyCreate, ReplyEmpty, ReplyLock, ReplyOpen, Request,
};
use std::ffi::OsStr;
use std::pin::Pin;
use std::time::{Duration, Instant};
use weir_client::{Client, LockWish, Locked, Opened};
use weir_proto::Result;
use weir_proto::posix::has_privileges;

/// How long a change of the mount's options may stay unnoticed.
const OPTIONS_TTL: Duration = Duration::from_secs(1);

impl Mounted {
    fn how(&self, request: &Request, flags: i32) -> How {
        let (mode, appends) = tr::open_mode(flags);
        How { mode, thread: request.pid(), appends, maps_direct: self.maps_direct }
    }

    /// A remount may forbid access times; the kernel does not report it.
    pub(super) fn check_options(&self) {
        let now = Instant::now();
        let mut seen = self.options_seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if seen.is_none_or(|at| now.duration_since(at) >= OPTIONS_TTL) {
            *seen = Some(now);
            self.client.keep_access_times(keeps_access_times(&self.path));
        }
    }
}

impl Mounted {
    pub(super) fn serve_open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.check_options();
        let how = self.how(request, flags.0);
        let mode = how.mode;
        if is_snapshot(ino) {
            return self.snapshot_open(request, ino, mode, reply);
        }
        let leaves_access_time = flags.0 & libc::O_NOATIME != 0;
        let ino = tr::from_kernel_ino(ino);
        // The kernel has checked the permissions, under the lease that allows an answer here.
        if self.client.may_open_unasked(request.uid())
            && let Some(opened) = self.client.try_open(ino, mode)
        {
            if leaves_access_time {
                self.client.leaves_access_time(opened.handle);
            }
            return reply.opened(FileHandle(opened.handle.0), open_flags(&self.client, &opened, how));
        }
        let (client, cred) = (self.client.clone(), self.cred(request));
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
        self.wait_or_undo(request, reply, work, then, undo);
    }

    pub(super) fn serve_create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let (mode, exclusive) = (tr::new_mode(mode, umask), flags & libc::O_EXCL != 0);
        let how = self.how(request, flags);
        let (of, undo) = (client.clone(), closer(&client));
        let (kernel, named) = (self.kernel.clone(), self.named(parent, &name));
        let work = async move { client.create(&cred, parent, &name, mode, exclusive, how.mode).await };
        let then = move |reply, created| reply_created((&of, &kernel), Some(&named), reply, created, how);
        self.wait_or_undo(request, reply, work, then, undo);
    }

    pub(super) fn serve_tmpfile(
        &self,
        request: &Request,
        parent: INodeNo,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        if is_snapshot(parent) {
            return reply.error(Errno::EROFS);
        }
        let (client, cred) = (self.client.clone(), self.cred(request));
        let (parent, mode) = (tr::from_kernel_ino(parent), tr::new_mode(mode, umask));
        let how = self.how(request, flags);
        let (of, undo) = (client.clone(), closer(&client));
        let work = async move { client.create_nameless(&cred, parent, mode, how.mode).await };
        let kernel = self.kernel.clone();
        let then = move |reply, created| reply_created((&of, &kernel), None, reply, created, how);
        self.wait_or_undo(request, reply, work, then, undo);
    }

    pub(super) fn serve_flush(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        if is_snapshot_handle(fh) {
            self.snapshots.locks.unlock_owner(ino.0, locks::owner(owner, false));
            return reply.ok();
        }
        let client = self.client.clone();
        // A child that is about to execute another program closes its copies of the parent's descriptors (and
        // its exec waits for that): nothing was written through these, so there is nothing to wait for, nor
        // an error to report. The parent's own close does both.
        let is_inherited = client.opener(handle(fh)).is_some_and(|t| callers::is_child_of(request.pid(), t));
        let work = async move {
            let saved = if is_inherited { Ok(()) } else { client.flush(handle(fh)).await };
            // After the bytes: the next holder of the lock sees them.
            if let Err(e) = client.unlock_owner(handle(fh), locks::owner(owner, false)).await {
                log::warn("unlock at close", format_args!("unlock at close: {e}"));
            }
            saved
        };
        self.wait(request, reply, work, reply_empty);
    }

    pub(super) fn serve_fsync(&self, request: &Request, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        if is_snapshot_handle(fh) {
            return reply.ok();
        }
        let client = self.client.clone();
        let work = async move {
            match datasync {
                true => client.fdatasync(handle(fh)).await,
                false => client.fsync(handle(fh)).await,
            }
        };
        self.wait(request, reply, work, reply_empty);
    }

    pub(super) fn serve_getlk(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let wish = match locks::wish(locks::owner(owner, false), start, end, typ, pid) {
            Ok(wish) => wish,
            Err(e) => return reply.error(e),
        };
        let free = (start, end, pid);
        if is_snapshot_handle(fh) {
            return reply_lock(reply, free, Ok(self.snapshots.locks.test(ino.0, &wish)));
        }
        let client = self.client.clone();
        let work = async move { client.test_lock(handle(fh), wish).await };
        self.wait(request, reply, work, move |reply, found| reply_lock(reply, free, found));
    }

    pub(super) fn serve_setlk(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        flock: bool,
        reply: ReplyEmpty,
    ) {
        let wish = match locks::wish(locks::owner(owner, flock), start, end, typ, pid) {
            Ok(wish) => wish,
            Err(e) => return reply.error(e),
        };
        if is_snapshot_handle(fh) {
            return self.snapshot_setlk(request, ino, fh, wish, sleep, reply);
        }
        let (client, fh) = (self.client.clone(), handle(fh));
        let answered = |reply: ReplyEmpty, locked| match locks::answer(locked) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        };
        let of = client.clone();
        let undo = move |locked: Result<Locked>| async move {
            let held = wish.kind.is_some() && locked.is_ok_and(|l| l == Locked::Granted);
            if held && let Err(e) = of.try_lock(fh, LockWish { kind: None, ..wish }).await {
                let why = format_args!("the lock of a program that is gone was not released: {e}");
                log::warn("a lock was not released", why);
            }
        };
        if !sleep || wish.kind.is_none() {
            let work = async move { client.try_lock(fh, wish).await };
            return self.wait_or_undo(request, reply, work, answered, undo);
        }
        let (waits, unique) = (self.lock_waits.clone(), request.unique().0);
        let interrupt = waits.begin(unique);
        let work = async move {
            let locked = client.wait_lock(fh, wish, &interrupt).await;
            waits.end(unique);
            locked
        };
        self.wait_or_undo(request, reply, work, answered, undo);
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
