//! Relations as administrators see them: state, lag and backlog.
use super::base::Base;
use super::paced::Paced;
use crate::namespace::{log, volume};
use crate::relation::record::{ConflictRecord, RelationRecord};
use crate::relation::{listing, queues, rules, store, tree};
use crate::tables;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use weir_env::Instant;
use weir_proto::meta::Time;
use weir_proto::relation::*;
use weir_proto::{InodeId, Result};

/// Dirty ranges and queued changes that are counted for a report.
const COUNTED_MAX: usize = 200_000;

/// A rate that is lower than the bandwidth limit by this part of it is still limited by that.
const LIMIT_NOISE: u64 = 8;

/// Conflicts that a report names.
const CONFLICTS_SHOWN: usize = 100;

/// The changes that home lacks.
#[derive(Clone, Default)]
struct Backlog {
    volume_name: String,
    bytes: u64,
    names: u64,
    unseen: u64,
    /// The oldest change that home does not have.
    oldest: Option<Time>,
    conflicts: Vec<(InodeId, ConflictRecord)>,
    /// The oldest scan of a directory at home.
    oldest_scan: Option<Time>,
    /// Home has all.
    done: bool,
    /// The relation's bandwidth limit.
    bytes_per_s: Option<u64>,
}

impl Backlog {
    fn note(&mut self, at: Time) {
        self.oldest =
            Some(self.oldest.map_or(at, |oldest| if at.nanos < oldest.nanos { at } else { oldest }));
    }
}

/// Reports about relations.
pub struct RelationReports {
    base: Arc<Base>,
    relations: Arc<queues::Relations>,
    /// What relations still have to do: long to count.
    backlogs: Mutex<BTreeMap<RelationId, Arc<Paced<Backlog>>>>,
}

impl RelationReports {
    pub fn new(base: &Arc<Base>, relations: &Arc<queues::Relations>) -> RelationReports {
        let (base, relations) = (base.clone(), relations.clone());
        RelationReports { base, relations, backlogs: Mutex::default() }
    }

    pub fn rules(&self, r: &RelationRulesList) -> Result<RulesOfRelations> {
        self.base.lock().session(r.session)?;
        let mut found = Vec::new();
        self.base.read(&mut |read| {
            found = rules::all(read)?;
            Ok(())
        })?;
        let queues = self.relations.lock();
        let of = |(relation, rules): (RelationId, RelationRules)| {
            let share = rules.bytes_per_s.map(|limit| queues.share(relation, r.session, limit));
            RulesOfRelation { relation, rules, share }
        };
        Ok(RulesOfRelations { relations: found.into_iter().map(of).collect() })
    }

    pub fn list(&self, r: &RelationList) -> Result<Relations> {
        let now = self.base.now();
        let mut relations = Vec::new();
        let mut found = Vec::new();
        self.base.read(&mut |read| {
            found = store::relations(read)?;
            Ok(())
        })?;
        let exists = |id: &RelationId| found.iter().any(|(known, _)| known == id);
        self.backlogs.lock().unwrap_or_else(PoisonError::into_inner).retain(|id, _| exists(id));
        for (id, record) in found.into_iter().filter(|(_, rec)| r.volume.is_none_or(|v| v == rec.volume)) {
            relations.push(self.info(id, record, now)?);
        }
        Ok(Relations { relations })
    }

