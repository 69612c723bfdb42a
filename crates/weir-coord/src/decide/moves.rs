//! Moves a place of a placement group from a target that serves it to another one.
//!
//! The member stays current, read and written, while the new target copies its cells. When few are left, the
//! coordinator gives the group an epoch in which the member accepts no change of that place (`close_move`):
//! the new target copies the rest, and then both hold the same cells. It becomes the member under the next
//! epoch (`finish_move`). Redundancy is never reduced, and a move is cancelled by deleting it from the map.
//!
//! An epoch is closed only while all members are current, and the new target becomes a member only in the
//! epoch that follows: any other change of the group reopens it, and copying continues.
use super::groups::member_of;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Move, TargetState};
use weir_proto::version::LEVEL_OF_GROWTH;
use weir_proto::{Epoch, Error, PgId, Result, TargetId};

/// Moves of a cluster at a time: they are in the map, which every process receives.
pub const MOVES_MAX: usize = 64;

/// Begins to move a place to another target of the pool.
pub fn begin_move(map: &mut ClusterMap, group: PgId, place: usize, to: TargetId) -> Result<()> {
    check_level(map)?;
    if map.moves.len() >= MOVES_MAX || map.move_of(group).is_some() {
        return Err(Error::invalid(format!("{group}: another place of it moves, or {MOVES_MAX} others do")));
    }
    let newcomer = map.target(to).ok_or_else(|| Error::not_found(format!("there is no target {to}")))?;
    let entry = group_of(map, group)?;
    let is_current = |m: &Member| m.state == MemberState::Current;
    if !entry.members.get(place).is_some_and(is_current) {
        return Err(Error::invalid(format!("place {place} of {group} has no current member to copy from")));
    }
    if newcomer.state != TargetState::Up || newcomer.pool != entry.pool || member_of(entry, to).is_some() {
        return Err(Error::invalid(format!(
            "{to} cannot take a place of {group}: it is down, of another pool, or in it"
        )));
    }
    map.moves.push(Move { group, place: place as u8, to, closed_in: Epoch(0) });
    Ok(())
}

/// The new target has copied nearly everything: the next epoch is closed.
pub fn close_move(map: &mut ClusterMap, group: PgId, to: TargetId, epoch: Epoch) -> Result<()> {
    checked(map, group, to, epoch)?;
    let entry = map.groups.get_mut(group.0 as usize).expect("checked above");
    let closed_in = next_epoch(entry);
    map.moves.iter_mut().filter(|m| m.group == group).for_each(|m| m.closed_in = closed_in);
    Ok(())
}

/// The new target holds everything that the member had when this epoch was closed: it becomes the member.
/// Returns the previous member.
pub fn finish_move(map: &mut ClusterMap, group: PgId, to: TargetId, epoch: Epoch) -> Result<TargetId> {
    let found = checked(map, group, to, epoch)?;
    if found.closed_in != epoch {
        return Err(Error::stale(format!("{group} is not closed in {epoch}: copy again")));
    }
    let entry = map.groups.get_mut(group.0 as usize).expect("checked above");
    let member = &mut entry.members[usize::from(found.place)];
    let from = std::mem::replace(&mut member.target, to);
    next_epoch(entry);
    map.moves.retain(|m| m.group != group);
    Ok(from)
}

/// Cancels a move. The group continues under a new epoch that is not closed; the other target drops its
/// copies, which are of an earlier epoch.
pub fn cancel_move(map: &mut ClusterMap, group: PgId) {
    let before = map.moves.len();
    map.moves.retain(|m| m.group != group);
    let entry = map.groups.get_mut(group.0 as usize).filter(|g| g.id == group);
    if let Some(entry) = entry.filter(|_| map.moves.len() < before) {
        next_epoch(entry);
    }
}

