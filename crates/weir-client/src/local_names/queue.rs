//! Files that were created or removed locally, under an exclusive lease on their directory's names, while the
//! leader does not know of that yet.
//!
//! Invariants: numbers are used in order, each once; a directory has one batch in flight at a time, and its
//! changes are reported in their order. Pure: messages and inodes are the caller's.
use crate::inode::{Inode, Limits};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::local_creates::{BATCH_FILES_MAX, NUMBERS_MAX, NUMBERS_MIN};
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Cred, Time};
use weir_proto::posix::Owned;
use weir_proto::quota::Account;
use weir_proto::{Error, InodeId};

/// Creates in a directory are counted over this time.
const CREATES_WITHIN: Duration = Duration::from_secs(1);
/// After a refusal the leader is not asked again for this time.
const REFUSED_FOR: Duration = Duration::from_secs(1);
/// Directories whose creates are counted: beyond twice as many as are in use, idle ones are dropped.
const DIRS_MAX: usize = 1024;
/// Other clients used the directory or the file just now: the first pause before the leader is asked again.
const IN_USE_FOR: Duration = Duration::from_millis(5);
/// Directories whose names this client has. Beyond that, new ones are made without.
const OPEN_MAX: usize = 16 << 10;

/// Owner and group of a new file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

impl Owner {
    pub fn of_new(cred: &Cred, dir: &Attr) -> Owner {
        Owner { uid: cred.uid, gid: Owned::of(dir).gid_of_new(cred.gid) }
    }
}

/// Whether a file may be removed locally.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FilesLent {
    Yes,
    /// Other clients use it, or its directory, now.
    NotYet,
    No,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Created,
    Removed(Time),
}

/// A file whose creation or removal the leader does not know of.
#[derive(Clone)]
pub struct Unreported {
    /// Grows over all directories.
    pub serial: u64,
    pub change: Change,
    pub inode: Arc<Inode>,
    pub name: Bytes,
    pub cred: Cred,
}

impl Unreported {
    /// Whether one message can report both.
    fn is_like(&self, other: &Unreported) -> bool {
        let created = |u: &Unreported| u.change == Change::Created;
        created(self) == created(other) && self.cred == other.cred
    }
}

#[derive(Default)]
pub struct Queue {
    dirs: BTreeMap<InodeId, Dir>,
    /// Those with unreported changes.
    reporting: BTreeSet<InodeId>,
    /// How many are open.
    open: usize,
    sweep_at: usize,
    serial: u64,
    pace: Pace,
    removals: Pace,
}

/// How much this client makes or removes, in all directories.
#[derive(Default)]
struct Pace {
    since: Option<Instant>,
    by_messages: u32,
    serial: u64,
    /// In the period before.
    before: u64,
}

impl Pace {
    fn in_period(&self, serial: u64) -> u64 {
        u64::from(self.by_messages) + serial - self.serial
    }
    /// Something is made by a message, after `serial` local changes. Returns how much was made lately.
    fn note(&mut self, serial: u64, now: Instant) -> u64 {
        let age = self.since.map(|since| now.since(since));
        if age.is_none_or(|age| age > CREATES_WITHIN) {
            let is_next = age.is_some_and(|age| age <= 2 * CREATES_WITHIN);
            self.before = if is_next { self.in_period(serial) } else { 0 };
            (self.since, self.by_messages, self.serial) = (Some(now), 0, serial);
        }
        self.by_messages += 1;
        self.before.max(self.in_period(serial))
    }
}

/// Inode numbers for new files of a directory, lent by the leader.
#[derive(Clone, Copy, Debug)]
pub struct NumberLoan {
    pub first: InodeId,
    pub numbers: u32,
    pub layout: Layout,
    pub limits: Limits,
}

#[derive(Default)]
struct Dir {
    /// Files may be created: the lease is held, and no revoke of it has begun.
    is_open: bool,
    next: u64,
    end: u64,
    layout: Option<Layout>,
    /// Whose limits files with these numbers count under.
    limits: Limits,
    /// The size of the last block of numbers.
    numbers: u32,
    unsent: VecDeque<Unreported>,
    /// The serial of the first file of the batch in flight.
    sent: Option<u64>,
    /// A caller waits.
    hurried: bool,
    /// Creates by messages, and since when they are counted.
    creates: u32,
    since: Option<Instant>,
    asking: bool,
    /// The leader refused, and is not asked again before this time.
    refused_until: Option<Instant>,
    /// The last pause, while other clients use the directory or its files.
    pause: Duration,
    /// Files were lost, and no sync of the directory has reported that.
    lost: Option<Error>,
}

