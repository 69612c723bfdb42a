//! One table of troubles: a change of a healthy cluster, and the expected report.
use super::world::{HOME, NOW_S, World, condition, owners, world};
use super::*;
use crate::machine::{Reach, RoleName};
use serde_json::json;
use weir_proto::backup::{BackupEnd, BackupOutcome};
use weir_proto::condition::{METADATA_FULL, NodeDisk, STARTS};
use weir_proto::coord::{ClientWaiting, CutLink, RebuildStatus, RebuildWaiting, Wait};
use weir_proto::export::ExportMade;
use weir_proto::map::{Member, MemberState, Role, Scheme, TargetState};
use weir_proto::meta::Time;
use weir_proto::relation::RelationState;
use weir_proto::volume::WriteFloor;
use weir_proto::{Epoch, NodeId, TargetId, VolumeId};

#[test]
fn a_healthy_cluster_has_no_troubles() {
    assert_eq!(world().troubles(), []);
    // No data is on the group of t2 alone.
    let mut unused = world();
    unused.map().groups[1].members[0].state = MemberState::Down;
    assert_eq!(unused.troubles(), []);
    // No volume has a home, so no mover is needed.
    let mut no_homes = world();
    no_homes.known().relations.clear();
    no_homes.known().backups.clear();
    no_homes.processes.truncate(1);
    assert_eq!(no_homes.troubles(), []);
}

#[test]
fn a_node_is_not_missed_after_its_targets_were_removed() {
    let mut world = world();
    let mut left = world.map().nodes[1].clone();
    (left.id, left.name, left.up) = (NodeId(4), "storage-3".into(), false);
    world.map().nodes.push(left);
    assert_eq!(world.troubles(), []);
}

fn export(age_s: Option<u64>, failure: &str) -> ExportState {
    let made = |age: u64| ExportMade {
        file: "/exports/x".into(),
        began: Time { nanos: (NOW_S - age) as i64 * 1_000_000_000 },
        entries: 1,
        bytes: 1,
    };
    let (last, failure) = (age_s.map(made), failure.to_owned());
    ExportState { dir: "/exports".into(), every_s: 3600, keep: 7, last, failure }
}

fn failing() -> NodeTrouble {
    let (code, about) = ("snapshot-late".to_owned(), "work".to_owned());
    let (text, action) = ("no snapshot".to_owned(), "look".to_owned());
    NodeTrouble { code, severity: Severity::Warning, about, text, action }
}

fn disk(free: u64) -> NodeDisk {
    NodeDisk { dir: "/w/meta".into(), free, capacity: 100 << 30 }
}

fn holder(name: &str, until: u64) -> Holder {
    let (name, from) = (name.to_owned(), "10.0.0.1".to_owned());
    Holder { name, roles: vec![], serial: 1, joined: 1, until, from, removed: false, round: 1 }
}

fn session(client: &str, last_contact_ms: u64) -> SessionShown {
    SessionShown {
        session: weir_proto::SessionId(1),
        client: client.into(),
        node: String::new(),
        role: None,
        addr: String::new(),
        last_contact_ms,
        resumed: true,
        open: 2,
        open_to_write: 2,
        leases: 1,
        write_leases: 1,
        awaited: 0,
        locks: 0,
        lock_waits: 0,
    }
}

/// Healthy states that look similar.
#[test]
fn values_below_the_limits_are_no_troubles() {
    let table: &[fn(&mut World)] = &[
        |w| w.conditions[0].last_contact_ms = 15_000,
        |w| w.known().exports = export(Some(3000), ""),
        |w| w.known().exports = export(None, ""),
        |w| w.known().exports = ExportState { every_s: 0, ..export(None, "as it was") },
        |w| w.holders = vec![holder("meta", NOW_S + 9 * 86_400)],
        |w| w.holders = vec![Holder { removed: true, ..holder("meta", NOW_S) }],
        |w| w.conditions[0].condition.disks = vec![disk(6 << 30)],
        |w| w.conditions[0].condition.disks = vec![NodeDisk { capacity: 1000 << 30, ..disk(5 << 30) }],
        |w| w.known().sessions = vec![session("python on h7", 20_000)],
        |w| w.relation().lag_ms = 3_600_000,
        |w| w.known().owners = OwnersNear::default(),
        |w| w.status.targets[0].stalled_ms = 20,
        // It is drained as planned.
        |w| w.leaving.draining.extend([TargetId(1)]),
    ];
    for (row, change) in table.iter().enumerate() {
        let mut world = world();
        change(&mut world);
        assert_eq!(world.troubles(), [], "row {row}");
    }
}

