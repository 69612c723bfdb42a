//! Files in use: open, close, the right to write, recovery.
use super::remove::release_orphan;
use super::writer::next_truncation;
use super::*;
use bytes::Bytes;
use weir_proto::meta::{self, CLOSED_MAX, InlineData, LeaseKind, Opened, truncations};
use weir_proto::relation::What;

impl Cx<'_> {
    /// `to_read`: the permission that reading requires, 0 if it is not opened for that.
    pub(super) fn open_file(
        &mut self,
        cred: &Cred,
        ino: InodeId,
        to_read: u32,
        write: bool,
        truncate: bool,
    ) -> Attempt<Opened> {
        let mut inode = load_file(self.read(), ino)?;
        if inode.kind != FileKind::Regular {
            return Err(Error::invalid(format!("inode {ino} is not a regular file")).into());
        }
        let want = to_read | if write || truncate { WRITE } else { 0 };
        if !allows(self.read(), cred, ino, inode.owned(), want)? {
            return Err(Error::denied(format!("user {} may not open inode {ino} that way", cred.uid)).into());
        }
        if write || truncate {
            self.require_own_inode(ino)?;
        }
        let need = if truncate {
            Need::Change
        } else {
            self.rules.leases.need_to_open(self.rules.session, ino, write)
        };
        self.need(ino, need);
        if truncate {
            self.need(ino, Need::AppendToken);
        }
        let (leases, session) = (self.rules.leases, self.rules.session);
        if leases.is_shared_by_open(session, ino, write) {
            leases.own_conflict(session, ino, self.obstacles);
        }
        self.clear()?;
        let mut changed = false;
        if write {
            (inode, changed) = self.file_to_write(ino, inode)?.into_inode();
        }
        if truncate {
            // Even if there is nothing to truncate: the times change.
            self.set_size(ino, &mut inode, 0)?;
            inode.ctime = self.rules.after(inode.ctime);
            changed = true;
        }
        if changed {
            self.put_inode(ino, &inode);
        }
        if inode.nlink == 0 {
            // A session that looked it up before it lost its name: it is not deleted with the last close of
            // those that had it open then.
            tables::HELD.put(self.txn, (ino, session), &Present);
        }
        let inline = if inode.size > 0 { tables::DATA.get(self.read(), ino)?.map(Bytes::from) } else { None };
        let mut entry = self.rules.entry(ino, &inode);
        if write {
            entry.lease.limited = self.limit_over(&inode)?;
        }
        Ok(Opened { entry, inline })
    }
}

pub fn open(cx: &mut Cx<'_>, r: &meta::Open) -> Attempt<Opened> {
    let to_read = match (r.read, r.execute) {
        (false, _) => 0,
        (true, false) => READ,
        (true, true) => EXECUTE,
    };
    cx.open_file(&r.cred, r.ino, to_read, r.write, r.truncate)
}

pub fn read_inline(view: &mut View<'_>, ino: InodeId) -> Attempt<InlineData> {
    show_data(view, ino, Need::GetAttr)
}

pub fn take_append_token(view: &mut View<'_>, r: &meta::TakeAppendToken) -> Attempt<InlineData> {
    show_data(view, r.ino, Need::AppendToken)
}

fn show_data(view: &mut View<'_>, ino: InodeId, need: Need) -> Attempt<InlineData> {
    view.need(ino, need);
    view.clear()?;
    let inode = load_file(view.read, ino)?;
    if inode.kind != FileKind::Regular {
        return Err(Error::invalid(format!("inode {ino} is not a regular file")).into());
    }
    let data = tables::DATA.get(view.read, ino)?.map(Bytes::from);
    Ok(InlineData { entry: view.rules.entry(ino, &inode), data })
}

pub fn acquire(cx: &mut Cx<'_>, r: &meta::AcquireLease) -> Attempt<Entry> {
    let Some(mut inode) = find_inode(cx.read(), r.ino)? else {
        cx.need(r.ino, Need::GetAttr);
        cx.clear()?;
        return Ok(unleased(directory(cx.read(), r.ino)?));
    };
    let leases = cx.rules.leases;
    let need = match r.kind {
        LeaseKind::Write => Need::Change,
        LeaseKind::Read if leases.opens_of(r.session, r.ino).write == 0 => Need::Pages,
        _ => Need::GetAttr,
    };
    cx.need(r.ino, need);
    cx.clear()?;
    if r.kind == LeaseKind::Write && inode.kind == FileKind::Regular {
        if !cx.rules.must_recover(r.ino, &inode) {
            cx.rules.require_changeable(cx.read(), r.ino, "AcquireLease")?;
        }
        let mut changed;
        (inode, changed) = cx.file_to_write(r.ino, inode)?.into_inode();
        if r.renew {
            // Separates all earlier writes from this session's.
            inode.writing.token_epoch = next_truncation(inode.writing.token_epoch);
            changed = true;
        }
        if changed {
            cx.put_inode(r.ino, &inode);
        }
    }
    let mut entry = cx.rules.entry(r.ino, &inode);
    if r.kind == LeaseKind::Write {
        entry.lease.limited = cx.limit_over(&inode)?;
    }
    Ok(entry)
}

