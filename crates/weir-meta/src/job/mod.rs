//! The leader's own jobs, beside the calls of clients.
pub mod clones;
pub mod evictor;
pub mod ingest;
pub mod remover;
pub mod schedule;
pub mod snapshots;
pub mod sweeper;
pub mod trash;
