//! System claims, as oracles over many seeds. A failure prints the command that repeats it.
//!
//! Seeds run in processes of their own, a few each: roles that a run killed keep memory until their process ends.
use std::{ops::Range, process::Command};
use weir_sim::{FaultKind, Options, run};

/// Some 250 MB of memory per run.
const RUNS_PER_PROCESS: u64 = 4;

fn keeps_every_promise(seeds: Range<u64>, faults: &[FaultKind]) {
    let names: Vec<&str> = faults.iter().map(|f| f.name()).collect();
    let names = if names.is_empty() { "none".into() } else { names.join(",") };
    let mut broken = Vec::new();
    for first in seeds.clone().step_by(RUNS_PER_PROCESS as usize) {
        let runs = RUNS_PER_PROCESS.min(seeds.end - first);
        let args = ["--seed", &first.to_string(), "--runs", &runs.to_string(), "--faults", &names];
        let ran =
            Command::new(env!("CARGO_BIN_EXE_weir-sim")).args(args).output().expect("the simulator starts");
        if !ran.status.success() {
            broken.push(format!("{args:?}: {}\n{}", ran.status, String::from_utf8_lossy(&ran.stdout)));
        }
    }
    assert!(broken.is_empty(), "a promise was broken, with --faults {names}:\n{}", broken.join("\n"));
}

#[test]
fn the_same_seed_runs_the_same_way() {
    for seed in [1, 2, 3] {
        let options = Options { operations: 30, ..Options::default() };
        let first = run(seed, &options).unwrap_or_else(|e| panic!("{e}"));
        let again = run(seed, &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(first, again, "seed {seed}");
    }
}

#[test]
fn survives_any_mix_of_faults() {
    keeps_every_promise(0..40, &FaultKind::survivable());
}

macro_rules! survives {
    ($($claim:ident: $seeds:expr, [$($kind:ident),*];)*) => {$(
        #[test]
        fn $claim() {
            keeps_every_promise($seeds, &[$(FaultKind::$kind),*]);
        }
    )*};
}

survives! {
    without_faults_every_byte_and_name_is_right: 0..16, [];
    survives_kills_of_storage: 600..612, [KillStorage, PowerCutStorage];
    survives_kills_of_the_metadata_leader: 100..108, [KillMeta, PowerCutMeta];
    survives_a_coordinator_that_restarts: 200..204, [KillCoordinator];
    survives_partitions: 300..308, [PartitionFromClient, PartitionFromPeer, PartitionFromCoordinator];
    survives_broken_and_slow_connections: 400..408, [ResetConnections, SlowLink];
    survives_slow_disks: 500..504, [SlowDisk];
    survives_flipped_bits: 700..704, [FlipBits];
}
