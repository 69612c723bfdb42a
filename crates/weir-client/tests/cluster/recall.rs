//! Evicted files, on a whole simulated cluster: what applications see, with movers that work, fail or die.
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_client::{Allocate, Client, ClientConfig, Handle, NoKernel, OpenMode, Recall, SetAttrs};
use weir_env::{Env, TaskHandle};
use weir_lab::*;
use weir_proto::recall::ByteRange;
use weir_proto::{ErrorKind, InodeId, NameRule, VolumeId};

const ROOT: InodeId = InodeId::ROOT;

/// What home has, by file. Nothing of it changes by itself.
#[derive(Clone, Default)]
struct Home(Arc<Mutex<BTreeMap<InodeId, Vec<u8>>>>);

impl Home {
    fn keep(&self, ino: InodeId, bytes: &[u8]) {
        self.0.lock().unwrap().insert(ino, bytes.to_vec());
    }
    fn bytes(&self, ino: InodeId, from: u64, to: u64) -> Bytes {
        Bytes::copy_from_slice(&self.0.lock().unwrap()[&ino][from as usize..to as usize])
    }
    /// All of one recall.
    async fn recall(&self, client: &Client, recall: Recall) -> weir_proto::Result<()> {
        let (ino, from, to) = (recall.work.ino, recall.work.from, recall.work.to);
        let step = 2 * recall.work.layout.stripe_bytes();
        let mut at = from;
        while at < to {
            let end = to.min(at + step);
            client.mover().fill(&recall, at, self.bytes(ino, at, end)).await?;
            at = end;
        }
        client.mover().filled(recall, None).await
    }
    /// A mover that works until its task is dropped or its node dies.
    async fn mover(&self, lab: &Lab, name: &str) -> Mover {
        let (client, home) = (lab.client(name).await, self.clone());
        let env = lab.env(name);
        let task = env.tasks.spawn("mover", async move {
            loop {
                let Ok(recalls) = client.mover().take_recalls(4, Duration::from_secs(5)).await else {
                    continue;
                };
                for recall in recalls {
                    let _ = home.recall(&client, recall).await; // another mover may have got it
                }
            }
        });
        Mover { _task: task }
    }
}

struct Mover {
    _task: TaskHandle,
}

