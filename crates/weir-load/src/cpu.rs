//! Processor time during a measurement: by process, and the rest of the machine.
//!
//! Read from `/proc`, so that the measured processes need not help. Knows no more of them than the names that
//! it gets.
use crate::report::Sample;
use std::fs;

/// Ticks of `/proc` per second: fixed by Linux for every architecture that this runs on.
const TICKS_PER_S: f64 = 100.0;

/// The group to which a process is counted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CpuRole {
    Client,
    Storage,
    /// Metadata and coordinator.
    Names,
}

/// A process whose time is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watched {
    pub role: CpuRole,
    pub pid: i32,
}

/// Ticks used so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Used {
    user: u64,
    kernel: u64,
}

impl Used {
    fn plus(self, other: Used) -> Used {
        Used { user: self.user + other.user, kernel: self.kernel + other.kernel }
    }
    fn since(self, before: Used) -> Used {
        Used {
            user: self.user.saturating_sub(before.user),
            kernel: self.kernel.saturating_sub(before.kernel),
        }
    }
    fn all(self) -> u64 {
        self.user + self.kernel
    }
}

/// The machine's counters at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Snapshot {
    client: Used,
    storage: Used,
    names: Used,
    application: Used,
    machine: Used,
}

impl Snapshot {
    fn take(watched: &[Watched]) -> Snapshot {
        let of = |role| {
            let mine = watched.iter().filter(|w| w.role == role);
            mine.map(|w| of_process(&w.pid.to_string())).fold(Used::default(), Used::plus)
        };
        Snapshot {
            client: of(CpuRole::Client),
            storage: of(CpuRole::Storage),
            names: of(CpuRole::Names),
            application: of_process("self"),
            machine: of_machine(&fs::read_to_string("/proc/stat").unwrap_or_default()),
        }
    }
}

/// Measures from its creation.
pub(crate) struct Cpu<'a> {
    watched: &'a [Watched],
    before: Snapshot,
}

impl<'a> Cpu<'a> {
    pub(crate) fn start(watched: &'a [Watched]) -> Cpu<'a> {
        Cpu { watched, before: Snapshot::take(watched) }
    }

    /// CPU-seconds per 10⁹ payload bytes, by group. Empty if no process is watched.
    pub(crate) fn per_gb(&self, names: &[&'static str; 8], payload_bytes: u64) -> Vec<Sample> {
        if self.watched.is_empty() || payload_bytes == 0 {
            return Vec::new();
        }
        let (now, before) = (Snapshot::take(self.watched), self.before);
        let client = now.client.since(before.client);
        let storage = now.storage.since(before.storage);
        let meta = now.names.since(before.names);
        let application = now.application.since(before.application);
        let machine = now.machine.since(before.machine);
        let known = client.all() + storage.all() + meta.all() + application.all();
        // Interrupts, kernel threads, and all other processes.
        let rest = machine.all().saturating_sub(known);
        let ticks = [
            client.user,
            client.kernel,
            storage.user,
            storage.kernel,
            meta.all(),
            application.all(),
            rest,
            machine.all(),
        ];
        let per_gb = |ticks: u64| ticks as f64 / TICKS_PER_S / (payload_bytes as f64 / 1e9);
        names.iter().zip(ticks).map(|(name, ticks)| Sample::cost(name, "CPU-s/GB", per_gb(ticks))).collect()
    }
}

fn of_process(pid: &str) -> Used {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(Used::default(), |stat| times(&stat))
}

/// Fields 14 and 15 of `/proc/PID/stat`. The second field is the program's name and may hold spaces and
/// parentheses.
fn times(stat: &str) -> Used {
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace();
    let user = fields.nth(11).and_then(|f| f.parse().ok()).unwrap_or(0);
    let kernel = fields.next().and_then(|f| f.parse().ok()).unwrap_or(0);
    Used { user, kernel }
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, …
fn of_machine(stat: &str) -> Used {
    let line = stat.lines().next().unwrap_or("");
    let fields: Vec<u64> = line.split_ascii_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    let at = |i: usize| fields.get(i).copied().unwrap_or(0);
    Used { user: at(0) + at(1), kernel: at(2) + at(5) + at(6) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_for_any_program_name() {
        let stat = "17 (a) b (c) S 1 17 17 0 -1 4194560 100 0 0 0 120 34 5 6 20 0 1 0 99 1 2";
        assert_eq!(times(stat), Used { user: 120, kernel: 34 });
        assert_eq!(times("17"), Used::default());
        let machine = of_machine("cpu  10 2 30 400 5 6 7 0 0 0\ncpu0 1 1 1 1 1 1 1");
        assert_eq!(machine, Used { user: 12, kernel: 43 });
    }

    #[test]
    fn work_of_this_process_is_reported() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let watched = [Watched { role: CpuRole::Client, pid }];
        let cpu = Cpu::start(&watched);
        let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let mut sum = 0u64;
        loop {
            (0..1_000_000u64).for_each(|n| sum = sum.wrapping_mul(31).wrapping_add(n));
            let samples = cpu.per_gb(&names, 1_000_000_000);
            if samples[0].value + samples[1].value > 0.05 && samples[7].value > 0.05 {
                break;
            }
        }
        assert!(sum != 1 && Cpu::start(&[]).per_gb(&names, 1).is_empty());
    }
}
