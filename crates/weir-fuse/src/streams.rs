//! Directories that the kernel is reading: where each stream ends.
//!
//! Invariant: a stream ends at the newest entry that the directory had when it was read from its start. A name that is made or renamed
//! later has a cookie behind all others: without that end, a program that renames what it reads would read for ever.
use fuser::FileHandle;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Open streams; their number is bounded by what programs have open.
#[derive(Default)]
pub struct Streams(Mutex<Open>);

#[derive(Default)]
struct Open {
    last: u64,
    /// The cookie of the last entry of each stream, once it is known.
    ends: HashMap<u64, Option<u64>>,
}

impl Streams {
    pub fn open(&self) -> FileHandle {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.last += 1;
        let fh = open.last;
        open.ends.insert(fh, None);
        FileHandle(fh)
    }

    /// Where the stream ends that was just read from `offset` on; `newest`: the newest cookie in the directory now.
    pub fn end(&self, fh: FileHandle, offset: u64, newest: u64) -> u64 {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(end) = open.ends.get_mut(&fh.0) else { return newest };
        if offset == 0 {
            *end = None; // begun anew, by `rewinddir`
        }
        *end.get_or_insert(newest)
    }

    pub fn close(&self, fh: FileHandle) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).ends.remove(&fh.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_ends_at_what_was_there_when_it_was_begun() {
        let streams = Streams::default();
        let (one, other) = (streams.open(), streams.open());
        assert_eq!(streams.end(one, 0, 10), 10);
        assert_eq!(streams.end(one, 7, 15), 10, "what was made since is behind the end");
        assert_eq!(streams.end(other, 5, 16), 16, "a stream that is begun in the middle");
        assert_eq!(streams.end(other, 16, 20), 16);
        assert_eq!(streams.end(one, 0, 20), 20, "from the start again");
        streams.close(one);
        assert_eq!(streams.end(other, 17, 30), 16);
    }
}
