//! Names lent to the kernel: for a moment it may cache a name's target, or its absence.
//!
//! Invariants: a name is lent only while its directory's lease lets this client itself answer it from memory,
//! and not past the end of that lease's term; and a directory's lease is returned only after all loans of its
//! names have expired, while no new ones are made. So the kernel never has to drop a name: nothing here waits
//! for its locks, and a file system mounted on a directory inside is not detached. The cost is that a revoke
//! waits for the loans; so a directory lends no names before its lease was held for a moment, nor for a while
//! after a revoke that had to wait.
use crate::inode::Inode;
use crate::inodes::Inodes;
use crate::kernel::Kernel;
use crate::leader::Leader;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Env;
use weir_proto::meta::RenameMode;
use weir_proto::{InodeId, Result};

/// How long the kernel may keep a lent name. Long compared with a look-up (some 20 µs), so that names in use
/// cost little and a listing's names last until each was used; short compared with a delay that a person
/// notices when a change waits for it.
pub const LOAN: Duration = Duration::from_millis(200);
/// The time from the sending of an answer until the thread that waits for it in the kernel has begun to count
/// the loan, and the coarseness of the kernel's clock (10 ms). A thread is woken within microseconds; on a
/// busy machine it may have to wait for a processor.
const TAKING_UP: Duration = Duration::from_millis(100);

pub struct LentNames {
    env: Env,
    leader: Arc<Leader>,
    inodes: Arc<Inodes>,
    kernel: Arc<Kernel>,
}

impl LentNames {
    pub fn new(env: Env, leader: Arc<Leader>, inodes: Arc<Inodes>, kernel: Arc<Kernel>) -> LentNames {
        LentNames { env, leader, inodes, kernel }
    }

    /// Whether the kernel may cache the target of `name`, or its absence, for [`LOAN`].
    pub fn lend(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> bool {
        if let Some(inode) = leads_to.and_then(|ino| self.inodes.known(ino)) {
            inode.lock().forgotten = false;
        }
        let now = self.env.clock.now();
        let until = now + LOAN + TAKING_UP;
        if !self.kernel.keeps_names() || self.leader.leases_hold_until() < until {
            return false;
        }
        let Some(inode) = self.inodes.known(dir) else { return false };
        let mut st = inode.lock();
        if st.name(name) != Some(leads_to) || !st.loans.may_lend(now) {
            return false;
        }
        st.loans.extend(until);
        true
    }

    /// Returns when the kernel keeps no name of this directory any more. No more loans until its lease is
    /// gone (`Loans::end`).
    pub async fn end(&self, inode: &Inode) {
        let now = self.env.clock.now();
        let left = {
            let mut st = inode.lock();
            st.loans.begin_end();
            st.loans.rest(now)
        };
        if !left.is_zero() {
            self.env.clock.sleep(left).await;
        }
    }

    /// The kernel moves a name to another directory, with the rest of its loan, regardless of the answer.
    /// Returns when the other directory has counted that loan, or it has expired.
    pub async fn follow(&self, from: InodeId, to: InodeId, mode: RenameMode) {
        self.move_loan(from, to).await;
        if mode == RenameMode::Exchange {
            self.move_loan(to, from).await;
        }
    }

    async fn move_loan(&self, from: InodeId, to: InodeId) {
        let now = self.env.clock.now();
        let Some(source) = self.inodes.known(from).filter(|_| from != to) else { return };
        let until = source.lock().loans.until();
        let Some(until) = until.filter(|until| now < *until) else { return };
        if let Some(inode) = self.inodes.known(to) {
            let mut st = inode.lock();
            let holds = st.lease.is_held() && until <= self.leader.leases_hold_until();
            if holds && !st.loans.are_ending() {
                return st.loans.extend(until);
            }
        }
        let left = source.lock().loans.rest(now);
        self.env.clock.sleep(left).await;
    }

    /// The outcome of this client's change is not known, and the kernel may keep the former state: returns
    /// when it does not.
    pub async fn doubt<T>(&self, dirs: &[InodeId], done: Result<T>) -> Result<T> {
        use weir_proto::ErrorKind::{Damaged, Deadline, Io, Stale, Unavailable};
        if done.as_ref().is_err_and(|e| matches!(e.kind, Damaged | Deadline | Io | Stale | Unavailable)) {
            for inode in dirs.iter().filter_map(|dir| self.inodes.known(*dir)) {
                let left = inode.lock().loans.rest(self.env.clock.now());
                self.env.clock.sleep(left).await;
            }
        }
        done
    }
}
