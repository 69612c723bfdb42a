//! Direct writes: past the buffers, straight to targets, with a commit of the growth.
//!
//! Invariant: bytes that were sent and may be on targets are reported to the leader, or noted as still to be
//! reported; they are sent again if the file got another object, or was truncated, while they were in flight.
use crate::data::{FULL_PATIENCE, Overlay, StripeRef};
use crate::handles::OpenFile;
use crate::inner::{Inner, layout_of};
use crate::inode::{Inline, Inode, State};
use crate::join::join_all;
use crate::leader::Change;
use crate::lease::DirectSend;
use crate::plan::Occasion;
use crate::quota::DirectReservation;
use crate::wall_time;
use crate::write::end_of;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::map::Layout;
use weir_proto::meta::{Commit, Op, truncations};
use weir_proto::{Error, ErrorKind, InodeId, Result, SessionId};

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
            layout: layout_of(st, ino)?,
            token_epoch: st.lease.token_epoch(),
            floor: 0,
        })
    }
}

/// Further content of a commit of direct writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CommitExtra {
    Nothing,
    /// The inode no longer holds inline bytes.
    LeftInode,
    ReleasesToken,
    /// Reserves space, also past the end, and releases the token.
    Reserved,
    /// The same, with an append's place: only once.
    Appended,
}

impl CommitExtra {
    pub fn releases_token(self) -> bool {
        matches!(self, CommitExtra::ReleasesToken | CommitExtra::Reserved | CommitExtra::Appended)
    }
}

impl Inner {
    /// Writes to targets and, if the file grows, commits its size. A concurrent truncation fences this write;
    /// then it starts over with the file's new state.
    pub async fn write_direct(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<usize> {
        let inode = &file.inode;
        let mut fences = self.fences();
        loop {
            let under = inode.lock().lease.token_epoch();
            match self.write_direct_once(file, offset, data).await {
                Ok(Some(written)) => return Ok(written),
                Ok(None) if self.data.left(fences.deadline).is_zero() => {
                    return Err(Error::deadline(format!(
                        "write file {}: leases on it come and go, and with each what its inode holds",
                        inode.ino
                    )));
                }
                Ok(None) => {}
                Err(e) => self.go_on_after(inode, e, under, &mut fences).await?,
            }
        }
    }

    /// Returns the number of bytes. `None`: the inode holds, or may hold, inline bytes that must be moved
    /// first, or the file got another object; read it again.
    async fn write_direct_once(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<Option<usize>> {
        let inode = &file.inode;
        let end = end_of(offset, data.len())?;
        let _under_way = self.begin_direct(inode, offset, end).await;
        // Bytes accepted under a short earlier lease are older: they go first, and inline commits in flight
        // end. No others follow while this write is counted.
        self.flush(inode, Occasion::Growing, false).await?;
        // Other clients may have truncated or extended the file since: growing over old bytes must be
        // noticed.
        self.refresh(inode).await?;
        // This client may have evicted the range since the last check.
        self.recall(inode, offset, end).await?;
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
        let own = self.copy_up(inode, offset, end).await?;
        let sends = self.may_send_direct(inode).await?;
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
                self.commit_sent(inode, (offset, end), under, (extra, Some(reservation))).await?;
            if is_elsewhere {
                return Ok(None);
            }
        }
        Ok(Some(data.len()))
    }

    /// The part of a write that fits the quota, and its reservation.
    pub async fn fit_direct<'a>(
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
    pub async fn send_direct(
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
            self.report_left_behind(inode, end).await;
            return Err(e);
        }
        self.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        Ok(to.token_epoch)
    }

    /// A write failed, but parts of it may be on targets, up to `end`. If that is past the size, or the valid
    /// bytes are inline, a client that later grows the file must clean there first. Bytes below the size are
    /// readable, so home must get them.
    pub async fn report_left_behind(&self, inode: &Arc<Inode>, end: u64) {
        let commit = {
            let mut st = inode.lock();
            let size = st.committed_size();
            let changed = st.changed.take_below(size);
            if changed.is_empty() && end <= size && st.inline == Inline::No {
                st.write.note_reported(u64::MAX);
                return;
            }
            let data_end = st.on_targets_end().max(end);
            let request = self.commit_request(&st, inode.ino, 0, false, None);
            Commit { data_end, changed, drop_inline: false, ..request }
        };
        let revoke_clock = self.inodes.revoke_clock();
        match self.leader.change(Change::repeatable(), |op| Commit { op, ..commit.clone() }).await {
            Ok(entry) => {
                let mut st = inode.lock();
                st.write.note_reported(end);
                self.inodes.apply_to(&mut st, &entry, revoke_clock);
            }
            // Fenced: the client that truncated the file has dropped it; or it was removed.
            Err(e) if matches!(e.kind, ErrorKind::Stale | ErrorKind::NotFound) => {
                let mut st = inode.lock();
                st.write.note_reported(u64::MAX);
                st.changed.put_back(&commit.changed);
            }
            Err(e) => {
                tracing::warn!(
                    "file {}: the leader was not notified of the rest of a failed write: {e}",
                    inode.ino
                );
                let mut st = inode.lock();
                st.write.note_unreported(end);
                st.changed.put_back(&commit.changed);
                let pending = st.direct.are_pending() || st.opens.is_for_writing();
                st.direct.note_pending(pending);
                self.inodes.note_dirty(inode.ino);
            }
        }
    }

