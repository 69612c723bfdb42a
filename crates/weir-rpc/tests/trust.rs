//! Attacks on connections between nodes that have certificates: each is refused, with a reason and a remedy.
//!
//! A relay between the two ends changes the bytes that pass, as an attacker on the network could.
mod common;

use common::*;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_env::{Addr, Env};
use weir_proto::frame::HEADER_BYTES;
use weir_proto::map::{RemovedNode, Role};
use weir_proto::{Error, ErrorKind};
use weir_rpc::{
    Channel, Connection, Endpoint, Identity, NoService, Payload, Policy, Trust, Via, connect, serve,
};
use weir_trust::certificate::{Grant, Pin};
use weir_trust::frames::TAG_BYTES;
use weir_trust::handshake::Tls;

fn anywhere() -> Addr {
    "tcp:127.0.0.1:0".parse().unwrap()
}

fn encrypting() -> Policy {
    Policy { trusted: Vec::new(), ..Policy::default() }
}

/// A relay's action on the bytes that the dialer sends after the handshake and its hello.
type Change = Arc<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// The end of the dialer's handshake is marked by its hello: it is the first that fits no TLS record.
const FRAME: &[u8] = b"WEIR";

struct Relay {
    addr: Addr,
    /// The frames that were changed or passed, in order, from the dialer.
    passed: Arc<Mutex<Vec<u8>>>,
    change: Arc<Mutex<Option<Change>>>,
}

async fn relay(env: &Env, to: Addr) -> Relay {
    let listener = env.net.listen(&anywhere()).await.unwrap();
    let relay = Relay { addr: listener.local_addr(), passed: Arc::default(), change: Arc::default() };
    let (passed, change) = (relay.passed.clone(), relay.change.clone());
    let far = env.clone();
    env.tasks.spawn("relay", async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (mut from_dialer, mut to_dialer) = stream.split();
        let (mut from_listener, mut to_listener) = far.net.connect(&to).await.unwrap().split();
        far.tasks.spawn("relay back", async move {
            drop(tokio::io::copy(&mut from_listener, &mut to_dialer).await)
        });
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from_dialer.read(&mut buffer).await {
            let change = change.lock().unwrap().clone();
            let bytes = change.map_or_else(|| buffer[..n].to_vec(), |change| change(buffer[..n].to_vec()));
            passed.lock().unwrap().extend_from_slice(&bytes);
            if to_listener.write_all(&bytes).await.is_err() {
                return;
            }
        }
    });
    relay
}

async fn echo(client: &Connection) -> Result<(), Error> {
    client.call(&Count {}, vec![], PATIENCE).await.map(drop)
}

