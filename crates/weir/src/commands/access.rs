//! `weir access`: rules for mounts, which node may use which volumes and as whom.
pub mod args;

use args::{AccessCommand, AddRule, CheckAccess, RemoveRule, RootWord};
use serde_json::{Value, json};
use weir_admin::cluster_args::Status;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::namespace_client::{all, connect, named};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_client::Client;
use weir_env::Addr;
use weir_proto::Error;
use weir_proto::access::{AccessRule, Grant, IdRange, IdsAre, RootIs, VolumeGrant};
use weir_proto::enrol::GetEnrolment;
use weir_proto::meta::Cred;
use weir_proto::volume::Volume;
use weir_trust::rules::{Called, Decision, From, Origin, decide};

pub fn run(command: &AccessCommand) -> Outcome<()> {
    match command {
        AccessCommand::Add(args) => add(args),
        AccessCommand::Remove(args) => remove(args),
        AccessCommand::List(args) => list(args),
        AccessCommand::Check(args) => check(args),
    }
}

fn add(args: &AddRule) -> Outcome<()> {
    let rule = rule_of(args)?;
    rule.check()?;
    let rules = with_cluster(&args.cluster, async |cluster| {
        Ok(cluster.add_access_rule(rule, args.before.clone()).await?.access.0.clone())
    })?;
    if args.cluster.json {
        table::json(&Value::from(rules.iter().map(as_json).collect::<Vec<_>>()));
        return Ok(());
    }
    let at = rules.iter().position(|rule| rule.name == args.name).map_or(0, |at| at + 1);
    println!("rule {} is number {at} of {}", args.name, rules.len());
    Ok(())
}

fn remove(args: &RemoveRule) -> Outcome<()> {
    let rules = with_cluster(&args.cluster, async |cluster| {
        Ok(cluster.remove_access_rule(args.name.clone()).await?.access.0.clone())
    })?;
    match args.cluster.json {
        true => table::json(&Value::from(rules.iter().map(as_json).collect::<Vec<_>>())),
        false => println!(
            "rule {} is removed; {} left",
            args.name,
            table::count(rules.len() as u64, ["rule is", "rules are"])
        ),
    }
    Ok(())
}

fn list(args: &Status) -> Outcome<()> {
    let rules = with_cluster(args, async |cluster| Ok(cluster.map().access.0.clone()))?;
    if args.json {
        table::json(&Value::from(rules.iter().map(as_json).collect::<Vec<_>>()));
        return Ok(());
    }
    if rules.is_empty() {
        println!("there are no rules for mounts: every mount may use all volumes");
        return Ok(());
    }
    let header = ["RULE", "WHO", "FROM", "VOLUMES", "ROOT", "IDS"];
    let rows: Vec<Vec<String>> = rules.iter().map(row).collect();
    print!("{}", table::render(&header, &rows));
    Ok(())
}

fn check(args: &CheckAccess) -> Outcome<()> {
    let coordinators = coordinators(&args.at.cluster)?;
    let (volume, decision) = observe::block_on(async {
        let cluster = cluster_at(&coordinators).await?;
        let client = connect(coordinators.clone(), &args.at.namespace).await?;
        let volume = volume_of(&client, &args.volume).await?;
        client.shutdown().await?;
        let path = String::from_utf8_lossy(&volume.path).into_owned();
        let from = args.from.map_or(From::Local, From::Network);
        // If there is an authority, mounts on other machines have certificates.
        let certified = args.from.is_some() && cluster.administer(&GetEnrolment {}).await.is_ok();
        let origin = Origin { name: args.node.clone(), from, certified };
        let called = Called { name: &volume.name, path: &path };
        let decision = decide(&cluster.map().access.0, &origin, called);
        Ok((volume, decision))
    })?;
    let gid = args.gid.unwrap_or(args.uid);
    let groups = [&[gid], &args.groups[..]].concat();
    let acts = decision.acts_as(&Cred { uid: args.uid, gid, groups });
    match args.at.cluster.json {
        true => table::json(&checked_json(args, &volume, &decision, &acts)),
        false => print!("{}", checked_text(args, &volume, &decision, &acts)),
    }
    Ok(())
}

