//! The log of events: which troubles began and ended when, and which are muted. Kept in the store, so that it
//! outlives this coordinator.
//!
//! Invariants: the log has a limit, and what lasts is dropped last; a trouble that returns soon is the same
//! event. The decisions are plain functions of the log; times are given. Knows nothing of what troubles mean.
use crate::door::busy;
use crate::records::{decode_events, encode_events};
use crate::store::{Revision, Store, Swap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;
use weir_env::Env;
use weir_proto::condition::NodeTrouble;
use weir_proto::event::{
    EVENTS_MAX, EventLog, EventMark, EventSeen, GetEvents, MUTES_MAX, MarkEvents, Mute, REPORTED_MAX,
    ReportEvents,
};
use weir_proto::{Error, Request, Result};
use weir_rpc::{Call, Handled, Reply};

/// The key of the log in the store.
pub const EVENTS_KEY: &str = "events";
/// A trouble that returns so soon has not been away.
const SAME_AGAIN_S: u64 = 60;
/// Longest text that is kept, in characters.
const TEXT_MAX: usize = 300;
/// Reports of consoles that wait for a write of the store: two of each of 64. A console reports again.
const WAITING_MAX: usize = 128;

/// The log and the store that it is in. It is read when it is needed first.
pub struct Events {
    env: Env,
    store: Arc<dyn Store>,
    kept: tokio::sync::Mutex<Option<(EventLog, Revision)>>,
    /// Reports of consoles; all that wait are noted with one write.
    waiting: Mutex<Vec<Report>>,
}

/// A console's report that waits for its turn.
struct Report {
    troubles: Vec<NodeTrouble>,
    answer: oneshot::Sender<Result<()>>,
}

impl Events {
    pub fn new(env: Env, store: Arc<dyn Store>) -> Arc<Events> {
        let (kept, waiting) = (tokio::sync::Mutex::default(), Mutex::default());
        Arc::new(Events { env, store, kept, waiting })
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
        let decide = |log: &mut EventLog, now_s| {
            let note = |changed, waits: &Report| report(log, &waits.troubles, now_s) | changed;
            Ok(waiting.iter().fold(false, note))
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
        let known = log.events.iter_mut().rev().find(|event| is_same(&event.trouble, trouble));
        match known {
            Some(event) if event.cleared_s == 0 => {}
            Some(event) if now_s.saturating_sub(event.cleared_s) < SAME_AGAIN_S => {
                (event.cleared_s, changed) = (0, true);
            }
            _ => {
                let trouble = shortened(trouble);
                log.events.push(EventSeen { trouble, raised_s: now_s, cleared_s: 0, acknowledged_s: 0 });
                changed = true;
            }
        }
    }
    while log.events.len() > EVENTS_MAX {
        let ended = log.events.iter().position(|event| event.cleared_s > 0);
        log.events.remove(ended.unwrap_or(0));
    }
    changed
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
                let hint = "`weir events` lists those that last, as a console noted them";
                return Err(Error::not_found(format!("no event {code} {about} lasts now; hint: {hint}")));
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
    use std::time::Duration;
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
