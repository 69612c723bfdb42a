//! Fragments and overlays to targets: which members are asked, and what follows if one does not answer.
//!
//! Invariants: a write returns only when every live member of the group's newest map has it, and written data
//! carries the mask of the members that lack it; fewer than k current members is an error that names the
//! stripe; everything ends by its deadline. Knows nothing of sizes, leases, buffers or handles.
mod flight;
mod full;
mod gate;
mod merge;
mod overlays;
mod round;
mod state;
mod truncate;

pub use crate::group::StripeRef;
use crate::join::join_all;
use crate::maps::MapsSeen;
use crate::member::Latencies;
use crate::status::Counters;
use crate::waits::Waits;
use crate::window::Ended;
use bytes::Bytes;
use flight::Flight;
pub use flight::STRIPE_PARTS;
use gate::Gates;
pub use gate::{Departure, Departures};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use weir_coord::Cluster;
use weir_env::{Backoff, BoxFuture, Env, Instant, Retry};
use weir_proto::data::{
    CHECKSUM_BLOCK, CommitStripe, DropPrepared, HoldStripe, MarkMissing, MissingMask, Place, StatTarget,
    WriteFragment, WriteMode,
};
use weir_proto::ec::Coder;
use weir_proto::map::{ClusterMap, Group, Layout, Member, MemberState, Scheme, TargetState};
use weir_proto::{
    Epoch, Error, ErrorKind, FileId, InodeId, NamespaceId, PgId, Request, Result, Seq, TargetId, Version,
    checksum,
};
use weir_rpc::{Answered, Payload};

/// A live process answers within this time whether it lives.
const STAT_PATIENCE: Duration = Duration::from_secs(5);
/// The wait for a group that lacks members which do not return by themselves (failed disks), counted from its
/// last change. Later callers get the error at once. A call waits for members that are only away until its
/// deadline.
pub const LOSS_PATIENCE: Duration = Duration::from_secs(12);
/// A write that a full target refuses waits this long for the move of its place, if that is planned.
pub const FULL_PATIENCE: Duration = Duration::from_secs(30);
/// A target whose disk has completed nothing for this time is as silent as a dead one, though its process
/// answers. A busy disk completes some request all the time.
const STALLED_MS_MAX: u32 = 2000;
/// The longest wait of a call that failed for the right to be tried again: it is sent only with a place in
/// the target's window then, so even thousands of them are two at a time.
const RETRY_HELD_MAX: Duration = Duration::from_secs(5);
/// A refused epoch means that a newer map will arrive soon.
pub const MAP_PATIENCE: Duration = Duration::from_millis(500);
/// Late reads that are decoded at the same time: each reads k times the bytes, and the late target may just
/// be busy.
const HEDGES_MAX: usize = 8;
/// First pause before a live member is retried; doubles up to a second.
const RETRY: Backoff = Backoff { first: Duration::from_millis(20), max: Duration::from_secs(1) };

/// This client's access to the targets.
pub struct Data {
    pub env: Env,
    pub cluster: Cluster,
    pub counters: Arc<Counters>,
    namespace: NamespaceId,
    pub flight: Flight,
    maps: Arc<MapsSeen>,
    /// Reads that are decoded from other members because an answer is late.
    pub hedges: Semaphore,
    pub latencies: Mutex<Latencies>,
    pub waits: Arc<Waits>,
    /// Calls in flight to each target, and those that wait for their turn.
    gates: Gates,
    coders: Mutex<BTreeMap<Scheme, Arc<Coder>>>,
    /// Groups that had too few members at a call: the epoch, and since when. At most one entry per group.
    losses: Mutex<BTreeMap<PgId, (Epoch, Instant)>>,
    /// Groups in which a full member refused a write.
    full: Mutex<BTreeMap<PgId, full::FullGroup>>,
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
    /// The members that are not current, by name.
    pub fn missing_names(&self) -> String {
        let mut missing: Vec<usize> =
            (0..self.group().members.len()).filter(|i| self.state(*i) != MemberState::Current).collect();
        missing.sort_by_key(|i| self.place(*i).target);
        missing.into_iter().map(|i| self.name_of(i)).collect::<Vec<_>>().join(", ")
    }
    /// The member that numbers the overlays of a data cell: the first current one of its own target and the
    /// parity targets.
    pub fn sequencer(&self, cell: u8, scheme: Scheme) -> Option<usize> {
        let parity = usize::from(scheme.data)..scheme.width();
        std::iter::once(usize::from(cell)).chain(parity).find(|i| self.state(*i) == MemberState::Current)
    }
}

