//! The options of `weir home`.
use crate::commands::relation::args::Ids;
use clap::{Args, Subcommand};
use weir_admin::cluster_args::Status;

const HOME_RULES: &str = "\
The place is a directory (file:///archive), or a part of an S3 bucket or of another Weir. In a directory, users name homes that they own;
symbolic links do not lead out of it. Of several rules the one with the longest path counts, also for homes that root names there.

Unless the rule allows it, files of root get user and group 65534 on the other side, files lose the bits and the capability with
which they run as their owner, and devices are not copied.";

#[derive(Subcommand)]
pub enum HomeCommand {
    /// Allow users to have homes in a place and below; replaces an earlier rule for the same place
    #[command(after_help = HOME_RULES)]
    Allow(HomeAllow),
    /// List the places with their rules
    List(Status),
    /// Remove the rule for a place: movers stop using homes of users there; no data is lost
    Forbid(HomeForbid),
}

#[derive(Args)]
pub struct HomeAllow {
    /// URL of the place, like file:///archive or s3://bucket/prefix?endpoint=https://host
    pub place: String,
    #[command(flatten)]
    pub ids: Ids,
    /// Act there as this user, to whom all files there belong; movers' machines must know the user
    #[arg(long, value_name = "USER")]
    pub run_as: Option<String>,
    /// Keep set-user-ID and set-group-ID bits, and file capabilities
    #[arg(long)]
    pub keep_setuid: bool,
    /// Keep root's files as root's, and copy devices
    #[arg(long)]
    pub allow_root: bool,
    /// File with the keys of S3, or for another Weir a node.pem of that cluster, on every machine with a
    /// mover: owned by the mover's user, mode 0600
    #[arg(long, value_name = "FILE")]
    pub credentials: Option<String>,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct HomeForbid {
    /// URL of the place, as `weir home list` shows it
    pub place: String,
    #[command(flatten)]
    pub cluster: Status,
}
