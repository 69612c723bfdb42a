//! Versions that a seal left in doubt: each is committed or dropped, by its leader, or where every holder
//! follows the verdict by itself.
use super::{InDoubt, Seals, is_settled_by_all, participants, resolve};
use crate::group::seal_leader;
use weir_proto::data::*;
use weir_proto::{CellId, Result, Version};

impl Seals {
    /// Settles versions that seals left in doubt on this target: after a start, and at an interval.
    pub async fn settle(&self) -> Result<()> {
        for (cell, version, absent) in self.members.store().index().seals_in_doubt()? {
            if let Err(e) = self.settle_one(cell, version, absent).await {
                tracing::debug!(%cell, "settle a version in doubt: {e}");
            }
        }
        Ok(())
    }
    async fn settle_one(&self, cell: CellId, version: Version, absent: MissingMask) -> Result<()> {
        let store = self.members.store();
        let Some(header) = store.index().header(cell)? else { return Ok(()) };
        let Some(acting) = self.members.place_in(header.group) else { return Ok(()) };
        let (scope, group, position) = (acting.scope, acting.group(), acting.position);
        if header.epoch < scope.lost_at {
            return Ok(()); // of an older copy of this target: repair drops it
        }
        let mut answers: Vec<Option<CellStat>> = vec![None; group.members.len()];
        let stats = self.stat_all(&acting, cell.file, cell.stripe).await;
        for (member, stat) in participants(group).into_iter().zip(stats) {
            answers[member] = stat.ok();
        }
        // The seal of that version was committed without this member, which prepared too late and may have
        // folded other overlays.
        let went_on = |s: &CellStat| s.base == version && s.missing & (1 << position) != 0;
        if answers.iter().flatten().any(went_on) {
            let seq = store.drop_prepared(&scope, cell, version, UNFENCED)?;
            return store.durable(seq).await;
        }
        let data = usize::from(group.scheme.data);
        let verdict = resolve(version, absent, scope.current, &answers, data);
        let leads = seal_leader(group) == Some(position);
        let certain = answers.iter().flatten().any(|s| s.base == version);
        match verdict {
            InDoubt::Commit if leads => {
                self.commit_everywhere(&acting, version, cell.file, cell.stripe).await
            }
            InDoubt::Drop if leads => {
                self.drop_everywhere(&acting, version, cell).await;
                Ok(())
            }
            InDoubt::Commit if certain || is_settled_by_all(group, acting.map.level) => {
                let seq = store.commit_stripe(&scope, cell, version, UNFENCED)?;
                store.durable(seq).await
            }
            InDoubt::Drop if is_settled_by_all(group, acting.map.level) => {
                let seq = store.drop_prepared(&scope, cell, version, UNFENCED)?;
                store.durable(seq).await
            }
            // This target does not lead the seal: it follows only a certain verdict.
            _ => Ok(()),
        }
    }
}
