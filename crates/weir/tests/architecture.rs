//! ARCHITECTURE.md's table of crates says what each may use: this compares it with what each really uses.
#![allow(clippy::disallowed_methods, reason = "reads the repository it is in")]
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

type Uses = BTreeMap<String, BTreeSet<String>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The rows `| weir-x | duty | must not know | a, b |` of the table.
fn documented() -> Uses {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut uses = Uses::new();
    for line in text.lines().filter(|l| l.starts_with("| `weir")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, _, _, used] = cells[..] else { panic!("not four cells: {line}") };
        let used =
            used.split(',').map(str::trim).filter(|u| *u != "–").map(|u| format!("weir-{u}")).collect();
        assert!(uses.insert(name.trim_matches('`').to_owned(), used).is_none(), "{name} is there twice");
    }
    uses
}

/// Dependencies between the workspace's crates, without those of tests.
fn real() -> Uses {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let mut uses = Uses::new();
    for package in metadata["packages"].as_array().unwrap() {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let ours = dependencies.filter(|d| d["kind"].is_null()).map(|d| text(&d["name"]));
        uses.insert(text(&package["name"]), ours.filter(|name| name.starts_with("weir-")).collect());
    }
    uses
}

#[test]
fn crates_use_what_the_architecture_says_and_nothing_else() {
    let (documented, real) = (documented(), real());
    assert_eq!(
        documented.keys().collect::<Vec<_>>(),
        real.keys().collect::<Vec<_>>(),
        "the table and the workspace name different crates"
    );
    for (name, used) in &real {
        assert_eq!(&documented[name], used, "{name}: ARCHITECTURE.md (left) and Cargo.toml (right) differ");
    }
}

/// Names of all functions of a crate's sources, and of tests that a macro makes from lines like `claim: 0..8, [Fault];`.
fn functions(krate: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut dirs = vec![root().join("crates").join(krate)];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let after_fn = text.lines().filter_map(|l| {
                    let l = l.trim_start().trim_start_matches("pub ");
                    l.trim_start_matches("async ").strip_prefix("fn ")
                });
                names.extend(after_fn.filter_map(|l| l.split(['(', '<']).next()).map(str::to_owned));
                let claims = text.lines().filter(|l| l.contains("..") && l.ends_with("];"));
                names.extend(
                    claims.filter_map(|l| l.trim_start().split_once(": ")).map(|(name, _)| name.to_owned()),
                );
            }
        }
    }
    names
}

/// The promises name their tests as `crate: test`.
#[test]
fn every_promise_names_tests_that_exist() {
    let text = std::fs::read_to_string(root().join("docs/semantics.md")).unwrap();
    let mut known = BTreeMap::new();
    let mut named = 0;
    for quoted in text.split('`').skip(1).step_by(2) {
        let Some((krate, test)) = quoted.split_once(": ").filter(|(k, _)| k.starts_with("weir")) else {
            continue;
        };
        let functions = known.entry(krate.to_owned()).or_insert_with(|| functions(krate));
        assert!(functions.contains(test), "docs/semantics.md names {quoted}, which does not exist");
        named += 1;
    }
    assert!(named > 20, "only {named} tests named");
}
