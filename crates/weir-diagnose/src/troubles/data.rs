//! Troubles of the cluster's data and its homes: volumes, homes, movers, backups, exports, and jobs of the
//! metadata server.
use super::{Facts, Found, Known, nearly_full, owners};
use crate::backups;
use crate::machine::{ProcessState, RoleName};
use crate::quantity::{self, lasting};
use weir_proto::condition::{NodeTrouble, STARTS, Severity};
use weir_proto::export::ExportState;
use weir_proto::map::Group;
use weir_proto::meta::Time;
use weir_proto::quota::NEAR_LIMIT_PERCENT;
use weir_proto::relation::{RelationInfo, RelationState};
use weir_proto::split_hint;

/// In the failure of a call at home that was given up (`weir-home`).
const DOES_NOT_ANSWER: &str = " does not answer (";
/// A home that lags by more and receives nothing has stopped.
const LAGS_MS: u64 = 15 * 60 * 1000;

pub(super) fn check(facts: &Facts, found: &mut Found) {
    for known in facts.known() {
        known.relations.iter().for_each(|relation| of_relation(facts, known, relation, found));
    }
    standbys(facts, found);
    movers(facts, found);
    volumes(facts, found);
    near_limits(facts, found);
    write_floors(facts, found);
    backups(facts, found);
    for namespace in &facts.namespaces {
        let Ok(known) = &namespace.known else { continue };
        exports(&namespace.name, &known.exports, facts.now_s, found);
        // A start is named with its namespace.
        known
            .failing
            .iter()
            .filter(|trouble| trouble.code != STARTS)
            .for_each(|trouble| found.reported(trouble));
    }
}

fn of_relation(facts: &Facts, known: &Known, relation: &RelationInfo, found: &mut Found) {
    let (id, volume, url) = (relation.id, &relation.volume_name, &relation.url);
    // Evicted data cannot be read while home cannot.
    let away = known.volumes.iter().any(|v| v.id == relation.volume && v.usage.evicted > 0);
    let (severity, more) = match away {
        true => (Severity::Critical, "; evicted files cannot be read"),
        false => (Severity::Warning, ""),
    };
    let resume = format!("`weir relation resume {id}`");
    match &relation.state {
        _ if facts.homes.missing.contains(url) => {
            let text =
                format!("{id}: the home of volume {volume} is missing: there is no directory {url}{more}");
            found.add(severity, ("home-missing", &id), text, "make or mount it");
        }
        _ if facts.homes.silent.contains(url) => {
            let text = format!("{id}: the home of volume {volume} does not answer: {url}{more}");
            found.add(severity, ("home-silent", &id), text, "see to the file system that it is on");
        }
        _ if silence(facts, url).is_some() => {
            let why = silence(facts, url).unwrap_or_default();
            let text = format!("{id}: the home of volume {volume} does not answer: {why}{more}");
            found.add(
                severity,
                ("home-silent", &id),
                text,
                "see to its server, or to the file system that it is on",
            );
        }
        RelationState::Paused { why } => {
            let text = format!("{id}: copying of volume {volume} is paused {why}");
            found.warning(("relation-paused", &id), text, resume);
        }
        _ if !relation.home_failure.is_empty() => {
            let failure = relation.home_failure.as_str();
            let remedy = "see to the home; the mover tries again by itself";
            let (why, action) = split_hint(failure);
            let action = action.unwrap_or(remedy);
            if why.contains(DOES_NOT_ANSWER) {
                let text = format!("{id}: the home of volume {volume} does not answer: {why}{more}");
                let action =
                    "see to its server, or to the file system that it is on; the mover tries again by itself";
                return found.add(severity, ("home-silent", &id), text, action);
            }
            let text = format!("{id}: the home {url} of volume {volume} cannot be used: {why}{more}");
            found.add(severity, ("home-refused", &id), text, action);
        }
        RelationState::Diverged { items } => {
            let plural = if *items == 1 { "" } else { "s" };
            let text = format!("{id}: volume {volume} has {items} conflict{plural} at home");
            found.warning(("home-conflicts", &id), text, format!("`weir relation show {id}`"));
        }
        RelationState::Copying {} if relation.lag_ms > LAGS_MS => lags(relation, found),
        RelationState::Synced {} | RelationState::Copying {} => {}
    }
}

