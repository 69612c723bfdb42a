//! Volumes: named subtrees with an owner, limits and a policy.
//!
//! Invariants: every directory's record names its volume, given at its creation, and no name leads from one
//! volume into another except that of a volume's topmost directory. That directory is deleted only with its
//! volume. The volume of a file is that of the directory it is charged to.
//!
//! Knows nothing of relations and of how limits are enforced.
use super::create::next_number;
use super::usage::{is_within, volume_usage};
use super::*;
use crate::keys::Sequence;
use crate::quotas::{self, Ask, Over, Quotas};
use crate::record::{Listed, NEVER_NAMED, VolumeRecord};
use bytes::Bytes;
use weir_kv::Scan;
use weir_proto::meta::{LeaseKind, Mkdir};
use weir_proto::volume::{self, ADMINS_MAX, Policy, Quota, Retention, VOLUME_PATH_MAX, VOLUMES_MAX};
use weir_proto::volume::{Volume, VolumePage, check_volume_name};

/// The name of the volume that contains everything outside of other volumes.
const ROOT_NAME: &str = "root";

/// The volume that contains everything at first.
pub fn make_root(txn: &mut dyn Txn, now: Time) {
    let record = VolumeRecord {
        name: ROOT_NAME.to_owned(),
        root: InodeId::ROOT,
        entry: Bytes::new(),
        path: Bytes::from_static(b"/"),
        owner: 0,
        admins: Vec::new(),
        quota: Quota::NONE,
        bytes_over_since: None,
        inodes_over_since: None,
        policy: Policy { scheme: None, pool: None },
        created: now,
        deleting: false,
        retention: Retention::NOTHING,
    };
    txn.put(&keys::volume(VolumeId::ROOT), &record.to_value());
    txn.put(&keys::volume_name(ROOT_NAME), &VolumeId::ROOT.0.to_le_bytes());
    txn.max(&keys::sequence(Sequence::Volume), u64::from(VolumeId::ROOT.0) + 1);
}

// ---- what other operations ask

impl Cx<'_> {
    /// The volume of a directory.
    pub fn volume_of(&self, dir: InodeId) -> Result<VolumeId> {
        volume_of(self.read(), dir)
    }

    /// A directory got another name, or another parent: if it is a volume's topmost one, the volume's record
    /// follows.
    pub(super) fn note_root_moved(&mut self, dir: InodeId, to: (InodeId, &[u8]), same: bool) -> Result<()> {
        let volume = self.volume_of(dir)?;
        if volume == self.volume_of(to.0)? {
            return Ok(());
        }
        let mut record = load(self.read(), volume)?;
        record.entry = Bytes::copy_from_slice(to.1);
        record.path = moved_path(&record.path, to.1, same);
        self.put_volume(volume, &record);
        Ok(())
    }

    fn put_volume(&mut self, id: VolumeId, record: &VolumeRecord) {
        self.txn.put(&keys::volume(id), &record.to_value());
        self.events.volumes.push((id, Some(record.clone())));
    }

    /// The volume whose limit of bytes applies to a file; 0: none does.
    pub(super) fn limit_over(&self, inode: &Inode) -> Result<VolumeId> {
        if self.rules.quotas.is_empty() || inode.nlink == 0 {
            return Ok(NO_VOLUME);
        }
        let volume = self.volume_of(inode.parent)?;
        Ok(if self.rules.quotas.limits_bytes(volume) { volume } else { NO_VOLUME })
    }
    /// Fails unless one more file or directory is within the limit.
    pub(super) fn require_inode(&mut self, volume: VolumeId) -> Result<()> {
        if !self.rules.quotas.is_limited(volume) {
            return Ok(());
        }
        let usage = volume_usage(self.read(), volume)?;
        let checked = self.rules.quotas.check_inodes(volume, &usage, self.rules.now);
        // The trash is emptied first.
        if checked.is_err()
            && let Some(root) = trash::to_empty(self.read(), volume)?
        {
            self.conflicts.push(Conflict::full(root));
            self.clear()?;
        }
        checked
    }
    /// Fails unless that many bytes are within the volume's limit.
    pub(super) fn require_bytes(&self, volume: VolumeId, bytes: u64) -> Result<()> {
        if !self.rules.quotas.limits_bytes(volume) {
            return Ok(());
        }
        let used = volume_usage(self.read(), volume)?.bytes;
        self.rules.quotas.check_bytes(volume, used, bytes, self.rules.now)
    }
}

