//! Claim: whatever a program does to a mount has the same results, the same error numbers and leaves the same tree as on
//! a local file system. Random sequences of operations run on both; every answer is compared.
//!
//! `WEIR_DIFFERENTIAL=first..end` at run time chooses the seeds. Differences that are allowed are written in
//! `docs/semantics.md`: sizes of directories, `st_blocks`, and times that nobody set.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
#[path = "../common/mod.rs"]
mod common;
mod side;
mod tree;

use common::{Cluster, can_mount};
use side::Side;

const OPERATIONS: usize = 200;
/// By default: what fits into half a minute of a slow machine.
const SEEDS: std::ops::Range<u64> = 0..160;

/// Small and seeded.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("WEIR_DIFFERENTIAL") else { return SEEDS };
    let (first, end) = text.split_once("..").expect("WEIR_DIFFERENTIAL=first..end");
    first.parse().unwrap()..end.parse().unwrap()
}

#[test]
fn a_mount_answers_as_a_local_file_system_does() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let local = tempfile::tempdir().unwrap();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut differing = Vec::new();
    for seed in seeds() {
        if let Err(difference) = run(seed, cluster.mount(), local.path()) {
            eprintln!(
                "{difference}\nrepeat with WEIR_DIFFERENTIAL={seed}..{} cargo test -p weir --test differential",
                seed + 1
            );
            differing.push(seed);
        }
    }
    assert!(differing.is_empty(), "sequences that differ: {differing:?}");
}

fn run(seed: u64, mount: &std::path::Path, local: &std::path::Path) -> Result<(), String> {
    let name = format!("s{seed}");
    let mut ours = Side::new(&mount.join(&name));
    let mut theirs = Side::new(&local.join(&name));
    let mut dice = Dice::new(seed);
    let mut told = Vec::new();
    for n in 0..OPERATIONS {
        let operation = side::Operation::random(&mut dice, n as u64);
        told.push(format!("{n}: {operation:?}"));
        let (got, expected) = (ours.apply(&operation), theirs.apply(&operation));
        if got != expected {
            let last = told.join("\n");
            return Err(format!("seed {seed}:\n{last}\n  mount: {got}\n  local: {expected}"));
        }
    }
    let (ours, theirs) = (ours.finish(), theirs.finish());
    tree::compare(&ours, &theirs).map_err(|e| format!("seed {seed}, final tree: {e}\n{}", told.join("\n")))
}
