//! Data and holes of a file, and copies from file to file.
//!
//! Invariant: a reported hole reads as zeros. The opposite may happen: holes are reported in whole cells, and
//! an unknown cell is reported as data. A hole of any size is skipped in one step: targets know the next
//! stripe with data.
use crate::api::{Forget, Handle};
use crate::data::{Data, StripeRef};
use crate::inner::{Inner, layout_of};
use crate::inode::{Inline, Inode};
use crate::join::join_all;
use crate::member::Pacing;
use crate::plan::Occasion;
use std::sync::Arc;
use weir_env::BoxFuture;
use weir_proto::data::NextStripe;
use weir_proto::map::{Layout, MemberState};
use weir_proto::{InodeId, PgId, Result};

/// Stripes, or groups, asked about at once.
pub const STRIPES_AT_ONCE: u64 = 16;
/// Stripes checked in one search; after that the rest is reported as data.
const STRIPES_MAX: u64 = 4096;
/// Bytes of one copy: the kernel asks again for the rest, and signals are handled in between.
pub const COPY_BYTES_MAX: u64 = 64 << 20;
const COPY_STEP_BYTES: u64 = 1 << 20;

impl Inner {
    /// The first data at or after `offset`; `None`: there is none.
    pub async fn seek_data(&self, handle: Handle, offset: u64) -> Result<Option<u64>> {
        self.seek(handle, offset, true).await
    }
    /// The first hole at or after `offset`, which may be the end of the file; `None`: past the end.
    pub async fn seek_hole(&self, handle: Handle, offset: u64) -> Result<Option<u64>> {
        self.seek(handle, offset, false).await
    }

    async fn seek(&self, handle: Handle, offset: u64, data: bool) -> Result<Option<u64>> {
        let file = self.handles.get(handle)?;
        loop {
            self.wait_for_own_eviction(&file.inode, 0, u64::MAX).await;
            if file.inode.lock().opens.is_for_writing() {
                // Stores to mapped memory are nowhere else until the kernel has to write them back.
                self.kernel.invalidate(file.inode.ino, Forget::All).await;
            }
            // Targets know the bytes that were sent to them.
            self.flush(&file.inode, Occasion::Growing, false).await?;
            self.prepare_read(&file.inode).await?;
            let seen = file.inode.lock().seen();
            let found = self.seek_once(&file.inode, offset, data).await?;
            // Bytes evicted meanwhile look like a hole.
            if !self.was_evicted(&file.inode, seen).await? {
                return Ok(found);
            }
        }
    }

    async fn seek_once(&self, inode: &Arc<Inode>, offset: u64, data: bool) -> Result<Option<u64>> {
        let (size, inline, layout, object) = {
            let st = inode.lock();
            (st.size(), st.inline.clone(), layout_of(&st, inode.ino).ok(), st.object(inode.ino))
        };
        if offset >= size {
            return Ok(None);
        }
        let Some(layout) = layout.filter(|_| inline == Inline::No) else {
            return Ok(Some(if data { offset } else { size }));
        };
        let deadline = self.leader.deadline();
        let mut away = self.away(inode, offset).await?;
        // A range in an older object counts as data.
        let up = |at: u64| at.checked_next_multiple_of(layout.stripe_bytes()).unwrap_or(u64::MAX);
        away.extend(self.layers(inode, offset).await?.iter().map(|l| (l.from, up(l.to))));
        let (first, last) = (layout.stripe_of(offset), layout.stripe_of(size - 1));
        let (mut stripe, mut scanned) = (first, 0);
        while stripe <= last {
            if scanned >= STRIPES_MAX {
                return Ok(Some(if data { layout.stripe_start(stripe).max(offset) } else { size }));
            }
            let next = last.saturating_add(1).min(stripe + STRIPES_AT_ONCE);
            scanned += next - stripe;
            let asked = (stripe..next).map(|s| {
                // A range at home counts as data.
                let start = layout.stripe_start(s);
                if away.iter().any(|(a, b)| *a <= start && start < *b) {
                    let all = vec![true; usize::from(layout.scheme.data)];
                    return Box::pin(std::future::ready(all)) as BoxFuture<'_, Vec<bool>>;
                }
                let s = self.data.stripe(object, layout, s, deadline);
                Box::pin(self.data.cells_with_data(s)) as BoxFuture<'_, Vec<bool>>
            });
            let cells: Vec<bool> = join_all(asked.collect()).await.concat();
            if let Some(at) = first_cell(&layout, stripe, &cells, offset, data).filter(|at| *at < size) {
                return Ok(Some(at));
            }
            stripe = next;
            if data && stripe <= last {
                let known = self.data.next_stripe(self.data.stripe(object, layout, stripe, deadline)).await;
                let elsewhere = away.iter().filter(|(_, to)| *to > layout.stripe_start(stripe));
                let elsewhere = elsewhere.map(|(from, _)| layout.stripe_of(*from).max(stripe));
                match elsewhere.chain(known).min() {
                    Some(next) => stripe = next,
                    None => return Ok(None),
                }
            }
        }
        Ok((!data).then_some(size))
    }

