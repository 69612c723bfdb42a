//! The store on a disk: transactions in memory, a journal that makes them durable, and a tree that the
//! journal is folded into.
//!
//! On a full disk transactions are refused and reads continue. After a failed sync everything is refused.

pub use crate::config::EngineConfig;
use crate::core::Core;
use crate::journal::Until;
use crate::{CommitSeq, Kv, Read, Txn};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weir_env::{BoxFuture, Disk, Env, File, Instant, OpenMode};
use weir_proto::{Error, ErrorKind, Result};

/// While space is short, a segment that is not full is folded after this time, too.
const FOLD_SHORT_EVERY: Duration = Duration::from_secs(10);
/// How long an open waits for a previous process to release the directory.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(10);
/// For this long a tree that cannot be read is reopened repeatedly; then the store fails.
const REPAIR_PATIENCE: Duration = Duration::from_secs(30);
const REPAIR_PAUSE: Duration = Duration::from_millis(100);

/// A store in a directory. Dropping it is like a kill: call [`Kv::checkpoint`] first for a fast open next
/// time.
pub struct Engine {
    pub(crate) core: Arc<Core>,
}

impl Engine {
    /// Opens or makes the store in `dir`, and recovers every durable transaction.
    pub async fn open(env: &Env, dir: &Path, config: EngineConfig) -> Result<Arc<Engine>> {
        config.check()?;
        let lock = lock_directory(env, dir).await?;
        let (env_, dir) = (env.clone(), dir.to_path_buf());
        let core = env.tasks.blocking(move || Core::load(env_, dir, config, lock)).await?;
        let core = Arc::new(core);
        env.tasks.spawn("kv-fold", fold_always(core.clone()));
        core.wake_folder.notify_one();
        Ok(Arc::new(Engine { core }))
    }
}

impl Engine {
    /// Since when every change is refused because the disk is full; none: they are not.
    pub fn refuses_since(&self) -> Option<Instant> {
        self.core.refuses_since()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.core.closed.store(true, Ordering::Release);
        self.core.wake_folder.notify_one();
    }
}

impl Kv for Engine {
    fn transact(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        let seq = self.core.transact(None, body)?;
        self.core.journal.flush_soon();
        Ok(seq)
    }

    fn transact_more(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq> {
        self.core.transact(None, body)
    }

    fn flush_soon(&self) {
        self.core.journal.flush_soon();
    }

    fn flush_here(&self) -> bool {
        self.core.flush_here()
    }

    fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<CommitSeq> {
        self.core.journal.check()?;
        let state = self.core.state();
        let done = body(&*state);
        self.core.repair_if_lost(&state);
        done.map(|()| state.seq)
    }

    fn durable(&self) -> CommitSeq {
        self.core.journal.durable()
    }

    fn wait_durable(&self, seq: CommitSeq) -> BoxFuture<'static, Result<()>> {
        if seq > self.core.journal.durable() && seq > self.core.state().seq {
            return Box::pin(async move {
                Err(Error::invalid(format!("a caller waits for transaction {}, which was never made", seq.0)))
            });
        }
        let (core, term) = (self.core.clone(), self.core.term.load(Ordering::Acquire));
        let wait = core.journal.wait(Until::Durable, seq);
        Box::pin(async move {
            wait.await?;
            // A record of that number that became durable under another leader is a different one.
            if term.is_multiple_of(2) && core.term.load(Ordering::Acquire) == term {
                return Ok(());
            }
            Err(Error::stale(format!(
                "the copies of the store have another leader: the transaction {} may be lost",
                seq.0
            )))
        })
    }

    fn is_space_short(&self) -> bool {
        self.core.is_space_short()
    }

    fn checkpoint(&self) -> BoxFuture<'static, Result<()>> {
        let core = self.core.clone();
        Box::pin(async move {
            let worker = core.clone();
            let last = core.env.tasks.blocking(move || worker.seal_all()).await?;
            core.journal.wait(Until::Durable, last).await?;
            let worker = core.clone();
            core.env.tasks.blocking(move || worker.fold()).await.map(drop)
        })
    }
}

pub(crate) async fn lock_directory(env: &Env, dir: &Path) -> Result<Arc<dyn File>> {
    let doing = format!("lock the state directory {}", dir.display());
    let io = |e: std::io::Error| Error::from_io(&doing, &e);
    make_directory(&*env.disk, dir).map_err(io)?;
    let file = env.disk.open(&dir.join("lock"), OpenMode::WRITE).map_err(io)?;
    let until = env.clock.now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => return Err(io(e)),
            Err(_) if env.clock.now() >= until => {
                return Err(Error::unavailable(format!("{doing}: another process has it open")));
            }
            Err(_) => env.clock.sleep(LOCK_RETRY).await,
        }
    }
}

/// Durably, with its parents: a name is durable when its directory is synced.
fn make_directory(disk: &dyn Disk, dir: &Path) -> std::io::Result<()> {
    let named = dir.ancestors().skip(1).map(|d| if d.as_os_str().is_empty() { Path::new(".") } else { d });
    let mut parents = Vec::new();
    for parent in named {
        parents.push(parent);
        if disk.exists(parent) {
            break; // the process that made it has synced it
        }
    }
    disk.create_dir_all(dir)?;
    parents.into_iter().try_for_each(|parent| disk.sync_dir(parent))
}

/// Folds whenever a delta is sealed, keeps a segment ready, and reopens the tree when a read has failed.
async fn fold_always(core: Arc<Core>) {
    let mut lost_since = None;
    loop {
        let woken = core.wake_folder.notified();
        let rests = if core.is_space_short() {
            core.env.clock.timeout(FOLD_SHORT_EVERY, woken).await.is_err()
        } else {
            woken.await;
            false
        };
        if core.closed.load(Ordering::Acquire) {
            return;
        }
        let worker = core.clone();
        if let Err(error) = core.env.tasks.blocking(move || worker.repair()).await {
            let now = core.env.clock.now();
            if error.kind == ErrorKind::Damaged
                || now.since(*lost_since.get_or_insert(now)) >= REPAIR_PATIENCE
            {
                core.journal.fail(error);
                return;
            }
            tracing::warn!(%error, "the state tree cannot be read now");
            core.env.clock.sleep(REPAIR_PAUSE).await;
            core.wake_folder.notify_one();
            continue;
        }
        lost_since = None;
        let worker = core.clone();
        let done = core.env.tasks.blocking(move || {
            if rests {
                worker.seal_all()?; // removals make space when they are folded
            }
            // A fold frees the file for the next segment if the disk has none.
            let prepared = worker.prepare_next();
            let folded = worker.fold()?;
            if folded == 0 { prepared } else { worker.prepare_next() }
        });
        if let Err(error) = done.await {
            // Retried when the next segment is full; until then nothing is lost or refused.
            if let Some(more) = core.env.watch.line("not folded") {
                tracing::warn!("the journal cannot be folded now: {error}{more}");
            }
            if core.state().is_lost() {
                core.env.clock.sleep(REPAIR_PAUSE).await;
                core.wake_folder.notify_one();
            }
        }
    }
}
