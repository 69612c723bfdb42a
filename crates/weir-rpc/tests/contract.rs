//! What calls and connections promise, on the machine (TCP over IPv4 and IPv6, Unix sockets) and in the
//! simulator.
mod common;

use bytes::Bytes;
use common::*;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Addr, Env};
use weir_proto::map::Role;
use weir_proto::sender::Sender;
use weir_proto::version::Program;
use weir_proto::{ClusterId, ErrorKind};
use weir_rpc::{
    CALLS_MAX, Channel, Endpoint, Identity, LookUp, NoService, Payload, Policy, SERVED_MAX, connect, serve,
};

async fn an_answer_comes_back(env: &Env, addr: &Addr) {
    let (_server, _, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    assert_eq!(client.peer().name, "server");
    for len in [0usize, 1, 2000, 5000, 40_000, 1 << 20, 8 << 20] {
        let payload: Bytes = (0..len).map(|i| (i * 7) as u8).collect::<Vec<_>>().into();
        let parts = vec![payload.slice(..len / 3), payload.slice(len / 3..)];
        let request = Echo { words: "x".repeat(len.min(1 << 19)) };
        let (reply, echoed) = client.call(&request, parts, PATIENCE).await.unwrap();
        assert_eq!(reply.words, request.words);
        assert_eq!(echoed, payload);
    }
}

async fn many_calls_share_a_connection(env: &Env, addr: &Addr) {
    let (_server, _, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let (done, mut results) = tokio::sync::mpsc::channel(16);
    for i in 0..3 * CALLS_MAX {
        let (client, done) = (client.clone(), done.clone());
        env.tasks.spawn("caller", async move {
            let payload = Bytes::from(vec![i as u8; (i % 100) * 100]);
            let request = Echo { words: i.to_string() };
            let (reply, echoed) = client.call(&request, vec![payload.clone()], PATIENCE).await.unwrap();
            let _ = done.send(reply.words == i.to_string() && echoed == payload).await;
        });
    }
    for _ in 0..3 * CALLS_MAX {
        assert!(results.recv().await.unwrap());
    }
}

async fn a_slow_answer_does_not_hold_back_others(env: &Env, addr: &Addr) {
    let (_server, bench, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let slow = client.call(&Wait {}, vec![], PATIENCE);
    let fast = async {
        client.call(&Echo { words: "fast".into() }, vec![], PATIENCE).await.unwrap();
        bench.release.add_permits(1);
    };
    let (slow, ()) = tokio::join!(slow, fast);
    assert_eq!(slow.unwrap().0.words, "waited");
}

async fn errors_arrive_unchanged(env: &Env, addr: &Addr) {
    let (_server, _, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let e = client.call(&Refuse { why: "not you".into() }, vec![], PATIENCE).await.unwrap_err();
    assert_eq!((e.kind, &e.context[..]), (ErrorKind::Denied, "not you"));
    let long = client.call(&Refuse { why: "é".repeat(10_000) }, vec![], PATIENCE).await.unwrap_err();
    assert_eq!(long.kind, ErrorKind::Denied);
    assert!(long.context.starts_with("éé") && long.context.len() < 4096);
    let unknown = client.call(&weir_proto::coord::GetStatus {}, vec![], PATIENCE).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::Unsupported);
    let big = client.call(&Echo { words: "x".repeat(2 << 20) }, vec![], PATIENCE).await.unwrap_err();
    assert_eq!(big.kind, ErrorKind::Invalid);
    let big = client.call(&Produce { bytes: 9 << 20 }, vec![], PATIENCE).await.unwrap_err();
    assert_eq!(big.kind, ErrorKind::Invalid);
    // None of it harmed the connection.
    client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
}

async fn a_call_ends_by_its_deadline(env: &Env, addr: &Addr) {
    let (_server, bench, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let e = client.call(&Wait {}, vec![], Duration::from_millis(200)).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Deadline);
    assert!(e.context.contains("Wait") && e.context.contains("server"), "{e:?}");
    // Work that has begun runs to its end; its answer disturbs no other call.
    bench.release.add_permits(1);
    until(env, "the wait ends", || bench.waits_ended.load(std::sync::atomic::Ordering::SeqCst) == 1).await;
    client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
}

async fn dropped_calls_free_their_places(env: &Env, addr: &Addr) {
    let (_server, _, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    for _ in 0..3 {
        let (ended, mut all_ended) = tokio::sync::mpsc::channel::<()>(1);
        for _ in 0..CALLS_MAX {
            let (client, env2, ended) = (client.clone(), env.clone(), ended.clone());
            env.tasks.spawn("impatient caller", async move {
                let call = client.call(&Wait {}, vec![], PATIENCE);
                let answered = env2.clock.timeout(Duration::from_millis(20), call).await;
                assert!(answered.is_err(), "{answered:?}");
                drop(ended);
            });
        }
        drop(ended);
        assert!(all_ended.recv().await.is_none());
    }
    client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
}

async fn work_is_not_begun_when_nobody_waits_for_it(env: &Env, addr: &Addr) {
    let (_server, bench, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let ended = |n: usize| bench.waits_ended.load(std::sync::atomic::Ordering::SeqCst) == n;
    let serving = || env.watch.gauge("weir_rpc_inflight", ("", "")).get() > 0;
    let wanted = async {
        until(env, "it is being served", serving).await;
        bench.release.add_permits(1);
    };
    let (answer, ()) = tokio::join!(client.call(&WhileWanted {}, vec![], PATIENCE), wanted);
    assert_eq!(answer.unwrap().0.words, "wanted");
    // A Cancel, long before the deadline.
    let call = client.call(&WhileWanted {}, vec![], PATIENCE);
    assert!(env.clock.timeout(Duration::from_millis(50), call).await.is_err());
    client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap(); // it came after the Cancel
    bench.release.add_permits(1);
    until(env, "the second ends", || ended(2)).await;
    assert!(bench.dropped.lock().unwrap()[0].contains("its caller has given up"));
    // A connection that ended.
    let lost = client.call(&WhileWanted {}, vec![], PATIENCE);
    let end = async {
        until(env, "it is being served", serving).await;
        client.close("the test ends it");
    };
    let (lost, ()) = tokio::join!(lost, end);
    assert_eq!(lost.unwrap_err().kind, ErrorKind::Unavailable);
    until(env, "the server knows", || !bench.gone.lock().unwrap().is_empty()).await;
    bench.release.add_permits(1);
    until(env, "the third ends", || ended(3)).await;
    assert!(bench.dropped.lock().unwrap()[1].contains("its connection is gone"));
}

async fn either_end_may_call(env: &Env, addr: &Addr) {
    let (server, _, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let payload = Bytes::from(vec![9; 100_000]);
    let (reply, echoed) =
        client.call(&CallMeBack { words: "hi".into() }, vec![payload.clone()], PATIENCE).await.unwrap();
    assert_eq!((&reply.words[..], echoed), ("hi", payload));
    let from_server = server.connections().pop().unwrap();
    assert_eq!(from_server.peer().name, "client");
    from_server.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
}

async fn the_end_fails_all_calls_at_once(env: &Env, addr: &Addr) {
    let (server, bench, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let waiting = client.call(&Wait {}, vec![], PATIENCE);
    let stop = async {
        client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
        server.stop();
    };
    let (e, ()) = tokio::join!(waiting, stop);
    let e = e.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Unavailable);
    assert!(e.context.contains("this node stops"), "{e:?}");
    assert_eq!(client.closed().await.kind, ErrorKind::Unavailable);
    let after = client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap_err();
    assert_eq!(after.kind, ErrorKind::Unavailable);
    until(env, "the service is notified", || bench.gone.lock().unwrap().len() == 1).await;
}

async fn dropping_the_last_handle_closes(env: &Env, addr: &Addr) {
    let (server, bench, addr) = server(env, addr).await;
    let first = client(env, &addr).await;
    let second = first.clone();
    drop(first);
    second.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
    drop(second);
    until(env, "the server notices", || bench.gone.lock().unwrap().len() == 1).await;
    assert!(server.connections().is_empty());
}

async fn clusters_do_not_mix(env: &Env, addr: &Addr) {
    let (ours, theirs) = (ClusterId([1; 16]), ClusterId([2; 16]));
    let who = Identity::new(env, "server", Role::Storage, None);
    let server = serve(env, std::slice::from_ref(addr), who.clone(), Arc::new(NoService)).await.unwrap();
    let addr = &server.addrs()[0];
    let stranger = Identity::new(env, "stranger", Role::Mount, Some(theirs));
    // Not a member yet: talks to all nodes.
    drop(connect(env, addr, &stranger, Arc::new(NoService)).await.unwrap());
    assert!(who.join(ours) && !who.join(theirs));
    let e = connect(env, addr, &stranger, Arc::new(NoService)).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Denied);
    assert!(e.context.contains(&ours.to_string()) && e.context.contains(&theirs.to_string()), "{e:?}");
    let channel = Channel::new(env, vec![addr.clone()], stranger, Arc::new(NoService));
    let begun = env.clock.now();
    assert_eq!(channel.connection(PATIENCE).await.unwrap_err().kind, ErrorKind::Denied);
    assert!(env.clock.now().since(begun) < PATIENCE / 2, "a refusal is reported at once");
}

async fn both_ends_use_the_highest_version_that_both_speak(env: &Env, addr: &Addr) {
    let speaks = |name: &str, version_min, version_max| {
        identity(env, name).with(Program { version_min, version_max, ..Program::this() })
    };
    let service = Arc::new(Shared(Bench::new(env)));
    let server = serve(env, std::slice::from_ref(addr), speaks("server", 1, 3), service).await.unwrap();
    let addr = &server.addrs()[0];
    for (versions, agreed) in [((1, 1), 1), ((1, 2), 2), ((2, 9), 3)] {
        let who = speaks("client", versions.0, versions.1);
        let client = connect(env, addr, &who, Arc::new(NoService)).await.unwrap();
        assert_eq!(client.version(), agreed);
        client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
        assert!(server.connections().iter().any(|c| c.version() == agreed));
    }
    let refused = connect(env, addr, &speaks("client", 4, 5), Arc::new(NoService)).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unsupported);
    let words =
        "client speaks versions 4 to 5, server speaks versions 1 to 3; hint: upgrade the program of server";
    assert!(refused.to_string().contains(words), "{refused:?}");
}

async fn a_method_is_for_its_senders(env: &Env, addr: &Addr) {
    let (_server, bench, addr) = server(env, addr).await;
    let with_role = async |role| {
        let who = identity_as(env, "client", role);
        connect(env, &addr, &who, Arc::new(NoService)).await.unwrap()
    };
    for role in Role::ALL.iter().filter(|role| **role != Role::Mover) {
        let refused = with_role(*role).await.call(&ForMovers {}, vec![], PATIENCE).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Denied);
        let words = format!(" {}, which may not send ForMovers, method 9009", Sender::from(*role));
        assert!(refused.context.contains("client at ") && refused.context.contains(&words), "{refused:?}");
    }
    assert_eq!(bench.counted.load(std::sync::atomic::Ordering::SeqCst), 0, "no service has seen them");
    let mover = with_role(Role::Mover).await;
    assert_eq!(mover.call(&ForMovers {}, vec![], PATIENCE).await.unwrap().0.before, 0);
    // A method that is not in the table has no handler, and the connection keeps serving.
    let unknown = mover.call_encoded(9999, &[], Payload::default(), PATIENCE).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::Unsupported);
    mover.call(&ForMovers {}, vec![], PATIENCE).await.unwrap();
}

async fn a_channel_comes_back(env: &Env, addr: &Addr) {
    let (first, bench, bound) = server(env, addr).await;
    let nobody: Addr = "unix:/nonexistent/weir-test".parse().unwrap();
    let channel =
        Channel::new(env, vec![nobody, bound.clone()], identity(env, "client"), Arc::new(NoService));
    let generation = channel.generation();
    assert_eq!(*generation.borrow(), 0);
    let counted = channel.call(&Count {}, vec![], PATIENCE).await.unwrap().0.before;
    assert_eq!((counted, *generation.borrow()), (0, 1));
    let connection = channel.current().unwrap();
    drop(first);
    connection.closed().await;
    let e = channel.call(&Count {}, vec![], Duration::from_millis(300)).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Unavailable);
    assert!(e.context.contains(&bound.to_string()), "{e:?}");
    let e = channel.call_now(&Count {}, Payload::default(), PATIENCE).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Unavailable);
    let second = reopened(env, &bound).await;
    let (counted, _) = channel.call(&Count {}, vec![], PATIENCE).await.unwrap();
    assert_eq!((counted.before, *generation.borrow()), (0, 2));
    assert_eq!(bench.counted.load(std::sync::atomic::Ordering::SeqCst), 1, "nothing was sent twice");
    drop(second);
}

