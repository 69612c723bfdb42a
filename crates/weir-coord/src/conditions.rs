//! The last condition report of each node. Kept in memory: each node reports again every few seconds.
//!
//! A node that falls silent without leaving stays listed for a while: it died, or hangs. Knows nothing of the
//! reports' contents.
use crate::cluster::Cluster;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::condition::{
    Condition, Conditions, GetConditions, NodeCondition, ReportCondition, TROUBLES_MAX,
};
use weir_proto::frame::BODY_MAX;
use weir_proto::map::Role;
use weir_proto::{Request, Result, Wire};
use weir_rpc::{Call, Reply};

/// A mount that has been silent for this long has lost its session, and its leases and locks; it is listed no
/// longer.
const MOUNT_FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);
/// Other nodes, such as movers, are listed as missing for longer.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Nodes that are kept; beyond that the one that has been silent longest is removed.
const NODES_MAX: usize = 16_384;
/// Of all of them: those of 16,384 nodes take some 200 bytes each, and a trouble some 300 more.
const BYTES_MAX: usize = 32 << 20;
/// An answer has to fit into one message; the nodes that do not are left out.
const LISTED_BYTES_MAX: usize = BODY_MAX as usize - (64 << 10);
/// The bytes of a node there beside its condition and its name.
const NODE_BYTES: usize = 32;
/// Interval of the search for silent nodes: not with each report of one of thousands.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
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
struct ReportedConditions {
    of: BTreeMap<(String, Role), Kept>,
    /// Of all of them.
    bytes: usize,
    /// When silent nodes were last looked for.
    swept: Instant,
}

struct Kept {
    received: Instant,
    condition: Condition,
    bytes: usize,
}

impl ReportedConditions {
    fn note(&mut self, node: &str, role: Role, condition: Condition, now: Instant) {
        let key = (shown(node), role);
        if now.since(self.swept) >= SWEEP_EVERY {
            self.forget(now);
        }
        self.remove(&key);
        if condition.ends {
            return;
        }
        let condition = kept(condition);
        let bytes = condition.to_bytes().len() + key.0.len();
        while !self.of.is_empty() && (self.of.len() >= NODES_MAX || self.bytes + bytes > BYTES_MAX) {
            let silent = self.of.iter().min_by_key(|(_, kept)| kept.received).map(|(key, _)| key.clone());
            if let Some(key) = silent {
                self.remove(&key);
            }
        }
        self.bytes += bytes;
        self.of.insert(key, Kept { received: now, condition, bytes });
    }

    fn remove(&mut self, key: &(String, Role)) {
        self.bytes -= self.of.remove(key).map_or(0, |kept| kept.bytes);
    }

    /// As many as an answer holds, those with troubles first.
    fn list(&mut self, now: Instant) -> Conditions {
        self.forget(now);
        let mut left = LISTED_BYTES_MAX;
        let mut fits = |kept: &Kept| {
            let bytes = kept.bytes + NODE_BYTES;
            let fits = bytes <= left;
            left -= if fits { bytes } else { 0 };
            fits
        };
        let has_troubles = |kept: &&Kept| !kept.condition.troubles.is_empty();
        let with: BTreeSet<_> =
            self.of.iter().filter(|(_, k)| has_troubles(k) && fits(k)).map(|(key, _)| key).collect();
        let listed =
            self.of.iter().filter(|(key, k)| if has_troubles(k) { with.contains(key) } else { fits(k) });
        let node = |((node, role), kept): (&(String, Role), &Kept)| NodeCondition {
            node: node.clone(),
            role: *role,
            last_contact_ms: now.since(kept.received).as_millis() as u64,
            condition: kept.condition.clone(),
        };
        Conditions { nodes: listed.map(node).collect() }
    }

    fn forget(&mut self, now: Instant) {
        self.swept = now;
        let bytes = &mut self.bytes;
        self.of.retain(|(_, role), kept| {
            let limit = if *role == Role::Mount { MOUNT_FORGOTTEN_AFTER } else { FORGOTTEN_AFTER };
            let stays = now.since(kept.received) < limit;
            *bytes -= if stays { 0 } else { kept.bytes };
            stays
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
    use weir_proto::condition::{NodeTrouble, Severity};

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
        assert!(listed.len() > NODES_MAX / 2, "as many as fit into an answer");
        assert_eq!(conditions.of.len(), NODES_MAX);
        assert!(!conditions.of.contains_key(&("0".into(), Role::Mover)));
        assert!(listed.iter().all(|(name, _)| name != "0"), "the first one is the most silent");
    }

    fn troubled(count: usize) -> Condition {
        let text = "it is bad ".repeat(30);
        let (code, about, action) = ("code".into(), String::new(), String::new());
        let one = NodeTrouble { code, severity: Severity::Warning, about, text, action };
        Condition { troubles: vec![one; count], ..Condition::default() }
    }

    #[test]
    fn reports_have_a_bound_in_memory_and_in_an_answer() {
        let mut conditions = ReportedConditions::default();
        for n in 0..NODES_MAX + 1000 {
            let condition = troubled(if n % 100 == 0 { TROUBLES_MAX } else { 0 });
            conditions.note(&format!("mount-{n}:/data"), Role::Mount, condition, at(n as u64 / 100));
            assert!(conditions.bytes <= BYTES_MAX && conditions.of.len() <= NODES_MAX);
        }
        assert_eq!(conditions.bytes, conditions.of.values().map(|kept| kept.bytes).sum::<usize>());
        let listed = conditions.list(at(200));
        assert!(listed.to_bytes().len() <= BODY_MAX as usize, "an answer of one message");
        let with_troubles = listed.nodes.iter().filter(|n| !n.condition.troubles.is_empty()).count();
        assert!(with_troubles > 40, "{with_troubles} are listed before those without");
        for n in 0..NODES_MAX + 1000 {
            let ends = Condition { ends: true, ..Condition::default() };
            conditions.note(&format!("mount-{n}:/data"), Role::Mount, ends, at(200));
        }
        assert_eq!((conditions.bytes, conditions.of.len()), (0, 0));
    }

    #[test]
    fn the_oldest_reports_go_when_the_memory_is_used() {
        let mut conditions = ReportedConditions::default();
        let one = kept(troubled(TROUBLES_MAX)).to_bytes().len();
        for n in 0..2 * BYTES_MAX / one {
            conditions.note(&n.to_string(), Role::Mover, troubled(TROUBLES_MAX), at(n as u64 / 1000));
        }
        let count = conditions.of.len();
        assert!(conditions.bytes <= BYTES_MAX && count > BYTES_MAX / (one + 64), "{count}");
        assert!(!conditions.of.contains_key(&("0".into(), Role::Mover)));
    }
}