fn refuses(target: &str) -> NodeTrouble {
    let text = format!("{target} (storage-1) refuses new data: 5 bytes are free on its file system");
    NodeTrouble { code: REFUSES.into(), about: target.into(), text, ..failing() }
}

#[test]
fn a_target_that_refuses_data_is_one_trouble_with_its_cause() {
    let mut world = world();
    let mut node = condition("storage-1", Role::Storage);
    node.condition.troubles = vec![refuses("t1")];
    world.conditions.push(node);
    world.status.targets[0].used = 990;
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].code.as_str(), found[0].about.as_str()), (REFUSES, "t1"));
    assert_eq!(exit_code(found[0].severity), 1);
    // It has nothing left: then no group of two copies on t1 and t2 takes data.
    world.status.targets[0].used = 1000;
    let found = world.troubles();
    assert_eq!(found.iter().map(|t| t.code.as_str()).collect::<Vec<_>>(), ["space-full", REFUSES]);
    assert!(found[0].text.starts_with("files with replica:2 take no more data"), "{}", found[0].text);
    assert!(found[0].text.contains("a target is full (t1 refuses data)"), "{}", found[0].text);
    // Its node has been silent since.
    world.conditions[2].last_contact_ms = 60_000;
    let found = world.troubles();
    assert_eq!(found.iter().map(|t| t.code.as_str()).collect::<Vec<_>>(), ["target-full", "space-full"]);
}

#[test]
fn a_metadata_server_without_space_is_one_trouble() {
    let mut world = world();
    let node = &mut world.conditions[0];
    node.condition.disks = vec![disk(1 << 20)];
    let (code, about) = (METADATA_FULL.to_owned(), node.node.clone());
    let (severity, text) = (Severity::Critical, "the disk of meta is full".to_owned());
    node.condition.troubles = vec![NodeTrouble { code, severity, about, text, ..failing() }];
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].code.as_str(), exit_code(found[0].severity)), (METADATA_FULL, 2));
}

/// A stopped mount is also silent at the coordinator.
#[test]
fn a_mount_that_hangs_is_one_trouble() {
    let mut world = world();
    world.mounts[0].state = Reach::Silent;
    world.conditions[1].last_contact_ms = 60_000;
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].code, "mount-silent");
}

