//! Limits of volumes, and the sessions' reservations for bytes that are not committed yet. Pure: it gets
//! events and returns decisions.
//!
//! Invariant: the sum of a volume's usage and its grants never exceeds the limit, except for grants from
//! before the limit was lowered. A grant is kept in memory: after a restart clients name theirs before
//! anything new is granted. Volumes without limits are not in here and cost nothing.
//!
//! Knows nothing of inodes, names or the network.

use crate::record::VolumeRecord;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;
use weir_proto::meta::{Time, Usage};
use weir_proto::volume::{Policy, Quota, Retention};
use weir_proto::{Error, Result, SessionId, VolumeId};

/// Of the free bytes beyond a client's immediate need, it gets at most this part: others need some, too.
const SHARE: u64 = 4;
const SECOND: i64 = 1_000_000_000;

/// The cluster's default.
pub static NO_POLICY: Policy = Policy { scheme: None, pool: None };

/// All volumes with a limit, a policy, a trash or a schedule.
#[derive(Default, Debug)]
pub struct Quotas {
    limited: BTreeMap<VolumeId, Limited>,
    policies: BTreeMap<VolumeId, Policy>,
    retentions: BTreeMap<VolumeId, Retention>,
    /// Notified when a client did not get its immediate need in a volume whose files are evicted.
    pub short: Arc<Notify>,
    /// Notified when a volume's trash takes space that is needed.
    pub full: Arc<Notify>,
    /// The session that was starved at its last request, with its immediate need: the one that lacks most in
    /// each volume.
    starved: BTreeMap<VolumeId, (u64, SessionId)>,
}

#[derive(Debug)]
struct Limited {
    name: String,
    quota: Quota,
    over: Over,
    granted: BTreeMap<SessionId, u64>,
}

