//! Removes the content of a deleted volume, and then its records.
use super::super::remove_tree::{nothing_more, remove_below};
use super::super::*;
use super::load;
use weir_kv::Scan;

/// A volume that is to be removed.
pub fn next_deleted(read: &dyn Read) -> Result<Option<VolumeId>> {
    let mut found = None;
    tables::VOLUMES.all().scan(read, &mut |id, record| {
        found = record.deleting.then_some(id);
        if record.deleting { Scan::Stop } else { Scan::More }
    })?;
    Ok(found)
}

/// Removes a few names of a deleted volume, deepest first. True: it has none left.
pub fn remove_some(cx: &mut Cx<'_>, id: VolumeId) -> Attempt<bool> {
    let root = load(cx.read(), id)?.root;
    if !remove_below(cx, id, root, &nothing_more)?
        || !trash::forget_some(cx, id)?
        || !clone::end::forget_some(cx, id)?
    {
        return Ok(false);
    }
    cx.need(root, Need::Change);
    cx.clear()?;
    cx.destroy_directory(InodeId::ROOT, root)?;
    cx.forget_volume(id)?;
    Ok(true)
}

impl Cx<'_> {
    /// Drops the records of a volume whose topmost directory is gone.
    pub(super) fn forget_volume(&mut self, id: VolumeId) -> Result<()> {
        tables::VOLUMES.delete(self.txn, id);
        crate::backup::forget_volume(self.txn, id)?;
        self.events.volumes.push((id, None));
        tables::OWNER_LIMITS.under(id).delete_all(self.txn)?;
        self.delete_range(keys::usage_of_volume(id))
    }
}
