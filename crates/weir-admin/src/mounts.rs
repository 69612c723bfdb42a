//! The reports of this machine's mounts: whether they answer, and their losses.
//!
//! Invariant: a check never hangs. A mount whose process is stopped blocks the thread that asks it; that
//! thread is abandoned.
use crate::attribute;
use crate::local::local_cluster::{LocalCluster, Process, RoleName};
use rustix::io::Errno;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use weir_diagnose::{MountState, Reach};

/// How long a mount may take to answer from its memory.
const PATIENCE: Duration = Duration::from_millis(1800);

/// Those that `weir up` made.
pub fn of(local: &LocalCluster) -> Vec<MountState> {
    let begin = |p: &Process| {
        (p.name.clone(), p.path.clone(), weir_fuse::is_mounted(&p.path).then(|| ask(&p.path, query)))
    };
    let asked: Vec<_> = local.of_role(RoleName::Mount).map(begin).collect();
    let state = |(name, path, asked): (String, PathBuf, Option<Asked<(Reach, Value)>>)| {
        let silent = || (Reach::Silent, Value::Null);
        let (state, answer) =
            asked.map_or((Reach::NotMounted, Value::Null), |asked| asked.answer().unwrap_or_else(silent));
        let losses = answer["losses"].as_u64().unwrap_or(0);
        MountState { name, path, state, losses, last_losses: answer["last_losses"].clone() }
    };
    asked.into_iter().map(state).collect()
}

/// All others of this machine that are dead. Their cluster is not known any more.
pub fn other_dead(known: &[MountState]) -> Vec<PathBuf> {
    let others = weir_fuse::mount_points().into_iter().filter(|path| !known.iter().any(|m| m.path == *path));
    let asked: Vec<_> = others.map(|path| (ask(&path, is_dead), path)).collect();
    asked.into_iter().filter_map(|(dead, path)| dead.answer().unwrap_or(false).then_some(path)).collect()
}

fn is_dead(path: &Path) -> bool {
    // An attribute that the mount answers from its memory, and the kernel never.
    matches!(rustix::fs::lgetxattr(path, attribute::CLIENT, &mut [0; 0][..]), Err(Errno::NOTCONN))
}

fn query(path: &Path) -> (Reach, Value) {
    match attribute::ask(path, attribute::CLIENT) {
        Ok(answer) => (Reach::Answers, answer),
        Err(_) if is_dead(path) => (Reach::Dead, Value::Null),
        Err(_) => (Reach::Silent, Value::Null),
    }
}

/// A query of a file system that may hang, with its deadline. Several run in parallel, so that hanging ones
/// are awaited together.
pub struct Asked<T>(Receiver<T>, Instant);

impl<T> Asked<T> {
    /// `None`: not in time.
    pub fn answer(&self) -> Option<T> {
        self.0.recv_timeout(self.1.saturating_duration_since(Instant::now())).ok()
    }
}

/// Asks in a thread of its own, which is abandoned if there is no answer.
pub fn ask<T: Send + 'static>(path: &Path, question: impl FnOnce(&Path) -> T + Send + 'static) -> Asked<T> {
    let (tx, rx) = channel();
    let path = path.to_path_buf();
    std::thread::spawn(move || {
        let _ = tx.send(question(&path)); // the caller may have given up
    });
    Asked(rx, Instant::now() + PATIENCE)
}
