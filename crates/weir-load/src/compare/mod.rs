//! One kind of work on several directories, interleaved, to compare their file systems.
//!
//! One interleaved run: each row is measured on every directory before the next row begins, and the order of
//! the directories changes from row to row and from round to round. So the background load of a shared
//! machine affects all directories equally, and ratios are taken within a round. Every figure is a rate: a
//! ratio above 1 is faster than the base.
//!
//! Works on any directory, leaves nothing behind, and knows nothing of the file systems that it compares.

mod rows;
mod scene;

pub use rows::RowName;

use crate::block::Pattern;
use crate::failure::failed;
use crate::machine::{Machine, file_system, machine};
use crate::options::parse_bytes;
use crate::report::{Spread, figure};
use clap::ValueEnum;
use scene::{Drops, Scene};
use serde::Serialize;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use weir_proto::{Error, Result};

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    /// Directories to compare, on any file systems. DIR:OTHER reads cold rows through OTHER, another mount of
    /// DIR, whose own memory does not hold what was just written
    #[arg(required = true, value_name = "DIR")]
    pub dirs: Vec<Mounts>,
    /// Directory that the ratios are to [default: the first]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// Rows to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ROWS")]
    pub rows: Vec<RowName>,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Size of the files that are streamed
    #[arg(long, default_value = "256MiB", value_parser = parse_bytes)]
    pub size: u64,
    /// Empty files, for the rows that create, list, find and remove
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub files: u64,
    /// Small files, random reads and synced writes
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub ops: u64,
    /// Writers of the shared file and of the detector's, at once
    #[arg(long, short = 'j', default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: u16,
    /// Of the bytes that are written and of the places that are read
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl Options {
    /// Defaults, for callers that are not a command line.
    pub fn of(dirs: Vec<PathBuf>) -> Options {
        Options {
            dirs: dirs.into_iter().map(|dir| Mounts { dir, other: None }).collect(),
            base: None,
            rows: vec![],
            rounds: 3,
            size: 256 << 20,
            files: 4_000,
            ops: 1_000,
            jobs: 2,
            seed: 1,
        }
    }

    fn rows(&self) -> Vec<RowName> {
        let wanted = |row: &RowName| self.rows.is_empty() || self.rows.contains(row);
        RowName::value_variants().iter().copied().filter(wanted).collect()
    }
}

/// A directory that is compared.
#[derive(Clone, Debug, Serialize)]
pub struct Mounts {
    pub dir: PathBuf,
    /// The directory through another mount.
    pub other: Option<PathBuf>,
}

impl FromStr for Mounts {
    type Err = Infallible;
    fn from_str(text: &str) -> std::result::Result<Mounts, Infallible> {
        let whole = Mounts { dir: text.into(), other: None };
        Ok(match text.split_once(':') {
            Some((dir, other)) if !whole.dir.exists() => {
                Mounts { dir: dir.into(), other: Some(other.into()) }
            }
            _ => whole,
        })
    }
}

impl Mounts {
    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.dir).chain(&self.other)
    }
}

/// Lets the caller of a comparison follow and end it.
pub trait Watcher: Sync {
    /// A measurement is about to begin: the round (from 0), the number of rounds, the row, the directory.
    fn step(&self, _round: u16, _rounds: u16, _row: &str, _dir: &Path) {}
}

/// A watcher that does nothing.
pub struct Unwatched;
impl Watcher for Unwatched {}

/// Set to end the comparison early: it then cleans up and returns an error.
#[derive(Default)]
pub struct Stop(AtomicBool);

impl Stop {
    pub fn set(&self) {
        self.0.store(true, Relaxed);
    }
    pub fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }
    fn check(&self) -> Result<()> {
        match self.is_set() {
            true => Err(Error::unavailable("stopped before the end")),
            false => Ok(()),
        }
    }
}

/// One directory of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Dir {
    /// Its column in the table: A, B, …
    pub label: String,
    pub path: PathBuf,
    /// Cold rows read through this.
    pub other: Option<PathBuf>,
    pub file_system: String,
    pub base: bool,
}

/// One row on one directory.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub label: String,
    /// Median and spread of all rounds.
    pub value: Spread,
    /// Relative to the base in the same round; `None` for the base itself.
    pub ratio: Option<Spread>,
    pub rounds: Vec<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: RowName,
    pub what: String,
    pub unit: &'static str,
    pub figures: Vec<Figure>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub options: Options,
    pub machine: Machine,
    pub dirs: Vec<Dir>,
    pub rows: Vec<Row>,
    /// Parts that were missing or wrong when they were read back.
    pub bad: u64,
    pub first_bad: Option<String>,
    pub notes: Vec<String>,
}

