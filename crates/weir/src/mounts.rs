//! What the mounts of this machine say of themselves: whether they answer, and what they lost.
//!
//! Invariant: looking never hangs. A mount whose process is stopped holds the thread that asks it; that thread is left behind.
use crate::file;
use crate::fuse;
use crate::place::{Place, RoleName};
use rustix::io::Errno;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// How long a mount may take to answer from its memory.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether a mount answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Reach {
    #[serde(rename = "answers")]
    Answers,
    /// It is stopped, or waits for something.
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
    /// How often changes or locks were lost since it started.
    pub losses: u64,
    /// The last of them.
    pub last_losses: Value,
}

/// Those that `weir up` made.
pub fn of(place: &Place) -> Vec<MountState> {
    place.of_role(RoleName::Mount).map(|process| look(&process.name, &process.path)).collect()
}

/// All others of this machine that are dead. Which cluster they were of is not known any more.
pub fn dead_beside(known: &[MountState]) -> Vec<PathBuf> {
    let others = fuse::mount_points().into_iter().filter(|path| !known.iter().any(|m| m.path == *path));
    // Together: one that hangs keeps the others waiting once.
    let asked: Vec<_> = others.map(|path| (ask(&path, is_dead), path)).collect();
    asked.into_iter().filter_map(|(dead, path)| dead.answer().unwrap_or(false).then_some(path)).collect()
}

fn is_dead(path: &Path) -> bool {
    // Not its attributes: the kernel may know those.
    matches!(rustix::fs::statfs(path), Err(Errno::NOTCONN))
}

fn look(name: &str, path: &Path) -> MountState {
    let said = |state, answer: Value| MountState {
        name: name.into(),
        path: path.into(),
        state,
        losses: answer["losses"].as_u64().unwrap_or(0),
        last_losses: answer["last_losses"].clone(),
    };
    if !fuse::is_mounted(path) {
        return said(Reach::NotMounted, Value::Null);
    }
    match ask(path, |path| (is_dead(path), file::ask(path, file::CLIENT))).answer() {
        Some((true, _)) => said(Reach::Dead, Value::Null),
        Some((false, Ok(answer))) => said(Reach::Answers, answer),
        Some((false, Err(_))) | None => said(Reach::Silent, Value::Null),
    }
}

/// A question to a file system that may hang.
pub struct Asked<T>(Receiver<T>);

impl<T> Asked<T> {
    /// `None`: not in time.
    pub fn answer(&self) -> Option<T> {
        self.0.recv_timeout(PATIENCE).ok()
    }
}

/// Asks on a thread of its own, which is left behind if there is no answer.
pub fn ask<T: Send + 'static>(path: &Path, question: impl FnOnce(&Path) -> T + Send + 'static) -> Asked<T> {
    let (tx, rx) = channel();
    let path = path.to_path_buf();
    std::thread::spawn(move || {
        let _ = tx.send(question(&path)); // nobody waits any more
    });
    Asked(rx)
}
