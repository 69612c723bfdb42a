//! `weir volume snapshot`, `snapshots` and `restore`: a volume kept as it is, and what was in it put back.
//!
//! Restoring is a user's work: it reads `.snapshots` of the mount and writes beside what is there, so it needs no rights but
//! the user's own, and what was there stays until all of the old is back.
use crate::failure::{Doing, Failure, Outcome};
use crate::table;
use crate::volume::{Cluster, explain, named, own_cred};
use clap::Args;
use rustix::fs::{CWD, RenameFlags};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use weir_client::Client;
use weir_proto::meta::Time;
use weir_proto::snapshot::Snapshot;
use weir_proto::{Error, ErrorKind};

/// In the topmost directory of a volume, of every mount.
const DIRECTORY: &str = ".snapshots";

#[derive(Args)]
pub struct Take {
    /// The volume
    pub volume: String,
    /// The snapshot's name
    pub name: String,
    /// Remove it; what only it held is given back in the background
    #[arg(long)]
    pub delete: bool,
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

#[derive(Args)]
pub struct Restore {
    /// The file or directory, in a mount; it may be gone
    pub path: PathBuf,
    /// The snapshot
    #[arg(long, value_name = "NAME")]
    pub from: String,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

pub async fn take(client: &Client, args: &Take) -> Outcome<Snapshot> {
    let (cred, volume) = (own_cred(), named(client, &args.volume).await?);
    let done = match args.delete {
        true => client.delete_snapshot(&cred, volume.id, &args.name).await,
        false => client.take_snapshot(&cred, volume.id, &args.name).await,
    };
    done.map_err(|e| match e.kind {
        ErrorKind::NotFound => Failure::new(e, format!("`weir volume snapshots {}` shows all", args.volume)),
        ErrorKind::Deadline => {
            Failure::new(e, "a client is saving much, or hangs: `weir status` shows them; try again")
        }
        ErrorKind::Denied => {
            Failure::new(e, "a volume's owner and administrators take and remove its snapshots")
        }
        _ => explain(e),
    })
}

pub async fn list(client: &Client, args: &List) -> Outcome<Vec<Snapshot>> {
    let volume = named(client, &args.volume).await?;
    Ok(client.snapshots(volume.id).await?)
}

pub fn as_json(s: &Snapshot) -> Value {
    json!({ "name": s.name, "number": s.number, "volume": s.volume.0, "created_ns": s.created.nanos })
}
pub fn as_table(all: &[Snapshot]) -> String {
    let rows: Vec<Vec<String>> = all.iter().map(|s| vec![s.name.clone(), when(s.created)]).collect();
    table::render(&["SNAPSHOT", "TAKEN"], &rows)
}

/// Puts a file or a tree back as it was.
pub fn restore(args: &Restore) -> Outcome<()> {
    let path = std::path::absolute(&args.path).doing("find out where this is")?;
    let (old, parent, name) = find(&path, &args.from)?;
    let tmp = parent.join(format!(".{name}.restored-{}", std::process::id()));
    let copied = copy(&old, &tmp).and_then(|()| put(&tmp, &path));
    if copied.is_err() {
        let _ = remove(&tmp); // the first error is the one that is told
    }
    copied?;
    match args.json {
        true => println!("{:#}", json!({ "path": path.to_string_lossy(), "from": args.from })),
        false => println!("{} is as it was in {}", path.display(), args.from),
    }
    Ok(())
}

/// Where the old one is, and the directory and the name that it goes to.
fn find(path: &Path, snapshot: &str) -> Outcome<(PathBuf, PathBuf, String)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid("the root of everything is not restored").into());
    };
    for top in parent.ancestors() {
        let then = top.join(DIRECTORY).join(snapshot);
        if !then.is_dir() {
            continue;
        }
        let old = then.join(path.strip_prefix(top).expect("an ancestor is a prefix"));
        fs::symlink_metadata(&old).doing(format_args!("look for {} in {snapshot}", path.display()))?;
        return Ok((old, parent.to_owned(), name.to_string_lossy().into_owned()));
    }
    Err(Failure::new(
        Error::not_found(format!("no volume around {} has a snapshot {snapshot:?}", path.display())),
        "`ls VOLUME/.snapshots` shows a volume's snapshots; what is above PATH must be there",
    ))
}

fn copy(from: &Path, to: &Path) -> Outcome<()> {
    let output = Command::new("cp")
        .args(["-a", "--no-target-directory", "--"])
        .args([from, to])
        .output()
        .doing("run cp")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::io(format!("copy {}: {said}", from.display())).into())
}

/// What is there goes only when all of the old one is in its place.
fn put(tmp: &Path, path: &Path) -> Outcome<()> {
    if fs::symlink_metadata(path).is_err() {
        return fs::rename(tmp, path).doing(format_args!("put {} in its place", path.display()));
    }
    rustix::fs::renameat_with(CWD, tmp, CWD, path, RenameFlags::EXCHANGE)
        .map_err(std::io::Error::from)
        .doing(format_args!("put {} in its place", path.display()))?;
    remove(tmp).doing(format_args!("remove what was there before: it is {}", tmp.display()))
}

fn remove(path: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
}

/// `2026-03-01 12:00:05 UTC`.
fn when(t: Time) -> String {
    let seconds = t.nanos.div_euclid(1_000_000_000);
    let (days, of_day) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}
/// Days since 1970-01-01 as a date. Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let (era, of_era) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, of_year - (153 * from_march + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_as_a_date() {
        let shown = |seconds: i64| when(Time { nanos: seconds * 1_000_000_000 + 5 });
        assert_eq!(shown(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(shown(951_782_400 + 3661), "2000-02-29 01:01:01 UTC");
        assert_eq!(shown(-1), "1969-12-31 23:59:59 UTC");
        assert_eq!(shown(1_772_366_405), "2026-03-01 12:00:05 UTC");
    }
}
