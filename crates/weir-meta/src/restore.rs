//! A namespace from its export: the changes in the records, so that no number from after the export is used
//! again.
//!
//! Targets, clients and homes know numbers and token epochs that were used after the export. So every
//! sequence skips far ahead, every directory takes a new serial for its next file, every file's token epochs
//! skip ahead, and bytes of a file past its size are truncated by the first client that uses it. Sessions get
//! numbers that no client has: they end after a lease term. Relations with homes are paused: home is newer
//! than the namespace.
//!
//! Knows nothing of files and disks; `namespace::lost` marks data that targets no longer hold.
use crate::keys::{self, Sequence};
use crate::record::{Inode, Record, Tally};
use crate::relation::record::RelationRecord;
use weir_kv::CommitSeq;
use weir_proto::data::FENCE_GONE;
use weir_proto::meta::{FileKind, Time};
use weir_proto::{Error, Result, message};

/// Directories and full ranges since an export: 100,000 a second for three hours. Of 2^40 numbers.
const SERIALS_AHEAD: u64 = 1 << 30;
const OBJECTS_AHEAD: u64 = 1 << 40;
/// Volumes, relations, snapshots, of 2^32.
const FEW_AHEAD: u64 = 1 << 20;
/// For sessions, of 2^32.
const SESSIONS_AHEAD: u64 = 1 << 24;
/// 65,536 truncations of one file.
const TOKENS_AHEAD: u32 = 1 << 24;
/// The restored directory holds more changes than the lost one could, so that the lost one counts as an old
/// copy from now on.
const CHANGES_AHEAD: u64 = 1 << 40;
/// Past a serial's range: the directory takes a new one.
const NO_NUMBERS_LEFT: u32 = 1 << 24;
/// Sequences whose number is not visible outside, or that is compared with numbers in records.
const KEPT: [u8; 1] = [Sequence::Death as u8];

message!(
    /// `p/i`: the namespace comes from an export.
    ImportRecord {
        taken: Time,
        imported: Time,
        /// Whether it was compared with the data on targets.
        compared: bool,
        lost_files: u64,
        lost_bytes: u64,
    }
);
impl Record for ImportRecord {}

message!(
    /// `p/s`: the directory, interval and number of exports.
    ScheduleRecord { dir: String, every_s: u32, keep: u32 }
);
impl Record for ScheduleRecord {}

/// The number of the restored state's last change.
pub fn changes_after(exported: u64) -> Result<CommitSeq> {
    exported.checked_add(CHANGES_AHEAD).map(CommitSeq).ok_or_else(|| used_up("numbers of changes"))
}

/// An entry of an export as it is in the restored namespace; `None`: it is omitted. Keys stay in order.
pub fn restored(key: Vec<u8>, value: Vec<u8>) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
    let entry = match key.first() {
        // Only its session knows the changes of a client.
        Some(b'U' | b'M' | b'w' | b'F') => return Ok(None),
        Some(b'S') => (renumbered(key, 1)?, value),
        // Session 0 is none.
        Some(b'H') if key.get(9..).is_some_and(|session| session.iter().all(|b| *b == 0)) => (key, value),
        Some(b'H') => (renumbered(key, 9)?, value),
        _ if key == keys::sequence(Sequence::LostSerial) => return Ok(None),
        Some(b'V') => {
            let value = next_numbers(&key, &value)?;
            (key, value)
        }
        Some(b'T') => {
            let mut tally = Tally::from_value(&value, || "a directory's tally".to_owned())?;
            tally.next_n = NO_NUMBERS_LEFT;
            (key, tally.to_value())
        }
        Some(b'I') => {
            let inode = Inode::from_value(&value, || "an inode".to_owned())?;
            (key, later(inode)?.to_value())
        }
        Some(b'r') => {
            let mut relation = RelationRecord::from_value(&value, || "a relation".to_owned())?;
            let why = "the namespace was restored from an export, and home may be newer".to_owned();
            relation.paused = relation.paused.or(Some(why));
            (key, relation.to_value())
        }
        _ if key == keys::import() => return Ok(None),
        _ => (key, value),
    };
    Ok(Some(entry))
}

/// Replaces the session number at `at` by one that no client has.
fn renumbered(mut key: Vec<u8>, at: usize) -> Result<Vec<u8>> {
    let bad = || Error::damaged("a session's key is damaged");
    let place = key.get_mut(at..at + 8).ok_or_else(bad)?;
    let session = u64::from_be_bytes(<[u8; 8]>::try_from(&*place).map_err(|_| bad())?);
    let number = (session & u64::from(u32::MAX)) + SESSIONS_AHEAD;
    if number > u64::from(u32::MAX) {
        return Err(used_up("numbers of sessions"));
    }
    place.copy_from_slice(&(session + SESSIONS_AHEAD).to_be_bytes());
    Ok(key)
}

