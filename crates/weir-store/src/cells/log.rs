//! The log of a cell: overlays that are appended here or mirrored, and logs that repair installs.
//!
//! Invariant: sequence numbers of a cell have no gap, except on a member that is behind.
use super::epochs::check_fence;
use super::{Change, Delta, Scope, overlays};
use crate::entries::{get, void_below};
use crate::format::*;
use std::collections::BTreeMap;
use weir_kv::{Read, Txn};
use weir_proto::data::OverlayKind;
use weir_proto::{CellId, Error, Result, Seq};

/// How an overlay gets its sequence number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Numbering {
    /// This target is the sequencer.
    Next,
    /// A mirror: the number must follow the last one.
    Mirror(Seq),
    /// A mirror that is behind: repair closes the gaps.
    Behind(Seq),
    /// A copy of the sequencer's entry under this number, so that all logs are the same.
    Again(Seq),
}

impl Numbering {
    /// Of the n-th overlay of several.
    pub fn after(self, n: usize) -> Numbering {
        let later = |seq: Seq| Seq(seq.0.saturating_add(n as u64));
        match self {
            Numbering::Next => Numbering::Next,
            Numbering::Mirror(seq) => Numbering::Mirror(later(seq)),
            Numbering::Behind(seq) => Numbering::Behind(later(seq)),
            Numbering::Again(seq) => Numbering::Again(later(seq)),
        }
    }
}

/// The outcome of an append.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Appended {
    At(Seq),
    /// A copy is already here, or the overlay is void.
    Duplicate(Seq),
    /// The write with this number failed on all keepers: it needs another number.
    Void(Seq),
    /// Numbers between `have` and this one have not arrived yet.
    Gap {
        have: Seq,
    },
}

impl Appended {
    /// The outcome of several with consecutive numbers: where it stopped, else the first one that is new,
    /// else that all are copies.
    pub fn of_all(outcomes: &[Appended]) -> Appended {
        let stopped = |o: &&Appended| matches!(o, Appended::Gap { .. } | Appended::Void(_));
        let new = |o: &&Appended| matches!(o, Appended::At(_));
        let found = outcomes.iter().find(stopped).or_else(|| outcomes.iter().find(new));
        *found.or(outcomes.first()).expect("several are at least one")
    }
}

/// An overlay to be logged, with what its record has besides.
#[derive(Clone, Copy)]
pub struct NewOverlay<'a> {
    pub overlay: &'a Overlay,
    /// Its data, unless in `overlay.extent` or zeros.
    pub inline: &'a [u8],
    /// Members that do not log it.
    pub missing: u64,
}

/// Logs an overlay of a data cell, here or as a mirror.
pub fn append(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    numbering: Numbering,
    new: NewOverlay<'_>,
    delta: &mut Delta,
) -> Result<Appended> {
    let NewOverlay { overlay, inline, missing } = new;
    match numbering {
        // It passed the fence when it was first logged; data that a truncation has made void since stays
        // void.
        Numbering::Again(seq) if overlay.token_epoch < void_below(txn, cell)? => {
            return Ok(Appended::Duplicate(seq));
        }
        Numbering::Again(_) => {}
        // All keepers may have agreed on it meanwhile, and clients may have read it: a later fence does not
        // revoke it.
        Numbering::Mirror(seq)
            if holds(txn, cell, seq, overlay)? && overlay.token_epoch >= void_below(txn, cell)? =>
        {
            return Ok(Appended::Duplicate(seq));
        }
        _ => check_fence(txn, cell.file, overlay.token_epoch)?,
    }
    let mut change = Change::open(txn, scope, cell)?;
    let last = change.now.last_seq;
    let seq = match numbering {
        Numbering::Next => Seq(last.0 + 1),
        Numbering::Mirror(seq) | Numbering::Again(seq) if seq.0 > last.0 + 1 => {
            return Ok(Appended::Gap { have: last });
        }
        Numbering::Mirror(seq) | Numbering::Behind(seq) | Numbering::Again(seq) => seq,
    };
    if seq == Seq(0) {
        return Err(Error::invalid(format!("overlay of cell {cell}: sequence numbers start at 1")));
    }
    if let Some(there) = get::<Overlay>(txn, &overlay_key(cell, seq))? {
        if same_write(&there, overlay) {
            return Ok(Appended::Duplicate(seq));
        }
        // A void number stays void: the write may arrive once more, late.
        if there.kind == OverlayKind::Void {
            return Ok(Appended::Void(seq));
        }
        // Assigned twice: before the acknowledgement its sequencer lost its log's tail in a crash, or was
        // replaced. Overlays under higher numbers may be stale too, or newer (mirrors arrive in any order):
        // each stays until its number is written again or becomes void by agreement.
        change.drop_overlays(txn, delta, seq, seq)?;
    } else if seq <= change.now.folded_seq {
        return Ok(Appended::Duplicate(seq));
    }
    txn.put(&overlay_key(cell, seq), &overlay.to_value());
    if !inline.is_empty() {
        txn.put(&overlay_data_key(cell, seq), inline);
    }
    change.now.last_seq = change.now.last_seq.max(seq);
    change.now.missing |= missing;
    change.now.overlay_count += 1;
    change.now.overlay_bytes += u64::from(overlay.len);
    change.now.log_sum = change.now.log_sum.wrapping_add(overlay.sum(seq));
    delta.overlay_count += 1;
    delta.overlay_bytes += i64::from(overlay.len);
    change.save(txn, delta);
    Ok(Appended::At(seq))
}
/// Whether the log here still has this overlay under its number. A target that was away meanwhile has the
/// other members' log: overlays that it numbered and they did not accept are gone, and their numbers are
/// reused.
pub fn holds(read: &dyn Read, cell: CellId, seq: Seq, overlay: &Overlay) -> Result<bool> {
    Ok(get::<Overlay>(read, &overlay_key(cell, seq))?.is_some_and(|there| same_write(&there, overlay)))
}

