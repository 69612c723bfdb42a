//! A node that keeps a copy of a namespace's journal: receives the leader's records, and the whole state if
//! it lacks more.
//!
//! Invariants: records that the copy acknowledges are on its disk; an epoch is on it, too, before any answer
//! under it. The promise that the copy knows no newer epoch binds it as [`Promise`] describes.
use super::decide::Promise;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Backoff, BoxFuture, Env};
use weir_kv::epochs::Epochs;
use weir_kv::{CommitSeq, Engine, EngineConfig, Entry, Import, Kv};
use weir_proto::copies::{
    EpochRun, JournalAppend, JournalAsk, JournalEpochs, JournalHeld, JournalKept, JournalRight,
    JournalTruncate, StateFetch, decode_pairs,
};
use weir_proto::{Epoch, Error, NamespaceId, Request, Result};
use weir_rpc::{Call, Connection, Handled, Reply};

/// The leader reads a part of its state from its disk.
const FETCH_PATIENCE: Duration = Duration::from_secs(30);

/// Pauses after a fetch that failed: a disk that is full does not get space in a moment.
const FETCH_AGAIN: Backoff = Backoff { first: Duration::from_millis(200), max: Duration::from_secs(10) };

/// More records than this are applied by a thread of their own: they take longer than a thread switch.
const RECORDS_HERE_MAX: usize = 64;

/// A follower's copy of the journal.
#[derive(Clone)]
pub struct Follower(Arc<Inner>);

struct Inner {
    env: Env,
    dir: PathBuf,
    config: EngineConfig,
    namespace: NamespaceId,
    copy: Mutex<Copy>,
}

struct Copy {
    /// None: the whole state has to be fetched, or is being fetched.
    engine: Option<Arc<Engine>>,
    fetching: bool,
    /// In succession.
    failed_fetches: u32,
    promise: Promise,
    /// The leader's epoch, and how many of its requests were answered under it.
    followed: (Epoch, u64),
}

impl Follower {
    /// Opens the copy in `dir`, or creates an empty one.
    pub async fn open(
        env: &Env,
        dir: &Path,
        config: EngineConfig,
        namespace: NamespaceId,
    ) -> Result<Follower> {
        let engine = match weir_kv::is_unfinished(env, dir)? {
            true => None,
            false => Some(Engine::open(env, dir, config).await?),
        };
        let promise = Promise::at_start(env.clock.now());
        let followed = (Epoch(0), 0);
        let copy = Mutex::new(Copy { engine, fetching: false, failed_fetches: 0, promise, followed });
        let (env, dir) = (env.clone(), dir.to_path_buf());
        Ok(Follower(Arc::new(Inner { env, dir, config, namespace, copy })))
    }

    /// The copy whose store is open already: one that was never replicated, and leads.
    pub fn of(
        env: &Env,
        dir: &Path,
        config: EngineConfig,
        namespace: NamespaceId,
        engine: Arc<Engine>,
    ) -> Follower {
        // It never was a follower, in any run: it has promised nothing.
        let (promise, followed) = (Promise::default(), (Epoch(0), 0));
        let copy = Copy { engine: Some(engine), fetching: false, failed_fetches: 0, promise, followed };
        let (env, dir) = (env.clone(), dir.to_path_buf());
        Follower(Arc::new(Inner { env, dir, config, namespace, copy: Mutex::new(copy) }))
    }

    /// Of which namespace it is a copy.
    pub fn namespace(&self) -> NamespaceId {
        self.0.namespace
    }

    /// The number of changes on its disk; 0 if its state is not complete.
    pub fn changes(&self) -> u64 {
        self.0.copy().engine.as_ref().map_or(0, |engine| engine.epochs().last().min(engine.synced()).0)
    }

    /// The store, for this node as the leader from now on. None: the state is not complete.
    pub fn engine(&self) -> Option<Arc<Engine>> {
        self.0.copy().engine.clone()
    }

    /// Its promises to leaders until now.
    pub fn promise(&self) -> Promise {
        self.0.copy().promise
    }

    /// The epoch of the leader that it follows, and how many of its requests were answered.
    pub fn followed(&self) -> (Epoch, u64) {
        self.0.copy().followed
    }

    /// Answers a leader's requests. None: it is another request.
    pub fn handle(&self, call: Call) -> Option<Handled> {
        let inner = self.0.clone();
        let answer: BoxFuture<'static, Result<Reply>> = match call.method {
            JournalAsk::METHOD => Box::pin(async move { inner.ask(&call.decode()?).await }),
            JournalTruncate::METHOD => {
                Box::pin(async move { inner.truncate_to(&call.decode()?, call.connection).await })
            }
            JournalAppend::METHOD => return Some(inner.append(call)),
            JournalRight::METHOD => Box::pin(async move { inner.right(&call.decode()?) }),
            _ => return None,
        };
        Some(Handled::Later(answer))
    }
}

