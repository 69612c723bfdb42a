//! `weir volume restore`: restores a file or a directory from a snapshot, a backup or the trash.
//!
//! A user's work: it reads `.snapshots` of the mount, or a backup's directory, and writes next to the present
//! file, so it needs only the user's own permissions and grants none. The mount itself knows where backups
//! are: no address is needed.
//!
//! Always holds: no existing file is lost. The restored one is copied next to the present one and replaces it
//! in one step; the present one (a file, or a whole directory with all later files in it) is kept next to it
//! under a name that is reported. It is the user's to remove. An interruption at any moment leaves both.
mod trash;

use clap::{ArgGroup, Args};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind as IoKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::{attribute, table};
use weir_client::Client;
use weir_home::HomeUrl;
use weir_home::backup::{TreeName, snapshot_date};
use weir_proto::date::Date;
use weir_proto::{Error, InodeId, Result};

/// The directory in the topmost directory of a volume, in every mount.
const DIRECTORY: &str = attribute::SNAPSHOTS;
/// Longest name of a file, in bytes.
const NAME_MAX: usize = 255;
/// Snapshots that are listed if the requested one does not exist.
const SNAPSHOTS_SHOWN_MAX: usize = 10;
/// Names tried for the replaced file: more than restores within one second.
const KEPT_NAMES_MAX: u32 = 100;

