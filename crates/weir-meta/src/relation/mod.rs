//! Relations: home's progress, and the movers' work on it. See decision 12.
//!
//! Invariant: work that a mover has is assigned to no other before that mover has ended, even after a restart
//! of the leader; because home cannot distinguish a late writer from the present one.
//!
//! `store` and `tree` know the records, `steps` and `dirty` derive the meaning of a change, `changelog` has
//! the look-ups in a volume's log, `ingest` moves changes from there to the queues. `ship_queue` assigns
//! work: names in the order of `order` and `relocations`, ranges as `next_work` decides; `file_state` has the
//! states of a file, and `files` the present state of each. `results` and `apply` record the work of movers,
//! `proof` answers eviction; `admin` and `home_place` are operations, `rules` has patterns and limits.
//! Nothing here knows the leader: `leader` and `job` call it.
pub mod admin;
pub mod apply;
pub mod changelog;
mod dirty;
mod extents;
mod file_state;
mod files;
pub mod home_place;
pub mod home_url;
pub mod ingest;
pub mod listing;
pub mod listings;
mod next_work;
pub mod order;
pub mod orphans;
mod parts;
pub mod proof;
pub mod queues;
mod ready;
pub mod record;
mod relocations;
pub mod results;
pub mod rules;
pub mod ship_queue;
pub mod steps;
pub mod store;
pub mod tree;
