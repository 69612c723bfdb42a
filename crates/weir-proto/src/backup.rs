//! Messages about backups of volumes (methods 196–199): their places, their schedule, the backup in progress,
//! and the last result.
//!
//! A backup belongs to the mover or command that has taken it, until that session ends: no other gets it
//! earlier.
use crate::meta::{Cred, Op, Time};
use crate::{Error, Result, SessionId, VolumeId, message, wire_union};

/// Backup places of one volume.
pub const BACKUPS_MAX: usize = 8;
/// Shortest time between two scheduled backups, in seconds.
pub const BACKUP_EVERY_S_MIN: u32 = 60;

message!(
    /// Retention: the newest backup of each of this number of days, weeks and months that have one.
    BackupRetention { days: u32, weeks: u32, months: u32 }
);
impl Copy for BackupRetention {}
impl Default for BackupRetention {
    fn default() -> BackupRetention {
        BackupRetention { days: 7, weeks: 4, months: 6 }
    }
}
impl BackupRetention {
    /// Refuses a retention that keeps nothing.
    pub fn check(&self) -> Result<()> {
        match u64::from(self.days) + u64::from(self.weeks) + u64::from(self.months) {
            0 => Err(Error::invalid("nothing would be kept: name days, weeks or months, like 7d,4w,6m")),
            _ => Ok(()),
        }
    }
}

message!(
    /// A backup place of a volume.
    Backup {
        volume: VolumeId,
        volume_name: String,
        /// In the form of a home's URL: `file:///path`, `weir://…`.
        url: String,
        /// The user who configured it; the superuser, once root has changed it.
        by: u32,
        /// Seconds between the beginnings of two backups; 0: only on request.
        every_s: u32,
        keep: BackupRetention,
        /// Since when this schedule holds.
        since: Time,
        /// A backup in progress.
        running: Option<BackupRun>,
        last: Option<BackupEnd>,
        /// When the last existing backup began.
        good: Option<Time>,
        /// When the next one is due.
        due: Option<Time>,
        /// It is overdue by far.
        late: bool,
    }
);
message!(BackupRun { session: SessionId, began: Time });
message!(BackupEnd { began: Time, ended: Time, outcome: BackupOutcome });
wire_union!(
    BackupOutcome {
        /// The backup of this date has everything of the volume except `missing` entries that could not be
        /// read or stored.
        Made = 1 { date: String, missing: u64, files: u64, linked: u64, bytes: u64 },
        /// No backup was made.
        Failed = 2 { why: String },
    }
);

message!(
    /// Adds a place, or changes the given fields. Allowed to the volume's owner and administrators, as all of
    /// these.
    BackupSet = 196 by [Console, User] -> Backup {
        op: Op,
        cred: Cred,
        volume: VolumeId,
        url: String,
        every_s: Option<u32>,
        keep: Option<BackupRetention>,
        /// Removes the place here; the backups there stay.
        forget: bool,
    }
);
message!(BackupList = 197 by [Mount, Mover, Console, Operator, Auditor, User] -> Backups { session: SessionId, volume: Option<VolumeId> });
message!(Backups { backups: Vec<Backup> });
message!(
    /// Takes a backup to make: of a place, or (volume 0, for movers) of any place that is due.
    BackupTake = 198 by [Mover, Console] -> BackupTaken { op: Op, cred: Cred, volume: VolumeId, url: String }
);
message!(BackupTaken { backup: Option<Backup> });
message!(
    /// The result. `Stale`: the backup belongs to another mover, or none, by now.
    BackupDone = 199 by [Mover, Console] -> Backup { op: Op, volume: VolumeId, url: String, outcome: BackupOutcome }
);
