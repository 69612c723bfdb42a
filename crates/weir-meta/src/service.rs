//! The metadata service: calls come in, operations run, replies leave when they are durable, or early.
//!
//! An operation without conflicts runs in place, in the connection's reader; one that must wait for a lease
//! waits in a task of its own, and no other waits behind it.

use crate::leader::outcome::Outcome;
use crate::leader::{Leader, MetaConfig};
use crate::{calls, job, registry};
use std::sync::Arc;
use weir_env::{BoxFuture, Env};
use weir_kv::SharedKv;
use weir_proto::coord::ActFor;
use weir_proto::sender::Sender;
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
        leader.ends.end_dead_sessions(&mut leader.base.lock())?;
        Ok(Meta { leader })
    }

    /// Expires silent sessions and sweeps deleted files, until the journal fails: then the node must stop.
    pub fn run(&self) -> BoxFuture<'_, Error> {
        Box::pin(self.run_unboxed())
    }
    async fn run_unboxed(&self) -> Error {
        tokio::select! {
            biased;
            e = self.leader.base.commits.failure() => e,
            e = job::run_all(&self.leader) => e,
        }
    }

    pub(crate) fn leader(&self) -> &Arc<Leader> {
        &self.leader
    }

    /// Sessions and inodes under lease, for status and tests.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.leader.base.lock();
        (state.sessions.len(), state.leases.len())
    }

    /// The number of requests that may wait here, for tests.
    pub fn set_waiting_max(&self, max: usize) {
        self.leader.base.admission.set_waiting_max(max);
    }

    /// Requests that wait here, and hints in flight to clients, for tests.
    pub fn waiting(&self) -> (usize, usize) {
        self.leader.base.admission.counts()
    }

    /// Records of a relation, for tests.
    pub fn relation_records(&self, relation: weir_proto::relation::RelationId) -> usize {
        let mut count = 0;
        // The failure of a store is reported elsewhere.
        let _ = self.leader.base.read(&mut |read| {
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
        let taken = match self.leader.base.admission.wait() {
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
            leader.base.config.right.wait(&leader.base.env).await?;
            result
        }))
    }
}

impl Service for Meta {
    fn handle(&self, call: Call) -> Handled {
        let on = call.connection.clone();
        match self.dispatch(&call) {
            Outcome::Ready(seq, result) if self.leader.base.commits.may_reply(seq) => Handled::Now(result),
            Outcome::Ready(seq, result) => {
                let leader = self.leader.clone();
                Handled::Later(Box::pin(async move {
                    leader.base.commits.durable(seq).await?;
                    result
                }))
            }
            Outcome::Waits(work) => self.wait(on, work),
        }
    }

    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        let on = call.connection.clone();
        match self.dispatch(&call) {
            Outcome::Ready(seq, result) if self.leader.base.commits.may_reply(seq) => {
                Some(Handled::Now(result))
            }
            Outcome::Ready(seq, result) => {
                if let Some(responder) = defer.take() {
                    self.leader.base.commits.reply(seq, responder, result);
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
        self.leader.base.commits.settle();
    }

    fn disconnected(&self, connection: &Connection) {
        let mut state = self.leader.base.lock();
        state.mounts.disconnected(connection.id());
        for session in state.sessions.values_mut() {
            if session.connection.as_ref().is_some_and(|c| c.id() == connection.id()) {
                session.connection = None;
            }
        }
        drop(state);
        self.leader.ends.end_dead_sessions_soon();
    }
}

impl Meta {
    fn dispatch(&self, call: &Call) -> Outcome {
        if call.method == ActFor::METHOD {
            return Outcome::now(call.decode::<ActFor>().map(|ActFor { uid }| call.connection.act_for(uid)));
        }
        if let Proved::User(guest) = call.connection.proved()
            && let Err(e) = crate::guest::check(call, guest, |session| {
                self.leader.sessions.is_of(session, &call.connection)
            })
        {
            return Outcome::refused(e);
        }
        registry::operate(&self.leader, call)
            .unwrap_or_else(|| calls::serve(&self.leader, call).mapped(&self.leader))
    }
}
