//! The options of `weir volume` and `weir quota`.
use super::limits::Limits;
use super::{backup, clone, eviction, restore, snapshots};
use crate::commands::relation::args::{Follow, Ids};
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;
use std::process::Command;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::namespace_client::Cluster;
use weir_admin::times::parse_interval;
use weir_proto::Error;
use weir_proto::map::Scheme;
use weir_proto::retention::parse_snapshot_retention;
use weir_proto::volume::SnapshotRetention;

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
    Eviction(eviction::Eviction),
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
    Changes(Follow),
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
    pub ids: Ids,
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
    pub fn require_one(&self) -> Outcome<()> {
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
