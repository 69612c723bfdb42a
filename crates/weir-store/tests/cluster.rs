//! Several targets wired in one process: mirrors, losses, seals killed at each step, repair.
//!
//! The oracle reads each stripe as a client would, also with any m members lost, and compares with what was written.
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use weir_env::{BoxFuture, Env};
use weir_kv::SharedKv;
use weir_kv::memory::MemoryKv;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::ec::Coder;
use weir_proto::map::*;
use weir_proto::*;
use weir_rpc::Handled;
use weir_store::alloc::Geometry;
use weir_store::peers::{PeerReply, Peers};
use weir_store::service::{StorageNode, TargetConfig};

const CELL: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// The cluster as its members see it; also the coordinator.
struct World {
    env: Env,
    scheme: Scheme,
    map: Arc<Mutex<Arc<ClusterMap>>>,
    nodes: Mutex<BTreeMap<TargetId, Arc<StorageNode>>>,
    dead: Mutex<BTreeSet<TargetId>>,
    /// Calls between targets that still go through; then the callers hang, as if their process were gone.
    calls_left: Mutex<Option<usize>>,
    /// Of whoever writes now.
    token_epoch: Mutex<u32>,
    disks: Vec<(PathBuf, SharedKv)>,
    _dir: tempfile::TempDir,
}

