//! What an operator should know of a cluster, the worst first: a plain function of what `status.rs` found out.
//!
//! A new trouble is one line in a function below (its fact in `Facts`, if that is new), and a row in the test's table. Its text is
//! one sentence: what is wrong, where, and what to do. Troubles that another one explains are left out: the reader is in a hurry.
use crate::commands::backup;
use crate::commands::mounts::{MountState, Reach};
use crate::local::local_cluster::RoleName;
use crate::observe::{InUse, copies_trouble, is_led};
use crate::table;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::PathBuf;
use weir_proto::backup::Backup;
use weir_proto::coord::{AuditState, ClientsWaiting, Clocks, ClusterStatus, CutLink};
use weir_proto::map::{Group, Member, MemberState, Node, Role, Target, TargetState};
use weir_proto::meta::Time;
use weir_proto::relation::{RelationInfo, RelationState};
use weir_proto::volume::Volume;
use weir_proto::{NodeId, TargetId};

/// Hundredths of a target or of a volume's limit, from where on it is said that it gets full.
const NEARLY_FULL_PERCENT: u64 = 95;

/// How bad a trouble is. The worst one decides what `weir status` exits with.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know; nothing is wrong.
    Note,
    /// Something does not work or soon will not; all data is available and redundant.
    Warning,
    /// Data is available with reduced redundancy.
    Degraded,
    /// Data is unavailable or lost.
    Critical,
}

impl Severity {
    pub fn word(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Degraded => "degraded",
            Severity::Critical => "critical",
        }
    }
    pub fn exit_code(self) -> u8 {
        match self {
            Severity::Note => 0,
            Severity::Warning | Severity::Degraded => 1,
            Severity::Critical => 2,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Trouble {
    pub severity: Severity,
    /// The node, target, volume, relation, mount or namespace.
    pub about: String,
    pub text: String,
}

/// What was found out.
pub struct Facts<'a> {
    pub status: &'a ClusterStatus,
    /// Clients whose calls wait.
    pub waiting: ClientsWaiting,
    /// Of nodes, those that are off.
    pub clocks: Clocks,
    /// Why lost targets are not replaced.
    pub rebuild: Vec<(TargetId, String)>,
    /// Of the coordinator.
    pub audit: AuditState,
    /// What starts again what does not run.
    pub restart: String,
    /// Of `weir up` in this directory; none where it is not known.
    pub processes: Vec<ProcessState>,
    pub mounts: Vec<MountState>,
    /// Dead mounts of this machine, of whichever cluster.
    pub dead_mounts: Vec<PathBuf>,
    pub namespaces: Vec<NamespaceFacts>,
    /// URLs of homes and of places for backups that are directories which are not there, where all movers are on this machine.
    pub missing_homes: BTreeSet<String>,
}

pub struct ProcessState {
    pub name: String,
    pub role: RoleName,
    pub lives: bool,
    pub log: PathBuf,
}

/// What the metadata server of a namespace says; an error: it was asked in vain.
pub struct NamespaceFacts {
    pub name: String,
    pub known: Result<Known, String>,
}

#[derive(Default)]
pub struct Known {
    pub volumes: Vec<Volume>,
    pub relations: Vec<RelationInfo>,
    pub backups: Vec<Backup>,
    pub audit: AuditState,
}

impl Facts<'_> {
    fn known(&self) -> impl Iterator<Item = &Known> {
        self.namespaces.iter().filter_map(|n| n.known.as_ref().ok())
    }
    /// The schemes and pools that files are on.
    pub fn in_use(&self) -> InUse {
        let policies = self.known().flat_map(|k| &k.volumes).map(|v| v.policy.clone());
        InUse { default: self.status.map.settings.scheme, policies: policies.collect() }
    }
    fn node_of(&self, target: &Target) -> Option<&Node> {
        self.status.map.node(target.node)
    }
    /// `t3 (storage-3)`
    fn named(&self, target: TargetId) -> String {
        let node = self.status.map.target(target).and_then(|t| self.node_of(t));
        node.map_or_else(|| target.to_string(), |n| format!("{target} ({})", n.name))
    }
}

/// All that is not as it should be, the worst first.
pub fn troubles(facts: &Facts<'_>) -> Vec<Trouble> {
    let mut found = Found(Vec::new());
    let in_use = facts.in_use();
    namespaces(facts, &mut found);
    groups(facts, &in_use, &mut found);
    nodes(facts, &in_use, &mut found);
    targets(facts, &in_use, &mut found);
    facts.rebuild.iter().for_each(|(target, text)| found.degraded(target, text.clone()));
    links(facts, &mut found);
    relations(facts, &mut found);
    standbys(facts, &mut found);
    movers(facts, &mut found);
    volumes(facts, &mut found);
    backups(facts, &mut found);
    mounts(facts, &mut found);
    waits(facts, &mut found);
    facts.clocks.off.iter().for_each(|off| found.warning(&off.node, weir_coord::clocks::trouble(off)));
    audit_logs(facts, &mut found);
    found.0.sort_by_key(|trouble| Reverse(trouble.severity));
    found.0
}

