//! The protocol of a stripe as an explicit state machine over the store's own decisions, searched
//! exhaustively.
//!
//! Targets act by `weir_store::cells`, `folded_seqs`, `seal::resolve` and `stripes::plan`, the coordinator by
//! `weir_coord::decide`: the real functions on real index entries. The model has the asynchronous parts
//! around them: the order in which messages arrive, crashes, the map version that each node knows. In every
//! reachable state, every read with up to m members lost returns a result of some order of the writes, and
//! data at rest has parity that fits it.
//!
//! Not modelled: the outcome of failed writes (decision 10), agreement of logs (`logs/agree.rs`), slabs
//! and bit rot (a cell is two bytes), a reader with an old map. Small configurations run here; `make model`
//! runs the larger ones.
#![allow(clippy::disallowed_methods, reason = "tests are users of the operating system")]
mod moves;
mod reader;
mod rules;
mod seals;
mod search;
mod state;
mod steps;
mod whole;

use rules::{Mode, Planned, Rules, Shortcut};
use search::search;
use state::State;

/// A target is lost for good, and another one takes its place.
fn replaced(rules: Rules) -> Rules {
    Rules { suspicions: rules.suspicions + 1, replacements: 1, ..rules }
}

/// A place moves to another target.
fn moved(rules: Rules) -> Rules {
    Rules { moves: 1, ..rules }
}

fn problem<'a>(rules: &'a Rules) -> impl Fn(&State) -> Option<String> + 'a {
    |state| {
        let whole = state.targets.iter().all(|t| steps::logs_have_their_data(t, rules.data()));
        reader::problem(rules, state).or_else(|| (!whole).then(|| "an overlay lost its data".to_owned()))
    }
}

/// Searches everything and finds nothing.
fn holds(name: &str, rules: &Rules, states_max: usize) {
    let searched = search(rules, states_max, problem(rules));
    eprintln!(
        "{name}: {} states, {} transitions, depth {}",
        searched.states, searched.transitions, searched.depth
    );
    if let Some((steps, what)) = searched.found {
        let steps: Vec<String> = steps.iter().map(|step| format!("  {step:?}")).collect();
        panic!("{name}: {what}, after\n{}", steps.join("\n"));
    }
    assert!(!searched.truncated, "{name}: more than {states_max} states");
}

/// Finds a path on which the shortcut loses bytes; without the shortcut that path is harmless.
fn fails(rules: &Rules, shortcut: Shortcut, states_max: usize) {
    let wrong = Rules { shortcut: Some(shortcut), ..rules.clone() };
    let searched = search(&wrong, states_max, problem(&wrong));
    let (steps, what) = searched.found.unwrap_or_else(|| panic!("{shortcut:?} is found to be no harm"));
    eprintln!("{shortcut:?}: {what}, after {} steps and {} states: {steps:?}", steps.len(), searched.states);
}

fn ec(planned: &[(usize, usize, u8)]) -> Rules {
    Rules::new(2, 1, planned)
}
fn mirrored(planned: &[(usize, usize, u8)]) -> Rules {
    Rules::new(1, 1, planned)
}
/// The stripe is written whole where nothing was.
fn new(rules: Rules) -> Rules {
    Rules { whole: Some(Mode::Fresh), ..rules }
}
/// It is written whole over existing bytes.
fn over(rules: Rules) -> Rules {
    Rules { whole: Some(Mode::Over), ..rules }
}
/// A write, a cut of the file, a write under the cut's token epoch.
fn with_truncation(mut rules: Rules) -> Rules {
    rules.truncation = true;
    let last = rules.planned.len() - 1;
    rules.planned[last] = Planned { after_truncation: true, ..rules.planned[last] };
    rules
}

#[test]
fn overlays_survive_a_crash_and_the_repair_after_it() {
    let rules = Rules { crashes: 1, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) };
    holds("1+1, two writes, a crash", &rules, 2_000_000);
}

#[test]
fn a_seal_survives_a_crash_at_any_step() {
    let rules = Rules { crashes: 1, seals: 1, ..ec(&[(0, 0, 1)]) };
    holds("2+1, a write, a seal, a crash", &rules, 2_000_000);
}

#[test]
fn a_target_that_is_taken_for_dead_does_no_harm() {
    let rules = Rules { suspicions: 1, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) };
    holds("1+1, two writes, a suspicion", &rules, 2_000_000);
}

#[test]
fn truncated_bytes_stay_away() {
    let rules = with_truncation(Rules { suspicions: 1, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) });
    holds("1+1, a cut between two writes, a suspicion", &rules, 2_000_000);
}

