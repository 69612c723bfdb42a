//! The threads of one home: a home that hangs blocks only its own threads.
//!
//! Invariants: a call ends by its deadline; a call that was still waiting for a thread then is never started;
//! a call that hung in the kernel may still take effect when home continues, so until it has ended no other
//! call is started on its paths. Calls and memory are bounded regardless of home's behaviour.
//!
//! Refuses to know: the purpose of the calls.
use crate::{Fault, HomePath, Outcome};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use weir_env::{Actor, Clock, Env, Lane};
use weir_proto::Error;
use weir_watch::{Histogram, Object, Reason, WaitGuard, WaitRecord, Watch};

/// Limits for a home that is slow or hangs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneLimits {
    /// Calls at home in parallel. An NFS server needs several in flight; when home hangs, this number of
    /// threads hangs.
    pub threads_max: usize,
    /// Calls that wait for a thread. Further ones are refused at once.
    pub waiting_max: usize,
    /// Every call ends after this long.
    pub deadline: Duration,
}

impl Default for LaneLimits {
    fn default() -> LaneLimits {
        // 16 writers saturate one NVMe (measured for targets); an NFS mount takes 16 to 64 requests at a
        // time.
        LaneLimits { threads_max: 16, waiting_max: 256, deadline: Duration::from_secs(60) }
    }
}

/// Runs a home's blocking calls. Cheap to clone.
#[derive(Clone)]
pub struct HomeLane {
    /// For messages: the home's URL.
    home: Arc<str>,
    clock: Clock,
    watch: Watch,
    seconds: Histogram,
    lane: Lane,
    limits: LaneLimits,
    admitted: Arc<Semaphore>,
    hung: Arc<Hung>,
    /// The user that makes the calls; absent: the process's.
    actor: Option<Arc<Actor>>,
}

/// Calls that were given up by their callers and have not ended.
#[derive(Default)]
struct Hung(Mutex<Vec<Hanging>>);

struct Hanging {
    call: Arc<Call>,
    paths: Vec<HomePath>,
    /// It stays in the list of waits, from which an administrator learns that home hangs.
    _wait: Option<WaitGuard>,
}

impl Hung {
    fn lock(&self) -> MutexGuard<'_, Vec<Hanging>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn first_over(&self, paths: &[HomePath]) -> Option<HomePath> {
        let list = self.lock();
        let mut hung = list.iter().flat_map(|hanging| &hanging.paths);
        hung.find(|hung| paths.iter().any(|path| path.overlaps(hung))).cloned()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Running,
    /// The caller gave up: do not start it.
    Abandoned,
    /// The caller gave up: it hangs.
    Hangs,
    Ended,
}

/// State shared by the caller and the thread.
struct Call(Mutex<Phase>);

impl Call {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Held by the caller; when it is dropped, the call is given up.
struct Waiter {
    call: Arc<Call>,
    hung: Arc<Hung>,
    paths: Vec<HomePath>,
    wait: Option<WaitGuard>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut phase = self.call.phase();
        match *phase {
            Phase::Waiting => *phase = Phase::Abandoned,
            Phase::Running => {
                *phase = Phase::Hangs;
                let (call, paths) = (self.call.clone(), std::mem::take(&mut self.paths));
                self.hung.lock().push(Hanging { call, paths, _wait: self.wait.take() });
            }
            Phase::Abandoned | Phase::Hangs | Phase::Ended => {}
        }
    }
}

/// On the thread: marks the end, also if the work panics.
struct Runner {
    call: Arc<Call>,
    hung: Arc<Hung>,
    _admitted: OwnedSemaphorePermit,
}

impl Runner {
    fn begins(&self) -> bool {
        let mut phase = self.call.phase();
        let begins = *phase == Phase::Waiting;
        if begins {
            *phase = Phase::Running;
        }
        begins
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let mut phase = self.call.phase();
        assert!(*phase != Phase::Ended, "a call at home ended twice");
        if *phase == Phase::Hangs {
            let mut hung = self.hung.lock();
            let before = hung.len();
            hung.retain(|hanging| !Arc::ptr_eq(&hanging.call, &self.call));
            assert_eq!(
                hung.len() + 1,
                before,
                "a call that hung is listed once: its paths would stay refused"
            );
        }
        *phase = Phase::Ended;
    }
}

