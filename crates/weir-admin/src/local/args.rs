//! The options of `weir up`, `weir down` and `weir unmount`.
use crate::cluster_args::DIR_VARIABLE;
use crate::config::Patience;
use clap::{Args, ValueHint};
use std::path::PathBuf;
use weir_fuse::Transport;
use weir_proto::map::Scheme;

#[derive(Args, Clone)]
pub struct Up {
    /// Directory that holds everything of the cluster
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Storage targets, each with a process of its own [default: 6]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub targets: Option<u32>,
    /// How new files are protected: ec:K+M, replica:N or single [default: ec:4+2]
    #[arg(long)]
    pub scheme: Option<Scheme>,
    /// Mount the file system there; may be given several times
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub mount: Vec<PathBuf>,
    /// Mount also over a directory that is not empty or belongs to the system: its files are hidden
    #[arg(long, requires = "mount")]
    pub mount_over_files: bool,
    /// How long calls on mounts that start now wait for servers that do not answer: 30s, 10m, 2h or forever
    /// [default: 10m]
    #[arg(long, value_name = "TIME")]
    pub patience: Option<Patience>,
    /// How requests of mounts that start now come from the kernel: auto, dev or uring [default: dev]
    #[arg(long, value_name = "WAY")]
    pub transport: Option<Transport>,
    /// Number of movers, which copy volumes to their homes and recall evicted data [default: 1 in a new
    /// cluster]
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub movers: Option<u32>,
    /// Allow users to have homes in this place, like `weir home allow`; may be given several times
    #[arg(long, value_name = "URL")]
    pub allow_home: Vec<String>,
    /// Keep the cluster map in an etcd of 1 or 3 members, for 1 or 3 coordinators, all on this machine: for
    /// tests and demonstrations. Every user of this machine can then change the map [default: one coordinator
    /// without etcd]
    #[arg(long, value_name = "MEMBERS", value_parser = etcd_members)]
    pub etcd: Option<u32>,
    /// Copies of the metadata, 1 to 5, each with a process of its own [default: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=5))]
    pub copies: Option<u32>,
    /// Also serve the console on this machine, and print the link to its page
    #[arg(long)]
    pub console: bool,
    /// Keep everything in memory; `weir down` discards it
    #[arg(long)]
    pub memory: bool,
    /// Also listen on TCP ports of the loopback address, from the next start of each server. Every user of
    /// this machine can then do everything; without this option users manage only their own volumes
    #[arg(long)]
    pub tcp: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Down {
    /// The directory that `weir up` was given
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Stop although mounts hold data that programs have written and that cannot be saved now: it is lost
    #[arg(long)]
    pub lose_unsaved: bool,
    /// Only stop an in-memory cluster (its data is discarded); refuse an on-disk one
    #[arg(long)]
    pub memory: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Two of two members have to live, which is less available than one of one.
fn etcd_members(text: &str) -> Result<u32, String> {
    match text {
        "1" => Ok(1),
        "3" => Ok(3),
        _ => Err("expected 1 or 3".to_owned()),
    }
}

#[derive(Args)]
pub struct Unmount {
    /// The mount point
    #[arg(value_hint = ValueHint::DirPath)]
    pub path: PathBuf,
    /// Detach now, even with open files
    #[arg(long)]
    pub lazy: bool,
    /// Remove it from the cluster in this directory, too: `weir up` does not mount it again
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub forget: Option<PathBuf>,
}
