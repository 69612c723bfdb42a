//! Members that are full: a report to the coordinator, so that their place moves to a target with room.
use super::{GroupView, StripeRef};
use crate::join::join_all;
use crate::targets::{Departure, Targets};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::data::HasSpace;
use weir_proto::map::MemberState;
use weir_proto::{Error, ErrorKind, PgId, TargetId};

/// The coordinator is asked again about a group after this time.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// An error does not wait longer for the coordinator.
const ASK_PATIENCE: Duration = Duration::from_secs(2);

/// The coordinator's answer about a group with a full member.
struct FullGroup {
    target: TargetId,
    asked: Instant,
    moves: bool,
    then: String,
}

/// Groups in which a full member refused a write.
pub struct FullMembers {
    env: Env,
    targets: Arc<Targets>,
    known: Mutex<BTreeMap<PgId, FullGroup>>,
}

impl FullMembers {
    pub fn new(env: Env, targets: Arc<Targets>) -> FullMembers {
        FullMembers { env, targets, known: Mutex::default() }
    }
    fn known(&self) -> MutexGuard<'_, BTreeMap<PgId, FullGroup>> {
        self.known.lock().expect("no holder panics")
    }

    /// The error of a member that refused a write. Of a full one: with its name, and whether its place moves.
    pub async fn refusal(&self, view: &GroupView, index: usize, e: Error) -> Error {
        if e.kind != ErrorKind::NoSpace {
            return e;
        }
        let place = view.place(index);
        let now = self.env.clock.now();
        let is_new = |f: &&FullGroup| f.target == place.target && now.since(f.asked) < ASK_AGAIN;
        let known = self.known().get(&place.group).filter(is_new).map(|f| f.then.clone());
        let then = match known {
            Some(then) => then,
            None => self.report_full(view, index).await,
        };
        Error { context: format!("{} refuses it: {}{then}", view.name_of(index), e.context), ..e }
    }

    /// The error of a refused overlay: its sequencer answers for all members that keep the cell's log, so
    /// these are asked which of them is full. `None`: none is any more.
    pub async fn overlay_refusal(&self, view: &GroupView, cell: u8, len: u32, e: &Error) -> Option<Error> {
        if e.kind != ErrorKind::NoSpace {
            return Some(e.clone());
        }
        let parity = usize::from(view.group().scheme.data)..view.group().members.len();
        let keepers = std::iter::once(usize::from(cell)).chain(parity);
        let asked: Vec<BoxFuture<'_, Option<usize>>> = keepers
            .filter(|index| view.state(*index) != MemberState::Down)
            .map(|index| Box::pin(self.is_full(view, index, len)) as BoxFuture<'_, _>)
            .collect();
        let full = join_all(asked).await.into_iter().flatten().next()?;
        Some(self.refusal(view, full, e.clone()).await)
    }
    async fn is_full(&self, view: &GroupView, index: usize, len: u32) -> Option<usize> {
        let target = view.place(index).target;
        let deadline = self.env.clock.now() + ASK_PATIENCE;
        let answer = self
            .targets
            .call(target, &HasSpace { target, len }, vec![], deadline, Departure::unwatched())
            .await;
        // An older program does not know the question.
        answer.ok().filter(|answered| !answered.reply.has_space).map(|_| index)
    }

    async fn report_full(&self, view: &GroupView, index: usize) -> String {
        let place = view.place(index);
        let report = self.targets.cluster.report_full(place.target, place.group);
        let (moves, then) = match self.env.clock.timeout(ASK_PATIENCE, report).await {
            Ok(Ok(said)) if said.moves => {
                let to = said.to.map_or_else(String::new, |to| format!(" to {to}"));
                let why = if said.why.is_empty() { String::new() } else { format!(" ({})", said.why) };
                (true, format!("; its place in {} moves{to}{why}: `weir rebuild` shows how far", place.group))
            }
            Ok(Ok(said)) => (false, format!("; its place in {} cannot move: {}", place.group, said.why)),
            // The coordinator is away, or older.
            Ok(Err(_)) | Err(_) => (false, String::new()),
        };
        let known =
            FullGroup { target: place.target, asked: self.env.clock.now(), moves, then: then.clone() };
        self.known().insert(place.group, known);
        then
    }

    /// After a full member refused a write: waits until another target has its place. False: none is expected
    /// to have it in time.
    pub async fn is_moved(&self, s: &StripeRef, deadline: Instant) -> bool {
        let group = s.layout.pg_of_stripe(s.stripe);
        let _waiting = self.targets.waits.begin(format!("the move of a place of {group} from a full target"));
        while let Some(target) = self.moving_from(group) {
            let Some(now) = GroupView::of(self.targets.cluster.map(), group) else { return false };
            if now.group().members.iter().all(|m| m.target != target) {
                return true;
            }
            if self.targets.left(deadline).is_zero() {
                return false;
            }
            self.targets.wait_newer(now.map_version(), self.targets.left(deadline)).await;
        }
        false
    }
    /// The full target whose place is to move.
    fn moving_from(&self, group: PgId) -> Option<TargetId> {
        self.known().get(&group).filter(|full| full.moves).map(|full| full.target)
    }
}
