//! The service of the storage role: requests to the targets of one node.
//!
//! A request is checked against the cluster map (group, epoch, place) before it reaches the store; with an
//! epoch above the map's it waits for the newer map. Short work that touches no slab runs in place; the rest
//! runs where blocking is allowed. A client's request that cannot be done in time is refused at the target's
//! door; one whose caller no longer waits is not begun. An overlay is acknowledged when it is durable at
//! every live member of the group's epoch that keeps this cell's log.
use crate::alloc::Geometry;
use crate::cells::{Appended, Numbering, Scope};
use crate::compare::Comparer;
use crate::crash_points;
use crate::door::Door;
use crate::forgetting::Forgetting;
use crate::format;
use crate::pace::Pace;
use crate::peers::{PeerReply, PeerRequest, Peers, join_all};
use crate::scrub::Scrubber;
use crate::store::{INLINE_BYTES_MAX, OverlayWrite, Store};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use weir_env::{BoxFuture, Env, Instant};
use weir_kv::{CommitSeq, SharedKv};
use weir_proto::coord::TargetReport;
use weir_proto::data::*;
use weir_proto::life::TargetLife;
use weir_proto::map::{ClusterMap, Group, MemberState};
use weir_proto::methods;
use weir_proto::{
    CellId, Epoch, Error, ErrorKind, FileId, PgId, Request, Result, Seq, TargetId, Version, Wire,
};
use weir_rpc::{Answered, Call, Demand, Handled, Payload, Reply, Service};
use weir_watch::{Counter, Object, Reason};

/// How long a request with a newer epoch waits for the map that explains it.
const MAP_PATIENCE: Duration = Duration::from_secs(3);
/// How long one call to a peer may take.
pub const PEER_PATIENCE: Duration = Duration::from_secs(10);
/// How long a truncation waits here for the writes that it fences to end.
const FENCE_PATIENCE: Duration = Duration::from_secs(2);
/// Stripes with recent overlays that are remembered one by one; beyond that the index is scanned again.
pub const RECENT_MAX: usize = 65_536;
/// Stripes of a target repaired in parallel: each needs up to k + 1 fragments in memory.
pub(crate) const STRIPES_AT_ONCE: usize = 4;
/// Calls that this node forwards at a time for nodes that cannot reach their target: a quarter of the calls
/// of a connection, so that they never use up a link.
const PASSED_ON_MAX: usize = 256;
/// The pause of a node whose call is not forwarded for that reason.
const PASSED_ON_PAUSE: Duration = Duration::from_millis(100);
/// Cells waiting to be verified because they are suspected of damage.
const SUSPECTS_MAX: usize = 4096;

mod admission;
mod agree;
mod disk;
mod overlays;
mod reads;
mod tail;
mod under_way;
mod writes;

pub use overlays::{down_mask, sequencer};

/// One target of a node.
pub struct TargetConfig {
    pub id: TargetId,
    pub dir: PathBuf,
    /// Size of slabs and steps for a new target.
    pub geometry: Geometry,
}

/// The storage role of one node. Runs background work in [`StorageNode::run`].
pub struct StorageNode {
    pub(crate) env: Env,
    pub(crate) targets: BTreeMap<TargetId, Arc<Target>>,
    pub(crate) peers: Arc<dyn Peers>,
    /// Permits for calls that are forwarded.
    passing_on: Arc<Semaphore>,
    /// For futures and tasks that keep a reference to this node.
    this: std::sync::Weak<StorageNode>,
}

