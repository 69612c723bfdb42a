//! Client calls that several workloads share.

use bytes::Bytes;
use weir_client::{Client, Handle, NewVolume, OpenMode};
use weir_proto::meta::Cred;
use weir_proto::volume::{Policy, Quota, TRASH};
use weir_proto::{Error, ErrorKind, InodeId};

pub fn root_cred() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![] }
}

/// The file or name does not exist any more.
pub fn is_gone(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::NotFound | ErrorKind::Stale)
}

/// A volume without limits, in the root volume's root directory.
pub fn new_volume(name: &str) -> NewVolume {
    NewVolume {
        name: name.to_owned(),
        path: Bytes::from(format!("/{name}")),
        owner: 0,
        group: 0,
        mode: 0o755,
        admins: Vec::new(),
        quota: Quota::NONE,
        policy: Policy { scheme: None, pool: None },
    }
}

/// Closes a file, and makes it durable: its client and the leader may crash at once.
pub async fn close(client: &Client, handle: Handle) -> Result<(), Error> {
    let flushed = client.flush(handle).await;
    let synced = client.fsync(handle).await;
    let released = client.release(handle).await;
    flushed.and(synced).and(released)
}

pub async fn read_whole(client: &Client, ino: InodeId) -> Result<Vec<u8>, Error> {
    let handle = client.open(&root_cred(), ino, OpenMode::READ).await?.handle;
    let got = read_all(client, handle, 0, usize::MAX).await?;
    client.release(handle).await?;
    Ok(got)
}

/// Reads until `len` bytes or the end of the file.
pub async fn read_all(client: &Client, handle: Handle, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
    /// The size of programs' reads.
    const READ_BYTES_MAX: usize = 2 << 20;
    let mut all: Vec<u8> = Vec::new();
    while all.len() < len {
        let want = (len - all.len()).min(READ_BYTES_MAX);
        let parts: Vec<Bytes> = client.read(handle, offset + all.len() as u64, want).await?;
        if parts.iter().all(|p| p.is_empty()) {
            break;
        }
        parts.iter().for_each(|p| all.extend_from_slice(p));
    }
    Ok(all)
}

pub async fn names_in(client: &Client, dir: InodeId) -> Result<Vec<String>, Error> {
    let (mut names, mut after) = (Vec::new(), 0);
    loop {
        let listing = client.readdir(&root_cred(), dir, after, 3, false).await?;
        for entry in &listing.entries {
            after = entry.cookie;
            names.push(String::from_utf8_lossy(&entry.name).into_owned());
        }
        if listing.end {
            return Ok(names);
        }
    }
}

/// The root directory of the trash.
pub async fn trash_top(client: &Client) -> Result<Option<InodeId>, Error> {
    let found = client.lookup(&root_cred(), InodeId::ROOT, TRASH).await?;
    Ok(found.map(|stat| stat.attr.ino))
}
