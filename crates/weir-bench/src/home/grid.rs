//! `weir-bench home grid`: how close a mover's own choice of streams, window and extent is to the best of
//! many fixed ones, for workloads at several delays. Home is another Weir; the way there is a [`Wire`].
//!
//! A workload is written once; each run ships all of it to a directory of its own there. Every fixed choice
//! runs once; the best of them and the mover's own choice are measured then, in turns, so that neither is
//! compared by its luckiest run. A fixed choice that takes much longer than the best so far is aborted: its
//! rate is less than the figure shown.
use super::wire::Wire;
use crate::relation_load;
use crate::stage::Stage;
use bytes::Bytes;
use clap::ValueEnum;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::homes::Homes;
use weir_admin::local::args::Up;
use weir_admin::local::local_cluster::LocalCluster;
use weir_admin::local::{process, up};
use weir_admin::namespace_client::{as_client, own_cred};
use weir_client::{Client, NewRelation, OpenMode};
use weir_env::{BoxFuture, Env};
use weir_home::mover::Mover;
use weir_home::tuner::Choice;
use weir_load::{Better, Report, Row, Spread};
use weir_proto::checksum::crc32c_append;
use weir_proto::meta::Cred;
use weir_proto::relation::{RelationId, RelationState, RelationVerb};
use weir_proto::volume::Volume;
use weir_proto::{Error, InodeId, MIB, VolumeId};
use weir_store::peers::join_all;

const NAMESPACE: &str = "root";
/// Read and write caches of each client.
const MEMORY_BYTES: u64 = 64 * MIB;
const SMALL_BYTES: u64 = 10_000;
const MEDIUM_BYTES: u64 = 6_000_000;
const PART: usize = 1 << 20;
/// Files created, compared or removed in parallel.
const AT_ONCE: usize = 32;
const FILES_PER_DIRECTORY: u64 = 1000;
/// The interval of checks whether everything is at home.
const POLL: Duration = Duration::from_millis(10);
/// Data that is not at home by then counts as missing.
const PATIENCE: Duration = Duration::from_secs(900);
/// A fixed choice may take this multiple of the fastest run's time.
const GRACE: f64 = 1.25;
/// Runs of the mover's own choice, and of the best fixed one.
const RUNS: usize = 3;

/// Workloads to ship home. Full size; `--scale` makes it less.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Load {
    /// 10,000 files of 10 kB
    Small,
    /// 1,000 files of 6 MB
    Medium,
    /// One file of 10 GB
    Single,
    /// 5,000 files of 10 kB, 100 of 6 MB and one of 1 GB
    Mixed,
}

impl Load {
    pub const ALL: [Load; 4] = [Load::Small, Load::Medium, Load::Single, Load::Mixed];

    fn name(self) -> &'static str {
        match self {
            Load::Small => "small",
            Load::Medium => "medium",
            Load::Single => "single",
            Load::Mixed => "mixed",
        }
    }

    /// The size of each file.
    fn files(self, scale: f64) -> Vec<u64> {
        let count = |full: f64| (full * scale).ceil() as usize;
        let one = |full: f64| ((full * scale) as u64).max(1);
        match self {
            Load::Small => vec![SMALL_BYTES; count(10_000.0)],
            Load::Medium => vec![MEDIUM_BYTES; count(1000.0)],
            Load::Single => vec![one(10e9)],
            Load::Mixed => {
                let mut files = vec![SMALL_BYTES; count(5000.0)];
                files.extend(vec![MEDIUM_BYTES; count(100.0)]);
                files.push(one(1e9));
                files
            }
        }
    }

    /// Fixed choices that make a difference for it: one file has no streams, small ones no window.
    fn grid(self) -> Vec<Choice> {
        let (streams, windows, extents): (&[usize], &[u64], &[u64]) = match self {
            Load::Small => (&[1, 4, 16, 64], &[256], &[64]),
            Load::Medium => (&[4, 16, 64], &[32, 256], &[64]),
            Load::Single => (&[4], &[16, 64, 256], &[8, 64]),
            Load::Mixed => (&[4, 16, 64], &[32, 256], &[64]),
        };
        let mut grid = Vec::new();
        for streams in streams {
            for window in windows {
                for extent in extents {
                    let (window_bytes, extent_bytes) = (window * MIB, extent * MIB);
                    grid.push(Choice { streams: *streams, window_bytes, extent_bytes });
                }
            }
        }
        grid
    }
}

/// Two clusters and the network between them.
struct Grid {
    scale: f64,
    here: Client,
    /// Home without the wire: to free space and to compare.
    there: Client,
    near: LocalCluster,
    env: Env,
    far_env: Env,
    wire: Arc<Wire>,
    url: String,
    runs: u32,
    rows: Vec<Row>,
    bad: Vec<String>,
    notes: Vec<String>,
}

