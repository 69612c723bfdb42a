//! What a file must hold: its bytes as an ideal file system would have them, and which operation wrote each.
//!
//! Every written byte is a function of (operation, offset), so wrong bytes tell which operation they are from.
//! Knows nothing of clients, stripes or time.

/// Bytes that a reader of a mismatch is shown.
const SHOWN_BYTES: usize = 12;

/// The byte that operation `op` writes at `offset`; never 0, so that holes are told from data.
pub fn pattern(op: u64, offset: u64) -> u8 {
    let mixed = (op.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ offset).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    1 + ((mixed >> 40) % 255) as u8
}

pub fn bytes_of(op: u64, offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| pattern(op, at)).collect()
}

#[derive(Clone, Debug, Default)]
pub struct FileModel {
    bytes: Vec<u8>,
    history: Vec<Change>,
}

/// For telling where wrong bytes come from.
#[derive(Clone, Debug)]
struct Change {
    op: u64,
    what: String,
    offset: u64,
    len: u64,
}

impl FileModel {
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn write(&mut self, op: u64, who: &str, offset: u64, len: usize) {
        let end = offset as usize + len;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset as usize..end].copy_from_slice(&bytes_of(op, offset, len));
        self.note(op, format!("{who} wrote"), offset, len as u64);
    }

    pub fn zero(&mut self, op: u64, who: &str, offset: u64, len: u64) {
        let end = (offset + len).min(self.len());
        if offset < end {
            self.bytes[offset as usize..end as usize].fill(0);
        }
        self.note(op, format!("{who} punched"), offset, len);
    }

    pub fn truncate(&mut self, op: u64, who: &str, len: u64) {
        self.bytes.resize(len as usize, 0);
        self.note(op, format!("{who} set the size to"), len, 0);
    }

    pub fn note(&mut self, op: u64, what: String, offset: u64, len: u64) {
        self.history.push(Change { op, what, offset, len });
    }

    /// The bytes of `offset..offset + len` within the file.
    pub fn read(&self, offset: u64, len: usize) -> &[u8] {
        let from = offset.min(self.len()) as usize;
        &self.bytes[from..(from + len).min(self.bytes.len())]
    }

    /// Takes over `other`'s bytes of a range (for files whose ranges have owners).
    pub fn take(&mut self, other: &FileModel, offset: u64, len: usize) {
        let bytes = other.read(offset, len).to_vec();
        if bytes.is_empty() {
            return;
        }
        if self.bytes.len() < offset as usize + bytes.len() {
            self.bytes.resize(offset as usize + bytes.len(), 0);
        }
        self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
        self.history.extend(other.history.iter().filter(|c| c.touches(offset, len as u64)).cloned());
    }

    /// Whether a read of `len` bytes at `offset` may give `got`; the error says what is wrong and whose bytes came.
    pub fn check(&self, offset: u64, len: usize, got: &[u8]) -> Result<(), String> {
        let expected = self.read(offset, len);
        if expected == got {
            return Ok(());
        }
        if expected.len() != got.len() {
            let (wanted, got) = (expected.len(), got.len());
            return Err(format!(
                "read {len} at {offset}: {got} bytes instead of {wanted}\n{}",
                self.tail(offset, len as u64)
            ));
        }
        let first = expected.iter().zip(got).position(|(e, g)| e != g).expect("they differ");
        let wrong = expected.iter().zip(got).filter(|(e, g)| e != g).count();
        let last = expected.len()
            - 1
            - expected.iter().rev().zip(got.iter().rev()).position(|(e, g)| e != g).expect("they differ");
        let at = offset + first as u64;
        let show = |bytes: &[u8]| format!("{:?}", &bytes[first..bytes.len().min(first + SHOWN_BYTES)]);
        Err(format!(
            "{wrong} wrong bytes within {at}..={}, read {len} at {offset}, size {}: expected {} ({}), got {} ({})\n{}",
            offset + last as u64,
            self.len(),
            show(expected),
            self.origin(at, &expected[first..]),
            show(got),
            self.origin(at, &got[first..]),
            self.tail(at, (last - first + 1) as u64),
        ))
    }

    /// Which operation wrote such bytes at `offset`.
    fn origin(&self, offset: u64, bytes: &[u8]) -> String {
        let sample = &bytes[..bytes.len().min(SHOWN_BYTES)];
        if sample.iter().all(|b| *b == 0) {
            return "zeros".into();
        }
        let wrote = |c: &&Change| {
            let hits =
                sample.iter().enumerate().filter(|(i, b)| pattern(c.op, offset + *i as u64) == **b).count();
            hits * 4 >= sample.len() * 3
        };
        self.history
            .iter()
            .rev()
            .find(wrote)
            .map_or("of no operation".into(), |c| format!("of operation {}", c.op))
    }

    /// The last changes that touch a range.
    fn tail(&self, offset: u64, len: u64) -> String {
        let lines: Vec<String> = self
            .history
            .iter()
            .filter(|c| c.touches(offset, len))
            .map(|c| format!("  operation {}: {} {} at {}", c.op, c.what, c.len, c.offset))
            .collect();
        lines[lines.len().saturating_sub(14)..].join("\n")
    }
}

impl Change {
    fn touches(&self, offset: u64, len: u64) -> bool {
        self.len == 0 || (self.offset < offset + len && offset < self.offset + self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_whose_bytes_are_wrong() {
        let mut file = FileModel::default();
        file.write(1, "c0", 0, 1000);
        let old = file.read(0, 1000).to_vec();
        file.write(2, "c1", 100, 50);
        file.truncate(3, "c0", 2000);
        file.zero(4, "c0", 1990, 100);
        assert_eq!(file.len(), 2000);
        file.check(900, 200, &[bytes_of(1, 900, 100), vec![0; 100]].concat()).unwrap();
        let told = file.check(0, 1000, &old).unwrap_err();
        assert!(
            told.contains("within 100..=149")
                && told.contains("of operation 2")
                && told.contains("of operation 1"),
            "{told}"
        );
        assert!(file.check(1999, 50, &[0, 0]).unwrap_err().contains("2 bytes instead of 1"));
    }
}