impl Dir {
    fn is_idle(&self) -> bool {
        self.unsent.is_empty() && self.sent.is_none() && !self.is_open && !self.asking && self.lost.is_none()
    }
    fn is_refused(&self, now: Instant) -> bool {
        self.refused_until.is_some_and(|until| now < until)
    }
    fn oldest(&self) -> Option<u64> {
        self.sent.or_else(|| self.unsent.front().map(|u| u.serial))
    }
}

/// Asking for names.
impl Queue {
    /// A file was created by a message. `Some`: it is time to ask for the lease on the names, with this count
    /// of numbers. `after`: the number of creates in the directory that makes it worth it.
    pub fn note_create(&mut self, dir: InodeId, after: u32, now: Instant) -> Option<u32> {
        self.pace.note(self.serial, now);
        self.sweep();
        let d = self.dirs.entry(dir).or_default();
        if d.since.is_none_or(|since| now.since(since) > CREATES_WITHIN) {
            (d.creates, d.since) = (0, Some(now));
        }
        d.creates += 1;
        let refused = d.is_refused(now);
        let enough = if d.is_open { d.next >= d.end } else { d.creates >= after };
        if !enough || refused || d.asking {
            return None;
        }
        d.asking = true;
        Some((d.numbers * 2).clamp(NUMBERS_MIN, NUMBERS_MAX))
    }
    /// A file is to be removed by a message. True: this client removes so much that it is worth it to ask for
    /// the right to do that by itself here, by [`Queue::ask`]. `after`: the number of removals and local
    /// changes that makes it worth it.
    pub fn note_unlink(&mut self, dir: InodeId, after: u32, now: Instant) -> bool {
        let is_much = self.removals.note(self.serial, now) >= u64::from(after) && self.open < OPEN_MAX;
        is_much && self.dirs.get(&dir).is_none_or(|d| !d.asking && !d.is_refused(now))
    }
    pub fn ask(&mut self, dir: InodeId) {
        self.sweep();
        self.dirs.entry(dir).or_default().asking = true;
    }
    /// The answer about files of a directory.
    pub fn asked_for_files(&mut self, dir: InodeId, answer: FilesLent, now: Instant) {
        let d = self.dirs.entry(dir).or_default();
        d.asking = false;
        match answer {
            FilesLent::Yes => (d.pause, d.refused_until) = (Duration::ZERO, None),
            FilesLent::NotYet => {
                d.pause = (2 * d.pause).clamp(IN_USE_FOR, REFUSED_FOR);
                d.refused_until = Some(now + d.pause);
            }
            FilesLent::No => d.refused_until = Some(now + REFUSED_FOR),
        }
    }
    fn sweep(&mut self) {
        if self.dirs.len() >= self.sweep_at.max(DIRS_MAX) {
            self.dirs.retain(|_, d| !d.is_idle());
            self.sweep_at = 2 * self.dirs.len();
        }
    }
    /// A directory is made. True: this client makes so much that it is worth it to ask for the names in it.
    pub fn note_mkdir(&mut self, after: u32, now: Instant) -> bool {
        self.pace.note(self.serial, now) >= u64::from(after) && self.open < OPEN_MAX
    }
    /// The answer; `None`: refused.
    pub fn asked(&mut self, dir: InodeId, lent: Option<NumberLoan>, now: Instant) {
        let d = self.dirs.entry(dir).or_default();
        d.asking = false;
        match lent {
            Some(NumberLoan { first, numbers, layout, limits }) => {
                (d.next, d.end, d.layout) = (first.0, first.0 + u64::from(numbers), Some(layout));
                self.open += usize::from(!d.is_open);
                (d.numbers, d.limits, d.is_open) = (numbers, limits, true);
            }
            None => d.refused_until = Some(now + REFUSED_FOR),
        }
    }
    /// A revoke began, or the lease is gone: no more local creates. True: some are not reported.
    pub fn close(&mut self, dir: InodeId) -> bool {
        let Some(d) = self.dirs.get_mut(&dir) else { return false };
        self.open -= usize::from(d.is_open);
        (d.is_open, d.numbers, d.creates) = (false, 0, 0);
        d.oldest().is_some()
    }
}

