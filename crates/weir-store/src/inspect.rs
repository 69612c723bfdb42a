//! Inspects a target that no process uses: decodes everything, and on request verifies every byte.
//!
//! Takes the target's lock, so it never sees a store at work. Changes nothing (opening the index replays its
//! journal).
use crate::alloc::{Extent, FreeMap};
use crate::entries::get;
use crate::format::*;
use crate::lookup::{each, load_geometry};
use crate::slab::Slabs;
use crate::store::wait_for_target;
use crate::{Geometry, open_index};
use serde::Serialize;
use std::path::Path;
use weir_env::{BufferPool, Disk, Env};
use weir_kv::{Read, SharedKv};
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::{CHECKSUM_BLOCK, OverlayKind};
use weir_proto::{CellId, Error, Result, Seq};

#[derive(Clone, Copy, Default, Debug)]
pub struct InspectOptions {
    /// Verify all checksums, not only the structure.
    pub check: bool,
    /// Show only this cell.
    pub cell: Option<CellId>,
}

/// A finding of an inspection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Finding {
    Cell {
        cell: String,
        group: u32,
        epoch: u64,
        scheme: String,
        missing: u64,
        last_seq: u64,
        folded_seq: u64,
    },
    Base {
        cell: String,
        version: String,
        bytes: u32,
        addr: u64,
        blocks: usize,
        folded_seqs: Vec<u64>,
    },
    Prepared {
        cell: String,
        version: String,
        bytes: u32,
        addr: u64,
        seal: bool,
    },
    Overlay {
        cell: String,
        seq: u64,
        offset: u32,
        len: u32,
        zero: bool,
        token_epoch: u32,
        in_slab: bool,
    },
    Fence {
        file: String,
        token_epoch: u32,
    },
    Group {
        group: u32,
        epoch: u64,
    },
    /// A violation of the format or of an invariant.
    Problem {
        problem: String,
    },
}

/// Totals of a target.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Summary {
    pub slab_bytes: u64,
    pub step_bytes: u64,
    pub cells: u64,
    pub bases: u64,
    pub prepared: u64,
    pub overlays: u64,
    pub fences: u64,
    pub groups: u64,
    pub cells_missing_fragments: u64,
    pub fragment_bytes: u64,
    pub overlay_bytes: u64,
    /// Bytes of slabs in use, and taken from the file system but free.
    pub used_bytes: u64,
    pub free_bytes: u64,
    pub verified_bytes: u64,
    pub problems: u64,
}

/// Inspects the target in `dir`; each finding goes to `report` as it is made, problems in any case.
pub async fn inspect(
    env: &Env,
    dir: &Path,
    options: InspectOptions,
    report: &mut (dyn FnMut(Finding) + Send),
) -> Result<Summary> {
    if !has_index(&*env.disk, dir)? {
        let is_one =
            weir_coord::identity::read_identity(&*env.disk, dir)?.is_some() || has_slabs(&*env.disk, dir)?;
        if !is_one {
            return Err(Error::not_found(format!("{} holds no target: it has no index", dir.display())));
        }
        let problem = Error::damaged(format!(
            "the index of the target in {} is missing, so the contents of its slabs are unknown",
            dir.display()
        ))
        .hint(
            "if it was moved away, put it back before the target is started; else start the target, which \
             is then refilled from the others",
        );
        report(Finding::Problem { problem: problem.to_string() });
        return Ok(Summary { problems: 1, ..Summary::default() });
    }
    let _lock = wait_for_target(env, dir).await?;
    let kv = open_index(env, dir).await?;
    let mut inspection = Inspection {
        env,
        dir,
        options,
        report,
        summary: Summary::default(),
        extents: Vec::new(),
        to_verify: Vec::new(),
    };
    inspection.entries(&kv)?;
    inspection.space(&kv)?;
    Ok(inspection.summary)
}

