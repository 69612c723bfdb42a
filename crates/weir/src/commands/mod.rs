//! Commands, a module for each noun: options (`args.rs`), requests to the cluster or a mount, output.
pub mod access;
pub mod audit;
pub mod client;
pub mod file;
pub mod home;
pub mod namespace;
pub mod node;
pub mod relation;
pub mod report;
pub mod target;
pub mod upgrade;
pub mod volume;
pub mod watch;
