//! The progress of long work: one line of a terminal that changes, or a line at intervals in a log.
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines if standard error is not a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// How often the terminal shows that time passes.
const TICK: Duration = Duration::from_millis(200);

/// Shown until it is dropped.
pub struct Progress {
    /// On a terminal.
    bar: Option<ProgressBar>,
    /// When the last line was due.
    line: Mutex<Instant>,
}

impl Default for Progress {
    fn default() -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("a valid template");
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(TICK);
            bar
        });
        Progress { bar, line: Mutex::new(Instant::now()) }
    }
}

impl Progress {
    pub fn show(&self, text: impl Into<String>) {
        match &self.bar {
            Some(bar) => bar.set_message(text.into()),
            None if self.is_line_due(Instant::now()) => eprintln!("{}", text.into()),
            None => {}
        }
    }

    fn is_line_due(&self, now: Instant) -> bool {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = now.saturating_duration_since(*line) >= LINE_EVERY;
        if is_due {
            *line = now;
        }
        is_due
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_a_line_now_and_then() {
        let (progress, begun) = (Progress { bar: None, line: Mutex::new(Instant::now()) }, Instant::now());
        let due = |s: u64| progress.is_line_due(begun + Duration::from_secs(s));
        assert_eq!([due(5), due(11), due(12), due(20), due(22)], [false, true, false, false, true]);
    }
}
