//! Self-describing bytes: an object's content is a seeded pattern, and each 4 KiB of it begins with a header
//! of object, offset and seed. So a block that is stale, misplaced, torn or of another object is detected.
//!
//! Filling is slow and is done before the clock starts; stamping a filled buffer for another object writes 32
//! bytes per 4 KiB.

/// A header is at every multiple of this from an object's start.
pub(crate) const BLOCK: usize = 4096;
const HEADER_BYTES: usize = 32;
/// The pattern repeats after this: longer than any cell, so that swapped cells differ even without headers.
const PATTERN_BYTES: usize = (8 << 20) + BLOCK;
const MAGIC: u64 = 0x5745_4952_4c4f_4144;

pub(crate) struct Pattern {
    seed: u64,
    bytes: Vec<u8>,
}

/// The first mismatch in an object's bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) offset: u64,
}

impl Pattern {
    pub(crate) fn new(seed: u64) -> Pattern {
        let mut state = seed ^ MAGIC;
        let mut bytes = Vec::with_capacity(PATTERN_BYTES);
        while bytes.len() < PATTERN_BYTES {
            // SplitMix64 (Steele, Lea, Flood 2014): incompressible, and the same on all machines.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
        }
        Pattern { seed, bytes }
    }

    fn header_of(&self, object: u64, offset: u64) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        for (at, number) in [MAGIC, object, offset, self.seed].into_iter().enumerate() {
            header[at * 8..at * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        header
    }

    /// The pattern of the block at `offset`.
    fn body(&self, offset: u64, len: usize) -> &[u8] {
        let at = (offset % (PATTERN_BYTES - BLOCK) as u64) as usize;
        &self.bytes[at..at + len]
    }

    /// Writes the bytes of `object` from `offset` (a multiple of 4 KiB) on.
    pub(crate) fn fill(&self, object: u64, offset: u64, buf: &mut [u8]) {
        for (i, block) in buf.chunks_mut(BLOCK).enumerate() {
            let len = block.len();
            block.copy_from_slice(self.body(offset + (i * BLOCK) as u64, len));
        }
        self.write_headers(object, offset, buf);
    }

    /// Rewrites the headers of a buffer that was filled for an offset with the same pattern for `object`,
    /// `offset`.
    pub(crate) fn write_headers(&self, object: u64, offset: u64, buf: &mut [u8]) {
        for (i, block) in buf.chunks_mut(BLOCK).enumerate() {
            let n = block.len().min(HEADER_BYTES);
            block[..n].copy_from_slice(&self.header_of(object, offset + (i * BLOCK) as u64)[..n]);
        }
    }

    /// A buffer filled for one offset can be stamped for another if they differ by a multiple of this.
    pub(crate) fn period() -> u64 {
        (PATTERN_BYTES - BLOCK) as u64
    }

    pub(crate) fn check(&self, object: u64, offset: u64, buf: &[u8]) -> Result<(), Mismatch> {
        for (i, block) in buf.chunks(BLOCK).enumerate() {
            let at = offset + (i * BLOCK) as u64;
            let n = block.len().min(HEADER_BYTES);
            if block[..n] != self.header_of(object, at)[..n] || block[n..] != self.body(at, block.len())[n..]
            {
                return Err(Mismatch { offset: at });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_object_place_seed_or_bit_is_seen() {
        let pattern = Pattern::new(1);
        let mut buf = vec![0; 10_000];
        pattern.fill(7, 8192, &mut buf);
        assert_eq!(pattern.check(7, 8192, &buf), Ok(()));
        assert_eq!(pattern.check(8, 8192, &buf), Err(Mismatch { offset: 8192 }));
        assert_eq!(pattern.check(7, 4096, &buf), Err(Mismatch { offset: 4096 }));
        assert!(Pattern::new(2).check(7, 8192, &buf).is_err());
        buf[9_999] ^= 1;
        assert_eq!(pattern.check(7, 8192, &buf), Err(Mismatch { offset: 8192 + 8192 }));
        buf[9_999] ^= 1;
        pattern.write_headers(9, 8192 + Pattern::period(), &mut buf);
        assert_eq!(pattern.check(9, 8192 + Pattern::period(), &buf), Ok(()));
        assert!(pattern.check(7, 8192, &[0; 4096]).is_err(), "zeros belong to no writer");
    }
}
