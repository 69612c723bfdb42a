//! Damaged target images: any damage to a target's directory while its process is down is found, repaired
//! from the others, or refused by name; wrong bytes are never returned.
//!
//! Four targets with 2+2 in the simulated world, each with a real index on a disk of its own. A damage hits
//! one of them while it is stopped; then it is started and repaired as in a cluster (or gets an empty disk if
//! it refuses), and every byte is read again, directly and with any two members lost.
#![allow(clippy::disallowed_methods, reason = "tests are users of the operating system")]
use bytes::Bytes;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use weir_env::sim::{SimConfig, World};
use weir_env::{BoxFuture, Disk, Env, OpenMode};
use weir_kv::SharedKv;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::ec::Coder;
use weir_proto::map::*;
use weir_proto::version::LEVEL_MAX;
use weir_proto::*;
use weir_rpc::Handled;
use weir_store::alloc::Geometry;
use weir_store::peers::{PeerReply, Peers};
use weir_store::service::{StorageNode, TargetConfig};
use weir_store::{format, open_index};

const SCHEME: Scheme = Scheme { data: 2, parity: 2 };
const DATA: usize = 2;
const WIDTH: usize = 4;
const CELL: usize = 64 << 10;
const STRIPES: u64 = 6;
const PATIENCE: Duration = Duration::from_secs(60);
/// Rounds of upkeep that any repair must end in.
const ROUNDS: usize = 40;

/// The part that is damaged, and the kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Damage {
    SlabBit,
    SlabZeroed,
    SlabBlocksSwapped,
    SlabTruncated,
    SlabMissing,
    JournalHeader,
    JournalFormat,
    JournalMiddle,
    JournalTail,
    JournalBlocksSwapped,
    JournalMissing,
    TreeBit,
    TreePagesSwapped,
    TreeTruncated,
    TreeMissing,
    IndexValueBit,
    IndexValueFormat,
    OverlayData,
}
use Damage::*;
const DAMAGES: [Damage; 18] = [
    SlabBit,
    SlabZeroed,
    SlabBlocksSwapped,
    SlabTruncated,
    SlabMissing,
    JournalHeader,
    JournalFormat,
    JournalMiddle,
    JournalTail,
    JournalBlocksSwapped,
    JournalMissing,
    TreeBit,
    TreePagesSwapped,
    TreeTruncated,
    TreeMissing,
    IndexValueBit,
    IndexValueFormat,
    OverlayData,
];

fn dir() -> &'static Path {
    Path::new("/target")
}
fn name(position: usize) -> String {
    format!("t{position}")
}
fn id(position: usize) -> TargetId {
    TargetId(position as u32)
}
fn cell(stripe: u64, index: usize) -> CellId {
    CellId { file: FileId { namespace: NamespaceId(1), inode: InodeId(9) }, stripe, index: index as u8 }
}
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i * 0x9E37_79B9 + seed * 77) >> 5) as u8).collect()
}

/// Four targets, and the coordinator's map.
struct Lab {
    world: World,
    env: Env,
    map: Mutex<Arc<ClusterMap>>,
    nodes: Mutex<BTreeMap<TargetId, Arc<StorageNode>>>,
    indexes: Mutex<BTreeMap<TargetId, SharedKv>>,
    /// What each data cell holds, by stripe and index.
    expected: Mutex<BTreeMap<(u64, usize), Vec<u8>>>,
}

