//! The answers of the API: pure functions of the snapshot, as JSON. `openapi.json` describes it.
use super::processes::processes;
use super::snapshot::Snapshot;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_admin::users;
use weir_coord::decide::file_space;
use weir_coord::{Cluster, Collected};
use weir_diagnose::Health;
use weir_diagnose::troubles::{HomesHere, Trouble, state};
use weir_diagnose::waits::{self, sorted};
use weir_diagnose::work::{self, By, Names, lines_of};
use weir_proto::Result;
use weir_proto::condition::Severity;
use weir_proto::map::TargetState;
use weir_proto::relation::{RelationInfo, RelationState};
use weir_proto::watch::{GetHistory, SeriesRead};
use weir_trust::certificate::role_word;

const PATIENCE: Duration = Duration::from_millis(800);
/// Points of a series that are shown.
const POINTS_MAX: u32 = 3600;
/// Beyond this, minutes are shown instead of seconds.
const BY_SECOND_MAX: u32 = 60;
/// Points of a graph: a wide screen shows no more in one.
const SHOWN_MAX: usize = 720;
const MINUTES_OF_DAY: f64 = 1440.0;
/// A process keeps two days.
const GROWTH_MINUTES: u32 = 2 * 24 * 60;
/// The growth of a shorter time does not predict days.
const GROWTH_MINUTES_MIN: usize = 60;

pub fn status(snapshot: &Snapshot) -> Value {
    let Some(facts) = &snapshot.facts else {
        let word = "not known";
        return json!({ "state": "the coordinator does not answer", "word": word, "healthy": false });
    };
    let status = &facts.status;
    let health = Health::of_used(status, &facts.in_use());
    let (word, meaning) = state(&snapshot.troubles);
    let map = &status.map;
    let space = file_space(map, &status.targets, None, None);
    let answers = |name: &str| snapshot.meters.iter().find(|g| g.name == name).map(|g| g.reply.is_ok());
    let targets = map.targets.iter().map(|t| {
        let node = map.node(t.node).map_or("?", |node| node.name.as_str());
        let report = status.targets.iter().find(|r| r.target == t.id);
        let state = match t.state {
            TargetState::Up => "up",
            TargetState::Down => "down",
            TargetState::Failed => "failed",
        };
        json!({
            "target": t.id.to_string(), "node": node, "state": state, "pool": t.pool,
            "capacity_bytes": report.map_or(0, |r| r.capacity), "used_bytes": report.map_or(0, |r| r.used),
            "debt_cells": report.map_or(0, |r| r.under_replicated_cells), "node_answers": answers(node),
        })
    });
    json!({
        "cluster": map.cluster.to_string(), "state": format!("{word}{meaning}; {}", health.counts()), "healthy": word == "healthy",
        "serves": health.serves(), "capacity_bytes": space.capacity(), "used_bytes": space.used,
        "waits": snapshot.waits.iter().filter_map(|g| g.reply.as_ref().ok()).map(|w| w.now.len()).sum::<usize>(),
        "word": word, "troubles": counted(&snapshot.troubles),
        "processes": processes(snapshot), "targets": targets.collect::<Vec<_>>(),
    })
}

/// Those that count: they are more than notes, and not muted.
fn counted(troubles: &[Trouble]) -> usize {
    troubles.iter().filter(|t| t.severity > Severity::Note && t.muted_until.is_none()).count()
}

/// None: there are no such rows.
pub fn top(snapshot: &Snapshot, by: &str) -> Option<Value> {
    let by = by.to_lowercase().parse().ok().filter(|by| *by != By::Target)?;
    let users = users::of(work::users(&snapshot.tops));
    let of_namespace = snapshot.namespaces().flat_map(|(_, known)| &known.volumes);
    let volumes = of_namespace.map(|v| (v.id.0, v.name.clone())).collect();
    Some(json!({ "rows": lines_of(by, &snapshot.tops, &Names { volumes, users }) }))
}

pub fn waits(snapshot: &Snapshot) -> Value {
    let (seen, silent) = sorted(snapshot.waits.clone());
    waits::as_json(&seen, &silent)
}

