//! Local removals, of files that this client alone uses, and local renames of files whose create is
//! unreported: the report has the new name.
use super::queue::{Change, FilesLent, Owner, Queue};
use super::{LocalNames, UNSENT_MAX, may_change, note_changed};
use crate::inode::{Inode, LocalState, State};
use crate::wall_time;
use bytes::Bytes;
use std::sync::{Arc, Mutex};
use weir_proto::InodeId;
use weir_proto::local_creates::{LEASED_FILES_MAX, LeaseFiles, LeasedFile, NUMBERS_MIN};
use weir_proto::meta::{Cred, LeaseKind, Time};
use weir_proto::posix::Owned;
use weir_proto::volume::TRASH;

/// The way in which a file goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
        let removal = Removal { dir: &dir, file: &inode, name, cred, now: wall_time(&self.env) };
        match removal.carry_out(&self.queue) {
            None => return false,
            Some(Way::Cancelled) => self.end_cancelled(&inode),
            Some(Way::Reported { begins }) => {
                self.closes.let_go(inode.ino);
                self.report_soon(parent, begins);
            }
        }
        true
    }

    /// Before a removal by a message: after many of them the leader is asked for the right to remove the file
    /// and the next ones of its directory locally. True: this client may have it now.
    pub async fn lease_for_removal(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> bool {
        let Some(after) = self.after.filter(|_| name != TRASH && self.is_on(cred)) else { return false };
        let Some(dir) = self.inodes.known(parent) else { return false };
        let (owner, file) = {
            let st = dir.lock();
            let Some(attr) = st.attr.as_ref().filter(|_| st.lease.is_held()) else { return false };
            (Owner::of_new(cred, attr), st.name(name))
        };
        // It is absent, or something else than other clients is in the way.
        if file.is_some_and(|file| file.is_none_or(|ino| self.is_alone(ino))) {
            return false;
        }
        {
            let mut queue = self.queue();
            if !queue.note_unlink(parent, after, self.env.clock.now()) {
                return false;
            }
            queue.ask(parent);
        }
        let mut asking = AskingForFiles { names: self, dir: parent, answer: FilesLent::NotYet };
        if !self.queue().is_open(parent) {
            self.lease_names(&dir, NUMBERS_MIN, owner).await;
        }
        let has_names = self.queue().is_open(parent);
        asking.answer = if has_names { self.lease_files(&dir, name).await } else { FilesLent::NotYet };
        asking.answer == FilesLent::Yes
    }

    fn is_alone(&self, file: InodeId) -> bool {
        self.inodes.known(file).is_some_and(|inode| inode.lock().lease.is_alone())
    }

    /// Asks for the right to remove the file of this name, and the next ones.
    async fn lease_files(&self, dir: &Inode, name: &[u8]) -> FilesLent {
        let (revoke_clock, before) = (self.inodes.revoke_clock(), dir.lock().names.change());
        let (from, count, dir_ino) = (Bytes::copy_from_slice(name), LEASED_FILES_MAX as u32, dir.ino);
        let ask = |session| LeaseFiles { session, dir: dir_ino, from: from.clone(), count };
        let leased = match self.leader.ask(ask).await {
            Ok(leased) => leased.files,
            Err(e) => {
                tracing::debug!("files of directory {dir_ino}: {e}");
                return FilesLent::No;
            }
        };
        for LeasedFile { name, entry } in &leased {
            let is_new = self.inodes.known(entry.attr.ino).is_none();
            let inode = self.inodes.get(entry.attr.ino);
            {
                let mut st = inode.lock();
                self.inodes.apply_to(&mut st, entry, revoke_clock);
                st.lease.grant_alone(revoke_clock);
                st.forgotten |= is_new; // the kernel does not know it
            }
            let mut st = dir.lock();
            if st.names.change() == before && st.lease.is_held() {
                st.names.keep(name, Some(entry.attr.ino));
            }
        }
        let is_lent = leased.first().is_some_and(|file| file.name == from);
        if is_lent { FilesLent::Yes } else { FilesLent::NotYet }
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

/// A question for files of a directory. It ends with this, also if its caller gives up.
struct AskingForFiles<'a> {
    names: &'a LocalNames,
    dir: InodeId,
    answer: FilesLent,
}

impl Drop for AskingForFiles<'_> {
    fn drop(&mut self) {
        let now = self.names.env.clock.now();
        self.names.queue().asked_for_files(self.dir, self.answer, now);
    }
}

/// The removal of a name by a user.
struct Removal<'a> {
    dir: &'a Inode,
    file: &'a Arc<Inode>,
    name: &'a [u8],
    cred: &'a Cred,
    now: Time,
}

