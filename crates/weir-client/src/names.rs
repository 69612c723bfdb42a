//! Names and attributes: answered from leases where one is held, otherwise by the leader.
//!
//! Invariant: a name is remembered only under its directory's lease, and only if no change of names in that
//! directory by this client crossed the request.
mod attributes;
mod trees;

use crate::accesses::Accesses;
use crate::base::Base;
use crate::closes::Closes;
use crate::commit::Commits;
use crate::inode::Inode;
use crate::inodes::Inodes;
use crate::kernel::Kernel;
use crate::known_names::Outcome;
use crate::leader::{Change, Leader, ToLeader};
use crate::leases::Leases;
use crate::lent_names::LentNames;
use crate::local_names::LocalNames;
use crate::reports::Reports;
use crate::resize::Resize;
use crate::rights::Rights;
use crate::types::{NewMode, Stat};
use crate::write_back::WriteBack;
use crate::writing::Writing;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use weir_env::Env;
use weir_proto::meta::{
    Attr, Cred, Entry, FileKind, GetAttr, GetUsage, Lease, LeaseKind, Link, Listing, Lookup, Made, Mkdir,
    Mknod, NAME_MAX, Op, ReadDir, ReadLink, Removed, Rename, RenameMode, Renamed, Rmdir, Symlink, Unlink,
    Usage,
};
use weir_proto::{Error, InodeId, NameRule, Result};

pub struct Names {
    env: Env,
    leader: Arc<Leader>,
    kernel: Arc<Kernel>,
    inodes: Arc<Inodes>,
    accesses: Arc<Accesses>,
    closes: Arc<Closes>,
    local_names: Arc<LocalNames>,
    leases: Arc<Leases>,
    lent_names: Arc<LentNames>,
    commits: Arc<Commits>,
    write_back: Arc<WriteBack>,
    resize: Arc<Resize>,
}

impl Names {
    pub fn new(base: &Base, reports: &Reports, rights: &Rights, writing: &Writing) -> Names {
        let Writing { commits, write_back, resize, .. } = writing.clone();
        let Base { env, leader, kernel, inodes, accesses, lent_names, .. } = base.clone();
        let Reports { closes, local_names, .. } = reports.clone();
        let Rights { leases, .. } = rights.clone();
        Names {
            env,
            leader,
            kernel,
            inodes,
            accesses,
            closes,
            local_names,
            leases,
            lent_names,
            commits,
            write_back,
            resize,
        }
    }

    pub fn try_lookup(&self, parent: InodeId, name: &[u8]) -> Option<Option<Stat>> {
        // A name that is too long is refused, not absent.
        if !self.leader.leases_hold() || name.len() > NAME_MAX {
            return None;
        }
        let known = self.inodes.known(parent)?.lock().name(name)?;
        match known {
            None => Some(None),
            Some(ino) => {
                let inode = self.inodes.known(ino)?;
                let mut st = inode.lock();
                st.forgotten = false;
                st.lend_stat().map(Some)
            }
        }
    }

    pub fn try_getattr(&self, ino: InodeId) -> Option<Stat> {
        if !self.leader.leases_hold() {
            return None;
        }
        self.inodes.known(ino)?.lock().lend_stat()
    }

