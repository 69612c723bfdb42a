//! File locks of this client: requested from the leader, mirrored here, named again after a reconnect, lost
//! with the session.
//!
//! Invariants: the mirror never claims more than the leader granted; requests of one owner go to the leader
//! one after the other, so the mirror ends in the same state as the leader. A wait holds no call at the
//! leader: it asks again when the leader notifies it, when the session was resumed on a new connection, and
//! from time to time. A handle with a lock that is lost with the session does nothing any more: a program
//! that trusted the lock must not continue to write.
//!
//! Knows nothing of processes, signals or FUSE: an owner is a number, an interrupt is a [`Notify`].
mod mirror;

pub use mirror::{InTheWay, LockWish, Locked};

use crate::base::Base;
use crate::handles::Handles;
use crate::kernel::Kernel;
use crate::leader::Leader;
use crate::losses::Losses;
use crate::types::{Forget, Handle};
use mirror::{Asked, Mirror, Waiting};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::{Backoff, Env, Pauses};
use weir_proto::lock::{
    CancelLock, HeldLock, ListLocks, LockAnswer, LockEntry, LockOutcome, LockOwner, LockRange, SetLock,
    TestLock,
};
use weir_proto::{Error, InodeId, Result, SessionId};
use weir_watch::{Object, Reason};

/// A wait without a notification asks again: it may be lost. Ten thousand that wait ask 400 times a second
/// then.
const ASK_AGAIN: Backoff = Backoff { first: Duration::from_secs(5), max: Duration::from_secs(40) };
/// While the leader waits for the clients from before its restart: some seconds.
const GRACE: Backoff = Backoff { first: Duration::from_millis(50), max: Duration::from_secs(1) };
/// The pause between checks whether an open file elsewhere has been closed. The leader sets how long to
/// check: a quarter of a second.
const CLOSING: Backoff = Backoff { first: Duration::from_millis(2), max: Duration::from_millis(32) };
/// How long the removal of an interrupted wait from the queue may take before the caller returns without its
/// outcome.
const CANCEL_PATIENCE: Duration = Duration::from_secs(2);

pub struct Locks {
    env: Env,
    leader: Arc<Leader>,
    handles: Arc<Handles>,
    kernel: Arc<Kernel>,
    losses: Arc<Losses>,
    mirror: Mirror,
}

impl Locks {
    pub fn new(base: &Base) -> Locks {
        let Base { env, leader, handles, kernel, losses, .. } = base.clone();
        Locks { env, leader, handles, kernel, losses, mirror: Mirror::default() }
    }
    /// All held locks, to be named to the leader.
    pub fn held(&self) -> Vec<HeldLock> {
        self.check();
        self.mirror.held()
    }
    /// The leader notifies that a wait may be over.
    pub fn wake(&self, ticket: u64) {
        self.mirror.wake(ticket);
    }
    /// The leader knows of no waits any more: each asks again.
    pub fn wake_all(&self) {
        self.mirror.wake_all();
    }
    /// Panics where an invariant of the mirror does not hold.
    pub fn check(&self) {
        self.mirror.check();
    }

    /// Locks or unlocks without waiting for other holders.
    pub async fn try_lock(&self, handle: Handle, wish: LockWish) -> Result<Locked> {
        self.note_closes_unlock(handle, wish)?;
        let locked = self.lock_now(handle, wish).await?;
        self.see_what_others_wrote(handle, wish, locked).await
    }

    /// Waits until the lock is granted, or `interrupt` is notified.
    pub async fn wait_lock(
        self: &Arc<Self>,
        handle: Handle,
        wish: LockWish,
        interrupt: &Notify,
    ) -> Result<Locked> {
        self.note_closes_unlock(handle, wish)?;
        let locked = self.lock_later(handle, wish, interrupt).await?;
        self.see_what_others_wrote(handle, wish, locked).await
    }

    fn note_closes_unlock(&self, handle: Handle, wish: LockWish) -> Result<()> {
        if wish.kind.is_some() {
            self.handles.get(handle)?.inode.lock().opens.note_locked();
        }
        Ok(())
    }

    /// A kernel may keep pages of a shared file for a moment that no lease protects: not across the granting
    /// of a lock.
    async fn see_what_others_wrote(&self, handle: Handle, wish: LockWish, locked: Locked) -> Result<Locked> {
        if locked == Locked::Granted
            && wish.kind.is_some()
            && let Some(file) = self.handles.open_file(handle)
            && !file.inode.lock().lease.is_held()
        {
            self.kernel.invalidate(file.inode.ino, Forget::All).await;
        }
        Ok(locked)
    }

