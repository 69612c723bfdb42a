//! Arguments of `weir namespace`.
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;
use weir_admin::cluster_args::{DIR_VARIABLE, Status};
use weir_admin::times::parse_seconds;

#[derive(Subcommand)]
pub enum NamespaceCommand {
    /// List the nodes that keep each namespace's metadata
    List(Status),
    /// Keep a namespace's metadata on several nodes, any one of which may die
    Copies(SetCopies),
    /// Write the namespace's whole state into a file, now or on a schedule
    Export(Export),
    /// Show the schedule of exports, and their results
    Exports(Exports),
    /// Restore a lost metadata directory from an export, while the metadata role is stopped
    ///
    /// When the role starts, it compares the namespace with its targets before it serves.
    Import(Import),
}

#[derive(Args)]
pub struct SetCopies {
    /// Name of the namespace: root, unless it was founded under another one
    pub namespace: String,
    /// How many nodes shall keep it, 1 to 5: start `weir meta` on as many
    #[arg(value_parser = clap::value_parser!(u8).range(1..=5), required_unless_present = "lost")]
    pub copies: Option<u8>,
    /// All copies are lost: give them up, to restore the namespace with `weir namespace import`
    #[arg(long, conflicts_with_all = ["copies", "without"])]
    pub lost: bool,
    /// This node gives up its copy for good, so that another one can take its place
    #[arg(long, value_name = "NODE")]
    pub without: Option<String>,
    /// Do not wait until all copies hold everything
    #[arg(long)]
    pub no_wait: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct Export {
    /// A new file, or a directory in which the file gets a dated name. With --every: a directory of the
    /// metadata machine
    #[arg(value_name = "FILE|DIR", required_unless_present = "off", value_hint = ValueHint::AnyPath)]
    pub to: Option<String>,
    /// Have the metadata role make an export at this interval, like 1h or 1d
    #[arg(long, value_name = "TIME", value_parser = read_interval, conflicts_with = "off")]
    pub every: Option<u32>,
    /// How many scheduled exports are kept
    #[arg(long, value_name = "NUMBER", requires = "every", default_value_t = 7)]
    pub keep: u32,
    /// End the schedule; existing exports stay
    #[arg(long)]
    pub off: bool,
    #[command(flatten)]
    pub of: Exports,
}

#[derive(Args)]
pub struct Exports {
    /// The namespace
    #[arg(long, default_value = "root")]
    pub namespace: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct Import {
    /// A file that `weir namespace export` wrote
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// The directory that `weir up` or `weir join` was given on this machine; or give --config
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The metadata role's weir.toml
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

fn read_interval(text: &str) -> Result<u32, String> {
    match parse_seconds(text)? {
        0 => Err(format!("{text:?} is not an interval: expected one like 1d, 12h or 30m")),
        seconds => Ok(seconds),
    }
}
