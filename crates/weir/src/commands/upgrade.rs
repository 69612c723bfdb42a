//! `weir upgrade`: the end of a rolling upgrade.
use clap::Subcommand;
use serde_json::json;
use weir_admin::cluster_args::Status;
use weir_admin::failure::Outcome;
use weir_admin::observe;
use weir_admin::which::coordinators;

#[derive(Subcommand)]
pub enum UpgradeCommand {
    /// Enable features that only upgraded programs understand
    ///
    /// Until then older programs can join; afterwards they cannot. Refused, with names, while there are some.
    Finish(Status),
}

pub fn run(UpgradeCommand::Finish(args): &UpgradeCommand) -> Outcome<()> {
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
