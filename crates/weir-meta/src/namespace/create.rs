//! New names: create, mkdir, symlink, mknod, link.
use super::charge::Charge;
use super::dir_names::DirNames;
use super::gate::{OwnDir, WritableDir};
use super::writer::place;
use super::*;
use crate::keys::{self, Sequence};
use crate::record::{NEVER_NAMED, Writing};
use bytes::Bytes;
use weir_proto::meta::{self, Attr, Created, Made, SYMLINK_MAX};
use weir_proto::posix::Inherited;
use weir_proto::quota::Account;
use weir_proto::relation::What;

/// Number of the root's own inode within serial 1.
const ROOT_N: u32 = 1;
/// Hard links to one file.
const LINKS_MAX: u32 = 1 << 20;

/// A namespace's first transaction: the root directory, owned by the administrator, not writable for all as
/// `/tmp` is.
pub fn make_root(txn: &mut dyn Txn, now: Time) {
    let (parent, volume) = (InodeId::ROOT, VolumeId::ROOT);
    let access = Access { mode: 0o755, uid: 0, gid: 0, parent, atime: now, btime: now, volume, cookie: 0 };
    let tally = Tally {
        mtime: now,
        ctime: now,
        entries: 0,
        subdirectories: 0,
        serial: 1,
        next_n: ROOT_N + 1,
        next_cookie: 1,
    };
    tables::ACCESS.put(txn, InodeId::ROOT, &access);
    tables::TALLIES.put(txn, InodeId::ROOT, &tally);
    txn.max(&keys::sequence(Sequence::DirectorySerial), 2);
    volume::make_root(txn, now);
}

/// The mode of a new inode's record.
fn recorded_mode(inherited: &Inherited) -> u32 {
    let has_list = inherited.access.is_some() || inherited.default.is_some();
    inherited.mode | if has_list { HAS_ACL } else { 0 }
}

fn store_lists(cx: &mut Cx<'_>, ino: InodeId, inherited: &Inherited) {
    for (kind, list) in [(acl::ACCESS, &inherited.access), (acl::DEFAULT, &inherited.default)] {
        if let Some(list) = list {
            tables::XATTRS.put_bytes(cx.txn, (ino, kind), &list.to_value());
        }
    }
}

/// A directory in which a name is about to be made.
pub(super) struct ParentDir {
    access: Access,
    names: DirNames,
}

impl ParentDir {
    pub fn of(cx: &Cx<'_>, dir: OwnDir) -> Result<ParentDir> {
        let names = DirNames::load(cx.read(), dir.ino())?;
        Ok(ParentDir { access: dir.into_access(), names })
    }
    /// Of a file that gets no name.
    fn of_nameless(cx: &Cx<'_>, dir: WritableDir) -> Result<ParentDir> {
        let (ino, access) = dir.for_nameless();
        Ok(ParentDir { access, names: DirNames::load(cx.read(), ino)? })
    }
    /// Checks that `name` can be made in `parent` and that no lease conflicts.
    fn for_new(cx: &mut Cx<'_>, cred: &Cred, parent: InodeId, name: &[u8]) -> Attempt<ParentDir> {
        check_name(name)?;
        let dir = cx.dir_to_search(cred, parent)?;
        if dir.find(cx, name)?.is_some() {
            return Err(Error::exists(format!("{:?} is in directory {parent} already", show(name))).into());
        }
        let dir = dir.for_change(cx)?.revoke(cx, &[])?;
        Ok(ParentDir::of(cx, dir)?)
    }

    pub fn ino(&self) -> InodeId {
        self.names.dir()
    }
    pub fn names(&mut self) -> &mut DirNames {
        &mut self.names
    }
    pub fn attr(&self) -> Attr {
        directory_attr(self.ino(), &self.access, self.names.tally())
    }
    /// Whom a new inode of this user is charged to.
    fn account(&self, cred: &Cred) -> Account {
        let Access { volume, .. } = self.access;
        Account { volume, uid: cred.uid, gid: self.access.owned().gid_of_new(cred.gid) }
    }

