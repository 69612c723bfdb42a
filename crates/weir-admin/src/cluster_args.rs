//! Arguments that select the cluster of a command, and the certificate that it presents.
use crate::certificate::use_file;
use crate::failure::Outcome;
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

/// The certificate of a command.
#[derive(Args)]
pub struct Presented {
    /// Certificate with which this command shows who it is to nodes on other machines, like the admin.pem
    /// of `weir init`
    #[arg(long, global = true, value_name = "FILE", env = "WEIR_CERTIFICATE", hide_env_values = true, value_hint = ValueHint::FilePath, help_heading = CLUSTER_HEADING)]
    pub certificate: Option<PathBuf>,
}

impl Presented {
    /// From now on this process shows it to nodes on other machines.
    pub fn present(&self) -> Outcome<()> {
        self.certificate.as_deref().map_or(Ok(()), use_file)
    }
}
