//! Compares ARCHITECTURE.md's table of crates with the real dependencies of each crate.
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

/// Names of all functions of a crate's sources, and of tests that a macro makes from lines like `claim: 0..8,
/// [Fault];`.
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

/// All documents: of the repository's root and below `docs`.
fn documents() -> Vec<PathBuf> {
    let (mut found, mut dirs) = (Vec::new(), vec![root().join("docs")]);
    let is_document = |path: &PathBuf| path.extension().is_some_and(|e| e == "md");
    found.extend(entries(&root()).into_iter().filter(is_document));
    while let Some(dir) = dirs.pop() {
        let (below, files): (Vec<_>, Vec<_>) = entries(&dir).into_iter().partition(|path| path.is_dir());
        dirs.extend(below);
        found.extend(files.into_iter().filter(is_document));
    }
    found.sort();
    found
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Targets of Markdown links, `](target)`, but for those on the web.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|target| !target.starts_with("http"))
}

/// The anchor that a page's heading has: lower case, no punctuation, dashes for spaces.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_matches(['#', ' ']).to_lowercase();
    kept.chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut followed = 0;
    for page in documents() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: there is no {link}", page.display());
            if !heading.is_empty() {
                let text = std::fs::read_to_string(&target).unwrap();
                let found =
                    text.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == heading);
                assert!(found, "{}: {link} leads to no heading", page.display());
            }
            followed += 1;
        }
    }
    assert!(followed > 100, "only {followed} links");
}

/// Pages that follow the code name functions as `name()`, each defined in a file that the page links to.
#[test]
fn functions_in_pages_about_internals_exist() {
    let pages = documents().into_iter().filter(|page| page.parent().unwrap().ends_with("internals"));
    let mut named = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let sources = links(&text).filter(|link| link.contains("crates/"));
        let known: BTreeSet<String> =
            sources.flat_map(|link| defined(&page.parent().unwrap().join(link))).collect();
        for quoted in text.split('`').skip(1).step_by(2) {
            let Some(function) = quoted.strip_suffix("()") else { continue };
            assert!(known.contains(function), "{}: no linked file defines {quoted}", page.display());
            named += 1;
        }
    }
    assert!(named > 100, "only {named} functions named");
}

/// Names of the functions in a file, or in all files of a directory.
fn defined(path: &Path) -> BTreeSet<String> {
    if path.is_dir() {
        return entries(path).iter().flat_map(|path| defined(path)).collect();
    }
    let text = std::fs::read_to_string(path).unwrap();
    let after_fn = text.split("fn ").skip(1);
    let name = |rest: &str| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    after_fn.map(name).collect()
}
