//! A store that is one copy of several: it makes records under an epoch, or takes those of the epoch's
//! leader.
//!
//! Invariants: the newest known epoch is on the store's disk before it answers, and older ones are refused.
//! Records are accepted only after they were compared with the leader's, in order, with their numbers and
//! epochs.
//!
//! Knows nothing of other nodes; `weir-meta` decides who leads.

use crate::CommitSeq;
use crate::change::Delta;
use crate::copies::{Copies, ReportedDurable, Role};
use crate::core::{Core, Writer};
use crate::engine::Engine;
use crate::epochs::Epochs;
use crate::format::{WITH_EPOCHS, encode_copied, replay};
use crate::journal::{Until, lock};
use crate::mark::{Begun, Mark};
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir_env::{BlocksHere, BoxFuture};
use weir_proto::{Epoch, Error, ErrorKind, Result};

/// A record in the form for other copies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub seq: CommitSeq,
    /// Epoch of the leader that made it.
    pub epoch: Epoch,
    pub body: Bytes,
}

impl Engine {
    /// The newest epoch that it knows; 0: it never had copies.
    pub fn epoch(&self) -> Epoch {
        lock(&self.core.writer).role.epoch()
    }

    /// An error: its journal has failed, and it serves no call any more.
    pub fn check(&self) -> Result<()> {
        self.core.journal.check()
    }

    /// The epochs of its records, synced or not.
    pub fn epochs(&self) -> Epochs {
        lock(&self.core.writer).epochs.clone()
    }

    /// The newest record on its disk.
    pub fn synced(&self) -> CommitSeq {
        self.core.journal.synced()
    }

    /// Returns when the records up to `seq` are on this disk, whether or not other copies have them.
    pub fn wait_synced(&self, seq: CommitSeq) -> BoxFuture<'static, Result<()>> {
        self.core.journal.wait(Until::Synced, seq)
    }

    /// Checks again which records all copies keep: [`Copies::kept`] has changed.
    pub fn settle(&self) {
        self.core.settle();
    }

    /// Makes records under a new epoch, which are durable when `copies` keep them, too. The store's records
    /// are authoritative from then on.
    pub async fn lead(&self, epoch: Epoch, copies: Arc<dyn Copies>) -> Result<()> {
        let core = self.core.clone();
        self.core.env.tasks.blocking(move || core.lead(epoch, copies)).await
    }

    /// Takes the records of the epoch's leader, after [`Engine::truncate_to`]. From now on older epochs are
    /// refused. Waits for records that are not durable yet end with an error.
    pub async fn follow(&self, epoch: Epoch) -> Result<()> {
        let core = self.core.clone();
        self.core.env.tasks.blocking(move || core.follow(epoch)).await
    }

    /// Removes the records after `to`, the last one equal to the leader's. Then it takes the leader's.
    pub async fn truncate_to(&self, epoch: Epoch, to: CommitSeq) -> Result<()> {
        let core = self.core.clone();
        self.core.env.tasks.blocking(move || core.join(epoch, to)).await
    }

    /// Appends the leader's next records. They are visible at once, and on this disk after
    /// [`Engine::wait_synced`].
    pub fn apply(&self, epoch: Epoch, entries: &[Entry]) -> Result<()> {
        let done = self.core.apply_all(epoch, entries);
        self.core.journal.flush_soon();
        done
    }

    /// Like [`Engine::apply`], and they are on the disk when it returns: the caller's thread writes, which
    /// saves two thread switches. Returns the newest record on the disk.
    pub fn apply_and_sync(&self, epoch: Epoch, entries: &[Entry]) -> Result<CommitSeq> {
        self.core.apply_all(epoch, entries)?;
        self.core.journal.flush()?;
        Ok(self.epochs().last().min(self.synced()))
    }

    /// Permission to call [`Engine::apply_and_sync`] on a thread that has other work. None: the disk is slow,
    /// or too many threads block already.
    pub fn sync_here(&self) -> Option<BlocksHere> {
        self.core.journal.is_quick().then(|| self.core.env.tasks.block_here()).flatten()
    }

    /// The leader reports that every copy keeps the records up to `durable`.
    pub fn note_durable(&self, epoch: Epoch, durable: CommitSeq) -> Result<()> {
        lock(&self.core.writer).follows(epoch)?.note(durable);
        self.core.settle();
        Ok(())
    }
}

impl Writer {
    /// An error: it does not follow this epoch's leader.
    fn follows(&self, epoch: Epoch) -> Result<&Arc<ReportedDurable>> {
        match &self.role {
            Role::Follows { epoch: known, reported, joined: true } if *known == epoch => Ok(reported),
            role if role.epoch() > epoch => {
                Err(Error::stale(format!("{epoch} is over: {} has begun", role.epoch())))
            }
            _ => {
                Err(Error::stale(format!("the records are not compared with those of the leader of {epoch}")))
            }
        }
    }
}

