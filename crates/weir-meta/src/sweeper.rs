//! Deleted files' cells go from the targets: every target is told until all have answered.
//!
//! Invariant: a file's garbage record goes only after every target has dropped the file's cells. To tell a target twice
//! does no harm.

use crate::executor::Leader;
use crate::keys;
use crate::record::{Garbage, Record};
use std::sync::Arc;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_kv::Scan;
use weir_proto::{Error, FileId, InodeId, Result};

/// Files swept in one go.
const BATCH_FILES: usize = 256;
/// Files under way at once.
const PARALLEL_FILES: usize = 8;
/// After a target did not answer.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// Reaches all targets.
pub trait Purge: Send + Sync + 'static {
    /// Drops all cells of a file on every target, and has writes below token epoch `fence` refused. An error: some
    /// target has not answered, tell it again.
    fn drop_file(&self, file: FileId, fence: u32) -> BoxFuture<'static, Result<()>>;
}

/// For a namespace without targets: there is nothing to drop.
pub struct NoTargets;

impl Purge for NoTargets {
    fn drop_file(&self, _: FileId, _: u32) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

struct Item {
    key: Vec<u8>,
    ino: InodeId,
    garbage: Garbage,
}

/// Sweeps for ever; returns only the error after which the node must stop.
pub(crate) async fn run(leader: Arc<Leader>) -> Error {
    loop {
        match sweep(&leader).await {
            Ok(Swept::Nothing) => leader.garbage.notified().await,
            Ok(Swept::All) => {}
            Ok(Swept::Some(e)) => {
                tracing::debug!("the sweep of deleted files goes on in {RETRY_AFTER:?}: {e}");
                leader.env.clock.sleep(RETRY_AFTER).await;
            }
            Err(e) => return e.doing("sweep deleted files"),
        }
    }
}

enum Swept {
    Nothing,
    All,
    /// A target did not answer.
    Some(Error),
}

async fn sweep(leader: &Arc<Leader>) -> Result<Swept> {
    let items = oldest(leader)?;
    if items.is_empty() {
        return Ok(Swept::Nothing);
    }
    // The files' names must be gone for good before their data goes.
    let newest = leader.lock().newest;
    leader.durable(newest).await?;
    let (mut done, mut failure) = (Vec::new(), None);
    for group in items.chunks(PARALLEL_FILES) {
        let mut waits = Vec::new();
        for item in group {
            let file = FileId { volume: leader.config.volume, inode: item.ino };
            waits.push(spawn_drop(leader, file, item.garbage.token_epoch.saturating_add(1)));
        }
        for (item, wait) in group.iter().zip(waits) {
            match wait.await {
                Ok(Ok(())) => done.push(item.key.as_slice()),
                Ok(Err(e)) => failure = Some(e),
                Err(_) => failure = Some(Error::unavailable("the drop of a file was abandoned")),
            }
        }
        if failure.is_some() {
            break;
        }
    }
    leader.kv.transact(&mut |txn| {
        done.iter().for_each(|key| txn.delete(key));
        Ok(())
    })?;
    Ok(failure.map_or(Swept::All, Swept::Some))
}

fn spawn_drop(leader: &Arc<Leader>, file: FileId, fence: u32) -> tokio::sync::oneshot::Receiver<Result<()>> {
    let (tx, rx) = tokio::sync::oneshot::channel();
    let drop_file = leader.config.purge.drop_file(file, fence);
    leader.env.tasks.spawn("drop file", async move {
        let _ = tx.send(drop_file.await); // the sweeper was ended
    });
    rx
}

fn oldest(leader: &Leader) -> Result<Vec<Item>> {
    let (mut items, mut bad) = (Vec::new(), None);
    let (start, end) = keys::range_of_letter(b'G');
    leader.kv.read(&mut |read| {
        read.scan(&start, &end, &mut |key, value| {
            match (keys::garbage_ino(key), Garbage::from_value(value, || "a deleted file".to_owned())) {
                (Some(ino), Ok(garbage)) => items.push(Item { key: key.to_vec(), ino, garbage }),
                (_, Err(e)) => bad = Some(e),
                (None, _) => bad = Some(Error::damaged("a deleted file's key is damaged")),
            }
            if items.len() < BATCH_FILES && bad.is_none() { Scan::More } else { Scan::Stop }
        })
    })?;
    bad.map_or(Ok(items), Err)
}
