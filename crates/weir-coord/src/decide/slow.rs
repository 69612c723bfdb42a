//! Targets that answer late: whether one is much slower than the others, whether its disk hangs, and for how
//! long a slow one stays demoted.
//!
//! Invariant: lateness takes a target out of service only while the others, by their own reports of the same
//! time, are not late as well. Whether a process lives is decided in [`super::health`], and by nothing here.
use std::time::Duration;
use weir_env::Instant;
use weir_proto::life::{Pressure, TargetLife};

/// The first time; doubles with each further one,
const DEMOTED_MIN: Duration = Duration::from_secs(5);
/// up to this: each return costs a repair of the writes made meanwhile.
const DEMOTED_MAX: Duration = Duration::from_secs(60);
/// A target that was not slow for this long after its return starts from the minimum again.
const FORGIVEN_AFTER: Duration = Duration::from_secs(300);

/// A client reports a target as slow when it is later than the others by this, at least.
const LATE_MIN: Duration = Duration::from_millis(1000);
/// A target is much slower than another one at this multiple of its lateness.
const MUCH_SLOWER: u32 = 4;

/// If this number of others is reported at the same time, no single target is slow.
const SUSPECTED_TOO: usize = 2;
/// Reports within this time are of the same time.
pub const SUSPECTED_TOGETHER: Duration = Duration::from_secs(3);

/// A disk that completes no request for this long hangs: longer than a disk takes to start or to recover from
/// an error; much less than a write may take. Two seconds that confirm it are added, and both together are
/// the term of a lease: its holder must write before it loses it.
const STALLED_AFTER: Duration = Duration::from_secs(8);
/// A target that is needed hangs after this time: callers that wait for it can still get an error in time,
/// and targets that share a briefly busy disk are not all lost at once.
const GONE_AFTER: Duration = Duration::from_secs(13);
/// A needed target hangs after this time if its machine's work waits for processors or memory most of the
/// time: its process may be the one that waits. The time has a limit, as a machine may stay so for days.
const GONE_UNDER_PRESSURE: Duration = Duration::from_secs(60);
/// Another disk that completed nothing for this long does not show that only one hangs.
const ALSO_STALLED: Duration = Duration::from_secs(1);

/// From here on work waits for processors most of the time, in hundredths of a per cent. Two busy programs
/// for each processor give nearly all of it.
const CPU_PRESSED: u16 = 6000;
/// From here on work waits for memory, in hundredths of a per cent. Such work waits for disks, so the limit
/// is lower than for processors.
const MEMORY_PRESSED: u16 = 2000;

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

/// The report of a target and its machine on themselves. A node of an older release has none: then all is
/// zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Speed {
    /// The age of the oldest request of its disk.
    pub oldest: Duration,
    /// For how long its disk has completed no request.
    pub stalled: Duration,
    /// Its machine's work waits for processors or memory most of the time.
    pub pressed: bool,
    /// Clients or members report it as slow, too, at the same time.
    pub suspected: bool,
}

impl Speed {
    pub fn of(target: &TargetLife, pressure: Option<&Pressure>) -> Speed {
        Speed {
            oldest: Duration::from_millis(target.oldest_ms.into()),
            stalled: Duration::from_millis(target.stalled_ms.into()),
            pressed: pressure.is_some_and(is_pressed),
            suspected: false,
        }
    }
    /// The disk completes requests, or has none.
    pub fn completes(&self) -> bool {
        self.stalled < STALLED_AFTER
    }
    fn lateness(&self) -> Duration {
        self.oldest.max(self.stalled)
    }
}

/// The pressure of disks does not count: one that hangs gives its machine such a pressure, and must not
/// protect itself by it.
pub fn is_pressed(pressure: &Pressure) -> bool {
    pressure.cpu >= CPU_PRESSED || pressure.memory >= MEMORY_PRESSED
}

/// Whether a target that clients report as slow is much slower than each of `others`, the other members of
/// its group. If all are slow, none is; nor while most of their machines are short of processors or memory,
/// or several are reported as well: a reporter with a broken network suspects them all.
pub fn is_much_slower(own: &Speed, others: &[Speed]) -> bool {
    let late = own.lateness().max(LATE_MIN);
    let pressed = others.iter().filter(|other| other.pressed).count();
    let suspected = others.iter().filter(|other| other.suspected).count();
    let are_fast = others.iter().all(|other| other.lateness() * MUCH_SLOWER <= late);
    are_fast && pressed * 2 <= others.len() && suspected < SUSPECTED_TOO
}

