//! `weir audit`: requests, their senders and results, from the files of coordinator and metadata role.
//!
//! To show and to verify it reads these files and queries no server, so that works while nothing runs. Their
//! mode is 0600.
pub mod args;

use args::{AuditCommand, AuditedVolumes, ShowAudit, VerifyAudit};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::local_cluster::{self, LocalCluster, RoleName};
use weir_admin::times::{parse_moment, parse_seconds};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_env::Env;
use weir_node::audit_files;
use weir_proto::Error;
use weir_proto::access::AuditRule;
use weir_proto::date::Date;
use weir_proto::meta::Time;
use weir_trust::audit::{self, Checker, Entry, Fault, Head};

/// Exit code when a chain is damaged: "the answer is no".
const DAMAGED: u8 = 1;
/// A line that a role is just writing is complete a moment later.
const REREADS: u32 = 20;
const REREAD_PAUSE: Duration = Duration::from_millis(50);

pub fn run(command: &AuditCommand) -> Outcome<ExitCode> {
    match command {
        AuditCommand::Show(args) => show(args),
        AuditCommand::Verify(args) => verify(args),
        AuditCommand::Volumes(args) => volumes(args).map(|()| ExitCode::SUCCESS),
    }
}

/// Lists the rules, after a change if one is requested.
fn volumes(args: &AuditedVolumes) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    let rules = observe::block_on(async {
        let cluster = observe::observe(&weir_env::real::env(), &coordinators, "weir audit").await?;
        let Some(volumes) = args.volumes.clone() else { return Ok(cluster.map().audits.clone()) };
        if !(args.opens || args.changes || args.off) {
            return Err(Failure::new(
                Error::invalid("nothing is to be changed"),
                "give --opens, --changes or both, or --off",
            ));
        }
        let rule = AuditRule { volumes, opens: args.opens, changes: args.changes };
        Ok(cluster.audit_volumes(rule).await?.audits.clone())
    })?;
    if args.cluster.json {
        let shown = |rule: &AuditRule| json!({ "volumes": rule.volumes, "opens": rule.opens, "changes": rule.changes });
        table::json(&Value::from(rules.iter().map(shown).collect::<Vec<_>>()));
        return Ok(());
    }
    if rules.is_empty() {
        println!("opens and changes are recorded for no volume");
        return Ok(());
    }
    let row = |rule: &AuditRule| {
        let kinds = [(rule.opens, "opens"), (rule.changes, "changes")];
        let kinds: Vec<&str> = kinds.iter().filter(|kind| kind.0).map(|kind| kind.1).collect();
        vec![rule.volumes.clone(), kinds.join(", ")]
    };
    let rows: Vec<Vec<String>> = rules.iter().map(row).collect();
    print!("{}", table::render(&["VOLUMES", "RECORDED"], &rows));
    Ok(())
}

/// One role's log.
struct Log {
    name: String,
    files: Vec<PathBuf>,
}

/// The logs of a cluster, or of the role whose directory this is.
fn logs(env: &Env, dir: &Path) -> Outcome<Vec<Log>> {
    let dir = local_cluster::absolute(dir)?;
    let files = |dir: &Path| audit_files(&*env.disk, dir).doing(format_args!("read {}", dir.display()));
    let of_role = files(&dir)?;
    if !of_role.is_empty() {
        return Ok(vec![Log { name: dir.display().to_string(), files: of_role }]);
    }
    let local = LocalCluster::open(&dir)?;
    let keeps = |role| matches!(role, RoleName::Coord | RoleName::Meta);
    let mut logs = Vec::new();
    for process in local.manifest.processes.iter().filter(|p| keeps(p.role)) {
        logs.push(Log { name: process.name.clone(), files: files(&process.path)? });
    }
    Ok(logs)
}

/// The lines of a file, without their ends; the last one may be unfinished.
fn lines(env: &Env, file: &Path) -> Outcome<Vec<Vec<u8>>> {
    let read = || env.disk.read(file).doing(format_args!("read {}", file.display()));
    let mut bytes = read()?;
    for _ in 0..REREADS {
        if bytes.last().is_none_or(|last| *last == b'\n') {
            break;
        }
        std::thread::sleep(REREAD_PAUSE);
        bytes = read()?;
    }
    let whole = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    Ok(match whole {
        [] => Vec::new(),
        lines => lines.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect(),
    })
}

fn show(args: &ShowAudit) -> Outcome<ExitCode> {
    let env = weir_env::real::env();
    let since = args.since.as_deref().map(|text| since(&env, text)).transpose()?;
    let mut shown: Vec<(String, Entry)> = Vec::new();
    let mut damaged = 0;
    for log in logs(&env, &args.dir)? {
        for file in &log.files {
            for line in lines(&env, file)? {
                match audit::open(&line) {
                    Ok((entry, _)) => shown.push((log.name.clone(), entry)),
                    Err(_) => damaged += 1,
                }
            }
        }
    }
    shown.retain(|(_, entry)| since.as_ref().is_none_or(|since| entry.time >= *since));
    shown.sort_by(|a, b| a.1.time.cmp(&b.1.time));
    match args.json {
        true => table::json(&Value::Array(shown.iter().map(value).collect())),
        false => print!("{}", rows(&shown)),
    }
    if damaged > 0 {
        eprintln!("{damaged} damaged lines are not shown: `weir audit verify` names the first");
        return Ok(ExitCode::from(DAMAGED));
    }
    Ok(ExitCode::SUCCESS)
}