    /// Mode and lists of a new inode.
    fn inherited(&self, cx: &Cx<'_>, mode: u32, umask: u32, is_directory: bool) -> Result<Inherited> {
        let default = match self.access.mode & HAS_ACL {
            0 => None,
            _ => find_acl(cx.read(), self.ino(), acl::DEFAULT)?,
        };
        Ok(Inherited::new(default, mode, umask, is_directory))
    }

    /// A new inode that is not a directory, without a name yet.
    pub fn new_inode(&self, cx: &Cx<'_>, cred: &Cred, kind: FileKind, inherited: &Inherited) -> Inode {
        let now = cx.rules.now;
        let Owned { mode, uid, gid } = self.access.owned().new_inode(cred, recorded_mode(inherited), false);
        Inode {
            kind,
            mode,
            uid,
            gid,
            nlink: 1,
            rdev: 0,
            size: 0,
            allocated: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            data_version: 0,
            layout: None,
            parent: self.ino(),
            writing: Writing::default(),
            evicted: 0,
            pinned: false,
            layers: None,
            cookie: 0,
        }
    }

    /// Gives a new inode its number and name; everything except the inode's record.
    fn create_inode(&mut self, cx: &mut Cx<'_>, name: &[u8], kind: FileKind) -> Result<InodeId> {
        let ino = self.names.next_ino(cx)?;
        self.names.insert(cx, name, ino, kind);
        self.names.store(cx);
        let (parent, name) = (self.ino(), Bytes::copy_from_slice(name));
        cx.log(parent, || What::Made { ino, kind, parent, name })?;
        Ok(ino)
    }

    fn make_file(mut self, cx: &mut Cx<'_>, name: &[u8], mut inode: Inode) -> Attempt<Made> {
        let (uid, gid) = (inode.uid, inode.gid);
        cx.require_inode(Account { volume: self.access.volume, uid, gid })?;
        let ino = self.create_inode(cx, name, inode.kind)?;
        inode.cookie = self.names.last_place();
        cx.put_inode(ino, &inode);
        cx.charge(self.ino(), Charge::file(&inode))?;
        let entry = cx.rules.entry(ino, &inode);
        Ok(Made { entry, parent_attr: self.attr(), parent_lease: nothing() })
    }
}

pub fn create(cx: &mut Cx<'_>, r: &meta::Create) -> Attempt<Created> {
    check_name(&r.name)?;
    let dir = cx.dir_to_search(&r.cred, r.parent)?;
    if let Some(link) = dir.find(cx, &r.name)? {
        return open_existing(cx, r, link);
    }
    let dir = dir.for_change(cx)?.revoke(cx, &[])?;
    let mut dir = ParentDir::of(cx, dir)?;
    cx.require_inode(dir.account(&r.cred))?;
    if r.open & meta_open::WRITE != 0 {
        cx.wait_for_snapshot_of(dir.access.volume)?;
    }
    let ino = dir.create_inode(cx, &r.name, FileKind::Regular)?;
    let inherited = dir.inherited(cx, r.mode, r.umask, false)?;
    let mut inode = dir.new_inode(cx, &r.cred, FileKind::Regular, &inherited);
    store_lists(cx, ino, &inherited);
    inode.cookie = dir.names.last_place();
    inode.layout = cx.rules.layout_in(dir.access.volume).map(|p| place(p, ino));
    if r.open & meta_open::WRITE != 0 {
        cx.take_writer(ino, &mut inode);
    }
    cx.put_inode(ino, &inode);
    cx.charge(r.parent, Charge::file(&inode))?;
    let mut entry = cx.rules.entry(ino, &inode);
    entry.lease.limited = cx.limit_over(&inode)?;
    Ok(Created { entry, parent_attr: dir.attr(), parent_lease: nothing(), created: true, inline: None })
}

