//! A target in the simulator: power cuts and kills at any moment, full disks, failing disks.
//!
//! Claim: acknowledged writes are present afterwards, others are present as a whole or not at all, and
//! inspection finds nothing wrong.
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_env::Env;
use weir_env::sim::{DiskFaults, SimConfig, World};
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::map::Scheme;
use weir_proto::*;
use weir_store::Geometry;
use weir_store::cells::{Numbering, Scope};
use weir_store::format;
use weir_store::inspect::{Finding, InspectOptions, inspect};
use weir_store::open_index;
use weir_store::store::{FragmentWrite, Install, OverlayWrite, Store};

const CELL_BYTES: u64 = 160 << 10;
const CELLS: usize = 3;
const SCOPE: Scope = Scope {
    group: PgId(3),
    epoch: Epoch(5),
    scheme: Scheme { data: 2, parity: 1 },
    current: 0,
    lost_at: Epoch(0),
};

fn dir() -> &'static Path {
    Path::new("/t0")
}
fn cell(n: usize) -> CellId {
    CellId { file: FileId { namespace: NamespaceId(1), inode: InodeId(n as u64 + 1) }, stripe: 5, index: 1 }
}
fn bytes_of(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i * 13 + seed * 31 + (i >> 9)) as u8).collect()
}
async fn open(env: &Env) -> Result<Arc<Store>> {
    let kv = open_index(env, dir()).await?;
    let env = env.clone();
    let geometry = Geometry { slab_bytes: 16 << 20, step_bytes: 8 << 20 };
    env.clone().tasks.blocking(move || Store::open(env, TargetId(7), dir(), kv, geometry)).await.map(Arc::new)
}
fn write(
    store: &Store,
    n: usize,
    version: Version,
    mode: WriteMode,
    folded_seq: Seq,
    data: &[u8],
) -> Result<weir_kv::CommitSeq> {
    let crcs = block_crcs(data, CHECKSUM_BLOCK as usize);
    let folded_seqs = [Seq(0), folded_seq];
    let write = FragmentWrite {
        cell: cell(n),
        version,
        mode,
        missing: 0,
        folded_seqs: &folded_seqs,
        block_crcs: &crcs,
        data,
    };
    store.write_fragment(&SCOPE, &write)
}
fn overlay(
    store: &Store,
    n: usize,
    token_epoch: u32,
    offset: u64,
    data: &[u8],
) -> Result<weir_kv::CommitSeq> {
    let write = OverlayWrite {
        cell: cell(n),
        token_epoch,
        offset: offset as u32,
        len: data.len() as u32,
        kind: OverlayKind::Data,
        crc: crc32c(data),
        missing: 0,
        data,
    };
    Ok(store.append(&SCOPE, Numbering::Next, &write)?.0)
}
fn read(store: &Store, n: usize) -> Result<Vec<u8>> {
    let place = Place { target: TargetId(7), group: SCOPE.group, epoch: SCOPE.epoch };
    let request = ReadCell {
        place,
        cell: cell(n),
        view: ReadView::Merged,
        version: Version(0),
        offset: 0,
        len: 1 << 20,
    };
    Ok(store.read(&store.plan_read(&SCOPE, &request)?)?.1.concat())
}

/// A cell's bytes as acknowledged, and as they would be with the write in flight.
#[derive(Clone, Default)]
struct Cell {
    acked: Vec<u8>,
    pending: Option<Vec<u8>>,
}
type Model = Arc<Mutex<Vec<Cell>>>;

/// Writes to one cell, one after the other, until the process ends.
async fn writer(env: Env, store: Arc<Store>, n: usize, seed: u64, model: Model) {
    let below = |bound: u64| env.rng.below(bound);
    // Of each truncation, and of writes after it. Writes of an earlier run are older.
    let mut token = store.index().newest_token_epoch(cell(n)).unwrap().max(1);
    loop {
        let newest = store.stat_cell(&SCOPE, cell(n)).unwrap();
        let top = newest.prepared.iter().copied().fold(newest.base, Version::max);
        let version = Version::new(token, top.counter() + 1);
        let mut bytes = model.lock().unwrap()[n].acked.clone();
        let op = below(8);
        token += u32::from(op == 7);
        let data = match op {
            0..=3 => bytes_of(below(250) + seed, 1 + below(90_000) as usize),
            4 | 5 => bytes_of(below(250) + seed, below(CELL_BYTES) as usize),
            _ => Vec::new(),
        };
        let offset = below(CELL_BYTES - 90_001);
        match op {
            0..=3 => {
                let end = offset as usize + data.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[offset as usize..end].copy_from_slice(&data);
            }
            4 | 5 => bytes = data.clone(),
            7 => bytes.clear(),
            _ => {}
        }
        model.lock().unwrap()[n].pending = Some(bytes.clone());
        let work = store.clone();
        let done = env
            .tasks
            .blocking(move || match op {
                0..=3 => overlay(&work, n, token, offset, &data),
                4 => write(&work, n, version, WriteMode::Fresh, Seq(0), &data),
                5 => {
                    let last = newest.overlay_seqs[0];
                    write(&work, n, version, WriteMode::Prepare, last, &data)?;
                    work.commit_stripe(&SCOPE, cell(n), version, UNFENCED)
                }
                6 => {
                    work.seal_cell(&SCOPE, cell(n), version)?;
                    work.commit_stripe(&SCOPE, cell(n), version, UNFENCED)
                }
                _ => Ok(work.drop_file(cell(n).file, format::Truncation::to_end(0, token), &[])?.0),
            })
            .await
            .unwrap();
        store.durable(done).await.unwrap();
        model.lock().unwrap()[n] = Cell { acked: bytes, pending: None };
        store.reclaim().unwrap();
        let spilling = store.clone();
        env.tasks.blocking(move || spilling.spill_some(20_000)).await.unwrap();
    }
}

