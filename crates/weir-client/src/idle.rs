//! A bound for the inodes and names that a client keeps: a part of its memory, beside data.
//!
//! The kernel keeps what it has looked up until its own memory is short, and each inode of it needs memory
//! here. So above the bound the inodes that were not used for longest are released: unused ones with their
//! lease, and those that the kernel still caches after it has dropped their pages and attributes. Inodes with
//! changes, or open files, stay.
use crate::accesses::Accesses;
use crate::base::Base;
use crate::closes::Closes;
use crate::inode::{Inode, State};
use crate::inodes::Inodes;
use crate::join::join_all;
use crate::leader::Leader;
use crate::leases::Leases;
use crate::local_names::LocalNames;
use crate::memory::Memory;
use crate::plan::Occasion;
use crate::reports::Reports;
use crate::revocation::Revocation;
use crate::rights::Rights;
use crate::types::ClientConfig;
use crate::write_back::WriteBack;
use crate::writing::Writing;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use weir_env::{BoxFuture, Env};
use weir_proto::Result;
use weir_proto::meta::{LeaseKind, ReleaseLease};

/// Memory of an inode's state, of its entry in the list and of its attributes.
const INODE_BYTES: u64 = std::mem::size_of::<Inode>() as u64 + 256;
/// Memory of a known name in a directory, of usual length.
const NAME_BYTES: u64 = 128;
/// Inodes that are released in one round: a leader answers that many requests in less than a second.
const RETURN_MAX: usize = 8_000;
/// Requests to the leader for that at the same time.
const RETURNS_AT_ONCE: usize = 32;

/// How soon an inode is released, the first choice first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Rank {
    Forgotten,
    Unused,
    /// Since the last round.
    Used,
}

/// An inode of this state may be released.
fn is_idle(st: &State) -> bool {
    !st.opens.is_open() && !st.local.state().is_unreported() && !st.is_dirty() && !st.is_in_doubt()
}

fn bytes_of(st: &State) -> u64 {
    INODE_BYTES + NAME_BYTES * st.names.count() as u64
}

pub struct Idle {
    env: Env,
    config: Arc<ClientConfig>,
    leader: Arc<Leader>,
    memory: Arc<Memory>,
    inodes: Arc<Inodes>,
    accesses: Arc<Accesses>,
    closes: Arc<Closes>,
    local_names: Arc<LocalNames>,
    leases: Arc<Leases>,
    write_back: Arc<WriteBack>,
    revocation: Arc<Revocation>,
}

impl Idle {
    pub fn new(
        base: &Base,
        reports: &Reports,
        rights: &Rights,
        writing: &Writing,
        revocation: Arc<Revocation>,
    ) -> Idle {
        let Writing { write_back, .. } = writing.clone();
        let Base { env, config, leader, memory, inodes, accesses, .. } = base.clone();
        let Reports { closes, local_names, .. } = reports.clone();
        let Rights { leases, .. } = rights.clone();
        Idle {
            env,
            config,
            leader,
            memory,
            inodes,
            accesses,
            closes,
            local_names,
            leases,
            write_back,
            revocation,
        }
    }

    /// One round: counts what inodes and names need, and releases what exceeds their part of the memory.
    /// The budget of data is what they leave.
    pub async fn return_idle(&self) {
        let part = self.config.memory_bytes / 2;
        let (mut sum, mut ranked) = (0, Vec::new());
        for inode in self.inodes.all() {
            let was_used = inode.used.swap(false, Relaxed);
            let (bytes, rank) = {
                let st = inode.lock();
                let rank = match (st.forgotten, was_used) {
                    (true, _) => Rank::Forgotten,
                    (false, false) => Rank::Unused,
                    (false, true) => Rank::Used,
                };
                (bytes_of(&st), is_idle(&st).then_some(rank))
            };
            sum += bytes;
            ranked.extend(rank.map(|rank| (rank, bytes, inode)));
        }
        if sum < part / 8 {
            self.memory.budget().reserve_for_names(0); // too few to matter
            return;
        }
        self.memory.reserve_for_names(sum.min(part));
        let mut excess = sum.saturating_sub(part);
        ranked.sort_by_key(|(rank, _, inode)| (*rank, inode.ino));
        let exceeds = |(_, bytes, _): &(Rank, u64, Arc<Inode>)| {
            let still = excess > 0;
            excess = excess.saturating_sub(*bytes);
            still
        };
        let returned: Vec<_> = ranked.into_iter().take(RETURN_MAX).take_while(exceeds).collect();
        for some in returned.chunks(RETURNS_AT_ONCE) {
            let each = some
                .iter()
                .map(|(_, _, inode)| -> BoxFuture<'_, Result<()>> { Box::pin(self.release_inode(inode)) });
            if let Some(Err(e)) = join_all(each.collect()).await.into_iter().find(Result::is_err) {
                tracing::debug!("leases of unused inodes were not returned: {e}");
                return;
            }
        }
    }

    async fn release_inode(&self, inode: &Arc<Inode>) -> Result<()> {
        let (is_known, is_held) = {
            let st = inode.lock();
            (!st.forgotten, st.lease.is_held())
        };
        if is_known {
            self.have_it_forgotten(inode).await;
        } else if is_held {
            self.drop_lease(inode).await?;
        }
        let is_over = {
            let mut st = inode.lock();
            let is_over = !st.lease.is_held() && is_idle(&st) && !inode.used.load(Relaxed);
            if is_over && is_held {
                st.lease.begin_release();
            }
            is_over
        };
        if is_over && is_held {
            let ino = inode.ino;
            let release = |session| ReleaseLease { session, ino, keep: LeaseKind::None };
            let answer = self.leader.ask(release).await;
            inode.lock().lease.end_release(self.inodes.tick_revoke_clock());
            answer?;
        }
        if is_over {
            self.inodes.remove_unused(inode);
        }
        Ok(())
    }

    /// Nothing of it is cached in the kernel, which may use it again at any time: as for a revoke.
    async fn have_it_forgotten(&self, inode: &Arc<Inode>) {
        inode.lock().mark_revoked(self.inodes.tick_revoke_clock(), LeaseKind::None);
        self.revocation.revoke(inode, LeaseKind::None).await;
    }

    /// Of an inode that the kernel has forgotten, unless it has looked it up again meanwhile.
    async fn drop_lease(&self, inode: &Arc<Inode>) -> Result<()> {
        self.local_names.give_back(inode.ino).await;
        self.write_back.flush(inode, Occasion::Closing, false).await?;
        {
            let mut st = inode.lock();
            let in_use = !st.forgotten || st.loans.are_open(self.env.clock.now());
            if st.is_dirty() || !st.lease.is_held() || in_use {
                return Ok(());
            }
            st.mark_revoked(self.inodes.tick_revoke_clock(), LeaseKind::None);
            self.leases.lower(inode, &mut st, LeaseKind::None);
        }
        self.accesses.report_of(inode).await;
        self.closes.report_of(inode.ino).await;
        Ok(())
    }
}
