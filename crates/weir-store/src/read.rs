//! Reading a cell: the base alone, or with its overlays applied.
//!
//! A plan is taken from one state of the index; carrying it out touches slabs only. Checksums of blocks that
//! no overlay touches are the writer's own. Every block of a base is verified before it is merged into or
//! decoded with. Blocks that go to a reader as they were written are verified by the reader alone; it reports
//! damage, and then the holder verifies them.
use crate::cells::{self, Scope, overlays, prepared};
use crate::entries::get;
use crate::format::*;
use crate::slab::{ReadGuard, Slabs};
use bytes::Bytes;
use weir_env::BufferPool;
use weir_kv::Read;
use weir_proto::checksum::crc32c;
use weir_proto::data::{CHECKSUM_BLOCK, CellRead, OverlayKind, ReadView};
use weir_proto::{CellId, Error, Result, Seq, Version};

/// The largest cell: 4 MiB.
pub const CELL_BYTES_MAX: u32 = 1 << 22;
/// The usual size of a random read by a program: it may span two blocks.
const SMALL_BYTES_MAX: u32 = 2 * CHECKSUM_BLOCK;

/// The steps of a read, from one state of the index.
pub struct Plan {
    pub cell: CellId,
    pub header: Option<Header>,
    pub known: bool,
    pub base: Option<Fragment>,
    /// Overlays above the base's folded sequence that touch the range, oldest first, with the data that is in
    /// the index.
    overlays: Vec<(Overlay, Vec<u8>)>,
    /// Length of the whole fragment.
    pub fragment_bytes: u32,
    pub seq: Seq,
    /// The range to return, cut at the fragment's end.
    start: u32,
    end: u32,
    /// The reader verifies what no overlay touches.
    end_to_end: bool,
    _guard: Option<ReadGuard>,
}

/// A block whose bytes do not match their checksum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BadBlock {
    pub cell: CellId,
    pub version: Version,
    /// Number of the block in the fragment; for an overlay's data its sequence.
    pub block: u64,
}

/// Bytes of a cell and the checksum of each block.
pub struct Bytes16 {
    pub payload: Vec<Bytes>,
    pub block_crcs: Vec<u32>,
}

/// A range of a cell, and which of its states: `version` counts for the base only.
#[derive(Clone, Copy)]
pub struct Part {
    pub cell: CellId,
    pub view: ReadView,
    pub version: Version,
    pub offset: u32,
    pub len: u32,
}

impl Plan {
    pub fn new(read: &dyn Read, scope: &Scope, part: Part, guard: Option<ReadGuard>) -> Result<Plan> {
        let Part { cell, view, version, offset, len } = part;
        if !offset.is_multiple_of(CHECKSUM_BLOCK) || offset > CELL_BYTES_MAX || len > CELL_BYTES_MAX {
            return Err(Error::invalid(format!(
                "read of {len} bytes at {offset} of cell {cell}: start at a multiple of {CHECKSUM_BLOCK}, at most {CELL_BYTES_MAX}"
            )));
        }
        let header: Option<Header> = get(read, &header_key(cell))?;
        let mut plan = Plan {
            cell,
            known: cells::stripe_known(read, scope, cell)?,
            base: get(read, &base_key(cell))?,
            overlays: Vec::new(),
            fragment_bytes: 0,
            seq: header.as_ref().map_or(Seq(0), |h| h.last_seq),
            header,
            start: offset,
            end: 0,
            end_to_end: false,
            _guard: guard,
        };
        match view {
            ReadView::Merged => plan.merge(read, offset, len)?,
            ReadView::Base => plan.choose(read, version)?,
        }
        plan.end = offset.saturating_add(len).min(plan.fragment_bytes).max(offset);
        if !plan.end.is_multiple_of(CHECKSUM_BLOCK) && plan.end != plan.fragment_bytes {
            return Err(Error::invalid(format!(
                "read of cell {cell} up to {}: end at a multiple of {CHECKSUM_BLOCK} or at the cell's end",
                plan.end
            )));
        }
        Ok(plan)
    }

    /// For a reader that verifies every block with the writer's checksums. (Measured: verifying each byte
    /// twice took 5 % of all processor time of a streaming read.)
    pub fn verified_by_reader(self) -> Plan {
        Plan { end_to_end: true, ..self }
    }

