//! Limits of volumes, users and groups, and the sessions' reservations for bytes that are not committed yet.
//! Pure: it gets events and returns decisions.
//!
//! Invariant: the sum of the usage under a limit and of the grants under it never exceeds the limit, except
//! for grants from before it was lowered. A grant is kept in memory: after a restart clients name theirs
//! before anything new is granted. Volumes without limits are not in here and cost nothing.
//!
//! Knows nothing of inodes, names or the network.

use crate::limits::{Limit, Over, has_limit, limits_bytes};
use crate::owner_limits::OwnerLimits;
use crate::record::VolumeRecord;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;
use weir_proto::meta::{Time, Usage};
use weir_proto::quota::{ALL_VOLUMES, Account, Holder, OwnerKind};
use weir_proto::volume::{Policy, Retention};
use weir_proto::{Error, Result, SessionId, VolumeId};

/// Of the free bytes beyond a client's immediate need, it gets at most this part: others need some, too.
const SHARE: u64 = 4;
/// The owner of files of a client that does not name them.
const NOT_NAMED: u32 = u32::MAX;

/// The cluster's default.
pub static NO_POLICY: Policy = Policy { scheme: None, pool: None };

/// All volumes with a limit, a policy, a trash or a schedule.
#[derive(Default, Debug)]
pub struct Quotas {
    limited: BTreeMap<VolumeId, Limited>,
    pub owners: OwnerLimits,
    granted: BTreeMap<Account, BTreeMap<SessionId, u64>>,
    policies: BTreeMap<VolumeId, Policy>,
    retentions: BTreeMap<VolumeId, Retention>,
    write_floors: BTreeMap<VolumeId, u8>,
    /// Notified when a client did not get its immediate need in a volume whose files are evicted.
    pub short: Arc<Notify>,
    /// Notified when a volume's trash takes space that is needed.
    pub full: Arc<Notify>,
    /// The session that was starved at its last request, with its immediate need: the one that lacks most in
    /// each volume.
    starved: BTreeMap<VolumeId, (u64, SessionId, Account)>,
}

#[derive(Debug)]
struct Limited {
    name: String,
    limit: Limit,
}

/// A client's report of its reservation in a volume, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// Written already and not committed.
    pub spent: u64,
    /// Written bytes, and those of the write in progress.
    pub must: u64,
    /// These, and the expected next writes.
    pub want: u64,
}

impl Quotas {
    /// A volume's record as it is now; `None`: it is gone.
    pub fn note(&mut self, id: VolumeId, record: Option<&VolumeRecord>) {
        match record.filter(|r| r.policy != NO_POLICY) {
            Some(record) => drop(self.policies.insert(id, record.policy.clone())),
            None => drop(self.policies.remove(&id)),
        }
        match record.filter(|r| r.retention != Retention::NOTHING && !r.deleting) {
            Some(record) => drop(self.retentions.insert(id, record.retention)),
            None => drop(self.retentions.remove(&id)),
        }
        match record.filter(|r| r.write_floor > 0) {
            Some(record) => drop(self.write_floors.insert(id, record.write_floor)),
            None => drop(self.write_floors.remove(&id)),
        }
        if record.is_none() {
            self.owners.forget_volume(id);
        }
        let Some(record) = record.filter(|r| has_limit(&r.quota)) else {
            self.limited.remove(&id);
            self.forget_unlimited();
            return;
        };
        let over = Over { bytes_since: record.bytes_over_since, inodes_since: record.inodes_over_since };
        let limit = Limit { quota: record.quota, over };
        self.limited.insert(id, Limited { name: record.name.clone(), limit });
    }
    /// Drops grants to which no limit applies any more: their clients report them no more.
    pub fn forget_unlimited(&mut self) {
        let mut granted = std::mem::take(&mut self.granted);
        granted.retain(|account, _| self.limits_account(*account));
        self.granted = granted;
    }

