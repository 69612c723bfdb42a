//! The one task that owns the cluster map.
//!
//! It takes events in batches, applies them to a draft, updates the draft to the known state of members,
//! makes it durable, publishes it, and only then answers: no process sees a map that a restart could forget.
//!
//! Knows nothing of how messages travel; decisions are in `decide` and `members`.
use crate::copies::CopyChange;
use crate::cut_links::CutLinks;
use crate::decide::{
    HealthLimits, Progress, add_groups, forget_unpublished_copies, forget_unpublished_epochs,
    record_progress, replace, take_lead,
};
use crate::kept_map::{KeptMap, another_writes};
use crate::members::{Members, Positions};
use crate::news::News;
use crate::placing::{Placed, Placing, place};
use crate::records::{encode_positions, encode_progress, encode_wishes};
use crate::replacing::{RebuildEvent, Replacing, Wishes};
use crate::standby::Term;
use crate::store::{Revision, Store, Swap};
use batch::{Batch, newest, refuse};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use weir_env::{Env, Instant, watch};
use weir_proto::coord::{
    ClusterStatus, Heartbeat, HeartbeatAck, Join, Joined, LeadNamespace, LeadReply, Leave, MapReply,
    Suspicion,
};
use weir_proto::map::{ClusterMap, Target};
use weir_proto::version::Program;
use weir_proto::{Error, ErrorKind, Result, TargetId};
use weir_rpc::Trust;

mod batch;
mod event;
mod probes;

pub use event::{Answer, Event};

/// The key of the namespaces' progress. Not in the map, which every process receives: it changes every
/// second.
pub const PROGRESS_KEY: &str = "progress";
/// The key of each target's reported position: not in the map either.
pub const POSITIONS_KEY: &str = "positions";
/// The key of administrators' requests about rebuilds and moves.
pub const REBUILD_KEY: &str = "rebuild";
/// Events waiting for the owner: more than any cluster's members send during one write of the store.
pub const EVENTS_MAX: usize = 4096;
/// Events decided on together, with one write of the store.
const BATCH_MAX: usize = 256;
/// How often a target that did not answer is probed again while its node is connected.
const SUSPECT_PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// How often the positions of targets are made durable while they change. After a power cut of the
/// coordinator, an older copy of a target is still recognized.
const POSITIONS_INTERVAL: Duration = Duration::from_secs(1);

pub struct Owner {
    pub env: Env,
    pub store: Arc<dyn Store>,
    pub kept: KeptMap,
    pub progress: Kept<Progress>,
    pub positions: Kept<Positions>,
    pub rebuild: Kept<Wishes>,
    pub map: watch::Sender<Arc<ClusterMap>>,
    /// Gets each map before it is published.
    pub news: Arc<News>,
    pub members: Members,
    pub events: mpsc::Receiver<Event>,
    /// For the results of probes.
    pub self_events: mpsc::WeakSender<Event>,
    pub started: Instant,
    /// The callers that wait for a running probe, by target and suspicion.
    pub probing: BTreeMap<(TargetId, Suspicion), Vec<Answer<MapReply>>>,
    pub suspects_asked: Instant,
    pub placing: Placing,
    pub replacing: Replacing,
    pub cut_links: CutLinks,
    /// This coordinator's own program.
    pub program: Program,
    /// This coordinator was asked to end. It then takes no target down: `weir down` ends servers at the same
    /// time, and a target that was taken down by that would be behind at the next start.
    pub ends: bool,
    pub this: ThisCoordinator,
}

/// This coordinator's name, and the term for which it leads.
pub struct ThisCoordinator {
    /// The name that it uses in probes.
    pub name: String,
    /// For probes over networks; absent in a cluster without certificates.
    pub trust: Option<Arc<Trust>>,
    /// Absent: no other coordinator can lead.
    pub term: Option<Term>,
    /// Why it does not lead any more.
    pub lost: Arc<OnceLock<Error>>,
}

impl ThisCoordinator {
    fn check(&self, now: Instant) -> Result<()> {
        self.term.as_ref().map_or(Ok(()), |term| term.check(now))
    }
}

