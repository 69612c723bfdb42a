//! Description of the machine that was measured.

use serde::Serialize;
use std::fs;
use std::path::Path;

#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_bytes: u64,
    pub kernel: String,
    pub os: String,
    /// Version of the measuring program.
    pub version: String,
}

/// Reads it from the system; values that cannot be read are "unknown".
pub fn machine() -> Machine {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|l| l.starts_with(name));
        line.and_then(|l| l.split_once([':', '='])).map(|(_, v)| v.trim().trim_matches('"').to_string())
    };
    let unknown = || "unknown".to_string();
    let memory = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|v| v.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()));
    let kernel = read("/proc/sys/kernel/osrelease").trim().to_string();
    Machine {
        cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(unknown),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory.unwrap_or(0) * 1024,
        kernel: if kernel.is_empty() { unknown() } else { kernel },
        os: field(&read("/etc/os-release"), "PRETTY_NAME").unwrap_or_else(unknown),
        version: env!("CARGO_PKG_VERSION").to_string(),
    }
}

/// Type of the file system that holds `path`, as in the system's mount table.
pub(crate) fn file_system(path: &Path) -> String {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let best = mounts
        .lines()
        .filter_map(|l| {
            let mut words = l.split(' ').skip(1);
            Some((words.next()?.replace("\\040", " "), words.next()?.to_string()))
        })
        .filter(|(at, _)| path.starts_with(at))
        .enumerate()
        .max_by_key(|(i, (at, _))| (at.len(), *i)); // of two mounts on one directory the later one is on top
    best.map_or("unknown".to_string(), |(_, (_, kind))| kind)
}
