//! Every key of the namespace, on one page.
//!
//! ```text
//! A/<dir>                 access of a directory: mode, owner, parent            Access
//! T/<dir>                 its times, counts and the numbers it gives next       Tally
//! E/<dir>/<name>          a name                                                Link
//! K/<dir>/<cookie>        the same in listing order                             Listed
//! I/<ino>                 everything that is not a directory                    Inode
//! D/<ino>                 inline data, or the target of a symbolic link         bytes
//! X/<ino>/<name>          an extended attribute                                 bytes
//! N/<ino>/<dir>/<name>    a hard link beside the first one                      nothing
//! H/<ino>/<session>       open although no name is left                         nothing
//! S/<session>             a client's registration                               SessionRecord
//! F/<session>             the volumes in which it may hold leases, locks or opens  HoldsRecord
//! U/<session>/<slot>      the last change of a slot and its reply               SlotRecord
//! w/<session>/<dir>       inode numbers that the session may give to files there  NumberBlock
//! G/<time>/<ino>          deleted, or evicted: cells are to be dropped from targets Garbage
//! W/<ino>/<from>          bytes from there on are at home only                  EvictedRange
//! W/<last>/<volume>       its eviction watermarks: high and low, hundredths  two bytes
//! R/<dir>/<counter>       recursive usage below a directory                     i64
//! c/<volume>              number of a volume's newest change                    u64
//! C/<volume>/<number>     a change                                              ChangeRecord
//! k/<volume>/<name>       up to which change a cursor has come                  u64
//! r/<relation>            a relation                                            RelationRecord
//! 0/<relation>            its patterns and its bandwidth limit                   RulesRecord
//! b/<volume>/<place>      a place that backups of a volume go to                 BackupRecord
//! B/<relation>/<dir>      a directory to be looked at, and from which cookie on u64
//! O/<relation>/<number>   a change of names that home has not seen yet          ChangeRecord
//! P/<relation>/<ino>/<offset>   bytes that home does not have yet               DirtyRange
//! Y/<relation>/<ino>      an inode as we made it at home                         RemoteEntry
//! L/<relation>/<dir>/<name>     which inode we gave that name at home           u64
//! q/<relation>/<ino>/<offset>   proof from home                                 ReceiptRecord
//! a/<relation>/<ino>      in conflict until somebody decides                    ConflictRecord
//! d/<relation>/<dir>      its attributes at home are old                        nothing
//! l/<relation>/<dir>      a directory whose names are not all known here          nothing
//! j/<relation>/<dir>      a directory that is scanned again: when it was read at home   MirroredRecord
//! e/<number>              a directory that is gone at home, to be removed with what is in it   DoomedRecord
//! i/<relation>/<identity> which inode a file of several names is, as home knows it  u64
//! m/<relation>/<ino>      a relocation at home: a mover may have moved it         RelocationRecord
//! u/<relation>/<ino>      parts of it are at home, and nobody sees them there yet   nothing
//! g/<relation>/<ino>      was written, and is not known to be complete          nothing
//! M/<session>             a mover that may have work                            nothing
//! V/<counter>             the namespace's next numbers                             u64
//! v/<volume>              a volume                                              VolumeRecord
//! n/<name>                the volume of that name                               u32
//! Q/<volume>/<counter>    a volume's own usage; 0: of all but the root volume   i64
//! Q/<volume>/<u|g>/<id>/<counter>  usage of a user or a group; volume 0: in all  i64
//! J/<volume>/<u|g>/<id>   limits of a user or a group; volume 0: in all             OwnerRecord
//! s/<volume>/<snapshot>   a snapshot of a volume                                SnapshotRecord
//! t/<volume>/<time>       its trash (time 0), and what was put there from that time on    TrashRecord
//! x/<trash>/<dir>         which directory of the trash has what was in one        u64
//! y/<volume>/0            a clone, and of which snapshot                         CloneRecord
//! y/<volume>/<dir>        a directory of it that is not enumerated yet           NotEnumeratedRecord
//! f/<volume>/<ino>        which inode of a clone is that file of several names  u64
//! o/<object>              the file that a shared object was the own one of      u64
//! h/<snapshot>/<key>      what a key of A E T K I D X Z was in the snapshot: 1 and its value, or 0
//! Z/<ino>/<from>          bytes from there on are in an older object            LayerRecord
//! z/<object>              how many records under h and Z speak of an object     i64
//! p/i                     the namespace comes from an export                     ImportRecord
//! p/s                     the schedule of exports                                ScheduleRecord
//! ```
//!
//! Numbers in keys are big-endian, so keys sort as the numbers do. Values are laid out in `record.rs`. Knows
//! nothing of the records' meaning.

