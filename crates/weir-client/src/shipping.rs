//! Relations as movers and administrators see them: each call asks the leader; nothing is cached.
use crate::leader::Change;
use crate::{Client, OpenMode};
use bytes::Bytes;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::meta::{Cred, Op};
use weir_proto::recall::EvictedRanges;
use weir_proto::relation::*;
use weir_proto::snapshot::Layer;
use weir_proto::{Error, InodeId, Result, SessionId, VolumeId};

/// A relation to create.
#[derive(Clone, Debug, Default)]
pub struct NewRelation {
    pub url: String,
    /// Data that is at home may be evicted.
    pub evict: bool,
    /// The volume, which is empty, is filled from home.
    pub import: bool,
    /// The volume mirrors its home, and is read-only here; it is empty.
    pub mirrors: bool,
    pub ids: HomeIds,
    pub rules: RelationRules,
}

/// Requests of movers.
impl Client {
    /// Waits until the leader may have declared this client dead, and assigned its work to others.
    pub fn may_be_taken_for_dead(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.inner.leader.wait_for_term_end().await;
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
            let taken = self.inner.leader.ask_once(self.inner.leader.deadline() + wait, &ask).await?;
            self.inner.data.need_map(taken.map_version);
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
            self.inner.leader.ask(done).await
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
            self.inner.leader.change(Change::repeatable(), report).await
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
            self.inner.leader.change(Change::repeatable(), report).await
        })
    }
    /// Finishes the work of a dead writer, if there was one: then the file is complete.
    pub fn recover_file(&self, ino: InodeId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let opened = self.open(&Cred { uid: 0, gid: 0, groups: vec![0] }, ino, OpenMode::WRITE).await?;
            let recovered = match self.inner.handles.get(opened.handle) {
                Ok(file) => self.inner.recover(&file.inode).await,
                Err(e) => Err(e),
            };
            let closed = self.release(opened.handle).await;
            recovered.and(closed)
        })
    }
    /// `relation`: where it should be at that home, for comparison; otherwise where its evicted bytes are.
    pub fn where_at_home(
        &self,
        ino: InodeId,
        relation: Option<RelationId>,
    ) -> BoxFuture<'_, Result<HomePlace>> {
        Box::pin(async move { self.inner.leader.ask(|session| WhereAtHome { session, ino, relation }).await })
    }
    /// The location of a file's range that is to be shipped: its own object, and the layers in older ones.
    async fn where_bytes_are(&self, work: &ExtentWork, from: u64) -> Result<(InodeId, Vec<Layer>)> {
        match work.layered {
            true => self.inner.list_layers(0, work.ino, from, true).await,
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
            let deadline = self.inner.leader.deadline();
            let fetched = self.inner.fetch_layered(&layers, own, layout, &[(offset, end)], deadline).await?;
            if fetched.holes {
                // Zeros because nothing was written, or because it is at a home only, or was moved to another
                // object?
                let ask = |session| EvictedRanges { session, ino, from: offset };
                let away = self.inner.leader.ask(ask).await?;
                if away.ranges.iter().any(|range| range.from < end && offset < range.to) {
                    return Err(gone("are evicted"));
                }
                if self.inner.list_layers(0, ino, stripe_start, true).await? != (own, layers) {
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

/// Requests of administrators and of consumers of a changelog.
impl Client {
    pub fn add_relation<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        new: &'a NewRelation,
    ) -> BoxFuture<'a, Result<RelationInfo>> {
        Box::pin(async move {
            let make = |op| RelationAdd {
                op,
                cred: cred.clone(),
                volume,
                url: new.url.clone(),
                direction: if new.mirrors { Direction::Mirror } else { Direction::Push },
                evict: new.evict,
                import: new.import,
                ids: new.ids.clone(),
            };
            let leader = &self.inner.leader;
            if new.rules == RelationRules::default() {
                return leader.change(Change::once(), make).await; // a server of an older program knows it
            }
            let with = |op: Op| {
                let (cred, rules) = (cred.clone(), new.rules.clone());
                RelationAddWith { op: op.clone(), cred, new: make(op), rules }
            };
            leader.change(Change::once(), with).await
        })
    }
    /// Changes the given rules of a relation; a limit of 0: none.
    pub fn set_relation<'a>(
        &'a self,
        cred: &'a Cred,
        relation: RelationId,
        (include, exclude): (Option<Vec<String>>, Option<Vec<String>>),
        bytes_per_s: Option<u64>,
    ) -> BoxFuture<'a, Result<RelationRules>> {
        Box::pin(async move {
            let make = |op| {
                let (include, exclude) = (include.clone(), exclude.clone());
                RelationSet { op, cred: cred.clone(), relation, include, exclude, bytes_per_s }
            };
            self.inner.leader.change(Change::once(), make).await
        })
    }
    /// The rules of all relations that have some, each with this mover's part of a limit.
    pub fn relation_rules(&self) -> BoxFuture<'_, Result<Vec<RulesOfRelation>>> {
        Box::pin(async move {
            let ask = |session: SessionId| RelationRulesList { session };
            Ok(self.inner.leader.ask(ask).await?.relations)
        })
    }
    pub fn relations(&self, volume: Option<VolumeId>) -> BoxFuture<'_, Result<Vec<RelationInfo>>> {
        Box::pin(async move {
            let ask = |session: SessionId| RelationList { session, volume };
            Ok(self.inner.leader.ask(ask).await?.relations)
        })
    }
    pub fn change_relation<'a>(
        &'a self,
        cred: &'a Cred,
        relation: RelationId,
        verb: RelationVerb,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let make = |op| RelationDo { op, cred: cred.clone(), relation, verb };
            self.inner.leader.change(Change::once(), make).await
        })
    }
    pub fn resolve<'a>(
        &'a self,
        cred: &'a Cred,
        relation: RelationId,
        ino: InodeId,
        how: Resolution,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let make = |op| RelationResolve { op, cred: cred.clone(), relation, ino, how };
            self.inner.leader.change(Change::once(), make).await
        })
    }
    /// Marks a file as in conflict: its copy at home does not match what was shipped.
    pub fn suspect<'a>(
        &'a self,
        cred: &'a Cred,
        relation: RelationId,
        ino: InodeId,
        why: &'a str,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let make = |op| RelationSuspect { op, cred: cred.clone(), relation, ino, why: why.to_owned() };
            self.inner.leader.change(Change::once(), make).await
        })
    }
    /// Changes of a volume after `after`, or after the acknowledged position of a cursor; waits up to `wait`
    /// for the first.
    pub fn changes<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        cursor: Option<&'a str>,
        after: u64,
        wait: Duration,
    ) -> BoxFuture<'a, Result<Changes>> {
        Box::pin(async move {
            let (limit, wait_ms) = (CHANGES_MAX, wait.as_millis() as u32);
            let ask = |session| {
                let (cred, cursor) = (cred.clone(), cursor.map(str::to_owned));
                ReadChanges { session, cred, volume, cursor, after, limit, wait_ms }
            };
            self.inner.leader.ask_until(self.inner.leader.deadline() + wait, ask).await
        })
    }
    /// Creates the cursor if it is missing: then changes are kept for it from now on.
    pub fn acknowledge<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        cursor: &'a str,
        upto: u64,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let make = |op| AckChanges { op, cred: cred.clone(), volume, cursor: cursor.to_owned(), upto };
            self.inner.leader.change(Change::once(), make).await
        })
    }
    pub fn drop_cursor<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        cursor: &'a str,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let make = |op| DropCursor { op, cred: cred.clone(), volume, cursor: cursor.to_owned() };
            self.inner.leader.change(Change::once(), make).await
        })
    }
}
