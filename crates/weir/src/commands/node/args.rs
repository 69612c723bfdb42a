//! The arguments of commands about nodes and their certificates.
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;
use weir_admin::cluster_args::Status;
use weir_coord::etcd::StorePlace;
use weir_env::Addr;
use weir_proto::map::Scheme;
use weir_proto::network::Network;

#[derive(Args)]
pub struct Init {
    /// A new directory for the coordinator
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Address at which other machines reach the coordinator, like tcp:10.1.0.2:7000; may be given several
    /// times
    #[arg(long, value_name = "ADDR", required = true)]
    pub listen: Vec<Addr>,
    /// Name of the coordinator's node [default: coord; with --store: coord- and the machine's name]
    #[arg(long)]
    pub name: Option<String>,
    /// etcd:http://HOST:PORT,… keeps the cluster map in etcd: several coordinators share it, and each
    /// machine runs this command. The first one founds the cluster
    #[arg(long, value_name = "STORE")]
    pub store: Option<StorePlace>,
    /// Address of another coordinator that shares the etcd; may be given several times
    #[arg(long, value_name = "ADDR", requires = "store")]
    pub other: Vec<Addr>,
    /// Certificates of the authority that signs etcd's servers, in PEM [default: those of the web]
    #[arg(long, value_name = "FILE", requires = "store", value_hint = ValueHint::FilePath)]
    pub etcd_ca: Option<PathBuf>,
    /// Certificate that the coordinator shows to etcd, in PEM
    #[arg(long, value_name = "FILE", requires = "etcd_key", value_hint = ValueHint::FilePath)]
    pub etcd_certificate: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, value_name = "FILE", requires = "etcd_certificate", value_hint = ValueHint::FilePath)]
    pub etcd_key: Option<PathBuf>,
    /// Targets to wait for before the first placement groups are made
    #[arg(long, default_value_t = 6)]
    pub targets: u32,
    /// How new files are protected: ec:K+M, replica:N or single
    #[arg(long, default_value = "ec:4+2")]
    pub scheme: Scheme,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Join {
    /// The token
    pub token: String,
    /// A new directory for the node: configuration, certificate, and what its roles keep
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Name of the node, unique in the cluster [default: the machine's name]
    #[arg(long)]
    pub name: Option<String>,
    /// Address to listen on (tcp:HOST:PORT), for storage and meta; may be given several times [default: any
    /// address and port]
    #[arg(long, value_name = "ADDR")]
    pub listen: Vec<Addr>,
    /// Directory of a target, for storage; may be given several times [default: DIR/target]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub target: Vec<PathBuf>,
    /// Rack of this machine, a fault domain: data is spread over racks where there are several
    #[arg(long, value_name = "NAME")]
    pub rack: Option<String>,
    /// Mount point, for mount [default: /weir]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub mount: Option<PathBuf>,
    /// Socket at which this machine's users ask for their volumes, for mount [default: /run/weir/NAME.sock]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Subcommand)]
pub enum TokenCommand {
    /// Print a new token: it lets any machine join, so treat it like a password
    Create(CreateToken),
    /// List tokens that can still be used, without their secrets
    List(Status),
    /// Revoke a token: no machine can join with it any more
    Revoke(RevokeToken),
}

#[derive(Args)]
pub struct CreateToken {
    /// Role of a machine that joins with it: storage, meta, mount or mover; of a person: admin, operator or
    /// auditor; may be given several times
    #[arg(long, required = true, value_delimiter = ',')]
    pub role: Vec<String>,
    /// How many machines may join with it
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub uses: u32,
    /// How long it can be used: 30m, 1h, 7d
    #[arg(long, default_value = "1h", value_name = "TIME")]
    pub ttl: String,
    /// Glob that the names of nodes must match
    #[arg(long, default_value = "*", value_name = "GLOB")]
    pub name: String,
    /// Network from which it can be used, like 10.1.0.0/16; may be given several times [default: any]
    #[arg(long, value_name = "NET")]
    pub from: Vec<Network>,
    /// Address of the coordinator that goes into the token, HOST:PORT, if it is not the one that the
    /// coordinator announces
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Vec<String>,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct RevokeToken {
    /// The token's id, as `weir token list` shows it
    pub id: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Subcommand)]
pub enum NodeCommand {
    /// List nodes that have, or had, a certificate
    List(Status),
    /// Cut a node off at once: its certificate is refused everywhere and its connections end
    ///
    /// Its targets are down from then on. It can join again with a new token.
    Remove(RemoveNode),
}

#[derive(Args)]
pub struct RemoveNode {
    /// The node's name
    pub name: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Subcommand)]
pub enum CaCommand {
    /// List the cluster's authorities, and the nodes that a rotation waits for
    List(Status),
    /// Replace the cluster's authority; nodes get new certificates while they run
    ///
    /// It waits for nodes that are switched off: start them, remove them, or pass --skip-missing.
    Rotate(RotateCa),
}

#[derive(Args)]
pub struct RotateCa {
    /// Take the next step without the nodes that have not taken this one: after the last step they have to
    /// join again
    #[arg(long)]
    pub skip_missing: bool,
    #[command(flatten)]
    pub cluster: Status,
}
