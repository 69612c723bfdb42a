//! Changes of the index by a write, commit or drop: functions of (transaction, request), no I/O, no waiting.
//!
//! Invariants kept here: a base changes only to a higher version (or by `Fresh`); a prepared version is
//! removed only by its commit, its drop, or a higher base; overlays are removed only when a base that
//! includes them is committed; sequence numbers of a cell have no gap (except on a member that is behind).
//! Every check is made inside the transaction that acts on it.
use crate::alloc::Extent;
use crate::entries::{collect, get};
use crate::format::*;
use weir_kv::{Read, Txn};
use weir_proto::data::MissingMask;
use weir_proto::map::{Group, MemberState, Scheme};
use weir_proto::{CellId, Epoch, Error, PgId, Result, Seq, Version};

mod epochs;
mod fragments;
mod log;

pub use epochs::{
    check_epoch, check_fence, close, known_epoch, lower_epoch, raise_epoch, refuse_closed, refuse_lower,
    take_fence,
};
pub use fragments::{
    Admission, admit, admit_fill, commit, drop_prepared, drop_prepared_before, fresh, hold, install, prepare,
    stripe_known,
};
pub(crate) use log::same_write;
pub use log::{Appended, NewOverlay, Numbering, append, holds, install_overlays};

/// Under which group, epoch and scheme a request acts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scope {
    pub group: PgId,
    pub epoch: Epoch,
    pub scheme: Scheme,
    /// Bit i: member i is current in that epoch, so its fragments are not missing.
    pub current: MissingMask,
    /// Cells on this target from before this epoch are void: the target had lost its data ([`forget_lost`]).
    pub lost_at: Epoch,
}

impl Scope {
    pub fn of(group: &Group) -> Scope {
        let current = group.members.iter().enumerate().filter(|(_, m)| m.state == MemberState::Current);
        let current = current.fold(0, |mask, (i, _)| mask | (1 << i));
        Scope { group: group.id, epoch: group.epoch, scheme: group.scheme, current, lost_at: Epoch(0) }
    }
    /// The scope of a request to the member at `position`.
    pub fn at(group: &Group, position: usize) -> Scope {
        let lost_at = group.members.get(position).map_or(Epoch(0), |m| m.lost_at);
        Scope { lost_at, ..Scope::of(group) }
    }
    /// The members that are not current.
    pub fn lacking(&self) -> MissingMask {
        !self.current & ((1 << self.scheme.width()) - 1)
    }
    pub fn is_data(&self, cell: CellId) -> bool {
        cell.index < self.scheme.data
    }
    pub fn check_index(&self, cell: CellId) -> Result<()> {
        if usize::from(cell.index) < self.scheme.width() {
            return Ok(());
        }
        Err(Error::invalid(format!("cell {cell}: {} has no fragment {}", self.scheme, cell.index)))
    }
}

/// Effects of a transaction beyond the index: counters, and extents that no entry names any more.
#[derive(Default, Debug)]
pub struct Delta {
    pub cells: i64,
    pub under_replicated_cells: i64,
    pub overlay_count: i64,
    pub overlay_bytes: i64,
    pub dropped: Vec<Extent>,
}

/// The header of a cell, checked against the group that the request names.
fn header(read: &dyn Read, scope: &Scope, cell: CellId) -> Result<Option<Header>> {
    let found: Option<Header> = get(read, &header_key(cell))?;
    match &found {
        Some(h) if h.group != scope.group => {
            Err(Error::invalid(format!("cell {cell} is in {}, not in {}", h.group, scope.group)))
        }
        _ => Ok(found),
    }
}

