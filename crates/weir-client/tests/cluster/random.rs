//! Random operations of two clients on a few files, with targets and the metadata leader killed and started
//! again. Every read is compared with a plain array; at most m targets are gone at a time.
use bytes::Bytes;
use std::collections::BTreeMap;
use std::time::Duration;
use weir_client::{Allocate, Client, Handle, OpenMode, SetAttrs};
use weir_env::Rng;
use weir_lab::*;
use weir_proto::InodeId;

const ROOT: InodeId = InodeId::ROOT;
const FILES: u64 = 3;
const STEPS: u64 = 90;

struct Run {
    lab: Lab,
    rng: Rng,
    clients: Vec<Client>,
    /// By client and file.
    handles: BTreeMap<(usize, u64), Handle>,
    model: BTreeMap<u64, Vec<u8>>,
    down: Vec<u8>,
    faults: bool,
    /// A target returned and was not repaired in time.
    lame: bool,
}

impl Run {
    async fn handle(&mut self, c: usize, f: u64) -> Handle {
        if let Some(h) = self.handles.get(&(c, f)) {
            return *h;
        }
        let name = format!("f{f}");
        let opened =
            self.clients[c].create(&root(), ROOT, name.as_bytes(), 0o644, false, OpenMode::BOTH).await;
        let handle = opened.unwrap().handle;
        self.handles.insert((c, f), handle);
        self.model.entry(f).or_default();
        handle
    }

    async fn step(&mut self, n: u64) {
        let (c, f) = (self.rng.below(2) as usize, self.rng.below(FILES));
        let h = self.handle(c, f).await;
        let client = self.clients[c].clone();
        let size = self.model[&f].len();
        let log = |what: String| eprintln!("step {n}: client {c} file {f} (size {size}): {what}");
        match self.rng.below(if self.faults { 16 } else { 13 }) {
            0..=4 => {
                let at = match self.rng.below(3) {
                    0 => size,
                    1 => self.rng.below(size as u64 + 1) as usize,
                    _ => self.rng.below(3 * STRIPE as u64) as usize,
                };
                let len =
                    1 + self.rng.below([50, 5000, 100_000, 600_000][self.rng.below(4) as usize]) as usize;
                let data = pattern(n, at, len);
                log(format!("write {len} at {at}"));
                match client.try_write(h, at as u64, &data) {
                    Some(done) => assert_eq!(done.unwrap(), len),
                    None => {
                        assert_eq!(client.write(h, at as u64, Bytes::from(data.clone())).await.unwrap(), len)
                    }
                }
                let model = self.model.get_mut(&f).unwrap();
                if model.len() < at + len {
                    model.resize(at + len, 0);
                }
                model[at..at + len].copy_from_slice(&data);
            }
            5..=7 => {
                let at = self.rng.below(size as u64 + 1) as usize;
                let len = 1 + self.rng.below(700_000) as usize;
                log(format!("read {len} at {at}"));
                self.check_read(c, f, h, at, len, n).await;
            }
            8 => {
                log("fsync".into());
                client.fsync(h).await.unwrap();
            }
            9 => {
                log("close".into());
                client.flush(h).await.unwrap();
                client.release(h).await.unwrap();
                self.handles.remove(&(c, f));
            }
            10 => {
                let to = self.rng.below(size as u64 + 300_000);
                log(format!("truncate to {to}"));
                let ino =
                    client.lookup(&root(), ROOT, format!("f{f}").as_bytes()).await.unwrap().unwrap().attr.ino;
                let set = SetAttrs { size: Some(to), ..Default::default() };
                client.setattr(&root(), ino, Some(h), set).await.unwrap();
                self.model.get_mut(&f).unwrap().resize(to as usize, 0);
            }
            11 => {
                let at = self.rng.below(size as u64 + 1);
                let len = 1 + self.rng.below(300_000);
                log(format!("punch {len} at {at}"));
                client.fallocate(h, Allocate::PunchHole, at, len).await.unwrap();
                let end = size.min((at + len) as usize);
                self.model.get_mut(&f).unwrap()[(at as usize).min(end)..end].fill(0);
            }
            12 => {
                log("look from the other".into());
                let other = 1 - c;
                let name = format!("f{f}");
                let stat = self.clients[other].lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap();
                let stat = self.clients[other].getattr(stat.attr.ino).await.unwrap();
                assert_eq!(stat.attr.size, size as u64, "step {n}: size of {name} as client {other} sees it");
            }
            13 => {
                let target = self.rng.below(6) as u8;
                if self.down.len() < 2 && !self.lame && !self.down.contains(&target) {
                    log(format!("kill s{target}"));
                    self.lab.kill_storage(target);
                    self.down.push(target);
                }
            }
            14 => {
                if let Some(target) = self.down.pop().filter(|_| !self.lame) {
                    log(format!("restart s{target}"));
                    self.lab.storage(target).await;
                    if let Err(e) = self.lab.all_current().await {
                        // Not what this test is about: it counts as lost from now on.
                        eprintln!("step {n}: s{target} did not catch up: {e}");
                        self.down.push(target);
                        self.lame = true;
                    }
                }
            }
            _ => {
                log("restart meta".into());
                self.lab.world().kill("meta");
                self.lab.meta().await;
            }
        }
    }

