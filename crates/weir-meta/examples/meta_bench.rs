//! Rates of the metadata service over RPC: server and load generator in one process, over a Unix socket, with
//! the durable store in a directory.
//!
//! `cargo run --release -p weir-meta --example meta_bench [SECONDS [IN_FLIGHT [DIRECTORY]]]`
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use weir_env::{Addr, Env};
use weir_kv::{Engine, EngineConfig};
use weir_meta::{LayoutPolicy, Meta, MetaConfig, NoTargets};
use weir_proto::map::{Role, Scheme};
use weir_proto::meta::*;
use weir_proto::{ClusterId, InodeId, NamespaceId, PgId, Result, SessionId};
use weir_rpc::{Connection, Identity, NoService};

const PATIENCE: Duration = Duration::from_secs(30);

fn main() {
    let argument = |n: usize, or: &str| std::env::args().nth(n).unwrap_or_else(|| or.to_owned());
    let seconds: u64 = argument(1, "4").parse().expect("SECONDS is a number");
    let in_flight: u32 = argument(2, "64").parse().expect("IN_FLIGHT is a number");
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let dir = std::env::args().nth(3).map_or_else(|| temporary.path().to_owned(), Into::into);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    runtime.block_on(async {
        let env = weir_env::real::env();
        let bench = Bench::start(&env, &dir, in_flight).await.expect("the service starts");
        bench.run(Duration::from_secs(seconds)).await;
    });
}

/// CPU time of this process until now: client and server together.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks: f64 =
        fields[11].parse::<f64>().expect("a number") + fields[12].parse::<f64>().expect("a number");
    ticks / 100.0
}

struct Bench {
    env: Env,
    connection: Connection,
    session: SessionId,
    in_flight: u32,
    _server: weir_rpc::Server,
}

impl Bench {
    async fn start(env: &Env, dir: &std::path::Path, in_flight: u32) -> Result<Bench> {
        assert!(in_flight <= SLOTS, "a session has {SLOTS} slots");
        let kv = Engine::open(env, &dir.join("kv"), EngineConfig::default()).await?;
        let layout = |_: &weir_proto::volume::Policy| {
            let scheme = Scheme { data: 4, parity: 2 };
            Some(LayoutPolicy { scheme, cell_shift: 20, first_pg: PgId(0), pg_count: 24 })
        };
        let namespace = NamespaceId(1);
        let config = MetaConfig {
            namespace,
            lease_ms: 10_000,
            layout: Arc::new(layout),
            at_home: Arc::new(weir_meta::at_home),
            space: Arc::new(|| Box::pin(std::future::ready(None))),
            purge: Arc::new(NoTargets),
            gone: Arc::new(|_| false),
            map_version: Arc::new(|| 0),
            takes_data: Arc::new(|| true),
            access: Arc::new(Default::default),
            refused: Arc::new(|_| ()),
            audits: Arc::new(Vec::new),
            records_holds: Arc::new(|| true),
            answers_early: Arc::new(|| true),
            right: weir_meta::copies::Right::alone(),
            led_until: None,
            witness: Arc::new(|_| ()),
        };
        let meta = Meta::open(env, kv, config)?;
        let running = meta.clone();
        env.tasks.spawn("meta", async move { panic!("{}", running.run().await) });
        let addr = Addr::Unix(dir.join("meta.sock"));
        let cluster = Some(ClusterId([1; 16]));
        let server = weir_rpc::serve(
            env,
            std::slice::from_ref(&addr),
            Identity::new(env, "meta", Role::Meta, cluster),
            Arc::new(meta),
        )
        .await?;
        let me = Identity::new(env, "bench", Role::Mount, cluster);
        let connection = weir_rpc::connect(env, &addr, &me, Arc::new(NoService)).await?;
        let open = SessionOpen { namespace, client: "bench".into(), process: String::new() };
        let session = connection.call(&open, vec![], PATIENCE).await?.0.session;
        Ok(Bench { env: env.clone(), connection, session, in_flight, _server: server })
    }

