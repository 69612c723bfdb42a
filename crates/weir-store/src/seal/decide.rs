//! Decisions of a seal: when a stripe is sealed, and what becomes of a version that is in doubt after a
//! crash.
//!
//! Plain functions of facts, tested by table.
use std::time::Duration;
use weir_proto::Version;
use weir_proto::data::*;

/// When a stripe's overlays are sealed.
#[derive(Clone, Copy, Debug)]
pub struct SealLimits {
    /// Below this, overlays may stay indefinitely: sealing a small file costs more than it saves.
    pub small_bytes: u64,
    /// From here a stripe is sealed even while it is written: the default stripe's 4 MiB is then covered.
    pub full_bytes: u64,
    /// From this number of extents a stripe is sealed even while it is written: reads apply them one by one.
    pub count_max: u64,
    pub idle: Duration,
}
impl SealLimits {
    pub const DEFAULT: SealLimits = SealLimits {
        small_bytes: 128 << 10,
        full_bytes: 4 << 20,
        count_max: 2048,
        idle: Duration::from_secs(2),
    };
}

/// State of a stripe with overlays.
#[derive(Clone, Copy, Debug)]
pub struct SealFacts {
    pub overlay_bytes: u64,
    pub overlay_count: u64,
    pub idle: Duration,
    /// A leader exists, and no member is behind.
    pub can_seal: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealVerdict {
    Seal,
    /// Check again later.
    Wait,
    /// Nothing to do until it is written again.
    Leave,
}

pub fn evaluate(facts: &SealFacts, limits: &SealLimits) -> SealVerdict {
    let worth = facts.overlay_bytes > limits.small_bytes || facts.overlay_count > limits.count_max / 16;
    let urgent = facts.overlay_bytes >= limits.full_bytes || facts.overlay_count >= limits.count_max;
    let idle = facts.idle >= limits.idle;
    match (worth, urgent || idle, facts.can_seal) {
        (false, _, _) if idle => SealVerdict::Leave,
        (true, true, true) => SealVerdict::Seal,
        _ => SealVerdict::Wait,
    }
}

/// Verdict on a version that a seal left in doubt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InDoubt {
    Commit,
    Drop,
    /// Not every member whose answer is needed has answered.
    Ask,
}

/// `answers`: the state at each member of the group, `None` where it cannot be asked. `absent`: members that
/// took no part. `current`: members that are current in the map.
pub fn resolve(
    version: Version,
    absent: MissingMask,
    current: MissingMask,
    answers: &[Option<CellStat>],
    data: usize,
) -> InDoubt {
    let known = || answers.iter().flatten();
    if known().any(|s| s.base == version) {
        return InDoubt::Commit;
    }
    if known().any(|s| s.base > version) {
        return InDoubt::Drop;
    }
    let took_part = answers.iter().enumerate().filter(|(i, _)| absent & (1 << i) == 0).map(|(_, a)| a);
    let mut silent = false;
    let mut holders = 0;
    for answer in took_part {
        match answer {
            Some(stat) if stat.prepared.contains(&version) => holders += 1,
            // Commits begin only when every participant has prepared: one that has not proves that none has
            // committed.
            Some(_) => return InDoubt::Drop,
            None => silent = true,
        }
    }
    // A current member that does not answer may lack the version, and would stay current without it: wait
    // until it answers or goes down.
    if answers.iter().enumerate().any(|(i, a)| a.is_none() && current & (1 << i) != 0) {
        return InDoubt::Ask;
    }
    match (silent, holders >= data) {
        // The seal changes no byte of the stripe, and k fragments of it exist: a silent member gets its
        // fragment when it returns.
        (_, true) => InDoubt::Commit,
        (true, false) => InDoubt::Ask,
        (false, false) => InDoubt::Drop,
    }
}

