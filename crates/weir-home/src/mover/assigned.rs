//! The work that the leader has assigned to this mover: how many items it has, and the reports about finished
//! ones.
//!
//! Invariant: an item counts from the reply that assigned it to the report about it. If a report is lost, the
//! item stays assigned to this mover, so the session ends then.
use super::session::Session;
use crate::Fault;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::{Notify, mpsc};
use weir_proto::InodeId;
use weir_proto::relation::{ExtentDone, ListDone, NameDone, Outcome as Reported, RelationId};
use weir_watch::Gauge;

/// Ranges and names that this mover holds at most: a distant home needs many small files in flight.
const ITEMS_MAX: usize = 2048;
/// Limit on those requested or reported in one message.
const REPORTED_MAX: usize = 256;

pub(super) struct Assigned {
    session: Arc<Session>,
    items: AtomicUsize,
    /// For administrators.
    items_shown: Gauge,
    less: Notify,
}

/// The result of one item of work.
pub(super) enum Done {
    Name(NameDone),
    Extent(ExtentDone),
    Orphan(InodeId),
    List(ListDone),
}

/// Results of one report.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) names: Vec<NameDone>,
    pub(super) extents: Vec<ExtentDone>,
    pub(super) orphans: Vec<InodeId>,
    pub(super) listings: Vec<ListDone>,
}

impl Batch {
    fn add(&mut self, done: Done) {
        match done {
            Done::Name(done) => self.names.push(done),
            Done::Extent(done) => self.extents.push(done),
            Done::Orphan(ino) => self.orphans.push(ino),
            Done::List(done) => self.listings.push(done),
        }
    }
    fn count(&self) -> usize {
        self.names.len() + self.extents.len() + self.orphans.len() + self.listings.len()
    }
}

impl Assigned {
    pub(super) fn new(session: Arc<Session>) -> Assigned {
        let items_shown = session.env.watch.gauge("weir_mover_items", ("", ""));
        Assigned { session, items: AtomicUsize::new(0), items_shown, less: Notify::new() }
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// How many items to ask for, as soon as there is room for one.
    pub(super) async fn vacancies(&self) -> u32 {
        loop {
            let less = self.less.notified();
            let in_flight = self.items.load(Relaxed);
            if in_flight < ITEMS_MAX {
                return (ITEMS_MAX - in_flight).min(REPORTED_MAX) as u32;
            }
            less.await;
        }
    }

    pub(super) fn add(&self, count: usize) {
        self.show(self.items.fetch_add(count, Relaxed) + count);
    }

    fn end(&self, count: usize) {
        let before = self.items.fetch_sub(count, Relaxed);
        assert!(before >= count, "more work was reported than this mover had");
        self.show(before - count);
        self.less.notify_one();
    }

    fn show(&self, count: usize) {
        self.items_shown.set(count as i64); // at most ITEMS_MAX, and what one reply has
    }

    /// Reports finished work of a relation to the leader: everything that is ready in one message.
    pub(super) async fn report_each(&self, relation: RelationId, mut done: mpsc::UnboundedReceiver<Done>) {
        let mut ready = Vec::new();
        while done.recv_many(&mut ready, REPORTED_MAX).await > 0 {
            let (mut batch, count) = (Batch::default(), ready.len());
            ready.drain(..).for_each(|done| batch.add(done));
            assert_eq!(batch.count(), count, "a result is in no report: its work would stay assigned");
            self.report(relation, batch).await;
        }
    }

    pub(super) async fn report(&self, relation: RelationId, done: Batch) {
        let count = done.count();
        let Batch { names, extents, orphans, listings } = done;
        match self.session.client.mover().complete_work(relation, names, extents, orphans, listings).await {
            Ok(()) => self.end(count),
            Err(e) => {
                tracing::debug!("the leader was not notified: {e}");
                self.session.end();
            }
        }
    }
}

/// A fault in the form reported to the leader.
pub(super) fn reported(fault: &Fault) -> Reported {
    let why = fault.to_string();
    match fault {
        Fault::Diverged(_) => Reported::Diverged { why },
        Fault::Unreachable(_) | Fault::Full(_) | Fault::Denied(_) => Reported::Later { why },
        Fault::Broken(_) => Reported::Refused { why },
    }
}
