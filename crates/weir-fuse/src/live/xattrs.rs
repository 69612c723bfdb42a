//! Extended attributes of the live tree, and those of `weir.` that the mount answers itself.
use crate::call::Call;
use crate::credentials;
use crate::replies::*;
use crate::translate as tr;
use bytes::Bytes;
use fuser::{Errno, ReplyEmpty, ReplyXattr};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::pin::Pin;
use std::sync::Arc;
use weir_client::Client;
use weir_proto::meta::Cred;
use weir_proto::{InodeId, Result};

/// Prefix of attribute names that the mount answers itself.
const OWN_PREFIX: &str = "weir.";

/// Answers for attributes of ours (`weir.layout`, …): inode, name → text.
pub type OwnAttributes = Arc<dyn Fn(&Client, InodeId, &str) -> OwnAnswer + Send + Sync>;

pub type OwnAnswer = Pin<Box<dyn Future<Output = Result<String>> + Send>>;

/// The action when a program sets one of our attributes: by whom, inode, name, value.
pub type OwnActs = Arc<dyn Fn(&Client, Cred, InodeId, String, Vec<u8>) -> OwnAct + Send + Sync>;

pub type OwnAct = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

pub struct Xattrs {
    client: Client,
    own_attributes: OwnAttributes,
    own_acts: OwnActs,
}

/// A new value of an attribute.
pub struct NewValue<'a> {
    pub name: &'a OsStr,
    pub value: &'a [u8],
    /// `XATTR_CREATE`, `XATTR_REPLACE`.
    pub flags: i32,
}

impl Xattrs {
    pub fn new(client: Client, own_attributes: OwnAttributes, own_acts: OwnActs) -> Xattrs {
        Xattrs { client, own_attributes, own_acts }
    }

    /// `size`: of the program's buffer; 0: it asks for the size.
    pub fn get(&self, call: Call<'_, ReplyXattr>, ino: InodeId, name: &OsStr, size: u32) {
        if let Some(own) = own(name) {
            let text = (self.own_attributes)(&self.client, ino, own);
            let work = async move { text.await.map(Bytes::from) };
            return call.wait(work, move |reply, value| reply_xattr(reply, size, value));
        }
        let (client, cred) = (self.client.clone(), call.cred());
        let (name, absent) = (name.to_owned(), absent_attribute(name));
        let work = async move { client.get_xattr(&cred, ino, name.as_bytes()).await };
        call.wait(work, move |reply: ReplyXattr, value| match value {
            Err(e) if tr::errno(&e) == Errno::NO_XATTR => reply.error(absent),
            value => reply_xattr(reply, size, value),
        });
    }

    pub fn list(&self, call: Call<'_, ReplyXattr>, ino: InodeId, size: u32) {
        let (client, cred, thread) = (self.client.clone(), call.cred(), call.thread());
        let work = async move {
            let names = client.list_xattr(&cred, ino).await;
            names.map(|names| credentials::visible(&names, thread))
        };
        call.wait(work, move |reply, names| reply_xattr(reply, size, names));
    }

    pub fn set(&self, call: Call<'_, ReplyEmpty>, ino: InodeId, new: NewValue<'_>) {
        let NewValue { name, value, flags } = new;
        if is_foreign(name) {
            return call.fail(Errno::EOPNOTSUPP);
        }
        if let Some(own) = own(name) {
            return self.act(call, ino, own, value);
        }
        let (client, cred) = (self.client.clone(), call.cred());
        let (name, value) = (name.to_owned(), value.to_vec());
        let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
        let work =
            async move { client.set_xattr(&cred, ino, name.as_bytes(), &value, create, replace).await };
        call.wait(work, reply_empty);
    }

    /// Carries out the action of setting one of our attributes; it may take long, and a signal ends the wait.
    fn act(&self, call: Call<'_, ReplyEmpty>, ino: InodeId, name: &str, value: &[u8]) {
        let waits = call.interruptible();
        let acted = (self.own_acts)(&self.client, call.cred(), ino, name.to_owned(), value.to_vec());
        call.answer(|reply| async move {
            match waits.unless_interrupted(acted).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(e),
            }
        });
    }

    pub fn remove(&self, call: Call<'_, ReplyEmpty>, ino: InodeId, name: &OsStr) {
        let (client, cred, name) = (self.client.clone(), call.cred(), name.to_owned());
        call.wait(async move { client.remove_xattr(&cred, ino, name.as_bytes()).await }, reply_empty);
    }
}

/// The name of an attribute that the mount answers itself.
fn own(name: &OsStr) -> Option<&str> {
    name.to_str().filter(|name| name.starts_with(OWN_PREFIX))
}

/// Programs ask for it on every file, and it cannot have an effect here: a mount without set-uid programs
/// ignores file capabilities.
pub fn is_foreign(name: &OsStr) -> bool {
    name == "security.capability"
}

/// The answer that a file has no attribute of this name. `ls -l` asks each file for its label, but asks no
/// other file of a file system that answers that it has none; and labels have no effect here.
fn absent_attribute(name: &OsStr) -> Errno {
    if name == "security.selinux" { Errno::EOPNOTSUPP } else { Errno::NO_XATTR }
}
