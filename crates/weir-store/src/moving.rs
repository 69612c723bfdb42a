//! A place of a group moves here: the target that receives it copies the member's cells one by one.
//!
//! It compares digests of all cells with the member's and copies those that differ, in repeated passes, until
//! few are left. It reports that, and the coordinator gives the group an epoch in which the member accepts no
//! change of the place. After one more pass both hold the same cells, and the new target becomes the member.
//! Clients read and write the member except during that last pass; a request to a closed place waits for the
//! next map.
//!
//! Damaged cells are not copied: the member repairs them from its peers, and they are copied later.
use crate::calls::Calls;
use crate::cells::Scope;
use crate::copies::Copies;
use crate::damage::Damage;
use crate::fences::Fences;
use crate::handed_over::HandedOver;
use crate::image::{self, Entry};
use crate::logs::Agreement;
use crate::membership::Membership;
use crate::peers::join_all;
use crate::requests::Requests;
use crate::store::PLACE_LIST_MAX;
use crate::stripes::STRIPES_AT_ONCE;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use weir_env::{BoxFuture, Env};
use weir_kv::CommitSeq;
use weir_proto::coord::PlaceCopied;
use weir_proto::data::*;
use weir_proto::map::{ClusterMap, Member, MemberState};
use weir_proto::{CellId, Epoch, Error, ErrorKind, PgId, Result, TargetId};
use weir_rpc::Handled;

/// The place is closed while this number of cells is copied, for a moment.
const CELLS_LEFT_MAX: usize = 64;
/// Passes of one round. The place is closed after these even if writes are as fast as the copying.
const PASSES_MAX: usize = 8;
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

/// A place that moves to this target.
struct Coming {
    to: TargetId,
    scope: Scope,
    from: TargetId,
    closed: bool,
}

impl Coming {
    fn place(&self) -> Place {
        Place { target: self.from, group: self.scope.group, epoch: self.scope.epoch }
    }
    fn report(&self, done: bool) -> PlaceCopied {
        let Scope { group, epoch, .. } = self.scope;
        PlaceCopied { target: self.to, group, epoch, done }
    }
}

pub(crate) struct Moves {
    env: Env,
    members: Arc<Membership>,
    parts: MoveParts,
    /// Groups with a task that copies a place.
    moving: Mutex<BTreeSet<PgId>>,
}

/// The parts of a target that a move uses.
pub(crate) struct MoveParts {
    pub calls: Arc<Calls>,
    pub requests: Arc<Requests>,
    pub agreement: Arc<Agreement>,
    pub fences: Arc<Fences>,
    pub copies: Arc<Copies>,
    pub damage: Arc<Damage>,
    pub handed_over: Arc<HandedOver>,
}

impl Moves {
    pub fn new(env: &Env, members: &Arc<Membership>, parts: MoveParts) -> Arc<Moves> {
        Arc::new(Moves { env: env.clone(), members: members.clone(), parts, moving: Mutex::default() })
    }

    // ---- the member

