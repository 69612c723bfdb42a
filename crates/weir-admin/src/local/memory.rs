//! Whether the kernel killed a process for want of memory, by the kernel's log.
//!
//! Only root may read that log, and it holds the last messages only: no means "not known".
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

const KERNEL_LOG: &str = "/dev/kmsg";
/// More than any record has.
const RECORD_BYTES: usize = 8192;
/// More records than the largest log that is usual.
const RECORDS_MAX: usize = 200_000;
/// The unit of start times in `/proc`.
const TICKS_PER_S: u64 = 100;

/// Those of these processes (pid, start time in clock ticks) that the kernel killed for want of memory.
pub fn killed_of(processes: &[(i32, u64)]) -> Vec<i32> {
    if processes.is_empty() {
        return Vec::new();
    }
    let records = records().unwrap_or_default();
    let is_killed = |(pid, started): &&(i32, u64)| records.iter().any(|r| is_kill_of(r, *pid, *started));
    processes.iter().filter(is_killed).map(|(pid, _)| *pid).collect()
}

/// The kernel's log; an error: this user may not read it.
fn records() -> Result<Vec<String>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let log = rustix::fs::open(KERNEL_LOG, flags, Mode::empty())?;
    let (mut found, mut buffer) = (Vec::new(), vec![0; RECORD_BYTES]);
    for _ in 0..RECORDS_MAX {
        match rustix::io::read(&log, &mut buffer[..]) {
            Ok(0) | Err(Errno::AGAIN) => break,
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&buffer[..bytes]);
                found.extend(text.contains("Killed process").then(|| text.into_owned()));
            }
            // Records were overwritten meanwhile: it continues with the oldest one.
            Err(Errno::PIPE | Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}

/// `3,1234,5678901,-;Out of memory: Killed process 77 (weir) total-vm:…`: the time is in µs since the start
/// of the machine. An earlier process of this number was killed before this one started.
fn is_kill_of(record: &str, pid: i32, started_ticks: u64) -> bool {
    let Some((head, text)) = record.split_once(';') else { return false };
    let at_us = head.split(',').nth(2).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    let Some((why, killed)) = text.split_once("Killed process ") else { return false };
    let is_it = killed.split(' ').next() == Some(&pid.to_string());
    why.to_ascii_lowercase().contains("out of memory")
        && is_it
        && at_us / 1_000_000 >= started_ticks / TICKS_PER_S
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_for_want_of_memory_is_recognized() {
        let of = |text: &str| format!("3,900,50000000,-;{text}\n SUBSYSTEM=x\n");
        let machine = of("Out of memory: Killed process 77 (weir) total-vm:9kB, anon-rss:8kB, UID:0");
        let group = of("Memory cgroup out of memory: Killed process 77 (weir) total-vm:9kB");
        for record in [&machine, &group] {
            assert!(is_kill_of(record, 77, 4_900), "{record}");
            assert!(!is_kill_of(record, 7, 4_900), "another process");
            assert!(!is_kill_of(record, 77, 5_100), "it started after that");
        }
        for other in
            [of("oom_reaper: reaped process 77 (weir)"), of("x: Killed process 77"), "garbage".into()]
        {
            assert!(!is_kill_of(&other, 77, 0), "{other}");
        }
        assert!(killed_of(&[]).is_empty());
    }
}
