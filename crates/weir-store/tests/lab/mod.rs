//! Several targets wired in one process, and an oracle: it reads each stripe as a client would, also with any
//! m members lost, and compares with what was written.
#![allow(clippy::disallowed_methods, reason = "a copy of a target's slabs is made behind its back")]
#![allow(dead_code, reason = "each test program uses its own part")]
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use weir_env::{BoxFuture, Env};
use weir_kv::memory::MemoryKv;
use weir_kv::{Scan, SharedKv};
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::coord::PlaceCopied;
use weir_proto::data::*;
use weir_proto::ec::Coder;
use weir_proto::map::*;
use weir_proto::version::LEVEL_MAX;
use weir_proto::*;
use weir_rpc::Handled;
use weir_store::alloc::Geometry;
use weir_store::peers::{PeerReply, Peers};
use weir_store::service::{StorageNode, TargetConfig};

pub const CELL: usize = 64 << 10;
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The cluster as its members see it; also the coordinator.
pub struct World {
    pub env: Env,
    pub scheme: Scheme,
    pub map: Arc<Mutex<Arc<ClusterMap>>>,
    pub nodes: Mutex<BTreeMap<TargetId, Arc<StorageNode>>>,
    pub dead: Mutex<BTreeSet<TargetId>>,
    /// Calls between targets that still go through; then the callers hang, as if their process were gone.
    pub calls_left: Mutex<Option<usize>>,
    /// Calls between targets to these hang.
    pub silent: Mutex<BTreeSet<TargetId>>,
    /// Targets without space for bytes; what carries none they take.
    pub full: Mutex<BTreeSet<TargetId>>,
    /// Groups for which the coordinator does not accept a report that a member caught up.
    pub disbelieved: Mutex<BTreeSet<PgId>>,
    /// Reads of overlay logs between targets: the number in flight, and its maximum.
    pub log_reads: Mutex<(usize, usize)>,
    /// Of the present writer.
    pub token_epoch: Mutex<u32>,
    pub disks: Vec<(PathBuf, SharedKv)>,
    _dir: tempfile::TempDir,
}

/// A copy of a target's disk.
#[derive(Default)]
pub struct Copy {
    entries: Vec<(Vec<u8>, Vec<u8>)>,
    slabs: Vec<(PathBuf, Vec<u8>)>,
}

