//! Requests for data: read, write, allocate, seek and copy. A change of data by another user removes set-
//! uid and set-gid.
use super::handle;
use crate::from_home::FromHome;
use crate::mounted::Mounted;
use crate::replies::*;
use crate::snapshots::{is_snapshot, is_snapshot_handle};
use crate::translate as tr;
use bytes::Bytes;
use fuser::{
    Errno, FileHandle, INodeNo, LockOwner, OpenFlags, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite, Request,
    WriteFlags,
};
use weir_client::{Allocate, COPY_BYTES_MAX, Client, SetAttrs};
use weir_proto::meta::{Cred, FileKind};
use weir_proto::posix::{Owned, has_privileges};
use weir_proto::{InodeId, Result};

/// A read by a ring of this many bytes: its copy takes longer than the wake of another thread.
const COPIED_BY_A_WORKER: usize = 128 << 10;

impl Mounted {
    pub(super) fn waits_for_home(&self, request: &Request) -> FromHome {
        FromHome::new(&self.client, &self.lock_waits, request)
    }

    /// `true`: no bits to remove (the common case, answered from the cache).
    fn keeps_no_privileges(&self, ino: InodeId) -> bool {
        self.client.try_getattr(ino).is_some_and(|stat| !has_privileges(stat.attr.mode))
    }
}

/// Removes set-uid and set-gid, as a change of data by another user does.
pub(super) async fn drop_privileges(client: &Client, cred: &Cred, ino: InodeId) -> Result<()> {
    let attr = client.getattr(ino).await?.attr;
    let mode = Owned::of(&attr).without_privileges(cred);
    if attr.kind == FileKind::Directory || mode == attr.mode {
        return Ok(());
    }
    // The right to write suffices to remove them.
    let set = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
    client.setattr_unasked(cred, ino, set).await
}

fn bytes_of(read: &Result<Vec<Bytes>>) -> usize {
    read.as_ref().map_or(0, |parts| parts.iter().map(Bytes::len).sum())
}

impl Mounted {
    pub(super) fn serve_read(
        &self,
        request: &Request,
        fh: FileHandle,
        offset: u64,
        size: u32,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if is_snapshot_handle(fh) {
            return self.snapshot_read(request, fh, offset, size as usize, reply);
        }
        let (fh, len) = (handle(fh), size as usize);
        // Only a program's own read names its owner; this one is for pages, possibly of a file that is read
        // directly and mapped.
        if lock_owner.is_none() {
            self.client.keeps_pages(fh);
        }
        let inside = self.runtime.enter(); // prefetches become tasks
        // A ring's thread serves one processor: it continues while another thread copies that much.
        let by_a_worker = self.by_ring && len >= COPIED_BY_A_WORKER;
        let held = || self.client.try_read(fh, offset, len);
        if let Some(result) = (!by_a_worker).then(held).flatten() {
            self.work.read(request, bytes_of(&result));
            return reply_data(reply, result);
        }
        drop(inside);
        let (client, from_home) = (self.client.clone(), self.waits_for_home(request));
        let work = async move {
            if by_a_worker {
                tokio::task::yield_now().await;
            }
            from_home.recall(fh, Some(offset), len).await?;
            Ok(client.read(fh, offset, len).await)
        };
        let reader = self.work.reader(request);
        self.wait(request, reply, work, move |reply: ReplyData, read| match read {
            Ok(read) => {
                reader.read(bytes_of(&read));
                reply_data(reply, read);
            }
            Err(e) => reply.error(e),
        });
    }

    pub(super) fn serve_write(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        reply: ReplyWrite,
    ) {
        let (fh, ino) = (handle(fh), tr::from_kernel_ino(ino));
        let strip =
            write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) && !self.keeps_no_privileges(ino);
        let inside = self.runtime.enter(); // sends of full stripes become tasks
        // The descriptor's present flags (`fcntl` may change them). Pages go to their own offset.
        let appends = flags.0 & libc::O_APPEND != 0 && !write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let taken = || match appends {
            true => self.client.try_append(fh, data),
            false => self.client.try_write(fh, offset, data),
        };
        if !strip && let Some(result) = taken() {
            return reply_written(reply, result);
        }
        drop(inside);
        let client = self.client.clone();
        let cred = strip.then(|| self.cred(request));
        let data = self.buffers.copy(data).freeze();
        let from_home = self.waits_for_home(request);
        let work = async move {
            from_home.recall(fh, (!appends).then_some(offset), data.len()).await?;
            if let Some(cred) = cred
                && let Err(e) = drop_privileges(&client, &cred, ino).await
            {
                return Err(refused(&e));
            }
            Ok(match appends {
                true => client.append(fh, data).await,
                false => client.write(fh, offset, data).await,
            })
        };
        self.wait(request, reply, work, answer_written);
    }

    pub(super) fn serve_fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        let what = match tr::allocate(mode) {
            Ok(what) => what,
            Err(e) => return reply.error(e),
        };
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let from_home = self.waits_for_home(request);
        let work = async move {
            if !matches!(what, Allocate::Extend | Allocate::Reserve) {
                from_home.recall(handle(fh), Some(offset), length as usize).await?;
            }
            let mut done = client.fallocate(handle(fh), what, offset, length).await;
            // A change of data by a user who may not keep the bits; the kernel leaves their removal to us.
            if done.is_ok() && cred.uid != 0 {
                done = drop_privileges(&client, &cred, ino).await;
            }
            Ok(done)
        };
        self.wait(request, reply, work, |reply: ReplyEmpty, done| match done {
            Ok(done) => reply_empty(reply, done),
            Err(e) => reply.error(e),
        });
    }

    pub(super) fn serve_lseek(
        &self,
        request: &Request,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        if is_snapshot_handle(fh) {
            return self.snapshot_lseek(fh, offset, whence == libc::SEEK_DATA, reply);
        }
        let (client, fh) = (self.client.clone(), handle(fh));
        if ![libc::SEEK_DATA, libc::SEEK_HOLE].contains(&whence) {
            return reply.error(Errno::EINVAL);
        }
        let work = async move {
            match whence {
                libc::SEEK_DATA => client.seek_data(fh, offset).await,
                _ => client.seek_hole(fh, offset).await,
            }
        };
        self.wait(request, reply, work, |reply: ReplyLseek, found| match found {
            Ok(Some(at)) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
            Ok(None) => reply.error(Errno::ENXIO),
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub(super) fn serve_copy_file_range(
        &self,
        request: &Request,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        reply: ReplyWrite,
    ) {
        if is_snapshot_handle(fh_in) {
            return reply.error(Errno::EXDEV); // then the kernel reads and writes
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino_out));
        let (from, to) = (handle(fh_in), handle(fh_out));
        let from_home = self.waits_for_home(request);
        let work = async move {
            // At most as much as one call copies.
            let some = len.min(COPY_BYTES_MAX) as usize;
            for (file, at) in [(from, offset_in), (to, offset_out)] {
                from_home.recall(file, Some(at), some).await?;
            }
            let mut copied = client.copy_range(from, offset_in, to, offset_out, len).await;
            if copied.is_ok()
                && cred.uid != 0
                && let Err(e) = drop_privileges(&client, &cred, ino).await
            {
                copied = Err(e);
            }
            Ok(copied.map(|n| n as usize))
        };
        self.wait(request, reply, work, answer_written);
    }
}

fn answer_written(reply: ReplyWrite, written: std::result::Result<Result<usize>, Errno>) {
    match written {
        Ok(written) => reply_written(reply, written),
        Err(e) => reply.error(e),
    }
}
