//! Changed data in flight to targets, and the commits that make it part of the file.
//!
//! Invariants: a stripe has at most one send in flight, so later bytes never arrive before earlier ones; the
//! size is committed only after every byte below it is durable, or has its old content if the send failed; a
//! failure is kept as the inode's error, never dropped silently.
use crate::inner::{Inner, layout_of};
use crate::inode::{Inline, Inode, State};
use crate::leader::Change;
use crate::plan::Occasion;
use crate::send::Send;
use crate::wall_time;
use crate::{crash_points, plan};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir_env::Instant;
use weir_proto::map::Layout;
use weir_proto::meta::{Commit, Entry, INLINE_MAX, Op};
use weir_proto::{Error, ErrorKind, InodeId, Result, SessionId};

/// The work that a flush waits for, by stripe.
enum Awaited {
    /// Dirty bytes whose send has not begun.
    Start,
    /// The send with this number.
    End(u64),
}

impl Inner {
    /// Sends all data that is dirty now and waits until it is durable. Bytes changed meanwhile may stay. The
    /// sends end by themselves: while their servers live they continue.
    pub async fn flush_data(&self, inode: &Arc<Inode>, occasion: Occasion) -> Result<()> {
        let mut awaited: Option<BTreeMap<u64, Awaited>> = None;
        loop {
            let changed = inode.changed.notified();
            {
                let st = inode.lock();
                let waiting = awaited.get_or_insert_with(|| {
                    let sent = st.write.sends().map(|(stripe, id)| (stripe, Awaited::End(id)));
                    sent.chain(st.write.due().map(|stripe| (stripe, Awaited::Start))).collect()
                });
                let (mut begun, mut st) = (Vec::new(), st);
                let advanced = self.advance(inode, &mut st, waiting, (occasion, &mut begun));
                drop(st);
                self.begin_sends(begun);
                advanced?;
                if waiting.is_empty() {
                    return Ok(());
                }
            }
            changed.await;
        }
    }

    /// Takes what is due for sends, which the caller begins without the lock.
    fn advance(
        &self,
        inode: &Arc<Inode>,
        st: &mut State,
        waiting: &mut BTreeMap<u64, Awaited>,
        (occasion, begun): (Occasion, &mut Vec<Send>),
    ) -> Result<()> {
        for stripe in waiting.keys().copied().collect::<Vec<_>>() {
            let under_way = st.write.send_of(stripe);
            let is_due = st.write.is_due(stripe);
            let next = match waiting[&stripe] {
                Awaited::End(id) if under_way == Some(id) => continue,
                Awaited::End(_) => None,
                Awaited::Start if !is_due => under_way.map(Awaited::End),
                Awaited::Start if under_way.is_some() => continue,
                Awaited::Start => {
                    let (id, send) = self.take_for_send(inode, st, stripe, occasion)?;
                    begun.push(send);
                    Some(Awaited::End(id))
                }
            };
            match next {
                Some(next) => waiting.insert(stripe, next),
                None => waiting.remove(&stripe),
            };
        }
        Ok(())
    }

    /// Makes everything changed so far durable and part of the file. `off_inode`: nothing may stay inline.
    pub async fn flush(&self, inode: &Arc<Inode>, occasion: Occasion, off_inode: bool) -> Result<()> {
        let _one = inode.flushing.lock().await;
        self.flush_locked(inode, occasion, off_inode).await
    }

