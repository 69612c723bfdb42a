//! The contents of `/metrics`: the meters of all processes and the state of the cluster, in the text format
//! of Prometheus.
//!
//! A pure function. Times are in seconds, as the names show. Histograms by method have only counts and sums,
//! so that a page for hundreds of nodes stays small.
use super::snapshot::Snapshot;
use std::collections::BTreeMap;
use std::fmt::Write;
use weir_diagnose::troubles::{Trouble, word};
use weir_proto::map::{ClusterMap, Node, Role};
use weir_proto::relation::RelationState;
use weir_proto::watch::{Meter, MeterKind};
use weir_trust::certificate::role_word;

/// Upper bounds of the exported buckets, in seconds.
const BOUNDS: [f64; 9] = [0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0];
/// The number of volumes with exported usage, the largest: the API has all.
const VOLUMES_MAX: usize = 100;

/// The meaning of each name, for authors of dashboards. Names without a text here are of older or newer
/// processes.
const HELP: [(&str, &str); 54] = [
    ("weir_build_info", "The release of a node's program"),
    ("weir_call_seconds", "Time of requests that the process sent, by method"),
    ("weir_client_bytes_total", "Bytes that programs read and wrote at a mount"),
    ("weir_client_damaged_total", "Fragments that failed their checksum"),
    ("weir_client_degraded_reads_total", "Reads that were decoded from parity"),
    ("weir_client_degraded_writes_total", "Writes of stripes that lacked a member"),
    ("weir_client_fuse_seconds", "Time of requests of programs that were not answered from memory, by kind"),
    ("weir_client_hedges_total", "Reads that also asked another member because one was slow"),
    ("weir_client_memory_bytes", "Memory of cached and unsaved data"),
    ("weir_client_recalled_leases_total", "Leases that the metadata server called back"),
    ("weir_client_received_bytes_total", "Payload bytes from targets"),
    ("weir_client_sent_bytes_total", "Payload bytes to targets"),
    ("weir_group_degraded", "Placement groups that take data and lack members"),
    ("weir_group_full", "Placement groups with all members"),
    ("weir_group_unwritable", "Placement groups with too few members for writes"),
    ("weir_home_seconds", "Time of a mover's calls at a home"),
    ("weir_journal_sync_seconds", "Time of a journal's write with its sync"),
    ("weir_namespace_led", "1: a metadata server leads the namespace"),
    ("weir_node_up", "1: the coordinator has the node as up"),
    ("weir_owners_near_limit", "Users or groups that use 95 % or more of a limit of theirs"),
    ("weir_relation_backlog_bytes", "Bytes that home does not have yet"),
    ("weir_relation_conflicts", "Files that are not copied because they conflict"),
    ("weir_relation_home_failed", "1: home could not be used at the last try"),
    ("weir_relation_movers", "Movers that work for the relation"),
    ("weir_relation_oldest_unshipped_seconds", "Age of the oldest change that home does not have"),
    ("weir_relation_rate_bytes", "Bytes a second that were shipped lately"),
    ("weir_rpc_bytes_total", "Payload bytes of requests and answers"),
    ("weir_rpc_dropped_total", "Requests that were not begun, as their callers no longer waited"),
    ("weir_rpc_inflight", "Requests that are being served"),
    ("weir_rpc_refused_total", "Requests whose sender may not send them"),
    ("weir_rpc_seconds", "Time of requests that the process served, by method"),
    ("weir_store_capacity_bytes", "Space that a target has"),
    ("weir_store_copied_bytes_total", "Bytes of places that a target took, copied or rebuilt"),
    ("weir_store_damaged_total", "Blocks that failed their checksum"),
    ("weir_store_disk_seconds", "Time of a request at a target's disk, with its queue"),
    ("weir_store_disk_stalled_seconds", "For how long the disk has completed nothing"),
    ("weir_store_read_bytes_total", "Bytes read from slabs"),
    ("weir_store_read_seconds", "Time of a read from a slab"),
    ("weir_store_repaired_total", "Damaged blocks that were repaired"),
    ("weir_store_sync_seconds", "Time of a sync of a slab"),
    ("weir_store_under_replicated_cells", "Cells that lack redundancy"),
    ("weir_store_used_bytes", "Space in use"),
    ("weir_store_write_bytes_total", "Bytes written to slabs"),
    ("weir_store_write_seconds", "Time of a write to a slab"),
    ("weir_target_up", "1: the target is up"),
    ("weir_target_used_bytes", "Space in use, as the target's process last reported it"),
    ("weir_troubles", "Troubles of a kind that `weir status` lists and that are not muted"),
    ("weir_up", "1: the process answers"),
    ("weir_volume_used_bytes", "Bytes of a volume"),
    ("weir_volume_limit_bytes", "The limit of a volume's bytes"),
    ("weir_volume_limit_inodes", "The limit of a volume's files and directories"),
    ("weir_volume_used_inodes", "Files and directories of a volume"),
    ("weir_wait_seconds_total", "Time of waits over 10 ms that ended, by reason"),
    ("weir_waits_total", "Waits over 10 ms that ended, by reason"),
];

