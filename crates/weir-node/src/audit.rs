//! The audit log of a role: lines in its own directory, appended in the background.
//!
//! Invariants: a request never waits for this disk; the queue for the disk is bounded, records that did not
//! fit are counted, and the count is written as soon as the disk accepts it. Knows nothing of requests.
use crate::audit_files::Log;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use weir_env::{Env, Instant};
use weir_proto::coord::AuditState;
use weir_trust::audit::{Outcome, Record};

/// Records queued for the log's task: an administrator's script makes fewer during one sync of the disk.
const INBOX_MAX: usize = 1024;
/// Records that are kept while the disk fails, about 1 MiB; later ones are only counted.
const WAITING_MAX: usize = 4096;
/// A failed disk is retried after this time, even without a new record.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// A repeated refusal is written once, and its count after this time: refused callers must not fill the disk.
const REPEAT_WINDOW: Duration = Duration::from_secs(60);
/// Different refusals whose repeats are counted; beyond that each is written.
const REPEATS_MAX: usize = 256;

/// Accepts records. Clones share the log.
#[derive(Clone)]
pub(crate) struct Audit {
    env: Env,
    events: mpsc::Sender<Event>,
    state: Arc<Mutex<AuditState>>,
}

enum Event {
    Record(Record),
    Settle(oneshot::Sender<()>),
}

impl Audit {
    pub fn start(env: &Env, dir: &Path) -> Audit {
        let (events, inbox) = mpsc::channel(INBOX_MAX);
        let state: Arc<Mutex<AuditState>> = Arc::default();
        let writer = Writer {
            env: env.clone(),
            log: Some(Log::new(env.disk.clone(), dir)),
            state: state.clone(),
            waiting: Vec::new(),
            gap: 0,
            repeats: BTreeMap::new(),
        };
        env.tasks.spawn("audit log", writer.run(inbox));
        Audit { env: env.clone(), events, state }
    }

    /// Wall time, for a record.
    pub fn now_ns(&self) -> i64 {
        self.env.clock.wall().0
    }

    pub fn record(&self, record: Record) {
        if self.events.try_send(Event::Record(record)).is_err() {
            lock(&self.state).lost += 1;
        }
    }

    pub fn state(&self) -> AuditState {
        lock(&self.state).clone()
    }

    /// Before an orderly end: waits until all records are written, or have failed.
    pub async fn settle(&self, patience: Duration) {
        let (done, settled) = oneshot::channel();
        let settle = async {
            if self.events.send(Event::Settle(done)).await.is_ok() {
                let _ = settled.await; // the log's task has ended
            }
        };
        if self.env.clock.timeout(patience, settle).await.is_err() {
            tracing::info!("ended before the audit log was written");
        }
    }
}

/// The common fields of refusals that are counted together.
type Kind = (String, String, Option<u32>, String, String);

struct Repeat {
    last: Record,
    count: u64,
    until: Instant,
}

/// The task that owns the log.
struct Writer {
    env: Env,
    /// Absent during a write.
    log: Option<Log>,
    state: Arc<Mutex<AuditState>>,
    waiting: Vec<Record>,
    /// The number of lost records that is already written to the log.
    gap: u64,
    repeats: BTreeMap<Kind, Repeat>,
}

impl Writer {
    async fn run(mut self, mut inbox: mpsc::Receiver<Event>) {
        loop {
            let mut events = Vec::new();
            let more = inbox.recv_many(&mut events, INBOX_MAX);
            let ended = match self.next_due() {
                None => more.await == 0,
                Some(due) => self.env.clock.timeout(due, more).await == Ok(0),
            };
            if ended {
                return;
            }
            let mut settles = Vec::new();
            for event in events {
                match event {
                    Event::Record(record) => self.take(record),
                    Event::Settle(done) => settles.push(done),
                }
            }
            self.end_repeats(!settles.is_empty());
            self.write().await;
            for done in settles {
                let _ = done.send(()); // the caller may have given up
            }
        }
    }

    /// The time of the next work without an event.
    fn next_due(&self) -> Option<Duration> {
        let now = self.env.clock.now();
        let repeats = self.repeats.values().map(|r| r.until.since(now)).min();
        let retry = (!self.waiting.is_empty()).then_some(RETRY_AFTER);
        repeats.into_iter().chain(retry).min()
    }

    fn take(&mut self, record: Record) {
        if record.result == Outcome::Done {
            return self.keep(record);
        }
        let Record { node, role, uid, what, on, .. } = record.clone();
        let kind = (node, role, uid, what, on);
        if let Some(repeat) = self.repeats.get_mut(&kind) {
            repeat.count += 1;
            repeat.last = record;
            return;
        }
        if self.repeats.len() < REPEATS_MAX {
            let until = self.env.clock.now() + REPEAT_WINDOW;
            self.repeats.insert(kind, Repeat { last: record.clone(), count: 0, until });
        }
        self.keep(record);
    }

