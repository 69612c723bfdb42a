//! The values of the coordinator's store, byte by byte: a version (u16), then the record.
//!
//! Invariant: a record names its layout. A layout newer than this program is refused, never guessed.
use crate::decide::Progress;
use crate::enrol::{KeptAuthority, Record, Token};
use crate::members::Positions;
use crate::replacing::Wishes;
use std::collections::BTreeSet;
use weir_proto::enrol::Holder;
use weir_proto::event::EventLog;
use weir_proto::map::{ClusterMap, Role};
use weir_proto::news::MapNews;
use weir_proto::version::LEVEL_OF_STEPS;
use weir_proto::{Error, Reader, Result, TargetId, Wire, Writer, message};

/// Version of each record's layout.
const RECORD_VERSION: u16 = 1;
/// The map has a second layout.
const MAP_LAYOUT_MAX: u16 = 2;
/// The wishes record has, too.
const WISHES_LAYOUT_MAX: u16 = 2;
/// Layout of the enrolment record; the first one had a single authority.
const ENROLMENT_VERSION: u16 = 2;
/// Bytes of an entry of a progress record, and of a positions record.
const PROGRESS_BYTES: usize = 12;
const POSITIONS_BYTES: usize = 20;

/// The whole map. Layout 2 means that steps may follow: a program that does not know steps must not take it
/// for the newest map.
pub fn encode_map(map: &ClusterMap) -> Vec<u8> {
    record_of(layout_of_map(map), |w| map.encode(w))
}

/// The whole cluster map in a coordinator's state.
pub fn decode_map(bytes: &[u8]) -> Result<ClusterMap> {
    let layout = u16::decode(&mut Reader::new(bytes))?;
    let map = read_of(layout.min(MAP_LAYOUT_MAX), MAP_LAYOUT_MAX, bytes, ClusterMap::decode)?;
    if layout != layout_of_map(&map) {
        return Err(Error::damaged(format!("a map of level {} in a record of layout {layout}", map.level)));
    }
    Ok(map)
}

fn layout_of_map(map: &ClusterMap) -> u16 {
    if map.level < LEVEL_OF_STEPS { RECORD_VERSION } else { MAP_LAYOUT_MAX }
}

/// The step from one version of the map to the next.
pub fn encode_step(step: &MapNews) -> Vec<u8> {
    record(|w| step.encode(w))
}

pub fn decode_step(bytes: &[u8]) -> Result<MapNews> {
    read(bytes, MapNews::decode)
}

/// The authorities' keys and certificates, tokens and holders of certificates, as a message.
pub fn encode_enrolment(enrolment: &Record) -> Vec<u8> {
    record_of(ENROLMENT_VERSION, |w| enrolment.encode(w))
}

pub fn decode_enrolment(bytes: &[u8]) -> Result<Record> {
    match bytes.starts_with(&RECORD_VERSION.to_le_bytes()) {
        true => read(bytes, FirstEnrolment::decode).map(Record::from),
        false => read_of(ENROLMENT_VERSION, ENROLMENT_VERSION, bytes, Record::decode),
    }
}

message!(
    /// The enrolment record in its first version.
    FirstEnrolment {
        key: Vec<u8>,
        certificate: Vec<u8>,
        last_serial: u64,
        tokens: Vec<Token>,
        holders: Vec<FirstHolder>,
    }
);
message!(FirstHolder {
    name: String,
    roles: Vec<Role>,
    serial: u64,
    joined: u64,
    until: u64,
    from: String,
    removed: bool,
});

impl From<FirstEnrolment> for Record {
    fn from(first: FirstEnrolment) -> Record {
        let FirstEnrolment { key, certificate, last_serial, tokens, holders } = first;
        let holder = |FirstHolder { name, roles, serial, joined, until, from, removed }: FirstHolder| {
            Holder { name, roles, serial, joined, until, from, removed, round: 0 }
        };
        let holders = holders.into_iter().map(holder).collect();
        let authorities = vec![KeptAuthority { key, certificate }];
        Record { authorities, last_serial, tokens, holders, ..Record::default() }
    }
}

/// The log of events and the mutes, as a message.
pub fn encode_events(log: &EventLog) -> Vec<u8> {
    record(|w| log.encode(w))
}

