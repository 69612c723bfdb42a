//! A place moves to another target: the group is closed for it, the target copies the member's cells, and
//! becomes the member. Copies before the last one change nothing that counts, so they are not modelled.
//!
//! The slot of a target becomes the other target's when the move is finished. Operations of the former
//! member continue with the answers that others give it under the older maps; it accepts no more requests.
use super::rules::*;
use super::state::*;
use std::sync::Arc;
use weir_coord::decide;
use weir_proto::map::{ClusterMap, MemberState};
use weir_store::cells;
use weir_store::format::{Fence, fence_key};
use weir_store::image;

fn changed(s: &State) -> ClusterMap {
    (*s.map.0).clone()
}

fn publish(rules: &Rules, s: &mut State, mut map: ClusterMap) {
    if rules.has(Shortcut::CurrentSinceClosed) {
        let group = &mut map.groups[0];
        let current = group.members.iter_mut().filter(|m| m.state == MemberState::Current);
        current.for_each(|m| m.since = group.epoch);
    }
    s.map = View(Arc::new(map));
}

/// The coordinator closes the next epoch for the place.
pub fn begin(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    if s.moves_left == 0 || !s.map.0.moves.is_empty() {
        return None;
    }
    let spare = rules.width() + usize::from(rules.replacements + rules.moves - s.moves_left);
    let (to, epoch, mut map) = (target_id(spare), s.map.epoch(), changed(s));
    decide::begin_move(&mut map, GROUP, at, to).ok()?;
    decide::close_move(&mut map, GROUP, to, epoch).ok()?;
    s.moves_left -= 1;
    publish(rules, s, map);
    Some(())
}

/// The member that knows of that epoch closes it.
pub fn close(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let found = *s.targets[at].view.0.moves.first()?;
    let epoch = s.targets[at].view.epoch();
    let asked = usize::from(found.place) == at && found.closed_in == epoch && s.targets[at].up;
    if !asked || rules.has(Shortcut::NeverClosed) {
        return None;
    }
    let before = s.targets[at].index.clone();
    let made = s.targets[at].change(|txn, _| cells::close(txn, GROUP, epoch));
    (made && s.targets[at].index != before).then_some(())
}

/// The other target copies what the member has.
pub fn copy(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let found = *s.targets[at].view.0.moves.first()?;
    let member = &s.targets[at];
    let epoch = member.view.epoch();
    let asked = usize::from(found.place) == at && found.closed_in == epoch && member.up;
    let is_closed = || cells::check_epoch(&mut (*member.index).clone(), GROUP, epoch).is_err();
    let early = rules.has(Shortcut::CopiedBeforeClose) || rules.has(Shortcut::NeverClosed);
    if !asked || s.image.is_some() || !(early || is_closed()) {
        return None;
    }
    let mut copied = Index::default();
    for index in 0..rules.width() {
        if index != at && rules.has(Shortcut::LogsNotCopied) {
            continue;
        }
        let entries = image::entries(&*member.index, cell(index)).expect("the index is sound");
        let mut delta = cells::Delta::default();
        image::put(&mut copied, GROUP, cell(index), &entries, &mut delta).expect("it is an image");
        let again = image::entries(&copied, cell(index)).expect("the index is sound");
        assert_eq!(image::digest(&again), image::digest(&entries));
    }
    let fence: Option<Fence> =
        weir_store::entries::get(&*member.index, &fence_key(FILE)).expect("the index is sound");
    if let Some(fence) = fence.filter(|_| !rules.has(Shortcut::FencesNotCopied)) {
        cells::take_fence(&mut copied, FILE, fence.token_epoch).expect("the index is sound");
    }
    s.image = Some((epoch, Arc::new(copied)));
    Some(())
}

/// The coordinator makes the other target the member.
pub fn finish(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let (epoch, copied) = s.image.clone()?;
    let (mut map, any) = (changed(s), rules.has(Shortcut::CopyOfEarlierEpoch));
    let found = *map.moves.first().filter(|found| usize::from(found.place) == at)?;
    let mut closed_in = epoch;
    if any {
        closed_in = s.map.epoch();
        map.moves[0].closed_in = closed_in;
    }
    decide::finish_move(&mut map, GROUP, found.to, closed_in).ok()?;
    publish(rules, s, map);
    s.image = None;
    let target = &mut s.targets[at];
    (target.up, target.view, target.repair) = (true, s.map.clone(), Repair::No);
    (target.replaced, target.moved) = (s.map.epoch(), true);
    let mut index = (*copied).clone();
    cells::check_epoch(&mut index, GROUP, s.map.epoch()).expect("the index is sound");
    target.index = Arc::new(index);
    target.durable = target.index.clone();
    Some(())
}

/// The coordinator ends the closing: by itself, or because the move is cancelled.
pub fn cancel(rules: &Rules, s: &mut State) -> Option<()> {
    s.map.0.moves.first()?;
    let mut map = changed(s);
    match rules.has(Shortcut::CopyOfEarlierEpoch) {
        true => drop(decide::reopen(&mut map, GROUP).then_some(())?),
        false => decide::cancel_move(&mut map, GROUP),
    }
    publish(rules, s, map);
    forget(rules, s);
    Some(())
}

/// Copied cells count for one epoch.
pub fn forget(rules: &Rules, s: &mut State) {
    let is_over = s.image.as_ref().is_some_and(|(epoch, _)| *epoch < s.map.epoch());
    if is_over && !rules.has(Shortcut::CopyOfEarlierEpoch) {
        s.image = None;
    }
}