/// Since when a volume is above its soft limits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Over {
    pub bytes_since: Option<Time>,
    pub inodes_since: Option<Time>,
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
        let Some(record) = record.filter(|r| has_limit(&r.quota)) else {
            self.limited.remove(&id);
            return;
        };
        let granted = self.limited.remove(&id).map(|l| l.granted).unwrap_or_default();
        let over = Over { bytes_since: record.bytes_over_since, inodes_since: record.inodes_over_since };
        let limited = Limited { name: record.name.clone(), quota: record.quota, over, granted };
        self.limited.insert(id, limited);
    }

    pub fn policy(&self, id: VolumeId) -> &Policy {
        self.policies.get(&id).unwrap_or(&NO_POLICY)
    }
    /// Volumes with a schedule of snapshots or a trash.
    pub fn retentions(&self) -> &BTreeMap<VolumeId, Retention> {
        &self.retentions
    }
    /// A client did not get its immediate need, in bytes.
    pub fn note_starved(&mut self, id: VolumeId, session: SessionId, must: u64) {
        let most = self.starved.entry(id).or_default();
        *most = (*most).max((must, session));
        self.full.notify_one();
        self.short.notify_one();
    }
    /// Usage to evict down to so that starved sessions get their reservation; each is returned once.
    pub fn take_goals(&mut self, now: Time) -> Vec<(VolumeId, u64)> {
        let starved = std::mem::take(&mut self.starved);
        let goal = |(id, (must, session)): (VolumeId, (u64, SessionId))| {
            let max = self.bytes_max(id, now)?;
            Some((id, max.saturating_sub(self.granted(id, Some(session))).saturating_sub(must)))
        };
        starved.into_iter().filter_map(goal).collect()
    }
    /// Whether no volume has a limit.
    pub fn is_empty(&self) -> bool {
        self.limited.is_empty()
    }
    /// Whether there is a limit of any kind.
    pub fn is_limited(&self, id: VolumeId) -> bool {
        self.limited.contains_key(&id)
    }
    pub fn limits_bytes(&self, id: VolumeId) -> bool {
        self.limited.get(&id).is_some_and(|l| limits_bytes(&l.quota))
    }

    /// Refuses one more file or directory over the limit.
    pub fn check_inodes(&self, id: VolumeId, usage: &Usage, now: Time) -> Result<()> {
        let Some(limited) = self.limited.get(&id) else { return Ok(()) };
        let quota = &limited.quota;
        let since = limited.over.inodes_since;
        match max_now(quota.inodes_hard, quota.inodes_soft, since, quota.grace_s, now) {
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
        let taken = used.saturating_add(self.granted(id, None));
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
        let Limited { quota, over, .. } = self.limited.get(&id)?;
        max_now(quota.bytes_hard, quota.bytes_soft, over.bytes_since, quota.grace_s, now)
    }
    /// The grants to all except one session.
    pub fn granted(&self, id: VolumeId, but: Option<SessionId>) -> u64 {
        let granted = self.limited.get(&id).into_iter().flat_map(|l| &l.granted);
        granted.filter(|(session, _)| Some(**session) != but).map(|(_, bytes)| *bytes).sum()
    }
    pub fn set(&mut self, id: VolumeId, session: SessionId, bytes: u64) {
        let Some(limited) = self.limited.get_mut(&id) else { return };
        match bytes {
            0 => limited.granted.remove(&session),
            bytes => limited.granted.insert(session, bytes),
        };
    }
    /// A session's bytes are committed: they are used and not granted any more.
    pub fn consume(&mut self, id: VolumeId, session: SessionId, bytes: u64) {
        let held = self.limited.get(&id).and_then(|l| l.granted.get(&session)).copied();
        if let Some(held) = held {
            self.set(id, session, held.saturating_sub(bytes));
        }
    }
    pub fn drop_session(&mut self, session: SessionId) {
        for limited in self.limited.values_mut() {
            limited.granted.remove(&session);
        }
    }

    /// Since when the volume is over its soft limits, if that changes with this usage.
    pub fn crossing(&self, id: VolumeId, usage: &Usage, now: Time) -> Option<Over> {
        let Limited { quota, over, .. } = self.limited.get(&id)?;
        let is = Over {
            bytes_since: since(quota.bytes_soft, usage.bytes, over.bytes_since, now),
            inodes_since: since(quota.inodes_soft, inodes(usage), over.inodes_since, now),
        };
        (is != *over).then_some(is)
    }
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

pub fn has_limit(quota: &Quota) -> bool {
    limits_bytes(quota) || quota.inodes_hard.or(quota.inodes_soft).is_some()
}
pub fn limits_bytes(quota: &Quota) -> bool {
    quota.bytes_hard.or(quota.bytes_soft).is_some()
}
fn inodes(usage: &Usage) -> u64 {
    usage.files.saturating_add(usage.directories)
}
fn since(soft: Option<u64>, used: u64, before: Option<Time>, now: Time) -> Option<Time> {
    soft.is_some_and(|soft| used > soft).then(|| before.unwrap_or(now))
}
/// The effective limit; a soft one takes effect when its grace is over.
fn max_now(
    hard: Option<u64>,
    soft: Option<u64>,
    over_since: Option<Time>,
    grace_s: u32,
    now: Time,
) -> Option<u64> {
    let grace = i64::from(grace_s) * SECOND;
    let is_over = over_since.is_some_and(|since| now.nanos >= since.nanos.saturating_add(grace));
    soft.filter(|_| is_over).into_iter().chain(hard).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
    fn a_soft_limit_holds_when_its_grace_is_over() {
        let at = |s: i64| Time { nanos: s * SECOND };
        assert_eq!(max_now(Some(9), Some(5), None, 60, at(100)), Some(9));
        assert_eq!(max_now(Some(9), Some(5), Some(at(100)), 60, at(159)), Some(9));
        assert_eq!(max_now(Some(9), Some(5), Some(at(100)), 60, at(160)), Some(5));
        assert_eq!(max_now(None, Some(5), Some(at(100)), 60, at(160)), Some(5));
        assert_eq!(max_now(None, Some(5), Some(at(100)), 60, at(101)), None);
        assert_eq!(max_now(None, None, Some(at(100)), 0, at(101)), None);
        // A limit of nothing is a limit, too.
        assert_eq!(max_now(Some(0), None, None, 60, at(100)), Some(0));
        // Time counts from when it was crossed, and restarts after it was below.
        assert_eq!(since(Some(5), 6, None, at(7)), Some(at(7)));
        assert_eq!(since(Some(5), 6, Some(at(3)), at(7)), Some(at(3)));
        assert_eq!(since(Some(5), 5, Some(at(3)), at(7)), None);
    }

    proptest! {
        /// For any sequence of requests, writes and commits, used and granted bytes stay within the limit.
        #[test]
        fn nothing_goes_past_the_limit(steps in prop::collection::vec((0u64..3, 0u64..40, 0u64..100), 1..200)) {
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
