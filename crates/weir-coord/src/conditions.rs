//! The last condition report of each node. Kept in memory: each node reports again every few seconds.
//!
//! A node that falls silent without leaving stays listed for a while: it died, or hangs. Knows nothing of the
//! reports' contents.
use crate::cluster::Cluster;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::condition::{
    Condition, Conditions, GetConditions, NodeCondition, ReportCondition, TROUBLES_MAX,
};
use weir_proto::map::Role;
use weir_proto::{Request, Result};
use weir_rpc::{Call, Reply};

/// A mount that has been silent for this long has lost its session, and its leases and locks; it is listed no
/// longer.
const MOUNT_FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);
/// Other nodes, such as movers, are listed as missing for longer.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Nodes that are kept; beyond that the one that has been silent longest is removed.
const NODES_MAX: usize = 16_384;
/// Longest text that is kept, in characters.
const TEXT_MAX: usize = 500;

/// The service's state.
#[derive(Default)]
pub struct Reported(Mutex<ReportedConditions>);

impl Reported {
    pub fn note(&self, node: &str, role: Role, condition: Condition, now: Instant) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(node, role, condition, now);
    }
    /// Records a report, or returns all reports.
    pub fn answer(&self, call: &Call, now: Instant) -> Result<Reply> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if call.method == GetConditions::METHOD {
            return call.decode::<GetConditions>().map(|_| Reply::new(&all.list(now)));
        }
        let ReportCondition { condition } = call.decode()?;
        let peer = call.connection.peer();
        all.note(&peer.name, peer.role, condition, now);
        Ok(Reply::new(&()))
    }
}

impl Cluster {
    /// Reports this node's condition, for `weir status`.
    pub async fn report_condition(&self, condition: Condition) -> Result<()> {
        self.administer(&ReportCondition { condition }).await
    }
    /// The last reported conditions of all nodes.
    pub async fn conditions(&self) -> Result<Conditions> {
        self.administer(&GetConditions {}).await
    }
}

#[derive(Default)]
struct ReportedConditions(BTreeMap<(String, Role), (Instant, Condition)>);

impl ReportedConditions {
    fn note(&mut self, node: &str, role: Role, condition: Condition, now: Instant) {
        let key = (shown(node), role);
        self.forget(now);
        if condition.ends {
            self.0.remove(&key);
            return;
        }
        if self.0.len() >= NODES_MAX && !self.0.contains_key(&key) {
            let silent = self.0.iter().min_by_key(|(_, (received, _))| *received).map(|(key, _)| key.clone());
            silent.map(|key| self.0.remove(&key));
        }
        self.0.insert(key, (now, kept(condition)));
    }

    fn list(&mut self, now: Instant) -> Conditions {
        self.forget(now);
        let node =
            |((node, role), (received, condition)): (&(String, Role), &(Instant, Condition))| NodeCondition {
                node: node.clone(),
                role: *role,
                last_contact_ms: now.since(*received).as_millis() as u64,
                condition: condition.clone(),
            };
        Conditions { nodes: self.0.iter().map(node).collect() }
    }

    fn forget(&mut self, now: Instant) {
        self.0.retain(|(_, role), (received, _)| {
            let limit = if *role == Role::Mount { MOUNT_FORGOTTEN_AFTER } else { FORGOTTEN_AFTER };
            now.since(*received) < limit
        });
    }
}

fn kept(mut condition: Condition) -> Condition {
    condition.troubles.truncate(TROUBLES_MAX);
    condition.disks.truncate(TROUBLES_MAX);
    let texts = condition.troubles.iter_mut();
    let texts = texts.flat_map(|t| [&mut t.code, &mut t.about, &mut t.text, &mut t.action]);
    let texts = texts.chain(condition.disks.iter_mut().map(|disk| &mut disk.dir));
    for text in texts.chain([&mut condition.host, &mut condition.release, &mut condition.client]) {
        *text = shown(text);
    }
    condition
}

/// On one line, and short: it comes from other machines and is printed on a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: u64) -> Instant {
        Instant(s * 1_000_000_000)
    }
    fn names(conditions: &mut ReportedConditions, s: u64) -> Vec<(String, u64)> {
        conditions.list(at(s)).nodes.into_iter().map(|n| (n.node, n.last_contact_ms)).collect()
    }

    #[test]
    fn a_silent_node_stays_listed_and_one_that_left_does_not() {
        let mut conditions = ReportedConditions::default();
        let client = Condition { client: "m\u{1b}[2J".into(), ..Condition::default() };
        conditions.note("a", Role::Mount, client, at(0));
        conditions.note("b", Role::Mover, Condition::default(), at(0));
        conditions.note("c", Role::Mount, Condition::default(), at(0));
        conditions.note("c", Role::Mount, Condition { ends: true, ..Condition::default() }, at(1));
        assert_eq!(conditions.list(at(2)).nodes[0].condition.client, "m[2J");
        assert_eq!(names(&mut conditions, 30), [("a".into(), 30_000), ("b".into(), 30_000)]);
        assert_eq!(names(&mut conditions, 3600), [("b".into(), 3_600_000)]);
        assert_eq!(names(&mut conditions, 24 * 3600), []);
    }

    #[test]
    fn the_most_silent_node_is_dropped_for_a_new_one() {
        let mut conditions = ReportedConditions::default();
        for n in 0..NODES_MAX as u64 {
            conditions.note(&n.to_string(), Role::Mover, Condition::default(), at(n));
        }
        conditions.note("new", Role::Mover, Condition::default(), at(NODES_MAX as u64));
        let listed = names(&mut conditions, NODES_MAX as u64);
        assert_eq!(listed.len(), NODES_MAX);
        assert!(listed.iter().all(|(name, _)| name != "0"), "the first one is the most silent");
    }
}
