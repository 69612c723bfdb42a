//! The file of an export: a namespace's whole state. Drawn in docs/format.md ("Export of a namespace").
//!
//! Invariant: a truncated or changed file is refused; it ends with the number of its entries. Knows nothing
//! of the entries' meaning, and of no disk.
use std::io::{Read, Write};
use weir_kv::Pairs;
use weir_proto::checksum::crc32c;
use weir_proto::copies::{decode_pairs, encode_pairs};
use weir_proto::data::PAYLOAD_MAX;
use weir_proto::export::ExportHead;
use weir_proto::{Error, Result, Wire};

const MAGIC: [u8; 8] = *b"WEIR-NSX";
const VERSION: u32 = 1;
/// Longest head: names and a release.
const HEAD_MAX: u32 = 4096;
/// The approximate size of a part of a file.
pub const PART_BYTES: usize = 2 << 20;

/// The amount written, or read.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Totals {
    pub entries: u64,
    /// The bytes of keys and values.
    pub bytes: u64,
}

impl Totals {
    fn count(&mut self, pairs: &Pairs) {
        self.entries += pairs.len() as u64;
        self.bytes += pairs.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum::<u64>();
    }
}

/// Writes a file: the head, parts, the end.
pub struct Writer<W> {
    to: W,
    totals: Totals,
}

impl<W: Write> Writer<W> {
    pub fn begin(mut to: W, head: &ExportHead) -> Result<Writer<W>> {
        let body = head.to_bytes();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(&crc32c(&bytes).to_le_bytes());
        put(&mut to, &bytes)?;
        Ok(Writer { to, totals: Totals::default() })
    }

    /// The next entries, in the order of their keys; at least one.
    pub fn part(&mut self, pairs: &Pairs) -> Result<()> {
        let body = encode_pairs(pairs)?;
        self.totals.count(pairs);
        put(&mut self.to, &(body.len() as u32).to_le_bytes())?;
        put(&mut self.to, &crc32c(&body).to_le_bytes())?;
        put(&mut self.to, &body)
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    pub fn end(mut self) -> Result<(W, Totals)> {
        let body = [self.totals.entries.to_le_bytes(), self.totals.bytes.to_le_bytes()].concat();
        put(&mut self.to, &0u32.to_le_bytes())?;
        put(&mut self.to, &crc32c(&body).to_le_bytes())?;
        put(&mut self.to, &body)?;
        Ok((self.to, self.totals))
    }
}

/// Reads a file and checks all of it.
pub struct Reader<R> {
    from: R,
    totals: Totals,
}

impl<R: Read> Reader<R> {
    pub fn open(mut from: R) -> Result<(Reader<R>, ExportHead)> {
        let mut bytes = take(&mut from, 16)?;
        if bytes[..8] != MAGIC {
            return Err(Error::invalid("this is not the export of a namespace"));
        }
        let version = word(&bytes[8..12]);
        if version != VERSION {
            return Err(Error::unsupported(format!(
                "the export has format {version}; this program knows {VERSION}"
            )));
        }
        let length = word(&bytes[12..16]);
        if length > HEAD_MAX {
            return Err(damaged("its head is too long"));
        }
        bytes.extend(take(&mut from, length as usize)?);
        if word(&take(&mut from, 4)?) != crc32c(&bytes) {
            return Err(damaged("its head fails its checksum"));
        }
        let head = ExportHead::from_bytes(&bytes[16..]).map_err(|e| damaged(&e.to_string()))?;
        Ok((Reader { from, totals: Totals::default() }, head))
    }

