//! Collects the evidence on a delay, of all processes and of the file in question.
//!
//! Invariant: nothing here waits for long, even if processes hang: each query has a deadline, and a missing
//! answer is evidence, too.
use crate::attribute;
use crate::collect::Asker;
use crate::failure::Outcome;
use crate::local::local_cluster::LocalCluster;
use crate::mounts;
use crate::users;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_diagnose::{Answers, Evidence, FileFacts};
use weir_env::BoxFuture;
use weir_proto::watch::{GetTop, ListWaits, Top, WaitsListed};
use weir_proto::{ErrorKind, InodeId};

/// How long each process may take to answer.
const PATIENCE: Duration = Duration::from_millis(1000);
/// Ended waits of this time count, too.
const ENDED_WITHIN_S: u32 = 3600;
/// A younger wait explains no delay that a user notices.
const MIN_MS: u32 = 50;
/// The time over which one user's work is compared with that of others.
const TOP_S: u32 = 10;

/// The threads of a process; none: there is no such process here.
pub fn threads_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The mount's facts about a path; an error: it does not answer, so the program's call hangs there as well.
pub fn of_path(path: &Path) -> Outcome<Option<FileFacts>> {
    let ask = |name: &'static str| mounts::ask(path, move |path| attribute::ask(path, name));
    let (stat, layout) = (ask(attribute::STAT), ask(attribute::LAYOUT));
    let (locks, state) = (ask(attribute::LOCKS), ask(attribute::STATE));
    let client = ask(attribute::CLIENT);
    let Some(stat) = stat.answer() else { return Ok(None) };
    let of =
        |asked: &mounts::Asked<Outcome<Value>>| asked.answer().and_then(Outcome::ok).unwrap_or(Value::Null);
    let (layout, locks, state, client) = (of(&layout), of(&locks), of(&state), of(&client));
    Ok(Some(FileFacts::of(&Answers { stat: stat?, layout, locks, state, client })))
}

/// Queries all processes, the coordinator and the leaders in parallel.
pub fn collect(
    asker: &Arc<Asker>,
    local: Option<LocalCluster>,
    file: Option<FileFacts>,
) -> BoxFuture<'_, Outcome<Evidence>> {
    Box::pin(async move {
        let (waits, top) = (ListWaits { min_ms: MIN_MS, since_s: ENDED_WITHIN_S }, GetTop { seconds: TOP_S });
        let cluster = &asker.cluster;
        let (facts, waits, tops) = tokio::join!(
            asker.facts(local),
            cluster.collect::<_, WaitsListed>(&waits, PATIENCE),
            cluster.collect::<_, Top>(&top, PATIENCE),
        );
        // Users may ask about their files; the waits and the work of others are for administrators.
        let is_partial = waits.as_ref().is_err_and(|e| e.kind == ErrorKind::Denied);
        let waits = if is_partial { Ok(Vec::new()) } else { waits };
        let (facts, collected, tops) = (facts?, waits?, tops.unwrap_or_default());
        let mut evidence = Evidence::of(facts, collected, tops, is_partial);
        evidence.users = users::of(evidence.users_in());
        about(&mut evidence, asker, file).await;
        Ok(evidence)
    })
}

/// From now on it is evidence about this file.
pub fn about<'a>(
    evidence: &'a mut Evidence,
    asker: &'a Arc<Asker>,
    file: Option<FileFacts>,
) -> BoxFuture<'a, ()> {
    Box::pin(async move {
        evidence.volumes_of_file = match &file {
            Some(file) => asker.volumes_of(InodeId(file.inode), &evidence.facts).await,
            None => Vec::new(),
        };
        evidence.file = file;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_threads_and_a_number_without_process_none() {
        assert!(threads_of(std::process::id()).contains(&std::process::id()));
        assert!(threads_of(u32::MAX).is_empty());
    }
}
