//! Changes to keys, and ordered maps of them: a transaction's own, the memory's, a sealed one.
//!
//! `Add` and `Max` stay unresolved until the value is needed. One map holds one change per key; it never
//! holds a mixture of `Add` and `Max` on one key: the writer resolves such a pair before it adds it here.

use smallvec::SmallVec;
use std::collections::BTreeMap;

/// A key in memory. Most are short: their bytes are in the map's nodes, and a search reads nothing else.
pub(crate) type Key = SmallVec<[u8; 32]>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Put(Box<[u8]>),
    Delete,
    Add(i64),
    Max(u64),
}

/// `Add` met `Max` on the same key: the value must be read before the two can be joined.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mixed;

impl Change {
    /// Whether the value below is irrelevant.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Change::Put(_) | Change::Delete)
    }

    /// The value after this change on `below`.
    pub(crate) fn apply(&self, below: Option<&[u8]>) -> Option<Vec<u8>> {
        match self {
            Change::Put(value) => Some(value.to_vec()),
            Change::Delete => None,
            Change::Add(delta) => Some(added(below, *delta).to_vec()),
            Change::Max(value) => Some(raised(below, *value).to_vec()),
        }
    }

    /// This older change and then `newer`, as one.
    fn then(&self, newer: Change) -> Result<Change, Mixed> {
        Ok(match (self, newer) {
            (_, newer @ (Change::Put(_) | Change::Delete)) => newer,
            (Change::Put(value), newer) => put(newer.apply(Some(value))),
            (Change::Delete, newer) => put(newer.apply(None)),
            (Change::Add(a), Change::Add(b)) => Change::Add(a.wrapping_add(b)),
            (Change::Max(a), Change::Max(b)) => Change::Max(b.max(*a)),
            (Change::Add(_), Change::Max(_)) | (Change::Max(_), Change::Add(_)) => return Err(Mixed),
        })
    }
}

/// A resolved value as a change.
pub(crate) fn put(value: Option<Vec<u8>>) -> Change {
    value.map_or(Change::Delete, |v| Change::Put(v.into_boxed_slice()))
}

/// A number whose length is not eight bytes is read as if zeros followed it, or its rest were absent: defined
/// for every input, so that a caller's mistake cannot stop a store from folding.
fn number(value: Option<&[u8]>) -> [u8; 8] {
    let mut bytes = [0; 8];
    let value = value.unwrap_or(&[]);
    let n = value.len().min(8);
    bytes[..n].copy_from_slice(&value[..n]);
    bytes
}

fn added(below: Option<&[u8]>, delta: i64) -> [u8; 8] {
    i64::from_le_bytes(number(below)).wrapping_add(delta).to_le_bytes()
}

fn raised(below: Option<&[u8]>, value: u64) -> [u8; 8] {
    u64::from_le_bytes(number(below)).max(value).to_le_bytes()
}

/// At most one change per key, in key order.
#[derive(Default, Debug)]
pub(crate) struct Delta {
    pub(crate) changes: BTreeMap<Key, Change>,
}

impl Delta {
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    pub(crate) fn get(&self, key: &[u8]) -> Option<&Change> {
        self.changes.get(key)
    }

    /// Merges `newer` into the change of the key.
    pub(crate) fn push(&mut self, key: Key, newer: Change) -> Result<(), Mixed> {
        use std::collections::btree_map::Entry;
        match self.changes.entry(key) {
            Entry::Vacant(at) => {
                at.insert(newer);
            }
            Entry::Occupied(mut at) => {
                let joined = at.get().then(newer)?;
                at.insert(joined);
            }
        }
        Ok(())
    }

    /// Whether `push` would result in a mixture. Most changes can't, and are not searched for.
    pub(crate) fn would_mix(&self, key: &[u8], newer: &Change) -> bool {
        match newer {
            Change::Put(_) | Change::Delete => false,
            Change::Add(_) => matches!(self.get(key), Some(Change::Max(_))),
            Change::Max(_) => matches!(self.get(key), Some(Change::Add(_))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_start_at_zero_and_join() {
        let mut delta = Delta::default();
        let key = || Key::from_slice(b"n");
        delta.push(key(), Change::Add(5)).unwrap();
        delta.push(key(), Change::Add(-7)).unwrap();
        assert_eq!(delta.get(b"n"), Some(&Change::Add(-2)));
        assert!(delta.would_mix(b"n", &Change::Max(1)));
        assert_eq!(delta.push(key(), Change::Max(1)), Err(Mixed));
        delta.push(key(), Change::Delete).unwrap();
        delta.push(key(), Change::Max(9)).unwrap();
        assert_eq!(delta.get(b"n"), Some(&Change::Put(Box::new(9u64.to_le_bytes()))));
        assert_eq!(Change::Add(1).apply(Some(b"\x01")), Some(2i64.to_le_bytes().to_vec()));
    }
}
