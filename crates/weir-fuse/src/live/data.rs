//! Data of open files: read, write, allocate, seek and copy.
//!
//! Invariant: a call that leases and buffers can answer is answered on the kernel's thread; one that has to
//! wait copies its bytes first, and continues as a task.
use super::privileges::{drop_privileges, has_none};
use crate::call::Call;
use crate::replies::*;
use bytes::Bytes;
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite};
use weir_client::{Allocate, COPY_BYTES_MAX, Client, Handle};
use weir_env::BufferPool;
use weir_proto::{InodeId, Result};

/// A read by a ring of this many bytes: its copy takes longer than the wake of another thread.
const COPIED_BY_A_WORKER: usize = 128 << 10;

pub struct Data {
    client: Client,
    buffers: BufferPool,
    /// A thread of the kernel's requests serves one processor.
    by_ring: bool,
}

pub struct Read {
    pub file: Handle,
    pub offset: u64,
    pub len: usize,
    /// For pages, possibly of a file that is read directly and mapped; not a program's own read.
    pub for_pages: bool,
}

pub struct Write<'a> {
    pub file: Handle,
    pub ino: InodeId,
    /// `None`: the end of the file.
    pub offset: Option<u64>,
    pub data: &'a [u8],
    /// The writer may not keep set-uid and set-gid.
    pub kills_privileges: bool,
}

pub struct Allocation {
    pub file: Handle,
    pub ino: InodeId,
    pub kind: Allocate,
    pub offset: u64,
    pub len: u64,
}

pub struct CopyRange {
    pub from: Handle,
    pub from_offset: u64,
    pub to: Handle,
    pub to_ino: InodeId,
    pub to_offset: u64,
    pub len: u64,
}

impl Data {
    pub fn new(client: Client, buffers: BufferPool, by_ring: bool) -> Data {
        Data { client, buffers, by_ring }
    }

    pub fn read(&self, call: Call<'_, ReplyData>, read: Read) {
        let Read { file, offset, len, for_pages } = read;
        if for_pages {
            self.client.keeps_pages(file);
        }
        let inside = call.enter(); // prefetches become tasks
        // A ring's thread continues while another thread copies that much.
        let by_a_worker = self.by_ring && len >= COPIED_BY_A_WORKER;
        let held = || self.client.try_read(file, offset, len);
        if let Some(result) = (!by_a_worker).then(held).flatten() {
            call.note_read(bytes_of(&result));
            return reply_data(call.reply(), result);
        }
        drop(inside);
        let (client, waits) = (self.client.clone(), call.interruptible());
        let work = async move {
            if by_a_worker {
                tokio::task::yield_now().await;
            }
            waits.recall(&client, file, Some(offset), len).await?;
            Ok(client.read(file, offset, len).await)
        };
        let reader = call.reader();
        call.wait(work, move |reply: ReplyData, read| match read {
            Ok(read) => {
                reader.read(bytes_of(&read));
                reply_data(reply, read);
            }
            Err(e) => reply.error(e),
        });
    }

    pub fn write(&self, call: Call<'_, ReplyWrite>, write: Write<'_>) {
        let Write { file, ino, offset, data, kills_privileges } = write;
        let strip = kills_privileges && !has_none(&self.client, ino);
        let inside = call.enter(); // sends of full stripes become tasks
        let taken = || match offset {
            Some(offset) => self.client.try_write(file, offset, data),
            None => self.client.try_append(file, data),
        };
        if !strip && let Some(result) = taken() {
            return reply_written(call.reply(), result);
        }
        drop(inside);
        let client = self.client.clone();
        let cred = strip.then(|| call.cred());
        let data = self.buffers.copy(data).freeze();
        let waits = call.interruptible();
        let work = async move {
            waits.recall(&client, file, offset, data.len()).await?;
            if let Some(cred) = cred
                && let Err(e) = drop_privileges(&client, &cred, ino).await
            {
                return Err(refused(&e));
            }
            Ok(match offset {
                Some(offset) => client.write(file, offset, data).await,
                None => client.append(file, data).await,
            })
        };
        call.wait(work, answer_written);
    }

    pub fn allocate(&self, call: Call<'_, ReplyEmpty>, allocation: Allocation) {
        let Allocation { file, ino, kind, offset, len } = allocation;
        let (client, cred, waits) = (self.client.clone(), call.cred(), call.interruptible());
        let work = async move {
            if !matches!(kind, Allocate::Extend | Allocate::Reserve) {
                waits.recall(&client, file, Some(offset), len as usize).await?;
            }
            let mut done = client.fallocate(file, kind, offset, len).await;
            // A change of data by a user who may not keep the bits; the kernel leaves their removal to us.
            if done.is_ok() && cred.uid != 0 {
                done = drop_privileges(&client, &cred, ino).await;
            }
            Ok(done)
        };
        call.wait(work, |reply: ReplyEmpty, done| match done {
            Ok(done) => reply_empty(reply, done),
            Err(e) => reply.error(e),
        });
    }

    pub fn seek(&self, call: Call<'_, ReplyLseek>, file: Handle, offset: u64, whence: i32) {
        let client = self.client.clone();
        if ![libc::SEEK_DATA, libc::SEEK_HOLE].contains(&whence) {
            return call.fail(Errno::EINVAL);
        }
        let work = async move {
            match whence {
                libc::SEEK_DATA => client.seek_data(file, offset).await,
                _ => client.seek_hole(file, offset).await,
            }
        };
        call.wait(work, |reply: ReplyLseek, found| match found {
            Ok(Some(at)) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
            Ok(None) => reply.error(Errno::ENXIO),
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub fn copy(&self, call: Call<'_, ReplyWrite>, copy: CopyRange) {
        let CopyRange { from, from_offset, to, to_ino, to_offset, len } = copy;
        let (client, cred, waits) = (self.client.clone(), call.cred(), call.interruptible());
        let work = async move {
            // At most as much as one call copies.
            let some = len.min(COPY_BYTES_MAX) as usize;
            for (file, at) in [(from, from_offset), (to, to_offset)] {
                waits.recall(&client, file, Some(at), some).await?;
            }
            let mut copied = client.copy_range(from, from_offset, to, to_offset, len).await;
            if copied.is_ok()
                && cred.uid != 0
                && let Err(e) = drop_privileges(&client, &cred, to_ino).await
            {
                copied = Err(e);
            }
            Ok(copied.map(|n| n as usize))
        };
        call.wait(work, answer_written);
    }
}

fn bytes_of(read: &Result<Vec<Bytes>>) -> usize {
    read.as_ref().map_or(0, |parts| parts.iter().map(Bytes::len).sum())
}

fn answer_written(reply: ReplyWrite, written: std::result::Result<Result<usize>, Errno>) {
    match written {
        Ok(written) => reply_written(reply, written),
        Err(e) => reply.error(e),
    }
}
