//! Files with several names: names that patterns exclude, files that lose the last name which home knows, and
//! homes that know one name of each file.
use super::{Step, Tree, WAITS};
use crate::namespace::{find_inode, find_link, path::names_of};
use crate::relation::record::{RemoteEntry, RemotePlace};
use crate::relation::tree::occupant;
use weir_proto::meta::FileKind;
use weir_proto::{Error, InodeId, Result};

/// Names of a file that are tried for one that home can store.
const NAMES_SCANNED: usize = 64;

impl Tree<'_> {
    /// Whether patterns keep an inode that home does not have away from a place there: all its names are
    /// excluded, or this is one of several, and another one gets it there.
    pub(super) fn is_kept_away(&self, ino: InodeId, kind: FileKind, place: &RemotePlace) -> Result<bool> {
        let is_directory = kind == FileKind::Directory;
        if self.excluded.why(ino, is_directory)?.is_some() {
            return Ok(true);
        }
        Ok(!is_directory && self.is_here(ino, place)? && self.is_excluded(place)?)
    }
    /// Whether a file has this name now.
    fn is_here(&self, ino: InodeId, place: &RemotePlace) -> Result<bool> {
        Ok(find_link(self.read, place.dir, &place.name)?.is_some_and(|link| link.ino == ino))
    }
    fn is_excluded(&self, place: &RemotePlace) -> Result<bool> {
        Ok(self.excluded.why_name(place.dir, &place.name, false)?.is_some())
    }
    /// Whether a further name of a file that home has is excluded: it does not go there, unless the file has
    /// lost the name that it had there.
    pub(super) fn is_name_kept_away(
        &self,
        ino: InodeId,
        remote: &RemoteEntry,
        place: &RemotePlace,
    ) -> Result<bool> {
        let may_stay = !self.tried && remote.kind != FileKind::Directory;
        Ok(may_stay && self.is_excluded(place)? && self.displaced_place(ino, remote)?.is_none())
    }

    // ---- what loses its last name at home, and has others here

    /// Whether a file that loses a name at home still exists here, and would no longer exist there.
    pub(super) fn would_be_forgotten(&self, ino: InodeId, remote: &RemoteEntry) -> Result<bool> {
        let last = remote.places.len() == 1 && remote.kind != FileKind::Directory;
        Ok(last && find_inode(self.read, ino)?.is_some_and(|inode| inode.nlink > 0))
    }

    /// Moves a file to a temporary name, where it waits for a later one; if home stores one name only, first
    /// to another one that it keeps, unless home has other files under all of these.
    pub(super) fn leave(
        &self,
        ino: InodeId,
        remote: &RemoteEntry,
        place: RemotePlace,
    ) -> Result<Option<Step>> {
        let stays = if self.links { None } else { self.name_that_stays(ino, &place)? };
        let to = match stays {
            Some(to) => to,
            None => self.place_to_wait(ino)?,
        };
        self.move_to(ino, remote, place, to)
    }
    /// The temporary place of a file.
    pub(super) fn displaced_place(&self, ino: InodeId, remote: &RemoteEntry) -> Result<Option<RemotePlace>> {
        for place in remote.places.iter().filter(|place| place.name.starts_with(WAITS.as_bytes())) {
            if !self.is_here(ino, place)? {
                return Ok(Some(place.clone()));
            }
        }
        Ok(None)
    }

    // ---- where home knows one name of each file only

    /// The steps before `ino` can have a place at home, where another file may be under a name that it got
    /// before its turn.
    pub(super) fn clear(&self, ino: InodeId, place: &RemotePlace) -> Result<Option<Step>> {
        let other = occupant(self.read, self.relation, place)?.filter(|other| *other != ino);
        match other {
            Some(other) if !self.links => self.vanish(other, place.clone(), false),
            _ => Ok(None),
        }
    }

    /// A name that a file has here in addition to `place`, and that is free at home.
    fn name_that_stays(&self, ino: InodeId, place: &RemotePlace) -> Result<Option<RemotePlace>> {
        let mut excluded = None;
        for (dir, name) in names_of(self.read, ino, NAMES_SCANNED)? {
            let other = RemotePlace { dir, name };
            let is_free = other != *place && occupant(self.read, self.relation, &other)?.is_none();
            if !is_free || self.remote(other.dir)?.is_none() {
                continue;
            }
            if !self.is_excluded(&other)? {
                return Ok(Some(other));
            }
            excluded.get_or_insert(other);
        }
        Ok(excluded)
    }

    /// A new name replaces one that the file has at home only, or an included one an excluded one.
    pub(super) fn replace_old_name(
        &self,
        ino: InodeId,
        remote: &RemoteEntry,
        place: RemotePlace,
    ) -> Result<Option<Step>> {
        let Some(old) = remote.places.first() else { return Ok(None) };
        let is_better = || {
            Ok::<_, Error>(self.is_excluded(old)? && self.is_here(ino, &place)? && !self.is_excluded(&place)?)
        };
        if self.is_here(ino, old)? && !is_better()? {
            return Ok(None);
        }
        if self.remote(place.dir)?.is_none() && self.excluded.why(place.dir, true)?.is_some() {
            return self.make_for_move(place.dir);
        }
        match self.clear(ino, &place)? {
            Some(clears) => Ok(Some(clears)),
            None => self.move_to(ino, remote, old.clone(), place),
        }
    }
}
