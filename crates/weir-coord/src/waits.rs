//! Clients' reports of what their calls wait for. Kept in memory: a client that still waits repeats its
//! report.
//!
//! Knows nothing of the reasons.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::{ClientWaiting, ClientsWaiting, ReportWaits};

/// A report that is not repeated for this long is dropped: the client does not wait any more, or is gone.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(15);
/// Clients whose reports are kept; when all clients of a large cluster wait, some of them are enough.
const CLIENTS_MAX: usize = 256;
/// Causes of one client that are kept.
const CAUSES_MAX: usize = 16;
/// Longest name of a client or of a cause that is kept, in characters.
const TEXT_MAX: usize = 256;

#[derive(Default)]
pub struct ReportedWaits(BTreeMap<String, (Instant, ClientWaiting)>);

impl ReportedWaits {
    pub fn note(&mut self, reported: ReportWaits, now: Instant) {
        let client = shown(&reported.client);
        if reported.waits.is_empty() {
            self.0.remove(&client);
            return;
        }
        self.forget(now);
        if self.0.len() >= CLIENTS_MAX && !self.0.contains_key(&client) {
            return;
        }
        let mut waits = reported.waits;
        waits.truncate(CAUSES_MAX);
        waits.iter_mut().for_each(|w| w.what = shown(&w.what));
        self.0.insert(client.clone(), (now, ClientWaiting { client, waits }));
    }
    pub fn list(&mut self, now: Instant) -> ClientsWaiting {
        self.forget(now);
        ClientsWaiting { clients: self.0.values().map(|(_, waiting)| waiting.clone()).collect() }
    }
    fn forget(&mut self, now: Instant) {
        self.0.retain(|_, (at, _)| now.since(*at) < FORGOTTEN_AFTER);
    }
}

/// On one line, and short: it comes from other machines and is printed on a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::coord::Wait;

    fn reported(client: &str, what: &[&str]) -> ReportWaits {
        let wait = |what: &&str| Wait { what: what.to_string(), ms: 1, calls: 1 };
        ReportWaits { client: client.into(), waits: what.iter().map(wait).collect() }
    }
    fn at(s: u64) -> Instant {
        Instant(s * 1_000_000_000)
    }

    #[test]
    fn waits_are_listed_until_they_end_or_the_client_is_silent() {
        let mut waits = ReportedWaits::default();
        waits.note(reported("a", &["x\u{1b}[2J"]), at(0));
        waits.note(reported("b", &["y"]), at(10));
        assert_eq!(waits.list(at(11)).clients[0].waits[0].what, "x[2J");
        assert_eq!(waits.list(at(16)).clients.len(), 1, "a was silent for too long");
        waits.note(reported("b", &[]), at(17));
        assert!(waits.list(at(17)).clients.is_empty());
        (0..1000).for_each(|n| waits.note(reported(&n.to_string(), &["x"; 50]), at(20)));
        let all = waits.list(at(20)).clients;
        assert_eq!((all.len(), all[0].waits.len()), (CLIENTS_MAX, CAUSES_MAX));
    }
}
