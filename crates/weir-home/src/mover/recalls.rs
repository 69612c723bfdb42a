//! Recalls of evicted bytes: readers wait for them, so nothing else delays them.
use super::relations::Relations;
use super::session::Session;
use super::{HomeOf, HomeUse, PAUSES, WAIT};
use crate::recall;
use std::sync::Arc;
use tokio::sync::Semaphore;
use weir_client::Recall;
use weir_env::Pauses;
use weir_proto::ErrorKind;
use weir_proto::recall::Learned;
use weir_proto::relation::Direction;

/// Ranges that are recalled in parallel.
const RECALLS_AT_ONCE: usize = 8;

#[derive(Clone)]
pub(super) struct Recalls {
    session: Arc<Session>,
    relations: Arc<Relations>,
}

impl Recalls {
    pub(super) fn new(session: Arc<Session>, relations: Arc<Relations>) -> Recalls {
        Recalls { session, relations }
    }

    /// Until the session ends.
    pub(super) async fn run(&self) {
        let free = Arc::new(Semaphore::new(RECALLS_AT_ONCE));
        let mut pauses = Pauses::new(&self.session.env.rng, PAUSES);
        loop {
            let Ok(first) = free.clone().acquire_owned().await else { return };
            let max = 1 + free.available_permits() as u32;
            let taken = match self.session.client.mover().take_recalls(max, WAIT).await {
                Ok(taken) => {
                    pauses.restart();
                    taken
                }
                Err(e) => {
                    tracing::debug!("no recalls: {e}");
                    self.session.env.clock.sleep(pauses.next_pause()).await;
                    continue;
                }
            };
            let mut permits = vec![first];
            for recall in taken {
                let permit = permits.pop().or_else(|| free.clone().try_acquire_owned().ok());
                let me = self.clone();
                self.session.spawn("recall", async move {
                    let _one = permit;
                    me.recall_range(recall).await;
                });
            }
        }
    }

    async fn recall_range(&self, recall: Recall) {
        let what = format!("inode {} bytes {} to {}", recall.work.ino, recall.work.from, recall.work.to);
        let done = match self.carry_out(&recall).await {
            Ok(learned) => self.session.client.mover().filled(recall, learned).await,
            Err(failed) => {
                if let Some(more) = self.session.env.watch.line("a recall failed") {
                    tracing::warn!("{what} could not be recalled: {}{more}", failed.why);
                }
                self.session.client.mover().recall_failed(recall, &failed.why, failed.retry).await
            }
        };
        if let Err(e) = done {
            tracing::debug!("{what}: the leader was not notified: {e}");
        }
    }

    async fn carry_out(&self, recall: &Recall) -> Result<Option<Learned>, recall::Failed> {
        let (mut before, mut pauses) = (None, Pauses::new(&self.session.env.rng, PAUSES));
        loop {
            let place = self.session.client.where_at_home(recall.work.ino, None).await.map_err(|e| {
                recall::Failed { why: e.to_string(), retry: e.kind != ErrorKind::NotFound, diverged: false }
            })?;
            let (id, url, ids, by) = (place.relation, place.url.clone(), place.ids.clone(), place.by);
            let only_reads = place.direction == Direction::Mirror;
            let which = HomeOf { holds: HomeUse::Relation(id), url, ids, by, is_new: false, only_reads };
            let relation = self.relations.open(id, &which).await?;
            relation
                .pace
                .count(recall.work.to.saturating_sub(recall.work.from), self.session.env.clock.now());
            match recall::transfer(&self.session.client, &*relation.home, &place, recall).await {
                // Another range may have been shipped, or the name changed meanwhile: then the expected
                // fingerprint has changed, too.
                Err(failed) if failed.diverged && (place.changing || before.as_ref() != Some(&place)) => {
                    before = Some(place);
                    self.session.env.clock.sleep(pauses.next_pause()).await;
                }
                done => return done,
            }
        }
    }
}