struct Found(Vec<Trouble>);

impl Found {
    fn add(&mut self, severity: Severity, about: impl Display, text: impl Into<String>) {
        self.0.push(Trouble { severity, about: about.to_string(), text: text.into() });
    }
    fn critical(&mut self, about: impl Display, text: impl Into<String>) {
        self.add(Severity::Critical, about, text);
    }
    fn degraded(&mut self, about: impl Display, text: impl Into<String>) {
        self.add(Severity::Degraded, about, text);
    }
    fn warning(&mut self, about: impl Display, text: impl Into<String>) {
        self.add(Severity::Warning, about, text);
    }
    fn note(&mut self, about: impl Display, text: impl Into<String>) {
        self.add(Severity::Note, about, text);
    }
}

/// What calls of clients wait for.
fn waits(facts: &Facts<'_>, found: &mut Found) {
    for client in &facts.waiting.clients {
        for wait in &client.waits {
            let calls = if wait.calls == 1 { "1 call waits" } else { &format!("{} calls wait", wait.calls) };
            let (what, seconds) = (&wait.what, wait.ms / 1000);
            let name = &client.client;
            found.degraded(name, format!("{name}: {calls} for {what}, no answer for {seconds} s"));
        }
    }
}

fn audit_logs(facts: &Facts<'_>, found: &mut Found) {
    let known = facts.namespaces.iter().filter_map(|n| Some((n.name.as_str(), n.known.as_ref().ok()?)));
    let of_namespaces = known.map(|(name, k)| (format!("the metadata server of {name:?}"), &k.audit));
    for (whose, audit) in [("the coordinator".to_owned(), &facts.audit)].into_iter().chain(of_namespaces) {
        let AuditState { waiting, lost, failure, .. } = audit;
        if !failure.is_empty() {
            let text = format!(
                "the audit log of {whose} cannot be written ({failure}): {waiting} records wait, {lost} are lost; check the disk of \
                 its directory"
            );
            found.warning("audit log", text);
        } else if *lost > 0 {
            let text = format!("{lost} records of the audit log of {whose} were lost since it started");
            found.note("audit log", text);
        }
    }
}

fn namespaces(facts: &Facts<'_>, found: &mut Found) {
    let map = &facts.status.map;
    if map.namespaces.is_empty() {
        let text = format!("no metadata server has started yet; there are no files: {}", facts.restart);
        found.critical("meta", text);
    }
    for namespace in map.namespaces.iter().filter(|n| !is_led(map, n)) {
        let (name, restart) = (&namespace.name, &facts.restart);
        let text =
            format!("namespace {name:?} has no active metadata server; files are unavailable: {restart}");
        found.critical(name, text);
    }
    let led = map.namespaces.iter().filter(|n| is_led(map, n));
    led.filter_map(|n| Some((n, copies_trouble(map, n)?)))
        .for_each(|(n, text)| found.degraded(&n.name, text));
    for NamespaceFacts { name, known } in &facts.namespaces {
        if let Err(why) = known {
            let text =
                format!("the metadata server of namespace {name:?} does not answer ({why}); see its log");
            found.critical(name, text);
        }
    }
}

fn groups(facts: &Facts<'_>, in_use: &InUse, found: &mut Found) {
    let used = facts.status.map.groups.iter().filter(|g| in_use.has(g));
    let (lost, poor): (Vec<&Group>, Vec<&Group>) =
        used.filter(|g| !g.is_writable()).partition(|g| g.is_lost());
    if !lost.is_empty() {
        let members = lost.iter().flat_map(|g| &g.members).filter(|m| m.is_lost());
        let without: BTreeSet<TargetId> = members.map(|m| m.target).collect();
        let without: Vec<String> = without.iter().map(TargetId::to_string).collect();
        let text = format!(
            "data is lost on {}: {} returned without what they had, and too few others have it; reads of the lost bytes fail with EIO, and \
             files there cannot be written; stop these targets and put their disks back as they were last, if these exist",
            placement_groups(lost.len()),
            without.join(", ")
        );
        found.critical("placement groups", text);
    }
    if let Some(first) = poor.first() {
        let text = format!(
            "too few members of {} are usable: files on them cannot be written, and not all can be read ({} has {} of {} and needs \
             {}); bring targets back that are down",
            placement_groups(poor.len()),
            first.id,
            first.current_count(),
            first.members.len(),
            first.scheme.data
        );
        found.critical("placement groups", text);
    }
}

fn placement_groups(count: usize) -> String {
    format!("{count} placement group{}", if count == 1 { "" } else { "s" })
}

/// How many groups that are used have a target as a member of this state.
fn count_groups(facts: &Facts<'_>, in_use: &InUse, target: TargetId, state: MemberState) -> usize {
    let is_so =
        |g: &&Group| in_use.has(g) && g.members.iter().any(|m| m.target == target && m.state == state);
    facts.status.map.groups.iter().filter(is_so).count()
}