/// A header under change: written back with what differs.
struct Change {
    cell: CellId,
    current: MissingMask,
    before: Option<Header>,
    now: Header,
}
impl Change {
    fn open(txn: &dyn Txn, scope: &Scope, cell: CellId) -> Result<Change> {
        let before = header(txn, scope, cell)?;
        let mut now = before.clone().unwrap_or_else(|| Header::new(scope.group, scope.scheme, scope.epoch));
        now.epoch = now.epoch.max(scope.epoch);
        Ok(Change { cell, current: scope.current, before, now })
    }
    /// Writes the header. A member that is current holds every fragment: its missing bit is cleared.
    fn save(mut self, txn: &mut dyn Txn, delta: &mut Delta) {
        self.now.missing &= !self.current;
        delta.under_replicated_cells += i64::from(self.now.missing != 0)
            - i64::from(self.before.as_ref().is_some_and(|h| h.missing != 0));
        if self.before.is_none() {
            delta.cells += 1;
            txn.put(&listed_key(self.now.group, self.cell), &[]);
        }
        if self.before.as_ref() != Some(&self.now) {
            debug_assert!(self.now.folded_seq <= self.now.last_seq, "cell {}: {:?}", self.cell, self.now);
            txn.put(&header_key(self.cell), &self.now.to_value());
        }
    }
    /// Drops the logged overlays with numbers in `from..=to`.
    fn drop_overlays(&mut self, txn: &mut dyn Txn, delta: &mut Delta, from: Seq, to: Seq) -> Result<()> {
        for (seq, overlay) in overlays(txn, self.cell, from, to)? {
            txn.delete(&overlay_key(self.cell, seq));
            if overlay.extent.len > 0 {
                delta.dropped.push(overlay.extent);
            } else {
                txn.delete(&overlay_data_key(self.cell, seq));
            }
            self.now.overlay_count = self.now.overlay_count.saturating_sub(1);
            self.now.overlay_bytes = self.now.overlay_bytes.saturating_sub(u64::from(overlay.len));
            self.now.log_sum = self.now.log_sum.wrapping_sub(overlay.sum(seq));
            delta.overlay_count -= 1;
            delta.overlay_bytes -= i64::from(overlay.len);
        }
        Ok(())
    }
    /// A base of `version` with overlays up to `folded_seq` is committed. Numbers of a stripe only rise, but
    /// restart when it is written fresh or recalled. A folded sequence below the known one means that this
    /// target missed a restart: it drops its older overlays, as the other members did.
    fn advance(
        &mut self,
        txn: &mut dyn Txn,
        delta: &mut Delta,
        folded_seq: Seq,
        version: Version,
    ) -> Result<()> {
        if folded_seq < self.now.folded_seq {
            let logged = overlays(txn, self.cell, Seq(0), Seq(u64::MAX))?;
            let is_new = |overlay: &Overlay| overlay.token_epoch >= version.token_epoch();
            for (seq, _) in logged.iter().filter(|(_, overlay)| !is_new(overlay)) {
                self.drop_overlays(txn, delta, *seq, *seq)?;
            }
            let newest = logged.iter().filter(|(_, overlay)| is_new(overlay)).map(|(seq, _)| *seq).max();
            (self.now.folded_seq, self.now.last_seq) = (Seq(0), newest.unwrap_or_default());
        }
        self.drop_overlays(txn, delta, Seq(0), folded_seq)?;
        self.now.folded_seq = self.now.folded_seq.max(folded_seq);
        self.now.last_seq = self.now.last_seq.max(folded_seq);
        Ok(())
    }
}

/// The overlays with numbers in `from..=to`, in order.
pub fn overlays(read: &dyn Read, cell: CellId, from: Seq, to: Seq) -> Result<Vec<(Seq, Overlay)>> {
    let (start, end) = numbered_range(OVERLAY, cell, from.0, to.0);
    collect(read, &start, &end, |key, value| Ok((Seq(number_of_key(key)?), Overlay::from_value(value)?)))
}
/// The prepared versions of a cell, lowest first.
pub fn prepared(read: &dyn Read, cell: CellId) -> Result<Vec<Fragment>> {
    let (start, end) = numbered_range(PREPARED, cell, 0, u64::MAX);
    collect(read, &start, &end, |_, value| Fragment::from_value(value))
}

/// Drops a fragment's bytes unless `kept` are the same (a seal without overlays shares the bytes of its
/// base).
fn drop_bytes(delta: &mut Delta, gone: Extent, kept: &[Extent]) {
    if !kept.contains(&gone) && !delta.dropped.contains(&gone) {
        delta.dropped.push(gone);
    }
}

/// Prepared versions of the group's stripes, of seals or of writers, that are neither committed nor dropped.
pub fn in_doubt(read: &dyn Read, group: PgId, seals: bool) -> Result<Vec<(CellId, Version)>> {
    let (start, end) = letter_range(PREPARED);
    let prepared = collect(read, &start, &end, |k, v| Ok((cell_of_key(k)?, Fragment::from_value(v)?)))?;
    let mut found = Vec::new();
    for (cell, fragment) in prepared.into_iter().filter(|(_, f)| f.seal == seals) {
        if get::<Header>(read, &header_key(cell))?.is_some_and(|h| h.group == group) {
            found.push((cell, fragment.version));
        }
    }
    Ok(found)
}

/// Adds to the mask of missing fragments of a version (0: of any version). Bits are cleared only when members
/// return. False: the version is not here, and no newer base has replaced it.
pub fn mark_missing(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    version: Version,
    missing: u64,
    delta: &mut Delta,
) -> Result<bool> {
    if header(txn, scope, cell)?.is_none() {
        return Ok(false);
    }
    let prepared = get::<Fragment>(txn, &prepared_key(cell, version))?;
    let base = get::<Fragment>(txn, &base_key(cell))?.map_or(Version(0), |b| b.version);
    let is_of_base = version == Version(0) || version == base;
    if prepared.is_none() && !is_of_base {
        return Ok(version < base);
    }
    // This counts as a write under this epoch: otherwise repair would list the cell as one that was written
    // while this member was away.
    let mut change = Change::open(txn, scope, cell)?;
    if is_of_base {
        change.now.missing |= missing;
    }
    change.save(txn, delta);
    if let Some(mut prepared) = prepared {
        prepared.missing |= missing;
        prepared.epoch = prepared.epoch.max(scope.epoch);
        txn.put(&prepared_key(cell, version), &prepared.to_value());
    }
    Ok(true)
}

