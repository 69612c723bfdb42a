//! `weir relation` and `weir volume changes`: asks the metadata leader as a client does.
pub mod args;
mod prefetch;
mod rules;
mod verify;

use args::{Follow, Keep, One, RelationCommand, Set, Way};
use rules::{as_json as rules_as_json, lines, rules_of};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;
use weir_admin::cluster_args::Status;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::homes::{refuse_own_cluster, warn_of_directory};
use weir_admin::namespace_client::{Cluster, connect, find_relation, named, own_cred};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_client::{Client, NewRelation};
use weir_home::{HomeUrl, KeySource};
use weir_proto::home_rule::rule_of_user;
use weir_proto::relation::{
    Direction, NamedChange, RelationId, RelationInfo, RelationRules, RelationState, RelationVerb, Resolution,
    What,
};
use weir_proto::{Error, ErrorKind, InodeId, VolumeId};

/// Between polls of `--follow`.
const FOLLOW_WAIT: Duration = Duration::from_secs(10);

pub fn run(command: &RelationCommand, keys: Option<KeySource>) -> Outcome<()> {
    let at = match command {
        RelationCommand::Verify(options) => return verify::run(options, keys),
        RelationCommand::Prefetch(args) => return prefetch::run(args),
        RelationCommand::Add(args) => &args.at,
        RelationCommand::Set(args) => &args.at,
        RelationCommand::List(args) => &args.at,
        RelationCommand::Resolve(args) => &args.at,
        RelationCommand::Show(args)
        | RelationCommand::Pause(args)
        | RelationCommand::Resume(args)
        | RelationCommand::Remove(args) => &args.at,
    };
    with_client(at, async |client| carry_out(client, command, at.cluster.json).await)
}

fn with_client(at: &Cluster, work: impl AsyncFnOnce(&Client) -> Outcome<()>) -> Outcome<()> {
    let found: Vec<weir_env::Addr> = coordinators(&at.cluster)?;
    observe::block_on(async {
        let client = connect(found, &at.namespace).await?;
        let done = work(&client).await;
        client.shutdown().await?;
        done
    })
}

async fn carry_out(client: &Client, command: &RelationCommand, json: bool) -> Outcome<()> {
    let cred = own_cred();
    match command {
        RelationCommand::Add(args) => {
            let mirrors = args.direction == Way::Mirror;
            if mirrors && args.evict {
                let error = Error::invalid("--evict has no effect with --direction mirror");
                return Err(Failure::new(
                    error,
                    "omit it: all data is at home, and unused data is always evicted",
                ));
            }
            require_directory(&args.url, &args.at)?;
            if !mirrors {
                warn_of_directory(&args.url)?;
            }
            require_allowed(&args.url, &args.at.cluster).await?;
            refuse_own_cluster(&args.url, &coordinators(&args.at.cluster)?).await?;
            let volume = named(client, &args.volume).await?;
            let new = args.new.relation(args.url.clone(), args.evict, false)?;
            let new = NewRelation { mirrors, rules: args.rules.rules(), ..new };
            let made = client.add_relation(&cred, volume.id, &new).await.map_err(explain)?;
            if json {
                table::json(&as_json(&made));
            } else {
                let goes = if mirrors { "mirrors" } else { "is copied to" };
                println!("{}: {} {goes} {}", made.id, args.volume, made.url);
            }
        }
        RelationCommand::List(args) => {
            let volume = match &args.volume {
                Some(name) => Some(named(client, name).await?.id),
                None => None,
            };
            list(&client.relations(volume).await?, json);
        }
        RelationCommand::Set(args) => set(client, args, json).await?,
        RelationCommand::Show(args) => {
            let info = find_relation(client, &args.relation).await?;
            let rules = rules_of(client, info.id).await?;
            show(&info, &rules, json);
        }
        RelationCommand::Pause(args) => change(client, args, RelationVerb::Pause, "paused", json).await?,
        RelationCommand::Resume(args) => change(client, args, RelationVerb::Resume, "resumed", json).await?,
        RelationCommand::Remove(args) => change(client, args, RelationVerb::Remove, "removed", json).await?,
        RelationCommand::Resolve(args) => {
            let relation = find_relation(client, &args.relation).await?;
            let how = match args.keep {
                Keep::Volume => Resolution::KeepVolume,
                Keep::Retry => Resolution::Retry,
            };
            client.resolve(&cred, relation.id, parse_inode(&args.inode)?, how).await.map_err(explain)?;
            say(json, relation.id, &args.inode, "queued for another attempt");
        }
        RelationCommand::Prefetch(_) | RelationCommand::Verify(_) => {} // see run
    }
    Ok(())
}