pub(crate) struct Target {
    pub store: Arc<Store>,
    /// Requests of clients in progress.
    door: Arc<Door>,
    /// An overlay was logged: mirrors that wait for a number check again.
    progress: Notify,
    pub recent: Mutex<Recent>,
    suspects: Mutex<BTreeSet<CellId>>,
    /// The epoch of each group under which its missing bits were last cleared.
    pub settled: Mutex<BTreeMap<PgId, Epoch>>,
    /// The newest truncation that was learned from each peer.
    pub truncations_of: Mutex<BTreeMap<TargetId, u64>>,
    pub forgetting: Mutex<Forgetting>,
    /// Per group: the loss up to which cells from before it were dropped.
    pub forgotten: Mutex<BTreeMap<PgId, Epoch>>,
    pub refill: Mutex<crate::refilled::Refill>,
    /// Overlay logs that may differ from others' copies.
    agreement: Mutex<agree::Agreement>,
    /// Overlay logs that were compared with others' copies since the start.
    pub tails: tail::Tails,
    /// Overlays that were numbered here, or are about to be, and are not yet known to be on all keepers or on
    /// none.
    under_way: under_way::UnderWay,
    /// Permits for stripe repairs, shared by all groups.
    pub repairs: Semaphore,
    pub scrubber: Scrubber,
    pub comparer: Comparer,
    /// Rate at which this target copies cells from other members.
    pub pace: Pace,
    /// Bytes of places that came here, copied or rebuilt.
    pub copied: Counter,
}

/// Stripes with overlays logged here lately whose seal this target leads.
#[derive(Default)]
pub(crate) struct Recent {
    pub stripes: BTreeMap<(FileId, u64), RecentStripe>,
    /// Some stripes were not remembered: scan the index when there is time.
    pub incomplete: bool,
    /// The groups whose seals this target led at the last check.
    pub leads: BTreeSet<PgId>,
}

/// A stripe's overlays since it was last checked.
pub(crate) struct RecentStripe {
    pub group: PgId,
    /// Time of the last one.
    pub at: Instant,
    pub bytes: u64,
    pub count: u64,
}

/// The target, place and map for a request.
#[derive(Clone)]
pub(crate) struct Acting {
    pub target: Arc<Target>,
    pub scope: Scope,
    pub map: Arc<ClusterMap>,
    /// Which member of the group the target is.
    pub position: usize,
}
impl Acting {
    pub fn group(&self) -> &Group {
        self.map.group(self.scope.group).expect("looked up when this was made")
    }
    /// Overlays were logged: mirrors that wait for a number check again, and a seal leader records the
    /// stripe.
    fn logged(&self, cell: CellId, parts: &[OverlayPart], now: Instant) {
        self.target.progress.notify_waiters();
        if seal_leader(self.group()) != Some(self.position) {
            return;
        }
        let mut recent = self.target.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let stripe = (cell.file, cell.stripe);
        if recent.stripes.len() >= RECENT_MAX && !recent.stripes.contains_key(&stripe) {
            recent.incomplete = true;
            return;
        }
        let group = self.scope.group;
        let entry =
            recent.stripes.entry(stripe).or_insert(RecentStripe { group, at: now, bytes: 0, count: 0 });
        entry.at = now;
        entry.bytes += parts.iter().map(|part| u64::from(part.len)).sum::<u64>();
        entry.count += parts.len() as u64;
    }
    fn state(&self) -> MemberState {
        self.group().members[self.position].state
    }
}

/// Ready, or the map must first be newer than the version.
enum Admit {
    Ready(Acting),
    NeedsMap(u64),
}

impl StorageNode {
    /// Opens the targets over indexes that are open already.
    pub async fn open_over(
        env: Env,
        targets: Vec<(TargetConfig, SharedKv)>,
        peers: Arc<dyn Peers>,
    ) -> Result<Arc<StorageNode>> {
        let mut opened = BTreeMap::new();
        for (config, kv) in targets {
            let (store_env, id) = (env.clone(), config.id);
            let store = env
                .tasks
                .blocking(move || Store::open(store_env, config.id, &config.dir, kv, config.geometry))
                .await?;
            let target = Target {
                store: Arc::new(store),
                door: Arc::default(),
                progress: Notify::new(),
                recent: Mutex::new(Recent { incomplete: true, ..Recent::default() }),
                suspects: Mutex::default(),
                settled: Mutex::default(),
                under_way: under_way::UnderWay::default(),
                truncations_of: Mutex::default(),
                forgetting: Mutex::default(),
                forgotten: Mutex::default(),
                refill: Mutex::default(),
                agreement: Mutex::default(),
                tails: tail::Tails::default(),
                repairs: Semaphore::new(STRIPES_AT_ONCE),
                scrubber: Scrubber::default(),
                comparer: Comparer::default(),
                pace: Pace::default(),
                copied: env.watch.counter("weir_store_copied_bytes_total", ("target", &id.to_string())),
            };
            opened.insert(id, Arc::new(target));
        }
        let passing_on = Arc::new(Semaphore::new(PASSED_ON_MAX));
        let node = |this: &std::sync::Weak<StorageNode>| StorageNode {
            env,
            targets: opened,
            peers,
            passing_on,
            this: this.clone(),
        };
        Ok(Arc::new_cyclic(node))
    }

