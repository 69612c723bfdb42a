//! What can happen next, and what it does: clients' writes and cuts, mirrors, the coordinator, crashes and
//! repair. Seals are in `seals.rs`, the writing of a whole stripe in `whole.rs`.
//!
//! Each step is one transaction of one target, one decision of one process, or one change of the map. A
//! message that was sent is a step that is possible from then on; it never has to happen.
use super::moves;
use super::rules::*;
use super::state::*;
use super::whole;
use std::collections::BTreeMap;
use std::sync::Arc;
use weir_coord::decide;
use weir_kv::Read;
use weir_proto::data::OverlayKind;
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Seq, Version};
use weir_store::alloc::Extent;
use weir_store::cells::{self, Appended, NewOverlay, Numbering};
use weir_store::format::{
    Fence, OVERLAY_DATA, Overlay, Truncation, cell_key, fence_key, header_key, overlay_data_key,
};
use weir_store::group::{down_mask, sequencer};
use weir_store::stripes::{StripeView, may_be_ahead, plan};
use weir_store::{lookup, truncations};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A client's write is numbered at a target that believes to be its sequencer.
    Number {
        write: usize,
        at: usize,
    },
    Mirror {
        write: usize,
        to: usize,
    },
    /// A mirror that lacks earlier numbers gets the next one from the sequencer's log.
    CloseGap {
        write: usize,
        to: usize,
    },
    /// The sequencer continues under the newer map that it knows.
    Adopt {
        write: usize,
    },
    /// Members went down since it was numbered: those that have it note that.
    ReportMissing {
        write: usize,
        to: usize,
    },
    Acknowledge {
        write: usize,
    },
    /// The journal of the target is on its disk.
    Sync {
        at: usize,
    },
    Crash {
        at: usize,
    },
    /// The coordinator does not reach a target, which keeps running.
    Suspect {
        at: usize,
    },
    /// The coordinator sees that a target is gone.
    Notice {
        at: usize,
    },
    /// It is served (again), and the coordinator knows.
    Return {
        at: usize,
    },
    /// Another target takes the place of one that is down.
    Replace {
        at: usize,
    },
    /// A newcomer has all that was listed.
    Refilled {
        at: usize,
    },
    /// The next epoch is closed for a place that moves.
    BeginMove {
        at: usize,
    },
    CloseForMove {
        at: usize,
    },
    CopyPlace {
        at: usize,
    },
    FinishMove {
        at: usize,
    },
    CancelMove,
    /// A target gets the newest map.
    Learn {
        at: usize,
    },
    LearnTruncations {
        at: usize,
    },
    List {
        at: usize,
    },
    RebuildBase {
        at: usize,
    },
    CopyLogs {
        at: usize,
    },
    CaughtUp {
        at: usize,
    },
    BeginTruncation,
    /// The map changed: the truncation is sent again under the newest one.
    RenewTruncation,
    ReportTruncation {
        to: usize,
    },
    EndTruncation,
    BeginSeal {
        at: usize,
    },
    Settle {
        at: usize,
    },
    Seal {
        seal: usize,
        to: usize,
    },
    SealGoesOn {
        seal: usize,
    },
    SealFails {
        seal: usize,
    },
    /// The client that writes the stripe whole gets the newest map.
    WholeLearns,
    BeginWhole,
    WriterDies,
    Whole {
        to: usize,
    },
    WholeLate {
        to: usize,
    },
    WholeGoesOn,
    /// A writer that was taken for dead sends again what it sent last, under the newest map.
    WholeWakes,
}

/// Every step that may be possible; [`take`] decides which are.
pub fn steps(rules: &Rules, state: &State) -> Vec<Step> {
    let width = rules.width();
    let mut all = Vec::new();
    for write in 0..state.writes.len() {
        for at in 0..width {
            all.extend([
                Step::Number { write, at },
                Step::Mirror { write, to: at },
                Step::CloseGap { write, to: at },
                Step::ReportMissing { write, to: at },
            ]);
        }
        all.extend([Step::Adopt { write }, Step::Acknowledge { write }]);
    }
    for at in 0..width {
        all.extend([Step::Sync { at }, Step::Crash { at }, Step::Suspect { at }, Step::Notice { at }]);
        all.extend([
            Step::Return { at },
            Step::Learn { at },
            Step::LearnTruncations { at },
            Step::List { at },
        ]);
        if rules.replacements > 0 {
            all.extend([Step::Replace { at }, Step::Refilled { at }]);
        }
        if rules.moves > 0 {
            all.extend([Step::BeginMove { at }, Step::CloseForMove { at }, Step::CopyPlace { at }]);
            all.push(Step::FinishMove { at });
        }
        all.extend([Step::RebuildBase { at }, Step::CopyLogs { at }, Step::CaughtUp { at }]);
        all.extend([Step::ReportTruncation { to: at }, Step::BeginSeal { at }, Step::Settle { at }]);
        all.extend((0..state.seals.len()).map(|seal| Step::Seal { seal, to: at }));
    }
    for seal in 0..state.seals.len() {
        all.extend([Step::SealGoesOn { seal }, Step::SealFails { seal }]);
    }
    all.extend([Step::BeginTruncation, Step::RenewTruncation, Step::EndTruncation]);
    all.extend((rules.moves > 0).then_some(Step::CancelMove));
    if state.whole.is_some() {
        all.extend((0..width).flat_map(|to| [Step::Whole { to }, Step::WholeLate { to }]));
        all.extend(rules.wakes.then_some(Step::WholeWakes));
        all.extend([Step::WholeLearns, Step::BeginWhole, Step::WriterDies, Step::WholeGoesOn]);
    }
    all
}