/// Whether a target's disk hangs, so that its groups continue without it. `is_spare`: they can. `others`: all
/// other targets that are up; if none of them completes anything either, no disk hangs: all are slow.
pub fn hangs(own: &Speed, is_spare: bool, others: &[Speed]) -> bool {
    let limit = match (own.pressed, is_spare) {
        (true, _) => GONE_UNDER_PRESSURE,
        (false, true) => STALLED_AFTER,
        (false, false) => GONE_AFTER,
    };
    let all_are_slow = !others.is_empty() && others.iter().all(|other| other.stalled >= ALSO_STALLED);
    own.stalled >= limit && !all_are_slow
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

    /// Milliseconds of the oldest request, and of the stall.
    fn speed(oldest: u64, stalled: u64) -> Speed {
        let [oldest, stalled] = [oldest, stalled].map(Duration::from_millis);
        Speed { oldest, stalled, ..Speed::default() }
    }
    fn pressed(speed: Speed) -> Speed {
        Speed { pressed: true, ..speed }
    }

    fn suspected(speed: Speed) -> Speed {
        Speed { suspected: true, ..speed }
    }

    #[test]
    fn a_target_is_slow_only_while_the_others_are_much_faster() {
        let fast = speed(2, 0);
        for (own, others, slower) in [
            // By its own report it is fast: clients have waited for it for a second.
            (fast, vec![fast, fast], true),
            (speed(3000, 0), vec![fast, speed(700, 0)], true),
            (speed(3000, 0), vec![fast, speed(800, 0)], false),
            (speed(3000, 0), vec![fast, speed(0, 800)], false),
            (speed(0, 3000), vec![fast, speed(700, 0)], true),
            (speed(300, 0), vec![fast, speed(300, 0)], false),
            // All are slow: none is.
            (speed(9000, 0), vec![speed(9000, 0), speed(5000, 0)], false),
            // Its own machine alone is short of processors: the group is faster without it.
            (pressed(speed(9000, 0)), vec![fast, fast], true),
            (speed(9000, 0), vec![pressed(fast), fast], true),
            (speed(9000, 0), vec![pressed(fast), pressed(fast), fast], false),
            (speed(9000, 0), vec![suspected(fast), fast, fast], true),
            (speed(9000, 0), vec![suspected(fast), suspected(fast), fast], false),
        ] {
            assert_eq!(is_much_slower(&own, &others), slower, "{own:?} {others:?}");
        }
    }

    #[test]
    fn a_disk_hangs_when_it_alone_completes_nothing() {
        let (busy, idle) = (speed(4000, 0), speed(0, 0));
        for (own, is_spare, others, expected) in [
            (speed(0, 7_999), true, vec![idle], false),
            (speed(0, 8_000), true, vec![idle], true),
            (speed(0, 8_000), true, vec![busy, busy], true),
            (speed(0, 12_999), false, vec![idle], false),
            (speed(0, 13_000), false, vec![idle], true),
            // All on one disk, or one machine that does nothing at all: no target leaves.
            (speed(0, 30_000), true, vec![speed(0, 8_000), speed(0, 30_000)], false),
            (speed(0, 30_000), true, vec![speed(0, 8_000), idle], true),
            (speed(0, 15_000), false, vec![], true),
            // Its process may be what waits.
            (pressed(speed(0, 59_999)), true, vec![idle], false),
            (pressed(speed(0, 60_000)), false, vec![idle], true),
            // A late disk does not hang.
            (speed(60_000, 0), true, vec![idle], false),
        ] {
            assert_eq!(hangs(&own, is_spare, &others), expected, "{own:?} {is_spare} {others:?}");
        }
    }

    #[test]
    fn disks_do_not_press_a_machine() {
        let of = |cpu, io, memory| is_pressed(&Pressure { cpu, io, memory });
        assert!(!of(5999, 10_000, 1999));
        assert!(of(6000, 0, 0) && of(0, 0, 2000));
    }
}