/// Everything is measured, or the error names the directory on which it failed; in both cases nothing is left
/// there.
pub fn run(options: &Options, stop: &Stop, watcher: &dyn Watcher) -> Result<Comparison> {
    let rows = options.rows();
    let base = base(options)?;
    options.dirs.iter().flat_map(Mounts::all).try_for_each(|dir| is_directory(dir))?;
    let mut scenes = Vec::new();
    for (index, dir) in options.dirs.iter().enumerate() {
        scenes.push(Scene::begin(dir, index, options, Pattern::new(options.seed), stop)?);
    }
    has_space(options, &rows)?;
    let mut values: BTreeMap<(RowName, usize), Vec<f64>> = BTreeMap::new();
    for round in 0..options.rounds {
        for scene in &mut scenes {
            scene.next_round(u64::from(round))?;
        }
        for (nth, row) in rows.iter().enumerate() {
            for turn in 0..scenes.len() {
                let index = (turn + nth + usize::from(round)) % scenes.len();
                stop.check()?;
                let scene = &mut scenes[index];
                watcher.step(round, options.rounds, row.name(), scene.dir());
                let value = scene.measure(*row).map_err(|e| e.doing(format_args!("{}", row.name())))?;
                values.entry((*row, index)).or_default().push(value);
            }
        }
    }
    let (mut bad, mut first_bad, mut drops) = (0, None, Vec::new());
    for scene in scenes {
        let ended = scene.end()?;
        bad += ended.bad;
        first_bad = first_bad.or(ended.first_bad);
        drops.push(ended.drops);
    }
    let dirs: Vec<Dir> = options
        .dirs
        .iter()
        .enumerate()
        .map(|(index, Mounts { dir, other })| Dir {
            label: label(index),
            path: dir.clone(),
            other: other.clone(),
            file_system: file_system(dir),
            base: index == base,
        })
        .collect();
    Ok(Comparison {
        options: options.clone(),
        machine: machine(),
        rows: rows.iter().map(|row| joined(*row, base, dirs.len(), &values, options)).collect(),
        bad,
        first_bad,
        notes: notes(&dirs, &drops, &rows),
        dirs,
    })
}

fn label(index: usize) -> String {
    let letter = |n: usize| char::from(b'A' + n as u8);
    match index {
        0..26 => letter(index).to_string(),
        _ => format!("{}{}", label(index / 26 - 1), letter(index % 26)),
    }
}

fn base(options: &Options) -> Result<usize> {
    let Some(base) = &options.base else { return Ok(0) };
    let is = |m: &Mounts| m.dir == *base || fs::canonicalize(&m.dir).ok() == fs::canonicalize(base).ok();
    options.dirs.iter().position(is).ok_or_else(|| {
        Error::invalid(format!("--base {} is none of the directories to compare", base.display()))
    })
}

fn is_directory(dir: &Path) -> Result<()> {
    let meta = fs::metadata(dir).map_err(|e| failed("stat", dir, &e))?;
    match meta.is_dir() {
        true => Ok(()),
        false => Err(Error::invalid(format!("{} is not a directory", dir.display()))),
    }
}

/// Refuses a comparison that does not fit, by file system: several of the directories may be on one.
fn has_space(options: &Options, rows: &[RowName]) -> Result<()> {
    let needed = rows::space(options, rows);
    let mut on: BTreeMap<u64, Vec<&Path>> = BTreeMap::new();
    for Mounts { dir, .. } in &options.dirs {
        let device = fs::metadata(dir).map_err(|e| failed("stat", dir, &e))?.dev();
        on.entry(device).or_default().push(dir);
    }
    for dirs in on.values() {
        let space = rustix::fs::statvfs(dirs[0])
            .map_err(|e| failed("ask for the free space of", dirs[0], &std::io::Error::from(e)))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let needed = needed.saturating_mul(dirs.len() as u64);
        if free < needed {
            let mib = |n: u64| n.div_ceil(1 << 20);
            return Err(Error::no_space(format!(
                "{} has {} MiB free, {} MiB are needed",
                dirs[0].display(),
                free >> 20,
                mib(needed)
            ))
            .hint("choose a smaller --size, or fewer --rows"));
        }
    }
    Ok(())
}

fn joined(
    name: RowName,
    base: usize,
    count: usize,
    values: &BTreeMap<(RowName, usize), Vec<f64>>,
    options: &Options,
) -> Row {
    let of_base = &values[&(name, base)];
    let figure = |index: usize| {
        let own = &values[&(name, index)];
        let ratios = || own.iter().zip(of_base).filter(|(_, b)| **b > 0.0).map(|(v, b)| v / b).collect();
        Figure {
            label: label(index),
            value: Spread::of(own.clone()).expect("there is a round"),
            ratio: (index != base).then(ratios).and_then(Spread::of),
            rounds: own.clone(),
        }
    };
    Row { name, what: name.what(options), unit: name.unit(), figures: (0..count).map(figure).collect() }
}

