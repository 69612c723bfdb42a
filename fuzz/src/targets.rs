//! What the fuzzers feed: each decoder of bytes that come from the wire, from a disk or from a user.
//!
//! A target takes any bytes and must return: no panic, no memory beyond what came; and what it accepts means the same
//! when it is encoded again. Where a checksum guards a decoder the target tries the bytes as they are and with the
//! checksum put right, else nothing would ever get behind it. The same functions are driven by libFuzzer (`make fuzz`) and,
//! with seeded mutations, by `crates/weir/tests/decoders.rs`. A file that includes this one brings `dice` and
//! the list of messages.
use crate::dice::Dice;
use std::collections::BTreeMap;
use weir_admin::config;
use weir_coord::identity::{NamespaceIdentity, TargetIdentity};
use weir_meta::owner_limits::OwnerRecord;
use weir_meta::record;
use weir_meta::relation::record as related;
use weir_proto::checksum::crc32c;
use weir_proto::data::OverlayKind;
use weir_proto::frame::{FrameKind, HEADER_BYTES, Header, Hello, verify};
use weir_proto::map::{Layout, Role, Scheme};
use weir_proto::meta::{FileKind, Time};
use weir_proto::posix::acl::Acl;
use weir_proto::{
    CellId, ClusterId, DiskUuid, Epoch, Error, FileId, InodeId, NamespaceId, PgId, Seq, SessionId, TargetId,
    Version, VolumeId, Wire,
};
use weir_proto::{
    access, backup, condition, coord, copies, data, enrol, event, export, frame, home_rule, life,
    local_creates, lock, map, meta, news, quota, recall, relation, snapshot, version, volume, watch,
};
use weir_store::format::{self as index, Record as _};
use weir_trust::certificate::{Authority, Certificate, Credentials, Grant};
use weir_trust::frames::{CLEAR_BYTES, FrameKey, Suite, TAG_BYTES, Tag, Whose};
use weir_trust::handshake::{Handshakes, RECORD_HEADER_BYTES, Tls, Wanted, record_len};
use weir_trust::token::Token;

pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    /// Valid inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

pub const TARGETS: &[Target] = &[
    Target { name: "message", run: message, seeds: message_seeds },
    Target { name: "frame", run: frame_bytes, seeds: frame_seeds },
    Target { name: "handshake", run: handshake, seeds: handshake_seeds },
    Target { name: "index", run: index_value, seeds: index_seeds },
    Target { name: "index_key", run: index_key, seeds: index_key_seeds },
    Target { name: "journal", run: journal, seeds: journal_seeds },
    Target { name: "namespace", run: namespace, seeds: namespace_seeds },
    Target { name: "coordinator", run: coordinator, seeds: coordinator_seeds },
    Target { name: "identity", run: identity, seeds: identity_seeds },
    Target { name: "config", run: configuration, seeds: config_seeds },
    Target { name: "text", run: text, seeds: text_seeds },
];

// ---- wire

type Check = fn(&[u8]);
/// Finds bytes that a type accepts.
type Find = fn(&mut Dice) -> Option<Vec<u8>>;

fn one_to_one<T: Wire>(bytes: &[u8]) {
    if let Ok(value) = T::from_bytes(bytes) {
        assert_eq!(value.to_bytes(), bytes, "{}", std::any::type_name::<T>());
    }
}

/// Every message type with its check, in the order of the list.
fn messages() -> Vec<(Check, Find)> {
    let mut all: Vec<(Check, Find)> = Vec::new();
    macro_rules! add {
        ($($type:ty),*) => { $(all.push((one_to_one::<$type>, Dice::encoding::<$type>));)* };
    }
    add!(Error, Layout, Scheme, FileId, CellId, TargetId);
    fn push<T: Wire>(_: &str) {
        FOUND.with_borrow_mut(|found| found.push((one_to_one::<T>, Dice::encoding::<T>)));
    }
    for_every_message!(push);
    all.append(&mut FOUND.take());
    all
}
thread_local!(static FOUND: std::cell::RefCell<Vec<(Check, Find)>> = Default::default());
thread_local!(static MESSAGES: Vec<(Check, Find)> = messages());

