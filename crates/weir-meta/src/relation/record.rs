//! What the leader keeps of relations: byte for byte as in `record.rs`.
use crate::record::Record;
use bytes::Bytes;
use std::time::Duration;
use weir_proto::meta::{FileKind, Time};
use weir_proto::piece::HomeRules;
use weir_proto::relation::{Direction, HomeIds, RelationId, StampBytes};
use weir_proto::{InodeId, VolumeId, message};

/// `P/`: the offset at which "the file is complete" is pending.
pub const FINISH: u64 = u64::MAX;

message!(
    /// `r/`: a relation.
    RelationRecord {
        volume: VolumeId,
        url: String,
        direction: Direction,
        evict: bool,
        /// Nothing is shipped while it says why.
        paused: Option<String>,
        created: Time,
        /// Changes of the volume up to this one were taken over into `O/` and `P/`.
        taken: u64,
        shipped_bytes: u64,
        shipped_names: u64,
        /// The volume was made from what was there.
        adopts: bool,
        /// What is kept of it goes, step by step.
        removing: bool,
        ids: HomeIds,
        /// The user who added it.
        by: u32,
    }
);
message!(
    /// `P/`: bytes from the key's offset on.
    Pending {
        len: u64,
        /// When the oldest of them was written.
        since: Time,
        /// The changes that wrote the oldest and the newest of them.
        oldest: u64,
        newest: u64,
    }
);
message!(
    /// `Y/`: an inode at home.
    Twin {
        kind: FileKind,
        places: Vec<TwinPlace>,
        stamp: StampBytes,
        /// Home was told that this is all of the file; none: not since it was last written.
        complete: Option<u64>,
        /// A mover may have written there since the stamp was taken.
        writing: bool,
    }
);
message!(
    /// A name at home; the volume's root has none.
    TwinPlace { dir: InodeId, name: Bytes }
);
message!(
    /// `m/`: where a file goes from its place at home, where it has one name of several.
    YieldRecord { from: TwinPlace, to: TwinPlace }
);
message!(
    /// `q/`: these bytes are durable at home; see `weir_proto::relation::Receipt`.
    ReceiptRecord { len: u64, sums: Vec<u32> }
);
message!(
    /// `a/`: why an inode is not shipped.
    AsideRecord { diverged: bool, why: String, at: Time }
);
message!(
    /// `j/`: when a directory was read at home last, to its end.
    FollowedRecord {
        at: Time,
        /// More was gone there than goes in one transaction: it is to be read again at once.
        more: bool,
    }
);
message!(
    /// `e/`: a directory without a name.
    DoomedRecord { relation: RelationId, dir: InodeId }
);
impl RelationRecord {
    pub fn pulls(&self) -> bool {
        self.direction == Direction::Pull
    }
    /// How long what was read of a directory is good enough while somebody looks at it, and while nobody does. An object
    /// store takes money for each question.
    pub fn looks_apart(&self) -> (Duration, Duration) {
        match self.url.starts_with("s3:") {
            true => (Duration::from_secs(60), Duration::from_secs(900)),
            false => (Duration::from_secs(5), Duration::from_secs(60)),
        }
    }
    /// What its home can do; of one that is not known (any more) what every home can.
    pub fn rules(&self) -> HomeRules {
        HomeRules::of(&self.url).unwrap_or(HomeRules { pieces: true, links: false })
    }
}
impl Record for RelationRecord {}
impl Record for Pending {}
impl Record for Twin {}
impl Record for YieldRecord {}
impl Record for ReceiptRecord {}
impl Record for AsideRecord {}
impl Record for FollowedRecord {}
impl Record for DoomedRecord {}