    fn keep(&mut self, record: Record) {
        match self.waiting.len() < WAITING_MAX {
            true => self.waiting.push(record),
            false => lock(&self.state).lost += 1,
        }
    }

    /// Writes the counts whose time is over; at an end, all.
    fn end_repeats(&mut self, all: bool) {
        let now = self.env.clock.now();
        let waiting = &mut self.waiting;
        self.repeats.retain(|_, repeat| {
            let ends = all || repeat.until <= now;
            if ends && repeat.count > 0 {
                let again = repeat.count - 1; // the last one is written
                waiting.push(Record { again, ..repeat.last.clone() });
            }
            !ends
        });
    }

    async fn write(&mut self) {
        let lost = lock(&self.state).lost;
        if self.waiting.is_empty() && lost == self.gap {
            return;
        }
        let Some(mut log) = self.log.take() else { return };
        let mut records = std::mem::take(&mut self.waiting);
        let kept = records.len();
        if lost > self.gap {
            records.push(self.gap_of(lost - self.gap)); // after the waiting ones: later ones are lost
        }
        let (log, records, written) = self
            .env
            .tasks
            .blocking(move || {
                let written = log.append(&records);
                (log, records, written)
            })
            .await;
        self.log = Some(log);
        let failure = match written {
            Ok(number) => {
                lock(&self.state).records = number;
                self.gap = lost;
                String::new()
            }
            Err(e) => {
                self.waiting = records;
                self.waiting.truncate(kept);
                e.to_string()
            }
        };
        self.report(failure);
    }

    /// A failure is logged once, and so is its end.
    fn report(&self, failure: String) {
        let mut state = lock(&self.state);
        state.waiting = self.waiting.len() as u64;
        match (state.failure.is_empty(), failure.is_empty()) {
            (true, false) => tracing::error!("the audit log cannot be written: {failure}"),
            (false, true) => tracing::info!("the audit log is written again"),
            _ => {}
        }
        state.failure = failure;
    }

    fn gap_of(&self, count: u64) -> Record {
        Record {
            time_ns: self.env.clock.wall().0,
            node: String::new(),
            from: String::new(),
            role: "audit log".into(),
            uid: None,
            what: "AuditGap".into(),
            on: format!("{count} records"),
            result: Outcome::Failed("the disk did not take them in time".into()),
            again: 0,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::sim::{SimConfig, World};

    const DIR: &str = "/role";

    fn record(result: Outcome) -> Record {
        Record {
            time_ns: 1,
            node: "n".into(),
            from: "unix".into(),
            role: "mount".into(),
            uid: None,
            what: "Leave".into(),
            on: "node n1".into(),
            result,
            again: 0,
        }
    }

    fn world(capacity: Option<u64>) -> (World, Env) {
        let world = World::new(1, SimConfig::default());
        let env = world.node("role");
        env.disk.create_dir_all(Path::new(DIR)).unwrap();
        if let Some(bytes) = capacity {
            world.set_disk_capacity("role", bytes);
        }
        (world, env)
    }

    #[test]
    fn a_refusal_that_repeats_is_written_once_and_counted() {
        let (world, env) = world(None);
        world.run(async {
            let audit = Audit::start(&env, Path::new(DIR));
            for n in 0..10 {
                audit.record(record(Outcome::Refused(format!("from port {n}"))));
            }
            audit.record(record(Outcome::Done));
            env.clock.sleep(REPEAT_WINDOW / 2).await;
            assert_eq!(audit.state().records, 2);
            env.clock.sleep(REPEAT_WINDOW).await;
            assert_eq!(audit.state().records, 3);
            let lines =
                String::from_utf8(env.disk.read(&Path::new(DIR).join("audit.jsonl")).unwrap()).unwrap();
            let last = lines.lines().last().unwrap();
            assert!(last.contains("from port 9") && last.contains("\"again\":8"), "{last}");
            // An orderly end does not wait for that time.
            (0..3).for_each(|_| audit.record(record(Outcome::Failed(String::new()))));
            audit.settle(Duration::from_secs(1)).await;
            assert_eq!(audit.state().records, 5);
        });
    }

    #[test]
    fn a_full_disk_loses_only_what_does_not_fit_in_memory() {
        let (world, env) = world(Some(0));
        world.run(async {
            let audit = Audit::start(&env, Path::new(DIR));
            for _ in 0..5 {
                (0..1000).for_each(|_| audit.record(record(Outcome::Done)));
                env.clock.sleep(Duration::from_secs(1)).await;
            }
            let state = audit.state();
            assert!(!state.failure.is_empty(), "{state:?}");
            assert_eq!((state.records, state.waiting, state.lost), (0, 4096, 904));
            world.set_disk_capacity("role", 1 << 30);
            env.clock.sleep(RETRY_AFTER * 2).await;
            // And the record with the number of lost ones.
            let written = AuditState { records: 4097, waiting: 0, lost: 904, failure: String::new() };
            assert_eq!(audit.state(), written);
        });
    }
}
