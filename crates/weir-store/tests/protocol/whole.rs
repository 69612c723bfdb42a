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
use weir_store::cuts;
use weir_store::format::Cut;
use weir_store::service::{down_mask, sequencer};

/// Of a stripe that is written whole where nothing was.
pub const FIRST: Version = Version((TOKEN as u64) << 32 | 2);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    Waiting,
    Send,
    Commit,
    /// Its writer died. Whoever has the file next fences all live members, and then asks what they have.
    Dead,
    Recommit,
    Drop,
    /// The client knows that the stripe is written, or whoever has the file next has made it so.
    Ended,
    Dropped,
}

#[derive(Clone, Hash)]
pub struct Late {
    to: usize,
    view: View,
    version: Version,
    commits: bool,
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
    /// Sent under an earlier map, or by who has died: nobody waits for it any more.
    pub late: Vec<Late>,
    /// Some member has committed it.
    pub committed: bool,
    /// The writes of single bytes that came before it.
    pub after: u64,
}

impl Whole {
    /// `stage`: the stripe is there, and written over later, or it is new.
    pub fn new(view: View, width: usize, stage: Stage) -> Whole {
        let done = vec![None; width];
        Whole {
            view,
            stage,
            version: FIRST,
            cuts: Vec::new(),
            done,
            late: Vec::new(),
            committed: false,
            after: 0,
        }
    }
    /// Live members that have not answered in the client's map.
    fn open(&self, rules: &Rules) -> Vec<usize> {
        let (epoch, mask) = (self.view.epoch(), down_mask(self.view.group()));
        let settled = |p: &usize| match self.done[*p] {
            Some(_) if self.stage == Stage::Drop => true,
            Some(_) if self.stage == Stage::Commit && rules.has(Shortcut::CommittedOnceForAll) => true,
            Some((_, seen)) if rules.has(Shortcut::SameMembersSameFragments) => seen == mask,
            done => done.is_some_and(|(under, _)| under == epoch),
        };
        (0..self.done.len()).filter(|p| self.view.is_live(*p) && !settled(p)).collect()
    }
    fn is_under_way(&self) -> bool {
        !matches!(self.stage, Stage::Waiting | Stage::Ended | Stage::Dropped)
    }
    fn leave_late(&mut self, rules: &Rules) {
        let commits = self.stage == Stage::Commit;
        if commits || self.stage == Stage::Send {
            let sent = self.open(rules).into_iter().filter(|to| commits || self.done[*to].is_none());
            let (view, version) = (&self.view, self.version);
            let late: Vec<_> = sent.map(|to| Late { to, view: view.clone(), version, commits }).collect();
            self.late.extend(late);
        }
    }
}

/// Nobody else reads: the stripe is beyond the file's end, or its writer's alone, or waits to be recovered.
pub fn is_nobody_elses(rules: &Rules, s: &State) -> bool {
    let may_read = rules.whole != Some(Mode::Fresh);
    s.whole.as_ref().is_some_and(|w| w.is_under_way() && !(w.stage == Stage::Send && may_read))
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
    whole.leave_late(rules);
    whole.view = newest;
    Some(())
}