fn checked_json(args: &CheckAccess, volume: &Volume, decision: &Decision, acts: &Cred) -> Value {
    json!({
        "node": args.node,
        "from": args.from.map(|at| at.to_string()),
        "volume": volume.name,
        "access": decision.grant.to_string(),
        "rule": decision.rule,
        "why": decision.why,
        "uid": acts.uid,
        "gid": acts.gid,
        "groups": acts.groups,
    })
}

fn checked_text(args: &CheckAccess, volume: &Volume, decision: &Decision, acts: &Cred) -> String {
    let may = match decision.grant {
        Grant::Refused => "refused",
        Grant::ReadOnly => "read only",
        Grant::ReadWrite => "read and write",
    };
    let groups: Vec<String> = acts.groups.iter().map(u32::to_string).collect();
    let groups = if groups.is_empty() {
        "no other groups".to_owned()
    } else {
        format!("groups {}", groups.join(", "))
    };
    let user = format!("user {} acts as user {}, group {}, {groups}", args.uid, acts.uid, acts.gid);
    let why = format!("why: {}", decision.why);
    format!("volume {}: {may}\n{user}\n{why}\n", volume.name)
}

/// Finds a volume by its name, or the one that contains a path.
async fn volume_of(client: &Client, called: &str) -> Outcome<Volume> {
    if !called.starts_with('/') {
        return named(client, called).await;
    }
    let is_in = |volume: &Volume| {
        let path = String::from_utf8_lossy(&volume.path).into_owned();
        called
            .strip_prefix(path.trim_end_matches('/'))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let found = all(client).await?.into_iter().filter(is_in).max_by_key(|volume| volume.path.len());
    found.ok_or_else(|| {
        let error = Error::not_found(format!("{called:?} is in no volume"));
        Failure::new(error, "`weir volume list` shows all volumes")
    })
}

async fn cluster_at(coordinators: &[Addr]) -> Outcome<weir_coord::Cluster> {
    observe::observe(&weir_env::real::env(), coordinators, "weir access").await
}

fn with_cluster<T>(args: &Status, work: impl AsyncFnOnce(&weir_coord::Cluster) -> Outcome<T>) -> Outcome<T> {
    let coordinators = coordinators(args)?;
    observe::block_on(async {
        let cluster = cluster_at(&coordinators).await?;
        work(&cluster).await
    })
}

fn rule_of(args: &AddRule) -> Outcome<AccessRule> {
    let other = if args.read_only { Grant::ReadOnly } else { Grant::ReadWrite };
    let ids = match &args.all_as {
        Some(user) => all_users(user)?,
        None if args.map.is_empty() => IdsAre::Claimed {},
        None => mapped(&args.map)?,
    };
    Ok(AccessRule {
        name: args.name.clone(),
        who: args.who.clone(),
        from: args.from.clone(),
        volumes: args.volumes.iter().map(|word| grant_of(word, other)).collect::<Outcome<_>>()?,
        root: match args.root {
            RootWord::Squash => RootIs::Squashed,
            RootWord::Keep => RootIs::Kept,
        },
        ids,
    })
}

fn grant_of(word: &str, other: Grant) -> Outcome<VolumeGrant> {
    let ends = [(":rw", Grant::ReadWrite), (":ro", Grant::ReadOnly), (":none", Grant::Refused)];
    let own = ends.iter().find_map(|(end, grant)| Some((word.strip_suffix(end)?, *grant)));
    let (glob, grant) = own.unwrap_or((word, other));
    // A path may have a colon, a name has none: it would never match.
    if glob.contains(':') && !glob.starts_with('/') {
        let error = Error::invalid(format!("--volumes {word}: {glob:?} is not a glob of names of volumes"));
        return Err(Failure::new(error, "the rights of a mount there are :rw, :ro or :none"));
    }
    Ok(VolumeGrant { glob: glob.to_owned(), grant })
}

fn all_users(word: &str) -> Outcome<IdsAre> {
    let ids = word.split_once(':').and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
    ids.map(|(uid, gid)| IdsAre::All { uid, gid }).ok_or_else(|| {
        let error = Error::invalid(format!("--as {word}: expected a user and a group"));
        Failure::new(error, "for example --as 1000:1000")
    })
}

fn mapped(words: &[String]) -> Outcome<IdsAre> {
    let (mut uids, mut gids) = (Vec::new(), Vec::new());
    for word in words {
        let parts: Vec<&str> = word.split(':').collect();
        let number = |at: usize| parts.get(at).and_then(|n| n.parse().ok());
        let range = match (number(1), number(2), number(3)) {
            (Some(from), Some(to), Some(count)) if parts.len() == 4 => Some(IdRange { from, to, count }),
            _ => None,
        };
        match (parts.first(), range) {
            (Some(&"u"), Some(range)) => uids.push(range),
            (Some(&"g"), Some(range)) => gids.push(range),
            _ => {
                let error =
                    Error::invalid(format!("--map {word}: expected u:FROM:TO:COUNT or g:FROM:TO:COUNT"));
                return Err(Failure::new(error, "for example --map u:1000:5000:100,g:1000:5000:100"));
            }
        }
    }
    Ok(IdsAre::Mapped { uids, gids })
}

fn volumes_words(rule: &AccessRule) -> Vec<String> {
    rule.volumes.iter().map(|v| format!("{}:{}", v.glob, v.grant)).collect()
}

fn networks_words(rule: &AccessRule) -> Vec<String> {
    rule.from.iter().map(ToString::to_string).collect()
}

fn row(rule: &AccessRule) -> Vec<String> {
    let from = networks_words(rule);
    vec![
        rule.name.clone(),
        rule.who.clone(),
        if from.is_empty() { "anywhere".to_owned() } else { from.join(",") },
        volumes_words(rule).join(","),
        rule.root.to_string(),
        rule.ids.to_string(),
    ]
}

fn as_json(rule: &AccessRule) -> Value {
    json!({
        "name": rule.name,
        "who": rule.who,
        "from": networks_words(rule),
        "volumes": volumes_words(rule),
        "root": rule.root.to_string(),
        "ids": rule.ids.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_may_end_in_what_is_granted() {
        let grant = |word: &str| {
            let found = grant_of(word, Grant::ReadOnly).unwrap();
            (found.glob, found.grant)
        };
        assert_eq!(grant("p*"), ("p*".into(), Grant::ReadOnly));
        assert_eq!(grant("p*:rw"), ("p*".into(), Grant::ReadWrite));
        assert_eq!(grant("/a:b:none"), ("/a:b".into(), Grant::Refused));
        assert_eq!(grant("/a:b"), ("/a:b".into(), Grant::ReadOnly));
        for wrong in ["secret:noen", "p*:rw:ro", "a:b"] {
            let refused = grant_of(wrong, Grant::ReadOnly).unwrap_err().to_string();
            assert!(refused.contains(wrong) && refused.contains(":none"), "{refused}");
        }
    }

    #[test]
    fn ids_are_read_or_refused_with_an_example() {
        assert_eq!(all_users("1000:5").unwrap(), IdsAre::All { uid: 1000, gid: 5 });
        for bad in ["", "1000", "1000:", "a:b", "1:2:3", "-1:5"] {
            assert!(all_users(bad).unwrap_err().to_string().contains("--as 1000:1000"), "{bad:?}");
        }
        let range = IdRange { from: 1000, to: 5000, count: 10 };
        let both = mapped(&["u:1000:5000:10".into(), "g:1000:5000:10".into()]).unwrap();
        assert_eq!(both, IdsAre::Mapped { uids: vec![range], gids: vec![range] });
        for bad in ["", "u", "u:1:2", "x:1:2:3", "u:1:2:3:4", "u:1:2:-3"] {
            assert!(mapped(&[bad.into()]).unwrap_err().to_string().contains("--map u:1000"), "{bad:?}");
        }
    }
}
