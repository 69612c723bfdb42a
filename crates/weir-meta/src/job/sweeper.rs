//! Drops cells of deleted files, and evicted ones, from the targets: live ones get the request, and pass the
//! truncation record to the others when these return.
//!
//! Invariant: a garbage record is removed only after every live target of the file's groups has dropped the
//! cells and has a truncation record. A repeated request does no harm.

use crate::crash_points;
use crate::keys;
use crate::keys::Letter;
use crate::leader::Leader;
use crate::record::Garbage;
use crate::tables;
use std::sync::Arc;
use std::time::Duration;
use weir_kv::Scan;
use weir_proto::{Error, FileId, InodeId, Result};

/// Files swept in one batch.
const BATCH_FILES: usize = 256;
/// Files swept in parallel.
const PARALLEL_FILES: usize = 8;
/// After a target did not answer.
const RETRY_AFTER: Duration = Duration::from_secs(2);

struct Item {
    key: Vec<u8>,
    ino: InodeId,
    garbage: Garbage,
}

/// Sweeps for ever; returns only the error after which the node must stop.
pub(crate) async fn run(leader: Arc<Leader>) -> Error {
    loop {
        match sweep(&leader).await {
            Ok(Swept::Nothing) => leader.bells.garbage.notified().await,
            Ok(Swept::All) => {}
            Ok(Swept::Some(e)) => {
                tracing::debug!("the sweep of deleted files continues in {RETRY_AFTER:?}: {e}");
                leader.base.env.clock.sleep(RETRY_AFTER).await;
            }
            Err(e) => {
                if let Err(e) = leader.base.retry_job(e, "sweep deleted files").await {
                    return e;
                }
            }
        }
    }
}

enum Swept {
    Nothing,
    All,
    /// A target did not answer.
    Some(Error),
}

/// One pass over all deleted files: those that cannot be swept now do not delay the others.
async fn sweep(leader: &Arc<Leader>) -> Result<Swept> {
    let (mut after, mut found, mut failure) = (None, false, None);
    loop {
        let items = oldest(leader, after.take())?;
        let Some(last) = items.last() else { break };
        found = true;
        after = Some(last.key.clone());
        // The removal of the files' names must be durable before their data is dropped.
        let newest = leader.base.commits.newest(&leader.base.lock());
        leader.base.commits.durable(newest).await?;
        for some in items.chunks(PARALLEL_FILES) {
            failure = sweep_some(leader, some).await?.or(failure);
        }
    }
    Ok(match failure {
        Some(e) => Swept::Some(e),
        None if found => Swept::All,
        None => Swept::Nothing,
    })
}

/// Sweeps a few files in parallel; returns the last error of a target, if any.
async fn sweep_some(leader: &Arc<Leader>, items: &[Item]) -> Result<Option<Error>> {
    let waits: Vec<_> = items.iter().map(|item| spawn_drop(leader, item)).collect();
    let (mut done, mut failure) = (Vec::new(), None);
    for (item, wait) in items.iter().zip(waits) {
        match wait.await {
            Ok(Ok(())) => done.push(item.key.as_slice()),
            Ok(Err(e)) => failure = Some(e),
            Err(_) => failure = Some(Error::unavailable("the drop of a file was abandoned")),
        }
    }
    leader.base.env.tasks.crash_point(crash_points::SWEPT);
    leader.base.commits.transact_unshown(&mut |txn| {
        done.iter().for_each(|key| txn.delete(key));
        Ok(())
    })?;
    Ok(failure)
}

fn spawn_drop(leader: &Arc<Leader>, item: &Item) -> tokio::sync::oneshot::Receiver<Result<()>> {
    let (tx, rx) = tokio::sync::oneshot::channel();
    let file = FileId { namespace: leader.base.config.namespace, inode: item.ino };
    let Garbage { first_pg, pg_count, truncation } = item.garbage;
    let drop_stripes = leader.base.config.purge.drop_stripes(file, first_pg, pg_count, truncation);
    let leader_too = leader.clone();
    leader.base.env.tasks.spawn("drop file", async move {
        let dropped = drop_stripes.await;
        leader_too.base.note_written_under((leader_too.base.config.map_version)());
        let _ = tx.send(dropped); // the sweeper was ended
    });
    rx
}

/// The first deleted files after a key.
fn oldest(leader: &Leader, after: Option<Vec<u8>>) -> Result<Vec<Item>> {
    let (mut items, mut bad) = (Vec::new(), None);
    let (first, end) = keys::range_of_letter(Letter::Garbage);
    let mut start = first.to_vec();
    if let Some(mut key) = after {
        key.push(0); // the least key above
        start = key;
    }
    leader.base.read(&mut |read| {
        read.scan(&start, &end, &mut |key, value| {
            match tables::GARBAGE.entry(key, value) {
                Ok(((_, ino), garbage)) => items.push(Item { key: key.to_vec(), ino, garbage }),
                Err(e) => bad = Some(e),
            }
            if items.len() < BATCH_FILES && bad.is_none() { Scan::More } else { Scan::Stop }
        })
    })?;
    bad.map_or(Ok(items), Err)
}
