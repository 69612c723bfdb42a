//! Directories whose names are at home and not enumerated yet, and directories that are rescanned because
//! their volume mirrors home: which one movers read next, and the operations that wait for one that cannot be
//! read.
//!
//! Directories with waiting operations go first, the others in the background. Kept in memory: the store has
//! the list of directories to read.
use super::record::RelationRecord;
use super::ship_queue::{Batch, ShipQueue, WorkRequest};
use super::{store, tree};
use crate::namespace::volume;
use crate::tables;
use bytes::Bytes;
use std::time::Duration;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::meta::Time;
use weir_proto::relation::{ListWork, RelationId};
use weir_proto::{InodeId, Result};

/// Directories that are read in parallel.
const AT_ONCE: usize = 16;

/// Records scanned for the next ones, in the background.
const SCAN_MAX: usize = 32;
/// Directories that are rescanned in parallel while no client reads them: home has other users.
const AGAIN_AT_ONCE: usize = 2;
/// Records scanned for the next ones: a million of them in some minutes.
const MIRRORED_MAX: usize = 4096;
/// Between two scans for directories that are due.
pub const BETWEEN_SCANS: Duration = Duration::from_secs(1);

/// The relation that a directory's names come from.
pub fn source(read: &dyn Read, dir: InodeId) -> Result<Option<RelationId>> {
    let volume = volume::volume_of(read, dir)?;
    for (id, record) in store::relations(read)?.into_iter().filter(|(_, r)| r.volume == volume) {
        if record.imports && tables::NOT_ENUMERATED.has(read, (id, dir))? {
            return Ok(Some(id));
        }
    }
    Ok(None)
}

/// The relation that a directory mirrors, if any.
pub fn mirrors(read: &dyn Read, dir: InodeId) -> Result<Option<(RelationId, RelationRecord)>> {
    let Some(volume) = volume::find_volume_of(read, dir)? else { return Ok(None) };
    Ok(store::relations(read)?.into_iter().find(|(_, r)| r.volume == volume && r.mirrors()))
}

pub fn is_due(read: &dyn Read, id: RelationId, dir: InodeId, wall: Time, apart: Duration) -> Result<bool> {
    let Some(known) = tables::MIRRORED.get(read, (id, dir))? else { return Ok(false) };
    // A clock that was ahead does not prevent the rescan.
    Ok(known.at.nanos > wall.nanos || known.at.nanos.saturating_add(apart.as_nanos() as i64) <= wall.nanos)
}

/// The oldest time of a directory's last scan at home.
pub fn oldest_scan(read: &dyn Read, id: RelationId) -> Result<Option<Time>> {
    let all = tables::MIRRORED.under(id).collect(read, usize::MAX, |_, record| record.at)?;
    Ok(all.into_iter().min_by_key(|at| at.nanos))
}

impl ShipQueue {
    /// Directories to be read now.
    pub fn lists(
        &mut self,
        request: &WorkRequest<'_>,
        now: Instant,
        wall: Time,
        batch: &mut Batch,
    ) -> Result<()> {
        if !request.record.imports || self.paths_are_changing() {
            return Ok(());
        }
        while let Some(dir) = self.listings.wanted.pop_first() {
            if self.listings.out.len() >= AT_ONCE || batch.listings.len() >= request.items {
                self.listings.wanted.insert(dir);
                return Ok(());
            }
            self.assign_listing(request, now, dir, batch)?;
        }
        let relation = request.relation;
        let next = tables::NOT_ENUMERATED.from(relation, (relation, self.listings.next));
        let found = next.collect(request.read, SCAN_MAX, |(_, dir), _| dir)?;
        let last = found.len() < SCAN_MAX;
        for dir in found {
            if self.listings.out.len() >= AT_ONCE || batch.listings.len() >= request.items {
                return Ok(());
            }
            self.listings.next = InodeId(dir.0 + 1);
            self.assign_listing(request, now, dir, batch)?;
        }
        if last {
            self.listings.next = InodeId(0);
        }
        if request.record.mirrors() { self.lists_again(request, now, wall, batch) } else { Ok(()) }
    }

    /// Directories that were not read for a while, round by round.
    fn lists_again(
        &mut self,
        request: &WorkRequest<'_>,
        now: Instant,
        wall: Time,
        batch: &mut Batch,
    ) -> Result<()> {
        let relation = request.relation;
        let next = tables::MIRRORED.from(relation, (relation, self.listings.next_again));
        let found = next.collect(request.read, MIRRORED_MAX, |(_, dir), _| dir)?;
        let last = found.len() < MIRRORED_MAX;
        for dir in found {
            if self.listings.out.len() >= AGAIN_AT_ONCE || batch.listings.len() >= request.items {
                return Ok(());
            }
            self.listings.next_again = InodeId(dir.0 + 1);
            if is_due(request.read, request.relation, dir, wall, request.record.scans_apart().1)? {
                self.assign_listing(request, now, dir, batch)?;
            }
        }
        if last {
            self.listings.next_again = InodeId(0);
        }
        Ok(())
    }

    fn assign_listing(
        &mut self,
        request: &WorkRequest<'_>,
        now: Instant,
        dir: InodeId,
        batch: &mut Batch,
    ) -> Result<()> {
        let again = !tables::NOT_ENUMERATED.has(request.read, (request.relation, dir))?;
        let is_known = !again || tables::MIRRORED.has(request.read, (request.relation, dir))?;
        if !is_known || !self.listings.is_free(dir, now) {
            return Ok(());
        }
        if let Some(path) = tree::path(request.read, request.relation, dir)?.map(Bytes::from) {
            self.listings.out.insert(dir, request.session);
            batch.listings.push(ListWork { dir, path, again });
        }
        Ok(())
    }
}
