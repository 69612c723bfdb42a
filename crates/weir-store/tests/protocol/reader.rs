//! What readers get, and what they may get: the invariants of every state.
//!
//! A read takes the newest map. With any m or fewer members that are not current or do not answer, it returns
//! for each byte a result of some order of the writes, in which acknowledged writes are among the last.
use super::rules::*;
use super::state::*;
use std::collections::BTreeMap;
use weir_proto::{Seq, Version};
use weir_store::lookup;
use weir_store::rebuild::{holders_of, newest_whole};

/// A cell decoded from others.
pub struct Decoded {
    pub version: Version,
    pub content: Content,
    /// Overlays up to here are in it.
    pub folded_seq: Seq,
    /// Per data cell.
    pub folded_seqs: Vec<Seq>,
    pub missing: u64,
}

/// The cell at `wanted` from the members `from`, at the newest version that k of them hold. `None`: there is
/// none.
pub fn decode(rules: &Rules, s: &State, from: &[usize], wanted: usize) -> Option<Decoded> {
    decode_version(rules, s, from, wanted, None)
}

/// The cell at this version, which may be committed nowhere yet.
pub fn decode_version(
    rules: &Rules,
    s: &State,
    from: &[usize],
    wanted: usize,
    version: Option<Version>,
) -> Option<Decoded> {
    let scope = s.map.scope();
    let stat =
        |p: &usize| lookup::stat_of(&*s.targets[*p].index, &scope, cell(*p)).expect("the index is sound");
    let stats: BTreeMap<usize, _> = from.iter().filter(|p| **p != wanted).map(|p| (*p, stat(p))).collect();
    let (version, holders) = match version {
        Some(version) => (version, holders_of(&stats, version, rules.data())?),
        None => newest_whole(&stats, rules.data())?,
    };
    let held: Vec<_> = holders
        .into_iter()
        .map(|p| (p, s.targets[p].fragment(p, version).expect("its holders hold it")))
        .collect();
    let bytes: Vec<(usize, Content)> = held.iter().map(|(p, f)| (*p, content(f))).collect();
    let present: Vec<(usize, &[u8])> = bytes.iter().map(|(p, b)| (*p, &b[..])).collect();
    let mut out = [0; 2];
    rules.coder.reconstruct(&present, &[wanted], &mut [&mut out[..]]).ok()?;
    let of_parity = held.iter().find(|(p, _)| *p >= rules.data()).map(|(_, f)| f.folded_seqs.clone());
    let data_folded = |i: usize| held.iter().find(|(p, _)| *p == i).map_or(Seq(0), |(_, f)| f.folded_seq);
    let folded_seqs = match of_parity {
        Some(folded_seqs) => folded_seqs,
        None if wanted >= rules.data() => (0..rules.data()).map(data_folded).collect(),
        None => Vec::new(),
    };
    let missing = stats.values().fold(0, |mask, s| mask | s.missing);
    Some(Decoded {
        version,
        content: out,
        folded_seq: folded_seqs.get(wanted).copied().unwrap_or_default(),
        folded_seqs,
        missing,
    })
}

/// A reader's result for a data cell without the members in `lost`. Error: too little is left, by name.
fn read(rules: &Rules, s: &State, index: usize, lost: u64) -> Result<Content, String> {
    let left: Vec<usize> = s.map.current().into_iter().filter(|p| lost & (1 << p) == 0).collect();
    if left.contains(&index) {
        return Ok(s.targets[index].merged(index).0);
    }
    let Some(parity) = left.iter().copied().find(|p| *p >= rules.data()) else {
        return Err("no parity is left".into());
    };
    let (bytes, folded_seq) =
        decode(rules, s, &left, index).map_or(([0; 2], Seq(0)), |d| (d.content, d.folded_seq));
    Ok(s.targets[parity].apply_log(index, bytes, folded_seq).0)
}