use weir_proto::meta::Time;
use weir_proto::quota::{Holder, OwnerKind};
use weir_proto::relation::RelationId;
use weir_proto::{InodeId, SessionId, VolumeId};

/// The counters of a directory's recursive usage, and of a user's or a group's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counter {
    Bytes = b'b' as isize,
    Files = b'f' as isize,
    Directories = b'd' as isize,
    Evicted = b'e' as isize,
    /// Files and directories of a user or a group.
    Inodes = b'i' as isize,
}

/// The namespace's sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sequence {
    DirectorySerial = b'd' as isize,
    Session = b's' as isize,
    /// Sessions that ended while they may have been writing.
    Death = b'x' as isize,
    Volume = b'v' as isize,
    Relation = b'r' as isize,
    Snapshot = b'p' as isize,
    /// Data objects other than those that files are created with.
    Object = b'o' as isize,
}

/// A letter and a number: most keys.
pub type Key9 = [u8; 9];

fn key9(letter: u8, number: u64) -> Key9 {
    let mut key = [letter; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}
fn key17(letter: u8, first: u64, second: u64) -> [u8; 17] {
    let mut key = [letter; 17];
    key[1..9].copy_from_slice(&first.to_be_bytes());
    key[9..].copy_from_slice(&second.to_be_bytes());
    key
}
fn named(letter: u8, number: u64, name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(9 + name.len());
    key.push(letter);
    key.extend_from_slice(&number.to_be_bytes());
    key.extend_from_slice(name);
    key
}

pub fn access(dir: InodeId) -> Key9 {
    key9(b'A', dir.0)
}
pub fn tally(dir: InodeId) -> Key9 {
    key9(b'T', dir.0)
}
pub fn name(dir: InodeId, name: &[u8]) -> Vec<u8> {
    named(b'E', dir.0, name)
}
pub fn listed(dir: InodeId, cookie: u64) -> [u8; 17] {
    key17(b'K', dir.0, cookie)
}
/// The cookie in a key made by [`listed`].
pub fn cookie_of(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(9..17)?.try_into().ok()?))
}
pub fn inode(ino: InodeId) -> Key9 {
    key9(b'I', ino.0)
}
pub fn data(ino: InodeId) -> Key9 {
    key9(b'D', ino.0)
}
pub fn xattr(ino: InodeId, name: &[u8]) -> Vec<u8> {
    named(b'X', ino.0, name)
}
/// The attribute's name in a key made by [`xattr`].
pub fn xattr_name(key: &[u8]) -> &[u8] {
    key.get(9..).unwrap_or_default()
}
pub fn link(ino: InodeId, dir: InodeId, name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(17 + name.len());
    key.extend_from_slice(&key17(b'N', ino.0, dir.0));
    key.extend_from_slice(name);
    key
}
/// The directory and name in a key made by [`link`].
pub fn link_place(key: &[u8]) -> Option<(InodeId, &[u8])> {
    Some((InodeId(u64::from_be_bytes(key.get(9..17)?.try_into().ok()?)), key.get(17..)?))
}
pub fn held(ino: InodeId, session: SessionId) -> [u8; 17] {
    key17(b'H', ino.0, session.0)
}
/// Inode and session in a key made by [`held`].
pub fn held_pair(key: &[u8]) -> Option<(InodeId, SessionId)> {
    let number = |at: usize| Some(u64::from_be_bytes(key.get(at..at + 8)?.try_into().ok()?));
    Some((InodeId(number(1)?), SessionId(number(9)?)))
}
pub fn session(session: SessionId) -> Key9 {
    key9(b'S', session.0)
}
pub fn holds(session: SessionId) -> Key9 {
    key9(b'F', session.0)
}
/// The session in a key made by [`session`], [`holds`] or [`mover`].
pub fn session_of(key: &[u8]) -> Option<SessionId> {
    Some(SessionId(number_of(key)?))
}
pub fn mover(session: SessionId) -> Key9 {
    key9(b'M', session.0)
}
pub fn slot(session: SessionId, slot: u32) -> [u8; 13] {
    let mut key = [b'U'; 13];
    key[1..9].copy_from_slice(&session.0.to_be_bytes());
    key[9..].copy_from_slice(&slot.to_be_bytes());
    key
}
pub fn numbers(session: SessionId, dir: InodeId) -> [u8; 17] {
    key17(b'w', session.0, dir.0)
}
pub fn garbage(deleted: Time, ino: InodeId) -> [u8; 17] {
    key17(b'G', deleted.nanos.max(0) as u64, ino.0)
}
/// The inode in a key made by [`garbage`].
pub fn garbage_ino(key: &[u8]) -> Option<InodeId> {
    Some(InodeId(u64::from_be_bytes(key.get(9..17)?.try_into().ok()?)))
}
pub fn evicted(ino: InodeId, from: u64) -> [u8; 17] {
    key17(b'W', ino.0, from)
}
/// No inode has this number.
const NO_INODE: InodeId = InodeId(u64::MAX);
pub fn eviction_marks(volume: VolumeId) -> [u8; 17] {
    evicted(NO_INODE, volume.0.into())
}
/// The first byte of the range in a key made by [`evicted`].
pub fn evicted_from(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(9..17)?.try_into().ok()?))
}
pub fn usage(dir: InodeId, counter: Counter) -> [u8; 10] {
    let mut key = [counter as u8; 10];
    key[..9].copy_from_slice(&key9(b'R', dir.0));
    key
}
pub fn volume(volume: VolumeId) -> [u8; 5] {
    let mut key = [b'v'; 5];
    key[1..].copy_from_slice(&volume.0.to_be_bytes());
    key
}
pub fn volume_name(name: &str) -> Vec<u8> {
    [b"n", name.as_bytes()].concat()
}
pub fn volume_usage(volume: VolumeId, counter: Counter) -> [u8; 6] {
    let mut key = [counter as u8; 6];
    key[0] = b'Q';
    key[1..5].copy_from_slice(&volume.0.to_be_bytes());
    key
}
/// The beginning of the counters of a volume's users, or of its groups.
pub fn owners_of(volume: VolumeId, kind: OwnerKind) -> [u8; 6] {
    let mut key = [owner_letter(kind); 6];
    key[0] = b'Q';
    key[1..5].copy_from_slice(&volume.0.to_be_bytes());
    key
}
pub fn owner_usage(holder: Holder, counter: Counter) -> [u8; 11] {
    let mut key = [counter as u8; 11];
    key[..6].copy_from_slice(&owners_of(holder.volume, holder.kind));
    key[6..10].copy_from_slice(&holder.id.to_be_bytes());
    key
}
/// The limits of a user or a group.
pub fn owner_limit(holder: Holder) -> [u8; 10] {
    let mut key = [b'J'; 10];
    key[1..6].copy_from_slice(&owners_of(holder.volume, holder.kind)[1..]);
    key[6..].copy_from_slice(&holder.id.to_be_bytes());
    key
}
/// The user or group in a key made by [`owner_limit`].
pub fn limited_holder(key: &[u8]) -> Option<Holder> {
    holder_in(key.get(1..10)?)
}
/// The volume in a key made by [`volume`].
pub fn volume_in(key: &[u8]) -> Option<VolumeId> {
    Some(VolumeId(u32::from_be_bytes(key.get(1..5)?.try_into().ok()?)))
}
/// Volume, kind and number.
fn holder_in(part: &[u8]) -> Option<Holder> {
    let number = |at: usize| Some(u32::from_be_bytes(part.get(at..at + 4)?.try_into().ok()?));
    let letter = *part.get(4)?;
    let kind = OwnerKind::ALL.iter().copied().find(|kind| owner_letter(*kind) == letter)?;
    Some(Holder { volume: VolumeId(number(0)?), kind, id: number(5)? })
}
fn owner_letter(kind: OwnerKind) -> u8 {
    match kind {
        OwnerKind::User => b'u',
        OwnerKind::Group => b'g',
    }
}
/// The user or group and the counter in a key made by [`owner_usage`]; of a volume's own usage: `None`.
pub fn holder_of(key: &[u8]) -> Option<(Holder, Counter)> {
    let key = <&[u8; 11]>::try_from(key).ok()?;
    let counter = [Counter::Bytes, Counter::Inodes].into_iter().find(|c| *c as u8 == key[10])?;
    Some((holder_in(&key[1..10])?, counter))
}
pub fn sequence(sequence: Sequence) -> [u8; 2] {
    [b'V', sequence as u8]
}