/// Samples by name, because the format requires all of a name together.
#[derive(Default)]
struct Page {
    of: BTreeMap<String, (&'static str, Vec<String>)>,
}

impl Page {
    fn add(&mut self, kind: &'static str, name: &str, suffix: &str, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> = labels
            .iter()
            .filter(|(key, _)| !key.is_empty())
            .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
            .collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let samples = &mut self.of.entry(name.to_owned()).or_insert_with(|| (kind, Vec::new())).1;
        samples.push(format!("{name}{suffix}{labels} {value}"));
    }
    fn gauge(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.add("gauge", name, "", labels, value);
    }
    fn text(self) -> String {
        let mut out = String::new();
        for (name, (kind, samples)) in self.of {
            if let Some((_, help)) = HELP.iter().find(|(of, _)| *of == name) {
                out += &format!("# HELP {name} {help}\n");
            }
            let _ = writeln!(out, "# TYPE {name} {kind}"); // writing to a String cannot fail
            samples.iter().for_each(|sample| out += &format!("{sample}\n"));
        }
        out
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

pub fn metrics(snapshot: &Snapshot) -> String {
    let mut page = Page::default();
    for collected in &snapshot.meters {
        let (name, role) = (collected.name.as_str(), role_word(collected.role));
        let of = [("node", name), ("role", role)];
        page.gauge("weir_up", &of, f64::from(u8::from(collected.reply.is_ok())));
        let meters = collected.reply.iter().flat_map(|reply| &reply.meters);
        meters.for_each(|meter| add_meter(&mut page, name, role, meter));
    }
    if let Some(status) = snapshot.facts.as_ref().map(|facts| &facts.status) {
        add_map(&mut page, &status.map);
        for report in &status.targets {
            let target = report.target.to_string();
            let of = [("target", target.as_str())];
            page.gauge("weir_store_capacity_bytes", &of, report.capacity as f64);
            page.gauge("weir_store_used_bytes", &of, report.used as f64);
            page.gauge("weir_store_under_replicated_cells", &of, report.under_replicated_cells as f64);
            page.add("counter", "weir_store_damaged_total", "", &of, report.damaged_blocks as f64);
            page.add("counter", "weir_store_repaired_total", "", &of, report.repaired_blocks as f64);
            page.gauge("weir_store_disk_stalled_seconds", &of, f64::from(report.stalled_ms) / 1000.0);
        }
    }
    add_troubles(&mut page, &snapshot.troubles);
    add_namespaces(&mut page, snapshot);
    page.text()
}

fn add_troubles(page: &mut Page, troubles: &[Trouble]) {
    let mut counts: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for trouble in troubles.iter().filter(|trouble| trouble.muted_until.is_none()) {
        *counts.entry((&trouble.code, word(trouble.severity))).or_default() += 1;
    }
    for ((code, severity), count) in counts {
        page.gauge("weir_troubles", &[("code", code), ("severity", severity)], f64::from(count));
    }
}

fn add_meter(page: &mut Page, node: &str, role: &str, meter: &Meter) {
    let scale = if meter.name.contains("_seconds") { 1e-9 } else { 1.0 };
    let labels = [("node", node), ("role", role), (meter.label.as_str(), meter.label_value.as_str())];
    let (name, value) = (meter.name.as_str(), meter.value as f64 * scale);
    match meter.kind {
        MeterKind::Counter => page.add("counter", name, "", &labels, value),
        MeterKind::Gauge => page.gauge(name, &labels, value),
        MeterKind::Histogram => {
            if meter.label != "method" {
                for bound in BOUNDS {
                    let below = meter.buckets.iter().filter(|b| b.below as f64 * scale <= bound);
                    let count: u64 = below.map(|b| b.count).sum();
                    let le = bound.to_string();
                    let with_bound = [labels[0], labels[1], labels[2], ("le", le.as_str())];
                    page.add("histogram", name, "_bucket", &with_bound, count as f64);
                }
            }
            let all = [labels[0], labels[1], labels[2], ("le", "+Inf")];
            page.add("histogram", name, "_bucket", &all, meter.count as f64);
            page.add("histogram", name, "_sum", &labels, value);
            page.add("histogram", name, "_count", &labels, meter.count as f64);
        }
    }
}

fn add_map(page: &mut Page, map: &ClusterMap) {
    let groups =
        |wanted: fn(&weir_proto::map::Group) -> bool| map.groups.iter().filter(|g| wanted(g)).count() as f64;
    page.gauge("weir_group_full", &[], groups(|g| g.current_count() == g.members.len()));
    page.gauge(
        "weir_group_degraded",
        &[],
        groups(|g| g.is_writable() && g.current_count() < g.members.len()),
    );
    page.gauge("weir_group_unwritable", &[], groups(|g| !g.is_writable()));
    for target in &map.targets {
        let up = target.state == weir_proto::map::TargetState::Up;
        page.gauge("weir_target_up", &[("target", &target.id.to_string())], f64::from(u8::from(up)));
    }
    let counts = |n: &&Node| matches!(n.role, Role::Meta | Role::Storage) && !map.has_left(n);
    for node in map.nodes.iter().filter(counts) {
        let labels = [("node", node.name.as_str()), ("release", node.program.release.as_str())];
        page.gauge("weir_build_info", &labels, 1.0);
        page.gauge(
            "weir_node_up",
            &[labels[0], ("role", role_word(node.role))],
            f64::from(u8::from(node.up)),
        );
    }
    for namespace in &map.namespaces {
        let led = weir_diagnose::health::is_led(map, namespace);
        page.gauge("weir_namespace_led", &[("namespace", &namespace.name)], f64::from(u8::from(led)));
    }
}

fn add_namespaces(page: &mut Page, snapshot: &Snapshot) {
    for (name, known) in snapshot.namespaces() {
        let mut volumes: Vec<_> = known.volumes.iter().collect();
        volumes.sort_by_key(|v| std::cmp::Reverse(v.usage.bytes));
        for volume in volumes.into_iter().take(VOLUMES_MAX) {
            let of = [("namespace", name), ("volume", volume.name.as_str())];
            page.gauge("weir_volume_used_bytes", &of, volume.usage.bytes as f64);
            page.gauge(
                "weir_volume_used_inodes",
                &of,
                (volume.usage.files + volume.usage.directories) as f64,
            );
            if let Some(limit) = volume.quota.bytes_hard {
                page.gauge("weir_volume_limit_bytes", &of, limit as f64);
            }
            if let Some(limit) = volume.quota.inodes_hard {
                page.gauge("weir_volume_limit_inodes", &of, limit as f64);
            }
        }
        for (kind, count) in [("user", known.owners.users), ("group", known.owners.groups)] {
            page.gauge("weir_owners_near_limit", &[("namespace", name), ("kind", kind)], count as f64);
        }
        for relation in &known.relations {
            let id = relation.id.0.to_string();
            let of = [("volume", relation.volume_name.as_str()), ("relation", id.as_str())];
            page.gauge("weir_relation_oldest_unshipped_seconds", &of, relation.lag_ms as f64 / 1000.0);
            page.gauge("weir_relation_backlog_bytes", &of, relation.backlog_bytes as f64);
            page.gauge("weir_relation_rate_bytes", &of, relation.rate as f64);
            page.gauge("weir_relation_movers", &of, f64::from(relation.movers));
            let conflicts = match relation.state {
                RelationState::Diverged { items } => items as f64,
                _ => relation.conflicts.len() as f64,
            };
            page.gauge("weir_relation_conflicts", &of, conflicts);
            let failed = f64::from(u8::from(!relation.home_failure.is_empty()));
            page.gauge("weir_relation_home_failed", &of, failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_coord::Collected;
    use weir_proto::watch::{MeterBucket, Meters};

    fn meter(name: &str, (label, value): (&str, &str), kind: MeterKind) -> Meter {
        let buckets =
            vec![MeterBucket { below: 90_000, count: 3 }, MeterBucket { below: 40_000_000, count: 2 }];
        Meter {
            name: name.into(),
            label: label.into(),
            label_value: value.into(),
            kind,
            value: 2_000_000_000,
            count: 5,
            buckets,
        }
    }

    /// `cargo test -p weir --bin weir -- --ignored --nocapture five_hundred`
    #[test]
    #[ignore = "a measurement"]
    fn five_hundred_nodes_are_shown_within_a_second() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
        };
        let before = resident();
        let methods: Vec<String> = (0..40).map(|n| format!("Method{n}")).collect();
        let node = |n: usize| {
            let mut meters: Vec<Meter> = methods
                .iter()
                .map(|m| meter("weir_rpc_seconds", ("method", m), MeterKind::Histogram))
                .collect();
            for (name, _) in HELP {
                meters.push(meter(name, ("target", "t1"), MeterKind::Histogram));
            }
            Collected { name: format!("node-{n}"), role: Role::Storage, reply: Ok(Meters { meters }) }
        };
        let snapshot = Snapshot { meters: (0..500).map(node).collect(), ..Snapshot::default() };
        let began = std::time::Instant::now();
        let text = metrics(&snapshot);
        let (took, used) = (began.elapsed(), resident() - before);
        println!(
            "500 nodes: /metrics of {} bytes in {took:?}, {used} MiB with what it was made of",
            text.len()
        );
        assert!(took.as_secs_f64() < 1.0 && used < 300, "{took:?}, {used} MiB");
    }

    #[test]
    fn meters_are_shown_in_seconds_with_their_node() {
        let meters = vec![
            meter("weir_store_sync_seconds", ("target", "t1"), MeterKind::Histogram),
            meter("weir_rpc_seconds", ("method", "Create"), MeterKind::Histogram),
            meter("weir_store_read_bytes_total", ("target", "t\"1"), MeterKind::Counter),
            meter("weir_rpc_inflight", ("", ""), MeterKind::Gauge),
        ];
        let known = Collected { name: "storage-1".into(), role: Role::Storage, reply: Ok(Meters { meters }) };
        let silent = Collected { name: "n2:/m".into(), role: Role::Mount, reply: Err("no answer".into()) };
        let snapshot = Snapshot { meters: vec![known, silent], ..Snapshot::default() };
        let text = metrics(&snapshot);
        for line in [
            "weir_up{node=\"storage-1\",role=\"storage\"} 1",
            "weir_up{node=\"n2:/m\",role=\"mount\"} 0",
            "# TYPE weir_store_sync_seconds histogram",
            "weir_store_sync_seconds_bucket{node=\"storage-1\",role=\"storage\",target=\"t1\",le=\"0.001\"} 3",
            "weir_store_sync_seconds_bucket{node=\"storage-1\",role=\"storage\",target=\"t1\",le=\"0.1\"} 5",
            "weir_store_sync_seconds_sum{node=\"storage-1\",role=\"storage\",target=\"t1\"} 2",
            "weir_rpc_seconds_count{node=\"storage-1\",role=\"storage\",method=\"Create\"} 5",
            "weir_store_read_bytes_total{node=\"storage-1\",role=\"storage\",target=\"t\\\"1\"} 2000000000",
            "weir_rpc_inflight{node=\"storage-1\",role=\"storage\"} 2000000000",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("method=\"Create\",le=\"0.001\""), "one sample for each method");
        assert!(text.contains("# HELP weir_up 1: the process answers\n"));
        let types = text.lines().filter(|l| l.starts_with("# TYPE weir_up ")).count();
        assert_eq!(types, 1);
    }
}
