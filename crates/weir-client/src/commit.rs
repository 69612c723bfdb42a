//! Commits: reports to the leader of a file's bytes on targets and in its inode.
//!
//! Invariants: bytes that were sent and may be on targets are reported to the leader, or noted as still to
//! be reported. A commit is made under the write generation that it was made for, or not at all. The quota
//! that its bytes took leaves the reservation in the same step as the answer is applied.
use crate::base::Base;
use crate::inode::{Inline, Inode, Local, State};
use crate::inodes::Inodes;
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use crate::quota::{DirectReservation, Quota};
use crate::reports::Reports;
use crate::rights::Rights;
use crate::tiering::Tiering;
use crate::{plan, wall_time};
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::MutexGuard;
use weir_env::{Env, Instant};
use weir_proto::meta::{Commit, Entry, INLINE_MAX, Op, truncations};
use weir_proto::{ErrorKind, InodeId, Result, SessionId};

/// Further content of a commit of direct writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CommitExtra {
    Nothing,
    /// The inode no longer holds inline bytes.
    LeftInode,
    ReleasesToken,
    /// Reserves space, also past the end, and releases the token.
    Reserved,
    /// Releases the token with an append's place: only once.
    Appended,
}

impl CommitExtra {
    pub fn releases_token(self) -> bool {
        matches!(self, CommitExtra::ReleasesToken | CommitExtra::Reserved | CommitExtra::Appended)
    }
}

/// A commit under the Write lease that is about to be sent.
struct Prepared {
    commit: Commit,
    /// The changes that it takes.
    local: Option<Local>,
    write_generation: u64,
    /// All of the file's bytes go into its inode.
    inline: Option<InlineCommit>,
    /// It may be answered before it is durable.
    early: bool,
}

struct InlineCommit {
    content: Bytes,
    /// The number of sends to targets before it.
    sends: u64,
}

/// The leader has the file's bytes in its inode.
fn note_inline(st: &mut State, local: Option<Local>, inline: InlineCommit) {
    if let Some(local) = local {
        st.write.note_inline_committed(local);
    }
    // Bytes sent to targets since are newer than the inline bytes now.
    let is_older = st.write.send_count() != inline.sends;
    st.leaving.note_inline(is_older);
    st.inline = if st.leaving.has_begun() { Inline::No } else { Inline::Yes(inline.content) };
}

/// The leader has the file's size, and drops the inline bytes if the commit asked for that.
fn note_size(st: &mut State, local: Option<Local>, commit: &Commit) {
    let is_whole_size = commit.size == st.size();
    st.write.note_committed(local, is_whole_size);
    if commit.drop_inline {
        st.leaving.end();
    }
}

pub struct Commits {
    env: Env,
    leader: Arc<Leader>,
    inodes: Arc<Inodes>,
    quota: Arc<Quota>,
    leases: Arc<Leases>,
    tiering: Arc<Tiering>,
}

impl Commits {
    pub fn new(base: &Base, reports: &Reports, rights: &Rights) -> Commits {
        let Base { env, leader, inodes, .. } = base.clone();
        let Reports { quota, .. } = reports.clone();
        let Rights { leases, tiering, .. } = rights.clone();
        Commits { env, leader, inodes, quota, leases, tiering }
    }

    /// Commits a small file with its bytes inline. False: it does not fit there. `closing`: it need not be
    /// durable then.
    pub async fn inline(&self, inode: &Arc<Inode>, closing: bool) -> Result<bool> {
        let deadline = self.leader.deadline();
        let marking = inode.marking.lock().await;
        let Some(prepared) = self.prepare_inline(inode, closing) else { return Ok(false) };
        let write_generation = prepared.write_generation;
        let done = self.carry_out(inode, prepared, Some(marking), deadline).await;
        if let Err(e) = &done {
            let mut st = inode.lock();
            if st.write.generation() == write_generation {
                st.fail(e.clone().doing(format!("commit file {}", inode.ino)));
            }
        }
        done.map(|()| true)
    }