pub fn change_count(volume: VolumeId) -> [u8; 5] {
    key5(b'c', volume.0)
}
pub fn change(volume: VolumeId, number: u64) -> [u8; 13] {
    key13(b'C', volume.0, number)
}
pub fn cursor(volume: VolumeId, name: &str) -> Vec<u8> {
    [&key5(b'k', volume.0)[..], name.as_bytes()].concat()
}
pub fn relation(relation: RelationId) -> [u8; 5] {
    key5(b'r', relation.0)
}
pub fn unseen(relation: RelationId, dir: InodeId) -> [u8; 13] {
    key13(b'B', relation.0, dir.0)
}
pub fn name_change(relation: RelationId, number: u64) -> [u8; 13] {
    key13(b'O', relation.0, number)
}
pub fn dirty(relation: RelationId, ino: InodeId, offset: u64) -> [u8; 21] {
    key21(b'P', relation.0, ino.0, offset)
}
pub fn remote(relation: RelationId, ino: InodeId) -> [u8; 13] {
    key13(b'Y', relation.0, ino.0)
}
pub fn remote_name(relation: RelationId, dir: InodeId, name: &[u8]) -> Vec<u8> {
    [&key13(b'L', relation.0, dir.0)[..], name].concat()
}
pub fn receipt(relation: RelationId, ino: InodeId, offset: u64) -> [u8; 21] {
    key21(b'q', relation.0, ino.0, offset)
}
pub fn conflict(relation: RelationId, ino: InodeId) -> [u8; 13] {
    key13(b'a', relation.0, ino.0)
}
pub fn old_attributes(relation: RelationId, dir: InodeId) -> [u8; 13] {
    key13(b'd', relation.0, dir.0)
}
pub fn not_enumerated(relation: RelationId, dir: InodeId) -> [u8; 13] {
    key13(b'l', relation.0, dir.0)
}
pub fn mirrored(relation: RelationId, dir: InodeId) -> [u8; 13] {
    key13(b'j', relation.0, dir.0)
}
pub fn doomed(number: u64) -> Key9 {
    key9(b'e', number)
}
pub fn identity(relation: RelationId, id: &[u8]) -> Vec<u8> {
    [&key5(b'i', relation.0)[..], id].concat()
}
pub fn relocations(relation: RelationId, ino: InodeId) -> [u8; 13] {
    key13(b'm', relation.0, ino.0)
}
pub fn unfinished(relation: RelationId, ino: InodeId) -> [u8; 13] {
    key13(b'u', relation.0, ino.0)
}
pub fn growing(relation: RelationId, ino: InodeId) -> [u8; 13] {
    key13(b'g', relation.0, ino.0)
}
pub fn rules(relation: RelationId) -> [u8; 5] {
    key5(b'0', relation.0)
}
pub fn snapshot(volume: VolumeId, number: u32) -> [u8; 9] {
    let mut key = [b's'; 9];
    key[1..5].copy_from_slice(&volume.0.to_be_bytes());
    key[5..].copy_from_slice(&number.to_be_bytes());
    key
}
/// `place`: a checksum of its URL.
pub fn backup(volume: VolumeId, place: u32) -> [u8; 9] {
    let mut key = [b'b'; 9];
    key[1..5].copy_from_slice(&volume.0.to_be_bytes());
    key[5..].copy_from_slice(&place.to_be_bytes());
    key
}
/// The volume and the number in a key made by [`snapshot`].
pub fn snapshot_pair(key: &[u8]) -> Option<(VolumeId, u32)> {
    let number = |at: usize| Some(u32::from_be_bytes(key.get(at..at + 4)?.try_into().ok()?));
    Some((VolumeId(number(1)?), number(5)?))
}
/// `from`: nanoseconds since 1970.
pub fn trash(volume: VolumeId, from: u64) -> [u8; 13] {
    key13(b't', volume.0, from)
}
pub fn trashed(part: InodeId, dir: InodeId) -> [u8; 17] {
    key17(b'x', part.0, dir.0)
}
/// `dir` 0: the clone itself.
pub fn clone(volume: VolumeId, dir: InodeId) -> [u8; 13] {
    key13(b'y', volume.0, dir.0)
}
pub fn clone_file(volume: VolumeId, source: InodeId) -> [u8; 13] {
    key13(b'f', volume.0, source.0)
}
pub fn owner(object: InodeId) -> Key9 {
    key9(b'o', object.0)
}
pub fn kept(snapshot: u32, key: &[u8]) -> Vec<u8> {
    [&key5(b'h', snapshot)[..], key].concat()
}
/// The key in a key made by [`kept`].
pub fn kept_key(key: &[u8]) -> &[u8] {
    key.get(5..).unwrap_or_default()
}
pub fn import() -> [u8; 2] {
    *b"pi"
}
pub fn export_schedule() -> [u8; 2] {
    *b"ps"
}
pub fn layer(ino: InodeId, from: u64) -> [u8; 17] {
    key17(b'Z', ino.0, from)
}
pub fn object(object: InodeId) -> Key9 {
    key9(b'z', object.0)
}
/// The number after letter and short number: of a change, a directory or an inode.
pub fn long_number(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(5..13)?.try_into().ok()?))
}
/// The offset in a key of dirty bytes or of a receipt.
pub fn offset_of(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(13..21)?.try_into().ok()?))
}
fn key5(letter: u8, number: u32) -> [u8; 5] {
    let mut key = [letter; 5];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}
