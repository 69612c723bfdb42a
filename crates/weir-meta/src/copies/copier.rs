//! The leader of a journal group: sends its records to the other copies, and decides when it may answer and
//! acknowledge.
//!
//! One task for each copy: it compares the copy's records with the leader's, has the rest truncated, and
//! sends the following ones, one message at a time. New records come from memory, others from the journal.
//!
//! Invariant: a copy counts from the moment at which it has all records that exist then.
use super::decide::{self, Lead, Promise, RIGHT, Start};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_coord::decide::JournalGroup;
use weir_env::{Env, Instant, TaskHandle, watch};
use weir_kv::epochs::{Epochs, Run};
use weir_kv::{CommitSeq, Copies, Engine, Entry, Export, Kv, Reader};
use weir_proto::copies::{
    JournalAppend, JournalAsk, JournalEpochs, JournalTruncate, PART_BYTES, RECORDS_MAX, RecordHead,
    StateFetch, StatePart, encode_pairs,
};
use weir_proto::{Epoch, Error, ErrorKind, NamespaceId, NodeId, Request, Result};
use weir_rpc::{Call, Channel, Connection, Handled, Payload, Reply};

/// New records wait in memory for the slowest copy up to this; then it reads them from the journal.
const RECENT_BYTES_MAX: usize = 32 << 20;
/// One message: some milliseconds of a network of 1 Gbit/s.
const MESSAGE_BYTES: usize = 1 << 20;
/// The interval of the leader's messages to a copy, and of its promises: four times while one counts.
const IDLE: Duration = Duration::from_millis(RIGHT.as_millis() as u64 / 4);
/// Records that are neither in memory nor on the disk yet: the sync of a slow disk.
const UNSYNCED: Duration = Duration::from_millis(5);
/// A copy answers when its disk has the records; the coordinator handles a silent one long before.
const PATIENCE: Duration = Duration::from_secs(10);
/// After a failure, and while a copy fetches the state.
const RETRY: Duration = Duration::from_millis(100);
/// A copy that is waited for and silent for this time is reported: no change shall wait for it much longer.
const SILENT: Duration = Duration::from_millis(800);
/// The interval at which a copy that has caught up or is silent is reported again to the coordinator.
const REPORT_AGAIN: Duration = Duration::from_secs(1);
/// States that are being fetched at the same time.
const EXPORTS_MAX: usize = 2;

/// A report on a copy to the coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum News {
    /// It holds everything.
    CaughtUp,
    /// It has been silent for this time.
    Silent(Duration),
}

/// Reports on a copy to the coordinator, as of an epoch.
pub type Reporter = Arc<dyn Fn(NodeId, Epoch, News) + Send + Sync>;

/// A journal group as its leader needs it.
pub struct Group {
    pub namespace: NamespaceId,
    pub me: NodeId,
    pub members: JournalGroup<NodeId>,
    /// Links to the other members.
    pub links: BTreeMap<NodeId, Channel>,
}

/// Leads under one epoch, until it is dropped.
pub struct Copier {
    inner: Arc<Inner>,
    feeding: Vec<TaskHandle>,
}

struct Inner {
    env: Env,
    engine: Arc<Engine>,
    namespace: NamespaceId,
    epoch: Epoch,
    stream: Arc<CopyStream>,
    promise: Promise,
    exports: Mutex<Exports>,
    report: Reporter,
    begun: Instant,
}

#[derive(Default)]
struct Exports {
    last: u64,
    open: BTreeMap<u64, Arc<Export>>,
}

/// The store's knowledge of its copies.
struct CopyStream {
    epoch: Epoch,
    lead: Mutex<Lead<NodeId>>,
    recent: Mutex<Recent>,
    /// The newest record.
    newest: AtomicU64,
    /// The newest record that is to be sent.
    news: watch::Sender<CommitSeq>,
}

