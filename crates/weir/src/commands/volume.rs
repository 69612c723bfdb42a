//! `weir volume`: asks the metadata leader as a client does, without a mount.
use crate::commands::limits::{Limits, limits};
use crate::commands::relation::require_allowed;
use crate::commands::{backup, clone, eviction, restore, snapshots};
use clap::{Args, Subcommand, ValueHint};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::homes::refuse_own_cluster;
use weir_admin::namespace_client::{Cluster, all, connect, explain, named, own_cred};
use weir_admin::times::parse_interval;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_client::{Client, NewVolume, VolumeEdit};
use weir_home::backup::snapshot_date;
use weir_proto::backup::Backup;
use weir_proto::map::Scheme;
use weir_proto::meta::Cred;
use weir_proto::retention::parse_snapshot_retention;
use weir_proto::snapshot::Snapshot;
use weir_proto::volume::{Policy, Quota, Retention, SnapshotRetention, Volume};
use weir_proto::{Error, ErrorKind, NameRule};

mod show;

#[derive(Subcommand)]
pub enum VolumeCommand {
    /// Create a volume: an empty directory with its own limits and policy
    Create(Create),
    /// Show all volumes
    List(Cluster),
    /// Show one volume
    Show(One),
    /// Rename a volume; its directory keeps its path
    Rename(Rename),
    /// Delete a volume
    Delete(Delete),
    /// Set quotas of the volume, or of users and groups in it (options not given keep their value); without
    /// limits: show usage and limits of its users and groups
    Quota(SetQuota),
    /// Set protection scheme, snapshot schedule, retention and trash (options not given keep their value)
    Policy(SetPolicy),
    /// Set owner and administrators of a volume
    Admin(Admin),
    /// Show or set eviction thresholds
    Eviction(crate::commands::eviction::Eviction),
    /// Take or delete a snapshot (visible under .snapshots/NAME)
    Snapshot(snapshots::Take),
    /// Show a volume's snapshots
    Snapshots(snapshots::List),
    /// Create a volume from a snapshot; data is shared until one side changes it
    Clone(clone::Clone),
    /// Restore a file or a directory from a snapshot, a backup or the trash
    Restore(restore::Restore),
    /// Back up the volume to a dated directory; unchanged files are hard-linked
    Backup(backup::Make),
    /// Show a volume's backups
    Backups(backup::List),
    /// Print changes of the volume, one JSON object per line
    Changes(crate::commands::relation::Follow),
}

#[derive(Args)]
pub struct One {
    /// The volume
    pub name: String,
    #[command(flatten)]
    pub at: Cluster,
}

impl SetQuota {
    /// It is about users and groups: it sets limits of one, or shows all.
    pub fn is_of_owners(&self) -> bool {
        let names_one = self.user.or(self.group).is_some() || self.default_user || self.default_group;
        names_one || self.all_volumes || self.limits.is_none()
    }
}

#[derive(Args)]
pub struct Policies {
    /// How new files are protected: ec:K+M, replica:N or single; existing files stay as they are
    #[arg(long)]
    pub scheme: Option<Scheme>,
    /// The pool of targets that new files go to
    #[arg(long)]
    pub pool: Option<String>,
}

