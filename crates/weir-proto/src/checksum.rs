//! CRC32C (Castagnoli) of bytes, of blocks, and of bytes whose parts' checksums are known.
//!
//! Data is read once for its block checksums; the checksum of the whole follows from them by combination.
use crate::data::CHECKSUM_BLOCK;
use crc_fast::{CrcAlgorithm::Crc32Iscsi, Digest};
use std::sync::OnceLock;

pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32Iscsi, bytes) as u32
}

/// The checksum of the bytes that `crc` covers followed by `bytes`; 0 is the checksum of no bytes.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

/// The checksum of A followed by B, from those of A and of B and B's length in bytes.
pub fn crc32c_combine(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    multiply(power_of_x8(len_b), crc_a) ^ crc_b
}

/// The checksum of each block of `block` bytes, the last one short; empty for no bytes.
pub fn block_crcs(bytes: &[u8], block: usize) -> Vec<u32> {
    bytes.chunks(block).map(crc32c).collect()
}

/// The checksum of `len` bytes from the checksums of their CHECKSUM_BLOCK blocks. `None` if the number of
/// blocks does not match `len`.
pub fn crc_of_blocks(crcs: &[u32], len: u64) -> Option<u32> {
    let block = u64::from(CHECKSUM_BLOCK);
    if crcs.len() as u64 != len.div_ceil(block) {
        return None;
    }
    let whole = (len / block) as usize;
    let crc = crcs[..whole].iter().fold(0, |crc, next| shift_block(crc) ^ next);
    Some(match crcs.get(whole) {
        Some(last) => crc32c_combine(crc, *last, len % block),
        None => crc,
    })
}

/// The polynomial, bits reflected.
const POLY: u32 = 0x82f6_3b78;
/// x^0 in the reflected form.
const ONE: u32 = 1 << 31;

/// Product of two polynomials modulo POLY (after zlib's `multmodp`).
fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        if a & (1 << bit) != 0 {
            product ^= b;
        }
        b = if b & 1 != 0 { (b >> 1) ^ POLY } else { b >> 1 };
    }
    product
}

/// x^(8n) modulo POLY, by squaring.
fn power_of_x8(mut n: u64) -> u32 {
    let (mut power, mut square) = (ONE, ONE >> 8);
    while n > 0 {
        if n & 1 != 0 {
            power = multiply(square, power);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    power
}

/// A checksum extended by one block of zeros. The product with a constant, by table lookups: one per byte of
/// the checksum, so that a 1 MiB payload is combined in about 0.1 µs.
fn shift_block(crc: u32) -> u32 {
    static TABLES: OnceLock<[[u32; 256]; 4]> = OnceLock::new();
    let tables = TABLES.get_or_init(|| {
        let shift = power_of_x8(u64::from(CHECKSUM_BLOCK));
        std::array::from_fn(|byte| std::array::from_fn(|v| multiply(shift, (v as u32) << (8 * byte))))
    });
    let bytes = crc.to_le_bytes();
    tables.iter().zip(bytes).fold(0, |sum, (table, byte)| sum ^ table[usize::from(byte)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_checksums() {
        // RFC 3720, B.4, and the check value of the CRC catalogue.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }

    proptest! {
        #[test]
        fn parts_give_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..100_000), share in 0..=100usize) {
            let (a, b) = bytes.split_at(bytes.len() * share / 100);
            let whole = crc32c(&bytes);
            prop_assert_eq!(crc32c_append(crc32c(a), b), whole);
            prop_assert_eq!(crc32c_combine(crc32c(a), crc32c(b), b.len() as u64), whole);
            let crcs = block_crcs(&bytes, CHECKSUM_BLOCK as usize);
            prop_assert_eq!(crc_of_blocks(&crcs, bytes.len() as u64), Some(whole));
            prop_assert_eq!(crc_of_blocks(&crcs, bytes.len() as u64 + u64::from(CHECKSUM_BLOCK)), None);
        }
    }
}