/// No volume has this number.
const NO_VOLUME: VolumeId = VolumeId(0);

/// A quota reservation of a client.
pub fn reserve_quota(view: &mut View<'_>, r: &volume::ReserveQuota) -> Result<volume::QuotaReservation> {
    let quotas = view.rules.quotas;
    let Some(max) = quotas.bytes_max(r.volume, view.rules.now) else {
        // A soft limit may become effective one day: uncommitted bytes are recorded.
        let unlimited = !quotas.limits_bytes(r.volume);
        return Ok(volume::QuotaReservation { held: r.want, others: 0, unlimited, evicting: false });
    };
    if !(r.spent <= r.must && r.must <= r.want && r.want <= i64::MAX as u64) {
        return Err(Error::invalid(format!("reservation of {} of {} of {} bytes", r.spent, r.must, r.want)));
    }
    let others = quotas.granted(r.volume, Some(r.session));
    let used = volume_usage(view.read, r.volume)?.bytes;
    let ask = Ask { spent: r.spent, must: r.must, want: r.want };
    let evicting = crate::relation::evicting(view.read)?.contains(&r.volume)
        || trash::to_empty(view.read, r.volume)?.is_some();
    Ok(volume::QuotaReservation {
        held: quotas::grant(ask, used, others, max),
        others,
        unlimited: false,
        evicting,
    })
}

/// Records since when a volume is over its soft limits.
pub fn note_over(cx: &mut Cx<'_>, id: VolumeId, over: Over) -> Result<()> {
    let mut record = load(cx.read(), id)?;
    (record.bytes_over_since, record.inodes_over_since) = (over.bytes_since, over.inodes_since);
    cx.put_volume(id, &record);
    Ok(())
}

/// All volumes that have a limit.
pub fn load_quotas(read: &dyn Read) -> Result<Quotas> {
    let (mut quotas, mut bad) = (Quotas::default(), None);
    let (start, end) = keys::range_of_letter(b'v');
    read.scan(&start, &end, &mut |key, value| {
        match VolumeRecord::from_value(value, || "a volume".to_owned()) {
            Ok(record) => quotas.note(id_of(key), Some(&record)),
            Err(e) => bad = Some(e),
        }
        if bad.is_none() { Scan::More } else { Scan::Stop }
    })?;
    bad.map_or(Ok(quotas), Err)
}

/// The volume of a directory. The same for an inode that may not be a directory any more.
pub fn find_volume_of(read: &dyn Read, dir: InodeId) -> Result<Option<VolumeId>> {
    Ok(find_access(read, dir)?.map(|access| access.volume))
}
/// The parent of a directory.
pub fn find_parent(read: &dyn Read, dir: InodeId) -> Result<Option<InodeId>> {
    Ok(find_access(read, dir)?.map(|access| access.parent))
}
pub fn volume_of(read: &dyn Read, dir: InodeId) -> Result<VolumeId> {
    if dir == InodeId::ROOT {
        return Ok(VolumeId::ROOT);
    }
    load_access(read, dir).map(|access| access.volume)
}

/// No name leads from one volume into another.
pub(super) fn require_same(from: VolumeId, to: VolumeId) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::name(
        NameRule::CrossVolume,
        format!("from volume {from} into volume {to}: only a copy goes from one volume into another"),
    ))
}

