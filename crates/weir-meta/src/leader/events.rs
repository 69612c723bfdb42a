//! Events of a commit: leases and tables in memory follow it, and jobs are woken.
use super::{Leader, State};
use crate::allowances;
use crate::namespace::{self, Events};
use std::collections::BTreeSet;
use weir_proto::quota::Holder;
use weir_proto::{Result, SessionId, VolumeId};

impl Leader {
    pub fn apply_events(&self, state: &mut State, session: SessionId, events: &Events) -> Result<()> {
        events.orphaned.iter().for_each(|ino| state.leases.mark_orphan(*ino));
        events.imported.iter().for_each(|ino| state.leases.unmark_orphan(*ino));
        events.gone.iter().for_each(|ino| state.leases.forget(*ino));
        events.filled.iter().for_each(|(ino, from, token)| state.recalls.done(*ino, *from, *token));
        events.truncated.iter().for_each(|(ino, size)| state.recalls.forget(*ino, *size));
        if events.garbage {
            self.garbage.notify_one();
        }
        if events.logged {
            self.relations.changed.notify_one();
        }
        if events.relations {
            match self.relations_changed() {
                Ok(now) => (state.logged, state.mirrored) = now,
                Err(e) => self.fail(&e.doing("read the relations")),
            }
        }
        if events.doomed {
            self.removal.notify_one();
        }
        if events.snapshots {
            self.kv.read(&mut |read| {
                state.snapshots = namespace::snapshot::load_all(read)?;
                Ok(())
            })?;
            self.forgetting.notify_one();
            self.clones.call.notify_one();
        }
        if !events.volumes.is_empty() {
            state.mounts.forget_decisions();
        }
        for (id, record) in &events.volumes {
            state.quotas.note(*id, record.as_ref());
            if record.as_ref().is_some_and(|record| record.deleting) {
                self.removal.notify_one();
            }
        }
        for (holder, record) in &events.limits {
            state.quotas.owners.note(*holder, *record);
        }
        if !events.limits.is_empty() {
            state.quotas.forget_unlimited();
        }
        self.apply_usage(state, session, events)
    }

    /// Usage of volumes, users and groups with limits has changed, or their limits have.
    fn apply_usage(&self, state: &mut State, session: SessionId, events: &Events) -> Result<()> {
        let mut volumes: BTreeSet<VolumeId> =
            events.volumes.iter().filter(|(_, record)| record.is_some()).map(|(id, _)| *id).collect();
        let mut holders: BTreeSet<Holder> = events.limits.iter().map(|(holder, _)| *holder).collect();
        for (account, charged) in &events.charged {
            state.quotas.consume(*account, session, charged.grown);
            volumes.insert(account.volume);
            holders.extend(account.holders());
        }
        for id in volumes {
            let mut over = None;
            self.kv.read(&mut |read| {
                let usage = namespace::volume_usage(read, id)?;
                over = state.quotas.crossing(id, &usage, self.wall());
                Ok(())
            })?;
            if let Some(over) = over {
                self.housekeep(state, session, &mut |cx| namespace::volume::note_over(cx, id, over))?;
            }
        }
        if state.quotas.owners.is_empty() {
            return Ok(());
        }
        let mut crossed = Vec::new();
        self.kv.read(&mut |read| {
            crossed = allowances::crossings(read, &state.quotas, holders.iter().copied(), self.wall())?;
            Ok(())
        })?;
        for (holder, record) in crossed {
            self.housekeep(state, session, &mut |cx| {
                cx.put_owner_record(holder, record);
                Ok(())
            })?;
        }
        Ok(())
    }
}
