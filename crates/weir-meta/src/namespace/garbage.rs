//! Cells that are to be dropped from targets: those of deleted files, and of stripes that are at home only.
use super::objects::{OBJECT_BIT, references};
use super::*;
use crate::record::{Garbage, StripeTruncation};

impl Cx<'_> {
    /// Notes stripes for the sweeper.
    pub(super) fn note_garbage(
        &mut self,
        ino: InodeId,
        layout: &Layout,
        truncation: StripeTruncation,
    ) -> Result<()> {
        let garbage = Garbage { first_pg: layout.first_pg, pg_count: layout.pg_count, truncation };
        // Two parts of a file may be evicted within a tick of the clock. The record of a deletion covers all
        // others.
        let mut at = self.rules.now;
        while truncation != StripeTruncation::ALL
            && tables::GARBAGE.has(self.read(), (tables::garbage_time(at), ino))?
        {
            at.nanos += 1;
        }
        tables::GARBAGE.put(self.txn, (tables::garbage_time(at), ino), &garbage);
        self.events.garbage = true;
        Ok(())
    }

    /// A file is deleted: its object is dropped, unless a snapshot holds it.
    pub(super) fn release_object(&mut self, ino: InodeId, inode: &Inode) -> Result<()> {
        if inode.layered() > 0 {
            tables::LAYERS.under(ino).delete_all(self.txn)?;
        }
        let Some(layout) = inode.layout.filter(|_| inode.may_have_cells()) else { return Ok(()) };
        let object = inode.object(ino);
        let held = !(self.rules.snapshots.is_empty() && inode.layers.is_none());
        if held && references(self.read(), object)? > 0 {
            return Ok(());
        }
        if object.0 & OBJECT_BIT != 0 {
            tables::OBJECT_OWNERS.delete(self.txn, object);
        }
        self.note_garbage(object, &layout, StripeTruncation::ALL)
    }
}