/// A volume's topmost directory is deleted only with its volume.
pub(super) fn require_no_root(read: &dyn Read, around: VolumeId, dir: InodeId) -> Result<()> {
    let volume = volume_of(read, dir)?;
    if volume == around {
        return Ok(());
    }
    let name = load(read, volume)?.name;
    Err(Error::name(
        NameRule::Busy,
        format!("directory {dir} is volume {name:?}: `weir volume delete {name}` removes it"),
    ))
}

/// The volume in a key made by [`keys::volume`].
pub(super) fn id_of(key: &[u8]) -> VolumeId {
    VolumeId(key.get(1..5).and_then(|k| k.try_into().ok()).map_or(0, u32::from_be_bytes))
}

/// Its name for administrators; its number if the volume is deleted.
pub fn shown_name(kv: &weir_kv::SharedKv, volume: VolumeId) -> String {
    let mut name = volume.to_string();
    let read = kv.read(&mut |read| {
        name = load(read, volume)?.name;
        Ok(())
    });
    let _: Result<_> = read; // it was deleted meanwhile
    name
}

pub fn find(read: &dyn Read, id: VolumeId) -> Result<Option<VolumeRecord>> {
    let value = read.get(&keys::volume(id))?;
    value.map(|v| VolumeRecord::from_value(&v, || format!("volume {id}"))).transpose()
}
pub fn load(read: &dyn Read, id: VolumeId) -> Result<VolumeRecord> {
    find(read, id)?.ok_or_else(|| Error::not_found(format!("volume {id} does not exist (any more)")))
}
fn find_name(read: &dyn Read, name: &str) -> Result<Option<VolumeId>> {
    let Some(value) = read.get(&keys::volume_name(name))? else { return Ok(None) };
    let number = <[u8; 4]>::try_from(value)
        .map_err(|_| Error::damaged(format!("the record of the volume name {name:?} is damaged")))?;
    Ok(Some(VolumeId(u32::from_le_bytes(number))))
}

/// Its last component is now `name`; `same`: in the same directory, whose path is known.
fn moved_path(path: &[u8], name: &[u8], same: bool) -> Bytes {
    let above = path.iter().rposition(|b| *b == b'/').filter(|_| same).map(|at| &path[..at]);
    let path = [above.unwrap_or(b"..."), b"/", name].concat();
    if path.len() > VOLUME_PATH_MAX { Bytes::copy_from_slice(name) } else { Bytes::from(path) }
}

// ---- showing

fn shown(read: &dyn Read, id: VolumeId, record: VolumeRecord) -> Result<Volume> {
    let (usage, in_trash) = (volume_usage(read, id)?, trash::usage(read, id)?);
    Ok(record.show(id, usage, in_trash))
}

pub fn get(view: &mut View<'_>, name: &str) -> Result<Volume> {
    let id = find_name(view.read, name)?
        .ok_or_else(|| Error::not_found(format!("there is no volume {name:?}")))?;
    shown(view.read, id, load(view.read, id)?)
}

pub fn at(view: &mut View<'_>, ino: InodeId) -> Result<Volume> {
    let dir = match find_inode(view.read, ino)? {
        // It is not charged yet.
        Some(inode) if inode.parent == NEVER_NAMED => InodeId::ROOT,
        Some(inode) => inode.parent,
        None => ino,
    };
    let id = volume_of(view.read, dir)?;
    shown(view.read, id, load(view.read, id)?)
}

pub fn list(view: &mut View<'_>, r: &volume::VolumeList) -> Result<VolumePage> {
    let limit = (r.limit as usize).clamp(1, VOLUMES_MAX);
    let Some(first) = r.after.0.checked_add(1) else {
        return Ok(VolumePage { volumes: Vec::new(), end: true });
    };
    let (mut records, mut end, mut bad) = (Vec::new(), true, None);
    let mut bytes = 0;
    view.read.scan(&keys::volume(VolumeId(first)), &keys::range_of_letter(b'v').1, &mut |key, value| {
        if records.len() == limit || bytes > PAGE_BYTES_MAX {
            end = false;
            return Scan::Stop;
        }
        match VolumeRecord::from_value(value, || "a volume".to_owned()) {
            Ok(record) => records.push((id_of(key), record)),
            Err(e) => bad = Some(e),
        }
        bytes += SHOWN_BYTES + value.len();
        if bad.is_none() { Scan::More } else { Scan::Stop }
    })?;
    if let Some(e) = bad {
        return Err(e);
    }
    let volumes = records.into_iter().map(|(id, record)| shown(view.read, id, record));
    Ok(VolumePage { volumes: volumes.collect::<Result<_>>()?, end })
}

