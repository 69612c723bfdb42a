//! The header of one entry of a ring (`struct fuse_uring_req_header`): the kernel writes it before a
//! request's payload, and reads it before an answer's.
//!
//! Invariant: its lengths are checked before they are used. Knows nothing of io_uring.
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::ops::Range;

/// `fuse_in_header` of a request, `fuse_out_header` of an answer.
const IN_OUT: Range<usize> = 0..128;
/// The fixed arguments of a request, before names and data.
const ARGUMENT: Range<usize> = 128..256;
/// `struct fuse_uring_ent_in_out`: flags, the commit id, bytes of the payload.
const COMMIT_ID: Range<usize> = 264..272;
const PAYLOAD_BYTES: Range<usize> = 272..276;
pub const HEADER_BYTES: usize = 288;
const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: usize = 16;

/// A request's header, copied from the memory that the answer is written to.
#[repr(align(8))]
pub struct Header([u8; HEADER_BYTES]);

/// A header whose lengths are consistent.
pub struct Arrived {
    header: Header,
    argument_bytes: usize,
    pub payload_bytes: usize,
    /// The kernel's number of the request.
    pub unique: u64,
    /// The commit id for the answer.
    pub commit_id: u64,
}

fn u64_at(header: &[u8], at: Range<usize>) -> u64 {
    u64::from_le_bytes(header[at].try_into().expect("eight bytes"))
}

fn u32_at(header: &[u8], at: Range<usize>) -> u32 {
    u32::from_le_bytes(header[at].try_into().expect("four bytes"))
}

fn malformed(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, format!("a request from the kernel's ring {what}"))
}

impl Arrived {
    /// `payload_bytes_max`: the size of the payload's buffer.
    pub fn read(bytes: &[u8], payload_bytes_max: usize) -> Result<Arrived> {
        let bytes: [u8; HEADER_BYTES] =
            bytes.try_into().map_err(|_| malformed(format!("has a header of {} bytes", bytes.len())))?;
        let (unique, commit_id) = (u64_at(&bytes, 8..16), u64_at(&bytes, COMMIT_ID));
        let whole_bytes = u32_at(&bytes, 0..4) as usize;
        let payload_bytes = u32_at(&bytes, PAYLOAD_BYTES) as usize;
        if unique == 0 || commit_id == 0 {
            return Err(malformed("has no number to answer under".into()));
        }
        if payload_bytes > payload_bytes_max {
            return Err(malformed(format!(
                "{payload_bytes} payload bytes do not fit into {payload_bytes_max}"
            )));
        }
        let argument_bytes = whole_bytes.checked_sub(IN_HEADER_BYTES + payload_bytes);
        let Some(argument_bytes) = argument_bytes.filter(|bytes| *bytes <= ARGUMENT.len()) else {
            return Err(malformed(format!("of {whole_bytes} bytes has {payload_bytes} after its header")));
        };
        Ok(Arrived { header: Header(bytes), argument_bytes, payload_bytes, unique, commit_id })
    }

    pub fn in_header(&self) -> &[u8] {
        &self.header.0[..IN_HEADER_BYTES]
    }

    pub fn argument(&self) -> &[u8] {
        &self.header.0[ARGUMENT][..self.argument_bytes]
    }
}

