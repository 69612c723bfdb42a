//! Writes of applications: into dirty buffers under a Write lease, directly otherwise.
//!
//! Invariants: memory is taken from the budget before bytes are; a write is taken only when the file's inline
//! bytes are known, a dead writer's data is recovered, and nothing old lies where the file grows.
use crate::api::{Allocate, Handle, SetAttrs, Stat};
use crate::data::Overlay;
use crate::dirty::{NoMemory, StripeBuf};
use crate::inner::{Inner, OpenFile, layout_of};
use crate::inode::{Inline, Inode, State};
use crate::join::join_all;
use crate::lease::{DirectSend, UnprotectedPages};
use crate::plan::Occasion;
use crate::reservations::DirectReservation;
use crate::seek::STRIPES_AT_ONCE;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_env::{BoxFuture, Instant};
use weir_proto::map::Layout;
use weir_proto::meta::{Commit, Cred, FILE_BYTES_MAX, LeaseKind, Op, SetAttr, truncations};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result, SessionId};

/// A stripe with more scattered extents than this is sent: bookkeeping costs more than the bytes.
const EXTENTS_MAX: usize = 512;
/// Bytes taken at once on the slow path, so that a large write needs little memory at a time.
const STEP_BYTES: usize = 1 << 20;
/// A writer that waits for memory looks again this often even if nobody told it.
const MEMORY_POLL: Duration = Duration::from_millis(50);
/// A fenced zeroing is tried again so often, after pauses that double; a write as long as there is time,
/// after pauses that double so often.
const FENCED_TRIES_MAX: u32 = 8;
const FENCED_PAUSE_MS: u64 = 10;
/// A direct write that does not grow the file tells the leader of its time at most this often.
const TIME_COMMIT_PERIOD: Duration = Duration::from_secs(1);
/// Lease changes while a write prepares: more is livelock.
pub const TRIES_MAX: u32 = 16;

/// How often an operation was fenced by others, and how long it may go on.
struct Fences {
    met: u32,
    deadline: Instant,
}

/// How a write may go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Buffer,
    Direct,
}

/// Where overlays go.
#[derive(Clone, Copy)]
pub struct WriteTarget {
    object: InodeId,
    layout: Layout,
    token_epoch: u32,
}

impl WriteTarget {
    fn of(st: &State, ino: InodeId) -> Result<WriteTarget> {
        Ok(WriteTarget {
            object: st.object(ino),
            layout: layout_of(st, ino)?,
            token_epoch: st.lease.token_epoch(),
        })
    }
}

enum Taken {
    All,
    NoMemory,
    /// The file's volume has a limit, and what was granted there is spent.
    NoRoom,
    /// Something must be asked or cleaned first.
    NotReady,
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
    /// Takes the bytes at once where lease and memory allow. `offset` `None`: at the end of the file.
    pub fn try_write(&self, handle: Handle, offset: Option<u64>, data: &[u8]) -> Option<Result<usize>> {
        let file = match self.handle(handle) {
            Ok(file) => file,
            Err(e) => return Some(Err(e)),
        };
        if !file.mode.write {
            return Some(Err(not_for_writing(handle)));
        }
        if !self.leases_hold() {
            return None;
        }
        let mut st = file.inode.lock();
        if let Err(e) = file.new_error(&st) {
            return Some(Err(e));
        }
        let offset = offset.filter(|_| !file.mode.append);
        match self.take(&file.inode, &mut st, offset, data) {
            Ok(Taken::All) => Some(Ok(data.len())),
            Ok(Taken::NoMemory | Taken::NoRoom | Taken::NotReady) => None,
            Err(e) => Some(Err(e)),
        }
    }