#[derive(Default)]
struct Recent {
    entries: VecDeque<Entry>,
    bytes: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Copies for CopyStream {
    fn append(&self, seq: CommitSeq, body: &[u8]) {
        {
            let mut recent = locked(&self.recent);
            recent.bytes += body.len();
            let body = bytes::Bytes::copy_from_slice(body);
            recent.entries.push_back(Entry { seq, epoch: self.epoch, body });
            while recent.bytes > RECENT_BYTES_MAX {
                let Some(oldest) = recent.entries.pop_front() else { break };
                recent.bytes -= oldest.body.len();
            }
        }
        self.newest.store(seq.0, SeqCst);
    }

    /// One message to each copy for all records of a flush: their own messages would take more time than they
    /// do.
    fn flush(&self) {
        let newest = CommitSeq(self.newest.load(SeqCst));
        self.news.send_if_modified(|news| newest > std::mem::replace(news, newest.max(*news)));
    }

    fn kept(&self) -> CommitSeq {
        locked(&self.lead).kept_by_all()
    }
}

impl CopyStream {
    /// New records after `after`; none: they are not in memory.
    fn recent(&self, after: CommitSeq) -> Option<Vec<Entry>> {
        let recent = locked(&self.recent);
        let first = recent.entries.front()?.seq;
        let skip = usize::try_from((after.0 + 1).checked_sub(first.0)?).ok()?;
        let mut bytes = 0;
        let some = recent.entries.iter().skip(skip).take(RECORDS_MAX).take_while(|entry| {
            let fits = bytes == 0 || bytes + entry.body.len() <= MESSAGE_BYTES;
            bytes += entry.body.len();
            fits
        });
        Some(some.cloned().collect())
    }
}

impl Copier {
    /// Begins to lead under the group's epoch, which the store did not know before. `promised`: returns this
    /// node's promise as a follower; called when it can make no more promises.
    pub async fn begin(
        env: &Env,
        engine: Arc<Engine>,
        group: Group,
        promised: impl FnOnce() -> Promise,
        report: Reporter,
    ) -> Result<Copier> {
        let Group { namespace, me, members, links } = group;
        let (epoch, known) = (members.epoch, engine.epoch());
        if !decide::may_lead(&members, me, known) {
            return Err(Error::denied(format!(
                "{me} cannot lead {namespace} under {epoch}: it knows {known}"
            )));
        }
        let lead = Lead::new(&members, me);
        let others: Vec<NodeId> = lead.others().collect();
        let last = engine.epochs().last();
        let (newest, news) = (AtomicU64::new(last.0), watch::Sender::new(last));
        let stream = CopyStream { epoch, lead: Mutex::new(lead), recent: Mutex::default(), newest, news };
        let stream = Arc::new(stream);
        engine.lead(epoch, stream.clone()).await?;
        let promise = promised();
        // The former leader may have sent more until just now.
        let last = engine.epochs().last();
        stream.newest.fetch_max(last.0, SeqCst);
        stream.flush();
        let exports = Mutex::default();
        let inner = Inner {
            env: env.clone(),
            engine,
            namespace,
            epoch,
            stream,
            promise,
            exports,
            report,
            begun: env.clock.now(),
        };
        let inner = Arc::new(inner);
        let mut feeding = vec![env.tasks.spawn("journal-watch", watch_always(inner.clone()))];
        for id in others {
            let link = links.get(&id).cloned();
            let link = link
                .ok_or_else(|| Error::invalid(format!("there is no way to {id}, a copy of {namespace}")))?;
            feeding.push(env.tasks.spawn("journal-feed", feed_always(inner.clone(), id, link)));
        }
        Ok(Copier { inner, feeding })
    }

    /// Whether it may answer from its state: no other leader can have acknowledged anything since.
    pub fn may_answer(&self) -> bool {
        locked(&self.inner.stream.lead).may_answer(self.inner.env.clock.now())
    }

    /// Whether durable records may be acknowledged: enough copies count, and no promise to another leader
    /// binds this node.
    pub fn may_acknowledge(&self) -> bool {
        let now = self.inner.env.clock.now();
        locked(&self.inner.stream.lead).may_acknowledge(&self.inner.promise, now)
    }

    /// The time until which the former leader may have answered.
    pub fn led_until(&self) -> Instant {
        self.inner.promise.until()
    }

