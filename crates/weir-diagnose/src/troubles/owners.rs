//! Users and groups near their limits, in words. A limit of a user that takes effect is as planned, so it is
//! a note: the cluster is healthy, and `weir why` names it for that user's files.
use crate::names::OwnerNames;
use crate::quantity;
use weir_proto::meta::Time;
use weir_proto::quota::{ALL_VOLUMES, OwnerKind, OwnerUsage};
use weir_proto::volume::Quota;

pub const CODE: &str = "owner-full";

/// `user ada in work`
pub fn about(row: &OwnerUsage, names: &OwnerNames) -> String {
    format!("{} in {}", names.shown(&row.holder), place(row))
}

fn place(row: &OwnerUsage) -> &str {
    if row.holder.volume == ALL_VOLUMES { "all volumes" } else { &row.volume_name }
}

/// The fullest of its limits, and a remedy; none: no limit applies any more.
pub fn sentence(row: &OwnerUsage, names: &OwnerNames, now_s: i64) -> Option<(String, String)> {
    let quota = row.quota?;
    let soft_at = |since: Option<Time>| {
        since.is_some_and(|t| now_s >= t.nanos / 1_000_000_000 + i64::from(quota.grace_s))
    };
    let Quota { bytes_hard, bytes_soft, inodes_hard, inodes_soft, .. } = quota;
    let bytes = Used::of(row.bytes, bytes_hard, bytes_soft.filter(|_| soft_at(row.bytes_over_since)));
    let inodes = Used::of(row.inodes, inodes_hard, inodes_soft.filter(|_| soft_at(row.inodes_over_since)));
    let files = |n: u64| format!("{n} files and directories");
    let use_of_it = match (bytes, inodes) {
        (Some(bytes), Some(inodes)) if inodes.percent() > bytes.percent() => inodes.shown(&files),
        (None, Some(inodes)) => inodes.shown(&files),
        (Some(bytes), _) => bytes.shown(&quantity::bytes),
        (None, None) => return None,
    };
    let who = names.shown(&row.holder);
    let option = match row.holder.kind {
        OwnerKind::User => format!("--user {}", who.trim_start_matches("user ")),
        OwnerKind::Group => format!("--group {}", who.trim_start_matches("group ")),
    };
    let at = if row.holder.volume == ALL_VOLUMES { "--all-volumes" } else { &row.volume_name };
    let action = format!(
        "delete files of this {}, or raise the limit: `weir volume quota {at} {option}`",
        if row.holder.kind == OwnerKind::User { "user" } else { "group" }
    );
    Some((format!("{who} {use_of_it} in {}", place(row)), action))
}

/// The use of the limit that applies now.
struct Used {
    used: u64,
    max: u64,
    /// It is the soft limit, after its grace.
    soft: bool,
}

impl Used {
    fn of(used: u64, hard: Option<u64>, soft: Option<u64>) -> Option<Used> {
        match (hard, soft) {
            (Some(hard), Some(soft)) if hard <= soft => Some(Used { used, max: hard, soft: false }),
            (_, Some(soft)) => Some(Used { used, max: soft, soft: true }),
            (Some(hard), None) => Some(Used { used, max: hard, soft: false }),
            (None, None) => None,
        }
    }
    fn percent(&self) -> u128 {
        u128::from(self.used) * 100 / u128::from(self.max.max(1))
    }
    fn shown(&self, show: &dyn Fn(u64) -> String) -> String {
        let of = format!("{} of {}", show(self.used), show(self.max));
        match self.used >= self.max {
            true if self.soft => {
                format!("is above the soft limit, whose grace has ended ({of}), and can add nothing")
            }
            true => format!("is at the limit ({of}), and can add nothing"),
            false => format!("uses {} % of the limit ({of})", self.percent()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::VolumeId;
    use weir_proto::quota::Holder;

    fn row(bytes: u64, inodes: u64, quota: Quota, over_s: Option<i64>) -> OwnerUsage {
        OwnerUsage {
            holder: Holder { volume: VolumeId(3), kind: OwnerKind::User, id: 4_294_967_290 },
            volume_name: "work".into(),
            bytes,
            inodes,
            quota: Some(quota),
            own: true,
            bytes_over_since: over_s.map(|s| Time { nanos: s * 1_000_000_000 }),
            inodes_over_since: None,
        }
    }

    #[test]
    fn a_user_at_a_limit_is_named_with_numbers_and_a_remedy() {
        let hard = Quota { bytes_hard: Some(1000), inodes_hard: Some(10), ..Quota::NONE };
        let soft = Quota { bytes_soft: Some(500), grace_s: 60, ..Quota::NONE };
        for (row, text) in [
            (row(960, 1, hard, None), "uses 96 % of the limit (960 B of 1000 B) in work"),
            (row(1000, 1, hard, None), "is at the limit (1000 B of 1000 B), and can add nothing in work"),
            (
                row(960, 10, hard, None),
                "is at the limit (10 files and directories of 10 files and directories)",
            ),
            (row(600, 1, soft, Some(40)), "is above the soft limit, whose grace has ended (600 B of 500 B)"),
        ] {
            let (found, action) = sentence(&row, &OwnerNames::default(), 100).unwrap();
            assert!(found.starts_with("user 4294967290 ") && found.contains(text), "{found}");
            assert!(action.ends_with("`weir volume quota work --user 4294967290`"), "{action}");
        }
        assert!(
            sentence(&row(600, 1, soft, Some(41)), &OwnerNames::default(), 100).is_none(),
            "still in its grace"
        );
    }
}
