//! `weir volume`: asks the metadata leader as a client does, without a mount.
pub mod args;
mod backup;
mod clone;
mod eviction;
mod limits;
mod quota;
pub mod restore;
mod show;
mod snapshots;

pub use quota::show as show_quota;

use crate::commands::relation::{follow, require_allowed};
use args::{Create, Policies, SetPolicy, VolumeCommand};
use limits::limits;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::homes::refuse_own_cluster;
use weir_admin::namespace_client::{all, connect, explain, named, own_cred};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_client::{Client, NewVolume, VolumeEdit};
use weir_home::backup::snapshot_date;
use weir_proto::backup::Backup;
use weir_proto::meta::Cred;
use weir_proto::snapshot::Snapshot;
use weir_proto::volume::{Policy, Quota, Retention, Volume};
use weir_proto::{Error, ErrorKind, NameRule};

pub fn run(command: &VolumeCommand) -> Outcome<()> {
    let at = match command {
        VolumeCommand::Changes(args) => &args.at,
        VolumeCommand::List(at) => at,
        VolumeCommand::Create(args) => &args.at,
        VolumeCommand::Show(args) => &args.at,
        VolumeCommand::Rename(args) => &args.at,
        VolumeCommand::Delete(args) => &args.at,
        VolumeCommand::Quota(args) if args.is_of_owners() => return quota::of_owners(args),
        VolumeCommand::Quota(args) => &args.at,
        VolumeCommand::Policy(args) => &args.at,
        VolumeCommand::Admin(args) => &args.at,
        VolumeCommand::Eviction(args) => &args.at,
        VolumeCommand::Snapshot(args) => &args.at,
        VolumeCommand::Snapshots(args) => &args.at,
        VolumeCommand::Clone(args) => &args.at,
        VolumeCommand::Restore(args) => return restore::restore(args),
        VolumeCommand::Backup(args) => return backup::make(args),
        VolumeCommand::Backups(args) => return backup::list(args),
    };
    let coordinators = coordinators(&at.cluster)?;
    let reported = observe::block_on(async {
        let client = connect(coordinators, &at.namespace).await?;
        let reported = carry_out(&client, command).await;
        client.shutdown().await?;
        reported
    })?;
    reported.print(at.cluster.json);
    Ok(())
}

