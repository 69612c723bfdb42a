//! Common definitions for all Weir nodes: ids, frames, messages, layout arithmetic, erasure code, checksums,
//! the cluster map and the kinds of errors.
//!
//! Pure: no I/O, no time, no async, no randomness. Every decoder treats its input as hostile.

#![deny(unsafe_code)] // but for the FFI module of `ec`

pub mod access;
pub mod administration;
pub mod backup;
pub mod checksum;
pub mod condition;
pub mod coord;
pub mod copies;
pub mod data;
pub mod date;
pub mod early;
pub mod ec;
pub mod enrol;
mod error;
pub mod event;
pub mod export;
pub mod frame;
pub mod glob;
pub mod home_rule;
mod ids;
pub mod layout;
pub mod life;
pub mod local_creates;
pub mod lock;
pub mod map;
pub mod meta;
pub mod methods;
pub mod network;
pub mod news;
pub mod part;
pub mod patterns;
pub mod posix;
pub mod quota;
pub mod recall;
pub mod relation;
pub mod retention;
pub mod sender;
pub mod snapshot;
pub mod version;
pub mod volume;
pub mod watch;
pub mod wire;

pub use error::{Error, ErrorKind, NameRule, Result, split_hint};
pub use ids::{
    CellId, ClusterId, DiskUuid, Epoch, FileId, InodeId, NamespaceId, NamespaceUuid, NodeId, PgId, RunId,
    Seq, SessionId, TargetId, Version, VolumeId,
};
pub use wire::{Reader, Wire, Writer};

/// One KiB, MiB, GiB in bytes.
pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A request message: its method number, which is never reused for another one, and the type of its reply.
/// Numbers: 1–99 coordinator, 100–199 metadata, 200–299 target store, 300–399 metadata → client, 400–419
/// between the copies of a journal, 500–509 observation of a process.
pub trait Request: Wire + Send + Sync + 'static {
    const METHOD: u16;
    /// The name in traces and metrics.
    const NAME: &'static str;
    /// The senders that may send it.
    const BY: sender::Senders;
    type Reply: Wire + Send;
}

/// A row of the table of methods.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Method {
    pub number: u16,
    pub name: &'static str,
    pub by: sender::Senders,
    /// It belongs in the audit log: its change, or at least its refusal.
    pub is_administration: bool,
}

impl Method {
    pub const fn of<R: Request>() -> Method {
        Method { number: R::METHOD, name: R::NAME, by: R::BY, is_administration: false }
    }
}
