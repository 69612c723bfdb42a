//! The cluster map: members, targets, placement groups and leaders of namespaces. Small, versioned, the same
//! for all processes that hold the same version.
use crate::access::{AccessRules, AuditRule};
use crate::home_rule::HomeRule;
use crate::sender::Sender;
use crate::version::{LEVEL_OF_COPIES, LEVEL_OF_GROWTH, LEVEL_OF_REPLACEMENT, LEVEL_OF_STEPS, Program};
use crate::{ClusterId, DiskUuid, Epoch, NamespaceId, NamespaceUuid, NodeId, PgId, RunId, TargetId};
use crate::{Reader, Wire, Writer};
use crate::{message, wire_enum};
use std::collections::BTreeMap;
use std::fmt;

/// k data cells and m parity cells per stripe. `replica:n` is k = 1, m = n − 1; `single` is k = 1, m = 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scheme {
    pub data: u8,
    pub parity: u8,
}
impl Wire for Scheme {
    fn encode(&self, w: &mut Writer) {
        self.data.encode(w);
        self.parity.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> crate::Result<Scheme> {
        let scheme = Scheme { data: Wire::decode(r)?, parity: Wire::decode(r)? };
        scheme.check()?;
        Ok(scheme)
    }
}

impl Scheme {
    pub const DATA_MAX: u8 = 32;
    pub const PARITY_MAX: u8 = 8;
    pub fn width(self) -> usize {
        usize::from(self.data) + usize::from(self.parity)
    }
    /// The part of raw bytes on targets that is available to files.
    pub fn payload_share(self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(self.data) / self.width().max(1) as u128) as u64
    }
}
impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.data, self.parity) {
            (1, 0) => write!(f, "single"),
            (1, m) => write!(f, "replica:{}", m + 1),
            (k, m) => write!(f, "ec:{k}+{m}"),
        }
    }
}
impl fmt::Debug for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
impl std::str::FromStr for Scheme {
    type Err = String;
    fn from_str(s: &str) -> Result<Scheme, String> {
        let bad = || {
            format!(
                "scheme {s:?}: expected single, replica:N (2 to {}), or ec:K+M (K 2 to {}, M 1 to {})",
                Scheme::PARITY_MAX + 1,
                Scheme::DATA_MAX,
                Scheme::PARITY_MAX
            )
        };
        let scheme = match s.split_once(':') {
            None if s == "single" => Scheme { data: 1, parity: 0 },
            Some(("replica", n)) => {
                let n: u8 = n.parse().map_err(|_| bad())?;
                Scheme { data: 1, parity: n.checked_sub(1).filter(|m| *m >= 1).ok_or_else(bad)? }
            }
            Some(("ec", km)) => {
                let (k, m) = km.split_once('+').ok_or_else(bad)?;
                let scheme =
                    Scheme { data: k.parse().map_err(|_| bad())?, parity: m.parse().map_err(|_| bad())? };
                if scheme.data < 2 || scheme.parity < 1 {
                    return Err(bad());
                }
                scheme
            }
            _ => return Err(bad()),
        };
        if scheme.data > Scheme::DATA_MAX || scheme.parity > Scheme::PARITY_MAX {
            return Err(bad());
        }
        Ok(scheme)
    }
}

/// The place of a file's cells; constant-size, fixed when the file is made. Stripe `s` is on placement group
/// `first_pg + (seed + s) % pg_count`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    pub scheme: Scheme,
    /// log2 of the cell size in bytes, 16 (64 KiB) to 22 (4 MiB).
    pub cell_shift: u8,
    pub first_pg: PgId,
    pub pg_count: u32,
    pub seed: u32,
}
impl Wire for Layout {
    fn encode(&self, w: &mut Writer) {
        self.scheme.encode(w);
        self.cell_shift.encode(w);
        self.first_pg.encode(w);
        self.pg_count.encode(w);
        self.seed.encode(w);
    }
    /// Refuses an invalid layout, so that the arithmetic on it needs no checks.
    fn decode(r: &mut Reader<'_>) -> crate::Result<Layout> {
        let layout = Layout {
            scheme: Wire::decode(r)?,
            cell_shift: Wire::decode(r)?,
            first_pg: Wire::decode(r)?,
            pg_count: Wire::decode(r)?,
            seed: Wire::decode(r)?,
        };
        layout.check()?;
        Ok(layout)
    }
}

