//! Obstacles: the reasons why an operation changes nothing now and is tried again later.
use crate::lease::{Conflict, NoteConflict};
use weir_proto::{Error, InodeId};

/// Why an attempt of an operation ended without a reply.
#[derive(Debug)]
pub enum Halt {
    /// The obstacles that it has met are the reason. It has changed nothing, and is tried again.
    Blocked,
    /// The answer is this error.
    Failed(Error),
}

/// An attempt of an operation, or a part of one.
pub type Attempt<T> = Result<T, Halt>;

impl From<Error> for Halt {
    fn from(e: Error) -> Halt {
        Halt::Failed(e)
    }
}

/// Lets the store discard a transaction that halts, and keeps the halt. If it is blocked, the error for the
/// store means nothing else, and costs no allocation.
pub fn discarding<T>(ran: Attempt<T>, halt: &mut Option<Halt>) -> weir_proto::Result<T> {
    ran.map_err(|ended| {
        let error = match &ended {
            Halt::Blocked => Error::unavailable(String::new()),
            Halt::Failed(e) => e.clone(),
        };
        *halt = Some(ended);
        error
    })
}

/// A reason to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Obstacle {
    /// A lease, or an append token.
    Lease(Conflict),
    /// The names of a directory are not enumerated yet.
    NotEnumerated { dir: InodeId },
    /// There is no space before a volume's trash, this directory, is emptied.
    Full { trash: InodeId },
    /// A snapshot of the volume with this topmost directory is being taken.
    Snapshot { root: InodeId },
}

impl Obstacle {
    /// The inode that operations wait on until it is gone.
    pub fn ino(&self) -> InodeId {
        match self {
            Obstacle::Lease(conflict) => conflict.ino,
            Obstacle::NotEnumerated { dir: ino }
            | Obstacle::Full { trash: ino }
            | Obstacle::Snapshot { root: ino } => *ino,
        }
    }
}

/// The obstacles that an operation has met; empty: nothing is in its way.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Obstacles(Vec<Obstacle>);

impl Obstacles {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn clear(&mut self) {
        self.0.clear();
    }
    /// Ends the attempt if there is an obstacle.
    pub fn halt(&self) -> Attempt<()> {
        if self.is_empty() { Ok(()) } else { Err(Halt::Blocked) }
    }
    pub fn push(&mut self, obstacle: Obstacle) {
        self.0.push(obstacle);
    }
    pub fn iter(&self) -> std::slice::Iter<'_, Obstacle> {
        self.0.iter()
    }
    pub fn first(&self) -> Option<&Obstacle> {
        self.0.first()
    }
    /// The leases and append tokens among them.
    pub fn leases(&self) -> impl Iterator<Item = &Conflict> {
        self.0.iter().filter_map(|obstacle| match obstacle {
            Obstacle::Lease(conflict) => Some(conflict),
            Obstacle::NotEnumerated { .. } | Obstacle::Full { .. } | Obstacle::Snapshot { .. } => None,
        })
    }
}

impl NoteConflict for Obstacles {
    fn note(&mut self, conflict: Conflict) {
        let obstacle = Obstacle::Lease(conflict);
        if !self.0.contains(&obstacle) {
            self.0.push(obstacle);
        }
    }
}