    fn prepare_inline(&self, inode: &Inode, early: bool) -> Option<Prepared> {
        let mut st = inode.lock();
        let local = st.write.local()?;
        let base = match &st.inline {
            Inline::Yes(bytes) => bytes.clone(),
            Inline::No if st.committed_size() == 0 => Bytes::new(),
            Inline::No | Inline::Unknown => return None,
        };
        // Bytes written directly meanwhile would be on targets, hidden by the inline bytes.
        let on_targets = st.write.has_sends() || st.direct.are_under_way() || st.lease.has_append_token();
        if on_targets || !plan::fits_inline(local.size, st.on_targets_end(), st.lease.is_write()) {
            return None;
        }
        let content = inline_content(&st, &base, local.size as usize);
        st.changed.add(0, local.size);
        let changed = st.changed.take_below(local.size);
        let commit = self.request(&st, inode.ino, local.size, true, Some(content.clone()));
        st.write.begin_declaring_clean();
        Some(Prepared {
            commit: Commit { changed, ..commit },
            local: Some(local),
            write_generation: st.write.generation(),
            inline: Some(InlineCommit { content, sends: st.write.send_count() }),
            early,
        })
    }

    /// Commits size and time. `flushed`: everything below is durable, or was changed again since. `closing`:
    /// no uncommitted bytes are left on targets once the file has no writer, and it need not be durable then.
    pub async fn size(
        &self,
        inode: &Arc<Inode>,
        closing: bool,
        flushed: u64,
        deadline: Instant,
    ) -> Result<()> {
        let marking = if closing { Some(inode.marking.lock().await) } else { None };
        let prepared = self.prepare_size(inode, closing, flushed);
        self.carry_out(inode, prepared, marking, deadline).await
    }

    fn prepare_size(&self, inode: &Inode, closing: bool, flushed: u64) -> Prepared {
        let mut st = inode.lock();
        let layout = st.layout(inode.ino).ok();
        let durable = layout.map_or(st.size(), |layout| st.durable_size(&layout));
        let clean = closing && st.is_all_sent();
        if clean {
            st.write.begin_declaring_clean();
        }
        let size = durable.max(flushed).max(st.committed_size());
        let changed = st.changed.take_below(size);
        st.write.note_commit(self.env.clock.now());
        let commit = Commit { changed, ..self.request(&st, inode.ino, size, clean, None) };
        let write_generation = st.write.generation();
        Prepared { commit, local: st.write.local(), write_generation, inline: None, early: closing }
    }

    /// Sends a commit under the Write lease, and applies its answer. `marking`: held if it declares that no
    /// uncommitted bytes are on targets.
    async fn carry_out(
        &self,
        inode: &Arc<Inode>,
        prepared: Prepared,
        marking: Option<MutexGuard<'_, ()>>,
        deadline: Instant,
    ) -> Result<()> {
        let Prepared { commit, local, write_generation, inline, early } = prepared;
        assert!(marking.is_some() || !commit.clean, "a file is declared clean by one task at a time");
        let revoke_clock = self.inodes.revoke_clock();
        let limited = inode.lock().quota.limited();
        let committing = self.quota.committing(limited).await;
        let reported = self.commit_in(inode, (write_generation, early), &commit, deadline).await;
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
        let is_inline = inline.is_some();
        match inline {
            Some(inline) => note_inline(&mut st, local, inline),
            None => note_size(&mut st, local, &commit),
        }
        self.inodes.apply_unasked(&mut st, &entry, revoke_clock);
        self.quota.end_commit(&mut st, committing, added);
        if let (false, Ok(layout)) = (is_inline, st.layout(inode.ino)) {
            let first = layout.stripe_of(st.committed_size());
            st.write.forget_touched_below(first);
        }
        self.inodes.forget_if_saved(inode.ino, &st);
        Ok(())
    }