async fn set(client: &Client, args: &Set, json: bool) -> Outcome<()> {
    if args.change.is_empty() {
        return Err(Failure::new(
            Error::invalid("no rule is given, so nothing is changed"),
            "give --include, --exclude, --no-include, --no-exclude or --bandwidth",
        ));
    }
    let relation = find_relation(client, &args.relation).await?;
    let limit = args.change.rules.bandwidth.map(|rate| rate.0);
    let (include, exclude) = args.change.lists();
    let rules = client.set_relation(&own_cred(), relation.id, include, exclude, limit).await;
    let rules = rules.map_err(explain)?;
    if json {
        table::json(&with_rules(as_json(&relation), &rules));
        return Ok(());
    }
    println!("{}: {} → {}", relation.id, relation.volume_name, relation.url);
    match lines(&rules) {
        none if none.is_empty() => println!("  all files, without a limit"),
        lines => lines.iter().for_each(|line| println!("{line}")),
    }
    Ok(())
}

fn with_rules(mut info: Value, rules: &RelationRules) -> Value {
    info["rules"] = rules_as_json(rules);
    info
}

async fn change(client: &Client, args: &One, verb: RelationVerb, said: &str, json: bool) -> Outcome<()> {
    let relation = find_relation(client, &args.relation).await?;
    client.change_relation(&own_cred(), relation.id, verb).await.map_err(explain)?;
    say(json, relation.id, &relation.id.to_string(), said);
    Ok(())
}

/// The outcome for a relation, or for an item of it.
fn say(json: bool, relation: RelationId, about: &str, done: &str) {
    match json {
        true => table::json(&json!({ "relation": relation.to_string(), "about": about, "done": done })),
        false => println!("{about}: {done}"),
    }
}

/// A home that is a directory must exist, if that can be checked: all movers of a cluster that is named by
/// its directory are on this machine.
fn require_directory(url: &str, at: &Cluster) -> Outcome<()> {
    let HomeUrl::File { path } = HomeUrl::parse(url)? else { return Ok(()) };
    if path.is_dir() || !at.cluster.coordinator.is_empty() {
        return Ok(());
    }
    let what = if path.exists() { "is not a directory" } else { "does not exist" };
    let error =
        Error::not_found(format!("the home {} {what} on this machine, where the movers are", path.display()));
    Err(Failure::new(error, format!("make or mount it first: mkdir -p {}", path.display())))
}

/// Refuses a home of a user that no rule allows. Movers check again each time that they open it.
pub async fn require_allowed(url: &str, at: &Status) -> Outcome<()> {
    let user = own_cred().uid;
    // The movers of a cluster that is named by its directory run as the user who ran `weir up`.
    let movers_user = match at.local()? {
        Some(place) => Some(std::fs::metadata(&place.dir).doing("find the owner of the cluster")?.uid()),
        None => None,
    };
    if user == 0 || movers_user == Some(user) {
        return Ok(());
    }
    let (env, coordinators) = (weir_env::real::env(), coordinators(at)?);
    let cluster = observe::observe(&env, &coordinators, "weir relation").await?;
    Ok(rule_of_user(&cluster.map().homes, url, user).map(drop)?)
}

fn parse_inode(text: &str) -> Outcome<InodeId> {
    let number = text.strip_prefix('i').and_then(|hex| u64::from_str_radix(hex, 16).ok());
    number.map(InodeId).ok_or_else(|| {
        let error = Error::invalid(format!("{text:?} is not an inode"));
        Failure::new(error, "`weir relation show` lists conflicts with their inodes, like i2000003")
    })
}

fn explain(e: Error) -> Failure {
    match e.kind {
        ErrorKind::Denied => {
            Failure::new(e, "the volume's owner, its administrators and the superuser may do that")
        }
        ErrorKind::Exists => Failure::new(e, "`weir relation list` shows it"),
        _ => e.into(),
    }
}

fn state(info: &RelationInfo) -> String {
    let mirrors = info.direction == Direction::Mirror;
    match &info.state {
        // Nothing is copied while its home refuses everything.
        RelationState::Synced {} | RelationState::Copying {} if !info.home_failure.is_empty() => {
            "home refused".into()
        }
        RelationState::Synced {} if mirrors => "mirroring".into(),
        RelationState::Copying {} if mirrors => "first scan".into(),
        RelationState::Synced {} => "synced".into(),
        RelationState::Copying {} => "copying".into(),
        RelationState::Paused { why } => format!("paused {why}"),
        RelationState::Diverged { items } => table::count(*items, ["conflict", "conflicts"]),
    }
}

/// Seconds until nothing is left at the present rate.
fn eta_s(info: &RelationInfo) -> Option<u64> {
    (info.backlog_bytes > 0 && info.rate > 0).then(|| info.backlog_bytes / info.rate)
}

