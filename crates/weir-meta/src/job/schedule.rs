//! Snapshots by schedule: taken when they are due, removed when their retention is over.
//!
//! Invariants: all state is in the store, so a restart changes nothing; a missed one is taken once, now. A
//! volume without changes gets none. A client that does not save its writes delays one volume for a bounded
//! time, and no other.
//!
//! Knows nothing of how a snapshot works, nor of those that users take.

use crate::leader::snapshots::Gate;
use crate::leader::{Leader, NO_SESSION};
use crate::namespace::snapshot;
use crate::namespace::volume::shown_name;
use crate::obstacle::{Halt, Obstacle, Obstacles};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weir_proto::meta::Time;
use weir_proto::volume::Retention;
use weir_proto::{Error, ErrorKind, Result, VolumeId};

/// Between checks: an interval is a minute at least.
const POLL: Duration = Duration::from_secs(1);
/// Writers get this time to save; then it is retried after [`RETRY`].
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(60);
/// A client that does not return a revoked lease loses its session in time: then it is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The code of the trouble that one was not taken.
const LATE: &str = "snapshot-late";

/// When a volume with an interval is checked next.
type Next = BTreeMap<VolumeId, (u32, Time)>;

pub async fn run(leader: Arc<Leader>) -> Error {
    Scheduler { leader }.run().await
}

/// Takes and removes snapshots by schedule.
struct Scheduler {
    leader: Arc<Leader>,
}

impl Scheduler {
    /// Runs all schedules for ever; returns only the error after which the node must stop.
    async fn run(&self) -> Error {
        let (leader, mut next) = (self.leader.clone(), Next::new());
        loop {
            leader.base.env.clock.sleep(POLL).await;
            let scheduled: Vec<(VolumeId, Retention)> = {
                let state = leader.base.lock();
                if state.grace.until.is_some() {
                    continue; // clients from before a restart may still return with their writes
                }
                let all = state.quotas.retentions().iter().filter(|(_, k)| k.snapshots_every_s > 0);
                all.map(|(volume, retention)| (*volume, *retention)).collect()
            };
            next.retain(|volume, _| scheduled.iter().any(|(v, _)| v == volume));
            for (volume, retention) in scheduled {
                if let Err(e) = self.keep_schedule(&mut next, volume, &retention).await
                    && let Err(e) = leader.base.retry_job(e, "take snapshots by schedule").await
                {
                    return e;
                }
            }
        }
    }

    async fn keep_schedule(&self, next: &mut Next, volume: VolumeId, retention: &Retention) -> Result<()> {
        let (every_s, now) = (retention.snapshots_every_s, self.leader.base.wall());
        // No later than by a correct clock: one that was ahead does not stop the schedule.
        let latest = snapshot::due(Some(now), every_s);
        let known = next.get(&volume).filter(|(every, due)| *every == every_s && due.nanos <= latest.nanos);
        let due = match known {
            Some((_, due)) => *due,
            None => self.first_due(volume, every_s, now)?,
        };
        let then = match due.nanos <= now.nanos {
            false => due,
            true => match self.keep_one(volume, retention).await {
                Ok(()) => {
                    let name = shown_name(self.leader.base.commits.store(), volume);
                    self.leader.base.failing.succeeded(LATE, &name);
                    snapshot::due(Some(now), every_s)
                }
                Err(e) if e.kind == ErrorKind::Io => return Err(e),
                Err(e) => {
                    tracing::warn!(volume = %volume, "no snapshot by schedule: {e}");
                    self.note_late(volume, &e);
                    Time { nanos: now.nanos.saturating_add(RETRY.as_nanos() as i64) }
                }
            },
        };
        next.insert(volume, (every_s, then));
        Ok(())
    }

    fn note_late(&self, volume: VolumeId, e: &Error) {
        let (leader, seconds) = (&self.leader, RETRY.as_secs());
        let name = shown_name(leader.base.commits.store(), volume);
        let text = format!("the scheduled snapshot of volume {name} was not taken: {e}");
        let action = format!("it is tried again every {seconds} s: see what keeps it (`weir client list`)");
        leader.base.failing.failed(leader.base.now(), RETRY + PATIENCE, (LATE, &name), text, action);
    }

    fn first_due(&self, volume: VolumeId, every_s: u32, now: Time) -> Result<Time> {
        let mut last = None;
        self.leader.base.read(&mut |read| {
            last = snapshot::last_scheduled(read, volume)?;
            Ok(())
        })?;
        Ok(snapshot::due(last.filter(|last| last.nanos <= now.nanos), every_s))
    }

    /// Takes one, and removes those past their retention.
    async fn keep_one(&self, volume: VolumeId, retention: &Retention) -> Result<()> {
        if let Some(taken) = self.take_scheduled(volume).await? {
            tracing::info!(volume = %volume, "snapshot {} taken by schedule", taken.name);
        }
        let leader = &self.leader;
        let newest = {
            let mut state = leader.base.lock();
            leader.tx.housekeep(&mut state, NO_SESSION, &mut |cx| {
                snapshot::expire(cx, volume, &retention.keep).map(drop)
            })?;
            leader.base.commits.newest(&state)
        };
        leader.base.commits.durable(newest).await
    }

    async fn take_scheduled(&self, volume: VolumeId) -> Result<Option<weir_proto::snapshot::Snapshot>> {
        let leader = &self.leader;
        let deadline = leader.base.now() + PATIENCE;
        let mut gate = Gate::new(&leader.base);
        loop {
            let (mut taken, mut obstacles) = (None, Obstacles::default());
            let (is_done, wait, newest) = {
                let mut state = leader.base.lock();
                state.unpark(&mut gate.parked);
                match gate.is_mine(&mut state, volume)? {
                    false => (false, None, leader.base.commits.newest(&state)),
                    true => {
                        let step =
                            leader.tx.housekeep_asking(&mut state, NO_SESSION, &mut obstacles, &mut |cx| {
                                taken = snapshot::take_scheduled(cx, volume)?;
                                Ok(())
                            });
                        let wait = match step {
                            Ok(()) => None,
                            Err(Halt::Blocked) => Some(state.park(NO_SESSION, &obstacles, &mut gate.parked)),
                            Err(Halt::Failed(e)) => return Err(e),
                        };
                        (wait.is_none(), wait, leader.base.commits.newest(&state))
                    }
                }
            };
            if is_done {
                drop(gate);
                leader.base.commits.durable(newest).await?;
                return Ok(taken);
            }
            let waits_for = obstacles.first().map(Obstacle::ino);
            self.leader.revoker.revoke(obstacles);
            if leader.base.now() >= deadline {
                return Err(crate::leader::snapshots::too_late(waits_for));
            }
            match wait {
                Some(wait) => drop(leader.base.env.clock.timeout(RETRY_PAUSE, wait).await), // checks again either way
                None => leader.base.env.clock.sleep(RETRY_PAUSE).await,
            }
        }
    }
}
