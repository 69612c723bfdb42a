//! A place of a group moves here: the target that receives it copies the member's cells one by one.
//!
//! It compares digests of all cells with the member's and copies those that differ, in repeated passes, until
//! few are left. It reports that, and the coordinator gives the group an epoch in which the member accepts no
//! change of the place. After one more pass both hold the same cells, and the new target becomes the member.
//! Clients read and write the member except during that last pass; a request to a closed place waits for the
//! next map.
//!
//! Damaged cells are not copied: the member repairs them from its peers, and they are copied later.
use crate::alloc::Extent;
use crate::cells::{self, Scope};
use crate::format::*;
use crate::image::{self, Entry};
use crate::peers::join_all;
use crate::refill::lock;
use crate::service::{STRIPES_AT_ONCE, StorageNode, Target};
use crate::store::Store;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::BoxFuture;
use weir_kv::CommitSeq;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::coord::PlaceCopied;
use weir_proto::data::*;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Move};
use weir_proto::{CellId, Epoch, Error, ErrorKind, PgId, Result, Seq, TargetId};
use weir_rpc::Handled;

/// The place is closed while this number of cells is copied, for a moment.
const CELLS_LEFT_MAX: usize = 64;
/// Passes of one round. The place is closed after these even if writes are as fast as the copying.
const PASSES_MAX: usize = 8;
/// Cells of one listing.
const LIST_MAX: u32 = 1024;
/// Bytes on slabs, and bytes of the index, in one answer: a fragment takes 4 MiB at most.
const ANSWER_BYTES: usize = 2 << 20;
const ANSWER_INDEX_BYTES: usize = 256 << 10;
/// Pause after a copy that failed: another member is repaired, or a target does not answer. Writes wait while
/// the place is closed.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
const CLOSED_PAUSE: Duration = Duration::from_millis(20);
/// How long to wait for the next map before the move's state is checked again.
const MAP_PATIENCE: Duration = Duration::from_secs(2);
/// Entries of one cell: its overlays may be many small ones.
const ENTRIES_MAX: usize = 1 << 20;

/// Result of a pass.
#[derive(Default)]
struct Pass {
    copied: usize,
    problem: Option<Error>,
}

/// A place that moves to a target of this node.
#[derive(Clone)]
struct Coming {
    to: Arc<Target>,
    scope: Scope,
    from: TargetId,
    closed: bool,
}

impl Coming {
    fn place(&self) -> Place {
        Place { target: self.from, group: self.scope.group, epoch: self.scope.epoch }
    }
    fn said(&self, done: bool) -> PlaceCopied {
        let Scope { group, epoch, .. } = self.scope;
        PlaceCopied { target: self.to.store.target, group, epoch, done }
    }
}

// ---- the member

impl StorageNode {
    pub(crate) fn list_place(&self, r: ListPlace) -> Handled {
        self.blocking(r.place, move |store, acting| {
            let found = acting.map.move_of(r.place.group);
            let found =
                found.filter(|found| usize::from(found.place) == acting.position).ok_or_else(|| {
                    Error::stale(format!("{} does not leave {}", r.place.target, r.place.group))
                })?;
            if r.close && found.closed_in != r.place.epoch {
                return Err(Error::stale(format!("{} is not closed in {}", r.place.group, r.place.epoch)));
            }
            let closed = if r.close { store.close_group(&acting.scope)? } else { CommitSeq(0) };
            let (seen, list) = store.list_place(&acting.scope, r.after, r.limit)?;
            Ok((closed.max(seen), list, Vec::new()))
        })
    }

    pub(crate) fn copy_cell(&self, r: CopyCell) -> Handled {
        self.blocking(r.place, move |store, acting| {
            let copied = store.image_of(&acting.scope, r.cell, r.from);
            if copied.as_ref().is_err_and(|e| e.kind == ErrorKind::Damaged) {
                acting.target.suspect(r.cell);
            }
            let (seen, image, payload) = copied?;
            Ok((seen, image, payload))
        })
    }
}

impl Store {
    fn close_group(&self, scope: &Scope) -> Result<CommitSeq> {
        self.change(&mut |txn, _| cells::close(txn, scope.group, scope.epoch))
    }

