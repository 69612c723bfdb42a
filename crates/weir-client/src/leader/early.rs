//! Early answers: changes that the leader has answered before they were durable. They are kept until they
//! are, and brought to the next leader if this one is gone.
//!
//! Invariants: no request of this client goes to a leader before that has all that was kept of others, or it
//! is reported as lost. A change is kept before its caller has the answer. The number of kept changes is
//! bounded: beyond it a change waits until others are durable.
use super::{Leader, ToLeader};
use crate::kept::{Commit, Kept};
use std::sync::{Mutex, MutexGuard};
use weir_env::Instant;
use weir_proto::early::{
    AGAIN_BYTES_MAX, AGAIN_MAX, AwaitDurable, ChangeEarly, ChangedEarly, KEPT, KeptChange, MadeAgain,
    MakeAgain,
};
use weir_proto::{Error, ErrorKind, InodeId, Result, SessionId, Wire};
use weir_rpc::Connection;

/// Kept changes, and bytes of their requests and answers.
const KEPT_MAX: usize = 4096;
const KEPT_BYTES_MAX: usize = 8 << 20;

/// A change that was answered, and that no leader has any more.
pub struct LostChange {
    /// The directories whose names it changed, or the inode.
    pub places: Vec<InodeId>,
    pub error: Error,
}

#[derive(Default)]
pub struct Early {
    table: Mutex<Table>,
    /// Held while an answer may arrive that is to be kept; taken whole before the session is taken up again.
    in_flight: tokio::sync::RwLock<()>,
}

#[derive(Default)]
struct Table {
    kept: Kept<KeptChange>,
    bytes: usize,
}

fn size_of(change: &KeptChange) -> usize {
    change.body.len() + change.reply.len()
}

impl Table {
    fn keep(&mut self, commit: Commit, durable: u64, change: KeptChange) {
        if self.kept.is_empty() {
            self.kept.led_by(commit.term);
        }
        let bytes = size_of(&change);
        self.bytes += if self.kept.keep(commit, change) { bytes } else { 0 };
        self.durable(Commit { seq: durable, ..commit });
    }
    fn durable(&mut self, up_to: Commit) {
        self.bytes -= self.kept.durable(up_to).iter().map(size_of).sum::<usize>();
    }
    fn give_up(&mut self) -> KeptChange {
        let change = self.kept.give_up();
        self.bytes -= size_of(&change);
        change
    }
    fn is_full(&self) -> bool {
        self.kept.len() >= KEPT_MAX || self.bytes >= KEPT_BYTES_MAX
    }
    /// The next ones that the leader may lack: as many as fit in a message.
    fn to_make_again(&self) -> Vec<KeptChange> {
        let (mut part, mut bytes) = (Vec::new(), 0);
        for change in self.kept.all_to_make_again() {
            bytes += size_of(change);
            if part.len() >= AGAIN_MAX || (bytes > AGAIN_BYTES_MAX && !part.is_empty()) {
                break;
            }
            part.push(change.clone());
        }
        part
    }
}