/// A file without a name: it belongs to the session that has it open.
pub fn create_nameless(cx: &mut Cx<'_>, r: &meta::CreateNameless) -> Result<Entry> {
    if r.open & meta_open::WRITE == 0 {
        return Err(Error::invalid("a file without a name must be opened for writing"));
    }
    let dir = cx.dir_to_write(&r.cred, r.parent)?;
    let mut dir = ParentDir::of_nameless(cx, dir)?;
    let ino = dir.names.next_ino(cx)?;
    dir.names.store(cx);
    let inherited = dir.inherited(cx, r.mode, r.umask, false)?;
    let mut inode = dir.new_inode(cx, &r.cred, FileKind::Regular, &inherited);
    store_lists(cx, ino, &inherited);
    (inode.nlink, inode.parent) = (0, NEVER_NAMED);
    cx.take_writer(ino, &mut inode);
    cx.put_inode(ino, &inode);
    tables::HELD.put(cx.txn, (ino, cx.rules.session), &Present);
    Ok(cx.rules.entry(ino, &inode))
}

/// Bits of `Create::open`.
pub mod meta_open {
    pub const READ: u8 = 1;
    pub const WRITE: u8 = 2;
}

fn open_existing(cx: &mut Cx<'_>, r: &meta::Create, link: Link) -> Attempt<Created> {
    if r.exclusive {
        return Err(Error::exists(format!("{:?} is in directory {} already", show(&r.name), r.parent)).into());
    }
    let parent_attr = directory(cx.read(), r.parent)?;
    let (entry, inline) = match link.kind {
        FileKind::Regular => {
            let to_read = if r.open & meta_open::READ != 0 { READ } else { 0 };
            let opened = cx.open_file(&r.cred, link.ino, to_read, r.open & meta_open::WRITE != 0, false)?;
            (opened.entry, opened.inline)
        }
        FileKind::Directory if r.open & meta_open::WRITE != 0 => {
            return Err(
                Error::name(NameRule::IsDirectory, format!("{:?} is a directory", show(&r.name))).into()
            );
        }
        kind => {
            cx.need(link.ino, Need::GetAttr);
            cx.clear()?;
            (entry_of(cx.read(), cx.rules, link.ino, kind)?, None)
        }
    };
    Ok(Created { entry, parent_attr, parent_lease: nothing(), created: false, inline })
}

pub fn mkdir(cx: &mut Cx<'_>, r: &meta::Mkdir) -> Attempt<Made> {
    let mut dir = ParentDir::for_new(cx, &r.cred, r.parent, &r.name)?;
    cx.require_inode(dir.account(&r.cred))?;
    let ino = dir.create_inode(cx, &r.name, FileKind::Directory)?;
    let now = cx.rules.now;
    let inherited = dir.inherited(cx, r.mode, r.umask, true)?;
    let Owned { mode, uid, gid } = dir.access.owned().new_inode(&r.cred, recorded_mode(&inherited), true);
    let access = Access {
        mode,
        uid,
        gid,
        parent: r.parent,
        atime: now,
        btime: now,
        volume: dir.access.volume,
        cookie: dir.names.last_place(),
    };
    let tally = Tally {
        mtime: now,
        ctime: now,
        entries: 0,
        subdirectories: 0,
        serial: tables::next_number(cx.txn, Sequence::DirectorySerial)?,
        next_n: 0,
        next_cookie: 1,
    };
    store_lists(cx, ino, &inherited);
    cx.put_access(ino, &access);
    cx.put_tally(ino, &tally);
    cx.charge(r.parent, Charge { directories: 1, ..Charge::default() })?;
    Ok(Made {
        entry: unleased(directory_attr(ino, &access, &tally)),
        parent_attr: dir.attr(),
        parent_lease: nothing(),
    })
}