fn nodes(facts: &Facts<'_>, in_use: &InUse, found: &mut Found) {
    let map = &facts.status.map;
    for node in map.nodes.iter().filter(|n| !n.up) {
        let (name, restart) = (&node.name, &facts.restart);
        match node.role {
            Role::Storage => {
                let missing = |t: &Target| {
                    let groups = count_groups(facts, in_use, t.id, MemberState::Down);
                    format!("{} is missing from {}", t.id, placement_groups(groups))
                };
                let of_node = map.targets.iter().filter(|t| t.node == node.id);
                let missing: Vec<String> = of_node.map(missing).collect();
                let text = format!(
                    "{name} is down: {}; if it returns, what was written meanwhile is repaired: {restart}; if its disk is lost, \
                     `weir target replace` gives it a new one",
                    missing.join(", ")
                );
                found.degraded(name, text);
            }
            // Where one is needed, the namespace says so.
            Role::Meta if map.namespaces.iter().any(|n| !is_led(map, n)) => {}
            Role::Meta | Role::Coordinator => {
                found.warning(name, format!("{name} is down, and another one does its work: {restart}"));
            }
            Role::Mount | Role::Mover | Role::Console | Role::Operator | Role::Auditor => {} // these are no members
        }
    }
}

fn targets(facts: &Facts<'_>, in_use: &InUse, found: &mut Found) {
    for target in &facts.status.map.targets {
        let (id, named) = (target.id, facts.named(target.id));
        let node_is_up = facts.node_of(target).is_some_and(|n| n.up);
        let missing = placement_groups(count_groups(facts, in_use, id, MemberState::Down));
        match target.state {
            TargetState::Failed => found.degraded(
                id,
                format!(
                    "{named} failed with a disk error and is missing from {missing}: repair its disk, restart its process, then run \
                     `weir target clear {id}`; or give it a new disk with `weir target replace {id} DIR`"
                ),
            ),
            TargetState::Down if node_is_up => found.degraded(
                id,
                format!(
                    "{named} is down although its process is up, and is missing from {missing}: see to its disk, and to its \
                     process's log"
                ),
            ),
            TargetState::Down => {} // its node says so
            TargetState::Up if count_groups(facts, in_use, id, MemberState::Down) > 0 => found.degraded(
                id,
                format!("{named} is up and still missing from {missing}: it is being repaired"),
            ),
            TargetState::Up => {}
        }
        let is_behind = |m: &&Member| m.target == id && m.state == MemberState::Behind;
        let repaired = facts.status.map.groups.iter().filter(|g| in_use.has(g) && !g.is_lost());
        let behind: Vec<&Member> = repaired.flat_map(|g| g.members.iter().filter(is_behind)).collect();
        if !behind.is_empty() {
            let text = match behind.iter().any(|m| m.is_lost()) {
                true => "does not have its data yet, and is filled from the others",
                false => "is being repaired",
            };
            found.degraded(id, format!("{named} {text} in {}", placement_groups(behind.len())));
        }
    }
    for report in &facts.status.targets {
        let (id, named) = (report.target, facts.named(report.target));
        if report.stalled_ms > 0 && !report.failed {
            let s = f64::from(report.stalled_ms) / 1e3;
            found.warning(id, format!("the disk of {named} has completed nothing for {s:.1} s: see to it"));
        }
        if report.under_replicated_cells > 0 {
            let n = report.under_replicated_cells;
            let text = format!("{n} cells of stripes on {named} lack redundancy: they are being repaired");
            found.degraded(id, text);
        }
        match (report.damaged_blocks, report.repaired_blocks) {
            (0, _) => {}
            (damaged, repaired) if damaged <= repaired => found.note(
                id,
                format!("{damaged} blocks on {named} failed their checksum and were repaired: watch its disk"),
            ),
            (damaged, repaired) => found.degraded(
                id,
                format!(
                    "{damaged} blocks on {named} failed their checksum, {repaired} of them are repaired: replace its disk if \
                     this continues"
                ),
            ),
        }
        if let Some(percent) = nearly_full(report.used, report.capacity) {
            let free = table::bytes(report.capacity.saturating_sub(report.used));
            let text = format!(
                "{named} is {percent} % full ({free} free), writes fail when it is full: delete files, or add targets"
            );
            found.warning(id, text);
        }
    }
}

/// Pairs of nodes that cannot reach each other. Several cut links of one node are one trouble of that node.
fn links(facts: &Facts<'_>, found: &mut Found) {
    let (map, all) = (&facts.status.map, &facts.status.links);
    let name = |node: NodeId| {
        let targets: Vec<String> =
            map.targets.iter().filter(|t| t.node == node).map(|t| t.id.to_string()).collect();
        let name = map.node(node).map_or_else(|| node.to_string(), |n| n.name.clone());
        if targets.is_empty() { name } else { format!("{} ({name})", targets.join(", ")) }
    };
    let mut of_sender: BTreeMap<&str, Vec<&CutLink>> = BTreeMap::new();
    all.iter().for_each(|link| of_sender.entry(&link.from).or_default().push(link));
    for (from, links) in of_sender {
        let nodes: Vec<String> = links.iter().map(|l| name(l.to)).collect();
        let Some(first) = links.first() else { continue };
        let text = match (links.len(), all.iter().filter(|l| l.to == first.to).count()) {
            (1, 1) => format!("see to the network between them ({})", first.why),
            (1, n) => format!("{n} nodes cannot, see to its network ({})", first.why),
            _ => format!("others reach them, see to the network of {from} ({})", first.why),
        };
        let seconds = first.since_ms / 1000;
        found.warning(
            from,
            format!(
                "{from} has not reached {} for {seconds} s, its calls go around: {text}",
                nodes.join(", ")
            ),
        );
    }
}

