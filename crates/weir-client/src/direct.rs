//! Direct writes: past the buffers, straight to targets, with a commit of what grew.
//!
//! Invariant: what was sent and may be there is told to the leader, or noted as still to be told; bytes are
//! sent again if the file left the object, or was truncated, while they were on their way.
use crate::data::Overlay;
use crate::inner::{Inner, OpenFile, layout_of};
use crate::inode::{Inline, Inode, State};
use crate::join::join_all;
use crate::lease::DirectSend;
use crate::plan::Occasion;
use crate::reservations::DirectReservation;
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

/// A direct write that does not grow the file tells the leader of its time at most this often.
const TIME_COMMIT_PERIOD: Duration = Duration::from_secs(1);

/// Where overlays go.
#[derive(Clone, Copy)]
pub struct WriteTarget {
    object: InodeId,
    layout: Layout,
    token_epoch: u32,
}

impl WriteTarget {
    pub fn of(st: &State, ino: InodeId) -> Result<WriteTarget> {
        Ok(WriteTarget {
            object: st.object(ino),
            layout: layout_of(st, ino)?,
            token_epoch: st.lease.token_epoch(),
        })
    }
}

/// What a commit of direct writes says, too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CommitExtra {
    Nothing,
    /// The inode holds no bytes any more.
    LeftInode,
    ReleasesToken,
    /// The same, with an append's place: once.
    Appended,
}

impl CommitExtra {
    pub fn releases_token(self) -> bool {
        matches!(self, CommitExtra::ReleasesToken | CommitExtra::Appended)
    }
}

impl Inner {
    /// Writes to targets and, where the file grows, commits its size. Whoever truncates the file at the same
    /// time fences this write; then it looks at the file again.
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

    /// How many bytes. `None`: the inode holds bytes that must go first, or may, or the file left its object;
    /// look at it again.
    async fn write_direct_once(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<Option<usize>> {
        let inode = &file.inode;
        let end = end_of(offset, data.len())?;
        let _under_way = self.begin_direct(inode, offset, end).await;
        // What was taken under a lease that came for a moment is older: it goes first, and what is on its way
        // into the inode arrives there. Nothing follows it there while this is counted.
        self.flush(inode, Occasion::Growing, false).await?;
        // Others may have truncated or extended the file since: growing over old bytes must be noticed.
        self.refresh(inode).await?;
        // This client may have evicted it since it was looked at.
        self.bring_back(inode, offset, end).await?;
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
        let (data, _room) = self.fit_direct(inode, offset, data).await?;
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
            self.note_dirty(inode.ino); // write-back tells it
        } else {
            let is_elsewhere = self.commit_sent(inode, (offset, end), under, CommitExtra::Nothing).await?;
            if is_elsewhere {
                return Ok(None);
            }
        }
        Ok(Some(data.len()))
    }