/// A volume with a workload in it.
struct Source {
    volume: Volume,
    files: Vec<u64>,
}

pub fn measure(options: &super::Options, stage: &Stage) -> Outcome<Report> {
    let wish = |dir| Up { tcp: true, dir, mount: Vec::new(), ..stage.cluster(options.memory) };
    let (near, _) = up::bring_up(&wish(stage.cluster_dir()))?;
    let (far, _) = up::bring_up(&wish(stage.second_cluster().0))?;
    let runtime = tokio::runtime::Runtime::new().doing("start a runtime")?;
    let (rows, bad, notes) = runtime.block_on(async {
        let mut grid = Grid::new(options, near, &far).await?;
        let measured = grid.measure(options).await;
        grid.here.shutdown().await?;
        grid.there.shutdown().await?;
        measured.map(|()| (grid.rows, grid.bad, grid.notes))
    })?;
    let common = [
        "rows without a choice: the mover's own, three runs in turns with three of the baseline, the best fixed choice",
        "rows with a choice: one run; \"at most\": not waited for, because another was faster before",
        "delay: added to each round trip; the rate of the link is not limited",
    ];
    let loads: Vec<_> = options.load.iter().map(|load| load.name()).collect();
    Ok(Report {
        workload: "home grid".into(),
        options: serde_json::json!({
            "scale": options.scale, "delay_ms": options.delay_ms, "load": loads, "memory": options.memory,
        }),
        machine: weir_load::machine(),
        file_system: "weir, 6 targets, ec:4+2, 1 mover; home: the same".into(),
        baseline_file_system: Some("the best fixed choice".into()),
        runs: RUNS,
        rows,
        bad: bad.len() as u64,
        first_bad: bad.first().cloned(),
        notes: common.into_iter().map(str::to_owned).chain(notes).collect(),
    })
}

/// A client in this process of one of its clusters.
async fn client_of(local: &LocalCluster, name: &str) -> Outcome<Client> {
    as_client(local.coordinators(), NAMESPACE, name, process::own_process(), MEMORY_BYTES).await
}

