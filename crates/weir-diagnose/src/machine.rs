//! The processes and mounts of one machine, as they were found there.
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// The role of a process that `weir up` starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoleName {
    /// Not a role of Weir: a member of the etcd that keeps the cluster map.
    Etcd,
    Coord,
    Meta,
    Storage,
    Mount,
    Mover,
    Console,
}
impl RoleName {
    /// Whether other processes connect to it.
    pub fn listens(self) -> bool {
        !matches!(self, RoleName::Mount | RoleName::Mover | RoleName::Etcd | RoleName::Console)
    }
    pub fn command(self) -> &'static str {
        match self {
            RoleName::Etcd => "etcd",
            RoleName::Coord => "coord",
            RoleName::Meta => "meta",
            RoleName::Storage => "storage",
            RoleName::Mount => "mount",
            RoleName::Mover => "mover",
            RoleName::Console => "console",
        }
    }
}

pub struct ProcessState {
    pub name: String,
    pub role: RoleName,
    pub lives: bool,
    /// The kernel killed it for want of memory.
    pub out_of_memory: bool,
    pub log: PathBuf,
}

/// Whether a mount answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Reach {
    #[serde(rename = "answers")]
    Answers,
    /// It is stopped, or waits.
    #[serde(rename = "does not answer")]
    Silent,
    /// Its process has ended: "Transport endpoint is not connected".
    #[serde(rename = "dead")]
    Dead,
    #[serde(rename = "not mounted")]
    NotMounted,
}

/// One mount.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MountState {
    pub name: String,
    pub path: PathBuf,
    pub state: Reach,
    /// The number of losses of changes or locks since it started.
    pub losses: u64,
    /// The last of them.
    pub last_losses: Value,
}
