//! Truncation records: ranges of a file that are void because it was truncated, recovered, deleted or
//! evicted.
//!
//! A truncation is (file, stripes, token epoch): data written there with a lower token epoch is void. Most
//! extend to the end of the file; those of evicted bytes do not. Every live member receives it (`DropFile`),
//! drops the data, refuses such writes from then on, and keeps the record for members that are away: a
//! returning member fetches the truncations before any data, so it never restores void bytes, nor combines
//! its old cell with data that was written since. See decision record 4.
//!
//! Invariants: a truncation is recorded in the transaction that raises the fence, before any data is dropped;
//! numbers only grow. Knows nothing of files' sizes.
use crate::cells;
use crate::crash_points;
use crate::entries::{collect, get, truncations_of};
use crate::format::{self, *};
use crate::lookup;
use crate::service::{Acting, StorageNode, Target};
use crate::store::{DROP_BATCH, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use weir_kv::{CommitSeq, Read, Scan, Txn};
use weir_proto::data::{
    DropFileReply, FENCE_GONE, GroupAt, ListTruncations, PreparedCell, Truncation, TruncationList,
};
use weir_proto::map::MemberState;
use weir_proto::{Error, FileId, PgId, Result, TargetId};

/// Truncations of one listing.
const LIST_MAX: u32 = 4096;

/// Raises the file's fence and records the truncation, unless an earlier record covers it.
pub fn remember(txn: &mut dyn Txn, file: FileId, truncation: format::Truncation) -> Result<()> {
    let token_epoch = truncation.token_epoch;
    cells::take_fence(txn, file, token_epoch)?;
    let earlier = truncations_of(txn, file)?;
    if earlier.iter().any(|(_, c)| c.covers(&truncation)) {
        return Ok(());
    }
    for (number, _) in earlier.iter().filter(|(_, c)| truncation.covers(c)) {
        txn.delete(&truncation_key(file, *number));
        txn.delete(&truncated_file_key(*number));
    }
    let number = 1 + newest(txn)?;
    txn.put(TRUNCATION_COUNT, &number.to_le_bytes());
    txn.put(&truncation_key(file, number), &truncation.to_value());
    txn.put(&truncated_file_key(number), &TruncatedFile { file }.to_value());
    Ok(())
}
/// The number of the newest truncation.
fn newest(read: &dyn Read) -> Result<u64> {
    match read.get(TRUNCATION_COUNT)? {
        None => Ok(0),
        Some(value) => value
            .try_into()
            .map(u64::from_le_bytes)
            .map_err(|_| Error::damaged("the number of truncations is not a number")),
    }
}

impl Store {
    /// Truncates a file: see [`weir_proto::data::DropFile`].
    pub fn drop_file(
        &self,
        file: FileId,
        truncation: format::Truncation,
        epochs: &[GroupAt],
    ) -> Result<(CommitSeq, DropFileReply)> {
        self.usable()?;
        let format::Truncation { from_stripe, to_stripe, token_epoch } = truncation;
        if token_epoch == 0 {
            return Err(Error::invalid(format!("truncation of file {file}: no token epoch is below 0")));
        }
        if from_stripe >= to_stripe {
            return Err(Error::invalid(format!(
                "truncation of file {file}: no stripe is from {from_stripe} to before {to_stripe}"
            )));
        }
        tracing::trace!(on = %self.target, %file, ?truncation, "truncation");
        let mut last = self.change(&mut |txn, _| {
            epochs.iter().try_for_each(|at| cells::check_epoch(txn, at.group, at.epoch))?;
            remember(txn, file, truncation)
        })?;
        self.crash_point(crash_points::FENCED);
        let mut after = None;
        loop {
            let mut batch = Vec::new();
            last = self
                .change(&mut |txn, delta| {
                    // A target that copies a closed place may already have these cells: the caller repeats it
                    // under the next map.
                    epochs.iter().try_for_each(|at| cells::refuse_closed(txn, at.group, at.epoch))?;
                    batch = lookup::file_cells(txn, file, (from_stripe, to_stripe), after, DROP_BATCH)?;
                    batch.iter().try_for_each(|cell| cells::drop_void(txn, *cell, token_epoch, delta))
                })?
                .max(last);
            match batch.last() {
                Some(cell) if batch.len() == DROP_BATCH => after = Some(*cell),
                _ => break,
            }
        }
        Ok((last, DropFileReply { prepared: self.writers_in_doubt(file)? }))
    }

    /// Cells of a file with a prepared version of a writer.
    fn writers_in_doubt(&self, file: FileId) -> Result<Vec<PreparedCell>> {
        let mut in_doubt = Vec::new();
        self.kv().read(&mut |r| {
            let (start, end) = file_range(PREPARED, file, 0);
            in_doubt =
                collect(r, &start, &end, |key, value| Ok((cell_of_key(key)?, Fragment::from_value(value)?)))?;
            Ok(())
        })?;
        let mut prepared = Vec::new();
        for (cell, fragment) in in_doubt.into_iter().filter(|(_, f)| !f.seal) {
            let group = self.header(cell)?.map_or(PgId(0), |h| h.group);
            prepared.push(PreparedCell { cell, group, version: fragment.version });
        }
        Ok(prepared)
    }

    /// Truncations with numbers above `after`; the listing may be sent when the returned commit is durable.
    pub fn list_truncations(
        &self,
        after: u64,
        epochs: &[GroupAt],
        limit: u32,
    ) -> Result<(CommitSeq, TruncationList)> {
        self.usable()?;
        let raised = self.change(&mut |txn, _| {
            epochs.iter().try_for_each(|at| cells::raise_epoch(txn, at.group, at.epoch))
        })?;
        let limit = limit.clamp(1, LIST_MAX) as usize;
        let mut list = TruncationList { truncations: Vec::new(), more: false };
        let seen = self.kv().read(&mut |r| {
            list = TruncationList { truncations: Vec::new(), more: false };
            for (number, file) in numbered(r, after.saturating_add(1), u64::MAX, limit + 1)? {
                if list.truncations.len() == limit {
                    list.more = true;
                } else if let Some(truncation) = get::<format::Truncation>(r, &truncation_key(file, number))?
                {
                    let format::Truncation { from_stripe, to_stripe, token_epoch } = truncation;
                    list.truncations.push(Truncation { number, file, from_stripe, to_stripe, token_epoch });
                }
            }
            Ok(())
        })?;
        Ok((raised.max(seen), list))
    }

    /// The number of the newest truncation.
    pub fn newest_truncation(&self) -> Result<u64> {
        let mut number = 0;
        self.kv().read(&mut |r| {
            number = newest(r)?;
            Ok(())
        })?;
        Ok(number)
    }

    /// Forgets the truncations up to a number, and the fences of files that are deleted for good. Blocks.
    pub fn forget_truncations(&self, upto: u64) -> Result<()> {
        loop {
            let mut forgotten = 0;
            self.change(&mut |txn, _| {
                let batch = numbered(txn, 0, upto, DROP_BATCH)?;
                forgotten = batch.len();
                for (number, file) in batch {
                    let key = truncation_key(file, number);
                    if get::<format::Truncation>(txn, &key)?.is_some_and(|c| c.token_epoch == FENCE_GONE) {
                        txn.delete(&fence_key(file));
                    }
                    txn.delete(&key);
                    txn.delete(&truncated_file_key(number));
                }
                Ok(())
            })?;
            if forgotten < DROP_BATCH {
                return Ok(());
            }
        }
    }
}

/// The first truncations with numbers in `from..=to`.
fn numbered(read: &dyn Read, from: u64, to: u64, limit: usize) -> Result<Vec<(u64, FileId)>> {
    let (start, end) = truncated_file_range(from, to);
    let (mut found, mut problem) = (Vec::new(), Ok(()));
    read.scan(&start, &end, &mut |key, value| match (
        truncation_number_of_key(key),
        TruncatedFile::from_value(value),
    ) {
        _ if found.len() == limit => Scan::Stop,
        (Ok(number), Ok(of)) => {
            found.push((number, of.file));
            Scan::More
        }
        (Err(e), _) | (_, Err(e)) => {
            problem = Err(e);
            Scan::Stop
        }
    })?;
    problem.map(|()| found)
}

impl StorageNode {
    /// Fetches from the current peers the truncations made while this target was away. Returns the peers that
    /// did not answer.
    pub(crate) async fn learn_truncations(
        &self,
        target: &Arc<Target>,
        behind: &[Acting],
    ) -> BTreeSet<TargetId> {
        let mut peers: BTreeMap<TargetId, Vec<GroupAt>> = BTreeMap::new();
        for acting in behind {
            let at = GroupAt { group: acting.scope.group, epoch: acting.scope.epoch };
            for member in &acting.group().members {
                if member.state == MemberState::Current {
                    peers.entry(member.target).or_default().push(at.clone());
                }
            }
        }
        let mut silent = BTreeSet::new();
        for (peer, epochs) in peers {
            if let Err(e) = self.learn_truncations_of(target, peer, epochs).await {
                tracing::debug!(%peer, "learn of truncations: {e}");
                silent.insert(peer);
            }
        }
        silent
    }

    async fn learn_truncations_of(
        &self,
        target: &Arc<Target>,
        peer: TargetId,
        epochs: Vec<GroupAt>,
    ) -> Result<()> {
        loop {
            let known =
                target.truncations_of.lock().unwrap_or_else(PoisonError::into_inner).get(&peer).copied();
            let after = known.unwrap_or(0);
            let request = ListTruncations { target: peer, after, epochs: epochs.clone(), limit: LIST_MAX };
            let (list, _) = self.ask(peer, request, Vec::new()).await?;
            let Some(last) = list.truncations.last().map(|c| c.number) else { return Ok(()) };
            let store = target.store.clone();
            let applied = self
                .env
                .tasks
                .blocking(move || {
                    let mut applied = CommitSeq(0);
                    for truncation in list.truncations {
                        let Truncation { file, from_stripe, to_stripe, token_epoch, .. } = truncation;
                        let truncation = format::Truncation { from_stripe, to_stripe, token_epoch };
                        let (seq, _) = store.drop_file(file, truncation, &[])?;
                        applied = applied.max(seq);
                    }
                    Ok::<_, Error>(applied)
                })
                .await?;
            target.store.durable(applied).await?;
            target.truncations_of.lock().unwrap_or_else(PoisonError::into_inner).insert(peer, last);
            if !list.more {
                return Ok(());
            }
        }
    }

    /// Forgets truncations that all members have received.
    pub(crate) async fn forget_truncations(&self, target: &Arc<Target>) -> Result<()> {
        let map = self.peers.map();
        let mut mine =
            map.groups.iter().filter(|g| g.members.iter().any(|m| m.target == target.store.target));
        let whole = mine.all(|g| g.members.iter().all(|m| m.state == MemberState::Current));
        let (now, newest) = (self.env.clock.now(), target.store.newest_truncation()?);
        let due = target.forgetting.lock().unwrap_or_else(PoisonError::into_inner).due(now, newest, whole);
        let Some(upto) = due else { return Ok(()) };
        let store = target.store.clone();
        self.env.tasks.blocking(move || store.forget_truncations(upto)).await
    }
}
