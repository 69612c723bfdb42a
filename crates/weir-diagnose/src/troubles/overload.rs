//! An overload as one trouble: most targets answer much later than usual, because there is more work than
//! their machines can do. Troubles that only follow from it are omitted while it lasts.
//!
//! Data is never unavailable because of load: this is a warning. Knows nothing of the collection of facts.
use super::{Facts, Found};
use crate::names::Users;
use crate::quantity::lasting;
use crate::work::{By, Names, lines_of};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use weir_coord::Collected;
use weir_proto::condition::REPORT_EVERY_MS;
use weir_proto::life::{NodeLife, Pressure, TargetLife};
use weir_proto::map::{ClusterMap, TargetState};
use weir_proto::watch::Top;
use weir_proto::{NodeId, TargetId};

pub const CODE: &str = "overloaded";
/// Answers that were late for a shorter time are a burst.
const SHOWN_AFTER_MS: u64 = 3_000;
/// The oldest request of a disk with too much to do has waited for this long.
const DISK_LATE_MS: u32 = 250;
/// Answers of a disk are compared with those of others if there are enough,
const COMPARED_MIN: usize = 4;
/// and it is slow if they take this many times as long.
const OTHERS_TIMES: u32 = 10;
/// A machine with too much to do: some work waits for this part of the time, in hundredths of a per cent.
const PRESSED: u16 = 40_00;
/// A disk that completes nothing for this long explains why others wait for it.
const STALLED_MS: u32 = 1_000;
/// A process that gave a sign of life within this time lives. Shorter than the wait for a metadata server's
/// answer: one that was stopped when it was asked gave its last sign before.
const ALIVE_MS: u64 = 1_700;
/// Troubles that follow from an overload: slow targets, waits for targets, late answers.
const FOLDED: [&str; 6] =
    ["target-slow", "disk-slow", "target-stalled", "client-waits", "unanswered", "namespace-late"];

/// The programs with most of the work.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Busiest {
    pub mount: String,
    pub program: String,
    pub user: String,
}

/// By the requests of the last seconds; `None`: there were none.
pub fn busiest(tops: &[Collected<Top>], users: Users) -> Option<Busiest> {
    let names = Names { volumes: BTreeMap::new(), users };
    let most = |by| {
        let lines = lines_of(by, tops, &names);
        lines.into_iter().max_by(|a, b| a.requests_per_s.total_cmp(&b.requests_per_s)).map(|line| line.name)
    };
    let (mount, program, user) = (most(By::Client)?, most(By::Job)?, most(By::User)?);
    Some(Busiest { mount, program, user })
}

/// Targets that answer late, for how long, and how many requests wait for them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Overload {
    pub since_ms: u64,
    pub targets: Vec<TargetId>,
    /// The longest of their answer times, and what is usual.
    pub answer_ms: u32,
    pub usual_us: u32,
    pub waiting: u64,
}

/// `None`: most targets answer as usual, or one of them explains why the others do not.
pub fn overload(lives: &[NodeLife], map: &ClusterMap) -> Option<Overload> {
    let up = |target: TargetId| map.target(target).is_some_and(|t| t.state == TargetState::Up);
    let all = || {
        let of = |node: &'_ NodeLife| {
            node.life.targets.iter().map(|t| (*t, node.life.pressure)).collect::<Vec<_>>()
        };
        lives.iter().flat_map(of).filter(|(target, _)| up(target.target))
    };
    let count = all().count();
    let stalled = all().filter(|(target, _)| target.stalled_ms >= STALLED_MS).count();
    let late: Vec<TargetLife> =
        all().filter(|(target, pressure)| is_loaded(target, pressure.as_ref())).map(|(t, _)| t).collect();
    let since_ms = lives.iter().map(|node| node.late_ms).max().unwrap_or(0);
    let one_hangs = stalled > 0 && stalled * 2 < count;
    if late.is_empty() || late.len() * 2 < count || one_hangs || since_ms < SHOWN_AFTER_MS {
        return None;
    }
    let waits = |node: &NodeLife| node.life.targets.iter().map(|t| u64::from(t.waiting)).max().unwrap_or(0);
    let mut targets: Vec<TargetId> = late.iter().map(|t| t.target).collect();
    targets.sort_unstable();
    Some(Overload {
        since_ms,
        targets,
        answer_ms: late.iter().map(TargetLife::answers_after_ms).max().unwrap_or(0),
        usual_us: late.iter().map(|t| t.usual_us).max().unwrap_or(0),
        waiting: lives.iter().map(waits).sum(),
    })
}