/// The first byte chooses the type.
fn message(bytes: &[u8]) {
    let Some((which, body)) = bytes.split_first() else { return };
    MESSAGES.with(|all| all[usize::from(*which) % all.len()].0(body));
}
fn message_seeds() -> Vec<Vec<u8>> {
    let mut dice = Dice::for_name("seeds");
    let one = |(which, (_, encoding)): (usize, &(Check, Find))| {
        let mut bytes = vec![which as u8];
        bytes.extend(encoding(&mut dice)?);
        Some(bytes)
    };
    MESSAGES.with(|all| all.iter().enumerate().filter_map(one).collect())
}

/// A header, then its body: as they are, and with the checksum put right.
fn frame_bytes(bytes: &[u8]) {
    let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(header) = Header::decode(head) else { return };
    let _ = verify(head, body);
    assert!(header.check_sizes().is_ok());
    let Some(body) = body.get(..header.body_len as usize) else { return };
    let again = header.encode(body);
    verify(&again, body).expect("a header holds its own checksum");
    assert_eq!(Header::decode(&again).expect("it was decoded before"), header);
    match header.kind {
        FrameKind::Hello | FrameKind::HelloAck => one_to_one::<Hello>(body),
        FrameKind::ErrorResponse | FrameKind::Goodbye => one_to_one::<Error>(body),
        _ => {}
    }
}
fn frame_seeds() -> Vec<Vec<u8>> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        level: 1,
        cluster: Some(ClusterId([3; 16])),
        name: "node".into(),
        role: Role::Storage,
        instance: 7,
    };
    let bodies = [hello.to_bytes(), Error::stale("an old map").to_bytes(), Vec::new()];
    let frames = FrameKind::ALL.iter().flat_map(|kind| bodies.iter().map(move |body| (*kind, body)));
    frames
        .map(|(kind, body)| {
            let header = Header { body_len: body.len() as u32, method: 200, ..Header::new(kind, 9) };
            [&header.encode(body)[..], body].concat()
        })
        .collect()
}

// ---- connections between nodes that have certificates

const NOW: u64 = 1_800_000_000;

struct Node {
    authority: Authority,
    credentials: Credentials,
    tls: Tls,
}
thread_local!(static NODE: Node = {
    let authority = Authority::found(ClusterId([7; 16]), NOW).expect("a new authority");
    let grant = Grant { name: "s1".into(), roles: vec![Role::Storage], serial: 1 };
    let credentials = authority.issue_own(&grant, NOW).expect("a new certificate");
    let tls = Tls::of_node(credentials.clone(), std::sync::Arc::new(|| NOW));
    Node { authority, credentials, tls }
});

/// The first byte chooses: records to one end of a handshake, a certificate, a file with one, a token,
/// protected frames.
fn handshake(bytes: &[u8]) {
    let Some((which, bytes)) = bytes.split_first() else { return };
    NODE.with(|node| match which % 6 {
        0 => records(node, true, bytes),
        1 => records(node, false, bytes),
        2 => {
            let authorities = [node.authority.certificate().to_vec()];
            if let Ok(certificate) = Certificate::verify(bytes, &authorities, NOW) {
                assert_eq!(certificate.name, "s1", "nothing else was signed");
            }
        }
        3 => drop(std::str::from_utf8(bytes).map(Credentials::from_pem)),
        4 => {
            let Ok(token) = std::str::from_utf8(bytes).unwrap_or_default().parse::<Token>() else { return };
            assert_eq!(token.to_string().parse(), Ok(token));
        }
        _ => protected(bytes),
    });
}

/// Whole records, as a connection cuts them off the stream.
fn records(node: &Node, listens: bool, mut bytes: &[u8]) {
    let wanted = Wanted(Suite::ALL.to_vec());
    let exchange = if listens { node.tls.accept(&wanted) } else { node.tls.dial(&wanted) };
    let mut exchange = exchange.expect("a node has a certificate");
    let _ = exchange.outgoing();
    while let Some(header) = bytes.first_chunk::<RECORD_HEADER_BYTES>() {
        let Ok(len) = record_len(header) else { return };
        let Some((record, rest)) = bytes.split_at_checked(RECORD_HEADER_BYTES + len) else { return };
        if exchange.incoming(record).is_err() || exchange.is_done() {
            break;
        }
        bytes = rest;
    }
    let _ = exchange.outgoing();
    assert!(!exchange.is_done(), "nobody here has the other end's key");
}

