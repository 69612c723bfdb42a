//! Membership: which nodes may join, under which ids, and what the coordinator itself observes of members.
//!
//! Invariants: one name, one live process; one disk, one live node; ids are never reused.
//! Knows nothing of connections' bytes or of the store: the server carries the decisions out.
use crate::addresses::check_announced;
use crate::decide::{
    HealthLimits, Presence, Returned, SUSPECTED_TOGETHER, Speed, Strikes, Verdict, evaluate, forgive, hangs,
    is_spare, left_out, next_run, rejoin_groups, returned, settle_copies, target_back, target_cleared,
    target_down, target_failed, target_lost, target_put_back,
};
use crate::identity::check_pool_name;
use crate::lives::SignsOfLife;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::{AnnouncedTarget, Join, TargetReport};
use weir_proto::map::{self, ClusterMap, Node, Role, Run, RunSeen, Target, TargetState};
use weir_proto::version::check_level;
use weir_proto::{Error, NodeId, Result, RunId, TargetId};

/// Longest name of a node or a host, in bytes: the host's name, of up to 64, with the role or the machine's
/// id beside it.
const NAME_MAX: usize = 128;
/// A sign of life that is later than the next heartbeat by this is missing.
const SIGN_LATE: Duration = Duration::from_millis(250);
/// Most addresses that one node announces.
const ADDRS_MAX: usize = 16;
/// Most targets that one node brings.
const TARGETS_MAX: usize = 256;

/// A disk must hang alone for this time: when many hung and continue, their reports come one after the other.
/// Some heartbeats.
const HANGS_FOR: Duration = Duration::from_secs(2);

/// For each target, the run it is in and the highest position that it has reported in it.
pub type Positions = BTreeMap<TargetId, (RunId, u64)>;

/// State of one member that is not in the map.
#[derive(Clone, Debug)]
pub struct Member {
    pub instance: u64,
    /// The connection of its `Join`.
    pub connection: u64,
    pub presence: Presence,
    /// Targets that it announced; its other targets in the map are missing.
    pub serves: BTreeSet<TargetId>,
    /// Its process reports how fast its targets are. Otherwise heartbeats have a part of that.
    pub by_life: bool,
}

/// Members, suspicions and reports: everything that a restart forgets.
#[derive(Clone, Default, Debug)]
pub struct Members {
    pub by_node: BTreeMap<NodeId, Member>,
    /// Targets that did not answer although their node is connected.
    pub suspects: BTreeSet<TargetId>,
    /// Targets that were reported as slow or silent, and when last.
    reported: BTreeMap<TargetId, Instant>,
    /// Targets that were much slower than the others of their groups.
    pub slow: BTreeMap<TargetId, Strikes>,
    /// The last report of each target and its machine on how fast they are.
    pub speeds: BTreeMap<TargetId, Speed>,
    /// Targets whose disks hang while others do not, and since when.
    hanging: BTreeMap<TargetId, Instant>,
    /// Signs of life, as they have arrived.
    pub signs: Arc<SignsOfLife>,
    /// The last report of each target.
    pub reports: BTreeMap<TargetId, TargetReport>,
    /// The highest position that each target has reported in its present run.
    pub positions: BTreeMap<TargetId, u64>,
}

impl Members {
    /// After a start: every node that was up is awaited, and every target has the position of its last report
    /// in the run of the map.
    pub fn awaiting(map: &ClusterMap, last: &Positions, now: Instant) -> Members {
        let awaited = |node: &Node| Member {
            instance: 0,
            connection: 0,
            presence: Presence::Awaited { since: now },
            serves: map.targets.iter().filter(|t| t.node == node.id).map(|t| t.id).collect(),
            by_life: false,
        };
        let by_node = map.nodes.iter().filter(|n| n.up).map(|n| (n.id, awaited(n))).collect();
        let position =
            |t: &Target| last.get(&t.id).filter(|(run, _)| *run == t.last.run.id).map(|(_, at)| *at);
        let positions = map.targets.iter().filter_map(|t| Some((t.id, position(t)?))).collect();
        Members { by_node, positions, ..Members::default() }
    }

    /// The instance that holds a node's name now, if it is certainly alive.
    fn live_instance(&self, node: NodeId) -> Option<u64> {
        let member = self.by_node.get(&node)?;
        matches!(member.presence, Presence::Connected { .. }).then_some(member.instance)
    }