impl World {
    async fn new(scheme: Scheme) -> Arc<World> {
        let dir = tempfile::tempdir().unwrap();
        let width = scheme.width();
        let member =
            |i: usize| Member { target: TargetId(i as u32), state: MemberState::Current, since: Epoch(1) };
        let group = Group {
            id: PgId(0),
            pool: "ram".into(),
            scheme,
            epoch: Epoch(1),
            members: (0..width).map(member).collect(),
        };
        let map = ClusterMap {
            cluster: ClusterId([1; 16]),
            version: 1,
            settings: Settings { scheme, cell_shift: 16, lease_ms: 1000, target_silence_ms: 1000 },
            nodes: vec![],
            targets: vec![],
            groups: vec![group],
            volumes: vec![],
        };
        let disks = (0..width)
            .map(|i| (dir.path().join(format!("t{i}")), Arc::new(MemoryKv::new()) as SharedKv))
            .collect();
        let world = Arc::new(World {
            env: weir_env::real::env(),
            scheme,
            map: Arc::new(Mutex::new(Arc::new(map))),
            nodes: Mutex::default(),
            dead: Mutex::default(),
            calls_left: Mutex::new(None),
            token_epoch: Mutex::new(1),
            disks,
            _dir: dir,
        });
        world.restart().await;
        world
    }
    /// Every process ends and starts again over what its disk holds.
    async fn restart(self: &Arc<World>) {
        self.nodes.lock().unwrap().clear();
        *self.calls_left.lock().unwrap() = None;
        for i in 0..self.scheme.width() {
            self.start(TargetId(i as u32)).await;
        }
    }
    async fn start(self: &Arc<World>, id: TargetId) {
        self.nodes.lock().unwrap().remove(&id);
        let (dir, kv) = self.disks[id.0 as usize].clone();
        let geometry = Geometry { slab_bytes: 16 << 20, step_bytes: 8 << 20 };
        let peers: Arc<dyn Peers> = Arc::new(Links { map: self.map.clone(), world: Arc::downgrade(self) });
        let targets = vec![(TargetConfig { id, dir, geometry }, kv)];
        let node = StorageNode::open_over(self.env.clone(), targets, peers).await.unwrap();
        self.nodes.lock().unwrap().insert(id, node);
    }
    fn map(&self) -> Arc<ClusterMap> {
        self.map.lock().unwrap().clone()
    }
    fn set_state(&self, id: TargetId, state: MemberState) {
        let mut map = self.map.lock().unwrap();
        let mut next = (**map).clone();
        next.version += 1;
        let group = &mut next.groups[0];
        group.epoch.0 += 1;
        let epoch = group.epoch;
        for member in &mut group.members {
            if member.target == id {
                member.state = state;
            }
            if member.state == MemberState::Current {
                member.since = epoch;
            }
        }
        *map = Arc::new(next);
    }
    fn place(&self, position: usize) -> Place {
        let map = self.map();
        Place { target: map.groups[0].members[position].target, group: PgId(0), epoch: map.groups[0].epoch }
    }
    fn dispatch<R: Request>(
        self: &Arc<World>,
        target: TargetId,
        request: R,
        payload: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<(R::Reply, Bytes)>>
    where
        R::Reply: Send,
    {
        let node = self.nodes.lock().unwrap().get(&target).cloned();
        let dead = self.dead.lock().unwrap().contains(&target);
        let body = request.to_bytes();
        let deadline = self.env.clock.now() + PATIENCE;
        Box::pin(async move {
            let node =
                node.filter(|_| !dead).ok_or_else(|| Error::unavailable(format!("{target} is gone")))?;
            let reply = match node.dispatch(R::METHOD, &body, Bytes::from(payload.concat()), deadline) {
                Handled::Now(reply) => reply?,
                Handled::Later(reply) => reply.await?,
            };
            Ok((R::Reply::from_bytes(&reply.body)?, Bytes::from(reply.payload.parts.concat())))
        })
    }
    /// A client's call to a member.
    async fn call<R: Request>(
        self: &Arc<World>,
        position: usize,
        request: R,
        payload: &[u8],
    ) -> Result<(R::Reply, Bytes)>
    where
        R::Reply: Send,
    {
        let payload = if payload.is_empty() { vec![] } else { vec![Bytes::copy_from_slice(payload)] };
        self.dispatch(self.place(position).target, request, payload).await
    }
    async fn overlay(self: &Arc<World>, cell: CellId, offset: usize, data: &[u8]) -> Result<Seq> {
        let token_epoch = *self.token_epoch.lock().unwrap();
        let position = weir_store::service::sequencer(&self.map().groups[0], cell).unwrap();
        let request = WriteOverlay {
            place: self.place(position),
            cell,
            token_epoch,
            offset: offset as u32,
            len: data.len() as u32,
            kind: OverlayKind::Data,
            crc: crc32c(data),
            layout_scheme: self.scheme,
        };
        Ok(self.call(position, request, data).await?.0.seq)
    }
    /// The k + m fragments of a stripe.
    fn encode(&self, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let len = data.iter().map(Vec::len).max().unwrap();
        let mut parity = vec![vec![0; len]; usize::from(self.scheme.parity)];
        let inputs: Vec<&[u8]> = data.iter().map(|d| &d[..]).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
        Coder::new(self.scheme).unwrap().encode(&inputs, &mut outputs).unwrap();
        data.iter().cloned().chain(parity).collect()
    }
    async fn fragment(
        self: &Arc<World>,
        stripe: u64,
        position: usize,
        version: Version,
        bytes: &[u8],
    ) -> Result<()> {
        let request = WriteFragment {
            place: self.place(position),
            cell: cell(stripe, position),
            version,
            mode: WriteMode::Fresh,
            missing: weir_store::service::down_mask(&self.map().groups[0]),
            cuts: vec![],
            block_crcs: block_crcs(bytes, CHECKSUM_BLOCK as usize),
        };
        self.call(position, request, bytes).await.map(|_| ())
    }
    /// A whole stripe at once.
    async fn stripe(self: &Arc<World>, stripe: u64, version: Version, data: &[Vec<u8>]) -> Result<()> {
        for (position, bytes) in self.encode(data).iter().enumerate() {
            if self.map().groups[0].members[position].state != MemberState::Down {
                self.fragment(stripe, position, version, bytes).await?;
            }
        }
        Ok(())
    }
    /// A write that does not reach everybody who is live.
    async fn some_of_stripe(
        self: &Arc<World>,
        stripe: u64,
        version: Version,
        cells: &[Vec<u8>],
        members: &[usize],
    ) {
        let fragments = self.encode(cells);
        for position in members {
            self.fragment(stripe, *position, version, &fragments[*position]).await.unwrap();
        }
    }
    /// Cuts the file before stripe `from`, under a new token epoch, at every live target.
    async fn cut(self: &Arc<World>, from_stripe: u64) {
        let fence = {
            let mut token_epoch = self.token_epoch.lock().unwrap();
            *token_epoch += 1;
            *token_epoch
        };
        for (target, epochs) in self.map().told_of_cuts(|_| true).unwrap() {
            let request = DropFile { target, file: cell(0, 0).file, from_stripe, fence, epochs };
            self.dispatch(target, request, vec![]).await.unwrap();
        }
    }
    /// Its process ends, and the coordinator has seen it.
    async fn lose(self: &Arc<World>, id: TargetId) {
        self.dead.lock().unwrap().insert(id);
        self.set_state(id, MemberState::Down);
    }
    async fn bring_back(self: &Arc<World>, id: TargetId) {
        self.dead.lock().unwrap().remove(&id);
        self.start(id).await;
        self.set_state(id, MemberState::Behind);
    }
    /// A round of background work of each target that lives.
    async fn rounds(self: &Arc<World>, targets: std::ops::Range<u32>) {
        for id in targets.map(TargetId) {
            let node = self.nodes.lock().unwrap().get(&id).cloned();
            if let Some(node) = node.filter(|_| !self.dead.lock().unwrap().contains(&id)) {
                node.round_of(id, true).await;
            }
        }
    }
    /// Cells that each target counts as lacking redundancy.
    async fn debt(self: &Arc<World>) -> Vec<u64> {
        let nodes = self.nodes.lock().unwrap();
        nodes.values().map(|n| n.reports()[0].debt_cells).collect()
    }

    // ---- the oracle
    async fn read(
        self: &Arc<World>,
        position: usize,
        cell: CellId,
        view: ReadView,
        version: Version,
    ) -> Result<(CellRead, Vec<u8>)> {
        let request =
            ReadCell { place: self.place(position), cell, view, version, offset: 0, len: CELL as u32 };
        let (read, bytes) = self.call(position, request, &[]).await?;
        assert_eq!(block_crcs(&bytes, CHECKSUM_BLOCK as usize), read.block_crcs);
        let mut bytes = bytes.to_vec();
        bytes.resize(CELL, 0);
        Ok((read, bytes))
    }
    /// A data cell without its target: decoded from others, then its overlays from a parity target.
    async fn decode(self: &Arc<World>, stripe: u64, index: usize, lost: &[usize]) -> Vec<u8> {
        let (k, width) = (usize::from(self.scheme.data), self.scheme.width());
        let left: Vec<usize> = (0..width).filter(|p| !lost.contains(p)).collect();
        let mut stats = BTreeMap::new();
        for p in &left {
            let request = StatCell { place: self.place(*p), cell: cell(stripe, *p) };
            stats.insert(*p, self.call(*p, request, &[]).await.unwrap().0);
        }
        let newest = stats.values().map(|s| s.base).max().unwrap();
        let mut bytes = vec![0; CELL];
        let mut cuts = vec![];
        if newest > Version(0) {
            let mut fragments = vec![];
            for p in &left {
                match self.read(*p, cell(stripe, *p), ReadView::Base, newest).await {
                    Ok((read, bytes)) => {
                        if *p >= k && !read.cuts.is_empty() {
                            cuts = read.cuts;
                        }
                        fragments.push((*p, bytes));
                    }
                    Err(e) => assert_eq!(e.kind, ErrorKind::Stale, "{e:?}"),
                }
            }
            assert!(
                fragments.len() >= k,
                "stripe {stripe} without {lost:?}: {} fragments of {newest}: {stats:?}",
                fragments.len()
            );
            let present: Vec<(usize, &[u8])> = fragments.iter().map(|(p, b)| (*p, &b[..])).collect();
            Coder::new(self.scheme).unwrap().reconstruct(&present, &[index], &mut [&mut bytes[..]]).unwrap();
        }
        let parity = left.iter().copied().find(|p| *p >= k).expect("at most m are lost, one of them data");
        let request = ReadOverlays {
            place: self.place(parity),
            cell: cell(stripe, index),
            after: cuts.get(index).copied().unwrap_or_default(),
        };
        let (log, payload) = self.call(parity, request, &[]).await.unwrap();
        let mut rest = &payload[..];
        for o in log.extents {
            let (data, after) = rest.split_at(o.len as usize);
            rest = after;
            bytes[o.offset as usize..][..data.len()].copy_from_slice(data);
        }
        bytes
    }
    /// Every data cell of the stripe, directly and with every member pair (or one) lost.
    async fn check(self: &Arc<World>, stripe: u64, expected: &[Vec<u8>], context: &str) {
        let (k, width) = (usize::from(self.scheme.data), self.scheme.width());
        for (index, expected) in expected.iter().enumerate().take(k) {
            if self.map().groups[0].members[index].state == MemberState::Current {
                let (_, bytes) =
                    self.read(index, cell(stripe, index), ReadView::Merged, Version(0)).await.unwrap();
                assert!(bytes == *expected, "{context}: cell {index} of stripe {stripe}, direct");
            }
            for other in if self.scheme.parity == 0 { 0..0 } else { 0..width } {
                let mut lost = vec![index];
                if self.scheme.parity > 1 && other != index {
                    lost.push(other);
                }
                let not_current =
                    (0..width).filter(|p| self.map().groups[0].members[*p].state != MemberState::Current);
                if not_current.clone().any(|p| !lost.contains(&p)) {
                    continue;
                }
                let bytes = self.decode(stripe, index, &lost).await;
                assert!(bytes == *expected, "{context}: cell {index} of stripe {stripe} without {lost:?}");
            }
        }
    }
}

struct Links {
    map: Arc<Mutex<Arc<ClusterMap>>>,
    /// Weak, for the world holds the nodes that hold this: a world ends, and its directory goes, with its test.
    world: Weak<World>,
}
impl Links {
    fn world(&self) -> Result<Arc<World>> {
        self.world.upgrade().ok_or_else(|| Error::unavailable("the cluster is gone"))
    }
}
macro_rules! forward {
    ($($method:ident: $request:ty),* $(,)?) => {$(
        fn $method(&self, target: TargetId, request: $request, payload: Vec<Bytes>, _: Duration) -> PeerReply<$request> {
            let world = match self.world() {
                Ok(world) => world,
                Err(gone) => return Box::pin(async { Err(gone) }),
            };
            if let Some(left) = world.calls_left.lock().unwrap().as_mut() {
                if *left == 0 {
                    return Box::pin(std::future::pending());
                }
                *left -= 1;
            }
            world.dispatch(target, request, payload)
        }
    )*};
}
impl Peers for Links {
    fn map(&self) -> Arc<ClusterMap> {
        self.map.lock().unwrap().clone()
    }
    fn wait_newer(&self, version: u64, patience: Duration) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let world = self.world();
        Box::pin(async move {
            let world = world?;
            let until = world.env.clock.now() + patience;
            while world.map().version <= version {
                if world.env.clock.now() >= until {
                    return Err(Error::deadline("no newer map"));
                }
                world.env.clock.sleep(Duration::from_millis(1)).await;
            }
            Ok(world.map())
        })
    }
    fn doubt(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        _: weir_proto::coord::Doubt,
        why: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        self.report(target, group, epoch, why)
    }
    fn report(
        &self,
        target: TargetId,
        _: PgId,
        epoch: Epoch,
        _: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let world = self.world();
        Box::pin(async move {
            let world = world?;
            let dead = world.dead.lock().unwrap().contains(&target);
            if dead && world.map().groups[0].epoch == epoch {
                world.set_state(target, MemberState::Down);
            }
            Ok(world.map())
        })
    }
    fn caught_up(
        &self,
        target: TargetId,
        _: PgId,
        epoch: Epoch,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let world = self.world();
        Box::pin(async move {
            let world = world?;
            if world.map().groups[0].epoch == epoch {
                world.set_state(target, MemberState::Current);
            }
            Ok(world.map())
        })
    }
    weir_store::with_peer_requests!(forward);
}