/// A frame and a payload that nobody protected.
fn protected(bytes: &[u8]) {
    let Some((tag, frame)) = bytes.split_first_chunk::<TAG_BYTES>() else { return };
    let tag: &Tag = tag;
    for suite in Suite::ALL {
        let mut key = FrameKey::new(suite, b"sixteen bytes k.");
        let mut payload = frame.to_vec();
        let mut check = key.payloads().check(Whose { kind: 3, call: 7 });
        check.arrived(frame);
        assert!(check.finish(&mut payload, tag).is_err(), "{suite:?}");
        if frame.len() >= CLEAR_BYTES {
            assert!(key.open(&mut frame.to_vec(), tag).is_err(), "{suite:?}");
        }
    }
}

fn handshake_seeds() -> Vec<Vec<u8>> {
    NODE.with(|node| {
        let wanted = Wanted(Suite::ALL.to_vec());
        let hello = node.tls.dial(&wanted).and_then(|mut dialed| dialed.outgoing()).unwrap_or_default();
        let token = format!("weir1.10.1.0.1:7000.{}.{}", "01".repeat(16), "02".repeat(16));
        let with = |which: u8, bytes: &[u8]| [&[which], bytes].concat();
        vec![
            with(0, &hello),
            with(1, &hello),
            with(2, &node.credentials.certificate),
            with(3, node.credentials.to_pem().as_bytes()),
            with(4, token.as_bytes()),
            with(5, &[7; 200]),
        ]
    })
}

// ---- a target's index

fn index_record<R: index::Record + PartialEq + std::fmt::Debug>(value: &[u8]) {
    let Some((_, rest)) = value.split_at_checked(4) else {
        assert!(R::from_value(value).is_err());
        return;
    };
    let _ = R::from_value(value);
    let mended = [&crc32c(rest).to_le_bytes()[..], rest].concat();
    if let Ok(record) = R::from_value(&mended) {
        assert_eq!(record.to_value(), mended, "{}", R::name());
    }
}
const INDEX: [Check; 8] = [
    index_record::<index::Meta>,
    index_record::<index::Header>,
    index_record::<index::Fragment>,
    index_record::<index::Overlay>,
    index_record::<index::Fence>,
    index_record::<index::Truncation>,
    index_record::<index::TruncatedFile>,
    index_record::<index::GroupEpoch>,
];

/// The first byte chooses the record.
fn index_value(bytes: &[u8]) {
    let Some((which, value)) = bytes.split_first() else { return };
    INDEX[usize::from(*which) % INDEX.len()](value);
}
fn index_seeds() -> Vec<Vec<u8>> {
    let extent = weir_store::alloc::Extent { addr: 1 << 20, len: 20480 };
    let fragment = index::Fragment {
        version: Version::new(6, 7),
        epoch: Epoch(11),
        seal: true,
        missing: 2,
        extent,
        fragment_bytes: 20000,
        folded_seq: Seq(3),
        folded_seqs: vec![Seq(3), Seq(0)],
        block_crcs: vec![0x01020304, 0x05060708],
    };
    let overlay =
        index::Overlay { offset: 100, len: 50, kind: OverlayKind::Data, crc: 1, token_epoch: 6, extent };
    let values = [
        index::Meta { slab_bytes: 1 << 30, step_bytes: 32 << 20 }.to_value(),
        index::Header::new(PgId(9), Scheme { data: 4, parity: 2 }, Epoch(11)).to_value(),
        fragment.to_value(),
        overlay.to_value(),
        index::Fence { token_epoch: 9 }.to_value(),
        index::Truncation { from_stripe: 3, to_stripe: 7, token_epoch: 8 }.to_value(),
        index::Truncation { from_stripe: 3, to_stripe: 5, token_epoch: 8 }.to_value(),
        index::TruncatedFile { file: cell().file }.to_value(),
        index::GroupEpoch { epoch: Epoch(4) }.to_value(),
    ];
    values.iter().enumerate().map(|(which, value)| [&[which as u8], &value[..]].concat()).collect()
}
fn cell() -> CellId {
    CellId { file: FileId { namespace: NamespaceId(1), inode: InodeId(0x0200_0003) }, stripe: 4, index: 5 }
}

