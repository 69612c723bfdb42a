//! Leftovers of a dead writer in a file, and old bytes past its end: decided, truncated, zeroed.
//!
//! Invariant: a file is read and written again only when each prepared stripe is everywhere or nowhere.
use crate::base::Base;
use crate::data::{Data, Done, Overlay, StripeRef};
use crate::inode::{Inline, Inode};
use crate::inodes::Inodes;
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use crate::objects::Objects;
use crate::plan::first_stripe_after;
use crate::tiering::Tiering;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::meta::{LeaseKind, Recovered};
use weir_proto::{Error, ErrorKind, InodeId, PgId, Result, Version};

/// Tries of a file's recovery when opens of this client cross it.
const RECOVERIES_MAX: u32 = 8;

/// The interval of checks whether another client has recovered a file, or a member with a version to commit
/// has returned.
const RECOVERY_POLL: Duration = Duration::from_millis(50);

pub struct Recovery {
    env: Env,
    leader: Arc<Leader>,
    data: Arc<Data>,
    inodes: Arc<Inodes>,
    leases: Arc<Leases>,
    tiering: Arc<Tiering>,
    objects: Arc<Objects>,
}

impl Recovery {
    pub fn new(base: &Base, leases: Arc<Leases>, tiering: Arc<Tiering>, objects: Arc<Objects>) -> Recovery {
        let Base { env, leader, data, inodes, .. } = base.clone();
        Recovery { env, leader, data, inodes, leases, tiering, objects }
    }

    /// Finishes the work of a dead writer: fences it, decides prepared stripes, truncates bytes that were
    /// never committed.
    pub async fn recover(&self, inode: &Arc<Inode>) -> Result<()> {
        let (mut crossed, deadline) = (0, self.leader.deadline());
        loop {
            self.wait_to_recover(inode, deadline).await?;
            let _one = inode.flushing.lock().await;
            if !inode.lock().lease.needs_recovery() {
                return Ok(());
            }
            // Another task of this client may have returned the lease meanwhile.
            if self.leases.acquire(inode, LeaseKind::Write).await? != LeaseKind::Write {
                continue;
            }
            match self.recover_locked(inode).await {
                // Another open of this client acquired the Write lease again meanwhile: retry, under its
                // epoch.
                Err(e) if e.kind == ErrorKind::Stale && crossed < RECOVERIES_MAX => {
                    crossed += 1;
                    tracing::debug!("file {}: {e}", inode.ino);
                }
                done => return done,
            }
        }
    }

    /// Acquires the preconditions of a read: a lease or fresh attributes, known inline bytes, a recovered
    /// file.
    pub async fn prepare_read(&self, inode: &Arc<Inode>) -> Result<()> {
        self.leader.sure_of_leases().await?;
        let unknown = {
            let st = inode.lock();
            !st.lease.is_held() || st.inline == Inline::Unknown || st.attr_old && st.write.local().is_none()
        };
        if unknown {
            self.leases.refresh(inode).await?;
        }
        let recover = inode.lock().lease.needs_recovery();
        if recover {
            self.recover(inode).await?;
            self.leases.refresh(inode).await?;
        }
        Ok(())
    }

    /// A dead writer's last stripes are decided once, for the file and for its versions in snapshots and
    /// clones.
    pub async fn settle_left(&self, ino: InodeId) -> Result<()> {
        let inode = self.inodes.get(ino);
        let recovered = async {
            // A lease from before the death does not show it.
            self.leases.refresh(&inode).await?;
            self.prepare_read(&inode).await
        };
        match recovered.await {
            // It has been removed since, together with its last writer.
            Err(e) if e.kind == ErrorKind::Stale => Ok(()),
            recovered => recovered,
        }
    }

    /// Waits until this client may recover the file, or another one has. Without the lock on flushes: the
    /// holder of its append token needs that to end it, and until then no client gets the lease.
    async fn wait_to_recover(&self, inode: &Inode, deadline: Instant) -> Result<()> {
        while inode.lock().lease.needs_recovery() {
            let granted = self.leases.acquire(inode, LeaseKind::Write).await?;
            if inode.lock().lease.needs_recovery() && self.leader.left(deadline).is_zero() {
                return Err(Error::deadline(format!(
                    "file {}: its last writer died, and its recovery by another client does not end",
                    inode.ino
                )));
            }
            if granted == LeaseKind::Write {
                return Ok(());
            }
            self.env.clock.sleep(RECOVERY_POLL).await;
        }
        Ok(())
    }

    async fn recover_locked(&self, inode: &Arc<Inode>) -> Result<()> {
        let (layout, object, size, token_epoch, recover) = {
            let st = inode.lock();
            let layout = st.layout(inode.ino);
            (
                layout,
                st.object(inode.ino),
                st.committed_size(),
                st.lease.token_epoch(),
                st.lease.needs_recovery(),
            )
        };
        if !recover {
            return Ok(());
        }
        if let Ok(layout) = layout {
            let first_after = first_stripe_after(size, layout.stripe_bytes());
            let doubt = self
                .data
                .drop_file(
                    self.data.file_id(object),
                    &layout,
                    first_after,
                    token_epoch,
                    self.leader.deadline(),
                )
                .await?;
            let mut in_doubt: Vec<(u64, PgId, Version)> = doubt
                .iter()
                .filter(|p| p.cell.stripe < first_after)
                .map(|p| (p.cell.stripe, p.group, p.version))
                .collect();
            in_doubt.dedup();
            for (stripe, _, version) in in_doubt {
                let s = self.data.stripe(object, layout, stripe, self.leader.deadline());
                self.decide(s, version, token_epoch).await?;
            }
            self.zero_tail(inode, layout, size, u64::MAX, token_epoch).await?;
        }
        let revoke_clock = self.inodes.revoke_clock();
        let ino = inode.ino;
        let entry = self.leader.change(Change::repeatable(), |op| Recovered { op, ino, token_epoch }).await?;
        tracing::info!("file {ino}: recovered after its writer's death, {size} bytes");
        self.inodes.apply(&entry, revoke_clock);
        let mut st = inode.lock();
        st.lease.note_recovery(false);
        let is_ours = st.lease.is_write();
        st.write.note_tail(is_ours);
        Ok(())
    }

