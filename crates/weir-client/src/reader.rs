//! Reads of applications: newest first, from dirty buffers, stripes in flight, inline bytes, the cache,
//! targets.
//!
//! Invariants: nothing is kept without a lease; bytes fetched while the file changed are returned but not
//! kept; a read never waits for the leader while a lease covers it. Parts are shared, not copied, except for
//! bytes that may still change.
use crate::accesses::Accesses;
use crate::assembly::Assembly;
use crate::base::Base;
use crate::handles::{Handles, OpenFile};
use crate::inode::{Inline, Inode, State};
use crate::kernel::{Kernel, UnprotectedPages};
use crate::leader::Leader;
use crate::leases::Leases;
use crate::memory::Memory;
use crate::objects::Objects;
use crate::recovery::Recovery;
use crate::rights::Rights;
use crate::status::Counters;
use crate::tiering::Tiering;
use crate::types::{ClientConfig, Handle};
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::map::Layout;
use weir_proto::{Error, MIB, Result};

/// How long a read for pages insists on a lease that other clients have revoked each time.
const INSISTS_MAX: Duration = Duration::from_secs(15);
/// Bytes fetched for one read at a time.
const FETCH_BYTES_MAX: u64 = 16 << 20;
/// A read for pages whose lease is revoked at once asks again after a pause, which grows up to this multiple.
const UNLEASED_PAUSE: Duration = Duration::from_micros(500);
const UNLEASED_PAUSES_MAX: u32 = 16;

/// The result of a read without asking targets.
struct Local {
    assembly: Assembly,
    /// The layout for missing bytes.
    layout: Option<Layout>,
    data_change: u64,
    /// Fetched bytes may be kept.
    keep: bool,
    size: u64,
    /// Another read is fetching a part of the missing bytes already, or they may change without a request.
    being_fetched: bool,
    seen: Seen,
}

/// The state that shows whether bytes were evicted since.
#[derive(Clone, Copy)]
pub struct Seen {
    leased: bool,
    leases_lost: u64,
    evictions: u64,
    token_epoch: u32,
}

impl State {
    pub fn seen(&self) -> Seen {
        Seen {
            leased: self.lease.is_held(),
            leases_lost: self.pages.leases_lost(),
            evictions: self.tier.evictions(),
            token_epoch: self.lease.token_epoch(),
        }
    }
}

/// The result of one try to read.
enum Read {
    Done(Vec<Bytes>),
    /// Offline bytes were recalled: check again.
    CameBack,
    /// Bytes were evicted or moved during the read: check again.
    Moved,
    /// The read is for pages, and the lease that these need was revoked: ask again.
    Unleased,
}

pub struct Reader {
    env: Env,
    config: Arc<ClientConfig>,
    counters: Arc<Counters>,
    leader: Arc<Leader>,
    kernel: Arc<Kernel>,
    memory: Arc<Memory>,
    accesses: Arc<Accesses>,
    handles: Arc<Handles>,
    leases: Arc<Leases>,
    tiering: Arc<Tiering>,
    objects: Arc<Objects>,
    recovery: Arc<Recovery>,
}

impl Reader {
    pub fn new(base: &Base, rights: &Rights) -> Reader {
        let Base { env, config, counters, leader, kernel, memory, accesses, handles, .. } = base.clone();
        let Rights { leases, tiering, objects, recovery, .. } = rights.clone();
        Reader {
            env,
            config,
            counters,
            leader,
            kernel,
            memory,
            accesses,
            handles,
            leases,
            tiering,
            objects,
            recovery,
        }
    }

    /// The bytes, if all of them are cached here.
    pub fn try_read(self: &Arc<Self>, handle: Handle, offset: u64, len: usize) -> Option<Result<Vec<Bytes>>> {
        let file = match self.handles.get(handle) {
            Ok(file) => file,
            Err(e) => return Some(Err(e)),
        };
        if !file.mode.read {
            return Some(Err(not_for_reading(handle)));
        }
        if !self.leader.leases_hold() {
            return None;
        }
        let local = {
            let mut st = file.inode.lock();
            if !st.lease.is_held() || st.lease.needs_recovery() || st.inline == Inline::Unknown {
                return None;
            }
            let for_pages = file.keeps_pages();
            if for_pages && st.pages.is_dropping() {
                return None;
            }
            let local = match self.collect_local(&file.inode, &mut st, offset, len) {
                Ok(local) => local,
                Err(e) => return Some(Err(e)),
            };
            if local.assembly.is_complete() {
                self.note_read(&file, &mut st);
                self.read_ahead(&file.inode, &mut st, offset, len);
            }
            local
        };
        local.assembly.is_complete().then(|| Ok(self.finish(local.assembly)))
    }

