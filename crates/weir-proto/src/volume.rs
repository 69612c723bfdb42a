//! Messages about volumes, to a namespace's metadata leader (methods 146, 155–159, 190–193, 423 and 424).
//!
//! A volume is a named subtree with an owner, limits and a policy of its own. Permissions: the superuser
//! makes and deletes volumes, sets their owner and hard limits; the owner and the administrators do the rest.
use crate::map::Scheme;
use crate::message;
use crate::meta::{Cred, FileKind, Op, Time, Usage};
use crate::{Error, InodeId, Result, SessionId, VolumeId};
use bytes::Bytes;

/// Longest name of a volume, in bytes.
pub const VOLUME_NAME_MAX: usize = 64;
/// Longest stored path of a volume's root directory, in bytes.
pub const VOLUME_PATH_MAX: usize = 4096;
/// Administrators of one volume.
pub const ADMINS_MAX: usize = 64;
/// Volumes in one `VolumePage`.
pub const VOLUMES_MAX: usize = 1024;
/// Default seconds between exceeding a soft limit and its becoming a hard one.
pub const GRACE_S: u32 = 7 * 24 * 3600;

/// A name that needs no quotes in a shell, and is not taken for an option or a path.
pub fn check_volume_name(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts && name.len() <= VOLUME_NAME_MAX && name.chars().all(fits) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{name:?} cannot be the name of a volume or a snapshot: it has 1 to {VOLUME_NAME_MAX} letters, digits, dots, dashes \
         or underscores and begins with a letter or a digit"
    )))
}

message!(
    /// Limits; absent: none, and 0 allows nothing. Bytes are those of files without redundancy, inodes are
    /// files and directories.
    Quota {
        bytes_hard: Option<u64>,
        bytes_soft: Option<u64>,
        inodes_hard: Option<u64>,
        inodes_soft: Option<u64>,
        grace_s: u32,
    }
);
impl Copy for Quota {}
impl Quota {
    pub const NONE: Quota =
        Quota { bytes_hard: None, bytes_soft: None, inodes_hard: None, inodes_soft: None, grace_s: GRACE_S };
}
message!(
    /// Policy for new files of the volume; absent: the cluster's settings.
    Policy { scheme: Option<Scheme>, pool: Option<String> }
);
message!(
    /// Retention of scheduled snapshots: the newest of each of this number of hours, days, weeks and months
    /// that have one.
    SnapshotRetention { hours: u32, days: u32, weeks: u32, months: u32 }
);
impl Copy for SnapshotRetention {}
impl Default for SnapshotRetention {
    fn default() -> SnapshotRetention {
        SnapshotRetention { hours: 24, days: 7, weeks: 4, months: 0 }
    }
}
impl SnapshotRetention {
    /// Refuses a retention that keeps none.
    pub fn check(&self) -> Result<()> {
        let SnapshotRetention { hours, days, weeks, months } = *self;
        match [hours, days, weeks, months].iter().any(|n| *n > 0) {
            true => Ok(()),
            false => Err(Error::invalid(
                "nothing would be kept: name hours, days, weeks or months, like 24h,7d,4w",
            )),
        }
    }
}

/// Shortest time between two snapshots by schedule, in seconds.
pub const SNAPSHOTS_EVERY_S_MIN: u32 = 60;
/// Scheduled snapshots that a volume may have: this leaves room for others.
pub const SCHEDULED_MAX: u64 = 200;
/// The trash directory, in a volume's root directory.
pub const TRASH: &[u8] = b".trash";

message!(
    /// Automatic retention of a volume's past.
    Retention {
        /// Removed files stay in the trash for this number of seconds; 0: there is no trash.
        trash_s: u32,
        /// A snapshot is taken at this interval in seconds; 0: none is.
        snapshots_every_s: u32,
        keep: SnapshotRetention,
    }
);
impl Copy for Retention {}

impl Retention {
    pub const NOTHING: Retention = Retention {
        trash_s: 0,
        snapshots_every_s: 0,
        keep: SnapshotRetention { hours: 24, days: 7, weeks: 4, months: 0 },
    };

    pub fn check(&self) -> Result<()> {
        self.keep.check()?;
        let every_s = self.snapshots_every_s;
        if every_s == 0 {
            return Ok(());
        }
        if every_s < SNAPSHOTS_EVERY_S_MIN {
            let why = format!("snapshots every {every_s} s: at most one every {SNAPSHOTS_EVERY_S_MIN} s");
            return Err(Error::invalid(why));
        }
        let count = crate::retention::Rule::from(&self.keep).count_max(every_s);
        if count > SCHEDULED_MAX {
            return Err(Error::invalid(format!(
                "that would be up to {count} snapshots, and {SCHEDULED_MAX} are the most: take them less often, or keep fewer"
            )));
        }
        Ok(())
    }
}

message!(
    /// Everything about a volume.
    Volume {
        id: VolumeId,
        name: String,
        /// Its root directory.
        root: InodeId,
        /// The path at which it was made; the directory may have been renamed since.
        path: Bytes,
        owner: u32,
        /// Users with the owner's rights.
        admins: Vec<u32>,
        quota: Quota,
        /// Since when its soft limit is exceeded.
        bytes_over_since: Option<Time>,
        inodes_over_since: Option<Time>,
        policy: Policy,
        retention: Retention,
        created: Time,
        /// It is being deleted.
        deleting: bool,
        /// Its own usage, without volumes inside it.
        usage: Usage,
        /// The part of it that is in the trash.
        in_trash: Usage,
    }
);

