//! An allocator that counts what a thread holds at most: decoders must not believe the lengths in hostile
//! bytes.
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn note(bytes: isize) {
    // Dropped at the end of a thread: no test measures there.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        PEAK.with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is passed on to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: the caller's promise; `alloc` got it from the system.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The most that `work` holds at a time, beyond what there was before.
pub fn peak_bytes(work: impl FnOnce()) -> usize {
    let before = HELD.get();
    PEAK.set(before);
    work();
    (PEAK.get() - before) as usize
}

/// What decoding may hold: an element of a list takes at least a byte of the input and at most some hundred
/// bytes of memory; an error's text has a size of its own.
pub fn bytes_max(input_bytes: usize) -> usize {
    4096 + 256 * input_bytes
}
