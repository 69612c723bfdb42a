//! What a mover asks of a home: names, data, listings; the same for a directory, S3 and another Weir.
//!
//! Always holds: where home is not as we left it, the answer is [`Fault::Diverged`] and nothing was changed.
//! Every call ends by the home's deadline. Each call may be made again after a crash half way: it finds its
//! own result and says so as it would have. How each one tells its result from a stranger's is said with it.
//!
//! Refuses to know: volumes, cursors, receipts, who asks and how often.
use crate::{Attrs, Expect, Fingerprint, HomePath, Make, Outcome};
use bytes::Bytes;
use std::ops::Range;
use weir_env::BoxFuture;
use weir_proto::meta::FileKind;

/// What a home can do. What it cannot keep is left out when it is written there; a mover says so once per
/// relation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traits {
    /// Users and groups are kept. A mover that is not root at home keeps no owners.
    pub owners: bool,
    /// Access times are kept, and modification times of everything to the nanosecond, also of the largest
    /// files.
    pub exact_times: bool,
    /// Extended attributes of users are kept.
    pub xattrs: bool,
    /// All extended attributes of one thing with their names; with more it cannot be kept at home.
    pub xattr_bytes_max: usize,
    /// A path as home writes it; a longer one cannot be kept at home.
    pub path_bytes_max: usize,
    /// Access control lists are kept.
    pub acls: bool,
    pub hard_links: bool,
    /// Pipes, sockets and devices.
    pub special_files: bool,
    /// What was written of a file that still grows can be read at home, as a prefix.
    pub growing_prefix: bool,
    /// Calls that it takes at the same time; more of them wait.
    pub calls_max: usize,
    /// Ranges of one file may be written by several writers, in any order.
    pub parallel_writers: bool,
    /// Ranges may be written over in place. Otherwise a file that is opened again is made anew out of its old
    /// parts.
    pub in_place: bool,
    /// Files keep their holes.
    pub holes: bool,
    /// Renaming a directory is one step, however much is in it.
    pub cheap_rename: bool,
    /// A stray change between our last write and the next is found by more than size and time.
    pub strong_fingerprints: bool,
}

/// One thing in a listing of home, or where it was asked for by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub fingerprint: Fingerprint,
    pub attrs: Attrs,
    /// Names of this file.
    pub nlink: u32,
    /// Of a symbolic link; otherwise empty.
    pub target: Bytes,
    /// Of a device: major and minor number as `stat` has them.
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
    /// Nothing comes after these.
    pub end: bool,
}

/// Space at home in bytes; unlimited where home does not say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HomeSpace {
    pub total: u64,
    pub free: u64,
}

/// A place where a volume's data is kept beside the cache.
pub trait Home: Send + Sync + 'static {
    /// As it was given, without secrets: for people.
    fn url(&self) -> &str;
    fn traits(&self) -> Traits;

    /// Whether things of this kind pass at all. Others are made there by nobody, and not shown here.
    fn lets_through(&self, _kind: FileKind) -> bool {
        true
    }

    // ---- names: durable after the next `settle`

    /// Makes something new, with attributes. Its own result is found again as: a directory that is empty or has these
    /// very attributes; an empty file with one name; a link with this very target; a device of this very number. Such
    /// a one gets the attributes and is ours: nothing can be lost by it. Anything else in the way has diverged.
    fn make<'a>(
        &'a self,
        path: &'a HomePath,
        what: &'a Make,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Gives a file another name. Its own result: the new name leads to the very same file.
    fn link<'a>(
        &'a self,
        existing: &'a HomePath,
        expect: &'a Expect,
        path: &'a HomePath,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Removes a name; of a directory, an empty one. Its own result: there is nothing.
    fn remove<'a>(&'a self, path: &'a HomePath, expect: &'a Expect) -> BoxFuture<'a, Outcome<()>>;

    /// Moves a name, over what `replaces` describes or over nothing. Its own result: nothing at the old name,
    /// and at the new one what is expected.
    fn rename<'a>(
        &'a self,
        from: &'a HomePath,
        expect: &'a Expect,
        to: &'a HomePath,
        replaces: Option<&'a Expect>,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Two names change places; answered with what is at `a` and at `b` then. Its own result: each is at the
    /// other's.
    fn exchange<'a>(
        &'a self,
        a: &'a HomePath,
        expect_a: &'a Expect,
        b: &'a HomePath,
        expect_b: &'a Expect,
    ) -> BoxFuture<'a, Outcome<(Fingerprint, Fingerprint)>>;

    /// Sets all attributes: extended ones that are not named are taken away. Its own result: the size
    /// expected and the time that was to be set.
    fn set_attrs<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        attrs: &'a Attrs,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Truncates or extends (with a hole) a file. Its own result: the very file has this size already.
    fn resize<'a>(
        &'a self,
        path: &'a HomePath,
        expect: &'a Expect,
        size: u64,
    ) -> BoxFuture<'a, Outcome<Fingerprint>>;

    /// Makes all changes of names and attributes durable that were answered before. Call it before telling
    /// anybody that they are done; once for many is cheap.
    fn settle(&self) -> BoxFuture<'_, Outcome<()>>;

    // ---- data

    /// The range that a piece of a file beginning at `offset` should have to suit this home, of about
    /// `bytes_wanted`. Only the last piece of a file may be shorter.
    fn piece(&self, offset: u64, bytes_wanted: u64) -> Range<u64>;

    /// Opens a file to write. `Expect::Unchanged` if nobody has written since that fingerprint was given;
    /// `Expect::Ours` if somebody of us may have (another mover writes it too, or one died over it before it
    /// could tell).
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

    /// What is there; absent: nothing, or no directory above.
    fn stat<'a>(&'a self, path: &'a HomePath) -> BoxFuture<'a, Outcome<Option<Found>>>;

    /// The first `limit` entries (fewer only with `end`), or those behind the entry called `after`, in an
    /// order of the home's own: that of the names where the names are plain.
    fn list<'a>(
        &'a self,
        dir: &'a HomePath,
        after: Option<&'a [u8]>,
        limit: usize,
    ) -> BoxFuture<'a, Outcome<Listing>>;

    /// Begins to read a directory from its beginning to its end, once, however large it is.
    fn read_dir<'a>(&'a self, dir: &'a HomePath) -> BoxFuture<'a, Outcome<Box<dyn HomeLister>>>;

    fn space(&self) -> BoxFuture<'_, Outcome<HomeSpace>>;
}

/// A directory at home that is being read, in an order of the home's own; memory is one part, whatever is in
/// it.
pub trait HomeLister: Send + 'static {
    /// The next entries, about `limit`; perhaps none although more come. Not to be asked after the end.
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>>;
}

/// A file at home, open to be written. Dropped without `finish`: what was synced stays.
pub trait HomeWriter: Send + Sync + 'static {
    /// Writes the parts one after the other from `offset`. In order, so that home always shows a prefix.
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>>;

    /// The range is a hole, or zeros where home has no holes; the file is at least as long as the range
    /// reaches.
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>>;

    /// Makes what was written durable. The fingerprint is what to expect from now on.
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>>;

    /// Truncates or extends the file to its final size, sets its attributes and times: it is complete at
    /// home. Durable.
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>>;
}

/// A file at home, open to be read. Every answer was checked: the file was still the one expected after it
/// was read.
pub trait HomeReader: Send + Sync + 'static {
    /// Fewer bytes than asked only at the end of the file.
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>>;

    /// The first range of data at or after `offset`; none: only holes up to the end. Where holes are not
    /// known, everything is data.
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>>;

    fn fingerprint(&self) -> &Fingerprint;
}
