//! Quota reserved in volumes with a limit of bytes: granted by the leader, spent by written and uncommitted
//! bytes.
//!
//! Lock order: an inode's state, then the table here.
use crate::inode::{NO_LIMIT, Settled};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use tokio::sync::RwLockReadGuard;
use weir_proto::VolumeId;
use weir_proto::volume::HeldReservation;

#[derive(Default)]
pub struct Reservations {
    table: Mutex<BTreeMap<VolumeId, Held>>,
    /// Commits lock it for reading, a change of reservations for writing.
    pub gate: tokio::sync::RwLock<()>,
}

/// The reservation in one volume, in bytes.
#[derive(Default)]
struct Held {
    granted: u64,
    /// The part of it that is written and not committed.
    spent: u64,
    /// Something was written since the last check.
    used: bool,
}

impl Held {
    fn free(&self) -> u64 {
        self.granted.saturating_sub(self.spent)
    }
}

impl Reservations {
    fn table(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Held>> {
        self.table.lock().expect("no holder panics")
    }
    /// To be held while a commit of a file in this volume is in flight.
    pub async fn committing(&self, limited: VolumeId) -> Option<RwLockReadGuard<'_, ()>> {
        if limited == NO_LIMIT { None } else { Some(self.gate.read().await) }
    }
    /// The reservations to name to a restarted leader.
    pub fn held(&self) -> Vec<HeldReservation> {
        let table = self.table();
        let held = table.iter().filter(|(_, held)| held.granted > 0);
        held.map(|(volume, held)| HeldReservation { volume: *volume, bytes: held.granted }).collect()
    }
    /// The session is gone, and with it all grants.
    pub fn expired(&self) {
        self.table().values_mut().for_each(|held| held.granted = 0);
    }
    /// Spends bytes of a grant. False: there is not enough.
    pub fn spend(&self, volume: VolumeId, bytes: u64) -> bool {
        let mut table = self.table();
        let held = table.entry(volume).or_default();
        held.used = true;
        let enough = bytes <= held.free();
        if enough {
            held.spent += bytes;
        }
        enough
    }
    /// A file's reservation has changed.
    pub fn settle(&self, settled: Settled) {
        if let Some(held) = self.table().get_mut(&settled.volume) {
            held.spent = (held.spent + settled.now).saturating_sub(settled.before);
        }
    }
    /// A commit added this to the volume's usage: it leaves the reservation.
    pub fn note_charged(&self, volume: VolumeId, added: u64) {
        if let Some(held) = self.table().get_mut(&volume) {
            held.granted = held.granted.saturating_sub(added);
        }
    }
    pub fn free(&self, volume: VolumeId) -> u64 {
        self.table().get(&volume).map_or(0, Held::free)
    }
    /// The spent bytes are about to be reported: until the answer no more may be spent.
    pub fn begin_asking(&self, volume: VolumeId) -> u64 {
        let mut table = self.table();
        let held = table.entry(volume).or_default();
        held.granted = held.granted.min(held.spent);
        held.spent
    }
    /// The leader has answered. The volume's entry may have been dropped meanwhile.
    pub fn note_granted(&self, volume: VolumeId, granted: u64) {
        self.table().entry(volume).or_default().granted = granted;
    }
    /// Volumes with more reserved than spent, or with writes since the last check; whether there were any.
    pub fn take_unused(&self) -> Vec<(VolumeId, bool)> {
        let mut table = self.table();
        table.retain(|_, held| held.granted > 0 || held.spent > 0);
        let over = table.iter_mut().filter(|(_, held)| held.granted != held.spent || held.used);
        over.map(|(volume, held)| (*volume, std::mem::take(&mut held.used))).collect()
    }
}