    pub fn policy(&self, id: VolumeId) -> &Policy {
        self.policies.get(&id).unwrap_or(&NO_POLICY)
    }
    /// Volumes with a schedule of snapshots or a trash.
    pub fn retentions(&self) -> &BTreeMap<VolumeId, Retention> {
        &self.retentions
    }
    /// The least number of current members of a group for a write to each of these volumes.
    pub fn write_floors(&self) -> &BTreeMap<VolumeId, u8> {
        &self.write_floors
    }
    /// A client did not get its immediate need, in bytes.
    pub fn note_starved(&mut self, account: Account, session: SessionId, must: u64) {
        let most = self.starved.entry(account.volume).or_insert((must, session, account));
        *most = (*most).max((must, session, account));
        self.full.notify_one();
        self.short.notify_one();
    }
    /// Usage to evict down to so that starved sessions get their reservation; each is returned once.
    pub fn take_goals(&mut self, now: Time) -> Vec<(VolumeId, u64)> {
        let starved = std::mem::take(&mut self.starved);
        let goal = |(id, (must, session, account)): (VolumeId, (u64, SessionId, Account))| {
            let max = self.bytes_max(id, now)?;
            let others = self.granted(|of| of.volume == id, Some((session, account)));
            Some((id, max.saturating_sub(others).saturating_sub(must)))
        };
        starved.into_iter().filter_map(goal).collect()
    }
    /// Whether there is no limit at all.
    pub fn is_empty(&self) -> bool {
        self.limited.is_empty() && self.owners.is_empty()
    }
    /// Whether the volume has a limit of any kind.
    pub fn is_limited(&self, id: VolumeId) -> bool {
        self.limited.contains_key(&id)
    }
    pub fn limits_bytes(&self, id: VolumeId) -> bool {
        self.limited.get(&id).is_some_and(|l| limits_bytes(&l.limit.quota))
    }
    /// Whether a limit of bytes applies to files of an account.
    pub fn limits_account(&self, account: Account) -> bool {
        self.limits_bytes(account.volume) || self.owners.limit_bytes(account)
    }
    /// The account of a client that does not name owners: only its volume's limit applies.
    pub fn account_of_volume(volume: VolumeId) -> Account {
        Account { volume, uid: NOT_NAMED, gid: NOT_NAMED }
    }

    /// The lower one of a volume's limits of inodes.
    pub fn inodes_lowest(&self, id: VolumeId) -> Option<u64> {
        self.limited.get(&id)?.limit.inodes_lowest()
    }
    /// Refuses one more file or directory over the limit.
    pub fn check_inodes(&self, id: VolumeId, usage: &Usage, now: Time) -> Result<()> {
        let Some(limited) = self.limited.get(&id) else { return Ok(()) };
        match limited.limit.inodes_max(now) {
            Some(max) if inodes(usage) >= max => Err(Error::over_quota(format!(
                "volume {:?} has {} files and directories, its limit is {max}",
                limited.name,
                inodes(usage)
            ))),
            _ => Ok(()),
        }
    }
    /// Refuses bytes that are added to a volume at once.
    pub fn check_bytes(&self, id: VolumeId, used: u64, more: u64, now: Time) -> Result<()> {
        let (Some(limited), Some(max)) = (self.limited.get(&id), self.bytes_max(id, now)) else {
            return Ok(());
        };
        let taken = used.saturating_add(self.granted(|of| of.volume == id, None));
        if taken.saturating_add(more) <= max {
            return Ok(());
        }
        Err(Error::over_quota(format!(
            "volume {:?} has {taken} bytes of its limit, {max}: {more} more do not fit",
            limited.name
        )))
    }

    /// The limit of a volume's bytes now.
    pub fn bytes_max(&self, id: VolumeId, now: Time) -> Option<u64> {
        self.limited.get(&id)?.limit.bytes_max(now)
    }
    /// The grants under the limit of a volume, except that of one session for one account.
    pub fn granted_in(&self, id: VolumeId, but: Option<(SessionId, Account)>) -> u64 {
        self.granted(|account| account.volume == id, but)
    }
    /// The grants under the limit of a user or a group.
    pub fn granted_to(&self, holder: Holder, but: Option<(SessionId, Account)>) -> u64 {
        self.granted(|account| is_under(account, holder), but)
    }
    fn granted(&self, is_under: impl Fn(Account) -> bool, but: Option<(SessionId, Account)>) -> u64 {
        let accounts = self.granted.iter().filter(|(account, _)| is_under(**account));
        let grants =
            accounts.flat_map(|(account, all)| all.iter().map(|(session, n)| ((*session, *account), *n)));
        grants.filter(|(held, _)| Some(*held) != but).map(|(_, bytes)| bytes).sum()
    }
    pub fn set(&mut self, account: Account, session: SessionId, bytes: u64) {
        if bytes > 0 && self.limits_account(account) {
            self.granted.entry(account).or_default().insert(session, bytes);
        } else if let Some(grants) = self.granted.get_mut(&account) {
            grants.remove(&session);
            if grants.is_empty() {
                self.granted.remove(&account);
            }
        }
    }
    /// A session's bytes are committed: they are used and not granted any more.
    pub fn consume(&mut self, account: Account, session: SessionId, bytes: u64) {
        for account in [account, Quotas::account_of_volume(account.volume)] {
            let held = self.granted.get(&account).and_then(|grants| grants.get(&session)).copied();
            if let Some(held) = held {
                return self.set(account, session, held.saturating_sub(bytes));
            }
        }
    }
    pub fn is_granted_to(&self, session: SessionId) -> bool {
        self.granted.values().any(|grants| grants.contains_key(&session))
    }
    pub fn drop_session(&mut self, session: SessionId) {
        for grants in self.granted.values_mut() {
            grants.remove(&session);
        }
        self.granted.retain(|_, grants| !grants.is_empty());
    }

    /// Since when the volume is over its soft limits, if that changes with this usage.
    pub fn crossing(&self, id: VolumeId, usage: &Usage, now: Time) -> Option<Over> {
        self.limited.get(&id)?.limit.crossing(usage.bytes, inodes(usage), now)
    }
}

