//! One client's state for all its files together. Tables alone: nothing here sends a message or waits for
//! one.
pub mod births;
pub mod recalls;

use births::Births;
use recalls::Recalls;

#[derive(Default)]
pub struct Tables {
    pub recalls: Recalls,
    /// Files that the leader does not know of yet.
    pub births: Births,
}
