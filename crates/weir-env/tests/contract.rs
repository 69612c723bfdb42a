//! What every `Env` keeps, claim by claim, on the machine and in the simulator.
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_env::{
    Addr, Env, IO_ALIGN, OpenMode, TimedOut, real,
    sim::{SimConfig, World},
};

/// Runs each claim twice: `on_machine::claim` and `in_simulator::claim`.
macro_rules! contract {
    ($($claim:ident),* $(,)?) => {
        mod on_machine {
            use super::*;
            $(#[test]
            fn $claim() {
                let dir = tempfile::tempdir().unwrap();
                let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
                runtime.block_on(super::$claim(real::env(), dir.path().to_path_buf()));
            })*
        }
        mod in_simulator {
            use super::*;
            $(#[test]
            fn $claim() {
                for seed in 0..5 {
                    let world = World::new(seed, SimConfig::default());
                    let env = world.node("node");
                    env.disk.create_dir_all(Path::new("/work")).unwrap();
                    world.run(super::$claim(env, PathBuf::from("/work")));
                }
            })*
        }
    };
}

contract!(
    disk_reads_what_was_written,
    disk_vectored_write_is_one_after_the_other,
    disk_read_ends_at_the_end,
    disk_open_modes,
    disk_direct_wants_alignment,
    disk_allocate_and_punch_read_as_zeros,
    disk_set_len_truncates_and_extends_with_zeros,
    disk_rename_replaces,
    disk_read_dir_is_sorted,
    disk_missing_names_are_not_found,
    disk_remove_dir_all_removes_below,
    disk_open_file_outlives_its_name,
    disk_locks_are_exclusive,
    disk_space_counts,
    disk_directories_share_a_file_system,
    disk_write_atomic_replaces,
    net_connect_without_a_listener_is_refused,
    net_echo_over_each_address,
    net_half_close,
    net_big_transfer_keeps_order,
    net_many_connections,
    net_drop_ends_the_peer,
    net_halves_work_at_once_and_end_alone,
    net_one_listener_per_address,
    net_address_is_free_after_drop,
    clock_sleeps_as_long_as_asked,
    clock_timeout_ends_the_wait,
    rng_differs,
    tasks_abort_ends_a_task,
    tasks_blocking_returns_its_result,
    tasks_blocking_runs_on_without_a_waiter,
    a_lane_runs_each_task_once,
);

async fn disk_reads_what_was_written(env: Env, dir: PathBuf) {
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE).unwrap();
    let data: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
    file.write_all_at(&data, 5).unwrap();
    file.write_all_at(b"middle", 50_000).unwrap();
    file.sync_data().unwrap();
    env.disk.sync_dir(&dir).unwrap();
    let mut back = vec![9; 100_005];
    let reader = env.disk.open(&dir.join("f"), OpenMode::READ).unwrap();
    reader.read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back[..5], [0; 5]);
    assert_eq!(&back[50_000..50_006], b"middle");
    assert_eq!(back[5..50_000], data[..49_995]);
    assert_eq!(back[50_006..], data[50_001..]);
    assert_eq!(reader.len().unwrap(), 100_005);
    assert!(reader.write_all_at(b"x", 0).is_err(), "opened for reading only");
}

async fn disk_vectored_write_is_one_after_the_other(env: Env, dir: PathBuf) {
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE).unwrap();
    let parts: Vec<Vec<u8>> = (0..3000).map(|i| vec![i as u8; i % 7]).collect();
    let slices: Vec<&[u8]> = parts.iter().map(|p| &p[..]).collect();
    file.write_all_vectored_at(&slices, 11).unwrap();
    file.write_all_vectored_at(&[], 0).unwrap();
    file.write_all_vectored_at(&[b"", b""], 0).unwrap();
    assert_eq!(env.disk.read(&dir.join("f")).unwrap()[11..], parts.concat());
}

