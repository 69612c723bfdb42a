//! The meaning of a change of names at home: the action there, and the change of remote entries when it is
//! done.
//!
//! Reads records only; decides nothing about time.
mod directories;
mod names;

use super::record::{RelationRecord, RelocationRecord, RemoteEntry, RemotePlace};
use super::rules::Excluded;
use super::store;
use super::tree::{Present, expected, find_remote, occupant, path_of, present};
use crate::namespace::find_link;
use crate::tables;
use bytes::Bytes;
use weir_kv::Read;
use weir_proto::meta::{FileKind, Time};
use weir_proto::relation::{HomeAttrs, NameAction, RelationId, What};
use weir_proto::{InodeId, Result, VolumeId};

/// The prefix of temporary names at home, in its root, for files that wait for their name: the inode number
/// follows, and a number that makes it unique.
const WAITS: &str = ".weir-waits";

/// The change of home's known state when an action was done there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    Make {
        ino: InodeId,
        kind: FileKind,
        place: RemotePlace,
        /// Its content is older than the changelog: all of it is to be shipped.
        whole: bool,
    },
    Link {
        ino: InodeId,
        place: RemotePlace,
    },
    Drop {
        ino: InodeId,
        place: RemotePlace,
    },
    Move {
        ino: InodeId,
        from: RemotePlace,
        to: RemotePlace,
        replaced: Option<InodeId>,
    },
    /// The file moves to a temporary name, or from a name that exists only at home to another one of its
    /// names: not a change by itself.
    Relocate {
        ino: InodeId,
        from: RemotePlace,
        to: RemotePlace,
    },
    Swap {
        ino: InodeId,
        other: InodeId,
        place: RemotePlace,
        other_place: RemotePlace,
    },
    Fingerprint {
        ino: InodeId,
    },
    Truncate {
        ino: InodeId,
        size: u64,
    },
    Attributes {
        dir: InodeId,
    },
}

/// The work at home for a change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    pub ino: InodeId,
    pub action: NameAction,
    pub effect: Effect,
    /// The change is finished when it is done; otherwise it is checked again.
    pub last: bool,
}

/// The meaning of a change of names at home now; `None`: no work, it is applied already or obsolete. `tried`:
/// a mover may have done it, without a report.
pub fn step(
    read: &dyn Read,
    relation: RelationId,
    record: &RelationRecord,
    what: &What,
    tried: bool,
) -> Result<Option<Step>> {
    let gone = match what {
        What::Made { kind, .. } | What::Renamed { kind, .. } if tried => Some(*kind),
        What::Linked { .. } if tried => Some(FileKind::Regular),
        _ => None,
    };
    let (volume, links) = (record.volume, record.rules().links);
    let excluded = Excluded::load(read, relation, volume)?;
    let tree = Tree { read, relation, volume, links, gone, tried, excluded };
    let step = tree.step(what, tried)?;
    let (What::Removed { ino: gone, last: true, .. } | What::Renamed { replaced: Some((gone, true)), .. }) =
        what
    else {
        return Ok(step);
    };
    match step {
        Some(step) => Ok(Some(Step { last: step.last && !tree.leaves_over(*gone, &step.effect)?, ..step })),
        None => tree.left_over(*gone),
    }
}

struct Tree<'a> {
    read: &'a dyn Read,
    relation: RelationId,
    volume: VolumeId,
    /// A file may have several names there. Otherwise it exists there under one of them.
    links: bool,
    /// A mover may have created an inode of this kind without a report: to be created even if it is removed
    /// here.
    gone: Option<FileKind>,
    /// A mover may have done the change without a report.
    tried: bool,
    excluded: Excluded<'a>,
}

