//! A store that is one copy of several: epochs, records that are taken and cut back, the gate before folds,
//! the transfer of the whole state; with power cuts at every place.
mod common;

use common::{Lcg, Model, Op, dump, tx};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_env::sim::{SimConfig, World};
use weir_env::{Env, OpenMode};
use weir_kv::crash_points::OF_TRUNCATIONS;
use weir_kv::epochs::{Epochs, Shared};
use weir_kv::{Alone, CommitSeq, Copies, Engine, EngineConfig, Entry, Import, Kv, is_unfinished};
use weir_proto::{Epoch, ErrorKind};

const SMALL: EngineConfig =
    EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 1 << 20, journal_keep_bytes: 0 };
const KEEPS: EngineConfig = EngineConfig { journal_keep_bytes: 64 << 20, ..SMALL };
const DIR: &str = "/state";

async fn open_with(env: &Env, config: EngineConfig) -> Arc<Engine> {
    Engine::open(env, Path::new(DIR), config).await.unwrap_or_else(|e| panic!("open: {e}"))
}
async fn open(env: &Env) -> Arc<Engine> {
    open_with(env, SMALL).await
}

/// Another copy that keeps the records that the test chooses.
#[derive(Default)]
struct Other {
    kept: AtomicU64,
    appended: Mutex<Vec<(CommitSeq, Vec<u8>)>>,
}
impl Copies for Other {
    fn append(&self, seq: CommitSeq, body: &[u8]) {
        self.appended.lock().unwrap().push((seq, body.to_vec()));
    }
    fn flush(&self) {}
    fn kept(&self) -> CommitSeq {
        CommitSeq(self.kept.load(Ordering::Acquire))
    }
}
impl Other {
    fn keep(&self, engine: &Engine, seq: CommitSeq) {
        self.kept.store(seq.0, Ordering::Release);
        engine.settle();
    }
}

fn simulated<F: Future<Output = ()> + 'static>(seed: u64, test: impl FnOnce(World) -> F + 'static) {
    let world = World::new(seed, SimConfig::default());
    let w = world.clone();
    world.run(async move { test(w).await });
}

/// A record's body: the value is put under `k`.
fn body(value: &[u8; 1]) -> bytes::Bytes {
    [&b"\x01\x01\0k\x01\0\0\0"[..], value].concat().into()
}

/// A leader's records and the state after each.
struct Written {
    entries: Vec<Entry>,
    states: Vec<Model>,
}

/// Some thousands of random transactions of a few epochs, by a leader that is alone.
async fn written(env: &Env, count: usize, value_bytes: usize) -> (Arc<Engine>, Written) {
    let config = EngineConfig { journal_keep_bytes: 256 << 20, ..SMALL };
    let engine = open_with(env, config).await;
    let mut lcg = Lcg(count as u64);
    let mut states = vec![Model::new()];
    for n in 0..count {
        if n % 50 == 0 {
            engine.lead(Epoch(1 + n as u64 / 50), Arc::new(Alone)).await.unwrap();
        }
        let mut op = Op::random(|n| lcg.below(n));
        if let Op::Put(_, value) = &mut op {
            value.resize(value_bytes, 7);
        }
        let mut state = states.last().unwrap().clone();
        op.run_on(&mut state);
        tx(&*engine, |t| {
            op.run(t);
            t.put(b"count", &n.to_le_bytes());
        });
        state.insert(b"count".to_vec(), n.to_le_bytes().to_vec());
        states.push(state);
    }
    engine.wait_durable(CommitSeq(count as u64)).await.unwrap();
    let mut reader = engine.reader(CommitSeq(0)).unwrap().expect("all is kept");
    let mut entries = Vec::new();
    while entries.len() < count {
        let some = reader.next(100_000).unwrap().expect("all is kept");
        assert!(!some.is_empty());
        entries.extend(some);
    }
    (engine, Written { entries, states })
}

async fn follows(env: &Env, config: EngineConfig, epoch: u64, written: &[Entry]) -> Arc<Engine> {
    let engine = open_with(env, config).await;
    engine.follow(Epoch(epoch)).await.unwrap();
    engine.truncate_to(Epoch(epoch), engine.epochs().last()).await.unwrap();
    for entry in written {
        engine.apply(Epoch(epoch), std::slice::from_ref(entry)).unwrap();
    }
    engine
}