#[test]
fn each_trouble_is_one_sentence_of_its_severity() {
    use Severity::{Critical, Degraded, Note, Warning};
    type Change = fn(&mut World);
    let table: &[(Change, Severity, &str, &str)] = &[
        (
            |w| w.lose(1),
            Degraded,
            "storage-1",
            "storage-1 is down: t1 is missing from 1 placement group: `weir up --dir /w` starts it again, and what",
        ),
        (
            |w| {
                w.lose(1);
                w.holders = vec![Holder { removed: true, ..holder("storage-1", NOW_S) }];
            },
            Degraded,
            "storage-1",
            "storage-1 is down: t1 is missing from 1 placement group: its certificate was revoked",
        ),
        (
            |w| w.audit = AuditState { waiting: 3, failure: "no space".into(), ..AuditState::default() },
            Warning,
            "audit log",
            "the audit log of the coordinator cannot be written (no space): 3 records wait, 0 are lost",
        ),
        (
            |w| w.known().audit.lost = 2,
            Note,
            "audit log",
            "2 records of the audit log of the metadata server of \"root\" were lost",
        ),
        (|w| w.map().targets[0].state = TargetState::Failed, Degraded, "t1", "`weir target clear t1`"),
        (|w| w.map().targets[0].state = TargetState::Down, Degraded, "t1", "although its process is up"),
        (
            |w| w.map().groups[0].members[0].state = MemberState::Behind,
            Degraded,
            "t1",
            "t1 (storage-1) is being repaired in 1 placement group",
        ),
        (
            |w| {
                let member = &mut w.map().groups[0].members[0];
                (member.state, member.lost_at) = (MemberState::Behind, Epoch(2));
            },
            Degraded,
            "t1",
            "t1 (storage-1) does not have its data yet, and is filled from the others in 1 placement group",
        ),
        (
            |w| {
                for member in w.map().groups[0].members.iter_mut().rev() {
                    (member.state, member.lost_at) = (MemberState::Behind, Epoch(2));
                }
            },
            Critical,
            "placement groups",
            "data is lost on 1 placement group: t1, t2 returned without what they had",
        ),
        (
            |w| w.status.targets[0].under_replicated_cells = 3,
            Degraded,
            "t1",
            "3 cells of stripes on t1 (storage-1) lack",
        ),
        (|w| w.status.targets[0].damaged_blocks = 2, Degraded, "t1", "2 blocks on t1 (storage-1) failed"),
        (
            |w| (w.status.targets[0].damaged_blocks, w.status.targets[0].repaired_blocks) = (2, 2),
            Note,
            "t1",
            "were repaired",
        ),
        (|w| w.status.targets[0].used = 960, Warning, "t1", "t1 (storage-1) is 96 % full (40 B free)"),
        (|w| w.status.targets[0].stalled_ms = 2500, Warning, "t1", "has completed nothing for 2.5 s"),
        (
            |w| w.map().nodes[2].up = false,
            Critical,
            "root",
            "namespace \"root\" has no active metadata server; files are unavailable: `weir up --dir /w`",
        ),
        (|w| w.map().namespaces.clear(), Critical, "meta", "no metadata server has started yet"),
        (|w| w.set_known(Err("no answer".into())), Critical, "root", "does not answer (no answer)"),
        (
            |w| {
                w.set_known(Err("no answer".into()));
                let text = "its metadata server has started and waits for 1 client, 8 s at most".into();
                w.namespaces[0].starting = Some(NodeTrouble { text, code: STARTS.into(), ..failing() });
            },
            Warning,
            "root",
            "namespace \"root\": its metadata server has started and waits for 1 client, 8 s at most: look",
        ),
        (
            |w| w.processes[1].lives = false,
            Warning,
            "mover-1",
            "mover-1 is not running: `weir up --dir /w` starts it again (its log is /w/log/x)",
        ),
        (|w| w.relation().movers = 0, Warning, "movers", "no mover is running, so nothing is copied home"),
        (
            |w| w.homes.missing.extend([HOME.into()]),
            Warning,
            "r1",
            "r1: the home of volume work is missing: there is no directory file:///home: make or mount it",
        ),
        (
            |w| w.relation().home_failure = "Permission denied".into(),
            Warning,
            "r1",
            "cannot be used: Permission denied",
        ),
        (
            |w| w.relation().state = RelationState::Paused { why: "by an administrator".into() },
            Warning,
            "r1",
            "is paused by an administrator: `weir relation resume r1`",
        ),
        (|w| w.relation().state = RelationState::Diverged { items: 1 }, Warning, "r1", "1 conflict at home"),
        (|w| w.volume().usage.bytes = 1000, Warning, "work", "volume work is full (1000 B of 1000 B), so"),
        (|w| w.volume().usage.bytes = 950, Warning, "work", "volume work is 95 % full (950 B of 1000 B)"),
        (|w| w.volume().usage.files = 98, Warning, "work", "full (100 files and directories of 100 files"),
        (
            |w| {
                w.volume().quota.bytes_soft = Some(50);
                w.volume().bytes_over_since = Some(Time { nanos: 5 });
            },
            Warning,
            "work",
            "above its soft limit (100 B of 50 B)",
        ),
        (
            |w| w.known().owners = owners(1000, 1),
            Note,
            "user 4294967290 in work",
            "user 4294967290 is at the limit (1000 B of 1000 B), and can add nothing in work: delete files",
        ),
        (|w| w.known().backups[0].late = true, Warning, "work", "LATE"),
        (
            |w| {
                let outcome = BackupOutcome::Failed { why: "no space".into() };
                let at = Time { nanos: 0 };
                w.known().backups[0].last = Some(BackupEnd { began: at, ended: at, outcome });
            },
            Warning,
            "work",
            "no space",
        ),
        (
            |w| w.homes.missing.extend(["file:///backups".into()]),
            Warning,
            "work",
            "there is no directory file:///backups",
        ),
        (
            |w| w.mounts[0].state = Reach::Dead,
            Warning,
            "mount-1",
            "mount-1 at /m is dead (its process has ended): `weir up --dir /w`",
        ),
        (|w| w.mounts[0].state = Reach::Silent, Warning, "mount-1", "does not answer"),
        (|w| w.mounts[0].state = Reach::NotMounted, Warning, "mount-1", "is not mounted"),
        (
            |w| (w.mounts[0].losses, w.mounts[0].last_losses) = (2, json!([{ "what": "file i7: gone" }])),
            Critical,
            "mount-1",
            "2 times since it was mounted; the last: file i7: gone",
        ),
        (|w| w.dead_mounts.push("/x".into()), Note, "/x", "`weir unmount /x`"),
        (|w| w.homes.silent.extend([HOME.into()]), Warning, "r1", "does not answer: file:///home"),
        (
            |w| {
                let relation = w.relation();
                (relation.state, relation.lag_ms) = (RelationState::Copying {}, 3_600_000);
            },
            Warning,
            "r1",
            "the home of volume work is 60 min behind (0 B to copy): nothing is copied",
        ),
        (
            |w| {
                let relation = w.relation();
                (relation.state, relation.lag_ms, relation.rate) =
                    (RelationState::Copying {}, 3_600_000, 1 << 20);
            },
            Note,
            "r1",
            "it gets 1.00 MiB/s",
        ),
        (
            |w| w.known().exports = export(Some(10_000), "disk full"),
            Warning,
            "root",
            "the metadata of namespace \"root\" was not exported to /exports: disk full",
        ),
        (
            |w| w.known().exports = export(Some(10_000), ""),
            Warning,
            "root",
            "the last export of namespace \"root\" began 2 h ago, and one is due every 60 min",
        ),
        (|w| w.known().failing.push(failing()), Warning, "work", "no snapshot: look"),
        (|w| w.conditions[0].condition.troubles.push(failing()), Warning, "work", "no snapshot: look"),
        (
            |w| w.conditions[0].last_contact_ms = 25_000,
            Warning,
            "mover-1",
            "mover mover-1 has reported nothing for 25 s: its process died, or hangs: see whether it is stopped",
        ),
        (
            |w| {
                w.conditions.push(condition("laptop", Role::Mount));
                let laptop = &mut w.conditions[2];
                (laptop.last_contact_ms, laptop.condition.unwritten_bytes) = (200_000, 1 << 20);
            },
            Warning,
            "laptop",
            "mount laptop has reported nothing for 3 min: its process died, or hangs; programs had written 1.00 MiB",
        ),
        (
            |w| {
                for node in ["meta", "meta-2"] {
                    let mut full = condition(node, Role::Meta);
                    full.condition.disks = vec![disk(1 << 30)];
                    w.conditions.push(full);
                }
            },
            Warning,
            "meta",
            "the disk of meta, meta-2 is 99 % full (1.00 GiB free, directory /w/meta)",
        ),
        (
            |w| w.conditions[0].condition.release = "0.9".into(),
            Note,
            "cluster",
            "programs of several releases run: ",
        ),
        (|w| w.map().level -= 1, Note, "cluster", "`weir upgrade finish`"),
        (
            |w| w.holders = vec![holder("meta", NOW_S + 2 * 86_400)],
            Warning,
            "meta",
            "the certificate of meta ends in 2 d, and was not renewed",
        ),
        (|w| w.holders = vec![holder("meta", NOW_S - 60)], Warning, "meta", "ended 60 s ago"),
        (|w| w.holders = vec![holder("laptop", NOW_S - 60)], Note, "laptop", "`weir node remove laptop`"),
        (
            |w| w.unanswered.push(("the list of clocks".into(), "no answer".into())),
            Warning,
            "status",
            "the list of clocks was not answered (no answer)",
        ),
        (
            |w| w.known().sessions = vec![session("python on h7", 40_000)],
            Warning,
            "python on h7",
            "python on h7 has been silent for 40 s, and may have unsaved changes of 2 files",
        ),
        (
            |w| {
                let wait = Wait { what: "t1".into(), ms: 5000, calls: 2 };
                w.waiting.clients = vec![ClientWaiting { client: "mount-1:/m".into(), waits: vec![wait] }];
            },
            Degraded,
            "mount-1:/m",
            "mount-1:/m: 2 calls wait for t1, no answer for 5 s",
        ),
    ];
    for (change, severity, about, text) in table {
        let mut world = world();
        change(&mut world);
        let found = world.troubles();
        assert!(found.len() == 1, "{text:?}: {found:#?}");
        let one = &found[0];
        assert_eq!((one.severity, &*one.about), (*severity, *about), "{}", one.text);
        let shown = format!("{}: {}", one.text, one.action);
        assert!(shown.contains(text), "{text:?} is not in {shown:?}");
        assert!(one.code.chars().all(|c| c == '-' || c.is_ascii_lowercase()), "{:?}", one.code);
    }
}

