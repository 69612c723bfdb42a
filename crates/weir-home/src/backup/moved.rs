//! Paths of the last backup's directories by inode: computed only when a directory has been moved since.
use super::root;
use crate::HomePath;
use std::collections::BTreeMap;
use weir_client::Client;
use weir_proto::meta::FileKind;
use weir_proto::snapshot::Snapshot;
use weir_proto::{InodeId, Result};

/// Entries per request.
const LISTED_AT_ONCE: u32 = 1024;

/// Every directory of a snapshot, by a walk over all of it. Names that are not valid at home were never
/// there.
pub async fn places(client: &Client, of: &Snapshot, top: &HomePath) -> Result<BTreeMap<InodeId, HomePath>> {
    let mut places = BTreeMap::from([(of.root, top.clone())]);
    let mut left = vec![(of.root, top.clone())];
    while let Some((dir, path)) = left.pop() {
        let mut after = 0;
        loop {
            let part = client.snapshot_list(&root(), of.number, dir, after, LISTED_AT_ONCE).await?;
            for entry in &part.entries {
                after = entry.cookie;
                if entry.attr.kind == FileKind::Directory
                    && let Ok(below) = path.join(&entry.name)
                {
                    places.insert(entry.attr.ino, below.clone());
                    left.push((entry.attr.ino, below));
                }
            }
            if part.end || part.entries.is_empty() {
                break;
            }
        }
    }
    Ok(places)
}