/// Whether another member or a retry can help.
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
        // The target lives; the call was tried until its deadline.
        | ErrorKind::Busy { .. }
        | ErrorKind::Stale
        | ErrorKind::Damaged
        | ErrorKind::Unsupported => false,
    }
}

impl Data {
    pub fn new(
        env: Env,
        cluster: Cluster,
        namespace: NamespaceId,
        counters: Arc<Counters>,
        maps: Arc<MapsSeen>,
    ) -> Data {
        Data {
            waits: Waits::new(&env),
            gates: Gates::new(&env),
            env,
            cluster,
            counters,
            namespace,
            flight: Flight::default(),
            maps,
            hedges: Semaphore::new(HEDGES_MAX),
            latencies: Mutex::default(),
            coders: Mutex::default(),
            losses: Mutex::default(),
            full: Mutex::default(),
        }
    }

    /// An object's bytes on targets.
    pub fn file_id(&self, object: InodeId) -> FileId {
        FileId { namespace: self.namespace, inode: object }
    }
    pub fn stripe(&self, object: InodeId, layout: Layout, stripe: u64, deadline: Instant) -> StripeRef {
        StripeRef { file: self.file_id(object), layout, stripe, deadline, floor: 0 }
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

    /// The stripe's group in the newest map. Checks the assumptions of the rest of this crate.
    pub fn view(&self, s: &StripeRef) -> Result<GroupView> {
        self.view_of(s.layout.pg_of_stripe(s.stripe), s.scheme()).map_err(|e| e.doing(s))
    }
    /// The same for a group.
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
    /// Returns when this client has the map under which the data to read was written: see [`MapsSeen`].
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
        // No newer map is not an error here: the caller checks again.
        let _ = self.cluster.wait_newer(version, patience).await;
    }

    /// After members of a group have refused a call or not answered it: whether a newer map changes the
    /// members to ask.
    pub async fn is_regrouped(&self, view: &GroupView, deadline: Instant) -> bool {
        self.wait_newer(view.map_version(), MAP_PATIENCE.min(self.left(deadline))).await;
        let (map, group) = (self.cluster.map(), view.group());
        map.group(group.id).is_some_and(|now| now.epoch > group.epoch)
    }

    pub fn retry(&self, deadline: Instant) -> Retry {
        Retry::jittered(&self.env, RETRY, deadline)
    }
    pub fn left(&self, deadline: Instant) -> Duration {
        deadline.since(self.env.clock.now())
    }

