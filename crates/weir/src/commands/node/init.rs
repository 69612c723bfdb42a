//! `weir init`: founds a cluster, or adds another coordinator that shares its store.
//!
//! The coordinator's directory has `coord.toml`, its state or audit log, and, if the cluster was founded
//! here, `admin.pem` for commands on other machines.
use super::args::Init;
use super::enrol::{PATIENCE, name_of_machine, new_dir, private_dir, write_config};
use crate::unit;
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weir_admin::certificate::{self, ADMIN_CERTIFICATE};
use weir_admin::config::{self, Config, Text};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::local_cluster;
use weir_admin::{observe, table};
use weir_coord::etcd::{Etcd, StorePlace};
use weir_coord::identity::write_coordinator;
use weir_coord::store::Store;
use weir_coord::{CoordConfig, Coordinator, cluster_in, lead};
use weir_env::{Addr, Env};
use weir_proto::{ClusterId, Error};
use weir_trust::certificate::NewKey;

const CONFIG: &str = "coord.toml";
const COORD_DIR: &str = "coord";
const UNFINISHED: &str = "init.unfinished";

/// `weir init`.
pub fn init(args: &Init) -> Outcome<()> {
    let (dir, unfinished) = begin(&args.dir)?;
    let (mut config, env) = (config_of_coordinator(args, &dir)?, weir_env::real::env());
    let (cluster, founds) = observe::block_on(found(&env, &dir, &config))?;
    private_dir(&env, &dir.join("socket"))?;
    config.cluster.id = Some(Text(cluster));
    let file = dir.join(CONFIG);
    write_config(&env, &file, &config)?;
    let command = format!("weir coord --config {}", file.display());
    let unit = unit::write(&env, &file, &config.node.name, "coord")?;
    unfinished.end()?;
    if args.json {
        table::json(&json!({
            "cluster": cluster.to_string(), "founded": founds, "dir": dir, "config": file, "start": [command],
            "units": [unit],
        }));
        return Ok(());
    }
    let node = &config.node.name;
    match founds {
        true => println!("cluster {cluster} is founded in {}", dir.display()),
        false => {
            println!("{node} is another coordinator of cluster {cluster}; its directory is {}", dir.display())
        }
    }
    println!("start the coordinator:          {command}");
    println!("or let systemd run it:          {}", unit::enable(&unit));
    if founds {
        println!("then let machines join it:      weir token create --dir {} --role storage", dir.display());
    } else {
        // The first `weir init` may have ended before it wrote admin.pem.
        println!(
            "commands on other machines:     need admin.pem of the directory where the cluster was founded; if it is lost:"
        );
        println!("                                weir token create --dir {} --role admin", dir.display());
    }
    Ok(())
}

/// The mark of a `weir init` that has not ended: it is locked while one runs.
struct Unfinished {
    path: PathBuf,
    _lock: File,
}

impl Unfinished {
    fn end(self) -> Outcome<()> {
        std::fs::remove_file(&self.path).doing(format_args!("remove {}", self.path.display()))
    }
}

/// The directory, new or as an interrupted `weir init` left it: its cluster is not in
/// use, because the coordinator's configuration is written last. Its files are removed.
fn begin(dir: &Path) -> Outcome<(PathBuf, Unfinished)> {
    let dir = local_cluster::absolute(dir)?;
    let path = dir.join(UNFINISHED);
    let again = path.exists();
    let dir = if again { dir } else { new_dir(&dir)? };
    let doing = || format!("mark {} as unfinished", dir.display());
    let lock = File::options().create(true).append(true).open(&path).doing(doing())?;
    let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    if locked.is_err() {
        let error = Error::exists(format!("another `weir init` works in {}", dir.display()));
        return Err(Failure::new(error, "wait for its end"));
    }
    let config = dir.join(CONFIG);
    if again && config.exists() {
        let error = Error::exists(format!(
            "an earlier `weir init` in {} was interrupted at its very end: it is complete but for the unit for systemd",
            dir.display()
        ));
        let hint = format!(
            "start the coordinator: weir coord --config {}; and remove {}",
            config.display(),
            path.display()
        );
        return Err(Failure::new(error, hint));
    }
    if again {
        eprintln!("an earlier `weir init` in {} was interrupted: it begins again", dir.display());
        remove_unfinished(&dir)?;
    }
    Ok((dir, Unfinished { path, _lock: lock }))
}

/// All that an interrupted run may have made.
fn remove_unfinished(dir: &Path) -> Outcome<()> {
    for made in [COORD_DIR, "socket", ADMIN_CERTIFICATE] {
        let path = dir.join(made);
        let removed =
            if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        match removed {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            removed => removed.doing(format_args!("remove {}", path.display()))?,
        }
    }
    Ok(())
}

