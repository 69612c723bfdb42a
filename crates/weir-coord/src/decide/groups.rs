//! Transitions of placement groups: targets that go down, return and catch up.
//!
//! Invariants:
//! - each change of a group raises its epoch by one;
//! - a current member's `since` is the epoch of the last change of a member's state (later ones are of
//!   [`super::moves`]); another member's is the last published epoch in which it was current;
//! - writes are accepted only while k members are current ([`Group::is_writable`]);
//! - a member that was behind becomes current only while current members know of all writes
//!   ([`Group::knows_all_writes`]): fewer may all lack a write, and the member that has it would return to a
//!   group with writes in newer epochs. While fewer than k are current, a member reports that it caught up
//!   only if nothing was written since it was current.
//!
//! This shows which members missed nothing: an epoch later than the k-th largest `since` never had k current
//! members, so nothing was written in it. A member whose `since` is at least that value is current again as
//! soon as it returns (all of a cluster that was stopped and started, for example); any other is behind until
//! repaired.
//!
//! A target that returns without its data is lost in all its groups: behind, regardless of its `since`, until
//! it is refilled. Its `since` stays: it still limits the epochs in which writes were possible.
use super::placement::{Candidate, GROUPS_MAX, group_count, place};
use super::replace::refilled;
use super::slow::{Speed, is_much_slower};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Scheme, Target, TargetState};
use weir_proto::version::LEVEL_OF_GROWTH;
use weir_proto::{Epoch, Error, NodeId, PgId, Result, TargetId};

/// A new generation of groups is made for new targets if they are at least this part of all (one in 16).
/// Fewer new targets take over places of existing groups.
const NEW_PART_MIN: usize = 16;

/// The target cannot be reached. Returns whether the map changed.
pub fn target_down(map: &mut ClusterMap, target: TargetId) -> bool {
    leave_groups(map, target, TargetState::Down)
}

/// The target's disk failed: it stays down until it is cleared. Returns whether the map changed.
pub fn target_failed(map: &mut ClusterMap, target: TargetId) -> bool {
    leave_groups(map, target, TargetState::Failed)
}

/// An administrator returned a failed target to service: from now on it counts as down. False: it has not
/// failed.
pub fn target_cleared(map: &mut ClusterMap, target: TargetId) -> bool {
    let failed = |t: &&mut Target| t.id == target && t.state == TargetState::Failed;
    let entry = map.targets.iter_mut().find(failed);
    entry.map(|t| t.state = TargetState::Down).is_some()
}

/// The target returned empty or as an older copy: none of its data counts until it is refilled. It is down
/// until the reconciliation that follows.
pub fn target_lost(map: &mut ClusterMap, target: TargetId) {
    if let Some(entry) = map.targets.iter_mut().find(|t| t.id == target && t.state == TargetState::Up) {
        entry.state = TargetState::Down;
    }
    for group in &mut map.groups {
        if member_of(group, target).is_some() {
            set_member(group, target, MemberState::Down);
            let epoch = group.epoch;
            group.members.iter_mut().filter(|m| m.target == target).for_each(|m| m.lost_at = epoch);
        }
    }
}

/// The right disk is back: the target counts as one that was away since it lost its data. Data that was
/// refilled meanwhile is lost.
pub fn target_put_back(map: &mut ClusterMap, target: TargetId) {
    let is_lost = |g: &Group| member_of(g, target).is_some_and(Member::is_lost);
    let has_again: Vec<PgId> = map.groups.iter().filter(|g| is_lost(g)).map(|g| g.id).collect();
    target_lost(map, target);
    for group in map.groups.iter_mut().filter(|g| has_again.contains(&g.id)) {
        group.members.iter_mut().filter(|m| m.target == target).for_each(|m| m.lost_at = Epoch(0));
    }
}

/// The target is served again. Returns whether the map changed; a failed target stays failed.
pub fn target_back(map: &mut ClusterMap, target: TargetId) -> bool {
    let Some(entry) = map.targets.iter_mut().find(|t| t.id == target) else { return false };
    if entry.state != TargetState::Down {
        return false;
    }
    entry.state = TargetState::Up;
    rejoin_groups(map, target);
    true
}

/// Whether a group may demote a slow member: all others are current, and stripes written meanwhile have k + 1
/// fragments or more.
fn can_spare(group: &Group, slow: TargetId) -> bool {
    let is_current = |m: &Member| m.state == MemberState::Current;
    group.scheme.parity >= 2 && group.members.iter().all(is_current) && member_of(group, slow).is_some()
}