    pub async fn flush_locked(&self, inode: &Arc<Inode>, occasion: Occasion, off_inode: bool) -> Result<()> {
        let is_unreported = {
            let st = inode.lock();
            if occasion == Occasion::Closing && !off_inode && st.goes_with_create() {
                return Ok(());
            }
            st.local.state().is_unreported()
        };
        if is_unreported {
            self.local_names.await_known(inode).await?;
        }
        let (errors, size, write_generation) = {
            let st = inode.lock();
            let must_leave = off_inode && st.opens.is_for_writing() && matches!(st.inline, Inline::Yes(_));
            if !st.is_dirty() && !must_leave {
                return Ok(());
            }
            (st.errors.count(), st.size(), st.write.generation())
        };
        if !off_inode && self.commit_inline(inode).await? {
            return Ok(());
        }
        self.leave_inode(&mut inode.lock(), inode.ino)?;
        let mut sent = self.flush_data(inode, occasion).await;
        if sent.is_ok() {
            sent = self.leader.report_map(self.leader.deadline()).await;
        }
        let (failed, sent_end) = {
            let st = inode.lock();
            (sent.err().or_else(|| st.errors.since(errors).cloned()), st.write.sent_end())
        };
        if let Some(e) = failed {
            // The size must not cover bytes that are not on targets.
            self.report_left_behind(inode, sent_end).await;
            return Err(e);
        }
        if occasion == Occasion::DataOnly && only_times_left(&inode.lock()) {
            return Ok(());
        }
        inode.check_generation(write_generation)?;
        let clean = occasion == Occasion::Closing;
        let result = self.commit_now(inode, clean, size, self.leader.deadline()).await;
        self.env.tasks.crash_point(crash_points::FLUSHED);
        let mut st = inode.lock();
        if let Err(e) = &result
            && st.write.generation() == write_generation
        {
            st.fail(e.clone().doing(format!("commit the size of file {}", inode.ino)));
        }
        result
    }

    /// Inline bytes become dirty where nothing newer is dirty, so that they go to targets; the next commit
    /// drops them from the inode.
    pub fn leave_inode(&self, st: &mut State, ino: InodeId) -> Result<()> {
        let Inline::Yes(bytes) = st.inline.clone() else { return Ok(()) };
        if !st.lease.is_write() {
            return Ok(());
        }
        let layout = layout_of(st, ino)?;
        let bytes = bytes.slice(..bytes.len().min(st.size() as usize));
        self.write_below(st, layout, &bytes)?;
        st.inline = Inline::No;
        st.leaving.begin(bytes);
        let committed = st.attr.as_ref().map(|a| a.mtime);
        let mtime = st.write.local().map(|l| l.mtime).or(committed).unwrap_or_else(|| wall_time(&self.env));
        let size = st.size();
        st.note_write(size, mtime, self.env.clock.now());
        self.inodes.note_dirty(ino);
        Ok(())
    }

    /// Makes bytes at the beginning of the file dirty where nothing newer is dirty.
    fn write_below(&self, st: &mut State, layout: Layout, bytes: &Bytes) -> Result<()> {
        let covered = st.write.dirty_ranges(0);
        for (a, b) in gaps(&covered, bytes.len() as u32) {
            let mut buffer = |n| Some(self.memory.buffer_anyway(n));
            let stripe = st.write.buffer(0);
            let written =
                stripe.write(a, &bytes[a as usize..b as usize], layout.cell_bytes(), true, &mut buffer);
            written.map_err(|_| Error::io("no memory for the bytes of a small file"))?;
        }
        Ok(())
    }

    /// Only new bytes were lost; the inline bytes were safe, and go to targets with the next send.
    pub fn keep_leaving(&self, inode: &Inode, st: &mut State, layout: Layout) {
        let size = st.size();
        let bytes = st.leaving.note_failed(size);
        match self.write_below(st, layout, &bytes) {
            Ok(()) => self.inodes.note_dirty(inode.ino),
            Err(e) => st.fail(e),
        }
    }

