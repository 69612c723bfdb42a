//! Fences of a target that takes a place: it takes over the fences of the group's other members, as it would
//! otherwise accept writes that they refuse.
//!
//! Invariant: a fence only rises.
use crate::calls::Calls;
use crate::membership::{Acting, Membership};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_env::Env;
use weir_proto::data::{GroupAt, ListFences};
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Error, PgId, Result, TargetId};
use weir_rpc::{Handled, Reply};

/// Fences of one listing.
pub const LIST_MAX: u32 = 4096;

pub(crate) struct Fences {
    env: Env,
    members: Arc<Membership>,
    calls: Arc<Calls>,
    /// The loss of each group's cells after which the fences were taken over. A restart begins again.
    taken: Mutex<BTreeMap<PgId, Epoch>>,
}

impl Fences {
    pub fn new(env: &Env, members: &Arc<Membership>, calls: &Arc<Calls>) -> Arc<Fences> {
        let (env, members, calls) = (env.clone(), members.clone(), calls.clone());
        Arc::new(Fences { env, members, calls, taken: Mutex::default() })
    }

    pub fn list(self: &Arc<Self>, r: ListFences) -> Handled {
        let fences = self.clone();
        Handled::Later(Box::pin(async move {
            let members = &fences.members;
            members.check_announced(&r.epochs).await?;
            let (seq, list) = members.store().list_fences(r.after, &r.epochs, r.limit)?;
            members.store().durable(seq).await?;
            Ok(Reply::new(&list))
        }))
    }

    /// Takes over the fences of the current members of groups in which the target is filled. Groups with a
    /// member that does not answer are not repaired in this round.
    pub async fn take_fences(&self, behind: &mut Vec<Acting>) {
        let wants = |acting: &Acting| {
            acting.is_filled() && self.taken().get(&acting.scope.group) != Some(&acting.scope.lost_at)
        };
        let mut peers: BTreeMap<TargetId, Vec<GroupAt>> = BTreeMap::new();
        for acting in behind.iter().filter(|acting| wants(acting)) {
            for member in acting.group().members.iter().filter(|m| m.state == MemberState::Current) {
                peers.entry(member.target).or_default().push(acting.at());
            }
        }
        let mut silent = BTreeSet::new();
        for (peer, epochs) in peers {
            if let Err(e) = self.take_fences_of(peer, epochs).await {
                tracing::debug!(%peer, "learn of fences: {e}");
                silent.insert(peer);
            }
        }
        behind.retain(|acting| {
            let reported =
                !wants(acting) || acting.group().members.iter().all(|m| !silent.contains(&m.target));
            if reported && acting.scope.lost_at > Epoch(0) {
                self.taken().insert(acting.scope.group, acting.scope.lost_at);
            }
            reported
        });
    }

    pub async fn take_fences_of(&self, peer: TargetId, epochs: Vec<GroupAt>) -> Result<()> {
        let mut after = None;
        loop {
            let request = ListFences { target: peer, after, epochs: epochs.clone(), limit: LIST_MAX };
            let (list, _) = self.calls.ask(peer, request, Vec::new()).await?;
            let Some(last) = list.fences.last().map(|f| f.file) else { return Ok(()) };
            if after.is_some_and(|after| last <= after) {
                return Err(Error::damaged(format!("fences of {peer}: listed twice")));
            }
            let (store, fences) = (self.members.store().clone(), list.fences);
            let taken = self.env.tasks.blocking(move || store.take_fences(&fences)).await?;
            self.members.store().durable(taken).await?;
            match list.more {
                true => after = Some(last),
                false => return Ok(()),
            }
        }
    }
    fn taken(&self) -> MutexGuard<'_, BTreeMap<PgId, Epoch>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
