//! Files that a client created or removed locally, in a directory whose names it has exclusively.
//!
//! Invariants: a batch is carried out as a whole or not at all. A number is reserved for one client and one
//! directory, and is used at most once: the block in the store has the remaining ones. A file that the lease
//! on names permits is not refused later: limits and access control lists are checked when the names are
//! granted, unused numbers count under limits of inodes, and a change of these revokes the lease first.
use super::charge::Charge;
use super::create::ParentDir;
use super::dir_names::DirNames;
use super::gate::OwnDir;
use super::*;
use crate::keys::Letter;
use crate::lease::Numbers;
use crate::record::unknown_version;
use crate::table::Table;
use bytes::Bytes;
use weir_kv::Scan;
use weir_proto::local_creates::{
    BATCH_BYTES_MAX, BATCH_FILES_MAX, CLOCKS_APART_MS_MAX, CreateMany, CreatedMany, FilesLeased,
    LEASED_FILES_MAX, LeaseFiles, LeaseNames, LeasedFile, LocalCreate, MadeWithNames, MkdirWithNames,
    NUMBERS_MAX, NamesLeased, RemoveMany, RemovedMany,
};
use weir_proto::meta::{INLINE_MAX, Made, Mkdir};
use weir_proto::posix::{Change, Inherited, MayWrite};
use weir_proto::quota::Account;
use weir_proto::relation::What;
use weir_proto::{Reader, Wire, wire_struct};

/// `w/`: numbers of a directory that a session may use for its files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NumberBlock {
    /// The first unused one, and the end of the block.
    pub next: InodeId,
    pub end: InodeId,
    /// The files' layout; each has a seed of its own.
    pub layout: Layout,
    /// Whose limits the files count under; `Account::NONE`: no limit applies.
    pub account: Account,
}
wire_struct!(NumberBlock { next: InodeId, end: InodeId, layout: Layout, account: Account });

/// The layout of version 1: of directories without limits.
struct FirstBlock {
    next: InodeId,
    end: InodeId,
    layout: Layout,
}
wire_struct!(FirstBlock { next: InodeId, end: InodeId, layout: Layout });

impl Record for NumberBlock {
    const VERSION: u8 = 2;
    fn decode_version(version: u8, r: &mut Reader<'_>) -> Result<NumberBlock> {
        match version {
            1 => {
                let FirstBlock { next, end, layout } = FirstBlock::decode(r)?;
                Ok(NumberBlock { next, end, layout, account: Account::NONE })
            }
            Self::VERSION => NumberBlock::decode(r),
            n => Err(unknown_version(n, Self::VERSION)),
        }
    }
}

impl NumberBlock {
    pub fn numbers(&self) -> Numbers {
        Numbers { account: self.account, next: self.next, end: self.end }
    }
}

const NUMBERS: Table<(SessionId, InodeId), NumberBlock> =
    Table::new(Letter::Numbers, "the numbers of session");

/// A session has no numbers any more.
pub fn forget_numbers(txn: &mut dyn Txn, session: SessionId) -> Result<()> {
    NUMBERS.under(session).delete_all(txn)
}

/// A session's remaining numbers in a directory.
pub fn find_block(read: &dyn Read, session: SessionId, dir: InodeId) -> Result<Option<NumberBlock>> {
    NUMBERS.get(read, (session, dir))
}

pub fn lease_names(cx: &mut Cx<'_>, r: &LeaseNames) -> Result<NamesLeased> {
    let access = load_access(cx.read(), r.dir)?;
    cx.require_own(access.volume)?;
    for dir in cx.rules.leases.ended_names(cx.rules.session) {
        NUMBERS.delete(cx.txn, (cx.rules.session, *dir));
    }
    let mut names = DirNames::load(cx.read(), r.dir)?;
    let entry = unleased(directory_attr(r.dir, &access, names.tally()));
    let refused = NamesLeased {
        entry,
        first: InodeId(0),
        numbers: 0,
        layout: None,
        account: Account::NONE,
        limits_bytes: false,
    };
    let Some(policy) = cx.policy_of_creates(r, &access) else { return Ok(refused) };
    let (account, quotas) = (cx.limited_account(r, &access), cx.rules.quotas);
    let numbers = cx.numbers_within_limits(r.dir, account, r.numbers.clamp(1, NUMBERS_MAX))?;
    if numbers == 0 {
        return Ok(refused);
    }
    let first = names.take_numbers(cx, numbers)?;
    names.store(cx);
    let layout = policy.layout(0);
    let block = NumberBlock { next: first, end: InodeId(first.0 + u64::from(numbers)), layout, account };
    NUMBERS.put(cx.txn, (cx.rules.session, r.dir), &block);
    let limits_bytes = account != Account::NONE && quotas.limits_account(account);
    Ok(NamesLeased { first, numbers, layout: Some(layout), account, limits_bytes, ..refused })
}

