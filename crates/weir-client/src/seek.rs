//! Data and holes of a file, and copies from file to file.
//!
//! Invariant: a reported hole reads as zeros. The opposite may happen: holes are reported in whole cells, and
//! an unknown cell is reported as data. A hole of any size is skipped in one step: targets know the next
//! stripe with data.
use crate::base::Base;
use crate::data::{Data, STRIPES_AT_ONCE, STRIPES_MAX};
use crate::handles::Handles;
use crate::inode::{Inline, Inode};
use crate::join::join_all;
use crate::kernel::Kernel;
use crate::leader::Leader;
use crate::objects::Objects;
use crate::plan::Occasion;
use crate::reader::Reader;
use crate::recovery::Recovery;
use crate::rights::Rights;
use crate::tiering::Tiering;
use crate::types::{Forget, Handle};
use crate::write_back::WriteBack;
use crate::writer::Writer;
use crate::writing::Writing;
use std::sync::Arc;
use weir_env::BoxFuture;
use weir_proto::Result;
use weir_proto::map::Layout;

/// Bytes of one copy: the kernel asks again for the rest, and signals are handled in between.
pub const COPY_BYTES_MAX: u64 = 64 << 20;
const COPY_STEP_BYTES: u64 = 1 << 20;

pub struct Seek {
    leader: Arc<Leader>,
    data: Arc<Data>,
    kernel: Arc<Kernel>,
    handles: Arc<Handles>,
    tiering: Arc<Tiering>,
    objects: Arc<Objects>,
    recovery: Arc<Recovery>,
    write_back: Arc<WriteBack>,
    writer: Arc<Writer>,
    reader: Arc<Reader>,
}

impl Seek {
    pub fn new(base: &Base, rights: &Rights, writing: &Writing, reader: Arc<Reader>) -> Seek {
        let Writing { write_back, writer, .. } = writing.clone();
        let Base { leader, data, kernel, handles, .. } = base.clone();
        let Rights { tiering, objects, recovery, .. } = rights.clone();
        Seek { leader, data, kernel, handles, tiering, objects, recovery, write_back, writer, reader }
    }

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
            self.tiering.wait_for_own_eviction(&file.inode, 0, u64::MAX).await;
            if file.inode.lock().opens.is_for_writing() {
                // Stores to mapped memory are nowhere else until the kernel has to write them back.
                self.kernel.invalidate(file.inode.ino, Forget::All).await;
            }
            // Targets know the bytes that were sent to them.
            self.write_back.flush(&file.inode, Occasion::Growing, false).await?;
            self.recovery.prepare_read(&file.inode).await?;
            let seen = file.inode.lock().seen();
            let found = self.seek_once(&file.inode, offset, data).await?;
            // Bytes evicted meanwhile look like a hole.
            if !self.reader.was_evicted(&file.inode, seen).await? {
                return Ok(found);
            }
        }
    }

    async fn seek_once(&self, inode: &Arc<Inode>, offset: u64, data: bool) -> Result<Option<u64>> {
        let (size, inline, layout, object) = {
            let st = inode.lock();
            (st.size(), st.inline.clone(), st.layout(inode.ino).ok(), st.object(inode.ino))
        };
        if offset >= size {
            return Ok(None);
        }
        let Some(layout) = layout.filter(|_| inline == Inline::No) else {
            return Ok(Some(if data { offset } else { size }));
        };
        let deadline = self.leader.deadline();
        let mut away = self.tiering.away(inode, offset).await?;
        // A range in an older object counts as data.
        let up = |at: u64| at.checked_next_multiple_of(layout.stripe_bytes()).unwrap_or(u64::MAX);
        away.extend(self.objects.layers(inode, offset).await?.iter().map(|l| (l.from, up(l.to))));
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
        for part in self.reader.read(from, from_at, len as usize).await? {
            let len = part.len();
            let written = self.writer.write(to, Some(to_at + done), part).await?;
            done += written as u64;
            if written < len {
                break; // the limit of a volume
            }
        }
        Ok(done)
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
