//! `weir target scrub`: the progress of targets in verifying all their data, and in comparing their versions
//! with those of the other members; or starts both now.
use super::args;
use super::replace::number_of;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::time::Duration;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::Cluster;
use weir_diagnose::quantity::when;
use weir_proto::data::{ComparePass, CompareReport, CompareTarget, ScrubPass, ScrubReport, ScrubTarget};
use weir_proto::meta::Time;
use weir_proto::{Error, ErrorKind, Result, TargetId};
use weir_rpc::Payload;

/// How long a target may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The interval of checks while a pass is watched.
const WATCH_EVERY: Duration = Duration::from_secs(1);

type Reports = Vec<(TargetId, Result<Report>)>;

#[derive(Clone)]
struct Report {
    scrub: ScrubReport,
    /// Absent: an older program does not compare.
    compare: Option<CompareReport>,
}

impl Report {
    /// The present pass, else the last one.
    fn compared(&self) -> ComparePass {
        let pass = self.compare.as_ref().and_then(|compare| compare.pass.or(compare.last));
        pass.unwrap_or_default()
    }
}

pub fn scrub(args: &args::ScrubTargets) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    let asked = args.targets.iter().map(|name| number_of(name)).collect::<Outcome<Vec<_>>>()?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir target").await?;
        let map = cluster.map();
        let targets: Vec<TargetId> = match asked.is_empty() {
            true => map.targets.iter().map(|t| t.id).collect(),
            false => asked,
        };
        if let Some(unknown) = targets.iter().find(|id| map.target(**id).is_none()) {
            let error = Error::not_found(format!("there is no target {unknown}"));
            return Err(Failure::new(error, "`weir status` shows the targets"));
        }
        let rate = args.rate.unwrap_or(0);
        let mut reports = ask_all(&cluster, &targets, args.start, rate).await;
        while args.watch && reports.iter().any(|(_, report)| is_under_way(report)) {
            show(&reports, args.cluster.json);
            env.clock.sleep(WATCH_EVERY).await;
            reports = ask_all(&cluster, &targets, false, 0).await;
        }
        show(&reports, args.cluster.json);
        silent_targets(&reports)
    })
}

/// All in parallel: a hanging one delays the command only by its own patience.
async fn ask_all(cluster: &Cluster, targets: &[TargetId], start: bool, bytes_per_s: u64) -> Reports {
    let ask = |target: &TargetId| {
        let (cluster, target) = (cluster.clone(), *target);
        let request = ScrubTarget { target, start, bytes_per_s };
        tokio::spawn(async move {
            let scrub = cluster.call_target(target, &request, Payload::default(), PATIENCE).await?.reply;
            let request = CompareTarget { target, start };
            match cluster.call_target(target, &request, Payload::default(), PATIENCE).await {
                Ok(answer) => Ok(Report { scrub, compare: Some(answer.reply) }),
                Err(e) if e.kind == ErrorKind::Unsupported => Ok(Report { scrub, compare: None }),
                Err(e) => Err(e),
            }
        })
    };
    let asked: Vec<_> = targets.iter().map(ask).collect();
    let mut reports = Vec::new();
    for (target, asked) in targets.iter().zip(asked) {
        let answer = asked.await.unwrap_or_else(|e| Err(Error::unavailable(e.to_string())));
        reports.push((*target, answer));
    }
    reports
}

fn is_under_way(report: &Result<Report>) -> bool {
    report.as_ref().is_ok_and(|r| is_read(&r.scrub) || is_compared(r))
}
fn is_read(scrub: &ScrubReport) -> bool {
    scrub.pass.is_some_and(|pass| pass.ended_ns.is_none())
}
fn is_compared(report: &Report) -> bool {
    report.compare.as_ref().is_some_and(|compare| compare.asked || compare.pass.is_some())
}

fn show(reports: &Reports, as_json: bool) {
    if as_json {
        return table::json(&Value::from(reports.iter().map(report_json).collect::<Vec<_>>()));
    }
    if std::io::stdout().is_terminal() && reports.iter().any(|(_, report)| is_under_way(report)) {
        print!("\x1b[H\x1b[2J");
    }
    let header = [
        "TARGET",
        "STATE",
        "READ",
        "OF",
        "CELLS",
        "DAMAGED",
        "COMPARED STRIPES",
        "DIFFERED",
        "LAST COMPLETE PASS",
    ];
    let rows: Vec<_> = reports.iter().map(|(target, report)| row(*target, report)).collect();
    print!("{}", table::render(&header, &rows));
}

fn row(target: TargetId, report: &Result<Report>) -> Vec<String> {
    let report = match report {
        Ok(report) => report,
        Err(e) => return vec![target.to_string(), format!("does not answer: {e}")],
    };
    let (compared, comparing) = (report.compared(), is_compared(report));
    let report = &report.scrub;
    let last = report
        .last
        .and_then(|last| last.ended_ns)
        .map_or("none yet".to_owned(), |nanos| when(Time { nanos }));
    let pass = report.pass.filter(|pass| pass.ended_ns.is_none());
    let state = match (pass.is_some(), comparing) {
        (true, _) => "reading",
        (false, true) => "comparing",
        (false, false) => "idle",
    };
    let shown = pass.or(report.last).unwrap_or(ScrubPass {
        begun_ns: 0,
        ended_ns: None,
        cells: 0,
        bytes: 0,
        damaged_cells: 0,
    });
    vec![
        target.to_string(),
        state.to_owned(),
        table::bytes(shown.bytes),
        table::bytes(report.used),
        shown.cells.to_string(),
        shown.damaged_cells.to_string(),
        compared.stripes.to_string(),
        differed(&compared),
        last,
    ]
}

fn differed(pass: &ComparePass) -> String {
    match (pass.differing + pass.mismatched, pass.repaired + pass.mismatched) {
        (all, repaired) if all == repaired => all.to_string(),
        (all, repaired) => format!("{all}, {} not repaired yet", all - repaired),
    }
}

fn report_json((target, report): &(TargetId, Result<Report>)) -> Value {
    let compared = |pass: Option<ComparePass>| {
        pass.map(|p| {
            json!({
                "begun_ns": p.begun_ns,
                "ended_ns": p.ended_ns,
                "groups": p.groups,
                "groups_done": p.groups_done,
                "stripes": p.stripes,
                "differing": p.differing,
                "repaired": p.repaired,
                "encoded": p.encoded,
                "mismatched": p.mismatched,
            })
        })
    };
    let pass = |pass: Option<ScrubPass>| {
        pass.map(|p| {
            json!({
                "begun_ns": p.begun_ns,
                "ended_ns": p.ended_ns,
                "cells": p.cells,
                "bytes": p.bytes,
                "damaged_cells": p.damaged_cells,
            })
        })
    };
    match report {
        Ok(r) => json!({
            "target": target.to_string(),
            "used_bytes": r.scrub.used,
            "pass": pass(r.scrub.pass),
            "last": pass(r.scrub.last),
            "compare": r.compare.as_ref().map(|c| json!({ "pass": compared(c.pass), "last": compared(c.last) })),
        }),
        Err(e) => json!({ "target": target.to_string(), "error": e.to_string() }),
    }
}

/// A script is to learn that a target did not answer.
fn silent_targets(reports: &Reports) -> Outcome<()> {
    let silent: Vec<String> =
        reports.iter().filter(|(_, r)| r.is_err()).map(|(target, _)| target.to_string()).collect();
    if silent.is_empty() {
        return Ok(());
    }
    let error = Error::unavailable(format!("no answer from {}", silent.join(", ")));
    Err(Failure::new(error, "`weir status` shows how they are"))
}