impl Lab {
    async fn new(world: &World) -> Arc<Lab> {
        let member = |p: usize| Member {
            target: id(p),
            state: MemberState::Current,
            since: Epoch(1),
            lost_at: Epoch(0),
        };
        let group = Group {
            id: PgId(0),
            pool: "all".into(),
            scheme: SCHEME,
            epoch: Epoch(1),
            members: (0..WIDTH).map(member).collect(),
        };
        let map = ClusterMap {
            cluster: ClusterId([1; 16]),
            version: 1,
            level: LEVEL_MAX,
            settings: Settings { scheme: SCHEME, cell_shift: 16, lease_ms: 1000, target_silence_ms: 1000 },
            groups: vec![group],
            ..ClusterMap::absent()
        };
        let lab = Arc::new(Lab {
            world: world.clone(),
            env: world.node("driver"),
            map: Mutex::new(Arc::new(map)),
            nodes: Mutex::default(),
            indexes: Mutex::default(),
            expected: Mutex::default(),
        });
        for position in 0..WIDTH {
            lab.start(position).await.unwrap();
        }
        lab
    }
    async fn start(self: &Arc<Lab>, position: usize) -> Result<()> {
        let env = self.world.node(&name(position));
        let index = open_index(&env, dir()).await?;
        let geometry = Geometry { slab_bytes: 16 << 20, step_bytes: 8 << 20 };
        let config = TargetConfig { id: id(position), dir: dir().into(), geometry };
        let peers: Arc<dyn Peers> = Arc::new(Links(Arc::downgrade(self)));
        let node = StorageNode::open_over(env, vec![(config, index.clone())], peers).await?;
        self.nodes.lock().unwrap().insert(id(position), node);
        self.indexes.lock().unwrap().insert(id(position), index);
        Ok(())
    }
    fn stop(&self, position: usize) {
        self.nodes.lock().unwrap().remove(&id(position));
        self.indexes.lock().unwrap().remove(&id(position));
        self.world.kill(&name(position));
    }
    fn map(&self) -> Arc<ClusterMap> {
        self.map.lock().unwrap().clone()
    }
    fn state(&self, position: usize) -> MemberState {
        self.map().groups[0].members[position].state
    }
    fn set_state(&self, position: usize, state: MemberState) {
        let mut map = self.map.lock().unwrap();
        let mut next = (**map).clone();
        next.version += 1;
        let group = &mut next.groups[0];
        group.epoch.0 += 1;
        let epoch = group.epoch;
        group.members[position].state = state;
        group.members.iter_mut().filter(|m| m.state == MemberState::Current).for_each(|m| m.since = epoch);
        *map = Arc::new(next);
    }
    /// As of the map the member was never current: repair lists everything.
    fn held_nothing(&self, position: usize) {
        let mut map = self.map.lock().unwrap();
        let mut next = (**map).clone();
        next.groups[0].members[position].since = Epoch(0);
        *map = Arc::new(next);
    }
    fn place(&self, position: usize) -> Place {
        Place { target: id(position), group: PgId(0), epoch: self.map().groups[0].epoch }
    }
    async fn call<R: Request>(
        &self,
        position: usize,
        request: &R,
        payload: &[u8],
    ) -> Result<(R::Reply, Bytes)> {
        self.dispatch(id(position), request, Bytes::copy_from_slice(payload)).await
    }
    fn dispatch<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: Bytes,
    ) -> BoxFuture<'static, Result<(R::Reply, Bytes)>> {
        let node = self.nodes.lock().unwrap().get(&target).cloned();
        let its_clock = self.world.node(&name(target.0 as usize)).clock;
        let (body, deadline) = (request.to_bytes(), its_clock.now() + PATIENCE);
        Box::pin(async move {
            let node = node.ok_or_else(|| Error::unavailable(format!("{target} is gone")))?;
            let reply = match node.dispatch(R::METHOD, &body, payload, deadline) {
                Handled::Now(reply) => reply?,
                Handled::Later(reply) => reply.await?,
            };
            Ok((R::Reply::from_bytes(&reply.body)?, Bytes::from(reply.payload.parts.concat())))
        })
    }

    /// Whole stripes, then overlays of all sizes, one stripe sealed; half of it folded into the tree, half in
    /// the journal.
    async fn fill(&self) {
        for stripe in 0..STRIPES {
            let data: Vec<Vec<u8>> = (0..DATA).map(|i| pattern(stripe * 7 + i as u64, CELL)).collect();
            let mut parity = vec![vec![0; CELL]; WIDTH - DATA];
            let inputs: Vec<&[u8]> = data.iter().map(|d| &d[..]).collect();
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
            Coder::new(SCHEME).unwrap().encode(&inputs, &mut outputs).unwrap();
            for (position, bytes) in data.iter().chain(&parity).enumerate() {
                let write = WriteFragment {
                    place: self.place(position),
                    cell: cell(stripe, position),
                    version: Version::new(1, 2),
                    mode: WriteMode::Fresh,
                    missing: 0,
                    folded_seqs: vec![],
                    block_crcs: block_crcs(bytes, CHECKSUM_BLOCK as usize),
                };
                self.call(position, &write, bytes).await.unwrap();
            }
            for (index, bytes) in data.into_iter().enumerate() {
                self.expected.lock().unwrap().insert((stripe, index), bytes);
            }
            if stripe % 2 == 0 {
                self.overlay(stripe, 0, 5_000, &pattern(90 + stripe, 3_000)).await;
                self.overlay(stripe, 1, 20_000, &pattern(95 + stripe, 30_000)).await;
            }
            if stripe == 2 {
                let leader = SealFile { target: id(DATA), file: cell(0, 0).file };
                self.call(DATA, &leader, &[]).await.unwrap();
            }
            if stripe == STRIPES / 2 {
                let indexes: Vec<SharedKv> = self.indexes.lock().unwrap().values().cloned().collect();
                for index in indexes {
                    index.checkpoint().await.unwrap();
                }
            }
        }
    }
    async fn overlay(&self, stripe: u64, index: usize, offset: usize, data: &[u8]) {
        let request = WriteOverlay {
            place: self.place(index),
            cell: cell(stripe, index),
            token_epoch: 1,
            offset: offset as u32,
            len: data.len() as u32,
            kind: OverlayKind::Data,
            crc: crc32c(data),
            layout_scheme: SCHEME,
            write: 0,
            attempt: 0,
        };
        self.call(index, &request, data).await.unwrap();
        let mut expected = self.expected.lock().unwrap();
        expected.get_mut(&(stripe, index)).unwrap()[offset..offset + data.len()].copy_from_slice(data);
    }

    // ---- reading

    /// Bytes that pass their checksums, as a client takes no others.
    async fn read(
        &self,
        position: usize,
        cell: CellId,
        view: ReadView,
        version: Version,
    ) -> Result<(CellRead, Vec<u8>)> {
        let place = self.place(position);
        let request = ReadCell { place, cell, view, version, offset: 0, len: CELL as u32 };
        let (read, bytes) = self.call(position, &request, &[]).await?;
        if block_crcs(&bytes, CHECKSUM_BLOCK as usize) != read.block_crcs {
            return Err(Error::damaged(format!("cell {cell}: the bytes fail their checksums")));
        }
        let mut bytes = bytes.to_vec();
        bytes.resize(CELL, 0);
        Ok((read, bytes))
    }
    /// Reads every data cell from the member at `position`: every answer is right. Returns the number of
    /// failures.
    async fn read_directly(&self, position: usize, context: &str) -> usize {
        let mut failed = 0;
        for stripe in 0..STRIPES {
            if position >= DATA {
                // A parity member: its fragment is verified when it is an input of a decode.
                let read = self.read(position, cell(stripe, position), ReadView::Base, Version(0)).await;
                failed += usize::from(read.is_err());
                continue;
            }
            match self.read(position, cell(stripe, position), ReadView::Merged, Version(0)).await {
                Ok((read, bytes)) if read.known => {
                    let right = self.expected.lock().unwrap()[&(stripe, position)] == bytes;
                    assert!(right, "{context}: cell {position} of stripe {stripe} has wrong bytes");
                }
                // A cell that a target does not know is read elsewhere.
                Ok(_) | Err(_) => failed += 1,
            }
        }
        failed
    }
    /// A data cell decoded without the members in `lost`.
    async fn decode(&self, stripe: u64, index: usize, lost: &[usize]) -> Result<Vec<u8>> {
        let left: Vec<usize> = (0..WIDTH).filter(|p| !lost.contains(p)).collect();
        let parity = *left.iter().find(|p| **p >= DATA).expect("two of four are lost, one of them data");
        let (head, _) = self.read(parity, cell(stripe, parity), ReadView::Base, Version(0)).await?;
        let mut fragments = Vec::new();
        for p in left {
            let (_, bytes) = self.read(p, cell(stripe, p), ReadView::Base, head.version).await?;
            fragments.push((p, bytes));
        }
        let present: Vec<(usize, &[u8])> = fragments.iter().map(|(p, b)| (*p, &b[..])).collect();
        let mut bytes = vec![0; CELL];
        Coder::new(SCHEME)?.reconstruct(&present, &[index], &mut [&mut bytes[..]])?;
        let after = head.folded_seqs.get(index).copied().unwrap_or_default();
        let request = ReadOverlays { place: self.place(parity), cell: cell(stripe, index), after };
        let (log, payload) = self.call(parity, &request, &[]).await?;
        let mut rest = &payload[..];
        for o in log.extents {
            let (data, after) =
                rest.split_at_checked(o.len as usize).ok_or_else(|| Error::damaged("cut short"))?;
            if crc32c(data) != o.crc {
                return Err(Error::damaged("an overlay fails its checksum"));
            }
            rest = after;
            bytes[o.offset as usize..][..data.len()].copy_from_slice(data);
        }
        Ok(bytes)
    }
    /// Everything, with any two members lost. How many reads failed.
    async fn read_around(&self, context: &str) -> usize {
        let mut failed = 0;
        for stripe in 0..STRIPES {
            for (index, other) in
                (0..DATA).flat_map(|i| (0..WIDTH).filter(move |o| *o != i).map(move |o| (i, o)))
            {
                match self.decode(stripe, index, &[index, other]).await {
                    Err(_) => failed += 1,
                    Ok(bytes) => assert!(
                        self.expected.lock().unwrap()[&(stripe, index)] == bytes,
                        "{context}: cell {index} of stripe {stripe} without {other} is decoded to wrong bytes"
                    ),
                }
            }
        }
        failed
    }
    async fn round(&self) {
        let nodes: Vec<_> = self.nodes.lock().unwrap().iter().map(|(id, n)| (*id, n.clone())).collect();
        for (id, node) in nodes {
            node.round_of(id, true).await;
        }
    }
    /// Upkeep until the member is current and nothing fails any more. False: it does not come to that.
    async fn recovers(&self, position: usize, context: &str) -> bool {
        for _ in 0..ROUNDS {
            self.round().await;
            let mut failed = 0;
            for p in 0..WIDTH {
                failed += self.read_directly(p, context).await;
            }
            if self.state(position) == MemberState::Current && failed + self.read_around(context).await == 0 {
                return true;
            }
        }
        false
    }
}

