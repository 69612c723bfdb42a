//! `weir volume backup` and `backups`: makes a backup now, sets the interval at which movers make one, lists
//! backups.
//!
//! `weir_home::backup` defines a backup and how it is made; the metadata leader knows which client makes one
//! at the moment, so this command asks it like a mover.
use crate::commands::relation::require_allowed;
use clap::Args;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::homes::Homes;
use weir_admin::local::process::own_process;
use weir_admin::namespace_client::{Cluster, as_client, explain, named, own_cred};
use weir_admin::times::parse_every;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_client::{BackupEdit, Client};
use weir_diagnose::backups::state;
use weir_diagnose::quantity::show_seconds;
use weir_home::HomeUrl;
use weir_home::backup::{self, Job, Made, Progress, TreeName, home_of};
use weir_home::mover::OpenHome;
use weir_proto::backup::{Backup, BackupOutcome, BackupRetention};
use weir_proto::meta::Time;
use weir_proto::retention::{parse_backup_retention, show_backup_retention};
use weir_proto::volume::Volume;
use weir_proto::{Error, ErrorKind, MIB};

/// Parts of files that are read from the cache.
const MEMORY_BYTES: u64 = 64 * MIB;
const SHOW_EVERY: Duration = Duration::from_millis(200);
/// Missing entries that are named on the terminal.
const NAMED: usize = 10;

