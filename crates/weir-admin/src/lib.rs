//! What Weir's programs for administrators share: a cluster is found, by its directory, a configuration, a
//! mount or addresses; its certificate is presented; its state is asked for; clusters on this machine are
//! started and stopped; failures, tables and numbers become text for people.
//!
//! Invariant: no question to a cluster waits for long, even if its processes hang. Knows nothing of commands,
//! and of the work of roles.
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the outermost shell starts processes and reads pid files; nothing of it runs in the simulator"
)]

pub mod attribute;
pub mod certificate;
pub mod cluster_args;
pub mod collect;
pub mod config;
pub mod evidence;
pub mod failure;
pub mod homes;
pub mod local;
pub mod mounts;
pub mod namespace_client;
pub mod observe;
pub mod program;
pub mod progress;
pub mod rotation;
pub mod s3_keys;
pub mod sizes;
pub mod table;
pub mod times;
pub mod users;
pub mod which;