    /// Admits a node: its place in the map, and its presence.
    pub fn admit(
        &mut self,
        map: &mut ClusterMap,
        join: &Join,
        connection: u64,
        now: Instant,
    ) -> Result<Admitted> {
        check_join(map, join)?;
        let known = map.nodes.iter().find(|n| n.name == join.name);
        if let Some(node) = known {
            check_same_node(node, join, self.live_instance(node.id))?;
        }
        let node =
            known.map_or_else(|| NodeId(1 + map.nodes.iter().map(|n| n.id.0).max().unwrap_or(0)), |n| n.id);
        for announced in &join.targets {
            self.check_known_target(map, node, announced)?;
        }
        record_node(map, node, join);
        let targets: Vec<TargetId> =
            join.targets.iter().map(|announced| self.record_target(map, node, announced)).collect();
        for target in &targets {
            self.suspects.remove(target);
            self.speeds.remove(target);
            self.hanging.remove(target);
        }
        let presence = Presence::Connected { last_contact: now };
        for (target, announced) in targets.iter().zip(&join.targets) {
            // Until the first heartbeat: the cluster's size is known as soon as it can be used.
            self.reports.entry(*target).or_insert(TargetReport {
                target: *target,
                failed: false,
                capacity: announced.capacity,
                used: 0,
                under_replicated_cells: 0,
                damaged_blocks: 0,
                repaired_blocks: 0,
                stalled_ms: 0,
                position: 0,
            });
        }
        let serves = targets.iter().copied().collect();
        self.by_node
            .insert(node, Member { instance: join.instance, connection, presence, serves, by_life: false });
        Ok(Admitted { node, targets })
    }

    fn check_known_target(&self, map: &ClusterMap, node: NodeId, announced: &AnnouncedTarget) -> Result<()> {
        let Some(known) = map.targets.iter().find(|t| t.uuid == announced.uuid) else { return Ok(()) };
        if known.node != node && self.live_instance(known.node).is_some() {
            let holder = map.node(known.node).map_or("?", |n| n.name.as_str());
            return Err(Error::exists(format!(
                "target {} (disk {}) is served by node {holder:?}",
                known.id, known.uuid
            ))
            .hint("two nodes were given the same or a copied directory"));
        }
        if known.pool != announced.pool {
            return Err(Error::invalid(format!(
                "target {} is in pool {:?}, not in {:?}",
                known.id, known.pool, announced.pool
            ))
            .hint("a target keeps its pool"));
        }
        Ok(())
    }

    /// Whether a member gives signs of life now. `interval_ms`: of heartbeats.
    pub fn gave_sign(&self, node: NodeId, now: Instant, interval_ms: u32) -> bool {
        let within = Duration::from_millis(interval_ms.into()) + SIGN_LATE;
        let member = self.by_node.get(&node);
        member.is_some_and(|member| match member.presence {
            Presence::Connected { last_contact } => now.since(last_contact) < within,
            Presence::Awaited { .. } | Presence::Gone => false,
        })
    }

    /// A heartbeat of `node` on `connection`. `Stale`: it is not a member (any more) and must join again.
    pub fn heartbeat(
        &mut self,
        map: &mut ClusterMap,
        node: NodeId,
        connection: u64,
        reports: Vec<TargetReport>,
        now: Instant,
    ) -> Result<()> {
        let member = self.member_on(node, connection)?;
        member.presence = Presence::Connected { last_contact: now };
        let (serves, by_life) = (member.serves.clone(), member.by_life);
        for report in reports.into_iter().filter(|r| serves.contains(&r.target)) {
            if report.failed && target_failed(map, report.target) {
                tracing::error!("{} failed: its disk is not used any more", report.target);
            }
            if !by_life {
                let stalled = Duration::from_millis(report.stalled_ms.into());
                self.note_speed(map, report.target, Speed { stalled, ..Speed::default() }, now);
            }
            self.note_position(report.target, report.position);
            self.reports.insert(report.target, report);
        }
        Ok(())
    }

    pub fn note_position(&mut self, target: TargetId, position: u64) {
        let known = self.positions.entry(target).or_default();
        *known = position.max(*known);
    }

