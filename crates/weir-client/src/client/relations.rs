//! Relations as movers and administrators see them: each call asks the leader; nothing is cached.
use super::Client;
use crate::leader::Change;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::meta::{Cred, Op};
use weir_proto::relation::*;
use weir_proto::{InodeId, Result, SessionId, VolumeId};

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

/// Requests of administrators and of consumers of a changelog.
impl Client {
    /// `relation`: where it should be at that home, for comparison; otherwise where its evicted bytes are.
    pub fn where_at_home(
        &self,
        ino: InodeId,
        relation: Option<RelationId>,
    ) -> BoxFuture<'_, Result<HomePlace>> {
        Box::pin(
            async move { self.parts.base.leader.ask(|session| WhereAtHome { session, ino, relation }).await },
        )
    }
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
            let leader = &self.parts.base.leader;
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
        include: Option<Vec<String>>,
        exclude: Option<Vec<String>>,
        bytes_per_s: Option<u64>,
    ) -> BoxFuture<'a, Result<RelationRules>> {
        Box::pin(async move {
            let make = |op| {
                let (include, exclude) = (include.clone(), exclude.clone());
                RelationSet { op, cred: cred.clone(), relation, include, exclude, bytes_per_s }
            };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }
    /// The rules of all relations that have some, each with this mover's part of a limit.
    pub fn relation_rules(&self) -> BoxFuture<'_, Result<Vec<RulesOfRelation>>> {
        Box::pin(async move {
            let ask = |session: SessionId| RelationRulesList { session };
            Ok(self.parts.base.leader.ask(ask).await?.relations)
        })
    }
    pub fn relations(&self, volume: Option<VolumeId>) -> BoxFuture<'_, Result<Vec<RelationInfo>>> {
        Box::pin(async move {
            let ask = |session: SessionId| RelationList { session, volume };
            Ok(self.parts.base.leader.ask(ask).await?.relations)
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
            self.parts.base.leader.change(Change::once(), make).await
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
            self.parts.base.leader.change(Change::once(), make).await
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
            self.parts.base.leader.change(Change::once(), make).await
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
            self.parts.base.leader.ask_until(self.parts.base.leader.deadline() + wait, ask).await
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
            self.parts.base.leader.change(Change::once(), make).await
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
            self.parts.base.leader.change(Change::once(), make).await
        })
    }
}
