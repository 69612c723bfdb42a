//! What a cluster can prove. For now: the records of its audit log, and that none was changed.
//!
//! Pure: a line goes in or comes out. Knows nothing of sockets, files or paths.
#![forbid(unsafe_code)]

pub mod audit;
