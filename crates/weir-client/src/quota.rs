//! Quota reservations under limits of bytes of volumes, users and groups: no write is accepted that a limit
//! may refuse later.
//!
//! Invariants: written and uncommitted bytes never exceed the leader's grant; a file without a limit of
//! bytes asks for nothing. The bytes that a commit adds to an account's usage leave the reservation at
//! the same moment at both ends, because no reservation is negotiated while a commit is in flight: until its
//! bytes have left both the grant and the spent bytes.
mod floors;
mod known_floors;
mod reservations;

pub use reservations::Committing;

use crate::base::Base;
use crate::data::Data;
use crate::inode::{Inode, NO_LIMIT, State, Wish};
use crate::leader::Leader;
use crate::space::space_for;
use bytes::Bytes;
use known_floors::KnownFloors;
use reservations::Reservations;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::meta::Entry;
use weir_proto::quota::{Account, HeldSpace, ReserveSpace, ReservedSpace};
use weir_proto::volume::{QuotaReservation, ReserveQuota};
use weir_proto::{Error, ErrorKind, MIB, Result, VolumeId};

/// Reserved in addition to the present need: at most this many bytes are written without a message to the
/// leader, which grants less when little is left.
const RESERVE_BYTES: u64 = 64 * MIB;
/// Unused reservations of other clients are returned within a second or two: a writer waits this long for
/// them.
const STARVED_MAX: Duration = Duration::from_millis(3000);
/// Bytes that are at home are evicted for it: at the rate at which home accepts new ones. A home that accepts
/// nothing for this time is not worth waiting for.
const MAKING_MAX: Duration = Duration::from_secs(30);
const STARVED_POLL: Duration = Duration::from_millis(100);

pub struct Quota {
    env: Env,
    leader: Arc<Leader>,
    data: Arc<Data>,
    reservations: Reservations,
    floors: KnownFloors,
}