    /// Copies `data` into dirty buffers, if everything is ready for that. At the end of the file (`None`) all
    /// or nothing.
    fn take(&self, inode: &Arc<Inode>, st: &mut State, at: Option<u64>, data: &[u8]) -> Result<Taken> {
        let whole = at.is_none();
        let offset = at.unwrap_or_else(|| st.size());
        let end = end_of(offset, data.len())?;
        if data.is_empty() {
            return Ok(Taken::All);
        }
        if whole && self.budget.used_bytes() >= self.budget.limit_bytes() && !self.cache().evict_one() {
            return Ok(Taken::NoMemory);
        }
        if !is_ready_to_buffer(st, end) || st.is_away(offset, end) || st.is_layered(offset, end) {
            return Ok(Taken::NotReady);
        }
        let layout = layout_of(st, inode.ino)?;
        let growth = st.growth(offset, end);
        if !self.spend(st, growth) {
            return Ok(Taken::NoRoom);
        }
        let mut taken = Taken::All;
        for (stripe, within, part) in by_stripe(&layout, offset, data) {
            let first = stripe == 0;
            // Half an append cannot wait for memory: others may append meanwhile.
            let anyway = |n| whole.then(|| self.budget.buffer_anyway(&self.env.buffers, n));
            let mut buffer = |n| self.buffer(n).or_else(|| anyway(n));
            let buf = st.write.buffer(stripe);
            match buf.write(within, part, layout.cell_bytes(), first, &mut buffer) {
                Ok(()) => {}
                Err(NoMemory) => {
                    st.write.drop_if_empty(stripe);
                    taken = Taken::NoMemory;
                    break;
                }
            }
            let start = layout.stripe_start(stripe) + u64::from(within);
            let growth = st.growth(start, start + part.len() as u64);
            st.quota.note_growth(growth);
            st.note_write(start + part.len() as u64, self.now(), self.env.clock.now());
            self.cache().remove(inode.ino, start, start + part.len() as u64);
            self.send_if_full(inode, st, &layout, stripe)?;
        }
        if st.is_dirty() {
            self.note_dirty(inode.ino);
        }
        self.settle_reservation(st);
        if matches!(taken, Taken::All) {
            self.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        }
        Ok(taken)
    }

    fn send_if_full(&self, inode: &Arc<Inode>, st: &mut State, layout: &Layout, stripe: u64) -> Result<()> {
        let scattered = |buf: &StripeBuf| buf.extent_count() > EXTENTS_MAX;
        let wanted = st.write.is_complete(layout, stripe) || st.write.dirty_of(stripe).is_some_and(scattered);
        if wanted && !st.write.is_sending(stripe) {
            self.start_send(inode, st, stripe, Occasion::Growing)?;
        }
        Ok(())
    }

    /// A charged buffer; cached data makes room.
    fn buffer(&self, len: usize) -> Option<crate::budget::Charged> {
        loop {
            if let Some(buffer) = self.budget.try_buffer(&self.env.buffers, len) {
                return Some(buffer);
            }
            if !self.cache().evict_one() {
                return None;
            }
        }
    }

