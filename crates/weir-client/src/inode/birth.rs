//! Whether the leader knows of a file that was created or removed locally.
use super::write::Local;
use super::{State, ctime_with};
use crate::api::{SetAttrs, SetTime};
use crate::inode::Inline;
use crate::plan;
use bytes::Bytes;
use weir_proto::births::Birth as Message;
use weir_proto::meta::{Attr, Cred, FileKind, INLINE_MAX, Time};
use weir_proto::posix::{Change, MayWrite, Owned, has_privileges};
use weir_proto::{Error, InodeId};

#[derive(Debug, Default)]
pub enum Birth {
    /// The leader knows of it, or it was not created locally.
    #[default]
    Born,
    Unsent,
    /// The report is in flight.
    Sent(BirthReport),
    /// The report failed, and is not repeated.
    Lost(Error),
    /// It was removed locally, and that is not reported.
    Removed,
}

/// The report of a file to the leader.
#[derive(Debug, Clone)]
pub struct BirthReport {
    pub open_read: u32,
    pub open_write: u32,
    /// The inline bytes of a small file, with the change that this report commits.
    pub content: Option<(Bytes, Local)>,
    pub clean: bool,
    /// The write generation of the Write lease.
    pub generation: u64,
}

impl Birth {
    pub fn is_removal(&self) -> bool {
        matches!(self, Birth::Removed)
    }
    pub fn is_under_way(&self) -> bool {
        matches!(self, Birth::Unsent | Birth::Sent(_) | Birth::Removed)
    }
}

impl State {
    /// Whether the birth carries all of the file's content: then a close has nothing to save.
    pub fn goes_with_birth(&self) -> bool {
        let size = self.write.local().map_or(0, |local| local.size);
        matches!(self.birth, Birth::Unsent)
            && size <= INLINE_MAX as u64
            && !self.write.has_sends()
            && self.inline == Inline::No
            && plan::fits_inline(size, self.on_targets_end(), self.lease.is_write())
    }

    /// The file is about to be reported to the leader; `content`: the whole of a small one.
    pub fn begin_report(&mut self, content: impl FnOnce(&State, usize) -> Bytes) -> BirthReport {
        let closed = !self.opens.is_for_writing();
        let local = self.write.local().filter(|_| closed && self.goes_with_birth());
        let content = local.map(|local| (content(self, local.size as usize), local));
        let clean = closed && (content.is_some() || !self.write.is_dirty());
        if clean {
            self.write.begin_declaring_clean();
        }
        let (open_read, open_write) = self.opens_to_report(clean);
        let generation = self.write.generation();
        let report = BirthReport { open_read, open_write, content, clean, generation };
        self.birth = Birth::Sent(report.clone());
        report
    }

    /// The opens that the leader counts. A closed file that is not saved stays open for it.
    fn opens_to_report(&self, clean: bool) -> (u32, u32) {
        let unsaved = u32::from(!clean && self.write.is_dirty());
        (self.opens.for_reading(), self.opens.for_writing().max(unsaved))
    }

    /// Whether this client alone uses the file and has nothing of it to save, so that it may remove the file
    /// locally.
    pub fn may_die(&self) -> bool {
        let is_one = |a: &Attr| a.kind == FileKind::Regular && a.nlink == 1;
        let is_idle = !self.opens.is_open() && !self.is_dirty() && !self.is_in_doubt() && self.is_all_sent();
        let is_ours = self.lease.is_write() && !self.attr_old && !self.pages.has_unprotected();
        is_ours && is_idle && !self.direct.are_pending() && self.attr.as_ref().is_some_and(is_one)
    }

    /// The report, with all that was changed up to now.
    pub fn birth_message(&self, ino: InodeId, name: &Bytes, report: BirthReport) -> Message {
        let attr = self.attr.as_ref().expect("a file that was created locally has attributes");
        let local = report.content.as_ref().map(|(_, local)| local);
        Message {
            ino,
            name: name.clone(),
            mode: attr.mode,
            at: attr.btime,
            open_read: report.open_read,
            open_write: report.open_write,
            mtime: local.map_or(attr.mtime, |local| local.mtime),
            ctime: local.map_or(attr.ctime, |local| ctime_with(attr, local)),
            content: report.content.map(|(content, _)| content),
            clean: report.clean,
            uid: attr.uid,
            gid: attr.gid,
            atime: attr.atime,
        }
    }

    /// Changes attributes of a file before it is reported. False: the leader has to decide.
    pub fn set_unborn(&mut self, cred: &Cred, set: &SetAttrs, now: Time) -> bool {
        let unreported = matches!(self.birth, Birth::Unsent) && self.lease.is_write() && !self.attr_old;
        let may_be_mapped = self.opens.for_reading() > 0 && self.opens.is_for_writing();
        let Some(attr) = self.attr.as_mut().filter(|_| unreported && set.size.is_none()) else {
            return false;
        };
        let times = set.atime.or(set.mtime).is_some();
        let change = Change { mode: set.mode, uid: set.uid, gid: set.gid, times, size: false };
        let before = Owned::of(attr);
        let may = before.check(cred, &change, MayWrite::No).is_ok();
        let after = before.changed(cred, &change, false);
        let asks = self.quota.is_owner_fixed() && (after.uid, after.gid) != (before.uid, before.gid);
        let is_plain = !has_privileges(before.mode | set.mode.unwrap_or(0));
        let reads_first = set.atime.is_some() && self.accessed.is_some();
        let stores_first = set.mtime.is_some() && may_be_mapped;
        if !may || asks || !is_plain || reads_first || stores_first {
            return false;
        }
        let time = |set: Option<SetTime>, old: Time| match set {
            Some(SetTime::Now) => now,
            Some(SetTime::At(at)) => at,
            None => old,
        };
        attr.atime = time(set.atime, attr.atime);
        attr.ctime = now;
        Owned { mode: attr.mode, uid: attr.uid, gid: attr.gid } = after;
        if set.mtime.is_some() {
            attr.mtime = time(set.mtime, attr.mtime);
            self.write.set_mtime(attr.mtime);
        }
        true
    }

    /// It is reported again, or named on a new connection: with its present number of opens.
    pub fn report_again(&mut self, message: Option<&mut Message>) {
        let Birth::Sent(report) = &self.birth else { return };
        let (open_read, open_write) = self.opens_to_report(report.clean);
        if let Birth::Sent(report) = &mut self.birth {
            (report.open_read, report.open_write) = (open_read, open_write);
            if let Some(message) = message {
                (message.open_read, message.open_write) = (open_read, open_write);
            }
        }
    }

    /// The leader knows of it: returns the report, and the attributes that it has now.
    pub fn end_birth(&mut self, revoke_clock: u64) -> Option<(BirthReport, Attr)> {
        let Birth::Sent(report) = std::mem::take(&mut self.birth) else { return None };
        if report.clean {
            self.write.note_declared_clean(revoke_clock);
        }
        let mut attr = self.attr.clone()?;
        if self.write.generation() != report.generation {
            self.attr_old = true;
            return Some((report, attr));
        }
        if let Some((content, local)) = &report.content {
            self.write.note_inline_committed(*local);
            self.inline = Inline::Yes(content.clone());
            (attr.size, attr.allocated) = (content.len() as u64, content.len() as u64);
            attr.ctime = ctime_with(&attr, local);
            attr.mtime = local.mtime;
            attr.data_version += 1;
        }
        Some((report, attr))
    }
}
