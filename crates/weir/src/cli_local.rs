//! The command line of `weir demo`.
use clap::{Args, ValueHint};
use std::path::PathBuf;

#[derive(Args)]
pub struct Demo {
    /// Directory for the cluster, its targets and its mount [default: a new one in the system's temporary
    /// directory]
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// How long the detectors run, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=3600))]
    pub seconds: u32,
    /// Frames per second of each detector [default: well below what this machine can do, at most 25]
    #[arg(long)]
    pub hz: Option<f64>,
    /// Detectors
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub detectors: u32,
    /// Keep the cluster in memory instead of on the disk
    #[arg(long)]
    pub memory: bool,
    /// Directory of real frames (*.cbf, *.cbf.bz2) [default: WEIR_FRAMES, else synthesized]
    #[arg(long, value_hint = ValueHint::DirPath)]
    pub frames: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