/// The state after a step; `None`: it is not possible now, or changes nothing.
pub fn take(rules: &Rules, before: &State, step: Step) -> Option<State> {
    let mut s = before.clone();
    let done = match step {
        Step::Number { write, at } => number(rules, &mut s, write, at),
        Step::Mirror { write, to } => mirror(rules, &mut s, write, to),
        Step::CloseGap { write, to } => close_gap(rules, &mut s, write, to),
        Step::ReportMissing { write, to } => report_missing(rules, &mut s, write, to),
        Step::Adopt { write } => adopt(rules, &mut s, write),
        Step::Acknowledge { write } => acknowledge(rules, &mut s, write),
        Step::Sync { at } => sync(&mut s, at),
        Step::Crash { at } => crash(&mut s, at),
        Step::Suspect { at } => suspect(&mut s, at),
        Step::Notice { at } => (!s.targets[at].up).then_some(()).and_then(|()| goes_down(&mut s, at)),
        Step::Return { at } => comes_back(rules, &mut s, at),
        Step::Replace { at } => replace(rules, &mut s, at),
        Step::Refilled { at } => refilled(rules, &mut s, at),
        Step::BeginMove { at } => moves::begin(rules, &mut s, at),
        Step::CloseForMove { at } => moves::close(rules, &mut s, at),
        Step::CopyPlace { at } => moves::copy(rules, &mut s, at),
        Step::FinishMove { at } => moves::finish(rules, &mut s, at),
        Step::CancelMove => moves::cancel(rules, &mut s),
        Step::Learn { at } => learn(&mut s, at),
        Step::LearnTruncations { at } => learn_truncations(rules, &mut s, at),
        Step::List { at } => list(rules, &mut s, at),
        Step::RebuildBase { at } => rebuild_base(rules, &mut s, at),
        Step::CopyLogs { at } => copy_logs(rules, &mut s, at),
        Step::CaughtUp { at } => caught_up(rules, &mut s, at),
        Step::BeginTruncation => begin_truncation(rules, &mut s),
        Step::RenewTruncation => renew_truncation(&mut s),
        Step::ReportTruncation { to } => report_truncation(rules, &mut s, to),
        Step::EndTruncation => end_truncation(&mut s),
        Step::BeginSeal { at } => super::seals::begin(rules, &mut s, at),
        Step::Settle { at } => super::seals::settle(rules, &mut s, at),
        Step::Seal { seal, to } => super::seals::deliver(rules, &mut s, seal, to),
        Step::SealGoesOn { seal } => super::seals::go_on(rules, &mut s, seal),
        Step::SealFails { seal } => super::seals::fail(rules, &mut s, seal),
        Step::WholeLearns => whole::learn(rules, &mut s),
        Step::BeginWhole => whole::begin(rules, &mut s),
        Step::WriterDies => whole::dies(rules, &mut s),
        Step::Whole { to } => whole::send(rules, &mut s, to),
        Step::WholeLate { to } => whole::arrive_late(rules, &mut s, to),
        Step::WholeGoesOn => whole::go_on(rules, &mut s),
        Step::WholeWakes => whole::wakes(&mut s),
    };
    whole::drop_ended(rules, &mut s);
    moves::forget(rules, &mut s);
    done.map(|()| s)
}

// ---- writes

fn overlay_of(planned: &Planned) -> Overlay {
    Overlay {
        offset: planned.offset as u32,
        len: 1,
        kind: OverlayKind::Data,
        crc: u32::from(planned.byte),
        token_epoch: if planned.after_truncation { TRUNCATION_TOKEN } else { TOKEN },
        extent: Extent::default(),
    }
}

