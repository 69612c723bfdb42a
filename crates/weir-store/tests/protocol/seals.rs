//! Seals, message by message: fold, prepare parity, commit; drop, and what settles a seal whose leader died.
//!
//! The messages of a phase are sent at once, so each may arrive at any time, also after its sender gave up (a
//! zombie).
use super::reader;
use super::rules::*;
use super::state::*;
use weir_proto::data::CellStat;
use weir_proto::map::MemberState;
use weir_proto::{Seq, Version};
use weir_store::cells;
use weir_store::format::Fragment;
use weir_store::group::seal_leader;
use weir_store::lookup;
use weir_store::seal::{InDoubt, can_seal, resolve, version_of};

/// Seals without a waiting task; more are not followed.
const ZOMBIES_MAX: usize = 2;

fn stat(s: &State, view: &View, p: usize) -> CellStat {
    lookup::stat_of(&*s.targets[p].index, &view.scope(), cell(p)).expect("the index is sound")
}
fn answers(s: &State, acting: &View, p: usize) -> bool {
    s.targets[p].up && s.targets[p].view.epoch() == acting.epoch()
}
fn led_by(s: &State, at: usize) -> bool {
    s.seals.iter().any(|seal| seal.leader == at && !seal.zombie)
}

fn may_seal(rules: &Rules, view: &View) -> bool {
    can_seal(view.group(), view.0.level) || rules.has(Shortcut::SealsNeverWait) && view.group().is_writable()
}

pub fn begin(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    let acting = s.targets[at].view.clone();
    let logged = (0..rules.data()).any(|i| s.targets[at].header(i).is_some_and(|h| h.overlay_count > 0));
    let may = s.seals_left > 0 && s.targets[at].up && !led_by(s, at) && logged;
    let leads = seal_leader(acting.group()) == Some(at) && may_seal(rules, &acting);
    if !may || !leads || !acting.current().iter().all(|p| answers(s, &acting, *p)) {
        return None;
    }
    let token = (0..rules.data()).map(|i| token_epoch(&s.targets[at], i)).max()?;
    let stats: Vec<CellStat> = acting.current().into_iter().map(|p| stat(s, &acting, p)).collect();
    let base = stats.iter().map(|stat| stat.base).max()?;
    let above = |newest: Version| Version((newest.0 + 1) | 1);
    let version = match rules.has(Shortcut::SealAboveWriters) {
        true => above(stats.iter().flat_map(|stat| &stat.prepared).fold(base, |newest, v| newest.max(*v))),
        false => version_of(&stats, token)?,
    };
    s.seals_left -= 1;
    s.seals.push(Seal {
        leader: at,
        acting,
        version,
        base,
        phase: Phase::Fold,
        done: 0,
        committed: false,
        refused: false,
        zombie: false,
        folded: vec![None; rules.data()],
    });
    Some(())
}
fn token_epoch(target: &Target, index: usize) -> u32 {
    let log =
        cells::overlays(&*target.index, cell(index), Seq(0), Seq(u64::MAX)).expect("the index is sound");
    let base = target.base(index).map_or(0, |b| b.version.token_epoch());
    let fence: Option<weir_store::format::Fence> =
        weir_store::entries::get(&*target.index, &weir_store::format::fence_key(FILE))
            .expect("the index is sound");
    log.iter()
        .map(|(_, o)| o.token_epoch)
        .max()
        .unwrap_or(0)
        .max(base)
        .max(fence.map_or(0, |f| f.token_epoch))
}

/// The receivers of a message in the seal's phase.
fn addressed(rules: &Rules, seal: &Seal) -> Vec<usize> {
    let current = seal.acting.current();
    let is_parity = |p: &usize| *p >= rules.data();
    match seal.phase {
        // The leader makes up the fold of a lost data target.
        Phase::Fold => (0..rules.data()).collect(),
        Phase::Prepare => current.into_iter().filter(is_parity).collect(),
        Phase::Commit => current.into_iter().filter(|p| *p != seal.leader).collect(),
        Phase::CommitOwn => vec![seal.leader],
        Phase::Drop => current,
    }
}

pub fn deliver(rules: &Rules, s: &mut State, n: usize, to: usize) -> Option<()> {
    let seal = s.seals[n].clone();
    if seal.done & (1 << to) != 0 || seal.refused || !addressed(rules, &seal).contains(&to) {
        return None;
    }
    if seal.phase == Phase::Fold && !seal.acting.is_current(to) {
        return fold_lost(rules, s, n, to);
    }
    if !answers(s, &seal.acting, to) {
        return None;
    }
    let taken = match seal.phase {
        Phase::Fold => fold(s, n, to),
        Phase::Prepare => prepare(rules, s, n, to),
        Phase::Commit | Phase::CommitOwn => commit(s, n, to),
        Phase::Drop => drop_prepared(s, n, to),
    };
    let seal = &mut s.seals[n];
    seal.done |= 1 << to;
    seal.refused |= !taken;
    drop_ended(rules, s);
    Some(())
}

