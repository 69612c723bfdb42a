//! The values behind the keys, byte by byte: a version byte, then the fields in the order of their
//! declaration, in the layout of `weir_proto::wire` (little-endian).
//!
//! A record that does not decode is damage in the store and becomes an error that names the key's meaning.
//! Knows nothing of rules: `namespace` has them.

use bytes::Bytes;
use weir_proto::data::FENCE_GONE;
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, FileKind, Layers, Lease, LeaseKind, Time, Usage};
use weir_proto::posix::{MODE_BITS, Owned};
use weir_proto::relation::{By, What};
use weir_proto::volume::{Policy, Quota, Retention, Volume};
use weir_proto::{Error, InodeId, PgId, Reader, Result, SessionId, VolumeId, Wire, Writer, wire_struct};

/// In `mode` of `Access` and `Inode`: there is an access control list (of a directory: of either kind) under
/// `X/`.
pub const HAS_ACL: u32 = 1 << 31;
/// In `mode` of `Access`: the directory's entries are not all known here yet, only their source
/// (`namespace::import`).
pub const NOT_ENUMERATED: u32 = 1 << 30;
/// `parent` of a file that was made without a name.
pub const NEVER_NAMED: InodeId = InodeId(0);
/// Version of every record's layout.
const RECORD_VERSION: u8 = 1;
/// Room for any record without bytes of variable length.
const RECORD_BYTES: usize = 160;
/// Room for a slot with most replies.
const SLOT_BYTES: usize = 384;

/// `A/`: the fields for a permission check and a walk towards the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub parent: InodeId,
    pub atime: Time,
    pub btime: Time,
    /// Given at creation, for ever: a directory never leaves its volume.
    pub volume: VolumeId,
    /// The place of its name in the parent directory; 0: it has none.
    pub cookie: u64,
}
wire_struct!(Access {
    mode: u32,
    uid: u32,
    gid: u32,
    parent: InodeId,
    atime: Time,
    btime: Time,
    volume: VolumeId,
    cookie: u64,
});

impl Access {
    pub fn owned(&self) -> Owned {
        Owned { mode: self.mode, uid: self.uid, gid: self.gid }
    }
    pub fn set_owned(&mut self, to: Owned) {
        Owned { mode: self.mode, uid: self.uid, gid: self.gid } = to;
    }
}

/// `T/`: the fields that each change of a directory's names touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tally {
    pub mtime: Time,
    pub ctime: Time,
    pub entries: u64,
    pub subdirectories: u64,
    /// The range of numbers for its new inodes: `(serial << 24) | n`.
    pub serial: u64,
    /// The next n; past its range the directory takes a new serial.
    pub next_n: u32,
    /// The next listing cookie; none is used twice, except for an entry that replaces a name.
    pub next_cookie: u64,
}
wire_struct!(Tally {
    mtime: Time,
    ctime: Time,
    entries: u64,
    subdirectories: u64,
    serial: u64,
    next_n: u32,
    next_cookie: u64,
});

/// `E/`: the target of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    pub ino: InodeId,
    pub kind: FileKind,
    pub cookie: u64,
}
wire_struct!(Link { ino: InodeId, kind: FileKind, cookie: u64 });

/// `K/`: a name in listing order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    pub ino: InodeId,
    pub kind: FileKind,
    pub name: Bytes,
}
wire_struct!(Listed { ino: InodeId, kind: FileKind, name: Bytes });

/// `I/`: everything that is not a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inode {
    pub kind: FileKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// 0: it has no name, or none any more, and a session has it open (see `H/`).
    pub nlink: u32,
    pub rdev: u32,
    pub size: u64,
    /// As its writers reported; the part that is not evicted is charged to `parent` and its ancestors while a
    /// name is left.
    pub allocated: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub btime: Time,
    pub data_version: u64,
    pub layout: Option<Layout>,
    /// Directory of the first link: it is charged. `NEVER_NAMED`: it has had no name yet and may get one. Of
    /// a file without a name any more: its volume's topmost directory.
    pub parent: InodeId,
    pub writing: Writing,
    /// Bytes of its ranges under `W/`.
    pub evicted: u64,
    /// Never evicted.
    pub pinned: bool,
    /// Where its data is, if not in the object with the inode's number.
    pub layers: Option<Layers>,
    /// The place of its first name in `parent`; 0: it has none.
    pub cookie: u64,
}

