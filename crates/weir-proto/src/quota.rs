//! Usage and limits of users and groups: messages to a namespace's metadata leader (methods 109, 128, 129,
//! 148 and 149).
//!
//! Each limit is of a user or a group, in one volume or in all volumes together. Permissions: the superuser
//! sets limits for all volumes, a volume's owner and administrators set those in it. Users see their own
//! usage; the usage of groups is not secret.
use crate::meta::{Cred, Entry, Op, Time};
use crate::volume::Quota;
use crate::{SessionId, VolumeId, message, wire_enum, wire_struct};

/// Not a volume: all volumes together.
pub const ALL_VOLUMES: VolumeId = VolumeId(0);
/// A limit with this number is for all users, or groups, without a limit of their own. No user has it.
pub const DEFAULT_ID: u32 = u32::MAX;
/// Limits of users and groups in one namespace: they are kept in memory, about 100 bytes each.
pub const OWNER_LIMITS_MAX: usize = 100_000;
/// Used hundredths of a limit, from which on its user or group is near it.
pub const NEAR_LIMIT_PERCENT: u64 = 95;
/// Users and groups that one `OwnersNear` names.
pub const OWNERS_NEAR_MAX: usize = 20;
/// Rows in one `OwnerUsagePage`.
pub const OWNER_ROWS_MAX: u32 = 1024;

wire_enum!(
    /// Whether a limit or a counter is of a user or of a group.
    OwnerKind {
        User = 1,
        Group = 2,
    }
);

/// A user or a group in a volume, or in all volumes together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holder {
    pub volume: VolumeId,
    pub kind: OwnerKind,
    pub id: u32,
}
wire_struct!(Holder { volume: VolumeId, kind: OwnerKind, id: u32 });

impl Holder {
    /// For messages: `user 1000 in volume "work"`.
    pub fn shown(&self, volume_name: &str) -> String {
        let kind = match self.kind {
            OwnerKind::User => "user",
            OwnerKind::Group => "group",
        };
        let who = match self.id {
            DEFAULT_ID => format!("each {kind}"),
            id => format!("{kind} {id}"),
        };
        match self.volume {
            ALL_VOLUMES => format!("{who} in all volumes"),
            _ => format!("{who} in volume {volume_name:?}"),
        }
    }
}

/// The volume, the user and the group that an inode is charged to. In a `ReserveSpace` volume 0: none of
/// their limits applies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Account {
    pub volume: VolumeId,
    pub uid: u32,
    pub gid: u32,
}
wire_struct!(Account { volume: VolumeId, uid: u32, gid: u32 });

impl Account {
    pub const NONE: Account = Account { volume: VolumeId(0), uid: 0, gid: 0 };

    /// The account whose limits of bytes apply to new data of a file, by its lease.
    pub fn limiting(entry: &Entry) -> Account {
        match entry.lease.limited {
            VolumeId(0) => Account::NONE,
            volume => Account { volume, uid: entry.attr.uid, gid: entry.attr.gid },
        }
    }
    /// The counters that an inode is counted in: two of its volume, two of all volumes.
    pub fn holders(self) -> [Holder; 4] {
        let of = |volume, kind, id| Holder { volume, kind, id };
        [
            of(self.volume, OwnerKind::User, self.uid),
            of(self.volume, OwnerKind::Group, self.gid),
            of(ALL_VOLUMES, OwnerKind::User, self.uid),
            of(ALL_VOLUMES, OwnerKind::Group, self.gid),
        ]
    }
}

message!(
    /// Sets or removes the limits of a user, a group, or of all without one of their own (`DEFAULT_ID`).
    OwnerLimit = 148 by [Console, User] -> OwnerUsage {
        op: Op,
        cred: Cred,
        holder: Holder,
        /// `None`: it has no limits of its own any more. One without limits is an exception from the default.
        quota: Option<Quota>,
    }
);
message!(
    /// Usage and limits: of the users and groups of a volume, or of one user or group in each volume.
    OwnerUsageList = 149 by [Console, User] -> OwnerUsagePage {
        session: SessionId,
        cred: Cred,
        list: ListOf,
        /// Rows after this one; `None`: from the first.
        after: Option<Holder>,
        limit: u32,
    }
);
crate::wire_union!(
    /// The rows of an `OwnerUsageList`.
    ListOf {
        /// All users and groups with files or limits in a volume, or in all volumes together. Only for
        /// administrators.
        Volume = 1 { volume: VolumeId },
        /// One user or group: in all volumes together, and in each volume with its files or limits.
        Owner = 2 { kind: OwnerKind, id: u32 },
    }
);
message!(
    /// The users and groups that are near a limit of theirs: for reports on the whole namespace.
    OwnersNearLimit = 109 by [Console, Operator, Auditor] -> OwnersNear {}
);
message!(
    /// Of the limits that apply now, [`NEAR_LIMIT_PERCENT`] or more are used. Some seconds old.
    #[derive(Default)]
    OwnersNear {
        /// The fullest first, at most `OWNERS_NEAR_MAX`.
        worst: Vec<OwnerUsage>,
        /// How many there are.
        users: u64,
        groups: u64,
    }
);
message!(OwnerUsagePage { rows: Vec<OwnerUsage>, end: bool });
message!(
    /// Usage and limits of a user or a group.
    OwnerUsage {
        holder: Holder,
        volume_name: String,
        /// Bytes on targets.
        bytes: u64,
        /// Files and directories.
        inodes: u64,
        /// The limits that apply; `None`: there are none.
        quota: Option<Quota>,
        /// They are its own, not the default for all.
        own: bool,
        bytes_over_since: Option<Time>,
        inodes_over_since: Option<Time>,
    }
);
message!(
    /// As `ReserveQuota`, for files of one owner and group: their limits are checked as well.
    ReserveSpace = 128 by [Mount, Mover, Console] -> ReservedSpace {
        session: SessionId,
        account: Account,
        /// Written and not committed: stays reserved in any case.
        spent: u64,
        /// That, and the writes about to begin.
        must: u64,
        /// That, and probable further writes.
        want: u64,
    }
);
message!(ReservedSpace {
    /// The client's present reservation: less than `must` near a limit.
    held: u64,
    /// Reservations of other clients under the limit with the least space left.
    others: u64,
    /// No limit applies (any more): no reservation is needed.
    unlimited: bool,
    /// Eviction is in progress: more becomes available with time.
    evicting: bool,
    /// The limit with the least space left, for messages: whose it is, and how many bytes it allows.
    limit: String,
});
message!(
    /// On a new connection, before the last `SessionResume`: all reservations that the session holds.
    ReclaimSpace = 129 by [Mount, Mover, Console] -> () { session: SessionId, held: Vec<HeldSpace> }
);
message!(HeldSpace { account: Account, bytes: u64 });
