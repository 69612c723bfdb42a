//! A client writes the stripe whole: a fragment to each live member, under one epoch of the group. Where nothing was they are the
//! stripe at once; over older bytes they are prepared, and committed when all have them.
//!
//! As `weir_client` does it: who has its fragment under an earlier epoch may have been away since, and have forgotten in repair
//! what nobody else knew. It is asked to note who is missing, and sent the fragment again if it has none.
use super::reader;
use super::rules::*;
use super::state::*;
use std::cell::Cell;
use weir_proto::data::SEAL_ROOM;
use weir_proto::{Epoch, ErrorKind, Seq, Version};
use weir_store::cells::{self, Admission};
use weir_store::service::{down_mask, sequencer};

/// Of a stripe that is written whole where nothing was.
pub const FIRST: Version = Version((TOKEN as u64) << 32 | 2);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    Waiting,
    Send,
    Commit,
    /// The client knows that the stripe is written.
    Ended,
}

/// The stripe that is being written.
#[derive(Clone, Hash)]
pub struct Whole {
    /// The map that the client goes by.
    pub view: View,
    pub stage: Stage,
    pub version: Version,
    /// Overlays up to here are replaced, per data cell.
    pub cuts: Vec<Seq>,
    /// Under which epoch, and with which members missing, each has answered.
    pub done: Vec<Option<(Epoch, u64)>>,
    /// Fragments sent under an earlier map, and not waited for any more: to whom.
    pub late: Vec<(usize, View, Version)>,
    /// The writes of single bytes that came before it.
    pub after: u64,
}

impl Whole {
    /// `stage`: the stripe is there, and written over later, or it is new.
    pub fn new(view: View, width: usize, stage: Stage) -> Whole {
        let done = vec![None; width];
        Whole { view, stage, version: FIRST, cuts: Vec::new(), done, late: Vec::new(), after: 0 }
    }
    /// Live members that have not answered in the client's map.
    fn open(&self, rules: &Rules) -> Vec<usize> {
        let (epoch, mask) = (self.view.epoch(), down_mask(self.view.group()));
        let settled = |p: &usize| match self.done[*p] {
            Some(_) if self.stage == Stage::Commit && rules.has(Shortcut::CommittedOnceForAll) => true,
            Some((_, seen)) if rules.has(Shortcut::SameMembersSameFragments) => seen == mask,
            done => done.is_some_and(|(under, _)| under == epoch),
        };
        (0..self.done.len()).filter(|p| self.view.is_live(*p) && !settled(p)).collect()
    }
    fn is_under_way(&self) -> bool {
        matches!(self.stage, Stage::Send | Stage::Commit)
    }
}

/// Nobody else writes or reads: the stripe is beyond the file's end, or its writer's alone.
pub fn is_nobody_elses(rules: &Rules, s: &State) -> bool {
    s.whole
        .as_ref()
        .is_some_and(|w| w.stage == Stage::Commit || (rules.whole == Some(Mode::Fresh) && w.is_under_way()))
}
pub fn is_under_way(s: &State) -> bool {
    s.whole.as_ref().is_some_and(Whole::is_under_way)
}
/// What was written there before it is void.
pub fn replaces(s: &State) -> Option<u64> {
    s.whole.as_ref().filter(|w| w.stage == Stage::Ended).map(|w| w.after)
}

/// The client asks for the logs that it is about to replace. It is the only writer, so none of its bytes are on their way; where a
/// write was given up, by it or by who died, a lease term or more has passed: current members' logs agree (`agree.rs` of the store).
pub fn begin(rules: &Rules, s: &mut State) -> Option<()> {
    let waiting = s.whole.as_ref().is_some_and(|w| w.stage == Stage::Waiting);
    let busy = s.writes.iter().any(|w| matches!(w.progress, Progress::Numbered { .. }));
    if !waiting || busy || !s.map.group().is_writable() || !logs_agree(rules, s) {
        return None;
    }
    let (view, mut base, mut cuts) = (s.map.clone(), Version(0), Vec::new());
    for index in 0..rules.data() {
        let at = sequencer(view.group(), cell(index)).filter(|at| answers(s, &view, *at))?;
        let stat = weir_store::lookup::stat_of(&*s.targets[at].index, &view.scope(), cell(at)).ok()?;
        base = base.max(stat.base);
        cuts.push(*stat.overlay_seqs.get(index).or(stat.overlay_seqs.first())?);
    }
    let after = (0..s.writes.len()).filter(|w| s.writes[*w].progress != Progress::Waiting);
    let after = after.fold(0, |mask, w| mask | 1 << w);
    let version = Version((base.0 + u64::from(SEAL_ROOM) + 2) & !1);
    let whole = s.whole.as_mut()?;
    *whole = Whole { view, stage: Stage::Send, version, cuts, after, ..whole.clone() };
    Some(())
}

fn logs_agree(rules: &Rules, s: &State) -> bool {
    let current = s.map.current();
    (0..rules.data()).all(|index| {
        let keepers = current.iter().filter(|p| **p == index || **p >= rules.data());
        let mut logs =
            keepers.map(|p| s.targets[*p].header(index).map_or((Seq(0), 0), |h| (h.last_seq, h.log_sum)));
        let first = logs.next();
        logs.all(|log| Some(log) == first)
    })
}

