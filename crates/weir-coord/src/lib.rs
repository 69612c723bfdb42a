//! The cluster map: members, health, placement, epochs.
//!
//! [`Coordinator`] is the service that owns the map; [`Cluster`] is what every other role and every client uses: the
//! newest map, membership, and channels to the nodes in it; [`identity`] ties a directory to a target.
//!
//! Knows nothing of files, cells' contents, or metadata.
#![forbid(unsafe_code)]

pub mod decide;
pub mod identity;
pub mod store;
