//! A process's facts about itself and its machine, for `weir support`: without names of files or data of
//! users.
use crate::log;
use std::fs;
use weir_env::Env;

/// Files of the kernel, and the bytes read of each.
const FILES: [(&str, usize); 9] = [
    ("/proc/version", 500),
    ("/proc/uptime", 100),
    ("/proc/loadavg", 100),
    ("/proc/meminfo", 1500),
    ("/proc/pressure/cpu", 300),
    ("/proc/pressure/io", 300),
    ("/proc/pressure/memory", 300),
    ("/proc/diskstats", 8000),
    ("/proc/net/dev", 4000),
];
/// Files of this process.
const OWN: [(&str, usize); 2] = [("/proc/self/status", 2000), ("/proc/self/limits", 2000)];

/// From now on the process shows them.
pub fn show(env: &Env) {
    let _ = env.watch.facts.set(Box::new(facts)); // they are set once per process
}

fn facts() -> Vec<(String, String)> {
    let mut facts = vec![
        ("release".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("processors".to_owned(), processors(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())),
    ];
    facts.extend(FILES.iter().chain(&OWN).map(|(path, bytes)| ((*path).to_owned(), start_of(path, *bytes))));
    facts.push(("log".to_owned(), log::last_lines()));
    facts
}

fn start_of(path: &str, bytes: usize) -> String {
    match fs::read_to_string(path) {
        Ok(text) => text.chars().take(bytes).collect(),
        Err(e) => format!("missing: {e}"),
    }
}

/// `4 of Some processor @ 2 GHz`
fn processors(cpuinfo: &str) -> String {
    let models = cpuinfo.lines().filter_map(|line| line.strip_prefix("model name"));
    let models: Vec<&str> = models.map(|line| line.trim_start_matches([' ', '\t', ':'])).collect();
    format!("{} of {}", models.len(), models.first().unwrap_or(&"an unknown kind"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_shows_its_kernel_memory_and_release() {
        let facts = facts();
        let of = |name: &str| &facts.iter().find(|fact| fact.0 == name).unwrap().1;
        assert!(of("/proc/version").starts_with("Linux version"));
        assert!(of("/proc/meminfo").contains("MemTotal"));
        assert_eq!(of("release"), env!("CARGO_PKG_VERSION"));
        assert_eq!(processors("model name\t: X\nflags\nmodel name\t: X\n"), "2 of X");
    }
}
