//! Changes at the leader: each carries session, slot and sequence number, and is sent again until it is
//! answered.
//!
//! Invariant: the leader makes a change at most once for each (session, slot, seq). A caller declares the
//! consequence of a session that expires before the answer: see [`Change`].
use super::{Asking, Leader, RETRY, ToLeader, named};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;
use weir_env::{Instant, Retry};
use weir_proto::meta::{Op, SLOTS};
use weir_proto::{Error, ErrorKind, Result, SessionId};

/// A leader that is busy is asked for at least this long again, each time.
const BUSY_PATIENCE: Duration = Duration::from_secs(30);

/// Whether a change may be tried again.
pub type Still<'a> = dyn Fn() -> Result<()> + Sync + 'a;

/// The terms of a change.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    repeatable: bool,
    until: Option<Instant>,
    still: Option<&'a Still<'a>>,
    tries: Option<&'a AtomicU32>,
    durable: bool,
}

impl<'a> Change<'a> {
    /// It must not happen twice. `Io`: the session expired before the answer came, and the outcome is
    /// unknown.
    pub fn once() -> Change<'a> {
        Change { repeatable: false, until: None, still: None, tries: None, durable: false }
    }
    /// It may happen twice. `Stale`: the session expired before the answer came; the caller may try again.
    pub fn repeatable() -> Change<'a> {
        Change { repeatable: true, ..Change::once() }
    }
    /// Instead of the mount's patience.
    pub fn until(self, deadline: Instant) -> Change<'a> {
        Change { until: Some(deadline), ..self }
    }
    /// As long as `still` allows it: asked before each try, when the session is resumed and its losses are
    /// known.
    pub fn while_still(self, still: &'a Still<'a>) -> Change<'a> {
        Change { still: Some(still), ..self }
    }
    /// It is durable when it is answered.
    pub fn durably(self) -> Change<'a> {
        Change { durable: true, ..self }
    }
    /// Counts the tries: only the answer to the first one describes the present state.
    pub fn counting(self, tries: &'a AtomicU32) -> Change<'a> {
        Change { tries: Some(tries), ..self }
    }

    /// The outcome cannot be determined any more.
    fn unknown(&self, request: &str) -> Error {
        let what = "the session expired before the answer came: it may have happened or not";
        let context = format!("{request}: {what}");
        if self.repeatable { Error::stale(context) } else { Error::io(context) }
    }
    fn begin_try(&self) -> Result<()> {
        self.still.map_or(Ok(()), |still| still())?;
        if let Some(tries) = self.tries {
            tries.fetch_add(1, Relaxed);
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
pub struct Slot {
    number: u32,
    session: SessionId,
    seq: u64,
}

impl Slot {
    /// No session has used it.
    pub fn new(number: u32) -> Slot {
        Slot { number, session: SessionId(0), seq: 0 }
    }
}

/// A slot in use: its sequence number belongs to one change.
struct TakenSlot<'a> {
    leader: &'a Leader,
    slot: Slot,
    _permit: tokio::sync::SemaphorePermit<'a>,
}

impl TakenSlot<'_> {
    /// The change's identity; `first`: in this session.
    fn op(&mut self, session: SessionId, first: bool) -> Op {
        if self.slot.session != session {
            self.slot = Slot { session, seq: 0, ..self.slot };
        }
        self.slot.seq += u64::from(first);
        Op { session, slot: self.slot.number, seq: self.slot.seq }
    }
}

impl Drop for TakenSlot<'_> {
    fn drop(&mut self) {
        self.leader.slots.lock().expect("no holder panics").push(self.slot);
    }
}

impl Leader {
    /// Makes a change: with the same (session, slot, seq) until it is answered.
    pub async fn change<R: ToLeader>(&self, how: Change<'_>, make: impl Fn(Op) -> R) -> Result<R::Reply> {
        let mut deadline = how.until.unwrap_or_else(|| self.deadline());
        self.report_before::<R>(deadline).await?;
        let _asking = Asking::begin(&self.asking);
        let mut taken = self.take_slot(deadline).await.map_err(|e| e.doing(R::NAME))?;
        // The session under which it was sent, and whether it may have happened.
        let (mut sent, mut in_doubt) = (None, false);
        let mut retry = Retry::jittered(&self.env, RETRY, deadline);
        loop {
            let result = match self.ready(deadline).await {
                Ok((connection, session)) => {
                    if in_doubt && sent.is_some_and(|s| s != session) {
                        return Err(how.unknown(R::NAME));
                    }
                    how.begin_try()?;
                    let op = taken.op(session, sent != Some(session));
                    sent = Some(session);
                    match how.durable {
                        true => self.send(&connection, &make(op), deadline).await,
                        false => self.send_change(&connection, &make(op), deadline).await,
                    }
                }
                Err(e) => Err(e),
            };
            let e = match result {
                Ok(reply) => return Ok(reply),
                Err(e) => e,
            };
            // The leader did nothing: it does not know the session, or is busy.
            let is_unknown = e.kind == ErrorKind::Stale;
            let refused = is_unknown || matches!(e.kind, ErrorKind::Busy { .. });
            in_doubt |= !refused && sent.is_some();
            if let (ErrorKind::Busy { .. }, true) = (e.kind, R::SAVES) {
                // The leader lives, and will have space: data that programs have written waits for that.
                deadline = deadline.max(self.env.clock.now() + BUSY_PATIENCE);
                retry = Retry::jittered(&self.env, RETRY, deadline);
            }
            self.again_or(e, sent, deadline, &mut retry).await.map_err(|e| match e.kind {
                ErrorKind::Deadline if in_doubt => {
                    e.doing(format_args!("{}: it may happen or have happened", R::NAME))
                }
                _ => named::<R>(e),
            })?;
            if is_unknown && !in_doubt {
                sent = None;
            }
        }
    }

    async fn take_slot(&self, deadline: Instant) -> Result<TakenSlot<'_>> {
        let acquired = match self.free_slots.try_acquire() {
            Ok(permit) => Ok(permit),
            Err(_) => self
                .env
                .clock
                .timeout(self.left(deadline), self.free_slots.acquire())
                .await
                .map(|permit| permit.expect("never closed")),
        };
        let permit =
            acquired.map_err(|_| Error::deadline(format!("{SLOTS} earlier changes have no answer yet")))?;
        let slot = self.slots.lock().expect("no holder panics").pop().expect("a permit is a slot");
        Ok(TakenSlot { leader: self, slot, _permit: permit })
    }
}