    pub async fn lookup(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<Option<Stat>> {
        if let Some(known) = self.try_lookup(parent, name) {
            return Ok(known);
        }
        check_name(name)?;
        let dir = self.inodes.get(parent);
        let (revoke_clock, before) = (self.inodes.revoke_clock(), dir.lock().names.change());
        let name = Bytes::copy_from_slice(name);
        let ask = |session| Lookup { session, cred: cred.clone(), parent, name: name.clone() };
        let answer = self.leader.ask(ask).await?;
        self.apply_dir_lease(&dir, &answer.parent_lease, revoke_clock);
        let found = answer.entry.as_ref().map(|entry| self.inodes.apply(entry, revoke_clock));
        self.keep_name(&dir, before, &name, found.as_ref().map(|f| f.attr.ino));
        if let Some(found) = &found {
            self.wait_for_unprotected_pages_of(found.attr.ino).await;
        }
        Ok(found)
    }

    /// A directory's lease that came without its attributes: it covers the names.
    fn apply_dir_lease(&self, dir: &Inode, lease: &Lease, revoke_clock: u64) {
        dir.lock().apply_names_lease(lease, revoke_clock);
    }

    fn keep_name(&self, dir: &Inode, before: u64, name: &[u8], ino: Option<InodeId>) {
        let mut st = dir.lock();
        if st.names.change() == before {
            st.keep_name(name, ino);
        }
    }

    pub async fn getattr(&self, ino: InodeId) -> Result<Stat> {
        if let Some(stat) = self.try_getattr(ino) {
            return Ok(stat);
        }
        if let Some(inode) = self.inodes.known(ino) {
            self.accesses.report_of(&inode).await; // the answer must include it
        }
        let revoke_clock = self.inodes.revoke_clock();
        let entry = self.leader.ask(|session| GetAttr { session, ino }).await?;
        let stat = self.inodes.apply(&entry, revoke_clock);
        self.wait_for_unprotected_pages_of(ino).await;
        Ok(stat)
    }
    async fn wait_for_unprotected_pages_of(&self, ino: InodeId) {
        if let Some(inode) = self.inodes.known(ino) {
            self.leases.wait_for_unprotected_pages(&inode).await;
        }
    }

    /// The last known attributes of an inode that is gone, without a name. Not of an open file: it exists
    /// until it is closed, and its handles know more.
    pub fn last_attr(&self, ino: InodeId) -> Option<Stat> {
        let inode = self.inodes.known(ino)?;
        let st = inode.lock();
        let stat = st.shown(false).filter(|_| !st.opens.is_open())?;
        let size = if stat.attr.kind == FileKind::Directory { 0 } else { stat.attr.size };
        Some(Stat { attr: Attr { nlink: 0, size, ..stat.attr }, leased: false })
    }

    pub async fn readlink(&self, ino: InodeId) -> Result<Bytes> {
        let target = self.leader.ask(|session| ReadLink { session, ino }).await?.target;
        self.accesses.note(ino, &mut self.inodes.get(ino).lock());
        Ok(target)
    }

    pub async fn readdir(
        &self,
        cred: &Cred,
        dir: InodeId,
        after: u64,
        limit: u32,
        with_attrs: bool,
    ) -> Result<Listing> {
        let inode = self.inodes.get(dir);
        let (revoke_clock, before) = (self.inodes.revoke_clock(), inode.lock().names.change());
        let ask = |session| ReadDir { session, cred: cred.clone(), dir, after, limit, with_attrs };
        let mut listing = self.leader.ask(ask).await?;
        self.apply_dir_lease(&inode, &listing.dir_lease, revoke_clock);
        for listed in &mut listing.entries {
            if let Some(entry) = &mut listed.entry {
                let is_new = self.inodes.known(listed.ino).is_none();
                let stat = self.inodes.apply(entry, revoke_clock);
                // The kernel gets only the name, and forgets no inode that it never looked up.
                if is_new && let Some(inode) = self.inodes.known(listed.ino) {
                    inode.lock().forgotten = true;
                }
                entry.attr = stat.attr;
                entry.lease.kind = if stat.leased { LeaseKind::Read } else { LeaseKind::None };
            }
            self.keep_name(&inode, before, &listed.name, Some(listed.ino));
        }
        let to = listing.entries.last().map_or(after, |last| last.cookie);
        let mut st = inode.lock();
        if st.names.change() == before && st.lease.is_held() {
            st.names.listed(after, to, listing.end);
        } else {
            st.names.listing_broken();
        }
        self.accesses.note(dir, &mut st);
        drop(st);
        Ok(listing)
    }

    /// A change of a name by this client: the name has no answer before the outcome is known, even for
    /// requests in flight.
    pub fn begin_change(&self, parent: InodeId, name: &[u8]) -> NameChange {
        let (dir, name) = (self.inodes.get(parent), Bytes::copy_from_slice(name));
        dir.lock().names.begin_change(&name);
        NameChange { dir, name, ended: false }
    }

    /// Changes a name at the leader. A refusal changes nothing; another error may hide a change.
    pub async fn change_name<R: ToLeader>(
        &self,
        parent: InodeId,
        name: &[u8],
        how: Change<'_>,
        make: impl Fn(Op) -> R,
    ) -> Result<Named<R::Reply>> {
        let (mut change, revoke_clock) = (self.begin_change(parent, name), self.inodes.revoke_clock());
        let answer = self.leader.change(how, make).await;
        let reply = change.reported(self.lent_names.doubt(&[parent], answer).await)?;
        Ok(Named { change, reply, revoke_clock })
    }

    /// The name leads there now. `dir`: its directory, as of the answer.
    pub fn end_change(&self, change: NameChange, ino: Option<InodeId>, dir: &Entry, revoke_clock: u64) {
        self.inodes.apply(dir, revoke_clock);
        change.end(Outcome::Leads(ino));
    }

    fn made(&self, named: Named<Made>) -> Stat {
        let Named { change, reply: made, revoke_clock } = named;
        let stat = self.inodes.apply(&made.entry, revoke_clock);
        let dir = Entry { attr: made.parent_attr, lease: made.parent_lease };
        self.end_change(change, Some(stat.attr.ino), &dir, revoke_clock);
        stat
    }

    pub async fn mkdir(&self, cred: &Cred, parent: InodeId, name: &[u8], mode: NewMode) -> Result<Stat> {
        check_name(name)?;
        if self.local_names.builds_a_tree(cred) {
            return self.mkdir_with_names(cred, parent, name, mode).await;
        }
        let n = Bytes::copy_from_slice(name);
        let make = |op| Mkdir {
            op,
            cred: cred.clone(),
            parent,
            name: n.clone(),
            mode: mode.bits,
            umask: mode.umask,
        };
        let tries = AtomicU32::new(0);
        let made = self.change_name(parent, name, Change::once().counting(&tries), make).await?;
        let stat = self.made(made);
        // A reply to a repeated request may be older than the directory's state.
        if stat.leased && tries.into_inner() == 1 {
            self.inodes.get(stat.attr.ino).lock().names.begin_empty();
        }
        Ok(stat)
    }

    pub async fn mknod(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: NewMode,
        kind: FileKind,
        rdev: u32,
    ) -> Result<Stat> {
        check_name(name)?;
        let n = Bytes::copy_from_slice(name);
        let make = |op| Mknod {
            op,
            cred: cred.clone(),
            parent,
            name: n.clone(),
            mode: mode.bits,
            umask: mode.umask,
            kind,
            rdev,
        };
        let made = self.change_name(parent, name, Change::once(), make).await?;
        Ok(self.made(made))
    }

    pub async fn symlink(&self, cred: &Cred, parent: InodeId, name: &[u8], target: &[u8]) -> Result<Stat> {
        check_name(name)?;
        let (n, target) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(target));
        let make = |op| Symlink { op, cred: cred.clone(), parent, name: n.clone(), target: target.clone() };
        let made = self.change_name(parent, name, Change::once(), make).await?;
        Ok(self.made(made))
    }

