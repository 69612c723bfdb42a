//! Logs of overlays: changed bytes of cells, numbered by one member, mirrored to all that keep the cell's
//! log, and acknowledged when they have them durably.
//!
//! `overlays.rs` takes requests, `mirrors.rs` calls the other keepers of a log, `agree.rs` makes all keepers'
//! logs the same, `tail.rs` knows which logs were compared since the start, `under_way.rs` which writes have
//! not ended.
mod agree;
mod mirrors;
mod overlays;
mod parts;
mod tail;
mod under_way;

pub(crate) use agree::Agreement;
pub(crate) use mirrors::Mirrors;
pub(crate) use overlays::Overlays;
pub(crate) use parts::take_data;
