//! Messages about backups of volumes (methods 196–199): where they go, how often, who makes one now, how the
//! last one ended.
//!
//! A backup is made by whoever has taken it, a mover or a command, until its session ends: nobody else gets
//! it before.
use crate::meta::{Cred, Op, Time};
use crate::{Error, Result, SessionId, VolumeId, message, wire_union};

/// Places that backups of one volume go to.
pub const BACKUPS_MAX: usize = 8;
/// Shortest time between two scheduled backups, in seconds.
pub const BACKUP_EVERY_S_MIN: u32 = 60;

message!(
    /// What is kept: the newest of each of so many days, weeks and months that have one.
    BackupRetention { days: u32, weeks: u32, months: u32 }
);
impl Copy for BackupRetention {}
impl Default for BackupRetention {
    fn default() -> BackupRetention {
        BackupRetention { days: 7, weeks: 4, months: 6 }
    }
}
impl BackupRetention {
    /// To keep nothing is to make no backups.
    pub fn check(&self) -> Result<()> {
        match u64::from(self.days) + u64::from(self.weeks) + u64::from(self.months) {
            0 => Err(Error::invalid("nothing would be kept: name days, weeks or months, like 7d,4w,6m")),
            _ => Ok(()),
        }
    }
}

message!(
    /// A place that backups of a volume go to.
    Backup {
        volume: VolumeId,
        volume_name: String,
        /// As homes are named: `file:///path`, `weir://…`.
        url: String,
        /// The user who named it; the superuser, once that one has.
        by: u32,
        /// Seconds from the beginning of one to that of the next; 0: only when it is asked for.
        every_s: u32,
        keep: BackupRetention,
        /// Since when it is scheduled so.
        since: Time,
        /// Somebody makes one.
        running: Option<BackupRun>,
        last: Option<BackupEnd>,
        /// When the last one began that is there.
        good: Option<Time>,
        /// When the next one is to begin.
        due: Option<Time>,
        /// It should have been made long since.
        late: bool,
    }
);
message!(BackupRun { session: SessionId, began: Time });
message!(BackupEnd { began: Time, ended: Time, outcome: BackupOutcome });
wire_union!(
    BackupOutcome {
        /// Under this date all of the volume is there, but for `missing` things that could not be read or
        /// kept.
        Made = 1 { date: String, missing: u64, files: u64, linked: u64, bytes: u64 },
        /// None was made.
        Failed = 2 { why: String },
    }
);

message!(
    /// Makes a place known, or changes what is named. The volume's owner and administrators may, as for all
    /// of these.
    BackupSet = 196 by [Console, User] -> Backup {
        op: Op,
        cred: Cred,
        volume: VolumeId,
        url: String,
        every_s: Option<u32>,
        keep: Option<BackupRetention>,
        /// It is forgotten here; what is there stays there.
        forget: bool,
    }
);
message!(BackupList = 197 by [Mount, Mover, Console, Operator, Auditor, User] -> Backups { session: SessionId, volume: Option<VolumeId> });
message!(Backups { backups: Vec<Backup> });
message!(
    /// Takes the making of one: of a place, or (of volume 0, for movers) of any that is due.
    BackupTake = 198 by [Mover, Console] -> BackupTaken { op: Op, cred: Cred, volume: VolumeId, url: String }
);
message!(BackupTaken { backup: Option<Backup> });
message!(
    /// How it ended. `Stale`: it is another's, or nobody's, by now.
    BackupDone = 199 by [Mover, Console] -> Backup { op: Op, volume: VolumeId, url: String, outcome: BackupOutcome }
);