/// A target's action on `SealCell`.
fn fold(s: &mut State, n: usize, to: usize) -> bool {
    let (version, scope) = (s.seals[n].version, s.seals[n].acting.scope());
    let target = &mut s.targets[to];
    let (bytes, last) = target.merged(to);
    let present = target.base(to).map_or(Version(0), |b| b.version);
    let mut folded = fragment(version, scope.epoch, true, scope.lacking(), bytes);
    folded.folded_seq = last;
    let made = version > present
        && target.change(|txn, delta| {
            cells::check_epoch(txn, GROUP, scope.epoch)?;
            cells::check_fence(txn, FILE, version.token_epoch())?;
            cells::prepare(txn, &scope, cell(to), &folded, delta)
        });
    s.seals[n].folded[to] = made.then_some((bytes, last));
    made
}
/// The leader decodes a lost cell and applies its own log.
fn fold_lost(rules: &Rules, s: &mut State, n: usize, lost: usize) -> Option<()> {
    let seal = s.seals[n].clone();
    let peers = seal.acting.current();
    if seal.zombie || !peers.iter().all(|p| answers(s, &seal.acting, *p)) {
        return None;
    }
    let decoded = reader::decode(rules, s, &peers, lost);
    let found = decoded.as_ref().map_or(Version(0), |d| d.version);
    if found == seal.base {
        let (bytes, after) = decoded.map_or(([0; 2], Seq(0)), |d| (d.content, d.folded_seq));
        s.seals[n].folded[lost] = Some(s.targets[seal.leader].apply_log(lost, bytes, after));
    }
    s.seals[n].refused |= found != seal.base;
    s.seals[n].done |= 1 << lost;
    Some(())
}

fn parity_fragment(rules: &Rules, seal: &Seal, to: usize) -> Option<Fragment> {
    let folded: Option<Vec<_>> = seal.folded.iter().copied().collect();
    let (data, folded_seqs): (Vec<Content>, Vec<Seq>) = folded?.into_iter().unzip();
    let scope = seal.acting.scope();
    let bytes = rules.encode(&data)[to - rules.data()];
    Some(Fragment { folded_seqs, ..fragment(seal.version, scope.epoch, true, scope.lacking(), bytes) })
}
fn prepare(rules: &Rules, s: &mut State, n: usize, to: usize) -> bool {
    let seal = s.seals[n].clone();
    let Some(parity) = parity_fragment(rules, &seal, to) else { return false };
    let scope = seal.acting.scope();
    s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        match cells::admit(txn, cell(to), seal.version, &content(&parity), &parity.block_crcs)? {
            cells::Admission::Present => Ok(()),
            cells::Admission::Write => cells::prepare(txn, &scope, cell(to), &parity, delta),
        }
    })
}
fn commit(s: &mut State, n: usize, to: usize) -> bool {
    let (version, scope) = (s.seals[n].version, s.seals[n].acting.scope());
    let kind = std::cell::Cell::new(None);
    let made = s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, scope.epoch)?;
        cells::commit(txn, &scope, cell(to), version, delta).inspect_err(|e| kind.set(Some(e.kind)))
    });
    s.seals[n].committed |= made;
    // Dropped with its file, or overtaken: nothing is in doubt there.
    made || kind.get() == Some(weir_proto::ErrorKind::NotFound)
}
fn drop_prepared(s: &mut State, n: usize, to: usize) -> bool {
    let (version, epoch) = (s.seals[n].version, s.seals[n].acting.epoch());
    s.targets[to].change(|txn, delta| {
        cells::check_epoch(txn, GROUP, epoch)?;
        cells::drop_prepared(txn, cell(to), version, delta)
    });
    true
}

/// All members have answered: the next phase.
pub fn go_on(rules: &Rules, s: &mut State, n: usize) -> Option<()> {
    let seal = &s.seals[n];
    let all = addressed(rules, seal).iter().fold(0, |mask, p| mask | 1 << p);
    if seal.zombie || seal.refused || seal.done & all != all || !s.targets[seal.leader].up {
        return None;
    }
    let next = match seal.phase {
        Phase::Fold if rules.has(Shortcut::CommitBeforeParity) => Some(Phase::Commit),
        Phase::Fold => Some(Phase::Prepare),
        Phase::Prepare => Some(Phase::Commit),
        Phase::Commit => Some(Phase::CommitOwn),
        Phase::CommitOwn | Phase::Drop => None,
    };
    if next == Some(Phase::CommitOwn) && rules.has(Shortcut::CommitBeforeParity) {
        let parity: Vec<usize> = seal.acting.current().into_iter().filter(|p| *p >= rules.data()).collect();
        parity.into_iter().for_each(|p| {
            prepare(rules, s, n, p);
        });
    }
    match next {
        Some(phase) => (s.seals[n].phase, s.seals[n].done) = (phase, 0),
        None => drop(s.seals.remove(n)),
    }
    Some(())
}