#[test]
fn a_follower_becomes_what_the_leader_is() {
    simulated(1, |w| async move {
        let (leader, written) = written(&w.node("a"), 900, 1500).await;
        let epoch = leader.epoch();
        let follower = open(&w.node("b")).await;
        follower.follow(epoch).await.unwrap();
        assert_eq!(follower.epochs().shared_with(&leader.epochs()), Shared::UpTo(CommitSeq(0)));
        follower.truncate_to(epoch, CommitSeq(0)).await.unwrap();
        for some in written.entries.chunks(37) {
            follower.apply(epoch, some).unwrap();
            follower.note_durable(epoch, some.last().unwrap().seq).unwrap();
        }
        follower.wait_synced(CommitSeq(900)).await.unwrap();
        assert_eq!(dump(&*follower), dump(&*leader));
        assert_eq!(follower.epochs().shared_with(&leader.epochs()), Shared::UpTo(CommitSeq(900)));
        assert_eq!(follower.epoch(), epoch);
        drop(follower);
        w.power_cut("b");
        let follower = open(&w.node("b")).await;
        assert_eq!(dump(&*follower), dump(&*leader));
        // It can lead, and what it then makes follows on.
        follower.lead(Epoch(epoch.0 + 1), Arc::new(Alone)).await.unwrap();
        let seq = tx(&*follower, |t| t.put(b"new", b"leader"));
        assert_eq!(seq, CommitSeq(901));
        follower.wait_durable(seq).await.unwrap();
    });
}

#[test]
fn numbers_of_two_kinds_meet_on_a_follower_as_on_the_leader() {
    simulated(1, |w| async move {
        let leader = open(&w.node("a")).await;
        let other = Arc::new(Other::default());
        leader.lead(Epoch(1), other.clone()).await.unwrap();
        tx(&*leader, |t| t.max(b"n", 7));
        other.keep(&leader, CommitSeq(1));
        leader.checkpoint().await.unwrap(); // the leader's segment ends: the next change need not be resolved
        tx(&*leader, |t| t.add(b"n", 5));
        let appended = other.appended.lock().unwrap().clone();
        let entries: Vec<Entry> = appended
            .into_iter()
            .map(|(seq, body)| Entry { seq, epoch: Epoch(1), body: body.into() })
            .collect();
        let follower = follows(&w.node("b"), SMALL, 1, &entries).await;
        assert_eq!(dump(&*follower), dump(&*leader));
        follower.wait_synced(CommitSeq(2)).await.unwrap();
        drop(follower);
        w.kill("b");
        assert_eq!(dump(&*open(&w.node("b")).await), dump(&*leader));
    });
}

#[test]
fn nothing_is_durable_before_the_other_copies_keep_it() {
    simulated(1, |w| async move {
        let env = w.node("a");
        let engine = open(&env).await;
        let other = Arc::new(Other::default());
        engine.lead(Epoch(1), other.clone()).await.unwrap();
        let seq = tx(&*engine, |t| t.put(b"k", b"v"));
        engine.wait_synced(seq).await.unwrap();
        assert_eq!((engine.synced(), engine.durable()), (seq, CommitSeq(0)));
        let wait = engine.wait_durable(seq);
        other.keep(&engine, seq);
        wait.await.unwrap();
        // It keeps more than is synced here.
        let next = tx(&*engine, |t| t.put(b"k", b"w"));
        other.keep(&engine, CommitSeq(9));
        engine.wait_durable(next).await.unwrap();
        assert_eq!(engine.durable(), next);
        // A caller that waits for a record that no copy may keep gets an error.
        other.kept.store(next.0, Ordering::Release);
        let lost = tx(&*engine, |t| t.put(b"k", b"x"));
        let wait = engine.wait_durable(lost);
        engine.follow(Epoch(2)).await.unwrap();
        assert_eq!(wait.await.unwrap_err().kind, ErrorKind::Stale);
        // The number becomes another leader's record.
        engine.truncate_to(Epoch(2), next).await.unwrap();
        engine.apply(Epoch(2), &[Entry { seq: lost, epoch: Epoch(2), body: body(b"y") }]).unwrap();
        let late = engine.wait_durable(lost);
        engine.note_durable(Epoch(2), lost).unwrap();
        assert_eq!(late.await.unwrap_err().kind, ErrorKind::Stale);
        assert_eq!(engine.durable(), lost);
    });
}

