//! `weir top`: the largest consumers of the last ten seconds.
//!
//! Mounts account for the work of programs; by target, storage nodes for that of their disks.
use super::PATIENCE;
use super::args::TopArgs;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;
use weir_admin::failure::Outcome;
use weir_admin::namespace_client::{all, connect};
use weir_admin::which::coordinators;
use weir_admin::{observe, table, users};
use weir_coord::{Cluster, Collected};
use weir_diagnose::health::is_led;
use weir_diagnose::work::{self, By, Names, TopLine, lines_of, target_lines};
use weir_env::{Addr, Env};
use weir_proto::watch::{GetMeters, GetTop, Meters, Top};

const EVERY: Duration = Duration::from_secs(2);
const WINDOW_S: u32 = 10;
/// Between two readings of counters.
const BETWEEN: Duration = Duration::from_secs(1);
/// Names of volumes are optional: they are not awaited longer.
const NAMES_PATIENCE: Duration = Duration::from_secs(1);

pub fn top(args: &TopArgs) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    let again = !args.once && !args.cluster.json && std::io::stdout().is_terminal();
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir top").await?;
        let volumes = volume_names(&env, &cluster, &coordinators).await;
        loop {
            let mut lines = match args.by {
                By::Target => targets(&env, &cluster).await?,
                by => {
                    let asked = GetTop { seconds: WINDOW_S };
                    let tops: Vec<Collected<Top>> = cluster.collect(&asked, PATIENCE).await?;
                    let users = users::of(work::users(&tops));
                    lines_of(by, &tops, &Names { volumes: volumes.clone(), users })
                }
            };
            lines.truncate(args.rows);
            show(args, &lines, again);
            if !again {
                return Ok(());
            }
            env.clock.sleep(EVERY).await;
        }
    })
}

fn show(args: &TopArgs, lines: &[TopLine], again: bool) {
    if args.cluster.json {
        return table::json(&json!({ "rows": lines }));
    }
    if again {
        print!("\x1b[H\x1b[2J");
    }
    if lines.is_empty() {
        println!("no requests in the last {WINDOW_S} s");
        return;
    }
    print!("{}", text(args.by, lines));
}

fn text(by: By, lines: &[TopLine]) -> String {
    let header = match by {
        By::Volume => "VOLUME",
        By::User => "USER",
        By::Client => "CLIENT",
        By::Job => "JOB",
        By::Kind => "KIND",
        By::Target => "TARGET",
    };
    let row = |line: &TopLine| {
        vec![
            line.name.clone(),
            format!("{:.0}", line.requests_per_s),
            format!("{}/s", table::bytes(line.bytes_per_s as u64)),
            format!("{:.1}", line.waiting),
            line.kind.clone(),
            line.client.clone(),
            line.volume.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = lines.iter().map(row).collect();
    table::render(&[header, "REQ/S", "BYTES", "WAITING", "MOSTLY", "CLIENT", "VOLUME"], &rows)
}

/// Names of volumes of all namespaces; without those of one whose leader is slow to answer.
async fn volume_names(env: &Env, cluster: &Cluster, coordinators: &[Addr]) -> BTreeMap<u32, String> {
    let mut names = BTreeMap::new();
    let map = cluster.map();
    for namespace in map.namespaces.iter().filter(|n| is_led(&map, n)) {
        let asked = async {
            let client = connect(coordinators.to_vec(), &namespace.name).await?;
            let volumes = all(&client).await?;
            client.shutdown().await?;
            Outcome::Ok(volumes)
        };
        if let Ok(Ok(volumes)) = env.clock.timeout(NAMES_PATIENCE, asked).await {
            names.extend(volumes.into_iter().map(|v| (v.id.0, v.name)));
        }
    }
    names
}

/// The work of each target's disk in a second.
async fn targets(env: &Env, cluster: &Cluster) -> Outcome<Vec<TopLine>> {
    let first: Vec<Collected<Meters>> = cluster.collect(&GetMeters {}, PATIENCE).await?;
    let begun = env.clock.now();
    env.clock.sleep(BETWEEN).await;
    let second: Vec<Collected<Meters>> = cluster.collect(&GetMeters {}, PATIENCE).await?;
    let seconds = env.clock.now().since(begun).as_secs_f64();
    Ok(target_lines(&first, &second, seconds))
}
