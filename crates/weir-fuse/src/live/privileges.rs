//! Set-uid and set-gid: a change of a file's data by another user removes them.
use weir_client::{Client, SetAttrs};
use weir_proto::meta::{Cred, FileKind};
use weir_proto::posix::{Owned, has_privileges};
use weir_proto::{InodeId, Result};

/// `true`: no bits to remove (the common case, answered from the cache).
pub fn has_none(client: &Client, ino: InodeId) -> bool {
    client.try_getattr(ino).is_some_and(|stat| !has_privileges(stat.attr.mode))
}

/// Removes set-uid and set-gid, as a change of data by another user does.
pub async fn drop_privileges(client: &Client, cred: &Cred, ino: InodeId) -> Result<()> {
    let attr = client.getattr(ino).await?.attr;
    let mode = Owned::of(&attr).without_privileges(cred);
    if attr.kind == FileKind::Directory || mode == attr.mode {
        return Ok(());
    }
    // The right to write suffices to remove them.
    let set = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
    client.setattr_unasked(cred, ino, set).await
}
