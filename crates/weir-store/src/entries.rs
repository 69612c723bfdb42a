//! Entries of a target's index: one by its key, all of a short range, the truncations of a file.
//!
//! Knows keys and records, and nothing of what a change of them means.
use crate::format::*;
use weir_kv::{Read, Scan};
use weir_proto::{CellId, Error, FileId, Result};

/// The entry of a key.
pub fn get<R: Record>(read: &dyn Read, key: &[u8]) -> Result<Option<R>> {
    read.get(key)?.map(|value| R::from_value(&value)).transpose()
}

/// All entries of a range; for ranges that are known to be short.
pub fn collect<T>(
    read: &dyn Read,
    start: &[u8],
    end: &[u8],
    mut item: impl FnMut(&[u8], &[u8]) -> Result<T>,
) -> Result<Vec<T>> {
    let mut items = Ok(Vec::new());
    read.scan(start, end, &mut |key, value| match (item(key, value), &mut items) {
        (Ok(item), Ok(items)) => {
            items.push(item);
            Scan::More
        }
        (Ok(_), Err(_)) => Scan::Stop,
        (Err(e), items) => {
            *items = Err(e);
            Scan::Stop
        }
    })?;
    items
}

/// Data of the cell with a lower token epoch is void.
pub fn void_below(read: &dyn Read, cell: CellId) -> Result<u32> {
    let truncations = truncations_of(read, cell.file)?;
    Ok(truncations
        .iter()
        .filter(|(_, c)| c.holds(cell.stripe))
        .map(|(_, c)| c.token_epoch)
        .max()
        .unwrap_or(0))
}

/// The truncations of a file, with their numbers.
pub fn truncations_of(read: &dyn Read, file: FileId) -> Result<Vec<(u64, Truncation)>> {
    let (start, end) = truncation_range(file);
    collect(read, &start, &end, |key, value| {
        Ok((truncation_number_of_key(key)?, Truncation::from_value(value)?))
    })
}

/// The number of the newest truncation.
pub fn newest_truncation(read: &dyn Read) -> Result<u64> {
    match read.get(TRUNCATION_COUNT)? {
        None => Ok(0),
        Some(value) => value
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|_| Error::damaged("the number of truncations is not a number")),
    }
}
