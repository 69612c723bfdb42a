//! How many calls may be in flight to one target: the decision alone.
//!
//! Additive increase, multiplicative decrease, as in TCP (Chiu and Jain, 1989): one more for each window of
//! calls that were answered in the usual time, half of them after an answer that took much longer, or was
//! `Busy`. So the calls of all clients together settle where the target still answers promptly, for any
//! amount of work. Pure: time, dice and results are arguments. Knows neither calls nor targets.
use std::time::Duration;
use weir_env::{Backoff, Instant};

/// At the beginning: more than the fragments of all stripes in flight (12), so a stream never waits.
pub const START: u32 = 16;
/// One is at the target while the answer of the other travels.
pub const FLOOR: u32 = 2;
/// A target that answers in 5 ms does 50,000 calls a second with that many: more than a disk can, and a
/// quarter of the calls that one connection holds.
pub const CEILING: u32 = 256;
/// No answer within this time shows an overload: a disk that flushes its own caches takes that long.
const SLOW_MIN: Duration = Duration::from_millis(100);
/// Every answer after this time does. Without it a queue that stands would become the usual.
const SLOW_MAX: Duration = Duration::from_secs(1);
/// A slow answer takes this many times the least of the last seconds.
const SLOW_TIMES: u32 = 4;
/// The least answer time is that of one to two of these.
const LEAST_SPAN: Duration = Duration::from_secs(4);
/// Pauses after `Busy`, if the target asks for less; they double while it stays so.
const BUSY: Backoff = Backoff { first: Duration::from_millis(10), max: Duration::from_secs(2) };

/// One target may take this long for one call before the coordinator is asked to evaluate it: a loaded disk
/// does a group commit of many fragments in well under a second.
const CALL_PATIENCE: Duration = Duration::from_secs(5);
/// `CALL_PATIENCE` is doubled at most this many times, to 80 s.
const DOUBLINGS_MAX: u32 = 4;

/// How a call ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The target answered, or refused.
    Answered,
    /// The target has more to do than it can; it asks for this pause.
    Busy(Duration),
    /// No answer came in time, or the connection broke.
    Failed,
    /// The caller stopped waiting.
    Abandoned,
}

/// Whether one more call may be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum May {
    Now,
    /// Not before that.
    At(Instant),
    /// When another one has ended.
    Full,
}

/// The least of the answer times in the last seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Least {
    now: Option<Duration>,
    before: Option<Duration>,
    turned: Instant,
}

impl Least {
    fn note(&mut self, now: Instant, took: Duration) {
        if now.since(self.turned) >= LEAST_SPAN {
            *self = Least { now: None, before: self.now, turned: now };
        }
        self.now = Some(self.now.map_or(took, |least| least.min(took)));
    }
    fn get(&self) -> Option<Duration> {
        self.now.into_iter().chain(self.before).min()
    }
}

/// How long a call to one target may take. It doubles at a target that lives but did not answer in that time,
/// so a disk that needs longer gets the data in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CallPatience {
    doublings: u32,
    /// A call of this patience was not answered, nor any later one.
    is_over: bool,
}

impl CallPatience {
    pub fn get(&self) -> Duration {
        CALL_PATIENCE * (1 << self.doublings)
    }
    /// A call has ended.
    pub fn ended(&mut self, took: Duration, how: Ended) {
        match how {
            Ended::Answered => {
                let is_quick = took * 4 < self.get();
                self.doublings = self.doublings.saturating_sub(u32::from(is_quick));
                self.is_over = false;
            }
            Ended::Failed => self.is_over |= took >= self.get(),
            Ended::Busy(_) | Ended::Abandoned => {}
        }
    }
    /// The target's process lives: it has answered a question that needs neither its disk nor its queue.
    pub fn lives(&mut self) {
        self.doublings = (self.doublings + u32::from(self.is_over)).min(DOUBLINGS_MAX);
        self.is_over = false;
    }
}

