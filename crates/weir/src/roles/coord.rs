//! The coordinator as a process: its store (a directory, or etcd), its lead among several, and its service.
use super::args::CoordRole;
use super::{
    Environment, LEAVE_PATIENCE, Node, SERVER_BUFFERS_BYTES, configure, coord_events, is_beyond, not_started,
    run, shown, stop_signal,
};
use std::time::Duration;
use weir_admin::certificate;
use weir_admin::config::{self, Text};
use weir_admin::failure::Outcome;
use weir_coord::etcd::{Etcd, StorePlace};
use weir_coord::standbys::Standbys;
use weir_coord::{CoordConfig, Observer};
use weir_node::{condition, start_coord, start_shared_coord};
use weir_proto::condition::REPORT_EVERY_MS;
use weir_proto::map::Role;

pub fn coord(args: &CoordRole, environment: &Environment) -> Outcome<()> {
    let mut config = configure(&args.role, "coord")?;
    if let Some(dir) = &args.dir {
        config.coord.dir.clone_from(dir);
    }
    if let Some(store) = &args.store {
        config.coord.store = Text(store.clone());
    }
    if let Some(targets) = args.targets {
        config.coord.targets = targets;
    }
    if let Some(scheme) = args.scheme {
        config.coord.scheme = Text(scheme);
    }
    run(&args.role, config, environment, SERVER_BUFFERS_BYTES, |node| run_coord(node, args.new))
}

async fn run_coord(node: Node, new: bool) -> Outcome<()> {
    let coord = &node.config.coord;
    let dir =
        node.required(&coord.dir, "the coordinator's directory", "--dir DIR, or coord.dir in weir.toml")?;
    let (settings, cluster) = (config::settings(coord), node.config.cluster.id.as_ref().map(|t| t.0));
    let others = CoordConfig::new(coord.scheme.0, coord.targets as usize);
    let config = CoordConfig {
        cluster,
        settings,
        new,
        name: node.config.node.name.clone(),
        certified: coord.certificates || node.listen().iter().any(is_beyond),
        policy: certificate::policy(&node.config.node),
        ..others
    };
    let observer = Observer {
        coordinators: node.config.cluster.coordinators.iter().map(|t| t.0.clone()).collect(),
        cluster,
        name: node.config.node.name.clone(),
        role: Role::Coordinator,
        host: node.config.node.host.clone(),
        trust: None, // that of its own authority: see `Coordinator::trust`
    };
    let site = node.site(observer);
    let stop = stop_signal();
    tokio::pin!(stop);
    let etcd = match &coord.store.0 {
        StorePlace::Directory => None,
        StorePlace::Etcd(endpoints) => Some(Etcd::open(&node.env, &node.config.etcd.at(endpoints))?),
    };
    let starting = async {
        let waits = |leader: &str| node.waits(leader);
        let started = match etcd.clone() {
            None => start_coord(&node.env, &site, &dir, config).await,
            Some(store) => start_shared_coord(&node.env, &site, &dir, store, config, waits).await,
        };
        started.map_err(not_started)
    };
    let coord = tokio::select! {
        biased;
        stopped = &mut stop => return stopped,
        started = starting => started?,
    };
    node.ready(&shown(&coord.server))?;
    let inspect = condition::of_directory(&node.env, &node.config.node.host, dir.clone());
    let reporting_loop = async {
        let mut standbys = Standbys::default();
        let name = &node.config.node.name;
        loop {
            let mut condition = condition::of_coordinator(&inspect, etcd.as_deref()).await;
            if let Some(etcd) = etcd.clone() {
                condition.troubles.extend(condition::standbys(&node.env, &mut standbys, etcd, name).await);
            }
            coord.report(name, condition);
            node.env.clock.sleep(Duration::from_millis(REPORT_EVERY_MS)).await;
        }
    };
    tokio::select! {
        biased;
        stopped = stop => stopped?,
        lost = coord.lost() => return Err(lost.doing("lead the cluster").into()),
        () = reporting_loop => {}
        () = coord_events::note(&node.env, &coord, &dir) => {}
    }
    coord.end(LEAVE_PATIENCE).await;
    Ok(())
}