struct Links(Weak<Lab>);
impl Links {
    fn lab(&self) -> Arc<Lab> {
        self.0.upgrade().expect("the lab outlives its nodes")
    }
}
macro_rules! forward {
    ($($method:ident: $request:ty),* $(,)?) => {$(
        fn $method(&self, target: TargetId, request: $request, payload: Vec<Bytes>, _: Duration) -> PeerReply<$request> {
            self.lab().dispatch(target, &request, Bytes::from(payload.concat()))
        }
    )*};
}
impl Peers for Links {
    fn map(&self) -> Arc<ClusterMap> {
        self.lab().map()
    }
    fn wait_newer(&self, version: u64, patience: Duration) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let lab = self.lab();
        Box::pin(async move {
            lab.env.clock.sleep(patience).await;
            let map = lab.map();
            if map.version > version { Ok(map) } else { Err(Error::deadline("no newer map")) }
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
        _: TargetId,
        _: PgId,
        _: Epoch,
        _: coord::Suspicion,
        _: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let map = self.lab().map();
        Box::pin(async move { Ok(map) })
    }
    fn report(
        &self,
        _: TargetId,
        _: PgId,
        _: Epoch,
        _: String,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let map = self.lab().map();
        Box::pin(async move { Ok(map) })
    }
    fn caught_up(
        &self,
        target: TargetId,
        _: PgId,
        epoch: Epoch,
    ) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
        let lab = self.lab();
        if lab.map().groups[0].epoch == epoch {
            lab.set_state(target.0 as usize, MemberState::Current);
        }
        Box::pin(async move { Ok(lab.map()) })
    }
    weir_store::with_peer_requests!(forward);
}