#[test]
fn handles_of_an_earlier_lead_change_nothing() {
    simulated(1, |w| async move {
        let env = w.node("a");
        let engine = open(&env).await;
        engine.lead(Epoch(1), Arc::new(Alone)).await.unwrap();
        let first = engine.led();
        let seq = tx(&*first, |t| t.put(b"k", b"v"));
        // Without a break it is the same lead.
        engine.lead(Epoch(2), Arc::new(Alone)).await.unwrap();
        first.wait_durable(seq).await.unwrap();
        tx(&*first, |t| t.put(b"k", b"w"));
        engine.follow(Epoch(3)).await.unwrap();
        engine.lead(Epoch(4), Arc::new(Alone)).await.unwrap();
        let late = first.transact(&mut |t| {
            t.put(b"k", b"x");
            Ok(())
        });
        assert_eq!(late.unwrap_err().kind, ErrorKind::Unavailable);
        assert_eq!(first.read(&mut |_| Ok(())).unwrap_err().kind, ErrorKind::Unavailable);
        assert_eq!(first.wait_durable(seq).await.unwrap_err().kind, ErrorKind::Unavailable);
        let second = engine.led();
        let seq = tx(&*second, |t| t.put(b"k", b"y"));
        second.wait_durable(seq).await.unwrap();
    });
}

#[test]
fn only_what_every_copy_keeps_is_folded() {
    simulated(1, |w| async move {
        let env = w.node("a");
        let engine = open(&env).await;
        let other = Arc::new(Other::default());
        engine.lead(Epoch(1), other.clone()).await.unwrap();
        let mut refused = None;
        for n in 0..1000u32 {
            let put = engine.transact(&mut |t| {
                t.put(&n.to_be_bytes(), &[1; 3000]);
                Ok(())
            });
            if let Err(e) = put {
                refused = Some(e);
                break;
            }
        }
        assert_eq!(refused.expect("the journal is full").kind, ErrorKind::Unavailable);
        let (last, state) = dump(&*engine);
        engine.wait_synced(last).await.unwrap();
        assert_eq!(engine.export().await.unwrap().seq, CommitSeq(0), "nothing is in the tree");
        // After a restart the records of the others are unknown.
        drop(engine);
        w.power_cut("a");
        let engine = open(&w.node("a")).await;
        assert_eq!((dump(&*engine), engine.durable()), ((last, state.clone()), CommitSeq(0)));
        engine.follow(Epoch(2)).await.unwrap();
        engine.truncate_to(Epoch(2), CommitSeq(100)).await.unwrap();
        let kept: Model = state.into_iter().take(100).collect();
        assert_eq!(dump(&*engine), (CommitSeq(100), kept.clone()));
        engine.note_durable(Epoch(2), CommitSeq(100)).unwrap();
        engine.checkpoint().await.unwrap();
        assert_eq!(engine.export().await.unwrap().seq, CommitSeq(100));
        let below = engine.follow(Epoch(3)).await;
        assert!(below.is_ok());
        let below = engine.truncate_to(Epoch(3), CommitSeq(99)).await.unwrap_err();
        assert_eq!(below.kind, ErrorKind::Damaged, "{below}");
        assert_eq!(dump(&*engine), (CommitSeq(100), kept));
    });
}

