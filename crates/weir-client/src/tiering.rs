//! Evicted bytes: those that are at home only. A read or write of them first requests a recall; movers carry
//! it out.
//!
//! Invariants: a file without such bytes costs nothing. The evicted ranges are believed under a lease only:
//! while one is held they can only become fewer. Bytes that cannot be recalled are an error with its reason,
//! never zeros. A mover's stripe is written under the token epoch of its recall, so a late one changes
//! nothing.
mod evict_own;

use crate::base::Base;
use crate::handles::Handles;
use crate::inode::{Inode, Ranges, State, touches};
use crate::inodes::Inodes;
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use crate::status::Counters;
use crate::types::{ClientConfig, Handle};
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::meta::Cred;
use weir_proto::recall::{
    AwaitRecall, Evict, Evicted, EvictedRanges, EvictionLevel, GetEviction, GetTierState, SetMarks,
    SetPinned, TierState, WantRecall,
};
use weir_proto::{Error, ErrorKind, InodeId, Result};
use weir_watch::{Object, Reason};

/// The wait of one request for the state of bytes; then it is asked again, so a failover of the leader
/// does no harm.
const ASK_MS: u32 = 5_000;
/// Bytes that are waited for at a time, with a patience of their own.
const STEP_BYTES: u64 = 64 << 20;
impl State {
    /// Whether a part of `from..to` is offline, or may be as far as is known.
    pub fn is_away(&self, from: u64, to: u64) -> bool {
        if self.tier.is_being_evicted(from, to) {
            return true;
        }
        if self.attr.as_ref().is_none_or(|a| a.evicted == 0) {
            return false;
        }
        self.tier.may_be_evicted(from, to)
    }
}

pub struct Tiering {
    env: Env,
    config: Arc<ClientConfig>,
    counters: Arc<Counters>,
    leader: Arc<Leader>,
    inodes: Arc<Inodes>,
    handles: Arc<Handles>,
    leases: Arc<Leases>,
}

impl Tiering {
    pub fn new(base: &Base, leases: Arc<Leases>) -> Tiering {
        let Base { env, config, counters, leader, inodes, handles, .. } = base.clone();
        Tiering { env, config, counters, leader, inodes, handles, leases }
    }

    /// The offline stripes of a file, as ranges of bytes, from the stripe of `from` on.
    pub async fn away(&self, inode: &Inode, from: u64) -> Result<Ranges> {
        {
            let st = inode.lock();
            if st.attr.as_ref().is_none_or(|a| a.evicted == 0) {
                return Ok(Ranges::new());
            }
            if let Some(known) = st.tier.evicted().filter(|_| st.lease.is_held()) {
                return Ok(known.clone());
            }
        }
        let (layout, leases_lost, evictions) = {
            let st = inode.lock();
            (st.layout(inode.ino), st.pages.leases_lost(), st.tier.evictions())
        };
        // A file that was never online has no placement yet; for any request, the leader knows the stripes.
        let stripe = layout.map_or(1, |l| l.stripe_bytes());
        let (mut ranges, ino) = (Ranges::new(), inode.ino);
        let leased = inode.lock().lease.is_held();
        let mut from = if leased { 0 } else { from / stripe * stripe };
        loop {
            let list = self.leader.ask(|session| EvictedRanges { session, ino, from }).await?;
            let up = |at: u64| at.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
            ranges.extend(list.ranges.iter().map(|r| (r.from, up(r.to))));
            match list.ranges.last() {
                // Without a lease the next request goes to the leader anyway.
                Some(last) if list.more && leased => from = last.to,
                _ => break,
            }
        }
        let mut st = inode.lock();
        if leased && st.lease.is_held() && st.pages.leases_lost() == leases_lost {
            st.tier.note_evicted(&ranges, evictions);
        }
        Ok(ranges)
    }

    /// Whether a part of `from..to` is offline.
    pub async fn is_away(&self, inode: &Inode, from: u64, to: u64) -> Result<bool> {
        if !inode.lock().is_away(from, to) {
            return Ok(false);
        }
        Ok(touches(&self.away(inode, from).await?, from, to))
    }

    /// Returns when no part of `from..to` is offline. False: none was. May be abandoned at any time.
    pub async fn recall(&self, inode: &Inode, from: u64, to: u64) -> Result<bool> {
        let mut waited = false;
        let mut at = from;
        while at == from || at < to {
            // Each step has its own time limit: a long range takes long.
            let end = to.min(at.saturating_add(STEP_BYTES));
            if self.is_away(inode, at, end).await? {
                let deadline = self.env.clock.now() + self.config.recall_patience;
                self.await_recall(inode, at, end.max(at.saturating_add(1)), deadline).await?;
                // Others may be online again, too.
                inode.lock().tier.forget_evicted();
                waited = true;
            }
            let next = self.next_away(inode, end);
            at = next.max(end).max(at.saturating_add(1));
        }
        Ok(waited)
    }

