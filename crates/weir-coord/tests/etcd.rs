//! The coordinator's store in a real etcd of this machine, and coordinators that share it.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests start etcd, and stand between it and the store"
)]
mod common;

use common::*;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use weir_coord::etcd::{Etcd, EtcdConfig};
use weir_coord::store::{Revision, Store, Swap};
use weir_coord::{CoordConfig, Coordinator, LEASE, lead};
use weir_env::Env;
use weir_proto::{ClusterId, ErrorKind};

/// One member, in memory of the test's directory. Ends with the value.
struct Server {
    process: Child,
    url: String,
    _dir: tempfile::TempDir,
}

impl Server {
    /// `None`: etcd is not installed, and the test may be skipped.
    fn start() -> Option<Server> {
        Server::with(&[], "http")
    }

    fn with(more: &[String], scheme: &str) -> Option<Server> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            assert!(std::env::var_os("WEIR_TEST_ALL").is_none(), "etcd is missing: scripts/setup.sh");
            eprintln!("left out: etcd is missing, make setup installs it");
            return None;
        }
        // Another process may take a port between our check and the server's start: then others.
        for _ in 0..10 {
            let dir = tempfile::tempdir().unwrap();
            let [client, peer] = [free_port(), free_port()];
            let (url, peers) = (format!("{scheme}://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
            let mut etcd = Command::new("etcd");
            etcd.args(["--name", "one", "--listen-client-urls", &url, "--advertise-client-urls", &url]);
            etcd.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
            etcd.args(["--initial-cluster", &format!("one={peers}"), "--data-dir"]).arg(dir.path());
            etcd.args(more).stdout(Stdio::null()).stderr(Stdio::null());
            let mut process = etcd.spawn().unwrap();
            let patience = Instant::now() + 60 * SECOND;
            while Instant::now() < patience && process.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", client)).is_ok() {
                    return Some(Server { process, url, _dir: dir });
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        panic!("etcd does not start");
    }

    fn store(&self) -> (Env, Arc<Etcd>) {
        at(std::slice::from_ref(&self.url))
    }
}

/// Three members, as `weir up --etcd 3` starts them.
fn three() -> Option<Vec<Server>> {
    drop(Server::start()?);
    let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let at: Vec<(u16, u16)> = (0..3).map(|_| (free_port(), free_port())).collect();
    let all: Vec<String> = (0..3).map(|n| format!("m{n}=http://127.0.0.1:{}", at[n].1)).collect();
    let start = |(n, dir): (usize, tempfile::TempDir)| {
        let (client, peer) = at[n];
        let (url, peers) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let mut etcd = Command::new("etcd");
        etcd.args([
            "--name",
            &format!("m{n}"),
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ]);
        etcd.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        etcd.args(["--heartbeat-interval", "100", "--election-timeout", "500"]);
        etcd.args(["--initial-cluster", &all.join(","), "--data-dir"]).arg(dir.path());
        let process = etcd.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Server { process, url, _dir: dir }
    };
    Some(dirs.into_iter().enumerate().map(start).collect())
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn at(endpoints: &[String]) -> (Env, Arc<Etcd>) {
    let env = weir_env::real::env();
    let config =
        EtcdConfig { endpoints: endpoints.to_vec(), prefix: "/weir/test/".into(), ..Default::default() };
    let store = Etcd::open(&env, &config).unwrap();
    (env, store)
}

const OPEN: u8 = 0;
/// Requests reach etcd, their answers do not return.
const DEAF: u8 = 1;
/// Nothing is forwarded.
const CUT: u8 = 2;

/// Stands between a store and etcd.
struct Proxy {
    url: String,
    mode: Arc<AtomicU8>,
}

impl Proxy {
    fn to(server: &Server) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (mode, etcd) = (Arc::new(AtomicU8::new(OPEN)), server.url.replace("http://", ""));
        let shared = mode.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (mode, etcd) = (shared.clone(), etcd.clone());
                std::thread::spawn(move || forward(client, &etcd, &mode));
            }
        });
        Proxy { url, mode }
    }
    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
    }
}

