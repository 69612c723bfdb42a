//! Calls about evicted bytes that are more than a transaction: readers wait, movers fetch work.
//!
//! `recalls` decides, `namespace::evict` keeps the records. Bytes are reported as online only when that is
//! durable.
use super::State;
use super::base::Base;
use super::missing_names::MissingNames;
use super::transactions::Transactions;
use crate::namespace;
use crate::namespace::evict::Handed;
use crate::namespace::evicted::{layout_to_fill, ranges};
use crate::quotas::NO_POLICY;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::recall::*;
use weir_proto::{Error, InodeId, Result, SessionId};
use weir_watch::{Object, Reason};

/// Read-ahead: this range after a reader's is recalled, too.
const AHEAD_BYTES: u64 = 256 << 20;
/// A wait ends after this at the latest; a caller that still needs it asks again.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Ranges of a file per scan; the rest is scanned when these are online.
const SCAN_MAX: usize = 1024;

/// Evicted parts of a range, whole stripes, and the bytes of a stripe.
struct Away {
    parts: Vec<ByteRange>,
    stripe_bytes: u64,
}

/// Calls about evicted bytes.
pub struct RecallCalls {
    base: Arc<Base>,
    tx: Arc<Transactions>,
    names: Arc<MissingNames>,
}

impl RecallCalls {
    pub fn new(base: &Arc<Base>, tx: &Arc<Transactions>, names: &Arc<MissingNames>) -> Arc<RecallCalls> {
        Arc::new(RecallCalls { base: base.clone(), tx: tx.clone(), names: names.clone() })
    }

    pub fn want_recall(&self, r: &WantRecall) -> Result<()> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        let away = self.away(r.ino, r.from, r.to)?;
        self.want(&mut state, r.ino, &away, false)
    }

    pub fn recall_failed(&self, r: &RecallFailed) -> Result<()> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        let id = RecallId { ino: r.ino, from: r.from, token_epoch: r.token_epoch };
        state.recalls.failed(r.session, &id, &r.error, r.retry, self.base.now());
        // In a volume that mirrors its home it may be another file there by now.
        if !state.mirrored.is_empty() { self.names.relist_above(r.ino) } else { Ok(()) }
    }

    pub fn tier_state(&self, r: &GetTierState) -> Result<TierState> {
        let mut state = self.base.lock();
        self.base.note_contact(&mut state, r.session)?;
        let mut found = None;
        self.base.read(&mut |read| {
            let Some(inode) = namespace::find_inode(read, r.ino)? else { return Ok(()) };
            let count = ranges(read, r.ino, 0, usize::MAX)?.len() as u64;
            let why_not = (self.base.config.at_home)(read, r.ino, &inode, 0, inode.size).err();
            found = Some((inode, count, why_not));
            Ok(())
        })?;
        let Some((inode, ranges, why_not)) = found else {
            return Err(Error::invalid(format!("inode {} is not a file: it has no data", r.ino)));
        };
        Ok(TierState {
            size: inode.size,
            evicted: inode.evicted,
            ranges,
            pinned: inode.pinned,
            at_home: why_not.is_none(),
            why_not: why_not.map_or_else(String::new, |e| e.to_string()),
            recalls: state.recalls.states(r.ino),
        })
    }
}

impl RecallCalls {
    /// The evicted parts of a range, in whole stripes.
    fn away(&self, ino: InodeId, from: u64, to: u64) -> Result<Away> {
        let mut away = Away { parts: Vec::new(), stripe_bytes: 1 };
        self.base.read(&mut |read| {
            away.parts.clear();
            let Some(inode) = namespace::find_inode(read, ino)?.filter(|i| i.evicted > 0) else {
                return Ok(());
            };
            let Some(stripe) = layout_to_fill(ino, &inode, &|| (self.base.config.layout)(&NO_POLICY))
                .map(|l| l.stripe_bytes())
            else {
                return Err(Error::unavailable("there is no placement group to recall bytes to"));
            };
            away.stripe_bytes = stripe;
            let (a, b) = (from / stripe * stripe, to.checked_next_multiple_of(stripe).unwrap_or(u64::MAX));
            let found = ranges(read, ino, a, SCAN_MAX)?;
            let inside = found.iter().filter(|f| f.from < b);
            away.parts = inside.map(|f| ByteRange { from: f.from.max(a), to: f.range.to.min(b) }).collect();
            Ok(())
        })?;
        Ok(away)
    }

    /// Recalls bytes that the leader itself needs.
    pub fn recall_own(&self, ranges: &[(InodeId, u64, u64)]) -> Result<()> {
        if ranges.is_empty() {
            return Ok(());
        }
        let mut state = self.base.lock();
        for (ino, from, to) in ranges {
            let away = self.away(*ino, *from, *to)?;
            self.want(&mut state, *ino, &away, false)?;
        }
        Ok(())
    }

    /// All evicted bytes of a file are to be recalled; no caller waits for it.
    pub fn want_back(&self, ino: InodeId) -> Result<()> {
        let away = self.away(ino, 0, u64::MAX)?;
        self.want(&mut self.base.lock(), ino, &away, false)
    }

