//! The metadata role measured alone: one session, as many requests in flight as it has slots.
use crate::spinner::spinner;
use bytes::Bytes;
use clap::{Args, ValueHint};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::local_cluster::LocalCluster;
use weir_admin::local::process::own_process;
use weir_admin::observe;
use weir_env::{Addr, Env};
use weir_proto::meta::{
    Create, Cred, GetAttr, KeepAlive, Mkdir, Op, SLOTS, SessionClose, SessionOpen, SessionOpened, Unlink,
};
use weir_proto::{Error, InodeId, SessionId};
use weir_rpc::{Channel, NoService};

const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Args)]
pub struct Options {
    /// The directory that `weir up` was given
    #[arg(long, value_hint = ValueHint::DirPath, required_unless_present = "coordinator")]
    pub dir: Option<PathBuf>,
    /// Address of the coordinator
    #[arg(long, value_name = "ADDR")]
    pub coordinator: Vec<Addr>,
    /// Requests in flight
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=i64::from(SLOTS)))]
    pub in_flight: u32,
    /// Files
    #[arg(long, default_value_t = 100_000)]
    pub files: u32,
    /// Runs; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Operations per second of one run.
struct Rates {
    create: f64,
    stat: f64,
    unlink: f64,
}

pub fn run(options: &Options) -> Outcome<ExitCode> {
    let coordinators = match &options.dir {
        Some(dir) => LocalCluster::open(dir)?.coordinators(),
        None => options.coordinator.clone(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .doing("start a runtime")?;
    let bar = spinner("measuring the metadata role");
    let rates = runtime.block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir-bench meta").await?;
        let namespace = cluster.map().namespaces.first().cloned();
        let namespace = namespace.ok_or_else(|| Error::unavailable("the cluster has no namespace yet"))?;
        let channel = cluster.meta_leader(&namespace.name, Arc::new(NoService))?;
        let open =
            SessionOpen { namespace: namespace.id, client: "weir-bench meta".into(), process: own_process() };
        let (SessionOpened { session, .. }, _) = channel.call(&open, Vec::new(), PATIENCE).await?;
        let alive =
            env.tasks.spawn("keep the session alive", keep_alive(env.clone(), channel.clone(), session));
        let mut rates = Vec::new();
        for run in 0..options.runs {
            rates.push(once(&env, &channel, session, options, run).await?);
        }
        alive.abort();
        channel.call(&SessionClose { session }, Vec::new(), PATIENCE).await?;
        Ok::<_, weir_admin::failure::Failure>(rates)
    })?;
    bar.finish_and_clear();
    print(options, &rates);
    Ok(ExitCode::SUCCESS)
}

fn print(options: &Options, rates: &[Rates]) {
    let sorted = |of: fn(&Rates) -> f64| {
        let mut values: Vec<f64> = rates.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let rows =
        [("create", sorted(|r| r.create)), ("stat", sorted(|r| r.stat)), ("unlink", sorted(|r| r.unlink))];
    let machine = weir_load::machine();
    if options.json {
        let figures: Vec<_> = rows
            .iter()
            .map(|(name, v)| json!({ "name": name, "per_s": v[v.len() / 2], "min": v[0], "max": v[v.len() - 1] }))
            .collect();
        println!(
            "{:#}",
            json!({
                "workload": "meta", "in_flight": options.in_flight, "files": options.files, "runs": options.runs,
                "machine": machine, "rows": figures,
            })
        );
        return;
    }
    println!(
        "metadata over RPC, {} in flight, {} files, runs: {}",
        options.in_flight, options.files, options.runs
    );
    println!("{}, {} cores, Linux {}, weir {}", machine.cpu, machine.cores, machine.kernel, machine.version);
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|(name, v)| {
            [
                vec![(*name).to_string()],
                [v[v.len() / 2], v[0], v[v.len() - 1]].map(|x| format!("{x:.0}")).to_vec(),
            ]
            .concat()
        })
        .collect();
    print!("{}", weir_admin::table::render(&["", "median 1/s", "min", "max"], &rows));
}

async fn keep_alive(env: Env, channel: Channel, session: SessionId) {
    loop {
        env.clock.sleep(Duration::from_secs(1)).await;
        let _ = channel.call(&KeepAlive { session, saved: 0 }, Vec::new(), PATIENCE).await; // the run reports a loss
    }
}