    /// A prepared stripe of a dead writer, or of a failed write: one committed fragment, or k prepared ones,
    /// commit it; fewer drop it.
    pub async fn decide(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        loop {
            // From all current members: one that only did not answer may be the one that has committed it;
            // and one that is behind may have a version that was dropped while it was away.
            let stats = self.data.stat_current(&s).await?;
            let is_committed = stats.iter().any(|stat| stat.base == version);
            let prepared = stats.iter().filter(|stat| stat.prepared.contains(&version)).count();
            if !is_committed && prepared < usize::from(s.layout.scheme.data) {
                return self.data.drop_prepared(s, version, token_epoch).await;
            }
            match Box::pin(self.commit_held(s, version, token_epoch)).await {
                // A member with it went away before all had it, so no member has committed it: retry.
                Err(e) if e.kind == ErrorKind::NotFound && !self.leader.left(s.deadline).is_zero() => {
                    tracing::debug!("{s}: {e}");
                    self.env.clock.sleep(RECOVERY_POLL).await;
                }
                done => return done,
            }
        }
    }

    async fn commit_held(&self, s: StripeRef, version: Version, token_epoch: u32) -> Result<()> {
        let mut done = Done::new();
        loop {
            let held = self.data.hold_stripe(s, version, token_epoch).await?;
            if self.data.commit_stripe(s, version, token_epoch, held, &mut done).await? {
                return Ok(());
            }
        }
    }

    /// Zeroes `size..end` within the stripe that holds `size`.
    async fn zero_tail(
        &self,
        inode: &Inode,
        layout: weir_proto::map::Layout,
        size: u64,
        end: u64,
        token_epoch: u32,
    ) -> Result<()> {
        let stripe = layout.stripe_of(size);
        let stripe_end = layout.stripe_start(stripe) + layout.stripe_bytes();
        // An offline stripe is recalled without the bytes past the size. It may have been recalled with them,
        // before the file was truncated: the known ranges are outdated.
        inode.lock().tier.forget_evicted();
        let comes_clean = self.tiering.is_away(inode, size, size + 1).await?
            || self.objects.has_layers(inode, size, size + 1).await?;
        if size.is_multiple_of(layout.stripe_bytes()) || comes_clean {
            return Ok(());
        }
        let len = end.min(stripe_end).saturating_sub(size);
        let overlays: Vec<Overlay> = layout
            .segments(size, len)
            .map(|p| Overlay { index: p.cell, offset: p.offset, len: p.len, payload: None })
            .collect();
        let s = self.data.stripe(inode.lock().object(inode.ino), layout, stripe, self.leader.deadline());
        self.data.write_overlays(s, token_epoch, &overlays).await
    }

    /// Before a file grows over bytes of an earlier, longer one: truncates and zeroes them.
    pub async fn clean_old_tail(&self, inode: &Inode) -> Result<()> {
        let _one = inode.flushing.lock().await;
        self.clean_old_tail_locked(inode).await
    }

    pub async fn clean_old_tail_locked(&self, inode: &Inode) -> Result<()> {
        while inode.lock().has_old_tail() {
            if self.clean_once(inode).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// False: the Write lease was granted again meanwhile, so other clients may have written and truncated.
    async fn clean_once(&self, inode: &Inode) -> Result<bool> {
        let layout = inode.lock().layout(inode.ino)?;
        // A token epoch of its own: older bytes past the size that came with it are void, of any writer.
        let entry = self.leases.ask(inode, LeaseKind::Write, true).await?;
        let (write_generation, is_alone) = {
            let st = inode.lock();
            (st.write.generation(), st.lease.is_write() || st.lease.has_append_token())
        };
        if !is_alone {
            // Bytes that other clients write past the size from now on are not old.
            return Err(Error::stale(format!(
                "file {}: other clients write it now: old bytes are removed under the append token",
                inode.ino
            )));
        }
        let (size, end, token_epoch) = (entry.attr.size, entry.lease.data_end, entry.lease.token_epoch);
        if end > size {
            let first_after = first_stripe_after(size, layout.stripe_bytes());
            let file = self.data.file_id(entry.attr.layers.map_or(inode.ino, |l| l.object));
            self.data.drop_file(file, &layout, first_after, token_epoch, self.leader.deadline()).await?;
            self.zero_tail(inode, layout, size, end, token_epoch).await?;
        }
        {
            let mut st = inode.lock();
            if st.lease.is_write() {
                let same = st.write.generation() == write_generation;
                if same {
                    st.write.note_tail(true);
                }
                return Ok(same);
            }
            st.write.note_cleaned_after(size); // including bytes sent past it before
        }
        if entry.lease.recover {
            return Ok(true); // another writer died: the client that recovers the file reports it
        }
        // Other clients write this file, too: they need not do the same.
        let (revoke_clock, ino) = (self.inodes.revoke_clock(), inode.ino);
        match self.leader.change(Change::repeatable(), |op| Recovered { op, ino, token_epoch }).await {
            Ok(entry) => drop(self.inodes.apply(&entry, revoke_clock)),
            // Another client has truncated it since, and reports it.
            Err(e) if e.kind == ErrorKind::Stale => {}
            Err(e) => return Err(e),
        }
        Ok(true)
    }
}
