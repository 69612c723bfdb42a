//! How fast targets are by themselves: `store_bench DIR [seconds]`. Durable overlays of 4 KiB, fragments of 1
//! MiB written and read, on one target; the memory is touched before, as everywhere.
use bytes::Bytes;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Env;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::map::Scheme;
use weir_proto::*;
use weir_store::cells::{Numbering, Scope};
use weir_store::store::{FragmentWrite, INLINE_BYTES_MAX, OverlayWrite, Store};
use weir_store::{Geometry, open_index};

const SCOPE: Scope = Scope {
    group: PgId(0),
    epoch: Epoch(1),
    scheme: Scheme { data: 4, parity: 2 },
    current: 0,
    lost_at: Epoch(0),
};
const MIB: usize = 1 << 20;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().expect("usage: store_bench DIR [seconds]");
    let seconds: u64 = args.next().map_or(3, |s| s.parse().expect("seconds"));
    let env = weir_env::real::env();
    let dir = Path::new(&dir).join("store_bench");
    let _ = env.disk.remove_dir_all(&dir);
    let kv = open_index(&env, &dir).await.unwrap();
    let store = Arc::new(Store::open(env.clone(), TargetId(1), &dir, kv, Geometry::DEFAULT).unwrap());
    spill(&env, &store);
    let time = Duration::from_secs(seconds);
    for (bytes, writers) in [(4096, 1), (4096, 8), (47_008, 1), (47_008, 8), (70_000, 1), (70_000, 8)] {
        overlays(&env, &store, bytes, writers, time).await;
    }
    for writers in [1, 4, 16] {
        fragments(&env, &store, writers, time).await;
    }
    drop(store);
    env.disk.remove_dir_all(&dir).unwrap();
}

fn cell(file: u64, stripe: u64) -> CellId {
    CellId { file: FileId { namespace: NamespaceId(1), inode: InodeId(file) }, stripe, index: 1 }
}

/// As the node's background work does.
fn spill(env: &Env, store: &Arc<Store>) {
    let (tasks, store) = (env.tasks.clone(), Arc::downgrade(store));
    env.tasks.spawn("spill", async move {
        while let Some(store) = store.upgrade() {
            let clock = weir_env::real::env().clock;
            clock.sleep(Duration::from_millis(5)).await;
            let work = move || while store.spill_some(1 << 20).unwrap() {};
            tasks.blocking(work).await;
        }
    });
}

fn write_of(w: u64, n: u64, bytes: u32, crc: u32) -> OverlayWrite<'static> {
    OverlayWrite {
        cell: cell(u64::from(bytes) * 1000 + w, n / 14),
        token_epoch: 1,
        offset: (n % 14) as u32 * bytes,
        len: bytes,
        kind: OverlayKind::Data,
        crc,
        missing: 0,
        data: &[],
    }
}

async fn overlays(env: &Env, store: &Arc<Store>, bytes: u32, writers: u64, time: Duration) {
    let data = vec![7; bytes as usize];
    let crc = crc32c(&data);
    let tasks = (0..writers).map(|w| {
        let (env, store, data) = (env.clone(), store.clone(), data.clone());
        Box::pin(async move {
            let (begun, mut times) = (env.clock.now(), Vec::new());
            while env.clock.now().since(begun) < time {
                let n = times.len() as u64;
                let start = env.clock.now();
                let (seq, _) = if bytes > INLINE_BYTES_MAX {
                    let (store, data) = (store.clone(), data.clone());
                    let write = move || {
                        store.append(
                            &SCOPE,
                            Numbering::Next,
                            &OverlayWrite { data: &data, ..write_of(w, n, bytes, crc) },
                        )
                    };
                    env.tasks.blocking(write).await.unwrap()
                } else {
                    store
                        .append(
                            &SCOPE,
                            Numbering::Next,
                            &OverlayWrite { data: &data, ..write_of(w, n, bytes, crc) },
                        )
                        .unwrap()
                };
                store.durable(seq).await.unwrap();
                times.push(env.clock.now().since(start));
            }
            times
        }) as weir_env::BoxFuture<'_, Vec<Duration>>
    });
    let mut times = weir_store::peers::join_all(tasks.collect()).await.concat();
    times.sort_unstable();
    println!(
        "overlay {bytes} B, {writers} writers: p50 {:?}, p99 {:?}, {:.0}/s, {:.0} MiB/s",
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        times.len() as f64 / time.as_secs_f64(),
        times.len() as f64 * f64::from(bytes) / MIB as f64 / time.as_secs_f64()
    );
}

async fn fragments(env: &Env, store: &Arc<Store>, writers: u64, time: Duration) {
    let mut buf = env.buffers.get(MIB);
    for (i, b) in buf.iter_mut().enumerate() {
        *b = i as u8;
    }
    let data: Bytes = buf.freeze();
    let crcs = block_crcs(&data, CHECKSUM_BLOCK as usize);
    let begun = env.clock.now();
    let tasks = (0..writers).map(|w| {
        let (env, store, data, crcs) = (env.clone(), store.clone(), data.clone(), crcs.clone());
        Box::pin(async move {
            let mut n = 0;
            while env.clock.now().since(begun) < time {
                let (worker, data, crcs) = (store.clone(), data.clone(), crcs.clone());
                let write = move || {
                    let (cell, version) = (cell(writers * 100 + w, n % 64), Version::new(1, n as u32 + 1));
                    let write = FragmentWrite {
                        cell,
                        version,
                        mode: WriteMode::Fresh,
                        missing: 0,
                        folded_seqs: &[],
                        block_crcs: &crcs,
                        data: &data,
                    };
                    worker.write_fragment(&SCOPE, &write)
                };
                let seq = env.tasks.blocking(write).await.unwrap();
                store.durable(seq).await.unwrap();
                n += 1;
            }
            n
        }) as weir_env::BoxFuture<'_, u64>
    });
    let count: u64 = weir_store::peers::join_all(tasks.collect()).await.iter().sum();
    let write_s = env.clock.now().since(begun).as_secs_f64();
    let begun = env.clock.now();
    let tasks = (0..writers).map(|w| {
        let (env, store) = (env.clone(), store.clone());
        Box::pin(async move {
            let mut n = 0;
            while env.clock.now().since(begun) < time {
                let place = Place { target: TargetId(1), group: SCOPE.group, epoch: SCOPE.epoch };
                let read = ReadCell {
                    place,
                    cell: cell(writers * 100 + w, n % 16),
                    view: ReadView::Merged,
                    version: Version(0),
                    offset: 0,
                    len: MIB as u32,
                };
                let worker = store.clone();
                let got =
                    env.tasks.blocking(move || worker.read(&worker.plan_read(&SCOPE, &read)?)).await.unwrap();
                assert!(got.0.known);
                n += 1;
            }
            n
        }) as weir_env::BoxFuture<'_, u64>
    });
    let reads: u64 = weir_store::peers::join_all(tasks.collect()).await.iter().sum();
    let read_s = env.clock.now().since(begun).as_secs_f64();
    println!(
        "fragment 1 MiB, {writers} writers: durable {:.0} MiB/s ({:.0} µs each), read {:.0} MiB/s",
        count as f64 / write_s,
        1e6 * write_s * writers as f64 / count as f64,
        reads as f64 / read_s
    );
}