async fn disk_read_ends_at_the_end(env: Env, dir: PathBuf) {
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE).unwrap();
    assert!(file.is_empty().unwrap());
    file.write_all_at(b"12345", 0).unwrap();
    let mut buf = [0; 10];
    assert_eq!(file.read_at(&mut buf, 2).unwrap(), 3);
    assert_eq!(file.read_at(&mut buf, 5).unwrap(), 0);
    assert_eq!(file.read_at(&mut buf, 1 << 40).unwrap(), 0);
    assert_eq!(file.read_exact_at(&mut buf, 0).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

async fn disk_open_modes(env: Env, dir: PathBuf) {
    let path = dir.join("f");
    let kind = |mode| env.disk.open(&path, mode).map(|_| ()).unwrap_err().kind();
    assert_eq!(kind(OpenMode::READ), ErrorKind::NotFound);
    env.disk.open(&path, OpenMode::CREATE_NEW).unwrap().write_all_at(b"old", 0).unwrap();
    assert_eq!(kind(OpenMode::CREATE_NEW), ErrorKind::AlreadyExists);
    env.disk.open(&path, OpenMode::WRITE).unwrap();
    assert_eq!(env.disk.read(&path).unwrap(), b"old");
    env.disk.open(&path, OpenMode { truncate: true, ..OpenMode::WRITE }).unwrap();
    assert_eq!(env.disk.read(&path).unwrap(), b"");
    assert_eq!(
        env.disk.open(&path.join("below"), OpenMode::WRITE).map(|_| ()).unwrap_err().kind(),
        ErrorKind::NotADirectory
    );
}

async fn disk_direct_wants_alignment(env: Env, dir: PathBuf) {
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE.direct()).unwrap();
    let mut buf = env.buffers.get(3 * IO_ALIGN);
    buf.fill(7);
    file.write_all_at(&buf, IO_ALIGN as u64).unwrap();
    file.write_all_vectored_at(&[&buf[..IO_ALIGN], &buf[IO_ALIGN..]], 0).unwrap();
    file.sync_data().unwrap();
    let mut back = env.buffers.zeroed(8 * IO_ALIGN);
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 4 * IO_ALIGN);
    assert!(back[..4 * IO_ALIGN].iter().all(|b| *b == 7));
    let refused = |result: std::io::Result<()>| result.unwrap_err().kind() == ErrorKind::InvalidInput;
    assert!(refused(file.write_all_at(&buf[..100], 0)));
    assert!(refused(file.write_all_at(&buf, 512)));
    assert!(refused(file.write_all_vectored_at(&[&buf[..IO_ALIGN], &buf[..8]], 0)));
    assert!(refused(file.read_at(&mut back[1..IO_ALIGN + 1], 0).map(|_| ())));
    // A file that ends within a block is read to its end.
    file.set_len(IO_ALIGN as u64 + 10).unwrap();
    assert_eq!(file.read_at(&mut back, 0).unwrap(), IO_ALIGN + 10);
}

async fn disk_allocate_and_punch_read_as_zeros(env: Env, dir: PathBuf) {
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE).unwrap();
    file.allocate(0, 1 << 20).unwrap();
    assert_eq!(file.len().unwrap(), 1 << 20);
    file.write_all_at(&vec![1; 40_000], 0).unwrap();
    file.allocate(8192, 4096).unwrap();
    file.punch(10_000, 20_000).unwrap();
    assert_eq!(file.len().unwrap(), 1 << 20);
    let bytes = env.disk.read(&dir.join("f")).unwrap();
    let expected = |at: usize| u8::from(at < 40_000 && !(10_000..30_000).contains(&at));
    assert!(bytes.iter().enumerate().all(|(at, b)| *b == expected(at)));
}

async fn disk_set_len_truncates_and_extends_with_zeros(env: Env, dir: PathBuf) {
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE).unwrap();
    file.write_all_at(&[1; 10_000], 0).unwrap();
    file.set_len(5000).unwrap();
    file.set_len(9000).unwrap();
    file.write_all_at(&[2; 10], 8990).unwrap();
    let bytes = env.disk.read(&dir.join("f")).unwrap();
    assert_eq!(bytes.len(), 9000);
    assert!(bytes[..5000].iter().all(|b| *b == 1) && bytes[5000..8990].iter().all(|b| *b == 0));
}

async fn disk_rename_replaces(env: Env, dir: PathBuf) {
    let (a, b) = (dir.join("a"), dir.join("b"));
    env.disk.write_atomic(&a, b"new").unwrap();
    env.disk.write_atomic(&b, b"old").unwrap();
    env.disk.rename(&a, &b).unwrap();
    assert_eq!(env.disk.read(&b).unwrap(), b"new");
    assert!(!env.disk.exists(&a));
    env.disk.create_dir_all(&dir.join("d/e")).unwrap();
    env.disk.rename(&b, &dir.join("d/e/f")).unwrap();
    env.disk.rename(&dir.join("d/e"), &dir.join("g")).unwrap();
    assert_eq!(env.disk.read(&dir.join("g/f")).unwrap(), b"new");
    assert!(env.disk.rename(&dir.join("g"), &dir.join("g/below")).is_err());
    assert_eq!(
        env.disk.rename(&dir.join("g/f"), &dir.join("d")).unwrap_err().kind(),
        ErrorKind::IsADirectory
    );
}