    /// Commits a small file with its bytes inline. False: it does not fit there.
    async fn commit_inline(&self, inode: &Arc<Inode>) -> Result<bool> {
        let deadline = self.leader.deadline();
        let marking = inode.marking.lock().await;
        let (commit, content, local, write_generation, sends) = {
            let mut st = inode.lock();
            let Some(local) = st.write.local() else { return Ok(false) };
            let exclusive = st.lease.is_write();
            let base = match &st.inline {
                Inline::Yes(bytes) => bytes.clone(),
                Inline::No if st.committed_size() == 0 => Bytes::new(),
                Inline::No | Inline::Unknown => return Ok(false),
            };
            // Bytes written directly meanwhile would be on targets, hidden by the inline bytes.
            let on_targets = st.write.has_sends() || st.direct.are_under_way() || st.lease.has_append_token();
            if on_targets || !plan::fits_inline(local.size, st.on_targets_end(), exclusive) {
                return Ok(false);
            }
            let content = inline_content(&st, &base, local.size as usize);
            st.changed.add(0, local.size);
            let changed = st.changed.take_below(local.size);
            let commit = self.commit_request(&st, inode.ino, local.size, true, Some(content.clone()));
            let commit = Commit { changed, ..commit };
            st.write.begin_declaring_clean();
            (commit, content, local, st.write.generation(), st.write.send_count())
        };
        let revoke_clock = self.inodes.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.quota.committing(limited).await;
        let reported = self.commit_in(inode, write_generation, &commit, deadline).await;
        let mut st = inode.lock();
        st.write.note_declared_clean(self.inodes.tick_revoke_clock());
        drop(marking);
        let entry = reported.inspect_err(|e| {
            st.changed.put_back(&commit.changed);
            if st.write.generation() == write_generation {
                st.fail(e.clone().doing(format!("commit file {}", inode.ino)));
            }
        })?;
        let added = self.quota.note_committed(&mut st, &entry);
        if st.write.generation() != write_generation {
            self.inodes.apply_to(&mut st, &entry, revoke_clock);
            self.quota.end_commit(&mut st, committing, added);
            return Ok(true);
        }
        st.write.note_inline_committed(local);
        // Bytes sent to targets since are newer than the inline bytes now.
        let is_older = st.write.send_count() != sends;
        st.leaving.note_inline(is_older);
        st.inline = if st.leaving.has_begun() { Inline::No } else { Inline::Yes(content) };
        self.inodes.apply_unasked(&mut st, &entry, revoke_clock);
        self.quota.end_commit(&mut st, committing, added);
        self.inodes.forget_if_saved(inode.ino, &st);
        Ok(true)
    }

    /// A commit under the write generation that it was made under, or none: a lost lease takes the changes of
    /// the commit with it.
    async fn commit_in(
        &self,
        inode: &Arc<Inode>,
        write_generation: u64,
        commit: &Commit,
        deadline: Instant,
    ) -> Result<Entry> {
        let still = || inode.check_generation(write_generation);
        let how = Change::repeatable().until(deadline).while_still(&still);
        let mut commit = commit.clone();
        loop {
            match self.leader.change(how, |op| Commit { op, ..commit.clone() }).await {
                // This client asked for a newer token epoch meanwhile, and the leader has granted it: the
                // Write lease is the same.
                Err(e) if e.kind == ErrorKind::Stale && !self.data.left(deadline).is_zero() => {
                    let before = std::mem::replace(&mut commit.token_epoch, self.newest_token(inode).await?);
                    still()?;
                    if commit.token_epoch <= before {
                        return Err(e);
                    }
                }
                outcome => return outcome,
            }
        }
    }

    async fn newest_token(&self, inode: &Arc<Inode>) -> Result<u32> {
        self.refresh(inode).await?;
        Ok(inode.lock().lease.token_epoch())
    }

    pub fn commit_request(
        &self,
        st: &State,
        ino: InodeId,
        size: u64,
        clean: bool,
        inline: Option<Bytes>,
    ) -> Commit {
        let is_inline = inline.is_some();
        Commit {
            op: Op { session: SessionId(0), slot: 0, seq: 0 }, // set for each change
            ino,
            token_epoch: st.lease.token_epoch(),
            size,
            mtime: st.write.local().map_or_else(|| wall_time(&self.env), |l| l.mtime),
            // Of an inline file all bytes count, also those of holes.
            allocated: st.quota.allocated_of(size, st.size()).max(if is_inline { size } else { 0 }),
            inline,
            drop_inline: st.leaving.may_drop(),
            clean,
            close_writes: 0,
            data_end: if is_inline { 0 } else { st.on_targets_end() },
            append_token: false,
            changed: Vec::new(),
        }
    }