/// A value as it was last read or written.
pub struct Kept<T> {
    pub value: T,
    pub revision: Revision,
    pub at: Instant,
}

/// Interval of members' heartbeats: a quarter of the tolerated silence.
pub fn heartbeat_ms(map: &ClusterMap) -> u32 {
    (map.settings.target_silence_ms / 4).clamp(50, 2000)
}

impl Owner {
    /// Runs until the last handle of the coordinator is gone, or another coordinator leads: then waiting
    /// callers get no answer from this one.
    pub async fn run(mut self) {
        let mut last_tick = self.env.clock.now();
        loop {
            let tick = Duration::from_millis(u64::from(heartbeat_ms(&self.map.borrow())) / 2);
            let tick = self.replacing.repaired.wait(last_tick).map_or(tick, |wait| wait.min(tick));
            let mut first = None;
            tokio::select! {
                biased;
                event = self.events.recv() => match event {
                    None => return,
                    event => first = event,
                },
                () = self.env.clock.sleep(tick) => {}
            }
            // On an overloaded machine, or with a slow disk, this node itself is late.
            let now = self.env.clock.now();
            self.members.forgive(now.since(last_tick).saturating_sub(tick), now);
            last_tick = now;
            if let Err(e) = self.handle_batch(first).await {
                tracing::error!("this coordinator leads no more: {e}");
                let _ = self.this.lost.set(e); // it is lost once
                return;
            }
        }
    }

    /// Handles one batch of events. An error: another coordinator leads, or may lead.
    async fn handle_batch(&mut self, first: Option<Event>) -> Result<()> {
        let now = self.env.clock.now();
        self.this.check(now)?;
        let published = self.map.borrow().clone();
        let members_before = self.members.clone();
        let mut batch = Batch {
            draft: ClusterMap::clone(&published),
            progress: self.progress.value.clone(),
            rebuild: self.rebuild.value.clone(),
            after: Vec::new(),
            disconnected: Vec::new(),
        };
        self.members.note_signs(&mut batch.draft, now);
        let mut next = first;
        for _ in 0..BATCH_MAX {
            let Some(event) = next else { break };
            self.apply(event, &mut batch, now);
            next = self.events.try_recv().ok();
        }
        if let Some(event) = next {
            self.apply(event, &mut batch, now);
        }
        self.note_repaired(&published, &mut batch, now);
        let limits = HealthLimits {
            silence_max: Duration::from_millis(u64::from(published.settings.target_silence_ms)),
        };
        if !self.ends {
            self.members.reconcile(&mut batch.draft, now, &limits);
            self.place_groups(&mut batch, now);
            self.replace_lost(&mut batch, now);
        }
        self.release_reporters(&mut batch);
        forget_unpublished_epochs(&published, &mut batch.draft);
        forget_unpublished_copies(&published, &mut batch.draft);
        self.members.record_positions(&published, &mut batch.draft);
        let outcome = async {
            self.keep_progress(batch.progress, now).await?;
            self.keep_rebuild(batch.rebuild, now).await?;
            self.keep_positions(&batch.draft, now).await?;
            self.publish(published, batch.draft).await
        }
        .await;
        // If another coordinator leads by now, these answers may be outdated.
        self.this.check(self.env.clock.now())?;
        if let Err(e) = &outcome {
            if e.kind == ErrorKind::Stale {
                return Err(e.clone());
            }
            tracing::error!("the cluster map could not be made durable: {e}");
            self.members = members_before;
            batch.disconnected.iter().for_each(|c| self.members.disconnected(*c));
        }
        for done in batch.after {
            done(&outcome);
        }
        self.ask_suspects(now);
        Ok(())
    }

    /// Stored before the map, and on its own: it is valid regardless of the map.
    async fn keep_progress(&mut self, new: Progress, now: Instant) -> Result<()> {
        if new == self.progress.value {
            return Ok(());
        }
        match self.store.compare_and_swap(PROGRESS_KEY, self.progress.revision, encode_progress(&new)).await?
        {
            Swap::Done(revision) => self.progress = Kept { value: new, revision, at: now },
            Swap::Conflict(_) => return Err(another_writes()),
        }
        Ok(())
    }