/// Half of what a message body may have.
const PAGE_BYTES_MAX: usize = 512 * 1024;
/// A volume as shown, without the fields of its record.
const SHOWN_BYTES: usize = 32;

// ---- changing

fn require_superuser(cred: &Cred, doing: &str) -> Result<()> {
    if cred.uid == 0 {
        return Ok(());
    }
    Err(Error::denied(format!("user {} may not {doing}: only the superuser may", cred.uid)))
}
/// A volume that `cred` owns or administers.
pub fn load_as_admin(read: &dyn Read, cred: &Cred, id: VolumeId) -> Result<VolumeRecord> {
    let record = load(read, id)?;
    require_admin(cred, &record)?;
    Ok(record)
}
fn require_admin(cred: &Cred, record: &VolumeRecord) -> Result<()> {
    if cred.uid == 0 || cred.uid == record.owner || record.admins.contains(&cred.uid) {
        return Ok(());
    }
    Err(Error::denied(format!(
        "user {} neither owns nor administers volume {:?}: user {} does",
        cred.uid, record.name, record.owner
    )))
}

fn check_free(read: &dyn Read, name: &str) -> Result<()> {
    check_volume_name(name)?;
    match find_name(read, name)? {
        None => Ok(()),
        Some(_) => Err(Error::exists(format!("there is a volume {name:?} already"))),
    }
}
fn check_admins(admins: &[u32]) -> Result<()> {
    match admins.len() {
        0..=ADMINS_MAX => Ok(()),
        n => Err(Error::invalid(format!("{n} administrators: a volume has at most {ADMINS_MAX}"))),
    }
}
fn check_quota(quota: &Quota) -> Result<()> {
    for (what, soft, hard) in
        [("bytes", quota.bytes_soft, quota.bytes_hard), ("inodes", quota.inodes_soft, quota.inodes_hard)]
    {
        if let (Some(soft), Some(hard)) = (soft, hard)
            && soft > hard
        {
            return Err(Error::invalid(format!(
                "a soft limit of {soft} {what} is above the hard one, {hard}"
            )));
        }
        if let Some(much) = soft.max(hard).filter(|much| *much > i64::MAX as u64) {
            return Err(Error::invalid(format!("a limit of {much} {what} is no limit")));
        }
    }
    Ok(())
}

pub fn create(cx: &mut Cx<'_>, r: &volume::VolumeCreate) -> Result<Volume> {
    require_superuser(&r.cred, "make a volume")?;
    check_free(cx.read(), &r.name)?;
    check_admins(&r.admins)?;
    check_quota(&r.quota)?;
    if r.path.len() > VOLUME_PATH_MAX {
        return Err(Error::invalid(format!("a path of {} bytes", r.path.len())));
    }
    let around = cx.volume_of(r.parent)?;
    load_live(cx.read(), around)?;
    let root = cx.make_root_directory(r)?;
    let id = VolumeId(
        u32::try_from(next_number(cx.txn, Sequence::Volume)?)
            .map_err(|_| Error::no_space("all numbers of volumes have been given"))?,
    );
    let mut access = load_access(cx.read(), root)?;
    (access.volume, access.uid, access.gid) = (id, r.owner, r.group);
    cx.put_access(root, &access);
    let record = VolumeRecord {
        name: r.name.clone(),
        root,
        entry: r.entry.clone(),
        path: r.path.clone(),
        owner: r.owner,
        admins: r.admins.clone(),
        quota: r.quota,
        bytes_over_since: None,
        inodes_over_since: None,
        policy: r.policy.clone(),
        created: cx.rules.now,
        deleting: false,
        retention: Retention::NOTHING,
    };
    cx.put_volume(id, &record);
    cx.txn.put(&keys::volume_name(&r.name), &id.0.to_le_bytes());
    shown(cx.read(), id, record)
}