impl HomeLane {
    /// Calls at home in parallel.
    pub fn calls_max(&self) -> usize {
        self.limits.threads_max
    }

    pub fn new(env: &Env, home: &str, limits: LaneLimits) -> HomeLane {
        assert!(limits.threads_max > 0, "calls at a home without threads would never begin");
        HomeLane {
            home: home.into(),
            clock: env.clock.clone(),
            watch: env.watch.clone(),
            seconds: env
                .watch
                .histogram("weir_home_seconds", ("home", home.split('?').next().unwrap_or_default())),
            lane: env.tasks.lane(limits.threads_max),
            limits,
            admitted: Arc::new(Semaphore::new(limits.threads_max + limits.waiting_max)),
            hung: Arc::default(),
            actor: None,
        }
    }

    /// From now on every call runs as this user.
    pub fn acting_as(self, actor: Option<Actor>) -> HomeLane {
        HomeLane { actor: actor.map(Arc::new), ..self }
    }

    pub fn home(&self) -> &str {
        &self.home
    }

    /// Calls that hang at home beyond their deadline.
    pub fn hung(&self) -> usize {
        self.hung.lock().len()
    }

    /// Runs `work`, which concerns `paths`, on a thread of this home. `doing` is a verb phrase for messages.
    pub async fn run<T: Send + 'static>(
        &self,
        doing: &'static str,
        paths: &[&HomePath],
        work: impl FnOnce() -> Outcome<T> + Send + 'static,
    ) -> Outcome<T> {
        let paths: Vec<HomePath> = paths.iter().map(|path| (*path).clone()).collect();
        if let Some(path) = self.hung.first_over(&paths) {
            return Err(self.silent(doing, &format!("an earlier call at {path} still hangs")));
        }
        let Ok(admitted) = self.admitted.clone().try_acquire_owned() else {
            let limit = self.limits.threads_max + self.limits.waiting_max;
            return Err(self.silent(doing, &format!("{limit} calls wait for it already")));
        };
        let begun = self.clock.now();
        let wait = WaitRecord::new(Reason::Home, Object::NONE).doing(doing).at(&self.home);
        let wait = Some(self.watch.wait_since(begun.0, wait));
        let call = Arc::new(Call(Mutex::new(Phase::Waiting)));
        let runner = Runner { call: call.clone(), hung: self.hung.clone(), _admitted: admitted };
        let waiter = Waiter { call, hung: self.hung.clone(), paths, wait };
        let (tx, rx) = oneshot::channel();
        let actor = self.actor.clone();
        let started = self.lane.run(move || {
            if runner.begins() {
                let done = match actor {
                    None => work(),
                    Some(actor) => actor.act(work).unwrap_or_else(|e| Err(cannot_act(&actor, e))),
                };
                drop(runner);
                let _ = tx.send(done); // the caller may have given up: the change stays
            }
        });
        let answer = self.clock.timeout(self.limits.deadline, async {
            started.await;
            rx.await
        });
        let answer = answer.await;
        drop(waiter);
        self.seconds.add(self.clock.now().since(begun).as_nanos() as u64);
        match answer {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(Fault::Broken(Error::io(format!(
                "{doing} at {}: the work ended without an answer; this is a defect, the log has its panic",
                self.home
            )))),
            Err(_) => Err(self.silent(doing, &format!("no answer for {:?}", self.limits.deadline))),
        }
    }

    fn silent(&self, doing: &str, why: &str) -> Fault {
        Fault::Unreachable(Error::unavailable(format!(
            "{doing}: {} does not answer ({why}); it is tried again: check its server or its mount",
            self.home
        )))
    }
}

/// A call at home that has not ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LongCall {
    /// The home's URL.
    pub home: String,
    pub doing: &'static str,
    pub lasted: Duration,
}