/// The request that an answer is for: the parts begin with `fuse_out_header`.
pub fn answered(parts: &[IoSlice<'_>]) -> Result<u64> {
    match parts.first() {
        Some(header) if header.len() == OUT_HEADER_BYTES => Ok(u64_at(header, 8..16)),
        _ => Err(Error::new(ErrorKind::InvalidInput, "an answer has to begin with its header")),
    }
}

/// Writes an answer where the kernel reads it. One that does not fit becomes the error `EIO`.
pub fn write_answer(parts: &[&[u8]], header: &mut [u8], payload: &mut [u8]) {
    let [out, parts @ ..] = parts else { return };
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    header[IN_OUT][..OUT_HEADER_BYTES].copy_from_slice(&out[..OUT_HEADER_BYTES]);
    let fits = bytes <= payload.len();
    let payload_bytes = if fits { bytes } else { 0 };
    if fits {
        let mut at = 0;
        for part in parts {
            payload[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    } else {
        tracing::error!("an answer of {bytes} bytes does not fit into {}", payload.len());
        header[4..8].copy_from_slice(&(-libc::EIO).to_le_bytes());
    }
    header[0..4].copy_from_slice(&((OUT_HEADER_BYTES + payload_bytes) as u32).to_le_bytes());
    header[PAYLOAD_BYTES].copy_from_slice(&(payload_bytes as u32).to_le_bytes());
}

/// Bytes of the answer's payload.
pub fn answer_bytes(header: &[u8]) -> usize {
    u32_at(header, PAYLOAD_BYTES) as usize
}

/// The answer to a request that cannot be decoded.
pub fn write_error(unique: u64, header: &mut [u8]) {
    let mut out = [0; OUT_HEADER_BYTES];
    out[4..8].copy_from_slice(&(-libc::EIO).to_le_bytes());
    out[8..16].copy_from_slice(&unique.to_le_bytes());
    write_answer(&[&out], header, &mut []);
}

/// The numbers that let even a malformed request be answered.
pub fn numbers(bytes: &[u8]) -> Option<(u64, u64)> {
    let known = bytes.len() == HEADER_BYTES;
    let (unique, commit_id) = known.then(|| (u64_at(bytes, 8..16), u64_at(bytes, COMMIT_ID)))?;
    (unique != 0 && commit_id != 0).then_some((unique, commit_id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(whole: u32, unique: u64, commit_id: u64, payload: u32) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&whole.to_le_bytes());
        bytes[8..16].copy_from_slice(&unique.to_le_bytes());
        bytes[128..256].fill(5);
        bytes[COMMIT_ID].copy_from_slice(&commit_id.to_le_bytes());
        bytes[PAYLOAD_BYTES].copy_from_slice(&payload.to_le_bytes());
        bytes
    }

    #[test]
    fn a_header_says_where_its_request_is() {
        let arrived = Arrived::read(&header(40 + 16 + 7, 6, 8, 7), 4096).unwrap();
        assert_eq!((arrived.unique, arrived.commit_id, arrived.payload_bytes), (6, 8, 7));
        assert_eq!((arrived.in_header().len(), arrived.argument()), (40, &[5; 16][..]));
        assert_eq!(arrived.argument().as_ptr() as usize % 8, 0, "what is read by structures");
        assert_eq!(Arrived::read(&header(40, 2, 2, 0), 4096).unwrap().argument(), b"");
    }

    #[test]
    fn lengths_that_do_not_fit_together_are_refused() {
        let refused = |bytes: &[u8], what| match Arrived::read(bytes, 4096) {
            Ok(_) => panic!("accepted: {what}"),
            Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidData, "{what}: {e}"),
        };
        refused(&header(40, 2, 2, 0)[..287], "cut short");
        refused(&header(40, 0, 2, 0), "without a number");
        refused(&header(40, 2, 0, 0), "without a number to answer under");
        refused(&header(0, 2, 2, 0), "shorter than its header");
        refused(&header(40 + 129, 2, 2, 0), "a longer argument than there is room for");
        refused(&header(u32::MAX, 2, 2, 0), "too long");
        refused(&header(40 + 6, 2, 2, 7), "a longer payload than the whole");
        refused(&header(40 + 4097, 2, 2, 4097), "a longer payload than its buffer");
        refused(&header(40, 2, 2, u32::MAX), "a payload of 4 GiB");
    }

    #[test]
    fn an_answer_is_written_where_the_kernel_reads_it() {
        let mut out = [0; 16];
        out[4..8].copy_from_slice(&(-2_i32).to_le_bytes());
        out[8..16].copy_from_slice(&77_u64.to_le_bytes());
        let (mut header, mut payload) = (header(40, 77, 77, 3), vec![9; 8]);
        write_answer(&[&out, b"ab", b"", b"cde"], &mut header, &mut payload);
        assert_eq!(payload, b"abcde\x09\x09\x09");
        assert_eq!((u32_at(&header, PAYLOAD_BYTES), u32_at(&header, 0..4)), (5, 21));
        assert_eq!((u32_at(&header, 4..8) as i32, u64_at(&header, 8..16)), (-2, 77));
    }

    #[test]
    fn an_answer_that_does_not_fit_is_an_error() {
        let mut out = [0; 16];
        out[8..16].copy_from_slice(&77_u64.to_le_bytes());
        let (mut header, mut payload) = (header(40, 77, 77, 3), vec![9; 8]);
        write_answer(&[&out, b"abcdefghi"], &mut header, &mut payload);
        assert_eq!(payload, [9; 8]);
        assert_eq!((u32_at(&header, PAYLOAD_BYTES), u32_at(&header, 4..8) as i32), (0, -libc::EIO));
        write_error(5, &mut header);
        assert_eq!((u32_at(&header, 4..8) as i32, u64_at(&header, 8..16)), (-libc::EIO, 5));
    }
}
