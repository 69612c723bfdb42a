//! Volumes as text, as a table and as JSON.
use super::Shown;
use super::limits::shown_limit;
use super::{eviction, snapshots};
use serde_json::{Value, json};
use weir_admin::{table, users};
use weir_diagnose::backups;
use weir_diagnose::quantity::show_seconds;
use weir_proto::meta::Time;
use weir_proto::retention::show_snapshot_retention;
use weir_proto::volume::{Retention, Volume};

impl Shown {
    pub(super) fn print(&self, json: bool) {
        match (self, json) {
            (Shown::Levels(levels), json) => eviction::show(levels, json),
            (Shown::Nothing, _) => {}
            (Shown::Snapshot(_, one), true) => table::json(&snapshots::as_json(one)),
            (Shown::Snapshot(what, one), false) => println!("snapshot {} {what}", one.name),
            (Shown::Snapshots(all), true) => {
                table::json(&Value::Array(all.iter().map(snapshots::as_json).collect()))
            }
            (Shown::Snapshots(all), false) => print!("{}", snapshots::as_table(all)),
            (Shown::All(all), true) => table::json(&Value::Array(all.iter().map(as_json).collect())),
            (Shown::All(all), false) => print!("{}", as_table(all)),
            (Shown::Done(_, one), true) => table::json(&as_json(one)),
            (Shown::One(one, backups, floor), true) => {
                let mut value = as_json(one);
                value["write_floor"] = json!((*floor > 0).then_some(*floor));
                value["backups"] = backups.iter().map(super::backup::as_json).collect();
                table::json(&value);
            }
            (Shown::One(one, backups, floor), false) => {
                print!("{}", as_text(one));
                if *floor > 0 {
                    println!("  write floor: {floor} current members of a placement group");
                }
                backups.iter().for_each(|b| println!("  backups to {}: {}", b.url, backups::state(b)));
            }
            (Shown::Done(what, one), false) => {
                println!("volume {} {what}{}", one.name, more(one));
                if is_full(one) {
                    println!("its usage is at or above its limits: nothing can be added to it");
                }
            }
        }
    }
}

fn more(volume: &Volume) -> &'static str {
    if volume.deleting { "; its contents are being removed" } else { "" }
}

fn as_table(all: &[Volume]) -> String {
    let users = users::of(all.iter().map(|v| v.owner));
    let rows: Vec<Vec<String>> = all
        .iter()
        .map(|v| {
            vec![
                v.name.clone(),
                shown_path(v),
                users.name(v.owner),
                table::bytes(v.usage.bytes),
                shown_limit(v.quota.bytes_hard, v.quota.bytes_soft, table::bytes),
                inodes(v).to_string(),
                shown_limit(v.quota.inodes_hard, v.quota.inodes_soft, |n| n.to_string()),
                state(v).into(),
            ]
        })
        .collect();
    let header = ["VOLUME", "PATH", "OWNER", "USED", "LIMIT", "FILES AND DIRECTORIES", "LIMIT", "STATE"];
    table::render(&header, &rows)
}

fn as_text(v: &Volume) -> String {
    let quota = &v.quota;
    let users = users::of(v.admins.iter().copied().chain([v.owner]));
    let admins: Vec<String> = v.admins.iter().map(|user| users.name(*user)).collect();
    let mut rows = vec![
        ("volume", v.name.clone()),
        ("number", v.id.to_string()),
        ("path", shown_path(v)),
        ("owner", users.name(v.owner)),
        ("administrators", if admins.is_empty() { "none".into() } else { admins.join(" ") }),
        ("used", table::bytes(v.usage.bytes)),
        ("at home only", table::bytes(v.usage.evicted)),
        ("files", v.usage.files.to_string()),
        ("directories", v.usage.directories.to_string()),
        ("limit of bytes", shown_limit(quota.bytes_hard, quota.bytes_soft, table::bytes)),
        (
            "limit of files and directories",
            shown_limit(quota.inodes_hard, quota.inodes_soft, |n| n.to_string()),
        ),
        ("scheme", v.policy.scheme.map_or_else(|| "as the cluster".into(), |s| s.to_string())),
        ("pool", v.policy.pool.clone().unwrap_or_else(|| "as the cluster".into())),
        ("snapshots", schedule(&v.retention)),
        ("trash", trash(v)),
        ("state", state(v).into()),
    ];
    if quota.bytes_soft.or(quota.inodes_soft).is_some() {
        rows.push(("grace period", show_seconds(quota.grace_s)));
    }
    let rows: Vec<Vec<String>> =
        rows.into_iter().map(|(key, value)| vec![format!("  {key}"), value]).collect();
    table::render(&["", ""], &rows).trim_start_matches('\n').to_owned()
}

pub(super) fn trash(v: &Volume) -> String {
    match v.retention.trash_s {
        0 => "none".into(),
        s => format!("{}, {} in it", show_seconds(s), table::bytes(v.in_trash.bytes)),
    }
}
fn schedule(retention: &Retention) -> String {
    match retention.snapshots_every_s {
        0 => "no schedule".into(),
        s => format!("every {}, kept: {}", show_seconds(s), show_snapshot_retention(&retention.keep)),
    }
}
pub(super) fn inodes(v: &Volume) -> u64 {
    v.usage.files + v.usage.directories
}
fn shown_path(v: &Volume) -> String {
    String::from_utf8_lossy(&v.path).into_owned()
}
fn is_over(hard: Option<u64>, used: u64) -> bool {
    hard.is_some_and(|hard| used >= hard)
}
fn is_full(v: &Volume) -> bool {
    is_over(v.quota.bytes_hard, v.usage.bytes) || is_over(v.quota.inodes_hard, inodes(v))
}
fn state(v: &Volume) -> &'static str {
    match () {
        () if v.deleting => "being removed",
        () if is_full(v) => "full",
        () if v.bytes_over_since.or(v.inodes_over_since).is_some() => "over its soft limit",
        () => "ok",
    }
}

pub fn as_json(v: &Volume) -> Value {
    let none_if_0 = |n: u64| (n > 0).then_some(n);
    let seconds = |t: Option<Time>| t.map(|t| t.nanos / 1_000_000_000);
    json!({
        "name": v.name, "id": v.id.0, "path": shown_path(v), "root_inode": v.root.0, "owner": v.owner,
        "administrators": v.admins, "state": state(v), "deleting": v.deleting,
        "created": seconds(Some(v.created)),
        "used_bytes": v.usage.bytes, "evicted_bytes": v.usage.evicted, "files": v.usage.files, "directories": v.usage.directories,
        "bytes_hard": v.quota.bytes_hard, "bytes_soft": v.quota.bytes_soft,
        "inodes_hard": v.quota.inodes_hard, "inodes_soft": v.quota.inodes_soft,
        "grace_seconds": v.quota.grace_s, "bytes_over_since": seconds(v.bytes_over_since),
        "inodes_over_since": seconds(v.inodes_over_since),
        "scheme": v.policy.scheme.map(|s| s.to_string()), "pool": v.policy.pool,
        "trash_seconds": none_if_0(v.retention.trash_s.into()), "trash_bytes": v.in_trash.bytes,
        "trash_files": v.in_trash.files,
        "snapshots_every_seconds": none_if_0(v.retention.snapshots_every_s.into()),
        "snapshots_keep": show_snapshot_retention(&v.retention.keep),
    })
}
