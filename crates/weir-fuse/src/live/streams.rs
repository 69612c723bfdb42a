//! Directories that the kernel is reading: each stream's opener, its end, and whether its entries come with
//! their attributes.
//!
//! With attributes an entry costs some 13 µs, without them 2; an attribute that is wanted and was left out
//! costs a lookup, some 50 µs (`find -size` of 20 directories, 1,000 files each: 0.88 s with all, 2.5 s with
//! those of the first answer). The kernel's own choice (`FUSE_READDIRPLUS_AUTO`) is wrong for programs that
//! list first and ask for attributes then, as `find` does. So the first entries of a stream always have them,
//! and more have them as long as lookups show that the program wants them: one entry of an answer is left
//! bare, so that a lookup comes for it.
//!
//! Invariant: a stream ends at the newest entry that the directory had when it was read from its start. A
//! name that is created or renamed later has a cookie after all others: without that end, a program that
//! renames entries while it reads would read for ever.
use fuser::FileHandle;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_proto::InodeId;
use weir_proto::access::NOBODY;
use weir_proto::meta::Cred;

/// Entries that come with their attributes from the start of a stream, and after each sign that they are
/// used: as many as `find` lists at once.
const FILLED: u64 = 10_240;

/// Open streams; their number is bounded by what programs have open.
#[derive(Default)]
pub struct Streams {
    open: Mutex<Open>,
    count: AtomicUsize,
}

#[derive(Default)]
struct Open {
    last: u64,
    streams: HashMap<u64, Stream>,
    /// The directories of the streams.
    dirs: HashMap<InodeId, Dir>,
}

#[derive(Default)]
struct Dir {
    streams: usize,
    lookups: u64,
}

struct Stream {
    dir: InodeId,
    /// Entries that were listed since its start, and up to which they have their attributes.
    listed: u64,
    filled_to: u64,
    /// The lookups in its directory up to its last answer.
    lookups: u64,
    /// The user who opened it may read it to its end, even after the process changed its user.
    opened_by: Cred,
    /// The cookie of its last entry, once it is known.
    end: Option<u64>,
}

/// The attributes in the next answer of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    None,
    All,
    /// Of all entries but one: whether a lookup for it comes decides on later answers.
    AllButOne,
}

impl Streams {
    pub fn open(&self, dir: InodeId, opened_by: Cred) -> FileHandle {
        let mut open = self.lock();
        open.last += 1;
        let fh = open.last;
        let at = open.dirs.entry(dir).or_default();
        at.streams += 1;
        let lookups = at.lookups;
        let stream = Stream { dir, listed: 0, filled_to: FILLED, lookups, opened_by, end: None };
        open.streams.insert(fh, stream);
        self.count.store(open.streams.len(), Relaxed);
        FileHandle(fh)
    }

    /// The kernel looks up a name.
    pub fn note_lookup(&self, dir: InodeId) {
        if self.count.load(Relaxed) > 0
            && let Some(dir) = self.lock().dirs.get_mut(&dir)
        {
            dir.lookups += 1;
        }
    }

    /// The attributes in the next answer, from `offset` on.
    pub fn fill(&self, fh: FileHandle, offset: u64) -> Fill {
        let mut open = self.lock();
        let Open { streams, dirs, .. } = &mut *open;
        let Some(stream) = streams.get_mut(&fh.0) else { return Fill::All };
        if offset == 0 {
            (stream.listed, stream.filled_to) = (0, FILLED);
        }
        let lookups = dirs.get(&stream.dir).map_or(0, |dir| dir.lookups);
        if lookups > stream.lookups {
            (stream.lookups, stream.filled_to) = (lookups, stream.listed + FILLED);
        }
        match stream.filled_to.saturating_sub(stream.listed) {
            0 => Fill::None,
            left if left <= FILLED / 2 => Fill::AllButOne,
            _ => Fill::All,
        }
    }

    /// This number of entries more was listed.
    pub fn note_listed(&self, fh: FileHandle, count: u64) {
        if let Some(stream) = self.lock().streams.get_mut(&fh.0) {
            stream.listed += count;
        }
    }