fn key13(letter: u8, first: u32, second: u64) -> [u8; 13] {
    let mut key = [letter; 13];
    key[..5].copy_from_slice(&key5(letter, first));
    key[5..].copy_from_slice(&second.to_be_bytes());
    key
}
fn key21(letter: u8, first: u32, second: u64, third: u64) -> [u8; 21] {
    let mut key = [letter; 21];
    key[..13].copy_from_slice(&key13(letter, first, second));
    key[13..].copy_from_slice(&third.to_be_bytes());
    key
}
/// All keys of a letter with a short number: `(start, end)`.
pub fn range_of_short(letter: u8, number: u32) -> (Vec<u8>, Vec<u8>) {
    let start = key5(letter, number).to_vec();
    let end = after(&start);
    (start, end)
}
/// All keys of a letter with a short and a long number.
pub fn range_of_pair(letter: u8, first: u32, second: u64) -> (Vec<u8>, Vec<u8>) {
    let start = key13(letter, first, second).to_vec();
    let end = after(&start);
    (start, end)
}

/// The inode in a key that is a letter and its number.
pub fn numbered(key: &[u8]) -> InodeId {
    InodeId(number_of(key).unwrap_or(u64::MAX))
}

/// The end of the range of all keys that begin with `prefix` (which must not be all 255).
pub fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while end.last() == Some(&255) {
        end.pop();
    }
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}
/// A letter and a number as a prefix of longer keys: `(start, end)` of the range.
pub fn range_of(letter: u8, number: u64) -> (Vec<u8>, Vec<u8>) {
    let start = key9(letter, number).to_vec();
    let end = after(&start);
    (start, end)
}
/// All keys of a letter.
pub fn range_of_letter(letter: u8) -> ([u8; 1], [u8; 1]) {
    ([letter], [letter + 1])
}

