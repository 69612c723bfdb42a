//! The etcd of a cluster on one machine, for tests and demonstrations: its members, and how they are started.
//!
//! They listen on the loopback address without certificates. For other uses the administrator sets up etcd.
use crate::local::local_cluster::{LocalCluster, Process, RoleName};

fn peer_url(member: &Process) -> String {
    format!("http://127.0.0.1:{}", member.peer_port)
}

/// The arguments of a member's program.
pub fn args(local: &LocalCluster, member: &Process) -> Vec<String> {
    let members = local.of_role(RoleName::Etcd).map(|m| format!("{}={}", m.name, peer_url(m)));
    let pairs = [
        ("name", member.name.clone()),
        ("data-dir", member.path.join("data").display().to_string()),
        ("listen-client-urls", member.client_url()),
        ("advertise-client-urls", member.client_url()),
        ("listen-peer-urls", peer_url(member)),
        ("initial-advertise-peer-urls", peer_url(member)),
        ("initial-cluster", members.collect::<Vec<_>>().join(",")),
        ("initial-cluster-token", local.manifest.cluster.0.to_string()),
        // The default of a second is for long distances. It has to end well within the coordinator's lease.
        ("election-timeout", "500".to_owned()),
        // The coordinator writes every second, and old revisions are of no use.
        ("auto-compaction-mode", "revision".to_owned()),
        ("auto-compaction-retention", "1000".to_owned()),
    ];
    pairs.into_iter().flat_map(|(name, value)| [format!("--{name}"), value]).collect()
}