    fn want(&self, state: &mut State, ino: InodeId, away: &Away, awaited: bool) -> Result<()> {
        let now = self.base.now();
        away.parts
            .iter()
            .try_for_each(|p| state.recalls.want(ino, (p.from, p.to), away.stripe_bytes, awaited, now))
    }

    /// Assigns due recalls to a mover.
    fn assign(&self, state: &mut State, mover: SessionId, max: u32) -> Result<Vec<RecallWork>> {
        let mut work = Vec::new();
        while (work.len() as u32) < max.clamp(1, RECALLS_MAX) {
            let now = self.base.now();
            let Some(due) = state.recalls.next(now) else { break };
            let mut handed = None;
            let done = self.tx.housekeep(state, mover, &mut |cx| {
                handed = cx.hand_out(due.ino, due.from, due.to)?;
                Ok(())
            });
            if let Err(e) = done {
                state.recalls.put_back(due, now);
                return Err(e);
            }
            let Some(Handed { layout, object, size, token_epoch, parts }) = handed else {
                state.recalls.done(due.ino, due.from, 0); // it is online, or deleted
                continue;
            };
            for part in parts {
                state.recalls.begin(&due, (part.from, part.to), token_epoch, mover, now);
                let (ino, from, to, awaited) = (due.ino, part.from, part.to, due.awaited);
                work.push(RecallWork { ino, object, layout, size, from, to, token_epoch, awaited });
            }
        }
        Ok(work)
    }
}

/// A wait that ends when it is dropped.
struct Wait {
    calls: Arc<RecallCalls>,
    number: u64,
}
impl Drop for Wait {
    fn drop(&mut self) {
        self.calls.base.lock().recalls.end_wait(self.number);
    }
}

fn until(calls: &RecallCalls, deadline: Instant, wait_ms: u32) -> Instant {
    deadline.min(calls.base.now() + Duration::from_millis(wait_ms.into()).min(WAIT_MAX))
}

impl RecallCalls {
    /// Waits until evicted bytes are online, or their recall has failed.
    pub async fn wait_for(self: Arc<Self>, r: AwaitRecall, deadline: Instant) -> Result<RecallWaited> {
        let until = until(&self, deadline, r.wait_ms);
        let waits = self.base.env.watch.wait(Reason::Recall, Object::new("inode", r.ino.0));
        let number = self.base.lock().recalls.wait(r.ino, r.from, r.to);
        let wait = Wait { calls: self.clone(), number };
        let mut ahead = r.to..r.to.saturating_add(AHEAD_BYTES);
        loop {
            let (outcome, bell) = {
                let mut state = self.base.lock();
                self.base.note_contact(&mut state, r.session)?;
                let away = self.away(r.ino, r.from, r.to)?;
                if away.parts.is_empty() {
                    (Err(self.base.commits.newest(&state)), None)
                } else if let Some(why) = state.recalls.failure(wait.number) {
                    return Ok(RecallWaited { done: false, failed: true, why });
                } else {
                    self.want(&mut state, r.ino, &away, true)?;
                    if !ahead.is_empty() {
                        let behind = self.away(r.ino, ahead.start, ahead.end)?;
                        self.want(&mut state, r.ino, &behind, false)?;
                        ahead = 0..0;
                    }
                    let why = state.recalls.why(r.ino, r.from, r.to, self.base.now());
                    (Ok(why), Some(state.recalls.bell(r.ino).notified_owned()))
                }
            };
            let (why, bell) = match (outcome, bell) {
                (Err(newest), _) => {
                    self.base.commits.durable(newest).await?;
                    return Ok(RecallWaited { done: true, failed: false, why: String::new() });
                }
                (Ok(why), Some(bell)) => (why, bell),
                (Ok(why), None) => return Ok(RecallWaited { done: false, failed: false, why }),
            };
            waits.holder(&why);
            let over = self.base.env.clock.sleep_until(until);
            tokio::select! {
                biased;
                () = bell => {}
                () = over => return Ok(RecallWaited { done: false, failed: false, why }),
            }
        }
    }

    /// Recalls for a mover; waits for some.
    pub async fn take(self: Arc<Self>, r: TakeRecalls, deadline: Instant) -> Result<RecallsTaken> {
        let until = until(&self, deadline, r.wait_ms);
        {
            let mut state = self.base.lock();
            self.base.note_contact(&mut state, r.session)?;
            state.recalls.note_busy(r.session, &r.busy, self.base.now());
        }
        loop {
            let (recalls, newest, news, again_at) = {
                let mut state = self.base.lock();
                self.base.note_contact(&mut state, r.session)?;
                let news = state.recalls.news.clone().notified_owned();
                let recalls = self.assign(&mut state, r.session, r.max)?;
                (recalls, self.base.commits.newest(&state), news, state.recalls.next_due(self.base.now()))
            };
            if !recalls.is_empty() || self.base.now() >= until {
                self.base.commits.durable(newest).await?;
                return Ok(RecallsTaken { recalls });
            }
            let over = self.base.env.clock.sleep_until(again_at.map_or(until, |at| at.min(until)));
            tokio::select! {
                biased;
                () = news => {}
                () = over => {}
            }
        }
    }
}
