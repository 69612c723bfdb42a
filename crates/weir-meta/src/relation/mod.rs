//! Relations: home's progress, and the movers' work on it. See decision 12.
//!
//! Invariant: work that a mover has is assigned to no other before that mover has ended, even after a restart
//! of the leader; because home cannot distinguish a late writer from the present one.
//!
//! `store` and `tree` know the records, `steps` derives the meaning of a change, `changelog` has
//! the look-ups in a volume's log, `ingest` moves changes from there to the queues. `ship_queue` assigns
//! work: names in the order of `order` and `relocations`, ranges as `weir_relation` decides, which has the
//! states of files. `results` and `apply` record the work of movers, `proof` answers eviction; `admin` and
//! `home_place` are operations, `rules` has patterns and limits. Nothing here knows the leader: `leader` and
//! `job` call it.
pub mod admin;
pub mod apply;
pub mod changelog;
mod extents;
pub mod home_place;
pub mod home_url;
pub mod ingest;
pub mod listing;
pub mod order;
pub mod proof;
pub mod queues;
pub mod record;
mod relocations;
pub mod results;
pub mod rules;
pub mod ship_queue;
pub mod steps;
pub mod store;
pub mod tree;