/// The percentage, where it is worth a word.
fn nearly_full(used: u64, limit: u64) -> Option<u64> {
    let percent = u128::from(used) * 100 / u128::from(limit.max(1));
    let percent = u64::try_from(percent).unwrap_or(u64::MAX);
    (limit > 0 && percent >= NEARLY_FULL_PERCENT).then_some(percent)
}

fn relations(facts: &Facts<'_>, found: &mut Found) {
    for known in facts.known() {
        for relation in &known.relations {
            let (id, volume, url) = (relation.id, &relation.volume_name, &relation.url);
            let add = |found: &mut Found, text: String| {
                // Evicted data cannot be read while home cannot.
                let away = known.volumes.iter().any(|v| v.id == relation.volume && v.usage.evicted > 0);
                let (severity, more) = match away {
                    true => (Severity::Critical, "; evicted files cannot be read"),
                    false => (Severity::Warning, ""),
                };
                found.add(severity, id, format!("{id}: {text}{more}"));
            };
            match &relation.state {
                _ if facts.missing_homes.contains(url) => add(
                    found,
                    format!(
                        "the home of volume {volume} is missing: there is no directory {url}; make or mount it"
                    ),
                ),
                RelationState::Paused { why } => found.warning(
                    id,
                    format!("{id}: copying of volume {volume} is paused {why}: `weir relation resume {id}`"),
                ),
                _ if !relation.home_failure.is_empty() => add(
                    found,
                    format!("the home {url} of volume {volume} cannot be used: {}", relation.home_failure),
                ),
                RelationState::Diverged { items } => {
                    let plural = if *items == 1 { "" } else { "s" };
                    found.warning(
                        id,
                        format!("{id}: volume {volume} has {items} conflict{plural} at home: `weir relation show {id}`"),
                    );
                }
                RelationState::Synced {} | RelationState::Copying {} => {}
            }
        }
    }
}

/// Those that wait, and members of etcd: one of them has answered, or there would be no status.
fn standbys(facts: &Facts<'_>, found: &mut Found) {
    let is_dead = |p: &&ProcessState| matches!(p.role, RoleName::Coord | RoleName::Etcd) && !p.lives;
    for process in facts.processes.iter().filter(is_dead) {
        let (name, restart) = (&process.name, &facts.restart);
        found.add(Severity::Warning, name, format!("{name} is not running, and may be needed: {restart}"));
    }
}

fn movers(facts: &Facts<'_>, found: &mut Found) {
    // Those of no relation are not known: backups say themselves when they are late.
    let lacks = |k: &&Known| !k.relations.is_empty() && k.relations.iter().all(|r| r.movers == 0);
    let lacking: Vec<&Known> = facts.known().filter(lacks).collect();
    let away = lacking.iter().any(|k| k.volumes.iter().any(|v| v.usage.evicted > 0));
    let (severity, so) = match (lacking.is_empty(), away) {
        (true, _) => (Severity::Warning, ""),
        (false, false) => (Severity::Warning, ", so nothing is copied home or recalled"),
        (false, true) => {
            (Severity::Critical, ", so nothing is copied home or recalled, and evicted files cannot be read")
        }
    };
    let is_dead = |p: &&ProcessState| p.role == RoleName::Mover && !p.lives;
    for process in facts.processes.iter().filter(is_dead) {
        let (name, restart, log) = (&process.name, &facts.restart, process.log.display());
        found.add(severity, name, format!("{name} is not running{so}: {restart} (its log is {log})"));
    }
    if !lacking.is_empty() && !facts.processes.iter().any(|p| is_dead(&p)) {
        found.add(
            severity,
            "movers",
            format!("no mover is running{so}: `weir up --movers 1` or `weir mover` starts one"),
        );
    }
}

fn volumes(facts: &Facts<'_>, found: &mut Found) {
    for volume in facts.known().flat_map(|k| &k.volumes).filter(|v| !v.deleting) {
        let (quota, usage) = (&volume.quota, &volume.usage);
        let bytes = Filled {
            used: usage.bytes,
            hard: quota.bytes_hard,
            soft: quota.bytes_soft,
            since: volume.bytes_over_since,
        };
        let inodes = Filled {
            used: usage.files + usage.directories,
            hard: quota.inodes_hard,
            soft: quota.inodes_soft,
            since: volume.inodes_over_since,
        };
        let name = &volume.name;
        let said = [bytes.said(&table::bytes), inodes.said(&|n| format!("{n} files and directories"))];
        for said in said.into_iter().flatten() {
            let how = format!("delete files there, or raise the limit with `weir volume quota {name}`");
            found.warning(name, format!("volume {name} is {said}: {how}"));
        }
    }
}

