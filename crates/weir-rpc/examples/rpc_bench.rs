//! How fast calls are: `rpc_bench [SECONDS [FILTER]]`. Server and client are two runtimes of one process.
//! FILTER is a part of the names of what to run: `unix`, `tcp small`, `put` …
//!
//! Prints latency of 128-byte calls with one under way, their rate with 64, and the throughput of 1 MiB
//! payloads in both directions with the processor's time for both ends, over Unix sockets and TCP. TCP is
//! measured without certificates and with each suite, in turns, and so are handshakes, also of a crowd that
//! comes at once, as mounts do when a server is back.
#![allow(clippy::disallowed_methods)] // a program of its own: it owns its runtimes and its clock

use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use weir_env::{Addr, real};
use weir_proto::ClusterId;
use weir_proto::checksum::crc32c;
use weir_proto::map::Role;
use weir_proto::methods::Method;
use weir_proto::{MIB, Request, Wire, message};
use weir_rpc::{
    Call, Connection, Handled, Identity, NoService, Payload, Policy, Reply, Server, Service, Trust, connect,
    serve,
};
use weir_trust::certificate::{Authority, Grant};
use weir_trust::handshake::Tls;

message!(Small = 9001 by [Console] -> Small { words: [u8; 16], more: Vec<u64> });
message!(Put = 9002 by [Console] -> () {});
message!(Get = 9003 by [Console] -> () {});
message!(SmallLater = 9004 by [Console] -> Small { small: Small });

const PATIENCE: Duration = Duration::from_secs(30);

struct Target {
    bulk: Payload,
}

static METHODS: [Method; 4] =
    [Method::of::<Small>(), Method::of::<Put>(), Method::of::<Get>(), Method::of::<SmallLater>()];

impl Service for Target {
    fn method(&self, number: u16) -> Option<&'static Method> {
        METHODS.iter().find(|method| method.number == number)
    }
    fn handle(&self, call: Call) -> Handled {
        match call.method {
            Small::METHOD => Handled::Now(call.decode::<Small>().map(|s| Reply::new(&s))),
            SmallLater::METHOD => {
                Handled::Later(Box::pin(
                    async move { call.decode::<SmallLater>().map(|s| Reply::new(&s.small)) },
                ))
            }
            Put::METHOD => Handled::Now(Ok(Reply::new(&()))),
            Get::METHOD => Handled::Now(Ok(Reply::with_payload(&(), self.bulk.clone()))),
            _ => Handled::Now(Err(call.unknown())),
        }
    }
}

fn runtime(threads: usize) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap()
}

/// What the clocks of certificates say.
const NOW: u64 = 1_800_000_000;
const HANDSHAKES: u32 = 200;
/// Mounts that come back at once.
const CROWD: usize = 2000;
const CROWD_PATIENCE: Duration = Duration::from_secs(60);

/// A way to the server.
struct Way {
    name: &'static str,
    server: Server,
    /// Of its clients.
    trust: Option<Arc<Trust>>,
}

impl Way {
    async fn new(
        name: &'static str,
        addr: Addr,
        policy: Option<Policy>,
        authority: &Authority,
        bulk: &Payload,
    ) -> Way {
        let env = real::env();
        let who = Identity::new(&env, "target", Role::Storage, None);
        let who = who.trusting(trust(policy.as_ref(), authority, "target", Role::Storage));
        let service = Arc::new(Target { bulk: bulk.clone() });
        let server = serve(&env, &[addr], who, service).await.unwrap();
        Way { name, server, trust: trust(policy.as_ref(), authority, "bench", Role::Console) }
    }
    async fn client(&self) -> Connection {
        let env = real::env();
        let who = Identity::new(&env, "bench", Role::Console, None);
        let who = who.trusting(self.trust.clone());
        connect(&env, &self.server.addrs()[0], &who, Arc::new(NoService)).await.unwrap()
    }
}

fn trust(policy: Option<&Policy>, authority: &Authority, name: &str, role: Role) -> Option<Arc<Trust>> {
    let grant = Grant { name: name.to_owned(), roles: vec![role], serial: 1 };
    let tls = Tls::of_node(authority.issue_own(&grant, NOW).unwrap(), Arc::new(|| NOW));
    policy.map(|policy| Arc::new(Trust::new(Arc::new(tls), policy.clone())))
}

fn main() {
    let seconds: f64 = std::env::args().nth(1).map_or(1.5, |s| s.parse().expect("SECONDS"));
    let duration = Duration::from_secs_f64(seconds);
    let filter = std::env::args().nth(2).unwrap_or_default();
    let path = std::env::temp_dir().join(format!("weir-rpc-bench-{}", std::process::id()));
    let bulk: Bytes = (0..MIB).map(|i| (i * 31) as u8).collect::<Vec<_>>().into();
    let payload = Payload::with_crc(vec![bulk.clone()], crc32c(&bulk));
    let authority = Authority::found(ClusterId([7; 16]), NOW).unwrap();
    let server_side = runtime(2);
    let ways = server_side.block_on(async {
        let tcp: Addr = "tcp:127.0.0.1:0".parse().unwrap();
        let policy = Policy::default();
        let encrypting = Policy { trusted: Vec::new(), ..policy.clone() };
        let aes = Policy { only_aes: true, ..policy.clone() };
        let mut ways = Vec::new();
        for (name, addr, policy) in [
            ("unix", Addr::Unix(path.clone()), None),
            ("tcp", tcp.clone(), None),
            ("tcp mac-aegis", tcp.clone(), Some(policy)),
            ("tcp aegis", tcp.clone(), Some(encrypting)),
            ("tcp aes", tcp.clone(), Some(aes)),
        ] {
            ways.push(Way::new(name, addr, policy, &authority, &payload).await);
        }
        ways
    });
    let client_side = runtime(2);
    client_side.block_on(async {
        for round in 1..=3 {
            println!("round {round}");
            for way in &ways {
                measure(way, &payload, duration, &filter).await;
            }
        }
    });
    drop(ways);
    let _ = std::fs::remove_file(path);
}

