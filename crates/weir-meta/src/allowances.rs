//! Limits of users and groups, compared with what they use: for a new file, for new bytes, for reports.
//!
//! Knows nothing of sessions' leases and of how a client waits for space.
use crate::owner_limits::OwnerRecord;
use crate::owners::{self, Used};
use crate::quotas::Quotas;
use crate::table::All;
use crate::tables;
use weir_kv::Read;
use weir_proto::meta::Time;
use weir_proto::quota::{
    ALL_VOLUMES, Account, Holder, OWNER_ROWS_MAX, OwnerKind, OwnerUsage, OwnerUsagePage,
};
use weir_proto::{Error, Result, SessionId, VolumeId};

/// The space under one limit of bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Space {
    pub max: u64,
    pub used: u64,
    /// Reservations of others.
    pub others: u64,
    /// Whose limit it is; `None`: the volume's.
    pub of: Option<Holder>,
}

impl Space {
    pub fn free(&self) -> u64 {
        self.max.saturating_sub(self.used).saturating_sub(self.others)
    }
}

/// The user's or group's limit with the least space left. `me`: the session that asks.
pub fn tightest(
    read: &dyn Read,
    quotas: &Quotas,
    account: Account,
    me: Option<SessionId>,
    now: Time,
) -> Result<Option<Space>> {
    let mut tightest: Option<Space> = None;
    for (holder, limit) in quotas.owners.of(account) {
        let Some(max) = limit.bytes_max(now) else { continue };
        let others = quotas.granted_to(holder, me.map(|session| (session, account)));
        let space = Space { max, used: bytes(owners::used(read, holder)?), others, of: Some(holder) };
        if tightest.as_ref().is_none_or(|tight| space.free() < tight.free()) {
            tightest = Some(space);
        }
    }
    Ok(tightest)
}

/// Refuses bytes that are charged to a user and a group at once.
pub fn check_bytes(read: &dyn Read, quotas: &Quotas, account: Account, more: u64, now: Time) -> Result<()> {
    match tightest(read, quotas, account, None, now)? {
        Some(space) if more > space.free() => {
            let (of, taken) = (space.of.expect("an owner's"), space.used.saturating_add(space.others));
            Err(Error::over_quota(format!(
                "{} has {taken} bytes of its limit, {}: {more} more do not fit",
                of.shown(&volume_name(read, of.volume)?),
                space.max
            )))
        }
        _ => Ok(()),
    }
}

/// Refuses one more file or directory.
pub fn check_inodes(read: &dyn Read, quotas: &Quotas, account: Account, now: Time) -> Result<()> {
    for (holder, limit) in quotas.owners.of(account) {
        let Some(max) = limit.inodes_max(now) else { continue };
        let has = inodes(owners::used(read, holder)?);
        if has >= max {
            return Err(Error::over_quota(format!(
                "{} has {has} files and directories, its limit is {max}",
                holder.shown(&volume_name(read, holder.volume)?)
            ))
            .hint("those in the trash count until they are removed there"));
        }
    }
    Ok(())
}

/// Refuses another owner or group of an inode if a limit under which it is new has no space for it.
pub fn check_moved(
    read: &dyn Read,
    quotas: &Quotas,
    volume: VolumeId,
    (from, to): ((u32, u32), (u32, u32)),
    more: u64,
    now: Time,
) -> Result<()> {
    let account = |(uid, gid)| Account { volume, uid, gid };
    let (from, to) = (account(from), account(to));
    for (holder, limit) in quotas.owners.of(to) {
        if from.holders().contains(&holder) {
            continue;
        }
        let used = owners::used(read, holder)?;
        let taken = bytes(used).saturating_add(quotas.granted_to(holder, None));
        let is_full =
            |has: u64, more: u64, max: Option<u64>| max.is_some_and(|max| has.saturating_add(more) > max);
        if is_full(taken, more, limit.bytes_max(now)) || is_full(inodes(used), 1, limit.inodes_max(now)) {
            return Err(Error::over_quota(format!(
                "{} has {taken} bytes and {} files and directories: one more with {more} bytes is not within its limits",
                holder.shown(&volume_name(read, holder.volume)?),
                inodes(used)
            )));
        }
    }
    Ok(())
}