fn number(rules: &Rules, s: &mut State, write: usize, at: usize) -> Option<()> {
    let planned = rules.planned[write];
    let ready = s.writes[write].progress == Progress::Waiting
        && (s.truncation == TruncationState::Ended || !planned.after_truncation)
        && !whole::is_under_way(s)
        && s.targets[at].up;
    let view = s.targets[at].view.clone();
    // The client sends under the same epoch, and only where the group is writable.
    if !ready || !view.group().is_writable() || sequencer(view.group(), cell(planned.cell)) != Some(at) {
        return None;
    }
    let target = &mut s.targets[at];
    let durable = target.durable.clone();
    let seq = append(target, &view, Numbering::Next, planned.cell, &overlay_of(&planned), planned.byte)?;
    target.durable = durable; // the answer waits for the journal, others' reads do not
    let after = (0..s.writes.len()).filter(|w| s.writes[*w].progress == Progress::Acknowledged);
    let after = after.fold(0, |mask, w| mask | 1 << w);
    s.writes[write] = Write {
        progress: Progress::Numbered { seq, by: at, held: 1 << at },
        after,
        after_truncation: s.truncation == TruncationState::Ended,
        acting: vec![view],
        reported: 0,
    };
    Some(())
}

/// `None`: refused, or numbers before it have not come.
fn append(
    target: &mut Target,
    view: &View,
    numbering: Numbering,
    index: usize,
    overlay: &Overlay,
    byte: u8,
) -> Option<Seq> {
    let scope = view.scope();
    let appended = std::cell::Cell::new(None);
    let made = target.change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        let missing = down_mask(view.group());
        let new = NewOverlay { overlay, inline: &[byte], missing };
        let outcome = cells::append(txn, &scope, cell(index), numbering, new, delta)?;
        appended.set(Some(outcome));
        Ok(())
    });
    match appended.get().filter(|_| made)? {
        Appended::At(seq) | Appended::Duplicate(seq) => Some(seq),
        Appended::Gap { .. } | Appended::Void(_) => None,
    }
}

/// Takes an overlay from the sequencer under the map `acting`: a target's action on `MirrorOverlay`.
fn log_mirrored(
    rules: &Rules,
    s: &mut State,
    to: usize,
    acting: &View,
    index: usize,
    seq: Seq,
    overlay: &Overlay,
    byte: u8,
) -> Option<()> {
    let target = &mut s.targets[to];
    let unchecked = rules.has(Shortcut::EpochNotChecked);
    if !target.up || (target.view.epoch() != acting.epoch() && !unchecked) {
        return None;
    }
    let view = target.view.clone();
    let numbering = match view.state(to) {
        MemberState::Current => Numbering::Mirror(seq),
        MemberState::Behind => Numbering::Behind(seq),
        MemberState::Down => return None,
    };
    append(target, &view, numbering, index, overlay, byte).map(|_| ())
}

fn mirror(rules: &Rules, s: &mut State, write: usize, to: usize) -> Option<()> {
    let Progress::Numbered { seq, by, held } = s.writes[write].progress else { return None };
    let planned = rules.planned[write];
    let keeps = to == planned.cell || to >= rules.data();
    if held & (1 << to) != 0 || !keeps {
        return None;
    }
    let acting = s.writes[write].acting.clone();
    let sent = acting.iter().rev().filter(|view| view.is_live(to));
    let overlay = overlay_of(&planned);
    for view in sent {
        if log_mirrored(rules, s, to, view, planned.cell, seq, &overlay, planned.byte).is_some() {
            s.writes[write].progress = Progress::Numbered { seq, by, held: held | 1 << to };
            return Some(());
        }
    }
    // The target that had the place before goes by an older map, and may take it.
    let takes = !s.targets[to].moved && acting.last()?.is_live(to);
    if acting.last()?.epoch() < s.targets[to].replaced && takes {
        s.writes[write].progress = Progress::Numbered { seq, by, held: held | 1 << to };
        return Some(());
    }
    None
}

fn close_gap(rules: &Rules, s: &mut State, write: usize, to: usize) -> Option<()> {
    let Progress::Numbered { seq, by, held } = s.writes[write].progress else { return None };
    let planned = rules.planned[write];
    let acting = s.writes[write].acting.last()?.clone();
    let keeps = to == planned.cell || to >= rules.data();
    if held & (1 << to) != 0 || !keeps || !acting.is_live(to) || !s.targets[by].up || to == by {
        return None;
    }
    let have = s.targets[to].header(planned.cell).map_or(Seq(0), |h| h.last_seq);
    let next = Seq(have.0 + 1);
    if next >= seq {
        return None;
    }
    let log = cells::overlays(&*s.targets[by].index, cell(planned.cell), next, next).ok()?;
    let (_, overlay) = log.first()?.clone();
    let byte = overlay.crc as u8;
    log_mirrored(rules, s, to, &acting, planned.cell, next, &overlay, byte)
}