pub fn volumes(snapshot: &Snapshot) -> Value {
    let volumes =
        snapshot.namespaces().flat_map(|(name, known)| known.volumes.iter().map(move |v| (name, v)));
    let volumes: Vec<(&str, &weir_proto::volume::Volume)> = volumes.collect();
    let names = volumes.iter().map(|(_, v)| (v.id.0, v.name.clone())).collect();
    let lines = lines_of(By::Volume, &snapshot.tops, &Names { volumes: names, users: Default::default() });
    let one = |(namespace, v): &(&str, &weir_proto::volume::Volume)| {
        let line = lines.iter().find(|line| line.name == v.name);
        json!({
            "namespace": namespace, "volume": v.name, "owner": v.owner, "used_bytes": v.usage.bytes,
            "files": v.usage.files, "directories": v.usage.directories, "evicted_bytes": v.usage.evicted,
            "limit_bytes": v.quota.bytes_hard, "limit_inodes": v.quota.inodes_hard,
            "requests_per_s": line.map_or(0.0, |line| line.requests_per_s),
            "bytes_per_s": line.map_or(0.0, |line| line.bytes_per_s),
        })
    };
    json!({ "volumes": volumes.iter().map(one).collect::<Vec<_>>() })
}

pub fn homes(snapshot: &Snapshot) -> Value {
    let relations = snapshot.namespaces().flat_map(|(_, known)| &known.relations);
    // A mover notices a missing directory when it next needs it.
    let here = snapshot.facts.as_ref().map(|facts| &facts.homes);
    let is =
        |of: fn(&HomesHere) -> &BTreeSet<String>, url: &str| here.is_some_and(|here| of(here).contains(url));
    let failure = |r: &RelationInfo| match r.url.as_str() {
        url if is(|here| &here.missing, url) => "the directory is missing".to_owned(),
        url if is(|here| &here.silent, url) => "its file system does not answer".to_owned(),
        _ => r.home_failure.clone(),
    };
    let one = |r: &RelationInfo| {
        let (state, why) = match &r.state {
            RelationState::Synced {} => ("synced", String::new()),
            RelationState::Copying {} => ("copying", String::new()),
            RelationState::Paused { why } => ("paused", why.clone()),
            RelationState::Diverged { items } => ("diverged", format!("{items} conflicts")),
        };
        json!({
            "volume": r.volume_name, "home": r.url.split('?').next(), "state": state, "why": why,
            "lag_ms": r.lag_ms, "backlog_bytes": r.backlog_bytes, "rate_bytes": r.rate, "movers": r.movers,
            "limited_by": r.limited_by, "failure": failure(r),
        })
    };
    json!({ "homes": relations.map(one).collect::<Vec<_>>() })
}

/// What shows that data and accesses are sound: checksums, audit logs, certificates.
pub fn proof(snapshot: &Snapshot) -> Value {
    let Some(facts) = &snapshot.facts else {
        return json!({ "targets": [], "audit": [], "certificates": [] });
    };
    let targets = facts.status.targets.iter().map(|r| {
        json!({ "target": r.target.to_string(), "damaged_blocks": r.damaged_blocks, "repaired_blocks": r.repaired_blocks })
    });
    let of_namespaces =
        snapshot.namespaces().map(|(name, known)| (format!("metadata of {name}"), &known.audit));
    let logs = [("coordinator".to_owned(), &facts.audit)].into_iter().chain(of_namespaces);
    let audit = logs.map(|(whose, a)| {
        json!({ "of": whose, "records": a.records, "waiting": a.waiting, "lost": a.lost, "failure": a.failure })
    });
    let holders = facts.holders.iter().filter(|holder| !holder.removed).map(|holder| {
        let roles: Vec<&str> = holder.roles.iter().map(|role| role_word(*role)).collect();
        let left_s = holder.until.saturating_sub(facts.now_s);
        json!({ "name": holder.name, "roles": roles, "left_s": left_s, "from": holder.from })
    });
    json!({
        "targets": targets.collect::<Vec<_>>(), "audit": audit.collect::<Vec<_>>(), "certificates": holders.collect::<Vec<_>>(),
    })
}

