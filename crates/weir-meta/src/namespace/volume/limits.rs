//! Limits of volumes, users and groups as operations meet them, and quota reservations.
use super::super::usage::volume_usage;
use super::super::*;
use super::change::check_quota;
use super::{load_as_admin, load_live, require_superuser};
use crate::allowances::{self, Space};
use crate::limits;
use crate::owner_limits::OwnerRecord;
use crate::quotas::{self, Ask, Quotas};
use weir_proto::quota::{
    ALL_VOLUMES, Account, Holder, ListOf, OWNER_LIMITS_MAX, OwnerKind, OwnerLimit, OwnerUsage,
    OwnerUsageList, OwnerUsagePage, ReserveSpace, ReservedSpace,
};
use weir_proto::volume;

impl Cx<'_> {
    /// The volume if a limit of bytes applies to a file there: its own, its user's or its group's; 0: none
    /// does.
    pub(in crate::namespace) fn limit_over(&self, inode: &Inode) -> Result<VolumeId> {
        let (quotas, floors) = (self.rules.quotas, self.rules.quotas.write_floors());
        if quotas.is_empty() && floors.is_empty() || inode.nlink == 0 {
            return Ok(NO_VOLUME);
        }
        let (volume, uid, gid) = (self.volume_of(inode.parent)?, inode.uid, inode.gid);
        let is_limited = floors.contains_key(&volume) || quotas.limits_account(Account { volume, uid, gid });
        Ok(if is_limited { volume } else { NO_VOLUME })
    }
    /// Fails unless one more file or directory is within the limits.
    pub(in crate::namespace) fn require_inode(&mut self, account: Account) -> Attempt<()> {
        let rules = self.rules;
        if rules.quotas.is_empty() {
            return Ok(());
        }
        self.take_numbers_back(account)?;
        if rules.quotas.is_limited(account.volume) {
            self.require_inode_in(account.volume)?;
        }
        Ok(allowances::check_inodes(self.read(), rules.quotas, account, rules.now)?)
    }
    fn require_inode_in(&mut self, volume: VolumeId) -> Attempt<()> {
        let usage = volume_usage(self.read(), volume)?;
        let checked = self.rules.quotas.check_inodes(volume, &usage, self.rules.now);
        // The trash is emptied first.
        if checked.is_err()
            && let Some(root) = trash::to_empty(self.read(), volume)?
        {
            self.obstacles.push(Obstacle::Full { trash: root });
            self.clear()?;
        }
        Ok(checked?)
    }
    /// Fails unless that many bytes are within the limits.
    pub(in crate::namespace) fn require_bytes(&self, account: Account, bytes: u64) -> Result<()> {
        let (quotas, now) = (self.rules.quotas, self.rules.now);
        if quotas.limits_bytes(account.volume) {
            let used = volume_usage(self.read(), account.volume)?.bytes;
            quotas.check_bytes(account.volume, used, bytes, now)?;
        }
        allowances::check_bytes(self.read(), quotas, account, bytes, now)
    }
    /// A file is about to get another owner or group: its bytes must be within their limits, unless the
    /// superuser decides.
    pub(in crate::namespace) fn require_owner(
        &mut self,
        cred: &Cred,
        ino: InodeId,
        old: &Inode,
        new: &Inode,
    ) -> Attempt<()> {
        let quotas = self.rules.quotas;
        if (old.uid, old.gid) == (new.uid, new.gid) || quotas.owners.is_empty() || old.nlink == 0 {
            return Ok(());
        }
        // A client that has written reports that first, under the limits that it asked for.
        self.rules.leases.own_conflict(self.rules.session, ino, self.obstacles);
        self.clear()?;
        if cred.uid == 0 {
            return Ok(());
        }
        // Only the group changes: its members together may be at their limit.
        let volume = self.volume_of(old.parent)?;
        let (from, to) = ((old.uid, old.gid), (new.uid, new.gid));
        self.take_numbers_back(Account { volume, uid: new.uid, gid: new.gid })?;
        Ok(allowances::check_moved(self.read(), quotas, volume, (from, to), new.online(), self.rules.now)?)
    }
    /// Checks the limits of a directory's new owner; it has no bytes.
    pub(in crate::namespace) fn require_directory_owner(
        &mut self,
        cred: &Cred,
        old: &Access,
        new: &Access,
    ) -> Attempt<()> {
        let (from, to) = ((old.uid, old.gid), (new.uid, new.gid));
        if from == to || self.rules.quotas.owners.is_empty() || cred.uid == 0 {
            return Ok(());
        }
        let around = self.volume_of(old.parent)?;
        self.take_numbers_back(Account { volume: around, uid: new.uid, gid: new.gid })?;
        Ok(allowances::check_moved(self.read(), self.rules.quotas, around, (from, to), 0, self.rules.now)?)
    }
}

/// No volume has this number.
const NO_VOLUME: VolumeId = VolumeId(0);

/// A quota reservation of a client that does not name owners.
pub fn reserve_quota(view: &mut View<'_>, r: &volume::ReserveQuota) -> Result<volume::QuotaReservation> {
    let (session, account) = (r.session, Quotas::account_of_volume(r.volume));
    let named = ReserveSpace { session, account, spent: r.spent, must: r.must, want: r.want };
    let ReservedSpace { held, others, unlimited, evicting, .. } = reserve_space(view, &named)?;
    Ok(volume::QuotaReservation { held, others, unlimited, evicting })
}

