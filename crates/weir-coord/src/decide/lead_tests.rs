//! Claims about which node may lead a namespace, by table, and about crashes between the two records of a
//! founding.
use super::*;
use weir_proto::map::{Node, Settings};
use weir_proto::version::{LEVEL_MAX, Program};
use weir_proto::{ClusterId, ErrorKind};

const META: NodeId = NodeId(1);
const OTHER: NodeId = NodeId(2);

fn uuid(n: u8) -> NamespaceUuid {
    NamespaceUuid([n; 16])
}
fn asks(node: NodeId, n: u8, changes: u64) -> LeadNamespace {
    LeadNamespace { node, namespace: "root".into(), uuid: uuid(n), changes, instead_of: None }
}
fn node(id: u32, role: Role, up: bool) -> Node {
    Node {
        id: NodeId(id),
        name: format!("m{id}"),
        role,
        host: "h".into(),
        addrs: vec![],
        up,
        program: Program::this(),
    }
}
fn empty_map() -> ClusterMap {
    ClusterMap {
        cluster: ClusterId([7; 16]),
        version: 1,
        level: LEVEL_MAX,
        settings: Settings {
            scheme: "ec:4+2".parse().unwrap(),
            cell_shift: 20,
            lease_ms: 10_000,
            target_silence_ms: 1000,
        },
        nodes: vec![node(1, Role::Meta, true), node(2, Role::Meta, true), node(3, Role::Mount, true)],
        last_namespace: NamespaceId(40),
        ..ClusterMap::absent()
    }
}
/// Namespace "root", founding 1, led by `META`, which is down unless `up`; 9 changes are recorded.
fn led(up: bool) -> (ClusterMap, Progress) {
    let (mut map, mut progress) = (empty_map(), Progress::new());
    let (namespace, _) = take_lead(&mut map, &progress, &asks(META, 1, 0)).unwrap();
    record_progress(&map, &mut progress, &RecordProgress { node: META, namespace, changes: 9 }).unwrap();
    map.nodes[0].up = up;
    (map, progress)
}

