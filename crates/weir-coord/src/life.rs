//! A member's signs of life: its process's report on itself with each heartbeat, and when the coordinator
//! asks.
//!
//! Invariant: nothing here waits for the process's work. It runs on the one thread of [`Env::alone`], reads
//! atomics and the last report that the work has left, and never waits for a lock of another thread.
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::coord::TargetReport;
use weir_proto::data::{CompareTarget, DropFile, PassOn, ScrubTarget, SealFile};
use weir_proto::life::{AskLife, Life, Pressure, TargetLife};
use weir_proto::methods::{self, METHODS_MAX};
use weir_proto::sender::Sender;
use weir_proto::{Error, Request};
use weir_rpc::{Call, Handled, Reply, Service};
use weir_watch::{Family, Gauge};

/// The state of the node's targets and their disks. It waits for nothing.
pub type TargetLives = Arc<dyn Fn() -> Vec<TargetLife> + Send + Sync>;

/// Answers of this time are compared with the usual ones.
const WINDOW: Duration = Duration::from_secs(5);
/// The usual time rises by this part of itself with each sign of life, so that an hour of overload is not
/// usual,
const USUAL_RISES: u64 = 4096;
/// and falls by this part of the difference.
const USUAL_FALLS: u64 = 16;
/// A report is renewed twice for each heartbeat. If none was for this many heartbeats, the process's work
/// stands still.
const RENEWED_WITHIN: u32 = 4;

/// The last reports of the node's targets, as its work has left them.
pub(crate) struct LastReports {
    left: Mutex<(Arc<Vec<TargetReport>>, Instant)>,
}

