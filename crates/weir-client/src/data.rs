//! Fragments and overlays to targets: who is asked, what happens when one does not answer.
//!
//! Invariants: a write returns only when every live member of the group's newest map has it, and what is written
//! carries the mask of the members that have not; fewer than k current members is an error that names the stripe;
//! everything ends by its deadline. Knows nothing of sizes, leases, buffers or handles.
use crate::join::{Join, join_all};
use crate::latency;
use crate::maps::MapsSeen;
use crate::member::{Latencies, Pacing};
use crate::status::Counters;
use crate::waits::Waits;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use weir_coord::Cluster;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::checksum;
use weir_proto::coord::Suspicion;
use weir_proto::data::{
    CHECKSUM_BLOCK, CellStat, CommitStripe, DropFile, DropPrepared, GroupAt, HoldStripe, MarkMissing,
    MissingMask, OverlayKind, Place, PreparedCell, StatCell, WriteFragment, WriteMode, WriteOverlay,
};
use weir_proto::ec::Coder;
use weir_proto::map::{ClusterMap, Group, Layout, Member, MemberState, Scheme, TargetState};
use weir_proto::{CellId, Epoch, Error, ErrorKind, FileId, PgId, Request, Result, Seq, TargetId, Version};
use weir_rpc::{Answered, Payload};

/// One target may take this long for one call before the coordinator is asked to judge it: a loaded disk does a
/// group commit of many fragments in well under a second.
const CALL_PATIENCE: Duration = Duration::from_secs(5);
/// How long a group is waited for that lacks members which do not return by themselves (their disks failed), counted from its last
/// change. Who comes later learns of the loss at once. Members that are only away are waited for as long as the call may take.
const LOSS_PATIENCE: Duration = Duration::from_secs(12);
/// A refused epoch means that a newer map is on its way.
const MAP_PATIENCE: Duration = Duration::from_millis(500);
/// Late reads that are decoded at the same time: each reads k times as much, and what is late may just be busy.
const HEDGES_MAX: usize = 8;
/// First pause before a live member is asked again; doubles up to a second.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The targets, as one client reaches them.
pub struct Data {
    pub env: Env,
    pub cluster: Cluster,
    pub counters: Arc<Counters>,
    maps: Arc<MapsSeen>,
    /// Reads that are decoded from others because an answer is late.
    pub hedges: Semaphore,
    pub latencies: Mutex<Latencies>,
    pub waits: Arc<Waits>,
    coders: Mutex<BTreeMap<Scheme, Arc<Coder>>>,
    /// Groups that had too few members when somebody asked: under which epoch, and since when. At most one per group.
    losses: Mutex<BTreeMap<PgId, (Epoch, Instant)>>,
}

/// A stripe of a file, and until when the work on it may take.
#[derive(Clone, Copy, Debug)]
pub struct StripeRef {
    pub file: FileId,
    pub layout: Layout,
    pub stripe: u64,
    pub deadline: Instant,
}

impl StripeRef {
    pub fn cell(&self, index: usize) -> CellId {
        CellId { file: self.file, stripe: self.stripe, index: index as u8 }
    }
    fn scheme(&self) -> Scheme {
        self.layout.scheme
    }
    fn k(&self) -> usize {
        usize::from(self.scheme().data)
    }
}
impl std::fmt::Display for StripeRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let first = self.layout.stripe_start(self.stripe);
        write!(
            f,
            "stripe {} of file {} (bytes {first} to {}) on {}",
            self.stripe,
            self.file,
            first.saturating_add(self.layout.stripe_bytes()),
            self.layout.pg_of_stripe(self.stripe)
        )
    }
}

/// One fragment, ready to send.
#[derive(Clone, Debug)]
pub struct Fragment {
    pub payload: Bytes,
    pub block_crcs: Vec<u32>,
}

/// Bytes, or zeros, for one data cell.
#[derive(Clone, Debug)]
pub struct Overlay {
    pub index: u8,
    pub offset: u32,
    pub len: u32,
    /// `None`: zeros.
    pub payload: Option<Bytes>,
}

/// A group as of one map.
#[derive(Clone)]
pub struct GroupView {
    map: Arc<ClusterMap>,
    index: usize,
}