#[test]
fn a_new_stripe_survives_crashes_and_absences_at_any_step() {
    let rules = Rules { crashes: 1, suspicions: 1, ..new(mirrored(&[])) };
    holds("1+1, a new stripe, a crash and a suspicion", &rules, 2_000_000);
}

#[test]
fn an_overwritten_stripe_survives_crashes_at_any_step() {
    let rules = over(mirrored(&[(0, 0, 1)]));
    holds("1+1, a write, written over, a crash", &Rules { crashes: 1, ..rules.clone() }, 2_000_000);
    holds("1+1, a write, written over, a suspicion", &Rules { suspicions: 1, ..rules }, 2_000_000);
}

#[test]
fn a_stripe_that_is_written_over_replaces_what_is_being_sealed() {
    holds(
        "1+1, a write, written over, a seal",
        &Rules { seals: 1, ..over(mirrored(&[(0, 0, 1)])) },
        2_000_000,
    );
    holds("2+1, a write, written over, a seal", &Rules { seals: 1, ..over(ec(&[(0, 0, 1)])) }, 2_000_000);
}

#[test]
fn to_seal_above_what_a_writer_prepares_loses_bytes() {
    let rules = Rules { suspicions: 1, seals: 1, ..over(mirrored(&[(0, 0, 1)])) };
    fails(&rules, Shortcut::SealAboveWriters, 1_000_000);
}

#[test]
#[ignore = "minutes, gigabytes: make model"]
fn mistaking_a_late_seal_part_for_another_loses_bytes() {
    let rules = Rules { suspicions: 1, seals: 2, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) };
    fails(&rules, Shortcut::LatePartCounts, 2_000_000);
}

#[test]
fn to_compare_logs_of_older_cells_only_brings_bytes_back() {
    fails(&Rules { crashes: 1, ..over(mirrored(&[(0, 0, 1)])) }, Shortcut::LogsOfOlderCells, 1_000_000);
}

#[test]
fn to_acknowledge_with_fewer_than_k_loses_bytes() {
    fails(&Rules { suspicions: 2, ..ec(&[(0, 0, 1)]) }, Shortcut::AcknowledgedByFew, 1_000_000);
}

#[test]
fn not_reporting_members_lost_since_a_write_loses_bytes() {
    fails(&Rules { suspicions: 2, ..mirrored(&[(0, 0, 1)]) }, Shortcut::MissingNotReported, 2_000_000);
}

#[test]
fn to_commit_what_not_all_live_members_hold_leaves_them_apart() {
    fails(&Rules { suspicions: 2, ..over(mirrored(&[])) }, Shortcut::CommittedUnderAnyEpoch, 2_000_000);
    let dies = Rules { suspicions: 2, dies: true, ..over(mirrored(&[])) };
    fails(&dies, Shortcut::CommittedUnderAnyEpoch, 2_000_000);
}

#[test]
fn retaining_prepared_versions_over_an_absence_is_wrong() {
    let dies = Rules { suspicions: 2, dies: true, ..over(mirrored(&[])) };
    fails(&dies, Shortcut::AbortedStays, 2_000_000);
}

#[test]
#[ignore = "minutes, gigabytes: make model"]
fn two_deciders_at_once_leave_members_different() {
    let dies = Rules { suspicions: 2, dies: true, ..over(mirrored(&[])) };
    fails(&dies, Shortcut::DecidedByTwo, 20_000_000);
}

#[test]
fn a_dead_writers_overwrite_is_everywhere_or_nowhere() {
    let rules = Rules { dies: true, ..over(mirrored(&[])) };
    holds("1+1, written over by who dies, a crash", &Rules { crashes: 1, ..rules.clone() }, 2_000_000);
    holds("1+1, written over by who dies, a suspicion", &Rules { suspicions: 1, ..rules }, 2_000_000);
}

#[test]
fn to_count_what_a_member_did_before_it_was_away_loses_bytes() {
    let rules = Rules { crashes: 1, ..new(mirrored(&[])) };
    fails(&rules, Shortcut::SameMembersSameFragments, 2_000_000);
}

#[test]
fn not_to_send_again_what_a_member_has_forgotten_loses_bytes() {
    let rules = Rules { crashes: 1, ..new(mirrored(&[])) };
    fails(&rules, Shortcut::ForgottenIsMarked, 2_000_000);
}