#[derive(Clone, Debug)]
pub struct Window {
    limit: u32,
    in_flight: u32,
    /// The most in flight since the limit has changed.
    peak: u32,
    /// Answers in the usual time since the limit has changed.
    credit: u32,
    /// Calls that were sent before this show the effect of the limit before the last decrease.
    decreased: Instant,
    least: Least,
    /// No call is sent before this.
    closed_until: Instant,
    /// Windows with a `Busy` answer since the last other one.
    refusals: u32,
}

impl Default for Window {
    fn default() -> Window {
        Window {
            limit: START,
            in_flight: 0,
            peak: 0,
            credit: 0,
            decreased: Instant::default(),
            least: Least::default(),
            closed_until: Instant::default(),
            refusals: 0,
        }
    }
}

impl Window {
    pub fn may_send(&self, now: Instant) -> May {
        if now < self.closed_until {
            return May::At(self.closed_until);
        }
        if self.in_flight < self.limit { May::Now } else { May::Full }
    }
    pub fn sent(&mut self) {
        self.in_flight += 1;
        self.peak = self.peak.max(self.in_flight);
    }
    /// A call that was sent then has ended. `dice` of 2^16.
    pub fn ended(&mut self, sent: Instant, now: Instant, how: Ended, dice: u64) {
        assert!(self.in_flight > 0, "a call that ends was in flight");
        self.in_flight -= 1;
        match how {
            Ended::Abandoned => {}
            Ended::Failed => self.decrease(sent, now),
            Ended::Busy(wait) => {
                let pause = BUSY.pause(self.refusals, dice);
                // With the same pause all clients would return together.
                let asked = wait.min(BUSY.max).mul_f64(1.0 + (dice % (1 << 16)) as f64 / f64::from(1 << 17));
                self.closed_until = self.closed_until.max(now + pause.max(asked));
                self.refusals = self.refusals.saturating_add(u32::from(sent >= self.decreased));
                self.decrease(sent, now);
            }
            Ended::Answered => {
                self.refusals = 0;
                let took = now.since(sent);
                self.least.note(now, took);
                match took > self.slow_after() {
                    true => self.decrease(sent, now),
                    // A window that is not used does not grow.
                    false if 2 * self.peak >= self.limit => self.increase(),
                    false => {}
                }
            }
        }
    }
    fn slow_after(&self) -> Duration {
        (self.least.get().unwrap_or_default() * SLOW_TIMES).clamp(SLOW_MIN, SLOW_MAX)
    }
    fn increase(&mut self) {
        self.credit += 1;
        if self.credit >= self.limit && self.limit < CEILING {
            (self.limit, self.credit, self.peak) = (self.limit + 1, 0, self.in_flight);
        }
    }
    fn decrease(&mut self, sent: Instant, now: Instant) {
        if sent >= self.decreased {
            (self.limit, self.credit, self.peak) = ((self.limit / 2).max(FLOOR), 0, self.in_flight);
            self.decreased = now;
        }
    }
    #[cfg(test)]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

/// Retries that may fail, as a part of the work that succeeds: each answer adds a tenth of one, up to
/// [`RETRIES_MIN`], and each second adds one. An answer also gives a retry back, unless a call has failed
/// since: the target works again, and all calls that it interrupted are tried.
#[derive(Clone, Debug)]
pub struct Retries {
    tenths: u32,
    /// Granted since the last failure, and not answered yet: an answer gives one back.
    granted: u32,
    /// One more retry for each second since then.
    since: Instant,
}

/// At any time: more than the stripes that one target's death interrupts at once.
const RETRIES_MIN: u32 = 16;
/// Interval of retries at a target that answers nothing.
const RETRY_EVERY: Duration = Duration::from_secs(1);

impl Default for Retries {
    fn default() -> Retries {
        Retries { tenths: 10 * RETRIES_MIN, granted: 0, since: Instant::default() }
    }
}

impl Retries {
    /// None: retry now. Otherwise ask again after that.
    pub fn take(&mut self, now: Instant) -> Option<Duration> {
        if self.tenths >= 10 {
            if self.tenths >= 10 * RETRIES_MIN {
                self.since = now;
            }
            self.tenths -= 10;
        } else {
            let left = RETRY_EVERY.saturating_sub(now.since(self.since));
            if !left.is_zero() {
                return Some(left);
            }
            self.since = now;
        }
        self.granted += 1;
        None
    }
    pub fn ended(&mut self, how: Ended) {
        let more = match how {
            Ended::Answered if self.granted > 0 => 11,
            Ended::Answered => 1,
            Ended::Busy(_) | Ended::Abandoned => return,
            Ended::Failed => {
                self.granted = 0;
                return;
            }
        };
        self.granted = self.granted.saturating_sub(1);
        self.tenths = (self.tenths + more).min(10 * RETRIES_MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }
    fn at(n: u64) -> Instant {
        Instant::default() + ms(n)
    }
    /// A window of calls that all take that long, until `until`.
    fn run(window: &mut Window, from: u64, until: u64, took: u64, how: Ended) -> u64 {
        let mut now = from;
        while now < until {
            let count = window.limit;
            (0..count).for_each(|_| window.sent());
            now += took;
            (0..count).for_each(|_| window.ended(at(now - took), at(now), how, 0));
        }
        now
    }

    #[test]
    fn it_opens_while_answers_are_quick_and_halves_once() {
        let mut window = Window::default();
        let now = run(&mut window, 1000, 1050, 5, Ended::Answered);
        assert_eq!(window.limit, START + 10, "one more for each window");
        // All calls of one window are slow: that counts once.
        let now = run(&mut window, now, now + 1, 150, Ended::Answered);
        assert_eq!(window.limit, (START + 10) / 2);
        // 4 × the least of 5 ms is far below 100 ms: such answers do not show an overload.
        run(&mut window, now, now + 90, 90, Ended::Answered);
        assert_eq!(window.limit, (START + 10) / 2 + 1);
        let now = run(&mut window, now, now + 10_000, 2000, Ended::Answered);
        assert_eq!(window.limit, FLOOR);
        run(&mut window, now, now + 60_000, 5, Ended::Answered);
        assert_eq!(window.limit, CEILING);
    }

    #[test]
    fn an_answer_is_slow_by_the_least_time_of_the_last_seconds() {
        let mut window = Window::default();
        let now = run(&mut window, 1000, 3000, 200, Ended::Answered);
        assert!(window.limit > START, "a distant target: {}", window.limit);
        let now = run(&mut window, now, now + 3000, 790, Ended::Answered);
        assert!(window.limit > START, "less than four times as long: {}", window.limit);
        run(&mut window, now, now + 30_000, 1100, Ended::Answered);
        assert_eq!(window.limit, FLOOR, "longer than a second is an overload");
    }

    #[test]
    fn a_call_may_take_longer_at_a_live_target_that_is_late() {
        let s = Duration::from_secs;
        let mut patience = CallPatience::default();
        for (took, how, lives, then) in [
            // Only a call that waited that long, and only at a target that lives.
            (s(1), Ended::Failed, true, s(5)),
            (s(5), Ended::Failed, false, s(5)),
            (s(5), Ended::Abandoned, true, s(10)),
            (s(5), Ended::Failed, true, s(10)),
            (s(10), Ended::Failed, true, s(20)),
            (s(7), Ended::Answered, true, s(20)),
            (s(4), Ended::Answered, true, s(10)),
            (s(1), Ended::Answered, true, s(5)),
            (s(1), Ended::Answered, true, s(5)),
        ] {
            patience.ended(took, how);
            if lives {
                patience.lives();
            }
            assert_eq!(patience.get(), then, "{took:?} {how:?}");
        }
        for _ in 0..10 {
            patience.ended(patience.get(), Ended::Failed);
            patience.lives();
        }
        assert_eq!(patience.get(), s(80));
    }

    #[test]
    fn a_window_that_is_not_used_does_not_grow() {
        let mut window = Window::default();
        for n in 0..1000 {
            (0..4).for_each(|_| window.sent());
            (0..4).for_each(|_| window.ended(at(n), at(n + 1), Ended::Answered, 0));
        }
        assert_eq!(window.limit, START);
    }

    #[test]
    fn a_busy_target_gets_no_call_for_as_long_as_it_asks() {
        let mut window = Window::default();
        let mut now = 1000;
        let mut pauses = Vec::new();
        for _ in 0..12 {
            window.sent();
            window.ended(at(now), at(now + 1), Ended::Busy(ms(50)), 0);
            now += 1;
            let May::At(until) = window.may_send(at(now)) else { panic!("{window:?}") };
            pauses.push(until.since(at(now)));
            now += until.since(at(now)).as_millis() as u64;
            assert_eq!(window.may_send(at(now)), May::Now);
        }
        assert_eq!(pauses[..3], [ms(50), ms(50), ms(50)]);
        assert_eq!(pauses[11], BUSY.max);
        assert_eq!(window.limit, FLOOR);
        window.sent();
        window.ended(at(now), at(now + 1), Ended::Answered, 0);
        window.sent();
        window.ended(at(now + 1), at(now + 2), Ended::Busy(ms(50)), 1 << 15);
        let jittered = ms(50) + ms(50) / 4;
        assert_eq!(window.may_send(at(now + 2)), May::At(at(now + 2) + jittered));
    }

    #[test]
    fn retries_of_a_dead_target_are_few() {
        let mut retries = Retries::default();
        let granted = (0..100_u64).filter(|n| retries.take(at(1000 + n)).is_none()).count();
        assert_eq!(granted, RETRIES_MIN as usize);
        retries.ended(Ended::Failed);
        let granted = (0..100_u64).filter(|n| retries.take(at(2000 + 100 * n)).is_none()).count();
        assert!((9..=11).contains(&granted), "one a second: {granted}");
        // It answers: each answered retry allows the next.
        for n in 0..1000 {
            let next = retries.take(at(20_000 + n));
            assert!(n == 0 || next.is_none(), "retry {n}");
            retries.ended(Ended::Answered);
        }
    }

    proptest! {
        #[test]
        fn a_window_stays_within_its_limits(
            events in prop::collection::vec((0u64..3000, 0u8..5, 0u64..1 << 16), 0..300),
        ) {
            let (mut window, mut now, mut out) = (Window::default(), at(10_000), Vec::new());
            for (passed, what, dice) in events {
                now = now + ms(passed / 8);
                while window.may_send(now) == May::Now {
                    window.sent();
                    out.push(now);
                }
                prop_assert!(window.in_flight as usize == out.len());
                prop_assert!(out.len() <= CEILING as usize);
                let how = match what {
                    0 => Ended::Busy(ms(passed)),
                    1 => Ended::Failed,
                    2 => Ended::Abandoned,
                    _ => Ended::Answered,
                };
                let before = window.limit;
                if !out.is_empty() {
                    window.ended(out.remove(0), now, how, dice);
                }
                prop_assert!((FLOOR..=CEILING).contains(&window.limit));
                prop_assert!(window.limit <= before + 1 && window.limit >= before / 2);
                if let May::At(until) = window.may_send(now) {
                    prop_assert!(until.since(now) <= BUSY.max * 3 / 2, "it opens again");
                }
            }
        }

        /// For any order of failures: retries that fail are a small part of the work.
        #[test]
        fn failed_retries_are_at_most_a_tenth(events in prop::collection::vec((0u64..40, any::<bool>(), any::<bool>()), 0..2000)) {
            let (mut retries, mut now) = (Retries::default(), at(10_000));
            let (mut answered, mut failed) = (0u32, 0u32);
            let begun = now;
            for (passed, is_retry, answers) in events {
                now = now + ms(passed);
                if is_retry && retries.take(now).is_some() {
                    continue;
                }
                retries.ended(if answers { Ended::Answered } else { Ended::Failed });
                answered += u32::from(answers);
                failed += u32::from(is_retry && !answers);
            }
            let seconds = now.since(begun).as_secs() as u32 + 1;
            prop_assert!(failed <= RETRIES_MIN + answered / 10 + seconds, "{failed} of {answered} in {seconds} s");
        }
    }
}
