//! Troubles of mounts, movers and other clients: those that wait, hang, are silent, dead, or have lost data.
use super::{Facts, Found, REMOVED};
use crate::machine::{Reach, RoleName};
use crate::quantity::{self, lasting};
use std::collections::BTreeMap;
use std::path::Path;
use weir_proto::condition::{NodeCondition, NodeTrouble, REPORT_EVERY_MS, Severity};
use weir_proto::coord::Wait;
use weir_proto::map::Role;

/// A node that has not reported for this time hangs, or died.
pub(super) const SILENT_MS: u64 = 4 * REPORT_EVERY_MS;
/// A session that has been silent for this time has no process any more, or a stopped one.
const SESSION_SILENT_MS: u64 = 30_000;

pub(super) fn check(facts: &Facts, found: &mut Found) {
    mounts(facts, found);
    waits(facts, found);
    facts.conditions.iter().for_each(|node| condition(facts, node, found));
    sessions(facts, found);
}

/// Causes that calls of clients wait for. Several clients that wait for the same server are one trouble.
fn waits(facts: &Facts, found: &mut Found) {
    let mut by_cause: BTreeMap<&str, Vec<(&str, &Wait)>> = BTreeMap::new();
    for client in &facts.waiting.clients {
        for wait in &client.waits {
            by_cause.entry(&wait.what).or_default().push((&client.client, wait));
        }
    }
    for (what, all) in by_cause {
        let calls: u64 = all.iter().map(|(_, wait)| u64::from(wait.calls)).sum();
        let calls = if calls == 1 { "1 call waits".to_owned() } else { format!("{calls} calls wait") };
        let seconds = all.iter().map(|(_, wait)| wait.ms).max().unwrap_or(0) / 1000;
        let [(first, _), others @ ..] = all.as_slice() else { continue };
        let (about, who) = match others.len() {
            0 => (*first, (*first).to_owned()),
            n => (
                what,
                format!("{first} and {}", quantity::count(n as u64, ["other client", "other clients"])),
            ),
        };
        let text = format!("{who}: {calls} for {what}, no answer for {seconds} s");
        found.degraded(("client-waits", about), text, "");
    }
}

fn mounts(facts: &Facts, found: &mut Found) {
    let restart = &facts.restart;
    for mount in &facts.mounts {
        let (name, at) = (&mount.name, mount.path.display());
        match mount.state {
            Reach::Answers => {}
            Reach::Dead => {
                let was_killed = facts.processes.iter().any(|p| p.name == *name && p.out_of_memory);
                let (why, action) = match was_killed {
                    true => (
                        "the kernel killed its process for want of memory",
                        format!(
                            "give its machine more memory, or the mount less (`--memory-mib`); {restart}"
                        ),
                    ),
                    false => ("its process has ended", restart.clone()),
                };
                let text = format!("{name} at {at} is dead ({why})");
                found.warning(("mount-dead", name), text, action);
            }
            Reach::Silent => found.warning(
                ("mount-silent", name),
                format!("{name} at {at} does not answer"),
                "see whether its process is stopped, and its log",
            ),
            Reach::NotMounted => {
                let text = format!("{name} at {at} is not mounted");
                found.warning(("mount-missing", name), text, restart.clone());
            }
        }
        if mount.losses > 0 {
            let last = mount.last_losses.as_array().and_then(|all| all.last());
            let what = last.and_then(|l| l["what"].as_str()).unwrap_or("see its log");
            let times = if mount.losses == 1 { "once".into() } else { format!("{} times", mount.losses) };
            let text = format!(
                "{name} at {at} lost changes or locks {times} since it was mounted; the last: {what}"
            );
            let action = "inform the users of these files, then mount it again";
            found.critical(("data-lost", name), text, action);
        }
    }
    for path in &facts.dead_mounts {
        let at = path.display();
        let text = format!("the mount at {at} is dead (its process has ended)");
        // It may be of another cluster. One of this cluster is silent for the coordinator, too.
        let is_of = |n: &NodeCondition| {
            n.role == Role::Mount && n.node.split_once(':').is_some_and(|(_, at)| Path::new(at) == path)
        };
        let is_ours = facts.conditions.iter().any(|n| is_of(n) && n.last_contact_ms >= SILENT_MS);
        let severity = if is_ours { Severity::Warning } else { Severity::Note };
        let whose = if is_ours { "" } else { "; it may be of another cluster" };
        let action = format!("`weir unmount {at}` cleans it up{whose}");
        found.add(severity, ("mount-dead", &at), text, action);
    }
}

/// Troubles that a node reports, or its silence. Those known from elsewhere are not repeated.
fn condition(facts: &Facts, node: &NodeCondition, found: &mut Found) {
    let (name, condition) = (&node.node, &node.condition);
    if found.knows(name) {
        return;
    }
    if node.last_contact_ms < SILENT_MS {
        // If this machine started the members of etcd, it knows which one is dead.
        let is_known = |trouble: &NodeTrouble| match trouble.code.as_str() {
            "etcd-member-silent" => found_dead_etcd(facts),
            "standby-missing" => found.knows(&trouble.about),
            // The relation has it.
            "home-silent" => facts.known().flat_map(|k| &k.relations).any(|r| r.url == trouble.about),
            _ => false,
        };
        let new: Vec<_> = condition.troubles.iter().filter(|trouble| !is_known(trouble)).collect();
        return new.into_iter().for_each(|trouble| found.reported(trouble));
    }
    let what = match node.role {
        Role::Mover => "mover",
        Role::Mount => "mount",
        // Members of the cluster: the map shows whether they are up.
        _ => return,
    };
    let silent = lasting(node.last_contact_ms / 1000);
    let unwritten = match condition.unwritten_bytes {
        0 => String::new(),
        n => format!("; programs had written {} there that no target has", quantity::bytes(n)),
    };
    let text =
        format!("{what} {name} has reported nothing for {silent}: its process died, or hangs{unwritten}");
    let action = match facts.processes.iter().find(|p| p.name == *name) {
        Some(process) if process.lives => {
            format!("see whether it is stopped; its log is {}", process.log.display())
        }
        _ if facts.was_removed(name) => REMOVED.to_owned(),
        Some(_) => facts.restart.clone(),
        None => "see to it on its machine; if it is to be gone, this is forgotten after a while".to_owned(),
    };
    found.warning((if what == "mover" { "mover-silent" } else { "mount-silent" }, name), text, action);
}

fn found_dead_etcd(facts: &Facts) -> bool {
    facts.processes.iter().any(|p| p.role == RoleName::Etcd && !p.lives)
}

/// Clients that do not report themselves, for instance programs that were linked with the client.
fn sessions(facts: &Facts, found: &mut Found) {
    let reported = |client: &str| facts.conditions.iter().any(|n| n.condition.client == client);
    for session in facts.known().flat_map(|k| &k.sessions) {
        let is_silent = session.resumed && session.last_contact_ms >= SESSION_SILENT_MS;
        if !is_silent || reported(&session.client) || session.open_to_write + session.write_leases == 0 {
            continue;
        }
        let (name, silent) = (&session.client, lasting(session.last_contact_ms / 1000));
        let text = format!(
            "{name} has been silent for {silent}, and may have unsaved changes of {} files",
            session.open_to_write.max(session.write_leases)
        );
        let action = "see whether its machine is up; its files are free for others when they ask for them";
        found.warning(("client-silent", name), text, action);
    }
}