/// A series of the last minutes: summed over all processes, or the mean of all their values. By second up to
/// an hour, then by minute; at most as many points as a screen can show.
pub async fn history(cluster: &Cluster, series: &str, minutes: u32) -> Result<Value> {
    let by_minute = minutes > BY_SECOND_MAX;
    let points = if by_minute { minutes } else { minutes.saturating_mul(60) }.clamp(1, POINTS_MAX);
    let all = match series.strip_suffix(":mean") {
        None => summed(&read(cluster, series, by_minute, points).await?.into_values().collect::<Vec<_>>()),
        // Without the number of values of one target, its mean is that of the only process that has it.
        Some(_) if series.contains('{') => {
            let mut found = read(cluster, series, by_minute, points).await?.into_values();
            found.next().unwrap_or_default().into_iter().map(|p| (!p.is_nan()).then_some(p)).collect()
        }
        Some(base) => {
            let (means, counts) = tokio::try_join!(
                read(cluster, series, by_minute, points),
                read(cluster, base, by_minute, points)
            )?;
            weighted(&means, &counts)
        }
    };
    let each = all.len().div_ceil(SHOWN_MAX).max(1);
    let step_s = if by_minute { 60 } else { 1 } * each;
    Ok(json!({ "series": series, "step_s": step_s, "points": coarser(&all, each) }))
}

/// By process.
async fn read(
    cluster: &Cluster,
    series: &str,
    by_minute: bool,
    points: u32,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let asked = GetHistory { name: series.to_owned(), by_minute, points };
    let collected: Vec<Collected<SeriesRead>> = cluster.collect(&asked, PATIENCE).await?;
    let of = |read: SeriesRead| read.points.into_iter().map(f32::from_bits).collect::<Vec<f32>>();
    let answered = collected.into_iter().filter_map(|g| Some((g.name, of(g.reply.ok()?))));
    Ok(answered.filter(|(_, points)| !points.is_empty()).collect())
}

/// How fast the targets fill, and in how many days they are full at that rate.
pub async fn space(cluster: &Cluster, snapshot: &Snapshot) -> Result<Value> {
    let used = read(cluster, "weir_target_used_bytes", true, GROWTH_MINUTES).await?;
    let reports = snapshot.facts.iter().flat_map(|facts| &facts.status.targets);
    let free: u64 = reports.map(|r| r.capacity.saturating_sub(r.used)).sum();
    let per_day: Option<f64> = used.values().map(|points| growth(points)).sum();
    let days = per_day.filter(|bytes| *bytes > 0.0).map(|bytes| free as f64 / bytes);
    Ok(json!({ "bytes_per_day": per_day, "days_to_full": days }))
}

/// The slope of a line through the points of minutes, by day; none: too short a time.
fn growth(points: &[f32]) -> Option<f64> {
    let known: Vec<(f64, f64)> = points
        .iter()
        .enumerate()
        .filter(|(_, p)| !p.is_nan())
        .map(|(at, p)| (at as f64, f64::from(*p)))
        .collect();
    if known.len() < GROWTH_MINUTES_MIN {
        return None;
    }
    let count = known.len() as f64;
    let (mean_x, mean_y) = (
        known.iter().map(|(x, _)| x).sum::<f64>() / count,
        known.iter().map(|(_, y)| y).sum::<f64>() / count,
    );
    let spread: f64 = known.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let both: f64 = known.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    Some(both / spread * MINUTES_OF_DAY)
}

/// Means of values of several processes, by how many values each had.
fn weighted(means: &BTreeMap<String, Vec<f32>>, counts: &BTreeMap<String, Vec<f32>>) -> Vec<Option<f32>> {
    let longest = means.values().map(Vec::len).max().unwrap_or(0);
    let mut sums: BTreeMap<usize, (f32, f32)> = BTreeMap::new();
    for (process, points) in means {
        let Some(counts) = counts.get(process) else { continue };
        let first = longest - points.len();
        for (at, mean) in points.iter().enumerate().filter(|(_, mean)| !mean.is_nan()) {
            let back = points.len() - at;
            let count = counts.len().checked_sub(back).and_then(|at| counts.get(at)).copied().unwrap_or(0.0);
            if count > 0.0 {
                let sum = sums.entry(first + at).or_default();
                (sum.0, sum.1) = (sum.0 + mean * count, sum.1 + count);
            }
        }
    }
    (0..longest).map(|at| sums.get(&at).map(|(sum, count)| sum / count)).collect()
}