/// A quota reservation of a client, under the limits of a volume, a user and a group.
pub fn reserve_space(view: &mut View<'_>, r: &ReserveSpace) -> Result<ReservedSpace> {
    let (quotas, now, account) = (view.rules.quotas, view.rules.now, r.account);
    let of_volume = quotas.bytes_max(account.volume, now).map(|max| -> Result<Space> {
        let others = quotas.granted_in(account.volume, Some((r.session, account)));
        Ok(Space { max, used: volume_usage(view.read, account.volume)?.bytes, others, of: None })
    });
    let of_owner = allowances::tightest(view.read, quotas, account, Some(r.session), now)?;
    let spaces = of_volume.transpose()?.into_iter().chain(of_owner);
    let Some(space) = spaces.min_by_key(Space::free) else {
        // A soft limit may become effective one day: uncommitted bytes are recorded.
        let unlimited = !quotas.limits_account(account);
        let (held, limit) = (r.want, String::new());
        return Ok(ReservedSpace { held, others: 0, unlimited, evicting: false, limit });
    };
    if !(r.spent <= r.must && r.must <= r.want && r.want <= i64::MAX as u64) {
        return Err(Error::invalid(format!("reservation of {} of {} of {} bytes", r.spent, r.must, r.want)));
    }
    let ask = Ask { spent: r.spent, must: r.must, want: r.want };
    let held = quotas::grant(ask, space.used, space.others, space.max);
    // Space for a volume's limit is made by the leader, for a user's by the user.
    let evicting = space.of.is_none()
        && (crate::relation::proof::evicting(view.read)?.contains(&account.volume)
            || trash::to_empty(view.read, account.volume)?.is_some());
    let limit = if held < r.must { shown_limit(view.read, account.volume, &space)? } else { String::new() };
    Ok(ReservedSpace { held, others: space.others, unlimited: false, evicting, limit })
}

fn shown_limit(read: &dyn Read, volume: VolumeId, space: &Space) -> Result<String> {
    let whose = match space.of {
        Some(holder) => holder.shown(&allowances::volume_name(read, holder.volume)?),
        None => format!("volume {:?}", allowances::volume_name(read, volume)?),
    };
    Ok(format!("{whose} has {} bytes of its limit, {}", space.used, space.max))
}

// ---- limits of users and groups

/// Sets or removes the limits of a user or a group.
pub fn set_owner_limit(cx: &mut Cx<'_>, r: &OwnerLimit) -> Attempt<OwnerUsage> {
    let (holder, owners) = (r.holder, &cx.rules.quotas.owners);
    match holder.volume {
        ALL_VOLUMES => require_superuser(&r.cred, "set limits for all volumes")?,
        volume => {
            load_live(cx.read(), volume)?;
            load_as_admin(cx.read(), &r.cred, volume)?;
        }
    }
    let before = owners.record(holder);
    if let Some(quota) = &r.quota {
        check_quota(quota)?;
        if before.quota.is_none() && owners.len() >= OWNER_LIMITS_MAX {
            return Err(Error::no_space(format!(
                "there are {OWNER_LIMITS_MAX} limits of users and groups already"
            ))
            .into());
        }
        cx.revoke_names(holder.volume)?;
        cx.clear()?;
        if limits::limits_bytes(quota) && !before.quota.is_some_and(|q| limits::limits_bytes(&q)) {
            cx.revoke_writers(holder.volume)?;
        }
    }
    cx.put_owner_record(holder, OwnerRecord { quota: r.quota, ..before });
    let row = allowances::row(cx.read(), cx.rules.quotas, holder)?;
    Ok(OwnerUsage { quota: r.quota, own: r.quota.is_some(), ..row })
}

impl Cx<'_> {
    pub fn put_owner_record(&mut self, holder: Holder, record: OwnerRecord) {
        let kept = (record != OwnerRecord::default()).then_some(record);
        match kept {
            Some(record) => tables::OWNER_LIMITS.put(self.txn, holder, &record),
            None => tables::OWNER_LIMITS.delete(self.txn, holder),
        }
        self.events.limits.push((holder, kept));
    }
}

/// Usage and limits of users and groups.
pub fn owner_usage(view: &mut View<'_>, r: &OwnerUsageList) -> Result<OwnerUsagePage> {
    let (read, quotas) = (view.read, view.rules.quotas);
    match r.list {
        ListOf::Volume { volume: ALL_VOLUMES } => require_superuser(&r.cred, "see the usage of all users")?,
        ListOf::Volume { volume } => drop(load_as_admin(read, &r.cred, volume)?),
        ListOf::Owner { kind: OwnerKind::User, id } if ![0, id].contains(&r.cred.uid) => {
            return Err(Error::denied(format!(
                "user {} may not see the usage of user {id} in all volumes",
                r.cred.uid
            ))
            .hint("owners and administrators of a volume see it there, with `weir volume quota`"));
        }
        ListOf::Owner { .. } => {}
    }
    match r.list {
        ListOf::Volume { volume } => allowances::rows_in(read, quotas, volume, r.after, r.limit),
        ListOf::Owner { kind, id } => {
            allowances::rows_of(read, quotas, (kind, id), r.after.map(|after| after.volume), r.limit)
        }
    }
}
