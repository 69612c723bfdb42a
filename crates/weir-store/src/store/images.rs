//! Images of cells: all that a target has of a cell, read for another target, or taken over from one.
//!
//! Invariant: bytes are checked against their entry before they are sent, and before they are named here.
use super::Store;
use crate::alloc::Extent;
use crate::cells::{self, Scope};
use crate::entries::get;
use crate::format::*;
use crate::image::{self, Entry};
use bytes::Bytes;
use std::collections::BTreeMap;
use weir_kv::CommitSeq;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::{CellId, Error, Result, Seq};

/// Cells of one listing.
pub(crate) const PLACE_LIST_MAX: u32 = 1024;
/// Bytes on slabs, and bytes of the index, in one answer: a fragment takes 4 MiB at most.
const ANSWER_BYTES: usize = 2 << 20;
const ANSWER_INDEX_BYTES: usize = 256 << 10;

impl Store {
    pub fn close_group(&self, scope: &Scope) -> Result<CommitSeq> {
        self.change(&mut |txn, _| cells::close(txn, scope.group, scope.epoch))
    }

    pub fn list_place(
        &self,
        scope: &Scope,
        after: Option<CellId>,
        limit: u32,
    ) -> Result<(CommitSeq, PlaceList)> {
        self.usable()?;
        let limit = limit.clamp(1, PLACE_LIST_MAX) as usize;
        self.index().read(|r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            let (cells, more) = image::digests(r, scope.group, after, limit)?;
            Ok(PlaceList { cells, more })
        })
    }

    /// A cell's entries from the given one on, with their bytes; none if the cell is of another group.
    pub fn image_of(
        &self,
        scope: &Scope,
        cell: CellId,
        from: u32,
    ) -> Result<(CommitSeq, CellImage, Vec<Bytes>)> {
        self.usable()?;
        let _guard = self.slabs.begin_read();
        let (seen, entries) = self.index().read(|r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            let header: Option<Header> = get(r, &header_key(cell))?;
            match header.is_some_and(|header| header.group == scope.group) {
                true => image::entries(r, cell),
                false => Ok(Vec::new()),
            }
        })?;
        let (mut image, mut payload) = (CellImage { entries: Vec::new(), more: false }, Vec::new());
        let (mut bytes, mut index_bytes) = (0, 0);
        for entry in entries.into_iter().skip(from as usize) {
            if bytes >= ANSWER_BYTES || index_bytes >= ANSWER_INDEX_BYTES {
                image.more = true;
                break;
            }
            let data = self.bytes_of(cell, &entry)?;
            (bytes, index_bytes) = (bytes + data.len(), index_bytes + entry.value.len() + 16);
            let Entry { letter: kind, number, value } = entry;
            image.entries.push(CellEntry { kind, number, value, bytes: data.len() as u32 });
            payload.extend((!data.is_empty()).then_some(data));
        }
        Ok((seen, image, payload))
    }

    fn bytes_of(&self, cell: CellId, entry: &Entry) -> Result<Bytes> {
        let extent = entry.extent()?;
        if extent.len == 0 {
            return Ok(Bytes::new());
        }
        let len = match entry.letter {
            OVERLAY => Overlay::from_value(&entry.value)?.len,
            _ => Fragment::from_value(&entry.value)?.fragment_bytes,
        };
        let data = self.slabs.read(extent, 0, len)?.freeze();
        check_bytes(cell, entry, &data)?;
        Ok(data)
    }

    /// Replaces a cell by another target's image of it. Blocks.
    pub fn put_image(&self, scope: &Scope, cell: CellId, entries: Vec<(Entry, Bytes)>) -> Result<CommitSeq> {
        self.usable()?;
        check_logs(cell, &entries)?;
        let (mut placed, mut extents) = (Vec::with_capacity(entries.len()), Vec::<Extent>::new());
        let stored = entries.iter().try_for_each(|(entry, data)| {
            // The other target's extents do not apply here.
            let mut extent = Extent::default();
            if !data.is_empty() || entry.extent()?.len > 0 {
                check_bytes(cell, entry, data)?;
                extent = self.store_bytes(data)?;
                extents.push(extent);
            }
            placed.push(entry.at(extent)?);
            Ok(())
        });
        let committed = stored.and_then(|()| {
            assert_eq!(placed.len(), entries.len(), "an entry of an image has no place here");
            self.change(&mut |txn, delta| {
                cells::check_epoch(txn, scope.group, scope.epoch)?;
                image::put(txn, scope.group, cell, &placed, delta)
            })
        });
        committed.inspect_err(|_| extents.iter().for_each(|extent| self.slabs.forget(*extent)))
    }
}

/// Checks that the bytes match the entry.
fn check_bytes(cell: CellId, entry: &Entry, data: &[u8]) -> Result<()> {
    let is_so = match entry.letter {
        BASE | PREPARED => {
            let fragment = Fragment::from_value(&entry.value)?;
            data.len() == fragment.fragment_bytes as usize
                && block_crcs(data, CHECKSUM_BLOCK as usize) == fragment.block_crcs
        }
        OVERLAY => {
            let overlay = Overlay::from_value(&entry.value)?;
            data.len() == overlay.len as usize && crc32c(data) == overlay.crc
        }
        _ => data.is_empty(),
    };
    match is_so {
        true => Ok(()),
        false => Err(Error::damaged(format!("cell {cell}: bytes do not match their checksum"))),
    }
}

/// Each overlay has its bytes, on a slab or in the index.
fn check_logs(cell: CellId, entries: &[(Entry, Bytes)]) -> Result<()> {
    let inline: BTreeMap<u64, &[u8]> = entries
        .iter()
        .filter(|(entry, _)| entry.letter == OVERLAY_DATA)
        .map(|(entry, _)| (entry.number, &entry.value[..]))
        .collect();
    for (entry, _) in entries.iter().filter(|(entry, _)| entry.letter == OVERLAY) {
        let overlay = Overlay::from_value(&entry.value)?;
        let is_inline = overlay.kind == OverlayKind::Data && overlay.extent.len == 0;
        let is_whole = |data: &&[u8]| data.len() == overlay.len as usize && crc32c(data) == overlay.crc;
        if is_inline && !inline.get(&entry.number).is_some_and(is_whole) {
            let seq = Seq(entry.number);
            return Err(Error::damaged(format!("image of cell {cell}: overlay {seq} lacks its bytes")));
        }
    }
    Ok(())
}