/// Whether the namespace gets a new number, or why it is refused.
type Expected = std::result::Result<bool, (ErrorKind, &'static str)>;

#[test]
fn only_the_namespaces_own_and_newest_directory_has_the_lead() {
    let replace =
        |n: u8, instead_of: u8| LeadNamespace { instead_of: Some(uuid(instead_of)), ..asks(OTHER, n, 0) };
    let named = |name: &str| LeadNamespace { namespace: name.into(), ..asks(OTHER, 1, 0) };
    // The request, whether the previous leader is up, and the error, or whether the namespace gets a new
    // number.
    let cases: [(LeadNamespace, bool, Expected); 16] = [
        // The directory unchanged or ahead; the same node again while it is up, another one when it is down.
        (asks(META, 1, 9), true, Ok(false)),
        (asks(META, 1, 12), true, Ok(false)),
        (asks(OTHER, 1, 9), false, Ok(false)),
        (asks(OTHER, 1, 9), true, Err((ErrorKind::Exists, "which is up"))),
        // An old copy; its store emptied.
        (asks(META, 1, 8), true, Err((ErrorKind::Denied, "an old copy"))),
        (asks(OTHER, 1, 0), false, Err((ErrorKind::Denied, "an old copy"))),
        // Another directory; an empty one that is founded without naming the existing namespace.
        (asks(OTHER, 2, 9), false, Err((ErrorKind::Denied, "may be swapped"))),
        (asks(OTHER, 2, 0), false, Err((ErrorKind::Exists, "--instead-of 01010101"))),
        // Given up: only the named one, and only while it has no leader.
        (replace(2, 1), false, Ok(true)),
        (replace(2, 3), false, Err((ErrorKind::Denied, "not 03030303"))),
        (replace(2, 1), true, Err((ErrorKind::Exists, "which is up"))),
        (LeadNamespace { node: META, ..replace(2, 1) }, true, Ok(true)),
        (LeadNamespace { changes: 5, ..replace(2, 1) }, false, Err((ErrorKind::Denied, "may be swapped"))),
        // An unknown name: founded, but not from a directory with contents.
        (named("second"), true, Ok(true)),
        (LeadNamespace { changes: 1, ..named("second") }, true, Err((ErrorKind::Denied, "does not know"))),
        (
            LeadNamespace { instead_of: Some(uuid(1)), ..named("second") },
            true,
            Err((ErrorKind::NotFound, "no namespace")),
        ),
    ];
    for (lead, up, expected) in cases {
        let (mut map, progress) = led(up);
        let before = map.clone();
        match (take_lead(&mut map, &progress, &lead), expected) {
            (Ok((namespace, epoch)), Ok(new_number)) => {
                assert_eq!(namespace, NamespaceId(if new_number { 42 } else { 41 }), "{lead:?}");
                assert_eq!(epoch, Epoch(if new_number { 1 } else { 2 }), "{lead:?}");
                assert_eq!(map.namespace(namespace).unwrap().leader, Some(lead.node));
                assert_eq!(map.namespaces.iter().filter(|v| v.name == lead.namespace).count(), 1);
            }
            (Err(e), Err((kind, says))) => {
                assert!(e.kind == kind && e.to_string().contains(says), "{lead:?}: {e:?}");
                assert_eq!(map, before, "a refusal changes nothing");
            }
            (got, expected) => panic!("{lead:?}: {got:?}, not {expected:?}"),
        }
    }
}

#[test]
fn a_number_is_never_assigned_again() {
    let (mut map, mut progress) = led(false);
    for n in 2..6 {
        let lead = LeadNamespace { instead_of: Some(uuid(n - 1)), ..asks(META, n, 0) };
        let (namespace, _) = take_lead(&mut map, &progress, &lead).unwrap();
        assert_eq!(namespace, NamespaceId(40 + u32::from(n)));
        record_progress(&map, &mut progress, &RecordProgress { node: META, namespace, changes: 1 }).unwrap();
        // Neither the abandoned directory nor its number is accepted.
        assert!(take_lead(&mut map, &progress, &asks(META, n - 1, 9)).is_err());
        assert_eq!(map.namespace(NamespaceId(41)), None);
    }
    map.last_namespace = NamespaceId(u32::MAX);
    let last = LeadNamespace { namespace: "more".into(), ..asks(META, 9, 0) };
    assert_eq!(take_lead(&mut map, &progress, &last).unwrap_err().kind, ErrorKind::NoSpace);
}

/// The directory is founded, then the coordinator makes the entry, then the directory holds changes, then
/// they are reported to the coordinator. If any later steps are lost, the same directory continues with
/// the same number.
#[test]
fn a_founding_that_was_interrupted_anywhere_goes_on() {
    for steps in 0..=4 {
        let (mut map, mut progress, mut changes) = (empty_map(), Progress::new(), 0);
        let mut namespace = None;
        if steps >= 1 {
            namespace = Some(take_lead(&mut map, &progress, &asks(META, 1, 0)).unwrap().0);
        }
        if steps >= 2 {
            changes = 1;
        }
        if let (Some(namespace), 3..) = (namespace, steps) {
            record_progress(&map, &mut progress, &RecordProgress { node: META, namespace, changes }).unwrap();
        }
        if steps >= 4 {
            changes = 2; // and the report to the coordinator is lost
        }
        let (again, _) = take_lead(&mut map, &progress, &asks(META, 1, changes)).unwrap();
        assert_eq!(again, NamespaceId(41), "after {steps} steps");
        assert_eq!(map.namespaces.len(), 1);
    }
}

#[test]
fn progress_never_goes_back_and_only_the_leader_reports_it() {
    let (mut map, mut progress) = led(false);
    let report =
        |node, namespace, changes| RecordProgress { node, namespace: NamespaceId(namespace), changes };
    record_progress(&map, &mut progress, &report(META, 41, 5)).unwrap();
    assert_eq!(progress[&NamespaceId(41)], 9);
    let unknown = record_progress(&map, &mut progress, &report(META, 42, 1)).unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::NotFound);
    take_lead(&mut map, &progress, &asks(OTHER, 1, 9)).unwrap();
    let late = record_progress(&map, &mut progress, &report(META, 41, 99)).unwrap_err();
    assert_eq!(late.kind, ErrorKind::Exists);
    assert_eq!(progress[&NamespaceId(41)], 9);
}

#[test]
fn names_and_roles_are_checked() {
    let long = "x".repeat(65);
    for name in ["", "a/b", "a\nb", &long] {
        let refused = may_found(&empty_map(), name, None, None).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Invalid, "{name:?}");
    }
    let mount = take_lead(&mut empty_map(), &Progress::new(), &asks(NodeId(3), 1, 0)).unwrap_err();
    assert_eq!(mount.kind, ErrorKind::Denied);
}