impl Inode {
    pub fn owned(&self) -> Owned {
        Owned { mode: self.mode, uid: self.uid, gid: self.gid }
    }
    pub fn set_owned(&mut self, to: Owned) {
        Owned { mode: self.mode, uid: self.uid, gid: self.gid } = to;
    }
}

/// The state of a file's data on targets: its writers, and what they may have left there.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Writing {
    /// Raised each time a writer other than the last one acquires the right to write.
    pub token_epoch: u32,
    /// The last session that acquired the right to write; 0 none.
    pub writer: SessionId,
    /// The writer may have left uncommitted bytes on targets.
    pub dirty: bool,
    /// A writer died and its data is not recovered yet.
    pub recover: bool,
    pub data_end: u64,
    /// Writers other than `writer` may have left bytes on targets, too: the number of sessions that had died
    /// in the namespace when that began. (Not which sessions: there may be thousands.)
    pub shared_at: Option<u64>,
}

/// In the flags of an inode's record: never evicted.
const PINNED: u8 = 1;
/// Its data is in an object of another number, which follows.
const LAYERED: u8 = 2;
/// The place of its first name follows.
const PLACED: u8 = 4;
/// `shared_at` follows.
const SHARED: u8 = 8;
/// `evicted` follows.
const EVICTED: u8 = 16;
const INODE_FLAGS: u8 = PINNED | LAYERED | PLACED | SHARED | EVICTED;

macro_rules! inode_wire {
    ($($field:ident: $ty:ty),*; $($of_writing:ident: $its_ty:ty),*) => {
        impl Wire for Inode {
            fn encode(&self, w: &mut Writer) {
                $(self.$field.encode(w);)*
                $(self.writing.$of_writing.encode(w);)*
                let flags = [
                    (PINNED, self.pinned),
                    (LAYERED, self.layers.is_some()),
                    (PLACED, self.cookie != 0),
                    (SHARED, self.writing.shared_at.is_some()),
                    (EVICTED, self.evicted != 0),
                ];
                flags.iter().filter(|(_, is_set)| *is_set).fold(0u8, |all, (flag, _)| all | flag).encode(w);
                if let Some(layers) = &self.layers {
                    layers.encode(w);
                }
                if self.cookie != 0 {
                    self.cookie.encode(w);
                }
                if let Some(deaths) = self.writing.shared_at {
                    deaths.encode(w);
                }
                if self.evicted != 0 {
                    self.evicted.encode(w);
                }
            }
            fn decode(r: &mut Reader<'_>) -> Result<Inode> {
                $(let $field = <$ty>::decode(r)?;)*
                $(let $of_writing = <$its_ty>::decode(r)?;)*
                let flags = u8::decode(r)?;
                if flags & !INODE_FLAGS != 0 {
                    return Err(Error::unsupported(format!("flags {flags:#x} of an inode")));
                }
                let layers = if flags & LAYERED == 0 { None } else { Some(Layers::decode(r)?) };
                let cookie = if flags & PLACED == 0 { 0 } else { following(r)? };
                let shared_at = if flags & SHARED == 0 { None } else { Some(u64::decode(r)?) };
                let evicted = if flags & EVICTED == 0 { 0 } else { following(r)? };
                let pinned = flags & PINNED != 0;
                let writing = Writing { $($of_writing,)* shared_at };
                Ok(Inode { $($field,)* writing, evicted, pinned, layers, cookie })
            }
        }
    };
}

/// A number that is encoded only if it is not 0.
fn following(r: &mut Reader<'_>) -> Result<u64> {
    match u64::decode(r)? {
        0 => Err(Error::damaged("a number of an inode is written that is none")),
        number => Ok(number),
    }
}

inode_wire!(
    kind: FileKind, mode: u32, uid: u32, gid: u32, nlink: u32, rdev: u32, size: u64, allocated: u64, atime: Time,
    mtime: Time, ctime: Time, btime: Time, data_version: u64, layout: Option<Layout>, parent: InodeId;
    token_epoch: u32, writer: SessionId, dirty: bool, recover: bool, data_end: u64
);

/// `S/`: a client's registration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionRecord {
    pub client: String,
    pub opened: Time,
    /// As the client reported it; empty: not reported.
    pub process: String,
}
wire_struct!(SessionRecord { client: String, opened: Time, process: String });

/// `U/`: the last change of a slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotRecord {
    pub seq: u64,
    pub method: u16,
    /// As encoded for the wire, without leases: those are granted again when it is repeated.
    pub reply: Bytes,
}
wire_struct!(SlotRecord { seq: u64, method: u16, reply: Bytes });

