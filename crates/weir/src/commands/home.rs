//! `weir home`: the places where users may have homes of their volumes. The rules are in the cluster map.
pub mod args;

use args::{HomeAllow, HomeCommand, HomeForbid};
use serde_json::{Value, json};
use std::sync::Arc;
use weir_admin::cluster_args::Status;
use weir_admin::failure::Outcome;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::Cluster;
use weir_proto::home_rule::{HomeIds, HomeRule, IdMapping};
use weir_proto::map::ClusterMap;

pub fn run(command: &HomeCommand) -> Outcome<()> {
    match command {
        HomeCommand::Allow(args) => allow(args),
        HomeCommand::List(args) => list(args),
        HomeCommand::Forbid(args) => forbid(args),
    }
}

fn with_cluster<T>(at: &Status, work: impl AsyncFnOnce(&Cluster) -> Outcome<T>) -> Outcome<T> {
    let coordinators = coordinators(at)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        work(&observe::observe(&env, &coordinators, "weir home").await?).await
    })
}

fn allow(args: &HomeAllow) -> Outcome<()> {
    let rule = HomeRule {
        place: args.place.clone(),
        ids: args.ids.of_home(),
        run_as: args.run_as.clone(),
        credentials: args.credentials.clone(),
        keep_setuid: args.keep_setuid,
        allow_root: args.allow_root,
    };
    rule.check()?;
    with_cluster(&args.cluster, async |cluster| Ok(cluster.allow_home(rule.clone()).await?))?;
    match args.cluster.json {
        true => table::json(&as_json(&rule)),
        false => println!("users may have homes in {}", rule.place),
    }
    Ok(())
}

fn list(args: &Status) -> Outcome<()> {
    let map: Arc<ClusterMap> = with_cluster(args, async |cluster| Ok(cluster.map()))?;
    if args.json {
        table::json(&Value::Array(map.homes.iter().map(as_json).collect()));
        return Ok(());
    }
    if map.homes.is_empty() {
        println!("no place is allowed: only root adds homes");
        return Ok(());
    }
    let rows: Vec<Vec<String>> = map.homes.iter().map(|r| vec![r.place.clone(), rights(r)]).collect();
    print!("{}", table::render(&["PLACE", "RULE"], &rows));
    Ok(())
}

fn forbid(args: &HomeForbid) -> Outcome<()> {
    with_cluster(&args.cluster, async |cluster| Ok(cluster.forbid_home(args.place.clone()).await?))?;
    match args.cluster.json {
        true => table::json(&json!({ "forbidden": args.place })),
        false => println!("no rule allows homes in {} any more", args.place),
    }
    Ok(())
}

/// The rights in the syntax of `weir home allow`.
fn rights(rule: &HomeRule) -> String {
    let maps = |flag: &'static str, all: &[IdMapping]| {
        all.iter().map(move |m| format!("{flag} {}={}+{}", m.here, m.there, m.count)).collect::<Vec<_>>()
    };
    let HomeIds { users, groups } = &rule.ids;
    let mut words = [maps("--map-uid", users), maps("--map-gid", groups)].concat();
    words.extend(rule.run_as.as_ref().map(|user| format!("--run-as {user}")));
    words.extend(rule.credentials.as_ref().map(|file| format!("--credentials {file}")));
    words.extend(rule.keep_setuid.then(|| "--keep-setuid".to_owned()));
    words.extend(rule.allow_root.then(|| "--allow-root".to_owned()));
    if words.is_empty() { "-".to_owned() } else { words.join(" ") }
}

fn as_json(rule: &HomeRule) -> Value {
    let ranges = |all: &[IdMapping]| -> Vec<Value> {
        all.iter().map(|m| json!({ "here": m.here, "there": m.there, "count": m.count })).collect()
    };
    json!({
        "place": rule.place, "users": ranges(&rule.ids.users), "groups": ranges(&rule.ids.groups), "run_as": rule.run_as,
        "credentials": rule.credentials, "keep_setuid": rule.keep_setuid, "allow_root": rule.allow_root,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_shown_as_it_is_given() {
        let mut rule = HomeRule::plain("file:///a");
        assert_eq!(rights(&rule), "-");
        rule.ids.users = vec![IdMapping { here: 1000, there: 2000, count: 5 }];
        (rule.allow_root, rule.keep_setuid) = (true, true);
        assert_eq!(rights(&rule), "--map-uid 1000=2000+5 --keep-setuid --allow-root");
        let rule = HomeRule { run_as: Some("archiver".into()), ..HomeRule::plain("file:///a") };
        assert_eq!(rights(&rule), "--run-as archiver");
    }
}