#[test]
fn to_acknowledge_before_the_mirrors_have_it_loses_bytes() {
    fails(&Rules { crashes: 1, ..ec(&[(0, 0, 1)]) }, Shortcut::AcknowledgeBeforeMirrors, 1_000_000);
}

#[test]
fn to_commit_a_seal_before_parity_is_prepared_loses_bytes() {
    fails(&Rules { seals: 1, ..ec(&[(0, 0, 1)]) }, Shortcut::CommitBeforeParity, 1_000_000);
}

#[test]
fn not_to_check_epochs_loses_bytes() {
    fails(
        &Rules { suspicions: 1, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) },
        Shortcut::EpochNotChecked,
        2_000_000,
    );
}

#[test]
fn to_trust_a_member_that_returns_loses_bytes() {
    fails(&Rules { suspicions: 1, ..mirrored(&[(0, 0, 1)]) }, Shortcut::ReturnAsCurrent, 1_000_000);
}

#[test]
fn to_keep_a_number_over_an_absence_loses_bytes() {
    fails(&Rules { suspicions: 1, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) }, Shortcut::NumberKept, 1_000_000);
}

#[test]
fn to_catch_up_while_a_seal_is_in_doubt_loses_bytes() {
    fails(&Rules { crashes: 1, seals: 1, ..ec(&[(0, 0, 1)]) }, Shortcut::RepairInDoubt, 1_000_000);
}

#[test]
fn to_take_a_silent_member_for_gone_leaves_it_behind_unnoticed() {
    let rules = Rules { crashes: 1, seals: 1, ..Rules::new(1, 2, &[(0, 0, 1)]) };
    fails(&rules, Shortcut::SilentIsGone, 1_000_000);
}

#[test]
fn forgetting_truncations_brings_bytes_back() {
    let rules = with_truncation(Rules { suspicions: 1, ..mirrored(&[(0, 0, 1), (0, 1, 2)]) });
    fails(&rules, Shortcut::TruncationsNotLearned, 2_000_000);
}

#[test]
fn to_catch_up_with_fewer_than_k_loses_bytes() {
    fails(&Rules { suspicions: 2, ..ec(&[(0, 0, 1)]) }, Shortcut::CaughtUpWithFew, 2_000_000);
}

#[test]
fn a_lost_target_is_replaced_at_any_step_of_a_write() {
    holds("1+1, two writes, a replacement", &replaced(mirrored(&[(0, 0, 1), (0, 1, 2)])), 2_000_000);
    holds("2+1, a write, a replacement", &replaced(ec(&[(0, 0, 1)])), 2_000_000);
}

#[test]
fn seals_go_on_while_a_newcomer_is_filled() {
    let rules = Rules { seals: 1, ..replaced(mirrored(&[(0, 0, 1)])) };
    holds("1+1, a write, a seal, a replacement", &rules, 4_000_000);
}

#[test]
fn a_stripe_is_written_over_while_a_member_is_replaced() {
    holds("1+1, a new stripe, a replacement", &replaced(new(mirrored(&[]))), 2_000_000);
    holds("1+1, a write, written over, a replacement", &replaced(over(mirrored(&[(0, 0, 1)]))), 2_000_000);
}

#[test]
#[ignore = "minutes, gigabytes: make model"]
fn a_stopped_writer_that_wakes_after_a_replacement_does_no_harm() {
    let rules = Rules { dies: true, wakes: true, ..replaced(over(mirrored(&[]))) };
    holds("1+1, written over by who wakes, a replacement", &rules, 40_000_000);
}

#[test]
fn truncated_bytes_stay_away_from_a_new_member() {
    let rules = with_truncation(replaced(mirrored(&[(0, 0, 1), (0, 1, 2)])));
    holds("1+1, a cut between two writes, a replacement", &rules, 4_000_000);
}

#[test]
fn a_newcomer_is_current_only_after_seals_waited() {
    let rules = Rules { seals: 1, ..replaced(mirrored(&[(0, 0, 1)])) };
    fails(&rules, Shortcut::FilledIsCurrent, 4_000_000);
    fails(&rules, Shortcut::SealsNeverWait, 4_000_000);
}

#[test]
fn a_commit_counts_for_its_target_not_for_its_place() {
    fails(&replaced(over(mirrored(&[]))), Shortcut::CommittedByPlace, 2_000_000);
}

#[test]
fn a_newcomer_has_nothing_until_it_has_listed_all() {
    fails(&replaced(mirrored(&[(0, 0, 1)])), Shortcut::FilledEarly, 2_000_000);
    let returns_once = Rules { suspicions: 2, ..replaced(mirrored(&[])) };
    fails(&returns_once, Shortcut::NewcomerIsReturned, 2_000_000);
}

