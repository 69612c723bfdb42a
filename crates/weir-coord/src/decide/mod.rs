//! What the coordinator decides, as plain functions of (state, event, now).
//!
//! Nothing here waits, sends, stores or reads a clock; the server carries the decisions out.
mod groups;
mod health;
mod layout;
mod placement;

pub use groups::{caught_up, create_groups, target_back, target_cleared, target_down, target_failed};
pub use health::{HealthLimits, Presence, Verdict, judge};
pub use layout::layout_for_new_file;
pub use placement::{Candidate, group_count, place};
