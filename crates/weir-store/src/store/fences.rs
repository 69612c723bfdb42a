//! All fences of a target, and all cells of a group: a target that takes over a place copies the former, and
//! the previous target of the place drops the latter.
use super::{DROP_BATCH, Store};
use crate::cells;
use crate::entries::get;
use crate::fences::LIST_MAX;
use crate::format::{FENCE, Fence, Header, Record, fence_key, file_of_fence_key, header_key, letter_range};
use crate::lookup;
use weir_kv::{CommitSeq, Scan};
use weir_proto::data::{FenceList, FileFence, GroupAt};
use weir_proto::{Epoch, FileId, PgId, Result};

impl Store {
    /// Fences of files above `after`; the listing may be sent when the returned commit is durable.
    pub fn list_fences(
        &self,
        after: Option<FileId>,
        epochs: &[GroupAt],
        limit: u32,
    ) -> Result<(CommitSeq, FenceList)> {
        self.usable()?;
        let raised = self.change(&mut |txn, _| {
            epochs.iter().try_for_each(|at| cells::raise_epoch(txn, at.group, at.epoch))
        })?;
        let limit = limit.clamp(1, LIST_MAX) as usize;
        let (mut start, end) = letter_range(FENCE);
        if let Some(file) = after {
            start = fence_key(file);
            start.push(0);
        }
        let (mut list, mut problem) = (FenceList { fences: Vec::new(), more: false }, Ok(()));
        let seen = self.kv.read(&mut |r| {
            (list, problem) = (FenceList { fences: Vec::new(), more: false }, Ok(()));
            r.scan(&start, &end, &mut |key, value| {
                if list.fences.len() == limit {
                    list.more = true;
                    return Scan::Stop;
                }
                let fence = file_of_fence_key(key).and_then(|file| Ok((file, Fence::from_value(value)?)));
                match fence {
                    Ok((file, Fence { token_epoch })) => {
                        list.fences.push(FileFence { file, token_epoch });
                        Scan::More
                    }
                    Err(e) => {
                        problem = Err(e);
                        Scan::Stop
                    }
                }
            })
        })?;
        problem.map(|()| (raised.max(seen), list))
    }

    /// Raises fences to another member's fences. Blocks.
    pub fn take_fences(&self, fences: &[FileFence]) -> Result<CommitSeq> {
        let mut last = CommitSeq(0);
        for some in fences.chunks(DROP_BATCH) {
            last = self.change(&mut |txn, _| {
                some.iter().try_for_each(|f| cells::take_fence(txn, f.file, f.token_epoch))
            })?;
        }
        Ok(last)
    }

    /// Drops a batch of a group's cells that were written before `epoch`. Returns whether none is left.
    /// Blocks.
    pub fn drop_some_cells_of(&self, group: PgId, epoch: Epoch) -> Result<(CommitSeq, bool)> {
        self.usable()?;
        let mut is_last = false;
        let committed = self.change(&mut |txn, delta| {
            let batch = lookup::listed_cells(txn, group, None, DROP_BATCH)?;
            is_last = batch.len() < DROP_BATCH;
            for cell in batch {
                match get::<Header>(txn, &header_key(cell))? {
                    // The target has become a member again meanwhile.
                    Some(header) if header.epoch >= epoch => is_last = true,
                    _ => cells::drop_cell(txn, cell, delta)?,
                }
            }
            Ok(())
        })?;
        Ok((committed, is_last))
    }
}
