//! One client's state for all its files together. Tables alone: nothing here sends a message or waits for
//! one.
pub mod births;
pub mod closes;
pub mod floors;
pub mod locks;
pub mod recalls;
pub mod reservations;

use births::Births;
use closes::Closes;
use floors::Floors;
use locks::Locks;
use recalls::Recalls;
use reservations::Reservations;

#[derive(Default)]
pub struct Tables {
    /// Closes that the leader does not know of yet.
    pub closes: Closes,
    /// Quota reservations under limits of bytes.
    pub reservations: Reservations,
    /// Write floors of volumes.
    pub floors: Floors,
    pub locks: Locks,
    pub recalls: Recalls,
    /// Files that the leader does not know of yet.
    pub births: Births,
}