pub fn decode_events(bytes: &[u8]) -> Result<EventLog> {
    read(bytes, EventLog::decode)
}

/// Count (u32), then for each namespace its number (u32) and the least number of changes that it holds (u64).
pub fn encode_progress(progress: &Progress) -> Vec<u8> {
    record(|w| {
        (progress.len() as u32).encode(w);
        for (namespace, changes) in progress {
            namespace.encode(w);
            changes.encode(w);
        }
    })
}

pub fn decode_progress(bytes: &[u8]) -> Result<Progress> {
    read(bytes, |r| {
        let count = r.count(PROGRESS_BYTES)?;
        (0..count).map(|_| Ok((Wire::decode(r)?, Wire::decode(r)?))).collect()
    })
}

/// Count (u32), then for each target its number (u32), the id of its run (u64) and its position in the run
/// (u64).
pub fn encode_positions(positions: &Positions) -> Vec<u8> {
    record(|w| {
        (positions.len() as u32).encode(w);
        for (target, (run, position)) in positions {
            target.encode(w);
            run.encode(w);
            position.encode(w);
        }
    })
}

pub fn decode_positions(bytes: &[u8]) -> Result<Positions> {
    read(bytes, |r| {
        let count = r.count(POSITIONS_BYTES)?;
        (0..count).map(|_| Ok((Wire::decode(r)?, Wire::decode(r)?))).collect()
    })
}

/// Administrators' requests about rebuilds: seconds (u32), count (u32), then the number of each target (u32)
/// that is gone. Layout 2, used once a move is requested, continues: count (u32) and the number of each
/// target that is drained, and whether moves are paused (u8).
pub fn encode_wishes(wishes: &Wishes) -> Vec<u8> {
    let first = |w: &mut Writer| {
        wishes.after_s.encode(w);
        encode_targets(&wishes.gone, w);
    };
    if wishes.draining.is_empty() && !wishes.paused {
        return record(first);
    }
    record_of(WISHES_LAYOUT_MAX, |w| {
        first(w);
        encode_targets(&wishes.draining, w);
        wishes.paused.encode(w);
    })
}

pub fn decode_wishes(bytes: &[u8]) -> Result<Wishes> {
    let layout = u16::decode(&mut Reader::new(bytes))?;
    read_of(layout.clamp(RECORD_VERSION, WISHES_LAYOUT_MAX), WISHES_LAYOUT_MAX, bytes, |r| {
        let (after_s, gone) = (Wire::decode(r)?, decode_targets(r)?);
        let wishes = Wishes { after_s, gone, ..Wishes::default() };
        match layout {
            RECORD_VERSION => Ok(wishes),
            _ => Ok(Wishes { draining: decode_targets(r)?, paused: Wire::decode(r)?, ..wishes }),
        }
    })
}

fn encode_targets(targets: &BTreeSet<TargetId>, w: &mut Writer) {
    (targets.len() as u32).encode(w);
    targets.iter().for_each(|target| target.encode(w));
}

fn decode_targets(r: &mut Reader<'_>) -> Result<BTreeSet<TargetId>> {
    let count = r.count(size_of::<u32>())?;
    (0..count).map(|_| Wire::decode(r)).collect()
}

fn record(fields: impl FnOnce(&mut Writer)) -> Vec<u8> {
    record_of(RECORD_VERSION, fields)
}

fn record_of(layout: u16, fields: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut w = Writer::default();
    layout.encode(&mut w);
    fields(&mut w);
    w.bytes
}

