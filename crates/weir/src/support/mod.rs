//! `weir support`: one archive of diagnostics for remote support.
//!
//! Invariants: it contains no names of files and no secrets, unless names are requested (secrets never are);
//! missing facts are replaced by the reason; nothing of the cluster is changed.
mod redact;

use crate::commands::watch::{events, status};
use crate::console::api;
use clap::{Args, ValueHint};
use flate2::Compression;
use flate2::write::GzEncoder;
use redact::Known;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use weir_admin::cluster_args::Status;
use weir_admin::collect::Asker;
use weir_admin::failure::{Doing, Outcome};
use weir_admin::local::local_cluster::LocalCluster;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::Collected;
use weir_diagnose::troubles::Facts;
use weir_diagnose::waits::{self, sorted};
use weir_diagnose::work::{By, Names, lines_of};
use weir_proto::Error;
use weir_proto::date::Date;
use weir_proto::event::GetEvents;
use weir_proto::watch::{
    Facts as NodeFacts, GetFacts, GetHistory, GetMeters, GetTop, ListWaits, Meter, Meters, SeriesRead, Top,
    WaitsListed,
};

#[derive(Args)]
pub struct SupportArgs {
    /// The archive to write [default: weir-support-TIME.tar.gz here]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Leave names of files in it
    #[arg(long)]
    pub names: bool,
    #[command(flatten)]
    pub cluster: Status,
}

const PATIENCE: Duration = Duration::from_secs(2);
/// The patience for all queries of the history, which is large.
const HISTORY_PATIENCE: Duration = Duration::from_secs(20);
const HISTORY_MINUTES: u32 = 360;
/// The end of each log of this machine.
const LOG_BYTES_MAX: u64 = 512 << 10;
const TOP_S: u32 = 60;

const README: &str = "\
Weir support archive.

  status.json      what `weir status --json` prints
  events.json      troubles as they began and ended
  waits.json       what processes wait for, and have waited for in the last hour
  top.json         who had the work of the last minute, by user, volume, client, job and kind
  meters.json      what each process has counted
  history.json     series by minute of the last six hours, summed over all processes
  nodes/NAME.txt   kernel, processors, memory, load and last log lines of each process that answered
  logs/ config/    of this machine: ends of logs, configurations (certificates and keys are other files)
";

pub fn support(args: &SupportArgs) -> Outcome<()> {
    let (local, coordinators) = (args.cluster.local()?, coordinators(&args.cluster)?);
    let now_s = u64::try_from(weir_env::real::env().clock.wall().0 / 1_000_000_000).unwrap_or(0);
    let path = args.output.clone().unwrap_or_else(|| {
        let day: String =
            Date(now_s as i64).to_string().chars().filter(char::is_ascii_alphanumeric).collect();
        PathBuf::from(format!("weir-support-{day}.tar.gz"))
    });
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let file = file.doing(format_args!("write {}", path.display()))?;
    let written = observe::block_on(async {
        let asker = Asker::connect(&coordinators, "weir support").await?;
        let written = write(args, local, &asker, file, now_s).await;
        asker.end().await;
        written
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&path); // a partial archive is useless
    }
    let files = written?;
    let bytes = std::fs::metadata(&path).doing("stat the archive")?.len();
    if args.cluster.json {
        table::json(&json!({ "archive": path, "bytes": bytes, "names": args.names, "files": files }));
        return Ok(());
    }
    files.iter().for_each(|file| println!("  {file}"));
    let held = match args.names {
        true => "It holds names of files, and no secrets",
        false => "Names of files and secrets were removed",
    };
    println!("{}: {}. {held}; review it before you send it.", path.display(), table::bytes(bytes));
    Ok(())
}

/// The archive as it is written.
struct Bundle {
    tar: tar::Builder<GzEncoder<File>>,
    known: Known,
    now_s: u64,
    files: Vec<String>,
}

