//! Three real stores on simulated disks, driven by the real decisions in a random order: writes, messages,
//! power cuts, changes of the map, transfers of the whole state.
//!
//! Every current member has each acknowledged write at all times, and in the end all copies are equal, byte
//! by byte.
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_coord::decide::JournalGroup;
use weir_env::sim::{SimConfig, World};
use weir_env::{Instant, Rng};
use weir_kv::epochs::Epochs;
use weir_kv::{CommitSeq, Copies, Engine, EngineConfig, Entry, Import, Kv, Read, Scan};
use weir_meta::copies::decide::{self, Lead, Promise, Start};
use weir_proto::Epoch;
use weir_proto::map::MemberState;

const DIR: &str = "/state";
const COPIES: u8 = 3;
type Dump = BTreeMap<Vec<u8>, Vec<u8>>;

/// The progress of the others that the leader's store learns, and its records for them.
struct Link {
    lead: Mutex<Lead<u8>>,
    appended: Mutex<Vec<Entry>>,
    epoch: Epoch,
}
impl Copies for Link {
    fn append(&self, seq: CommitSeq, body: &[u8]) {
        let body = body.to_vec().into();
        self.appended.lock().unwrap().push(Entry { seq, epoch: self.epoch, body });
    }
    fn flush(&self) {}
    fn kept(&self) -> CommitSeq {
        self.lead.lock().unwrap().kept_by_all()
    }
}

struct Leading {
    link: Arc<Link>,
    /// Which write each of its records holds.
    writes: BTreeMap<CommitSeq, u32>,
}

struct Node {
    name: String,
    engine: Option<Arc<Engine>>,
    leading: Option<Leading>,
    compared: Epoch,
}

struct Test {
    seed: u64,
    world: World,
    rng: Rng,
    config: EngineConfig,
    nodes: Vec<Node>,
    group: JournalGroup<u8>,
    reported: BTreeSet<(Epoch, u8)>,
    acknowledged: BTreeSet<u32>,
    writes: u32,
    met: BTreeMap<&'static str, u32>,
}

fn key(write: u32) -> Vec<u8> {
    [b"w".as_slice(), &write.to_be_bytes()].concat()
}

fn dump(engine: &Engine) -> (CommitSeq, Dump) {
    let mut all = Dump::new();
    let read = engine.read(&mut |r: &dyn Read| {
        r.scan(b"", &[0xff; 64], &mut |k, v| {
            all.insert(k.to_vec(), v.to_vec());
            Scan::More
        })
    });
    (read.expect("a sound disk"), all)
}