wire_enum!(
    /// The role of a node's process, or of the person who runs a command.
    Role {
        Coordinator = 1,
        Meta = 2,
        Storage = 3,
        Mount = 4,
        Mover = 5,
        /// A command of an administrator: all rights.
        Console = 6,
        /// A command of a person who may see everything, manage targets, and let mounts join.
        Operator = 7,
        /// A command of a person who may see everything and change nothing.
        Auditor = 8,
    }
);
impl From<Role> for Sender {
    fn from(role: Role) -> Sender {
        match role {
            Role::Coordinator => Sender::Coordinator,
            Role::Meta => Sender::Meta,
            Role::Storage => Sender::Storage,
            Role::Mount => Sender::Mount,
            Role::Mover => Sender::Mover,
            Role::Console => Sender::Console,
            Role::Operator => Sender::Operator,
            Role::Auditor => Sender::Auditor,
        }
    }
}

wire_enum!(
    /// Whether a target may be used.
    TargetState {
        /// Its process holds its membership.
        Up = 1,
        /// Its process is silent or gone. It is up again when it joins again.
        Down = 2,
        /// Its disk failed (I/O error, failed sync): not used again until it is cleared.
        Failed = 3,
    }
);
wire_enum!(
    /// State of one place of a placement group.
    MemberState {
        /// Holds all its fragments: read and written.
        Current = 1,
        /// Not reachable: neither read nor written; writes made meanwhile are under-replicated.
        Down = 2,
        /// Back, and written again, but writes that it missed are not repaired yet: read only as a last
        /// resort, by version.
        Behind = 3,
    }
);

message!(
    /// A machine's process.
    Node {
        id: NodeId,
        /// Unique in the cluster, chosen by its administrator.
        name: String,
        role: Role,
        /// Processes of one host, which use Unix sockets among themselves, have one value here.
        host: String,
        /// `tcp:…` and `unix:…`, best first.
        addrs: Vec<String>,
        up: bool,
        /// Its program at the last join.
        program: Program,
    }
);
message!(
    /// A run of a target's process that the coordinator admitted. Each one has a higher number than the
    /// previous one.
    #[derive(Copy, Default)]
    Run { number: u64, id: RunId }
);
message!(
    /// A run with the highest position of the index's journal that was reported. A target that returns with
    /// less has lost data.
    #[derive(Copy, Default)]
    RunSeen { run: Run, position: u64 }
);
message!(Target {
    id: TargetId,
    uuid: DiskUuid,
    node: NodeId,
    pool: String,
    state: TargetState,
    capacity: u64,
    /// The last admitted run: a target that returns without a record of it has lost its data.
    last: RunSeen,
    /// While it is refilled: the last run in which it had the lost data, so that its right disk is recognized
    /// when it is put back.
    whole: RunSeen,
});
message!(
    /// One place of a placement group: holds the fragments with its index.
    Member {
        target: TargetId,
        state: MemberState,
        /// The group's epoch when the member was last `Current`. For a current one: the epoch of the last
        /// change of a member's state.
        since: Epoch,
        /// The group's epoch when the target returned without its data, until it is refilled; 0: it did not.
        /// Its data from before that epoch does not count.
        lost_at: Epoch,
    }
);
message!(
    /// A placement group: an ordered list of k + m targets.
    Group { id: PgId, pool: String, scheme: Scheme, epoch: Epoch, members: Vec<Member> }
);
message!(
    /// A place of a group moves to another target, which copies the member's data. The member stays until
    /// then.
    #[derive(Copy)]
    Move {
        group: PgId,
        place: u8,
        to: TargetId,
        /// In this epoch of the group the member accepts no change of the place: the rest is copied. 0: not
        /// yet.
        closed_in: Epoch,
    }
);
message!(
    /// The leader of a namespace's metadata.
    NamespaceEntry {
        id: NamespaceId,
        name: String,
        /// The founding whose directory may lead.
        uuid: NamespaceUuid,
        leader: Option<NodeId>,
        leader_epoch: Epoch,
    }
);
message!(
    /// A node that keeps a copy of a namespace's metadata.
    NamespaceCopy {
        node: NodeId,
        state: MemberState,
        /// The leader's epoch when the copy was last `Current`; the present epoch for a current one.
        since: Epoch,
    }
);
message!(
    /// The copies of a namespace that has, or had, more than its leader's. They use the leader's epoch.
    NamespaceCopies {
        namespace: NamespaceId,
        /// The configured number: nodes that announce themselves take the free places.
        wanted: u8,
        members: Vec<NamespaceCopy>,
    }
);
message!(
    /// Settings that all nodes must agree on and an administrator may change.
    Settings {
        /// For new files.
        scheme: Scheme,
        cell_shift: u8,
        /// A client that is silent this long loses its leases.
        lease_ms: u32,
        /// A target that is silent this long is down.
        target_silence_ms: u32,
    }
);
message!(
    /// Certificates of this name up to this serial number are refused.
    RemovedNode {
        name: String,
        serial: u64,
        /// When the last of them expires, in seconds since 1970: then the entry is removed.
        until: u64,
    }
);
message!(
    /// A group under an epoch.
    GroupAt { group: PgId, epoch: Epoch }
);

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterMap {
    pub cluster: ClusterId,
    pub version: u64,
    /// The level that programs may write: all nodes supported it when it was raised.
    pub level: u16,
    pub settings: Settings,
    pub nodes: Vec<Node>,
    pub targets: Vec<Target>,
    pub groups: Vec<Group>,
    pub namespaces: Vec<NamespaceEntry>,
    /// Rules for users' homes.
    pub homes: Vec<HomeRule>,
    /// The last assigned namespace number. The first one is random, so that a coordinator that lost its
    /// directory does not assign numbers again under which targets still hold cells.
    pub last_namespace: NamespaceId,
    /// Nodes whose certificates are refused although they have not expired.
    pub removed: Vec<RemovedNode>,
    /// Rules for mounts; the first one that matches a node and a volume decides.
    pub access: AccessRules,
    /// The pins (SHA-256, 128 bits) of the trusted authorities; the first one signs. A node with other pins
    /// renews. Empty below level [`LEVEL_OF_STEPS`], as `audits`.
    pub authorities: Vec<[u8; 16]>,
    /// Operations that metadata leaders record in their audit logs.
    pub audits: Vec<AuditRule>,
    /// For each namespace that is kept on several nodes. Empty below level [`LEVEL_OF_COPIES`].
    pub copies: Vec<NamespaceCopies>,
    /// Places that move to another target, at most one of a group. Empty below level [`LEVEL_OF_GROWTH`], as
    /// `generations`.
    pub moves: Vec<Move>,
    /// The first group of each generation except the first one of its kind. New files use the newest
    /// generation.
    pub generations: Vec<PgId>,
    /// The highest number that a target ever had, if a target was removed: numbers are not reused.
    pub last_target: TargetId,
    /// Targets that are nearly full: new files avoid them if possible.
    pub full: Vec<TargetId>,
}

