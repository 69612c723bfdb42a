//! The limits of users and groups, all in memory. Pure.
//!
//! Invariants: a user or a group without a limit of its own has that for all, if there is one. Files of user
//! 0 are held to no limit of a user or group.
use crate::limits::{self, Limit, Over};
use crate::record::Record;
use std::collections::BTreeMap;
use weir_proto::meta::Time;
use weir_proto::quota::{ALL_VOLUMES, Account, DEFAULT_ID, Holder, OwnerKind};
use weir_proto::volume::Quota;
use weir_proto::{VolumeId, wire_struct};

/// `J/`: the limits of a user or a group.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OwnerRecord {
    /// `None`: the limit for all applies. The record exists for the times.
    pub quota: Option<Quota>,
    pub bytes_over_since: Option<Time>,
    pub inodes_over_since: Option<Time>,
}
wire_struct!(OwnerRecord {
    quota: Option<Quota>,
    bytes_over_since: Option<Time>,
    inodes_over_since: Option<Time>,
});
impl Record for OwnerRecord {}

impl OwnerRecord {
    pub fn over(&self) -> Over {
        Over { bytes_since: self.bytes_over_since, inodes_since: self.inodes_over_since }
    }
    pub fn with(self, over: Over) -> OwnerRecord {
        let Over { bytes_since, inodes_since } = over;
        OwnerRecord { bytes_over_since: bytes_since, inodes_over_since: inodes_since, ..self }
    }
}

#[derive(Default, Debug)]
pub struct OwnerLimits {
    rows: BTreeMap<Holder, OwnerRecord>,
}

/// The limit for all without one of their own.
fn default_of(holder: Holder) -> Holder {
    Holder { id: DEFAULT_ID, ..holder }
}

impl OwnerLimits {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
    pub fn len(&self) -> usize {
        self.rows.len()
    }
    /// The record as it is now; `None`: it is gone.
    pub fn note(&mut self, holder: Holder, record: Option<OwnerRecord>) {
        match record {
            Some(record) => self.rows.insert(holder, record),
            None => self.rows.remove(&holder),
        };
    }
    pub fn forget_volume(&mut self, volume: VolumeId) {
        self.rows.retain(|holder, _| holder.volume != volume);
    }
    pub fn record(&self, holder: Holder) -> OwnerRecord {
        self.rows.get(&holder).copied().unwrap_or_default()
    }
    /// Whether a limit of a user or a group may apply in a volume.
    pub fn concern(&self, volume: VolumeId) -> bool {
        [volume, ALL_VOLUMES].into_iter().any(|volume| self.rows_of(volume).next().is_some())
    }
    /// All with a record.
    pub fn holders(&self) -> impl Iterator<Item = Holder> {
        self.rows.keys().copied()
    }
    /// Those with a record in a volume.
    pub fn rows_of(&self, volume: VolumeId) -> impl Iterator<Item = Holder> {
        let from = Holder { volume, kind: OwnerKind::User, id: 0 };
        let to = Holder { volume, kind: OwnerKind::Group, id: DEFAULT_ID };
        self.rows.range(from..=to).map(|(holder, _)| *holder)
    }

    /// The limit that applies to a user or a group.
    pub fn limit(&self, holder: Holder) -> Option<Limit> {
        if holder.id == DEFAULT_ID {
            return None; // no file is of that user
        }
        let own = self.record(holder);
        let default = || self.record(default_of(holder)).quota.filter(|_| holder.id != 0);
        Some(Limit { quota: own.quota.or_else(default)?, over: own.over() })
    }
    /// All limits that apply to files of an account.
    pub fn of(&self, account: Account) -> impl Iterator<Item = (Holder, Limit)> {
        let holders = account.holders().into_iter().filter(move |_| account.uid != 0 && !self.is_empty());
        holders.filter_map(|holder| Some((holder, self.limit(holder)?)))
    }
    pub fn limit_bytes(&self, account: Account) -> bool {
        self.of(account).any(|(_, limit)| limits::limits_bytes(&limit.quota))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(bytes: u64) -> Option<OwnerRecord> {
        let quota = Some(Quota { bytes_hard: Some(bytes), ..Quota::NONE });
        Some(OwnerRecord { quota, ..OwnerRecord::default() })
    }

    #[test]
    fn an_own_limit_comes_before_that_for_all() {
        let mut limits = OwnerLimits::default();
        let (v, w) = (VolumeId(3), VolumeId(4));
        let user = |volume, id| Holder { volume, kind: OwnerKind::User, id };
        limits.note(user(v, DEFAULT_ID), quota(10));
        limits.note(user(v, 7), quota(70));
        limits.note(Holder { volume: ALL_VOLUMES, kind: OwnerKind::Group, id: 9 }, quota(90));
        let of = |limits: &OwnerLimits, volume, uid, gid| -> Vec<u64> {
            let all = limits.of(Account { volume, uid, gid });
            all.map(|(_, limit)| limit.quota.bytes_hard.unwrap()).collect()
        };
        assert_eq!(of(&limits, v, 7, 7), [70]);
        assert_eq!(of(&limits, v, 8, 9), [10, 90]);
        assert_eq!(of(&limits, w, 8, 9), [90], "a group in all volumes");
        assert_eq!(of(&limits, v, 0, 9), [0; 0], "user 0 has no limits");
        assert_eq!(of(&limits, v, DEFAULT_ID, 1), [0; 0]);
        assert!(limits.concern(v) && limits.concern(w));
        // A record that only has times leaves the limit for all.
        let over = Over { bytes_since: Some(Time { nanos: 5 }), inodes_since: None };
        limits.note(user(v, 8), Some(OwnerRecord::default().with(over)));
        assert_eq!(limits.limit(user(v, 8)).map(|l| (l.quota.bytes_hard, l.over)), Some((Some(10), over)));
        limits.forget_volume(v);
        assert_eq!((of(&limits, v, 8, 1), limits.len()), (vec![], 1));
    }

    #[test]
    fn the_layout_of_limits_never_changes() {
        let quota = Quota { bytes_hard: Some(0x0102), inodes_soft: Some(3), grace_s: 4, ..Quota::NONE };
        let since = Some(Time { nanos: 5 });
        let record = OwnerRecord { quota: Some(quota), bytes_over_since: since, inodes_over_since: None };
        let hard = [1, 2, 1, 0, 0, 0, 0, 0, 0];
        let soft = [1, 3, 0, 0, 0, 0, 0, 0, 0];
        let over = [1, 5, 0, 0, 0, 0, 0, 0, 0, 0];
        let value = [&[1, 1][..], &hard, &[0, 0], &soft, &[4, 0, 0, 0], &over].concat();
        assert_eq!(record.to_value(), value);
        assert_eq!(OwnerRecord::from_value(&value, String::new).unwrap(), record);
    }
}
