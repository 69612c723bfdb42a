//! Why something is slow, from the evidence: a plain function. The cause comes first, then how it reaches the
//! program.
//!
//! A new cause is one function below, and a row in the test's table. Each sentence has its number; each cause
//! says what to do about it.
use super::evidence::{Evidence, Silent};
use super::waits::{Seen, object, time};
use crate::table;
use std::collections::BTreeMap;
use weir_proto::TargetId;
use weir_proto::map::{MemberState, Role, TargetState};
use weir_proto::relation::RelationState;

/// Hundredths of a limit, from where on it may be why writes fail.
const NEARLY_FULL_PERCENT: u64 = 95;
/// A disk that has completed nothing for so long hangs, or is slow; a busy one completes something all the
/// time.
const STALLED_MS: u32 = 500;
/// A wait that ended is of interest if it lasted for so long.
const PAST_US: u64 = 1_000_000;
const PAST_MAX: usize = 5;

/// One link of the chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// How near it is to the cause: the nearest first.
    pub depth: u8,
    pub text: String,
    /// Empty: another one says what to do.
    pub action: String,
}

fn finding(depth: u8, text: String, action: impl Into<String>) -> Finding {
    Finding { depth, text, action: action.into() }
}

/// The chain from the cause to the program. `threads`: of the process that is asked about; none: any.
pub fn findings(evidence: &Evidence, threads: &[u32]) -> Vec<Finding> {
    let mut found = Vec::new();
    leaders(evidence, &mut found);
    found.extend(evidence.silent.iter().filter(|silent| matters(evidence, silent)).map(of_silent));
    nodes(evidence, &mut found);
    groups(evidence, &mut found);
    volumes(evidence, &mut found);
    homes(evidence, &mut found);
    waits(evidence, threads, &mut found);
    locks(evidence, &mut found);
    found.sort_by_key(|f| std::cmp::Reverse(f.depth));
    found
}

/// Waits of the last hour, for a question about what is over.
pub fn past(evidence: &Evidence) -> Vec<String> {
    let about = |seen: &&Seen| {
        let wait = &seen.wait;
        let is_of_file =
            evidence.file.as_ref().is_none_or(|f| wait.object == "inode" && wait.object_id == f.inode);
        wait.ended_ms > 0 && wait.lasted_us >= PAST_US && is_of_file
    };
    let mut longest: Vec<&Seen> = evidence.waits.iter().filter(about).collect();
    longest.sort_by_key(|seen| std::cmp::Reverse(seen.wait.lasted_us));
    let text = |seen: &&Seen| {
        let ago = time(seen.wait.ended_ms * 1000);
        format!("{} ago: {}", ago, sentence(evidence, seen, 1))
    };
    longest.iter().take(PAST_MAX).map(text).collect()
}

fn leaders(evidence: &Evidence, found: &mut Vec<Finding>) {
    let map = &evidence.status.map;
    for namespace in &map.namespaces {
        if !crate::observe::is_led(map, namespace) {
            let name = &namespace.name;
            let text = format!("no metadata server leads namespace {name:?}: every call about names waits");
            found.push(finding(100, text, "start its metadata server again (`weir status` names it)"));
        }
    }
    for namespace in &evidence.namespaces {
        if let Err(why) = &namespace.known {
            let text =
                format!("the metadata server of namespace {:?} does not answer: {why}", namespace.name);
            found.push(finding(
                95,
                text,
                "see its log, and whether its process is stopped or its disk hangs",
            ));
        }
    }
}

/// Mounts matter to others only by what they hold.
fn matters(evidence: &Evidence, silent: &Silent) -> bool {
    let is_server = matches!(silent.role, Role::Storage | Role::Meta | Role::Mover);
    let holds = |seen: &Seen| seen.wait.holder.contains(&silent.name);
    is_server || evidence.file.is_none() || evidence.waits.iter().any(holds)
}

