//! `weir namespace`: exports a namespace's whole state into a file, by command or on a schedule, and imports
//! one from such a file. `copies.rs` has its other commands.
//!
//! The metadata leader makes exports; this fetches one, or sets when and where the leader is to write them.
//! An import fills a metadata directory while no metadata role runs.
pub mod args;
mod copies;

use args::{Export, Exports, Import, NamespaceCommand};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::progress::Progress;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_diagnose::quantity::show_seconds;
use weir_meta::export::{Totals, Writer};
use weir_proto::Error;
use weir_proto::copies::decode_pairs;
use weir_proto::date::Date;
use weir_proto::export::{
    ExportBegin, ExportFetch, ExportHead, ExportMade, ExportSet, ExportState, GetExports,
};
use weir_rpc::{Channel, NoService};

/// The patience for one part of an export, and for its beginning, which folds the journal.
const PATIENCE: Duration = Duration::from_secs(60);
/// The suffix of export files in a directory.
const SUFFIX: &str = "weir-export";

/// Fills the metadata directory of the role with this configuration.
pub type Fill<'a> = &'a dyn Fn(PathBuf, File, Box<dyn FnMut(Totals)>) -> Outcome<(ExportHead, Totals)>;

pub fn run(command: &NamespaceCommand, fill: Fill<'_>) -> Outcome<()> {
    match command {
        NamespaceCommand::List(at) => copies::list(at),
        NamespaceCommand::Copies(args) => copies::set(args),
        NamespaceCommand::Export(args) => export(args),
        NamespaceCommand::Exports(args) => exports(args),
        NamespaceCommand::Import(args) => import(args, fill),
    }
}

/// A connection to the metadata leader.
fn with_leader<T>(at: &Exports, work: impl AsyncFnOnce(&Channel) -> Outcome<T>) -> Outcome<T> {
    let coordinators = coordinators(&at.cluster)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir namespace").await?;
        work(&cluster.meta_leader(&at.namespace, Arc::new(NoService))?).await
    })
}

fn export(args: &Export) -> Outcome<()> {
    let to = args.to.as_deref().map(local_path).transpose()?;
    let state = match (&to, args.every) {
        (Some(dir), Some(every_s)) => {
            let set = ExportSet { dir: dir.display().to_string(), every_s, keep: args.keep };
            with_leader(&args.of, async |leader| Ok(leader.call(&set, Vec::new(), PATIENCE).await?.0))?
        }
        (Some(path), None) => return export_now(args, path),
        (None, _) => {
            let set = ExportSet { dir: String::new(), every_s: 0, keep: 0 };
            with_leader(&args.of, async |leader| Ok(leader.call(&set, Vec::new(), PATIENCE).await?.0))?
        }
    };
    show_state(&state, args.of.cluster.json);
    Ok(())
}

/// A path, or `file:///path` in the form of homes.
fn local_path(text: &str) -> Outcome<PathBuf> {
    match text.split_once("://") {
        None => Ok(PathBuf::from(text)),
        Some(("file", path)) => Ok(PathBuf::from(path)),
        Some((kind, _)) => Err(Failure::new(
            Error::unsupported(format!("exports are written to files, not to {kind}://")),
            "write it to a file, and copy that",
        )),
    }
}

fn export_now(args: &Export, path: &Path) -> Outcome<()> {
    let (file, head, totals) = with_leader(&args.of, async |leader| {
        let (begun, _) = leader.call(&ExportBegin {}, Vec::new(), PATIENCE).await?;
        let file = match path.is_dir() {
            true => {
                let date = Date::of(begun.head.taken).compact();
                path.join(format!("{}-{date}.{SUFFIX}", begun.head.name))
            }
            false => path.to_owned(),
        };
        let totals = fetch(leader, begun.export, &begun.head, &file).await?;
        Ok((file, begun.head, totals))
    })?;
    report("exported", &file, &head, totals, args.of.cluster.json);
    Ok(())
}

