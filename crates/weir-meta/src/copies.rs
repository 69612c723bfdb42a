//! Copies of a namespace's journal on several nodes, of which one leads.
//!
//! The coordinator decides which copy leads and which are current (`weir_coord::decide::JournalGroup`); the
//! leader ([`Leader`]) sends its records to the others ([`Follower`]), and a record is durable when all
//! current members keep it.
//!
//! Knows nothing of the records' content.
pub mod decide;
mod follow;
mod lead;
mod right;

pub use follow::Follower;
pub use lead::{Group, Leader, News, Reporter};
pub use right::Right;
