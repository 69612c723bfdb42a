//! Files that must make way, at a home that stores one name of each: a file that is replaced or removed there
//! may still exist here by another name, and is renamed to that one; a name that a file got before its turn
//! may be another's first. Removed files are deleted early where parts of them are in the way.
//!
//! Invariant: a file's relocation is recorded before a mover gets it, and is not changed until its result is
//! reported; no other work on the file or on either name goes to a mover meanwhile.
use super::order::{Before, Touch, touches};
use super::record::RelocationRecord;
use super::ship_queue::{Batch, ShipQueue, WorkRequest, is_in_conflict};
use super::steps::{self, Effect, Step, files_of};
use super::store;
use crate::namespace::find_inode;
use std::collections::BTreeSet;
use weir_proto::relation::What;
use weir_proto::{InodeId, Result};

/// Work without a change: numbered by a file's inode.
const RELOCATION_WORK: u64 = 1 << 62;

fn touches_of_relocation(ino: InodeId, record: &RelocationRecord) -> (Vec<Touch>, Vec<Touch>) {
    let RelocationRecord { from, to } = record;
    let changes =
        [Touch::Inode(ino)].into_iter().chain([from, to].map(|p| Touch::Entry(p.dir, p.name.clone())));
    (changes.collect(), vec![Touch::Inode(from.dir), Touch::Inode(to.dir)])
}

impl ShipQueue {
    /// Relocations come first: all other work on these files waits until their result is reported.
    /// Returns the files.
    pub(super) fn relocations(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        before: &mut Before,
    ) -> Result<BTreeSet<InodeId>> {
        let mut planned = BTreeSet::new();
        for (ino, record) in store::relocating(request.read, request.relation)? {
            let number = RELOCATION_WORK | ino.0;
            let is_full = batch.names.len() >= request.items;
            let may_go = !is_full && !self.files.has_ranges(ino);
            if !self.names_out.contains_key(&number) && may_go && !is_in_conflict(request, ino)? {
                match steps::relocation_step(
                    request.read,
                    request.relation,
                    request.record.volume,
                    ino,
                    &record,
                )? {
                    Some(step) => self.assign_name(request, batch, number, step),
                    None => {
                        batch.void_relocations.push(ino);
                        continue;
                    }
                }
            }
            if self.files.has_ranges(ino) {
                self.files.drain(ino);
            } else {
                self.files.plan_change(ino);
            }
            planned.insert(ino);
            let (changes, relies) = touches_of_relocation(ino, &record);
            before.add(changes, relies);
        }
        Ok(planned)
    }

    /// Removed files are deleted at once where parts of them are in the way.
    pub(super) fn abandon(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        before: &mut Before,
        planned: &mut BTreeSet<InodeId>,
    ) -> Result<()> {
        for ino in self.abandoned.clone() {
            let step = steps::removal(request.read, request.relation, request.record.volume, ino)?;
            let Some((step, place)) = step.filter(|_| planned.insert(ino)) else {
                self.abandoned.remove(&ino);
                continue;
            };
            let (number, is_full) = (RELOCATION_WORK | ino.0, batch.names.len() >= request.items);
            if !self.is_named(ino)
                && !is_full
                && !is_in_conflict(request, ino)?
                && !self.is_needed(request, ino)?
            {
                self.assign_name(request, batch, number, step);
            } else if !self.files.has_ranges(ino) {
                self.files.plan_change(ino);
            }
            before.add(
                vec![Touch::Inode(ino), Touch::Entry(place.dir, place.name)],
                vec![Touch::Inode(place.dir)],
            );
        }
        Ok(())
    }
    /// Whether a change that concerns this file is assigned.
    fn is_named(&self, ino: InodeId) -> bool {
        self.names_out.values().any(|out| files_of(&out.step.effect).contains(&Some(ino)))
    }
    /// Whether home's copy of a removed file must stay for now: a mover writes it, or a client still reads
    /// bytes that are only there.
    fn is_needed(&mut self, request: &WorkRequest<'_>, ino: InodeId) -> Result<bool> {
        if self.files.has_ranges(ino) {
            self.files.drain(ino);
            return Ok(true);
        }
        let is_read =
            find_inode(request.read, ino)?.is_some_and(|inode| inode.nlink == 0 && inode.evicted > 0);
        if is_read {
            self.wanted.insert(ino);
        }
        Ok(is_read)
    }

    /// The changes that movers may have carried out, anywhere in the queue.
    pub(super) fn may_be_done(&self, queue: &[(u64, What, bool)]) -> Vec<(u64, Vec<Touch>)> {
        let may = queue.iter().filter(|(number, _, tried)| *tried || self.names_out.contains_key(number));
        may.map(|(number, what, _)| (*number, touches(what).0)).collect()
    }

    /// Assigns the step of a change, unless that concerns a file that the change does not name, and this one
    /// is not ready for it: then the change waits.
    pub(super) fn assign_step<'a>(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        number: u64,
        step: Step,
        before: &mut Before,
        mut may_be_done: impl Iterator<Item = &'a Touch>,
    ) -> Result<()> {
        let gone = match &step.effect {
            Effect::Relocate { ino, from, to } => {
                let (ino, record) = (*ino, RelocationRecord { from: from.clone(), to: to.clone() });
                return self.assign_relocation(request, batch, (ino, record), step, before, may_be_done);
            }
            Effect::Drop { ino, .. } | Effect::Move { replaced: Some(ino), .. } => Some(*ino),
            _ => None,
        };
        if let Some(ino) = gone {
            let touch = [Touch::Inode(ino)];
            let waits = before.is_in_the_way(&touch, &[]) || may_be_done.any(|done| touch.contains(done));
            if waits || self.is_needed(request, ino)? {
                return Ok(());
            }
        }
        self.assign_name(request, batch, number, step);
        Ok(())
    }

    fn assign_relocation<'a>(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        (ino, record): (InodeId, RelocationRecord),
        step: Step,
        before: &mut Before,
        mut may_be_done: impl Iterator<Item = &'a Touch>,
    ) -> Result<()> {
        let (changes, relies) = touches_of_relocation(ino, &record);
        if before.is_in_the_way(&changes, &relies)
            || may_be_done.any(|done| changes.contains(done))
            || self.is_being_written(request, batch, ino)?
        {
            return Ok(());
        }
        batch.relocations.push((ino, record));
        before.add(changes, relies);
        self.assign_name(request, batch, RELOCATION_WORK | ino.0, step);
        Ok(())
    }
}