    pub async fn link(&self, cred: &Cred, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Stat> {
        check_name(name)?;
        let n = Bytes::copy_from_slice(name);
        let make = |op| Link { op, cred: cred.clone(), ino, parent, name: n.clone() };
        let made = self.change_name(parent, name, Change::once(), make).await?;
        Ok(self.made(made))
    }

    pub async fn unlink(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let remove = || self.local_names.try_remove(cred, parent, name);
        if remove() || (self.local_names.lease_for_removal(cred, parent, name).await && remove()) {
            return Ok(());
        }
        let n = Bytes::copy_from_slice(name);
        let make = |op| Unlink { op, cred: cred.clone(), parent, name: n.clone() };
        let removed = self.change_name(parent, name, Change::once(), make).await?;
        self.removed(removed);
        Ok(())
    }

    pub async fn rmdir(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let n = Bytes::copy_from_slice(name);
        let make = |op| Rmdir { op, cred: cred.clone(), parent, name: n.clone() };
        let removed = self.change_name(parent, name, Change::once(), make).await?;
        self.local_names.close(removed.reply.ino);
        self.removed(removed);
        Ok(())
    }

    fn removed(&self, named: Named<Removed>) {
        let Named { change, reply: removed, revoke_clock } = named;
        let dir = Entry { attr: removed.parent_attr, lease: removed.parent_lease };
        self.end_change(change, None, &dir, revoke_clock);
        self.links_changed(removed.ino);
    }

    /// An operation of this client changed an inode's number of links: its attributes are asked for again.
    fn links_changed(&self, ino: InodeId) {
        if let Some(inode) = self.inodes.known(ino) {
            inode.lock().attr_old = true;
            self.closes.let_go(ino);
        }
    }

    pub async fn rename(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        new_parent: InodeId,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        check_name(name)?;
        check_name(new_name)?;
        let is_plain = parent == new_parent && mode != RenameMode::Exchange;
        if is_plain && self.local_names.try_rename(cred, parent, name, new_name) {
            return Ok(());
        }
        self.lent_names.follow(parent, new_parent, mode).await;
        let mut from = self.begin_change(parent, name);
        // A rename to itself is one change.
        let onto = (parent, name) != (new_parent, new_name);
        let mut to = onto.then(|| self.begin_change(new_parent, new_name));
        let revoke_clock = self.inodes.revoke_clock();
        let (n, m) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(new_name));
        let make = |op| Rename {
            op,
            cred: cred.clone(),
            parent,
            name: n.clone(),
            new_parent,
            new_name: m.clone(),
            mode,
        };
        let renamed = self.leader.change(Change::once(), make).await;
        let mut renamed = self.lent_names.doubt(&[parent, new_parent], renamed).await;
        self.lent_names.follow(parent, new_parent, mode).await; // the lease may have ended meanwhile
        for change in std::iter::once(&mut from).chain(&mut to) {
            renamed = change.reported(renamed);
        }
        let renamed = renamed?;
        self.inodes.apply_attr(&renamed.parent_attr, revoke_clock);
        self.inodes.apply_attr(&renamed.new_parent_attr, revoke_clock);
        let (left, arrived) = names_after(mode, &renamed);
        from.end(left);
        if let Some(to) = to {
            to.end(arrived);
        }
        self.links_changed(renamed.moved);
        if let Some(replaced) = renamed.replaced {
            self.links_changed(replaced);
        }
        Ok(())
    }

