//! Failing jobs of the leader, for `weir status`: a failed job is retried, and must not fail silently.
//!
//! Invariant: a trouble ends when the job succeeds, or is not reported again in time. Knows nothing of the
//! jobs.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::condition::{NodeTrouble, Severity, TROUBLES_MAX};

/// A job, and its object.
type Job = (&'static str, String);

/// The trouble of a job, and until when it is valid.
#[derive(Default)]
pub(crate) struct Failing(Mutex<BTreeMap<Job, (Instant, NodeTrouble)>>);

impl Failing {
    fn jobs(&self) -> MutexGuard<'_, BTreeMap<Job, (Instant, NodeTrouble)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is retried within `retry`; `action`: a remedy for an administrator.
    pub fn failed(
        &self,
        now: Instant,
        retry: Duration,
        (code, about): (&'static str, &str),
        text: String,
        action: String,
    ) {
        let (code_text, name) = (code.to_owned(), about.to_owned());
        let trouble = NodeTrouble { code: code_text, severity: Severity::Warning, about: name, text, action };
        let mut jobs = self.jobs();
        jobs.retain(|_, (until, _)| *until > now);
        let job = (code, about.to_owned());
        if jobs.len() < TROUBLES_MAX || jobs.contains_key(&job) {
            // A try takes its time, too.
            jobs.insert(job, (now + retry * 3, trouble));
        }
    }

    pub fn succeeded(&self, code: &'static str, about: &str) {
        self.jobs().remove(&(code, about.to_owned()));
    }

    pub fn list(&self, now: Instant) -> Vec<NodeTrouble> {
        let mut jobs = self.jobs();
        jobs.retain(|_, (until, _)| *until > now);
        jobs.values().map(|(_, trouble)| trouble.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_listed_until_success_or_silence() {
        let (failing, retry) = (Failing::default(), Duration::from_secs(10));
        let at = |s: u64| Instant(s * 1_000_000_000);
        let fail = |about: &str, s| {
            failing.failed(at(s), retry, ("snapshot", about), "no".into(), String::new());
        };
        let listed = |s| failing.list(at(s)).into_iter().map(|t| t.about).collect::<Vec<_>>();
        fail("a", 0);
        fail("b", 20);
        assert_eq!(listed(29), ["a", "b"]);
        assert_eq!(listed(30), ["b"]);
        failing.succeeded("snapshot", "b");
        assert!(listed(30).is_empty());
        (0..1000).for_each(|n| fail(&n.to_string(), 40));
        assert_eq!(listed(40).len(), TROUBLES_MAX);
    }
}
