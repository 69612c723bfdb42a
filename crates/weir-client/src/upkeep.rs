//! The work of a client at intervals: it keeps its session, writes back old changes, reports, and
//! returns unused reservations and leases. Each task ends with the client.
use crate::parts::Parts;
use crate::waits::Waiting;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_coord::Cluster;
use weir_env::TaskHandle;
use weir_proto::coord::Wait;

/// The interval at which write-back checks changed data.
const WRITE_BACK_PERIOD: Duration = Duration::from_secs(1);
/// The interval at which a client checks its connection to the leader.
const SESSION_POLL: Duration = Duration::from_millis(500);
/// The interval of reports to the coordinator on what calls wait for, and the patience for each.
const REPORT_EVERY: Duration = Duration::from_secs(5);
const REPORT_PATIENCE: Duration = Duration::from_secs(1);

/// Begins all of them.
pub fn begin(parts: &Arc<Parts>) -> Vec<TaskHandle> {
    let (tasks, weak) = (&parts.base.env.tasks, || Arc::downgrade(parts));
    vec![
        tasks.spawn("learn of the space", learn_space(parts.base.data.cluster.clone())),
        tasks.spawn("keep the session", keep_session(weak())),
        tasks.spawn("write back", write_back(weak())),
        tasks.spawn("return idle inodes", return_idle(weak())),
        tasks.spawn("watch what calls wait for", watch_waits(weak(), parts.base.config.title())),
        tasks.spawn("watch the way to the leader", watch_way(weak())),
    ]
}

/// So that it can be shown while the coordinator is unreachable.
async fn learn_space(cluster: Cluster) {
    if let Err(e) = cluster.known_status().await {
        tracing::debug!("the space is not known yet: {e}");
    }
}

async fn keep_session(parts: Weak<Parts>) {
    let mut due = None;
    while let Some((clock, period)) =
        parts.upgrade().map(|i| (i.base.env.clock.clone(), i.base.leader.keep_alive_period()))
    {
        let until = *due.get_or_insert(clock.now() + period);
        clock.sleep(until.since(clock.now()).min(SESSION_POLL)).await;
        // A client that was shut down has no session, and needs none.
        let Some(parts) = parts.upgrade().filter(|i| !i.base.leader.is_closing()) else { return };
        // A restarted leader waits for its earlier clients, even if they have no requests.
        if clock.now() >= until || !parts.base.leader.is_taken_up() {
            parts.base.leader.keep_alive().await;
            due = None;
        }
    }
}

/// Goes to a leader that is silent here through another node, and back once the direct way works.
async fn watch_way(parts: Weak<Parts>) {
    while let Some(clock) = parts.upgrade().map(|i| i.base.env.clock.clone()) {
        clock.sleep(SESSION_POLL).await;
        let Some((channel, is_late)) = parts.upgrade().map(|parts| parts.base.leader.way()) else { return };
        channel.compare_ways(is_late).await;
    }
}

/// Reports what calls wait for, and leaves a leader that has moved elsewhere.
async fn watch_waits(parts: Weak<Parts>, title: String) {
    let (mut reported, mut leader) = (None, String::new());
    while let Some(clock) = parts.upgrade().map(|i| i.base.env.clock.clone()) {
        clock.sleep(SESSION_POLL).await;
        let Some(parts) = parts.upgrade() else { return };
        parts.base.leader.leave_old_address();
        let waits = &parts.base.data.waits;
        waits.end(&leader);
        if let Some((since, calls)) = parts.base.leader.silence() {
            let name = parts.base.data.cluster.leader_name(&parts.base.config.namespace).unwrap_or_default();
            leader = format!("the metadata leader {name}");
            waits.note(&leader, since, calls);
        }
        waits.report();
        let (list, now) = (waits.list(), clock.now());
        let due = match reported {
            None => !list.is_empty(),
            Some(at) => list.is_empty() || now.since(at) >= REPORT_EVERY,
        };
        if due {
            reported = (!list.is_empty()).then_some(now);
            let ms = |w: &Waiting| now.since(w.since).as_millis() as u64;
            let waits = list.into_iter().map(|w| Wait { ms: ms(&w), what: w.what, calls: w.calls }).collect();
            let reporting = parts.base.data.cluster.report_waits(title.clone(), waits);
            let _ = clock.timeout(REPORT_PATIENCE, reporting).await; // the next report repeats it
        }
    }
}

async fn write_back(parts: Weak<Parts>) {
    while let Some(clock) = parts.upgrade().map(|i| i.base.env.clock.clone()) {
        clock.sleep(WRITE_BACK_PERIOD).await;
        let Some(parts) = parts.upgrade() else { return };
        parts.writing.write_back.save_aged().await;
        parts.base.accesses.report().await;
        parts.reports.closes.report_old().await;
        let soon = clock.now() + parts.base.leader.keep_alive_period();
        if let Err(e) = parts.base.leader.all_durable(soon).await {
            tracing::debug!("early answers: {e}"); // the next round asks again
        }
        parts.reports.quota.return_unused().await;
    }
}

/// Not in the task of write-back: the kernel may have to wait for a page before it drops an inode.
async fn return_idle(parts: Weak<Parts>) {
    while let Some(clock) = parts.upgrade().map(|i| i.base.env.clock.clone()) {
        clock.sleep(WRITE_BACK_PERIOD).await;
        let Some(parts) = parts.upgrade() else { return };
        parts.idle.return_idle().await;
    }
}