impl Bundle {
    fn put(&mut self, name: &str, text: &str) -> Outcome<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.now_s);
        let name = format!("weir-support/{name}");
        self.tar.append_data(&mut header, &name, text.as_bytes()).doing(format_args!("write {name}"))?;
        self.files.push(name);
        Ok(())
    }
    fn put_text(&mut self, name: &str, text: &str) -> Outcome<()> {
        let text = self.known.text(text);
        self.put(name, &text)
    }
    /// A missing fact is replaced by the reason.
    fn put_json(&mut self, name: &str, value: weir_proto::Result<Value>) -> Outcome<()> {
        let value = value.unwrap_or_else(|e| json!({ "missing": e.to_string() }));
        let text = format!("{:#}\n", self.known.value(value));
        self.put(name, &text)
    }
}

async fn write(
    args: &SupportArgs,
    local: Option<LocalCluster>,
    asker: &Arc<Asker>,
    file: File,
    now_s: u64,
) -> Outcome<Vec<String>> {
    let facts = asker.facts(local.clone()).await?;
    let mut known = known(&facts, local.as_ref());
    known.names = args.names;
    let cluster = &asker.cluster;
    let (waits, top) = (ListWaits { min_ms: 10, since_s: 3600 }, GetTop { seconds: TOP_S });
    let (meters, waits, tops, nodes, events) = tokio::join!(
        cluster.collect::<_, Meters>(&GetMeters {}, PATIENCE),
        cluster.collect::<_, WaitsListed>(&waits, PATIENCE),
        cluster.collect::<_, Top>(&top, PATIENCE),
        cluster.collect::<_, NodeFacts>(&GetFacts {}, PATIENCE),
        cluster.administer(&GetEvents {}),
    );
    let nodes = nodes.unwrap_or_default();
    known.words.extend(nodes.iter().map(|node| node.name.clone()));
    let tar = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    let mut bundle = Bundle { tar, known, now_s, files: Vec::new() };
    bundle.put("README.txt", README)?;
    let names = facts.volume_names();
    bundle.put_json("status.json", Ok(status::as_json(facts)))?;
    bundle.put_json("events.json", events.map(|log| events::as_json(&log)))?;
    let waits = waits.map(|collected| {
        let (seen, silent) = sorted(collected);
        waits::as_json(&seen, &silent)
    });
    bundle.put_json("waits.json", waits)?;
    bundle.put_json("top.json", tops.map(|tops| tops_json(&tops, names)))?;
    bundle.put_json("meters.json", meters.map(|meters| meters_json(&meters)))?;
    let history = asker.env.clock.timeout(HISTORY_PATIENCE, history(asker)).await;
    let late = || Error::deadline("the history took too long");
    bundle.put_json("history.json", history.unwrap_or_else(|_| Err(late())))?;
    for node in &nodes {
        put_node(&mut bundle, node)?;
    }
    put_machine(&mut bundle, local.as_ref())?;
    let Bundle { tar, files, .. } = bundle;
    let gzip = tar.into_inner().doing("end the archive")?;
    gzip.finish().and_then(|file| file.sync_all()).doing("end the archive")?;
    Ok(files)
}

/// The cluster's own words, and directories that may be shown.
fn known(facts: &Facts, local: Option<&LocalCluster>) -> Known {
    let mut known = Known::default();
    let map = &facts.status.map;
    known.words.extend(map.nodes.iter().map(|node| node.name.clone()));
    known.words.extend(map.namespaces.iter().map(|namespace| namespace.name.clone()));
    known.words.extend(facts.volume_names().into_values());
    known.words.extend(facts.processes.iter().map(|process| process.name.clone()));
    known.words.extend(facts.conditions.iter().map(|node| node.node.clone()));
    known.dirs.extend(local.map(|local| local.dir.display().to_string()));
    known.dirs.extend(facts.conditions.iter().flat_map(|n| &n.condition.disks).map(|disk| disk.dir.clone()));
    known.tops.extend(facts.mounts.iter().map(|mount| mount.path.display().to_string()));
    let namespaces = facts.namespaces.iter().filter_map(|n| n.known.as_ref().ok());
    let homes = namespaces.flat_map(|k| &k.relations).filter_map(|r| r.url.strip_prefix("file://"));
    known.tops.extend(homes.map(|path| path.split('?').next().unwrap_or_default().to_owned()));
    known
}

