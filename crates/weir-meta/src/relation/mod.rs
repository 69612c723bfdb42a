//! Relations: home's progress, and the movers' work on it. See decision 12.
//!
//! Invariant: work that a mover has is assigned to no other before that mover has ended, even after a restart
//! of the leader; because home cannot distinguish a late writer from the present one.
//!
//! `tree` and `dirty` derive the meaning of a change, `ingest` moves changes from the changelog to the
//! queues, `ship_queue` assigns work, `relocations` resolves conflicts of names, `serve` answers messages,
//! `store` knows the records.
mod dirty;
mod ingest;
mod listing;
mod orphans;
mod parts;
mod ready;
pub mod record;
mod relocations;
pub(crate) mod serve;
mod ship_queue;
pub mod store;
pub mod tree;

pub use ingest::{logged, mirrored};

use crate::executor::Leader;
use crate::keys;
use ship_queue::ShipQueue;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::meta::Time;
use weir_proto::relation::RelationId;
use weir_proto::{Error, InodeId, Result, SessionId};

/// Rates are measured over this time.
const METER_SPAN: Duration = Duration::from_secs(10);
/// A mover that has not asked for this time does not count.
const MOVER_SILENT: Duration = Duration::from_secs(15);

/// The work in progress for all relations of a namespace. In memory only: a new leader assigns all work
/// again, when the former movers are gone.
#[derive(Default)]
pub struct Relations {
    queues: Mutex<ShipQueues>,
    /// A changelog has grown, or a relation was added.
    pub changed: Notify,
    /// There may be work.
    work: Notify,
}

#[derive(Default)]
struct ShipQueues {
    queues: BTreeMap<RelationId, ShipQueue>,
    meters: BTreeMap<RelationId, Meter>,
    /// Movers: the time of their last request, and the error that delays them, as they report it.
    movers: BTreeMap<SessionId, (Instant, String)>,
    /// The relation that was served last.
    last: RelationId,
    /// The number of this leader: movers that know another one have work of its time.
    leader: u64,
    /// Movers that may have work of a former leader.
    former: BTreeSet<SessionId>,
}

/// Bytes shipped in the last seconds.
#[derive(Default)]
struct Meter(VecDeque<(Instant, u64)>);
impl Meter {
    fn note(&mut self, now: Instant, bytes: u64) {
        self.0.push_back((now, bytes));
        self.drop_old(now);
    }
    fn drop_old(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(at, _)| now.since(*at) > METER_SPAN) {
            self.0.pop_front();
        }
    }
    /// Bytes per second.
    fn rate(&mut self, now: Instant) -> u64 {
        self.drop_old(now);
        let bytes: u64 = self.0.iter().map(|(_, bytes)| bytes).sum();
        let span =
            self.0.front().map_or(Duration::ZERO, |(at, _)| now.since(*at)).max(Duration::from_secs(1));
        (bytes as f64 / span.as_secs_f64()) as u64
    }
}

impl Relations {
    /// `leader`: a number that no other leader has; not 0.
    pub fn load(read: &dyn Read, leader: u64) -> Result<Relations> {
        let (start, end) = keys::range_of_letter(b'M');
        let former = store::collect(read, &start, &end, usize::MAX, |key, _| {
            keys::session_of(key).ok_or_else(|| Error::damaged("the key of a mover is damaged"))
        })?;
        let mut queues = ShipQueues { leader, former: former.into_iter().collect(), ..ShipQueues::default() };
        for (id, _) in store::all_relations(read)? {
            let mut queue = ShipQueue::default();
            queue.orphans.rescan();
            for (ino, number) in ingest::truncations(read, id)? {
                queue.truncations.entry(ino).or_default().insert(number);
            }
            queues.queues.insert(id, queue);
        }
        Ok(Relations { queues: Mutex::new(queues), ..Relations::default() })
    }

