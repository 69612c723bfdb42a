//! Cells on targets, safe across crashes: the target store, and the service of the storage role.
//!
//! A target is one directory: slab files with the bytes, and an index that describes them. See
//! `docs/format.md`, "Target store", and decision record 1 for the protocol of stripes, overlays and seals.
//!
//! Knows nothing of files' names, paths or users.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod cells;
mod channels;
mod compare;
mod comparing;
pub mod crash_points;
mod door;
pub mod entries;
mod fences;
mod forgetting;
pub mod format;
pub mod image;
pub mod inspect;
mod latency;
pub mod lookup;
mod moving;
mod open;
mod pace;
pub mod peers;
pub mod read;
mod read_frequency;
mod recent_map;
mod refill;
mod refilled;
pub mod repair;
mod run;
pub mod runs;
mod scrub;
mod scrubbing;
pub mod seal;
pub mod service;
pub mod slab;
pub mod spill;
mod stall;
pub mod store;
mod traffic;
pub mod truncations;

pub use alloc::Geometry;
pub use open::{INDEX, open_index, open_index_with};
pub use service::{StorageNode, TargetConfig};