message!(
    /// Makes a volume and its root directory, empty.
    VolumeCreate = 155 by [Console, User] -> Volume {
        op: Op,
        cred: Cred,
        name: String,
        /// The directory in which its root is made.
        parent: InodeId,
        entry: Bytes,
        /// Its path, for display.
        path: Bytes,
        owner: u32,
        group: u32,
        mode: u32,
        admins: Vec<u32>,
        quota: Quota,
        policy: Policy,
    }
);
message!(
    /// Volumes after `after` (0: from the start) in the order of their creation, at most `VOLUMES_MAX`.
    VolumeList = 156 by [Mount, Mover, Console, Operator, Auditor, User] -> VolumePage { session: SessionId, after: VolumeId, limit: u32 }
);
message!(VolumePage { volumes: Vec<Volume>, end: bool });
message!(VolumeGet = 157 by [Mount, Mover, Console, Operator, Auditor, User] -> Volume { session: SessionId, name: String });
message!(
    /// Changes the given fields; the others keep their value.
    VolumeChange = 158 by [Console, User] -> Volume {
        op: Op,
        cred: Cred,
        volume: VolumeId,
        name: Option<String>,
        owner: Option<u32>,
        admins: Option<Vec<u32>>,
        quota: Option<Quota>,
        policy: Option<Policy>,
        retention: Option<Retention>,
    }
);
message!(
    /// Deletes a volume. `force`: even if it is not empty.
    VolumeDelete = 159 by [Console, User] -> Volume { op: Op, cred: Cred, volume: VolumeId, force: bool }
);
message!(
    /// Makes a volume whose names and data are those of a snapshot of `source`. Its root directory exists at
    /// once, everything else on access or soon afterwards. For the superuser.
    VolumeClone = 146 by [Console] -> Volume {
        op: Op,
        source: VolumeId,
        /// The snapshot's name.
        snapshot: String,
        /// The snapshot is removed when the clone is complete.
        own: bool,
        new: VolumeCreate,
    }
);
message!(
    /// The volume that a directory or a file is in.
    VolumeAt = 190 by [Mount, Mover, Console, User] -> Volume { session: SessionId, ino: InodeId }
);
message!(
    /// Reports how much quota this client needs reserved in a volume with a limit of bytes, and requests
    /// more, in bytes. Sent while no `Commit` of a file there is in flight: the usage that a `Commit` adds is
    /// taken from the reservation.
    ReserveQuota = 191 by [Mount, Mover, Console] -> QuotaReservation {
        session: SessionId,
        volume: VolumeId,
        /// Written and not committed: stays reserved in any case.
        spent: u64,
        /// That, and the writes about to begin.
        must: u64,
        /// That, and probable further writes.
        want: u64,
    }
);
message!(QuotaReservation {
    /// The client's present reservation: less than `must` near the limit.
    held: u64,
    /// Reservations of other clients: some of them may be released soon.
    others: u64,
    /// There is no limit (any more): no reservation is needed.
    unlimited: bool,
    /// Eviction is in progress: more becomes available with time.
    evicting: bool,
});
message!(
    /// On a new connection, before the last `SessionResume`: all reservations that the session holds.
    ReclaimReservations = 192 by [Mount, Mover, Console] -> () { session: SessionId, held: Vec<HeldReservation> }
);
message!(HeldReservation { volume: VolumeId, bytes: u64 });

message!(
    /// The write floors of all volumes that have one.
    GetWriteFloors = 423 by [Mount, Mover, Console, Operator, Auditor, User] -> WriteFloors { session: SessionId }
);
message!(WriteFloors { floors: Vec<WriteFloor> });
message!(
    /// A write to the volume needs at least `members` current members of its placement group, or all of a
    /// group that has fewer.
    WriteFloor { volume: VolumeId, members: u8 }
);
impl Copy for WriteFloor {}
message!(
    /// Sets a volume's write floor; 0: as many members as there are data cells.
    SetWriteFloor = 424 by [Console, User] -> Volume { op: Op, cred: Cred, volume: VolumeId, members: u8 }
);

/// Inodes that one `ScanInodes` reads: this takes the leader a moment.
pub const SCANNED_MAX: u32 = 4096;

message!(
    /// Facts for a usage report about inodes after `after`, in the order of their numbers, at most
    /// `SCANNED_MAX` at a time. For the superuser; for a volume also its owner and administrators.
    ScanInodes = 193 by [Console, User] -> Scanned {
        session: SessionId,
        cred: Cred,
        /// Only of this volume; 0: of all.
        volume: VolumeId,
        directories: bool,
        after: InodeId,
    }
);
message!(Scanned {
    directories: Vec<DirectoryFacts>,
    files: Vec<FileFacts>,
    /// The last inode read: continue after it.
    last: InodeId,
    end: bool,
});
message!(DirectoryFacts { ino: InodeId, parent: InodeId, volume: VolumeId, uid: u32 });
message!(
    /// A named file that is not a directory.
    FileFacts {
        ino: InodeId,
        kind: FileKind,
        /// The directory of its first link.
        parent: InodeId,
        uid: u32,
        size: u64,
        allocated: u64,
        /// Bytes that are at home only.
        evicted: u64,
        /// Its bytes are kept in its inode.
        inline: bool,
    }
);
