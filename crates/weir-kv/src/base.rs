//! The folded tree: a redb database over a file of the environment.
//!
//! Written only by folds: one durable redb commit takes a whole sealed delta and the number of its last
//! transaction, so after a crash the tree is the state of exactly one transaction. redb never sees the
//! journal.
//!
//! Knows nothing of transactions in flight.

use crate::CommitSeq;
use crate::change::{Change, Delta};
use redb::{
    AccessGuard, Database, Durability, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    StorageBackend, TableDefinition,
};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_env::File;
use weir_proto::{Epoch, Error, ErrorKind, Result};

const ENTRIES: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("entries");
const FOLDED: TableDefinition<'static, &str, u64> = TableDefinition::new("folded");
/// A tree up to this size is fully verified when it is opened, which takes a second or less. Of larger ones
/// only the pages that redb itself reads are: a start must not take minutes.
const VERIFIED_BYTES_MAX: u64 = 256 << 20;
const FOLDED_SEQ: &str = "seq";
const FOLDED_SEGMENT: &str = "segment";
const FOLDED_EPOCH: &str = "epoch";
/// The space that the entries need at least, see [`entry_bytes`]. Missing: it is not known.
const FOLDED_BYTES: &str = "bytes";

/// How much of the journal is folded in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Folded {
    pub(crate) seq: CommitSeq,
    /// Number of the newest journal segment that is folded in completely; such numbers are never reused.
    pub(crate) segment: u64,
    /// Epoch of the record `seq`; 0 in a store that never had copies.
    pub(crate) epoch: Epoch,
}

/// The database, for the folding task.
pub(crate) struct Tree {
    database: Database,
    failures: Arc<Failures>,
}

/// Errors of the disk. After any of them redb refuses every call, reads too.
#[derive(Default)]
struct Failures {
    read: AtomicBool,
    changed: AtomicBool,
}

impl Failures {
    /// Whether only a read failed: then the tree on the disk is unchanged, and may be reopened.
    fn only_read(&self) -> bool {
        self.read.load(Ordering::Acquire) && !self.changed.load(Ordering::Acquire)
    }
}

impl Tree {
    pub(crate) fn open(file: Arc<dyn File>, cache_bytes: usize) -> Result<Tree> {
        let doing = "open the state tree";
        let bytes = file.len().map_err(|e| Error::from_io(doing, &e))?;
        let failures = Arc::<Failures>::default();
        guarded(doing, || {
            let database = Database::builder()
                .set_cache_size(cache_bytes)
                .create_with_backend(Backend { file, failures: failures.clone() })
                .map_err(|e| error(doing, e))?;
            let mut tree = Tree { database, failures };
            if bytes <= VERIFIED_BYTES_MAX {
                tree.verify(doing)?;
            }
            Ok(tree)
        })
    }

    /// Verifies every page's checksum. redb checks them only after a suspected crash: a damaged or misplaced
    /// page would be accepted, and entries would be missing silently.
    fn verify(&mut self, doing: &str) -> Result<()> {
        let before = self.read_folded(doing)?;
        let sound = self.database.check_integrity().map_err(|e| error(doing, e))?;
        // redb repairs a damaged tree by going back to an earlier commit, whose journal is gone.
        if !sound && self.read_folded(doing)? != before {
            return Err(Error::damaged(format!("{doing}: a page fails its checksum; restore the directory")));
        }
        Ok(())
    }

    /// A read failed: the tree can be used again after it is reopened.
    pub(crate) fn is_lost(&self) -> bool {
        self.failures.only_read()
    }

    /// Writes `deltas`, oldest first, durably.
    pub(crate) fn fold(&self, deltas: &[Arc<Delta>], folded: Folded) -> Result<()> {
        let doing = "fold the journal into the state tree";
        guarded(doing, || self.fold_all(doing, deltas, folded))
    }
    fn fold_all(&self, doing: &str, deltas: &[Arc<Delta>], folded: Folded) -> Result<()> {
        let mut txn = self.database.begin_write().map_err(|e| error(doing, e))?;
        txn.set_durability(Durability::Immediate).map_err(|e| error(doing, e))?;
        // Stores the allocator's state in the commit: opening after a crash need not walk the tree. It also
        // syncs the pages before the root that refers to them, so that a root is never valid if the sync of
        // its pages failed.
        txn.set_quick_repair(true);
        {
            let mut entries = txn.open_table(ENTRIES).map_err(|e| error(doing, e))?;
            let mut at = txn.open_table(FOLDED).map_err(|e| error(doing, e))?;
            let mut bytes = Bytes::of(&entries, &at).map_err(|e| error(doing, e))?;
            for (key, change) in deltas.iter().flat_map(|d| &d.changes) {
                fold_one(&mut entries, key, change, &mut bytes).map_err(|e| error(doing, e))?;
            }
            bytes.write(&mut at).map_err(|e| error(doing, e))?;
            at.insert(FOLDED_SEQ, folded.seq.0).map_err(|e| error(doing, e))?;
            at.insert(FOLDED_SEGMENT, folded.segment).map_err(|e| error(doing, e))?;
            if folded.epoch > Epoch(0) {
                at.insert(FOLDED_EPOCH, folded.epoch.0).map_err(|e| error(doing, e))?;
            }
        }
        txn.commit().map_err(|e| error(doing, e))
    }