// ---- damage

/// A target's directory while no process uses it.
struct Image {
    disk: Arc<dyn Disk>,
    dice: u64,
}

impl Image {
    fn below(&mut self, n: usize) -> usize {
        self.dice = self.dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.dice >> 33) as usize % n.max(1)
    }
    fn files(&self, at: &Path, prefix: &str) -> Vec<PathBuf> {
        let entries = self.disk.read_dir(at).unwrap();
        entries.iter().filter(|e| e.name.starts_with(prefix)).map(|e| at.join(&e.name)).collect()
    }
    /// The segment with the newest records.
    fn journal(&self) -> PathBuf {
        let used = |path: &PathBuf| {
            let bytes = self.disk.read(path).unwrap();
            weir_kv::read_segment(&bytes).map_or(0, |s| if s.transactions > 0 { s.number } else { 0 })
        };
        self.files(&dir().join("index"), "journal-").into_iter().max_by_key(used).unwrap()
    }
    fn write(&self, path: &Path, offset: usize, bytes: &[u8]) {
        let file = self.disk.open(path, OpenMode { write: true, ..OpenMode::READ }).unwrap();
        file.write_all_at(bytes, offset as u64).unwrap();
        file.sync_data().unwrap();
    }
    fn flip(&mut self, path: &Path, at: std::ops::Range<usize>) {
        let offset = at.start + self.below(at.len());
        let byte = self.disk.read(path).unwrap()[offset];
        let bit = 1 << self.below(8);
        self.write(path, offset, &[byte ^ bit]);
    }
    /// Blocks of 4 KiB that hold something, within a range.
    fn blocks(&self, path: &Path, at: std::ops::Range<usize>) -> Vec<usize> {
        let bytes = self.disk.read(path).unwrap();
        let holds = |b: &usize| bytes[*b..].iter().take(4096).any(|byte| *byte != 0);
        (at.start..at.end.min(bytes.len())).step_by(4096).filter(holds).collect()
    }
    fn swap(&mut self, path: &Path, from: usize) {
        let blocks = self.blocks(path, from..usize::MAX);
        let (a, b) = (blocks[self.below(blocks.len())], blocks[self.below(blocks.len())]);
        let bytes = self.disk.read(path).unwrap();
        let part = |at: usize| bytes[at..(at + 4096).min(bytes.len())].to_vec();
        self.write(path, a, &part(b));
        self.write(path, b, &part(a));
    }
    fn truncate(&self, path: &Path) {
        let file = self.disk.open(path, OpenMode { write: true, ..OpenMode::READ }).unwrap();
        file.set_len(file.len().unwrap() / 2 / 4096 * 4096).unwrap();
        file.sync_data().unwrap();
    }
    fn remove(&self, path: &Path) {
        self.disk.remove_file(path).unwrap();
        self.disk.sync_dir(path.parent().unwrap()).unwrap();
    }
    /// Where the newest segment's records end, and where its last one begins.
    fn tail(&self, path: &Path) -> (usize, usize) {
        let bytes = self.disk.read(path).unwrap();
        let end = weir_kv::read_segment(&bytes).unwrap().end as usize;
        let (mut at, mut last) = (4096, 4096);
        while at < end {
            last = at;
            let body = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
            at += (32 + body).next_multiple_of(8);
        }
        (last, end)
    }

    fn apply(&mut self, damage: Damage) {
        let index = dir().join("index");
        let (slab, tree) = (self.files(dir(), "slab-")[0].clone(), index.join("state.redb"));
        match damage {
            SlabBit | SlabZeroed => {
                let blocks = self.blocks(&slab, 0..usize::MAX);
                let at = blocks[self.below(blocks.len())];
                match damage {
                    SlabBit => self.flip(&slab, at..at + 4096),
                    _ => self.write(&slab, at, &[0; 4096]),
                }
            }
            SlabBlocksSwapped => self.swap(&slab, 0),
            SlabTruncated => self.truncate(&slab),
            SlabMissing => self.remove(&slab),
            JournalHeader => {
                let path = self.journal();
                self.flip(&path, 0..32);
            }
            JournalFormat => {
                let path = self.journal();
                let mut head = self.disk.read(&path).unwrap()[..32].to_vec();
                head[4] = 9;
                let crc = crc32c(&head[4..]).to_le_bytes();
                head[..4].copy_from_slice(&crc);
                self.write(&path, 0, &head);
            }
            JournalMiddle | JournalTail => {
                let path = self.journal();
                let (last, end) = self.tail(&path);
                let range = if damage == JournalTail { last..end } else { 4096..last.max(4097) };
                self.flip(&path, range);
            }
            JournalBlocksSwapped => {
                let path = self.journal();
                self.swap(&path, 4096);
            }
            JournalMissing => self.remove(&self.journal()),
            TreeBit => {
                let blocks = self.blocks(&tree, 0..usize::MAX);
                let at = blocks[self.below(blocks.len())];
                self.flip(&tree, at..at + 4096);
            }
            TreePagesSwapped => self.swap(&tree, 4096),
            TreeTruncated => self.truncate(&tree),
            TreeMissing => self.remove(&tree),
            IndexValueBit | IndexValueFormat | OverlayData => {
                unreachable!("made through the index: see damage_index")
            }
        }
    }
}

