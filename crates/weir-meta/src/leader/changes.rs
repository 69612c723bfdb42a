//! Consumers of a changelog: they wait for changes of a volume, and get them with their paths.
use super::base::Base;
use crate::namespace::path::Paths;
use crate::namespace::{log, volume};
use crate::record::ChangeRecord;
use crate::relation::changelog;
use crate::relation::queues::Relations;
use crate::tables;
use std::sync::Arc;
use std::time::Duration;
use weir_proto::relation::*;
use weir_proto::{Error, Result};

/// Longest wait of a consumer.
const WAIT_MAX: Duration = Duration::from_secs(20);

/// Changelogs, for their consumers.
pub struct Changelogs {
    base: Arc<Base>,
    relations: Arc<Relations>,
}

impl Changelogs {
    pub fn new(base: &Arc<Base>, relations: &Arc<Relations>) -> Arc<Changelogs> {
        Arc::new(Changelogs { base: base.clone(), relations: relations.clone() })
    }

    pub async fn read_changes(self: Arc<Self>, r: ReadChanges) -> Result<Changes> {
        let deadline = self.base.now() + Duration::from_millis(r.wait_ms.into()).min(WAIT_MAX);
        loop {
            let waiting = self.relations.work.notified();
            let changes = self.changes_now(&r)?;
            // Taken behind the read: it covers all that was read.
            let newest = self.base.commits.newest(&self.base.lock());
            if !changes.changes.is_empty() {
                self.base.commits.durable(newest).await?; // a crash must not undo reported changes
            }
            let left = deadline.since(self.base.now());
            if !changes.changes.is_empty() || left.is_zero() {
                return Ok(changes);
            }
            let _ = self.base.env.clock.timeout(left, waiting).await; // checks again either way
        }
    }

    fn changes_now(&self, r: &ReadChanges) -> Result<Changes> {
        self.base.lock().session(r.session)?.last_contact = self.base.now();
        let mut changes = Changes { changes: Vec::new(), first: 0 };
        self.base.read(&mut |read| {
            changes.changes.clear();
            let mut paths = Paths::new(read, volume::load_as_admin(read, &r.cred, r.volume)?.root);
            let after = match &r.cursor {
                None => r.after,
                Some(name) => changelog::cursors(read, r.volume)?
                    .into_iter()
                    .find(|(found, _)| found == name)
                    .map(|(_, at)| at)
                    .ok_or_else(|| {
                        Error::not_found(format!(
                            "volume {} has no cursor {name:?}: acknowledge 0 to make it",
                            r.volume
                        ))
                    })?,
            };
            let oldest = tables::CHANGES.under(r.volume).collect(read, 1, |(_, number), _| number)?;
            changes.first = oldest.first().copied().unwrap_or(log::last_number(read, r.volume)? + 1);
            let limit = r.limit.clamp(1, CHANGES_MAX) as usize;
            let new = tables::CHANGES.from(r.volume, (r.volume, after.saturating_add(1)));
            let found = new.collect(read, limit, |(_, number), record| {
                let ChangeRecord { at, what, by, .. } = record;
                Change { number, at, what, by }
            })?;
            for change in found {
                let path = paths.of_change(&change.what)?;
                changes.changes.push(NamedChange { change, path });
                if paths.is_spent() {
                    break; // the rest comes with the next request
                }
            }
            Ok(())
        })?;
        if changes.first > 1 && r.cursor.is_none() && r.after + 1 < changes.first {
            return Err(Error::not_found(format!(
                "changes before {} are forgotten: only a cursor keeps them",
                changes.first
            )));
        }
        Ok(changes)
    }
}
