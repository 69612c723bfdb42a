//! What is known of a delay: the waits of all processes, the map, volumes and homes, and the file in
//! question.
//!
//! Invariant: nothing here waits for long, whatever hangs: each question has a deadline, and what was not
//! answered is evidence, too.
use super::PATIENCE;
use super::waits::{Seen, sorted};
use crate::commands::volume::{all, connect};
use crate::commands::{file, mounts, tiering};
use crate::failure::Outcome;
use crate::observe::is_led;
use crate::users::Users;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use weir_coord::{Cluster, Gathered};
use weir_env::{Addr, Env};
use weir_proto::InodeId;
use weir_proto::coord::ClusterStatus;
use weir_proto::map::Role;
use weir_proto::relation::RelationInfo;
use weir_proto::volume::Volume;
use weir_proto::watch::{ListWaits, WaitsListed};

/// For all that a metadata server is asked.
const NAMESPACE_PATIENCE: Duration = Duration::from_millis(1500);
/// Waits that ended are looked at, too.
const PAST_S: u32 = 3600;
/// A wait that is younger explains nothing that a user feels.
const MIN_MS: u32 = 50;

/// All that was found.
pub struct Evidence {
    pub status: ClusterStatus,
    /// The longest first; those that ended follow.
    pub waits: Vec<Seen>,
    pub silent: Vec<Silent>,
    pub namespaces: Vec<Namespace>,
    /// Of programs that wait.
    pub users: Users,
    /// Absent: the question is about the whole cluster, or about a process that waits for no file.
    pub file: Option<FileFacts>,
}

/// A process that did not answer.
pub struct Silent {
    pub name: String,
    pub role: Role,
    pub why: String,
}

pub struct Namespace {
    pub name: String,
    pub known: Result<Known, String>,
}

#[derive(Default)]
pub struct Known {
    pub volumes: Vec<Volume>,
    pub relations: Vec<RelationInfo>,
    /// That of the file in question.
    pub volume_of_file: Option<u32>,
}

/// What is asked about.
#[derive(Default, Debug, PartialEq)]
pub struct FileFacts {
    pub inode: u64,
    /// By number; empty: it has no stripes, or they are not known.
    pub groups: Vec<u32>,
    pub targets: Vec<u32>,
    /// Bytes that are at home only.
    pub offline: u64,
    /// Locks that are held.
    pub locks: Vec<String>,
}

/// The threads of a process; none: there is no such process here.
pub fn threads_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// What the mount says of a path; an error: it does not answer, so the call of the program hangs there as
/// well.
pub fn of_path(path: &Path) -> Outcome<Option<FileFacts>> {
    let ask = |attribute: &'static str| mounts::ask(path, move |path| file::ask(path, attribute));
    let (stat, layout) = (ask(file::STAT), ask(file::LAYOUT));
    let (locks, state) = (ask(file::LOCKS), ask(tiering::STATE));
    let Some(stat) = stat.answer() else { return Ok(None) };
    let of =
        |asked: &mounts::Asked<Outcome<Value>>| asked.answer().and_then(Outcome::ok).unwrap_or(Value::Null);
    let inode = stat?["inode"].as_u64().unwrap_or(0);
    Ok(Some(file_facts(inode, &of(&layout), &of(&locks), &of(&state))))
}

fn file_facts(inode: u64, layout: &Value, locks: &Value, state: &Value) -> FileFacts {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let number = |value: &Value| {
        let digits: String = value
            .as_str()?
            .chars()
            .skip_while(|c| !c.is_ascii_digit())
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse::<u32>().ok()
    };
    let stripes = list(&layout["stripes"]);
    let mut groups: Vec<u32> = stripes.iter().filter_map(|s| number(&s["group"])).collect();
    let members = stripes.iter().flat_map(|s| [list(&s["data"]), list(&s["parity"])]).flatten();
    let mut targets: Vec<u32> = members.filter_map(|member| number(&member)).collect();
    groups.sort_unstable();
    groups.dedup();
    targets.sort_unstable();
    targets.dedup();
    let locks = list(&locks["locks"]);
    let held = locks.iter().filter(|lock| lock["state"] == "holds");
    let text = |key: &str, lock: &Value| lock[key].as_str().unwrap_or_default().to_owned();
    let locks = held.map(|lock| {
        format!(
            "process {} of {} holds an {} {} lock of bytes {} for {}",
            lock["pid"],
            text("client", lock),
            text("kind", lock),
            text("lock", lock),
            text("range", lock),
            text("age", lock)
        )
    });
    FileFacts {
        inode,
        groups,
        targets,
        offline: state["offline"].as_u64().unwrap_or(0),
        locks: locks.collect(),
    }
}