#[test]
fn older_epochs_are_refused_also_after_a_power_cut() {
    simulated(1, |w| async move {
        let engine = open(&w.node("a")).await;
        engine.follow(Epoch(5)).await.unwrap();
        drop(engine);
        w.power_cut("a");
        let engine = open(&w.node("a")).await;
        assert_eq!(engine.epoch(), Epoch(5));
        let kind = |done: weir_proto::Result<()>| done.unwrap_err().kind;
        assert_eq!(kind(engine.follow(Epoch(4)).await), ErrorKind::Stale);
        assert_eq!(kind(engine.lead(Epoch(5), Arc::new(Alone)).await), ErrorKind::Stale);
        assert_eq!(kind(engine.truncate_to(Epoch(4), CommitSeq(0)).await), ErrorKind::Stale);
        assert_eq!(kind(engine.apply(Epoch(4), &[])), ErrorKind::Stale);
        assert_eq!(kind(engine.apply(Epoch(5), &[])), ErrorKind::Stale, "not compared since the start");
        assert_eq!(kind(engine.note_durable(Epoch(5), CommitSeq(1))), ErrorKind::Stale);
        let put = engine.transact(&mut |t| {
            t.put(b"k", b"v");
            Ok(())
        });
        assert_eq!(put.unwrap_err().kind, ErrorKind::Stale);
        engine.lead(Epoch(6), Arc::new(Alone)).await.unwrap();
        assert_eq!(kind(engine.follow(Epoch(6)).await), ErrorKind::Invalid, "it leads");
    });
}

#[test]
fn wrong_records_are_refused_and_change_nothing() {
    simulated(1, |w| async move {
        let (_, written) = written(&w.node("a"), 60, 10).await;
        let engine = follows(&w.node("b"), SMALL, 2, &written.entries[..55]).await;
        let before = dump(&*engine);
        let next = &written.entries[55];
        let wrong = [
            Entry { seq: CommitSeq(57), ..next.clone() },
            Entry { seq: CommitSeq(55), ..next.clone() },
            Entry { epoch: Epoch(1), ..next.clone() },
            Entry { epoch: Epoch(3), ..next.clone() },
            Entry { body: Default::default(), ..next.clone() },
            Entry { body: vec![9, 1, 0, 7].into(), ..next.clone() },
            Entry { body: next.body.slice(..next.body.len() - 1), ..next.clone() },
            Entry { body: vec![2; 300_000].into(), ..next.clone() },
        ];
        for entry in wrong {
            let refused = engine.apply(Epoch(2), &[entry]).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Invalid, "{refused}");
            assert_eq!(dump(&*engine), before);
        }
        engine.apply(Epoch(2), &written.entries[55..]).unwrap();
        let beyond = engine.truncate_to(Epoch(2), CommitSeq(61)).await;
        assert_eq!(beyond.unwrap_err().kind, ErrorKind::Invalid);
    });
}

/// At each record, over several segments; and what comes after the cut is another leader's.
#[test]
fn a_journal_is_truncated_at_every_record() {
    simulated(1, |w| async move {
        let (_, written) = written(&w.node("a"), 90, 9000).await;
        for to in (0..90).step_by(3) {
            let name = format!("b{to}");
            let engine = follows(&w.node(&name), SMALL, 2, &written.entries).await;
            engine.wait_synced(CommitSeq(90)).await.unwrap();
            engine.follow(Epoch(3)).await.unwrap();
            let early = engine.apply(Epoch(3), &[]).unwrap_err();
            assert_eq!(early.kind, ErrorKind::Stale, "not compared yet");
            engine.truncate_to(Epoch(3), CommitSeq(to as u64)).await.unwrap();
            assert_eq!(dump(&*engine), (CommitSeq(to as u64), written.states[to].clone()), "{to}");
            let new = Entry { epoch: Epoch(3), ..written.entries[to].clone() };
            engine.apply(Epoch(3), &[new]).unwrap();
            engine.wait_synced(CommitSeq(to as u64 + 1)).await.unwrap();
            drop(engine);
            w.power_cut(&name);
            let engine = open(&w.node(&name)).await;
            assert_eq!(dump(&*engine), (CommitSeq(to as u64 + 1), written.states[to + 1].clone()), "{to}");
            assert_eq!(engine.epochs().last_epoch(), Epoch(3));
        }
    });
}

