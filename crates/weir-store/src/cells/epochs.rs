//! Epochs and fences of a target: which requests are refused because they come from a writer or a map that
//! has been replaced.
//!
//! Invariant: an epoch and a fence only rise, and each check is made inside the transaction that acts on
//! it.
use crate::entries::get;
use crate::format::*;
use weir_kv::{Read, Txn};
use weir_proto::{Epoch, Error, FileId, PgId, Result};

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
