//! The service of the storage role: requests to the targets of one node.
//!
//! A client's request that cannot be done in time is refused by the target's admission control; one whose
//! caller no longer waits is not begun. The parts of a target (`service/target.rs`) carry requests out; this
//! file knows which part serves which request.
use crate::admission::Admitted;
use crate::alloc::Geometry;
use crate::calls::{Calls, OwnService};
use crate::peers::Peers;
use crate::store::Store;
use addressed::{Addressed, costs};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use target::Target;
use tokio::sync::Semaphore;
use weir_env::{Env, Instant, Space};
use weir_kv::SharedKv;
use weir_proto::coord::TargetReport;
use weir_proto::data::*;
use weir_proto::life::TargetLife;
use weir_proto::methods;
use weir_proto::sender::Sender;
use weir_proto::{Error, Request, Result, TargetId, Wire};
use weir_rpc::{Answered, Call, Demand, Handled, Payload, Reply, Service};

/// Calls that this node forwards at a time for nodes that cannot reach their target: a quarter of the calls
/// of a connection, so that they never use up a link.
const PASSED_ON_MAX: usize = 256;
/// The pause of a node whose call is not forwarded for that reason.
const PASSED_ON_PAUSE: Duration = Duration::from_millis(100);

mod addressed;
mod reads;
mod run;
mod target;
mod writes;

/// One target of a node.
pub struct TargetConfig {
    pub id: TargetId,
    pub dir: PathBuf,
    /// Size of slabs and steps for a new target.
    pub geometry: Geometry,
}

/// The storage role of one node. Runs background work in [`StorageNode::run`].
pub struct StorageNode {
    env: Env,
    targets: BTreeMap<TargetId, Target>,
    peers: Arc<dyn Peers>,
    /// Permits for calls that are forwarded.
    passing_on: Arc<Semaphore>,
}

impl StorageNode {
    /// Opens the targets over indexes that are open already.
    pub async fn open_over(
        env: Env,
        targets: Vec<(TargetConfig, SharedKv)>,
        peers: Arc<dyn Peers>,
    ) -> Result<Arc<StorageNode>> {
        let mut stores = Vec::new();
        for (config, kv) in targets {
            let store_env = env.clone();
            let opening = move || Store::open(store_env, config.id, &config.dir, kv, config.geometry);
            stores.push(env.tasks.blocking(opening).await?);
        }
        let node = |this: &Weak<StorageNode>| {
            let ids = stores.iter().map(|store| store.target).collect();
            let calls = Calls::new(&env, &peers, ids, this.clone());
            let target = |store: Store| (store.target, Target::new(&env, &peers, &calls, store));
            let targets = stores.into_iter().map(target).collect();
            StorageNode { env, targets, peers, passing_on: Arc::new(Semaphore::new(PASSED_ON_MAX)) }
        };
        Ok(Arc::new_cyclic(node))
    }

    /// For heartbeats.
    pub fn reports(&self) -> Vec<TargetReport> {
        self.targets.values().map(|t| t.store.report()).collect()
    }

    /// For signs of life: waits for nothing.
    pub fn lives(&self) -> Vec<TargetLife> {
        self.targets.values().map(|t| t.store.life()).collect()
    }

    /// The directory of a target of this node.
    pub fn dir_of(&self, target: TargetId) -> Option<&Path> {
        self.targets.get(&target).map(|t| t.store.dir())
    }

    /// The bytes of a file system that new data of a target of this node could take.
    pub fn available_of(&self, target: TargetId, space: Space) -> u64 {
        self.targets.get(&target).map_or(0, |t| t.store.available(space))
    }

    /// The targets of this node that refuse data of this length for want of space, and why.
    pub fn refusals(&self, len: u32) -> Vec<(TargetId, Error)> {
        let refusal = |t: &Target| Some((t.store.target, t.store.refusal(len)?));
        self.targets.values().filter_map(refusal).collect()
    }

    /// A request of this node itself.
    pub fn dispatch(&self, method: u16, body: &[u8], payload: Bytes, deadline: Instant) -> Handled {
        self.dispatch_for(method, body, payload, Demand::until(deadline))
    }

