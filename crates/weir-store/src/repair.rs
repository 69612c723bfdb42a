//! Repair: a member that was away gets the writes that it missed; a damaged fragment is rebuilt.
//!
//! While a member is behind it receives every new write, so everything it lacks was written before: it lists
//! the cells that current peers have written since it was current, compares versions, rebuilds its fragment
//! from k others of one version, copies overlay logs, drops cells that no other member has any more, and then
//! reports that it caught up. A listing raises each peer to the group's epoch first, so nothing can be
//! written under an older one after it. Truncations that it missed are applied before all that
//! (`truncations.rs`).
//!
//! A member that returned without its data (`lost_at` in the map) lists everything, and first drops its
//! earlier cells: an older copy may have void data, or overlays whose numbers were reused since.
//!
//! `stripes.rs` has the repair of one stripe, `rebuild.rs` how a fragment is decoded; `rounds.rs` decides
//! which groups are repaired when.
use crate::fences::Fences;
use crate::group::{current_peers, too_few};
use crate::logs::Agreement;
use crate::membership::{Acting, Membership};
use crate::peers::join_all;
use crate::rebuild::Rebuilder;
use crate::refill::Refill;
use crate::stripes::{STRIPES_AT_ONCE, Stripes};
use crate::truncations::Truncations;
use std::sync::Arc;
use weir_env::{BoxFuture, Env};
use weir_proto::Result;

mod rounds;
mod unknown;

pub(crate) struct Repair {
    env: Env,
    members: Arc<Membership>,
    parts: RepairParts,
}

/// The parts of a target that a repair uses.
pub(crate) struct RepairParts {
    pub agreement: Arc<Agreement>,
    pub rebuilder: Arc<Rebuilder>,
    pub stripes: Arc<Stripes>,
    pub refill: Arc<Refill>,
    pub truncations: Arc<Truncations>,
    pub fences: Arc<Fences>,
}

impl Repair {
    pub fn new(env: &Env, members: &Arc<Membership>, parts: RepairParts) -> Arc<Repair> {
        Arc::new(Repair { env: env.clone(), members: members.clone(), parts })
    }

    async fn repair_group(&self, acting: &Acting) -> Result<()> {
        let group = acting.group();
        let since = group.members[acting.position].complete_since();
        let peers = current_peers(group, acting.position);
        // m + 1 members have a copy of a cell's log: fewer than k members may all lack it.
        if !group.knows_all_writes() {
            return Err(too_few(group));
        }
        if acting.is_filled() {
            return self.parts.refill.refill_group(acting, &peers).await;
        }
        if !group.is_writable() {
            self.check_nothing_was_written(acting, &peers, since).await?;
        }
        self.parts.stripes.forget_lost(acting).await?;
        let mut after = None;
        loop {
            let (listed, next) = self.parts.stripes.list_stripes(acting, &peers, after, since).await?;
            let listed: Vec<_> = listed.into_iter().collect();
            for some in listed.chunks(STRIPES_AT_ONCE) {
                let repairs = some.iter().map(|((file, stripe), view)| {
                    Box::pin(self.parts.stripes.repair_stripe(acting, *file, *stripe, view))
                        as BoxFuture<'_, Result<bool>>
                });
                join_all(repairs.collect()).await.into_iter().collect::<Result<Vec<bool>>>()?;
            }
            match next {
                Some(cell) => after = Some(cell),
                None => break,
            }
        }
        if self.may_have_more(acting, since)? {
            self.drop_unknown(acting, &peers, since).await?;
        }
        self.drop_aborted(acting, &peers).await
    }
}