fn cred() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![0] }
}

fn name(file: u32) -> Bytes {
    Bytes::from(format!("file-{file:08}"))
}

async fn once(
    env: &Env,
    channel: &Channel,
    session: SessionId,
    options: &Options,
    run: u32,
) -> Outcome<Rates> {
    // Sequence numbers continue over runs: each slot's start where the previous run ended.
    let per_slot = u64::from(options.files) * 2 + 2;
    let seq = u64::from(run) * per_slot + 1;
    let dir_name = Bytes::from(format!("bench-meta-{}-{run}", std::process::id()));
    let mkdir = Mkdir {
        op: Op { session, slot: 0, seq },
        cred: cred(),
        parent: InodeId::ROOT,
        name: dir_name.clone(),
        mode: 0o755,
        umask: 0,
    };
    let (made, _) = channel.call(&mkdir, Vec::new(), PATIENCE).await?;
    let parent = made.entry.attr.ino;
    let begun = Instant::now();
    let created = each(env, channel, options, move |channel, slot, file, nth| async move {
        let create = Create {
            op: Op { session, slot, seq: seq + 1 + nth },
            cred: cred(),
            parent,
            name: name(file),
            mode: 0o644,
            umask: 0,
            exclusive: true,
            open: 0,
        };
        let (created, _) = channel.call(&create, Vec::new(), PATIENCE).await?;
        Ok(created.entry.attr.ino)
    })
    .await?;
    let create = f64::from(options.files) / begun.elapsed().as_secs_f64();
    let inodes = Arc::new(created);
    let begun = Instant::now();
    each(env, channel, options, move |channel, _, file, _| {
        let ino = inodes[file as usize];
        async move { channel.call(&GetAttr { session, ino }, Vec::new(), PATIENCE).await.map(|_| ino) }
    })
    .await?;
    let stat = f64::from(options.files) / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let after_creates = seq + 1 + u64::from(options.files);
    each(env, channel, options, move |channel, slot, file, nth| async move {
        let op = Op { session, slot, seq: after_creates + nth };
        let unlink = Unlink { op, cred: cred(), parent, name: name(file) };
        channel.call(&unlink, Vec::new(), PATIENCE).await.map(|(removed, _)| removed.ino)
    })
    .await?;
    let unlink = f64::from(options.files) / begun.elapsed().as_secs_f64();
    let op = Op { session, slot: 0, seq: seq + per_slot - 1 };
    let rmdir = weir_proto::meta::Rmdir { op, cred: cred(), parent: InodeId::ROOT, name: dir_name };
    channel.call(&rmdir, Vec::new(), PATIENCE).await?;
    Ok(Rates { create, stat, unlink })
}

/// Runs `work` for every file, one at a time on each slot; returns the inodes by file.
async fn each<F>(
    env: &Env,
    channel: &Channel,
    options: &Options,
    work: impl Fn(Channel, u32, u32, u64) -> F + Clone + Send + 'static,
) -> Outcome<Vec<InodeId>>
where
    F: Future<Output = weir_proto::Result<InodeId>> + Send + 'static,
{
    let (files, slots) = (options.files, options.in_flight);
    let mut parts = Vec::new();
    for slot in 0..slots {
        let (work, channel) = (work.clone(), channel.clone());
        let (tx, rx) = tokio::sync::oneshot::channel();
        env.tasks.spawn("bench slot", async move {
            let mut found = Vec::new();
            for (nth, file) in (slot..files).step_by(slots as usize).enumerate() {
                match work(channel.clone(), slot, file, nth as u64).await {
                    Ok(ino) => found.push((file, ino)),
                    Err(e) => return drop(tx.send(Err(e))),
                }
            }
            let _ = tx.send(Ok(found)); // the caller is gone after an error of another slot
        });
        parts.push(rx);
    }
    let mut inodes = vec![InodeId::default(); files as usize];
    for part in parts {
        let found = part.await.map_err(|_| Error::unavailable("a part of the benchmark ended early"))??;
        found.into_iter().for_each(|(file, ino)| inodes[file as usize] = ino);
    }
    Ok(inodes)
}
