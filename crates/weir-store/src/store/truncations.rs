//! Truncation records of a target: made, listed for members that were away, and forgotten.
use super::{DROP_BATCH, Store};
use crate::cells;
use crate::crash_points;
use crate::entries::get;
use crate::format::{self, *};
use crate::lookup;
use crate::truncations::{LIST_MAX, remember};
use weir_kv::{CommitSeq, Read, Scan};
use weir_proto::data::{DropFileReply, FENCE_GONE, GroupAt, Truncation, TruncationList};
use weir_proto::{Error, FileId, Result};

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
                    batch = lookup::file_cells(txn, file, from_stripe..to_stripe, after, DROP_BATCH)?;
                    batch.iter().try_for_each(|cell| cells::drop_void(txn, *cell, token_epoch, delta))
                })?
                .max(last);
            match batch.last() {
                Some(cell) if batch.len() == DROP_BATCH => after = Some(*cell),
                _ => break,
            }
        }
        Ok((last, DropFileReply { prepared: self.index().writers_in_doubt(file)? }))
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
        let seen = self.kv.read(&mut |r| {
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