/// A directory whose maker has its names from its first moment: no other client has seen it.
pub fn mkdir_with_names(cx: &mut Cx<'_>, r: &MkdirWithNames) -> Attempt<MadeWithNames> {
    let (op, cred, name) = (r.op.clone(), r.cred.clone(), r.name.clone());
    let mkdir = Mkdir { op, cred, parent: r.parent, name, mode: r.mode, umask: r.umask };
    let Made { entry, parent_attr, parent_lease } = super::create::mkdir(cx, &mkdir)?;
    let (session, dir) = (cx.rules.session, entry.attr.ino);
    let (numbers, now) = (r.numbers, r.now);
    let names =
        lease_names(cx, &LeaseNames { session, dir, numbers, now, uid: r.cred.uid, gid: r.cred.gid })?;
    Ok(MadeWithNames { names, parent_attr, parent_lease })
}

pub fn create_many(cx: &mut Cx<'_>, r: &CreateMany) -> Attempt<CreatedMany> {
    let bytes = |c: &LocalCreate| c.name.len() + c.content.as_ref().map_or(0, Bytes::len);
    check_batch(r.creates.len(), r.creates.iter().map(bytes).sum())?;
    let (dir, session) = (cx.names_of_batch(r.dir, &r.cred)?, cx.rules.session);
    let mut block = find_block(cx.read(), session, r.dir)?.ok_or_else(|| {
        Error::invalid(format!("session {session} has no inode numbers in directory {}", r.dir))
    })?;
    let (mut dir, mut charge) = (ParentDir::of(cx, dir)?, Charge::default());
    for created in &r.creates {
        charge = charge.and(cx.create_reported(&mut dir, &mut block, &r.cred, created)?);
    }
    dir.names().store(cx);
    NUMBERS.put(cx.txn, (session, r.dir), &block);
    cx.charge(r.dir, charge)?;
    Ok(CreatedMany { parent_attr: dir.attr() })
}

/// The next files that one client may remove by itself, if no other uses them.
pub fn lease_files(view: &mut View<'_>, r: &LeaseFiles) -> Result<FilesLeased> {
    view.rules.held_names(r.dir)?;
    let (count, mut found) = (LEASED_FILES_MAX.min(r.count as usize), Vec::new());
    tables::NAMES.from(r.dir, (r.dir, &r.from)).scan(view.read, &mut |(_, name), link| {
        if link.kind == FileKind::Regular && found.len() < count {
            found.push((Bytes::copy_from_slice(name), link.ino));
        }
        if found.len() < count { Scan::More } else { Scan::Stop }
    })?;
    let mut files = Vec::with_capacity(found.len());
    for (name, ino) in found {
        let is_one = |inode: &Inode| inode.nlink == 1 && !view.rules.must_recover(ino, inode);
        let inode = find_inode(view.read, ino)?.filter(is_one);
        files.extend(inode.map(|inode| LeasedFile { name, entry: view.rules.entry(ino, &inode) }));
    }
    Ok(FilesLeased { files })
}

pub fn remove_many(cx: &mut Cx<'_>, r: &RemoveMany) -> Attempt<RemovedMany> {
    check_batch(r.removals.len(), r.removals.iter().map(|removal| removal.name.len()).sum())?;
    let dir = cx.names_of_batch(r.dir, &r.cred)?;
    for removal in &r.removals {
        let link = load_link(cx.read(), r.dir, &removal.name)?;
        if link.ino != removal.ino || link.kind == FileKind::Directory {
            return Err(Error::invalid(format!(
                "{:?} in directory {} is not the file {}",
                show(&removal.name),
                r.dir,
                removal.ino
            ))
            .into());
        }
        cx.require_removable(&r.cred, dir.access(), &link)?;
        cx.need(link.ino, Need::Change);
    }
    cx.clear()?;
    for removal in &r.removals {
        let link = load_link(cx.read(), r.dir, &removal.name)?; // an error if the batch names it twice
        cx.remove_or_keep(&dir, &removal.name, &link)?;
    }
    let mut tally = load_tally(cx.read(), r.dir)?;
    // The directory changed at the client's time, not at the time of this report.
    tally.mtime = r.removals.last().map_or(tally.mtime, |last| cx.rules.near(last.at));
    cx.put_tally(r.dir, &tally);
    Ok(RemovedMany { parent_attr: directory_attr(r.dir, dir.access(), &tally) })
}

