//! Creates, changes and deletes volumes.
use super::super::usage::is_within;
use super::super::*;
use super::show::shown;
use super::{check_free, load_live, require_admin, require_superuser};
use crate::keys::Sequence;
use crate::limits;
use crate::namespace::dir_names::DirNames;
use crate::record::VolumeRecord;
use crate::tables::next_number;
use weir_proto::map::Scheme;
use weir_proto::meta::Mkdir;
use weir_proto::volume::{
    ADMINS_MAX, Quota, Retention, SetWriteFloor, VOLUME_PATH_MAX, Volume, VolumeChange, VolumeCreate,
    VolumeDelete,
};

/// Members of the widest placement group.
const MEMBERS_MAX: u8 = Scheme::DATA_MAX + Scheme::PARITY_MAX;

fn check_admins(admins: &[u32]) -> Result<()> {
    match admins.len() {
        0..=ADMINS_MAX => Ok(()),
        n => Err(Error::invalid(format!("{n} administrators: a volume has at most {ADMINS_MAX}"))),
    }
}

pub(super) fn check_quota(quota: &Quota) -> Result<()> {
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
            return Err(Error::invalid(format!("a limit of {much} {what} is too large")));
        }
    }
    Ok(())
}

pub fn create(cx: &mut Cx<'_>, r: &VolumeCreate) -> Attempt<Volume> {
    require_superuser(&r.cred, "make a volume")?;
    check_free(cx.read(), &r.name)?;
    check_admins(&r.admins)?;
    check_quota(&r.quota)?;
    if r.path.len() > VOLUME_PATH_MAX {
        return Err(Error::invalid(format!("a path of {} bytes", r.path.len())).into());
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
        write_floor: 0,
    };
    cx.put_volume(id, &record);
    tables::VOLUME_NAMES.put(cx.txn, r.name.as_bytes(), &id);
    Ok(shown(cx.read(), id, record)?)
}

impl Cx<'_> {
    fn make_root_directory(&mut self, r: &VolumeCreate) -> Attempt<InodeId> {
        let (op, cred, name) = (r.op.clone(), r.cred.clone(), r.entry.clone());
        let mkdir = Mkdir { op, cred, parent: r.parent, name, mode: r.mode & 0o7777, umask: 0 };
        create::mkdir(self, &mkdir).map(|made| made.entry.attr.ino)
    }
}

pub fn change(cx: &mut Cx<'_>, r: &VolumeChange) -> Attempt<Volume> {
    let mut record = load_live(cx.read(), r.volume)?;
    require_admin(&r.cred, &record)?;
    if r.volume == VolumeId::ROOT && r.name.as_ref().is_some_and(|name| *name != record.name) {
        return Err(Error::invalid("the root volume has the namespace's files: it keeps its name").into());
    }
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
        if limits::limits_bytes(&quota) && !limits::limits_bytes(&record.quota) {
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
        tables::VOLUME_NAMES.delete(cx.txn, record.name.as_bytes());
        tables::VOLUME_NAMES.put(cx.txn, name.as_bytes(), &r.volume);
        record.name.clone_from(name);
    }
    cx.put_volume(r.volume, &record);
    Ok(shown(cx.read(), r.volume, record)?)
}

/// Its writers learn of it with their next lease, as of a limit.
pub fn set_write_floor(cx: &mut Cx<'_>, r: &SetWriteFloor) -> Attempt<Volume> {
    let mut record = load_live(cx.read(), r.volume)?;
    require_admin(&r.cred, &record)?;
    if r.members > MEMBERS_MAX {
        return Err(Error::invalid(format!(
            "a write floor of {} members: a placement group has at most {MEMBERS_MAX}",
            r.members
        ))
        .into());
    }
    if record.write_floor == 0 && r.members > 0 {
        cx.revoke_names(r.volume)?;
        cx.clear()?;
        cx.revoke_writers(r.volume)?;
    }
    record.write_floor = r.members;
    cx.put_volume(r.volume, &record);
    Ok(shown(cx.read(), r.volume, record)?)
}

