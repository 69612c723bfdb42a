//! Suspected targets: a reported target is probed, and its reporters wait for the result.
use super::batch::{Batch, newest, refuse};
use super::event::{Answer, Event, Probe};
use super::{Owner, SUSPECT_PROBE_INTERVAL};
use crate::decide::{Presence, Speed, Strikes, Unanswered, demote_slow, is_out, is_spare, needed_without};
use crate::probe::{
    LAST_PROBE_PATIENCE, PROBE_PATIENCE, ProbeBy, QUICK_PROBE_PATIENCE, Seen, probe, probe_each, report_each,
};
use std::collections::{BTreeMap, BTreeSet};
use weir_env::Instant;
use weir_proto::coord::{MapReply, ReportTarget, Suspicion};
use weir_proto::map::{ClusterMap, MemberState, Node, Role, TargetState};
use weir_proto::{Error, TargetId};
use weir_rpc::Identity;

impl Owner {
    /// A client or member could not use a target. The coordinator's own observation decides.
    pub(super) fn reported(&mut self, report: ReportTarget, answer: Answer<MapReply>, batch: &mut Batch) {
        let Some(group) = batch.draft.group(report.group) else {
            return refuse(answer, Error::not_found(format!("no placement group {}", report.group)));
        };
        let Some(member) = group.members.iter().find(|m| m.target == report.target) else {
            return refuse(
                answer,
                Error::invalid(format!("{} is not a member of {}", report.target, report.group)),
            );
        };
        let reporter_is_late = group.epoch > report.epoch || member.state == MemberState::Down;
        if reporter_is_late {
            return batch.after(answer, newest);
        }
        self.members.note_reported(report.target, self.env.clock.now());
        match report.suspicion {
            Suspicion::Failed => {
                if let Some(more) = self.env.watch.line("a target is reported") {
                    tracing::warn!("{} is reported: {}{more}", report.target, report.why);
                }
            }
            Suspicion::Unreachable | Suspicion::Slow => {
                tracing::debug!("{} is suspected: {}", report.target, report.why)
            }
        }
        self.start_probe(report.target, report.suspicion, &batch.draft).push(answer);
    }

    /// Probes the target, unless a probe is running; returns the list of callers that wait for it.
    fn start_probe(
        &mut self,
        target: TargetId,
        suspicion: Suspicion,
        map: &ClusterMap,
    ) -> &mut Vec<Answer<MapReply>> {
        let running = self.probing.contains_key(&(target, suspicion));
        if let (false, Some(events)) = (running, self.self_events.upgrade()) {
            let (env, who) = (self.env.clone(), self.identity(map));
            let (joined, by) = (self.joined_on(target, map), self.probed_by(target, map));
            let patience = match suspicion {
                Suspicion::Failed => PROBE_PATIENCE,
                Suspicion::Unreachable | Suspicion::Slow => QUICK_PROBE_PATIENCE,
            };
            let others = match suspicion {
                Suspicion::Slow => needed_without(map, target),
                Suspicion::Failed | Suspicion::Unreachable => BTreeSet::new(),
            };
            let others = others.into_iter().map(|other| (other, self.probed_by(other, map))).collect();
            let signs = self.members.signs.clone();
            let mut answers = probe_each(&self.env, &who, others, patience);
            self.env.tasks.spawn("probe a target", async move {
                let life = match &by {
                    ProbeBy::Life(connection) => Some(connection.clone()),
                    ProbeBy::Data(_) => None,
                };
                let outcome = probe(env.clone(), who, by, target, patience).await;
                if let (Some(connection), Ok(_)) = (&life, &outcome) {
                    signs.note(connection, env.clock.now());
                }
                let mut alive = BTreeMap::new();
                if outcome.is_ok() {
                    while let Some(other) = answers.recv().await {
                        alive.extend((!other.failed).then_some((other.target, other.speed)));
                    }
                }
                let probe = Probe { target, suspicion, by_life: life.is_some(), outcome, alive };
                let probed = Event::Probed { probe, joined };
                let _ = events.send(probed).await; // the coordinator may be gone
            });
        }
        self.probing.entry((target, suspicion)).or_default()
    }

    /// Asks all targets that are up in parallel; their answers arrive as an event.
    pub(super) fn ask_positions(&self, map: &ClusterMap, answer: Answer<()>) {
        let Some(events) = self.self_events.upgrade() else { return };
        let up = map.targets.iter().filter(|t| t.state == TargetState::Up).map(|t| t.id);
        let joined: BTreeMap<_, _> = up.clone().map(|target| (target, self.joined_on(target, map))).collect();
        let mut reports = report_each(&self.env, &self.identity(map), map, up, LAST_PROBE_PATIENCE);
        self.env.tasks.spawn("collect positions", async move {
            let mut all = Vec::new();
            while let Some(report) = reports.recv().await {
                all.push((joined.get(&report.target).copied().flatten(), report));
            }
            let _ = events.send(Event::LastPositions { reports: all, answer }).await; // the coordinator may be gone
        });
    }

