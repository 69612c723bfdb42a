//! The size commit: bytes that a writer made durable on targets become part of the file.
use super::gate::Changed;
use super::*;
use weir_proto::meta::{CHANGED_MAX, Commit, FILE_BYTES_MAX, INLINE_MAX, LeaseKind, truncations};

pub fn commit(cx: &mut Cx<'_>, r: &Commit) -> Attempt<Entry> {
    let mut inode = load_file(cx.read(), r.ino)?;
    check(cx.rules, r, &inode)?;
    // A session that got Read before the append token was granted would keep showing the smaller size.
    let own = cx.own_inode(r.ino, &[if r.size > inode.size { Need::Change } else { Need::GetAttr }])?;
    let has_inline = store_inline(cx, r, &inode)?;
    if has_inline && r.inline.is_none() && r.size > inode.size {
        // Its growth is on targets, and would be hidden by the inline bytes.
        return Err(Error::stale(format!(
            "inode {} holds the bytes of its file: read it and write again",
            r.ino
        ))
        .into());
    }
    // Only a commit under a Write lease is answered early, and made again.
    let alone = cx.rules.again || cx.rules.leases.held(cx.rules.session, r.ino) == LeaseKind::Write;
    cx.events.under_leases |= !alone;
    let allocated = allocated_after(r, &inode, alone);
    let evicted = inode.evicted;
    own.set_space(cx, &mut inode, allocated, evicted)?;
    inode.size = inode.size.max(r.size);
    inode.mtime = r.mtime;
    inode.ctime = cx.rules.after(inode.ctime);
    inode.data_version += 1;
    // Only a single writer, or one that cleaned under its append token, knows that no bytes are left beyond.
    // Below the size, bytes may be hidden by the inline ones: a dead writer had begun to move these to
    // targets.
    let alone = r.append_token || alone;
    let known = if alone { inode.writing.data_end.min(inode.size) } else { inode.writing.data_end };
    inode.writing.data_end = known.max(if has_inline { r.data_end } else { r.data_end.max(inode.size) });
    let others_write = cx.rules.leases.written_by_others(cx.rules.session, r.ino);
    if r.clean && !others_write && !cx.rules.must_recover(r.ino, &inode) {
        inode.writing.dirty = false;
        inode.writing.shared_at = None;
    }
    own.put_file(cx, &inode, Changed::Data(&r.changed))?;
    if r.close_writes > 0 {
        cx.close_opens(r.ino, 0, r.close_writes, false)?;
    }
    Ok(cx.rules.entry(r.ino, &inode))
}

/// The file's allocation. Each of several writers knows only its own writes: then all growth of the file
/// counts, except into space that was reserved past its end. Only a writer that is alone, or has the append
/// token, reserves more space there.
fn allocated_after(r: &Commit, inode: &Inode, alone: bool) -> u64 {
    let (size, before) = (inode.size.max(r.size), inode.size.max(inode.allocated));
    let known = if alone { 0 } else { inode.allocated.saturating_add(size.saturating_sub(before)) };
    let most = if alone || r.append_token { u64::MAX } else { size.max(inode.allocated) };
    r.allocated.max(known).min(most)
}

fn check(rules: &Rules<'_>, r: &Commit, inode: &Inode) -> Result<()> {
    if inode.kind != FileKind::Regular {
        return Err(Error::invalid(format!("inode {} is not a regular file: it has no data", r.ino)));
    }
    // The holder of the append token need not have the file open, and others may get the Write lease while
    // the token lasts.
    let with_token = r.append_token && rules.leases.has_append_token(rules.session, r.ino);
    let may = with_token
        || rules.leases.may_write(rules.session, r.ino)
        || (inode.writing.writer == rules.session && inode.writing.token_epoch == r.token_epoch);
    if !may || r.token_epoch > inode.writing.token_epoch {
        return Err(Error::stale(format!(
            "inode {}: token epoch {} has no right to write it (now {}): ask for its lease again",
            r.ino, r.token_epoch, inode.writing.token_epoch
        )));
    }
    // If the file has left a snapshot since, bytes past its former size are in the old object, but in no
    // layer.
    let may_exceed = r.size > inode.size || r.size > 0 && inode.layers.is_some();
    if (may_exceed || r.drop_inline) && truncations(r.token_epoch) < truncations(inode.writing.token_epoch) {
        // Another client may have truncated this writer's bytes past the size since; or it itself, if it got
        // the Write lease since.
        return Err(Error::stale(format!(
            "inode {}: grown under token epoch {}, it is at {} now: read the file and write again",
            r.ino, r.token_epoch, inode.writing.token_epoch
        )));
    }
    if r.append_token && !with_token {
        return Err(Error::stale(format!("inode {}: the append token was lost: take it again", r.ino)));
    }
    if r.size.max(r.data_end).max(r.allocated) > FILE_BYTES_MAX {
        return Err(Error::name(NameRule::FileTooBig, format!("a file has at most {FILE_BYTES_MAX} bytes")));
    }
    if r.changed.len() > CHANGED_MAX {
        return Err(Error::invalid(format!(
            "{} changed ranges in one commit: at most {CHANGED_MAX}",
            r.changed.len()
        )));
    }
    match &r.inline {
        Some(data) if data.len() > INLINE_MAX => Err(Error::invalid(format!(
            "{} bytes of inline data: at most {INLINE_MAX} are kept in an inode",
            data.len()
        ))),
        Some(data) if (data.len() as u64) > r.size.max(inode.size) => {
            Err(Error::invalid("more inline data than the file is long"))
        }
        Some(_) if r.drop_inline => Err(Error::invalid("inline data cannot come and go in one commit")),
        _ => Ok(()),
    }
}

/// Keeps or drops inline data; returns whether the file's data is inline now.
fn store_inline(cx: &mut Cx<'_>, r: &Commit, inode: &Inode) -> Result<bool> {
    if let Some(data) = &r.inline {
        tables::DATA.put_bytes(cx.txn, r.ino, data);
        return Ok(true);
    }
    if r.drop_inline {
        tables::DATA.delete(cx.txn, r.ino);
        return Ok(false);
    }
    Ok(inode.size <= FILE_BYTES_MAX && tables::DATA.has(cx.read(), r.ino)?)
}
