//! Attributes of inodes and of the file system: status, and changes of it.
use super::privileges::drop_privileges;
use crate::call::Call;
use crate::replies::*;
use fuser::{ReplyAttr, ReplyStatfs, ReplyStatx};
use weir_client::{Client, Handle, SetAttrs, Space, Stat};
use weir_proto::meta::NAME_MAX;
use weir_proto::posix::has_privileges;
use weir_proto::{ErrorKind, InodeId, Result};

/// Block size shown by `statfs`, in bytes.
const STATFS_BLOCK_BYTES: u64 = 4096;
/// Free inodes shown by `statfs`: their number has no limit.
const STATFS_FILES_FREE: u64 = 1 << 40;

pub struct Attributes {
    client: Client,
}

impl Attributes {
    pub fn new(client: Client) -> Attributes {
        Attributes { client }
    }

    pub fn statx(&self, call: Call<'_, ReplyStatx>, ino: InodeId) {
        if let Some(stat) = self.client.try_getattr(ino) {
            return reply_statx(call.reply(), Ok(stat));
        }
        let client = self.client.clone();
        call.wait(async move { stat_of(&client, ino).await }, reply_statx);
    }

    pub fn getattr(&self, call: Call<'_, ReplyAttr>, ino: InodeId) {
        if let Some(stat) = self.client.try_getattr(ino) {
            return reply_attr(call.reply(), Ok(stat));
        }
        let client = self.client.clone();
        call.wait(async move { stat_of(&client, ino).await }, reply_attr);
    }

    /// `file`: the open file through which a size is set.
    pub fn setattr(&self, call: Call<'_, ReplyAttr>, ino: InodeId, file: Option<Handle>, set: SetAttrs) {
        let (client, cred) = (self.client.clone(), call.cred());
        let work = async move {
            let mut result = client.setattr(&cred, ino, file, set).await;
            // The kernel sends an empty request if a program changed the owner to the present one.
            let same_owner = set == SetAttrs::default();
            if (same_owner || set.size.is_some() && cred.uid != 0)
                && result.as_ref().is_ok_and(|s| has_privileges(s.attr.mode))
            {
                result = match drop_privileges(&client, &cred, ino).await {
                    Ok(()) => client.getattr(ino).await,
                    Err(e) => Err(e),
                };
            }
            result
        };
        call.wait(work, reply_attr);
    }

    /// The space of the volume that contains an inode.
    pub fn statfs(&self, call: Call<'_, ReplyStatfs>, ino: InodeId) {
        let client = self.client.clone();
        call.wait(async move { client.statfs_at(ino).await }, reply_statfs);
    }
}

/// The attributes of an inode, even of one that is gone: the kernel asks because a program still has it open.
async fn stat_of(client: &Client, ino: InodeId) -> Result<Stat> {
    let found = client.getattr(ino).await;
    found.or_else(|e| client.last_attr(ino).filter(|_| e.kind == ErrorKind::Stale).ok_or(e))
}

fn reply_statfs(reply: ReplyStatfs, space: Result<Space>) {
    match space {
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
    }
}
