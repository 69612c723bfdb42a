//! Seeded chance that breaks bytes, and finds bytes that a decoder accepts. Knows no message.
use weir_proto::{Reader, Wire};

/// Small, seeded, good enough to break bytes.
pub struct Dice(pub u64);

impl Dice {
    pub fn for_name(name: &str) -> Dice {
        Dice(
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)),
        )
    }
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n
    }
    /// Often small, as lengths, options and cases are.
    pub fn byte(&mut self) -> u8 {
        match self.below(8) {
            0..5 => 0,
            5 => self.below(4) as u8,
            6 => self.below(32) as u8,
            _ if self.below(200) == 0 => self.below(256) as u8, // seldom, or no text would be UTF-8
            _ => self.below(128) as u8,
        }
    }
    pub fn bytes(&mut self, max: usize) -> Vec<u8> {
        (0..self.below(max)).map(|_| self.byte()).collect()
    }

    /// The encoding of some value: bytes whose refused parts are thrown again until they are accepted.
    pub fn encoding<T: Wire>(&mut self) -> Option<Vec<u8>> {
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

    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
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
