//! Truncation records: ranges of a file that are void because it was truncated, recovered, deleted or
//! evicted.
//!
//! A truncation is (file, stripes, token epoch): data written there with a lower token epoch is void. Most
//! extend to the end of the file; those of evicted bytes do not. Every live member receives it (`DropFile`),
//! drops the data, refuses such writes from then on, and keeps the record for members that are away: a
//! returning member fetches the truncations before any data, so it never restores void bytes, nor combines
//! its old cell with data that was written since. See decision record 4.
//!
//! Invariants: a truncation is recorded in the transaction that raises the fence, before any data is dropped;
//! numbers only grow. Knows nothing of files' sizes.
use crate::calls::Calls;
use crate::cells;
use crate::entries::{newest_truncation, truncations_of};
use crate::forgetting::Forgetting;
use crate::format::{self, *};
use crate::logs::Overlays;
use crate::membership::{Acting, Membership};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Env;
use weir_kv::{CommitSeq, Txn};
use weir_proto::data::{DropFile, GroupAt, ListTruncations, Truncation};
use weir_proto::map::MemberState;
use weir_proto::{Error, FileId, Result, TargetId};
use weir_rpc::{Handled, Reply};

/// Truncations of one listing.
pub(crate) const LIST_MAX: u32 = 4096;
/// How long a truncation waits here for the writes that it fences to end.
const FENCE_PATIENCE: Duration = Duration::from_secs(2);

/// Raises the file's fence and records the truncation, unless an earlier record covers it.
pub fn remember(txn: &mut dyn Txn, file: FileId, truncation: format::Truncation) -> Result<()> {
    let token_epoch = truncation.token_epoch;
    assert!(truncation.from_stripe < truncation.to_stripe, "a truncation of no stripe would fence the file");
    cells::take_fence(txn, file, token_epoch)?;
    let earlier = truncations_of(txn, file)?;
    if earlier.iter().any(|(_, c)| c.covers(&truncation)) {
        return Ok(());
    }
    for (number, _) in earlier.iter().filter(|(_, c)| truncation.covers(c)) {
        txn.delete(&truncation_key(file, *number));
        txn.delete(&truncated_file_key(*number));
    }
    let number = 1 + newest_truncation(txn)?;
    txn.put(TRUNCATION_COUNT, &number.to_le_bytes());
    txn.put(&truncation_key(file, number), &truncation.to_value());
    txn.put(&truncated_file_key(number), &TruncatedFile { file }.to_value());
    Ok(())
}
/// The truncations of a target.
pub(crate) struct Truncations {
    env: Env,
    members: Arc<Membership>,
    calls: Arc<Calls>,
    overlays: Arc<Overlays>,
    /// The newest truncation that was learned from each peer.
    learned: Mutex<BTreeMap<TargetId, u64>>,
    forgetting: Mutex<Forgetting>,
}

impl Truncations {
    pub fn new(
        env: &Env,
        members: &Arc<Membership>,
        calls: &Arc<Calls>,
        overlays: &Arc<Overlays>,
    ) -> Arc<Truncations> {
        Arc::new(Truncations {
            env: env.clone(),
            members: members.clone(),
            calls: calls.clone(),
            overlays: overlays.clone(),
            learned: Mutex::default(),
            forgetting: Mutex::default(),
        })
    }

    pub fn drop_file(self: &Arc<Self>, r: DropFile) -> Handled {
        let truncations = self.clone();
        Handled::Later(Box::pin(async move {
            let Truncations { env, members, overlays, .. } = &*truncations;
            members.check_announced(&r.epochs).await?;
            let worker = members.store().clone();
            let DropFile { file, from_stripe, to_stripe, fence, epochs, .. } = r;
            let truncation = format::Truncation { from_stripe, to_stripe, token_epoch: fence };
            let (seq, reply) =
                env.tasks.blocking(move || worker.drop_file(file, truncation, &epochs)).await?;
            members.store().durable(seq).await?;
            // No read after this sees one of those writes begin or end.
            if env.clock.timeout(FENCE_PATIENCE, overlays.ended(file, fence)).await.is_err() {
                return Err(Error::unavailable(format!(
                    "truncation of file {file}: earlier writes under token epochs below {fence} have not ended yet"
                )));
            }
            Ok(Reply::new(&reply))
        }))
    }
    pub fn list(self: &Arc<Self>, r: ListTruncations) -> Handled {
        let truncations = self.clone();
        Handled::Later(Box::pin(async move {
            let members = &truncations.members;
            members.check_announced(&r.epochs).await?;
            let (seq, list) = members.store().list_truncations(r.after, &r.epochs, r.limit)?;
            members.store().durable(seq).await?;
            Ok(Reply::new(&list))
        }))
    }

    /// Fetches from the current peers the truncations made while this target was away. Returns the peers that
    /// did not answer.
    pub async fn learn_truncations(&self, behind: &[Acting]) -> BTreeSet<TargetId> {
        let mut peers: BTreeMap<TargetId, Vec<GroupAt>> = BTreeMap::new();
        for acting in behind {
            for member in &acting.group().members {
                if member.state == MemberState::Current {
                    peers.entry(member.target).or_default().push(acting.at());
                }
            }
        }
        let mut silent = BTreeSet::new();
        for (peer, epochs) in peers {
            if let Err(e) = self.learn_from(peer, epochs).await {
                tracing::debug!(%peer, "learn of truncations: {e}");
                silent.insert(peer);
            }
        }
        silent
    }

    async fn learn_from(&self, peer: TargetId, epochs: Vec<GroupAt>) -> Result<()> {
        loop {
            let after = self.learned().get(&peer).copied().unwrap_or(0);
            let request = ListTruncations { target: peer, after, epochs: epochs.clone(), limit: LIST_MAX };
            let (list, _) = self.calls.ask(peer, request, Vec::new()).await?;
            let Some(last) = list.truncations.last().map(|c| c.number) else { return Ok(()) };
            let store = self.members.store().clone();
            let applied = self
                .env
                .tasks
                .blocking(move || {
                    let mut applied = CommitSeq(0);
                    for truncation in list.truncations {
                        let Truncation { file, from_stripe, to_stripe, token_epoch, .. } = truncation;
                        let truncation = format::Truncation { from_stripe, to_stripe, token_epoch };
                        let (seq, _) = store.drop_file(file, truncation, &[])?;
                        applied = applied.max(seq);
                    }
                    Ok::<_, Error>(applied)
                })
                .await?;
            self.members.store().durable(applied).await?;
            self.learned().insert(peer, last);
            if !list.more {
                return Ok(());
            }
        }
    }
    fn learned(&self) -> MutexGuard<'_, BTreeMap<TargetId, u64>> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets truncations that all members have received.
    pub async fn forget_truncations(&self) -> Result<()> {
        let (map, store) = (self.members.map(), self.members.store());
        let mut mine = map.groups.iter().filter(|g| self.members.is_member(g));
        let whole = mine.all(|g| g.members.iter().all(|m| m.state == MemberState::Current));
        let (now, newest) = (self.env.clock.now(), store.index().newest_truncation()?);
        let due = self.forgetting.lock().unwrap_or_else(PoisonError::into_inner).due(now, newest, whole);
        let Some(upto) = due else { return Ok(()) };
        let store = store.clone();
        self.env.tasks.blocking(move || store.forget_truncations(upto)).await
    }
}
