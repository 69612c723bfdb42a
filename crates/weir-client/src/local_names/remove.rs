//! Local removals, of files that this client alone uses, and local renames of files whose create is
//! unreported: the report has the new name.
use super::queue::Change;
use super::{LocalNames, UNSENT_MAX, may_change, note_changed};
use crate::inode::{Inode, LocalState, State};
use crate::wall_time;
use bytes::Bytes;
use std::sync::Arc;
use weir_proto::InodeId;
use weir_proto::meta::{Cred, LeaseKind, Time};
use weir_proto::posix::Owned;
use weir_proto::volume::TRASH;

/// The way in which a file goes.
enum Way {
    /// The leader never learns that it was created.
    Cancelled,
    /// The removal is reported. `begins`: no task does that yet.
    Reported { begins: bool },
}

impl LocalNames {
    /// Removes a file locally; false: ask the leader.
    pub fn try_remove(self: &Arc<Self>, cred: &Cred, parent: InodeId, name: &[u8]) -> bool {
        if name == TRASH || !self.is_on(cred) {
            return false;
        }
        let Some(dir) = self.inodes.known(parent) else { return false };
        let file = dir.lock().name(name).flatten().filter(|ino| *ino != parent);
        let Some(inode) = file.and_then(|ino| self.inodes.known(ino)) else { return false };
        match self.remove_name(&dir, &inode, cred, name) {
            None => return false,
            Some(Way::Cancelled) => self.end_cancelled(&inode),
            Some(Way::Reported { begins }) => {
                self.closes.let_go(inode.ino);
                self.report_soon(parent, begins);
            }
        }
        true
    }

    /// In one step: a report that begins meanwhile has the file, or does not.
    fn remove_name(&self, dir: &Inode, inode: &Arc<Inode>, cred: &Cred, name: &[u8]) -> Option<Way> {
        let now = wall_time(&self.env);
        let mut st = dir.lock();
        let dir_attr = may_change(&st, cred).filter(|_| st.name(name) == Some(Some(inode.ino)))?;
        let mut file = inode.lock();
        let owner = file.attr.as_ref()?.uid;
        let mut queue = self.queue();
        let has_space = queue.is_open(dir.ino) && queue.unsent(dir.ino) < UNSENT_MAX;
        if !has_space || !Owned::of(dir_attr).lets_remove(cred, owner) {
            return None;
        }
        let way = match file.local.state() {
            LocalState::Created if !file.opens.is_open() && queue.cancel(dir.ino, inode.ino) => {
                file.local.cancel();
                Way::Cancelled
            }
            LocalState::Known if file.may_be_removed() => {
                file.local.remove();
                let (change, name) = (Change::Removed(now), Bytes::copy_from_slice(name));
                Way::Reported { begins: queue.push(dir.ino, change, inode.clone(), name, cred) }
            }
            _ => return None,
        };
        st.names.note_removed(name);
        note_changed(&mut st, -1, now);
        Some(way)
    }

    fn end_cancelled(&self, inode: &Arc<Inode>) {
        {
            let mut st = inode.lock();
            st.write.lose();
            st.lower_lease(LeaseKind::None);
            self.quota.settle(&mut st);
            if let Some(attr) = &mut st.attr {
                attr.nlink = 0;
            }
        }
        self.memory.cache().remove_inode(inode.ino);
        self.inodes.forget_dirty(inode.ino);
        self.inodes.remove_unused(inode);
        inode.changed.notify_waiters();
        self.settled.notify_waiters();
    }

    /// Renames a file locally, onto a name of the same directory that is absent; false: ask the leader.
    pub fn try_rename(&self, cred: &Cred, dir: InodeId, name: &[u8], new_name: &[u8]) -> bool {
        if [name, new_name].contains(&TRASH) || !self.is_on(cred) {
            return false;
        }
        let Some(parent) = self.inodes.known(dir) else { return false };
        let now = wall_time(&self.env);
        let ino = {
            let mut st = parent.lock();
            let Some(ino) = may_rename(&st, cred, name, new_name) else { return false };
            if !self.queue().rename(dir, ino, Bytes::copy_from_slice(new_name)) {
                return false;
            }
            st.names.note_removed(name);
            st.names.note_created(new_name, ino);
            note_changed(&mut st, 0, now);
            ino
        };
        if let Some(inode) = self.inodes.known(ino) {
            let mut st = inode.lock();
            if st.local.state() == LocalState::Created
                && let Some(attr) = &mut st.attr
            {
                attr.ctime = now;
                st.pages.note_not_lent();
            }
        }
        true
    }
}

/// The file of this name, if the user may give it the new one without the leader: not in a sticky directory.
fn may_rename(dir: &State, cred: &Cred, name: &[u8], new_name: &[u8]) -> Option<InodeId> {
    may_change(dir, cred).filter(|attr| !Owned::of(attr).is_sticky() || cred.uid == 0)?;
    let is_absent = dir.name(new_name) == Some(None);
    dir.name(name)?.filter(|_| is_absent)
}

/// The time of a removal, for its report.
pub(super) fn removed_at(change: Change) -> Time {
    match change {
        Change::Removed(at) => at,
        Change::Created => Time { nanos: 0 },
    }
}
