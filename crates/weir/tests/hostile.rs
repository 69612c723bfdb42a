//! Claim: no bytes that arrive at a server's port, before a hello or after it, make a server die or grow, and
//! another client's work continues.
//!
//! Frames are right (their checksums hold), their bodies are not: random bytes, and messages of every type
//! with parts changed. Numbers in them are large, so that none means a real session, node or file by chance:
//! there is no authentication in this version, and a well-formed command is obeyed. Requests to targets name
//! real groups and epochs, to get further.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, OnPanic, can_mount, pattern, wait_until};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weir_decoders::{Dice, for_every_message};
use weir_proto::checksum::crc32c;
use weir_proto::frame::{FrameKind, HEADER_BYTES, Header, Hello};
use weir_proto::map::Role;
use weir_proto::{Reader, Request, Wire};
use weir_proto::{coord, map, methods, version};

/// The memory that a server may hold more after it all: its caches and the allocator's leftovers.
const GROWTH_MIB_MAX: u64 = 96;
/// A read or a write of the other client, on a busy machine.
const OPERATION_MAX: Duration = Duration::from_secs(15);

/// Bytes that `T` accepts, with numbers that mean nothing here: every byte is large unless a decoder refuses
/// it.
fn stranger<T: Wire>(dice: &mut Dice) -> Option<Vec<u8>> {
    let mut bytes: Vec<u8> = (0..1200).map(|_| 128 + dice.below(120) as u8).collect();
    for _ in 0..4000 {
        let mut reader = Reader::new(&bytes);
        let accepted = T::decode(&mut reader).is_ok();
        let end = bytes.len() - reader.remaining();
        if accepted {
            bytes.truncate(end);
            return Some(bytes);
        }
        // Refused are cases, truths and lengths, and texts that are none.
        match dice.below(4) {
            0 => bytes[end.saturating_sub(1)] = dice.below(8) as u8,
            1 => {
                let at = end.saturating_sub(4);
                bytes[at..at + 4].copy_from_slice(&(dice.below(12) as u32).to_le_bytes());
            }
            2 => {
                let at = end.min(bytes.len() - 4);
                bytes[at..at + 4].copy_from_slice(&(dice.below(12) as u32).to_le_bytes());
            }
            _ => {
                let at = end.saturating_sub(1 + dice.below(12));
                let to = (end + 12).min(bytes.len());
                bytes[at..to].iter_mut().for_each(|b| *b = b'a' + dice.below(26) as u8);
            }
        }
    }
    None
}

/// A request type: its number on the wire, and how its values are made.
struct Kind {
    method: u16,
    make: Make,
}

type Make = fn(&mut Dice) -> Option<Vec<u8>>;

/// Every request of the sources with its method number.
fn kinds() -> Vec<Kind> {
    thread_local!(static MAKERS: std::cell::RefCell<BTreeMap<String, Make>> = Default::default());
    fn note<T: Wire>(name: &str) {
        let name = name.rsplit("::").next().unwrap_or(name).to_owned();
        MAKERS.with_borrow_mut(|makers| makers.insert(name, stranger::<T>));
    }
    for_every_message!(note);
    let makers = MAKERS.take();
    let sources = [
        include_str!("../../weir-proto/src/coord.rs"),
        include_str!("../../weir-proto/src/data.rs"),
        include_str!("../../weir-proto/src/meta.rs"),
        include_str!("../../weir-proto/src/life.rs"),
        include_str!("../../weir-proto/src/lock.rs"),
        include_str!("../../weir-proto/src/recall.rs"),
        include_str!("../../weir-proto/src/relation.rs"),
        include_str!("../../weir-proto/src/snapshot.rs"),
        include_str!("../../weir-proto/src/volume.rs"),
        include_str!("../../weir-proto/src/backup.rs"),
        include_str!("../../weir-proto/src/condition.rs"),
    ];
    let mut kinds = Vec::new();
    for part in sources.iter().flat_map(|source| source.split("message!(").skip(1)) {
        let declared =
            part.lines().map(str::trim).find(|l| !l.is_empty() && !l.starts_with("//")).unwrap_or("");
        let Some((name, rest)) = declared.split_once(" = ") else { continue };
        let method = rest.split(' ').next().unwrap().parse().unwrap();
        kinds.push(Kind { method, make: makers[name] });
    }
    assert!(kinds.len() > 110, "{} requests", kinds.len());
    kinds
}

