//! Sizes and space of a file: truncation, reserved space, zeroed ranges.
//!
//! Invariant: a truncation or a zeroed range at the same time as a write fences the write, or is fenced by it
//! and reads the file again.
use crate::base::Base;
use crate::data::{Data, STRIPES_AT_ONCE};
use crate::handles::{Handles, OpenFile};
use crate::inode::{Inline, Inode, Wish};
use crate::inodes::Inodes;
use crate::join::join_all;
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use crate::local_names::LocalNames;
use crate::memory::Memory;
use crate::objects::Objects;
use crate::plan::Occasion;
use crate::quota::Quota;
use crate::recovery::Recovery;
use crate::reports::Reports;
use crate::rights::Rights;
use crate::tiering::Tiering;
use crate::types::{Allocate, Handle, SetAttrs, Stat};
use crate::wall_time;
use crate::write_back::WriteBack;
use crate::writer::{TRIES_MAX, Way, WriteTarget, Writer, is_ready_to_buffer, not_for_writing, too_big};
use std::ops::Range;
use std::sync::Arc;
use weir_env::{BoxFuture, Env};
use weir_proto::map::Layout;
use weir_proto::meta::{Cred, FILE_BYTES_MAX, SetAttr};
use weir_proto::{Error, ErrorKind, InodeId, NameRule, Result};

/// The whole stripes of a range: the last one of the file counts as whole if the range ends with the file.
fn whole_stripes(layout: &Layout, size: u64, offset: u64, end: u64) -> Range<u64> {
    let start = offset.next_multiple_of(layout.stripe_bytes());
    let stop = if end >= size { end } else { end - end % layout.stripe_bytes() };
    if start < stop { start..stop } else { end..end }
}

/// The bytes of a range in whole cells, likewise: a cell of zeros takes no space once its stripe is sealed.
fn whole_cells(layout: &Layout, size: u64, offset: u64, end: u64) -> u64 {
    let cell_bytes = u64::from(layout.cell_bytes());
    let stop = if end >= size { end } else { end - end % cell_bytes };
    stop.saturating_sub(offset.next_multiple_of(cell_bytes))
}

/// Stripes that are emptied before other operations get their turn at the file.
const EMPTIED_MAX: u64 = 4096;

pub struct Resize {
    env: Env,
    leader: Arc<Leader>,
    data: Arc<Data>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    handles: Arc<Handles>,
    quota: Arc<Quota>,
    local_names: Arc<LocalNames>,
    leases: Arc<Leases>,
    tiering: Arc<Tiering>,
    objects: Arc<Objects>,
    recovery: Arc<Recovery>,
    write_back: Arc<WriteBack>,
    writer: Arc<Writer>,
}

impl Resize {
    pub fn new(
        base: &Base,
        reports: &Reports,
        rights: &Rights,
        write_back: Arc<WriteBack>,
        writer: Arc<Writer>,
    ) -> Resize {
        let Base { env, leader, data, memory, inodes, handles, .. } = base.clone();
        let Reports { quota, local_names, .. } = reports.clone();
        let Rights { leases, tiering, objects, recovery, .. } = rights.clone();
        Resize {
            env,
            leader,
            data,
            memory,
            inodes,
            handles,
            quota,
            local_names,
            leases,
            tiering,
            objects,
            recovery,
            write_back,
            writer,
        }
    }

