//! Clocks of nodes compared with the coordinator's: how far each is off, as its node measured it.
//!
//! No protocol needs equal clocks: leases and time-outs use each node's own monotonic clock. A wrong date
//! harms dated records: times of files, snapshots and trash that expire by age, and certificates. Knows
//! nothing of maps and members.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_env::{Env, Instant, WallTime};
use weir_proto::coord::{ClockOff, Clocks, CompareClock};
use weir_proto::map::Role;
use weir_proto::{Error, Result};
use weir_rpc::Channel;

/// How often a node compares its clock.
pub const COMPARE_EVERY: Duration = Duration::from_secs(60);
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// A node that has not reported for this long is gone.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(180);
/// Clocks that are kept: if a large cluster's coordinator has a wrong clock, some of them are enough.
const CLOCKS_MAX: usize = 4096;
/// Clocks that NTP keeps differ by less than this; from this on build systems notice the difference.
pub const SUSPECT: Duration = Duration::from_secs(5);
/// Above this the metadata role does not start: it would date files wrongly, and expire snapshots and trash
/// at a wrong age. Kerberos has the same limit.
pub const REFUSED: Duration = Duration::from_secs(300);

/// Compares this machine's clock with the coordinator's at an interval.
pub async fn keep_comparing(env: Env, coordinator: Channel) {
    let (mut ahead_ms, mut is_logged) = (0, false);
    loop {
        if let Some(found) = compare(&env, &coordinator, ahead_ms).await {
            let is_wrong = is_off(found, SUSPECT);
            if is_wrong && !is_off(ahead_ms, SUSPECT) {
                compare(&env, &coordinator, found).await; // so that it is known at once
            }
            if is_wrong && !is_logged {
                tracing::warn!("this machine's clock is {} of the coordinator's", shown(found));
            }
            (ahead_ms, is_logged) = (found, is_wrong);
        }
        env.clock.sleep(COMPARE_EVERY).await;
    }
}

/// Reports how far this clock was ahead, and returns how far it is. `None`: the coordinator sends no time.
pub async fn compare(env: &Env, coordinator: &Channel, ahead_ms: i64) -> Option<i64> {
    let asked = env.clock.wall();
    let answer = coordinator.call(&CompareClock { ahead_ms }, Vec::new(), ANSWER_PATIENCE).await;
    let (other, _) = answer.ok()?;
    Some(self::ahead_ms(asked, env.clock.wall(), WallTime(other.wall_ns)))
}

/// How far a clock is ahead (negative: behind), within the time of the round trip. `asked`, `answered`: times
/// of that clock.
pub fn ahead_ms(asked: WallTime, answered: WallTime, other: WallTime) -> i64 {
    let (asked, answered, other) = (i128::from(asked.0), i128::from(answered.0), i128::from(other.0));
    // The other clock was read between these times.
    let off = match (asked - other, answered - other) {
        (least, _) if least > 0 => least,
        (_, most) if most < 0 => most,
        _ => 0,
    };
    i64::try_from(off / 1_000_000).unwrap_or(if off > 0 { i64::MAX } else { i64::MIN })
}

pub fn is_off(ahead_ms: i64, limit: Duration) -> bool {
    u128::from(ahead_ms.unsigned_abs()) > limit.as_millis()
}

/// The difference in readable form.
pub fn shown(ahead_ms: i64) -> String {
    let seconds = ahead_ms.unsigned_abs() / 1000;
    format!("{seconds} s {}", if ahead_ms > 0 { "ahead" } else { "behind" })
}

/// The warning for administrators.
pub fn trouble(clock: &ClockOff) -> String {
    let (node, off) = (&clock.node, shown(clock.ahead_ms));
    format!(
        "{node}: its machine's clock is {off} of the coordinator's; set the wrong one, and have NTP keep it"
    )
}

/// Check for a role that dates records.
pub fn check(name: &str, ahead_ms: i64) -> Result<()> {
    if !is_off(ahead_ms, REFUSED) {
        return Ok(());
    }
    Err(Error::denied(format!(
        "the clock of {name}'s machine is {} of the coordinator's: files would get wrong times, and \
         snapshots and trash end at a wrong age",
        shown(ahead_ms)
    ))
    .hint("set the wrong one of the two (`timedatectl`), and have NTP keep it"))
}

/// The nodes' reports. Kept in memory: each node reports again.
#[derive(Default)]
pub struct ReportedClocks(BTreeMap<String, (Instant, ClockOff)>);

impl ReportedClocks {
    pub fn note(&mut self, node: &str, role: Role, ahead_ms: i64, now: Instant) {
        self.forget(now);
        if !is_off(ahead_ms, SUSPECT) {
            self.0.remove(node);
        } else if self.0.len() < CLOCKS_MAX || self.0.contains_key(node) {
            self.0.insert(node.to_owned(), (now, ClockOff { node: node.to_owned(), role, ahead_ms }));
        }
    }
    /// The clocks that are off.
    pub fn list(&mut self, now: Instant) -> Clocks {
        self.forget(now);
        Clocks { off: self.0.values().map(|(_, clock)| clock.clone()).collect() }
    }
    fn forget(&mut self, now: Instant) {
        self.0.retain(|_, (at, _)| now.since(*at) < FORGOTTEN_AFTER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_off_by_what_the_question_cannot_explain() {
        let s = |seconds: i64| WallTime(seconds * 1_000_000_000);
        for (asked, answered, other, ahead) in [
            (100, 100, 100, 0),
            (100, 110, 105, 0),
            (100, 110, 60, 40_000),
            (100, 110, 200, -90_000),
            (-5, 5, 0, 0),
        ] {
            assert_eq!(ahead_ms(s(asked), s(answered), s(other)), ahead, "{asked} {answered} {other}");
        }
        assert_eq!(ahead_ms(WallTime(i64::MAX), WallTime(i64::MAX), WallTime(i64::MIN)), 18_446_744_073_709);
        assert!(check("m1", 300_000).is_ok() && check("m1", -300_001).is_err());
        let refused = check("m1", 400_000).unwrap_err();
        assert!(refused.context.contains("400 s ahead") && refused.hint.is_some(), "{refused:?}");
    }

    #[test]
    fn a_wrong_clock_is_listed_until_it_is_right_or_its_node_gone() {
        let mut clocks = ReportedClocks::default();
        let at = |s: u64| Instant(s * 1_000_000_000);
        clocks.note("a", Role::Storage, 90_000, at(0));
        clocks.note("b", Role::Meta, -8_000, at(100));
        clocks.note("c", Role::Meta, 900, at(100));
        assert_eq!(clocks.list(at(101)).off.len(), 2);
        assert_eq!(clocks.list(at(190)).off[0].node, "b", "a did not report any more");
        clocks.note("b", Role::Meta, 0, at(191));
        assert!(clocks.list(at(191)).off.is_empty());
    }
}
