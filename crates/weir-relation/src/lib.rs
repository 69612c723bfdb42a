//! A volume and its home: which mover gets which bytes of which file, and when.
//!
//! `file_state` has the states of a file and the table of their transitions, `files` the present state of
//! each file that movers have work on. `dirty` has the bytes that home lacks, `parts` the parts in which
//! home accepts them, `next_work` the ranges that a mover gets of a file. `ready` has the files to check
//! next, `orphans` the files whose writer died, `listings` the directories to read at home.
//!
//! Pure: facts and events in, decisions out. Knows no store, no keys, no leases, no leader, and of messages
//! only the types of results.
#![forbid(unsafe_code)]
pub mod dirty;
pub mod file_state;
pub mod files;
pub mod listings;
pub mod next_work;
pub mod orphans;
pub mod parts;
pub mod ready;

pub use file_state::FileState;
pub use files::{ExtentOut, Files};
