//! Directories that home does not have, and that an entry moves into: excluded ones, and those that are not
//! scanned yet; and temporary names there.
use super::{Step, Tree, WAITS};
use crate::namespace::path::place_of;
use crate::namespace::volume;
use crate::relation::record::RemotePlace;
use crate::relation::tree::{occupant, present};
use bytes::Bytes;
use weir_proto::meta::FileKind;
use weir_proto::{Error, InodeId, Result};

impl Tree<'_> {
    /// A file that home has moves into this directory, which may be an excluded one: then it is created with
    /// its excluded parents, the topmost first, and without its other entries.
    pub(super) fn make_for_move(&self, dir: InodeId) -> Result<Option<Step>> {
        let mut dir = dir;
        while self.excluded.why(dir, true)?.is_some() {
            let Some((above, name)) = place_of(self.read, dir)? else { break };
            if self.remote(above)?.is_none() {
                dir = above;
                continue;
            }
            let place = RemotePlace { dir: above, name };
            let Some(present) = present(self.read, dir)? else { break };
            if let Some(other) = occupant(self.read, self.relation, &place)? {
                // It is elsewhere here by now, or gone.
                let is_directory =
                    self.remote(other)?.is_none_or(|remote| remote.kind == FileKind::Directory);
                if is_directory {
                    break;
                }
                return self.vanish(other, place, false);
            }
            let step = self.make_present(dir, present, place, false)?;
            return Ok(step.map(|step| Step { last: false, ..step }));
        }
        self.make_displaced(dir)
    }

    /// A directory from before the relation that was not scanned yet, or one that was skipped because it or
    /// its parent is removed: created under a temporary name. Later changes in the queue give it its name, or
    /// remove it.
    pub(super) fn make_displaced(&self, dir: InodeId) -> Result<Option<Step>> {
        let place = self.place_to_wait(dir)?;
        let step = match present(self.read, dir)? {
            Some(present) if present.volume == self.volume => self.make_present(dir, present, place, true)?,
            Some(_) => None,
            None => self.make_gone(dir, FileKind::Directory, place)?,
        };
        Ok(step.map(|step| Step { last: false, ..step }))
    }

    /// A free place under a temporary name.
    pub(super) fn place_to_wait(&self, ino: InodeId) -> Result<RemotePlace> {
        let dir = volume::load(self.read, self.volume)?.root;
        for n in 0u64.. {
            let to = RemotePlace { dir, name: Bytes::from(format!("{WAITS}-{:x}-{n}", ino.0)) };
            if occupant(self.read, self.relation, &to)?.is_none() {
                return Ok(to);
            }
        }
        Err(Error::damaged(format!("home has no free name for inode {ino}")))
    }
}
