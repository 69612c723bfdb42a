//! Claim: for anything that a peer sends or omits, the connection ends with a clear reason, and the node
//! keeps serving.
mod common;

use common::*;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_env::sim::World;
use weir_env::{Addr, BoxStream, Env};
use weir_proto::data::PAYLOAD_MAX;
use weir_proto::frame::{BODY_MAX, FrameKind, Header, Hello};
use weir_proto::{ErrorKind, Request, Wire};
use weir_rpc::{Connection, DEAD_AFTER, HELLO_PATIENCE, NoService, connect};

fn addr() -> Addr {
    "tcp:10.0.0.1:7000".parse().unwrap()
}

/// Runs `test` with a server on one node of a simulated world and what misbehaves on another.
fn with_server<F: Future<Output = ()>>(test: impl FnOnce(World, Env) -> F) {
    let world = World::new(3, Default::default());
    let other = world.clone();
    world.run(async move {
        let node = other.node("server");
        let (_server, _, _) = server(&node, &addr()).await;
        let client_env = other.node("client");
        let healthy = client(&client_env, &addr()).await;
        test(other, client_env).await;
        healthy.call(&Echo { words: "still there".into() }, vec![], PATIENCE).await.unwrap();
    });
}

async fn refused(env: &Env, mut stream: BoxStream, bytes: &[u8], kind: ErrorKind, words: &str) {
    stream.write_all(bytes).await.unwrap();
    let reason = last_words(env, &mut stream).await.expect("a reason");
    assert_eq!(reason.kind, kind, "{reason:?}");
    assert!(reason.to_string().contains(words), "{reason:?} lacks {words:?}");
}

async fn stranger(env: &Env) -> BoxStream {
    env.net.connect(&addr()).await.unwrap()
}

#[test]
fn garbage_is_refused_by_its_first_bytes() {
    with_server(|_, env| async move {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0", b"WEIS", &[0xff; 40]] {
            for mut stream in [stranger(&env).await, raw(&env, &addr()).await] {
                stream.write_all(garbage).await.unwrap();
                // Bytes that are not read any more make it a reset, and the last message is lost.
                if let Some(reason) = last_words(&env, &mut stream).await {
                    assert_eq!(reason.kind, ErrorKind::Invalid);
                    assert!(reason.context.contains("not a Weir peer"), "{reason:?}");
                }
            }
        }
    });
}

#[test]
fn oversize_is_refused_before_it_is_received() {
    with_server(|_, env| async move {
        let big_payload = Header { payload_len: PAYLOAD_MAX + 1, ..Header::new(FrameKind::Request, 1) };
        let mut bytes = big_payload.encode(&[]);
        refused(&env, raw(&env, &addr()).await, &bytes, ErrorKind::Invalid, "oversize").await;
        bytes = Header::new(FrameKind::Request, 1).encode(&[]);
        bytes[12..16].copy_from_slice(&(BODY_MAX + 1).to_le_bytes());
        refused(&env, raw(&env, &addr()).await, &bytes, ErrorKind::Invalid, "oversize").await;
        bytes = Header::new(FrameKind::Hello, 1).encode(&[]);
        bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        refused(&env, stranger(&env).await, &bytes, ErrorKind::Invalid, "oversize").await;
    });
}

#[test]
fn other_versions_are_refused_on_both_sides() {
    with_server(|world, env| async move {
        let body = Hello { version_min: 7, version_max: 9, ..hello() }.to_bytes();
        // Fields that a newer program appends are not known here, and harmless.
        let body = [&body[..], &[1, 2, 3]].concat();
        let bytes = frame(Header::new(FrameKind::Hello, 0), &body, &[]);
        refused(&env, stranger(&env).await, &bytes, ErrorKind::Unsupported, "versions 7 to 9").await;
        refused(
            &env,
            stranger(&env).await,
            &bytes,
            ErrorKind::Unsupported,
            "hint: upgrade the program of server",
        )
        .await;
        let request = Header { method: Count::METHOD, version: 7, ..Header::new(FrameKind::Request, 1) };
        let bytes = frame(request, &[], &[]);
        refused(&env, raw(&env, &addr()).await, &bytes, ErrorKind::Unsupported, "version 7").await;

        // And a client of a server that speaks another one.
        let (node, at) = (world.node("future"), "tcp:10.0.0.9:1".parse::<Addr>().unwrap());
        let listener = node.net.listen(&at).await.unwrap();
        node.tasks.spawn("future server", async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_frame(&mut stream).await.unwrap();
            stream.write_all(&frame(Header::new(FrameKind::HelloAck, 0), &body, &[])).await.unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        let e = connect(&env, &at, &identity(&env, "client"), Arc::new(NoService)).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Unsupported);
        assert!(e.context.contains("versions 7 to 9"), "{e:?}");
    });
}