#[derive(Args)]
pub struct Make {
    /// The volume
    pub volume: String,
    /// Destination, like file:///backups/ada or weir://host:port/path [default: the volume's only
    /// destination]
    #[arg(long, value_name = "URL")]
    pub to: Option<String>,
    /// Make backups at this interval, like 1d or 12h (movers do)
    #[arg(long, value_name = "TIME", value_parser = parse_every, conflicts_with_all = ["off", "forget"])]
    pub every: Option<u32>,
    /// Retention: the newest of each of this number of days, weeks and months [default: 7d,4w,6m]
    #[arg(long, value_name = "KEEP", value_parser = read_retention)]
    pub keep: Option<BackupRetention>,
    /// Make a backup now, also with --every
    #[arg(long)]
    pub at_once: bool,
    /// Disable scheduled backups
    #[arg(long, conflicts_with = "at_once")]
    pub off: bool,
    /// Forget the destination, and delete the snapshot kept for its next backup; existing backups stay
    #[arg(long, conflicts_with_all = ["at_once", "off", "keep"])]
    pub forget: bool,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct List {
    /// The volume
    pub volume: String,
    #[command(flatten)]
    pub at: Cluster,
}

fn read_retention(text: &str) -> Result<BackupRetention, String> {
    parse_backup_retention(text).map_err(|e| e.to_string())
}

/// A client, and its way to open homes.
struct Desk {
    client: Client,
    homes: Homes,
}

impl Desk {
    async fn open(at: &Cluster) -> Outcome<Desk> {
        let (env, coordinators) = (weir_env::real::env(), coordinators(&at.cluster)?);
        let cluster = observe::observe(&env, &coordinators, "weir backup").await?;
        let client =
            as_client(coordinators, &at.namespace, "weir backup", own_process(), MEMORY_BYTES).await?;
        let homes = Homes::new(env, cluster.id(), None, cluster.map().homes.clone());
        Ok(Desk { client, homes })
    }
    async fn close(self) -> Outcome<()> {
        self.homes.close().await;
        Ok(self.client.shutdown().await?)
    }
    /// The named place, or the only one.
    async fn place(&self, volume: &Volume, to: Option<&str>) -> Outcome<String> {
        if let Some(url) = to {
            return Ok(url.to_owned());
        }
        let known = self.client.backups(Some(volume.id)).await?;
        match &known[..] {
            [one] if own_cred().uid == 0 && one.by != 0 => Err(Failure::new(
                Error::denied(format!(
                    "user {} named {}, where backups of {:?} go",
                    one.by, one.url, volume.name
                )),
                format!("to have root write there, give it: --to {}", one.url),
            )),
            [one] => Ok(one.url.clone()),
            [] => Err(Failure::new(
                Error::invalid(format!("backups of volume {:?} have no destination", volume.name)),
                "give it: --to file:///path, or --to weir://host:port/path",
            )),
            several => {
                let urls: Vec<&str> = several.iter().map(|b| b.url.as_str()).collect();
                let error = format!("backups of volume {:?} have {} destinations", volume.name, urls.len());
                Err(Failure::new(Error::invalid(error), format!("give one: --to {}", urls.join(", --to "))))
            }
        }
    }
}

pub fn make(args: &Make) -> Outcome<()> {
    observe::block_on(async {
        let desk = Desk::open(&args.at).await?;
        let done = carry_out(&desk, args).await;
        desk.close().await?;
        done
    })
}

async fn carry_out(desk: &Desk, args: &Make) -> Outcome<()> {
    let (cred, volume) = (own_cred(), named(&desk.client, &args.volume).await?);
    let url = desk.place(&volume, args.to.as_deref()).await?;
    check_url(&url)?;
    if args.every.is_some() {
        require_allowed(&url, &args.at.cluster).await?; // movers make them
    }
    let every_s = if args.off { Some(0) } else { args.every };
    let edit = BackupEdit { every_s, keep: args.keep, forget: args.forget };
    let set = desk.client.set_backup(&cred, volume.id, &url, edit).await.map_err(explain)?;
    if args.forget {
        drop_snapshots(&desk.client, &volume, &url).await?;
    }
    if args.every.is_some() || args.off || args.forget {
        say(args, &as_json(&set), || reported(args, &set));
        if !args.at_once {
            if args.every.is_some() {
                warn_if_out_of_reach(desk, &set).await;
            }
            return Ok(());
        }
    }
    make_now(desk, args, &volume, &url).await
}

fn check_url(url: &str) -> Outcome<()> {
    match HomeUrl::parse(url)? {
        HomeUrl::S3 { .. } => Err(Failure::new(
            Error::unsupported(format!("{url}: S3 has no hard links, so each backup would be a full copy")),
            "backups go to a directory (file:///path) or to another Weir (weir://host:port/path)",
        )),
        HomeUrl::File { .. } | HomeUrl::Weir { .. } => Ok(()),
    }
}

/// Not refused: movers on other nodes may reach the place.
async fn warn_if_out_of_reach(desk: &Desk, set: &Backup) {
    if let Err(fault) = desk.homes.open(&home_of(set)).await {
        eprintln!("warning: {} cannot be used from here: {fault}", set.url);
        eprintln!(
            "hint: the destination must exist before the first backup, on every node that runs a mover"
        );
    }
}

async fn drop_snapshots(client: &Client, volume: &Volume, url: &str) -> Outcome<()> {
    for snapshot in client.snapshots(volume.id).await? {
        if backup::snapshot_date(&snapshot.name, url).is_some() {
            client.delete_snapshot(&own_cred(), volume.id, &snapshot.name).await.map_err(explain)?;
        }
    }
    Ok(())
}

fn reported(args: &Make, set: &Backup) -> String {
    let (volume, url) = (&set.volume_name, &set.url);
    match () {
        () if args.forget => format!("{url} is forgotten; existing backups of {volume} stay"),
        () if args.off => format!("scheduled backups of {volume} to {url} are disabled"),
        () => format!(
            "movers back up {volume} to {url} every {}; kept: {}",
            show_seconds(set.every_s),
            show_backup_retention(&set.keep)
        ),
    }
}

async fn make_now(desk: &Desk, args: &Make, volume: &Volume, url: &str) -> Outcome<()> {
    let client = &desk.client;
    if own_cred().uid != 0 {
        return Err(Failure::new(
            Error::denied("a backup holds files of all users, so only the superuser makes it"),
            "schedule backups: --every 1d",
        ));
    }
    let taken = client.take_backup(&own_cred(), volume.id, url).await.map_err(|e| match e.kind {
        ErrorKind::Name(_) => Failure::new(e, format!("`weir volume backups {}` shows it", volume.name)),
        _ => explain(e),
    })?;
    let taken = taken.ok_or_else(|| Error::io("the metadata leader gave no backup to be made"))?;
    let progress = Arc::new(Progress::default());
    let made = tokio::select! {
        biased;
        () = client.mover().may_be_taken_for_dead() => {
            return Err(Failure::new(
                Error::unavailable("lost contact with the metadata server: another process may make this backup now"),
                "the next backup continues where this one stopped",
            ));
        }
        never = show(&progress, volume) => match never {},
        made = run(desk, &taken, &progress) => made,
    };
    let outcome = match &made {
        Ok(made) => made.outcome(&progress),
        Err(failure) => BackupOutcome::Failed { why: failure.error.to_string() },
    };
    client.backup_done(volume.id, url, &outcome).await?;
    report(args, &made?, &progress, url)
}

async fn run(desk: &Desk, taken: &Backup, progress: &Arc<Progress>) -> Outcome<Made> {
    let home = desk.homes.open(&home_of(taken)).await.map_err(Error::from)?;
    let (env, client) = (weir_env::real::env(), desk.client.clone());
    let job = Job { env, client, home, backup: taken.clone(), progress: progress.clone() };
    Ok(job.run().await?)
}

/// Shows the progress for ever.
async fn show(progress: &Progress, volume: &Volume) -> Infallible {
    let (shown, all) =
        (weir_admin::progress::Progress::default(), volume.usage.files + volume.usage.directories);
    loop {
        let done = progress.files.load(Relaxed) + progress.directories.load(Relaxed);
        let (copied, linked) = (table::bytes(progress.bytes.load(Relaxed)), progress.linked.load(Relaxed));
        shown.show(format!(
            "{done} of {all} files and directories, {copied} copied, {linked} files unchanged"
        ));
        tokio::time::sleep(SHOW_EVERY).await;
    }
}

fn report(args: &Make, made: &Made, progress: &Progress, url: &str) -> Outcome<()> {
    let (gaps, missing) = progress.gaps();
    let (files, linked) = (progress.files.load(Relaxed), progress.linked.load(Relaxed));
    let bytes = progress.bytes.load(Relaxed);
    let shown: Vec<Value> = gaps.iter().map(|gap| json!({ "path": gap.path, "why": gap.why })).collect();
    let value = json!({
        "volume": args.volume, "url": url, "backup": made.tree.text(), "whole": missing == 0,
        "went_on": made.went_on, "base": made.base.map(|base| base.text()), "files": files, "linked": linked,
        "bytes": bytes, "missing": missing, "missing_named": shown,
        "removed": made.removed.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    say(args, &value, || {
        let mut text = format!(
            "backup {} complete: {} ({linked} unchanged), {} copied",
            made.tree.text(),
            table::count(files, ["file", "files"]),
            table::bytes(bytes)
        );
        if made.went_on {
            text += "; it had been begun before";
        }
        for date in &made.removed {
            text += &format!("\n{date} was kept long enough and is removed");
        }
        text
    });
    if missing == 0 {
        return Ok(());
    }
    for gap in gaps.iter().take(NAMED) {
        eprintln!("missing: {}: {}", gap.path, gap.why);
    }
    let list = made.tree.made().map(|date| TreeName::Missing(date).text()).unwrap_or_default();
    Err(Failure::new(
        Error::io(format!("the backup is incomplete: {missing} files or directories are missing")),
        format!("{url}/{list} names them; the next backup tries them again"),
    ))
}

fn say(args: &Make, value: &Value, text: impl FnOnce() -> String) {
    match args.at.cluster.json {
        true => table::json(value),
        false => println!("{}", text()),
    }
}

// ---- what there is

pub fn list(args: &List) -> Outcome<()> {
    observe::block_on(async {
        let desk = Desk::open(&args.at).await?;
        let shown = list_all(&desk, args).await;
        desk.close().await?;
        shown
    })
}

async fn list_all(desk: &Desk, args: &List) -> Outcome<()> {
    let volume = named(&desk.client, &args.volume).await?;
    let places = desk.client.backups(Some(volume.id)).await?;
    let mut values = Vec::new();
    for place in &places {
        let made = match desk.homes.open(&home_of(place)).await {
            Ok(home) => backup::list(&*home).await.map_err(|e| e.to_string()),
            Err(fault) => Err(fault.to_string()),
        };
        if args.at.cluster.json {
            let mut value = as_json(place);
            match made {
                Ok(made) => value["backups"] = made.iter().map(tree_json).collect(),
                Err(why) => value["error"] = json!(why),
            }
            values.push(value);
            continue;
        }
        println!("{}: {}", place.url, state(place));
        match made {
            Ok(made) => {
                let rows: Vec<_> = made.iter().rev().map(tree_row).collect();
                print!("{}", table::render(&["BACKUP", "STATE"], &rows));
            }
            Err(why) => println!("  cannot be read from here: {why}"),
        }
    }
    if args.at.cluster.json {
        table::json(&Value::Array(values));
    } else if places.is_empty() {
        println!(
            "no backups of {} are made: `weir volume backup {} --to URL` makes one",
            volume.name, volume.name
        );
    }
    Ok(())
}

fn tree_json(tree: &TreeName) -> Value {
    let whole = matches!(tree, TreeName::Whole(_));
    json!({ "backup": tree.text(), "date": tree.made().map(|date| date.to_string()), "whole": whole })
}
fn tree_row(tree: &TreeName) -> Vec<String> {
    let state = if matches!(tree, TreeName::Whole(_)) { "whole" } else { "incomplete" };
    vec![tree.made().map(|date| date.to_string()).unwrap_or_default(), state.into()]
}

pub fn as_json(b: &Backup) -> Value {
    let seconds = |t: Option<Time>| t.map(|t| t.nanos / 1_000_000_000);
    let last = b.last.as_ref().map(|last| {
        let (began, ended) = (seconds(Some(last.began)), seconds(Some(last.ended)));
        match &last.outcome {
            BackupOutcome::Made { date, missing, files, linked, bytes } => json!({
                "began": began, "ended": ended, "date": date, "missing": missing, "files": files,
                "linked": linked, "bytes": bytes,
            }),
            BackupOutcome::Failed { why } => json!({ "began": began, "ended": ended, "error": why }),
        }
    });
    json!({
        "volume": b.volume_name, "url": b.url, "every_seconds": (b.every_s > 0).then_some(b.every_s),
        "keep": show_backup_retention(&b.keep), "running_since": seconds(b.running.as_ref().map(|run| run.began)),
        "last": last, "last_good": seconds(b.good), "due": seconds(b.due), "late": b.late, "state": state(b),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_refused_in_plain_words() {
        let refused = check_url("s3://b/p").unwrap_err().to_string();
        assert!(refused.contains("hard links") && refused.contains("file:///path"), "{refused}");
        check_url("file:///a").unwrap();
    }
}
