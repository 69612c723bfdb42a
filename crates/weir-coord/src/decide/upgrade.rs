//! The end of a rolling upgrade: the level that the cluster may use from then on.
//!
//! A level defines what may be written. A node that is down counts with the level of its last join: it may
//! return. A storage node without targets does not, if it is down.
use std::fmt;
use weir_proto::map::ClusterMap;
use weir_proto::{Error, Result};

/// Names in an error; further ones are only counted.
const NAMED_MAX: usize = 8;

/// A program of the cluster that is not a node in the map: a mount, a mover, the coordinator.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Connected {
    pub name: String,
    pub level: u16,
}

/// The highest level that all programs support. `Unsupported`: some support less; the error names them.
pub fn finished_level(map: &ClusterMap, connected: &[Connected]) -> Result<u16> {
    let nodes = map.nodes.iter().filter(|n| !map.has_left(n));
    let nodes = nodes.map(|n| Connected { name: n.name.clone(), level: n.program.level });
    let mut all: Vec<Connected> = nodes.chain(connected.iter().cloned()).collect();
    all.sort();
    all.dedup();
    let level = all.iter().map(|c| c.level).max().unwrap_or(map.level).max(map.level);
    let older: Vec<&Connected> = all.iter().filter(|c| c.level < level).collect();
    match older.is_empty() {
        true => Ok(level),
        false => Err(Error::unsupported(format!("level {level} is not known to all: {}", Named(&older)))
            .hint("upgrade and restart them, then finish the upgrade")),
    }
}

struct Named<'a>(&'a [&'a Connected]);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.0.iter().take(NAMED_MAX);
        let named: Vec<String> = named.map(|c| format!("{} knows level {}", c.name, c.level)).collect();
        write!(f, "{}", named.join(", "))?;
        match self.0.len().saturating_sub(NAMED_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::{Node, Role, RunSeen, Settings, Target, TargetState};
    use weir_proto::version::Program;
    use weir_proto::{ClusterId, DiskUuid, NamespaceId, NodeId, TargetId};

    fn map(level: u16, nodes: &[(&str, u16)]) -> ClusterMap {
        let node = |(n, (name, level)): (usize, &(&str, u16))| Node {
            id: NodeId(n as u32 + 1),
            name: (*name).to_owned(),
            role: Role::Storage,
            host: "h".into(),
            addrs: vec![],
            up: n == 0,
            program: Program { level: *level, ..Program::this() },
        };
        let target = |n: u32| Target {
            id: TargetId(n),
            uuid: DiskUuid([n as u8; 16]),
            node: NodeId(n),
            pool: "default".into(),
            state: TargetState::Down,
            capacity: 1,
            last: RunSeen::default(),
            whole: RunSeen::default(),
        };
        let settings = Settings {
            scheme: "single".parse().unwrap(),
            cell_shift: 20,
            lease_ms: 1000,
            target_silence_ms: 1000,
        };
        ClusterMap {
            cluster: ClusterId([1; 16]),
            version: 1,
            level,
            settings,
            nodes: nodes.iter().enumerate().map(node).collect(),
            targets: (1..=nodes.len() as u32).map(target).collect(),
            last_namespace: NamespaceId(1),
            ..ClusterMap::absent()
        }
    }
    fn others(all: &[(&str, u16)]) -> Vec<Connected> {
        all.iter().map(|(name, level)| Connected { name: (*name).to_owned(), level: *level }).collect()
    }

    #[test]
    fn a_level_is_reached_when_all_nodes_know_it() {
        let coordinator = |level| others(&[("coordinator", level)]);
        assert_eq!(finished_level(&map(1, &[("s1", 2), ("s2", 2)]), &coordinator(2)), Ok(2));
        assert_eq!(finished_level(&map(2, &[("s1", 2)]), &coordinator(2)), Ok(2), "there already");
        assert_eq!(finished_level(&map(1, &[]), &coordinator(3)), Ok(3));
    }

    #[test]
    fn a_node_whose_targets_were_removed_does_not_count() {
        let mut map = map(1, &[("s1", 2), ("s2", 1)]);
        assert!(finished_level(&map, &[]).is_err(), "s2 may return");
        map.targets.truncate(1);
        assert_eq!(finished_level(&map, &[]), Ok(2));
    }

    #[test]
    fn nodes_of_a_lower_level_are_named() {
        let old = |map: ClusterMap, connected: &[(&str, u16)]| {
            finished_level(&map, &others(connected)).unwrap_err().to_string()
        };
        let down = old(map(1, &[("s1", 2), ("s2", 1)]), &[("coordinator", 2)]);
        assert!(down.starts_with("level 2 is not known to all: s2 knows level 1;"), "{down}");
        let coordinator = old(map(1, &[("s1", 2)]), &[("coordinator", 1)]);
        assert!(coordinator.contains(": coordinator knows level 1;"), "{coordinator}");
        let mount = old(map(1, &[("s1", 2)]), &[("coordinator", 2), ("m1", 1), ("m1", 1)]);
        assert!(mount.contains(": m1 knows level 1;"), "{mount}");
        let many: Vec<String> = (10..30).map(|n| format!("m{n}")).collect();
        let many: Vec<(&str, u16)> = many.iter().map(|m| (m.as_str(), 1)).collect();
        assert!(old(map(1, &[("s1", 2)]), &many).contains("m17 knows level 1 and 12 more;"));
    }
}
