//! Refill: a member without data, because it took a lost target's place or returned empty, is filled with all
//! data of its group.
//!
//! That may take hours, so seals continue meanwhile, without it. It takes over the fences of its peers first
//! (`fences.rs`). Then it goes through all stripes, and again through those that were written or sealed
//! since, until there are few. It reports that (`CaughtUp`), the coordinator makes it a member that is
//! behind, seals wait, and the usual repair does the rest.
use crate::copies::Copies;
use crate::membership::Acting;
use crate::peers::join_all;
use crate::stripes::{STRIPES_AT_ONCE, StripeView, Stripes};
use std::sync::{Arc, Mutex, PoisonError};
use weir_env::BoxFuture;
use weir_proto::{Epoch, Error, FileId, Result};

/// Seals wait while this number of stripes is repaired, for a moment.
const STRIPES_LEFT_MAX: usize = 100;
/// Passes over a group in one round. The last pass begins after these even if writes are as fast as repairs.
const PASSES_MAX: usize = 8;

/// Stripes of a listing that are still to be checked.
type Listed = std::collections::btree_map::IntoIter<(FileId, u64), StripeView>;

/// One pass over a group's stripes.
#[derive(Default)]
struct Pass {
    repaired: usize,
    failed: usize,
    problem: Option<Error>,
}

pub(crate) struct Refill {
    stripes: Arc<Stripes>,
    copies: Arc<Copies>,
}

impl Refill {
    pub fn new(stripes: &Arc<Stripes>, copies: &Arc<Copies>) -> Arc<Refill> {
        Arc::new(Refill { stripes: stripes.clone(), copies: copies.clone() })
    }

    /// Goes through the group until few stripes are left that were written or sealed meanwhile.
    pub async fn refill_group(&self, acting: &Acting, peers: &[usize]) -> Result<()> {
        self.stripes.forget_lost(acting).await?;
        self.refill_passes(acting, peers).await?;
        self.copies.end(acting.scope.group);
        Ok(())
    }

    async fn refill_passes(&self, acting: &Acting, peers: &[usize]) -> Result<()> {
        let mut since = Epoch(0);
        for _ in 0..PASSES_MAX {
            let pass = self.refill_pass(acting, peers, since).await?;
            tracing::debug!(
                on = %acting.target(), group = %acting.scope.group, %since, repaired = pass.repaired,
                failed = pass.failed, "a pass of a refill"
            );
            match pass.problem {
                Some(e) if pass.failed > pass.repaired => return Err(e),
                // The next pass repairs those.
                Some(_) => {}
                None if pass.repaired <= STRIPES_LEFT_MAX => return Ok(()),
                None => since = acting.scope.epoch,
            }
        }
        Ok(())
    }

    async fn refill_pass(&self, acting: &Acting, peers: &[usize], since: Epoch) -> Result<Pass> {
        let (pass, mut after) = (Mutex::new(Pass::default()), None);
        self.copies.begin(acting.scope.group);
        loop {
            let (stripes, next) = self.stripes.list_stripes(acting, peers, after, since).await?;
            let todo = Mutex::new(stripes.into_iter());
            let lane = |_| Box::pin(self.refill_lane(acting, &todo, &pass)) as BoxFuture<'_, ()>;
            join_all((0..STRIPES_AT_ONCE).map(lane).collect()).await;
            match next {
                Some(cell) => after = Some(cell),
                None => return Ok(pass.into_inner().unwrap_or_else(PoisonError::into_inner)),
            }
        }
    }

    /// Refills one stripe after the other.
    async fn refill_lane(&self, acting: &Acting, todo: &Mutex<Listed>, pass: &Mutex<Pass>) {
        let group = acting.scope.group;
        loop {
            let next = todo.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(((file, stripe), view)) = next else { return };
            let repaired = self.refill_stripe(acting, file, stripe, &view).await;
            let copied = *repaired.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0);
            {
                let mut pass = pass.lock().unwrap_or_else(PoisonError::into_inner);
                match repaired {
                    Ok(bytes) => {
                        pass.repaired += usize::from(bytes.is_some());
                        self.copies.seen(group, bytes);
                    }
                    // A seal or a writer was faster, or a peer does not answer.
                    Err(e) => {
                        pass.failed += 1;
                        pass.problem = Some(e);
                    }
                }
            }
            self.copies.report_if_due();
            // A group without redundancy is repaired at full speed.
            if acting.group().current_count() > usize::from(acting.scope.scheme.data) {
                self.copies.keep_pace(copied).await;
            }
        }
    }

    /// The bytes that the target has of the stripe, if it lacked any.
    async fn refill_stripe(
        &self,
        acting: &Acting,
        file: FileId,
        stripe: u64,
        view: &StripeView,
    ) -> Result<Option<u64>> {
        if !self.stripes.repair_stripe(acting, file, stripe, view).await? {
            return Ok(None);
        }
        let own = acting.own_cell(file, stripe);
        Ok(Some(u64::from(acting.store.stat_cell(&acting.scope, own)?.fragment_bytes)))
    }
}
