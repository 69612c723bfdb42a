//! The volumes in which a session may hold leases, locks, opens or reservations. Pure.
//!
//! They are recorded before the session learns of a grant, so that after a restart the leader knows which
//! volumes are not concerned by a session that has not returned. Coarse on purpose: the record changes with
//! the first grant in a volume, and not with each one.
use crate::lease::Usage;
use crate::record::Record;
use std::collections::BTreeMap;
use weir_proto::{VolumeId, wire_struct};

/// A session that uses more of them may hold anything.
const VOLUMES_MAX: usize = 64;

/// Where a session may hold something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Holds {
    /// Anywhere; there is no record of it.
    Anything,
    In(BTreeMap<VolumeId, Usage>),
}

/// `F/`: a session's volumes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HoldsRecord {
    pub volumes: Vec<(VolumeId, bool)>,
}
wire_struct!(HoldsRecord { volumes: Vec<(VolumeId, bool)> });
impl Record for HoldsRecord {}

impl Holds {
    pub fn nothing() -> Holds {
        Holds::In(BTreeMap::new())
    }

    /// Adds the usage of a volume. True: the record changes.
    pub fn add(&mut self, volume: VolumeId, usage: Usage) -> bool {
        let Holds::In(volumes) = self else { return false };
        if volumes.get(&volume).is_some_and(|known| *known >= usage) {
            return false;
        }
        volumes.insert(volume, usage);
        if volumes.len() > VOLUMES_MAX {
            *self = Holds::Anything;
        }
        true
    }

    /// Whether the session may have changes that the leader does not know.
    pub fn may_write(&self) -> bool {
        match self {
            Holds::Anything => true,
            Holds::In(volumes) => volumes.values().any(|usage| *usage == Usage::Writes),
        }
    }

    /// `None`: there is no record.
    pub fn record(&self) -> Option<HoldsRecord> {
        let Holds::In(volumes) = self else { return None };
        let volumes = volumes.iter().map(|(id, usage)| (*id, *usage == Usage::Writes)).collect();
        Some(HoldsRecord { volumes })
    }
    pub fn from_record(record: &HoldsRecord) -> Holds {
        let usage = |writes| if writes { Usage::Writes } else { Usage::Reads };
        Holds::In(record.volumes.iter().map(|(id, writes)| (*id, usage(*writes))).collect())
    }
}

/// The sum of the holdings of sessions that have not returned since a restart.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Absent {
    anything: bool,
    volumes: BTreeMap<VolumeId, Usage>,
}

impl Absent {
    pub fn of<'a>(sessions: impl Iterator<Item = &'a Holds>) -> Absent {
        let mut all = Absent::default();
        for holds in sessions {
            match holds {
                Holds::Anything => all.anything = true,
                Holds::In(volumes) => {
                    for (id, usage) in volumes {
                        let known = all.volumes.entry(*id).or_insert(*usage);
                        *known = (*known).max(*usage);
                    }
                }
            }
        }
        all
    }

    /// Whether one of them may hold something in a volume that conflicts with a read, or with a change.
    pub fn conflicts(&self, volume: VolumeId, changes: bool) -> bool {
        let needed = if changes { Usage::Reads } else { Usage::Writes };
        self.anything || self.volumes.get(&volume).is_some_and(|held| *held >= needed)
    }
    /// Whether one of them may hold something that conflicts with a read, or with a change, in any volume.
    pub fn conflicts_anywhere(&self, changes: bool) -> bool {
        self.anything || self.volumes.keys().any(|id| self.conflicts(*id, changes))
    }
    pub fn volumes(&self) -> impl Iterator<Item = VolumeId> {
        self.volumes.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_a_sessions_volumes_never_changes() {
        let mut holds = Holds::nothing();
        assert!(holds.add(VolumeId(0x0102), Usage::Reads) && holds.add(VolumeId(3), Usage::Writes));
        let value = holds.record().unwrap().to_value();
        assert_eq!(value, [1, 2, 0, 0, 0, 3, 0, 0, 0, 1, 2, 1, 0, 0, 0]);
        let record = HoldsRecord::from_value(&value, String::new).unwrap();
        assert_eq!(Holds::from_record(&record), holds);
        for end in 0..value.len() {
            assert!(HoldsRecord::from_value(&value[..end], String::new).is_err(), "cut to {end}");
        }
        assert_eq!(Holds::Anything.record(), None);
    }

    #[test]
    fn only_more_than_before_changes_the_record() {
        let (mut holds, v) = (Holds::nothing(), VolumeId(1));
        assert!(holds.add(v, Usage::Reads) && !holds.add(v, Usage::Reads) && !holds.may_write());
        assert!(holds.add(v, Usage::Writes) && !holds.add(v, Usage::Reads) && holds.may_write());
        for other in 2..=VOLUMES_MAX as u32 {
            assert!(holds.add(VolumeId(other), Usage::Reads));
        }
        assert!(holds.add(VolumeId(1000), Usage::Reads), "one too many");
        assert_eq!(holds, Holds::Anything);
        assert!(!holds.add(VolumeId(1001), Usage::Writes));
    }

    #[test]
    fn reads_pass_absent_readers_and_changes_do_not() {
        let (read, written, other) = (VolumeId(1), VolumeId(2), VolumeId(3));
        let mut holds = Holds::nothing();
        holds.add(read, Usage::Reads);
        let idle = Absent::of([&Holds::nothing(), &holds].into_iter());
        assert!(!idle.conflicts(read, false) && idle.conflicts(read, true) && !idle.conflicts(other, true));
        assert!(!idle.conflicts_anywhere(false) && idle.conflicts_anywhere(true));
        holds.add(written, Usage::Writes);
        let busy = Absent::of([&holds].into_iter());
        assert!(busy.conflicts(written, false) && !busy.conflicts(other, true));
        assert!(Absent::of([&Holds::Anything].into_iter()).conflicts(other, false));
        assert!(!Absent::of([].into_iter()).conflicts_anywhere(true));
    }
}
