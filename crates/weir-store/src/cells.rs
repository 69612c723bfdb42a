//! Changes of the index by a write, commit or drop: functions of (transaction, request), no I/O, no waiting.
//!
//! Invariants kept here: a base changes only to a higher version (or by `Fresh`); a prepared version is
//! removed only by its commit, its drop, or a higher base; overlays are removed only when a base that
//! includes them is committed; sequence numbers of a cell have no gap (except on a member that is behind).
//! Every check is made inside the transaction that acts on it.
use crate::alloc::Extent;
use crate::entries::{collect, get, void_below};
use crate::format::*;
use std::collections::BTreeMap;
use weir_kv::{Read, Txn};
use weir_proto::data::{CHECKSUM_BLOCK, FILL_COUNTER, MissingMask, OverlayKind};
use weir_proto::map::{Group, MemberState, Scheme};
use weir_proto::{CellId, Epoch, Error, FileId, PgId, Result, Seq, Version};

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

pub fn check_fence(read: &dyn Read, file: FileId, token_epoch: u32) -> Result<()> {
    match get::<Fence>(read, &fence_key(file))? {
        Some(fence) if token_epoch < fence.token_epoch => Err(Error::stale(format!(
            "write to file {file} with token epoch {token_epoch}: fenced at {}, acquire the lease again",
            fence.token_epoch
        ))),
        _ => Ok(()),
    }
}

/// Raises the file's fence to another member's fence; a higher one stays.
pub fn take_fence(txn: &mut dyn Txn, file: FileId, token_epoch: u32) -> Result<()> {
    if get::<Fence>(txn, &fence_key(file))?.is_none_or(|fence| fence.token_epoch < token_epoch) {
        txn.put(&fence_key(file), &Fence { token_epoch }.to_value());
    }
    Ok(())
}

/// Refuses an epoch lower than the group's; returns the group's.
pub fn refuse_lower(read: &dyn Read, group: PgId, epoch: Epoch) -> Result<Epoch> {
    let known = known_epoch(read, group)?;
    if epoch < known { Err(lower_epoch(group, epoch, known)) } else { Ok(known) }
}
/// Like [`refuse_lower`], and remembers a higher epoch.
pub fn raise_epoch(txn: &mut dyn Txn, group: PgId, epoch: Epoch) -> Result<()> {
    if epoch > refuse_lower(txn, group, epoch)? {
        txn.put(&group_key(group), &GroupEpoch { epoch }.to_value());
    }
    Ok(())
}
/// Like [`raise_epoch`], and refuses the epoch in which the place moves to another target ([`close`]). Every
/// change of a group's cells begins with it.
pub fn check_epoch(txn: &mut dyn Txn, group: PgId, epoch: Epoch) -> Result<()> {
    raise_epoch(txn, group, epoch)?;
    refuse_closed(txn, group, epoch)
}
/// Refuses the epoch in which the place moves to another target, and earlier ones.
pub fn refuse_closed(read: &dyn Read, group: PgId, epoch: Epoch) -> Result<()> {
    if get::<GroupEpoch>(read, &closed_key(group))?.is_some_and(|closed| closed.epoch >= epoch) {
        return Err(Error::unavailable(format!(
            "request for {group} under {epoch}: this place goes to another target at this moment"
        )));
    }
    Ok(())
}
/// From now on the group's cells do not change here under this epoch: the place moves to another target.
pub fn close(txn: &mut dyn Txn, group: PgId, epoch: Epoch) -> Result<()> {
    raise_epoch(txn, group, epoch)?;
    if get::<GroupEpoch>(txn, &closed_key(group))? != Some(GroupEpoch { epoch }) {
        txn.put(&closed_key(group), &GroupEpoch { epoch }.to_value());
    }
    Ok(())
}
pub fn known_epoch(read: &dyn Read, group: PgId) -> Result<Epoch> {
    Ok(get::<GroupEpoch>(read, &group_key(group))?.map_or(Epoch(0), |g| g.epoch))
}
pub fn lower_epoch(group: PgId, epoch: Epoch, known: Epoch) -> Error {
    Error::stale(format!("request for {group} under {epoch}: the group is at {known}, fetch the cluster map"))
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

/// Why a version cannot be written, or that it is already here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    Write,
    Present,
}

