//! Lines of the log whose number follows from the number of requests: a few of each kind, then their number.
//!
//! Invariant: at most [`LINES_MAX`] lines of a kind per [`PERIOD_NS`]; the next line has the number of those
//! left out. The kinds are those of the code. Knows nothing of their contents.
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Enough to see whether they differ.
pub const LINES_MAX: u32 = 10;
/// A minute.
pub const PERIOD_NS: u64 = 60_000_000_000;

#[derive(Default, Debug)]
pub struct Lines(Mutex<BTreeMap<&'static str, Kind>>);

#[derive(Default, Debug)]
struct Kind {
    period_began_ns: u64,
    /// Logged in this period.
    logged: u32,
    left_out: u64,
}

/// Lines like this one that were not logged since the last one that was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeftOut(pub u64);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " (before it, {n} more like this)"),
        }
    }
}

impl Lines {
    /// `None`: this line is left out.
    pub fn admit(&self, kind: &'static str, now_ns: u64) -> Option<LeftOut> {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = kinds.entry(kind).or_default();
        if now_ns.saturating_sub(of.period_began_ns) >= PERIOD_NS {
            (of.period_began_ns, of.logged) = (now_ns, 0);
        }
        if of.logged >= LINES_MAX {
            of.left_out += 1;
            return None;
        }
        of.logged += 1;
        Some(LeftOut(std::mem::take(&mut of.left_out)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_thousand_failures_are_ten_lines_a_minute() {
        let lines = Lines::default();
        let logged = |from_s: u64| -> Vec<u64> {
            let at = |n: u64| from_s * 1_000_000_000 + n * 10_000;
            (0..100_000).filter_map(|n| lines.admit("refused", at(n))).map(|left_out| left_out.0).collect()
        };
        assert_eq!(logged(100), [0; 10]);
        let mut next = [0; 10];
        next[0] = 99_990;
        assert_eq!(logged(200), next, "the next one shows how many were left out");
        assert_eq!(lines.admit("another kind", 200_000_000_000), Some(LeftOut(0)));
        assert_eq!(format!("no{}, no{}", LeftOut(0), LeftOut(3)), "no, no (before it, 3 more like this)");
    }
}
