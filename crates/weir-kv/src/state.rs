//! One state of the store: the newest changes in memory over sealed ones over the folded tree, and a
//! transaction over it.
//!
//! Invariant: a level is newer than every level below it, so the first final change found going down decides.
//! Knows nothing of journals and disks.

use crate::base::Base;
use crate::change::{Change, Delta, Key, put};
use crate::{CommitSeq, Read, Scan, Txn};
use std::collections::btree_map;
use std::iter::Peekable;
use std::ops::Bound;
use std::sync::Arc;
use weir_proto::{Error, Result};

/// Longest key: a directory entry's key is at most ~300 bytes.
pub(crate) const KEY_BYTES_MAX: usize = 4096;

pub(crate) struct State {
    /// The newest transaction included.
    pub(crate) seq: CommitSeq,
    pub(crate) active: Delta,
    /// Changes that are being folded into `base`; oldest first.
    pub(crate) sealed: Vec<Arc<Delta>>,
    /// An error: it cannot be read at present.
    pub(crate) base: Result<Option<Base>>,
}

impl Default for State {
    fn default() -> State {
        State { seq: CommitSeq(0), active: Delta::default(), sealed: Vec::new(), base: Ok(None) }
    }
}

impl State {
    /// Applies a transaction's changes. They were prepared by [`Body::finish`], so nothing is mixed.
    pub(crate) fn apply(&mut self, seq: CommitSeq, changes: Delta) {
        assert!(seq.0 == self.seq.0 + 1, "transactions are applied in order");
        self.seq = seq;
        let bottom = self.sealed.is_empty() && matches!(self.base, Ok(None));
        for (key, change) in changes.changes {
            if bottom && change == Change::Delete {
                self.active.changes.remove(&key);
            } else {
                self.active.push(key, change).expect("the transaction resolved its mixtures");
            }
        }
    }

    /// Whether the folded tree must be reopened.
    pub(crate) fn is_lost(&self) -> bool {
        self.base.as_ref().map_or(true, |base| base.as_ref().is_some_and(Base::is_lost))
    }

    fn view<'a>(&'a self, own: Option<&'a Delta>) -> View<'a> {
        View { own, state: self }
    }
}

impl Read for State {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.view(None).get(key)
    }
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        self.view(None).scan(start, end, visit)
    }
}

/// A state, and a transaction's own changes over it.
struct View<'a> {
    own: Option<&'a Delta>,
    state: &'a State,
}

impl<'a> View<'a> {
    /// Newest first.
    fn levels(&self) -> impl Iterator<Item = &'a Delta> {
        let sealed = self.state.sealed.iter().rev().map(|d| &**d);
        self.own.into_iter().chain(std::iter::once(&self.state.active)).chain(sealed)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut pending = Vec::new(); // allocates only for numbers
        for change in self.levels().filter_map(|level| level.get(key)) {
            if change.is_final() {
                return Ok(resolve(change.apply(None), &pending));
            }
            pending.push(change);
        }
        let base = match self.state.base.as_ref().map_err(Error::clone)? {
            Some(base) => base.get(key)?,
            None => None,
        };
        Ok(resolve(base, &pending))
    }

    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        let bounds = (Bound::Included(start), Bound::Excluded(end));
        let mut levels: Vec<Level<'_>> =
            self.levels().map(|level| level.changes.range::<[u8], _>(bounds).peekable()).collect();
        let mut base = match self.state.base.as_ref().map_err(Error::clone)? {
            Some(base) => Some(base.range(start, end)?),
            None => None,
        };
        let mut below = next_of(&mut base)?;
        loop {
            let changed = levels.iter_mut().filter_map(|l| l.peek().map(|(k, _)| &***k)).min();
            let from_base = match (changed, &below) {
                (None, None) => return Ok(()),
                (Some(_), None) => false,
                (None, Some(_)) => true,
                (Some(key), Some(entry)) => entry.key() < key,
            };
            let stop = if from_base {
                let entry = below.take().expect("there is an entry below");
                let stop = visit(entry.key(), entry.value()) == Scan::Stop;
                below = next_of(&mut base)?;
                stop
            } else {
                let key = changed.expect("there is a change");
                let under = match &below {
                    Some(entry) if entry.key() == key => below.take(),
                    _ => None,
                };
                let stop = visit_merged(key, &mut levels, under.as_ref().map(|e| e.value()), visit);
                if under.is_some() {
                    below = next_of(&mut base)?;
                }
                stop
            };
            if stop {
                return Ok(());
            }
        }
    }
}

