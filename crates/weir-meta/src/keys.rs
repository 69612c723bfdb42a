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
//! Numbers in keys are big-endian, so keys sort as the numbers do. Values are laid out in `record.rs`, and
//! `tables.rs` ties both together: here are the letters, and the keys that are in no typed table. Knows
//! nothing of the records' meaning.

use weir_proto::quota::{Holder, OwnerKind};
use weir_proto::{InodeId, VolumeId};

/// The first byte of each kind of keys. No two are equal, so that scans do not take one kind for another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Letter {
    Access = b'A',
    Tally = b'T',
    Name = b'E',
    Listed = b'K',
    Inode = b'I',
    Data = b'D',
    Xattr = b'X',
    Link = b'N',
    Held = b'H',
    Session = b'S',
    Holds = b'F',
    Slot = b'U',
    Numbers = b'w',
    Garbage = b'G',
    Evicted = b'W',
    Usage = b'R',
    ChangeCount = b'c',
    Change = b'C',
    Cursor = b'k',
    Relation = b'r',
    Rules = b'0',
    Backup = b'b',
    Unseen = b'B',
    NameChange = b'O',
    Dirty = b'P',
    Remote = b'Y',
    RemoteName = b'L',
    Receipt = b'q',
    Conflict = b'a',
    OldAttributes = b'd',
    NotEnumerated = b'l',
    Mirrored = b'j',
    Doomed = b'e',
    Identity = b'i',
    Relocation = b'm',
    Unfinished = b'u',
    Growing = b'g',
    Mover = b'M',
    Sequence = b'V',
    Volume = b'v',
    VolumeName = b'n',
    VolumeUsage = b'Q',
    OwnerLimit = b'J',
    Snapshot = b's',
    Trash = b't',
    Trashed = b'x',
    Clone = b'y',
    CloneFile = b'f',
    ObjectOwner = b'o',
    Kept = b'h',
    Layer = b'Z',
    Object = b'z',
    Import = b'p',
}

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
    /// The first directory serial that a client may still bring after a crash; absent once all have returned.
    LostSerial = b'l' as isize,
}

/// No inode has this number.
pub const NO_INODE: InodeId = InodeId(u64::MAX);
pub fn eviction_marks(volume: VolumeId) -> [u8; 17] {
    let mut key = [Letter::Evicted as u8; 17];
    key[1..9].copy_from_slice(&NO_INODE.0.to_be_bytes());
    key[9..].copy_from_slice(&u64::from(volume.0).to_be_bytes());
    key
}
pub fn volume_usage(volume: VolumeId, counter: Counter) -> [u8; 6] {
    let mut key = [counter as u8; 6];
    key[0] = Letter::VolumeUsage as u8;
    key[1..5].copy_from_slice(&volume.0.to_be_bytes());
    key
}
/// All counters of a volume, of its users and of its groups.
pub fn usage_of_volume(volume: VolumeId) -> (Vec<u8>, Vec<u8>) {
    let start = volume_usage(volume, Counter::Bytes)[..5].to_vec();
    let end = after(&start);
    (start, end)
}
/// The beginning of the counters of a volume's users, or of its groups.
pub fn owners_of(volume: VolumeId, kind: OwnerKind) -> [u8; 6] {
    let mut key = [owner_letter(kind); 6];
    key[0] = Letter::VolumeUsage as u8;
    key[1..5].copy_from_slice(&volume.0.to_be_bytes());
    key
}
pub fn owner_usage(holder: Holder, counter: Counter) -> [u8; 11] {
    let mut key = [counter as u8; 11];
    key[..6].copy_from_slice(&owners_of(holder.volume, holder.kind));
    key[6..10].copy_from_slice(&holder.id.to_be_bytes());
    key
}
/// Volume, kind and number.
fn holder_in(part: &[u8]) -> Option<Holder> {
    let number = |at: usize| Some(u32::from_be_bytes(part.get(at..at + 4)?.try_into().ok()?));
    let letter = *part.get(4)?;
    let kind = OwnerKind::ALL.iter().copied().find(|kind| owner_letter(*kind) == letter)?;
    Some(Holder { volume: VolumeId(number(0)?), kind, id: number(5)? })
}
pub fn owner_letter(kind: OwnerKind) -> u8 {
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
    [Letter::Sequence as u8, sequence as u8]
}

pub fn kept(snapshot: u32, key: &[u8]) -> Vec<u8> {
    [&[Letter::Kept as u8][..], &snapshot.to_be_bytes(), key].concat()
}
/// The key in a key made by [`kept`].
pub fn kept_key(key: &[u8]) -> &[u8] {
    key.get(5..).unwrap_or_default()
}
pub fn import() -> [u8; 2] {
    [Letter::Import as u8, b'i']
}
pub fn export_schedule() -> [u8; 2] {
    [Letter::Import as u8, b's']
}

/// The inode in a key that is a letter and its number.
pub fn numbered(key: &[u8]) -> InodeId {
    let number = key.get(1..9).and_then(|number| number.try_into().ok());
    InodeId(number.map_or(u64::MAX, u64::from_be_bytes))
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
/// All keys of a letter.
pub fn range_of_letter(letter: Letter) -> ([u8; 1], [u8; 1]) {
    ([letter as u8], [letter as u8 + 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_users_are_read_back() {
        assert_eq!(after(&[7, 255, 255]), vec![8]);
        assert_eq!(volume_usage(VolumeId(3), Counter::Files), *b"Q\0\0\0\x03f");
        let holder = Holder { volume: VolumeId(3), kind: OwnerKind::Group, id: 0x0102 };
        let key = owner_usage(holder, Counter::Inodes);
        assert_eq!(key, *b"Q\0\0\0\x03g\0\0\x01\x02i");
        assert_eq!(holder_of(&key), Some((holder, Counter::Inodes)));
        assert_eq!(holder_of(&volume_usage(VolumeId(3), Counter::Files)), None);
        assert_eq!(eviction_marks(VolumeId(7)), *b"W\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0\0\0\0\x07");
        assert_eq!(sequence(Sequence::Death), *b"Vx");
        assert_eq!((kept(9, b"Ab"), kept_key(b"h\0\0\0\x09Ab")), (b"h\0\0\0\x09Ab".to_vec(), &b"Ab"[..]));
        assert_eq!((import(), export_schedule()), (*b"pi", *b"ps"));
    }
}