fn next_numbers(key: &[u8], value: &[u8]) -> Result<Vec<u8>> {
    let bad = || Error::damaged("the namespace's next numbers are damaged");
    let sequence = *key.get(1).ok_or_else(bad)?;
    let next = u64::from_le_bytes(value.try_into().map_err(|_| bad())?);
    let is = |of: Sequence| sequence == of as u8;
    let (ahead, end) = if is(Sequence::DirectorySerial) {
        (SERIALS_AHEAD, 1 << 40)
    } else if is(Sequence::Object) {
        (OBJECTS_AHEAD, 1 << 62)
    } else if is(Sequence::Session) {
        (2 * SESSIONS_AHEAD, 1 << 32) // beyond those that the old sessions get
    } else if is(Sequence::Volume) || is(Sequence::Relation) || is(Sequence::Snapshot) {
        (FEW_AHEAD, 1 << 32)
    } else if KEPT.contains(&sequence) {
        (0, u64::MAX)
    } else {
        return Err(Error::unsupported(format!("the sequence {sequence} of numbers")));
    };
    match next.checked_add(ahead).filter(|next| *next < end) {
        Some(next) => Ok(next.to_le_bytes().to_vec()),
        None => Err(used_up("numbers")),
    }
}

/// A file under later token epochs. The first client that uses it truncates bytes that were written past its
/// size since.
fn later(mut inode: Inode) -> Result<Inode> {
    if inode.kind != FileKind::Regular {
        return Ok(inode);
    }
    let token_epoch = inode.writing.token_epoch.checked_add(TOKENS_AHEAD).filter(|epoch| *epoch < FENCE_GONE);
    inode.writing.token_epoch = token_epoch.ok_or_else(|| used_up("a file's token epochs"))?;
    // Recalled bytes overwrite the leftovers on targets.
    let is_away = inode.layout.is_none() && inode.evicted > 0;
    inode.writing.recover = !is_away;
    Ok(inode)
}

fn used_up(what: &str) -> Error {
    Error::unsupported(format!("{what} are used up: this namespace was restored too often"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Letter;
    use crate::namespace::create::make_root;
    use crate::tables;
    use weir_kv::{Kv, MemoryKv, Scan};
    use weir_proto::{InodeId, SessionId};

    fn value_of(key: &[u8], value: Vec<u8>) -> Vec<u8> {
        let (same, value) = restored(key.to_vec(), value).unwrap().unwrap();
        assert_eq!(same, key);
        value
    }

    #[test]
    fn earlier_inode_numbers_are_not_assigned_again() {
        let key = keys::sequence(Sequence::DirectorySerial);
        let after = value_of(&key, 7u64.to_le_bytes().to_vec());
        assert_eq!(after, (7 + SERIALS_AHEAD).to_le_bytes());
        assert!(restored(key.to_vec(), ((1u64 << 40) - 9).to_le_bytes().to_vec()).is_err());
        let deaths = keys::sequence(Sequence::Death);
        assert_eq!(value_of(&deaths, 7u64.to_le_bytes().to_vec()), 7u64.to_le_bytes());
        let kv = MemoryKv::new();
        kv.transact(&mut |txn| {
            make_root(txn, Time { nanos: 1 });
            Ok(())
        })
        .unwrap();
        let mut root = Vec::new();
        let (start, end) = keys::range_of_letter(Letter::Tally);
        kv.read(&mut |read| {
            read.scan(&start, &end, &mut |_, value| {
                root = value.to_vec();
                Scan::Stop
            })
        })
        .unwrap();
        let tally = Tally::from_value(&root, String::new).unwrap();
        let after = value_of(&tables::TALLIES.key(InodeId::ROOT), root);
        let after = Tally::from_value(&after, String::new).unwrap();
        assert_eq!(after, Tally { next_n: NO_NUMBERS_LEFT, ..tally });
    }

    #[test]
    fn earlier_sessions_belong_to_no_client() {
        let session = |n: u64| SessionId((5 << 32) | n);
        let moved = |key: Vec<u8>| restored(key, vec![1]).unwrap().unwrap().0;
        let key = |n| tables::SESSIONS.key(session(n)).to_vec();
        assert_eq!(moved(key(9)), key(9 + SESSIONS_AHEAD));
        let held = |n| tables::HELD.key((InodeId(3), session(n))).to_vec();
        assert_eq!(moved(held(9)), held(9 + SESSIONS_AHEAD));
        let kept = tables::HELD.key((InodeId(3), SessionId(0))).to_vec();
        assert_eq!(moved(kept.clone()), kept, "for all sessions that may return");
        assert_eq!(restored(tables::SLOTS.key((session(9), 0)).to_vec(), vec![]).unwrap(), None);
        assert!(restored(key(u64::from(u32::MAX)), vec![]).is_err());
        assert!(restored(vec![b'S', 1], vec![]).is_err());
        // The next one to be opened gets none of these.
        let next = value_of(&keys::sequence(Sequence::Session), 10u64.to_le_bytes().to_vec());
        assert!(u64::from_le_bytes(next.try_into().unwrap()) > 9 + SESSIONS_AHEAD);
    }
}