/// The other members of the groups that may demote a slow target. Each must be alive for that.
pub fn needed_without(map: &ClusterMap, slow: TargetId) -> BTreeSet<TargetId> {
    let groups = map.groups.iter().filter(|g| can_spare(g, slow));
    groups.flat_map(|g| &g.members).map(|m| m.target).filter(|t| *t != slow).collect()
}

/// Demotes the target in the groups that can do without it; it stays up. Returns whether there are any.
/// `alive` have just answered: if another member has died unnoticed, the slow one is needed; after one more
/// loss, no member could show whether it missed a write. If they are slow as well, nothing is gained.
pub fn demote_slow(
    map: &mut ClusterMap,
    target: TargetId,
    own: &Speed,
    alive: &BTreeMap<TargetId, Speed>,
) -> bool {
    let mut changed = false;
    for group in map.groups.iter_mut().filter(|g| can_spare(g, target)) {
        let others = group.members.iter().filter(|m| m.target != target);
        let others: Option<Vec<Speed>> = others.map(|m| alive.get(&m.target).copied()).collect();
        if others.is_some_and(|others| is_much_slower(own, &others)) {
            set_member(group, target, MemberState::Down);
            changed = true;
        }
    }
    changed
}

/// Whether every group that has redundancy keeps k current members without the target.
pub fn is_spare(map: &ClusterMap, target: TargetId) -> bool {
    map.groups.iter().filter(|g| g.scheme.parity > 0 && member_of(g, target).is_some()).all(|g| {
        let others = g.members.iter().filter(|m| m.target != target && m.state == MemberState::Current);
        others.count() >= usize::from(g.scheme.data)
    })
}

/// Targets that are down, or demoted in a group: they may return.
pub fn left_out(map: &ClusterMap) -> BTreeSet<TargetId> {
    let down = map.targets.iter().filter(|t| t.state == TargetState::Down).map(|t| t.id);
    let members = map.groups.iter().flat_map(|g| &g.members);
    down.chain(members.filter(|m| m.state == MemberState::Down).map(|m| m.target)).collect()
}

/// A target that is up is no longer demoted anywhere. Returns whether the map changed.
pub fn rejoin_groups(map: &mut ClusterMap, target: TargetId) -> bool {
    if map.target(target).is_none_or(|t| t.state != TargetState::Up) {
        return false;
    }
    let mut changed = false;
    for group in &mut map.groups {
        let Some(member) = member_of(group, target) else { continue };
        let missed_nothing = group.missed_nothing(member);
        changed |= rejoin(&mut group.members, &mut group.epoch, target, missed_nothing);
    }
    changed
}

/// A member that was behind holds everything again, as of `epoch`. Returns whether that is new. A member that
/// was filled while seals continued makes one more pass, without seals.
pub fn caught_up(map: &mut ClusterMap, target: TargetId, group: PgId, epoch: Epoch) -> Result<bool> {
    let level = map.level;
    let group = map
        .groups
        .get_mut(group.0 as usize)
        .filter(|g| g.id == group)
        .ok_or_else(|| Error::not_found(format!("no placement group {group}")))?;
    if member_of(group, target).is_some_and(|m| m.is_filled(level)) {
        return refilled(group, target, epoch);
    }
    let lacks = (!group.knows_all_writes())
        .then(|| format!("{} members are current, {} are needed", group.current_count(), group.scheme.data));
    let name = group.id;
    catch_up(&mut group.members, &mut group.epoch, &name, target, epoch, lacks)
}

/// Placement groups of one kind to be made, and the targets that they may use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WantedGroups {
    pub pool: String,
    pub scheme: Scheme,
    /// At least as many as the scheme is wide.
    pub candidates: Vec<Candidate>,
    /// A new generation, after the one that begins with this group.
    pub after: Option<PgId>,
}

impl WantedGroups {
    /// The members of each group. Takes some tenths of a second for thousands of targets.
    pub fn place(&self) -> Vec<Vec<TargetId>> {
        place(self.scheme, &self.candidates, group_count(self.scheme, self.candidates.len()))
    }

    /// `None`: the groups exist already, or there are too few targets.
    fn of(map: &ClusterMap, pool: &str, scheme: Scheme) -> Option<WantedGroups> {
        if map.groups_of(pool, scheme).is_some() {
            return None;
        }
        let candidates = candidates(map, pool);
        let is_enough = candidates.len() >= scheme.width();
        is_enough.then(|| WantedGroups { pool: pool.to_owned(), scheme, candidates, after: None })
    }
}

/// Missing groups of the scheme for new files, in each pool with enough targets. Groups of other schemes are
/// made on request ([`groups_asked_for`]). None before `expected_targets` are up, so that the first groups
/// use them all.
pub fn groups_for_new_files(map: &ClusterMap, expected_targets: usize) -> Vec<WantedGroups> {
    let up = map.targets.iter().filter(|t| t.state == TargetState::Up).count();
    if up < expected_targets {
        return Vec::new();
    }
    let of = |pool| WantedGroups::of(map, pool, map.settings.scheme);
    pools(map).into_iter().filter_map(of).collect()
}