    /// The next entries; `None`: all were read, and nothing follows.
    pub fn part(&mut self) -> Result<Option<Pairs>> {
        let head = take(&mut self.from, 8)?;
        let (length, crc) = (word(&head[..4]), word(&head[4..]));
        if length > PAYLOAD_MAX {
            return Err(damaged("a part is too long"));
        }
        let body = take(&mut self.from, if length == 0 { 16 } else { length as usize })?;
        if crc32c(&body) != crc {
            return Err(damaged(&format!("it fails its checksum behind entry {}", self.totals.entries)));
        }
        if length > 0 {
            let pairs = decode_pairs(&body).map_err(|e| damaged(&e.to_string()))?;
            self.totals.count(&pairs);
            return Ok(Some(pairs));
        }
        let own = [self.totals.entries.to_le_bytes(), self.totals.bytes.to_le_bytes()].concat();
        if body != own {
            return Err(damaged("it has other entries than it ends with"));
        }
        match self.from.read(&mut [0]) {
            Ok(0) => Ok(None),
            Ok(_) => Err(damaged("something follows its end")),
            Err(e) => Err(Error::from_io("read the export", &e)),
        }
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }
}

fn put(to: &mut impl Write, bytes: &[u8]) -> Result<()> {
    to.write_all(bytes).map_err(|e| Error::from_io("write the export", &e))
}

fn take(from: &mut impl Read, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => damaged("it was cut off: it has no end"),
        _ => Error::from_io("read the export", &e),
    })?;
    Ok(bytes)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("4 bytes"))
}

fn damaged(what: &str) -> Error {
    Error::damaged(format!("the export is damaged: {what}")).hint("take another export")
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::meta::Time;
    use weir_proto::{ClusterId, ErrorKind, NamespaceId, NamespaceUuid};

    fn head() -> ExportHead {
        ExportHead {
            cluster: ClusterId([1; 16]),
            namespace: NamespaceId(1),
            name: "root".into(),
            uuid: NamespaceUuid([2; 16]),
            changes: 3,
            taken: Time { nanos: 4 },
            release: "0.1".into(),
        }
    }
    fn pairs() -> Pairs {
        vec![(b"a".to_vec(), b"1".to_vec()), (b"b".to_vec(), vec![])]
    }
    fn file() -> Vec<u8> {
        let mut writer = Writer::begin(Vec::new(), &head()).unwrap();
        writer.part(&pairs()).unwrap();
        writer.part(&vec![(b"c".to_vec(), b"345".to_vec())]).unwrap();
        let (bytes, totals) = writer.end().unwrap();
        assert_eq!(totals, Totals { entries: 3, bytes: 7 });
        bytes
    }
    fn read(bytes: &[u8]) -> Result<Vec<Pairs>> {
        let (mut reader, found) = Reader::open(bytes)?;
        assert_eq!(found, head());
        let mut parts = Vec::new();
        while let Some(part) = reader.part()? {
            parts.push(part);
        }
        Ok(parts)
    }

    #[test]
    fn an_export_is_read_as_it_was_written() {
        let bytes = file();
        assert_eq!(read(&bytes).unwrap(), [pairs(), vec![(b"c".to_vec(), b"345".to_vec())]]);
        // The bytes of docs/format.md.
        let head = [
            &b"WEIR-NSX\x01\0\0\0\x43\0\0\0"[..],
            &[1; 16],
            b"\x01\0\0\0\x04\0\0\0root",
            &[2; 16],
            b"\x03\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x03\0\0\x000.1",
        ]
        .concat();
        assert_eq!(bytes[..head.len()], head);
        let part = &bytes[head.len() + 4..][..27];
        assert_eq!(part[..4], 19u32.to_le_bytes());
        assert_eq!(part[8..], *b"\x01\0\0\0\x01\0\0\0a1\x01\0\0\0\0\0\0\0b");
        assert_eq!(bytes[bytes.len() - 24..][..4], [0; 4]);
        assert_eq!(bytes[bytes.len() - 16..], *b"\x03\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");
        assert_eq!(crc32c(&bytes), 311_829_455, "golden checksum of the whole file");
    }

    #[test]
    fn a_truncated_changed_or_longer_export_is_refused() {
        let bytes = file();
        for length in 0..bytes.len() {
            assert_eq!(read(&bytes[..length]).unwrap_err().kind, ErrorKind::Damaged, "{length}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(read(&changed).is_err(), "{at}");
        }
        assert!(read(&[&bytes[..], b"x"].concat()).unwrap_err().context.contains("follows"));
        assert_eq!(read(&[0; 99]).unwrap_err().kind, ErrorKind::Invalid);
        let mut newer = bytes;
        newer[8] = 2;
        assert_eq!(read(&newer).unwrap_err().kind, ErrorKind::Unsupported);
    }
}