impl<'a> Tree<'a> {
    /// For steps that create nothing: patterns do not matter.
    fn of_known(read: &'a dyn Read, relation: RelationId, volume: VolumeId) -> Result<Tree<'a>> {
        let excluded = Excluded::load(read, relation, volume)?;
        Ok(Tree { read, relation, volume, links: false, gone: None, tried: false, excluded })
    }
    fn remote(&self, ino: InodeId) -> Result<Option<RemoteEntry>> {
        find_remote(self.read, self.relation, ino)
    }
    fn path(&self, place: &RemotePlace) -> Result<Option<Bytes>> {
        Ok(path_of(self.read, self.relation, place)?.map(Bytes::from))
    }

    fn step(&self, what: &What, tried: bool) -> Result<Option<Step>> {
        match what {
            What::Made { ino, parent, name, .. } => {
                self.appear(*ino, RemotePlace { dir: *parent, name: name.clone() }, tried, false)
            }
            What::Linked { ino, parent, name } => {
                self.appear(*ino, RemotePlace { dir: *parent, name: name.clone() }, true, true)
            }
            What::Removed { ino, parent, name, .. } => {
                self.vanish(*ino, RemotePlace { dir: *parent, name: name.clone() }, true)
            }
            What::Renamed { ino, parent, name, new_parent, new_name, .. } => {
                let from = RemotePlace { dir: *parent, name: name.clone() };
                self.renamed(*ino, from, RemotePlace { dir: *new_parent, name: new_name.clone() })
            }
            What::Exchanged { ino, other, parent, name, other_parent, other_name } => {
                let place = RemotePlace { dir: *parent, name: name.clone() };
                self.exchanged(
                    *ino,
                    *other,
                    place,
                    RemotePlace { dir: *other_parent, name: other_name.clone() },
                )
            }
            What::Attributes { ino } => self.attributes(*ino),
            // A removed file whose step was not begun needs no truncation.
            What::Resized { ino, .. } if !tried && present(self.read, *ino)?.is_none() => Ok(None),
            What::Resized { ino, size } => self.resized(*ino, *size),
            What::Data { .. } | What::Complete { .. } => Ok(None),
        }
    }

    /// A removed inode that home has under an earlier name of it: a name that another file took back
    /// meanwhile, or a temporary one.
    fn left_over(&self, ino: InodeId) -> Result<Option<Step>> {
        let Some(remote) = self.remote(ino)? else { return Ok(None) };
        let (Some(place), None) = (remote.places.first(), present(self.read, ino)?) else { return Ok(None) };
        let step = self.vanish(ino, place.clone(), true)?;
        Ok(step.map(|step| Step { last: remote.places.len() == 1, ..step }))
    }

    /// Whether home has it under other names than one that a step removes.
    fn leaves_over(&self, ino: InodeId, effect: &Effect) -> Result<bool> {
        let goes = match effect {
            Effect::Drop { ino: from, .. } | Effect::Move { replaced: Some(from), .. } => *from == ino,
            _ => false,
        };
        Ok(self.remote(ino)?.is_some_and(|remote| remote.places.len() > usize::from(goes)))
    }

    /// Creates an inode that home does not have, at its place in the volume.
    fn make(&self, ino: InodeId, place: RemotePlace, whole: bool) -> Result<Option<Step>> {
        let step = self.make_there(ino, place.clone(), whole)?;
        if step.is_some()
            && let Some(clears) = self.clear(ino, &place)?
        {
            return Ok(Some(clears));
        }
        Ok(step)
    }
    fn make_there(&self, ino: InodeId, place: RemotePlace, whole: bool) -> Result<Option<Step>> {
        let Some(present) = present(self.read, ino)? else {
            return self.gone.map_or(Ok(None), |kind| self.make_gone(ino, kind, place));
        };
        if present.volume != self.volume {
            return Ok(None); // the topmost directory of another volume
        }
        // A mover may have created it before it was excluded.
        if !self.tried && self.is_kept_away(ino, present.kind, &place)? {
            return Ok(None);
        }
        self.make_present(ino, present, place, whole || self.excluded.partial)
    }

    fn make_present(
        &self,
        ino: InodeId,
        present: Present,
        place: RemotePlace,
        whole: bool,
    ) -> Result<Option<Step>> {
        let Some(path) = self.path(&place)? else { return Ok(None) };
        let target = match present.kind {
            FileKind::Symlink => tables::DATA.get(self.read, ino)?.unwrap_or_default(),
            _ => Vec::new(),
        };
        let kind = present.kind;
        let action = NameAction::Make {
            path,
            kind,
            target: Bytes::from(target),
            rdev: present.rdev,
            attrs: present.attrs,
        };
        Ok(Some(Step { ino, action, effect: Effect::Make { ino, kind, place, whole }, last: true }))
    }

    /// An inode that a mover may have created, and that is removed here: created for certain, so that its
    /// removal finds it.
    fn make_gone(&self, ino: InodeId, kind: FileKind, place: RemotePlace) -> Result<Option<Step>> {
        let (Some(path), None) = (self.path(&place)?, self.remote(ino)?) else { return Ok(None) };
        let epoch = Time { nanos: 0 };
        let attrs = HomeAttrs { mode: 0, uid: 0, gid: 0, atime: epoch, mtime: epoch, xattrs: Vec::new() };
        if kind == FileKind::Symlink {
            return Ok(None); // its target is not known any more
        }
        let action = NameAction::Make { path, kind, target: Bytes::new(), rdev: 0, attrs };
        Ok(Some(Step { ino, action, effect: Effect::Make { ino, kind, place, whole: false }, last: true }))
    }

    /// A name exists: of a new inode, or another one of an inode that has a name already. `whole`: it may
    /// have content.
    fn appear(&self, ino: InodeId, place: RemotePlace, certain: bool, whole: bool) -> Result<Option<Step>> {
        let Some(remote) = self.remote(ino)? else { return self.make(ino, place, whole) };
        if remote.places.contains(&place) {
            return Ok(None);
        }
        if self.is_name_kept_away(ino, &remote, &place)? {
            return Ok(None);
        }
        let is_directory = remote.kind == FileKind::Directory;
        if !self.links && !is_directory {
            return self.replace_old_name(ino, &remote, place);
        }
        // Found by the scan of older data: only if it exists now, or a mover may have done it.
        let now = find_link(self.read, place.dir, &place.name)?.is_some_and(|link| link.ino == ino);
        if !certain && !now {
            return Ok(None);
        }
        if self.remote(place.dir)?.is_none() && present(self.read, ino)?.is_some() {
            return self.make_for_move(place.dir);
        }
        match self.displaced_place(ino, &remote)? {
            Some(displaced) if is_directory => return self.move_directory(ino, &remote, displaced, place),
            Some(displaced) => return self.move_to(ino, &remote, displaced, place),
            None if is_directory => return Ok(None),
            None => {}
        }
        let (Some(path), Some(first)) = (self.path(&place)?, remote.places.first()) else { return Ok(None) };
        let Some(from) = self.path(first)? else { return Ok(None) };
        let action = NameAction::Link { from, path, expect: expected(&remote) };
        Ok(Some(Step { ino, action, effect: Effect::Link { ino, place }, last: true }))
    }

    fn vanish(&self, ino: InodeId, place: RemotePlace, last: bool) -> Result<Option<Step>> {
        let Some(remote) = self.remote(ino)?.filter(|remote| remote.places.contains(&place)) else {
            return Ok(None);
        };
        let Some(path) = self.path(&place)? else { return Ok(None) };
        if self.would_be_forgotten(ino, &remote)? {
            return self.leave(ino, &remote, place);
        }
        let action = NameAction::Remove { path, kind: remote.kind, expect: expected(&remote) };
        Ok(Some(Step { ino, action, effect: Effect::Drop { ino, place }, last }))
    }

    fn move_to(
        &self,
        ino: InodeId,
        remote: &RemoteEntry,
        from: RemotePlace,
        to: RemotePlace,
    ) -> Result<Option<Step>> {
        let (Some(from_path), Some(to_path)) = (self.path(&from)?, self.path(&to)?) else { return Ok(None) };
        let (kind, expect) = (remote.kind, expected(remote));
        let action = NameAction::Rename { from: from_path, to: to_path, kind, expect, replaced: None };
        Ok(Some(Step { ino, action, effect: Effect::Relocate { ino, from, to }, last: false }))
    }

    fn move_directory(
        &self,
        ino: InodeId,
        remote: &RemoteEntry,
        from: RemotePlace,
        to: RemotePlace,
    ) -> Result<Option<Step>> {
        let step = self.move_to(ino, remote, from.clone(), to.clone())?;
        Ok(step.map(|step| Step { effect: Effect::Move { ino, from, to, replaced: None }, ..step }))
    }

    fn renamed(&self, ino: InodeId, from: RemotePlace, to: RemotePlace) -> Result<Option<Step>> {
        let remote = self.remote(ino)?;
        if remote.as_ref().is_some_and(|remote| remote.places.contains(&to)) {
            return Ok(None);
        }
        // A directory that home does not have (yet): it must exist first.
        if self.remote(to.dir)?.is_none() {
            return match remote {
                // It is scanned together with the entries of that directory.
                None => Ok(None),
                // It is removed here, and another one may get its name.
                Some(remote) if remote.kind != FileKind::Directory && present(self.read, ino)?.is_none() => {
                    self.vanish(ino, from, false)
                }
                Some(remote)
                    if !remote.places.contains(&from) && self.is_name_kept_away(ino, &remote, &to)? =>
                {
                    Ok(None)
                }
                Some(_) => self.make_for_move(to.dir),
            };
        }
        let replaced = match occupant(self.read, self.relation, &to)?.filter(|other| *other != ino) {
            Some(other) => self.remote(other)?.map(|remote| (other, remote)),
            None => None,
        };
        if let Some((other, remote)) = &replaced
            && self.would_be_forgotten(*other, remote)?
        {
            return self.vanish(*other, to, false);
        }
        let replaced = replaced.map(|(other, remote)| (other, expected(&remote)));
        let Some(remote) = remote.filter(|remote| remote.places.contains(&from)) else {
            // This name is not known at home: the replaced one is removed, then it is created.
            return match replaced {
                Some((other, _)) => self.vanish(other, to, false),
                None => self.appear(ino, to, true, true),
            };
        };
        let (Some(from_path), Some(to_path)) = (self.path(&from)?, self.path(&to)?) else { return Ok(None) };
        let (other, fingerprint) = replaced.unzip();
        let action = NameAction::Rename {
            from: from_path,
            to: to_path,
            kind: remote.kind,
            expect: expected(&remote),
            replaced: fingerprint,
        };
        Ok(Some(Step { ino, action, effect: Effect::Move { ino, from, to, replaced: other }, last: true }))
    }

    fn exchanged(
        &self,
        ino: InodeId,
        other: InodeId,
        place: RemotePlace,
        other_place: RemotePlace,
    ) -> Result<Option<Step>> {
        let (remote, other_remote) = (self.remote(ino)?, self.remote(other)?);
        let one_there = remote.as_ref().filter(|remote| remote.places.contains(&place));
        let other_there = other_remote.as_ref().filter(|remote| remote.places.contains(&other_place));
        let (Some(remote), Some(other_remote)) = (one_there, other_there) else {
            // One after the other, first the one that exists under that name: the other one may have to be
            // created, or exist under another one of its names, where it stays.
            let mut moves = [(ino, &place, &other_place), (other, &other_place, &place)];
            if one_there.is_none() {
                moves.reverse();
            }
            for (ino, from, to) in moves {
                if let Some(step) = self.renamed(ino, from.clone(), to.clone())? {
                    return Ok(Some(Step { last: false, ..step }));
                }
            }
            return Ok(None);
        };
        let (Some(one), Some(two)) = (self.path(&place)?, self.path(&other_place)?) else { return Ok(None) };
        let (expect, other_expect) = (expected(remote), expected(other_remote));
        let action = NameAction::Exchange { one, other: two, expect, other_expect };
        Ok(Some(Step { ino, action, effect: Effect::Swap { ino, other, place, other_place }, last: true }))
    }

    fn relocations(&self, ino: InodeId, record: &RelocationRecord) -> Result<Option<Step>> {
        match self.remote(ino)?.filter(|remote| remote.places.contains(&record.from)) {
            Some(remote) => self.move_to(ino, &remote, record.from.clone(), record.to.clone()),
            None => Ok(None),
        }
    }

    pub fn attributes(&self, ino: InodeId) -> Result<Option<Step>> {
        let (Some(remote), Some(present)) = (self.remote(ino)?, present(self.read, ino)?) else {
            return Ok(None);
        };
        let path = match remote.places.first() {
            Some(place) => self.path(place)?,
            None => Some(Bytes::new()),
        };
        let Some(path) = path else { return Ok(None) };
        let action = NameAction::Attributes {
            path,
            kind: remote.kind,
            attrs: present.attrs,
            expect: expected(&remote),
        };
        Ok(Some(Step { ino, action, effect: Effect::Fingerprint { ino }, last: true }))
    }

    fn resized(&self, ino: InodeId, size: u64) -> Result<Option<Step>> {
        let Some(remote) = self.remote(ino)? else { return Ok(None) };
        let Some(path) = remote.places.first().map_or(Ok(None), |place| self.path(place))? else {
            return Ok(None);
        };
        let action = NameAction::Resize { path, size, expect: expected(&remote) };
        Ok(Some(Step { ino, action, effect: Effect::Truncate { ino, size }, last: true }))
    }
}

/// A step that a mover may have done already is repeated as it was assigned.
pub fn relocation_step(
    read: &dyn Read,
    relation: RelationId,
    volume: VolumeId,
    ino: InodeId,
    record: &RelocationRecord,
) -> Result<Option<Step>> {
    Tree::of_known(read, relation, volume)?.relocations(ino, record)
}

/// The removal of a removed file of which home has parts, and its place; none: it is not the case (any more).
pub fn removal(
    read: &dyn Read,
    relation: RelationId,
    volume: VolumeId,
    ino: InodeId,
) -> Result<Option<(Step, RemotePlace)>> {
    let remote = find_remote(read, relation, ino)?.filter(|remote| !remote.places.is_empty());
    if !store::is_unfinished(read, relation, ino)? || present(read, ino)?.is_some() {
        return Ok(None);
    }
    let Some(place) = remote.map(|remote| remote.places[0].clone()) else { return Ok(None) };
    let tree = Tree::of_known(read, relation, volume)?;
    Ok(tree.vanish(ino, place.clone(), false)?.map(|step| (step, place)))
}

/// A directory whose entries changed at home gets its own times again.
pub fn directory_step(
    read: &dyn Read,
    relation: RelationId,
    volume: VolumeId,
    dir: InodeId,
) -> Result<Option<Step>> {
    let step = Tree::of_known(read, relation, volume)?.attributes(dir)?;
    Ok(step.map(|step| Step { effect: Effect::Attributes { dir }, ..step }))
}

/// As text, for the log.
pub fn describe(action: &NameAction) -> String {
    let show = |path: &Bytes| String::from_utf8_lossy(path).into_owned();
    match action {
        NameAction::Make { path, .. } => format!("make {:?}", show(path)),
        NameAction::Link { from, path, .. } => format!("link {:?} to {:?}", show(from), show(path)),
        NameAction::Remove { path, .. } => format!("remove {:?}", show(path)),
        NameAction::Rename { from, to, .. } => format!("rename {:?} to {:?}", show(from), show(to)),
        NameAction::Exchange { one, other, .. } => format!("exchange {:?} and {:?}", show(one), show(other)),
        NameAction::Attributes { path, .. } => format!("set the attributes of {:?}", show(path)),
        NameAction::Resize { path, size, .. } => format!("truncate {:?} at {size}", show(path)),
    }
}

pub fn moves_a_directory(step: &Step) -> bool {
    match &step.action {
        NameAction::Rename { kind, .. } => *kind == FileKind::Directory,
        NameAction::Exchange { .. } => true,
        _ => false,
    }
}

/// The inodes that get no ranges while a mover has a step with this effect. Several steps may make one
/// directory, under a temporary name.
pub fn held_by(effect: &Effect) -> impl Iterator<Item = InodeId> + use<> {
    let makes_directory = matches!(effect, Effect::Make { kind: FileKind::Directory, .. });
    let [one, other] = files_of(effect);
    let all = [one, other.filter(|other| Some(*other) != one)];
    all.into_iter().flatten().filter(move |_| !makes_directory)
}

/// The inodes of an effect that may be files.
pub fn files_of(effect: &Effect) -> [Option<InodeId>; 2] {
    match effect {
        Effect::Make { ino, .. }
        | Effect::Link { ino, .. }
        | Effect::Drop { ino, .. }
        | Effect::Relocate { ino, .. }
        | Effect::Fingerprint { ino }
        | Effect::Truncate { ino, .. } => [Some(*ino), None],
        Effect::Move { ino, replaced, .. } => [Some(*ino), *replaced],
        Effect::Swap { ino, other, .. } => [Some(*ino), Some(*other)],
        Effect::Attributes { .. } => [None, None],
    }
}
