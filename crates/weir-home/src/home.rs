//! The mover's interface to a home: names, data, listings; the same for a directory, S3 and another Weir.
//!
//! Invariants: if home has changed since our last write, the result is [`Fault::Diverged`] and nothing was
//! changed. Every call ends by the home's deadline. Each call may be repeated after a crash in the middle: it
//! recognizes its own result and returns as the first call would have. Each method documents how it
//! distinguishes its own result from another client's.
//!
//! Refuses to know: volumes, cursors, receipts, the callers and their retries.
use crate::{Attrs, Expect, Fingerprint, HomePath, Make, Outcome};
use bytes::Bytes;
use std::ops::Range;
use weir_env::BoxFuture;
use weir_proto::meta::FileKind;

/// Capabilities of a home. Attributes that it cannot keep are omitted when they are written there; a mover
/// logs that once per relation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traits {
    /// Users and groups are kept. A mover that is not root at home keeps no owners.
    pub owners: bool,
    /// Access times are kept, and modification times of everything to the nanosecond, also of the largest
    /// files.
    pub exact_times: bool,
    /// Extended attributes of users are kept.
    pub xattrs: bool,
    /// Limit on all extended attributes of one entry with their names; with more it cannot be kept at home.
    pub xattr_bytes_max: usize,
    /// Limit on a path in home's form; a longer one cannot be kept at home.
    pub path_bytes_max: usize,
    /// Access control lists are kept.
    pub acls: bool,
    pub hard_links: bool,
    /// Pipes, sockets and devices.
    pub special_files: bool,
    /// The written part of a file that still grows can be read at home, as a prefix.
    pub growing_prefix: bool,
    /// Calls that it takes in parallel; further ones wait.
    pub calls_max: usize,
    /// Ranges of one file may be written by several writers, in any order.
    pub parallel_writers: bool,
    /// Ranges may be overwritten in place. Otherwise a file that is opened again is rebuilt from its old
    /// parts.
    pub in_place: bool,
    /// Files keep their holes.
    pub holes: bool,
    /// Renaming a directory is one step, regardless of its size.
    pub cheap_rename: bool,
    /// A foreign change between two of our writes is detected by more than size and time.
    pub strong_fingerprints: bool,
}

/// One entry in a listing of home, or of a look-up by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub fingerprint: Fingerprint,
    pub attrs: Attrs,
    /// Names of this file.
    pub nlink: u32,
    /// Target of a symbolic link; otherwise empty.
    pub target: Bytes,
    /// Number of a device: major and minor as in `stat`.
    pub rdev: u32,
    /// Bytes that it takes at home.
    pub allocated: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListEntry {
    pub name: Bytes,
    pub found: Found,
}

/// Part of a directory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listing {
    pub entries: Vec<ListEntry>,
    /// There are no further entries.
    pub end: bool,
}

/// Space at home in bytes; unlimited if home does not report it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HomeSpace {
    pub total: u64,
    pub free: u64,
}

/// A place where a volume's data is kept beside the cache.
pub trait Home: Send + Sync + 'static {
    /// The configured URL without secrets: for messages.
    fn url(&self) -> &str;
    fn traits(&self) -> Traits;

    /// Whether entries of this kind pass at all. Others are neither made there nor shown here.
    fn lets_through(&self, _kind: FileKind) -> bool {
        true
    }

    // ---- names: durable after the next `settle`

    /// Makes an entry with attributes. Its own result: an empty directory, or one with these attributes; an
    /// empty file with one name; a link with this target; a device with this number. Such an entry gets the
    /// attributes and is ours, since no data can be lost by that. Any other entry there has diverged.
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Gives a file another name. Its own result: the new name leads to the same file.
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Removes a name; a directory must be empty. Its own result: there is no entry.
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>>;

    /// Renames, over the entry that `replaces` describes or over nothing. Its own result: nothing at the old
    /// name, and the expected entry at the new one.
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Exchanges two names; returns the entries then at `a` and at `b`. Its own result: each is at the
    /// other's name.
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>>;

    /// Sets all attributes: extended ones that are not given are removed. Its own result: the expected size
    /// and the given time.
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Truncates or extends (with a hole) a file. Its own result: the file already has this size.
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Makes all changes of names and attributes durable that returned before. Call it before reporting them
    /// as done; once for many is cheap.
    fn settle(&self) -> BoxFuture<'_, Outcome<()>>;

    // ---- data

    /// The range that a part of a file at `offset` should have to suit this home, of about `bytes_wanted`.
    /// Only the last part of a file may be shorter.
    fn part(&self, offset: u64, bytes_wanted: u64) -> Range<u64>;

    /// Opens a file to write. `Expect::Unchanged` if it was not written since that fingerprint;
    /// `Expect::Ours` if one of our movers may have written it (another mover writes it too, or one died
    /// before it could report).
    fn open_write<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeWriter>>>;

    fn open_read<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
    ) -> BoxFuture<'a, Outcome<Box<dyn HomeReader>>>;

    // ---- looking

    /// The entry at a path; absent: nothing, or no directory above.
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>>;

    /// The first `limit` entries (fewer only with `end`), or those after the entry called `after`, in the
    /// home's own order: by name if names are stored unchanged.
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>>;

    /// Begins to read a directory of any size from its beginning to its end, once.
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>>;

    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>>;
}

/// A directory at home that is being read, in the home's own order; memory is one part, regardless of its
/// size.
pub trait HomeLister: Send + 'static {
    /// The next entries, about `limit`; possibly none although more follow. Not to be called after the end.
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>>;
}

/// A file at home, open for writing. If it is dropped without `finish`, the synced part stays.
pub trait HomeWriter: Send + Sync + 'static {
    /// Writes the parts one after the other from `offset`. In order, so that home always has a prefix of the
    /// file.
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>>;

    /// Makes the range a hole, or zeros if home has no holes; the file is then at least as long as the end of
    /// the range.
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>>;

    /// Makes the written data durable. Returns the fingerprint to expect from now on.
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>>;

    /// Truncates or extends the file to its final size, sets its attributes and times: it is complete at
    /// home. Durable.
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>>;
}

/// A file at home, open for reading. Every reply was checked: after the read the file was still the expected
/// one.
pub trait HomeReader: Send + Sync + 'static {
    /// Fewer bytes than requested only at the end of the file.
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>>;

    /// The first range of data at or after `offset`; none: only holes up to the end. If home does not report
    /// holes, everything is data.
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>>;

    fn fingerprint(&self) -> &Fingerprint;
}