async fn check_clean(env: &Env, context: &str) {
    let mut problems = Vec::new();
    let mut report = |finding| {
        if let Finding::Problem { problem } = finding {
            problems.push(problem);
        }
    };
    let options = InspectOptions { check: true, cell: None };
    let summary = inspect(env, dir(), options, &mut report).await.unwrap();
    assert_eq!((problems, summary.problems), (vec![], 0), "{context}");
}

/// Several lives of a target, each ended at a random moment.
fn lives(seed: u64, count: u64) -> u64 {
    let world = World::new(seed, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let model: Model = Arc::new(Mutex::new(vec![Cell::default(); CELLS]));
        for life in 0..=count {
            let env = w.node("a");
            let context = format!("seed {seed}, life {life}");
            if env.disk.exists(&dir().join("index")) {
                check_clean(&env, &context).await;
            }
            let store = open(&env).await.unwrap();
            for n in 0..CELLS {
                let bytes = read(&store, n).unwrap();
                let mut model = model.lock().unwrap();
                let expected = model[n].clone();
                assert!(
                    bytes == expected.acked || expected.pending.as_ref() == Some(&bytes),
                    "{context}: cell {n} has {} bytes, acknowledged {}, under way {:?}",
                    bytes.len(),
                    expected.acked.len(),
                    expected.pending.map(|p| p.len())
                );
                model[n] = Cell { acked: bytes, pending: None };
            }
            for n in 0..CELLS {
                env.tasks.spawn("writer", writer(env.clone(), store.clone(), n, seed + life, model.clone()));
            }
            drop(store);
            w.clock().sleep(Duration::from_micros(w.rng("life").below(40_000))).await;
            if w.rng("end").below(3) == 0 { w.kill("a") } else { w.power_cut("a") }
        }
    });
    world.trace_hash()
}

#[test]
fn acknowledged_writes_survive_power_cuts() {
    for seed in 0..10 {
        lives(seed, 5);
    }
}

#[test]
fn a_seed_gives_the_same_trace_twice() {
    assert_eq!(lives(7, 3), lives(7, 3));
}

/// Writes cells until the target refuses one: how many it took, and the refusal.
async fn fill(store: &Store, data: &[u8]) -> (usize, Error) {
    for written in 0..4000 {
        match write(store, written, Version::new(1, 1), WriteMode::Fresh, Seq(0), data) {
            Ok(seq) => store.durable(seq).await.unwrap(),
            Err(refused) => {
                assert_eq!(refused.kind, ErrorKind::NoSpace, "{refused:?}");
                return (written, refused);
            }
        }
    }
    panic!("the disk never was full");
}

#[test]
fn a_full_disk_refuses_writes_and_serves_reads_and_deletes() {
    let world = World::new(1, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let env = w.node("a");
        let store = open(&env).await.unwrap();
        w.set_disk_capacity("a", 96 << 20);
        let data = bytes_of(1, 150_000);
        let (written, _) = fill(&store, &data).await;
        assert!(!store.report().failed);
        for n in 0..written {
            assert!(read(&store, n).unwrap() == data);
        }
        for n in 0..written {
            let (seq, _) = store.drop_file(cell(n).file, format::Truncation::to_end(0, 2), &[]).unwrap();
            store.durable(seq).await.unwrap();
        }
        store.reclaim().unwrap();
        write(&store, 0, Version::new(2, 1), WriteMode::Fresh, Seq(0), &data).unwrap();
        assert!(read(&store, 0).unwrap() == data);
    });
}

