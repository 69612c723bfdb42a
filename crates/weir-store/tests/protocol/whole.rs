//! A client writes the stripe whole: a fragment to each live member, under one epoch of the group. Of a new
//! stripe they are the base at once; over older bytes they are prepared, and committed when all members have
//! them.
//!
//! As `weir_client` does it: a member that has its fragment under an earlier epoch may have been away since,
//! and may have dropped in repair what no other member knew. It is asked to note the missing members, and
//! gets the fragment again if it has none. No client commits before all live members have the fragment under
//! the same epoch.
use super::reader;
use super::rules::*;
use super::state::*;
use std::cell::Cell;
use weir_proto::data::SEAL_VERSIONS;
use weir_proto::{Epoch, ErrorKind, Seq, Version};
use weir_store::cells::{self, Admission};
use weir_store::format::Truncation;
use weir_store::group::{down_mask, sequencer};
use weir_store::truncations;

/// Of a stripe that is written whole where nothing was.
pub const FIRST: Version = Version((TOKEN as u64) << 32 | 2);

/// Of the writer, and of the client that decides for it.
const DEATHS_MAX: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    Waiting,
    Send,
    Commit,
    /// The map changed before all had committed it: the request is sent again to members that lack it now.
    Again,
    /// Its writer died. The next client with the file fences all live members, and then asks for their
    /// versions. It may die, too.
    Dead,
    /// It is to be committed: members that lack it take it from others.
    Hold,
    Recommit,
    Drop,
    /// The client knows that the stripe is written, or the next client with the file has completed it.
    Ended,
    Dropped,
}

#[derive(Clone, Hash)]
pub struct Late {
    to: usize,
    view: View,
    version: Version,
    stage: Stage,
    token_epoch: u32,
}

/// The stripe that is being written.
#[derive(Clone, Hash)]
pub struct Whole {
    /// The map that the client goes by.
    pub view: View,
    pub stage: Stage,
    pub version: Version,
    /// Overlays up to here are replaced, per data cell.
    pub folded_seqs: Vec<Seq>,
    /// Under which epoch, and with which members missing, each has answered.
    pub done: Vec<Option<(Epoch, u64)>>,
    /// The members that have committed it, as far as the client knows. Bit per position.
    pub did: u64,
    /// Sent under an earlier map, or by a dead client: no client waits for it any more.
    pub late: Vec<Late>,
    /// Some member has committed it.
    pub committed: bool,
    /// The writes of single bytes that came before it.
    pub after: u64,
    deaths: u8,
}

impl Whole {
    /// `stage`: the stripe exists, and is written over later, or it is new.
    pub fn new(view: View, width: usize, stage: Stage) -> Whole {
        let done = vec![None; width];
        Whole {
            view,
            stage,
            version: FIRST,
            folded_seqs: Vec::new(),
            done,
            did: 0,
            late: Vec::new(),
            committed: false,
            after: 0,
            deaths: 0,
        }
    }
    /// Live members that have not answered in the client's map.
    fn open(&self, rules: &Rules) -> Vec<usize> {
        let (epoch, mask) = (self.view.epoch(), down_mask(self.view.group()));
        let settled = |p: &usize| match self.done[*p] {
            Some(_) if self.stage == Stage::Drop => true,
            _ if self.commits() => self.did & (1 << p) != 0,
            Some((_, seen)) if rules.has(Shortcut::SameMembersSameFragments) => seen == mask,
            done => done.is_some_and(|(under, _)| under == epoch),
        };
        (0..self.done.len()).filter(|p| self.view.is_live(*p) && !settled(p)).collect()
    }
    fn is_under_way(&self) -> bool {
        !matches!(self.stage, Stage::Waiting | Stage::Ended | Stage::Dropped)
    }
    /// Each who decides has a higher one.
    fn token_epoch(&self) -> u32 {
        TOKEN + u32::from(self.deaths)
    }
    fn commits(&self) -> bool {
        matches!(self.stage, Stage::Commit | Stage::Recommit)
    }
    /// A member without a waiting client may still get messages in flight; late fences and questions about
    /// missing members change nothing.
    fn leave_late(&mut self, rules: &Rules) {
        if self.is_under_way() && self.stage != Stage::Dead {
            let asked =
                |to: &usize| matches!(self.stage, Stage::Send | Stage::Again) && self.done[*to].is_some();
            let sent = self.open(rules).into_iter().filter(|to| !asked(to));
            let (view, version, token_epoch) = (&self.view, self.version, self.token_epoch());
            let stage = if self.stage == Stage::Again { Stage::Send } else { self.stage };
            let late = |to| Late { to, view: view.clone(), version, stage, token_epoch };
            let late: Vec<_> = sent.map(late).collect();
            self.late.extend(late);
            let order =
                |late: &Late| (late.to, late.stage as u8, late.view.epoch(), late.version, late.token_epoch);
            self.late.sort_by_key(order);
            self.late.dedup_by_key(|late| order(late));
        }
    }
    /// All live members must hold it under the new map before any client commits it.
    fn restarts(&mut self, stage: Stage) {
        self.stage = stage;
        match stage {
            Stage::Again => self.done.fill(Some((Epoch(0), 0))),
            _ => self.done.fill(None),
        }
    }
}

