//! What the kernel keeps of one mount, and how it is told to forget: before a lease goes back, what the client forgets the kernel
//! must have forgotten.
//!
//! Invariant: no notice overtakes an answer. An inode of which an answer is on its way is not known to the kernel yet, so a notice
//! of it would be lost; such a notice is sent again until the kernel has taken the answer up. Names are all asked for again at once
//! (`FUSE_NOTIFY_INC_EPOCH`): the kernel reads the epoch before it asks, so an answer of before does not count after. Not so for
//! `READDIRPLUS`, where it reads it when it takes the answer up, under the directory's lock: such an answer is waited for with a notice
//! that takes that lock, and the names are asked for again once more. It is not waited for long: an operation may hold the lock that
//! waits for this very recall, which is why names are not told one by one (`FUSE_NOTIFY_INVAL_ENTRY`).
use super::translate::to_kernel_ino;
use fuser::{FileHandle, INodeNo, Notifier, Version};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use weir_client::{Forget, KernelCache};
use weir_proto::InodeId;

/// The protocol that has `FUSE_NOTIFY_INC_EPOCH`: Linux 6.16.
const EPOCHS_SINCE: Version = Version(7, 44);
/// Parts of the table of inodes, so that requests seldom meet.
const PARTS: usize = 16;
/// A thread in the kernel takes an answer up within microseconds of being woken. One that has not in so long never will: the request
/// had been given up when it was answered.
const TAKEN_UP_LOOKS: u32 = 500;
const TAKEN_UP_PAUSE: Duration = Duration::from_micros(100);

/// How long a recall waits for a listing that was answered to be taken up. If something else holds the directory's lock it goes on
/// without, and the names are asked for again when the lock was had.
const LISTING_PATIENCE: Duration = Duration::from_millis(20);
/// No file has this name: a notice of it takes the directory's lock, and does nothing.
const NO_NAME: &str = "\u{1}weir: taken up?";

/// What the kernel was told of an inode.
#[derive(Clone, Copy)]
struct Told {
    answers: u64,
    last: Instant,
}

/// The kernel's caches of one mount. Empty until the mount is there, so nothing has to be forgotten before.
pub struct Notices {
    notifier: OnceLock<Notifier>,
    /// Whether names may be kept where the kernel can be told of them.
    names_wanted: bool,
    keeps_names: AtomicBool,
    /// How many answers told the kernel of each inode, and were not taken back by it (`FORGET`).
    told: [Mutex<HashMap<INodeNo, Told>>; PARTS],
    /// Streams whose last answer had names to keep, and may not be taken up yet; of which directory.
    listings: Mutex<HashMap<u64, INodeNo>>,
    /// Something is mounted on a directory of this mount.
    covered: AtomicBool,
}

impl Default for Notices {
    fn default() -> Notices {
        Notices::new(true)
    }
}

impl Notices {
    pub fn new(names_wanted: bool) -> Notices {
        Notices {
            notifier: OnceLock::new(),
            names_wanted,
            keeps_names: AtomicBool::new(false),
            told: Default::default(),
            listings: Mutex::default(),
            covered: AtomicBool::new(false),
        }
    }