fn cell(stripe: u64, index: usize) -> CellId {
    CellId { file: FileId { volume: VolumeId(1), inode: InodeId(0x1000001) }, stripe, index: index as u8 }
}
fn bytes_of(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + seed * 131 + (i >> 8)) as u8).collect()
}
const EC: Scheme = Scheme { data: 4, parity: 2 };

/// What a stripe holds: k cells.
struct Model(Vec<Vec<u8>>);
impl Model {
    fn new() -> Model {
        Model(vec![vec![0; CELL]; 4])
    }
    async fn overlay(&mut self, world: &Arc<World>, stripe: u64, index: usize, offset: usize, data: &[u8]) {
        world.overlay(cell(stripe, index), offset, data).await.unwrap();
        self.0[index][offset..offset + data.len()].copy_from_slice(data);
    }
    async fn fresh(&mut self, world: &Arc<World>, stripe: u64, seed: usize) {
        self.0 = (0..4).map(|i| bytes_of(seed + i, CELL)).collect();
        let version = Version::new(*world.token_epoch.lock().unwrap(), 2);
        world.stripe(stripe, version, &self.0).await.unwrap();
    }
}

#[tokio::test]
async fn overlays_are_on_every_log_keeper() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    model.overlay(&world, 0, 1, 3000, &bytes_of(2, 60_000)).await;
    model.overlay(&world, 0, 3, 0, &bytes_of(3, CELL)).await;
    world.check(0, &model.0, "overlays").await;
    let mut model = Model::new();
    model.fresh(&world, 1, 40).await;
    world.check(1, &model.0, "fresh").await;
    for n in 0..20 {
        model.overlay(&world, 1, n % 4, n * 500, &bytes_of(n, 700 + n)).await;
    }
    world.check(1, &model.0, "overlays on a base").await;
}

