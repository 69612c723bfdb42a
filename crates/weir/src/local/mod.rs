//! A cluster on this machine: its directory, its processes, and how they are started and stopped.
pub mod owned;
pub mod place;
pub mod process;
pub mod up;