/// A copy dies at each point of a cut, or in the cut of the start after it: then the cut is whole or not
/// begun.
#[test]
fn an_interrupted_truncation_is_complete_or_not_begun() {
    let mut points = 0;
    for seed in 0..64 {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        points += world.run(async move {
            let mut lcg = Lcg(seed);
            let to = lcg.below(80);
            let point = OF_TRUNCATIONS[seed as usize % OF_TRUNCATIONS.len()];
            let (_, written) = written(&w.node("a"), 90, 9000).await;
            let env = w.node("b");
            let engine = follows(&env, SMALL, 2, &written.entries).await;
            engine.wait_synced(CommitSeq(90)).await.unwrap();
            engine.follow(Epoch(3)).await.unwrap();
            w.kill_at("b", point, 1 + lcg.below(2) as u32);
            let cutting = async move { engine.truncate_to(Epoch(3), CommitSeq(to)).await };
            let mut died = dies(&w, &env, cutting, lcg.below(3) > 0).await;
            let env = w.node("b");
            w.kill_at("b", OF_TRUNCATIONS[lcg.below(4) as usize], 1);
            let opening = {
                let env = env.clone();
                async move { Engine::open(&env, Path::new(DIR), SMALL).await.map(drop) }
            };
            died += dies(&w, &env, opening, lcg.below(3) > 0).await;
            let engine = open(&w.node("b")).await;
            let (seq, state) = dump(&*engine);
            assert_eq!(seq.0, to, "seed {seed}: {point}");
            assert!(state == written.states[to as usize], "seed {seed}");
            engine.follow(Epoch(4)).await.unwrap();
            engine.truncate_to(Epoch(4), CommitSeq(to)).await.unwrap();
            engine.apply(Epoch(4), &written.entries[to as usize..]).unwrap();
            engine.wait_synced(CommitSeq(90)).await.unwrap();
            drop(engine);
            w.power_cut("b");
            assert!(
                dump(&*open(&w.node("b")).await) == (CommitSeq(90), written.states[90].clone()),
                "seed {seed}"
            );
            died
        });
    }
    assert!(points > 40, "the points were met ({points})");
}

/// Runs `work` until it ends, or until its node dies; then its power fails, too, if so wanted. How many died.
async fn dies(
    w: &World,
    env: &Env,
    work: impl Future<Output = weir_proto::Result<()>> + Send + 'static,
    power: bool,
) -> u32 {
    let ended = Arc::new(AtomicU64::new(0));
    let sees = ended.clone();
    env.tasks.spawn("work", async move {
        let done = work.await;
        assert!(done.is_ok(), "{done:?}");
        sees.store(1, Ordering::Release);
        std::future::pending::<()>().await;
    });
    while w.is_up("b") && ended.load(Ordering::Acquire) == 0 {
        w.sleep(Duration::from_micros(50)).await;
    }
    let died = !w.is_up("b");
    w.kill("b");
    if power {
        w.power_cut("b");
    }
    u32::from(died)
}

/// A follower dies between append and sync: acknowledged records are present, and the rest is a whole prefix.
#[test]
fn a_follower_keeps_what_it_acknowledged_and_no_half_record() {
    let mut lost = 0;
    for seed in 0..40 {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        lost += world.run(async move {
            let mut lcg = Lcg(seed);
            let (_, written) = written(&w.node("a"), 200, 3000).await;
            let env = w.node("b");
            let acknowledged = Arc::new(AtomicU64::new(0));
            let (acknowledges, entries) = (acknowledged.clone(), written.entries.clone());
            let inner = env.clone();
            env.tasks.spawn("follower", async move {
                let engine = follows(&inner, SMALL, 4, &[]).await;
                for some in entries.chunks(7) {
                    engine.apply(Epoch(4), some).unwrap();
                    if some[0].seq.0 % 3 == 0 {
                        let last = some.last().unwrap().seq;
                        engine.wait_synced(last).await.unwrap();
                        acknowledges.store(last.0, Ordering::Release);
                        engine.note_durable(Epoch(4), last).unwrap();
                    }
                    inner.clock.sleep(Duration::from_micros(20)).await;
                }
                std::future::pending::<()>().await;
            });
            w.sleep(Duration::from_micros(200 + lcg.below(3000))).await;
            w.power_cut("b");
            let engine = open(&w.node("b")).await;
            let (seq, state) = dump(&*engine);
            let acknowledged = acknowledged.load(Ordering::Acquire);
            assert!(seq.0 >= acknowledged, "seed {seed}: it acknowledged {acknowledged}, and has {}", seq.0);
            assert!(state == written.states[seq.0 as usize], "seed {seed}");
            u32::from(seq.0 < 200)
        });
    }
    assert!(lost > 5, "it died in time ({lost})");
}

