//! A state of the model: each target's index, the map that it knows, and the messages in flight.
//!
//! Indexes are real: keys and values of `weir_store::format`, changed by the functions of `weir_store::cells`
//! alone. A cell has two bytes, which are kept in its extent's address instead of in a slab.
use super::whole::Whole;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use weir_kv::{Read, Scan, Txn};
use weir_proto::map::{ClusterMap, Group, MemberState};
use weir_proto::{CellId, Epoch, FileId, InodeId, NamespaceId, PgId, Result, Seq, TargetId, Version};
use weir_store::alloc::Extent;
use weir_store::cells::{self, Delta, Scope};
use weir_store::format::{self, Fragment, Header, base_key, header_key};
use weir_store::stripes::StripeView;

pub const FILE: FileId = FileId { namespace: NamespaceId(1), inode: InodeId(7) };
pub const GROUP: PgId = PgId(0);
/// The contents of a cell.
pub type Content = [u8; 2];

pub fn cell(index: usize) -> CellId {
    CellId { file: FILE, stripe: 0, index: index as u8 }
}

/// An index, as transactions read and change it.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Index(BTreeMap<Vec<u8>, Vec<u8>>);

impl Read for Index {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        for (key, value) in self.0.range(start.to_vec()..end.to_vec()) {
            if visit(key, value) == Scan::Stop {
                break;
            }
        }
        Ok(())
    }
}
impl Txn for Index {
    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.0.insert(key.to_vec(), value.to_vec());
    }
    fn delete(&mut self, key: &[u8]) {
        self.0.remove(key);
    }
    fn add(&mut self, key: &[u8], delta: i64) {
        let old = self.0.get(key).map_or(0, |v| i64::from_le_bytes(v[..].try_into().expect("a number")));
        self.put(key, &(old + delta).to_le_bytes());
    }
    fn max(&mut self, key: &[u8], value: u64) {
        let old = self.0.get(key).map_or(0, |v| u64::from_le_bytes(v[..].try_into().expect("a number")));
        self.put(key, &old.max(value).to_le_bytes());
    }
}

/// The map as a node or client knows it.
#[derive(Clone)]
pub struct View(pub Arc<ClusterMap>);
impl View {
    pub fn group(&self) -> &Group {
        &self.0.groups[0]
    }
    pub fn epoch(&self) -> Epoch {
        self.group().epoch
    }
    pub fn scope(&self) -> Scope {
        Scope::of(self.group())
    }
    pub fn state(&self, position: usize) -> MemberState {
        self.group().members[position].state
    }
    pub fn id(&self, position: usize) -> TargetId {
        self.group().members[position].target
    }
    /// It is a newcomer, and seals continue without it.
    pub fn is_filled(&self, position: usize) -> bool {
        self.group().members[position].is_filled(self.0.level)
    }
    pub fn is_current(&self, position: usize) -> bool {
        self.state(position) == MemberState::Current
    }
    pub fn is_live(&self, position: usize) -> bool {
        self.state(position) != MemberState::Down
    }
    pub fn current(&self) -> Vec<usize> {
        (0..self.group().members.len()).filter(|p| self.is_current(*p)).collect()
    }
}
impl Hash for View {
    fn hash<H: Hasher>(&self, h: &mut H) {
        let group = self.group();
        group.epoch.hash(h);
        for member in &group.members {
            (member.target, member.state as u8, member.since, member.lost_at).hash(h);
        }
        self.0.targets.iter().for_each(|target| (target.state as u8).hash(h));
        self.0.moves.iter().for_each(|m| (m.place, m.to, m.closed_in).hash(h));
    }
}

/// How far a member that is behind has come, under which epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Repair {
    No,
    TruncationsLearned,
    Listed(StripeView),
    BaseRebuilt(StripeView),
    Done,
}
impl Hash for Repair {
    fn hash<H: Hasher>(&self, h: &mut H) {
        std::mem::discriminant(self).hash(h);
        if let Repair::Listed(view) | Repair::BaseRebuilt(view) = self {
            view.newest.hash(h);
            view.logs.hash(h);
        }
    }
}

#[derive(Clone, Hash)]
pub struct Target {
    pub up: bool,
    /// What its process sees.
    pub index: Arc<Index>,
    /// The durable part, which a crash leaves. Differs only by overlays that it numbered and that are not
    /// acknowledged.
    pub durable: Arc<Index>,
    pub view: View,
    pub repair: Repair,
    /// The epoch in which it took the place of another one,
    pub replaced: Epoch,
    /// which takes no change under an earlier one.
    pub moved: bool,
}

