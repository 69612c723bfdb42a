//! Copies of a namespace's journal on several nodes, of which one leads.
//!
//! The coordinator decides which copy leads and which are current (`weir_coord::decide::JournalGroup`); the
//! leader ([`Copier`]) sends its records to the others ([`Follower`]), and a record is durable when all
//! current members keep it.
//!
//! Knows nothing of the records' content.
mod copier;
pub mod decide;
mod follow;
mod right;

pub use copier::{Copier, Group, News, Reporter};
pub use follow::Follower;
pub use right::Right;