fn adopt(rules: &Rules, s: &mut State, write: usize) -> Option<()> {
    let Progress::Numbered { by, .. } = s.writes[write].progress else { return None };
    let (view, at) = (s.targets[by].view.clone(), cell(rules.planned[write].cell));
    let newer = s.writes[write].acting.last().is_some_and(|last| last.epoch() < view.epoch());
    if !s.targets[by].up || !newer {
        return None;
    }
    if s.writes[write].acting.last().is_some_and(|last| last.epoch() < s.targets[by].replaced) {
        // Another target has the place of its sequencer now.
        s.writes[write].progress = Progress::Abandoned;
        return Some(());
    }
    let Progress::Numbered { seq, .. } = s.writes[write].progress else { return None };
    let overlay = overlay_of(&rules.planned[write]);
    let held = cells::holds(&*s.targets[by].index, at, seq, &overlay).expect("the index is sound");
    // Of a place that went to another target since nothing is held there.
    let before = s.writes[write].acting.last().map_or(Epoch(0), View::epoch);
    let went = (0..rules.width()).filter(|p| (*p != by) && s.targets[*p].replaced > before);
    let went = went.filter(|p| view.epoch() >= s.targets[*p].replaced).fold(0, |mask, p| mask | 1 << p);
    if sequencer(view.group(), at) == Some(by) && (held || rules.has(Shortcut::NumberKept)) {
        if let Progress::Numbered { held, .. } = &mut s.writes[write].progress {
            *held &= !went;
        }
        s.writes[write].acting.push(view);
        s.writes[write].reported = 0;
    } else {
        s.writes[write].progress = Progress::Abandoned;
    }
    Some(())
}

/// Members that keep the write's log and are live in its newest map.
fn live_keepers(rules: &Rules, s: &State, write: usize) -> Vec<usize> {
    let (index, acting) = (rules.planned[write].cell, s.writes[write].acting.last());
    let live = |p: &usize| acting.is_some_and(|view| view.is_live(*p));
    (0..rules.width()).filter(|p| *p == index || *p >= rules.data()).filter(live).collect()
}

/// The live keepers that do not have the list of missing members yet.
fn unreported(rules: &Rules, s: &State, write: usize) -> Vec<usize> {
    let w = &s.writes[write];
    let mask = |view: Option<&View>| view.map_or(0, |view| down_mask(view.group()));
    if mask(w.acting.last()) & !mask(w.acting.first()) == 0 || rules.has(Shortcut::MissingNotReported) {
        return Vec::new();
    }
    live_keepers(rules, s, write).into_iter().filter(|p| w.reported & (1 << p) == 0).collect()
}

fn report_missing(rules: &Rules, s: &mut State, write: usize, to: usize) -> Option<()> {
    let Progress::Numbered { by, held, .. } = s.writes[write].progress else { return None };
    let all_hold = live_keepers(rules, s, write).into_iter().all(|p| held & (1 << p) != 0);
    if !all_hold || !unreported(rules, s, write).contains(&to) || !s.targets[by].up || !s.targets[to].up {
        return None;
    }
    let acting = s.writes[write].acting.last()?.clone();
    let (scope, mask, at) = (acting.scope(), down_mask(acting.group()), cell(rules.planned[write].cell));
    let target = &mut s.targets[to];
    if target.view.epoch() != acting.epoch() {
        return None;
    }
    let made = target.change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        cells::mark_missing(txn, &scope, at, Version(0), mask, delta).map(drop)
    });
    s.writes[write].reported |= u64::from(made) << to;
    made.then_some(())
}

fn acknowledge(rules: &Rules, s: &mut State, write: usize) -> Option<()> {
    let Progress::Numbered { by, held, .. } = s.writes[write].progress else { return None };
    let planned = rules.planned[write];
    // A client without the right to write any more has no member to notify.
    let stale_client = s.truncation != TruncationState::No && !planned.after_truncation;
    let target = &s.targets[by];
    if !target.up || target.index != target.durable || stale_client {
        return None;
    }
    let wanting = live_keepers(rules, s, write).into_iter().any(|p| held & (1 << p) == 0);
    let writable =
        s.writes[write].acting.last()?.group().is_writable() || rules.has(Shortcut::AcknowledgedByFew);
    let is_waiting = wanting || !writable || !unreported(rules, s, write).is_empty();
    if is_waiting && !rules.has(Shortcut::AcknowledgeBeforeMirrors) {
        return None;
    }
    let w = &mut s.writes[write];
    w.progress = Progress::Acknowledged;
    w.acting.clear();
    Some(())
}