fn of_silent(Silent { name, role, why }: &Silent) -> Finding {
    let (role, depth) = match role {
        Role::Storage => ("storage", 90),
        Role::Meta => ("metadata", 92),
        Role::Mover => ("mover", 70),
        _ => ("mount", 66),
    };
    let text = format!("{name} ({role}) does not answer: {why}");
    let action = format!(
        "look at the process of {name}: is it stopped, is its machine overloaded? start it again if need be"
    );
    finding(depth, text, action)
}

/// Storage nodes that are down and targets that failed; with a file, those that it is on.
fn nodes(evidence: &Evidence, found: &mut Vec<Finding>) {
    let map = &evidence.status.map;
    let concerns = |id: TargetId| {
        evidence.file.as_ref().is_none_or(|file| file.targets.is_empty() || file.targets.contains(&id.0))
    };
    for target in map.targets.iter().filter(|t| t.state != TargetState::Up && concerns(t.id)) {
        let node = map.node(target.node).map_or("?", |node| node.name.as_str());
        let (what, action) = match target.state {
            TargetState::Failed => (
                "failed with a disk error",
                format!("repair its disk, then `weir target clear {}`", target.id),
            ),
            _ => ("is down", format!("start {node} again")),
        };
        let text = format!("{} ({node}) {what}: reads of its data are decoded from the others", target.id);
        found.push(finding(80, text, action));
    }
    for report in &evidence.status.targets {
        if report.stalled_ms >= STALLED_MS {
            let text = format!(
                "the disk of {} has completed nothing for {}",
                report.target,
                time(u64::from(report.stalled_ms) * 1000)
            );
            found.push(finding(89, text, "look at that disk (`dmesg`, `smartctl`)"));
        }
    }
}

fn groups(evidence: &Evidence, found: &mut Vec<Finding>) {
    let concerns = |id: u32| {
        evidence.file.as_ref().is_none_or(|file| file.groups.is_empty() || file.groups.contains(&id))
    };
    let map = &evidence.status.map;
    let poor: Vec<_> = map.groups.iter().filter(|g| !g.is_writable() && concerns(g.id.0)).collect();
    let Some(first) = poor.first() else { return };
    let down = first.members.iter().filter(|m| m.state != MemberState::Current).map(|m| m.target.to_string());
    let text = format!(
        "{} placement groups have too few members: {} has {} of {} and needs {} (without {})",
        poor.len(),
        first.id,
        first.current_count(),
        first.members.len(),
        first.scheme.data,
        down.collect::<Vec<_>>().join(", ")
    );
    found.push(finding(94, text, "start the storage nodes of these targets again"));
}

/// The volume of the file, or all that are full.
fn volumes(evidence: &Evidence, found: &mut Vec<Finding>) {
    for known in evidence.namespaces.iter().filter_map(|n| n.known.as_ref().ok()) {
        let wanted = |id: u32| evidence.file.is_none() || known.volume_of_file == Some(id);
        for volume in known.volumes.iter().filter(|v| wanted(v.id.0)) {
            let name = &volume.name;
            let limits = [volume.quota.bytes_hard, volume.quota.inodes_hard];
            let used = [volume.usage.bytes, volume.usage.files + volume.usage.directories];
            for (at, (limit, used)) in limits.into_iter().zip(used).enumerate() {
                let Some(limit) = limit
                    .filter(|l| u128::from(used) * 100 >= u128::from(*l) * u128::from(NEARLY_FULL_PERCENT))
                else {
                    continue;
                };
                let (what, limit, used, option) = match at {
                    0 => ("bytes", table::bytes(limit), table::bytes(used), "--bytes"),
                    _ => ("files and directories", limit.to_string(), used.to_string(), "--inodes"),
                };
                let text = format!(
                    "volume {name} has {used} of its {limit} {what}: writes beyond that fail (EDQUOT)"
                );
                found.push(finding(
                    75,
                    text,
                    format!("delete files, or raise the limit: `weir volume quota {name} {option} N`"),
                ));
            }
        }
    }
}