#[test]
fn nothing_is_done_before_a_hello() {
    with_server(|_, env| async move {
        let request = Header { method: Count::METHOD, ..Header::new(FrameKind::Request, 1) };
        refused(&env, stranger(&env).await, &frame(request, &[], &[]), ErrorKind::Invalid, "before a hello")
            .await;
        let ping = frame(Header::new(FrameKind::Ping, 0), &[], &[]);
        refused(&env, stranger(&env).await, &ping, ErrorKind::Invalid, "instead of a hello").await;
        let again = frame(Header::new(FrameKind::Hello, 0), &hello().to_bytes(), &[]);
        refused(&env, raw(&env, &addr()).await, &again, ErrorKind::Invalid, "second hello").await;
    });
}

#[test]
fn a_hello_that_does_not_come_is_not_waited_for() {
    with_server(|_, env| async move {
        let begun = env.clock.now();
        let reason = last_words(&env, &mut stranger(&env).await).await.unwrap();
        assert!(reason.context.contains("no hello"), "{reason:?}");
        let waited = env.clock.now().since(begun);
        assert!(waited >= HELLO_PATIENCE && waited < 2 * HELLO_PATIENCE, "{waited:?}");
    });
}

#[test]
fn silent_strangers_lock_no_client_out() {
    with_server(|_, env| async move {
        let mut silent = Vec::new();
        for _ in 0..1000 {
            silent.push(stranger(&env).await);
        }
        // Before their time is over: the oldest are closed.
        assert_eq!(silent[0].read(&mut [0; 1]).await.ok().unwrap_or(0), 0);
        let begun = env.clock.now();
        let newcomer = client(&env, &addr()).await;
        newcomer.call(&Echo { words: "hello".into() }, vec![], PATIENCE).await.unwrap();
        assert!(env.clock.now().since(begun) < HELLO_PATIENCE);
    });
}

#[test]
fn unfinished_frames_use_bounded_memory() {
    with_server(|_, env| async move {
        // Twice as many of the largest as there is room for, all but their last byte.
        let mut slow = Vec::new();
        for _ in 0..16 {
            let mut stream = raw(&env, &addr()).await;
            let begun = Header {
                payload_len: PAYLOAD_MAX,
                method: Echo::METHOD,
                ..Header::new(FrameKind::Request, 1)
            };
            let body = Echo { words: "slow".into() }.to_bytes();
            let begun = Header { body_len: body.len() as u32, ..begun }.encode(&body);
            stream.write_all(&[&begun[..], &body].concat()).await.unwrap();
            slow.push(stream);
        }
        // Those that are small go through, and large ones once the others are given up.
        let healthy = client(&env, &addr()).await;
        healthy.call(&Echo { words: "small".into() }, vec![], PATIENCE).await.unwrap();
        drop(slow.split_off(1));
        let large = bytes::Bytes::from(vec![1; PAYLOAD_MAX as usize]);
        healthy.call(&Echo { words: "large".into() }, vec![large], PATIENCE).await.unwrap();
    });
}

#[test]
fn damaged_headers_end_connections_damaged_payloads_calls() {
    with_server(|_, env| async move {
        let echo = Header { method: Echo::METHOD, ..Header::new(FrameKind::Request, 5) };
        let good = frame(echo, &Echo { words: "hi".into() }.to_bytes(), b"payload");
        let mut stream = raw(&env, &addr()).await;
        let mut bad = good.clone();
        *bad.last_mut().unwrap() ^= 1;
        stream.write_all(&bad).await.unwrap();
        let (answer, body) = read_frame(&mut stream).await.unwrap();
        assert_eq!((answer.kind, answer.call), (FrameKind::ErrorResponse, 5));
        assert_eq!(weir_proto::Error::from_bytes(&body).unwrap().kind, ErrorKind::Damaged);
        let mut bad = good;
        bad[40] ^= 1;
        refused(&env, stream, &bad, ErrorKind::Damaged, "checksum").await;
    });
}

#[test]
fn a_stream_that_ends_within_a_frame_is_a_lost_connection() {
    with_server(|_, env| async move {
        let echo = Header { method: Echo::METHOD, ..Header::new(FrameKind::Request, 5) };
        let whole = frame(echo, &Echo { words: "hi".into() }.to_bytes(), &[1; 100]);
        for end in [1, 63, 64, 66, whole.len() - 1] {
            let mut stream = raw(&env, &addr()).await;
            stream.write_all(&whole[..end]).await.unwrap();
            stream.shutdown().await.unwrap();
            assert!(last_words(&env, &mut stream).await.is_none());
        }
    });
}

