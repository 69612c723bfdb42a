//! The state of a cluster and its troubles (`weir status`, `weir events`), the present work and waits of its
//! processes (`weir top`, `weir waits`, `weir iohist`), and the reasons of a delay (`weir why`).
pub mod args;
pub mod events;
mod iohist;
pub mod status;
mod top;
mod waits;
mod why;

pub use iohist::iohist;
pub use top::top;
pub use waits::waits;
pub use why::why;

use std::time::Duration;

/// How long each process may take to answer.
const PATIENCE: Duration = Duration::from_millis(1000);