/// Fields in order. Fields that a level introduced are present only in clusters of that level.
impl Wire for ClusterMap {
    fn encode(&self, w: &mut Writer) {
        self.cluster.encode(w);
        self.version.encode(w);
        self.level.encode(w);
        self.settings.encode(w);
        self.nodes.encode(w);
        self.targets.encode(w);
        self.groups.encode(w);
        self.namespaces.encode(w);
        self.homes.encode(w);
        self.last_namespace.encode(w);
        self.removed.encode(w);
        self.access.encode(w);
        if self.level >= LEVEL_OF_STEPS {
            self.authorities.encode(w);
            self.audits.encode(w);
        }
        if self.level >= LEVEL_OF_COPIES {
            self.copies.encode(w);
        }
        if self.level >= LEVEL_OF_GROWTH {
            self.moves.encode(w);
            self.generations.encode(w);
            self.last_target.encode(w);
            self.full.encode(w);
        }
    }
    fn decode(r: &mut Reader<'_>) -> crate::Result<ClusterMap> {
        let mut map = ClusterMap {
            cluster: Wire::decode(r)?,
            version: Wire::decode(r)?,
            level: Wire::decode(r)?,
            settings: Wire::decode(r)?,
            nodes: Wire::decode(r)?,
            targets: Wire::decode(r)?,
            groups: Wire::decode(r)?,
            namespaces: Wire::decode(r)?,
            homes: Wire::decode(r)?,
            last_namespace: Wire::decode(r)?,
            removed: Wire::decode(r)?,
            access: Wire::decode(r)?,
            authorities: Vec::new(),
            audits: Vec::new(),
            copies: Vec::new(),
            moves: Vec::new(),
            generations: Vec::new(),
            last_target: TargetId::default(),
            full: Vec::new(),
        };
        if map.level >= LEVEL_OF_STEPS {
            (map.authorities, map.audits) = (Wire::decode(r)?, Wire::decode(r)?);
        }
        if map.level >= LEVEL_OF_COPIES {
            map.copies = Wire::decode(r)?;
        }
        if map.level >= LEVEL_OF_GROWTH {
            (map.moves, map.generations) = (Wire::decode(r)?, Wire::decode(r)?);
            (map.last_target, map.full) = (Wire::decode(r)?, Wire::decode(r)?);
        }
        Ok(map)
    }
}

