//! Diagnosis: the meaning of a cluster's state, in plain words. Pure functions from collected facts to its
//! troubles, to the reasons of a delay, and to one line of health.
//!
//! Invariant: commands, consoles and the log of events give the same text for the same facts. Knows nothing
//! of connections, files, processes, clocks or output.
#![forbid(unsafe_code)]

pub mod backups;
pub mod evidence;
pub mod health;
pub mod machine;
pub mod names;
pub mod quantity;
pub mod spreads;
pub mod troubles;
pub mod waits;
pub mod why;
pub mod work;

pub use evidence::{Answers, Evidence, FileFacts};
pub use health::{Health, InUse};
pub use machine::{MountState, ProcessState, Reach, RoleName};
pub use names::{OwnerNames, Users};
pub use troubles::{Facts, Trouble, troubles};
pub use why::{Finding, ended_waits, findings};
