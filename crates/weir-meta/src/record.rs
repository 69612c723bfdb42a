//! The values behind the keys, byte by byte: a version byte, then the fields in the order of their declaration, in
//! the layout of `weir_proto::wire` (little-endian).
//!
//! A record that does not decode is damage in the store and becomes an error that names the key's meaning.
//! Knows nothing of rules: `namespace` has them.

use bytes::Bytes;
use weir_proto::data::FENCE_GONE;
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, FileKind, Layers, Lease, LeaseKind, Time, Usage};
use weir_proto::relation::What;
use weir_proto::volume::{Policy, Quota, Retention, Volume};
use weir_proto::{Error, InodeId, PgId, Reader, Result, SessionId, VolumeId, Wire, Writer, wire_struct};

/// In `mode` of `Access` and `Inode`: there is an access control list (of a directory: of either kind) under `X/`.
pub const HAS_ACL: u32 = 1 << 31;
/// In `mode` of `Access`: what is in the directory is not all known here yet, but where it comes from (`namespace::import`).
pub const NOT_ENUMERATED: u32 = 1 << 30;
/// In `mode` of an inode as it is stored: the place of its first name follows.
const PLACED: u32 = 1 << 29;
/// All that chmod may set.
pub const MODE_BITS: u32 = 0o7777;
/// `parent` of a file that was made without a name.
pub const NEVER_NAMED: InodeId = InodeId(0);
/// Version of every record's layout.
const RECORD_VERSION: u8 = 1;
/// Room for any record without bytes of variable length.
const RECORD_BYTES: usize = 160;
/// Room for a slot with most replies.
const SLOT_BYTES: usize = 384;

/// `A/`: what a permission check and a walk towards the root need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub parent: InodeId,
    pub atime: Time,
    pub btime: Time,
    /// Given at birth, for ever: a directory never leaves its volume.
    pub volume: VolumeId,
    /// The place of its name in the directory above; 0: it got its name before this was written down.
    pub cookie: u64,
}
impl Wire for Access {
    fn encode(&self, w: &mut Writer) {
        (self.mode, self.uid).encode(w);
        (self.gid, self.parent).encode(w);
        (self.atime, self.btime).encode(w);
        if (self.volume, self.cookie) != (VolumeId::ROOT, 0) {
            self.volume.encode(w);
        }
        if self.cookie != 0 {
            self.cookie.encode(w);
        }
    }
    /// The volume came later: what has none is in the root volume. The cookie came after it.
    fn decode(r: &mut Reader<'_>) -> Result<Access> {
        let (mode, uid, gid) = (u32::decode(r)?, u32::decode(r)?, u32::decode(r)?);
        let (parent, atime, btime) = (InodeId::decode(r)?, Time::decode(r)?, Time::decode(r)?);
        let volume = if r.remaining() == 0 { VolumeId::ROOT } else { VolumeId::decode(r)? };
        let cookie = if r.remaining() == 0 { 0 } else { u64::decode(r)? };
        Ok(Access { mode, uid, gid, parent, atime, btime, volume, cookie })
    }
}

/// `T/`: what each change of a directory's names touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tally {
    pub mtime: Time,
    pub ctime: Time,
    pub entries: u64,
    pub subdirectories: u64,
    /// The range that inodes are born in: `(serial << 24) | n`.
    pub serial: u64,
    /// The next n; past its range the directory takes a new serial.
    pub next_n: u32,
    /// The next listing cookie; none is given twice but to what takes a name over.
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