#[test]
fn the_last_of_a_disk_is_for_repairs() {
    let world = World::new(1, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let env = w.node("a");
        let store = open(&env).await.unwrap();
        w.set_disk_capacity("a", 2 << 30);
        let data = bytes_of(1, 1 << 20);
        let (written, refused) = fill(&store, &data).await;
        assert!(refused.context.contains("kept for repairs"), "{refused:?}");
        let crcs = block_crcs(&data, CHECKSUM_BLOCK as usize);
        let rebuilt = FragmentWrite {
            cell: cell(written),
            version: Version::new(1, 1),
            mode: WriteMode::Fresh,
            missing: 0,
            folded_seqs: &[Seq(0), Seq(0)],
            block_crcs: &crcs,
            data: &data,
        };
        let (seq, installed) = store.install(&SCOPE, &rebuilt, Seq(0), Install::Missed).unwrap();
        store.durable(seq).await.unwrap();
        assert!(installed && read(&store, written).unwrap() == data);
    });
}

#[test]
fn fences_are_listed_in_pages_taken_over_and_only_rise() {
    let world = World::new(1, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let (from, to) = (w.node("a"), w.node("b"));
        let (from, to) = (open(&from).await.unwrap(), open(&to).await.unwrap());
        for n in 0..10 {
            let fence = |token_epoch| format::Truncation { from_stripe: 0, to_stripe: u64::MAX, token_epoch };
            from.drop_file(cell(n).file, fence(5 + n as u32), &[]).unwrap();
            to.drop_file(cell(n).file, fence(if n == 3 { 90 } else { 2 }), &[]).unwrap();
        }
        let (mut after, mut pages) = (None, 0);
        loop {
            let at = GroupAt { group: SCOPE.group, epoch: SCOPE.epoch };
            let (seq, list) = from.list_fences(after, &[at], 3).unwrap();
            from.durable(seq).await.unwrap();
            to.durable(to.take_fences(&list.fences).unwrap()).await.unwrap();
            pages += 1;
            match list.more {
                true => after = list.fences.last().map(|f| f.file),
                false => break,
            }
        }
        assert_eq!(pages, 4);
        for n in 0..10 {
            let fence = if n == 3 { 90 } else { 5 + n as u32 };
            assert!(to.index().check_fence(cell(n).file, fence).is_ok(), "file {n}");
            assert!(to.index().check_fence(cell(n).file, fence - 1).is_err(), "file {n}");
        }
        // A listing raises the epoch: requests under a lower one are refused from then on.
        assert!(from.list_cells(SCOPE.group, None, Epoch(0), Epoch(SCOPE.epoch.0 - 1), 10).is_err());
    });
}

#[test]
fn a_failed_write_or_sync_fails_the_target_for_ever() {
    for (what, faults) in [
        ("sync", DiskFaults { sync_errors_per_million: 1_000_000, ..DiskFaults::default() }),
        ("write", DiskFaults { write_errors_per_million: 1_000_000, ..DiskFaults::default() }),
    ] {
        let world = World::new(1, SimConfig::default());
        let w = world.clone();
        world.run(async move {
            let env = w.node("a");
            let store = open(&env).await.unwrap();
            let data = bytes_of(1, 150_000);
            let seq = write(&store, 0, Version::new(1, 1), WriteMode::Fresh, Seq(0), &data).unwrap();
            store.durable(seq).await.unwrap();
            w.set_disk_faults("a", faults);
            let e = write(&store, 1, Version::new(1, 1), WriteMode::Fresh, Seq(0), &data).unwrap_err();
            assert_eq!(e.kind, ErrorKind::Io, "{what}: {e:?}");
            w.set_disk_faults("a", DiskFaults::default());
            let again = write(&store, 2, Version::new(1, 1), WriteMode::Fresh, Seq(0), &data).unwrap_err();
            assert_eq!(again, e);
            assert!(read(&store, 0).is_err() && store.report().failed, "{what}");
        });
    }
}

/// Two syncs would take longer than two writes. Beside other changes the journal would be written for ever.
#[test]
fn a_large_overlay_is_in_the_journal_if_nothing_waits() {
    let world = World::new(5, SimConfig::default());
    let w = world.clone();
    world.run(async move {
        let env = w.node("n");
        let store = open(&env).await.unwrap();
        let large = bytes_of(1, 20_000);
        for (others, in_journal) in [(0, true), (3, false)] {
            let work = (store.clone(), large.clone());
            let write = move || {
                (0..others).try_for_each(|n| overlay(&work.0, 1, 1, n * 4096, &[7; 100]).map(drop))?;
                overlay(&work.0, 0, 1, others * 20_000, &work.1)
            };
            let done = env.tasks.blocking(write).await.unwrap();
            store.durable(done).await.unwrap();
            let spilling = store.clone();
            let spilled = env.tasks.blocking(move || spilling.spill_some(20_000)).await.unwrap();
            assert_eq!(spilled, in_journal, "beside {others} others");
        }
    });
}
