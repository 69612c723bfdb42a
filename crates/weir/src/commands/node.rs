//! Nodes of a cluster and their certificates: `weir init`, `weir join`, `weir token`, `weir node`, `weir ca`.
pub mod args;
mod ca;
mod enrol;
mod init;

pub use ca::ca;
pub use enrol::{join, node, token};
pub use init::init;