/// The value of a slot, with the reply encoded in place.
pub fn slot_value(seq: u64, method: u16, reply: &impl Wire) -> Vec<u8> {
    let mut w = Writer { bytes: Vec::with_capacity(SLOT_BYTES) };
    w.bytes.push(RECORD_VERSION);
    (seq, method).encode(&mut w);
    let at = w.bytes.len();
    0u32.encode(&mut w);
    reply.encode(&mut w);
    let length = (w.bytes.len() - at - size_of::<u32>()) as u32;
    w.bytes[at..at + size_of::<u32>()].copy_from_slice(&length.to_le_bytes());
    w.bytes
}

/// `W/`: bytes from the key's offset to before `to` are at home only. They begin with a stripe, and end with
/// one or at the file's end when they were evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EvictedRange {
    pub to: u64,
    /// The highest token epoch under which they were assigned to a mover for recall; 0: never.
    pub handed: u32,
}
wire_struct!(EvictedRange { to: u64, handed: u32 });

/// Stripes of a file that hold nothing written with a lower token epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StripeTruncation {
    pub from_stripe: u64,
    /// Exclusive; `u64::MAX`: to the end of the file.
    pub to_stripe: u64,
    pub token_epoch: u32,
}
wire_struct!(StripeTruncation { from_stripe: u64, to_stripe: u64, token_epoch: u32 });

impl StripeTruncation {
    /// The truncation of a deleted file.
    pub const ALL: StripeTruncation =
        StripeTruncation { from_stripe: 0, to_stripe: u64::MAX, token_epoch: FENCE_GONE };
}

/// `G/`: a deleted file, or evicted stripes of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Garbage {
    /// First group and number of groups that its cells are on.
    pub first_pg: PgId,
    pub pg_count: u32,
    pub truncation: StripeTruncation,
}
wire_struct!(Garbage { first_pg: PgId, pg_count: u32, truncation: StripeTruncation });

/// `v/`: a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeRecord {
    pub name: String,
    /// Its topmost directory.
    pub root: InodeId,
    /// The name of that in the directory above.
    pub entry: Bytes,
    pub path: Bytes,
    pub owner: u32,
    pub admins: Vec<u32>,
    pub quota: Quota,
    pub bytes_over_since: Option<Time>,
    pub inodes_over_since: Option<Time>,
    pub policy: Policy,
    pub created: Time,
    /// The volume's names are gone and its content is being removed.
    pub deleting: bool,
    pub retention: Retention,
    /// Fewest current members of a placement group for a write; 0: as many as there are data cells. Written
    /// only if it is set: older programs do not know it.
    pub write_floor: u8,
}
wire_struct!(VolumeRecord {
    name: String,
    root: InodeId,
    entry: Bytes,
    path: Bytes,
    owner: u32,
    admins: Vec<u32>,
    quota: Quota,
    bytes_over_since: Option<Time>,
    inodes_over_since: Option<Time>,
    policy: Policy,
    created: Time,
    deleting: bool,
    retention: Retention,
    write_floor: u8,
});

/// `s/`: a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotRecord {
    pub name: String,
    pub created: Time,
    /// The space that only it holds is being freed.
    pub deleting: bool,
    /// Taken by the volume's schedule.
    pub scheduled: bool,
    /// Bytes of the volume that were at home only.
    pub evicted: u64,
}
wire_struct!(SnapshotRecord { name: String, created: Time, deleting: bool, scheduled: bool, evicted: u64 });

/// `t/`: a volume's trash, or the part of one period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrashRecord {
    pub dir: InodeId,
    /// Nothing more is put there from then on.
    pub until: Time,
}
wire_struct!(TrashRecord { dir: InodeId, until: Time });

/// `y/<volume>/0`: a volume that was made from a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CloneRecord {
    pub source: VolumeId,
    pub snapshot: u32,
    /// The snapshot is deleted when all is enumerated.
    pub own: bool,
    /// All of its names are known.
    pub listed: bool,
}
wire_struct!(CloneRecord { source: VolumeId, snapshot: u32, own: bool, listed: bool });

/// `y/<volume>/<dir>`: a directory of a clone that is not enumerated yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotEnumeratedRecord {
    /// The directory in the snapshot.
    pub source: InodeId,
    /// The cookie of it up to which it is enumerated.
    pub after: u64,
}
wire_struct!(NotEnumeratedRecord { source: InodeId, after: u64 });

