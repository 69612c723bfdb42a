//! The command line: nouns and verbs, declared once; help, completion and man pages follow from it.
use crate::commands::access::args::AccessCommand;
use crate::commands::audit::args::AuditCommand;
use crate::commands::client::ClientCommand;
use crate::commands::file::args::FileCommand;
use crate::commands::home::args::HomeCommand;
use crate::commands::namespace::args::NamespaceCommand;
use crate::commands::node::args::{CaCommand, Init, Join, NodeCommand, TokenCommand};
use crate::commands::relation::args::RelationCommand;
use crate::commands::report::Report;
use crate::commands::target::args::{Inspect, Rebuild, TargetCommand};
use crate::commands::upgrade::UpgradeCommand;
use crate::commands::volume::args::{ShowQuota, VolumeCommand};
use crate::commands::watch::args::{
    EventsArgs, IohistArgs, STATUS_EXITS, ShowStatus, TopArgs, WaitsArgs, WhyArgs,
};
use crate::console::ConsoleArgs;
use crate::help;
use crate::roles::args::{CoordRole, MetaRole, MountRole, MoverRole, StorageRole};
use crate::support::SupportArgs;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueHint};
use std::path::PathBuf;
use weir_admin::cluster_args::Presented;
use weir_admin::local::args::{Down, Unmount, Up};

#[derive(Parser)]
#[command(
    name = "weir",
    version,
    about = "One file system for a research facility",
    after_help = AFTER_HELP,
    disable_help_subcommand = true,
    propagate_version = true
)]
pub struct Cli {
    #[command(flatten)]
    pub presented: Presented,
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads the command line of this process. Its help has the commands in groups.
    pub fn read() -> Result<Cli, clap::Error> {
        let mut command = help::grouped(Cli::command());
        let matches = command.try_get_matches_from_mut(std::env::args_os())?;
        Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command))
    }
}

const AFTER_HELP: &str = "\
A cluster on this machine in one command: weir up --dir DIR --mount PATH

The variable WEIR_DIR replaces --dir in commands that take a cluster's directory.
Measurements and a demonstration have a program of their own: weir-bench.

Exit status:
   0  done
   1  the answer is no: the inspected thing has an error (`weir status` has its own: see its help)
   2  wrong usage, or a request that can never succeed
   3  not found
   4  it exists already, is in use, or is not empty
   5  permission denied
   6  no space
   7  out of date: the named thing has changed meanwhile
   8  unavailable: the coordinator or another node does not answer
   9  no answer in time
  10  data is damaged beyond repair
  11  not supported
  12  a disk or the operating system failed
  13  a limit of a volume, a user or a group is reached";

#[derive(Subcommand)]
pub enum Command {
    /// Start a whole cluster on this machine, in the background; start again what is missing
    Up(Up),
    /// Stop a cluster that `weir up` started
    Down(Down),
    /// Found a cluster of several machines: its coordinator's directory, authority and administrator's
    /// certificate
    Init(Init),
    /// Make this machine a node of a cluster, with a token that `weir token create` printed there
    Join(Join),
    /// Manage join tokens
    #[command(subcommand)]
    Token(TokenCommand),
    /// List and remove nodes that have certificates
    #[command(subcommand)]
    Node(NodeCommand),
    /// List and replace the authority that signs the cluster's certificates
    #[command(subcommand)]
    Ca(CaCommand),
    /// Show cluster health: troubles first, then nodes, targets and placement groups
    #[command(after_help = STATUS_EXITS)]
    Status(ShowStatus),
    /// List clients: mounts, movers and programs, with what each holds
    #[command(subcommand)]
    Client(ClientCommand),
    /// Show who has most of the work now: by user, volume, client, job, kind of request or target
    Top(TopArgs),
    /// Show what the processes of the cluster wait for, the longest first
    Waits(WaitsArgs),
    /// Explain why a file, a process or the cluster is slow: the cause, the chain to the program, what to do
    Why(WhyArgs),
    /// Show how long requests, disks, journals and homes take
    Iohist(IohistArgs),
    /// List troubles as they began and ended, while a console runs; mute some for a while
    Events(EventsArgs),
    /// Write an archive for support: state, waits, history, logs, without names of files
    Support(SupportArgs),
    /// Serve a page, an API and Prometheus metrics of the whole cluster on this machine
    Console(ConsoleArgs),
    /// Inspect, evict, recall and pin files
    #[command(subcommand)]
    File(FileCommand),
    /// Return a failed target to service, replace its disk, or declare it lost
    #[command(subcommand)]
    Target(TargetCommand),
    /// Show how the data of lost targets is rebuilt on others: the rest, the rate, and what waits
    Rebuild(Rebuild),
    /// Finish a rolling upgrade
    #[command(subcommand)]
    Upgrade(UpgradeCommand),
    /// Choose on how many nodes the metadata is kept; export and restore it
    #[command(subcommand)]
    Namespace(NamespaceCommand),
    /// Manage volumes: subtrees with their own owner, limits and policy
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Show what you use and may use: in all volumes together, and in each
    Quota(ShowQuota),
    /// Report usage of a volume, a directory or everything: entries, sizes, largest files, fullest
    /// directories, users
    Report(Report),
    /// Manage homes of volumes: state, lag, backlog, conflicts
    #[command(subcommand)]
    Relation(RelationCommand),
    /// Manage the places where users may have homes, and what movers may do there
    #[command(subcommand)]
    Home(HomeCommand),
    /// Manage rules for mounts: which nodes may use which volumes, and as whom
    #[command(subcommand)]
    Access(AccessCommand),
    /// Show and verify the audit log: administration and refusals
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Decode a target's directory offline
    Inspect(Inspect),
    /// Mount in the foreground
    Mount(MountRole),
    /// Unmount; also a mount whose process died
    Unmount(Unmount),
    /// Run the coordinator role in the foreground
    Coord(CoordRole),
    /// Run the metadata role in the foreground
    Meta(MetaRole),
    /// Run the storage role in the foreground
    Storage(StorageRole),
    /// Run a mover in the foreground: it copies volumes to their homes and recalls evicted data
    Mover(MoverRole),
    /// Configuration files
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a shell's completion script: it offers names of volumes, relations, snapshots and targets, too
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write man pages
    Man {
        /// Directory to write them to
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
    /// Write the files of a package beside the program: man pages, completion, units
    #[command(hide = true)]
    PackageFiles {
        /// Directory to write them to
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
}

/// Options of `weir mount` that have a value: mount(8) may name them, too.
pub fn mount_options() -> Vec<String> {
    let command = Cli::command();
    let mount = command.find_subcommand("mount").into_iter();
    let arguments =
        mount.flat_map(clap::Command::get_arguments).filter(|arg| arg.get_action().takes_values());
    arguments.filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print every key of weir.toml with its documentation and default
    Reference,
    /// Check a file
    Check {
        /// The file
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::{ErrorKind, NameRule};

    #[test]
    fn help_lists_every_exit_status() {
        let kinds = (1..=u8::MAX).filter_map(ErrorKind::from_number);
        for code in kinds.map(ErrorKind::exit_code).chain([0, 1]) {
            assert!(AFTER_HELP.contains(&format!("\n  {code:>2}  ")), "{code}");
        }
        assert_eq!(ErrorKind::Name(NameRule::NotEmpty).exit_code(), 4, "this is no wrong usage");
    }
}
