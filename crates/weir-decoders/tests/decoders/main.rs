//! Decoders of wire, disk, configuration and command line survive any bytes: the fuzz targets with seeded
//! mutations.
//!
//! `make fuzz` runs the targets with libFuzzer. Message types have 20,000 inputs each in `messages.rs`.
mod counting;
mod messages;

use weir_admin::config;
use weir_decoders::{Dice, TARGETS, Target};

/// Of each kind, for each target.
const INPUTS: usize = 10_000;

fn survives(target: &Target, bytes: &[u8]) {
    // A target also encodes what it accepted, puts checksums right in a copy, and words its errors.
    let limit = 8 * counting::bytes_max(bytes.len());
    let taken = counting::peak_bytes(|| (target.run)(bytes));
    assert!(taken <= limit, "{}: {taken} bytes of memory for {} bytes", target.name, bytes.len());
}

#[test]
fn every_decoder_survives_random_bytes() {
    for target in TARGETS {
        let mut dice = Dice::for_name(target.name);
        survives(target, &[]);
        for _ in 0..INPUTS {
            survives(target, &dice.bytes(300));
        }
    }
}

#[test]
fn every_decoder_survives_mutated_inputs() {
    for target in TARGETS {
        let mut dice = Dice::for_name(target.name);
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "{} has no valid input", target.name);
        for n in 0..INPUTS {
            let mut bytes = seeds[n % seeds.len()].clone();
            dice.mutate(&mut bytes);
            survives(target, &bytes);
        }
    }
}

/// The valid inputs are valid: else mutations would never get behind the first check.
#[test]
fn the_seeds_are_accepted() {
    for target in TARGETS {
        for seed in (target.seeds)() {
            survives(target, &seed);
        }
    }
    let seeds_of = |name: &str| (TARGETS.iter().find(|t| t.name == name).unwrap().seeds)();
    for (seed, ended) in seeds_of("journal").iter().zip([true, false, true, false]) {
        let summary = weir_kv::read_segment(seed).unwrap();
        assert_eq!((summary.number, summary.ended, summary.damaged), (3, ended, false));
        assert!(summary.transactions >= 3, "{summary:?}");
    }
    for seed in seeds_of("coordinator") {
        assert!(weir_coord::store::read_state(&seed).unwrap().contains_key("map"));
    }
    for seed in seeds_of("identity") {
        weir_coord::identity::TargetIdentity::from_text(&seed).unwrap();
    }
    for seed in seeds_of("config").iter().take(2) {
        config::parse("seed", std::str::from_utf8(seed).unwrap()).unwrap();
    }
    assert!(seeds_of("message").len() > 100);
}

/// Every fuzz target has its program, and `make fuzz` runs it.
#[test]
#[allow(clippy::disallowed_methods, reason = "reads the repository it is in")]
fn every_target_is_fuzzed() {
    let fuzz = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let manifest = std::fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    for target in TARGETS {
        assert!(
            manifest.contains(&format!("name = \"{}\"", target.name)),
            "fuzz/Cargo.toml lacks {}",
            target.name
        );
        let program = fuzz.join(format!("fuzz_targets/{}.rs", target.name));
        assert!(program.exists(), "{} is missing", program.display());
    }
}
