//! Ingests changes of volumes into the queues of their relations, and searches for files whose writer died.
use crate::leader::{Leader, NO_SESSION};
use crate::namespace::find_inode;
use crate::relation::{changelog, ingest, store};
use crate::tables;
use std::sync::Arc;
use weir_proto::meta::Time;
use weir_proto::relation::RelationId;
use weir_proto::{Error, InodeId, Result};
use weir_relation::orphans::SCAN_MAX;

/// Ingests changes for ever; returns only the error after which the node must stop.
pub async fn run(leader: Arc<Leader>) -> Error {
    loop {
        match pass(&leader) {
            Ok(true) => tokio::task::yield_now().await,
            Ok(false) => leader.relations.changed.notified().await,
            Err(e) => {
                if let Err(e) = leader.base.retry_job(e, "take changes over").await {
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
    let now = Time { nanos: leader.base.env.clock.wall().0 };
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
    leader.base.commits.transact_unshown(&mut |txn| {
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
    leader.base.commits.transact_unshown(&mut |txn| {
        left = ingest::take(txn, id, queue)?;
        Ok(())
    })?;
    let mut more = left || seen;
    drop(queues);
    more |= scan_orphans(leader, id)?;
    if let Some(volume) = volume {
        leader.base.commits.transact_unshown(&mut |txn| {
            left = changelog::forget(txn, volume)?;
            Ok(())
        })?;
        more |= left;
    }
    Ok(more)
}

/// A step of a relation's removal; returns whether there is more; none: it is not being removed.
fn remove_some(leader: &Arc<Leader>, id: RelationId) -> Result<Option<bool>> {
    let mut left = None;
    leader.base.commits.transact_unshown(&mut |txn| {
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

/// Scans some files that were written and are not known to be complete; returns whether there is more.
fn scan_orphans(leader: &Arc<Leader>, relation: RelationId) -> Result<bool> {
    if leader.base.lock().grace.until.is_some() {
        return Ok(false); // a writer returns, or its session ends
    }
    let (from, new) = match leader.relations.lock().queues.get_mut(&relation) {
        Some(queue) if queue.orphans.is_due() => (queue.orphans.begin_scan(), queue.orphans.take_new()),
        _ => return Ok(false),
    };
    let (mut found, mut next) = (Vec::new(), None);
    {
        let (mut state, mut left) = (leader.base.lock(), Vec::new());
        leader.base.read(&mut |read| {
            (found, left, next) = (Vec::new(), Vec::new(), None);
            let mut files = Vec::new();
            if let Some(from) = from {
                let next = tables::GROWING.from(relation, (relation, from));
                files = next.collect(read, SCAN_MAX, |(_, ino), _| ino)?;
            }
            if files.len() == SCAN_MAX {
                next = files.last().map(|ino| InodeId(ino.0 + 1));
            }
            for ino in files.into_iter().chain(new.iter().copied()) {
                let Some(inode) = find_inode(read, ino)? else { continue };
                if leader.tx.must_recover(&state, ino, &inode) {
                    found.push(ino);
                } else if !state.leases.is_open_for_writing(ino) && store::is_growing(read, relation, ino)? {
                    left.push(ino);
                }
            }
            Ok(())
        })?;
        if !left.is_empty() {
            leader.tx.housekeep(&mut state, NO_SESSION, &mut |cx| {
                left.iter().try_for_each(|ino| cx.log_complete(*ino))
            })?;
        }
    }
    let mut queues = leader.relations.lock();
    let Some(queue) = queues.queues.get_mut(&relation) else { return Ok(false) };
    queue.orphans.end_scan(from, found, next);
    Ok(queue.orphans.is_due())
}