    async fn keep_rebuild(&mut self, new: Wishes, now: Instant) -> Result<()> {
        if new == self.rebuild.value {
            return Ok(());
        }
        match self.store.compare_and_swap(REBUILD_KEY, self.rebuild.revision, encode_wishes(&new)).await? {
            Swap::Done(revision) => self.rebuild = Kept { value: new, revision, at: now },
            Swap::Conflict(_) => return Err(another_writes()),
        }
        Ok(())
    }

    /// At an interval, and at the end: heartbeats change them all the time.
    async fn keep_positions(&mut self, map: &ClusterMap, now: Instant) -> Result<()> {
        if !self.ends && now.since(self.positions.at) < POSITIONS_INTERVAL {
            return Ok(());
        }
        let of = |t: &Target| Some((t.id, (t.last.run.id, *self.members.positions.get(&t.id)?)));
        let new: Positions = map.targets.iter().filter_map(of).collect();
        if new == self.positions.value {
            return Ok(());
        }
        let bytes = encode_positions(&new);
        match self.store.compare_and_swap(POSITIONS_KEY, self.positions.revision, bytes).await? {
            Swap::Done(revision) => self.positions = Kept { value: new, revision, at: now },
            Swap::Conflict(_) => return Err(another_writes()),
        }
        Ok(())
    }

    /// Makes a changed map durable, then publishes it.
    async fn publish(&mut self, old: Arc<ClusterMap>, mut new: ClusterMap) -> Result<Arc<ClusterMap>> {
        if new == *old {
            return Ok(old);
        }
        new.version = old.version + 1;
        self.kept.write(&old, &new).await?;
        let new = Arc::new(new);
        self.news.publish(new.clone());
        self.map.send_replace(new.clone());
        Ok(new)
    }

    fn apply(&mut self, event: Event, batch: &mut Batch, now: Instant) {
        match event {
            Event::Join { join, connection, answer } => self.joins(&join, connection, answer, batch, now),
            Event::Heartbeat { heartbeat: Heartbeat { node, targets }, connection, answer } => {
                match self.members.heartbeat(&mut batch.draft, node, connection, targets, now) {
                    Err(e) => refuse(answer, e),
                    Ok(()) => batch.after(answer, |map| HeartbeatAck { map_version: map.version }),
                }
            }
            Event::Report { answer, .. } if self.ends => {
                refuse(answer, Error::unavailable("the coordinator is about to end"));
            }
            Event::Report { report, answer } => self.reported(report, answer, batch),
            Event::Link { from, report, answer } => {
                self.cut_links.note(&from, &report, now);
                batch.after(answer, |_| ());
            }
            Event::Probed { probe, joined } => {
                for answer in self.probing.remove(&(probe.target, probe.suspicion)).unwrap_or_default() {
                    batch.after(answer, newest);
                }
                // A result about a process that is gone does not hold for its successor.
                if !self.ends && joined == self.joined_on(probe.target, &batch.draft) {
                    self.probed(probe, batch, now);
                }
            }
            Event::CaughtUp { report, answer } => self.replacing.repaired.add((report, answer), now),
            Event::Clear { target, answer } => self.clears(target, answer, batch),
            Event::MakeGroups { wanted, answer } => self.placing.ask(wanted, answer),
            Event::Placed(placed) => self.placed(placed, batch),
            Event::FinishUpgrade { connected, answer } => {
                batch.finish_upgrade(connected, &self.program, answer)
            }
            Event::Rebuild(event) => self.rebuilds(event, batch, now),
            Event::RemoveNode { removed, now, answer } => batch.remove_node(removed, now, answer),
            Event::Rules { change, answer } => batch.change_rules(answer, change),
            Event::Leave { answer, .. } if self.ends => batch.after(answer, |_| ()),
            Event::Leave { leave, connection, answer } => self.leaves(leave, connection, answer, batch, now),
            Event::Lead { lead, connection, answer } => self.leads(&lead, connection, answer, batch),
            Event::Progress { report, connection, answer } => {
                let member = self.members.member_on(report.node, connection).map(drop);
                match member.and_then(|()| record_progress(&batch.draft, &mut batch.progress, &report)) {
                    Err(e) => refuse(answer, e),
                    Ok(()) => batch.after(answer, |_| ()),
                }
            }
            Event::Copies { by, change, connection, answer } => {
                let change = self.members.member_on(by, connection).map(|_| change);
                self.change_copies(change, answer, batch, now);
            }
            Event::Status { answer } => self.report_status(answer, batch, now),
            Event::Disconnected { .. } if self.ends => {}
            Event::Disconnected { connection } => {
                batch.disconnected.push(connection);
                self.members.disconnected(connection);
            }
            Event::Ends { answer } => {
                self.ends = true;
                self.ask_positions(&batch.draft, answer);
            }
            Event::LastPositions { reports, answer } => {
                for (joined, report) in reports {
                    if joined == self.joined_on(report.target, &batch.draft) {
                        self.members.note_position(report.target, report.position);
                    }
                }
                batch.after(answer, |_| ()); // they are durable then, as it ends
            }
        }
    }

