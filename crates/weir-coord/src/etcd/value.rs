//! The bytes of a value in etcd, little-endian.
//!
//! ```text
//! layout version (u8) = 1, kind (u8), id of the write (16), then
//!   kind 0: the value
//!   kind 1: its length (u64), its CRC32C (u32): the value is in parts under keys of their own
//! ```
//!
//! The id of the write is random: it lets a writer whose answer was lost recognize its own write.
use weir_proto::checksum::crc32c;
use weir_proto::{Error, Result};

/// etcd accepts requests of up to 1.5 MiB: a part, with some margin.
pub const PART_BYTES: usize = 1 << 20;
/// Far beyond the map of 4,800 targets, which takes about 2 MiB.
pub const VALUE_BYTES_MAX: usize = 16 << 20;

const VERSION: u8 = 1;
const WHOLE: u8 = 0;
const IN_PARTS: u8 = 1;
const HEAD: usize = 18;

/// Id of one write.
pub type WriteId = [u8; 16];

/// The entry under a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stored {
    pub write: WriteId,
    pub body: Body,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    Whole(Vec<u8>),
    InParts { bytes: u64, crc: u32 },
}

impl Stored {
    /// The entry for a value; a value that needs parts is not included.
    pub fn of(write: WriteId, value: &[u8]) -> Result<Stored> {
        if value.len() > VALUE_BYTES_MAX {
            return Err(Error::invalid(format!(
                "a value of {} bytes is too large for etcd: at most {VALUE_BYTES_MAX} are kept there",
                value.len()
            )));
        }
        let body = match value.len() <= PART_BYTES {
            true => Body::Whole(value.to_vec()),
            false => Body::InParts { bytes: value.len() as u64, crc: crc32c(value) },
        };
        Ok(Stored { write, body })
    }

    pub fn encode(&self) -> Vec<u8> {
        let kind = if matches!(self.body, Body::Whole(_)) { WHOLE } else { IN_PARTS };
        let mut out = vec![VERSION, kind];
        out.extend_from_slice(&self.write);
        match &self.body {
            Body::Whole(value) => out.extend_from_slice(value),
            Body::InParts { bytes, crc } => {
                out.extend_from_slice(&bytes.to_le_bytes());
                out.extend_from_slice(&crc.to_le_bytes());
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Stored> {
        let foreign = || Error::damaged("this value is not of a Weir coordinator");
        let (head, rest) = bytes.split_at_checked(HEAD).ok_or_else(foreign)?;
        if head[0] != VERSION {
            return Err(Error::unsupported(format!(
                "a value has layout version {}, this program knows {VERSION}",
                head[0]
            )));
        }
        let write = head[2..].try_into().map_err(|_| foreign())?;
        let body = match (head[1], rest.len()) {
            (WHOLE, _) => Body::Whole(rest.to_vec()),
            (IN_PARTS, 12) => {
                let bytes = u64::from_le_bytes(rest[..8].try_into().map_err(|_| foreign())?);
                if bytes > VALUE_BYTES_MAX as u64 {
                    return Err(foreign());
                }
                Body::InParts { bytes, crc: u32::from_le_bytes(rest[8..].try_into().map_err(|_| foreign())?) }
            }
            _ => return Err(foreign()),
        };
        Ok(Stored { write, body })
    }
}

/// The name of part `n`: the names sort in the order of the parts.
pub fn part_name(write: &WriteId, n: usize) -> String {
    format!("{}/{n:04}", hex(write))
}

pub fn hex(write: &WriteId) -> String {
    write.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::ErrorKind;

    #[test]
    fn the_bytes_in_etcd_stay_as_they_are() {
        let small = Stored::of([7; 16], b"abc").unwrap();
        let hex_of = |s: &Stored| s.encode().iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex_of(&small), "010007070707070707070707070707070707616263");
        let large = Stored::of([7; 16], &vec![1; PART_BYTES + 1]).unwrap();
        assert_eq!(hex_of(&large), "010107070707070707070707070707070707010010000000000077e22618");
        assert_eq!(part_name(&[7; 16], 3), "07070707070707070707070707070707/0003");
        for stored in [small, large] {
            assert_eq!(Stored::decode(&stored.encode()).unwrap(), stored);
        }
    }

    #[test]
    fn foreign_values_are_refused() {
        let good = Stored::of([7; 16], &vec![1; PART_BYTES + 1]).unwrap().encode();
        for cut in 0..good.len() {
            assert!(Stored::decode(&good[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(Stored::decode(&[&[2], &good[1..]].concat()).unwrap_err().kind, ErrorKind::Unsupported);
        assert_eq!(Stored::decode(&[&[1, 2], &good[2..]].concat()).unwrap_err().kind, ErrorKind::Damaged);
        assert_eq!(Stored::of([7; 16], &vec![0; VALUE_BYTES_MAX + 1]).unwrap_err().kind, ErrorKind::Invalid);
    }
}
