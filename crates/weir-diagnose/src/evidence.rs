//! The evidence on a delay: the troubles of the cluster, the waits of all processes, the largest consumers,
//! and the file in question. A missing answer is evidence, too. Knows nothing of the way it is collected.
use crate::names::Users;
use crate::troubles::{Facts, Trouble, troubles};
use crate::waits::{Seen, sorted};
use crate::work;
use serde_json::Value;
use weir_coord::Collected;
use weir_proto::map::Role;
use weir_proto::watch::{Top, WaitsListed};

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

impl Evidence {
    /// About the whole cluster, without names of users.
    pub fn of(
        facts: Facts,
        collected: Vec<Collected<WaitsListed>>,
        tops: Vec<Collected<Top>>,
        is_partial: bool,
    ) -> Evidence {
        let without_answer = collected.iter().filter_map(|g| {
            let why = g.reply.as_ref().err()?.clone();
            Some(Silent { name: g.name.clone(), role: g.role, why })
        });
        let silent = without_answer.collect();
        let (waits, _) = sorted(collected);
        Evidence {
            troubles: troubles(&facts),
            facts,
            waits,
            silent,
            tops,
            users: Users::default(),
            file: None,
            volumes_of_file: Vec::new(),
            is_partial,
        }
    }
    /// The users of programs that wait or work, some of them several times.
    pub fn users_in(&self) -> impl Iterator<Item = u32> {
        let who = self.waits.iter().filter(|seen| seen.wait.pid > 0).map(|seen| seen.wait.uid);
        who.chain(work::users(&self.tops))
    }
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

/// The answers of a mount about a file; null: none.
pub struct Answers {
    pub stat: Value,
    pub layout: Value,
    pub locks: Value,
    pub state: Value,
    pub client: Value,
}

impl FileFacts {
    pub fn of(answers: &Answers) -> FileFacts {
        let Answers { stat, layout, locks, state, client } = answers;
        let number = |key: &str| stat[key].as_u64().and_then(|n| u32::try_from(n).ok());
        let inode = stat["inode"].as_u64().unwrap_or(0);
        let owner = number("uid").zip(number("gid"));
        let found = file_facts(inode, layout, locks, state);
        FileFacts { owner, mount_waits: waits_of(client), ..found }
    }
}

/// The waits that a mount lists of itself.
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
}
