//! The most recent entries, for decisions about late messages. In memory only, and bounded.
use std::collections::{BTreeMap, VecDeque};

/// Keys in the order of their first insertion, each with its last value; the oldest are forgotten.
pub struct RecentMap<K, V, const MAX: usize> {
    of: BTreeMap<K, V>,
    order: VecDeque<K>,
}

impl<K, V, const MAX: usize> Default for RecentMap<K, V, MAX> {
    fn default() -> Self {
        RecentMap { of: BTreeMap::new(), order: VecDeque::new() }
    }
}

impl<K: Ord + Copy, V, const MAX: usize> RecentMap<K, V, MAX> {
    pub fn get(&self, key: &K) -> Option<&V> {
        self.of.get(key)
    }
    /// Inserts a value; returns the previous one.
    pub fn note(&mut self, key: K, value: V) -> Option<V> {
        let before = self.of.insert(key, value);
        if before.is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.of.remove(&oldest);
        }
        assert_eq!(self.of.len(), self.order.len(), "a remembered key has no place in the order");
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_remembered_and_the_oldest_is_forgotten() {
        let mut recent = RecentMap::<u64, u64, 100>::default();
        for key in 0..100 {
            assert_eq!(recent.note(key, 1), None);
        }
        assert_eq!((recent.note(0, 2), recent.get(&0), recent.get(&99)), (Some(1), Some(&2), Some(&1)));
        assert_eq!(recent.note(100, 1), None, "one more than is remembered");
        assert_eq!((recent.get(&0), recent.get(&1)), (None, Some(&1)));
        assert_eq!((recent.of.len(), recent.order.len()), (100, 100));
    }
}
