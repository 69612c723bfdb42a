//! Names in directories of the live tree: lookup, new nodes, rename, links.
use super::streams::Streams;
use crate::call::Call;
use crate::entries::{Entries, Named, SNAPSHOTS_NAME};
use crate::replies::*;
use crate::snapshots::Snapshots;
use crate::tree::Name;
use fuser::{ReplyData, ReplyEmpty, ReplyEntry};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use weir_client::{Client, NewMode};
use weir_proto::meta::{FileKind, RenameMode};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result};

pub struct Names {
    client: Client,
    entries: Arc<Entries>,
    snapshots: Arc<Snapshots>,
    /// Listings of programs that look up what they list.
    streams: Arc<Streams>,
}

/// A node that is to be made without being opened.
pub struct NewNode {
    pub mode: NewMode,
    pub kind: FileKind,
    pub rdev: u32,
}

impl Names {
    pub fn new(
        client: Client,
        entries: Arc<Entries>,
        snapshots: Arc<Snapshots>,
        streams: Arc<Streams>,
    ) -> Names {
        Names { client, entries, snapshots, streams }
    }

    pub fn lookup(&self, call: Call<'_, ReplyEntry>, at: Name) {
        self.streams.note_lookup(at.dir);
        if at.name == SNAPSHOTS_NAME {
            return self.lookup_snapshots(call, at);
        }
        if let Some(known) = self.client.try_lookup(at.dir, &at.name) {
            return self.entries.named(at).reply_lookup(call.reply(), Ok(known));
        }
        let (client, cred, named) = (self.client.clone(), call.cred(), self.entries.named(at.clone()));
        let work = async move { client.lookup(&cred, at.dir, &at.name).await };
        call.wait(work, move |reply, answer| named.reply_lookup(reply, answer));
    }

    /// `.snapshots` is in the topmost directory of each volume; elsewhere it is an ordinary name.
    fn lookup_snapshots(&self, call: Call<'_, ReplyEntry>, at: Name) {
        let (client, snapshots, cred) = (self.client.clone(), self.snapshots.clone(), call.cred());
        let (named, of) = (self.entries.named(at.clone()), self.snapshots.clone());
        let work = async move {
            match snapshots.shown_in(at.dir).await {
                Some(volume) => Err(volume),
                None => Ok(client.lookup(&cred, at.dir, SNAPSHOTS_NAME).await),
            }
        };
        call.wait(work, move |reply, found| match found {
            Err(volume) => of.reply_list(reply, volume),
            Ok(answer) => named.reply_lookup(reply, answer),
        });
    }

    pub fn readlink(&self, call: Call<'_, ReplyData>, ino: InodeId) {
        let client = self.client.clone();
        let work = async move { client.readlink(ino).await.map(|target| vec![target]) };
        call.wait(work, reply_data);
    }

    pub fn mknod(&self, call: Call<'_, ReplyEntry>, at: Name, node: NewNode) {
        let (client, cred, named) = (self.client.clone(), call.cred(), self.entries.named(at.clone()));
        let NewNode { mode, kind, rdev } = node;
        let work = async move { client.mknod(&cred, at.dir, &at.name, mode, kind, rdev).await };
        call.wait(work, answer_with(named));
    }

    pub fn mkdir(&self, call: Call<'_, ReplyEntry>, at: Name, mode: NewMode) {
        let (client, cred, named) = (self.client.clone(), call.cred(), self.entries.named(at.clone()));
        let work = async move { client.mkdir(&cred, at.dir, &at.name, mode).await };
        call.wait(work, answer_with(named));
    }

    pub fn symlink(&self, call: Call<'_, ReplyEntry>, at: Name, target: &Path) {
        let (client, cred, named) = (self.client.clone(), call.cred(), self.entries.named(at.clone()));
        let target = target.to_owned();
        let work = async move {
            let target = target.as_os_str().as_bytes();
            client.symlink(&cred, at.dir, &at.name, target).await
        };
        call.wait(work, answer_with(named));
    }

    pub fn link(&self, call: Call<'_, ReplyEntry>, ino: InodeId, to: Name) {
        let (client, cred, named) = (self.client.clone(), call.cred(), self.entries.named(to.clone()));
        let work = async move { client.link(&cred, ino, to.dir, &to.name).await };
        call.wait(work, answer_with(named));
    }

    pub fn unlink(&self, call: Call<'_, ReplyEmpty>, at: Name) {
        let (client, cred) = (self.client.clone(), call.cred());
        call.wait(async move { client.unlink(&cred, at.dir, &at.name).await }, reply_empty);
    }

    pub fn rmdir(&self, call: Call<'_, ReplyEmpty>, at: Name) {
        let (client, snapshots, cred) = (self.client.clone(), self.snapshots.clone(), call.cred());
        let work = async move {
            let removed = client.rmdir(&cred, at.dir, &at.name).await;
            changed(&snapshots, at, removed).await
        };
        call.wait(work, reply_empty);
    }

    pub fn rename(&self, call: Call<'_, ReplyEmpty>, from: Name, to: Name, mode: RenameMode) {
        let (client, snapshots, cred) = (self.client.clone(), self.snapshots.clone(), call.cred());
        let work = async move {
            let renamed = client.rename(&cred, from.dir, &from.name, to.dir, &to.name, mode).await;
            changed(&snapshots, from, renamed).await
        };
        call.wait(work, reply_empty);
    }
}

fn answer_with(named: Named) -> impl FnOnce(ReplyEntry, Result<weir_client::Stat>) + Send + 'static {
    move |reply, made| named.reply_entry(reply, made)
}

/// The answer to a change of a name. The leader has no `.snapshots`; the entry that a volume's directory
/// shows cannot be changed.
async fn changed(snapshots: &Snapshots, at: Name, done: Result<()>) -> Result<()> {
    let absent = done.as_ref().is_err_and(|e| e.kind == ErrorKind::NotFound);
    if absent && at.name == SNAPSHOTS_NAME && snapshots.shown_in(at.dir).await.is_some() {
        let what = "the list of a volume's snapshots is neither removed nor renamed";
        return Err(Error::name(NameRule::ReadOnly, what));
    }
    done
}