impl GroupView {
    pub fn group(&self) -> &Group {
        &self.map.groups[self.index]
    }
    pub fn map_version(&self) -> u64 {
        self.map.version
    }
    pub fn state(&self, index: usize) -> MemberState {
        self.group().members.get(index).map_or(MemberState::Down, |m| m.state)
    }
    pub fn place(&self, index: usize) -> Place {
        let group = self.group();
        Place { target: group.members[index].target, group: group.id, epoch: group.epoch }
    }
    pub fn down_mask(&self) -> MissingMask {
        let members = self.group().members.iter().enumerate();
        members.filter(|(_, m)| m.state == MemberState::Down).fold(0, |mask, (i, _)| mask | (1 << i))
    }
    /// A member by its target and the node that serves it.
    pub fn name_of(&self, index: usize) -> String {
        let target = self.place(index).target;
        let node = self.map.target_node(target).map_or("?", |n| n.name.as_str());
        format!("{target} ({node})")
    }
    /// The members that are not current.
    pub fn missing_names(&self) -> String {
        let mut missing: Vec<usize> =
            (0..self.group().members.len()).filter(|i| self.state(*i) != MemberState::Current).collect();
        missing.sort_by_key(|i| self.place(*i).target);
        missing.into_iter().map(|i| self.name_of(i)).collect::<Vec<_>>().join(", ")
    }
    /// Who numbers the overlays of a data cell: the first current one of its own target and the parity targets.
    pub fn sequencer(&self, cell: u8, scheme: Scheme) -> Option<usize> {
        let parity = usize::from(scheme.data)..scheme.width();
        std::iter::once(usize::from(cell)).chain(parity).find(|i| self.state(*i) == MemberState::Current)
    }
}

/// Whether trying elsewhere or again can help.
pub fn is_unreachable(e: &Error) -> bool {
    match e.kind {
        ErrorKind::Unavailable | ErrorKind::Deadline | ErrorKind::Io => true,
        ErrorKind::NotFound
        | ErrorKind::Exists
        | ErrorKind::Invalid
        | ErrorKind::Denied
        | ErrorKind::Name(_)
        | ErrorKind::NoSpace
        | ErrorKind::OverQuota
        | ErrorKind::Stale
        | ErrorKind::Damaged
        | ErrorKind::Unsupported => false,
    }
}

impl Data {
    pub fn new(env: Env, cluster: Cluster, counters: Arc<Counters>, maps: Arc<MapsSeen>) -> Data {
        Data {
            waits: Waits::new(&env),
            env,
            cluster,
            counters,
            maps,
            hedges: Semaphore::new(HEDGES_MAX),
            latencies: Mutex::default(),
            coders: Mutex::default(),
            losses: Mutex::default(),
        }
    }

    pub fn coder(&self, scheme: Scheme) -> Result<Arc<Coder>> {
        let mut coders = self.coders.lock().expect("no holder panics");
        if let Some(coder) = coders.get(&scheme) {
            return Ok(coder.clone());
        }
        let coder = Arc::new(Coder::new(scheme)?);
        coders.insert(scheme, coder.clone());
        Ok(coder)
    }

    /// The stripe's group in the newest map. Checks what the rest of this crate relies on.
    pub fn view(&self, s: &StripeRef) -> Result<GroupView> {
        self.view_of(s.layout.pg_of_stripe(s.stripe), s.scheme()).map_err(|e| e.doing(s))
    }
    /// The same of a group.
    pub fn view_of(&self, id: PgId, scheme: Scheme) -> Result<GroupView> {
        let map = self.cluster.map();
        let index = map.groups.iter().position(|g| g.id == id).ok_or_else(|| {
            Error::invalid(format!("the cluster map (version {}) has no {id}", map.version))
        })?;
        if map.groups[index].members.len() != scheme.width() {
            let n = map.groups[index].members.len();
            return Err(Error::invalid(format!("{id} has {n} members, the file's scheme {scheme}")));
        }
        Ok(GroupView { map, index })
    }