/// One point for each group of neighbours, their mean; the last group is whole.
fn coarser(points: &[Option<f32>], each: usize) -> Vec<Option<f32>> {
    let first = points.len() % each;
    let (head, rest) = points.split_at(first);
    let parts = (!head.is_empty()).then_some(head).into_iter().chain(rest.chunks(each));
    let mean = |part: &[Option<f32>]| {
        let known: Vec<f32> = part.iter().flatten().copied().collect();
        (!known.is_empty()).then(|| known.iter().sum::<f32>() / known.len() as f32)
    };
    parts.map(mean).collect()
}

/// The sum of series that end now; a time without a point in any process has none.
fn summed(read: &[Vec<f32>]) -> Vec<Option<f32>> {
    let longest = read.iter().map(Vec::len).max().unwrap_or(0);
    let mut sums: BTreeMap<usize, f32> = BTreeMap::new();
    for points in read {
        let first = longest - points.len();
        for (at, value) in points.iter().enumerate().filter(|(_, value)| !value.is_nan()) {
            *sums.entry(first + at).or_default() += value;
        }
    }
    (0..longest).map(|at| sums.get(&at).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_are_added_from_their_ends() {
        let read = [vec![1.0, f32::NAN, 3.0], vec![10.0, 20.0]];
        assert_eq!(summed(&read), [Some(1.0), Some(10.0), Some(23.0)]);
        assert_eq!(summed(&[vec![f32::NAN, 1.0]]), [None, Some(1.0)]);
        assert_eq!(summed(&[]), []);
    }

    #[test]
    fn means_count_by_their_values_and_graphs_have_a_screens_points() {
        let of = |all: &[(&str, &[f32])]| {
            all.iter().map(|(name, points)| ((*name).to_owned(), points.to_vec())).collect::<BTreeMap<_, _>>()
        };
        let means = of(&[("a", &[10.0, f32::NAN, 10.0]), ("b", &[40.0, 40.0])]);
        let counts = of(&[("a", &[9.0, 1.0, 0.0, 1.0]), ("b", &[3.0, 2.0])]);
        assert_eq!(weighted(&means, &counts), [Some(10.0), Some(40.0), Some(30.0)]);
        let points = [Some(9.0), Some(1.0), Some(3.0), None, Some(4.0), None, None];
        assert_eq!(coarser(&points, 2), [Some(9.0), Some(2.0), Some(4.0), None]);
        assert_eq!(coarser(&points, 1), points);
    }

    #[test]
    fn growth_is_by_day_and_needs_an_hour() {
        let filling: Vec<f32> =
            (0..120).map(|at| if at % 7 == 3 { f32::NAN } else { 100.0 + at as f32 }).collect();
        assert!((growth(&filling).unwrap() - 1440.0).abs() < 1e-6);
        assert_eq!(growth(&[5.0; 80]), Some(0.0));
        assert_eq!(growth(&filling[..50]), None);
    }

    #[test]
    fn a_silent_cluster_is_shown_as_unknown() {
        let nothing = Snapshot::default();
        assert_eq!(status(&nothing)["healthy"], false);
        assert_eq!(top(&nothing, "user"), Some(json!({ "rows": [] })));
        assert_eq!((top(&nothing, "target"), top(&nothing, "colour")), (None, None));
        assert_eq!(volumes(&nothing), json!({ "volumes": [] }));
    }

    #[test]
    fn the_description_of_the_api_names_every_path() {
        let described: Value = serde_json::from_str(super::super::OPENAPI).unwrap();
        for path in ["status", "top", "waits", "volumes", "homes", "history", "space"] {
            assert!(described["paths"][format!("/api/v1/{path}")]["get"].is_object(), "{path}");
        }
    }
}
