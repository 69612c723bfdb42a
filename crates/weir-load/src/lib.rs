//! Self-verifying workloads over plain paths: detectors, streams, a shared file, metadata, small files,
//! fsync; and all of these interleaved on several directories.
//!
//! Each workload writes bytes that identify their object and offset, reads them back and compares. Memory is
//! touched before the clock starts. With `--baseline DIR` the same shape runs just before each run on a plain
//! directory (direct I/O where sizes allow), so that a figure is accompanied by the machine's own performance
//! at that time.
//!
//! Knows nothing of Weir's protocol, nor of its caller: any mounted file system will do.
#![forbid(unsafe_code)]
// A workload is an outside user of a mounted file system: it uses the operating system directly, with real
// files, threads, processes and time. It never runs in the simulator.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod baseline;
mod block;
pub mod compare;
mod cpu;
pub mod detector;
mod failure;
mod frames;
pub mod fsync;
mod histogram;
mod machine;
pub mod mdtest;
mod options;
mod report;
mod runner;
pub mod shared;
pub mod smallfile;
pub mod stream;
mod work;

pub use baseline::{Baseline, baseline};
pub use cpu::{CpuRole, Watched};
pub use histogram::Histogram;
pub use machine::{Machine, machine};
pub use options::{Common, parse_bytes};
pub use report::{Better, Report, Row, Spread};
pub use work::worker_main;
