//! What the machine's seams cost here: `cargo run --release -p weir-env --example machine [DIR]`.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_env::{Addr, BoxStream, Env, File, IO_ALIGN, OpenMode, real};

fn main() {
    let dir = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from).join("weir-env-machine");
    std::fs::create_dir_all(&dir).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let env = real::env();
    let dir2 = dir.clone();
    runtime.block_on(async move {
        tokio::spawn(async move {
            hops(&env, &dir2).await;
            for addr in [Addr::Unix(dir2.join("socket")), "tcp:127.0.0.1:0".parse().unwrap()] {
                for streams in [1, 4] {
                    transfer(&env, &addr, streams).await;
                }
            }
        })
        .await
        .unwrap();
    });
    std::fs::remove_dir_all(&dir).unwrap();
}

async fn hops(env: &Env, dir: &std::path::Path) {
    let file = env.disk.open(&dir.join("file"), OpenMode::WRITE.direct()).unwrap();
    let page = env.buffers.zeroed(IO_ALIGN);
    for i in 0..1024 {
        file.write_all_at(&page, i * IO_ALIGN as u64).unwrap();
    }
    let page = Arc::new(page);
    let write = |i: u64| {
        let (file, page): (Arc<dyn File>, _) = (file.clone(), page.clone());
        move || {
            file.write_all_at(&page, i % 1024 * IO_ALIGN as u64).unwrap();
            file.sync_data().unwrap();
        }
    };
    for round in 0..2 {
        let mut taken = [Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new()];
        for i in 0..2000 {
            let start = Instant::now();
            write(i)();
            taken[0].push(start.elapsed());
            let start = Instant::now();
            env.tasks.blocking(write(i)).await;
            taken[1].push(start.elapsed());
            let start = Instant::now();
            tokio::task::spawn_blocking(write(i)).await.unwrap();
            taken[2].push(start.elapsed());
            let start = Instant::now();
            env.tasks.blocking(|| ()).await;
            taken[3].push(start.elapsed());
            let start = Instant::now();
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            taken[4].push(start.elapsed());
        }
        if round == 1 {
            let names = [
                "durable 4 KiB, in place",
                "… on our pool",
                "… on tokio's pool",
                "nothing, our pool",
                "nothing, tokio's",
            ];
            for (name, mut times) in names.into_iter().zip(taken) {
                times.sort();
                println!("{name:<26} p50 {:>9.1?} p99 {:>9.1?}", times[1000], times[1980]);
            }
        }
    }
}

async fn transfer(env: &Env, addr: &Addr, streams: usize) {
    const MESSAGE: usize = 1 << 20;
    let listener = env.net.listen(addr).await.unwrap();
    let time = Duration::from_secs(2);
    let cpu = cpu_time();
    let start = Instant::now();
    let mut readers = Vec::new();
    for _ in 0..streams {
        let client = env.net.connect(&listener.local_addr()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let payload = env.buffers.zeroed(MESSAGE);
        tokio::spawn(send(client, payload, start + time));
        readers.push(tokio::spawn(receive(server, env.buffers.zeroed(MESSAGE))));
    }
    let mut bytes = 0;
    for reader in readers {
        bytes += reader.await.unwrap();
    }
    let (gb, cpu) = (bytes as f64 / 1e9, (cpu_time() - cpu).as_secs_f64());
    let rate = gb / start.elapsed().as_secs_f64();
    println!("{streams} stream(s) of 1 MiB over {addr:<40} {rate:.2} GB/s, {:.3} CPU-s/GB", cpu / gb);
}

async fn send(mut stream: BoxStream, payload: weir_env::Buf, until: Instant) {
    while Instant::now() < until {
        stream.write_all(&payload).await.unwrap();
    }
}

async fn receive(mut stream: BoxStream, mut buf: weir_env::Buf) -> usize {
    let mut bytes = 0;
    while stream.read_exact(&mut buf).await.is_ok() {
        bytes += buf.len();
    }
    bytes
}

fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}