/// A file of these bytes, closed, evicted, with home having them.
async fn file_at_home(home: &Home, client: &Client, name: &str, bytes: &[u8]) -> InodeId {
    let opened = client.create(&root(), ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
    let ino = opened.stat.attr.ino;
    client.write(opened.handle, 0, Bytes::copy_from_slice(bytes)).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    client.release(opened.handle).await.unwrap();
    home.keep(ino, bytes);
    ino
}
async fn evict(client: &Client, env: &Env, ino: InodeId) {
    evict_range(client, env, ino, 0, u64::MAX).await;
}
/// A close is reported a moment later: until then the file is open.
async fn evict_range(client: &Client, env: &Env, ino: InodeId, from: u64, to: u64) {
    let deadline = env.clock.now() + PATIENCE;
    while let Err(e) = client.evict(&root(), ino, from, to).await {
        assert_eq!(e.kind, ErrorKind::Name(NameRule::Busy), "{e}");
        assert!(env.clock.now() < deadline, "{e}");
        env.clock.sleep(Duration::from_millis(20)).await;
    }
}
async fn open(client: &Client, ino: InodeId, mode: OpenMode) -> Handle {
    client.open(&root(), ino, mode).await.unwrap().handle
}
async fn read(client: &Client, handle: Handle, at: u64, len: usize) -> Vec<u8> {
    client.read(handle, at, len).await.unwrap().concat()
}
async fn whole(client: &Client, ino: InodeId) -> Vec<u8> {
    let handle = open(client, ino, OpenMode::READ).await;
    let size = client.getattr(ino).await.unwrap().attr.size as usize;
    let bytes = read(client, handle, 0, size + 10).await;
    client.release(handle).await.unwrap();
    bytes
}
fn same(seen: &[u8], expected: &[u8], context: &str) {
    assert_eq!(seen.len(), expected.len(), "{context}: length");
    let differs = seen.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{context}: differs first at this byte");
}

#[test]
fn evicted_data_takes_no_space_and_reads_unchanged() {
    Lab::new(1).run(6, |lab| async move {
        let (home, env) = (Home::default(), lab.env("a"));
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let bytes = pattern(1, 0, 5 * STRIPE + 12_345);
        let ino = file_at_home(&home, &a, "f", &bytes).await;
        same(&whole(&b, ino).await, &bytes, "before");
        evict(&a, &env, ino).await;
        let attr = b.getattr(ino).await.unwrap().attr;
        assert_eq!((attr.size, attr.evicted), (bytes.len() as u64, bytes.len() as u64));
        assert_eq!(a.usage(ROOT).await.unwrap().bytes, 0);
        let handle = open(&a, ino, OpenMode::READ).await;
        assert_eq!(a.seek_data(handle, 1000).await.unwrap(), Some(1000), "what is at home is data");
        assert_eq!(a.seek_hole(handle, 1000).await.unwrap(), Some(bytes.len() as u64));

        let _mover = home.mover(&lab, "mover").await;
        let at = 2 * STRIPE + 77;
        same(
            &read(&b, open(&b, ino, OpenMode::READ).await, at as u64, 900).await,
            &bytes[at..][..900],
            "a piece",
        );
        same(&read(&a, handle, 0, 9 * STRIPE).await, &bytes, "all of it");
        same(&whole(&b, ino).await, &bytes, "at another client");
        let left = a.tier_state(ino).await.unwrap();
        assert_eq!((left.evicted, left.ranges, left.recalls.len()), (0, 0, 0));
        assert_eq!(a.usage(ROOT).await.unwrap().bytes, bytes.len() as u64);
        // Parity was restored with it.
        lab.kill_storage(0);
        lab.kill_storage(3);
        let c = lab.client("c").await;
        same(&whole(&c, ino).await, &bytes, "without two targets");
    });
}

#[test]
fn a_failed_recall_is_an_error_with_its_reason() {
    Lab::new(2).run(6, |lab| async move {
        let (home, env) = (Home::default(), lab.env("a"));
        let config = ClientConfig { recall_patience: Duration::from_secs(7), ..lab.config("a") };
        let a = Client::connect(env.clone(), config, Arc::new(NoKernel)).await.unwrap();
        let bytes = pattern(2, 0, 2 * STRIPE);
        let ino = file_at_home(&home, &a, "f", &bytes).await;
        evict(&a, &env, ino).await;
        let handle = open(&a, ino, OpenMode::BOTH).await;
        let begun = env.clock.now();
        let e = a.read(handle, 10, 10).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Io);
        assert!(e.context.contains("at home only") && e.context.contains("no mover is running"), "{e}");
        let took = env.clock.now().since(begun);
        assert!(took >= Duration::from_secs(7) && took < Duration::from_secs(12), "{took:?}");
        let e = a.write(handle, 10, Bytes::from_static(b"x")).await.unwrap_err();
        assert!(e.context.contains("at home only"), "{e}");

        // A failure that is known at once is returned at once.
        let mover = lab.client("mover").await;
        let failing = mover.clone();
        let _task = lab.env("mover").tasks.spawn("fails", async move {
            loop {
                for recall in failing.mover().take_recalls(1, Duration::from_secs(5)).await.unwrap() {
                    failing
                        .mover()
                        .recall_failed(recall, "home has another file there", false)
                        .await
                        .unwrap();
                }
            }
        });
        let begun = env.clock.now();
        let e = a.read(handle, 10, 10).await.unwrap_err();
        assert!(e.context.contains("home has another file there"), "{e}");
        assert!(env.clock.now().since(begun) < Duration::from_secs(3));
        // A caller may end its wait.
        assert!(a.may_wait_for_home(handle));
        tokio::select! {
            biased;
            back = a.recall(handle, Some(0), 10) => assert!(back.is_err()),
            () = env.clock.sleep(Duration::from_millis(1)) => {}
        }
    });
}

