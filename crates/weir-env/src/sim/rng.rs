//! Randomness of the simulated world: one independent stream for each name, all from one seed.
use std::time::Duration;

/// Not for untrusted input: only to detect that two runs differ.
pub(super) fn hash_bytes(bytes: &[u8]) -> u64 {
    // Four sums in parallel: each step depends on the previous one.
    let (blocks, rest) = bytes.as_chunks::<32>();
    let mut sums = [bytes.len() as u64, 1, 2, 3];
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        sums.iter_mut().zip(words).for_each(|(sum, word)| *sum = fold(*sum, u64::from_le_bytes(*word)));
    }
    let hash = sums.into_iter().reduce(|one, other| fold(mix(one), other)).unwrap_or_default();
    let (words, rest) = rest.as_chunks::<8>();
    let hash = words.iter().fold(hash, |h, w| fold(h, u64::from_le_bytes(*w)));
    mix(rest.iter().fold(hash, |h, b| fold(h, u64::from(*b))))
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// SplitMix64: small, seedable, good enough for choosing faults.
#[derive(Clone, Debug)]
pub(super) struct SplitMix(u64);

impl SplitMix {
    /// An independent stream for each name.
    pub(super) fn new(seed: u64, name: &str) -> SplitMix {
        SplitMix(mix(seed ^ hash_bytes(name.as_bytes())))
    }
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound.max(1))) >> 64) as u64
    }
    pub(super) fn per_million(&mut self, chance: u32) -> bool {
        chance > 0 && self.below(1_000_000) < u64::from(chance)
    }
    /// Uniform in `range`.
    pub(super) fn duration(&mut self, range: (Duration, Duration)) -> Duration {
        let (low, high) = (range.0.as_nanos() as u64, range.1.as_nanos() as u64);
        Duration::from_nanos(low + self.below(high.saturating_sub(low) + 1))
    }
}
pub(super) fn fold(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}
