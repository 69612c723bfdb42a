//! `weir upgrade`: the end of a rolling upgrade.
use crate::cli;
use serde_json::json;
use weir_admin::failure::Outcome;
use weir_admin::observe;
use weir_admin::which::coordinators;

/// `weir upgrade finish`.
pub fn finish(args: &cli::Status) -> Outcome<()> {
    let coordinators = coordinators(args)?;
    let (before, after) = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir upgrade").await?;
        let before = cluster.map().level;
        Ok((before, cluster.finish_upgrade().await?.level))
    })?;
    match (args.json, after > before) {
        (true, _) => println!("{}", json!({ "level": after, "level_before": before })),
        (false, true) => println!("the cluster is at level {after}: older programs cannot join it any more"),
        (false, false) => println!("the cluster is at level {after}, the highest that its programs know"),
    }
    Ok(())
}