type Level<'a> = Peekable<btree_map::Range<'a, Key, Change>>;

fn next_of(base: &mut Option<crate::base::Range>) -> Result<Option<crate::base::Entry>> {
    base.as_mut().map_or(Ok(None), |range| range.next().transpose())
}

/// Takes `key` from every level and passes its value, if any, to the visitor. True: the visitor stops.
fn visit_merged(
    key: &[u8],
    levels: &mut [Level<'_>],
    base: Option<&[u8]>,
    visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan,
) -> bool {
    let mut pending = Vec::new();
    let mut decided = None;
    for level in levels {
        let Some((_, change)) = level.next_if(|(k, _)| &***k == key) else { continue };
        match (decided, change) {
            (Some(_), _) => {}
            (None, change) if change.is_final() => decided = Some(change),
            (None, change) => pending.push(change),
        }
    }
    if let (Some(Change::Put(value)), true) = (decided, pending.is_empty()) {
        return visit(key, value) == Scan::Stop; // the common case copies nothing
    }
    let bottom = decided.map_or_else(|| base.map(<[u8]>::to_vec), |change| change.apply(None));
    resolve(bottom, &pending).is_some_and(|value| visit(key, &value) == Scan::Stop)
}

/// Applies `pending` (newest first) to the value below them.
fn resolve(below: Option<Vec<u8>>, pending: &[&Change]) -> Option<Vec<u8>> {
    pending.iter().rev().fold(below, |value, change| change.apply(value.as_deref()))
}

/// A running transaction.
pub(crate) struct Body<'a> {
    state: &'a State,
    own: Delta,
    /// The first error in a method of the trait that cannot return one.
    refused: Option<Error>,
}

impl<'a> Body<'a> {
    pub(crate) fn new(state: &'a State) -> Body<'a> {
        Body { state, own: Delta::default(), refused: None }
    }

    /// The changes, ready for [`State::apply`].
    pub(crate) fn finish(mut self) -> Result<Delta> {
        if let Some(error) = self.refused {
            return Err(error);
        }
        let active = &self.state.active;
        let mixed = self.own.changes.iter().filter(|(key, change)| active.would_mix(key, change));
        let keys: Vec<_> = mixed.map(|(key, _)| key.clone()).collect();
        for key in keys {
            let value = self.state.view(Some(&self.own)).get(&key)?;
            self.own.changes.insert(key, put(value));
        }
        Ok(self.own)
    }

    fn push(&mut self, key: &[u8], change: Change) {
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            let n = key.len();
            self.refused.get_or_insert_with(|| {
                Error::invalid(format!("a key of {n} bytes was written; 1 to {KEY_BYTES_MAX} are possible"))
            });
            return;
        }
        if self.own.would_mix(key, &change) {
            match self.get(key) {
                Ok(value) => {
                    self.own.changes.insert(Key::from_slice(key), put(value));
                }
                Err(e) => {
                    self.refused.get_or_insert(e);
                    return;
                }
            }
        }
        self.own.push(Key::from_slice(key), change).expect("a mixture was resolved just now");
    }
}

impl Read for Body<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.state.view(Some(&self.own)).get(key)
    }
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()> {
        self.state.view(Some(&self.own)).scan(start, end, visit)
    }
}

impl Txn for Body<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) {
        self.push(key, Change::Put(value.into()));
    }
    fn delete(&mut self, key: &[u8]) {
        self.push(key, Change::Delete);
    }
    fn add(&mut self, key: &[u8], delta: i64) {
        self.push(key, Change::Add(delta));
    }
    fn max(&mut self, key: &[u8], value: u64) {
        self.push(key, Change::Max(value));
    }
}