impl Cx<'_> {
    fn make_root_directory(&mut self, r: &volume::VolumeCreate) -> Result<InodeId> {
        let (op, cred, name) = (r.op.clone(), r.cred.clone(), r.entry.clone());
        let mkdir = Mkdir { op, cred, parent: r.parent, name, mode: r.mode & 0o7777, umask: 0 };
        super::create::mkdir(self, &mkdir).map(|made| made.entry.attr.ino)
    }
}

pub fn change(cx: &mut Cx<'_>, r: &volume::VolumeChange) -> Result<Volume> {
    let mut record = load_live(cx.read(), r.volume)?;
    require_admin(&r.cred, &record)?;
    if let Some(owner) = r.owner.filter(|owner| *owner != record.owner) {
        require_superuser(&r.cred, "give a volume to another owner")?;
        record.owner = owner;
    }
    if let Some(admins) = &r.admins {
        check_admins(admins)?;
        record.admins.clone_from(admins);
    }
    if let Some(quota) = r.quota {
        check_quota(&quota)?;
        cx.revoke_names(r.volume)?;
        cx.clear()?;
        if (quota.bytes_hard, quota.inodes_hard) != (record.quota.bytes_hard, record.quota.inodes_hard) {
            require_superuser(&r.cred, "set a volume's hard limits")?;
        }
        if quotas::limits_bytes(&quota) && !quotas::limits_bytes(&record.quota) {
            cx.revoke_writers(r.volume)?;
        }
        record.quota = quota;
    }
    if let Some(policy) = &r.policy {
        record.policy = policy.clone();
    }
    if let Some(retention) = r.retention {
        retention.check()?;
        if retention.trash_s > 0 {
            trash::begin(cx, r.volume, record.root)?;
        }
        record.retention = retention;
    }
    if let Some(name) = r.name.as_ref().filter(|name| **name != record.name) {
        check_free(cx.read(), name)?;
        cx.txn.delete(&keys::volume_name(&record.name));
        cx.txn.put(&keys::volume_name(name), &r.volume.0.to_le_bytes());
        record.name.clone_from(name);
    }
    cx.put_volume(r.volume, &record);
    shown(cx.read(), r.volume, record)
}

impl Cx<'_> {
    /// Clients that create files there locally report them, and ask for each one from now on.
    pub(super) fn revoke_names(&mut self, volume: VolumeId) -> Result<()> {
        for (session, dir) in self.rules.leases.held_names() {
            if load_access(self.read(), dir)?.volume == volume {
                self.conflicts.push(Conflict { ino: dir, session, keep: LeaseKind::Read, ask: true });
            }
        }
        Ok(())
    }
    /// A client that writes a file of the volume learns of the new limit with the next lease.
    fn revoke_writers(&mut self, volume: VolumeId) -> Result<()> {
        for (session, ino) in self.rules.leases.writers() {
            let inode = find_inode(self.read(), ino)?;
            if let Some(inode) = inode.filter(|inode| inode.nlink > 0)
                && self.volume_of(inode.parent)? == volume
            {
                self.conflicts.push(Conflict { ino, session, keep: LeaseKind::Read, ask: true });
            }
        }
        self.clear()
    }
}

pub(super) fn load_live(read: &dyn Read, id: VolumeId) -> Result<VolumeRecord> {
    let record = load(read, id)?;
    if record.deleting {
        return Err(Error::not_found(format!("volume {:?} is being removed", record.name)));
    }
    Ok(record)
}