/// No other client reads: the stripe is beyond the file's end, or its writer's alone, or waits to be
/// recovered.
pub fn is_own_only(rules: &Rules, s: &State) -> bool {
    let may_read = rules.whole != Some(Mode::Fresh);
    s.whole.as_ref().is_some_and(|w| w.is_under_way() && !(w.stage == Stage::Send && may_read))
}
pub fn is_under_way(s: &State) -> bool {
    s.whole.as_ref().is_some_and(Whole::is_under_way)
}
/// Earlier bytes there are void.
pub fn replaces(s: &State) -> Option<u64> {
    s.whole.as_ref().filter(|w| w.stage == Stage::Ended).map(|w| w.after)
}

/// The client asks for the logs that it is about to replace. It is the only writer, so none of its bytes are
/// in flight; where a write was aborted by it or by a dead client, a lease term or more has passed: current
/// members' logs agree (`agree.rs` of the store).
pub fn begin(rules: &Rules, s: &mut State) -> Option<()> {
    let waiting = s.whole.as_ref().is_some_and(|w| w.stage == Stage::Waiting);
    let busy = s.writes.iter().any(|w| matches!(w.progress, Progress::Numbered { .. }));
    if !waiting || busy || !s.map.group().is_writable() || !logs_agree(rules, s) {
        return None;
    }
    let (view, mut base, mut folded_seqs) = (s.map.clone(), Version(0), Vec::new());
    for index in 0..rules.data() {
        let at = sequencer(view.group(), cell(index)).filter(|at| answers(s, &view, *at))?;
        let stat = weir_store::lookup::stat_of(&*s.targets[at].index, &view.scope(), cell(at)).ok()?;
        base = base.max(stat.base);
        folded_seqs.push(*stat.overlay_seqs.get(index).or(stat.overlay_seqs.first())?);
    }
    let after = (0..s.writes.len()).filter(|w| s.writes[*w].progress != Progress::Waiting);
    let after = after.fold(0, |mask, w| mask | 1 << w);
    let version = Version((base.0 + u64::from(SEAL_VERSIONS) + 2) & !1);
    let whole = s.whole.as_mut()?;
    *whole = Whole { view, stage: Stage::Send, version, folded_seqs, after, ..whole.clone() };
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

/// The client gets the newest map. Its earlier messages may still arrive.
pub fn learn(rules: &Rules, s: &mut State) -> Option<()> {
    let newest = s.map.clone();
    let whole = s.whole.as_mut().filter(|w| w.is_under_way() && w.view.epoch() < newest.epoch())?;
    whole.leave_late(rules);
    let came = |p: &usize| newest.id(*p) != whole.view.id(*p) && !rules.has(Shortcut::CommittedByPlace);
    whole.did &= !(0..rules.width()).filter(came).fold(0, |mask, p| mask | 1 << p);
    whole.view = newest;
    match whole.stage {
        Stage::Commit if !rules.has(Shortcut::CommittedUnderAnyEpoch) => whole.restarts(Stage::Again),
        Stage::Recommit => whole.restarts(Stage::Hold),
        _ => {}
    }
    Some(())
}

/// The writer dies, or the client that decides for it. Its earlier messages may still arrive.
pub fn dies(rules: &Rules, s: &mut State) -> Option<()> {
    let newest = s.map.clone();
    let deaths_max = if rules.wakes { 1 } else { DEATHS_MAX };
    let alive =
        |w: &&mut Whole| rules.dies && w.is_under_way() && w.deaths < deaths_max && w.stage != Stage::Dead;
    let whole = s.whole.as_mut().filter(alive)?;
    whole.leave_late(rules);
    whole.deaths += 1;
    whole.view = newest;
    whole.did = 0;
    whole.restarts(Stage::Dead);
    Some(())
}

/// A member gets its fragment, or is asked whether it still has it, or to commit it, and the client its
/// answer.
pub fn send(rules: &Rules, s: &mut State, to: usize) -> Option<()> {
    let whole = s.whole.clone().filter(Whole::is_under_way)?;
    if !whole.open(rules).contains(&to) || !whole.view.group().is_writable() || !answers(s, &whole.view, to) {
        return None;
    }
    let mask = down_mask(whole.view.group());
    let again = whole.done[to].is_some();
    if matches!(whole.stage, Stage::Dead | Stage::Drop) {
        fence_or_drop(rules, s, to, &whole)?;
        s.whole.as_mut()?.done[to] = Some((whole.view.epoch(), mask));
        return Some(());
    }
    match whole.stage {
        Stage::Hold => {
            if !mark(s, to, &whole, mask)? && hold(rules, s, to, &whole, &whole.view)?.is_none() {
                // Too few have it now: its outcome is decided again.
                s.whole.as_mut()?.restarts(Stage::Dead);
                return Some(());
            }
        }
        Stage::Commit | Stage::Recommit => {
            commit(rules, s, to, &whole, &whole.view)?;
            s.whole.as_mut()?.did |= 1 << to;
        }
        _ if again && (mark(s, to, &whole, mask)? || rules.has(Shortcut::ForgottenIsMarked)) => {}
        _ => match write(rules, s, to, &whole, &whole.view) {
            Ok(()) => {}
            // A seal is in progress: again, above it.
            Err(ErrorKind::Exists) if whole.stage == Stage::Send => {
                let whole = s.whole.as_mut()?;
                whole.version.0 += 256;
                whole.done.fill(None);
                return Some(());
            }
            Err(_) => return None,
        },
    }
    s.whole.as_mut()?.done[to] = Some((whole.view.epoch(), mask));
    Some(())
}

/// A message without a waiting sender arrives.
pub fn arrive_late(rules: &Rules, s: &mut State, to: usize) -> Option<()> {
    let whole = s.whole.as_mut()?;
    let n = whole.late.iter().position(|late| late.to == to)?;
    let Late { view, version, stage, token_epoch, .. } = whole.late.remove(n);
    let whole = Whole { version, stage, deaths: (token_epoch - TOKEN) as u8, ..whole.clone() };
    if !answers(s, &view, to) {
        return Some(());
    }
    // No client gets the result.
    match stage {
        Stage::Commit | Stage::Recommit => drop(commit(rules, s, to, &whole, &view)),
        Stage::Hold => drop(hold(rules, s, to, &whole, &view)),
        Stage::Drop => drop(fence_or_drop(rules, s, to, &whole)),
        _ => drop(write(rules, s, to, &whole, &view)),
    }
    Some(())
}

/// It continues with the newest map, and does not know that others have decided about its stripe. Only after
/// a replacement: a member that returns gets the fences with the truncations, which are not modelled one by
/// one.
pub fn wakes(s: &mut State) -> Option<()> {
    s.targets.iter().any(|t| t.replaced > Epoch(0)).then_some(())?;
    let (newest, whole) = (s.map.clone(), s.whole.as_mut()?);
    let late = whole.late.iter_mut().find(|late| late.view.epoch() < newest.epoch())?;
    late.view = newest;
    Some(())
}

/// Messages to a target that has a newer map now are refused.
pub fn drop_ended(rules: &Rules, s: &mut State) {
    if let Some(whole) = s.whole.as_mut().filter(|_| !rules.wakes) {
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
        (Stage::Send | Stage::Again, Some(Mode::Over)) => Stage::Commit,
        (Stage::Dead, _) => decide(rules, s, &whole)?,
        (Stage::Hold, _) => Stage::Recommit,
        // A seal may have folded it everywhere meanwhile: there was nothing to drop.
        (Stage::Drop, _) if !whole.committed => Stage::Dropped,
        _ => Stage::Ended,
    };
    let whole = s.whole.as_mut()?;
    whole.stage = next;
    whole.done.fill(None);
    Some(())
}

/// As `weir_client` does it: one committed fragment, or k prepared ones, of current members. A member that is
/// behind may have versions that were aborted while it was away.
fn decide(rules: &Rules, s: &State, whole: &Whole) -> Option<Stage> {
    let asked = whole.view.current();
    if !asked.iter().all(|p| answers(s, &whole.view, *p)) {
        return None;
    }
    let committed = asked.iter().any(|p| s.targets[*p].base(*p).is_some_and(|b| b.version == whole.version));
    let holds = |p: &&usize| s.targets[**p].prepared(**p).iter().any(|f| f.version == whole.version);
    let commit = committed || asked.iter().filter(holds).count() >= rules.data();
    Some(if commit { Stage::Hold } else { Stage::Drop })
}

/// A client that decides about a file fences it first, so decisions of an earlier one are refused.
fn check_fence(rules: &Rules, txn: &Index, token_epoch: u32) -> weir_proto::Result<()> {
    match rules.has(Shortcut::DecidedByTwo) {
        true => Ok(()),
        false => cells::check_fence(txn, FILE, token_epoch),
    }
}

fn answers(s: &State, view: &View, to: usize) -> bool {
    s.targets[to].up && s.targets[to].view.epoch() == view.epoch()
}

/// A target's action on `DropFile` past the stripe, or on `DropPrepared`.
fn fence_or_drop(rules: &Rules, s: &mut State, to: usize, whole: &Whole) -> Option<()> {
    let token_epoch = whole.token_epoch();
    let fence = Truncation { from_stripe: 1, to_stripe: u64::MAX, token_epoch };
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, whole.view.epoch())?;
        match whole.stage {
            Stage::Dead => truncations::remember(txn, FILE, fence),
            _ => {
                check_fence(rules, txn, token_epoch)?;
                cells::drop_prepared(txn, cell(to), whole.version, delta)
            }
        }
    });
    made.then_some(())
}

