//! Names and attributes: answered from leases where one is held, otherwise by the leader.
//!
//! Invariant: a name is remembered only under its directory's lease, and only if no change of names in that
//! directory by this client crossed the request.
use crate::api::{Forget, NewMode, SetAttrs, Stat};
use crate::handles::OpenFile;
use crate::inner::Inner;
use crate::inode::Inode;
use crate::known_names::Outcome;
use crate::leader::Change;
use crate::plan::Occasion;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use weir_proto::meta::{
    Attr, Cred, Entry, FileKind, GetAttr, GetUsage, GetXattr, Lease, LeaseKind, Link, ListXattr, Listing,
    Lookup, Made, Mkdir, Mknod, NAME_MAX, ReadDir, ReadLink, RemoveXattr, Removed, Rename, RenameMode,
    Renamed, Rmdir, SetXattr, Symlink, Unlink, Usage,
};
use weir_proto::{Error, InodeId, NameRule, Result};

impl Inner {
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
            self.wait_for_unprotected_pages(&inode).await;
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

    pub async fn setattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        through: Option<&OpenFile>,
        set: SetAttrs,
    ) -> Result<Stat> {
        let inode = self.inodes.get(ino);
        if let Some(size) = set.size {
            // Through an open file the access was checked at open.
            let only_size = set.mode.is_none() && set.uid.is_none() && set.gid.is_none();
            let root = Cred { uid: 0, gid: 0, groups: vec![0] };
            let writable = through.is_some_and(|file| file.mode.write);
            let cred = if writable && only_size { &root } else { cred };
            return self.set_size(cred, &inode, through, &set, size).await;
        }
        if let Some(stat) = self.local_names.try_set(cred, &inode, &set) {
            return Ok(stat);
        }
        if set.atime.is_some() {
            self.accesses.report_of(&inode).await; // an earlier read must not overtake it
        }
        // A commit of earlier writes must not overwrite a time set now,
        if set.mtime.is_some() {
            self.take_stored_pages(&inode).await;
        }
        let (dirty, direct) = {
            let st = inode.lock();
            (st.is_dirty(), st.direct.are_pending())
        };
        if dirty {
            self.flush(&inode, Occasion::Closing, false).await?;
        }
        if direct {
            self.settle_direct(&inode).await?;
        }
        self.send_set_attr(cred, &inode, &set, None, false).await
    }

    /// nor may stores through a mapping: the kernel does not report a store before it writes the page back,
    /// up to the end of the mapping. It does so now, and the next store faults the page in again.
    async fn take_stored_pages(&self, inode: &Inode) {
        let may_be_mapped = {
            let st = inode.lock();
            st.opens.for_reading() > 0 && st.opens.is_for_writing()
        };
        if may_be_mapped {
            self.kernel.invalidate(inode.ino, Forget::All).await;
        }
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
    pub fn begin_name_change(&self, parent: InodeId, name: &[u8]) -> NameChange {
        let (dir, name) = (self.inodes.get(parent), Bytes::copy_from_slice(name));
        dir.lock().names.begin_change(&name);
        NameChange { dir, name, ended: false }
    }

    pub fn end_name_change(
        &self,
        change: NameChange,
        ino: Option<InodeId>,
        attr: &Attr,
        lease: &Lease,
        revoke_clock: u64,
    ) {
        self.inodes.apply(&Entry { attr: attr.clone(), lease: lease.clone() }, revoke_clock);
        change.end(Outcome::Leads(ino));
    }

    pub fn made(&self, change: NameChange, made: Made, revoke_clock: u64) -> Stat {
        let stat = self.inodes.apply(&made.entry, revoke_clock);
        self.end_name_change(
            change,
            Some(stat.attr.ino),
            &made.parent_attr,
            &made.parent_lease,
            revoke_clock,
        );
        stat
    }

    pub async fn mkdir(&self, cred: &Cred, parent: InodeId, name: &[u8], mode: NewMode) -> Result<Stat> {
        check_name(name)?;
        if self.local_names.builds_a_tree(cred) {
            return self.mkdir_with_names(cred, parent, name, mode).await;
        }
        let (mut change, revoke_clock) = (self.begin_name_change(parent, name), self.inodes.revoke_clock());
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
        let made = change.reported(
            self.lent_names
                .doubt(&[parent], self.leader.change(Change::once().counting(&tries), make).await)
                .await,
        )?;
        let stat = self.made(change, made, revoke_clock);
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
        let (mut change, revoke_clock) = (self.begin_name_change(parent, name), self.inodes.revoke_clock());
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
        let made = change.reported(
            self.lent_names.doubt(&[parent], self.leader.change(Change::once(), make).await).await,
        )?;
        Ok(self.made(change, made, revoke_clock))
    }

    pub async fn symlink(&self, cred: &Cred, parent: InodeId, name: &[u8], target: &[u8]) -> Result<Stat> {
        check_name(name)?;
        let (mut change, revoke_clock) = (self.begin_name_change(parent, name), self.inodes.revoke_clock());
        let (n, target) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(target));
        let make = |op| Symlink { op, cred: cred.clone(), parent, name: n.clone(), target: target.clone() };
        let made = change.reported(
            self.lent_names.doubt(&[parent], self.leader.change(Change::once(), make).await).await,
        )?;
        Ok(self.made(change, made, revoke_clock))
    }

    pub async fn link(&self, cred: &Cred, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Stat> {
        check_name(name)?;
        let (mut change, revoke_clock) = (self.begin_name_change(parent, name), self.inodes.revoke_clock());
        let n = Bytes::copy_from_slice(name);
        let make = |op| Link { op, cred: cred.clone(), ino, parent, name: n.clone() };
        let made = change.reported(
            self.lent_names.doubt(&[parent], self.leader.change(Change::once(), make).await).await,
        )?;
        Ok(self.made(change, made, revoke_clock))
    }

    pub async fn unlink(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        check_name(name)?;
        if self.local_names.try_remove(cred, parent, name) {
            return Ok(());
        }
        let (mut change, revoke_clock) = (self.begin_name_change(parent, name), self.inodes.revoke_clock());
        let n = Bytes::copy_from_slice(name);
        let make = |op| Unlink { op, cred: cred.clone(), parent, name: n.clone() };
        let removed = change.reported(
            self.lent_names.doubt(&[parent], self.leader.change(Change::once(), make).await).await,
        )?;
        self.removed(change, removed, revoke_clock);
        Ok(())
    }

    pub async fn rmdir(&self, cred: &Cred, parent: InodeId, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let (mut change, revoke_clock) = (self.begin_name_change(parent, name), self.inodes.revoke_clock());
        let n = Bytes::copy_from_slice(name);
        let make = |op| Rmdir { op, cred: cred.clone(), parent, name: n.clone() };
        let removed = change.reported(
            self.lent_names.doubt(&[parent], self.leader.change(Change::once(), make).await).await,
        )?;
        self.local_names.close(removed.ino);
        self.removed(change, removed, revoke_clock);
        Ok(())
    }

    fn removed(&self, change: NameChange, removed: Removed, revoke_clock: u64) {
        self.end_name_change(change, None, &removed.parent_attr, &removed.parent_lease, revoke_clock);
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
        let mut from = self.begin_name_change(parent, name);
        // A rename to itself is one change.
        let onto = (parent, name) != (new_parent, new_name);
        let mut to = onto.then(|| self.begin_name_change(new_parent, new_name));
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

    pub async fn get_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        if name.starts_with(ACL_PREFIX) && self.try_getattr(ino).is_some_and(|stat| !stat.attr.acl) {
            return Err(Error::name(
                NameRule::NoAttribute,
                format!("inode {ino} has no access control list"),
            ));
        }
        let name = Bytes::copy_from_slice(name);
        let ask = |session| GetXattr { session, cred: cred.clone(), ino, name: name.clone() };
        Ok(self.leader.ask(ask).await?.value)
    }
    pub async fn list_xattr(&self, cred: &Cred, ino: InodeId) -> Result<Vec<Bytes>> {
        let ask = |session| ListXattr { session, cred: cred.clone(), ino };
        Ok(self.leader.ask(ask).await?.names)
    }
    pub async fn set_xattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
    ) -> Result<()> {
        let (name, value) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
        let revoke_clock = self.inodes.revoke_clock();
        let make = |op| SetXattr {
            op,
            cred: cred.clone(),
            ino,
            name: name.clone(),
            value: value.clone(),
            create,
            replace,
        };
        let entry = self.leader.change(Change::once(), make).await?;
        self.inodes.apply(&entry, revoke_clock);
        Ok(())
    }
    pub async fn remove_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<()> {
        let name = Bytes::copy_from_slice(name);
        let revoke_clock = self.inodes.revoke_clock();
        let make = |op| RemoveXattr { op, cred: cred.clone(), ino, name: name.clone() };
        let entry = self.leader.change(Change::once(), make).await?;
        self.inodes.apply(&entry, revoke_clock);
        Ok(())
    }

    pub async fn usage(&self, dir: InodeId) -> Result<Usage> {
        self.leader.ask(|session| GetUsage { session, dir }).await
    }
}

/// Attributes that are access control lists: the mode shows whether there is one.
const ACL_PREFIX: &[u8] = b"system.posix_acl_";

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
