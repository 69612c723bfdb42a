//! What one client holds for all its files together. Tables alone: nothing here sends a message or waits for
//! one.
pub mod accesses;
pub mod closes;
pub mod locks;
pub mod recalls;
pub mod reservations;