// ---- processes and the coordinator

fn sync(s: &mut State, at: usize) -> Option<()> {
    let target = &mut s.targets[at];
    if !target.up || target.index == target.durable {
        return None;
    }
    target.durable = target.index.clone();
    Some(())
}

fn crash(s: &mut State, at: usize) -> Option<()> {
    if !s.targets[at].up || s.crashes_left == 0 {
        return None;
    }
    s.crashes_left -= 1;
    let target = &mut s.targets[at];
    (target.up, target.repair, target.index) = (false, Repair::No, target.durable.clone());
    for write in &mut s.writes {
        if matches!(write.progress, Progress::Numbered { by, .. } if by == at) {
            write.progress = Progress::Abandoned;
        }
    }
    for seal in s.seals.iter_mut().filter(|seal| seal.leader == at) {
        seal.zombie = true;
    }
    Some(())
}

fn suspect(s: &mut State, at: usize) -> Option<()> {
    if !s.targets[at].up || s.suspicions_left == 0 {
        return None;
    }
    s.suspicions_left -= 1;
    goes_down(s, at)
}

fn goes_down(s: &mut State, at: usize) -> Option<()> {
    let mut map = (*s.map.0).clone();
    let news = decide::target_down(&mut map, s.map.id(at));
    decide::settle_moves(&mut map);
    s.map = View(Arc::new(map));
    news.then_some(())
}

fn comes_back(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let mut map = (*s.map.0).clone();
    if !decide::target_back(&mut map, s.map.id(at)) {
        return None;
    }
    if rules.has(Shortcut::ReturnAsCurrent) {
        let epoch = map.groups[0].epoch;
        let member = &mut map.groups[0].members[at];
        (member.state, member.since) = (MemberState::Current, epoch);
    }
    s.map = View(Arc::new(map));
    let target = &mut s.targets[at];
    (target.up, target.view, target.repair) = (true, s.map.clone(), Repair::No);
    Some(())
}

fn learn(s: &mut State, at: usize) -> Option<()> {
    let target = &mut s.targets[at];
    if !target.up || target.view.epoch() == s.map.epoch() {
        return None;
    }
    (target.view, target.repair) = (s.map.clone(), Repair::No);
    Some(())
}

// ---- replacement

/// A lost target's place goes to an empty one. The lost one may keep running for a while: clients that it
/// answers act under an older epoch.
fn replace(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    if s.replacements_left == 0 || s.map.state(at) != MemberState::Down {
        return None;
    }
    let to = target_id(rules.width() + usize::from(rules.replacements - s.replacements_left));
    let (mut map, since) = ((*s.map.0).clone(), s.map.group().members[at].since);
    decide::replace(&mut map, GROUP, at, to).ok()?;
    if rules.has(Shortcut::NewcomerIsReturned) {
        let member = &mut map.groups[0].members[at];
        (member.since, member.lost_at) = (since, Epoch(0));
    }
    s.replacements_left -= 1;
    s.map = View(Arc::new(map));
    for write in &mut s.writes {
        if matches!(write.progress, Progress::Numbered { by, .. } if by == at) {
            write.progress = Progress::Abandoned;
        }
    }
    s.seals.iter_mut().filter(|seal| seal.leader == at).for_each(|seal| seal.zombie = true);
    let target = &mut s.targets[at];
    (target.up, target.view, target.repair) = (true, s.map.clone(), Repair::No);
    (target.replaced, target.moved) = (s.map.epoch(), false);
    target.index = Arc::new(Index::default());
    target.durable = target.index.clone();
    Some(())
}

fn refilled(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let said = s.targets[at].repair == Repair::Done || rules.has(Shortcut::FilledEarly);
    if !said || !s.targets[at].up || !s.map.is_filled(at) {
        return None;
    }
    let mut map = (*s.map.0).clone();
    s.targets[at].repair = Repair::No;
    let epoch = s.targets[at].view.epoch();
    if rules.has(Shortcut::FilledIsCurrent) {
        map.groups[0].members[at].lost_at = Epoch(0);
        decide::caught_up(&mut map, s.map.id(at), GROUP, epoch).ok().filter(|news| *news)?;
    } else {
        decide::caught_up(&mut map, s.map.id(at), GROUP, epoch).ok().filter(|news| *news)?;
    }
    s.map = View(Arc::new(map));
    Some(())
}

// ---- repair

