//! Work for movers: changes of names in an order that keeps home right, and ranges of files.
//!
//! Names: a change may go to a mover when no earlier one in the queue touches the same inode or entry; one
//! that moves a directory waits for all before it, and nothing overtakes it. Ranges: those of one file go to
//! one mover, in order, so that home always shows a prefix. Assigned work is known in memory only: after a
//! restart all of it is assigned again.
//!
//! Pure except for reads of the store: `Relations` holds the lock, `serve` the messages.
use super::listings::Listings;
use super::orphans::Orphans;
use super::ready::Ready;
use super::record::{FINISH, RelationRecord, RelocationRecord};
use super::tree::{self, Effect, Step};
use super::{parts, store};
use crate::keys;
use crate::namespace::find_inode;
use crate::record::ChangeRecord;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weir_env::Instant;
use weir_kv::{Read, Scan};
use weir_proto::meta::FileKind;
use weir_proto::relation::{
    EXTENT_MAX, ExtentWork, Finish, ListWork, NameAction, NameWork, RelationId, What,
};
use weir_proto::{Error, InodeId, Result, SessionId};

/// Changes of names that are checked for the next work.
const WINDOW: usize = 1024;
/// Files that are checked for the next work, each time a mover asks.
const FILES_SCANNED: usize = 512;
/// Ranges that are recalled from another home at a time.
const AWAY_MAX: usize = 16;
/// Directories whose times are corrected in one batch.
const DIRECTORIES_AT_ONCE: usize = 64;
/// Work without a change: numbered by a directory's inode.
const DIRECTORY_WORK: u64 = 1 << 63;

/// A change of names that a mover has.
#[derive(Clone, Debug)]
pub struct NameOut {
    pub session: SessionId,
    pub step: Step,
}
/// A range that a mover has.
#[derive(Clone, Copy, Debug)]
pub struct ExtentOut {
    pub session: SessionId,
    pub end: u64,
    pub mark: u64,
    pub finish: Option<u64>,
}

/// The work in progress for one relation.
#[derive(Default, Debug)]
pub struct ShipQueue {
    pub names_out: BTreeMap<u64, NameOut>,
    pub extents_out: BTreeMap<(InodeId, u64), ExtentOut>,
    /// Files whose ranges wait, because a change of names waits for those that are assigned.
    pub(super) awaited: BTreeSet<InodeId>,
    /// Files that a mover's change of names concerns.
    named: BTreeSet<InodeId>,
    /// Files with a relocation, planned or assigned: their place at home is not certain.
    pub(super) relocating: BTreeSet<InodeId>,
    /// A change of paths waits for all assigned work, or is assigned itself.
    paths_change: bool,
    /// Files that home has parts of, and that a change of names waits for: the parts there are finished as a
    /// file, complete or not.
    pub(super) cut_short: BTreeSet<InodeId>,
    /// Removed files of which home has parts that a change of names waits for: these are removed there at
    /// once.
    pub(super) given_up: BTreeSet<InodeId>,
    /// Numbers of changes of size that home has not applied, by inode.
    pub truncations: BTreeMap<InodeId, BTreeSet<u64>>,
    ready: Ready,
    /// This time the sweep comes before the individually remembered files.
    sweeps_first: bool,
    pub orphans: Orphans,
    pub listings: Listings,
    /// Its home is only read.
    pub mirrors: bool,
    /// Bytes are recalled from another home, and shipped then.
    pub brings_back: bool,
    /// Files whose bytes home would lose, and that a client still reads: to be recalled first.
    pub wanted: BTreeSet<InodeId>,
    /// Home did not answer, or refused: it gets no work for a while.
    pub back_off: Option<BackOff>,
}

/// Why a home gets no work, and until when.
#[derive(Clone, Debug)]
pub struct BackOff {
    pub until: Instant,
    pub tries: u32,
    pub why: String,
    /// The mover may not use this home: waiting does not help, an administrator has to act.
    pub denied: bool,
}

