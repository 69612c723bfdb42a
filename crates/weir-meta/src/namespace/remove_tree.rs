//! Removes the names below a directory, a few at a time and deepest first: of a deleted volume, of a part of
//! the trash, of a directory that is gone at home.
use super::*;
use crate::record::Listed;
use bytes::Bytes;
use volume::volume_of;
use weir_kv::Scan;

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
    let (mut found, mut bad) = (Vec::new(), None);
    let (start, end) = keys::range_of(b'K', dir.0);
    read.scan(&start, &end, &mut |key, value| {
        match Listed::from_value(value, || format!("an entry of directory {dir}")) {
            Ok(Listed { ino, kind, name }) => {
                let cookie = keys::cookie_of(key).unwrap_or(u64::MAX);
                found.push((Link { ino, kind, cookie }, name));
            }
            Err(e) => bad = Some(e),
        }
        if found.len() < REMOVED_AT_ONCE && bad.is_none() { Scan::More } else { Scan::Stop }
    })?;
    bad.map_or(Ok(found), Err)
}
