//! The troubles of a cluster for an operator, the worst first: a pure function of the collected facts.
//!
//! A new trouble is one call in a function of the files below (its fact in `Facts`, if that is new), a row of
//! `kinds.rs` and one in the test's table. It has a code that does not change, one sentence that names the
//! fault and its place, and a remedy. Troubles that another one explains are omitted: the reader is in a
//! hurry.
mod clients;
mod cluster;
mod data;
mod fold;
mod kinds;
pub mod leaving;
pub mod overload;
pub mod owners;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod world;

pub use kinds::{kind, page as kinds_page};

use crate::health::InUse;
use crate::machine::{MountState, ProcessState};
use crate::names::OwnerNames;
use leaving::Leaving;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::PathBuf;
use weir_proto::TargetId;
use weir_proto::backup::Backup;
use weir_proto::condition::{NodeCondition, NodeTrouble, REFUSES, Severity};
use weir_proto::coord::{AuditState, ClientsWaiting, Clocks, ClusterStatus};
use weir_proto::enrol::Holder;
use weir_proto::event::Mute;
use weir_proto::export::ExportState;
use weir_proto::life::NodeLife;
use weir_proto::map::{Node, Target};
use weir_proto::meta::SessionShown;
use weir_proto::quota::{OwnerUsage, OwnersNear};
use weir_proto::relation::RelationInfo;
use weir_proto::volume::{Volume, WriteFloor};

/// A node that `weir node remove` cut off cannot simply be started again.
const REMOVED: &str = "its certificate was revoked (`weir node remove`): join it again under a new token";
/// Hundredths of a target or of a volume's limit, from which on it is reported as nearly full.
const NEARLY_FULL_PERCENT: u64 = 95;

pub fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Note => "note",
        Severity::Warning => "warning",
        Severity::Degraded => "degraded",
        Severity::Critical => "critical",
    }
}

/// The worst trouble that is not muted, of a sorted list.
pub fn worst(troubles: &[Trouble]) -> Option<Severity> {
    troubles.first().filter(|t| t.muted_until.is_none()).map(|t| t.severity)
}

/// One word for a cluster, and what it means for the data. The word is that of the worst trouble that is not
/// muted; a muted one still counts for the data.
pub fn state(troubles: &[Trouble]) -> (&'static str, &'static str) {
    let meaning = || {
        let has = |is: &dyn Fn(&Trouble) -> bool| troubles.iter().any(is);
        if has(&|t| t.severity == Severity::Critical) {
            ": data is unavailable or lost"
        } else if has(&Trouble::reduces_redundancy) {
            ": data is available with reduced redundancy"
        } else if has(&|t| t.code == "client-waits") {
            ": all data is redundant, and calls of clients wait"
        } else {
            ": all data is available and redundant"
        }
    };
    match worst(troubles) {
        None | Some(Severity::Note) => ("healthy", ""),
        Some(severity) => (word(severity), meaning()),
    }
}