    fn list_place(&self, scope: &Scope, after: Option<CellId>, limit: u32) -> Result<(CommitSeq, PlaceList)> {
        self.usable()?;
        let mut list = PlaceList { cells: Vec::new(), more: false };
        let seen = self.kv().read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            let limit = limit.clamp(1, LIST_MAX) as usize;
            (list.cells, list.more) = image::digests(r, scope.group, after, limit)?;
            Ok(())
        })?;
        Ok((seen, list))
    }

    /// A cell's entries from the given one on, with their bytes; none if the cell is of another group.
    fn image_of(&self, scope: &Scope, cell: CellId, from: u32) -> Result<(CommitSeq, CellImage, Vec<Bytes>)> {
        self.usable()?;
        let _guard = self.begin_read();
        let mut entries = Vec::new();
        let seen = self.kv().read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            let header: Option<Header> = crate::entries::get(r, &header_key(cell))?;
            let is_mine = header.is_some_and(|header| header.group == scope.group);
            entries = if is_mine { image::entries(r, cell)? } else { Vec::new() };
            Ok(())
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
        let data = self.read_extent(extent, len)?;
        check_bytes(cell, entry, &data)?;
        Ok(data)
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

// ---- the target that takes the place

impl StorageNode {
    /// Starts a task for each place that moves to the target; it copies until the move has ended.
    pub(crate) fn begin_moves(&self, target: &Arc<Target>) {
        let map = self.peers.map();
        let to = target.store.target;
        let comes = |group: &PgId| map.move_of(*group).is_some_and(|found| found.to == to);
        lock(target).end_others(|group| comes(group) || is_behind(&map, *group, to));
        for found in map.moves.iter().filter(|found| found.to == to) {
            if lock(target).moving.insert(found.group) {
                let (node, target, group) = (Arc::downgrade(&self.shared()), target.clone(), found.group);
                self.env.tasks.spawn("copy a place", async move {
                    follow_move(&node, &target, group).await;
                    lock(&target).copy_ended(group);
                });
            }
        }
    }

    async fn take_place(&self, coming: &Coming) -> Result<()> {
        let at = GroupAt { group: coming.scope.group, epoch: coming.scope.epoch };
        let passes = if coming.closed { 1 } else { PASSES_MAX };
        for _ in 0..passes {
            let pass = self.copy_pass(coming).await?;
            tracing::debug!(
                to = %coming.to.store.target, from = %coming.from, group = %coming.scope.group,
                epoch = %coming.scope.epoch, closed = coming.closed, copied = pass.copied, "a pass over a place"
            );
            if let Some(e) = pass.problem {
                return Err(e);
            }
            if pass.copied <= CELLS_LEFT_MAX {
                break;
            }
        }
        // The member's fences do not rise while it is closed.
        self.take_fences_of(&coming.to, coming.from, vec![at]).await?;
        if coming.closed {
            // The planner learns how large the place is; if it does not, it estimates that.
            let reports = lock(&coming.to).reports(self.env.clock.now());
            if let Err(e) = self.peers.refill_reported(reports).await {
                tracing::debug!("report a copied place: {e}");
            }
        }
        self.peers.place_copied(coming.said(coming.closed)).await?;
        if coming.closed {
            coming.to.tails.note_group(coming.scope.group);
            lock(&coming.to).end(coming.scope.group);
            tracing::info!(
                "{} has the place of {} in {}",
                coming.to.store.target,
                coming.from,
                coming.scope.group
            );
        }
        Ok(())
    }

    /// Copies the cells that differ, and drops those that the member does not have.
    async fn copy_pass(&self, coming: &Coming) -> Result<Pass> {
        let (mut pass, mut after) = (Pass::default(), None);
        let group = coming.scope.group;
        lock(&coming.to).begin(coming.to.store.target, group, self.env.clock.now());
        loop {
            let request = ListPlace { place: coming.place(), after, close: coming.closed, limit: LIST_MAX };
            let (list, _) = self.ask(coming.from, request, Vec::new()).await?;
            let last = list.cells.last().map(|c| c.cell).filter(|_| list.more);
            if list.more && last.is_none_or(|last| after.is_some_and(|after| last <= after)) {
                return Err(Error::damaged(format!("cells of {}: listed twice", coming.from)));
            }
            let differing = self.differing(coming, after, last, list.cells).await?;
            for some in differing.chunks(STRIPES_AT_ONCE) {
                let copies = some.iter().map(|cell| {
                    Box::pin(self.copy_one(coming, *cell)) as BoxFuture<'_, Result<(CommitSeq, u64)>>
                });
                let (mut committed, mut bytes_copied) = (CommitSeq(0), 0);
                for copied in join_all(copies.collect()).await {
                    match copied {
                        Ok((seq, bytes)) => {
                            committed = committed.max(seq);
                            pass.copied += 1;
                            bytes_copied += bytes;
                            lock(&coming.to).seen(group, Some(bytes));
                            coming.to.copied.add(bytes);
                        }
                        Err(e) => pass.problem = Some(e),
                    }
                }
                coming.to.store.durable(committed).await?;
                self.report_refill(&coming.to);
                // Writers wait while the place is closed.
                if !coming.closed {
                    self.keep_pace(&coming.to, bytes_copied).await;
                }
            }
            match last {
                Some(cell) => after = Some(cell),
                None => return Ok(pass),
            }
        }
    }

    /// The cells after the given one, up to the last of the member's listing, that differ here.
    async fn differing(
        &self,
        coming: &Coming,
        after: Option<CellId>,
        last: Option<CellId>,
        theirs: Vec<CellDigest>,
    ) -> Result<Vec<CellId>> {
        let (store, group) = (coming.to.store.clone(), coming.scope.group);
        let own = self.env.tasks.blocking(move || {
            let mut own = Vec::new();
            store.kv().read(&mut |r| {
                own = image::digests_up_to(r, group, after, last)?;
                Ok(())
            })?;
            Ok::<_, Error>(own)
        });
        let by_cell = |all: Vec<CellDigest>| -> BTreeMap<CellId, u64> {
            all.into_iter().map(|c| (c.cell, c.digest)).collect()
        };
        let (own, theirs) = (by_cell(own.await?), by_cell(theirs));
        let gone = own.keys().filter(|cell| !theirs.contains_key(cell)).copied();
        let other =
            theirs.iter().filter(|(cell, digest)| own.get(cell) != Some(digest)).map(|(cell, _)| *cell);
        Ok(gone.chain(other).collect())
    }

    /// The commit to wait for, and the bytes that were copied.
    async fn copy_one(&self, coming: &Coming, cell: CellId) -> Result<(CommitSeq, u64)> {
        let (mut entries, mut bytes) = (Vec::new(), 0);
        loop {
            let request = CopyCell { place: coming.place(), cell, from: entries.len() as u32 };
            let (image, payload) = self.ask(coming.from, request, Vec::new()).await?;
            let (is_last, none) = (!image.more, image.entries.is_empty());
            let mut at = 0usize;
            for CellEntry { kind: letter, number, value, bytes: len } in image.entries {
                let end = at.saturating_add(len as usize);
                if end > payload.len() {
                    return Err(Error::damaged(format!("image of cell {cell}: its bytes are not all there")));
                }
                entries.push((Entry { letter, number, value }, payload.slice(at..end)));
                at = end;
            }
            bytes += payload.len() as u64;
            if is_last {
                break;
            }
            if none || entries.len() > ENTRIES_MAX {
                return Err(Error::damaged(format!("image of cell {cell}: it has no end")));
            }
        }
        let (store, scope) = (coming.to.store.clone(), coming.scope);
        let put = self.env.tasks.blocking(move || store.put_image(&scope, cell, entries)).await?;
        Ok((put, bytes))
    }
}

/// Copies the place until the move or the node ends.
async fn follow_move(node: &Weak<StorageNode>, target: &Arc<Target>, group: PgId) {
    while let Some(node) = node.upgrade() {
        let map = node.peers.map();
        let found = map.move_of(group).filter(|found| found.to == target.store.target);
        let coming = found.zip(map.group(group)).and_then(|(found, group)| coming(target, group, found));
        let Some(coming) = coming else { return };
        match node.take_place(&coming).await {
            // The next map has the next step.
            Ok(()) => drop(node.peers.wait_newer(map.version, MAP_PATIENCE).await),
            Err(e) => {
                tracing::debug!(to = %target.store.target, %group, closed = coming.closed, "copy a place: {e}");
                node.env.clock.sleep(if coming.closed { CLOSED_PAUSE } else { RETRY_PAUSE }).await;
            }
        }
    }
}

fn is_behind(map: &ClusterMap, group: PgId, target: TargetId) -> bool {
    let is_so = |m: &Member| m.target == target && m.state == MemberState::Behind;
    map.group(group).is_some_and(|group| group.members.iter().any(is_so))
}

fn coming(target: &Arc<Target>, group: &Group, found: &Move) -> Option<Coming> {
    let member = group.members.get(usize::from(found.place))?;
    let closed = found.closed_in == group.epoch && group.epoch > Epoch(0);
    Some(Coming { to: target.clone(), scope: Scope::of(group), from: member.target, closed })
}

impl Store {
    /// Replaces a cell by another target's image of it. Blocks.
    fn put_image(&self, scope: &Scope, cell: CellId, entries: Vec<(Entry, Bytes)>) -> Result<CommitSeq> {
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
            self.change(&mut |txn, delta| {
                cells::check_epoch(txn, scope.group, scope.epoch)?;
                image::put(txn, scope.group, cell, &placed, delta)
            })
        });
        committed.inspect_err(|_| extents.iter().for_each(|extent| self.forget_extent(*extent)))
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