    /// Commits size and time. `flushed`: everything below is durable, or was changed again since. `clean`: no
    /// uncommitted bytes are left on targets once the file has no writer.
    async fn commit_now(
        &self,
        inode: &Arc<Inode>,
        clean: bool,
        flushed: u64,
        deadline: Instant,
    ) -> Result<()> {
        let marking = if clean { Some(inode.marking.lock().await) } else { None };
        let (commit, local, write_generation) = {
            let mut st = inode.lock();
            let layout = layout_of(&st, inode.ino).ok();
            let durable = layout.map_or(st.size(), |layout| st.durable_size(&layout));
            let clean = clean && st.is_all_sent();
            if clean {
                st.write.begin_declaring_clean();
            }
            let size = durable.max(flushed).max(st.committed_size());
            let changed = st.changed.take_below(size);
            st.write.note_commit(self.env.clock.now());
            let commit = Commit { changed, ..self.commit_request(&st, inode.ino, size, clean, None) };
            (commit, st.write.local(), st.write.generation())
        };
        let revoke_clock = self.inodes.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.quota.committing(limited).await;
        let reported = self.commit_in(inode, write_generation, &commit, deadline).await;
        let mut st = inode.lock();
        if commit.clean {
            st.write.note_declared_clean(self.inodes.tick_revoke_clock());
        }
        drop(marking);
        let entry = reported.inspect_err(|_| st.changed.put_back(&commit.changed))?;
        let added = self.quota.note_committed(&mut st, &entry);
        if st.write.generation() != write_generation {
            self.inodes.apply_to(&mut st, &entry, revoke_clock);
            self.quota.end_commit(&mut st, committing, added);
            return Ok(());
        }
        let is_whole_size = commit.size == st.size();
        st.write.note_committed(local, is_whole_size);
        if commit.drop_inline {
            st.leaving.end();
        }
        self.inodes.apply_unasked(&mut st, &entry, revoke_clock);
        self.quota.end_commit(&mut st, committing, added);
        if let Ok(layout) = layout_of(&st, inode.ino) {
            let first = layout.stripe_of(st.committed_size());
            st.write.forget_touched_below(first);
        }
        self.inodes.forget_if_saved(inode.ino, &st);
        Ok(())
    }

    /// Sends dirty data of the inode that has been dirty for the longest time, to free memory for writers.
    /// One at a time.
    pub fn relieve(&self) {
        if self.sends.relieving.swap(true, Ordering::AcqRel) {
            return;
        }
        let me = self.arc();
        self.env.tasks.spawn("relieve memory", async move {
            let oldest = me
                .inodes
                .dirty()
                .into_iter()
                .filter_map(|inode| {
                    let since = inode.lock().write.dirty_age_start();
                    since.map(|since| (since, inode))
                })
                .min_by_key(|(since, inode)| (*since, inode.ino));
            if let Some((_, inode)) = oldest {
                // The inode keeps its error.
                let _ = me.flush_data(&inode, Occasion::Growing).await;
                inode.lock().write.restart_dirty_age(me.env.clock.now());
            }
            me.sends.relieving.store(false, Ordering::Release);
        });
    }

    /// Saves data that has been dirty for a while, and reports the durable part of growing files to the
    /// leader: shipping to home starts from that. The inodes keep the errors.
    pub async fn write_back_aged(&self) {
        for inode in self.inodes.dirty().into_iter() {
            let unreported_end = inode.lock().write.unreported_end();
            if let Some(end) = unreported_end {
                self.report_left_behind(&inode, end).await;
            }
            let due = due(&inode.lock(), inode.ino, self.env.clock.now());
            match due {
                Due::Nothing if self.can_settle_unresolved(&inode) => {
                    drop(self.flush(&inode, Occasion::Growing, false).await);
                }
                Due::Nothing => self.inodes.forget_if_saved(inode.ino, &inode.lock()),
                Due::Flush => drop(self.flush(&inode, Occasion::Growing, false).await),
                Due::Settle => drop(self.settle_direct(&inode).await),
                Due::Commit => self.report_durable(&inode).await,
            }
            self.closes.report_of(inode.ino).await; // it may have been delayed by the dirty data
        }
    }