#[test]
#[ignore = "minutes, gigabytes: make model"]
fn a_newcomer_without_fences_takes_what_others_refuse() {
    let rules = Rules { dies: true, wakes: true, ..replaced(over(mirrored(&[]))) };
    fails(&rules, Shortcut::FencesNotTaken, 4_000_000);
}

#[test]
fn a_place_moves_at_any_step_of_a_write() {
    holds("1+1, two writes, a move", &moved(mirrored(&[(0, 0, 1), (0, 1, 2)])), 4_000_000);
    holds("2+1, a write, a move", &moved(ec(&[(0, 0, 1)])), 4_000_000);
}

#[test]
fn a_place_moves_at_any_step_of_a_seal_and_a_crash() {
    let rules = Rules { seals: 1, ..moved(mirrored(&[(0, 0, 1)])) };
    holds("1+1, a write, a seal, a move", &rules, 4_000_000);
    let crashed = Rules { crashes: 1, ..moved(mirrored(&[(0, 0, 1)])) };
    holds("1+1, a write, a crash, a move", &crashed, 4_000_000);
}

#[test]
fn a_stripe_is_written_over_while_a_place_moves() {
    holds("1+1, a new stripe, a move", &moved(new(mirrored(&[]))), 4_000_000);
    holds("1+1, a write, written over, a move", &moved(over(mirrored(&[(0, 0, 1)]))), 4_000_000);
}

#[test]
fn truncated_bytes_stay_away_from_a_moved_place() {
    let rules = with_truncation(moved(mirrored(&[(0, 0, 1), (0, 1, 2)])));
    holds("1+1, a cut between two writes, a move", &rules, 4_000_000);
}

#[test]
fn a_place_is_copied_after_its_member_has_closed_it() {
    let rules = moved(mirrored(&[(0, 0, 1)]));
    fails(&rules, Shortcut::CopiedBeforeClose, 4_000_000);
    fails(&rules, Shortcut::NeverClosed, 4_000_000);
    fails(&rules, Shortcut::CopyOfEarlierEpoch, 4_000_000);
    fails(&rules, Shortcut::LogsNotCopied, 4_000_000);
    let sealed = Rules { seals: 1, suspicions: 1, ..rules };
    fails(&sealed, Shortcut::CurrentSinceClosed, 4_000_000);
}

#[test]
fn a_place_moves_while_targets_are_taken_for_dead() {
    let rules = Rules { suspicions: 1, ..moved(mirrored(&[(0, 0, 1)])) };
    holds("1+1, a write, a suspicion, a move", &rules, 8_000_000);
    let sealed = Rules { seals: 1, ..rules };
    holds("1+1, a write, a seal, a suspicion, a move", &sealed, 8_000_000);
}

#[test]
#[ignore = "minutes, gigabytes: make model"]
fn a_place_moves_while_another_one_is_replaced() {
    let rules = moved(replaced(mirrored(&[(0, 0, 1)])));
    holds("1+1, a write, a replacement, a move", &rules, 40_000_000);
    holds("1+1, a write, a seal, a replacement, a move", &Rules { seals: 1, ..rules }, 40_000_000);
}

#[test]
#[ignore = "minutes, gigabytes: make model"]
fn a_target_that_took_a_place_has_its_fences() {
    let rules = Rules { dies: true, wakes: true, ..moved(over(mirrored(&[]))) };
    holds("1+1, written over by who wakes, a move", &rules, 40_000_000);
    fails(&rules, Shortcut::FencesNotCopied, 8_000_000);
}