/// The current members that a member behind asks, if all of them can be asked under its map.
fn peers(s: &State, at: usize) -> Option<Vec<usize>> {
    let target = &s.targets[at];
    let peers = target.view.current();
    let answers = |p: &usize| s.targets[*p].up && s.targets[*p].view.epoch() == target.view.epoch();
    let behind = target.up && target.view.state(at) == MemberState::Behind;
    (behind && !peers.is_empty() && peers.iter().all(answers)).then_some(peers)
}

/// Each peer refuses lower epochs from now on.
fn raise(s: &mut State, peers: &[usize], epoch: Epoch) -> Option<()> {
    peers.iter().all(|p| s.targets[*p].change(|txn, _| cells::check_epoch(txn, GROUP, epoch))).then_some(())
}

fn learn_truncations(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let peers = peers(s, at).filter(|_| s.targets[at].repair == Repair::No)?;
    s.targets[at].repair = Repair::TruncationsLearned;
    if rules.has(Shortcut::TruncationsNotLearned) {
        return Some(());
    }
    raise(s, &peers, s.targets[at].view.epoch())?;
    if s.targets[at].view.is_filled(at) && !rules.has(Shortcut::FencesNotTaken) {
        take_fences(s, at, &peers)?;
    }
    let void = peers
        .iter()
        .map(|p| weir_store::entries::void_below(&*s.targets[*p].index, cell(0)).unwrap_or(0))
        .max()?;
    match void {
        0 => Some(()),
        token_epoch => truncate_at(rules, s, at, token_epoch, None),
    }
}

/// A newcomer's action on the answers to `ListFences`.
fn take_fences(s: &mut State, at: usize, peers: &[usize]) -> Option<()> {
    let fence = |p: &usize| {
        weir_store::entries::get(&*s.targets[*p].index, &fence_key(FILE)).expect("the index is sound")
    };
    let newest = peers.iter().filter_map(fence).map(|f: Fence| f.token_epoch).max();
    let taken = |token_epoch| s.targets[at].change(|txn, _| cells::take_fence(txn, FILE, token_epoch));
    newest.is_none_or(taken).then_some(())
}

fn list(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let peers = peers(s, at).filter(|_| s.targets[at].repair == Repair::TruncationsLearned)?;
    let view = s.targets[at].view.clone();
    raise(s, &peers, view.epoch())?;
    let in_doubt =
        |p: &usize| cells::in_doubt(&*s.targets[*p].index, GROUP, true).expect("the index is sound");
    // Where seals continue some are in doubt all the time; their results are listed later.
    let waits = view.group().pauses_seals(view.0.level) && !rules.has(Shortcut::RepairInDoubt);
    if waits && peers.iter().any(|p| !in_doubt(p).is_empty()) {
        return Some(()); // they refuse lower epochs now, and are asked again
    }
    let stripe = view_of(s, &view, &peers, view.group().members[at].complete_since());
    s.targets[at].repair = Repair::Listed(stripe);
    Some(())
}

/// The versions of the stripe that the peers list, written since an epoch.
fn view_of(s: &State, view: &View, peers: &[usize], since: Epoch) -> StripeView {
    let mut stripe = StripeView::default();
    for p in peers {
        let index = &*s.targets[*p].index;
        for c in lookup::listed_cells(index, GROUP, None, 100).expect("the index is sound") {
            let summary = lookup::summary(index, c).expect("the index is sound").expect("it is listed");
            if summary.epoch < since && summary.missing == 0 {
                continue;
            }
            stripe.newest = stripe.newest.max(summary.base);
            if c.index < view.group().scheme.data {
                stripe.logs.entry(c.index).or_default().insert((summary.seq, summary.log_sum));
            }
        }
    }
    stripe
}

fn todo(rules: &Rules, target: &Target, at: usize, stripe: &StripeView) -> weir_store::stripes::StripePlan {
    let log = |i: &u8| target.header(usize::from(*i)).map(|h| (*i, (h.last_seq, h.log_sum)));
    let own_logs: BTreeMap<_, _> = stripe.logs.keys().filter_map(log).collect();
    let own = target.base(at).map_or(Version(0), |b| b.version);
    plan(stripe, own, &own_logs, at, rules.data())
}

fn rebuild_base(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let peers = peers(s, at)?;
    let Repair::Listed(stripe) = s.targets[at].repair.clone() else { return None };
    if todo(rules, &s.targets[at], at, &stripe).rebuild.is_some()
        && let Some(found) = super::reader::decode(rules, s, &peers, at)
    {
        install(s, at, &found)?;
    }
    s.targets[at].repair = Repair::BaseRebuilt(stripe);
    Some(())
}