fn notes(dirs: &[Dir], drops: &[Drops], rows: &[RowName]) -> Vec<String> {
    let mut notes = Vec::new();
    if rows.iter().any(|row| row.is_cold()) {
        notes.push(
            "cold: pages were dropped from the kernel's cache (posix_fadvise); a daemon's own cache stays (see DIR:OTHER)"
                .to_string(),
        );
    }
    for (dir, drops) in dirs.iter().zip(drops) {
        let (label, kind) = (&dir.label, &dir.file_system);
        if let Some(e) = &drops.refused {
            notes.push(format!("{label} ({kind}) does not drop cached pages: {e}; its cold rows are warm"));
        } else if drops.stayed_percent > 0 {
            let percent = drops.stayed_percent;
            notes.push(format!(
                "{label} ({kind}) kept up to {percent} % of the pages: its cold rows are not cold"
            ));
        } else if drops.unknown {
            notes.push(format!(
                "{label} ({kind}): this kernel does not report whether the pages were dropped"
            ));
        }
    }
    notes
}

impl Comparison {
    /// Whether all data was correct when it was read back.
    pub fn is_good(&self) -> bool {
        self.bad == 0
    }

    pub fn row(&self, name: RowName) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a comparison is plain data")
    }

    pub fn table(&self) -> String {
        let mut out = String::new();
        let m = &self.machine;
        let gib = m.memory_bytes as f64 / f64::from(1 << 30);
        let _ = writeln!(
            out,
            "{}, {} cores, {gib:.1} GiB, Linux {}, weir {}, rounds: {}",
            m.cpu, m.cores, m.kernel, m.version, self.options.rounds
        );
        for dir in &self.dirs {
            let base = if dir.base { ", the base of the ratios" } else { "" };
            let other =
                dir.other.as_ref().map_or(String::new(), |o| format!(", cold rows through {}", o.display()));
            let _ = writeln!(out, "{}: {} ({}{other}{base})", dir.label, dir.path.display(), dir.file_system);
        }
        let base = self.dirs.iter().find(|d| d.base).map_or("A", |d| d.label.as_str());
        let mut header = vec![String::new(), "unit".into()];
        for dir in &self.dirs {
            header.extend([dir.label.clone(), "min–max".into()]);
        }
        for dir in self.dirs.iter().filter(|d| !d.base) {
            header.extend([format!("{}/{base}", dir.label), "min–max".into()]);
        }
        let lines: Vec<Vec<String>> = std::iter::once(header).chain(self.rows.iter().map(cells)).collect();
        out += &aligned(&lines);
        let _ = match &self.first_bad {
            None => writeln!(out, "everything read back was right"),
            Some(first) => writeln!(out, "BAD: {} (first: {first})", self.bad),
        };
        for row in &self.rows {
            let _ = writeln!(out, "{}: {}", row.name.name(), row.what);
        }
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }
}

fn cells(row: &Row) -> Vec<String> {
    let range = |s: &Spread, show: fn(f64) -> String| format!("{}–{}", show(s.min), show(s.max));
    let ratio = |r: f64| format!("{r:.2}");
    let mut cells = vec![row.name.name().to_string(), row.unit.to_string()];
    for f in &row.figures {
        cells.extend([figure(f.value.median), range(&f.value, figure)]);
    }
    for r in row.figures.iter().filter_map(|f| f.ratio.as_ref()) {
        cells.extend([ratio(r.median), range(r, ratio)]);
    }
    cells
}

/// Two columns of text aligned left, figures right, ranges left.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let width = |column: usize| {
        lines.iter().filter_map(|l| l.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in lines {
        let mut text = String::new();
        for (column, (cell, w)) in line.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 => write!(text, "{cell:<w$}"),
                n if n == 1 || n % 2 == 1 => write!(text, "  {cell:<w$}"),
                _ => write!(text, "  {cell:>w$}"),
            };
        }
        out += text.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_go_on_after_z() {
        assert_eq!([0, 25, 26, 27, 52].map(label), ["A", "Z", "AA", "AB", "BA"]);
    }

    #[test]
    fn ratios_are_of_one_round() {
        let values = BTreeMap::from([
            ((RowName::Find, 0), vec![10.0, 20.0, 40.0]),
            ((RowName::Find, 1), vec![20.0, 40.0, 20.0]),
        ]);
        let row = joined(RowName::Find, 0, 2, &values, &Options::of(vec![]));
        assert_eq!(row.figures[0].ratio, None);
        assert_eq!(row.figures[1].ratio, Some(Spread { median: 2.0, min: 0.5, max: 2.0 }));
        let row = joined(RowName::Find, 1, 2, &values, &Options::of(vec![]));
        assert_eq!(row.figures[0].ratio, Some(Spread { median: 0.5, min: 0.5, max: 2.0 }));
    }
}
