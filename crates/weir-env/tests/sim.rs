//! The guarantees of the simulated world beyond the contract: repeatability, faults, restarts.
use std::{
    io::ErrorKind,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_env::{
    Addr, Env, File, OpenMode, TimedOut,
    sim::{DiskFaults, ProcessorConfig, SimConfig, World},
};

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

fn addr(n: u16) -> Addr {
    format!("tcp:10.0.0.1:{n}").parse().unwrap()
}

/// A server that echoes, and writes what it echoes to its disk, syncing now and then.
fn serve(env: &Env, at: Addr) {
    let env = env.clone();
    env.clone().tasks.spawn("server", async move {
        let listener = env.net.listen(&at).await.unwrap();
        let file = env.disk.open(Path::new("/log"), OpenMode::WRITE).unwrap();
        env.disk.sync_dir(Path::new("/")).unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            let (env2, file) = (env.clone(), file.clone());
            env.tasks.spawn("connection", echo(env2, file, stream));
        }
    });
}

async fn echo(env: Env, file: Arc<dyn File>, mut stream: weir_env::BoxStream) {
    let mut buf = vec![0; 5000];
    while let Ok(n @ 1..) = stream.read(&mut buf).await {
        let (data, file) = (buf[..n].to_vec(), file.clone());
        let sync = env.rng.below(4) == 0;
        let at = env.rng.below(1 << 16);
        let _ = env
            .tasks
            .blocking(move || {
                file.write_all_at(&data, at)?;
                if sync { file.sync_data() } else { Ok(()) }
            })
            .await;
        if stream.write_all(&buf[..n]).await.is_err() {
            return;
        }
    }
}

async fn talk(env: Env, at: Addr, bytes: Arc<AtomicU64>) {
    loop {
        let Ok(mut stream) = env.net.connect(&at).await else {
            env.clock.sleep(10 * MS).await;
            continue;
        };
        let mut buf = vec![0; 20_000];
        for _ in 0..20 {
            let n = 1 + env.rng.below(20_000) as usize;
            buf[..n].fill(env.rng.next_u64() as u8);
            if stream.write_all(&buf[..n]).await.is_err() || stream.read_exact(&mut buf[..n]).await.is_err() {
                break;
            }
            bytes.fetch_add(n as u64, Ordering::Relaxed);
        }
    }
}

fn busy_run(seed: u64) -> (u64, u64) {
    let world = World::new(seed, SimConfig::default());
    let bytes = Arc::new(AtomicU64::new(0));
    world.run(async {
        serve(&world.node("server"), addr(1));
        for name in ["a", "b", "c"] {
            let env = world.node(name);
            env.tasks.spawn("talk", talk(env.clone(), addr(1), bytes.clone()));
        }
        let rng = world.rng("faults");
        for _ in 0..20 {
            world.sleep(Duration::from_micros(rng.below(50_000))).await;
            match rng.below(4) {
                0 => world.kill("server"),
                1 => world.power_cut("server"),
                2 => world.partition("a", "server"),
                _ => world.reset_connections("b", "server"),
            }
            world.sleep(10 * MS).await;
            world.heal_all();
            if !world.is_up("server") {
                serve(&world.node("server"), addr(1));
            }
        }
    });
    (world.trace_hash(), bytes.load(Ordering::Relaxed))
}

#[test]
fn the_same_seed_runs_the_same_way() {
    for seed in 0..10 {
        let first = busy_run(seed);
        assert_eq!(first, busy_run(seed), "seed {seed}");
        assert_ne!(first, busy_run(seed + 1000));
        assert!(first.1 > 1_000_000, "seed {seed} did little: {first:?}");
    }
}

#[test]
fn time_passes_only_when_nothing_can_run() {
    let world = World::new(1, SimConfig::default());
    world.run(async {
        let env = world.node("a");
        let start = env.clock.now();
        for _ in 0..1000 {
            let (tx, rx) = tokio::sync::oneshot::channel();
            env.tasks.spawn("short", async move { tx.send(()).unwrap() });
            rx.await.unwrap();
        }
        assert_eq!(env.clock.now(), start);
        env.clock.sleep(3600 * S).await;
        assert_eq!(env.clock.now(), start + 3600 * S);
    });
}