    pub fn note_reported(&mut self, target: TargetId, now: Instant) {
        self.reported.retain(|_, at| now.since(*at) <= SUSPECTED_TOGETHER);
        self.reported.insert(target, now);
    }
    /// The answers of targets, with those marked that were reported a moment ago.
    pub fn with_reported(
        &self,
        mut alive: BTreeMap<TargetId, Speed>,
        now: Instant,
    ) -> BTreeMap<TargetId, Speed> {
        for (target, speed) in &mut alive {
            speed.suspected =
                self.reported.get(target).is_some_and(|at| now.since(*at) <= SUSPECTED_TOGETHER);
        }
        alive
    }

    /// The report of a target and its machine on themselves. True: its disk hangs, so that it counts as one
    /// that does not answer.
    pub fn note_speed(&mut self, map: &ClusterMap, target: TargetId, speed: Speed, now: Instant) -> bool {
        self.speeds.insert(target, speed);
        // A target without a report is not slow.
        let speed_of = |t: &Target| self.speeds.get(&t.id).copied().unwrap_or_default();
        let is_other = |t: &&Target| t.id != target && t.state == TargetState::Up;
        let hangs_now = !speed.completes() && {
            let others: Vec<Speed> = map.targets.iter().filter(is_other).map(speed_of).collect();
            hangs(&speed, is_spare(map, target), &others)
        };
        if !hangs_now {
            self.hanging.remove(&target);
            return false;
        }
        let since = *self.hanging.entry(target).or_insert(now);
        let is_out = now.since(since) >= HANGS_FOR;
        if is_out && self.suspects.insert(target) {
            tracing::warn!(
                "{target} hangs: its disk has completed nothing for {} s",
                speed.stalled.as_secs()
            );
        }
        is_out
    }

    /// Signs of life that have arrived, by connection: they count from then on.
    pub fn note_signs(&mut self, map: &mut ClusterMap, now: Instant) {
        let (mut lives, signs) = (Vec::new(), self.signs.all());
        for member in self.by_node.values_mut() {
            let Some(sign) = signs.get(&member.connection) else { continue };
            if let Presence::Connected { last_contact } = &mut member.presence {
                *last_contact = sign.at.max(*last_contact);
                member.by_life = sign.life.as_ref().is_some_and(|(_, life)| !life.targets.is_empty());
                let life = sign.life.iter().map(|(_, life)| life.clone());
                lives.extend(life.map(|life| (life, member.serves.clone())));
            }
        }
        for (life, serves) in lives {
            for target in life.targets.iter().filter(|t| serves.contains(&t.target)) {
                if target.failed && target_failed(map, target.target) {
                    tracing::error!("{} failed: its disk is not used any more", target.target);
                }
                self.note_speed(map, target.target, Speed::of(target, life.pressure.as_ref()), now);
            }
        }
    }

    /// A failed target may be used again, unless its own process still reports the failure.
    pub fn clear_target(&self, map: &mut ClusterMap, target: TargetId) -> Result<()> {
        let known =
            map.target(target).ok_or_else(|| Error::not_found(format!("there is no target {target}")))?;
        let still = self.reports.get(&target).is_some_and(|r| r.failed);
        if still && self.live_instance(known.node).is_some() {
            return Err(Error::invalid(format!(
                "the process that serves {target} reported that its disk failed"
            ))
            .hint("repair or replace the disk, start the process again, then clear the target"));
        }
        if !target_cleared(map, target) {
            return Err(Error::exists(format!(
                "{target} is in service: it has not failed, so there is nothing to clear"
            )));
        }
        Ok(())
    }

    /// The connection on which a node joined last. If it differs: another process, or the same one after it
    /// was declared down.
    pub fn joined_on(&self, node: NodeId) -> Option<u64> {
        self.by_node.get(&node).map(|m| m.connection)
    }

    /// The member that joined as `node` on this connection.
    pub fn member_on(&mut self, node: NodeId, connection: u64) -> Result<&mut Member> {
        self.by_node
            .get_mut(&node)
            .filter(|m| m.connection == connection && matches!(m.presence, Presence::Connected { .. }))
            .ok_or_else(|| {
                Error::stale(format!(
                    "{node} did not join on this connection, or was declared down: join again"
                ))
            })
    }

    /// The connection ended: the member that joined on it is gone.
    pub fn disconnected(&mut self, connection: u64) {
        for member in self.by_node.values_mut().filter(|m| m.connection == connection) {
            if matches!(member.presence, Presence::Connected { .. }) {
                member.presence = Presence::Gone;
            }
        }
    }

    /// The coordinator was stalled for `delay` since its last check.
    pub fn forgive(&mut self, delay: Duration, now: Instant) {
        for member in self.by_node.values_mut() {
            member.presence = forgive(member.presence, delay, now);
        }
    }

