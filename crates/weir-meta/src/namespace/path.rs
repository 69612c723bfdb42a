//! Where an inode is: its name in the parent directory, and its path below a volume's topmost directory.
//!
//! A directory has one name, a file is known by its first one. Both remember the place of that name in the
//! parent's listing, so that finding it costs one look-up.
use super::*;
use bytes::Bytes;
use std::collections::HashMap;
use weir_kv::Scan;
use weir_proto::relation::What;

/// A longer walk towards the topmost directory has met a loop.
pub(super) const DEPTH_MAX: usize = 1 << 16;
/// A longer path is not returned.
const PATH_BYTES_MAX: usize = 1 << 16;
/// Bytes of paths that are kept, and steps (each as this many bytes), of one answer: deep trees cost no more.
const COST_MAX: usize = 1 << 22;
const STEP_COST: usize = 64;

/// The name that an inode has at its place in a directory; searched among `searched_max` names if it is not
/// at that place.
pub(super) fn name_at(
    read: &dyn Read,
    (above, cookie): (InodeId, u64),
    ino: InodeId,
    searched_max: usize,
) -> Result<Option<Bytes>> {
    if let Some(listed) = tables::LISTED.get(read, (above, cookie))?.filter(|listed| listed.ino == ino) {
        return Ok(Some(listed.name));
    }
    let (mut found, mut left) = (None, searched_max);
    tables::LISTED.under(above).scan(read, &mut |_, listed| {
        if left == 0 {
            return Scan::Stop;
        }
        left -= 1;
        found = (listed.ino == ino).then_some(listed.name);
        if found.is_none() { Scan::More } else { Scan::Stop }
    })?;
    Ok(found)
}

/// The directory of an inode's first name, and that name. `None`: it has none.
pub(crate) fn place_of(read: &dyn Read, ino: InodeId) -> Result<Option<(InodeId, Bytes)>> {
    let place = match find_inode(read, ino)? {
        Some(inode) if inode.nlink == 0 => return Ok(None),
        Some(inode) => (inode.parent, inode.cookie),
        None => match find_access(read, ino)? {
            Some(access) => (access.parent, access.cookie),
            None => return Ok(None),
        },
    };
    Ok(name_at(read, place, ino, usize::MAX)?.map(|name| (place.0, name)))
}

/// The names of a file, at most `limit`: the first one, then the others.
pub(crate) fn names_of(read: &dyn Read, ino: InodeId, limit: usize) -> Result<Vec<(InodeId, Bytes)>> {
    let mut names: Vec<(InodeId, Bytes)> = place_of(read, ino)?.into_iter().collect();
    let left = limit.saturating_sub(names.len());
    let place = |(_, dir, name): (InodeId, InodeId, &[u8])| (dir, Bytes::copy_from_slice(name));
    names.extend(tables::LINKS.under(ino).keys(read, left, place)?);
    Ok(names)
}

/// Paths of many inodes of one volume, below its topmost directory.
pub(crate) struct Paths<'a> {
    read: &'a dyn Read,
    /// Paths of directories; `None`: not reachable from the top.
    known: HashMap<InodeId, Option<Bytes>>,
    cost: usize,
}

impl<'a> Paths<'a> {
    pub fn new(read: &'a dyn Read, root: InodeId) -> Paths<'a> {
        Paths { read, known: HashMap::from([(root, Some(Bytes::new()))]), cost: 0 }
    }
    /// The limit of one answer is reached.
    pub fn is_spent(&self) -> bool {
        self.cost > COST_MAX
    }

    /// The present path of a changed inode; of a removed one: its former place, in the directory under its
    /// present path.
    pub fn of_change(&mut self, what: &What) -> Result<Option<Bytes>> {
        match what {
            What::Removed { parent, name, .. } => self.named(*parent, name),
            What::Made { ino, .. }
            | What::Linked { ino, .. }
            | What::Renamed { ino, .. }
            | What::Exchanged { ino, .. }
            | What::Attributes { ino }
            | What::Data { ino, .. }
            | What::Resized { ino, .. }
            | What::Complete { ino, .. } => self.of(*ino),
        }
    }

    /// `None`: it has no name any more.
    pub fn of(&mut self, ino: InodeId) -> Result<Option<Bytes>> {
        if let Some(known) = self.known.get(&ino) {
            return Ok(known.clone());
        }
        match place_of(self.read, ino)? {
            Some((dir, name)) => self.named(dir, &name),
            None => Ok(None),
        }
    }

    /// `None`: the directory has no path any more.
    pub fn named(&mut self, dir: InodeId, name: &[u8]) -> Result<Option<Bytes>> {
        let path = self.directory(dir)?.and_then(|above| join(&above, name));
        self.cost += path.as_ref().map_or(0, Bytes::len);
        Ok(path)
    }

    fn directory(&mut self, dir: InodeId) -> Result<Option<Bytes>> {
        let (mut at, mut below) = (dir, Vec::new());
        let mut path = loop {
            if let Some(known) = self.known.get(&at) {
                break known.clone();
            }
            match place_of(self.read, at)? {
                Some((above, name)) if at != InodeId::ROOT && below.len() < DEPTH_MAX => {
                    below.push((at, name));
                    at = above;
                }
                _ => break None,
            }
        };
        self.cost += below.len() * STEP_COST;
        for (_, name) in below.iter().rev() {
            path = path.and_then(|above| join(&above, name));
        }
        self.known.insert(dir, path.clone());
        Ok(path)
    }
}

fn join(above: &[u8], name: &[u8]) -> Option<Bytes> {
    let parts = if above.is_empty() { name.to_vec() } else { [above, b"/", name].concat() };
    (parts.len() <= PATH_BYTES_MAX).then(|| parts.into())
}
