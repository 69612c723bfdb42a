//! Cells on targets, safe across crashes: the target store, and the service of the storage role.
//!
//! A target is one directory: slab files with the bytes, and an index that says what they are. See `docs/format.md`,
//! "Target store", and decision record 1 for the protocol of stripes, overlays and seals.
//!
//! Knows nothing of files' names, paths or users.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod cells;
mod channels;
pub mod cuts;
pub mod format;
mod hang;
mod heat;
pub mod inspect;
mod late;
mod lately;
pub mod lookup;
mod open;
pub mod peers;
pub mod points;
pub mod read;
pub mod repair;
mod run;
pub mod runs;
pub mod seal;
pub mod service;
pub mod slab;
pub mod spill;
pub mod store;

pub use alloc::Geometry;
pub use open::{INDEX, open_index, open_index_with};
pub use service::{StorageNode, TargetConfig};