/// Each of an application's changes to a file that is evicted, as a whole or in part: later reads return what
/// a local file has.
#[test]
fn changes_of_evicted_files_keep_every_other_byte() {
    for seed in 0..8 {
        Lab::new(10 + seed).run(6, move |lab| async move {
            let (home, env) = (Home::default(), lab.env("a"));
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let _mover = home.mover(&lab, "mover").await;
            let mut model = pattern(seed, 0, 3 * STRIPE + 5_000);
            let ino = file_at_home(&home, &a, "f", &model).await;
            let mut write = |at: usize, bytes: &[u8]| {
                model.resize(model.len().max(at + bytes.len()), 0);
                model[at..at + bytes.len()].copy_from_slice(bytes);
            };
            if seed % 2 == 0 {
                evict(&a, &env, ino).await;
            } else {
                evict_range(&a, &env, ino, STRIPE as u64, u64::MAX).await;
            }
            let h = open(&a, ino, OpenMode::BOTH).await;
            let set = |size: usize| SetAttrs { size: Some(size as u64), ..SetAttrs::default() };
            match seed / 2 {
                0 => {
                    // Within a cell, across stripes, a whole stripe.
                    for (at, len) in [(STRIPE + 99, 1000), (2 * STRIPE - 50, 100), (0, STRIPE)] {
                        let bytes = pattern(90 + seed, at, len);
                        a.write(h, at as u64, Bytes::from(bytes.clone())).await.unwrap();
                        write(at, &bytes);
                    }
                }
                1 => {
                    // Appended to the tail; far behind it.
                    let bytes = pattern(91, 0, 70_000);
                    a.append(h, Bytes::from(bytes.clone())).await.unwrap();
                    write(3 * STRIPE + 5_000, &bytes);
                    a.write(h, 5 * STRIPE as u64, Bytes::from_static(b"far")).await.unwrap();
                    write(5 * STRIPE, b"far");
                }
                2 => {
                    // Cut in what is away, and grown again: zeros behind the cut.
                    a.setattr(&root(), ino, Some(h), set(STRIPE + 1_000)).await.unwrap();
                    a.setattr(&root(), ino, Some(h), set(2 * STRIPE + 7)).await.unwrap();
                    a.write(h, (2 * STRIPE) as u64, Bytes::from_static(b"new")).await.unwrap();
                    model.truncate(STRIPE + 1_000);
                    model.resize(2 * STRIPE + 7, 0);
                    model[2 * STRIPE..2 * STRIPE + 3].copy_from_slice(b"new");
                }
                _ => {
                    let (at, len) = (STRIPE - 10, 3000);
                    a.fallocate(h, Allocate::PunchHole, at as u64, len as u64).await.unwrap();
                    write(at, &vec![0; len]);
                    let to =
                        a.create(&root(), ROOT, b"copy", 0o644, true, OpenMode::BOTH).await.unwrap().handle;
                    let n = a.copy_range(h, 0, to, 0, 2 * STRIPE as u64).await.unwrap() as usize;
                    same(&read(&a, to, 0, n).await, &model[..n], "copy");
                }
            }
            a.fsync(h).await.unwrap();
            let all = read(&a, h, 0, model.len() + 1).await;
            same(&all, &model, &format!("seed {seed}, at the writer"));
            a.release(h).await.unwrap();
            same(&whole(&b, ino).await, &model, &format!("seed {seed}, at another client"));
            // And again, from what home has now.
            home.keep(ino, &model);
            evict(&a, &env, ino).await;
            same(&whole(&b, ino).await, &model, &format!("seed {seed}, evicted once more"));
            let truncated = OpenMode { truncate: true, ..OpenMode::WRITE };
            evict(&a, &env, ino).await;
            let h = open(&a, ino, truncated).await;
            a.write(h, 5, Bytes::from_static(b"short")).await.unwrap();
            a.release(h).await.unwrap();
            same(&whole(&b, ino).await, b"\0\0\0\0\0short", "cut to nothing");
        });
    }
}

