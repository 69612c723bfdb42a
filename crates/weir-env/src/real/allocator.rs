//! The program's allocator: mimalloc for small blocks, the system's for large ones.
//!
//! Roles and mounts allocate small blocks on one thread and free them on another all the time, which mimalloc
//! does in a third of the time. It returns large ones to the kernel soon, and each use then costs page
//! faults; the system's allocator learns the sizes of buffers that return, and keeps them.

use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout, System};

/// Blocks of this size and larger are the system's. Buffers of requests and fragments are.
const LARGE_BYTES: usize = 32 << 10;

/// For `#[global_allocator]`.
pub struct Allocator;

// SAFETY: a block's allocator follows from its layout alone, and a block is released with the layout that it
// was allocated with.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on as it is.
        unsafe { if layout.size() < LARGE_BYTES { MiMalloc.alloc(layout) } else { System.alloc(layout) } }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on as it is.
        unsafe {
            if layout.size() < LARGE_BYTES {
                MiMalloc.alloc_zeroed(layout)
            } else {
                System.alloc_zeroed(layout)
            }
        }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: passed on as it is, to the allocator that the layout chose.
        unsafe {
            if layout.size() < LARGE_BYTES {
                MiMalloc.dealloc(block, layout)
            } else {
                System.dealloc(block, layout)
            }
        }
    }
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (was_small, is_small) = (layout.size() < LARGE_BYTES, new_size < LARGE_BYTES);
        // SAFETY: blocks that stay with their allocator are passed on as they are. Others are moved: both
        // layouts are valid, since the caller vouches for the new size, and no more than the smaller size is
        // copied.
        unsafe {
            match (was_small, is_small) {
                (true, true) => MiMalloc.realloc(block, layout, new_size),
                (false, false) => System.realloc(block, layout, new_size),
                _ => {
                    let moved = self.alloc(Layout::from_size_align_unchecked(new_size, layout.align()));
                    if !moved.is_null() {
                        std::ptr::copy_nonoverlapping(block, moved, layout.size().min(new_size));
                        self.dealloc(block, layout);
                    }
                    moved
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_their_bytes_across_all_sizes() {
        let sizes = [1, 100, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES, LARGE_BYTES + 1, 40, LARGE_BYTES];
        for align in [1, 16, 4096] {
            let layout = |size| Layout::from_size_align(size, align).unwrap();
            // SAFETY: each call has the layout of the block that it takes, no access is beyond it, and the
            // last block is released.
            unsafe {
                let mut block = Allocator.alloc_zeroed(layout(sizes[0]));
                assert_eq!(*block, 0);
                let mut size = sizes[0];
                for (n, next) in (1u8..).zip(&sizes[1..]) {
                    block.write_bytes(n, size);
                    block = Allocator.realloc(block, layout(size), *next);
                    assert!(block.addr().is_multiple_of(align));
                    let kept = std::slice::from_raw_parts(block, size.min(*next));
                    assert!(kept.iter().all(|byte| *byte == n), "{size} to {next}");
                    size = *next;
                }
                Allocator.dealloc(block, layout(size));
            }
        }
    }
}