/// The file gets its name when all of it is durable; an existing file is not replaced.
async fn fetch(leader: &Channel, export: u64, head: &ExportHead, file: &Path) -> Outcome<Totals> {
    let doing = format!("write {}", file.display());
    if file.exists() {
        let error = Error::exists(format!("{} exists already", file.display()));
        return Err(Failure::new(error, "name a new file, or a directory"));
    }
    let part = file.with_extension("part");
    let opened = OpenOptions::new().write(true).create(true).truncate(true).open(&part).doing(&doing)?;
    let progress = Progress::default();
    let mut writer = Writer::begin(BufWriter::new(opened), head)?;
    let mut after = None;
    loop {
        let ask = ExportFetch { export, after };
        let (_, payload) = leader.call(&ask, Vec::new(), PATIENCE).await?;
        let pairs = decode_pairs(&payload)?;
        let Some((last, _)) = pairs.last() else { break };
        after = Some(last.clone().into());
        writer.part(&pairs)?;
        show(&progress, writer.totals());
    }
    drop(progress);
    let (written, totals) = writer.end()?;
    let written = written.into_inner().map_err(|e| Error::from_io(&doing, e.error()))?;
    written.sync_all().doing(&doing)?;
    std::fs::rename(&part, file).doing(&doing)?;
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).doing(&doing)?;
    Ok(totals)
}

fn show(progress: &Progress, totals: Totals) {
    progress.show(format!("{} records, {}", totals.entries, table::bytes(totals.bytes)));
}

fn report(what: &str, file: &Path, head: &ExportHead, totals: Totals, as_json: bool) {
    let (taken, bytes) = (Date::of(head.taken).to_string(), table::bytes(totals.bytes));
    match as_json {
        true => table::json(&json!({
            "namespace": head.name, "uuid": head.uuid.to_string(), "cluster": head.cluster.to_string(),
            "file": file.display().to_string(), "taken": taken, "changes": head.changes,
            "records": totals.entries, "bytes": totals.bytes,
        })),
        false => println!(
            "namespace {} of {taken} {what}: {} records, {bytes}, {}",
            head.name,
            totals.entries,
            file.display()
        ),
    }
}

fn exports(args: &Exports) -> Outcome<()> {
    let state =
        with_leader(args, async |leader| Ok(leader.call(&GetExports {}, Vec::new(), PATIENCE).await?.0))?;
    show_state(&state, args.cluster.json);
    Ok(())
}

fn show_state(state: &ExportState, as_json: bool) {
    let ExportState { dir, every_s, keep, last, failure } = state;
    let made = |made: &ExportMade| json!({ "file": made.file, "began": Date::of(made.began).to_string(), "records": made.entries, "bytes": made.bytes });
    if as_json {
        return table::json(&json!({
            "dir": dir, "every_s": every_s, "keep": keep, "last": last.as_ref().map(made),
            "failure": Some(failure).filter(|failure| !failure.is_empty()).map_or(Value::Null, |f| f.as_str().into()),
        }));
    }
    if *every_s == 0 {
        return println!("no exports are scheduled");
    }
    let every = show_seconds(*every_s);
    println!("every {every} into {dir} on the metadata machine, {keep} kept");
    if let Some(last) = last {
        println!("last: {} ({} records, {})", last.file, last.entries, table::bytes(last.bytes));
    }
    if !failure.is_empty() {
        println!("the last one failed: {failure}");
    }
}

fn import(args: &Import, fill: Fill<'_>) -> Outcome<()> {
    let config = config_of_role(args)?;
    let file = File::open(&args.file).doing(format_args!("read {}", args.file.display()))?;
    let progress = Progress::default();
    let (head, totals) = fill(config, file, Box::new(move |totals| show(&progress, totals)))?;
    report("imported from", &args.file, &head, totals, args.json);
    if !args.json {
        println!(
            "start the metadata role (`weir up`, or `weir meta`): it compares the namespace with its targets first"
        );
    }
    Ok(())
}

fn config_of_role(args: &Import) -> Outcome<PathBuf> {
    let inside = |dir: &PathBuf| {
        let found = ["etc/meta.toml", "etc/meta-1.toml", "meta.toml"]
            .map(|name| dir.join(name))
            .into_iter()
            .find(|f| f.exists());
        found.ok_or_else(|| format!("{} has no configuration of a metadata role", dir.display()))
    };
    match (&args.config, &args.dir) {
        (Some(config), _) => Ok(config.clone()),
        (None, dir) => {
            let found = dir.as_ref().map_or(Err("no metadata role is named".to_owned()), inside);
            let hint = "run it on the metadata machine: --dir DIR of `weir up` or `weir join`, or --config meta.toml";
            found.map_err(|what| Failure::new(Error::not_found(what), hint))
        }
    }
}
