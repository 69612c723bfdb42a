//! Empties the trash of volumes: expired parts, and before that parts whose space is needed, oldest first.
//!
//! Invariants: each step is one bounded transaction, and revokes leases as an `unlink` by a client would.
//! Space for a client or on the targets is freed only as far as it is lacking. Expired parts are found in the
//! store, so a restart changes nothing.

use crate::leader::{Leader, State};
use crate::namespace::{self, trash};
use crate::record::TrashRecord;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::meta::Usage;
use weir_proto::{Error, ErrorKind, InodeId, Result, VolumeId};

/// Between checks, unless an operation waits for space.
const POLL: Duration = Duration::from_secs(5);
/// Operations that wait for space get their turn between steps.
const STEP_PAUSE: Duration = Duration::from_millis(2);
/// Trash is not kept on targets that are fuller than this, in hundredths.
const FULL_PERCENT: u128 = 90;
/// Targets' reports no longer include bytes that were removed this long ago.
const DROPPED_WITHIN: Duration = Duration::from_secs(60);

/// Recently removed bytes: targets may still report them as used.
type Dropping = VecDeque<(Instant, u64)>;

pub async fn run(leader: Arc<Leader>) -> Error {
    TrashEmptier { leader }.run().await
}

/// Empties the trash of volumes.
struct TrashEmptier {
    leader: Arc<Leader>,
}

impl TrashEmptier {
    /// Empties for ever; returns only the error after which the node must stop.
    async fn run(&self) -> Error {
        let (leader, mut dropping) = (self.leader.clone(), Dropping::new());
        let full = leader.base.lock().quotas.full.clone();
        loop {
            let over = leader.base.env.clock.sleep(POLL);
            tokio::select! {
                biased;
                () = full.notified() => {}
                () = over => {}
            }
            if leader.base.lock().grace.until.is_some() {
                continue; // clients from before a restart may still return with their leases
            }
            match self.scan_trash(&mut dropping).await {
                Ok(()) => {}
                Err(e) if e.kind == ErrorKind::Io => return e.doing("empty the trash"),
                Err(e) => tracing::warn!("empty the trash: {e}"),
            }
        }
    }

    async fn scan_trash(&self, dropping: &mut Dropping) -> Result<()> {
        let mut last = VolumeId(0);
        let mut eldest: Option<(u64, VolumeId)> = None;
        loop {
            self.free_space().await?;
            let mut found = None;
            self.leader.base.read(&mut |read| {
                found = match trash::next_volume(read, last)? {
                    Some(volume) => Some((volume, trash::oldest(read, volume)?)),
                    None => None,
                };
                Ok(())
            })?;
            let Some((volume, part)) = found else { break };
            match part {
                Some(part) if self.is_over(volume, &part.1) => drop(self.empty_one(volume).await?),
                Some((from, _)) => {
                    eldest = eldest.into_iter().chain([(from, volume)]).min();
                    last = volume;
                }
                None => last = volume,
            }
        }
        match eldest {
            Some((_, volume)) => self.relieve_targets(volume, dropping).await,
            None => Ok(()),
        }
    }

    fn is_over(&self, volume: VolumeId, part: &TrashRecord) -> bool {
        let state = self.leader.base.lock();
        let trash_s = state.quotas.retentions().get(&volume).map_or(0, |retention| retention.trash_s);
        trash::is_over(part, trash_s, self.leader.base.wall())
    }

    /// One step of a volume's oldest part. False: there is none.
    async fn empty_one(&self, volume: VolumeId) -> Result<bool> {
        let any = self
            .leader
            .operations
            .step(&mut |cx| match trash::oldest(&*cx.txn, volume)? {
                Some(part) => trash::remove_some(cx, volume, part).map(|_| true),
                None => Ok(false),
            })
            .await?;
        let leader = &self.leader;
        let root = self.read(|read| trash::of(read, volume))?;
        if let Some(root) = root {
            leader.base.lock().wake(root);
        }
        leader.base.env.clock.sleep(STEP_PAUSE).await;
        Ok(any)
    }

    fn read<T: Default>(&self, ask: impl Fn(&dyn Read) -> Result<T>) -> Result<T> {
        let mut answer = T::default();
        self.leader.base.read(&mut |read| {
            answer = ask(read)?;
            Ok(())
        })?;
        Ok(answer)
    }

    /// Frees space for starved clients in volumes with limits.
    async fn free_space(&self) -> Result<()> {
        let goals = self.leader.base.lock().quotas.take_goals(self.leader.base.wall());
        for (volume, goal) in goals {
            while self.used(volume)?.bytes > goal && self.empty_one(volume).await? {}
        }
        for volume in self.awaited()? {
            let is_full = |state: &State, used: &Usage| {
                state.quotas.check_inodes(volume, used, self.leader.base.wall()).is_err()
            };
            loop {
                let used = self.used(volume)?;
                if !is_full(&self.leader.base.lock(), &used) || !self.empty_one(volume).await? {
                    break;
                }
            }
            if let Some(root) = self.read(|read| trash::of(read, volume))? {
                self.leader.base.lock().wake(root);
            }
        }
        Ok(())
    }

    fn used(&self, volume: VolumeId) -> Result<Usage> {
        let mut used = None;
        self.leader.base.read(&mut |read| {
            used = Some(namespace::volume_usage(read, volume)?);
            Ok(())
        })?;
        Ok(used.expect("the body ran"))
    }

    /// Volumes where an operation waits for the trash to be emptied.
    fn awaited(&self) -> Result<Vec<VolumeId>> {
        let volumes: Vec<VolumeId> = {
            let state = self.leader.base.lock();
            let limited = |volume: &&VolumeId| state.quotas.is_limited(**volume);
            state.quotas.retentions().keys().filter(limited).copied().collect()
        };
        let mut roots: Vec<(VolumeId, Option<InodeId>)> = Vec::new();
        self.leader.base.read(&mut |read| {
            let root = |volume: &VolumeId| Ok((*volume, trash::of(read, *volume)?));
            roots = volumes.iter().map(root).collect::<Result<_>>()?;
            Ok(())
        })?;
        let state = self.leader.base.lock();
        let awaited = |root: Option<InodeId>| root.is_some_and(|root| state.leases.is_awaited(root));
        Ok(roots.into_iter().filter(|(_, root)| awaited(*root)).map(|(volume, _)| volume).collect())
    }

    /// Frees the excess usage of the targets, from the oldest parts.
    async fn relieve_targets(&self, volume: VolumeId, dropping: &mut Dropping) -> Result<()> {
        let space = Arc::clone(&self.leader.base.config.space);
        let Some(level) = space().await else { return Ok(()) };
        let now = self.leader.base.now();
        dropping.retain(|(at, _)| now.since(*at) < DROPPED_WITHIN);
        let dropped: u64 = dropping.iter().map(|(_, bytes)| bytes).sum();
        let most = (u128::from(level.capacity) * FULL_PERCENT / 100) as u64;
        let excess = level.used.saturating_sub(dropped).saturating_sub(most);
        if excess == 0 {
            return Ok(());
        }
        let before = self.used(volume)?.bytes;
        let goal = before.saturating_sub(excess);
        while self.used(volume)?.bytes > goal && self.empty_one(volume).await? {}
        let freed = before.saturating_sub(self.used(volume)?.bytes);
        dropping.push_back((now, freed));
        tracing::info!(volume = %volume, "the targets are full: {freed} bytes of its trash are removed before their time");
        Ok(())
    }
}