/// The output of a command.
enum Shown {
    Nothing,
    All(Vec<Volume>),
    /// With its backups and its write floor.
    One(Volume, Vec<Backup>, u8),
    Done(&'static str, Volume),
    Levels(eviction::Named),
    Snapshot(&'static str, Snapshot),
    Snapshots(Vec<Snapshot>),
}

async fn carry_out(client: &Client, command: &VolumeCommand) -> Outcome<Shown> {
    let cred = own_cred();
    Ok(match command {
        VolumeCommand::List(_) => Shown::All(all(client).await?),
        VolumeCommand::Show(args) => {
            let volume = named(client, &args.name).await?;
            let backups = client.backups(Some(volume.id)).await?;
            let floors = client.write_floors().await?;
            let floor = floors.iter().find(|f| f.volume == volume.id).map_or(0, |f| f.members);
            Shown::One(volume, backups, floor)
        }
        VolumeCommand::Eviction(args) => Shown::Levels(eviction::ask(client, args).await?),
        VolumeCommand::Create(args) => Shown::Done("created", create(client, &cred, args).await?),
        VolumeCommand::Delete(args) => {
            let volume = named(client, &args.name).await?;
            match client.delete_volume(&cred, volume.id, args.force).await {
                Ok(gone) => Shown::Done("deleted", gone),
                Err(e) => return Err(explain_delete(client, &volume, e).await),
            }
        }
        VolumeCommand::Rename(args) => {
            let edit = VolumeEdit { name: Some(args.new_name.clone()), ..VolumeEdit::default() };
            Shown::Done("renamed", change(client, &cred, &args.name, |_| edit).await?)
        }
        VolumeCommand::Quota(args) => {
            let name = args.name.as_deref().unwrap_or_default();
            let edit = |volume: &Volume| VolumeEdit {
                quota: Some(limits(&args.limits, volume.quota)),
                ..VolumeEdit::default()
            };
            let changed = change(client, &cred, name, edit).await?;
            warn_of_low_limit(&changed);
            Shown::Done("changed", changed)
        }
        VolumeCommand::Policy(args) => Shown::Done("changed", set_policy(client, &cred, args).await?),
        VolumeCommand::Snapshot(args) => {
            let what = if args.delete { "deleted" } else { "taken" };
            Shown::Snapshot(what, snapshots::take(client, args).await?)
        }
        VolumeCommand::Clone(args) => Shown::Done("created", clone::clone(client, args).await?),
        VolumeCommand::Snapshots(args) => Shown::Snapshots(snapshots::list(client, args).await?),
        // These commands were handled before.
        VolumeCommand::Restore(_) | VolumeCommand::Backup(_) | VolumeCommand::Backups(_) => Shown::Nothing,
        VolumeCommand::Changes(args) => {
            follow(client, args).await?;
            Shown::Nothing
        }
        VolumeCommand::Admin(args) => {
            let edit = |volume: &Volume| {
                let mut admins = volume.admins.clone();
                admins.extend(&args.add);
                admins.retain(|user| !args.remove.contains(user));
                admins.sort_unstable();
                admins.dedup();
                VolumeEdit { owner: args.owner, admins: Some(admins), ..VolumeEdit::default() }
            };
            Shown::Done("changed", change(client, &cred, &args.name, edit).await?)
        }
    })
}

async fn set_policy(client: &Client, cred: &Cred, args: &SetPolicy) -> Outcome<Volume> {
    args.require_one()?;
    let edit = |volume: &Volume| VolumeEdit {
        policy: Some(if args.default { NO_POLICY } else { policy(&args.policies, &volume.policy) }),
        retention: Some(retention(args, volume.retention)),
        ..VolumeEdit::default()
    };
    let changed = change(client, cred, &args.name, edit).await?;
    match args.write_floor {
        Some(floor) => client.set_write_floor(cred, &changed, floor).await.map_err(explain),
        None => Ok(changed),
    }
}

async fn create(client: &Client, cred: &Cred, args: &Create) -> Outcome<Volume> {
    let home = match &args.from {
        Some(url) => {
            let home = args.ids.relation(url.clone(), args.evict, true)?;
            require_allowed(url, &args.at.cluster).await?;
            refuse_own_cluster(url, &coordinators(&args.at.cluster)?).await?;
            Some(home)
        }
        None => None,
    };
    let made = client.create_volume(cred, &new_volume(args)).await.map_err(explain)?;
    if let Some(home) = home
        && let Err(e) = client.add_relation(cred, made.id, &home).await
    {
        // An empty one is of no use.
        if let Err(left) = client.delete_volume(cred, made.id, false).await {
            tracing::warn!("the empty volume {:?} is left over: {left}", made.name);
        }
        return Err(explain(e));
    }
    Ok(made)
}

const NO_POLICY: Policy = Policy { scheme: None, pool: None };

async fn change(
    client: &Client,
    cred: &Cred,
    name: &str,
    edit: impl FnOnce(&Volume) -> VolumeEdit,
) -> Outcome<Volume> {
    let volume = named(client, name).await?;
    client.change_volume(cred, volume.id, &edit(&volume)).await.map_err(explain)
}

async fn explain_delete(client: &Client, volume: &Volume, e: Error) -> Failure {
    let name = &volume.name;
    match e.kind {
        ErrorKind::Name(NameRule::NotEmpty) if !e.context.contains("lies in") => {
            Failure::new(e, "--force deletes its contents, too")
        }
        ErrorKind::Name(NameRule::Busy) => {
            let snapshots = client.snapshots(volume.id).await.unwrap_or_default();
            let taken = snapshots.iter().find(|s| !s.scheduled);
            let backups = client.backups(Some(volume.id)).await.unwrap_or_default();
            let of_backup = |s: &Snapshot| backups.iter().find(|b| snapshot_date(&s.name, &b.url).is_some());
            let hint = match taken.map(|s| (s, of_backup(s))) {
                Some((_, Some(backup))) => {
                    format!(
                        "`weir volume backup {name} --to {} --forget` deletes the snapshots of its backups",
                        backup.url
                    )
                }
                Some((one, None)) => {
                    format!("`weir volume snapshot {name} {} --delete` deletes one of them", one.name)
                }
                None => match client.relations(Some(volume.id)).await.unwrap_or_default().first() {
                    Some(relation) => format!("`weir relation remove {}` ends its relation", relation.id),
                    None => return explain(e),
                },
            };
            Failure::new(e, hint)
        }
        _ => explain(e),
    }
}

fn new_volume(args: &Create) -> NewVolume {
    let path = args.path.clone().unwrap_or_else(|| PathBuf::from("/").join(&args.name));
    NewVolume {
        name: args.name.clone(),
        path: bytes::Bytes::copy_from_slice(path.as_os_str().as_bytes()),
        owner: args.owner,
        group: args.group.unwrap_or(args.owner),
        mode: args.mode,
        admins: args.admin.clone(),
        quota: limits(&args.limits, Quota::NONE),
        policy: policy(&args.policies, &NO_POLICY),
    }
}
/// A limit may be set below what a volume holds, for example to stop its growth.
fn warn_of_low_limit(volume: &Volume) {
    let Volume { name, quota, usage, .. } = volume;
    let inodes = usage.files + usage.directories;
    let over = |used: u64, limit: Option<u64>| limit.is_some_and(|limit| used > limit);
    if over(usage.bytes, quota.bytes_hard) || over(inodes, quota.inodes_hard) {
        let held = table::bytes(usage.bytes);
        eprintln!(
            "warning: volume {name} holds {held} and {inodes} files and directories: new data is refused"
        );
    }
}

fn policy(args: &Policies, before: &Policy) -> Policy {
    Policy { scheme: args.scheme.or(before.scheme), pool: args.pool.clone().or_else(|| before.pool.clone()) }
}
fn retention(args: &SetPolicy, before: Retention) -> Retention {
    Retention {
        trash_s: args.trash.unwrap_or(before.trash_s),
        snapshots_every_s: args.snapshots.unwrap_or(before.snapshots_every_s),
        keep: args.keep.unwrap_or(before.keep),
    }
}
