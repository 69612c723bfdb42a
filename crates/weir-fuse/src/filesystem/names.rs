//! Requests about names: lookup, new nodes, rename, links.
use crate::mounted::Mounted;
use crate::replies::*;
use crate::snapshots::is_snapshot;
use crate::translate as tr;
use fuser::{Errno, INodeNo, RenameFlags, ReplyEmpty, ReplyEntry, Request};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use weir_proto::InodeId;

impl Mounted {
    /// `.snapshots` is in the topmost directory of each volume; elsewhere it is an ordinary name.
    fn lookup_snapshots(&self, request: &Request, parent: InodeId, reply: ReplyEntry) {
        let (client, table, cred) = (self.client.clone(), self.snapshots.clone(), self.cred(request));
        let named = self.named(parent, SNAPSHOTS_NAME);
        let work = async move {
            match Self::snapshots_of(&client, parent).await {
                Some(volume) => Err(volume),
                None => Ok(client.lookup(&cred, parent, SNAPSHOTS_NAME).await),
            }
        };
        self.wait(request, reply, work, move |reply, found| match found {
            Err(volume) => Self::reply_snapshots(&table, reply, volume),
            Ok(answer) => reply_lookup(&named, reply, answer),
        });
    }
}

impl Mounted {
    pub(super) fn serve_lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if is_snapshot(parent) {
            return self.snapshot_lookup(request, parent, name.as_bytes().to_vec(), reply);
        }
        let parent = tr::from_kernel_ino(parent);
        if name.as_bytes() == SNAPSHOTS_NAME {
            return self.lookup_snapshots(request, parent, reply);
        }
        let named = self.named(parent, name.as_bytes());
        if let Some(known) = self.client.try_lookup(parent, name.as_bytes()) {
            return reply_lookup(&named, reply, Ok(known));
        }
        let (client, cred, name) = (self.client.clone(), self.cred(request), name.to_owned());
        self.wait(
            request,
            reply,
            async move { client.lookup(&cred, parent, name.as_bytes()).await },
            move |reply, answer| reply_lookup(&named, reply, answer),
        );
    }

    pub(super) fn serve_mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let Some(kind) = tr::node_kind(mode) else { return reply.error(Errno::EINVAL) };
        let (mode, named) = (tr::new_mode(mode, umask), self.named(parent, &name));
        self.wait(
            request,
            reply,
            async move { client.mknod(&cred, parent, &name, mode, kind, rdev).await },
            move |reply, made| reply_entry(&named, reply, made),
        );
    }

    pub(super) fn serve_mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let (mode, named) = (tr::new_mode(mode, umask), self.named(parent, &name));
        self.wait(
            request,
            reply,
            async move { client.mkdir(&cred, parent, &name, mode).await },
            move |reply, made| reply_entry(&named, reply, made),
        );
    }

    pub(super) fn serve_rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let work = async move {
            let removed = client.rmdir(&cred, parent, &name).await;
            Self::changed(&client, parent, &name, removed).await
        };
        self.wait(request, reply, work, reply_empty);
    }

    pub(super) fn serve_symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let Some((client, cred, parent, name)) = self.naming(request, parent, name) else {
            return reply.error(Errno::EROFS);
        };
        let (target, named) = (target.to_owned(), self.named(parent, &name));
        let work = async move {
            let target = target.as_os_str().as_bytes();
            client.symlink(&cred, parent, &name, target).await
        };
        self.wait(request, reply, work, move |reply, made| reply_entry(&named, reply, made));
    }

    pub(super) fn serve_rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if is_snapshot(parent) || is_snapshot(newparent) {
            return reply.error(Errno::EROFS);
        }
        let Some(mode) = tr::rename_mode(flags) else { return reply.error(Errno::EINVAL) };
        let (client, cred) = (self.client.clone(), self.cred(request));
        let (parent, newparent) = (tr::from_kernel_ino(parent), tr::from_kernel_ino(newparent));
        let (name, newname) = (name.to_owned(), newname.to_owned());
        let work = async move {
            let (name, newname) = (name.as_bytes(), newname.as_bytes());
            let renamed = client.rename(&cred, parent, name, newparent, newname, mode).await;
            Self::changed(&client, parent, name, renamed).await
        };
        self.wait(request, reply, work, reply_empty);
    }

    pub(super) fn serve_link(
        &self,
        request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        if is_snapshot(ino) || is_snapshot(newparent) {
            return reply.error(Errno::EROFS);
        }
        let (client, cred, name) = (self.client.clone(), self.cred(request), newname.to_owned());
        let (ino, parent) = (tr::from_kernel_ino(ino), tr::from_kernel_ino(newparent));
        let named = self.named(parent, newname.as_bytes());
        self.wait(
            request,
            reply,
            async move { client.link(&cred, ino, parent, name.as_bytes()).await },
            move |reply, made| reply_entry(&named, reply, made),
        );
    }
}
