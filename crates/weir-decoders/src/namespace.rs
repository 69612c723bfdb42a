//! The namespace's records, and what users keep in it.
use crate::Check;
use weir_meta::owner_limits::OwnerRecord;
use weir_meta::record::{self, Record as _};
use weir_meta::relation::record as related;
use weir_proto::map::{Layout, Scheme};
use weir_proto::meta::{FileKind, Time};
use weir_proto::posix::acl::Acl;
use weir_proto::{InodeId, PgId, SessionId, VolumeId, volume};

/// A value keeps its meaning. Its bytes may be of an older layout, without the fields that came later.
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
const RECORDS: [Check; 24] = [
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
pub fn namespace(bytes: &[u8]) {
    let Some((which, value)) = bytes.split_first() else { return };
    RECORDS[usize::from(*which) % RECORDS.len()](value);
    use weir_meta::tables::{GARBAGE, HELD, LINKS, LISTED, OWNER_LIMITS, SESSIONS, XATTRS};
    let _ = (LISTED.parts(value), LINKS.parts(value), HELD.parts(value), SESSIONS.parts(value));
    let _ = (GARBAGE.parts(value), XATTRS.parts(value), OWNER_LIMITS.parts(value));
    let _ = weir_meta::keys::after(value);
}
pub fn seeds() -> Vec<Vec<u8>> {
    let values = [names(), inodes(), sessions(), volumes(), relations()].into_iter().flatten();
    values.map(|(which, value)| [&[which], &value[..]].concat()).collect()
}

/// A record's bytes with its place among `RECORDS`.
type Seed = (u8, Vec<u8>);

const TIME: Time = Time { nanos: 1_700_000_000_123_456_789 };
const INO: InodeId = InodeId(0x0200_0003);
const KIND: FileKind = FileKind::Regular;

fn names() -> Vec<Seed> {
    let (parent, volume) = (InodeId::ROOT, VolumeId(3));
    let access =
        record::Access { mode: 0o755, uid: 1, gid: 2, parent, atime: TIME, btime: TIME, volume, cookie: 7 };
    let tally = record::Tally {
        mtime: TIME,
        ctime: TIME,
        entries: 2,
        subdirectories: 1,
        serial: 3,
        next_n: 4,
        next_cookie: 5,
    };
    let list = b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x05\0\x0a\0\0\0\x04\0\x05\0\xff\xff\xff\xff\
        \x10\0\x05\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
    vec![
        (0, access.to_value()),
        (0, record::Access { volume: VolumeId::ROOT, ..access }.to_value()),
        (0, record::Access { cookie: 0, ..access }.to_value()),
        (1, tally.to_value()),
        (2, record::Link { ino: INO, kind: KIND, cookie: 3 }.to_value()),
        (3, record::Listed { ino: INO, kind: KIND, name: b"name"[..].into() }.to_value()),
        (9, list.to_vec()),
    ]
}

fn inodes() -> Vec<Seed> {
    let inode = record::Inode {
        kind: KIND,
        mode: 0o644,
        uid: 1,
        gid: 2,
        nlink: 1,
        rdev: 0,
        size: 10,
        allocated: 11,
        atime: TIME,
        mtime: TIME,
        ctime: TIME,
        btime: TIME,
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
    let shared = record::Writing { shared_at: Some(9), ..inode.writing.clone() };
    vec![
        (4, inode.to_value()),
        (4, record::Inode { writing: shared, ..inode.clone() }.to_value()),
        (4, record::Inode { evicted: 9, pinned: true, ..inode }.to_value()),
    ]
}

fn sessions() -> Vec<Seed> {
    let session = record::SessionRecord { client: "node".into(), opened: TIME, process: "host/7".into() };
    let slot = record::SlotRecord { seq: 5, method: 130, reply: b"reply"[..].into() };
    let truncation = record::StripeTruncation::ALL;
    let garbage = record::Garbage { first_pg: PgId(0), pg_count: 8, truncation };
    vec![(5, session.to_value()), (6, slot.to_value()), (7, garbage.to_value())]
}

fn volumes() -> Vec<Seed> {
    let volume = record::VolumeRecord {
        name: "data".into(),
        root: INO,
        entry: b"name"[..].into(),
        path: b"/name"[..].into(),
        owner: 1,
        admins: vec![2, 3],
        quota: volume::Quota { bytes_hard: Some(5), inodes_soft: Some(2), ..volume::Quota::NONE },
        bytes_over_since: Some(TIME),
        inodes_over_since: None,
        policy: volume::Policy { scheme: None, pool: Some("disk".into()) },
        created: TIME,
        deleting: false,
        retention: volume::Retention { trash_s: 7, ..volume::Retention::NOTHING },
        write_floor: 3,
    };
    let trash = record::TrashRecord { dir: INO, until: TIME };
    let quota = Some(volume::Quota { bytes_soft: Some(5), ..volume::Quota::NONE });
    let owner = OwnerRecord { quota, bytes_over_since: Some(TIME), inodes_over_since: None };
    vec![(8, volume.to_value()), (12, trash.to_value()), (13, owner.to_value())]
}

fn relations() -> Vec<Seed> {
    let rules = weir_proto::relation::RelationRules {
        include: vec!["*.h5".into()],
        exclude: vec!["/a/".into(), "b?".into()],
        bytes_per_s: Some(1 << 30),
    };
    let dirty = related::DirtyRange { len: 9, since: TIME, oldest: 1, newest: 2 };
    let places = vec![related::RemotePlace { dir: INO, name: b"name"[..].into() }];
    let remote = related::RemoteEntry {
        kind: KIND,
        places,
        fingerprint: b"print"[..].into(),
        complete: Some(9),
        writing: true,
    };
    vec![
        (14, related::RulesRecord { rules, scans_again: true }.to_value()),
        (16, dirty.to_value()),
        (17, remote.to_value()),
        (19, related::ReceiptRecord { len: 9, sums: vec![1, 2] }.to_value()),
        (20, related::ConflictRecord { diverged: true, why: "why".into(), at: TIME }.to_value()),
    ]
}