/// A recall returns the file itself: so it must be unchanged, and no client may be about to change it.
#[test]
fn evicted_bytes_are_read_in_a_snapshot_while_unchanged() {
    Lab::new(43).run(6, |lab| async move {
        let (home, env) = (Home::default(), lab.env("a"));
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let _mover = home.mover(&lab, "mover").await;
        let bytes = pattern(3, 0, 2 * STRIPE + 100);
        let mut files = Vec::new();
        for name in ["unchanged", "changed", "open", "cut", "removed"] {
            let ino = file_at_home(&home, &a, name, &bytes).await;
            evict(&a, &env, ino).await;
            files.push(ino);
        }
        let snapshot = a.take_snapshot(&root(), VolumeId::ROOT, "s").await.unwrap().number;
        let [unchanged, changed, is_open, truncated, removed] = files[..] else { unreachable!() };
        let early = b.snapshot_open(&root(), snapshot, changed).await.unwrap();
        let then = async |ino| {
            let file = b.snapshot_open(&root(), snapshot, ino).await?;
            b.snapshot_read(&file, 0, 9 * STRIPE).await.map(|parts| parts.concat())
        };
        same(&then(unchanged).await.unwrap(), &bytes, "brought back");
        same(&then(changed).await.unwrap(), &bytes, "not changed yet");
        evict(&a, &env, changed).await;
        same(&b.snapshot_read(&early, 5, 100).await.unwrap().concat(), &bytes[5..105], "evicted once more");

        let writer = open(&a, changed, OpenMode::WRITE).await;
        a.write(writer, 10, Bytes::from_static(b"new")).await.unwrap();
        let _held = open(&a, is_open, OpenMode::WRITE).await;
        let set = SetAttrs { size: Some(50), ..SetAttrs::default() };
        a.setattr(&root(), truncated, None, set).await.unwrap();
        a.unlink(&root(), ROOT, b"removed").await.unwrap();
        for ino in [changed, is_open, truncated, removed] {
            let e = then(ino).await.unwrap_err();
            assert!(e.kind == ErrorKind::Io && e.context.contains("at home only"), "{ino}: {e}");
        }
        assert_eq!(
            b.snapshot_read(&early, 5, 100).await.unwrap_err().kind,
            ErrorKind::Io,
            "also of what is open"
        );
    });
}