pub(crate) fn same_write(a: &Overlay, b: &Overlay) -> bool {
    (a.offset, a.len, a.kind, a.crc) == (b.offset, b.len, b.kind, b.crc)
}

/// Makes the log of `cell` up to `upto` hold exactly `copies` above its folded sequence (a copy fetched from
/// another holder). `stale`: overlays beyond `upto` that must be dropped.
pub fn install_overlays(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    upto: Seq,
    copies: &BTreeMap<Seq, (Overlay, Vec<u8>)>,
    stale: &BTreeMap<Seq, Overlay>,
    delta: &mut Delta,
) -> Result<Vec<Seq>> {
    let mut change = Change::open(txn, scope, cell)?;
    let beyond: BTreeMap<Seq, Overlay> =
        overlays(txn, cell, Seq(upto.0.saturating_add(1)), Seq(u64::MAX))?.into_iter().collect();
    let is_stale = |(seq, there): &(&Seq, &Overlay)| stale.get(seq).is_some_and(|s| same_write(s, there));
    let (gone, kept): (Vec<_>, Vec<_>) = beyond.iter().partition(is_stale);
    for (seq, _) in &gone {
        change.drop_overlays(txn, delta, **seq, **seq)?;
    }
    if !gone.is_empty() {
        change.now.last_seq = kept.last().map_or(upto, |(seq, _)| **seq).max(change.now.folded_seq);
    }
    let mut used = Vec::new();
    let void_below = void_below(txn, cell)?;
    let present: BTreeMap<Seq, Overlay> = overlays(txn, cell, Seq(0), upto)?.into_iter().collect();
    for (seq, there) in &present {
        if !copies.get(seq).is_some_and(|(copy, _)| same_write(copy, there)) {
            change.drop_overlays(txn, delta, *seq, *seq)?;
        }
    }
    for (seq, (copy, inline)) in copies.range(..=upto) {
        let there = present.get(seq).is_some_and(|there| same_write(copy, there));
        if there || *seq <= change.now.folded_seq || copy.token_epoch < void_below {
            continue;
        }
        txn.put(&overlay_key(cell, *seq), &copy.to_value());
        if !inline.is_empty() {
            txn.put(&overlay_data_key(cell, *seq), inline);
        }
        change.now.overlay_count += 1;
        change.now.overlay_bytes += u64::from(copy.len);
        change.now.log_sum = change.now.log_sum.wrapping_add(copy.sum(*seq));
        delta.overlay_count += 1;
        delta.overlay_bytes += i64::from(copy.len);
        used.push(*seq);
    }
    change.now.last_seq = change.now.last_seq.max(upto);
    if change.before.is_some() || upto > Seq(0) {
        change.save(txn, delta);
    }
    Ok(used)
}
