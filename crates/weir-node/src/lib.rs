//! The roles of a cluster, each composed of its parts: the program, the simulator and tests start them by
//! these functions.
//!
//! A role is started by one function, which returns when it serves. The caller decides when it ends. Knows
//! nothing of command lines, configuration files, processes or FUSE.
mod audit;
mod audit_files;
mod audited;
pub mod condition;
mod coord;
mod exports;
mod gate;
mod history;
mod import;
mod meta;
mod namespace;
mod purge;
mod relay;
mod sharing;
mod site;
mod storage;

pub use audit_files::audit_files;
pub use coord::{CoordNode, start_coord, start_shared_coord};
pub use history::keep_history;
pub use import::import_namespace;
pub use meta::{MetaNode, MetaPlace, MetaSpace, start_meta};
pub use relay::start_relay;
pub use site::{Failed, Front, Site, Step};
pub use storage::{StoragePlace, StorageRole, start_storage};
