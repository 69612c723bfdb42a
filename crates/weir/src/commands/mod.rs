//! Commands, one file for each noun: options, requests to the cluster or a mount, output.
pub mod backup;
pub mod clone;
pub mod eviction;
pub mod file;
pub mod inspect;
pub mod mounts;
pub mod prefetch;
pub mod relation;
pub mod report;
pub mod restore;
pub mod snapshots;
pub mod status;
pub mod target;
pub mod tiering;
pub mod troubles;
pub mod verify;
pub mod volume;