impl Quota {
    pub fn new(base: &Base) -> Quota {
        let Base { env, leader, data, .. } = base.clone();
        Quota { env, leader, data, reservations: Reservations::default(), floors: KnownFloors::default() }
    }
    /// The reservations to name to a restarted leader.
    pub fn held(&self) -> Vec<HeldSpace> {
        self.reservations.held()
    }
    /// The session is gone, and with it all grants.
    pub fn expired(&self) {
        self.reservations.expired();
    }
    /// To be held from before a commit of a file of this account until [`Quota::end_commit`].
    pub async fn committing(&self, limited: Account) -> Option<Committing<'_>> {
        self.reservations.committing(limited).await
    }

    /// Reserves bytes that a file will take. False: there is not enough.
    pub fn spend(&self, st: &mut State, growth: u64) -> bool {
        if !st.quota.is_limited() || growth == 0 {
            return true;
        }
        if st.quota.is_moved() {
            self.settle(st);
        }
        let enough = self.reservations.spend(st.quota.limited(), growth);
        if enough {
            st.quota.spend(growth);
        }
        enough
    }

    /// Adapts the reservation of a file to its uncommitted changes.
    pub fn settle(&self, st: &mut State) {
        let is_changed = st.write.local().is_some();
        for settled in st.quota.settle(is_changed) {
            self.reservations.settle(settled);
        }
    }

    /// A commit was answered: returns the bytes that it added to the account's usage. Before the answer is
    /// applied.
    pub fn note_committed(&self, st: &mut State, entry: &Entry) -> u64 {
        let added = st.quota.note_charged(entry.attr.allocated);
        if entry.attr.nlink > 0 { added } else { 0 }
    }
    /// After the answer was applied: these bytes leave the reservation, and no others stay spent.
    pub fn end_commit(&self, st: &mut State, committing: Option<Committing<'_>>, added: u64) {
        let added = if st.quota.is_limited() { added } else { 0 };
        let (account, is_changed) = (st.quota.limited(), st.write.local().is_some());
        self.reservations.end_commit(committing, account, added, st.quota.settle(is_changed));
    }

    /// The part of `data` that the quota has space for; an error if there is none. `at` `None`: at the end of
    /// the file.
    pub async fn fit(&self, inode: &Inode, at: Option<u64>, data: &Bytes) -> Result<Bytes> {
        let begun = self.env.clock.now();
        loop {
            let (account, growth) = {
                let st = inode.lock();
                let offset = at.unwrap_or_else(|| st.size());
                (st.quota.limited(), st.growth(offset, offset + data.len() as u64))
            };
            if account == NO_LIMIT || growth == 0 || growth <= self.free_reservation(account) {
                return Ok(data.clone());
            }
            let reservation = self.reserve_quota(account, growth, RESERVE_BYTES).await?;
            if reservation.unlimited {
                inode.lock().quota.note_limit(NO_LIMIT);
                continue;
            }
            let fits = {
                let st = inode.lock();
                let offset = at.unwrap_or_else(|| st.size());
                st.fitting(offset, data.len(), self.free_reservation(account))
            };
            if fits > 0 {
                return Ok(data.slice(..fits));
            }
            self.starve(inode, &reservation, begun).await?;
        }
    }

    /// Reserves all bytes that a `fallocate` charges, or none of them. The free space must suffice for what
    /// the file may take in addition, which is not reserved.
    pub async fn reserve_for(&self, inode: &Inode, wish: &Wish) -> Result<()> {
        let most = {
            let st = inode.lock();
            st.reservation(wish).max(wish.end.saturating_sub(wish.offset.max(st.size())))
        };
        // While a cluster starts its capacity is not known yet (0), and without the coordinator nothing is.
        if most > 0
            && let Ok(space) = space_for(&self.leader, &self.data, None).await
            && space.capacity_bytes > 0
            && most > space.free_bytes
        {
            return Err(Error::no_space(format!(
                "reserve {most} bytes for file {}: {} are free",
                inode.ino, space.free_bytes
            )));
        }
        let begun = self.env.clock.now();
        loop {
            let (account, growth) = {
                let st = inode.lock();
                (st.quota.limited(), st.reservation(wish))
            };
            if account == NO_LIMIT || growth <= self.free_reservation(account) {
                return Ok(());
            }
            let reservation = self.reserve_quota(account, growth, 0).await?;
            if reservation.unlimited {
                inode.lock().quota.note_limit(NO_LIMIT);
            } else if growth > self.free_reservation(account)
                && let Err(e) = self.starve(inode, &reservation, begun).await
            {
                // If this fails, it is returned a second later.
                let _ = self.reserve_quota(account, 0, 0).await;
                return Err(e);
            }
        }
    }

    /// Waits for quota that is freed; an error if none is.
    async fn starve(&self, inode: &Inode, reservation: &ReservedSpace, begun: Instant) -> Result<()> {
        let patience = match (reservation.evicting, reservation.others) {
            (true, _) => MAKING_MAX,
            (false, 0) => Duration::ZERO,
            (false, _) => STARVED_MAX,
        };
        if self.env.clock.now().since(begun) >= patience {
            return Err(Error::over_quota(format!("write file {}: {}", inode.ino, reservation.limit)));
        }
        self.env.clock.sleep(STARVED_POLL).await;
        Ok(())
    }

    fn free_reservation(&self, account: Account) -> u64 {
        self.reservations.free(account)
    }

    /// Reports the need of an account and takes the grant.
    async fn reserve_quota(&self, account: Account, growth: u64, reserve: u64) -> Result<ReservedSpace> {
        let _alone = self.reservations.gate.write().await;
        let ask = |spent: u64| {
            let must = spent.saturating_add(growth);
            (spent, must, must.saturating_add(reserve))
        };
        let reservations = &self.reservations;
        let mut answer = Err(Error::unsupported("limits of owners"));
        if !reservations.is_of_volumes() {
            let (spent, must, want) = ask(reservations.begin_asking(account));
            let ask = |session| ReserveSpace { session, account, spent, must, want };
            answer = self.leader.ask(ask).await;
        }
        let reservation = match answer {
            Err(e) if e.kind == ErrorKind::Unsupported => {
                reservations.use_volumes();
                self.reserve_in_volume(account.volume, ask(reservations.begin_asking(account))).await?
            }
            answer => answer?,
        };
        self.reservations.note_granted(account, reservation.held);
        Ok(reservation)
    }

    /// For a leader of an older program: all files of a volume together.
    async fn reserve_in_volume(
        &self,
        volume: VolumeId,
        (spent, must, want): (u64, u64, u64),
    ) -> Result<ReservedSpace> {
        let ask = |session| ReserveQuota { session, volume, spent, must, want };
        let QuotaReservation { held, others, unlimited, evicting } = self.leader.ask(ask).await?;
        let limit = format!("volume {volume} is at its limit");
        Ok(ReservedSpace { held, others, unlimited, evicting, limit })
    }

    /// Returns unused reservations.
    pub async fn return_unused(&self) {
        for (account, used) in self.reservations.take_unused() {
            let reserve = if used { RESERVE_BYTES } else { 0 };
            if let Err(e) = self.reserve_quota(account, 0, reserve).await {
                tracing::debug!("the reservation in volume {} was not returned: {e}", account.volume);
            }
        }
    }

    /// The reservation of a direct write that adds `growth`, until the returned value is dropped.
    pub fn spend_direct<'a>(
        &'a self,
        inode: &'a Inode,
        growth: impl FnOnce(&State) -> u64,
    ) -> Option<DirectReservation<'a>> {
        let mut st = inode.lock();
        let growth = growth(&st);
        if !self.spend(&mut st, growth) {
            return None;
        }
        st.quota.begin_direct(growth);
        Some(DirectReservation { quota: self, inode, growth })
    }
}

/// The reservation of a write in flight.
pub struct DirectReservation<'a> {
    quota: &'a Quota,
    inode: &'a Inode,
    growth: u64,
}

impl DirectReservation<'_> {
    pub fn growth(&self) -> u64 {
        self.growth
    }
    /// The write is committed; `added`: to the account's usage, as far as the answer shows it. Another answer
    /// may have shown the commit's bytes before this one did.
    pub fn end(mut self, st: &mut State, committing: Option<Committing<'_>>, added: u64) {
        let growth = std::mem::take(&mut self.growth);
        st.quota.end_direct(growth);
        self.quota.end_commit(st, committing, added.max(growth));
    }
}

impl Drop for DirectReservation<'_> {
    fn drop(&mut self) {
        if self.growth > 0 {
            let mut st = self.inode.lock();
            st.quota.end_direct(self.growth);
            self.quota.settle(&mut st);
        }
    }
}