    /// Whether the leftovers of a failed write can be settled: enough of its targets have returned.
    fn can_settle_unresolved(&self, inode: &Inode) -> bool {
        let st = inode.lock();
        let (Some(stripe), Ok(layout)) = (st.write.first_unresolved(), layout_of(&st, inode.ino)) else {
            return false;
        };
        let s = self.data.stripe(st.object(inode.ino), layout, stripe, self.leader.deadline());
        self.data.view(&s).is_ok_and(|view| view.group().is_writable())
    }

    /// Reports the durable size to the leader, unless another task is about to. The inode keeps the errors.
    pub async fn report_durable(&self, inode: &Arc<Inode>) {
        if let Ok(_one) = inode.flushing.try_lock() {
            drop(self.commit_now(inode, false, 0, self.leader.deadline()).await);
        }
    }
}

/// The work of write-back for a file.
enum Due {
    Nothing,
    /// Save everything dirty.
    Flush,
    /// Report direct writes to the leader.
    Settle,
    /// Commit the durable bytes; dirty bytes wait until their stripe is full.
    Commit,
}

fn due(st: &State, ino: InodeId, now: Instant) -> Due {
    let old = |since: Option<Instant>, age| since.is_none_or(|since| now.since(since) >= age);
    if st.write.dirty_since().is_some() && old(st.write.dirty_since(), DIRTY_AGE_MAX) {
        return Due::Flush;
    }
    if st.direct.are_pending() && old(st.direct.commit_at(), UNREPORTED_MAX) {
        return Due::Settle;
    }
    let Ok(layout) = layout_of(st, ino) else { return Due::Nothing };
    let unreported = unreported_bytes(st, &layout) > 0;
    if unreported && old(st.write.committed_at(), UNREPORTED_MAX) { Due::Commit } else { Due::Nothing }
}

/// Durable bytes that the only writer of a file has not reported.
fn unreported_bytes(st: &State, layout: &Layout) -> u64 {
    let alone = st.lease.is_write() && st.is_on_targets();
    if alone { st.changed.bytes_below(st.durable_size(layout)) } else { 0 }
}

/// Whether the leader gets a report at once.
pub fn is_much_unreported(st: &State, layout: &Layout, now: Instant) -> bool {
    st.write.committed_at().is_none_or(|at| now.since(at) >= REPORT_PAUSE)
        && unreported_bytes(st, layout) >= UNREPORTED_STRIPES * layout.stripe_bytes()
}

/// Changed data of a file without sync or close is saved after this time.
const DIRTY_AGE_MAX: std::time::Duration = std::time::Duration::from_secs(5);
/// Durable bytes that the leader does not know of are reported after this time.
const UNREPORTED_MAX: std::time::Duration = std::time::Duration::from_secs(1);
/// This number of stripes is reported at once: a fast stream then reaches home evenly,
const UNREPORTED_STRIPES: u64 = 4;
/// but never at shorter intervals than this.
const REPORT_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// The whole of a small file: its inline bytes, overwritten by the dirty ones.
pub fn inline_content(st: &State, base: &Bytes, size: usize) -> Bytes {
    assert!(size <= INLINE_MAX, "only small files are inline");
    let mut content = vec![0; size];
    let kept = base.len().min(size);
    content[..kept].copy_from_slice(&base[..kept]);
    if let Some(buf) = st.write.dirty_of(0) {
        for (at, bytes) in buf.copy_range(0, size as u32) {
            content[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        }
    }
    content.into()
}

/// The parts of `0..end` that are in none of the ranges.
pub fn gaps(ranges: &[(u32, u32)], end: u32) -> Vec<(u32, u32)> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|(_, b)| *b));
    let ends = ranges.iter().map(|(a, _)| *a).chain([end]);
    starts.zip(ends).map(|(a, b)| (a, b.min(end))).filter(|(a, b)| a < b).collect()
}

/// The size and the location of the bytes stay as they were committed: a read needs no newer state of the
/// leader.
fn only_times_left(st: &State) -> bool {
    let same_size = st.write.local().is_none_or(|local| local.size == st.committed_size());
    st.lease.is_write() && same_size && st.is_on_targets()
}