/// A target's action on `MarkMissing`; returns whether it has the version. `None`: refused.
fn mark(s: &mut State, to: usize, whole: &Whole, mask: u64) -> Option<bool> {
    let (scope, is_here) = (whole.view.scope(), Cell::new(false));
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        is_here.set(cells::mark_missing(txn, &scope, cell(to), whole.version, mask, delta)?);
        Ok(())
    });
    made.then(|| is_here.get())
}

/// A target's action on `WriteFragment`.
fn write(rules: &Rules, s: &mut State, to: usize, whole: &Whole, view: &View) -> Result<(), ErrorKind> {
    let (scope, mask) = (view.scope(), down_mask(view.group()));
    let fresh = rules.whole == Some(Mode::Fresh);
    let bytes = rules.stripe_of(if fresh { INITIAL } else { OVER })[to];
    let mut new = fragment(whole.version, scope.epoch, false, mask, bytes);
    new.folded_seq =
        if to < rules.data() { whole.folded_seqs.get(to).copied().unwrap_or_default() } else { Seq(0) };
    new.folded_seqs = whole.folded_seqs.clone();
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

/// A target's action on `HoldStripe` if it lacks the version: takes it from k current members. `Some(None)`:
/// fewer have it.
fn hold(rules: &Rules, s: &mut State, to: usize, whole: &Whole, view: &View) -> Option<Option<()>> {
    let peers: Vec<usize> = view.current().into_iter().filter(|p| *p != to).collect();
    if !peers.iter().all(|p| answers(s, view, *p)) {
        return None;
    }
    let Some(found) = reader::decode_version(rules, s, &peers, to, Some(whole.version)) else {
        return Some(None);
    };
    let (scope, token_epoch) = (view.scope(), whole.token_epoch());
    let mut held = fragment(found.version, scope.epoch, false, found.missing & !(1 << to), found.content);
    (held.folded_seq, held.folded_seqs) = (found.folded_seq, found.folded_seqs);
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        check_fence(rules, txn, token_epoch)?;
        cells::hold(txn, &scope, cell(to), &held, delta).map(drop)
    });
    made.then_some(Some(()))
}

/// A target's action on `CommitStripe`.
fn commit(rules: &Rules, s: &mut State, to: usize, whole: &Whole, view: &View) -> Option<()> {
    let (scope, token_epoch) = (view.scope(), whole.token_epoch());
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        check_fence(rules, txn, token_epoch)?;
        cells::commit(txn, &scope, cell(to), whole.version, delta)
    });
    if let Some(whole) = &mut s.whole {
        whole.committed |= made;
    }
    made.then_some(())
}

/// No prepared version of a writer is left when all has ended and all members are up.
pub fn problem(rules: &Rules, s: &State) -> Option<String> {
    let whole = s.whole.as_ref().filter(|w| matches!(w.stage, Stage::Ended | Stage::Dropped))?;
    let ended = whole.late.is_empty() && s.map.current().len() == rules.width();
    let left = |p: &usize| s.targets[*p].prepared(*p).iter().any(|f| !f.seal);
    let left = (0..rules.width()).find(left).filter(|_| ended)?;
    Some(format!("member {left} still has prepared what was committed or dropped"))
}
