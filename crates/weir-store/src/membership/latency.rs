//! Calls to another member of the group that must not delay a write: a member that is silent is reported as
//! suspect, and the call is abandoned when the member goes down.
use super::{Acting, Membership};
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::coord::Suspicion;
use weir_proto::map::{ClusterMap, MemberState};
use weir_proto::{Error, PgId, Result, TargetId};

/// A mirror logs an overlay in a millisecond or two; a disk that flushes its own caches sometimes takes
/// a hundred.
const SILENT_AFTER: Duration = Duration::from_millis(300);
/// The coordinator reaches the member: it is slow. The group continues without it if it can.
const SLOW_AFTER: Duration = Duration::from_millis(1000);
/// Between reads of the map; a newer one ends the wait at once.
const POLL_EVERY: Duration = Duration::from_secs(10);

impl Membership {
    /// The call's outcome, or `Unavailable` as soon as the member at `position` is down.
    pub async fn while_live<T>(
        &self,
        acting: &Acting,
        position: usize,
        mut call: BoxFuture<'_, Result<T>>,
    ) -> Result<T> {
        let member = acting.group().members[position].target;
        let mut version = acting.map.version;
        let begun = self.env.clock.now();
        let mut suspicions =
            [(SILENT_AFTER, Suspicion::Unreachable), (SLOW_AFTER, Suspicion::Slow)].into_iter();
        let mut next = suspicions.next();
        loop {
            let suspect_at = begun + next.map_or(Duration::ZERO, |(after, _)| after);
            tokio::select! {
                biased;
                outcome = &mut call => return outcome,
                newer = self.peers.wait_newer(version, POLL_EVERY) => {
                    let Ok(map) = newer else { continue };
                    version = map.version;
                    if is_down(&map, acting, member) {
                        return Err(Error::unavailable(format!("{member} went down")));
                    }
                }
                () = self.env.clock.sleep_until(suspect_at), if next.is_some() => {
                    if let Some((_, suspicion)) = next {
                        self.report(acting, member, suspicion);
                    }
                    next = suspicions.next();
                }
            }
        }
    }

    /// Returns when the group has a newer epoch than now.
    pub async fn epoch_passes(&self, group: PgId) {
        let epoch_in = |map: &ClusterMap| map.group(group).map(|g| g.epoch);
        let mut map = self.peers.map();
        let now = epoch_in(&map);
        while epoch_in(&map) == now {
            map = self.peers.wait_newer(map.version, POLL_EVERY).await.unwrap_or(map);
        }
    }

    /// The coordinator's verdict arrives in the map.
    fn report(&self, acting: &Acting, member: TargetId, suspicion: Suspicion) {
        let (group, epoch) = (acting.scope.group, acting.scope.epoch);
        let reported = self.peers.suspect(member, group, epoch, suspicion, "mirror an overlay".into());
        self.env.tasks.spawn("suspect a member", async move {
            if let Err(e) = reported.await {
                tracing::debug!(target_id = %member, "a late mirror was not reported to the coordinator: {e}");
            }
        });
    }
}

fn is_down(map: &ClusterMap, acting: &Acting, member: TargetId) -> bool {
    let group = map.group(acting.scope.group);
    let found = group.and_then(|g| g.members.iter().find(|m| m.target == member));
    found.is_none_or(|m| m.state == MemberState::Down)
}