/// `E/`: what a name leads to.
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
    /// 0: it has no name, or none any more, and somebody has it open (see `H/`).
    pub nlink: u32,
    pub rdev: u32,
    pub size: u64,
    /// As its writers told; what of it is not evicted is charged to `parent` and its ancestors while a name is left.
    pub allocated: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub btime: Time,
    pub data_version: u64,
    pub layout: Option<Layout>,
    /// Directory of the first link: it is charged. `NEVER_NAMED`: it has had no name yet and may get one. Of a file without a name
    /// any more: its volume's topmost directory.
    pub parent: InodeId,
    /// Raised each time a writer that is not the last one gets the right to write.
    pub token_epoch: u32,
    /// The last session with the right to write; 0 none.
    pub writer: SessionId,
    /// The writer may have left something uncommitted on targets.
    pub dirty: bool,
    /// A writer died and its data is not recovered yet.
    pub recover: bool,
    pub data_end: u64,
    /// Others than `writer` may have left something on targets, too: how many sessions had died in the namespace when that
    /// began. (Not which sessions: there may be thousands.)
    pub shared_at: Option<u64>,
    /// Bytes of its ranges under `W/`.
    pub evicted: u64,
    /// Never evicted.
    pub pinned: bool,
    /// Where its data is, if not in the object with the inode's number.
    pub layers: Option<Layers>,
    /// The place of its first name in `parent`; 0: it has none, or got it before this was written down.
    pub cookie: u64,
}

/// In the flags of an inode's record.
const PINNED: u32 = 1;
/// Its data is in an object of another number, which follows.
const LAYERED: u32 = 2;

macro_rules! inode_wire {
    ($($field:ident: $ty:ty),*) => {
        impl Wire for Inode {
            fn encode(&self, w: &mut Writer) {
                (self.kind, self.mode | if self.cookie != 0 { PLACED } else { 0 }).encode(w);
                $(self.$field.encode(w);)*
                if self.cookie != 0 {
                    self.cookie.encode(w);
                }
                if (self.evicted, self.pinned, self.layers) != (0, false, None) {
                    (self.shared_at, self.evicted).encode(w);
                    let pinned = if self.pinned { PINNED } else { 0 };
                    (pinned | if self.layers.is_some() { LAYERED } else { 0 }).encode(w);
                    if let Some(layers) = &self.layers {
                        layers.encode(w);
                    }
                } else if let Some(deaths) = self.shared_at {
                    deaths.encode(w);
                }
            }
            /// What is behind `data_end` came later: the cookie, which `mode` tells of; then nothing for most files, or
            /// `shared_at` alone, or all of it.
            fn decode(r: &mut Reader<'_>) -> Result<Inode> {
                let (kind, mode) = <(FileKind, u32)>::decode(r)?;
                $(let $field = <$ty>::decode(r)?;)*
                let cookie = if mode & PLACED == 0 { 0 } else { u64::decode(r)? };
                let mode = mode & !PLACED;
                let (shared_at, evicted, flags) = match r.remaining() {
                    0 => (None, 0, 0),
                    8 => (Some(u64::decode(r)?), 0, 0),
                    _ => (Option::<u64>::decode(r)?, u64::decode(r)?, u32::decode(r)?),
                };
                if flags > PINNED | LAYERED {
                    return Err(Error::unsupported(format!("flags {flags:#x} of an inode")));
                }
                let layers = if flags & LAYERED == 0 { None } else { Some(Layers::decode(r)?) };
                let pinned = flags & PINNED != 0;
                Ok(Inode { kind, mode, $($field,)* shared_at, evicted, pinned, layers, cookie })
            }
        }
    };
}
inode_wire!(
    uid: u32, gid: u32, nlink: u32, rdev: u32, size: u64, allocated: u64, atime: Time,
    mtime: Time, ctime: Time, btime: Time, data_version: u64, layout: Option<Layout>, parent: InodeId,
    token_epoch: u32, writer: SessionId, dirty: bool, recover: bool, data_end: u64
);

/// `S/`: a client's registration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionRecord {
    pub client: String,
    pub opened: Time,
    /// As the client told it; empty: not told.
    pub process: String,
}
impl Wire for SessionRecord {
    fn encode(&self, w: &mut Writer) {
        self.client.encode(w);
        self.opened.encode(w);
        self.process.encode(w);
    }
    /// The process came later: records without it are read, too.
    fn decode(r: &mut Reader<'_>) -> Result<SessionRecord> {
        let (client, opened) = (String::decode(r)?, Time::decode(r)?);
        let process = if r.remaining() == 0 { String::new() } else { String::decode(r)? };
        Ok(SessionRecord { client, opened, process })
    }
}