/// A server again at the same address, which may take a moment to be free.
async fn reopened(env: &Env, addr: &Addr) -> weir_rpc::Server {
    let deadline = env.clock.now() + PATIENCE;
    loop {
        let service = Arc::new(Shared(Bench::new(env)));
        match serve(env, std::slice::from_ref(addr), identity(env, "server"), service).await {
            Ok(server) => return server,
            Err(e) => assert!(env.clock.now() < deadline, "{e:?}"),
        }
        env.clock.sleep(Duration::from_millis(5)).await;
    }
}

async fn a_wrong_payload_fails_its_call_only(env: &Env, addr: &Addr) {
    let (_server, _, addr) = server(env, addr).await;
    let client = client(env, &addr).await;
    let payload = Payload::with_crc(vec![Bytes::from(vec![1; 10_000])], 12345);
    let e = client.call_payload(&Echo { words: String::new() }, payload, PATIENCE).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Damaged);
    client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
}

/// Not in the simulator, where a panic ends the run.
#[tokio::test]
async fn a_service_that_panics_fails_the_call_only() {
    let env = weir_env::real::env();
    let (_server, _, addr) = server(&env, &"tcp:127.0.0.1:0".parse().unwrap()).await;
    let client = client(&env, &addr).await;
    let panicked = client.call(&Panic {}, vec![], PATIENCE).await.unwrap_err();
    assert!(panicked.context.contains("panicked"), "{panicked:?}");
    client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
}