/// Both directions, until one ends.
fn forward(client: TcpStream, etcd: &str, mode: &Arc<AtomicU8>) {
    let Ok(server) = TcpStream::connect(etcd) else { return };
    let pump = |mut from: TcpStream, mut to: TcpStream, stops_at: &'static [u8], mode: Arc<AtomicU8>| {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if stops_at.contains(&mode.load(Ordering::SeqCst)) || to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
        let _ = from.shutdown(std::net::Shutdown::Both);
    };
    let (to, from) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let of_requests = mode.clone();
    std::thread::spawn(move || pump(from, to, &[CUT], of_requests));
    pump(server, client, &[DEAF, CUT], mode.clone());
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_keeps_the_contract() {
    let Some(server) = Server::start() else { return };
    let (env, store) = server.store();
    keys_have_growing_revisions(&*store).await;
    of_two_swaps_one_wins(&*store).await;
    a_watch_sees_a_change(&env, &*store).await;
    // A busy machine must not lose the lease before the test has used it.
    a_key_under_a_lease_ends_with_it(&env, &*store, 4 * SECOND).await;
    of_two_claims_one_wins_and_fences(&*store, &*server.store().1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_values_are_kept_in_parts() {
    let Some(server) = Server::start() else { return };
    let (_, store) = server.store();
    let value = |n: usize| (0..n).map(|i| (i / 7) as u8 ^ (i / 4096) as u8).collect::<Vec<u8>>();
    let mut revision = Revision(0);
    for bytes in [5 << 20, (2 << 20) + 1, 10, 3 << 20, 0] {
        let swap = store.compare_and_swap("map", revision, value(bytes)).await.unwrap();
        let Swap::Done(next) = swap else { panic!("no other process writes") };
        let kept = store.get("map").await.unwrap().unwrap();
        assert!(kept.value == value(bytes) && kept.revision == next, "{bytes} bytes are read back");
        revision = next;
    }
    assert_eq!(parts(&server), 0, "those of values that were replaced are gone");
    let conflict = store.compare_and_swap("map", Revision(1), value(2 << 20)).await.unwrap();
    assert!(matches!(conflict, Swap::Conflict(Some(there)) if there.revision == revision));
    let refused = store.put("map", value(17 << 20), None).await.unwrap_err();
    assert!(refused.kind == ErrorKind::Invalid && refused.context.contains("too large"), "{refused:?}");
    store.put("map", value(3 << 20), None).await.unwrap();
    assert_eq!(parts(&server), 3, "also those of a write that lost");
}

/// How many parts of values etcd holds.
fn parts(server: &Server) -> usize {
    let mut list = Command::new("etcdctl");
    list.args(["--endpoints", &server.url, "get", "--prefix", "/weir/test/part/", "--keys-only"]);
    let listed = list.env("ETCDCTL_API", "3").output().expect("etcdctl of the package etcd-client");
    assert!(listed.status.success(), "{listed:?}");
    String::from_utf8_lossy(&listed.stdout).lines().filter(|line| !line.is_empty()).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_answer_is_lost_is_done_once() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(&server);
    let (_, store) = at(&[proxy.url.clone(), server.url.clone()]);
    let (_, witness) = server.store();
    let Swap::Done(first) = store.compare_and_swap("map", Revision(0), b"1".to_vec()).await.unwrap() else {
        panic!("the key was free")
    };
    proxy.set(DEAF);
    let Swap::Done(second) = store.compare_and_swap("map", first, b"2".to_vec()).await.unwrap() else {
        panic!("its own write is no conflict")
    };
    let kept = witness.get("map").await.unwrap().unwrap();
    assert_eq!((kept.value.as_slice(), kept.revision), (b"2".as_slice(), second));
    assert_eq!(second.0, first.0 + 1, "it was written once");
    // No server answers: the outcome of the write is unknown, and the error reports that.
    let (_, cut) = at(std::slice::from_ref(&proxy.url));
    let unknown = cut.compare_and_swap("map", second, b"3".to_vec()).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::Unavailable);
    assert_eq!(witness.get("map").await.unwrap().unwrap().value, b"3", "it was carried out");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_endpoint_is_named() {
    let Some(server) = Server::start() else { return };
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let (_, store) = at(std::slice::from_ref(&nobody));
    let error = store.get("map").await.unwrap_err();
    assert!(error.kind == ErrorKind::Unavailable && error.context.contains(&nobody), "{error:?}");
    let (_, both) = at(&[nobody, server.url.clone()]);
    assert_eq!(both.get("map").await.unwrap(), None, "the other one answers");
    let other = Server::start().unwrap();
    let proxy = Proxy::to(&server);
    let (_, mixed) = at(&[proxy.url.clone(), other.url.clone()]);
    mixed.get("map").await.unwrap();
    proxy.set(CUT);
    let refused = mixed.get("map").await.unwrap_err();
    assert!(refused.context.contains("different etcd clusters"), "{refused:?}");
}

/// Writes an authority, and a certificate of it with its key, into a directory.
fn certificates(dir: &Path) {
    let write = |name: &str, tag: &str, bytes: &[u8]| {
        std::fs::write(dir.join(name), pem::encode(&pem::Pem::new(tag, bytes))).unwrap();
    };
    let (key, mut params) = (KeyPair::generate().unwrap(), CertificateParams::new(vec![]).unwrap());
    params.distinguished_name.push(DnType::CommonName, "authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write("ca.pem", "CERTIFICATE", params.self_signed(&key).unwrap().der());
    let issuer = Issuer::new(params, key);
    let (key, at) = (KeyPair::generate().unwrap(), vec!["127.0.0.1".to_owned()]);
    let mut params = CertificateParams::new(at).unwrap();
    params.distinguished_name.push(DnType::CommonName, "node");
    // etcd's gateway shows the server's own certificate to the server.
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    write("node.pem", "CERTIFICATE", params.signed_by(&key, &issuer).unwrap().der());
    write("node.key", "PRIVATE KEY", &key.serialize_der());
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_and_the_coordinator_show_certificates() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates(dir.path());
    certificates(other.path());
    let file = |dir: &tempfile::TempDir, name: &str| dir.path().join(name);
    let of_etcd = [("cert-file", "node.pem"), ("key-file", "node.key"), ("trusted-ca-file", "ca.pem")];
    let mut args = vec!["--client-cert-auth".to_owned()];
    for (option, name) in of_etcd {
        args.extend([format!("--{option}"), file(&dir, name).display().to_string()]);
    }
    let Some(server) = Server::with(&args, "https") else { return };
    let env = weir_env::real::env();
    let config = |ca: &tempfile::TempDir, own: Option<&tempfile::TempDir>| EtcdConfig {
        endpoints: vec![server.url.clone()],
        prefix: "/weir/".into(),
        ca: file(ca, "ca.pem"),
        certificate: own.map(|own| file(own, "node.pem")).unwrap_or_default(),
        key: own.map(|own| file(own, "node.key")).unwrap_or_default(),
    };
    let open = |config: &EtcdConfig| Etcd::open(&env, config);
    let good = open(&config(&dir, Some(&dir))).unwrap();
    let revision = good.put("a", b"1".to_vec(), None).await.unwrap();
    assert_eq!(good.get("a").await.unwrap().unwrap().revision, revision);
    for bad in [config(&dir, None), config(&other, Some(&dir)), config(&dir, Some(&other))] {
        let refused = open(&bad).unwrap().get("a").await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable, "{refused:?}");
    }
    for (wrong, says) in [
        (EtcdConfig { key: Default::default(), ..config(&dir, Some(&dir)) }, "belong together"),
        (EtcdConfig { key: file(&dir, "ca.pem"), ..config(&dir, Some(&dir)) }, "no private key"),
        (EtcdConfig { ca: file(&dir, "node.key"), ..config(&dir, None) }, "no certificate"),
        (EtcdConfig { ca: file(&dir, "absent"), ..config(&dir, None) }, "etcd.ca: read"),
    ] {
        let error = open(&wrong).err().unwrap();
        assert!(error.context.contains(says), "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_coordinator_leads_when_one_resigns() {
    let Some(server) = Server::start() else { return };
    let ((env, store_a), (_, store_b)) = (server.store(), server.store());
    let a = lead(&env, store_a, "a", |_| ()).await.unwrap();
    let (seen, mut sees) = tokio::sync::mpsc::unbounded_channel();
    let waiting = tokio::spawn(async move {
        let waits = move |name: &str| drop(seen.send(name.to_owned()));
        let env = weir_env::real::env();
        let lead = lead(&env, store_b, "b", waits).await.unwrap();
        (lead, Instant::now())
    });
    assert_eq!(sees.recv().await.as_deref(), Some("a"));
    let resigned_at = Instant::now();
    a.resign().await;
    let (b, leads) = waiting.await.unwrap();
    b.term().check(env.clock.now()).unwrap();
    println!("leads {} ms after the other released the lead", leads.duration_since(resigned_at).as_millis());
}

/// For any of the members as etcd's own leader.
#[tokio::test(flavor = "multi_thread")]
async fn the_lead_outlives_each_member_of_etcd() {
    for victim in 0..3 {
        let Some(mut servers) = three() else { return };
        let (env, store) = at(&servers.iter().map(|s| s.url.clone()).collect::<Vec<_>>());
        let a = lead(&env, store.clone(), "a", |_| ()).await.unwrap();
        let Swap::Done(first) = store.compare_and_swap("map", Revision(0), b"1".to_vec()).await.unwrap()
        else {
            panic!("the key was free")
        };
        drop(servers.remove(victim));
        let killed = Instant::now();
        let next = store.compare_and_swap("map", first, b"2".to_vec()).await.unwrap();
        println!("member {victim} killed: next write after {} ms", killed.elapsed().as_millis());
        assert!(matches!(next, Swap::Done(_)), "{next:?}");
        a.term().check(env.clock.now()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_cut_off_from_etcd_leads_no_more() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(&server);
    let (env, store_a) = at(std::slice::from_ref(&proxy.url));
    let a = lead(&env, store_a.clone(), "a", |_| ()).await.unwrap();
    let cluster = ClusterId([7; 16]);
    let config = |term| CoordConfig {
        cluster: Some(cluster),
        new: true,
        term: Some(term),
        ..CoordConfig::new("single".parse().unwrap(), 1)
    };
    let founded = Coordinator::open_store(env.clone(), store_a.clone(), config(a.term())).await.unwrap();
    a.term().check(env.clock.now()).unwrap();
    proxy.set(CUT);
    let cut = Instant::now();
    let (env_b, store_b) = server.store();
    let (b, why) = tokio::join!(lead(&env_b, store_b.clone(), "b", |_| ()), founded.lost());
    let b = b.unwrap();
    println!("the next one leads {} ms after the cut", cut.elapsed().as_millis());
    assert!(cut.elapsed() >= LEASE - Duration::from_millis(700), "not before the lease has ended");
    assert!(a.term().check(env.clock.now()).is_err(), "the first one knows");
    assert!(why.context.contains("lease"), "{why:?}");
    assert_eq!(why.kind, ErrorKind::Stale);
    // The next one finds the map; the first one's writes are refused by etcd itself.
    let second = Coordinator::open_store(env_b, store_b, config(b.term())).await.unwrap();
    assert_eq!((second.cluster(), second.map().version), (cluster, founded.map().version));
    proxy.set(OPEN);
    let late = store_a.put("map", b"late".to_vec(), None).await.unwrap_err();
    assert_eq!(late.kind, ErrorKind::Stale, "{late:?}");
}