/// A mover's report about a home whose calls hang.
fn silence<'a>(facts: &'a Facts, url: &str) -> Option<&'a str> {
    let troubles = facts.conditions.iter().flat_map(|node| &node.condition.troubles);
    let of_home = |t: &&NodeTrouble| t.code == "home-silent" && t.about == url;
    troubles.into_iter().find(of_home).map(|t| t.text.as_str())
}

/// One that lags far and receives data has much to copy; one that receives none has stopped.
fn lags(relation: &RelationInfo, found: &mut Found) {
    let (id, volume) = (relation.id, &relation.volume_name);
    let (lag, backlog) = (lasting(relation.lag_ms / 1000), quantity::bytes(relation.backlog_bytes));
    let limit = match relation.limited_by.as_str() {
        "" => String::new(),
        by => format!(", limited by {by}"),
    };
    let text = format!("{id}: the home of volume {volume} is {lag} behind ({backlog} to copy{limit})");
    match relation.rate {
        0 => found.warning(("home-lags", &id), text, format!("nothing is copied: `weir relation show {id}`")),
        rate => {
            let action = format!("it gets {}/s: nothing to do if that is as planned", quantity::bytes(rate));
            found.note(("home-lags", &id), text, action);
        }
    }
}

/// Standby coordinators, and members of etcd: one of them has answered, or there would be no status.
fn standbys(facts: &Facts, found: &mut Found) {
    let is_dead = |p: &&ProcessState| matches!(p.role, RoleName::Coord | RoleName::Etcd) && !p.lives;
    for process in facts.processes.iter().filter(is_dead) {
        let name = &process.name;
        let text = format!("{name} is not running, and may be needed");
        found.warning(("standby-down", name), text, facts.restart.clone());
    }
    for process in facts.processes.iter().filter(|p| p.role == RoleName::Console && !p.lives) {
        let text = "the console is not running";
        found.warning(("console-down", &process.name), text, facts.restart.clone());
    }
}

fn movers(facts: &Facts, found: &mut Found) {
    // Movers of no relation are not known: backups report themselves when they are late.
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
        let action = format!("{restart} (its log is {log})");
        found.add(severity, ("mover-down", name), format!("{name} is not running{so}"), action);
    }
    if !lacking.is_empty() && !facts.processes.iter().any(|p| is_dead(&p)) {
        let action = "`weir up --movers 1` or `weir mover` starts one";
        found.add(severity, ("mover-missing", "movers"), format!("no mover is running{so}"), action);
    }
}

fn volumes(facts: &Facts, found: &mut Found) {
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
        let texts = [bytes.shown(&quantity::bytes), inodes.shown(&|n| format!("{n} files and directories"))];
        for text in texts.into_iter().flatten() {
            let action = format!("delete files there, or raise the limit with `weir volume quota {name}`");
            found.warning(("volume-full", name), format!("volume {name} is {text}"), action);
        }
    }
}

/// Users and groups near their limits: the fullest, and how many others there are.
fn near_limits(facts: &Facts, found: &mut Found) {
    let now_s = i64::try_from(facts.now_s).unwrap_or(i64::MAX);
    for namespace in &facts.namespaces {
        let Ok(known) = &namespace.known else { continue };
        for row in &known.owners.worst {
            if let Some((text, action)) = owners::sentence(row, &facts.names, now_s) {
                found.note((owners::CODE, &owners::about(row, &facts.names)), text, action);
            }
        }
        let all = known.owners.users + known.owners.groups;
        let more = all.saturating_sub(known.owners.worst.len() as u64);
        if more > 0 {
            let text = format!(
                "{more} more users and groups use {NEAR_LIMIT_PERCENT} % or more of a limit of theirs in namespace {:?}",
                namespace.name
            );
            found.note((owners::CODE, &namespace.name), text, "`weir volume quota VOLUME` lists them");
        }
    }
}