/// In the simulator, whose links are as slow as one likes.
#[test]
fn a_dial_continues_without_a_waiter() {
    let world = weir_env::sim::World::new(7, Default::default());
    world.run(async {
        let (near, far) = (world.node("near"), world.node("far"));
        let (_server, _, addr) = server(&far, &"tcp:10.0.0.1:7000".parse().unwrap()).await;
        let way = Duration::from_millis(400);
        world.slow_link("near", "far", way);
        world.slow_link("far", "near", way);
        let channel = Channel::new(&near, vec![addr], identity(&near, "near"), Arc::new(NoService));
        for _ in 0..10 {
            match channel.connection(way).await {
                Ok(_) => return,
                Err(e) => assert_eq!(e.kind, ErrorKind::Unavailable),
            }
        }
        panic!("each try starts again, and none arrives");
    });
}

#[test]
fn a_silent_address_does_not_hold_back_the_next_one() {
    let world = weir_env::sim::World::new(9, Default::default());
    world.run(async {
        let nodes = ["near", "silent", "far"].map(|name| world.node(name));
        let (_off, _, silent) = server(&nodes[1], &"tcp:10.0.0.1:7000".parse().unwrap()).await;
        let (_server, _, far) = server(&nodes[2], &"tcp:10.0.0.2:7000".parse().unwrap()).await;
        world.partition("near", "silent");
        let near = &nodes[0];
        let refusing: Addr = "tcp:10.0.0.2:9".parse().unwrap();
        let addrs = vec![refusing, silent.clone(), far.clone()];
        let channel = Channel::new(near, addrs, identity(near, "near"), Arc::new(NoService));
        let begun = near.clock.now();
        let connection = channel.connection(PATIENCE).await.unwrap();
        assert_eq!(connection.peer_addr(), far.to_string());
        let took = near.clock.now().since(begun);
        assert!(took < Duration::from_millis(400), "{took:?}");
    });
}

