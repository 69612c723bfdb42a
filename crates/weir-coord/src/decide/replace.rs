//! Another target takes over a place of a placement group.
//!
//! The new target is a member that has lost everything: it is behind with `lost_at` the epoch of the change,
//! gets writes from then on, and is *filled*. Seals continue meanwhile, without it. When it has everything
//! that was listed, it is behind with that epoch as its `since` (`refilled`): seals wait, it lists the cells
//! written or sealed since, and is current after that ([`super::caught_up`]).
//!
//! Only while k members are current: then each of them has a `since` above that of the replaced member, so
//! its `since` is not needed to limit the epochs with writes.
use super::groups::{member_of, set_member};
use weir_proto::map::{ClusterMap, Group, Member, MemberState, TargetState};
use weir_proto::version::LEVEL_OF_REPLACEMENT;
use weir_proto::{Epoch, Error, PgId, Result, TargetId};

/// Assigns the place of a member that is down to another target of the pool.
pub fn replace(map: &mut ClusterMap, group: PgId, place: usize, to: TargetId) -> Result<()> {
    check_level(map)?;
    let newcomer = map.target(to).ok_or_else(|| Error::not_found(format!("there is no target {to}")))?;
    let (pool, is_up) = (newcomer.pool.clone(), newcomer.state == TargetState::Up);
    let entry = group_of(map, group)?;
    let goes =
        entry.members.get(place).ok_or_else(|| Error::invalid(format!("{group} has no place {place}")))?;
    if goes.state != MemberState::Down {
        return Err(Error::invalid(format!(
            "{} is in use in {group}: only a lost target is replaced",
            goes.target
        )));
    }
    if !is_up || pool != entry.pool || member_of(entry, to).is_some() {
        return Err(Error::invalid(format!(
            "{to} cannot take a place of {group}: it is down, of another pool, or in it"
        )));
    }
    if !entry.is_writable() {
        return Err(Error::unavailable(format!(
            "{group}: {} of its targets are usable, {} are needed to rebuild the data of another one",
            entry.current_count(),
            entry.scheme.data
        )));
    }
    let goes = entry.members.get_mut(place).expect("looked up above");
    *goes = Member { target: to, state: MemberState::Down, since: Epoch(0), lost_at: Epoch(0) };
    set_member(entry, to, MemberState::Behind);
    let epoch = entry.epoch;
    entry.members.iter_mut().filter(|m| m.target == to).for_each(|m| m.lost_at = epoch);
    Ok(())
}

/// A member that is filled has everything that was listed under `epoch`: from now on it gets the rest, and
/// seals wait. Returns whether that is new.
pub(super) fn refilled(group: &mut Group, target: TargetId, epoch: Epoch) -> Result<bool> {
    if epoch != group.epoch {
        return Err(Error::stale(format!("{} is at {}, not {epoch}: check again", group.id, group.epoch)));
    }
    if !group.is_writable() {
        let few = "too few members are current to know all writes";
        return Err(Error::unavailable(format!("{}: {few}", group.id)));
    }
    set_member(group, target, MemberState::Behind);
    let has_all = |m: &mut Member| (m.since, m.lost_at) = (epoch, Epoch(0));
    group.members.iter_mut().filter(|m| m.target == target).for_each(has_all);
    Ok(true)
}

fn check_level(map: &ClusterMap) -> Result<()> {
    if map.level >= LEVEL_OF_REPLACEMENT {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "the cluster is at level {}: targets are replaced from level {LEVEL_OF_REPLACEMENT} on",
        map.level
    ))
    .hint("weir upgrade finish"))
}

fn group_of(map: &mut ClusterMap, group: PgId) -> Result<&mut Group> {
    let entry = map.groups.get_mut(group.0 as usize).filter(|g| g.id == group);
    entry.ok_or_else(|| Error::not_found(format!("no placement group {group}")))
}