fn read<T>(bytes: &[u8], fields: impl FnOnce(&mut Reader<'_>) -> Result<T>) -> Result<T> {
    read_of(RECORD_VERSION, RECORD_VERSION, bytes, fields)
}

fn read_of<T>(
    layout: u16,
    newest: u16,
    bytes: &[u8],
    fields: impl FnOnce(&mut Reader<'_>) -> Result<T>,
) -> Result<T> {
    let mut r = Reader::new(bytes);
    let version = u16::decode(&mut r)?;
    if version != layout {
        return Err(Error::unsupported(format!(
            "a record of the coordinator has layout version {version}, this program knows {newest}"
        )));
    }
    let value = fields(&mut r)?;
    r.finish()?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::news::MapChange;
    use weir_proto::{ClusterId, ErrorKind, NamespaceId, RunId, TargetId};

    #[test]
    fn the_layout_of_records_never_changes() {
        let progress = Progress::from([(NamespaceId(3), 7)]);
        let bytes = encode_progress(&progress);
        assert_eq!(bytes, [1, 0, 1, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decode_progress(&bytes), Ok(progress));
        let positions = Positions::from([(TargetId(3), (RunId(7), 9))]);
        let bytes = encode_positions(&positions);
        assert_eq!(bytes[..10], [1, 0, 1, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(bytes[10..], [7, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decode_positions(&bytes), Ok(positions));
        assert!(decode_positions(&[&bytes[..], &[0]].concat()).is_err());
        let wishes = Wishes { gone: [TargetId(3), TargetId(9)].into(), ..Wishes::default() };
        let bytes = encode_wishes(&wishes);
        assert_eq!(bytes, [1, 0, 88, 2, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(decode_wishes(&bytes), Ok(wishes));
        assert!(decode_wishes(&bytes[..17]).is_err() && decode_wishes(&[&bytes[..], &[0]].concat()).is_err());
        let wishes = Wishes { draining: [TargetId(7)].into(), paused: true, ..Wishes::default() };
        let bytes = encode_wishes(&wishes);
        assert_eq!(bytes, [2, 0, 88, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0, 1]);
        assert_eq!(decode_wishes(&bytes), Ok(wishes));
        assert!(decode_wishes(&bytes[..18]).is_err());
        assert!(decode_wishes(&[&[3, 0], &bytes[2..]].concat()).is_err(), "a later layout");
    }

    #[test]
    fn an_enrolment_of_the_first_version_is_read() {
        let holder = FirstHolder {
            name: "s1".to_owned(),
            roles: vec![Role::Storage],
            serial: 7,
            joined: 1,
            until: 2,
            from: "there".to_owned(),
            removed: true,
        };
        let (key, certificate, last_serial, tokens, holders) = (vec![1], vec![2], 7, vec![], vec![holder]);
        let first = FirstEnrolment { key, certificate, last_serial, tokens, holders };
        let read = decode_enrolment(&record(|w| first.encode(w))).unwrap();
        assert_eq!(read.authorities, [KeptAuthority { key: vec![1], certificate: vec![2] }]);
        assert_eq!((read.last_serial, read.round, read.holders[0].name.as_str()), (7, 0, "s1"));
        assert!(read.holders[0].removed);
        let now = encode_enrolment(&read);
        assert_eq!(now[..2], [2, 0]);
        assert_eq!(decode_enrolment(&now), Ok(read));
    }

    #[test]
    fn the_layout_of_a_map_goes_with_its_level() {
        for (level, layout) in [(1, 1), (2, 2)] {
            let map = ClusterMap { level, ..ClusterMap::absent() };
            let mut bytes = encode_map(&map);
            assert_eq!((&bytes[..2], decode_map(&bytes)), (&[layout, 0][..], Ok(map)));
            bytes[0] = 3 - layout;
            assert_eq!(decode_map(&bytes).unwrap_err().kind, ErrorKind::Damaged);
        }
        let changes = vec![MapChange::Level { level: 2 }];
        let step = MapNews::Steps { cluster: ClusterId([5; 16]), from: 9, steps: vec![changes] };
        let bytes = encode_step(&step);
        assert_eq!(bytes[..3], [1, 0, 2]);
        assert_eq!(bytes[3..19], [5; 16]);
        assert_eq!(bytes[19..], [9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 2, 0]);
        assert_eq!(decode_step(&bytes), Ok(step));
    }

    #[test]
    fn a_record_of_a_newer_program_is_refused() {
        let refused_of = |refused: Result<()>, says: &str| {
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Unsupported);
            assert!(refused.context.contains(says), "{refused:?}");
        };
        let newer = [2, 0, 0, 0, 0, 0];
        refused_of(decode_progress(&newer).map(drop), "version 2, this program knows 1");
        refused_of(decode_step(&newer).map(drop), "version 2, this program knows 1");
        refused_of(decode_map(&[3, 0, 0, 0, 0, 0]).map(drop), "version 3, this program knows 2");
    }
}
