//! Pooled, page-aligned buffers: bulk bytes are received into them and never copied out.
//!
//! Fresh memory is slow at the first access (measured 30 times slower than memory that was used before), so
//! blocks are kept and reused. Invariants: every byte of a block is initialized; a block has one owner; the
//! pool keeps at most `cache_bytes_max` of idle memory. Blocks in use are not limited here: the admission of
//! work limits them.

use bytes::Bytes;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

/// Alignment of pooled buffers, and of direct I/O, in bytes.
pub const IO_ALIGN: usize = 4096;

/// Blocks are powers of two from 4 KiB to 8 MiB (a whole 6 MB frame); larger ones are not kept.
const CLASS_COUNT: usize = 12;
const CLASS_BYTES_MAX: usize = IO_ALIGN << (CLASS_COUNT - 1);

/// Hands out aligned buffers and reuses their memory. Cheap to clone: clones share the memory.
#[derive(Clone)]
pub struct BufferPool(Arc<Shared>);

struct Shared {
    cache_bytes_max: usize,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    bytes: usize,
    classes: [Vec<Block>; CLASS_COUNT],
}

impl BufferPool {
    /// A pool that keeps at most `cache_bytes_max` bytes of idle memory.
    pub fn new(cache_bytes_max: usize) -> BufferPool {
        BufferPool(Arc::new(Shared { cache_bytes_max, idle: Mutex::default() }))
    }

    /// A buffer of `len` bytes, aligned to [`IO_ALIGN`]. Its contents are arbitrary (old) bytes: overwrite
    /// them all, or `fill(0)` the rest.
    pub fn get(&self, len: usize) -> Buf {
        let recycled = class_of(len).and_then(|class| self.0.take(class));
        let block = recycled.unwrap_or_else(|| Block::new(block_bytes(len)));
        Buf { block, len, pool: Some(self.0.clone()) }
    }

    /// A buffer with a copy of `bytes`.
    pub fn copy(&self, bytes: &[u8]) -> Buf {
        let mut buf = self.get(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A buffer of `len` zeros.
    pub fn zeroed(&self, len: usize) -> Buf {
        let mut buf = self.get(len);
        buf.fill(0);
        buf
    }

    /// Bytes of idle memory that the pool holds now.
    pub fn idle_bytes(&self) -> usize {
        self.0.lock().bytes
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferPool({} of {} bytes idle)", self.idle_bytes(), self.0.cache_bytes_max)
    }
}

/// An aligned buffer with one owner. Its memory returns to the pool on drop, or when the last [`Bytes`] made
/// of it is dropped.
pub struct Buf {
    block: Block,
    len: usize,
    /// None only after `drop` took the block.
    pool: Option<Arc<Shared>>,
}

impl Buf {
    /// Shares the bytes; the memory returns to its pool when the last `Bytes` is dropped.
    pub fn freeze(self) -> Bytes {
        if self.len == 0 { Bytes::new() } else { Bytes::from_owner(self) }
    }
    /// Keeps the first `len` bytes; does nothing if there are fewer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
    /// The capacity of the memory in bytes: [`Buf::grow`] is limited to it.
    pub fn capacity(&self) -> usize {
        self.block.bytes
    }
    /// Makes the buffer `len` bytes long within its capacity; the added bytes are arbitrary.
    pub fn grow(&mut self, len: usize) {
        assert!(len <= self.block.bytes, "a buffer grows only within its capacity");
        self.len = self.len.max(len);
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block holds `block.bytes` initialized bytes, `len` is never above that, and `self` owns
        // the block.
        unsafe { std::slice::from_raw_parts(self.block.start.as_ptr(), self.len) }
    }
}
impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.block.start.as_ptr(), self.len) }
    }
}
impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
impl AsMut<[u8]> for Buf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}
impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} of {} bytes)", self.len, self.block.bytes)
    }
}
impl Drop for Buf {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.return_block(std::mem::replace(&mut self.block, Block::dangling()));
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Idle> {
        // No code can panic in the middle of a change of the lists.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, class: usize) -> Option<Block> {
        let mut idle = self.lock();
        let block = idle.classes[class].pop()?;
        idle.bytes -= block.bytes;
        Some(block)
    }