fn homes(evidence: &Evidence, found: &mut Vec<Finding>) {
    for known in evidence.namespaces.iter().filter_map(|n| n.known.as_ref().ok()) {
        let wanted = |id: u32| evidence.file.is_none() || known.volume_of_file == Some(id);
        for relation in known.relations.iter().filter(|r| wanted(r.volume.0)) {
            let (name, url) = (&relation.volume_name, &relation.url);
            let recall = match &evidence.file {
                Some(file) if file.offline > 0 => {
                    format!("; {} of this file exist only there", table::bytes(file.offline))
                }
                _ => String::new(),
            };
            if !relation.home_failure.is_empty() {
                let text = format!(
                    "the home {url} of volume {name} cannot be used: {}{recall}",
                    relation.home_failure
                );
                found.push(finding(78, text, "look at that file server or its mount on the mover's machine"));
            } else if relation.movers == 0 {
                let text = format!(
                    "no mover works for volume {name}: nothing is copied to {url} or recalled from there{recall}"
                );
                found.push(finding(77, text, "start a mover (`weir mover`)"));
            } else if let RelationState::Paused { why } = &relation.state {
                let text = format!("copying volume {name} to {url} is paused: {why}");
                found.push(finding(40, text, format!("`weir relation resume {name}`")));
            }
        }
    }
}

/// Waits that last, together where they wait for the same.
fn waits(evidence: &Evidence, threads: &[u32], found: &mut Vec<Finding>) {
    let mut together: BTreeMap<(String, String, String, String), (Seen, u32)> = BTreeMap::new();
    for seen in
        evidence.waits.iter().filter(|seen| seen.wait.ended_ms == 0 && concerns(evidence, threads, seen))
    {
        let wait = &seen.wait;
        let whom = if wait.holder.is_empty() { &wait.peer } else { &wait.holder };
        let key = (seen.process.clone(), wait.reason.clone(), object(wait), whom.clone());
        together.entry(key).or_insert_with(|| (seen.clone(), 0)).1 += 1;
    }
    for (seen, calls) in together.values() {
        found.push(finding(
            depth_of(&seen.wait.reason),
            sentence(evidence, seen, *calls),
            action(evidence, seen),
        ));
    }
}

fn concerns(evidence: &Evidence, threads: &[u32], seen: &Seen) -> bool {
    let wait = &seen.wait;
    let of_process = threads.is_empty() || wait.pid == 0 || threads.contains(&wait.pid);
    let of_file = evidence.file.as_ref().is_none_or(|file| match wait.object.as_str() {
        "inode" => wait.object_id == file.inode,
        "target" => file.targets.is_empty() || file.targets.contains(&(wait.object_id as u32)),
        "group" => file.groups.is_empty() || file.groups.contains(&(wait.object_id as u32)),
        _ => true,
    });
    of_process && of_file
}

fn depth_of(reason: &str) -> u8 {
    match reason {
        "disk" | "journal" => 88,
        "home" => 76,
        "group" => 74,
        "quota" => 73,
        "lease-recall" | "lock" => 65,
        "parked" | "recall" | "map" | "budget" | "queue" => 55,
        "servers" => 45,
        "answer" | "call-slot" => 35,
        _ => 10,
    }
}

/// `mount-1 has waited 4.2 s for t3's disk (5 calls)`
fn sentence(evidence: &Evidence, seen: &Seen, calls: u32) -> String {
    let wait = &seen.wait;
    let whom = if wait.holder.is_empty() { &wait.peer } else { &wait.holder };
    let (process, lasted, doing) = (&seen.process, time(wait.lasted_us), &wait.action);
    let calls = if calls > 1 { format!(" ({calls} calls)") } else { String::new() };
    let on = match object(wait).as_str() {
        "" => String::new(),
        object => format!(" on {object}"),
    };
    let what = match wait.reason.as_str() {
        "program" => {
            let (pid, user) = (wait.pid, evidence.users.name(wait.uid));
            return format!(
                "{doing}{on} of process {pid} (user {user}) at {process} has waited {lasted}{calls}"
            );
        }
        "answer" => format!("the answer of {whom} to {doing}"),
        "call-slot" => format!("room among its calls to {whom}, for {doing}"),
        "lease-recall" => format!("{whom} to return its lease{on}, for {doing}"),
        "lock" => format!("a lock{on} that another program holds"),
        "parked" => format!("{}{on}, for {doing}", if whom.is_empty() { "another operation" } else { whom }),
        "quota" => format!("space: {whom}"),
        "recall" if whom.is_empty() => format!("bytes{on} that are at home only"),
        "recall" => format!("bytes{on} that are at home only: {whom}"),
        "disk" => format!("the disk of {}", object(wait)),
        "journal" => "its journal's disk".to_owned(),
        "map" => "a newer cluster map".to_owned(),
        "budget" => "memory within its budget".to_owned(),
        "home" if whom.is_empty() => format!("home, to {doing}"),
        "home" => format!("home, to {doing}: {whom}"),
        "servers" => whom.clone(),
        other => format!("{other}{on}"),
    };
    format!("{process} has waited {lasted} for {what}{calls}")
}

