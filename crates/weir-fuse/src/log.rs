//! Lines of the log about requests of programs: a few of each kind a minute.
use std::fmt::Display;
use std::sync::OnceLock;
use weir_watch::{LeftOut, Watch};

/// The watch of this process: it counts the lines.
static WATCH: OnceLock<Watch> = OnceLock::new();

/// All mounts of a process have one watch.
pub fn count_in(watch: &Watch) {
    let _ = WATCH.set(watch.clone()); // by an earlier mount of this process
}

/// Warns of a failure, unless many of its kind were logged just now.
pub fn warn(kind: &'static str, failure: impl Display) {
    let more = WATCH.get().map_or(Some(LeftOut(0)), |watch| watch.line(kind));
    if let Some(more) = more {
        tracing::warn!("{failure}{more}");
    }
}
