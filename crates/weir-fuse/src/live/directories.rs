//! Listings of directories of the live tree.
use super::streams::{Fill, Streams};
use crate::call::Call;
use crate::entries::Entries;
use crate::replies::*;
use crate::translate as tr;
use crate::tree::to_kernel_ino;
use fuser::{FileHandle, FileType, FopenFlags, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyOpen};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use weir_client::Client;
use weir_proto::meta::Listing;
use weir_proto::{InodeId, Result};

/// Entries per request to the client; the kernel's buffer takes about as many.
const LISTING_LIMIT: u32 = 256;

pub struct Directories {
    client: Client,
    entries: Arc<Entries>,
    /// Directories that the kernel is reading, in both trees.
    streams: Arc<Streams>,
}

/// The next part of a stream.
#[derive(Clone, Copy)]
pub struct Next {
    pub dir: InodeId,
    pub stream: FileHandle,
    pub offset: u64,
}

impl Directories {
    pub fn new(client: Client, entries: Arc<Entries>, streams: Arc<Streams>) -> Directories {
        Directories { client, entries, streams }
    }

    pub fn open(&self, call: Call<'_, ReplyOpen>, dir: InodeId) {
        let stream = self.streams.open(dir, call.cred());
        call.reply().opened(stream, FopenFlags::empty());
    }

    pub fn close(&self, stream: FileHandle) {
        self.streams.close(stream);
    }

    pub fn read(&self, mut call: Call<'_, ReplyDirectory>, next: Next) {
        if add_dots(call.reply_mut(), to_kernel_ino(next.dir), next.offset) {
            return call.reply().ok();
        }
        let (client, streams) = (self.client.clone(), self.streams.clone());
        let work = async move { list(&client, &streams, next, LISTING_LIMIT, false).await };
        call.wait(work, |mut reply: ReplyDirectory, listing| {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => return reply.error(refused(&e)),
            };
            for entry in listing.entries {
                let (ino, kind) = (to_kernel_ino(entry.ino), tr::file_type(entry.kind));
                if reply.add(ino, entry.cookie + DOTS, kind, OsStr::from_bytes(&entry.name)) {
                    break;
                }
            }
            reply.ok();
        });
    }

    /// With all that the kernel may keep of each entry, if that is used.
    pub fn read_plus(&self, mut call: Call<'_, ReplyDirectoryPlus>, next: Next) {
        let (reply, ino) = (call.reply_mut(), to_kernel_ino(next.dir));
        for (at, name) in [(1, "."), (2, "..")] {
            if next.offset < at && reply.add_name(ino, at, name, FileType::Directory) {
                return call.reply().ok();
            }
        }
        // More would be listed again for the next request.
        let limit = LISTING_LIMIT.min(reply.entries_max() as u32 + 1);
        let (client, streams, entries) = (self.client.clone(), self.streams.clone(), self.entries.clone());
        let (fill, noted) = (streams.fill(next.stream, next.offset), streams.clone());
        let work = async move { list(&client, &streams, next, limit, fill != Fill::None).await };
        call.wait(work, move |mut reply: ReplyDirectoryPlus, listing| {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => return reply.error(refused(&e)),
            };
            let (mut listed, mut is_bare) = (0, fill != Fill::All);
            for entry in listing.entries {
                let is_full = match is_bare {
                    true => entries.add_bare(&mut reply, entry.cookie + DOTS, &entry),
                    false => entries.add(next.dir, &mut reply, entry.cookie + DOTS, &entry),
                };
                if is_full {
                    break;
                }
                (listed, is_bare) = (listed + 1, fill == Fill::None);
            }
            noted.note_listed(next.stream, listed);
            reply.ok();
        });
    }

    /// Makes changes of names durable that the client made locally, or that were answered early.
    pub fn sync(&self, call: Call<'_, ReplyEmpty>, dir: InodeId) {
        let client = self.client.clone();
        call.wait(async move { client.sync_names(dir).await }, reply_empty);
    }
}

/// The next entries of a stream, without those made after it was begun.
async fn list(
    client: &Client,
    streams: &Streams,
    next: Next,
    limit: u32,
    with_attrs: bool,
) -> Result<Listing> {
    let Next { dir, stream, offset } = next;
    let cred = streams.opened_by(stream);
    let mut listing = client.readdir(&cred, dir, offset.saturating_sub(DOTS), limit, with_attrs).await?;
    let end = streams.end(stream, offset, listing.newest);
    listing.entries.retain(|entry| entry.cookie <= end);
    Ok(listing)
}