/// `Z/`: bytes from the key's offset to before `to` are in an older object. They begin with a stripe, and end
/// with one or at the file's end when it got its present object (or has been truncated since).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRecord {
    pub to: u64,
    pub object: InodeId,
    /// The token epoch under which a client copies them; 0: none does.
    pub handed: u32,
    /// The object is to be truncated with this token epoch before it is copied from; 0: it can have no
    /// writer.
    pub fence: u32,
    /// First group and number of groups that the object's cells are on.
    pub first_pg: PgId,
    pub pg_count: u32,
}
wire_struct!(LayerRecord {
    to: u64,
    object: InodeId,
    handed: u32,
    fence: u32,
    first_pg: PgId,
    pg_count: u32
});

impl VolumeRecord {
    /// The volume as it is shown.
    pub fn show(self, id: VolumeId, usage: Usage, in_trash: Usage) -> Volume {
        Volume {
            id,
            name: self.name,
            root: self.root,
            path: self.path,
            owner: self.owner,
            admins: self.admins,
            quota: self.quota,
            bytes_over_since: self.bytes_over_since,
            inodes_over_since: self.inodes_over_since,
            policy: self.policy,
            retention: self.retention,
            created: self.created,
            deleting: self.deleting,
            usage,
            in_trash,
        }
    }
}
/// `C/` and `O/`: a change of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangeRecord {
    pub at: Time,
    pub what: What,
    /// In `O/`: a mover was assigned it.
    pub tried: bool,
    pub by: By,
}
wire_struct!(ChangeRecord { at: Time, what: What, tried: bool, by: By });

/// The layout of a change before it named the client.
struct FirstChange {
    at: Time,
    what: What,
    tried: bool,
}
wire_struct!(FirstChange { at: Time, what: What, tried: bool });

/// A value with its version byte.
pub trait Record: Wire {
    /// The layout version that is written.
    const VERSION: u8 = RECORD_VERSION;
    fn decode_version(version: u8, r: &mut Reader<'_>) -> Result<Self> {
        if version == Self::VERSION { Self::decode(r) } else { Err(unknown_version(version, Self::VERSION)) }
    }
    fn to_value(&self) -> Vec<u8> {
        let mut w = Writer { bytes: Vec::with_capacity(RECORD_BYTES) };
        w.bytes.push(Self::VERSION);
        self.encode(&mut w);
        w.bytes
    }
    /// `what` names the record in the error.
    fn from_value(value: &[u8], what: impl FnOnce() -> String) -> Result<Self> {
        decode_versioned(value)
            .map_err(|e| Error::damaged(format!("the record of {} is damaged: {e}", what())))
    }
}
impl Record for Access {}
impl Record for Tally {}
impl Record for Link {}
impl Record for Listed {}
impl Record for Inode {}
impl Record for SessionRecord {}
impl Record for SlotRecord {}
impl Record for Garbage {}
impl Record for EvictedRange {}
/// Version 2 has the last field. It is written only if that is not 0.
impl Record for VolumeRecord {
    const VERSION: u8 = 2;
    fn decode_version(version: u8, r: &mut Reader<'_>) -> Result<VolumeRecord> {
        match version {
            RECORD_VERSION => {
                let fields = r.take(r.remaining())?;
                VolumeRecord::from_bytes(&[fields, &[0]].concat())
            }
            Self::VERSION => VolumeRecord::decode(r),
            n => Err(unknown_version(n, Self::VERSION)),
        }
    }
    fn to_value(&self) -> Vec<u8> {
        let mut w = Writer { bytes: Vec::with_capacity(RECORD_BYTES) };
        w.bytes.push(if self.write_floor == 0 { RECORD_VERSION } else { Self::VERSION });
        self.encode(&mut w);
        if self.write_floor == 0 {
            w.bytes.pop();
        }
        w.bytes
    }
}
impl Record for ChangeRecord {
    const VERSION: u8 = 2;
    fn decode_version(version: u8, r: &mut Reader<'_>) -> Result<ChangeRecord> {
        match version {
            RECORD_VERSION => {
                let FirstChange { at, what, tried } = FirstChange::decode(r)?;
                Ok(ChangeRecord { at, what, tried, by: By::default() })
            }
            Self::VERSION => ChangeRecord::decode(r),
            n => Err(unknown_version(n, Self::VERSION)),
        }
    }
}
impl Record for SnapshotRecord {}
impl Record for LayerRecord {}
impl Record for TrashRecord {}
impl Record for CloneRecord {}
impl Record for NotEnumeratedRecord {}