/// Ends the epoch in which the group is closed; the move continues. Returns whether it was closed.
pub fn reopen(map: &mut ClusterMap, group: PgId) -> bool {
    let Some(found) = map.move_of(group).copied() else { return false };
    let entry = map.groups.get_mut(group.0 as usize);
    let Some(entry) = entry.filter(|g| g.id == group && is_closed(g, &found)) else { return false };
    next_epoch(entry);
    true
}

/// The members' data is unchanged, and they may miss this epoch: their `since` stays. A member that is away
/// from now on also lists writes of the previous epochs. (Found by the protocol search.)
fn next_epoch(group: &mut Group) -> Epoch {
    group.epoch = Epoch(group.epoch.0 + 1);
    group.epoch
}

/// Cancels moves whose source or destination is gone.
pub fn settle_moves(map: &mut ClusterMap) {
    let is_current = |m: &Member| m.state == MemberState::Current;
    let goes_on = |found: &Move| {
        let member = map.group(found.group).and_then(|g| g.members.get(usize::from(found.place)));
        let is_up = map.target(found.to).is_some_and(|t| t.state == TargetState::Up);
        member.is_some_and(is_current) && is_up
    };
    let ended: Vec<PgId> = map.moves.iter().filter(|m| !goes_on(m)).map(|m| m.group).collect();
    for group in ended {
        tracing::info!("the move of a place of {group} is cancelled: one of its targets is down");
        cancel_move(map, group);
    }
}

/// Removes a target that is down and has no place from the map. Returns a description of the change.
pub fn remove_target(map: &mut ClusterMap, target: TargetId) -> Result<String> {
    check_level(map)?;
    let entry = map.target(target).ok_or_else(|| Error::not_found(format!("there is no target {target}")))?;
    let has = |g: &&Group| member_of(g, target).is_some();
    let places = map.groups.iter().filter(has).count();
    if places > 0 || map.moves.iter().any(|m| m.to == target) {
        return Err(Error::exists(format!("{target} has a place in {places} placement groups"))
            .hint(format!("`weir target drain {target}` moves them to other targets")));
    }
    if entry.state == TargetState::Up {
        return Err(Error::exists(format!("{target} is in service, without data"))
            .hint("stop its storage process first"));
    }
    map.last_target = map.targets.iter().map(|t| t.id).max().unwrap_or_default().max(map.last_target);
    map.targets.retain(|t| t.id != target);
    Ok(format!("{target} is removed from the cluster"))
}

/// Whether the group's present epoch is closed for the place that moves.
pub fn is_closed(group: &Group, found: &Move) -> bool {
    found.closed_in == group.epoch
}

/// The move to the target, if the group is at that epoch with all members current.
fn checked(map: &ClusterMap, group: PgId, to: TargetId, epoch: Epoch) -> Result<Move> {
    let is_asked = |found: &&Move| found.to == to;
    let found = map.move_of(group).filter(is_asked).copied();
    let found = found.ok_or_else(|| Error::stale(format!("no place of {group} moves to {to}")))?;
    let entry = map.group(group).ok_or_else(|| Error::not_found(format!("no placement group {group}")))?;
    if entry.epoch != epoch {
        return Err(Error::stale(format!("{group} is at {}, not {epoch}: copy again", entry.epoch)));
    }
    if usize::from(found.place) >= entry.members.len() || entry.current_count() < entry.members.len() {
        return Err(Error::unavailable(format!("{group}: a member is repaired first")));
    }
    Ok(found)
}

fn check_level(map: &ClusterMap) -> Result<()> {
    if map.level >= LEVEL_OF_GROWTH {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "the cluster is at level {}: places move from level {LEVEL_OF_GROWTH} on",
        map.level
    ))
    .hint("weir upgrade finish"))
}

fn group_of(map: &ClusterMap, group: PgId) -> Result<&Group> {
    map.group(group).ok_or_else(|| Error::not_found(format!("no placement group {group}")))
}

#[cfg(test)]
#[path = "moves_tests.rs"]
mod tests;
