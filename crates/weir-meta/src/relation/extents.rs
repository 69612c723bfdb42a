//! Ranges of files: which file movers get next, and what they get of it.
//!
//! Ranges of one file go to one mover, in order, so that home always shows a prefix. `next_work` decides; the
//! facts are read here, and the work is recorded as assigned.
use super::order::{Touch, touches};
use super::rules::Excluded;
use super::ship_queue::{Batch, FILES_SCANNED, ShipQueue, WorkRequest, is_in_conflict};
use super::steps::{Effect, files_of};
use super::{store, tree};
use crate::namespace::find_inode;
use crate::record::Inode;
use crate::tables;
use bytes::Bytes;
use weir_proto::relation::{Expected, ExtentWork, Finish, What};
use weir_proto::{InodeId, Result};
use weir_relation::dirty::FINISH;
use weir_relation::files::ExtentOut;
use weir_relation::next_work::{Capacity, Facts, Work, next_work};

impl ShipQueue {
    /// Ranges of files that may go now.
    pub fn extents(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<()> {
        let mut left = request.bytes;
        for ino in std::mem::take(&mut self.ends_early) {
            self.file(request, batch, ino, true, &mut left)?;
        }
        if !self.paths_change {
            self.ready_files(request, batch, &mut left)?;
        }
        self.check_in_tests();
        Ok(())
    }

    /// Ranges of touched files, and of those ahead of the sweep.
    fn ready_files(&mut self, request: &WorkRequest<'_>, batch: &mut Batch, left: &mut u64) -> Result<()> {
        for ino in self.files.ready.take_soon() {
            if is_full(request, batch, *left) || !self.collect_file(request, batch, ino, left)? {
                self.files.ready.put_back(ino);
            }
        }
        // In turns, so that neither new nor old work delays the other.
        let mut scans = FILES_SCANNED;
        self.sweeps_first = !self.sweeps_first;
        if self.sweeps_first {
            self.sweep(request, batch, &mut scans, left)?;
        }
        for ino in self.files.ready.touched(scans) {
            if is_full(request, batch, *left) {
                return Ok(());
            }
            scans -= 1;
            let settled = self.collect_file(request, batch, ino, left)?;
            self.files.ready.note_collected(ino, settled);
        }
        self.sweep(request, batch, &mut scans, left)
    }

    /// Assigns the work on a file that may go now; returns whether there is no more until it is touched.
    fn collect_file(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        ino: InodeId,
        left: &mut u64,
    ) -> Result<bool> {
        let settled = self.file(request, batch, ino, false, left)?;
        if settled {
            self.files.settle(ino, is_in_conflict(request, ino)?);
        }
        Ok(settled)
    }

    /// Continues over all files with dirty ranges, if that is requested.
    fn sweep(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        scans: &mut usize,
        left: &mut u64,
    ) -> Result<()> {
        while let Some(from) = self.files.ready.sweep_from()
            && *scans > 0
            && !is_full(request, batch, *left)
        {
            *scans -= 1;
            let relation = request.relation;
            let next = tables::DIRTY.from(relation, (relation, from, 0));
            match next.collect(request.read, 1, |(_, ino, _), _| ino)?.first().copied() {
                Some(ino) => {
                    let settled = self.collect_file(request, batch, ino, left)?;
                    self.files.ready.swept(ino, settled);
                }
                None => self.files.ready.sweep_ended(),
            }
        }
        Ok(())
    }

    /// A file has changed, or a mover's work on it.
    pub fn touch(&mut self, ino: InodeId) {
        self.files.touch(ino);
    }
    /// A change was ingested.
    pub fn touch_changed(&mut self, what: &What) {
        for touched in touches(what).0 {
            if let Touch::Inode(ino) = touched {
                self.touch(ino);
            }
        }
    }
    /// Touches the files that a change of names concerns.
    pub fn touch_named(&mut self, effect: &Effect) {
        files_of(effect).into_iter().flatten().for_each(|ino| self.touch(ino));
    }
    /// A change that may concern every file.
    pub fn touch_all(&mut self) {
        self.files.ready.touch_all();
    }

    /// Assigns the work on a file that may go now; returns whether there is no more to assign until it is
    /// touched. `ends_early`: its end as well, even if it is not complete.
    fn file(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        ino: InodeId,
        ends_early: bool,
        left: &mut u64,
    ) -> Result<bool> {
        let (read, relation) = (request.read, request.relation);
        if self.is_busy(request, ino) {
            return Ok(false);
        }
        if is_in_conflict(request, ino)? {
            return Ok(true);
        }
        let Some(remote) = tree::find_remote(read, relation, ino)? else {
            // Its name comes first; or it has none any more, or is not to be copied.
            let excluded = Excluded::load(read, relation, request.record.volume)?;
            // One that a mover creates just now was included before.
            let is_coming = self.names_out.values().any(|out| out.step.ino == ino);
            if find_inode(read, ino)?.is_none() || !is_coming && excluded.why(ino, false)?.is_some() {
                batch.gone.push(ino);
            }
            return Ok(true);
        };
        // Even if a client still has it open: home is to delete it.
        let Some(inode) = find_inode(read, ino)?.filter(|inode| inode.nlink > 0) else {
            batch.gone.push(ino);
            return Ok(true);
        };
        let Some(path) = tree::path(read, relation, ino)?.map(Bytes::from) else {
            return Ok(false);
        };
        let parts = request.record.rules().parts;
        let capacity = Capacity {
            bytes: *left,
            extents: request.items.saturating_sub(batch.extents.len()),
            away: AWAY_MAX.saturating_sub(batch.away.len()),
        };
        let work = self.next_work_on(request, ino, &inode, ends_early, capacity)?;
        *left = work.bytes_left;
        batch.away.extend(work.away.iter().map(|(from, to)| (ino, *from, *to)));
        let begun = batch.extents.len();
        let file = File { ino, inode: &inode, path, expect: tree::expected(&remote) };
        self.assign_extents(request, batch, &file, &work)?;
        if batch.extents.len() > begun && (!remote.writing || parts) {
            batch.begun.push(ino);
        }
        Ok(work.settled)
    }

    /// Whether a file has to wait for movers, or for a change of its name.
    fn is_busy(&self, request: &WorkRequest<'_>, ino: InodeId) -> bool {
        let one_batch = request.record.rules().parts;
        !self.files.state(ino).may_ship(request.session, one_batch) || self.files.drains(ino)
    }

    fn next_work_on(
        &self,
        request: &WorkRequest<'_>,
        ino: InodeId,
        inode: &Inode,
        ends_early: bool,
        capacity: Capacity,
    ) -> Result<Work> {
        let (read, relation) = (request.read, request.relation);
        let ranges = store::dirty_of(read, relation, ino)?;
        let finish = store::dirty_finish(read, relation, ino)?.map(|finish| finish.newest);
        let mut evicted = if inode.evicted > 0 { store::evicted_of(read, ino)? } else { Vec::new() };
        // Bytes on targets past the end in its last stripe are of writes that a truncation has overtaken.
        let stripe = inode.layout.map_or(u64::MAX, |l| l.stripe_bytes());
        let up = |to: u64| to.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
        evicted.iter_mut().for_each(|(_, to)| *to = up(*to));
        let out: Vec<_> = self.files.ranges(ino).filter(|(start, _)| *start != FINISH).collect();
        let unfinished = ends_early && store::is_unfinished(read, relation, ino)?;
        let facts = Facts {
            ranges: &ranges,
            size: inode.size,
            finish,
            first_truncation: self.first_truncation(ino),
            out: &out,
            evicted: &evicted,
            in_parts: request.record.rules().parts,
            ends_early,
            unfinished,
        };
        Ok(next_work(self.files.state(ino), &facts, capacity))
    }

    fn assign_extents(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        file: &File<'_>,
        work: &Work,
    ) -> Result<()> {
        let ino = file.ino;
        let inline = tables::DATA.get(request.read, ino)?.map(Bytes::from);
        for extent in &work.extents {
            let (start, len, mark) = (extent.start, extent.len, extent.mark);
            let bytes = inline.as_ref().map(|bytes| slice_of(bytes, start, len));
            let out = ExtentOut { end: start + len, mark, finish: None };
            self.files.assign_range(ino, request.session, start, out);
            batch.extents.push(file.work(start, len, bytes, None));
        }
        if let Some(mark) = work.end
            && let Some(present) = tree::present(request.read, ino)?
        {
            let out = ExtentOut { end: FINISH, mark, finish: Some(present.size) };
            self.files.assign_range(ino, request.session, FINISH, out);
            let finish = Finish { size: present.size, attrs: present.attrs };
            batch.extents.push(file.work(FINISH, 0, None, Some(finish)));
        }
        Ok(())
    }
}

/// A file to ship.
struct File<'a> {
    ino: InodeId,
    inode: &'a Inode,
    path: Bytes,
    expect: Expected,
}

impl File<'_> {
    fn work(&self, offset: u64, len: u64, inline: Option<Bytes>, finish: Option<Finish>) -> ExtentWork {
        ExtentWork {
            ino: self.ino,
            path: self.path.clone(),
            offset,
            len,
            layout: self.inode.layout,
            object: self.inode.object(self.ino),
            layered: self.inode.layered() > 0,
            inline,
            expect: self.expect.clone(),
            finish,
        }
    }
}

/// Ranges that are recalled from another home at a time.
const AWAY_MAX: usize = 16;

/// Bytes `start..start + len` of an inline file: zeros after its data.
fn slice_of(bytes: &Bytes, start: u64, len: u64) -> Bytes {
    let mut out = vec![0; len as usize];
    let from = (start as usize).min(bytes.len());
    let n = (bytes.len() - from).min(out.len());
    out[..n].copy_from_slice(&bytes[from..from + n]);
    Bytes::from(out)
}

/// Whether the mover's limit is reached.
fn is_full(request: &WorkRequest<'_>, batch: &Batch, left: u64) -> bool {
    left == 0 || batch.extents.len() >= request.items
}
