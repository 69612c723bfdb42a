//! Fragments and overlays to targets: which members are asked, and what follows if one does not answer.
//!
//! Invariants: a write returns only when every live member of the group's newest map has it, and written data
//! carries the mask of the members that lack it; fewer than k current members is an error that names the
//! stripe; everything ends by its deadline. Knows nothing of sizes, leases, buffers or handles.
mod fetch;
mod full;
mod merge;
mod next;
mod overlays;
mod state;
mod stripes;
mod truncate;

pub use crate::group::{GroupView, StripeRef};
use crate::maps::MapsSeen;
use crate::status::Counters;
use crate::targets::Targets;
use crate::waits::Waits;
use bytes::Bytes;
pub use fetch::{CellRange, Part};
use full::FullMembers;
pub use next::{STRIPES_AT_ONCE, STRIPES_MAX};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stripes::Flight;
pub use stripes::{Done, STRIPE_PARTS};
use tokio::sync::Semaphore;
use weir_coord::Cluster;
use weir_env::{Env, Instant};
use weir_proto::data::CHECKSUM_BLOCK;
use weir_proto::ec::Coder;
use weir_proto::map::{ClusterMap, Group, Layout, Member, MemberState, Scheme, TargetState};
use weir_proto::{Epoch, Error, ErrorKind, FileId, InodeId, NamespaceId, PgId, Result, checksum};

