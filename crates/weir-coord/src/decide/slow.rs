//! How long a target that answers much later than the others stays demoted.
use std::time::Duration;
use weir_env::Instant;

/// The first time; doubles with each further one,
const DEMOTED_MIN: Duration = Duration::from_secs(5);
/// up to this: each return costs a repair of the writes made meanwhile.
const DEMOTED_MAX: Duration = Duration::from_secs(60);
/// A target that was not slow for this long after its return starts from the minimum again.
const FORGIVEN_AFTER: Duration = Duration::from_secs(300);

/// Record of a target that was slow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strikes {
    count: u32,
    until: Instant,
}

impl Strikes {
    /// It was slow (again).
    pub fn one_more(before: Option<Strikes>, now: Instant) -> Strikes {
        let count = before.filter(|b| now.since(b.until) < FORGIVEN_AFTER).map_or(1, |b| b.count + 1);
        let demoted = (DEMOTED_MIN * (1 << (count - 1).min(8))).min(DEMOTED_MAX);
        Strikes { count, until: now + demoted }
    }
    pub fn is_demoted(&self, now: Instant) -> bool {
        now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeatedly_slow_target_is_demoted_for_longer() {
        let mut now = Instant(0);
        let mut strikes = None;
        for seconds in [5, 10, 20, 40, 60, 60] {
            let next = Strikes::one_more(strikes, now);
            assert!(next.is_demoted(now + Duration::from_secs(seconds - 1)));
            assert!(!next.is_demoted(now + Duration::from_secs(seconds)));
            now = now + Duration::from_secs(seconds + 100);
            strikes = Some(next);
        }
        now = now + FORGIVEN_AFTER;
        assert!(!Strikes::one_more(strikes, now).is_demoted(now + DEMOTED_MIN));
    }
}
