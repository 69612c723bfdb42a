//! Files that this client removes locally, under exclusive leases on their directory and on each of them, and
//! the reports of that to the leader.
//!
//! Invariant: another client that asks for such a file, by name or by number, is answered after the report:
//! both leases are revoked first, and are returned after it.
use crate::births::{UNSENT_MAX, permits};
use crate::inner::Inner;
use crate::inode::{Birth, Inode, State};
use crate::leader::Change;
use crate::table::births::{Unreported, What};
use crate::wall_time;
use bytes::Bytes;
use std::sync::Arc;
use weir_proto::births::{Removal, RemoveMany};
use weir_proto::meta::{Attr, Cred, LeaseKind, Time};
use weir_proto::volume::TRASH;
use weir_proto::{Error, ErrorKind, InodeId};

const STICKY: u32 = 0o1000;

/// The way in which a file goes.
enum Way {
    /// The leader never learns that it was created.
    Cancelled,
    /// The removal is reported. `begins`: no task does that yet.
    Reported { begins: bool },
}

impl Inner {
    /// Removes a file locally; false: ask the leader.
    pub fn try_remove(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> bool {
        let may = self.config.local_creates_after.is_some() && self.leader.leases_hold() && name != TRASH;
        if !may || !self.may_open_unasked(cred.uid) {
            return false;
        }
        let Some(dir) = self.inodes.known(parent) else { return false };
        let Some((ino, dir_attr)) = self.may_remove(&dir.lock(), cred, name) else { return false };
        let Some(inode) = self.inodes.known(ino) else { return false };
        let Some(before) = begin_removal(&mut inode.lock(), cred, &dir_attr) else { return false };
        match self.remove_name(&dir, &inode, cred, name, &before) {
            Some(Way::Cancelled) => self.end_cancelled(&inode),
            Some(Way::Reported { begins }) => {
                self.closes.let_go(ino);
                self.report_names_soon(parent, begins);
            }
            None => {
                inode.lock().birth = before;
                inode.changed.notify_waiters();
                return false;
            }
        }
        true
    }

    /// The file of this name and the directory's attributes, if the user may remove names there locally.
    fn may_remove(&self, st: &State, cred: &Cred, name: &[u8]) -> Option<(InodeId, Attr)> {
        let is_ours = st.lease.is_write() && !st.attr_old;
        let attr = st.attr.as_ref().filter(|attr| is_ours && !attr.acl && permits(cred, attr))?;
        Some((st.name(name)??, attr.clone()))
    }

    fn remove_name(
        &self,
        dir: &Inode,
        inode: &Arc<Inode>,
        cred: &Cred,
        name: &[u8],
        before: &Birth,
    ) -> Option<Way> {
        let mut st = dir.lock();
        let found = self.may_remove(&st, cred, name).map(|(ino, _)| ino);
        let mut log = self.tables.births.lock();
        let may = found == Some(inode.ino) && log.is_open(dir.ino) && log.unsent(dir.ino) < UNSENT_MAX;
        let now = wall_time(&self.env);
        let way = match before {
            _ if !may => return None,
            Birth::Unsent if log.cancel(dir.ino, inode.ino) => Way::Cancelled,
            Birth::Unsent => return None,
            _ => {
                let name = Bytes::copy_from_slice(name);
                Way::Reported { begins: log.push(dir.ino, What::Removed(now), inode.clone(), name, cred) }
            }
        };
        drop(log);
        st.names.died(name);
        if let Some(attr) = &mut st.attr {
            attr.size = attr.size.saturating_sub(1);
            (attr.mtime, attr.ctime) = (now, Time { nanos: now.nanos.max(attr.ctime.nanos) });
        }
        st.pages.note_not_lent();
        Some(way)
    }

    fn end_cancelled(&self, inode: &Arc<Inode>) {
        {
            let mut st = inode.lock();
            st.birth = Birth::Born;
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
        self.tables.births.settled.notify_waiters();
    }

    pub async fn report_removals(&self, dir: InodeId, cred: &Cred, batch: &[Unreported]) {
        let revoke_clock = self.inodes.revoke_clock();
        let removals: Vec<Removal> = batch.iter().map(removal).collect();
        let make = |op| RemoveMany { op, cred: cred.clone(), dir, removals: removals.clone() };
        match self.leader.change(Change::once(), make).await {
            Ok(removed) => {
                batch.iter().for_each(|unreported| end_removal(&mut unreported.inode.lock()));
                self.inodes.apply_attr(&removed.parent_attr, revoke_clock);
            }
            Err(e) => {
                if let Some(more) = self.env.watch.line("files could not be removed") {
                    tracing::error!(
                        "{} files of directory {dir} could not be removed: {e}{more}",
                        batch.len()
                    );
                }
                self.doubt_all_names(dir);
                batch.iter().for_each(|unreported| self.lose_removal(dir, unreported, &e));
            }
        }
    }

    /// The file may still exist.
    pub fn lose_removal(&self, dir: InodeId, unreported: &Unreported, why: &Error) {
        let ino = unreported.inode.ino;
        let name = String::from_utf8_lossy(&unreported.name).into_owned();
        let what = format!("the removal of file {ino} ({name:?}) was not made durable");
        let e = why.clone().of_kind(ErrorKind::Io).doing(what);
        self.losses.note(ino, &e);
        self.tables.births.lock().note_lost(dir, e);
        end_removal(&mut unreported.inode.lock());
        unreported.inode.changed.notify_waiters();
    }
}

/// Marks the file as removed; returns its state before.
fn begin_removal(st: &mut State, cred: &Cred, dir: &Attr) -> Option<Birth> {
    let uid = st.attr.as_ref()?.uid;
    let is_kept = dir.mode & STICKY != 0 && cred.uid != 0 && cred.uid != dir.uid && cred.uid != uid;
    let may = match &st.birth {
        Birth::Unsent => !st.opens.is_open(),
        Birth::Born => st.may_die(),
        Birth::Sent(_) | Birth::Lost(_) | Birth::Removed => false,
    };
    (may && !is_kept).then(|| std::mem::replace(&mut st.birth, Birth::Removed))
}

/// The leader knows, or never will: its attributes are asked for again.
fn end_removal(st: &mut State) {
    st.birth = Birth::Born;
    st.attr_old = true;
}

fn removal(unreported: &Unreported) -> Removal {
    let at = match unreported.what {
        What::Removed(at) => at,
        What::Created => Time { nanos: 0 },
    };
    Removal { name: unreported.name.clone(), ino: unreported.inode.ino, at }
}
