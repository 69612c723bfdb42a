//! Results of the client as answers to the kernel. Errors become numbers here, and are logged once.
use crate::log;
use crate::translate as tr;
use bytes::Bytes;
use fuser::{
    Errno, FileType, INodeNo, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyStatx, ReplyWrite,
    ReplyXattr,
};
use std::io::IoSlice;
use weir_client::{Locked, Stat};
use weir_proto::{Error, Result};

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
pub fn reply_locked(reply: ReplyEmpty, locked: Result<Locked>) {
    let errno = match locked {
        Ok(Locked::Granted) => return reply.ok(),
        Ok(Locked::Held) => Errno::EAGAIN,
        Ok(Locked::Deadlock) => Errno::EDEADLK,
        Ok(Locked::Full) => Errno::ENOLCK,
        Ok(Locked::Interrupted) => Errno::EINTR,
        Err(e) => {
            log::warn("a lock failed", &e);
            tr::errno(&e)
        }
    };
    reply.error(errno);
}
pub fn reply_written(reply: ReplyWrite, result: Result<usize>) {
    match result {
        Ok(n) => reply.written(n as u32),
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

/// Cookies 1 and 2 are "." and "..": the client's start above.
pub const DOTS: u64 = 2;

/// Begins a listing that is read from `offset` on. True: they did not fit.
pub fn add_dots(reply: &mut ReplyDirectory, dir: INodeNo, offset: u64) -> bool {
    let dots = [(1, "."), (2, "..")].into_iter();
    dots.filter(|(at, _)| offset < *at).any(|(at, name)| reply.add(dir, at, FileType::Directory, name))
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