/// A member refused, or does not answer: drop, or leave it to be settled.
pub fn fail(rules: &Rules, s: &mut State, n: usize) -> Option<()> {
    let seal = s.seals[n].clone();
    let open: Vec<usize> =
        addressed(rules, &seal).into_iter().filter(|p| seal.done & (1 << p) == 0).collect();
    let silent = |p: &usize| !answers(s, &seal.acting, *p) && seal.acting.is_current(*p);
    if seal.zombie || !s.targets[seal.leader].up || !(seal.refused || open.iter().any(silent)) {
        return None;
    }
    let late = open.iter().any(|p| s.targets[*p].up && s.targets[*p].view.epoch() <= seal.acting.epoch());
    if late && seal.phase != Phase::Drop {
        s.seals.push(Seal { zombie: true, refused: false, ..seal.clone() });
    }
    match seal.phase {
        Phase::Fold | Phase::Prepare => {
            let dropping = &mut s.seals[n];
            (dropping.phase, dropping.done, dropping.refused) = (Phase::Drop, 0, false);
        }
        // One commit decides.
        Phase::Commit if seal.committed => {
            let deciding = &mut s.seals[n];
            (deciding.phase, deciding.done, deciding.refused) = (Phase::CommitOwn, 0, false);
        }
        _ => drop(s.seals.remove(n)),
    }
    drop_ended(rules, s);
    Some(())
}

/// Zombies that nothing can come of any more.
fn drop_ended(rules: &Rules, s: &mut State) {
    let targets = &s.targets;
    s.seals.retain(|seal| {
        let open = addressed(rules, seal).into_iter().filter(|p| seal.done & (1 << p) == 0);
        let possible = |p: usize| targets[p].up && targets[p].view.epoch() <= seal.acting.epoch();
        !seal.zombie || (!seal.refused && open.filter(|p| seal.acting.is_current(*p)).any(possible))
    });
    while s.seals.iter().filter(|seal| seal.zombie).count() > ZOMBIES_MAX {
        let oldest = s.seals.iter().position(|seal| seal.zombie).expect("one more than the limit");
        s.seals.remove(oldest);
    }
}

/// A target settles a seal that was left in doubt on it.
pub fn settle(rules: &Rules, s: &mut State, at: usize) -> Option<()> {
    if !s.targets[at].up || led_by(s, at) {
        return None;
    }
    let acting = s.targets[at].view.clone();
    if acting.state(at) == MemberState::Down {
        return None;
    }
    let in_doubt = s.targets[at].prepared(at).into_iter().find(|p| p.seal)?;
    let current = acting.current();
    let reported: Vec<Option<CellStat>> = (0..rules.width())
        .map(|p| (current.contains(&p) && answers(s, &acting, p)).then(|| stat(s, &acting, p)))
        .collect();
    let went_on = |t: &CellStat| t.base == in_doubt.version && t.missing & (1 << at) != 0;
    if !rules.has(Shortcut::LatePartCounts) && reported.iter().flatten().any(went_on) {
        let epoch = acting.epoch();
        let dropped = s.targets[at].change(|txn, delta| {
            cells::check_epoch(txn, GROUP, epoch)?;
            cells::drop_prepared(txn, cell(at), in_doubt.version, delta)
        });
        return dropped.then_some(());
    }
    let leads = seal_leader(acting.group()) == Some(at);
    let settling = |phase| Seal {
        leader: at,
        acting: acting.clone(),
        version: in_doubt.version,
        base: Version(0),
        phase,
        done: 0,
        committed: false,
        refused: false,
        zombie: false,
        folded: vec![None; rules.data()],
    };
    let known = if rules.has(Shortcut::SilentIsGone) { 0 } else { acting.scope().current };
    match (resolve(in_doubt.version, in_doubt.missing, known, &reported, rules.data()), leads) {
        (InDoubt::Commit, true) => s.seals.push(settling(Phase::Commit)),
        (InDoubt::Commit, false) if reported.iter().flatten().any(|t| t.base == in_doubt.version) => {
            let scope = acting.scope();
            let made = s.targets[at].change(|txn, delta| {
                cells::check_epoch(txn, GROUP, scope.epoch)?;
                cells::commit(txn, &scope, cell(at), in_doubt.version, delta)
            });
            return made.then_some(());
        }
        (InDoubt::Drop, true) => s.seals.push(settling(Phase::Drop)),
        _ => return None,
    }
    Some(())
}

/// Every seal has ended, and left nothing in doubt.
pub fn at_rest(s: &State) -> bool {
    s.seals.is_empty() && (0..s.targets.len()).all(|p| s.targets[p].prepared(p).is_empty())
}
