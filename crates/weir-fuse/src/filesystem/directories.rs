//! Requests for listings of directories.
use crate::mounted::Mounted;
use crate::replies::*;
use crate::snapshots::is_snapshot;
use crate::streams::Streams;
use crate::translate as tr;
use fuser::{FileHandle, INodeNo, ReplyDirectory, ReplyDirectoryPlus, Request};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use weir_client::Client;
use weir_proto::meta::Listing;
use weir_proto::{InodeId, Result};

/// Entries per request to the client; the kernel's buffer takes about as many.
const LISTING_LIMIT: u32 = 256;
/// Cookies 1 and 2 are "." and "..": the client's start above.
const DOTS: u64 = 2;

impl Mounted {
    pub(super) fn serve_readdir(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if is_snapshot(ino) {
            return self.snapshot_readdir(request, ino, offset, reply);
        }
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add(ino, at, fuser::FileType::Directory, name) {
                return reply.ok();
            }
        }
        let (client, dir) = (self.client.clone(), tr::from_kernel_ino(ino));
        let streams = self.streams.clone();
        let work = async move { list(&client, (&streams, fh), dir, offset, LISTING_LIMIT, false).await };
        self.wait(request, reply, work, |mut reply: ReplyDirectory, listing| {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => return reply.error(refused(&e)),
            };
            for entry in listing.entries {
                let name = OsStr::from_bytes(&entry.name);
                if reply.add(
                    tr::to_kernel_ino(entry.ino),
                    entry.cookie + DOTS,
                    tr::file_type(entry.kind),
                    name,
                ) {
                    break;
                }
            }
            reply.ok();
        });
    }

    pub(super) fn serve_readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        if is_snapshot(ino) {
            return self.snapshot_readdirplus(request, ino, offset, reply);
        }
        for (at, name) in [(1, "."), (2, "..")] {
            if offset < at && reply.add_name(ino, at, name, fuser::FileType::Directory) {
                return reply.ok();
            }
        }
        let (client, dir) = (self.client.clone(), tr::from_kernel_ino(ino));
        let streams = self.streams.clone();
        let mut named = self.named(dir, b"");
        // More would be listed again for the next request.
        let limit = LISTING_LIMIT.min(reply.entries_max() as u32 + 1);
        let work = async move { list(&client, (&streams, fh), dir, offset, limit, true).await };
        self.wait(request, reply, work, move |mut reply: ReplyDirectoryPlus, listing| {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => return reply.error(refused(&e)),
            };
            for entry in listing.entries {
                named.name = entry.name.to_vec();
                if add_entry(&named, &mut reply, entry.cookie + DOTS, &entry) {
                    break;
                }
            }
            reply.ok();
        });
    }
}

/// The next entries of a stream, without those made after it was begun.
async fn list(
    client: &Client,
    (streams, fh): (&Streams, FileHandle),
    dir: InodeId,
    offset: u64,
    limit: u32,
    with_attrs: bool,
) -> Result<Listing> {
    let cred = streams.opened_by(fh);
    let mut listing = client.readdir(&cred, dir, offset.saturating_sub(DOTS), limit, with_attrs).await?;
    let end = streams.end(fh, offset, listing.newest);
    listing.entries.retain(|entry| entry.cookie <= end);
    Ok(listing)
}