fn check_batch(files: usize, bytes: usize) -> Result<()> {
    if files == 0 || files > BATCH_FILES_MAX || bytes > BATCH_BYTES_MAX {
        return Err(Error::invalid(format!(
            "a batch of {files} files with {bytes} bytes: 1 to {BATCH_FILES_MAX} files with at most {BATCH_BYTES_MAX} bytes are allowed"
        )));
    }
    Ok(())
}

impl Cx<'_> {
    /// The directory of a batch: its session has the names there, and its user may change them.
    fn names_of_batch(&mut self, dir: InodeId, cred: &Cred) -> Attempt<OwnDir> {
        let names = self.rules.held_names(dir)?;
        Ok(self.dir_to_write(cred, dir)?.for_change(self)?.held(&names))
    }

    /// Where files go that a client creates locally; `None`: it has to ask for each.
    fn policy_of_creates(&self, r: &LeaseNames, access: &Access) -> Option<LayoutPolicy> {
        let rules = self.rules;
        let clocks_apart_ms = r.now.nanos.abs_diff(rules.now.nanos) / 1_000_000;
        let may = access.mode & (NOT_ENUMERATED | HAS_ACL) == 0
            && !rules.quotas.write_floors().contains_key(&access.volume)
            && rules.snapshotting.is_none_or(|(volume, _)| volume != access.volume)
            && !rules.leases.is_held_by_others(rules.session, r.dir)
            && clocks_apart_ms <= CLOCKS_APART_MS_MAX;
        rules.layout_in(access.volume).filter(|_| may)
    }

    /// Whose limits new files of the directory count under; `Account::NONE`: no limit applies to them.
    fn limited_account(&self, r: &LeaseNames, access: &Access) -> Account {
        let (quotas, volume) = (self.rules.quotas, access.volume);
        let gid = access.owned().gid_of_new(r.gid);
        let is_limited = quotas.is_limited(volume) || quotas.owners.concern(volume);
        if is_limited { Account { volume, uid: r.uid, gid } } else { Account::NONE }
    }

    /// One file of a batch: everything except the directory's tally and charge.
    fn create_reported(
        &mut self,
        dir: &mut ParentDir,
        block: &mut NumberBlock,
        cred: &Cred,
        created: &LocalCreate,
    ) -> Result<Charge> {
        check_name(&created.name)?;
        if created.ino < block.next || created.ino >= block.end {
            return Err(Error::invalid(format!(
                "inode number {} for {:?} in directory {}: {} to {} are left",
                created.ino,
                show(&created.name),
                dir.ino(),
                block.next,
                block.end
            )));
        }
        block.next = InodeId(created.ino.0 + 1);
        assert!(block.next <= block.end, "number {} is past the end of its block", created.ino);
        if find_link(self.read(), dir.ino(), &created.name)?.is_some() {
            return Err(Error::exists(format!(
                "{:?} is in directory {} already",
                show(&created.name),
                dir.ino()
            )));
        }
        let inherited = Inherited::of_mode(created.mode);
        let mut inode = dir.new_inode(self, cred, FileKind::Regular, &inherited);
        let at = self.rules.near(created.at);
        (inode.atime, inode.mtime) = (created.atime, created.mtime);
        (inode.ctime, inode.btime) = (self.rules.near(created.ctime), at);
        if block.account != Account::NONE {
            require_account(&inode, block.account, created)?;
        }
        set_owner(&mut inode, cred, created)?;
        inode.layout = Some(Layout { seed: Layout::seed_of(created.ino), ..block.layout });
        self.take_writer(created.ino, &mut inode);
        inode.writing.dirty = !created.clean;
        self.store_content(&mut inode, created)?;
        inode.cookie = dir.names().insert(self, &created.name, created.ino, FileKind::Regular);
        // The directory changed at the client's time, not at the time of this report.
        dir.names().set_mtime(at);
        self.put_inode(created.ino, &inode);
        let (ino, parent, name) = (created.ino, dir.ino(), created.name.clone());
        self.log(parent, || What::Made { ino, kind: FileKind::Regular, parent, name })?;
        if inode.size > 0 {
            self.log(parent, || What::Data { ino, offset: 0, len: inode.size })?;
        }
        if created.open_write == 0 {
            self.log(parent, || What::Complete { ino, size: inode.size })?; // no close follows
        }
        Ok(Charge::file(&inode))
    }

    /// Stores the content as a commit of a small file does.
    fn store_content(&mut self, inode: &mut Inode, created: &LocalCreate) -> Result<()> {
        let Some(content) = &created.content else { return Ok(()) };
        if content.len() > INLINE_MAX {
            return Err(Error::invalid(format!(
                "{} bytes of {:?}: at most {INLINE_MAX} are kept in an inode",
                content.len(),
                show(&created.name)
            )));
        }
        tables::DATA.put_bytes(self.txn, created.ino, content);
        (inode.size, inode.allocated) = (content.len() as u64, content.len() as u64);
        inode.data_version += 1;
        Ok(())
    }
}

