//! Cells of groups whose place another target has taken: they are dropped once all members are current.
use crate::membership::Membership;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::Env;
use weir_proto::map::{ClusterMap, Group, MemberState};
use weir_proto::{PgId, Result, TargetId};

/// Groups in which another target has taken this one's place, and every member is current.
fn groups_without(map: &ClusterMap, target: TargetId) -> impl Iterator<Item = &Group> {
    let is_whole = |g: &&Group| g.members.iter().all(|m| m.state == MemberState::Current);
    let is_mine = move |g: &&Group| g.members.iter().any(|m| m.target == target);
    let comes = move |g: &&Group| map.move_of(g.id).is_some_and(|found| found.to == target);
    map.groups.iter().filter(move |g| !is_mine(g) && !comes(g)).filter(is_whole)
}

/// The result of a search of the index.
#[derive(Default)]
struct Found {
    /// The map version at which groups were searched for cells that now belong to other targets.
    at_version: u64,
    groups: BTreeSet<PgId>,
}

pub(crate) struct HandedOver {
    env: Env,
    members: Arc<Membership>,
    found: Mutex<Found>,
}

impl HandedOver {
    pub fn new(env: &Env, members: &Arc<Membership>) -> Arc<HandedOver> {
        Arc::new(HandedOver { env: env.clone(), members: members.clone(), found: Mutex::default() })
    }
    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cells of a group may have arrived after others were dropped: the index is searched once more.
    pub fn search_again(&self) {
        self.found().at_version = 0;
    }

    /// Drops some cells of groups in which another target took this one's place, once all members are
    /// current.
    pub async fn drop_handed_over(&self) -> Result<()> {
        let (map, store) = (self.members.map(), self.members.store());
        if self.found().at_version != map.version {
            let mut groups = BTreeSet::new();
            for group in groups_without(&map, store.target) {
                if store.index().has_cells_of(group.id)? {
                    groups.insert(group.id);
                }
            }
            *self.found() = Found { at_version: map.version, groups };
        }
        let Some(group) = self.found().groups.first().copied() else { return Ok(()) };
        let Some(epoch) = map.group(group).map(|g| g.epoch) else { return Ok(()) };
        let dropping = store.clone();
        let (committed, is_last) =
            self.env.tasks.blocking(move || dropping.drop_some_cells_of(group, epoch)).await?;
        store.durable(committed).await?;
        if is_last {
            tracing::info!("{} has dropped its cells of {group}: other targets have them", store.target);
            self.found().groups.remove(&group);
        }
        Ok(())
    }
}