/// Whether the limit of a user or a group applies to files of this account.
pub fn is_under(account: Account, holder: Holder) -> bool {
    let id = if holder.kind == OwnerKind::User { account.uid } else { account.gid };
    id == holder.id && account.uid != 0 && [account.volume, ALL_VOLUMES].contains(&holder.volume)
}

/// The bytes that a client may hold.
pub fn grant(ask: Ask, used: u64, others: u64, max: u64) -> u64 {
    let free = max.saturating_sub(used).saturating_sub(others);
    match free.checked_sub(ask.must) {
        Some(rest) => ask.must + ask.want.saturating_sub(ask.must).min(rest / SHARE),
        // Less than its immediate need; and written bytes keep their reservation.
        None => free.max(ask.spent),
    }
}

fn inodes(usage: &Usage) -> u64 {
    usage.files.saturating_add(usage.directories)
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner_limits::OwnerRecord;
    use proptest::prelude::*;
    use weir_proto::volume::Quota;

    const MIB: u64 = 1 << 20;

    #[test]
    fn grants_get_small_when_little_is_left() {
        let ask = |must, want| Ask { spent: 0, must, want };
        for (ask, used, others, held) in [
            (ask(MIB, 65 * MIB), 0, 0, MIB + 9 * MIB / 4),
            (ask(MIB, 2 * MIB), 0, 0, 2 * MIB),
            (ask(MIB, 65 * MIB), 9 * MIB, 0, MIB),
            (ask(MIB, 65 * MIB), 8 * MIB, MIB + 5, MIB - 5),
            (ask(MIB, 65 * MIB), 10 * MIB, 0, 0),
            (ask(MIB, 65 * MIB), 12 * MIB, MIB, 0),
            (Ask { spent: 3, must: 5, want: 9 }, 10 * MIB - 2, 0, 3),
            (Ask { spent: 3, must: 3, want: 3 }, 0, 0, 3),
        ] {
            assert_eq!(grant(ask, used, others, 10 * MIB), held, "{ask:?} {used} {others}");
        }
    }

    #[test]
    fn grants_count_under_each_limit_that_applies() {
        let mut quotas = Quotas::default();
        let (v, w, all) = (VolumeId(3), VolumeId(4), VolumeId(0));
        let holder = |volume, kind, id| Holder { volume, kind, id };
        let quota = Quota { bytes_hard: Some(100), ..Quota::NONE };
        let limit = Some(OwnerRecord { quota: Some(quota), ..OwnerRecord::default() });
        quotas.owners.note(holder(all, OwnerKind::User, 7), limit);
        quotas.owners.note(holder(v, OwnerKind::Group, 9), limit);
        let (a, b) = (SessionId(1), SessionId(2));
        let account = |volume, uid, gid| Account { volume, uid, gid };
        quotas.set(account(v, 7, 9), a, 10);
        quotas.set(account(w, 7, 5), b, 3);
        quotas.set(account(v, 8, 9), b, 20);
        quotas.set(account(w, 8, 5), b, 40);
        let granted = |q: &Quotas, of| q.granted_to(of, Some((a, account(v, 7, 9))));
        assert_eq!(granted(&quotas, holder(all, OwnerKind::User, 7)), 3);
        assert_eq!(granted(&quotas, holder(v, OwnerKind::Group, 9)), 20);
        assert_eq!(quotas.granted_in(w, None), 3, "no limit applies to user 8 and group 5 there");
        quotas.consume(account(v, 7, 9), a, 4);
        assert_eq!(quotas.granted_to(holder(all, OwnerKind::User, 7), None), 9);
        quotas.owners.note(holder(v, OwnerKind::Group, 9), None);
        quotas.forget_unlimited();
        assert_eq!(quotas.granted_in(v, None), 6);
        quotas.drop_session(a);
        assert_eq!(quotas.granted_in(v, None), 0);
    }

    proptest! {
        /// For any sequence of requests, writes and commits, used and granted bytes stay within the limit.
        #[test]
        fn usage_never_exceeds_the_limit(steps in prop::collection::vec((0u64..3, 0u64..40, 0u64..100), 1..200)) {
            let max = 1000;
            let (mut used, mut spent, mut held) = (0, [0u64; 3], [0u64; 3]);
            for (who, grow, reserve) in steps {
                let me = who as usize;
                let others: u64 = held.iter().sum::<u64>() - held[me];
                let must = spent[me] + grow;
                held[me] = grant(Ask { spent: spent[me], must, want: must + reserve }, used, others, max);
                if must <= held[me] {
                    spent[me] = must;
                }
                if grow % 5 == 0 {
                    used += spent[me];
                    held[me] -= spent[me];
                    spent[me] = 0;
                }
                prop_assert!(used + held.iter().sum::<u64>() <= max);
                prop_assert!(spent[me] <= held[me]);
            }
        }
    }
}
