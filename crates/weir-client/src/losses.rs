//! Changes and locks that this client has lost, for administrators.
use crate::types::Loss;
use crate::wall_time;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use weir_env::Env;
use weir_proto::{Error, InodeId};

/// Losses that are remembered with their names.
const NAMED_MAX: usize = 16;

pub struct Losses {
    env: Env,
    noted: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    count: u64,
    /// The newest last.
    named: VecDeque<Loss>,
}

impl Losses {
    pub fn new(env: Env) -> Losses {
        Losses { env, noted: Mutex::default() }
    }
    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().expect("no holder panics")
    }
    /// A loss in the log: thousands of files may be lost with a session.
    pub fn log(&self, e: &Error) {
        if let Some(more) = self.env.watch.line("changes or locks are lost") {
            tracing::error!("{e}{more}");
        }
    }
    pub fn note(&self, ino: InodeId, e: &Error) {
        let at = wall_time(&self.env);
        let mut noted = self.noted();
        noted.count += 1;
        if noted.named.len() == NAMED_MAX {
            noted.named.pop_front();
        }
        noted.named.push_back(Loss { ino, at, what: e.to_string() });
    }
    /// The number of losses, and the last ones.
    pub fn list(&self) -> (u64, Vec<Loss>) {
        let noted = self.noted();
        (noted.count, noted.named.iter().cloned().collect())
    }
}
