//! Which stripes are sealed now: those with many overlays, those that are no longer written, those of a file.
use super::{SealFacts, SealLimits, SealVerdict, Seals, can_seal, evaluate};
use crate::group::seal_leader;
use crate::membership::Acting;
use crate::recent::RecentStripe;
use std::sync::Arc;
use weir_proto::data::SealFile;
use weir_proto::map::Group;
use weir_proto::{CellId, FileId, PgId, Result};
use weir_rpc::{Handled, Reply};

impl Seals {
    /// One round over the stripes with recent overlays; returns how many were sealed.
    pub async fn seal_round(&self, limits: &SealLimits) -> Result<usize> {
        self.note_leads();
        self.find_overlaid(limits)?;
        let now = self.env.clock.now();
        let due = self.recent.due(|s| {
            s.bytes >= limits.full_bytes || s.count >= limits.count_max || now.since(s.at) >= limits.idle
        });
        let mut sealed = 0;
        for stripe in due {
            let verdict = match self.as_leader(stripe.group) {
                None => SealVerdict::Leave,
                Some(acting) => {
                    let (overlay_bytes, overlay_count) = overlays_of(&acting, stripe.file, stripe.stripe)?;
                    let can_seal = can_seal(acting.group(), acting.map.level);
                    let idle = now.since(stripe.at);
                    evaluate(&SealFacts { overlay_bytes, overlay_count, idle, can_seal }, limits)
                }
            };
            match verdict {
                SealVerdict::Wait => {}
                SealVerdict::Leave => self.recent.settled(&stripe),
                SealVerdict::Seal => sealed += usize::from(self.seal_due(&stripe).await?),
            }
        }
        Ok(sealed)
    }
    async fn seal_due(&self, due: &RecentStripe) -> Result<bool> {
        let RecentStripe { file, stripe, group, .. } = *due;
        if let Err(e) = self.seal_stripe(group, file, stripe).await {
            tracing::debug!(%file, stripe, "seal: {e}");
            // The seal may have ended in doubt; it is not retried at once.
            self.settle().await?;
            self.recent.put_off(due, self.env.clock.now());
            return Ok(false);
        }
        self.recent.settled(due);
        Ok(true)
    }

    /// Writes while another target led the group are not in this target's memory: scan the index for them.
    fn note_leads(&self) {
        let (map, target) = (self.members.map(), self.members.target());
        let leads =
            |g: &&Group| seal_leader(g).and_then(|p| g.members.get(p)).is_some_and(|m| m.target == target);
        self.recent.lead(map.groups.iter().filter(leads).map(|g| g.id).collect());
    }

    /// After a start, or when too many stripes were written to remember them: scan the index.
    fn find_overlaid(&self, limits: &SealLimits) -> Result<()> {
        if self.recent.begin_scan() {
            let found = self.members.store().index().overlaid(limits.small_bytes / 32)?;
            let found = found.into_iter().map(|(cell, header)| (cell, header.group));
            self.recent.add_found(found, self.env.clock.now());
        }
        Ok(())
    }

    pub fn seal_file(self: &Arc<Self>, r: &SealFile) -> Handled {
        let (seals, file) = (self.clone(), r.file);
        Handled::Later(Box::pin(async move {
            seals.seal_file_now(file).await?;
            Ok(Reply::new(&()))
        }))
    }
    /// Seals every stripe of a file whose seals this target leads.
    async fn seal_file_now(&self, file: FileId) -> Result<()> {
        let overlaid = self.members.store().index().overlaid_cells(file)?;
        let mut stripes: Vec<(u64, PgId)> =
            overlaid.into_iter().map(|(cell, header)| (cell.stripe, header.group)).collect();
        stripes.dedup();
        for (stripe, group) in stripes {
            if self.as_leader(group).is_some() {
                self.seal_stripe(group, file, stripe).await?;
            }
        }
        Ok(())
    }
}

/// Bytes and number of a stripe's overlays that are mirrored here.
fn overlays_of(acting: &Acting, file: FileId, stripe: u64) -> Result<(u64, u64)> {
    let mut sum = (0, 0);
    for index in 0..acting.scope.scheme.data {
        if let Some(h) = acting.store.index().header(CellId { file, stripe, index })? {
            sum = (sum.0 + h.overlay_bytes, sum.1 + h.overlay_count);
        }
    }
    Ok(sum)
}
