//! Runs: how a target's index proves to the coordinator that its data is not an older copy.
//!
//! Order: a run is recorded here before the target joins ([`begin`]); the coordinator admits it; it is
//! recorded here as admitted ([`confirm`]) before the first request is served. So an index that is new, or an
//! older copy, lacks the last run that was served. The coordinator's decision is in `weir-coord`'s
//! `decide/returned.rs`.
use crate::entries::get;
use crate::format::{RUNS, Record, Runs};
use weir_kv::SharedKv;
use weir_proto::coord::TargetHistory;
use weir_proto::map::{ClusterMap, Run};
use weir_proto::{DiskUuid, Error, Result, RunId};

/// Runs that began since the last confirmed one: the coordinator may have admitted each of them, and the
/// process ended before that was recorded here. After more of them in a row the target is refilled without
/// need.
const BEGUN_MAX: usize = 64;

/// Records durably that a run begins. Returns the history that the target sends to the coordinator.
pub async fn begin(kv: &SharedKv, run: RunId) -> Result<TargetHistory> {
    let position = kv.read(&mut |_| Ok(()))?.0;
    let mut before = Runs::default();
    let written = kv.transact(&mut |txn| {
        before = get(txn, RUNS)?.unwrap_or_default();
        let mut now = before.clone();
        now.begun.push(run);
        now.begun.drain(..now.begun.len().saturating_sub(BEGUN_MAX));
        assert_eq!(now.begun.last(), Some(&run), "a run that begins is recorded before it is announced");
        txn.put(RUNS, &now.to_value());
        Ok(())
    })?;
    kv.wait_durable(written).await?;
    Ok(TargetHistory { confirmed: before.confirmed, begun: before.begun, run, position })
}

/// Records durably that the coordinator admitted this run.
pub async fn confirm(kv: &SharedKv, admitted: Run) -> Result<()> {
    let runs = Runs { confirmed: admitted, begun: Vec::new() };
    let written = kv.transact(&mut |txn| {
        txn.put(RUNS, &runs.to_value());
        Ok(())
    })?;
    kv.wait_durable(written).await
}

/// The admission of this run, in a map that came with the answer to the join or later.
pub fn admitted(map: &ClusterMap, disk: DiskUuid, run: RunId) -> Result<Run> {
    let known = map.targets.iter().find(|t| t.uuid == disk);
    known.map(|t| t.last.run).filter(|admitted| admitted.id == run).ok_or_else(|| {
        Error::stale(format!("disk {disk}: the coordinator knows another run of its target than {run}"))
            .hint("another process may serve a copy of the directory")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use weir_kv::MemoryKv;

    #[tokio::test]
    async fn an_index_knows_the_runs_since_the_last_admitted_one() {
        let kv: SharedKv = Arc::new(MemoryKv::default());
        let first = begin(&kv, RunId(1)).await.unwrap();
        assert_eq!(first, TargetHistory { run: RunId(1), ..TargetHistory::default() });
        let second = begin(&kv, RunId(2)).await.unwrap();
        assert_eq!(
            (&second.begun[..], second.run, second.confirmed),
            (&[RunId(1)][..], RunId(2), Run::default())
        );
        assert!(second.position > first.position);
        confirm(&kv, Run { number: 7, id: RunId(2) }).await.unwrap();
        for n in 0..100 {
            begin(&kv, RunId(10 + n)).await.unwrap();
        }
        let last = begin(&kv, RunId(200)).await.unwrap();
        assert_eq!(last.confirmed, Run { number: 7, id: RunId(2) });
        assert_eq!((last.begun.len(), last.begun.last()), (BEGUN_MAX, Some(&RunId(109))));
    }
}
