//! The places of a target in its groups. A request is checked against the newest cluster map (group, epoch,
//! place) before it reaches the store; with an epoch above the map's it waits for the newer map.
//!
//! Invariant: an [`Acting`] is made here only, so work that has one acts under an epoch that the coordinator
//! announced. Knows nothing of what a request changes.
use crate::cells::{self, Scope};
use crate::peers::Peers;
use crate::store::Store;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Env;
use weir_proto::data::{GroupAt, ListCells, Place};
use weir_proto::map::{ClusterMap, Group, MemberState};
use weir_proto::{CellId, Epoch, Error, FileId, PgId, Result, TargetId};
use weir_watch::{Object, Reason};

mod latency;

/// How long a request with a newer epoch waits for the map that explains it.
const MAP_PATIENCE: Duration = Duration::from_secs(3);

/// A target at its place in a group, under one map.
#[derive(Clone)]
pub(crate) struct Acting {
    pub store: Arc<Store>,
    pub scope: Scope,
    pub map: Arc<ClusterMap>,
    /// Which member of the group the target is.
    pub position: usize,
}

impl Acting {
    pub fn group(&self) -> &Group {
        self.map.group(self.scope.group).expect("looked up when this was made")
    }
    pub fn target(&self) -> TargetId {
        self.store.target
    }
    pub fn state(&self) -> MemberState {
        self.group().members[self.position].state
    }
    /// The place of a call to the member at `position`.
    pub fn place_of(&self, position: usize) -> Place {
        let Scope { group, epoch, .. } = self.scope;
        Place { target: self.group().members[position].target, group, epoch }
    }
    /// This member's fragment of a stripe.
    pub fn own_cell(&self, file: FileId, stripe: u64) -> CellId {
        CellId { file, stripe, index: self.position as u8 }
    }
    /// Asks the member at `position` for its next cells of this group that were written in `since` or later.
    pub fn ask_cells(&self, position: usize, after: Option<CellId>, since: Epoch, limit: u32) -> ListCells {
        let Place { target, group, epoch } = self.place_of(position);
        ListCells { target, group, after, since, epoch, limit }
    }
    /// For calls that ask a peer about this group.
    pub fn at(&self) -> GroupAt {
        GroupAt { group: self.scope.group, epoch: self.scope.epoch }
    }
    pub fn is_filled(&self) -> bool {
        self.group().members[self.position].is_filled(self.map.level)
    }
    pub fn misplaced(&self, cell: CellId) -> Error {
        Error::invalid(format!(
            "cell {cell} does not belong on {}, which is place {} of {}",
            self.target(),
            self.position,
            self.scope.group
        ))
    }
}

/// Ready, or the map must first be newer than the version.
pub(crate) enum Admit {
    Ready(Acting),
    NeedsMap(u64),
}

pub(crate) struct Membership {
    env: Env,
    peers: Arc<dyn Peers>,
    store: Arc<Store>,
}

impl Membership {
    pub fn new(env: &Env, peers: &Arc<dyn Peers>, store: &Arc<Store>) -> Arc<Membership> {
        Arc::new(Membership { env: env.clone(), peers: peers.clone(), store: store.clone() })
    }
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }
    pub fn target(&self) -> TargetId {
        self.store.target
    }
    pub fn peers(&self) -> &Arc<dyn Peers> {
        &self.peers
    }
    pub fn map(&self) -> Arc<ClusterMap> {
        self.peers.map()
    }

    /// Checks the place of a request against the newest map.
    pub fn admit(&self, place: Place) -> Result<Admit> {
        assert_eq!(place.target, self.target(), "a request was given to another target than it names");
        let map = self.peers.map();
        let group = match map.group(place.group) {
            Some(group) if group.epoch >= place.epoch => group,
            _ => return Ok(Admit::NeedsMap(map.version)),
        };
        if group.epoch > place.epoch {
            return Err(cells::lower_epoch(place.group, place.epoch, group.epoch));
        }
        let position = self.position_in(group).ok_or_else(|| {
            Error::stale(format!("{} is not a member of {} under {}", place.target, place.group, place.epoch))
        })?;
        let scope = Scope::at(group, position);
        Ok(Admit::Ready(self.acting_at(&map, scope, position)))
    }
    /// Like `admit`, waiting for the map if needed.
    pub async fn acting(&self, place: Place) -> Result<Acting> {
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
    /// The epoch of a place's group in the newest map; the one that it has if the group is gone.
    pub fn newest_epoch(&self, acting: &Acting) -> Epoch {
        self.peers.map().group(acting.scope.group).map_or(acting.scope.epoch, |g| g.epoch)
    }
    /// The caller's place under the newest map.
    pub async fn renewed(&self, acting: &Acting) -> Result<Acting> {
        let epoch = self.newest_epoch(acting);
        self.acting(Place { target: self.target(), group: acting.scope.group, epoch }).await
    }
    /// Only the coordinator raises epochs: epochs in a request count once the map confirms them. A target
    /// that accepted an epoch that was never announced would refuse all other requests for ever.
    pub async fn check_announced(&self, epochs: &[GroupAt]) -> Result<()> {
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

    // ---- places for the target's own work

    /// The target's place in a group, if it has one.
    pub fn place_in(&self, group: PgId) -> Option<Acting> {
        let map = self.peers.map();
        let group = map.group(group)?;
        let position = self.position_in(group)?;
        Some(self.acting_at(&map, Scope::at(group, position), position))
    }
    /// Its place in a group in which it is current, so that it has lost nothing there.
    pub fn current_in(&self, group: PgId) -> Option<Acting> {
        let map = self.peers.map();
        self.current_place(&map, map.group(group)?)
    }
    pub fn current_places(&self) -> Vec<Acting> {
        let map = self.peers.map();
        map.groups.iter().filter_map(|group| self.current_place(&map, group)).collect()
    }
    /// The places in which it is behind.
    pub fn behind(&self) -> Vec<Acting> {
        let map = self.peers.map();
        let place = |group: &Group| {
            let position = self.position_in(group)?;
            let is_behind = group.members[position].state == MemberState::Behind;
            is_behind.then(|| self.acting_at(&map, Scope::at(group, position), position))
        };
        map.groups.iter().filter_map(place).collect()
    }
    /// Its place in the group of a cell that is here.
    pub fn place_of_cell(&self, cell: CellId) -> Result<Option<Acting>> {
        Ok(self.store.index().header(cell)?.and_then(|header| self.place_in(header.group)))
    }
    pub fn is_member(&self, group: &Group) -> bool {
        self.position_in(group).is_some()
    }
    fn current_place(&self, map: &Arc<ClusterMap>, group: &Group) -> Option<Acting> {
        let position = self.position_in(group)?;
        let is_current = group.members[position].state == MemberState::Current;
        is_current.then(|| self.acting_at(map, Scope::of(group), position))
    }
    fn position_in(&self, group: &Group) -> Option<usize> {
        group.members.iter().position(|m| m.target == self.target())
    }
    fn acting_at(&self, map: &Arc<ClusterMap>, scope: Scope, position: usize) -> Acting {
        Acting { store: self.store.clone(), scope, map: map.clone(), position }
    }

    /// Reports to the coordinator that a member of a group could not be used. Its decision arrives in the
    /// map; if it does not answer, the caller tries its own work again.
    pub async fn report_failed(&self, acting: &Acting, member: usize, why: String) {
        let Place { target, group, epoch } = acting.place_of(member);
        if let Err(e) = self.peers.report(target, group, epoch, why).await {
            tracing::debug!(%target, %group, "report a member that failed: {e}");
        }
    }
}