/// The bytes that a reader may get at one place.
fn allowed(rules: &Rules, s: &State, index: usize, offset: usize) -> Vec<u8> {
    let here = |w: &usize| rules.planned[*w].cell == index && rules.planned[*w].offset == offset;
    let of_place: Vec<usize> = (0..s.writes.len()).filter(here).collect();
    let acknowledged: Vec<usize> =
        of_place.iter().copied().filter(|w| s.writes[*w].progress == Progress::Acknowledged).collect();
    let replaced = |w: usize| acknowledged.iter().any(|by| s.writes[*by].after & (1 << w) != 0);
    let begun = |w: usize| s.writes[w].progress != Progress::Waiting;
    let over = super::whole::replaces(s).filter(|_| rules.whole == Some(Mode::Over));
    let is_over = |w: usize| over.is_some_and(|before| before & (1 << w) != 0);
    let voided =
        |w: usize| (s.truncation == TruncationState::Ended && !s.writes[w].after_truncation) || is_over(w);
    let mut bytes: Vec<u8> = of_place
        .iter()
        .filter(|w| begun(**w) && !replaced(**w) && !voided(**w))
        .map(|w| rules.planned[*w].byte)
        .collect();
    // The initial bytes are replaced by any acknowledged write, and void after the truncation.
    let written_since = |w: &usize| !voided(*w);
    if s.truncation != TruncationState::Ended && !acknowledged.iter().any(|w| !is_over(*w)) {
        bytes.push(if over.is_some() { OVER[offset] } else { INITIAL[offset] });
    }
    if s.truncation == TruncationState::Ended && !acknowledged.iter().any(written_since) {
        bytes.push(0);
    }
    bytes
}

/// The fault of a state, if it has one.
pub fn problem(rules: &Rules, s: &State) -> Option<String> {
    if super::whole::is_own_only(rules, s) {
        return None;
    }
    if s.truncation == TruncationState::Begun {
        return None; // the size was changed before: no client reads bytes during their truncation
    }
    let width = rules.width();
    let answers = |p: usize| s.targets[p].up && s.map.is_current(p);
    let away = (0..width).filter(|p| !answers(*p)).fold(0u64, |mask, p| mask | 1 << p);
    for lost in 0..1u64 << width {
        if lost & away != away || lost.count_ones() > u32::from(rules.scheme.parity) {
            continue;
        }
        for index in 0..rules.data() {
            let bytes = match read(rules, s, index, lost) {
                Ok(bytes) => bytes,
                Err(e) => return Some(format!("cell {index} without members {lost:#b}: {e}")),
            };
            for (offset, byte) in bytes.into_iter().enumerate() {
                let allowed = allowed(rules, s, index, offset);
                if !allowed.contains(&byte) {
                    return Some(format!(
                        "cell {index} byte {offset} without members {lost:#b}: {byte} is read, allowed is {allowed:?}"
                    ));
                }
            }
        }
    }
    parity_differs(rules, s).or_else(|| super::whole::problem(rules, s))
}

/// Where all members hold one version, and nothing is in doubt, parity is that of the data.
fn parity_differs(rules: &Rules, s: &State) -> Option<String> {
    let all_current = s.map.current().len() == rules.width();
    if !all_current || !super::seals::at_rest(s) {
        return None;
    }
    let bases: Vec<_> = (0..rules.width()).map(|p| s.targets[p].base(p)).collect();
    let versions: Vec<Version> = bases.iter().map(|b| b.as_ref().map_or(Version(0), |b| b.version)).collect();
    if versions.iter().any(|v| *v != versions[0]) {
        return Some(format!("nothing is in doubt, and the members hold versions {versions:?}"));
    }
    let bytes: Vec<Content> = bases.iter().map(|b| b.as_ref().map_or([0; 2], content)).collect();
    let (data, parity) = bytes.split_at(rules.data());
    (rules.encode(data) != parity).then(|| format!("parity {parity:?} is not that of {data:?}"))
}