pub fn symlink(cx: &mut Cx<'_>, r: &meta::Symlink) -> Attempt<Made> {
    if r.target.is_empty() || r.target.contains(&0) {
        return Err(Error::invalid("a symbolic link needs a target without zero bytes").into());
    }
    if r.target.len() > SYMLINK_MAX {
        return Err(Error::name(
            NameRule::TooLong,
            format!(
                "the target of a symbolic link has {} bytes: at most {SYMLINK_MAX} are allowed",
                r.target.len()
            ),
        )
        .into());
    }
    let dir = ParentDir::for_new(cx, &r.cred, r.parent, &r.name)?;
    let mut inode = dir.new_inode(cx, &r.cred, FileKind::Symlink, &Inherited::of_mode(0o777));
    inode.size = r.target.len() as u64;
    let made = dir.make_file(cx, &r.name, inode)?;
    tables::DATA.put_bytes(cx.txn, made.entry.attr.ino, &r.target);
    Ok(made)
}

pub fn mknod(cx: &mut Cx<'_>, r: &meta::Mknod) -> Attempt<Made> {
    if matches!(r.kind, FileKind::Directory | FileKind::Symlink) {
        return Err(Error::invalid("mknod makes files, pipes, sockets and devices only").into());
    }
    let dir = ParentDir::for_new(cx, &r.cred, r.parent, &r.name)?;
    let inherited = dir.inherited(cx, r.mode, r.umask, false)?;
    let mut inode = dir.new_inode(cx, &r.cred, r.kind, &inherited);
    inode.rdev = r.rdev;
    let made = dir.make_file(cx, &r.name, inode)?;
    store_lists(cx, made.entry.attr.ino, &inherited);
    Ok(made)
}

pub fn link(cx: &mut Cx<'_>, r: &meta::Link) -> Attempt<Made> {
    check_name(&r.name)?;
    let mut inode = match find_inode(cx.read(), r.ino)? {
        Some(inode) => inode,
        None => {
            load_access(cx.read(), r.ino)?;
            return Err(Error::name(
                NameRule::NotOwner,
                format!("inode {} is a directory: no hard links", r.ino),
            )
            .into());
        }
    };
    let first = inode.nlink == 0;
    if first && (inode.parent != NEVER_NAMED || !cx.rules.leases.is_open_by(cx.rules.session, r.ino)) {
        return Err(Error::not_found(format!("inode {} has no name any more", r.ino)).into());
    }
    if inode.nlink >= LINKS_MAX {
        return Err(
            Error::name(NameRule::TooManyLinks, format!("inode {} has {LINKS_MAX} links", r.ino)).into()
        );
    }
    cx.need(r.ino, Need::Change);
    let mut dir = ParentDir::for_new(cx, &r.cred, r.parent, &r.name)?;
    let volume = dir.access.volume;
    if first {
        let account = Account { volume, uid: inode.uid, gid: inode.gid };
        cx.require_inode(account)?;
        cx.require_bytes(account, inode.allocated)?;
        if cx.rules.quotas.limits_account(account) {
            // From now on it is limited: sessions that have it open learn that with the next lease.
            cx.rules.leases.own_conflict(cx.rules.session, r.ino, cx.obstacles);
            cx.clear()?;
        }
    } else {
        volume::require_same(cx.volume_of(inode.parent)?, volume)?;
    }
    inode.nlink += 1;
    inode.ctime = cx.rules.after(inode.ctime);
    dir.names.insert(cx, &r.name, r.ino, inode.kind);
    dir.names.store(cx);
    if first {
        // As for a file created with a name: the first link has no record, and its directory is charged.
        (inode.parent, inode.cookie) = (r.parent, dir.names.last_place());
        cx.charge(r.parent, Charge::file(&inode))?;
        tables::HELD.under(r.ino).delete_all(cx.txn)?;
        cx.events.imported.push(r.ino);
    } else {
        tables::LINKS.put(cx.txn, (r.ino, r.parent, &r.name), &Present);
    }
    cx.put_inode(r.ino, &inode);
    let (ino, parent, name) = (r.ino, r.parent, r.name.clone());
    if first {
        cx.log(parent, || What::Made { ino, kind: inode.kind, parent, name })?;
        cx.log_whole(ino, &inode)?;
    } else {
        cx.log(parent, || What::Linked { ino, parent, name })?;
    }
    Ok(Made { entry: cx.rules.entry(r.ino, &inode), parent_attr: dir.attr(), parent_lease: nothing() })
}