/// Damage behind the checksums of journal and tree: a record of another program, or a defect of this one.
async fn damage_index(lab: &Lab, position: usize, damage: Damage, dice: &mut Image) {
    let env = lab.world.node(&name(position));
    let index = open_index(&env, dir()).await.unwrap();
    let letters: &[u8] = match damage {
        OverlayData => &[format::OVERLAY_DATA],
        _ => &[format::HEADER, format::BASE, format::OVERLAY],
    };
    let mut entries: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    index
        .read(&mut |r| {
            for letter in letters {
                let (start, end) = format::letter_range(*letter);
                r.scan(&start, &end, &mut |key, value| {
                    entries.push((key.to_vec(), value.to_vec()));
                    weir_kv::Scan::More
                })?;
            }
            Ok(())
        })
        .unwrap();
    if let Some((key, mut value)) = entries.get(dice.below(entries.len())).cloned() {
        match damage {
            IndexValueFormat => {
                value[4] = 9;
                let crc = crc32c(&value[4..]).to_le_bytes();
                value[..4].copy_from_slice(&crc);
            }
            _ => {
                let at = dice.below(value.len());
                value[at] ^= 1 << dice.below(8);
            }
        }
        let seq = index
            .transact(&mut |txn| {
                txn.put(&key, &value);
                Ok(())
            })
            .unwrap();
        index.wait_durable(seq).await.unwrap();
    }
    drop(index);
    lab.world.kill(&name(position));
}