    fn note_read(&self, file: &OpenFile, st: &mut State) {
        if !file.leaves_access_time() {
            self.accesses.note(file.inode.ino, st);
        }
    }

    fn finish(&self, assembly: Assembly) -> Vec<Bytes> {
        self.counters.read_bytes.fetch_add(assembly.end - assembly.start, Relaxed);
        assembly.into_parts()
    }

    pub async fn read(self: &Arc<Self>, handle: Handle, offset: u64, len: usize) -> Result<Vec<Bytes>> {
        self.leader.sure_of_leases().await?;
        let file = self.handles.get(handle)?;
        if !file.mode.read {
            return Err(not_for_reading(handle));
        }
        let deadline = self.leader.deadline();
        let mut parts = Vec::new();
        let mut done = 0;
        while done < len {
            let step = (len - done).min(FETCH_BYTES_MAX as usize);
            let got = self.read_step(&file, offset.saturating_add(done as u64), step, deadline).await?;
            let n: usize = got.iter().map(Bytes::len).sum();
            parts.extend(got);
            done += n;
            if n < step {
                break;
            }
        }
        Ok(parts)
    }

    async fn read_step(
        self: &Arc<Self>,
        file: &OpenFile,
        offset: u64,
        len: usize,
        mut deadline: Instant,
    ) -> Result<Vec<Bytes>> {
        // Even if they are evicted again and again.
        let give_up = deadline + self.config.recall_patience;
        let (mut unleased, insists_until) =
            (0, self.env.clock.now() + INSISTS_MAX.min(self.config.patience / 2));
        loop {
            let insists = self.env.clock.now() < insists_until;
            let again_until = match self.read_once(file, offset, len, deadline, insists).await? {
                Read::Done(parts) => return Ok(parts),
                Read::Unleased => {
                    unleased = UNLEASED_PAUSES_MAX.min(unleased + 1);
                    self.env.clock.sleep(UNLEASED_PAUSE * unleased).await;
                    deadline
                }
                Read::Moved => deadline,
                // The recall has its own time limit.
                Read::CameBack => {
                    deadline = self.leader.deadline();
                    give_up
                }
            };
            if self.leader.left(again_until).is_zero() {
                return Err(Error::io(format!(
                    "read file {}: its bytes came and went until the deadline",
                    file.inode.ino
                )));
            }
        }
    }

    /// `insists`: bytes for pages are not read without a lease.
    async fn read_once(
        self: &Arc<Self>,
        file: &OpenFile,
        offset: u64,
        len: usize,
        deadline: Instant,
        insists: bool,
    ) -> Result<Read> {
        let inode = &file.inode;
        let for_pages = file.keeps_pages();
        if for_pages {
            self.leases.for_pages(inode, offset, offset.saturating_add(len as u64)).await?;
        }
        self.recovery.prepare_read(inode).await?;
        let settled = self.collect_when_settled(file, offset, len, deadline, insists).await?;
        let Some((local, unprotected)) = settled else { return Ok(Read::Unleased) };
        let Local { mut assembly, layout, data_change, keep, size, seen, .. } = local;
        if let Some((from, to)) =
            assembly.missing.first().zip(assembly.missing.last()).map(|(a, b)| (a.0, b.1))
            && self.tiering.recall(inode, from, to).await?
        {
            return Ok(Read::CameBack);
        }
        if !assembly.is_complete() {
            let layout = layout
                .ok_or_else(|| Error::damaged(format!("file {} has bytes but no layout", inode.ino)))?;
            let missing = assembly.missing.clone();
            let fetched = self.objects.fetch(inode, layout, &missing, deadline).await;
            // Bytes evicted meanwhile look like a hole, or like lost ones.
            if fetched.as_ref().map_or(true, |f| f.holes) && self.was_evicted(inode, seen).await? {
                return Ok(Read::Moved);
            }
            for (at, bytes) in fetched?.parts {
                if keep {
                    self.keep_fetched(inode, at, &bytes, size, data_change, false);
                }
                assembly.fill([(at, bytes)]);
            }
            assembly.fill_zeros();
        }
        if let Some(unprotected) = unprotected {
            self.kernel.drop_pages(unprotected);
        }
        Ok(Read::Done(self.finish(assembly)))
    }

