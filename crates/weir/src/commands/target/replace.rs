//! `weir target`: an administrator's actions on one target.
use super::args;
use serde_json::json;
use std::path::Path;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::local::local_cluster::{self, LocalCluster, RoleName};
use weir_admin::local::process::PidFile;
use weir_admin::local::up;
use weir_admin::observe;
use weir_admin::which::coordinators;
use weir_coord::Cluster;
use weir_coord::identity::{TargetIdentity, format_target};
use weir_proto::map::{ClusterMap, Target, TargetState};
use weir_proto::{Error, TargetId};

/// `weir target clear`.
pub fn clear(args: &args::ClearTarget) -> Outcome<()> {
    let target = number_of(&args.target)?;
    let coordinators = coordinators(&args.cluster)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir target").await?;
        Ok(cluster.clear_target(target).await?)
    })?;
    match args.cluster.json {
        true => println!("{}", json!({ "cleared": args.target })),
        false => println!("{target} may be used again: it is repaired when its process serves it"),
    }
    Ok(())
}

pub fn number_of(name: &str) -> Outcome<TargetId> {
    let number = name.strip_prefix('t').and_then(|n| n.parse().ok());
    number.map(TargetId).ok_or_else(|| {
        let error = Error::invalid(format!("{name:?} names no target"));
        Failure::new(error, "a target is called like t3: `weir status` shows them")
    })
}

/// `weir target replace`: makes an empty directory the target's new one. The target has no data then, and is
/// refilled from the others.
pub fn replace(args: &args::ReplaceTarget) -> Outcome<()> {
    let id = number_of(&args.target)?;
    let dir = local_cluster::absolute(&args.new_dir)?;
    let mut local = args.cluster.dir.as_deref().map(LocalCluster::open).transpose()?;
    let coordinators = coordinators(&args.cluster)?;
    let node = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir target").await?;
        let map = cluster.map();
        let target = replaceable(&map, id)?;
        let node = map.node(target.node).map_or(String::new(), |n| n.name.clone());
        if let Some(local) = &local {
            stop_process(local, &node)?;
        }
        let identity = TargetIdentity { cluster: map.cluster, disk: target.uuid, pool: target.pool.clone() };
        format_target(&*env.disk, &dir, &identity)?;
        clear_failed(&cluster, target).await?;
        Ok(node)
    })?;
    if let Some(local) = &mut local {
        move_process(local, &node, &dir)?;
    }
    let next = match &local {
        Some(local) => format!("`weir up --dir {}`", local.dir.display()),
        None => {
            format!("the storage role {node:?} with --dir {0} in place of the old directory", dir.display())
        }
    };
    match args.cluster.json {
        true => println!("{}", json!({ "replaced": args.target, "dir": dir, "node": node })),
        false => {
            println!("{id} is in {} now: start {next}, and it is refilled from the others", dir.display())
        }
    }
    Ok(())
}

fn replaceable(map: &ClusterMap, id: TargetId) -> Outcome<&Target> {
    let target = map.target(id).ok_or_else(|| {
        let error = Error::not_found(format!("there is no target {id}"));
        Failure::new(error, "`weir status` shows the targets")
    })?;
    if target.state == TargetState::Up {
        let node = map.node(target.node).map_or("?", |n| n.name.as_str());
        let error = Error::invalid(format!("{id} is up, served by {node:?}: it needs no new disk"));
        return Err(Failure::new(error, "to take its disk away, stop its process first"));
    }
    Ok(target)
}

/// A failed target's process has no other work in a cluster that `weir up` made.
pub fn stop_process(local: &LocalCluster, name: &str) -> Outcome<()> {
    let storage = local.of_role(RoleName::Storage).find(|p| p.name == name);
    if let Some(pid) = storage.and_then(|p| PidFile::read(&local.pid_file(p))) {
        pid.stop(up::STOP_PATIENCE)?;
    }
    Ok(())
}

/// The data in the old directory is not served any more, so its failure does not count.
async fn clear_failed(cluster: &Cluster, target: &Target) -> Outcome<()> {
    if target.state == TargetState::Failed {
        cluster.clear_target(target.id).await?;
    }
    Ok(())
}

/// From its next start the process of that name serves the new directory.
fn move_process(local: &mut LocalCluster, name: &str, dir: &Path) -> Outcome<()> {
    let _only_one = up::lock(local)?;
    *local = LocalCluster::open_own(&local.dir)?; // with changes of a concurrent `weir up`
    let mut processes = local.manifest.processes.iter_mut();
    let Some(process) = processes.find(|p| p.role == RoleName::Storage && p.name == name) else {
        let error = Error::not_found(format!("{} has no storage process {name:?}", local.dir.display()));
        return Err(Failure::new(error, format!("start the storage role with --dir {}", dir.display())));
    };
    process.path = dir.to_path_buf();
    local.save()
}