    fn info(&self, id: RelationId, record: RelationRecord, now: Instant) -> Result<RelationInfo> {
        let wall = self.base.env.clock.wall().0;
        let paced = {
            let mut backlogs = self.backlogs.lock().unwrap_or_else(PoisonError::into_inner);
            backlogs.entry(id).or_default().clone()
        };
        let backlog = paced.get(|| self.base.now(), || self.backlog(id, &record))?;
        let conflicts = self.show_conflicts(id, backlog.conflicts)?;
        let mut queues = self.relations.lock();
        let movers = queues.live_movers(now);
        let mut limited_by = queues.limited_by(id, now);
        let home_failure = queues.home_failure(id, now);
        let rate = queues.meters.entry(id).or_default().rate(now);
        drop(queues);
        limited_by = match (backlog.bytes_per_s, limited_by == BANDWIDTH_LIMIT) {
            (Some(limit), is_waiting) if is_waiting || rate >= limit - limit / LIMIT_NOISE => {
                format!("{BANDWIDTH_LIMIT} of {} MB/s", limit as f64 / 1e6)
            }
            (None, true) => String::new(), // the mover waits for another relation's
            _ => limited_by,
        };
        let diverged = conflicts.iter().filter(|a| a.diverged).count() as u64;
        let state = match (&record.paused, diverged, backlog.done) {
            (Some(why), ..) => RelationState::Paused { why: why.clone() },
            (None, 1.., _) => RelationState::Diverged { items: diverged },
            (None, 0, true) => RelationState::Synced {},
            (None, 0, false) => RelationState::Copying {},
        };
        if movers == 0 && (record.mirrors() || !backlog.done) {
            limited_by = "no mover is running: start `weir mover`".to_owned();
        }
        if backlog.done && !record.mirrors() {
            limited_by = String::new();
        }
        let since = |at: Time| ((wall - at.nanos) / 1_000_000).max(0) as u64;
        Ok(RelationInfo {
            id,
            volume: record.volume,
            volume_name: backlog.volume_name,
            url: record.url,
            direction: record.direction,
            evict: record.evict,
            state,
            lag_ms: backlog.oldest.map_or(0, since),
            backlog_bytes: backlog.bytes,
            backlog_names: backlog.names,
            unseen_directories: backlog.unseen,
            rate,
            shipped_bytes: record.shipped_bytes,
            shipped_names: record.shipped_names,
            movers,
            limited_by,
            home_failure,
            conflicts,
            scan_age_ms: backlog.oldest_scan.map_or(0, since),
        })
    }

    fn backlog(&self, id: RelationId, record: &RelationRecord) -> Result<Backlog> {
        let mut backlog = Backlog::default();
        self.base.read(&mut |read| {
            backlog = Backlog { volume_name: volume::load(read, record.volume)?.name, ..Backlog::default() };
            let mut log_lag = 0;
            if !record.mirrors() {
                log_lag = log::last_number(read, record.volume)?.saturating_sub(record.ingested);
            }
            backlog.oldest_scan = listing::oldest_scan(read, id)?;
            backlog.bytes_per_s = rules::load(read, id)?.bytes_per_s;
            backlog.unseen = tables::UNSEEN.under(id).collect(read, COUNTED_MAX, |_, _| ())?.len() as u64;
            let not_enumerated = tables::NOT_ENUMERATED.under(id).collect(read, COUNTED_MAX, |_, _| ())?;
            backlog.unseen += not_enumerated.len() as u64;
            tables::DIRTY.under(id).collect(read, COUNTED_MAX, |_, dirty| {
                backlog.bytes += dirty.len;
                backlog.note(dirty.since);
            })?;
            tables::NAME_CHANGES.under(id).collect(read, COUNTED_MAX, |_, change| {
                backlog.names += 1;
                backlog.note(change.at);
            })?;
            let conflicts = tables::CONFLICTS.under(id);
            backlog.conflicts =
                conflicts.collect(read, CONFLICTS_SHOWN, |(_, ino), conflict| (ino, conflict))?;
            // A file that goes from a temporary name to its own one is not counted as a name.
            let relocates = tables::RELOCATIONS.under(id).has_any(read)?;
            let any = backlog.names + backlog.unseen + log_lag > 0 || relocates;
            backlog.done = !any && backlog.bytes == 0 && backlog.oldest.is_none();
            Ok(())
        })?;
        Ok(backlog)
    }

    fn show_conflicts(&self, id: RelationId, found: Vec<(InodeId, ConflictRecord)>) -> Result<Vec<Conflict>> {
        let mut shown = Vec::new();
        self.base.read(&mut |read| {
            shown.clear();
            for (ino, record) in &found {
                let path = Bytes::from(tree::path(read, id, *ino)?.unwrap_or_default());
                let (diverged, why, at) = (record.diverged, record.why.clone(), record.at);
                shown.push(Conflict { ino: *ino, path, diverged, why, at });
            }
            Ok(())
        })?;
        Ok(shown)
    }
}
