//! Messages to a target store (methods 200–299).
//!
//! A request names the placement group and the epoch under which its sender acts; a target refuses a lower
//! epoch than it knows (`Stale`: fetch the map, try again) and fetches the map itself when it sees a higher
//! one.
pub use crate::map::GroupAt;
use crate::message;
use crate::wire_enum;
use crate::{CellId, Epoch, FileId, PgId, Seq, TargetId, Version};
use bytes::Bytes;

/// Bytes covered by one checksum of a fragment.
pub const CHECKSUM_BLOCK: u32 = 16 * 1024;
/// The largest payload of one data message.
pub const PAYLOAD_MAX: u32 = 8 * 1024 * 1024;

/// Bit i set: fragment i of the stripe was not written. Up to 40 fragments.
pub type MissingMask = u64;

message!(
    /// The place that a request acts on: one target's place in one group, under an epoch.
    Place {
        target: TargetId,
        group: PgId,
        epoch: Epoch,
    }
);

impl Copy for Place {}

wire_enum!(WriteMode {
    /// Beyond the committed end of the file: becomes the base at once, replacing any earlier one.
    Fresh = 1,
    /// Kept next to the base until `CommitStripe` or `DropPrepared`. The version must be above the base's
    /// (else `Stale`): a writer's counter is even and more than `SEAL_VERSIONS` above the base in `StatCell`,
    /// a seal's odd and below that. `Exists`: a seal with a higher version is in progress here.
    Prepare = 2,
    /// `Prepare` by the leader of a seal: after a crash the leader itself resolves it.
    PrepareSeal = 3,
    /// Recalled bytes: the base at once, replacing data with a lower token epoch. `Stale` if data was written
    /// with this token epoch or a higher one. Its version has the counter `FILL_COUNTER`, which neither
    /// writers nor seals use.
    Fill = 4,
});

/// The token epoch for requests that no fence stops.
pub const UNFENCED: u32 = u32::MAX;
/// The counter of versions that `WriteMode::Fill` writes: below all others under the same token epoch.
pub const FILL_COUNTER: u32 = 1;
/// How far a seal's counter may be above its base's, or above `FILL_COUNTER` if the base has a lower token
/// epoch.
pub const SEAL_VERSIONS: u32 = 64;

message!(
    /// Writes one fragment of a stripe as a new base version. The payload is the fragment (0 to cell_bytes).
    /// The reply means: durable on this target.
    WriteFragment = 200 by [Storage, Mount, Mover, Console] -> () {
        place: Place,
        cell: CellId,
        version: Version,
        mode: WriteMode,
        missing: MissingMask,
        /// For each data cell of the stripe, the overlay sequence that this version includes. Empty with
        /// `Fresh`.
        folded_seqs: Vec<Seq>,
        /// CRC32C of each CHECKSUM_BLOCK of the payload, the last one short.
        block_crcs: Vec<u32>,
    }
);
message!(
    /// Ensures that a version is here and adds to its mask; a member without it copies it from k current
    /// ones. So a version that is committed under an epoch is at all live members of that epoch. `NotFound`:
    /// fewer have it. `Stale`: a client with a higher token epoch decides about the file now.
    HoldStripe = 203 by [Storage, Mount, Mover, Console] -> () {
        place: Place,
        cell: CellId,
        version: Version,
        missing: MissingMask,
        token_epoch: u32,
    }
);
message!(
    /// Makes the prepared version the base; drops the old base and the overlays up to its folded sequences.
    /// Idempotent. `token_epoch`: the sender's, as in `HoldStripe`; `UNFENCED` for a seal.
    CommitStripe = 201 by [Storage, Mount, Mover, Console] -> () { place: Place, cell: CellId, version: Version, token_epoch: u32 }
);
message!(DropPrepared = 202 by [Storage, Mount, Mover, Console] -> () { place: Place, cell: CellId, version: Version, token_epoch: u32 });