    /// The target of a path from the root of the namespace; symbolic links in it are not followed.
    pub async fn find_path(&self, cred: &Cred, path: &[u8]) -> Result<Stat> {
        let mut at = self.getattr(InodeId::ROOT).await?;
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            if at.attr.kind != FileKind::Directory {
                let what = format!(
                    "{:?}: what is above {:?} is not a directory",
                    String::from_utf8_lossy(path),
                    String::from_utf8_lossy(name)
                );
                return Err(Error::name(NameRule::NotDirectory, what));
            }
            at = self.lookup(cred, at.attr.ino, name).await?.ok_or_else(|| {
                Error::not_found(format!(
                    "{:?}: there is no {:?}",
                    String::from_utf8_lossy(path),
                    String::from_utf8_lossy(name)
                ))
            })?;
        }
        Ok(at)
    }

    pub async fn usage(&self, dir: InodeId) -> Result<Usage> {
        self.leader.ask(|session| GetUsage { session, dir }).await
    }
}

/// The targets of the old and the new name after a rename.
fn names_after(mode: RenameMode, renamed: &Renamed) -> (Outcome, Outcome) {
    match (mode, renamed.replaced) {
        (RenameMode::Exchange, Some(other)) => {
            (Outcome::Leads(Some(other)), Outcome::Leads(Some(renamed.moved)))
        }
        (RenameMode::Exchange, None) => (Outcome::Unknown, Outcome::Unknown),
        // Two links of one file: rename leaves both.
        (_, Some(replaced)) if replaced == renamed.moved => (Outcome::Unknown, Outcome::Unknown),
        _ => (Outcome::Leads(None), Outcome::Leads(Some(renamed.moved))),
    }
}

/// A change of a name that the leader has answered, and that is to end.
pub struct Named<T> {
    pub change: NameChange,
    pub reply: T,
    pub revoke_clock: u64,
}

/// A change of a name in flight by this client. If dropped, it leaves the name unknown.
pub struct NameChange {
    dir: Arc<Inode>,
    name: Bytes,
    ended: bool,
}

impl NameChange {
    /// Reads the answer: a refusal changes nothing, but another error may hide a change.
    pub fn reported<T>(&mut self, answer: Result<T>) -> Result<T> {
        if let Err(e) = &answer
            && !self.ended
        {
            use weir_proto::ErrorKind::{Damaged, Deadline, Exists, Io, NotFound, Stale, Unavailable};
            // The error may bring news about the name itself, too.
            let unsure = matches!(e.kind, Damaged | Deadline | Exists | Io | NotFound | Stale | Unavailable);
            self.note(if unsure { Outcome::Unknown } else { Outcome::Same });
        }
        answer
    }
    pub fn end(mut self, outcome: Outcome) {
        self.note(outcome);
    }
    fn note(&mut self, outcome: Outcome) {
        self.ended = true;
        let mut st = self.dir.lock();
        let leased = st.lease.is_held();
        st.names.end_change(&self.name, outcome, leased);
    }
}

impl Drop for NameChange {
    fn drop(&mut self) {
        if !self.ended {
            self.note(Outcome::Unknown);
        }
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Error::name(
            NameRule::TooLong,
            format!("a name of {} bytes: at most {NAME_MAX} fit", name.len()),
        ));
    }
    Ok(())
}