    /// Upper bound of the data in an object of `size` bytes: cells with data, whole. `None`: it takes too
    /// long to count.
    pub async fn data_bytes(&self, object: InodeId, layout: Layout, size: u64) -> Option<u64> {
        let (mut bytes, mut stripe, deadline) = (0, 0, self.leader.deadline());
        for _ in 0..STRIPES_MAX / STRIPES_AT_ONCE {
            stripe = match self.data.next_stripe(self.data.stripe(object, layout, stripe, deadline)).await {
                Some(next) if layout.stripe_start(next) < size => next,
                _ => return Some(bytes),
            };
            let asked = (stripe..stripe + STRIPES_AT_ONCE).map(|s| {
                let s = self.data.stripe(object, layout, s, deadline);
                Box::pin(self.data.cells_with_data(s)) as BoxFuture<'_, Vec<bool>>
            });
            let cells = join_all(asked.collect()).await.concat();
            let cell_bytes = u64::from(layout.cell_bytes());
            let begins = |n: usize| layout.stripe_start(stripe) + n as u64 * cell_bytes;
            let with_data = cells.iter().enumerate().filter(|(_, has)| **has);
            bytes += with_data.map(|(n, _)| size.saturating_sub(begins(n)).min(cell_bytes)).sum::<u64>();
            stripe += STRIPES_AT_ONCE;
        }
        None
    }

    /// Copies without a detour through the kernel; returns the number of bytes.
    pub async fn copy_range(
        &self,
        from: Handle,
        from_at: u64,
        to: Handle,
        to_at: u64,
        len: u64,
    ) -> Result<u64> {
        let len = len.min(COPY_BYTES_MAX);
        let mut done = 0;
        while done < len {
            let step = (len - done).min(COPY_STEP_BYTES);
            match self
                .copy_step(from, from_at.saturating_add(done), to, to_at.saturating_add(done), step)
                .await
            {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break, // the next call, which begins there, reports it
            }
        }
        Ok(done)
    }

    async fn copy_step(&self, from: Handle, from_at: u64, to: Handle, to_at: u64, len: u64) -> Result<u64> {
        let mut done = 0;
        for part in self.read(from, from_at, len as usize).await? {
            let len = part.len();
            let written = self.write(to, Some(to_at + done), part).await?;
            done += written as u64;
            if written < len {
                break; // the limit of a volume
            }
        }
        Ok(done)
    }
}

impl Data {
    /// The first stripe of the file at or after this one that may have data: a parity target of each of its
    /// groups is asked. This one, if none answers.
    pub async fn next_stripe(&self, s: StripeRef) -> Option<u64> {
        if self.needed_map(&s).await.is_err() {
            return Some(s.stripe);
        }
        let (mut found, layout) = (None, s.layout);
        let groups: Vec<PgId> = (0..layout.pg_count).map(|n| PgId(layout.first_pg.0 + n)).collect();
        for some in groups.chunks(STRIPES_AT_ONCE as usize) {
            let asked = some
                .iter()
                .map(|group| Box::pin(self.next_stripe_in(&s, *group)) as BoxFuture<'_, Option<u64>>);
            found = join_all(asked.collect()).await.into_iter().chain([found]).flatten().min();
            if found == Some(s.stripe) {
                break;
            }
        }
        found
    }

    async fn next_stripe_in(&self, s: &StripeRef, group: PgId) -> Option<u64> {
        let scheme = s.layout.scheme;
        loop {
            let Ok(view) = self.view_of(group, scheme) else { return Some(s.stripe) };
            let parity = usize::from(scheme.data)..scheme.width();
            let mut failed = false;
            for at in parity.filter(|at| view.state(*at) == MemberState::Current) {
                let request = NextStripe { place: view.place(at), file: s.file, from_stripe: s.stripe };
                let call = self.call_member(&view, at, &request, vec![], Pacing::Read, s.deadline);
                match call.await {
                    Ok(answer) => return answer.reply.stripe,
                    Err(_) => failed = true,
                }
            }
            if !failed || !self.is_regrouped(&view, s.deadline).await {
                return Some(s.stripe);
            }
        }
    }
}

/// The first place at or after `offset` in cells that are data or not; `cells` from the start of `stripe`.
fn first_cell(layout: &Layout, stripe: u64, cells: &[bool], offset: u64, data: bool) -> Option<u64> {
    let start = layout.stripe_start(stripe);
    let cell_bytes = u64::from(layout.cell_bytes());
    cells.iter().enumerate().filter(|(_, has)| **has == data).find_map(|(n, _)| {
        let begin = start + n as u64 * cell_bytes;
        (begin + cell_bytes > offset).then_some(begin.max(offset))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cell_that_fits_begins_where_it_was_asked_from() {
        let layout = Layout {
            scheme: "ec:2+1".parse().unwrap(),
            cell_shift: 16,
            first_pg: weir_proto::PgId(1),
            pg_count: 1,
            seed: 0,
        };
        let (cell, stripe) = (1 << 16, 2 << 16);
        let cells = [false, true, true, false];
        assert_eq!(first_cell(&layout, 1, &cells, stripe, true), Some(stripe + cell));
        assert_eq!(first_cell(&layout, 1, &cells, stripe + cell + 5, true), Some(stripe + cell + 5));
        assert_eq!(first_cell(&layout, 1, &cells, stripe + cell, false), Some(stripe + 3 * cell));
        assert_eq!(first_cell(&layout, 1, &cells[..3], stripe + cell, false), None);
    }
}
