//! The keys that a request reads or changes.
//!
//! An answer to a read waits for the newest commit that changed one of the keys that it read, and for no
//! other: `ls` does not wait for the disk while another client writes. See `unsettled`.
use crate::unsettled::{Changed, Unsettled};
use std::cell::Cell;
use weir_kv::{CommitSeq, Read, Scan, Txn};
use weir_proto::{Result, SessionId};

/// A state of the store, read for one session.
pub struct Observed<'a> {
    read: &'a dyn Read,
    unsettled: &'a Unsettled,
    session: SessionId,
    wait: Cell<CommitSeq>,
}

impl<'a> Observed<'a> {
    pub fn new(read: &'a dyn Read, unsettled: &'a Unsettled, session: SessionId) -> Observed<'a> {
        Observed { read, unsettled, session, wait: Cell::new(CommitSeq(0)) }
    }

    /// The commit that an answer waits for if it depends on all that was read.
    pub fn wait(&self) -> CommitSeq {
        self.wait.get()
    }

    fn depends_on(&self, wait: CommitSeq) {
        self.wait.set(self.wait.get().max(wait));
    }
}

impl Read for Observed<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.depends_on(self.unsettled.wait_for_key(self.session, key));
        self.read.get(key)
    }

    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        if self.unsettled.is_empty() {
            return self.read.scan(start, end, visit);
        }
        let mut seen_to = end.to_vec();
        self.read.scan(start, end, &mut |key, value| {
            let scan = visit(key, value);
            if matches!(scan, Scan::Stop) {
                // What follows the last visited key does not matter.
                seen_to = [key, &[0]].concat();
            }
            scan
        })?;
        self.depends_on(self.unsettled.wait_for_range(self.session, start, &seen_to));
        Ok(())
    }
}

/// A transaction that notes the keys that it changes.
pub struct Noted<'a> {
    txn: &'a mut (dyn Txn + 'a),
    changed: &'a mut Vec<(Vec<u8>, Changed)>,
}

impl<'a> Noted<'a> {
    pub fn new(txn: &'a mut (dyn Txn + 'a), changed: &'a mut Vec<(Vec<u8>, Changed)>) -> Noted<'a> {
        changed.clear();
        Noted { txn, changed }
    }
}

impl Read for Noted<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.txn.get(key)
    }
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        self.txn.scan(start, end, visit)
    }
}

impl Txn for Noted<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.changed.push((key.to_vec(), Changed::Set));
        self.txn.put(key, value);
    }
    fn delete(&mut self, key: &[u8]) {
        self.changed.push((key.to_vec(), Changed::Set));
        self.txn.delete(key);
    }
    fn add(&mut self, key: &[u8], delta: i64) {
        self.changed.push((key.to_vec(), Changed::Blind));
        self.txn.add(key, delta);
    }
    fn max(&mut self, key: &[u8], value: u64) {
        self.changed.push((key.to_vec(), Changed::Blind));
        self.txn.max(key, value);
    }
}
