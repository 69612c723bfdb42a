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
    for fold in text.split("<details><summary>").skip(1) {
        let (count, rest) = fold.split_once(" tests").unwrap();
        let list = rest.split("</details>").next().unwrap();
        let tests: Vec<&str> = list.lines().filter(|line| line.starts_with("- `")).collect();
        assert_eq!(tests.len().to_string(), count, "docs/semantics.md: the number above {:?}", tests.first());
        let once: BTreeSet<&&str> = tests.iter().collect();
        assert_eq!(once.len(), tests.len(), "docs/semantics.md names a test twice: {tests:?}");
    }
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

/// Pages that follow the code name functions as `name()`, each defined in the file that the page names with it.
#[test]
fn functions_in_pages_about_internals_exist() {
    let pages = documents().into_iter().filter(|page| page.parent().unwrap().ends_with("internals"));
    let mut named = 0;
    for page in pages {
        let (functions, wrong) = check_functions(&page, &std::fs::read_to_string(&page).unwrap());
        assert!(wrong.is_empty(), "{}:\n{}", page.display(), wrong.join("\n"));
        named += functions;
    }
    assert!(named > 200, "only {named} functions named");
}

#[test]
fn a_function_of_another_linked_file_is_found() {
    let page = root().join("docs/internals/page.md");
    let link = |file: &str| format!("[`{file}`](../../crates/weir/tests/{file})");
    let (this, other) = (link("architecture.rs"), link("pages.rs"));
    let wrong = |text: String| check_functions(&page, &text).1.len();
    assert_eq!(wrong(format!("{this}, `anchor()` and `links()`; `steps()` in {other}. Then `steps()`.")), 0);
    assert_eq!(
        wrong(format!("`anchor()` in {this}.\n\n- {other}, `steps()`. `anchor()`, in `architecture.rs`.")),
        0
    );
    assert_eq!(
        wrong(format!("Functions without a file are in {this}.\n\n`anchor()`.\n\n| a | `links()` |")),
        0
    );
    assert_eq!(
        wrong(format!("{this}, `anchor()`.\n\n{other}, `steps()`. `anchor()`.")),
        1,
        "the file is not named with it"
    );
    assert_eq!(wrong(format!("{other}, `anchor()`. See {this}.")), 1, "another sentence");
    assert_eq!(
        wrong(format!("Functions without a file are in {this}.\n\n## Next\n\n`anchor()`.")),
        1,
        "another section"
    );
    assert_eq!(wrong(format!("{this}, `no_such()`.")), 1);
}

/// A part of a paragraph that decides which file a function is looked for in.
enum Part<'t> {
    File(PathBuf),
    Function(&'t str),
    EndOfSentence,
}

/// How many functions a page names, and those that no file named with them defines. These files are the last one
/// before the function in its paragraph, the next one in its sentence, and those of "Functions without a file are
/// in …" in its section.
fn check_functions(page: &Path, text: &str) -> (usize, Vec<String>) {
    let dir = page.parent().unwrap();
    let linked: BTreeSet<PathBuf> =
        links(text).filter(|link| link.contains("crates/")).map(|link| dir.join(link)).collect();
    let (mut named, mut wrong, mut of_section) = (0, Vec::new(), Vec::new());
    for paragraph in paragraphs(text) {
        let parts = parts(&paragraph, dir, &linked);
        if paragraph.starts_with("## ") {
            of_section.clear();
        } else if paragraph.contains("unctions without a file are in") {
            of_section = parts.iter().filter_map(file_of).cloned().collect();
        }
        for (at, part) in parts.iter().enumerate() {
            let Part::Function(function) = part else { continue };
            let before = parts[..at].iter().rev().find_map(file_of);
            let mut sentence = parts[at..].iter().take_while(|part| !matches!(part, Part::EndOfSentence));
            let behind = sentence.find_map(file_of);
            let mut files = before.into_iter().chain(behind).chain(&of_section);
            if !files.any(|file| defined(file).contains(*function)) {
                wrong.push(format!("`{function}()` is in no file that is named with it: {paragraph}"));
            }
            named += 1;
        }
    }
    (named, wrong)
}