/// How much of a volume's limits is used; `since`: it has been over the soft one from then on.
struct Filled {
    used: u64,
    hard: Option<u64>,
    soft: Option<u64>,
    since: Option<Time>,
}

impl Filled {
    fn said(&self, show: &dyn Fn(u64) -> String) -> Option<String> {
        let of = |limit| format!("{} of {}", show(self.used), show(limit));
        let over_soft =
            || Some(format!("above its soft limit ({})", of(self.soft.filter(|_| self.since.is_some())?)));
        let Some(hard) = self.hard else { return over_soft() };
        match nearly_full(self.used, hard) {
            // A limit of 0 is meant to be reached.
            _ if hard == 0 && self.used == 0 => None,
            _ if self.used >= hard => Some(format!("full ({}), so writes fail", of(hard))),
            Some(percent) => Some(format!("{percent} % full ({})", of(hard))),
            None => over_soft(),
        }
    }
}

fn backups(facts: &Facts<'_>, found: &mut Found) {
    for backup in facts.known().flat_map(|k| &k.backups) {
        let (volume, url) = (&backup.volume_name, &backup.url);
        if facts.missing_homes.contains(url) && backup.every_s > 0 {
            let text = format!(
                "backups of volume {volume} cannot be made: there is no directory {url}; make or mount it"
            );
            found.warning(volume, text);
        } else if let Some(complaint) = backup::complaint(backup) {
            found.warning(volume, complaint);
        }
    }
}