impl Target {
    /// Runs a transaction that is durable when it is answered. False: refused, nothing changed.
    pub fn change(&mut self, body: impl Fn(&mut Index, &mut Delta) -> Result<()>) -> bool {
        let (mut index, mut delta) = (Index::clone(&self.index), Delta::default());
        if body(&mut index, &mut delta).is_err() {
            return false;
        }
        self.index = Arc::new(index);
        self.durable = self.index.clone();
        true
    }
    pub fn base(&self, index: usize) -> Option<Fragment> {
        get(&self.index, &base_key(cell(index)))
    }
    pub fn header(&self, index: usize) -> Option<Header> {
        get(&self.index, &header_key(cell(index)))
    }
    pub fn prepared(&self, index: usize) -> Vec<Fragment> {
        cells::prepared(&*self.index, cell(index)).expect("the index is sound")
    }
    /// The fragment of a version: the base, or one beside it.
    pub fn fragment(&self, index: usize, version: Version) -> Option<Fragment> {
        let base = self.base(index).into_iter();
        base.chain(self.prepared(index)).find(|f| f.version == version)
    }
    /// A data cell as it is here: base, then its log above `after`; and the number of the last one.
    pub fn apply_log(&self, index: usize, mut content: Content, after: Seq) -> (Content, Seq) {
        let mut last = after;
        let log = cells::overlays(&*self.index, cell(index), Seq(after.0 + 1), Seq(u64::MAX));
        for (seq, overlay) in log.expect("the index is sound") {
            content[overlay.offset as usize] = overlay.crc as u8;
            last = seq;
        }
        (content, last)
    }
    /// The result of a direct read.
    pub fn merged(&self, index: usize) -> (Content, Seq) {
        let base = self.base(index).map_or([0; 2], |b| content(&b));
        self.apply_log(index, base, self.header(index).map_or(Seq(0), |h| h.folded_seq))
    }
}
fn get<R: format::Record>(index: &Index, key: &[u8]) -> Option<R> {
    weir_store::entries::get(index, key).expect("the index is sound")
}

/// A fragment with its bytes in the address of its extent.
pub fn fragment(version: Version, epoch: Epoch, seal: bool, missing: u64, bytes: Content) -> Fragment {
    Fragment {
        version,
        epoch,
        seal,
        missing,
        extent: Extent { addr: u64::from(u16::from_le_bytes(bytes)), len: 4096 },
        fragment_bytes: 2,
        folded_seq: Seq(0),
        folded_seqs: Vec::new(),
        block_crcs: vec![u32::from(u16::from_le_bytes(bytes))],
    }
}
pub fn content(fragment: &Fragment) -> Content {
    (fragment.extent.addr as u16).to_le_bytes()
}

/// Where a client's write is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Progress {
    Waiting,
    Numbered {
        seq: Seq,
        by: usize,
        held: u64,
    },
    Acknowledged,
    /// Its sequencer crashed or was replaced: no task waits for it.
    Abandoned,
}

#[derive(Clone, Hash)]
pub struct Write {
    pub progress: Progress,
    /// The writes that were acknowledged before it began: those that it may replace for good.
    pub after: u64,
    /// The file was cut before it began.
    pub after_truncation: bool,
    /// The maps that its sequencer mirrored under, the newest last.
    pub acting: Vec<View>,
    /// Members that know under the newest of them that more members are missing than when it was numbered.
    pub reported: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    Fold,
    Prepare,
    Commit,
    CommitOwn,
    Drop,
}

/// A seal in flight, or the request that settles one.
#[derive(Clone, Hash)]
pub struct Seal {
    pub leader: usize,
    pub acting: View,
    pub version: Version,
    pub base: Version,
    pub phase: Phase,
    /// Participants that have answered in this phase; bit per position.
    pub done: u64,
    pub committed: bool,
    pub refused: bool,
    /// No client waits for it any more, but its last messages may still arrive.
    pub zombie: bool,
    pub folded: Vec<Option<(Content, Seq)>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TruncationState {
    No,
    Begun,
    Ended,
}

#[derive(Clone, Hash)]
pub struct State {
    /// The coordinator's.
    pub map: View,
    pub targets: Vec<Target>,
    pub writes: Vec<Write>,
    pub seals: Vec<Seal>,
    /// Where a client's writing of the whole stripe is.
    pub whole: Option<Whole>,
    pub truncation: TruncationState,
    pub truncation_reported: u64,
    pub truncation_acting: Option<View>,
    pub crashes_left: u8,
    pub suspicions_left: u8,
    pub seals_left: u8,
    pub replacements_left: u8,
    pub moves_left: u8,
    /// The cells that a target which takes a place has copied, and the epoch in which the place was closed.
    pub image: Option<(Epoch, Arc<Index>)>,
}

/// The one that a place has at first; spare ones have the numbers after these.
pub fn target_id(position: usize) -> TargetId {
    TargetId(position as u32)
}
