//! Serializable transactions over ordered keys.
//!
//! One writer at a time runs a transaction; its changes are visible to readers at once and durable when the
//! journal's group commit includes them ([`Kv::wait_durable`]). A node that reports a change to another node
//! waits for that first.
//!
//! Knows nothing of inodes, maps or cells: keys and values are bytes.
#![forbid(unsafe_code)]

mod base;
mod change;
mod config;
mod copies;
mod core;
pub mod crash_points;
pub mod engine;
pub mod epochs;
mod fold;
mod format;
mod journal;
mod led;
mod mark;
mod means;
mod member;
pub mod memory;
mod reader;
mod recover;
mod space;
mod state;
mod transfer;

pub use copies::{Alone, Copies};
pub use engine::{Engine, EngineConfig};
pub use format::COPIED_BYTES_MAX;
pub use member::Entry;
pub use memory::MemoryKv;
pub use reader::Reader;
pub use recover::{SegmentSummary, read_segment};

pub use transfer::{Export, Import, Pairs, is_unfinished};

use std::sync::Arc;
use weir_env::BoxFuture;
use weir_proto::Result;

/// Number of the last transaction that a state includes. Grows by one per committed transaction; 0: empty
/// store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct CommitSeq(pub u64);

/// How a scan continues after an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scan {
    More,
    Stop,
}

/// Reads of one state of the store.
pub trait Read {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>>;
    /// Calls `visit` for each key in `start..end` in order, until it returns stop.
    fn scan(&self, start: &[u8], end: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> Scan) -> Result<()>;
}

/// The changes of one transaction, applied together or not at all. Reads see the transaction's own changes.
pub trait Txn: Read {
    fn put(&mut self, key: &[u8], value: &[u8]);
    fn delete(&mut self, key: &[u8]);
    /// Adds to an i64 (little-endian; absent counts as 0). Blind: reads nothing.
    fn add(&mut self, key: &[u8], delta: i64);
    /// Raises a u64 (little-endian; absent counts as 0) to at least `value`. Blind: reads nothing.
    fn max(&mut self, key: &[u8], value: u64);
}

/// A body must not call the store that runs it: it may deadlock.
pub trait Kv: Send + Sync + 'static {
    /// Runs `body` exclusively. An error from it discards its changes and is returned. The changes are
    /// visible when this returns, and durable after `wait_durable` of the returned number. A body that
    /// changed nothing commits nothing.
    fn transact(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq>;
    /// Like [`Kv::transact`], but does not start a flush: the caller will add more, and then calls
    /// [`Kv::flush_here`], [`Kv::flush_soon`] or [`Kv::wait_durable`].
    fn transact_more(&self, body: &mut dyn FnMut(&mut dyn Txn) -> Result<()>) -> Result<CommitSeq>;
    /// Starts to make all committed transactions durable.
    fn flush_soon(&self);
    /// Makes all committed transactions durable before it returns, if that is possible on this thread now: a
    /// sync is faster than a switch to another thread and back. Otherwise returns false, and does the same as
    /// [`Kv::flush_soon`].
    fn flush_here(&self) -> bool;
    /// Runs `body` on one consistent state, and returns its number. Must be fast: writers may wait for it.
    fn read(&self, body: &mut dyn FnMut(&dyn Read) -> Result<()>) -> Result<CommitSeq>;
    /// The newest durable commit.
    fn durable(&self) -> CommitSeq;
    /// Returns once everything up to `seq` is durable; an error means the journal failed and the node must
    /// stop.
    fn wait_durable(&self, seq: CommitSeq) -> BoxFuture<'static, Result<()>>;
    /// Makes all committed transactions durable and folds the journal into the state engine.
    fn checkpoint(&self) -> BoxFuture<'static, Result<()>>;
    /// Whether only transactions that free space should be made: the disk has little, which is kept for
    /// these.
    fn is_space_short(&self) -> bool {
        false
    }
}

pub type SharedKv = Arc<dyn Kv>;