/// How it ended.
#[derive(Default, Debug)]
struct Tally {
    /// Started, and whole again by itself.
    recovered: u32,
    /// Did not start, with an error that names what is damaged.
    refused: u32,
    /// Started, but not everything could be made whole: an empty disk took its place.
    replaced: u32,
}

/// `count` damages, one after the other, each of the next kind to the next target.
fn survives(seed: u64, count: usize) -> BTreeMap<Damage, Tally> {
    let world =
        World::new(seed, SimConfig { time_max: Duration::from_secs(1 << 30), ..SimConfig::default() });
    let w = world.clone();
    world.run(async move {
        let lab = Lab::new(&w).await;
        lab.fill().await;
        for position in 0..WIDTH {
            assert_eq!(lab.read_directly(position, "before").await, 0);
        }
        assert_eq!(lab.read_around("before").await, 0);
        let mut tallies: BTreeMap<Damage, Tally> = BTreeMap::new();
        for n in 0..count {
            let damage = DAMAGES[n % DAMAGES.len()];
            let position = (n + n / DAMAGES.len()) % WIDTH;
            let tally = tallies.entry(damage).or_default();
            one(&lab, seed + n as u64, damage, position, tally).await;
        }
        tallies
    })
}

async fn one(lab: &Arc<Lab>, seed: u64, damage: Damage, position: usize, tally: &mut Tally) {
    let context = format!("{damage:?} at {position}, seed {seed}");
    lab.stop(position);
    lab.set_state(position, MemberState::Down);
    let mut image = Image { disk: lab.world.disk(&name(position)), dice: seed };
    match damage {
        IndexValueBit | IndexValueFormat | OverlayData => {
            damage_index(lab, position, damage, &mut image).await;
        }
        _ => image.apply(damage),
    }
    let whole = match lab.start(position).await {
        Ok(()) => {
            lab.set_state(position, MemberState::Behind);
            let recovered = lab.recovers(position, &context).await;
            tally.recovered += u32::from(recovered);
            tally.replaced += u32::from(!recovered);
            recovered
        }
        Err(e) => {
            let says = [ErrorKind::Damaged, ErrorKind::Unsupported, ErrorKind::NotFound, ErrorKind::Io];
            assert!(says.contains(&e.kind), "{context}: {e:?}");
            let named = ["journal", "state tree", "index", "slab", "state.redb"];
            assert!(named.iter().any(|word| e.context.contains(word)), "{context}: {e:?} names nothing");
            tally.refused += 1;
            false
        }
    };
    if whole {
        return;
    }
    // As an operator does then: an empty disk, which the others fill.
    lab.stop(position);
    lab.world.replace_disk(&name(position));
    if lab.state(position) != MemberState::Down {
        lab.set_state(position, MemberState::Down);
    }
    lab.start(position).await.unwrap();
    lab.set_state(position, MemberState::Behind);
    lab.held_nothing(position);
    assert!(lab.recovers(position, &context).await, "{context}: an empty disk is not filled");
    let index = lab.indexes.lock().unwrap()[&id(position)].clone();
    index.checkpoint().await.unwrap(); // so that the tree holds something when it is damaged next
}

