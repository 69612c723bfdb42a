//! The evidence on a delay: the troubles of the cluster, the waits of all processes, the largest consumers,
//! and the file in question.
//!
//! Invariant: nothing here waits for long, even if processes hang: each query has a deadline, and a missing
//! answer is evidence, too.
use super::PATIENCE;
use super::waits::{Seen, sorted};
use crate::commands::collect::Asker;
use crate::commands::troubles::{Facts, Trouble, troubles};
use crate::commands::{file, mounts, tiering};
use crate::failure::Outcome;
use crate::local::local_cluster::LocalCluster;
use crate::users::Users;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use weir_coord::Collected;
use weir_proto::map::Role;
use weir_proto::watch::{GetTop, ListWaits, Top, WaitsListed};
use weir_proto::{ErrorKind, InodeId};

/// Ended waits of this time count, too.
const ENDED_WITHIN_S: u32 = 3600;
/// A younger wait explains no delay that a user notices.
const MIN_MS: u32 = 50;
/// The time over which one user's work is compared with that of others.
const TOP_S: u32 = 10;

/// All that was found.
pub struct Evidence {
    pub facts: Facts,
    /// The troubles that `weir status` lists, the worst first.
    pub troubles: Vec<Trouble>,
    /// The longest first; ended ones follow.
    pub waits: Vec<Seen>,
    pub silent: Vec<Silent>,
    /// The work of the last seconds at mounts.
    pub tops: Vec<Collected<Top>>,
    /// Names of the users of programs that wait or work.
    pub users: Users,
    /// Absent: the question is about the whole cluster, or about a process that waits for no file.
    pub file: Option<FileFacts>,
    /// Names of volumes that may contain the file.
    pub volumes_of_file: Vec<String>,
    /// This user may not know the waits of all processes, and whose work it is.
    pub is_partial: bool,
}

/// A process that did not answer.
pub struct Silent {
    pub name: String,
    pub role: Role,
    pub why: String,
}

/// The facts about one file.
#[derive(Default, Debug, PartialEq)]
pub struct FileFacts {
    pub inode: u64,
    /// Its user and group, if they are known.
    pub owner: Option<(u32, u32)>,
    /// Placement groups by number; empty: the file has no stripes, or they are not known.
    pub groups: Vec<u32>,
    pub targets: Vec<u32>,
    /// Bytes that are at home only.
    pub offline: u64,
    /// Held locks.
    pub locks: Vec<String>,
    /// What calls of its mount wait for, with milliseconds and their number: every user may know that.
    pub mount_waits: Vec<(String, u64, u64)>,
}

/// The threads of a process; none: there is no such process here.
pub fn threads_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The mount's facts about a path; an error: it does not answer, so the program's call hangs there as well.
pub fn of_path(path: &Path) -> Outcome<Option<FileFacts>> {
    let ask = |attribute: &'static str| mounts::ask(path, move |path| file::ask(path, attribute));
    let (stat, layout) = (ask(file::STAT), ask(file::LAYOUT));
    let (locks, state) = (ask(file::LOCKS), ask(tiering::STATE));
    let client = ask(file::CLIENT);
    let Some(stat) = stat.answer() else { return Ok(None) };
    let of =
        |asked: &mounts::Asked<Outcome<Value>>| asked.answer().and_then(Outcome::ok).unwrap_or(Value::Null);
    let stat = stat?;
    let number = |key: &str| stat[key].as_u64().and_then(|n| u32::try_from(n).ok());
    let inode = stat["inode"].as_u64().unwrap_or(0);
    let owner = number("uid").zip(number("gid"));
    let found = file_facts(inode, &of(&layout), &of(&locks), &of(&state));
    Ok(Some(FileFacts { owner, mount_waits: waits_of(&of(&client)), ..found }))
}

/// Those that a mount lists of itself.
fn waits_of(client: &Value) -> Vec<(String, u64, u64)> {
    let wait = |wait: &Value| {
        Some((wait["for"].as_str()?.to_owned(), wait["ms"].as_u64()?, wait["calls"].as_u64()?))
    };
    client["waits"].as_array().into_iter().flatten().filter_map(wait).collect()
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
        owner: None,
        groups,
        targets,
        offline: state["offline"].as_u64().unwrap_or(0),
        locks: locks.collect(),
        mount_waits: Vec::new(),
    }
}

/// Queries all processes, the coordinator and the leaders in parallel.
pub async fn collect(
    asker: &Arc<Asker>,
    local: Option<LocalCluster>,
    file: Option<FileFacts>,
) -> Outcome<Evidence> {
    let (waits, top) = (ListWaits { min_ms: MIN_MS, since_s: ENDED_WITHIN_S }, GetTop { seconds: TOP_S });
    let cluster = &asker.cluster;
    let (facts, waits, tops) = tokio::join!(
        asker.facts(local),
        cluster.collect::<_, WaitsListed>(&waits, PATIENCE),
        cluster.collect::<_, Top>(&top, PATIENCE),
    );
    // Users may ask about their files; the waits and the work of others are for administrators.
    let is_partial = waits.as_ref().is_err_and(|e| e.kind == ErrorKind::Denied);
    let waits = if is_partial { Ok(Vec::new()) } else { waits };
    let (facts, collected, tops) = (facts?, waits?, tops.unwrap_or_default());
    let without_answer = collected.iter().filter_map(|g| {
        let why = g.reply.as_ref().err()?.clone();
        Some(Silent { name: g.name.clone(), role: g.role, why })
    });
    let silent = without_answer.collect();
    let (waits, _) = sorted(collected);
    let who = waits.iter().filter(|seen| seen.wait.pid > 0).map(|seen| seen.wait.uid);
    let rows = tops.iter().filter_map(|top| top.reply.as_ref().ok()).flat_map(|top| &top.rows);
    let users = Users::of(who.chain(rows.map(|row| row.uid)));
    let mut evidence = Evidence {
        troubles: troubles(&facts),
        facts,
        waits,
        silent,
        tops,
        users,
        file: None,
        volumes_of_file: Vec::new(),
        is_partial,
    };
    evidence.about(asker, file).await;
    Ok(evidence)
}

impl Evidence {
    /// From now on it is evidence about this file.
    pub async fn about(&mut self, asker: &Arc<Asker>, file: Option<FileFacts>) {
        self.volumes_of_file = match &file {
            Some(file) => asker.volumes_of(InodeId(file.inode), &self.facts).await,
            None => Vec::new(),
        };
        self.file = file;
    }
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
        let waits = json!({ "waits": [{ "for": "t3", "ms": 5000, "calls": 2 }, { "for": "t4" }] });
        assert_eq!(waits_of(&waits), [("t3".to_owned(), 5000, 2)]);
        let bare = file_facts(1, &Value::Null, &Value::Null, &Value::Null);
        assert_eq!(bare, FileFacts { inode: 1, ..FileFacts::default() });
    }

    #[test]
    fn a_process_has_threads_and_a_number_without_process_none() {
        assert!(threads_of(std::process::id()).contains(&std::process::id()));
        assert!(threads_of(u32::MAX).is_empty());
    }
}