/// The client gets the newest map. What it has sent may still arrive.
pub fn learn(rules: &Rules, s: &mut State) -> Option<()> {
    let newest = s.map.clone();
    let whole = s.whole.as_mut().filter(|w| w.is_under_way() && w.view.epoch() < newest.epoch())?;
    if whole.stage == Stage::Send {
        let sent = whole.open(rules).into_iter().filter(|to| whole.done[*to].is_none());
        let sent: Vec<_> = sent.map(|to| (to, whole.view.clone(), whole.version)).collect();
        whole.late.extend(sent);
    }
    whole.view = newest;
    Some(())
}

/// A member gets its fragment, or is asked whether it still has it, or to commit it, and the client its answer.
pub fn send(rules: &Rules, s: &mut State, to: usize) -> Option<()> {
    let whole = s.whole.clone().filter(Whole::is_under_way)?;
    if !whole.open(rules).contains(&to) || !whole.view.group().is_writable() || !answers(s, &whole.view, to) {
        return None;
    }
    let mask = down_mask(whole.view.group());
    let again = whole.done[to].is_some();
    let is_done = again && (mark(s, to, &whole, mask)? || rules.has(Shortcut::ForgottenIsMarked));
    if !is_done {
        match whole.stage {
            Stage::Commit => commit(rules, s, to, &whole)?,
            _ => match write(rules, s, to, &whole, &whole.view) {
                Ok(()) => {}
                // A seal is under way: once more, above it.
                Err(ErrorKind::Exists) => {
                    let whole = s.whole.as_mut()?;
                    whole.version.0 += 256;
                    whole.done.fill(None);
                    return Some(());
                }
                Err(_) => return None,
            },
        }
    }
    s.whole.as_mut()?.done[to] = Some((whole.view.epoch(), mask));
    Some(())
}

/// What nobody waits for any more arrives.
pub fn arrive_late(rules: &Rules, s: &mut State, to: usize) -> Option<()> {
    let whole = s.whole.as_mut()?;
    let n = whole.late.iter().position(|(of, ..)| *of == to)?;
    let (_, view, version) = whole.late.remove(n);
    let whole = Whole { version, ..whole.clone() };
    if answers(s, &view, to) {
        let _ = write(rules, s, to, &whole, &view); // nobody hears of it
    }
    Some(())
}

/// What was sent to a target that goes by a newer map now can arrive no more.
pub fn bury(s: &mut State) {
    if let Some(whole) = &mut s.whole {
        whole.late.retain(|(to, view, _)| s.targets[*to].view.epoch() <= view.epoch());
    }
}

/// All live members have answered.
pub fn go_on(rules: &Rules, s: &mut State) -> Option<()> {
    let whole = s.whole.as_mut().filter(|w| w.is_under_way() && w.view.group().is_writable())?;
    if !whole.open(rules).is_empty() {
        return None;
    }
    whole.stage = match (whole.stage, rules.whole) {
        (Stage::Send, Some(Mode::Over)) => Stage::Commit,
        _ => Stage::Ended,
    };
    whole.done.fill(None);
    Some(())
}

fn answers(s: &State, view: &View, to: usize) -> bool {
    s.targets[to].up && s.targets[to].view.epoch() == view.epoch()
}

/// What a target does with `MarkMissing`; whether it has the version. `None`: refused.
fn mark(s: &mut State, to: usize, whole: &Whole, mask: u64) -> Option<bool> {
    let (scope, is_here) = (whole.view.scope(), Cell::new(false));
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        is_here.set(cells::mark_missing(txn, &scope, cell(to), whole.version, mask, delta)?);
        Ok(())
    });
    made.then(|| is_here.get())
}

/// What a target does with `WriteFragment`.
fn write(rules: &Rules, s: &mut State, to: usize, whole: &Whole, view: &View) -> Result<(), ErrorKind> {
    let (scope, mask) = (view.scope(), down_mask(view.group()));
    let fresh = rules.whole == Some(Mode::Fresh);
    let bytes = rules.stripe_of(if fresh { INITIAL } else { OVER })[to];
    let mut new = fragment(whole.version, scope.epoch, false, mask, bytes);
    new.cut = if to < rules.data() { whole.cuts.get(to).copied().unwrap_or_default() } else { Seq(0) };
    new.cuts = whole.cuts.clone();
    let kind = Cell::new(ErrorKind::Stale);
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        let outcome = match cells::admit(txn, cell(to), whole.version, &bytes, &new.block_crcs)? {
            Admission::Present => {
                cells::mark_missing(txn, &scope, cell(to), whole.version, mask, delta).map(drop)
            }
            Admission::Write if fresh => cells::fresh(txn, &scope, cell(to), new.clone(), delta),
            Admission::Write => cells::prepare(txn, &scope, cell(to), &new, delta),
        };
        outcome.inspect_err(|e| kind.set(e.kind))
    });
    if made { Ok(()) } else { Err(kind.get()) }
}

/// What a target does with `CommitStripe`: who was away when it was prepared takes it from others that have committed.
fn commit(rules: &Rules, s: &mut State, to: usize, whole: &Whole) -> Option<()> {
    let (scope, absent) = (whole.view.scope(), Cell::new(false));
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        let outcome = cells::commit(txn, &scope, cell(to), whole.version, delta);
        outcome.inspect_err(|e| absent.set(e.kind == ErrorKind::NotFound))
    });
    if made || !absent.get() {
        return made.then_some(());
    }
    let peers: Vec<usize> = whole.view.current().into_iter().filter(|p| *p != to).collect();
    if !peers.iter().all(|p| answers(s, &whole.view, *p)) {
        return None;
    }
    let found = reader::decode(rules, s, &peers, to).filter(|d| d.version >= whole.version)?;
    super::steps::install(s, to, &found)
}