    async fn run(&self, time: Duration) {
        let cred = Cred { uid: 0, gid: 0, groups: vec![] };
        let op = Op { session: self.session, slot: 0, seq: 1 };
        let dir = Mkdir {
            op,
            cred: cred.clone(),
            parent: InodeId::ROOT,
            name: Bytes::from_static(b"d"),
            mode: 0o755,
            umask: 0,
        };
        let dir = self.connection.call(&dir, vec![], PATIENCE).await.expect("mkdir").0.entry.attr.ino;
        let session = self.session;
        let create = move |slot: u32, n: u64| Create {
            op: Op { session, slot, seq: n + 2 },
            cred: Cred { uid: 0, gid: 0, groups: vec![] },
            parent: dir,
            name: format!("file-{slot:02}-{n:08}").into(),
            mode: 0o644,
            umask: 0,
            exclusive: true,
            open: 2,
        };
        let (made, rate) = self.load("create+open", time, self.in_flight, create).await;
        let first = InodeId((made[0].entry.attr.ino.0 >> 24) << 24).0;
        let count = made.len() as u64;
        let getattr = move |slot: u32, n: u64| GetAttr {
            session,
            ino: InodeId(first + (n.wrapping_mul(7919) + u64::from(slot) * 104_729) % count),
        };
        self.load("getattr", time, self.in_flight, getattr).await;
        let lookup = move |slot: u32, n: u64| Lookup {
            session,
            cred: cred.clone(),
            parent: dir,
            name: format!("file-{slot:02}-{:08}", n % (count / 128).max(1)).into(),
        };
        self.load("lookup", time, self.in_flight, lookup).await;
        let one = move |slot: u32, n: u64| Create {
            name: format!("one-{n}").into(),
            ..create(slot, n + (1 << 40))
        };
        self.load("create+open", time.min(Duration::from_secs(2)), 1, one).await;
        let one =
            move |_: u32, n: u64| GetAttr { session, ino: InodeId(first + n.wrapping_mul(7919) % count) };
        self.load("getattr", time.min(Duration::from_secs(2)), 1, one).await;
        let close = move |slot: u32, n: u64| {
            let ino = InodeId(first + (n * 64 + u64::from(slot)) % count);
            Close { session, files: vec![Closed { ino, reads: 0, writes: 1 }] }
        };
        self.load("close", time.min(Duration::from_secs(2)), self.in_flight, close).await;
        let done = (rate * time.as_secs_f64() / f64::from(self.in_flight) * 0.8) as u64;
        let unlink = move |slot: u32, n: u64| Unlink {
            op: Op { session, slot, seq: (1 << 32) + n },
            cred: Cred { uid: 0, gid: 0, groups: vec![] },
            parent: dir,
            name: format!("file-{slot:02}-{:08}", n % done.max(1)).into(),
        };
        self.load("unlink", time.min(Duration::from_secs(2)), self.in_flight, unlink).await;
    }

    /// Calls for `time`, so many at once; prints the rate and returns the replies and the rate.
    async fn load<R, F>(&self, what: &str, time: Duration, in_flight: u32, request: F) -> (Vec<R::Reply>, f64)
    where
        R: weir_proto::Request + 'static,
        R::Reply: Send,
        F: Fn(u32, u64) -> R + Clone + Send + Sync + 'static,
    {
        let keep_all = std::mem::size_of::<R::Reply>() > 0 && what.starts_with("create");
        let (begun, cpu_begun) = (self.env.clock.now(), cpu_seconds());
        let until = begun + time;
        let (failed, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (tx, mut rx) = tokio::sync::mpsc::channel(in_flight as usize);
        for slot in 0..in_flight {
            let (env, connection, request, tx) =
                (self.env.clone(), self.connection.clone(), request.clone(), tx.clone());
            let (failed, done) = (failed.clone(), done.clone());
            self.env.tasks.spawn("load", async move {
                let mut replies = Vec::new();
                for n in 0.. {
                    match connection.call(&request(slot, n), vec![], PATIENCE).await {
                        Ok((reply, _)) if keep_all => replies.push(reply),
                        Ok(_) => {}
                        Err(_) => _ = failed.fetch_add(1, Relaxed),
                    }
                    done.fetch_add(1, Relaxed);
                    if env.clock.now() >= until {
                        break;
                    }
                }
                let _ = tx.send(replies).await;
            });
        }
        drop(tx);
        let mut replies = Vec::new();
        while let Some(some) = rx.recv().await {
            replies.extend(some);
        }
        let took = self.env.clock.now().since(begun).as_secs_f64();
        let (done, failed) = (done.load(Relaxed), failed.load(Relaxed));
        let rate = done as f64 / took;
        let wait_us = 1e6 / rate * f64::from(in_flight);
        let cpu_us = (cpu_seconds() - cpu_begun) * 1e6 / done as f64;
        println!(
            "{what:12} {in_flight:3} in flight: {rate:9.0}/s  mean {wait_us:6.0} us  CPU {cpu_us:5.1} us each  errors {failed}"
        );
        (replies, rate)
    }
}
