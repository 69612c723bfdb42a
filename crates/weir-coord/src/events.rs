//! The log of events: which troubles began and ended when, and which are muted. Kept in the store, so that it
//! outlives this coordinator, and the next leader continues it.
//!
//! The process of the leading coordinator reports the troubles that it finds; consoles add those that they
//! see on their machines. Invariants: the log has limits by number, bytes and age, and troubles that last are
//! dropped last; a trouble that returns soon is the same event. The decisions are plain functions of the log;
//! times are given. Knows nothing of the meaning of troubles.
use crate::admission::busy;
use crate::records::{decode_events, encode_events};
use crate::store::{Revision, Store, Swap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::condition::NodeTrouble;
use weir_proto::event::{
    EVENTS_MAX, EventLog, EventMark, EventSeen, GetEvents, MUTES_MAX, MarkEvents, Mute, REPORTED_MAX,
    ReportEvents,
};
use weir_proto::{Error, Request, Result};
use weir_rpc::{Call, Handled, Reply};

/// The key of the log in the store.
pub const EVENTS_KEY: &str = "events";
/// A trouble that returns within this time has not been away,
const SAME_AGAIN_S: u64 = 60;
/// or within this one, if it began this often in a day.
const SAME_AGAIN_IF_OFTEN_S: u64 = 3600;
const OFTEN: usize = 5;
/// Events of a day. Beyond that number, a trouble that returns within the day is the same event.
const PER_DAY: usize = 300;
const DAY_S: u64 = 86_400;
/// How long ended events are kept.
const KEPT_S: u64 = 30 * DAY_S;
/// The largest log. Each change writes all of it, in the embedded store together with the map.
const BYTES_MAX: usize = 256 << 10;
/// A console reports every five seconds. Troubles of a console that ended, or that lost its connection, end
/// after this time.
const CONSOLE_HOLDS: Duration = Duration::from_secs(30);
/// Longest text that is kept, in characters.
const TEXT_MAX: usize = 300;
/// More than any event has: four texts of characters of up to four bytes.
const EVENT_BYTES_MAX: usize = 5 << 10;
/// Reports of consoles that wait for a write of the store: two of each of 64. A console reports again.
const WAITING_MAX: usize = 128;

/// The log and the store that it is in. It is read when it is needed first.
pub struct Events {
    env: Env,
    store: Arc<dyn Store>,
    kept: tokio::sync::Mutex<Option<(EventLog, Revision)>>,
    /// Reports of consoles; all that wait are noted with one write.
    waiting: Mutex<Vec<Report>>,
    found: Mutex<Found>,
}

/// The troubles of the last reports.
#[derive(Default)]
struct Found {
    /// By this coordinator.
    here: Vec<NodeTrouble>,
    /// By the console that reported last, and when.
    console: Option<(Instant, Vec<NodeTrouble>)>,
}

impl Found {
    /// Those of the coordinator, then those that only a console found.
    fn with(&self, console: &[NodeTrouble]) -> Vec<NodeTrouble> {
        let only_there = |trouble: &&NodeTrouble| !self.here.iter().any(|own| is_same(own, trouble));
        self.here.iter().chain(console.iter().filter(only_there)).cloned().collect()
    }
    fn all(&mut self, now: Instant) -> Vec<NodeTrouble> {
        self.console.take_if(|(at, _)| now.since(*at) > CONSOLE_HOLDS);
        self.with(self.console.as_ref().map_or(&[][..], |(_, troubles)| troubles.as_slice()))
    }
}

/// A console's report that waits for its turn.
struct Report {
    troubles: Vec<NodeTrouble>,
    answer: oneshot::Sender<Result<()>>,
}

impl Events {
    pub fn new(env: Env, store: Arc<dyn Store>) -> Arc<Events> {
        let (kept, waiting, found) = (tokio::sync::Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Events { env, store, kept, waiting, found })
    }

    /// Notes the troubles that this coordinator finds now.
    pub fn note(&self, troubles: Vec<NodeTrouble>) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.note_unboxed(troubles))
    }
    async fn note_unboxed(&self, mut troubles: Vec<NodeTrouble>) -> Result<()> {
        troubles.truncate(REPORTED_MAX);
        let mut kept = self.kept.lock().await;
        let all = {
            let mut found = self.found();
            found.here = troubles;
            found.all(self.env.clock.now())
        };
        self.change_held(&mut kept, |log, now_s| Ok(report(log, &all, now_s))).await
    }

    pub fn answer(self: &Arc<Self>, call: &Call) -> Result<Handled> {
        let events = self.clone();
        Ok(match call.method {
            ReportEvents::METHOD => {
                let ReportEvents { mut troubles } = call.decode()?;
                troubles.truncate(REPORTED_MAX);
                let reported = events.wait(troubles)?;
                later(async move {
                    events.note_waiting().await;
                    let stopped = || Error::unavailable("the coordinator has stopped");
                    reported.await.map_err(|_| stopped())?.map(|()| Reply::new(&()))
                })
            }
            MarkEvents::METHOD => {
                let asked: MarkEvents = call.decode()?;
                later(async move {
                    events.change(|log, now_s| mark(log, &asked, now_s).map(|()| true)).await?;
                    Ok(Reply::new(&()))
                })
            }
            GetEvents::METHOD => {
                call.decode::<GetEvents>()?;
                later(async move { Ok(Reply::new(&events.log().await?)) })
            }
            _ => return Err(call.unknown()),
        })
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Report>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A console's report waits for its turn.
    fn wait(&self, troubles: Vec<NodeTrouble>) -> Result<oneshot::Receiver<Result<()>>> {
        let (answer, answered) = oneshot::channel();
        let mut waiting = self.waiting();
        if waiting.len() >= WAITING_MAX {
            return Err(busy(WAITING_MAX, "reports of events wait"));
        }
        waiting.push(Report { troubles, answer });
        Ok(answered)
    }

    /// Decides on all reports that wait, in their order, with one write.
    async fn note_waiting(&self) {
        let mut kept = self.kept.lock().await;
        let waiting = std::mem::take(&mut *self.waiting());
        if waiting.is_empty() {
            return; // another one has noted its report
        }
        let reports: Vec<Vec<NodeTrouble>> = {
            let mut found = self.found();
            let reports = waiting.iter().map(|waits| found.with(&waits.troubles)).collect();
            found.console = waiting.last().map(|last| (self.env.clock.now(), last.troubles.clone()));
            reports
        };
        let decide = |log: &mut EventLog, now_s| {
            Ok(reports.iter().fold(false, |changed, troubles| report(log, troubles, now_s) | changed))
        };
        let done = self.change_held(&mut kept, decide).await;
        drop(kept);
        for waits in waiting {
            let _ = waits.answer.send(done.clone()); // it has given up
        }
    }

    async fn log(&self) -> Result<EventLog> {
        let mut kept = self.kept.lock().await;
        let (mut log, _) = self.opened(&mut kept).await?.clone();
        forget_mutes(&mut log, self.now_s());
        Ok(log)
    }

    async fn opened<'a>(
        &self,
        kept: &'a mut Option<(EventLog, Revision)>,
    ) -> Result<&'a mut (EventLog, Revision)> {
        if kept.is_none() {
            *kept = Some(match self.store.get(EVENTS_KEY).await? {
                Some(found) => (decode_events(&found.value)?, found.revision),
                None => (EventLog::default(), Revision(0)),
            });
        }
        kept.as_mut().ok_or_else(|| Error::io("the log of events did not open"))
    }

    /// Decides on a copy, and keeps it once it is durable. `decide` returns whether anything changed.
    async fn change(&self, decide: impl FnOnce(&mut EventLog, u64) -> Result<bool>) -> Result<()> {
        let mut kept = self.kept.lock().await;
        self.change_held(&mut kept, decide).await
    }

    async fn change_held(
        &self,
        kept: &mut Option<(EventLog, Revision)>,
        decide: impl FnOnce(&mut EventLog, u64) -> Result<bool>,
    ) -> Result<()> {
        let held = self.opened(kept).await?;
        let mut draft = held.0.clone();
        if !decide(&mut draft, self.now_s())? {
            return Ok(());
        }
        match self.store.compare_and_swap(EVENTS_KEY, held.1, encode_events(&draft)).await? {
            Swap::Done(revision) => *held = (draft, revision),
            Swap::Conflict(_) => {
                *kept = None; // it is read again
                return Err(Error::stale("another coordinator has changed the log of events"));
            }
        }
        Ok(())
    }

    fn now_s(&self) -> u64 {
        u64::try_from(self.env.clock.wall().0 / 1_000_000_000).unwrap_or(0)
    }
}

