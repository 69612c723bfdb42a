//! System claims, as oracles over many seeds. A failure is made smaller and prints the command that repeats
//! it.
#![allow(clippy::disallowed_methods, reason = "worlds are simulated in threads of the real machine")]
use std::{ops::Range, thread};
use weir_proto::map::Scheme;
use weir_sim::coverage::{OPERATIONS, never_met, table};
use weir_sim::marks::{Met, OWN_EVICTION};
use weir_sim::{FaultKind, Options, Servers, Watch, run, shrink::shrink};

/// What all runs of a test did.
#[derive(Default)]
struct Sum {
    met: Met,
    evictions: u64,
    own_evictions: u64,
}

impl Sum {
    fn add(&mut self, met: Met, evictions: u64, own_evictions: u64) {
        for (pair, count) in met {
            *self.met.entry(pair).or_default() += count;
        }
        self.evictions += evictions;
        self.own_evictions += own_evictions;
    }
}

fn keeps_every_promise(seeds: impl Iterator<Item = u64>, options: impl Fn(u64) -> Options) -> Sum {
    let mut sum = Sum::default();
    for seed in seeds {
        let outcome = run(seed, &options(seed))
            .unwrap_or_else(|e| panic!("a promise was broken: {e}\nmade smaller: {}", shrink(e.clone())));
        sum.add(outcome.met, outcome.evictions, outcome.own_evictions);
    }
    sum
}

/// The seeds of a test on both processors.
fn keep_every_promise(seeds: Range<u64>, options: impl Fn(u64) -> Options + Copy + Send + 'static) -> Sum {
    let half = |odd| {
        let seeds = (seeds.start + odd..seeds.end).step_by(2);
        thread::spawn(move || keeps_every_promise(seeds, options))
    };
    let mut sum = Sum::default();
    for half in [0, 1].map(half) {
        let half = half.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        sum.add(half.met, half.evictions, half.own_evictions);
    }
    sum
}

fn with_faults(seeds: Range<u64>, faults: &[FaultKind]) {
    let faults = faults.to_vec();
    keeps_every_promise(seeds, |_| Options { faults: faults.clone(), operations: 40, ..Options::default() });
}

#[test]
fn the_same_seed_runs_the_same_way() {
    for seed in 0..20 {
        let watch = Watch { log: true, ..Watch::default() };
        let options = Options { operations: 20, watch, ..Options::mixed(seed) };
        let first = run(seed, &options).unwrap_or_else(|e| panic!("{e}"));
        let again = run(seed, &options).unwrap_or_else(|e| panic!("{e}"));
        let parted = first.log.iter().zip(&again.log).find(|(a, b)| a != b);
        assert!(parted.is_none(), "seed {seed}: the runs part at {parted:?}");
        assert!(first == again, "seed {seed}: one run continues where the other ended");
    }
}

/// Each kind of fault meets most kinds of operations, and nine of ten pairs come at all: what never comes
/// proves nothing.
#[test]
fn survives_any_mix_of_faults() {
    let met = keep_every_promise(34013..34075, Options::mixed).met;
    let kinds = FaultKind::mixable(false);
    for kind in kinds.iter().copied() {
        let missing = never_met(&met, &[kind]);
        assert!(missing.len() * 2 < OPERATIONS.len(), "{} never met {missing:?}", kind.name());
    }
    let (missing, pairs) = (never_met(&met, &kinds).len(), kinds.len() * OPERATIONS.len());
    assert!(missing * 10 < pairs, "{missing} of {pairs} never met\n{}", table(&met, &kinds));
}

/// Seeds that broke a promise once: see `docs/verification.md`.
#[test]
fn seeds_that_failed_once_keep_every_promise() {
    let seeds = [33050, 33065, 33077, 33091, 34012, 35164, 35188, 35197, 36014, 36158];
    // They failed before there were processors and load.
    let mixed = |seed| {
        let mut options = Options { watch: Watch::default(), ..Options::mixed(seed) };
        options.servers.processor = None;
        options.faults.retain(|kind| !kind.is_load());
        options
    };
    keeps_every_promise(seeds.into_iter(), mixed);
    keeps_every_promise(63133..63134, |seed| Options { snapshots: true, ..mixed(seed) });
    keeps_every_promise(67092..67093, |seed| Options { home: true, ..mixed(seed) });
    // The answer to a create was read after the session had begun to move to another connection.
    keeps_every_promise(1_220_016..1_220_017, |_| {
        use FaultKind::*;
        Options {
            faults: vec![
                CrashLeaderBeforeFlush,
                CrashLeaderAndAuthor,
                KillMeta,
                KillClient,
                PowerCutMeta,
                KillStorage,
                LateRequests,
                SlowLink,
            ],
            operations: 60,
            pause_ms_max: 1000,
            home: true,
            snapshots: true,
            clones: true,
            locks: true,
            tree: true,
            trash: true,
            ..Options::default()
        }
    });
}