#[tokio::test]
async fn many_writers_of_one_cell_at_once() {
    let world = World::new(EC).await;
    let writes = (0..50usize).map(|n| {
        let world = world.clone();
        Box::pin(async move { world.overlay(cell(0, 2), n * 1000, &bytes_of(n, 1000)).await })
            as BoxFuture<'_, Result<Seq>>
    });
    let seqs: BTreeSet<Seq> =
        weir_store::peers::join_all(writes.collect()).await.into_iter().map(|r| r.unwrap()).collect();
    assert_eq!(seqs.len(), 50);
    let mut model = Model::new();
    for n in 0..50 {
        model.0[2][n * 1000..][..1000].copy_from_slice(&bytes_of(n, 1000));
    }
    world.check(0, &model.0, "many writers").await;
}

#[tokio::test]
async fn a_seal_keeps_every_byte_and_drops_the_overlays() {
    let world = World::new(EC).await;
    let mut whole = Model::new();
    whole.fresh(&world, 0, 9).await;
    let mut loose = Model::new();
    for n in 0..30 {
        whole.overlay(&world, 0, n % 3, n * 900, &bytes_of(n, 1500)).await;
        loose.overlay(&world, 7, n % 4, n * 1700, &bytes_of(n, 2500)).await;
    }
    for _ in 0..2 {
        let request = SealFile { target: world.place(4).target, file: cell(0, 0).file };
        world.call(4, request, &[]).await.unwrap();
        world.check(0, &whole.0, "sealed").await;
        world.check(7, &loose.0, "sealed").await;
    }
    for position in 0..6 {
        let (stat, _) =
            world.call(position, StatTarget { target: world.place(position).target }, &[]).await.unwrap();
        assert_eq!(stat.overlay_extents, 0, "position {position}");
    }
    // And goes on after it.
    whole.overlay(&world, 0, 0, 5, b"after the seal").await;
    world.check(0, &whole.0, "after the seal").await;
}