#[derive(Args)]
#[command(group = ArgGroup::new("when").required(true).args(["from", "at", "trash"]))]
pub struct Restore {
    /// The file or directory, in a mount; it may be deleted
    pub path: PathBuf,
    /// Restore it from this snapshot
    #[arg(long, value_name = "NAME")]
    pub from: Option<String>,
    /// Restore it from the last snapshot or backup up to this date, like 2026-11-22, "2026-11-22 03:00"
    /// (UTC), yesterday or "2h ago"
    #[arg(long, value_name = "DATE", value_parser = read_date)]
    pub at: Option<Date>,
    /// Restore it from the volume's trash, as it was removed last: it is moved, not copied. An existing
    /// directory gets its missing files
    #[arg(long)]
    pub trash: bool,
    /// Restore to this path instead
    #[arg(long, value_name = "PATH")]
    pub to: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

fn read_date(text: &str) -> std::result::Result<Date, String> {
    weir_admin::times::parse_moment(text, now()).map_err(|e| e.to_string())
}

// ---- the mount's side

pub async fn snapshot_json(client: &Client, ino: InodeId) -> Result<Value> {
    let volume = client.volume_at(ino).await?;
    let snapshots = client.snapshots(volume.id).await?;
    let places = client.backups(Some(volume.id)).await?;
    let snapshots: Vec<Value> = snapshots
        .iter()
        .map(|s| json!({ "name": s.name, "created": s.created.nanos.div_euclid(1_000_000_000) }))
        .collect();
    let urls: Vec<&str> = places.iter().map(|place| &*place.url).collect();
    Ok(json!({ "volume": volume.name, "snapshots": snapshots, "backups": urls }))
}

// ---- the command's side

/// A state of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
struct State {
    date: Date,
    /// The volume's topmost directory.
    top: PathBuf,
    /// The state's name for the user.
    shown: String,
    /// The state contains all of the volume: a path that is not found did not exist.
    whole: bool,
}

/// Restores a file or a tree.
pub fn restore(args: &Restore) -> Outcome<()> {
    let path = std::path::absolute(&args.path).doing("find out where this is")?;
    if args.trash {
        let to = args.to.as_ref().map_or(Ok(path.clone()), std::path::absolute);
        let shown = trash::restore(&path, &to.doing("find out where that is")?)?;
        print_restored(args, &args.to.clone().unwrap_or(path), &shown, None);
        return Ok(());
    }
    let (old, shown) = match (&args.from, args.at) {
        (Some(name), _) => (in_snapshot(&path, name)?, name.clone()),
        (None, Some(date)) => at_date(&path, date)?,
        (None, None) => {
            return Err(
                Error::invalid("give a snapshot (--from), a date (--at) or the trash (--trash)").into()
            );
        }
    };
    let to = match &args.to {
        Some(to) => std::path::absolute(to).doing("find out where that is")?,
        None => path.clone(),
    };
    let kept = put_back(&old, &to, now())?;
    print_restored(args, &to, &shown, kept.as_deref());
    Ok(())
}

/// `kept`: the replaced file.
fn print_restored(args: &Restore, to: &Path, from: &str, kept: Option<&Path>) {
    if args.json {
        let kept = kept.map(Path::to_string_lossy);
        table::json(&json!({ "path": to.to_string_lossy(), "from": from, "kept": kept }));
        return;
    }
    println!("{} is as it was in {from}", to.display());
    if let Some(kept) = kept {
        println!("the replaced one is kept as {}", kept.display());
    }
}

/// Copies `old` to `to`, and returns the name under which the replaced file is kept.
fn put_back(old: &Path, to: &Path, now: Date) -> Outcome<Option<PathBuf>> {
    let (Some(parent), Some(name)) = (to.parent(), to.file_name()) else {
        return Err(Error::invalid("the root of everything is not restored").into());
    };
    if !parent.is_dir() {
        return Err(Failure::new(
            Error::not_found(format!("{} does not exist, either", parent.display())),
            "restore that first, or choose another place with --to PATH",
        ));
    }
    let tmp = parent.join(with_suffix(name, &format!("restoring-{}", std::process::id())));
    let put =
        copy(old, &tmp).and_then(|()| put(&tmp, to, |n| parent.join(with_suffix(name, &kept_as(now, n)))));
    if put.is_err() {
        let _ = remove(&tmp); // a copy of data that is still in the snapshot; the first error is returned
    }
    put
}

/// `before-restore-20261122T030000Z`; `n` distinguishes several of one second.
fn kept_as(now: Date, n: u32) -> String {
    let date = now.compact();
    if n == 0 { format!("before-restore-{date}") } else { format!("before-restore-{date}-{n}") }
}

fn now() -> Date {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Date(since.as_secs().cast_signed())
}

/// `NAME.suffix`, with as much of the name as fits.
fn with_suffix(name: &OsStr, suffix: &str) -> OsString {
    let kept = name.as_bytes().len().min(NAME_MAX.saturating_sub(suffix.len() + 1));
    let bytes = [&name.as_bytes()[..kept], b".", suffix.as_bytes()].concat();
    OsString::from_vec(bytes)
}

fn no_volume(path: &Path, what: &str) -> Failure {
    Failure::new(
        Error::not_found(format!("no volume around {} has {what}", path.display())),
        "`ls VOLUME/.snapshots` shows a volume's snapshots; the directory above PATH must exist",
    )
}

fn no_trash(path: &Path) -> Failure {
    Failure::new(
        Error::not_found(format!("no volume around {} has a trash", path.display())),
        "`weir volume policy VOLUME --trash 7d` gives it one; --at DATE searches snapshots and backups",
    )
}

/// The path in a snapshot.
fn in_snapshot(path: &Path, snapshot: &str) -> Outcome<PathBuf> {
    for top in path.ancestors().skip(1) {
        let then = top.join(DIRECTORY).join(snapshot);
        if then.is_dir() {
            let old = then.join(path.strip_prefix(top).expect("an ancestor is a prefix"));
            fs::symlink_metadata(&old).doing(format_args!("find {} in {snapshot}", path.display()))?;
            return Ok(old);
        }
    }
    Err(match volume_top(path) {
        Some(top) => no_such_snapshot(top, snapshot),
        None => no_volume(path, &format!("a snapshot {snapshot:?}")),
    })
}

/// The volume's topmost directory.
fn volume_top(path: &Path) -> Option<&Path> {
    path.ancestors().skip(1).find(|top| top.join(DIRECTORY).is_dir())
}

fn no_such_snapshot(top: &Path, name: &str) -> Failure {
    let known = attribute::ask(top, attribute::SNAPSHOT).unwrap_or_default();
    let volume = known["volume"].as_str().unwrap_or("?");
    let of = |snapshot: &Value| snapshot["name"].as_str().map(str::to_owned);
    let all: Vec<String> = known["snapshots"].as_array().into_iter().flatten().rev().filter_map(of).collect();
    let hint = match all.len() {
        0 => format!("it has none: `weir volume snapshot {volume} NAME` takes one"),
        1..=SNAPSHOTS_SHOWN_MAX => format!("it has, the newest first: {}", all.join(", ")),
        n => format!(
            "it has, the newest first: {} and {} more",
            all[..SNAPSHOTS_SHOWN_MAX].join(", "),
            n - SNAPSHOTS_SHOWN_MAX
        ),
    };
    Failure::new(Error::not_found(format!("volume {volume} has no snapshot {name:?}")), hint)
}

/// The path in the last state that is not later than `at`.
fn at_date(path: &Path, at: Date) -> Outcome<(PathBuf, String)> {
    let top = volume_top(path).ok_or_else(|| no_volume(path, "snapshots or backups"))?;
    let below = path.strip_prefix(top).expect("an ancestor is a prefix");
    let (states, unread) = states(top)?;
    choose(&states, below, at).map_err(|failure| match &unread[..] {
        [] => failure,
        _ => failure.error.hint(unread.join("; ")).into(),
    })
}

/// All snapshots and backups of a volume, the newest first and of equal dates snapshots first; and those that
/// could not be read.
fn states(top: &Path) -> Outcome<(Vec<State>, Vec<String>)> {
    let known = attribute::ask(top, attribute::SNAPSHOT)?;
    let (mut states, mut unread) = (Vec::new(), Vec::new());
    let urls: Vec<&str> =
        known["backups"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for snapshot in known["snapshots"].as_array().into_iter().flatten() {
        let (Some(name), Some(created)) = (snapshot["name"].as_str(), snapshot["created"].as_i64()) else {
            continue;
        };
        // A snapshot in a backup has the backup's date, by one clock.
        let of_backup = urls.iter().find_map(|url| snapshot_date(name, url));
        let (date, then) = (of_backup.unwrap_or(Date(created)), top.join(DIRECTORY).join(name));
        states.push(State { date, top: then, shown: format!("snapshot {name}"), whole: true });
    }
    for url in urls {
        match HomeUrl::parse(url)? {
            HomeUrl::File { path } => match backups(&path) {
                Ok(found) => states.extend(found),
                Err(e) => unread.push(format!("backups at {url} cannot be read here: {e}")),
            },
            _ => unread.push(format!("backups at {url} are read where that is mounted: copy it from there")),
        }
    }
    states.sort_by_key(|state| std::cmp::Reverse(state.date));
    Ok((states, unread))
}

fn backups(place: &Path) -> std::io::Result<Vec<State>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        let Some(name) = TreeName::parse(entry.file_name().as_encoded_bytes()) else { continue };
        if let Some(date) = name.made() {
            let whole = matches!(name, TreeName::Whole(_));
            found.push(State { date, top: entry.path(), shown: format!("the backup of {date}"), whole });
        }
    }
    Ok(found)
}

