//! A cluster on this machine: its directory, its processes, their start and stop.
pub mod args;
pub mod etcd;
pub mod forget;
pub mod local_cluster;
pub mod memory;
pub mod owned;
pub mod process;
pub mod unsaved;
pub mod up;
