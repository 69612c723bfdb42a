//! Access times: reads made here, reported to the leader in batches.
//!
//! A read changes the access time as Linux's `relatime` does: only if it is not newer than the last change,
//! or is a day old. The new time is noted at the read, shown here at once, and reported in a batch within a
//! second, or before a lease on the inode is returned. No read waits for it.
//!
//! Invariant: times noted under a lease are reported before the lease ends, so a time that another client
//! sets is later. A time that cannot be reported is dropped: the next read notes it again.
use crate::inner::Inner;
use crate::inode::{Inode, State};
use crate::table::accesses::follows;
use std::time::Duration;
use weir_proto::InodeId;
use weir_proto::meta::{AccessTime, NoteAccess, Time};

/// Access times are not worth a longer wait for the leader.
const PATIENCE: Duration = Duration::from_secs(5);
impl State {
    /// Whether a read at `now` changes the access time, as far as the attributes are known.
    fn access_follows(&self, now: Time) -> bool {
        let (Some(attr), local) = (&self.attr, self.write.local()) else { return false };
        let change = local.map_or(i64::MIN, |l| l.mtime.nanos);
        let mtime = Time { nanos: attr.mtime.nanos.max(change) };
        follows(self.accessed.unwrap_or(attr.atime), mtime, attr.ctime, now)
    }
}

impl Inner {
    /// A read that a program made, or that fills pages for one.
    pub fn note_access(&self, ino: InodeId, st: &mut State) {
        if !self.tables.accesses.are_kept() {
            return;
        }
        let now = self.now();
        if !st.access_follows(now) {
            return;
        }
        if self.tables.accesses.note(ino) {
            st.accessed = Some(now);
        }
    }

    /// Whether the next read changes the access time, so that the kernel must send it here.
    pub fn awaits_access(&self, st: &State) -> bool {
        self.tables.accesses.are_kept() && st.access_follows(self.now())
    }

    /// Called before a lease on the inode is returned, and before its times are set.
    pub async fn report_access_of(&self, inode: &Inode) {
        if self.tables.accesses.has(inode.ino) {
            self.report_accesses().await;
        } else if inode.lock().accessed.is_some() {
            drop(self.tables.accesses.reporting.lock().await); // another task is reporting it
        }
    }

    /// Reports all noted times.
    pub async fn report_accesses(&self) {
        let _one = self.tables.accesses.reporting.lock().await;
        loop {
            let inodes = self.tables.accesses.take();
            if inodes.is_empty() {
                return;
            }
            let at = |ino: InodeId| self.known_inode(ino)?.lock().accessed.map(|at| AccessTime { ino, at });
            let accesses: Vec<AccessTime> = inodes.into_iter().filter_map(at).collect();
            let report = |session| NoteAccess { session, accesses: accesses.clone() };
            let reported = self.leader.ask_until(self.env.clock.now() + PATIENCE, report).await;
            if let Err(e) = &reported {
                tracing::debug!("access times were not reported: {e}");
            }
            for access in &accesses {
                self.end_access(access, reported.is_ok());
            }
        }
    }

    fn end_access(&self, access: &AccessTime, reported: bool) {
        let Some(inode) = self.known_inode(access.ino) else { return };
        let mut st = inode.lock();
        if st.accessed != Some(access.at) {
            return; // read again meanwhile, or its times were set
        }
        st.accessed = None;
        if let Some(attr) = st.attr.as_mut().filter(|_| reported) {
            attr.atime = access.at;
        }
    }
}