/// Unreported changes.
impl Queue {
    /// A number for a file of this directory, owner and group; `None`: the leader has to be asked.
    pub fn take_number(&mut self, dir: InodeId, owner: Owner) -> Option<(InodeId, Layout, Limits)> {
        let d = self.dirs.get_mut(&dir).filter(|d| d.is_open && d.next < d.end)?;
        let account = d.limits.account;
        let of_account = Owner { uid: account.uid, gid: account.gid };
        if account != Account::NONE && of_account != owner {
            return None;
        }
        let ino = InodeId(d.next);
        d.next += 1;
        Some((ino, Layout { seed: Layout::seed_of(ino), ..d.layout? }, d.limits))
    }
    pub fn is_open(&self, dir: InodeId) -> bool {
        self.dirs.get(&dir).is_some_and(|d| d.is_open)
    }
    /// A file was created or removed. True: the caller has to start a report.
    pub fn push(
        &mut self,
        dir: InodeId,
        change: Change,
        inode: Arc<Inode>,
        name: Bytes,
        cred: &Cred,
    ) -> bool {
        assert!(!name.is_empty(), "a change in directory {dir} is of a name");
        self.serial += 1;
        let d = self.dirs.entry(dir).or_default();
        d.unsent.push_back(Unreported { serial: self.serial, change, inode, name, cred: cred.clone() });
        self.reporting.insert(dir)
    }
    /// A file that was created and not reported is removed. False: it is being reported, or was.
    pub fn cancel(&mut self, dir: InodeId, ino: InodeId) -> bool {
        let Some(d) = self.dirs.get_mut(&dir) else { return false };
        let found = d.unsent.iter().rposition(|u| u.change == Change::Created && u.inode.ino == ino);
        found.is_some_and(|at| d.unsent.remove(at).is_some())
    }
    /// A file that was created and not reported gets another name. False: it is being reported, or was, or an
    /// unreported change has that name.
    pub fn rename(&mut self, dir: InodeId, ino: InodeId, name: Bytes) -> bool {
        let Some(d) = self.dirs.get_mut(&dir).filter(|d| d.is_open) else { return false };
        if d.unsent.iter().any(|u| u.name == name) {
            return false;
        }
        let found = d.unsent.iter_mut().rev().find(|u| u.change == Change::Created && u.inode.ino == ino);
        found.map(|u| u.name = name).is_some()
    }
    /// The next files to report, all created or all removed, by one user; none: all of the directory are
    /// reported.
    pub fn next_batch(&mut self, dir: InodeId) -> Vec<Unreported> {
        let Some(d) = self.dirs.get_mut(&dir) else { return Vec::new() };
        let first = d.unsent.front().cloned();
        let is_alike = |next: &&Unreported| first.as_ref().is_some_and(|first| first.is_like(next));
        let count = d.unsent.iter().take(BATCH_FILES_MAX).take_while(is_alike).count();
        let batch: Vec<Unreported> = d.unsent.drain(..count).collect();
        d.sent = batch.first().map(|first| first.serial);
        d.hurried &= !d.unsent.is_empty();
        if batch.is_empty() {
            self.reporting.remove(&dir);
        }
        batch
    }
    /// Returns files that did not fit into the batch.
    pub fn put_back(&mut self, dir: InodeId, rest: Vec<Unreported>) {
        if let Some(d) = self.dirs.get_mut(&dir) {
            d.hurried |= !rest.is_empty();
            rest.into_iter().rev().for_each(|unreported| d.unsent.push_front(unreported));
        }
    }
    /// The batch in flight was answered.
    pub fn end_batch(&mut self, dir: InodeId) {
        if let Some(d) = self.dirs.get_mut(&dir) {
            d.sent = None;
        }
    }
    /// Drops and returns all files that are not in flight; they never will be.
    pub fn drop_unsent(&mut self, dir: InodeId) -> Vec<Unreported> {
        self.close(dir);
        self.dirs.get_mut(&dir).map(|d| d.unsent.drain(..).collect()).unwrap_or_default()
    }
    pub fn note_lost(&mut self, dir: InodeId, e: Error) {
        self.dirs.entry(dir).or_default().lost = Some(e);
    }
    pub fn take_lost(&mut self, dir: InodeId) -> Option<Error> {
        self.dirs.get_mut(&dir)?.lost.take()
    }
    pub fn all_dirs(&self) -> Vec<InodeId> {
        self.dirs.keys().copied().collect()
    }
}