/// Ends opens. The last writer's close reports that no uncommitted bytes are on targets; the last close of
/// all deletes a nameless file.
pub fn close(cx: &mut Cx<'_>, r: &meta::Close) -> Result<()> {
    if r.files.len() > CLOSED_MAX {
        return Err(Error::invalid(format!("{} files closed at once: at most {CLOSED_MAX}", r.files.len())));
    }
    let mut closed = std::collections::BTreeSet::new();
    for file in &r.files {
        if !closed.insert(file.ino) {
            return Err(Error::invalid(format!("inode {} is closed twice in one message", file.ino)));
        }
        cx.close_opens(file.ino, file.reads, file.writes, file.writes > 0)?;
    }
    Ok(())
}

impl Cx<'_> {
    /// The changes of records by the end of opens of this session. `clean`: its writers left no uncommitted
    /// bytes.
    pub(super) fn close_opens(&mut self, ino: InodeId, reads: u32, writes: u32, clean: bool) -> Result<()> {
        let (session, leases) = (self.rules.session, self.rules.leases);
        let opens = leases.opens_of(session, ino);
        let last = opens.read <= reads && opens.write <= writes;
        if last && leases.is_orphan(ino) {
            return release_orphan(self, ino, session);
        }
        if opens.write == 0 || opens.write > writes || leases.written_by_others(session, ino) {
            return Ok(());
        }
        self.log_complete(ino)?;
        if !clean {
            return Ok(());
        }
        if let Some(mut inode) = find_inode(self.read(), ino)?
            && inode.writing.dirty
            && !self.rules.must_recover(ino, &inode)
        {
            inode.writing.dirty = false;
            inode.writing.shared_at = None;
            self.put_inode(ino, &inode);
        }
        Ok(())
    }
}

impl Cx<'_> {
    /// The file has no writer any more. One whose writer died is not complete before it is recovered.
    pub fn log_complete(&mut self, ino: InodeId) -> Result<()> {
        if self.rules.logged.is_empty() {
            return Ok(());
        }
        match find_inode(self.read(), ino)? {
            Some(inode) if inode.nlink > 0 && !self.rules.must_recover(ino, &inode) => {
                self.log(inode.parent, || What::Complete { ino, size: inode.size })
            }
            _ => Ok(()),
        }
    }
}

pub fn recovered(cx: &mut Cx<'_>, r: &meta::Recovered) -> Result<Entry> {
    let mut inode = load_file(cx.read(), r.ino)?;
    if truncations(inode.writing.token_epoch) != truncations(r.token_epoch) {
        return Err(Error::stale(format!(
            "inode {} was taken over with token epoch {}, not {}: ask for its lease again",
            r.ino, inode.writing.token_epoch, r.token_epoch
        )));
    }
    // The client that reports this has truncated all bytes past the size. Another one that got a token epoch
    // since has not written there: its grant reported old bytes there, which are cleaned alone or under an
    // append token.
    inode.writing.data_end = inode.size;
    if inode.writing.writer != cx.rules.session {
        cx.put_inode(r.ino, &inode); // a later death of which may require recovery
        return Ok(cx.rules.entry(r.ino, &inode));
    }
    inode.writing.recover = false;
    let shared = cx.rules.leases.written_by_others(r.op.session, r.ino);
    inode.writing.shared_at = shared.then_some(cx.rules.deaths);
    cx.put_inode(r.ino, &inode);
    // The session that has recovered it continues to write.
    cx.leave_snapshots(r.ino, &mut inode)?;
    cx.log_whole(r.ino, &inode)?;
    Ok(cx.rules.entry(r.ino, &inode))
}

/// A stripe of the file is in doubt: the next session that uses it recovers it.
pub fn leave_in_doubt(cx: &mut Cx<'_>, r: &meta::LeaveInDoubt) -> Result<()> {
    let mut inode = load_file(cx.read(), r.ino)?;
    if inode.writing.writer == cx.rules.session {
        inode.writing.recover = true;
        cx.put_inode(r.ino, &inode);
    }
    Ok(())
}