/// Clears a cell's missing bits of members that are current in the scope's epoch.
pub fn settle_under_replicated(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    delta: &mut Delta,
) -> Result<()> {
    let Some(now) = header(txn, scope, cell)?.filter(|h| h.missing & scope.current != 0) else {
        return Ok(());
    };
    // Not a write: the epoch of the last write stays, or repair would list the cell without need.
    Change { cell, current: scope.current, before: Some(now.clone()), now }.save(txn, delta);
    Ok(())
}

/// Drops this target's cells of a stripe that are from before it lost its data. They belong to an older copy
/// and must be dropped before anything is added, since every addition gives the cell the present epoch.
pub fn forget_lost(txn: &mut dyn Txn, scope: &Scope, cell: CellId, delta: &mut Delta) -> Result<()> {
    for index in 0..scope.scheme.width() as u8 {
        let cell = CellId { index, ..cell };
        if get::<Header>(txn, &header_key(cell))?.is_some_and(|h| h.epoch < scope.lost_at) {
            drop_cell(txn, cell, delta)?;
        }
    }
    Ok(())
}

/// Drops all entries of one cell that is listed here.
pub fn drop_cell(txn: &mut dyn Txn, cell: CellId, delta: &mut Delta) -> Result<()> {
    let Some(header) = get::<Header>(txn, &header_key(cell))? else { return Ok(()) };
    let mut change = Change { cell, current: 0, before: Some(header.clone()), now: header };
    change.drop_overlays(txn, delta, Seq(0), Seq(u64::MAX))?;
    for gone in prepared(txn, cell)? {
        txn.delete(&prepared_key(cell, gone.version));
        drop_bytes(delta, gone.extent, &[]);
    }
    if let Some(base) = get::<Fragment>(txn, &base_key(cell))? {
        txn.delete(&base_key(cell));
        drop_bytes(delta, base.extent, &[]);
    }
    txn.delete(&header_key(cell));
    txn.delete(&listed_key(change.now.group, cell));
    delta.cells -= 1;
    delta.under_replicated_cells -= i64::from(change.now.missing != 0);
    Ok(())
}

/// Drops the data of a cell with a token epoch below `token_epoch`: its file was truncated after that write.
pub fn drop_void(txn: &mut dyn Txn, cell: CellId, token_epoch: u32, delta: &mut Delta) -> Result<()> {
    let Some(header) = get::<Header>(txn, &header_key(cell))? else { return Ok(()) };
    let is_void = |f: &Fragment| f.version.token_epoch() < token_epoch;
    let (base, uncommitted) = (get::<Fragment>(txn, &base_key(cell))?, prepared(txn, cell)?);
    let logged = overlays(txn, cell, Seq(0), Seq(u64::MAX))?;
    let valid: Vec<Seq> =
        logged.iter().filter(|(_, o)| o.token_epoch >= token_epoch).map(|(s, _)| *s).collect();
    // A mirrored cell has no base here: its overlays were folded into the parity fragment, which records the
    // last folded sequence.
    let covering = covering(txn, &header, cell)?;
    if base.iter().chain(&uncommitted).chain(&covering).all(is_void) && valid.is_empty() {
        return drop_cell(txn, cell, delta);
    }
    let mut change = Change { cell, current: 0, before: Some(header.clone()), now: header };
    let kept: Vec<Extent> =
        base.iter().chain(&uncommitted).filter(|f| !is_void(f)).map(|f| f.extent).collect();
    for gone in uncommitted.iter().filter(|f| is_void(f)) {
        txn.delete(&prepared_key(cell, gone.version));
        drop_bytes(delta, gone.extent, &kept);
    }
    for (seq, _) in logged.iter().filter(|(_, o)| o.token_epoch < token_epoch) {
        change.drop_overlays(txn, delta, *seq, *seq)?;
    }
    let is_void_below = base.as_ref().or(covering.as_ref()).is_some_and(is_void);
    if is_void_below {
        change.now.folded_seq = Seq(0);
    }
    if is_void_below || valid.len() < logged.len() {
        // Sequence numbers restarted after the truncation: members that received it at once had no overlay
        // left to continue from.
        change.now.last_seq = valid.last().copied().unwrap_or_default().max(change.now.folded_seq);
    }
    if let Some(base) = base.filter(is_void) {
        txn.delete(&base_key(cell));
        drop_bytes(delta, base.extent, &kept);
    }
    change.save(txn, delta);
    Ok(())
}
/// The parity fragment here that includes a mirrored cell's folded overlays.
fn covering(read: &dyn Read, header: &Header, cell: CellId) -> Result<Option<Fragment>> {
    let parity = usize::from(header.scheme.data)..header.scheme.width();
    for index in parity.filter(|_| cell.index < header.scheme.data) {
        if let Some(base) = get(read, &base_key(CellId { index: index as u8, ..cell }))? {
            return Ok(Some(base));
        }
    }
    Ok(None)
}
