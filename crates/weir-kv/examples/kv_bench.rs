//! How fast the state engine is, in a metadata server's shape: a create is 5 puts and 3 additions.
//!
//! `cargo run --release -p weir-kv --example kv_bench -- DIR [SECONDS]`; DIR is not emptied: give a new
//! one. Prints one line per measurement. Run it three times; a shared machine varies.

use std::path::PathBuf;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_kv::{Engine, EngineConfig, Kv, Scan, Txn};
use weir_proto::Result;

/// Metadata clients' requests in flight at one server.
const IN_FLIGHT: usize = 64;

fn create(t: &mut dyn Txn, n: u64) -> Result<()> {
    let dir = n / 10_000;
    let mut entry = b"E/".to_vec();
    entry.extend_from_slice(&dir.to_be_bytes());
    entry.extend_from_slice(format!("/frame-{n:08}.cbf").as_bytes());
    t.put(&entry, &[1; 60]);
    t.put(&keyed(b"I/", n), &[2; 150]);
    t.put(&keyed(b"C/", n), &[3; 120]);
    t.put(&keyed(b"U/", n % 64), &[4; 80]);
    t.put(&keyed(b"S/", n % 8), &[5; 60]);
    t.add(&keyed(b"T/", dir), 1);
    t.add(&keyed(b"Q/", 1000), 1);
    t.add(&keyed(b"R/", dir), 4096);
    Ok(())
}

fn keyed(prefix: &[u8], n: u64) -> Vec<u8> {
    [prefix, &n.to_be_bytes()].concat()
}

struct Bench {
    env: Env,
    kv: std::sync::Arc<Engine>,
    run_for: Duration,
    next: u64,
}

impl Bench {
    fn seconds(&self, from: Instant) -> f64 {
        self.env.clock.now().since(from).as_secs_f64()
    }

    fn one_create(&mut self) -> weir_kv::CommitSeq {
        self.next += 1;
        let n = self.next;
        self.kv.transact(&mut |t| create(t, n)).expect("create")
    }

    /// Nobody waits for durability.
    fn unwaited(&mut self) -> f64 {
        let (from, first) = (self.env.clock.now(), self.next);
        while self.env.clock.now().since(from) < self.run_for {
            for _ in 0..100 {
                self.one_create();
            }
        }
        (self.next - first) as f64 / self.seconds(from)
    }

    /// 64 requests in flight, each waits for its own group commit.
    async fn grouped(&mut self) -> f64 {
        let from = self.env.clock.now();
        let base = self.next;
        let next = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(base));
        let until = from + self.run_for;
        let mut ends = Vec::new();
        for _ in 0..IN_FLIGHT {
            let (kv, clock, next) = (self.kv.clone(), self.env.clock.clone(), next.clone());
            let (tx, rx) = tokio::sync::oneshot::channel();
            self.env.tasks.spawn("bench", async move {
                while clock.now() < until {
                    let n = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
                    let seq = kv.transact(&mut |t| create(t, n)).expect("create");
                    kv.wait_durable(seq).await.expect("durable");
                }
                let _ = tx.send(());
            });
            ends.push(rx);
        }
        for end in ends {
            end.await.expect("a worker ended");
        }
        self.next = next.load(std::sync::atomic::Ordering::Relaxed);
        (self.next - base) as f64 / self.seconds(from)
    }

    /// One request at a time: p50 and p99 in µs.
    async fn alone(&mut self) -> (f64, f64) {
        let mut took = Vec::new();
        for _ in 0..5000 {
            let from = self.env.clock.now();
            let seq = self.one_create();
            self.kv.wait_durable(seq).await.expect("durable");
            took.push(self.seconds(from) * 1e6);
        }
        took.sort_by(f64::total_cmp);
        (took[took.len() / 2], took[took.len() * 99 / 100])
    }

    fn gets(&self) -> f64 {
        let from = self.env.clock.now();
        let (mut done, mut n) = (0u64, 1u64);
        while self.env.clock.now().since(from) < self.run_for / 2 {
            for _ in 0..100 {
                n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let key = keyed(b"I/", 1 + (n >> 33) % self.next);
                self.kv.read(&mut |r| r.get(&key).map(|v| assert!(v.is_some()))).expect("get");
                done += 1;
            }
        }
        done as f64 / self.seconds(from)
    }

    fn scans(&self) -> f64 {
        let from = self.env.clock.now();
        let (mut done, mut n) = (0u64, 1u64);
        while self.env.clock.now().since(from) < self.run_for / 2 {
            n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let start = (n >> 33) % self.next.saturating_sub(1000).max(1);
            let mut count = 0;
            let mut visit = |_: &[u8], _: &[u8]| {
                count += 1;
                if count == 1000 { Scan::Stop } else { Scan::More }
            };
            self.kv.read(&mut |r| r.scan(&keyed(b"I/", start), b"I0", &mut visit)).expect("scan");
            done += count;
        }
        done as f64 / self.seconds(from)
    }
}

fn main() {
    let mut args = std::env::args_os().skip(1);
    let dir = PathBuf::from(args.next().expect("usage: kv_bench DIR [SECONDS]"));
    let seconds = args.next().map_or(3.0, |s| s.to_string_lossy().parse().expect("seconds"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let env = weir_env::real::env();
        let opened = env.clock.now();
        let kv = Engine::open(&env, &dir, EngineConfig::default()).await.expect("open");
        let run_for = Duration::from_secs_f64(seconds);
        let mut bench = Bench { env, kv, run_for, next: 0 };
        println!("open                         {:>9.1} ms", bench.seconds(opened) * 1e3);
        let (p50, p99) = bench.alone().await;
        println!("durable create, one at a time {p50:>8.0} µs p50, {p99:.0} µs p99");
        println!("create, not waiting, burst   {:>9.0} /s", bench.unwaited());
        let rate = bench.grouped().await;
        println!("create, {IN_FLIGHT} waiting           {rate:>9.0} /s");
        println!("random get, mixed            {:>9.0} /s", bench.gets());
        println!("scan of 1000, mixed          {:>9.0} entries/s", bench.scans());
        let from = bench.env.clock.now();
        bench.kv.checkpoint().await.expect("checkpoint");
        println!("checkpoint                   {:>9.0} ms", bench.seconds(from) * 1e3);
        println!("random get, all folded       {:>9.0} /s", bench.gets());
        println!("scan of 1000, all folded     {:>9.0} entries/s", bench.scans());
        println!("creates in the store         {:>9}", bench.next);
    });
}
