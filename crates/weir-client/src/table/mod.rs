//! One client's state for all its files together. Tables alone: nothing here sends a message or waits for
//! one.
pub mod recalls;

use recalls::Recalls;

#[derive(Default)]
pub struct Tables {
    pub recalls: Recalls,
}