/// Missing groups of a requested scheme, in one pool or in all that can hold it. The error names what a
/// pool lacks.
pub fn groups_asked_for(map: &ClusterMap, pool: Option<&str>, scheme: Scheme) -> Result<Vec<WantedGroups>> {
    let all = pools(map);
    if let Some(pool) = pool.filter(|pool| !all.contains(pool)) {
        return Err(Error::not_found(format!("no target is in pool {pool:?}"))
            .hint(format!("there are the pools {}", all.into_iter().collect::<Vec<_>>().join(", "))));
    }
    let asked = || all.iter().filter(|p| pool.is_none_or(|pool| **p == pool));
    let wanted: Vec<WantedGroups> = asked().filter_map(|pool| WantedGroups::of(map, pool, scheme)).collect();
    if wanted.is_empty() && !asked().any(|pool| map.groups_of(pool, scheme).is_some()) {
        let up = all.iter().map(|p| candidates(map, p).len()).max().unwrap_or(0);
        return Err(Error::invalid(format!(
            "scheme {scheme} needs {} targets that are up in one pool, {up} are up",
            scheme.width()
        )));
    }
    Ok(wanted)
}

/// Adds groups that were placed for an earlier version of the map. False, without a change: other groups were
/// added meanwhile, or a target that they may use is no longer up.
pub fn add_groups(map: &mut ClusterMap, wanted: &WantedGroups, placed: Vec<Vec<TargetId>>) -> bool {
    let up = map.targets.iter().filter(|t| t.state == TargetState::Up && t.pool == wanted.pool);
    let up: BTreeSet<TargetId> = up.map(|t| t.id).collect();
    let is_up = |c: &Candidate| up.contains(&c.target);
    let newest = map.groups_of(&wanted.pool, wanted.scheme).map(|(first, _)| first);
    if newest != wanted.after || !wanted.candidates.iter().all(is_up) {
        return false;
    }
    if newest.is_some() {
        map.generations.push(PgId(map.groups.len() as u32));
    }
    for members in placed {
        let epoch = Epoch(1);
        let members = members
            .into_iter()
            .map(|target| Member { target, state: MemberState::Current, since: epoch, lost_at: Epoch(0) })
            .collect();
        let (id, pool) = (PgId(map.groups.len() as u32), wanted.pool.clone());
        map.groups.push(Group { id, pool, scheme: wanted.scheme, epoch, members });
    }
    true
}