fn framed(kind: FrameKind, method: u16, call: u64, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Header {
        method,
        body_len: body.len() as u32,
        payload_len: payload.len() as u32,
        payload_crc: crc32c(payload),
        patience_ms: 200,
        ..Header::new(kind, call)
    };
    [&header.encode(body)[..], body, payload].concat()
}
fn hello(role: Role) -> Vec<u8> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        level: version::LEVEL_MAX,
        cluster: None,
        name: "stranger".into(),
        role,
        instance: 1,
    };
    framed(FrameKind::Hello, 0, 0, &hello.to_bytes(), &[])
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the server listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Sends all of it, and reads what is answered until the server closes: every frame of it is whole.
fn converse(port: u16, bytes: &[u8]) {
    let mut stream = connect(port);
    let mut sending = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = sending.write_all(bytes); // it may be closed before all is sent
            let _ = sending.shutdown(Shutdown::Write);
        });
        let mut head = [0; HEADER_BYTES];
        while stream.read_exact(&mut head).is_ok() {
            let header = Header::decode(&head).expect("a server speaks the protocol");
            let mut rest = vec![0; header.body_len as usize + header.payload_len as usize];
            if stream.read_exact(&mut rest).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
    });
}

/// The cluster map, which any peer may request.
fn cluster_map(port: u16) -> map::ClusterMap {
    let request = coord::GetMap { newer_than: 0, wait_ms: 0 }.to_bytes();
    let mut stream = connect(port);
    stream
        .write_all(
            &[hello(Role::Console), framed(FrameKind::Request, coord::GetMap::METHOD, 1, &request, &[])]
                .concat(),
        )
        .unwrap();
    loop {
        let mut head = [0; HEADER_BYTES];
        stream.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut body = vec![0; header.body_len as usize];
        stream.read_exact(&mut body).unwrap();
        if header.kind == FrameKind::Response {
            let map = coord::MapReply::from_bytes(&body).unwrap().map.unwrap();
            return map::ClusterMap::clone(&map);
        }
    }
}

/// A body of the kind: changed in places, or random.
fn body(kind: &Kind, dice: &mut Dice, map: &map::ClusterMap, target: u32) -> Option<Vec<u8>> {
    if dice.below(2) == 0 {
        return Some((0..dice.below(200)).map(|_| 100 + dice.below(156) as u8).collect());
    }
    let mut bytes = (kind.make)(dice)?;
    let member = |g: &&map::Group| g.members.iter().any(|m| m.target.0 == target);
    if (200..300).contains(&kind.method)
        && let Some(group) = map.groups.iter().filter(member).nth(dice.below(4))
        && bytes.len() >= 16
    {
        // A real place; changes there concern files that no client has.
        bytes[..4].copy_from_slice(&target.to_le_bytes());
        bytes[4..8].copy_from_slice(&group.id.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&group.epoch.0.to_le_bytes());
    }
    for _ in 0..dice.below(3) {
        let at = dice.below(bytes.len().max(1));
        match dice.below(4) {
            _ if bytes.is_empty() => {}
            0 if at >= 16 => bytes[at] ^= 1 << dice.below(8),
            1 if at >= 16 => bytes[at] = 100 + dice.below(156) as u8,
            2 => bytes.truncate(at),
            _ => bytes.push(dice.below(256) as u8),
        }
    }
    Some(bytes)
}