async fn disk_read_dir_is_sorted(env: Env, dir: PathBuf) {
    for name in ["10", "9", "b", "A", "a"] {
        env.disk.open(&dir.join(name), OpenMode::CREATE_NEW).unwrap();
    }
    env.disk.create_dir_all(&dir.join("B/C")).unwrap();
    let entries = env.disk.read_dir(&dir).unwrap();
    let names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["10", "9", "A", "B", "a", "b"]);
    assert!(entries.iter().all(|e| e.is_dir == (e.name == "B")));
}

async fn disk_missing_names_are_not_found(env: Env, dir: PathBuf) {
    let path = dir.join("absent");
    let disk = &env.disk;
    assert!(!disk.exists(&path));
    let results = [
        disk.read(&path).map(|_| ()),
        disk.remove_file(&path),
        disk.remove_dir_all(&path),
        disk.read_dir(&path).map(|_| ()),
        disk.rename(&path, &dir.join("b")),
        disk.sync_dir(&path),
        disk.space(&path).map(|_| ()),
        disk.file_system(&path).map(|_| ()),
        disk.open(&path.join("f"), OpenMode::WRITE).map(|_| ()),
    ];
    for (i, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::NotFound, "call {i}");
    }
}

async fn disk_remove_dir_all_removes_below(env: Env, dir: PathBuf) {
    env.disk.create_dir_all(&dir.join("a/b/c")).unwrap();
    env.disk.create_dir_all(&dir.join("a/b/c")).unwrap();
    env.disk.write_atomic(&dir.join("a/b/f"), b"x").unwrap();
    assert!(env.disk.remove_file(&dir.join("a")).is_err(), "a directory is no file");
    env.disk.remove_dir_all(&dir.join("a")).unwrap();
    assert!(!env.disk.exists(&dir.join("a/b/f")) && !env.disk.exists(&dir.join("a")));
}

async fn disk_open_file_outlives_its_name(env: Env, dir: PathBuf) {
    let path = dir.join("f");
    let file = env.disk.open(&path, OpenMode::WRITE).unwrap();
    file.write_all_at(b"still", 0).unwrap();
    env.disk.remove_file(&path).unwrap();
    env.disk.sync_dir(&dir).unwrap();
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"still");
    file.write_all_at(b"more", 5).unwrap();
    assert!(!env.disk.exists(&path));
}

