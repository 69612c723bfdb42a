//! Fragments of a cell: writing, preparing, committing, dropping and installing versions.
//!
//! Invariants: a base changes only to a higher version (or by [`fresh`]); a prepared version is removed
//! only by its commit, its drop, or a higher base.
use super::epochs::check_fence;
use super::{Change, Delta, Scope, drop_bytes, header, overlays, prepared};
use crate::alloc::Extent;
use crate::entries::{get, void_below};
use crate::format::*;
use weir_kv::{Read, Txn};
use weir_proto::data::{CHECKSUM_BLOCK, FILL_COUNTER};
use weir_proto::{CellId, Epoch, Error, Result, Seq, Version};

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
    let uncommitted = prepared(txn, cell)?;
    if let Some(writers) = uncommitted.iter().find(|other| fragment.seal && !other.seal) {
        let version = writers.version;
        return Err(Error::unavailable(format!("cell {cell}: a writer has prepared {version}, seal later")));
    }
    let is_above = |other: &&Fragment| other.seal && other.version > fragment.version;
    if let Some(seal) = uncommitted.iter().filter(|_| !fragment.seal).find(is_above) {
        let (version, seal) = (fragment.version, seal.version);
        return Err(Error::exists(format!(
            "cell {cell}: version {version} is below the seal {seal} in progress"
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