/// The wait for a group that lacks members which do not return by themselves (failed disks), counted from its
/// last change. Later callers get the error at once. A call waits for members that are only away until its
/// deadline.
pub const LOSS_PATIENCE: Duration = Duration::from_secs(12);
/// A write that a full target refuses waits this long for the move of its place, if that is planned.
pub const FULL_PATIENCE: Duration = Duration::from_secs(30);
/// A refused epoch means that a newer map will arrive soon.
pub const MAP_PATIENCE: Duration = Duration::from_millis(500);
/// Late reads that are decoded at the same time: each reads k times the bytes, and the late target may just
/// be busy.
const HEDGES_MAX: usize = 8;
/// This client's access to the targets.
pub struct Data {
    env: Env,
    targets: Arc<Targets>,
    pub cluster: Cluster,
    pub counters: Arc<Counters>,
    namespace: NamespaceId,
    pub flight: Flight,
    maps: Arc<MapsSeen>,
    /// Reads that are decoded from other members because an answer is late.
    hedges: Semaphore,
    pub waits: Arc<Waits>,
    coders: Mutex<BTreeMap<Scheme, Arc<Coder>>>,
    /// Groups that had too few members at a call: the epoch, and since when. At most one entry per group.
    losses: Mutex<BTreeMap<PgId, (Epoch, Instant)>>,
    pub full: FullMembers,
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
        let targets = Arc::new(Targets::new(env.clone(), cluster.clone(), counters.clone()));
        Data {
            full: FullMembers::new(env.clone(), targets.clone()),
            env,
            waits: targets.waits.clone(),
            targets,
            cluster,
            counters,
            namespace,
            flight: Flight::default(),
            maps,
            hedges: Semaphore::new(HEDGES_MAX),
            coders: Mutex::default(),
            losses: Mutex::default(),
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

    /// The fragments of a stripe that is `data` and then zeros. A stripe of zeros takes no space.
    pub fn fragments_of(&self, layout: &Layout, data: Bytes) -> Result<Vec<Fragment>> {
        if data.iter().all(|b| *b == 0) {
            let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
            return Ok(vec![empty; layout.scheme.width()]);
        }
        let cell_bytes = layout.cell_bytes() as usize;
        let cell = |i: u8| {
            let start = (usize::from(i) * cell_bytes).min(data.len());
            data.slice(start..(start + cell_bytes).min(data.len()))
        };
        let coder = self.coder(layout.scheme)?;
        encode(&coder, &self.env, (0..layout.scheme.data).map(cell).collect())
    }

    /// The stripe's group in the newest map. Checks the assumptions of the rest of this crate.
    pub fn view(&self, s: &StripeRef) -> Result<GroupView> {
        self.view_of(s.layout.pg_of_stripe(s.stripe), s.scheme()).map_err(|e| e.doing(s))
    }
    /// A group in the newest map.
    pub fn view_of(&self, id: PgId, scheme: Scheme) -> Result<GroupView> {
        let map = self.cluster.map();
        let version = map.version;
        let view = GroupView::of(map, id)
            .ok_or_else(|| Error::invalid(format!("the cluster map (version {version}) has no {id}")))?;
        let n = view.group().members.len();
        if n != scheme.width() {
            return Err(Error::invalid(format!("{id} has {n} members, the file's scheme {scheme}")));
        }
        Ok(view)
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
            if self.targets.left(s.deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "{s}: it may have been written under version {needed} of the cluster map, here is {here}: is the coordinator reachable?"
                )));
            }
            let _waiting = self.waits.begin("the coordinator, for the newest cluster map".into());
            self.targets.wait_newer(here, self.targets.left(s.deadline)).await;
        }
    }

    /// After members of a group have refused a call or not answered it: whether a newer map changes the
    /// members to ask.
    pub async fn is_regrouped(&self, view: &GroupView, deadline: Instant) -> bool {
        self.targets.wait_newer(view.map_version(), MAP_PATIENCE.min(self.targets.left(deadline))).await;
        let (map, group) = (self.cluster.map(), view.group());
        map.group(group.id).is_some_and(|now| now.epoch > group.epoch)
    }

    /// Asks members of the stripe's group that have not answered whether they live. That takes neither their
    /// disks nor a place in their queues.
    pub async fn ask_silent_members(&self, s: &StripeRef) {
        let Ok(view) = self.view(s) else { return };
        self.targets.ask_silent((0..s.scheme().width()).map(|index| view.place(index).target)).await;
    }
    /// For how long, since `begun`, a member that a write to the stripe needs has not answered.
    pub fn silent_for(&self, s: &StripeRef, begun: Instant) -> Duration {
        let Ok(view) = self.view(s) else { return Duration::ZERO };
        // Without those that are down the write proceeds, if enough are left.
        let needs_all = view.group().current_count() < s.needed();
        let since = |index: usize| match view.state(index) {
            MemberState::Down => needs_all.then_some(begun),
            _ => self.targets.silent_since(view.place(index).target),
        };
        let first = (0..s.scheme().width()).filter_map(since).min();
        first.map_or(Duration::ZERO, |first| self.env.clock.now().since(first.max(begun)))
    }
    /// Whether more members of the group are lost than it can lose, and the wait for them is over.
    pub fn is_lost_for_good(&self, s: &StripeRef) -> bool {
        let Ok(view) = self.view(s) else { return false };
        let group = view.group();
        group.is_lost()
            || group.current_count() < s.needed() && self.targets.left(self.enough_until(&view, s)).is_zero()
    }

    /// A view with at least k current members, or as many as the volume's floor, or the error that names the
    /// stripe.
    pub async fn writable_view(&self, s: &StripeRef) -> Result<GroupView> {
        let mut waiting = None;
        loop {
            let view = self.view(s)?;
            let closed = view.map().is_closed(view.group());
            let current = view.group().current_count();
            if current >= s.needed() && !closed {
                return Ok(view);
            }
            if closed && !self.targets.left(s.deadline).is_zero() {
                waiting.replace(self.waits.begin(format!("the move of a place of {}", view.group().id)));
                self.targets.wait_newer(view.map_version(), self.targets.left(s.deadline)).await;
                continue;
            }
            if view.group().is_lost() {
                return Err(too_few(s, current).of_kind(ErrorKind::Damaged));
            }
            let left = self.targets.left(self.enough_until(&view, s));
            if left.is_zero() {
                let e = too_few(s, current);
                let context = format!("{}; not there: {}", e.context, view.missing_names());
                return Err(Error { context, ..e });
            }
            waiting.replace(self.waits.begin(awaited(s, &view)));
            self.targets.wait_newer(view.map_version(), left).await;
        }
    }

    /// The end of the wait for the members that a group lacks. Each change of the group restarts it.
    pub fn lost_until(&self, view: &GroupView, deadline: Instant) -> Instant {
        if may_return(view.map(), view.group()) { deadline } else { self.soon(view, deadline) }
    }
    /// The end of the wait for the members that a write to the stripe lacks.
    fn enough_until(&self, view: &GroupView, s: &StripeRef) -> Instant {
        match view.group().is_writable() {
            false => self.lost_until(view, s.deadline),
            true if may_reach(view.map(), view.group(), s.needed()) => s.deadline,
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
}

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
    assert_eq!(cells.len(), usize::from(coder.scheme().data), "one piece for each data cell");
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