#[test]
fn a_channel_leaves_a_silent_node_only_for_another() {
    let world = weir_env::sim::World::new(10, Default::default());
    world.run(async {
        let nodes = ["near", "first", "second"].map(|name| world.node(name));
        let (near, second) = (&nodes[0], "tcp:10.0.0.2:7000".parse().unwrap());
        let (_server, _, first) = server(&nodes[1], &"tcp:10.0.0.1:7000".parse().unwrap()).await;
        let (_also, _, also) = server(&nodes[1], &"tcp:10.0.0.1:7001".parse().unwrap()).await;
        let addrs = vec![first.clone(), also, second];
        let channel = Channel::new(near, addrs.clone(), identity(near, "near"), Arc::new(NoService));
        let connection = channel.connection(PATIENCE).await.unwrap();
        world.partition("near", "first");
        assert!(!channel.find_another(PATIENCE).await, "no other address answers");
        assert!(!connection.is_closed());
        let (_next, _, _) = server(&nodes[2], &addrs[2]).await;
        assert!(channel.find_another(PATIENCE).await);
        assert!(connection.is_closed());
        assert_eq!(channel.current().unwrap().peer_addr(), addrs[2].to_string());
    });
}

/// In the simulator, whose machines do not stall.
#[test]
fn why_it_is_late_is_reported_in_time() {
    let world = weir_env::sim::World::new(8, Default::default());
    world.run(async {
        let (near, far) = (world.node("near"), world.node("far"));
        let (_server, _, addr) = server(&far, &"tcp:10.0.0.1:7000".parse().unwrap()).await;
        let client = client(&near, &addr).await;
        world.slow_link("far", "near", Duration::from_millis(30));
        for patience in [1, 30, 300].map(Duration::from_secs) {
            let e = client.call(&TooLate { why: "it rains".into() }, vec![], patience).await.unwrap_err();
            assert_eq!((e.kind, e.context.contains("it rains")), (ErrorKind::Deadline, true), "{e:?}");
        }
    });
}