fn later(work: impl Future<Output = Result<Reply>> + Send + 'static) -> Handled {
    Handled::Later(Box::pin(work))
}

fn is_same(a: &NodeTrouble, b: &NodeTrouble) -> bool {
    a.code == b.code && a.about == b.about
}

/// Notes what began and what ended. Whether that is anything.
fn report(log: &mut EventLog, troubles: &[NodeTrouble], now_s: u64) -> bool {
    let mut changed = false;
    for event in log.events.iter_mut().filter(|event| event.cleared_s == 0) {
        if !troubles.iter().any(|trouble| is_same(trouble, &event.trouble)) {
            (event.cleared_s, changed) = (now_s.max(event.raised_s).max(1), true);
        }
    }
    for trouble in troubles {
        let same_again_s = same_again_s(log, trouble, now_s);
        let known = log.events.iter_mut().rev().find(|event| is_same(&event.trouble, trouble));
        match known {
            Some(event) if event.cleared_s == 0 => {}
            Some(event) if now_s.saturating_sub(event.cleared_s) < same_again_s => {
                (event.cleared_s, changed) = (0, true);
            }
            _ => {
                let trouble = shortened(trouble);
                log.events.push(EventSeen { trouble, raised_s: now_s, cleared_s: 0, acknowledged_s: 0 });
                changed = true;
            }
        }
    }
    drop_old(log, now_s) | changed
}

