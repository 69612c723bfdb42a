//! Lists the directories of clones: those that somebody waits for first, all others in the background.
//!
//! Invariants: each step is one bounded transaction, so others wait for moments only; what is left is found in the store, so a
//! restart changes nothing. A directory that cannot be listed now holds up nobody but those who wait for it.

use crate::executor::Leader;
use crate::namespace::clone;
use crate::service::Meta;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::Instant;
use weir_kv::Read;
use weir_proto::{Error, ErrorKind, InodeId, Result, VolumeId};

/// A directory that could not be listed is tried again after this.
const RETRY: Duration = Duration::from_secs(2);

/// What somebody waits for, and what did not work.
#[derive(Default)]
pub(crate) struct Clones {
    wanted: Mutex<BTreeSet<InodeId>>,
    failed: Mutex<BTreeMap<InodeId, (Instant, String)>>,
    pub call: Notify,
}

impl Leader {
    /// Somebody waits for the names of a clone's directory. False: it is none.
    pub(crate) fn want_clone_names(&self, dir: InodeId) -> Result<bool> {
        let mut is_clone = false;
        self.kv.read(&mut |read| {
            is_clone = clone::is_unlisted(read, dir)?;
            Ok(())
        })?;
        if is_clone {
            self.clones.wanted.lock().unwrap_or_else(PoisonError::into_inner).insert(dir);
            self.clones.call.notify_one();
        }
        Ok(is_clone)
    }
    /// Why they do not come.
    pub(crate) fn why_not_cloned(&self, dir: InodeId) -> Option<String> {
        let failed = self.clones.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get(&dir).map(|(_, why)| format!("what is in directory {dir} is not cloned yet: {why}"))
    }
}

impl Meta {
    /// Lists for ever; returns only the error after which the node must stop.
    pub(crate) async fn list_clones(&self) -> Error {
        let leader = self.leader().clone();
        loop {
            match self.list_next().await {
                Ok(true) => {}
                Ok(false) => {
                    let over = leader.env.clock.sleep(RETRY);
                    tokio::select! {
                        biased;
                        () = leader.clones.call.notified() => {}
                        () = over => {}
                    }
                }
                Err(e) => {
                    if let Err(e) = leader.stand(e, "list a clone's directories").await {
                        return e;
                    }
                }
            }
        }
    }

    /// One step. False: there is nothing to do now.
    async fn list_next(&self) -> Result<bool> {
        let leader = self.leader();
        if leader.lock().grace_until.is_some() {
            return Ok(false); // clients of before a restart still come back with their leases
        }
        let Some((volume, dir)) = self.next()? else { return Ok(false) };
        let Some(dir) = dir else {
            if self.step(&mut |cx| clone::end_some(cx, volume)).await? {
                tracing::info!(volume = %volume, "all of a clone is listed");
            }
            return Ok(true);
        };
        match self.step(&mut |cx| clone::list_some(cx, volume, dir)).await {
            Ok(false) => {}
            Ok(true) => {
                self.clones(|c| c.wanted.lock().unwrap_or_else(PoisonError::into_inner).remove(&dir));
                leader.lock().wake(dir);
            }
            Err(e) if e.kind == ErrorKind::Io => return Err(e),
            Err(e) => {
                tracing::warn!(volume = %volume, directory = %dir, "a clone's directory is not listed: {e}");
                let now = leader.env.clock.now();
                let mut failed = leader.clones.failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.insert(dir, (now, e.context));
            }
        }
        Ok(true)
    }

    fn clones<T>(&self, ask: impl FnOnce(&Clones) -> T) -> T {
        ask(&self.leader().clones)
    }

    /// A clone that is not listed, and a directory of it; none: it is at its end.
    fn next(&self) -> Result<Option<(VolumeId, Option<InodeId>)>> {
        let leader = self.leader();
        let now = leader.env.clock.now();
        let waits: BTreeSet<InodeId> = self.clones(|c| {
            let mut failed = c.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.retain(|_, (at, _)| now.since(*at) < RETRY);
            failed.keys().copied().collect()
        });
        let wanted: Vec<InodeId> = self
            .clones(|c| c.wanted.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect());
        let (mut next, mut gone) = (None, Vec::new());
        leader.kv.read(&mut |read: &dyn Read| {
            (next, gone) = (None, Vec::new());
            for dir in &wanted {
                match clone::volume_unlisted(read, *dir)? {
                    Some(volume) if !waits.contains(dir) => {
                        next = Some((volume, Some(*dir)));
                        return Ok(());
                    }
                    Some(_) => {}
                    None => gone.push(*dir),
                }
            }
            next = clone::next_step(read, &waits)?;
            Ok(())
        })?;
        self.clones(|c| {
            c.wanted.lock().unwrap_or_else(PoisonError::into_inner).retain(|dir| !gone.contains(dir));
        });
        Ok(next)
    }
}