    /// Keeps the block, in exchange for idle blocks of other sizes: sizes returned now are the ones in use
    /// now.
    fn return_block(&self, block: Block) {
        let Some(class) = class_of(block.bytes) else { return };
        let mut evicted = Vec::new(); // freed after the lock
        let mut idle = self.lock();
        while idle.bytes + block.bytes > self.cache_bytes_max {
            let other = (0..CLASS_COUNT).rev().find(|c| *c != class && !idle.classes[*c].is_empty());
            let Some(old) = other.and_then(|c| idle.classes[c].pop()) else { return };
            idle.bytes -= old.bytes;
            evicted.push(old);
        }
        idle.bytes += block.bytes;
        idle.classes[class].push(block);
    }
}

/// The size class for `len` bytes, unless it is too large to be kept.
fn class_of(len: usize) -> Option<usize> {
    (len <= CLASS_BYTES_MAX).then(|| (block_bytes(len) / IO_ALIGN).trailing_zeros() as usize)
}

fn block_bytes(len: usize) -> usize {
    if len <= CLASS_BYTES_MAX {
        len.next_power_of_two().max(IO_ALIGN)
    } else {
        len.next_multiple_of(IO_ALIGN)
    }
}

/// Owned, initialized, aligned memory; `bytes` is 0 only for the dangling one.
struct Block {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block owns its memory exclusively, as a Vec<u8> does.
unsafe impl Send for Block {}
// SAFETY: shared references only read.
unsafe impl Sync for Block {}

impl Block {
    fn new(bytes: usize) -> Block {
        let layout = Block::layout(bytes);
        // SAFETY: `bytes` is at least IO_ALIGN, so the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        Block { start: NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout)), bytes }
    }
    fn dangling() -> Block {
        Block { start: NonNull::dangling(), bytes: 0 }
    }
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, IO_ALIGN).expect("a buffer is smaller than the address space")
    }
}
impl Drop for Block {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated in `new` with this same layout, and no other owner exists.
            unsafe { dealloc(self.start.as_ptr(), Block::layout(self.bytes)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_as_long_as_asked() {
        let pool = BufferPool::new(1 << 20);
        for len in [0, 1, 4095, 4096, 4097, 47_008, 1 << 20, (8 << 20) + 1] {
            let buf = pool.get(len);
            assert_eq!(buf.len(), len);
            assert_eq!(buf.as_ptr() as usize % IO_ALIGN, 0);
            assert!(buf.capacity() >= len && buf.capacity().is_multiple_of(IO_ALIGN));
        }
    }

    #[test]
    fn memory_returns_when_the_last_share_is_dropped() {
        let pool = BufferPool::new(1 << 20);
        let shared = pool.copy(b"of one frame").freeze();
        let part = shared.slice(3..6);
        drop(shared);
        assert_eq!((&part[..], pool.idle_bytes()), (&b"one"[..], 0));
        let address = part.as_ptr() as usize & !(IO_ALIGN - 1);
        drop(part);
        assert_eq!(pool.idle_bytes(), IO_ALIGN);
        assert_eq!(pool.get(100).as_ptr() as usize, address, "the same memory comes back");
    }

    #[test]
    fn idle_memory_is_bounded_and_follows_what_is_used() {
        let pool = BufferPool::new(64 << 10);
        drop((0..100).map(|_| pool.get(4096)).collect::<Vec<_>>());
        assert_eq!(pool.idle_bytes(), 64 << 10);
        drop(pool.get(32 << 10));
        assert_eq!(pool.idle_bytes(), 64 << 10, "small blocks made room for the large one");
        assert_eq!(pool.0.lock().classes[3].len(), 1);
        drop(pool.get(16 << 20));
        assert_eq!(pool.idle_bytes(), 64 << 10, "larger than any class: not kept");
        let none = BufferPool::new(0);
        drop(none.get(1));
        assert_eq!(none.idle_bytes(), 0);
    }

    #[test]
    fn truncate_and_grow_stay_within_the_block() {
        let pool = BufferPool::new(1 << 20);
        let mut buf = pool.zeroed(5000);
        buf.truncate(10);
        buf.truncate(20);
        assert_eq!(buf.len(), 10);
        buf.grow(8192);
        assert_eq!(buf.len(), 8192);
        assert_eq!(buf.freeze().len(), 8192);
    }

    #[test]
    fn threads_never_share_a_block() {
        let pool = BufferPool::new(256 << 10);
        std::thread::scope(|s| {
            for mark in 0..4u8 {
                let pool = &pool;
                s.spawn(move || {
                    for round in 0..500 {
                        let mut buf = pool.get(1 + round * 37 % 20_000);
                        buf.fill(mark);
                        let shared = buf.freeze();
                        std::thread::yield_now();
                        assert!(shared.iter().all(|b| *b == mark));
                    }
                });
            }
        });
    }
}