    /// For heartbeats.
    pub fn reports(&self) -> Vec<TargetReport> {
        self.targets.values().map(|t| t.store.report()).collect()
    }

    /// For signs of life: waits for nothing.
    pub fn lives(&self) -> Vec<TargetLife> {
        self.targets.values().map(|t| t.store.life()).collect()
    }

    /// The directory of a target of this node.
    pub fn dir_of(&self, target: TargetId) -> Option<&Path> {
        self.targets.get(&target).map(|t| t.store.dir())
    }

    /// A request of this node itself.
    pub fn dispatch(&self, method: u16, body: &[u8], payload: Bytes, deadline: Instant) -> Handled {
        self.dispatch_for(method, body, payload, Demand::until(deadline))
    }
    /// A request from anywhere. `demand`: whether its caller still waits.
    fn dispatch_for(&self, method: u16, body: &[u8], payload: Bytes, demand: Demand) -> Handled {
        let deadline = demand.deadline();
        let handled = match method {
            WriteFragment::METHOD => {
                WriteFragment::from_bytes(body).map(|r| self.write_fragment(r, payload, demand))
            }
            HoldStripe::METHOD => HoldStripe::from_bytes(body).map(|r| self.hold_stripe(r)),
            CommitStripe::METHOD => CommitStripe::from_bytes(body).map(|r| self.commit_stripe(r)),
            DropPrepared::METHOD => DropPrepared::from_bytes(body).map(|r| self.drop_prepared(r)),
            WriteOverlay::METHOD => WriteOverlay::from_bytes(body).map(|r| {
                let target = self.target(r.place.target);
                let written = self.write_overlay(r, payload, deadline);
                target.map_or_else(|e| Handled::Now(Err(e)), |target| self.felt(target, written))
            }),
            WriteOverlays::METHOD => WriteOverlays::from_bytes(body).map(|r| {
                let target = self.target(r.place.target);
                let written = self.write_overlays(r, payload, deadline);
                target.map_or_else(|e| Handled::Now(Err(e)), |target| self.felt(target, written))
            }),
            MirrorOverlays::METHOD => MirrorOverlays::from_bytes(body).map(|r| {
                let target = self.target(r.place.target);
                let written = self.mirror_overlays(r, payload);
                target.map_or_else(|e| Handled::Now(Err(e)), |target| self.felt(target, written))
            }),
            MirrorOverlay::METHOD => MirrorOverlay::from_bytes(body).map(|r| {
                let target = self.target(r.place.target);
                let written = self.mirror_overlay(r, payload);
                target.map_or_else(|e| Handled::Now(Err(e)), |target| self.felt(target, written))
            }),
            ReadCell::METHOD => ReadCell::from_bytes(body).map(|r| self.read_cell(r, demand)),
            ReadOverlays::METHOD => ReadOverlays::from_bytes(body).map(|r| self.read_overlays(r, demand)),
            StatCell::METHOD => StatCell::from_bytes(body).map(|r| self.stat_cell(r)),
            MarkMissing::METHOD => MarkMissing::from_bytes(body).map(|r| self.mark_missing(r)),
            DropFile::METHOD => DropFile::from_bytes(body).map(|r| self.drop_file(r)),
            SealCell::METHOD => SealCell::from_bytes(body).map(|r| self.seal_cell(r)),
            ListCells::METHOD => ListCells::from_bytes(body).map(|r| self.list_cells(r)),
            ListTruncations::METHOD => ListTruncations::from_bytes(body).map(|r| self.list_truncations(r)),
            ListFences::METHOD => ListFences::from_bytes(body).map(|r| self.list_fences(r)),
            ListPlace::METHOD => ListPlace::from_bytes(body).map(|r| self.list_place(r)),
            CopyCell::METHOD => CopyCell::from_bytes(body).map(|r| self.copy_cell(r)),
            NextStripe::METHOD => NextStripe::from_bytes(body).map(|r| self.next_stripe(r)),
            SealFile::METHOD => SealFile::from_bytes(body).map(|r| self.seal_file(r)),
            HasSpace::METHOD => HasSpace::from_bytes(body).map(|r| self.has_space(&r)),
            StatTarget::METHOD => StatTarget::from_bytes(body).map(|r| self.stat_target(&r, payload)),
            ScrubTarget::METHOD => ScrubTarget::from_bytes(body).map(|r| self.scrub_target(&r)),
            CompareTarget::METHOD => CompareTarget::from_bytes(body).map(|r| self.compare_target(&r)),
            PassOn::METHOD => PassOn::from_bytes(body).map(|r| self.pass_on(r, payload, deadline)),
            _ => Err(Error::unsupported(format!("a target store knows no method {method}"))),
        };
        handled.unwrap_or_else(|e| Handled::Now(Err(e)))
    }