/// Whether a fragment of `version` with these bytes may be written to `cell`.
pub fn admit(
    read: &dyn Read,
    cell: CellId,
    version: Version,
    bytes: &[u8],
    block_crcs: &[u32],
) -> Result<Admission> {
    check_fence(read, cell.file, version.token_epoch())?;
    if version == Version(0) {
        return Err(Error::invalid(format!("cell {cell}: version 0 means that nothing was written")));
    }
    let Some(base) = get::<Fragment>(read, &base_key(cell))? else { return Ok(Admission::Write) };
    if version == base.version && holds_bytes(&base, bytes, block_crcs) {
        return Ok(Admission::Present);
    }
    if version <= base.version {
        return Err(Error::stale(format!(
            "cell {cell}: version {version} is not above the present {}: choose a higher one",
            base.version
        )));
    }
    Ok(Admission::Write)
}
/// Whether a fragment has these bytes. A fragment that repair rebuilt is as long as the stripe's longest:
/// zeros follow.
fn holds_bytes(fragment: &Fragment, bytes: &[u8], block_crcs: &[u32]) -> bool {
    if fragment.block_crcs == block_crcs {
        return true;
    }
    let zeros = (fragment.fragment_bytes as usize).saturating_sub(bytes.len());
    if zeros == 0 {
        return false;
    }
    let padded: Vec<u8> = bytes.iter().copied().chain(std::iter::repeat_n(0, zeros)).collect();
    weir_proto::checksum::block_crcs(&padded, CHECKSUM_BLOCK as usize) == fragment.block_crcs
}

/// Whether recalled bytes may be written to `cell`: the data here has a lower token epoch, so it is void or
/// was written by a mover that has lost the recall.
pub fn admit_fill(
    read: &dyn Read,
    scope: &Scope,
    cell: CellId,
    version: Version,
    block_crcs: &[u32],
) -> Result<Admission> {
    let token_epoch = version.token_epoch();
    check_fence(read, cell.file, token_epoch)?;
    if version.counter() != FILL_COUNTER {
        return Err(Error::invalid(format!("cell {cell}: {version} is not the version of a recall")));
    }
    let base = get::<Fragment>(read, &base_key(cell))?;
    if base.as_ref().is_some_and(|b| b.version == version && b.block_crcs == block_crcs) {
        return Ok(Admission::Present);
    }
    let mut newest = base.map(|b| b.version.token_epoch());
    newest = newest.max(prepared(read, cell)?.iter().map(|p| p.version.token_epoch()).max());
    let logs = if scope.is_data(cell) { cell.index..cell.index + 1 } else { 0..scope.scheme.data };
    for index in logs {
        let logged = overlays(read, CellId { index, ..cell }, Seq(0), Seq(u64::MAX))?;
        newest = newest.max(logged.iter().map(|(_, o)| o.token_epoch).max());
    }
    match newest {
        Some(newest) if newest >= token_epoch => Err(Error::stale(format!(
            "cell {cell}: recalled as {version}, but something was written with token epoch {newest}"
        ))),
        _ => Ok(Admission::Write),
    }
}

/// A fragment beyond the committed end of its file becomes the base at once; any earlier data is dropped.
pub fn fresh(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    mut fragment: Fragment,
    delta: &mut Delta,
) -> Result<()> {
    let mut change = Change::open(txn, scope, cell)?;
    fragment.folded_seq = Seq(0);
    let old = get::<Fragment>(txn, &base_key(cell))?;
    for gone in prepared(txn, cell)? {
        txn.delete(&prepared_key(cell, gone.version));
        drop_bytes(delta, gone.extent, &[fragment.extent]);
    }
    if let Some(old) = old {
        drop_bytes(delta, old.extent, &[fragment.extent]);
    }
    change.now.missing = fragment.missing;
    if scope.is_data(cell) {
        restart(&mut change, txn, delta)?;
    } else {
        for index in 0..scope.scheme.data {
            let data_cell = CellId { index, ..cell };
            if header(txn, scope, data_cell)?.is_some() {
                let mut mirrored = Change::open(txn, scope, data_cell)?;
                restart(&mut mirrored, txn, delta)?;
                mirrored.save(txn, delta);
            }
        }
    }
    change.save(txn, delta);
    txn.put(&base_key(cell), &fragment.to_value());
    Ok(())
}
/// The overlay log restarts: all targets of the stripe get their fresh fragment, so all restart together.
fn restart(change: &mut Change, txn: &mut dyn Txn, delta: &mut Delta) -> Result<()> {
    change.drop_overlays(txn, delta, Seq(0), Seq(u64::MAX))?;
    change.now.folded_seq = Seq(0);
    change.now.last_seq = Seq(0);
    Ok(())
}