/// A server and a client with the relay between them, past their hellos.
async fn with_relay<F: Future<Output = ()>>(
    policy: Policy,
    attack: impl FnOnce(Env, Relay, Connection, Arc<Bench>) -> F,
) {
    let env = weir_env::real::env();
    let there = env.clone();
    let scene = async move {
        let (_server, bench, addr) = server(&there, &anywhere()).await;
        let relay = relay(&there, addr).await;
        let client = client(&there, &relay.addr).await;
        echo(&client).await.unwrap();
        attack(there, relay, client, bench).await;
    };
    CLUSTER.scope(Cluster::new(policy), scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_was_changed_on_its_way_ends_the_connection() {
    for policy in [Policy::default(), encrypting()] {
        for at in [8, 30, HEADER_BYTES, HEADER_BYTES + TAG_BYTES - 1] {
            with_relay(policy.clone(), |_, relay, client, bench| async move {
                let change = move |mut bytes: Vec<u8>| {
                    if bytes.starts_with(FRAME) {
                        bytes[at] ^= 1;
                    }
                    bytes
                };
                *relay.change.lock().unwrap() = Some(Arc::new(change));
                let refused = echo(&client).await.unwrap_err();
                assert_eq!(refused.kind, ErrorKind::Unavailable, "byte {at}: {refused:?}");
                assert_eq!(
                    bench.counted.load(SeqCst),
                    1,
                    "byte {at}: the service has seen only what was sent"
                );
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_is_sent_again_ends_the_connection() {
    with_relay(Policy::default(), |env, relay, client, bench| async move {
        let twice = |bytes: Vec<u8>| bytes.repeat(2);
        *relay.change.lock().unwrap() = Some(Arc::new(twice));
        echo(&client).await.unwrap();
        until(&env, "the connection ends", || client.is_closed()).await;
        assert_eq!(bench.counted.load(SeqCst), 2, "once for each that was sent");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_is_left_out_ends_the_connection() {
    with_relay(Policy::default(), |env, relay, client, bench| async move {
        let dropped = Arc::new(Mutex::new(false));
        let was_dropped = dropped.clone();
        let change = move |bytes: Vec<u8>| match std::mem::replace(&mut *dropped.lock().unwrap(), true) {
            false => Vec::new(),
            true => bytes,
        };
        *relay.change.lock().unwrap() = Some(Arc::new(change));
        let lost = client.clone();
        env.tasks.spawn("lost call", async move { assert!(echo(&lost).await.is_err()) });
        until(&env, "the first call is lost", || *was_dropped.lock().unwrap()).await;
        assert!(echo(&client).await.is_err());
        assert_eq!(bench.counted.load(SeqCst), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_that_was_changed_ends_the_connection() {
    for policy in [Policy::default(), encrypting()] {
        with_relay(policy, |_, relay, client, _| async move {
            let change = |mut bytes: Vec<u8>| {
                let last = bytes.len() - TAG_BYTES - 1;
                if bytes.len() > 10_000 {
                    bytes[last] ^= 1;
                }
                bytes
            };
            *relay.change.lock().unwrap() = Some(Arc::new(change));
            let payload = vec![bytes::Bytes::from(vec![9; 20_000])];
            let request = Echo { words: String::new() };
            assert!(client.call(&request, payload, PATIENCE).await.is_err());
            assert!(client.is_closed());
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_encryption_hides_the_content() {
    for (policy, is_hidden) in [(Policy::default(), false), (encrypting(), true)] {
        with_relay(policy, |_, relay, client, _| async move {
            let secret = "no other user may read this";
            let payload = vec![bytes::Bytes::from(secret.repeat(100))];
            client.call(&Echo { words: secret.into() }, payload, PATIENCE).await.unwrap();
            let seen = relay.passed.lock().unwrap();
            let is_seen = seen.windows(secret.len()).any(|bytes| bytes == secret.as_bytes());
            assert_eq!(is_seen, !is_hidden);
        })
        .await;
    }
}

/// A machine in between cannot make the two ends take a weaker suite, or other keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_that_was_changed_makes_no_connection() {
    let (best, second) = (&b"aegis128x2"[..], &b"aegis128x9"[..]);
    let rename = move |mut bytes: Vec<u8>| {
        if let Some(at) = bytes.windows(best.len()).position(|found| found == best) {
            bytes[at..at + best.len()].copy_from_slice(second);
        }
        bytes
    };
    let mut attacks: Vec<Change> = vec![Arc::new(rename)];
    for at in [20, 60, 90] {
        attacks.push(Arc::new(move |mut bytes: Vec<u8>| {
            if bytes.len() > at {
                bytes[at] ^= 1;
            }
            bytes
        }));
    }
    for (n, attack) in attacks.into_iter().enumerate() {
        let env = weir_env::real::env();
        let scene = async move {
            let (_server, bench, addr) = server(&env, &anywhere()).await;
            let relay = relay(&env, addr).await;
            *relay.change.lock().unwrap() = Some(attack);
            let who = identity(&env, "client");
            let refused = connect(&env, &relay.addr, &who, Arc::new(NoService)).await;
            assert!(refused.is_err(), "attack {n}");
            assert_eq!(bench.counted.load(SeqCst), 0);
        };
        CLUSTER.scope(Cluster::new(encrypting()), scene).await;
    }
}

/// The reason for which a server of the cluster refuses a peer with this identity.
async fn refusal(env: &Env, cluster: &Cluster, who: Identity) -> Error {
    let there = CLUSTER.scope(cluster.clone(), server(env, &anywhere())).await;
    connect(env, &there.2, &who, Arc::new(NoService)).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_a_valid_certificate_is_refused() {
    let env = weir_env::real::env();
    let (cluster, other) = (Cluster::new(Policy::default()), Cluster::new(Policy::default()));
    let plain = Identity::new(&env, "n1", Role::Storage, None);
    let stranger = Tls::joining(Pin::of(cluster.authority.certificate()), Arc::new(|| NOW));
    let late = Grant { name: "n1".into(), roles: vec![Role::Storage], serial: 1 };
    let late = cluster.authority.issue_own(&late, NOW - 31 * 86_400).unwrap();
    let late = Tls::of_node(late, Arc::new(|| NOW));
    let of = |tls: Tls| Some(Arc::new(Trust::new(Arc::new(tls), Policy::default())));
    let with = |trust| plain.clone().trusting(trust);
    for (who, why) in [
        (plain.clone(), "takes only nodes that have a certificate"),
        (with(of(stranger)), "takes only nodes that have a certificate"),
        (with(of(late)), "expired"),
        (with(Some(other.trust("n1", Role::Storage, 1))), "not the one that is trusted here"),
        (with(Some(cluster.trust("n2", Role::Storage, 1))), "the certificate is of n2, not of n1"),
        (with(Some(cluster.trust("n1", Role::Mount, 1))), "is for mount, not for storage"),
    ] {
        let refused = refusal(&env, &cluster, who).await;
        assert_eq!(refused.kind, ErrorKind::Denied, "{refused:?}");
        assert!(refused.context.contains(why), "{refused:?} lacks {why:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_that_is_not_of_the_cluster_is_refused() {
    let env = weir_env::real::env();
    let (cluster, other) = (Cluster::new(Policy::default()), Cluster::new(Policy::default()));
    let who = || identity(&env, "n1").trusting(Some(cluster.trust("n1", Role::Storage, 1)));
    let (_server, _, plain) = server(&env, &anywhere()).await;
    let refused = connect(&env, &plain, &who(), Arc::new(NoService)).await.unwrap_err();
    assert!(refused.context.contains("takes no certificates"), "{refused:?}");
    let (_server, _, foreign) = CLUSTER.scope(other, server(&env, &anywhere())).await;
    let refused = connect(&env, &foreign, &who(), Arc::new(NoService)).await.unwrap_err();
    assert!(refused.context.contains("not the one that is trusted here"), "{refused:?}");
    let impostor =
        identity_as(&env, "server", Role::Meta).trusting(Some(cluster.trust("server", Role::Storage, 1)));
    let impostor = serve(&env, &[anywhere()], impostor, Arc::new(NoService)).await.unwrap();
    let refused = connect(&env, &impostor.addrs()[0], &who(), Arc::new(NoService)).await.unwrap_err();
    assert!(refused.context.contains("is for storage, not for meta"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_removed_is_cut_off_until_it_joins_again() {
    let env = weir_env::real::env();
    let cluster = Cluster::new(Policy::default());
    let of_server = cluster.trust("server", Role::Storage, 1);
    let who = identity(&env, "server").trusting(Some(of_server.clone()));
    let server = serve(&env, &[anywhere()], who, Arc::new(NoService)).await.unwrap();
    let addr = &server.addrs()[0];
    let with_serial =
        |name: &str, serial| identity(&env, name).trusting(Some(cluster.trust(name, Role::Storage, serial)));
    let (removed, other) = (with_serial("n1", 5), with_serial("n2", 4));
    let cut = connect(&env, addr, &removed, Arc::new(NoService)).await.unwrap();
    let stays = connect(&env, addr, &other, Arc::new(NoService)).await.unwrap();
    of_server.follow(&[RemovedNode { name: "n1".into(), serial: 5, until: NOW }], &[]);
    assert!(cut.closed().await.context.contains("n1 was removed from the cluster"));
    let refused = connect(&env, addr, &removed, Arc::new(NoService)).await.unwrap_err();
    assert!(refused.context.contains("n1 was removed from the cluster"), "{refused:?}");
    connect(&env, addr, &with_serial("n1", 6), Arc::new(NoService)).await.unwrap();
    assert!(!stays.is_closed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_poses_as_one_of_another_role_is_not_talked_to() {
    let env = weir_env::real::env();
    let cluster = Cluster::new(Policy::default());
    let (_server, _, addr) = CLUSTER.scope(cluster.clone(), server(&env, &anywhere())).await;
    let who = identity(&env, "n1").trusting(Some(cluster.trust("n1", Role::Storage, 1)));
    let to = |role| {
        let at = Endpoint { addrs: vec![addr.clone()], role: Some(role), ..Endpoint::default() };
        Channel::following(&env, Arc::new(move || Ok(at.clone())), who.clone(), Arc::new(NoService))
    };
    to(Role::Storage).connection_now().await.unwrap();
    let refused = to(Role::Coordinator).connection_now().await.unwrap_err();
    assert!(refused.context.contains("a storage node answers, not a coordinator"), "{refused:?}");
}

/// A target sends what lies on its disk under the checksum of what was written there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_tag_does_not_excuse_a_wrong_checksum() {
    for policy in [Policy::default(), encrypting()] {
        with_relay(policy, |_, _, client, _| async move {
            let payload = |crc| Payload::with_crc(vec![bytes::Bytes::from(vec![9; 20_000])], crc);
            let right = weir_proto::checksum::crc32c(&[9; 20_000]);
            let request = Echo { words: String::new() };
            let refused = client.call_payload(&request, payload(right ^ 1), PATIENCE).await.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Damaged, "{refused:?}");
            client.call_payload(&request, payload(right), PATIENCE).await.unwrap();
        })
        .await;
    }
}

/// A channel to `to` that reaches it only through the node at `via`.
fn channel_through(env: &Env, to: &str, via: &Addr, who: Identity) -> Channel {
    let closed = "tcp:127.0.0.1:1".parse().unwrap();
    let through = vec![Via { name: "between".into(), addr: via.clone() }];
    let at = Endpoint { addrs: vec![closed], name: Some(to.into()), role: Some(Role::Storage), through };
    Channel::following(env, Arc::new(move || Ok(at.clone())), who, Arc::new(NoService))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_passes_bytes_on_reads_none_of_them_and_knows_where_to() {
    let env = weir_env::real::env();
    let scene = async {
        let (_server, bench, addr) = server(&env, &anywhere()).await;
        // It stands for the link between the two nodes, where an attacker may read, too.
        let link = relay(&env, addr).await;
        let at = link.addr.clone();
        let who = identity(&env, "between");
        let between = serve(&env, &[anywhere()], who, Arc::new(NoService)).await.unwrap();
        let via = between.addrs()[0].clone();
        let ask = |channel: Channel| async move {
            let words = "PATIENCE IS A BITTER PLANT".to_owned();
            channel.call(&Echo { words }, vec![], PATIENCE / 60).await.map(|(echoed, _)| echoed.words)
        };
        let channel = |to: &str| channel_through(&env, to, &via, identity(&env, "client"));
        let refused = ask(channel("server")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable, "it passes nothing on yet: {refused}");
        let dir = tempfile::tempdir().unwrap();
        let socket = Addr::Unix(dir.path().join("socket"));
        let own = env.net.listen(&socket).await.unwrap();
        let admitted = Arc::new(Mutex::new(Vec::new()));
        let seen = admitted.clone();
        env.tasks.spawn("local socket", async move {
            while let Ok((_, caller)) = own.accept().await {
                seen.lock().unwrap().push(caller.name);
            }
        });
        between.pass_on(Arc::new(move |name| match name {
            "server" => Ok(vec![at.clone()]),
            "here" => Ok(vec![socket.clone()]),
            name => Err(Error::unavailable(format!("no {name} here"))),
        }));
        assert!(ask(channel("elsewhere")).await.is_err());
        // At a local socket the node between would be taken for the sender.
        let refused = ask(channel("here")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable);
        assert_eq!(admitted.lock().unwrap().len(), 0);
        assert!(link.passed.lock().unwrap().is_empty(), "no byte goes where it should not");
        // A machine without a certificate gets nowhere, though some services admit strangers.
        let stranger = Identity::new(&env, "client", Role::Storage, None);
        assert!(ask(channel_through(&env, "server", &via, stranger)).await.is_err());
        assert!(link.passed.lock().unwrap().is_empty(), "no byte of a stranger is passed on");
        assert_eq!(bench.counted.load(SeqCst), 0);

        let channel = channel("server");
        let connection = channel.connection(PATIENCE).await.unwrap();
        assert_eq!((connection.via(), connection.peer().name.as_str()), (Some("between"), "server"));
        assert!(connection.echoes(PATIENCE).await);
        assert_eq!(ask(channel.clone()).await.unwrap(), "PATIENCE IS A BITTER PLANT");
        let passed = link.passed.lock().unwrap().clone();
        assert!(!passed.windows(8).any(|part| part == b"PATIENCE"), "the loopback is a trusted network");
        // With the node between, the connection ends.
        between.stop();
        until(&env, "the connection ends", || connection.is_closed()).await;
    };
    CLUSTER.scope(Cluster::new(Policy::default()), scene).await;
}
