//! Makes a failing run small: fewer operations, fewer faults, as long as it still fails.
//!
//! Any failure counts: a smaller run with another failure is an equally good start for debugging.

use crate::oracles::Oracles;
use crate::{Broken, Options, run};

/// Runs that a shrink may take.
const TRIES_MAX: u32 = 60;

/// The command that repeats a run.
pub fn command(seed: u64, options: &Options) -> String {
    let names: Vec<&str> = options.faults.iter().map(|k| k.name()).collect();
    let mut words = vec![
        format!("cargo run -p weir-sim -- --seed {seed}"),
        format!("--operations {} --pause-ms {}", options.operations, options.pause_ms_max),
        format!("--faults {}", if names.is_empty() { "none".into() } else { names.join(",") }),
    ];
    if !options.mute.is_empty() {
        let mute: Vec<String> = options.mute.iter().map(u64::to_string).collect();
        words.push(format!("--mute {}", mute.join(",")));
    }
    if options.scheme != Options::default().scheme {
        words.push(format!("--scheme {}", options.scheme));
    }
    if options.home {
        words.push("--home yes".into());
    }
    if options.snapshots {
        words.push("--snapshots yes".into());
    }
    if options.clones {
        words.push("--clones yes".into());
    }
    if options.locks {
        words.push("--locks yes".into());
    }
    if options.tree {
        words.push("--tree yes".into());
    }
    if options.trash {
        words.push("--trash yes".into());
    }
    if options.replica {
        words.push("--replica yes".into());
    }
    if options.limits {
        words.push("--limits yes".into());
    }
    if options.servers.certificates {
        words.push("--certificates yes".into());
    }
    if options.servers.copies > 1 {
        words.push(format!("--copies {}", options.servers.copies));
    }
    if options.servers.coordinators > 1 {
        words.push(format!("--coordinators {}", options.servers.coordinators));
    }
    if let Some(percent) = options.servers.processor {
        words.push(format!("--processor {percent}"));
    }
    if options.watch.oracles != Oracles::default() {
        words.push(format!("--oracles {}", options.watch.oracles.names()));
    }
    words.join(" ")
}

/// The smallest failing run that was found, at first `broken` itself.
pub fn shrink(broken: Box<Broken>) -> Box<Broken> {
    let mut smallest = broken;
    let mut tries = TRIES_MAX;
    loop {
        let before = (smallest.options.operations, smallest.options.mute.len());
        for candidate in candidates(&smallest.options, smallest.faults_chosen) {
            if tries == 0 {
                return smallest;
            }
            tries -= 1;
            if let Err(still) = run(smallest.seed, &candidate) {
                smallest = still;
                break;
            }
        }
        if before == (smallest.options.operations, smallest.options.mute.len()) {
            return smallest;
        }
    }
}

/// Smaller runs, the boldest first.
fn candidates(options: &Options, faults_chosen: u64) -> Vec<Options> {
    let n = options.operations;
    let shorter = [n / 4, n / 2, n * 3 / 4, n.saturating_sub(1)];
    let mut list: Vec<Options> = shorter
        .into_iter()
        .filter(|fewer| *fewer > 0 && *fewer < n)
        .map(|operations| Options { operations, ..options.clone() })
        .collect();
    for n in (0..faults_chosen).filter(|n| !options.mute.contains(n)) {
        let mut fewer = options.clone();
        fewer.mute.insert(n);
        list.push(fewer);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FaultKind;

    #[test]
    fn smaller_runs_are_smaller_and_the_command_says_all() {
        let options = Options { operations: 10, faults: vec![FaultKind::KillMeta], ..Options::default() };
        let list = candidates(&options, 3);
        assert_eq!(list.len(), 4 + 3);
        assert!(list.iter().all(|o| o.operations < 10 || o.mute.len() == 1));
        let muted = Options { mute: [1, 2].into(), ..options };
        assert_eq!(
            command(7, &muted),
            "cargo run -p weir-sim -- --seed 7 --operations 10 --pause-ms 200 --faults kill-meta --mute 1,2"
        );
        assert_eq!(candidates(&muted, 3).len(), 4 + 1);
    }
}
