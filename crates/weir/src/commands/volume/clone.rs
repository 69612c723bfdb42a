//! `weir volume clone`: a writable volume made from a snapshot.
use super::limits::{Limits, limits};
use clap::{Args, ValueHint};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::namespace_client::{Cluster, explain, named, own_cred};
use weir_client::{Client, NewVolume};
use weir_proto::volume::{Quota, Volume};
use weir_proto::{Error, ErrorKind};

#[derive(Args)]
pub struct Clone {
    /// The volume, or VOLUME@SNAPSHOT. Without @SNAPSHOT a snapshot is taken, and deleted when the clone is
    /// complete
    pub source: String,
    /// Path of the clone's directory, from the root of the file system
    #[arg(value_hint = ValueHint::Other)]
    pub path: PathBuf,
    /// The clone's name [default: the last name of PATH]
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub limits: Limits,
    #[command(flatten)]
    pub at: Cluster,
}

pub async fn clone(client: &Client, args: &Clone) -> Outcome<Volume> {
    let cred = own_cred();
    let (source, snapshot) = match args.source.split_once('@') {
        Some((source, snapshot)) => (source, Some(snapshot.to_owned())),
        None => (&*args.source, None),
    };
    let source = named(client, source).await?;
    let last = || args.path.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = args.name.clone().or_else(last);
    let name = name.ok_or_else(|| Error::invalid(format!("{:?} is not a path like /DIR/NAME", args.path)))?;
    let new = NewVolume {
        name: name.clone(),
        path: bytes::Bytes::copy_from_slice(args.path.as_os_str().as_bytes()),
        owner: source.owner,
        group: source.owner,
        mode: 0o700, // it gets that of the source's directory
        admins: source.admins.clone(),
        quota: limits(&args.limits, Quota::NONE),
        policy: source.policy.clone(),
    };
    let own = snapshot.is_none();
    let snapshot = match snapshot {
        Some(snapshot) => snapshot,
        None => client.take_snapshot(&cred, source.id, &format!("clone-{name}")).await.map_err(explain)?.name,
    };
    let made = client.clone_volume(&cred, source.id, &snapshot, own, &new).await;
    if made.is_err() && own {
        // It is of no use alone.
        if let Err(left) = client.delete_snapshot(&cred, source.id, &snapshot).await {
            tracing::warn!("the snapshot {snapshot} is left over: {left}");
        }
    }
    made.map_err(|e| match e.kind {
        ErrorKind::NotFound => Failure::new(e, "`weir volume snapshots VOLUME` shows its snapshots"),
        _ => explain(e),
    })
}