    /// As much as the quota has space for, and the reservation.
    pub async fn fit_direct<'a>(
        &'a self,
        inode: &'a Inode,
        offset: u64,
        data: &Bytes,
    ) -> Result<(Bytes, DirectReservation<'a>)> {
        loop {
            let fits = self.fit(inode, Some(offset), data).await?;
            if let Some(reservation) = self.spend_direct(inode, offset, offset + fits.len() as u64) {
                return Ok((fits, reservation));
            }
        }
    }

    /// The bytes to targets; the inode holds none. `own`: the object that all stripes of it are in. The token
    /// epoch under which they were sent.
    pub async fn send_direct(
        &self,
        inode: &Arc<Inode>,
        sends: DirectSend<'_>,
        own: InodeId,
        offset: u64,
        data: &Bytes,
        with_token: bool,
    ) -> Result<u32> {
        let end = offset + data.len() as u64;
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
            // Somebody may be cleaning there now, under the token epoch that came since.
            if st.has_old_tail() && end > st.committed_size() {
                return Err(Error::stale(format!("file {}: old bytes may be past its end", inode.ino)));
            }
            WriteTarget::of(&st, inode.ino)?
        };
        let sent = self.overlay_range(to, offset, Some(data.clone()), data.len() as u64).await;
        drop(sends);
        {
            // However it ended, some of it may be there.
            let mut st = inode.lock();
            st.pages.note_change();
            st.changed.add(offset, end);
            self.cache().remove(inode.ino, offset, end);
        }
        if let Err(e) = sent {
            self.report_left_behind(inode, end).await;
            return Err(e);
        }
        self.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        Ok(to.token_epoch)
    }

    /// A write failed, but parts of it may lie on targets, up to `end`. If that is past the size, or the
    /// inode holds what counts there, whoever lets the file grow one day must clean there first. What is
    /// below the size can be read, so home must get it.
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
        let revoke_clock = self.revoke_clock();
        match self.session.change_again(self.deadline(), |op| Commit { op, ..commit.clone() }).await {
            Ok(entry) => {
                let mut st = inode.lock();
                st.write.note_reported(end);
                self.apply_to(&mut st, &entry, revoke_clock);
            }
            // Fenced: who truncated the file has dropped it; or it was removed.
            Err(e) if matches!(e.kind, ErrorKind::Stale | ErrorKind::NotFound) => {
                let mut st = inode.lock();
                st.write.note_reported(u64::MAX);
                st.changed.put_back(&commit.changed);
            }
            Err(e) => {
                tracing::warn!(
                    "file {}: the leader was not told of what a failed write left: {e}",
                    inode.ino
                );
                let mut st = inode.lock();
                st.write.note_unreported(end);
                st.changed.put_back(&commit.changed);
                let pending = st.direct.are_pending() || st.opens.is_for_writing();
                st.direct.note_pending(pending);
                self.note_dirty(inode.ino);
            }
        }
    }

    /// Tells the leader of bytes that were written directly, under the token epoch `under`: a newer one that came since is of a file that
    /// may have another object, or be truncated. True: it was so, and the leader, which had given this client the right to write alone
    /// meanwhile, took it for told under that: the bytes are to be sent once more.
    pub async fn commit_sent(
        &self,
        inode: &Arc<Inode>,
        range: (u64, u64),
        under: u32,
        extra: CommitExtra,
    ) -> Result<bool> {
        Ok(truncations(self.commit_direct(inode, range, Some(under), extra).await?) > truncations(under))
    }

    /// Tells the leader of the time of direct writes, and that the file is at least `size` long.
    pub async fn commit_time(&self, inode: &Arc<Inode>, size: u64, extra: CommitExtra) -> Result<()> {
        self.commit_direct(inode, (size, size), None, extra).await.map(drop)
    }

    /// The token is released with a range that counts, of which nothing is written yet.
    pub async fn commit_reserved(&self, inode: &Arc<Inode>, range: (u64, u64)) -> Result<()> {
        self.commit_direct(inode, range, None, CommitExtra::ReleasesToken).await.map(drop)
    }

    /// The token epoch of the answer. `under`: as the file's now, if none is given.
    async fn commit_direct(
        &self,
        inode: &Arc<Inode>,
        (offset, end): (u64, u64),
        under: Option<u32>,
        extra: CommitExtra,
    ) -> Result<u32> {
        let mtime = self.now();
        let _under_way = self.begin_direct(inode, u64::MAX, u64::MAX).await;
        let commit = {
            let mut st = inode.lock();
            st.direct.begin_commit(self.env.clock.now());
            let growth = st.growth(offset.min(end), end);
            let size = st.committed_size();
            let changed = st.changed.take_below(size.max(end));
            Commit {
                op: Op { session: SessionId(0), slot: 0, seq: 0 },
                ino: inode.ino,
                token_epoch: under.unwrap_or(st.lease.token_epoch()),
                // Others may have truncated the file since: to repeat its old size would bring that back.
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
        let revoke_clock = self.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.tables.reservations.committing(limited).await;
        let (deadline, make) = (self.deadline(), |op| Commit { op, ..commit.clone() });
        let reported = match extra {
            CommitExtra::Appended => self.session.change(deadline, make).await,
            _ => self.session.change_again(deadline, make).await,
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
        self.note_committed(&mut inode.lock(), &entry);
        drop(committing);
        self.apply(&entry, revoke_clock);
        let mut st = inode.lock();
        st.grew_to(&entry);
        match extra {
            CommitExtra::LeftInode => st.inline = Inline::No,
            CommitExtra::ReleasesToken | CommitExtra::Appended => _ = st.lease.take_append_token(),
            CommitExtra::Nothing => {}
        }
        Ok(entry.lease.token_epoch)
    }

    /// What direct writes have not told the leader yet. Who is telling it already is waited for: when the
    /// last handle is closed the right to tell it ends.
    pub async fn settle_direct(&self, inode: &Arc<Inode>) -> Result<()> {
        let _one = inode.flushing.lock().await;
        if inode.lock().direct.are_pending() {
            self.commit_time(inode, 0, CommitExtra::Nothing).await?;
        }
        Ok(())
    }

    /// Bytes (or zeros) as overlays, all pieces at once.
    pub async fn overlay_range(
        &self,
        to: WriteTarget,
        offset: u64,
        data: Option<Bytes>,
        len: u64,
    ) -> Result<()> {
        let WriteTarget { object, layout, token_epoch } = to;
        let mut by_stripe: BTreeMap<u64, Vec<Overlay>> = BTreeMap::new();
        for p in layout.pieces(offset, len) {
            let payload = data.as_ref().map(|d| {
                let from = p.range_offset as usize;
                d.slice(from..from + p.len as usize)
            });
            let overlay = Overlay { index: p.cell, offset: p.offset, len: p.len, payload };
            by_stripe.entry(p.stripe).or_default().push(overlay);
        }
        let deadline = self.deadline();
        let calls: Vec<BoxFuture<'_, Result<()>>> = by_stripe
            .iter()
            .map(|(stripe, overlays)| {
                let s = self.stripe_ref(object, layout, *stripe, deadline);
                Box::pin(self.data.write_overlays(s, token_epoch, overlays)) as BoxFuture<'_, _>
            })
            .collect();
        join_all(calls).await.into_iter().collect::<Result<()>>()?;
        self.session.settle_maps(deadline).await
    }
}