impl Leader {
    fn early(&self) -> MutexGuard<'_, Table> {
        self.early.table.lock().expect("no holder panics")
    }

    /// Sends a change once, on this connection; if its answer may leave early, it is kept.
    pub(super) async fn send_change<R: ToLeader>(
        &self,
        connection: &Connection,
        request: &R,
        deadline: Instant,
    ) -> Result<R::Reply> {
        if !KEPT.contains(&R::METHOD) || !(self.identity.takes_early)() {
            return self.send(connection, request, deadline).await;
        }
        if self.early().is_full() {
            self.all_durable(deadline).await?;
        }
        let body: bytes::Bytes = request.to_bytes().into();
        let _in_flight = self.early.in_flight.read().await;
        self.report_map_on::<R>(connection, deadline).await?;
        let asked = ChangeEarly { method: R::METHOD, body: body.clone() };
        let ChangedEarly { term, seq, durable, given, reply } =
            self.send(connection, &asked, deadline).await?;
        let answer = R::Reply::from_bytes(&reply)?;
        if seq > durable {
            let change = KeptChange { method: R::METHOD, body, given, reply };
            self.early().keep(Commit { term, seq }, durable, change);
        }
        Ok(answer)
    }

    /// Returns when all changes are durable that were answered before.
    pub async fn all_durable(&self, deadline: Instant) -> Result<()> {
        loop {
            let Some(newest) = self.early().kept.newest() else { return Ok(()) };
            let told = self.ask_until(deadline, |session| AwaitDurable { session, seq: newest.seq }).await?;
            self.early().durable(Commit { term: told.term, seq: told.durable });
            if told.term == newest.term && told.durable >= newest.seq {
                return Ok(());
            }
            // Another leader has them by now, under other numbers, or they were reported as lost.
        }
    }

    /// Whether changes are kept, once all answers of the former connection have been read: before the
    /// session is taken up on another one.
    async fn keeps_any(&self, deadline: Instant) -> Result<bool> {
        let none_in_flight = self.env.clock.timeout(self.left(deadline), self.early.in_flight.write()).await;
        let late = |_| Error::deadline("changes on a lost connection have no answer yet");
        none_in_flight.map(drop).map_err(late)?;
        Ok(!self.early().kept.is_empty())
    }

    /// Brings the kept changes to a leader that may lack them, as the last part of a resume but one.
    pub(super) async fn make_kept_again(
        &self,
        connection: &Connection,
        session: SessionId,
        deadline: Instant,
    ) -> Result<()> {
        if !self.keeps_any(deadline).await? {
            return Ok(());
        }
        let make = async |changes| -> Result<MadeAgain> {
            let request = MakeAgain { session, changes };
            connection.call(&request, vec![], self.left(deadline)).await.map(|(made, _)| made)
        };
        let term = make(Vec::new()).await?.term;
        self.early().kept.led_by(term);
        loop {
            let part = self.early().to_make_again();
            if part.is_empty() {
                return Ok(());
            }
            let count = part.len();
            let told = make(part).await?;
            let mut lost = Vec::new();
            {
                let mut table = self.early();
                for place in 0..count as u32 {
                    match told.failed.iter().find(|failed| failed.place == place) {
                        Some(failed) => lost.push((table.give_up(), failed.why.clone())),
                        None => table.kept.made_again(Commit { term: told.term, seq: told.seq }),
                    }
                }
                table.durable(Commit { term: told.term, seq: told.durable });
            }
            self.lose(lost);
        }
    }

    /// A new session follows an expired one. The kept changes of another leader may be lost; those of this
    /// one are in its journal.
    pub(super) async fn give_up_kept(
        &self,
        connection: &Connection,
        session: SessionId,
        deadline: Instant,
    ) -> Result<()> {
        if !self.keeps_any(deadline).await? {
            return Ok(());
        }
        let request = MakeAgain { session, changes: Vec::new() };
        let asked = connection.call(&request, vec![], self.left(deadline)).await;
        let term = match asked {
            Ok((told, _)) => told.term,
            // It answers nothing early: another one did.
            Err(e) if e.kind == ErrorKind::Unsupported => 0,
            Err(e) => return Err(e),
        };
        let mut lost = Vec::new();
        {
            let mut table = self.early();
            table.kept.led_by(term);
            while table.kept.to_make_again().is_some() {
                let why = "its session expired, and the metadata leader that had answered it is gone";
                lost.push((table.give_up(), why.to_owned()));
            }
        }
        self.lose(lost);
        Ok(())
    }

    fn lose(&self, lost: Vec<(KeptChange, String)>) {
        let describe = |(change, why): (KeptChange, String)| {
            let (name, places) = change.describe().unwrap_or(("a change", Vec::new()));
            let at: Vec<String> = places.iter().map(ToString::to_string).collect();
            let what = format!("{name} of inode {} was answered, and is lost: {why}", at.join(" and "));
            LostChange { places, error: Error::io(what) }
        };
        let lost: Vec<LostChange> = lost.into_iter().map(describe).collect();
        if let Some(holder) = self.holder().filter(|_| !lost.is_empty()) {
            holder.lost_changes(lost);
        }
    }
}
