//! The requests of movers: work on volumes and their homes, and recalls that it carries out.
//!
//! Invariant: a mover's stripe is written under the token epoch of its recall, so a late one changes nothing.
use crate::base::Base;
use crate::data::{Data, STRIPE_PARTS};
use crate::files::Files;
use crate::handles::Handles;
use crate::leader::{Change, Leader};
use crate::objects::Objects;
use crate::recovery::Recovery;
use crate::rights::Rights;
use crate::types::OpenMode;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::data::{FILL_COUNTER, WriteMode};
use weir_proto::meta::Cred;
use weir_proto::recall::{EvictedRanges, Filled, Learned, RecallFailed, RecallId, RecallWork, TakeRecalls};
use weir_proto::relation::{
    CompleteWork, ExtentDone, ExtentWork, HomeEntry, LeaseWork, ListDone, NameDone, RelationId,
    ReportListing, ReportRelisting, WorkLeased,
};
use weir_proto::snapshot::Layer;
use weir_proto::{Error, InodeId, Result, Version};

/// The wait of a mover's request for work.
const WORK_WAIT_MAX: Duration = Duration::from_secs(20);

/// Bytes for a mover to recall. If dropped before [`Mover::filled`], another mover gets it.
pub struct Recall {
    pub work: RecallWork,
    mover: Arc<Mover>,
}

impl std::fmt::Debug for Recall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.work.fmt(f)
    }
}

impl Drop for Recall {
    fn drop(&mut self) {
        let mut busy = self.mover.recalls.busy();
        let place = (self.work.ino, self.work.from);
        if busy.get(&place) == Some(&self.work.token_epoch) {
            busy.remove(&place);
        }
    }
}

/// The recalls that were assigned to this client, as a mover: the token epoch by file and offset.
#[derive(Default)]
struct Recalls {
    busy: Mutex<BTreeMap<(InodeId, u64), u32>>,
    /// One request for work at a time: it names the work in progress.
    asking: tokio::sync::Mutex<()>,
}

impl Recalls {
    fn busy(&self) -> MutexGuard<'_, BTreeMap<(InodeId, u64), u32>> {
        self.busy.lock().expect("no holder panics")
    }
}

pub struct Mover {
    leader: Arc<Leader>,
    data: Arc<Data>,
    handles: Arc<Handles>,
    objects: Arc<Objects>,
    recovery: Arc<Recovery>,
    files: Arc<Files>,
    recalls: Recalls,
}

impl Mover {
    pub fn new(base: &Base, rights: &Rights, files: Arc<Files>) -> Mover {
        let Base { leader, data, handles, .. } = base.clone();
        let Rights { objects, recovery, .. } = rights.clone();
        Mover { leader, data, handles, objects, recovery, files, recalls: Recalls::default() }
    }

    /// Waits until the leader may have declared this client dead, and assigned its work to others.
    pub fn may_be_taken_for_dead(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.leader.wait_for_term_end().await;
        })
    }
    /// Work for a mover. Waits up to `wait` for some. After an error the leader may have assigned work that
    /// did not arrive: only the end of this client's session assigns it to others. `leader`: see `LeaseWork`.
    pub fn lease_work<'a>(
        &'a self,
        leader: u64,
        bytes: u64,
        items: u32,
        wait: Duration,
        limited_by: &'a str,
    ) -> BoxFuture<'a, Result<WorkLeased>> {
        Box::pin(async move {
            let wait_ms = wait.as_millis() as u32;
            let limited_by = limited_by.to_owned();
            let ask = |session| LeaseWork {
                session,
                leader,
                bytes,
                items,
                wait_ms,
                limited_by: limited_by.clone(),
            };
            let taken = self.leader.ask_once(self.leader.deadline() + wait, &ask).await?;
            self.data.need_map(taken.map_version);
            Ok(taken)
        })
    }
    /// Reports the outcome of work. Work of an earlier session of this client is not counted.
    pub fn complete_work(
        &self,
        relation: RelationId,
        names: Vec<NameDone>,
        extents: Vec<ExtentDone>,
        orphans: Vec<InodeId>,
        listings: Vec<ListDone>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let done = |session| {
                let (names, extents) = (names.clone(), extents.clone());
                let (orphans, listings) = (orphans.clone(), listings.clone());
                CompleteWork { session, relation, names, extents, orphans, listings }
            };
            self.leader.ask(done).await
        })
    }
    /// A part of a directory's entries at home; `end`: the last part.
    pub fn report_listing(
        &self,
        relation: RelationId,
        dir: InodeId,
        entries: Vec<HomeEntry>,
        end: bool,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let report = |op| ReportListing { op, relation, dir, entries: entries.clone(), end };
            self.leader.change(Change::repeatable(), report).await
        })
    }
    /// The present entries of a directory at home, for a range of names; see `ReportRelisting`.
    pub fn report_relisting(
        &self,
        relation: RelationId,
        dir: InodeId,
        after: Bytes,
        entries: Vec<HomeEntry>,
        upto: Option<Bytes>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let report = |op| {
                let (after, entries, upto) = (after.clone(), entries.clone(), upto.clone());
                ReportRelisting { op, relation, dir, after, entries, upto }
            };
            self.leader.change(Change::repeatable(), report).await
        })
    }
    /// Finishes the work of a dead writer, if there was one: then the file is complete.
    pub fn recover_file(&self, ino: InodeId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let opened =
                self.files.open(&Cred { uid: 0, gid: 0, groups: vec![0] }, ino, OpenMode::WRITE).await?;
            let recovered = match self.handles.get(opened.handle) {
                Ok(file) => self.recovery.recover(&file.inode).await,
                Err(e) => Err(e),
            };
            let closed = self.files.release(opened.handle).await;
            recovered.and(closed)
        })
    }
    /// The location of a file's range that is to be shipped: its own object, and the layers in older ones.
    async fn where_bytes_are(&self, work: &ExtentWork, from: u64) -> Result<(InodeId, Vec<Layer>)> {
        match work.layered {
            true => self.objects.list_layers(0, work.ino, from, true).await,
            false => Ok((work.object, Vec::new())),
        }
    }
    /// Committed bytes, straight from targets: without a lease, and without disturbing a writer. Bytes
    /// overwritten meanwhile may be old or new. `Stale`: they are no longer there; ask for work again.
    pub fn read_committed<'a>(
        &'a self,
        work: &'a ExtentWork,
        offset: u64,
        len: u64,
    ) -> BoxFuture<'a, Result<Vec<Bytes>>> {
        Box::pin(async move {
            let (ino, end) = (work.ino, offset + len);
            let gone = |what| Error::stale(format!("file {ino}: bytes {offset} to {end} {what}"));
            let layout = work.layout.ok_or_else(|| gone("are not on targets"))?;
            let stripe_start = layout.stripe_start(layout.stripe_of(offset));
            let (own, layers) = self.where_bytes_are(work, stripe_start).await?;
            let deadline = self.leader.deadline();
            let fetched =
                self.objects.fetch_layered(&layers, own, layout, &[(offset, end)], deadline).await?;
            if fetched.holes {
                // Zeros because nothing was written, or because it is at a home only, or was moved to another
                // object?
                let ask = |session| EvictedRanges { session, ino, from: offset };
                let away = self.leader.ask(ask).await?;
                if away.ranges.iter().any(|range| range.from < end && offset < range.to) {
                    return Err(gone("are evicted"));
                }
                if self.objects.list_layers(0, ino, stripe_start, true).await? != (own, layers) {
                    return Err(gone("have moved"));
                }
            }
            let clip = |(at, bytes): (u64, Bytes)| {
                let from = offset.saturating_sub(at).min(bytes.len() as u64);
                let to = end.saturating_sub(at).min(bytes.len() as u64);
                (from < to).then(|| bytes.slice(from as usize..to as usize))
            };
            Ok(fetched.parts.into_iter().filter_map(clip).collect())
        })
    }
}