fn number_of(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_as_their_numbers() {
        assert!(inode(InodeId(255)) < inode(InodeId(256)));
        assert!(listed(InodeId(1), u64::MAX) < listed(InodeId(2), 0));
        let (start, end) = range_of(b'E', 255);
        let inside = name(InodeId(255), &[255; 255]);
        assert!(start <= inside && inside < end);
        assert!(name(InodeId(256), b"") >= end);
        assert_eq!(after(&[7, 255, 255]), vec![8]);
    }

    /// Two kinds of keys with one letter would be taken for each other by scans.
    #[test]
    fn each_kind_of_keys_has_a_letter_of_its_own() {
        let mut letters = std::collections::BTreeSet::new();
        for make in ["key5", "key9", "key13", "key17", "key21", "named"] {
            let call = format!("{make}(b'");
            for found in include_str!("keys.rs").split(&call).skip(1) {
                let letter = found.chars().next().expect("a letter follows");
                assert!(letters.insert(letter), "{letter:?} has two kinds of keys");
            }
        }
        assert!(letters.len() > 30, "{letters:?}");
    }

    #[test]
    fn keys_are_read_back() {
        let (ino, dir, session) = (InodeId(5), InodeId(9), SessionId(u64::MAX));
        assert_eq!(link_place(&link(ino, dir, b"name")), Some((dir, b"name".as_slice())));
        assert_eq!(held_pair(&held(ino, session)), Some((ino, session)));
        assert_eq!(cookie_of(&listed(dir, 77)), Some(77));
        assert_eq!(session_of(b"S"), None);
        assert_eq!(volume(VolumeId(0x0102)), *b"v\0\0\x01\x02");
        assert_eq!(volume_usage(VolumeId(3), Counter::Files), *b"Q\0\0\0\x03f");
        let holder = Holder { volume: VolumeId(3), kind: OwnerKind::Group, id: 0x0102 };
        let key = owner_usage(holder, Counter::Inodes);
        assert_eq!(key, *b"Q\0\0\0\x03g\0\0\x01\x02i");
        assert_eq!(holder_of(&key), Some((holder, Counter::Inodes)));
        assert_eq!(holder_of(&volume_usage(VolumeId(3), Counter::Files)), None);
        assert_eq!(owner_limit(holder), *b"J\0\0\0\x03g\0\0\x01\x02");
        assert_eq!(limited_holder(&owner_limit(holder)), Some(holder));
    }
}
