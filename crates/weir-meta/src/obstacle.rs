//! Obstacles: the reasons why an operation changes nothing now and is tried again later.
use crate::lease::{Conflict, NoteConflict};
use weir_proto::InodeId;

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