#[tokio::test]
async fn copies_and_single_cells_are_sealed_too() {
    for (scheme, leader) in [(Scheme { data: 1, parity: 0 }, 0), (Scheme { data: 1, parity: 2 }, 1)] {
        let world = World::new(scheme).await;
        let mut model = Model::new();
        for n in 0..10 {
            model.overlay(&world, 0, 0, n * 5000, &bytes_of(n, 6000)).await;
        }
        let request = SealFile { target: world.place(leader).target, file: cell(0, 0).file };
        world.call(leader, request, &[]).await.unwrap();
        world.check(0, &model.0, "sealed").await;
        for position in 0..scheme.width() {
            let request = StatTarget { target: world.place(position).target };
            assert_eq!(world.call(position, request, &[]).await.unwrap().0.overlay_extents, 0);
        }
    }
}

/// The next holder of a dead writer's file fences it; what was written stays, and is sealed all the same.
#[tokio::test]
async fn a_fenced_file_is_sealed() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    for position in 0..6 {
        let target = world.place(position).target;
        let request = DropFile { target, file: cell(0, 0).file, from_stripe: 1, fence: 9, epochs: vec![] };
        world.call(position, request, &[]).await.unwrap();
    }
    assert_eq!(world.overlay(cell(0, 1), 0, b"late").await.unwrap_err().kind, ErrorKind::Stale);
    let request = SealFile { target: world.place(4).target, file: cell(0, 0).file };
    world.call(4, request, &[]).await.unwrap();
    world.check(0, &model.0, "fenced and sealed").await;
    let request = StatCell { place: world.place(5), cell: cell(0, 5) };
    assert_eq!(world.call(5, request, &[]).await.unwrap().0.base, Version::new(9, 1));
}

