//! Requests about attributes: status, changes of them, extended attributes, and those that the mount
//! answers itself.
use super::data::drop_privileges;
use super::handle;
use crate::mounted::Mounted;
use crate::replies::*;
use crate::snapshots::is_snapshot;
use crate::{credentials, translate as tr};
use bytes::Bytes;
use fuser::{
    Errno, FileHandle, INodeNo, ReplyAttr, ReplyEmpty, ReplyStatfs, ReplyStatx, ReplyXattr, Request,
    TimeOrNow,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use weir_client::{Client, SetAttrs, Stat};
use weir_proto::meta::NAME_MAX;
use weir_proto::posix::has_privileges;
use weir_proto::{ErrorKind, InodeId, Result};

/// Block size shown by `statfs`, in bytes.
const STATFS_BLOCK_BYTES: u64 = 4096;
/// Free inodes shown by `statfs`: their number has no limit.
const STATFS_FILES_FREE: u64 = 1 << 40;

/// Prefix of attribute names that the mount answers itself.
const OWN_PREFIX: &[u8] = b"weir.";

impl Mounted {
    /// Carries out the action of setting one of our attributes; it may take long, and a signal ends the wait.
    fn act(&self, request: &Request, ino: INodeNo, name: &str, value: &[u8], reply: ReplyEmpty) {
        let (cred, ino, from_home) =
            (self.cred(request), tr::from_kernel_ino(ino), self.waits_for_home(request));
        let acted = (self.own_acts)(&self.client, cred, ino, name.to_owned(), value.to_vec());
        self.answer(async move {
            match from_home.unless_interrupted(acted).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(e),
            }
        });
    }
}

/// The attributes of an inode, even of one that is gone: the kernel asks because a program still has it open.
async fn stat_of(client: &Client, ino: InodeId) -> Result<Stat> {
    let found = client.getattr(ino).await;
    found.or_else(|e| client.last_attr(ino).filter(|_| e.kind == ErrorKind::Stale).ok_or(e))
}

impl Mounted {
    pub(super) fn serve_statx(&self, request: &Request, ino: INodeNo, reply: ReplyStatx) {
        if is_snapshot(ino) {
            return self.snapshot_statx(request, ino, reply);
        }
        let ino = tr::from_kernel_ino(ino);
        if let Some(stat) = self.client.try_getattr(ino) {
            return reply_statx(reply, Ok(stat));
        }
        let client = self.client.clone();
        self.wait(request, reply, async move { stat_of(&client, ino).await }, reply_statx);
    }

    pub(super) fn serve_getattr(&self, request: &Request, ino: INodeNo, reply: ReplyAttr) {
        if is_snapshot(ino) {
            return self.snapshot_getattr(request, ino, reply);
        }
        let ino = tr::from_kernel_ino(ino);
        if let Some(stat) = self.client.try_getattr(ino) {
            return reply_attr(reply, Ok(stat));
        }
        let client = self.client.clone();
        self.wait(request, reply, async move { stat_of(&client, ino).await }, reply_attr);
    }

    pub(super) fn serve_setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        fh: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        let set = SetAttrs {
            mode: mode.map(tr::permissions),
            uid,
            gid,
            size,
            atime: atime.map(tr::set_time),
            mtime: mtime.map(tr::set_time),
        };
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let fh = fh.filter(|_| size.is_some()).map(handle);
        let work = async move {
            let mut result = client.setattr(&cred, ino, fh, set).await;
            // The kernel sends an empty request if a program changed the owner to the present one.
            let same_owner = set == SetAttrs::default();
            if (same_owner || size.is_some() && cred.uid != 0)
                && result.as_ref().is_ok_and(|s| has_privileges(s.attr.mode))
            {
                result = match drop_privileges(&client, &cred, ino).await {
                    Ok(()) => client.getattr(ino).await,
                    Err(e) => Err(e),
                };
            }
            result
        };
        self.wait(request, reply, work, reply_attr);
    }

    pub(super) fn serve_statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let client = self.client.clone();
        let ino = if is_snapshot(ino) { tr::top() } else { tr::from_kernel_ino(ino) };
        let work = async move { client.statfs_at(ino).await };
        self.wait(request, reply, work, |reply: ReplyStatfs, space| match space {
            Ok(space) => {
                let free = space.free_bytes / STATFS_BLOCK_BYTES;
                let files = space.files + space.directories;
                let all = space.inodes_max.unwrap_or(files + STATFS_FILES_FREE);
                let block = STATFS_BLOCK_BYTES as u32;
                reply.statfs(
                    space.capacity_bytes / STATFS_BLOCK_BYTES,
                    free,
                    free,
                    all,
                    all.saturating_sub(files),
                    block,
                    NAME_MAX as u32,
                    block,
                );
            }
            Err(e) => reply.error(refused(&e)),
        });
    }

    pub(super) fn serve_setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        reply: ReplyEmpty,
    ) {
        if is_snapshot(ino) {
            return reply.error(Errno::EROFS);
        }
        if is_foreign(name) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        if let Some(own) = name.to_str().filter(|n| n.as_bytes().starts_with(OWN_PREFIX)) {
            return self.act(request, ino, own, value, reply);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let (name, value) = (name.to_owned(), value.to_vec());
        let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
        let work =
            async move { client.set_xattr(&cred, ino, name.as_bytes(), &value, create, replace).await };
        self.wait(request, reply, work, reply_empty);
    }

    pub(super) fn serve_getxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        if is_foreign(name) {
            return reply.error(Errno::NO_XATTR);
        }
        if is_snapshot(ino) {
            return self.snapshot_getxattr(request, ino, name.as_bytes().to_vec(), size, reply);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        if let Some(own) = name.to_str().filter(|n| n.as_bytes().starts_with(OWN_PREFIX)) {
            let text = (self.own_attributes)(&client, ino, own);
            let work = async move { text.await.map(Bytes::from) };
            return self.wait(request, reply, work, move |reply, value| reply_xattr(reply, size, value));
        }
        let absent = absent_attribute(name);
        let name = name.to_owned();
        let work = async move { client.get_xattr(&cred, ino, name.as_bytes()).await };
        self.wait(request, reply, work, move |reply: ReplyXattr, value| match value {
            Err(e) if tr::errno(&e) == Errno::NO_XATTR => reply.error(absent),
            value => reply_xattr(reply, size, value),
        });
    }

    pub(super) fn serve_listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let thread = request.pid();
        if is_snapshot(ino) {
            return self.snapshot_listxattr(request, ino, size, reply);
        }
        let (client, cred, ino) = (self.client.clone(), self.cred(request), tr::from_kernel_ino(ino));
        let work = async move {
            let names = client.list_xattr(&cred, ino).await;
            names.map(|names| credentials::visible(&names, thread))
        };
        self.wait(request, reply, work, move |reply, names| reply_xattr(reply, size, names));
    }
}

/// Programs ask for it on every file, and it cannot have an effect here: a mount without set-uid programs
/// ignores file capabilities.
fn is_foreign(name: &OsStr) -> bool {
    name == "security.capability"
}

/// The answer that a file has no attribute of this name. `ls -l` asks each file for its label, but asks no
/// other file of a file system that answers that it has none; and labels have no effect here.
fn absent_attribute(name: &OsStr) -> Errno {
    if name == "security.selinux" { Errno::EOPNOTSUPP } else { Errno::NO_XATTR }
}
