//! The engine in the simulator: kills and power cuts at random moments, full disks, failing disks.
//!
//! A failure names its seed; the same seed repeats it.
mod common;

use common::{Lcg, Model, Op, contract, dump, tx};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::Env;
use weir_env::sim::{DiskFaults, SimConfig, World};
use weir_kv::{Alone, CommitSeq, Engine, EngineConfig, Kv};
use weir_proto::{Epoch, ErrorKind, Result};

const SMALL: EngineConfig =
    EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 1 << 20, journal_keep_bytes: 0 };
const DIR: &str = "/state";

async fn open(env: &Env) -> Arc<Engine> {
    Engine::open(env, Path::new(DIR), SMALL).await.unwrap_or_else(|e| panic!("open: {e}"))
}

#[test]
fn keeps_the_contract() {
    let world = World::new(1, SimConfig::default());
    let env = world.node("a");
    world.run(async move { contract(&*open(&env).await).await });
}

/// Every state that was ever visible, by its number, and the newest that was promised to be durable.
#[derive(Default)]
struct History {
    states: Vec<Model>,
    promised: CommitSeq,
}

impl History {
    fn new() -> Arc<Mutex<History>> {
        Arc::new(Mutex::new(History { states: vec![Model::new()], ..History::default() }))
    }

    /// A reopened store must be one of the states, and none before the promised one. Later ones never
    /// happened.
    fn check(&mut self, seed: u64, found: (CommitSeq, Model)) {
        let (seq, model) = found;
        assert!(seq >= self.promised, "seed {seed}: {:?} was promised, only {seq:?} is there", self.promised);
        let state = self.states.get(seq.0 as usize);
        assert!(Some(&model) == state, "seed {seed}: the state {seq:?} is another");
        self.states.truncate(seq.0 as usize + 1);
        self.promised = seq;
    }
}

/// Makes random transactions until it is killed or its disk fails; waits for some.
///
/// Of some seeds all records have one length: then what a torn end left behind fits behind a new record.
async fn write_for_ever(
    engine: Arc<Engine>,
    env: Env,
    history: Arc<Mutex<History>>,
    mut lcg: Lcg,
    alike: bool,
) {
    loop {
        let mut ops: Vec<Op> = (0..1 + lcg.below(5)).map(|_| Op::random(|n| lcg.below(n))).collect();
        if alike {
            ops = vec![Op::Put(3 * lcg.below(12) as u8, vec![lcg.below(256) as u8; 2400])];
        } else if lcg.below(20) == 0 {
            ops.push(Op::Put(lcg.below(40) as u8, vec![lcg.below(256) as u8; 50_000]));
        }
        let seq = {
            let mut history = history.lock().unwrap();
            let mut model = history.states.last().unwrap().clone();
            ops.iter().for_each(|op| op.run_on(&mut model));
            let done = engine.transact(&mut |t| {
                ops.iter().for_each(|op| op.run(t));
                Ok(())
            });
            let Ok(seq) = done else { return };
            history.states.push(model);
            assert_eq!(seq.0 as usize + 1, history.states.len());
            seq
        };
        match lcg.below(10) {
            0..4 => {
                if engine.wait_durable(seq).await.is_err() {
                    return;
                }
                let mut history = history.lock().unwrap();
                history.promised = history.promised.max(seq);
            }
            4 => env.clock.sleep(Duration::from_micros(lcg.below(500))).await,
            5 if lcg.below(20) == 0 => {
                if engine.checkpoint().await.is_err() {
                    return;
                }
                let mut history = history.lock().unwrap();
                history.promised = history.promised.max(seq);
            }
            _ => {}
        }
    }
}

