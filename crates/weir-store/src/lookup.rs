//! Look-ups in the index that read more than one entry: statistics, listings, counters at open.
//!
//! Functions of one state of the index; they change nothing (except that they write a new target's geometry).
use crate::alloc::{Extent, Geometry};
use crate::cells::{self, Scope};
use crate::entries::get;
use crate::format::*;
use std::ops::Range;
use weir_kv::{Read, Scan, SharedKv};
use weir_proto::data::{CellStat, CellSummary};
use weir_proto::{CellId, FileId, PgId, Result, Seq, Version};

pub fn stat_of(r: &dyn Read, scope: &Scope, cell: CellId) -> Result<CellStat> {
    let base: Option<Fragment> = get(r, &base_key(cell))?;
    let header: Option<Header> = get(r, &header_key(cell))?;
    let of_index = |index: u8| -> Result<Seq> {
        Ok(get::<Header>(r, &header_key(CellId { index, ..cell }))?.map_or(Seq(0), |h| h.last_seq))
    };
    let parity = !scope.is_data(cell);
    let overlay_seqs = if parity {
        (0..scope.scheme.data).map(of_index).collect::<Result<_>>()?
    } else {
        vec![of_index(cell.index)?]
    };
    let folded_seqs = match &base {
        Some(b) if parity => b.folded_seqs.clone(),
        _ if parity => Vec::new(),
        _ => vec![header.as_ref().map_or(Seq(0), |h| h.folded_seq)],
    };
    Ok(CellStat {
        known: cells::stripe_known(r, scope, cell)?,
        base: base.as_ref().map_or(Version(0), |b| b.version),
        prepared: cells::prepared(r, cell)?.iter().map(|p| p.version).collect(),
        overlay_seqs,
        folded_seqs,
        missing: header.map_or(0, |h| h.missing),
        fragment_bytes: base.map_or(0, |b| b.fragment_bytes),
    })
}

pub fn summary(r: &dyn Read, cell: CellId) -> Result<Option<CellSummary>> {
    let Some(h) = get::<Header>(r, &header_key(cell))? else { return Ok(None) };
    let base = get::<Fragment>(r, &base_key(cell))?.map_or(Version(0), |b| b.version);
    Ok(Some(CellSummary {
        cell,
        epoch: h.epoch,
        base,
        seq: h.last_seq,
        log_sum: h.log_sum,
        missing: h.missing,
    }))
}

/// The next cells of these stripes of a file (up to `u64::MAX`: all from the first one on), in order.
pub fn file_cells(
    r: &dyn Read,
    file: FileId,
    stripes: Range<u64>,
    after: Option<CellId>,
    limit: usize,
) -> Result<Vec<CellId>> {
    let (mut start, end) = stripes_range(HEADER, file, stripes.start, stripes.end);
    if let Some(cell) = after {
        start = header_key(cell);
        start.push(0);
    }
    some_cells(r, &start, &end, limit)
}

/// The next cells of a group in order.
pub fn listed_cells(r: &dyn Read, group: PgId, after: Option<CellId>, limit: usize) -> Result<Vec<CellId>> {
    let (start, end) = listed_range(group, after);
    some_cells(r, &start, &end, limit)
}

/// The next cells with any entry, in order.
pub fn next_cells(r: &dyn Read, after: Option<CellId>, limit: usize) -> Result<Vec<CellId>> {
    let (mut start, end) = letter_range(HEADER);
    if let Some(cell) = after {
        start = header_key(cell);
        start.push(0);
    }
    some_cells(r, &start, &end, limit)
}

fn some_cells(r: &dyn Read, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<CellId>> {
    let mut found = Vec::new();
    let mut problem = Ok(());
    r.scan(start, end, &mut |key, _| match cell_of_key(key) {
        Ok(cell) if found.len() < limit => {
            found.push(cell);
            Scan::More
        }
        Ok(_) => Scan::Stop,
        Err(e) => {
            problem = Err(e);
            Scan::Stop
        }
    })?;
    problem.map(|()| found)
}

pub fn load_geometry(kv: &SharedKv, wanted: Geometry) -> Result<Geometry> {
    let mut meta: Option<Meta> = None;
    kv.transact(&mut |txn| {
        meta = get(txn, META)?;
        if meta.is_none() {
            let made = Meta { slab_bytes: wanted.slab_bytes, step_bytes: wanted.step_bytes };
            txn.put(META, &made.to_value());
            meta = Some(made);
        }
        Ok(())
    })?;
    let meta = meta.expect("read or made");
    Geometry { slab_bytes: meta.slab_bytes, step_bytes: meta.step_bytes }.check()
}

/// Totals of a target.
#[derive(Default, Debug)]
pub struct Stock {
    pub extents: Vec<Extent>,
    pub cells: i64,
    pub under_replicated_cells: i64,
    pub overlay_count: i64,
    pub overlay_bytes: i64,
}

/// One pass over the index at open: every extent in use, and the counters.
pub fn take_stock(kv: &SharedKv) -> Result<Stock> {
    let mut stock = Stock::default();
    kv.read(&mut |r| {
        for letter in [BASE, PREPARED] {
            each(r, letter, |_, value| {
                stock.extents.push(Fragment::from_value(value)?.extent);
                Ok(())
            })?;
        }
        each(r, OVERLAY, |_, value| {
            let overlay = Overlay::from_value(value)?;
            stock.extents.push(overlay.extent);
            stock.overlay_count += 1;
            stock.overlay_bytes += i64::from(overlay.len);
            Ok(())
        })?;
        each(r, HEADER, |_, value| {
            let header = Header::from_value(value)?;
            stock.cells += 1;
            stock.under_replicated_cells += i64::from(header.missing != 0);
            Ok(())
        })
    })?;
    Ok(stock)
}

/// Visits every entry of a letter; the first problem ends the visit.
pub fn each(r: &dyn Read, letter: u8, mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()> {
    let (start, end) = letter_range(letter);
    let mut problem = Ok(());
    r.scan(&start, &end, &mut |key, value| {
        problem = visit(key, value).map_err(|e| e.doing(format_args!("entry {key:02x?}")));
        if problem.is_ok() { Scan::More } else { Scan::Stop }
    })?;
    problem
}