    pub(super) fn mounted(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier); // one mount per client
    }

    /// The kernel's first words.
    pub(super) fn speaks(&self, version: Version) {
        let can = version >= EPOCHS_SINCE;
        match (can, self.names_wanted) {
            (true, true) => tracing::debug!("the kernel speaks FUSE {version}: it keeps names under leases"),
            (true, false) => tracing::debug!("the kernel keeps no names: `kernel_names` is false"),
            (false, _) => tracing::debug!(
                "the kernel speaks FUSE {version}, before {EPOCHS_SINCE}: it keeps no names, and asks for each each time"
            ),
        }
        self.keeps_names.store(can && self.names_wanted, Ordering::Release);
    }

    fn part(&self, ino: INodeNo) -> MutexGuard<'_, HashMap<INodeNo, Told>> {
        // Numbers of inodes made together are neighbours.
        let part = &self.told[ino.0 as usize % PARTS];
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// An answer that tells the kernel of an inode is about to be sent.
    pub fn tell(&self, ino: INodeNo) {
        let last = Instant::now();
        let mut part = self.part(ino);
        let told = part.entry(ino).or_insert(Told { answers: 0, last });
        *told = Told { answers: told.answers + 1, last };
    }
    /// The kernel took so many answers back. True: it knows nothing of the inode any more.
    pub fn forgotten(&self, ino: INodeNo, answers: u64) -> bool {
        let mut part = self.part(ino);
        let Some(told) = part.get_mut(&ino) else { return true };
        told.answers = told.answers.saturating_sub(answers);
        let none = told.answers == 0;
        if none {
            part.remove(&ino);
        }
        none
    }
    fn listings(&self) -> MutexGuard<'_, HashMap<u64, INodeNo>> {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The next answer to a stream is about to have names that the kernel may keep.
    pub fn lists(&self, fh: FileHandle, dir: INodeNo) {
        self.listings().insert(fh.0, dir);
    }
    /// The kernel has taken all answers to a stream up: it asks on, or has closed it.
    pub fn listed(&self, fh: FileHandle) {
        self.listings().remove(&fh.0);
    }

    /// Whether other file systems are mounted on directories inside. The kernel would take them off when it asks for names again:
    /// it keeps none from then on. Those of before end by themselves.
    pub fn covered(&self, covered: bool) {
        if covered && !self.covered.swap(true, Ordering::AcqRel) && self.keeps_names.load(Ordering::Acquire) {
            tracing::warn!(
                "another file system is mounted inside of this mount: the kernel keeps no names any more (see --no-kernel-names)"
            );
        }
    }

    /// Whether the kernel was told of an inode less than `within` ago.
    pub fn is_fresh(&self, ino: INodeNo, within: Duration) -> bool {
        self.part(ino).get(&ino).is_some_and(|told| told.last.elapsed() < within)
    }
    fn is_told(&self, ino: INodeNo) -> bool {
        self.part(ino).contains_key(&ino)
    }

    /// False: the kernel should know the inode, and does not.
    fn invalidate(&self, notifier: &Notifier, ino: INodeNo, offset: i64, len: i64) -> bool {
        for _ in 0..TAKEN_UP_LOOKS {
            match notifier.inval_known_inode(ino, offset, len) {
                Ok(false) if self.is_told(ino) => std::thread::sleep(TAKEN_UP_PAUSE),
                Ok(_) => return true,
                Err(e) => {
                    // The mount went away: there is no cache left.
                    tracing::debug!("forget {ino} in the kernel: {e}");
                    return true;
                }
            }
        }
        false
    }
}

impl KernelCache for Notices {
    fn invalidate_inode(&self, ino: InodeId, what: Forget) {
        let Some(notifier) = self.notifier.get() else { return };
        // A negative offset means: attributes only. Length 0 means: to the end.
        let (offset, len) = match what {
            Forget::Attributes => (-1, 0),
            Forget::All => (0, 0),
            Forget::Part(offset, len) => (offset as i64, len as i64), // no file is longer
        };
        let ino = to_kernel_ino(ino);
        if !self.invalidate(notifier, ino, offset, len) {
            self.part(ino).remove(&ino);
            // If it is taken up after all, nobody finds it by its name.
            self.forget_names();
        }
    }

    fn keeps_names(&self) -> bool {
        self.keeps_names.load(Ordering::Acquire)
    }

    fn takes_names(&self) -> bool {
        self.keeps_names() && !self.covered.load(Ordering::Acquire)
    }

    fn is_listing(&self, dir: InodeId) -> bool {
        let dir = to_kernel_ino(dir);
        self.listings().values().any(|listed| *listed == dir)
    }

    fn forget_listing(&self, dir: InodeId) {
        let Some(notifier) = self.notifier.get().cloned() else { return };
        let (dir, (taken_up, waits)) = (to_kernel_ino(dir), std::sync::mpsc::sync_channel(1));
        std::thread::spawn(move || {
            let told = notifier.inval_entry(dir, OsStr::new(NO_NAME)).and_then(|()| notifier.inc_epoch());
            if let Err(e) = told {
                tracing::debug!("forget a listing in the kernel: {e}"); // the mount went away
            }
            let _ = taken_up.try_send(()); // nobody waits any more
        });
        let _ = waits.recv_timeout(LISTING_PATIENCE); // then it is told later
    }

    fn forget_names(&self) {
        let Some(notifier) = self.notifier.get().filter(|_| self.keeps_names()) else { return };
        if let Err(e) = notifier.inc_epoch() {
            tracing::debug!("forget names in the kernel: {e}"); // the mount went away
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_told_until_all_answers_are_taken_back() {
        let (notices, ino) = (Notices::default(), INodeNo(77));
        notices.tell(ino);
        notices.tell(ino);
        assert!(notices.is_told(ino) && !notices.is_told(INodeNo(78)));
        assert!(!notices.forgotten(ino, 1));
        assert!(notices.forgotten(ino, 1) && !notices.is_told(ino));
        assert!(notices.forgotten(ino, 1), "an answer that was given up");
    }

    #[test]
    fn names_are_kept_where_the_kernel_can_be_told_of_them_and_it_is_wanted() {
        for (minor, wanted, keeps) in
            [(44, true, true), (45, true, true), (43, true, false), (44, false, false)]
        {
            let notices = Notices::new(wanted);
            assert!(!notices.keeps_names(), "before the kernel has spoken");
            notices.speaks(Version(7, minor));
            assert_eq!(notices.keeps_names(), keeps, "7.{minor}, {wanted}");
        }
    }
}