    /// A request from anywhere. `demand`: whether its caller still waits.
    fn dispatch_for(&self, method: u16, body: &[u8], payload: Bytes, demand: Demand) -> Handled {
        let deadline = demand.deadline();
        let handled = match method {
            WriteFragment::METHOD => self.serve(body, |t, r: WriteFragment| {
                let is_clients = r.mode != WriteMode::PrepareSeal;
                let written = t.writes.write_fragment(r, payload, demand);
                if is_clients { t.timed(written) } else { written }
            }),
            WriteOverlay::METHOD => {
                self.serve(body, |t, r| t.timed(t.overlays.write_overlay(r, payload, deadline)))
            }
            WriteOverlays::METHOD => {
                self.serve(body, |t, r| t.timed(t.overlays.write_overlays(r, payload, deadline)))
            }
            MirrorOverlay::METHOD => self.serve(body, |t, r| t.timed(t.overlays.mirror_overlay(r, payload))),
            MirrorOverlays::METHOD => {
                self.serve(body, |t, r| t.timed(t.overlays.mirror_overlays(r, payload)))
            }
            HoldStripe::METHOD => self.serve(body, |t, r| t.writes.hold_stripe(r)),
            CommitStripe::METHOD => self.serve(body, |t, r| t.writes.commit_stripe(r)),
            DropPrepared::METHOD => self.serve(body, |t, r| t.writes.drop_prepared(r)),
            SealCell::METHOD => self.serve(body, |t, r| t.writes.seal_cell(r)),
            MarkMissing::METHOD => self.serve(body, |t, r| t.writes.mark_missing(r)),
            ReadCell::METHOD => self.serve(body, |t, r| t.reads.read_cell(r, demand)),
            ReadOverlays::METHOD => self.serve(body, |t, r| t.reads.read_overlays(r, demand)),
            StatCell::METHOD => self.serve(body, |t, r| t.reads.stat_cell(r)),
            ListCells::METHOD => self.serve(body, |t, r| t.reads.list_cells(r)),
            NextStripe::METHOD => self.serve(body, |t, r| t.reads.next_stripe(r)),
            HasSpace::METHOD => self.serve(body, |t, r| t.reads.has_space(&r)),
            StatTarget::METHOD => self.serve(body, |t, _: StatTarget| t.reads.stat_target(payload)),
            DropFile::METHOD => self.serve(body, |t, r| t.truncations.drop_file(r)),
            ListTruncations::METHOD => self.serve(body, |t, r| t.truncations.list(r)),
            ListFences::METHOD => self.serve(body, |t, r| t.fences.list(r)),
            ListPlace::METHOD => self.serve(body, |t, r| t.moves.list_place(r)),
            CopyCell::METHOD => self.serve(body, |t, r| t.moves.copy_cell(r)),
            SealFile::METHOD => self.serve(body, |t, r| t.seals.seal_file(&r)),
            ScrubTarget::METHOD => self.serve(body, |t, r| t.scrubbing.scrub_target(&r)),
            CompareTarget::METHOD => self.serve(body, |t, r| t.comparing.compare_target(&r)),
            PassOn::METHOD => PassOn::from_bytes(body).map(|r| self.pass_on(r, payload, deadline)),
            _ => Err(Error::unsupported(format!("a target store knows no method {method}"))),
        };
        handled.unwrap_or_else(|e| Handled::Now(Err(e)))
    }

    /// Gives a request to its target. To a client a target of another node is as one that is away: the node
    /// may have returned with another disk, which no coordinator knows yet.
    fn serve<R: Addressed>(&self, body: &[u8], by: impl FnOnce(&Target, R) -> Handled) -> Result<Handled> {
        let request = R::from_bytes(body)?;
        let id = request.target();
        let away = || Error::unavailable(format!("this node does not serve target {id}"));
        Ok(by(self.targets.get(&id).ok_or_else(away)?, request))
    }

    fn pass_on(&self, r: PassOn, payload: Bytes, deadline: Instant) -> Handled {
        let Ok(passing) = self.passing_on.clone().try_acquire_owned() else {
            let busy = format!("this node forwards {PASSED_ON_MAX} calls already");
            return Handled::Now(Err(Error::busy(PASSED_ON_PAUSE, busy)));
        };
        let patience = deadline.since(self.env.clock.now());
        let passed = self.peers.pass_on(r, payload, patience);
        Handled::Later(Box::pin(async move {
            let _passing = passing;
            let Answered { reply, payload, payload_crc } = passed.await?;
            Ok(Reply::with_payload(&PassedOn { body: reply }, Payload::with_crc(vec![payload], payload_crc)))
        }))
    }

    /// Admission by the request's target. `None`: it is not asked there. Requests of storage nodes are not
    /// refused: they finish work that was begun, and refusing them would waste it.
    fn admit(&self, call: &Call) -> Result<Option<Admitted>> {
        if call.connection.proved().sender() == Sender::Storage {
            return Ok(None);
        }
        let Some((id, bytes)) = costs(call) else { return Ok(None) };
        self.targets.get(&id).map(|target| target.admit(call, bytes)).transpose()
    }
}

impl OwnService for StorageNode {
    fn serve_own(&self, method: u16, body: &[u8], payload: Bytes, deadline: Instant) -> Handled {
        self.dispatch(method, body, payload, deadline)
    }
}

/// A forwarded call runs under this node's name: its sender must have the right to send it directly.
fn check_passed_on(call: &Call) -> Result<()> {
    let passed = call.decode::<PassOn>()?.method;
    let unknown = || Error::unsupported(format!("a target store knows no method {passed}"));
    let method = methods::find(passed).ok_or_else(unknown)?;
    call.connection.proved().check(method, &call.connection.peer_name())
}

impl Service for StorageNode {
    fn handle(&self, call: Call) -> Handled {
        if call.method == PassOn::METHOD
            && let Err(e) = check_passed_on(&call)
        {
            return Handled::Now(Err(e));
        }
        let admitted = match self.admit(&call) {
            Ok(admitted) => admitted,
            Err(busy) => return Handled::Now(Err(busy)),
        };
        match (admitted, self.dispatch_for(call.method, &call.body, call.payload, call.demand)) {
            (Some(admitted), Handled::Later(reply)) => Handled::Later(Box::pin(async move {
                let _inside = admitted;
                reply.await
            })),
            (_, handled) => handled,
        }
    }
}
