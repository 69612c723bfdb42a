//! Results of a workload: figures with median, spread and the raw baseline, as text or JSON.

use crate::machine::Machine;
use serde::Serialize;
use std::fmt::Write as _;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Higher,
    Lower,
}

/// One figure of one run.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) value: f64,
}

impl Sample {
    pub(crate) fn rate(name: &'static str, unit: &'static str, value: f64) -> Sample {
        Sample { name, unit, better: Better::Higher, value }
    }
    pub(crate) fn cost(name: &'static str, unit: &'static str, value: f64) -> Sample {
        Sample { name, unit, better: Better::Lower, value }
    }
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// `None` without values.
    pub fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => return None,
            n if n % 2 == 1 => values[middle],
            _ => f64::midpoint(values[middle - 1], values[middle]),
        };
        Some(Spread { median, min: values[0], max: values[values.len() - 1] })
    }
}

/// One figure over all runs.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub unit: String,
    pub better: Better,
    pub value: Spread,
    /// The result of this workload on the baseline directory.
    pub baseline: Option<Spread>,
    /// `value.median / baseline.median`.
    pub ratio: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub workload: String,
    pub options: serde_json::Value,
    pub machine: Machine,
    /// Type of the file system under test.
    pub file_system: String,
    pub baseline_file_system: Option<String>,
    pub runs: usize,
    pub rows: Vec<Row>,
    /// Blocks, frames or files that were missing or wrong when read back, and operations that failed.
    pub bad: u64,
    pub first_bad: Option<String>,
    pub notes: Vec<String>,
}

impl Report {
    /// Whether all data was present and correct.
    pub fn is_good(&self) -> bool {
        self.bad == 0
    }

    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|r| r.name == name)
    }

    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report is plain data")
    }

    pub fn table(&self) -> String {
        let mut out = String::new();
        let m = &self.machine;
        let gib = m.memory_bytes as f64 / f64::from(1 << 30);
        let _ = writeln!(out, "{} on {}, runs: {}", self.workload, self.file_system, self.runs);
        let _ = writeln!(
            out,
            "{}, {} cores, {gib:.1} GiB, Linux {}, weir {}",
            m.cpu, m.cores, m.kernel, m.version
        );
        let header = ["", "median", "min", "max", "unit", "baseline", "ratio"].map(String::from);
        let lines: Vec<[String; 7]> = std::iter::once(header).chain(self.rows.iter().map(cells)).collect();
        let width = |column: usize| lines.iter().map(|l| l[column].chars().count()).max().unwrap_or(0);
        for line in &lines {
            let _ = write!(out, "{:<w$}", line[0], w = width(0));
            for (column, cell) in line.iter().enumerate().skip(1) {
                let w = width(column);
                // Units are aligned left, figures right.
                let _ = if column == 4 { write!(out, "  {cell:<w$}") } else { write!(out, "  {cell:>w$}") };
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        let _ = match &self.first_bad {
            None => writeln!(out, "everything read back was right"),
            Some(first) => writeln!(out, "BAD: {} (first: {first})", self.bad),
        };
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }
}

fn cells(row: &Row) -> [String; 7] {
    [
        row.name.clone(),
        figure(row.value.median),
        figure(row.value.min),
        figure(row.value.max),
        row.unit.clone(),
        row.baseline.map_or(String::new(), |b| figure(b.median)),
        row.ratio.map_or(String::new(), |r| format!("{r:.2}")),
    ]
}

/// Three or more digits.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Joins runs: the rows in the order of the first run.
pub(crate) fn rows(runs: &[Vec<Sample>], baselines: &[Vec<Sample>]) -> Vec<Row> {
    let values = |runs: &[Vec<Sample>], name: &str| {
        let of_run = |run: &Vec<Sample>| run.iter().find(|s| s.name == name).map(|s| s.value);
        Spread::of(runs.iter().filter_map(of_run).collect())
    };
    let Some(first) = runs.first() else { return vec![] };
    let row = |s: &Sample| {
        let value = values(runs, s.name).expect("the first run has it");
        let baseline = values(baselines, s.name);
        let ratio = baseline.filter(|b| b.median > 0.0).map(|b| value.median / b.median);
        Row { name: s.name.into(), unit: s.unit.into(), better: s.better, value, baseline, ratio }
    };
    first.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_ratio() {
        let run = |v| vec![Sample::rate("write", "MiB/s", v)];
        let rows = rows(&[run(3.0), run(1.0), run(2.0)], &[run(4.0)]);
        assert_eq!(rows[0].value, Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(rows[0].ratio, Some(0.5));
        assert_eq!(Spread::of(vec![1.0, 2.0]).unwrap().median, 1.5);
    }
}