/// Several lives, each ended at a random moment. The end's trace: equal for equal seeds.
fn lives(seed: u64, count: u64) -> u64 {
    let world = World::new(seed, SimConfig::default());
    let history = History::new();
    let w = world.clone();
    world.run(async move {
        let mut lcg = Lcg(seed);
        for life in 0..count {
            let env = w.node("a");
            // The state found at open is promised: a power cut right then must not lose it.
            let end_at_once = lcg.below(4) == 0;
            let is_open = Arc::new(Notify::new());
            // A failed sync leaves records that are written and not durable: a kill keeps them, a power cut
            // tears them.
            let fails = lcg.below(2) == 0;
            w.set_disk_faults("a", DiskFaults::default());
            let starting = {
                let (opened, world) = (is_open.clone(), w.clone());
                let (env, history, lcg) = (env.clone(), history.clone(), Lcg(seed * 1000 + life));
                async move {
                    let engine = open(&env).await;
                    history.lock().unwrap().check(seed, dump(&*engine));
                    assert_eq!(engine.durable(), history.lock().unwrap().promised);
                    opened.notify_one();
                    if fails {
                        let faults = DiskFaults { sync_errors_per_million: 20_000, ..DiskFaults::default() };
                        world.set_disk_faults("a", faults);
                    }
                    if end_at_once {
                        return std::future::pending().await;
                    }
                    write_for_ever(engine, env, history, lcg, seed.is_multiple_of(2)).await;
                }
            };
            env.tasks.spawn("writer", starting);
            // Long enough for a few folds, short enough to end within recovery sometimes.
            let most_us = [300, 3_000, 30_000, 100_000][lcg.below(4) as usize];
            if end_at_once {
                is_open.notified().await;
            } else {
                w.sleep(Duration::from_micros(lcg.below(most_us))).await;
            }
            if lcg.below(3) == 0 { w.kill("a") } else { w.power_cut("a") }
        }
        w.set_disk_faults("a", DiskFaults::default());
        let env = w.node("a");
        let engine = open(&env).await;
        history.lock().unwrap().check(seed, dump(&*engine));
    });
    world.trace_hash()
}

#[test]
fn nothing_promised_is_lost_and_nothing_is_half() {
    for seed in 0..80 {
        lives(seed, 10);
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    assert_eq!(lives(7, 5), lives(7, 5));
}

/// The disk fills up, within a fold too; transactions are refused, everything stays readable, and writes
/// continue later.
#[test]
fn a_full_disk_refuses_and_recovers() {
    for seed in 0..20 {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        world.run(async move {
            let env = w.node("a");
            let engine = open(&env).await;
            let mut model = Model::new();
            let put = |model: &mut Model, n: u32| {
                let (key, value) = (n.to_be_bytes().to_vec(), vec![n as u8; 3000]);
                let done = engine.transact(&mut |t| {
                    t.put(&key, &value);
                    Ok(())
                });
                if done.is_ok() {
                    model.insert(key, value);
                }
                done
            };
            for n in 0..50 {
                put(&mut model, n).unwrap();
            }
            w.set_disk_capacity("a", (2 << 20) + seed * 300_000);
            let mut refused = None;
            for n in 0..3000 {
                if let Err(e) = put(&mut model, n) {
                    refused = Some(e);
                    break;
                }
                env.clock.sleep(Duration::from_micros(100)).await;
            }
            let refused = refused.expect("9 MB do not fit");
            assert_eq!(refused.kind, ErrorKind::NoSpace, "seed {seed}: {refused}");
            assert!(dump(&*engine).1 == model, "seed {seed}");
            w.set_disk_capacity("a", 1 << 30);
            for n in 3000..3100 {
                put(&mut model, n).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            }
            let (seq, state) = dump(&*engine);
            assert!(state == model, "seed {seed}");
            engine.wait_durable(seq).await.unwrap();
            w.power_cut("a");
            let engine = open(&w.node("a")).await;
            assert!(dump(&*engine) == (seq, model), "seed {seed}");
        });
    }
}

const MIB: u64 = 1 << 20;
/// As a metadata server opens its store.
const USUAL: EngineConfig =
    EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 128 << 20, journal_keep_bytes: 512 << 20 };

async fn open_on(w: &World, bytes: u64) -> (Env, Arc<Engine>) {
    w.set_disk_capacity("a", bytes);
    let env = w.node("a");
    let engine = Engine::open(&env, Path::new(DIR), USUAL).await.unwrap_or_else(|e| panic!("open: {e}"));
    engine.lead(Epoch(1), Arc::new(Alone)).await.unwrap();
    (env, engine)
}

