//! Signs of life of members, noted when they arrive: a heartbeat counts from then on, also while thousands of
//! requests wait for the owner of the map.
//!
//! Knows nothing of the map; whether a connection is a member's is the owner's decision.
use crate::cluster::Cluster;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::life::{GetLives, Life, Lives, NodeLife};
use weir_proto::{NodeId, Result};
use weir_rpc::Connection;

/// Answers that were late are so for this time after the last sign of it: a trouble does not begin and end
/// with each burst.
const LATE_AFTERWARDS: Duration = Duration::from_secs(10);
/// Targets of one node, and their reports, that are kept. More join no node.
const TARGETS_MAX: usize = 256;

/// The last sign of life on each connection of a member. One for each connection that has joined: their
/// number is bounded with that of the connections.
#[derive(Default, Debug)]
pub struct SignsOfLife(Mutex<BTreeMap<u64, Sign>>);

#[derive(Clone, Debug)]
pub struct Sign {
    pub connection: Connection,
    /// When it came.
    pub at: Instant,
    /// Its own report. `None`: its release has none.
    pub life: Option<(NodeId, Arc<Life>)>,
    late: Option<Late>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Late {
    since: Instant,
    last: Instant,
}

/// The time in which targets answer late, with this sign of life.
fn lateness(before: Option<Late>, is_late: bool, now: Instant) -> Option<Late> {
    let lasting = before.filter(|late| now.since(late.last) < LATE_AFTERWARDS);
    match is_late {
        true => Some(Late { since: lasting.map_or(now, |late| late.since), last: now }),
        false => lasting,
    }
}

impl SignsOfLife {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Sign>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message of a member has arrived on its connection.
    pub fn note(&self, connection: &Connection, now: Instant) {
        let new = || Sign { connection: connection.clone(), at: now, life: None, late: None };
        self.lock().entry(connection.id()).or_insert_with(new).at = now;
        if connection.is_closed() {
            self.forget(connection.id()); // its end may have been handled already
        }
    }

    /// The process's own report, on a connection that has joined. False: it has not.
    pub fn note_life(&self, connection: &Connection, node: NodeId, mut life: Life, now: Instant) -> bool {
        life.targets.truncate(TARGETS_MAX);
        let mut signs = self.lock();
        let Some(sign) = signs.get_mut(&connection.id()) else { return false };
        sign.late = lateness(sign.late, life.targets.iter().any(|t| t.is_late()), now);
        (sign.at, sign.life) = (now, Some((node, Arc::new(life))));
        true
    }

    pub fn forget(&self, connection: u64) {
        self.lock().remove(&connection);
    }

    /// By connection.
    pub fn all(&self) -> BTreeMap<u64, Sign> {
        self.lock().clone()
    }

    /// The connection, if its process answers questions about its life there.
    pub fn answers(&self, connection: u64) -> Option<Connection> {
        let signs = self.lock();
        signs.get(&connection).filter(|sign| sign.life.is_some()).map(|sign| sign.connection.clone())
    }

    pub fn list(&self, now: Instant) -> Lives {
        let shown = |sign: &Sign| {
            let (node, life) = sign.life.clone()?;
            let late = sign.late.filter(|late| now.since(late.last) < LATE_AFTERWARDS);
            Some(NodeLife {
                node,
                seen_ms: now.since(sign.at).as_millis() as u64,
                late_ms: late.map_or(0, |late| (now.since(late.since).as_millis() as u64).max(1)),
                life: Life::clone(&life),
            })
        };
        Lives { nodes: self.lock().values().filter_map(shown).collect() }
    }
}

impl Cluster {
    /// The last sign of life of each connected member.
    pub async fn lives(&self) -> Result<Lives> {
        self.administer(&GetLives {}).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_lasts_over_short_pauses() {
        let at = |s: u64| Instant(s * 1_000_000_000);
        let mut late = None;
        for (s, is_late, since) in [
            (1, false, None),
            (2, true, Some(2)),
            (5, false, Some(2)),
            (11, true, Some(2)),
            (20, false, Some(2)),
            (21, false, None),
            (30, true, Some(30)),
            (41, true, Some(41)),
        ] {
            late = lateness(late, is_late, at(s));
            assert_eq!(late.map(|late| late.since), since.map(at), "at {s}");
        }
    }
}
