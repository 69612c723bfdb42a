//! The mount: translates the kernel's FUSE requests into calls of [`weir_client::Client`], and nothing more.
//!
//! Invariant: no type of the FUSE crate leaves this one, so that another transport can take its place.
//! Knows nothing of stripes, targets or leases beyond "may be cached" and "forget this".
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a mount exists on a real machine only"
)]
mod attach;
mod call;
mod callers;
mod counts;
mod credentials;
mod doing;
mod entries;
mod features;
mod filesystem;
mod interrupts;
mod kernel;
mod live;
mod log;
mod mount_options;
mod mounts;
mod replies;
mod request_bytes;
mod ring;
mod ring_header;
mod ring_slot;
mod snapshots;
mod translate;
mod transport;
mod tree;
mod work;

pub use attach::{Options, attach, clear_dead, preflight, remount, unmount};
pub use counts::request_counts;
pub use kernel::Notices;
pub use live::{OwnActs, OwnAttributes};
pub use mounts::{is_mounted, mount_points};
pub use transport::Transport;