/// Puts numbers from a range, 3,000 bytes each.
fn put_some(engine: &Engine, keys: std::ops::Range<u32>) -> Result<()> {
    for n in keys {
        let (key, value) = (n.to_be_bytes(), vec![n as u8; 3000]);
        engine.transact(&mut |t| {
            t.put(&key, &value);
            Ok(())
        })?;
    }
    Ok(())
}

/// One megabyte of state on a disk of 145 MB, changed again and again: it is always folded, and the segments
/// that are kept for copies leave most of the disk free.
#[test]
fn a_small_disk_is_enough_for_a_small_state() {
    let world = World::new(5, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let (env, engine) = open_on(&w, 145 * MIB).await;
        for round in 0..200 {
            put_some(&engine, 0..333).unwrap_or_else(|e| panic!("round {round}: {e}"));
            assert!(!engine.is_space_short(), "round {round}");
            env.clock.sleep(Duration::from_millis(10)).await;
        }
        let space = env.disk.space(Path::new(DIR)).unwrap();
        assert!(space.free > space.total / 2, "{space:?}");
        let kept = env.disk.read_dir(Path::new(DIR)).unwrap();
        assert!(kept.iter().filter(|e| e.name.starts_with("journal-")).count() > 3, "{kept:?}");
        w.power_cut("a");
        let again = Engine::open(&w.node("a"), Path::new(DIR), USUAL).await.unwrap();
        assert_eq!(dump(&*again).1.len(), 333);
    });
}

/// Others fill the disk. Space is short from then on, kept segments give way, and everything can be removed.
#[test]
fn all_can_be_removed_from_a_disk_that_others_filled() {
    for (seed, left) in [(1, MIB), (2, 64 << 10), (3, 0), (4, 5 * MIB)] {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        world.run(async move {
            let (env, engine) = open_on(&w, 300 * MIB).await;
            for n in 0..10 {
                put_some(&engine, n * 500..n * 500 + 1000).unwrap();
                env.clock.sleep(Duration::from_millis(10)).await;
            }
            let space = env.disk.space(Path::new(DIR)).unwrap();
            w.set_disk_capacity("a", space.total - space.free + left);
            env.clock.sleep(Duration::from_secs(2)).await;
            assert!(engine.is_space_short(), "seed {seed}");
            for n in 0..5500u32 {
                let removed = engine.transact(&mut |t| {
                    t.delete(&n.to_be_bytes());
                    t.put(b"newest", &vec![n as u8; 2000]);
                    Ok(())
                });
                removed.unwrap_or_else(|e| panic!("seed {seed}, removal {n}: {e}"));
                if n % 100 == 0 {
                    env.clock.sleep(Duration::from_millis(10)).await;
                }
            }
            engine.checkpoint().await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            w.set_disk_capacity("a", 300 * MIB);
            put_some(&engine, 0..2000).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            engine.checkpoint().await.unwrap();
            env.clock.sleep(Duration::from_secs(2)).await;
            assert!(!engine.is_space_short(), "seed {seed}");
            assert!(env.disk.exists(&Path::new(DIR).join("ballast")), "seed {seed}: it is made again");
        });
    }
}

/// The tree's file keeps the space of what was removed, and later folds use it.
#[test]
fn removals_make_space_again() {
    let world = World::new(6, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let (env, engine) = open_on(&w, 300 * MIB).await;
        for round in 0..3 {
            let mut count = 0u32;
            while !engine.is_space_short() {
                for _ in 0..20 {
                    let put = engine.transact(&mut |t| {
                        t.put(&count.to_be_bytes(), &vec![count as u8; 50_000]);
                        Ok(())
                    });
                    put.unwrap_or_else(|e| panic!("round {round}, {count}: {e}"));
                    count += 1;
                }
                env.clock.sleep(Duration::from_millis(200)).await;
            }
            assert!(count > 2000, "round {round}: {count}");
            for n in 0..count {
                engine
                    .transact(&mut |t| {
                        t.delete(&n.to_be_bytes());
                        Ok(())
                    })
                    .unwrap_or_else(|e| panic!("round {round}, removal {n}: {e}"));
            }
            env.clock.sleep(Duration::from_secs(30)).await;
            assert!(!engine.is_space_short(), "round {round}");
        }
        engine.checkpoint().await.unwrap();
        w.power_cut("a");
        let again = Engine::open(&w.node("a"), Path::new(DIR), USUAL).await.unwrap();
        assert!(!again.is_space_short(), "the size of the content is on the disk");
    });
}