/// Frames are protected, and what protects them hides no damage on a disk.
#[test]
fn nodes_with_certificates_keep_every_promise() {
    let servers = Servers { certificates: true, ..Options::default().servers };
    keep_every_promise(68000..68006, move |seed| Options { servers, ..Options::mixed(seed) });
    keep_every_promise(68100..68103, move |_| {
        let faults = vec![FaultKind::FlipBits];
        Options { servers, faults, ..Options::default() }
    });
}

/// Three nodes keep the metadata: one of them dies, is cut off, stands still, or loses its disk.
#[test]
fn copies_of_the_metadata_keep_every_promise() {
    use FaultKind::*;
    keep_every_promise(69_000..69_012, |seed| Options::mixed_of(seed, 3));
    let kinds = [CutMetaFromCopies, CutMetaFromCoordinator, LoseMetaDisk, PauseMeta, SyncErrorsMeta];
    keep_every_promise(69_100..69_110, move |seed| {
        let faults = vec![kinds[seed as usize % kinds.len()], KillClient, LateRequests, KillMeta];
        Options { faults, ..Options::mixed_of(seed, 3) }
    });
}

/// The disk of a node that keeps the metadata is full, of the leader or of another copy.
#[test]
fn copies_on_full_disks_keep_every_promise() {
    use FaultKind::*;
    keep_every_promise(69_200..69_206, |seed| {
        let faults = vec![MetaDiskFull, KillClient, KillMeta];
        Options { faults, ..Options::mixed_of(seed, 3) }
    });
}

/// Where one member alone is enough to read a stripe it is also enough to return bytes that it should not.
/// Coordinators that share an etcd: killed, cut off, without answers, and deposed without their knowledge.
#[test]
fn several_coordinators_keep_every_promise() {
    let options = |seed| {
        let faults = FaultKind::ALL.into_iter().filter(|kind| kind.needs_coordinators());
        let base = Options { faults: faults.collect(), operations: 40, ..Options::default() };
        match seed % 2 {
            0 => Options::mixed_of(seed, 3).with_coordinators(3, seed),
            _ => Options { servers: Servers { coordinators: 2, ..base.servers }, ..base },
        }
    };
    keep_every_promise(5200..5210, options);
}

#[test]
fn copies_and_as_much_parity_as_data_keep_every_promise() {
    use FaultKind::*;
    for (seeds, data, parity) in
        [(501_028..501_036, 1, 1), (501_244..501_250, 2, 2), (502_000..502_004, 1, 2)]
    {
        let faults = vec![KillClient, KillStorage, PauseStorage, LateRequests, ResetConnections];
        let options = Options { faults, scheme: Scheme { data, parity }, ..Options::default() };
        keeps_every_promise(seeds, |_| Options { operations: 120, pause_ms_max: 3000, ..options.clone() });
    }
    let options =
        Options { faults: vec![StallDisk], scheme: Scheme { data: 1, parity: 1 }, ..Options::default() };
    keeps_every_promise(551_056..551_062, |_| options.clone());
}

#[test]
fn no_client_is_granted_a_lock_that_another_holds() {
    let options = |seed| Options { locks: true, ..Options::mixed(seed) };
    let met = keep_every_promise(70_000..70_024, options).met;
    for fault in ["kill-meta", "kill-client", "pause-client"] {
        assert!(met.contains_key(&(fault, "count")), "{fault} never met a count");
    }
}

/// Files of clones and those that they are like are changed beside each other, with any faults.
#[test]
fn a_clone_shows_its_snapshot_and_each_side_changes_for_itself() {
    let options = |seed| Options { clones: true, ..Options::mixed(seed) };
    let met = keep_every_promise(95_100..95_116, options).met;
    for operation in weir_sim::clones::OPERATIONS {
        assert!(met.keys().any(|(_, met)| *met == operation), "no fault met {operation:?}");
    }
}

