//! The memory of one client for data: one budget, shared by changed bytes and by the cache of clean ones.
//!
//! Invariant: changed bytes come first. A buffer for them evicts cached chunks until it fits.
use crate::budget::{Budget, Charged};
use crate::cache::Cache;
use bytes::Bytes;
use std::sync::{Mutex, MutexGuard};
use weir_env::BufferPool;
use weir_proto::InodeId;

pub struct Memory {
    budget: Budget,
    pool: BufferPool,
    cache: Mutex<Cache>,
}

impl Memory {
    pub fn new(limit_bytes: u64, pool: BufferPool) -> Memory {
        Memory { budget: Budget::new(limit_bytes), pool, cache: Mutex::default() }
    }
    pub fn budget(&self) -> &Budget {
        &self.budget
    }
    /// Locked after an inode's state.
    pub fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().expect("no holder of the cache panics")
    }
    /// Keeps clean bytes. `charged`: their memory charges itself; `ahead`: they are prefetched.
    pub fn keep(&self, ino: InodeId, at: u64, bytes: Bytes, charged: bool, ahead: bool) {
        self.cache().insert(ino, at, bytes, charged, ahead, &self.budget);
    }

    /// A charged buffer; cached data is evicted for it.
    pub fn buffer(&self, len: usize) -> Option<Charged> {
        loop {
            if let Some(buffer) = self.budget.try_buffer(&self.pool, len) {
                return Some(buffer);
            }
            if !self.cache().evict_one() {
                return None;
            }
        }
    }
    /// For a few bytes that must not wait.
    pub fn buffer_anyway(&self, len: usize) -> Charged {
        self.budget.buffer_anyway(&self.pool, len)
    }
    /// Makes space for a little more, if there is none. False: changed bytes take all of it.
    pub fn make_space(&self) -> bool {
        self.budget.used_bytes() < self.budget.limit_bytes() || self.cache().evict_one()
    }
    /// Inodes and names need that much: cached data makes room for it.
    pub fn reserve_for_names(&self, bytes: u64) {
        self.budget.reserve_for_names(bytes);
        while self.budget.used_bytes() > self.budget.limit_bytes() && self.cache().evict_one() {}
    }
}