async fn disk_locks_are_exclusive(env: Env, dir: PathBuf) {
    let open = || env.disk.open(&dir.join("lock"), OpenMode::WRITE).unwrap();
    let (first, second) = (open(), open());
    first.try_lock().unwrap();
    first.try_lock().unwrap();
    assert_eq!(second.try_lock().unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(first);
    second.try_lock().unwrap();
}

async fn disk_space_counts(env: Env, dir: PathBuf) {
    let before = env.disk.space(&dir).unwrap();
    assert!(before.free > 0 && before.free <= before.total);
    let file = env.disk.open(&dir.join("f"), OpenMode::WRITE).unwrap();
    file.allocate(0, 64 << 20).unwrap();
    let after = env.disk.space(&dir).unwrap();
    // Others use the machine's disk at the same time.
    assert!(after.free + (32 << 20) < before.free, "{before:?} {after:?}");
    file.write_all_at(&[1; 4096], 0).unwrap();
}

async fn disk_directories_share_a_file_system(env: Env, dir: PathBuf) {
    env.disk.create_dir_all(&dir.join("a/b")).unwrap();
    let at = |path: &str| env.disk.file_system(&dir.join(path)).unwrap();
    assert_eq!([at("a"), at("a/b")], [at(""); 2]);
}

async fn disk_write_atomic_replaces(env: Env, dir: PathBuf) {
    let path = dir.join("settings.json");
    for text in [&b"a long first text"[..], b"short", b""] {
        env.disk.write_atomic(&path, text).unwrap();
        assert_eq!(env.disk.read(&path).unwrap(), text);
    }
    assert_eq!(env.disk.read_dir(&dir).unwrap().len(), 1, "no temporary file stays");
}

fn addresses(dir: &Path) -> Vec<Addr> {
    ["tcp:127.0.0.1:0".parse().unwrap(), "tcp:[::1]:0".parse().unwrap(), Addr::Unix(dir.join("socket"))]
        .into()
}

async fn net_connect_without_a_listener_is_refused(env: Env, dir: PathBuf) {
    let listener = env.net.listen(&addresses(&dir)[0]).await.unwrap();
    let addr = listener.local_addr();
    drop(listener);
    let error = env.net.connect(&addr).await.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

async fn net_echo_over_each_address(env: Env, dir: PathBuf) {
    for addr in addresses(&dir) {
        let listener = env.net.listen(&addr).await.unwrap();
        let bound = listener.local_addr();
        assert!(!bound.to_string().ends_with(":0"), "{bound}");
        env.tasks.spawn("echo", async move {
            let (mut stream, peer) = listener.accept().await.unwrap();
            assert!(!peer.name.is_empty() && peer.guest.is_none());
            let mut word = [0; 5];
            for _ in 0..3 {
                stream.read_exact(&mut word).await.unwrap();
                stream.write_all(&word).await.unwrap();
            }
        });
        let mut stream = env.net.connect(&bound).await.unwrap();
        for word in [b"first", b"other", b"third"] {
            stream.write_all(word).await.unwrap();
            let mut back = [0; 5];
            stream.read_exact(&mut back).await.unwrap();
            assert_eq!(&back, word);
        }
        assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0, "the echo has ended");
    }
}

async fn net_half_close(env: Env, dir: PathBuf) {
    let listener = env.net.listen(&Addr::Unix(dir.join("socket"))).await.unwrap();
    let mut client = env.net.connect(&listener.local_addr()).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut question = String::new();
    server.read_to_string(&mut question).await.unwrap();
    assert_eq!(question, "question");
    server.write_all(b"answer").await.unwrap();
    drop(server);
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "answer");
    assert_eq!(client.write_all(b"more").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
}

async fn net_big_transfer_keeps_order(env: Env, dir: PathBuf) {
    const BYTES: usize = 8 << 20;
    for addr in addresses(&dir) {
        let listener = env.net.listen(&addr).await.unwrap();
        let mut client = env.net.connect(&listener.local_addr()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let pattern = |i: usize| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[7];
        env.tasks.spawn("sender", async move {
            let data: Vec<u8> = (0..BYTES).map(pattern).collect();
            client.write_all(&data).await.unwrap();
        });
        let mut all = Vec::with_capacity(BYTES);
        server.read_to_end(&mut all).await.unwrap();
        assert_eq!(all.len(), BYTES);
        assert!(all.iter().enumerate().all(|(i, b)| *b == pattern(i)));
    }
}

async fn net_many_connections(env: Env, dir: PathBuf) {
    let listener = env.net.listen(&addresses(&dir)[0]).await.unwrap();
    let addr = listener.local_addr();
    let env2 = env.clone();
    env.tasks.spawn("server", async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            env2.tasks.spawn("connection", async move {
                let n = stream.read_u64().await.unwrap();
                stream.write_u64(n + 1).await.unwrap();
            });
        }
    });
    let mut streams = Vec::new();
    for _ in 0..200 {
        streams.push(env.net.connect(&addr).await.unwrap());
    }
    for (n, stream) in streams.iter_mut().enumerate().rev() {
        stream.write_u64(n as u64).await.unwrap();
    }
    for (n, stream) in streams.iter_mut().enumerate() {
        assert_eq!(stream.read_u64().await.unwrap(), n as u64 + 1);
    }
}

async fn net_drop_ends_the_peer(env: Env, dir: PathBuf) {
    let listener = env.net.listen(&addresses(&dir)[1]).await.unwrap();
    let client = env.net.connect(&listener.local_addr()).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    drop(client);
    assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 0);
    let error = loop {
        if let Err(e) = server.write_all(&[0; 1 << 16]).await {
            break e.kind();
        }
    };
    assert!([ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error), "{error}");
}

async fn net_halves_work_at_once_and_end_alone(env: Env, dir: PathBuf) {
    for addr in addresses(&dir) {
        let listener = env.net.listen(&addr).await.unwrap();
        let client = env.net.connect(&listener.local_addr()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let (mut from_client, mut to_client) = server.split();
        let (mut from_server, mut to_server) = client.split();
        env.tasks.spawn("echo", async move {
            tokio::io::copy(&mut from_client, &mut to_client).await.unwrap();
        });
        env.tasks.spawn("sender", async move {
            to_server.write_all(&vec![7; 3 << 20]).await.unwrap();
        });
        let mut back = Vec::new();
        from_server.read_to_end(&mut back).await.unwrap();
        assert_eq!(back.len(), 3 << 20);
    }
}

async fn net_one_listener_per_address(env: Env, dir: PathBuf) {
    for addr in addresses(&dir) {
        let first = env.net.listen(&addr).await.unwrap();
        let error = env.net.listen(&first.local_addr()).await.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse, "{addr}");
        env.net.connect(&first.local_addr()).await.unwrap();
    }
}

