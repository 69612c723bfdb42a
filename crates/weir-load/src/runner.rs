//! Repeats a workload: baseline, run, baseline, run …, each in a fresh directory that is removed afterwards.

use crate::failure::failed;
use crate::machine::{file_system, machine};
use crate::options::Common;
use crate::report::{Report, Sample, rows};
use crate::work::{Launch, Outcome};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use weir_proto::{Error, Result};

/// The directories of one run.
#[derive(Clone)]
pub(crate) struct Place {
    /// The run's directory, through each mount.
    pub(crate) dirs: Vec<PathBuf>,
    /// This is the baseline: bypass the page cache.
    pub(crate) direct: bool,
    pub(crate) launch: Launch,
    pub(crate) bad: u64,
    pub(crate) first_bad: Option<String>,
}

impl Place {
    /// The mount that worker `n` uses.
    pub(crate) fn dir(&self, n: usize) -> &Path {
        &self.dirs[n % self.dirs.len()]
    }

    /// Makes a directory within the run's own; returns its path through each mount.
    pub(crate) fn sub_dirs(&self, name: &str) -> Result<Vec<PathBuf>> {
        let dirs: Vec<PathBuf> = self.dirs.iter().map(|d| d.join(name)).collect();
        fs::create_dir_all(&dirs[0]).map_err(|e| failed("make the directory", &dirs[0], &e))?;
        Ok(dirs)
    }

    /// Counts errors, and returns the outcome.
    pub(crate) fn note(&mut self, outcome: Outcome) -> Outcome {
        self.bad += outcome.bad + outcome.failed;
        if self.first_bad.is_none() {
            self.first_bad.clone_from(&outcome.first_bad);
        }
        outcome
    }
}

pub(crate) fn repeat(
    workload: &str,
    options: &impl Serialize,
    common: &Common,
    notes: &[&str],
    mut once: impl FnMut(&mut Place) -> Result<Vec<Sample>>,
) -> Result<Report> {
    let launch = Launch::new(common)?;
    let (mut runs, mut baselines) = (Vec::new(), Vec::new());
    let (mut bad, mut first_bad) = (0, None);
    for run in 0..common.runs {
        if let Some(dir) = &common.baseline {
            let dirs = std::slice::from_ref(dir);
            let (samples, _) = in_fresh_directory(dirs, run, true, common.keep, &launch, &mut once)?;
            baselines.push(samples);
        }
        let (samples, place) = in_fresh_directory(&common.dirs, run, false, common.keep, &launch, &mut once)?;
        runs.push(samples);
        bad += place.bad;
        first_bad = first_bad.or(place.first_bad);
    }
    Ok(Report {
        workload: workload.into(),
        options: serde_json::to_value(options).expect("options are plain data"),
        machine: machine(),
        file_system: file_system(&common.dirs[0]),
        baseline_file_system: common.baseline.as_deref().map(file_system),
        runs: usize::from(common.runs),
        rows: rows(&runs, &baselines),
        bad,
        first_bad,
        notes: notes.iter().map(|n| n.to_string()).collect(),
    })
}

fn in_fresh_directory(
    dirs: &[PathBuf],
    run: u16,
    direct: bool,
    keep: bool,
    launch: &Launch,
    once: &mut impl FnMut(&mut Place) -> Result<Vec<Sample>>,
) -> Result<(Vec<Sample>, Place)> {
    let name = format!("weir-load-{}-{run}", std::process::id());
    let dirs: Vec<PathBuf> = dirs.iter().map(|d| d.join(&name)).collect();
    fs::create_dir_all(&dirs[0]).map_err(|e| failed("make the directory", &dirs[0], &e))?;
    for other in &dirs[1..] {
        if !other.is_dir() {
            let (first, other) = (dirs[0].display(), other.display());
            let context =
                format!("{first} is not seen as {other}: the directories must be mounts of the same one");
            return Err(Error::invalid(context));
        }
    }
    let mut place = Place { dirs, direct, launch: launch.clone(), bad: 0, first_bad: None };
    let samples = once(&mut place);
    if !keep {
        // The error of the run itself is more useful than that of the cleanup.
        let removed = fs::remove_dir_all(&place.dirs[0]);
        let samples = samples?;
        removed.map_err(|e| failed("remove the directory", &place.dirs[0], &e))?;
        return Ok((samples, place));
    }
    Ok((samples?, place))
}