/// The numbers were given for files of one account.
fn require_account(inode: &Inode, account: Account, created: &LocalCreate) -> Result<()> {
    let is_of = |uid, gid| (uid, gid) == (account.uid, account.gid);
    if is_of(inode.uid, inode.gid) && is_of(created.uid, created.gid) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{:?} is of user {} and group {}: its number was given for files of user {} and group {}",
        show(&created.name),
        created.uid,
        created.gid,
        account.uid,
        account.gid
    )))
}

/// Sets owner and group: those that `chown` of the user may have set since the create.
fn set_owner(inode: &mut Inode, cred: &Cred, created: &LocalCreate) -> Result<()> {
    let change = Change { uid: Some(created.uid), gid: Some(created.gid), ..Change::default() };
    if inode.owned().check(cred, &change, MayWrite::No).is_err() {
        return Err(Error::name(
            NameRule::NotOwner,
            format!(
                "user {} may not give {:?} to user {} and group {}",
                cred.uid,
                show(&created.name),
                created.uid,
                created.gid
            ),
        ));
    }
    (inode.uid, inode.gid) = (created.uid, created.gid);
    Ok(())
}

impl Rules<'_> {
    /// A time of a client's clock, if that is close enough to this one's.
    fn near(&self, at: Time) -> Time {
        let is_ahead = at.nanos.saturating_sub(self.now.nanos) > AHEAD_NANOS_MAX;
        if is_ahead { self.now } else { at }
    }
}

/// Twice the tolerance at the grant of the names: clocks drift.
const AHEAD_NANOS_MAX: i64 = 2 * CLOCKS_APART_MS_MAX as i64 * 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::PgId;
    use weir_proto::map::Scheme;

    #[test]
    fn the_layout_of_blocks_never_changes() {
        let scheme = Scheme { data: 4, parity: 2 };
        let layout = Layout { scheme, cell_shift: 20, first_pg: PgId(1), pg_count: 2, seed: 0 };
        let account = Account { volume: VolumeId(9), uid: 0x0708, gid: 5 };
        let block = NumberBlock { next: InodeId(0x0102), end: InodeId(0x0103), layout, account };
        let value = block.to_value();
        let numbers = [2, 1, 0, 0, 0, 0, 0, 0, 3, 1, 0, 0, 0, 0, 0, 0];
        let placed = [4, 2, 20, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        let limited = [9, 0, 0, 0, 8, 7, 0, 0, 5, 0, 0, 0];
        assert_eq!(value, [&[2][..], &numbers, &placed, &limited].concat());
        assert_eq!(NumberBlock::from_value(&value, String::new).unwrap(), block);
        let first = [&[1][..], &numbers, &placed].concat();
        let unlimited = NumberBlock { account: Account::NONE, ..block };
        assert_eq!(NumberBlock::from_value(&first, String::new).unwrap(), unlimited);
        for end in 0..value.len() {
            assert!(NumberBlock::from_value(&value[..end], String::new).is_err(), "cut to {end}");
        }
    }
}
