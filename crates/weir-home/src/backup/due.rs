//! A mover makes the backups that are due, one at a time.
//!
//! Invariant: a backup in progress ends with the mover's session, because the next mover works on the same
//! tree. The homes stay open from one backup to the next.
use super::{Job, Progress, root};
use crate::mover::{HomeOf, HomeUse, OpenHome};
use crate::{Home, Outcome};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_client::Client;
use weir_env::{BoxFuture, Env};
use weir_proto::backup::{Backup, BackupOutcome};
use weir_proto::relation::HomeIds;
use weir_proto::{Result, VolumeId};

/// Interval at which the leader is asked whether one is due: backups take hours.
const POLL: Duration = Duration::from_secs(5);

pub struct Due {
    env: Env,
    opener: Arc<dyn OpenHome>,
    homes: Mutex<BTreeMap<(VolumeId, String), Arc<dyn Home>>>,
}

impl Due {
    pub fn new(env: Env, opener: Arc<dyn OpenHome>) -> Due {
        Due { env, opener, homes: Mutex::default() }
    }

    pub fn forget_homes(&self) {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Runs until it is dropped.
    pub fn run<'a>(&'a self, client: &'a Client) -> BoxFuture<'a, ()> {
        Box::pin(self.run_unboxed(client))
    }
    async fn run_unboxed(&self, client: &Client) {
        loop {
            match self.make_one(client).await {
                Ok(true) => {}
                Ok(false) => self.env.clock.sleep(POLL).await,
                Err(e) => {
                    tracing::debug!("no backups: {e}");
                    self.env.clock.sleep(POLL).await;
                }
            }
        }
    }

    /// Returns whether one was due.
    async fn make_one(&self, client: &Client) -> Result<bool> {
        // This query costs the leader no commit.
        let now = self.env.clock.wall().0;
        let is_due =
            |backup: &Backup| backup.running.is_none() && backup.due.is_some_and(|at| at.nanos <= now);
        if !client.backups(None).await?.iter().any(is_due) {
            return Ok(false);
        }
        let Some(backup) = client.take_backup(&root(), VolumeId(0), "").await? else { return Ok(false) };
        let (volume, url) = (backup.volume, backup.url.clone());
        let shown = format!("backup of volume {:?} to {url}", backup.volume_name);
        let outcome = match self.make(client, backup).await {
            Ok(outcome) => {
                tracing::info!("{shown}: {outcome:?}");
                outcome
            }
            Err(e) => {
                tracing::warn!("{shown} failed: {e}");
                BackupOutcome::Failed { why: e.to_string() }
            }
        };
        client.backup_done(volume, &url, &outcome).await?;
        Ok(true)
    }

    async fn make(&self, client: &Client, backup: Backup) -> Result<BackupOutcome> {
        let home = self.home(&backup).await?;
        let progress = Arc::new(Progress::default());
        let (env, client) = (self.env.clone(), client.clone());
        let made = Job { env, client, home, backup, progress: progress.clone() }.run().await?;
        Ok(made.outcome(&progress))
    }

    async fn home(&self, backup: &Backup) -> Outcome<Arc<dyn Home>> {
        let lock = || self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (backup.volume, backup.url.clone());
        let known = lock().get(&key).cloned();
        if let Some(home) = known {
            return Ok(home);
        }
        let home = self.opener.open(&home_of(backup)).await?;
        lock().insert(key, home.clone());
        Ok(home)
    }
}

/// The home of a place's backups.
pub fn home_of(backup: &Backup) -> HomeOf {
    let (holds, url) = (HomeUse::Backups(backup.volume), backup.url.clone());
    let (ids, is_new) = (HomeIds::default(), backup.good.is_none());
    HomeOf { holds, url, ids, by: backup.by, is_new, only_reads: false }
}