impl LastReports {
    pub fn new(now: Instant) -> LastReports {
        LastReports { left: Mutex::new((Arc::default(), now)) }
    }
    pub fn renew(&self, reports: Vec<TargetReport>, now: Instant) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = (Arc::new(reports), now);
    }
    /// `None`: they are being renewed.
    fn read(&self) -> Option<(Arc<Vec<TargetReport>>, Instant)> {
        match self.left.try_lock() {
            Ok(left) => Some(left.clone()),
            Err(TryLockError::Poisoned(left)) => Some(left.into_inner().clone()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The process's own view of itself.
pub(crate) struct Alive {
    /// Of its own thread.
    env: Env,
    targets: TargetLives,
    reports: Arc<LastReports>,
    served: Arc<Family>,
    serving: Gauge,
    /// Used on its own thread only.
    state: Mutex<State>,
}

struct State {
    answers: AnswerTimes,
    /// As read last.
    reports: Arc<Vec<TargetReport>>,
    renewed: Instant,
    heartbeat: Duration,
    woke: Instant,
    /// Since this moment the process runs without having been stopped.
    runs_since: Instant,
}

impl Alive {
    pub fn new(env: &Env, targets: TargetLives, reports: Arc<LastReports>) -> Alive {
        let now = env.clock.now();
        let state = State {
            answers: AnswerTimes::default(),
            reports: Arc::default(),
            renewed: now,
            heartbeat: Duration::from_secs(1),
            woke: now,
            runs_since: now,
        };
        Alive {
            env: env.clone(),
            targets,
            reports,
            served: env.watch.meters.family("weir_rpc_seconds", "method", METHODS_MAX),
            serving: env.watch.gauge("weir_rpc_inflight", ("", "")),
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Once for each heartbeat, before it is sent: the last reports of the targets.
    pub fn beat(&self, heartbeat: Duration) -> Arc<Vec<TargetReport>> {
        let now = self.env.clock.now();
        let (count, sum_ns) = self.served.totals(data_methods());
        let serving = u64::try_from(self.serving.get()).unwrap_or(0);
        let mut state = self.state();
        if now.since(state.woke) > heartbeat * RENEWED_WITHIN {
            state.runs_since = now; // it was stopped: its disks are not to blame
        }
        (state.woke, state.heartbeat) = (now, heartbeat);
        state.answers.note(now, count, sum_ns / 1000, serving);
        if let Some((reports, renewed)) = self.reports.read() {
            (state.reports, state.renewed) = (reports, renewed);
        }
        state.reports.clone()
    }

    pub fn life(&self) -> Life {
        let now = self.env.clock.now();
        let pressure = self.env.pressure.read();
        let state = self.state();
        let runs = now.since(state.runs_since);
        let not_renewed = now.since(state.renewed);
        let works = not_renewed < state.heartbeat * RENEWED_WITHIN;
        let stalled = if works { Duration::ZERO } else { not_renewed };
        let of = |target: TargetLife| TargetLife {
            stalled_ms: millis(stalled).max(target.stalled_ms).min(millis(runs)),
            oldest_ms: target.oldest_ms.min(millis(runs)),
            waiting: u32::try_from(self.serving.get()).unwrap_or(0),
            answer_us: clamped(state.answers.recent_us),
            usual_us: clamped(state.answers.usual_us),
            ..target
        };
        Life {
            pressure: pressure.map(|p| Pressure { cpu: p.cpu, io: p.io, memory: p.memory }),
            targets: (self.targets)().into_iter().map(of).collect(),
        }
    }
}

/// Answers the coordinator on the connection of the membership. The membership's task holds the process's
/// view: that holds targets, and these hold the channel of which this is a part.
pub(crate) struct Answers(pub Weak<Alive>);

impl Service for Answers {
    fn handle(&self, call: Call) -> Handled {
        Handled::Now(match (call.method, self.0.upgrade()) {
            (AskLife::METHOD, Some(alive)) => call.decode::<AskLife>().map(|_| Reply::new(&alive.life())),
            (AskLife::METHOD, None) => Err(Error::unavailable("this node has left")),
            _ => Err(call.unknown()),
        })
    }
    fn payload_max(&self, _from: Sender) -> u32 {
        0
    }
}

fn millis(d: Duration) -> u32 {
    u32::try_from(d.as_millis()).unwrap_or(u32::MAX)
}
fn clamped(us: u64) -> u32 {
    u32::try_from(us).unwrap_or(u32::MAX)
}

/// Requests to a target that programs wait for.
fn data_methods() -> impl Iterator<Item = usize> {
    let long =
        [ScrubTarget::METHOD, CompareTarget::METHOD, SealFile::METHOD, DropFile::METHOD, PassOn::METHOD];
    let data = (200..300u16).filter(move |number| !long.contains(number) && methods::find(*number).is_some());
    data.map(usize::from)
}

/// How long answers take, from running totals.
#[derive(Default)]
struct AnswerTimes {
    /// The totals at earlier times, up to a window ago.
    seen: VecDeque<(Instant, u64, u64)>,
    /// When an answer was last seen, or nothing waited.
    last: Instant,
    recent_us: u64,
    usual_us: u64,
}

impl AnswerTimes {
    /// `count` answers so far took `sum_us` together, and `serving` requests wait for theirs.
    fn note(&mut self, now: Instant, count: u64, sum_us: u64, serving: u64) {
        let newest = self.seen.back().map_or(0, |(_, count, _)| *count);
        if count != newest || serving == 0 {
            self.last = now;
        }
        self.seen.push_back((now, count, sum_us));
        while self.seen.get(1).is_some_and(|(at, ..)| now.since(*at) >= WINDOW) {
            self.seen.pop_front();
        }
        let (_, before, sum_before) = self.seen[0];
        let (answers, us) = (count - before, sum_us.saturating_sub(sum_before));
        let unanswered = now.since(self.last).as_micros() as u64;
        let mean = us.checked_div(answers);
        self.recent_us = mean.unwrap_or(0).max(unanswered);
        let Some(mean) = mean else { return };
        self.usual_us = match self.usual_us {
            0 => mean,
            usual if mean < usual => usual - (usual - mean).div_ceil(USUAL_FALLS),
            usual => (usual + usual.div_ceil(USUAL_RISES)).min(mean),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::sim::{SimConfig, World};

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    #[test]
    fn answers_of_the_last_seconds_are_compared_with_the_usual_ones() {
        let mut times = AnswerTimes::default();
        // (time, answers so far, their time, waiting; the recent and the usual time)
        for (ms, count, sum_us, serving, recent, usual) in [
            (0, 10, 20_000, 1, 0, 0),
            (1000, 20, 40_000, 1, 2000, 2000),
            // Two late ones.
            (2000, 22, 2_040_000, 5, 168_333, 2001),
            (6000, 22, 2_040_000, 5, 4_000_000, 2002),
            // Answers before the window do not count.
            (7000, 23, 2_041_000, 1, 1000, 1939),
            // Nothing waits, and nothing came.
            (20_000, 23, 2_041_000, 0, 0, 1939),
        ] {
            times.note(at(ms), count, sum_us, serving);
            assert_eq!((times.recent_us, times.usual_us), (recent, usual), "at {ms}");
        }
    }

    #[test]
    fn work_that_stands_still_shows_and_a_stopped_process_does_not() {
        let world = World::new(1, SimConfig::default());
        world.run(async {
            let env = world.node("a").alone("life");
            let (beat, clock) = (Duration::from_secs(1), env.clock.clone());
            let stalled = || vec![TargetLife { stalled_ms: 50, oldest_ms: 90_000, ..TargetLife::default() }];
            let reports = Arc::new(LastReports::new(clock.now()));
            let alive = Alive::new(&env, Arc::new(stalled), reports.clone());
            let says = || (alive.life().targets[0].stalled_ms, alive.life().targets[0].oldest_ms);
            for _ in 0..5 {
                clock.sleep(beat).await;
                reports.renew(Vec::new(), clock.now());
                alive.beat(beat);
            }
            assert_eq!(says(), (50, 5_000), "not longer than the process runs");
            for _ in 0..5 {
                clock.sleep(beat).await;
                alive.beat(beat);
            }
            assert_eq!(says(), (5_000, 10_000), "no report was renewed");
            clock.sleep(20 * beat).await;
            alive.beat(beat);
            clock.sleep(beat).await;
            assert_eq!(says(), (1_000, 1_000), "nothing of the process ran");
        });
    }

    #[test]
    fn a_quarter_of_an_hour_of_overload_is_not_usual() {
        let mut times = AnswerTimes::default();
        let (mut count, mut sum) = (0, 0);
        for n in 0..1200 {
            let took = if n < 10 { 2_000 } else { 3_000_000 };
            (count, sum) = (count + 1, sum + took);
            times.note(at(n * 750), count, sum, 1);
        }
        assert!((2_000..4_000).contains(&times.usual_us), "{}", times.usual_us);
        assert_eq!(times.recent_us, 3_000_000);
    }
}