/// `U/`: the last change of a slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotRecord {
    pub seq: u64,
    pub method: u16,
    /// As encoded for the wire, with no leases in it: those are granted anew when it is sent again.
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

/// `W/`: bytes from the key's place to before `to` are at home only. They begin with a stripe, and end with one or where the
/// file ended when they were evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EvictedRange {
    pub to: u64,
    /// The token epoch under which they were given to a mover to bring back, the highest one; 0: never.
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
    /// Of a deleted file.
    pub const ALL: StripeTruncation =
        StripeTruncation { from_stripe: 0, to_stripe: u64::MAX, token_epoch: FENCE_GONE };
}

/// `G/`: a deleted file, or what was evicted of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Garbage {
    /// First group and number of groups that its cells are on.
    pub first_pg: PgId,
    pub pg_count: u32,
    pub truncation: StripeTruncation,
}
impl Wire for Garbage {
    fn encode(&self, w: &mut Writer) {
        (self.first_pg, self.pg_count).encode(w);
        if self.truncation != StripeTruncation::ALL {
            self.truncation.encode(w);
        }
    }
    /// The truncation came later: what has none is a deleted file.
    fn decode(r: &mut Reader<'_>) -> Result<Garbage> {
        let (first_pg, pg_count) = (PgId::decode(r)?, u32::decode(r)?);
        let truncation =
            if r.remaining() == 0 { StripeTruncation::ALL } else { StripeTruncation::decode(r)? };
        Ok(Garbage { first_pg, pg_count, truncation })
    }
}

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
    /// Its names are gone and what was in it goes, too.
    pub deleting: bool,
    pub retention: Retention,
}
macro_rules! volume_wire {
    ($($field:ident: $ty:ty),*) => {
        impl Wire for VolumeRecord {
            fn encode(&self, w: &mut Writer) {
                $(self.$field.encode(w);)*
                if self.retention != Retention::NOTHING {
                    self.retention.encode(w);
                }
            }
            /// Its retention came later: a volume without has neither trash nor a schedule.
            fn decode(r: &mut Reader<'_>) -> Result<VolumeRecord> {
                $(let $field = <$ty>::decode(r)?;)*
                let retention = if r.remaining() == 0 { Retention::NOTHING } else { Retention::decode(r)? };
                Ok(VolumeRecord { $($field,)* retention })
            }
        }
    };
}
volume_wire!(
    name: String, root: InodeId, entry: Bytes, path: Bytes, owner: u32, admins: Vec<u32>, quota: Quota,
    bytes_over_since: Option<Time>, inodes_over_since: Option<Time>, policy: Policy, created: Time, deleting: bool
);

/// `s/`: a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotRecord {
    pub name: String,
    pub created: Time,
    /// What only it held is being given back.
    pub deleting: bool,
    /// By the volume's schedule.
    pub scheduled: bool,
    /// Bytes of the volume that were at home only.
    pub evicted: u64,
}
impl Wire for SnapshotRecord {
    fn encode(&self, w: &mut Writer) {
        self.name.encode(w);
        (self.created, self.deleting).encode(w);
        if self.scheduled || self.evicted > 0 {
            self.scheduled.encode(w);
        }
        if self.evicted > 0 {
            self.evicted.encode(w);
        }
    }
    /// Schedules came later: what does not say was taken by somebody. So did the counting of what is at home only.
    fn decode(r: &mut Reader<'_>) -> Result<SnapshotRecord> {
        let (name, created, deleting) = (String::decode(r)?, Time::decode(r)?, bool::decode(r)?);
        let scheduled = r.remaining() > 0 && bool::decode(r)?;
        let evicted = if r.remaining() > 0 { u64::decode(r)? } else { 0 };
        Ok(SnapshotRecord { name, created, deleting, scheduled, evicted })
    }
}