    /// Where a target is asked: on the connection of its node's `Join`, if its process answers there.
    fn probed_by(&self, target: TargetId, map: &ClusterMap) -> ProbeBy {
        let life = self.joined_on(target, map).and_then(|connection| self.members.signs.answers(connection));
        life.map_or_else(|| ProbeBy::Data(map.target_node(target).cloned()), ProbeBy::Life)
    }

    /// The coordinator's identity towards targets.
    fn identity(&self, map: &ClusterMap) -> Identity {
        let name = self.this.name.as_str();
        let identity = Identity::new(&self.env, name, Role::Coordinator, Some(map.cluster));
        identity.trusting(self.this.trust.clone())
    }

    /// The connection on which the node of a target has joined.
    pub(super) fn joined_on(&self, target: TargetId, map: &ClusterMap) -> Option<u64> {
        self.members.joined_on(map.target(target)?.node)
    }

    fn is_awaited(&self, target: TargetId, map: &ClusterMap) -> bool {
        let member = map.target(target).and_then(|t| self.members.by_node.get(&t.node));
        member.is_some_and(|m| matches!(m.presence, Presence::Awaited { .. }))
    }

    pub(super) fn probed(&mut self, probe: Probe, batch: &mut Batch, now: Instant) {
        let Probe { target, suspicion, by_life, outcome, alive } = probe;
        match outcome {
            Ok(seen) => {
                let alive = self.members.with_reported(alive, now);
                self.answered(seen, suspicion, &alive, batch, now);
            }
            Err(e) => {
                let unanswered = Unanswered {
                    by_life,
                    quick: suspicion != Suspicion::Failed,
                    is_spare: is_spare(&batch.draft, target),
                    is_awaited: self.is_awaited(target, &batch.draft),
                };
                match is_out(unanswered) {
                    Err(why) if by_life => tracing::debug!("{target} does not answer ({e}): {why}"),
                    Err(why) => tracing::warn!("{target} does not answer ({e}): {why}"),
                    Ok(()) if self.members.suspects.insert(target) => {
                        tracing::warn!("{target} does not answer: {e}");
                        self.suspects_asked = now;
                    }
                    Ok(()) => {}
                }
            }
        }
    }

    fn answered(
        &mut self,
        Seen { target, failed, speed }: Seen,
        suspicion: Suspicion,
        alive: &BTreeMap<TargetId, Speed>,
        batch: &mut Batch,
        now: Instant,
    ) {
        if failed {
            crate::decide::target_failed(&mut batch.draft, target);
        }
        let hangs = self.members.note_speed(&batch.draft, target, speed, now);
        if !hangs && speed.completes() && self.members.suspects.remove(&target) {
            tracing::info!("{target} answers again");
        }
        if suspicion == Suspicion::Slow && demote_slow(&mut batch.draft, target, &speed, alive) {
            let strikes = Strikes::one_more(self.members.slow.get(&target).copied(), now);
            self.members.slow.insert(target, strikes);
            tracing::warn!(
                "{target} is much slower than the others: its groups continue without it for a while"
            );
        }
    }

    /// Answers callers that wait for a probe of a target that is already out of service.
    pub(super) fn release_reporters(&mut self, batch: &mut Batch) {
        let mut answers = Vec::new();
        for ((target, _), waiting) in &mut self.probing {
            if batch.draft.target(*target).is_none_or(|t| t.state != TargetState::Up) {
                answers.append(waiting);
            }
        }
        answers.into_iter().for_each(|answer| batch.after(answer, newest));
    }

    pub(super) fn ask_suspects(&mut self, now: Instant) {
        if self.members.suspects.is_empty() || now.since(self.suspects_asked) < SUSPECT_PROBE_INTERVAL {
            return;
        }
        self.suspects_asked = now;
        let map = self.map.borrow().clone();
        let node_up = |t: &TargetId| map.target_node(*t).is_some_and(|n: &Node| n.up);
        let down = |t: &TargetId| map.target(*t).is_some_and(|t| t.state == TargetState::Down);
        let ask: Vec<TargetId> =
            self.members.suspects.iter().filter(|t| node_up(t) && down(t)).copied().collect();
        for target in ask {
            self.start_probe(target, Suspicion::Failed, &map);
        }
    }
}