/// A number that no coordinator assigned, in a forged request, must not make a target refuse all others.
#[test]
fn an_epoch_that_was_never_assigned_is_refused() {
    let world = World::new(5, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let lab = Lab::new(&w).await;
        lab.fill().await;
        let epochs = vec![GroupAt { group: PgId(0), epoch: Epoch(1 << 40) }];
        let file = FileId { namespace: NamespaceId(3), inode: InodeId(77) };
        for position in 0..WIDTH {
            let target = id(position);
            let drop = DropFile {
                target,
                file,
                from_stripe: 0,
                to_stripe: u64::MAX,
                fence: 9,
                epochs: epochs.clone(),
            };
            let list = ListTruncations { target, after: 0, epochs: epochs.clone(), limit: 10 };
            let cells = ListCells {
                target,
                group: PgId(0),
                after: None,
                since: Epoch(0),
                epoch: Epoch(1 << 40),
                limit: 10,
            };
            let refused = [
                lab.call(position, &drop, &[]).await.map(|_| ()),
                lab.call(position, &list, &[]).await.map(|_| ()),
                lab.call(position, &cells, &[]).await.map(|_| ()),
            ];
            for answer in refused {
                answer.expect_err("the map does not say so");
            }
        }
        lab.overlay(1, 0, 100, b"goes on").await;
        assert_eq!(lab.read_directly(0, "afterwards").await, 0);
        assert_eq!(lab.read_around("afterwards").await, 0);
    });
}

fn show(tallies: &BTreeMap<Damage, Tally>) {
    for (damage, t) in tallies {
        eprintln!("{damage:?}: {} recovered, {} refused, {} replaced", t.recovered, t.refused, t.replaced);
    }
}

#[test]
fn a_damaged_image_is_repaired_or_refused_and_never_believed() {
    show(&survives(1, 3 * DAMAGES.len()));
}

/// `make test-long`: `WEIR_IMAGES` damages.
#[test]
#[ignore = "minutes: make test-long"]
fn a_thousand_damaged_images() {
    let count = std::env::var("WEIR_IMAGES").map_or(1000, |n| n.parse().expect("a number"));
    show(&survives(1000, count));
}