fn config_of_coordinator(args: &Init, dir: &Path) -> Outcome<Config> {
    let mut listen = vec![Addr::Unix(dir.join("socket/coord.sock"))];
    listen.extend(args.listen.iter().cloned());
    let mut config = Config::default();
    config.node.listen = listen.iter().cloned().map(Text).collect();
    config.cluster.coordinators = listen.into_iter().chain(args.other.iter().cloned()).map(Text).collect();
    config.coord.dir = dir.join(COORD_DIR);
    config.coord.certificates = true;
    config.coord.targets = args.targets;
    config.coord.scheme = Text(args.scheme);
    let mut usual = "coord".to_owned();
    if let Some(store) = &args.store {
        config.coord.store = Text(store.clone());
        let file = |named: &Option<PathBuf>| named.as_deref().map(local_cluster::absolute).transpose();
        config.etcd.ca = file(&args.etcd_ca)?.unwrap_or_default();
        config.etcd.certificate = file(&args.etcd_certificate)?.unwrap_or_default();
        config.etcd.key = file(&args.etcd_key)?.unwrap_or_default();
        usual = format!("coord-{}", name_of_machine(None, "")?);
    }
    config.node.name = name_of_machine(args.name.as_deref(), &usual)?;
    Ok(config)
}

/// Creates the coordinator's state, with the cluster's authority, and the administrator's certificate. False:
/// a store that coordinators share holds the cluster already, and this is another one of them.
async fn found(env: &Env, dir: &Path, config: &Config) -> Outcome<(ClusterId, bool)> {
    let coord = &config.coord;
    let founding = CoordConfig {
        new: true,
        certified: true,
        settings: config::settings(coord),
        ..CoordConfig::new(coord.scheme.0, coord.targets as usize)
    };
    let StorePlace::Etcd(endpoints) = &coord.store.0 else {
        let coordinator = Coordinator::open(env.clone(), &coord.dir, founding).await?;
        issue_admin(&coordinator, dir).await?;
        return Ok((coordinator.cluster(), true));
    };
    let store = Etcd::open(env, &config.etcd.at(endpoints))?;
    let mut held = env.clock.timeout(PATIENCE, cluster_in(&*store)).await.unwrap_or_else(|_| {
        Err(Error::deadline(format!("etcd does not answer at {}", endpoints.join(", "))))
    })?;
    if held.is_none() {
        let lead = lead(env, store.clone(), &config.node.name, |_| {}).await?;
        // Another machine may have founded it first.
        let founded = match cluster_in(&*store).await {
            Ok(None) => {
                let founding = CoordConfig { term: Some(lead.term()), ..founding };
                found_shared(env, dir, &coord.dir, store.clone(), founding).await.map(Some)
            }
            Ok(other) => {
                held = other;
                Ok(None)
            }
            Err(e) => Err(e.into()),
        };
        lead.resign().await;
        if let Some(cluster) = founded? {
            return Ok((cluster, true));
        }
    }
    let cluster =
        held.ok_or_else(|| Error::damaged("the store lost the cluster that it held a moment ago"))?;
    private_dir(env, &coord.dir)?;
    write_coordinator(&*env.disk, &coord.dir, cluster)?;
    Ok((cluster, false))
}

async fn found_shared(
    env: &Env,
    dir: &Path,
    state: &Path,
    store: Arc<dyn Store>,
    founding: CoordConfig,
) -> Outcome<ClusterId> {
    private_dir(env, state)?;
    let coordinator = Coordinator::open_shared(env.clone(), state, None, store, founding).await?;
    issue_admin(&coordinator, dir).await?;
    Ok(coordinator.cluster())
}

async fn issue_admin(coordinator: &Coordinator, dir: &Path) -> Outcome<()> {
    let key = NewKey::make()?;
    let issued = coordinator.issue_admin("admin", key.public().to_vec()).await?;
    certificate::write(&dir.join(ADMIN_CERTIFICATE), &key.with(issued.certificate, issued.authorities)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_founding_begins_again() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("c");
        let (made, first) = begin(&dir).unwrap();
        std::fs::create_dir_all(made.join(COORD_DIR)).unwrap();
        std::fs::write(made.join(COORD_DIR).join("state"), "half").unwrap();
        std::fs::write(made.join(ADMIN_CERTIFICATE), "half").unwrap();
        let running = begin(&dir).err().unwrap().error.context;
        assert!(running.contains("another `weir init` works"), "{running}");
        drop(first); // it was killed
        let (made, second) = begin(&dir).unwrap();
        let left: Vec<_> = std::fs::read_dir(&made).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, [UNFINISHED]);
        std::fs::write(made.join(CONFIG), "").unwrap();
        drop(second);
        let complete = begin(&dir).err().unwrap();
        assert!(complete.error.hint.unwrap().starts_with("start the coordinator: weir coord --config"));
        std::fs::remove_file(made.join(UNFINISHED)).unwrap();
        let used = begin(&dir).err().unwrap().error.context;
        assert!(used.ends_with("is not empty"), "a finished one is never touched: {used}");
    }
}