pub fn delete(cx: &mut Cx<'_>, r: &volume::VolumeDelete) -> Result<Volume> {
    require_superuser(&r.cred, "delete a volume")?;
    let mut record = load_live(cx.read(), r.volume)?;
    if r.volume == VolumeId::ROOT {
        return Err(Error::invalid("the root volume is the namespace itself: it cannot be deleted"));
    }
    let inside = volume_inside(cx.read(), r.volume, record.root)?;
    if let Some(inside) = inside {
        return Err(Error::name(
            NameRule::NotEmpty,
            format!("volume {inside:?} lies in volume {:?}: delete that first", record.name),
        ));
    }
    if super::snapshot::has_any(cx.read(), r.volume, r.force)? {
        return Err(Error::name(
            NameRule::Busy,
            format!("volume {:?} has snapshots: delete these first", record.name),
        ));
    }
    let related = crate::relation::store::relations(cx.read())?;
    if related.iter().any(|(_, relation)| relation.volume == r.volume) {
        return Err(Error::name(
            NameRule::Busy,
            format!("volume {:?} has a relation with home: remove that first", record.name),
        ));
    }
    if let Some(clone) = clone::made_from(cx.read(), r.volume)? {
        let why = format!(
            "volume {clone} is made from volume {:?}, and not all of its names are known yet",
            record.name
        );
        return Err(Error::name(NameRule::Busy, why));
    }
    super::snapshot::delete_scheduled(cx, r.volume)?;
    let access = load_access(cx.read(), record.root)?;
    cx.need(access.parent, Need::Change);
    cx.need(record.root, Need::Change);
    cx.clear()?;
    let trash = trash::of(cx.read(), r.volume)?;
    let is_clone = clone::find(cx.read(), r.volume)?.is_some();
    let is_empty = load_tally(cx.read(), record.root)?.entries == 0 && trash.is_none() && !is_clone;
    if !r.force {
        require_listed(cx.conflicts, record.root, &load_access(cx.read(), record.root)?)?;
    }
    if !r.force && !trash::is_all(cx.read(), r.volume, record.root)? {
        super::remove::require_empty(cx.read(), record.root)?;
    }
    let link = load_link(cx.read(), access.parent, &record.entry)?;
    let mut tally = load_tally(cx.read(), access.parent)?;
    cx.remove_name(access.parent, &mut tally, &record.entry, &link);
    cx.put_tally(access.parent, &tally);
    cx.txn.delete(&keys::volume_name(&record.name));
    if is_empty {
        cx.destroy_directory(access.parent, record.root)?;
        cx.forget_volume(r.volume)?;
    } else {
        record.deleting = true;
        cx.put_volume(r.volume, &record);
        cx.put_aside(record.root, access)?;
    }
    shown(cx.read(), r.volume, record)
}

/// Names that one step of a removal removes.
const REMOVED_AT_ONCE: usize = 128;

/// A volume that is to be removed.
pub fn next_deleted(read: &dyn Read) -> Result<Option<VolumeId>> {
    let mut found = None;
    let (start, end) = keys::range_of_letter(b'v');
    read.scan(&start, &end, &mut |key, value| {
        let deleting = VolumeRecord::from_value(value, String::new).is_ok_and(|record| record.deleting);
        found = deleting.then(|| id_of(key));
        if deleting { Scan::Stop } else { Scan::More }
    })?;
    Ok(found)
}

/// Removes a few names of a deleted volume, deepest first. True: it has none left.
pub fn remove_some(cx: &mut Cx<'_>, id: VolumeId) -> Result<bool> {
    let root = load(cx.read(), id)?.root;
    if !remove_below(cx, id, root, &nothing_more)?
        || !trash::forget_some(cx, id)?
        || !clone::forget_some(cx, id)?
    {
        return Ok(false);
    }
    cx.need(root, Need::Change);
    cx.clear()?;
    cx.destroy_directory(InodeId::ROOT, root)?;
    cx.forget_volume(id)?;
    Ok(true)
}

