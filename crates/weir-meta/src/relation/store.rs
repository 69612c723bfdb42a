//! Records of relations: reading and changing them inside transactions.
use super::record::{ReceiptRecord, RelationRecord, RelocationRecord};
use crate::namespace::evicted;
use crate::table::Present;
use crate::tables;
use std::collections::BTreeMap;
use weir_kv::{Read, Txn};
use weir_proto::relation::{RECEIPT_BLOCK, RelationId};
use weir_proto::{Error, InodeId, Result};
use weir_relation::dirty::{self, Apart, DirtyRange, FINISH, Ranges};

/// Finds a relation, unless it is being removed.
pub fn find_relation(read: &dyn Read, relation: RelationId) -> Result<Option<RelationRecord>> {
    Ok(find_any(read, relation)?.filter(|record| !record.removing))
}
/// Finds a relation, even if it is being removed.
pub fn find_any(read: &dyn Read, relation: RelationId) -> Result<Option<RelationRecord>> {
    tables::RELATIONS.get(read, relation)
}
pub fn load_relation(read: &dyn Read, relation: RelationId) -> Result<RelationRecord> {
    find_relation(read, relation)?
        .ok_or_else(|| Error::not_found(format!("relation {relation} does not exist (any more)")))
}
pub fn relations(read: &dyn Read) -> Result<Vec<(RelationId, RelationRecord)>> {
    let mut all = all_relations(read)?;
    all.retain(|(_, record)| !record.removing);
    Ok(all)
}
/// All relations, including those that are being removed.
pub fn all_relations(read: &dyn Read) -> Result<Vec<(RelationId, RelationRecord)>> {
    tables::RELATIONS.all().collect(read, usize::MAX, |id, record| (id, record))
}

