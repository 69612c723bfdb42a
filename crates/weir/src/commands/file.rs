//! `weir file`: the mount's information on one file, through attributes that it answers itself.
//!
//! An extended attribute needs no socket and no address: the path leads to the right mount.
use crate::cli_file::OnePath;
use crate::failure::{Doing, Failure, Outcome};
use crate::table;
use serde_json::Value;
use std::path::Path;
use weir_diagnose::quantity::when;
use weir_proto::Error;
use weir_proto::meta::Time;

/// Attribute names that every mount of Weir answers with JSON.
pub const STAT: &str = "weir.stat";
pub const LAYOUT: &str = "weir.layout";
/// Holders of locks, and waiters.
pub const LOCKS: &str = "weir.locks";
/// Counters of the mount's client.
pub const CLIENT: &str = "weir.client";
/// The directory of snapshots in that of a volume.
pub const SNAPSHOTS: &str = ".snapshots";
/// The socket on which the mount serves this machine's users.
pub const SOCKET: &str = "weir.socket";

pub fn stat(args: &OnePath) -> Outcome<()> {
    show(args, STAT)
}

pub fn layout(args: &OnePath) -> Outcome<()> {
    show(args, LAYOUT)
}

fn show(args: &OnePath, attribute: &str) -> Outcome<()> {
    let value = ask(&args.path, attribute)?;
    if args.json {
        table::json(&value);
        return Ok(());
    }
    println!("{}", args.path.display());
    let mut rows = Vec::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Array(_) | Value::Null => {} // the table below, and absent facts
            _ => match (key.strip_suffix("_ns"), value.as_i64()) {
                (Some(key), Some(nanos)) => rows.push(vec![format!("  {key}"), when(Time { nanos })]),
                _ => rows.push(vec![format!("  {key}"), plain(value)]),
            },
        }
    }
    print!("{}", table::render(&["", ""], &rows).trim_start_matches('\n'));
    if let Some(Value::Array(stripes)) = value.get("stripes").filter(|_| value["data"].is_null()) {
        print!("{}", stripes_table(stripes));
    }
    Ok(())
}

pub fn locks(args: &OnePath) -> Outcome<()> {
    let value = ask(&args.path, LOCKS)?;
    if args.json {
        table::json(&value);
        return Ok(());
    }
    let locks = value["locks"].as_array().map_or(&[][..], Vec::as_slice);
    if locks.is_empty() {
        println!("{}: no locks", args.path.display());
        return Ok(());
    }
    let columns = ["state", "lock", "kind", "range", "client", "pid", "age"];
    let rows: Vec<Vec<String>> = locks
        .iter()
        .map(|lock| columns.map(|key| lock.get(key).map(plain).unwrap_or_default()).to_vec())
        .collect();
    print!("{}", table::render(&["STATE", "LOCK", "KIND", "BYTES", "CLIENT", "PID", "AGE"], &rows));
    if let Some(more) = value["more"].as_u64().filter(|more| *more > 0) {
        println!("and {more} more");
    }
    Ok(())
}

fn stripes_table(stripes: &[Value]) -> String {
    let cell = |stripe: &Value, key: &str| stripe.get(key).map(plain).unwrap_or_default();
    let rows: Vec<Vec<String>> = stripes
        .iter()
        .map(|s| ["stripe", "group", "data", "parity"].map(|key| cell(s, key)).to_vec())
        .collect();
    table::render(&["STRIPE", "GROUP", "DATA ON", "PARITY ON"], &rows)
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

fn is_in_snapshot(path: &Path) -> bool {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.components().any(|part| part.as_os_str() == SNAPSHOTS)
}

/// The mount's answer for a path.
pub fn ask(path: &Path, attribute: &str) -> Outcome<Value> {
    let mut buffer = vec![0u8; 1 << 16];
    let n = match rustix::fs::lgetxattr(path, attribute, &mut buffer[..]) {
        Ok(n) => n,
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NODATA) if is_in_snapshot(path) => {
            return Err(Failure::new(
                Error::unsupported(format!(
                    "{} is in a snapshot, which has no such information",
                    path.display()
                )),
                "name the file in its directory of today",
            ));
        }
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NODATA) => {
            return Err(Failure::new(
                Error::invalid(format!("{} is not on a Weir file system", path.display())),
                "name a file below a mount of `weir up --mount PATH` or `weir mount`",
            ));
        }
        Err(e) => return Err(e).doing(format_args!("stat {}", path.display())),
    };
    serde_json::from_slice(&buffer[..n])
        .map_err(|e| Error::damaged(format!("the mount's answer about {}: {e}", path.display())).into())
}
