//! The command line of roles in the foreground: coordinator, metadata, storage, mover and mount.
use clap::{Args, ValueHint};
use std::path::PathBuf;
use weir_admin::cluster_args::DIR_VARIABLE;
use weir_admin::config::{LogFormat, Patience};
use weir_coord::etcd::StorePlace;
use weir_env::Addr;
use weir_fuse::Transport;
use weir_proto::NamespaceUuid;
use weir_proto::map::Scheme;

/// Options of every role. They override the file.
#[derive(Args, Default, Clone)]
pub struct RoleArgs {
    /// Read a weir.toml
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Name of this node, unique in the cluster
    #[arg(long)]
    pub name: Option<String>,
    /// Address to listen on (unix:/PATH or tcp:HOST:PORT); may be given several times
    #[arg(long, value_name = "ADDR")]
    pub listen: Vec<Addr>,
    /// Address of the coordinator; may be given several times
    #[arg(long, value_name = "ADDR")]
    pub coordinator: Vec<Addr>,
    /// Form of the log on standard error: text, or json for one object on each line
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Write pid and readiness to this file
    #[arg(long, value_name = "FILE", hide = true)]
    pub pid_file: Option<PathBuf>,
}

impl RoleArgs {
    /// The directory of the cluster, if no other option names one.
    pub fn place<'a>(&self, dir: &'a Option<PathBuf>) -> Option<&'a PathBuf> {
        dir.as_ref().filter(|_| self.config.is_none() && self.coordinator.is_empty())
    }
}

#[derive(Args)]
pub struct CoordRole {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Directory of the cluster map, or, with --store etcd:…, of the audit log
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Where the cluster map is: directory, or etcd:http://HOST:PORT,http://HOST:PORT [default: directory]
    #[arg(long)]
    pub store: Option<StorePlace>,
    /// Targets to wait for before the first placement groups are made
    #[arg(long)]
    pub targets: Option<u32>,
    /// How new files are protected
    #[arg(long)]
    pub scheme: Option<Scheme>,
    /// Found a new cluster in an empty directory; without this option the directory must hold one
    #[arg(long)]
    pub new: bool,
}

#[derive(Args)]
pub struct MetaRole {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Directory of the namespace
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// The namespace to lead [default: root]
    #[arg(long)]
    pub namespace: Option<String>,
    /// Found a new namespace in an empty directory; without this option the directory must hold one
    #[arg(long)]
    pub new: bool,
    /// Give up the namespace of the same name that has this id, and all its files, permanently
    #[arg(long, value_name = "ID", requires = "new")]
    pub instead_of: Option<NamespaceUuid>,
}

#[derive(Args)]
pub struct StorageRole {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Directory of a target; may be given several times
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: Vec<PathBuf>,
    /// Pool of its targets
    #[arg(long)]
    pub pool: Option<String>,
}

#[derive(Args)]
pub struct MoverRole {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Directory of a cluster that `weir up` made; --config and --coordinator override it
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// The namespace to work for [default: root]
    #[arg(long)]
    pub namespace: Option<String>,
}

#[derive(Args)]
pub struct MountRole {
    #[command(flatten)]
    pub role: RoleArgs,
    /// Mount point
    #[arg(value_hint = ValueHint::DirPath)]
    pub path: Option<PathBuf>,
    /// Directory of a cluster that `weir up` made; --config and --coordinator override it
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// The namespace to show [default: root]
    #[arg(long)]
    pub namespace: Option<String>,
    /// Show this directory of the file system, like /volume, in place of all of it [default: /]
    #[arg(long, value_name = "DIR")]
    pub top: Option<String>,
    /// Memory for unsaved and cached data, in MiB
    #[arg(long)]
    pub memory_mib: Option<u64>,
    /// How long calls wait for servers that do not answer before programs get errors: 30s, 10m, 2h or forever
    /// [default: 10m]
    #[arg(long, value_name = "TIME")]
    pub patience: Option<Patience>,
    /// How requests come from the kernel: uring by io_uring, dev by /dev/fuse, auto by io_uring where the
    /// kernel offers it [default: dev]
    #[arg(long, value_name = "WAY")]
    pub transport: Option<Transport>,
    /// Mount read-only
    #[arg(long)]
    pub read_only: bool,
    /// The kernel asks for each name each time: no change by another mount waits until this one's kernel has
    /// forgotten a name
    #[arg(long)]
    pub no_kernel_names: bool,
    /// Wait at each change of a name until it is durable, also in directories that no other mount uses: a
    /// closed file is durable without fsync
    #[arg(long)]
    pub no_local_creates: bool,
    /// Options as mount(8) has them: ro, noexec, noatime, allow_other
    #[arg(
        short = 'o',
        long = "options",
        value_name = "OPTIONS",
        default_value = "",
        hide_default_value = true
    )]
    pub options: String,
    /// What mount(8) calls the source
    #[arg(long, default_value = "weir", hide = true)]
    pub source: String,
    /// Clean up a stale mount first ("Transport endpoint is not connected")
    #[arg(long)]
    pub recover: bool,
}