/// Waiting.
impl Queue {
    /// Panics where an invariant of this table does not hold.
    pub fn check(&self) {
        assert_eq!(
            self.open,
            self.dirs.values().filter(|d| d.is_open).count(),
            "open directories are counted"
        );
        for (dir, d) in &self.dirs {
            let serials = d.sent.into_iter().chain(d.unsent.iter().map(|u| u.serial));
            assert!(serials.is_sorted(), "the changes of directory {dir} are reported in their order");
            assert!(d.next <= d.end, "a number of directory {dir} is used once");
            assert!(d.unsent.is_empty() || self.reporting.contains(dir), "a task reports directory {dir}");
        }
    }
    /// The serial of the last change to wait for: of one directory, or of all. `None`: all are reported.
    pub fn newest(&mut self, of: Option<InodeId>) -> Option<u64> {
        let serial = self.serial;
        self.oldest(of)?;
        for dir in self.reporting.iter().filter(|dir| of.is_none_or(|of| of == **dir)) {
            if let Some(d) = self.dirs.get_mut(dir) {
                d.hurried |= d.oldest().is_some();
            }
        }
        Some(serial)
    }
    pub fn oldest(&self, of: Option<InodeId>) -> Option<u64> {
        match of {
            Some(dir) => self.dirs.get(&dir)?.oldest(),
            None => self.reporting.iter().filter_map(|dir| self.dirs.get(dir)?.oldest()).min(),
        }
    }
    /// Whether the directory's unreported files should be sent now.
    pub fn is_urgent(&self, dir: InodeId) -> bool {
        self.dirs.get(&dir).is_some_and(|d| d.hurried || d.unsent.len() >= BATCH_FILES_MAX)
    }
    pub fn unsent(&self, dir: InodeId) -> usize {
        self.dirs.get(&dir).map_or(0, |d| d.unsent.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::Scheme;
    use weir_proto::{PgId, VolumeId};

    const DIR: InodeId = InodeId(5);
    const OTHER: InodeId = InodeId(6);

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }
    fn layout() -> Layout {
        let scheme = Scheme { data: 4, parity: 2 };
        Layout { scheme, cell_shift: 20, first_pg: PgId(0), pg_count: 3, seed: 0 }
    }
    fn lent(first: u64, numbers: u32) -> NumberLoan {
        NumberLoan { first: InodeId(first), numbers, layout: layout(), limits: Limits::default() }
    }
    /// With the names of both directories, and this count of numbers in each.
    fn with_names(numbers: u32) -> Queue {
        let mut log = Queue::default();
        for (n, dir) in [DIR, OTHER].into_iter().enumerate() {
            assert!(log.note_create(dir, 1, at(0)).is_some());
            log.asked(dir, Some(lent(1000 * (n as u64 + 1), numbers)), at(0));
        }
        log
    }
    fn create(log: &mut Queue, dir: InodeId, uid: u32) -> bool {
        let (ino, layout, _) = log.take_number(dir, Owner { uid, gid: 1 }).expect("a number is left");
        assert_eq!(layout.seed, Layout::seed_of(ino));
        let cred = Cred { uid, gid: 1, groups: vec![] };
        let name = Bytes::from(format!("f{ino}"));
        log.push(dir, Change::Created, Arc::new(Inode::new(ino, 0)), name, &cred)
    }
    fn numbers(batch: &[Unreported]) -> Vec<u64> {
        batch.iter().map(|unreported| unreported.inode.ino.0).collect()
    }

    #[test]
    fn names_are_asked_for_after_many_creates_at_once() {
        let mut log = Queue::default();
        let asks = |log: &mut Queue, ms| log.note_create(DIR, 3, at(ms));
        assert_eq!([asks(&mut log, 0), asks(&mut log, 100)], [None, None]);
        assert_eq!(asks(&mut log, 2000), None, "earlier creates are too old to count");
        assert_eq!([asks(&mut log, 2001), asks(&mut log, 2002)], [None, Some(NUMBERS_MIN)]);
        assert_eq!(asks(&mut log, 2003), None, "it is being asked for");
        log.asked(DIR, None, at(2004));
        assert_eq!(asks(&mut log, 2005), None, "it was refused just now");
        (3000..3003).for_each(|ms| assert_eq!(asks(&mut log, ms), None));
        assert_eq!(asks(&mut log, 3010), Some(NUMBERS_MIN));
        log.asked(DIR, Some(lent(7, 256)), at(3011));
        assert_eq!(asks(&mut log, 3012), None, "numbers are left");
        (0..256).for_each(|_| assert!(log.take_number(DIR, Owner { uid: 1, gid: 1 }).is_some()));
        assert_eq!(log.take_number(DIR, Owner { uid: 1, gid: 1 }), None);
        assert_eq!(asks(&mut log, 3013), Some(512), "twice as many");
    }

    #[test]
    fn a_client_that_makes_much_builds_a_tree() {
        let mut log = Queue::default();
        let makes = |log: &mut Queue, ms| log.note_mkdir(4, at(ms));
        assert_eq!([0, 10, 20].map(|ms| makes(&mut log, ms)), [false; 3]);
        assert!(makes(&mut log, 30));
        assert!(makes(&mut log, 1500), "as much was made in the second before");
        assert!(!makes(&mut log, 4000), "that was long ago");
        let mut log = with_names(100);
        assert!(!log.note_mkdir(5, at(10)), "two creates and this");
        (0..2).for_each(|_| _ = create(&mut log, DIR, 1));
        assert!(log.note_mkdir(6, at(20)), "local creates count");
    }

    #[test]
    fn open_directories_are_counted_until_they_are_closed() {
        let mut log = with_names(10);
        log.asked(DIR, Some(lent(50, 4)), at(1));
        assert_eq!(log.open, 2);
        (0..2).for_each(|_| _ = log.close(DIR));
        assert_eq!(log.open, 1);
        log.open += OPEN_MAX;
        (0..10).for_each(|ms| assert!(!log.note_mkdir(1, at(ms)), "too many are open"));
    }

    #[test]
    fn under_limits_numbers_are_for_one_account() {
        let mut log = Queue::default();
        assert!(log.note_create(DIR, 1, at(0)).is_some());
        let account = Account { volume: VolumeId(3), uid: 7, gid: 9 };
        let limits = Limits { account, of_bytes: true };
        log.asked(DIR, Some(NumberLoan { limits, ..lent(50, 4) }), at(0));
        let mut taken =
            |(uid, gid)| log.take_number(DIR, Owner { uid, gid }).map(|(ino, _, limits)| (ino.0, limits));
        assert_eq!([taken((7, 8)), taken((8, 9)), taken((0, 0))], [None; 3]);
        assert_eq!([taken((7, 9)), taken((7, 9))], [Some((50, limits)), Some((51, limits))]);
    }

    #[test]
    fn batches_are_in_order_and_of_one_user() {
        let mut log = with_names(4096);
        assert!(create(&mut log, DIR, 1), "the first create has to start the reports");
        assert!(!create(&mut log, DIR, 1));
        assert!(!create(&mut log, DIR, 2));
        let first = log.next_batch(DIR);
        assert_eq!(numbers(&first), [1000, 1001]);
        log.put_back(DIR, vec![first[1].clone()]);
        assert!(log.is_urgent(DIR), "what did not fit goes at once");
        log.end_batch(DIR);
        assert_eq!(numbers(&log.next_batch(DIR)), [1001]);
        log.end_batch(DIR);
        assert_eq!(numbers(&log.next_batch(DIR)), [1002]);
        log.end_batch(DIR);
        assert!(log.next_batch(DIR).is_empty() && !log.is_urgent(DIR));
        assert!(create(&mut log, DIR, 1), "all was reported: the next create starts them again");
        (0..300).for_each(|_| assert!(!create(&mut log, DIR, 1)));
        assert!(log.is_urgent(DIR));
        assert_eq!(log.next_batch(DIR).len(), BATCH_FILES_MAX);
    }

    #[test]
    fn a_wait_is_for_what_was_created_before_it() {
        let mut log = with_names(100);
        assert_eq!(log.newest(None), None);
        create(&mut log, DIR, 1);
        create(&mut log, OTHER, 1);
        let (both, one) = (log.newest(None).unwrap(), log.newest(Some(DIR)).unwrap());
        create(&mut log, DIR, 1);
        assert_eq!(log.next_batch(DIR).len(), 2);
        let waits = |log: &Queue, of, newest| log.oldest(of).is_some_and(|oldest| oldest <= newest);
        assert!(waits(&log, Some(DIR), one), "it is on its way");
        log.end_batch(DIR);
        create(&mut log, DIR, 1);
        assert!(!waits(&log, Some(DIR), one) && waits(&log, None, both));
        log.next_batch(OTHER);
        log.end_batch(OTHER);
        assert!(!waits(&log, None, both));
    }

    #[test]
    fn creates_and_removals_are_reported_in_their_order() {
        let mut log = with_names(100);
        (0..3).for_each(|_| _ = create(&mut log, DIR, 1));
        let cred = Cred { uid: 1, gid: 1, groups: vec![] };
        let remove = |log: &mut Queue, ino| {
            let inode = Arc::new(Inode::new(InodeId(ino), 0));
            log.push(DIR, Change::Removed(Time { nanos: 0 }), inode, Bytes::from_static(b"old"), &cred)
        };
        remove(&mut log, 7);
        remove(&mut log, 8);
        create(&mut log, DIR, 1);
        assert!(log.cancel(DIR, InodeId(1001)) && !log.cancel(DIR, InodeId(1001)));
        assert!(!log.cancel(DIR, InodeId(7)), "it was not created here");
        let mut batch = || {
            let batch = numbers(&log.next_batch(DIR));
            log.end_batch(DIR);
            batch
        };
        assert_eq!([batch(), batch(), batch(), batch()], [vec![1000, 1002], vec![7, 8], vec![1003], vec![]]);
        assert!(!log.cancel(DIR, InodeId(1003)), "it is reported");
    }

    #[test]
    fn a_new_file_is_renamed_onto_names_without_unreported_changes() {
        let mut log = with_names(100);
        (0..3).for_each(|_| _ = create(&mut log, DIR, 1));
        let cred = Cred { uid: 1, gid: 1, groups: vec![] };
        let old = Arc::new(Inode::new(InodeId(7), 0));
        log.push(DIR, Change::Removed(Time { nanos: 0 }), old, Bytes::from_static(b"old"), &cred);
        let to = |log: &mut Queue, ino, name: &'static str| log.rename(DIR, InodeId(ino), name.into());
        assert!(to(&mut log, 1001, "new"));
        assert!(!to(&mut log, 1002, "new") && !to(&mut log, 1002, "old"), "their changes come first");
        assert!(!to(&mut log, 7, "other"), "it was removed");
        let batch = log.next_batch(DIR);
        let names: Vec<_> = batch.iter().map(|u| u.name.clone()).collect();
        assert_eq!(names, [&b"fi3e8"[..], b"new", b"fi3ea"]);
        log.put_back(DIR, batch[2..].to_vec());
        assert!(!to(&mut log, 1001, "late") && to(&mut log, 1002, "in time"));
        log.close(DIR);
        assert!(!to(&mut log, 1002, "closed"));
    }

    #[test]
    fn a_closed_directory_takes_no_creates_and_keeps_those_it_has() {
        let mut log = with_names(100);
        create(&mut log, DIR, 1);
        assert!(log.close(DIR) && !log.is_open(DIR));
        assert_eq!(log.take_number(DIR, Owner { uid: 1, gid: 1 }), None);
        assert!(!log.close(InodeId(99)));
        assert_eq!(numbers(&log.drop_unsent(DIR)), [1000]);
        assert!(!log.close(DIR));
        log.note_lost(DIR, Error::io("lost"));
        assert!(log.take_lost(DIR).is_some() && log.take_lost(DIR).is_none());
    }
}