/// Volumes that take no writes in some groups, because these have fewer current members than the floor.
fn write_floors(facts: &Facts, found: &mut Found) {
    let map = &facts.status.map;
    for known in facts.known() {
        for floor in &known.write_floors {
            let Some(volume) = known.volumes.iter().find(|v| v.id == floor.volume) else { continue };
            let scheme = volume.policy.scheme.unwrap_or(map.settings.scheme);
            let needed = usize::from(floor.members).min(scheme.width());
            let is_its = |g: &&Group| {
                g.scheme == scheme && volume.policy.pool.as_ref().is_none_or(|pool| *pool == g.pool)
            };
            let below = |g: &&Group| g.is_writable() && g.current_count() < needed;
            let short: Vec<&Group> = map.groups.iter().filter(is_its).filter(below).collect();
            let Some(current) = short.iter().map(|g| g.current_count()).min() else { continue };
            let name = &volume.name;
            let plural = |n: usize| if n == 1 { "" } else { "s" };
            let which = match short.len() {
                1 => format!("1 placement group that has {current} current member{}", plural(current)),
                n => format!(
                    "{n} placement groups, the worst of which has {current} current member{}",
                    plural(current)
                ),
            };
            let text = format!("volume {name} takes no writes in {which}; its write floor is {needed}");
            let action = format!(
                "see to the targets that are missing, or lower the floor with `weir volume policy {name} \
                 --write-floor`"
            );
            found.add(Severity::Critical, ("volume-below-floor", name), text, action);
        }
    }
}

/// The used part of a volume's limits; `since`: it has been over the soft one from then on.
struct Filled {
    used: u64,
    hard: Option<u64>,
    soft: Option<u64>,
    since: Option<Time>,
}

impl Filled {
    fn shown(&self, show: &dyn Fn(u64) -> String) -> Option<String> {
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

fn backups(facts: &Facts, found: &mut Found) {
    for backup in facts.known().flat_map(|k| &k.backups) {
        let (volume, url) = (&backup.volume_name, &backup.url);
        if facts.homes.missing.contains(url) && backup.every_s > 0 {
            let text = format!("backups of volume {volume} cannot be made: there is no directory {url}");
            found.warning(("backup-place-missing", volume), text, "make or mount it");
        } else if let Some(complaint) = backups::complaint(backup) {
            let action = format!("`weir volume show {volume}` has its backups");
            found.warning(("backup-bad", volume), complaint, action);
        }
    }
}

fn exports(name: &str, exports: &ExportState, now_s: u64, found: &mut Found) {
    let ExportState { dir, every_s, last, failure, .. } = exports;
    if *every_s == 0 {
        return;
    }
    let action =
        format!("`weir namespace exports {name}` shows the schedule; see to {dir} on the metadata machine");
    if !failure.is_empty() {
        let text = format!("the metadata of namespace {name:?} was not exported to {dir}: {failure}");
        return found.warning(("export-failed", name), text, action);
    }
    let began = last.as_ref().and_then(|last| u64::try_from(last.began.nanos / 1_000_000_000).ok());
    let age = began.map(|began| now_s.saturating_sub(began));
    if let Some(age) = age.filter(|age| *age > 2 * u64::from(*every_s)) {
        let (age, every) = (lasting(age), lasting(u64::from(*every_s)));
        let text =
            format!("the last export of namespace {name:?} began {age} ago, and one is due every {every}");
        found.warning(("export-late", name), text, action);
    }
}
