//! Cells on targets, safe across crashes: the target store, and the service of the storage role.
//!
//! A target is one directory: slab files with the bytes, and an index that describes them. See
//! `docs/format.md`, "Target store", and decision record 1 for the protocol of stripes, overlays and seals.
//!
//! Knows nothing of files' names, paths or users.
#![forbid(unsafe_code)]

mod admission;
pub mod alloc;
mod calls;
pub mod cells;
mod channels;
mod compare;
mod comparing;
mod copies;
pub mod crash_points;
mod damage;
mod disk_threads;
pub mod entries;
mod fences;
mod forgetting;
pub mod format;
pub mod group;
mod handed_over;
pub mod image;
pub mod index;
pub mod inspect;
mod logs;
pub mod lookup;
mod membership;
mod moving;
mod open;
mod pace;
pub mod peers;
pub mod read;
mod read_frequency;
pub mod rebuild;
mod recent;
mod recent_map;
mod refill;
mod refilled;
mod repair;
mod requests;
pub mod runs;
mod scrub;
mod scrubbing;
pub mod seal;
pub mod service;
pub mod slab;
pub mod spill;
mod stall;
pub mod store;
pub mod stripes;
mod traffic;
pub mod truncations;
mod under_replicated;

pub use alloc::Geometry;
pub use open::{INDEX, open_index, open_index_with};
pub use service::{StorageNode, TargetConfig};
