//! The names of one directory while an operation changes them: its counts and times, the numbers of new
//! inodes, and the places of names in listings.
//!
//! Invariants: a number and a place are given once; counts and times follow each name. The directory's record
//! changes with [`DirNames::store`] only. Knows nothing of permissions and leases: `gate` has checked them.
use super::cx::Cx;
use super::permission::check_name;
use super::records::{load_tally, show};
use crate::keys::Sequence;
use crate::record::{Link, Listed, Tally};
use crate::tables;
use bytes::Bytes;
use weir_kv::Read;
use weir_proto::meta::{FileKind, Time};
use weir_proto::{InodeId, Result};

/// Numbers of one directory serial.
const SERIAL_NUMBERS: u32 = 1 << 24;

pub(super) struct DirNames {
    dir: InodeId,
    tally: Tally,
}

impl DirNames {
    pub fn load(read: &dyn Read, dir: InodeId) -> Result<DirNames> {
        Ok(DirNames { dir, tally: load_tally(read, dir)? })
    }
    pub fn dir(&self) -> InodeId {
        self.dir
    }
    pub fn tally(&self) -> &Tally {
        &self.tally
    }
    /// The place of the name that was inserted last.
    pub fn last_place(&self) -> u64 {
        self.tally.next_cookie - 1
    }

    /// The number of a new inode.
    pub fn next_ino(&mut self, cx: &mut Cx<'_>) -> Result<InodeId> {
        self.take_numbers(cx, 1)
    }
    /// Takes `count` numbers in sequence; returns the first.
    pub fn take_numbers(&mut self, cx: &mut Cx<'_>, count: u32) -> Result<InodeId> {
        if self.tally.next_n.saturating_add(count) > SERIAL_NUMBERS {
            self.tally.serial = tables::next_number(cx.txn, Sequence::DirectorySerial)?;
            self.tally.next_n = 0;
        }
        let first = InodeId((self.tally.serial << 24) | u64::from(self.tally.next_n));
        self.tally.next_n += count;
        assert!(self.tally.next_n <= SERIAL_NUMBERS, "{count} numbers end past the range of a serial");
        Ok(first)
    }

    /// Returns the new name's place.
    pub fn insert(&mut self, cx: &mut Cx<'_>, name: &[u8], ino: InodeId, kind: FileKind) -> u64 {
        let place = self.tally.next_cookie;
        self.tally.next_cookie += 1;
        self.insert_at(cx, place, name, (ino, kind));
        place
    }
    /// At a place that was given before, and is free again.
    pub fn insert_at(&mut self, cx: &mut Cx<'_>, place: u64, name: &[u8], (ino, kind): (InodeId, FileKind)) {
        let dir = self.dir;
        assert!(check_name(name).is_ok(), "{:?} was not checked before it is made in {dir}", show(name));
        assert!(place < self.tally.next_cookie, "place {place} of directory {dir} was never given");
        self.tally.entries += 1;
        self.tally.subdirectories += u64::from(kind == FileKind::Directory);
        self.note_change(cx);
        tables::NAMES.put(cx.txn, (dir, name), &Link { ino, kind, cookie: place });
        let listed = Listed { ino, kind, name: Bytes::copy_from_slice(name) };
        tables::LISTED.put(cx.txn, (dir, place), &listed);
    }
    pub fn remove(&mut self, cx: &mut Cx<'_>, name: &[u8], link: &Link) {
        let is_directory = u64::from(link.kind == FileKind::Directory);
        self.tally.entries = self.tally.entries.saturating_sub(1);
        self.tally.subdirectories = self.tally.subdirectories.saturating_sub(is_directory);
        self.note_change(cx);
        tables::NAMES.delete(cx.txn, (self.dir, name));
        tables::LISTED.delete(cx.txn, (self.dir, link.cookie));
    }
    fn note_change(&mut self, cx: &Cx<'_>) {
        self.tally.mtime = cx.rules.now;
        self.tally.ctime = cx.rules.after(self.tally.ctime);
    }

    /// The directory changed at another time than now, or not at all for its users.
    pub fn set_mtime(&mut self, mtime: Time) {
        self.tally.mtime = mtime;
    }
    pub fn set_ctime(&mut self, ctime: Time) {
        self.tally.ctime = ctime;
    }

    pub fn store(&self, cx: &mut Cx<'_>) {
        cx.put_tally(self.dir, &self.tally);
    }
}