fn index_key(key: &[u8]) {
    if let (Ok(cell), Ok(number)) = (index::cell_of_key(key), index::number_of_key(key))
        && key[0] == index::OVERLAY
    {
        assert_eq!(index::overlay_key(cell, Seq(number)), key);
    }
    let _ = index::truncation_number_of_key(key);
    if let Ok(file) = index::file_of_fence_key(key) {
        assert_eq!(index::fence_key(file)[1..], key[1..]);
    }
}
fn index_key_seeds() -> Vec<Vec<u8>> {
    vec![
        index::header_key(cell()),
        index::prepared_key(cell(), Version::new(6, 7)),
        index::overlay_key(cell(), Seq(8)),
        index::listed_key(PgId(9), cell()),
        index::fence_key(cell().file),
        index::truncation_key(cell().file, 9),
        index::truncated_file_key(7),
        index::group_key(PgId(3)),
    ]
}

// ---- journals

const SEGMENT_HEADER: usize = 4096;

/// A whole segment; also with every record's checksum put right, as far as their lengths lead. And a part of a state, as
/// copies send it.
fn journal(bytes: &[u8]) {
    if let Ok(pairs) = copies::decode_pairs(bytes) {
        assert_eq!(copies::encode_pairs(&pairs).expect("it is no longer than it was"), bytes);
    }
    let _ = weir_kv::read_segment(bytes);
    if let Some(mended) = with_checksums(bytes)
        && let Ok(summary) = weir_kv::read_segment(&mended)
    {
        assert!(summary.end >= SEGMENT_HEADER as u64 && summary.end <= mended.len() as u64, "{summary:?}");
    }
}
fn with_checksums(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = bytes.to_vec();
    let head = crc32c(bytes.get(4..32)?);
    bytes[..4].copy_from_slice(&head.to_le_bytes());
    let header = if bytes.get(4) == Some(&2) { 40 } else { 32 };
    let mut at = SEGMENT_HEADER;
    while let Some(record) = bytes.get(at..).filter(|rest| rest.len() >= header) {
        let body = u32::from_le_bytes(record[4..8].try_into().expect("four bytes")) as usize;
        let Some(end) = body.checked_add(header).and_then(|n| n.checked_next_multiple_of(8)) else { break };
        let Some(crc) = record.get(4..end).map(crc32c) else { break };
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        at += end;
    }
    Some(bytes)
}
fn journal_seeds() -> Vec<Vec<u8>> {
    [1, 2].into_iter().flat_map(segments).collect()
}
/// One that ended, and one whose end is torn.
fn segments(version: u8) -> [Vec<u8>; 2] {
    let header = if version == 2 { 40 } else { 32 };
    let mut segment = vec![0; SEGMENT_HEADER];
    segment[4] = version;
    segment[8..16].copy_from_slice(b"WEIR-JNL");
    segment[16] = 3;
    segment[24..32].copy_from_slice(&(1u64 << 16).to_le_bytes());
    let bodies: [&[u8]; 5] = [
        b"\x01\x03\x00E/a\x03\x00\x00\x00ino",
        b"\x02\x03\x00E/b",
        b"\x03\x03\x00T/n\xfe\xff\xff\xff\xff\xff\xff\xff",
        b"\x04\x03\x00T/t\x07\x00\x00\x00\x00\x00\x00\x00",
        b"",
    ];
    let mut seq = 9u64;
    for body in bodies {
        seq += u64::from(!body.is_empty());
        let start = segment.len();
        segment.extend_from_slice(&[0; 4]);
        segment.extend_from_slice(&(body.len() as u32).to_le_bytes());
        for number in [3, seq, seq.saturating_sub(2)] {
            segment.extend_from_slice(&number.to_le_bytes());
        }
        if version == 2 {
            segment.extend_from_slice(&5u64.to_le_bytes());
        }
        segment.extend_from_slice(body);
        segment.resize(start + (header + body.len()).next_multiple_of(8), 0);
    }
    let ended = with_checksums(&segment).expect("it has a header");
    let torn = ended[..ended.len() - header - 8].to_vec();
    [ended, torn]
}

// ---- the namespace's records, and what users keep in it