fn action(evidence: &Evidence, seen: &Seen) -> String {
    let wait = &seen.wait;
    match wait.reason.as_str() {
        "lease-recall" => format!(
            "look at the mount {}: is its process stopped? its lease ends after {} of silence",
            wait.holder,
            time(u64::from(evidence.status.map.settings.lease_ms) * 1000)
        ),
        "disk" => "look at that disk (`dmesg`, `smartctl`); `weir iohist` shows how slow it is".to_owned(),
        "journal" => format!("look at the disk that {} has its directory on", seen.process),
        "home" => "look at that file server or its mount on the mover's machine".to_owned(),
        "lock" => "`weir file locks PATH` names the program that holds it".to_owned(),
        "recall" => "`weir file state PATH` and `weir relation list` show how far it is".to_owned(),
        "budget" => {
            "give the mount more memory (`--memory-mib`), or look at why its targets are slow".to_owned()
        }
        _ => String::new(),
    }
}

fn locks(evidence: &Evidence, found: &mut Vec<Finding>) {
    let Some(file) = &evidence.file else { return };
    let waits = found.iter().any(|f| f.text.contains("a lock"));
    let held = file.locks.iter().filter(|_| waits);
    found.extend(held.map(|lock| finding(68, lock.clone(), "end that program, or wait for it")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::watch::evidence::{FileFacts, Known, Namespace};
    use crate::users::Users;
    use weir_proto::coord::{ClusterStatus, TargetReport};
    use weir_proto::map::{
        ClusterMap, Group, Member, NamespaceEntry, Node, RunSeen, Scheme, Settings, Target,
    };
    use weir_proto::meta::{Time, Usage};
    use weir_proto::relation::{Direction, RelationId, RelationInfo};
    use weir_proto::version::Program;
    use weir_proto::volume::{Policy, Quota, Retention, Volume};
    use weir_proto::watch::WaitSeen;
    use weir_proto::{ClusterId, DiskUuid, Epoch, InodeId, NamespaceId, NodeId, PgId, VolumeId};

    /// File 7 of volume 2, on targets 1 and 2 in group 0. All is well.
    fn evidence() -> Evidence {
        let twice = Scheme { data: 2, parity: 0 };
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
        let member = |id| Member {
            target: TargetId(id),
            state: MemberState::Current,
            since: Epoch(1),
            lost_at: Epoch(0),
        };
        let group = Group {
            id: PgId(0),
            pool: "default".into(),
            scheme: twice,
            epoch: Epoch(1),
            members: vec![member(1), member(2)],
        };
        let leader = NamespaceEntry {
            id: NamespaceId(1),
            name: "main".into(),
            uuid: Default::default(),
            leader: Some(NodeId(3)),
            leader_epoch: Epoch(1),
        };
        let map = ClusterMap {
            cluster: ClusterId([1; 16]),
            version: 1,
            level: 1,
            settings: Settings { scheme: twice, cell_shift: 19, lease_ms: 10_000, target_silence_ms: 1 },
            nodes: vec![
                node(1, "storage-1", Role::Storage),
                node(2, "storage-2", Role::Storage),
                node(3, "meta", Role::Meta),
            ],
            targets: vec![target(1), target(2)],
            groups: vec![group],
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
        };
        let report = TargetReport {
            target: TargetId(1),
            failed: false,
            capacity: 1000,
            used: 100,
            under_replicated_cells: 0,
            damaged_blocks: 0,
            repaired_blocks: 0,
            stalled_ms: 0,
            position: 0,
        };
        let program = Program::this();
        let status =
            ClusterStatus { map: map.into(), targets: vec![report], uptime_ms: 1, links: vec![], program };
        let known = Known { volumes: vec![volume()], relations: vec![relation()], volume_of_file: Some(2) };
        let (groups, targets) = (vec![0], vec![1, 2]);
        Evidence {
            status,
            waits: vec![],
            silent: vec![],
            namespaces: vec![Namespace { name: "main".into(), known: Ok(known) }],
            users: Users::default(),
            file: Some(FileFacts { inode: 7, groups, targets, offline: 0, locks: vec![] }),
        }
    }

    fn volume() -> Volume {
        Volume {
            id: VolumeId(2),
            name: "work".into(),
            root: InodeId(9),
            path: "/work".into(),
            owner: 0,
            admins: vec![],
            quota: Quota { bytes_hard: Some(1000), ..Quota::NONE },
            bytes_over_since: None,
            inodes_over_since: None,
            policy: Policy { scheme: None, pool: None },
            retention: Retention::NOTHING,
            created: Time { nanos: 0 },
            deleting: false,
            usage: Usage { bytes: 100, ..Usage::default() },
            in_trash: Usage::default(),
        }
    }

    fn relation() -> RelationInfo {
        RelationInfo {
            id: RelationId(1),
            volume: VolumeId(2),
            volume_name: "work".into(),
            url: "file:///home".into(),
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

    fn wait(process: &str, reason: &str, holder: &str, (object, object_id): (&str, u64)) -> Seen {
        let wait = WaitSeen {
            reason: reason.into(),
            object: object.into(),
            object_id,
            action: "Open".into(),
            holder: holder.into(),
            peer: String::new(),
            uid: 0,
            pid: 0,
            lasted_us: 4_200_000,
            ended_ms: 0,
        };
        Seen { process: process.into(), wait }
    }

    fn map_of(evidence: &mut Evidence) -> &mut ClusterMap {
        std::sync::Arc::make_mut(&mut evidence.status.map)
    }
    fn known_of(evidence: &mut Evidence) -> &mut Known {
        evidence.namespaces[0].known.as_mut().unwrap()
    }
    fn silent(name: &str, role: Role) -> Silent {
        Silent { name: name.into(), role, why: "no answer within 1s".into() }
    }

    #[test]
    fn nothing_is_found_where_all_is_well() {
        assert_eq!(findings(&evidence(), &[]), []);
        assert_eq!(past(&evidence()), Vec::<String>::new());
    }

    /// What is wrong, and how the first sentence and the advice begin.
    type Case = (fn(&mut Evidence), &'static str, &'static str);

    #[test]
    fn each_cause_is_named_first_with_what_to_do() {
        let cases: [Case; 14] = [
            (|e| map_of(e).namespaces[0].leader = None, "no metadata server leads", "start its metadata"),
            (|e| e.namespaces[0].known = Err("no answer".into()), "the metadata server of", "see its log"),
            (
                |e| e.silent.push(silent("storage-1", Role::Storage)),
                "storage-1 (storage) does not answer",
                "look at the process",
            ),
            (|e| map_of(e).targets[1].state = TargetState::Down, "t2 (storage-2) is down", "start storage-2"),
            (
                |e| map_of(e).targets[0].state = TargetState::Failed,
                "t1 (storage-1) failed",
                "repair its disk",
            ),
            (
                |e| e.status.targets[0].stalled_ms = 3000,
                "the disk of t1 has completed nothing for 3.0 s",
                "look at that disk",
            ),
            (
                |e| map_of(e).groups[0].members[1].state = MemberState::Down,
                "1 placement groups have too few members: pg0 has 1 of 2 and needs 2 (without t2)",
                "start the storage nodes",
            ),
            (
                |e| known_of(e).volumes[0].usage.bytes = 960,
                "volume work has 960 B of its 1000 B bytes",
                "delete files",
            ),
            (
                |e| known_of(e).relations[0].home_failure = "gone".into(),
                "the home file:///home of volume work",
                "look at that file server",
            ),
            (|e| known_of(e).relations[0].movers = 0, "no mover works for volume work", "start a mover"),
            (
                |e| e.waits.push(wait("meta", "lease-recall", "n1:/b", ("inode", 7))),
                "meta has waited 4.2 s for n1:/b to return its lease",
                "look at the mount n1:/b",
            ),
            (
                |e| e.waits.push(wait("storage-1", "disk", "", ("target", 1))),
                "storage-1 has waited 4.2 s for the disk of target 1",
                "look at that disk",
            ),
            (
                |e| e.waits.push(wait("n1:/a", "recall", "no mover", ("inode", 7))),
                "n1:/a has waited 4.2 s for bytes",
                "`weir file state PATH`",
            ),
            (
                |e| e.waits.push(wait("mover", "home", "", ("", 0))),
                "mover has waited 4.2 s for home, to Open",
                "look at that file server",
            ),
        ];
        for (change, text, action) in cases {
            let mut evidence = evidence();
            // How it reaches the program.
            evidence.waits.push(wait("n1:/a", "program", "", ("inode", 7)));
            change(&mut evidence);
            let found = findings(&evidence, &[]);
            assert!(found[0].text.starts_with(text), "{text}: {found:#?}");
            assert!(found[0].action.starts_with(action), "{action}: {found:#?}");
            let last = &found.last().unwrap().text;
            assert!(last.starts_with("Open on inode 7 of process 0"), "{text}: {last}");
        }
    }

    #[test]
    fn what_concerns_another_file_is_left_out() {
        let mut evidence = evidence();
        evidence.waits.push(wait("meta", "lease-recall", "n1:/b", ("inode", 8)));
        evidence.waits.push(wait("storage-9", "disk", "", ("target", 9)));
        evidence.silent.push(silent("n5:/c", Role::Mount));
        known_of(&mut evidence).volume_of_file = Some(3);
        known_of(&mut evidence).volumes[0].usage.bytes = 1000;
        assert_eq!(findings(&evidence, &[]), []);
        evidence.file = None;
        assert_eq!(findings(&evidence, &[]).len(), 4, "of the whole cluster it is told");
    }

    #[test]
    fn a_silent_mount_matters_where_it_holds_a_lease() {
        let mut evidence = evidence();
        evidence.silent.push(silent("n1:/b", Role::Mount));
        evidence.waits.push(wait("meta", "lease-recall", "n1:/b", ("inode", 7)));
        let found = findings(&evidence, &[]);
        assert_eq!(found[0].text, "n1:/b (mount) does not answer: no answer within 1s");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn calls_that_wait_for_the_same_are_one_sentence() {
        let mut evidence = evidence();
        (0..3).for_each(|_| evidence.waits.push(wait("n1:/a", "servers", "storage-2", ("", 0))));
        let found = findings(&evidence, &[]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].text, "n1:/a has waited 4.2 s for storage-2 (3 calls)");
    }

    #[test]
    fn a_process_has_its_own_waits_only() {
        let mut evidence = evidence();
        let of = |pid| {
            let mut seen = wait("n1:/a", "program", "", ("inode", 7));
            seen.wait.pid = pid;
            seen
        };
        evidence.waits = vec![of(5), of(6)];
        evidence.file = None;
        assert_eq!(findings(&evidence, &[6]).len(), 1);
        assert!(findings(&evidence, &[6])[0].text.contains("process 6 (user 0)"));
    }

    #[test]
    fn a_wait_that_ended_is_told_afterwards() {
        let mut evidence = evidence();
        let mut seen = wait("meta", "lease-recall", "n1:/b", ("inode", 7));
        seen.wait.ended_ms = 90_000;
        evidence.waits.push(seen);
        assert_eq!(findings(&evidence, &[]), []);
        assert_eq!(
            past(&evidence),
            ["90.0 s ago: meta has waited 4.2 s for n1:/b to return its lease on inode 7, for Open"]
        );
    }
}