    async fn lock_now(&self, handle: Handle, wish: LockWish) -> Result<Locked> {
        let ino = self.handles.get(handle)?.inode.ino;
        if wish.kind.is_none() && self.mirror.is_unused() {
            return Ok(Locked::Granted);
        }
        let mut grace = Pauses::new(&self.env.rng, GRACE);
        let mut closing = Pauses::new(&self.env.rng, CLOSING);
        loop {
            match self.ask_lock(ino, handle, wish, 0).await?.outcome {
                LockOutcome::Granted => return Ok(Locked::Granted),
                LockOutcome::Deadlock => return Ok(Locked::Deadlock),
                LockOutcome::Full => return Ok(Locked::Full),
                LockOutcome::Held | LockOutcome::Queued => return Ok(Locked::Held),
                LockOutcome::Grace => self.env.clock.sleep(grace.next_pause()).await,
                LockOutcome::Closing => self.env.clock.sleep(closing.next_pause()).await,
            }
        }
    }

    async fn lock_later(
        self: &Arc<Self>,
        handle: Handle,
        wish: LockWish,
        interrupt: &Notify,
    ) -> Result<Locked> {
        let ino = self.handles.get(handle)?.inode.ino;
        let (waiting, mut waits) = (Waiting::new(&self.mirror), None);
        let pauses = |backoff| Pauses::new(&self.env.rng, backoff);
        let (mut again, mut grace, mut closing) = (pauses(ASK_AGAIN), pauses(GRACE), pauses(CLOSING));
        loop {
            let answer = tokio::select! {
                biased;
                () = interrupt.notified() => return Ok(self.give_up(ino, handle, wish, waiting.ticket).await),
                answer = self.ask_lock(ino, handle, wish, waiting.ticket) => answer?,
            };
            let pause = match answer.outcome {
                LockOutcome::Granted => return Ok(Locked::Granted),
                LockOutcome::Deadlock => return Ok(Locked::Deadlock),
                LockOutcome::Full => return Ok(Locked::Full),
                LockOutcome::Grace => grace.next_pause(),
                LockOutcome::Closing => closing.next_pause(),
                LockOutcome::Held | LockOutcome::Queued => again.next_pause(),
            };
            waits.get_or_insert_with(|| self.env.watch.wait(Reason::Lock, Object::new("inode", ino.0)));
            tokio::select! {
                biased;
                () = waiting.hint.notified() => {}
                () = interrupt.notified() => return Ok(self.give_up(ino, handle, wish, waiting.ticket).await),
                () = self.env.clock.sleep(pause) => {}
            }
            self.handles.get(handle)?; // its locks may be lost meanwhile
        }
    }

    /// Ends a wait that may just have been granted.
    async fn give_up(self: &Arc<Self>, ino: InodeId, handle: Handle, wish: LockWish, ticket: u64) -> Locked {
        let me = self.clone();
        let (tx, rx) = tokio::sync::oneshot::channel();
        // A task of its own: it is completed even if the caller stops waiting.
        self.env.tasks.spawn("give a lock wait up", async move {
            let cancel = |session| CancelLock { session, ino, ticket };
            let cancelled = me.leader.ask(cancel).await;
            if cancelled.is_ok_and(|c| c.waited) {
                let _ = tx.send(Locked::Interrupted); // the caller may have given up
                return;
            }
            // Not in the queue: it was granted, or never registered, or the leader is new.
            let granted = me.ask_lock(ino, handle, wish, 0).await;
            let granted = granted.is_ok_and(|a| a.outcome == LockOutcome::Granted);
            let locked = if granted { Locked::Granted } else { Locked::Interrupted };
            if tx.send(locked).is_err() && granted {
                let undo = LockWish { kind: None, ..wish };
                if let Err(e) = me.ask_lock(ino, handle, undo, 0).await
                    && let Some(more) = me.env.watch.line("a lock was not released")
                {
                    tracing::warn!("file {ino}: a lock without a waiter was not released: {e}{more}");
                }
            }
        });
        match self.env.clock.timeout(CANCEL_PATIENCE, rx).await {
            Ok(Ok(locked)) => locked,
            _ => Locked::Interrupted,
        }
    }

    async fn ask_lock(
        &self,
        ino: InodeId,
        handle: Handle,
        wish: LockWish,
        ticket: u64,
    ) -> Result<LockAnswer> {
        let turn = self.mirror.join(ino, &wish, handle);
        let answered = {
            let _mine = turn.lock().await;
            self.ask_in_turn(ino, handle, wish, ticket).await
        };
        drop(turn);
        self.mirror.forget(ino, wish.owner);
        answered
    }

