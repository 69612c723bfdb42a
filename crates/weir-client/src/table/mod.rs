//! One client's state for all its files together. Tables alone: nothing here sends a message or waits for
//! one.
pub mod accesses;
pub mod births;
pub mod closes;
pub mod drops;
pub mod floors;
pub mod locks;
pub mod recalls;
pub mod reservations;

use accesses::Accesses;
use births::Births;
use closes::Closes;
use drops::Drops;
use floors::Floors;
use locks::Locks;
use recalls::Recalls;
use reservations::Reservations;

/// Caches that the kernel is asked to drop, outside of a revoke.
#[derive(Default)]
pub struct KernelDrops {
    pub attributes: Drops<()>,
    /// Each with a value whose life ends when they are dropped.
    pub pages: Drops<Box<dyn Send>>,
}

#[derive(Default)]
pub struct Tables {
    /// Closes that the leader does not know of yet.
    pub closes: Closes,
    pub drops: KernelDrops,
    /// Reads whose time the leader does not know of yet.
    pub accesses: Accesses,
    /// Quota reservations under limits of bytes.
    pub reservations: Reservations,
    /// Write floors of volumes.
    pub floors: Floors,
    pub locks: Locks,
    pub recalls: Recalls,
    /// Files that the leader does not know of yet.
    pub births: Births,
}