/// Not that it is unavailable: its callers would take it for dead.
#[test]
fn a_server_with_too_many_requests_of_a_connection_is_busy() {
    let world = weir_env::sim::World::new(9, Default::default());
    world.run(async {
        let env = world.node("one");
        let (_server, bench, addr) = server(&env, &"tcp:10.0.0.1:7000".parse().unwrap()).await;
        let client = client(&env, &addr).await;
        for _ in 0..SERVED_MAX / CALLS_MAX {
            let calls = (0..CALLS_MAX).map(|_| {
                let (client, clock) = (client.clone(), env.clock.clone());
                let call = async move {
                    let call = client.call(&Wait {}, vec![], PATIENCE);
                    assert!(clock.timeout(Duration::from_millis(20), call).await.is_err());
                };
                Box::pin(call) as weir_env::BoxFuture<'_, ()>
            });
            for call in calls.map(|call| env.tasks.spawn("impatient caller", call)).collect::<Vec<_>>() {
                drop(call);
            }
            env.clock.sleep(Duration::from_millis(100)).await;
        }
        let e = client.call(&Wait {}, vec![], PATIENCE).await.unwrap_err();
        assert!(matches!(e.kind, ErrorKind::Busy { wait_ms: 1.. }), "{e:?}");
        client.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
        bench.release.add_permits(2);
        client.call(&Wait {}, vec![], PATIENCE).await.unwrap_err(); // the first two end meanwhile
        until(&env, "two ended", || bench.waits_ended.load(std::sync::atomic::Ordering::SeqCst) == 2).await;
        bench.release.add_permits(SERVED_MAX);
        client.call(&Wait {}, vec![], PATIENCE).await.unwrap();
    });
}