    /// Writes entries of a state that is being transferred, durably.
    pub(crate) fn fill(&self, pairs: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let doing = "fill the state tree";
        guarded(doing, || {
            let mut txn = self.database.begin_write().map_err(|e| error(doing, e))?;
            txn.set_durability(Durability::Immediate).map_err(|e| error(doing, e))?;
            txn.set_quick_repair(true);
            {
                let mut entries = txn.open_table(ENTRIES).map_err(|e| error(doing, e))?;
                let mut at = txn.open_table(FOLDED).map_err(|e| error(doing, e))?;
                let mut bytes = Bytes::of(&entries, &at).map_err(|e| error(doing, e))?;
                for (key, value) in pairs {
                    insert(&mut entries, key, value, &mut bytes).map_err(|e| error(doing, e))?;
                }
                bytes.write(&mut at).map_err(|e| error(doing, e))?;
            }
            txn.commit().map_err(|e| error(doing, e))
        })
    }

    pub(crate) fn folded(&self) -> Result<Folded> {
        let doing = "read how far the journal is folded";
        guarded(doing, || self.read_folded(doing))
    }
    fn read_folded(&self, doing: &str) -> Result<Folded> {
        let txn = self.database.begin_read().map_err(|e| error(doing, e))?;
        let table = match txn.open_table(FOLDED) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Folded::default()),
            Err(e) => return Err(error(doing, e)),
        };
        let get = |key| Ok(table.get(key).map_err(|e| error(doing, e))?.map_or(0, |v| v.value()));
        let (seq, segment, epoch) = (get(FOLDED_SEQ)?, get(FOLDED_SEGMENT)?, get(FOLDED_EPOCH)?);
        Ok(Folded { seq: CommitSeq(seq), segment, epoch: Epoch(epoch) })
    }

    /// The space that its entries need at least; none: not known.
    pub(crate) fn bytes(&self) -> Result<Option<u64>> {
        let doing = "read the size of the state";
        guarded(doing, || {
            let txn = self.database.begin_read().map_err(|e| error(doing, e))?;
            match txn.open_table(FOLDED) {
                Ok(table) => {
                    Ok(table.get(FOLDED_BYTES).map_err(|e| error(doing, e))?.map(|bytes| bytes.value()))
                }
                Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
                Err(e) => Err(error(doing, e)),
            }
        })
    }

    /// The newest fold, for readers; it stays readable while the next fold runs. None before the first fold.
    pub(crate) fn snapshot(&self) -> Result<Option<Base>> {
        let doing = "read the state tree";
        guarded(doing, || {
            let txn = self.database.begin_read().map_err(|e| error(doing, e))?;
            match txn.open_table(ENTRIES) {
                Ok(table) => Ok(Some(Base { table, failures: self.failures.clone() })),
                Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
                Err(e) => Err(error(doing, e)),
            }
        })
    }
}

type Entries<'t> = redb::Table<'t, &'static [u8], &'static [u8]>;
type Numbers<'t> = redb::Table<'t, &'static str, u64>;
type Stored<T> = std::result::Result<T, redb::StorageError>;

/// Bytes of an entry beside its key and value, generously.
pub(crate) const ENTRY_BYTES: u64 = 32;

fn entry_bytes(key: &[u8], value: &[u8]) -> u64 {
    (key.len() + value.len()) as u64 + ENTRY_BYTES
}

/// The value of [`FOLDED_BYTES`] during a commit. A tree that an older release made has none.
struct Bytes(Option<u64>);

impl Bytes {
    fn of(entries: &Entries<'_>, at: &Numbers<'_>) -> Stored<Bytes> {
        let known = at.get(FOLDED_BYTES)?.map(|bytes| bytes.value());
        Ok(Bytes(if entries.is_empty()? { Some(0) } else { known }))
    }
    fn change(&mut self, more: u64, less: u64) {
        self.0 = self.0.map(|bytes| (bytes + more).saturating_sub(less));
    }
    fn write(&self, at: &mut Numbers<'_>) -> Stored<()> {
        if let Some(bytes) = self.0 {
            at.insert(FOLDED_BYTES, bytes)?;
        }
        Ok(())
    }
}

