//! Damage of a target: cells that are suspected of it are verified, and damaged ones are rebuilt.
use crate::membership::Membership;
use crate::rebuild::Rebuilder;
use crate::stripes::Stripes;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::Env;
use weir_proto::data::ReadView;
use weir_proto::{CellId, Result};

/// Cells waiting to be verified because they are suspected of damage.
const SUSPECTS_MAX: usize = 4096;

pub(crate) struct Damage {
    env: Env,
    members: Arc<Membership>,
    rebuilder: Arc<Rebuilder>,
    stripes: Arc<Stripes>,
    suspects: Mutex<BTreeSet<CellId>>,
}

impl Damage {
    pub fn new(
        env: &Env,
        members: &Arc<Membership>,
        rebuilder: &Arc<Rebuilder>,
        stripes: &Arc<Stripes>,
    ) -> Arc<Damage> {
        Arc::new(Damage {
            env: env.clone(),
            members: members.clone(),
            rebuilder: rebuilder.clone(),
            stripes: stripes.clone(),
            suspects: Mutex::default(),
        })
    }

    /// A reader found the cell damaged.
    pub fn suspect(&self, cell: CellId) {
        let mut suspects = self.suspects();
        if suspects.len() < SUSPECTS_MAX {
            suspects.insert(cell);
        }
    }
    fn suspects(&self) -> MutexGuard<'_, BTreeSet<CellId>> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Verifies cells that are suspected of damage, and rebuilds the damaged ones.
    pub async fn repair_damaged(&self) -> Result<()> {
        let suspects = std::mem::take(&mut *self.suspects());
        for cell in suspects {
            if let Some(acting) = self.members.place_of_cell(cell)? {
                let verifying = move || acting.store.verify(&acting.scope, cell, ReadView::Base);
                // Its error is the damage, which is counted there and repaired below.
                let _ = self.env.tasks.blocking(verifying).await;
            }
        }
        for cell in self.members.store().damaged_cells() {
            let Some(acting) = self.members.place_of_cell(cell)? else { continue };
            let repaired = match usize::from(cell.index) == acting.position {
                true => self.rebuilder.rebuild(&acting, cell, true).await,
                false => self.stripes.copy_overlays(&acting, cell).await,
            };
            if let Err(e) = repaired {
                tracing::debug!(%cell, "repair a damaged fragment: {e}");
            }
        }
        Ok(())
    }
}
