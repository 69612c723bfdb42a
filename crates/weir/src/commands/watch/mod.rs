//! `weir top`, `weir waits`, `weir why` and `weir iohist`: what the processes of a cluster do and wait for
//! now.
mod evidence;
mod iohist;
mod reasons;
mod top;
mod waits;
mod why;

pub use iohist::iohist;
pub use top::{Names, lines_of, top};
pub use waits::{as_json as waits_json, sorted, waits};
pub use why::why;

use std::time::Duration;

/// How long each process may take to answer.
const PATIENCE: Duration = Duration::from_millis(1000);