    /// A commit under the write generation that it was made under, or none: a lost lease takes the changes of
    /// the commit with it.
    async fn commit_in(
        &self,
        inode: &Arc<Inode>,
        (write_generation, early): (u64, bool),
        commit: &Commit,
        deadline: Instant,
    ) -> Result<Entry> {
        let still = || inode.check_generation(write_generation);
        let how = Change::repeatable().until(deadline).while_still(&still);
        let how = if early { how } else { how.durably() };
        let mut commit = commit.clone();
        loop {
            match self.leader.change(how, |op| Commit { op, ..commit.clone() }).await {
                // This client asked for a newer token epoch meanwhile, and the leader has granted it: the
                // Write lease is the same.
                Err(e) if e.kind == ErrorKind::Stale && !self.leader.left(deadline).is_zero() => {
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
        self.leases.refresh(inode).await?;
        Ok(inode.lock().lease.token_epoch())
    }

    fn request(&self, st: &State, ino: InodeId, size: u64, clean: bool, inline: Option<Bytes>) -> Commit {
        let is_inline = inline.is_some();
        assert!(inline.as_ref().is_none_or(|b| b.len() as u64 == size), "inline bytes are all of the file");
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

    /// A write failed, but parts of it may be on targets, up to `end`. If that is past the size, or the valid
    /// bytes are inline, a client that later grows the file must clean there first. Bytes below the size are
    /// readable, so home must get them.
    pub async fn left_behind(&self, inode: &Arc<Inode>, end: u64) {
        let commit = {
            let mut st = inode.lock();
            let size = st.committed_size();
            let changed = st.changed.take_below(size);
            if changed.is_empty() && end <= size && st.inline == Inline::No {
                st.write.note_reported(u64::MAX);
                return;
            }
            let data_end = st.on_targets_end().max(end);
            let request = self.request(&st, inode.ino, 0, false, None);
            Commit { data_end, changed, drop_inline: false, ..request }
        };
        let revoke_clock = self.inodes.revoke_clock();
        let how = Change::repeatable().durably();
        match self.leader.change(how, |op| Commit { op, ..commit.clone() }).await {
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
                    "file {}: the rest of a failed write was not reported to the leader: {e}",
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
    pub async fn sent(
        &self,
        inode: &Arc<Inode>,
        range: (u64, u64),
        under: u32,
        (extra, reservation): (CommitExtra, Option<DirectReservation<'_>>),
    ) -> Result<bool> {
        let token = self.direct(inode, range, Some(under), (extra, reservation)).await?;
        Ok(truncations(token) > truncations(under))
    }

    /// Reports the time of direct writes to the leader, and that the file is at least `size` long.
    pub async fn time(&self, inode: &Arc<Inode>, size: u64, extra: CommitExtra) -> Result<()> {
        self.direct(inode, (size, size), None, (extra, None)).await.map(drop)
    }

    /// Releases the token with reserved space, of which nothing is written yet; the file is then at least
    /// `size` long.
    pub async fn reserved(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        reservation: DirectReservation<'_>,
    ) -> Result<()> {
        let extra = CommitExtra::Reserved;
        self.direct(inode, (size, size), None, (extra, Some(reservation))).await.map(drop)
    }

    /// Returns the token epoch of the answer. `under`: the file's current one, if none is given.
    async fn direct(
        &self,
        inode: &Arc<Inode>,
        (offset, end): (u64, u64),
        under: Option<u32>,
        (extra, reservation): (CommitExtra, Option<DirectReservation<'_>>),
    ) -> Result<u32> {
        let mtime = wall_time(&self.env);
        let _under_way = self.tiering.begin_direct(inode, u64::MAX, u64::MAX).await;
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
            CommitExtra::Appended => self.leader.change(Change::once().durably().until(deadline), make).await,
            _ => self.leader.change(Change::repeatable().durably().until(deadline), make).await,
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
            self.time(inode, 0, CommitExtra::Nothing).await?;
        }
        Ok(())
    }
}

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