/// Users and groups that went above or below their soft limits, with their new records.
pub fn crossings(
    read: &dyn Read,
    quotas: &Quotas,
    holders: impl Iterator<Item = Holder>,
    now: Time,
) -> Result<Vec<(Holder, OwnerRecord)>> {
    let mut crossed = Vec::new();
    for holder in holders {
        let Some(limit) = quotas.owners.limit(holder) else { continue };
        let used = owners::used(read, holder)?;
        if let Some(over) = limit.crossing(bytes(used), inodes(used), now) {
            crossed.push((holder, quotas.owners.record(holder).with(over)));
        }
    }
    Ok(crossed)
}

/// A volume's name for messages; empty for all volumes.
pub fn volume_name(read: &dyn Read, volume: VolumeId) -> Result<String> {
    if volume == ALL_VOLUMES {
        return Ok(String::new());
    }
    Ok(tables::VOLUMES.get(read, volume)?.map_or_else(|| volume.to_string(), |record| record.name))
}

fn bytes(used: Used) -> u64 {
    used.bytes.max(0) as u64
}
pub fn inodes(used: Used) -> u64 {
    used.inodes.max(0) as u64
}

// ---- reports

/// Usage and limits of one user or group.
pub fn row(read: &dyn Read, quotas: &Quotas, holder: Holder) -> Result<OwnerUsage> {
    let used = owners::used(read, holder)?;
    let (limit, own) = (quotas.owners.limit(holder), quotas.owners.record(holder));
    Ok(OwnerUsage {
        holder,
        volume_name: volume_name(read, holder.volume)?,
        bytes: bytes(used),
        inodes: inodes(used),
        // The limit for all is shown as it was set.
        quota: limit.map(|limit| limit.quota).or(own.quota),
        own: own.quota.is_some(),
        bytes_over_since: own.bytes_over_since,
        inodes_over_since: own.inodes_over_since,
    })
}

/// The users and then the groups of a volume that use something there or have a limit, after one of them.
pub fn rows_in(
    read: &dyn Read,
    quotas: &Quotas,
    volume: VolumeId,
    after: Option<Holder>,
    limit: u32,
) -> Result<OwnerUsagePage> {
    let limit = limit.clamp(1, OWNER_ROWS_MAX) as usize;
    let mut holders: Vec<Holder> =
        quotas.owners.rows_of(volume).filter(|holder| after.is_none_or(|after| *holder > after)).collect();
    for kind in [OwnerKind::User, OwnerKind::Group] {
        let first = Holder { volume, kind, id: 0 };
        let from = match after {
            Some(after) if after.kind > kind => continue,
            Some(after) if after.kind == kind => match after.id.checked_add(1) {
                Some(id) => Holder { id, ..first },
                None => continue,
            },
            _ => first,
        };
        holders.extend(owners::holders_from(read, from, limit + 1)?);
    }
    holders.sort_unstable();
    holders.dedup();
    page(read, quotas, holders, limit)
}

/// One user or group: in all volumes together, then in each volume, after one of them.
pub fn rows_of(
    read: &dyn Read,
    quotas: &Quotas,
    (kind, id): (OwnerKind, u32),
    after: Option<VolumeId>,
    limit: u32,
) -> Result<OwnerUsagePage> {
    let limit = limit.clamp(1, OWNER_ROWS_MAX) as usize;
    let first = match after.map(|after| after.0.checked_add(1)) {
        None => ALL_VOLUMES,
        Some(Some(next)) => VolumeId(next),
        Some(None) => return Ok(OwnerUsagePage { rows: Vec::new(), end: true }),
    };
    let volumes = tables::VOLUMES.from(All, first).keys(read, usize::MAX, |volume| volume)?;
    let all = (first == ALL_VOLUMES).then_some(ALL_VOLUMES);
    let holders = all.into_iter().chain(volumes).map(|volume| Holder { volume, kind, id });
    let mut shown = Vec::new();
    for holder in holders {
        let is_known =
            owners::used(read, holder)? != Used::default() || quotas.owners.limit(holder).is_some();
        if is_known {
            shown.push(holder);
        }
        if shown.len() > limit {
            break;
        }
    }
    page(read, quotas, shown, limit)
}

fn page(read: &dyn Read, quotas: &Quotas, holders: Vec<Holder>, limit: usize) -> Result<OwnerUsagePage> {
    let end = holders.len() <= limit;
    let rows = holders.into_iter().take(limit).map(|holder| row(read, quotas, holder));
    Ok(OwnerUsagePage { rows: rows.collect::<Result<_>>()?, end })
}
