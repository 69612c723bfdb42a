//! Directories that the kernel is reading: each stream's opener, and its end.
//!
//! Invariant: a stream ends at the newest entry that the directory had when it was read from its start. A
//! name that is created or renamed later has a cookie after all others: without that end, a program that
//! renames entries while it reads would read for ever.
use fuser::FileHandle;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use weir_proto::access::NOBODY;
use weir_proto::meta::Cred;

/// Open streams; their number is bounded by what programs have open.
#[derive(Default)]
pub struct Streams(Mutex<Open>);

#[derive(Default)]
struct Open {
    last: u64,
    streams: HashMap<u64, Stream>,
}

struct Stream {
    /// The user who opened it may read it to its end, even after the process changed its user.
    opened_by: Cred,
    /// The cookie of its last entry, once it is known.
    end: Option<u64>,
}

impl Streams {
    pub fn open(&self, opened_by: Cred) -> FileHandle {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.last += 1;
        let fh = open.last;
        open.streams.insert(fh, Stream { opened_by, end: None });
        FileHandle(fh)
    }

    /// User 65534 for a stream that is not known.
    pub fn opened_by(&self, fh: FileHandle) -> Cred {
        let open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let nobody = || Cred { uid: NOBODY, gid: NOBODY, groups: Vec::new() };
        open.streams.get(&fh.0).map_or_else(nobody, |stream| stream.opened_by.clone())
    }

    /// The end of the stream that was just read from `offset` on; `newest`: the newest cookie in the
    /// directory now.
    pub fn end(&self, fh: FileHandle, offset: u64, newest: u64) -> u64 {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Stream { end, .. }) = open.streams.get_mut(&fh.0) else { return newest };
        if offset == 0 {
            *end = None; // restarted, by `rewinddir`
        }
        *end.get_or_insert(newest)
    }

    pub fn close(&self, fh: FileHandle) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).streams.remove(&fh.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_ends_at_what_was_there_when_it_was_begun() {
        let streams = Streams::default();
        let user = |uid| Cred { uid, gid: 1, groups: vec![1] };
        let (one, other) = (streams.open(user(1)), streams.open(user(2)));
        assert_eq!((streams.opened_by(one), streams.opened_by(other)), (user(1), user(2)));
        assert_eq!(streams.end(one, 0, 10), 10);
        assert_eq!(streams.end(one, 7, 15), 10, "what was made since is behind the end");
        assert_eq!(streams.end(other, 5, 16), 16, "a stream that is begun in the middle");
        assert_eq!(streams.end(other, 16, 20), 16);
        assert_eq!(streams.end(one, 0, 20), 20, "from the start again");
        streams.close(one);
        assert_eq!(streams.end(other, 17, 30), 16);
    }
}