impl Grid {
    async fn new(options: &super::Options, near: LocalCluster, far: &LocalCluster) -> Outcome<Grid> {
        let (here, there) = (client_of(&near, "bench").await?, client_of(far, "bench").await?);
        let env = weir_env::real::env();
        let wire = Arc::new(Wire::new(env.net.clone()));
        let far_env = Env { net: wire.clone(), ..env.clone() };
        let tcp = far.coordinators().into_iter().find_map(|addr| match addr {
            weir_env::Addr::Tcp(at) => Some(at),
            weir_env::Addr::Unix(_) | weir_env::Addr::Host(..) => None,
        });
        let at = tcp.ok_or_else(|| Error::not_found("the home cluster's coordinator has no TCP address"))?;
        let (url, scale) = (format!("weir://{at}"), options.scale);
        let (rows, bad, notes) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Grid { scale, here, there, near, env, far_env, wire, url, runs: 0, rows, bad, notes })
    }

    async fn measure(&mut self, options: &super::Options) -> Outcome<()> {
        for load in &options.load {
            let source = self.write(*load).await?;
            // The first run would find clusters that have done nothing yet.
            self.wire.set_delay(Duration::ZERO);
            self.run(&source, None, PATIENCE).await?;
            for delay_ms in &options.delay_ms {
                self.wire.set_delay(Duration::from_secs_f64(delay_ms / 1e3));
                self.compare(*load, *delay_ms, &source).await?;
            }
        }
        Ok(())
    }

    async fn compare(&mut self, load: Load, delay_ms: f64, source: &Source) -> Outcome<()> {
        let missing =
            || Failure::from(Error::deadline(format!("not everything is at home after {PATIENCE:?}")));
        let at = format!("{} at {delay_ms} ms", load.name());
        let mut least = self.run(source, None, PATIENCE).await?.ok_or_else(missing)?;
        let mut best = None;
        for choice in load.grid() {
            let patience = least.mul_f64(GRACE);
            let took = self.run(source, Some(choice), patience).await?;
            self.row(
                format!("{at}: {}", shown(&choice, took.is_none())),
                source,
                &[took.unwrap_or(patience)],
                None,
            );
            if let Some(took) = took
                && best.is_none_or(|(_, before)| took < before)
            {
                best = Some((choice, took));
                least = least.min(took);
            }
        }
        let Some((choice, _)) = best else {
            self.notes.push(format!("{at}: no fixed choice came near the mover's own"));
            return Ok(());
        };
        self.notes.push(format!("{at}: the best fixed choice is {}", shown(&choice, false)));
        let (mut own, mut fixed) = (Vec::new(), Vec::new());
        for _ in 0..RUNS {
            own.push(self.run(source, None, PATIENCE).await?.ok_or_else(missing)?);
            fixed.push(self.run(source, Some(choice), PATIENCE).await?.ok_or_else(missing)?);
        }
        self.row(at, source, &own, Some(&fixed));
        Ok(())
    }

    /// MB/s, or files per second of small ones.
    fn row(&mut self, name: String, source: &Source, took: &[Duration], baseline: Option<&[Duration]>) {
        let bytes: u64 = source.files.iter().sum();
        let is_small = bytes == SMALL_BYTES * source.files.len() as u64;
        let (unit, all) =
            if is_small { ("files/s", source.files.len() as f64) } else { ("MB/s", bytes as f64 / 1e6) };
        let spread = |took: &[Duration]| {
            let rates = took.iter().map(|took| all / took.as_secs_f64()).collect();
            Spread::of(rates).expect("a row has a run")
        };
        let (value, baseline) = (spread(took), baseline.map(spread));
        let ratio = baseline.map(|b| value.median / b.median);
        self.rows.push(Row { name, unit: unit.to_owned(), better: Better::Higher, value, baseline, ratio });
    }

    /// Ships all of it home once; returns how long that took, or that it exceeded the patience.
    async fn run(
        &mut self,
        source: &Source,
        fixed: Option<Choice>,
        patience: Duration,
    ) -> Outcome<Option<Duration>> {
        self.runs += 1;
        let name = format!("run-{}", self.runs);
        let root = self.there.mkdir(&own_cred(), InodeId::ROOT, name.as_bytes(), 0o755).await?.attr.ino;
        let opener =
            Arc::new(Homes::new(self.far_env.clone(), self.near.manifest.cluster.0, None, Vec::new()));
        let mover = match fixed {
            None => Mover::new(self.env.clone(), opener.clone()),
            Some(choice) => Mover::fixed(self.env.clone(), opener.clone(), choice),
        };
        let client = client_of(&self.near, "mover").await?;
        let new = NewRelation { url: format!("{}/{name}", self.url), ..NewRelation::default() };
        let begun = Instant::now();
        let relation = self.here.add_relation(&own_cred(), source.volume.id, &new).await?.id;
        let came = tokio::select! {
            () = mover.run(&client) => Err(Error::unavailable("the mover has lost its cluster").into()),
            came = self.wait(source.volume.id, relation, begun + patience) => came,
        };
        let took = begun.elapsed();
        client.shutdown().await?;
        opener.close().await;
        self.here.change_relation(&own_cred(), relation, RelationVerb::Remove).await?;
        let came = came?;
        if came && fixed.is_none() {
            self.verify(root, source).await?;
        }
        self.remove(root, name.as_bytes()).await?;
        Ok(came.then_some(took))
    }

    async fn wait(&self, volume: VolumeId, relation: RelationId, until: Instant) -> Outcome<bool> {
        while Instant::now() < until {
            let known = self.here.relations(Some(volume)).await?;
            match known.iter().find(|r| r.id == relation).map(|r| &r.state) {
                Some(RelationState::Synced {}) => return Ok(true),
                Some(RelationState::Copying {}) => tokio::time::sleep(POLL).await,
                other => {
                    return Err(
                        Error::stale(format!("the relation is not copying any more: {other:?}")).into()
                    );
                }
            }
        }
        Ok(false)
    }

    // ---- the files

    async fn write(&self, load: Load) -> Outcome<Source> {
        let volume = relation_load::make_volume(&self.here, load.name(), None).await?;
        let files = load.files(self.scale);
        let mut dir = volume.root;
        for (first, some) in (0..).step_by(AT_ONCE).zip(files.chunks(AT_ONCE)) {
            if first % FILES_PER_DIRECTORY < AT_ONCE as u64 {
                let name = directory_name(first);
                dir = self.here.mkdir(&own_cred(), volume.root, name.as_bytes(), 0o755).await?.attr.ino;
            }
            let writes = (first..).zip(some).map(|(n, bytes)| write_file(&self.here, dir, n, *bytes));
            all(writes).await.into_iter().collect::<Outcome<()>>()?;
        }
        Ok(Source { volume, files })
    }

    async fn verify(&mut self, root: InodeId, source: &Source) -> Outcome<()> {
        let mut dir = None;
        for (first, some) in (0..).step_by(AT_ONCE).zip(source.files.chunks(AT_ONCE)) {
            if first % FILES_PER_DIRECTORY < AT_ONCE as u64 {
                let found = self.there.lookup(&own_cred(), root, directory_name(first).as_bytes()).await?;
                dir = found.map(|stat| stat.attr.ino);
            }
            let Some(dir) = dir else {
                self.bad.push(format!("directory {} is not at home", directory_name(first)));
                return Ok(());
            };
            let checks = (first..).zip(some).map(|(n, bytes)| is_right(&self.there, dir, n, *bytes));
            for (n, right) in (first..).zip(all(checks).await) {
                if !right? {
                    self.bad.push(format!("file {n} at home is not what was written"));
                }
            }
        }
        Ok(())
    }

    /// Removes a run's directory.
    async fn remove(&self, root: InodeId, name: &[u8]) -> Outcome<()> {
        let superuser = Cred { uid: 0, gid: 0, groups: vec![0] };
        let mut directories = vec![(InodeId::ROOT, name.to_vec(), root)];
        let mut at = 0;
        while let Some((_, _, dir)) = directories.get(at).cloned() {
            at += 1;
            let mut after = 0;
            loop {
                let listed = self.there.readdir(&superuser, dir, after, 1024, false).await?;
                let Some(last) = listed.entries.last() else { break };
                after = last.cookie;
                for some in listed.entries.chunks(AT_ONCE) {
                    let gone = some.iter().map(|entry| async move {
                        match self.there.unlink(&own_cred(), dir, &entry.name).await {
                            Err(e) if e.kind == IS_DIRECTORY => {
                                Ok(Some((dir, entry.name.to_vec(), entry.ino)))
                            }
                            done => done.map(|()| None),
                        }
                    });
                    let gone = all(gone).await.into_iter().collect::<weir_proto::Result<Vec<_>>>()?;
                    directories.extend(gone.into_iter().flatten());
                }
                if listed.end {
                    break;
                }
            }
        }
        for (parent, name, _) in directories.iter().rev() {
            self.there.rmdir(&own_cred(), *parent, name).await?;
        }
        Ok(())
    }
}