/// A target takes what was decoded from others as its base.
pub fn install(s: &mut State, at: usize, found: &super::reader::Decoded) -> Option<()> {
    let scope = s.targets[at].view.scope();
    let mut rebuilt = fragment(found.version, scope.epoch, false, found.missing, found.content);
    (rebuilt.folded_seq, rebuilt.folded_seqs) = (found.folded_seq, found.folded_seqs.clone());
    rebuilt.missing &= !(1 << at);
    let made = s.targets[at].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        cells::install(txn, &scope, cell(at), &rebuilt, false, delta).map(|_| ())
    });
    made.then_some(())
}

fn copy_logs(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let peers = peers(s, at)?;
    let Repair::BaseRebuilt(stripe) = s.targets[at].repair.clone() else { return None };
    let view = s.targets[at].view.clone();
    let scope = view.scope();
    if view.is_filled(at) {
        for index in todo(rules, &s.targets[at], at, &stripe).copy {
            copy_log(rules, s, at, &peers, usize::from(index))?;
        }
        s.targets[at].repair = Repair::Done;
        return Some(());
    }
    // As long as something is dropped that only this target had.
    while todo(rules, &s.targets[at], at, &stripe).copy.into_iter().try_fold(false, |dropped, index| {
        copy_log(rules, s, at, &peers, usize::from(index)).map(|drops| dropped || drops)
    })? {}
    // What only this target wrote in the end: as the others have it.
    let since = view.group().members[at].since;
    let own = |i: usize| lookup::summary(&*s.targets[at].index, cell(i)).expect("the index is sound");
    let older = |c: &weir_proto::data::CellSummary| (since..scope.epoch).contains(&c.epoch);
    let ahead = |i: usize| match rules.has(Shortcut::LogsOfOlderCells) {
        true => own(i).is_some_and(|c| older(&c)),
        false => own(i).is_some_and(|c| may_be_ahead(&c, since, scope.epoch)),
    };
    if (0..rules.data()).any(ahead) || ahead(at) {
        let mut whole = view_of(s, &view, &peers, Epoch(0));
        for index in 0..view.group().scheme.data {
            whole.logs.entry(index).or_insert_with(|| [(Seq(0), 0)].into());
        }
        for index in todo(rules, &s.targets[at], at, &whole).copy {
            copy_log(rules, s, at, &peers, usize::from(index))?;
        }
    }
    let known = |p: &usize| cells::stripe_known(&*s.targets[*p].index, &scope, cell(*p)).unwrap_or(true);
    if !peers.iter().any(known) {
        // No member knows it any more: cells older than the group's epoch are dropped.
        let dropped = s.targets[at].change(|txn, delta| {
            for index in 0..rules.width() {
                let header: Option<weir_store::format::Header> =
                    weir_store::entries::get(txn, &header_key(cell(index)))?;
                if header.is_some_and(|h| h.epoch < scope.epoch) {
                    cells::drop_cell(txn, cell(index), delta)?;
                }
            }
            Ok(())
        });
        assert!(dropped);
    }
    if !rules.has(Shortcut::AbortedStays) {
        drop_aborted(s, at, &peers)?;
    }
    s.targets[at].repair = Repair::Done;
    Some(())
}

/// Versions that a writer prepared here before, and that none of the peers has any more.
fn drop_aborted(s: &mut State, at: usize, peers: &[usize]) -> Option<()> {
    let epoch = s.targets[at].view.epoch();
    for own in s.targets[at].prepared(at).into_iter().filter(|own| !own.seal) {
        if !peers.iter().any(|p| s.targets[*p].fragment(*p, own.version).is_some()) {
            let dropped = s.targets[at]
                .change(|txn, delta| cells::drop_prepared_before(txn, cell(at), own.version, epoch, delta));
            assert!(dropped);
        }
    }
    Some(())
}

/// Takes the log of a cell from a peer; whether something was dropped that only this target had.
fn copy_log(rules: &Rules, s: &mut State, at: usize, peers: &[usize], index: usize) -> Option<bool> {
    let (scope, view) = (s.targets[at].view.scope(), s.targets[at].view.clone());
    let holder = peers.iter().copied().find(|p| *p == index || *p >= rules.data())?;
    let upto = s.targets[holder].header(index).map_or(Seq(0), |h| h.last_seq);
    let log = |of: usize, from: Seq, to: Seq| cells::overlays(&*s.targets[of].index, cell(index), from, to);
    let numbers = sequencer(view.group(), cell(index)) == Some(holder);
    let beyond = log(at, Seq(upto.0 + 1), Seq(u64::MAX)).ok()?;
    let stale: BTreeMap<Seq, Overlay> = beyond.into_iter().filter(|_| numbers).collect();
    let inline = |seq: Seq| s.targets[holder].index.get(&overlay_data_key(cell(index), seq)).ok().flatten();
    let copies: BTreeMap<_, _> = log(holder, Seq(0), upto)
        .ok()?
        .into_iter()
        .map(|(seq, o)| (seq, (o, inline(seq).unwrap_or_default())))
        .collect();
    let made = s.targets[at].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        cells::install_overlays(txn, &scope, cell(index), upto, &copies, &stale, delta).map(|_| ())
    });
    made.then_some(!stale.is_empty())
}