/// Adds a version beside the base, until it is committed or dropped. A seal folds the overlays and base that
/// it finds, so a writer's version that is committed meanwhile must be above the seal's: a writer that meets
/// a seal takes a higher version (`Exists`), and a seal that meets a writer's version is refused.
pub fn prepare(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    fragment: &Fragment,
    delta: &mut Delta,
) -> Result<()> {
    let change = Change::open(txn, scope, cell)?;
    // A data target may have no record of its cell: the seal's leader includes it because other members do.
    if fragment.seal && !scope.is_data(cell) && !stripe_known(txn, scope, cell)? {
        return Err(Error::stale(format!("seal of cell {cell}: it was dropped meanwhile")));
    }
    let beside = prepared(txn, cell)?;
    if let Some(writers) = beside.iter().find(|other| fragment.seal && !other.seal) {
        let version = writers.version;
        return Err(Error::unavailable(format!("cell {cell}: a writer has prepared {version}, seal later")));
    }
    let is_above = |other: &&Fragment| other.seal && other.version > fragment.version;
    if let Some(seal) = beside.iter().filter(|_| !fragment.seal).find(is_above) {
        let (version, seal) = (fragment.version, seal.version);
        return Err(Error::exists(format!(
            "cell {cell}: version {version} is below the seal {seal} under way"
        )));
    }
    let kept = [fragment.extent, base_extent(txn, cell)?];
    if let Some(earlier) = get::<Fragment>(txn, &prepared_key(cell, fragment.version))? {
        if earlier.seal != fragment.seal || earlier.block_crcs != fragment.block_crcs {
            return Err(Error::stale(format!(
                "cell {cell}: version {} is prepared here with other bytes, choose a higher one",
                fragment.version
            )));
        }
        drop_bytes(delta, earlier.extent, &kept);
    }
    txn.put(&prepared_key(cell, fragment.version), &fragment.to_value());
    change.save(txn, delta);
    Ok(())
}
fn base_extent(read: &dyn Read, cell: CellId) -> Result<Extent> {
    Ok(get::<Fragment>(read, &base_key(cell))?.map(|b| b.extent).unwrap_or_default())
}