#[test]
fn no_task_blocks_where_the_disk_is_slow_or_hangs() {
    let world = World::new(1, SimConfig::default());
    world.run(async {
        let nodes = ["a", "b"].map(|name| world.node(name));
        let block = || nodes.iter().filter(|node| node.tasks.block_here().is_some()).count();
        assert_eq!(block(), 1, "every other node");
        for faults in [
            DiskFaults { hangs: true, ..DiskFaults::default() },
            DiskFaults { delay: MS, ..DiskFaults::default() },
        ] {
            ["a", "b"].into_iter().for_each(|name| world.set_disk_faults(name, faults));
            assert_eq!(block(), 0);
            ["a", "b"].into_iter().for_each(|name| world.set_disk_faults(name, DiskFaults::default()));
            assert_eq!(block(), 1);
        }
    });
}

#[test]
#[should_panic(expected = "seed 9, at 0.000000s: deadlock")]
fn a_deadlock_is_reported() {
    World::new(9, SimConfig::default()).run(std::future::pending::<()>());
}

#[test]
#[should_panic(expected = "task \"bad\" of node \"a\" panicked: the reason 7")]
fn a_panicking_task_ends_the_run() {
    let world = World::new(1, SimConfig::default());
    world.run(async {
        world.node("a").tasks.spawn("bad", async { panic!("the reason {}", 7) });
        world.sleep(S).await;
    });
}

#[test]
#[should_panic(expected = "no end after 60s")]
fn a_run_without_end_is_reported() {
    let world = World::new(1, SimConfig { time_max: 60 * S, ..SimConfig::default() });
    world.run(async {
        loop {
            world.sleep(S).await;
        }
    });
}