    pub fn list_place(&self, r: ListPlace) -> Handled {
        self.parts.requests.blocking(r.place, move |store, acting| {
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

    pub fn copy_cell(&self, r: CopyCell) -> Handled {
        let damage = self.parts.damage.clone();
        self.parts.requests.blocking(r.place, move |store, acting| {
            let copied = store.image_of(&acting.scope, r.cell, r.from);
            if copied.as_ref().is_err_and(|e| e.kind == ErrorKind::Damaged) {
                damage.suspect(r.cell);
            }
            copied
        })
    }

    // ---- the target that takes the place

    /// Starts a task for each place that moves to the target; it copies until the move has ended.
    pub fn begin(self: &Arc<Self>) {
        let (map, to) = (self.members.map(), self.members.target());
        let comes = |group: &PgId| map.move_of(*group).is_some_and(|found| found.to == to);
        self.parts.copies.end_others(|group| comes(group) || is_behind(&map, *group, to));
        for found in map.moves.iter().filter(|found| found.to == to) {
            if self.moving().insert(found.group) {
                let (moves, group) = (Arc::downgrade(self), found.group);
                self.env.tasks.spawn("copy a place", follow(moves, group));
            }
        }
    }
    fn moving(&self) -> MutexGuard<'_, BTreeSet<PgId>> {
        self.moving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a group that moves here.
    fn coming(&self, group: PgId) -> Option<Coming> {
        let (map, to) = (self.members.map(), self.members.target());
        let found = map.move_of(group).filter(|found| found.to == to)?;
        let group = map.group(group)?;
        let member = group.members.get(usize::from(found.place))?;
        let closed = found.closed_in == group.epoch && group.epoch > Epoch(0);
        Some(Coming { to, scope: Scope::of(group), from: member.target, closed })
    }

    async fn take_place(&self, coming: &Coming) -> Result<()> {
        let at = GroupAt { group: coming.scope.group, epoch: coming.scope.epoch };
        let passes = if coming.closed { 1 } else { PASSES_MAX };
        for _ in 0..passes {
            let pass = self.copy_pass(coming).await?;
            tracing::debug!(
                to = %coming.to, from = %coming.from, group = %coming.scope.group,
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
        self.parts.fences.take_fences_of(coming.from, vec![at]).await?;
        if coming.closed {
            // The planner learns how large the place is; if it does not, it estimates that.
            if let Err(e) = self.parts.copies.report().await {
                tracing::debug!("report a copied place: {e}");
            }
        }
        self.members.peers().place_copied(coming.report(coming.closed)).await?;
        if coming.closed {
            self.parts.agreement.note_copied(coming.scope.group);
            self.parts.copies.end(coming.scope.group);
            tracing::info!("{} has the place of {} in {}", coming.to, coming.from, coming.scope.group);
        }
        Ok(())
    }

    /// Copies the cells that differ, and drops those that the member does not have.
    async fn copy_pass(&self, coming: &Coming) -> Result<Pass> {
        let (mut pass, mut after) = (Pass::default(), None);
        let group = coming.scope.group;
        self.parts.copies.begin(group);
        loop {
            let request =
                ListPlace { place: coming.place(), after, close: coming.closed, limit: PLACE_LIST_MAX };
            let (list, _) = self.parts.calls.ask(coming.from, request, Vec::new()).await?;
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
                            self.parts.copies.seen(group, Some(bytes));
                        }
                        Err(e) => pass.problem = Some(e),
                    }
                }
                self.members.store().durable(committed).await?;
                self.parts.copies.report_if_due();
                // Writers wait while the place is closed.
                if !coming.closed {
                    self.parts.copies.keep_pace(bytes_copied).await;
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
        let (store, group) = (self.members.store().clone(), coming.scope.group);
        let digests = move || store.index().read(|r| image::digests_up_to(r, group, after, last));
        let own = self.env.tasks.blocking(digests).await?.1;
        let by_cell = |all: Vec<CellDigest>| -> BTreeMap<CellId, u64> {
            all.into_iter().map(|c| (c.cell, c.digest)).collect()
        };
        let (own, theirs) = (by_cell(own), by_cell(theirs));
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
            let (image, payload) = self.parts.calls.ask(coming.from, request, Vec::new()).await?;
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
        let (store, scope) = (self.members.store().clone(), coming.scope);
        let put = self.env.tasks.blocking(move || store.put_image(&scope, cell, entries)).await?;
        Ok((put, bytes))
    }
}

/// Copies the place until the move or the target ends.
async fn follow(moves: Weak<Moves>, group: PgId) {
    while let Some(moves) = moves.upgrade() {
        let version = moves.members.map().version;
        let Some(coming) = moves.coming(group) else {
            moves.moving().remove(&group);
            // If the move was cancelled, cells may have arrived after others were dropped.
            moves.parts.handed_over.search_again();
            return;
        };
        match moves.take_place(&coming).await {
            // The next map has the next step.
            Ok(()) => drop(moves.members.peers().wait_newer(version, MAP_PATIENCE).await),
            Err(e) => {
                tracing::debug!(to = %coming.to, %group, closed = coming.closed, "copy a place: {e}");
                moves.env.clock.sleep(if coming.closed { CLOSED_PAUSE } else { RETRY_PAUSE }).await;
            }
        }
    }
}

fn is_behind(map: &ClusterMap, group: PgId, target: TargetId) -> bool {
    let is_so = |m: &Member| m.target == target && m.state == MemberState::Behind;
    map.group(group).is_some_and(|group| group.members.iter().any(is_so))
}
