//! A node's interface to the outside: time, randomness, disks, sockets, tasks and buffers.
//!
//! Every other crate takes an [`Env`] and accesses the outside only through it, so a whole cluster can run in
//! one process under one seed. Two implementations: [`real`] (the machine) and [`sim`] (seeded, paused time,
//! disks that lose unsynced writes, a network that drops and partitions). One contract suite runs on both.
//!
//! Knows nothing of files, cells, metadata or messages.

mod buffer;
mod clock;
mod disk;
mod net;
mod pace;
mod pressure;
pub mod real;
mod retry;
pub mod sim;
mod tasks;
pub mod watch;

pub use buffer::{Buf, BufferPool, IO_ALIGN};
pub use clock::{Clock, ClockSource, Instant, Rng, RngSource, TimedOut, WallTime};
pub use disk::{DirEntry, Disk, File, OpenMode, Space};
pub use net::{Addr, BoxReader, BoxStream, BoxWriter, Caller, Listener, Net, Stream, split_shared};
pub use pace::Pace;
pub use pressure::{Pressure, PressureSource};
pub use real::Actor;
pub use retry::{Backoff, Pauses, Retry};
pub use tasks::{Alone, BlocksHere, Lane, TaskHandle, Tasks};

/// A boxed future, for object-safe async seams.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The environment of one node. Cheap to clone; share one per node.
#[derive(Clone)]
pub struct Env {
    pub clock: Clock,
    pub rng: Rng,
    pub disk: std::sync::Arc<dyn Disk>,
    pub net: std::sync::Arc<dyn Net>,
    pub tasks: Tasks,
    pub buffers: BufferPool,
    /// The node's meters and waits.
    pub watch: weir_watch::Watch,
    pub pressure: PressureSource,
    /// The outside is simulated: then whole tables are checked where the machine's time would be too short.
    pub is_simulated: bool,
}

impl Env {
    /// This environment for work that must not wait for the node's other work: its tasks, its timers and the
    /// sockets that they open are served by one thread of its own. That ends with the last clone. Its
    /// tasks must neither block nor compute for long.
    pub fn alone(&self, name: &'static str) -> Env {
        let Alone { clock, tasks } = self.tasks.0.alone(name, self);
        Env { clock, tasks, ..self.clone() }
    }
}
