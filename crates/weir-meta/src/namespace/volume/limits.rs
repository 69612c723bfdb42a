//! Limits of volumes as operations meet them, and quota reservations.
use super::super::usage::volume_usage;
use super::super::*;
use crate::quotas::{self, Ask};
use weir_proto::volume;

impl Cx<'_> {
    /// The volume whose limit of bytes applies to a file; 0: none does.
    pub(in crate::namespace) fn limit_over(&self, inode: &Inode) -> Result<VolumeId> {
        if self.rules.quotas.is_empty() || inode.nlink == 0 {
            return Ok(NO_VOLUME);
        }
        let volume = self.volume_of(inode.parent)?;
        Ok(if self.rules.quotas.limits_bytes(volume) { volume } else { NO_VOLUME })
    }
    /// Fails unless one more file or directory is within the limit.
    pub(in crate::namespace) fn require_inode(&mut self, volume: VolumeId) -> Result<()> {
        if !self.rules.quotas.is_limited(volume) {
            return Ok(());
        }
        let usage = volume_usage(self.read(), volume)?;
        let checked = self.rules.quotas.check_inodes(volume, &usage, self.rules.now);
        // The trash is emptied first.
        if checked.is_err()
            && let Some(root) = trash::to_empty(self.read(), volume)?
        {
            self.obstacles.push(Obstacle::Full { trash: root });
            self.clear()?;
        }
        checked
    }
    /// Fails unless that many bytes are within the volume's limit.
    pub(in crate::namespace) fn require_bytes(&self, volume: VolumeId, bytes: u64) -> Result<()> {
        if !self.rules.quotas.limits_bytes(volume) {
            return Ok(());
        }
        let used = volume_usage(self.read(), volume)?.bytes;
        self.rules.quotas.check_bytes(volume, used, bytes, self.rules.now)
    }
}

/// No volume has this number.
const NO_VOLUME: VolumeId = VolumeId(0);

/// A quota reservation of a client.
pub fn reserve_quota(view: &mut View<'_>, r: &volume::ReserveQuota) -> Result<volume::QuotaReservation> {
    let quotas = view.rules.quotas;
    let Some(max) = quotas.bytes_max(r.volume, view.rules.now) else {
        // A soft limit may become effective one day: uncommitted bytes are recorded.
        let unlimited = !quotas.limits_bytes(r.volume);
        return Ok(volume::QuotaReservation { held: r.want, others: 0, unlimited, evicting: false });
    };
    if !(r.spent <= r.must && r.must <= r.want && r.want <= i64::MAX as u64) {
        return Err(Error::invalid(format!("reservation of {} of {} of {} bytes", r.spent, r.must, r.want)));
    }
    let others = quotas.granted(r.volume, Some(r.session));
    let used = volume_usage(view.read, r.volume)?.bytes;
    let ask = Ask { spent: r.spent, must: r.must, want: r.want };
    let evicting = crate::relation::proof::evicting(view.read)?.contains(&r.volume)
        || trash::to_empty(view.read, r.volume)?.is_some();
    Ok(volume::QuotaReservation {
        held: quotas::grant(ask, used, others, max),
        others,
        unlimited: false,
        evicting,
    })
}
