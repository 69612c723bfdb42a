//! The typed tables: each with the letter of its keys, their parts, and its values. `keys` has the page of
//! all letters; tables whose records belong to one file are declared there.
use crate::holds::HoldsRecord;
use crate::keys::{self, Counter, Letter, Sequence};
use crate::owner_limits::OwnerRecord;
use crate::record::{
    Access, ChangeRecord, CloneRecord, EvictedRange, Garbage, Inode, LayerRecord, Link, Listed,
    NotEnumeratedRecord, SessionRecord, SlotRecord, SnapshotRecord, Tally, TrashRecord, VolumeRecord,
};
use crate::relation::record::{
    ConflictRecord, DirtyRange, DoomedRecord, MirroredRecord, ReceiptRecord, RelationRecord,
    RelocationRecord, RemoteEntry, RulesRecord,
};
use crate::table::{Name, Present, Table};
use weir_kv::{Read, Txn};
use weir_proto::meta::Time;
use weir_proto::quota::Holder;
use weir_proto::relation::RelationId;
use weir_proto::{InodeId, Result, SessionId, VolumeId};

/// The time in the key of a deleted file.
pub fn garbage_time(at: Time) -> u64 {
    at.nanos.max(0) as u64
}

/// The number that a sequence of the namespace is at.
pub fn number(read: &dyn Read, sequence: Sequence) -> Result<Option<u64>> {
    let value = read.get(&keys::sequence(sequence))?.and_then(|v| <[u8; 8]>::try_from(v).ok());
    Ok(value.map(u64::from_le_bytes))
}
/// Takes the next number of a sequence; the first is 1.
pub fn next_number(txn: &mut dyn Txn, sequence: Sequence) -> Result<u64> {
    let number = number(txn, sequence)?.unwrap_or(0).max(1);
    txn.max(&keys::sequence(sequence), number + 1);
    Ok(number)
}

macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident: $letter:ident, $what:literal, $key:ty => $value:ty;)*) => {
        $($(#[$doc])* pub const $name: Table<$key, $value> = Table::new(Letter::$letter, $what);)*
    };
}

tables! {
    ACCESS: Access, "directory", InodeId => Access;
    TALLIES: Tally, "the counts of directory", InodeId => Tally;
    NAMES: Name, "a name in directory", (InodeId, Name) => Link;
    /// By cookie.
    LISTED: Listed, "the listing of directory", (InodeId, u64) => Listed;
    INODES: Inode, "inode", InodeId => Inode;
    DATA: Data, "the inline data of inode", InodeId => Vec<u8>;
    XATTRS: Xattr, "an attribute of inode", (InodeId, Name) => Vec<u8>;
    /// Of a file: the directory and the name of a link.
    LINKS: Link, "a link of inode", (InodeId, InodeId, Name) => Present;
    HELD: Held, "an open file without a name", (InodeId, SessionId) => Present;
    /// By time, in ns.
    GARBAGE: Garbage, "a deleted file", (u64, InodeId) => Garbage;
    /// By offset.
    EVICTED: Evicted, "an evicted range of inode", (InodeId, u64) => EvictedRange;
    /// By offset.
    LAYERS: Layer, "a layer of inode", (InodeId, u64) => LayerRecord;
    /// Recursive.
    USAGE: Usage, "the usage of directory", (InodeId, Counter) => i64;
    /// The number of records that refer to an object.
    REFERENCES: Object, "the references to object", InodeId => i64;
    /// The file that a shared object was the own one of.
    OBJECT_OWNERS: ObjectOwner, "the owner of object", InodeId => InodeId;

    SESSIONS: Session, "session", SessionId => SessionRecord;
    HOLDS: Holds, "the volumes of session", SessionId => HoldsRecord;
    SLOTS: Slot, "slot", (SessionId, u32) => SlotRecord;
    MOVERS: Mover, "mover", SessionId => Present;

    VOLUMES: Volume, "volume", VolumeId => VolumeRecord;
    VOLUME_NAMES: VolumeName, "the volume of a name", Name => VolumeId;
    OWNER_LIMITS: OwnerLimit, "a user's or group's limit", Holder => OwnerRecord;
    SNAPSHOTS: Snapshot, "a snapshot", (VolumeId, u32) => SnapshotRecord;
    /// By time, in ns; 0: the trash itself.
    TRASH: Trash, "the trash of volume", (VolumeId, u64) => TrashRecord;
    /// The directory of a part of the trash that has removed entries of another one.
    TRASHED: Trashed, "a directory in the trash", (InodeId, InodeId) => InodeId;
    /// In the place of a directory that does not exist.
    CLONES: Clone, "clone", (VolumeId, InodeId) => CloneRecord;
    CLONE_DIRS: Clone, "a directory of clone", (VolumeId, InodeId) => NotEnumeratedRecord;
    CLONE_FILES: CloneFile, "a file of a clone", (VolumeId, InodeId) => InodeId;
    /// The change up to which a consumer has come.
    CURSORS: Cursor, "a cursor of volume", (VolumeId, Name) => u64;
    CHANGE_COUNTS: ChangeCount, "the count of changes of volume", VolumeId => u64;
    CHANGES: Change, "a change of volume", (VolumeId, u64) => ChangeRecord;

    RELATIONS: Relation, "relation", RelationId => RelationRecord;
    RULES: Rules, "the rules of relation", RelationId => RulesRecord;
    /// The cookie up to which a directory was scanned.
    UNSEEN: Unseen, "a directory to be scanned", (RelationId, InodeId) => u64;
    NAME_CHANGES: NameChange, "a change of names", (RelationId, u64) => ChangeRecord;
    /// By offset.
    DIRTY: Dirty, "a dirty range of a relation", (RelationId, InodeId, u64) => DirtyRange;
    REMOTE: Remote, "a remote entry", (RelationId, InodeId) => RemoteEntry;
    REMOTE_NAMES: RemoteName, "a remote name", (RelationId, InodeId, Name) => InodeId;
    /// By offset.
    RECEIPTS: Receipt, "a receipt", (RelationId, InodeId, u64) => ReceiptRecord;
    CONFLICTS: Conflict, "a conflict", (RelationId, InodeId) => ConflictRecord;
    OLD_ATTRIBUTES: OldAttributes, "a directory with old attributes", (RelationId, InodeId) => Present;
    NOT_ENUMERATED: NotEnumerated, "a directory that is not enumerated", (RelationId, InodeId) => Present;
    MIRRORED: Mirrored, "a mirrored directory", (RelationId, InodeId) => MirroredRecord;
    DOOMED: Doomed, "a doomed directory", u64 => DoomedRecord;
    /// By the identity of a file of several names at home.
    IDENTITIES: Identity, "an identity at home", (RelationId, Name) => InodeId;
    RELOCATIONS: Relocation, "a relocation", (RelationId, InodeId) => RelocationRecord;
    UNFINISHED: Unfinished, "an unfinished file", (RelationId, InodeId) => Present;
    GROWING: Growing, "a growing file", (RelationId, InodeId) => Present;
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::quota::OwnerKind;

    /// A key's numbers, each in its bytes.
    fn bytes(letter: &[u8], numbers: &[&[u8]]) -> Vec<u8> {
        [letter, &numbers.concat()].concat()
    }

    #[test]
    fn the_bytes_of_keys_never_change() {
        let (ino, dir, session) = (InodeId(0x0102), InodeId(3), SessionId(4));
        let (volume, relation) = (VolumeId(0x0506), RelationId(7));
        let (i, d, s) = ([0, 0, 0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 0, 0, 0, 4]);
        let (v, r, o) = ([0, 0, 5, 6], [0, 0, 0, 7], [0, 0, 0, 0, 0, 0, 0, 9]);
        let of_inode = [
            (ACCESS.key(ino), b"A"),
            (TALLIES.key(ino), b"T"),
            (INODES.key(ino), b"I"),
            (DATA.key(ino), b"D"),
            (REFERENCES.key(ino), b"z"),
            (OBJECT_OWNERS.key(ino), b"o"),
        ];
        for (key, letter) in of_inode {
            assert_eq!(*key, bytes(letter, &[&i]));
        }
        for (key, letter) in [(NAMES.key((ino, b"a")), b"E"), (XATTRS.key((ino, b"a")), b"X")] {
            assert_eq!(*key, bytes(letter, &[&i, b"a"]));
        }
        let with_offset =
            [(LISTED.key((ino, 9)), b"K"), (EVICTED.key((ino, 9)), b"W"), (LAYERS.key((ino, 9)), b"Z")];
        for (key, letter) in with_offset {
            assert_eq!(*key, bytes(letter, &[&i, &o]));
        }
        assert_eq!(*LINKS.key((ino, dir, b"a")), bytes(b"N", &[&i, &d, b"a"]));
        assert_eq!(*HELD.key((ino, session)), bytes(b"H", &[&i, &s]));
        assert_eq!(*USAGE.key((ino, Counter::Evicted)), bytes(b"R", &[&i, b"e"]));
        assert_eq!(*GARBAGE.key((9, ino)), bytes(b"G", &[&o, &i]));
        assert_eq!(*TRASHED.key((ino, dir)), bytes(b"x", &[&i, &d]));
        assert_eq!(*DOOMED.key(9), bytes(b"e", &[&o]));
        let of_session =
            [(SESSIONS.key(session), b"S"), (HOLDS.key(session), b"F"), (MOVERS.key(session), b"M")];
        for (key, letter) in of_session {
            assert_eq!(*key, bytes(letter, &[&s]));
        }
        assert_eq!(*SLOTS.key((session, 7)), bytes(b"U", &[&s, &r]));
        assert_eq!(*VOLUMES.key(volume), bytes(b"v", &[&v]));
        assert_eq!(*CHANGE_COUNTS.key(volume), bytes(b"c", &[&v]));
        assert_eq!(*VOLUME_NAMES.key(b"a"), *b"na");
        assert_eq!(*CURSORS.key((volume, b"a")), bytes(b"k", &[&v, b"a"]));
        assert_eq!(*SNAPSHOTS.key((volume, 7)), bytes(b"s", &[&v, &r]));
        for (key, letter) in [(TRASH.key((volume, 9)), b"t"), (CHANGES.key((volume, 9)), b"C")] {
            assert_eq!(*key, bytes(letter, &[&v, &o]));
        }
        for (key, letter) in [(CLONES.key((volume, ino)), b"y"), (CLONE_FILES.key((volume, ino)), b"f")] {
            assert_eq!(*key, bytes(letter, &[&v, &i]));
        }
        assert_eq!(*CLONE_DIRS.key((volume, ino)), *CLONES.key((volume, ino)));
        let holder = Holder { volume, kind: OwnerKind::Group, id: 7 };
        assert_eq!(*OWNER_LIMITS.key(holder), bytes(b"J", &[&v, b"g", &r]));
        assert_eq!(*RELATIONS.key(relation), bytes(b"r", &[&r]));
        assert_eq!(*RULES.key(relation), bytes(b"0", &[&r]));
        assert_eq!(*NAME_CHANGES.key((relation, 9)), bytes(b"O", &[&r, &o]));
        let of_relation = [
            (UNSEEN.key((relation, ino)), b"B"),
            (REMOTE.key((relation, ino)), b"Y"),
            (CONFLICTS.key((relation, ino)), b"a"),
            (OLD_ATTRIBUTES.key((relation, ino)), b"d"),
            (NOT_ENUMERATED.key((relation, ino)), b"l"),
            (MIRRORED.key((relation, ino)), b"j"),
            (RELOCATIONS.key((relation, ino)), b"m"),
            (UNFINISHED.key((relation, ino)), b"u"),
            (GROWING.key((relation, ino)), b"g"),
        ];
        for (key, letter) in of_relation {
            assert_eq!(*key, bytes(letter, &[&r, &i]));
        }
        for (key, letter) in [(DIRTY.key((relation, ino, 9)), b"P"), (RECEIPTS.key((relation, ino, 9)), b"q")]
        {
            assert_eq!(*key, bytes(letter, &[&r, &i, &o]));
        }
        assert_eq!(*REMOTE_NAMES.key((relation, ino, b"a")), bytes(b"L", &[&r, &i, b"a"]));
        assert_eq!(*IDENTITIES.key((relation, b"a")), bytes(b"i", &[&r, b"a"]));
    }

    #[test]
    fn keys_sort_as_their_numbers_and_are_read_back() {
        assert!(*INODES.key(InodeId(255)) < *INODES.key(InodeId(256)));
        assert!(*LISTED.key((InodeId(1), u64::MAX)) < *LISTED.key((InodeId(2), 0)));
        let long = [255; 255];
        let key = NAMES.key((InodeId(255), &long));
        assert_eq!(NAMES.parts(&key).unwrap(), (InodeId(255), &long[..]));
        let held = HELD.key((InodeId(5), SessionId(u64::MAX)));
        assert_eq!(HELD.parts(&held).unwrap(), (InodeId(5), SessionId(u64::MAX)));
        let holder = Holder { volume: VolumeId(3), kind: OwnerKind::User, id: 8 };
        assert_eq!(OWNER_LIMITS.parts(&OWNER_LIMITS.key(holder)).unwrap(), holder);
        for damaged in [&b"H"[..], &held[1..], &held[..16], &[&held[..], b"0"].concat()] {
            assert!(HELD.parts(damaged).is_err(), "{damaged:?}");
        }
    }
}
