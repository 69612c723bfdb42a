//! Writing a fragment, in three steps: its bytes into a slab, a sync of the slab, its entry in the index.
//!
//! Invariant: the entry is made after the sync. Between the steps nothing names the extent: a crash leaks it.
//! The steps are separate so that writes of several fragments share syncs without a thread for each.
use super::*;

/// After the first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placed {
    /// The version is here already; durable with this commit.
    Before(CommitSeq),
    /// The bytes are in a slab, neither durable nor named.
    Now(Extent),
}

impl Store {
    /// All steps, on a thread that may block; the caller waits for [`Store::durable`] of the result before it
    /// answers.
    pub fn write_fragment(&self, scope: &Scope, write: &FragmentWrite<'_>) -> Result<CommitSeq> {
        match self.place_fragment(scope, write)? {
            Placed::Before(seq) => Ok(seq),
            Placed::Now(extent) => {
                self.slabs.sync_placed(extent).map_err(|e| self.judge(e))?;
                self.crash_point(crash_points::BYTES_WRITTEN);
                self.enter_fragment(scope, write, extent)
            }
        }
    }

    /// Checks the fragment and writes its bytes; blocks.
    pub fn place_fragment(&self, scope: &Scope, write: &FragmentWrite<'_>) -> Result<Placed> {
        self.usable()?;
        scope.check_index(write.cell)?;
        if write.data.len() > CELL_BYTES_MAX as usize {
            return Err(Error::invalid(format!(
                "cell {}: a fragment of {} bytes",
                write.cell,
                write.data.len()
            )));
        }
        if block_crcs(write.data, CHECKSUM_BLOCK as usize) != write.block_crcs {
            return Err(Error::invalid(format!(
                "cell {}: the bytes do not match their checksums",
                write.cell
            )));
        }
        self.forget_lost(scope, write.cell)?;
        let mut admission = Admission::Write;
        let seen = self.kv.read(&mut |r| {
            cells::refuse_lower(r, scope.group, scope.epoch)?;
            admission = self.admit(r, scope, write)?;
            Ok(())
        })?;
        if admission == Admission::Present {
            // A retry: the version is here. Only the mask may have grown.
            let (marked, _) = self.mark_missing(scope, write.cell, write.version, write.missing)?;
            return Ok(Placed::Before(marked.max(seen)));
        }
        let placed = self.slabs.place(write.data, self.kv.durable(), Purpose::NewData);
        placed.map(Placed::Now).map_err(|e| self.judge(e))
    }

    /// Makes placed bytes durable; on an error they are forgotten.
    pub async fn sync_placed(&self, extent: Extent) -> Result<()> {
        let under_way = self.begin_disk();
        let synced = self.slabs.synced(extent, &self.env.tasks).await;
        under_way.end();
        synced.map_err(|e| self.judge(e))?;
        self.crash_point(crash_points::BYTES_WRITTEN);
        Ok(())
    }

    /// Names durable bytes in the index; if that is refused they are forgotten.
    pub fn enter_fragment(
        &self,
        scope: &Scope,
        write: &FragmentWrite<'_>,
        extent: Extent,
    ) -> Result<CommitSeq> {
        let fragment = Fragment {
            version: write.version,
            epoch: scope.epoch,
            seal: write.mode == WriteMode::PrepareSeal,
            missing: write.missing,
            extent,
            fragment_bytes: write.data.len() as u32,
            folded_seq: folded_seq_of(scope, write.cell, write.folded_seqs),
            folded_seqs: write.folded_seqs.to_vec(),
            block_crcs: write.block_crcs.to_vec(),
        };
        let committed = self.commit_bytes_more(extent, &mut |txn, delta| {
            cells::check_epoch(txn, scope.group, scope.epoch)?;
            if self.admit(txn, scope, write)? == Admission::Present {
                delta.dropped.push(extent);
                return Ok(());
            }
            match write.mode {
                WriteMode::Fresh | WriteMode::Fill => {
                    cells::fresh(txn, scope, write.cell, fragment.clone(), delta)
                }
                WriteMode::Prepare | WriteMode::PrepareSeal => {
                    cells::prepare(txn, scope, write.cell, &fragment, delta)
                }
            }
        })?;
        self.crash_point(crash_points::FRAGMENT_LOGGED);
        self.counters.fragment_bytes_written.fetch_add(write.data.len() as u64, Relaxed);
        let (cell, mode) = (write.cell, write.mode);
        tracing::trace!(on = %self.target, %cell, version = %write.version, epoch = %scope.epoch, ?mode, missing = write.missing, folded_seqs = ?write.folded_seqs, "fragment");
        Ok(committed)
    }

    fn admit(&self, read: &dyn Read, scope: &Scope, write: &FragmentWrite<'_>) -> Result<Admission> {
        let FragmentWrite { cell, version, mode, .. } = *write;
        match mode {
            WriteMode::Fill => return cells::admit_fill(read, scope, cell, version, write.block_crcs),
            WriteMode::Prepare if self.given_up().get(&(cell, version)).is_some() => {
                return Err(Error::stale(format!("cell {cell}: version {version} was given up")));
            }
            WriteMode::Fresh | WriteMode::Prepare | WriteMode::PrepareSeal => {}
        }
        cells::admit(read, cell, version, write.data, write.block_crcs)
    }
}
