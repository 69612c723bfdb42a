//! The coordinator's decisions, as plain functions of (state, event, now).
//!
//! Nothing here waits, sends, stores or reads a clock; the server carries the decisions out.
mod access;
mod balance;
mod copies;
mod drain;
mod groups;
mod health;
mod homes;
mod layout;
mod lead;
mod moves;
mod namespaces;
mod placement;
mod plan;
mod replace;
mod returned;
mod slow;
mod space;
mod upgrade;

pub use access::{add_rule, audit_volumes, remove_rule};
pub use balance::plan_balance;
pub use copies::{JournalGroup, JournalMember};
pub use drain::{plan_drain, plan_full};
pub use groups::{
    WantedGroups, add_groups, caught_up, demote_slow, forget_unpublished_epochs, groups_asked_for,
    groups_for_new_files, groups_for_new_targets, is_spare, left_out, needed_without, rejoin_groups,
    target_back, target_cleared, target_down, target_failed, target_lost, target_put_back,
};
pub use health::{HealthLimits, Presence, Unanswered, Verdict, evaluate, forgive, is_out};
pub use homes::{allow_home, forbid_home};
pub use layout::{layout_for_new_file, layout_in};
pub use lead::{Progress, may_found, record_progress, take_lead};
pub use moves::{
    MOVES_MAX, begin_move, cancel_move, close_move, finish_move, is_closed, remove_target, reopen,
    settle_moves,
};
pub use namespaces::{
    copy_caught_up, copy_lost, forget_unpublished_copies, journal_group, keep_copy, leader_silent,
    set_copies, settle_copies,
};
pub use placement::{Candidate, group_count, is_same_host, place, rack_of};
pub use plan::{Hindrance, Observed, Plan, Step, plan, spare};
pub use replace::replace;
pub use returned::{Returned, next_run, returned};
pub use slow::{SUSPECTED_TOGETHER, Speed, Strikes, hangs, is_much_slower};
pub use space::{FileSpace, file_space};
pub use upgrade::{Connected, finished_level};

#[cfg(test)]
pub(crate) use groups::tests as group_tests;
