//! Enumerates the directories of clones: those with waiting operations first, all others in the background.
//!
//! Invariants: each step is one bounded transaction, so other operations wait for moments only; the store has
//! the remaining work, so a restart changes nothing. A directory that cannot be enumerated now delays only
//! operations on it.

use crate::leader::Leader;
use crate::leader::clones::{Asked, Clones};
use crate::namespace::clone;
use crate::namespace::clone::list::Listing;
use crate::session::Session;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::PoisonError;
use std::time::Duration;
use weir_kv::Read;
use weir_proto::meta::RecoverFile;
use weir_proto::{Error, ErrorKind, InodeId, Result, SessionId, VolumeId};
use weir_rpc::Connection;

/// A directory that could not be enumerated is retried after this.
const RETRY: Duration = Duration::from_secs(2);
/// The patience for a client that recovers a file; targets may be silent.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(30);

pub async fn run(leader: Arc<Leader>) -> Error {
    CloneLister { leader }.run().await
}

/// Enumerates the directories of clones.
struct CloneLister {
    leader: Arc<Leader>,
}

impl CloneLister {
    /// Enumerates for ever; returns only the error after which the node must stop.
    async fn run(&self) -> Error {
        let leader = self.leader.clone();
        loop {
            match self.list_next().await {
                Ok(true) => {}
                Ok(false) => {
                    let over = leader.base.env.clock.sleep(RETRY);
                    tokio::select! {
                        biased;
                        () = leader.clones.call.notified() => {}
                        () = over => {}
                    }
                }
                Err(e) => {
                    if let Err(e) = leader.base.retry_job(e, "list a clone's directories").await {
                        return e;
                    }
                }
            }
        }
    }

    /// One step. False: there is nothing to do now.
    async fn list_next(&self) -> Result<bool> {
        let leader = &self.leader;
        if leader.base.lock().grace.until.is_some() {
            return Ok(false); // clients from before a restart may still return with their leases
        }
        let Some((volume, dir)) = self.next()? else { return Ok(false) };
        let Some(dir) = dir else {
            if self.leader.operations.step(&mut |cx| Ok(clone::end::end_some(cx, volume)?)).await? {
                tracing::info!(volume = %volume, "all of a clone is listed");
            }
            return Ok(true);
        };
        match self.leader.operations.step(&mut |cx| clone::list::list_some(cx, volume, dir)).await {
            Ok(Listing::Some) => {}
            Ok(Listing::WaitsFor(file)) => self.ask_to_recover(dir, file),
            Ok(Listing::All) => {
                self.clones(|c| c.wanted.lock().unwrap_or_else(PoisonError::into_inner).remove(&dir));
                leader.base.lock().wake(dir);
            }
            Err(e) if e.kind == ErrorKind::Io => return Err(e),
            Err(e) => {
                if let Some(more) = leader.base.env.watch.line("a clone's directory is not listed") {
                    let directory = dir;
                    tracing::warn!(%volume, %directory, "a clone's directory is not listed: {e}{more}");
                }
                self.failed(dir, e.to_string());
            }
        }
        Ok(true)
    }

    fn failed(&self, dir: InodeId, why: String) {
        let now = self.leader.base.now();
        self.clones(|c| c.failed.lock().unwrap_or_else(PoisonError::into_inner).insert(dir, (now, why)));
    }

    /// Only clients can decide the stripes of a dead writer, and the file may never be opened again: it may
    /// be in the trash, or have no name. One client is asked at a time, the next one if it cannot.
    fn ask_to_recover(&self, dir: InodeId, file: InodeId) {
        self.failed(dir, format!("a writer of inode {file} died, and what it left is not recovered yet"));
        let leader = self.leader.clone();
        let asked = self.clones(|c| *c.asked.lock().unwrap_or_else(PoisonError::into_inner));
        if asked.under_way {
            return;
        }
        let Some((session, connection)) = next_client(&leader, asked.last) else { return };
        self.clones(|c| {
            *c.asked.lock().unwrap_or_else(PoisonError::into_inner) =
                Asked { last: session, under_way: true };
        });
        leader.clone().base.env.tasks.spawn("ask a client to recover a file", async move {
            let recovered = connection.call(&RecoverFile { ino: file }, Vec::new(), RECOVERY_PATIENCE).await;
            let clones = &leader.clones;
            clones.asked.lock().unwrap_or_else(PoisonError::into_inner).under_way = false;
            match recovered {
                Ok(_) => drop(clones.failed.lock().unwrap_or_else(PoisonError::into_inner).remove(&dir)),
                Err(e) => {
                    tracing::debug!(%session, inode = %file, "a dead writer's file is not recovered: {e}")
                }
            }
            clones.call.notify_one();
        });
    }

    fn clones<T>(&self, ask: impl FnOnce(&Clones) -> T) -> T {
        ask(&self.leader.clones)
    }

    /// A clone that is not complete, with a directory of it; without one: it is at its end.
    fn next(&self) -> Result<Option<(VolumeId, Option<InodeId>)>> {
        let leader = &self.leader;
        let now = leader.base.now();
        let waits: BTreeSet<InodeId> = self.clones(|c| {
            let mut failed = c.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.retain(|_, (at, _)| now.since(*at) < RETRY);
            failed.keys().copied().collect()
        });
        let wanted: Vec<InodeId> = self
            .clones(|c| c.wanted.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect());
        let (mut next, mut gone) = (None, Vec::new());
        leader.base.read(&mut |read: &dyn Read| {
            (next, gone) = (None, Vec::new());
            for dir in &wanted {
                match clone::volume_not_enumerated(read, *dir)? {
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

/// The next client after this one, in turn, whose last message is within its lease's term.
fn next_client(leader: &Leader, after: SessionId) -> Option<(SessionId, Connection)> {
    let (now, state) = (leader.base.now(), leader.base.lock());
    let live = |(id, session): (&SessionId, &Session)| {
        let connection =
            session.connection.clone().filter(|_| now.since(session.last_contact) < leader.base.term());
        connection.map(|connection| (*id, connection))
    };
    let live: Vec<_> = state.sessions.iter().filter_map(live).collect();
    let next = live.iter().find(|(id, _)| *id > after).or(live.first());
    next.cloned()
}
