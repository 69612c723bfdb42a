//! Relations: home's progress, and the movers' work on it. See decision 12.
//!
//! Invariant: work that a mover has is assigned to no other before that mover has ended, even after a restart
//! of the leader; because home cannot distinguish a late writer from the present one.
//!
//! `store` knows the records, `tree` and `dirty` derive the meaning of a change, `changelog` has the look-ups
//! in a volume's log, `ingest` moves changes from there to the queues, `ship_queue` assigns work,
//! `relocations` resolves conflicts of names, `results` records what movers have done, `proof` knows what
//! home has of a file; `admin` and `home_place` are operations. Nothing here knows the leader: `leader` and
//! `job` call it.
pub mod admin;
pub mod changelog;
mod dirty;
pub mod home_place;
pub mod home_url;
pub mod ingest;
pub mod listing;
pub mod listings;
pub mod orphans;
mod parts;
pub mod proof;
pub mod queues;
mod ready;
pub mod record;
mod relocations;
pub mod results;
pub mod ship_queue;
pub mod store;
pub mod tree;
