//! One budget of memory for dirty data and cached data of a client.
//!
//! Invariant: bytes charged never exceed the limit; a charge ends when the memory behind it is free again
//! (the last share of a frozen buffer is dropped), not when it is no longer used. Knows nothing of the
//! content.
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;
use weir_env::{Buf, BufferPool};

/// Cheap to clone: clones share the limit.
#[derive(Clone)]
pub struct Budget(Arc<Shared>);

struct Shared {
    limit_bytes: u64,
    /// The part of the limit that inodes and names need.
    names_bytes: AtomicU64,
    used_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    freed: Notify,
}

/// A share of the budget; returned on drop.
pub struct Charge {
    budget: Budget,
    bytes: u64,
}

/// A buffer whose memory is charged to the budget as long as any share of it lives.
pub struct Charged {
    buf: Buf,
    _charge: Charge,
}

impl Budget {
    pub fn new(limit_bytes: u64) -> Budget {
        Budget(Arc::new(Shared {
            limit_bytes,
            names_bytes: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            freed: Notify::new(),
        }))
    }
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes.saturating_sub(self.names_bytes())
    }
    pub fn names_bytes(&self) -> u64 {
        self.0.names_bytes.load(Ordering::Relaxed)
    }
    /// That much of the limit is not for data from now on. Memory that was taken before stays charged.
    pub fn reserve_for_names(&self, bytes: u64) {
        if self.0.names_bytes.swap(bytes, Ordering::Relaxed) > bytes {
            self.0.freed.notify_waiters();
        }
    }
    pub fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Relaxed)
    }
    pub fn peak_bytes(&self) -> u64 {
        self.0.peak_bytes.load(Ordering::Relaxed)
    }
    /// Takes `bytes` if the limit allows.
    pub fn try_take(&self, bytes: u64) -> Option<Charge> {
        let (s, limit) = (&self.0, self.limit_bytes());
        let taken = s.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= limit)
        });
        let before = taken.ok()?;
        s.peak_bytes.fetch_max(before + bytes, Ordering::Relaxed);
        Some(Charge { budget: self.clone(), bytes })
    }
    /// A pooled buffer of `len` bytes with its whole memory charged.
    pub fn try_buffer(&self, pool: &BufferPool, len: usize) -> Option<Charged> {
        let charge = self.try_take(block_bytes(len) as u64)?;
        Some(Charged { buf: pool.get(len), _charge: charge })
    }
    /// A few bytes that must not wait: may exceed the limit.
    pub fn buffer_anyway(&self, pool: &BufferPool, len: usize) -> Charged {
        let bytes = block_bytes(len) as u64;
        let before = self.0.used_bytes.fetch_add(bytes, Ordering::AcqRel);
        self.0.peak_bytes.fetch_max(before + bytes, Ordering::Relaxed);
        Charged { buf: pool.get(len), _charge: Charge { budget: self.clone(), bytes } }
    }
    /// Returns after a charge ended since this call was made.
    pub fn freed(&self) -> tokio::sync::futures::Notified<'_> {
        self.0.freed.notified()
    }
}

/// The bytes that the pool allocates for a buffer of `len` bytes: powers of two from one page.
pub fn block_bytes(len: usize) -> usize {
    len.next_power_of_two().max(weir_env::IO_ALIGN)
}

impl Drop for Charge {
    fn drop(&mut self) {
        let before = self.budget.0.used_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        assert!(before >= self.bytes, "{} bytes are freed, {before} were in use", self.bytes);
        self.budget.0.freed.notify_waiters();
    }
}

impl Charged {
    pub fn freeze(self) -> Bytes {
        if self.buf.is_empty() { Bytes::new() } else { Bytes::from_owner(self) }
    }
    pub fn capacity(&self) -> usize {
        self.buf.capacity()
    }
    pub fn truncate(&mut self, len: usize) {
        self.buf.truncate(len);
    }
    pub fn grow(&mut self, len: usize) {
        self.buf.grow(len);
    }
}
impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.buf
    }
}
impl std::ops::Deref for Charged {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buf
    }
}
impl std::ops::DerefMut for Charged {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_lives_as_long_as_the_last_share() {
        let budget = Budget::new(16 << 10);
        let pool = BufferPool::new(1 << 20);
        let mut buf = budget.try_buffer(&pool, 5000).unwrap();
        assert_eq!(budget.used_bytes(), 8192);
        buf.truncate(10);
        let share = buf.freeze().slice(2..4);
        assert_eq!(budget.used_bytes(), 8192);
        assert!(budget.try_buffer(&pool, 8193).is_none());
        drop(share);
        assert_eq!((budget.used_bytes(), budget.peak_bytes()), (0, 8192));
    }
}
