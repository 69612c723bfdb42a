//! A table of faults: each fault, the reports of `weir status` and `weir why`, and the time that they took.
use crate::common::machines::Machines;
use crate::common::{Cluster, text};
use serde_json::Value;
use std::process::Output;
use std::time::{Duration, Instant};

/// How long a fault may take until it is named; a mover is silent for 20 s first.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The largest time of `weir why`, in the median over all faults.
const WHY_MEDIAN: Duration = Duration::from_secs(2);

/// A cluster with an administrator.
pub trait Administered {
    /// The output of a command of the administrator.
    fn administer(&self, args: &[&str]) -> Output;
}

impl Administered for Cluster {
    fn administer(&self, args: &[&str]) -> Output {
        self.try_run_weir(args)
    }
}

impl Administered for Machines {
    fn administer(&self, args: &[&str]) -> Output {
        self.weir(1, &[args, &["--dir", &self.path("coord")]].concat())
    }
}

/// The expected text.
#[derive(Clone, Copy)]
pub struct Expected<'a> {
    /// Of a trouble; empty: the cluster reports no trouble.
    pub code: &'a str,
    pub exit: i32,
    /// What `weir why` is asked about.
    pub about: &'a str,
    /// In its chain.
    pub words: &'a [&'a str],
}

pub fn slow<'a>(code: &'a str, exit: i32, words: &'a [&'a str]) -> Expected<'a> {
    Expected { code, exit, about: "slow", words }
}

struct Row {
    fault: String,
    status: String,
    why: String,
    took: Duration,
    right: bool,
}

/// The results; they are printed and compared at the end.
#[derive(Default)]
pub struct Table(Vec<Row>);

struct Answers {
    status: String,
    why: String,
    took: Duration,
    status_is_right: bool,
    why_is_right: bool,
}

fn error_of(stderr: &[u8]) -> String {
    let error: Value = serde_json::from_slice(stderr).unwrap_or(Value::Null);
    error["error"].as_str().map_or_else(|| text(stderr), str::to_owned)
}

/// One after the other, as a user would.
fn ask(cluster: &impl Administered, expected: Expected<'_>) -> Answers {
    let asked = Instant::now();
    let why = cluster.administer(&["why", expected.about, "--json"]);
    let took = asked.elapsed();
    let status = cluster.administer(&["status", "--json"]);
    let exit = status.status.code().unwrap_or(-1);
    let status_json: Value = serde_json::from_slice(&status.stdout).unwrap_or(Value::Null);
    let troubles = status_json["troubles"].as_array().cloned().unwrap_or_default();
    let codes: Vec<&str> = troubles.iter().filter_map(|t| t["code"].as_str()).collect();
    let chain: Value = serde_json::from_slice(&why.stdout).unwrap_or(Value::Null);
    let links = chain["chain"].as_array().cloned().unwrap_or_default();
    let mut sentences: Vec<String> =
        links.iter().filter_map(|link| link["text"].as_str()).map(str::to_owned).collect();
    if sentences.is_empty() {
        sentences.push(error_of(&why.stderr)); // a coordinator that does not answer
    }
    let all = sentences.join("\n");
    let shown = match codes.as_slice() {
        [] => format!("exit {exit} {}", error_of(&status.stderr)),
        codes => format!("exit {exit} {}", codes.join(", ")),
    };
    Answers {
        status: shown,
        took,
        status_is_right: exit == expected.exit
            && (expected.code.is_empty() || codes.contains(&expected.code)),
        why_is_right: expected.words.iter().all(|word| all.contains(word)),
        why: sentences.swap_remove(0),
    }
}

impl Table {
    /// Waits until both name the fault as expected, or for long enough.
    pub fn check(&mut self, cluster: &impl Administered, fault: &str, expected: Expected<'_>) {
        let began = Instant::now();
        let answers = loop {
            let answers = ask(cluster, expected);
            let right = answers.status_is_right && answers.why_is_right;
            if right || began.elapsed() > PATIENCE {
                break answers;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let right = answers.status_is_right && answers.why_is_right;
        if !right {
            eprintln!("{fault}: status {}, why {}", answers.status_is_right, answers.why_is_right);
        }
        self.0.push(Row {
            fault: fault.into(),
            status: answers.status,
            why: answers.why,
            took: answers.took,
            right,
        });
    }

    /// Waits until nothing is wrong any more.
    pub fn heal(&self, cluster: &impl Administered) {
        let began = Instant::now();
        loop {
            let output = cluster.administer(&["status", "--json"]);
            let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if output.status.success() && status["redundant"] == true {
                return;
            }
            assert!(
                began.elapsed() < 2 * PATIENCE,
                "not healthy again: {:#}{}",
                status["troubles"],
                text(&output.stderr)
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Prints it; fails where a row is wrong.
    pub fn finish(self, name: &str) {
        println!("{name}:\n| fault | weir status | weir why | took | right |\n|---|---|---|---|---|");
        for Row { fault, status, why, took, right } in &self.0 {
            let (why, right) = (why.lines().next().unwrap_or_default(), if *right { "yes" } else { "NO" });
            println!("| {fault} | {status} | {why} | {:.1} s | {right} |", took.as_secs_f64());
        }
        let wrong: Vec<&str> = self.0.iter().filter(|r| !r.right).map(|r| r.fault.as_str()).collect();
        assert!(wrong.is_empty(), "not named as expected: {wrong:?}");
        let mut took: Vec<Duration> = self.0.iter().map(|row| row.took).collect();
        took.sort();
        let median = took[took.len() / 2];
        println!("median of weir why: {:.1} s", median.as_secs_f64());
        assert!(median < 2 * WHY_MEDIAN, "{median:?} on a machine that may be busy");
    }
}
