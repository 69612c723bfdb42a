//! Arguments that select the cluster of a command.
use clap::{ArgGroup, Args, ValueHint};
use std::path::PathBuf;
use weir_env::Addr;

/// Arguments that select the cluster.
pub const CLUSTER_HEADING: &str = "Cluster";
/// The variable that replaces `--dir`.
pub const DIR_VARIABLE: &str = "WEIR_DIR";

/// Where the coordinator is.
#[derive(Args)]
#[command(group = ArgGroup::new("cluster").multiple(true).args(["dir", "coordinator", "at"]))]
pub struct Status {
    /// The directory that `weir up`, `weir init` or `weir join` was given
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath, help_heading = CLUSTER_HEADING)]
    pub dir: Option<PathBuf>,
    /// Address of the coordinator, for a cluster of several machines; overrides --dir
    #[arg(long, value_name = "ADDR", help_heading = CLUSTER_HEADING)]
    pub coordinator: Vec<Addr>,
    /// A path in a mounted file system, whose mount asks for you [default: the current directory]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath, help_heading = CLUSTER_HEADING)]
    pub at: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