/// The writer dies. What it has sent may still arrive.
pub fn dies(rules: &Rules, s: &mut State) -> Option<()> {
    let newest = s.map.clone();
    let alive = |w: &&mut Whole| rules.dies && matches!(w.stage, Stage::Send | Stage::Commit);
    let whole = s.whole.as_mut().filter(alive)?;
    whole.leave_late(rules);
    (whole.stage, whole.view) = (Stage::Dead, newest);
    whole.done.fill(None);
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
    if matches!(whole.stage, Stage::Dead | Stage::Drop) {
        fence_or_drop(s, to, &whole)?;
        s.whole.as_mut()?.done[to] = Some((whole.view.epoch(), mask));
        return Some(());
    }
    let is_done = again && (mark(s, to, &whole, mask)? || rules.has(Shortcut::ForgottenIsMarked));
    if !is_done {
        match whole.stage {
            Stage::Commit | Stage::Recommit => commit(rules, s, to, &whole, &whole.view)?,
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
    let n = whole.late.iter().position(|late| late.to == to)?;
    let Late { view, version, commits, .. } = whole.late.remove(n);
    let whole = Whole { version, ..whole.clone() };
    if answers(s, &view, to) && commits {
        commit(rules, s, to, &whole, &view);
    } else if answers(s, &view, to) {
        let _ = write(rules, s, to, &whole, &view); // nobody hears of it
    }
    Some(())
}

/// What was sent to a target that goes by a newer map now can arrive no more.
pub fn bury(s: &mut State) {
    if let Some(whole) = &mut s.whole {
        whole.late.retain(|late| s.targets[late.to].view.epoch() <= late.view.epoch());
    }
}

/// All live members have answered.
pub fn go_on(rules: &Rules, s: &mut State) -> Option<()> {
    let whole = s.whole.clone().filter(|w| w.is_under_way() && w.view.group().is_writable())?;
    if !whole.open(rules).is_empty() {
        return None;
    }
    let next = match (whole.stage, rules.whole) {
        (Stage::Send, Some(Mode::Over)) => Stage::Commit,
        (Stage::Dead, _) => decide(rules, s, &whole)?,
        // A seal may have folded it everywhere meanwhile: there was nothing to drop.
        (Stage::Drop, _) if !whole.committed => Stage::Dropped,
        _ => Stage::Ended,
    };
    let whole = s.whole.as_mut()?;
    whole.stage = next;
    whole.done.fill(None);
    Some(())
}

/// As `weir_client` does it: any committed fragment, or k prepared ones.
fn decide(rules: &Rules, s: &State, whole: &Whole) -> Option<Stage> {
    let live: Vec<usize> = (0..rules.width()).filter(|p| whole.view.is_live(*p)).collect();
    if !live.iter().all(|p| answers(s, &whole.view, *p)) {
        return None;
    }
    let committed = live.iter().any(|p| s.targets[*p].base(*p).is_some_and(|b| b.version == whole.version));
    let holds = |p: &&usize| s.targets[**p].prepared(**p).iter().any(|f| f.version == whole.version);
    let commit = committed || live.iter().filter(holds).count() >= rules.data();
    Some(if commit { Stage::Recommit } else { Stage::Drop })
}

fn answers(s: &State, view: &View, to: usize) -> bool {
    s.targets[to].up && s.targets[to].view.epoch() == view.epoch()
}

/// What a target does with `DropFile` past the stripe, or with `DropPrepared`.
fn fence_or_drop(s: &mut State, to: usize, whole: &Whole) -> Option<()> {
    let fence = Cut { from_stripe: 1, to_stripe: u64::MAX, token_epoch: CUT_TOKEN };
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, whole.view.epoch())?;
        match whole.stage {
            Stage::Dead => cuts::remember(txn, FILE, fence),
            _ => cells::drop_prepared(txn, cell(to), whole.version, delta),
        }
    });
    made.then_some(())
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
fn commit(rules: &Rules, s: &mut State, to: usize, whole: &Whole, view: &View) -> Option<()> {
    let (scope, absent) = (view.scope(), Cell::new(false));
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        let outcome = cells::commit(txn, &scope, cell(to), whole.version, delta);
        outcome.inspect_err(|e| absent.set(e.kind == ErrorKind::NotFound))
    });
    if let Some(whole) = &mut s.whole {
        whole.committed |= made;
    }
    if made || !absent.get() {
        return made.then_some(());
    }
    let peers: Vec<usize> = view.current().into_iter().filter(|p| *p != to).collect();
    if !peers.iter().all(|p| answers(s, view, *p)) {
        return None;
    }
    let found = reader::decode(rules, s, &peers, to).filter(|d| d.version >= whole.version)?;
    super::steps::install(s, to, &found)
}
