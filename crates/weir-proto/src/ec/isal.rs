//! The edge to ISA-L (Intel's erasure-code library): safe functions with the lengths checked here.
//!
//! The only unsafe code of this crate. Each function asserts what the C side relies on.
use std::ffi::c_int;

mod ffi {
    use std::ffi::c_int;
    unsafe extern "C" {
        pub fn gf_gen_cauchy1_matrix(a: *mut u8, rows: c_int, k: c_int);
        pub fn gf_invert_matrix(input: *mut u8, output: *mut u8, n: c_int) -> c_int;
        pub fn gf_mul(a: u8, b: u8) -> u8;
        pub fn ec_init_tables(k: c_int, rows: c_int, a: *mut u8, tables: *mut u8);
        pub fn ec_encode_data(
            len: c_int,
            k: c_int,
            rows: c_int,
            tables: *mut u8,
            data: *mut *mut u8,
            coding: *mut *mut u8,
        );
    }
}

/// Bytes of table per coefficient.
const TABLE_BYTES: usize = 32;
/// A bound above any scheme: the C side counts in `int` and its matrices are of bytes.
const SIDE_MAX: usize = 255;

/// Coefficients prepared for [`Tables::apply`]: `rows` × `columns`.
#[derive(Clone, Debug)]
pub struct Tables {
    columns: usize,
    rows: usize,
    bytes: Vec<u8>,
}

impl Tables {
    /// From a matrix of `rows` × `columns` coefficients, row by row.
    pub fn new(columns: usize, rows: usize, matrix: &[u8]) -> Tables {
        assert!(columns <= SIDE_MAX && rows <= SIDE_MAX);
        assert_eq!(matrix.len(), columns * rows);
        let mut bytes = vec![0; TABLE_BYTES * columns * rows];
        // SAFETY: reads columns * rows bytes at `matrix` (length asserted; the C side does not write to it)
        // and writes 32 per coefficient at `bytes`, which is as long.
        unsafe {
            ffi::ec_init_tables(
                columns as c_int,
                rows as c_int,
                matrix.as_ptr().cast_mut(),
                bytes.as_mut_ptr(),
            );
        }
        Tables { columns, rows, bytes }
    }

    /// Sets each output to its row of the matrix times the inputs, byte by byte. All are `len` long.
    pub fn apply(&self, len: usize, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert!(c_int::try_from(len).is_ok());
        assert_eq!(inputs.len(), self.columns);
        assert_eq!(outputs.len(), self.rows);
        assert!(inputs.iter().all(|b| b.len() == len));
        assert!(outputs.iter().all(|b| b.len() == len));
        if len == 0 || self.rows == 0 || self.columns == 0 {
            outputs.iter_mut().for_each(|o| o.fill(0));
            return;
        }
        // Fixed arrays: no allocation per stripe.
        let mut data = [std::ptr::null_mut::<u8>(); SIDE_MAX];
        let mut coding = [std::ptr::null_mut::<u8>(); SIDE_MAX];
        inputs.iter().zip(&mut data).for_each(|(b, p)| *p = b.as_ptr().cast_mut());
        outputs.iter_mut().zip(&mut coding).for_each(|(b, p)| *p = b.as_mut_ptr());
        // SAFETY: the tables were made for rows × columns; `data` has `columns` and `coding` `rows` pointers,
        // each to `len` bytes (asserted above); inputs are only read, and outputs are exclusive borrows, so
        // nothing overlaps.
        unsafe {
            ffi::ec_encode_data(
                len as c_int,
                self.columns as c_int,
                self.rows as c_int,
                self.bytes.as_ptr().cast_mut(),
                data.as_mut_ptr(),
                coding.as_mut_ptr(),
            );
        }
    }
}

/// k + m rows of k coefficients: the identity, then a Cauchy matrix, of which every square part can be
/// inverted.
pub fn cauchy_matrix(k: usize, m: usize) -> Vec<u8> {
    assert!(k + m <= SIDE_MAX);
    let mut matrix = vec![0; (k + m) * k];
    // SAFETY: writes (k + m) * k bytes, the length of `matrix`.
    unsafe { ffi::gf_gen_cauchy1_matrix(matrix.as_mut_ptr(), (k + m) as c_int, k as c_int) };
    matrix
}

/// The inverse of an n × n matrix, unless it is singular.
pub fn invert(mut matrix: Vec<u8>, n: usize) -> Option<Vec<u8>> {
    assert!(n <= SIDE_MAX);
    assert_eq!(matrix.len(), n * n);
    let mut inverse = vec![0; n * n];
    // SAFETY: reads and overwrites n * n bytes of `matrix` (ours) and writes as many at `inverse`.
    let failed = unsafe { ffi::gf_invert_matrix(matrix.as_mut_ptr(), inverse.as_mut_ptr(), n as c_int) };
    (failed == 0).then_some(inverse)
}

/// Product in GF(2^8).
pub fn multiply(a: u8, b: u8) -> u8 {
    // SAFETY: a pure function of two numbers.
    unsafe { ffi::gf_mul(a, b) }
}
