//! The slots of sessions: each keeps the reply of its last change, so that a change that is sent again is not
//! made again.
use crate::ops::Operation;
use crate::record::{Record, SlotRecord, slot_value};
use crate::tables;
use weir_kv::{Read, Txn};
use weir_proto::meta::{Op, SLOTS};
use weir_proto::{Error, Result, Wire};

pub fn check(op: &Op) -> Result<()> {
    if op.slot < SLOTS && op.seq > 0 {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "slot {} seq {}: slots are 0 to {}, numbers start at 1",
        op.slot,
        op.seq,
        SLOTS - 1
    )))
}

/// Keeps the reply of a change, in place of that of the slot's former one.
pub fn keep_reply<R: Operation>(txn: &mut dyn Txn, op: &Op, reply: &R::Reply) {
    txn.put(&tables::SLOTS.key((op.session, op.slot)), &slot_value(op.seq, R::METHOD, reply));
}

/// The newest change of a slot.
pub fn newest(read: &dyn Read, op: &Op) -> Result<u64> {
    let value = read.get(&tables::SLOTS.key((op.session, op.slot)))?;
    Ok(value.map_or(0, |value| number_in(&value)))
}
fn number_in(value: &[u8]) -> u64 {
    value.get(1..9).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The reply of an earlier try of the same change.
pub fn earlier_reply<R: Operation>(txn: &mut dyn Txn, op: &Op) -> Result<Option<R::Reply>> {
    let Some(value) = txn.get(&tables::SLOTS.key((op.session, op.slot)))? else { return Ok(None) };
    if op.seq > number_in(&value) {
        return Ok(None);
    }
    let record = SlotRecord::from_value(&value, || format!("slot {} of session {}", op.slot, op.session))?;
    if op.seq < record.seq || record.method != R::METHOD {
        return Err(Error::stale(format!(
            "slot {} of session {} is at change {} (method {}): change {} (method {}) comes too late",
            op.slot,
            op.session,
            record.seq,
            record.method,
            op.seq,
            R::METHOD
        )));
    }
    R::Reply::from_bytes(&record.reply).map(Some)
}
