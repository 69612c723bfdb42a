//! Whether home has a file's bytes, so that the space they take here may be given back.
//!
//! A seam: who leads a namespace is told how to find out (`MetaConfig::at_home`), for a test may know it by
//! other means.
use super::*;

/// Says that home has all of `from..to` of a file as it is now, or why not. Sees the state of the transaction
/// that asks.
pub type AtHome = dyn Fn(&dyn Read, InodeId, &Inode, u64, u64) -> Result<()> + Send + Sync;

pub use crate::relation::at_home;