    fn lock(&self) -> MutexGuard<'_, ShipQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A mover's work is assigned to others.
    pub fn end_session(&self, session: SessionId) {
        let mut queues = self.lock();
        let is_known = queues.movers.remove(&session).is_some() | queues.former.remove(&session);
        let had_work = queues.queues.values_mut().fold(false, |had, queue| had | queue.end_session(session));
        if is_known || had_work {
            self.work.notify_waiters();
        }
        // It may have been writing.
        queues.queues.values_mut().for_each(|queue| queue.orphans.rescan());
        self.changed.notify_one();
    }
}

/// Ingests changes for ever; returns only the error after which the node must stop.
pub(crate) async fn run(leader: Arc<Leader>) -> Error {
    loop {
        match pass(&leader) {
            Ok(true) => tokio::task::yield_now().await,
            Ok(false) => leader.relations.changed.notified().await,
            Err(e) => {
                if let Err(e) = leader.retry_job(e, "take changes over").await {
                    return e;
                }
            }
        }
    }
}

/// One round over all relations; returns whether there is more to do. A failing one does not delay the
/// others.
fn pass(leader: &Arc<Leader>) -> Result<bool> {
    let ids: Vec<RelationId> = leader.relations.lock().queues.keys().copied().collect();
    let now = Time { nanos: leader.env.clock.wall().0 };
    let (mut more, mut failed) = (false, None);
    for id in ids {
        match pass_one(leader, id, now) {
            Ok(left) => more |= left,
            Err(e) => failed = Some(e.doing(format_args!("relation {id}"))),
        }
    }
    leader.relations.work.notify_waiters();
    failed.map_or(Ok(more), Err)
}

fn pass_one(leader: &Arc<Leader>, id: RelationId, now: Time) -> Result<bool> {
    if let Some(left) = remove_some(leader, id)? {
        return Ok(left);
    }
    let (mut volume, mut seen) = (None, false);
    leader.kv.transact(&mut |txn| {
        volume = store::find_relation(txn, id)?.map(|r| r.volume);
        seen = ingest::scan(txn, id, now)?;
        Ok(())
    })?;
    let mut queues = leader.relations.lock();
    let Some(queue) = queues.queues.get_mut(&id) else { return Ok(false) };
    if seen {
        queue.orphans.rescan();
    }
    let mut left = false;
    leader.kv.transact(&mut |txn| {
        left = ingest::take(txn, id, queue)?;
        Ok(())
    })?;
    let mut more = left || seen;
    drop(queues);
    more |= orphans::scan(leader, id)?;
    if let Some(volume) = volume {
        leader.kv.transact(&mut |txn| {
            left = ingest::forget(txn, volume)?;
            Ok(())
        })?;
        more |= left;
    }
    Ok(more)
}

/// A step of a relation's removal; returns whether there is more; none: it is not being removed.
fn remove_some(leader: &Arc<Leader>, id: RelationId) -> Result<Option<bool>> {
    let mut left = None;
    leader.kv.transact(&mut |txn| {
        left = match store::find_any(txn, id)? {
            Some(record) if record.removing => Some(store::remove_some(txn, id)?),
            _ => None,
        };
        Ok(())
    })?;
    if left == Some(false) {
        leader.relations.lock().queues.remove(&id);
        tracing::info!(relation = %id, "all of a removed relation is gone");
    }
    Ok(left)
}

/// Volumes whose files may be evicted.
pub fn evicting(read: &dyn Read) -> Result<std::collections::BTreeSet<weir_proto::VolumeId>> {
    let all = store::relations(read)?;
    Ok(all.into_iter().filter(|(_, r)| r.evict).map(|(_, r)| r.volume).collect())
}