#[test]
fn a_killed_process_loses_tasks_and_connections_keeps_files() {
    let world = World::new(3, SimConfig::default());
    world.run(async {
        let env = world.node("server");
        let alive = Arc::new(());
        let held = alive.clone();
        env.tasks.spawn("holds", async move {
            let _held = held;
            std::future::pending::<()>().await
        });
        let file = env.disk.open(Path::new("/f"), OpenMode::WRITE).unwrap();
        file.try_lock().unwrap();
        file.write_all_at(b"written, not synced", 0).unwrap();
        let listener = env.net.listen(&addr(1)).await.unwrap();
        let client = world.node("client");
        let mut stream = client.net.connect(&addr(1)).await.unwrap();
        let _server_end = listener.accept().await.unwrap();
        world.kill("server");
        assert_eq!(stream.read(&mut [0; 1]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(Arc::strong_count(&alive), 1);
        let refused = client.net.connect(&addr(1)).await.map(|_| ()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert!(file.write_all_at(b"from beyond", 0).is_err());
        assert!(env.net.listen(&addr(1)).await.is_err());
        let env = world.node("server");
        assert_eq!(env.disk.read(Path::new("/f")).unwrap(), b"written, not synced");
        let again = env.disk.open(Path::new("/f"), OpenMode::WRITE).unwrap();
        again.try_lock().unwrap();
        drop(file);
        let other = env.disk.open(Path::new("/f"), OpenMode::WRITE).unwrap();
        assert!(other.try_lock().is_err(), "the dead life's handle does not unlock");
        env.net.listen(&addr(1)).await.unwrap();
    });
}

#[test]
fn a_process_dies_at_the_requested_point() {
    let world = World::new(3, SimConfig::default());
    world.run(async {
        let env = world.node("server");
        world.kill_at("server", "here", 2);
        let file = env.disk.open(Path::new("/f"), OpenMode::WRITE).unwrap();
        env.tasks.crash_point("here");
        env.tasks.crash_point("elsewhere");
        file.write_all_at(b"before", 0).unwrap();
        env.tasks.crash_point("here");
        assert!(!world.is_up("server"));
        assert!(file.write_all_at(b"behind", 0).is_err());
        let env = world.node("server");
        assert_eq!(env.disk.read(Path::new("/f")).unwrap(), b"before");
        env.tasks.crash_point("here");
        assert!(world.is_up("server"), "the crash point was armed for the former life only");
    });
}

#[test]
fn a_power_cut_takes_unsynced_bytes_and_names() {
    let mut outcomes = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let world = World::new(seed, SimConfig::default());
        let env = world.node("n");
        world.run(async {
            let disk = &env.disk;
            disk.create_dir_all(Path::new("/d")).unwrap();
            disk.sync_dir(Path::new("/")).unwrap();
            disk.write_atomic(Path::new("/d/kept"), b"durable").unwrap();
            let synced = disk.open(Path::new("/d/synced"), OpenMode::WRITE).unwrap();
            synced.write_all_at(b"abc", 0).unwrap();
            synced.sync_data().unwrap();
            disk.sync_dir(Path::new("/d")).unwrap();
            synced.write_all_at(b"XYZ", 0).unwrap();
            disk.open(Path::new("/d/unsynced name"), OpenMode::WRITE).unwrap().sync_data().unwrap();
            disk.remove_file(Path::new("/d/kept")).unwrap();
            world.power_cut("n");
            let disk = world.node("n").disk;
            let names: Vec<String> =
                disk.read_dir(Path::new("/d")).unwrap().into_iter().map(|e| e.name).collect();
            match names.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["kept", "synced"] => assert_eq!(disk.read(Path::new("/d/kept")).unwrap(), b"durable"),
                ["synced", "unsynced name"] => {}
                _ => panic!("seed {seed}: {names:?}"),
            }
            let bytes = disk.read(Path::new("/d/synced")).unwrap();
            assert!(bytes == b"abc" || bytes == b"XYZ", "one sector is never torn");
            outcomes.insert((names, bytes));
        });
    }
    assert_eq!(outcomes.len(), 4, "names and bytes are lost and kept independently");
}

#[test]
fn a_machine_without_power_is_silent_then_resets() {
    let world = World::new(5, SimConfig::default());
    world.run(async {
        let env = world.node("server");
        let listener = env.net.listen(&addr(1)).await.unwrap();
        let client = world.node("client");
        let mut stream = client.net.connect(&addr(1)).await.unwrap();
        let _server_end = listener.accept().await.unwrap();
        world.power_cut("server");
        stream.write_all(b"into the void").await.unwrap();
        assert_eq!(client.clock.timeout(60 * S, stream.read(&mut [0; 1])).await.map(|_| ()), Err(TimedOut));
        let error = client.net.connect(&addr(1)).await.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        world.node("server");
        assert_eq!(stream.read(&mut [0; 1]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        let refused = client.net.connect(&addr(1)).await.map(|_| ()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn a_partition_holds_bytes_back_until_it_heals() {
    let world = World::new(6, SimConfig::default());
    world.run(async {
        serve(&world.node("server"), addr(1));
        let client = world.node("client");
        world.sleep(MS).await;
        let mut stream = client.net.connect(&addr(1)).await.unwrap();
        world.partition_one_way("server", "client");
        stream.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        let mut answer = Box::pin(stream.read_exact(&mut back));
        assert!(client.clock.timeout(30 * S, &mut answer).await.is_err());
        world.heal("server", "client");
        client.clock.timeout(S, answer).await.unwrap().unwrap();
        assert_eq!(&back, b"hello");
        world.partition("client", "server");
        assert!(client.clock.timeout(S, client.net.connect(&addr(1))).await.is_err());
        world.heal_all();
        client.net.connect(&addr(1)).await.unwrap();
        world.slow_link("client", "server", S);
        let start = client.clock.now();
        stream.write_all(b"later").await.unwrap();
        stream.read_exact(&mut back).await.unwrap();
        let took = client.clock.now().since(start);
        assert!(took > S && took < S + 10 * MS, "{took:?}");
    });
}

#[test]
fn disks_fail_as_requested() {
    let world = World::new(7, SimConfig::default());
    let env = world.node("n");
    let path = Path::new("/f");
    let file = env.disk.open(path, OpenMode::WRITE).unwrap();
    file.write_all_at(&[0; 8192], 0).unwrap();
    let always = 1_000_000;
    let set = |faults| world.set_disk_faults("n", faults);
    set(DiskFaults { write_errors_per_million: always, ..DiskFaults::default() });
    assert_eq!(file.write_all_at(b"x", 0).unwrap_err().raw_os_error(), Some(5));
    set(DiskFaults { read_errors_per_million: always, ..DiskFaults::default() });
    assert_eq!(file.read_at(&mut [0; 1], 0).unwrap_err().raw_os_error(), Some(5));
    set(DiskFaults { sync_errors_per_million: always, ..DiskFaults::default() });
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
    set(DiskFaults::default());
    world.flip_bit("n", path, 5000, 3).unwrap();
    assert_eq!(env.disk.read(path).unwrap()[5000], 8);
    assert!(world.flip_bit("n", path, 8192, 0).is_err());
    world.set_disk_capacity("n", 12288);
    file.write_all_at(&[1; 4096], 8192).unwrap();
    let full = file.write_all_at(&[1], 12288).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    file.write_all_at(&[1; 8192], 0).unwrap();
    file.punch(0, 4096).unwrap();
    file.write_all_at(&[1], 12288).unwrap();
    drop(file);
    env.disk.remove_file(path).unwrap();
    assert_eq!(env.disk.space(Path::new("/")).unwrap().free, 12288);
}

#[test]
fn slow_disks_take_time_and_clocks_drift() {
    let world = World::new(8, SimConfig::default());
    world.run(async {
        let (a, b) = (world.node("a"), world.node("b"));
        world.set_disk_faults("a", DiskFaults { delay: 2 * S, ..DiskFaults::default() });
        let start = world.now();
        a.tasks.blocking(|| ()).await;
        assert!(world.now().since(start) >= 2 * S && world.now().since(start) < 2 * S + 10 * MS);
        assert_ne!(a.clock.now(), b.clock.now(), "an instant has no meaning on another node");
        world.set_clock_drift("b", 100_000);
        let (start, start_b) = (world.now(), b.clock.now());
        b.clock.sleep(11 * S).await;
        assert_eq!(b.clock.now().since(start_b), 11 * S);
        assert_eq!(world.now().since(start), 10 * S);
        world.set_wall_offset("b", -5_000_000_000);
        assert_eq!(b.clock.wall().0 + 5_000_000_000, a.clock.wall().0);
    });
}

#[test]
fn a_world_ends_with_its_last_handle() {
    let world = World::new(9, SimConfig::default());
    world.run(async {
        serve(&world.node("n"), addr(1));
        let env = world.node("n");
        env.tasks.spawn("never ends", async { std::future::pending::<()>().await });
        world.sleep(S).await;
    });
    let ended = world.ended();
    assert!(!ended());
    drop(world);
    assert!(ended(), "something keeps the world");
}

#[test]
fn a_paused_process_does_nothing_and_then_goes_on() {
    let world = World::new(10, SimConfig::default());
    world.run(async {
        serve(&world.node("server"), addr(1));
        let client = world.node("client");
        world.sleep(MS).await;
        let mut stream = client.net.connect(&addr(1)).await.unwrap();
        world.pause("server");
        stream.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        let mut answer = Box::pin(stream.read_exact(&mut back));
        assert!(client.clock.timeout(30 * S, &mut answer).await.is_err(), "it is stopped");
        world.resume("server");
        client.clock.timeout(S, answer).await.unwrap().unwrap();
        assert_eq!(&back, b"hello", "its connection stayed");
        world.pause("server");
        world.kill("server");
        serve(&world.node("server"), addr(1));
        world.sleep(MS).await;
        let mut stream = client.net.connect(&addr(1)).await.unwrap();
        stream.write_all(b"again").await.unwrap();
        client.clock.timeout(S, stream.read_exact(&mut back)).await.unwrap().unwrap();
    });
}

#[test]
fn bytes_of_a_lost_connection_arrive_late() {
    let world = World::new(11, SimConfig::default());
    world.run(async {
        let (a, b) = (world.node("a"), world.node("b"));
        let listener = b.net.listen(&addr(1)).await.unwrap();
        let mut old = a.net.connect(&addr(1)).await.unwrap();
        let (mut late, _) = listener.accept().await.unwrap();
        old.write_all(b"first").await.unwrap();
        world.lose_connections("a", "b", S);
        assert_eq!(old.read(&mut [0]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        drop(old);
        let mut new = a.net.connect(&addr(1)).await.unwrap();
        new.write_all(b"again").await.unwrap();
        let (mut soon, _) = listener.accept().await.unwrap();
        let (start, mut got) = (world.now(), [0; 5]);
        soon.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"again");
        late.write_all(b"to nobody").await.expect("it does not know of the loss yet");
        late.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"first");
        assert!(world.now().since(start) >= S - 10 * MS);
        assert!(matches!(late.read(&mut got).await, Ok(0) | Err(_)), "then it ends");
    });
}

#[test]
fn disks_lie_as_requested_and_can_be_replaced() {
    let world = World::new(12, SimConfig::default());
    let env = world.node("n");
    let (slab, other) = (Path::new("/slab-1"), Path::new("/other"));
    let always = 1_000_000;
    for path in [slab, other] {
        env.disk.open(path, OpenMode::WRITE).unwrap().write_all_at(&[1; 8192], 0).unwrap();
    }
    let write = |path: &Path| env.disk.open(path, OpenMode::WRITE).unwrap().write_all_at(&[2; 4096], 4096);
    world.set_disk_faults(
        "n",
        DiskFaults { lost_writes_per_million: always, silent_in: "slab", ..DiskFaults::default() },
    );
    write(slab).unwrap();
    write(other).unwrap();
    assert_eq!(env.disk.read(slab).unwrap(), [1; 8192], "reported as written, and is not");
    assert_eq!(env.disk.read(other).unwrap()[4096..], [2; 4096]);
    let misdirected_writes_per_million = always;
    world.set_disk_faults(
        "n",
        DiskFaults { misdirected_writes_per_million, silent_in: "slab", ..DiskFaults::default() },
    );
    let at_start = (0..20).any(|_| {
        write(slab).unwrap();
        env.disk.read(slab).unwrap()[..4096] == [2; 4096]
    });
    assert!(at_start, "some went elsewhere");
    world.power_cut("n");
    world.replace_disk("n");
    assert!(world.node("n").disk.read_dir(Path::new("/")).unwrap().is_empty());
}

fn with_processor(cores: usize) -> SimConfig {
    let processor = ProcessorConfig { cores, poll: Duration::from_micros(5), ..ProcessorConfig::default() };
    SimConfig { processor: Some(processor), ..SimConfig::default() }
}

/// When each of `count` tasks that become ready at once has run.
async fn turns(world: &World, tasks: &weir_env::Tasks, count: usize) -> Vec<Duration> {
    let begun = world.now();
    let mut ran = Vec::new();
    for _ in 0..count {
        let (world, (tx, rx)) = (world.clone(), tokio::sync::oneshot::channel());
        tasks.spawn("short", async move { tx.send(world.now().since(begun)).unwrap() });
        ran.push(rx);
    }
    let mut times = Vec::new();
    for one in ran {
        times.push(one.await.unwrap());
    }
    times
}

#[test]
fn tasks_wait_for_the_processor_in_order() {
    for (cores, takes) in [(1, 5 * MS), (2, 5 * MS / 2)] {
        let world = World::new(1, with_processor(cores));
        world.run(async {
            let times = turns(&world, &world.node("a").tasks, 1000).await;
            assert!(times.is_sorted(), "{times:?}");
            let last = times[999];
            assert!(last > takes * 9 / 10 && last < takes * 11 / 10, "{cores} cores: {last:?}");
        });
    }
    let world = World::new(1, SimConfig::default());
    world.run(async {
        let times = turns(&world, &world.node("a").tasks, 1000).await;
        assert_eq!(times[999], Duration::ZERO, "without a processor tasks take no time");
    });
}

#[test]
fn a_lane_of_its_own_does_not_wait_behind_the_others() {
    let world = World::new(1, with_processor(2));
    world.run(async {
        world.set_speed("a", 10_000);
        let env = world.node("a");
        let others = turns(&world, &env.tasks, 1000);
        let life = world.lane("a", "life");
        let alone = async {
            world.sleep(10 * MS).await;
            turns(&world, &life, 3).await
        };
        let (others, alone) = tokio::join!(biased; others, alone);
        assert!(others[999] > 240 * MS, "{:?}", others[999]);
        assert!(alone[2] < 2 * MS, "{alone:?}: a poll takes half a millisecond there");
    });
}

#[test]
fn a_starved_node_is_slow_and_alive() {
    let world = World::new(12, with_processor(2));
    world.run(async {
        serve(&world.node("server"), addr(1));
        let client = world.node("client");
        world.sleep(MS).await;
        let mut stream = client.net.connect(&addr(1)).await.unwrap();
        let mut took = Vec::new();
        for speed_ppm in [1_000_000, 10_000, 1_000_000] {
            world.set_speed("server", speed_ppm);
            world.sleep(S).await;
            let begun = world.now();
            for _ in 0..100 {
                stream.write_all(&[7; 4000]).await.unwrap();
                stream.read_exact(&mut [0; 4000]).await.unwrap();
            }
            took.push(world.now().since(begun));
        }
        assert!(took[1] > 2 * took[0] && took[2] < 2 * took[0], "{took:?}");
        assert_eq!(world.last_away("server"), None, "it was never away");
    });
}

#[test]
fn a_change_of_speed_and_a_pause_keep_the_queue() {
    let world = World::new(13, with_processor(1));
    world.run(async {
        let env = world.node("a");
        world.set_speed("a", 10_000);
        let queued = turns(&world, &env.tasks, 1000);
        let changes = async {
            world.sleep(100 * MS).await;
            world.pause("a");
            world.sleep(S).await;
            world.resume("a");
            world.set_speed("a", 1_000_000);
        };
        let (times, ()) = tokio::join!(biased; queued, changes);
        assert!(times.is_sorted());
        let meanwhile = times.iter().filter(|at| **at > 101 * MS && **at < 1100 * MS).count();
        assert_eq!(meanwhile, 0, "a paused process does nothing");
        let last = times[999];
        assert!(last > 1103 * MS && last < 1106 * MS, "{last:?}: four fifths of 5 ms were left");
        assert!(world.late_turns("a") > 900);
        world.kill("a");
        world.sleep(S).await;
        assert_eq!(world.last_away("a"), Some(world.now()));
        world.node("a");
        world.sleep(S).await;
        assert_eq!(world.now().since(world.last_away("a").unwrap()), S);
    });
}

#[test]
fn a_world_with_processors_is_repeatable_and_ends() {
    let run = |seed| {
        let world = World::new(seed, with_processor(1));
        let bytes = Arc::new(AtomicU64::new(0));
        world.run(async {
            world.set_speed("server", 50_000);
            serve(&world.node("server"), addr(1));
            for n in 0..5 {
                let env = world.node(&format!("c{n}"));
                env.tasks.spawn("talks", talk(env.clone(), addr(1), bytes.clone()));
            }
            for _ in 0..3 {
                world.sleep(S).await;
                world.kill("server");
                world.sleep(S / 2).await;
                serve(&world.node("server"), addr(1));
            }
            world.sleep(S).await;
        });
        let (hash, ended) = (world.trace_hash(), world.ended());
        drop(world);
        assert!(ended(), "something keeps the world");
        (hash, bytes.load(Ordering::Relaxed))
    };
    for seed in 0..5 {
        let first = run(seed);
        assert_eq!(first, run(seed));
        assert!(first.1 > 1_000_000, "{first:?}");
    }
}