#[test]
fn a_half_open_connection_is_found_dead() {
    with_server(|world, env| async move {
        let healthy_before = client(&env, &addr()).await;
        let far = world.node("far");
        let cut_off = client(&far, &addr()).await;
        let begun = env.clock.now();
        world.partition("far", "server");
        let e = cut_off.call(&Wait {}, vec![], Duration::from_secs(3600)).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Unavailable);
        assert!(e.context.contains("silent"), "{e:?}");
        let took = env.clock.now().since(begun);
        assert!(took >= DEAD_AFTER - Duration::from_secs(5) && took < 2 * DEAD_AFTER, "{took:?}");
        // Idle is not dead: pings keep a connection.
        env.clock.sleep(10 * DEAD_AFTER).await;
        healthy_before.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
        world.heal("far", "server");
    });
}

#[test]
fn a_killed_peer_is_noticed_at_once() {
    let world = World::new(5, Default::default());
    world.run(async {
        let (_server, _, _) = server(&world.node("server"), &addr()).await;
        let env = world.node("client");
        let connection: Connection = client(&env, &addr()).await;
        let begun = env.clock.now();
        let call = connection.call(&Wait {}, vec![], PATIENCE);
        let kill = async {
            connection.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
            world.kill("server");
        };
        let (e, ()) = tokio::join!(call, kill);
        assert_eq!(e.unwrap_err().kind, ErrorKind::Unavailable);
        assert!(env.clock.now().since(begun) < Duration::from_secs(2));
    });
}

/// Small, seeded, good enough to break bytes.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n
    }
    /// Breaks bytes in one of the ways that networks and programs do.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.below(256) as u8,
                2 => bytes.truncate(at.max(1)),
                3 => bytes.insert(at, self.below(256) as u8),
                _ => {
                    let end = (at + self.below(100)).min(bytes.len());
                    let part = bytes[at..end].to_vec();
                    bytes.extend_from_slice(&part);
                }
            }
        }
    }
    /// A frame whose checksums are right and whose contents are not.
    fn forged(&mut self) -> Vec<u8> {
        let kind = FrameKind::ALL[self.below(FrameKind::ALL.len())];
        let body: Vec<u8> = (0..self.below(60)).map(|_| self.below(256) as u8).collect();
        let method = [Echo::METHOD, Wait::METHOD, Refuse::METHOD, 0, 77][self.below(5)];
        let header = Header { method, flags: self.below(4) as u8, ..Header::new(kind, self.below(5) as u64) };
        let payload =
            if matches!(kind, FrameKind::Request | FrameKind::Response) { self.below(300) } else { 0 };
        frame(header, &body, &vec![1; payload])
    }
    fn conversation(&mut self, first: FrameKind, requests: FrameKind) -> Vec<u8> {
        let mut bytes = frame(Header::new(first, 0), &hello().to_bytes(), &[]);
        for call in 0..4 {
            let header = Header { method: Echo::METHOD, ..Header::new(requests, call) };
            bytes.extend(frame(header, &Echo { words: "hi".into() }.to_bytes(), &[1; 100]));
        }
        if self.below(3) == 0 {
            bytes.extend(self.forged())
        } else {
            self.mutate(&mut bytes)
        }
        bytes
    }
}

#[test]
fn ten_thousand_broken_conversations_leave_a_server_well() {
    with_server(|_, env| async move {
        let mut dice = Dice(11);
        for _ in 0..10_000 {
            let mut stream = stranger(&env).await;
            let bytes = dice.conversation(FrameKind::Hello, FrameKind::Request);
            // The server may have closed already.
            if stream.write_all(&bytes).await.is_ok() && stream.shutdown().await.is_ok() {
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
        }
    });
}

#[test]
fn ten_thousand_broken_answers_leave_a_client_well() {
    with_server(|world, env| async move {
        let (node, at) = (world.node("liar"), "tcp:10.0.0.9:1".parse::<Addr>().unwrap());
        let listener = node.net.listen(&at).await.unwrap();
        node.tasks.spawn("lying server", async move {
            let mut dice = Dice(12);
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let bytes = dice.conversation(FrameKind::HelloAck, FrameKind::Response);
                if stream.write_all(&bytes).await.is_ok() && stream.shutdown().await.is_ok() {
                    let _ = stream.read_to_end(&mut Vec::new()).await;
                }
            }
        });
        for _ in 0..10_000 {
            if let Ok(connection) = connect(&env, &at, &identity(&env, "client"), Arc::new(NoService)).await {
                let _ = connection.call(&Echo { words: "hi".into() }, vec![], PATIENCE).await;
            }
        }
    });
}