/// Work for a mover, and changes that turned out to need none.
#[derive(Default, Debug)]
pub struct Batch {
    pub names: Vec<NameWork>,
    pub extents: Vec<ExtentWork>,
    /// Changes that need no work at home.
    pub void_names: Vec<u64>,
    /// The changes of size among them.
    pub void_truncations: Vec<(InodeId, u64)>,
    pub void_directories: Vec<InodeId>,
    pub void_relocations: Vec<InodeId>,
    /// Files that are relocated from now on.
    pub relocations: Vec<(InodeId, RelocationRecord)>,
    /// To be checked once more: another step comes first.
    pub again: bool,
    /// Removed files: their dirty ranges are dropped, and the conflict of one that home never had.
    pub gone: Vec<InodeId>,
    /// Files that a mover begins to write: their remote entries are to record it.
    pub begun: Vec<InodeId>,
    pub listings: Vec<ListWork>,
    /// Bytes that have to be recalled from another home first.
    pub away: Vec<(InodeId, u64, u64)>,
}
impl Batch {
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.extents.is_empty() && self.listings.is_empty()
    }
    pub fn has_void(&self) -> bool {
        let nothing = self.void_names.is_empty() && self.void_directories.is_empty();
        self.again || !(nothing && self.void_relocations.is_empty() && self.gone.is_empty())
    }
}

/// An object that a change touches.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Touch {
    Inode(InodeId),
    Entry(InodeId, Bytes),
}

/// The objects that a change modifies and those that it only relies on.
pub(super) fn touches(what: &What) -> (Vec<Touch>, Vec<Touch>) {
    use Touch::{Entry, Inode};
    match what {
        What::Made { ino, parent, name, .. }
        | What::Linked { ino, parent, name }
        | What::Removed { ino, parent, name, .. } => {
            (vec![Inode(*ino), Entry(*parent, name.clone())], vec![Inode(*parent)])
        }
        What::Renamed { ino, parent, name, new_parent, new_name, replaced, .. } => {
            let mut changes =
                vec![Inode(*ino), Entry(*parent, name.clone()), Entry(*new_parent, new_name.clone())];
            changes.extend(replaced.map(|(other, _)| Inode(other)));
            (changes, vec![Inode(*parent), Inode(*new_parent)])
        }
        What::Exchanged { ino, other, parent, name, other_parent, other_name } => (
            vec![
                Inode(*ino),
                Inode(*other),
                Entry(*parent, name.clone()),
                Entry(*other_parent, other_name.clone()),
            ],
            vec![Inode(*parent), Inode(*other_parent)],
        ),
        What::Attributes { ino }
        | What::Resized { ino, .. }
        | What::Data { ino, .. }
        | What::Complete { ino, .. } => (vec![Inode(*ino)], vec![]),
    }
}
fn moves_a_directory(step: &Step) -> bool {
    match &step.action {
        NameAction::Rename { kind, .. } => *kind == FileKind::Directory,
        NameAction::Exchange { .. } => true,
        _ => false,
    }
}
/// Whether a mover may be changing, or may have changed without a report, the objects at the place of one of
/// these inodes.
pub fn may_change(read: &dyn Read, relation: RelationId, inodes: &BTreeSet<InodeId>) -> Result<bool> {
    for ino in inodes {
        if store::relocations(read, relation, *ino)? {
            return Ok(true);
        }
    }
    is_concerned(read, relation, inodes, WINDOW, |change| change.tried)
}
/// Whether home still lacks a change of one of these.
pub fn is_queued(read: &dyn Read, relation: RelationId, inodes: &BTreeSet<InodeId>) -> Result<bool> {
    is_concerned(read, relation, inodes, usize::MAX, |_| true)
}
fn is_concerned(
    read: &dyn Read,
    relation: RelationId,
    inodes: &BTreeSet<InodeId>,
    limit: usize,
    counts: impl Fn(&ChangeRecord) -> bool,
) -> Result<bool> {
    let (start, end) = keys::range_of_short(b'O', relation.0);
    let concerned = store::collect(read, &start, &end, limit, |key, value| {
        let change = tree::load_change(value, store::number_of(key)?)?;
        let (changes, _) = touches(&change.what);
        let touched = changes.iter().any(|t| matches!(t, Touch::Inode(ino) if inodes.contains(ino)));
        Ok(touched && counts(&change))
    })?;
    Ok(concerned.contains(&true))
}
/// Whether paths below it change.
fn is_barrier(what: &What) -> bool {
    matches!(what, What::Renamed { kind: FileKind::Directory, .. } | What::Exchanged { .. })
}

