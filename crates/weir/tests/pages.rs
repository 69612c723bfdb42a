//! Claim: the pages for users are true. Every command in them runs, one after the other, in an empty
//! directory, and prints the output that the page shows.
//!
//! In a page: `$ ` begins a command, `> ` continues it, other lines of the block are output. `…` stands for
//! anything within a line, on a line of its own for any lines. A command without output shown may print
//! anything. Each must succeed.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::s3::S3;
use common::{can_mount, text, weir_bench};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// For one command, on a loaded machine.
const PATIENCE_S: u32 = 180;
const ANYTHING: &str = "…";

fn pages_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/use")
}

/// A command, the line it is in, and what the page shows of its output.
#[derive(Debug, PartialEq)]
struct Step {
    line: usize,
    command: String,
    shown: Vec<String>,
}

fn steps(page: &str) -> Vec<Step> {
    let (mut steps, mut inside) = (Vec::<Step>::new(), false);
    for (n, line) in page.lines().enumerate() {
        if line.starts_with("```") {
            inside = line == "```console";
        } else if !inside {
        } else if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { line: n + 1, command: command.into(), shown: Vec::new() });
        } else if let Some(step) = steps.last_mut() {
            match line.strip_prefix("> ") {
                Some(more) => step.command = format!("{}\n{more}", step.command),
                None => step.shown.push(line.to_owned()),
            }
        }
    }
    steps
}

/// Whether a line is as shown: the parts between `…` one after the other. Any amount of space is one space.
fn line_is(shown: &str, line: &str) -> bool {
    let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (shown, line) = (squeeze(shown), squeeze(line));
    let parts: Vec<&str> = shown.split(ANYTHING).map(str::trim).collect();
    let (first, last) = (parts[0], parts[parts.len() - 1]);
    if parts.len() == 1 {
        return shown == line;
    }
    if !line.starts_with(first) || !line.ends_with(last) {
        return false;
    }
    let mut rest = &line[first.len()..];
    parts[1..].iter().all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

fn output_is(shown: &[String], lines: &[&str]) -> bool {
    match (shown.split_first(), lines.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first.trim() == ANYTHING => {
            (0..=lines.len()).any(|skipped| output_is(rest, &lines[skipped..]))
        }
        (Some((first, rest)), Some((line, left))) => line_is(first, line) && output_is(rest, left),
        _ => false,
    }
}

/// The directory of a page; processes that a page started there end with it.
struct Place(tempfile::TempDir);

impl Place {
    fn bash(&self, script: &str) -> std::process::Output {
        let binary = Path::new(env!("CARGO_BIN_EXE_weir")).parent().unwrap();
        let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
        let mut timeout = Command::new("timeout");
        timeout.arg(PATIENCE_S.to_string()).args(["bash", "-euo", "pipefail", "-c", script]);
        timeout.current_dir(self.0.path()).env("PATH", path).stdin(Stdio::null()).output().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.bash(
            "for dir in */; do if mountpoint -q $dir; then weir unmount $dir; fi; done || true
            for cluster in */cluster.toml; do weir down --dir ${cluster%/*}; done",
        );
    }
}

fn run(name: &str) {
    if !can_mount() {
        return;
    }
    // A page that speaks of S3 is given a service.
    let s3 = match name {
        "bursts-to-s3.md" => match S3::start() {
            Some(s3) => Some(s3),
            None => return,
        },
        _ => None,
    };
    let service = s3.as_ref().map_or_else(String::new, |s3| {
        format!("export S3={} KEYS={} BUCKET={}\n", s3.endpoint, s3.keys.display(), s3.path("").display())
    });
    let page = fs::read_to_string(pages_dir().join(name)).unwrap();
    if page.contains("$ weir-bench ") {
        weir_bench();
    }
    let place = Place(tempfile::Builder::new().prefix("weir-page-").tempdir().unwrap());
    for step in steps(&page) {
        let output = place.bash(&format!("{service}{}", step.command));
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        let context = format!("{name}:{}: {}\n--- printed\n{out}--- errors\n{err}", step.line, step.command);
        assert!(output.status.success(), "{} of {context}", output.status);
        let lines: Vec<&str> = out.lines().collect();
        let shown = step.shown.join("\n");
        assert!(
            step.shown.is_empty() || output_is(&step.shown, &lines),
            "{context}--- the page shows\n{shown}"
        );
    }
}

macro_rules! pages {
    ($($test:ident: $page:literal,)*) => {
        const PAGES: &[&str] = &[$($page),*];
        $(#[test]
        fn $test() {
            run($page);
        })*
    };
}

pages! {
    the_page_of_a_beamline_is_so: "beamline.md",
    the_page_of_home_directories_is_so: "home-directories.md",
    the_page_of_a_migration_is_so: "migration.md",
    the_page_of_a_copy_elsewhere_is_so: "copy-elsewhere.md",
    the_page_of_a_replica_is_so: "replica.md",
    the_page_of_bursts_is_so: "bursts-to-s3.md",
    the_page_of_comparing_is_so: "compare.md",
}

#[test]
fn every_page_has_a_test() {
    let names = fs::read_dir(pages_dir()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let found: BTreeSet<String> = names.collect();
    assert_eq!(found, PAGES.iter().map(ToString::to_string).collect());
    for page in PAGES {
        let text = fs::read_to_string(pages_dir().join(page)).unwrap();
        assert!(steps(&text).len() > 5, "{page} shows nothing");
    }
}

#[test]
fn a_wrong_output_is_found() {
    let steps = steps("text\n$ not in a block\n```console\n$ a\n> b\nx … z\n…\nend\n$ c\n```\n");
    let step = |line, command: &str, shown: &[&str]| Step {
        line,
        command: command.into(),
        shown: shown.iter().map(ToString::to_string).collect(),
    };
    assert_eq!(steps, [step(4, "a\nb", &["x … z", "…", "end"]), step(9, "c", &[])]);
    let is = |lines: &[&str]| output_is(&steps[0].shown, lines);
    assert!(is(&["x   y z", "1", "2", "end"]) && is(&["x z", "end"]));
    assert!(!is(&["x y", "end"]) && !is(&["x z"]) && !is(&["x z", "end", "more"]) && !is(&["a x z", "end"]));
    assert!(line_is("a…", "abc") && !line_is("a…", "ba") && !line_is("abc", "abcd"));
}