/// How long a trouble must have been away to be another event.
fn same_again_s(log: &EventLog, trouble: &NodeTrouble, now_s: u64) -> u64 {
    let today = || log.events.iter().filter(|event| event.raised_s + DAY_S > now_s);
    if today().count() >= PER_DAY {
        DAY_S
    } else if today().filter(|event| is_same(&event.trouble, trouble)).count() >= OFTEN {
        SAME_AGAIN_IF_OFTEN_S
    } else {
        SAME_AGAIN_S
    }
}

/// Whether there were any.
fn drop_old(log: &mut EventLog, now_s: u64) -> bool {
    let before = log.events.len();
    log.events.retain(|event| event.cleared_s == 0 || event.cleared_s + KEPT_S > now_s);
    while log.events.len() > EVENTS_MAX {
        drop_oldest(log);
    }
    if log.events.len() * EVENT_BYTES_MAX > BYTES_MAX {
        while log.events.len() > 1 && encode_events(log).len() > BYTES_MAX {
            let surplus = (log.events.len() / 50).max(1);
            (0..surplus).for_each(|_| drop_oldest(log));
        }
    }
    log.events.len() < before
}

/// The oldest one that has ended, or if all last, the oldest.
fn drop_oldest(log: &mut EventLog) {
    let ended = log.events.iter().position(|event| event.cleared_s > 0);
    log.events.remove(ended.unwrap_or(0));
}

/// On one line, and short: some of it comes from nodes, and it goes to a terminal.
fn shortened(trouble: &NodeTrouble) -> NodeTrouble {
    let short = |text: &str| text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect();
    NodeTrouble {
        code: short(&trouble.code),
        severity: trouble.severity,
        about: short(&trouble.about),
        text: short(&trouble.text),
        action: short(&trouble.action),
    }
}

fn mark(log: &mut EventLog, asked: &MarkEvents, now_s: u64) -> Result<()> {
    let MarkEvents { code, about, mark, until_s } = asked;
    forget_mutes(log, now_s);
    let is_meant = |of: &str, what: &str| of == code && (about.is_empty() || what == about);
    match mark {
        EventMark::Acknowledge => {
            let lasting = log.events.iter_mut().filter(|event| event.cleared_s == 0);
            let mut meant = lasting.filter(|e| is_meant(&e.trouble.code, &e.trouble.about)).peekable();
            if meant.peek().is_none() {
                return Err(Error::not_found(format!("no event {code} {about} lasts now"))
                    .hint("`weir events` lists those that last"));
            }
            meant.for_each(|event| event.acknowledged_s = now_s.max(1));
        }
        EventMark::Mute => {
            if code.is_empty() || code.len() > TEXT_MAX || about.len() > TEXT_MAX || *until_s <= now_s {
                return Err(Error::invalid("a mute names a code and an end in the future"));
            }
            log.mutes.retain(|mute| !(mute.code == *code && mute.about == *about));
            if log.mutes.len() >= MUTES_MAX {
                return Err(Error::exists(format!("{MUTES_MAX} events are muted; unmute some first")));
            }
            log.mutes.push(Mute { code: code.clone(), about: about.clone(), until_s: *until_s });
        }
        EventMark::Unmute => {
            let before = log.mutes.len();
            log.mutes.retain(|mute| !is_meant(&mute.code, &mute.about));
            if log.mutes.len() == before {
                return Err(Error::not_found(format!("{code} {about} is not muted")));
            }
        }
    }
    Ok(())
}