#[derive(Args)]
pub struct Create {
    /// Its name: letters, digits, dots, dashes and underscores
    pub name: String,
    /// Path of its directory, from the root of the file system [default: /NAME]
    #[arg(value_hint = ValueHint::Other)]
    pub path: Option<PathBuf>,
    /// The user who owns it, by name or number
    #[arg(long, value_name = "USER", default_value = "0", value_parser = parse_user)]
    pub owner: u32,
    /// The group of its directory, by name or number [default: the owner's number]
    #[arg(long, value_parser = parse_group)]
    pub group: Option<u32>,
    /// Mode of its directory, octal
    #[arg(long, default_value = "755", value_parser = parse_mode)]
    pub mode: u32,
    /// A user who administers it, too, by name or number; may be given several times
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub admin: Vec<u32>,
    #[command(flatten)]
    pub limits: Limits,
    #[command(flatten)]
    pub policies: Policies,
    /// Create it from an existing home, like file:///data: names appear at once, data is fetched when it is
    /// read, and changes are copied home (see `weir relation add`)
    #[arg(long, value_name = "URL")]
    pub from: Option<String>,
    /// Allow eviction of data that is at home
    #[arg(long, requires = "from")]
    pub evict: bool,
    #[command(flatten)]
    pub ids: crate::commands::relation::Ids,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct Rename {
    /// The volume
    pub name: String,
    /// Its new name
    pub new_name: String,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct Delete {
    /// The volume
    pub name: String,
    /// Delete a volume that is not empty, with its scheduled snapshots; other snapshots must be deleted first
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct SetQuota {
    /// The volume
    #[arg(required_unless_present = "all_volumes")]
    pub name: Option<String>,
    /// Limits for all volumes together, of a user or a group
    #[arg(long, conflicts_with = "name")]
    pub all_volumes: bool,
    /// Set limits of this user, by name or number, instead of the volume's
    #[arg(long, value_name = "USER", group = "owner", value_parser = parse_user)]
    pub user: Option<u32>,
    /// Set limits of this group, by name or number
    #[arg(long, value_name = "GROUP", group = "owner", value_parser = parse_group)]
    pub group: Option<u32>,
    /// Set the limits of each user without limits of its own
    #[arg(long, group = "owner")]
    pub default_user: bool,
    /// Set the limits of each group without limits of its own
    #[arg(long, group = "owner")]
    pub default_group: bool,
    /// Remove the user's or group's own limits: those of --default-user or --default-group apply again
    #[arg(long, requires = "owner", conflicts_with_all = ["bytes", "soft_bytes", "inodes", "soft_inodes", "grace"])]
    pub reset: bool,
    #[command(flatten)]
    pub limits: Limits,
    #[command(flatten)]
    pub at: Cluster,
}

/// `weir quota`.
#[derive(Args)]
pub struct ShowQuota {
    /// Another user, by name or number; for administrators [default: you]
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub user: Option<u32>,
    /// A group, by name or number
    #[arg(long, value_name = "GROUP", conflicts_with = "user", value_parser = parse_group)]
    pub group: Option<u32>,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct SetPolicy {
    /// The volume
    pub name: String,
    #[command(flatten)]
    pub policies: Policies,
    /// Use the cluster's scheme and pool again
    #[arg(long, conflicts_with_all = ["scheme", "pool"])]
    pub default: bool,
    /// Interval of scheduled snapshots, like 1h or 1d; one is taken if anything has changed. `none` ends the
    /// schedule and keeps its snapshots
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    pub snapshots: Option<u32>,
    /// Retention of scheduled snapshots: the newest of each of this number of hours, days, weeks and months;
    /// 24h,7d,4w if never set. Snapshots taken by command stay until they are deleted
    #[arg(long, value_name = "COUNTS", value_parser = parse_backup_retention)]
    pub keep: Option<SnapshotRetention>,
    /// Keep removed files under .trash of the volume's directory for this time, like 7d. The trash counts
    /// towards the quota and is purged early if the volume fills up. `none` disables the trash and empties it
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    pub trash: Option<u32>,
    /// Fewest current members of a placement group with which the volume takes writes: with ec:4+2 from 4 to
    /// 6. With fewer, writes wait and then fail; reads continue. `none`: as many as there are data cells
    #[arg(long, value_name = "MEMBERS", value_parser = parse_floor)]
    pub write_floor: Option<u8>,
    #[command(flatten)]
    pub at: Cluster,
}

impl SetPolicy {
    fn require_one(&self) -> Outcome<()> {
        let how = self.default || self.policies.scheme.is_some() || self.policies.pool.is_some();
        let keeps = self.snapshots.is_some() || self.keep.is_some() || self.trash.is_some();
        if how || keeps || self.write_floor.is_some() {
            return Ok(());
        }
        Err(Failure::new(
            Error::invalid("no policy is given, so nothing is changed"),
            "give --scheme, --pool, --default, --snapshots, --keep, --trash or --write-floor; `weir volume show` shows the policy",
        ))
    }
}

#[derive(Args)]
pub struct Admin {
    /// The volume
    pub name: String,
    /// New owner, by name or number
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub owner: Option<u32>,
    /// Add this user to the administrators
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub add: Vec<u32>,
    /// Remove this user from the administrators
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub remove: Vec<u32>,
    #[command(flatten)]
    pub at: Cluster,
}

pub fn run(command: &VolumeCommand) -> Outcome<()> {
    let at = match command {
        VolumeCommand::Changes(args) => &args.at,
        VolumeCommand::List(at) => at,
        VolumeCommand::Create(args) => &args.at,
        VolumeCommand::Show(args) => &args.at,
        VolumeCommand::Rename(args) => &args.at,
        VolumeCommand::Delete(args) => &args.at,
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
            crate::commands::relation::follow(client, args).await?;
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

// ---- what people write

/// `none` is 0.
fn parse_floor(text: &str) -> Result<u8, String> {
    match text {
        "none" => Ok(0),
        _ => text.parse().ok().filter(|n| *n > 0).ok_or_else(|| {
            format!("{text:?} is not a write floor: expected a number of members, like 5, or none")
        }),
    }
}
fn parse_user(text: &str) -> Result<u32, String> {
    parse_id(text, "passwd", "user")
}
fn parse_group(text: &str) -> Result<u32, String> {
    parse_id(text, "group", "group")
}
/// A number, or a name that this machine knows, from any directory service.
fn parse_id(text: &str, database: &str, what: &str) -> Result<u32, String> {
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return text.parse().map_err(|_| format!("{text} is not a {what}: numbers go up to {}", u32::MAX));
    }
    let unknown = || format!("this machine knows no {what} {text:?}: write a name or a number");
    let found = Command::new("getent").args(["--", database, text]).output().map_err(|_| unknown())?;
    // NAME:PASSWORD:NUMBER:…
    let line = String::from_utf8_lossy(&found.stdout);
    line.split(':').nth(2).and_then(|number| number.trim().parse().ok()).ok_or_else(unknown)
}
fn parse_backup_retention(text: &str) -> Result<SnapshotRetention, String> {
    parse_snapshot_retention(text).map_err(|e| e.to_string())
}
fn parse_mode(text: &str) -> Result<u32, String> {
    let bad = || format!("{text:?} is not a mode: expected octal digits like 2770");
    u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777).ok_or_else(bad)
}

// ---- what they read

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_modes_are_read() {
        assert_eq!(parse_mode("2770"), Ok(0o2770));
        assert_eq!((parse_user("root"), parse_group("root"), parse_user("1000")), (Ok(0), Ok(0), Ok(1000)));
        for wrong in ["nobody-is-called-so", "", "-1", "99999999999"] {
            assert!(parse_user(wrong).unwrap_err().contains("user"), "{wrong:?}");
        }
        assert!(parse_mode("99").is_err() && parse_mode("17777").is_err());
    }
}
