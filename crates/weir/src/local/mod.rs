//! A cluster on this machine: its directory, its processes, and how they are started and stopped.
pub mod etcd;
pub mod local_cluster;
pub mod owned;
pub mod process;
pub mod up;
