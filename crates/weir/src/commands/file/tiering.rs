//! `weir file evict|recall|pin|unpin|state`: the tiering state of a file, and changes of it.
//!
//! Requests and answers are attributes that the mount serves itself, as for `weir file stat`; the metadata
//! leader checks the permission. The mount's side is here, too, so that both use the same format.
use super::args::ManyPaths;
use rustix::fs::XattrFlags;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::progress::Progress;
use weir_admin::{attribute, table};
use weir_client::Client;
use weir_proto::meta::Cred;
use weir_proto::{Error, InodeId, NameRule, Result, split_hint};

/// Attributes of the mount that change the tiering state of a file (set only).
const EVICT: &str = "weir.evict";
const RECALL: &str = "weir.recall";
const PIN: &str = "weir.pin";
/// The interval of checks of a recall's progress.
const POLL: Duration = Duration::from_millis(500);

// ---- the mount's side

pub async fn state_json(client: &Client, ino: InodeId) -> Result<Value> {
    let r = client.tier_state(ino).await?;
    let recalls: Vec<Value> = r
        .recalls
        .iter()
        .map(|s| {
            json!({
                "from": s.from, "to": s.to, "awaited": s.awaited, "failures": s.failures, "error": s.error,
                "mover": (s.mover.0 != 0).then(|| s.mover.to_string()),
            })
        })
        .collect();
    Ok(json!({
        "inode": ino.0, "size": r.size, "online": r.size.saturating_sub(r.evicted), "offline": r.evicted,
        "offline_ranges": r.ranges, "pinned": r.pinned, "evictable": r.at_home && !r.pinned,
        "why_not": if r.pinned { "it is pinned" } else { reason(&r.why_not) }, "recalls": recalls,
    }))
}

/// Without the leader's name for the file: `inode i21000009 stays: …`.
fn reason(why_not: &str) -> &str {
    why_not.split_once(" stays: ").map_or(why_not, |(_, why)| why)
}

/// The mount's action when one of these attributes is set.
pub async fn act(client: &Client, cred: &Cred, ino: InodeId, name: &str, value: &[u8]) -> Result<()> {
    match (name, value) {
        (EVICT, _) => client.evict(cred, ino, 0, u64::MAX).await.map(|_| ()),
        (PIN, b"1") => client.pin(cred, ino, true).await,
        (PIN, b"0") => client.pin(cred, ino, false).await,
        (RECALL, b"want" | b"wait") => {
            let attr = client.getattr(ino).await?.attr;
            if cred.uid != 0 && cred.uid != attr.uid {
                let why = format!("user {} may not recall inode {ino}: it belongs to {}", cred.uid, attr.uid);
                return Err(Error::name(NameRule::NotOwner, why));
            }
            match value {
                b"want" => client.want_recall(ino, 0, u64::MAX).await,
                _ => client.recall_file(ino).await,
            }
        }
        _ => Err(Error::unsupported(format!("attribute {name:?} is not one to be set that way"))),
    }
}

// ---- the command's side

pub fn evict(args: &ManyPaths) -> Outcome<()> {
    each(args, |path| {
        require_no_directory(path)?;
        set(path, EVICT, b"1").map_err(|e| {
            let state = attribute::ask(path, attribute::STATE).unwrap_or_default();
            let why = state["why_not"].as_str().unwrap_or_default();
            match (e.kind(), why) {
                (_, "") => Failure::new(e.error, "programs that have it open for writing must close it"),
                (kind, why) => {
                    let error = Error::of_text(kind, why).doing(format_args!("evict {}", path.display()));
                    Failure::new(
                        error,
                        "`weir file state` shows pinned files, and files that are not at home yet",
                    )
                }
            }
        })
    })
}
pub fn pin(args: &ManyPaths, pinned: bool) -> Outcome<()> {
    each(args, |path| set(path, PIN, if pinned { b"1" } else { b"0" }))
}

/// Requests all files first, so that movers recall them in parallel, then waits for each.
pub fn recall(args: &ManyPaths) -> Outcome<()> {
    for path in &args.paths {
        set(path, RECALL, b"want")?;
    }
    each(args, |path| {
        let (tx, rx) = std::sync::mpsc::channel();
        let waiting = path.to_path_buf();
        std::thread::spawn(move || tx.send(set(&waiting, RECALL, b"wait")));
        let progress = Progress::default();
        loop {
            match rx.recv_timeout(POLL) {
                Ok(done) => return done.map_err(|e| why_not_recalled(path, e)),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => progress.show(how_far(path)),
                Err(e) => return Err(Error::io(format!("recall {}: {e}", path.display())).into()),
            }
        }
    })
}

