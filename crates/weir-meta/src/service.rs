//! The metadata service: calls come in, operations run, replies leave when they are durable.
//!
//! An operation without conflicts runs in place, in the connection's reader; one that must wait for a lease
//! waits in a task of its own, and no other waits behind it.

use crate::job;
use crate::leader::outcome::{Outcome, waits};
use crate::leader::sessions::end_dead_sessions_soon;
use crate::leader::{Leader, MetaConfig};
use crate::registry;
use std::sync::Arc;
use weir_env::{BoxFuture, Env};
use weir_kv::SharedKv;
use weir_proto::condition::{TroubleList, Troubles};
use weir_proto::coord::ActFor;
use weir_proto::lock::{CancelLock, ListLocks, ReclaimLocks, SetLock, TestLock};
use weir_proto::meta::{
    KeepAlive, NoteMap, ReleaseAppendToken, ReleaseLease, SessionClose, SessionList, SessionOpen,
    SessionResume,
};
use weir_proto::quota::{OwnersNearLimit, ReclaimSpace};
use weir_proto::recall::{AwaitRecall, GetEviction};
use weir_proto::relation::{CompleteWork, LeaseWork, ReadChanges, RelationList, RelationRulesList};
use weir_proto::sender::Sender;
use weir_proto::snapshot::SnapshotTake;
use weir_proto::volume::ReclaimReservations;
use weir_proto::{Error, Request, Result};
use weir_rpc::{Call, Connection, Defer, Handled, Proved, Reply, Service};

/// The leader of one namespace's metadata. Cheap to clone.
#[derive(Clone)]
pub struct Meta {
    leader: Arc<Leader>,
}

impl Meta {
    /// Takes the leadership of the namespace in `kv` (created if it is empty). Nothing expires, and nothing
    /// that must become durable is answered, until [`Meta::run`] runs.
    pub fn open(env: &Env, kv: SharedKv, config: MetaConfig) -> Result<Meta> {
        let leader = Leader::open(env, kv, config)?;
        leader.end_dead_sessions(&mut leader.lock())?;
        Ok(Meta { leader })
    }

    /// Expires silent sessions and sweeps deleted files, until the journal fails: then the node must stop.
    pub fn run(&self) -> BoxFuture<'_, Error> {
        Box::pin(self.run_unboxed())
    }
    async fn run_unboxed(&self) -> Error {
        let mut failed = self.leader.failed.subscribe();
        tokio::select! {
            biased;
            e = failed.wait_for(Option::is_some) => {
                e.ok().and_then(|e| e.clone()).unwrap_or_else(|| Error::io("the journal failed"))
            }
            e = job::run_all(&self.leader) => e,
        }
    }

    pub(crate) fn leader(&self) -> &Arc<Leader> {
        &self.leader
    }

    /// Sessions and inodes under lease, for status and tests.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.leader.lock();
        (state.sessions.len(), state.leases.len())
    }

    /// The number of requests that may wait here, for tests.
    pub fn set_waiting_max(&self, max: usize) {
        self.leader.door.set_waiting_max(max);
    }

    /// Requests that wait here, and hints in flight to clients, for tests.
    pub fn waiting(&self) -> (usize, usize) {
        self.leader.door.counts()
    }

    /// Records of a relation, for tests.
    pub fn relation_records(&self, relation: weir_proto::relation::RelationId) -> usize {
        let mut count = 0;
        // The failure of a store is reported elsewhere.
        let _ = self.leader.kv.read(&mut |read| {
            count = crate::relation::store::count(read, relation)?;
            Ok(())
        });
        count
    }
}

impl Meta {
    /// A call that waits, as long as its connection lives; refused if too many do. The leadership may be lost
    /// meanwhile.
    fn wait(&self, on: Connection, work: BoxFuture<'static, Result<Reply>>) -> Handled {
        let taken = match self.leader.door.wait() {
            Ok(taken) => taken,
            Err(e) => return Handled::Now(Err(e)),
        };
        let leader = self.leader.clone();
        Handled::Later(Box::pin(async move {
            let _taken = taken;
            let result = tokio::select! {
                biased;
                result = work => result,
                ended = on.closed() => return Err(ended), // no caller is left to answer
            };
            leader.config.right.wait(&leader.env).await?;
            result
        }))
    }
}

impl Service for Meta {
    fn handle(&self, call: Call) -> Handled {
        let on = call.connection.clone();
        match self.dispatch(&call) {
            Outcome::Ready(seq, result) if self.leader.may_reply(seq) => Handled::Now(result),
            Outcome::Ready(seq, result) => {
                let leader = self.leader.clone();
                Handled::Later(Box::pin(async move {
                    leader.durable(seq).await?;
                    result
                }))
            }
            Outcome::Waits(work) => self.wait(on, work),
        }
    }

    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        let on = call.connection.clone();
        match self.dispatch(&call) {
            Outcome::Ready(seq, result) if self.leader.may_reply(seq) => Some(Handled::Now(result)),
            Outcome::Ready(seq, result) => {
                if let Some(responder) = defer.take() {
                    self.leader.replies.push(seq, responder, result);
                }
                None
            }
            Outcome::Waits(work) => Some(self.wait(on, work)),
        }
    }

    fn admits_guests(&self) -> bool {
        true
    }

    fn payload_max(&self, _from: Sender) -> u32 {
        0
    }

    fn caught_up(&self) {
        self.leader.replies.settle(&self.leader.kv, &self.leader.config.right);
    }

    fn disconnected(&self, connection: &Connection) {
        let mut state = self.leader.lock();
        state.mounts.disconnected(connection.id());
        for session in state.sessions.values_mut() {
            if session.connection.as_ref().is_some_and(|c| c.id() == connection.id()) {
                session.connection = None;
            }
        }
        drop(state);
        end_dead_sessions_soon(&self.leader);
    }
}

