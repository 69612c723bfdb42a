//! Whose work it is: the requests of the last seconds, summed by user, volume, client, job, kind or target.
use crate::names::Users;
use serde::Serialize;
use std::collections::BTreeMap;
use std::str::FromStr;
use weir_coord::Collected;
use weir_proto::watch::{Meters, Top};
use weir_proto::{Error, Result};

/// The meaning of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    Volume,
    User,
    Client,
    Job,
    Kind,
    Target,
}

impl By {
    pub const ALL: [By; 6] = [By::Volume, By::User, By::Client, By::Job, By::Kind, By::Target];

    pub fn word(self) -> &'static str {
        match self {
            By::Volume => "volume",
            By::User => "user",
            By::Client => "client",
            By::Job => "job",
            By::Kind => "kind",
            By::Target => "target",
        }
    }
}

impl FromStr for By {
    type Err = Error;
    fn from_str(word: &str) -> Result<By> {
        let unknown = || Error::invalid(format!("work is not counted by {word:?}"));
        By::ALL.into_iter().find(|by| by.word() == word).ok_or_else(unknown)
    }
}

/// Names for the numbers in rows.
#[derive(Default)]
pub struct Names {
    pub volumes: BTreeMap<u32, String>,
    pub users: Users,
}

/// A row of the table: rates are per second.
#[derive(Clone, PartialEq, Debug, Serialize, Default)]
pub struct TopLine {
    pub name: String,
    pub requests_per_s: f64,
    pub bytes_per_s: f64,
    /// Average number of concurrent requests.
    pub waiting: f64,
    /// The client, the volume and the kind of request with the largest part of it.
    pub client: String,
    pub volume: String,
    pub kind: String,
}

/// The users whose work it is, some of them several times.
pub fn users(tops: &[Collected<Top>]) -> impl Iterator<Item = u32> {
    let rows = tops.iter().filter_map(|top| top.reply.as_ref().ok()).flat_map(|top| &top.rows);
    rows.map(|row| row.uid)
}

/// Sums for one row, with the largest parts of it.
#[derive(Default)]
struct Sums {
    requests: f64,
    bytes: f64,
    waiting: f64,
    clients: BTreeMap<String, f64>,
    volumes: BTreeMap<String, f64>,
    kinds: BTreeMap<String, f64>,
}

/// The line of each user, volume and so on, the largest first.
pub fn lines_of(by: By, tops: &[Collected<Top>], names: &Names) -> Vec<TopLine> {
    let mut sums: BTreeMap<String, Sums> = BTreeMap::new();
    for (client, top) in tops.iter().filter_map(|t| Some((&t.name, t.reply.as_ref().ok()?))) {
        let seconds = (top.covered_ms.max(1) as f64) / 1000.0;
        for row in &top.rows {
            let volume = match row.volume {
                0 => "?".to_owned(),
                n => names.volumes.get(&n).cloned().unwrap_or_else(|| n.to_string()),
            };
            let name = match by {
                By::Volume => volume.clone(),
                By::User => names.users.name(row.uid),
                By::Client | By::Target => client.clone(),
                By::Job if row.job.is_empty() => "-".to_owned(),
                By::Job => row.job.clone(),
                By::Kind => row.kind.clone(),
            };
            let sum = sums.entry(name).or_default();
            let requests = row.requests as f64 / seconds;
            let bytes = row.bytes as f64 / seconds;
            (sum.requests, sum.bytes) = (sum.requests + requests, sum.bytes + bytes);
            sum.waiting += row.us as f64 / 1e6 / seconds;
            let weight = weight(requests, bytes);
            *sum.clients.entry(client.clone()).or_default() += weight;
            *sum.volumes.entry(volume).or_default() += weight;
            *sum.kinds.entry(row.kind.clone()).or_default() += weight;
        }
    }
    let most = |of: &BTreeMap<String, f64>| {
        let largest = of.iter().max_by(|a, b| a.1.total_cmp(b.1));
        largest.map(|(name, _)| name.clone()).unwrap_or_default()
    };
    let line = |(name, sum): (String, Sums)| TopLine {
        name,
        requests_per_s: sum.requests,
        bytes_per_s: sum.bytes,
        waiting: sum.waiting,
        client: most(&sum.clients),
        volume: most(&sum.volumes),
        kind: most(&sum.kinds),
    };
    largest_first(sums.into_iter().map(line).collect())
}

fn largest_first(mut lines: Vec<TopLine>) -> Vec<TopLine> {
    let of = |line: &TopLine| weight(line.requests_per_s, line.bytes_per_s);
    lines.sort_by(|a, b| of(b).total_cmp(&of(a)));
    lines
}

