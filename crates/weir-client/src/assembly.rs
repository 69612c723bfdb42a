//! A read that is assembled from parts: newer parts win, gaps are zeros. Pure.
use bytes::Bytes;
use std::collections::BTreeMap;

static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// The parts of a file for one read.
pub struct Assembly {
    pub start: u64,
    pub end: u64,
    have: BTreeMap<u64, Bytes>,
    pub missing: Vec<(u64, u64)>,
}

pub struct Fetched {
    /// (offset, bytes) in order; they cover the ranges and may go beyond, to block borders.
    pub parts: Vec<(u64, Bytes)>,
    /// Some ranges are zeros because nothing was written there.
    pub holes: bool,
}

impl Assembly {
    pub fn new(start: u64, end: u64) -> Assembly {
        assert!(start <= end, "a read of {start}..{end}");
        Assembly { start, end, have: BTreeMap::new(), missing: vec![(start, end)] }
    }
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }
    /// Adds parts of a source where no newer part covers the range.
    pub fn fill(&mut self, parts: impl IntoIterator<Item = (u64, Bytes)>) {
        for (at, bytes) in parts {
            if self.missing.is_empty() {
                return;
            }
            let end = at + bytes.len() as u64;
            let mut left = Vec::with_capacity(self.missing.len() + 1);
            for (a, b) in std::mem::take(&mut self.missing) {
                let (from, to) = (a.max(at), b.min(end));
                if from >= to {
                    left.push((a, b));
                    continue;
                }
                self.have.insert(from, bytes.slice((from - at) as usize..(to - at) as usize));
                if a < from {
                    left.push((a, from));
                }
                if to < b {
                    left.push((to, b));
                }
            }
            self.missing = left;
        }
    }
    pub fn fill_zeros(&mut self) {
        for (a, b) in std::mem::take(&mut self.missing) {
            self.have.extend(zeros(a, b));
        }
    }
    pub fn into_parts(self) -> Vec<Bytes> {
        let bytes = self.have.values().map(|b| b.len() as u64).sum::<u64>();
        assert_eq!(bytes, self.end - self.start, "each byte of a read comes from one part");
        self.have.into_values().collect()
    }
}

/// Zeros from `from` to `to`, in parts.
pub fn zeros(from: u64, to: u64) -> impl Iterator<Item = (u64, Bytes)> {
    let step = ZEROS.len();
    (from..to).step_by(step).map(move |at| (at, Bytes::from_static(&ZEROS[..step.min((to - at) as usize)])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_parts_win_and_gaps_are_zeros() {
        let mut a = Assembly::new(10, 30);
        a.fill([(12, Bytes::from_static(b"new"))]);
        a.fill([(0, Bytes::from_static(b"0123456789abcdef"))]);
        assert_eq!(a.missing, vec![(16, 30)]);
        a.fill_zeros();
        let all: Vec<u8> = a.into_parts().concat();
        assert_eq!(&all[..8], b"abnewf\0\0");
        assert_eq!(all.len(), 20);
    }
}
