//! Recall of evicted bytes: read from home, verified against the receipts from when they were shipped,
//! written into the volume.
//!
//! Invariant: bytes that do not match the checksum of their receipt never reach a reader; the error names the
//! file and the range.
use crate::mover::expect;
use crate::{Expect, Fault, FaultKind, Home, HomePath, HomeReader, Outcome};
use bytes::{Bytes, BytesMut};
use weir_client::{Client, Recall};
use weir_proto::checksum::crc32c_append;
use weir_proto::recall::Learned;
use weir_proto::relation::{HomePlace, RECEIPT_BLOCK, Receipt};
use weir_proto::{Error, Result};

/// Bytes read at a time, at least.
const PART_BYTES: u64 = 4 << 20;
/// How often a file that movers write meanwhile is reopened for one part of it.
const OPENED_AGAIN_MAX: usize = 8;

/// A block of a receipt: range and checksum of the bytes that were shipped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    start: u64,
    end: u64,
    sum: u32,
}

/// The blocks that overlap `from..to`, in order.
pub fn blocks(receipts: &[Receipt], from: u64, to: u64) -> Vec<Block> {
    let mut found: Vec<Block> = receipts
        .iter()
        .flat_map(|receipt| {
            receipt.sums.iter().enumerate().map(|(i, sum)| {
                let start = receipt.offset + i as u64 * RECEIPT_BLOCK;
                let end = (start + RECEIPT_BLOCK).min(receipt.offset + receipt.len);
                Block { start, end, sum: *sum }
            })
        })
        .filter(|block| block.start < to && from < block.end)
        .collect();
    found.sort_by_key(|block| block.start);
    found
}

/// Compares bytes that arrive in order with the blocks that contain them.
pub struct Check {
    blocks: std::vec::IntoIter<Block>,
    now: Option<(Block, u32)>,
}

impl Check {
    pub fn new(blocks: Vec<Block>) -> Check {
        let mut blocks = blocks.into_iter();
        let now = blocks.next().map(|block| (block, 0));
        Check { blocks, now }
    }
    /// The next bytes, from `at` on; an error names the block that does not match.
    pub fn feed(&mut self, mut at: u64, mut bytes: &[u8]) -> Result<()> {
        while let Some((block, sum)) = &mut self.now {
            let skipped = block.start.saturating_sub(at).min(bytes.len() as u64);
            (at, bytes) = (at + skipped, &bytes[skipped as usize..]);
            // Of blocks that overlap, the later one may end before these bytes: it does not match.
            let n = block.end.saturating_sub(at).min(bytes.len() as u64) as usize;
            *sum = crc32c_append(*sum, &bytes[..n]);
            (at, bytes) = (at + n as u64, &bytes[n..]);
            if at < block.end {
                return Ok(());
            }
            if *sum != block.sum {
                return Err(Error::damaged(format!(
                    "bytes {} to {} at home are not what was shipped: their checksum is {sum:08x}, not {:08x}",
                    block.start, block.end, block.sum
                )));
            }
            self.now = self.blocks.next().map(|block| (block, 0));
        }
        Ok(())
    }
}

/// Why bytes could not be recalled, and whether a retry may help.
pub struct Failed {
    pub why: String,
    pub retry: bool,
    /// Home was not in the expected state: perhaps a mover has just written there.
    pub diverged: bool,
}
impl From<Fault> for Failed {
    fn from(fault: Fault) -> Failed {
        // A missing permission at home does not change by a retry: readers get the error at once, and may try
        // again.
        let retry = !matches!(fault, Fault::Diverged(_) | Fault::Broken(_) | Fault::Denied(_));
        let diverged = matches!(fault, Fault::Diverged(_));
        Failed { why: fault.to_string(), retry, diverged }
    }
}

/// A file at home that is read. If movers may be writing it, other bytes may change meanwhile: then it is
/// reopened, and is still the same file. Receipts verify that it has the bytes that were shipped.
struct Source<'a> {
    home: &'a dyn Home,
    path: &'a HomePath,
    expect: Expect,
    reader: Box<dyn HomeReader>,
}