    fn change_copies(
        &self,
        change: Result<CopyChange>,
        answer: Answer<MapReply>,
        batch: &mut Batch,
        now: Instant,
    ) {
        let interval_ms = heartbeat_ms(&batch.draft);
        batch.change_copies(change, &|node| self.members.gave_sign(node, now, interval_ms), answer);
    }

    /// Starts the placements that are needed, and answers callers whose groups exist.
    fn place_groups(&mut self, batch: &mut Batch, now: Instant) {
        let (wanted, answers) = self.placing.next(&batch.draft, &batch.rebuild.draining, now);
        for (answer, outcome) in answers {
            match outcome {
                Ok(()) => batch.after(answer, newest),
                Err(e) => refuse(answer, e),
            }
        }
        let Some(events) = self.self_events.upgrade() else { return };
        for wanted in wanted {
            let (events, place) = (events.clone(), place(self.env.tasks.clone(), wanted));
            self.env.tasks.spawn("place groups", async move {
                let _ = events.send(Event::Placed(place.await)).await; // gone with the coordinator
            });
        }
    }

    /// Assigns places of lost targets to others.
    fn replace_lost(&mut self, batch: &mut Batch, now: Instant) {
        let plan = self.replacing.next(&batch.draft, &mut batch.rebuild, &self.members.reports, now);
        for step in plan.steps {
            match replace(&mut batch.draft, step.group, step.place, step.to) {
                Ok(()) => tracing::info!("{} takes the place of {} in {}", step.to, step.from, step.group),
                Err(e) => tracing::error!("{} cannot be replaced in {}: {e}", step.from, step.group),
            }
        }
        let (draft, wishes) = (&mut batch.draft, &mut batch.rebuild);
        self.replacing.move_places(draft, wishes, &self.members.reports, now);
    }

    fn rebuilds(&mut self, event: RebuildEvent, batch: &mut Batch, now: Instant) {
        match event {
            RebuildEvent::Gone { asked, answer } => {
                let (map, reports) = (&batch.draft, &self.members.reports);
                match self.replacing.abandon_lost(map, &mut batch.rebuild, reports, &asked) {
                    Err(e) => refuse(answer, e),
                    Ok(plan) => {
                        if !asked.dry_run {
                            tracing::warn!("{} is given up: other targets take its places", asked.target);
                        }
                        batch.after(answer, |_| plan);
                    }
                }
            }
            RebuildEvent::Drain { asked, answer } => {
                let (draft, wishes) = (&mut batch.draft, &mut batch.rebuild);
                match self.replacing.drain(draft, wishes, &self.members.reports, &asked) {
                    Err(e) => refuse(answer, e),
                    Ok(plan) => batch.after(answer, |_| plan),
                }
            }
            RebuildEvent::Full { report, answer } => {
                let (map, wishes, reports) = (&batch.draft, &batch.rebuild, &self.members.reports);
                match self.replacing.refused(map, wishes, reports, &report, now) {
                    Err(e) => refuse(answer, e),
                    Ok(place) => batch.after(answer, |_| place),
                }
            }
            RebuildEvent::Pause { paused, answer } => {
                batch.rebuild.paused = paused;
                batch.after(answer, |_| ());
            }
            RebuildEvent::Copied { report, answer } => {
                match self.replacing.copied(&mut batch.draft, &report, &self.members.reports, now) {
                    Err(e) => refuse(answer, e),
                    Ok(()) => batch.after(answer, newest),
                }
            }
            RebuildEvent::Set { asked, answer } => match batch.rebuild.set(&asked) {
                Err(e) => refuse(answer, e),
                Ok(()) => batch.after(answer, |_| ()),
            },
            RebuildEvent::Status { answer } => {
                let status = self.replacing.status(&batch.rebuild, now);
                batch.after(answer, |_| status);
            }
            RebuildEvent::Refills { reports, answer } => match self.replacing.note(reports, now) {
                Err(e) => refuse(answer, e),
                Ok(()) => batch.after(answer, |_| ()),
            },
        }
    }