/// Every place at which a segment with epochs may end after a power cut.
#[tokio::test]
async fn a_segment_with_epochs_may_end_anywhere() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let open = async |path: &Path| Engine::open(&env, path, SMALL).await;
    let engine = open(dir.path()).await.unwrap();
    let other = Arc::new(Other::default());
    engine.lead(Epoch(3), other.clone()).await.unwrap();
    for n in 1..=3u8 {
        tx(&*engine, |t| t.put(&[n], &[n; 20]));
    }
    engine.wait_synced(CommitSeq(3)).await.unwrap();
    drop(engine);
    drop(open(dir.path()).await.unwrap()); // waits until the tasks of the one before have ended
    let segment = |path: &Path| path.join("journal-0000000000000002");
    let whole = env.disk.read(&segment(dir.path())).unwrap();
    let summary = weir_kv::read_segment(&whole).unwrap();
    assert_eq!((summary.has_epochs, summary.epoch, summary.transactions), (true, Epoch(3), 3));
    // Header 40 + kind, key length, key, value length, value: 1 + 2 + 1 + 4 + 20, padded.
    const RECORD: usize = 72;
    assert_eq!(summary.end, 4096 + 3 * RECORD as u64);
    for end in (0..=3 * RECORD).step_by(8) {
        let copy = tempfile::tempdir().unwrap();
        for entry in env.disk.read_dir(dir.path()).unwrap() {
            let bytes = env.disk.read(&dir.path().join(&entry.name)).unwrap();
            env.disk.write_atomic(&copy.path().join(&entry.name), &bytes).unwrap();
        }
        let file = env.disk.open(&segment(copy.path()), OpenMode::WRITE).unwrap();
        file.write_all_at(&vec![0; 3 * RECORD - end], (4096 + end) as u64).unwrap();
        let engine = open(copy.path()).await.unwrap();
        assert_eq!(dump(&*engine).0.0 as usize, end / RECORD, "cut at {end}");
    }
}

#[tokio::test]
async fn a_missing_or_old_mark_is_named() {
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let mark: PathBuf = dir.path().join("copy");
    let engine = Engine::open(&env, dir.path(), SMALL).await.unwrap();
    engine.lead(Epoch(1), Arc::new(Alone)).await.unwrap();
    let old = env.disk.read(&mark).unwrap();
    engine.lead(Epoch(2), Arc::new(Alone)).await.unwrap();
    let seq = tx(&*engine, |t| t.put(b"k", b"v"));
    engine.wait_durable(seq).await.unwrap();
    drop(engine);
    drop(Engine::open(&env, dir.path(), SMALL).await.unwrap());
    env.disk.write_atomic(&mark, &old).unwrap();
    let error = Engine::open(&env, dir.path(), SMALL).await.err().unwrap();
    assert_eq!(error.kind, ErrorKind::Damaged, "{error}");
    env.disk.remove_file(&mark).unwrap();
    let error = Engine::open(&env, dir.path(), SMALL).await.err().unwrap();
    assert!(error.kind == ErrorKind::Damaged && error.context.contains("copy"), "{error}");
}

/// Records from before there were copies are read, and sent to none; the first copy fetches the whole state.
#[test]
fn a_store_of_one_copy_gets_others() {
    simulated(1, |w| async move {
        let engine = open_with(&w.node("a"), KEEPS).await;
        for n in 0..40u8 {
            tx(&*engine, |t| t.put(&[n], &[n; 3000]));
        }
        engine.wait_durable(CommitSeq(40)).await.unwrap();
        let other = Arc::new(Other::default());
        engine.lead(Epoch(1), other.clone()).await.unwrap();
        assert_eq!(engine.durable(), CommitSeq(40), "what was durable stays so");
        tx(&*engine, |t| t.put(b"new", b"v"));
        other.keep(&engine, CommitSeq(41));
        engine.wait_durable(CommitSeq(41)).await.unwrap();
        let mut reader = engine.reader(CommitSeq(0)).unwrap().expect("the journal has all");
        let entries = reader.next(usize::MAX).unwrap().expect("the journal has all");
        assert_eq!(entries.iter().map(|e| e.epoch.0).max(), Some(1));
        assert_eq!((entries.len(), entries[39].epoch), (41, Epoch(0)));
        let follower = follows(&w.node("b"), SMALL, 1, &entries).await;
        assert_eq!(dump(&*follower), dump(&*engine));
        drop(engine);
        w.power_cut("a");
        assert_eq!(dump(&*open(&w.node("a")).await), dump(&*follower));
    });
}

