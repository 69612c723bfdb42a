//! Quota reserved under limits of bytes, for each account: granted by the leader, spent by written and
//! uncommitted bytes.
//!
//! A leader of an older program knows volumes only: then all accounts of a volume are one, until nothing is
//! reserved any more and the leader is asked again.
//!
//! Lock order: an inode's state, then the table here.
use crate::inode::{NO_LIMIT, Settled};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use tokio::sync::RwLockReadGuard;
use weir_proto::quota::{Account, HeldSpace};

#[derive(Default)]
pub struct Reservations {
    table: Mutex<BTreeMap<Account, Held>>,
    /// The leader knows no owners.
    of_volumes: AtomicBool,
    /// Commits lock it for reading, a change of reservations for writing.
    pub gate: tokio::sync::RwLock<()>,
}

/// A commit is in flight: no reservation is negotiated. The leader counts the commit's bytes as used. If this
/// ended before they left the spent bytes, the next request would name them a second time, and the leader
/// never takes the reservation of written bytes away.
pub struct Committing<'a> {
    _gate: RwLockReadGuard<'a, ()>,
}

/// The reservation for one account, in bytes.
#[derive(Default)]
struct Held {
    granted: u64,
    /// The part of it that is written and not committed.
    spent: u64,
    /// Something was written since the last check.
    used: bool,
    /// A file's reservation ended: the leader may still hold a grant for it, after a change of owner.
    ended: bool,
}

impl Held {
    fn free(&self) -> u64 {
        self.granted.saturating_sub(self.spent)
    }
}

