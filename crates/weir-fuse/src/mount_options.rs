//! The options of a live mount that the kernel does not report: a remount may forbid access times.
use crate::mounts::keeps_access_times;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use weir_client::Client;

/// How long a change of the mount's options may stay unnoticed.
const OPTIONS_TTL: Duration = Duration::from_secs(1);

pub struct MountOptions {
    client: Client,
    path: PathBuf,
    /// When they were last read.
    seen: Mutex<Option<Instant>>,
}

impl MountOptions {
    pub fn new(client: Client, path: PathBuf) -> MountOptions {
        MountOptions { client, path, seen: Mutex::default() }
    }

    /// Before an open: the client learns whether reads change access times.
    pub fn check(&self) {
        let now = Instant::now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_none_or(|at| now.duration_since(at) >= OPTIONS_TTL) {
            *seen = Some(now);
            self.client.keep_access_times(keeps_access_times(&self.path));
        }
    }
}
