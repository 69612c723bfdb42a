//! The contract on the engine on the machine's own disk, and what a reopened directory must hold.
mod common;

use common::{Lcg, Op, contract, dump, get, key, tx};
use std::path::Path;
use std::sync::Arc;
use weir_env::{Env, OpenMode};
use weir_kv::{Engine, EngineConfig, Kv};
use weir_proto::ErrorKind;

/// Small, so that segments end, fold and come round again within a test.
const SMALL: EngineConfig =
    EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 1 << 20, journal_keep_bytes: 0 };

async fn open(env: &Env, dir: &Path) -> Arc<Engine> {
    Engine::open(env, dir, SMALL).await.unwrap()
}

async fn close(engine: Arc<Engine>) {
    engine.wait_durable(dump(&*engine).0).await.unwrap();
}

#[tokio::test]
async fn keeps_the_contract() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    contract(&*open(&env, dir.path()).await).await;
}

#[tokio::test]
async fn a_reopened_store_is_the_same() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let mut lcg = Lcg(5);
    let mut model = common::Model::new();
    let mut seq = weir_kv::CommitSeq(0);
    for round in 0..12 {
        let engine = open(&env, dir.path()).await;
        assert_eq!(dump(&*engine), (seq, model.clone()), "round {round}");
        assert_eq!(engine.durable(), seq);
        for _ in 0..lcg.below(3000) {
            let ops: Vec<Op> = (0..1 + lcg.below(4)).map(|_| Op::random(|n| lcg.below(n))).collect();
            seq = tx(&*engine, |t| ops.iter().for_each(|op| op.run(t)));
            ops.iter().for_each(|op| op.run_on(&mut model));
        }
        if round % 4 == 3 {
            engine.checkpoint().await.unwrap();
        }
        close(engine).await;
    }
    let names: Vec<_> = env.disk.read_dir(dir.path()).unwrap().into_iter().map(|e| e.name).collect();
    assert!(names.len() <= 7, "segments are given up: {names:?}");
}

#[tokio::test]
async fn many_wait_at_once() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&env, dir.path()).await;
    let mut waits = Vec::new();
    for n in 0..5000u32 {
        let seq = tx(&*engine, |t| t.put(&n.to_be_bytes(), &[7; 100]));
        waits.push(engine.wait_durable(seq));
    }
    for wait in waits {
        wait.await.unwrap();
    }
    let never = engine.wait_durable(weir_kv::CommitSeq(1 << 40)).await;
    assert_eq!(never.unwrap_err().kind, ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_for_disks_flush_for_each_other() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&env, dir.path()).await;
    for round in 0..40u32 {
        let (tx, mut rx) = tokio::sync::mpsc::channel(64);
        for n in 0..24u32 {
            let (tx, engine, tasks) = (tx.clone(), engine.clone(), env.tasks.clone());
            env.tasks.spawn_for_disk("test", async move {
                let writer = engine.clone();
                let put = move || {
                    writer.transact_more(&mut |t| {
                        t.put(&(round * 24 + n).to_be_bytes(), &[7; 100]);
                        Ok(())
                    })
                };
                let seq = tasks.blocking(put).await.unwrap();
                engine.flush_here();
                engine.wait_durable(seq).await.unwrap();
                assert!(engine.durable() >= seq);
                tx.send(n).await.unwrap();
            });
        }
        drop(tx);
        let mut answered = Vec::new();
        while let Some(n) = rx.recv().await {
            answered.push(n);
        }
        answered.sort_unstable();
        assert!(answered.into_iter().eq(0..24), "round {round}");
    }
    let expected = dump(&*engine);
    drop(engine);
    assert_eq!(dump(&*open(&env, dir.path()).await), expected, "and it is on the disk");
}

/// The writer meets the folder at each end of a segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_is_never_refused() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&env, dir.path()).await;
    for n in 0..60_000u32 {
        tx(&*engine, |t| t.put(&(n % 500).to_be_bytes(), &[7; 1000]));
    }
    close(engine).await;
}

#[tokio::test]
async fn large_values_and_too_large_transactions() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&env, dir.path()).await;
    for n in 0..40u8 {
        tx(&*engine, |t| t.put(&key(n), &vec![n; 60 << 10]));
    }
    let refused = engine.transact(&mut |t| {
        t.put(b"k", &vec![0; 300 << 10]);
        Ok(())
    });
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid);
    close(engine).await;
    let engine = open(&env, dir.path()).await;
    for n in 0..40u8 {
        assert_eq!(get(&*engine, &key(n)), Some(vec![n; 60 << 10]));
    }
}

#[tokio::test]
async fn one_process_at_a_time() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let _engine = open(&env, dir.path()).await;
    let second = Engine::open(&env, dir.path(), SMALL).await;
    assert_eq!(second.err().unwrap().kind, ErrorKind::Unavailable);
}

/// Three transactions, flushed one by one, and the file they are in.
async fn three(env: &Env, dir: &Path) -> (std::path::PathBuf, Vec<u8>) {
    let engine = open(env, dir).await;
    for n in 1..=3u8 {
        let seq = tx(&*engine, |t| t.put(&[n], &[n; 100]));
        engine.wait_durable(seq).await.unwrap();
    }
    drop(engine);
    let path = dir.join("journal-0000000000000001");
    let bytes = env.disk.read(&path).unwrap();
    (path, bytes)
}

/// Header 32 + kind, key length, key, value length, value: 1 + 2 + 1 + 4 + 100, padded.
const RECORD: usize = 144;

fn overwrite(env: &Env, path: &Path, offset: usize, bytes: &[u8]) {
    env.disk.open(path, OpenMode::WRITE).unwrap().write_all_at(bytes, offset as u64).unwrap();
}

#[tokio::test]
async fn a_torn_end_is_truncated_and_stays_so() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let (path, bytes) = three(&env, dir.path()).await;
    let third = 4096 + 2 * RECORD;
    overwrite(&env, &path, third + 40, &[0xff; 8]);
    let engine = open(&env, dir.path()).await;
    assert_eq!(dump(&*engine).0.0, 2);
    assert_eq!(get(&*engine, &[3]), None);
    close(engine).await;
    let after = env.disk.read(&path).unwrap();
    assert_eq!(after[..third], bytes[..third]);
    assert!(after[third..].iter().all(|b| *b == 0));
}

#[tokio::test]
async fn damage_to_what_was_durable_is_named() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = three(&env, dir.path()).await;
    overwrite(&env, &path, 4096 + 40, &[0xff; 8]);
    let error = Engine::open(&env, dir.path(), SMALL).await.err().unwrap();
    assert_eq!(error.kind, ErrorKind::Damaged);
    assert!(error.context.contains("journal-0000000000000001"), "{error}");
    assert!(error.context.contains("byte 4096"), "{error}");
}

#[tokio::test]
async fn a_missing_segment_is_named() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let engine = open(&env, dir.path()).await;
    tx(&*engine, |t| t.put(b"k", b"v"));
    engine.checkpoint().await.unwrap();
    drop(engine);
    // The next open waits until the tasks of the one before have ended, so that they make no segment again.
    drop(open(&env, dir.path()).await);
    drop(Engine::open(&env, dir.path(), SMALL).await.unwrap());
    let path = dir.path().join("journal-0000000000000002");
    env.disk.remove_file(&path).unwrap();
    let error = Engine::open(&env, dir.path(), SMALL).await.err().unwrap();
    assert_eq!(error.kind, ErrorKind::Damaged);
    assert!(error.context.contains("journal-0000000000000002"), "{error}");
}