    /// Calls a target: of this node directly, of another one through its channel.
    pub(crate) fn ask<R: PeerRequest>(
        &self,
        target: TargetId,
        request: R,
        payload: Vec<Bytes>,
    ) -> PeerReply<R>
    where
        R::Reply: Send,
    {
        if !self.targets.contains_key(&target) {
            return admission::ask_until_begun(&self.env, self.peers.clone(), target, request, payload);
        }
        let payload = match payload.len() {
            0 => Bytes::new(),
            1 => payload.into_iter().next().expect("one part"),
            _ => Bytes::from(payload.concat()),
        };
        let deadline = self.env.clock.now() + PEER_PATIENCE;
        let handled = self.dispatch(R::METHOD, &request.to_bytes(), payload, deadline);
        Box::pin(async move {
            let reply = match handled {
                Handled::Now(reply) => reply?,
                Handled::Later(reply) => reply.await?,
            };
            let payload = reply.payload.parts.concat();
            Ok((R::Reply::from_bytes(&reply.body)?, Bytes::from(payload)))
        })
    }

    pub(crate) fn shared(&self) -> Arc<StorageNode> {
        self.this.upgrade().expect("a method of the node runs while the node lives")
    }

    // ---- admission

    /// Checks the place of a request against the newest map.
    fn admit(&self, place: Place) -> Result<Admit> {
        let target = self.target(place.target)?;
        let map = self.peers.map();
        let group = match map.group(place.group) {
            Some(group) if group.epoch >= place.epoch => group,
            _ => return Ok(Admit::NeedsMap(map.version)),
        };
        if group.epoch > place.epoch {
            return Err(crate::cells::lower_epoch(place.group, place.epoch, group.epoch));
        }
        let position = group.members.iter().position(|m| m.target == place.target).ok_or_else(|| {
            Error::stale(format!("{} is not a member of {} under {}", place.target, place.group, place.epoch))
        })?;
        let scope = Scope::at(group, position);
        Ok(Admit::Ready(Acting { target, scope, map: map.clone(), position }))
    }
    /// Like `admit`, waiting for the map if needed.
    pub(crate) async fn acting(&self, place: Place) -> Result<Acting> {
        match self.admit(place)? {
            Admit::Ready(acting) => return Ok(acting),
            Admit::NeedsMap(version) => {
                let group = Object::new("group", place.group.0.into());
                let _wait = self.env.watch.wait(Reason::Map, group);
                self.peers.wait_newer(version, MAP_PATIENCE).await?
            }
        };
        match self.admit(place)? {
            Admit::Ready(acting) => Ok(acting),
            Admit::NeedsMap(_) => Err(Error::unavailable(format!(
                "request for {} under {}: this node has not learned of that epoch yet, try again",
                place.group, place.epoch
            ))),
        }
    }
    /// Only the coordinator raises epochs: epochs in a request count once the map confirms them. A target
    /// that accepted an epoch that was never announced would refuse all other requests for ever.
    async fn check_announced(&self, epochs: &[GroupAt]) -> Result<()> {
        let ahead = |map: &ClusterMap| {
            let is_known = |at: &GroupAt| map.group(at.group).is_some_and(|g| g.epoch >= at.epoch);
            epochs.iter().find(|at| !is_known(at)).cloned()
        };
        let map = self.peers.map();
        if ahead(&map).is_none() {
            return Ok(());
        }
        let newer = self.peers.wait_newer(map.version, MAP_PATIENCE).await.unwrap_or(map);
        match ahead(&newer) {
            None => Ok(()),
            Some(at) => Err(Error::unavailable(format!(
                "request that names {} under {}: this node has not learned of that epoch yet, try again",
                at.group, at.epoch
            ))),
        }
    }
    /// To a client this is as a target that is away: the node may have returned with another disk, which no
    /// coordinator knows yet.
    pub(crate) fn target(&self, id: TargetId) -> Result<Arc<Target>> {
        let found = self.targets.get(&id).cloned();
        found.ok_or_else(|| Error::unavailable(format!("this node does not serve target {id}")))
    }