/// What it means stays; its bytes may be those of an older layout, without the fields that came later.
fn versioned<R: record::Record + PartialEq + std::fmt::Debug>(value: &[u8]) {
    if let Ok(found) = R::from_value(value, String::new) {
        let again = record::Record::to_value(&found);
        assert_eq!(R::from_value(&again, String::new).ok(), Some(found), "{}", std::any::type_name::<R>());
    }
}
fn access_list(value: &[u8]) {
    if let Ok(Some(acl)) = Acl::parse(value) {
        assert_eq!(acl.to_value(), value);
        let _ = (acl.mode(), acl.is_mode());
    }
}
const NAMESPACE: [Check; 24] = [
    versioned::<record::Access>,
    versioned::<record::Tally>,
    versioned::<record::Link>,
    versioned::<record::Listed>,
    versioned::<record::Inode>,
    versioned::<record::SessionRecord>,
    versioned::<record::SlotRecord>,
    versioned::<record::Garbage>,
    versioned::<record::VolumeRecord>,
    access_list,
    versioned::<record::SnapshotRecord>,
    versioned::<record::LayerRecord>,
    versioned::<record::TrashRecord>,
    versioned::<OwnerRecord>,
    versioned::<related::RulesRecord>,
    versioned::<related::RelationRecord>,
    versioned::<related::DirtyRange>,
    versioned::<related::RemoteEntry>,
    versioned::<related::RelocationRecord>,
    versioned::<related::ReceiptRecord>,
    versioned::<related::ConflictRecord>,
    versioned::<record::ChangeRecord>,
    versioned::<record::EvictedRange>,
    versioned::<record::CloneRecord>,
];

/// The first byte chooses the record.
fn namespace(bytes: &[u8]) {
    let Some((which, value)) = bytes.split_first() else { return };
    NAMESPACE[usize::from(*which) % NAMESPACE.len()](value);
    use weir_meta::tables::{GARBAGE, HELD, LINKS, LISTED, OWNER_LIMITS, SESSIONS, XATTRS};
    let _ = (LISTED.parts(value), LINKS.parts(value), HELD.parts(value), SESSIONS.parts(value));
    let _ = (GARBAGE.parts(value), XATTRS.parts(value), OWNER_LIMITS.parts(value));
    let _ = weir_meta::keys::after(value);
}
fn namespace_seeds() -> Vec<Vec<u8>> {
    use record::Record;
    let time = Time { nanos: 1_700_000_000_123_456_789 };
    let (ino, kind) = (InodeId(0x0200_0003), FileKind::Regular);
    let inode = record::Inode {
        kind,
        mode: 0o644,
        uid: 1,
        gid: 2,
        nlink: 1,
        rdev: 0,
        size: 10,
        allocated: 11,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        data_version: 5,
        layout: Some(Layout {
            scheme: Scheme { data: 4, parity: 2 },
            cell_shift: 19,
            first_pg: PgId(0),
            pg_count: 8,
            seed: 3,
        }),
        parent: InodeId::ROOT,
        writing: record::Writing {
            token_epoch: 6,
            writer: SessionId(7),
            dirty: true,
            recover: false,
            data_end: 8,
            shared_at: None,
        },
        evicted: 0,
        pinned: false,
        layers: None,
        cookie: 3,
    };
    let tally = record::Tally {
        mtime: time,
        ctime: time,
        entries: 2,
        subdirectories: 1,
        serial: 3,
        next_n: 4,
        next_cookie: 5,
    };
    let parent = InodeId::ROOT;
    let root = VolumeId::ROOT;
    let (atime, btime, volume) = (time, time, VolumeId(3));
    let access = record::Access { mode: 0o755, uid: 1, gid: 2, parent, atime, btime, volume, cookie: 7 };
    let volume = record::VolumeRecord {
        name: "data".into(),
        root: ino,
        entry: b"name"[..].into(),
        path: b"/name"[..].into(),
        owner: 1,
        admins: vec![2, 3],
        quota: volume::Quota { bytes_hard: Some(5), inodes_soft: Some(2), ..volume::Quota::NONE },
        bytes_over_since: Some(time),
        inodes_over_since: None,
        policy: volume::Policy { scheme: None, pool: Some("disk".into()) },
        created: time,
        deleting: false,
        retention: volume::Retention { trash_s: 7, ..volume::Retention::NOTHING },
        write_floor: 3,
    };
    let trash = record::TrashRecord { dir: ino, until: time };
    let quota = Some(volume::Quota { bytes_soft: Some(5), ..volume::Quota::NONE });
    let owner = OwnerRecord { quota, bytes_over_since: Some(time), inodes_over_since: None };
    let rules = weir_proto::relation::RelationRules {
        include: vec!["*.h5".into()],
        exclude: vec!["/a/".into(), "b?".into()],
        bytes_per_s: Some(1 << 30),
    };
    let dirty = related::DirtyRange { len: 9, since: time, oldest: 1, newest: 2 };
    let places = vec![related::RemotePlace { dir: ino, name: b"name"[..].into() }];
    let remote = related::RemoteEntry {
        kind,
        places,
        fingerprint: b"print"[..].into(),
        complete: Some(9),
        writing: true,
    };
    let list = b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x05\0\x0a\0\0\0\x04\0\x05\0\xff\xff\xff\xff\
        \x10\0\x05\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
    let values = [
        (0, access.to_value()),
        (0, record::Access { volume: root, ..access }.to_value()),
        (0, record::Access { cookie: 0, ..access }.to_value()),
        (1, tally.to_value()),
        (2, record::Link { ino, kind, cookie: 3 }.to_value()),
        (3, record::Listed { ino, kind, name: b"name"[..].into() }.to_value()),
        (4, inode.to_value()),
        (
            4,
            record::Inode {
                writing: record::Writing { shared_at: Some(9), ..inode.writing.clone() },
                ..inode.clone()
            }
            .to_value(),
        ),
        (4, record::Inode { evicted: 9, pinned: true, ..inode }.to_value()),
        (
            5,
            record::SessionRecord { client: "node".into(), opened: time, process: "host/7".into() }
                .to_value(),
        ),
        (6, record::SlotRecord { seq: 5, method: 130, reply: b"reply"[..].into() }.to_value()),
        (
            7,
            record::Garbage { first_pg: PgId(0), pg_count: 8, truncation: record::StripeTruncation::ALL }
                .to_value(),
        ),
        (8, volume.to_value()),
        (9, list.to_vec()),
        (12, trash.to_value()),
        (13, owner.to_value()),
        (14, related::RulesRecord { rules, scans_again: true }.to_value()),
        (16, dirty.to_value()),
        (17, remote.to_value()),
        (19, related::ReceiptRecord { len: 9, sums: vec![1, 2] }.to_value()),
        (20, related::ConflictRecord { diverged: true, why: "why".into(), at: time }.to_value()),
    ];
    values.iter().map(|(which, value)| [&[*which], &value[..]].concat()).collect()
}