    /// `offset` `None`: at the end of the file, wherever that is when the bytes are taken.
    pub async fn write(&self, handle: Handle, offset: Option<u64>, data: Bytes) -> Result<usize> {
        self.sure_of_leases().await?; // what was lost is told by this write, not by a later one
        let file = self.handle(handle)?;
        if !file.mode.write {
            return Err(not_for_writing(handle));
        }
        file.new_error(&file.inode.lock())?;
        let offset = offset.filter(|_| !file.mode.append);
        end_of(offset.unwrap_or(0), data.len())?;
        let mut done = 0;
        while done < data.len() {
            let step = data.slice(done..data.len().min(done + STEP_BYTES));
            let written = match offset {
                Some(offset) => self.write_step(&file, offset + done as u64, &step).await,
                None => self.append_step(&file, &step).await,
            };
            match written {
                Ok(n) => done += n,
                // The program is told when it goes on.
                Err(e) if e.kind == ErrorKind::OverQuota && done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        // The kernel keeps pages of this handle, also those written now.
        let unprotected = file.kernel_cache.load(Relaxed).then(|| {
            let mut st = file.inode.lock();
            (!st.lease.is_held()).then(|| UnprotectedPages::of(&file.inode, &mut st))
        });
        if let Some(unprotected) = unprotected.flatten() {
            self.drop_unprotected_pages(unprotected);
        }
        Ok(done)
    }

    /// One step of a write at a place: how many bytes, fewer where a volume's limit is met.
    pub async fn write_step(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<usize> {
        let inode = &file.inode;
        let deadline = self.deadline();
        for _ in 0..TRIES_MAX {
            if self.prepare_write(inode, Some(offset), data.len()).await? == Way::Direct {
                break;
            }
            let fits = self.fit(inode, Some(offset), data).await?;
            if self.buffer_all(file, Some(offset), &fits, deadline).await? {
                return Ok(fits.len());
            }
        }
        // Also where leases come and go too fast to buffer: what is written directly is right, too.
        self.write_direct(file, offset, data).await
    }

    /// Takes all bytes as soon as there is memory. False: the lease went, or the quota for them.
    pub async fn buffer_all(
        &self,
        file: &OpenFile,
        at: Option<u64>,
        data: &Bytes,
        deadline: Instant,
    ) -> Result<bool> {
        let inode = &file.inode;
        loop {
            let freed = self.budget.freed();
            file.works()?;
            let taken = self.take(inode, &mut inode.lock(), at, data)?;
            match taken {
                Taken::All => return Ok(true),
                Taken::NotReady | Taken::NoRoom => return Ok(false),
                Taken::NoMemory => {}
            }
            if self.data.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "write file {}: no memory became free, {} bytes wait to be written to targets",
                    inode.ino,
                    self.budget.used_bytes()
                )));
            }
            self.relieve();
            let _ = self.env.clock.timeout(MEMORY_POLL, freed).await; // looks again either way
        }
    }

    /// Gets what a write needs: the lease, the bytes that are at home, the inline bytes, a clean tail.
    /// Whoever gets the right to write meanwhile fences what is done for that; then the file is looked at
    /// again.
    pub async fn prepare_write(&self, inode: &Arc<Inode>, offset: Option<u64>, len: usize) -> Result<Way> {
        let mut fences = self.fences();
        loop {
            let under = inode.lock().lease.token_epoch();
            match self.prepare_write_once(inode, offset, len).await {
                Err(e) => self.go_on_after(inode, e, under, &mut fences).await?,
                way => return way,
            }
        }
    }

    async fn prepare_write_once(&self, inode: &Arc<Inode>, offset: Option<u64>, len: usize) -> Result<Way> {
        self.wait_for_recall(inode).await;
        let from = offset.unwrap_or(u64::MAX); // the end of the file is never evicted while it is written
        self.wait_for_own_eviction(inode, from, from.saturating_add(len as u64)).await;
        self.sure_of_leases().await?;
        let (is_ours, recover) = {
            let st = inode.lock();
            (st.lease.is_write(), st.lease.needs_recovery())
        };
        if recover {
            self.recover(inode).await?;
        }
        if !is_ours && !self.gets_write(inode).await? {
            // Nobody evicts what is open for writing: what is here now stays.
            let from = offset.unwrap_or_else(|| inode.lock().committed_size());
            self.bring_back(inode, from, from.saturating_add(len as u64)).await?;
            if len > 0 {
                self.copy_up(inode, from, from.saturating_add(len as u64)).await?;
            }
            return Ok(Way::Direct);
        }
        let from = offset.unwrap_or_else(|| inode.lock().size());
        self.bring_back(inode, from, from.saturating_add(len as u64)).await?;
        if len > 0 {
            self.copy_up(inode, from, from.saturating_add(len as u64)).await?;
        }
        if inode.lock().inline == Inline::Unknown {
            self.refresh(inode).await?;
        }
        let grows = {
            let st = inode.lock();
            offset.is_none_or(|at| at + len as u64 > st.committed_size()) && st.has_old_tail()
        };
        if grows {
            self.clean_old_tail(inode).await?;
        }
        Ok(Way::Buffer)
    }

    /// Asks for the Write lease. The answer no is not remembered: to ask is also what takes others' leases
    /// away before something is written past them.
    async fn gets_write(&self, inode: &Arc<Inode>) -> Result<bool> {
        let granted = self.acquire(inode, LeaseKind::Write).await? == LeaseKind::Write;
        let recover = inode.lock().lease.needs_recovery();
        if recover {
            self.recover(inode).await?;
        }
        Ok(granted)
    }

    async fn wait_for_recall(&self, inode: &Inode) {
        loop {
            let changed = inode.changed.notified();
            if !inode.lock().lease.is_closing() {
                return;
            }
            // Ends with the recall, which ends by its flush's deadlines.
            let _ = self.env.clock.timeout(MEMORY_POLL, changed).await;
        }
    }

    /// Writes to targets and, where the file grows, commits its size. Whoever truncates the file at the same
    /// time fences this write; then it looks at the file again.
    async fn write_direct(&self, file: &OpenFile, offset: u64, data: &Bytes) -> Result<usize> {
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

    fn fences(&self) -> Fences {
        Fences { met: 0, deadline: self.deadline() }
    }

    /// What was sent under `refused` ended with `e`. If it was fenced: pauses, and asks for what may be sent.
    async fn go_on_after(&self, inode: &Inode, e: Error, refused: u32, fences: &mut Fences) -> Result<()> {
        if e.kind != ErrorKind::Stale || self.data.left(fences.deadline).is_zero() {
            return Err(e);
        }
        fences.met = (fences.met + 1).min(FENCED_TRIES_MAX);
        // Of several that truncate at once, each fences the others: chance lets one be first.
        let pause = self.env.rng.below(FENCED_PAUSE_MS << fences.met);
        self.env.clock.sleep(Duration::from_millis(pause)).await;
        // Or a snapshot holds what was written to: the right to write brings another object.
        self.acquire(inode, LeaseKind::Write).await?;
        self.pass_fence(inode, refused).await
    }

    /// Who read a file in a snapshot has fenced what was under way then. If the snapshot is gone and nobody
    /// has written since, the file still is in that object, and the leader knows of no fence: a newer token
    /// epoch passes it.
    pub async fn pass_fence(&self, inode: &Inode, refused: u32) -> Result<()> {
        if inode.lock().lease.token_epoch() <= refused {
            self.ask_lease(inode, LeaseKind::Write, true).await?;
        }
        Ok(())
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
        let committing = self.reservations.committing(limited).await;
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

    /// Sets the size: everything else about the file is saved first. `through`: the open file that this is
    /// done through, if any.
    pub async fn set_size(
        &self,
        cred: &Cred,
        inode: &Arc<Inode>,
        through: Option<&OpenFile>,
        set: &SetAttrs,
        size: u64,
    ) -> Result<Stat> {
        if size > FILE_BYTES_MAX {
            return Err(Error::name(NameRule::FileTooBig, format!("size {size} is larger than any file")));
        }
        let _grows = inode.growing.lock().await;
        let mut fences = self.fences();
        loop {
            let under = inode.lock().lease.token_epoch();
            let way = self.prepare_write(inode, Some(size), 0).await?;
            through.map_or(Ok(()), OpenFile::works)?;
            let set = match way {
                Way::Direct => self.set_size_with_token(cred, inode, set, size).await,
                Way::Buffer => self.set_size_now(cred, inode, set, size, true).await,
            };
            match set {
                Err(e) => self.go_on_after(inode, e, under, &mut fences).await?,
                stat => return stat,
            }
        }
    }

    /// Under this client's append token, or under its Write lease (`exclusive`).
    pub async fn set_size_now(
        &self,
        cred: &Cred,
        inode: &Arc<Inode>,
        set: &SetAttrs,
        size: u64,
        exclusive: bool,
    ) -> Result<Stat> {
        let _one = inode.flushing.lock().await;
        self.flush_locked(inode, Occasion::Growing, false).await?;
        let grows_over = {
            let st = inode.lock();
            size > st.committed_size() && st.has_old_tail()
        };
        if grows_over {
            self.clean_old_tail_locked(inode).await?;
        }
        self.send_set_attr(cred, inode, set, Some(size), exclusive).await
    }

    pub async fn send_set_attr(
        &self,
        cred: &Cred,
        inode: &Arc<Inode>,
        set: &SetAttrs,
        size: Option<u64>,
        exclusive: bool,
    ) -> Result<Stat> {
        let now = self.now();
        let time = |t: Option<crate::api::SetTime>| {
            t.map(|t| match t {
                crate::api::SetTime::Now => now,
                crate::api::SetTime::At(t) => t,
            })
        };
        let (ino, revoke_clock) = (inode.ino, self.revoke_clock());
        let (mode, uid, gid, atime, mtime) = (set.mode, set.uid, set.gid, time(set.atime), time(set.mtime));
        let request = |op| SetAttr { op, cred: cred.clone(), ino, mode, uid, gid, size, atime, mtime };
        let before = inode.lock().write.sent_end();
        let entry = self.session.change(self.deadline(), request).await?;
        if let Some(size) = size {
            self.truncate_local(inode, size, before, exclusive);
        }
        Ok(self.apply(&entry, revoke_clock))
    }

    /// The file was set to `size` by this client: what is known of its data beyond is old.
    pub fn truncate_local(&self, inode: &Inode, size: u64, sent_end: u64, exclusive: bool) {
        let mut st = inode.lock();
        let shrinks = size < st.size().max(sent_end).max(st.committed_size());
        st.attr_old = true;
        st.tier.forget_layers();
        st.pages.note_change();
        if let Ok(layout) = layout_of(&st, inode.ino) {
            st.write.truncate_dirty(&layout, size);
        }
        if let Inline::Yes(bytes) = &st.inline {
            let kept = bytes.len().min(size as usize);
            st.inline = Inline::Yes(bytes.slice(..kept));
        }
        st.write.truncate_local(size);
        if shrinks {
            st.write.note_truncation(exclusive);
        }
        st.quota.note_truncated(size);
        self.settle_reservation(&mut st);
        self.cache().remove(inode.ino, size, u64::MAX);
    }

    pub async fn fallocate(&self, handle: Handle, what: Allocate, offset: u64, len: u64) -> Result<()> {
        let file = self.handle(handle)?;
        if !file.mode.write {
            return Err(not_for_writing(handle));
        }
        if len == 0 {
            return Err(Error::invalid("fallocate of no bytes"));
        }
        let end = offset.checked_add(len).filter(|e| *e <= FILE_BYTES_MAX).ok_or_else(too_big)?;
        match what {
            Allocate::Extend => self.reserve(&file, offset, end, true).await,
            Allocate::Reserve => self.reserve(&file, offset, end, false).await,
            Allocate::PunchHole => self.zero_range(&file, offset, end, true).await,
            Allocate::ZeroRange => self.zero_range(&file, offset, end, false).await,
        }?;
        if file.inode.lock().lease.is_write() {
            // The leader must know the file's allocation before the call returns, because `stat` reports it.
            self.flush(&file.inode, Occasion::Growing, false).await?;
        }
        Ok(())
    }

    /// Has the space of a range counted, of which the file may have written nothing yet. `grows`: afterwards
    /// the file is `end` bytes long, or longer: what others write past that meanwhile stays.
    async fn reserve(&self, file: &OpenFile, offset: u64, end: u64, grows: bool) -> Result<()> {
        let inode = &file.inode;
        let _grows = inode.growing.lock().await;
        let deadline = self.deadline();
        for _ in 0..TRIES_MAX {
            let way = self.prepare_write(inode, Some(end), 0).await?;
            file.works()?;
            if way == Way::Direct {
                match self.reserve_with_token(inode, offset, end, grows).await {
                    Err(e) if e.kind == ErrorKind::Stale && !self.data.left(deadline).is_zero() => continue,
                    done => return done,
                }
            }
            let reserved = inode.lock().reservation(offset, end, grows);
            self.reserve_for(inode, reserved.map_err(|e| e.doing(format!("file {}", inode.ino)))?).await?;
            let mut st = inode.lock();
            let (size, growth) = (st.size(), st.reservation(offset, end, grows)?);
            if end <= size && growth == 0 {
                return Ok(());
            }
            if !is_ready_to_buffer(&st, end) || !self.spend(&mut st, growth) {
                continue;
            }
            st.quota.note_growth(growth);
            st.changed.add(size.min(end), end);
            st.note_write(end, self.now(), self.env.clock.now());
            self.settle_reservation(&mut st);
            self.note_dirty(inode.ino);
            return Ok(());
        }
        Err(Error::unavailable(format!(
            "extend file {}: its lease came and went {TRIES_MAX} times",
            inode.ino
        )))
    }

    /// Zeroes bytes below the size. A truncation, or a snapshot's read, at the same time fences this as it
    /// fences a write. `frees`: what is zero then takes no space.
    async fn zero_range(&self, file: &OpenFile, offset: u64, end: u64, frees: bool) -> Result<()> {
        let inode = &file.inode;
        let (mut fences, mut at) = (self.fences(), offset);
        loop {
            let way = self.prepare_write(inode, Some(at), (end - at) as usize).await?;
            if way == Way::Direct {
                self.refresh(inode).await?;
            }
            let (under, end) = {
                let st = inode.lock();
                (st.lease.token_epoch(), end.min(st.size()))
            };
            if at >= end {
                return Ok(());
            }
            match self.zero_some(file, at, end, way, frees).await {
                Err(e) => self.go_on_after(inode, e, under, &mut fences).await?,
                Ok(done) => at = done,
            }
        }
    }

    /// Up to where it is done.
    async fn zero_some(&self, file: &OpenFile, offset: u64, end: u64, way: Way, frees: bool) -> Result<u64> {
        let inode = &file.inode;
        if inode.lock().inline == Inline::Unknown {
            self.refresh(inode).await?;
        }
        // Zeros written into the inode could make the file longer, if somebody truncates it now; zeros on
        // targets do not.
        if inode.lock().inline != Inline::No {
            self.leave_inode_with_token(inode).await?;
        }
        let _one = loop {
            self.bring_back(inode, offset, end).await?;
            let one = inode.flushing.lock().await;
            let st = inode.lock();
            // Without the lease nobody evicts what is open for writing.
            if !st.lease.is_write() || !st.is_away(offset, end) {
                break one;
            }
        };
        self.flush_locked(inode, Occasion::Growing, way == Way::Buffer).await?;
        let own = self.copy_up(inode, offset, end).await?;
        // Others that write the file number their overlays over the stripes that are there.
        let whole = match way {
            Way::Buffer => {
                let st = inode.lock();
                whole_stripes(&layout_of(&st, inode.ino)?, st.size(), offset, end)
            }
            Way::Direct => end..end,
        };
        let mut emptied = Ok(whole.start);
        if offset < whole.start {
            emptied = self.zero_part(file, own, offset, whole.start).await.map(|()| whole.start);
        }
        if emptied.is_ok() && !whole.is_empty() {
            emptied = self.empty_stripes(inode, own, whole.clone()).await;
        }
        let mut done = emptied;
        if done.as_ref().is_ok_and(|done| *done == whole.end) && whole.end < end {
            done = self.zero_part(file, own, whole.end, end).await.map(|()| end);
        }
        let freed = match (&done, way) {
            (Ok(done), Way::Buffer) => {
                let st = inode.lock();
                whole_cells(&layout_of(&st, inode.ino)?, st.size(), offset, *done)
            }
            _ => 0,
        };
        let most = if frees && freed > 0 { self.most_data(inode, own, freed).await } else { None };
        let mtime = self.now();
        let mut st = inode.lock();
        st.pages.note_change();
        st.changed.add(offset, end);
        if let Some((sends, most)) = most {
            let is_all = st.write.send_count() == sends && !st.write.has_dirty();
            st.quota.note_freed(freed, most.filter(|_| is_all));
        }
        // The right to write may have gone while this was under way: then the size is not ours to say.
        if st.lease.is_write() {
            let size = st.size();
            st.note_write(size, mtime, self.env.clock.now());
        } else {
            st.direct.note_pending(true);
        }
        self.settle_reservation(&mut st);
        self.note_dirty(inode.ino);
        self.cache().remove(inode.ino, offset, end);
        done
    }

    /// Zeros over what is there, which stays beneath them until the stripes are sealed.
    async fn zero_part(&self, file: &OpenFile, own: InodeId, offset: u64, end: u64) -> Result<()> {
        let inode = &file.inode;
        let sends = self.may_send_direct(inode).await?;
        file.works()?;
        let to = {
            let mut st = inode.lock();
            if st.inline != Inline::No {
                return Err(Error::stale(format!("file {}: its inode may hold bytes", inode.ino)));
            }
            if st.object(inode.ino) != own {
                return Err(Error::stale(format!("file {}: a snapshot was taken meanwhile", inode.ino)));
            }
            st.pages.note_change();
            let layout = layout_of(&st, inode.ino)?;
            for stripe in layout.stripe_of(offset)..=layout.stripe_of(end - 1) {
                st.write.touch(stripe, end);
            }
            WriteTarget::of(&st, inode.ino)?
        };
        let zeroed = self.overlay_range(to, offset, None, end - offset).await;
        drop(sends);
        zeroed
    }

    /// Empties the stripes of a range that have something, some thousands of them at most; up to where it
    /// came.
    async fn empty_stripes(&self, inode: &Arc<Inode>, own: InodeId, whole: Range<u64>) -> Result<u64> {
        let layout = layout_of(&inode.lock(), inode.ino)?;
        let Range { start, end } = whole;
        let (mut stripe, to) = (layout.stripe_of(start), layout.stripe_of(end - 1) + 1);
        for _ in 0..EMPTIED_MAX / STRIPES_AT_ONCE {
            let known = self.data.next_stripe(self.stripe_ref(own, layout, stripe, self.deadline())).await;
            stripe = known.unwrap_or(to).min(to);
            let next = to.min(stripe + STRIPES_AT_ONCE);
            let emptied = (stripe..next).map(|s| {
                let deadline = self.deadline();
                Box::pin(async move {
                    let cells = self.data.cells_with_data(self.stripe_ref(own, layout, s, deadline)).await;
                    if !cells.contains(&true) {
                        return Ok(true);
                    }
                    self.empty_stripe(inode, own, s, end).await
                }) as BoxFuture<'_, Result<bool>>
            });
            for is_empty in join_all(emptied.collect()).await {
                if !is_empty? {
                    return Ok(layout.stripe_start(next - 1)); // the last one, in which the file has grown
                }
            }
            stripe = next;
            if stripe == to {
                return Ok(end);
            }
        }
        Ok(layout.stripe_start(stripe))
    }

    /// How much data there may be still after `freed` bytes went, if that has to be looked for and does not
    /// take long; and what had been sent before. Of a file without holes it is all but that.
    async fn most_data(&self, inode: &Inode, own: InodeId, freed: u64) -> Option<(u64, Option<u64>)> {
        let (sends, size, is_dense, is_here, layout) = {
            let st = inode.lock();
            let is_here = st.attr.as_ref().is_some_and(|a| a.evicted == 0 && a.layers.is_none());
            (
                st.write.send_count(),
                st.size(),
                st.quota.allocated() >= st.size(),
                is_here,
                layout_of(&st, inode.ino).ok()?,
            )
        };
        let most = match (is_dense, is_here) {
            (true, _) => Some(size.saturating_sub(freed)),
            (false, true) => self.data_bytes(own, layout, size).await,
            (false, false) => None,
        };
        Some((sends, most))
    }
}

/// The part of a range that is whole stripes: the last one of the file is whole where the range ends with the
/// file.
fn whole_stripes(layout: &Layout, size: u64, offset: u64, end: u64) -> Range<u64> {
    let start = offset.next_multiple_of(layout.stripe_bytes());
    let stop = if end >= size { end } else { end - end % layout.stripe_bytes() };
    if start < stop { start..stop } else { end..end }
}

/// Whether a write up to `end` may be kept here for now. What is written under the append token goes straight
/// to targets, and with it what the inode held.
fn is_ready_to_buffer(st: &State, end: u64) -> bool {
    st.lease.is_write()
        && !st.lease.has_append_token()
        && !st.lease.needs_recovery()
        && !st.lease.is_closing()
        && st.inline != Inline::Unknown
        && (end <= st.committed_size() || !st.has_old_tail())
}

fn not_for_writing(handle: Handle) -> Error {
    Error::invalid(format!("file handle {} is not open for writing", handle.0))
}
fn too_big() -> Error {
    Error::name(NameRule::FileTooBig, "the file would be larger than any file may be")
}

pub fn end_of(offset: u64, len: usize) -> Result<u64> {
    offset.checked_add(len as u64).filter(|end| *end <= FILE_BYTES_MAX).ok_or_else(too_big)
}

/// How much of a range is whole cells, likewise: a cell of zeros takes no space once its stripe is sealed.
fn whole_cells(layout: &Layout, size: u64, offset: u64, end: u64) -> u64 {
    let cell_bytes = u64::from(layout.cell_bytes());
    let stop = if end >= size { end } else { end - end % cell_bytes };
    stop.saturating_sub(offset.next_multiple_of(cell_bytes))
}

/// Stripes that are emptied before others get their turn at the file.
const EMPTIED_MAX: u64 = 4096;

/// A write cut at the borders of stripes: (stripe, offset within it, bytes).
fn by_stripe<'a>(layout: &Layout, offset: u64, data: &'a [u8]) -> Vec<(u64, u32, &'a [u8])> {
    let mut parts = Vec::with_capacity(2);
    let (mut at, mut rest) = (offset, data);
    while !rest.is_empty() {
        let stripe = layout.stripe_of(at);
        let within = at - layout.stripe_start(stripe);
        let n = ((layout.stripe_bytes() - within) as usize).min(rest.len());
        parts.push((stripe, within as u32, &rest[..n]));
        at += n as u64;
        rest = &rest[n..];
    }
    parts
}
