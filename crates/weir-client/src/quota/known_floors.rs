//! Write floors of volumes, as the leader last listed them.
use std::collections::BTreeMap;
use std::sync::Mutex;
use weir_env::Instant;
use weir_proto::VolumeId;
use weir_proto::volume::WriteFloor;

/// The floors as the leader last answered, and when.
#[derive(Default)]
pub struct KnownFloors {
    known: Mutex<Option<(Instant, BTreeMap<VolumeId, u8>)>>,
    pub asking: tokio::sync::Mutex<()>,
}

impl KnownFloors {
    /// The floor of a volume, and when the leader answered; absent: it has not been asked.
    pub fn of(&self, volume: VolumeId) -> Option<(Instant, u8)> {
        let known = self.known.lock().expect("no holder panics");
        known.as_ref().map(|(at, floors)| (*at, floors.get(&volume).copied().unwrap_or(0)))
    }
    pub fn note(&self, at: Instant, floors: Vec<WriteFloor>) {
        let floors = floors.into_iter().map(|floor| (floor.volume, floor.members)).collect();
        *self.known.lock().expect("no holder panics") = Some((at, floors));
    }
}
