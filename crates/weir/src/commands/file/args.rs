//! The command line of `weir file`.
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum FileCommand {
    /// Show a file's attributes as the metadata server has them
    Stat(OnePath),
    /// Show where a file's bytes are: scheme, cells, placement groups, targets
    Layout(OnePath),
    /// Show holders of and waiters for locks (fcntl and flock), with client, process, range and age
    Locks(OnePath),
    /// Free the local space of files that are stored at home; data returns on access
    Evict(ManyPaths),
    /// Recall evicted data of files from home, and wait for it
    Recall(ManyPaths),
    /// Never evict these files
    Pin(ManyPaths),
    /// Allow eviction of these files again
    Unpin(ManyPaths),
    /// Show bytes stored here and at home only, pinned files, recalls in progress
    State(ManyPaths),
}

#[derive(Args)]
pub struct ManyPaths {
    /// Files on a mounted Weir
    #[arg(required = true, value_hint = ValueHint::FilePath)]
    pub paths: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct OnePath {
    /// A file or directory on a mounted Weir
    #[arg(value_hint = ValueHint::AnyPath)]
    pub path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