/// The leader's process ends after each number of calls; all targets that are not lost start again and settle.
async fn seal_killed_at_any_step(lost: &[u32], leader: usize) {
    for calls in 0..60 {
        let world = World::new(EC).await;
        let mut model = Model::new();
        model.fresh(&world, 0, calls).await;
        for id in lost {
            world.lose(TargetId(*id)).await;
        }
        for n in 0..12 {
            model.overlay(&world, 0, n % 3, n * 4000, &bytes_of(n, 5000)).await;
        }
        *world.calls_left.lock().unwrap() = Some(calls);
        let request = || SealFile { target: world.place(leader).target, file: cell(0, 0).file };
        let sealing = world.call(leader, request(), &[]);
        let ended = world.env.clock.timeout(Duration::from_millis(100), sealing).await.is_ok();
        world.restart().await;
        let context = |what: &str| format!("without {lost:?}, killed after {calls} calls, {what}");
        world.check(0, &model.0, &context("before settling")).await;
        model.overlay(&world, 0, 1, 77, b"written while in doubt").await;
        world.rounds(0..6).await;
        world.rounds(0..6).await;
        world.check(0, &model.0, &context("settled")).await;
        world.call(leader, request(), &[]).await.unwrap();
        world.check(0, &model.0, &context("sealed again")).await;
        for position in (0..6).filter(|p| !lost.contains(&(*p as u32))) {
            let request = StatCell { place: world.place(position), cell: cell(0, position) };
            let stat = world.call(position, request, &[]).await.unwrap().0;
            assert_eq!(
                (stat.prepared, stat.overlay_seqs == stat.cuts),
                (vec![], true),
                "position {position}"
            );
        }
        for id in lost {
            world.bring_back(TargetId(*id)).await;
        }
        model.overlay(&world, 0, 2, 99, b"while they are behind").await;
        world.rounds(0..6).await;
        world.rounds(0..6).await;
        world.check(0, &model.0, &context("they are back")).await;
        assert_eq!(world.debt().await, [0; 6], "{}", context("they are back"));
        world.call(4, SealFile { target: world.place(4).target, file: cell(0, 0).file }, &[]).await.unwrap();
        world.check(0, &model.0, &context("they are back and it is sealed")).await;
        if ended {
            return;
        }
    }
    panic!("the seal never ended");
}

#[tokio::test]
async fn a_seal_killed_at_any_step_loses_nothing() {
    seal_killed_at_any_step(&[], 4).await;
}

/// Overlays do not pile up while targets are away: the others seal without them.
#[tokio::test]
async fn a_seal_without_lost_members_loses_nothing() {
    for (lost, leader) in [(&[1][..], 4), (&[5], 4), (&[4], 5), (&[0, 2], 4), (&[2, 4], 5)] {
        seal_killed_at_any_step(lost, leader).await;
    }
}