/// A new generation of each kind of groups that omits many of the targets that are up, so that new files use
/// these at once. Old files keep their groups, whose places may move.
pub fn groups_for_new_targets(map: &ClusterMap, draining: &BTreeSet<TargetId>) -> Vec<WantedGroups> {
    if map.level < LEVEL_OF_GROWTH {
        return Vec::new();
    }
    let mut kinds: Vec<(&str, Scheme)> = map.groups.iter().map(|g| (g.pool.as_str(), g.scheme)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of = |(pool, scheme): (&str, Scheme)| {
        let (first, count) = map.groups_of(pool, scheme)?;
        let range = map.groups.iter().skip(first.0 as usize).take(count as usize);
        let used: BTreeSet<TargetId> = range.flat_map(|g| &g.members).map(|m| m.target).collect();
        let comes: BTreeSet<TargetId> = map.moves.iter().map(|found| found.to).collect();
        let mut candidates = candidates(map, pool);
        candidates.retain(|c| !draining.contains(&c.target));
        let is_new = |c: &&Candidate| !used.contains(&c.target) && !comes.contains(&c.target);
        let new = candidates.iter().filter(is_new).count();
        let groups = map.groups.len() + group_count(scheme, candidates.len());
        let many = new > 0 && new * NEW_PART_MIN >= candidates.len();
        let fits = candidates.len() >= scheme.width() && groups <= GROUPS_MAX;
        let wanted = || WantedGroups { pool: pool.to_owned(), scheme, candidates, after: Some(first) };
        (many && fits).then(wanted)
    };
    kinds.into_iter().filter_map(of).collect()
}

pub(super) fn pools(map: &ClusterMap) -> BTreeSet<&str> {
    map.targets.iter().map(|t| t.pool.as_str()).collect()
}

/// The targets of a pool that are up.
pub(super) fn candidates(map: &ClusterMap, pool: &str) -> Vec<Candidate> {
    let hosts: BTreeMap<NodeId, &str> = map.nodes.iter().map(|n| (n.id, n.host.as_str())).collect();
    let of_pool = map.targets.iter().filter(|t| t.pool == pool && t.state == TargetState::Up);
    let host = |t: &Target| hosts.get(&t.node).copied().unwrap_or_default().to_owned();
    of_pool.map(|t| Candidate { target: t.id, node: t.node, host: host(t), capacity: t.capacity }).collect()
}

fn leave_groups(map: &mut ClusterMap, target: TargetId, to: TargetState) -> bool {
    let Some(entry) = map.targets.iter_mut().find(|t| t.id == target) else { return false };
    if entry.state == to || entry.state == TargetState::Failed {
        return false;
    }
    entry.state = to;
    for group in &mut map.groups {
        if member_of(group, target).is_some_and(|m| m.state != MemberState::Down) {
            set_member(group, target, MemberState::Down);
        }
    }
    true
}

/// Nothing was written in epochs that began and ended within one draft: a member that left in one of them was
/// last current in the published map. So targets that go down together (a power cut, the stop of a cluster)
/// have missed nothing of each other.
pub fn forget_unpublished_epochs(published: &ClusterMap, draft: &mut ClusterMap) {
    for (before, group) in published.groups.iter().zip(&mut draft.groups) {
        for member in group.members.iter_mut().filter(|m| m.state != MemberState::Current) {
            if member.since > before.epoch
                && let Some(known) = member_of(before, member.target)
            {
                member.since = known.since;
            }
        }
    }
}

pub(super) fn member_of(group: &Group, target: TargetId) -> Option<&Member> {
    group.members.iter().find(|m| m.target == target)
}

pub(super) fn set_member(group: &mut Group, target: TargetId, state: MemberState) {
    set_place(&mut group.members, &mut group.epoch, target, state);
}

/// A member of a group of any kind: a target in a placement group, a node in a journal group.
pub trait Place {
    type Id: Copy + Eq + fmt::Display;
    fn id(&self) -> Self::Id;
    fn state(&self) -> MemberState;
    fn set_state(&mut self, state: MemberState);
    /// The member is current in this epoch.
    fn is_current_in(&mut self, epoch: Epoch);
}

impl Place for Member {
    type Id = TargetId;
    fn id(&self) -> TargetId {
        self.target
    }
    fn state(&self) -> MemberState {
        self.state
    }
    fn set_state(&mut self, state: MemberState) {
        self.state = state;
    }
    fn is_current_in(&mut self, epoch: Epoch) {
        (self.since, self.lost_at) = (epoch, Epoch(0));
    }
}

/// Sets a member's state, under a new epoch of the group.
pub(super) fn set_place<P: Place>(places: &mut [P], epoch: &mut Epoch, id: P::Id, state: MemberState) {
    *epoch = Epoch(epoch.0 + 1);
    for place in places {
        if place.id() == id {
            place.set_state(state);
        }
        if place.state() == MemberState::Current {
            place.is_current_in(*epoch);
        }
    }
}

/// A member that was down is reachable again. Returns whether the group changed.
pub(super) fn rejoin<P: Place>(places: &mut [P], epoch: &mut Epoch, id: P::Id, missed_nothing: bool) -> bool {
    let is_down = places.iter().any(|p| p.id() == id && p.state() == MemberState::Down);
    if is_down {
        let state = if missed_nothing { MemberState::Current } else { MemberState::Behind };
        set_place(places, epoch, id, state);
    }
    is_down
}

/// A member that was behind reports that it holds everything, as of epoch `claimed`. `lacks`: why it cannot
/// know that.
pub(super) fn catch_up<P: Place>(
    places: &mut [P],
    epoch: &mut Epoch,
    group: &dyn fmt::Display,
    id: P::Id,
    claimed: Epoch,
    lacks: Option<String>,
) -> Result<bool> {
    let place = places.iter().find(|p| p.id() == id);
    let state = place.ok_or_else(|| Error::invalid(format!("{id} is not a member of {group}")))?.state();
    if claimed != *epoch {
        // The member may have been away in between: it must check again under the present epoch.
        return Err(Error::stale(format!("{group} is at {epoch}, not {claimed}: check again")));
    }
    match (state, lacks) {
        (MemberState::Current, _) => Ok(false),
        (MemberState::Down, _) => Err(Error::stale(format!("{id} is down in {group}"))),
        (MemberState::Behind, Some(why)) => {
            Err(Error::unavailable(format!("{id} cannot know what it lacks of {group}: {why}")))
        }
        (MemberState::Behind, None) => {
            set_place(places, epoch, id, MemberState::Current);
            Ok(true)
        }
    }
}

#[cfg(test)]
#[path = "groups_tests.rs"]
pub mod tests;