fn caught_up(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    if s.targets[at].repair != Repair::Done || s.map.is_filled(at) {
        return None;
    }
    let mut map = (*s.map.0).clone();
    s.targets[at].repair = Repair::No;
    let group = &mut map.groups[0];
    if rules.has(Shortcut::CaughtUpWithFew) && !group.is_writable() {
        if s.targets[at].view.epoch() != group.epoch {
            return None;
        }
        group.epoch.0 += 1;
        group.members[at].state = MemberState::Current;
        let current = group.members.iter_mut().filter(|m| m.state == MemberState::Current);
        current.for_each(|m| m.since = group.epoch);
        s.map = View(Arc::new(map));
        return Some(());
    }
    match decide::caught_up(&mut map, s.map.id(at), GROUP, s.targets[at].view.epoch()) {
        Ok(true) => {
            s.map = View(Arc::new(map));
            Some(())
        }
        _ => None,
    }
}

// ---- cuts

fn begin_truncation(rules: &Rules, s: &mut State) -> Option<()> {
    if !rules.truncation || s.truncation != TruncationState::No {
        return None;
    }
    s.map.0.members_to_truncate(|_| true).ok()?;
    (s.truncation, s.truncation_acting) = (TruncationState::Begun, Some(s.map.clone()));
    Some(())
}

fn renew_truncation(s: &mut State) -> Option<()> {
    let acting = s
        .truncation_acting
        .clone()
        .filter(|a| s.truncation == TruncationState::Begun && a.epoch() < s.map.epoch())?;
    s.map.0.members_to_truncate(|_| true).ok()?;
    assert!(acting.epoch() < s.map.epoch());
    (s.truncation_reported, s.truncation_acting) = (0, Some(s.map.clone()));
    Some(())
}

fn report_truncation(rules: &Rules, s: &mut State, to: usize) -> Option<()> {
    let acting = s.truncation_acting.clone()?;
    if s.truncation != TruncationState::Begun
        || s.truncation_reported & (1 << to) != 0
        || !acting.is_live(to)
        || !s.targets[to].up
    {
        return None;
    }
    truncate_at(rules, s, to, TRUNCATION_TOKEN, Some(acting.epoch()))?;
    s.truncation_reported |= 1 << to;
    Some(())
}

/// A target's action on `DropFile`.
fn truncate_at(
    rules: &Rules,
    s: &mut State,
    at: usize,
    token_epoch: u32,
    epoch: Option<Epoch>,
) -> Option<()> {
    let made = s.targets[at].change(|txn, delta| {
        epoch.map_or(Ok(()), |epoch| cells::check_epoch(txn, GROUP, epoch))?;
        truncations::remember(txn, FILE, Truncation { from_stripe: 0, to_stripe: 1, token_epoch })?;
        (0..rules.width()).try_for_each(|index| cells::drop_void(txn, cell(index), token_epoch, delta))
    });
    made.then_some(())
}

fn end_truncation(s: &mut State) -> Option<()> {
    let acting = s.truncation_acting.clone().filter(|_| s.truncation == TruncationState::Begun)?;
    let live = (0..s.targets.len()).filter(|p| acting.is_live(*p)).fold(0, |mask, p| mask | 1 << p);
    if live & !s.truncation_reported != 0 || !acting.group().is_writable() {
        return None;
    }
    (s.truncation, s.truncation_acting) = (TruncationState::Ended, None);
    Some(())
}

/// Inline data of overlays is where the store has it: else a copy would lose it unnoticed.
pub fn logs_have_their_data(target: &Target, data: usize) -> bool {
    (0..data).all(|index| {
        let log =
            cells::overlays(&*target.index, cell(index), Seq(0), Seq(u64::MAX)).expect("the index is sound");
        log.iter().all(|(seq, o)| {
            let found = target.index.get(&overlay_data_key(cell(index), *seq)).ok().flatten();
            found.as_deref() == Some(&[o.crc as u8])
        }) && target.index.get(&cell_key(OVERLAY_DATA, cell(index))).is_ok_and(|v| v.is_none())
    })
}