#[test]
fn a_cut_link_names_both_ends_or_the_one_that_is_cut_off() {
    let reported = |links: &[(&str, u32)]| {
        let mut world = world();
        let link = |(from, to): &(&str, u32)| CutLink {
            from: (*from).into(),
            role: Role::Mount,
            to: NodeId(*to),
            since_ms: 12_345,
            why: "no answer".into(),
        };
        world.status.links = links.iter().map(link).collect();
        world.troubles().into_iter().map(|t| format!("{}: {}", t.text, t.action)).collect::<Vec<_>>()
    };
    assert_eq!(
        reported(&[("m5", 1)]),
        [
            "m5 has not reached t1 (storage-1) for 12 s, its calls go around: see to the network between them (no answer)"
        ]
    );
    assert_eq!(
        reported(&[("m5", 1), ("m6", 1)]),
        [
            "m5, m6 have not reached t1 (storage-1) for 12 s, their calls go around: 2 nodes cannot, see to its network (no answer)"
        ]
    );
    let cut_off = reported(&[("m5", 1), ("m5", 2)]);
    assert!(cut_off.len() == 1 && cut_off[0].contains("see to the network of m5"), "{cut_off:?}");
}

/// A target that has no place any more, in the world of two copies: its groups have others.
fn rebuilt(world: &mut World) {
    world.lose(1);
    world.leaving.lost.insert(TargetId(1));
    for member in world.map().groups.iter_mut().flat_map(|g| &mut g.members).filter(|m| m.target.0 == 1) {
        (member.target, member.state) = (TargetId(2), MemberState::Current);
    }
}