fn tops_json(tops: &[Collected<Top>], volumes: BTreeMap<u32, String>) -> Value {
    let names = Names { volumes, users: Default::default() };
    let of = |by: By, word: &str| (word.to_owned(), json!(lines_of(by, tops, &names)));
    let all = [
        (By::User, "user"),
        (By::Volume, "volume"),
        (By::Client, "client"),
        (By::Job, "job"),
        (By::Kind, "kind"),
    ];
    Value::Object(all.map(|(by, word)| of(by, word)).into_iter().collect())
}

fn meters_json(collected: &[Collected<Meters>]) -> Value {
    let meter = |m: &Meter| {
        let buckets: Vec<_> = m.buckets.iter().map(|b| json!([b.below, b.count])).collect();
        json!({ "name": m.name, "label": m.label_value, "value": m.value, "count": m.count, "buckets": buckets })
    };
    let one = |g: &Collected<Meters>| match &g.reply {
        Ok(reply) => {
            json!({ "process": g.name, "meters": reply.meters.iter().map(meter).collect::<Vec<_>>() })
        }
        Err(why) => json!({ "process": g.name, "missing": why }),
    };
    collected.iter().map(one).collect()
}

/// Every series of every process, without those of single targets.
async fn history(asker: &Asker) -> weir_proto::Result<Value> {
    let list = GetHistory { name: String::new(), by_minute: true, points: 1 };
    let listed: Vec<Collected<SeriesRead>> = asker.cluster.collect(&list, PATIENCE).await?;
    let names: BTreeSet<String> =
        listed.into_iter().filter_map(|g| g.reply.ok()).flat_map(|r| r.names).collect();
    let names = names.into_iter().filter(|name| !name.contains('{'));
    let mut all = Vec::new();
    for name in names {
        all.push(api::history(&asker.cluster, &name, HISTORY_MINUTES).await?);
    }
    Ok(Value::Array(all))
}

fn put_node(bundle: &mut Bundle, node: &Collected<NodeFacts>) -> Outcome<()> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = node.name.chars().map(plain).collect();
    let text = match &node.reply {
        Ok(reply) => {
            let facts =
                reply.facts.iter().map(|fact| format!("== {}\n{}\n", fact.name, fact.text.trim_end()));
            facts.collect::<Vec<_>>().join("\n")
        }
        Err(why) => format!("missing: {why}\n"),
    };
    bundle.put_text(&format!("nodes/{name}.txt"), &text)
}

/// Logs and configurations of this machine.
fn put_machine(bundle: &mut Bundle, local: Option<&LocalCluster>) -> Outcome<()> {
    let Some(local) = local else {
        let files = files_in(Path::new("/etc/weir"), "toml");
        put_files(bundle, "config", &files)?;
        return put_journal(bundle);
    };
    put_files(bundle, "config", &files_in(&local.dir.join("etc"), "toml"))?;
    put_files(bundle, "logs", &files_in(&local.dir.join("log"), "log"))
}

fn files_in(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == ending)).collect();
    files.sort();
    files
}

fn put_files(bundle: &mut Bundle, dir: &str, files: &[PathBuf]) -> Outcome<()> {
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let text = end_of(path).unwrap_or_else(|e| format!("missing: {e}\n"));
        bundle.put_text(&format!("{dir}/{name}"), &text)?;
    }
    Ok(())
}

fn end_of(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(LOG_BYTES_MAX)))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The log of the package's units; nothing on a machine without a journal.
fn put_journal(bundle: &mut Bundle) -> Outcome<()> {
    let output = Command::new("journalctl").args(["--unit=weir-*", "--lines=5000", "--no-pager"]).output();
    match output {
        Ok(output) if output.status.success() => {
            bundle.put_text("logs/journal.txt", &String::from_utf8_lossy(&output.stdout))
        }
        _ => Ok(()),
    }
}
