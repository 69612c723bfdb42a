//! Suspected targets: a reported target is probed, and its reporters wait for the result.
use super::batch::{Batch, newest, refuse};
use super::event::{Answer, Event};
use super::{Owner, SUSPECT_PROBE_INTERVAL};
use crate::decide::{Presence, Strikes, demote_slow, is_spare, needed_without};
use crate::probe::{LAST_PROBE_PATIENCE, PROBE_PATIENCE, QUICK_PROBE_PATIENCE, probe, probe_each};
use std::collections::{BTreeMap, BTreeSet};
use weir_env::Instant;
use weir_proto::coord::{MapReply, ReportTarget, Suspicion, TargetReport};
use weir_proto::map::{ClusterMap, MemberState, Node, Role, TargetState};
use weir_proto::{Error, Result, TargetId};
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
        match report.suspicion {
            Suspicion::Failed => tracing::warn!("{} is reported: {}", report.target, report.why),
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
            let (env, node, who) = (self.env.clone(), map.target_node(target).cloned(), self.identity(map));
            let joined = self.joined_on(target, map);
            let patience = match suspicion {
                Suspicion::Failed => PROBE_PATIENCE,
                Suspicion::Unreachable | Suspicion::Slow => QUICK_PROBE_PATIENCE,
            };
            let others = match suspicion {
                Suspicion::Slow => needed_without(map, target),
                Suspicion::Failed | Suspicion::Unreachable => BTreeSet::new(),
            };
            let mut reports = probe_each(&self.env, &self.identity(map), map, others.into_iter(), patience);
            self.env.tasks.spawn("probe a target", async move {
                let outcome = probe(env, who, node, target, patience).await;
                let mut alive = BTreeSet::new();
                if outcome.is_ok() {
                    while let Some(report) = reports.recv().await {
                        alive.extend((!report.failed).then_some(report.target));
                    }
                }
                let probed = Event::Probed { target, suspicion, joined, outcome, alive };
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
        let mut reports = probe_each(&self.env, &self.identity(map), map, up, LAST_PROBE_PATIENCE);
        self.env.tasks.spawn("collect positions", async move {
            let mut said = Vec::new();
            while let Some(report) = reports.recv().await {
                said.push((joined.get(&report.target).copied().flatten(), report));
            }
            let _ = events.send(Event::LastPositions { said, answer }).await; // the coordinator may be gone
        });
    }

    /// The coordinator's identity towards targets.
    fn identity(&self, map: &ClusterMap) -> Identity {
        let name = self.leadership.name.as_str();
        let identity = Identity::new(&self.env, name, Role::Coordinator, Some(map.cluster));
        identity.trusting(self.leadership.trust.clone())
    }

    /// The connection on which the node of a target has joined.
    pub(super) fn joined_on(&self, target: TargetId, map: &ClusterMap) -> Option<u64> {
        self.members.joined_on(map.target(target)?.node)
    }

    fn is_awaited(&self, target: TargetId, map: &ClusterMap) -> bool {
        let member = map.target(target).and_then(|t| self.members.by_node.get(&t.node));
        member.is_some_and(|m| matches!(m.presence, Presence::Awaited { .. }))
    }

    pub(super) fn probed(
        &mut self,
        target: TargetId,
        suspicion: Suspicion,
        outcome: Result<TargetReport>,
        alive: &BTreeSet<TargetId>,
        batch: &mut Batch,
        now: Instant,
    ) {
        match outcome {
            Ok(report) => {
                if report.failed {
                    crate::decide::target_failed(&mut batch.draft, target);
                }
                if !self.members.note_stall(&batch.draft, &report) && self.members.suspects.remove(&target) {
                    tracing::info!("{target} answers again");
                }
                if suspicion == Suspicion::Slow && demote_slow(&mut batch.draft, target, alive) {
                    let strikes = Strikes::one_more(self.members.slow.get(&target).copied(), now);
                    self.members.slow.insert(target, strikes);
                    tracing::warn!(
                        "{target} is much slower than the others: its groups continue without it for a while"
                    );
                }
            }
            // An overloaded machine must not lose its last targets to a quick probe.
            Err(e) if suspicion != Suspicion::Failed && !is_spare(&batch.draft, target) => {
                tracing::warn!("{target} does not answer quickly, and is needed: {e}");
            }
            // A target that has not joined since this coordinator started may still be starting. A verdict
            // now would let its group continue without it; if the others then return without their new
            // writes, no other target has them.
            Err(e) if self.is_awaited(target, &batch.draft) => {
                tracing::warn!("{target} does not answer, and has not joined yet: {e}");
            }
            Err(e) => {
                if self.members.suspects.insert(target) {
                    tracing::warn!("{target} does not answer: {e}");
                    self.suspects_asked = now;
                }
            }
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
