//! Direct writes: past the buffers, straight to targets, with a commit of the growth.
//!
//! Invariant: bytes that were sent and may be on targets are reported to the leader, or noted as still to be
//! reported; they are sent again if the file got another object, or was truncated, while they were in flight.
use super::Writer;
use crate::commit::CommitExtra;
use crate::data::{FULL_PATIENCE, Overlay, StripeRef};
use crate::handles::OpenFile;
use crate::inode::{Inline, Inode, State};
use crate::join::join_all;
use crate::leases::DirectSend;
use crate::plan::Occasion;
use crate::quota::DirectReservation;
use crate::writer::end_of;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::map::Layout;
use weir_proto::{Error, InodeId, Result};

/// A direct write that does not grow the file reports its time to the leader at most this often.
const TIME_COMMIT_PERIOD: Duration = Duration::from_secs(1);

/// The destination of overlays.
#[derive(Clone, Copy)]
pub struct WriteTarget {
    object: InodeId,
    layout: Layout,
    token_epoch: u32,
    /// The volume's write floor.
    floor: u8,
}

impl WriteTarget {
    pub fn of(st: &State, ino: InodeId) -> Result<WriteTarget> {
        Ok(WriteTarget {
            object: st.object(ino),
            layout: st.layout(ino)?,
            token_epoch: st.lease.token_epoch(),
            floor: 0,
        })
    }
}