/// Seconds of processor that this process has used: both ends.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

async fn measure(way: &Way, payload: &Payload, duration: Duration, filter: &str) {
    let small = Small { words: [1; 16], more: vec![7; 13] };
    let later = SmallLater { small: small.clone() };
    assert!(small.to_bytes().len() <= 128);
    let none = Payload::default();
    let socket = way.name;
    let wanted = |name: &str| format!("{socket} {name}").contains(filter);
    if wanted("handshake") && way.trust.is_some() {
        let before = processor();
        for _ in 0..HANDSHAKES {
            drop(way.client().await);
        }
        let each = (processor() - before) * 1e3 / f64::from(HANDSHAKES);
        println!("{socket:13} handshake: {each:.2} ms of processor at both ends");
    }
    if wanted("crowd") {
        let seconds = crowd(way).await;
        println!("{socket:13} crowd: {CROWD} clients are connected after {seconds:.2} s");
    }
    if wanted("latency") {
        let (p50, p99) = latency(way, &small, duration).await;
        println!("{socket:13} latency, 128 B, 1 in flight: p50 {p50:.1} µs, p99 {p99:.1} µs");
    }
    if wanted("small") {
        for in_flight in [8, 64, 256] {
            let rate = throughput(way, 1, in_flight, duration, &small, &none).await / 1e3;
            println!("{socket:13} small, 128 B, {in_flight} in flight: {rate:.0} k/s");
        }
        let rate = throughput(way, 1, 64, duration, &later, &none).await / 1e3;
        println!("{socket:13} small, 128 B, 64 in flight, served by tasks: {rate:.0} k/s");
    }
    for (connections, in_flight) in [(1, 1), (1, 4), (4, 4), (6, 6)] {
        let how = format!("1 MiB, {connections} connections, {in_flight} in flight");
        let gb = MIB as f64 / 1e9;
        if wanted("put") {
            let before = processor();
            let rate = throughput(way, connections, in_flight, duration, &Put {}, payload).await * gb;
            let cost = (processor() - before) / (rate * duration.as_secs_f64());
            println!("{socket:13} put, {how}: {rate:.2} GB/s, {cost:.2} s of processor per GB");
        }
        if wanted("get") {
            let before = processor();
            let rate = throughput(way, connections, in_flight, duration, &Get {}, &none).await * gb;
            let cost = (processor() - before) / (rate * duration.as_secs_f64());
            println!("{socket:13} get, {how}: {rate:.2} GB/s, {cost:.2} s of processor per GB");
        }
    }
}

/// Seconds until all of a crowd are connected. A client that fails tries again at once.
async fn crowd(way: &Way) -> f64 {
    let begun = Instant::now();
    let addr = way.server.addrs()[0].clone();
    let clients: Vec<_> = (0..CROWD)
        .map(|_| {
            let (addr, trust) = (addr.clone(), way.trust.clone());
            tokio::spawn(async move {
                let env = real::env();
                let who = Identity::new(&env, "bench", Role::Console, None).trusting(trust);
                loop {
                    match connect(&env, &addr, &who, Arc::new(NoService)).await {
                        Ok(connection) => return connection,
                        Err(e) => {
                            assert!(begun.elapsed() < CROWD_PATIENCE, "no end after {CROWD_PATIENCE:?}: {e}")
                        }
                    }
                }
            })
        })
        .collect();
    let mut connected = Vec::new();
    for client in clients {
        connected.push(client.await.unwrap());
    }
    begun.elapsed().as_secs_f64()
}

async fn latency(way: &Way, small: &Small, duration: Duration) -> (f64, f64) {
    let (connection, small) = (way.client().await, small.clone());
    let task = tokio::spawn(async move {
        let mut micros = Vec::with_capacity(1 << 18);
        let end = Instant::now() + duration;
        while Instant::now() < end {
            let begun = Instant::now();
            connection.call(&small, vec![], PATIENCE).await.unwrap();
            micros.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        micros.sort_by(f64::total_cmp);
        (micros[micros.len() / 2], micros[micros.len() * 99 / 100])
    });
    task.await.unwrap()
}

/// Calls per second in all, with `in_flight` callers spread over `connections`.
async fn throughput<R: Request + Clone>(
    way: &Way,
    connections: usize,
    in_flight: usize,
    duration: Duration,
    request: &R,
    payload: &Payload,
) -> f64 {
    let done = Arc::new(AtomicU64::new(0));
    let mut opened = Vec::new();
    for _ in 0..connections {
        opened.push(way.client().await);
    }
    let begun = Instant::now();
    let end = begun + duration;
    let callers: Vec<_> = (0..in_flight)
        .map(|i| {
            let (connection, done) = (opened[i % connections].clone(), done.clone());
            let (request, payload) = (request.clone(), payload.clone());
            tokio::spawn(async move {
                while Instant::now() < end {
                    connection.call_payload(&request, payload.clone(), PATIENCE).await.unwrap();
                    done.fetch_add(1, Relaxed);
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    done.load(Relaxed) as f64 / begun.elapsed().as_secs_f64()
}