impl World {
    pub async fn new(scheme: Scheme) -> Arc<World> {
        let dir = tempfile::tempdir().unwrap();
        let width = scheme.width();
        let member = |i: usize| Member {
            target: TargetId(i as u32),
            state: MemberState::Current,
            since: Epoch(1),
            lost_at: Epoch(0),
        };
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
            level: LEVEL_MAX,
            settings: Settings { scheme, cell_shift: 16, lease_ms: 1000, target_silence_ms: 1000 },
            groups: vec![group],
            ..ClusterMap::absent()
        };
        // One more than the group needs: a place may move there.
        let disks = (0..=width)
            .map(|i| (dir.path().join(format!("t{i}")), Arc::new(MemoryKv::new()) as SharedKv))
            .collect();
        let world = Arc::new(World {
            env: weir_env::real::env(),
            scheme,
            map: Arc::new(Mutex::new(Arc::new(map))),
            nodes: Mutex::default(),
            dead: Mutex::default(),
            calls_left: Mutex::new(None),
            silent: Mutex::default(),
            full: Mutex::default(),
            disbelieved: Mutex::default(),
            log_reads: Mutex::default(),
            token_epoch: Mutex::new(1),
            disks,
            _dir: dir,
        });
        world.restart().await;
        world
    }
    /// Every process ends and starts again over what its disk holds.
    pub async fn restart(self: &Arc<World>) {
        self.nodes.lock().unwrap().clear();
        *self.calls_left.lock().unwrap() = None;
        self.silent.lock().unwrap().clear();
        for i in 0..self.scheme.width() {
            self.start(TargetId(i as u32)).await;
        }
    }
    pub async fn start(self: &Arc<World>, id: TargetId) {
        self.nodes.lock().unwrap().remove(&id);
        let (dir, kv) = self.disks[id.0 as usize].clone();
        let geometry = Geometry { slab_bytes: 16 << 20, step_bytes: 8 << 20 };
        let peers: Arc<dyn Peers> = Arc::new(Links { map: self.map.clone(), world: Arc::downgrade(self) });
        let until = self.env.clock.now() + PATIENCE;
        let node = loop {
            let targets = vec![(TargetConfig { id, dir: dir.clone(), geometry }, kv.clone())];
            match StorageNode::open_over(self.env.clone(), targets, peers.clone()).await {
                // Its tasks are gone, and what they had running on threads is not cut short: the target is
                // free when that has ended. Where a whole process ends, its locks go with it.
                Err(e) if e.kind == ErrorKind::Exists && self.env.clock.now() < until => {
                    self.env.clock.sleep(Duration::from_millis(1)).await;
                }
                opened => break opened.unwrap(),
            }
        };
        self.nodes.lock().unwrap().insert(id, node);
    }
    pub fn map(&self) -> Arc<ClusterMap> {
        self.map.lock().unwrap().clone()
    }
    /// More groups with the members of the first.
    pub fn add_groups(&self, count: u32) {
        let mut map = self.map.lock().unwrap();
        let mut next = (**map).clone();
        next.version += 1;
        let first = next.groups[0].clone();
        next.groups.extend((1..=count).map(|id| Group { id: PgId(id), ..first.clone() }));
        *map = Arc::new(next);
    }
    /// In all groups.
    pub fn set_state(&self, id: TargetId, state: MemberState) {
        self.set_state_in(|_| true, id, state);
    }
    fn set_state_in(&self, wanted: impl Fn(&Group) -> bool, id: TargetId, state: MemberState) {
        let mut map = self.map.lock().unwrap();
        let mut next = (**map).clone();
        next.version += 1;
        for group in next.groups.iter_mut().filter(|g| wanted(g)) {
            group.epoch.0 += 1;
            let epoch = group.epoch;
            for member in &mut group.members {
                if member.target == id {
                    member.state = state;
                }
                if member.state == MemberState::Current {
                    (member.since, member.lost_at) = (epoch, Epoch(0));
                }
            }
        }
        *map = Arc::new(next);
    }
    /// The target's files on its disk: its index and its slabs.
    pub fn copy_of(&self, id: TargetId) -> Copy {
        let (dir, kv) = &self.disks[id.0 as usize];
        let mut entries = Vec::new();
        let read = kv.read(&mut |r| {
            entries.clear();
            r.scan(&[], &[0xff; 64], &mut |key, value| {
                entries.push((key.to_vec(), value.to_vec()));
                Scan::More
            })
        });
        read.unwrap();
        let slabs = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
        let slabs = slabs.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("slab"));
        Copy { entries, slabs: slabs.map(|p| (p.clone(), std::fs::read(&p).unwrap())).collect() }
    }
    /// A target that is dead returns with what a copy of it has, and the coordinator has seen that.
    pub async fn return_lost(self: &Arc<World>, id: TargetId, copy: &Copy) {
        self.put_back(id, copy).await;
        self.set_state(id, MemberState::Behind);
        let mut map = self.map.lock().unwrap();
        let mut next = (**map).clone();
        next.version += 1;
        for group in &mut next.groups {
            let epoch = group.epoch;
            group.members.iter_mut().filter(|m| m.target == id).for_each(|m| m.lost_at = epoch);
        }
        *map = Arc::new(next);
    }
    /// A dead target returns with what a copy of it has, and the coordinator does not learn of it.
    pub async fn put_back(self: &Arc<World>, id: TargetId, copy: &Copy) {
        self.nodes.lock().unwrap().remove(&id);
        let (dir, kv) = &self.disks[id.0 as usize];
        let now = self.copy_of(id);
        let replaced = kv.transact(&mut |txn| {
            now.entries.iter().for_each(|(key, _)| txn.delete(key));
            copy.entries.iter().for_each(|(key, value)| txn.put(key, value));
            Ok(())
        });
        replaced.unwrap();
        now.slabs.iter().for_each(|(path, _)| std::fs::remove_file(path).unwrap());
        std::fs::create_dir_all(dir).unwrap();
        for (path, bytes) in &copy.slabs {
            std::fs::write(dir.join(path.file_name().unwrap()), bytes).unwrap();
        }
        self.dead.lock().unwrap().remove(&id);
        self.start(id).await;
    }
    pub fn place(&self, position: usize) -> Place {
        let map = self.map();
        Place { target: map.groups[0].members[position].target, group: PgId(0), epoch: map.groups[0].epoch }
    }
    pub fn dispatch<R: Request>(
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
        let has_bytes = payload.iter().any(|part| !part.is_empty());
        let refused = has_bytes && self.full.lock().unwrap().contains(&target);
        let body = request.to_bytes();
        let deadline = self.env.clock.now() + PATIENCE;
        Box::pin(async move {
            let node =
                node.filter(|_| !dead).ok_or_else(|| Error::unavailable(format!("{target} is gone")))?;
            if refused {
                return Err(Error::no_space(format!("{target} is full")));
            }
            let reply = match node.dispatch(R::METHOD, &body, Bytes::from(payload.concat()), deadline) {
                Handled::Now(reply) => reply?,
                Handled::Later(reply) => reply.await?,
            };
            Ok((R::Reply::from_bytes(&reply.body)?, Bytes::from(reply.payload.parts.concat())))
        })
    }
    /// A client's call to a member.
    pub async fn call<R: Request>(
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
    pub async fn overlay(self: &Arc<World>, cell: CellId, offset: usize, data: &[u8]) -> Result<Seq> {
        let token_epoch = *self.token_epoch.lock().unwrap();
        let position = weir_store::group::sequencer(&self.map().groups[0], cell).unwrap();
        let request = WriteOverlay {
            place: self.place(position),
            cell,
            token_epoch,
            offset: offset as u32,
            len: data.len() as u32,
            kind: OverlayKind::Data,
            crc: crc32c(data),
            layout_scheme: self.scheme,
            write: 0,
            attempt: 0,
        };
        Ok(self.call(position, request, data).await?.0.seq)
    }
    /// Several extents in one message. Returns the first number.
    pub async fn overlays(self: &Arc<World>, cell: CellId, extents: &[(usize, &[u8])]) -> Result<Seq> {
        let token_epoch = *self.token_epoch.lock().unwrap();
        let position = weir_store::group::sequencer(&self.map().groups[0], cell).unwrap();
        let (place, layout_scheme) = (self.place(position), self.scheme);
        let parts = extents.iter().map(|(offset, data)| part_of(*offset, data)).collect();
        let data: Vec<u8> = extents.iter().flat_map(|(_, data)| data.iter().copied()).collect();
        let request = WriteOverlays { place, cell, token_epoch, parts, layout_scheme, write: 0, attempt: 0 };
        Ok(self.call(position, request, &data).await?.0.seq)
    }
    pub async fn zeros(self: &Arc<World>, cell: CellId, offset: u32, len: u32) -> Result<Seq> {
        let token_epoch = *self.token_epoch.lock().unwrap();
        let position = weir_store::group::sequencer(&self.map().groups[0], cell).unwrap();
        let (place, kind) = (self.place(position), OverlayKind::Zero);
        let layout_scheme = self.scheme;
        let request = WriteOverlay {
            place,
            cell,
            token_epoch,
            offset,
            len,
            kind,
            crc: 0,
            layout_scheme,
            write: 0,
            attempt: 0,
        };
        Ok(self.call(position, request, &[]).await?.0.seq)
    }
    /// Until the log of the target ends with this number.
    pub async fn until_logged(self: &Arc<World>, position: usize, cell: CellId, seq: u64) {
        let until = self.env.clock.now() + PATIENCE;
        loop {
            let request = StatCell { place: self.place(position), cell };
            let (stat, _) = self.call(position, request, &[]).await.unwrap();
            if stat.overlay_seqs.first() == Some(&Seq(seq)) {
                return;
            }
            assert!(self.env.clock.now() < until, "never logged: {stat:?}");
            self.env.clock.sleep(Duration::from_millis(1)).await;
        }
    }
    /// Seals all of a file.
    pub async fn seal(self: &Arc<World>, file: FileId) -> Result<()> {
        let leader = usize::from(self.scheme.data);
        let request = SealFile { target: self.place(leader).target, file };
        self.call(leader, request, &[]).await.map(|_| ())
    }
    /// The k + m fragments of a stripe.
    pub fn encode(&self, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let len = data.iter().map(Vec::len).max().unwrap();
        let mut parity = vec![vec![0; len]; usize::from(self.scheme.parity)];
        let inputs: Vec<&[u8]> = data.iter().map(|d| &d[..]).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
        Coder::new(self.scheme).unwrap().encode(&inputs, &mut outputs).unwrap();
        data.iter().cloned().chain(parity).collect()
    }
    pub async fn fragment(
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
            missing: weir_store::group::down_mask(&self.map().groups[0]),
            folded_seqs: vec![],
            block_crcs: block_crcs(bytes, CHECKSUM_BLOCK as usize),
        };
        self.call(position, request, bytes).await.map(|_| ())
    }
    /// A whole stripe at once.
    pub async fn stripe(self: &Arc<World>, stripe: u64, version: Version, data: &[Vec<u8>]) -> Result<()> {
        for (position, bytes) in self.encode(data).iter().enumerate() {
            if self.map().groups[0].members[position].state != MemberState::Down {
                self.fragment(stripe, position, version, bytes).await?;
            }
        }
        Ok(())
    }
    /// A write that does not reach all live members.
    pub async fn some_of_stripe(
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
    pub async fn truncate(self: &Arc<World>, from_stripe: u64) {
        self.truncate_range(from_stripe, u64::MAX).await;
    }
    /// Makes these stripes void, under a new token epoch, at every live target.
    pub async fn truncate_range(self: &Arc<World>, from_stripe: u64, to_stripe: u64) {
        let fence = {
            let mut token_epoch = self.token_epoch.lock().unwrap();
            *token_epoch += 1;
            *token_epoch
        };
        for (target, epochs) in self.map().members_to_truncate(|_| true).unwrap() {
            let request = DropFile { target, file: cell(0, 0).file, from_stripe, to_stripe, fence, epochs };
            self.dispatch(target, request, vec![]).await.unwrap();
        }
    }
    /// Its process ends, and the coordinator has seen it.
    pub async fn lose(self: &Arc<World>, id: TargetId) {
        self.dead.lock().unwrap().insert(id);
        self.set_state(id, MemberState::Down);
    }
    pub async fn restart_target(self: &Arc<World>, id: TargetId) {
        self.dead.lock().unwrap().remove(&id);
        self.start(id).await;
        self.set_state(id, MemberState::Behind);
    }
    /// A round of background work of each target that lives.
    pub async fn rounds(self: &Arc<World>, targets: std::ops::Range<u32>) {
        for id in targets.map(TargetId) {
            let node = self.nodes.lock().unwrap().get(&id).cloned();
            if let Some(node) = node.filter(|_| !self.dead.lock().unwrap().contains(&id)) {
                node.round_of(id, true).await;
            }
        }
    }
    /// Cells that each target counts as lacking redundancy.
    pub async fn under_replicated(self: &Arc<World>) -> Vec<u64> {
        let nodes = self.nodes.lock().unwrap();
        nodes.values().map(|n| n.reports()[0].under_replicated_cells).collect()
    }

    // ---- the oracle
    pub async fn read(
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
    pub async fn decode(self: &Arc<World>, stripe: u64, index: usize, lost: &[usize]) -> Vec<u8> {
        let (k, width) = (usize::from(self.scheme.data), self.scheme.width());
        let left: Vec<usize> = (0..width).filter(|p| !lost.contains(p)).collect();
        let mut stats = BTreeMap::new();
        for p in &left {
            let request = StatCell { place: self.place(*p), cell: cell(stripe, *p) };
            stats.insert(*p, self.call(*p, request, &[]).await.unwrap().0);
        }
        let newest = stats.values().map(|s| s.base).max().unwrap();
        let mut bytes = vec![0; CELL];
        let mut folded_seqs = vec![];
        if newest > Version(0) {
            let mut fragments = vec![];
            for p in &left {
                match self.read(*p, cell(stripe, *p), ReadView::Base, newest).await {
                    Ok((read, bytes)) => {
                        if *p >= k && !read.folded_seqs.is_empty() {
                            folded_seqs = read.folded_seqs;
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
            after: folded_seqs.get(index).copied().unwrap_or_default(),
        };
        let (log, payload) = self.call(parity, request, &[]).await.unwrap();
        let mut rest = &payload[..];
        for o in log.extents {
            let place = &mut bytes[o.offset as usize..][..o.len as usize];
            match o.kind {
                OverlayKind::Data => place.copy_from_slice(rest.split_off(..place.len()).expect("its bytes")),
                OverlayKind::Zero => place.fill(0),
                OverlayKind::Void => {}
            }
        }
        bytes
    }
    /// Every data cell of the stripe, directly and with every member pair (or one) lost.
    pub async fn check(self: &Arc<World>, stripe: u64, expected: &[Vec<u8>], context: &str) {
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
    /// Weak, for the world holds the nodes that hold this: a world ends, and its directory goes, with its
    /// test.
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
            if world.silent.lock().unwrap().contains(&target) {
                return Box::pin(std::future::pending());
            }
            if let Some(left) = world.calls_left.lock().unwrap().as_mut() {
                if *left == 0 {
                    return Box::pin(std::future::pending());
                }
                *left -= 1;
            }
            let reply = world.dispatch(target, request, payload);
            if <$request>::METHOD != ReadOverlays::METHOD {
                return reply;
            }
            Box::pin(async move {
                {
                    let mut reads = world.log_reads.lock().unwrap();
                    *reads = (reads.0 + 1, reads.1.max(reads.0 + 1));
                }
                world.env.clock.sleep(Duration::from_millis(1)).await; // others begin theirs meanwhile, if they may
                let answer = reply.await;
                world.log_reads.lock().unwrap().0 -= 1;
                answer
            })
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
    fn pass_on(
        &self,
        request: PassOn,
        _: Bytes,
        _: Duration,
    ) -> BoxFuture<'static, Result<weir_rpc::Answered<Bytes>>> {
        let error = Error::unsupported(format!("each node reaches {} here itself", request.target));
        Box::pin(async move { Err(error) })
    }
    fn suspect(
        &self,
        target: TargetId,
        group: PgId,
        epoch: Epoch,
        _: weir_proto::coord::Suspicion,
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
        group: PgId,
        epoch: Epoch,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let world = self.world();
        Box::pin(async move {
            let world = world?;
            if world.disbelieved.lock().unwrap().contains(&group) {
                return Err(Error::stale(format!("{group} has moved on")));
            }
            let mut map = world.map.lock().unwrap();
            let mut next = (**map).clone();
            weir_coord::decide::caught_up(&mut next, target, group, epoch)?;
            next.version += 1;
            *map = Arc::new(next);
            Ok(map.clone())
        })
    }
    fn place_copied(&self, report: PlaceCopied) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let world = self.world();
        Box::pin(async move {
            let world = world?;
            let mut map = world.map.lock().unwrap();
            let mut next = (**map).clone();
            let PlaceCopied { target, group, epoch, done } = report;
            match done {
                false => weir_coord::decide::close_move(&mut next, group, target, epoch)?,
                true => drop(weir_coord::decide::finish_move(&mut next, group, target, epoch)?),
            }
            next.version += 1;
            *map = Arc::new(next);
            Ok(map.clone())
        })
    }
    weir_store::with_peer_requests!(forward);
}

pub fn cell(stripe: u64, index: usize) -> CellId {
    CellId {
        file: FileId { namespace: NamespaceId(1), inode: InodeId(0x1000001) },
        stripe,
        index: index as u8,
    }
}
pub fn bytes_of(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + seed * 131 + (i >> 8)) as u8).collect()
}
pub const EC: Scheme = Scheme { data: 4, parity: 2 };

/// The contents of a stripe: k cells.
pub struct Model(pub Vec<Vec<u8>>);
impl Model {
    pub fn new() -> Model {
        Model(vec![vec![0; CELL]; 4])
    }
    pub async fn overlay(
        &mut self,
        world: &Arc<World>,
        stripe: u64,
        index: usize,
        offset: usize,
        data: &[u8],
    ) {
        world.overlay(cell(stripe, index), offset, data).await.unwrap();
        self.0[index][offset..offset + data.len()].copy_from_slice(data);
    }
    pub async fn fresh(&mut self, world: &Arc<World>, stripe: u64, seed: usize) {
        self.0 = (0..4).map(|i| bytes_of(seed + i, CELL)).collect();
        let version = Version::new(*world.token_epoch.lock().unwrap(), 2);
        world.stripe(stripe, version, &self.0).await.unwrap();
    }
}

/// An extent of a message with several.
pub fn part_of(offset: usize, data: &[u8]) -> OverlayPart {
    OverlayPart { offset: offset as u32, len: data.len() as u32, kind: OverlayKind::Data, crc: crc32c(data) }
}