    /// The local state once no other read is fetching a part of the missing bytes. `None`: no lease protects
    /// pages that are to be filled.
    async fn collect_when_settled(
        self: &Arc<Self>,
        file: &OpenFile,
        offset: u64,
        len: usize,
        deadline: Instant,
        insists: bool,
    ) -> Result<Option<(Local, Option<UnprotectedPages>)>> {
        let inode = &file.inode;
        let for_pages = file.keeps_pages();
        let (mut waited, mut unprotected) = (false, None);
        loop {
            let changed = inode.changed.notified();
            let local = {
                let mut st = inode.lock();
                let is_known = st.inline != Inline::Unknown;
                if for_pages && insists && !st.lease.is_held() && !st.opens.is_for_writing() {
                    return Ok(None);
                }
                if for_pages {
                    st.pages.note_fill(offset, offset.saturating_add(len as u64));
                }
                let local = self.collect_local(inode, &mut st, offset, len)?;
                if for_pages && !local.keep && unprotected.is_none() {
                    unprotected = Some(UnprotectedPages::of(inode, &mut st));
                }
                if !waited && is_known {
                    self.note_read(file, &mut st);
                    self.read_ahead(inode, &mut st, offset, len);
                }
                is_known.then_some(local)
            };
            let Some(local) = local else {
                // Another answer came since, with the size but without the inline bytes.
                if self.leader.left(deadline).is_zero() {
                    return Err(Error::deadline(format!("read file {}: it changes without end", inode.ino)));
                }
                self.recovery.prepare_read(inode).await?;
                continue;
            };
            if !local.being_fetched || self.leader.left(deadline).is_zero() {
                return Ok(Some((local, unprotected)));
            }
            waited = true;
            let _ = self.env.clock.timeout(self.leader.left(deadline), changed).await; // checks again either way
        }
    }

    /// Collects the local bytes of `offset..offset + len`, newest first.
    fn collect_local(&self, inode: &Inode, st: &mut State, offset: u64, len: usize) -> Result<Local> {
        let size = st.size();
        let end = offset.saturating_add(len as u64).min(size);
        let start = offset.min(end);
        let mut assembly = Assembly::new(start, end);
        if start == end {
            assembly.missing.clear();
        }
        let layout = st.layout(inode.ino).ok();
        let mut strays = false;
        if let Some(layout) = layout.filter(|_| start < end) {
            let stripes = layout.stripe_of(start)..=layout.stripe_of(end - 1);
            strays = st.write.has_strays(stripes.clone());
            for (stripe, buf) in st.write.dirty_within(stripes.clone()) {
                let base = layout.stripe_start(*stripe);
                let (a, b) = (start.max(base) - base, end.min(base + layout.stripe_bytes()) - base);
                let parts = buf.copy_range(a as u32, b as u32);
                assembly.fill(parts.into_iter().map(|(at, bytes)| (base + u64::from(at), bytes)));
            }
            for (stripe, sending) in st.write.own_sends().filter(|(stripe, _)| stripes.contains(stripe)) {
                let base = layout.stripe_start(*stripe);
                assembly.fill(sending.parts.iter().map(|(at, bytes)| (base + u64::from(*at), bytes.clone())));
            }
        }
        let keep = st.lease.is_held();
        if let Inline::Yes(bytes) = &st.inline {
            assembly.fill([(0, bytes.clone())]);
            assembly.fill_zeros();
        }
        if keep && !assembly.is_complete() {
            let mut ahead = 0;
            let mut cache = self.memory.cache();
            for (a, b) in assembly.missing.clone() {
                let found = cache.get(inode.ino, a, b);
                ahead += found.iter().filter(|f| f.was_ahead).map(|f| f.bytes.len() as u64).sum::<u64>();
                assembly.fill(found.into_iter().map(|f| (f.offset, f.bytes)));
            }
            drop(cache);
            st.pages.note_used(ahead);
        }
        // No bytes of the file are on targets from here on.
        let on_targets_end = st.committed_size().max(st.write.sent_end());
        if keep && assembly.missing.iter().all(|(a, _)| *a >= on_targets_end) {
            assembly.fill_zeros();
        }
        let overlaps = |(a, b): &(u64, u64)| st.pages.is_fetching(*a, *b);
        let being_fetched =
            keep && (assembly.missing.iter().any(overlaps) || (strays && !assembly.is_complete()));
        let (data_change, seen) = (st.pages.data_change(), st.seen());
        Ok(Local { assembly, layout, data_change, keep, size, being_fetched, seen })
    }