fn mounts(facts: &Facts<'_>, found: &mut Found) {
    let restart = &facts.restart;
    for mount in &facts.mounts {
        let (name, at) = (&mount.name, mount.path.display());
        match mount.state {
            Reach::Answers => {}
            Reach::Dead => {
                found.warning(name, format!("{name} at {at} is dead (its process has ended): {restart}"));
            }
            Reach::Silent => found.warning(
                name,
                format!("{name} at {at} does not answer: see whether its process is stopped, and its log"),
            ),
            Reach::NotMounted => found.warning(name, format!("{name} at {at} is not mounted: {restart}")),
        }
        if mount.losses > 0 {
            let last = mount.last_losses.as_array().and_then(|all| all.last());
            let what = last.and_then(|l| l["what"].as_str()).unwrap_or("see its log");
            let times = if mount.losses == 1 { "once".into() } else { format!("{} times", mount.losses) };
            found.critical(
                name,
                format!(
                    "{name} at {at} lost changes or locks {times} since it was mounted; the last: {what}"
                ),
            );
        }
    }
    for path in &facts.dead_mounts {
        let at = path.display();
        let text =
            format!("the mount at {at} is dead (its process has ended): `weir unmount {at}` cleans it up");
        // Of a cluster that is started here all mounts are known: this is one of another cluster, or one that was made by hand.
        let severity = if facts.processes.is_empty() { Severity::Warning } else { Severity::Note };
        found.add(severity, at, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;
    use weir_proto::backup::{BackupEnd, BackupOutcome, BackupRetention};
    use weir_proto::coord::TargetReport;
    use weir_proto::map::{ClusterMap, NamespaceEntry, RunSeen, Scheme, Settings};
    use weir_proto::meta::Usage;
    use weir_proto::relation::{Direction, RelationId, RelationState};
    use weir_proto::version::{LEVEL_MAX, Program};
    use weir_proto::volume::{Policy, Quota, Retention};
    use weir_proto::{ClusterId, DiskUuid, Epoch, InodeId, NamespaceId, NodeId, PgId, VolumeId};

    const HOME: &str = "file:///home";

    /// Two copies on t1 and t2, and a group that nothing is on; all is well.
    struct World {
        status: ClusterStatus,
        processes: Vec<ProcessState>,
        mounts: Vec<MountState>,
        dead_mounts: Vec<PathBuf>,
        known: Result<Known, String>,
        audit: AuditState,
        missing_homes: BTreeSet<String>,
    }

    fn world() -> World {
        let twice = Scheme { data: 1, parity: 1 };
        let node = |id, name: &str, role| Node {
            id: NodeId(id),
            name: name.into(),
            role,
            host: "h".into(),
            addrs: vec![],
            up: true,
            program: Program::this(),
        };
        let target = |id| Target {
            id: TargetId(id),
            uuid: DiskUuid([id as u8; 16]),
            node: NodeId(id),
            pool: "default".into(),
            state: TargetState::Up,
            capacity: 1000,
            last: RunSeen::default(),
            whole: RunSeen::default(),
        };
        let member = |id| Member {
            target: TargetId(id),
            state: MemberState::Current,
            since: Epoch(1),
            lost_at: Epoch(0),
        };
        let group = |id, scheme, members: &[u32]| Group {
            id: PgId(id),
            pool: "default".into(),
            scheme,
            epoch: Epoch(1),
            members: members.iter().map(|id| member(*id)).collect(),
        };
        let report = |id| TargetReport {
            target: TargetId(id),
            failed: false,
            capacity: 1000,
            used: 100,
            under_replicated_cells: 0,
            damaged_blocks: 0,
            repaired_blocks: 0,
            stalled_ms: 0,
            position: 0,
        };
        let leader = NamespaceEntry {
            id: NamespaceId(1),
            name: "root".into(),
            uuid: Default::default(),
            leader: Some(NodeId(3)),
            leader_epoch: Epoch(1),
        };
        let map = ClusterMap {
            cluster: ClusterId([1; 16]),
            version: 1,
            level: LEVEL_MAX,
            settings: Settings { scheme: twice, cell_shift: 19, lease_ms: 1, target_silence_ms: 1 },
            nodes: vec![
                node(1, "storage-1", Role::Storage),
                node(2, "storage-2", Role::Storage),
                node(3, "meta", Role::Meta),
            ],
            targets: vec![target(1), target(2)],
            groups: vec![group(0, twice, &[1, 2]), group(1, Scheme { data: 1, parity: 0 }, &[2])],
            namespaces: vec![leader],
            homes: vec![],
            last_namespace: Default::default(),
            removed: vec![],
            authorities: vec![],
            audits: vec![],
            copies: vec![],
            moves: vec![],
            generations: vec![],
            last_target: Default::default(),
            full: vec![],
            access: Default::default(),
        };
        let process =
            |name: &str, role| ProcessState { name: name.into(), role, lives: true, log: "/w/log/x".into() };
        let mount = MountState {
            name: "mount-1".into(),
            path: "/m".into(),
            state: Reach::Answers,
            losses: 0,
            last_losses: Value::Null,
        };
        World {
            status: ClusterStatus {
                map: Arc::new(map),
                targets: vec![report(1), report(2)],
                uptime_ms: 1,
                links: vec![],
                program: Program::this(),
            },
            processes: vec![process("storage-1", RoleName::Storage), process("mover-1", RoleName::Mover)],
            mounts: vec![mount],
            dead_mounts: vec![],
            known: Ok(Known {
                volumes: vec![volume()],
                relations: vec![relation()],
                backups: vec![backup()],
                audit: AuditState::default(),
            }),
            audit: AuditState::default(),
            missing_homes: BTreeSet::new(),
        }
    }

    fn volume() -> Volume {
        let usage = |bytes| Usage { files: 7, directories: 2, bytes, ..Usage::default() };
        Volume {
            id: VolumeId(2),
            name: "work".into(),
            root: InodeId(9),
            path: "/work".into(),
            owner: 0,
            admins: vec![],
            quota: Quota { bytes_hard: Some(1000), inodes_hard: Some(100), ..Quota::NONE },
            bytes_over_since: None,
            inodes_over_since: None,
            policy: Policy { scheme: None, pool: None },
            retention: Retention::NOTHING,
            created: Time { nanos: 0 },
            deleting: false,
            usage: usage(100),
            in_trash: usage(0),
        }
    }

    fn relation() -> RelationInfo {
        RelationInfo {
            id: RelationId(1),
            volume: VolumeId(2),
            volume_name: "work".into(),
            url: HOME.into(),
            direction: Direction::Push,
            evict: true,
            state: RelationState::Synced {},
            lag_ms: 0,
            backlog_bytes: 0,
            backlog_names: 0,
            unseen_directories: 0,
            rate: 0,
            shipped_bytes: 0,
            shipped_names: 0,
            movers: 1,
            limited_by: String::new(),
            home_failure: String::new(),
            conflicts: vec![],
            scan_age_ms: 0,
        }
    }

    fn backup() -> Backup {
        Backup {
            volume: VolumeId(2),
            volume_name: "work".into(),
            url: "file:///backups".into(),
            by: 0,
            every_s: 86400,
            keep: BackupRetention::default(),
            since: Time { nanos: 0 },
            running: None,
            last: None,
            good: None,
            due: None,
            late: false,
        }
    }

    impl World {
        fn troubles(self) -> Vec<Trouble> {
            troubles(&Facts {
                status: &self.status,
                waiting: ClientsWaiting { clients: vec![] },
                clocks: Clocks { off: vec![] },
                rebuild: vec![],
                audit: self.audit,
                restart: "`weir up --dir /w` starts it again".into(),
                processes: self.processes,
                mounts: self.mounts,
                dead_mounts: self.dead_mounts,
                namespaces: vec![NamespaceFacts { name: "root".into(), known: self.known }],
                missing_homes: self.missing_homes,
            })
        }
        fn known(&mut self) -> &mut Known {
            self.known.as_mut().unwrap()
        }
        fn volume(&mut self) -> &mut Volume {
            &mut self.known().volumes[0]
        }
        fn relation(&mut self) -> &mut RelationInfo {
            &mut self.known().relations[0]
        }
        fn map(&mut self) -> &mut ClusterMap {
            Arc::make_mut(&mut self.status.map)
        }
        /// A storage node is down, and its target missing.
        fn lose(&mut self, id: u32) {
            let map = self.map();
            map.nodes[id as usize - 1].up = false;
            map.targets[id as usize - 1].state = TargetState::Down;
            for member in map.groups.iter_mut().flat_map(|g| &mut g.members).filter(|m| m.target.0 == id) {
                member.state = MemberState::Down;
            }
        }
    }

    #[test]
    fn a_healthy_cluster_has_no_troubles() {
        assert_eq!(world().troubles(), []);
        // Nothing is on the group of t2 alone.
        let mut unused = world();
        unused.map().groups[1].members[0].state = MemberState::Down;
        assert_eq!(unused.troubles(), []);
        // No volume has a home, so nobody needs a mover.
        let mut no_homes = world();
        no_homes.known().relations.clear();
        no_homes.known().backups.clear();
        no_homes.processes.truncate(1);
        assert_eq!(no_homes.troubles(), []);
    }

    #[test]
    fn each_trouble_is_one_sentence_of_its_severity() {
        use Severity::{Critical, Degraded, Note, Warning};
        type Change = fn(&mut World);
        let table: &[(Change, Severity, &str, &str)] = &[
            (
                |w| w.lose(1),
                Degraded,
                "storage-1",
                "storage-1 is down: t1 is missing from 1 placement group; if it returns, what",
            ),
            (
                |w| w.audit = AuditState { waiting: 3, failure: "no space".into(), ..AuditState::default() },
                Warning,
                "audit log",
                "the audit log of the coordinator cannot be written (no space): 3 records wait, 0 are lost",
            ),
            (
                |w| w.known().audit.lost = 2,
                Note,
                "audit log",
                "2 records of the audit log of the metadata server of \"root\" were lost",
            ),
            (|w| w.map().targets[0].state = TargetState::Failed, Degraded, "t1", "`weir target clear t1`"),
            (|w| w.map().targets[0].state = TargetState::Down, Degraded, "t1", "although its process is up"),
            (
                |w| w.map().groups[0].members[0].state = MemberState::Behind,
                Degraded,
                "t1",
                "t1 (storage-1) is being repaired in 1 placement group",
            ),
            (
                |w| {
                    let member = &mut w.map().groups[0].members[0];
                    (member.state, member.lost_at) = (MemberState::Behind, Epoch(2));
                },
                Degraded,
                "t1",
                "t1 (storage-1) does not have its data yet, and is filled from the others in 1 placement group",
            ),
            (
                |w| {
                    for member in w.map().groups[0].members.iter_mut().rev() {
                        (member.state, member.lost_at) = (MemberState::Behind, Epoch(2));
                    }
                },
                Critical,
                "placement groups",
                "data is lost on 1 placement group: t1, t2 returned without what they had",
            ),
            (
                |w| w.status.targets[0].under_replicated_cells = 3,
                Degraded,
                "t1",
                "3 cells of stripes on t1 (storage-1) lack",
            ),
            (|w| w.status.targets[0].damaged_blocks = 2, Degraded, "t1", "2 blocks on t1 (storage-1) failed"),
            (
                |w| (w.status.targets[0].damaged_blocks, w.status.targets[0].repaired_blocks) = (2, 2),
                Note,
                "t1",
                "were repaired",
            ),
            (|w| w.status.targets[0].used = 960, Warning, "t1", "t1 (storage-1) is 96 % full (40 B free)"),
            (|w| w.status.targets[0].stalled_ms = 2500, Warning, "t1", "has completed nothing for 2.5 s"),
            (
                |w| w.map().nodes[2].up = false,
                Critical,
                "root",
                "namespace \"root\" has no active metadata server; files are unavailable: `weir up --dir /w`",
            ),
            (|w| w.map().namespaces.clear(), Critical, "meta", "no metadata server has started yet"),
            (|w| w.known = Err("no answer".into()), Critical, "root", "does not answer (no answer)"),
            (
                |w| w.processes[1].lives = false,
                Warning,
                "mover-1",
                "mover-1 is not running: `weir up --dir /w` starts it again (its log is /w/log/x)",
            ),
            (
                |w| w.relation().movers = 0,
                Warning,
                "movers",
                "no mover is running, so nothing is copied home",
            ),
            (
                |w| w.missing_homes.extend([HOME.into()]),
                Warning,
                "r1",
                "r1: the home of volume work is missing: there is no directory file:///home; make or mount it",
            ),
            (
                |w| w.relation().home_failure = "Permission denied".into(),
                Warning,
                "r1",
                "cannot be used: Permission denied",
            ),
            (
                |w| w.relation().state = RelationState::Paused { why: "by an administrator".into() },
                Warning,
                "r1",
                "is paused by an administrator: `weir relation resume r1`",
            ),
            (
                |w| w.relation().state = RelationState::Diverged { items: 1 },
                Warning,
                "r1",
                "1 conflict at home",
            ),
            (
                |w| w.volume().usage.bytes = 1000,
                Warning,
                "work",
                "volume work is full (1000 B of 1000 B), so",
            ),
            (|w| w.volume().usage.bytes = 950, Warning, "work", "volume work is 95 % full (950 B of 1000 B)"),
            (
                |w| w.volume().usage.files = 98,
                Warning,
                "work",
                "full (100 files and directories of 100 files",
            ),
            (
                |w| {
                    w.volume().quota.bytes_soft = Some(50);
                    w.volume().bytes_over_since = Some(Time { nanos: 5 });
                },
                Warning,
                "work",
                "above its soft limit (100 B of 50 B)",
            ),
            (|w| w.known().backups[0].late = true, Warning, "work", "LATE"),
            (
                |w| {
                    let outcome = BackupOutcome::Failed { why: "no space".into() };
                    let at = Time { nanos: 0 };
                    w.known().backups[0].last = Some(BackupEnd { began: at, ended: at, outcome });
                },
                Warning,
                "work",
                "no space",
            ),
            (
                |w| w.missing_homes.extend(["file:///backups".into()]),
                Warning,
                "work",
                "there is no directory file:///backups",
            ),
            (
                |w| w.mounts[0].state = Reach::Dead,
                Warning,
                "mount-1",
                "mount-1 at /m is dead (its process has ended): `weir up --dir /w`",
            ),
            (|w| w.mounts[0].state = Reach::Silent, Warning, "mount-1", "does not answer"),
            (|w| w.mounts[0].state = Reach::NotMounted, Warning, "mount-1", "is not mounted"),
            (
                |w| (w.mounts[0].losses, w.mounts[0].last_losses) = (2, json!([{ "what": "file i7: gone" }])),
                Critical,
                "mount-1",
                "2 times since it was mounted; the last: file i7: gone",
            ),
            (|w| w.dead_mounts.push("/x".into()), Note, "/x", "`weir unmount /x`"),
        ];
        for (change, severity, about, text) in table {
            let mut world = world();
            change(&mut world);
            let found = world.troubles();
            assert!(found.len() == 1, "{text:?}: {found:#?}");
            let one = &found[0];
            assert_eq!((one.severity, &*one.about), (*severity, *about), "{}", one.text);
            assert!(one.text.contains(text), "{text:?} is not in {:?}", one.text);
        }
    }

    #[test]
    fn a_cut_link_names_both_ends_or_the_one_that_is_cut_off() {
        let reported = |links: &[(&str, u32)]| {
            let mut world = world();
            let link = |(from, to): &(&str, u32)| CutLink {
                from: (*from).into(),
                role: Role::Mount,
                to: NodeId(*to),
                since_ms: 12_345,
                why: "no answer".into(),
            };
            world.status.links = links.iter().map(link).collect();
            world.troubles().into_iter().map(|t| t.text).collect::<Vec<_>>()
        };
        assert_eq!(
            reported(&[("m5", 1)]),
            [
                "m5 has not reached t1 (storage-1) for 12 s, its calls go around: see to the network between them (no answer)"
            ]
        );
        let both = reported(&[("m5", 1), ("m6", 1)]);
        assert!(both.len() == 2 && both.iter().all(|t| t.contains("2 nodes cannot")), "{both:?}");
        let cut_off = reported(&[("m5", 1), ("m5", 2)]);
        assert!(cut_off.len() == 1 && cut_off[0].contains("see to the network of m5"), "{cut_off:?}");
    }

    #[test]
    fn the_worst_trouble_is_first() {
        let mut both = world();
        both.processes[1].lives = false;
        both.lose(1);
        both.lose(2);
        let found = both.troubles();
        assert_eq!(found[0].severity, Severity::Critical);
        assert!(
            found[0].text.starts_with("too few members of 1 placement group are usable"),
            "{}",
            found[0].text
        );
        assert!(found.is_sorted_by_key(|t| Reverse(t.severity)), "{found:#?}");
        assert_eq!(found.last().unwrap().about, "mover-1");
        let mut standby = world();
        (standby.processes[1].role, standby.processes[1].lives) = (RoleName::Coord, false);
        assert!(standby.troubles()[0].text.contains("may be needed"));
    }

    #[test]
    fn what_is_at_home_only_is_unavailable_without_home_or_movers() {
        for change in
            [|w: &mut World| w.missing_homes.extend([HOME.into()]), |w: &mut World| w.relation().movers = 0]
        {
            let mut world = world();
            world.volume().usage.evicted = 10;
            change(&mut world);
            let found = world.troubles();
            assert_eq!(found[0].severity, Severity::Critical, "{found:#?}");
            assert!(found[0].text.contains("evicted files cannot be read"), "{found:#?}");
        }
    }

    /// Files of a volume with a policy of its own are on other groups.
    #[test]
    fn groups_of_a_volumes_policy_count() {
        let mut single = world();
        single.volume().policy.scheme = Some(Scheme { data: 1, parity: 0 });
        single.map().groups[1].members[0].state = MemberState::Down;
        let found = single.troubles();
        assert_eq!(found[0].severity, Severity::Critical, "{found:#?}");
    }
}