impl Member {
    /// Its target returned without its data, and is not refilled yet.
    pub fn is_lost(&self) -> bool {
        self.lost_at > Epoch(0)
    }
    /// It is written to, and is filled with all earlier data. Seals continue meanwhile, without it.
    pub fn is_filled(&self, level: u16) -> bool {
        level >= LEVEL_OF_REPLACEMENT && self.state == MemberState::Behind && self.is_lost()
    }
    /// The epoch in which its data was complete.
    pub fn complete_since(&self) -> Epoch {
        if self.is_lost() { Epoch(0) } else { self.since }
    }
}

impl Group {
    /// The newest epoch in which k members may have been current, so the newest one that may have writes.
    pub fn last_writable_epoch(&self) -> Epoch {
        let mut since: Vec<Epoch> = self.members.iter().map(|m| m.since).collect();
        since.sort_unstable();
        let k = usize::from(self.scheme.data);
        since.len().checked_sub(k).and_then(|i| since.get(i)).copied().unwrap_or(self.epoch)
    }
    /// Whether the member is current as soon as its target is back.
    pub fn missed_nothing(&self, member: &Member) -> bool {
        !member.is_lost() && member.since >= self.last_writable_epoch()
    }
    /// More members than parity allows are without their data: data that only they had is lost, and no member
    /// can be refilled.
    pub fn is_lost(&self) -> bool {
        let known = self.knows_all_writes();
        let has_all = |m: &&Member| {
            m.state == MemberState::Current
                || m.state == MemberState::Down && self.missed_nothing(m)
                || known && !m.is_lost() // it may have missed nothing
        };
        self.members.iter().any(Member::is_lost)
            && self.members.iter().filter(has_all).count() < usize::from(self.scheme.data)
    }
    /// Whether seals wait: a member that is behind makes its last listing of cells that it lacks, so cells
    /// that it already has must not change.
    pub fn pauses_seals(&self, level: u16) -> bool {
        self.members.iter().any(|m| m.state == MemberState::Behind && !m.is_filled(level))
    }
    /// Members that hold everything. Writes need at least `scheme.data` of them: the coordinator relies on it
    /// when it decides which members missed nothing (see `weir-coord`'s transitions).
    pub fn current_count(&self) -> usize {
        self.members.iter().filter(|m| m.state == MemberState::Current).count()
    }
    /// Whether current members know of all writes: k of any kind do, and so does each that keeps parity,
    /// which has the overlay logs of all data cells.
    pub fn knows_all_writes(&self) -> bool {
        let mut keep_parity = self.members.iter().skip(usize::from(self.scheme.data));
        self.is_writable() || keep_parity.any(|m| m.state == MemberState::Current)
    }
    /// Whether writes may be accepted: at least k members are current.
    pub fn is_writable(&self) -> bool {
        self.current_count() >= usize::from(self.scheme.data)
    }
}