/// Whether home has all of `from..to` of a file, durably and as it is now; otherwise the reason why not.
pub fn at_home(
    read: &dyn Read,
    ino: InodeId,
    inode: &crate::record::Inode,
    from: u64,
    to: u64,
) -> Result<()> {
    let refuse = |why: String| Err(Error::denied(format!("inode {ino} stays: {why}")));
    let volume = crate::namespace::volume::volume_of(read, inode.parent)?;
    let all = store::relations(read)?;
    let Some((id, record)) = all.iter().find(|(_, r)| r.volume == volume && r.evict) else {
        return refuse("its volume has no relation that allows eviction".to_owned());
    };
    if tree::find_remote(read, *id, ino)?.is_none() {
        return refuse("home does not have it yet".to_owned());
    }
    if read.get(&keys::conflict(*id, ino))?.is_some() {
        return refuse(
            "it is in conflict, because home is not as it was left: `weir relation show`".to_owned(),
        );
    }
    if store::is_unfinished(read, *id, ino)? {
        return refuse("home has parts of it, which can be read when it is complete there".to_owned());
    }
    let to = to.min(inode.size);
    let dirty = store::dirty_of(read, *id, ino)?;
    if dirty.iter().any(|(at, range)| *at < to && from < at + range.len) {
        return refuse("home does not have all of it yet".to_owned());
    }
    if !store::is_proved(read, *id, ino, from, to)? {
        return refuse("home has given no proof of all of it".to_owned());
    }
    if ingest::is_not_ingested(read, record, ino)? {
        return refuse("it changed a moment ago".to_owned());
    }
    Ok(())
}

/// Whether a home has all evicted bytes of a file, as they were at the eviction.
pub fn has_evicted(
    read: &dyn Read,
    (id, record): (RelationId, &record::RelationRecord),
    ino: InodeId,
    inode: &crate::record::Inode,
) -> Result<bool> {
    if tree::find_remote(read, id, ino)?.is_none() || store::is_unfinished(read, id, ino)? {
        return Ok(false);
    }
    let dirty = store::dirty_of(read, id, ino)?;
    for (from, to) in store::evicted_of(read, ino)? {
        let to = to.min(inode.size);
        if dirty.iter().any(|(at, range)| *at < to && from < at + range.len) {
            return Ok(false);
        }
        // Imported data has no checksums until it is read.
        if from < to && !record.imports && !store::is_proved(read, id, ino, from, to)? {
            return Ok(false);
        }
    }
    // Changes that another home had when the bytes were evicted may not have reached this one.
    Ok(!ingest::is_not_ingested(read, record, ino)?)
}

/// Recalled bytes were at a home without checksums: now they are known.
pub fn learn(
    txn: &mut dyn weir_kv::Txn,
    ino: InodeId,
    from: u64,
    to: u64,
    learned: &weir_proto::recall::Learned,
) -> Result<()> {
    let blocks = (to - from).div_ceil(weir_proto::relation::RECEIPT_BLOCK);
    let known = tree::find_remote(txn, learned.relation, ino)?.is_some();
    let fits = learned.sums.len() as u64 == blocks;
    if !known || !fits || store::is_proved(txn, learned.relation, ino, from, to)? {
        return Ok(());
    }
    let receipt = record::ReceiptRecord { len: to - from, sums: learned.sums.clone() };
    store::add_receipt(txn, learned.relation, ino, from, receipt)
}

/// Whether a file without a writer has bytes here that are neither verified at a home nor in flight to one.
pub fn lacks_proof(read: &dyn Read, ino: InodeId, inode: &crate::record::Inode) -> Result<bool> {
    if inode.dirty || inode.nlink == 0 {
        return Ok(false);
    }
    let volume = crate::namespace::volume::volume_of(read, inode.parent)?;
    for (id, record) in store::relations(read)? {
        // A relation that does not evict now may do so from tomorrow on.
        let of_it = record.volume == volume && (record.evict || !record.mirrors());
        if of_it
            && tree::find_remote(read, id, ino)?.is_some()
            && !ingest::unproved(read, id, ino, inode.size)?.is_empty()
        {
            return Ok(true);
        }
    }
    Ok(false)
}