impl Reservations {
    fn table(&self) -> MutexGuard<'_, BTreeMap<Account, Held>> {
        self.table.lock().expect("no holder panics")
    }
    /// Under which account bytes are counted. With the table locked: the accounts change with it.
    fn key(&self, account: Account) -> Account {
        match self.is_of_volumes() && account != NO_LIMIT {
            true => Account { uid: u32::MAX, gid: u32::MAX, ..account },
            false => account,
        }
    }
    pub fn is_of_volumes(&self) -> bool {
        self.of_volumes.load(Relaxed)
    }
    /// The leader knows no owners: from now on all accounts of a volume are one.
    pub fn use_volumes(&self) {
        let mut table = self.table();
        self.of_volumes.store(true, Relaxed);
        for (account, other) in std::mem::take(&mut *table) {
            let held = table.entry(self.key(account)).or_default();
            held.granted += other.granted;
            held.spent += other.spent;
            held.used |= other.used;
            held.ended |= other.ended;
        }
    }
    /// To be held from before a commit of a file of this account until `end_commit`.
    pub async fn committing(&self, limited: Account) -> Option<Committing<'_>> {
        if limited == NO_LIMIT { None } else { Some(Committing { _gate: self.gate.read().await }) }
    }
    /// Ends a commit that was answered: the bytes that it added to the account's usage leave the grant, and
    /// the file's spent bytes change, in one step.
    pub fn end_commit(
        &self,
        committing: Option<Committing<'_>>,
        account: Account,
        added: u64,
        settled: impl Iterator<Item = Settled>,
    ) {
        {
            let mut table = self.table();
            if let Some(held) = table.get_mut(&self.key(account)) {
                held.granted = held.granted.saturating_sub(added);
            }
            settled.for_each(|settled| self.settle_in(&mut table, settled));
        }
        drop(committing);
    }
    /// The reservations to name to a restarted leader.
    pub fn held(&self) -> Vec<HeldSpace> {
        let table = self.table();
        let held = table.iter().filter(|(_, held)| held.granted > 0);
        held.map(|(account, held)| HeldSpace { account: *account, bytes: held.granted }).collect()
    }
    /// The session is gone, and with it all grants.
    pub fn expired(&self) {
        self.table().values_mut().for_each(|held| held.granted = 0);
    }
    /// Spends bytes of a grant. False: there is not enough.
    pub fn spend(&self, account: Account, bytes: u64) -> bool {
        let mut table = self.table();
        let held = table.entry(self.key(account)).or_default();
        held.used = true;
        let enough = bytes <= held.free();
        if enough {
            held.spent += bytes;
        }
        enough
    }
    /// A file's reservation has changed.
    pub fn settle(&self, settled: Settled) {
        self.settle_in(&mut self.table(), settled);
    }
    fn settle_in(&self, table: &mut BTreeMap<Account, Held>, settled: Settled) {
        let Settled { account, before, now } = settled;
        let held = table.entry(self.key(account)).or_default();
        held.spent = (held.spent + now).saturating_sub(before);
        held.ended |= now == 0;
    }
    pub fn free(&self, account: Account) -> u64 {
        let table = self.table();
        table.get(&self.key(account)).map_or(0, Held::free)
    }
    /// The spent bytes are about to be reported: until the answer no more may be spent.
    pub fn begin_asking(&self, account: Account) -> u64 {
        let mut table = self.table();
        let held = table.entry(self.key(account)).or_default();
        held.granted = held.granted.min(held.spent);
        held.spent
    }
    /// The leader has answered. The account's entry may have been dropped meanwhile.
    pub fn note_granted(&self, account: Account, granted: u64) {
        let mut table = self.table();
        table.entry(self.key(account)).or_default().granted = granted;
    }
    /// Accounts with more reserved than spent, or with writes since the last check; whether there were any.
    pub fn take_unused(&self) -> Vec<(Account, bool)> {
        let mut table = self.table();
        table.retain(|_, held| held.granted > 0 || held.spent > 0 || held.used || held.ended);
        if table.is_empty() {
            self.of_volumes.store(false, Relaxed); // the next leader may know owners
        }
        let over = table.iter_mut().filter(|(_, held)| held.granted != held.spent || held.used || held.ended);
        over.map(|(account, held)| {
            held.ended = false;
            (*account, std::mem::take(&mut held.used))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::VolumeId;

    #[test]
    fn accounts_of_a_volume_are_one_for_an_older_leader() {
        let all = Reservations::default();
        let account = |uid| Account { volume: VolumeId(3), uid, gid: 9 };
        for (uid, granted) in [(1, 100), (2, 50)] {
            all.note_granted(account(uid), granted);
            assert!(all.spend(account(uid), 30));
        }
        assert_eq!((all.free(account(1)), all.free(account(2))), (70, 20));
        all.use_volumes();
        assert_eq!((all.free(account(1)), all.free(account(7))), (90, 90), "they share it");
        assert_eq!(all.held().iter().map(|held| held.bytes).sum::<u64>(), 150);
        assert_eq!(all.begin_asking(account(2)), 60);
        all.note_granted(account(2), 60);
        assert!(!all.spend(account(1), 1));
        // Their bytes are committed: nothing is reserved, and the next leader is asked for owners again.
        for uid in [1, 2] {
            let settled = Settled { account: account(uid), before: 30, now: 0 };
            all.end_commit(None, account(uid), 30, [settled].into_iter());
        }
        (0..3).for_each(|_| drop(all.take_unused()));
        assert!(!all.is_of_volumes());
        assert_eq!(all.free(NO_LIMIT), 0);
    }

    /// A commit's bytes are used or reserved, never both: while they are still among the spent ones no
    /// reservation is negotiated, which would name them as reserved.
    #[test]
    fn no_request_sees_half_the_end_of_a_commit() {
        let all = Reservations::default();
        let account = Account { volume: VolumeId(3), uid: 1, gid: 9 };
        all.note_granted(account, 100);
        assert!(all.spend(account, 80));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let committing = runtime.block_on(all.committing(account));
        let mut settled = vec![Settled { account, before: 80, now: 5 }];
        let settled = std::iter::from_fn(|| {
            assert!(all.gate.try_write().is_err(), "a request may begin while bytes are counted twice");
            settled.pop()
        });
        all.end_commit(committing, account, 75, settled);
        assert!(all.gate.try_write().is_ok());
        assert_eq!((all.free(account), all.begin_asking(account)), (20, 5));
    }
}