    /// The writer's checksums of the returned range, if the bytes may be sent as they are.
    fn as_written<'a>(&self, base: &'a Fragment, base_end: u32) -> Option<&'a [u32]> {
        let blocks = (self.start / CHECKSUM_BLOCK) as usize..self.end.div_ceil(CHECKSUM_BLOCK) as usize;
        let whole = self.end_to_end && self.overlays.is_empty() && base_end == self.end;
        base.block_crcs.get(blocks).filter(|_| whole)
    }

    fn merge(&mut self, read: &dyn Read, offset: u32, len: u32) -> Result<()> {
        let folded_seq = self.header.as_ref().map_or(Seq(0), |h| h.folded_seq);
        let base_bytes = self.base.as_ref().map_or(0, |b| b.fragment_bytes);
        self.fragment_bytes = base_bytes;
        let logged = match &self.header {
            Some(h) if h.overlay_count > 0 => {
                overlays(read, self.cell, Seq(folded_seq.0 + 1), Seq(u64::MAX))?
            }
            _ => Vec::new(),
        };
        // Whole blocks are returned, so an overlay counts if it touches the range rounded up to blocks.
        let end = offset.saturating_add(len).next_multiple_of(CHECKSUM_BLOCK);
        for (seq, overlay) in logged {
            self.fragment_bytes = self.fragment_bytes.max(overlay.offset.saturating_add(overlay.len));
            if overlay.offset < end && overlay.offset.saturating_add(overlay.len) > offset {
                let inline = overlay.kind == OverlayKind::Data && overlay.extent.len == 0;
                let data = if inline { inline_data(read, self.cell, seq, &overlay)? } else { Vec::new() };
                self.overlays.push((overlay, data));
            }
        }
        if self.fragment_bytes > CELL_BYTES_MAX {
            return Err(Error::damaged(format!("cell {}: {} bytes long", self.cell, self.fragment_bytes)));
        }
        Ok(())
    }

    fn choose(&mut self, read: &dyn Read, version: Version) -> Result<()> {
        let present = self.base.as_ref().map_or(Version(0), |b| b.version);
        if version != Version(0) && version != present {
            let uncommitted = prepared(read, self.cell)?.into_iter().find(|p| p.version == version);
            self.base = Some(uncommitted.ok_or_else(|| {
                Error::stale(format!(
                    "cell {}: version {version} is not here, the present one is {present}",
                    self.cell
                ))
            })?);
        }
        if let Some(base) = &self.base {
            self.fragment_bytes = base.fragment_bytes;
            self.seq = base.folded_seq;
        } else {
            self.seq = Seq(0);
        }
        Ok(())
    }

    /// Whether carrying it out reads slabs (then it runs where blocking is allowed).
    pub fn needs_disk(&self) -> bool {
        let base_bytes = self.base.as_ref().map_or(0, |b| b.fragment_bytes);
        self.start < base_bytes.min(self.end) || self.overlays.iter().any(|(o, _)| o.extent.len > 0)
    }

    /// Whether it is one small read of the disk.
    pub fn is_small(&self) -> bool {
        self.end - self.start <= SMALL_BYTES_MAX && self.overlays.iter().all(|(o, _)| o.extent.len == 0)
    }

    pub fn answer(&self, block_crcs: Vec<u32>) -> CellRead {
        CellRead {
            known: self.known,
            version: self.base.as_ref().map_or(Version(0), |b| b.version),
            seq: self.seq,
            fragment_bytes: self.fragment_bytes,
            folded_seqs: self.base.as_ref().map_or_else(Vec::new, |b| b.folded_seqs.clone()),
            missing: self.header.as_ref().map_or(0, |h| h.missing),
            block_crcs,
        }
    }

    /// Reads, verifies and merges. Bad blocks go to `damage`, and the read fails.
    pub fn run(
        &self,
        slabs: &Slabs,
        buffers: &BufferPool,
        damage: &mut dyn FnMut(BadBlock),
    ) -> Result<Bytes16> {
        let len = (self.end - self.start) as usize;
        if len == 0 {
            return Ok(Bytes16 { payload: Vec::new(), block_crcs: Vec::new() });
        }
        let base_end = self.base.as_ref().map_or(0, |b| b.fragment_bytes).min(self.end);
        let mut crcs = vec![0; len.div_ceil(CHECKSUM_BLOCK as usize)];
        let mut buf = if base_end > self.start {
            let base = self.base.as_ref().expect("a base that ends beyond 0");
            let mut buf = slabs.read(base.extent, self.start, base_end - self.start)?;
            if let Some(crcs) = self.as_written(base, base_end) {
                return Ok(Bytes16 { payload: vec![buf.freeze()], block_crcs: crcs.to_vec() });
            }
            self.verify(base, &buf, &mut crcs, damage)?;
            let have = buf.len();
            if have < len {
                let mut longer = buffers.get(len);
                longer[..have].copy_from_slice(&buf);
                longer[have..].fill(0);
                buf = longer;
            }
            buf
        } else {
            let mut buf = buffers.get(len);
            buf.fill(0);
            buf
        };
        let mut touched = vec![false; crcs.len()];
        for (block, touched) in touched.iter_mut().enumerate() {
            // Beyond the base, or in its short last block when the fragment is now longer.
            let block_end = (self.start + (block as u32 + 1) * CHECKSUM_BLOCK).min(self.end);
            *touched = block_end > base_end;
        }
        for (overlay, inline) in &self.overlays {
            self.apply(overlay, inline, &mut buf, &mut touched, slabs, damage)?;
        }
        for (i, block) in buf.chunks(CHECKSUM_BLOCK as usize).enumerate() {
            if touched[i] {
                crcs[i] = crc32c(block);
            }
        }
        assert_eq!(buf.len(), len, "a read returns the range that was planned");
        Ok(Bytes16 { payload: vec![buf.freeze()], block_crcs: crcs })
    }

    fn verify(
        &self,
        base: &Fragment,
        buf: &[u8],
        crcs: &mut [u32],
        damage: &mut dyn FnMut(BadBlock),
    ) -> Result<()> {
        let first = (self.start / CHECKSUM_BLOCK) as usize;
        let mut bad = None;
        let mut rest = buf;
        for (i, crc) in crcs.iter_mut().enumerate() {
            let block = first + i;
            let whole = base.fragment_bytes - (block as u32 * CHECKSUM_BLOCK).min(base.fragment_bytes);
            let len = whole.min(CHECKSUM_BLOCK) as usize;
            if rest.is_empty() {
                break;
            }
            if len > rest.len() {
                return Err(Error::damaged(format!("cell {}: block {block} read in part", self.cell)));
            }
            let (bytes, after) = rest.split_at(len);
            rest = after;
            *crc = crc32c(bytes);
            if base.block_crcs.get(block) != Some(crc) {
                damage(BadBlock { cell: self.cell, version: base.version, block: block as u64 });
                bad.get_or_insert(block);
            }
        }
        match bad {
            None => Ok(()),
            Some(block) => Err(Error::damaged(format!(
                "cell {} version {}: block {block} fails its checksum, decode it from the others",
                self.cell, base.version
            ))),
        }
    }

    fn apply(
        &self,
        overlay: &Overlay,
        inline: &[u8],
        buf: &mut [u8],
        touched: &mut [bool],
        slabs: &Slabs,
        damage: &mut dyn FnMut(BadBlock),
    ) -> Result<()> {
        let from = overlay.offset.max(self.start);
        let to = (overlay.offset + overlay.len).min(self.end);
        if from >= to {
            return Ok(());
        }
        let out = &mut buf[(from - self.start) as usize..(to - self.start) as usize];
        let skip = (from - overlay.offset) as usize;
        match overlay.kind {
            OverlayKind::Zero => out.fill(0),
            OverlayKind::Void => return Ok(()),
            OverlayKind::Data if overlay.extent.len == 0 => {
                self.check_overlay(overlay, inline, damage)?;
                out.copy_from_slice(&inline[skip..skip + out.len()]);
            }
            OverlayKind::Data => {
                let data = slabs.read(overlay.extent, 0, overlay.len)?;
                self.check_overlay(overlay, &data, damage)?;
                out.copy_from_slice(&data[skip..skip + out.len()]);
            }
        }
        let first = ((from - self.start) / CHECKSUM_BLOCK) as usize;
        let last = ((to - 1 - self.start) / CHECKSUM_BLOCK) as usize;
        touched[first..=last].fill(true);
        Ok(())
    }

    fn check_overlay(&self, overlay: &Overlay, data: &[u8], damage: &mut dyn FnMut(BadBlock)) -> Result<()> {
        if data.len() == overlay.len as usize && crc32c(data) == overlay.crc {
            return Ok(());
        }
        damage(BadBlock { cell: self.cell, version: Version(0), block: u64::from(overlay.offset) });
        Err(Error::damaged(format!(
            "cell {}: the overlay of {} bytes at {} fails its checksum",
            self.cell, overlay.len, overlay.offset
        )))
    }
}

/// The data of an overlay that lies in the index.
pub fn inline_data(read: &dyn Read, cell: CellId, seq: Seq, overlay: &Overlay) -> Result<Vec<u8>> {
    let data = read.get(&overlay_data_key(cell, seq))?.unwrap_or_default();
    if data.len() != overlay.len as usize {
        return Err(Error::damaged(format!(
            "cell {cell}: overlay {seq} has {} of {} bytes",
            data.len(),
            overlay.len
        )));
    }
    Ok(data)
}