async fn net_address_is_free_after_drop(env: Env, dir: PathBuf) {
    for addr in addresses(&dir) {
        let bound = env.net.listen(&addr).await.unwrap().local_addr();
        let again = env.net.listen(&bound).await.unwrap();
        assert_eq!(again.local_addr(), bound);
    }
}

async fn clock_sleeps_as_long_as_asked(env: Env, _: PathBuf) {
    let (start, wall) = (env.clock.now(), env.clock.wall());
    env.clock.sleep(Duration::from_millis(30)).await;
    let passed = env.clock.now().since(start);
    assert!(passed >= Duration::from_millis(30) && passed < Duration::from_secs(120), "{passed:?}");
    assert!(env.clock.wall() > wall && wall.0 > 1_700_000_000_000_000_000);
    env.clock.sleep_until(start).await; // in the past: at once
}

async fn clock_timeout_ends_the_wait(env: Env, _: PathBuf) {
    let never = env.clock.timeout(Duration::from_millis(20), std::future::pending::<()>()).await;
    assert_eq!(never, Err(TimedOut));
    assert_eq!(env.clock.timeout(Duration::ZERO, async { 7 }).await, Ok(7), "what is ready wins");
    let clock = env.clock.clone();
    let soon = async move { clock.sleep(Duration::from_millis(1)).await };
    assert_eq!(env.clock.timeout(Duration::from_secs(120), soon).await, Ok(()));
}

async fn rng_differs(env: Env, _: PathBuf) {
    let ids: std::collections::BTreeSet<[u8; 16]> = (0..1000).map(|_| env.rng.id_128()).collect();
    assert_eq!(ids.len(), 1000);
    let seen: std::collections::BTreeSet<u64> = (0..500).map(|_| env.rng.below(5)).collect();
    assert_eq!(seen, (0..5).collect());
}

async fn tasks_abort_ends_a_task(env: Env, _: PathBuf) {
    let (tx, rx) = tokio::sync::oneshot::channel::<()>();
    let task = env.tasks.spawn("waits for ever", async move {
        std::future::pending::<()>().await;
        drop(tx);
    });
    assert!(!task.is_finished());
    task.abort();
    assert!(rx.await.is_err(), "what the task held was dropped");
}

async fn tasks_blocking_returns_its_result(env: Env, _: PathBuf) {
    let mut running = Vec::new();
    for n in 0..50u64 {
        let env = env.clone();
        let (tx, rx) = tokio::sync::oneshot::channel();
        env.clone().tasks.spawn("caller", async move {
            let _ = tx.send(env.tasks.blocking(move || n * n).await);
        });
        running.push((n, rx));
    }
    for (n, rx) in running {
        assert_eq!(rx.await.unwrap(), n * n);
    }
}

async fn a_lane_runs_each_task_once(env: Env, _: PathBuf) {
    let lane = env.tasks.lane(2);
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    for n in 0..20u64 {
        let tx = tx.clone();
        lane.run(move || tx.send(n).unwrap()).await;
    }
    drop((tx, lane)); // assigned work is still done
    let mut done = Vec::new();
    while let Some(n) = rx.recv().await {
        done.push(n);
    }
    done.sort_unstable();
    assert_eq!(done, (0..20).collect::<Vec<_>>());
}

async fn tasks_blocking_runs_on_without_a_waiter(env: Env, _: PathBuf) {
    let ran = Arc::new(AtomicU32::new(0));
    let (tx, rx) = tokio::sync::oneshot::channel();
    let (ran2, env2) = (ran.clone(), env.clone());
    let caller = env.tasks.spawn("caller", async move {
        let mut work = Box::pin(env2.tasks.blocking(move || ran2.fetch_add(1, Ordering::SeqCst)));
        std::future::poll_fn(|cx| {
            let _ = work.as_mut().poll(cx);
            std::task::Poll::Ready(())
        })
        .await;
        let _ = tx.send(());
    });
    rx.await.unwrap();
    caller.abort();
    let deadline = env.clock.now() + Duration::from_secs(120);
    while ran.load(Ordering::SeqCst) == 0 {
        assert!(env.clock.now() < deadline, "the work never ran");
        env.clock.sleep(Duration::from_millis(1)).await;
    }
}