const IS_DIRECTORY: weir_proto::ErrorKind = weir_proto::ErrorKind::Name(weir_proto::NameRule::IsDirectory);

async fn all<'a, T, F: Future<Output = T> + Send + 'a>(calls: impl Iterator<Item = F>) -> Vec<T> {
    join_all(calls.map(|call| Box::pin(call) as BoxFuture<'a, T>).collect()).await
}

fn shown(choice: &Choice, is_capped: bool) -> String {
    let Choice { streams, window_bytes, extent_bytes } = choice;
    let more = if is_capped { ", at most" } else { "" };
    format!("{streams} streams, window {} MiB, extent {} MiB{more}", window_bytes / MIB, extent_bytes / MIB)
}

fn directory_name(file: u64) -> String {
    format!("d{:03}", file / FILES_PER_DIRECTORY)
}

/// A part of a file: no two are the same, and none is compressible on the way.
fn part(file: u64, at: u64, len: usize) -> Bytes {
    let mut state = (file + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ at;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    Bytes::from(bytes)
}

async fn write_file(client: &Client, dir: InodeId, file: u64, bytes: u64) -> Outcome<()> {
    let name = format!("f{file}");
    let opened = client.create(&own_cred(), dir, name.as_bytes(), 0o644, true, OpenMode::WRITE).await?;
    let mut at = 0;
    while at < bytes {
        let len = (bytes - at).min(PART as u64) as usize;
        let part = part(file, at, len);
        let mut done = 0;
        while done < len {
            done += client.write(opened.handle, at + done as u64, part.slice(done..)).await?;
        }
        at += len as u64;
    }
    client.fsync(opened.handle).await?;
    Ok(client.release(opened.handle).await?)
}

async fn is_right(client: &Client, dir: InodeId, file: u64, bytes: u64) -> Outcome<bool> {
    let name = format!("f{file}");
    let Some(found) = client.lookup(&own_cred(), dir, name.as_bytes()).await? else { return Ok(false) };
    if found.attr.size != bytes {
        return Ok(false);
    }
    let opened = client.open(&own_cred(), found.attr.ino, OpenMode::READ).await?;
    let (mut at, mut right) = (0, true);
    while at < bytes && right {
        let len = (bytes - at).min(PART as u64) as usize;
        let sum = |parts: &[Bytes]| parts.iter().fold(0, |sum, part| crc32c_append(sum, part));
        right = sum(&client.read(opened.handle, at, len).await?) == sum(&[part(file, at, len)]);
        at += len as u64;
    }
    client.release(opened.handle).await?;
    Ok(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_by_table() {
        for (load, scale, files, bytes) in [
            (Load::Small, 1.0, 10_000, 100_000_000),
            (Load::Medium, 1.0, 1000, 6_000_000_000),
            (Load::Single, 1.0, 1, 10_000_000_000),
            (Load::Mixed, 1.0, 5101, 1_650_000_000),
            (Load::Mixed, 0.1, 511, 165_000_000),
            (Load::Medium, 0.0001, 1, 6_000_000),
        ] {
            let made = load.files(scale);
            assert_eq!((made.len(), made.iter().sum::<u64>()), (files, bytes), "{load:?} {scale}");
        }
    }
}
