//! How fast a home in a directory takes one long stream and many files: `stream DIRECTORY`, beside plain
//! writes of the same bytes to the same disk, one after the other. Removes what it made.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a measurement, not part of a node")]
use bytes::Bytes;
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};
use weir_home::{Attrs, Expect, FileHome, FileHomeConfig, Home, HomePath, IdMap, LaneLimits, Make};
use weir_proto::{GIB, MIB, meta::Time};

const STREAM_BYTES: u64 = 2 * GIB;
const EXTENT_BYTES: u64 = 16 * MIB;
const FILES: u64 = 1000;
const FILE_BYTES: u64 = 6 * MIB;
/// Files under way at once, for both.
const WRITERS: u64 = 4;

fn attrs() -> Attrs {
    let time = Time { nanos: 1_700_000_000_000_000_000 };
    Attrs { mode: 0o644, uid: 0, gid: 0, atime: time, mtime: time, xattrs: vec![] }
}

fn show(what: &str, bytes: u64, begun: Instant) -> f64 {
    let rate = bytes as f64 / begun.elapsed().as_secs_f64() / 1e6;
    println!("{what:<40} {rate:8.0} MB/s");
    rate
}

async fn send(home: &dyn Home, at: &HomePath, part: &Bytes, size: u64, extent: u64) {
    let made = home.make(at, &Make::File, &attrs()).await.unwrap();
    let writer = home.open_write(at, &Expect::Unchanged(made)).await.unwrap();
    for from in (0..size).step_by(extent as usize) {
        let len = extent.min(size - from);
        let parts = (0..len.div_ceil(MIB)).map(|n| part.slice(..(len - n * MIB).min(MIB) as usize)).collect();
        writer.write_at(from, parts).await.unwrap();
        if size > extent {
            writer.sync().await.unwrap();
        }
    }
    writer.finish(size, &attrs()).await.unwrap();
}

fn plain(path: &Path, part: &[u8], size: u64) {
    let mut file = std::fs::File::create(path).unwrap();
    for _ in 0..size / MIB {
        file.write_all(part).unwrap();
    }
    file.sync_all().unwrap();
}

fn plain_files(dir: &Path, part: &Bytes) {
    std::thread::scope(|threads| {
        for writer in 0..WRITERS {
            threads.spawn(move || {
                for n in (writer..FILES).step_by(WRITERS as usize) {
                    plain(&dir.join(n.to_string()), part, FILE_BYTES);
                }
            });
        }
    });
}

#[tokio::main]
async fn main() {
    let Some(dir) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: stream DIRECTORY");
        std::process::exit(2);
    };
    let part = Bytes::from((0..MIB).map(|n| (n * 7 / 3) as u8).collect::<Vec<_>>());
    let config = FileHomeConfig {
        only_of: None,
        below: None,
        run_as: None,
        path: dir.canonicalize().unwrap(),
        relation: "measurement".into(),
        is_new: true,
        only_reads: false,
        ids: IdMap::default(),
        limits: LaneLimits::default(),
    };
    let home: Arc<dyn Home> = Arc::new(FileHome::open(&weir_env::real::env(), config).await.unwrap());
    let path = |name: &str| HomePath::parse(name).unwrap();

    for round in 0..2 {
        let begun = Instant::now();
        plain(&dir.join("plain"), &part, STREAM_BYTES);
        let disk = show("one stream, plain", STREAM_BYTES, begun);
        std::fs::remove_file(dir.join("plain")).unwrap();
        let begun = Instant::now();
        send(&*home, &path("stream"), &part, STREAM_BYTES, EXTENT_BYTES).await;
        let ours = show("one stream, home", STREAM_BYTES, begun);
        std::fs::remove_file(dir.join("stream")).unwrap();
        println!("round {round}: {:.0} %", ours / disk * 100.0);

        std::fs::create_dir(dir.join("plain-files")).unwrap();
        let begun = Instant::now();
        plain_files(&dir.join("plain-files"), &part);
        let disk = show("1,000 files, plain", FILES * FILE_BYTES, begun);
        std::fs::remove_dir_all(dir.join("plain-files")).unwrap();
        home.make(&path("files"), &Make::Directory, &Attrs { mode: 0o755, ..attrs() }).await.unwrap();
        let begun = Instant::now();
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (home, part) = (home.clone(), part.clone());
                tokio::spawn(async move {
                    for n in (writer..FILES).step_by(WRITERS as usize) {
                        let at = HomePath::parse(format!("files/{n}")).unwrap();
                        send(&*home, &at, &part, FILE_BYTES, EXTENT_BYTES).await;
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.await.unwrap();
        }
        home.settle().await.unwrap();
        let ours = show("1,000 files, home", FILES * FILE_BYTES, begun);
        std::fs::remove_dir_all(dir.join("files")).unwrap();
        println!("round {round}: {:.0} %", ours / disk * 100.0);
    }
    std::fs::remove_file(dir.join(".weir-home")).unwrap();
}