    /// A short change of the index: made in place, answered when durable.
    fn change(
        &self,
        place: Place,
        work: impl FnOnce(&Store, &Scope) -> Result<CommitSeq> + Send + 'static,
    ) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let acting = node.acting(place).await?;
            let seq = work(&acting.target.store, &acting.scope)?;
            acting.target.store.durable(seq).await?;
            Ok(Reply::new(&()))
        }))
    }
    /// A read of the index: answered in place unless the map must be fetched first.
    fn read_index(
        &self,
        place: Place,
        work: impl FnOnce(&Acting) -> Result<Reply> + Send + 'static,
    ) -> Handled {
        match self.admit(place) {
            Err(e) => Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) => Handled::Now(work(&acting)),
            Ok(Admit::NeedsMap(_)) => {
                let node = self.shared();
                Handled::Later(Box::pin(async move { work(&node.acting(place).await?) }))
            }
        }
    }

    // ---- fragments

    fn hold_stripe(&self, r: HoldStripe) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let acting = node.acting(r.place).await?;
            if usize::from(r.cell.index) != acting.position {
                return Err(misplaced(r.cell, &acting));
            }
            let store = &acting.target.store;
            let (seq, is_here) = store.mark_missing(&acting.scope, r.cell, r.version, r.missing)?;
            match is_here {
                true => store.durable(seq).await?,
                // Prepared while this member was away.
                false => node.take_version(&acting, &r).await?,
            }
            Ok(Reply::new(&()))
        }))
    }
    fn commit_stripe(&self, r: CommitStripe) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let acting = node.acting(r.place).await?;
            let store = &acting.target.store;
            let seq = store.commit_stripe(&acting.scope, r.cell, r.version, r.token_epoch)?;
            store.durable(seq).await?;
            store.crash_point(crash_points::COMMITTED);
            Ok(Reply::new(&()))
        }))
    }
    fn drop_prepared(&self, r: DropPrepared) -> Handled {
        self.change(r.place, move |store, scope| store.drop_prepared(scope, r.cell, r.version, r.token_epoch))
    }
    fn seal_cell(&self, r: SealCell) -> Handled {
        self.blocking(r.place, move |store, acting| store.seal_cell(&acting.scope, r.cell, r.version))
    }
    fn mark_missing(&self, r: MarkMissing) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let acting = node.acting(r.place).await?;
            let own = usize::from(r.cell.index) == acting.position && r.cell.index < 64;
            if own && r.missing & (1 << r.cell.index) != 0 {
                acting.target.suspect(r.cell);
                return Ok(Reply::new(&()));
            }
            let store = &acting.target.store;
            let (seq, is_here) = store.mark_missing(&acting.scope, r.cell, r.version, r.missing)?;
            if !is_here && r.version != Version(0) {
                return Err(Error::not_found(format!("cell {}: version {} is not here", r.cell, r.version)));
            }
            store.durable(seq).await?;
            Ok(Reply::new(&()))
        }))
    }

    // ---- reading

    // ---- files and targets

    fn drop_file(&self, r: DropFile) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let target = node.target(r.target)?;
            let store = target.store.clone();
            node.check_announced(&r.epochs).await?;
            let worker = store.clone();
            let truncation = format::Truncation {
                from_stripe: r.from_stripe,
                to_stripe: r.to_stripe,
                token_epoch: r.fence,
            };
            let (seq, reply) =
                node.env.tasks.blocking(move || worker.drop_file(r.file, truncation, &r.epochs)).await?;
            store.durable(seq).await?;
            // No read after this sees one of those writes begin or end.
            let ended = target.under_way.ended(r.file, r.fence);
            if node.env.clock.timeout(FENCE_PATIENCE, ended).await.is_err() {
                return Err(Error::unavailable(format!(
                    "truncation of file {}: earlier writes under token epochs below {} have not ended yet",
                    r.file, r.fence
                )));
            }
            Ok(Reply::new(&reply))
        }))
    }
    fn pass_on(&self, r: PassOn, payload: Bytes, deadline: Instant) -> Handled {
        let Ok(passing) = self.passing_on.clone().try_acquire_owned() else {
            let busy = format!("this node forwards {PASSED_ON_MAX} calls already");
            return Handled::Now(Err(Error::busy(PASSED_ON_PAUSE, busy)));
        };
        let patience = deadline.since(self.env.clock.now());
        let passed = self.peers.pass_on(r, payload, patience);
        Handled::Later(Box::pin(async move {
            let _passing = passing;
            let Answered { reply, payload, payload_crc } = passed.await?;
            Ok(Reply::with_payload(&PassedOn { body: reply }, Payload::with_crc(vec![payload], payload_crc)))
        }))
    }
    fn seal_file(&self, r: SealFile) -> Handled {
        let node = self.shared();
        Handled::Later(Box::pin(async move {
            let target = node.target(r.target)?;
            node.seal_file_now(&target, r.file).await?;
            Ok(Reply::new(&()))
        }))
    }
}