// ---- small files

fn coordinator(bytes: &[u8]) {
    let _ = weir_coord::store::read_state(bytes);
    let Some((head, body)) = bytes.split_at_checked(12) else { return };
    let mended = [&head[..8], &crc32c(body).to_le_bytes(), body].concat();
    let Ok(keys) = weir_coord::store::read_state(&mended) else { return };
    for versioned in keys.values() {
        if let Ok(map) = weir_coord::records::decode_map(&versioned.value) {
            assert_eq!(weir_coord::records::encode_map(&map), versioned.value);
        }
        if let Ok(step) = weir_coord::records::decode_step(&versioned.value) {
            assert_eq!(weir_coord::records::encode_step(&step), versioned.value);
        }
    }
}
fn coordinator_seeds() -> Vec<Vec<u8>> {
    let map = Dice::for_name("map").encoding::<map::ClusterMap>().unwrap_or_default();
    let record = [&[1, 0][..], &map].concat();
    let step = Dice::for_name("step").encoding::<news::MapNews>().unwrap_or_default();
    let step = [&[1, 0][..], &step].concat();
    [record, step, b"abc".to_vec()]
        .iter()
        .map(|value| {
            let mut body = b"\x01\0\x09\0\0\0\0\0\0\0\x01\0\0\0\x03\0\0\0map\x09\0\0\0\0\0\0\0".to_vec();
            body.extend_from_slice(&(value.len() as u32).to_le_bytes());
            body.extend_from_slice(value);
            [&b"WEIRCRD\0"[..], &crc32c(&body).to_le_bytes(), &body].concat()
        })
        .collect()
}