#[test]
fn the_remains_of_a_target_that_was_rebuilt_are_a_note() {
    let mut world = world();
    rebuilt(&mut world);
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(
        (found[0].severity, &*found[0].code, &*found[0].about),
        (Severity::Note, "target-unneeded", "t1")
    );
    assert!(found[0].action.contains("`weir target remove t1`"), "{found:#?}");
    let mut failed = world;
    failed.map().nodes[0].up = true;
    failed.map().targets[0].state = TargetState::Failed;
    assert_eq!(failed.troubles()[0].code, "target-unneeded");
}

#[test]
fn a_drain_that_waits_is_never_shown_as_lost() {
    let waiting = |why: &str| RebuildWaiting { target: TargetId(1), why: why.into(), places: 3 };
    let mut drained = world();
    drained.leaving.draining.insert(TargetId(1));
    drained.leaving.waiting = vec![waiting("there is no target to take its place")];
    let found = drained.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].severity, &*found[0].code), (Severity::Warning, "drain-waits"));
    assert!(
        found[0].text.ends_with("it still serves its data") && !found[0].text.contains("lost"),
        "{found:#?}"
    );
    assert!(found[0].action.starts_with("leave its disk as it is"), "{found:#?}");
    let mut lost = world();
    lost.leaving.waiting = drained.0.leaving.waiting;
    assert_eq!(lost.troubles()[0].code, "rebuild-waits");
    let rebuild = RebuildStatus {
        after_s: 600,
        gone: vec![],
        lost: vec![],
        waiting: vec![waiting("other places are filled first")],
        refills: vec![],
        draining: vec![TargetId(1)],
        paused: false,
        since_ms: 0,
        places_total: 0,
        left_bytes: 0,
        bytes_per_s: 0,
        left_ms: 0,
    };
    assert!(Leaving::of(rebuild).waiting.is_empty(), "its turn comes");
}

