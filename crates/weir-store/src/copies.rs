//! Copies to a target, of places that are filled here or move here: their progress, their pace beside
//! clients, and the reports to the coordinator.
use crate::membership::Membership;
use crate::pace::Pace;
use crate::refilled::Progress;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Env;
use weir_proto::{PgId, Result};
use weir_watch::Counter;

pub(crate) struct Copies {
    env: Env,
    members: Arc<Membership>,
    pace: Arc<Pace>,
    progress: Mutex<Progress>,
    /// Bytes of places that came here, copied or rebuilt.
    copied: Counter,
}

impl Copies {
    pub fn new(env: &Env, members: &Arc<Membership>, pace: &Arc<Pace>) -> Arc<Copies> {
        let target = members.target().to_string();
        Arc::new(Copies {
            env: env.clone(),
            members: members.clone(),
            pace: pace.clone(),
            progress: Mutex::default(),
            copied: env.watch.counter("weir_store_copied_bytes_total", ("target", &target)),
        })
    }
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pass over a group begins.
    pub fn begin(&self, group: PgId) {
        self.progress().begin(self.members.target(), group, self.env.clock.now());
    }
    /// A stripe or cell was checked; `copied`: its bytes here if it was copied.
    pub fn seen(&self, group: PgId, copied: Option<u64>) {
        self.progress().seen(group, copied);
        self.copied.add(copied.unwrap_or(0));
    }
    pub fn end(&self, group: PgId) {
        self.progress().end(group);
    }
    /// Ends the reports of other groups.
    pub fn end_others(&self, goes_on: impl Fn(&PgId) -> bool) {
        self.progress().end_others(goes_on);
    }

    /// Records copied bytes, and waits if the copies slow clients' writes.
    pub async fn keep_pace(&self, copied: u64) {
        self.pace.copied(self.env.clock.now(), copied);
        loop {
            match self.pace.pause(self.env.clock.now()) {
                Duration::ZERO => return,
                pause => self.env.clock.sleep(pause).await,
            }
        }
    }

    /// Reports the progress at an interval, and without waiting for the coordinator.
    pub fn report_if_due(&self) {
        let due = self.progress().due(self.env.clock.now());
        if let Some(reports) = due {
            let sent = self.members.peers().refill_reported(reports);
            self.env.tasks.spawn("report a refill", async move {
                if let Err(e) = sent.await {
                    tracing::debug!("report a refill: {e}"); // the next report says more
                }
            });
        }
    }
    /// Reports the progress now.
    pub async fn report(&self) -> Result<()> {
        let reports = self.progress().reports(self.env.clock.now());
        self.members.peers().refill_reported(reports).await
    }
}
