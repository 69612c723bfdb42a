//! A healthy cluster in the view of `weir status` and `weir why`, for tests that change one thing in it.
use super::*;
use crate::machine::{Reach, RoleName};
use serde_json::Value;
use std::sync::Arc;
use weir_proto::backup::BackupRetention;
use weir_proto::condition::Condition;
use weir_proto::coord::TargetReport;
use weir_proto::map::{
    ClusterMap, Group, Member, MemberState, NamespaceEntry, Role, RunSeen, Scheme, Settings, TargetState,
};
use weir_proto::meta::{Time, Usage};
use weir_proto::quota::{Holder, OwnerKind};
use weir_proto::relation::{Direction, RelationId, RelationState};
use weir_proto::version::{LEVEL_MAX, Program};
use weir_proto::volume::{Policy, Quota, Retention};
use weir_proto::{ClusterId, DiskUuid, Epoch, InodeId, NamespaceId, NodeId, PgId, VolumeId};

pub const HOME: &str = "file:///home";

/// Two copies on t1 and t2, and a group without data; all is well.
pub struct World(pub Facts);

impl std::ops::Deref for World {
    type Target = Facts;
    fn deref(&self) -> &Facts {
        &self.0
    }
}
impl std::ops::DerefMut for World {
    fn deref_mut(&mut self) -> &mut Facts {
        &mut self.0
    }
}

/// t1 on storage-1 and t2 on storage-2, led by meta.
fn map() -> ClusterMap {
    let twice = Scheme { data: 1, parity: 1 };
    let node = |id, name: &str, role| Node {
        id: NodeId(id),
        name: name.into(),
        role,
        host: "h".into(),
        addrs: vec![],
        up: true,
        program: Program::this(),
    };
    let target = |id| Target {
        id: TargetId(id),
        uuid: DiskUuid([id as u8; 16]),
        node: NodeId(id),
        pool: "default".into(),
        state: TargetState::Up,
        capacity: 1000,
        last: RunSeen::default(),
        whole: RunSeen::default(),
    };
    let member =
        |id| Member { target: TargetId(id), state: MemberState::Current, since: Epoch(1), lost_at: Epoch(0) };
    let group = |id, scheme, members: &[u32]| Group {
        id: PgId(id),
        pool: "default".into(),
        scheme,
        epoch: Epoch(1),
        members: members.iter().map(|id| member(*id)).collect(),
    };
    let leader = NamespaceEntry {
        id: NamespaceId(1),
        name: "root".into(),
        uuid: Default::default(),
        leader: Some(NodeId(3)),
        leader_epoch: Epoch(1),
    };
    ClusterMap {
        cluster: ClusterId([1; 16]),
        version: 1,
        level: LEVEL_MAX,
        settings: Settings { scheme: twice, cell_shift: 19, lease_ms: 1, target_silence_ms: 1 },
        nodes: vec![
            node(1, "storage-1", Role::Storage),
            node(2, "storage-2", Role::Storage),
            node(3, "meta", Role::Meta),
        ],
        targets: vec![target(1), target(2)],
        groups: vec![group(0, twice, &[1, 2]), group(1, Scheme { data: 1, parity: 0 }, &[2])],
        namespaces: vec![leader],
        homes: vec![],
        last_namespace: Default::default(),
        removed: vec![],
        authorities: vec![],
        audits: vec![],
        copies: vec![],
        moves: vec![],
        generations: vec![],
        last_target: Default::default(),
        full: vec![],
        access: Default::default(),
    }
}

pub fn world() -> World {
    let report = |id| TargetReport {
        target: TargetId(id),
        failed: false,
        capacity: 1000,
        used: 100,
        under_replicated_cells: 0,
        damaged_blocks: 0,
        repaired_blocks: 0,
        stalled_ms: 0,
        position: 0,
    };
    let process = |name: &str, role| ProcessState {
        name: name.into(),
        role,
        lives: true,
        out_of_memory: false,
        log: "/w/log/x".into(),
    };
    let mount = MountState {
        name: "mount-1".into(),
        path: "/m".into(),
        state: Reach::Answers,
        losses: 0,
        last_losses: Value::Null,
    };
    let known = Known {
        volumes: vec![volume()],
        relations: vec![relation()],
        backups: vec![backup()],
        ..Known::default()
    };
    World(Facts {
        status: ClusterStatus {
            map: Arc::new(map()),
            targets: vec![report(1), report(2)],
            uptime_ms: 1,
            links: vec![],
            program: Program::this(),
        },
        processes: vec![process("storage-1", RoleName::Storage), process("mover-1", RoleName::Mover)],
        mounts: vec![mount],
        dead_mounts: vec![],
        namespaces: vec![NamespaceFacts { name: "root".into(), known: Ok(known), starting: None }],
        audit: AuditState::default(),
        homes: HomesHere::default(),
        lives: vec![],
        busiest: None,
        waiting: ClientsWaiting { clients: vec![] },
        clocks: Clocks { off: vec![] },
        leaving: Leaving::default(),
        mutes: vec![],
        restart: "`weir up --dir /w` starts it again".into(),
        now_s: NOW_S,
        conditions: vec![condition("mover-1", Role::Mover), condition("mount-1", Role::Mount)],
        holders: vec![],
        unanswered: vec![],
        names: OwnerNames::default(),
    })
}