    /// The next bytes that may be offline, at or after `from`.
    fn next_away(&self, inode: &Inode, from: u64) -> u64 {
        let st = inode.lock();
        match (&st.attr, st.tier.evicted()) {
            (Some(attr), _) if attr.evicted == 0 => u64::MAX,
            (Some(_), Some(ranges)) => {
                ranges.iter().find(|(_, b)| *b > from).map_or(u64::MAX, |(a, _)| from.max(*a))
            }
            (attr, _) if attr.as_ref().is_some_and(|a| from >= a.size) => u64::MAX,
            _ => from,
        }
    }

    async fn await_recall(&self, inode: &Inode, from: u64, to: u64, deadline: Instant) -> Result<()> {
        let (ino, doing) = (inode.ino, format!("file {}: bytes {from} to {to} are at home only", inode.ino));
        let mut why = String::from("the metadata leader has not answered");
        let wait = self.env.watch.wait(Reason::Recall, Object::new("inode", ino.0));
        loop {
            let left = self.leader.left(deadline);
            if left.is_zero() {
                return Err(Error::io(format!("{doing} and was not recalled in time: {why}")));
            }
            let wait_ms = (left.as_millis() as u32).min(ASK_MS);
            let ask = |session| AwaitRecall { session, ino, from, to, wait_ms };
            let until = self.env.clock.now() + Duration::from_millis(wait_ms.into()) + self.config.patience;
            match self.leader.ask_until(until, ask).await {
                Ok(waited) if waited.done => return Ok(()),
                Ok(waited) if waited.failed => {
                    return Err(Error::io(format!("{doing} and cannot be recalled: {}", waited.why)));
                }
                Ok(waited) => {
                    wait.holder(&waited.why);
                    why = waited.why;
                }
                Err(e) => return Err(e.of_kind(ErrorKind::Io).doing(doing)),
            }
        }
    }

    pub async fn evict(&self, cred: &Cred, ino: InodeId, from: u64, to: u64) -> Result<Evicted> {
        if let Some(inode) = self.inodes.known(ino).filter(|inode| inode.lock().opens.is_for_writing()) {
            return self.evict_own(cred, &inode, from, to).await;
        }
        let revoke_clock = self.inodes.revoke_clock();
        let ask = |op| Evict { op, cred: cred.clone(), ino, from, to, under: 0 };
        let evicted = self.leader.change(Change::once(), ask).await?;
        self.inodes.apply_unasked(&mut self.inodes.get(ino).lock(), &evicted.entry, revoke_clock);
        Ok(evicted)
    }

    pub async fn want_recall(&self, ino: InodeId, from: u64, to: u64) -> Result<()> {
        self.leader.ask(|session| WantRecall { session, ino, from, to }).await
    }

    pub fn may_wait_for_home(&self, handle: Handle) -> bool {
        let file = self.handles.open_file(handle);
        file.is_some_and(|f| f.inode.lock().attr.as_ref().is_some_and(|a| a.evicted > 0))
    }

    pub async fn recall_for(&self, handle: Handle, offset: Option<u64>, len: usize) -> Result<()> {
        let file = self.handles.get(handle)?;
        let from = offset.unwrap_or_else(|| file.inode.lock().size());
        self.recall(&file.inode, from, from.saturating_add(len as u64)).await.map(|_| ())
    }

    /// Waits until all of a file is online.
    pub async fn recall_file(&self, ino: InodeId) -> Result<()> {
        let inode = self.inodes.get(ino);
        self.leases.refresh(&inode).await?;
        self.want_recall(ino, 0, u64::MAX).await?;
        self.recall(&inode, 0, u64::MAX).await.map(|_| ())
    }

    pub async fn pin(&self, cred: &Cred, ino: InodeId, pinned: bool) -> Result<()> {
        let revoke_clock = self.inodes.revoke_clock();
        let ask = |op| SetPinned { op, cred: cred.clone(), ino, pinned };
        let entry = self.leader.change(Change::once(), ask).await?;
        self.inodes.apply_unasked(&mut self.inodes.get(ino).lock(), &entry, revoke_clock);
        Ok(())
    }

    pub async fn eviction(&self, cred: &Cred, set: Option<SetMarks>) -> Result<Vec<EvictionLevel>> {
        let ask = |session| GetEviction { session, cred: cred.clone(), set: set.clone() };
        Ok(self.leader.ask(ask).await?.levels)
    }

    pub async fn tier_state(&self, ino: InodeId) -> Result<TierState> {
        self.leader.ask(|session| GetTierState { session, ino }).await
    }
}