/// t1 is dead, and all processes notice.
#[test]
fn one_dead_target_is_one_trouble() {
    let mut world = world();
    world.lose(1);
    world.status.targets[1].under_replicated_cells = 7;
    let link = |from: &str| CutLink {
        from: from.into(),
        role: Role::Mount,
        to: NodeId(1),
        since_ms: 12_345,
        why: "refused".into(),
    };
    world.status.links = vec![link("m5"), link("m6")];
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].code, "storage-down");
    // Clients that wait are shown, once, with the cause.
    let wait = |client: &str, calls| ClientWaiting {
        client: client.into(),
        waits: vec![Wait { what: "t1".into(), ms: 5000, calls }],
    };
    world.waiting.clients = vec![wait("m5:/m", 2), wait("m6:/m", 1), wait("m7:/m", 4)];
    let found = world.troubles();
    assert_eq!(found.len(), 2, "{found:#?}");
    assert_eq!(found[1].text, "m5:/m and 2 other clients: 7 calls wait for t1, no answer for 5 s");
    assert_eq!(found[1].action, "it follows from the trouble of storage-1");
}

#[test]
fn targets_that_are_filled_for_a_lost_one_are_one_trouble() {
    let mut world = world();
    let map = world.map();
    let third = Target { id: TargetId(3), ..map.targets[0].clone() };
    map.targets.push(third);
    let members = &mut map.groups[0].members;
    let current = Member { target: TargetId(3), ..members[0] };
    members.iter_mut().for_each(|member| member.state = MemberState::Behind);
    members.push(current);
    world.leaving.lost.insert(TargetId(9));
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].text, "t1, t2 are being repaired or filled; they take the places of t9");
}

#[test]
fn a_disk_that_hangs_explains_why_its_target_is_out_of_service() {
    let mut world = world();
    world.status.targets[0].stalled_ms = 9000;
    world.map().targets[0].state = TargetState::Down;
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((found[0].severity, &*found[0].code), (Severity::Degraded, "target-stalled"));
    assert!(found[0].text.contains("completed nothing for 9.0 s; it is out of service"), "{found:#?}");
}

#[test]
fn a_mount_that_was_killed_for_memory_is_named_with_that() {
    let mut world = world();
    world.mounts[0].state = Reach::Dead;
    let mut process = |out_of_memory| {
        world.processes.truncate(2);
        let (name, log) = ("mount-1".to_owned(), "/w/log/mount-1.log".into());
        world.processes.push(ProcessState { name, role: RoleName::Mount, lives: false, out_of_memory, log });
        world.troubles().remove(0)
    };
    assert!(process(false).text.ends_with("is dead (its process has ended)"));
    let killed = process(true);
    assert!(
        killed.text.ends_with("is dead (the kernel killed its process for want of memory)"),
        "{killed:?}"
    );
    assert!(killed.action.contains("`--memory-mib`"), "{killed:?}");
}