    /// Applies collected reports of repaired places. Their targets may take over other places at once.
    fn note_repaired(&mut self, published: &ClusterMap, batch: &mut Batch, now: Instant) {
        for (report, answer) in self.replacing.repaired.take(published, &batch.draft, now) {
            batch.caught_up(&report, answer);
            self.replacing.plan_again();
        }
    }

    fn placed(&mut self, Placed { wanted, members }: Placed, batch: &mut Batch) {
        self.placing.ended(&wanted);
        let count = members.len();
        if !self.ends && add_groups(&mut batch.draft, &wanted, members) {
            let (scheme, pool, targets) = (wanted.scheme, &wanted.pool, wanted.candidates.len());
            tracing::info!("{count} placement groups of {scheme} on {targets} targets of pool {pool:?}");
        }
    }

    fn clears(&mut self, target: TargetId, answer: Answer<MapReply>, batch: &mut Batch) {
        match self.members.clear_target(&mut batch.draft, target) {
            Err(e) => refuse(answer, e),
            Ok(()) => {
                tracing::info!("{target} is cleared: its disk may be used again");
                batch.after(answer, newest);
            }
        }
    }

    fn joins(
        &mut self,
        join: &Join,
        connection: u64,
        answer: Answer<Joined>,
        batch: &mut Batch,
        now: Instant,
    ) {
        let heartbeat_ms = heartbeat_ms(&batch.draft);
        match self.members.admit(&mut batch.draft, join, connection, now) {
            Err(e) => {
                tracing::warn!("refused a join: {e}");
                refuse(answer, e);
            }
            Ok(admitted) => batch.after(answer, move |map| Joined {
                node: admitted.node,
                targets: admitted.targets,
                map: map.clone(),
                heartbeat_ms,
            }),
        }
    }

    fn leaves(
        &mut self,
        Leave { node, targets }: Leave,
        connection: u64,
        answer: Answer<()>,
        batch: &mut Batch,
        now: Instant,
    ) {
        match self.members.heartbeat(&mut batch.draft, node, connection, targets, now) {
            Err(e) => refuse(answer, e),
            Ok(()) => {
                self.members.disconnected(connection);
                batch.disconnected.push(connection);
                batch.after(answer, |_| ());
            }
        }
    }

    fn leads(&mut self, lead: &LeadNamespace, connection: u64, answer: Answer<LeadReply>, batch: &mut Batch) {
        let member = self.members.member_on(lead.node, connection).map(drop);
        match member.and_then(|()| take_lead(&mut batch.draft, &batch.progress, lead)) {
            Err(e) => refuse(answer, e),
            Ok((namespace, leader_epoch)) => {
                batch.after(answer, move |map| LeadReply { namespace, leader_epoch, map: map.clone() })
            }
        }
    }

    fn report_status(&mut self, answer: Answer<ClusterStatus>, batch: &mut Batch, now: Instant) {
        let targets = self.members.reports.values().cloned().collect();
        let uptime_ms = now.since(self.started).as_millis() as u64;
        let (links, program) = (self.cut_links.list(now), self.program.clone());
        batch.after(answer, move |map| ClusterStatus {
            map: map.clone(),
            targets,
            uptime_ms,
            links,
            program,
        });
    }
}