#[tokio::test]
async fn writes_go_on_without_members_and_are_repaired() {
    for (victim, rank) in [(0usize, "data"), (4, "first parity"), (5, "parity"), (2, "data")] {
        let world = World::new(EC).await;
        let id = TargetId(victim as u32);
        let mut models: Vec<Model> = (0..5).map(|_| Model::new()).collect();
        models[0].fresh(&world, 0, 3).await;
        models[1].fresh(&world, 1, 30).await;
        models[2].overlay(&world, 2, victim % 4, 10, b"before").await;
        world.dead.lock().unwrap().insert(id);
        if victim < 4 {
            // Its own overlays find out only through the coordinator.
            world.set_state(id, MemberState::Down);
        }
        for n in 0..12 {
            models[0].overlay(&world, 0, n % 4, n * 3000, &bytes_of(n, 4000)).await;
            models[2].overlay(&world, 2, n % 4, n * 3000, &bytes_of(n, 4000)).await;
        }
        models[3].fresh(&world, 3, 77).await;
        assert_eq!(world.map().groups[0].members[victim].state, MemberState::Down, "{rank}");
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("without its {rank} target")).await;
        }
        world.dead.lock().unwrap().remove(&id);
        world.start(id).await;
        world.set_state(id, MemberState::Behind);
        models[1].overlay(&world, 1, victim % 4, 600, b"while behind").await;
        models[2].overlay(&world, 2, victim % 4, 50, b"while behind, too").await;
        models[4].fresh(&world, 4, 99).await;
        let node = world.nodes.lock().unwrap()[&id].clone();
        node.round_of(id, true).await;
        assert_eq!(world.map().groups[0].members[victim].state, MemberState::Current, "{rank}");
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{rank} target repaired")).await;
        }
        world.rounds(0..6).await;
        assert_eq!(world.debt().await, [0; 6], "after the {rank} target's repair");
        let request = SealFile { target: world.place(4).target, file: cell(0, 0).file };
        world.call(4, request, &[]).await.unwrap();
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{rank} target repaired, then sealed")).await;
        }
    }
}

/// Targets die one after the other, a write is refused because too few are left, and they return in any order: what a
/// member noted against others while it was here, or before it went itself, goes once all hold everything.
#[tokio::test]
async fn debt_ends_when_every_member_is_current_again() {
    for order in [[0, 1, 4], [4, 1, 0], [1, 0, 4]] {
        let world = World::new(EC).await;
        let mut models: Vec<Model> = (0..4).map(|_| Model::new()).collect();
        for (stripe, victim) in [1, 4].into_iter().enumerate() {
            world.lose(TargetId(victim)).await;
            models[stripe].fresh(&world, stripe as u64, 10 * stripe).await;
            models[3].overlay(&world, 3, 2, 100 * stripe, b"one of several overlays").await;
        }
        // It has its fragments and logs of them, and the masks: then it goes, too.
        let (refused, cells) =
            (Version::new(1, 9), (0..4).map(|i| bytes_of(70 + i, CELL)).collect::<Vec<_>>());
        world.some_of_stripe(2, refused, &cells, &[2, 3, 5]).await;
        world.lose(TargetId(0)).await;
        assert!(world.debt().await.iter().sum::<u64>() > 0);
        for victim in order {
            world.bring_back(TargetId(victim)).await;
            if victim == 0 {
                // It missed nothing: fewer than k were current since.
                world.set_state(TargetId(victim), MemberState::Current);
            }
            world.rounds(0..6).await;
        }
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
        assert_eq!(world.debt().await, [0; 6], "they came back as {order:?}");
        for stripe in [0, 1, 3] {
            world.check(stripe, &models[stripe as usize].0, "all came back").await;
        }
    }
}