impl<'a> Source<'a> {
    async fn open(home: &'a dyn Home, path: &'a HomePath, expect: Expect) -> Outcome<Source<'a>> {
        let reader = home.open_read(path, &expect).await?;
        Ok(Source { home, path, expect, reader })
    }

    async fn read(&mut self, at: u64, len: u64) -> std::result::Result<Bytes, Failed> {
        for _ in 0..OPENED_AGAIN_MAX {
            match read(&*self.reader, self.path, at, len).await {
                // It was long enough, so it has changed since it was opened.
                Err(Fault::Diverged(_)) if self.is_ours() && self.reader.fingerprint().size >= at + len => {
                    self.reader = self.home.open_read(self.path, &self.expect).await?;
                }
                done => return Ok(done?),
            }
        }
        let why = format!("{} is written at home whenever it is read", self.path);
        Err(Failed { why, retry: true, diverged: false })
    }

    fn is_ours(&self) -> bool {
        matches!(self.expect, Expect::Ours(_))
    }
}

/// Recalls a range; it is in the volume when this returns, but not reported yet.
pub async fn transfer(
    client: &Client,
    home: &dyn Home,
    place: &HomePlace,
    recall: &Recall,
) -> std::result::Result<Option<Learned>, Failed> {
    let broken = |e: Error| Failed { why: e.to_string(), retry: false, diverged: false };
    let path = HomePath::parse(&place.path).map_err(broken)?;
    let expect = expect(home, &path, &place.expect).await?;
    let mut source = Source::open(home, &path, expect).await?;
    let (from, to) = (recall.work.from, recall.work.to);
    let blocks = blocks(&place.receipts, from, to);
    // A block that extends beyond the range is read whole, for its checksum.
    let first = blocks.first().map_or(from, |block| block.start.min(from));
    let last = blocks.last().map_or(to, |block| block.end.max(to));
    let is_proved = covers(&blocks, from, to);
    let mut check = Check::new(blocks);
    let mut sums = Sums::default();
    let stripe = recall.work.layout.stripe_bytes();
    let step = stripe * PART_BYTES.div_ceil(stripe);
    for (start, end, fills) in [(first, from, false), (from, to, true), (to, last, false)] {
        let mut at = start;
        while at < end {
            let len = (end - at).min(step);
            let bytes = source.read(at, len).await?;
            // A write to the same block invalidated the receipt, perhaps after it was looked up.
            check.feed(at, &bytes).map_err(|e| Failed {
                diverged: source.is_ours(),
                ..broken(e.doing(format_args!("read {path} at home")))
            })?;
            if fills {
                sums.feed(&bytes);
                client.mover().fill(recall, at, bytes).await.map_err(|e| Failed {
                    why: e.to_string(),
                    retry: true,
                    diverged: false,
                })?;
            }
            at += len;
        }
    }
    Ok((!is_proved).then(|| Learned { relation: place.relation, sums: sums.end() }))
}

/// How many bytes of `0..size` have a checksum; the blocks are in order.
pub fn covered(blocks: &[Block], size: u64) -> u64 {
    let (mut at, mut sum) = (0, 0);
    for block in blocks {
        sum += block.end.min(size).saturating_sub(block.start.max(at));
        at = at.max(block.end);
    }
    assert!(sum <= size, "more bytes have a checksum than the file has");
    sum
}

/// Whether all of `from..to` has a checksum; the blocks are in order.
fn covers(blocks: &[Block], from: u64, to: u64) -> bool {
    let mut at = from;
    for block in blocks.iter().take_while(|block| block.start <= to) {
        if block.start <= at {
            at = at.max(block.end);
        }
    }
    at >= to
}

/// Computes checksums of blocks from bytes that arrive in order.
#[derive(Default)]
struct Sums {
    done: Vec<u32>,
    now: u32,
    len: u64,
}