    /// Sets the size: all other changes of the file are saved first. `through`: the open file of the call, if
    /// any.
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
        self.local_names.await_known(inode).await?;
        let _grows = inode.growing.lock().await;
        let mut fences = self.leases.fences();
        loop {
            let under = inode.lock().lease.token_epoch();
            let way = self.writer.prepare_write(inode, Some(size), 0).await?;
            through.map_or(Ok(()), OpenFile::works)?;
            let set = match way {
                Way::Direct => self.set_size_with_token(cred, inode, set, size).await,
                Way::Buffer => self.set_size_now(cred, inode, set, size, true).await,
            };
            match set {
                Err(e) => self.leases.go_on_after(inode, e, under, &mut fences).await?,
                stat => return stat,
            }
        }
    }

    /// Truncates or extends a file that other clients write, too.
    async fn set_size_with_token(
        &self,
        cred: &Cred,
        inode: &Arc<Inode>,
        set: &SetAttrs,
        size: u64,
    ) -> Result<Stat> {
        self.writer.take_append_token(inode).await?;
        let done = async {
            let stat = self.set_size_now(cred, inode, set, size, false).await?;
            match self.writer.clean_and_report(inode).await {
                // The token was lost with a connection. The truncation is done, and the leader knows that old
                // bytes may be past it.
                Err(e) if e.kind == ErrorKind::Stale => {
                    let mut st = inode.lock();
                    let pending = st.direct.are_pending() && st.opens.is_for_writing();
                    st.direct.note_pending(pending);
                    Ok(stat)
                }
                reported => reported.map(|()| stat),
            }
        };
        let done = done.await;
        self.writer.end_token(inode, done).await
    }

    /// Sets the size under this client's append token, or under its Write lease (`exclusive`).
    async fn set_size_now(
        &self,
        cred: &Cred,
        inode: &Arc<Inode>,
        set: &SetAttrs,
        size: u64,
        exclusive: bool,
    ) -> Result<Stat> {
        let _one = inode.flushing.lock().await;
        self.write_back.flush_locked(inode, Occasion::Growing, false).await?;
        let grows_over = {
            let st = inode.lock();
            size > st.committed_size() && st.has_old_tail()
        };
        if grows_over {
            self.recovery.clean_old_tail_locked(inode).await?;
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
        let now = wall_time(&self.env);
        let time = |t: Option<crate::types::SetTime>| {
            t.map(|t| match t {
                crate::types::SetTime::Now => now,
                crate::types::SetTime::At(t) => t,
            })
        };
        let (ino, revoke_clock) = (inode.ino, self.inodes.revoke_clock());
        let (mode, uid, gid, atime, mtime) = (set.mode, set.uid, set.gid, time(set.atime), time(set.mtime));
        let request = |op| SetAttr { op, cred: cred.clone(), ino, mode, uid, gid, size, atime, mtime };
        let before = inode.lock().write.sent_end();
        let entry = self.leader.change(Change::once(), request).await?;
        if let Some(size) = size {
            self.truncate_local(inode, size, before, exclusive);
        }
        Ok(self.inodes.apply(&entry, revoke_clock))
    }

    /// This client has set the file to `size`: its knowledge of data beyond is outdated.
    pub fn truncate_local(&self, inode: &Inode, size: u64, sent_end: u64, exclusive: bool) {
        let mut st = inode.lock();
        let before = st.size();
        let shrinks = size < before.max(sent_end).max(st.committed_size());
        st.attr_old = true;
        st.tier.forget_layers();
        st.pages.note_change();
        if let Ok(layout) = st.layout(inode.ino) {
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
        st.quota.note_truncated(before, size);
        self.quota.settle(&mut st);
        self.memory.cache().remove(inode.ino, size, u64::MAX);
    }

    pub async fn fallocate(&self, handle: Handle, what: Allocate, offset: u64, len: u64) -> Result<()> {
        let file = self.handles.get(handle)?;
        if !file.mode.write {
            return Err(not_for_writing(handle));
        }
        if len == 0 {
            return Err(Error::invalid("fallocate of no bytes"));
        }
        let end = offset.checked_add(len).filter(|e| *e <= FILE_BYTES_MAX).ok_or_else(too_big)?;
        self.local_names.await_known(&file.inode).await?;
        let wish = |grows, zeroes| Wish { offset, end, grows, zeroes };
        match what {
            Allocate::Extend => self.reserve(&file, wish(true, false)).await?,
            Allocate::Reserve => self.reserve(&file, wish(false, false)).await?,
            Allocate::PunchHole => self.zero_range(&file, offset, end, true).await?,
            Allocate::ZeroRange | Allocate::ExtendByZeros => {
                self.reserve(&file, wish(what == Allocate::ExtendByZeros, true)).await?;
                self.zero_range(&file, offset, end, false).await?;
            }
        }
        if file.inode.lock().lease.is_write() {
            // The leader must know the file's allocation before the call returns, because `stat` reports it.
            self.write_back.flush(&file.inode, Occasion::Growing, false).await?;
        }
        Ok(())
    }

    /// Charges the space of a range, of which the file may have written nothing yet. If it grows, it is then
    /// `end` bytes long, or longer: bytes that other clients write past that meanwhile stay.
    async fn reserve(&self, file: &OpenFile, wish: Wish) -> Result<()> {
        let inode = &file.inode;
        let _grows = inode.growing.lock().await;
        let deadline = self.leader.deadline();
        for _ in 0..TRIES_MAX {
            let way = self.writer.prepare_write(inode, Some(wish.end), 0).await?;
            file.works()?;
            if way == Way::Direct {
                match self.writer.reserve_with_token(inode, wish).await {
                    Err(e) if e.kind == ErrorKind::Stale && !self.leader.left(deadline).is_zero() => continue,
                    done => return done,
                }
            }
            self.quota.reserve_for(inode, &wish).await?;
            let mut st = inode.lock();
            let growth = st.reservation(&wish);
            if !is_ready_to_buffer(&st, wish.end) || !self.quota.spend(&mut st, growth) {
                continue;
            }
            st.quota.note_growth(growth);
            let size = st.size();
            if wish.grows && wish.end > size {
                st.changed.add(size, wish.end);
            }
            // Even if nothing is missing: the times change.
            st.note_write(
                if wish.grows { wish.end } else { size },
                wall_time(&self.env),
                self.env.clock.now(),
            );
            self.quota.settle(&mut st);
            self.inodes.note_dirty(inode.ino);
            return Ok(());
        }
        Err(Error::unavailable(format!(
            "reserve space of file {}: its lease came and went {TRIES_MAX} times",
            inode.ino
        )))
    }

    /// Zeroes bytes below the size. A concurrent truncation, or a snapshot's read, fences this as it fences a
    /// write. `frees`: the zeroed range then takes no space.
    async fn zero_range(&self, file: &OpenFile, offset: u64, end: u64, frees: bool) -> Result<()> {
        let inode = &file.inode;
        let (mut fences, mut at) = (self.leases.fences(), offset);
        loop {
            let way = self.writer.prepare_write(inode, Some(at), (end - at) as usize).await?;
            if way == Way::Direct {
                self.leases.refresh(inode).await?;
            }
            let (under, end) = {
                let st = inode.lock();
                (st.lease.token_epoch(), end.min(st.size()))
            };
            if at >= end {
                return Ok(());
            }
            match self.zero_some(file, at, end, way, frees).await {
                Err(e) => self.leases.go_on_after(inode, e, under, &mut fences).await?,
                Ok(done) => at = done,
            }
        }
    }

    /// Returns the end of the zeroed part.
    async fn zero_some(&self, file: &OpenFile, offset: u64, end: u64, way: Way, frees: bool) -> Result<u64> {
        let inode = &file.inode;
        if inode.lock().inline == Inline::Unknown {
            self.leases.refresh(inode).await?;
        }
        // Zeros written inline could make the file longer, if another client truncates it now; zeros on
        // targets do not.
        if inode.lock().inline != Inline::No {
            self.writer.leave_inode_with_token(inode).await?;
        }
        let _one = loop {
            self.tiering.recall(inode, offset, end).await?;
            let one = inode.flushing.lock().await;
            let st = inode.lock();
            // Without the lease no client evicts a file that is open for writing.
            if !st.lease.is_write() || !st.is_away(offset, end) {
                break one;
            }
        };
        self.write_back.flush_locked(inode, Occasion::Growing, way == Way::Buffer).await?;
        let own = self.objects.copy_up(inode, offset, end).await?;
        // Other writers of the file number their overlays over the present stripes.
        let whole = match way {
            Way::Buffer => {
                let st = inode.lock();
                whole_stripes(&st.layout(inode.ino)?, st.size(), offset, end)
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
                whole_cells(&st.layout(inode.ino)?, st.size(), offset, *done)
            }
            _ => 0,
        };
        let most = if frees && freed > 0 { self.most_data(inode, own, freed).await } else { None };
        let mtime = wall_time(&self.env);
        let mut st = inode.lock();
        st.pages.note_change();
        st.changed.add(offset, end);
        if let Some((sends, most)) = most {
            let is_all = st.write.send_count() == sends && !st.write.has_dirty();
            st.quota.note_freed(freed, most.filter(|_| is_all));
        }
        // The Write lease may have been lost meanwhile: then this client must not report the size.
        if st.lease.is_write() {
            let size = st.size();
            st.note_write(size, mtime, self.env.clock.now());
        } else {
            st.direct.note_pending(true);
        }
        self.quota.settle(&mut st);
        self.inodes.note_dirty(inode.ino);
        self.memory.cache().remove(inode.ino, offset, end);
        done
    }

    /// Zeros over the present bytes, which stay beneath them until the stripes are sealed.
    async fn zero_part(&self, file: &OpenFile, own: InodeId, offset: u64, end: u64) -> Result<()> {
        let inode = &file.inode;
        let sends = self.leases.may_send(inode).await?;
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
            let layout = st.layout(inode.ino)?;
            for stripe in layout.stripe_of(offset)..=layout.stripe_of(end - 1) {
                st.write.touch(stripe, end);
            }
            WriteTarget::of(&st, inode.ino)?
        };
        let zeroed = self.writer.overlay_range(to, offset, None, end - offset).await;
        drop(sends);
        zeroed
    }

    /// Empties the stripes of a range that have data, some thousands of them at most; returns how far it
    /// came.
    async fn empty_stripes(&self, inode: &Arc<Inode>, own: InodeId, whole: Range<u64>) -> Result<u64> {
        let layout = inode.lock().layout(inode.ino)?;
        let Range { start, end } = whole;
        let (mut stripe, to) = (layout.stripe_of(start), layout.stripe_of(end - 1) + 1);
        for _ in 0..EMPTIED_MAX / STRIPES_AT_ONCE {
            let known =
                self.data.next_stripe(self.data.stripe(own, layout, stripe, self.leader.deadline())).await;
            stripe = known.unwrap_or(to).min(to);
            let next = to.min(stripe + STRIPES_AT_ONCE);
            let emptied = (stripe..next).map(|s| {
                let deadline = self.leader.deadline();
                Box::pin(async move {
                    let cells = self.data.cells_with_data(self.data.stripe(own, layout, s, deadline)).await;
                    if !cells.contains(&true) {
                        return Ok(true);
                    }
                    self.write_back.empty_stripe(inode, own, s, end).await
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

    /// The number of sends so far, and an upper bound of the data that is left after `freed` bytes were
    /// freed: in a file without holes the rest of its size; otherwise counted, if that does not take long.
    async fn most_data(&self, inode: &Inode, own: InodeId, freed: u64) -> Option<(u64, Option<u64>)> {
        let (sends, size, is_dense, is_here, layout) = {
            let st = inode.lock();
            if st.quota.is_reserved_beyond(st.size()) {
                return None; // the space of the hole stays with that past the end
            }
            let is_here = st.attr.as_ref().is_some_and(|a| a.evicted == 0 && a.layers.is_none());
            (
                st.write.send_count(),
                st.size(),
                st.quota.allocated() >= st.size(),
                is_here,
                st.layout(inode.ino).ok()?,
            )
        };
        let most = match (is_dense, is_here) {
            (true, _) => Some(size.saturating_sub(freed)),
            (false, true) => self.data.data_bytes(own, layout, size, self.leader.deadline()).await,
            (false, false) => None,
        };
        Some((sends, most))
    }
}