fn decode_versioned<T: Record>(value: &[u8]) -> Result<T> {
    let mut r = Reader::new(value);
    let version = u8::decode(&mut r)?;
    let record = T::decode_version(version, &mut r)?;
    r.finish()?;
    Ok(record)
}

pub fn unknown_version(version: u8, known: u8) -> Error {
    Error::unsupported(format!("layout version {version}, this program knows {known}"))
}

impl Inode {
    pub fn attr(&self, ino: InodeId) -> Attr {
        Attr {
            ino,
            kind: self.kind,
            mode: self.mode & MODE_BITS,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            rdev: self.rdev,
            size: self.size,
            allocated: self.allocated,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            data_version: self.data_version,
            layout: self.layout,
            acl: self.mode & HAS_ACL != 0,
            evicted: self.evicted,
            layers: self.layers,
        }
    }
    /// The object of its data.
    pub fn object(&self, ino: InodeId) -> InodeId {
        self.layers.map_or(ino, |layers| layers.object)
    }
    /// Bytes of it that are in older objects.
    pub fn layered(&self) -> u64 {
        self.layers.map_or(0, |layers| layers.bytes)
    }
    /// The bytes of the file that take space here.
    pub fn online(&self) -> u64 {
        self.allocated.saturating_sub(self.evicted)
    }
    /// The fields of a lease on it, except the kind, which is granted later.
    pub fn lease(&self, recover: bool) -> Lease {
        let (kind, limited) = (LeaseKind::None, VolumeId(0));
        Lease {
            kind,
            token_epoch: self.writing.token_epoch,
            recover,
            data_end: self.writing.data_end,
            limited,
            map_version: 0,
        }
    }
    /// Whether a target may hold cells of it.
    pub fn may_have_cells(&self) -> bool {
        self.kind == FileKind::Regular
            && (self.writing.dirty || self.writing.recover || self.writing.data_end > 0)
    }
}

/// A directory's attributes.
pub fn directory_attr(dir: InodeId, access: &Access, tally: &Tally) -> Attr {
    Attr {
        ino: dir,
        kind: FileKind::Directory,
        mode: access.mode & MODE_BITS,
        uid: access.uid,
        gid: access.gid,
        nlink: u32::try_from(tally.subdirectories.saturating_add(2)).unwrap_or(u32::MAX),
        rdev: 0,
        size: tally.entries,
        allocated: 0,
        atime: access.atime,
        mtime: tally.mtime,
        ctime: tally.ctime,
        btime: access.btime,
        data_version: 0,
        layout: None,
        acl: access.mode & HAS_ACL != 0,
        evicted: 0,
        layers: None,
    }
}

