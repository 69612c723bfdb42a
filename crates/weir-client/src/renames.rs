//! Renames of files that this client created locally and has not reported: the report has the new name.
//!
//! Only within one directory, under the exclusive lease on its names, and onto a name that is absent.
use crate::births::permits;
use crate::inner::Inner;
use crate::inode::{Birth, State};
use crate::wall_time;
use bytes::Bytes;
use weir_proto::InodeId;
use weir_proto::meta::{Attr, Cred, Time};
use weir_proto::volume::TRASH;

const STICKY: u32 = 0o1000;

impl Inner {
    /// Renames a file locally; false: ask the leader.
    pub fn try_rename(&self, cred: &Cred, dir: InodeId, name: &[u8], new_name: &[u8]) -> bool {
        let may = self.config.local_creates_after.is_some() && self.leader.leases_hold();
        if !may || [name, new_name].contains(&TRASH) || !self.may_open_unasked(cred.uid) {
            return false;
        }
        let Some(parent) = self.inodes.known(dir) else { return false };
        let now = wall_time(&self.env);
        let ino = {
            let mut st = parent.lock();
            let Some(ino) = may_rename(&st, cred, name, new_name) else { return false };
            if !self.tables.births.lock().rename(dir, ino, Bytes::copy_from_slice(new_name)) {
                return false;
            }
            st.names.died(name);
            st.names.born(new_name, ino);
            if let Some(attr) = &mut st.attr {
                (attr.mtime, attr.ctime) = (now, Time { nanos: now.nanos.max(attr.ctime.nanos) });
            }
            st.pages.note_not_lent();
            ino
        };
        if let Some(inode) = self.inodes.known(ino) {
            let mut st = inode.lock();
            if matches!(st.birth, Birth::Unsent)
                && let Some(attr) = &mut st.attr
            {
                attr.ctime = now;
                st.pages.note_not_lent();
            }
        }
        true
    }
}

/// The file of this name, if the user may give it the new one without the leader.
fn may_rename(st: &State, cred: &Cred, name: &[u8], new_name: &[u8]) -> Option<InodeId> {
    let may = |attr: &&Attr| !attr.acl && permits(cred, attr) && (attr.mode & STICKY == 0 || cred.uid == 0);
    st.attr.as_ref().filter(|_| st.lease.is_write() && !st.attr_old).filter(may)?;
    let is_absent = st.name(new_name) == Some(None);
    st.name(name)?.filter(|_| is_absent)
}
