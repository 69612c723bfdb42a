//! The right to lead, where several coordinators share a store: one key under a lease.
//!
//! Invariants: this coordinator leads only during its term, which ends no later than its lease in the store;
//! the store accepts no write of a coordinator whose key is gone (see [`Store::claim`]), regardless of that
//! coordinator's clock. Knows nothing of a leader's work.
use crate::store::{LeaseId, Revision, Store, Swap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_env::{Env, Instant, TaskHandle, watch};
use weir_proto::{Error, ErrorKind, Result};

/// The key of the leading coordinator in the store.
pub const LEADER_KEY: &str = "leader";
/// When the leader is silent for this long another coordinator takes over. Longer than an election of etcd (1
/// to 2 s): the leader stays when a member of etcd dies.
pub const LEASE: Duration = Duration::from_secs(3);
/// Short enough that an election of etcd right after a renewal ends before the term does.
const KEEP_PAUSE: Duration = Duration::from_millis(500);
/// Pause after a failure.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Deadline for releasing the lease: it must not delay the end of the process.
const END_PATIENCE: Duration = Duration::from_millis(400);

/// This coordinator's own view of the time for which it leads. Cheap to clone.
#[derive(Clone)]
pub struct Term(watch::Receiver<State>);

struct State {
    ends: Instant,
    /// Why it has ended early.
    over: Option<Error>,
}

impl std::fmt::Debug for Term {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Term")
    }
}

impl Term {
    /// Refused once the term is over: this coordinator's state may be outdated then.
    pub fn check(&self, now: Instant) -> Result<()> {
        let state = self.0.borrow();
        match &state.over {
            Some(e) => Err(e.clone()),
            None if now >= state.ends => Err(silent()),
            None => Ok(()),
        }
    }

    /// Waits for its end; returns why it ended.
    pub async fn over(&self) -> Error {
        let mut state = self.0.clone();
        match state.wait_for(|state| state.over.is_some()).await {
            Ok(state) => state.over.clone().unwrap_or_else(silent),
            Err(_) => silent(),
        }
    }
}

/// Held while this coordinator leads.
pub struct CoordinatorLead {
    env: Env,
    store: Arc<dyn Store>,
    lease: LeaseId,
    renewal: Mutex<Option<TaskHandle>>,
    term: Term,
}

/// Waits until this coordinator leads. `name`: its name for others. `waits`: called with the leader's name
/// whenever another coordinator leads.
pub async fn lead(
    env: &Env,
    store: Arc<dyn Store>,
    name: &str,
    waits: impl Fn(&str),
) -> Result<CoordinatorLead> {
    let mut last = None;
    loop {
        match try_to_lead(env, &store, name, &waits).await {
            Ok(Some(lead)) => return Ok(lead),
            Ok(None) => last = None,
            Err(e) if is_passing(&e) => {
                if last.as_ref() != Some(&e) {
                    tracing::warn!("this coordinator cannot lead yet: {e}");
                }
                last = Some(e);
                env.clock.sleep(RETRY_PAUSE).await;
            }
            Err(e) => return Err(e.doing("take the lead of the coordinators")),
        }
    }
}

/// Whether the store may only be unavailable for a while.
fn is_passing(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Stale | ErrorKind::NotFound)
}

/// `None`: another one leads, or has led until now.
async fn try_to_lead(
    env: &Env,
    store: &Arc<dyn Store>,
    name: &str,
    waits: &impl Fn(&str),
) -> Result<Option<CoordinatorLead>> {
    if let Some(other) = store.get(LEADER_KEY).await? {
        waits(&String::from_utf8_lossy(&other.value));
        store.watch(LEADER_KEY, other.revision).await?;
        return Ok(None);
    }
    let ends = env.clock.now() + LEASE;
    let lease = store.grant_lease(LEASE).await?;
    match store.claim(LEADER_KEY, name.as_bytes().to_vec(), lease).await? {
        Swap::Done(Revision(_)) => {}
        Swap::Conflict(_) => {
            // Otherwise it expires.
            let _ = env.clock.timeout(END_PATIENCE, store.end_lease(lease)).await;
            return Ok(None);
        }
    }
    let (state, term) = watch::channel(State { ends, over: None });
    let renewal = keep(env.clone(), store.clone(), lease, state);
    let renewal = Mutex::new(Some(env.tasks.spawn("keep the coordinator's lease", renewal)));
    let lead = CoordinatorLead { env: env.clone(), store: store.clone(), lease, renewal, term: Term(term) };
    lead.term.check(env.clock.now())?;
    Ok(Some(lead))
}

/// Keeps the lease until the term ends.
async fn keep(env: Env, store: Arc<dyn Store>, lease: LeaseId, state: watch::Sender<State>) {
    loop {
        let (asked, ends) = (env.clock.now(), state.borrow().ends);
        // Counted from before the request: the store counts from its arrival.
        let kept = env.clock.timeout(ends.since(asked), store.keep_lease(lease)).await;
        let now = env.clock.now();
        let over = match kept {
            _ if now >= ends => Some(silent()),
            Ok(Ok(())) => {
                state.send_modify(|state| state.ends = asked + LEASE);
                env.clock.sleep(KEEP_PAUSE).await;
                None
            }
            Ok(Err(e)) if e.kind == ErrorKind::NotFound => {
                Some(Error::stale("this coordinator's lease has ended: another one may lead now"))
            }
            Ok(Err(e)) => {
                tracing::debug!("keep the coordinator's lease: {e}");
                env.clock.sleep(RETRY_PAUSE).await;
                None
            }
            Err(_) => Some(silent()),
        };
        if over.is_some() {
            state.send_modify(|state| state.over = over);
            return;
        }
    }
}

fn silent() -> Error {
    let seconds = LEASE.as_secs();
    Error::stale(format!(
        "the store has not confirmed this coordinator's lease for {seconds} s: another one may lead now"
    ))
    .hint("check etcd (`etcdctl endpoint health`), then start this coordinator again")
}

impl CoordinatorLead {
    pub fn term(&self) -> Term {
        self.term.clone()
    }

    /// Before an orderly end: another coordinator may lead at once.
    pub async fn resign(&self) {
        let renewal = self.renewal.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(renewal) = renewal {
            renewal.abort();
        }
        match self.env.clock.timeout(END_PATIENCE, self.store.end_lease(self.lease)).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::info!("the lead ends with its lease: {e}"),
            Err(_) => tracing::info!("the lead ends with its lease: the store does not answer"),
        }
    }
}

impl Drop for CoordinatorLead {
    fn drop(&mut self) {
        let renewal = self.renewal.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(renewal) = renewal {
            renewal.abort();
        }
    }
}
