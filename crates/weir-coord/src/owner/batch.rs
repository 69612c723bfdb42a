//! A batch of events: the draft of the map that they change, and the answers that wait until it is durable.
use super::event::{Answer, RuleChange};
use crate::copies::{CopyChange, Lives};
use crate::decide::{Connected, Progress, caught_up, finished_level};
use crate::replacing::Wishes;
use std::sync::Arc;
use weir_proto::coord::{CaughtUp, MapReply};
use weir_proto::map::{ClusterMap, Member, MemberState, RemovedNode};
use weir_proto::version::Program;
use weir_proto::{Error, Result};

/// Runs once the batch's map is durable (or the write has failed).
type AfterWrite = Box<dyn FnOnce(&Result<Arc<ClusterMap>>) + Send>;

pub(super) struct Batch {
    pub(super) draft: ClusterMap,
    pub(super) progress: Progress,
    pub(super) rebuild: Wishes,
    pub(super) after: Vec<AfterWrite>,
    pub(super) disconnected: Vec<u64>,
}

impl Batch {
    pub(super) fn caught_up(&mut self, report: &CaughtUp, answer: Answer<MapReply>) {
        match caught_up(&mut self.draft, report.target, report.group, report.epoch) {
            Err(e) => refuse(answer, e),
            Ok(news) => {
                let is_current = |m: &Member| m.target == report.target && m.state == MemberState::Current;
                let group = self.draft.group(report.group);
                if news && group.is_some_and(|g| g.members.iter().any(is_current)) {
                    tracing::info!("{} holds everything of {} again", report.target, report.group);
                }
                self.after(answer, newest);
            }
        }
    }

    pub(super) fn finish_upgrade(
        &mut self,
        mut connected: Vec<Connected>,
        own: &Program,
        answer: Answer<MapReply>,
    ) {
        connected.push(Connected { name: "the coordinator".to_owned(), level: own.level });
        match finished_level(&self.draft, &connected) {
            Err(e) => refuse(answer, e),
            Ok(level) => {
                if level > self.draft.level {
                    tracing::info!(
                        "the cluster is at level {level} from now on, it was at {}",
                        self.draft.level
                    );
                }
                self.draft.level = level;
                self.after(answer, newest);
            }
        }
    }

    /// Removes a node's certificate; also drops entries whose certificates have expired.
    pub(super) fn remove_node(&mut self, removed: RemovedNode, now: u64, answer: Answer<()>) {
        tracing::info!("{} is removed from the cluster", removed.name);
        self.draft.removed.retain(|other| other.name != removed.name && other.until > now);
        self.draft.removed.push(removed);
        self.after(answer, |_| ());
    }

    pub(super) fn change_rules(&mut self, answer: Answer<MapReply>, change: RuleChange) {
        match change(&mut self.draft) {
            Err(e) => refuse(answer, e),
            Ok(what) => {
                tracing::info!("{what}");
                self.after(answer, newest);
            }
        }
    }

    pub(super) fn change_copies(
        &mut self,
        change: Result<CopyChange>,
        lives: Lives<'_>,
        answer: Answer<MapReply>,
    ) {
        match change.and_then(|change| change(&mut self.draft, &self.progress, lives)) {
            Err(e) => refuse(answer, e),
            Ok(()) => self.after(answer, newest),
        }
    }

    /// Answers once the batch is durable, or with the error that prevented it.
    pub(super) fn after<T: Send + 'static>(
        &mut self,
        answer: Answer<T>,
        reply: impl FnOnce(&Arc<ClusterMap>) -> T + Send + 'static,
    ) {
        self.after.push(Box::new(move |outcome| {
            // The caller may have given up: the change holds anyway.
            let _ = answer.send(outcome.as_ref().map(reply).map_err(Error::clone));
        }));
    }
}

pub(super) fn refuse<T>(answer: Answer<T>, error: Error) {
    let _ = answer.send(Err(error)); // the caller may have given up
}

pub(super) fn newest(map: &Arc<ClusterMap>) -> MapReply {
    MapReply { map: Some(map.clone()) }
}