/// A file is cut and grows again while a member is away: the member comes back without the old bytes, whatever it held
/// of the stripe (base, overlays, both, with numbers above the new ones), and whatever was written there since.
#[tokio::test]
async fn a_target_that_was_away_brings_no_cut_bytes_back() {
    for victim in [0u32, 2, 4, 5] {
        let world = World::new(EC).await;
        let file = cell(0, 0).file;
        let mut models: Vec<Model> = (0..6).map(|_| Model::new()).collect();
        for (stripe, model) in models.iter_mut().enumerate() {
            model.fresh(&world, stripe as u64, stripe).await;
            for n in 0..6 {
                model.overlay(&world, stripe as u64, n % 4, 500 * n, &bytes_of(n, 900)).await;
            }
        }
        let seal = SealFile { target: world.place(4).target, file };
        world.call(4, seal, &[]).await.unwrap();
        for (stripe, model) in (1..).zip(&mut models[1..3]) {
            model.overlay(&world, stripe, 1, 40, b"not sealed").await;
        }
        world.lose(TargetId(victim)).await;
        world.cut(1).await;
        models[1..].iter_mut().for_each(|m| *m = Model::new());
        // Few numbers where there were many; a whole stripe; nothing; a part of it while the member is behind.
        models[1].overlay(&world, 1, victim as usize % 4, 70, b"grown again").await;
        models[2].fresh(&world, 2, 90).await;
        models[4].overlay(&world, 4, 1, 0, &bytes_of(4, 2000)).await;
        world.bring_back(TargetId(victim)).await;
        for index in 0..4 {
            models[4].overlay(&world, 4, index, 3000, b"while behind").await;
            models[5].overlay(&world, 5, index, 10, b"while behind, too").await;
        }
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is back")).await;
        }
        for index in 0..4 {
            models[1].overlay(&world, 1, index, 900, b"and goes on").await;
            models[5].overlay(&world, 5, index, 900, b"and goes on").await;
        }
        let seal = SealFile { target: world.place(4).target, file };
        world.call(4, seal, &[]).await.unwrap();
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is back, sealed")).await;
        }
    }
}

/// Whoever acts under a map in which a member is away learns that it is back: it would not be told of the cut.
#[tokio::test]
async fn a_cut_under_an_old_map_is_refused() {
    let world = World::new(EC).await;
    Model::new().fresh(&world, 0, 1).await;
    world.lose(TargetId(3)).await;
    let old = world.map();
    assert!(!old.told_of_cuts(|_| true).unwrap().contains_key(&TargetId(3)));
    world.bring_back(TargetId(3)).await;
    world.rounds(3..4).await;
    for (target, epochs) in old.told_of_cuts(|_| true).unwrap() {
        let request = DropFile { target, file: cell(0, 0).file, from_stripe: 0, fence: 2, epochs };
        assert_eq!(world.dispatch(target, request, vec![]).await.unwrap_err().kind, ErrorKind::Stale);
    }
    for lost in [0, 1, 2] {
        world.lose(TargetId(lost)).await;
    }
    assert_eq!(world.map().told_of_cuts(|_| true).unwrap_err().kind, ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_damaged_fragment_is_mended() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.fresh(&world, 0, 3).await;
    let slab = world.disks[2].0.join("slab-0000");
    let file = world.env.disk.open(&slab, weir_env::OpenMode::WRITE).unwrap();
    file.write_all_at(b"rot", 40_000).unwrap();
    let request = ReadCell {
        place: world.place(2),
        cell: cell(0, 2),
        view: ReadView::Merged,
        version: Version(0),
        offset: 0,
        len: CELL as u32,
    };
    // A reader gets the writer's checksums, sees that the bytes do not fit them, and tells the holder, who looks.
    let (read, bytes) = world.call(2, request.clone(), &[]).await.unwrap();
    assert_ne!(block_crcs(&bytes, CHECKSUM_BLOCK as usize), read.block_crcs);
    let bad = MarkMissing { place: world.place(2), cell: cell(0, 2), version: Version(0), missing: 1 << 2 };
    world.call(2, bad, &[]).await.unwrap();
    // What is decoded with is verified first.
    let decoding = ReadCell { view: ReadView::Base, ..request };
    assert_eq!(world.call(2, decoding, &[]).await.map(drop).unwrap_err().kind, ErrorKind::Damaged);
    let node = world.nodes.lock().unwrap()[&TargetId(2)].clone();
    node.round_of(TargetId(2), false).await;
    world.check(0, &model.0, "mended").await;
    let report = &node.reports()[0];
    assert_eq!((report.damaged_blocks, report.repaired_blocks), (1, 1));
}
