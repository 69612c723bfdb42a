//! Changes that happen exactly once: each carries session, slot and sequence number, and is retried until it
//! is answered.
use super::{RETRY, Session, named};
use crate::session::Asking;
use std::time::Duration;
use weir_env::{Instant, Retry};
use weir_proto::births::{CreateMany, RemoveMany};
use weir_proto::meta::{Commit, Op, SLOTS};
use weir_proto::{Error, ErrorKind, Request, Result, SessionId};

/// Changes that save data and names which programs have made: their refusal would be a loss.
const KEEP_DATA: [u16; 3] = [Commit::METHOD, CreateMany::METHOD, RemoveMany::METHOD];
/// A leader that is busy is asked for at least this long again, each time.
const BUSY_PATIENCE: Duration = Duration::from_secs(30);

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
    session: &'a Session,
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
        self.session.slots.lock().expect("no holder panics").push(self.slot);
    }
}

impl Session {
    /// Makes a change happen once: the same (session, slot, seq) until it is answered. `Io`: the session
    /// expired before that, and the outcome is unknown.
    pub async fn change<R: Request>(&self, deadline: Instant, make: impl Fn(Op) -> R) -> Result<R::Reply> {
        self.change_counted(deadline, make).await.map(|(reply, _)| reply)
    }

    /// The same for a change that may happen twice: `Stale` if the session expired before the answer.
    pub async fn change_again<R: Request>(
        &self,
        deadline: Instant,
        make: impl Fn(Op) -> R,
    ) -> Result<R::Reply> {
        self.change_while(deadline, || Ok(()), make).await
    }

    /// The same; also returns the number of tries. The answer to the first try describes the present state.
    pub async fn change_counted<R: Request>(
        &self,
        deadline: Instant,
        make: impl Fn(Op) -> R,
    ) -> Result<(R::Reply, u32)> {
        self.try_change(deadline, Error::io, || Ok(()), make).await
    }

    /// A change that may happen twice, as long as `still` allows it: checked before each try, when the
    /// session is resumed and its losses are known.
    pub async fn change_while<R: Request>(
        &self,
        deadline: Instant,
        still: impl Fn() -> Result<()>,
        make: impl Fn(Op) -> R,
    ) -> Result<R::Reply> {
        self.try_change(deadline, Error::stale, still, make).await.map(|(reply, _)| reply)
    }

    /// `unknown`: the error if the outcome cannot be determined any more.
    async fn try_change<R: Request>(
        &self,
        mut deadline: Instant,
        unknown: fn(String) -> Error,
        still: impl Fn() -> Result<()>,
        make: impl Fn(Op) -> R,
    ) -> Result<(R::Reply, u32)> {
        self.births_first::<R>(deadline).await?;
        let _asking = Asking::begin(&self.asking);
        let mut tries = 0;
        let mut taken = self.take_slot(deadline).await.map_err(|e| e.doing(R::NAME))?;
        // The session under which it was sent, and whether it may have happened.
        let (mut sent, mut in_doubt) = (None, false);
        let mut retry = Retry::jittered(&self.env, RETRY, deadline);
        loop {
            let result = match self.ready(deadline).await {
                Ok((connection, session)) => {
                    if in_doubt && sent.is_some_and(|s| s != session) {
                        let e = "the session expired before the answer came: it may have happened or not";
                        return Err(unknown(format!("{}: {e}", R::NAME)));
                    }
                    still()?;
                    let op = taken.op(session, sent != Some(session));
                    sent = Some(session);
                    tries += 1;
                    self.send(&connection, &make(op), deadline).await
                }
                Err(e) => Err(e),
            };
            let e = match result {
                Ok(reply) => return Ok((reply, tries)),
                Err(e) => e,
            };
            // The leader did nothing: it does not know the session, or is busy.
            let is_unknown = e.kind == ErrorKind::Stale;
            let refused = is_unknown || matches!(e.kind, ErrorKind::Busy { .. });
            in_doubt |= !refused && sent.is_some();
            if let (ErrorKind::Busy { .. }, true) = (e.kind, KEEP_DATA.contains(&R::METHOD)) {
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
        Ok(TakenSlot { session: self, slot, _permit: permit })
    }
}
