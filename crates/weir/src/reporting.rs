//! The conditions of mounts and movers, which are clients, for `weir status`.
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_client::Client;
use weir_env::{Env, Instant};
use weir_home::{LongCall, long_calls};
use weir_node::condition::{Inspect, plain};
use weir_proto::condition::{NodeTrouble, Severity};

/// Without its leader a mover searches for it for a while in each failover.
const UNREACHED_AFTER: Duration = Duration::from_secs(20);

/// A call at home that lasts longer hangs, or home is too slow for its work: a large part over a slow link
/// takes some seconds.
const HOME_SILENT_AFTER: Duration = Duration::from_secs(30);

/// The client's name for metadata servers.
pub fn session_name(name: &str, host: &str) -> String {
    format!("{name} on {host}")
}

/// A mount.
pub fn of_mount(host: &str, name: &str, client: &Client) -> Inspect {
    let (host, name, client) = (host.to_owned(), name.to_owned(), client.clone());
    Arc::new(move || {
        let mut condition = plain(&host);
        condition.client = session_name(&name, &host);
        condition.unwritten_bytes = client.unsaved_bytes();
        condition.troubles.extend(losses(&name, &client));
        Box::pin(std::future::ready(condition))
    })
}

fn losses(name: &str, client: &Client) -> Option<NodeTrouble> {
    let (count, last) = client.losses();
    let what = last.last().map_or("see its log", |loss| loss.what.as_str());
    let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
    (count > 0).then(|| NodeTrouble {
        code: "data-lost".to_owned(),
        severity: Severity::Critical,
        about: name.to_owned(),
        text: format!("{name} lost changes or locks {times} since it was mounted; the last: {what}"),
        action: "inform the users of these files, then mount it again".to_owned(),
    })
}

/// Since when a mover has no metadata leader, and why.
#[derive(Clone, Default)]
pub struct Unreached(Arc<Mutex<Option<(Instant, String)>>>);

impl Unreached {
    fn known(&self) -> std::sync::MutexGuard<'_, Option<(Instant, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn failed(&self, now: Instant, why: String) {
        let mut known = self.known();
        let since = known.as_ref().map_or(now, |(since, _)| *since);
        *known = Some((since, why));
    }
    pub fn reached(&self) {
        *self.known() = None;
    }
    fn trouble(&self, name: &str, now: Instant) -> Option<NodeTrouble> {
        let known = self.known().clone();
        let (since, why) = known.filter(|(since, _)| now.since(*since) >= UNREACHED_AFTER)?;
        let seconds = now.since(since).as_secs();
        Some(NodeTrouble {
            code: "mover-unconnected".to_owned(),
            severity: Severity::Warning,
            about: name.to_owned(),
            text: format!("{name} has not reached the metadata server for {seconds} s: {why}"),
            action: "it tries again by itself; see whether the metadata server runs".to_owned(),
        })
    }
}

/// A mover.
pub fn of_mover(env: &Env, host: &str, name: &str, unreached: &Unreached) -> Inspect {
    let (env, host, name, unreached) = (env.clone(), host.to_owned(), name.to_owned(), unreached.clone());
    Arc::new(move || {
        let mut condition = plain(&host);
        condition.client = session_name(&format!("mover {name}"), &host);
        condition.troubles.extend(unreached.trouble(&name, env.clock.now()));
        condition.troubles.extend(silent_homes(&env, &name));
        Box::pin(std::future::ready(condition))
    })
}

/// Homes where a call has waited for too long.
fn silent_homes(env: &Env, name: &str) -> Vec<NodeTrouble> {
    let trouble = |LongCall { home, doing, lasted }: LongCall| NodeTrouble {
        code: "home-silent".to_owned(),
        severity: Severity::Warning,
        text: format!("{name} has waited {} s for {home}, to {doing}", lasted.as_secs()),
        action: "see to its server, or to the file system that it is on".to_owned(),
        about: home,
    };
    long_calls(&env.watch, HOME_SILENT_AFTER).into_iter().map(trouble).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mover_without_its_leader_says_so_after_a_while() {
        let unreached = Unreached::default();
        let at = |s: u64| Instant(s * 1_000_000_000);
        assert_eq!(unreached.trouble("m", at(0)), None);
        unreached.failed(at(5), "refused".to_owned());
        unreached.failed(at(20), "no answer".to_owned());
        assert_eq!(unreached.trouble("m", at(24)), None, "a failover takes so long");
        let trouble = unreached.trouble("m", at(35)).expect("it says so");
        assert_eq!(trouble.text, "m has not reached the metadata server for 30 s: no answer");
        unreached.reached();
        assert_eq!(unreached.trouble("m", at(99)), None);
    }
}