    /// Updates the map to the known state: nodes, targets, and the targets' states in their groups.
    pub fn reconcile(&mut self, map: &mut ClusterMap, now: Instant, limits: &HealthLimits) {
        let left_out = left_out(map);
        let verdicts: Vec<(NodeId, Verdict)> = map
            .nodes
            .iter()
            .map(|n| {
                (n.id, evaluate(self.by_node.get(&n.id).map_or(Presence::Gone, |m| m.presence), now, limits))
            })
            .collect();
        for (node, verdict) in verdicts {
            match verdict {
                Verdict::Wait => continue,
                Verdict::Up => set_up(map, node, true, ""),
                Verdict::Down(why) => {
                    set_up(map, node, false, why);
                    if let Some(member) = self.by_node.get_mut(&node) {
                        member.presence = Presence::Gone; // it must join again
                    }
                }
            }
            self.reconcile_targets(map, node, verdict == Verdict::Up, &left_out, now);
        }
        settle_copies(map);
    }

    fn reconcile_targets(
        &self,
        map: &mut ClusterMap,
        node: NodeId,
        node_up: bool,
        left_out: &BTreeSet<TargetId>,
        now: Instant,
    ) {
        let of_node: Vec<TargetId> = map.targets.iter().filter(|t| t.node == node).map(|t| t.id).collect();
        let serves = |t: &TargetId| self.by_node.get(&node).is_some_and(|m| m.serves.contains(t));
        for target in of_node {
            if node_up && serves(&target) && !self.suspects.contains(&target) {
                if !left_out.contains(&target) {
                    continue;
                }
                let demoted = self.slow.get(&target).is_some_and(|s| s.is_demoted(now));
                if target_back(map, target) || !demoted && rejoin_groups(map, target) {
                    tracing::info!("{target} is back");
                }
            } else if target_down(map, target) {
                tracing::warn!("{target} is down");
            }
        }
    }

    /// A target whose entry changes anyway gets its reported position in the map. Positions of all others
    /// become durable a second later, outside the map, which every process receives.
    pub fn record_positions(&self, published: &ClusterMap, draft: &mut ClusterMap) {
        let before = published.targets.iter().map(Some).chain(std::iter::repeat(None));
        for (before, target) in before.zip(&mut draft.targets) {
            if before != Some(&*target) {
                self.record_position(target);
            }
        }
    }

    fn record_position(&self, target: &mut Target) {
        let reported = self.positions.get(&target.id).copied().unwrap_or_default();
        target.last.position = target.last.position.max(reported);
    }

    /// Records an announced target in the map, and checks whether it still has its data.
    fn record_target(&mut self, map: &mut ClusterMap, node: NodeId, announced: &AnnouncedTarget) -> TargetId {
        let history = &announced.history;
        let seen = |before| RunSeen { run: next_run(before, history), position: history.position };
        let Some(known) = map.targets.iter().position(|t| t.uuid == announced.uuid) else {
            let newest = map.targets.iter().map(|t| t.id).max().unwrap_or_default();
            let id = TargetId(1 + newest.max(map.last_target).0);
            map.targets.push(Target {
                id,
                uuid: announced.uuid,
                node,
                pool: announced.pool.clone(),
                state: TargetState::Down, // until the reconciliation that follows
                capacity: announced.capacity,
                last: seen(Run::default()),
                whole: RunSeen::default(),
            });
            return id;
        };
        let id = map.targets[known].id;
        self.record_position(&mut map.targets[known]);
        let verdict = returned(&map.targets[known], history);
        let places = map.groups.iter().flat_map(|g| &g.members).filter(|m| m.target == id);
        let (lost, had): (Vec<bool>, Vec<bool>) = places.map(map::Member::is_lost).partition(|lost| *lost);
        let entry = &mut map.targets[known];
        (entry.node, entry.capacity) = (node, announced.capacity);
        if verdict == Returned::SameRun {
            return id;
        }
        self.positions.remove(&id);
        let before = entry.last;
        entry.last = seen(before.run);
        match verdict {
            Returned::SameRun | Returned::Whole => {}
            Returned::PutBack => {
                entry.whole = RunSeen::default();
                tracing::info!("{id} has its data again");
                target_put_back(map, id);
            }
            Returned::Lost(why) => {
                // The right disks differ between groups that had lost their data earlier and groups that lose
                // it now, so none is recorded.
                match (lost.is_empty(), had.is_empty()) {
                    (true, _) => entry.whole = before,
                    (false, true) => {}
                    (false, false) => entry.whole = RunSeen::default(),
                }
                tracing::error!(
                    "{id} returned without its data ({why}): it is refilled from the others before it is read"
                );
                target_lost(map, id);
            }
        }
        id
    }
}