/// Asks all processes, the coordinator and the leaders at the same time.
pub async fn collect(
    env: &Env,
    cluster: &Cluster,
    coordinators: &[Addr],
    file: Option<FileFacts>,
) -> Outcome<Evidence> {
    let asked = ListWaits { min_ms: MIN_MS, since_s: PAST_S };
    let inode = file.as_ref().map(|file| InodeId(file.inode));
    let map = cluster.map();
    let led: Vec<String> =
        map.namespaces.iter().filter(|n| is_led(&map, n)).map(|n| n.name.clone()).collect();
    let namespaces = async {
        let mut all = Vec::new();
        for name in led {
            let known = env.clock.timeout(NAMESPACE_PATIENCE, known(coordinators, &name, inode)).await;
            let known = match known {
                Ok(known) => known.map_err(|failure| failure.error.context),
                Err(_) => Err(format!("no answer within {NAMESPACE_PATIENCE:?}")),
            };
            all.push(Namespace { name, known });
        }
        all
    };
    let (status, gathered, namespaces) =
        tokio::join!(cluster.status(), cluster.gather::<_, WaitsListed>(&asked, PATIENCE), namespaces);
    let (status, gathered): (ClusterStatus, Vec<Gathered<WaitsListed>>) = (status?, gathered?);
    let without_answer = gathered.iter().filter_map(|g| {
        let why = g.told.as_ref().err()?.clone();
        Some(Silent { name: g.name.clone(), role: g.role, why })
    });
    let silent = without_answer.collect();
    let (waits, _) = sorted(gathered);
    let users = Users::of(waits.iter().filter(|seen| seen.wait.pid > 0).map(|seen| seen.wait.uid));
    Ok(Evidence { status, waits, silent, namespaces, users, file })
}

async fn known(coordinators: &[Addr], namespace: &str, inode: Option<InodeId>) -> Outcome<Known> {
    let client = connect(coordinators.to_vec(), namespace).await?;
    let volumes = all(&client).await?;
    let relations = client.relations(None).await?;
    let volume_of_file = match inode {
        Some(inode) => client.volume_at(inode).await.ok().map(|volume| volume.id.0),
        None => None,
    };
    client.shutdown().await?;
    Ok(Known { volumes, relations, volume_of_file })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_files_groups_targets_and_locks_are_read() {
        let stripe = |group: &str, data: [&str; 2]| json!({ "group": group, "data": data, "parity": ["t9"] });
        let layout = json!({ "stripes": [stripe("g4", ["t1", "t2(down)"]), stripe("g4", ["t3", "t1"])] });
        let lock = |state: &str| {
            json!({ "state": state, "pid": 7, "client": "n1:/w", "kind": "exclusive", "lock": "flock", "range": "0-end",
                    "age": "3.0 s" })
        };
        let locks = json!({ "locks": [lock("holds"), lock("waits")] });
        let facts = file_facts(12, &layout, &locks, &json!({ "offline": 5 }));
        assert_eq!(
            (facts.inode, facts.groups, facts.targets, facts.offline),
            (12, vec![4], vec![1, 2, 3, 9], 5)
        );
        let held = "process 7 of n1:/w holds an exclusive flock lock of bytes 0-end for 3.0 s";
        assert_eq!(facts.locks, [held]);
        let bare = file_facts(1, &Value::Null, &Value::Null, &Value::Null);
        assert_eq!(bare, FileFacts { inode: 1, ..FileFacts::default() });
    }

    #[test]
    fn a_process_has_threads_and_a_number_without_process_none() {
        assert!(threads_of(std::process::id()).contains(&std::process::id()));
        assert!(threads_of(u32::MAX).is_empty());
    }
}
