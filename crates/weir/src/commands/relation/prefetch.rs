//! `weir relation prefetch`: recalls the offline data of many files and directories before it is read.
//!
//! Memory is a window of files, for any number of them: the files of the window are requested ahead of the
//! awaited one, and movers recall them in parallel. One that cannot be recalled is reported, and the others
//! are recalled all the same.
use crate::commands::file::tiering;
use clap::{Args, ValueHint};
use serde_json::json;
use std::collections::VecDeque;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::progress::Progress;
use weir_admin::table;

/// Files that are requested ahead of the awaited one.
const AHEAD: usize = 256;

#[derive(Args)]
pub struct Prefetch {
    /// Files, and directories with everything below them, on a mount
    #[arg(value_hint = ValueHint::AnyPath, required_unless_present = "list")]
    pub paths: Vec<PathBuf>,
    /// Read paths from this file, one per line; - for the standard input
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub list: Option<PathBuf>,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

/// The result.
#[derive(Default)]
struct Tally {
    files: u64,
    brought: u64,
    bytes: u64,
    failed: u64,
    first_error: Option<Failure>,
    /// Shown during a wait.
    progress: Option<Progress>,
}

pub fn run(args: &Prefetch) -> Outcome<()> {
    let mut tally = Tally::default();
    let mut wanted: VecDeque<(PathBuf, u64)> = VecDeque::new();
    for path in &args.paths {
        walk(path, &mut tally, &mut wanted)?;
    }
    if let Some(list) = &args.list {
        for line in lines_of(list)? {
            let line = line.doing(format_args!("read {}", list.display()))?;
            if !line.is_empty() {
                walk(Path::new(&line), &mut tally, &mut wanted)?;
            }
        }
    }
    while let Some(next) = wanted.pop_front() {
        finish(next, &mut tally);
    }
    tally.progress = None;
    if args.json {
        let Tally { files, brought, bytes, failed, .. } = tally;
        table::json(&json!({ "files": files, "brought": brought, "bytes": bytes, "failed": failed }));
    } else {
        let bytes = table::bytes(tally.bytes);
        println!("{} of {} files were offline: {bytes} recalled", tally.brought, tally.files);
    }
    tally.first_error.map_or(Ok(()), Err)
}

fn lines_of(list: &Path) -> Outcome<Box<dyn Iterator<Item = std::io::Result<String>>>> {
    if list == Path::new("-") {
        return Ok(Box::new(std::io::stdin().lock().lines()));
    }
    let file = std::fs::File::open(list).doing(format_args!("open {}", list.display()))?;
    Ok(Box::new(std::io::BufReader::new(file).lines()))
}

/// Requests all regular files at and below a path, and waits for the first ones when there are many.
fn walk(path: &Path, tally: &mut Tally, wanted: &mut VecDeque<(PathBuf, u64)>) -> Outcome<()> {
    let mut left = vec![path.to_path_buf()];
    while let Some(path) = left.pop() {
        let kind = match std::fs::symlink_metadata(&path) {
            Ok(found) => found.file_type(),
            Err(e) => {
                tally.fail(Err::<(), _>(e).doing(format_args!("stat {}", path.display())));
                continue;
            }
        };
        if kind.is_dir() {
            // One directory at a time: its own entries, not those below.
            match std::fs::read_dir(&path) {
                Ok(entries) => left.extend(entries.filter_map(|entry| entry.ok().map(|e| e.path()))),
                Err(e) => tally.fail(Err::<(), _>(e).doing(format_args!("list {}", path.display()))),
            }
        } else if kind.is_file() {
            want(path, tally, wanted);
        }
    }
    Ok(())
}

fn want(path: PathBuf, tally: &mut Tally, wanted: &mut VecDeque<(PathBuf, u64)>) {
    tally.files += 1;
    let away = tiering::offline(&path).and_then(|bytes| {
        if bytes > 0 {
            tiering::want(&path)?;
        }
        Ok(bytes)
    });
    match away {
        Ok(0) => {}
        Ok(bytes) => wanted.push_back((path, bytes)),
        Err(e) => tally.fail::<()>(Err(e)),
    }
    while wanted.len() > AHEAD {
        if let Some(next) = wanted.pop_front() {
            finish(next, tally);
        }
    }
}

fn finish((path, bytes): (PathBuf, u64), tally: &mut Tally) {
    let (files, bytes_so_far) = (tally.files, table::bytes(tally.bytes));
    let text = format!("{files} files, {bytes_so_far} recalled; waiting for {}", path.display());
    tally.progress.get_or_insert_with(Progress::default).show(text);
    match tiering::wait(&path) {
        Ok(()) => {
            tally.brought += 1;
            tally.bytes += bytes;
        }
        Err(e) => tally.fail::<()>(Err(e)),
    }
}

impl Tally {
    /// The first one is the command's, the others are printed at once.
    fn fail<T>(&mut self, outcome: Outcome<T>) {
        let Err(e) = outcome else { return };
        self.failed += 1;
        match &self.first_error {
            None => self.first_error = Some(e),
            Some(_) => eprintln!("{e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_cannot_be_recalled_are_counted_and_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        for name in ["a", "d/b"] {
            std::fs::write(dir.path().join(name), b"x").unwrap();
        }
        let (mut tally, mut wanted) = (Tally::default(), VecDeque::new());
        walk(dir.path(), &mut tally, &mut wanted).unwrap();
        walk(&dir.path().join("nowhere"), &mut tally, &mut wanted).unwrap();
        assert_eq!((tally.files, tally.failed, tally.brought), (2, 3, 0), "none is on a Weir");
        let failure = tally.first_error.unwrap();
        let (error, _) = failure.parts();
        assert!(error.contains("is not on a Weir file system"), "{error}");
    }
}
