//! Health: whether a node is up, derived from its connection and its signs of life.
//!
//! Invariant: a process with a sign of life within the tolerated silence is up, however late its targets
//! answer. Lateness is decided in [`super::slow`].
use std::time::Duration;
use weir_env::Instant;

/// How much silence is tolerated.
#[derive(Clone, Copy, Debug)]
pub struct HealthLimits {
    pub silence_max: Duration,
}

/// The coordinator's own observation of a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// The connection of its `Join` is open; its last message came at `last_contact`.
    Connected { last_contact: Instant },
    /// The coordinator started at `since`, and this member has not connected yet.
    Awaited { since: Instant },
    /// Its connection ended, or it left.
    Gone,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Up,
    /// The reason, for the log.
    Down(&'static str),
    /// Nothing is known yet: the map stays as it is.
    Wait,
}

pub fn evaluate(presence: Presence, now: Instant, limits: &HealthLimits) -> Verdict {
    match presence {
        Presence::Connected { last_contact } if now.since(last_contact) <= limits.silence_max => Verdict::Up,
        Presence::Connected { .. } => Verdict::Down("it is silent"),
        Presence::Awaited { since } if now.since(since) <= limits.silence_max => Verdict::Wait,
        Presence::Awaited { .. } => Verdict::Down("it did not return after the coordinator's restart"),
        Presence::Gone => Verdict::Down("its connection ended"),
    }
}

/// The presence as of `now`, if this node itself was stalled for `delay` since its last check: messages that
/// it could not receive meanwhile do not count as the member's silence.
pub fn forgive(presence: Presence, delay: Duration, now: Instant) -> Presence {
    let later = |at: Instant| at.max(now.min(at + delay));
    match presence {
        Presence::Connected { last_contact } => Presence::Connected { last_contact: later(last_contact) },
        Presence::Awaited { since } => Presence::Awaited { since: later(since) },
        Presence::Gone => Presence::Gone,
    }
}

/// A probe of a target that was not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unanswered {
    /// Its process was asked, over the connection on which it gives signs of life. Otherwise its release
    /// gives none but heartbeats, and the target was asked.
    pub by_life: bool,
    /// A quick probe, for a target that is merely overdue.
    pub quick: bool,
    /// Its groups can do without it.
    pub is_spare: bool,
    /// Its node has not joined since this coordinator started.
    pub is_awaited: bool,
}

/// Whether the target is taken out of service. If not, the reason, for the log. A process that gives signs of
/// life is down when it gives none any more, and not because it is busy.
pub fn is_out(probe: Unanswered) -> Result<(), &'static str> {
    match probe {
        Unanswered { by_life: true, .. } => Err("the tolerated silence decides whether its process lives"),
        // An overloaded machine must not lose its last targets to a quick probe.
        Unanswered { quick: true, is_spare: false, .. } => Err("it is needed"),
        // It may still be starting. A verdict now would let its group continue without it; if the others then
        // return without their new writes, no other target has them.
        Unanswered { is_awaited: true, .. } => Err("it has not joined yet"),
        Unanswered { .. } => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_delay_is_no_silence_of_others() {
        let at = |ms: u64| Instant(ms * 1_000_000);
        let contact = |ms| Presence::Connected { last_contact: at(ms) };
        for (before, delay_ms, now, after) in [
            (contact(500), 0, 9000, contact(500)),
            (contact(500), 7000, 9000, contact(7500)),
            // Received during the stall: not in the future.
            (contact(8500), 7000, 9000, contact(9000)),
            (contact(9001), 7000, 9000, contact(9001)),
            (Presence::Awaited { since: at(0) }, 300, 9000, Presence::Awaited { since: at(300) }),
            (Presence::Gone, 7000, 9000, Presence::Gone),
        ] {
            let delay = Duration::from_millis(delay_ms);
            assert_eq!(forgive(before, delay, at(now)), after, "{before:?} {delay_ms}");
        }
    }

    #[test]
    fn a_process_with_signs_of_life_is_not_down_for_a_late_answer() {
        let all = [false, true];
        for (quick, is_spare, is_awaited) in
            all.iter().flat_map(|q| all.iter().flat_map(|s| all.iter().map(|a| (*q, *s, *a))))
        {
            let probe = |by_life| Unanswered { by_life, quick, is_spare, is_awaited };
            assert!(is_out(probe(true)).is_err());
            let older = is_out(probe(false)).is_ok();
            assert_eq!(older, !is_awaited && (is_spare || !quick), "{:?}", probe(false));
        }
    }

    #[test]
    fn broken_connections_count_at_once_silence_after_its_limit() {
        let at = |ms: u64| Instant(ms * 1_000_000);
        let limits = HealthLimits { silence_max: Duration::from_millis(1000) };
        for (presence, now, up) in [
            (Presence::Connected { last_contact: at(500) }, at(500), Some(true)),
            (Presence::Connected { last_contact: at(500) }, at(1500), Some(true)),
            (Presence::Connected { last_contact: at(500) }, at(1501), Some(false)),
            // Two clock readings in the wrong order do no harm.
            (Presence::Connected { last_contact: at(500) }, at(400), Some(true)),
            (Presence::Gone, at(0), Some(false)),
            (Presence::Awaited { since: at(0) }, at(1000), None),
            (Presence::Awaited { since: at(0) }, at(1001), Some(false)),
        ] {
            let verdict = match evaluate(presence, now, &limits) {
                Verdict::Up => Some(true),
                Verdict::Down(_) => Some(false),
                Verdict::Wait => None,
            };
            assert_eq!(verdict, up, "{presence:?} at {now:?}");
        }
    }
}