/// One server, `count` packets of each type before a hello and after it.
fn attack(
    seed: u64,
    port: u16,
    target: u32,
    map: &map::ClusterMap,
    kinds: &[Kind],
    count: usize,
    sent: &AtomicU64,
) {
    let mut dice = Dice(seed);
    for kind in kinds {
        let mut left = count;
        while left > 0 {
            let some = left.min(200);
            left -= some;
            // Mostly one who may send it: others are refused before it is decoded.
            let may = |role: &&Role| methods::find(kind.method).unwrap().by.has((**role).into());
            let role = match dice.below(10) {
                0 => Role::ALL.get(dice.below(Role::ALL.len())),
                _ => Role::ALL.iter().find(may),
            };
            let mut bytes = hello(*role.expect("every method has senders"));
            for call in 0..some {
                let Some(body) = body(kind, &mut dice, map, target) else { continue };
                let payload = pattern(seed, if dice.below(4) == 0 { dice.below(3000) } else { 0 });
                bytes.extend(framed(FrameKind::Request, kind.method, call as u64 + 1, &body, &payload));
            }
            converse(port, &bytes);
            sent.fetch_add(some as u64, Ordering::Relaxed);
        }
        // Before a hello: the connection ends with the first frame, so a few of each type are enough.
        for _ in 0..count.div_ceil(40) {
            let Some(body) = body(kind, &mut dice, map, target) else { continue };
            let mut bytes = framed(FrameKind::Request, kind.method, 1, &body, &[]);
            if dice.below(2) == 0 {
                let at = dice.below(bytes.len());
                bytes[at] ^= 1 << dice.below(8);
            }
            converse(port, &bytes);
            sent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn resident_mib(pid: i64) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("a process has memory");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Writes and verifies small files until it is stopped; returns the longest time that one took.
fn bystander(dir: &Path, stop: &AtomicBool, done: &AtomicU64) -> Duration {
    let mut longest = Duration::ZERO;
    for n in 0.. {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let (path, bytes) = (dir.join(format!("f{}", n % 20)), pattern(n, 300_000));
        let begun = Instant::now();
        fs::write(&path, &bytes).unwrap_or_else(|e| panic!("write {n}: {e}"));
        fs::File::open(&path).and_then(|f| f.sync_all()).unwrap_or_else(|e| panic!("sync {n}: {e}"));
        assert!(
            fs::read(&path).unwrap_or_else(|e| panic!("read {n}: {e}")) == bytes,
            "file {n} has other bytes"
        );
        longest = longest.max(begun.elapsed());
        done.fetch_add(1, Ordering::Release);
    }
    longest
}

fn survives(count: usize) {
    let cluster = Cluster::with(1, &["--tcp"]);
    let kinds = kinds();
    let map = cluster_map(cluster.port("coord"));
    let names = cluster.names();
    let servers: Vec<String> = ["coord", "meta", "storage-1"].map(str::to_owned).to_vec();
    let pids: BTreeMap<&String, i64> = names.iter().map(|n| (n, cluster.pid(n).unwrap())).collect();
    let (stop, done, sent) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let longest = std::thread::scope(|scope| {
        let _stop = OnPanic(|| stop.store(true, Ordering::Release));
        let other = scope.spawn(|| bystander(cluster.mount(), &stop, &done));
        wait_until("the other client works", Duration::from_secs(60), || done.load(Ordering::Acquire) >= 5);
        let before: BTreeMap<&String, u64> = servers.iter().map(|n| (n, resident_mib(pids[n]))).collect();
        let attackers: Vec<_> = servers
            .iter()
            .enumerate()
            .map(|(n, name)| {
                let (port, map, kinds, sent) = (cluster.port(name), &map, &kinds, &sent);
                scope.spawn(move || attack(n as u64 + 1, port, 1, map, kinds, count, sent))
            })
            .collect();
        attackers.into_iter().for_each(|a| a.join().unwrap());
        let at_the_end = done.load(Ordering::Acquire);
        wait_until("the other client goes on", Duration::from_secs(60), || {
            done.load(Ordering::Acquire) >= at_the_end + 3
        });
        stop.store(true, Ordering::Release);
        for name in &servers {
            let (was, is) = (before[name], resident_mib(pids[name]));
            eprintln!("{name}: {was} MiB before, {is} MiB after");
            assert!(is <= was + GROWTH_MIB_MAX, "{name} grew from {was} to {is} MiB");
        }
        other.join().unwrap()
    });
    eprintln!(
        "{} packets; the other client wrote and read {} files, the slowest in {longest:?}",
        sent.load(Ordering::Relaxed),
        done.load(Ordering::Relaxed)
    );
    assert!(longest <= OPERATION_MAX, "an operation of the other client took {longest:?}");
    for (name, pid) in pids {
        assert_eq!(cluster.pid(name), Some(pid), "{name} ended");
    }
    // Waits that strangers reported are forgotten when they are not reported again.
    wait_until("the cluster is healthy", Duration::from_secs(60), || cluster.status()["healthy"] == true);
}

#[test]
fn hostile_packets_do_no_harm() {
    if can_mount() {
        survives(100);
    }
}

/// `make test-long`: `WEIR_HOSTILE` packets of each type to each of three servers.
#[test]
#[ignore = "many minutes: make test-long"]
fn ten_thousand_hostile_packets_of_each_type_do_no_harm() {
    if can_mount() {
        survives(std::env::var("WEIR_HOSTILE").map_or(10_000, |n| n.parse().expect("a number")));
    }
}