/// A forwarded call runs under this node's name: its sender must have the right to send it directly.
fn check_passed_on(call: &Call) -> Result<()> {
    let passed = call.decode::<PassOn>()?.method;
    let unknown = || Error::unsupported(format!("a target store knows no method {passed}"));
    let method = methods::find(passed).ok_or_else(unknown)?;
    call.connection.proved().check(method, &call.connection.peer_name())
}

impl Service for StorageNode {
    fn handle(&self, call: Call) -> Handled {
        if call.method == PassOn::METHOD
            && let Err(e) = check_passed_on(&call)
        {
            return Handled::Now(Err(e));
        }
        let guest = match self.enter(&call) {
            Ok(guest) => guest,
            Err(busy) => return Handled::Now(Err(busy)),
        };
        match (guest, self.dispatch_for(call.method, &call.body, call.payload, call.demand)) {
            (Some(guest), Handled::Later(reply)) => Handled::Later(Box::pin(async move {
                let _inside = guest;
                reply.await
            })),
            (_, handled) => handled,
        }
    }
}

impl Target {
    pub(crate) fn suspect(&self, cell: CellId) {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        if suspects.len() < SUSPECTS_MAX {
            suspects.insert(cell);
        }
    }
    pub(crate) fn take_suspects(&self) -> BTreeSet<CellId> {
        std::mem::take(&mut self.suspects.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The member that leads the seals of a group: its first current parity target, without parity the only data
/// target.
pub fn seal_leader(group: &Group) -> Option<usize> {
    let (data, width) = (usize::from(group.scheme.data), group.scheme.width());
    let mut candidates = if group.scheme.parity == 0 { 0..1 } else { data..width };
    candidates.find(|p| group.members.get(*p).is_some_and(|m| m.state == MemberState::Current))
}

fn misplaced(cell: CellId, acting: &Acting) -> Error {
    Error::invalid(format!(
        "cell {cell} does not belong on {}, which is place {} of {}",
        acting.target.store.target, acting.position, acting.scope.group
    ))
}