/// The pressure of a node's machine, in per cent of the time: for `weir status --json`. Null: not measured.
pub fn pressure(lives: &[NodeLife], node: NodeId) -> Value {
    let pressure = lives.iter().find(|life| life.node == node).and_then(|life| life.life.pressure);
    let percent = |part: u16| f64::from(part) / 100.0;
    pressure.map_or(
        Value::Null,
        |p| json!({ "cpu": percent(p.cpu), "io": percent(p.io), "memory": percent(p.memory) }),
    )
}

/// How fast a target answers now, and usually. Null: its process does not report it.
pub fn speed(lives: &[NodeLife], target: TargetId) -> Value {
    let found = lives.iter().flat_map(|node| &node.life.targets).find(|life| life.target == target);
    found.map_or(Value::Null, |life| {
        let ms = |us: u32| f64::from(us) / 1000.0;
        json!({
            "answers_after_ms": ms(life.answer_us), "usually_ms": ms(life.usual_us), "waiting": life.waiting,
            "oldest_ms": life.oldest_ms, "stalled_ms": life.stalled_ms, "late": life.is_late(),
        })
    })
}

/// It answers late, and its disk or its machine has too much to do.
fn is_loaded(target: &TargetLife, pressure: Option<&Pressure>) -> bool {
    let is_pressed = pressure.is_none_or(|p| p.cpu.max(p.io).max(p.memory) >= PRESSED);
    target.is_late() && (is_pressed || target.oldest_ms >= DISK_LATE_MS)
}

/// Late targets, if most others are not. One whose disk takes the time is named so: its machine has no part
/// in it.
pub(super) fn slow_targets(facts: &Facts, found: &mut Found) {
    let all =
        || facts.lives.iter().flat_map(|node| node.life.targets.iter().map(move |t| (t, node.life.pressure)));
    let answers: Vec<u32> = all().map(|(t, _)| t.answer_us).filter(|us| *us > 0).collect();
    for (target, pressure) in all().filter(|(t, _)| t.stalled_ms < STALLED_MS) {
        let (id, named) = (target.target, facts.named(target.target));
        let text = format!("{named} answers after {}, usually {}", after(target), usual(target.usual_us));
        if is_disk_slow(target, pressure.as_ref(), &answers) {
            let text = match target.is_late() {
                true => format!(
                    "the disk of {named} is slow: it answers after {}, usually {}",
                    after(target),
                    usual(target.usual_us)
                ),
                false => {
                    let others = usual(median(&answers));
                    format!(
                        "the disk of {named} is slow: it answers after {}, the others after {others}",
                        after(target)
                    )
                }
            };
            let action = format!(
                "see to that disk (`dmesg`, `smartctl -a`, `weir iohist`); `weir target drain {id}` moves its data to others"
            );
            found.warning(("disk-slow", &id), text, action);
        } else if is_loaded(target, pressure.as_ref()) {
            let action = "see to the load of its machine; its groups continue without it if the others are much faster";
            found.warning(("target-slow", &id), text, action);
        }
    }
}

/// Its disk has a request that is late, and its machine has processors and memory for its work; or it is
/// much slower than the others all the time, so that nothing is unusual about it.
fn is_disk_slow(target: &TargetLife, pressure: Option<&Pressure>, answers: &[u32]) -> bool {
    if pressure.is_some_and(|p| p.cpu.max(p.memory) >= PRESSED) {
        return false;
    }
    let is_outlier = answers.len() >= COMPARED_MIN
        && target.answers_after_ms() >= DISK_LATE_MS
        && target.answer_us / OTHERS_TIMES >= median(answers).max(1);
    (target.is_late() && target.oldest_ms >= DISK_LATE_MS) || is_outlier
}

