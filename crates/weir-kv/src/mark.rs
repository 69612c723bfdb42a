//! The mark of a store that is one copy of several: the newest epoch that it knows, and a change of itself
//! that is in progress. Drawn in docs/format.md ("Journal").
//!
//! Invariant: the mark is durable before the change starts or the epoch is acknowledged. A store that never
//! had copies has none.

use crate::CommitSeq;
use std::path::{Path, PathBuf};
use weir_env::Disk;
use weir_proto::{Epoch, Error, Result};

const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"WEIR-CPY";
const BYTES: usize = 40;
const CHECKSUM_BYTES: usize = 4;

const NOTHING: u64 = 0;
const TRUNCATION: u64 = 1;
const IMPORT: u64 = 2;

/// A change that has begun, and must be completed at open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begun {
    Nothing,
    /// The records after this one are being removed.
    Truncation(CommitSeq),
    /// The whole state is being replaced: the directory cannot be used before that has ended.
    Import,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    /// The newest epoch that it knows.
    pub(crate) epoch: Epoch,
    pub(crate) begun: Begun,
}

fn path(dir: &Path) -> PathBuf {
    dir.join("copy")
}

/// None: the store never had copies.
pub(crate) fn read(disk: &dyn Disk, dir: &Path) -> Result<Option<Mark>> {
    let path = path(dir);
    if !disk.exists(&path) {
        return Ok(None);
    }
    let doing = format!("read {}", path.display());
    let bytes = disk.read(&path).map_err(|e| Error::from_io(&doing, &e))?;
    decode(&bytes).map(Some).map_err(|e| e.doing(doing))
}

pub(crate) fn write(disk: &dyn Disk, dir: &Path, mark: Mark) -> Result<()> {
    let path = path(dir);
    let written = disk.write_atomic(&path, &encode(mark));
    written.map_err(|e| Error::from_io(format!("write {}", path.display()), &e))
}

/// The store has no other copy.
pub(crate) fn remove(disk: &dyn Disk, dir: &Path) -> Result<()> {
    let path = path(dir);
    let removed = disk.remove_file(&path).and_then(|()| disk.sync_dir(dir));
    removed.map_err(|e| Error::from_io(format!("remove {}", path.display()), &e))
}

fn encode(mark: Mark) -> [u8; BYTES] {
    let (begun, to) = match mark.begun {
        Begun::Nothing => (NOTHING, 0),
        Begun::Truncation(seq) => (TRUNCATION, seq.0),
        Begun::Import => (IMPORT, 0),
    };
    let mut bytes = [0; BYTES];
    bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..16].copy_from_slice(&MAGIC);
    for (at, number) in [mark.epoch.0, begun, to].into_iter().enumerate() {
        bytes[16 + 8 * at..][..8].copy_from_slice(&number.to_le_bytes());
    }
    let crc = crate::format::crc32c(&bytes[CHECKSUM_BYTES..]);
    bytes[..CHECKSUM_BYTES].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Result<Mark> {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    if bytes.len() != BYTES {
        return Err(Error::damaged(format!("it has {} bytes instead of {BYTES}", bytes.len())));
    }
    if bytes[8..16] != MAGIC {
        return Err(Error::damaged("wrong magic"));
    }
    if word(0) != crate::format::crc32c(&bytes[CHECKSUM_BYTES..]) {
        return Err(Error::damaged("its checksum is wrong"));
    }
    if word(4) != VERSION {
        return Err(Error::unsupported(format!("format {}; this version knows {VERSION}", word(4))));
    }
    let begun = match (number(24), number(32)) {
        (NOTHING, _) => Begun::Nothing,
        (TRUNCATION, seq) => Begun::Truncation(CommitSeq(seq)),
        (IMPORT, _) => Begun::Import,
        (other, _) => return Err(Error::damaged(format!("{other} is nothing that can be begun"))),
    };
    Ok(Mark { epoch: Epoch(number(16)), begun })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These bytes are permanent: a change of them is a new format version.
    #[test]
    fn golden_mark() {
        let mark = Mark { epoch: Epoch(7), begun: Begun::Truncation(CommitSeq(300)) };
        let bytes = encode(mark);
        let numbers = b"\x07\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x2c\x01\0\0\0\0\0\0";
        assert_eq!(bytes[4..], [&b"\x01\0\0\0WEIR-CPY"[..], numbers].concat());
        assert_eq!(bytes[..4], crate::format::crc32c(&bytes[4..]).to_le_bytes());
        for begun in [Begun::Nothing, Begun::Import, Begun::Truncation(CommitSeq(0))] {
            let mark = Mark { epoch: Epoch(u64::MAX), begun };
            assert_eq!(decode(&encode(mark)), Ok(mark));
        }
    }

    #[test]
    fn each_flipped_bit_of_a_mark_is_seen() {
        let bytes = encode(Mark { epoch: Epoch(7), begun: Begun::Import });
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
    }
}