fn forget_mutes(log: &mut EventLog, now_s: u64) {
    log.mutes.retain(|mute| mute.until_s > now_s);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Embedded;
    use std::path::Path;
    use weir_env::sim::{DiskFaults, SimConfig, World};
    use weir_proto::condition::Severity;

    fn trouble(code: &str, about: &str) -> NodeTrouble {
        let (text, action) = ("it\u{1b} is bad".to_owned(), "mend it".to_owned());
        NodeTrouble { code: code.into(), severity: Severity::Warning, about: about.into(), text, action }
    }

    fn marked(code: &str, mark: EventMark, until_s: u64) -> MarkEvents {
        MarkEvents { code: code.into(), about: String::new(), mark, until_s }
    }

    fn times(log: &EventLog) -> Vec<(&str, u64, u64)> {
        log.events.iter().map(|e| (e.trouble.about.as_str(), e.raised_s, e.cleared_s)).collect()
    }

    #[test]
    fn an_event_begins_and_ends_once_and_may_return() {
        let mut log = EventLog::default();
        assert!(report(&mut log, &[trouble("a", "x")], 10));
        assert!(!report(&mut log, &[trouble("a", "x")], 20), "nothing is new");
        assert!(report(&mut log, &[trouble("a", "y")], 30));
        assert_eq!(times(&log), [("x", 10, 30), ("y", 30, 0)]);
        assert!(report(&mut log, &[trouble("a", "x"), trouble("a", "y")], 40));
        assert_eq!(times(&log), [("x", 10, 0), ("y", 30, 0)], "it was away for a moment only");
        assert!(report(&mut log, &[], 50));
        assert!(report(&mut log, &[trouble("a", "x")], 500));
        assert_eq!(times(&log), [("x", 10, 50), ("y", 30, 50), ("x", 500, 0)]);
        assert_eq!(log.events[2].trouble.text, "it is bad", "no control characters");
    }

    #[test]
    fn a_trouble_that_comes_and_goes_is_few_events() {
        let mut log = EventLog::default();
        for at in 0..720 {
            let now_s = 1000 + 120 * at; // away for two minutes each time, for a day
            report(&mut log, &[trouble("a", "x")], now_s);
            report(&mut log, &[], now_s + 5);
        }
        assert_eq!(log.events.len(), OFTEN, "the last event lasts, and includes later ends of the trouble");
        assert_eq!(log.events.last().unwrap().cleared_s, 1000 + 120 * 719 + 5);
        // Of many, too: an hour is too short once a day has all the events that it may have.
        let mut log = EventLog::default();
        for at in 0..400u64 {
            let now_s = 1000 + 200 * at;
            let troubles: Vec<NodeTrouble> =
                (0..4).map(|n| trouble("a", &format!("{}", at % 100 * 4 + n))).collect();
            report(&mut log, &troubles, now_s);
        }
        assert!(log.events.len() <= PER_DAY + 100, "{}", log.events.len());
    }

    #[test]
    fn ended_events_are_kept_for_thirty_days_and_in_bounded_bytes() {
        let mut log = EventLog::default();
        report(&mut log, &[trouble("a", "ends"), trouble("a", "lasts")], 10);
        report(&mut log, &[trouble("a", "lasts")], 20);
        assert!(!report(&mut log, &[trouble("a", "lasts")], 20 + KEPT_S - 1));
        assert_eq!(times(&log), [("ends", 10, 20), ("lasts", 10, 0)]);
        assert!(report(&mut log, &[trouble("a", "lasts")], 20 + KEPT_S));
        assert_eq!(times(&log), [("lasts", 10, 0)]);
        let long =
            |n: usize| NodeTrouble { text: "\u{1f4a7}".repeat(TEXT_MAX), ..trouble("b", &n.to_string()) };
        for n in 0..EVENTS_MAX {
            report(&mut log, &[trouble("a", "lasts"), long(n)], KEPT_S + 100 * n as u64);
        }
        assert!(encode_events(&log).len() <= BYTES_MAX && log.events.len() > 150, "{}", log.events.len());
        assert_eq!(times(&log)[0], ("lasts", 10, 0));
    }

    #[test]
    fn consoles_add_troubles_and_clear_none_of_the_coordinator() {
        let world = World::new(1, SimConfig::default());
        world.clone().run(async move {
            let env = world.node("c");
            let store = Embedded::open(env.clone(), Path::new("/coord")).unwrap();
            let events = Events::new(env.clone(), store.clone());
            let lasting = async |events: Arc<Events>| {
                let log = events.log().await.unwrap();
                let lasting = log.events.iter().filter(|event| event.cleared_s == 0);
                lasting.map(|event| event.trouble.about.clone()).collect::<Vec<_>>()
            };
            events.note(vec![trouble("a", "x")]).await.unwrap();
            let answer = events.wait(vec![trouble("a", "mount")]).unwrap();
            events.note_waiting().await;
            answer.await.unwrap().unwrap();
            events.note(vec![trouble("a", "x")]).await.unwrap();
            assert_eq!(lasting(events.clone()).await, ["x", "mount"]);
            // The console ends; the coordinator sees no trouble any more.
            env.clock.sleep(CONSOLE_HOLDS + Duration::from_secs(1)).await;
            events.note(vec![trouble("a", "x")]).await.unwrap();
            assert_eq!(lasting(events.clone()).await, ["x"]);
            // Another leader continues the log.
            let next = Events::new(env.clone(), store);
            next.note(vec![trouble("a", "x"), trouble("a", "y")]).await.unwrap();
            assert_eq!(lasting(next.clone()).await, ["x", "y"]);
            assert_eq!(next.log().await.unwrap().events.len(), 3);
            assert!(events.note(vec![]).await.is_err(), "the former leader changes nothing");
        });
    }

    #[test]
    fn reports_of_64_consoles_are_noted_with_few_writes() {
        let world = World::new(1, SimConfig::default());
        world.clone().run(async move {
            let env = world.node("c");
            let events = Events::new(env.clone(), Embedded::open(env.clone(), Path::new("/coord")).unwrap());
            world.set_disk_faults(
                "c",
                DiskFaults { delay: Duration::from_millis(100), ..DiskFaults::default() },
            );
            let wait = |n: usize| events.wait(vec![trouble("a", &(n % 64).to_string())]);
            let mut answers: Vec<_> = (0..WAITING_MAX).map(|n| wait(n).unwrap()).collect();
            assert!(wait(0).is_err(), "two of each console wait already");
            for n in 0..3 * WAITING_MAX {
                if n % 3 == 0 {
                    env.clock.sleep(Duration::from_millis(1)).await;
                    answers.extend(wait(n).ok());
                }
                let events = events.clone();
                env.tasks.spawn("note", async move { events.note_waiting().await });
            }
            for answer in answers {
                answer.await.unwrap().unwrap();
            }
            let written = events.kept.lock().await.as_ref().unwrap().1;
            assert!(written <= Revision(8), "{written:?} writes of some 200 reports");
            assert!(events.waiting().is_empty());
        });
    }

    #[test]
    fn the_bytes_of_a_kept_log_stay_as_they_are() {
        let mut log = EventLog::default();
        let mut one = trouble("a", "x");
        (one.text, one.action) = ("t".into(), String::new());
        report(&mut log, &[one], 5);
        mark(&mut log, &marked("b", EventMark::Mute, 9), 6).unwrap();
        let bytes = encode_events(&log);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "0100\
             01000000010000006102010000007801000000740000000005000000000000000000000000000000\
             0000000000000000\
             010000000100000062000000000900000000000000"
        );
        assert_eq!(decode_events(&bytes), Ok(log));
        assert!(decode_events(&bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn the_log_has_a_limit_and_keeps_what_lasts() {
        let mut log = EventLog::default();
        let about = |n: usize| trouble("a", &n.to_string());
        report(&mut log, &[about(0)], 1);
        for n in 1..2 * EVENTS_MAX {
            report(&mut log, &[about(0), about(n)], 10 * n as u64);
        }
        assert_eq!(log.events.len(), EVENTS_MAX);
        assert_eq!(times(&log)[0], ("0", 1, 0));
        assert_eq!(log.events.last().unwrap().trouble.about, (2 * EVENTS_MAX - 1).to_string());
    }

    #[test]
    fn marks_find_what_is_meant_and_mutes_end() {
        let mut log = EventLog::default();
        report(&mut log, &[trouble("a", "x"), trouble("b", "y")], 10);
        mark(&mut log, &marked("a", EventMark::Acknowledge, 0), 11).unwrap();
        assert_eq!((log.events[0].acknowledged_s, log.events[1].acknowledged_s), (11, 0));
        assert!(mark(&mut log, &marked("c", EventMark::Acknowledge, 0), 11).is_err());
        assert!(mark(&mut log, &marked("a", EventMark::Mute, 11), 11).is_err(), "it ends at once");
        mark(&mut log, &marked("a", EventMark::Mute, 20), 11).unwrap();
        mark(&mut log, &marked("a", EventMark::Mute, 30), 11).unwrap();
        assert_eq!(log.mutes.len(), 1);
        mark(&mut log, &marked("a", EventMark::Unmute, 0), 12).unwrap();
        assert!(mark(&mut log, &marked("a", EventMark::Unmute, 0), 12).is_err());
        mark(&mut log, &marked("a", EventMark::Mute, 30), 12).unwrap();
        forget_mutes(&mut log, 30);
        assert_eq!(log.mutes, []);
    }
}
