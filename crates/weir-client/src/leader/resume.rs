//! The session on a new connection: resumed with all that this client holds, or a new one.
//!
//! Invariant: locks, leases, opens and quota reservations are named before any other request. What could
//! not be kept is reported to the [`super::Holder`] at once, even if the rest fails.
use super::Leader;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use weir_env::Instant;
use weir_proto::lock::{HeldLock, RECLAIM_MAX, ReclaimLocks};
use weir_proto::meta::{HELD_MAX, HeldLease, SessionOpen, SessionOpened, SessionResume, SessionResumed};
use weir_proto::quota::{HeldSpace, ReclaimSpace};
use weir_proto::volume::{HeldReservation, ReclaimReservations};
use weir_proto::{Error, ErrorKind, Result, SessionId, VolumeId};
use weir_rpc::Connection;

impl Leader {
    /// Resumes the session on a new connection, or opens a new one.
    pub(super) async fn take_up(
        &self,
        connection: &Connection,
        old: Option<SessionId>,
        deadline: Instant,
    ) -> Result<SessionId> {
        let begun = self.env.clock.now();
        if let Some(session) = old {
            match self.resume(connection, session, deadline).await {
                Ok(lease_ms) => {
                    self.note_contact(begun, lease_ms);
                    if let Some(holder) = self.holder() {
                        holder.taken_up();
                    }
                    return Ok(session);
                }
                Err(e) if e.kind == ErrorKind::Stale => {
                    tracing::warn!("session {session} expired: {e}; opening a new one");
                    if let Some(holder) = self.holder() {
                        holder.expired();
                    }
                }
                Err(e) => return Err(e.doing("resume the session")),
            }
        }
        let request = SessionOpen {
            namespace: self.identity.namespace,
            client: self.identity.client.clone(),
            process: self.identity.process.clone(),
        };
        let (opened, _) = connection
            .call(&request, vec![], self.left(deadline))
            .await
            .map_err(|e: Error| match e.kind {
                // Returned to a program, this would mean that its file does not exist.
                ErrorKind::NotFound => {
                    let context = format!("{}; the namespace was given up: mount again", e.context);
                    Error { kind: ErrorKind::Damaged, context, ..e }
                }
                _ => e,
            })
            .map_err(|e| e.doing("open a session"))?;
        let SessionOpened { session, lease_ms, opens_asked, .. } = opened;
        self.opens_asked.store(opens_asked, Relaxed);
        self.give_up_kept(connection, session, deadline).await?;
        // It holds nothing, but files may be open. A client that gets a Write lease before the leader counts
        // the file as open is missed by a request to all writers.
        let held = self.holder().map_or_else(Vec::new, |h| h.begun(connection.id()));
        if !held.is_empty() {
            self.name_held(connection, session, (held, false), deadline).await.map_err(|e| match e.kind {
                // It ended before any request under it: the next try opens another one.
                ErrorKind::Stale => e.of_kind(ErrorKind::Unavailable).doing("name what is open"),
                _ => e.doing("name what is open"),
            })?;
        }
        self.note_contact(begun, lease_ms);
        Ok(session)
    }

    /// Names the held leases and locks, and reports at once to the holder which could not be kept, even if
    /// the rest fails: at the next try the leader may grant one again as if nothing had happened. Returns the
    /// lease term in milliseconds.
    async fn resume(&self, connection: &Connection, session: SessionId, deadline: Instant) -> Result<u32> {
        let leases = async {
            let held = self.holder().map_or_else(Vec::new, |h| h.begun(connection.id()));
            let resumed = self.name_held(connection, session, (held, true), deadline).await?;
            if let Some(holder) = self.holder().filter(|_| !resumed.lost.is_empty()) {
                holder.lost(resumed.lost);
            }
            Ok(resumed.lease_ms)
        };
        let locks = self.holder().map_or_else(Vec::new, |h| h.held_locks());
        if locks.is_empty() {
            // In parallel: with a distant leader, each answer takes a good part of the time for which it
            // waits.
            let (named, lease_ms) =
                tokio::join!(self.name_locks(connection, session, locks, deadline), leases);
            return named.and(lease_ms);
        }
        // Locks first: the leases' last message ends the leader's wait for this client.
        self.name_locks(connection, session, locks, deadline).await?;
        leases.await
    }

    /// Leases, opens and quota reservations, in as many messages as needed. Of an old session the changes
    /// that it kept go before the last one.
    async fn name_held(
        &self,
        connection: &Connection,
        session: SessionId,
        (mut held, is_old): (Vec<HeldLease>, bool),
        deadline: Instant,
    ) -> Result<SessionResumed> {
        while held.len() > HELD_MAX {
            let part = SessionResume { session, held: held.split_off(held.len() - HELD_MAX), more: true };
            connection.call(&part, vec![], self.left(deadline)).await?;
        }
        let reservations = self.holder().map_or_else(Vec::new, |h| h.held_reservations());
        if !reservations.is_empty() {
            let named = ReclaimSpace { session, held: reservations.clone() };
            match connection.call(&named, vec![], self.left(deadline)).await {
                Err(e) if e.kind == ErrorKind::Unsupported => {
                    // A leader of an older program: it knows volumes only.
                    let named = ReclaimReservations { session, held: by_volume(&reservations) };
                    connection.call(&named, vec![], self.left(deadline)).await?;
                }
                done => drop(done?),
            }
        }
        if is_old {
            self.make_kept_again(connection, session, deadline).await?;
        }
        let last = SessionResume { session, held, more: false };
        connection.call(&last, vec![], self.left(deadline)).await.map(|(resumed, _)| resumed)
    }

    async fn name_locks(
        &self,
        connection: &Connection,
        session: SessionId,
        mut held: Vec<HeldLock>,
        deadline: Instant,
    ) -> Result<()> {
        while held.len() > RECLAIM_MAX {
            let part = ReclaimLocks { session, held: held.split_off(held.len() - RECLAIM_MAX), more: true };
            connection.call(&part, vec![], self.left(deadline)).await?;
        }
        let last = ReclaimLocks { session, held, more: false };
        let (reclaimed, _) = connection.call(&last, vec![], self.left(deadline)).await?;
        if let Some(holder) = self.holder().filter(|_| !reclaimed.lost.is_empty()) {
            holder.lost_locks(reclaimed.lost);
        }
        Ok(())
    }
}

/// Reservations of all accounts of a volume together.
fn by_volume(held: &[HeldSpace]) -> Vec<HeldReservation> {
    let mut sums: BTreeMap<VolumeId, u64> = BTreeMap::new();
    for HeldSpace { account, bytes } in held {
        *sums.entry(account.volume).or_default() += bytes;
    }
    sums.into_iter().map(|(volume, bytes)| HeldReservation { volume, bytes }).collect()
}