/// Whether a target's directory has slabs but no index to describe them.
pub fn has_lost_index(disk: &dyn Disk, dir: &Path) -> Result<bool> {
    Ok(!has_index(disk, dir)? && has_slabs(disk, dir)?)
}
fn has_index(disk: &dyn Disk, dir: &Path) -> Result<bool> {
    let index = dir.join("index");
    Ok(disk.exists(&index) && has_file(disk, &index, "journal-")?)
}
fn has_slabs(disk: &dyn Disk, dir: &Path) -> Result<bool> {
    Ok(disk.exists(dir) && has_file(disk, dir, "slab-")?)
}
fn has_file(disk: &dyn Disk, dir: &Path, prefix: &str) -> Result<bool> {
    let entries =
        disk.read_dir(dir).map_err(|e| Error::from_io(format_args!("list {}", dir.display()), &e))?;
    Ok(entries.iter().any(|e| e.name.starts_with(prefix)))
}

struct Inspection<'a> {
    env: &'a Env,
    dir: &'a Path,
    options: InspectOptions,
    report: &'a mut (dyn FnMut(Finding) + Send),
    summary: Summary,
    extents: Vec<Extent>,
    to_verify: Vec<Checked>,
}

/// Bytes in a slab and their expected checksums.
struct Checked {
    what: String,
    extent: Extent,
    bytes: u32,
    /// One per block, or one for all.
    crcs: Vec<u32>,
    block: u32,
}

