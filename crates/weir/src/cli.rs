//! The command line: nouns and verbs, declared once; help, completion and man pages follow from it.
pub use crate::cli_file::*;
pub use crate::cli_nodes::*;
pub use crate::cli_roles::*;
pub use crate::cli_targets::*;
pub use crate::cli_watch::*;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use std::net::IpAddr;
use std::path::PathBuf;
pub use weir_admin::cluster_args::{DIR_VARIABLE, Presented, Status};
pub use weir_admin::local::args::{Down, Unmount, Up};
use weir_proto::network::Network;

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
    Namespace(crate::cli_namespace::NamespaceCommand),
    /// Manage volumes: subtrees with their own owner, limits and policy
    #[command(subcommand)]
    Volume(crate::commands::volume::VolumeCommand),
    /// Show what you use and may use: in all volumes together, and in each
    Quota(crate::commands::volume::ShowQuota),
    /// Report usage of a volume, a directory or everything: entries, sizes, largest files, fullest
    /// directories, users
    Report(crate::commands::report::Report),
    /// Manage homes of volumes: state, lag, backlog, conflicts
    #[command(subcommand)]
    Relation(crate::commands::relation::RelationCommand),
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

/// Exit statuses, for monitoring.
const STATUS_EXITS: &str = "\
Exit status:
  0  healthy
  1  degraded (data is available with reduced redundancy), or a warning (a dead mover or mount, a missing home, a full volume, …)
  2  critical: data is unavailable or lost
  3 and more: the cluster was not asked (8: the coordinator does not answer)";

const CLIENT_LIST: &str = "\
OPEN: files that its programs have open, TO WRITE of them for writing. LEASES: files and directories that it caches; others wait for AWAITED \
of them. UNWRITTEN: bytes that programs have written and that no target has yet, as reported up to five seconds ago.";

#[derive(Subcommand)]
pub enum ClientCommand {
    /// Show all clients: where each is, when the metadata server received something from it last, and what it
    /// holds
    #[command(after_help = CLIENT_LIST)]
    List(Status),
}

#[derive(Args)]
pub struct ShowStatus {
    /// Print one sentence, and one line for each trouble
    #[arg(long)]
    pub brief: bool,
    /// Show it again every two seconds, until interrupted
    #[arg(long)]
    pub watch: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Subcommand)]
pub enum UpgradeCommand {
    /// Enable features that only upgraded programs understand
    ///
    /// Until then older programs can join; afterwards they cannot. Refused, with names, while there are some.
    Finish(Status),
}

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
    pub ids: crate::commands::relation::Ids,
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
    pub at: weir_admin::namespace_client::Cluster,
}

#[derive(Subcommand)]
pub enum AuditCommand {
    /// Show the records: administration and refusals, oldest first
    Show(ShowAudit),
    /// Verify that no record was changed, removed, moved or cut
    ///
    /// Prints the last record's number and checksum. Keep both for --expect, which finds a removed end.
    Verify(VerifyAudit),
    /// List or set for which volumes opens and changes of files are recorded
    Volumes(AuditedVolumes),
}

#[derive(Args)]
pub struct ShowAudit {
    /// The directory that `weir up` was given, or that of a coordinator or metadata role
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Only records since then: a date in UTC (2026-11-22, 2026-11-22T03:00), yesterday, or an age (12h, 7d)
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct AuditedVolumes {
    /// Glob of volumes' names, or of their paths if it begins with `/`; without it the rules are listed
    pub volumes: Option<String>,
    /// Record who opens files
    #[arg(long, requires = "volumes")]
    pub opens: bool,
    /// Record who changes names, attributes and contents
    #[arg(long, requires = "volumes")]
    pub changes: bool,
    /// Stop recording
    #[arg(long, requires = "volumes", conflicts_with_all = ["opens", "changes"])]
    pub off: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct VerifyAudit {
    /// The directory that `weir up` was given, or that of a coordinator or metadata role
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// A record that a log must hold, as an earlier run printed it; may be given several times
    #[arg(long, value_name = "NUMBER:CHECKSUM")]
    pub expect: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Inspect {
    /// The target's directory; its process must not run
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Read every byte and verify every checksum
    #[arg(long)]
    pub check: bool,
    /// Print problems and totals only, not each cell
    #[arg(long, conflicts_with = "json")]
    pub summary: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
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
