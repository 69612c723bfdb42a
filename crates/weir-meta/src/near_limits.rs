//! Users and groups near their limits, for `weir status`: the fullest, and how many there are.
//!
//! Users under the limit for all are found by a scan of the counters of their volume, about 20 ms for 100,000
//! of them. So an answer is kept for a while. Knows nothing of sessions.
use crate::allowances;
use crate::limits::Limit;
use crate::owners;
use crate::quotas::Quotas;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::Result;
use weir_proto::meta::Time;
use weir_proto::quota::{
    DEFAULT_ID, Holder, NEAR_LIMIT_PERCENT, OWNERS_NEAR_MAX, OwnerKind, OwnerUsage, OwnersNear,
};

/// A report may be this old.
const KEPT: Duration = Duration::from_secs(5);

/// The last report.
#[derive(Default)]
pub(crate) struct LastReport(Mutex<Option<(Instant, OwnersNear)>>);

impl LastReport {
    /// The last report, or a new one if that is too old.
    pub fn or_new(&self, now: Instant, new: impl FnOnce() -> Result<OwnersNear>) -> Result<OwnersNear> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, report)) = last.as_ref().filter(|(at, _)| now.since(*at) < KEPT) {
            tracing::trace!("users and groups near limits: as {:?} ago", now.since(*at));
            return Ok(report.clone());
        }
        let report = new()?;
        *last = Some((now, report.clone()));
        Ok(report)
    }
}

pub fn near(read: &dyn Read, quotas: &Quotas, now: Time) -> Result<OwnersNear> {
    let (mut all, mut report) = (Vec::new(), OwnersNear::default());
    for holder in limited(read, quotas)? {
        let row = allowances::row(read, quotas, holder)?;
        // Files of user 0 are held to no limit.
        let is_held = holder != (Holder { kind: OwnerKind::User, id: 0, ..holder });
        let Some(fullness) = fullness(&row, now).filter(|percent| is_held && *percent >= NEAR_LIMIT_PERCENT)
        else {
            continue;
        };
        match holder.kind {
            OwnerKind::User => report.users += 1,
            OwnerKind::Group => report.groups += 1,
        }
        all.push((Reverse(fullness), row));
        if all.len() >= 2 * OWNERS_NEAR_MAX {
            keep_worst(&mut all);
        }
    }
    keep_worst(&mut all);
    report.worst = all.into_iter().map(|(_, row)| row).collect();
    Ok(report)
}

fn keep_worst(all: &mut Vec<(Reverse<u64>, OwnerUsage)>) {
    all.sort_by_key(|(fullness, row)| (*fullness, row.holder));
    all.truncate(OWNERS_NEAR_MAX);
}

/// All users and groups to which a limit applies and that use something, or have a limit of their own.
fn limited(read: &dyn Read, quotas: &Quotas) -> Result<BTreeSet<Holder>> {
    let mut found = BTreeSet::new();
    for holder in quotas.owners.holders() {
        match holder.id {
            DEFAULT_ID => found.extend(owners::holders_from(read, Holder { id: 0, ..holder }, usize::MAX)?),
            _ => drop(found.insert(holder)),
        }
    }
    Ok(found)
}

/// The used hundredths of the limit that is used most; none: no limit applies now, or it allows nothing and
/// nothing is used.
fn fullness(row: &OwnerUsage, now: Time) -> Option<u64> {
    let quota = row.quota?;
    let over = crate::limits::Over { bytes_since: row.bytes_over_since, inodes_since: row.inodes_over_since };
    let limit = Limit { quota, over };
    let percent = |used: u64, max: Option<u64>| {
        let max = max.filter(|max| *max > 0 || used > 0)?;
        Some(u64::try_from(u128::from(used) * 100 / u128::from(max.max(1))).unwrap_or(u64::MAX))
    };
    percent(row.bytes, limit.bytes_max(now)).max(percent(row.inodes, limit.inodes_max(now)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::VolumeId;
    use weir_proto::volume::Quota;

    fn row(bytes: u64, inodes: u64, quota: Quota) -> OwnerUsage {
        OwnerUsage {
            holder: Holder { volume: VolumeId(3), kind: OwnerKind::User, id: 7 },
            volume_name: "work".into(),
            bytes,
            inodes,
            quota: Some(quota),
            own: true,
            bytes_over_since: (quota.bytes_soft.is_some_and(|soft| bytes > soft))
                .then_some(Time { nanos: 0 }),
            inodes_over_since: None,
        }
    }

    #[test]
    fn the_limit_that_is_used_most_counts() {
        let at = |s: i64| Time { nanos: s * 1_000_000_000 };
        let both = Quota { bytes_hard: Some(1000), inodes_hard: Some(10), ..Quota::NONE };
        assert_eq!(fullness(&row(950, 1, both), at(1)), Some(95));
        assert_eq!(fullness(&row(100, 12, both), at(1)), Some(120), "a limit that was lowered");
        let nothing = Quota { bytes_hard: Some(0), ..Quota::NONE };
        assert_eq!(fullness(&row(0, 5, nothing), at(1)), None, "it is meant to be reached");
        assert_eq!(fullness(&row(3, 5, nothing), at(1)), Some(300));
        assert_eq!(fullness(&row(3, 5, Quota::NONE), at(1)), None);
        // A soft limit counts from the end of its grace on.
        let soft = Quota { bytes_soft: Some(100), grace_s: 60, ..Quota::NONE };
        assert_eq!(fullness(&row(150, 1, soft), at(59)), None);
        assert_eq!(fullness(&row(150, 1, soft), at(60)), Some(150));
    }

    #[test]
    fn a_report_is_kept_for_a_while() {
        let (last, at) = (LastReport::default(), |s: u64| Instant(s * 1_000_000_000));
        let report = |users| OwnersNear { users, ..OwnersNear::default() };
        assert_eq!(last.or_new(at(0), || Ok(report(1))).unwrap().users, 1);
        assert_eq!(last.or_new(at(4), || Ok(report(2))).unwrap().users, 1);
        assert_eq!(last.or_new(at(5), || Ok(report(3))).unwrap().users, 3);
    }
}