impl Inspection<'_> {
    fn problem(&mut self, problem: String) {
        self.summary.problems += 1;
        (self.report)(Finding::Problem { problem });
    }
    fn found(&mut self, cell: CellId, finding: Finding) {
        if self.options.cell.is_none_or(|only| only == cell) {
            (self.report)(finding);
        }
    }

    fn entries(&mut self, kv: &SharedKv) -> Result<()> {
        kv.read(&mut |r| {
            self.letter(r, HEADER, Inspection::header)?;
            self.letter(r, BASE, |i, r, k, v| i.fragment(r, k, v, false))?;
            self.letter(r, PREPARED, |i, r, k, v| i.fragment(r, k, v, true))?;
            self.letter(r, OVERLAY, Inspection::overlay)?;
            self.letter(r, OVERLAY_DATA, Inspection::overlay_data)?;
            self.letter(r, LISTED, Inspection::listed)?;
            self.letter(r, FENCE, |i, _, key, value| {
                let (file, fence) = (file_of_fence_key(key)?, Fence::from_value(value)?);
                i.summary.fences += 1;
                if i.options.cell.is_none() {
                    (i.report)(Finding::Fence { file: file.to_string(), token_epoch: fence.token_epoch });
                }
                Ok(())
            })?;
            self.letter(r, TRUNCATION, |i, r, key, value| {
                let (number, _) = (truncation_number_of_key(key)?, Truncation::from_value(value)?);
                if r.get(&truncated_file_key(number))?.is_none() {
                    i.problem(format!("truncation {number} names no file"));
                }
                Ok(())
            })?;
            self.letter(r, TRUNCATED_FILE, |i, r, key, value| {
                let (number, of) = (truncation_number_of_key(key)?, TruncatedFile::from_value(value)?);
                if r.get(&truncation_key(of.file, number))?.is_none() {
                    i.problem(format!("file {} has no truncation {number}", of.file));
                }
                Ok(())
            })?;
            self.letter(r, CLOSED, |_, _, _, value| GroupEpoch::from_value(value).map(drop))?;
            self.letter(r, GROUP, |i, _, key, value| {
                let group =
                    key.get(1..5).and_then(|g| g.try_into().ok()).map_or(u32::MAX, u32::from_be_bytes);
                let epoch = GroupEpoch::from_value(value)?.epoch.0;
                i.summary.groups += 1;
                if i.options.cell.is_none() {
                    (i.report)(Finding::Group { group, epoch });
                }
                Ok(())
            })
        })?;
        Ok(())
    }

    /// Visits all entries of a letter; an entry that does not decode is a problem, and the visit continues.
    fn letter(
        &mut self,
        r: &dyn Read,
        letter: u8,
        visit: impl Fn(&mut Self, &dyn Read, &[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        each(r, letter, |key, value| {
            if let Err(e) = visit(self, r, key, value) {
                self.problem(format!("entry {key:02x?}: {e}"));
            }
            Ok(())
        })
    }

    fn header(&mut self, r: &dyn Read, key: &[u8], value: &[u8]) -> Result<()> {
        let (cell, h) = (cell_of_key(key)?, Header::from_value(value)?);
        self.summary.cells += 1;
        self.summary.cells_missing_fragments += u64::from(h.missing != 0);
        let (mut count, mut bytes, mut sum) = (0, 0, 0u64);
        let logged = crate::cells::overlays(r, cell, Seq(0), Seq(u64::MAX))?;
        for (seq, overlay) in &logged {
            count += 1;
            bytes += u64::from(overlay.len);
            sum = sum.wrapping_add(overlay.sum(*seq));
            if *seq <= h.folded_seq || *seq > h.last_seq {
                self.problem(format!(
                    "cell {cell}: overlay {seq} lies outside of {} to {}",
                    h.folded_seq, h.last_seq
                ));
            }
        }
        if (count, bytes, sum) != (h.overlay_count, h.overlay_bytes, h.log_sum) {
            self.problem(format!(
                "cell {cell}: {count} overlays of {bytes} bytes, not the {} of {} of its header",
                h.overlay_count, h.overlay_bytes
            ));
        }
        if h.folded_seq > h.last_seq {
            self.problem(format!(
                "cell {cell}: folded sequence {} above its last sequence {}",
                h.folded_seq, h.last_seq
            ));
        }
        if r.get(&listed_key(h.group, cell))?.is_none() {
            self.problem(format!("cell {cell}: not listed under {}", h.group));
        }
        let finding = Finding::Cell {
            cell: cell.to_string(),
            group: h.group.0,
            epoch: h.epoch.0,
            scheme: h.scheme.to_string(),
            missing: h.missing,
            last_seq: h.last_seq.0,
            folded_seq: h.folded_seq.0,
        };
        self.found(cell, finding);
        Ok(())
    }

    fn fragment(&mut self, r: &dyn Read, key: &[u8], value: &[u8], prepared: bool) -> Result<()> {
        let (cell, f) = (cell_of_key(key)?, Fragment::from_value(value)?);
        if r.get(&header_key(cell))?.is_none() {
            self.problem(format!("cell {cell}: version {} without a header", f.version));
        }
        if f.block_crcs.len() != f.fragment_bytes.div_ceil(CHECKSUM_BLOCK) as usize
            || f.extent.len < f.fragment_bytes
        {
            self.problem(format!(
                "cell {cell}: version {} of {} bytes in {:?}",
                f.version, f.fragment_bytes, f.extent
            ));
        }
        self.extents.push(f.extent);
        self.summary.fragment_bytes += u64::from(f.fragment_bytes);
        self.to_verify.push(Checked {
            what: format!("cell {cell} version {}", f.version),
            extent: f.extent,
            bytes: f.fragment_bytes,
            crcs: f.block_crcs.clone(),
            block: CHECKSUM_BLOCK,
        });
        let (cell_text, version, bytes, addr) =
            (cell.to_string(), f.version.to_string(), f.fragment_bytes, f.extent.addr);
        let finding = if prepared {
            self.summary.prepared += 1;
            Finding::Prepared { cell: cell_text, version, bytes, addr, seal: f.seal }
        } else {
            self.summary.bases += 1;
            let folded_seqs = f.folded_seqs.iter().map(|c| c.0).collect();
            Finding::Base { cell: cell_text, version, bytes, addr, blocks: f.block_crcs.len(), folded_seqs }
        };
        self.found(cell, finding);
        Ok(())
    }

    fn overlay(&mut self, r: &dyn Read, key: &[u8], value: &[u8]) -> Result<()> {
        let (cell, seq, o) = (cell_of_key(key)?, Seq(number_of_key(key)?), Overlay::from_value(value)?);
        if r.get(&header_key(cell))?.is_none() {
            self.problem(format!("cell {cell}: overlay {seq} without a header"));
        }
        self.summary.overlays += 1;
        self.summary.overlay_bytes += u64::from(o.len);
        if o.extent.len > 0 {
            self.extents.push(o.extent);
            self.to_verify.push(Checked {
                what: format!("cell {cell} overlay {seq}"),
                extent: o.extent,
                bytes: o.len,
                crcs: vec![o.crc],
                block: o.len,
            });
        } else if o.kind == OverlayKind::Data {
            let data = crate::read::inline_data(r, cell, seq, &o)?;
            self.summary.verified_bytes += data.len() as u64;
            if crc32c(&data) != o.crc {
                self.problem(format!("cell {cell}: overlay {seq} fails its checksum"));
            }
        }
        let finding = Finding::Overlay {
            cell: cell.to_string(),
            seq: seq.0,
            offset: o.offset,
            len: o.len,
            zero: o.kind == OverlayKind::Zero,
            token_epoch: o.token_epoch,
            in_slab: o.extent.len > 0,
        };
        self.found(cell, finding);
        Ok(())
    }

    fn overlay_data(&mut self, r: &dyn Read, key: &[u8], _: &[u8]) -> Result<()> {
        let (cell, seq) = (cell_of_key(key)?, Seq(number_of_key(key)?));
        match get::<Overlay>(r, &overlay_key(cell, seq))? {
            Some(o) if o.extent.len == 0 && o.kind == OverlayKind::Data => Ok(()),
            _ => Err(Error::damaged(format!("cell {cell}: data of overlay {seq}, which has none here"))),
        }
    }

    fn listed(&mut self, r: &dyn Read, key: &[u8], _: &[u8]) -> Result<()> {
        let cell = cell_of_key(key)?;
        match get::<Header>(r, &header_key(cell))? {
            Some(h) if listed_key(h.group, cell) == key => Ok(()),
            _ => Err(Error::damaged(format!("cell {cell} is listed under a group that it is not in"))),
        }
    }

    /// Checks that extents do not overlap, lie in existing slabs, and match their checksums.
    fn space(&mut self, kv: &SharedKv) -> Result<()> {
        let geometry = load_geometry(kv, Geometry::DEFAULT)?;
        self.summary.slab_bytes = geometry.slab_bytes;
        self.summary.step_bytes = geometry.step_bytes;
        match FreeMap::rebuild(geometry, self.extents.clone()) {
            Err(e) => self.problem(e.to_string()),
            Ok(map) => {
                self.summary.used_bytes = map.used_bytes();
                self.summary.free_bytes = map.free_bytes();
            }
        }
        if !self.options.check {
            return Ok(());
        }
        let buffers = BufferPool::new(16 << 20);
        let slabs = Slabs::view(self.env.disk.clone(), buffers, self.dir, geometry)?;
        for checked in std::mem::take(&mut self.to_verify).into_iter().filter(|c| c.bytes > 0) {
            match slabs.read(checked.extent, 0, checked.bytes) {
                Err(e) => self.problem(format!("{}: {e}", checked.what)),
                Ok(bytes) => {
                    self.summary.verified_bytes += bytes.len() as u64;
                    let now = block_crcs(&bytes, checked.block as usize);
                    let bad = now.iter().zip(&checked.crcs).filter(|(a, b)| a != b).count();
                    if bad > 0 {
                        self.problem(format!("{}: {bad} blocks fail their checksum", checked.what));
                    }
                }
            }
        }
        Ok(())
    }
}
