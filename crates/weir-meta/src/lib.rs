//! The metadata service of one namespace: names, attributes, leases, locks, exactly-once changes, recursive
//! usage.
//!
//! [`Meta`] is the service of a namespace's leader. It keeps everything in a `weir_kv` store under the keys
//! of [`keys`]; `registry` lists the operations, [`namespace`] has them, [`lease`] decides which client may
//! cache which inode, `leader` runs them all, `job` has what the leader does by itself.
//!
//! Knows nothing of disks, of FUSE or of home back ends; it never touches a file's data except inline bytes.
#![forbid(unsafe_code)]

mod access;
mod allowances;
mod backup;
mod calls;
mod compare;
pub mod copies;
pub mod crash_points;
pub mod evict;
pub mod export;
mod guest;
mod holds;
mod job;
pub mod keys;
mod leader;
mod leadership;
pub mod lease;
mod limits;
pub mod lock;
pub mod namespace;
mod near_limits;
mod obstacle;
mod ops;
pub mod owner_limits;
mod owners;
mod purge;
mod quotas;
mod reach;
pub mod recalls;
pub mod record;
mod registry;
pub mod relation;
pub mod restore;
mod service;
mod session;
mod table;
pub mod tables;
mod troubles;
pub mod unsettled;
mod witness;

pub use access::{Refusal, Refused};
pub use evict::{Level, Space};
pub use leader::MetaConfig;
pub use leadership::Leadership;
pub use namespace::LayoutPolicy;
pub use namespace::home::AtHome;
pub use purge::{NoTargets, Purge};
pub use record::StripeTruncation;
pub use relation::proof::at_home;
pub use service::Meta;
pub use witness::{Witness, Witnessed};