    /// Answers a copy that fetches the state. None: it is another request.
    pub fn handle(&self, call: Call) -> Option<Handled> {
        if call.method != StateFetch::METHOD {
            return None;
        }
        let inner = self.inner.clone();
        Some(Handled::Later(Box::pin(async move { inner.state_part(&call.decode()?).await })))
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.feeding.iter().for_each(TaskHandle::abort);
    }
}

/// Reports to the coordinator copies that are waited for and do not answer.
async fn watch_always(inner: Arc<Inner>) {
    let mut reported: BTreeMap<NodeId, Instant> = BTreeMap::new();
    loop {
        inner.env.clock.sleep(IDLE / 2).await;
        let now = inner.env.clock.now();
        let silent: Vec<(NodeId, Duration)> = {
            let lead = locked(&inner.stream.lead);
            let last_answer =
                |id| lead.right_of(id).map_or(0, |until| until.0.saturating_sub(RIGHT.as_nanos() as u64));
            lead.must_keep().map(|id| (id, now.since(inner.begun.max(Instant(last_answer(id)))))).collect()
        };
        for (id, silent) in silent.into_iter().filter(|(_, silent)| *silent >= SILENT) {
            if reported.get(&id).is_none_or(|at| now.since(*at) >= REPORT_AGAIN) {
                reported.insert(id, now);
                (inner.report)(id, inner.epoch, News::Silent(silent));
            }
        }
    }
}

async fn feed_always(inner: Arc<Inner>, id: NodeId, link: Channel) {
    loop {
        let Err(error) = inner.feed(id, &link).await;
        if error.kind == ErrorKind::Stale {
            // The copy may know a newer epoch: its promise counts no more.
            locked(&inner.stream.lead).forget_answer(id);
        }
        tracing::debug!(%error, %id, "a copy of the journal takes no records now");
        inner.env.clock.sleep(RETRY).await;
    }
}

/// It continues until an error.
enum Never {}

impl Inner {
    async fn feed(&self, id: NodeId, link: &Channel) -> Result<Never> {
        let connection = link.connection(PATIENCE).await?;
        let mut after = self.join(&connection).await?;
        let mut reader = None;
        let mut news = self.stream.news.subscribe();
        let mut reported_at = None;
        loop {
            let Some(entries) = self.records(after, &mut reader).await? else {
                self.truncate_to(&connection, None).await?;
                return Err(Error::unavailable("the copy fetches the whole state"));
            };
            let is_idle = entries.is_empty();
            let asked = self.env.clock.now();
            let sent = CommitSeq(after.0 + entries.len() as u64);
            let kept = self.append(&connection, after, entries).await?;
            if kept != sent {
                return Err(Error::invalid(format!("the copy keeps {} after {} was sent", kept.0, sent.0)));
            }
            after = kept;
            self.note_answer(id, after, asked, &mut reported_at)?;
            self.engine.settle();
            if is_idle {
                // Then a promise is due; or records that it got from the former leader are on its disk.
                let pause = if *news.borrow() <= after { IDLE } else { UNSYNCED };
                let _ = self.env.clock.timeout(pause, news.changed()).await;
            }
        }
    }

    /// Compares the copy's records with the leader's. Returns the end of the common part.
    async fn join(&self, connection: &Connection) -> Result<CommitSeq> {
        let ask = JournalAsk { namespace: self.namespace, epoch: self.epoch };
        let (held, _) = connection.call(&ask, vec![], PATIENCE).await?;
        let theirs = from_wire(&held.epochs)?;
        match decide::start(&theirs, &self.engine.epochs(), CommitSeq(held.durable))? {
            Start::After(seq) => {
                self.truncate_to(connection, Some(seq.0)).await?;
                Ok(seq)
            }
            Start::Fetch => {
                self.truncate_to(connection, None).await?;
                Err(Error::unavailable("the copy fetches the whole state"))
            }
        }
    }

    async fn truncate_to(&self, connection: &Connection, to: Option<u64>) -> Result<()> {
        let truncate = JournalTruncate { namespace: self.namespace, epoch: self.epoch, to };
        connection.call(&truncate, vec![], PATIENCE).await.map(drop)
    }