wire_enum!(OverlayKind {
    /// The payload's bytes.
    Data = 1,
    /// Zeros (a punched or truncated range); no payload.
    Zero = 2,
    /// A number whose write failed before all keepers had it: it changes nothing, its length is 0. No
    /// payload.
    Void = 3,
});
message!(
    /// Writes bytes into a data cell through its target (or, if that is down, the first live parity target):
    /// it assigns the next sequence number, logs, mirrors to all live parity targets, and replies when all of
    /// them have it.
    WriteOverlay = 210 by [Storage, Mount, Mover, Console] -> OverlayWritten {
        place: Place,
        /// Index is that of the data cell, also at a parity target.
        cell: CellId,
        /// Upper half: the token epoch of the writer (checked against the file's fence).
        token_epoch: u32,
        offset: u32,
        len: u32,
        kind: OverlayKind,
        /// CRC32C of the payload (0 for `Zero`).
        crc: u32,
        layout_scheme: crate::map::Scheme,
        /// Chosen at random for each write, the same for each of its attempts.
        write: u64,
        /// Counts from 0. An attempt that arrives after a later one, over a broken connection, is refused:
        /// the writer has continued.
        attempt: u32,
    }
);
/// Most extents of one message: their list takes 16 KiB.
pub const OVERLAY_PARTS_MAX: usize = 1024;
message!(
    /// One of several extents of a data cell. Its bytes are a part of the message's payload, if it has any.
    #[derive(Copy)]
    OverlayPart { offset: u32, len: u32, kind: OverlayKind, crc: u32 }
);
message!(
    /// `WriteOverlay` with up to OVERLAY_PARTS_MAX extents of one data cell: they get consecutive numbers in
    /// this order, all or none. The payload is their data, concatenated.
    WriteOverlays = 212 by [Storage, Mount, Mover, Console] -> OverlayWritten {
        place: Place,
        cell: CellId,
        token_epoch: u32,
        parts: Vec<OverlayPart>,
        layout_scheme: crate::map::Scheme,
        write: u64,
        attempt: u32,
    }
);
message!(OverlayWritten {
    /// Of several the first one.
    seq: Seq,
    /// The cluster map under which all its keepers have it.
    map_version: u64,
});
message!(
    /// The sequencer's copy to a parity target. Sequence numbers of one cell arrive in order, or wait.
    /// `again`: a copy of an old entry, to make all logs the same: no fence stops it, and it replaces the
    /// entry there.
    MirrorOverlay = 211 by [Storage] -> () {
        place: Place,
        cell: CellId,
        token_epoch: u32,
        seq: Seq,
        offset: u32,
        len: u32,
        kind: OverlayKind,
        missing: MissingMask,
        crc: u32,
        layout_scheme: crate::map::Scheme,
        again: bool,
    }
);

message!(
    /// `MirrorOverlay` of several extents, with consecutive numbers from `first` on.
    MirrorOverlays = 213 by [Storage] -> () {
        place: Place,
        cell: CellId,
        token_epoch: u32,
        first: Seq,
        parts: Vec<OverlayPart>,
        missing: MissingMask,
        layout_scheme: crate::map::Scheme,
    }
);

wire_enum!(ReadView {
    /// Base with overlays applied: the cell's present content. At the data cell's own target.
    Merged = 1,
    /// The base alone, of the given version (0: the present one). For decoding.
    Base = 2,
});
message!(
    /// Reads `len` bytes from `offset` of a cell (both multiples of CHECKSUM_BLOCK, except that a read may
    /// end at the cell's end). The payload is cut at the fragment's end: the rest is zeros.
    ReadCell = 220 by [Storage, Mount, Mover, Console] -> CellRead {
        place: Place,
        cell: CellId,
        view: ReadView,
        version: Version,
        offset: u32,
        len: u32,
    }
);
message!(CellRead {
    /// False: the target has no data of this cell (no base, no overlay).
    known: bool,
    version: Version,
    /// Highest overlay sequence applied (Merged) or included in the base (Base).
    seq: Seq,
    /// Length of the whole fragment, in bytes.
    fragment_bytes: u32,
    folded_seqs: Vec<Seq>,
    missing: MissingMask,
    /// CRC32C of each CHECKSUM_BLOCK of the payload, the last one short.
    block_crcs: Vec<u32>,
});
message!(
    /// The overlays of a data cell that its target logs or a parity target mirrors, above `after`, in order
    /// of sequence. The payload is their data, concatenated. A long list comes in parts: see `more`.
    ReadOverlays = 221 by [Storage, Mount, Mover, Console] -> OverlaysRead { place: Place, cell: CellId, after: Seq }
);
message!(OverlayExtent { seq: Seq, offset: u32, len: u32, kind: OverlayKind, crc: u32, token_epoch: u32 });
message!(OverlaysRead {
    extents: Vec<OverlayExtent>,
    /// There are more than fit: continue after the last one of these.
    more: bool,
});

