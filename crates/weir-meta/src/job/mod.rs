//! The leader's own jobs, beside the calls of clients.
pub mod ingest;