    /// See [`MapsSeen::need`].
    pub fn need_map(&self, version: u64) {
        self.maps.need(version);
    }
    /// Returns when the map is here under which what is read was written: see [`MapsSeen`].
    pub async fn needed_map(&self, s: &StripeRef) -> Result<()> {
        loop {
            let (needed, here) = (self.maps.needed(), self.cluster.map().version);
            if here >= needed {
                return Ok(());
            }
            if self.left(s.deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "{s}: it may have been written under version {needed} of the cluster map, here is {here}: is the coordinator reachable?"
                )));
            }
            let _waiting = self.waits.begin("the coordinator, for the newest cluster map".into());
            self.wait_newer(here, self.left(s.deadline)).await;
        }
    }

    /// Waits for a map newer than `version`, at most `patience`.
    pub async fn wait_newer(&self, version: u64, patience: Duration) {
        // No newer map is no failure here: the caller looks again.
        let _ = self.cluster.wait_newer(version, patience).await;
    }

    /// After members of a group have refused a call or not answered it: whether a newer map says who is to be asked now.
    pub async fn is_regrouped(&self, view: &GroupView, deadline: Instant) -> bool {
        self.wait_newer(view.map_version(), MAP_PATIENCE.min(self.left(deadline))).await;
        let (map, group) = (self.cluster.map(), view.group());
        map.group(group.id).is_some_and(|now| now.epoch > group.epoch)
    }

    pub fn left(&self, deadline: Instant) -> Duration {
        deadline.since(self.env.clock.now())
    }

    /// One call to one target, without a second try.
    pub async fn call<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: impl Into<Payload>,
        patience: Duration,
    ) -> Result<Answered<R::Reply>> {
        let payload = payload.into();
        let sent = payload.len() as u64;
        let answered = self.cluster.call_target(target, request, payload, patience).await?;
        self.counters.wire_sent_bytes.fetch_add(sent, Relaxed);
        self.counters.wire_received_bytes.fetch_add(answered.payload.len() as u64, Relaxed);
        Ok(answered)
    }

    pub fn call_patience(&self, deadline: Instant) -> Duration {
        self.left(deadline).min(CALL_PATIENCE)
    }

    /// Tells the coordinator that a target did not answer; waits for its judgement.
    pub async fn report(&self, place: Place, why: &Error) {
        let reported = self.cluster.report_target(place.target, place.group, place.epoch, &why.context);
        if let Err(e) = reported.await {
            tracing::debug!(target_id = %place.target, "coordinator not told of {why}: {e}");
        }
    }

    /// A view with at least k current members, or the error that names the stripe.
    pub async fn writable_view(&self, s: &StripeRef) -> Result<GroupView> {
        let mut waiting = None;
        loop {
            let view = self.view(s)?;
            if view.group().is_writable() {
                return Ok(view);
            }
            if view.group().is_lost() {
                return Err(Error::damaged(too_few(s, view.group().current_count()).context));
            }
            let left = self.left(self.lost_until(&view, s.deadline));
            if left.is_zero() {
                let Error { kind, context } = too_few(s, view.group().current_count());
                return Err(Error {
                    kind,
                    context: format!("{context}; not there: {}", view.missing_names()),
                });
            }
            waiting.replace(self.waits.begin(view.missing_names()));
            self.wait_newer(view.map_version(), left).await;
        }
    }

    /// Until when it is worth waiting for the members that a group lacks. Each change of the group is new hope.
    pub fn lost_until(&self, view: &GroupView, deadline: Instant) -> Instant {
        let (now, group) = (self.env.clock.now(), view.group());
        if may_return(&view.map, group) {
            return deadline;
        }
        let mut losses = self.losses.lock().expect("no holder panics");
        let loss = losses.entry(group.id).or_insert((group.epoch, now));
        if loss.0 != group.epoch {
            *loss = (group.epoch, now);
        }
        deadline.min(loss.1 + LOSS_PATIENCE)
    }

    /// Writes a whole stripe: k + m fragments. Returns under which epoch all live members have it. `again`: they may have it already.
    pub async fn write_stripe(
        &self,
        s: StripeRef,
        version: Version,
        mode: WriteMode,
        folded_seqs: &[Seq],
        fragments: &[Fragment],
        again: bool,
    ) -> Result<Epoch> {
        let send = |index: usize,
                    place: Place,
                    missing: MissingMask,
                    was: bool|
         -> BoxFuture<'_, Result<()>> {
            let patience = self.call_patience(s.deadline);
            let mark = MarkMissing { place, cell: s.cell(index), version, missing };
            let Fragment { payload, block_crcs } = fragments[index].clone();
            let folded_seqs = folded_seqs.to_vec();
            let request =
                WriteFragment { place, cell: s.cell(index), version, mode, missing, folded_seqs, block_crcs };
            Box::pin(async move {
                if again || was {
                    match self.call(place.target, &mark, vec![], patience).await {
                        // It was away, and what nobody else had then was taken for a write of which nothing came.
                        Err(e) if e.kind == ErrorKind::NotFound => {}
                        marked => return marked.map(|_| ()),
                    }
                }
                let crc = checksum::crc_of_blocks(&request.block_crcs, payload.len() as u64);
                let parts = Payload { parts: vec![payload], crc };
                self.call(place.target, &request, parts, patience).await.map(|_| ())
            })
        };
        let written = self.on_live_members(&s, send).await.map_err(|e| e.doing(format!("write {s}")))?;
        if written.missing != 0 {
            self.counters.degraded_writes.fetch_add(1, Relaxed);
        }
        Ok(written.epoch)
    }

    /// Every live member has the version: who lacks it takes it from others. Returns under which epoch. `NotFound`: too few have it.
    pub async fn hold_stripe(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<Epoch> {
        let send = |index: usize, place: Place, missing: MissingMask, _: bool| -> BoxFuture<'_, Result<()>> {
            let request = HoldStripe { place, cell: s.cell(index), version, missing, token_epoch };
            let patience = self.call_patience(s.deadline);
            Box::pin(async move { self.call(place.target, &request, vec![], patience).await.map(|_| ()) })
        };
        let held = self.on_live_members(&s, send).await.map_err(|e| e.doing(format!("commit {s}")))?;
        Ok(held.epoch)
    }

    /// Commits a version that all live members have under `held`, at each that is not `done`. False: the group has moved on, and who is
    /// live now must have it before anybody commits on: whoever commits is never alone with it, however many go away or die then.
    pub async fn commit_stripe(
        &self,
        s: StripeRef,
        version: Version,
        token_epoch: u32,
        held: Epoch,
        done: &mut Done,
    ) -> Result<bool> {
        let send = |index: usize, place: Place, _: MissingMask, was: bool| -> BoxFuture<'_, Result<()>> {
            let request = CommitStripe { place, cell: s.cell(index), version, token_epoch };
            let patience = self.call_patience(s.deadline);
            Box::pin(async move {
                match was {
                    true => Ok(()),
                    false => self.call(place.target, &request, vec![], patience).await.map(|_| ()),
                }
            })
        };
        let committed = self.on_members_under(&s, Some(held), done, &send).await;
        Ok(committed.map_err(|e| e.doing(format!("commit {s}")))?.is_some())
    }

    /// Drops a prepared version where it still is. Best effort: who finds it later decides the same.
    pub async fn drop_prepared(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        let send = |index: usize, place: Place, _: MissingMask, was: bool| -> BoxFuture<'_, Result<()>> {
            let request = DropPrepared { place, cell: s.cell(index), version, token_epoch };
            let patience = self.call_patience(s.deadline);
            Box::pin(async move {
                if was {
                    return Ok(());
                }
                self.call(place.target, &request, vec![], patience).await.map(|_| ())
            })
        };
        self.on_live_members(&s, send).await.map(|_| ())
    }

    /// Makes `send(index, place, missing, was)` succeed at every live member under one epoch of the group; `was`: the member did it
    /// before, under an earlier one.
    async fn on_live_members<'a, F>(&'a self, s: &StripeRef, send: F) -> Result<Everywhere>
    where
        F: Fn(usize, Place, MissingMask, bool) -> BoxFuture<'a, Result<()>>,
    {
        let mut done = Done::new();
        loop {
            if let Some(everywhere) = Box::pin(self.on_members_under(s, None, &mut done, &send)).await? {
                return Ok(everywhere);
            }
        }
    }

    /// The same under one certain epoch, if any; `None`: it has passed. `done`: who did it under which epoch.
    async fn on_members_under<'a, F>(
        &'a self,
        s: &StripeRef,
        under: Option<Epoch>,
        done: &mut Done,
        send: &F,
    ) -> Result<Option<Everywhere>>
    where
        F: Fn(usize, Place, MissingMask, bool) -> BoxFuture<'a, Result<()>>,
    {
        let (mut pause, mut waiting) = (RETRY_PAUSE, None);
        loop {
            let view = self.writable_view(s).await?;
            let (missing, epoch) = (view.down_mask(), view.group().epoch);
            if under.is_some_and(|under| under != epoch) {
                return Ok(None);
            }
            let mut calls = Join::new();
            for index in (0..s.scheme().width()).filter(|index| missing & (1 << index) == 0) {
                let was = done.get(&view.place(index).target);
                if was != Some(&epoch) {
                    calls.push(index, send(index, view.place(index), missing, was.is_some()));
                }
            }
            if calls.is_empty() {
                self.maps.note_written(view.map_version());
                return Ok(Some(Everywhere { missing, epoch }));
            }
            match self.round(s, &view, calls, done).await? {
                Round::Done => {}
                Round::MapChanged => pause = RETRY_PAUSE,
                Round::Again(index, last) => {
                    if self.left(s.deadline) <= pause {
                        return Err(Error::deadline(format!("not done by the deadline: {last}")));
                    }
                    waiting.replace(self.waits.begin(view.name_of(index)));
                    self.env.clock.sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
        }
    }

    /// Waits for one round of calls; gives up those whose member goes down meanwhile.
    async fn round(
        &self,
        s: &StripeRef,
        view: &GroupView,
        mut calls: Join<'_, Result<()>>,
        done: &mut Done,
    ) -> Result<Round> {
        let epoch = view.group().epoch;
        let mut version = view.map_version();
        let (mut stale, mut unreachable, mut refused) = (None, None, None);
        let mut watch = Latecomers::new(self.env.clock.now(), s.k(), self.usual_max(Pacing::Write));
        let mut suspicions = Join::new();
        loop {
            let next_suspicion = watch.next_suspicion();
            let answer = tokio::select! {
                biased;
                answer = calls.next() => answer,
                Some(_) = suspicions.next(), if !suspicions.is_empty() => continue,
                () = self.env.clock.sleep_until(next_suspicion.map_or(s.deadline, |(at, _)| at)), if next_suspicion.is_some() => {
                    let suspicion = watch.suspected();
                    for index in calls.numbers() {
                        suspicions.push(index, self.suspect(view.place(index), suspicion, "write a fragment"));
                    }
                    continue;
                }
                () = self.newer_map(version, s.deadline) => {
                    let now = self.view(s)?;
                    version = now.map_version();
                    for index in calls.give_up(|i| now.state(i) != MemberState::Down) {
                        unreachable = Some((index, Error::unavailable("the target went down")));
                    }
                    continue;
                }
            };
            match answer {
                None => break,
                Some((index, Ok(()))) => {
                    done.insert(view.place(index).target, epoch);
                    let took = watch.answered(self.env.clock.now());
                    self.note_latency(Pacing::Write, took);
                }
                Some((index, Err(e))) if e.kind == ErrorKind::Stale => stale = Some((index, e)),
                Some((index, Err(e))) if is_unreachable(&e) => {
                    self.report(view.place(index), &e).await;
                    unreachable = Some((index, e));
                }
                // What the others did is known before the caller decides what becomes of it.
                Some((_, Err(e))) => drop(refused.get_or_insert(e)),
            }
        }
        if let Some(e) = refused {
            return Err(e);
        }
        if let Some((index, e)) = stale {
            let map_changed = || Ok::<_, Error>(self.view(s)?.group().epoch > epoch);
            if map_changed()? {
                return Ok(Round::MapChanged);
            }
            if self.knows_no_newer(s, view, index).await {
                return Err(e); // a fence: this client's right to write has ended, or its token epoch was raised
            }
            self.wait_newer(view.map_version(), MAP_PATIENCE.min(self.left(s.deadline))).await;
            return Ok(if map_changed()? { Round::MapChanged } else { Round::Again(index, e) });
        }
        Ok(match unreachable {
            None => Round::Done,
            Some(_) if self.view(s)?.group().epoch > epoch => Round::MapChanged,
            Some((index, e)) => Round::Again(index, e.doing(format!("{} of {s}", view.place(index).target))),
        })
    }

    /// Whether a member that refused a write as stale takes other requests under the view's epoch. Then it was the write
    /// that it refused, and no newer map will help. Otherwise one is on its way, which takes as long as this client is
    /// cut off from the coordinator.
    async fn knows_no_newer(&self, s: &StripeRef, view: &GroupView, at: usize) -> bool {
        self.stat_cell(s, view, at, at).await.is_ok()
    }

    /// Returns when the map is newer than `version`; never before the deadline otherwise.
    pub async fn newer_map(&self, version: u64, deadline: Instant) {
        while self.cluster.map().version <= version {
            self.wait_newer(version, self.left(deadline).max(RETRY_PAUSE)).await;
        }
    }

    /// Writes extents into data cells; in parallel, each through its cell's sequencer.
    pub async fn write_overlays(&self, s: StripeRef, token_epoch: u32, overlays: &[Overlay]) -> Result<()> {
        let calls: Vec<BoxFuture<'_, Result<()>>> = overlays
            .iter()
            .map(|o| Box::pin(self.write_overlay(s, token_epoch, o)) as BoxFuture<'_, _>)
            .collect();
        join_all(calls).await.into_iter().collect::<Result<()>>().map_err(|e| e.doing(format!("write {s}")))
    }

    async fn write_overlay(&self, s: StripeRef, token_epoch: u32, o: &Overlay) -> Result<()> {
        let (kind, crc) = match &o.payload {
            Some(bytes) => (OverlayKind::Data, checksum::crc32c(bytes)),
            None => (OverlayKind::Zero, 0),
        };
        let payload = Payload { parts: o.payload.iter().cloned().collect(), crc: Some(crc) };
        let (mut pause, mut waiting) = (RETRY_PAUSE, None);
        let (write, mut attempt) = (self.env.rng.next_u64(), 0);
        loop {
            let view = self.writable_view(&s).await?;
            let through = view
                .sequencer(o.index, s.scheme())
                .ok_or_else(|| too_few(&s, view.group().current_count()))?;
            let place = view.place(through);
            let request = WriteOverlay {
                place,
                cell: s.cell(usize::from(o.index)),
                token_epoch,
                offset: o.offset,
                len: o.len,
                kind,
                crc,
                layout_scheme: s.scheme(),
                write,
                attempt,
            };
            let sent = self.call_member(&view, through, &request, payload.clone(), Pacing::Write, s.deadline);
            let e = match sent.await {
                Ok(answered) => {
                    self.maps.note_written(answered.reply.map_version);
                    return Ok(());
                }
                Err(e) => e,
            };
            if is_unreachable(&e) {
                self.report(place, &e).await;
            } else if e.kind != ErrorKind::Stale {
                return Err(e);
            }
            if self.view(&s)?.group().epoch == view.group().epoch {
                self.wait_newer(view.map_version(), MAP_PATIENCE.min(self.left(s.deadline))).await;
                let same = self.view(&s)?.group().epoch == view.group().epoch;
                if same && e.kind == ErrorKind::Stale && self.knows_no_newer(&s, &view, through).await {
                    return Err(e);
                }
            }
            if self.left(s.deadline) <= pause {
                return Err(Error::deadline(format!("not done by the deadline: {e}")));
            }
            waiting.replace(self.waits.begin(view.name_of(through)));
            self.env.clock.sleep(pause).await;
            attempt += 1;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// What a member holds of the stripe.
    pub async fn stat_cell(
        &self,
        s: &StripeRef,
        view: &GroupView,
        at: usize,
        cell: usize,
    ) -> Result<CellStat> {
        let request = StatCell { place: view.place(at), cell: s.cell(cell) };
        Ok(self.call_member(view, at, &request, vec![], Pacing::Read, s.deadline).await?.reply)
    }

    /// Asks members of the stripe's group, under one map, until all who are asked answer: who does not goes down, or answers
    /// the next time.
    async fn ask_members<'a, T, F>(&'a self, s: &'a StripeRef, ask: F) -> Result<T>
    where
        F: Fn(GroupView) -> BoxFuture<'a, Result<T>>,
    {
        let (mut pause, mut waiting) = (RETRY_PAUSE, None);
        loop {
            let view = self.writable_view(s).await?;
            let e = match ask(view.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(e) if is_unreachable(&e) || e.kind == ErrorKind::Stale => e,
                Err(e) => return Err(e),
            };
            if self.left(s.deadline) <= pause {
                return Err(Error::deadline(format!("not done by the deadline: {e}")));
            }
            waiting.replace(self.waits.begin(format!("targets of {}", view.group().id)));
            self.wait_newer(view.map_version(), pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    async fn stat_member(&self, s: &StripeRef, view: &GroupView, at: usize, cell: usize) -> Result<CellStat> {
        let stat = self.stat_cell(s, view, at, cell).await;
        if let Err(e) = &stat
            && is_unreachable(e)
            && self.view(s)?.state(at) != MemberState::Down
        {
            self.report(view.place(at), e).await;
        }
        stat
    }

    /// What each current member holds of the stripe.
    pub async fn stat_current(&self, s: &StripeRef) -> Result<Vec<CellStat>> {
        self.ask_members(s, |view| {
            Box::pin(async move {
                let current = (0..s.scheme().width()).filter(|i| view.state(*i) == MemberState::Current);
                let calls = current.map(|i| Box::pin(self.stat_member(s, &view, i, i)) as BoxFuture<'_, _>);
                join_all(calls.collect()).await.into_iter().collect()
            })
        })
        .await
    }

    /// Overlay sequence of each data cell, and the highest base version, before a stripe is replaced.
    pub async fn stripe_state(&self, s: &StripeRef) -> Result<(Vec<Seq>, Version)> {
        let cells: Vec<(Seq, Version)> = self
            .ask_members(s, |view| {
                Box::pin(async move {
                    let calls = (0..s.k()).map(|index| {
                        let asked = self.state_of_cell(s, &view, index);
                        Box::pin(asked) as BoxFuture<'_, Result<(Seq, Version)>>
                    });
                    join_all(calls.collect()).await.into_iter().collect()
                })
            })
            .await
            .map_err(|e| e.doing(format!("ask for {s}")))?;
        let base = cells.iter().map(|(_, base)| *base).max().unwrap_or_default();
        Ok((cells.into_iter().map(|(seq, _)| seq).collect(), base))
    }

    async fn state_of_cell(&self, s: &StripeRef, view: &GroupView, index: usize) -> Result<(Seq, Version)> {
        let at = view.sequencer(index as u8, s.scheme()).unwrap_or(index);
        let stat = self.stat_member(s, view, at, index).await?;
        let seqs = &stat.overlay_seqs;
        // A data cell's own target tells one number, a parity target one per data cell.
        let seq = if seqs.len() == s.k() { seqs.get(index) } else { seqs.first() };
        Ok((seq.copied().unwrap_or_default(), stat.base))
    }

    /// Truncates the file at every live target of its groups: stripes from `from_stripe` on hold nothing that
    /// was written with a token epoch below `fence`, and nobody writes with one any more. Members that are
    /// away learn of it when they return. Returns what is in doubt.
    pub async fn drop_file(
        &self,
        file: FileId,
        layout: &Layout,
        from_stripe: u64,
        fence: u32,
        deadline: Instant,
    ) -> Result<Vec<PreparedCell>> {
        let of_file = |g: PgId| g.0 >= layout.first_pg.0 && g.0 - layout.first_pg.0 < layout.pg_count;
        let doing = |e: Error| e.doing(format!("truncate file {file} from stripe {from_stripe} on"));
        let mut give_up = None;
        let mut pause = RETRY_PAUSE;
        loop {
            let map = self.cluster.map();
            let targets = match map.members_to_truncate(of_file) {
                Ok(targets) => targets,
                Err(e) => {
                    let comes_back = map.groups.iter().filter(|g| of_file(g.id)).all(|g| may_return(&map, g));
                    let patience =
                        if comes_back { self.left(deadline) } else { LOSS_PATIENCE.min(self.left(deadline)) };
                    let give_up = *give_up.get_or_insert_with(|| self.env.clock.now() + patience);
                    if self.left(give_up).is_zero() {
                        return Err(doing(e));
                    }
                    let _waiting = self.waits.begin("targets that are to truncate a file".into());
                    self.wait_newer(map.version, self.left(give_up)).await;
                    continue;
                }
            };
            give_up = None;
            let e = match self.drop_file_at(targets, file, from_stripe, fence, deadline).await {
                Ok(prepared) => {
                    self.maps.note_written(map.version);
                    return Ok(prepared);
                }
                Err(e) => e,
            };
            if self.left(deadline) <= pause {
                return Err(doing(Error::deadline(format!("not done by the deadline: {e}"))));
            }
            if e.kind == ErrorKind::Stale {
                self.wait_newer(map.version, MAP_PATIENCE.min(self.left(deadline))).await;
            } else if !is_unreachable(&e) {
                return Err(doing(e));
            } else if self.cluster.map().version == map.version {
                self.env.clock.sleep(pause).await;
                pause = (pause * 2).min(RETRY_PAUSE_MAX);
            }
        }
    }

    /// One round; an error reports the target that did not answer.
    async fn drop_file_at(
        &self,
        targets: BTreeMap<TargetId, Vec<GroupAt>>,
        file: FileId,
        from_stripe: u64,
        fence: u32,
        deadline: Instant,
    ) -> Result<Vec<PreparedCell>> {
        let calls = targets.into_iter().map(|(target, epochs)| {
            Box::pin(async move {
                let at = epochs.first().cloned().unwrap_or(GroupAt { group: PgId(0), epoch: Epoch(0) });
                let place = Place { target, group: at.group, epoch: at.epoch };
                let to_stripe = u64::MAX;
                let request = DropFile { target, file, from_stripe, to_stripe, fence, epochs };
                let down = |m: &Member| m.target == target && m.state == MemberState::Down;
                let is_down =
                    |map: &ClusterMap| map.group(at.group).is_some_and(|g| g.members.iter().any(down));
                let sent = self.call_while_up(place, is_down, &request, vec![], Pacing::Write, deadline);
                let answer = sent.await;
                if let Err(e) = &answer
                    && is_unreachable(e)
                {
                    self.report(place, e).await;
                }
                Ok(answer?.reply.prepared)
            }) as BoxFuture<'_, _>
        });
        let answers: Vec<Result<Vec<PreparedCell>>> = join_all(calls.collect()).await;
        let answers: Vec<Vec<PreparedCell>> = answers.into_iter().collect::<Result<_>>()?;
        let mut prepared: Vec<PreparedCell> = answers.into_iter().flatten().collect();
        prepared.sort_by_key(|p| (p.cell, p.version));
        Ok(prepared)
    }
}

/// Which suspicion comes next in one round of calls, and when.
struct Latecomers {
    begun: Instant,
    k: usize,
    usual_max: Duration,
    answered: Vec<Duration>,
    last: Option<Suspicion>,
}

impl Latecomers {
    fn new(begun: Instant, k: usize, usual_max: Duration) -> Latecomers {
        Latecomers { begun, k, usual_max, answered: Vec::new(), last: None }
    }
    fn answered(&mut self, now: Instant) -> Duration {
        let took = now.since(self.begun);
        self.answered.push(took);
        took
    }
    fn next_suspicion(&self) -> Option<(Instant, Suspicion)> {
        let suspicions = latency::of_write(&self.answered, self.k, self.usual_max)?;
        match self.last {
            None => Some((self.begun + suspicions.silent_after, Suspicion::Unreachable)),
            Some(Suspicion::Unreachable) => {
                suspicions.slow_after.map(|after| (self.begun + after, Suspicion::Slow))
            }
            Some(Suspicion::Slow | Suspicion::Failed) => None,
        }
    }
    /// The next suspicion's time has come.
    fn suspected(&mut self) -> Suspicion {
        let suspicion = self.next_suspicion().map_or(Suspicion::Unreachable, |(_, suspicion)| suspicion);
        self.last = Some(suspicion);
        suspicion
    }
}

/// Which members did something, and under which epoch of the group. By target: a place may go to another one
/// meanwhile.
pub type Done = BTreeMap<TargetId, Epoch>;

/// All live members of an epoch did it.
struct Everywhere {
    missing: MissingMask,
    epoch: Epoch,
}

enum Round {
    Done,
    MapChanged,
    /// The member at this index did not do it.
    Again(usize, Error),
}

/// Whether a group that lacks members has enough again once those are back that are only away.
fn may_return(map: &ClusterMap, group: &Group) -> bool {
    let failed = |m: &Member| map.target(m.target).is_none_or(|t| t.state == TargetState::Failed);
    // Who is behind needs others for its repair: it counts only if some are still to come.
    let hopeful = |m: &&Member| m.state == MemberState::Current || (!failed(m) && !m.is_lost());
    let some_are_away = group.members.iter().any(|m| m.state == MemberState::Down && !failed(m));
    some_are_away && group.members.iter().filter(hopeful).count() >= usize::from(group.scheme.data)
}

/// Fewer than k members hold everything.
pub fn too_few(s: &StripeRef, current: usize) -> Error {
    Error::unavailable(format!("{s}: {current} of its targets are usable, {} are needed", s.k()))
}

/// Fragments of a stripe from its data cells (each at most a cell long, in order): parity and checksums computed once.
pub fn encode(coder: &Coder, env: &Env, cells: Vec<Bytes>) -> Result<Vec<Fragment>> {
    let m = usize::from(coder.scheme().parity);
    let longest = cells.iter().map(Bytes::len).max().unwrap_or(0);
    let mut parity: Vec<_> = (0..m).map(|_| env.buffers.get(longest)).collect();
    {
        let data: Vec<&[u8]> = cells.iter().map(|c| &c[..]).collect();
        let mut out: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
        coder.encode(&data, &mut out)?;
    }
    let all = cells.into_iter().chain(parity.into_iter().map(|p| p.freeze()));
    Ok(all
        .map(|payload| Fragment {
            block_crcs: checksum::block_crcs(&payload, CHECKSUM_BLOCK as usize),
            payload,
        })
        .collect())
}