impl Removal<'_> {
    /// In one step: a report that begins meanwhile has the file, or does not. `None`: ask the leader.
    fn carry_out(&self, queue: &Mutex<Queue>) -> Option<Way> {
        let Removal { dir, file, name, cred, now } = *self;
        let mut st = dir.lock();
        let dir_attr = may_change(&st, cred).filter(|_| st.name(name) == Some(Some(file.ino)))?;
        let mut removed = file.lock();
        let owner = removed.attr.as_ref()?.uid;
        let mut queue = queue.lock().expect("no holder panics");
        let has_space = queue.is_open(dir.ino) && queue.unsent(dir.ino) < UNSENT_MAX;
        if !has_space || !Owned::of(dir_attr).lets_remove(cred, owner) {
            return None;
        }
        let way = match removed.local.state() {
            LocalState::Created if !removed.opens.is_open() && queue.cancel(dir.ino, file.ino) => {
                removed.local.cancel();
                Way::Cancelled
            }
            LocalState::Known if removed.may_be_removed() => {
                removed.local.remove();
                let (change, name) = (Change::Removed(now), Bytes::copy_from_slice(name));
                Way::Reported { begins: queue.push(dir.ino, change, file.clone(), name, cred) }
            }
            _ => return None,
        };
        st.names.note_removed(name);
        note_changed(&mut st, -1, now);
        Some(way)
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

#[cfg(test)]
mod tests {
    use super::super::create::{new_attr, no_lease};
    use super::super::queue::NumberLoan;
    use super::*;
    use crate::inode::Limits;
    use std::sync::Barrier;
    use weir_env::Instant;
    use weir_proto::PgId;
    use weir_proto::map::{Layout, Scheme};
    use weir_proto::meta::{Attr, Entry, FileKind, Lease};

    const DIR: InodeId = InodeId(5);
    const NAME: &[u8] = b"f";
    const ROUNDS: usize = 3000;

    fn leased(ino: InodeId, attr: Attr) -> Arc<Inode> {
        let inode = Arc::new(Inode::new(ino, 0));
        let lease = Lease { kind: LeaseKind::Write, ..no_lease() };
        inode.lock().apply(&Entry { attr, lease }, 1);
        inode
    }

    /// A directory, a file that was created there, and the queue with its report.
    fn created(cred: &Cred) -> (Arc<Inode>, Arc<Inode>, Mutex<Queue>) {
        let scheme = Scheme { data: 4, parity: 2 };
        let layout = Layout { scheme, cell_shift: 20, first_pg: PgId(0), pg_count: 3, seed: 0 };
        let (owner, now) = (Owner { uid: cred.uid, gid: cred.gid }, Time { nanos: 1 });
        let mut queue = Queue::default();
        assert!(queue.note_create(DIR, 1, Instant(0)).is_some());
        let loan = NumberLoan { first: InodeId(100), numbers: 9, layout, limits: Limits::default() };
        queue.asked(DIR, Some(loan), Instant(0));
        let (ino, layout, _) = queue.take_number(DIR, owner).unwrap();
        let file = leased(ino, new_attr(ino, 0o644, owner, layout, now));
        file.lock().local.create();
        let attr = Attr { kind: FileKind::Directory, ..new_attr(DIR, 0o755, owner, layout, now) };
        let dir = leased(DIR, attr);
        dir.lock().names.note_created(NAME, ino);
        queue.push(DIR, Change::Created, file.clone(), Bytes::from_static(NAME), cred);
        (dir, file, Mutex::new(queue))
    }

    /// Reports all creates. Returns whether there were any.
    fn report(queue: &Mutex<Queue>) -> bool {
        let batch = queue.lock().unwrap().next_batch(DIR);
        for created in &batch {
            created.inode.lock().begin_report(|_, _| Bytes::new());
        }
        for created in &batch {
            created.inode.lock().end_report(2);
        }
        queue.lock().unwrap().end_batch(DIR);
        !batch.is_empty()
    }

    /// In each round they meet at another moment.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "two threads of the machine, as of a mount")]
    fn a_removal_that_meets_a_report_leaves_nothing_unreported() {
        let cred = Cred { uid: 1, gid: 1, groups: vec![] };
        for round in 0..ROUNDS {
            let (dir, file, queue) = created(&cred);
            let begin = Barrier::new(2);
            let removal = Removal { dir: &dir, file: &file, name: NAME, cred: &cred, now: Time { nanos: 2 } };
            let (way, reported) = std::thread::scope(|scope| {
                let reporting = scope.spawn(|| {
                    begin.wait();
                    report(&queue)
                });
                begin.wait();
                (removal.carry_out(&queue), reporting.join().expect("the report ends"))
            });
            let ends = match way {
                Some(Way::Cancelled) => (false, LocalState::Known),
                Some(Way::Reported { .. }) => (true, LocalState::Removed),
                None => (true, LocalState::Known),
            };
            assert_eq!((reported, file.lock().local.state()), ends, "round {round}: {way:?}");
            queue.lock().unwrap().check();
        }
    }
}