fn insert(entries: &mut Entries<'_>, key: &[u8], value: &[u8], bytes: &mut Bytes) -> Stored<()> {
    let before = entries.insert(key, value)?.map_or(0, |old| entry_bytes(key, old.value()));
    bytes.change(entry_bytes(key, value), before);
    Ok(())
}

fn fold_one(entries: &mut Entries<'_>, key: &[u8], change: &Change, bytes: &mut Bytes) -> Stored<()> {
    match change {
        Change::Put(value) => insert(entries, key, value, bytes)?,
        Change::Delete => {
            let before = entries.remove(key)?.map_or(0, |old| entry_bytes(key, old.value()));
            bytes.change(0, before);
        }
        Change::Add(_) | Change::Max(_) => {
            let below = entries.get(key)?.map(|v| v.value().to_vec());
            let value = change.apply(below.as_deref()).expect("a number has a value");
            insert(entries, key, &value, bytes)?;
        }
    }
    Ok(())
}

/// The tree after one fold.
pub(crate) struct Base {
    table: redb::ReadOnlyTable<&'static [u8], &'static [u8]>,
    failures: Arc<Failures>,
}

impl Base {
    /// See [`Tree::is_lost`].
    pub(crate) fn is_lost(&self) -> bool {
        self.failures.only_read()
    }

    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let doing = "read a key of the state tree";
        guarded(doing, || {
            let value = self.table.get(key).map_err(|e| unread(doing, e))?;
            Ok(value.map(|v| v.value().to_vec()))
        })
    }

    pub(crate) fn range(&self, start: &[u8], end: &[u8]) -> Result<Range> {
        let doing = "scan the state tree";
        guarded(doing, || Ok(Range(self.table.range::<&[u8]>(start..end).map_err(|e| unread(doing, e))?)))
    }
}

pub(crate) struct Range(redb::Range<'static, &'static [u8], &'static [u8]>);

impl Iterator for Range {
    type Item = Result<Entry>;
    fn next(&mut self) -> Option<Result<Entry>> {
        let doing = "scan the state tree";
        let next = guarded(doing, || self.0.next().transpose().map_err(|e| unread(doing, e)));
        next.map(|found| found.map(|(k, v)| Entry(k, v))).transpose()
    }
}

pub(crate) struct Entry(AccessGuard<'static, &'static [u8]>, AccessGuard<'static, &'static [u8]>);

impl Entry {
    pub(crate) fn key(&self) -> &[u8] {
        self.0.value()
    }
    pub(crate) fn value(&self) -> &[u8] {
        self.1.value()
    }
}

/// redb asserts the contents of its pages: a damaged page causes a panic there, which becomes an error here.
/// After one the tree is not used any more: the error fails the store.
fn guarded<T>(doing: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let panic_text = panic.downcast_ref::<String>().map(String::as_str);
        let panic_text =
            panic_text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a page is damaged");
        Err(Error::damaged(format!(
            "{doing}: the state tree contradicts itself ({panic_text}); restore the directory"
        )))
    })
}

/// Like [`error`] for a read, after which the tree is reopened.
fn unread(doing: &str, e: impl Into<redb::Error>) -> Error {
    let e = error(doing, e);
    if e.kind == ErrorKind::Io { e.of_kind(ErrorKind::Unavailable) } else { e }
}

/// Maps redb's error to a kind by what the caller can do.
fn error(doing: &str, e: impl Into<redb::Error>) -> Error {
    match e.into() {
        redb::Error::Io(e) => Error::from_io(doing, &e),
        redb::Error::PreviousIo => {
            Error::unavailable(format!("{doing}: its disk failed, and it is being opened again"))
        }
        redb::Error::Corrupted(what) => Error::damaged(format!("{doing}: {what}; restore the directory")),
        e => Error::io(format!("{doing}: {e}")),
    }
}

/// redb's disk. One process opens the directory (the engine holds its lock), so redb's own locks are omitted.
struct Backend {
    file: Arc<dyn File>,
    failures: Arc<Failures>,
}

impl Backend {
    fn change(&self, done: io::Result<()>) -> io::Result<()> {
        if done.is_err() {
            self.failures.changed.store(true, Ordering::Release);
        }
        done
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Backend")
    }
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let done = self.file.read_exact_at(out, offset);
        if done.is_err() {
            self.failures.read.store(true, Ordering::Release);
        }
        done
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        let old = self.file.len()?;
        if len <= old {
            return self.change(self.file.set_len(len));
        }
        // A full disk is detected here, before any write. But redb doubles its file, of which a nearly full
        // disk may have too little, though enough for the pages that are written.
        let grown = self.file.allocate(old, len - old).or_else(|e| match e.kind() {
            io::ErrorKind::StorageFull => self.file.set_len(old).and_then(|()| self.file.set_len(len)),
            _ => Err(e),
        });
        self.change(grown)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.change(self.file.sync_data())
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(self.file.write_all_at(data, offset))
    }
}