/// The last state that is not later and has all of it.
fn choose(states: &[State], below: &Path, at: Date) -> Outcome<(PathBuf, String)> {
    let shown = below.display();
    // Why no older version may be taken for the request.
    let mut newer: Option<(Date, String)> = None;
    for state in states.iter().filter(|state| state.date <= at) {
        let old = state.top.join(below);
        match fs::symlink_metadata(&old) {
            Ok(_) => {
                if let Some((_, why)) = newer.take_if(|(date, _)| *date > state.date) {
                    let hint = format!("it is in {}: ask for --at {}", state.shown, state.date);
                    return Err(Failure::new(Error::not_found(why), hint));
                }
                if is_readable(&old) {
                    return Ok((old, state.shown.clone()));
                }
                // Bytes that were offline then and have been written since cannot be read in a snapshot; the
                // backup of that time may have them.
                let why = format!("{shown} cannot be read in {}: its bytes were at home only", state.shown);
                newer = newer.or(Some((state.date, why)));
            }
            Err(e) if matches!(e.kind(), IoKind::NotFound | IoKind::NotADirectory) => {
                let why = || (state.date, format!("{shown} did not exist in {}", state.shown));
                newer = newer.or_else(|| state.whole.then(why));
            }
            Err(e) => return Err(e).doing(format_args!("find {shown} in {}", state.shown)),
        }
    }
    Err(match newer {
        Some((_, why)) => Error::not_found(format!("{why}, nor is it in anything older")).into(),
        None => Failure::new(
            Error::not_found(format!("no snapshot or backup of {at} or before has {}", below.display())),
            "`weir volume backups` and `weir volume snapshots` list them",
        ),
    })
}

/// A file whose bytes were evicted opens, and cannot be read. Missing permissions are reported by the copy.
fn is_readable(path: &Path) -> bool {
    use std::io::Read;
    let is_file = fs::symlink_metadata(path).is_ok_and(|m| m.is_file());
    let read = || fs::File::open(path)?.read(&mut [0]).map(drop);
    !is_file || read().err().and_then(|e| e.raw_os_error()) != Some(libc::EIO)
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
    let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::io(format!("copy {}: {error}", from.display())).into())
}