/// Bytes of a file that are at home only.
pub fn offline(path: &Path) -> Outcome<u64> {
    Ok(attribute::ask(path, attribute::STATE)?["offline"].as_u64().unwrap_or(0))
}
/// Queues a recall of all of a file, with low priority.
pub fn want(path: &Path) -> Outcome<()> {
    set(path, RECALL, b"want")
}
/// Waits until it is online.
pub fn wait(path: &Path) -> Outcome<()> {
    set(path, RECALL, b"wait").map_err(|e| why_not_recalled(path, e))
}

fn how_far(path: &Path) -> String {
    let Ok(state) = attribute::ask(path, attribute::STATE) else { return String::new() };
    let (size, online) = (state["size"].as_u64().unwrap_or(0), state["online"].as_u64().unwrap_or(0));
    format!("{}: {} % of {size} bytes are here", path.display(), online * 100 / size.max(1))
}
fn why_not_recalled(path: &Path, e: Failure) -> Failure {
    let state = attribute::ask(path, attribute::STATE).unwrap_or_default();
    let recalls = state["recalls"].as_array().map_or(&[][..], Vec::as_slice);
    let errors = recalls.iter().filter_map(|r| r["error"].as_str());
    let last = errors.rev().find(|e| !e.is_empty()).unwrap_or_default().to_owned();
    match last.is_empty() {
        true => e.error.hint("`weir file state` and the mount's log show what it waited for").into(),
        false => {
            let (why, hint) = split_hint(&last);
            match hint {
                Some(hint) => e.error.doing(why).hint(hint.to_owned()).into(),
                None => e.doing(why),
            }
        }
    }
}

pub fn state(args: &ManyPaths) -> Outcome<()> {
    let mut states = Vec::new();
    for path in &args.paths {
        require_no_directory(path)?;
        let mut state = attribute::ask(path, attribute::STATE)?;
        state["path"] = json!(path.display().to_string());
        states.push(state);
    }
    if args.json {
        table::json(&Value::Array(states));
        return Ok(());
    }
    let cell = |state: &Value, key: &str| match &state[key] {
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        other => other.to_string(),
    };
    let rows: Vec<Vec<String>> = states
        .iter()
        .map(|s| {
            let mut row =
                ["path", "online", "offline", "pinned", "evictable"].map(|key| cell(s, key)).to_vec();
            let recalls = s["recalls"].as_array().map_or(0, Vec::len);
            row.push(match recalls {
                0 => cell(s, "why_not"),
                n => format!("{n} recalls wait or are in progress"),
            });
            row
        })
        .collect();
    print!("{}", table::render(&["FILE", "ONLINE", "OFFLINE", "PINNED", "EVICTABLE", ""], &rows));
    Ok(())
}

/// All of them, even if one fails; the first failure is the command's.
fn each(args: &ManyPaths, work: impl Fn(&Path) -> Outcome<()>) -> Outcome<()> {
    let mut done = Vec::new();
    let mut failed = Ok(());
    for path in &args.paths {
        let outcome = work(path);
        let error = outcome.as_ref().err().map(|e| e.parts().0.to_owned());
        done.push(json!({ "path": path.display().to_string(), "done": outcome.is_ok(), "error": error }));
        if let Err(e) = outcome {
            match failed {
                Ok(()) => failed = Err(e),
                Err(_) => eprintln!("{e}"),
            }
        }
    }
    if args.json {
        table::json(&Value::Array(done));
    }
    failed
}

/// Directories have no data of their own.
fn require_no_directory(path: &Path) -> Outcome<()> {
    if !std::fs::symlink_metadata(path).is_ok_and(|at| at.is_dir()) {
        return Ok(());
    }
    let error = Error::name(NameRule::IsDirectory, format!("{} is a directory", path.display()));
    Err(Failure::new(error, "name files; `weir relation prefetch DIRECTORY` recalls all files in one"))
}

fn set(path: &Path, attribute: &str, value: &[u8]) -> Outcome<()> {
    require_no_directory(path)?;
    match rustix::fs::lsetxattr(path, attribute, value, XattrFlags::empty()) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) => Err(Failure::new(
            Error::invalid(format!("{} is not on a Weir file system", path.display())),
            "name a file below a mount of `weir up --mount PATH` or `weir mount`",
        )),
        Err(e) => {
            let failure =
                Err(e).doing(format_args!("{} {}", attribute.trim_start_matches("weir."), path.display()));
            failure.map_err(|failure: Failure| match failure.kind() {
                weir_proto::ErrorKind::Denied => {
                    failure.error.hint("the file's owner and the superuser may do that").into()
                }
                _ => failure,
            })
        }
    }
}