fn identity(bytes: &[u8]) {
    let same = |bytes: &[u8]| {
        if let Ok(found) = TargetIdentity::from_text(bytes) {
            let again = TargetIdentity::from_text(found.to_text().as_bytes());
            assert_eq!(again.expect("an identity that was read can be written"), found);
        }
        if let Ok(found) = NamespaceIdentity::from_text(bytes) {
            let again = NamespaceIdentity::from_text(found.to_text().as_bytes());
            assert_eq!(again.expect("an identity that was read can be written"), found);
        }
    };
    same(bytes);
    if let Some(at) = bytes.windows(9).position(|w| w == b"crc32c = ") {
        same(format_with_crc(&bytes[..at]).as_slice());
    }
}
fn format_with_crc(body: &[u8]) -> Vec<u8> {
    [body, format!("crc32c = \"{:08x}\"\n", crc32c(body)).as_bytes()].concat()
}
fn identity_seeds() -> Vec<Vec<u8>> {
    let identity =
        TargetIdentity { cluster: ClusterId([1; 16]), disk: DiskUuid([2; 16]), pool: "default".into() };
    vec![identity.to_text().into_bytes()]
}

fn configuration(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match config::parse("weir.toml", text) {
        Err(failure) => assert!(!failure.to_string().is_empty()),
        Ok(found) => {
            let _ = config::check("weir.toml", &found);
            // What has no place in TOML (a path that is no text, say) is refused, not written wrongly.
            if let Ok(written) = config::write(&found) {
                let again = config::parse("weir.toml", &written);
                assert_eq!(again.expect("a configuration that was written can be read"), found);
            }
        }
    }
}
fn config_seeds() -> Vec<Vec<u8>> {
    let reference = config::reference();
    let plain = "[cluster]\nid = \"000102030405060708090a0b0c0d0e0f\"\ncoordinators = [\"unix:/run/c\", \
        \"tcp:[::1]:7000\"]\n[node]\nname = \"a\"\nlisten = [\"tcp:127.0.0.1:0\"]\nthreads = 2\n[coord]\ndir = \"/c\"\n\
        targets = 6\nscheme = \"ec:4+2\"\ncell_kib = 512\nlease_ms = 10000\n[storage]\ntargets = [\"/a\", \"/b\"]\n\
        pool = \"default\"\n[mount]\npath = \"/mnt\"\nallow_other = true\n[meta]\ncache_mib = 128\n";
    // The reference with its keys not commented out: as many as are valid.
    let open: String =
        reference.lines().map(|l| format!("{}\n", l.strip_prefix("# ").unwrap_or(l))).collect();
    vec![plain.as_bytes().to_vec(), reference.into_bytes(), open.into_bytes()]
}

/// Words of the command line and of the configuration that have a grammar of their own.
fn text(bytes: &[u8]) {
    let _ = weir_trust::audit::open(bytes);
    let _ = weir_trust::audit::resume(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    fn same<T: std::str::FromStr + std::fmt::Display + PartialEq + std::fmt::Debug>(text: &str) {
        if let Ok(value) = text.parse::<T>() {
            assert_eq!(value.to_string().parse::<T>().ok(), Some(value), "{text:?}");
        }
    }
    same::<weir_env::Addr>(text);
    same::<Scheme>(text);
    same::<ClusterId>(text);
    same::<DiskUuid>(text);
    let known: BTreeMap<&str, ()> = [("memory_mib", ()), ("threads", ())].into();
    let _ = weir_admin::failure::did_you_mean(text, known.keys().copied());
}
fn text_seeds() -> Vec<Vec<u8>> {
    let record = weir_trust::audit::Record {
        time_ns: 1,
        node: "n".into(),
        from: "unix".into(),
        role: "user".into(),
        uid: Some(1),
        what: "Leave".into(),
        on: "n1".into(),
        result: weir_trust::audit::Outcome::Done,
        again: 1,
    };
    let line = weir_trust::audit::seal(&mut Default::default(), &record);
    [
        line.as_str(),
        "tcp:127.0.0.1:7000",
        "tcp:[fe80::1%2]:0",
        "unix:/run/weir/meta.sock",
        "ec:4+2",
        "replica:3",
        "single",
        "000102030405060708090a0b0c0d0e0f",
        "t14",
        "17",
    ]
    .map(|word| word.as_bytes().to_vec())
    .to_vec()
}