/// The dirty ranges of a file, without the mark that it is complete.
pub fn dirty_of(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<Ranges> {
    let ranges = tables::DIRTY.between((relation, ino, 0), (relation, ino, FINISH));
    ranges.collect(read, usize::MAX, |(.., offset), range| (offset, range))
}
pub fn dirty_finish(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<Option<DirtyRange>> {
    tables::DIRTY.get(read, (relation, ino, FINISH))
}

pub fn add_dirty(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    offset: u64,
    new: DirtyRange,
    apart: &Apart<'_>,
) -> Result<()> {
    change_dirty(txn, relation, ino, |ranges| dirty::add(ranges, offset, new, apart))
}
pub fn change_dirty(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    change: impl FnOnce(&mut Ranges),
) -> Result<()> {
    let before = dirty_of(txn, relation, ino)?;
    let mut after = before.clone();
    change(&mut after);
    let [before, after] = [before, after].map(BTreeMap::from_iter);
    for at in before.keys().filter(|at| !after.contains_key(at)) {
        tables::DIRTY.delete(txn, (relation, ino, *at));
    }
    for (at, range) in after.iter().filter(|(at, range)| before.get(at) != Some(range)) {
        tables::DIRTY.put(txn, (relation, ino, *at), range);
    }
    Ok(())
}
/// A file may be being written; returns whether that is new.
pub fn note_growing(txn: &mut dyn Txn, relation: RelationId, ino: InodeId) -> Result<bool> {
    let is_new = !tables::GROWING.has(txn, (relation, ino))?;
    if is_new {
        tables::GROWING.put(txn, (relation, ino), &Present);
    }
    Ok(is_new)
}
pub fn is_growing(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<bool> {
    tables::GROWING.has(read, (relation, ino))
}
/// Its last writer has closed it, or it is deleted.
pub fn note_complete(txn: &mut dyn Txn, relation: RelationId, ino: InodeId) -> Result<()> {
    if tables::GROWING.has(txn, (relation, ino))? {
        tables::GROWING.delete(txn, (relation, ino));
    }
    Ok(())
}
/// Whether parts of a file are at home that are not visible there yet.
pub fn is_unfinished(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<bool> {
    tables::UNFINISHED.has(read, (relation, ino))
}
/// The first such files.
pub fn unfinished(read: &dyn Read, relation: RelationId, limit: usize) -> Result<Vec<InodeId>> {
    tables::UNFINISHED.under(relation).collect(read, limit, |(_, ino), _| ino)
}
pub fn note_finished(txn: &mut dyn Txn, relation: RelationId, ino: InodeId) -> Result<()> {
    if tables::UNFINISHED.has(txn, (relation, ino))? {
        tables::UNFINISHED.delete(txn, (relation, ino));
    }
    Ok(())
}
/// Files with a relocation.
pub fn relocating(read: &dyn Read, relation: RelationId) -> Result<Vec<(InodeId, RelocationRecord)>> {
    tables::RELOCATIONS.under(relation).collect(read, usize::MAX, |(_, ino), record| (ino, record))
}
pub fn relocations(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<bool> {
    tables::RELOCATIONS.has(read, (relation, ino))
}
/// Drops the dirty ranges of a removed file.
pub fn drop_dirty(txn: &mut dyn Txn, relation: RelationId, ino: InodeId) -> Result<()> {
    note_complete(txn, relation, ino)?;
    tables::DIRTY.under((relation, ino)).delete_all(txn)
}

/// Calls a macro for each table of a relation's records, except that of its own one.
macro_rules! for_each_table {
    (|$table:ident| $body:expr) => {
        for_each_table!(
            $table, $body, UNSEEN NAME_CHANGES DIRTY REMOTE REMOTE_NAMES RECEIPTS CONFLICTS OLD_ATTRIBUTES GROWING
                UNFINISHED RELOCATIONS IDENTITIES MIRRORED
        )
    };
    ($table:ident, $body:expr, $($name:ident)*) => {
        $({
            let $table = &tables::$name;
            $body
        })*
    };
}

/// Records of a removed relation that one transaction removes.
const REMOVE_MAX: usize = 2048;

/// Removes some records of a relation, its own one last; returns whether there is more.
pub fn remove_some(txn: &mut dyn Txn, relation: RelationId) -> Result<bool> {
    let mut left = REMOVE_MAX;
    for_each_table!(|table| left -= table.under(relation).delete_some(txn, left)?);
    if left == 0 {
        return Ok(true);
    }
    tables::RULES.delete(txn, relation);
    tables::RELATIONS.delete(txn, relation);
    Ok(false)
}

/// The number of records of a relation.
pub fn count(read: &dyn Read, relation: RelationId) -> Result<usize> {
    let mut count = usize::from(find_any(read, relation)?.is_some());
    count += usize::from(tables::RULES.has(read, relation)?);
    for_each_table!(|table| count += table.under(relation).count(read)?);
    Ok(count)
}

/// The bytes of a file that are at home only: (from, to). A read of them from targets returns zeros.
pub fn evicted_of(read: &dyn Read, ino: InodeId) -> Result<Vec<(u64, u64)>> {
    Ok(evicted::ranges(read, ino, 0, usize::MAX)?.iter().map(|found| (found.from, found.range.to)).collect())
}

/// The parts of `0..end` that are in none of these ranges, which are in order.
pub fn outside(ranges: &[(u64, u64)], end: u64) -> Vec<(u64, u64)> {
    let (mut at, mut gaps) = (0, Vec::new());
    for (from, to) in ranges.iter().copied().chain([(end, end)]) {
        if at < from.min(end) {
            gaps.push((at, from.min(end)));
        }
        at = at.max(to);
    }
    gaps
}

// ---- receipts

pub fn receipts_of(read: &dyn Read, relation: RelationId, ino: InodeId) -> Result<Vec<(u64, ReceiptRecord)>> {
    tables::RECEIPTS
        .under((relation, ino))
        .collect(read, usize::MAX, |(.., offset), receipt| (offset, receipt))
}

/// The most receipts shorter than a block that a file may have, besides one for each block of its length.
const SHORT_RECEIPTS_MAX: u64 = 512;

/// Adds a receipt; earlier ones no longer cover these bytes. If a file arrives in very many ranges, the
/// receipts of the short ones are dropped: when it is complete, these bytes are shipped once more, together.
pub fn add_receipt(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    offset: u64,
    receipt: ReceiptRecord,
) -> Result<()> {
    let mut short = remove_receipts(txn, relation, ino, offset, offset + receipt.len)?;
    if receipt.len < RECEIPT_BLOCK {
        short.count += 1;
        if short.count > SHORT_RECEIPTS_MAX + short.file_end / RECEIPT_BLOCK {
            let all = receipts_of(txn, relation, ino)?.into_iter();
            all.filter(|(_, r)| r.len < RECEIPT_BLOCK)
                .for_each(|(at, _)| tables::RECEIPTS.delete(txn, (relation, ino, at)));
            return Ok(());
        }
    }
    tables::RECEIPTS.put(txn, (relation, ino, offset), &receipt);
    Ok(())
}

/// The receipts of a file that are shorter than a block, and the end of the last of all.
#[derive(Default)]
pub struct ShortReceipts {
    count: u64,
    file_end: u64,
}

/// Drops receipts of bytes that were written again, or are void.
pub fn remove_receipts(
    txn: &mut dyn Txn,
    relation: RelationId,
    ino: InodeId,
    start: u64,
    end: u64,
) -> Result<ShortReceipts> {
    let mut short = ShortReceipts::default();
    for (at, receipt) in receipts_of(txn, relation, ino)? {
        let receipt_end = at + receipt.len;
        short.file_end = receipt_end;
        if receipt_end <= start || at >= end {
            short.count += u64::from(receipt.len < RECEIPT_BLOCK);
            continue;
        }
        tables::RECEIPTS.delete(txn, (relation, ino, at));
        for (from, to) in [(at, start.min(receipt_end)), (end.max(at), receipt_end)] {
            if let Some((from, part)) = part_of(at, &receipt, from, to) {
                short.count += u64::from(part.len < RECEIPT_BLOCK);
                tables::RECEIPTS.put(txn, (relation, ino, from), &part);
            }
        }
    }
    Ok(short)
}
pub fn trim_receipts(txn: &mut dyn Txn, relation: RelationId, ino: InodeId, size: u64) -> Result<()> {
    remove_receipts(txn, relation, ino, size, u64::MAX).map(drop)
}

/// The part of `from..to` that a receipt still covers: whole blocks of it.
fn part_of(at: u64, receipt: &ReceiptRecord, from: u64, to: u64) -> Option<(u64, ReceiptRecord)> {
    if from >= to {
        return None;
    }
    let end = at + receipt.len;
    let first = (from - at).div_ceil(RECEIPT_BLOCK);
    // The last block may be short; it is whole if the receipt ends with it.
    let last = if to == end { receipt.sums.len() as u64 } else { (to - at) / RECEIPT_BLOCK };
    let (start, stop) = (at + first * RECEIPT_BLOCK, if to == end { end } else { at + last * RECEIPT_BLOCK });
    (first < last && start < stop).then(|| {
        let sums = receipt.sums.get(first as usize..last as usize).unwrap_or_default().to_vec();
        (start, ReceiptRecord { len: stop - start, sums })
    })
}

/// Whether receipts cover all of `from..to`.
pub fn is_proved(read: &dyn Read, relation: RelationId, ino: InodeId, from: u64, to: u64) -> Result<bool> {
    let mut at = from;
    for (start, receipt) in receipts_of(read, relation, ino)? {
        if start <= at && at < start + receipt.len {
            at = start + receipt.len;
        }
    }
    Ok(at >= to)
}

#[cfg(test)]
mod tests {
    use super::super::record::{ConflictRecord, RulesRecord};
    use super::*;
    use crate::holds::HoldsRecord;
    use weir_kv::{Kv, MemoryKv};
    use weir_proto::SessionId;
    use weir_proto::meta::Time;

    /// In a file of many short ranges and one long one.
    #[test]
    fn receipts_of_short_ranges_have_a_bound() {
        const RANGE: u64 = 512;
        let (kv, relation, ino) = (MemoryKv::new(), RelationId(1), InodeId(7));
        let long = ReceiptRecord { len: 2 * RECEIPT_BLOCK, sums: vec![1, 2] };
        let mut most = 0;
        kv.transact(&mut |txn| {
            add_receipt(txn, relation, ino, 0, long.clone())?;
            for n in 0..3000 {
                let receipt = ReceiptRecord { len: RANGE, sums: vec![n as u32] };
                add_receipt(txn, relation, ino, long.len + 2 * n * RANGE, receipt)?;
                most = most.max(receipts_of(txn, relation, ino)?.len() as u64);
            }
            Ok(())
        })
        .unwrap();
        assert!((SHORT_RECEIPTS_MAX..SHORT_RECEIPTS_MAX + 10).contains(&most), "{most}");
        let mut body = |txn: &mut dyn Txn| {
            assert!(is_proved(txn, relation, ino, 0, long.len)?, "the long one is kept");
            // All of them are shipped once more, as one range.
            let all = ReceiptRecord { len: 6000 * RANGE, sums: vec![3] };
            add_receipt(txn, relation, ino, long.len, all)?;
            assert!(is_proved(txn, relation, ino, 0, long.len + 6000 * RANGE)?);
            assert_eq!(receipts_of(txn, relation, ino)?.len(), 2);
            Ok(())
        };
        kv.transact(&mut body).unwrap();
    }
    /// Their keys began with one letter: a relation and a namespace of one number had the same ones.
    #[test]
    fn a_removed_relation_takes_its_rules_and_no_sessions() {
        let kv = MemoryKv::new();
        let (relation, ino, session) = (RelationId(1), InodeId(5), SessionId(1 << 32 | 7));
        kv.transact(&mut |txn| {
            tables::HOLDS.put(txn, session, &HoldsRecord { volumes: Vec::new() });
            tables::RULES.put(txn, relation, &RulesRecord::default());
            tables::UNSEEN.put(txn, (relation, ino), &0);
            tables::CONFLICTS.put(txn, (RelationId(2), ino), &conflict());
            assert_eq!(count(txn, relation)?, 2);
            assert!(!remove_some(txn, relation)?);
            assert_eq!(count(txn, relation)?, 0);
            assert!(tables::HOLDS.has(txn, session)? && tables::CONFLICTS.has(txn, (RelationId(2), ino))?);
            Ok(())
        })
        .unwrap();
    }

    fn conflict() -> ConflictRecord {
        ConflictRecord { diverged: true, why: "it was changed at home".into(), at: Time { nanos: 1 } }
    }
}