impl Writer {
    /// Writes to targets and, if the file grows, commits its size. A concurrent truncation fences this write;
    /// then it starts over with the file's new state.
    pub(super) async fn write_direct(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<usize> {
        let inode = &file.inode;
        let mut fences = self.leases.fences();
        loop {
            let under = inode.lock().lease.token_epoch();
            match self.write_direct_once(file, offset, data).await {
                Ok(Some(written)) => return Ok(written),
                Ok(None) if self.leader.left(fences.deadline).is_zero() => {
                    return Err(Error::deadline(format!(
                        "write file {}: leases on it come and go, and with each what its inode holds",
                        inode.ino
                    )));
                }
                Ok(None) => {}
                Err(e) => self.leases.go_on_after(inode, e, under, &mut fences).await?,
            }
        }
    }

    /// Returns the number of bytes. `None`: the inode holds, or may hold, inline bytes that must be moved
    /// first, or the file got another object; read it again.
    async fn write_direct_once(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<Option<usize>> {
        let inode = &file.inode;
        let end = end_of(offset, data.len())?;
        let _under_way = self.tiering.begin_direct(inode, offset, end).await;
        // Bytes accepted under a short earlier lease are older: they go first, and inline commits in flight
        // end. No others follow while this write is counted.
        self.write_back.flush(inode, Occasion::Growing, false).await?;
        // Other clients may have truncated or extended the file since: growing over old bytes must be
        // noticed.
        self.leases.refresh(inode).await?;
        // This client may have evicted the range since the last check.
        self.tiering.recall(inode, offset, end).await?;
        let grows_over = {
            let st = inode.lock();
            st.has_old_tail() && end > st.committed_size()
        };
        if grows_over {
            self.clean_with_token(inode).await?;
        }
        if inode.lock().inline != Inline::No {
            self.leave_inode_with_token(inode).await?;
        }
        let (data, reservation) = self.fit_direct(inode, offset, data).await?;
        let end = offset + data.len() as u64;
        let own = self.objects.copy_up(inode, offset, end).await?;
        let sends = self.leases.may_send(inode).await?;
        file.works()?;
        if inode.lock().inline != Inline::No {
            return Ok(None);
        }
        let under = self.send_direct(inode, sends, own, offset, &data, false).await?;
        let size = inode.lock().committed_size();
        let now = self.env.clock.now();
        let reported = {
            let mut st = inode.lock();
            st.direct.note_pending(true);
            end <= size
                && st.lease.token_epoch() == under
                && st.growth(offset, end) == 0
                && st.direct.commit_at().is_some_and(|at| now.since(at) < TIME_COMMIT_PERIOD)
        };
        if reported {
            self.inodes.note_dirty(inode.ino); // write-back reports it
        } else {
            let extra = CommitExtra::Nothing;
            let is_elsewhere =
                self.commits.sent(inode, (offset, end), under, (extra, Some(reservation))).await?;
            if is_elsewhere {
                return Ok(None);
            }
        }
        Ok(Some(data.len()))
    }

    /// The part of a write that fits the quota, and its reservation.
    pub(super) async fn fit_direct<'a>(
        &'a self,
        inode: &'a Inode,
        offset: u64,
        data: &Bytes,
    ) -> Result<(Bytes, DirectReservation<'a>)> {
        loop {
            let fits = self.quota.fit(inode, Some(offset), data).await?;
            let growth = |st: &State| st.growth(offset, offset + fits.len() as u64);
            if let Some(reservation) = self.quota.spend_direct(inode, growth) {
                return Ok((fits, reservation));
            }
        }
    }

    /// Sends the bytes to targets; the inode holds none. `own`: the object that contains all their stripes.
    /// Returns the token epoch under which they were sent.
    pub(super) async fn send_direct(
        &self,
        inode: &Arc<Inode>,
        sends: DirectSend<'_>,
        own: InodeId,
        offset: u64,
        data: &Bytes,
        with_token: bool,
    ) -> Result<u32> {
        let (end, floor) = (offset + data.len() as u64, self.quota.write_floor(inode).await?);
        let to = {
            let st = inode.lock();
            if with_token && !st.lease.has_append_token() {
                return Err(Error::stale(format!(
                    "file {}: the append token ended with the session",
                    inode.ino
                )));
            }
            if st.object(inode.ino) != own {
                return Err(Error::stale(format!("file {}: a snapshot was taken meanwhile", inode.ino)));
            }
            // Another client may be cleaning there now, under a newer token epoch.
            if st.has_old_tail() && end > st.committed_size() {
                return Err(Error::stale(format!("file {}: old bytes may be past its end", inode.ino)));
            }
            WriteTarget { floor, ..WriteTarget::of(&st, inode.ino)? }
        };
        let sent = self.overlay_range(to, offset, Some(data.clone()), data.len() as u64).await;
        drop(sends);
        {
            // In every outcome, some of it may be on targets.
            let mut st = inode.lock();
            st.pages.note_change();
            st.changed.add(offset, end);
            self.memory.cache().remove(inode.ino, offset, end);
        }
        if let Err(e) = sent {
            self.commits.left_behind(inode, end).await;
            return Err(e);
        }
        self.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        Ok(to.token_epoch)
    }

    /// Writes bytes (or zeros) as overlays, all segments in parallel.
    pub async fn overlay_range(
        &self,
        to: WriteTarget,
        offset: u64,
        data: Option<Bytes>,
        len: u64,
    ) -> Result<()> {
        let WriteTarget { object, layout, token_epoch, floor } = to;
        let mut by_stripe: BTreeMap<u64, Vec<Overlay>> = BTreeMap::new();
        for p in layout.segments(offset, len) {
            let payload = data.as_ref().map(|d| {
                let from = p.range_offset as usize;
                d.slice(from..from + p.len as usize)
            });
            let overlay = Overlay { index: p.cell, offset: p.offset, len: p.len, payload };
            by_stripe.entry(p.stripe).or_default().push(overlay);
        }
        let deadline = self.leader.deadline();
        let full_until = deadline.min(self.env.clock.now() + FULL_PATIENCE);
        let calls: Vec<BoxFuture<'_, Result<()>>> = by_stripe
            .iter()
            .map(|(stripe, overlays)| {
                let s = StripeRef { floor, ..self.data.stripe(object, layout, *stripe, deadline) };
                Box::pin(self.data.write_overlays_around_full(s, token_epoch, overlays, full_until))
                    as BoxFuture<'_, _>
            })
            .collect();
        join_all(calls).await.into_iter().collect::<Result<()>>()?;
        self.leader.report_map(deadline).await
    }
}