    /// One call to one target, without a second try: it is sent when the target's window has a place for it,
    /// and then may take the target's [`crate::window::CallPatience`]. A busy target is asked again until the
    /// deadline: it has not begun the call.
    pub async fn call<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: impl Into<Payload>,
        deadline: Instant,
        departure: Departure,
    ) -> Result<Answered<R::Reply>> {
        let payload = payload.into();
        let mut ticket = None;
        loop {
            let (pass, waited) = self.gates.enter(target, &mut ticket, deadline, R::NAME).await?;
            departure.sent(pass.sent, waited);
            let patience = self.left(deadline).min(self.gates.call_patience(target));
            match self.cluster.call_target(target, request, payload.clone(), patience).await {
                Ok(answered) => {
                    pass.end(Ended::Answered);
                    self.counters.wire_sent_bytes.fetch_add(payload.len() as u64, Relaxed);
                    self.counters.wire_received_bytes.fetch_add(answered.payload.len() as u64, Relaxed);
                    return Ok(answered);
                }
                Err(Error { kind: ErrorKind::Busy { wait_ms }, .. }) => {
                    departure.returned();
                    pass.refused(Duration::from_millis(wait_ms.into()), &mut ticket);
                }
                Err(e) => {
                    let is_silent = matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Deadline);
                    pass.end(if is_silent { Ended::Failed } else { Ended::Answered });
                    return Err(e);
                }
            }
        }
    }

    /// Reports to the coordinator that a target did not answer; waits for its verdict, and until the call may
    /// be tried again: at once under a newer epoch.
    pub async fn report(&self, place: Place, why: &Error) {
        let mut lives = self.report_only(place, why).await;
        let until = self.env.clock.now() + RETRY_HELD_MAX;
        loop {
            let map = self.cluster.map();
            let is_regrouped = map.group(place.group).is_none_or(|now| now.epoch > place.epoch);
            if is_regrouped || self.left(until).is_zero() {
                return;
            }
            if std::mem::take(&mut lives) {
                self.gates.note_process(place.target);
            }
            let Some(after) = self.gates.retry_after(place.target) else { return };
            self.wait_newer(map.version, after.min(self.left(until))).await;
        }
    }
    /// Reports to the coordinator that a target did not answer; waits for its verdict. For a caller that will
    /// ask other members. True: it was evaluated.
    pub async fn report_only(&self, place: Place, why: &Error) -> bool {
        let reported =
            self.cluster.report_target(place.target, place.group, place.epoch, &why.to_string()).await;
        if let Err(e) = &reported {
            tracing::debug!(target_id = %place.target, "not reported to the coordinator: {why}: {e}");
        }
        reported.is_ok()
    }
    /// Whether calls to the target wait for their turn.
    pub fn is_crowded(&self, target: TargetId) -> bool {
        self.gates.is_crowded(target)
    }
    /// Asks members of the stripe's group that have not answered whether they live. That takes neither their
    /// disks nor a place in their queues.
    pub async fn ask_silent_members(&self, s: &StripeRef) {
        let Ok(view) = self.view(s) else { return };
        let targets = (0..s.scheme().width()).map(|index| view.place(index).target);
        let silent = targets.filter(|target| self.gates.silent_since(*target).is_some());
        let asked = silent.map(|target| {
            Box::pin(async move {
                let stat = StatTarget { target };
                let asked = self.cluster.call_target(target, &stat, Payload::default(), STAT_PATIENCE).await;
                let Ok(answered) = asked else { return };
                self.gates.note_process(target);
                if answered.reply.report.stalled_ms < STALLED_MS_MAX {
                    self.gates.note_alive(target);
                }
            }) as BoxFuture<'_, ()>
        });
        join_all(asked.collect()).await;
    }
    /// For how long, since `begun`, a member that a write to the stripe needs has not answered.
    pub fn silent_for(&self, s: &StripeRef, begun: Instant) -> Duration {
        let Ok(view) = self.view(s) else { return Duration::ZERO };
        // Without those that are down the write proceeds, if enough are left.
        let needs_all = view.group().current_count() < s.needed();
        let since = |index: usize| match view.state(index) {
            MemberState::Down => needs_all.then_some(begun),
            _ => self.gates.silent_since(view.place(index).target),
        };
        let first = (0..s.scheme().width()).filter_map(since).min();
        first.map_or(Duration::ZERO, |first| self.env.clock.now().since(first.max(begun)))
    }
    /// Whether more members of the group are lost than it can lose, and the wait for them is over.
    pub fn is_lost_for_good(&self, s: &StripeRef) -> bool {
        let Ok(view) = self.view(s) else { return false };
        let group = view.group();
        group.is_lost()
            || group.current_count() < s.needed() && self.left(self.enough_until(&view, s)).is_zero()
    }

    /// A view with at least k current members, or as many as the volume's floor, or the error that names the
    /// stripe.
    pub async fn writable_view(&self, s: &StripeRef) -> Result<GroupView> {
        let mut waiting = None;
        loop {
            let view = self.view(s)?;
            let closed = view.map.is_closed(view.group());
            let current = view.group().current_count();
            if current >= s.needed() && !closed {
                return Ok(view);
            }
            if closed && !self.left(s.deadline).is_zero() {
                waiting.replace(self.waits.begin(format!("the move of a place of {}", view.group().id)));
                self.wait_newer(view.map_version(), self.left(s.deadline)).await;
                continue;
            }
            if view.group().is_lost() {
                return Err(too_few(s, current).of_kind(ErrorKind::Damaged));
            }
            let left = self.left(self.enough_until(&view, s));
            if left.is_zero() {
                let e = too_few(s, current);
                let context = format!("{}; not there: {}", e.context, view.missing_names());
                return Err(Error { context, ..e });
            }
            waiting.replace(self.waits.begin(awaited(s, &view)));
            self.wait_newer(view.map_version(), left).await;
        }
    }

    /// The end of the wait for the members that a group lacks. Each change of the group restarts it.
    pub fn lost_until(&self, view: &GroupView, deadline: Instant) -> Instant {
        if may_return(&view.map, view.group()) { deadline } else { self.soon(view, deadline) }
    }
    /// The end of the wait for the members that a write to the stripe lacks.
    fn enough_until(&self, view: &GroupView, s: &StripeRef) -> Instant {
        match view.group().is_writable() {
            false => self.lost_until(view, s.deadline),
            true if may_reach(&view.map, view.group(), s.needed()) => s.deadline,
            true => self.soon(view, s.deadline),
        }
    }
    fn soon(&self, view: &GroupView, deadline: Instant) -> Instant {
        let (now, group) = (self.env.clock.now(), view.group());
        let mut losses = self.losses.lock().expect("no holder panics");
        let loss = losses.entry(group.id).or_insert((group.epoch, now));
        if loss.0 != group.epoch {
            *loss = (group.epoch, now);
        }
        deadline.min(loss.1 + LOSS_PATIENCE)
    }

    /// Writes a whole stripe: k + m fragments. Returns the epoch under which all live members have it.
    /// `again`: they may have it already.
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
                    Turn { was, departure }: Turn|
         -> BoxFuture<'_, Result<()>> {
            let mark = MarkMissing { place, cell: s.cell(index), version, missing };
            let Fragment { payload, block_crcs } = fragments[index].clone();
            let folded_seqs = folded_seqs.to_vec();
            let request =
                WriteFragment { place, cell: s.cell(index), version, mode, missing, folded_seqs, block_crcs };
            Box::pin(async move {
                if again || was {
                    match self.call(place.target, &mark, vec![], s.deadline, departure.clone()).await {
                        // The member was away, and its repair dropped the fragment: no other member had the
                        // version then, as after a failed write.
                        Err(e) if e.kind == ErrorKind::NotFound => {}
                        marked => return marked.map(|_| ()),
                    }
                }
                let crc = checksum::crc_of_blocks(&request.block_crcs, payload.len() as u64);
                let parts = Payload { parts: vec![payload], crc };
                self.call(place.target, &request, parts, s.deadline, departure).await.map(|_| ())
            })
        };
        let written = self.on_live_members(&s, send).await.map_err(|e| e.doing(format!("write {s}")))?;
        if written.missing != 0 {
            self.counters.degraded_writes.fetch_add(1, Relaxed);
        }
        Ok(written.epoch)
    }

    /// Makes every live member have the version: one that lacks it rebuilds it from the others. Returns the
    /// epoch. `NotFound`: too few have it.
    pub async fn hold_stripe(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<Epoch> {
        let send =
            |index: usize, place: Place, missing: MissingMask, turn: Turn| -> BoxFuture<'_, Result<()>> {
                let request = HoldStripe { place, cell: s.cell(index), version, missing, token_epoch };
                Box::pin(async move {
                    self.call(place.target, &request, vec![], s.deadline, turn.departure).await.map(|_| ())
                })
            };
        let held = self.on_live_members(&s, send).await.map_err(|e| e.doing(format!("commit {s}")))?;
        Ok(held.epoch)
    }

    /// Commits a version that all live members have under `held`, at each that is not in `done`. False: the
    /// group has a newer epoch, and its live members must have the version before any further commit: a
    /// member that commits is never the only one with it, even if any number of members fail afterwards.
    pub async fn commit_stripe(
        &self,
        s: StripeRef,
        version: Version,
        token_epoch: u32,
        held: Epoch,
        done: &mut Done,
    ) -> Result<bool> {
        let send = |index: usize, place: Place, _: MissingMask, turn: Turn| -> BoxFuture<'_, Result<()>> {
            let request = CommitStripe { place, cell: s.cell(index), version, token_epoch };
            Box::pin(async move {
                if turn.was {
                    return Ok(());
                }
                self.call(place.target, &request, vec![], s.deadline, turn.departure).await.map(|_| ())
            })
        };
        let committed = self.on_members_under(&s, Some(held), done, &send).await;
        Ok(committed.map_err(|e| e.doing(format!("commit {s}")))?.is_some())
    }

    /// Drops a prepared version where it still exists. Best effort: a later reader or repair decides the
    /// same.
    pub async fn drop_prepared(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        let send = |index: usize, place: Place, _: MissingMask, turn: Turn| -> BoxFuture<'_, Result<()>> {
            let request = DropPrepared { place, cell: s.cell(index), version, token_epoch };
            Box::pin(async move {
                if turn.was {
                    return Ok(());
                }
                self.call(place.target, &request, vec![], s.deadline, turn.departure).await.map(|_| ())
            })
        };
        self.on_live_members(&s, send).await.map(|_| ())
    }

    /// Whether a member that refused a write as stale accepts other requests under the view's epoch. Then it
    /// refused the write itself, and no newer map will help. Otherwise a newer map will arrive, as soon as
    /// this client can reach the coordinator.
    pub async fn knows_no_newer(&self, s: &StripeRef, view: &GroupView, at: usize) -> bool {
        self.stat_cell(s, view, at, at).await.is_ok()
    }

    /// Returns when the map is newer than `version`; never before the deadline otherwise.
    pub async fn newer_map(&self, version: u64, deadline: Instant) {
        while self.cluster.map().version <= version {
            self.wait_newer(version, self.left(deadline).max(RETRY.first)).await;
        }
    }
}

