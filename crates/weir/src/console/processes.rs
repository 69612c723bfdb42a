//! The processes of a cluster for the console: those that are connected, and those that should be, with the
//! time since when they are not. A pure function of the snapshot.
use super::snapshot::Snapshot;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use weir_proto::map::Role;
use weir_trust::certificate::role_word;

/// A mount or mover that reported nothing for this time has died, or hangs. It reports every five seconds.
const SILENT_MS: u64 = 15_000;

pub fn processes(snapshot: &Snapshot) -> Vec<Value> {
    let mut known: BTreeSet<&str> = BTreeSet::new();
    let mut all = Vec::new();
    for collected in &snapshot.meters {
        known.insert(&collected.name);
        let why = collected.reply.as_ref().err().map(|why| format!("does not answer: {why}"));
        all.push(line(snapshot, &collected.name, role_word(collected.role), why));
    }
    let Some(facts) = &snapshot.facts else { return all };
    for node in facts.status.map.nodes.iter().filter(|node| !node.up) {
        if known.insert(&node.name) {
            all.push(line(snapshot, &node.name, role_word(node.role), Some("is down".to_owned())));
        }
    }
    for node in facts.conditions.iter().filter(|node| matches!(node.role, Role::Mount | Role::Mover)) {
        if node.last_contact_ms >= SILENT_MS && !node.condition.ends && known.insert(&node.node) {
            let why = "its process died, or hangs".to_owned();
            all.push(line(snapshot, &node.node, role_word(node.role), Some(why)));
        }
    }
    for process in facts.processes.iter().filter(|process| !process.lives) {
        if known.insert(&process.name) {
            let why = "its process has ended".to_owned();
            all.push(line(snapshot, &process.name, process.role.command(), Some(why)));
        }
    }
    all.sort_by_key(|line| (line["answers"] == true, line["name"].as_str().map(str::to_owned)));
    all
}

/// `why`: it does not work as it should.
fn line(snapshot: &Snapshot, name: &str, role: &str, why: Option<String>) -> Value {
    let since = why.as_ref().and_then(|_| since_s(snapshot, name));
    json!({ "name": name, "role": role, "answers": why.is_none(), "why": why, "since_s": since })
}

/// When the trouble with it began, or else when it reported last.
fn since_s(snapshot: &Snapshot, name: &str) -> Option<u64> {
    let lasting = snapshot.log.events.iter().filter(|event| event.cleared_s == 0);
    let raised = lasting.filter(|event| event.trouble.about == name).map(|event| event.raised_s).min();
    raised.or_else(|| {
        let facts = snapshot.facts.as_ref()?;
        let reported = facts.conditions.iter().find(|node| node.node == name)?;
        Some(facts.now_s.saturating_sub(reported.last_contact_ms / 1000))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use weir_coord::Collected;
    use weir_diagnose::troubles::world::world;
    use weir_proto::condition::{Condition, NodeCondition, NodeTrouble, Severity};
    use weir_proto::event::{EventLog, EventSeen};
    use weir_proto::watch::Meters;

    #[test]
    fn dead_processes_stay_with_the_time_of_their_end() {
        let mut facts = world().0;
        (facts.now_s, facts.processes) = (10_000, Vec::new());
        let map = Arc::make_mut(&mut facts.status.map);
        let down = map.nodes[0].name.clone();
        map.nodes[0].up = false;
        let mount = |node: &str, last_contact_ms| NodeCondition {
            node: node.to_owned(),
            role: Role::Mount,
            last_contact_ms,
            condition: Condition::default(),
        };
        facts.conditions = vec![mount("dead", 60_000), mount("lives", 1_000), mount("answers", 60_000)];
        let no_meters = Meters { meters: Vec::new() };
        let answers = Collected { name: "answers".to_owned(), role: Role::Mount, reply: Ok(no_meters) };
        let hangs = Collected { name: "hangs".to_owned(), role: Role::Mover, reply: Err("late".to_owned()) };
        let trouble = NodeTrouble {
            code: "storage-down".to_owned(),
            severity: Severity::Degraded,
            about: down.clone(),
            text: String::new(),
            action: String::new(),
        };
        let event = EventSeen { trouble, raised_s: 9_000, cleared_s: 0, acknowledged_s: 0 };
        let log = EventLog { events: vec![event], mutes: Vec::new() };
        let (facts, meters) = (Some(facts), vec![answers, hangs]);
        let snapshot = Snapshot { facts, meters, log, ..Snapshot::default() };
        let all = processes(&snapshot);
        let of =
            |name: &str| all.iter().find(|line| line["name"] == name).map(|l| (&l["why"], &l["since_s"]));
        assert_eq!(of("dead"), Some((&json!("its process died, or hangs"), &json!(9_940))));
        assert_eq!(of(&down), Some((&json!("is down"), &json!(9_000))));
        assert_eq!(of("hangs"), Some((&json!("does not answer: late"), &Value::Null)));
        assert_eq!(of("answers"), Some((&Value::Null, &Value::Null)));
        assert_eq!(of("lives"), None, "it reports, and nothing more is known of it");
        assert_eq!(all.last().unwrap()["name"], "answers", "the dead come first");
        assert_eq!(processes(&Snapshot::default()), Vec::<Value>::new());
    }
}