fn file_of<'p>(part: &'p Part<'_>) -> Option<&'p PathBuf> {
    match part {
        Part::File(path) => Some(path),
        _ => None,
    }
}

/// Paragraphs, items of lists, rows of tables and headings, each in one line; without blocks of code.
fn paragraphs(text: &str) -> Vec<String> {
    let (mut found, mut is_code, mut ended) = (Vec::<String>::new(), false, true);
    for line in text.lines().map(str::trim) {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence || line.is_empty() {
            ended = true;
            continue;
        }
        let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let begins = line.starts_with(['|', '#']) || line.starts_with("- ") || number.starts_with(". ");
        match found.last_mut().filter(|_| !ended && !begins) {
            Some(paragraph) => *paragraph = format!("{paragraph} {line}"),
            None => found.push(line.to_owned()),
        }
        ended = false;
    }
    found
}

/// A file is a link to it, or the end of the path of a file that the page links to.
fn parts<'t>(paragraph: &'t str, dir: &Path, linked: &BTreeSet<PathBuf>) -> Vec<Part<'t>> {
    let (mut found, pieces) = (Vec::new(), paragraph.split('`').collect::<Vec<_>>());
    for (n, piece) in pieces.iter().enumerate() {
        let behind = pieces.get(n + 1).and_then(|behind| behind.strip_prefix("]("));
        let link = behind.and_then(|rest| rest.split_once(')')).map(|(link, _)| link);
        if n % 2 == 0 {
            found.extend(piece.contains(". ").then_some(Part::EndOfSentence));
        } else if let Some(link) = link.filter(|link| link.contains("crates/")) {
            found.push(Part::File(dir.join(link)));
        } else if let Some(function) = piece.strip_suffix("()") {
            found.push(Part::Function(function));
        } else if piece.ends_with(".rs") {
            let named: Vec<_> = linked.iter().filter(|path| path.ends_with(piece)).collect();
            assert!(named.len() < 2, "{piece} may be several files, so it needs a link: {paragraph}");
            found.extend(named.first().map(|path| Part::File(path.to_path_buf())));
        }
    }
    found
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

/// A link to a decision with a number leads to the page of that number, and numbers without a page are listed.
#[test]
fn decisions_are_linked_by_their_numbers() {
    let is_number = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_digit());
    let mut linked = 0;
    for page in documents() {
        let text = std::fs::read_to_string(&page).unwrap();
        for (shown, rest) in text.split("](").zip(text.split("](").skip(1)) {
            let (shown, link) = (shown.rsplit('[').next().unwrap(), rest.split(')').next().unwrap());
            let file = link.rsplit('/').next().unwrap();
            let (number, shown) =
                (file.get(..4).unwrap_or(""), shown.split_whitespace().last().unwrap_or(""));
            if is_number(number) && is_number(shown) {
                let same = number.parse::<u32>().unwrap() == shown.parse::<u32>().unwrap();
                assert!(same, "{}: decision {shown} leads to {link}", page.display());
                linked += 1;
            }
        }
    }
    assert!(linked > 50, "only {linked} links to decisions");

    let index = std::fs::read_to_string(root().join("docs/decisions/README.md")).unwrap();
    let pages = entries(&root().join("docs/decisions"));
    let numbers: BTreeSet<u32> =
        pages.iter().filter_map(|page| page.file_name()?.to_str()?.get(..4)?.parse().ok()).collect();
    for number in 1..=*numbers.last().unwrap() {
        let row =
            if numbers.contains(&number) { format!("| [{number:04}](") } else { format!("| {number:04} |") };
        assert!(index.contains(&row), "docs/decisions/README.md has no row {row}");
    }
}
