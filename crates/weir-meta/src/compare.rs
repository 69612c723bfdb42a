//! A restored namespace is compared with the data on targets, before it serves clients.
//!
//! Knows nothing of how targets are asked: it gets the result.
use crate::keys::{self, Sequence};
use crate::leader::NO_SESSION;
use crate::namespace::lost::{self, Holdings};
use crate::namespace::objects::OBJECT_BIT;
use crate::record::Record;
use crate::restore::ImportRecord;
use crate::service::Meta;
use weir_proto::{Error, InodeId, Result};

/// Files of one batch, and records of snapshots.
const FILES_AT_ONCE: usize = 512;

impl Meta {
    /// The record of the import that this namespace comes from, if there was one.
    pub fn import(&self) -> Result<Option<ImportRecord>> {
        let mut value = None;
        self.leader().base.read(&mut |read| {
            value = read.get(&keys::import())?;
            Ok(())
        })?;
        value.map(|value| ImportRecord::from_value(&value, || "the import".to_owned())).transpose()
    }

    /// Marks data that targets do not hold, and makes new numbers continue after all that they know. Returns
    /// the record of the import with the losses; it is durable.
    pub async fn compare(&self, held: &Holdings) -> Result<ImportRecord> {
        let mut record = self.import()?.ok_or_else(|| Error::invalid("this namespace was not imported"))?;
        self.jump_ahead(held)?;
        let (mut after, leader) = (None, self.leader());
        loop {
            let mut found = Vec::new();
            let mut scanned = 0;
            leader.base.read(&mut |read| {
                found.clear();
                let files = lost::files(read, after, FILES_AT_ONCE)?;
                scanned = files.len();
                for (ino, inode) in &files {
                    let gaps = lost::lost(read, *ino, inode, held)?;
                    if !gaps.is_empty() {
                        found.push((*ino, gaps));
                    }
                }
                after = files.last().map(|(ino, _)| *ino);
                Ok(())
            })?;
            for (ino, gaps) in found {
                let bytes: u64 = gaps.iter().map(|gap| gap.to - gap.from).sum();
                (record.lost_files, record.lost_bytes) = (record.lost_files + 1, record.lost_bytes + bytes);
                tracing::warn!("inode {ino}: {bytes} bytes are lost on targets since the export");
                let mut state = leader.base.lock();
                leader.tx.housekeep(&mut state, NO_SESSION, &mut |cx| lost::lose(cx, ino, &gaps))?;
            }
            if scanned < FILES_AT_ONCE {
                break;
            }
        }
        self.compare_snapshots(held, &mut record)?;
        record.compared = true;
        let done = leader.base.commits.transact_unshown(&mut |txn| {
            txn.put(&keys::import(), &record.to_value());
            Ok(())
        })?;
        leader.base.commits.durable(done).await?;
        Ok(record)
    }

    fn compare_snapshots(&self, held: &Holdings, record: &mut ImportRecord) -> Result<()> {
        let mut after = Vec::new();
        loop {
            let mut step = (0, 0, None);
            self.leader().base.commits.transact_unshown(&mut |txn| {
                step = lost::lose_of_snapshots(txn, held, &after, FILES_AT_ONCE)?;
                Ok(())
            })?;
            let (files, bytes, last) = step;
            (record.lost_files, record.lost_bytes) = (record.lost_files + files, record.lost_bytes + bytes);
            match last {
                Some(last) => after = last,
                None => return Ok(()),
            }
        }
    }

    /// No new file gets a number under which targets hold data.
    fn jump_ahead(&self, held: &Holdings) -> Result<()> {
        let is_object = |object: &InodeId| object.0 & OBJECT_BIT != 0;
        let highest = |of: bool| held.objects().filter(|o| is_object(o) == of).last().map_or(0, |o| o.0);
        let (serial, object) = (highest(false) >> 24, highest(true) & !OBJECT_BIT);
        self.leader().base.commits.transact_unshown(&mut |txn| {
            txn.max(&keys::sequence(Sequence::DirectorySerial), serial + 1);
            txn.max(&keys::sequence(Sequence::Object), object + 1);
            Ok(())
        })?;
        Ok(())
    }
}
