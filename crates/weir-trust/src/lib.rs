//! What a cluster can prove, and what follows from it: the records of its audit log, and that none was
//! changed; what rules let a mount do.
//!
//! Pure: a line goes in or comes out. Knows nothing of sockets, files or paths.
#![forbid(unsafe_code)]

pub mod audit;
pub mod rules;