/// Drops further records of a removed name: its directory, the name, its inode.
pub(super) type Gone = dyn Fn(&mut Cx<'_>, InodeId, &[u8], InodeId) -> Result<()>;

/// Removes a few names below a directory, deepest first, and calls `gone` for each. True: none are left
/// except of other volumes.
pub(super) fn remove_below(cx: &mut Cx<'_>, of: VolumeId, top: InodeId, gone: &Gone) -> Result<bool> {
    let mut dir = top;
    loop {
        let found = first_names(cx.read(), dir)?;
        let (mut full, mut any) = (None, false);
        for (link, name) in found {
            if link.kind == FileKind::Directory {
                if volume_of(cx.read(), link.ino)? != of {
                    continue;
                }
                if load_tally(cx.read(), link.ino)?.entries > 0 {
                    full = full.or(Some(link.ino));
                    continue;
                }
            }
            cx.need(dir, Need::Change);
            cx.need(link.ino, Need::Change);
            cx.clear()?;
            match link.kind {
                FileKind::Directory => cx.remove_directory(dir, &name, &link)?,
                _ => cx.remove_file(dir, &name, &link)?,
            }
            gone(cx, dir, &name, link.ino)?;
            any = true;
        }
        match full {
            _ if any => return Ok(false),
            Some(below) => dir = below,
            None => return Ok(true),
        }
    }
}

/// No further records have to be dropped.
pub(super) fn nothing_more(_: &mut Cx<'_>, _: InodeId, _: &[u8], _: InodeId) -> Result<()> {
    Ok(())
}

fn first_names(read: &dyn Read, dir: InodeId) -> Result<Vec<(Link, Bytes)>> {
    let (mut found, mut bad) = (Vec::new(), None);
    let (start, end) = keys::range_of(b'K', dir.0);
    read.scan(&start, &end, &mut |key, value| {
        match Listed::from_value(value, || format!("an entry of directory {dir}")) {
            Ok(Listed { ino, kind, name }) => {
                let cookie = keys::cookie_of(key).unwrap_or(u64::MAX);
                found.push((Link { ino, kind, cookie }, name));
            }
            Err(e) => bad = Some(e),
        }
        if found.len() < REMOVED_AT_ONCE && bad.is_none() { Scan::More } else { Scan::Stop }
    })?;
    bad.map_or(Ok(found), Err)
}

impl Cx<'_> {
    /// A topmost directory without a name is charged to the root until it is empty: its former parent may be
    /// removed.
    fn put_aside(&mut self, root: InodeId, access: Access) -> Result<()> {
        let all = Charge::directory(&super::usage_of(self.read(), root)?);
        self.charge_below_root(access.parent, all.back())?;
        let itself = Charge { directories: -1, ..Charge::default() };
        let around = self.volume_of(access.parent)?;
        self.charge_volume(around, itself);
        self.put_access(root, &Access { parent: InodeId::ROOT, ..access });
        Ok(())
    }
    fn forget_volume(&mut self, id: VolumeId) -> Result<()> {
        self.txn.delete(&keys::volume(id));
        crate::backup::forget_volume(self.txn, id)?;
        self.events.volumes.push((id, None));
        let start = [&b"Q"[..], &id.0.to_be_bytes()].concat();
        let end = keys::after(&start);
        self.delete_range((start, end))
    }
}

/// The name of a volume whose topmost directory lies below `dir`.
fn volume_inside(read: &dyn Read, outer: VolumeId, dir: InodeId) -> Result<Option<String>> {
    let mut others = Vec::new();
    let (start, end) = keys::range_of_letter(b'v');
    read.scan(&start, &end, &mut |key, value| {
        if key != keys::volume(outer)
            && let Ok(record) = VolumeRecord::from_value(value, String::new)
            && record.root != InodeId::ROOT
            && !record.deleting
        {
            others.push((record.root, record.name));
        }
        Scan::More
    })?;
    for (root, name) in others {
        if is_within(read, root, dir)? {
            return Ok(Some(name));
        }
    }
    Ok(None)
}