    /// User 65534 for a stream that is not known.
    pub fn opened_by(&self, fh: FileHandle) -> Cred {
        let open = self.lock();
        let nobody = || Cred { uid: NOBODY, gid: NOBODY, groups: Vec::new() };
        open.streams.get(&fh.0).map_or_else(nobody, |stream| stream.opened_by.clone())
    }

    /// The end of the stream that was just read from `offset` on; `newest`: the newest cookie in the
    /// directory now.
    pub fn end(&self, fh: FileHandle, offset: u64, newest: u64) -> u64 {
        let mut open = self.lock();
        let Some(Stream { end, .. }) = open.streams.get_mut(&fh.0) else { return newest };
        if offset == 0 {
            *end = None; // restarted, by `rewinddir`
        }
        *end.get_or_insert(newest)
    }

    pub fn close(&self, fh: FileHandle) {
        let mut open = self.lock();
        if let Some(Stream { dir, .. }) = open.streams.remove(&fh.0)
            && let Some(at) = open.dirs.get_mut(&dir)
        {
            at.streams -= 1;
            if at.streams == 0 {
                open.dirs.remove(&dir);
            }
        }
        self.count.store(open.streams.len(), Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: InodeId = InodeId(5);
    const OTHER: InodeId = InodeId(6);

    #[test]
    fn a_stream_ends_at_what_was_there_when_it_was_begun() {
        let streams = Streams::default();
        let user = |uid| Cred { uid, gid: 1, groups: vec![1] };
        let (one, other) = (streams.open(DIR, user(1)), streams.open(DIR, user(2)));
        assert_eq!((streams.opened_by(one), streams.opened_by(other)), (user(1), user(2)));
        assert_eq!(streams.end(one, 0, 10), 10);
        assert_eq!(streams.end(one, 7, 15), 10, "what was made since is behind the end");
        assert_eq!(streams.end(other, 5, 16), 16, "a stream that is begun in the middle");
        assert_eq!(streams.end(other, 16, 20), 16);
        assert_eq!(streams.end(one, 0, 20), 20, "from the start again");
        streams.close(one);
        assert_eq!(streams.end(other, 17, 30), 16);
    }

    fn root() -> Cred {
        Cred { uid: 0, gid: 0, groups: vec![] }
    }
    /// Lists to the end of `count` entries, 100 at a time; returns for how many attributes were given.
    fn filled(streams: &Streams, fh: FileHandle, count: u64, each: impl Fn(u64, Fill)) -> u64 {
        let mut filled = 0;
        for at in (0..count).step_by(100) {
            let fill = streams.fill(fh, at);
            filled += if fill == Fill::None { 0 } else { 100 };
            streams.note_listed(fh, 100);
            each(at, fill);
        }
        filled
    }

    #[test]
    fn attributes_are_given_as_long_as_they_are_used() {
        let streams = Streams::default();
        let (names, sizes, large) =
            (streams.open(DIR, root()), streams.open(OTHER, root()), streams.open(OTHER, root()));
        let first = FILLED.div_ceil(100) * 100;
        assert_eq!(filled(&streams, names, 50_000, |_, _| streams.note_lookup(OTHER)), first, "unused");
        // A program that asks for each entry at once.
        let bare = |_, fill| {
            if fill == Fill::AllButOne {
                streams.note_lookup(OTHER);
            }
        };
        assert_eq!(filled(&streams, sizes, 50_000, bare), 50_000);
        // One that asks after 10,000 entries.
        let late = |at, _| {
            if at % 10_000 == 9_900 {
                streams.note_lookup(OTHER);
            }
        };
        assert_eq!(filled(&streams, large, 50_000, late), 50_000);
        // From the start again.
        assert_eq!(streams.fill(names, 0), Fill::All);
    }

    #[test]
    fn closed_streams_leave_nothing() {
        let streams = Streams::default();
        let (one, two) = (streams.open(DIR, root()), streams.open(DIR, root()));
        streams.close(one);
        streams.note_lookup(DIR);
        assert_eq!(streams.lock().dirs.len(), 1);
        (0..2).for_each(|_| streams.close(two));
        streams.note_lookup(DIR);
        assert!(streams.lock().dirs.is_empty() && streams.lock().streams.is_empty());
        assert_eq!(streams.fill(one, 7), Fill::All);
    }
}