fn median(answers: &[u32]) -> u32 {
    let mut sorted = answers.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

fn after(target: &TargetLife) -> String {
    seconds(target.answers_after_ms())
}
fn seconds(ms: u32) -> String {
    format!("{:.1} s", f64::from(ms) / 1000.0)
}
fn usual(us: u32) -> String {
    match us {
        0..10_000 => format!("{:.1} ms", f64::from(us) / 1000.0),
        _ => format!("{} ms", us / 1000),
    }
}

/// `t1 to t6, t9`
fn names(targets: &[TargetId]) -> String {
    let mut runs: Vec<(TargetId, TargetId)> = Vec::new();
    for target in targets {
        match runs.last_mut() {
            Some((_, last)) if last.0 + 1 == target.0 => *last = *target,
            _ => runs.push((*target, *target)),
        }
    }
    let name = |(first, last): &(TargetId, TargetId)| match last.0 - first.0 {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    };
    runs.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Replaces the troubles that follow from an overload by that one.
pub(super) fn check(facts: &Facts, found: &mut Found) {
    let Some(overload) = overload(&facts.lives, &facts.status.map) else { return };
    found.0.retain(|trouble| {
        !FOLDED.contains(&trouble.code.as_str()) && !is_late_answer(facts, &trouble.code, &trouble.about)
    });
    let calls = match overload.waiting {
        1 => "1 call waits".to_owned(),
        n => format!("{} calls wait", grouped(n)),
    };
    let by = facts.busiest.as_ref().map_or_else(String::new, |busiest| {
        let Busiest { mount, program, user } = busiest;
        let program = if program == "-" { String::new() } else { format!("program {program} of ") };
        format!("; most requests come from mount {mount}, {program}user {user}")
    });
    let text = format!(
        "overloaded for {}: {} answer after {} (usually {}), {calls}{by}",
        lasting(overload.since_ms / 1000),
        names(&overload.targets),
        seconds(overload.answer_ms),
        usual(overload.usual_us),
    );
    let action = "wait: calls take longer, and no data is lost; `weir top --by job` shows whose work it is";
    found.warning((CODE, "cluster"), text, action);
}

/// A server or mount that did not answer in time, though its process lives.
fn is_late_answer(facts: &Facts, code: &str, about: &str) -> bool {
    match code {
        "namespace-silent" => {
            let namespace = facts.status.map.namespaces.iter().find(|n| n.name == about);
            namespace.and_then(|n| n.leader).is_some_and(|leader| is_alive(facts, leader))
        }
        "mount-silent" => {
            let mut nodes = facts.conditions.iter().filter(|node| node.node == about);
            nodes.any(|node| node.last_contact_ms < 4 * REPORT_EVERY_MS)
        }
        _ => false,
    }
}

fn is_alive(facts: &Facts, node: NodeId) -> bool {
    facts.lives.iter().any(|life| life.node == node && life.seen_ms < ALIVE_MS)
}

/// Its process lives, and its machine has too much to do.
pub(super) fn is_busy(facts: &Facts, node: NodeId) -> bool {
    let pressure = facts.lives.iter().find(|life| life.node == node).and_then(|life| life.life.pressure);
    is_alive(facts, node) && pressure.is_some_and(|p| p.cpu.max(p.io).max(p.memory) >= PRESSED)
}

/// `1,236`
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Reach;
    use crate::troubles::world::{World, world};
    use crate::troubles::{Severity, Trouble, exit_code, worst};
    use weir_proto::coord::{ClientWaiting, Wait};
    use weir_proto::life::Life;
    use weir_proto::watch::TopRow;

    fn late(target: u32) -> TargetLife {
        TargetLife {
            target: TargetId(target),
            answer_us: 3_100_000,
            usual_us: 2_000,
            oldest_ms: 2_900,
            waiting: 618,
            ..TargetLife::default()
        }
    }
    fn quick(target: u32) -> TargetLife {
        TargetLife { target: TargetId(target), answer_us: 2_000, usual_us: 2_000, ..TargetLife::default() }
    }
    fn life(node: u32, late_ms: u64, targets: Vec<TargetLife>) -> NodeLife {
        let pressure = Some(Pressure { cpu: 90_00, io: 10_00, memory: 0 });
        NodeLife { node: NodeId(node), seen_ms: 200, late_ms, life: Life { pressure, targets } }
    }
    fn overloaded() -> World {
        let mut world = world();
        world.lives = vec![life(1, 40_000, vec![late(1)]), life(2, 4_000, vec![late(2)]), life(3, 0, vec![])];
        world.busiest =
            Some(Busiest { mount: "mount-1".into(), program: "fstest".into(), user: "ada".into() });
        world
    }
    fn codes(found: &[Trouble]) -> Vec<&str> {
        found.iter().map(|trouble| trouble.code.as_str()).collect()
    }

    #[test]
    fn an_overload_is_one_warning_that_names_its_cause() {
        let mut world = overloaded();
        world.status.targets[0].stalled_ms = 2_000;
        let wait = Wait { what: "t1".into(), ms: 20_000, calls: 1_236 };
        world.waiting.clients = vec![ClientWaiting { client: "mount-1".into(), waits: vec![wait] }];
        world.unanswered = vec![("the log of events".into(), "no answer".into())];
        world.set_known(Err("no answer within 1.8s".into()));
        world.mounts[0].state = Reach::Silent;
        let found = world.troubles();
        assert_eq!(codes(&found), [CODE], "{found:#?}");
        assert_eq!(
            found[0].text,
            "overloaded for 40 s: t1, t2 answer after 3.1 s (usually 2.0 ms), 1,236 calls wait; most requests come from \
             mount mount-1, program fstest of user ada"
        );
        assert_eq!(worst(&found).map(exit_code), Some(1));
        assert!(found[0].severity < Severity::Degraded);
    }

    #[test]
    fn troubles_that_do_not_follow_from_the_overload_stay() {
        let mut world = overloaded();
        world.lose(1);
        world.conditions[1].last_contact_ms = 60_000;
        world.mounts[0].state = Reach::Silent;
        world.lives.truncate(2);
        world.set_known(Err("no answer within 1.8s".into()));
        let found = world.troubles();
        let found = codes(&found);
        for code in ["storage-down", "mount-silent", "namespace-silent", CODE] {
            assert!(found.contains(&code), "{code}: {found:?}");
        }
    }

    #[test]
    fn a_late_metadata_server_of_a_busy_machine_is_a_warning() {
        let mut world = world();
        world.set_known(Err("no answer within 1.8s".into()));
        assert_eq!(codes(&world.troubles()), ["namespace-silent"]);
        world.lives = vec![life(3, 0, vec![])];
        assert_eq!(codes(&world.troubles()), ["namespace-late"]);
        // It was stopped when it was asked, 1.8 s before.
        world.lives[0].seen_ms = 1_850;
        assert_eq!(codes(&world.troubles()), ["namespace-silent"]);
        world.lives[0].seen_ms = 200;
        world.lives[0].life.pressure = Some(Pressure::default());
        assert_eq!(codes(&world.troubles()), ["namespace-silent"]);
    }

    #[test]
    fn a_slow_disk_is_named_as_that() {
        let idle = Some(Pressure { cpu: 10_00, io: 90_00, memory: 0 });
        let slow = |us, usual_us| TargetLife { answer_us: us, usual_us, ..TargetLife::default() };
        let troubles_of = |first: TargetLife, others: &[u32], pressure| {
            let mut world = world();
            let others = others.iter().map(|us| slow(*us, 2_000));
            let mut all: Vec<TargetLife> = [first].into_iter().chain(others).collect();
            (1..).zip(&mut all).for_each(|(n, target)| target.target = TargetId(n));
            world.lives = vec![life(1, 0, all)];
            world.lives[0].life.pressure = pressure;
            world.troubles().into_iter().map(|t| (t.code, t.text)).collect::<Vec<_>>()
        };
        let late = TargetLife { oldest_ms: 900, ..slow(900_000, 2_000) };
        let found = troubles_of(late, &[2_000; 5], idle);
        let text = "the disk of t1 (storage-1) is slow: it answers after 0.9 s, usually 2.0 ms";
        assert_eq!(found, [("disk-slow".to_owned(), text.to_owned())]);
        // It has always been slow, so that is usual.
        let found = troubles_of(slow(400_000, 390_000), &[2_000; 5], idle);
        let text = "the disk of t1 (storage-1) is slow: it answers after 0.4 s, the others after 2.0 ms";
        assert_eq!(found, [("disk-slow".to_owned(), text.to_owned())]);
        let busy = Some(Pressure { cpu: 90_00, io: 10_00, memory: 0 });
        assert_eq!(
            troubles_of(late, &[2_000; 5], busy)[0].0,
            "target-slow",
            "its machine has too much to do"
        );
        assert_eq!(troubles_of(slow(400_000, 390_000), &[300_000; 5], idle), [], "as slow as the others");
        assert_eq!(troubles_of(slow(400_000, 390_000), &[2_000; 2], idle), [], "too few to compare");
    }

    #[test]
    fn most_targets_must_be_late_and_none_explain_the_others() {
        type Change = fn(&mut World);
        let table: &[(Change, &[&str])] = &[
            (|_| {}, &[CODE]),
            (|w| w.lives[1].life.targets = vec![quick(2)], &[CODE]),
            (|w| w.lives[0].life.targets = vec![quick(1), quick(3), quick(4)], &["target-slow"]),
            (|w| w.lives.iter_mut().for_each(|life| life.late_ms = 2_000), &["target-slow", "target-slow"]),
            (
                |w| {
                    // The others wait for the disk that hangs.
                    w.lives.push(life(4, 9_000, vec![TargetLife { stalled_ms: 9_000, ..late(3) }]));
                    w.lives.iter_mut().for_each(|life| life.life.pressure = Some(Pressure::default()));
                    w.lives[..2].iter_mut().for_each(|life| life.life.targets[0].oldest_ms = 0);
                },
                &[],
            ),
            (
                // A machine that measures no pressure.
                |w| {
                    w.lives.iter_mut().for_each(|life| life.life.pressure = None);
                    w.lives[..2].iter_mut().for_each(|life| life.life.targets[0].oldest_ms = 0);
                },
                &[CODE],
            ),
        ];
        for (row, (change, expected)) in table.iter().enumerate() {
            let mut world = overloaded();
            for id in [3, 4] {
                let target = weir_proto::map::Target { id: TargetId(id), ..world.map().targets[0].clone() };
                world.map().targets.push(target);
            }
            change(&mut world);
            assert_eq!(codes(&world.troubles()), *expected, "row {row}");
        }
    }

    #[test]
    fn the_busiest_have_most_requests() {
        let row = |uid, job: &str, requests, bytes| TopRow {
            volume: 1,
            uid,
            job: job.into(),
            kind: "write".into(),
            requests,
            bytes,
            us: 1,
        };
        let top = |name: &str, rows| Collected {
            name: name.into(),
            role: weir_proto::map::Role::Mount,
            reply: Ok(Top { covered_ms: 1000, rows }),
        };
        let uid = 4_294_967_290;
        let tops =
            [top("m1", vec![row(uid, "fstest", 900, 1)]), top("m2", vec![row(uid - 1, "cp", 3, 1 << 40)])];
        let found = busiest(&tops, Users::default()).unwrap();
        assert_eq!((found.mount.as_str(), found.program.as_str()), ("m1", "fstest"));
        assert_eq!(found.user, uid.to_string());
        assert_eq!(busiest(&[], Users::default()), None);
        assert_eq!(names(&[1, 2, 3, 5, 6, 9].map(TargetId)), "t1 to t3, t5, t6, t9");
        assert_eq!(
            (grouped(999), grouped(1_236), grouped(1_000_000)),
            ("999".into(), "1,236".into(), "1,000,000".into())
        );
    }
}
