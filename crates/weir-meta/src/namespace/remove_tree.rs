//! Removes the names below a directory, a few at a time and deepest first: of a deleted volume, of a part of
//! the trash, of a directory that is gone at home.
use super::*;
use crate::record::Listed;
use bytes::Bytes;
use volume::volume_of;

/// Names that one step of a removal removes.
const REMOVED_AT_ONCE: usize = 128;

/// Drops further records of a removed name: its directory, the name, its inode.
pub(super) type Gone = dyn Fn(&mut Cx<'_>, InodeId, &[u8], InodeId) -> Result<()>;

/// Removes a few names below a directory, deepest first, and calls `gone` for each. True: none are left
/// except of other volumes.
pub(super) fn remove_below(cx: &mut Cx<'_>, of: VolumeId, top: InodeId, gone: &Gone) -> Attempt<bool> {
    let mut dir = top;
    loop {
        let found = first_names(cx.read(), dir)?;
        let (mut full, mut any) = (None, false);
        for (link, name) in found {
            if link.kind == FileKind::Directory {
                if volume_of(cx.read(), link.ino)? != of {
                    continue;
                }
                if load_tally(cx.read(), link.ino)?.entries > 0 {
                    full = full.or(Some(link.ino));
                    continue;
                }
            }
            cx.need(dir, Need::Change);
            cx.need(link.ino, Need::Change);
            cx.clear()?;
            match link.kind {
                FileKind::Directory => cx.remove_directory(dir, &name, &link)?,
                _ => cx.remove_file(dir, &name, &link)?,
            }
            gone(cx, dir, &name, link.ino)?;
            any = true;
        }
        match full {
            _ if any => return Ok(false),
            Some(below) => dir = below,
            None => return Ok(true),
        }
    }
}

/// No further records have to be dropped.
pub(super) fn nothing_more(_: &mut Cx<'_>, _: InodeId, _: &[u8], _: InodeId) -> Result<()> {
    Ok(())
}

fn first_names(read: &dyn Read, dir: InodeId) -> Result<Vec<(Link, Bytes)>> {
    tables::LISTED.under(dir).collect(read, REMOVED_AT_ONCE, |(_, cookie), Listed { ino, kind, name }| {
        (Link { ino, kind, cookie }, name)
    })
}