pub const NOW_S: u64 = 1_000_000_000;

/// Reported a second ago.
pub fn condition(node: &str, role: Role) -> NodeCondition {
    let condition = Condition { host: "h".into(), release: Program::this().release, ..Condition::default() };
    NodeCondition { node: node.into(), role, last_contact_ms: 1000, condition }
}

fn volume() -> Volume {
    let usage = |bytes| Usage { files: 7, directories: 2, bytes, ..Usage::default() };
    Volume {
        id: VolumeId(2),
        name: "work".into(),
        root: InodeId(9),
        path: "/work".into(),
        owner: 0,
        admins: vec![],
        quota: Quota { bytes_hard: Some(1000), inodes_hard: Some(100), ..Quota::NONE },
        bytes_over_since: None,
        inodes_over_since: None,
        policy: Policy { scheme: None, pool: None },
        retention: Retention::NOTHING,
        created: Time { nanos: 0 },
        deleting: false,
        usage: usage(100),
        in_trash: usage(0),
    }
}

fn relation() -> RelationInfo {
    RelationInfo {
        id: RelationId(1),
        volume: VolumeId(2),
        volume_name: "work".into(),
        url: HOME.into(),
        direction: Direction::Push,
        evict: true,
        state: RelationState::Synced {},
        lag_ms: 0,
        backlog_bytes: 0,
        backlog_names: 0,
        unseen_directories: 0,
        rate: 0,
        shipped_bytes: 0,
        shipped_names: 0,
        movers: 1,
        limited_by: String::new(),
        home_failure: String::new(),
        conflicts: vec![],
        scan_age_ms: 0,
    }
}

/// User 4294967290 near a limit of 1000 bytes in volume work, one of `users`.
pub fn owners(bytes: u64, users: u64) -> OwnersNear {
    let row = OwnerUsage {
        holder: Holder { volume: VolumeId(2), kind: OwnerKind::User, id: 4_294_967_290 },
        volume_name: "work".into(),
        bytes,
        inodes: 1,
        quota: Some(Quota { bytes_hard: Some(1000), ..Quota::NONE }),
        own: false,
        bytes_over_since: None,
        inodes_over_since: None,
    };
    OwnersNear { worst: vec![row], users, groups: 0 }
}

fn backup() -> Backup {
    Backup {
        volume: VolumeId(2),
        volume_name: "work".into(),
        url: "file:///backups".into(),
        by: 0,
        every_s: 86400,
        keep: BackupRetention::default(),
        since: Time { nanos: 0 },
        running: None,
        last: None,
        good: None,
        due: None,
        late: false,
    }
}

impl World {
    pub fn troubles(&self) -> Vec<Trouble> {
        troubles(&self.0)
    }
    pub fn set_known(&mut self, known: Result<Known, String>) {
        self.namespaces[0].known = known;
    }
    pub fn known(&mut self) -> &mut Known {
        self.namespaces[0].known.as_mut().unwrap()
    }
    pub fn volume(&mut self) -> &mut Volume {
        &mut self.known().volumes[0]
    }
    pub fn relation(&mut self) -> &mut RelationInfo {
        &mut self.known().relations[0]
    }
    pub fn map(&mut self) -> &mut ClusterMap {
        Arc::make_mut(&mut self.status.map)
    }
    /// A storage node is down, and its target missing.
    pub fn lose(&mut self, id: u32) {
        let map = self.map();
        map.nodes[id as usize - 1].up = false;
        map.targets[id as usize - 1].state = TargetState::Down;
        for member in map.groups.iter_mut().flat_map(|g| &mut g.members).filter(|m| m.target.0 == id) {
            member.state = MemberState::Down;
        }
    }
}
