//! Takes work from the leader, and starts it: each item in a task that ends with the session.
//!
//! Invariant: work for a home that is slow to open delays no other home.
use super::assigned::{Assigned, Batch, reported};
use super::files::extent_done;
use super::relations::{Relation, Relations};
use super::session::Session;
use super::{HomeOf, HomeUse, WAIT, lock};
use crate::Fault;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use weir_proto::InodeId;
use weir_proto::relation::{
    Direction, ExtentDone, ExtentWork, ListDone, NameDone, Outcome as Reported, RelationId, RelationWork,
};

/// Bytes of ranges requested in one message. They are read part by part: this is not memory.
const ASKED_MAX: u64 = 512 << 20;

pub(super) struct Intake {
    session: Arc<Session>,
    relations: Arc<Relations>,
    assigned: Arc<Assigned>,
    /// Homes that are being opened, and the work that waits for it.
    opening: Arc<Mutex<BTreeMap<RelationId, Vec<RelationWork>>>>,
}

impl Intake {
    pub(super) fn new(relations: Arc<Relations>, assigned: Arc<Assigned>) -> Intake {
        Intake { session: assigned.session().clone(), relations, assigned, opening: Arc::default() }
    }

    /// Until an error: only the leader knows the work in a reply that was lost.
    pub(super) async fn run(&self) {
        let (mover, mut leader) = (self.session.client.mover(), 0);
        loop {
            let items = self.assigned.vacancies().await;
            match mover.lease_work(leader, ASKED_MAX, items, WAIT, &self.relations.limited_by()).await {
                Ok(taken) => {
                    leader = taken.leader;
                    taken.relations.into_iter().for_each(|work| self.begin(work));
                }
                Err(e) => {
                    tracing::debug!("no work: {e}");
                    return self.session.pause().await;
                }
            }
        }
    }

    /// Does not wait for homes that are slow to open.
    fn begin(&self, work: RelationWork) {
        self.assigned.add(items_of(&work));
        let mut opening = lock(&self.opening);
        if let Some(waiting) = opening.get_mut(&work.relation) {
            return waiting.push(work);
        }
        if let Some(relation) = self.relations.known(work.relation) {
            drop(opening);
            return start(&relation, work);
        }
        let (id, url, ids, by) = (work.relation, work.url.clone(), work.ids.clone(), work.by);
        let only_reads = work.direction == Direction::Mirror;
        let which = HomeOf { holds: HomeUse::Relation(id), url, ids, by, is_new: work.is_new, only_reads };
        opening.insert(id, vec![work]);
        let (relations, assigned, opening) =
            (self.relations.clone(), self.assigned.clone(), self.opening.clone());
        self.session.spawn("open home", async move {
            let opened = relations.open(id, &which).await;
            let waiting = lock(&opening).remove(&id).unwrap_or_default();
            for work in waiting {
                match &opened {
                    Ok(relation) => start(relation, work),
                    Err(fault) => refuse_all(&assigned, work, fault),
                }
            }
        });
    }
}

fn items_of(work: &RelationWork) -> usize {
    work.names.len() + work.extents.len() + work.orphans.len() + work.listings.len()
}

fn start(relation: &Arc<Relation>, work: RelationWork) {
    let session = &relation.session;
    for list in work.listings {
        let relation = relation.clone();
        session.spawn("read directory", async move { relation.list(list).await });
    }
    for ino in work.orphans {
        let relation = relation.clone();
        session.spawn("recover file", async move { relation.recover(ino).await });
    }
    if !work.names.is_empty() {
        let (relation, names) = (relation.clone(), work.names);
        session.spawn("names", async move { relation.change_names(names).await });
    }
    // All ranges of a file at once: one that arrived after the file's task had ended would be refused as
    // a foreign change.
    let mut by_file: BTreeMap<InodeId, VecDeque<ExtentWork>> = BTreeMap::new();
    for item in work.extents {
        by_file.entry(item.ino).or_default().push_back(item);
    }
    for (ino, items) in by_file {
        if relation.files.add(ino, items) {
            let relation = relation.clone();
            session.spawn("ship file", async move { relation.ship(ino).await });
        }
    }
}

/// Nothing of it is done: its home could not be opened.
fn refuse_all(assigned: &Arc<Assigned>, work: RelationWork, fault: &Fault) {
    let outcome = match fault {
        Fault::Denied(e) => Reported::Denied { why: e.to_string() },
        fault => reported(fault),
    };
    let names: Vec<NameDone> =
        work.names.iter().map(|n| NameDone { number: n.number, outcome: outcome.clone() }).collect();
    let extents: Vec<ExtentDone> = work.extents.iter().map(|e| extent_done(e, outcome.clone())).collect();
    let listings = work.listings.iter().map(|l| ListDone { dir: l.dir, outcome: outcome.clone() }).collect();
    let done = Batch { names, extents, orphans: work.orphans, listings };
    let to = assigned.clone();
    assigned.session().spawn("report", async move { to.report(work.relation, done).await });
}