/// A request counts as much as 64 KiB.
fn weight(requests: f64, bytes: f64) -> f64 {
    requests * 65536.0 + bytes
}

/// The work of each target's disk in a second, from two readings; the largest first.
pub fn target_lines(first: &[Collected<Meters>], second: &[Collected<Meters>], seconds: f64) -> Vec<TopLine> {
    let mut lines: BTreeMap<String, TopLine> = BTreeMap::new();
    let mut add = |collected: &[Collected<Meters>], sign: f64| {
        for (node, meters) in collected.iter().filter_map(|g| Some((&g.name, g.reply.as_ref().ok()?))) {
            for meter in &meters.meters {
                let line = || TopLine { client: node.clone(), ..TopLine::default() };
                let of_target = lines.entry(meter.label_value.clone());
                match meter.name.as_str() {
                    "weir_store_disk_seconds" => {
                        let line = of_target.or_insert_with(line);
                        line.requests_per_s += sign * meter.count as f64 / seconds;
                        line.waiting += sign * meter.value as f64 / 1e9 / seconds;
                    }
                    "weir_store_read_bytes_total" | "weir_store_write_bytes_total" => {
                        of_target.or_insert_with(line).bytes_per_s += sign * meter.value as f64 / seconds;
                    }
                    _ => {}
                }
            }
        }
    };
    add(second, 1.0);
    add(first, -1.0);
    largest_first(lines.into_iter().map(|(name, line)| TopLine { name, ..line }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::Role;
    use weir_proto::watch::{Meter, MeterKind, TopRow};

    fn row(volume: u32, uid: u32, kind: &str, requests: u64, bytes: u64) -> TopRow {
        TopRow { volume, uid, job: String::new(), kind: kind.into(), requests, bytes, us: 500_000 }
    }
    fn collected<T>(name: &str, reply: T) -> Collected<T> {
        Collected { name: name.into(), role: Role::Mount, reply: Ok(reply) }
    }

    #[test]
    fn a_hog_is_first_by_user_client_volume_and_kind() {
        let hog = row(3, 4711, "WRITE", 5000, 5000 << 20);
        let tops = [
            collected("a", Top { covered_ms: 10_000, rows: vec![hog, row(3, 1, "READ", 10, 100)] }),
            collected("b", Top { covered_ms: 5000, rows: vec![row(0, 1, "READ", 500, 100)] }),
        ];
        let names = Names { volumes: [(3, "data".into())].into(), users: Users::default() };
        let first = |by| lines_of(by, &tops, &names)[0].clone();
        let user = first(By::User);
        assert_eq!((user.name.as_str(), user.client.as_str(), user.volume.as_str()), ("4711", "a", "data"));
        assert_eq!((user.requests_per_s, user.bytes_per_s), (500.0, (500u64 << 20) as f64));
        assert_eq!(user.waiting, 0.05);
        assert_eq!(
            [first(By::Client).name, first(By::Volume).name, first(By::Kind).name],
            ["a", "data", "WRITE"]
        );
        let of_one = &lines_of(By::User, &tops, &names)[1];
        assert_eq!((of_one.requests_per_s, of_one.client.as_str()), (101.0, "b"));
    }

    #[test]
    fn a_silent_process_is_left_out() {
        let silent = Collected { name: "c".into(), role: Role::Mount, reply: Err("no answer".into()) };
        assert_eq!(lines_of(By::User, &[silent], &Names::default()), []);
    }

    #[test]
    fn targets_have_the_difference_of_two_readings() {
        let meter = |name: &str, value: i64, count: u64| Meter {
            name: name.into(),
            label: "target".into(),
            label_value: "t1".into(),
            kind: MeterKind::Counter,
            value,
            count,
            buckets: vec![],
        };
        let at = |bytes: i64, ops: u64| {
            let meters = vec![
                meter("weir_store_write_bytes_total", bytes, 0),
                meter("weir_store_disk_seconds", bytes * 1000, ops),
                meter("weir_other", 5, 5),
            ];
            [collected("storage-1", Meters { meters })]
        };
        let lines = target_lines(&at(1_000_000, 10), &at(3_000_000, 50), 2.0);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!((lines[0].name.as_str(), lines[0].client.as_str()), ("t1", "storage-1"));
        assert_eq!((lines[0].bytes_per_s, lines[0].requests_per_s, lines[0].waiting), (1e6, 20.0, 1.0));
    }
}