impl ClusterMap {
    /// Groups have consecutive ids from 0, so a group is found by its index.
    pub fn group(&self, id: PgId) -> Option<&Group> {
        self.groups.get(id.0 as usize).filter(|g| g.id == id)
    }
    pub fn target(&self, id: TargetId) -> Option<&Target> {
        self.targets.iter().find(|t| t.id == id)
    }
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.iter().find(|n| n.id == id)
    }
    /// Whether it is a storage node that is down and whose targets were all removed. The map keeps its id and
    /// name.
    pub fn has_left(&self, node: &Node) -> bool {
        node.role == Role::Storage && !node.up && !self.targets.iter().any(|t| t.node == node.id)
    }
    pub fn namespace(&self, id: NamespaceId) -> Option<&NamespaceEntry> {
        self.namespaces.iter().find(|v| v.id == id)
    }
    pub fn namespace_named(&self, name: &str) -> Option<&NamespaceEntry> {
        self.namespaces.iter().find(|v| v.name == name)
    }
    /// `None`: only its leader has a copy, now and in the past.
    pub fn copies_of(&self, id: NamespaceId) -> Option<&NamespaceCopies> {
        self.copies.iter().find(|c| c.namespace == id)
    }
    /// The members that must receive a truncation of a file on `groups`: every live member, under the epochs
    /// of its groups. An error while a group has fewer than k current members: one that returns then would be
    /// considered to have missed nothing.
    pub fn members_to_truncate(
        &self,
        groups: impl Fn(PgId) -> bool,
    ) -> crate::Result<BTreeMap<TargetId, Vec<GroupAt>>> {
        let mut targets: BTreeMap<TargetId, Vec<GroupAt>> = BTreeMap::new();
        for group in self.groups.iter().filter(|g| groups(g.id)) {
            if !group.is_writable() {
                return Err(crate::Error::unavailable(format!(
                    "{}: {} of its targets are usable, {} are needed",
                    group.id,
                    group.current_count(),
                    group.scheme.data
                )));
            }
            for member in group.members.iter().filter(|m| m.state != MemberState::Down) {
                targets
                    .entry(member.target)
                    .or_default()
                    .push(GroupAt { group: group.id, epoch: group.epoch });
            }
        }
        Ok(targets)
    }
    /// The node that serves a target.
    /// Whether every group that has redundancy takes data.
    pub fn takes_data(&self) -> bool {
        self.groups.iter().filter(|g| g.scheme.parity > 0).all(Group::is_writable)
    }
    pub fn target_node(&self, id: TargetId) -> Option<&Node> {
        self.node(self.target(id)?.node)
    }
    /// First group and number of groups of a scheme in a pool, of the newest generation, which new files use.
    /// Groups of one generation are consecutive.
    pub fn groups_of(&self, pool: &str, scheme: Scheme) -> Option<(PgId, u32)> {
        let is_of_kind = |g: &&Group| g.pool == pool && g.scheme == scheme;
        let last = self.groups.iter().rev().find(is_of_kind)?.id.0;
        let before = &self.groups[..=last as usize];
        let begins = |g: &&Group| self.generations.contains(&g.id);
        let of_kind = before.iter().rev().take_while(is_of_kind).map(|g| g.id.0);
        let generation = before.iter().rev().take_while(is_of_kind).find(begins).map(|g| g.id.0);
        let first = generation.or(of_kind.last())?;
        Some((PgId(first), last - first + 1))
    }
    /// Whether the group is closed because a place moves: writes wait for the next epoch.
    pub fn is_closed(&self, group: &Group) -> bool {
        self.move_of(group.id).is_some_and(|found| found.closed_in == group.epoch)
    }
    /// The move of a place of the group, if there is one.
    pub fn move_of(&self, group: PgId) -> Option<&Move> {
        self.moves.iter().find(|m| m.group == group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redundancy_is_taken_off() {
        let share = |bytes, scheme: &str| scheme.parse::<Scheme>().unwrap().payload_share(bytes);
        assert_eq!((share(600, "ec:4+2"), share(600, "replica:3")), (400, 200));
        assert_eq!(share(u64::MAX, "single"), u64::MAX);
    }

    #[test]
    fn new_files_use_the_newest_generation() {
        let mut map = ClusterMap::absent();
        let scheme = |text: &str| text.parse::<Scheme>().unwrap();
        let kinds = ["ec:4+2", "ec:4+2", "replica:2", "ec:4+2", "ec:4+2", "ec:4+2"];
        for (n, kind) in kinds.into_iter().enumerate() {
            let (id, pool) = (PgId(n as u32), "nvme".to_owned());
            map.groups.push(Group { id, pool, scheme: scheme(kind), epoch: Epoch(1), members: vec![] });
        }
        let of = |map: &ClusterMap, kind: &str| map.groups_of("nvme", scheme(kind));
        assert_eq!(of(&map, "ec:4+2"), Some((PgId(3), 3)));
        map.generations = vec![PgId(3), PgId(4)];
        assert_eq!(of(&map, "ec:4+2"), Some((PgId(4), 2)));
        assert_eq!(of(&map, "replica:2"), Some((PgId(2), 1)));
        assert_eq!(of(&map, "single"), None);
    }

    #[test]
    fn schemes_are_written_as_they_are_read() {
        for text in ["single", "replica:2", "replica:3", "ec:4+2", "ec:8+2", "ec:10+3"] {
            assert_eq!(text.parse::<Scheme>().unwrap().to_string(), text);
        }
        for text in
            ["", "ec", "ec:4", "ec:1+2", "ec:4+0", "ec:33+2", "ec:4+9", "replica:1", "replica:0", "ec:4+2 "]
        {
            assert!(text.parse::<Scheme>().is_err(), "{text:?}");
        }
    }
}