/// `t/`: a volume's trash, or what was put there in a stretch of time.
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
    /// The snapshot goes when all is listed.
    pub own: bool,
    /// All of its names are known.
    pub listed: bool,
}
wire_struct!(CloneRecord { source: VolumeId, snapshot: u32, own: bool, listed: bool });

/// `y/<volume>/<dir>`: a directory of a clone that is still to be listed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotEnumeratedRecord {
    /// The directory of then.
    pub source: InodeId,
    /// Up to which cookie of that it is listed.
    pub after: u64,
}
wire_struct!(NotEnumeratedRecord { source: InodeId, after: u64 });

/// `Z/`: bytes from the key's place to before `to` are in an older object. They begin with a stripe, and end with one or where
/// the file ended when it got its present object (or has been truncated since).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRecord {
    pub to: u64,
    pub object: InodeId,
    /// The token epoch under which somebody copies them; 0: nobody does.
    pub handed: u32,
    /// The object is to be truncated with this token epoch before it is copied from; 0: nobody can be writing
    /// to it.
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
    /// As it is shown.
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
    /// In `O/`: a mover was told to do it.
    pub tried: bool,
}
wire_struct!(ChangeRecord { at: Time, what: What, tried: bool });

/// A value with its version byte.
pub trait Record: Wire {
    fn to_value(&self) -> Vec<u8> {
        let mut w = Writer { bytes: Vec::with_capacity(RECORD_BYTES) };
        w.bytes.push(RECORD_VERSION);
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
impl Record for VolumeRecord {}
impl Record for ChangeRecord {}
impl Record for SnapshotRecord {}
impl Record for LayerRecord {}
impl Record for TrashRecord {}
impl Record for CloneRecord {}
impl Record for NotEnumeratedRecord {}

fn decode_versioned<T: Wire>(value: &[u8]) -> Result<T> {
    let mut r = Reader::new(value);
    match u8::decode(&mut r)? {
        RECORD_VERSION => {}
        n => {
            return Err(Error::unsupported(format!(
                "layout version {n}, this program knows {RECORD_VERSION}"
            )));
        }
    }
    let record = T::decode(&mut r)?;
    r.finish()?;
    Ok(record)
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
    /// Where its data goes.
    pub fn object(&self, ino: InodeId) -> InodeId {
        self.layers.map_or(ino, |layers| layers.object)
    }
    /// Bytes of it that are in older objects.
    pub fn layered(&self) -> u64 {
        self.layers.map_or(0, |layers| layers.bytes)
    }
    /// What of it takes space here.
    pub fn online(&self) -> u64 {
        self.allocated.saturating_sub(self.evicted)
    }
    /// What a lease on it says beside its kind, which is granted later.
    pub fn lease(&self, recover: bool) -> Lease {
        let (kind, limited) = (LeaseKind::None, VolumeId(0));
        Lease {
            kind,
            token_epoch: self.token_epoch,
            recover,
            data_end: self.data_end,
            limited,
            map_version: 0,
        }
    }
    /// Whether a target may hold cells of it.
    pub fn may_have_cells(&self) -> bool {
        self.kind == FileKind::Regular && (self.dirty || self.recover || self.data_end > 0)
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

/// The lease that nothing was granted with.
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
            token_epoch: 6,
            writer: SessionId(7),
            dirty: true,
            recover: false,
            data_end: 8,
            shared_at: None,
            evicted: 0,
            pinned: false,
            layers: None,
            cookie: 0,
        };
        let value = inode.to_value();
        assert_eq!(value.len(), 1 + 1 + 5 * 4 + 2 * 8 + 4 * 8 + 8 + 1 + 8 + 4 + 8 + 2 + 8);
        assert_eq!(Inode::from_value(&value, String::new).unwrap(), inode);
        let placed_value = Inode { cookie: 0x0102, ..inode.clone() }.to_value();
        let shared = Inode { shared_at: Some(0x0102), ..inode.clone() };
        let (longer, later) = (shared.to_value(), [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(longer, [&value[..], &later].concat());
        assert_eq!(Inode::from_value(&longer, String::new).unwrap(), shared);
        for (shared_at, evicted, pinned) in [(None, 7, false), (Some(3), 7, true), (None, 0, true)] {
            let away = Inode { shared_at, evicted, pinned, ..inode.clone() };
            assert!(away.to_value().len() > longer.len());
            assert_eq!(Inode::from_value(&away.to_value(), String::new).unwrap(), away);
            let layers = Some(Layers { object: InodeId(1 << 62 | 9), bytes: 11 });
            let layered = Inode { layers, ..away.clone() };
            assert_eq!(layered.to_value().len(), away.to_value().len() + 16);
            assert_eq!(Inode::from_value(&layered.to_value(), String::new).unwrap(), layered);
            for whole in [&inode, &shared, &away, &layered] {
                let placed = Inode { cookie: 0x0102, ..whole.clone() };
                assert_eq!(placed.to_value().len(), whole.to_value().len() + 8);
                assert_eq!(Inode::from_value(&placed.to_value(), String::new).unwrap(), placed);
            }
        }
        assert_eq!(placed_value[5] & 0x20, 0x20, "bit 29 of the mode tells of the cookie");
        assert_eq!(placed_value[value.len()..], [2, 1, 0, 0, 0, 0, 0, 0]);
        let deleted = Garbage { first_pg: PgId(3), pg_count: 4, truncation: StripeTruncation::ALL };
        assert_eq!(deleted.to_value(), [1, 3, 0, 0, 0, 4, 0, 0, 0]);
        let evicted = Garbage {
            truncation: StripeTruncation { from_stripe: 1, to_stripe: 9, token_epoch: 256 },
            ..deleted
        };
        for garbage in [deleted, evicted] {
            assert_eq!(Garbage::from_value(&garbage.to_value(), String::new).unwrap(), garbage);
        }
        let slot = SlotRecord { seq: 5, method: 130, reply: Bytes::from(inode.to_bytes()) };
        assert_eq!(slot_value(5, 130, &inode), slot.to_value());
    }

    #[test]
    fn a_directory_without_a_volume_is_in_the_root_volume() {
        let time = Time { nanos: 7 };
        let (uid, gid, parent) = (1, 2, InodeId::ROOT);
        let volume = VolumeId::ROOT;
        let old = Access { mode: 0o755, uid, gid, parent, atime: time, btime: time, volume, cookie: 0 };
        let value = old.to_value();
        assert_eq!(value.len(), 1 + 3 * 4 + 3 * 8);
        assert_eq!(Access::from_value(&value, String::new).unwrap(), old);
        let new = Access { volume: VolumeId(0x0102), ..old };
        assert_eq!(new.to_value(), [&value[..], &[2, 1, 0, 0]].concat());
        let placed = Access { cookie: 7, ..old };
        assert_eq!(placed.to_value(), [&value[..], &[1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]].concat());
        for access in [new, placed, Access { cookie: u64::MAX, ..new }] {
            assert_eq!(Access::from_value(&access.to_value(), String::new).unwrap(), access);
        }
    }

    #[test]
    fn what_came_later_costs_those_without_it_nothing() {
        let record = SnapshotRecord {
            name: "s".into(),
            created: Time { nanos: 1 },
            deleting: false,
            scheduled: false,
            evicted: 0,
        };
        let (value, scheduled) = (record.to_value(), SnapshotRecord { scheduled: true, ..record.clone() });
        let away = SnapshotRecord { evicted: 3, ..record.clone() };
        assert_eq!(value, [1, 1, 0, 0, 0, b's', 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(scheduled.to_value(), [&value[..], &[1]].concat());
        assert_eq!(away.to_value(), [&value[..], &[0, 3, 0, 0, 0, 0, 0, 0, 0]].concat());
        for record in [record, scheduled, away] {
            assert_eq!(SnapshotRecord::from_value(&record.to_value(), String::new).unwrap(), record);
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