/// The lease of a reply without a grant.
pub fn no_lease() -> Lease {
    Lease {
        kind: LeaseKind::None,
        token_epoch: 0,
        recover: false,
        data_end: 0,
        limited: VolumeId(0),
        map_version: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_records_never_changes() {
        let link = Link { ino: InodeId(0x0102), kind: FileKind::Symlink, cookie: 3 };
        assert_eq!(link.to_value(), [1, 2, 1, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0]);
        let time = |nanos| Time { nanos };
        let inode = Inode {
            kind: FileKind::Regular,
            mode: 0o644,
            uid: 1,
            gid: 2,
            nlink: 1,
            rdev: 0,
            size: 10,
            allocated: 11,
            atime: time(1),
            mtime: time(2),
            ctime: time(3),
            btime: time(4),
            data_version: 5,
            layout: None,
            parent: InodeId::ROOT,
            writing: Writing {
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
            cookie: 0,
        };
        let value = inode.to_value();
        assert_eq!(value.len(), 1 + 1 + 5 * 4 + 2 * 8 + 4 * 8 + 8 + 1 + 8 + 4 + 8 + 2 + 8 + 1);
        assert_eq!(Inode::from_value(&value, String::new).unwrap(), inode);
        let (plain, flags) = value.split_at(value.len() - 1);
        assert_eq!(flags, [0]);
        let later = [2, 1, 0, 0, 0, 0, 0, 0];
        let placed = Inode { cookie: 0x0102, ..inode.clone() };
        assert_eq!(placed.to_value(), [plain, &[4], &later].concat());
        let writing = |deaths| Writing { shared_at: Some(deaths), ..inode.writing.clone() };
        let shared = Inode { writing: writing(0x0102), ..inode.clone() };
        assert_eq!(shared.to_value(), [plain, &[8], &later].concat());
        let away = Inode { evicted: 0x0102, pinned: true, ..inode.clone() };
        assert_eq!(away.to_value(), [plain, &[16 | 1], &later].concat());
        let layers = Some(Layers { object: InodeId(1 << 62 | 9), bytes: 11 });
        let layered = Inode { layers, ..inode.clone() };
        assert_eq!(layered.to_value().len(), value.len() + 16);
        let all = Inode { layers, cookie: 3, writing: writing(0), evicted: 7, pinned: true, ..inode.clone() };
        for written in [placed, shared, away, layered, all] {
            assert_eq!(Inode::from_value(&written.to_value(), String::new).unwrap(), written);
        }
        for wrong in [[plain, &[32]].concat(), [plain, &[4], &[0; 8]].concat(), plain.to_vec()] {
            assert!(Inode::from_value(&wrong, String::new).is_err());
        }
        let garbage = Garbage { first_pg: PgId(3), pg_count: 4, truncation: StripeTruncation::ALL };
        let value = garbage.to_value();
        assert_eq!(value[..9], [1, 3, 0, 0, 0, 4, 0, 0, 0]);
        assert_eq!(value.len(), 9 + 8 + 8 + 4);
        assert_eq!(Garbage::from_value(&value, String::new).unwrap(), garbage);
        let slot = SlotRecord { seq: 5, method: 130, reply: Bytes::from(inode.to_bytes()) };
        assert_eq!(slot_value(5, 130, &inode), slot.to_value());
    }

    #[test]
    fn no_record_is_known_by_its_length() {
        let time = Time { nanos: 7 };
        let access = Access {
            mode: 0o755,
            uid: 1,
            gid: 2,
            parent: InodeId::ROOT,
            atime: time,
            btime: time,
            volume: VolumeId(0x0102),
            cookie: 3,
        };
        let value = access.to_value();
        assert_eq!(value.len(), 1 + 3 * 4 + 3 * 8 + 4 + 8);
        assert_eq!(Access::from_value(&value, String::new).unwrap(), access);
        let snapshot = SnapshotRecord {
            name: "s".into(),
            created: Time { nanos: 1 },
            deleting: false,
            scheduled: true,
            evicted: 3,
        };
        let expected = [1, 1, 0, 0, 0, b's', 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(snapshot.to_value(), expected);
        assert_eq!(SnapshotRecord::from_value(&expected, String::new).unwrap(), snapshot);
        for end in 1..value.len() {
            assert!(Access::from_value(&value[..end], String::new).is_err(), "cut to {end}");
        }
        for end in 1..expected.len() {
            assert!(SnapshotRecord::from_value(&expected[..end], String::new).is_err(), "cut to {end}");
        }
    }

    #[test]
    fn a_volume_without_a_floor_is_written_as_before() {
        let plain = VolumeRecord {
            name: "v".into(),
            root: InodeId(1),
            entry: Bytes::from_static(b"v"),
            path: Bytes::from_static(b"/v"),
            owner: 3,
            admins: vec![],
            quota: Quota::NONE,
            bytes_over_since: None,
            inodes_over_since: None,
            policy: Policy { scheme: None, pool: None },
            created: Time { nanos: 5 },
            deleting: false,
            retention: Retention::NOTHING,
            write_floor: 0,
        };
        let floored = VolumeRecord { write_floor: 5, ..plain.clone() };
        let (value, with_floor) = (plain.to_value(), floored.to_value());
        assert_eq!((value[0], with_floor[0]), (1, 2));
        assert_eq!(with_floor[1..], [&value[1..], &[5]].concat());
        assert_eq!(VolumeRecord::from_value(&value, String::new).unwrap(), plain);
        assert_eq!(VolumeRecord::from_value(&with_floor, String::new).unwrap(), floored);
        for wrong in [&value[..value.len() - 1], &with_floor[..value.len()], &[&value[..], &[0]].concat()] {
            assert!(VolumeRecord::from_value(wrong, String::new).is_err());
        }
    }

    #[test]
    fn a_damaged_record_is_an_error_that_names_it() {
        let error = Link::from_value(&[1, 2], || "name x".into()).unwrap_err();
        assert!(error.context.contains("name x"), "{error}");
        assert!(Link::from_value(&[], String::new).is_err());
        assert!(Link::from_value(&[9; 18], String::new).unwrap_err().context.contains("version 9"));
    }
}