    async fn ask_in_turn(
        &self,
        ino: InodeId,
        handle: Handle,
        wish: LockWish,
        ticket: u64,
    ) -> Result<LockAnswer> {
        let LockWish { owner, range, kind, pid } = wish;
        let quietly = self.handles.open_file(handle).is_some_and(|f| f.closes_quietly());
        loop {
            let before = self.mirror.lower(ino, owner, range, kind);
            let reported = AtomicU64::new(0);
            let ask = |session| {
                reported.store(self.mirror.reported(), Ordering::Relaxed);
                SetLock { session, ino, owner, range, kind, pid, ticket, closing: kind.is_some() && quietly }
            };
            let answer = self.leader.ask(ask).await?;
            let asked = Asked { reported: reported.into_inner(), before };
            if self.mirror.answered(ino, &wish, handle, asked, answer.outcome == LockOutcome::Granted) {
                return Ok(answer);
            }
        }
    }

    /// The holder of a conflicting lock.
    pub async fn test_lock(&self, handle: Handle, wish: LockWish) -> Result<Option<InTheWay>> {
        let ino = self.handles.get(handle)?.inode.ino;
        let Some(kind) = wish.kind else { return Ok(None) };
        let mut grace = Pauses::new(&self.env.rng, GRACE);
        loop {
            let (owner, range) = (wish.owner, wish.range);
            let mut mine = SessionId(0);
            let asked = std::sync::atomic::AtomicU64::new(0);
            let test = |session: SessionId| {
                asked.store(session.0, Ordering::Relaxed);
                TestLock { session, ino, owner, range, kind }
            };
            let answer = self.leader.ask(test).await?;
            mine.0 = asked.load(Ordering::Relaxed);
            if answer.outcome == LockOutcome::Grace {
                self.env.clock.sleep(grace.next_pause()).await;
                continue;
            }
            return Ok(answer.holder.map(|h| InTheWay {
                range: h.range,
                kind: h.kind,
                pid: (h.session == mine).then_some(h.pid),
            }));
        }
    }

    /// At `close(2)`: an owner's locks of the file end with the first of its opens. Those of the open file
    /// end with its last descriptor, which the kernel announces after `close` has returned: they are reported
    /// to the leader now.
    pub async fn unlock_owner(&self, handle: Handle, owner: LockOwner) -> Result<()> {
        if self.mirror.is_unused() {
            return Ok(());
        }
        let Some(file) = self.handles.open_file(handle) else { return Ok(()) };
        let ino = file.inode.ino;
        let mut done = Ok(());
        if self.mirror.has(ino, owner) {
            done = self.unlock_all(ino, handle, owner).await;
            self.mirror.part(ino, handle, owner);
        }
        for (ino, owner) in self.mirror.held_through(handle) {
            let (range, kind, pid, ticket, closing) = (LockRange::WHOLE, None, 0, 0, true);
            let report = |session| SetLock { session, ino, owner, range, kind, pid, ticket, closing };
            done = done.and(self.leader.ask(report).await.map(drop));
        }
        done
    }

    /// At an open file's end: releases the locks acquired through it.
    pub async fn unlock_handle(&self, handle: Handle) -> Result<()> {
        if self.mirror.is_unused() {
            return Ok(());
        }
        let mut done = Ok(());
        for (ino, owner) in self.mirror.asked_through(handle) {
            done = done.and(self.unlock_all(ino, handle, owner).await);
            self.mirror.part(ino, handle, owner);
        }
        done
    }

    async fn unlock_all(&self, ino: InodeId, handle: Handle, owner: LockOwner) -> Result<()> {
        let wish = LockWish { owner, range: LockRange::WHOLE, kind: None, pid: 0 };
        let mut grace = Pauses::new(&self.env.rng, GRACE);
        while self.ask_lock(ino, handle, wish, 0).await?.outcome == LockOutcome::Grace {
            self.env.clock.sleep(grace.next_pause()).await;
        }
        Ok(())
    }

    /// Holders and waiters of a file, and the number of those that do not fit.
    pub async fn list_locks(&self, ino: InodeId) -> Result<(Vec<LockEntry>, u32)> {
        let list = self.leader.ask(|session| ListLocks { session, ino }).await?;
        Ok((list.entries, list.more))
    }

    /// The session is gone, and every lock with it.
    pub fn lose_all(&self) {
        self.break_handles(self.mirror.lose(|_, _| true), "the session expired");
        self.mirror.wake_all();
    }

    /// Other clients have got these meanwhile.
    pub fn lose(&self, lost: &[HeldLock]) {
        let named: BTreeSet<(InodeId, LockOwner)> = lost.iter().map(|l| (l.ino, l.owner)).collect();
        let handles = self.mirror.lose(|ino, owner| named.contains(&(ino, owner)));
        self.break_handles(handles, "the locks could not be taken up again");
    }

    fn break_handles(&self, handles: BTreeSet<(InodeId, Handle)>, why: &str) {
        for (ino, handle) in handles {
            let Some(file) = self.handles.open_file(handle) else { continue };
            let e = Error::io(format!(
                "file {ino}: {why}, and its locks with it: this open file does nothing any more; close it and open it again"
            ));
            self.losses.log(&e);
            self.losses.note(ino, &e);
            file.break_off(e);
        }
    }
}