/// In the simulator, where nothing is sent to a caller that has gone.
#[test]
fn work_whose_deadline_has_passed_is_not_begun() {
    let world = weir_env::sim::World::new(10, Default::default());
    world.run(async {
        let (near, far) = (world.node("near"), world.node("far"));
        let (_server, bench, addr) = server(&far, &"tcp:10.0.0.1:7000".parse().unwrap()).await;
        let client = client(&near, &addr).await;
        // The Cancel does not arrive, either.
        let call = client.call(&WhileWanted {}, vec![], Duration::from_millis(500));
        let cut = async {
            near.clock.sleep(Duration::from_millis(100)).await;
            world.partition("near", "far");
        };
        let (e, ()) = tokio::join!(call, cut);
        assert_eq!(e.unwrap_err().kind, ErrorKind::Deadline);
        bench.release.add_permits(1);
        until(&near, "it ends", || bench.waits_ended.load(std::sync::atomic::Ordering::SeqCst) == 1).await;
        assert!(bench.dropped.lock().unwrap()[0].contains("its deadline has passed"));
    });
}

/// In the simulator, where nodes are moved at will.
#[test]
fn a_channel_follows_its_node_and_accepts_no_other() {
    let world = weir_env::sim::World::new(10, Default::default());
    world.run(async {
        let near = world.node("near");
        let at = |n: u8| -> Addr { format!("tcp:10.0.0.{n}:7000").parse().unwrap() };
        let known = Arc::new(std::sync::Mutex::new(Endpoint {
            addrs: vec![at(1)],
            name: Some("server".into()),
            role: Some(Role::Storage),
            ..Endpoint::default()
        }));
        let asked = known.clone();
        let look_up: LookUp = Arc::new(move || Ok(asked.lock().unwrap().clone()));
        let channel = Channel::following(&near, look_up, identity(&near, "near"), Arc::new(NoService));
        let (first, _, _) = server(&world.node("one"), &at(1)).await;
        channel.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
        drop(first);
        // Another node is where it was.
        let who = identity(&world.node("two"), "another");
        let other = serve(&world.node("two"), &[at(1)], who, Arc::new(NoService)).await.unwrap();
        let e =
            channel.call(&Echo { words: String::new() }, vec![], Duration::from_secs(3)).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Unavailable);
        assert!(e.context.contains("\"another\" answers there, not \"server\""), "{e}");
        let (_second, _, _) = server(&world.node("one"), &at(2)).await;
        known.lock().unwrap().addrs = vec![at(2)];
        channel.call(&Echo { words: String::new() }, vec![], PATIENCE).await.unwrap();
        // One that is silent where it was is left as soon as it is known to be elsewhere.
        let silent = channel.current().unwrap();
        channel.leave_old_address();
        assert!(!silent.is_closed());
        known.lock().unwrap().addrs = vec![at(3)];
        channel.leave_old_address();
        assert!(silent.is_closed());
        drop(other);
    });
}

/// A caller in the name of a process that has ended waits as long as for a node that is away.
#[test]
fn a_node_that_stops_does_not_dial_without_a_pause() {
    let world = weir_env::sim::World::new(9, Default::default());
    world.run(async {
        let near = world.node("near");
        let addr = "tcp:10.0.0.1:7000".parse().unwrap();
        let channel = Channel::new(&near, vec![addr], identity(&near, "near"), Arc::new(NoService));
        world.kill("near");
        let begun = world.now();
        assert_eq!(channel.connection(PATIENCE).await.unwrap_err().kind, ErrorKind::Unavailable);
        assert!(world.now().since(begun) >= PATIENCE);
    });
}

