//! Claim: any operations of a program on a mount have the same results and error numbers, and leave the same
//! tree, as on a local file system. Random sequences of operations run on both; every answer is compared.
//!
//! `WEIR_DIFFERENTIAL=first..end` at run time chooses the seeds. Differences that are allowed are written in
//! `docs/semantics.md`: sizes of directories, `st_blocks`, and times that no program set.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod allocation;
#[path = "../common/mod.rs"]
mod common;
mod effects;
mod side;
mod tree;

use common::locker::Locker;
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

#[test]
fn a_mount_answers_as_a_local_file_system_does() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let local = tempfile::tempdir().unwrap();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut differing = Vec::new();
    for seed in common::part("WEIR_DIFFERENTIAL", SEEDS) {
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

/// Random locks of two processes on one file; every answer is compared.
#[test]
fn locks_answer_as_on_a_local_file_system() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let local = tempfile::tempdir().unwrap();
    for seed in 0..8 {
        let name = format!("locks{seed}");
        let mut ours = Lockers::new(&cluster.mount().join(&name));
        let mut theirs = Lockers::new(&local.path().join(&name));
        let mut dice = Dice::new(1_000_000 + seed);
        let mut trace = Vec::new();
        for n in 0..OPERATIONS {
            let (who, command) = (dice.below(2) as usize, lock_command(&mut dice));
            trace.push(format!("{n}: {who} {command}"));
            let (got, expected) = (ours.ask(who, &command), theirs.ask(who, &command));
            assert_eq!(got, expected, "seed {seed}:\n{}", trace.join("\n"));
        }
    }
}

/// Two processes, each with the file open twice.
struct Lockers([Locker; 2]);

impl Lockers {
    fn new(file: &std::path::Path) -> Lockers {
        std::fs::write(file, "").unwrap();
        let mut lockers = [Locker::new(file), Locker::new(file)];
        for locker in &mut lockers {
            assert_eq!(locker.ask(&format!("open g {}", file.display())), "ok");
        }
        Lockers(lockers)
    }
    fn ask(&mut self, who: usize, command: &str) -> String {
        let answer = self.0[who].ask(command);
        // Of several conflicting locks any may be reported.
        if answer.contains(' ') { "in the way".into() } else { answer }
    }
}

fn lock_command(dice: &mut Dice) -> String {
    let file = dice.pick(&["f", "g"]);
    let kind = dice.pick(&["sh", "ex", "un", "un"]);
    let (start, len) = (dice.below(6) * 10, dice.below(4) * 10); // 0: to the end
    match dice.below(8) {
        0..=2 => format!("set {file} {kind} {start} {len}"),
        3..=5 => format!("oset {file} {kind} {start} {len}"),
        6 => format!("get {file} {} {start} {len}", dice.pick(&["sh", "ex"])),
        _ => format!("flock {file} {kind}"),
    }
}

fn run(seed: u64, mount: &std::path::Path, local: &std::path::Path) -> Result<(), String> {
    let name = format!("s{seed}");
    let mut ours = Side::new(&mount.join(&name));
    let mut theirs = Side::new(&local.join(&name));
    let mut dice = Dice::new(seed);
    let mut trace = Vec::new();
    for n in 0..OPERATIONS {
        let operation = side::Operation::random(&mut dice, n as u64);
        trace.push(format!("{n}: {operation:?}"));
        let (got, expected) = (ours.apply(&operation), theirs.apply(&operation));
        if got != expected {
            let last = trace.join("\n");
            return Err(format!("seed {seed}:\n{last}\n  mount: {got}\n  local: {expected}"));
        }
    }
    let (ours, theirs) = (ours.finish(), theirs.finish());
    tree::compare(&ours, &theirs).map_err(|e| format!("seed {seed}, final tree: {e}\n{}", trace.join("\n")))
}