#[test]
fn the_whole_state_is_transferred() {
    simulated(1, |w| async move {
        let (leader, written) = written(&w.node("a"), 600, 2000).await;
        leader.checkpoint().await.unwrap();
        let seq = tx(&*leader, |t| t.put(b"later", b"v"));
        leader.wait_durable(seq).await.unwrap();
        let export = leader.export().await.unwrap();
        assert_eq!(export.seq, CommitSeq(600));
        // The receiver has another state, which is replaced.
        let env = w.node("b");
        drop(follows(&env, SMALL, 2, &written.entries[..80]).await);
        w.kill("b");
        let env = w.node("b");
        let at = (export.seq, export.epoch);
        for interrupted in [true, false] {
            let begun = Import::begin(&env, Path::new(DIR), SMALL, leader.epoch(), at).await;
            let mut import = begun.unwrap();
            let mut after = None;
            loop {
                let some = export.entries(after.as_deref(), 4000).unwrap();
                let Some((key, _)) = some.last() else { break };
                after = Some(key.clone());
                import.put(some).await.unwrap();
            }
            let wrong = import.put(vec![(b"A".to_vec(), vec![])]).await;
            assert_eq!(wrong.unwrap_err().kind, ErrorKind::Invalid, "out of order");
            if interrupted {
                drop(import);
                assert!(is_unfinished(&env, Path::new(DIR)).unwrap());
                let refused = Engine::open(&env, Path::new(DIR), SMALL).await.err().unwrap();
                assert_eq!(refused.kind, ErrorKind::Unavailable, "{refused}");
            } else {
                import.finish().await.unwrap();
            }
        }
        w.power_cut("b");
        let env = w.node("b");
        let follower = open(&env).await;
        assert_eq!(dump(&*follower), (CommitSeq(600), written.states[600].clone()));
        assert_eq!((follower.epoch(), follower.epochs()), (leader.epoch(), Epochs::new(at.0, at.1)));
        assert_eq!(follower.epochs().shared_with(&leader.epochs()), Shared::UpTo(CommitSeq(600)));
        follower.truncate_to(leader.epoch(), CommitSeq(600)).await.unwrap();
        let mut reader = leader.reader(CommitSeq(600)).unwrap().expect("it is in the journal");
        follower.apply(leader.epoch(), &reader.next(1 << 20).unwrap().unwrap()).unwrap();
        assert_eq!(dump(&*follower), dump(&*leader));
    });
}

#[test]
fn folded_records_are_read_as_long_as_they_are_kept() {
    simulated(1, |w| async move {
        for (config, kept) in [(SMALL, false), (KEEPS, true)] {
            let name = format!("n{kept}");
            let engine = open_with(&w.node(&name), config).await;
            engine.lead(Epoch(1), Arc::new(Alone)).await.unwrap();
            for n in 0..500u32 {
                tx(&*engine, |t| t.put(&n.to_be_bytes(), &[1; 3000]));
            }
            engine.checkpoint().await.unwrap();
            let all = |engine: &Engine| {
                let mut reader = engine.reader(CommitSeq(0)).unwrap()?;
                let mut count = 0;
                while count < 500 {
                    let some = reader.next(100_000).unwrap()?;
                    assert!(some.iter().all(|e| e.epoch == Epoch(1)));
                    count += some.len();
                }
                Some(count)
            };
            assert_eq!(all(&engine), kept.then_some(500));
            assert!(engine.reader(CommitSeq(500)).unwrap().is_some());
            assert_eq!(engine.reader(CommitSeq(501)).err().unwrap().kind, ErrorKind::Invalid);
            drop(engine);
            w.kill(&name);
            let engine = open_with(&w.node(&name), config).await;
            assert_eq!(all(&engine), kept.then_some(500), "after a restart");
            assert_eq!(engine.epochs().last(), CommitSeq(500));
        }
    });
}
