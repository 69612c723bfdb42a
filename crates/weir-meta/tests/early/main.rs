//! Early answers as an explicit state machine over the real decisions, searched exhaustively.
//!
//! A leader answers when `weir_meta::unsettled` allows it, clients keep what is not durable in
//! `weir_client::kept`. The model has the asynchronous parts around them: syncs of the journal, answers that
//! get lost with their connection, crashes of the leader, another leader beside a deposed one, clients that
//! die or return too late. In every reachable state:
//!
//! - W1: a change that another session has seen is durable;
//! - W2: a change that its session has synced is durable;
//! - W3: no change is made twice, and no number is given twice;
//! - W4: a change that is made again has the same result, or its loss is named;
//! - W5: changes of a session are in its order, and an answered one is at the leader, or kept;
//! - W6: a leader that was deposed answers nothing.
#![allow(clippy::disallowed_methods, reason = "tests are users of the operating system")]
#[path = "../common/search.rs"]
mod search;
mod state;
mod steps;

use search::{fails, holds};
use state::State;
use steps::{Rules, Shortcut};

/// One key and one request of a client at a time, a crash.
const SMALL: Rules = Rules { keys: 1, requests: [2, 1], slots: 1, crashes: 1, breaks: 0, shortcut: None };
const TWO_AT_ONCE: Rules = Rules { slots: 2, ..SMALL };

#[test]
fn a_crash_loses_nothing() {
    holds::<State>("2 requests and 1, a crash", &SMALL, 3_000_000);
}

#[test]
fn a_lost_connection_and_a_crash_lose_nothing() {
    holds::<State>("2 requests and 1, a break, a crash", &Rules { breaks: 1, ..SMALL }, 3_000_000);
}

#[test]
fn a_crash_while_changes_are_made_again_loses_nothing() {
    let rules = Rules { requests: [1, 1], crashes: 2, ..SMALL };
    holds::<State>("a request each, 2 crashes", &rules, 3_000_000);
}

/// `make model`.
#[test]
#[ignore = "minutes, gigabytes: make model"]
fn larger_configurations() {
    let states_max: usize =
        std::env::var("WEIR_MODEL_STATES").map_or(40_000_000, |n| n.parse().expect("a number"));
    let all = [
        ("2 requests and 1, 2 crashes", Rules { crashes: 2, ..SMALL }),
        ("2 requests and 1, at once, a crash", TWO_AT_ONCE),
        ("2 keys, 2 requests and 1, a crash", Rules { keys: 2, ..SMALL }),
        ("2 requests each, a break, a crash", Rules { requests: [2, 2], breaks: 1, ..SMALL }),
        ("2 keys, 2 requests and 1, at once, a crash", Rules { keys: 2, ..TWO_AT_ONCE }),
        ("3 requests and 1, a crash", Rules { requests: [3, 1], ..SMALL }),
        ("2 requests and 1, at once, a break, 2 crashes", Rules { breaks: 1, crashes: 2, ..TWO_AT_ONCE }),
    ];
    for (name, rules) in &all {
        holds::<State>(name, rules, states_max);
    }
}

fn fail(rules: Rules, shortcut: Shortcut) {
    fails::<State>(&rules, shortcut);
}

#[test]
fn w1_an_answer_that_shows_others_changes_waits() {
    fail(SMALL, Shortcut::NoShare);
}

#[test]
fn w1_a_change_over_anothers_waits() {
    fail(SMALL, Shortcut::BlindOverwrite);
}

#[test]
fn w4_what_depends_on_a_waiting_answer_waits_too() {
    fail(TWO_AT_ONCE, Shortcut::OwnAtOnce);
}

#[test]
fn w4_answers_to_a_session_do_not_overtake_each_other() {
    fail(TWO_AT_ONCE, Shortcut::AnswersOvertake);
}

#[test]
fn w4_after_a_lost_connection_nothing_depends_on_its_answers() {
    fail(Rules { breaks: 1, ..TWO_AT_ONCE }, Shortcut::ForgetMoved);
}

#[test]
fn w4_others_wait_until_a_session_has_returned() {
    fail(SMALL, Shortcut::NoGrace);
}

#[test]
fn w4_new_requests_go_after_kept_ones() {
    fail(SMALL, Shortcut::NewBeforeKept);
}

#[test]
fn w4_a_number_is_given_again_as_it_was() {
    fail(SMALL, Shortcut::NewNumber);
}

#[test]
fn w3_a_new_leader_gives_no_number_of_the_lost_tail() {
    fail(Rules { keys: 2, ..SMALL }, Shortcut::NumbersOfTheTail);
}

#[test]
fn w3_a_number_of_a_change_is_used_once() {
    fail(SMALL, Shortcut::NumberReused);
}

#[test]
fn w2_a_sync_waits_for_all_that_is_kept() {
    fail(SMALL, Shortcut::SyncForgets);
}

#[test]
fn w5_numbers_of_commits_belong_to_one_leader() {
    fail(SMALL, Shortcut::TermsConfused);
}

#[test]
fn w6_a_deposed_leader_answers_nothing() {
    fail(SMALL, Shortcut::DeposedAnswers);
}