/// A store that moves to a larger disk has segments of two sizes.
#[test]
fn a_store_is_opened_on_a_disk_of_another_size() {
    let world = World::new(8, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let (env, engine) = open_on(&w, 145 * MIB).await;
        put_some(&engine, 0..2000).unwrap();
        for (epoch, bytes) in [(2, 4 << 30), (3, 200 * MIB), (4, 8 << 30)] {
            env.clock.sleep(Duration::from_millis(50)).await;
            w.power_cut("a");
            w.set_disk_capacity("a", bytes);
            let engine = Engine::open(&w.node("a"), Path::new(DIR), USUAL).await.unwrap();
            engine.lead(Epoch(epoch), Arc::new(Alone)).await.unwrap();
            for _ in 0..3 {
                put_some(&engine, 0..7000).unwrap();
            }
            let (seq, state) = dump(&*engine);
            assert_eq!(state.len(), 7000);
            engine.wait_durable(seq).await.unwrap();
            if bytes < 1 << 30 {
                continue; // the segments of the larger disk have given way
            }
            let mut reader = engine.reader(CommitSeq(seq.0 - 3000)).unwrap().expect("they are kept");
            let mut count = 0;
            while count < 3000 {
                count += reader.next(1 << 20).unwrap().expect("they are kept").len();
            }
        }
    });
}

/// Reads fail for a while, in a fold too: nothing is lost or half, and all is readable when the disk is.
#[test]
fn a_disk_that_fails_reads_for_a_while_is_read_again() {
    let mut failed = 0;
    for seed in 0..20 {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        failed += world.run(async move {
            let env = w.node("a");
            let engine = open(&env).await;
            let put = |n: u32| tx(&*engine, |t| t.put(&n.to_be_bytes(), &[n as u8; 3000]));
            for n in 0..1500 {
                engine.wait_durable(put(n)).await.unwrap();
            }
            engine.checkpoint().await.unwrap();
            let fails = DiskFaults { read_errors_per_million: 200_000, ..DiskFaults::default() };
            w.set_disk_faults("a", fails);
            let (mut failed, mut newest) = (0, 1500u32);
            for n in 0..300u32 {
                let mut found = None;
                let read = engine.read(&mut |r| {
                    found = r.get(&(n * 5).to_be_bytes())?;
                    Ok(())
                });
                match read {
                    Ok(_) => assert!(found.is_some_and(|v| v == [(n * 5) as u8; 3000]), "seed {seed}: {n}"),
                    Err(e) => {
                        assert_eq!(e.kind, ErrorKind::Unavailable, "seed {seed}: {e}");
                        failed += 1;
                    }
                }
                let written = engine.transact(&mut |t| {
                    t.put(&newest.to_be_bytes(), &[newest as u8; 3000]);
                    Ok(())
                });
                newest += u32::from(written.is_ok());
                env.clock.sleep(Duration::from_millis(10)).await;
            }
            w.set_disk_faults("a", DiskFaults::default());
            let deadline = env.clock.now() + Duration::from_secs(10);
            while engine.read(&mut |r| r.get(b"k").map(drop)).is_err() {
                assert!(env.clock.now() < deadline, "seed {seed}: it is not read again");
                env.clock.sleep(Duration::from_millis(10)).await;
            }
            let (_, all) = dump(&*engine);
            let is_whole = |n: u32| all.get(&n.to_be_bytes()[..]).is_some_and(|v| *v == [n as u8; 3000]);
            assert!(all.len() == newest as usize && (0..newest).all(is_whole), "seed {seed}");
            failed
        });
    }
    assert!(failed > 100, "the faults were met ({failed})");
}

