//! The keys that a request reads or changes.
//!
//! An answer to a read waits for the newest commit that changed one of the keys that it read, and for no
//! other: `ls` does not wait for the disk while another client writes. So does an early answer to a change,
//! for the keys that it read or set. See `unsettled`.
use crate::keys::{self, Sequence};
use crate::unsettled::{Changed, Unsettled};
use std::cell::{Cell, RefCell};
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

/// A transaction that notes the keys that it changes. For an early answer it notes those that it reads, too,
/// and the serials that it draws: a change that is made again draws the same.
pub struct Noted<'a> {
    txn: &'a mut (dyn Txn + 'a),
    changed: &'a mut Vec<(Vec<u8>, Changed)>,
    early: Option<Early<'a>>,
}

/// The commits that an early answer depends on.
pub struct Early<'a> {
    unsettled: &'a Unsettled,
    session: SessionId,
    wait: Cell<CommitSeq>,
    /// Serials that the change draws, if it is made again.
    given: Option<&'a [u64]>,
    drawn: RefCell<Vec<u64>>,
}

impl<'a> Early<'a> {
    pub fn new(unsettled: &'a Unsettled, session: SessionId, given: Option<&'a [u64]>) -> Early<'a> {
        Early { unsettled, session, wait: Cell::new(CommitSeq(0)), given, drawn: RefCell::default() }
    }
    /// The commit that an answer waits for, and the serials that were drawn.
    pub fn finish(self) -> (CommitSeq, Vec<u64>) {
        (self.wait.get(), self.drawn.into_inner())
    }

    fn depends_on(&self, key: &[u8]) {
        self.wait.set(self.wait.get().max(self.unsettled.wait_for_key(self.session, key)));
    }
    /// A serial is drawn: the one that was given before, if there is such.
    fn draw(&self, next: Option<Vec<u8>>) -> Option<Vec<u8>> {
        let mut drawn = self.drawn.borrow_mut();
        let given =
            self.given.and_then(|given| given.get(drawn.len())).map(|serial| serial.to_le_bytes().to_vec());
        let value = given.or(next);
        let number = value.as_deref().and_then(|v| <[u8; 8]>::try_from(v).ok()).map_or(0, u64::from_le_bytes);
        drawn.push(number.max(1));
        value
    }
}

impl<'a> Noted<'a> {
    pub fn new(
        txn: &'a mut (dyn Txn + 'a),
        changed: &'a mut Vec<(Vec<u8>, Changed)>,
        early: Option<Early<'a>>,
    ) -> Noted<'a> {
        changed.clear();
        Noted { txn, changed, early }
    }
    pub fn finish(self) -> Option<(CommitSeq, Vec<u64>)> {
        self.early.map(Early::finish)
    }
    fn set(&mut self, key: &[u8]) {
        if let Some(early) = &self.early {
            early.depends_on(key);
        }
        self.changed.push((key.to_vec(), Changed::Set));
    }
}

impl Read for Noted<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let value = self.txn.get(key)?;
        let Some(early) = &self.early else { return Ok(value) };
        if key == keys::sequence(Sequence::DirectorySerial) {
            // Another session's serial is another one: no answer depends on it.
            return Ok(early.draw(value));
        }
        early.depends_on(key);
        Ok(value)
    }
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        let Some(early) = &self.early else { return self.txn.scan(start, end, visit) };
        // Removed keys matter, too; a scan that ends early depends on more than it needs to.
        let wait = early.unsettled.wait_for_range(early.session, start, end);
        early.wait.set(early.wait.get().max(wait));
        self.txn.scan(start, end, visit)
    }
}

impl Txn for Noted<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.set(key);
        self.txn.put(key, value);
    }
    fn delete(&mut self, key: &[u8]) {
        self.set(key);
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
