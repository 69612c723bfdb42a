//! Threads that stay on one processor, and those that they start, which do not.
//!
//! Invariant: only a thread that asked for it stays on a processor. A thread inherits where it may run from
//! the one that starts it, so pools free theirs from that.
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io::{Error, ErrorKind, Result};
use std::sync::OnceLock;

/// Where this process's threads may run: as the first thread had it that asked for one processor.
static ALL: OnceLock<CpuSet> = OnceLock::new();

/// From now on this thread runs on one processor.
pub fn stay_on(processor: usize) -> Result<()> {
    if processor >= CpuSet::MAX_CPU {
        return Err(Error::new(ErrorKind::Unsupported, format!("there is no processor {processor}")));
    }
    let all = sched_getaffinity(None)?;
    ALL.get_or_init(|| all);
    let mut one = CpuSet::new();
    one.set(processor);
    Ok(sched_setaffinity(None, &one)?)
}

/// This thread may run wherever the process may; for threads that another one may have started.
pub fn stay_nowhere() {
    if let Some(all) = ALL.get() {
        // It stays where it is if the machine has taken processors away since.
        let _ = sched_setaffinity(None, all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_another_started_is_freed() {
        let before = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap();
        let bound = std::thread::spawn(move || {
            stay_on(first).unwrap();
            let inherited = std::thread::spawn(|| sched_getaffinity(None).unwrap().count()).join().unwrap();
            let freed = std::thread::spawn(|| {
                stay_nowhere();
                sched_getaffinity(None).unwrap()
            });
            (sched_getaffinity(None).unwrap().count(), inherited, freed.join().unwrap())
        });
        assert_eq!(bound.join().unwrap(), (1, 1, before));
        assert!(stay_on(CpuSet::MAX_CPU).is_err());
    }
}