impl Core {
    fn settle(&self) {
        self.journal.settle();
        let durable = self.journal.durable();
        if lock(&self.sealed).front().is_some_and(|s| s.last <= durable) {
            self.wake_folder.notify_one();
        }
    }

    fn lead(&self, epoch: Epoch, copies: Arc<dyn Copies>) -> Result<()> {
        let mut writer = lock(&self.writer);
        self.journal.check()?;
        let known = writer.role.epoch();
        if epoch <= known {
            return Err(Error::stale(format!("{epoch} cannot be led: {known} has begun")));
        }
        self.begin_epoch(&mut writer, Role::Leads(epoch, copies))
    }

    fn follow(&self, epoch: Epoch) -> Result<()> {
        let mut writer = lock(&self.writer);
        self.journal.check()?;
        let known = writer.role.epoch();
        match &writer.role {
            Role::Follows { .. } if known == epoch => return Ok(()),
            Role::Leads(..) if known == epoch => {
                return Err(Error::invalid(format!("this store leads under {epoch}: it cannot follow")));
            }
            _ if known > epoch => return Err(Error::stale(format!("{epoch} is over: {known} has begun"))),
            Role::Leads(..) | Role::Follows { .. } => {}
        }
        let reported = Arc::new(ReportedDurable::at(self.journal.durable()));
        self.begin_epoch(&mut writer, Role::Follows { epoch, reported, joined: false })?;
        self.journal.end_waits();
        Ok(())
    }

    fn begin_epoch(&self, writer: &mut Writer, role: Role) -> Result<()> {
        self.write_mark(Mark { epoch: role.epoch(), begun: Begun::Nothing })?;
        self.version.store(WITH_EPOCHS, Ordering::Release);
        if matches!(writer.role, Role::Leads(..)) != matches!(role, Role::Leads(..)) {
            self.term.fetch_add(1, Ordering::AcqRel);
        }
        self.journal.change_copies(role.copies());
        writer.role = role;
        Ok(())
    }

    fn join(&self, epoch: Epoch, to: CommitSeq) -> Result<()> {
        let mut writer = lock(&self.writer);
        self.journal.check()?;
        let known = writer.role.epoch();
        if !matches!(writer.role, Role::Follows { .. }) || known != epoch {
            return Err(Error::stale(format!(
                "the store does not follow the leader of {epoch}, but {known}"
            )));
        }
        let last = writer.epochs.last();
        if to > last {
            return Err(Error::invalid(format!(
                "the store ends at {}: it cannot be truncated to {}",
                last.0, to.0
            )));
        }
        if to < last {
            self.truncate_to(&mut writer, to)?;
        }
        if let Role::Follows { joined, .. } = &mut writer.role {
            *joined = true;
        }
        Ok(())
    }

    fn apply_all(&self, epoch: Epoch, entries: &[Entry]) -> Result<()> {
        let mut writer = lock(&self.writer);
        self.journal.check()?;
        writer.follows(epoch)?;
        entries.iter().try_for_each(|entry| self.apply_one(&mut writer, epoch, entry))
    }

    /// The entry is not trusted: it came over the network.
    fn apply_one(&self, writer: &mut Writer, epoch: Epoch, entry: &Entry) -> Result<()> {
        let (last, last_epoch) = (writer.epochs.last(), writer.epochs.last_epoch());
        if entry.seq.0 != last.0 + 1 {
            return Err(Error::invalid(format!("the record {} cannot follow {}", entry.seq.0, last.0)));
        }
        if entry.epoch < last_epoch || entry.epoch > epoch {
            let of = entry.epoch;
            return Err(Error::invalid(format!("a record of {of} cannot follow {last_epoch} under {epoch}")));
        }
        if entry.body.is_empty() {
            return Err(Error::invalid(format!("the record {} is empty", entry.seq.0)));
        }
        let mut changes = Delta::default();
        replay(&entry.body, &mut changes).map_err(|e| e.of_kind(ErrorKind::Invalid))?;
        let len = self.reserve(writer, entry.body.len())?;
        // The leader's segments end elsewhere: a change that would meet an unresolved one of another kind
        // begins a new segment.
        let mixes = {
            let state = self.state();
            changes.changes.iter().any(|(key, change)| state.active.would_mix(key, change))
        };
        if mixes {
            self.seal(writer)?;
        }
        let head = self.head(writer, entry.seq, entry.epoch);
        let record = encode_copied(head, &entry.body);
        assert!(record.len() == len, "a record is as long as its reservation");
        self.take_in(writer, entry.seq, entry.epoch, changes);
        writer.tail.used += len as u64;
        self.journal.push(entry.seq, record);
        Ok(())
    }
}