fn as_json(info: &RelationInfo) -> Value {
    let conflicts: Vec<Value> = info
        .conflicts
        .iter()
        .map(|a| {
            json!({
                "inode": a.ino.to_string(), "path": String::from_utf8_lossy(&a.path), "diverged": a.diverged,
                "why": a.why, "at_ns": a.at.nanos,
            })
        })
        .collect();
    let mirrors = info.direction == Direction::Mirror;
    let word = match &info.state {
        RelationState::Synced {} if mirrors => "mirroring",
        RelationState::Copying {} if mirrors => "first scan",
        RelationState::Synced {} => "synced",
        RelationState::Copying {} => "copying",
        RelationState::Paused { .. } => "paused",
        RelationState::Diverged { .. } => "diverged",
    };
    json!({
        "relation": info.id.to_string(), "volume": info.volume_name, "url": info.url, "evict": info.evict,
        "direction": if info.direction == Direction::Mirror { "mirror" } else { "push" }, "scan_age_ms": info.scan_age_ms,
        "state": word, "lag_ms": info.lag_ms, "backlog_bytes": info.backlog_bytes,
        "backlog_names": info.backlog_names, "unseen_directories": info.unseen_directories,
        "rate_bytes_per_s": info.rate, "eta_s": eta_s(info), "shipped_bytes": info.shipped_bytes,
        "shipped_names": info.shipped_names, "movers": info.movers, "limited_by": info.limited_by,
        "home_failure": info.home_failure, "conflicts": conflicts,
    })
}

fn list(all: &[RelationInfo], as_json_too: bool) {
    if as_json_too {
        table::json(&Value::Array(all.iter().map(as_json).collect()));
        return;
    }
    let rows: Vec<Vec<String>> = all
        .iter()
        .map(|r| {
            let lag = format!("{:.1} s", r.lag_ms as f64 / 1000.0);
            vec![
                r.id.to_string(),
                r.volume_name.clone(),
                r.url.clone(),
                state(r),
                lag,
                table::bytes(r.backlog_bytes),
                format!("{}/s", table::bytes(r.rate)),
            ]
        })
        .collect();
    print!("{}", table::render(&["RELATION", "VOLUME", "HOME", "STATE", "LAG", "BACKLOG", "RATE"], &rows));
    for refused in all.iter().filter(|r| !r.home_failure.is_empty()) {
        println!("{}: {}", refused.id, refused.home_failure);
    }
}

fn show(info: &RelationInfo, rules: &RelationRules, json: bool) {
    if json {
        table::json(&with_rules(as_json(info), rules));
        return;
    }
    if info.direction == Direction::Mirror {
        show_mirrored(info);
        return lines(rules).iter().for_each(|line| println!("{line}"));
    }
    let evict =
        if info.evict { "data at home may be evicted here" } else { "no eviction: local copies are kept" };
    println!("{}: {} → {} ({evict})", info.id, info.volume_name, info.url);
    lines(rules).iter().for_each(|line| println!("{line}"));
    println!("  state       {}", state(info));
    println!("  lag         {:.1} s", info.lag_ms as f64 / 1000.0);
    let (bytes, rate) = (table::bytes(info.backlog_bytes), table::bytes(info.rate));
    let names = |n: u64| table::count(n, ["name", "names"]);
    println!("  backlog     {bytes}, {}", names(info.backlog_names));
    if info.unseen_directories > 0 {
        println!("  first scan  {} directories left", info.unseen_directories);
    }
    let eta = eta_s(info).map_or(String::new(), |s| format!(", {s} s to finish"));
    println!("  rate        {rate}/s{eta}");
    println!("  shipped     {}, {}", table::bytes(info.shipped_bytes), names(info.shipped_names));
    match info.movers {
        0 => println!(
            "  movers      none: nothing is copied or recalled (`weir up --movers 1`, or `weir mover`)"
        ),
        n => println!("  movers      {n}"),
    }
    if !info.limited_by.is_empty() {
        println!("  limited by  {}", info.limited_by);
    }
    for item in &info.conflicts {
        let path = table::plain(&String::from_utf8_lossy(&item.path));
        println!("  conflict    {} {path}: {}", item.ino, table::plain(&item.why));
    }
}

fn show_mirrored(info: &RelationInfo) {
    println!("{}: {} mirrors {} (read-only)", info.id, info.volume_name, info.url);
    println!("  state       {}", state(info));
    let s = info.scan_age_ms as f64 / 1000.0;
    println!("  last scan   every known directory was read at home within the last {s:.0} s");
    if info.unseen_directories > 0 {
        println!("  first scan  {} directories left", info.unseen_directories);
    }
    match info.movers {
        0 => println!(
            "  movers      none: nothing is scanned or fetched (`weir up --movers 1`, or `weir mover`)"
        ),
        n => println!("  movers      {n}"),
    }
    if !info.limited_by.is_empty() {
        println!("  limited by  {}", info.limited_by);
    }
}

