//! The changelog of a volume: each change and its record are one transaction, so nothing has to be searched
//! later.
//!
//! Only volumes with consumers have one: the others pay for a look-up in an empty set.
use super::*;
use crate::record::ChangeRecord;
use weir_proto::VolumeId;
use weir_proto::relation::{By, What};

impl Cx<'_> {
    /// Records a change in the volume of a directory, if it has a changelog.
    pub(super) fn log(&mut self, dir: InodeId, what: impl FnOnce() -> What) -> Result<()> {
        if self.rules.logged.is_empty() {
            return Ok(());
        }
        let volume = load_access(self.read(), dir)?.volume;
        if self.rules.logged.contains(&volume) {
            let by = By { node: self.rules.client.to_owned(), uid: self.uid };
            append(self.txn, volume, self.rules.now, what(), by)?;
            self.events.logged = true;
        }
        Ok(())
    }

    /// Records a change of an inode of any kind; one without a name is not recorded yet.
    pub(super) fn log_of(&mut self, ino: InodeId, what: impl FnOnce() -> What) -> Result<()> {
        if self.rules.logged.is_empty() {
            return Ok(());
        }
        let dir = match find_inode(self.read(), ino)? {
            Some(inode) if inode.nlink == 0 => return Ok(()),
            Some(inode) => inode.parent,
            None => ino,
        };
        self.log(dir, what)
    }

    /// Records all of a file as changed: the changed ranges of its writer are not known any more.
    pub(super) fn log_whole(&mut self, ino: InodeId, inode: &Inode) -> Result<()> {
        if inode.kind != FileKind::Regular || inode.nlink == 0 {
            return Ok(());
        }
        // Evicted ranges cannot have been changed.
        let away =
            if inode.evicted > 0 { evicted::ranges(self.read(), ino, 0, usize::MAX)? } else { Vec::new() };
        let starts = std::iter::once(0).chain(away.iter().map(|f| f.range.to));
        for (from, to) in starts.zip(away.iter().map(|f| f.from).chain([inode.size])).filter(|(a, b)| a < b) {
            self.log(inode.parent, || What::Data { ino, offset: from, len: to - from })?;
        }
        self.log(inode.parent, || What::Complete { ino, size: inode.size })
    }
}

/// Appends a change with the next number of its volume.
pub fn append(txn: &mut dyn Txn, volume: VolumeId, at: Time, what: What, by: By) -> Result<u64> {
    let number = last_number(txn, volume)? + 1;
    tables::CHANGE_COUNTS.put(txn, volume, &number);
    tables::CHANGES.put(txn, (volume, number), &ChangeRecord { at, what, tried: false, by });
    Ok(number)
}

/// The number of a volume's newest change; 0: none yet.
pub fn last_number(read: &dyn Read, volume: VolumeId) -> Result<u64> {
    Ok(tables::CHANGE_COUNTS.get(read, volume)?.unwrap_or(0))
}