/// The version for a seal of these members' data; `token_epoch`: the newest of the overlays. `None`: it would
/// replace a version that a writer commits meanwhile (see `WriteMode::Prepare`).
pub fn version_of(stats: &[CellStat], token_epoch: u32) -> Option<Version> {
    let base = stats
        .iter()
        .map(|stat| stat.base)
        .max()
        .unwrap_or_default()
        .max(Version::new(token_epoch, FILL_COUNTER));
    let prepared = || stats.iter().flat_map(|stat| &stat.prepared);
    if prepared().any(|version| version.counter().is_multiple_of(2)) {
        return None; // a writer's
    }
    let newest = prepared().fold(base, |newest, version| newest.max(*version));
    let version = Version((newest.0 + 1) | 1);
    (version.0 - base.0 <= u64::from(SEAL_VERSIONS)).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_to_seal() {
        let limits = SealLimits::DEFAULT;
        let facts = |overlay_bytes, overlay_count, idle_ms, can_seal| SealFacts {
            overlay_bytes,
            overlay_count,
            idle: Duration::from_millis(idle_ms),
            can_seal,
        };
        for (facts, verdict) in [
            (facts(4096, 1, 0, true), SealVerdict::Wait),
            (facts(4096, 1, 5000, true), SealVerdict::Leave),
            (facts(4096, 1, 5000, false), SealVerdict::Leave),
            (facts(1 << 20, 16, 100, true), SealVerdict::Wait),
            (facts(1 << 20, 16, 5000, true), SealVerdict::Seal),
            (facts(1 << 20, 16, 5000, false), SealVerdict::Wait),
            (facts(4 << 20, 90, 0, true), SealVerdict::Seal),
            (facts(100_000, 5000, 0, true), SealVerdict::Seal),
        ] {
            assert_eq!(evaluate(&facts, &limits), verdict, "{facts:?}");
        }
    }

    #[test]
    fn in_doubt_versions_are_resolved() {
        let version = Version::new(1, 9);
        let stat = |base: Version, prepared: &[Version]| {
            Some(CellStat {
                known: true,
                base,
                prepared: prepared.to_vec(),
                overlay_seqs: vec![],
                folded_seqs: vec![],
                missing: 0,
                fragment_bytes: 0,
            })
        };
        let (old, has, done) = (stat(Version(1), &[]), stat(Version(1), &[version]), stat(version, &[]));
        let later = stat(Version::new(1, 10), &[]);
        let v = |a: &Option<CellStat>| a.clone();
        for (answers, doubt) in [
            (vec![v(&has), v(&has), v(&has)], InDoubt::Commit),
            (vec![v(&has), v(&old), v(&has)], InDoubt::Drop),
            (vec![v(&has), v(&old), v(&done)], InDoubt::Commit),
            (vec![v(&has), None, v(&done)], InDoubt::Commit),
            // Two of three are enough to decode it; one is not.
            (vec![v(&has), None, v(&has)], InDoubt::Commit),
            (vec![v(&has), None, None], InDoubt::Ask),
            (vec![v(&has), None, v(&old)], InDoubt::Drop),
            (vec![v(&has), v(&later)], InDoubt::Drop),
        ] {
            assert_eq!(resolve(version, 0, 0, &answers, 2), doubt, "{answers:?}");
        }
        // The second took no part: its lack of the version proves nothing.
        assert_eq!(resolve(version, 0b010, 0, &[v(&has), v(&old), v(&has)], 2), InDoubt::Commit);
        // One is silent and current: no verdict before it answers or goes down.
        let silent = [v(&has), None, v(&has)];
        assert_eq!(resolve(version, 0, 0b101, &silent, 2), InDoubt::Commit);
        assert_eq!(resolve(version, 0, 0b111, &silent, 2), InDoubt::Ask);
        assert_eq!(resolve(version, 0b010, 0, &[v(&has), v(&old), v(&old)], 2), InDoubt::Drop);
        assert_eq!(
            resolve(version, 0b110, 0, &[v(&has), v(&old), None], 2),
            InDoubt::Drop,
            "never enough took part"
        );
    }
}
