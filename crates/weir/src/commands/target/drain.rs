//! `weir target drain`, `undrain`, `remove` and `list`: targets that leave, and the usage of all of them.
use super::args;
use super::replace::{number_of, stop_process};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use weir_admin::cluster_args::Status;
use weir_admin::failure::Outcome;
use weir_admin::local::local_cluster::{LocalCluster, RoleName};
use weir_admin::local::up;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::Cluster;
use weir_proto::coord::{ClusterStatus, GonePlan};
use weir_proto::map::{ClusterMap, TargetState};
use weir_proto::{Error, TargetId};

/// A stopped process announces its end; otherwise the target is down after a time of silence.
const DOWN_PATIENCE: Duration = Duration::from_secs(30);

/// `weir target drain`.
pub fn drain(args: &args::Drain) -> Outcome<()> {
    let target = number_of(&args.target)?;
    let (plan, places) = with_cluster(&args.cluster, async |cluster| {
        let plan = cluster.drain_target(target, false, args.dry_run).await?;
        Ok((plan, places_of(&cluster.map(), target)))
    })?;
    match args.cluster.json {
        true => println!("{}", drain_json(target, &plan, places, !args.dry_run)),
        false => println!("{}", drain_text(target, &plan, places, args.dry_run)),
    }
    Ok(())
}

/// `weir target undrain`.
pub fn undrain(args: &args::OneTarget) -> Outcome<()> {
    let target = number_of(&args.target)?;
    let places = with_cluster(&args.cluster, async |cluster| {
        cluster.drain_target(target, true, false).await?;
        Ok(places_of(&cluster.map(), target))
    })?;
    match args.cluster.json {
        true => println!("{}", json!({ "target": target.to_string(), "places": places })),
        false => {
            println!("{target} is not drained any more: it keeps its place in {places} placement groups")
        }
    }
    Ok(())
}

/// `weir target remove`.
pub fn remove(args: &args::OneTarget) -> Outcome<()> {
    let target = number_of(&args.target)?;
    let mut local = args.cluster.dir.as_deref().map(LocalCluster::open).transpose()?;
    let node = with_cluster(&args.cluster, async |cluster| {
        let map = cluster.map();
        let entry =
            map.target(target).ok_or_else(|| Error::not_found(format!("there is no target {target}")))?;
        let node = map.node(entry.node).map_or(String::new(), |n| n.name.clone());
        // A process that is still needed is not stopped.
        if let Some(local) = &local
            && places_of(&map, target) == 0
        {
            stop_process(local, &node)?;
            let is_down = |map: &ClusterMap| map.target(target).is_none_or(|t| t.state != TargetState::Up);
            cluster.wait_for(DOWN_PATIENCE, is_down).await?;
        }
        cluster.remove_target(target).await?;
        Ok(node)
    })?;
    if let Some(local) = &mut local {
        forget_process(local, &node)?;
    }
    match args.cluster.json {
        true => println!("{}", json!({ "removed": target.to_string(), "node": node })),
        false => {
            println!("{target} is removed from the cluster: nothing of its directory is needed any more")
        }
    }
    Ok(())
}

/// `weir target list`.
pub fn list(args: &Status) -> Outcome<()> {
    let (status, draining) = with_cluster(args, async |cluster| {
        let draining: BTreeSet<TargetId> = cluster.rebuild().await?.draining.into_iter().collect();
        Ok((cluster.status().await?, draining))
    })?;
    let rows = Row::all(&status, &draining);
    if args.json {
        table::json(&Value::from(rows.iter().map(Row::json).collect::<Vec<_>>()));
        return Ok(());
    }
    let header = ["TARGET", "NODE", "POOL", "STATE", "USED", "SIZE", "FULL", "PLACES"];
    print!("{}", table::render(&header, &rows.iter().map(Row::cells).collect::<Vec<_>>()));
    Ok(())
}

fn with_cluster<T>(args: &Status, work: impl AsyncFnOnce(&Cluster) -> Outcome<T>) -> Outcome<T> {
    let coordinators = coordinators(args)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir target").await?;
        work(&cluster).await
    })
}

fn places_of(map: &ClusterMap, target: TargetId) -> usize {
    map.groups.iter().filter(|g| g.members.iter().any(|m| m.target == target)).count()
}

fn drain_text(target: TargetId, plan: &GonePlan, places: usize, dry_run: bool) -> String {
    let begun = match (places, dry_run) {
        (0, _) => return format!("{target} has no data: `weir target remove {target}` removes it"),
        (_, true) => {
            format!("{target} has a place in {places} placement groups, which would go to other targets")
        }
        (_, false) => {
            format!("{target} has a place in {places} placement groups, which go to other targets now")
        }
    };
    let mut lines = vec![begun];
    lines.extend(plan.waiting.iter().map(|w| format!("{} wait: {}", w.places, w.why)));
    if !dry_run {
        lines.push("`weir rebuild --watch` shows how far it is".to_owned());
    }
    lines.join("\n")
}

fn drain_json(target: TargetId, plan: &GonePlan, places: usize, done: bool) -> Value {
    let waiting = plan.waiting.iter().map(|w| json!({ "places": w.places, "why": w.why }));
    json!({
        "target": target.to_string(),
        "done": done,
        "places": places,
        "begun": plan.begun,
        "waiting": waiting.collect::<Vec<_>>(),
    })
}

/// `weir up` does not start it again.
fn forget_process(local: &mut LocalCluster, name: &str) -> Outcome<()> {
    let _only_one = up::lock(local)?;
    *local = LocalCluster::open_own(&local.dir)?; // with changes of a concurrent `weir up`
    local.manifest.processes.retain(|p| p.role != RoleName::Storage || p.name != name);
    local.manifest.targets = local.of_role(RoleName::Storage).count() as u32; // fewer than before
    local.save()
}

struct Row {
    target: TargetId,
    node: String,
    pool: String,
    state: &'static str,
    used: u64,
    capacity: u64,
    places: usize,
}

impl Row {
    fn all(status: &ClusterStatus, draining: &BTreeSet<TargetId>) -> Vec<Row> {
        let map = &status.map;
        let of = |t: &weir_proto::map::Target| {
            let report = status.targets.iter().find(|r| r.target == t.id);
            Row {
                target: t.id,
                node: map.node(t.node).map_or(String::new(), |n| n.name.clone()),
                pool: t.pool.clone(),
                state: match t.state {
                    TargetState::Up if draining.contains(&t.id) => "draining",
                    TargetState::Up => "up",
                    TargetState::Down => "down",
                    TargetState::Failed => "failed",
                },
                used: report.map_or(0, |r| r.used),
                capacity: report.map_or(t.capacity, |r| r.capacity),
                places: places_of(map, t.id),
            }
        };
        map.targets.iter().map(of).collect()
    }

    fn full_percent(&self) -> u64 {
        (u128::from(self.used) * 100).checked_div(u128::from(self.capacity)).unwrap_or(0) as u64
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.target.to_string(),
            self.node.clone(),
            self.pool.clone(),
            self.state.to_owned(),
            table::bytes(self.used),
            table::bytes(self.capacity),
            format!("{}%", self.full_percent()),
            self.places.to_string(),
        ]
    }

    fn json(&self) -> Value {
        json!({
            "target": self.target.to_string(),
            "node": self.node,
            "pool": self.pool,
            "state": self.state,
            "used": self.used,
            "capacity": self.capacity,
            "places": self.places,
        })
    }
}
