//! A file that was created or removed locally: its report, and the changes that are possible before that.
use super::local_state::{LocalEvent, LocalState};
use super::write::Local;
use super::{State, ctime_with};
use crate::inode::Inline;
use crate::plan;
use crate::types::{SetAttrs, SetTime};
use bytes::Bytes;
use weir_proto::local_creates::LocalCreate;
use weir_proto::meta::{Attr, Cred, FileKind, INLINE_MAX, Time};
use weir_proto::posix::{Change, MayWrite, Owned, has_privileges};
use weir_proto::{Error, InodeId};

/// A file's local create or removal, as far as it is unreported.
#[derive(Debug, Default)]
pub struct LocalFile {
    state: LocalState,
    /// Of its create, while it is in flight.
    report: Option<CreateReport>,
    /// Why its create was lost.
    lost: Option<Error>,
}

/// The report of a create to the leader.
#[derive(Debug, Clone)]
pub struct CreateReport {
    pub open_read: u32,
    pub open_write: u32,
    /// The inline bytes of a small file, with the change that this report commits.
    pub content: Option<(Bytes, Local)>,
    pub clean: bool,
    /// The write generation of the Write lease.
    pub generation: u64,
}

impl LocalFile {
    pub fn state(&self) -> LocalState {
        self.state
    }
    pub fn is_removed(&self) -> bool {
        self.state == LocalState::Removed
    }
    pub fn lost(&self) -> Option<&Error> {
        self.lost.as_ref()
    }

    fn take(&mut self, event: LocalEvent) {
        let after = self.state.after(event);
        assert!(after.is_some(), "a file's local state is {:?}: {event:?} cannot happen", self.state);
        self.state = after.unwrap_or_default();
    }
    pub fn create(&mut self) {
        self.take(LocalEvent::Create);
    }
    /// It is removed before its create is reported.
    pub fn cancel(&mut self) {
        self.take(LocalEvent::Cancel);
    }
    pub fn remove(&mut self) {
        self.take(LocalEvent::Remove);
    }
    pub fn lose(&mut self, why: Error) {
        self.take(LocalEvent::ReportLost);
        (self.report, self.lost) = (None, Some(why));
    }

    /// Panics where an invariant of this type does not hold.
    pub fn check(&self) {
        let reporting = self.state == LocalState::Reporting;
        assert_eq!(self.report.is_some(), reporting, "a report is in flight in one state");
        assert_eq!(self.lost.is_some(), self.state == LocalState::Lost, "a lost file has a reason");
    }
}

impl State {
    /// Whether the report of its create carries all of the file's content: then a close has nothing to save.
    pub fn goes_with_create(&self) -> bool {
        let size = self.write.local().map_or(0, |local| local.size);
        self.local.state == LocalState::Created
            && size <= INLINE_MAX as u64
            && !self.write.has_sends()
            && self.inline == Inline::No
            && plan::fits_inline(size, self.on_targets_end(), self.lease.is_write())
    }

    /// The file is about to be reported to the leader; `content`: the whole of a small one.
    pub fn begin_report(&mut self, content: impl FnOnce(&State, usize) -> Bytes) -> CreateReport {
        let closed = !self.opens.is_for_writing();
        let local = self.write.local().filter(|_| closed && self.goes_with_create());
        let content = local.map(|local| (content(self, local.size as usize), local));
        let clean = closed && (content.is_some() || !self.write.is_dirty());
        if clean {
            self.write.begin_declaring_clean();
        }
        let (open_read, open_write) = self.opens_to_report(clean);
        let generation = self.write.generation();
        let report = CreateReport { open_read, open_write, content, clean, generation };
        self.local.take(LocalEvent::ReportBegins);
        self.local.report = Some(report.clone());
        report
    }

    /// The opens that the leader counts. A closed file that is not saved stays open for it.
    fn opens_to_report(&self, clean: bool) -> (u32, u32) {
        let unsaved = u32::from(!clean && self.write.is_dirty());
        (self.opens.for_reading(), self.opens.for_writing().max(unsaved))
    }

    /// Whether this client alone uses the file and has nothing of it to save, so that it may remove the file
    /// locally.
    pub fn may_be_removed(&self) -> bool {
        let is_one = |a: &Attr| a.kind == FileKind::Regular && a.nlink == 1;
        let is_idle = !self.opens.is_open() && !self.is_dirty() && !self.is_in_doubt() && self.is_all_sent();
        let is_ours = self.lease.is_alone() && !self.attr_old && !self.pages.has_unprotected();
        is_ours && is_idle && !self.direct.are_pending() && self.attr.as_ref().is_some_and(is_one)
    }

    /// The report, with all that was changed up to now.
    pub fn create_message(&self, ino: InodeId, name: &Bytes, report: CreateReport) -> LocalCreate {
        let attr = self.attr.as_ref().expect("a file that was created locally has attributes");
        let local = report.content.as_ref().map(|(_, local)| local);
        LocalCreate {
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
    pub fn set_before_report(&mut self, cred: &Cred, set: &SetAttrs, now: Time) -> bool {
        let unreported = self.local.state == LocalState::Created && self.lease.is_write() && !self.attr_old;
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
    pub fn report_again(&mut self, message: Option<&mut LocalCreate>) {
        let Some(clean) = self.local.report.as_ref().map(|report| report.clean) else { return };
        let (open_read, open_write) = self.opens_to_report(clean);
        if let Some(report) = &mut self.local.report {
            (report.open_read, report.open_write) = (open_read, open_write);
            if let Some(message) = message {
                (message.open_read, message.open_write) = (open_read, open_write);
            }
        }
    }

    /// The leader knows of it: returns the report, and the attributes that it has now.
    pub fn end_report(&mut self, revoke_clock: u64) -> (CreateReport, Attr) {
        self.local.take(LocalEvent::Reported);
        let report = self.local.report.take().expect("a create that is being reported has a report");
        if report.clean {
            self.write.note_declared_clean(revoke_clock);
        }
        let mut attr = self.attr.clone().expect("a file that was created locally has attributes");
        if self.write.generation() != report.generation {
            self.attr_old = true;
            return (report, attr);
        }
        if let Some((content, local)) = &report.content {
            self.write.note_inline_committed(*local);
            self.inline = Inline::Yes(content.clone());
            (attr.size, attr.allocated) = (content.len() as u64, content.len() as u64);
            attr.ctime = ctime_with(&attr, local);
            attr.mtime = local.mtime;
            attr.data_version += 1;
        }
        (report, attr)
    }

    /// The leader has removed it, or may still have it: its attributes are asked for again.
    pub fn end_removal(&mut self) {
        self.local.take(LocalEvent::RemovalEnds);
        self.attr_old = true;
    }
}