    /// Reports directly written bytes, under the token epoch `under`; the reservation ends. True: the leader,
    /// which had granted this client the Write lease, counted the report under a newer one, and the file may
    /// have another object, or be truncated: the bytes must be sent again.
    pub async fn commit_sent(
        &self,
        inode: &Arc<Inode>,
        range: (u64, u64),
        under: u32,
        (extra, reservation): (CommitExtra, Option<DirectReservation<'_>>),
    ) -> Result<bool> {
        let token = self.commit_direct(inode, range, Some(under), (extra, reservation)).await?;
        Ok(truncations(token) > truncations(under))
    }

    /// Reports the time of direct writes to the leader, and that the file is at least `size` long.
    pub async fn commit_time(&self, inode: &Arc<Inode>, size: u64, extra: CommitExtra) -> Result<()> {
        self.commit_direct(inode, (size, size), None, (extra, None)).await.map(drop)
    }

    /// Releases the token with reserved space, of which nothing is written yet; the file is then at least
    /// `size` long.
    pub async fn commit_reserved(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        reservation: DirectReservation<'_>,
    ) -> Result<()> {
        let extra = CommitExtra::Reserved;
        self.commit_direct(inode, (size, size), None, (extra, Some(reservation))).await.map(drop)
    }

    /// Returns the token epoch of the answer. `under`: the file's current one, if none is given.
    async fn commit_direct(
        &self,
        inode: &Arc<Inode>,
        (offset, end): (u64, u64),
        under: Option<u32>,
        (extra, reservation): (CommitExtra, Option<DirectReservation<'_>>),
    ) -> Result<u32> {
        let mtime = wall_time(&self.env);
        let _under_way = self.begin_direct(inode, u64::MAX, u64::MAX).await;
        let commit = {
            let mut st = inode.lock();
            st.direct.begin_commit(self.env.clock.now());
            let growth = match &reservation {
                Some(reserved) if extra == CommitExtra::Reserved => reserved.growth(),
                _ => st.growth(offset.min(end), end),
            };
            let size = st.committed_size();
            let changed = st.changed.take_below(size.max(end));
            Commit {
                op: Op { session: SessionId(0), slot: 0, seq: 0 },
                ino: inode.ino,
                token_epoch: under.unwrap_or(st.lease.token_epoch()),
                // Other clients may have truncated the file since: repeating its old size would restore that.
                size: end,
                mtime,
                allocated: st.quota.allocated() + growth,
                inline: None,
                drop_inline: extra == CommitExtra::LeftInode,
                clean: false,
                close_writes: 0,
                data_end: st.on_targets_end().max(end),
                append_token: extra.releases_token(),
                changed,
            }
        };
        let revoke_clock = self.inodes.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.quota.committing(limited).await;
        let (deadline, make) = (self.leader.deadline(), |op| Commit { op, ..commit.clone() });
        let reported = match extra {
            CommitExtra::Appended => self.leader.change(Change::once().until(deadline), make).await,
            _ => self.leader.change(Change::repeatable().until(deadline), make).await,
        };
        let entry = match reported {
            Ok(entry) => entry,
            Err(e) => {
                let mut st = inode.lock();
                st.direct.note_pending(true);
                st.changed.put_back(&commit.changed);
                return Err(e);
            }
        };
        let mut st = inode.lock();
        let added = self.quota.note_committed(&mut st, &entry);
        self.inodes.apply_to(&mut st, &entry, revoke_clock);
        match reservation {
            Some(reservation) => reservation.end(&mut st, committing, added),
            None => self.quota.end_commit(&mut st, committing, added),
        }
        st.grew_to(&entry);
        match extra {
            CommitExtra::LeftInode => st.inline = Inline::No,
            extra if extra.releases_token() => _ = st.lease.take_append_token(),
            _ => {}
        }
        Ok(entry.lease.token_epoch)
    }

    /// Reports what direct writes have not reported to the leader yet. A report in progress is awaited: when
    /// the last handle is closed, the right to report ends.
    pub async fn settle_direct(&self, inode: &Arc<Inode>) -> Result<()> {
        let _one = inode.flushing.lock().await;
        if inode.lock().direct.are_pending() {
            self.commit_time(inode, 0, CommitExtra::Nothing).await?;
        }
        Ok(())
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
