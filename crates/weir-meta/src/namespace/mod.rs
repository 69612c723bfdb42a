//! The operations of the namespace: each reads, checks and changes inside one transaction.
//!
//! Invariants: an operation either makes all its changes or, with an error, none. It changes nothing as long
//! as there is an obstacle, such as another session's lease: it names the obstacle, halts, and is retried
//! later. Its reply has no lease kinds in it: those are granted when the transaction is committed.
//!
//! `cx` is an operation in progress, `records` and `permission` are used by all of them; each other file has
//! some operations or a part of them. Knows nothing of connections, durability, or how leases are revoked.

pub mod admit;
pub mod attr;
mod charge;
pub mod clone;
pub mod create;
mod cx;
pub mod data;
mod dir_names;
pub mod evict;
pub mod evicted;
mod garbage;
mod gate;
pub mod home;
pub mod import;
pub mod keeper;
pub mod layers;
pub mod list;
pub mod local_creates;
pub mod log;
pub mod lost;
pub mod mirror;
pub mod objects;
pub mod open;
pub mod path;
mod permission;
mod promised;
mod records;
pub mod remove;
mod remove_tree;
pub mod rename;
pub mod report;
pub mod snapshot;
pub mod snapshot_view;
pub mod trash;
mod usage;
pub mod volume;
mod writer;
pub mod xattr;

pub use charge::Charge;
pub use cx::{Cx, Events, LayoutPolicy, Rules, View, run};
pub use home::AtHome;
pub use keeper::Snapshots;
pub use records::{find_inode, find_link};
pub use usage::{totals, usage_of, volume_usage};

use crate::keys;
use crate::lease::{Conflict, Need, NoteConflict};
use crate::obstacle::{Attempt, Obstacle};
use crate::record::{Access, HAS_ACL, Inode, Link, NOT_ENUMERATED, Record, Tally, directory_attr};
use crate::table::{All, Present};
use crate::tables;
use cx::{entry, entry_of, nothing, require_listed, unleased};
use permission::{allows, check_name, find_acl, require, require_sticky};
use records::{directory, find_access, load_access, load_file, load_link, load_tally, owner_of, show};
use weir_kv::{Read, Txn};
use weir_proto::map::Layout;
use weir_proto::meta::{Attr, Cred, Entry, FileKind, LeaseKind, Time};
use weir_proto::posix::acl::{self, Acl};
use weir_proto::posix::{EXECUTE, MODE_BITS, Owned, READ, SEARCH, WRITE};
use weir_proto::volume::Policy;
use weir_proto::{Error, InodeId, NameRule, Result, SessionId, VolumeId};

#[cfg(test)]
mod tests;
