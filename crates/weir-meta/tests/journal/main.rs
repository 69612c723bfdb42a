//! The protocol of a journal group as an explicit state machine over the real decisions, searched
//! exhaustively.
//!
//! Members act by `weir_meta::copies::decide` on real `weir_kv::epochs`, the coordinator by
//! `weir_coord::decide::JournalGroup`. The model has the asynchronous parts around them: the order in which
//! messages arrive, crashes, the map version that each node knows, the end of promises. In every reachable
//! state each current member has synced every acknowledged write, and every leader that may answer has them
//! all.
//!
//! Not modelled: journals whose beginning was dropped, and the transfer of the whole state.
//! Small configurations run here; `make model` runs the larger ones.
#![allow(clippy::disallowed_methods, reason = "tests are users of the operating system")]
mod engines;
mod nodes;
#[path = "../common/search.rs"]
mod search;
mod state;
mod steps;

use search::{fails, holds};
use state::State;
use steps::{Rules, Shortcut};

const fn rules(copies: u8, writes: u8, epochs: u64, crashes: u8) -> Rules {
    Rules { copies, writes, epochs, crashes, at_once: false, shortcut: None }
}
const fn at_once(copies: u8, writes: u8, epochs: u64, crashes: u8) -> Rules {
    Rules { at_once: true, ..rules(copies, writes, epochs, crashes) }
}

#[test]
fn two_copies_survive_five_epochs_and_a_crash() {
    holds::<State>("2 copies, 2 writes, 5 epochs, a crash", &at_once(2, 2, 5, 1), 3_000_000);
}

#[test]
fn unsynced_records_and_crashes_lose_nothing() {
    holds::<State>("2 copies, 2 writes, 3 epochs, 2 crashes, syncs", &rules(2, 2, 3, 2), 3_000_000);
}

#[test]
fn three_copies_survive_three_epochs() {
    holds::<State>("3 copies, 1 write, 3 epochs", &at_once(3, 1, 3, 0), 3_000_000);
}

#[test]
fn r1_a_majority_is_not_enough() {
    fails::<State>(&at_once(3, 1, 3, 0), Shortcut::Majority);
}

#[test]
fn r1_to_count_what_is_not_synced_loses_records() {
    fails::<State>(&rules(2, 1, 3, 1), Shortcut::KeptBeforeSync);
}

#[test]
fn r2_to_take_an_older_leaders_records_loses_some() {
    fails::<State>(&at_once(3, 2, 3, 0), Shortcut::AcceptOlder);
}

#[test]
fn r2_to_forget_the_epoch_in_a_crash_loses_records() {
    fails::<State>(&at_once(2, 1, 5, 1), Shortcut::ForgetEpoch);
}

#[test]
fn r2_not_to_truncate_leaves_copies_different() {
    fails::<State>(&at_once(2, 2, 5, 0), Shortcut::NoTruncation);
}

#[test]
fn r3_to_trust_a_member_that_returns_loses_records() {
    fails::<State>(&at_once(2, 2, 4, 0), Shortcut::ReturnAsCurrent);
}

#[test]
fn r4_to_lead_on_after_a_restart_loses_records() {
    fails::<State>(&at_once(2, 2, 5, 1), Shortcut::SameEpochAfterRestart);
}

#[test]
fn r5_not_to_wait_for_a_copy_that_caught_up_loses_records() {
    fails::<State>(&at_once(2, 2, 5, 0), Shortcut::CaughtUpEarly);
}

#[test]
fn r6_a_new_leader_that_does_not_wait_makes_the_old_one_stale() {
    fails::<State>(&at_once(2, 1, 3, 0), Shortcut::NoWait);
    fails::<State>(&at_once(3, 1, 3, 0), Shortcut::NoWait);
}

#[test]
fn r6_to_forget_a_promise_makes_the_old_leader_stale() {
    fails::<State>(&at_once(2, 1, 3, 1), Shortcut::ForgetPromise);
}

#[test]
fn r6_a_copy_that_caught_up_promises_too() {
    fails::<State>(&at_once(2, 1, 5, 0), Shortcut::RightOfCurrentOnly);
}

#[test]
fn r7_to_fold_what_others_lack_cannot_be_undone() {
    fails::<State>(&at_once(2, 2, 5, 0), Shortcut::FoldSynced);
}

/// `make model`.
#[test]
#[ignore = "minutes, gigabytes: make model"]
fn larger_configurations() {
    let states_max: usize =
        std::env::var("WEIR_MODEL_STATES").map_or(40_000_000, |n| n.parse().expect("a number"));
    let all = [
        ("2 copies, 2 writes, 5 epochs, a crash, syncs", rules(2, 2, 5, 1)),
        ("2 copies, 3 writes, 6 epochs, a crash", at_once(2, 3, 6, 1)),
        ("3 copies, 2 writes, 3 epochs", at_once(3, 2, 3, 0)),
        ("3 copies, 1 write, 3 epochs, a crash", at_once(3, 1, 3, 1)),
        ("3 copies, 1 write, 4 epochs", at_once(3, 1, 4, 0)),
        ("3 copies, 1 write, 3 epochs, syncs", rules(3, 1, 3, 0)),
    ];
    let only = std::env::var("WEIR_MODEL").unwrap_or_default();
    for (name, rules) in all.iter().filter(|(name, _)| name.contains(&only)) {
        holds::<State>(name, rules, states_max);
    }
}