pub fn delete(cx: &mut Cx<'_>, r: &VolumeDelete) -> Attempt<Volume> {
    require_superuser(&r.cred, "delete a volume")?;
    let mut record = load_live(cx.read(), r.volume)?;
    if r.volume == VolumeId::ROOT {
        return Err(Error::invalid("the root volume is the namespace itself: it cannot be deleted").into());
    }
    let inside = volume_inside(cx.read(), r.volume, record.root)?;
    if let Some(inside) = inside {
        return Err(Error::name(
            NameRule::NotEmpty,
            format!("volume {inside:?} lies in volume {:?}: delete that first", record.name),
        )
        .into());
    }
    if snapshot::has_any(cx.read(), r.volume, r.force)? {
        return Err(Error::name(
            NameRule::Busy,
            format!("volume {:?} has snapshots: delete these first", record.name),
        )
        .into());
    }
    let related = crate::relation::store::relations(cx.read())?;
    if related.iter().any(|(_, relation)| relation.volume == r.volume) {
        return Err(Error::name(
            NameRule::Busy,
            format!("volume {:?} has a relation with home: remove that first", record.name),
        )
        .into());
    }
    if let Some(clone) = clone::made_from(cx.read(), r.volume)? {
        let why = format!(
            "volume {clone} is made from volume {:?}, and not all of its names are known yet",
            record.name
        );
        return Err(Error::name(NameRule::Busy, why).into());
    }
    snapshot::delete_scheduled(cx, r.volume)?;
    let access = load_access(cx.read(), record.root)?;
    cx.need(access.parent, Need::Change);
    cx.need(record.root, Need::Change);
    cx.clear()?;
    let trash = trash::of(cx.read(), r.volume)?;
    let is_clone = clone::find(cx.read(), r.volume)?.is_some();
    let is_empty = load_tally(cx.read(), record.root)?.entries == 0 && trash.is_none() && !is_clone;
    if !r.force {
        require_listed(cx.obstacles, record.root, &load_access(cx.read(), record.root)?)?;
    }
    if !r.force && !trash::is_all(cx.read(), r.volume, record.root)? {
        super::super::remove::require_empty(cx.read(), record.root)?;
    }
    let link = load_link(cx.read(), access.parent, &record.entry)?;
    let mut names = DirNames::load(cx.read(), access.parent)?;
    names.remove(cx, &record.entry, &link);
    names.store(cx);
    tables::VOLUME_NAMES.delete(cx.txn, record.name.as_bytes());
    if is_empty {
        cx.destroy_directory(access.parent, record.root)?;
        cx.forget_volume(r.volume)?;
    } else {
        record.deleting = true;
        cx.put_volume(r.volume, &record);
        cx.detach(record.root, access)?;
    }
    Ok(shown(cx.read(), r.volume, record)?)
}

impl Cx<'_> {
    /// A topmost directory without a name is charged to the root until it is empty: its former parent may be
    /// removed.
    fn detach(&mut self, root: InodeId, access: Access) -> Result<()> {
        let all = Charge::directory(&usage_of(self.read(), root)?);
        self.charge_below_root(access.parent, all.back())?;
        let itself = Charge { directories: -1, ..Charge::default() };
        let around = self.volume_of(access.parent)?;
        self.charge_volume(around, itself);
        self.put_access(root, &Access { parent: InodeId::ROOT, ..access });
        Ok(())
    }
}

/// The name of a volume whose topmost directory lies below `dir`.
fn volume_inside(read: &dyn Read, outer: VolumeId, dir: InodeId) -> Result<Option<String>> {
    let others = tables::VOLUMES.all().collect(read, usize::MAX, |id, record| (id, record))?;
    for (id, record) in others {
        let is_other = id != outer && record.root != InodeId::ROOT && !record.deleting;
        if is_other && is_within(read, record.root, dir)? {
            return Ok(Some(record.name));
        }
    }
    Ok(None)
}