message!(
    /// The versions that this target holds of one cell. For readers in doubt, seal and recovery.
    StatCell = 222 by [Storage, Mount, Mover, Console] -> CellStat { place: Place, cell: CellId }
);
message!(CellStat {
    known: bool,
    base: Version,
    prepared: Vec<Version>,
    /// Per data cell (parity target) or for this cell (data target): highest contiguous overlay sequence
    /// held.
    overlay_seqs: Vec<Seq>,
    folded_seqs: Vec<Seq>,
    missing: MissingMask,
    fragment_bytes: u32,
});

message!(
    /// Records that fragments of a stripe are missing: it is under-replicated. Adds to the mask of `version`
    /// (base or prepared; 0: any); a bit is cleared when its member is current in the map. A holder that
    /// receives its own bit verifies its fragment and has it rebuilt. `NotFound`: that version is not here.
    MarkMissing = 230 by [Storage, Mount, Mover, Console] -> () { place: Place, cell: CellId, version: Version, missing: MissingMask }
);
/// The fence of a deleted file: it is never written again.
pub const FENCE_GONE: u32 = u32::MAX;
message!(
    /// Truncates a file on this target: data in the stripes from `from_stripe` to before `to_stripe` with a
    /// token epoch below `fence` is dropped, later writes with a lower one are refused. `epochs`: the file's
    /// groups here in the sender's map; `Stale`: the target knows a higher one.
    DropFile = 231 by [Meta, Storage, Mount, Mover, Console] -> DropFileReply {
        target: TargetId,
        file: FileId,
        from_stripe: u64,
        /// `u64::MAX`: to the end of the file.
        to_stripe: u64,
        fence: u32,
        epochs: Vec<GroupAt>,
    }
);
message!(DropFileReply {
    /// Cells of the file with a prepared version in doubt: the caller must commit or drop it.
    prepared: Vec<PreparedCell>,
});
message!(PreparedCell { cell: CellId, group: PgId, version: Version });
message!(
    /// Asks a data cell's target to fold its overlays into a new base kept beside the old one (a prepared
    /// version) and to return its bytes; the leader of a seal encodes parity from them. Payload of the reply:
    /// the new base.
    SealCell = 240 by [Storage] -> SealedCell { place: Place, cell: CellId, version: Version }
);
message!(SealedCell { folded_seq: Seq, fragment_bytes: u32, block_crcs: Vec<u32> });
message!(
    /// Cells of a group on this target in order of id, after `after`. For repair, and for a restored
    /// namespace.
    ListCells = 241 by [Storage, Meta] -> CellList {
        target: TargetId,
        group: PgId,
        after: Option<CellId>,
        /// Only cells written under this epoch or later, or with fragments missing.
        since: Epoch,
        /// The group's epoch in the caller's map: the target refuses lower ones from now on.
        epoch: Epoch,
        limit: u32,
    }
);
message!(CellList { cells: Vec<CellSummary>, more: bool });
message!(
    /// Truncation records of this target, with numbers above `after`, in order. For members that were away.
    /// `epochs`: the common groups, with the epochs in the sender's map; truncations under lower ones are
    /// refused from now on.
    ListTruncations = 243 by [Storage] -> TruncationList { target: TargetId, after: u64, epochs: Vec<GroupAt>, limit: u32 }
);
message!(
    /// Fences of this target, of files above `after`, in order; later ones are among the truncations.
    /// `epochs`: as for [`ListTruncations`].
    ListFences = 244 by [Storage] -> FenceList { target: TargetId, after: Option<FileId>, epochs: Vec<GroupAt>, limit: u32 }
);
message!(
    /// Cells of the group on the target, for another one that takes over its place: in order, after `after`.
    /// `close`: from now on the target accepts no change of them in this epoch.
    ListPlace = 245 by [Storage] -> PlaceList { place: Place, after: Option<CellId>, close: bool, limit: u32 }
);
message!(PlaceList { cells: Vec<CellDigest>, more: bool });
message!(
    /// Two targets with the same digest hold the same data of a cell.
    #[derive(Copy)]
    CellDigest { cell: CellId, digest: u64 }
);
message!(
    /// The target's index entries of a cell, from the given one on; their bytes on slabs are the payload,
    /// concatenated.
    CopyCell = 246 by [Storage] -> CellImage { place: Place, cell: CellId, from: u32 }
);
message!(CellImage { entries: Vec<CellEntry>, more: bool });
message!(
    /// `kind` and `number` are those of the entry's key, see `docs/format.md`.
    CellEntry { kind: u8, number: u64, value: Vec<u8>, bytes: u32 }
);
message!(FenceList { fences: Vec<FileFence>, more: bool });
message!(
    /// Writes to the file with a lower token epoch are refused.
    #[derive(Copy)]
    FileFence { file: FileId, token_epoch: u32 }
);
message!(TruncationList { truncations: Vec<Truncation>, more: bool });
message!(
    /// Data in the stripes from `from_stripe` to before `to_stripe` with a token epoch below `token_epoch` is
    /// void.
    Truncation { number: u64, file: FileId, from_stripe: u64, to_stripe: u64, token_epoch: u32 }
);
message!(
    /// Summary of a cell in a listing (at a parity target also of the data cells whose overlays it mirrors).
    CellSummary {
        cell: CellId,
        /// Epoch of the last write.
        epoch: Epoch,
        /// 0: no base.
        base: Version,
        /// Highest contiguous overlay sequence held.
        seq: Seq,
        /// Two logs with equal sequence and sum hold the same overlays.
        log_sum: u64,
        missing: MissingMask,
    }
);
message!(
    /// The first stripe of a file, at or after `from_stripe`, of which this target has any data, in any
    /// group. A parity target of a group has a part of all data that is written there.
    NextStripe = 265 by [Storage, Mount, Mover, Console] -> StripeFound { place: Place, file: FileId, from_stripe: u64 }
);
message!(StripeFound { stripe: Option<u64> });
message!(
    /// Seals every stripe of a file that has overlays, now (tests, fsck; normally in the background).
    SealFile = 242 by [Storage, Console] -> () { target: TargetId, file: FileId }
);
message!(
    /// A call to a target of another node, from a node that cannot reach that one. The reply's payload is the
    /// target's. Forwarded only once: the receiver calls the target's node itself.
    PassOn = 260 by [Meta, Storage, Mount, Mover, Console] -> PassedOn { target: TargetId, method: u16, body: Bytes }
);
message!(PassedOn { body: Bytes });
message!(
    /// Progress of a target's scrub, which reads and verifies all its data. `start`: begins a pass, at
    /// `bytes_per_s` (0: it reads half of the time).
    ScrubTarget = 266 by [Storage, Console, Operator] -> ScrubReport { target: TargetId, start: bool, bytes_per_s: u64 }
);
message!(
    ScrubReport {
        /// Bytes that the target stores now.
        used: u64,
        /// The present pass, else the last one; absent: none has begun yet.
        pass: Option<ScrubPass>,
        /// The last pass that completed.
        last: Option<ScrubPass>,
    }
);
message!(
    /// One scrub pass.
    #[derive(Copy)]
    ScrubPass { begun_ns: i64, ended_ns: Option<i64>, cells: u64, bytes: u64, damaged_cells: u64 }
);
message!(
    /// Progress of the target in comparing its versions with the other members'; starts a pass on request.
    CompareTarget = 251 by [Storage, Console, Operator] -> CompareReport { target: TargetId, start: bool }
);
message!(CompareReport {
    /// A pass was requested and has not ended.
    asked: bool,
    pass: Option<ComparePass>,
    /// The last pass that ended since the target's process began.
    last: Option<ComparePass>,
});
message!(
    /// One pass of comparisons.
    #[derive(Copy, Default)]
    ComparePass {
        begun_ns: i64,
        ended_ns: Option<i64>,
        /// Groups of the target, and those whose members were all current, which it has compared.
        groups: u32,
        groups_done: u32,
        stripes: u64,
        /// Stripes in which this target differed from all others, and those of them that are repaired.
        differing: u64,
        repaired: u64,
        /// Stripes that were encoded again, and those whose parity was another one, which was replaced.
        encoded: u64,
        mismatched: u64,
    }
);
message!(
    /// Whether the target has space for new data: a client asks the members that may have refused a write.
    HasSpace = 252 by [Storage, Mount, Mover, Console] -> SpaceAnswer { target: TargetId, len: u32 }
);
message!(SpaceAnswer {
    has_space: bool,
    /// Why not.
    why: String,
});
message!(
    /// State of a target. The payload is echoed: it shows whether large packets arrive, too.
    StatTarget = 250 by [Coordinator, Meta, Storage, Mount, Mover, Console] -> TargetStat { target: TargetId }
);
message!(TargetStat {
    report: crate::coord::TargetReport,
    cells: u64,
    overlay_extents: u64,
    overlay_bytes: u64,
    fragment_bytes_written: u64,
    overlay_bytes_written: u64,
});