impl Sums {
    fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let n = (RECEIPT_BLOCK - self.len).min(bytes.len() as u64) as usize;
            self.now = crc32c_append(self.now, &bytes[..n]);
            (self.len, bytes) = (self.len + n as u64, &bytes[n..]);
            if self.len == RECEIPT_BLOCK {
                self.done.push(self.now);
                (self.now, self.len) = (0, 0);
            }
        }
        assert!(self.len < RECEIPT_BLOCK, "a checksum covers more than its block");
    }
    fn end(mut self) -> Vec<u32> {
        if self.len > 0 {
            self.done.push(self.now);
        }
        self.done
    }
}

/// All bytes of a range; `Diverged`: the file ends earlier.
pub async fn read(reader: &dyn HomeReader, path: &HomePath, at: u64, len: u64) -> Outcome<Bytes> {
    let mut bytes = BytesMut::with_capacity(len as usize);
    while (bytes.len() as u64) < len {
        let parts = reader.read_at(at + bytes.len() as u64, len as usize - bytes.len()).await?;
        if parts.iter().all(Bytes::is_empty) {
            let why = Error::stale(format!("{path} at home ends before byte {}", at + len));
            return Err(Fault::new(FaultKind::Diverged, path, why));
        }
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
    }
    Ok(bytes.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::checksum::crc32c;

    #[test]
    fn data_that_was_read_is_verified_by_blocks() {
        let bytes: Vec<u8> = (0..9_000_000u32).map(|i| (i / 5) as u8).collect();
        let wished: Vec<u32> = bytes.chunks(RECEIPT_BLOCK as usize).map(crc32c).collect();
        for step in [1 << 20, 999_983, 9_000_000] {
            let mut sums = Sums::default();
            bytes.chunks(step).for_each(|part| sums.feed(part));
            assert_eq!(sums.end(), wished);
        }
        let block = |start, end| Block { start, end, sum: 0 };
        assert!(covers(&[block(0, 5), block(5, 9)], 3, 9));
        assert!(!covers(&[block(0, 5), block(6, 9)], 3, 9));
        assert!(!covers(&[], 0, 1));
        assert_eq!(covered(&[block(0, 5), block(4, 9), block(12, 20)], 15), 12);
        assert_eq!(covered(&[], 15), 0);
    }

    #[test]
    fn a_block_within_another_one_is_an_error() {
        let receipt = |offset, bytes: &[u8]| {
            let (len, sums) = (bytes.len() as u64, vec![crc32c(bytes)]);
            Receipt { offset, len, sums }
        };
        let blocks = blocks(&[receipt(0, b"012345678"), receipt(2, b"23")], 0, 9);
        assert!(Check::new(blocks).feed(0, b"012345678").is_err());
    }

    #[test]
    fn data_other_than_what_was_shipped_is_found_in_any_parts() {
        let bytes: Vec<u8> = (0..9_000_000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let sums =
            |from: usize, to: usize| bytes[from..to].chunks(RECEIPT_BLOCK as usize).map(crc32c).collect();
        let receipts = [
            Receipt { offset: 5_000_000, len: 4_000_000, sums: sums(5_000_000, 9_000_000) },
            Receipt { offset: 0, len: 5_000_000, sums: sums(0, 5_000_000) },
        ];
        let all = blocks(&receipts, 100, 8_999_999);
        assert_eq!(
            all.iter().map(|b| (b.start, b.end)).collect::<Vec<_>>(),
            [(0, 4 << 20), (4 << 20, 5_000_000), (5_000_000, 9_000_000)]
        );
        for step in [1 << 20, 999_983, 9_000_000] {
            let feed = |bytes: &[u8]| {
                let mut check = Check::new(all.clone());
                bytes.chunks(step).enumerate().try_for_each(|(i, part)| check.feed((i * step) as u64, part))
            };
            feed(&bytes).unwrap();
            for damaged in [0, 4_999_999, 8_999_999] {
                let mut bad = bytes.clone();
                bad[damaged] ^= 1;
                let error = feed(&bad).unwrap_err().to_string();
                assert!(error.contains("are not what was shipped"), "{error}");
            }
        }
    }
}