/// Directories are moved with all that is below, exchanged, linked into and removed, by clients and servers
/// that die, and home follows.
#[test]
fn names_are_changed_as_a_whole_or_not_at_all() {
    use FaultKind::*;
    let options = |seed| Options { tree: true, snapshots: seed % 3 == 0, ..Options::mixed(seed) };
    let met = keep_every_promise(700_000..700_024, options).met;
    for operation in weir_sim::tree::OPERATIONS {
        assert!(met.keys().any(|(_, met)| *met == operation), "no fault met {operation:?}");
    }
    let with_home = Options { tree: true, home: true, ..Options::default() };
    let faults = vec![KillMeta, KillClient];
    keeps_every_promise(703_003..703_013, |_| Options {
        operations: 150,
        faults: faults.clone(),
        ..with_home.clone()
    });
    // A directory that home lacked was made in another one's place.
    keeps_every_promise(703_057..703_058, |_| Options {
        operations: 300,
        faults: vec![KillMeta],
        ..with_home.clone()
    });
}

/// Removed files are in the trash with all their bytes, are restored, are purged when their time is over, and
/// count all the while.
#[test]
fn removed_files_are_in_the_trash_until_they_expire() {
    let options = |seed| Options { trash: true, tree: seed % 2 == 0, ..Options::mixed(seed) };
    keeps_every_promise(480_000..480_012, options);
    let faults = vec![FaultKind::KillMeta, FaultKind::KillClient];
    let with_home = Options { trash: true, home: true, faults, ..Options::default() };
    keeps_every_promise(481_000..481_008, |_| with_home.clone());
    let with_clones = Options { snapshots: true, clones: true, pause_ms_max: 3000, ..with_home };
    for seed in [483_030, 486_017, 486_044] {
        keeps_every_promise(seed..seed + 1, |seed| Options {
            faults: Options::mixed(seed).faults,
            ..with_clones.clone()
        });
    }
}

/// Strangers change what a volume follows, and movers, servers and clients die.
#[test]
fn readers_of_a_replica_see_all_files_of_the_home() {
    use FaultKind::*;
    let options = |seed| Options { replica: true, pause_ms_max: 5000, ..Options::mixed(seed) };
    let met = keep_every_promise(490_100..490_106, options).met;
    assert!(met.keys().any(|(_, met)| *met == weir_sim::replica::COMPARE), "no fault met a comparison");
    let faults = vec![KillMeta, ClockJump];
    keeps_every_promise(491_100..491_104, |_| Options { faults: faults.clone(), ..options(0) });
}

/// With any deaths: no limit is passed, synced bytes stay, and reservations of the dead are used by others.
#[test]
fn a_limit_holds_and_all_of_it_can_be_used() {
    let options = |seed| Options { limits: true, pause_ms_max: 3000, ..Options::mixed(seed) };
    let met = keep_every_promise(600_000..600_008, options).met;
    assert!(met.keys().any(|(_, met)| *met == weir_sim::limits::WRITE), "no fault met a write");
    let faults = vec![FaultKind::KillClient];
    keeps_every_promise(601_000..601_006, |_| Options { faults: faults.clone(), ..options(0) });
}

/// Disks with injected faults fail while they are in use.
#[test]
fn faults_of_disks_have_an_effect() {
    use FaultKind::*;
    for kind in [ReadErrors, WriteErrors, SyncErrors, SyncErrorsMeta, LostWrites, MisdirectedWrites] {
        let options = Options { faults: vec![kind], ..Options::default() };
        let bites = |seed| {
            let outcome = run(seed, &options).unwrap_or_else(|e| panic!("{e}"));
            outcome.hits.get(kind.name()).is_some_and(|hits| *hits > 0)
        };
        assert!((4100..4104).any(bites), "{} never did anything", kind.name());
    }
}

/// Nodes that starve make tasks late, and a burst issues its requests.
#[test]
fn load_has_an_effect() {
    for (kind, least) in [(FaultKind::StarvedNode, 10), (FaultKind::Burst, 4000)] {
        let options = Options { faults: vec![kind], operations: 20, ..Options::default() };
        let outcome = run(4200, &options).unwrap_or_else(|e| panic!("{e}"));
        let hits = outcome.hits.get(kind.name()).copied().unwrap_or_default();
        assert!(hits >= least, "{} did {hits}", kind.name());
    }
}

macro_rules! survives {
    ($($claim:ident: $seeds:expr, [$($kind:ident),*];)*) => {$(
        #[test]
        fn $claim() {
            with_faults($seeds, &[$(FaultKind::$kind),*]);
        }
    )*};
}