impl Inner {
    fn copy(&self) -> MutexGuard<'_, Copy> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engine(&self, namespace: NamespaceId) -> Result<Arc<Engine>> {
        if namespace != self.namespace {
            return Err(Error::invalid(format!(
                "this node keeps a copy of {}, not of {namespace}",
                self.namespace
            )));
        }
        let engine = self.copy().engine.clone();
        engine.ok_or_else(|| Error::unavailable("the whole state is being fetched from the leader"))
    }

    async fn ask(&self, asked: &JournalAsk) -> Result<Reply> {
        let engine = match self.engine(asked.namespace) {
            Ok(engine) => engine,
            // It reports to the leader that it has nothing, so that it gets the request to fetch.
            Err(_) if asked.namespace == self.namespace && !self.copy().fetching => {
                let epochs = to_wire(&Epochs::default());
                return Ok(Reply::new(&JournalHeld { epochs, durable: 0 }));
            }
            Err(e) => return Err(e),
        };
        engine.follow(asked.epoch).await?;
        let held = JournalHeld { epochs: to_wire(&engine.epochs()), durable: engine.durable().0 };
        Ok(Reply::new(&held))
    }

    async fn truncate_to(self: &Arc<Self>, asked: &JournalTruncate, leader: Connection) -> Result<Reply> {
        match (self.engine(asked.namespace), asked.to) {
            (Ok(engine), Some(to)) => {
                engine.truncate_to(asked.epoch, CommitSeq(to)).await?;
                return Ok(Reply::new(&()));
            }
            (Ok(engine), None) => engine.follow(asked.epoch).await?,
            (Err(e), _) if asked.namespace != self.namespace => return Err(e),
            (Err(_), _) => {}
        }
        if !std::mem::replace(&mut self.copy().fetching, true) {
            let (inner, epoch) = (self.clone(), asked.epoch);
            self.env.tasks.spawn("journal-fetch", async move {
                let fetched = inner.fetch(epoch, &leader).await;
                let failures = match &fetched {
                    Ok(()) => 0,
                    Err(_) => inner.copy().failed_fetches + 1,
                };
                inner.copy().failed_fetches = failures;
                if let Err(error) = &fetched {
                    if let Some(more) = inner.env.watch.line("state not fetched") {
                        tracing::warn!("the state of the namespace cannot be fetched now: {error}{more}");
                    }
                    // The leader asks for it many times a second.
                    let pause = FETCH_AGAIN.pause(failures - 1, inner.env.rng.below(1 << 16));
                    inner.env.clock.sleep(pause).await;
                }
                inner.copy().fetching = false;
            });
        }
        if asked.to.is_some() {
            return Err(Error::unavailable("the whole state is being fetched from the leader"));
        }
        Ok(Reply::new(&()))
    }

    /// Replaces the copy by the leader's folded state.
    async fn fetch(&self, epoch: Epoch, leader: &Connection) -> Result<()> {
        let namespace = self.namespace;
        let mut wanted = StateFetch { namespace, epoch, export: 0, after: None };
        let (part, mut payload) = leader.call(&wanted, vec![], FETCH_PATIENCE).await?;
        self.copy().engine = None;
        let at = (CommitSeq(part.seq), part.epoch);
        let mut import = Import::begin(&self.env, &self.dir, self.config, epoch, at).await?;
        wanted.export = part.export;
        loop {
            let pairs = decode_pairs(&payload)?;
            let Some((key, _)) = pairs.last() else { break };
            wanted.after = Some(key.clone().into());
            import.put(pairs).await?;
            let (next, entries) = leader.call(&wanted, vec![], FETCH_PATIENCE).await?;
            if (next.export, next.seq) != (part.export, part.seq) {
                return Err(Error::invalid("the leader sends parts of another state"));
            }
            payload = entries;
        }
        import.finish().await?;
        let engine = Engine::open(&self.env, &self.dir, self.config).await?;
        self.copy().engine = Some(engine);
        Ok(())
    }

    /// On this thread if the disk is quick: three thread switches less before the leader has its answer.
    fn append(self: Arc<Self>, call: Call) -> Handled {
        let begun = || {
            let append: JournalAppend = call.decode()?;
            let engine = self.engine(append.namespace)?;
            let entries = entries(&append, &call.payload)?;
            Ok((append, engine, entries))
        };
        let (append, engine, entries) = match begun() {
            Ok(begun) => begun,
            Err(e) => return Handled::Now(Err(e)),
        };
        let (epoch, durable) = (append.epoch, CommitSeq(append.durable));
        let worker = engine.clone();
        let applied = move || {
            worker.note_durable(epoch, durable)?; // first: then older records can be freed
            worker.apply_and_sync(epoch, &entries)
        };
        let few = append.records.len() <= RECORDS_HERE_MAX;
        if let Some(_here) = few.then(|| engine.sync_here()).flatten() {
            return Handled::Now(applied().and_then(|kept| self.kept(&engine, epoch, kept)));
        }
        Handled::Later(Box::pin(async move {
            let kept = self.env.tasks.blocking(applied).await?;
            self.kept(&engine, epoch, kept)
        }))
    }

    fn right(&self, asked: &JournalRight) -> Result<Reply> {
        let engine = self.engine(asked.namespace)?;
        let kept = engine.epochs().last().min(engine.synced());
        self.kept(&engine, asked.epoch, kept)
    }

    /// The copy's promise, which binds it.
    fn kept(&self, engine: &Engine, epoch: Epoch, kept: CommitSeq) -> Result<Reply> {
        let mut copy = self.copy();
        let known = engine.epoch();
        if known != epoch {
            return Err(Error::stale(format!("the leader of {epoch} asks, and {known} is known")));
        }
        copy.promise.renew(self.env.clock.now());
        let (followed, requests) = copy.followed;
        copy.followed = (epoch, if followed == epoch { requests + 1 } else { 1 });
        Ok(Reply::new(&JournalKept { kept: kept.0 }))
    }
}

fn entries(append: &JournalAppend, payload: &bytes::Bytes) -> Result<Vec<Entry>> {
    let records = append.split(payload)?.into_iter();
    Ok(records.map(|(seq, epoch, body)| Entry { seq: CommitSeq(seq), epoch, body }).collect())
}

fn to_wire(epochs: &Epochs) -> JournalEpochs {
    let runs = epochs.runs().iter().map(|run| EpochRun { epoch: run.epoch, last: run.last.0 }).collect();
    JournalEpochs { start: epochs.start().0, start_epoch: epochs.start_epoch(), runs }
}
