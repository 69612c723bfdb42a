//! The loop that scrubs a target: some cells, a pause, some more. `scrub.rs` decides when a pass is due.
//!
//! Invariant: damage that it finds is counted and repaired as damage that a reader finds. A cell that is
//! written meanwhile is read in its state before or after the write.
use crate::format::Scrub;
use crate::membership::{Acting, Membership};
use crate::scrub::{Scrubber, begin, is_under_way};
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::{Clock, Env, WallTime};
use weir_proto::data::{ReadView, ScrubPass, ScrubReport, ScrubTarget};
use weir_proto::{CellId, Error, ErrorKind, Result};
use weir_rpc::{Handled, Reply};

/// Cells that are read in sequence without a pause.
const CELLS_AT_ONCE: usize = 16;
/// The cost of a cell in addition to its bytes.
const CELL_COST_BYTES: u64 = 4096;
/// How often the loop checks whether a pass is due, and how often its position is recorded.
const CHECK_EVERY: Duration = Duration::from_secs(60);
const NOTE_EVERY: Duration = Duration::from_secs(10);

/// Result of verifying some cells.
#[derive(Default)]
struct Found {
    cells: u64,
    bytes: u64,
    damaged_cells: u64,
    last: Option<CellId>,
}

pub(crate) struct Scrubbing {
    env: Env,
    members: Arc<Membership>,
    scrubber: Scrubber,
}

enum Step {
    Nothing,
    Read { bytes: u64, bytes_per_s: u64 },
}

impl Scrubbing {
    pub fn new(env: &Env, members: &Arc<Membership>) -> Arc<Scrubbing> {
        Arc::new(Scrubbing { env: env.clone(), members: members.clone(), scrubber: Scrubber::default() })
    }

    pub fn scrub_target(&self, r: &ScrubTarget) -> Handled {
        let report = || {
            if r.start {
                self.start(self.env.clock.wall(), r.bytes_per_s)?;
            }
            let used = self.members.store().report().used;
            self.with_scrub(|scrub| ScrubReport { used, pass: scrub.pass, last: scrub.last })
        };
        Handled::Now(report().map(|report| Reply::new(&report)))
    }

    fn with_scrub<T>(&self, work: impl FnOnce(&mut Scrub) -> T) -> Result<T> {
        self.scrubber.with(|| self.members.store().index().scrub(), work)
    }
    fn note(&self) -> Result<()> {
        let now = self.with_scrub(|scrub| scrub.clone())?;
        self.members.store().note_scrub(&now)
    }
    fn start(&self, now: WallTime, bytes_per_s: u64) -> Result<()> {
        self.members.store().usable()?;
        self.with_scrub(|scrub| begin(scrub, now, bytes_per_s))?;
        self.note()?;
        self.scrubber.wanted.notify_one();
        Ok(())
    }
    async fn scrub_some(&self) -> Result<Step> {
        if self.members.store().usable().is_err() {
            return Ok(Step::Nothing);
        }
        let (now, used) = (self.env.clock.wall(), self.members.store().report().used);
        let (under_way, after, bytes_per_s) = self.with_scrub(|scrub| {
            let under_way = is_under_way(scrub, now, used);
            (under_way, scrub.after, scrub.bytes_per_s)
        })?;
        if !under_way {
            return Ok(Step::Nothing);
        }
        let cells = self.members.store().index().next_cells(after, CELLS_AT_ONCE)?;
        let mut reads = Vec::new();
        for cell in &cells {
            if let Some(acting) = self.members.place_of_cell(*cell)? {
                reads.push((acting, *cell));
            }
        }
        let mut found = self.env.tasks.blocking(move || verify_all(&reads)).await?;
        found.last = cells.last().copied();
        let ended = cells.len() < CELLS_AT_ONCE;
        let bytes = found.bytes + cells.len() as u64 * CELL_COST_BYTES;
        let now = self.env.clock.wall().0;
        let done = self.with_scrub(|scrub| {
            // Another pass was requested meanwhile.
            if scrub.after != after {
                return None;
            }
            let pass = scrub.pass.as_mut()?;
            pass.cells += found.cells;
            pass.bytes += found.bytes;
            pass.damaged_cells += found.damaged_cells;
            scrub.after = found.last.or(scrub.after);
            if ended {
                pass.ended_ns = Some(now);
                scrub.last = scrub.pass;
            }
            scrub.pass.filter(|_| ended)
        })?;
        if let Some(ScrubPass { cells, bytes, damaged_cells, .. }) = done {
            tracing::info!(target_id = %self.members.target(), cells, bytes, damaged_cells, "scrubbed");
        }
        Ok(Step::Read { bytes, bytes_per_s })
    }
}

/// Scrubs a target until it ends.
pub(crate) async fn scrub(clock: Clock, target: Weak<Scrubbing>) {
    let (mut noted, mut unsaved) = (clock.now(), true);
    while let Some(scrubbing) = target.upgrade() {
        let id = scrubbing.members.target();
        let begun = clock.now();
        let step = scrubbing.scrub_some().await;
        let took = clock.now().since(begun);
        let pause = match step {
            Ok(Step::Nothing) => None,
            Ok(Step::Read { bytes, bytes_per_s: 0 }) => Some(took.max(pause_of(bytes, u64::MAX))),
            Ok(Step::Read { bytes, bytes_per_s }) => {
                Some(pause_of(bytes, bytes_per_s).saturating_sub(took).max(took / 4))
            }
            Err(e) => {
                tracing::warn!(target_id = %id, "scrub: {e}; it is tried again");
                None
            }
        };
        unsaved |= pause.is_some();
        if unsaved && (pause.is_none() || clock.now().since(noted) >= NOTE_EVERY) {
            (noted, unsaved) = (clock.now(), false);
            if let Err(e) = scrubbing.note() {
                tracing::debug!(target_id = %id, "note how far the scrub is: {e}");
            }
        }
        match pause {
            Some(pause) => clock.sleep(pause).await,
            // Or on request.
            None => drop(clock.timeout(CHECK_EVERY, scrubbing.scrubber.wanted.notified()).await),
        }
    }
}

fn pause_of(bytes: u64, bytes_per_s: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1))) as u64)
}

/// Reads cells with their overlays at their own targets, else their bases. Cells that are gone meanwhile do
/// not count.
fn verify_all(reads: &[(Acting, CellId)]) -> Result<Found> {
    let mut found = Found::default();
    for (acting, cell) in reads {
        let (store, scope) = (&acting.store, &acting.scope);
        let is_own = usize::from(cell.index) == acting.position && scope.is_data(*cell);
        let view = if is_own { ReadView::Merged } else { ReadView::Base };
        let verified = store.verify(scope, *cell, view);
        match verified {
            Ok(bytes) => (found.cells, found.bytes) = (found.cells + 1, found.bytes + bytes),
            Err(Error { kind: ErrorKind::Damaged, .. }) => {
                (found.cells, found.damaged_cells) = (found.cells + 1, found.damaged_cells + 1);
            }
            Err(e) if e.kind == ErrorKind::Io => return Err(e),
            Err(_) => {}
        }
    }
    Ok(found)
}