fn value((log, entry): &(String, Entry)) -> Value {
    json!({
        "log": log, "number": entry.number, "time": entry.time, "node": entry.node, "from": entry.from, "role": entry.role,
        "uid": entry.uid, "what": entry.what, "on": entry.on, "result": entry.result, "again": entry.again,
    })
}

fn rows(shown: &[(String, Entry)]) -> String {
    let row = |(log, e): &(String, Entry)| {
        let uid = e.uid.map_or("-".into(), |uid| uid.to_string());
        let again = if e.again > 0 { format!(" (and {} more)", e.again) } else { String::new() };
        vec![
            e.time.clone(),
            log.clone(),
            e.node.clone(),
            e.from.clone(),
            e.role.clone(),
            uid,
            e.what.clone(),
            e.on.clone(),
            format!("{}{again}", e.result),
        ]
    };
    let header = ["TIME", "LOG", "NODE", "FROM", "ROLE", "UID", "WHAT", "ON", "RESULT"];
    table::render(&header, &shown.iter().map(row).collect::<Vec<_>>())
}

/// In the format of the records' times, so that these compare as text.
fn since(env: &Env, text: &str) -> Outcome<String> {
    if let Ok(seconds) = parse_seconds(text) {
        return Ok(audit::time(env.clock.wall().0 - i64::from(seconds) * 1_000_000_000));
    }
    let now = Date::of(Time { nanos: env.clock.wall().0 });
    let moment = parse_moment(text, now)?;
    // A day counts from its beginning here: its text sorts before all times in it.
    Ok(match text.trim() {
        "today" | "yesterday" => moment.to_string().split('T').take(1).collect(),
        date if Date::parse_until(date).is_ok() => date.trim_end_matches('Z').replacen(' ', "T", 1),
        _ => moment.to_string(),
    })
}

/// An invalid line.
struct Damage {
    file: PathBuf,
    line: usize,
    fault: Fault,
}

/// The content of a log.
struct Verified {
    name: String,
    records: u64,
    last: Option<Head>,
    damage: Option<Damage>,
}

fn verify(args: &VerifyAudit) -> Outcome<ExitCode> {
    let env = weir_env::real::env();
    let mut missing = args.expect.clone();
    let mut verified = Vec::new();
    for log in logs(&env, &args.dir)? {
        verified.push(checked(&env, log, &mut missing)?);
    }
    match args.json {
        true => table::json(
            &json!({ "logs": verified.iter().map(verified_json).collect::<Vec<_>>(), "missing": missing }),
        ),
        false => verified.iter().for_each(|log| println!("{}", verified_line(log))),
    }
    let is_damaged = verified.iter().any(|log| log.damage.is_some());
    if !missing.is_empty() {
        let error = Error::not_found(format!("no log holds the record {}", missing.join(", ")));
        eprintln!("{}", Failure::new(error, "records were removed, or this is another cluster's log"));
    }
    Ok(if is_damaged || !missing.is_empty() { ExitCode::from(DAMAGED) } else { ExitCode::SUCCESS })
}

/// Removes the parts from `missing` that it finds.
fn checked(env: &Env, log: Log, missing: &mut Vec<String>) -> Outcome<Verified> {
    let mut checker = Checker::default();
    let mut verified = Verified { name: log.name, records: 0, last: None, damage: None };
    for file in log.files {
        for (at, line) in lines(env, &file)?.iter().enumerate() {
            if let Err(fault) = checker.take(line) {
                verified.damage = Some(Damage { file, line: at + 1, fault });
                return Ok(verified);
            }
            verified.records += 1;
            verified.last = checker.head();
            let name = verified.last.map(|head| name_of(&head));
            missing.retain(|expected| Some(expected) != name.as_ref());
        }
    }
    Ok(verified)
}

fn name_of(head: &Head) -> String {
    format!("{}:{}", head.number, head.hash)
}

fn verified_line(log: &Verified) -> String {
    let Verified { name, records, last, damage } = log;
    if let Some(Damage { file, line, fault }) = damage {
        return format!("{name}: DAMAGED: {} line {line}: {fault}", file.display());
    }
    let last = last.map_or(String::new(), |head| format!(", the last one is {}", name_of(&head)));
    format!("{name}: {} in one chain{last}", table::count(*records, ["record", "records"]))
}

fn verified_json(log: &Verified) -> Value {
    let damage =
        log.damage.as_ref().map(|d| json!({ "file": d.file, "line": d.line, "fault": d.fault.to_string() }));
    json!({ "log": log.name, "records": log.records, "last": log.last.as_ref().map(name_of), "damage": damage })
}