    /// The next records. None: the journal does not keep them any more.
    async fn records(&self, after: CommitSeq, reader: &mut Option<Reader>) -> Result<Option<Vec<Entry>>> {
        if *self.stream.news.borrow() <= after {
            return Ok(Some(Vec::new()));
        }
        if let Some(entries) = self.stream.recent(after) {
            *reader = None;
            return Ok(Some(entries));
        }
        let (engine, open) = (self.engine.clone(), reader.take());
        let read = move || {
            let open = match open {
                Some(open) => Some(open),
                None => engine.reader(after)?,
            };
            let Some(mut open) = open else { return Ok((None, None)) };
            let entries = open.next(MESSAGE_BYTES)?;
            Ok::<_, Error>((entries, Some(open)))
        };
        let (entries, open) = self.env.tasks.blocking(read).await?;
        *reader = open;
        Ok(entries)
    }

    async fn append(
        &self,
        connection: &Connection,
        after: CommitSeq,
        entries: Vec<Entry>,
    ) -> Result<CommitSeq> {
        let head = |e: &Entry| RecordHead { epoch: e.epoch, bytes: e.body.len() as u32 }; // limited by the store
        let append = JournalAppend {
            namespace: self.namespace,
            epoch: self.epoch,
            after: after.0,
            durable: self.engine.durable().0,
            records: entries.iter().map(head).collect(),
        };
        let bodies: Vec<bytes::Bytes> = entries.into_iter().map(|e| e.body).collect();
        let (kept, _) = connection.call_payload(&append, Payload::from(bodies), PATIENCE).await?;
        Ok(CommitSeq(kept.kept))
    }

    fn note_answer(
        &self,
        id: NodeId,
        kept: CommitSeq,
        asked: Instant,
        reported_at: &mut Option<Instant>,
    ) -> Result<()> {
        let mut lead = locked(&self.stream.lead);
        lead.kept(id, self.epoch, kept)?;
        lead.note_answer(id, self.epoch, asked)?;
        // Under the lock that `kept` takes: records that became durable without this copy are older, so it
        // has them.
        let caught_up = lead.report_caught_up(id, CommitSeq(self.stream.newest.load(SeqCst)));
        drop(lead);
        let now = self.env.clock.now();
        if caught_up && reported_at.is_none_or(|at: Instant| now.since(at) >= REPORT_AGAIN) {
            *reported_at = Some(now);
            (self.report)(id, self.epoch, News::CaughtUp);
        }
        Ok(())
    }

    async fn state_part(&self, asked: &StateFetch) -> Result<Reply> {
        if (asked.namespace, asked.epoch) != (self.namespace, self.epoch) {
            return Err(Error::stale(format!("this node leads {} under {}", self.namespace, self.epoch)));
        }
        let (number, export) = match asked.export {
            0 => self.begin_export().await?,
            number => {
                let open = locked(&self.exports).open.get(&number).cloned();
                (number, open.ok_or_else(|| Error::stale("that state is not kept any more: fetch it again"))?)
            }
        };
        let (after, from) = (asked.after.clone(), export.clone());
        let pairs = self.env.tasks.blocking(move || from.entries(after.as_deref(), PART_BYTES)).await?;
        if pairs.is_empty() {
            locked(&self.exports).open.remove(&number);
        }
        let part = StatePart { export: number, seq: export.seq.0, epoch: export.epoch };
        Ok(Reply::with_payload(&part, encode_pairs(&pairs)?))
    }

    async fn begin_export(&self) -> Result<(u64, Arc<Export>)> {
        let export = Arc::new(self.engine.export().await?);
        let mut exports = locked(&self.exports);
        exports.last += 1;
        let number = exports.last;
        exports.open.insert(number, export.clone());
        if exports.open.len() > EXPORTS_MAX {
            exports.open.pop_first();
        }
        Ok((number, export))
    }
}

fn from_wire(epochs: &JournalEpochs) -> Result<Epochs> {
    let run = |run: &weir_proto::copies::EpochRun| Run { epoch: run.epoch, last: CommitSeq(run.last) };
    let runs = epochs.runs.iter().map(run).collect();
    Epochs::from_runs(CommitSeq(epochs.start), epochs.start_epoch, runs)
}

const _: () = assert!(weir_kv::COPIED_BYTES_MAX <= weir_proto::copies::RECORD_BYTES_MAX);
const _: () = assert!(weir_kv::epochs::RUNS_MAX <= weir_proto::copies::EPOCH_RUNS_MAX);