/// Reads fail for ever: the store ends.
#[test]
fn a_disk_that_does_not_read_any_more_ends_the_store() {
    let world = World::new(1, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let env = w.node("a");
        let engine = open(&env).await;
        for n in 0..1500u32 {
            engine.wait_durable(tx(&*engine, |t| t.put(&n.to_be_bytes(), &[1; 3000]))).await.unwrap();
        }
        engine.checkpoint().await.unwrap();
        w.set_disk_faults("a", DiskFaults { read_errors_per_million: 1_000_000, ..DiskFaults::default() });
        let deadline = env.clock.now() + Duration::from_secs(120);
        let ended = || {
            let put = engine.transact(&mut |t| {
                t.put(b"k", b"v");
                Ok(())
            });
            put.is_err()
        };
        while engine.read(&mut |r| r.get(&7u32.to_be_bytes()).map(drop)).is_ok() || !ended() {
            assert!(env.clock.now() < deadline, "it continues without its disk");
            env.clock.sleep(Duration::from_millis(100)).await;
        }
    });
}

/// Writes and syncs fail: the store stops, reports that to all callers, and promised data is present
/// afterwards.
#[test]
fn a_failed_disk_ends_the_store_and_loses_nothing_promised() {
    let mut stopped = 0;
    for seed in 0..40 {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        stopped += world.run(async move {
            let env = w.node("a");
            let engine = open(&env).await;
            let mut lcg = Lcg(seed);
            let mut history = History { states: vec![Model::new()], ..History::default() };
            let fails = DiskFaults {
                write_errors_per_million: 500,
                sync_errors_per_million: 2000,
                ..Default::default()
            };
            w.set_disk_faults("a", fails);
            let mut failed = false;
            for _ in 0..1500 {
                let op = Op::random(|n| lcg.below(n));
                let mut model = history.states.last().unwrap().clone();
                op.run_on(&mut model);
                let done = engine.transact(&mut |t| {
                    op.run(t);
                    Ok(())
                });
                let Ok(seq) = done else {
                    failed = true;
                    break;
                };
                history.states.push(model);
                if lcg.below(4) == 0 {
                    match engine.wait_durable(seq).await {
                        Ok(()) => history.promised = seq,
                        Err(_) => failed = true,
                    }
                }
                if failed {
                    break;
                }
            }
            if failed {
                assert!(
                    engine
                        .transact(&mut |t| {
                            t.put(b"k", b"v");
                            Ok(())
                        })
                        .is_err(),
                    "seed {seed}"
                );
            }
            w.set_disk_faults("a", DiskFaults::default());
            w.power_cut("a");
            let engine = open(&w.node("a")).await;
            history.check(seed, dump(&*engine));
            u32::from(failed)
        });
    }
    assert!(stopped > 5, "the faults were met ({stopped})");
}

/// A sync fails within a fold: the restarted process sees bytes that are in the kernel and not on the disk.
#[test]
fn a_failed_fold_is_not_believed_after_a_restart() {
    for seed in 0..150 {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        world.run(async move {
            let engine = open(&w.node("a")).await;
            for n in 0..30u8 {
                tx(&*engine, |t| t.put(&[n], &[n; 5000]));
            }
            let before = dump(&*engine);
            engine.wait_durable(before.0).await.unwrap();
            w.set_disk_faults("a", DiskFaults { sync_errors_per_million: 300_000, ..DiskFaults::default() });
            let _ = engine.checkpoint().await; // whether it fails is the seed's choice
            w.set_disk_faults("a", DiskFaults::default());
            w.kill("a");
            let engine = open(&w.node("a")).await;
            assert!(dump(&*engine) == before, "seed {seed}: after the kill");
            engine.checkpoint().await.unwrap();
            w.power_cut("a");
            let engine = open(&w.node("a")).await;
            assert!(dump(&*engine) == before, "seed {seed}: after the power cut");
        });
    }
}

/// A bit that rots in a durable record is damage that is named, never a silent end of the journal.
#[test]
fn a_rotten_bit_in_the_journal_is_named() {
    let world = World::new(3, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let engine = open(&w.node("a")).await;
        for n in 0..10u8 {
            let seq = tx(&*engine, |t| t.put(&[n], &[n; 300]));
            engine.wait_durable(seq).await.unwrap();
        }
        w.kill("a");
        drop(engine);
        w.flip_bit("a", Path::new("/state/journal-0000000000000001"), 4096 + 1000, 3).unwrap();
        let error = Engine::open(&w.node("a"), Path::new(DIR), SMALL).await.err().unwrap();
        assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
        assert!(error.context.contains("journal-0000000000000001"), "{error}");
    });
}
