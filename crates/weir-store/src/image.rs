//! The image of a cell: all index entries that a target has of it, so that another target can copy them.
//!
//! A place of a group moves by images: the receiving target copies the cells that differ from its own, in
//! repeated passes, and once more after the holder has closed the group ([`cells::close`]). Then both hold
//! the same cells, and the coordinator makes the new target the member.
//!
//! Functions of one state of the index. Where bytes are on a slab differs from target to target: a digest
//! does not depend on that, nor on whether an overlay's bytes are still in the index.
use crate::alloc::Extent;
use crate::cells::{self, Delta};
use crate::entries::{collect, get};
use crate::format::*;
use crate::lookup;
use weir_kv::{Read, Scan, Txn};
use weir_proto::data::CellDigest;
use weir_proto::{CellId, Error, PgId, Result};

/// A key of the index without its cell, and the value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub letter: u8,
    /// The version or the sequence number; 0 for entries of which a cell has one.
    pub number: u64,
    pub value: Vec<u8>,
}

impl Entry {
    fn key(&self, cell: CellId) -> Result<Vec<u8>> {
        match self.letter {
            HEADER | BASE => Ok(cell_key(self.letter, cell)),
            PREPARED | OVERLAY | OVERLAY_DATA => {
                let mut key = cell_key(self.letter, cell);
                key.extend_from_slice(&self.number.to_be_bytes());
                Ok(key)
            }
            other => Err(Error::invalid(format!("image of cell {cell}: entries of kind {other:#x}"))),
        }
    }

    /// The place of its bytes on this target's slabs; length 0: there are none.
    pub fn extent(&self) -> Result<Extent> {
        Ok(match self.letter {
            BASE | PREPARED => Fragment::from_value(&self.value)?.extent,
            OVERLAY => Overlay::from_value(&self.value)?.extent,
            _ => Extent::default(),
        })
    }

    /// This entry, with its bytes elsewhere.
    pub fn at(&self, extent: Extent) -> Result<Entry> {
        let value = match self.letter {
            BASE | PREPARED => Fragment { extent, ..Fragment::from_value(&self.value)? }.to_value(),
            OVERLAY => Overlay { extent, ..Overlay::from_value(&self.value)? }.to_value(),
            _ => self.value.clone(),
        };
        Ok(Entry { value, ..self.clone() })
    }
}

/// All entries of a cell; empty if it is not here.
pub fn entries(read: &dyn Read, cell: CellId) -> Result<Vec<Entry>> {
    let mut found = Vec::new();
    for letter in [HEADER, BASE] {
        let value = read.get(&cell_key(letter, cell))?;
        found.extend(value.map(|value| Entry { letter, number: 0, value }));
    }
    for letter in [PREPARED, OVERLAY, OVERLAY_DATA] {
        found.extend(numbered_entries(read, cell, letter)?);
    }
    Ok(found)
}

fn numbered_entries(read: &dyn Read, cell: CellId, letter: u8) -> Result<Vec<Entry>> {
    let (start, end) = numbered_range(letter, cell, 0, u64::MAX);
    collect(read, &start, &end, |key, value| {
        Ok(Entry { letter, number: number_of_key(key)?, value: value.to_vec() })
    })
}

/// The digest of a cell: without overlays' inline data, whose checksum is in the log entry.
fn digest_of(read: &dyn Read, cell: CellId) -> Result<u64> {
    let single =
        |letter| Ok(read.get(&cell_key(letter, cell))?.map(|value| Entry { letter, number: 0, value }));
    let (header, base) = (single(HEADER)?, single(BASE)?);
    let mut found: Vec<Entry> = header.into_iter().chain(base).collect();
    for letter in [PREPARED, OVERLAY] {
        found.extend(numbered_entries(read, cell, letter)?);
    }
    digest(&found)
}

/// The digest that two targets compare; the entries have been verified.
pub fn digest(entries: &[Entry]) -> Result<u64> {
    let mut sum = Fnv::default();
    for entry in entries.iter().filter(|entry| entry.letter != OVERLAY_DATA) {
        sum.add(&[entry.letter]);
        sum.add(&entry.number.to_le_bytes());
        sum.add(&entry.at(Extent::default())?.value);
    }
    Ok(sum.0)
}

/// Digests of the group's cells after a given one, in order, and whether there are more.
pub fn digests(
    read: &dyn Read,
    group: PgId,
    after: Option<CellId>,
    limit: usize,
) -> Result<(Vec<CellDigest>, bool)> {
    let mut cells = lookup::listed_cells(read, group, after, limit + 1)?;
    let more = cells.len() > limit;
    cells.truncate(limit);
    let of = |cell: CellId| Ok(CellDigest { cell, digest: digest_of(read, cell)? });
    Ok((cells.into_iter().map(of).collect::<Result<_>>()?, more))
}

/// Digests of the group's cells up to and including `last`.
pub fn digests_up_to(
    read: &dyn Read,
    group: PgId,
    after: Option<CellId>,
    last: Option<CellId>,
) -> Result<Vec<CellDigest>> {
    let (start, end) = listed_range(group, after);
    let (mut found, mut problem) = (Vec::new(), Ok(()));
    read.scan(&start, &end, &mut |key, _| {
        let digest = |cell| Ok(CellDigest { cell, digest: digest_of(read, cell)? });
        match cell_of_key(key) {
            Ok(cell) if last.is_some_and(|last| cell > last) => Scan::Stop,
            cell => match cell.and_then(digest) {
                Ok(digest) => {
                    found.push(digest);
                    Scan::More
                }
                Err(e) => {
                    problem = Err(e);
                    Scan::Stop
                }
            },
        }
    })?;
    problem.map(|()| found)
}

/// Replaces the cell's entries by the given ones; without entries the cell is removed. Extents in the entries
/// are this target's own.
pub fn put(txn: &mut dyn Txn, group: PgId, cell: CellId, entries: &[Entry], delta: &mut Delta) -> Result<()> {
    cells::drop_cell(txn, cell, delta)?;
    if entries.is_empty() {
        return Ok(());
    }
    for entry in entries {
        txn.put(&entry.key(cell)?, &entry.value);
        if entry.letter == OVERLAY {
            delta.overlay_count += 1;
            delta.overlay_bytes += i64::from(Overlay::from_value(&entry.value)?.len);
        }
    }
    let header: Option<Header> = get(txn, &header_key(cell))?;
    let Some(header) = header.filter(|header| header.group == group) else {
        return Err(Error::invalid(format!("image of cell {cell}: it has no header of {group}")));
    };
    txn.put(&listed_key(group, cell), &[]);
    delta.cells += 1;
    delta.under_replicated_cells += i64::from(header.missing != 0);
    Ok(())
}

/// FNV-1a, 64 bits: the same in every build.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
