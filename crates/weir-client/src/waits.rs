//! Causes that calls wait for, and since when. Each is logged once, and again when it is over.
//!
//! A short wait is normal: shown and logged causes have lasted for [`REPORTED_AFTER`].
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Clock, Env, Instant};
use weir_watch::{Object, Reason, WaitRecord, Watch};

/// A restart or a failover takes less.
const REPORTED_AFTER: Duration = Duration::from_secs(3);
/// A cause that no call waits for any more is over after this time: the same calls often wait again at once.
const OVER_AFTER: Duration = Duration::from_secs(1);

/// Causes that are distinguished: each group of a large cluster may lack other targets.
const CAUSES_MAX: usize = 32;

/// A cause that calls of a client wait for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// Text for administrators: a server, or targets, by name.
    pub what: String,
    pub since: Instant,
    pub calls: u32,
}

pub struct Waits {
    clock: Clock,
    watch: Watch,
    causes: Mutex<BTreeMap<String, Cause>>,
}

struct Cause {
    since: Instant,
    /// The last time that a call waited.
    last: Instant,
    calls: u32,
    reported: bool,
}

/// A waiting call, as long as this exists.
pub struct WaitGuard {
    waits: Arc<Waits>,
    what: String,
    _wait: weir_watch::WaitGuard,
}

impl Waits {
    pub fn new(env: &Env) -> Arc<Waits> {
        Arc::new(Waits { clock: env.clock.clone(), watch: env.watch.clone(), causes: Mutex::default() })
    }
    fn causes(&self) -> MutexGuard<'_, BTreeMap<String, Cause>> {
        self.causes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call begins to wait.
    pub fn begin(self: &Arc<Self>, mut what: String) -> WaitGuard {
        let now = self.clock.now();
        let mut causes = self.causes();
        if causes.len() >= CAUSES_MAX && !causes.contains_key(&what) {
            what = "other targets".into();
        }
        let new = Cause { since: now, last: now, calls: 0, reported: false };
        let cause = causes.entry(what.clone()).or_insert(new);
        cause.calls += 1;
        drop(causes);
        let wait = WaitRecord::new(Reason::Servers, Object::NONE).held_by(&what);
        WaitGuard { waits: self.clone(), what, _wait: self.watch.wait_since(now.0, wait) }
    }
    /// Notes a cause that is watched from elsewhere: `calls` wait now, since then.
    pub fn note(&self, what: &str, since: Instant, calls: u32) {
        let now = self.clock.now();
        let new = Cause { since, last: now, calls, reported: false };
        let mut causes = self.causes();
        let cause = causes.entry(what.to_owned()).or_insert(new);
        (cause.last, cause.calls) = (now, calls);
    }
    /// Nothing waits for the noted cause any more.
    pub fn end(&self, what: &str) {
        if let Some(cause) = self.causes().get_mut(what) {
            cause.calls = 0;
        }
    }

    /// Causes that calls have been waiting for for a while, in order.
    pub fn list(&self) -> Vec<Waiting> {
        let now = self.clock.now();
        let causes = self.causes();
        let old = causes.iter().filter(|(_, c)| now.since(c.since) >= REPORTED_AFTER);
        // One that has just ended counts until its cause is over: the same calls often wait again at once.
        old.map(|(what, c)| Waiting { what: what.clone(), since: c.since, calls: c.calls.max(1) }).collect()
    }

    /// Logs new causes and ended ones; called at intervals.
    pub fn report(&self) {
        let now = self.clock.now();
        let mut lines = Vec::new();
        self.causes().retain(|what, cause| {
            let lasted = now.since(cause.since);
            if cause.calls == 0 && now.since(cause.last) >= OVER_AFTER {
                if cause.reported {
                    lines.push((
                        false,
                        format!("no call waits for {what} any more, after {} s", lasted.as_secs()),
                    ));
                }
                return false;
            }
            if lasted >= REPORTED_AFTER && !cause.reported {
                cause.reported = true;
                let calls =
                    if cause.calls == 1 { "1 call waits" } else { &format!("{} calls wait", cause.calls) };
                lines.push((
                    true,
                    format!("waiting for {what}: no answer for {} s; {calls}", lasted.as_secs()),
                ));
            }
            true
        });
        for (begins, line) in lines {
            if begins { tracing::warn!("{line}") } else { tracing::info!("{line}") }
        }
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        let now = self.waits.clock.now();
        if let Some(cause) = self.waits.causes().get_mut(&self.what) {
            (cause.calls, cause.last) = (cause.calls.saturating_sub(1), now);
        }
    }
}