/// Moves the whole copy to its place. The present file gets an unused name, in one step: at no moment is one
/// of the two without a name, or nothing at `path`.
fn put(tmp: &Path, path: &Path, kept: impl Fn(u32) -> PathBuf) -> Outcome<Option<PathBuf>> {
    match rename_new(tmp, path) {
        Ok(()) => return Ok(None),
        Err(Errno::EXIST) => {}
        Err(e) => return Err(e).doing(format_args!("put {} in its place", path.display())),
    }
    for kept in (0..KEPT_NAMES_MAX).map(kept) {
        match rename_new(tmp, &kept) {
            Ok(()) => {}
            Err(Errno::EXIST) => continue,
            Err(e) => return Err(e).doing(format_args!("keep the existing one as {}", kept.display())),
        }
        let exchanged = rustix::fs::renameat_with(CWD, &kept, CWD, path, RenameFlags::EXCHANGE);
        if exchanged.is_err() {
            let _ = remove(&kept); // still the copy
        }
        exchanged.doing(format_args!("put {} in its place", path.display()))?;
        return Ok(Some(kept));
    }
    Err(Failure::new(
        Error::exists(format!("{}: all names for the existing one are taken", path.display())),
        "choose another place for the restored one with --to PATH",
    ))
}

/// Renames without replacing. If the file system cannot guarantee that (NFS), the target is checked before.
fn rename_new(from: &Path, to: &Path) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL) if fs::symlink_metadata(to).is_err() => rustix::fs::rename(from, to),
        Err(Errno::INVAL) => Err(Errno::EXIST),
        done => done,
    }
}

fn remove(path: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_state_that_is_not_later_counts() {
        let dir = tempfile::tempdir().unwrap();
        let state = |date: i64, name: &str, whole| {
            let top = dir.path().join(name);
            fs::create_dir_all(&top).unwrap();
            State { date: Date(date), top, shown: name.into(), whole }
        };
        let states =
            [state(40, "d", true), state(30, "c", false), state(20, "b", true), state(10, "a", true)];
        for (name, file) in
            [("d", "all"), ("c", "all"), ("b", "all"), ("a", "all"), ("b", "gap"), ("a", "old")]
        {
            fs::write(dir.path().join(name).join(file), name).unwrap();
        }
        let find = |file: &str, at: i64| choose(&states, Path::new(file), Date(at));
        let found = |file: &str, at: i64| fs::read_to_string(find(file, at).unwrap().0).unwrap();
        assert_eq!([45, 40, 39, 20, 19].map(|at| found("all", at)), ["d", "d", "c", "b", "a"]);
        // An incomplete backup proves nothing about missing files.
        assert_eq!(found("gap", 30), "b");
        let gone = find("old", 25).unwrap_err();
        assert!(
            gone.error.context.contains("did not exist in b") && gone.parts().1.unwrap().contains("in a")
        );
        assert!(find("all", 9).unwrap_err().error.context.contains("no snapshot or backup"));
        assert!(find("never", 45).unwrap_err().error.context.contains("nor is it"));
    }

    #[test]
    fn the_former_file_is_kept_under_a_name_that_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        fs::write(at("old"), "old").unwrap();
        assert_eq!(put_back(&at("old"), &at("f"), Date(0)).unwrap(), None, "nothing was there");
        // Newer and older, several of one second: all are kept.
        for (n, text) in ["newer", "newest"].iter().enumerate() {
            fs::write(at("f"), text).unwrap();
            let kept = put_back(&at("old"), &at("f"), Date(0)).unwrap().unwrap();
            let name = ["f.before-restore-19700101T000000Z", "f.before-restore-19700101T000000Z-1"][n];
            assert_eq!(kept, at(name));
            assert_eq!((read(&at("f")), read(&kept)), ("old".to_owned(), (*text).to_owned()));
        }
        // A tree as it was, and the whole of the other with later files in it.
        for (path, text) in [("then/a", "a"), ("d/a", "changed"), ("d/made", "since")] {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), text).unwrap();
        }
        let kept = put_back(&at("then"), &at("d"), Date(0)).unwrap().unwrap();
        assert_eq!((read(&at("d/a")), at("d/made").exists()), ("a".into(), false));
        assert_eq!((read(&kept.join("a")), read(&kept.join("made"))), ("changed".into(), "since".into()));
        // A file where a directory is now.
        let kept = put_back(&at("old"), &at("d"), Date(60)).unwrap().unwrap();
        assert_eq!((read(&at("d")), read(&kept.join("a"))), ("old".into(), "a".into()));
        // Nothing else is left over, and a failed copy changes nothing.
        assert!(put_back(&at("none"), &at("f"), Date(0)).is_err());
        assert_eq!(read(&at("f")), "old");
        let names = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let strange: Vec<String> = names.filter(|n| n.contains("restoring")).collect();
        assert!(strange.is_empty(), "{strange:?}");
    }

    #[test]
    fn a_long_name_is_truncated_and_still_unique() {
        let long = "n".repeat(255);
        let name = with_suffix(OsStr::new(&long), &kept_as(Date(0), 0));
        assert_eq!(name.len(), 255);
        assert!(name.to_str().unwrap().ends_with("n.before-restore-19700101T000000Z"));
    }
}