    async fn check_read(&self, c: usize, f: u64, h: Handle, at: usize, len: usize, n: u64) {
        let client = &self.clients[c];
        let got = match client.try_read(h, at as u64, len) {
            Some(parts) => parts.unwrap().concat(),
            None => client.read(h, at as u64, len).await.unwrap().concat(),
        };
        let model = &self.model[&f];
        let expected = &model[at..model.len().min(at + len)];
        if got != expected {
            let first =
                got.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(got.len().min(expected.len()));
            for (i, client) in self.clients.iter().enumerate() {
                let ino =
                    client.lookup(&root(), ROOT, format!("f{f}").as_bytes()).await.unwrap().unwrap().attr.ino;
                eprintln!("client {i} under leases: {:?}", client.try_getattr(ino));
                eprintln!("client {i} asks: {:?}", client.getattr(ino).await);
            }
            panic!(
                "step {n}, client {c}, file {f}: read {} bytes at {at}, expected {}; first difference at {}",
                got.len(),
                expected.len(),
                at + first
            );
        }
    }
}

fn run(seed: u64, faults: bool) {
    eprintln!("seed {seed}");
    Lab::new(seed).run(6, |lab| async move {
        let memory = if seed.is_multiple_of(2) { 2 << 20 } else { 64 << 20 };
        let kernel = std::sync::Arc::new(weir_client::NoKernel);
        let clients = vec![
            lab.client_with("a", memory, kernel.clone()).await,
            lab.client_with("b", memory, kernel.clone()).await,
        ];
        let rng = lab.world().rng("random operations");
        let mut run = Run {
            lab: lab.clone(),
            rng,
            clients,
            handles: BTreeMap::new(),
            model: BTreeMap::new(),
            down: vec![],
            faults,
            lame: false,
        };
        for n in 0..STEPS {
            run.step(n).await;
            if run.rng.below(20) == 0 {
                lab.env("a").clock.sleep(Duration::from_secs(run.rng.below(8))).await;
            }
        }
        for f in run.model.keys().copied().collect::<Vec<_>>() {
            for c in 0..2 {
                let h = run.handle(c, f).await;
                run.check_read(c, f, h, 0, usize::MAX >> 1, 1000 + c as u64).await;
            }
        }
    });
}

fn seeds() -> std::ops::Range<u64> {
    0..40
}

#[test]
fn without_faults_every_read_is_right() {
    seeds().for_each(|seed| run(seed, false));
}

#[test]
fn with_faults_every_read_is_right() {
    seeds().for_each(|seed| run(1000 + seed, true));
}
