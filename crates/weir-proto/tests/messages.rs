//! Every message: decoders survive whatever arrives, and what was encoded is decoded to the same.
use weir_proto::map::{Layout, Scheme};
use weir_proto::{CellId, Error, FileId, Reader, Wire};
use weir_proto::{coord, data, frame, lock, map, meta};

/// Calls `$check::<T>(name)` for every message type. `the_list_is_complete` compares it with the sources.
macro_rules! for_every_message {
    ($check:ident) => {
        for_every_message!($check:
            coord::{TargetOffer, Join, Joined, TargetReport, Heartbeat, HeartbeatAck, GetMap, MapReply, ReportTarget,
                CaughtUp, Leave, ClearTarget, GetStatus, ClusterStatus, LeadVolume, LeadReply}
            data::{Place, WriteFragment, CommitStripe, DropPrepared, WriteOverlay, OverlayWritten, MirrorOverlay,
                ReadCell, CellRead, ReadOverlays, OverlayExtent, OverlaysRead, StatCell, CellStat, MarkMissing,
                DropFile, GroupAt, ListCuts, CutList, Cut, DropFileReply, PreparedCell, SealCell, SealedCell, ListCells, CellList, CellSummary,
                SealFile, StatTarget, TargetStat}
            meta::{Op, Cred, Time, Attr, Lease, Entry, SessionOpen, SessionOpened, HeldLease, SessionResume,
                SessionResumed, KeepAlive, SessionClose, Lookup, Looked, GetAttr, ReadLink, LinkTarget, ReadDir,
                ListEntry, Listing, GetXattr, XattrValue, ListXattr, XattrNames, GetUsage, Usage, StatFs, FsStat,
                AcquireLease, ReleaseLease, Open, Opened, Close, Closed, ReadInline, InlineData, Recovered, TakeTurn, EndTurn, Create, Created,
                Mkdir, Made, Symlink, Mknod, Link, Unlink, Rmdir, Removed, Rename, Renamed, SetAttr, Commit,
                SetXattr, RemoveXattr, Recall}
            lock::{LockOwner, LockEntry, SetLock, LockAnswer, TestLock, CancelLock, LockCancelled, ListLocks,
                LockList, HeldLock, ReclaimLocks, Reclaimed, LockFree}
            map::{Node, Target, Member, Group, VolumeEntry, Settings, ClusterMap}
            frame::{Hello}
        )
    };
    ($check:ident: $($module:ident::{$($name:ident),*})*) => {
        $($($check::<$module::$name>(concat!(stringify!($module), "::", stringify!($name)));)*)*
    };
}

const ROUNDS: usize = 10_000;

/// Small, seeded, good enough to break bytes.
struct Dice(u64);

impl Dice {
    fn for_name(name: &str) -> Dice {
        Dice(
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)),
        )
    }
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n
    }
    /// Often small, as lengths, options and cases are.
    fn byte(&mut self) -> u8 {
        match self.below(8) {
            0..5 => 0,
            5 => self.below(4) as u8,
            6 => self.below(32) as u8,
            _ if self.below(200) == 0 => self.below(256) as u8, // seldom, or no text would be UTF-8
            _ => self.below(128) as u8,
        }
    }
    fn bytes(&mut self, max: usize) -> Vec<u8> {
        (0..self.below(max)).map(|_| self.byte()).collect()
    }

    /// The encoding of some value: bytes whose refused parts are thrown again until they are accepted.
    fn encoding<T: Wire>(&mut self) -> Option<Vec<u8>> {
        let mut bytes: Vec<u8> = (0..1500).map(|_| self.byte()).collect();
        for _ in 0..3000 {
            let mut reader = Reader::new(&bytes);
            let accepted = T::decode(&mut reader).is_ok();
            let end = bytes.len() - reader.remaining();
            if accepted {
                bytes.truncate(end);
                return Some(bytes);
            }
            let reach = [1, 1, 4, 8, 20, 400][self.below(6)];
            let start = end.saturating_sub(1 + self.below(reach));
            let stop = end.clamp(start + 1, bytes.len());
            for byte in &mut bytes[start..stop] {
                *byte = self.byte();
            }
        }
        None
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            if bytes.is_empty() {
                bytes.push(self.byte());
            }
            let at = self.below(bytes.len());
            match self.below(5) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.below(256) as u8,
                2 => bytes.truncate(at),
                3 => bytes.insert(at, self.byte()),
                _ => bytes[at] = 0xff,
            }
        }
    }
}

/// Decoding is one to one: bytes that are accepted are those that the value is encoded to.
fn survives<T: Wire>(name: &str, bytes: &[u8]) {
    if let Ok(value) = T::from_bytes(bytes) {
        assert_eq!(value.to_bytes(), bytes, "{name}");
    }
}

