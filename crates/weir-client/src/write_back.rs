//! Changed data in flight to targets, and the commits that make it part of the file.
//!
//! Invariants: a stripe has at most one send in flight, so later bytes never arrive before earlier ones; the
//! size is committed only after every byte below it is durable, or has its old content if the send failed; a
//! failure is kept as the inode's error, never dropped silently.
mod send;
mod ways;

use crate::base::Base;
use crate::closes::Closes;
use crate::commit::Commits;
use crate::data::Data;
use crate::inode::{Inline, Inode, State};
use crate::inodes::Inodes;
use crate::kernel::Kernel;
use crate::leader::Leader;
use crate::leases::Leases;
use crate::local_names::LocalNames;
use crate::memory::Memory;
use crate::plan::Occasion;
use crate::quota::Quota;
use crate::recovery::Recovery;
use crate::reports::Reports;
use crate::rights::Rights;
use crate::tiering::Tiering;
use crate::types::ClientConfig;
use crate::{crash_points, wall_time};
use bytes::Bytes;
use send::Send;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_env::{Env, Instant};
use weir_proto::map::Layout;
use weir_proto::{Error, InodeId, Result};

/// The work that a flush waits for, by stripe.
enum Awaited {
    /// Dirty bytes whose send has not begun.
    Start,
    /// The send with this number.
    End(u64),
}

pub struct WriteBack {
    env: Env,
    config: Arc<ClientConfig>,
    leader: Arc<Leader>,
    data: Arc<Data>,
    kernel: Arc<Kernel>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    closes: Arc<Closes>,
    quota: Arc<Quota>,
    local_names: Arc<LocalNames>,
    leases: Arc<Leases>,
    tiering: Arc<Tiering>,
    recovery: Arc<Recovery>,
    commits: Arc<Commits>,
    /// A task frees memory for writers.
    relieving: AtomicBool,
}

impl WriteBack {
    pub fn new(base: &Base, reports: &Reports, rights: &Rights, commits: Arc<Commits>) -> WriteBack {
        let Base { env, config, leader, data, kernel, memory, inodes, .. } = base.clone();
        let Reports { closes, quota, local_names, .. } = reports.clone();
        let Rights { leases, tiering, recovery, .. } = rights.clone();
        WriteBack {
            env,
            config,
            leader,
            data,
            kernel,
            memory,
            inodes,
            closes,
            quota,
            local_names,
            leases,
            tiering,
            recovery,
            commits,
            relieving: AtomicBool::new(false),
        }
    }

    /// Sends all data that is dirty now and waits until it is durable. Bytes changed meanwhile may stay. The
    /// sends end by themselves: while their servers live they continue.
    async fn flush_data(self: &Arc<Self>, inode: &Arc<Inode>, occasion: Occasion) -> Result<()> {
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
                let advanced = self.advance(inode, &mut st, waiting, occasion, &mut begun);
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
        occasion: Occasion,
        begun: &mut Vec<Send>,
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
    pub async fn flush(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        occasion: Occasion,
        off_inode: bool,
    ) -> Result<()> {
        let _one = inode.flushing.lock().await;
        self.flush_locked(inode, occasion, off_inode).await
    }

    pub async fn flush_locked(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        occasion: Occasion,
        off_inode: bool,
    ) -> Result<()> {
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
        let closing = occasion == Occasion::Closing;
        if !off_inode && self.commits.inline(inode, closing).await? {
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
            self.commits.left_behind(inode, sent_end).await;
            return Err(e);
        }
        if occasion == Occasion::DataOnly && only_times_left(&inode.lock()) {
            return Ok(());
        }
        inode.check_generation(write_generation)?;
        let result = self.commits.size(inode, closing, size, self.leader.deadline()).await;
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
    fn leave_inode(&self, st: &mut State, ino: InodeId) -> Result<()> {
        let Inline::Yes(bytes) = st.inline.clone() else { return Ok(()) };
        if !st.lease.is_write() {
            return Ok(());
        }
        let layout = st.layout(ino)?;
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
    fn keep_leaving(&self, inode: &Inode, st: &mut State, layout: Layout) {
        let size = st.size();
        let bytes = st.leaving.note_failed(size);
        match self.write_below(st, layout, &bytes) {
            Ok(()) => self.inodes.note_dirty(inode.ino),
            Err(e) => st.fail(e),
        }
    }

    /// Sends dirty data of the inode that has been dirty for the longest time, to free memory for writers.
    /// One at a time.
    pub fn relieve(self: &Arc<Self>) {
        if self.relieving.swap(true, Ordering::AcqRel) {
            return;
        }
        let me = self.clone();
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
            me.relieving.store(false, Ordering::Release);
        });
    }

    /// Saves data that has been dirty for a while, and reports the durable part of growing files to the
    /// leader: shipping to home starts from that. The inodes keep the errors.
    pub async fn save_aged(self: &Arc<Self>) {
        for inode in self.inodes.dirty().into_iter() {
            let unreported_end = inode.lock().write.unreported_end();
            if let Some(end) = unreported_end {
                self.commits.left_behind(&inode, end).await;
            }
            let due = due(&inode.lock(), inode.ino, self.env.clock.now());
            match due {
                Due::Nothing if self.can_settle_unresolved(&inode) => {
                    drop(self.flush(&inode, Occasion::Growing, false).await);
                }
                Due::Nothing => self.inodes.forget_if_saved(inode.ino, &inode.lock()),
                Due::Flush => drop(self.flush(&inode, Occasion::Growing, false).await),
                Due::Settle => drop(self.commits.settle_direct(&inode).await),
                Due::Commit => self.report_durable(&inode).await,
            }
            self.closes.report_of(inode.ino).await; // it may have been delayed by the dirty data
        }
    }

    /// Whether the leftovers of a failed write can be settled: enough of its targets have returned.
    fn can_settle_unresolved(&self, inode: &Inode) -> bool {
        let st = inode.lock();
        let (Some(stripe), Ok(layout)) = (st.write.first_unresolved(), st.layout(inode.ino)) else {
            return false;
        };
        let s = self.data.stripe(st.object(inode.ino), layout, stripe, self.leader.deadline());
        self.data.view(&s).is_ok_and(|view| view.group().is_writable())
    }

    /// Reports the durable size to the leader, unless another task is about to. The inode keeps the errors.
    async fn report_durable(&self, inode: &Arc<Inode>) {
        if let Ok(_one) = inode.flushing.try_lock() {
            drop(self.commits.size(inode, false, 0, self.leader.deadline()).await);
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
    let Ok(layout) = st.layout(ino) else { return Due::Nothing };
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
