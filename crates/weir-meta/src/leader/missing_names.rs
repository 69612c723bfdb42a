//! Names that an operation waits for: those of a clone's directory, and those that a mover has to read at
//! home first; and rescans of directories whose volume mirrors home.
use super::base::Base;
use super::clones::Clones;
use crate::namespace::{clone, find_inode, volume};
use crate::relation::listing::{is_due, mirrors, source};
use crate::relation::queues::Relations;
use std::sync::{Arc, PoisonError};
use weir_proto::{Error, InodeId, Result};

/// Names that are wanted, and the reasons for which they are missing.
pub struct MissingNames {
    base: Arc<Base>,
    relations: Arc<Relations>,
    clones: Arc<Clones>,
}

impl MissingNames {
    pub fn new(base: &Arc<Base>, relations: &Arc<Relations>, clones: &Arc<Clones>) -> Arc<MissingNames> {
        Arc::new(MissingNames { base: base.clone(), relations: relations.clone(), clones: clones.clone() })
    }

    /// An operation waits for the names of a directory.
    pub fn want(&self, dir: InodeId) -> Result<()> {
        if self.want_of_clone(dir)? { Ok(()) } else { self.want_of_home(dir) }
    }
    /// Why the names of a directory are missing, if an operation waits for them.
    pub fn why_missing(&self, dir: InodeId) -> Option<String> {
        self.why_not_cloned(dir).or_else(|| self.why_not_enumerated(dir))
    }

    /// An operation waits for the names of a clone's directory. False: it is not one.
    fn want_of_clone(&self, dir: InodeId) -> Result<bool> {
        let mut is_clone = false;
        self.base.read(&mut |read| {
            is_clone = clone::is_not_enumerated(read, dir)?;
            Ok(())
        })?;
        if is_clone {
            self.clones.want(dir);
        }
        Ok(is_clone)
    }
    fn why_not_cloned(&self, dir: InodeId) -> Option<String> {
        let failed = self.clones.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get(&dir).map(|(_, why)| format!("the entries of directory {dir} are not cloned yet: {why}"))
    }

    fn want_of_home(&self, dir: InodeId) -> Result<()> {
        let (mut from, now) = (None, self.base.now());
        self.base.read(&mut |read| {
            from = source(read, dir)?;
            Ok(())
        })?;
        let mut queues = self.relations.lock();
        let Some(queue) = from.and_then(|id| queues.queues.get_mut(&id)) else {
            return Err(Error::damaged(format!("where the names of directory {dir} come from is not known")));
        };
        if let Some(denial) = queue.denial(now) {
            return Err(denial.doing(format_args!("read directory {dir} at home")));
        }
        queue.listings.want(dir, now)?;
        self.relations.work.notify_waiters();
        Ok(())
    }

    /// A client reads a directory, or its entries differ from home: it is rescanned, if that is due. No
    /// operation waits.
    pub fn rescan(&self, dir: InodeId) -> Result<()> {
        let (mut due, wall) = (None, self.base.wall());
        self.base.read(&mut |read| {
            due = None;
            if let Some((id, record)) = mirrors(read, dir)? {
                due = is_due(read, id, dir, wall, record.scans_apart().0)?.then_some(id);
            }
            Ok(())
        })?;
        let mut queues = self.relations.lock();
        let Some(queue) = due.and_then(|id| queues.queues.get_mut(&id)) else { return Ok(()) };
        if queue.listings.want_rescan(dir, self.base.now()) {
            self.relations.work.notify_waiters();
        }
        Ok(())
    }

    /// Has the parent of an inode listed at home again, if that is due.
    pub fn relist_above(&self, ino: InodeId) -> Result<()> {
        let mut above = None;
        self.base.read(&mut |read| {
            above = match find_inode(read, ino)? {
                Some(inode) if inode.nlink > 0 => Some(inode.parent),
                Some(_) => None,
                None => volume::find_parent(read, ino)?,
            };
            Ok(())
        })?;
        above.map_or(Ok(()), |dir| self.rescan(dir))
    }

    fn why_not_enumerated(&self, dir: InodeId) -> Option<String> {
        let mut from = None;
        let asked = self.base.read(&mut |read| {
            from = source(read, dir)?;
            Ok(())
        });
        let id = asked.ok().and(from)?;
        let now = self.base.now();
        let mut queues = self.relations.lock();
        let movers = queues.live_movers(now);
        let queue = queues.queues.get(&id)?;
        let why = match (&queue.back_off, movers) {
            (Some(b), _) if b.denied => format!("the mover may not use this home ({})", b.why),
            (Some(b), _) => format!("home does not answer ({})", b.why),
            (None, 0) => "no mover is running".to_owned(),
            (None, _) if queue.listings.is_out(dir) => "a mover reads it at home".to_owned(),
            (None, _) => "movers read other directories first".to_owned(),
        };
        Some(format!("the entries of directory {dir} are not known here yet: {why}"))
    }
}
