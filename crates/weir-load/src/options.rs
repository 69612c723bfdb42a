//! Options that all workloads share, and the parser of sizes.

use crate::cpu::Watched;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Common {
    /// Directories on the file system under test; several are several mounts of the same directory.
    /// Bytes that one worker writes through one mount are read by another through the next
    #[arg(required = true, value_name = "DIR")]
    pub dirs: Vec<PathBuf>,
    /// Run the same on this plain directory before each run, with direct I/O where sizes allow
    #[arg(long, value_name = "DIR")]
    pub baseline: Option<PathBuf>,
    /// Number of runs; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
    /// Threads (or processes) that work at once
    #[arg(long, short = 'j', default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: u16,
    /// Processes instead of threads
    #[arg(long)]
    pub processes: bool,
    /// Seed of the bytes that are written
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Leave the files there
    #[arg(long)]
    pub keep: bool,
    /// Command that runs [`crate::worker_main`]; needed for `processes`.
    #[arg(skip)]
    #[serde(skip)]
    pub worker_command: Vec<String>,
    /// Processes whose CPU time is shown beside the figures.
    #[arg(skip)]
    #[serde(skip)]
    pub watched: Vec<Watched>,
}

impl Common {
    /// Defaults, for callers that are not a command line.
    pub fn at(dir: impl Into<PathBuf>) -> Common {
        Common {
            dirs: vec![dir.into()],
            baseline: None,
            runs: 3,
            jobs: 2,
            processes: false,
            seed: 1,
            keep: false,
            worker_command: vec![],
            watched: vec![],
        }
    }
}

/// "4096", "64KiB", "4MiB", "1GiB" (powers of 1024), "6.25MB", "1GB", "47kB" (powers of 1000).
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: f64 = match &text[digits.len()..] {
        "" | "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" | "K" | "k" => 1024.0,
        "MiB" | "M" => 1024.0 * 1024.0,
        "GiB" | "G" => 1024.0 * 1024.0 * 1024.0,
        "TiB" | "T" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        unit => return Err(format!("{unit:?} is not a unit; use B, kB, MB, GB, KiB, MiB or GiB")),
    };
    let number: f64 =
        digits.trim().parse().map_err(|_| format!("{text:?} is not a size; write it like 4MiB or 6.25MB"))?;
    let bytes = (number * unit).round();
    if !(1.0..=1e18).contains(&bytes) {
        return Err(format!("{text:?} is not between 1 byte and 10^18 bytes"));
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4MiB", 4 << 20),
            ("6.25MB", 6_250_000),
            ("47kB", 47_000),
            ("1G", 1 << 30),
            ("8 KiB", 8192),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes));
        }
        for text in ["", "MiB", "-1", "0", "1e30", "4mib", "x"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
