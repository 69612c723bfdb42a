//! Under-replicated cells of a target: members that are not current miss fragments.
//!
//! When the map shows that a member is current again, each target clears the bits in its own cells: no
//! message is needed, so none can be lost.
use crate::cells::Scope;
use crate::membership::Membership;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::Env;
use weir_proto::{Epoch, PgId, Result};

pub(crate) struct UnderReplicated {
    env: Env,
    members: Arc<Membership>,
    /// The epoch of each group under which its missing bits were last cleared.
    settled: Mutex<BTreeMap<PgId, Epoch>>,
}

impl UnderReplicated {
    pub fn new(env: &Env, members: &Arc<Membership>) -> Arc<UnderReplicated> {
        Arc::new(UnderReplicated { env: env.clone(), members: members.clone(), settled: Mutex::default() })
    }
    pub async fn settle_under_replicated(&self) -> Result<()> {
        if !self.members.store().has_under_replicated() {
            return Ok(());
        }
        let map = self.members.map();
        for group in map.groups.iter().filter(|g| self.members.is_member(g)) {
            if self.settled().get(&group.id) == Some(&group.epoch) {
                continue; // writes under an epoch are not missing at its current members
            }
            let (store, scope) = (self.members.store().clone(), Scope::of(group));
            self.env.tasks.blocking(move || store.settle_under_replicated(&scope)).await?;
            self.settled().insert(group.id, group.epoch);
        }
        Ok(())
    }
    fn settled(&self) -> MutexGuard<'_, BTreeMap<PgId, Epoch>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
