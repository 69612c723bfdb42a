//! The options of `weir access`.
use clap::{Args, Subcommand};
use std::net::IpAddr;
use weir_admin::cluster_args::Status;
use weir_admin::namespace_client::Cluster;
use weir_proto::network::Network;

/// The precedence of rules.
const RULES_HELP: &str = "\
The first rule that names the mount's node and the volume decides. A node that a rule names has the volumes of its rules only;
a node that no rule names has all volumes. Running mounts obey a new rule a moment after it was added.";

#[derive(Subcommand)]
pub enum AccessCommand {
    /// Add a rule: which mounts may use which volumes, and as whom
    #[command(after_help = RULES_HELP)]
    Add(AddRule),
    /// Remove a rule
    Remove(RemoveRule),
    /// Show the rules in order: the first one that names a mount's node and a volume decides
    List(Status),
    /// Show which rule decides for a node, a volume and a user, and what the user may do
    Check(CheckAccess),
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum RootWord {
    /// Becomes user and group 65534, without the superuser's group
    Squash,
    /// Stays the superuser
    Keep,
}

#[derive(Args)]
pub struct AddRule {
    /// Name of the rule, unique
    pub name: String,
    /// Nodes: a glob of the mount's name (`weir mount --name`), like 'node-*'
    #[arg(long, value_name = "GLOB")]
    pub who: String,
    /// Networks that the mount may connect from, like 10.1.0.0/16 or 2001:db8::/32 [default: anywhere, and
    /// Unix sockets]
    #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
    pub from: Vec<Network>,
    /// Volumes: globs of names, or of paths if they begin with '/'. Each may end in :rw, :ro (read only) or
    /// :none (refused); the first that matches counts
    #[arg(long, value_name = "GLOB", value_delimiter = ',', default_value = "*")]
    pub volumes: Vec<String>,
    /// Volumes without an ending of their own are read only
    #[arg(long)]
    pub read_only: bool,
    /// Treatment of the superuser of the mount's machine
    #[arg(long, value_enum, default_value_t = RootWord::Squash)]
    pub root: RootWord,
    /// All users of the mount are this one, like 1000:1000
    #[arg(long = "as", value_name = "UID:GID", conflicts_with = "map")]
    pub all_as: Option<String>,
    /// Map ids: u:FROM:TO:COUNT for users, g:FROM:TO:COUNT for groups; may be given several times. Ids in no
    /// range become 65534
    #[arg(long, value_name = "RANGE", value_delimiter = ',')]
    pub map: Vec<String>,
    /// Insert it before this rule [default: at the end]
    #[arg(long, value_name = "RULE")]
    pub before: Option<String>,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct RemoveRule {
    /// The rule as `weir access list` shows it
    pub name: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct CheckAccess {
    /// The name of the mount's node
    pub node: String,
    /// The volume: its name, or a path from the root of the file system
    pub volume: String,
    /// The user on the mount's machine
    pub uid: u32,
    /// The user's primary group [default: the same number]
    #[arg(long)]
    pub gid: Option<u32>,
    /// The user's other groups
    #[arg(long, value_delimiter = ',')]
    pub groups: Vec<u32>,
    /// Address that the mount connects from [default: by a Unix socket of a server's machine]
    #[arg(long, value_name = "ADDRESS")]
    pub from: Option<IpAddr>,
    #[command(flatten)]
    pub at: Cluster,
}