#[test]
fn a_dead_mount_of_another_cluster_is_no_warning_of_this_one() {
    let mut world = world();
    world.processes.clear(); // a command that names the cluster by an address
    world.dead_mounts.push("/x".into());
    let found = world.troubles();
    assert_eq!((found[0].severity, found.len()), (Severity::Note, 1), "{found:#?}");
    assert!(found[0].action.ends_with("it may be of another cluster"), "{found:#?}");
    let mut own = condition("n1:/x", Role::Mount);
    own.last_contact_ms = 60_000;
    world.conditions.push(own);
    assert!(world.troubles().iter().any(|t| t.severity == Severity::Warning && t.about == "/x"));
}

#[test]
fn a_home_whose_calls_hang_is_silent_for_its_relation() {
    let mut world = world();
    let (code, action) = ("home-silent".to_owned(), "see".to_owned());
    let text = "mover-1 has waited 40 s for file:///home, to sync a file".to_owned();
    let silent = NodeTrouble { code, severity: Severity::Warning, about: HOME.into(), text, action };
    world.conditions[0].condition.troubles.push(silent);
    let found = world.troubles();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!((&*found[0].code, &*found[0].about), ("home-silent", "r1"));
    assert!(
        found[0].text.ends_with("does not answer: mover-1 has waited 40 s for file:///home, to sync a file")
    );
    let mut given_up = super::world::world();
    given_up.relation().home_failure = "write: file:///home does not answer (no answer for 60s)".into();
    assert_eq!(given_up.troubles()[0].code, "home-silent");
}

#[test]
fn a_standby_that_this_machine_knows_to_be_dead_is_named_once() {
    let mut world = world();
    let (code, action) = ("standby-missing".to_owned(), "start it".to_owned());
    let text = "the standby coordinator coord-3 has been away for 30 s, and cannot take over".to_owned();
    let missing = NodeTrouble { code, severity: Severity::Warning, about: "coord-3".into(), text, action };
    let mut leading = condition("coord-1", Role::Coordinator);
    leading.condition.troubles.push(missing);
    world.conditions.push(leading);
    assert_eq!(world.troubles()[0].code, "standby-missing", "on another machine");
    let (name, log) = ("coord-3".to_owned(), "/w/log/coord-3.log".into());
    let lives = false;
    world.processes.push(ProcessState { name, role: RoleName::Coord, lives, out_of_memory: false, log });
    let codes: Vec<String> = world.troubles().into_iter().map(|t| t.code).collect();
    assert_eq!(codes, ["standby-down"]);
}

#[test]
fn a_volume_below_its_write_floor_is_named_with_it() {
    let with_floor = |members| {
        let mut world = world();
        world.known().write_floors = vec![WriteFloor { volume: VolumeId(2), members }];
        world
    };
    assert_eq!(with_floor(2).troubles(), []);
    let mut degraded = with_floor(2);
    degraded.lose(1);
    let found = degraded.troubles();
    let one = found.iter().find(|t| t.code == "volume-below-floor").expect("it is reported");
    assert_eq!((one.severity, &*one.about), (Severity::Critical, "work"));
    assert_eq!(
        one.text,
        "volume work takes no writes in 1 placement group that has 1 current member; its write floor is 2"
    );
    let mut kept = with_floor(1);
    kept.lose(1);
    assert!(kept.troubles().iter().all(|t| t.code != "volume-below-floor"));
}