/// The unfinished changes before the one that is checked.
#[derive(Default)]
pub(super) struct Before {
    changed: BTreeSet<Touch>,
    relied_on: BTreeSet<Touch>,
}
impl Before {
    pub fn is_in_the_way(&self, changes: &[Touch], relies: &[Touch]) -> bool {
        changes.iter().any(|t| self.changed.contains(t) || self.relied_on.contains(t))
            || relies.iter().any(|t| self.changed.contains(t))
    }
    pub fn add(&mut self, changes: Vec<Touch>, relies: Vec<Touch>) {
        self.changed.extend(changes);
        self.relied_on.extend(relies);
    }
    /// Directories whose times a mover is setting: their names stay, others may be added and removed in them
    /// meanwhile.
    fn add_directories(&mut self, out: &BTreeMap<u64, NameOut>) {
        self.relied_on.extend(out.keys().filter_map(|number| directory_of_work(*number)).map(Touch::Inode));
    }
    fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.relied_on.is_empty()
    }
}

/// One search for work.
pub struct WorkRequest<'a> {
    pub read: &'a dyn Read,
    pub relation: RelationId,
    pub record: &'a RelationRecord,
    pub session: SessionId,
    /// The mover's limit.
    pub bytes: u64,
    pub items: usize,
}

impl ShipQueue {
    /// Changes of names that may go now.
    pub fn names(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<()> {
        self.awaited.clear();
        self.cut_short.clear();
        self.paths_change = self.names_out.values().any(|out| moves_a_directory(&out.step));
        let (start, end) = keys::range_of_short(b'O', request.relation.0);
        let queue = store::collect(request.read, &start, &end, WINDOW, |key, value| {
            let number = store::number_of(key)?;
            let change = tree::load_change(value, number)?;
            Ok((number, change.what, change.tried))
        })?;
        let mut before = Before::default();
        before.add_directories(&self.names_out);
        self.relocations(request, batch, &mut before)?;
        self.give_up(request, batch, &mut before)?;
        let may_be_done = self.may_be_done(&queue);
        let empty = queue.is_empty();
        for (number, what, tried) in queue {
            if batch.names.len() >= request.items {
                return Ok(());
            }
            let (changes, relies) = touches(&what);
            let mut barrier = is_barrier(&what);
            let waits = self.names_out.contains_key(&number)
                || before.is_in_the_way(&changes, &relies)
                || (barrier
                    && (!before.is_empty()
                        || self.paths_in_use()
                        || self.waits_for_parts(request, batch)?))
                || self.waits_for_data(request, batch, number, &what)?;
            if !waits {
                match tree::step(request.read, request.relation, request.record, &what, tried)? {
                    None => {
                        batch.void_names.push(number);
                        match what {
                            What::Resized { ino, .. } => batch.void_truncations.push((ino, number)),
                            What::Removed { ino, last: true, .. } => batch.gone.push(ino),
                            _ => {}
                        }
                        continue;
                    }
                    // An administrator decides, or removes it here.
                    Some(step) if is_in_conflict(request, step.ino)? => {}
                    Some(step) if moves_a_directory(&step) && !barrier => {
                        // One that was created under a temporary name gets its name.
                        barrier = true;
                        if before.is_empty()
                            && !self.paths_in_use()
                            && !self.waits_for_parts(request, batch)?
                        {
                            self.assign_name(request, batch, number, step);
                        }
                    }
                    Some(step) => {
                        let others = may_be_done.iter().filter(|(other, _)| *other != number);
                        let others = others.flat_map(|(_, changes)| changes);
                        self.assign_step(request, batch, number, step, &mut before, others)?;
                    }
                }
            }
            if barrier {
                return Ok(());
            }
            before.add(changes, relies);
        }
        if empty {
            self.directories(request, batch)?;
        }
        Ok(())
    }

    /// Paths that change must not be in use: no mover gets new work on them meanwhile.
    fn paths_in_use(&mut self) -> bool {
        self.paths_change = true;
        !self.extents_out.is_empty() || self.listings.is_under_way()
    }
    pub(super) fn paths_are_changing(&self) -> bool {
        self.paths_change
    }

    pub(super) fn assign_name(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        number: u64,
        step: Step,
    ) {
        batch.names.push(NameWork { number, ino: step.ino, action: step.action.clone() });
        self.names_out.insert(number, NameOut { session: request.session, step });
    }

    /// Bytes that home must have first, or that are being written right now.
    fn waits_for_data(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        number: u64,
        what: &What,
    ) -> Result<bool> {
        if let What::Renamed { replaced: Some((other, _)), .. } = what
            && self.extents_of(*other).next().is_some()
        {
            self.awaited.insert(*other);
            return Ok(true);
        }
        if let What::Removed { ino, last: true, .. } | What::Renamed { replaced: Some((ino, true)), .. } =
            what
            && find_inode(request.read, *ino)?.is_some_and(|inode| inode.nlink == 0 && inode.evicted > 0)
        {
            self.wanted.insert(*ino);
            return Ok(true);
        }
        let file = match what {
            What::Renamed { ino, kind: FileKind::Regular, .. } => {
                // The object exists before it gets the name: files are replaced by rename.
                if is_in_conflict(request, *ino)? {
                    return Ok(true);
                }
                let dirty = store::dirty_of(request.read, request.relation, *ino)?;
                let finish = store::dirty_finish(request.read, request.relation, *ino)?;
                let known = tree::find_remote(request.read, request.relation, *ino)?.is_some();
                // Bytes that wait for a truncation queued after this name, and the end of the file with them,
                // would wait for ever.
                let first_truncation = self.first_truncation(*ino);
                let (go, held): (Vec<_>, Vec<_>) =
                    dirty.iter().map(|(_, p)| p).partition(|p| p.newest <= first_truncation);
                let end = finish.as_ref().filter(|_| held.is_empty());
                if known && go.into_iter().chain(end).any(|p| p.oldest < number) {
                    // If it is shipped in parts, and keeps growing, that would be never.
                    if request.record.rules().parts && self.extents_of(*ino).next().is_none() {
                        self.cut_short.insert(*ino);
                    }
                    return Ok(true);
                }
                *ino
            }
            What::Attributes { ino } | What::Resized { ino, .. } | What::Removed { ino, .. } => *ino,
            What::Linked { ino, .. } => *ino,
            // One more name of a file that home has already, found by the scan of a whole volume.
            What::Made { ino, .. } if tree::find_remote(request.read, request.relation, *ino)?.is_some() => {
                *ino
            }
            _ => return Ok(false),
        };
        if matches!(what, What::Removed { last: true, .. }) {
            let busy = self.extents_of(file).next().is_some();
            if busy {
                self.awaited.insert(file);
            }
            let known = tree::find_remote(request.read, request.relation, file)?.is_some();
            return Ok(busy || known && is_in_conflict(request, file)?);
        }
        self.is_being_written(request, batch, file)
    }

    /// Whether a file must not get another name, size or attributes just now. The obstacle ends by itself.
    pub(super) fn is_being_written(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        file: InodeId,
    ) -> Result<bool> {
        if is_in_conflict(request, file)? {
            return Ok(true);
        }
        if self.extents_of(file).next().is_some() {
            self.awaited.insert(file);
            return Ok(true);
        }
        let is_half_way = store::is_unfinished(request.read, request.relation, file)?;
        if is_half_way {
            self.end_half_way(request, batch, file)?;
        }
        Ok(is_half_way)
    }
    fn end_half_way(&mut self, request: &WorkRequest<'_>, batch: &mut Batch, file: InodeId) -> Result<()> {
        match tree::removal(request.read, request.relation, request.record.volume, file)? {
            Some(_) => batch.again |= self.given_up.insert(file),
            None => drop(self.cut_short.insert(file)),
        }
        Ok(())
    }

    /// Before paths change, no file may be half shipped at a home that identifies parts of a file by its
    /// path.
    fn waits_for_parts(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<bool> {
        if !request.record.rules().parts {
            return Ok(false);
        }
        let files = store::unfinished(request.read, request.relation, FILES_SCANNED)?;
        for file in &files {
            self.end_half_way(request, batch, *file)?;
        }
        Ok(!files.is_empty())
    }

    pub(super) fn extents_of(&self, ino: InodeId) -> impl Iterator<Item = (&(InodeId, u64), &ExtentOut)> {
        self.extents_out.range((ino, 0)..=(ino, u64::MAX))
    }
    /// Whether a mover has a part of `start..end`.
    pub fn is_out(&self, ino: InodeId, start: u64, end: u64) -> bool {
        self.extents_of(ino).any(|((_, at), out)| *at < end && start < out.end)
    }
    /// The first change of size that home has not applied.
    fn first_truncation(&self, ino: InodeId) -> u64 {
        self.truncations.get(&ino).and_then(|truncations| truncations.first().copied()).unwrap_or(u64::MAX)
    }
    /// Whether home has not applied a change of size between two others.
    pub fn is_truncated_between(&self, ino: InodeId, oldest: u64, newest: u64) -> bool {
        self.truncations
            .get(&ino)
            .is_some_and(|truncations| truncations.range(oldest..newest).next().is_some())
    }

    /// Directories whose entries changed at home, when all changes of names are done there.
    fn directories(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<()> {
        let (start, end) = keys::range_of_short(b'd', request.relation.0);
        let dirs = store::collect(request.read, &start, &end, DIRECTORIES_AT_ONCE, |key, _| {
            Ok(InodeId(store::number_of(key)?))
        })?;
        for dir in dirs {
            let number = DIRECTORY_WORK | dir.0;
            if self.names_out.contains_key(&number) || is_in_conflict(request, dir)? {
                continue;
            }
            match tree::directory_step(request.read, request.relation, request.record.volume, dir)? {
                Some(step) => self.assign_name(request, batch, number, step),
                None => batch.void_directories.push(dir),
            }
        }
        Ok(())
    }

    /// Ranges of files that may go now.
    pub fn extents(&mut self, request: &WorkRequest<'_>, batch: &mut Batch) -> Result<()> {
        let mut left = request.bytes;
        self.named = self.names_out.values().flat_map(|out| files_of(&out.step.effect)).flatten().collect();
        for ino in std::mem::take(&mut self.cut_short) {
            self.file(request, batch, ino, true, &mut left)?;
        }
        if self.paths_change {
            return Ok(());
        }
        for ino in self.ready.take_soon() {
            if is_full(request, batch, left) || !self.file(request, batch, ino, false, &mut left)? {
                self.ready.put_back(ino);
            }
        }
        // In turns, so that neither new nor old work delays the other.
        let mut scans = FILES_SCANNED;
        self.sweeps_first = !self.sweeps_first;
        if self.sweeps_first {
            self.sweep(request, batch, &mut scans, &mut left)?;
        }
        for ino in self.ready.touched(scans) {
            if is_full(request, batch, left) {
                return Ok(());
            }
            scans -= 1;
            let settled = self.file(request, batch, ino, false, &mut left)?;
            self.ready.looked_at(ino, settled);
        }
        self.sweep(request, batch, &mut scans, &mut left)
    }

    /// Continues over all files with dirty ranges, if that is requested.
    fn sweep(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        scans: &mut usize,
        left: &mut u64,
    ) -> Result<()> {
        let (_, end) = keys::range_of_short(b'P', request.relation.0);
        while let Some(from) = self.ready.sweep_from()
            && *scans > 0
            && !is_full(request, batch, *left)
        {
            *scans -= 1;
            let mut found = None;
            request.read.scan(&keys::dirty(request.relation, from, 0), &end, &mut |key, _| {
                found = keys::long_number(key).map(InodeId);
                Scan::Stop
            })?;
            match found {
                Some(ino) => {
                    let settled = self.file(request, batch, ino, false, left)?;
                    self.ready.swept(ino, settled);
                }
                None => self.ready.sweep_ended(),
            }
        }
        Ok(())
    }

    /// A file has changed, or a mover's work on it.
    pub fn touch(&mut self, ino: InodeId) {
        let is_out = self.extents_of(ino).next().is_some();
        self.ready.touch(ino, is_out);
    }
    /// A change was ingested.
    pub fn touch_changed(&mut self, what: &What) {
        for touched in touches(what).0 {
            if let Touch::Inode(ino) = touched {
                self.touch(ino);
            }
        }
    }
    /// Touches the files that a change of names concerns.
    pub fn touch_named(&mut self, effect: &Effect) {
        files_of(effect).into_iter().flatten().for_each(|ino| self.touch(ino));
    }
    /// A change that may concern every file.
    pub fn touch_all(&mut self) {
        self.ready.touch_all();
    }

    /// The work on a file that may go now; returns whether there is no more to assign until it is touched.
    /// `cut_short`: its end as well, even if it is not complete.
    fn file(
        &mut self,
        request: &WorkRequest<'_>,
        batch: &mut Batch,
        ino: InodeId,
        cut_short: bool,
        left: &mut u64,
    ) -> Result<bool> {
        let with_another = self.extents_of(ino).any(|(_, out)| out.session != request.session);
        // The next mover must know where the parts are, and the leader knows that with the last of them.
        let is_half_reported = request.record.rules().parts && self.extents_of(ino).next().is_some();
        let is_moving = self.named.contains(&ino) || self.relocating.contains(&ino);
        if with_another || is_half_reported || is_moving || self.awaited.contains(&ino) {
            return Ok(false);
        }
        if is_in_conflict(request, ino)? {
            return Ok(true);
        }
        let Some(remote) = tree::find_remote(request.read, request.relation, ino)? else {
            // Its name comes first; or it has none any more.
            if find_inode(request.read, ino)?.is_none() {
                batch.gone.push(ino);
            }
            return Ok(true);
        };
        // Even if a client still has it open: home is to delete it.
        let Some(inode) = find_inode(request.read, ino)?.filter(|inode| inode.nlink > 0) else {
            batch.gone.push(ino);
            return Ok(true);
        };
        let Some(path) = tree::path(request.read, request.relation, ino)?.map(Bytes::from) else {
            return Ok(false);
        };
        let first_truncation = self.first_truncation(ino);
        let ranges = store::dirty_of(request.read, request.relation, ino)?;
        let finish = store::dirty_finish(request.read, request.relation, ino)?;
        let inline = request.read.get(&keys::data(ino))?.map(Bytes::from);
        let item = |offset, len: u64, inline, finish| ExtentWork {
            ino,
            path: path.clone(),
            offset,
            len,
            layout: inode.layout,
            object: inode.object(ino),
            layered: inode.layered() > 0,
            inline,
            expect: tree::expected(&remote),
            finish,
        };
        let mut evicted = if inode.evicted > 0 { store::evicted_of(request.read, ino)? } else { Vec::new() };
        // Bytes on targets past the end in its last stripe are of writes that a truncation has overtaken.
        let stripe = inode.layout.map_or(u64::MAX, |l| l.stripe_bytes());
        let up = |to: u64| to.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
        evicted.iter_mut().for_each(|(_, to)| *to = up(*to));
        let begun = batch.extents.len();
        let (mut all_out, mut held_up, parts) = (true, false, request.record.rules().parts);
        // Truncations finish, and bytes are recalled, without a touch of the file.
        let mut settled = finish.as_ref().is_none_or(|finish| finish.newest < first_truncation);
        let due = match parts {
            true => parts::whole(&ranges, inode.size, finish.is_some() || cut_short, first_truncation),
            false => parts::as_written(&ranges, inode.size),
        };
        all_out &= due.complete;
        for part in due.parts {
            let mut start = part.start;
            while start < part.end {
                if let Some((_, out)) =
                    self.extents_of(ino).find(|((_, s), out)| *s <= start && start < out.end)
                {
                    // Later writes over it are shipped after its report; the end of the file after them.
                    all_out &= out.mark >= part.newest;
                    held_up |= out.mark < part.newest;
                    start = out.end;
                    continue;
                }
                let is_full = is_full(request, batch, *left);
                if is_full || part.newest > first_truncation {
                    (all_out, settled) = (false, false);
                    held_up |= is_full;
                    break;
                }
                let next_out =
                    self.extents_of(ino).map(|((_, s), _)| *s).find(|s| *s > start).unwrap_or(u64::MAX);
                let most = if parts { u64::MAX } else { EXTENT_MAX };
                let len = (part.end - start).min(most).min(next_out - start);
                if evicted.iter().any(|(from, to)| *from < start + len && start < *to) {
                    // At another home only: it is recalled, and shipped then.
                    if batch.away.len() < AWAY_MAX {
                        batch.away.push((ino, start, start + len));
                    }
                    (all_out, held_up, settled) = (false, true, false);
                    break;
                }
                *left = left.saturating_sub(len);
                let bytes = inline.as_ref().map(|bytes| slice_of(bytes, start, len));
                let out =
                    ExtentOut { session: request.session, end: start + len, mark: part.newest, finish: None };
                self.extents_out.insert((ino, start), out);
                batch.extents.push(item(start, len, bytes, None));
                start += len;
            }
        }
        // The end is assigned with the last range, or after it: together only if this mover has all of it.
        let end = match (&finish, cut_short) {
            (Some(finish), _) if finish.newest < first_truncation => Some(finish.newest),
            (_, true) => Some(0),
            _ => None,
        };
        let ends_something =
            batch.extents.len() > begun || store::is_unfinished(request.read, request.relation, ino)?;
        if let Some(mark) = end.filter(|_| all_out || cut_short && !held_up && ends_something)
            && !self.extents_out.contains_key(&(ino, FINISH))
            && let Some(present) = tree::present(request.read, ino)?
        {
            let out = ExtentOut { session: request.session, end: FINISH, mark, finish: Some(present.size) };
            self.extents_out.insert((ino, FINISH), out);
            let finish = Finish { size: present.size, attrs: present.attrs };
            batch.extents.push(item(FINISH, 0, None, Some(finish)));
        }
        if batch.extents.len() > begun && (!remote.writing || parts) {
            batch.begun.push(ino);
        }
        Ok(settled)
    }

    /// Revokes a mover's work; returns whether it had any.
    pub fn end_session(&mut self, session: SessionId) -> bool {
        let before = self.names_out.len() + self.extents_out.len();
        self.names_out.retain(|_, out| out.session != session);
        self.extents_out.retain(|_, out| out.session != session);
        let had_work = self.names_out.len() + self.extents_out.len() < before;
        self.orphans.end_session(session);
        self.listings.end_session(session);
        if had_work {
            self.ready.touch_all();
        }
        had_work
    }

    /// Home did not answer, or the mover may not use it.
    pub fn hold_off(&mut self, now: Instant, why: &str, denied: bool) {
        let tries = self.back_off.as_ref().map_or(0, |b| b.tries);
        let already = self.back_off.as_ref().is_some_and(|b| b.until > now);
        if !already {
            let until = now + back_off(tries);
            self.back_off = Some(BackOff { until, tries: tries + 1, why: why.to_owned(), denied });
        }
    }
    /// The error for programs that would wait for a home that no mover may use.
    pub fn denial(&self, now: Instant) -> Option<Error> {
        let back_off = self.back_off.as_ref().filter(|b| b.denied && b.until > now)?;
        Some(Error::denied(back_off.why.clone()))
    }
}

/// Bytes `start..start + len` of an inline file: zeros after its data.
fn slice_of(bytes: &Bytes, start: u64, len: u64) -> Bytes {
    let mut out = vec![0; len as usize];
    let from = (start as usize).min(bytes.len());
    let n = (bytes.len() - from).min(out.len());
    out[..n].copy_from_slice(&bytes[from..from + n]);
    Bytes::from(out)
}

pub(super) fn is_in_conflict(request: &WorkRequest<'_>, ino: InodeId) -> Result<bool> {
    Ok(request.read.get(&keys::conflict(request.relation, ino))?.is_some())
}

/// Whether the mover's limit is reached.
fn is_full(request: &WorkRequest<'_>, batch: &Batch, left: u64) -> bool {
    left == 0 || batch.extents.len() >= request.items
}

/// The inodes of an effect that may be files.
pub(super) fn files_of(effect: &Effect) -> [Option<InodeId>; 2] {
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

/// The directory whose times a piece of work corrects.
pub fn directory_of_work(number: u64) -> Option<InodeId> {
    (number & DIRECTORY_WORK != 0).then_some(InodeId(number & !DIRECTORY_WORK))
}

impl PartialEq for NameOut {
    fn eq(&self, other: &NameOut) -> bool {
        self.session == other.session && self.step == other.step
    }
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

/// A home that does not answer is retried after this, doubled each time up to the maximum.
const BACK_OFF_MIN: Duration = Duration::from_millis(500);

const BACK_OFF_MAX: Duration = Duration::from_secs(30);

fn back_off(tries: u32) -> Duration {
    BACK_OFF_MIN.saturating_mul(1 << tries.min(10)).min(BACK_OFF_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_a_refused_home_before_the_next_try() {
        let at = |ms| Instant(0) + Duration::from_millis(ms);
        let mut queue = ShipQueue::default();
        for dir in [InodeId(7), InodeId(8)] {
            queue.listings.want(dir, at(0)).unwrap();
        }
        queue.hold_off(at(0), "home hangs", false);
        assert!(queue.denial(at(1)).is_none(), "that is waited for");
        queue.hold_off(at(2000), "user 7 may not", true);
        assert_eq!(queue.denial(at(2001)), Some(Error::denied("user 7 may not")));
        assert_eq!(queue.listings.give_up(), [InodeId(7), InodeId(8)]);
        assert!(queue.listings.wanted.is_empty());
        assert!(queue.denial(at(60_000)).is_none(), "it is tried again");
    }
}
