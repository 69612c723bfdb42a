//! Limits of inodes beside the numbers that clients have for new files.
//!
//! Invariant: the inodes under a limit and the unused numbers under it are together at most the limit, the
//! soft one included. Near a limit the numbers are taken back, so that each create asks.
use super::*;
use crate::lease::{Conflict, NoteConflict};
use crate::quotas::is_under;
use crate::{allowances, limits::Limit, owners};
use weir_proto::quota::{Account, Holder};

/// Of the inodes that are left, a client gets at most this part for one directory.
const SHARE: u64 = 4;
/// Fewer numbers are not worth it.
const NUMBERS_LEAST: u64 = 8;

/// A limit of inodes that applies to an account.
struct Bound {
    /// Whose limit it is; `None`: the volume's.
    of: Option<Holder>,
    used: u64,
    max: u64,
}

impl Bound {
    fn is_over(&self, volume: VolumeId, account: Account) -> bool {
        match self.of {
            None => account.volume == volume,
            Some(holder) => is_under(account, holder),
        }
    }
}

impl Cx<'_> {
    fn bounds(&self, account: Account) -> Result<Vec<Bound>> {
        let quotas = self.rules.quotas;
        let mut bounds = Vec::new();
        if let Some(max) = quotas.inodes_lowest(account.volume) {
            let usage = usage::volume_usage(self.read(), account.volume)?;
            bounds.push(Bound { of: None, used: usage.files.saturating_add(usage.directories), max });
        }
        for (holder, limit) in quotas.owners.of(account) {
            let Some(max) = Limit::inodes_lowest(&limit) else { continue };
            let used = allowances::inodes(owners::used(self.read(), holder)?);
            bounds.push(Bound { of: Some(holder), used, max });
        }
        Ok(bounds)
    }

    /// How many of the wanted numbers a client may have for files of this account in `dir`, beside those for
    /// other directories. 0: it is too near to a limit.
    pub(super) fn numbers_within_limits(&self, dir: InodeId, account: Account, wanted: u32) -> Result<u32> {
        let mut most = u64::from(wanted);
        for bound in self.bounds(account)? {
            let promised = self.rules.leases.promised(|of| bound.is_over(account.volume, of));
            let promised: u64 = promised.filter(|(_, at, _)| *at != dir).map(|(_, _, n)| n).sum();
            most = most.min(bound.max.saturating_sub(bound.used).saturating_sub(promised) / SHARE);
        }
        Ok(if most < NUMBERS_LEAST.min(u64::from(wanted)) { 0 } else { most as u32 })
    }

    /// One more inode of the account is about to exist: if a limit has no space for it beside the promised
    /// numbers, these are taken back first.
    pub(super) fn take_numbers_back(&mut self, account: Account) -> Attempt<()> {
        if self.rules.leases.promised(|of| of != Account::NONE).next().is_none() {
            return Ok(()); // most creates: their limits are read once
        }
        for bound in self.bounds(account)? {
            let promised = self.rules.leases.promised(|of| bound.is_over(account.volume, of));
            let promised: Vec<_> = promised.filter(|(_, _, n)| *n > 0).collect();
            let count: u64 = promised.iter().map(|(_, _, n)| n).sum();
            if bound.used.saturating_add(count) >= bound.max {
                for (session, dir, _) in promised {
                    self.obstacles.note(Conflict { ino: dir, session, keep: LeaseKind::Read, ask: true });
                }
            }
        }
        self.clear()
    }
}
