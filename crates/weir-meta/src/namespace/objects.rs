//! Objects: the numbers of a file's cells, which other files and snapshots may refer to as well.
use super::records::find_inode;
use crate::tables;
use weir_kv::Read;
use weir_proto::{InodeId, Result};

/// Numbers of objects that are not inodes' own. No directory serial reaches it.
pub const OBJECT_BIT: u64 = 1 << 62;

/// The number of records of snapshots and layers that refer to an object.
pub fn references(read: &dyn Read, object: InodeId) -> Result<i64> {
    Ok(tables::REFERENCES.get(read, object)?.unwrap_or(0))
}

/// Whether an object is a file's own: that file is the one with its number, or the one that was recorded when
/// it was shared.
pub fn is_owned(read: &dyn Read, object: InodeId) -> Result<bool> {
    let owner = match object.0 & OBJECT_BIT {
        0 => Some(object),
        _ => tables::OBJECT_OWNERS.get(read, object)?,
    };
    let Some(owner) = owner else { return Ok(false) };
    Ok(find_inode(read, owner)?.is_some_and(|inode| inode.object(owner) == object))
}