#[test]
fn the_headline_says_what_is_true_of_the_data() {
    let headline = |world: &World| state(&world.troubles());
    assert_eq!(headline(&world()), ("healthy", ""));
    let with = |change: &dyn Fn(&mut World)| {
        let mut world = world();
        change(&mut world);
        headline(&world)
    };
    let reduced = ": data is available with reduced redundancy";
    let waits = |world: &mut World| {
        let wait = Wait { what: "namespace main".into(), ms: 5000, calls: 2 };
        world.waiting.clients = vec![ClientWaiting { client: "mount-1:/m".into(), waits: vec![wait] }];
    };
    let mover_dies = |world: &mut World| world.processes[1].lives = false;
    let loses_and_mutes = |world: &mut World| {
        world.lose(1);
        world.mutes = vec![Mute { code: "storage-down".into(), about: String::new(), until_s: NOW_S + 60 }];
    };
    assert_eq!(with(&mover_dies), ("warning", ": all data is available and redundant"));
    assert_eq!(with(&waits), ("degraded", ": all data is redundant, and calls of clients wait"));
    assert_eq!(with(&|world| world.lose(1)), ("degraded", reduced));
    let both = |world: &mut World| {
        world.lose(1);
        waits(world);
    };
    assert_eq!(with(&both), ("degraded", reduced), "the data counts more than the calls");
    assert_eq!(with(&loses_and_mutes), ("healthy", ""));
    let muted_and_another = |world: &mut World| {
        loses_and_mutes(world);
        mover_dies(world);
    };
    assert_eq!(with(&muted_and_another), ("warning", reduced), "a mute restores no redundancy");
}

#[test]
fn muted_troubles_are_last_and_marked() {
    let mute = |about: &str| Mute { code: "mover-down".into(), about: about.into(), until_s: NOW_S + 60 };
    let found = |mutes| {
        let mut world = world();
        world.lose(1);
        world.processes[1].lives = false;
        world.mutes = mutes;
        world.troubles().into_iter().map(|t| (t.about, t.muted_until)).collect::<Vec<_>>()
    };
    let down = ("storage-1".to_owned(), None);
    for mutes in [vec![mute("")], vec![mute("mover-1")]] {
        assert_eq!(found(mutes), [down.clone(), ("mover-1".into(), Some(NOW_S + 60))]);
    }
    assert_eq!(found(vec![mute("mover-2")]), [down, ("mover-1".into(), None)]);
}

#[test]
fn the_worst_trouble_is_first() {
    let mut both = world();
    both.processes[1].lives = false;
    both.lose(1);
    both.lose(2);
    let found = both.troubles();
    assert_eq!(found[0].severity, Severity::Critical);
    assert!(
        found[0].text.starts_with("too few members of 1 placement group are usable"),
        "{}",
        found[0].text
    );
    assert!(found.is_sorted_by_key(|t| Reverse(t.severity)), "{found:#?}");
    assert_eq!(found.last().unwrap().about, "mover-1");
    let mut standby = world();
    (standby.processes[1].role, standby.processes[1].lives) = (RoleName::Coord, false);
    assert!(standby.troubles()[0].text.contains("may be needed"));
}

#[test]
fn offline_data_is_unavailable_without_home_or_movers() {
    for change in
        [|w: &mut World| w.homes.missing.extend([HOME.into()]), |w: &mut World| w.relation().movers = 0]
    {
        let mut world = world();
        world.volume().usage.evicted = 10;
        change(&mut world);
        let found = world.troubles();
        assert_eq!(found[0].severity, Severity::Critical, "{found:#?}");
        assert!(found[0].text.contains("evicted files cannot be read"), "{found:#?}");
    }
}

/// Files of a volume with a policy of its own are on other groups.
#[test]
fn groups_of_a_volumes_policy_count() {
    let mut single = world();
    single.volume().policy.scheme = Some(Scheme { data: 1, parity: 0 });
    single.map().groups[1].members[0].state = MemberState::Down;
    let found = single.troubles();
    assert_eq!(found[0].severity, Severity::Critical, "{found:#?}");
}

#[test]
fn users_at_limits_beyond_the_worst_are_counted() {
    let mut world = world();
    world.known().owners = owners(990, 31);
    let found = world.troubles();
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[0].text.contains("uses 99 % of the limit (990 B of 1000 B)"), "{found:#?}");
    assert!(found[1].text.starts_with("30 more users and groups use 95 % or more"), "{found:#?}");
    assert_eq!(exit_code(found[0].severity), 0, "the cluster is healthy");
}
