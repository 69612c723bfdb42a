//! Whether home has a file's bytes, so that their space here may be freed.
//!
//! A seam: a namespace's leader gets it as an argument (`MetaConfig::at_home`), because a test may know it by
//! other means.
use crate::record::Inode;
use weir_kv::Read;
use weir_proto::{InodeId, Result};

/// Checks that home has all of `from..to` of a file as it is now, or returns the reason why not. Sees the
/// state of the calling transaction.
pub type AtHome = dyn Fn(&dyn Read, InodeId, &Inode, u64, u64) -> Result<()> + Send + Sync;