// ---- the changelog

/// One change per line. With a cursor, printed changes are acknowledged afterwards: a crash prints them
/// again.
pub async fn follow(client: &Client, args: &Follow) -> Outcome<()> {
    let (cred, volume) = (own_cred(), named(client, &args.name).await?.id);
    if let (Some(cursor), true) = (&args.cursor, args.drop) {
        return client.drop_cursor(&cred, volume, cursor).await.map_err(|e| match e.kind {
            ErrorKind::NotFound => {
                Error::not_found(format!("volume {} has no cursor {cursor:?}", args.name)).into()
            }
            _ => explain(e),
        });
    }
    if let Some(cursor) = &args.cursor {
        client.acknowledge(&cred, volume, cursor, 0).await.map_err(explain)?;
    }
    let wait = if args.follow { FOLLOW_WAIT } else { Duration::ZERO };
    let (mut after, mut out) = (0, std::io::stdout());
    loop {
        let got = client.changes(&cred, volume, args.cursor.as_deref(), after, wait).await;
        let got = got.map_err(|e| match (e.kind, &args.cursor) {
            (ErrorKind::NotFound, None) => {
                Failure::new(e, "give --cursor NAME: from then on changes are kept for it")
            }
            _ => explain(e),
        })?;
        let Some(last) = got.changes.last().map(|c| c.change.number) else {
            if args.follow {
                continue;
            }
            return Ok(());
        };
        for named in &got.changes {
            let line = change_json(volume, named).to_string();
            writeln!(out, "{line}").map_err(|e| Error::from_io("print a change", &e))?;
        }
        out.flush().map_err(|e| Error::from_io("print a change", &e))?;
        after = last;
        if let Some(cursor) = &args.cursor {
            client.acknowledge(&cred, volume, cursor, last).await.map_err(explain)?;
        }
    }
}

fn change_json(volume: VolumeId, NamedChange { change, path }: &NamedChange) -> Value {
    let name = |name: &bytes::Bytes| String::from_utf8_lossy(name).into_owned();
    let mut value = match &change.what {
        What::Made { ino, kind, parent, name: n } => {
            json!({ "what": "made", "inode": ino.0, "kind": format!("{kind:?}").to_lowercase(), "parent": parent.0, "name": name(n) })
        }
        What::Linked { ino, parent, name: n } => {
            json!({ "what": "linked", "inode": ino.0, "parent": parent.0, "name": name(n) })
        }
        What::Removed { ino, parent, name: n, last, .. } => {
            json!({ "what": "removed", "inode": ino.0, "parent": parent.0, "name": name(n), "last": last })
        }
        What::Renamed { ino, parent, name: n, new_parent, new_name, replaced, .. } => json!({
            "what": "renamed", "inode": ino.0, "parent": parent.0, "name": name(n), "new_parent": new_parent.0,
            "new_name": name(new_name), "replaced": replaced.map(|(ino, _)| ino.0),
        }),
        What::Exchanged { ino, other, parent, name: n, other_parent, other_name } => json!({
            "what": "exchanged", "inode": ino.0, "other": other.0, "parent": parent.0, "name": name(n),
            "other_parent": other_parent.0, "other_name": name(other_name),
        }),
        What::Attributes { ino } => json!({ "what": "attributes", "inode": ino.0 }),
        What::Data { ino, offset, len } => {
            json!({ "what": "data", "inode": ino.0, "offset": offset, "len": len })
        }
        What::Resized { ino, size } => json!({ "what": "resized", "inode": ino.0, "size": size }),
        What::Complete { ino, size } => json!({ "what": "complete", "inode": ino.0, "size": size }),
    };
    value["path"] = json!(path.as_ref().map(name));
    value["number"] = json!(change.number);
    value["at_ns"] = json!(change.at.nanos);
    value["volume"] = json!(volume.0);
    value["by"] = json!({ "node": change.by.node, "uid": change.by.uid });
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_diagnose::troubles::world::world;

    #[test]
    fn a_relation_whose_home_refuses_everything_is_not_copying() {
        let mut world = world();
        let info = world.relation();
        info.state = RelationState::Copying {};
        assert_eq!(state(info), "copying");
        info.home_failure = "Permission denied".into();
        assert_eq!(state(info), "home refused");
        info.state = RelationState::Paused { why: "by an administrator".into() };
        assert_eq!(state(info), "paused by an administrator");
    }
}
