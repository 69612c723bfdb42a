//! Files over stripes over cells: turns an application's reads, writes and names into requests to targets and
//! the metadata leader.
//!
//! Invariants: nothing is cached without a lease; an acknowledged byte is in a dirty buffer or on targets; no
//! byte that fails its checksum is returned; memory stays within one budget. Knows nothing of FUSE, Python or
//! HTTP.
#![forbid(unsafe_code)]

mod accesses;
mod assembly;
mod base;
mod budget;
mod cache;
mod callbacks;
mod changed;
mod client;
mod closes;
mod commit;
mod connect;
pub mod crash_points;
mod data;
mod dirty;
mod drops;
mod files;
mod group;
mod handles;
mod holder;
mod hole;
mod idle;
mod inode;
mod inodes;
mod join;
pub mod kept;
mod kernel;
mod known_names;
mod latency;
mod leader;
mod leases;
mod lent_names;
mod local_names;
mod locks;
mod losses;
mod maps;
mod memory;
mod mover;
mod names;
mod objects;
mod parts;
mod patience;
mod plan;
mod prefetch;
mod quota;
mod reader;
mod recovery;
mod reports;
mod resize;
mod revocation;
mod rights;
mod seek;
mod snapshots;
mod space;
mod status;
mod targets;
mod tiering;
mod types;
mod upkeep;
mod waits;
mod window;
mod write_back;
mod writer;
mod writing;

pub use client::{BackupEdit, Client, NewRelation, NewVolume, VolumeEdit};
pub use lent_names::LOAN as NAME_LOAN;
pub use locks::{InTheWay, LockWish, Locked};
pub use mover::{Mover, Recall};
pub use seek::COPY_BYTES_MAX;
pub use snapshots::SnapshotFile;
pub use types::{
    Allocate, ClientConfig, ClientStatus, Forget, Handle, KernelCache, Loss, NewMode, NoKernel, OpenMode,
    Opened, SetAttrs, SetTime, Space, Stat,
};
pub use waits::Waiting;

use weir_env::Env;
use weir_proto::meta::Time;

/// The time of the machine, for times that users see.
fn wall_time(env: &Env) -> Time {
    Time { nanos: env.clock.wall().0 }
}