/// The ids assigned to a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Admitted {
    pub node: NodeId,
    /// In the order of the announcement.
    pub targets: Vec<TargetId>,
}

fn check_join(map: &ClusterMap, join: &Join) -> Result<()> {
    if join.cluster.is_some_and(|c| c != map.cluster) {
        return Err(Error::denied(format!(
            "node {:?} belongs to cluster {}, this is cluster {}",
            join.name,
            join.cluster.map(|c| c.to_string()).unwrap_or_default(),
            map.cluster
        ))
        .hint("correct the coordinator's address, or the node's directory"));
    }
    check_level(&format!("node {:?}", join.name), join.program.level, map.level)?;
    if join.program.release.len() > NAME_MAX || join.program.release.chars().any(char::is_control) {
        return Err(Error::invalid(format!(
            "node {:?} has a release of more than {NAME_MAX} printable bytes",
            join.name
        )));
    }
    let (rack, host) = join.host.split_once('/').unwrap_or(("-", &join.host));
    for (what, text) in [("node name", join.name.as_str()), ("rack", rack), ("host id", host)] {
        if text.is_empty() || text.len() > NAME_MAX || text.chars().any(|c| c.is_control() || c == '/') {
            return Err(Error::invalid(format!(
                "{what} {text:?}: expected 1 to {NAME_MAX} printable bytes without '/'"
            )));
        }
    }
    if join.addrs.len() > ADDRS_MAX || join.targets.len() > TARGETS_MAX {
        return Err(Error::invalid(format!(
            "node {:?} announces {} addresses and {} targets; at most {ADDRS_MAX} and {TARGETS_MAX} are allowed",
            join.name,
            join.addrs.len(),
            join.targets.len()
        )));
    }
    if join.addrs.is_empty() {
        return Err(Error::invalid(format!(
            "node {:?} announces no address, so it cannot be reached",
            join.name
        )));
    }
    for addr in &join.addrs {
        check_announced(&join.name, addr)?;
    }
    if join.role != Role::Storage && !join.targets.is_empty() {
        return Err(Error::invalid(format!(
            "node {:?} announces targets, and is not a storage node",
            join.name
        )));
    }
    for (i, announced) in join.targets.iter().enumerate() {
        check_pool_name(&announced.pool)?;
        if join.targets[..i].iter().any(|o| o.uuid == announced.uuid) {
            return Err(Error::invalid(format!(
                "node {:?} announces disk {} twice",
                join.name, announced.uuid
            ))
            .hint("one directory is listed, or was copied, twice"));
        }
    }
    Ok(())
}

fn check_same_node(node: &Node, join: &Join, live_instance: Option<u64>) -> Result<()> {
    if node.role != join.role {
        return Err(Error::exists(format!("the name {:?} belongs to a node of another role", join.name))
            .hint("give this one a name of its own"));
    }
    if live_instance.is_some_and(|instance| instance != join.instance) {
        return Err(Error::exists(format!(
            "a node named {:?} is running already (host {:?})",
            join.name, node.host
        ))
        .hint("stop it first, or choose another name"));
    }
    Ok(())
}

fn record_node(map: &mut ClusterMap, id: NodeId, join: &Join) {
    let node = Node {
        id,
        name: join.name.clone(),
        role: join.role,
        host: join.host.clone(),
        addrs: join.addrs.clone(),
        up: map.node(id).is_some_and(|n| n.up),
        program: join.program.clone(),
    };
    match map.nodes.iter_mut().find(|n| n.id == id) {
        Some(known) => *known = node,
        None => map.nodes.push(node),
    }
}

fn set_up(map: &mut ClusterMap, node: NodeId, up: bool, why: &str) {
    if let Some(entry) = map.nodes.iter_mut().find(|n| n.id == node && n.up != up) {
        entry.up = up;
        if up {
            tracing::info!("node {:?} ({node}) is up", entry.name);
        } else {
            tracing::warn!("node {:?} ({node}) is down: {why}", entry.name);
        }
    }
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