fn survives_random_bytes<T: Wire>(name: &str) {
    let mut dice = Dice::for_name(name);
    for _ in 0..ROUNDS {
        survives::<T>(name, &dice.bytes(300));
    }
    for length in 0..64 {
        survives::<T>(name, &vec![0xff; length]);
        survives::<T>(name, &vec![0; length]);
    }
}

fn survives_mutated_messages<T: Wire>(name: &str) {
    let mut dice = Dice::for_name(name);
    for _ in 0..ROUNDS / 500 {
        let Some(good) = dice.encoding::<T>() else { continue };
        for _ in 0..500 {
            let mut bad = good.clone();
            dice.mutate(&mut bad);
            survives::<T>(name, &bad);
        }
    }
}

fn is_decoded_as_it_was_encoded<T: Wire + PartialEq + std::fmt::Debug>(name: &str) {
    let mut dice = Dice::for_name(name);
    let mut seen = 0;
    for _ in 0..60 {
        let Some(bytes) = dice.encoding::<T>() else { continue };
        let value = T::from_bytes(&bytes).unwrap();
        assert_eq!(value.to_bytes(), bytes, "{name}");
        assert_eq!(T::from_bytes(&value.to_bytes()).unwrap(), value, "{name}");
        // No prefix of it, and nothing behind it, is taken for it.
        for end in 0..bytes.len().min(200) {
            assert!(T::from_bytes(&bytes[..end]).is_err(), "{name} cut to {end} bytes");
        }
        assert!(T::from_bytes(&[&bytes[..], &[0]].concat()).is_err(), "{name} and a byte");
        seen += 1;
    }
    assert!(seen >= 10, "{name}: only {seen} values were found");
}

#[test]
fn decoders_survive_random_bytes() {
    for_every_message!(survives_random_bytes);
    survives_random_bytes::<Error>("Error");
    survives_random_bytes::<Layout>("Layout");
}

#[test]
fn decoders_survive_mutated_messages() {
    for_every_message!(survives_mutated_messages);
    survives_mutated_messages::<Error>("Error");
    survives_mutated_messages::<Layout>("Layout");
}

#[test]
fn messages_are_decoded_as_they_were_encoded() {
    for_every_message!(is_decoded_as_it_was_encoded);
    is_decoded_as_it_was_encoded::<Error>("Error");
    is_decoded_as_it_was_encoded::<Layout>("Layout");
    is_decoded_as_it_was_encoded::<Scheme>("Scheme");
    is_decoded_as_it_was_encoded::<FileId>("FileId");
    is_decoded_as_it_was_encoded::<CellId>("CellId");
}

const SOURCES: [(&str, &str); 6] = [
    ("coord", include_str!("../src/coord.rs")),
    ("data", include_str!("../src/data.rs")),
    ("meta", include_str!("../src/meta.rs")),
    ("lock", include_str!("../src/lock.rs")),
    ("map", include_str!("../src/map.rs")),
    ("frame", include_str!("../src/frame.rs")),
];

/// What each `message!` of a source declares: its first line without documentation.
fn declared(source: &str) -> impl Iterator<Item = &str> {
    source.split("message!(").skip(1).map(|rest| {
        rest.lines()
            .map(str::trim)
            .find(|line| !line.is_empty() && !line.starts_with("//"))
            .unwrap_or_default()
    })
}

thread_local!(static LISTED: std::cell::RefCell<std::collections::BTreeSet<String>> = Default::default());

fn note<T: Wire>(name: &str) {
    let _ = T::from_bytes(&[]);
    LISTED.with_borrow_mut(|listed| listed.insert(name.to_owned()));
}

#[test]
fn the_list_is_complete() {
    for_every_message!(note);
    let listed = LISTED.take();
    for (module, source) in SOURCES {
        for line in declared(source) {
            let name: String = line.chars().take_while(|c| c.is_alphanumeric()).collect();
            let name = format!("{module}::{name}");
            assert!(listed.contains(&name), "{name} is missing in for_every_message");
        }
    }
}

#[test]
fn no_method_number_is_given_twice() {
    let mut seen = std::collections::BTreeMap::new();
    for (module, source) in SOURCES {
        for line in declared(source) {
            let Some((name, rest)) = line.split_once(" = ") else { continue };
            let number: u16 = rest.split(' ').next().unwrap().parse().unwrap();
            let range = match module {
                "coord" => 1..100,
                "data" => 200..300,
                _ if ["Recall", "LockFree"].contains(&name) => 300..400,
                _ => 100..200,
            };
            assert!(range.contains(&number), "{name} has number {number}");
            assert_eq!(seen.insert(number, name), None, "{name}");
        }
    }
    assert!(seen.len() > 50);
}