/// Homes of this process where a call has lasted for this time, each with its oldest one, also if its caller
/// has given up.
pub fn long_calls(watch: &Watch, after: Duration) -> Vec<LongCall> {
    let mut found: Vec<LongCall> = Vec::new();
    for (wait, age_ns) in watch.waits.list(watch.now_ns(), after.as_nanos() as u64) {
        let Some(home) = wait.peer.filter(|_| wait.reason == Reason::Home) else { continue };
        if found.iter().all(|known| *known.home != *home) {
            let lasted = Duration::from_nanos(age_ns);
            found.push(LongCall { home: home.to_string(), doing: wait.action, lasted });
        }
    }
    found
}

fn cannot_act(actor: &Actor, e: std::io::Error) -> Fault {
    Fault::Denied(Error::denied(format!(
        "the mover cannot act as user {} at home ({e}): run it as root, or take --run-as from the rule",
        actor.uid
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    };

    fn path(text: &str) -> HomePath {
        HomePath::parse(text).unwrap()
    }
    fn lane(threads_max: usize, waiting_max: usize, deadline_ms: u64) -> HomeLane {
        let limits = LaneLimits { threads_max, waiting_max, deadline: Duration::from_millis(deadline_ms) };
        HomeLane::new(&weir_env::real::env(), "file:///test", limits)
    }
    fn is_unreachable<T>(outcome: Outcome<T>) -> bool {
        matches!(outcome, Err(Fault::Unreachable(_)))
    }

    #[tokio::test]
    async fn a_hanging_call_ends_by_its_deadline_and_holds_its_path() {
        let lane = lane(2, 10, 200);
        let (go_on, wait) = mpsc::channel::<()>();
        let hanging = lane
            .run("write", &[&path("a/b")], move || {
                let _ = wait.recv(); // until the test releases it
                Ok(())
            })
            .await;
        assert!(is_unreachable(hanging));
        assert_eq!(lane.hung(), 1);
        let listed = |after_ms| long_calls(&lane.watch, Duration::from_millis(after_ms));
        assert_eq!((listed(1)[0].doing, &*listed(1)[0].home), ("write", "file:///test"));
        assert_eq!(listed(600_000), [], "it hangs for a moment only");
        for overlapping in ["a", "a/b", "a/b/c"] {
            assert!(is_unreachable(lane.run("write", &[&path(overlapping)], || Ok(())).await));
        }
        lane.run("write", &[&path("a/c")], || Ok(())).await.unwrap();
        drop(go_on);
        while lane.hung() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(listed(0), [], "it is shown as long as it hangs");
        lane.run("write", &[&path("a/b")], || Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn expired_calls_never_begin_and_too_many_are_refused() {
        let lane = lane(1, 1, 200);
        let (go_on, wait) = mpsc::channel::<()>();
        let ran = Arc::new(AtomicU32::new(0));
        let ran_by = ran.clone();
        let (a, b, c) = (path("a"), path("b"), path("c"));
        let (a, b, c) = ([&a], [&b], [&c]);
        let (first, second, third) = tokio::join!(
            biased;
            lane.run("one", &a, move || {
                let _ = wait.recv();
                Ok(())
            }),
            lane.run("two", &b, move || {
                ran_by.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }),
            lane.run("three", &c, || Ok(())),
        );
        assert!(is_unreachable(first) && is_unreachable(second) && is_unreachable(third));
        drop(go_on);
        while lane.admitted.available_permits() < 2 {
            tokio::task::yield_now().await;
        }
        lane.run("four", &[], || Ok(())).await.unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 0, "its caller had given it up");
    }

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        let lane = lane(1, 1, 20_000);
        let outcome: Outcome<()> = lane.run("x", &[], || panic!("expected by the test")).await;
        assert!(matches!(outcome, Err(Fault::Broken(_))));
        assert_eq!(lane.hung(), 0);
        lane.run("y", &[], || Ok(())).await.unwrap();
    }
}