impl Test {
    async fn new(world: World, seed: u64) -> Test {
        let rng = world.rng("steps");
        let keep = [0, 1 << 20][rng.below(2) as usize];
        let config =
            EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 1 << 20, journal_keep_bytes: keep };
        let nodes = (0..COPIES).map(|id| Node {
            name: format!("m{id}"),
            engine: None,
            leading: None,
            compared: Epoch(0),
        });
        let mut test = Test {
            seed,
            rng,
            config,
            nodes: nodes.collect(),
            group: JournalGroup::found(&[0, 1, 2], 0),
            reported: BTreeSet::new(),
            acknowledged: BTreeSet::new(),
            writes: 0,
            met: BTreeMap::new(),
            world,
        };
        for id in 0..COPIES {
            test.start(id).await;
        }
        test
    }

    fn below(&self, bound: u64) -> u64 {
        self.rng.below(bound)
    }

    fn met(&mut self, what: &'static str) {
        *self.met.entry(what).or_default() += 1;
    }

    fn engine(&self, id: u8) -> Option<Arc<Engine>> {
        self.nodes[usize::from(id)].engine.clone()
    }

    /// A copy that is running and follows no leader yet. An interrupted transfer left one that cannot be
    /// opened.
    async fn start(&mut self, id: u8) {
        let env = self.world.node(&self.nodes[usize::from(id)].name);
        let unfinished = weir_kv::is_unfinished(&env, Path::new(DIR)).expect("a sound disk");
        let node = &mut self.nodes[usize::from(id)];
        (node.leading, node.compared) = (None, Epoch(0));
        node.engine = None;
        if !unfinished {
            node.engine = Some(Engine::open(&env, Path::new(DIR), self.config).await.expect("open"));
        }
    }

    async fn learn(&mut self, id: u8) {
        let Some(engine) = self.engine(id) else { return };
        let (known, epoch) = (engine.epoch(), self.group.epoch);
        if epoch <= known {
            return;
        }
        if !decide::may_lead(&self.group, id, known) {
            engine.follow(epoch).await.expect("a newer epoch");
            self.nodes[usize::from(id)].leading = None;
            return;
        }
        let lead = Mutex::new(Lead::new(&self.group, id));
        let link = Arc::new(Link { lead, appended: Mutex::default(), epoch });
        engine.lead(epoch, link.clone()).await.expect("a newer epoch");
        let before = self.nodes[usize::from(id)].leading.take();
        let writes = before.map_or_else(BTreeMap::new, |l| l.writes);
        self.nodes[usize::from(id)].leading = Some(Leading { link, writes });
        self.met("leaders");
    }

    async fn write(&mut self, id: u8) {
        let Some(engine) = self.engine(id) else { return };
        if self.nodes[usize::from(id)].leading.is_none() {
            return;
        }
        let (write, bytes) = (self.writes, self.below(6000) as usize);
        let counter = [b'n', self.below(3) as u8];
        let raise = self.below(4) == 0;
        let done = engine.transact(&mut |t| {
            t.put(&key(write), &vec![write as u8; bytes]);
            if raise {
                t.max(&counter, u64::from(write))
            } else {
                t.add(&counter, 3)
            }
            t.put(b"last", &write.to_le_bytes());
            Ok(())
        });
        let Ok(seq) = done else { return self.met("full") };
        self.writes += 1;
        let leading = self.nodes[usize::from(id)].leading.as_mut().expect("it leads");
        leading.writes.insert(seq, write);
    }

    /// A message from a leader to a follower, and its answer if `answers`.
    async fn send(&mut self, from: u8, to: u8, answers: bool) {
        let Some(leader) = self.engine(from) else { return };
        let Some(leading) = &self.nodes[usize::from(from)].leading else { return };
        let epoch = leading.link.lead.lock().unwrap().epoch();
        if from == to || !leading.link.lead.lock().unwrap().others().any(|id| id == to) {
            return;
        }
        let Some(follower) = self.engine(to) else { return self.fetch(&leader, epoch, to).await };
        if !decide::accepts(follower.epoch(), epoch) {
            return self.met("refused");
        }
        follower.follow(epoch).await.expect("the epoch was compared");
        self.nodes[usize::from(to)].leading = None;
        if self.nodes[usize::from(to)].compared != epoch {
            let place = decide::start(&follower.epochs(), &leader.epochs(), follower.durable());
            match place.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed)) {
                Start::Fetch => return self.fetch(&leader, epoch, to).await,
                Start::After(seq) => {
                    let truncates = follower.epochs().last() > seq;
                    follower.truncate_to(epoch, seq).await.expect("truncate");
                    self.nodes[usize::from(to)].compared = epoch;
                    if truncates {
                        self.met("cuts");
                    }
                }
            }
        }
        let after = follower.epochs().last();
        let Some(entries) = self.records(from, &leader, after) else {
            return self.fetch(&leader, epoch, to).await;
        };
        follower.note_durable(epoch, leader.durable()).expect("it follows");
        if follower.apply(epoch, &entries).is_err() {
            self.met("full"); // too much that not all copies have
        }
        if answers {
            let last = follower.epochs().last();
            follower.wait_synced(last).await.expect("a sound disk");
            let leading = self.nodes[usize::from(from)].leading.as_ref().expect("it leads");
            leading.link.lead.lock().unwrap().kept(to, epoch, last).expect("its own epoch");
        }
    }

    /// From what was offered, or from the journal. None: they were given up.
    fn records(&self, from: u8, leader: &Engine, after: CommitSeq) -> Option<Vec<Entry>> {
        let most = 1 + self.below(30) as usize;
        let leading = self.nodes[usize::from(from)].leading.as_ref().expect("it leads");
        let appended = leading.link.appended.lock().unwrap();
        if let Some(at) = appended.iter().position(|e| e.seq.0 == after.0 + 1) {
            return Some(appended[at..].iter().take(most).cloned().collect());
        }
        let mut reader = leader.reader(after).expect("a sound journal")?;
        reader.next(most * 3000).expect("a sound journal")
    }

    /// The whole state, or a part of it.
    async fn fetch(&mut self, leader: &Engine, epoch: Epoch, to: u8) {
        let export = leader.export().await.expect("a sound disk");
        let node = &mut self.nodes[usize::from(to)];
        (node.engine, node.leading, node.compared) = (None, None, Epoch(0));
        let env = self.world.node(&node.name);
        let at = (export.seq, export.epoch);
        let begun = Import::begin(&env, Path::new(DIR), self.config, epoch, at).await;
        let Ok(mut import) = begun else { return self.met("refused") };
        let mut after: Option<Vec<u8>> = None;
        loop {
            let some = export.entries(after.as_deref(), 50_000).expect("a sound disk");
            let Some((key, _)) = some.last() else { break };
            after = Some(key.clone());
            import.put(some).await.expect("a sound disk");
            if self.below(20) == 0 {
                drop(import);
                let name = self.nodes[usize::from(to)].name.clone();
                self.world.power_cut(&name);
                self.world.node(&name);
                return self.met("interrupted transfers");
            }
        }
        import.finish().await.expect("a sound disk");
        self.start(to).await;
        self.met("transfers");
    }

    fn acknowledge(&mut self, id: u8) {
        let Some(engine) = self.engine(id) else { return };
        let Some(leading) = &self.nodes[usize::from(id)].leading else { return };
        engine.settle();
        let durable = engine.durable();
        if leading.link.lead.lock().unwrap().may_acknowledge(&Promise::default(), Instant(0)) {
            let new: Vec<u32> = leading.writes.range(..=durable).map(|(_, write)| *write).collect();
            self.acknowledged.extend(new);
        }
    }

    fn report_caught_up(&mut self, id: u8, of: u8) {
        let Some(last) = self.engine(id).map(|e| e.epochs().last()) else { return };
        let Some(leading) = &self.nodes[usize::from(id)].leading else { return };
        let mut lead = leading.link.lead.lock().unwrap();
        if lead.report_caught_up(of, last) {
            self.reported.insert((lead.epoch(), of));
        }
        drop(lead);
        if self.below(2) == 0 {
            self.note_caught_up();
        }
    }

    fn change_map(&mut self) {
        let id = self.below(u64::from(COPIES)) as u8;
        match self.below(8) {
            0 => {
                let others: Vec<u8> = self.group.current().filter(|o| *o != id).collect();
                let next = others.get(self.below(2) as usize).or(others.first()).copied();
                if self.group.down(id, next).expect("a current one") {
                    self.met("downs");
                }
            }
            1 | 2 => {
                self.group.back(id);
            }
            3 => {
                let leads = self.nodes[usize::from(id)].leading.is_some();
                let asks = self.group.leader.is_none() || self.group.leader == Some(id) && !leads;
                if asks && self.engine(id).is_some() {
                    drop(self.group.lead(id));
                }
            }
            _ => self.note_caught_up(),
        }
    }

    fn note_caught_up(&mut self) {
        for (epoch, id) in std::mem::take(&mut self.reported) {
            if self.group.caught_up(id, epoch) == Ok(true) {
                self.met("caught up");
            }
        }
    }

    async fn crash(&mut self, id: u8) {
        let name = self.nodes[usize::from(id)].name.clone();
        self.nodes[usize::from(id)].engine = None;
        if self.below(2) == 0 {
            self.world.kill(&name)
        } else {
            self.world.power_cut(&name)
        }
        self.start(id).await;
        self.met("crashes");
    }

    /// Which member has not got what was acknowledged.
    fn check(&self) {
        for id in self.group.current() {
            let Some(engine) = self.engine(id) else {
                panic!("seed {}: {id} is current and has no state", self.seed)
            };
            let holds = |write: &u32| {
                let mut found = false;
                let read = engine.read(&mut |r| {
                    found = r.get(&key(*write))?.is_some();
                    Ok(())
                });
                read.is_ok() && found
            };
            if let Some(lost) = self.acknowledged.iter().find(|write| !holds(write)) {
                panic!(
                    "seed {}: the write {lost} was acknowledged, and {id}, which is current, lacks it",
                    self.seed
                );
            }
        }
    }

    async fn step(&mut self) {
        // Mostly the one that leads by the newest map; and one that does not know it.
        let leader = self.group.leader.filter(|_| self.below(4) > 0);
        let (a, b) = (leader.unwrap_or(self.below(3) as u8), self.below(3) as u8);
        match self.below(40) {
            0..10 => self.write(a).await,
            10..24 => {
                let answers = self.below(4) > 0;
                self.send(a, b, answers).await;
            }
            24..28 => self.acknowledge(a),
            28..30 => self.report_caught_up(a, b),
            30..32 => self.change_map(),
            32..35 => self.learn(b).await,
            35 if self.below(4) == 0 => self.crash(b).await,
            36 => {
                // Durable records are folded at once.
                if let Some(engine) = self.engine(a).filter(|e| e.durable() == e.epochs().last()) {
                    engine.checkpoint().await.expect("a sound disk");
                }
            }
            _ => self.world.sleep(Duration::from_micros(self.below(300))).await,
        }
    }

    /// All nodes are up again and nothing fails any more: all end equal.
    async fn settle(&mut self) {
        for _ in 0..100 {
            for id in 0..COPIES {
                self.group.back(id);
            }
            let leader =
                self.group.leader.or_else(|| self.group.current().next()).expect("a member is current");
            self.learn(leader).await;
            let leads = self.nodes[usize::from(leader)].leading.is_some();
            if self.group.leader.is_none() || !leads {
                self.group.lead(leader).expect("it is current");
            }
            self.learn(leader).await;
            for _ in 0..40 {
                for id in 0..COPIES {
                    self.send(leader, id, true).await;
                }
                self.acknowledge(leader);
            }
            (0..COPIES).for_each(|id| self.report_caught_up(leader, id));
            for (epoch, id) in std::mem::take(&mut self.reported) {
                let _ = self.group.caught_up(id, epoch);
            }
            let is_current = |m: &weir_coord::decide::JournalMember<u8>| m.state == MemberState::Current;
            if self.group.members.iter().all(is_current) {
                break;
            }
        }
        assert_eq!(self.group.current().count(), 3, "seed {}: not all caught up", self.seed);
        self.check();
        let dumps: Vec<_> = (0..COPIES).map(|id| dump(&self.engine(id).expect("it is there"))).collect();
        assert!(dumps.iter().all(|d| *d == dumps[0]), "seed {}: the copies differ", self.seed);
        let epochs: Vec<Epochs> =
            (0..COPIES).map(|id| self.engine(id).expect("it is there").epochs()).collect();
        assert!(epochs.iter().all(|e| e.last() == epochs[0].last()), "seed {}", self.seed);
        assert!(epochs.iter().all(|e| e.last_epoch() == epochs[0].last_epoch()), "seed {}", self.seed);
    }
}

#[test]
fn three_stores_lose_nothing_and_end_equal() {
    let seeds: u64 = std::env::var("WEIR_COPIES_SEEDS").map_or(100, |n| n.parse().expect("a number"));
    let mut met = BTreeMap::<&str, u32>::new();
    let mut acknowledged = 0;
    for seed in 0..seeds {
        let world = World::new(seed, SimConfig::default());
        let w = world.clone();
        let (of_run, count) = world.run(async move {
            let mut test = Test::new(w, seed).await;
            for _ in 0..1000 {
                test.step().await;
                test.check();
            }
            test.settle().await;
            (test.met, test.acknowledged.len())
        });
        of_run.into_iter().for_each(|(what, n)| *met.entry(what).or_default() += n);
        acknowledged += count;
    }
    eprintln!("{seeds} runs, {acknowledged} acknowledged writes: {met:?}");
    for what in ["leaders", "cuts", "transfers", "crashes", "refused", "downs", "caught up"] {
        assert!(met.get(what).is_some_and(|n| *n > 5), "{what} were not met: {met:?}");
    }
}