/// Whether this target has a record of any cell of the stripe.
pub fn stripe_known(read: &dyn Read, scope: &Scope, cell: CellId) -> Result<bool> {
    let mirrored = if scope.is_data(cell) { 0 } else { scope.scheme.data };
    for index in (0..mirrored).chain([cell.index]) {
        if read.get(&header_key(CellId { index, ..cell }))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes a prepared version the base; drops the overlays that it includes.
pub fn commit(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    version: Version,
    delta: &mut Delta,
) -> Result<()> {
    let base = get::<Fragment>(txn, &base_key(cell))?;
    let Some(new) = get::<Fragment>(txn, &prepared_key(cell, version))? else {
        return match base {
            // A retry. It counts as a write under this epoch, so members that went down since learn of it.
            Some(base) if base.version == version => {
                Change::open(txn, scope, cell)?.save(txn, delta);
                Ok(())
            }
            Some(base) if base.version > version => {
                Err(Error::stale(format!("cell {cell}: version {version} was overtaken by {}", base.version)))
            }
            _ => Err(Error::not_found(format!("cell {cell}: version {version} was not prepared here"))),
        };
    };
    let mut change = Change::open(txn, scope, cell)?;
    let mut kept = vec![new.extent];
    kept.extend(prepared(txn, cell)?.iter().filter(|p| p.version > version).map(|p| p.extent));
    for overtaken in prepared(txn, cell)?.iter().filter(|p| p.version <= version) {
        txn.delete(&prepared_key(cell, overtaken.version));
        drop_bytes(delta, overtaken.extent, &kept);
    }
    if let Some(base) = base {
        drop_bytes(delta, base.extent, &kept);
    }
    change.now.missing = new.missing;
    if scope.is_data(cell) {
        change.advance(txn, delta, new.folded_seq, version)?;
    } else {
        for (data_cell, folded_seq) in folded_of_mirrored(txn, scope, cell, &new)? {
            let mut mirrored = Change::open(txn, scope, data_cell)?;
            mirrored.advance(txn, delta, folded_seq, version)?;
            mirrored.now.missing = new.missing;
            mirrored.save(txn, delta);
        }
    }
    change.save(txn, delta);
    txn.put(&base_key(cell), &new.to_value());
    Ok(())
}

/// The data cells whose overlays a parity target keeps or kept, each with the last sequence number that a
/// parity fragment includes.
fn folded_of_mirrored(
    read: &dyn Read,
    scope: &Scope,
    parity: CellId,
    fragment: &Fragment,
) -> Result<Vec<(CellId, Seq)>> {
    let mut found = Vec::new();
    for index in 0..scope.scheme.data {
        let cell = CellId { index, ..parity };
        let folded_seq = fragment.folded_seqs.get(usize::from(index)).copied().unwrap_or_default();
        if folded_seq > Seq(0) || header(read, scope, cell)?.is_some() {
            found.push((cell, folded_seq));
        }
    }
    Ok(found)
}

/// Stores a fragment decoded from other members beside the base: its version will be committed, and this
/// member lacks it. The fence is not checked: the write was admitted by the others. False: it is not needed
/// any more.
pub fn hold(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    fragment: &Fragment,
    delta: &mut Delta,
) -> Result<bool> {
    let base = get::<Fragment>(txn, &base_key(cell))?.map_or(Version(0), |b| b.version);
    if base >= fragment.version || fragment.version.token_epoch() < void_below(txn, cell)? {
        return Ok(false);
    }
    prepare(txn, scope, cell, fragment, delta)?;
    Ok(true)
}

/// Drops a version that a writer prepared here before `epoch` and did not request since: this member was away
/// in between.
pub fn drop_prepared_before(
    txn: &mut dyn Txn,
    cell: CellId,
    version: Version,
    epoch: Epoch,
    delta: &mut Delta,
) -> Result<()> {
    match get::<Fragment>(txn, &prepared_key(cell, version))? {
        Some(there) if there.epoch < epoch => drop_prepared(txn, cell, version, delta),
        _ => Ok(()),
    }
}

pub fn drop_prepared(txn: &mut dyn Txn, cell: CellId, version: Version, delta: &mut Delta) -> Result<()> {
    let Some(gone) = get::<Fragment>(txn, &prepared_key(cell, version))? else { return Ok(()) };
    let mut kept = vec![base_extent(txn, cell)?];
    kept.extend(prepared(txn, cell)?.iter().filter(|p| p.version != version).map(|p| p.extent));
    drop_bytes(delta, gone.extent, &kept);
    txn.delete(&prepared_key(cell, version));
    Ok(())
}

/// Logs an overlay of a data cell, here or as a mirror. `inline`: its data, unless in `overlay.extent` or
/// zeros.
pub fn append(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    numbering: Numbering,
    overlay: &Overlay,
    inline: &[u8],
    missing: u64,
    delta: &mut Delta,
) -> Result<Appended> {
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
pub(crate) fn same_write(a: &Overlay, b: &Overlay) -> bool {
    (a.offset, a.len, a.kind, a.crc) == (b.offset, b.len, b.kind, b.crc)
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
    let (base, beside) = (get::<Fragment>(txn, &base_key(cell))?, prepared(txn, cell)?);
    let logged = overlays(txn, cell, Seq(0), Seq(u64::MAX))?;
    let valid: Vec<Seq> =
        logged.iter().filter(|(_, o)| o.token_epoch >= token_epoch).map(|(s, _)| *s).collect();
    // A mirrored cell has no base here: its overlays were folded into the parity fragment, which records the
    // last folded sequence.
    let covering = covering(txn, &header, cell)?;
    if base.iter().chain(&beside).chain(&covering).all(is_void) && valid.is_empty() {
        return drop_cell(txn, cell, delta);
    }
    let mut change = Change { cell, current: 0, before: Some(header.clone()), now: header };
    let kept: Vec<Extent> = base.iter().chain(&beside).filter(|f| !is_void(f)).map(|f| f.extent).collect();
    for gone in beside.iter().filter(|f| is_void(f)) {
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

/// Installs a fragment rebuilt from other members, unless the one here is as new. `replace`: the same version
/// is here, but damaged.
pub fn install(
    txn: &mut dyn Txn,
    scope: &Scope,
    cell: CellId,
    fragment: &Fragment,
    replace: bool,
    delta: &mut Delta,
) -> Result<bool> {
    let base = get::<Fragment>(txn, &base_key(cell))?;
    let present = base.as_ref().map_or(Version(0), |b| b.version);
    if present > fragment.version || (present == fragment.version && !replace) {
        return Ok(false);
    }
    if fragment.version.token_epoch() < void_below(txn, cell)? {
        return Ok(false); // from a peer that has not received the truncation yet
    }
    let mut change = Change::open(txn, scope, cell)?;
    let mut kept = vec![fragment.extent];
    kept.extend(prepared(txn, cell)?.iter().filter(|p| p.version > fragment.version).map(|p| p.extent));
    for overtaken in prepared(txn, cell)?.iter().filter(|p| p.version <= fragment.version) {
        txn.delete(&prepared_key(cell, overtaken.version));
        drop_bytes(delta, overtaken.extent, &kept);
    }
    if let Some(base) = base {
        drop_bytes(delta, base.extent, &kept);
    }
    if scope.is_data(cell) {
        change.advance(txn, delta, fragment.folded_seq, fragment.version)?;
    } else {
        for (data_cell, folded_seq) in folded_of_mirrored(txn, scope, cell, fragment)? {
            let mut mirrored = Change::open(txn, scope, data_cell)?;
            mirrored.advance(txn, delta, folded_seq, fragment.version)?;
            mirrored.save(txn, delta);
        }
    }
    change.now.missing = fragment.missing;
    change.save(txn, delta);
    txn.put(&base_key(cell), &fragment.to_value());
    Ok(true)
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