/// The exit status of `weir status` when this is the worst.
pub fn exit_code(severity: Severity) -> u8 {
    match severity {
        Severity::Note => 0,
        Severity::Warning | Severity::Degraded => 1,
        Severity::Critical => 2,
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trouble {
    pub severity: Severity,
    /// For programs: it does not change.
    pub code: String,
    /// The node, target, volume, relation, mount or namespace.
    pub about: String,
    /// One sentence: the fault.
    pub text: String,
    /// The remedy; empty: none, or it is in the text.
    pub action: String,
    /// A user muted it until then, in seconds since 1970.
    pub muted_until: Option<u64>,
}

impl Trouble {
    /// Data or metadata lacks copies. Calls that wait, or a full etcd, are degraded without that.
    fn reduces_redundancy(&self) -> bool {
        let is_of_data = kind(&self.code).is_some_and(|kind| matches!(kind.part, "storage" | "metadata"));
        self.severity == Severity::Degraded && is_of_data
    }
    /// For the log of events.
    pub fn as_event(&self) -> NodeTrouble {
        let Trouble { severity, code, about, text, action, .. } = self.clone();
        NodeTrouble { code, severity, about, text, action }
    }
    pub fn as_json(&self) -> Value {
        let Trouble { severity, code, about, text, action, muted_until } = self;
        json!({
            "severity": word(*severity), "code": code, "about": about, "text": text, "action": action,
            "muted_until_s": muted_until,
        })
    }
}

/// The collected facts.
pub struct Facts {
    pub status: ClusterStatus,
    /// The last sign of life of each member.
    pub lives: Vec<NodeLife>,
    /// Whose work it is, if the cluster is overloaded.
    pub busiest: Option<overload::Busiest>,
    /// Clients whose calls wait.
    pub waiting: ClientsWaiting,
    /// Nodes whose clock is off.
    pub clocks: Clocks,
    /// The nodes' own reports.
    pub conditions: Vec<NodeCondition>,
    /// The owners of certificates; none if this user may not know them.
    pub holders: Vec<Holder>,
    /// Seconds since 1970.
    pub now_s: u64,
    /// Muted troubles.
    pub mutes: Vec<Mute>,
    /// Queries that were not answered in time, and why.
    pub unanswered: Vec<(String, String)>,
    /// Targets that are lost or drained.
    pub leaving: Leaving,
    /// The coordinator's audit log.
    pub audit: AuditState,
    /// The command that restarts stopped processes.
    pub restart: String,
    /// The processes of `weir up` in this directory; none if they are not known.
    pub processes: Vec<ProcessState>,
    pub mounts: Vec<MountState>,
    /// Dead mounts of this machine, of any cluster.
    pub dead_mounts: Vec<PathBuf>,
    pub namespaces: Vec<NamespaceFacts>,
    pub homes: HomesHere,
    /// Names of the users and groups near their limits.
    pub names: OwnerNames,
}

/// Directories that are homes or places for backups, if all movers are on this machine: their URLs.
#[derive(Default)]
pub struct HomesHere {
    pub missing: BTreeSet<String>,
    /// Their file system does not answer.
    pub silent: BTreeSet<String>,
}

/// The reports of a namespace's metadata server; an error: it did not answer.
pub struct NamespaceFacts {
    pub name: String,
    pub known: Result<Known, String>,
    /// It has started, and waits for earlier clients.
    pub starting: Option<NodeTrouble>,
}

#[derive(Default)]
pub struct Known {
    pub volumes: Vec<Volume>,
    pub write_floors: Vec<WriteFloor>,
    pub relations: Vec<RelationInfo>,
    pub backups: Vec<Backup>,
    pub audit: AuditState,
    pub exports: ExportState,
    pub sessions: Vec<SessionShown>,
    /// Failing jobs of the leader.
    pub failing: Vec<NodeTrouble>,
    /// Users and groups near their limits.
    pub owners: OwnersNear,
}

impl Facts {
    fn known(&self) -> impl Iterator<Item = &Known> + Clone {
        self.namespaces.iter().filter_map(|n| n.known.as_ref().ok())
    }
    /// Users and groups near their limits, as rows.
    pub fn owners_near(&self) -> impl Iterator<Item = &OwnerUsage> + Clone {
        self.known().flat_map(|k| &k.owners.worst)
    }
    /// `weir node remove` took its certificate back, and it has not joined again.
    fn was_removed(&self, node: &str) -> bool {
        let holders = || self.holders.iter().filter(|held| held.name == node);
        holders().next().is_some() && holders().all(|held| held.removed)
    }
    /// The schemes and pools that files use.
    pub fn in_use(&self) -> InUse {
        let policies = self.known().flat_map(|k| &k.volumes).map(|v| v.policy.clone());
        InUse { default: self.status.map.settings.scheme, policies: policies.collect() }
    }
    /// Names of volumes of all namespaces, by number.
    pub fn volume_names(&self) -> BTreeMap<u32, String> {
        let volumes = self.known().flat_map(|k| &k.volumes);
        volumes.map(|volume| (volume.id.0, volume.name.clone())).collect()
    }
    /// Targets that refuse data for want of space, as their nodes report.
    fn refusing(&self) -> impl Iterator<Item = &str> {
        let current = self.conditions.iter().filter(|node| node.last_contact_ms < clients::SILENT_MS);
        let troubles = current.flat_map(|node| &node.condition.troubles);
        troubles.filter(|trouble| trouble.code == REFUSES).map(|trouble| trouble.about.as_str())
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

/// All troubles, the worst first; muted ones last.
pub fn troubles(facts: &Facts) -> Vec<Trouble> {
    let mut found = Found(Vec::new());
    cluster::check(facts, &mut found);
    data::check(facts, &mut found);
    clients::check(facts, &mut found);
    overload::check(facts, &mut found);
    fold::fold(facts, &mut found);
    for trouble in &mut found.0 {
        let is_meant = |mute: &&Mute| {
            mute.code == trouble.code && (mute.about.is_empty() || mute.about == trouble.about)
        };
        trouble.muted_until = facts.mutes.iter().filter(is_meant).map(|mute| mute.until_s).max();
    }
    found.0.sort_by_key(|trouble| (trouble.muted_until.is_some(), Reverse(trouble.severity)));
    found.0
}

struct Found(Vec<Trouble>);

/// The code of a trouble, and its object.
type Of<'a, T> = (&'static str, &'a T);

impl Found {
    fn add<T: Display + ?Sized>(
        &mut self,
        severity: Severity,
        (code, about): Of<'_, T>,
        text: impl Into<String>,
        action: impl Into<String>,
    ) {
        assert!(kind(code).is_some(), "the table of kinds has no {code}");
        let (code, about) = (code.to_owned(), about.to_string());
        self.0.push(Trouble {
            severity,
            code,
            about,
            text: text.into(),
            action: action.into(),
            muted_until: None,
        });
    }
    fn critical<T: Display + ?Sized>(
        &mut self,
        of: Of<'_, T>,
        text: impl Into<String>,
        action: impl Into<String>,
    ) {
        self.add(Severity::Critical, of, text, action);
    }
    fn degraded<T: Display + ?Sized>(
        &mut self,
        of: Of<'_, T>,
        text: impl Into<String>,
        action: impl Into<String>,
    ) {
        self.add(Severity::Degraded, of, text, action);
    }
    fn warning<T: Display + ?Sized>(
        &mut self,
        of: Of<'_, T>,
        text: impl Into<String>,
        action: impl Into<String>,
    ) {
        self.add(Severity::Warning, of, text, action);
    }
    fn note<T: Display + ?Sized>(
        &mut self,
        of: Of<'_, T>,
        text: impl Into<String>,
        action: impl Into<String>,
    ) {
        self.add(Severity::Note, of, text, action);
    }
    /// As a node reports it.
    fn reported(&mut self, trouble: &NodeTrouble) {
        let NodeTrouble { code, severity, about, text, action } = trouble.clone();
        self.0.push(Trouble { severity, code, about, text, action, muted_until: None });
    }
    /// Whether a trouble of this object was found already.
    fn knows(&self, about: &str) -> bool {
        self.0.iter().any(|trouble| trouble.about == about)
    }
}

/// The percentage, if it is high enough to mention.
fn nearly_full(used: u64, limit: u64) -> Option<u64> {
    let percent = u128::from(used) * 100 / u128::from(limit.max(1));
    let percent = u64::try_from(percent).unwrap_or(u64::MAX);
    (limit > 0 && percent >= NEARLY_FULL_PERCENT).then_some(percent)
}