/// One call of a round.
pub struct Turn {
    /// The member applied the change before, under an earlier epoch.
    pub was: bool,
    /// Records when it was sent.
    pub departure: Departure,
}

/// The members that applied a change, and the epoch of each. By target: a place in the group may get another
/// target meanwhile.
pub type Done = BTreeMap<TargetId, Epoch>;

/// Whether a group that lacks members has enough again once the members that are only away have returned.
pub fn may_return(map: &ClusterMap, group: &Group) -> bool {
    let failed = |m: &Member| map.target(m.target).is_none_or(|t| t.state == TargetState::Failed);
    // A member that is behind needs others for its repair: it counts only if some of those may return.
    let hopeful = |m: &&Member| m.state == MemberState::Current || (!failed(m) && !m.is_lost());
    let some_are_away = group.members.iter().any(|m| m.state == MemberState::Down && !failed(m));
    some_are_away && group.members.iter().filter(hopeful).count() >= usize::from(group.scheme.data)
}

/// Whether a group with k current members or more may have `needed`: others return, or are repaired.
fn may_reach(map: &ClusterMap, group: &Group, needed: usize) -> bool {
    let failed = |m: &Member| map.target(m.target).is_none_or(|t| t.state == TargetState::Failed);
    group.members.iter().filter(|m| m.state == MemberState::Current || !failed(m)).count() >= needed
}

/// The members that a write waits for, as administrators see them.
fn awaited(s: &StripeRef, view: &GroupView) -> String {
    match view.group().is_writable() {
        true => format!("{} (the volume's write floor is {} current members)", view.missing_names(), s.floor),
        false => view.missing_names(),
    }
}

/// Fewer members hold everything than are needed.
pub fn too_few(s: &StripeRef, current: usize) -> Error {
    let needed = s.needed();
    Error::unavailable(match current >= s.k() {
        true => format!("{s}: {current} of its targets are current, its volume's write floor is {needed}"),
        false => format!("{s}: {current} of its targets are usable, {} are needed", s.k()),
    })
}

/// Fragments of a stripe from its data cells (each at most a cell long, in order): parity and checksums
/// computed once.
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