survives! {
    without_faults_every_byte_and_name_is_right: 0..12, [];
    survives_kills_of_storage: 600..612, [KillStorage, PowerCutStorage];
    survives_deaths_at_any_point: 40_000..40_012, [KillStorageAtPoint, KillMetaAtPoint];
    survives_a_power_cut_of_all_storage: 3000..3008, [PowerCutAllStorage];
    survives_the_death_of_too_many: 3050..3058, [KillTooMany, KillStorage];
    survives_paused_servers: 3100..3108, [PauseStorage, PauseMeta];
    survives_kills_of_the_metadata_leader: 100..108, [KillMeta, PowerCutMeta];
    survives_a_coordinator_that_restarts: 200..206, [KillCoordinator, PowerCutCoordinator];
    survives_the_loss_of_a_host: 3200..3208, [LoseHost];
    survives_moved_addresses: 3150..3160, [MovedAddress];
    a_dead_client_loses_only_unseen_changes: 3300..3310, [KillClient];
    a_stalled_client_learns_what_it_lost: 3400..3410, [PauseClient, PartitionFromMeta];
    survives_cut_links: 1300..1306, [CutClientFromTarget];
    survives_partitions: 300..310, [PartitionFromClient, PartitionFromPeer, PartitionFromCoordinator, PartitionPartly];
    survives_broken_and_slow_connections: 400..410, [ResetConnections, LateRequests, SlowLink];
    clocks_decide_nothing: 3500..3504, [ClockJump, ClockDrift];
    survives_slow_disks: 500..504, [SlowDisk];
    survives_disks_that_hang: 550_000..550_006, [StallDisk];
    survives_disks_that_cannot_be_read: 3600..3606, [ReadErrors];
    a_disk_that_fails_once_is_never_trusted_again: 3700..3710, [WriteErrors, SyncErrors, SyncErrorsMeta];
    a_target_that_dies_while_another_fails_is_repaired: 31020..31026, [WriteErrors, KillStorage, PowerCutStorage];
    survives_full_disks: 3800..3810, [DiskFull];
    survives_a_full_disk_of_metadata: 3850..3858, [MetaDiskFull, KillMeta];
    survives_flipped_bits: 700..706, [FlipBits];
    survives_disks_that_lie: 3900..3908, [LostWrites, MisdirectedWrites];
    survives_an_empty_disk_in_place_of_a_full_one: 4000..4006, [ReplaceDisk];
    refills_targets_that_return_empty_or_as_an_old_copy: 560_000..560_008, [EmptyReturns, OldCopyReturns, KillStorage];
    replaces_targets_that_are_lost_for_good: 570_000..570_008, [LoseTargetForGood, KillStorage];
    drained_targets_lose_nothing: 590_000..590_008, [DrainTarget, KillStorage];
    survives_nodes_that_starve: 610_000..610_006, [StarvedNode];
    survives_bursts_of_requests: 620_000..620_004, [Burst];
    new_targets_are_used_and_old_ones_leave: 600_000..600_006, [AddTargets, DrainTarget, PartitionPartly];
}

/// Data is shipped by movers that die, to a home that fails, freezes and loses data that is not durable,
/// while files are evicted, recalled and changed. No byte is ever zeros, or old; in the end home is equal to
/// the volume, damage there is reported by name, and a stranger's files there stay until a decision.
#[test]
fn survives_evictions_and_faults_of_home() {
    use FaultKind::*;
    let faults = |seed: u64| match seed % 5 {
        0 => vec![],
        1 => vec![KillMeta, KillClient],
        2 => vec![KillStorage, KillMeta],
        3 => vec![PartitionFromMeta, PauseMeta],
        _ => vec![KillClient, PauseClient, ResetConnections],
    };
    let options =
        move |seed| Options { faults: faults(seed), operations: 40, home: true, ..Options::default() };
    let Sum { met, evictions, own_evictions } = keep_every_promise(51_000..51_060, options);
    assert!(evictions > 20, "{evictions} evictions in 60 runs prove little");
    // How many there are varies with everything that changes a run.
    assert!(own_evictions > 25, "{own_evictions} evictions by writers in 60 runs prove little");
    let has_met = |fault: &&str| met.contains_key(&(fault, OWN_EVICTION));
    let faults: Vec<&str> = weir_sim::home::FAULTS.into_iter().filter(has_met).collect();
    assert!(faults.len() >= 3, "evictions by writers met {faults:?} only");
}
