//! System claims, as oracles over many seeds. A failure prints the command that repeats it.
use weir_sim::{FaultKind, Options, run};

fn keeps_every_promise(seeds: std::ops::Range<u64>, options: &Options) {
    let broken: Vec<String> =
        seeds.clone().filter_map(|seed| run(seed, options).err()).map(|e| e.to_string()).collect();
    assert!(broken.is_empty(), "{} of {} seeds:\n{}", broken.len(), seeds.count(), broken.join("\n\n"));
}

#[test]
fn without_faults_every_byte_and_name_is_right() {
    let options = Options { faults: Vec::new(), ..Options::default() };
    keeps_every_promise(0..25, &options);
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

macro_rules! survives {
    ($($claim:ident: $seeds:expr, [$($kind:ident),*];)*) => {$(
        #[test]
        fn $claim() {
            let options = Options { faults: vec![$(FaultKind::$kind),*], ..Options::default() };
            keeps_every_promise($seeds, &options);
        }
    )*};
}

survives! {
    survives_kills_of_the_metadata_leader: 100..112, [KillMeta, PowerCutMeta];
    survives_a_coordinator_that_restarts: 200..210, [KillCoordinator];
    survives_partitions: 300..315, [PartitionFromClient, PartitionFromPeer, PartitionFromCoordinator];
    survives_broken_and_slow_connections: 400..415, [ResetConnections, SlowLink];
    survives_slow_disks: 500..506, [SlowDisk];
}
