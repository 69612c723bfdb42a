//! Seams of the roles joined to the cluster: the targets of the metadata role's deleted files, a door that opens late.
use bytes::Bytes;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use weir_coord::Cluster;
use weir_env::{BoxFuture, Env};
use weir_meta::StripeCut;
use weir_proto::data::{DropFile, PAYLOAD_MAX};
use weir_proto::{Error, FileId, PgId, Request, Result, TargetId};
use weir_rpc::{Call, Connection, Defer, Handled, Service};

/// Calls that wait for a gate that is about to open: the newest map has come to their senders sooner than to this node.
const HELD_CALLS_MAX: usize = 4096;

/// A service that is announced before it is there: until then it asks callers to come back, or lets them wait for a moment.
#[derive(Clone)]
pub struct Gate {
    behind: Arc<OnceLock<Arc<dyn Service>>>,
    opened: Arc<Notify>,
    /// Room for calls that wait.
    room: Arc<Semaphore>,
    /// It leads to the metadata service.
    to_metadata: bool,
}

impl Default for Gate {
    fn default() -> Gate {
        let room = Arc::new(Semaphore::new(0));
        Gate { behind: Arc::default(), opened: Arc::default(), room, to_metadata: false }
    }
}

impl Gate {
    pub fn to_metadata() -> Gate {
        Gate { to_metadata: true, ..Gate::default() }
    }
    /// It opens as soon as this node is a member.
    pub fn hold(&self) {
        self.room.add_permits(HELD_CALLS_MAX);
    }
    pub fn open(&self, service: Arc<dyn Service>) {
        assert!(self.behind.set(service).is_ok(), "a gate opens once");
        self.opened.notify_waiters();
    }
    fn wait(&self, call: Call) -> Handled {
        let starting = || Error::unavailable("this node is starting");
        let Ok(place) = self.room.clone().try_acquire_owned() else { return Handled::Now(Err(starting())) };
        let gate = self.clone();
        Handled::Later(Box::pin(async move {
            let opened = gate.opened.notified();
            tokio::pin!(opened);
            opened.as_mut().enable();
            if gate.behind.get().is_none() {
                opened.await;
            }
            drop(place);
            match gate.behind.get().ok_or_else(starting)?.handle(call) {
                Handled::Now(reply) => reply,
                Handled::Later(reply) => reply.await,
            }
        }))
    }
}

impl Service for Gate {
    fn handle(&self, call: Call) -> Handled {
        match self.behind.get() {
            Some(service) => service.handle(call),
            None => self.wait(call),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match self.behind.get() {
            Some(service) => service.handle_or_defer(call, defer),
            None => Some(self.handle(call)),
        }
    }
    fn admits_guests(&self) -> bool {
        self.to_metadata
    }
    fn payload_max(&self) -> u32 {
        if self.to_metadata { 0 } else { PAYLOAD_MAX }
    }
    fn caught_up(&self) {
        if let Some(service) = self.behind.get() {
            service.caught_up();
        }
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(service) = self.behind.get() {
            service.disconnected(connection);
        }
    }
}

fn call<R: Request + Send + Sync + 'static>(
    cluster: &Cluster,
    target: TargetId,
    request: R,
    payload: Vec<Bytes>,
    patience: Duration,
) -> BoxFuture<'static, Result<(R::Reply, Bytes)>> {
    let cluster = cluster.clone();
    Box::pin(async move {
        Ok(cluster.call_target(target, &request, payload.into(), patience).await?.into_parts())
    })
}

/// How long one target may take to drop a file's cells.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// The targets of a deleted file, for the metadata role.
pub struct ClusterPurge(pub Cluster);

impl weir_meta::Purge for ClusterPurge {
    fn drop_stripes(
        &self,
        file: FileId,
        first_pg: PgId,
        pg_count: u32,
        cut: StripeCut,
    ) -> BoxFuture<'static, Result<()>> {
        let StripeCut { from_stripe, to_stripe, token_epoch: fence } = cut;
        let cluster = self.0.clone();
        Box::pin(async move {
            let told = cluster.map().told_of_cuts(|g| g.0 >= first_pg.0 && g.0 - first_pg.0 < pg_count)?;
            let calls = told.into_iter().map(|(target, epochs)| {
                let drop = DropFile { target, file, from_stripe, to_stripe, fence, epochs };
                call(&cluster, target, drop, Vec::new(), DROP_PATIENCE)
            });
            for answer in weir_store::peers::join_all(calls.collect()).await {
                answer?;
            }
            Ok(())
        })
    }
}

/// Part of a file system's free space that counts for a target, when several targets share it.
pub fn share_of_space(env: &Env, dir: &std::path::Path, used: u64, shared_by: u32) -> Option<u64> {
    let space = env.disk.space(dir).ok()?;
    Some(used + space.free / u64::from(shared_by.max(1)))
}
