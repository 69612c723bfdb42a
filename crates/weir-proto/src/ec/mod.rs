//! Erasure code: parity cells from data cells, and lost cells from the remaining ones.
//!
//! Reed–Solomon with a Cauchy matrix over GF(2^8); with one data cell the parity cells are copies of it.
//! Cells are treated as zero-padded to the length of the longest, but the zeros are never written out: each
//! range of bytes is computed from the cells that reach into it.
#[allow(unsafe_code)]
mod isal;

use crate::map::Scheme;
use crate::{Error, Result};
use isal::Tables;

/// Encodes and reconstructs stripes of one scheme. Make one per scheme and share it.
#[derive(Clone, Debug)]
pub struct Coder {
    scheme: Scheme,
    /// (k + m) × k, row by row: the identity, then the parity rows.
    matrix: Vec<u8>,
    /// Tables of the parity rows, for stripes whose cells are all equally long.
    parity_tables: Tables,
}

impl Coder {
    pub fn new(scheme: Scheme) -> Result<Coder> {
        scheme.check()?;
        let (k, m) = (usize::from(scheme.data), usize::from(scheme.parity));
        let matrix = if k == 1 { vec![1; 1 + m] } else { isal::cauchy_matrix(k, m) };
        let parity_tables = Tables::new(k, m, &matrix[k * k..]);
        Ok(Coder { scheme, matrix, parity_tables })
    }
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Computes all m parity cells, which are equally long and at least as long as each of the k data cells.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) -> Result<()> {
        let (k, m) = (usize::from(self.scheme.data), usize::from(self.scheme.parity));
        let len = parity.first().map_or(0, |p| p.len());
        if data.len() != k || parity.len() != m {
            return Err(Error::invalid(format!(
                "encode {}: {} data and {} parity cells given",
                self.scheme,
                data.len(),
                parity.len()
            )));
        }
        if m > 0 && (data.iter().any(|d| d.len() > len) || parity.iter().any(|p| p.len() != len)) {
            return Err(Error::invalid(format!(
                "encode {}: parity cells must be equally long, and no data cell longer",
                self.scheme
            )));
        }
        if data.iter().all(|d| d.len() == len) && k > 1 {
            self.parity_tables.apply(len, data, parity);
        } else {
            combine(&self.matrix[k * k..], data, parity);
        }
        Ok(())
    }

    /// Computes the cells `wanted` (data or parity, by index) from any k of the fragments `present`, as long
    /// as the buffers in `out` are. Fragments may be shorter than their cell. `Damaged` when fewer than k are
    /// given.
    pub fn reconstruct(
        &self,
        present: &[(usize, &[u8])],
        wanted: &[usize],
        out: &mut [&mut [u8]],
    ) -> Result<()> {
        let (k, width) = (usize::from(self.scheme.data), self.scheme.width());
        let sources = distinct(present, k, width);
        if sources.len() < k {
            return Err(Error::damaged(format!(
                "reconstruct {}: {} of the {k} fragments needed are left",
                self.scheme,
                sources.len()
            )));
        }
        if wanted.len() != out.len() || wanted.iter().any(|w| *w >= width) {
            return Err(Error::invalid(format!("reconstruct {}: cells {wanted:?} wanted", self.scheme)));
        }
        let rows = self.decoding_rows(&sources, wanted)?;
        let cells: Vec<&[u8]> = sources.iter().map(|(_, bytes)| *bytes).collect();
        if out.windows(2).all(|pair| pair[0].len() == pair[1].len()) {
            combine(&rows, &cells, out);
        } else {
            rows.chunks(k).zip(out).for_each(|(row, cell)| combine(row, &cells, &mut [cell]));
        }
        Ok(())
    }

    /// For each wanted cell a row of k coefficients over the sources.
    fn decoding_rows(&self, sources: &[(usize, &[u8])], wanted: &[usize]) -> Result<Vec<u8>> {
        let k = sources.len();
        let row = |i: usize| &self.matrix[i * k..(i + 1) * k];
        let square: Vec<u8> = sources.iter().flat_map(|(i, _)| row(*i).iter().copied()).collect();
        let inverse = isal::invert(square, k).ok_or_else(|| {
            Error::damaged(format!("reconstruct {}: these fragments do not determine it", self.scheme))
        })?;
        let product = |w: usize, column: usize| {
            row(w).iter().enumerate().fold(0, |sum, (i, c)| sum ^ isal::multiply(*c, inverse[i * k + column]))
        };
        Ok(wanted.iter().flat_map(|w| (0..k).map(|column| product(*w, column)).collect::<Vec<_>>()).collect())
    }
}

/// The first `k` fragments with different, possible indices.
fn distinct<'a>(present: &[(usize, &'a [u8])], k: usize, width: usize) -> Vec<(usize, &'a [u8])> {
    let mut chosen: Vec<(usize, &[u8])> = Vec::with_capacity(k);
    for (index, bytes) in present {
        if chosen.len() < k && *index < width && chosen.iter().all(|(i, _)| i != index) {
            chosen.push((*index, bytes));
        }
    }
    chosen
}

/// Sets each output (all equally long) to its row of `matrix` times the inputs, which are cut or zero-padded
/// to the outputs' length: the outputs are computed range by range between the ends of inputs.
fn combine(matrix: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
    let len = outputs.first().map_or(0, |o| o.len());
    let mut ends: Vec<usize> = inputs.iter().map(|i| i.len().min(len)).chain([len]).collect();
    ends.sort_unstable();
    ends.dedup();
    let mut start = 0;
    for end in ends.into_iter().filter(|end| *end > 0) {
        combine_range(matrix, inputs, outputs, start, end);
        start = end;
    }
}