async fn an_address_that_is_about_to_be_free_is_waited_for(env: &Env, addr: &Addr) {
    let before = env.net.listen(addr).await.unwrap();
    let bound = before.local_addr();
    let clock = env.clock.clone();
    env.tasks.spawn("the process before", async move {
        clock.sleep(Duration::from_millis(200)).await;
        drop(before);
    });
    let (_server, _, addr) = server(env, &bound).await;
    assert_eq!(addr, bound);
    client(env, &addr).await;
    let who = identity(env, "another one");
    let error = serve(env, std::slice::from_ref(&bound), who, Arc::new(NoService)).await.err().unwrap();
    assert!(error.context.contains(&bound.to_string()), "{error:?}");
}

macro_rules! contract {
    ($($test:ident),* $(,)?) => {
        mod tcp4 { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() {
            super::$test(&weir_env::real::env(), &"tcp:127.0.0.1:0".parse().unwrap()).await;
        })* }
        mod tcp6 { $(#[tokio::test] async fn $test() {
            super::$test(&weir_env::real::env(), &"tcp:[::1]:0".parse().unwrap()).await;
        })* }
        mod unix { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() {
            let dir = tempfile::tempdir().unwrap();
            let addr = weir_env::Addr::Unix(dir.path().join("s"));
            super::$test(&weir_env::real::env(), &addr).await;
        })* }
        mod sim { $(#[test] fn $test() {
            let hash = || {
                let world = weir_env::sim::World::new(7, Default::default());
                world.run(async { super::$test(&world.node("one"), &"tcp:10.0.0.1:7000".parse().unwrap()).await });
                world.trace_hash()
            };
            assert_eq!(hash(), hash(), "the same seed gives the same run");
        })* }
    };
}
contract!(
    an_answer_comes_back,
    many_calls_share_a_connection,
    a_slow_answer_does_not_hold_back_others,
    errors_arrive_unchanged,
    a_call_ends_by_its_deadline,
    dropped_calls_free_their_places,
    work_is_not_begun_when_nobody_waits_for_it,
    either_end_may_call,
    the_end_fails_all_calls_at_once,
    dropping_the_last_handle_closes,
    clusters_do_not_mix,
    both_ends_use_the_highest_version_that_both_speak,
    a_method_is_for_its_senders,
    a_channel_comes_back,
    a_wrong_payload_fails_its_call_only,
    an_address_that_is_about_to_be_free_is_waited_for,
);

/// The tests between nodes that have certificates, for each suite.
macro_rules! certified {
    ($($suite:ident($policy:expr): [$($test:ident),* $(,)?])*) => { $(
        mod $suite {
            use super::*;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $test() {
                let (env, addr) = (weir_env::real::env(), "tcp:127.0.0.1:0".parse().unwrap());
                CLUSTER.scope(Cluster::new($policy), super::$test(&env, &addr)).await;
            })*
        }
    )* };
}
certified! {
    integrity(Policy::default()): [
        an_answer_comes_back,
        many_calls_share_a_connection,
        a_slow_answer_does_not_hold_back_others,
        errors_arrive_unchanged,
        a_call_ends_by_its_deadline,
        dropped_calls_free_their_places,
        either_end_may_call,
        the_end_fails_all_calls_at_once,
        dropping_the_last_handle_closes,
        both_ends_use_the_highest_version_that_both_speak,
        a_method_is_for_its_senders,
        a_channel_comes_back,
    ]
    encryption(Policy { trusted: Vec::new(), ..Policy::default() }): [
        an_answer_comes_back,
        many_calls_share_a_connection,
        errors_arrive_unchanged,
        either_end_may_call,
    ]
    aes(Policy { only_aes: true, ..Policy::default() }): [
        an_answer_comes_back,
        many_calls_share_a_connection,
        errors_arrive_unchanged,
        either_end_may_call,
    ]
}
