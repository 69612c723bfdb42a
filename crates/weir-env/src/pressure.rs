//! Pressure of a machine: for how much of the time work waited for processors, disks or memory.
//!
//! Linux measures it (PSI); without it nothing is known. Knows nothing of the decisions that use it.
use crate::Instant;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// In each of the last ten seconds on average, or of the last two to four if that is more: the time in which
/// some task waited, in hundredths of a per cent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pressure {
    pub cpu: u16,
    pub io: u16,
    pub memory: u16,
}

/// Reads a machine's pressure; `None`: it does not measure it.
#[derive(Clone)]
pub struct PressureSource(pub Arc<dyn Fn() -> Option<Pressure> + Send + Sync>);

impl PressureSource {
    pub fn read(&self) -> Option<Pressure> {
        (self.0)()
    }
}

/// The kernel adds to its totals every two seconds.
const SPAN: Duration = Duration::from_secs(2);

/// Figures of one resource: `some avg10=12.34 avg60=… avg300=… total=…` is the first line of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Figures {
    /// In hundredths of a per cent.
    avg10: u16,
    /// Since the machine started.
    total_us: u64,
}

impl Figures {
    pub fn of_file(file: &str) -> Option<Figures> {
        let some = file.lines().find_map(|line| line.strip_prefix("some "))?;
        let value = |name| some.split_whitespace().find_map(|word| word.strip_prefix(name));
        let (whole, part) = value("avg10=")?.split_once('.')?;
        let (whole, part): (u16, u16) = (whole.parse().ok()?, part.get(..2)?.parse().ok()?);
        let total_us = value("total=")?.parse().ok()?;
        (whole <= 100).then_some(Figures { avg10: whole * 100 + part, total_us })
    }
}

/// Earlier figures. The average of ten seconds is late by as many, and an overload begins at once.
#[derive(Default)]
pub(crate) struct Recent(Mutex<[Option<Read>; 2]>);

/// Figures of processors, disks and memory, and when they were read.
type Read = (Instant, [Figures; 3]);

impl Recent {
    /// The pressure, when these figures are read.
    pub fn pressure(&self, now: Instant, read: [Figures; 3]) -> Pressure {
        let mut before = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if before[1].is_none_or(|(at, _)| now.since(at) >= SPAN) {
            *before = [before[1], Some((now, read))];
        }
        let [cpu, io, memory] = std::array::from_fn(|n| {
            let lately = before[0].map_or(0, |(at, figures)| {
                let waited_us = read[n].total_us.saturating_sub(figures[n].total_us);
                (waited_us * 10_000 / (now.since(at).as_micros() as u64).max(1)).min(10_000) as u16
            });
            read[n].avg10.max(lately)
        });
        Pressure { cpu, io, memory }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_file_is_read_and_nothing_else() {
        let file = |avg10: &str| {
            format!(
                "some avg10={avg10} avg60=1.00 avg300=0.50 total=77\nfull avg10=3.00 avg60=0.00 total=5\n"
            )
        };
        for (file, expected) in [
            (file("0.00"), Some(0)),
            (file("12.34"), Some(1234)),
            (file("100.00"), Some(10_000)),
            (file("400.00"), None),
            (file("x"), None),
            ("some avg10=1.00".to_owned(), None),
            ("full avg10=3.00".to_owned(), None),
            (String::new(), None),
        ] {
            let expected = expected.map(|avg10| Figures { avg10, total_us: 77 });
            assert_eq!(Figures::of_file(&file), expected, "{file}");
        }
    }

    #[test]
    fn pressure_that_begins_is_seen_within_four_seconds() {
        let recent = Recent::default();
        let mut waited_ms = 0;
        // From the second second on work waits for nine tenths of the time, and the average is late.
        for (half_seconds, expected) in
            (0..).zip([0, 0, 0, 0, 0, 1800, 3000, 3857, 9000, 9000, 9000, 9000, 9000])
        {
            let read = Figures { avg10: 0, total_us: waited_ms * 1000 };
            let idle = Figures { avg10: 123, total_us: 0 };
            let now = Instant(half_seconds * 500_000_000);
            let seen = recent.pressure(now, [read, idle, idle]);
            assert_eq!((seen.cpu, seen.io), (expected, 123), "after {half_seconds} half seconds");
            waited_ms += if half_seconds >= 4 { 450 } else { 0 };
        }
    }
}