/// `make model`.
#[test]
#[ignore = "minutes to hours, gigabytes: make model"]
fn larger_configurations() {
    let states_max: usize =
        std::env::var("WEIR_MODEL_STATES").map_or(40_000_000, |n| n.parse().expect("a number"));
    let three = [(0, 0, 1), (0, 1, 2), (0, 0, 3)];
    let all = [
        ("1+1, three writes, a crash", Rules { crashes: 1, ..mirrored(&three) }),
        (
            "1+1, two writes, a crash and a suspicion",
            Rules { crashes: 1, suspicions: 1, ..mirrored(&three[..2]) },
        ),
        ("1+1, two writes, two suspicions", Rules { suspicions: 2, ..mirrored(&three[..2]) }),
        ("1+1, two writes, a seal, a crash", Rules { crashes: 1, seals: 1, ..mirrored(&three[..2]) }),
        ("1+1, two writes, a seal, a suspicion", Rules { suspicions: 1, seals: 1, ..mirrored(&three[..2]) }),
        (
            "1+1, two writes, two seals, a suspicion",
            Rules { suspicions: 1, seals: 2, ..mirrored(&three[..2]) },
        ),
        ("2+1, a write, two seals, a crash", Rules { crashes: 1, seals: 2, ..ec(&three[..1]) }),
        ("2+1, a write, a seal, a suspicion", Rules { suspicions: 1, seals: 1, ..ec(&three[..1]) }),
        ("2+1, a write, two suspicions", Rules { suspicions: 2, ..ec(&three[..1]) }),
        ("2+1, two writes, a seal, a crash", Rules { crashes: 1, seals: 1, ..ec(&[(0, 0, 1), (1, 0, 2)]) }),
        ("1+2, a write, a seal, a crash", Rules { crashes: 1, seals: 1, ..Rules::new(1, 2, &three[..1]) }),
        (
            "1+1, a cut between two writes, a crash",
            with_truncation(Rules { crashes: 1, ..mirrored(&three[..2]) }),
        ),
        (
            "1+1, a cut between two writes, a seal, a suspicion",
            with_truncation(Rules { suspicions: 1, seals: 1, ..mirrored(&three[..2]) }),
        ),
        ("1+1, a new stripe, two crashes", Rules { crashes: 2, ..new(mirrored(&[])) }),
        ("1+1, a new stripe, two suspicions", Rules { suspicions: 2, ..new(mirrored(&[])) }),
        ("2+1, a new stripe, a crash", Rules { crashes: 1, ..new(ec(&[])) }),
        ("2+1, a new stripe, a suspicion", Rules { suspicions: 1, ..new(ec(&[])) }),
        ("1+1, a new stripe, a write, a crash", Rules { crashes: 1, ..new(mirrored(&three[..1])) }),
        (
            "1+1, a new stripe, a write, a seal, a suspicion",
            Rules { suspicions: 1, seals: 1, ..new(mirrored(&three[..1])) },
        ),
        (
            "1+1, written over, a crash and a suspicion",
            Rules { crashes: 1, suspicions: 1, ..over(mirrored(&[])) },
        ),
        (
            "1+1, a write, written over, a crash and a suspicion",
            Rules { crashes: 1, suspicions: 1, ..over(mirrored(&three[..1])) },
        ),
        ("1+1, two writes, written over, a crash", Rules { crashes: 1, ..over(mirrored(&three[..2])) }),
        (
            "1+1, a write, written over, a seal, a crash",
            Rules { crashes: 1, seals: 1, ..over(mirrored(&three[..1])) },
        ),
        (
            "1+1, a write, written over, a seal, a suspicion",
            Rules { suspicions: 1, seals: 1, ..over(mirrored(&three[..1])) },
        ),
        ("2+1, written over, a crash", Rules { crashes: 1, ..over(ec(&[])) }),
        ("2+1, a write, written over, a crash", Rules { crashes: 1, ..over(ec(&three[..1])) }),
        ("2+1, a new stripe, two suspicions", Rules { suspicions: 2, ..new(ec(&[])) }),
        ("2+1, written over, two suspicions", Rules { suspicions: 2, ..over(ec(&[])) }),
        ("1+2, a write, two suspicions", Rules { suspicions: 2, ..Rules::new(1, 2, &three[..1]) }),
        ("2+1, written over by who dies, a crash", Rules { crashes: 1, dies: true, ..over(ec(&[])) }),
        ("2+1, written over by who dies, a suspicion", Rules { suspicions: 1, dies: true, ..over(ec(&[])) }),
        (
            "1+1, a write, written over by who dies, a seal, a suspicion",
            Rules { suspicions: 1, seals: 1, dies: true, ..over(mirrored(&three[..1])) },
        ),
        ("1+2, written over, a suspicion", Rules { suspicions: 1, ..over(Rules::new(1, 2, &[])) }),
        (
            "2+1, a cut between two writes, a suspicion",
            with_truncation(Rules { suspicions: 1, ..ec(&three[..2]) }),
        ),
        (
            "1+1, written over by who dies, two suspicions",
            Rules { suspicions: 2, dies: true, ..over(mirrored(&[])) },
        ),
    ];
    let only = std::env::var("WEIR_MODEL").unwrap_or_default();
    for (name, rules) in all.iter().filter(|(name, _)| name.contains(&only)) {
        holds(name, rules, states_max);
    }
}
