//! The work in progress for all relations of a namespace, and the movers that have it.
use super::ship_queue::ShipQueue;
use super::{changelog, store};
use crate::tables;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::Instant;
use weir_kv::{Read, SharedKv};
use weir_proto::relation::RelationId;
use weir_proto::{Result, SessionId, VolumeId};

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
    pub work: Notify,
}

#[derive(Default)]
pub struct ShipQueues {
    pub queues: BTreeMap<RelationId, ShipQueue>,
    pub meters: BTreeMap<RelationId, Meter>,
    /// Movers: the time of their last request, and the error that delays them, as they report it.
    pub movers: BTreeMap<SessionId, (Instant, String)>,
    /// The relation that was served last.
    pub last: RelationId,
    /// The number of this leader: movers that know another one have work of its time.
    pub leader: u64,
    /// Movers that may have work of a former leader.
    pub former: BTreeSet<SessionId>,
}

/// Bytes shipped in the last seconds.
#[derive(Default)]
pub struct Meter(VecDeque<(Instant, u64)>);

impl Meter {
    pub fn note(&mut self, now: Instant, bytes: u64) {
        self.0.push_back((now, bytes));
        self.drop_old(now);
    }
    fn drop_old(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(at, _)| now.since(*at) > METER_SPAN) {
            self.0.pop_front();
        }
    }
    /// Bytes per second.
    pub fn rate(&mut self, now: Instant) -> u64 {
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
        let former = tables::MOVERS.all().collect(read, usize::MAX, |session, _| session)?;
        let mut queues = ShipQueues { leader, former: former.into_iter().collect(), ..ShipQueues::default() };
        for (id, _) in store::all_relations(read)? {
            let mut queue = ShipQueue::default();
            queue.orphans.rescan();
            for (ino, number) in changelog::truncations(read, id)? {
                queue.truncations.entry(ino).or_default().insert(number);
            }
            queues.queues.insert(id, queue);
        }
        Ok(Relations { queues: Mutex::new(queues), ..Relations::default() })
    }

    pub fn lock(&self) -> MutexGuard<'_, ShipQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Relations or cursors were added or removed. Returns the volumes with a changelog, and those that
    /// mirror a home.
    pub fn follow_store(&self, kv: &SharedKv) -> Result<(BTreeSet<VolumeId>, BTreeSet<VolumeId>)> {
        let (mut ids, mut logged, mut mirrored) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        kv.read(&mut |read| {
            ids = store::all_relations(read)?.iter().map(|(id, _)| *id).collect();
            logged = changelog::logged(read)?;
            mirrored = changelog::mirrored(read)?;
            Ok(())
        })?;
        self.lock().follow(&ids);
        self.changed.notify_one();
        Ok((logged, mirrored))
    }

    /// Checks the assigned work of all relations.
    pub fn check(&self) {
        self.lock().queues.values().for_each(ShipQueue::check);
    }

    /// A mover is silent: its work is assigned to others.
    pub fn take_work_back(&self, session: SessionId) {
        if self.lock().take_work_back(session) {
            self.work.notify_waiters();
        }
    }

    /// A mover's session is over: its work is assigned to others, and it is forgotten.
    pub fn end_session(&self, session: SessionId) {
        let mut queues = self.lock();
        let is_known = queues.movers.remove(&session).is_some() | queues.former.remove(&session);
        if queues.take_work_back(session) || is_known {
            self.work.notify_waiters();
        }
        // It may have been writing.
        queues.queues.values_mut().for_each(|queue| queue.orphans.rescan());
        self.changed.notify_one();
    }
}

impl ShipQueues {
    /// Returns whether it had any.
    fn take_work_back(&mut self, session: SessionId) -> bool {
        self.queues.values_mut().fold(false, |had, queue| had | queue.end_session(session))
    }
    /// A mover's part of a limit: the movers that have ranges of the relation share it.
    pub fn share(&self, id: RelationId, mover: SessionId, bytes_per_s: u64) -> u64 {
        let others = self.queues.get(&id).into_iter().flat_map(|queue| queue.files.shippers());
        let movers: BTreeSet<SessionId> = others.chain([mover]).collect();
        (bytes_per_s / movers.len() as u64).max(1)
    }
    pub fn live_movers(&mut self, now: Instant) -> u32 {
        self.movers.retain(|_, (at, _)| now.since(*at) <= MOVER_SILENT);
        self.movers.len() as u32
    }
    pub fn home_failure(&self, id: RelationId, now: Instant) -> String {
        let Some(queue) = self.queues.get(&id) else { return String::new() };
        let away = queue.back_off.as_ref().map(|b| b.why.clone());
        away.or_else(|| queue.listings.failure(now)).unwrap_or_default()
    }
    pub fn limited_by(&self, id: RelationId, now: Instant) -> String {
        if let Some(back_off) = self.queues.get(&id).and_then(|queue| queue.back_off.as_ref()) {
            let (why, left) = (&back_off.why, back_off.until.since(now).as_secs_f64());
            return match back_off.denied {
                true => format!("the mover may not use this home ({why}); tried again in {left:.1} s"),
                false => format!("home does not answer ({why}); asked again in {left:.1} s"),
            };
        }
        if self.queues.get(&id).is_some_and(|queue| queue.brings_back) {
            return "bytes that are at another home only are recalled first".to_owned();
        }
        if let Some(why) = self.queues.get(&id).and_then(|queue| queue.listings.failure(now)) {
            return why;
        }
        self.movers.values().map(|(_, why)| why).find(|why| !why.is_empty()).cloned().unwrap_or_default()
    }
}

impl ShipQueues {
    /// When a home that did not answer is retried.
    pub fn next_try(&self, now: Instant) -> Option<Instant> {
        let next = |queue: &ShipQueue| queue.back_off.as_ref().map(|b| b.until).filter(|until| *until > now);
        self.queues.values().filter_map(next).min()
    }
    /// Relations were added or removed.
    pub fn follow(&mut self, ids: &[RelationId]) {
        self.queues.retain(|id, _| ids.contains(id));
        for id in ids {
            self.queues.entry(*id).or_default().touch_all(); // an administrator may have decided a conflict
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::InodeId;
    use weir_relation::files::ExtentOut;

    #[test]
    fn movers_with_work_share_a_limit() {
        let (mut queues, id) = (ShipQueues::default(), RelationId(1));
        let (one, two) = (SessionId(1), SessionId(2));
        assert_eq!(queues.share(id, one, 100), 100);
        for (ino, session) in [(7, one), (8, one), (9, two)] {
            let range = ExtentOut { end: 5, mark: 1, finish: None };
            queues.queues.entry(id).or_default().files.assign_range(InodeId(ino), session, 0, range);
        }
        assert_eq!((queues.share(id, one, 100), queues.share(id, two, 100)), (50, 50));
        assert_eq!(queues.share(id, SessionId(3), 90), 30, "one that begins");
    }
}