impl Meta {
    fn dispatch(&self, call: &Call) -> Outcome {
        if call.method == ActFor::METHOD {
            return Outcome::now(call.decode::<ActFor>().map(|ActFor { uid }| call.connection.act_for(uid)));
        }
        if let Proved::User(guest) = call.connection.proved()
            && let Err(e) =
                crate::guest::check(call, guest, |session| self.leader.is_of(session, &call.connection))
        {
            return Outcome::refused(e);
        }
        if call.method == SnapshotTake::METHOD {
            return self.leader.take_snapshot(call.decode(), call);
        }
        if let Some(outcome) = registry::operate(&self.leader, call) {
            return outcome;
        }
        self.dispatch_relation(call)
    }

    fn dispatch_relation(&self, call: &Call) -> Outcome {
        let leader = self.leader.clone();
        match call.method {
            RelationRulesList::METHOD => {
                Outcome::plain(call.decode().and_then(|r| leader.relation_rules(&r)))
            }
            RelationList::METHOD => Outcome::plain(call.decode().and_then(|r| leader.relation_list(&r))),
            CompleteWork::METHOD => {
                Outcome::committed(call.decode().and_then(|r| leader.complete_work(&r)).map(|seq| ((), seq)))
            }
            LeaseWork::METHOD => waits(call.decode(), |r| leader.lease_work(r)),
            ReadChanges::METHOD => waits(call.decode(), |r| leader.read_changes(r)),
            ReclaimReservations::METHOD => {
                Outcome::now(call.decode().and_then(|r| leader.reclaim_reservations(&r)))
            }
            ReclaimSpace::METHOD => Outcome::now(call.decode().and_then(|r| leader.reclaim_space(&r))),
            AwaitRecall::METHOD..=GetEviction::METHOD => leader.handle_recall(call),
            _ => self.session_call(call).mapped(&self.leader),
        }
    }

    fn session_call(&self, call: &Call) -> Outcome {
        let on = &call.connection;
        match call.method {
            NoteMap::METHOD => self.leader.note_map(call),
            KeepAlive::METHOD => Outcome::now(call.decode().and_then(|r| self.leader.keep_alive(&r, on))),
            ReleaseLease::METHOD => Outcome::now(call.decode().and_then(|r| self.leader.release(&r))),
            ReleaseAppendToken::METHOD => {
                Outcome::now(call.decode().and_then(|r| self.leader.release_append_token(&r)))
            }
            SessionOpen::METHOD => {
                Outcome::committed(call.decode().and_then(|r| self.leader.session_open(&r, on)))
            }
            SessionResume::METHOD => {
                Outcome::committed(call.decode().and_then(|r| self.leader.session_resume(&r, on)))
            }
            SessionClose::METHOD => Outcome::committed(
                call.decode().and_then(|r| self.leader.session_close(&r)).map(|seq| ((), seq)),
            ),
            TroubleList::METHOD => {
                let failing = |_: TroubleList| self.leader.failing.list(self.leader.env.clock.now());
                let all = |failing| self.leader.starting().into_iter().chain(failing).collect();
                Outcome::plain(call.decode().map(failing).map(|f| Troubles { troubles: all(f) }))
            }
            SessionList::METHOD => Outcome::plain(call.decode().and_then(|r| self.leader.session_list(&r))),
            OwnersNearLimit::METHOD => {
                Outcome::plain(call.decode().and_then(|_: OwnersNearLimit| self.leader.owners_near()))
            }
            _ => self.handle_lock(call),
        }
    }

    /// The journal has no locks: an answer waits for no commit.
    fn handle_lock(&self, call: &Call) -> Outcome {
        let on = &call.connection;
        match call.method {
            SetLock::METHOD => Outcome::plain(
                self.leader
                    .admitted::<SetLock>(call, |r| r.session)
                    .and_then(|r| self.leader.set_lock(&r, on)),
            ),
            TestLock::METHOD => Outcome::plain(
                self.leader.admitted::<TestLock>(call, |r| r.session).and_then(|r| self.leader.test_lock(&r)),
            ),
            CancelLock::METHOD => Outcome::plain(call.decode().and_then(|r| self.leader.cancel_lock(&r, on))),
            ListLocks::METHOD => Outcome::plain(
                self.leader
                    .admitted::<ListLocks>(call, |r| r.session)
                    .and_then(|r| self.leader.list_locks(&r)),
            ),
            ReclaimLocks::METHOD => {
                Outcome::plain(call.decode().and_then(|r| self.leader.reclaim_locks(&r, on)))
            }
            _ => Outcome::refused(call.unknown()),
        }
    }
}