    /// Whether bytes may have been evicted since `seen`: the lease was not held all the time, or this client
    /// itself has evicted, and the file was truncated.
    pub async fn was_evicted(&self, inode: &Inode, seen: Seen) -> Result<bool> {
        {
            let st = inode.lock();
            let own = st.tier.is_evicting() || st.tier.evictions() != seen.evictions;
            if seen.leased && !own && st.pages.leases_lost() == seen.leases_lost && self.leader.leases_hold()
            {
                return Ok(false);
            }
        }
        self.leases.refresh(inode).await?;
        Ok(inode.lock().lease.token_epoch() > seen.token_epoch)
    }

    /// Keeps fetched bytes if the file did not change meanwhile and the lease is still held.
    fn keep_fetched(&self, inode: &Inode, at: u64, bytes: &Bytes, size: u64, data_change: u64, ahead: bool) {
        let st = inode.lock();
        if !st.lease.is_held() || st.pages.data_change() != data_change || at >= size {
            return;
        }
        let n = (bytes.len() as u64).min(size - at) as usize;
        if n > 0 {
            self.memory.keep(inode.ino, at, bytes.slice(..n), false, ahead);
        }
    }

    /// Starts prefetching.
    fn read_ahead(self: &Arc<Self>, inode: &Arc<Inode>, st: &mut State, offset: u64, len: usize) {
        if !st.lease.is_held() || st.inline != Inline::No || st.lease.needs_recovery() {
            return;
        }
        let Ok(layout) = st.layout(inode.ino) else { return };
        // Uncommitted writes of this client are cached here.
        let size = st.committed_size();
        let len = (len as u64).min(size.saturating_sub(offset));
        if len == 0 {
            return;
        }
        let window_max = (self.memory.budget().limit_bytes() / 8).clamp(MIB, 32 * MIB);
        for (at, n) in st.pages.note_read(offset, len, size, window_max) {
            for (a, b) in by_stripe(&layout, at, at + n) {
                let under_way = st.pages.is_fetching(a, b);
                // The leader recalls offline bytes of sequential reads by itself.
                if under_way || st.pages.fetches() >= FETCHES_MAX || st.is_away(a, b) {
                    continue;
                }
                st.pages.begin_fetch(a, b);
                let (me, inode, data_change) = (self.clone(), inode.clone(), st.pages.data_change());
                self.env.tasks.spawn("read ahead", async move {
                    me.fetch_ahead(&inode, layout, a..b, size, data_change).await;
                    inode.lock().pages.end_fetch(a);
                    inode.changed.notify_waiters();
                });
            }
        }
    }

    async fn fetch_ahead(
        &self,
        inode: &Inode,
        layout: Layout,
        range: Range<u64>,
        size: u64,
        data_change: u64,
    ) {
        let cached: u64 = {
            let cache = self.memory.cache();
            cache.covered(inode.ino, range.start, range.end)
        };
        if cached == range.end - range.start {
            return;
        }
        match self.objects.fetch(inode, layout, &[(range.start, range.end)], self.leader.deadline()).await {
            Ok(fetched) => {
                for (at, bytes) in fetched.parts {
                    self.keep_fetched(inode, at, &bytes, size, data_change, true);
                }
            }
            // The read itself will meet the error, if it persists.
            Err(e) => tracing::debug!("read ahead of file {}: {e}", inode.ino),
        }
    }
}

/// Concurrent prefetches of one inode.
const FETCHES_MAX: usize = 16;

/// `start..end` cut at the borders of stripes.
fn by_stripe(layout: &Layout, start: u64, end: u64) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    let mut at = start;
    while at < end {
        let next = (layout.stripe_start(layout.stripe_of(at)) + layout.stripe_bytes()).min(end);
        parts.push((at, next));
        at = next;
    }
    parts
}

fn not_for_reading(handle: Handle) -> Error {
    Error::invalid(format!("file handle {} is not open for reading", handle.0))
}