/// Recalls.
impl Mover {
    /// Takes recalls to carry out, and waits for some, at most for `wait`.
    pub fn take_recalls(self: &Arc<Self>, max: u32, wait: Duration) -> BoxFuture<'_, Result<Vec<Recall>>> {
        Box::pin(async move {
            let _one = self.recalls.asking.lock().await;
            let wait = wait.min(WORK_WAIT_MAX);
            let wait_ms = wait.as_millis() as u32;
            let ask = |session| {
                let busy = self.recalls.busy();
                let id = |(place, token): (&(InodeId, u64), &u32)| RecallId {
                    ino: place.0,
                    from: place.1,
                    token_epoch: *token,
                };
                TakeRecalls { session, max, wait_ms, busy: busy.iter().map(id).collect() }
            };
            let taken = self.leader.ask_until(self.leader.deadline() + wait, ask).await?;
            let mut recalls = Vec::new();
            for work in taken.recalls {
                work.layout.check()?;
                self.recalls.busy().insert((work.ino, work.from), work.token_epoch);
                recalls.push(Recall { work, mover: self.clone() });
            }
            Ok(recalls)
        })
    }

    /// Whole stripes of a recall from `offset` on, or up to its end. Durable on all live targets.
    pub fn fill<'a>(&'a self, recall: &'a Recall, offset: u64, data: Bytes) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let RecallWork { ino, object, layout, from, to, token_epoch, .. } = recall.work;
            let stripe_bytes = layout.stripe_bytes();
            let end = offset.saturating_add(data.len() as u64);
            let whole = |at: u64| at.is_multiple_of(stripe_bytes);
            if offset < from || end > to || !whole(offset) || !(whole(end) || end == to) {
                return Err(Error::invalid(format!(
                    "file {ino}: bytes {offset} to {end} are not whole stripes of the recall of {from} to {to}"
                )));
            }
            let version = Version::new(token_epoch, FILL_COUNTER);
            let mut at = offset;
            let mut rest = data;
            while !rest.is_empty() {
                let part = rest.split_to(rest.len().min(stripe_bytes as usize));
                let _permit = self.data.flight.enter(STRIPE_PARTS).await;
                let s = self.data.stripe(object, layout, layout.stripe_of(at), self.leader.deadline());
                at += part.len() as u64;
                let fragments = self.data.fragments_of(&layout, part)?;
                self.data.write_stripe(s, version, WriteMode::Fill, &[], &fragments, false).await?;
            }
            Ok(())
        })
    }

    /// All of a recall is filled: it may be read. `learned`: checksums of the bytes read, if none were
    /// known to verify them before.
    pub fn filled(&self, recall: Recall, learned: Option<Learned>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let RecallWork { ino, from, to, token_epoch, .. } = recall.work;
            let filled = |op| Filled { op, ino, from, to, token_epoch, learned: learned.clone() };
            self.leader.change(Change::repeatable(), filled).await
        })
    }

    /// `retry`: later, by any mover that has time; otherwise callers that wait for it fail with `error`.
    pub fn recall_failed<'a>(
        &'a self,
        recall: Recall,
        error: &'a str,
        retry: bool,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let RecallWork { ino, from, to, token_epoch, .. } = recall.work;
            let failed = |session| RecallFailed {
                session,
                ino,
                from,
                to,
                token_epoch,
                error: error.to_owned(),
                retry,
            };
            self.leader.ask(failed).await
        })
    }
}
