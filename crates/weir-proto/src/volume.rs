//! Messages about volumes, to a namespace's metadata leader (methods 146, 155–159 and 190–193).
//!
//! A volume is a named subtree with an owner, limits and a policy of its own. Who is asked for: the superuser
//! makes and deletes volumes, gives them to an owner and sets hard limits; the owner and the administrators
//! do the rest.
use crate::map::Scheme;
use crate::message;
use crate::meta::{Cred, FileKind, Op, Time, Usage};
use crate::{Error, InodeId, Result, SessionId, VolumeId};
use bytes::Bytes;

/// Longest name of a volume, in bytes.
pub const VOLUME_NAME_MAX: usize = 64;
/// Longest path that is remembered of where a volume was made, in bytes.
pub const VOLUME_PATH_MAX: usize = 4096;
/// Administrators of one volume.
pub const ADMINS_MAX: usize = 64;
/// Volumes in one `VolumePage`.
pub const VOLUMES_MAX: usize = 1024;
/// Seconds between going over a soft limit and its becoming a hard one, unless it is set.
pub const GRACE_S: u32 = 7 * 24 * 3600;

/// A name that needs no quotes anywhere, and is not taken for an option or a path.
pub fn check_volume_name(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts && name.len() <= VOLUME_NAME_MAX && name.chars().all(fits) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{name:?} cannot be a volume's name: it has 1 to {VOLUME_NAME_MAX} letters, digits, dots, dashes or underscores \
         and begins with a letter or a digit"
    )))
}

message!(
    /// Limits; absent: none, and 0 is nothing at all. Bytes are those that files take without redundancy,
    /// inodes are files and directories.
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
    /// What new files of the volume get; absent: what the cluster's settings say.
    Policy { scheme: Option<Scheme>, pool: Option<String> }
);
message!(
    /// Which of the snapshots that were taken by schedule are kept: the newest of each of so many hours,
    /// days, weeks and months that have one.
    SnapshotRetention { hours: u32, days: u32, weeks: u32, months: u32 }
);
impl Copy for SnapshotRetention {}
impl Default for SnapshotRetention {
    fn default() -> SnapshotRetention {
        SnapshotRetention { hours: 24, days: 7, weeks: 4, months: 0 }
    }
}
impl SnapshotRetention {
    /// To keep nothing is to take none.
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
/// Snapshots by schedule that a volume may come to have: others have room beside them.
pub const SCHEDULED_MAX: u64 = 200;
/// The directory of what was removed, in a volume's topmost one.
pub const TRASH: &[u8] = b".trash";

message!(
    /// What is kept of a volume without being asked for each time.
    Retention {
        /// What is removed stays in the trash for so many seconds; 0: there is no trash.
        trash_s: u32,
        /// A snapshot is taken every so many seconds; 0: none is.
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
        /// Its topmost directory.
        root: InodeId,
        /// Where that was made; the directory may have been renamed since.
        path: Bytes,
        owner: u32,
        /// Users who may do what the owner may.
        admins: Vec<u32>,
        quota: Quota,
        /// Since when it is over a soft limit.
        bytes_over_since: Option<Time>,
        inodes_over_since: Option<Time>,
        policy: Policy,
        retention: Retention,
        created: Time,
        /// It is being removed.
        deleting: bool,
        /// Its own: what is in volumes inside it is theirs.
        usage: Usage,
        /// Of that: what was removed and is in the trash.
        in_trash: Usage,
    }
);

message!(
    /// Makes a volume and its topmost directory, empty.
    VolumeCreate = 155 by [Console, User] -> Volume {
        op: Op,
        cred: Cred,
        name: String,
        /// Where the directory is made.
        parent: InodeId,
        entry: Bytes,
        /// The path of it, to be shown.
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
    /// Volumes after `after` (0: from the start) in the order in which they were made, at most `VOLUMES_MAX`.
    VolumeList = 156 by [Mount, Mover, Console, Operator, Auditor, User] -> VolumePage { session: SessionId, after: VolumeId, limit: u32 }
);
message!(VolumePage { volumes: Vec<Volume>, end: bool });
message!(VolumeGet = 157 by [Mount, Mover, Console, Operator, Auditor, User] -> Volume { session: SessionId, name: String });
message!(
    /// Changes what is named; the rest stays.
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
    /// Takes a volume away. `force`: also if something is in it.
    VolumeDelete = 159 by [Console, User] -> Volume { op: Op, cred: Cred, volume: VolumeId, force: bool }
);
message!(
    /// Makes a volume whose names and data are those of a snapshot of `source`. Its topmost directory is
    /// there at once, all else when it is looked at or soon afterwards. For the superuser.
    VolumeClone = 146 by [Console] -> Volume {
        op: Op,
        source: VolumeId,
        /// The snapshot's name.
        snapshot: String,
        /// It goes when all of the clone is there.
        own: bool,
        new: VolumeCreate,
    }
);
message!(
    /// The volume that a directory or a file is in.
    VolumeAt = 190 by [Mount, Mover, Console, User] -> Volume { session: SessionId, ino: InodeId }
);
message!(
    /// Says how much quota this client needs reserved in a volume with a limit of bytes, and asks for more,
    /// in bytes. Sent while no `Commit` of a file there is under way: what a `Commit` adds to the volume's
    /// usage is taken from what is held.
    ReserveQuota = 191 by [Mount, Mover, Console] -> QuotaReservation {
        session: SessionId,
        volume: VolumeId,
        /// Written already and not committed: kept in any case.
        spent: u64,
        /// That, and what is about to be written.
        must: u64,
        /// That, and what may be written next.
        want: u64,
    }
);
message!(QuotaReservation {
    /// What the client holds now: less than `must` where the limit is near.
    held: u64,
    /// What other clients hold: some of it may come back soon.
    others: u64,
    /// There is no limit (any more): no reservation is needed.
    unlimited: bool,
    /// What is at home is evicted: more comes with time.
    evicting: bool,
});
message!(
    /// On a new connection, before the last `SessionResume`: all reservations that the session holds.
    ReclaimReservations = 192 by [Mount, Mover, Console] -> () { session: SessionId, held: Vec<HeldReservation> }
);
message!(HeldReservation { volume: VolumeId, bytes: u64 });

/// Inodes that one `ScanInodes` looks at: a moment of the leader's time.
pub const SCANNED_MAX: u32 = 4096;

message!(
    /// What a usage report needs of inodes after `after`, in the order of their numbers, at most
    /// `SCANNED_MAX` at a time. For the superuser; of a volume also for who owns or administers it.
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
    /// The last one that was looked at: go on behind it.
    last: InodeId,
    end: bool,
});
message!(DirectoryFacts { ino: InodeId, parent: InodeId, volume: VolumeId, uid: u32 });
message!(
    /// Everything that is not a directory and has a name.
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
        /// Its bytes are kept with its attributes.
        inline: bool,
    }
);
