//! `weir top`, `weir waits`, `weir why` and `weir iohist`: the present work and waits of a cluster's
//! processes.
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
