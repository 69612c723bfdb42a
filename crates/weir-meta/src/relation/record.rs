//! The leader's records of relations: byte for byte as in `record.rs`.
use crate::record::Record;
use bytes::Bytes;
use std::time::Duration;
use weir_proto::meta::{FileKind, Time};
use weir_proto::part::HomeRules;
use weir_proto::relation::{Direction, FingerprintBytes, HomeIds, RelationId, RelationRules};
use weir_proto::{InodeId, VolumeId, message};
pub use weir_relation::dirty::DirtyRange;

message!(
    /// `r/`: a relation.
    RelationRecord {
        volume: VolumeId,
        url: String,
        direction: Direction,
        evict: bool,
        /// The reason for a pause; nothing is shipped meanwhile.
        paused: Option<String>,
        created: Time,
        /// Changes of the volume up to this one were ingested into `O/` and `P/`.
        ingested: u64,
        shipped_bytes: u64,
        shipped_names: u64,
        /// The volume was imported.
        imports: bool,
        /// The relation's records are being removed, step by step.
        removing: bool,
        ids: HomeIds,
        /// The user who added it.
        by: u32,
    }
);
message!(
    /// `Y/`: an inode at home.
    RemoteEntry {
        kind: FileKind,
        places: Vec<RemotePlace>,
        fingerprint: FingerprintBytes,
        /// The size at which the file was reported to home as complete; none: not since it was last written.
        complete: Option<u64>,
        /// A mover may have written there since the fingerprint was taken.
        writing: bool,
    }
);
message!(
    /// A name at home; the volume's root has none.
    RemotePlace { dir: InodeId, name: Bytes }
);
message!(
    /// `m/`: a file's relocation from its place at home, which stores one of its several names.
    RelocationRecord { from: RemotePlace, to: RemotePlace }
);
message!(
    /// `q/`: these bytes are durable at home; see `weir_proto::relation::Receipt`.
    ReceiptRecord { len: u64, sums: Vec<u32> }
);
message!(
    /// `a/`: why an inode is not shipped.
    ConflictRecord { diverged: bool, why: String, at: Time }
);
message!(
    /// `j/`: when a directory was last read at home, to its end.
    MirroredRecord {
        at: Time,
        /// More entries were gone there than one transaction removes: it is to be read again at once.
        more: bool,
    }
);
message!(
    /// `e/`: a directory without a name.
    DoomedRecord { relation: RelationId, dir: InodeId }
);
message!(
    /// `0/`: the rules of a relation.
    #[derive(Default)]
    RulesRecord {
        rules: RelationRules,
        /// Its patterns were changed: scans of the volume enter directories that home has already.
        scans_again: bool,
    }
);
impl RelationRecord {
    pub fn mirrors(&self) -> bool {
        self.direction == Direction::Mirror
    }
    /// How long a scan of a directory stays valid while a client reads it, and while none does. An object
    /// store charges for each request.
    pub fn scans_apart(&self) -> (Duration, Duration) {
        match self.url.starts_with("s3:") {
            true => (Duration::from_secs(60), Duration::from_secs(900)),
            false => (Duration::from_secs(5), Duration::from_secs(60)),
        }
    }
    /// The home's abilities; if unknown, those that every home has.
    pub fn rules(&self) -> HomeRules {
        HomeRules::of(&self.url).unwrap_or(HomeRules { parts: true, links: false })
    }
}
impl Record for RelationRecord {}
impl Record for RulesRecord {}
impl Record for DirtyRange {}
impl Record for RemoteEntry {}
impl Record for RelocationRecord {}
impl Record for ReceiptRecord {}
impl Record for ConflictRecord {}
impl Record for MirroredRecord {}
impl Record for DoomedRecord {}