/// `combine` for one range that each input either covers or does not reach.
fn combine_range(matrix: &[u8], inputs: &[&[u8]], outputs: &mut [&mut [u8]], start: usize, end: usize) {
    let columns: Vec<usize> = (0..inputs.len()).filter(|i| inputs[*i].len() >= end).collect();
    let parts: Vec<&[u8]> = columns.iter().map(|i| &inputs[*i][start..end]).collect();
    let mut results: Vec<&mut [u8]> = outputs.iter_mut().map(|o| &mut o[start..end]).collect();
    let coefficients: Vec<u8> =
        matrix.chunks(inputs.len()).flat_map(|row| columns.iter().map(|i| row[*i])).collect();
    match (&parts[..], &coefficients[..]) {
        // Copies: replicas, and a cell that is present already.
        ([part], ones) if ones.iter().all(|c| *c == 1) => {
            results.iter_mut().for_each(|r| r.copy_from_slice(part))
        }
        _ => Tables::new(parts.len(), results.len(), &coefficients).apply(end - start, &parts, &mut results),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parity by the definition, one byte at a time.
    fn plain_parity(coder: &Coder, data: &[Vec<u8>], row: usize, at: usize) -> u8 {
        let k = data.len();
        (0..k).fold(0, |sum, i| {
            sum ^ isal::multiply(coder.matrix[row * k + i], data[i].get(at).copied().unwrap_or(0))
        })
    }

    fn encoded(coder: &Coder, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let len = data.iter().map(Vec::len).max().unwrap();
        let mut parity = vec![vec![0xaa; len]; usize::from(coder.scheme().parity)];
        let cells: Vec<&[u8]> = data.iter().map(|d| &d[..]).collect();
        coder.encode(&cells, &mut parity.iter_mut().map(|p| &mut p[..]).collect::<Vec<_>>()).unwrap();
        parity
    }

    fn survives_every_loss(scheme: &str, lens: &[usize], seed: u64) {
        let coder = Coder::new(scheme.parse().unwrap()).unwrap();
        let (k, width) = (usize::from(coder.scheme().data), coder.scheme().width());
        let mut state = seed | 1;
        let mut byte = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let data: Vec<Vec<u8>> =
            (0..k).map(|i| (0..lens[i % lens.len()]).map(|_| byte()).collect()).collect();
        let parity = encoded(&coder, &data);
        for (p, cell) in parity.iter().enumerate() {
            for (at, byte) in cell.iter().enumerate() {
                assert_eq!(*byte, plain_parity(&coder, &data, k + p, at), "parity {p} byte {at}");
            }
        }
        let all: Vec<Vec<u8>> = data.iter().chain(&parity).cloned().collect();
        for lost in 0u32..1 << width {
            let wanted: Vec<usize> = (0..width).filter(|i| lost & (1 << i) != 0).collect();
            let present: Vec<(usize, &[u8])> =
                (0..width).filter(|i| lost & (1 << i) == 0).map(|i| (i, &all[i][..])).collect();
            let mut out: Vec<Vec<u8>> = wanted.iter().map(|i| vec![0x55; all[*i].len()]).collect();
            let mut slices: Vec<&mut [u8]> = out.iter_mut().map(|o| &mut o[..]).collect();
            let result = coder.reconstruct(&present, &wanted, &mut slices);
            if wanted.len() > width - k {
                assert_eq!(result.unwrap_err().kind, crate::ErrorKind::Damaged);
                continue;
            }
            result.unwrap();
            for (cell, index) in out.iter().zip(&wanted) {
                assert_eq!(cell, &all[*index], "cell {index} with {wanted:?} lost");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn every_pattern_of_losses_is_survived(
            scheme in prop::sample::select(vec!["ec:4+2", "ec:8+2", "ec:2+1", "ec:3+3", "replica:3", "single"]),
            lens in prop::collection::vec(0usize..300, 1..9),
            seed: u64,
        ) {
            survives_every_loss(scheme, &lens, seed);
        }
    }

    #[test]
    fn whole_cells_and_a_short_tail() {
        for scheme in ["ec:4+2", "ec:8+2", "ec:2+1", "replica:3", "single"] {
            survives_every_loss(scheme, &[4096], 1);
            survives_every_loss(scheme, &[1000, 1000, 37, 0], 2);
        }
    }

    #[test]
    fn cells_may_be_padded_with_zeros_instead() {
        let coder = Coder::new("ec:4+2".parse().unwrap()).unwrap();
        let short = vec![vec![7u8; 500], vec![9; 500], vec![3; 129], vec![]];
        let mut long = short.clone();
        long.iter_mut().for_each(|c| c.resize(500, 0));
        assert_eq!(encoded(&coder, &short), encoded(&coder, &long));
    }

    #[test]
    fn wrong_use_is_refused() {
        let coder = Coder::new("ec:2+1".parse().unwrap()).unwrap();
        let mut short = [0u8; 3];
        assert!(coder.encode(&[b"1234", b"1234"], &mut [&mut short]).is_err());
        assert!(coder.encode(&[b"123"], &mut [&mut short]).is_err());
        assert!(coder.reconstruct(&[(0, b"123"), (0, b"123")], &[1], &mut [&mut short]).is_err());
        assert!(coder.reconstruct(&[(0, b"123"), (9, b"123")], &[1], &mut [&mut short]).is_err());
        assert!(coder.reconstruct(&[(0, b"123"), (2, b"123")], &[3], &mut [&mut short]).is_err());
        assert!(Coder::new(Scheme { data: 0, parity: 1 }).is_err());
    }
}
