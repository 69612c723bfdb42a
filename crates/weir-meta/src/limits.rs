//! One limit: hard and soft, of bytes and of inodes, with the grace period of the soft one. Pure.
use weir_proto::meta::Time;
use weir_proto::volume::Quota;

const SECOND: i64 = 1_000_000_000;

/// Since when usage is above the soft limits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Over {
    pub bytes_since: Option<Time>,
    pub inodes_since: Option<Time>,
}

/// Limits with the state of their soft ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    pub quota: Quota,
    pub over: Over,
}

impl Limit {
    /// The limit of bytes now.
    pub fn bytes_max(&self, now: Time) -> Option<u64> {
        let Limit { quota, over } = self;
        max_now(quota.bytes_hard, quota.bytes_soft, over.bytes_since, quota.grace_s, now)
    }
    /// The limit of inodes now.
    pub fn inodes_max(&self, now: Time) -> Option<u64> {
        let Limit { quota, over } = self;
        max_now(quota.inodes_hard, quota.inodes_soft, over.inodes_since, quota.grace_s, now)
    }
    /// The lower one of the limits of inodes, also before the soft one is effective.
    pub fn inodes_lowest(&self) -> Option<u64> {
        [self.quota.inodes_hard, self.quota.inodes_soft].into_iter().flatten().min()
    }
    /// Since when the soft limits are exceeded, if that changes with this usage.
    pub fn crossing(&self, bytes: u64, inodes: u64, now: Time) -> Option<Over> {
        let Limit { quota, over } = self;
        let is = Over {
            bytes_since: since(quota.bytes_soft, bytes, over.bytes_since, now),
            inodes_since: since(quota.inodes_soft, inodes, over.inodes_since, now),
        };
        (is != *over).then_some(is)
    }
}

pub fn has_limit(quota: &Quota) -> bool {
    limits_bytes(quota) || quota.inodes_hard.or(quota.inodes_soft).is_some()
}
pub fn limits_bytes(quota: &Quota) -> bool {
    quota.bytes_hard.or(quota.bytes_soft).is_some()
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
}