/// Readers with and without leases, while the file is evicted and recalled again and again under them. No
/// hole is reported either.
#[test]
fn readers_see_no_zeros_during_evictions_and_recalls() {
    for seed in 0..12 {
        Lab::new(40 + seed).run(6, move |lab| async move {
            let (home, env) = (Home::default(), lab.env("a"));
            let a = lab.client("a").await;
            let _movers = (home.mover(&lab, "m1").await, home.mover(&lab, "m2").await);
            let bytes = Arc::new(pattern(seed, 0, 3 * STRIPE + 100));
            let ino = file_at_home(&home, &a, "f", &bytes).await;
            let (tx, mut rx) = tokio::sync::mpsc::channel(4);
            let mut tasks = Vec::new();
            for n in 0..3u64 {
                let (name, bytes, tx) = (format!("r{n}"), bytes.clone(), tx.clone());
                // Little memory: most reads go to targets.
                let reader = lab.client_with(&name, 1 << 20, Arc::new(NoKernel)).await;
                let env = lab.env(&name);
                // Its reads arrive after what happens meanwhile: leases are recalled, stripes dropped.
                for target in 0..6 {
                    let late = Duration::from_millis(n * 60 + target);
                    lab.world().slow_link(&name, &format!("s{target}"), late);
                }
                let node = env.clone();
                tasks.push(node.tasks.spawn("reader", async move {
                    let h = open(&reader, ino, OpenMode::READ).await;
                    for round in 0..60u64 {
                        let at = env.rng.below(bytes.len() as u64) as usize;
                        let len = (1 + env.rng.below(2 * STRIPE as u64) as usize).min(bytes.len() - at);
                        let seen = read(&reader, h, at as u64, len).await;
                        let context = format!("reader {n}, round {round}, from {at}");
                        same(&seen, &bytes[at..at + len], &context);
                        let (at, end) = (at as u64, bytes.len() as u64);
                        assert_eq!(reader.seek_data(h, at).await.unwrap(), Some(at), "data: {context}");
                        assert_eq!(reader.seek_hole(h, at).await.unwrap(), Some(end), "a hole: {context}");
                    }
                    tx.send(n).await.unwrap();
                }));
            }
            let mut done = 0;
            while done < 3 {
                let pause = Duration::from_millis(env.rng.below(500));
                tokio::select! {
                    biased;
                    Some(_) = rx.recv() => done += 1,
                    () = env.clock.sleep(pause) => {
                        let from = env.rng.below(3) * STRIPE as u64;
                        match a.evict(&root(), ino, from, u64::MAX).await {
                            Ok(_) => {}
                            Err(e) => assert_eq!(e.kind, ErrorKind::Name(NameRule::Busy), "{e}"),
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn movers_that_die_or_come_late_change_nothing() {
    Lab::new(60).run(6, |lab| async move {
        let (home, env) = (Home::default(), lab.env("a"));
        let a = lab.client("a").await;
        let bytes = pattern(6, 0, 4 * STRIPE);
        let ino = file_at_home(&home, &a, "f", &bytes).await;
        evict(&a, &env, ino).await;
        a.want_recall(ino, 0, u64::MAX).await.unwrap();
        // It fills a part, with the bytes that home had before they were repaired there, and hangs.
        let late = lab.client("late").await;
        let stale = late.mover().take_recalls(8, Duration::from_secs(5)).await.unwrap().remove(0);
        late.mover().fill(&stale, 0, Bytes::from(vec![0xee; STRIPE])).await.unwrap();
        // Another one dies in the middle.
        let dying = lab.client("dying").await;
        lab.cut_off("late");
        let begun = env.clock.now();
        let taken = loop {
            let mut taken = dying.mover().take_recalls(8, Duration::from_secs(5)).await.unwrap();
            if let Some(taken) = taken.pop() {
                break taken;
            }
            assert!(env.clock.now().since(begun) < PATIENCE * 3);
        };
        assert!(taken.work.token_epoch > stale.work.token_epoch);
        dying.mover().fill(&taken, 2 * STRIPE as u64, Bytes::from(vec![0xdd; STRIPE])).await.unwrap();
        lab.world().kill("dying");
        let _mover = home.mover(&lab, "mover").await;
        same(&whole(&a, ino).await, &bytes, "brought by the third");
        let h = open(&a, ino, OpenMode::BOTH).await;
        a.write(h, STRIPE as u64, Bytes::from_static(b"newer")).await.unwrap();
        a.fsync(h).await.unwrap();
        // The first one wakes up and continues.
        lab.let_back("late");
        for stripe in 0..4 {
            let again =
                late.mover().fill(&stale, (stripe * STRIPE) as u64, Bytes::from(vec![0xee; STRIPE])).await;
            assert!(again.is_err(), "stripe {stripe}");
        }
        assert_eq!(late.mover().filled(stale, None).await.unwrap_err().kind, ErrorKind::Stale);
        let mut expected = bytes.clone();
        expected[STRIPE..STRIPE + 5].copy_from_slice(b"newer");
        let b = lab.client("b").await;
        a.release(h).await.unwrap();
        same(&whole(&b, ino).await, &expected, "after the late one");
    });
}

/// A target is away while stripes are evicted, and again while they are recalled.
#[test]
fn a_returned_target_has_no_evicted_bytes() {
    Lab::new(70).run(6, |lab| async move {
        let (home, env) = (Home::default(), lab.env("a"));
        let a = lab.client("a").await;
        let old = pattern(7, 0, 4 * STRIPE);
        let ino = file_at_home(&home, &a, "f", &old).await;
        lab.kill_storage(1);
        evict(&a, &env, ino).await;
        // What home has is newer than what the target that is away holds.
        let new = pattern(8, 0, 4 * STRIPE);
        home.keep(ino, &new);
        let h = open(&a, ino, OpenMode::READ).await;
        let mover = home.mover(&lab, "m1").await;
        same(&read(&a, h, 0, STRIPE).await, &new[..STRIPE], "while it is away");
        lab.storage(1).await;
        lab.all_current().await.unwrap();
        for lost in [0, 2] {
            lab.kill_storage(lost);
        }
        same(&read(&a, h, 0, 4 * STRIPE).await, &new, "it is back, two others are lost");
        drop(mover);
    });
}

/// The front of a file is evicted while it is written, and its writer continues: at the end without noticing,
/// elsewhere as in any evicted file.
#[test]
fn the_front_of_an_open_file_is_evicted_and_recalled() {
    Lab::new(90).run(6, |lab| async move {
        let (home, env) = (Home::default(), lab.env("a"));
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let mut model = pattern(9, 0, 4 * STRIPE + 1_000);
        let opened = a.create(&root(), ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap();
        let (ino, h) = (opened.stat.attr.ino, opened.handle);
        a.write(h, 0, Bytes::from(model.clone())).await.unwrap();
        let e = a.evict(&root(), ino, 0, u64::MAX).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Name(NameRule::Busy), "nothing of it is committed: {e}");
        a.fsync(h).await.unwrap();
        let e = b.evict(&root(), ino, 0, u64::MAX).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Name(NameRule::Busy), "somebody else cannot do it: {e}");
        home.keep(ino, &model);
        let gone = a.evict(&root(), ino, 0, 2 * STRIPE as u64 + 5).await.unwrap();
        assert_eq!(gone.ranges, [ByteRange { from: 0, to: 2 * STRIPE as u64 }]);
        let gone = a.evict(&root(), ino, 0, u64::MAX).await.unwrap();
        assert_eq!(
            gone.ranges,
            [ByteRange { from: 2 * STRIPE as u64, to: 4 * STRIPE as u64 }],
            "not the end"
        );
        assert_eq!(a.usage(ROOT).await.unwrap().bytes, 1_000);
        // No mover recalls anything: a writer at the end waits for none.
        let more = pattern(10, 0, 2 * STRIPE);
        assert!(a.try_write(h, model.len() as u64, &more).is_some(), "the lease was kept");
        model.extend_from_slice(&more);
        a.fsync(h).await.unwrap();
        let _mover = home.mover(&lab, "mover").await;
        let at = STRIPE + 77;
        a.write(h, at as u64, Bytes::from_static(b"within")).await.unwrap();
        model[at..at + 6].copy_from_slice(b"within");
        same(&read(&a, h, 0, model.len() + 9).await, &model, "at the writer");
        a.release(h).await.unwrap();
        same(&whole(&b, ino).await, &model, "at another client");
        // Parity was restored with it.
        lab.kill_storage(0);
        lab.kill_storage(3);
        let c = lab.client("c").await;
        same(&whole(&c, ino).await, &model, "without two targets");
        drop(env);
    });
}

/// All operations of a program on a file while its front is evicted, at the same time: no byte is lost, none
/// is zero. Changes of a removed file are not shipped: home may have an older state of it.
#[test]
fn a_removed_file_that_is_still_open_is_not_evicted() {
    Lab::new(85).run(6, |lab| async move {
        let (a, home, data) = (lab.client("a").await, Home::default(), pattern(1, 0, STRIPE));
        let ino = file_at_home(&home, &a, "f", &data).await;
        let h = a.open(&root(), ino, OpenMode::BOTH).await.unwrap().handle;
        a.unlink(&root(), ROOT, b"f").await.unwrap();
        a.write(h, 10, Bytes::from_static(b"newer than home")).await.unwrap();
        a.fsync(h).await.unwrap();
        let e = a.evict(&root(), ino, 0, u64::MAX).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Name(NameRule::Busy), "{e}");
        assert!(e.to_string().contains("it is removed"), "{e}");
        a.release(h).await.unwrap();
    });
}

#[test]
fn a_writer_and_the_eviction_of_its_file_never_lose_a_byte() {
    for seed in 0..16 {
        Lab::new(100 + seed).run(6, move |lab| async move {
            let (home, env) = (Home::default(), lab.env("a"));
            // Little memory: most reads go to targets.
            let a = lab.client_with("a", 4 << 20, Arc::new(NoKernel)).await;
            let _movers = (home.mover(&lab, "m1").await, home.mover(&lab, "m2").await);
            for target in 0..6 {
                lab.world().slow_link(
                    "a",
                    &format!("s{target}"),
                    Duration::from_millis(seed % 4 * 30 + target),
                );
            }
            if seed % 3 == 0 {
                // Its request is carried out long before it gets the answer.
                lab.world().slow_link("a", "meta", Duration::from_millis(150));
            }
            let opened = a.create(&root(), ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap();
            let (ino, h) = (opened.stat.attr.ino, opened.handle);
            let mut model = pattern(seed, 0, 3 * STRIPE + 100);
            a.write(h, 0, Bytes::from(model.clone())).await.unwrap();
            let mut gone = 0;
            for round in 0..40u64 {
                a.fsync(h).await.unwrap();
                lab.home_has(ino, a.getattr(ino).await.unwrap().attr.data_version);
                home.keep(ino, &model);
                let below = |n: usize| env.rng.below(n as u64) as usize;
                let (at, len, read_at) = (below(model.len()), 1 + below(STRIPE / 2), below(model.len()));
                let before = model.clone();
                let what = below(6);
                let root_cred = root();
                let evicting = a.evict(&root_cred, ino, 0, u64::MAX);
                let changing = async {
                    env.clock.sleep(Duration::from_millis(env.rng.below(200))).await;
                    let bytes = Bytes::from(pattern(1000 + seed * 100 + round, at, len));
                    match what {
                        0 | 1 => drop(a.write(h, at as u64, bytes).await.unwrap()),
                        2 => drop(a.append(h, bytes).await.unwrap()),
                        3 => a.fallocate(h, Allocate::PunchHole, at as u64, len as u64).await.unwrap(),
                        4 => {
                            let size = SetAttrs { size: Some(at.max(STRIPE) as u64), ..SetAttrs::default() };
                            let _ = a.setattr(&root(), ino, Some(h), size).await.unwrap();
                        }
                        _ => {}
                    }
                };
                let reading = async {
                    env.clock.sleep(Duration::from_millis(env.rng.below(300))).await;
                    let end = (read_at + 2 * STRIPE).min(before.len());
                    // Concurrent changes may be either.
                    if what == 5 {
                        let seen = read(&a, h, read_at as u64, end - read_at).await;
                        same(&seen, &before[read_at..end], &format!("seed {seed}, round {round}, beside"));
                    }
                };
                let (evicted, (), ()) = tokio::join!(biased; evicting, changing, reading);
                gone += evicted.map_or(0, |e| e.ranges.len());
                let end = at + len;
                match what {
                    0 | 1 => {
                        model.resize(model.len().max(end), 0);
                        model[at..end].copy_from_slice(&pattern(1000 + seed * 100 + round, at, len));
                    }
                    2 => model.extend_from_slice(&pattern(1000 + seed * 100 + round, at, len)),
                    3 => {
                        let end = end.min(model.len());
                        model[at..end].fill(0);
                    }
                    4 => model.resize(at.max(STRIPE), 0),
                    _ => {}
                }
                model.truncate(6 * STRIPE);
                if model.len() == 6 * STRIPE {
                    let size = SetAttrs { size: Some(model.len() as u64), ..SetAttrs::default() };
                    a.setattr(&root(), ino, Some(h), size).await.unwrap();
                }
                let seen = read(&a, h, 0, model.len() + 1).await;
                same(&seen, &model, &format!("seed {seed}, round {round}, after {what} at {at} of {len}"));
            }
            assert!(gone > 5, "hardly anything was evicted: {gone}");
            a.release(h).await.unwrap();
            let b = lab.client("b").await;
            same(&whole(&b, ino).await, &model, &format!("seed {seed}, at another client"));
        });
    }
}

/// The answer to an eviction is lost with the leader or the connection: the writer continues with the actual
/// state.
#[test]
fn an_eviction_without_an_answer_is_one_or_none() {
    for seed in 0..6 {
        Lab::new(130 + seed).run(6, move |lab| async move {
            let (home, env) = (Home::default(), lab.env("a"));
            let a = lab.client("a").await;
            let mut model = pattern(seed, 0, 3 * STRIPE);
            let opened = a.create(&root(), ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap();
            let (ino, h) = (opened.stat.attr.ino, opened.handle);
            a.write(h, 0, Bytes::from(model.clone())).await.unwrap();
            a.fsync(h).await.unwrap();
            home.keep(ino, &model);
            lab.world().slow_link("a", "meta", Duration::from_millis(40));
            let root_cred = root();
            let trouble = async {
                env.clock.sleep(Duration::from_millis(15 * seed)).await;
                lab.kill_meta();
                env.clock.sleep(Duration::from_millis(300)).await;
                lab.meta().await;
            };
            let (_, ()) = tokio::join!(biased; a.evict(&root_cred, ino, 0, u64::MAX), trouble);
            let _mover = home.mover(&lab, "mover").await;
            a.write(h, 5, Bytes::from_static(b"after")).await.unwrap();
            model[5..10].copy_from_slice(b"after");
            a.fsync(h).await.unwrap();
            same(&read(&a, h, 0, model.len()).await, &model, &format!("seed {seed}, at the writer"));
            a.release(h).await.unwrap();
            let b = lab.client("b").await;
            same(&whole(&b, ino).await, &model, &format!("seed {seed}, at another client"));
        });
    }
}

/// A client asks for the attributes of a file again and again while it is written and its front is evicted:
/// all of them make progress.
#[test]
fn a_writer_under_constant_getattr_goes_on_and_is_evicted() {
    for seed in 0..4u64 {
        Lab::new(150 + seed).run(6, move |lab| async move {
            let (home, env) = (Home::default(), lab.env("a"));
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let opened = a.create(&root(), ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap();
            let (ino, h) = (opened.stat.attr.ino, opened.handle);
            let scans = Arc::new(Mutex::new(0u64));
            let (counter, at_b) = (scans.clone(), lab.env("b"));
            let pause = Duration::from_micros([10, 100, 1_000, 10_000][seed as usize]);
            let _scanning = lab.env("b").tasks.spawn("looks", async move {
                loop {
                    b.getattr(ino).await.unwrap();
                    *counter.lock().unwrap() += 1;
                    at_b.clock.sleep(pause).await;
                }
            });
            let (mut model, mut gone, mut slowest) = (Vec::new(), 0, Duration::ZERO);
            for round in 0..64 {
                let bytes = pattern(seed, model.len(), STRIPE / 2);
                let begun = env.clock.now();
                a.write(h, model.len() as u64, Bytes::from(bytes.clone())).await.unwrap();
                model.extend_from_slice(&bytes);
                if round % 4 == 3 {
                    a.fsync(h).await.unwrap();
                    home.keep(ino, &model);
                    gone +=
                        a.evict(&root(), ino, 0, u64::MAX).await.map_or(0, |evicted| evicted.ranges.len());
                }
                slowest = slowest.max(env.clock.now().since(begun));
            }
            let scans = *scans.lock().unwrap();
            let what = format!("seed {seed}: {gone} of 16 evictions, {scans} looks, {slowest:?} at most");
            assert!(gone >= 14 && slowest < Duration::from_millis(200), "{what}");
            assert!(scans >= 2, "{what}");
            let _mover = home.mover(&lab, "mover").await;
            a.release(h).await.unwrap();
            same(&whole(&lab.client("c").await, ino).await, &model, "at another client");
        });
    }
}

/// Writes in flight while the front of the file is evicted are fenced with it, and are sent again at once.
#[test]
fn sends_go_on_while_their_writer_evicts_the_front() {
    Lab::new(160).run(6, |lab| async move {
        let (a, env) = (lab.client("a").await, lab.env("a"));
        let opened = a.create(&root(), ROOT, b"f", 0o644, true, OpenMode::BOTH).await.unwrap();
        let (ino, h) = (opened.stat.attr.ino, opened.handle);
        let (mut model, mut slowest) = (Vec::new(), Duration::ZERO);
        for storage in 0..6 {
            lab.world().slow_link("a", &format!("s{storage}"), Duration::from_millis(20));
        }
        for _ in 0..8 {
            for synced in [true, false] {
                let bytes = pattern(7, model.len(), 3 * STRIPE);
                a.write(h, model.len() as u64, Bytes::from(bytes.clone())).await.unwrap();
                model.extend_from_slice(&bytes);
                if synced {
                    a.fsync(h).await.unwrap();
                }
            }
            a.evict(&root(), ino, 0, u64::MAX).await.unwrap();
            let begun = env.clock.now();
            a.fsync(h).await.unwrap();
            slowest = slowest.max(env.clock.now().since(begun));
        }
        assert!(slowest < Duration::from_millis(400), "{slowest:?}");
        let home = Home::default();
        home.keep(ino, &model);
        let _mover = home.mover(&lab, "mover").await;
        a.release(h).await.unwrap();
        same(&whole(&lab.client("c").await, ino).await, &model, "at another client");
    });
}
